"""The verdict about a group: a pure function of the evidence.

The first rule that applies decides, from what stops the whole group to what only delays it.
"""

from collections.abc import Callable
from typing import NamedTuple

from penstock.client.diagnosis.group.group_evidence import GroupEvidence
from penstock.client.diagnosis.group.group_facts import (
    BEHIND_MS,
    broadcast_lags,
    disabled_brokers,
    group_facts,
    named_queues,
    oldest_in_work,
    oldest_ms,
    total_lag,
)
from penstock.client.diagnosis.message_evidence import Unknown
from penstock.client.diagnosis.message_facts import BLOCKED_MS
from penstock.client.diagnosis.values import GroupExplanation, GroupVerdict
from penstock.client.diagnosis.wording import command_line, count_text, duration_text


class GroupConclusion(NamedTuple):
    """A verdict, its sentence and the next command."""

    verdict: GroupVerdict
    text: str
    command: str | None = None


def decide_group(e: GroupEvidence, *, behind_ms: int = BEHIND_MS) -> GroupExplanation:
    """The facts and the verdict; a group whose oldest message waits longer is behind."""
    rules = (*_RULES, lambda e: _behind(e, behind_ms), _unclear, _dead_letters, _healthy)
    conclusion = next(found for rule in rules for found in (rule(e),) if found is not None)
    return GroupExplanation(
        e.group, group_facts(e), conclusion.verdict, conclusion.text, conclusion.command, e.partial
    )


def _no_group(e: GroupEvidence) -> GroupConclusion | None:
    if isinstance(e.settings, Unknown) or e.settings or e.online is not False or e.queues:
        return None
    if e.partial:
        text = f"The group {e.group} was not found, but not all brokers were asked: {e.partial[0]}."
        return GroupConclusion(GroupVerdict.UNKNOWN, text, command_line("cluster", "status"))
    text = f"No broker has the group {e.group}{e.similar}: check its name, or start a consumer of"
    text += " it."
    return GroupConclusion(GroupVerdict.NO_GROUP, text, command_line("group", "list"))


def _disabled(e: GroupEvidence) -> GroupConclusion | None:
    brokers = disabled_brokers(e)
    if brokers:
        text = f"Consumption is disabled for the group on {', '.join(brokers)}."
        on = (word for broker in brokers for word in ("--broker", broker))
        command = command_line("group", "create", e.group, "--enable", *on)
    elif e.forbidden:
        text = f"The group is forbidden to read {', '.join(e.forbidden)}."
        command = _again(e)
    else:
        return None
    return GroupConclusion(GroupVerdict.CONSUME_DISABLED, text, command)


def _no_member(e: GroupEvidence) -> GroupConclusion | None:
    if e.online is not False:
        return None
    if not any(queue.committed is not None for queue in e.queues):
        text = "No member is connected, and the group has never committed an offset."
        return GroupConclusion(
            GroupVerdict.NEVER_CONSUMED, f"{text} Start a consumer.", _describe(e)
        )
    lag = total_lag(e.queues)
    waits = "an unknown number of messages" if lag is None else count_text(lag, "message")
    text = (
        f"No member is connected, and {waits} {'waits' if lag == 1 else 'wait'}. Start a consumer."
    )
    return GroupConclusion(GroupVerdict.NO_MEMBER, text, _describe(e))


def _differing(e: GroupEvidence) -> GroupConclusion | None:
    if not e.differing:
        return None
    topic, members = next(iter(e.differing.items()))
    shown = ", ".join(f"{who}: {text or 'none'}" for who, text in sorted(members.items()))
    return GroupConclusion(
        GroupVerdict.DIFFERENT_SUBSCRIPTIONS,
        f"Members subscribe to {topic} differently ({shown}). All members of a group must have the"
        " same subscriptions: messages are lost for some of them.",
        command_line("group", "members", e.group),
    )


def _paused(e: GroupEvidence) -> GroupConclusion | None:
    paused = tuple(queue for _, queue, held in e.held_queues if held.paused)
    if not paused:
        return None
    text = f"The application has paused {named_queues(paused)}: call resume() there."
    return GroupConclusion(GroupVerdict.PAUSED, text, _describe(e))


def _blocked(e: GroupEvidence) -> GroupConclusion | None:
    oldest = oldest_in_work(e)
    if oldest is None or e.now_ms - oldest[0] <= BLOCKED_MS:
        return None
    _, place, how = oldest
    text = f"The message {place} is {how} and not finished; its queue does not advance."
    return GroupConclusion(GroupVerdict.BLOCKED, text, command_line("message", "show", place))


def _no_owner(e: GroupEvidence) -> GroupConclusion | None:
    free = e.without_owner
    if not e.online or e.broadcast or e.pops or isinstance(free, Unknown) or not free:
        return None
    text = f"No member owns {named_queues(free)}: a rebalance is under way, or members disagree."
    return GroupConclusion(GroupVerdict.NO_OWNER, text, _describe(e))


def _behind(e: GroupEvidence, behind_ms: int) -> GroupConclusion | None:
    queues = (*e.queues, *e.retry_queues)
    age_ms = oldest_ms(queues)
    if age_ms is None or age_ms <= behind_ms:
        return None
    lag = sum(queue.lag or 0 for queue in queues)
    slowest = max(queues, key=lambda queue: queue.lag_ms or 0)
    assert slowest.committed is not None
    at = slowest.queue
    place = f"{at.topic}/{at.broker_name}/{at.queue_id}@{slowest.committed}"
    text = f"The group is behind: the oldest of {count_text(lag, 'message')} that"
    text += f" {'waits' if lag == 1 else 'wait'} is {duration_text(age_ms)} old."
    return GroupConclusion(
        GroupVerdict.BEHIND, text, command_line("explain", "message", place, "--group", e.group)
    )


def _unclear(e: GroupEvidence) -> GroupConclusion | None:
    reasons = [
        *(
            f"{what} not known: {value.reason}"
            for what, value in (
                ("the members are", e.members),
                ("the progress is", e.progress),
            )
            if isinstance(value, Unknown)
        ),
        *e.partial,
    ]
    if e.never_committed and not e.broadcast:
        reasons.append(f"the group never committed in {named_queues(e.never_committed)}")
    if e.broadcast and None in broadcast_lags(e).values():
        reasons.append("not all members tell their offsets")
    if not reasons:
        return None
    text = f"No problem was found, but the state is not fully known: {reasons[0]}."
    return GroupConclusion(GroupVerdict.UNKNOWN, text, _again(e))


def _dead_letters(e: GroupEvidence) -> GroupConclusion | None:
    if isinstance(e.dead, Unknown) or not e.dead.count:
        return None
    text = f"The group consumes, but has {count_text(e.dead.count, 'dead letter')}."
    return GroupConclusion(GroupVerdict.DEAD_LETTERS, text, command_line("dlq", "list", e.group))


def _healthy(e: GroupEvidence) -> GroupConclusion:
    assert not isinstance(e.members, Unknown)
    count = len(e.members.members)
    if e.broadcast:
        text = f"The group consumes: {count_text(count, 'member')}, broadcasting."
        return GroupConclusion(GroupVerdict.HEALTHY, text)
    lag = total_lag(e.queues)
    waits = "no message waits" if not lag else f"{count_text(lag, 'message')} not consumed yet"
    waiting = e.waiting_retries
    if isinstance(waiting, Unknown):
        waits += "; messages that wait for the delay before redelivery are not counted"
    elif waiting.text is not None:
        waits = waiting.text if not lag else f"{waits}; {waiting.text}"
    text = f"The group consumes: {count_text(count, 'member')}, {waits}."
    return GroupConclusion(GroupVerdict.HEALTHY, text)


def _describe(e: GroupEvidence) -> str:
    """Settings, members, and the offset, lag and owner of each queue; it needs the settings."""
    if isinstance(e.settings, Unknown) or not e.settings:
        return _again(e)
    return command_line("group", "describe", e.group)


def _again(e: GroupEvidence) -> str:
    return command_line("explain", "group", e.group)


_RULES: tuple[Callable[[GroupEvidence], GroupConclusion | None], ...] = (
    _no_group,
    _disabled,
    _no_member,
    _differing,
    _paused,
    _blocked,
    _no_owner,
)
