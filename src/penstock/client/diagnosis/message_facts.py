"""The chain of facts about a message and a group: pure functions of the evidence."""

from collections.abc import Callable

from penstock.client.diagnosis.message_evidence import (
    Known,
    MemberState,
    MessageEvidence,
    QueueStateOfMember,
    Unknown,
)
from penstock.client.diagnosis.values import Fact, FactKind, FactStatus
from penstock.client.diagnosis.wording import count_text, duration_text, moment_text

BLOCKED_MS = 60_000
"""A member that has finished nothing for this long blocks its queue."""
OK, PROBLEM, UNKNOWN = FactStatus.OK, FactStatus.PROBLEM, FactStatus.UNKNOWN


def message_facts(e: MessageEvidence) -> tuple[Fact, ...]:
    """The facts in the order of the chain, without those that do not apply."""
    return tuple(fact for read in _CHAIN for fact in (read(e),) if fact is not None)


def owner_state(e: MessageEvidence) -> tuple[MemberState, QueueStateOfMember] | None:
    """The owner of the queue and what it reports about the queue; None if it is not known."""
    owner, queue = e.owner, e.queue
    if isinstance(owner, MemberState) and queue is not None:
        return owner, owner.queues[queue]
    return None


# --- the message and its topic -------------------------------------------------------------------


def _message(e: MessageEvidence) -> Fact:
    at = e.message
    if at is not None:
        text = f"{at.text} on {moment_text(at.store_ms)}"
        if e.copies > 1:
            by = "key" if e.wanted in at.keys and e.wanted != at.unique_id else "id"
            text += f"; {e.copies} messages have this {by}, this is the newest"
        return Fact(FactKind.MESSAGE, OK, f"The message was stored at {text}.", at.json())
    if e.half is not None:
        ends = {True: "it was rolled back", False: "it is neither committed nor rolled back"}
        state = (
            "its end is not known"
            if isinstance(e.half.resolved, Unknown)
            else (ends[e.half.resolved])
        )
        return Fact(
            FactKind.MESSAGE,
            PROBLEM,
            f"The message is the half message of a transaction for {e.half.topic}; {state}. "
            f"Its producer was asked {count_text(e.half.checks, 'time')}.",
            {**e.half.place.json(), "real_topic": e.half.topic, "checks": e.half.checks},
        )
    if e.delayed is not None:
        due_ms = e.delayed.due_ms
        when = "at an unknown time" if due_ms is None else f"at {moment_text(due_ms)}"
        return Fact(
            FactKind.MESSAGE,
            PROBLEM,
            f"The message waits for its delivery to {e.delayed.topic} {when}.",
            {**e.delayed.place.json(), "real_topic": e.delayed.topic, "due_ms": due_ms},
        )
    return _absent(e)


def _absent(e: MessageEvidence) -> Fact:
    gone = e.absence
    evidence: dict[str, object] = {"how": e.how}
    if gone is not None:
        evidence |= {
            "made_ms": gone.made_ms,
            "earliest_ms": gone.earliest_ms,
            "min_offset": gone.min_offset,
            "max_offset": gone.max_offset,
        }
    if gone is not None and gone.is_deleted:
        if gone.offset is not None:
            why = f"the first offset that is left is {gone.min_offset}"
        else:
            assert gone.made_ms is not None
            assert gone.earliest_ms is not None
            why = (
                f"its id was made at {moment_text(gone.made_ms)}, and the oldest message of all"
                f" brokers is from {moment_text(gone.earliest_ms)}"
            )
        return Fact(FactKind.MESSAGE, PROBLEM, f"The message is deleted: {why}.", evidence)
    end = None if gone is None else gone.max_offset
    if gone is not None and gone.offset is not None and end is not None and gone.offset >= end:
        text = f"There is no message yet: the next offset is {end}."
        return Fact(FactKind.MESSAGE, PROBLEM, text, evidence)
    if e.partial:
        text = "The message was not found, but the search was not complete."
        return Fact(FactKind.MESSAGE, UNKNOWN, text, evidence)
    return Fact(FactKind.MESSAGE, PROBLEM, "The message was not found.", evidence)


def _route(e: MessageEvidence) -> Fact | None:
    if e.topic is None:
        return None
    route = e.route
    if isinstance(route, Unknown):
        return Fact(FactKind.ROUTE, UNKNOWN, f"The route of {e.topic} is unknown: {route.reason}")
    if route is None:
        return Fact(FactKind.ROUTE, PROBLEM, f"The NameServers have no route of {e.topic}.")
    evidence = {"brokers": list(route.brokers), "read_queues": route.read_queues}
    at = e.message
    where = f"on {at.broker}" if at is not None else "on all of its brokers"
    if at is not None and at.broker not in route.brokers:
        text = f"The route of {e.topic} does not contain {at.broker}, which has the message."
        return Fact(FactKind.ROUTE, PROBLEM, text, evidence)
    if not route.readable:
        text = f"The topic {e.topic} has no read permission {where}."
        return Fact(FactKind.ROUTE, PROBLEM, text, evidence)
    if at is not None and at.queue_id >= route.read_queues:
        queues = count_text(route.read_queues, "read queue")
        text = f"Queue {at.queue_id} is not read: {e.topic} has {queues}."
        return Fact(FactKind.ROUTE, PROBLEM, text, evidence)
    text = f"The topic {e.topic} is on {', '.join(route.brokers)} and can be read."
    if not route.master and at is not None:
        text += f" {at.broker} has no registered master: consumers read from a slave."
    return Fact(FactKind.ROUTE, OK, text, evidence)


# --- the group -----------------------------------------------------------------------------------


def _group(e: MessageEvidence) -> Fact | None:
    if e.topic is None:
        return None
    settings = e.settings
    if isinstance(settings, Unknown):
        text = f"Whether the group {e.group} exists is unknown: {settings.reason}"
        return Fact(FactKind.GROUP, UNKNOWN, text)
    if not settings:
        return Fact(FactKind.GROUP, PROBLEM, f"No broker has the group {e.group}.")
    evidence = {"brokers": sorted(settings)}
    broker = None if e.message is None else e.message.broker
    if broker is not None and broker not in settings:
        text = f"The group {e.group} exists on {', '.join(sorted(settings))}, not on {broker}."
        return Fact(FactKind.GROUP, PROBLEM, text, evidence)
    return Fact(FactKind.GROUP, OK, f"The group {e.group} exists.", evidence)


def _members(e: MessageEvidence) -> Fact | None:
    if e.topic is None:
        return None
    members = e.members
    if isinstance(members, Unknown):
        return Fact(FactKind.MEMBERS, UNKNOWN, f"The members are unknown: {members.reason}")
    ids = [member.client_id for member in members.members]
    evidence: dict[str, object] = {"members": ids, "model": members.model}
    if not ids and members.unreachable:
        text = f"No member was found, but {', '.join(members.unreachable)} can't be reached."
        return Fact(FactKind.MEMBERS, UNKNOWN, text, evidence)
    if not ids:
        return Fact(FactKind.MEMBERS, PROBLEM, f"The group {e.group} has no connected member.")
    model = " Each of them consumes all messages (broadcasting)." if e.broadcast else ""
    text = f"The group has {count_text(len(ids), 'connected member')}.{model}"
    return Fact(FactKind.MEMBERS, OK, text, evidence)


def _subscription(e: MessageEvidence) -> Fact | None:
    if e.topic is None or not e.online:
        return None
    mine = e.subscription
    others = {
        state.client_id: None if one is None else one.expression
        for state in e.states
        if state.problem is None
        for one in (state.subscription(e.topic),)
    }
    evidence: dict[str, object] = {
        "expression": None if mine is None else mine.expression,
        "kind": None if mine is None else mine.kind,
        "members": others,
    }
    if mine is None and not any(others.values()):
        text = f"The group does not subscribe to {e.topic}."
        return Fact(FactKind.SUBSCRIPTION, PROBLEM, text, evidence)
    if len(set(others.values())) > 1:
        shown = ", ".join(f"{who}: {text or 'none'}" for who, text in sorted(others.items()))
        text = f"The members subscribe to {e.topic} differently ({shown})."
        return Fact(FactKind.SUBSCRIPTION, PROBLEM, text, evidence)
    expression = mine.expression if mine is not None else next(iter(others.values()))
    text = f"The group subscribes to {e.topic} with {expression!r}."
    return Fact(FactKind.SUBSCRIPTION, OK, text, evidence)


def _filter(e: MessageEvidence) -> Fact | None:
    matches, mine, at = e.matches, e.subscription, e.message
    if mine is None or at is None:
        return None
    evidence = {"expression": mine.expression, "kind": mine.kind, "tags": at.tags}
    if isinstance(matches, Unknown):
        text = f"Whether the filter {mine.expression!r} accepts it is unknown: {matches.reason}"
        return Fact(FactKind.FILTER, UNKNOWN, text, evidence)
    tag = "no tag" if at.tags is None else f"the tag {at.tags!r}"
    what = f"the filter {mine.expression!r}" + ("" if mine.tags is None else f" ({tag})")
    if not matches:
        return Fact(FactKind.FILTER, PROBLEM, f"The message does not match {what}.", evidence)
    return Fact(FactKind.FILTER, OK, f"The message matches {what}.", evidence)


def _permission(e: MessageEvidence) -> Fact | None:
    if e.message is None or isinstance(e.settings, Unknown):
        return None
    settings = e.settings.get(e.message.broker)
    if settings is None:
        return None
    evidence: dict[str, object] = {
        "consume_enabled": settings.consume_enabled,
        "broadcast_enabled": settings.broadcast_enabled,
    }
    if not settings.consume_enabled:
        text = f"Consumption is disabled for the group on {e.message.broker}."
        return Fact(FactKind.PERMISSION, PROBLEM, text, evidence)
    if e.broadcast and not settings.broadcast_enabled:
        text = f"Broadcasting is disabled for the group on {e.message.broker}."
        return Fact(FactKind.PERMISSION, PROBLEM, text, evidence)
    if isinstance(e.forbidden, Unknown):
        text = f"Whether the group is forbidden to read the topic is unknown: {e.forbidden.reason}"
        return Fact(FactKind.PERMISSION, UNKNOWN, text, evidence)
    evidence["forbidden"] = e.forbidden
    if e.forbidden:
        text = f"The group is forbidden to read {e.topic} on {e.message.broker}."
        return Fact(FactKind.PERMISSION, PROBLEM, text, evidence)
    return Fact(FactKind.PERMISSION, OK, "The group is allowed to consume the topic.", evidence)


# --- delivery ------------------------------------------------------------------------------------


def _owner(e: MessageEvidence) -> Fact | None:
    if e.message is None or not e.online or e.broadcast:
        return None
    owner, at = e.owner, e.message
    if isinstance(owner, Unknown):
        text = f"The owner of queue {at.queue_id} of {at.broker} is unknown: {owner.reason}"
        return Fact(FactKind.OWNER, UNKNOWN, text)
    if owner is None:
        text = f"No member owns queue {at.queue_id} of {at.broker}."
        return Fact(FactKind.OWNER, PROBLEM, text, {"members": len(e.states)})
    text = f"The member {owner.client_id} owns queue {at.queue_id} of {at.broker}."
    return Fact(FactKind.OWNER, OK, text, {"client_id": owner.client_id})


def _progress(e: MessageEvidence) -> Fact | None:
    at = e.message
    if at is None or e.topic is None:
        return None
    if e.broadcast:
        return _broadcast_progress(e)
    committed = e.committed
    evidence = {
        "committed": None if isinstance(committed, Unknown) else committed,
        "offset": at.offset,
        "min_offset": _or_none(e.min_offset),
        "max_offset": _or_none(e.max_offset),
        "lag_ms": e.lag_ms,
    }
    if isinstance(committed, Unknown):
        text = f"The committed offset is unknown: {committed.reason}"
        return Fact(FactKind.PROGRESS, UNKNOWN, text, evidence)
    if committed is None:
        text = "The group has never committed an offset in the queue."
        return Fact(FactKind.PROGRESS, PROBLEM, text, evidence)
    if committed > at.offset:
        text = f"The group's committed offset {committed} is past the message."
        return Fact(FactKind.PROGRESS, OK, text, evidence)
    age = "" if e.lag_ms is None else f"; the first of them is {duration_text(e.lag_ms)} old"
    behind = at.offset - committed
    text = (
        f"The group's committed offset is {committed}: {count_text(behind, 'message')} of the"
        f" queue before this one{' is' if behind == 1 else ' are'} not committed{age}."
        if behind
        else f"The message is the next one to be committed{age.replace('the first of them', 'it')}."
    )
    return Fact(FactKind.PROGRESS, PROBLEM, text, evidence)


def _broadcast_progress(e: MessageEvidence) -> Fact:
    offsets = broadcast_offsets(e)
    at = e.message
    assert at is not None
    behind = [who for who, offset in offsets.items() if offset is not None and offset <= at.offset]
    silent = [who for who, offset in offsets.items() if offset is None]
    evidence: dict[str, object] = {"committed": offsets, "offset": at.offset}
    if behind:
        text = f"{', '.join(behind)} have not finished it; each member keeps its own offset."
        return Fact(FactKind.PROGRESS, PROBLEM, text, evidence)
    if silent or not offsets:
        text = "Each member keeps its own offset, and brokers do not know it."
        return Fact(FactKind.PROGRESS, UNKNOWN, text, evidence)
    return Fact(FactKind.PROGRESS, OK, "All connected members are past the message.", evidence)


def broadcast_offsets(e: MessageEvidence) -> dict[str, int | None]:
    """The offset of each member of a broadcast group in the message's queue, if it tells."""
    queue = e.queue
    found: dict[str, int | None] = {}
    for state in e.states:
        mine = None if queue is None else state.queues.get(queue)
        info = None if mine is None else mine.info
        found[state.client_id] = None if info is None else info.commit_offset
    return found


def _consumer(e: MessageEvidence) -> Fact | None:
    owned, at = owner_state(e), e.message
    if owned is None or at is None or e.broadcast or e.passed is True:
        return None
    owner, mine = owned
    info = mine.info
    if info is None:
        return None
    evidence: dict[str, object] = {
        "client_id": owner.client_id,
        "cached": info.cached_msg_count,
        "cached_min": info.cached_msg_min_offset if info.cached_msg_count else None,
        "cached_max": info.cached_msg_max_offset if info.cached_msg_count else None,
        "in_work_since_ms": mine.in_work_since_ms,
        "last_pull_ms": info.last_pull_timestamp or None,
        "last_consume_ms": info.last_consume_timestamp or None,
        "paused": mine.paused,
        "failure": mine.failure,
    }
    failure = "" if mine.failure is None else f" Its last failure: {mine.failure}."
    if mine.paused:
        text = f"{owner.client_id} has paused the queue.{failure}"
        return Fact(FactKind.CONSUMER, PROBLEM, text, evidence)
    if not info.cached_msg_count:
        text = f"{owner.client_id} has no message of the queue in work.{failure}"
        return Fact(FactKind.CONSUMER, OK if mine.failure is None else PROBLEM, text, evidence)
    low, high = info.cached_msg_min_offset, info.cached_msg_max_offset
    since = since_text(e, owner, mine)
    which = "this message" if low == at.offset else f"the message at offset {low}"
    text = (
        f"{owner.client_id} has {count_text(info.cached_msg_count, 'message')} of the queue"
        f" (offsets {low} to {high}); the oldest is {which}{since}.{failure}"
    )
    return Fact(FactKind.CONSUMER, OK, text, evidence)


def since_text(e: MessageEvidence, owner: MemberState, mine: QueueStateOfMember) -> str:
    """How long the oldest message of the owner is in work, as far as the member tells."""
    since_ms = held_since_ms(owner, mine)
    if since_ms is None:
        return ""
    spent = duration_text(e.now_ms - since_ms)
    if mine.in_work_since_ms is not None:
        return f", in work for {spent}"
    return f"; the last message was finished {spent} ago"


def held_since_ms(owner: MemberState, mine: QueueStateOfMember) -> int | None:
    """When the handler received the oldest message, or the last one was finished.

    Java's consumers tell only the latter. None: the member tells neither.
    """
    if mine.in_work_since_ms is not None:
        return mine.in_work_since_ms
    last_ms = 0 if mine.info is None else mine.info.last_consume_timestamp
    started_ms = owner.started_ms
    return last_ms if last_ms and started_ms is not None and last_ms >= started_ms else None


def _pop(e: MessageEvidence) -> Fact | None:
    if not e.pops or e.message is None:
        return None
    text = "The group consumes with POP"
    if e.pops_in_order and e.passed is True:
        why = "only acknowledgements move its offset"
        return Fact(FactKind.POP, OK, f"{text} in order; the message was acknowledged: {why}.")
    if e.passed is True:
        return Fact(
            FactKind.POP,
            UNKNOWN,
            f"{text}: the message was popped, and brokers do not report whether it was "
            "acknowledged.",
        )
    if e.pops_in_order:
        text = f"{text} in order; the message was not acknowledged yet."
        return Fact(FactKind.POP, OK, text)
    return Fact(FactKind.POP, OK, f"{text}; the message was not popped yet.")


def _retry(e: MessageEvidence) -> Fact | None:
    retries = e.retries
    if isinstance(retries, Unknown):
        return Fact(FactKind.RETRY, UNKNOWN, f"Redeliveries are unknown: {retries.reason}")
    if not retries:
        return None
    last = retries[-1]
    evidence: dict[str, object] = {
        **last.place.json(),
        "attempt": last.attempt,
        "due_ms": last.due_ms,
        "waits": last.waits,
        "committed": None if isinstance(last.committed, Unknown) else last.committed,
    }
    name = f"redelivery {last.attempt}" if last.attempt else "the copy that was sent again"
    if last.waits:
        when = "at an unknown time" if last.due_ms is None else f"at {moment_text(last.due_ms)}"
        text = f"The message waits for {name} {when}."
        return Fact(FactKind.RETRY, PROBLEM, text, evidence)
    if isinstance(last.committed, Unknown):
        text = f"Whether {name} is consumed is unknown: {last.committed.reason}"
        return Fact(FactKind.RETRY, UNKNOWN, text, evidence)
    where = f"{name} at {last.place.text}"
    if last.committed is not None and last.committed > last.place.offset:
        return Fact(FactKind.RETRY, OK, f"The group is past {where}.", evidence)
    return Fact(FactKind.RETRY, PROBLEM, f"The group has not consumed {where}.", evidence)


def _dead_letter(e: MessageEvidence) -> Fact | None:
    dead = e.dead
    if isinstance(dead, Unknown):
        return Fact(FactKind.DEAD_LETTER, UNKNOWN, f"Dead letters are unknown: {dead.reason}")
    if not dead:
        return None
    last = dead[-1]
    text = f"The message became a dead letter of the group on {moment_text(last.store_ms)}"
    text += f" and is stored at {last.text}."
    return Fact(FactKind.DEAD_LETTER, PROBLEM, text, last.json())


def _trace(e: MessageEvidence) -> Fact | None:
    if not e.deliveries:
        return None
    last = e.deliveries[-1]
    evidence: dict[str, object] = {
        "deliveries": len(e.deliveries),
        "time_ms": last.time_ms,
        "client_host": last.client_host,
        "attempt": last.attempt,
        "success": last.success,
        "cost_ms": last.cost_ms,
        "result": last.result,
    }
    when = "" if last.time_ms is None else f" at {moment_text(last.time_ms)}"
    what = f"{last.client_host} received the message{when}"
    if last.success is None:
        text = f"By its traces, {what}; there is no trace of the end."
        return Fact(FactKind.TRACE, UNKNOWN, text, evidence)
    spent = "" if last.cost_ms is None else f" after {duration_text(last.cost_ms)}"
    if last.success:
        text = f"By its traces, {what} and finished it{spent}."
        return Fact(FactKind.TRACE, OK, text, evidence)
    result = "" if last.result is None else f" ({last.result})"
    text = f"By its traces, {what} and its handler failed{spent}{result}."
    return Fact(FactKind.TRACE, PROBLEM, text, evidence)


def _or_none(value: Known[int]) -> int | None:
    return None if isinstance(value, Unknown) else value


_CHAIN: tuple[Callable[[MessageEvidence], Fact | None], ...] = (
    _message,
    _route,
    _group,
    _members,
    _subscription,
    _filter,
    _permission,
    _owner,
    _progress,
    _consumer,
    _pop,
    _retry,
    _dead_letter,
    _trace,
)
