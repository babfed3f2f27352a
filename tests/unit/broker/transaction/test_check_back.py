"""The check-back: who is asked, when, what counts, and what becomes of halves nobody knows."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.transaction import check_back, half_messages, half_queues
from penstock.errors import DiskFull
from penstock.metrics import Registry
from penstock.rpc.command import Command
from penstock.wire.codes import RequestCode
from tests.store_kit import small_config
from tests.unit.broker.transaction.test_transactions import configured
from tests.unit.broker.transaction.transaction_kit import (
    COMMIT,
    HALF,
    INTERVAL_MS,
    PARKED,
    PRODUCER,
    ROLLBACK,
    TIMEOUT_MS,
    UNKNOWN,
    Check,
    Trade,
    trade,
)

DAY_MS = 24 * 3_600_000


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Trade]:
    with trade(tmp_path / "store") as made:
        made.send(body=b"first")  # so that no half lies at the log's beginning
        yield made


def answer(home: Trade, check: Check, state: int = UNKNOWN, **rest: Any) -> None:
    assert home.end(check.handle, state, checked=True, **rest).code == 0


def ask_until_parked(home: Trade, *, answered: bool) -> int:
    """How many checks a half gets."""
    count = 0
    for _ in range(20):
        for check in home.let_pass(INTERVAL_MS):
            count += 1
            if answered:
                answer(home, check)
    return count


# --- when and whom -------------------------------------------------------------------------------


def test_a_half_is_left_in_peace_at_first(home: Trade) -> None:
    home.come()
    home.half()
    assert home.let_pass(TIMEOUT_MS - 1) == []
    assert len(home.let_pass(1001)) == 1


def test_then_its_producer_is_asked_every_interval(home: Trade) -> None:
    home.come()
    home.half()
    first_ms = home.now_ms
    times: list[int] = []
    while len(times) < 4:
        for check in home.let_pass(1000):
            times.append(home.now_ms)
            answer(home, check)
    assert times[0] - first_ms in range(TIMEOUT_MS, TIMEOUT_MS + 1001)
    for before, after in pairwise(times):
        assert after - before in range(INTERVAL_MS, INTERVAL_MS + 1001)


def test_times_are_settings(tmp_path: Path) -> None:
    settings = configured(transaction_timeout_ms=500, transaction_check_ms=700)
    with trade(tmp_path / "store", settings) as home:
        home.come()
        home.half()
        assert len(home.let_pass(1000)) == 1
        assert len(home.let_pass(2000)) in (2, 3)


def test_a_half_may_ask_for_a_longer_peace(home: Trade) -> None:
    home.come()
    home.half(b"long", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "100"})
    home.half(b"short", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "1"})
    home.half(b"none", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "x"})
    assert home.let_pass(TIMEOUT_MS - 1) == []
    checks = home.let_pass(90_000)
    assert {check.message.body for check in checks} == {b"short", b"none"}
    checks = home.let_pass(6_000)
    assert b"long" in {check.message.body for check in checks}


def test_what_a_producer_is_told(home: Trade) -> None:
    home.come()
    sent = home.half(b"body", queue_id=2, tag="vip", properties={"KEYS": "a b", "mine": "x"})
    (half,) = home.stored(HALF)
    (check,) = home.let_pass(TIMEOUT_MS + 1000)
    assert check.client == PRODUCER
    assert check.ext == {
        "topic": HALF, "tranStateTableOffset": "0", "commitLogOffset": str(sent.log_offset),
        "msgId": sent.key, "transactionId": sent.key, "offsetMsgId": half.offset_id,
        "bname": "broker-a",
    }  # fmt: skip
    message = check.message
    assert (message.topic, message.queue_id, message.body) == ("T", 2, b"body")
    same = ("queue_offset", "physical_offset", "born_ms", "born_host", "store_ms", "store_host",
            "flag", "sys_flag", "body_crc")  # fmt: skip
    for name in same:
        assert getattr(message, name) == getattr(half, name), name
    assert message.properties == {**half.properties, "TRANSACTION_CHECK_TIMES": "1"}


def test_a_long_topic_is_told_in_the_newer_form(home: Trade) -> None:
    topic = "t" * 127
    home.come()
    home.half(topic=topic)
    (check,) = home.let_pass(TIMEOUT_MS + 1000)
    assert check.message.topic == topic


def test_producers_are_asked_in_turn(home: Trade) -> None:
    for client in (1, 2, 3):
        home.come(client)
    for _ in range(9):
        home.half()
    checks = home.let_pass(TIMEOUT_MS + 1000)
    assert Counter(check.client for check in checks) == {1: 3, 2: 3, 3: 3}


def test_only_its_own_group_is_asked(home: Trade) -> None:
    home.come(1, "P")
    home.come(2, "Q")
    home.half(b"p", "P")
    home.half(b"q", "Q")
    home.half(b"r", "R")
    checks = home.let_pass(TIMEOUT_MS + 1000)
    assert {(check.client, check.message.body) for check in checks} == {(1, b"p"), (2, b"q")}


def test_what_ended_is_not_asked_about(home: Trade) -> None:
    home.come()
    sent = [home.half() for _ in range(10)]
    for half in sent[:5]:
        home.end(half, COMMIT if half.queue_offset % 2 else ROLLBACK)
    home.let_pass(3000)
    for half in sent[5:8]:
        home.end(half, COMMIT if half.queue_offset % 2 else ROLLBACK)
    checks = home.let_pass(INTERVAL_MS)
    assert [check.handle.queue_offset for check in checks] == [8, 9]


@pytest.mark.parametrize("state", [COMMIT, ROLLBACK])
def test_the_answer_ends_it(home: Trade, state: int) -> None:
    home.come()
    home.half(b"x")
    (check,) = home.let_pass(TIMEOUT_MS + 1000)
    answer(home, check, state)
    assert home.bodies() == ([b"first", b"x"] if state == COMMIT else [b"first"])
    assert home.let_pass(200_000) == []
    assert home.open == 0


# --- what counts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("answered", [True, False])
def test_after_five_unknown_checks_it_is_rolled_back_and_parked(
    home: Trade, answered: bool
) -> None:
    home.come()
    sent = home.half(b"x", queue_id=2)
    assert ask_until_parked(home, answered=answered) == 5
    (parked,) = home.stored(PARKED)
    assert parked.body == b"x"
    assert parked.properties["TRANSACTION_CHECK_TIMES"] == "5"
    assert (parked.properties["REAL_TOPIC"], parked.properties["REAL_QID"]) == ("T", "2")
    assert home.bodies(queue_id=2) == []
    assert home.open == 0
    assert home.end(sent).code == 201
    assert home.end(sent, ROLLBACK).remark == "done before: rolled back"
    topic = home.context.topics.get(PARKED)
    assert topic is not None
    assert (topic.read_queue_nums, topic.perm) == (1, 6)


def test_no_topic_for_parked_halves_before_the_first(home: Trade) -> None:
    home.half()
    home.let_pass(100_000)
    assert home.context.topics.get(PARKED) is None


@pytest.mark.parametrize("most", [1, 2, 7])
def test_how_often_is_a_setting(tmp_path: Path, most: int) -> None:
    with trade(tmp_path / "store", configured(transaction_checks_max=most)) as home:
        home.come()
        home.half(b"x")
        assert ask_until_parked(home, answered=True) == most
        assert home.bodies(PARKED) == [b"x"]


def test_the_last_unknown_answer_ends_it_soon(tmp_path: Path) -> None:
    with trade(tmp_path / "store", configured(transaction_checks_max=1)) as home:
        home.come()
        home.half(b"x")
        (check,) = home.let_pass(TIMEOUT_MS + 1000)
        answer(home, check)
        home.let_pass(1000)
        assert home.bodies(PARKED) == [b"x"]


def test_unknown_without_a_check_does_not_count(home: Trade) -> None:
    home.come()
    sent = home.half(b"x")
    for _ in range(10):
        home.end(sent, UNKNOWN)
        home.end(sent, UNKNOWN, checked=True)
    (check,) = home.let_pass(TIMEOUT_MS + 1000)
    for _ in range(10):
        answer(home, check)  # one check, one count
    assert ask_until_parked(home, answered=True) == 4


def test_without_a_producer_nothing_counts(home: Trade) -> None:
    sent = home.half(b"x")
    home.now_ms += DAY_MS
    assert home.let_pass(100_000) == []
    assert home.open == 1
    assert home.stored(PARKED) == []
    home.come()
    (check,) = home.let_pass(1000)
    assert check.message.properties["TRANSACTION_CHECK_TIMES"] == "1"
    assert home.end(sent).remark == "done: committed"


def test_a_check_of_a_connection_that_went_does_not_count(home: Trade) -> None:
    home.half(b"x")
    for client in range(10):
        home.come(client)
        (check,) = home.let_pass(INTERVAL_MS)
        home.go(client)
    assert check.message.properties["TRANSACTION_CHECK_TIMES"] == "1"
    home.let_pass(INTERVAL_MS)
    home.come()
    assert ask_until_parked(home, answered=False) == 5


def test_another_producer_of_the_group_goes_on(home: Trade) -> None:
    home.come(1)
    home.half(b"x")
    (check,) = home.let_pass(TIMEOUT_MS + 1000)
    assert check.client == 1
    home.go(1)
    home.come(2)
    (check,) = home.let_pass(INTERVAL_MS)
    assert check.client == 2
    answer(home, check, COMMIT)
    assert home.bodies() == [b"first", b"x"]


def test_a_producer_gone_for_good_leaves_it_to_the_retention_time(home: Trade) -> None:
    retain_ms = home.live.current.store.retain_hours * 3_600_000
    registry = Registry()
    home.transactions.add_metrics(registry)
    sent = home.half(b"x")
    home.now_ms += retain_ms - 60_000
    home.let_pass(30_000)
    assert home.open == 1
    assert "penstock_halves_without_producer 1\n" in registry.text()
    home.let_pass(60_000)
    assert home.open == 0
    assert home.bodies(PARKED) == [b"x"]
    assert "penstock_halves_parked_total 1\n" in registry.text()
    assert home.end(sent).code == 201


def test_a_commit_that_the_store_refuses_does_not_count(home: Trade) -> None:
    home.come()
    home.half(b"x")
    for _ in range(10):
        home.store.path.refusal = None
        (check,) = home.let_pass(INTERVAL_MS)
        home.store.path.refusal = DiskFull("no space")
        assert home.end(check.handle, COMMIT, checked=True).code == 14
    home.store.path.refusal = None
    assert home.stored(PARKED) == []
    (check,) = home.let_pass(INTERVAL_MS)
    answer(home, check, COMMIT)


def test_while_the_store_refuses_nobody_is_given_up(
    home: Trade, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.come()
    home.half(b"x")
    for _ in range(4):
        (check,) = home.let_pass(INTERVAL_MS)
        answer(home, check)
    (check,) = home.let_pass(INTERVAL_MS)
    answer(home, check)
    monkeypatch.setattr(home.store.care, "tick", lambda now_ms: None)
    home.store.path.refusal = DiskFull("no space")
    home.let_pass(2000)
    assert home.open == 1
    home.store.path.refusal = None
    home.let_pass(2000)
    assert home.open == 0
    assert home.bodies(PARKED) == [b"x"]


# --- handles -------------------------------------------------------------------------------------


def test_a_counted_half_is_appended_again(home: Trade) -> None:
    home.come()
    sent = home.half(b"x")
    for _ in range(3):
        (check,) = home.let_pass(INTERVAL_MS)
        answer(home, check)
    home.let_pass(INTERVAL_MS)
    appends = home.stored(HALF)
    counts = [half.properties.get("TRANSACTION_CHECK_TIMES") for half in appends]
    assert counts == [None, "1", "2", "3"]
    for half in appends[1:]:
        assert half.properties["TRAN_PREPARED_QUEUE_OFFSET"] == "0"
        assert half.prepared_offset == sent.log_offset
        assert (half.body, half.born_ms) == (b"x", appends[0].born_ms)
    assert home.ops() == [b"0,", b"1,", b"2,"]  # outdated appends are done with


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_any_handle_ends_it_once(home: Trade, which: int, restarted: bool) -> None:
    home.come()
    handles = [home.half(b"x")]
    for _ in range(3):
        (check,) = home.let_pass(INTERVAL_MS)
        if check.handle not in handles:
            handles.append(check.handle)
        answer(home, check)
    assert len(handles) == 3
    if restarted:
        home = home.restart()
    assert home.end(handles[which]).remark == "done: committed"
    for handle in handles:
        assert home.end(handle).remark == "done before: committed"
        assert home.end(handle, ROLLBACK).code == 200
    assert home.bodies() == [b"first", b"x"]
    (message,) = home.stored()[1:]
    assert message.prepared_offset == handles[0].log_offset
    home = home.restart()
    for handle in handles:
        assert home.end(handle).remark == "done before: committed"
    home.come()
    assert home.let_pass(100_000) == []
    home.close()


def test_by_the_first_handle_when_its_record_is_gone(home: Trade) -> None:
    home.come()
    sent = home.half(b"x")
    for _ in range(2):
        (check,) = home.let_pass(INTERVAL_MS)
        answer(home, check)
    while home.store.log.end < 4 * small_config(sync_flush=False).segment_bytes:
        home.send(body=b"y" * 1000)
    home.let_pass(INTERVAL_MS)
    pin = home.transactions.pinned_from()
    assert pin is not None
    assert pin > sent.log_offset
    assert home.end(sent, ROLLBACK, group="Q").code == 1
    assert home.end(sent, ROLLBACK).remark == "done: rolled back"


def test_a_half_that_asks_for_peace_is_ended_within_it_or_by_an_answer(home: Trade) -> None:
    home.come()
    immune = {"CHECK_IMMUNITY_TIME_IN_SECONDS": "10"}
    one, two = home.half(b"1", properties=immune), home.half(b"2", properties=immune)
    home.let_pass(9_000)
    assert home.end(one).code == 0
    checks = home.let_pass(2_000)
    late = home.end(two)
    assert late.code == 604
    assert "CHECK_IMMUNITY_TIME_IN_SECONDS" in (late.remark or "")
    assert home.end(two, ROLLBACK).code == 604
    assert home.end(one).remark == "done before: committed"
    answer(home, checks[0], COMMIT)
    assert home.bodies() == [b"first", b"1", b"2"]


# --- bounds --------------------------------------------------------------------------------------


def test_a_tick_is_bounded(home: Trade, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_queues, "FOLLOW_MAX", 8)
    monkeypatch.setattr(check_back, "JOB_HALVES_MAX", 4)
    monkeypatch.setattr(check_back, "DUE_MAX", 10)
    home.come()
    for _ in range(100):
        home.half()
    home.tick(0)
    assert home.open < 20
    assert home.broker.due() <= home.now_ms
    home.now_ms += TIMEOUT_MS
    home.tick(1)
    assert len(home.checks()) <= 8
    checks = home.let_pass(2000)
    assert home.open == 100
    assert len({check.handle for check in checks}) >= 90


def test_one_connection_has_so_many_checks_at_a_time(
    home: Trade, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_back, "ASKED_MAX", 5)
    home.come()
    for _ in range(12):
        home.half()
    checks = home.let_pass(TIMEOUT_MS + 2000)
    assert len(checks) == 5
    for check in checks[:3]:
        answer(home, check, COMMIT)
    checks = home.let_pass(2000)
    assert len(checks) == 3
    home.come(2)
    assert len(home.let_pass(2000)) == 4


def test_a_half_far_behind_is_appended_again_uncounted(
    home: Trade, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_back, "ROLL_AFTER", 20)
    old = home.half(b"old")
    young = home.half(b"young", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "99999"})
    home.let_pass(TIMEOUT_MS + 1000)
    for _ in range(30):
        home.end(home.half(), ROLLBACK)
    home.let_pass(3000)
    again = [half for half in home.stored(HALF) if "TRAN_PREPARED_QUEUE_OFFSET" in half.properties]
    assert [half.body for half in again] == [b"old", b"young"]
    assert {half.properties["TRANSACTION_CHECK_TIMES"] for half in again} == {"0"}
    home = home.restart()
    assert home.open == 2
    assert home.end(old).remark == "done: committed"
    assert home.end(young).remark == "done: committed"
    home.close()


class SlowDisk:
    """A pool whose work is done when told."""

    def __init__(self) -> None:
        self.work: list[tuple[Any, Future[Any]]] = []

    def submit(self, work: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self.work.append((work, future))
        return future

    def do(self) -> None:
        for work, future in self.work:
            future.set_result(work())
        self.work = []


def test_a_half_that_ends_while_it_is_read_is_not_asked_about(
    home: Trade, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.come()
    one, two = home.half(b"1"), home.half(b"2")
    home.let_pass(1000)
    slow = SlowDisk()
    monkeypatch.setattr(home.store.disk, "submit", slow.submit)
    assert home.let_pass(TIMEOUT_MS) == []
    assert slow.work
    home.end(one)
    home.go()
    slow.do()
    assert home.let_pass(1000) == []
    home.come()
    home.let_pass(1000)
    slow.do()
    (check,) = home.let_pass(1000)
    assert check.handle == two
    slow.do()
    monkeypatch.undo()


# --- resuming ------------------------------------------------------------------------------------


def offset_id(home: Trade, topic: str, number: int = 0) -> str:
    return home.stored(topic)[number].offset_id


def test_a_parked_half_can_be_resumed(home: Trade) -> None:
    home.come()
    home.half(b"x")
    ask_until_parked(home, answered=True)
    answered = home.handle(
        RequestCode.RESUME_CHECK_HALF_MESSAGE, topic=PARKED, msgId=offset_id(home, PARKED)
    )
    assert answered.code == 0  # type: ignore[union-attr]
    (check,) = home.let_pass(TIMEOUT_MS + 2000)
    assert check.message.properties["TRANSACTION_CHECK_TIMES"] == "1"
    answer(home, check, COMMIT)
    assert home.bodies() == [b"first", b"x"]
    assert home.end(check.handle).remark == "done before: committed"


def test_an_open_half_is_counted_anew(home: Trade) -> None:
    home.come()
    home.half(b"x")
    for _ in range(3):
        (check,) = home.let_pass(INTERVAL_MS)
        answer(home, check)
    answered = home.handle(
        RequestCode.RESUME_CHECK_HALF_MESSAGE, topic=HALF, msgId=offset_id(home, HALF, 1)
    )
    assert answered.code == 0  # type: ignore[union-attr]
    assert home.open == 1
    assert home.stored(HALF)[-1].properties["TRANSACTION_CHECK_TIMES"] == "0"
    assert ask_until_parked(home, answered=True) == 5


def test_what_can_not_be_resumed(home: Trade) -> None:
    code = RequestCode.RESUME_CHECK_HALF_MESSAGE
    home.end(home.half())
    end = home.store.log.end
    nowhere = "7F00000100002A9F00000000000F0000"
    for msg_id, expected in (
        (offset_id(home, HALF), 1), (offset_id(home, "T"), 1), (nowhere, 1), ("xyz", 29),
    ):  # fmt: skip
        command = Command(code, {"topic": "T", "msgId": msg_id}, now_ms=home.now_ms)
        assert home.answer(command).code == expected
    assert home.store.log.end == end


# --- memory --------------------------------------------------------------------------------------


def test_halves_that_end_at_once_are_never_read(
    home: Trade, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_messages, "ENDED_MAX", 10)
    for _ in range(50):
        home.end(home.half(), ROLLBACK)
    monkeypatch.setattr(home.transactions._log, "read", None)
    home.let_pass(1000)
    assert home.open == 0
    assert home.transactions.pinned_from() is None
    assert home.transactions.halves.position == 50
    assert len(home.transactions.halves._ended) == 10


def test_the_oldest_open_half_pins_the_log(home: Trade) -> None:
    assert home.transactions.pinned_from() is None
    one, two = home.half(), home.half()
    pin = home.transactions.pinned_from()
    assert pin is not None
    assert pin <= one.log_offset
    home.let_pass(1000)
    assert home.transactions.pinned_from() == one.log_offset
    home.end(one)
    assert home.transactions.pinned_from() == two.log_offset
    home.end(two)
    assert home.transactions.pinned_from() is None
