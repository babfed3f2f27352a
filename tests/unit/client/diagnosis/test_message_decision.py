"""The verdict about a message: each rule, from evidence alone."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.client.diagnosis.message_decision import decide_message
from penstock.client.diagnosis.message_evidence import (
    Absence,
    DelayedCopy,
    HalfCopy,
    MemberState,
    QueueStateOfMember,
    RetryCopy,
    RouteEvidence,
    Unknown,
)
from penstock.client.diagnosis.traces import Delivery
from penstock.client.diagnosis.values import Fact, FactKind, FactStatus, Verdict
from penstock.wire.bodies.admin_bodies import ProcessQueueInfo
from tests.unit.client.diagnosis.evidence_kit import (
    NOW,
    QUEUE,
    SETTINGS,
    cached,
    evidence,
    members,
    place,
    state,
)

RETRY = place("%RETRY%billing", 3, reconsume_times=1)
DEAD = place("%DLQ%billing", 0, store_ms=NOW - 1_000)
POP_QUEUE = QueueStateOfMember(None)
ORDERLY = replace(state("m1", cached(8, 12)), orderly=True)
HALF = HalfCopy(place("RMQ_SYS_TRANS_HALF_TOPIC"), "orders", 2, resolved=False)
TIMER = place("rmq_sys_wheel_timer")

CASES: list[tuple[Verdict, dict[str, Any], str]] = [
    # --- the message
    (Verdict.NOT_FOUND, {"message": None, "absence": Absence(None, None)}, "no such message"),
    (Verdict.NOT_FOUND, {"message": None, "absence": Absence(None, None, 9, 3, 9)}, "no such"),
    (
        Verdict.NO_ROUTE,
        {"message": None, "route": None, "no_topic": "no broker has it; similar topics: orders"},
        "The message was not found: no broker has it; similar topics: orders.",
    ),
    (Verdict.DELETED, {"message": None, "absence": Absence(None, None, 2, 3, 9)}, "deleted"),
    (Verdict.DELETED, {"message": None, "absence": Absence(NOW - 9_000, NOW)}, "deleted"),
    (
        Verdict.UNKNOWN,
        {"message": None, "partial": ("broker-b can't be reached and was not searched",)},
        "broker-b can't be reached",
    ),
    (Verdict.HALF, {"message": None, "half": HALF}, "neither committed nor rolled back"),
    (
        Verdict.HALF,
        {"message": None, "half": replace(HALF, resolved=Unknown("no permission"))},
        "its end is not known: no permission",
    ),
    (Verdict.ROLLED_BACK, {"message": None, "half": replace(HALF, resolved=True)}, "rolled back"),
    (
        Verdict.DELAYED,
        {"message": None, "delayed": DelayedCopy(TIMER, "orders", NOW + 90_000)},
        "in 1 min 30 s",
    ),
    (
        Verdict.DELAYED,
        {"message": None, "delayed": DelayedCopy(TIMER, "orders", None)},
        "not known",
    ),
    (
        Verdict.UNKNOWN,
        {"message": None, "delayed": DelayedCopy(TIMER, "orders", NOW - 5_000)},
        "was due 5 s ago",
    ),
    # --- redelivery
    (Verdict.DEAD_LETTER, {"dead": (DEAD,)}, "dead letter of billing"),
    (Verdict.DEAD_LETTER, {"dead": (DEAD,), "message": None}, "dead letter of billing"),
    (Verdict.DEAD_LETTER, {"dead": (DEAD,), "retries": (RetryCopy(RETRY, 1),)}, "too often"),
    (
        Verdict.CONSUMED,
        {
            "dead": (DEAD,),
            "retries": (RetryCopy(replace(RETRY, store_ms=NOW), 0, committed=4),),
        },
        "The copy that was sent again was consumed",
    ),
    (
        Verdict.RETRYING,
        {"retries": (RetryCopy(RETRY, 2, NOW + 20_000, waits=True),)},
        "failed 2 times. Redelivery 2 is due in 20 s",
    ),
    (
        Verdict.RETRYING,
        {"retries": (RetryCopy(RETRY, 1, None, waits=True),)},
        "failed 1 time. Redelivery 1 is due.",
    ),
    (Verdict.RETRYING, {"retries": (RetryCopy(RETRY, 1, committed=3),)}, "not consumed yet"),
    (Verdict.RETRYING, {"retries": (RetryCopy(RETRY, 1, committed=None),)}, "not consumed yet"),
    (
        Verdict.NO_MEMBER,
        {"retries": (RetryCopy(RETRY, 1),), "members": members(), "states": ()},
        "No member is connected",
    ),
    (Verdict.CONSUMED, {"retries": (RetryCopy(RETRY, 1, committed=4),)}, "Redelivery 1 was"),
    (
        Verdict.UNKNOWN,
        {"retries": (RetryCopy(RETRY, 1, committed=Unknown("broker-a is down")),)},
        "broker-a is down",
    ),
    # --- progress
    (Verdict.CONSUMED, {}, "its committed offset is past it"),
    (
        Verdict.CONSUMED,
        {"members": members(), "states": ()},
        "it was consumed, or the offset was set. No member is connected and no trace tells which.",
    ),
    (
        Verdict.CONSUMED,
        {
            "members": members(),
            "states": (),
            "deliveries": (Delivery("billing", NOW, "10.0.0.1", 0, True),),
        },
        "is past it. A trace confirms it.",
    ),
    (Verdict.FILTERED, {"members": members("m1", expression="old || paid")}, "has the tag 'new'"),
    (
        Verdict.FILTERED,
        {
            "members": members("m1", expression="a > 1", kind="SQL92"),
            "sql_matches": False,
            "committed": 5,
        },
        "does not match it",
    ),
    (
        Verdict.UNKNOWN,
        {
            "members": members("m1", expression="a > 1", kind="SQL92"),
            "sql_matches": Unknown("the broker does not support SQL92"),
        },
        "does not support SQL92",
    ),
    (Verdict.POPPED, {"pops": True}, "Brokers do not report whether it was acknowledged"),
    (
        Verdict.POPPED,
        {"pops": True, "deliveries": (Delivery("billing", NOW, "10.0.0.9", 0, success=True),)},
        "its handler succeeded. Brokers do not report",
    ),
    (
        Verdict.CONSUMED,
        {"pops": True, "settings": {"broker-a": replace(SETTINGS, orderly=True)}},
        "acknowledged the message",
    ),
    (Verdict.POPPED, {"pops": True, "retries": (RetryCopy(RETRY, 1, committed=4),)}, "POP"),
    (Verdict.UNKNOWN, {"committed": Unknown("no permission")}, "no permission"),
    (Verdict.UNKNOWN, {"retries": Unknown("no unique id")}, "past the message, but"),
    # --- what keeps the group from the message
    (Verdict.NO_ROUTE, {"route": None}, "No NameServer has a route"),
    (
        Verdict.NO_GROUP,
        {"settings": {}, "members": members(), "states": (), "committed": None},
        "does not exist",
    ),
    (
        Verdict.CONSUME_DISABLED,
        {"settings": {"broker-a": replace(SETTINGS, consume_enabled=False)}, "committed": 5},
        "Consumption is disabled",
    ),
    (Verdict.CONSUME_DISABLED, {"forbidden": True, "committed": 5}, "forbidden to read orders"),
    (Verdict.NO_MEMBER, {"members": members(), "states": (), "committed": 5}, "start a consumer"),
    (
        Verdict.UNKNOWN,
        {"members": members(unreachable=("broker-b",)), "states": (), "committed": 5},
        "whether the group has members is not known",
    ),
    (
        Verdict.NOT_READABLE,
        {"route": RouteEvidence(("broker-a",), False, 4, True), "committed": 5},
        "do not read queue 2",
    ),
    (
        Verdict.NOT_READABLE,
        {"route": RouteEvidence(("broker-a",), True, 2, True), "committed": 5},
        "do not read queue 2",
    ),
    (
        Verdict.NOT_SUBSCRIBED,
        {
            "members": members("m1", subscriptions=()),
            "states": (state(expression=None),),
            "committed": 5,
        },
        "does not subscribe",
    ),
    (
        Verdict.NOT_SUBSCRIBED,
        {"members": members("m1", "m2", subscriptions=()), "committed": 5},
        "Not all members",
    ),
    (Verdict.FILTERED, {"members": members("m1", expression="old"), "committed": 5}, "the tag"),
    (Verdict.NO_OWNER, {"states": (state(owns=False),), "committed": 5}, "owns queue 2"),
    # --- the consumer
    (
        Verdict.PAUSED,
        {"states": (state("m1", ProcessQueueInfo(), paused=True),), "committed": 5},
        "has paused the queue",
    ),
    (
        Verdict.IN_WORK,
        {"states": (state("m1", cached(10, 12), in_work_since_ms=NOW - 5_000),), "committed": 10},
        "in work for 5 s",
    ),
    (
        Verdict.IN_WORK,
        {"states": (state("m1", cached(8, 12), in_work_since_ms=NOW - 5_000),), "committed": 8},
        "from offset 8 on",
    ),
    (Verdict.BLOCKED, {"states": (ORDERLY,), "committed": 8}, "message at offset 8"),
    (
        Verdict.BLOCKED,
        {"states": (state("m1", cached(8, 9), in_work_since_ms=NOW - 120_000),), "committed": 8},
        "offset 8, in work for 2 min",
    ),
    (
        Verdict.BLOCKED,
        {
            "states": (
                state("m1", cached(8, 9, last_consume_timestamp=NOW - 120_000), failure="boom"),
            ),
            "committed": 8,
        },
        "finished 2 min ago. The messages after it wait. Its last failure: boom",
    ),
    (Verdict.WAITING, {"committed": 5, "lag_ms": 90_000}, "behind 5 messages of its queue, 1 min"),
    (Verdict.WAITING, {"committed": 10}, "the next one of its queue"),
    (Verdict.WAITING, {"committed": None}, "no committed offset"),
    (Verdict.WAITING, {"states": (state("m1", cached(6, 8)),), "committed": 6}, "behind 4"),
    (
        Verdict.WAITING,
        {"states": (MemberState("m1", "timeout"),), "committed": 5},
        "behind 5 messages",
    ),
    # --- broadcasting
    (
        Verdict.CONSUMED,
        {
            "members": members("m1", model="BROADCASTING"),
            "states": (state("m1", ProcessQueueInfo(commit_offset=11)),),
            "committed": None,
        },
        "All 1 connected member of the broadcast group",
    ),
    (
        Verdict.WAITING,
        {
            "members": members("m1", "m2", model="BROADCASTING"),
            "states": (
                state("m1", ProcessQueueInfo(commit_offset=11)),
                state("m2", ProcessQueueInfo(commit_offset=9)),
            ),
            "committed": None,
        },
        "1 of 2 members has not finished it: m2",
    ),
    (
        Verdict.UNKNOWN,
        {
            "members": members("m1", model="BROADCASTING"),
            "states": (MemberState("m1", "timeout"),),
            "committed": None,
        },
        "broadcasting",
    ),
    (
        Verdict.CONSUME_DISABLED,
        {
            "members": members("m1", model="BROADCASTING"),
            "states": (state("m1", ProcessQueueInfo(commit_offset=9)),),
            "settings": {"broker-a": replace(SETTINGS, broadcast_enabled=False)},
            "committed": None,
        },
        "Broadcasting is disabled",
    ),
]


@pytest.mark.parametrize(
    ("verdict", "changes", "text"), CASES, ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)]
)
def test_verdicts(verdict: Verdict, changes: dict[str, Any], text: str) -> None:
    found = decide_message(evidence(**changes))
    assert (found.verdict, text in found.text) == (verdict, True), found.text
    assert found.text.endswith(".")
    assert found.is_consumed is (verdict is Verdict.CONSUMED)
    assert found.command is None or found.command.startswith("penstock ")
    for fact in found.facts:
        assert fact.text[0].isupper() or fact.text.startswith(("m1", "m2")), fact


def test_every_verdict_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(Verdict)


def test_the_facts_are_in_the_order_of_the_chain() -> None:
    order = list(FactKind)
    for _, changes, _ in CASES:
        kinds = [order.index(fact.kind) for fact in decide_message(evidence(**changes)).facts]
        assert kinds == sorted(set(kinds))


def fact(kind: FactKind, **changes: Any) -> Fact:
    (found,) = [f for f in decide_message(evidence(**changes)).facts if f.kind is kind]
    return found


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        (FactKind.ROUTE, {"route": Unknown("no NameServer")}, "no NameServer"),
        (FactKind.GROUP, {"settings": Unknown("broker-a is down")}, "broker-a is down"),
        (FactKind.MEMBERS, {"members": Unknown("broker-a is down")}, "broker-a is down"),
        (FactKind.PERMISSION, {"forbidden": Unknown("no permission")}, "no permission"),
        (FactKind.OWNER, {"states": (MemberState("m1", "timeout"),)}, "timeout"),
        (FactKind.PROGRESS, {"committed": Unknown("busy")}, "busy"),
        (FactKind.POP, {"pops": True}, "acknowledged"),
        (FactKind.RETRY, {"retries": Unknown("no unique id")}, "no unique id"),
        (FactKind.DEAD_LETTER, {"dead": Unknown("no unique id")}, "no unique id"),
        (
            FactKind.MEMBERS,
            {"members": members(unreachable=("broker-b",)), "states": ()},
            "broker-b can't be reached",
        ),
    ],
)
def test_what_is_not_known_is_said_as_unknown(
    kind: FactKind, changes: dict[str, Any], reason: str
) -> None:
    found = fact(kind, **changes)
    assert found.status is FactStatus.UNKNOWN
    assert reason in found.text


@pytest.mark.parametrize(
    ("success", "status", "text"),
    [
        (True, FactStatus.OK, "finished it after 12 ms"),
        (False, FactStatus.PROBLEM, "its handler failed after 12 ms (exception)"),
        (None, FactStatus.UNKNOWN, "no trace of the end"),
    ],
)
def test_traces_tell_who_received_the_message(
    success: bool | None, status: FactStatus, text: str
) -> None:
    delivery = Delivery("billing", NOW, "10.0.0.9", 0, success, 12, "exception")
    found = fact(FactKind.TRACE, deliveries=(delivery,))
    assert (found.status, text in found.text) == (status, True), found
    verdict = decide_message(evidence(deliveries=(delivery,)))
    assert ("A trace confirms it." in verdict.text) is bool(success)


def test_members_with_different_subscriptions_are_named() -> None:
    both = (state("m1", expression="new"), state("m2", expression="old", owns=False))
    found = fact(FactKind.SUBSCRIPTION, states=both, members=members("m1", "m2"))
    assert found.status is FactStatus.PROBLEM
    assert "m1: new, m2: old" in found.text
    assert found.evidence["members"] == {"m1": "new", "m2": "old"}


def test_a_broker_that_lacks_the_group_or_the_topic_is_named() -> None:
    group = fact(FactKind.GROUP, settings={"broker-b": SETTINGS})
    assert (group.status, "not on broker-a" in group.text) == (FactStatus.PROBLEM, True)
    route = RouteEvidence(("broker-b",), readable=False, read_queues=0, master=False)
    assert "does not contain broker-a" in fact(FactKind.ROUTE, route=route, committed=5).text


def test_a_popped_queue_belongs_to_its_member() -> None:
    popper = MemberState("m1", queues={QUEUE: POP_QUEUE})
    found = decide_message(evidence(states=(popper,), pops=True, committed=5))
    assert found.verdict is Verdict.WAITING
    assert fact(FactKind.OWNER, states=(popper,)).evidence == {"client_id": "m1"}


def test_commands_are_quoted_for_the_shell() -> None:
    found = decide_message(evidence(group="a b", committed=5))
    assert found.command == "penstock explain group 'a b'"


@pytest.mark.parametrize(("wanted", "by"), [("order-7", "key"), ("the-id", "id")])
def test_the_fact_says_what_several_messages_have_in_common(wanted: str, by: str) -> None:
    message = replace(place("orders", 7), keys=("order-7",))
    found = decide_message(evidence(message=message, copies=20, wanted=wanted))
    assert f"; 20 messages have this {by}, this is the newest" in found.facts[0].text
