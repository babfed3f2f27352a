"""The verdict about a message and a group: a pure function of the evidence.

The first rule that applies decides. Rules about the message come first (it is absent, delayed,
half), then the newest copy for redelivery or dead letter, then the group's progress, and for a
message that the group has not reached, what keeps it from it.
"""

from collections.abc import Callable
from typing import NamedTuple

from penstock.client.diagnosis.message_evidence import MessageEvidence, RetryCopy, Unknown
from penstock.client.diagnosis.message_facts import (
    BLOCKED_MS,
    broadcast_offsets,
    held_since_ms,
    message_facts,
    owner_state,
    since_text,
)
from penstock.client.diagnosis.values import Explanation, MessagePlace, Verdict
from penstock.client.diagnosis.wording import (
    command_line,
    count_text,
    duration_text,
    moment_text,
)


class MessageConclusion(NamedTuple):
    """A verdict, its sentence and the next command."""

    verdict: Verdict
    text: str
    command: str | None


def decide_message(e: MessageEvidence) -> Explanation:
    """The chain of facts and the verdict."""
    conclusion = next(found for rule in _RULES for found in (rule(e),) if found is not None)
    return Explanation(
        wanted=e.wanted,
        group=e.group,
        message=e.message,
        facts=message_facts(e),
        verdict=conclusion.verdict,
        text=conclusion.text,
        command=conclusion.command,
        partial=e.partial,
    )


# --- commands ------------------------------------------------------------------------------------


def _again(e: MessageEvidence) -> str:
    topic = () if e.topic is None else ("--topic", e.topic)
    return command_line("explain", "message", e.wanted, "--group", e.group, *topic)


def _explain_group(e: MessageEvidence) -> str:
    return command_line("explain", "group", e.group)


def _group_members(e: MessageEvidence) -> str:
    return command_line("group", "members", e.group)


def _queue_owners(e: MessageEvidence) -> str:
    topic = () if e.topic is None else ("--topic", e.topic)
    return command_line("group", "describe", e.group, *topic)


def _show(place: MessagePlace) -> str:
    return command_line("message", "show", place.text)


# --- the message ---------------------------------------------------------------------------------


def _absent(e: MessageEvidence) -> MessageConclusion | None:
    if e.message is not None or e.half is not None or e.delayed is not None or _copies(e):
        return None
    if e.no_topic is not None:
        text = f"The message was not found: {e.no_topic}."
        return MessageConclusion(Verdict.NO_ROUTE, text, command_line("topic", "list"))
    if e.absence is not None and e.absence.is_deleted:
        return MessageConclusion(
            Verdict.DELETED,
            "The message is older than what the brokers still have: it was deleted.",
            None if e.topic is None else command_line("topic", "describe", e.topic),
        )
    if e.partial:
        text = "The message was not found, but the search was not complete"
        return MessageConclusion(Verdict.UNKNOWN, f"{text}: {e.partial[0]}.", _again(e))
    where = "in any topic" if e.topic is None else f"in the topic {e.topic}"
    return MessageConclusion(
        Verdict.NOT_FOUND,
        f"There is no such message {where}: check the id and the topic.",
        command_line("message", "find", e.wanted),
    )


def _copies(e: MessageEvidence) -> bool:
    retries = () if isinstance(e.retries, Unknown) else e.retries
    dead = () if isinstance(e.dead, Unknown) else e.dead
    return bool(retries or dead)


def _half(e: MessageEvidence) -> MessageConclusion | None:
    half = e.half
    if half is None or e.message is not None or e.delayed is not None:
        return None
    if half.resolved is True:
        return MessageConclusion(
            Verdict.ROLLED_BACK,
            f"The transaction was rolled back: the message was never visible in {half.topic}.",
            _show(half.place),
        )
    waits = duration_text(e.now_ms - half.place.store_ms)
    text = f"The transaction is neither committed nor rolled back; the broker waits for {waits}"
    if isinstance(half.resolved, Unknown):
        text = (
            f"The transaction was not committed, and its end is not known: {half.resolved.reason}"
        )
    return MessageConclusion(
        Verdict.HALF,
        f"{text}. Consumers see the message when it is committed.",
        command_line("transaction", "list", "--topic", half.topic),
    )


def _delayed(e: MessageEvidence) -> MessageConclusion | None:
    delayed = e.delayed
    if delayed is None or e.message is not None:
        return None
    command = command_line("scheduled", "list", "--topic", delayed.topic)
    if delayed.due_ms is None:
        text = "The message is delayed; its delivery time is not known."
    elif delayed.due_ms > e.now_ms:
        left = duration_text(delayed.due_ms - e.now_ms)
        text = (
            f"The message is delayed: it is delivered at {moment_text(delayed.due_ms)}, in {left}."
        )
    else:
        late = duration_text(e.now_ms - delayed.due_ms)
        text = (
            f"The message was due {late} ago and is not in {delayed.topic}: it was recalled, it is"
            " older than what the topic still has, or the broker is late."
        )
        return MessageConclusion(Verdict.UNKNOWN, text, command)
    return MessageConclusion(Verdict.DELAYED, text, command)


# --- redelivery ----------------------------------------------------------------------------------


def _dead_letter(e: MessageEvidence) -> MessageConclusion | None:
    if isinstance(e.dead, Unknown) or not e.dead:
        return None
    last, retry = e.dead[-1], _last_retry(e)
    if retry is not None and retry.place.store_ms >= last.store_ms:
        return None  # sent again after it became a dead letter
    return MessageConclusion(
        Verdict.DEAD_LETTER,
        f"The handler failed too often: the message is a dead letter of {e.group} since"
        f" {moment_text(last.store_ms)}. It is not delivered again.",
        command_line("dlq", "resend", e.group, "--id", last.message_id),
    )


def _last_retry(e: MessageEvidence) -> RetryCopy | None:
    return None if isinstance(e.retries, Unknown) or not e.retries else e.retries[-1]


def _retrying(e: MessageEvidence) -> MessageConclusion | None:
    last = _last_retry(e)
    if last is None:
        return None
    name = f"Redelivery {last.attempt}" if last.attempt else "The copy that was sent again"
    nobody = " No member is connected." if e.online is False else ""
    verdict = Verdict.NO_MEMBER if nobody else Verdict.RETRYING
    command = _explain_group(e) if nobody else _again(e)
    if last.waits:
        when = "is due"
        if last.due_ms is not None:
            left = duration_text(abs(last.due_ms - e.now_ms))
            when = f"is due in {left}" if last.due_ms > e.now_ms else f"was due {left} ago"
        failed = f"The handler failed {count_text(last.attempt, 'time')}. "
        return MessageConclusion(verdict, f"{failed}{name} {when}.{nobody}", command)
    if isinstance(last.committed, Unknown):
        text = f"Whether {name.lower()} is consumed is not known: {last.committed.reason}"
        return MessageConclusion(Verdict.UNKNOWN, f"{text}.", _again(e))
    if last.committed is not None and last.committed > last.place.offset:
        if e.pops:
            return _popped(e)
        return MessageConclusion(Verdict.CONSUMED, f"{name} was consumed by {e.group}.", _resend(e))
    text = f"{name} is in {last.place.topic} and not consumed yet.{nobody}"
    return MessageConclusion(verdict, text, command)


def _resend(e: MessageEvidence) -> str:
    at = e.message
    place = e.wanted if at is None else at.text
    return command_line("message", "resend", place, "--to-group", e.group)


def _gone(e: MessageEvidence) -> MessageConclusion | None:
    """Only dead letters that were sent again are left, or the copies are not known."""
    if e.message is not None:
        return None
    return MessageConclusion(
        Verdict.UNKNOWN, "The message itself is no longer in its topic.", _explain_group(e)
    )


# --- progress ------------------------------------------------------------------------------------


def _no_route(e: MessageEvidence) -> MessageConclusion | None:
    if e.route is not None:
        return None
    text = f"No NameServer has a route of {e.topic}: clients can't find its queues."
    return MessageConclusion(Verdict.NO_ROUTE, text, command_line("cluster", "status"))


def _no_group(e: MessageEvidence) -> MessageConclusion | None:
    if isinstance(e.settings, Unknown) or e.online is not False:
        return None
    if not e.settings and e.committed is None:
        text = f"The group {e.group} does not exist{e.similar}: check its name, or start a consumer"
        text += " of it."
        return MessageConclusion(Verdict.NO_GROUP, text, command_line("group", "list"))
    return None


def _broadcast(e: MessageEvidence) -> MessageConclusion | None:
    at = e.message
    if not e.broadcast or at is None or e.matches is False:
        return None
    offsets = broadcast_offsets(e)
    behind = [who for who, offset in offsets.items() if offset is not None and offset <= at.offset]
    if behind:
        have = "has" if len(behind) == 1 else "have"
        text = f"{len(behind)} of {count_text(len(offsets), 'member')} {have} not finished it:"
        text += f" {', '.join(behind)}."
        return _disabled(e) or MessageConclusion(Verdict.WAITING, text, _explain_group(e))
    if not offsets or None in offsets.values():
        text = (
            "The group is broadcasting: each member keeps its own offset, and not all of them"
            " tell it."
        )
        return MessageConclusion(Verdict.UNKNOWN, text, _explain_group(e))
    text = f"All {count_text(len(offsets), 'connected member')} of the broadcast group consumed it."
    return MessageConclusion(Verdict.CONSUMED, text, None)


def _popped(e: MessageEvidence) -> MessageConclusion:
    text = "A POP consumer received the message."
    if e.deliveries and e.deliveries[-1].success:
        text += " By a trace, its handler succeeded."
    return MessageConclusion(
        Verdict.POPPED,
        f"{text} Brokers do not report whether it was acknowledged; if it is not, it is delivered"
        " again after its invisible time.",
        _again(e),
    )


def _passed(e: MessageEvidence) -> MessageConclusion | None:
    passed = e.passed
    if isinstance(passed, Unknown):
        text = f"The committed offset of the group is not known: {passed.reason}."
        return MessageConclusion(Verdict.UNKNOWN, text, _again(e))
    if not passed:
        return None
    if e.matches is False:
        return _filtered(e)
    if isinstance(e.matches, Unknown):
        text = "The group is past the message, but whether its filter accepted it is not known"
        return MessageConclusion(Verdict.UNKNOWN, f"{text}: {e.matches.reason}.", _explain_group(e))
    if e.pops_in_order:
        text = f"The group {e.group} acknowledged the message: it pops in order, and its committed"
        return MessageConclusion(Verdict.CONSUMED, f"{text} offset is past it.", _resend(e))
    if e.pops:
        return _popped(e)
    text = f"The group {e.group} consumed the message: its committed offset is past it."
    if isinstance(e.retries, Unknown) or isinstance(e.dead, Unknown):
        text = "The group is past the message, but whether it failed and was stored again is not"
        return MessageConclusion(Verdict.UNKNOWN, f"{text} known.", _again(e))
    if e.deliveries and e.deliveries[-1].success:
        text += " A trace confirms it."
    elif e.online is False:
        text = (
            f"The committed offset of the group {e.group} is past the message: it was consumed, or"
            " the offset was set. No member is connected and no trace tells which."
        )
    return MessageConclusion(Verdict.CONSUMED, text, _resend(e))


def _filtered(e: MessageEvidence) -> MessageConclusion:
    mine, at = e.subscription, e.message
    assert mine is not None
    assert at is not None
    tag = "has no tag" if at.tags is None else f"has the tag {at.tags!r}"
    what = f"the message {tag}" if mine.tags is not None else "the message does not match it"
    return MessageConclusion(
        Verdict.FILTERED,
        f"The group does not receive the message: it subscribes with {mine.expression!r}, and"
        f" {what}.",
        _show(at),
    )


def _disabled(e: MessageEvidence) -> MessageConclusion | None:
    at = e.message
    assert at is not None
    settings = None if isinstance(e.settings, Unknown) else e.settings.get(at.broker)
    if settings is not None and not settings.consume_enabled:
        text = f"Consumption is disabled for {e.group} on {at.broker}."
        command = command_line("group", "create", e.group, "--enable", "--broker", at.broker)
        return MessageConclusion(Verdict.CONSUME_DISABLED, text, command)
    if settings is not None and e.broadcast and not settings.broadcast_enabled:
        text = f"Broadcasting is disabled for {e.group} on {at.broker}."
        command = command_line("group", "create", e.group, "--broadcast", "--broker", at.broker)
        return MessageConclusion(Verdict.CONSUME_DISABLED, text, command)
    if e.forbidden is True:
        text = f"The group {e.group} is forbidden to read {e.topic} on {at.broker}."
        return MessageConclusion(Verdict.CONSUME_DISABLED, text, _explain_group(e))
    return None


def _not_readable(e: MessageEvidence) -> MessageConclusion | None:
    at, route = e.message, e.route
    assert at is not None
    if isinstance(route, Unknown) or route is None:
        return None
    if at.broker in route.brokers and route.readable and at.queue_id < route.read_queues:
        return None
    return MessageConclusion(
        Verdict.NOT_READABLE,
        f"Consumers do not read queue {at.queue_id} of {at.broker}: check the permission and the"
        f" number of read queues of {e.topic}.",
        command_line("topic", "describe", e.topic or ""),
    )


def _no_member(e: MessageEvidence) -> MessageConclusion | None:
    if e.online is not False:
        return None
    text = f"No member of {e.group} is connected: start a consumer."
    return MessageConclusion(Verdict.NO_MEMBER, text, _explain_group(e))


def _not_subscribed(e: MessageEvidence) -> MessageConclusion | None:
    if not e.online or e.subscription is not None:
        return None
    if any(state.subscription(e.topic or "") is not None for state in e.states):
        text = f"Not all members of {e.group} subscribe to {e.topic}: the brokers have none."
    else:
        text = f"The group {e.group} does not subscribe to {e.topic}."
    return MessageConclusion(Verdict.NOT_SUBSCRIBED, text, _group_members(e))


def _not_matched(e: MessageEvidence) -> MessageConclusion | None:
    return _filtered(e) if e.matches is False else None


def _no_owner(e: MessageEvidence) -> MessageConclusion | None:
    at = e.message
    assert at is not None
    if not e.online or e.owner is not None:
        return None
    text = (
        f"No member of {e.group} owns queue {at.queue_id} of {at.broker}: a rebalance is under"
        " way, or the members' subscriptions differ."
    )
    return MessageConclusion(Verdict.NO_OWNER, text, _queue_owners(e))


# --- the consumer --------------------------------------------------------------------------------


def _in_memory(e: MessageEvidence) -> MessageConclusion | None:
    owned, at = owner_state(e), e.message
    if owned is None or at is None:
        return None
    owner, mine = owned
    info = mine.info
    if mine.paused and not (info is not None and info.cached_msg_count):
        text = f"{owner.client_id} has paused the queue: call resume() there."
        return MessageConclusion(Verdict.PAUSED, text, _group_members(e))
    if info is None or not info.cached_msg_count:
        return None
    low, high = info.cached_msg_min_offset, info.cached_msg_max_offset
    since = since_text(e, owner, mine)
    failure = "" if mine.failure is None else f" Its last failure: {mine.failure}."
    if low == at.offset:
        text = f"{owner.client_id} has received the message and not finished it{since}.{failure}"
        return MessageConclusion(Verdict.IN_WORK, text, _again(e))
    if low > at.offset:
        return None
    oldest = f"{at.topic}/{at.broker}/{at.queue_id}@{low}"
    if _is_stuck(e) or (owner.orderly and at.offset <= high):
        text = f"{owner.client_id} does not finish the message at offset {low}{since}."
        text += f" The messages after it wait.{failure}"
        return MessageConclusion(Verdict.BLOCKED, text, command_line("message", "show", oldest))
    if at.offset <= high:
        text = (
            f"{owner.client_id} has received the message. The group's offset passes it when the"
            f" earlier messages from offset {low} on are finished{since}.{failure}"
        )
        return MessageConclusion(Verdict.IN_WORK, text, _again(e))
    return None


def _is_stuck(e: MessageEvidence) -> bool:
    """Whether the owner of the queue has finished nothing for a long time."""
    owned = owner_state(e)
    since_ms = None if owned is None else held_since_ms(*owned)
    return since_ms is not None and e.now_ms - since_ms > BLOCKED_MS


def _waiting(e: MessageEvidence) -> MessageConclusion:
    at = e.message
    assert at is not None
    if e.online is None:
        text = "The message is not consumed; whether the group has members is not known."
        return MessageConclusion(Verdict.UNKNOWN, text, _explain_group(e))
    if e.committed is None:
        text = (
            f"The group {e.group} has no committed offset in the queue yet. A new group begins at"
            " the end of a queue unless its consumers start at the first message."
        )
        return MessageConclusion(Verdict.WAITING, text, _again(e))
    assert isinstance(e.committed, int)
    behind = at.offset - e.committed
    age = "" if e.lag_ms is None else f", {duration_text(e.lag_ms)} behind"
    text = (
        f"The message waits behind {count_text(behind, 'message')} of its queue{age}."
        if behind
        else f"The message is the next one of its queue{age}."
    )
    return MessageConclusion(Verdict.WAITING, text, _explain_group(e))


_RULES: tuple[Callable[[MessageEvidence], MessageConclusion | None], ...] = (
    _absent,
    _half,
    _delayed,
    _dead_letter,
    _retrying,
    _gone,
    _no_route,
    _no_group,
    _broadcast,
    _passed,
    _disabled,
    _no_member,
    _not_readable,
    _not_subscribed,
    _not_matched,
    _no_owner,
    _in_memory,
    _waiting,
)
