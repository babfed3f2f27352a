"""The verdict about a group: each rule, from evidence alone."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.client.admin.async_admin import GroupProgress, QueueProgress
from penstock.client.diagnosis.group.group_decision import decide_group
from penstock.client.diagnosis.group.group_evidence import (
    DeadLetters,
    GroupEvidence,
    WaitingRetries,
)
from penstock.client.diagnosis.message_evidence import MemberState, QueueStateOfMember, Unknown
from penstock.client.diagnosis.values import Fact, FactKind, FactStatus, GroupVerdict
from penstock.wire.bodies.admin_bodies import ProcessQueueInfo
from penstock.wire.bodies.client_bodies import MessageQueue
from tests.unit.client.diagnosis.evidence_kit import NOW, QUEUE, SETTINGS, cached, members, state

RETRY_QUEUE = MessageQueue("%RETRY%billing", "broker-a", 0)


def at(
    committed: int | None, max_offset: int = 20, lag_ms: int | None = 0, queue: MessageQueue = QUEUE
) -> QueueProgress:
    return QueueProgress(queue, max_offset, committed, committed, lag_ms, None)


def progress(*queues: QueueProgress, unreachable: tuple[str, ...] = ()) -> GroupProgress:
    return GroupProgress("billing", queues, 2.5, unreachable)


def evidence(**changes: Any) -> GroupEvidence:
    """A healthy group; `changes` replace what was gathered."""
    values: dict[str, Any] = {
        "group": "billing",
        "now_ms": NOW,
        "settings": {"broker-a": SETTINGS},
        "members": members("m1"),
        "states": (state(),),
        "progress": progress(at(20)),
        "dead": DeadLetters(0, None),
        "read_queues": {"orders": (QUEUE,)},
    }
    return GroupEvidence(**{**values, **changes})


OFFLINE: dict[str, Any] = {"members": members(), "states": ()}
BROADCAST: dict[str, Any] = {
    "members": members("m1", model="BROADCASTING"),
    "states": (state("m1", ProcessQueueInfo(commit_offset=18)),),
    "progress": progress(),
    "ends": {QUEUE: 20},
}

CASES: list[tuple[GroupVerdict, dict[str, Any], str]] = [
    (GroupVerdict.HEALTHY, {}, "1 member, no message waits"),
    (GroupVerdict.HEALTHY, {"progress": progress(at(15, lag_ms=900))}, "5 messages not consumed"),
    (GroupVerdict.HEALTHY, {"progress": progress(at(None, 0, None), at(20))}, "no message waits"),
    (GroupVerdict.HEALTHY, BROADCAST, "broadcasting"),
    (
        GroupVerdict.HEALTHY,
        {"waiting_retries": WaitingRetries(1, is_partial=False)},
        "1 member, 1 message waits for the delay before redelivery.",
    ),
    (
        GroupVerdict.HEALTHY,
        {"waiting_retries": WaitingRetries(2, is_partial=True), "progress": progress(at(19))},
        "1 message not consumed yet; at least 2 messages wait for the delay before redelivery.",
    ),
    (
        GroupVerdict.HEALTHY,
        {"waiting_retries": WaitingRetries(0, is_partial=True)},
        "1 member, not all messages that wait for the delay before redelivery were counted.",
    ),
    (
        GroupVerdict.HEALTHY,
        {"waiting_retries": Unknown("no permission")},
        "messages that wait for the delay before redelivery are not counted.",
    ),
    (
        GroupVerdict.NO_GROUP,
        {**OFFLINE, "settings": {}, "progress": progress(), "read_queues": {}},
        "No broker has the group billing",
    ),
    (
        GroupVerdict.NO_GROUP,
        {
            **OFFLINE,
            "settings": {},
            "progress": progress(),
            "read_queues": {},
            "similar": " (similar groups: billings)",
        },
        "No broker has the group billing (similar groups: billings): check its name",
    ),
    (
        GroupVerdict.UNKNOWN,
        {
            **OFFLINE,
            "settings": {},
            "progress": progress(),
            "partial": ("broker-b has no master",),
        },
        "broker-b has no master",
    ),
    (
        GroupVerdict.CONSUME_DISABLED,
        {"settings": {"broker-a": replace(SETTINGS, consume_enabled=False)}},
        "disabled for the group on broker-a",
    ),
    (
        GroupVerdict.CONSUME_DISABLED,
        {"forbidden": ("orders on broker-a",)},
        "forbidden to read orders on broker-a",
    ),
    (GroupVerdict.NO_MEMBER, OFFLINE, "and 0 messages wait"),
    (GroupVerdict.NO_MEMBER, {**OFFLINE, "progress": progress(at(19))}, "1 message waits"),
    (
        GroupVerdict.NO_MEMBER,
        {**OFFLINE, "progress": progress(at(19), at(None, 3))},
        "an unknown number of messages wait",
    ),
    (
        GroupVerdict.NEVER_CONSUMED,
        {**OFFLINE, "progress": progress(at(None, 3))},
        "never committed",
    ),
    (
        GroupVerdict.DIFFERENT_SUBSCRIPTIONS,
        {
            "members": members("m1", "m2"),
            "states": (state("m1"), state("m2", expression="new", owns=False)),
        },
        "m1: *, m2: new",
    ),
    (GroupVerdict.PAUSED, {"states": (state("m1", paused=True),)}, "orders/broker-a/2"),
    (
        GroupVerdict.BLOCKED,
        {"states": (state("m1", cached(7, 9), in_work_since_ms=NOW - 61_000),)},
        "orders/broker-a/2@7 is with m1 for 1 min 1 s",
    ),
    (GroupVerdict.NO_OWNER, {"states": (state("m1", owns=False),)}, "owns orders/broker-a/2"),
    (
        GroupVerdict.BEHIND,
        {"progress": progress(at(12, lag_ms=120_000))},
        "the oldest of 8 messages that wait is 2 min old",
    ),
    (
        GroupVerdict.BEHIND,
        {"progress": progress(at(20), at(1, 3, 90_000, RETRY_QUEUE))},
        "the oldest of 2 messages",
    ),
    (GroupVerdict.DEAD_LETTERS, {"dead": DeadLetters(3, NOW)}, "has 3 dead letters"),
    (GroupVerdict.UNKNOWN, {"progress": Unknown("broker-a is down")}, "broker-a is down"),
    (GroupVerdict.UNKNOWN, {"members": Unknown("busy"), "states": ()}, "busy"),
    (GroupVerdict.UNKNOWN, {"progress": progress(at(None))}, "never committed in"),
    (GroupVerdict.UNKNOWN, {"partial": ("broker-b can't be reached",)}, "broker-b can't"),
    (
        GroupVerdict.UNKNOWN,
        {**BROADCAST, "states": (MemberState("m1", "timeout"),)},
        "not all members tell",
    ),
]


@pytest.mark.parametrize(
    ("verdict", "changes", "text"), CASES, ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)]
)
def test_verdicts(verdict: GroupVerdict, changes: dict[str, Any], text: str) -> None:
    found = decide_group(evidence(**changes))
    assert (found.verdict, text in found.text) == (verdict, True), found.text
    assert found.text.endswith(".")
    assert found.is_healthy is (verdict is GroupVerdict.HEALTHY)
    assert found.command is None or found.command.startswith("penstock ")
    order = list(FactKind)
    kinds = [order.index(fact.kind) for fact in found.facts]
    assert kinds == sorted(set(kinds))


def test_every_verdict_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(GroupVerdict)


def test_the_limit_of_behind_is_the_callers() -> None:
    late = evidence(progress=progress(at(12, lag_ms=120_000)))
    assert decide_group(late, behind_ms=300_000).verdict is GroupVerdict.HEALTHY
    assert decide_group(late).command == (
        "penstock explain message orders/broker-a/2@12 --group billing"
    )


def test_a_group_without_settings_can_not_be_described() -> None:
    assert decide_group(evidence(**OFFLINE)).command == "penstock group describe billing"
    for settings in ({}, Unknown("busy")):
        left = decide_group(evidence(**OFFLINE, settings=settings))
        assert (left.verdict, left.command) == (
            GroupVerdict.NO_MEMBER,
            "penstock explain group billing",
        )


def test_disabled_consumption_is_enabled_on_the_brokers_that_refuse_it() -> None:
    off = replace(SETTINGS, consume_enabled=False)
    found = decide_group(evidence(settings={"a": off, "b": SETTINGS, "c": off}))
    assert found.command == "penstock group create billing --enable --broker a --broker c"


def fact(kind: FactKind, **changes: Any) -> Fact:
    (found,) = [f for f in decide_group(evidence(**changes)).facts if f.kind is kind]
    return found


def test_lag_is_unknown_and_never_zero_where_nothing_was_committed() -> None:
    found = fact(FactKind.PROGRESS, progress=progress(at(12, lag_ms=10), at(None, 4)))
    assert found.status is FactStatus.UNKNOWN
    assert found.evidence["lag"] is None
    assert "never committed an offset in orders/broker-a/2" in found.text
    away = fact(FactKind.PROGRESS, progress=progress(at(20), unreachable=("broker-b",)))
    assert (away.status, "broker-b can't be reached" in away.text) == (FactStatus.UNKNOWN, True)
    assert fact(FactKind.PROGRESS, progress=progress()).status is FactStatus.UNKNOWN


@pytest.mark.parametrize(
    ("kind", "changes", "status", "text"),
    [
        (FactKind.MEMBERS, {"states": (MemberState("m1", "timeout"),)}, "unknown", "m1"),
        (FactKind.OWNER, {"states": (MemberState("m1", "timeout"),)}, "unknown", "timeout"),
        (FactKind.SUBSCRIPTION, {"read_queues": {"orders": None}}, "problem", "no route"),
        (FactKind.GROUP, {"settings": Unknown("busy")}, "unknown", "busy"),
        (FactKind.DEAD_LETTER, {"dead": Unknown("busy")}, "unknown", "busy"),
        (FactKind.DEAD_LETTER, {"dead": DeadLetters(1, NOW)}, "problem", "There is 1 dead letter"),
        (
            FactKind.RETRY,
            {"progress": progress(at(1, 3, 5, RETRY_QUEUE))},
            "problem",
            "2 messages in the retry topic are not consumed",
        ),
        (FactKind.RETRY, {"progress": progress(at(None, 3, None, RETRY_QUEUE))}, "unknown", "is"),
        (
            FactKind.POP,
            {"states": (MemberState("m1", queues={QUEUE: QueueStateOfMember(None)}),)},
            "unknown",
            "POP",
        ),
        (FactKind.CONSUMER, {"states": (state(failure="boom"),)}, "problem", "boom"),
        (
            FactKind.CONSUMER,
            {"states": (state("m1", cached(7, 9), in_work_since_ms=NOW - 5_000),)},
            "ok",
            "orders/broker-a/2@7, with m1 for 5 s",
        ),
        (FactKind.PROGRESS, BROADCAST, "ok", "m1 is 2 behind"),
    ],
)
def test_facts(kind: FactKind, changes: dict[str, Any], status: str, text: str) -> None:
    found = fact(kind, **changes)
    assert (found.status.value, text in found.text) == (status, True), found


@pytest.mark.parametrize(
    ("waiting", "status", "text", "delayed"),
    [
        (WaitingRetries(0, is_partial=False), FactStatus.OK, "retry topic.", 0),
        (WaitingRetries(1, is_partial=False), FactStatus.PROBLEM, "1 message waits for", 1),
        (WaitingRetries(0, is_partial=True), FactStatus.OK, "Not all messages that wait", 0),
        (Unknown("no permission"), FactStatus.OK, "are not counted: no permission", None),
    ],
)
def test_the_fact_about_redeliveries_has_those_that_wait(
    waiting: Any, status: FactStatus, text: str, delayed: int | None
) -> None:
    (fact,) = (
        fact
        for fact in decide_group(evidence(waiting_retries=waiting)).facts
        if fact.kind is FactKind.RETRY
    )
    assert (fact.status, fact.evidence) == (status, {"lag": 0, "delayed": delayed})
    assert text in fact.text
