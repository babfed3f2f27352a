"""The facts about a group: pure functions of the evidence."""

from collections.abc import Callable

from penstock.client.admin.async_admin import QueueProgress
from penstock.client.consumer.process_queue import queue_text
from penstock.client.diagnosis.group.group_evidence import GroupEvidence
from penstock.client.diagnosis.message_evidence import Unknown
from penstock.client.diagnosis.message_facts import BLOCKED_MS, held_since_ms
from penstock.client.diagnosis.values import Fact, FactKind, FactStatus
from penstock.client.diagnosis.wording import count_text, duration_text, moment_text
from penstock.wire.bodies.client_bodies import MessageQueue

BEHIND_MS = 60_000
"""A group whose oldest message waits longer is behind."""
NAMED_MAX = 5
"""Most queues that a sentence names."""
OK, PROBLEM, UNKNOWN = FactStatus.OK, FactStatus.PROBLEM, FactStatus.UNKNOWN


def group_facts(e: GroupEvidence) -> tuple[Fact, ...]:
    """The facts in the order of the chain, without those that do not apply."""
    return tuple(fact for read in _FACTS for fact in (read(e),) if fact is not None)


def named_queues(queues: tuple[MessageQueue, ...]) -> str:
    """The queues as text, the first of them by name."""
    more = f" and {len(queues) - NAMED_MAX} more" if len(queues) > NAMED_MAX else ""
    return ", ".join(map(queue_text, queues[:NAMED_MAX])) + more


def total_lag(queues: tuple[QueueProgress, ...]) -> int | None:
    """The messages that are not consumed; None if any queue's number is unknown."""
    lags = [queue.lag if queue.max_offset else 0 for queue in queues]
    known = [lag for lag in lags if lag is not None]
    return None if len(known) < len(lags) else sum(known)


def oldest_ms(queues: tuple[QueueProgress, ...]) -> int | None:
    """The age of the oldest message that is not consumed, in the queues where it is known."""
    return max((q.lag_ms for q in queues if q.lag_ms is not None), default=None)


# --- facts ---------------------------------------------------------------------------------------


def _group_fact(e: GroupEvidence) -> Fact:
    if isinstance(e.settings, Unknown):
        text = f"Whether the group exists is unknown: {e.settings.reason}"
        return Fact(FactKind.GROUP, UNKNOWN, text)
    if not e.settings:
        return Fact(FactKind.GROUP, PROBLEM, f"No broker has the group {e.group}.")
    brokers = sorted(e.settings)
    text = f"The group {e.group} is on {', '.join(brokers)}."
    return Fact(FactKind.GROUP, OK, text, {"brokers": brokers})


def _members_fact(e: GroupEvidence) -> Fact:
    if isinstance(e.members, Unknown):
        return Fact(FactKind.MEMBERS, UNKNOWN, f"The members are unknown: {e.members.reason}")
    ids = [member.client_id for member in e.members.members]
    silent = {state.client_id: state.problem for state in e.states if state.problem is not None}
    evidence: dict[str, object] = {
        "members": ids,
        "silent": silent,
        "model": e.members.model,
        "consume_type": e.members.consume_type,
    }
    if e.online is None:
        text = f"No member was found, but {', '.join(e.members.unreachable)} can't be reached."
        return Fact(FactKind.MEMBERS, UNKNOWN, text, evidence)
    if not ids:
        return Fact(FactKind.MEMBERS, PROBLEM, "No member is connected.", evidence)
    text = f"{count_text(len(ids), 'member')} {'is' if len(ids) == 1 else 'are'} connected"
    text += ", broadcasting." if e.broadcast else "."
    if silent:
        text += f" {len(silent)} of them did not answer: {', '.join(silent)}."
    return Fact(FactKind.MEMBERS, OK if not silent else UNKNOWN, text, evidence)


def _subscription_fact(e: GroupEvidence) -> Fact | None:
    if isinstance(e.members, Unknown) or not e.online:
        return None
    known = {s.topic: s.expression for s in e.members.subscriptions if s.topic in e.read_queues}
    evidence: dict[str, object] = {"subscriptions": known, "differing": e.differing}
    lost = [topic for topic, queues in e.read_queues.items() if queues is None]
    if e.differing:
        topics = ", ".join(e.differing)
        text = f"Members subscribe differently to {topics}."
        return Fact(FactKind.SUBSCRIPTION, PROBLEM, text, evidence)
    if lost:
        text = f"There is no route of the subscribed topics {', '.join(lost)}."
        return Fact(FactKind.SUBSCRIPTION, PROBLEM, text, evidence)
    if not known:
        return Fact(FactKind.SUBSCRIPTION, PROBLEM, "The group subscribes to no topic.", evidence)
    shown = ", ".join(f"{topic} ({expression})" for topic, expression in known.items())
    return Fact(FactKind.SUBSCRIPTION, OK, f"The group subscribes to {shown}.", evidence)


def _permission_fact(e: GroupEvidence) -> Fact | None:
    if isinstance(e.settings, Unknown) or not e.settings:
        return None
    disabled = disabled_brokers(e)
    evidence: dict[str, object] = {"disabled": disabled, "forbidden": list(e.forbidden)}
    if disabled:
        text = f"Consumption is disabled on {', '.join(disabled)}."
        return Fact(FactKind.PERMISSION, PROBLEM, text, evidence)
    if e.forbidden:
        text = f"The group is forbidden to read {', '.join(e.forbidden)}."
        return Fact(FactKind.PERMISSION, PROBLEM, text, evidence)
    return Fact(FactKind.PERMISSION, OK, "Consumption is enabled on all brokers.", evidence)


def disabled_brokers(e: GroupEvidence) -> list[str]:
    """The brokers on which the group may not consume."""
    if isinstance(e.settings, Unknown):
        return []
    return [name for name, settings in e.settings.items() if not settings.consume_enabled]


def _owner_fact(e: GroupEvidence) -> Fact | None:
    if not e.online or e.broadcast or e.pops:
        return None
    free = e.without_owner
    if isinstance(free, Unknown):
        return Fact(FactKind.OWNER, UNKNOWN, f"The owners of queues are unknown: {free.reason}")
    if free:
        text = f"No member owns {count_text(len(free), 'queue')}: {named_queues(free)}."
        return Fact(FactKind.OWNER, PROBLEM, text, {"queues": list(map(queue_text, free))})
    count = sum(len(queues or ()) for queues in e.read_queues.values())
    return Fact(FactKind.OWNER, OK, f"All {count_text(count, 'queue')} have an owner.")


def _progress_fact(e: GroupEvidence) -> Fact | None:
    if e.broadcast:
        return _broadcast_fact(e)
    if isinstance(e.progress, Unknown):
        return Fact(FactKind.PROGRESS, UNKNOWN, f"The progress is unknown: {e.progress.reason}")
    if not e.queues:
        return Fact(FactKind.PROGRESS, UNKNOWN, "The group has no committed offset in any topic.")
    lag, age_ms = total_lag(e.queues), oldest_ms(e.queues)
    never = e.never_committed
    evidence: dict[str, object] = {
        "lag": lag,
        "lag_ms": age_ms,
        "never_committed": list(map(queue_text, never)),
        "tps": e.progress.tps,
        "unreachable": list(e.progress.unreachable),
    }
    known = sum(queue.lag or 0 for queue in e.queues)
    text = f"{count_text(known, 'message')} {'waits' if known == 1 else 'wait'}"
    if age_ms:
        text += f"; the oldest is {duration_text(age_ms)} old"
    text += "."
    status = OK
    if never:
        status = UNKNOWN
        text += f" The group never committed an offset in {named_queues(never)}."
    if e.progress.unreachable:
        status = UNKNOWN
        text += f" {', '.join(e.progress.unreachable)} can't be reached."
    if age_ms is not None and age_ms > BEHIND_MS:
        status = PROBLEM
    return Fact(FactKind.PROGRESS, status, text, evidence)


def _broadcast_fact(e: GroupEvidence) -> Fact:
    lags = broadcast_lags(e)
    evidence: dict[str, object] = {"lag": lags}
    if not lags or None in lags.values():
        text = "Each member keeps its own offsets, and not all of them tell them."
        return Fact(FactKind.PROGRESS, UNKNOWN, text, evidence)
    shown = ", ".join(f"{who} is {lag} behind" for who, lag in lags.items())
    return Fact(FactKind.PROGRESS, OK, f"Each member keeps its own offsets: {shown}.", evidence)


def broadcast_lags(e: GroupEvidence) -> dict[str, int | None]:
    """For each member of a broadcast group, the messages that it has not finished."""
    found: dict[str, int | None] = {}
    for state in e.states:
        lags = [
            end - held.info.commit_offset
            for queue, end in e.ends.items()
            for held in (state.queues.get(queue),)
            if held is not None and held.info is not None
        ]
        found[state.client_id] = sum(lags) if len(lags) == len(e.ends) else None
    return found


def _consumer_fact(e: GroupEvidence) -> Fact | None:
    paused = tuple(queue for _, queue, held in e.held_queues if held.paused)
    failures = {queue_text(q): held.failure for _, q, held in e.held_queues if held.failure}
    oldest = oldest_in_work(e)
    evidence: dict[str, object] = {
        "paused": list(map(queue_text, paused)),
        "failures": failures,
        "oldest_in_work": None if oldest is None else oldest[1],
        "in_work_since_ms": None if oldest is None else oldest[0],
    }
    words = []
    if paused:
        words.append(f"{count_text(len(paused), 'queue')} paused by the application")
    if oldest is not None:
        words.append(f"the oldest message in work is {oldest[1]}, {oldest[2]}")
    if failures:
        words.append(f"the last failure: {next(iter(failures.values()))}")
    if not words:
        return None
    stuck = oldest is not None and e.now_ms - oldest[0] > BLOCKED_MS
    text = "; ".join(words)
    status = PROBLEM if paused or failures or stuck else OK
    return Fact(FactKind.CONSUMER, status, text[0].upper() + text[1:] + ".", evidence)


def oldest_in_work(e: GroupEvidence) -> tuple[int, str, str] | None:
    """Since when the oldest message is in work, its place and how it is held; None if unknown."""
    found = []
    for state, queue, held in e.held_queues:
        since_ms = held_since_ms(state, held)
        if since_ms is not None and held.info is not None and held.info.cached_msg_count:
            place = f"{queue_text(queue)}@{held.info.cached_msg_min_offset}"
            how = f"with {state.client_id} for {duration_text(e.now_ms - since_ms)}"
            found.append((since_ms, place, how))
    return min(found, default=None)


def _pop_fact(e: GroupEvidence) -> Fact | None:
    if not e.pops:
        return None
    text = "The group consumes with POP: brokers do not report which messages are in flight."
    return Fact(FactKind.POP, UNKNOWN, text)


def _retry_fact(e: GroupEvidence) -> Fact | None:
    if isinstance(e.progress, Unknown):
        return None
    lag = total_lag(e.retry_queues)
    if not lag:
        unknown = lag is None and any(q.max_offset for q in e.retry_queues)
        if unknown:
            text = "The number of messages that wait for redelivery is unknown."
            return Fact(FactKind.RETRY, UNKNOWN, text, {"lag": None})
        return _with_delayed(e, OK, "No message waits in the retry topic.", 0)
    text = f"{count_text(lag, 'message')} in the retry topic {'is' if lag == 1 else 'are'} not"
    return _with_delayed(e, PROBLEM, f"{text} consumed.", lag)


def _with_delayed(e: GroupEvidence, status: FactStatus, text: str, lag: int) -> Fact:
    """The fact about the retry topic, with the redeliveries that have not reached it yet."""
    waiting = e.waiting_retries
    if isinstance(waiting, Unknown):
        text += f" Redeliveries that wait for their delay are not counted: {waiting.reason}"
        return Fact(FactKind.RETRY, status, text, {"lag": lag, "delayed": None})
    if waiting.text is not None:
        text += f" {waiting.text[0].upper()}{waiting.text[1:]}."
        status = PROBLEM if waiting.count else status
    return Fact(FactKind.RETRY, status, text, {"lag": lag, "delayed": waiting.count})


def _dead_letter_fact(e: GroupEvidence) -> Fact:
    dead = e.dead
    if isinstance(dead, Unknown):
        return Fact(FactKind.DEAD_LETTER, UNKNOWN, f"Dead letters are unknown: {dead.reason}")
    evidence = {"count": dead.count, "newest_ms": dead.newest_ms}
    if not dead.count:
        return Fact(FactKind.DEAD_LETTER, OK, "There are no dead letters.", evidence)
    when = "" if dead.newest_ms is None else f"; the newest is from {moment_text(dead.newest_ms)}"
    text = f"There {'is' if dead.count == 1 else 'are'} {count_text(dead.count, 'dead letter')}"
    return Fact(FactKind.DEAD_LETTER, PROBLEM, f"{text}{when}.", evidence)


_FACTS: tuple[Callable[[GroupEvidence], Fact | None], ...] = (
    _group_fact,
    _members_fact,
    _subscription_fact,
    _permission_fact,
    _owner_fact,
    _progress_fact,
    _consumer_fact,
    _pop_fact,
    _retry_fact,
    _dead_letter_fact,
)
