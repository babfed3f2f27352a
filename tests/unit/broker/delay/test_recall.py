"""Recall of timer messages: a recalled message is never delivered."""

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.delay.recall_handle import read_recall_handle
from penstock.config import Settings
from penstock.rpc.answers import EncodedReply
from penstock.rpc.command import Command
from penstock.wire.codes import RequestCode
from tests.store_kit import small_config
from tests.unit.broker.broker_kit import NOW_MS, BrokerFixture
from tests.unit.broker.delay.timer_kit import (
    DAY_MS,
    HOUR_MS,
    TIMER,
    advance,
    advance_in_steps,
    bodies,
    handle_of,
    open_broker,
    recall,
    send,
    stored,
)

ILLEGAL = 604


@pytest.fixture
def env(tmp_path: Path) -> Iterator[BrokerFixture]:
    made = open_broker(tmp_path / "store")
    made.send(body=b"x")
    made.send(body=b"x", topic="U")
    yield made
    made.close()


def handle(topic: str, broker: str, time: object, key: str, version: str = "v1") -> str:
    return base64.urlsafe_b64encode(f"{version} {topic} {broker} {time} {key}".encode()).decode()


def test_the_handle_has_the_format_of_rocketmq(env: BrokerFixture) -> None:
    answer = send(env, 2500)
    assert answer.ext is not None
    text = base64.urlsafe_b64decode(answer.ext["recallHandle"]).decode()
    key = answer.ext["transactionId"]
    assert text == f"v1 T broker-a {env.now_ms + 2001} {key}"


def test_there_is_no_handle_without_a_delivery_time(env: BrokerFixture) -> None:
    for properties in ({}, {"DELAY": "1"}, {"TIMER_DELAY_MS": "0"}):
        answer = env.send(properties=properties)
        assert answer.ext is not None
        assert "recallHandle" not in answer.ext


def test_a_recalled_message_is_not_delivered(env: BrokerFixture) -> None:
    answer = send(env, 5000, b"no")
    send(env, 5000, b"yes")
    done = recall(env, handle_of(answer))
    assert done.code == 0
    assert done.ext is not None
    assert answer.ext is not None
    assert done.ext["msgId"] == answer.ext["transactionId"]
    advance(env, 7000)
    assert bodies(env) == [b"x", b"yes"]
    assert env.broker.timers.metrics.recalled == 1
    assert env.broker.timers.enqueue.pending_recalls == {}
    assert env.broker.timers.metrics.counts == {}


def test_a_recall_is_stored_as_rocketmq_does(env: BrokerFixture) -> None:
    answer = send(env, 5000)
    recall(env, handle_of(answer))
    mine, other = stored(env, TIMER)
    assert (other.body, other.tags) == (b"0", "_RECALL_TAG_")
    assert other.properties["TIMER_DEL_UNIQKEY"] == mine.unique_id == other.unique_id
    assert other.properties["TIMER_OUT_MS"] == mine.properties["TIMER_OUT_MS"]
    assert other.properties["REAL_TOPIC"] == "T"


@pytest.mark.parametrize("passed_ms", [0, 1, 2500, 3499, 3500, 4000])
def test_a_recall_is_accepted_until_the_slot_starts(env: BrokerFixture, passed_ms: int) -> None:
    answer = send(env, 4001, b"no")  # the slot begins after 4 s
    advance(env, passed_ms)
    assert recall(env, handle_of(answer)).code == 0
    advance(env, 5000)
    assert bodies(env) == [b"x"]


def test_a_late_recall_is_refused(env: BrokerFixture) -> None:
    answer = send(env, 4500, b"a")
    advance(env, 4001)
    refused = recall(env, handle_of(answer))
    assert (refused.code, "timestamp" in str(refused.remark)) == (ILLEGAL, True)
    advance(env, 2000)
    assert recall(env, handle_of(answer)).code == ILLEGAL
    assert bodies(env) == [b"x", b"a"]


def test_the_same_key_of_another_topic_is_another_message(env: BrokerFixture) -> None:
    answer = send(env, 5000, b"a")
    parsed = read_recall_handle(handle_of(answer))
    assert parsed is not None
    other = handle("U", parsed.broker, parsed.time_ms, parsed.key)
    assert recall(env, other, "U").code == 0
    advance(env, 7000)
    assert bodies(env) == [b"x", b"a"]


@pytest.mark.parametrize("with_topic", [False, True])
def test_a_recall_sent_as_a_message_is_applied(env: BrokerFixture, with_topic: bool) -> None:
    answer = send(env, 5000, b"no")
    assert answer.ext is not None
    key = answer.ext["transactionId"]
    properties = {"TIMER_DEL_UNIQKEY": f"T+{key}" if with_topic else key}
    send(env, 4500, b"recall", properties=properties)
    advance(env, 7000)
    assert bodies(env) == [b"x"]


@pytest.mark.slow
def test_distant_messages_are_recalled(tmp_path: Path) -> None:
    env = open_broker(tmp_path, timer_roll_slots=3600)
    env.send(body=b"x")
    answers = [send(env, DAY_MS + number * 1000, b"no") for number in range(5)]
    send(env, DAY_MS, b"yes")
    advance_in_steps(env, 10 * HOUR_MS, 20_000)
    for answer in answers:
        assert recall(env, handle_of(answer)).code == 0
    advance_in_steps(env, 15 * HOUR_MS, 20_000)
    assert bodies(env) == [b"x", b"yes"]
    env.close()


def test_a_recall_survives_a_downtime_that_spans_both_rolled_slots(tmp_path: Path) -> None:
    env = open_broker(tmp_path, timer_roll_slots=3600)
    env.send(body=b"x")
    answer = send(env, 3 * HOUR_MS, b"no")
    advance_in_steps(env, 50 * 60_000, 20_000)
    assert recall(env, handle_of(answer)).code == 0
    advance(env, 1000)
    now_ms = env.now_ms
    env.close()
    env = open_broker(tmp_path, now_ms + DAY_MS, timer_roll_slots=3600)
    advance(env, 5000)
    assert bodies(env) == [b"x"]
    env.close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "!!!",
        "djE=",
        handle("T", "broker-a", 1, "k", "v2"),
        "a" * 5000,
        handle("T", "broker-a", NOW_MS + 5000, ""),
        base64.urlsafe_b64encode(b"v1 T broker-a 5").decode(),
        base64.b64encode(b"\xff\xff").decode(),
    ],
)
def test_an_invalid_handle_is_refused(env: BrokerFixture, text: str) -> None:
    assert recall(env, text).code == ILLEGAL


def test_an_unknown_key_is_removed_with_its_recall(env: BrokerFixture) -> None:
    assert recall(env, handle("T", "broker-a", env.now_ms + 5000, "T+k")).code == 0
    advance(env, 7000)
    assert env.broker.timers.enqueue.pending_recalls == {}


def test_a_handle_of_another_topic_or_broker_is_refused(env: BrokerFixture) -> None:
    soon = env.now_ms + 5000
    assert recall(env, handle("U", "broker-a", soon, "k"), "T").code == ILLEGAL
    assert recall(env, handle("T", "broker-b", soon, "k")).code == ILLEGAL
    assert recall(env, handle("T", "broker-a", "soon", "k")).code == ILLEGAL
    assert recall(env, handle("T", "broker-a", env.now_ms + 50 * DAY_MS, "k")).code == ILLEGAL
    assert recall(env, handle("None", "broker-a", soon, "k"), "None").code == 17
    env.live.change({"brokerPermission": "4"})
    assert recall(env, handle("T", "broker-a", soon, "k")).code == 14
    env.live.change({"brokerPermission": "6", "recallMessageEnable": "false"})
    assert recall(env, handle("T", "broker-a", soon, "k")).code == 16


def test_under_sync_flush_the_response_waits_for_the_flush(tmp_path: Path) -> None:
    env = BrokerFixture(tmp_path, Settings(store=small_config(sync_flush=True)))
    env.send(body=b"x")
    key = handle("T", "broker-a", env.now_ms + 5000, "k")
    command = Command(
        RequestCode.RECALL_MESSAGE, {"topic": "T", "recallHandle": key}, now_ms=env.now_ms
    )
    answer = env.broker.handle(command)
    assert isinstance(answer, EncodedReply)
    assert answer.offset == env.store.log.end
    env.close()


def test_too_many_pending_recalls_are_refused(
    env: BrokerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.broker.delay.recall.PENDING_RECALLS_MAX", 2)
    codes = [
        recall(env, handle("T", "broker-a", env.now_ms + 5000, f"k{n}")).code for n in range(4)
    ]
    assert codes == [0, 0, 2, 2]
    env.tick(1)
    assert recall(env, handle("T", "broker-a", env.now_ms + 5000, "k9")).code == 0
