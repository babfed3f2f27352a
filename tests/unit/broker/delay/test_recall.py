"""Recall of timed messages: what was answered with success is never delivered."""

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.delay.recall import read_handle
from penstock.config import Settings
from penstock.rpc.answers import EncodedReply
from penstock.rpc.command import Command
from penstock.wire.codes import RequestCode
from tests.store_kit import small_config
from tests.unit.broker.broker_kit import NOW_MS, House
from tests.unit.broker.delay.timer_kit import (
    DAY_MS,
    HOUR_MS,
    TIMER,
    bodies,
    handle_of,
    let_days_pass,
    let_pass,
    open_house,
    recall,
    send,
    stored,
)

ILLEGAL = 604


@pytest.fixture
def home(tmp_path: Path) -> Iterator[House]:
    made = open_house(tmp_path / "store")
    made.send(body=b"x")
    made.send(body=b"x", topic="U")
    yield made
    made.close()


def handle(topic: str, broker: str, time: object, key: str, version: str = "v1") -> str:
    return base64.urlsafe_b64encode(f"{version} {topic} {broker} {time} {key}".encode()).decode()


def test_the_handle_is_rocketmqs(home: House) -> None:
    answer = send(home, 2500)
    assert answer.ext is not None
    text = base64.urlsafe_b64decode(answer.ext["recallHandle"]).decode()
    key = answer.ext["transactionId"]
    assert text == f"v1 T broker-a {home.now_ms + 2001} {key}"


def test_no_handle_without_a_time(home: House) -> None:
    for properties in ({}, {"DELAY": "1"}, {"TIMER_DELAY_MS": "0"}):
        answer = home.send(properties=properties)
        assert answer.ext is not None
        assert "recallHandle" not in answer.ext


def test_a_recalled_message_is_not_delivered(home: House) -> None:
    answer = send(home, 5000, b"no")
    send(home, 5000, b"yes")
    done = recall(home, handle_of(answer))
    assert done.code == 0
    assert done.ext is not None
    assert answer.ext is not None
    assert done.ext["msgId"] == answer.ext["transactionId"]
    let_pass(home, 7000)
    assert bodies(home) == [b"x", b"yes"]
    assert home.context.timers.figures.recalled == 1
    assert home.context.timers.feed.expected == {}
    assert home.context.timers.figures.counts == {}


def test_a_recall_is_stored_as_rocketmq_does(home: House) -> None:
    answer = send(home, 5000)
    recall(home, handle_of(answer))
    mine, other = stored(home, TIMER)
    assert (other.body, other.tags) == (b"0", "_RECALL_TAG_")
    assert other.properties["TIMER_DEL_UNIQKEY"] == mine.unique_id == other.unique_id
    assert other.properties["TIMER_OUT_MS"] == mine.properties["TIMER_OUT_MS"]
    assert other.properties["REAL_TOPIC"] == "T"


@pytest.mark.parametrize("passed_ms", [0, 1, 2500, 3499, 3500, 4000])
def test_a_recall_counts_up_to_the_begin_of_the_slot(home: House, passed_ms: int) -> None:
    answer = send(home, 4001, b"no")  # the slot begins after 4 s
    let_pass(home, passed_ms)
    assert recall(home, handle_of(answer)).code == 0
    let_pass(home, 5000)
    assert bodies(home) == [b"x"]


def test_too_late_is_refused(home: House) -> None:
    answer = send(home, 4500, b"a")
    let_pass(home, 4001)
    refused = recall(home, handle_of(answer))
    assert (refused.code, "timestamp" in str(refused.remark)) == (ILLEGAL, True)
    let_pass(home, 2000)
    assert recall(home, handle_of(answer)).code == ILLEGAL
    assert bodies(home) == [b"x", b"a"]


def test_the_same_key_of_another_topic_is_another_message(home: House) -> None:
    answer = send(home, 5000, b"a")
    told = read_handle(handle_of(answer))
    assert told is not None
    other = handle("U", told.broker, told.time_ms, told.key)
    assert recall(home, other, "U").code == 0
    let_pass(home, 7000)
    assert bodies(home) == [b"x", b"a"]


@pytest.mark.parametrize("with_topic", [False, True])
def test_a_recall_sent_as_a_message_counts_too(home: House, with_topic: bool) -> None:
    answer = send(home, 5000, b"no")
    assert answer.ext is not None
    key = answer.ext["transactionId"]
    properties = {"TIMER_DEL_UNIQKEY": f"T+{key}" if with_topic else key}
    send(home, 4500, b"recall", properties=properties)
    let_pass(home, 7000)
    assert bodies(home) == [b"x"]


def test_far_messages_are_recalled(tmp_path: Path) -> None:
    home = open_house(tmp_path, timer_roll_slots=3600)
    home.send(body=b"x")
    answers = [send(home, DAY_MS + number * 1000, b"no") for number in range(5)]
    send(home, DAY_MS, b"yes")
    let_days_pass(home, 10 * HOUR_MS, 20_000)
    for answer in answers:
        assert recall(home, handle_of(answer)).code == 0
    let_days_pass(home, 15 * HOUR_MS, 20_000)
    assert bodies(home) == [b"x", b"yes"]
    home.close()


def test_a_recall_holds_when_both_rolled_slots_pass_in_a_downtime(tmp_path: Path) -> None:
    home = open_house(tmp_path, timer_roll_slots=3600)
    home.send(body=b"x")
    answer = send(home, 3 * HOUR_MS, b"no")
    let_days_pass(home, 50 * 60_000, 20_000)
    assert recall(home, handle_of(answer)).code == 0
    let_pass(home, 1000)
    now_ms = home.now_ms
    home.close()
    home = open_house(tmp_path, now_ms + DAY_MS, timer_roll_slots=3600)
    let_pass(home, 5000)
    assert bodies(home) == [b"x"]
    home.close()


@pytest.mark.parametrize(
    "text",
    ["", "x", "!!!", "djE=", handle("T", "broker-a", 1, "k", "v2"), "a" * 5000,
     handle("T", "broker-a", NOW_MS + 5000, ""),
     base64.urlsafe_b64encode(b"v1 T broker-a 5").decode(), base64.b64encode(b"\xff\xff").decode()],
)  # fmt: skip
def test_what_is_no_handle_is_refused(home: House, text: str) -> None:
    assert recall(home, text).code == ILLEGAL


def test_a_strange_key_is_forgotten_with_its_recall(home: House) -> None:
    assert recall(home, handle("T", "broker-a", home.now_ms + 5000, "T+k")).code == 0
    let_pass(home, 7000)
    assert home.context.timers.feed.expected == {}


def test_what_does_not_fit_is_refused(home: House) -> None:
    soon = home.now_ms + 5000
    assert recall(home, handle("U", "broker-a", soon, "k"), "T").code == ILLEGAL
    assert recall(home, handle("T", "broker-b", soon, "k")).code == ILLEGAL
    assert recall(home, handle("T", "broker-a", "soon", "k")).code == ILLEGAL
    assert recall(home, handle("T", "broker-a", home.now_ms + 50 * DAY_MS, "k")).code == ILLEGAL
    assert recall(home, handle("None", "broker-a", soon, "k"), "None").code == 17
    home.live.change({"brokerPermission": "4"})
    assert recall(home, handle("T", "broker-a", soon, "k")).code == 14
    home.live.change({"brokerPermission": "6", "recallMessageEnable": "false"})
    assert recall(home, handle("T", "broker-a", soon, "k")).code == 16


def test_under_sync_flush_the_answer_waits_for_the_disk(tmp_path: Path) -> None:
    home = House(tmp_path, Settings(store=small_config(sync_flush=True)))
    home.send(body=b"x")
    key = handle("T", "broker-a", home.now_ms + 5000, "k")
    command = Command(
        RequestCode.RECALL_MESSAGE, {"topic": "T", "recallHandle": key}, now_ms=home.now_ms
    )
    answer = home.broker.handle(command)
    assert isinstance(answer, EncodedReply)
    assert answer.offset == home.store.log.end
    home.close()


def test_a_flood_of_recalls_is_refused(home: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.broker.delay.recall.EXPECTED_MAX", 2)
    codes = [
        recall(home, handle("T", "broker-a", home.now_ms + 5000, f"k{n}")).code for n in range(4)
    ]
    assert codes == [0, 0, 2, 2]
    home.tick(1)
    assert recall(home, handle("T", "broker-a", home.now_ms + 5000, "k9")).code == 0
