"""Check-back: which producer is checked and when, which checks count, what is discarded."""

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
    DISCARDED,
    HALF,
    INTERVAL_MS,
    PRODUCER,
    ROLLBACK,
    TIMEOUT_MS,
    UNKNOWN,
    Check,
    TransactionFixture,
    transaction_fixture,
)

DAY_MS = 24 * 3_600_000


@pytest.fixture
def env(tmp_path: Path) -> Iterator[TransactionFixture]:
    with transaction_fixture(tmp_path / "store") as made:
        made.send(body=b"first")  # so that no half message has log offset 0
        yield made


def answer(env: TransactionFixture, check: Check, state: int = UNKNOWN, **rest: Any) -> None:
    assert env.end(check.handle, state, checked=True, **rest).code == 0


def check_until_discarded(env: TransactionFixture, *, answered: bool) -> int:
    """The number of checks that are sent for a half message."""
    count = 0
    for _ in range(20):
        for check in env.advance(INTERVAL_MS):
            count += 1
            if answered:
                answer(env, check)
    return count


# --- schedule ------------------------------------------------------------------------------------


def test_a_half_message_is_not_checked_before_the_timeout(env: TransactionFixture) -> None:
    env.connect()
    env.half()
    assert env.advance(TIMEOUT_MS - 1) == []
    assert len(env.advance(1001)) == 1


def test_its_producer_is_checked_every_interval(env: TransactionFixture) -> None:
    env.connect()
    env.half()
    first_ms = env.now_ms
    times: list[int] = []
    while len(times) < 4:
        for check in env.advance(1000):
            times.append(env.now_ms)
            answer(env, check)
    assert times[0] - first_ms in range(TIMEOUT_MS, TIMEOUT_MS + 1001)
    for before, after in pairwise(times):
        assert after - before in range(INTERVAL_MS, INTERVAL_MS + 1001)


def test_timeout_and_interval_are_settings(tmp_path: Path) -> None:
    settings = configured(transaction_timeout_ms=500, transaction_check_ms=700)
    with transaction_fixture(tmp_path / "store", settings) as env:
        env.connect()
        env.half()
        assert len(env.advance(1000)) == 1
        assert len(env.advance(2000)) in (2, 3)


def test_a_half_message_may_have_its_own_immunity_time(env: TransactionFixture) -> None:
    env.connect()
    env.half(b"long", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "100"})
    env.half(b"short", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "1"})
    env.half(b"none", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "x"})
    assert env.advance(TIMEOUT_MS - 1) == []
    checks = env.advance(90_000)
    assert {check.message.body for check in checks} == {b"short", b"none"}
    checks = env.advance(6_000)
    assert b"long" in {check.message.body for check in checks}


def test_the_content_of_a_check(env: TransactionFixture) -> None:
    env.connect()
    sent = env.half(b"body", queue_id=2, tag="vip", properties={"KEYS": "a b", "mine": "x"})
    (half,) = env.stored(HALF)
    (check,) = env.advance(TIMEOUT_MS + 1000)
    assert check.client == PRODUCER
    assert check.ext == {
        "topic": HALF,
        "tranStateTableOffset": "0",
        "commitLogOffset": str(sent.log_offset),
        "msgId": sent.key,
        "transactionId": sent.key,
        "offsetMsgId": half.offset_id,
        "bname": "broker-a",
    }
    message = check.message
    assert (message.topic, message.queue_id, message.body) == ("T", 2, b"body")
    same = (
        "queue_offset",
        "physical_offset",
        "born_ms",
        "born_host",
        "store_ms",
        "store_host",
        "flag",
        "sys_flag",
        "body_crc",
    )
    for name in same:
        assert getattr(message, name) == getattr(half, name), name
    assert message.properties == {**half.properties, "TRANSACTION_CHECK_TIMES": "1"}


def test_a_check_for_a_long_topic_uses_the_newer_record_version(env: TransactionFixture) -> None:
    topic = "t" * 127
    env.connect()
    env.half(topic=topic)
    (check,) = env.advance(TIMEOUT_MS + 1000)
    assert check.message.topic == topic


def test_producers_are_checked_in_round_robin(env: TransactionFixture) -> None:
    for client in (1, 2, 3):
        env.connect(client)
    for _ in range(9):
        env.half()
    checks = env.advance(TIMEOUT_MS + 1000)
    assert Counter(check.client for check in checks) == {1: 3, 2: 3, 3: 3}


def test_only_its_producer_group_is_checked(env: TransactionFixture) -> None:
    env.connect(1, "P")
    env.connect(2, "Q")
    env.half(b"p", "P")
    env.half(b"q", "Q")
    env.half(b"r", "R")
    checks = env.advance(TIMEOUT_MS + 1000)
    assert {(check.client, check.message.body) for check in checks} == {(1, b"p"), (2, b"q")}


def test_resolved_half_messages_are_not_checked(env: TransactionFixture) -> None:
    env.connect()
    sent = [env.half() for _ in range(10)]
    for half in sent[:5]:
        env.end(half, COMMIT if half.queue_offset % 2 else ROLLBACK)
    env.advance(3000)
    for half in sent[5:8]:
        env.end(half, COMMIT if half.queue_offset % 2 else ROLLBACK)
    checks = env.advance(INTERVAL_MS)
    assert [check.handle.queue_offset for check in checks] == [8, 9]


@pytest.mark.parametrize("state", [COMMIT, ROLLBACK])
def test_the_answer_to_a_check_resolves_it(env: TransactionFixture, state: int) -> None:
    env.connect()
    env.half(b"x")
    (check,) = env.advance(TIMEOUT_MS + 1000)
    answer(env, check, state)
    assert env.bodies() == ([b"first", b"x"] if state == COMMIT else [b"first"])
    assert env.advance(200_000) == []
    assert env.open == 0


# --- counted checks ------------------------------------------------------------------------------


@pytest.mark.parametrize("answered", [True, False])
def test_after_five_unknown_checks_it_is_discarded(env: TransactionFixture, answered: bool) -> None:
    env.connect()
    sent = env.half(b"x", queue_id=2)
    assert check_until_discarded(env, answered=answered) == 5
    (discarded,) = env.stored(DISCARDED)
    assert discarded.body == b"x"
    assert discarded.properties["TRANSACTION_CHECK_TIMES"] == "5"
    assert (discarded.properties["REAL_TOPIC"], discarded.properties["REAL_QID"]) == ("T", "2")
    assert env.bodies(queue_id=2) == []
    assert env.open == 0
    assert env.end(sent).code == 201
    assert env.end(sent, ROLLBACK).remark == "already rolled back"
    topic = env.context.topics.get(DISCARDED)
    assert topic is not None
    assert (topic.read_queue_nums, topic.perm) == (1, 6)


def test_the_discard_topic_is_created_by_the_first_discard(env: TransactionFixture) -> None:
    env.half()
    env.advance(100_000)
    assert env.context.topics.get(DISCARDED) is None


@pytest.mark.parametrize("most", [1, 2, 7])
def test_the_number_of_checks_is_a_setting(tmp_path: Path, most: int) -> None:
    with transaction_fixture(tmp_path / "store", configured(transaction_checks_max=most)) as env:
        env.connect()
        env.half(b"x")
        assert check_until_discarded(env, answered=True) == most
        assert env.bodies(DISCARDED) == [b"x"]


def test_the_last_unknown_answer_discards_it_soon(tmp_path: Path) -> None:
    with transaction_fixture(tmp_path / "store", configured(transaction_checks_max=1)) as env:
        env.connect()
        env.half(b"x")
        (check,) = env.advance(TIMEOUT_MS + 1000)
        answer(env, check)
        env.advance(1000)
        assert env.bodies(DISCARDED) == [b"x"]


def test_unknown_without_a_check_does_not_count(env: TransactionFixture) -> None:
    env.connect()
    sent = env.half(b"x")
    for _ in range(10):
        env.end(sent, UNKNOWN)
        env.end(sent, UNKNOWN, checked=True)
    (check,) = env.advance(TIMEOUT_MS + 1000)
    for _ in range(10):
        answer(env, check)  # one check, one count
    assert check_until_discarded(env, answered=True) == 4


def test_without_a_producer_nothing_counts(env: TransactionFixture) -> None:
    sent = env.half(b"x")
    env.now_ms += DAY_MS
    assert env.advance(100_000) == []
    assert env.open == 1
    assert env.stored(DISCARDED) == []
    env.connect()
    (check,) = env.advance(1000)
    assert check.message.properties["TRANSACTION_CHECK_TIMES"] == "1"
    assert env.end(sent).remark == "committed"


def test_a_check_of_a_closed_connection_does_not_count(env: TransactionFixture) -> None:
    env.half(b"x")
    for client in range(10):
        env.connect(client)
        (check,) = env.advance(INTERVAL_MS)
        env.disconnect(client)
    assert check.message.properties["TRANSACTION_CHECK_TIMES"] == "1"
    env.advance(INTERVAL_MS)
    env.connect()
    assert check_until_discarded(env, answered=False) == 5


def test_another_producer_of_the_group_is_checked(env: TransactionFixture) -> None:
    env.connect(1)
    env.half(b"x")
    (check,) = env.advance(TIMEOUT_MS + 1000)
    assert check.client == 1
    env.disconnect(1)
    env.connect(2)
    (check,) = env.advance(INTERVAL_MS)
    assert check.client == 2
    answer(env, check, COMMIT)
    assert env.bodies() == [b"first", b"x"]


def test_without_a_producer_it_is_discarded_after_the_retention_time(
    env: TransactionFixture,
) -> None:
    retain_ms = env.live.current.store.retain_hours * 3_600_000
    registry = Registry()
    env.transactions.add_metrics(registry)
    sent = env.half(b"x")
    env.now_ms += retain_ms - 60_000
    env.advance(30_000)
    assert env.open == 1
    assert "penstock_half_messages_without_producer 1\n" in registry.text()
    env.advance(60_000)
    assert env.open == 0
    assert env.bodies(DISCARDED) == [b"x"]
    assert "penstock_half_messages_discarded_total 1\n" in registry.text()
    assert env.end(sent).code == 201


def test_a_commit_that_the_store_refuses_does_not_count(env: TransactionFixture) -> None:
    env.connect()
    env.half(b"x")
    for _ in range(10):
        env.store.writer.refusal = None
        (check,) = env.advance(INTERVAL_MS)
        env.store.writer.refusal = DiskFull("no space")
        assert env.end(check.handle, COMMIT, checked=True).code == 14
    env.store.writer.refusal = None
    assert env.stored(DISCARDED) == []
    (check,) = env.advance(INTERVAL_MS)
    answer(env, check, COMMIT)


def test_nothing_is_discarded_while_the_store_refuses(
    env: TransactionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    env.connect()
    env.half(b"x")
    for _ in range(4):
        (check,) = env.advance(INTERVAL_MS)
        answer(env, check)
    (check,) = env.advance(INTERVAL_MS)
    answer(env, check)
    monkeypatch.setattr(env.store.maintenance, "tick", lambda now_ms: None)
    env.store.writer.refusal = DiskFull("no space")
    env.advance(2000)
    assert env.open == 1
    env.store.writer.refusal = None
    env.advance(2000)
    assert env.open == 0
    assert env.bodies(DISCARDED) == [b"x"]


# --- appends -------------------------------------------------------------------------------------


def test_a_counted_check_appends_the_half_message_again(env: TransactionFixture) -> None:
    env.connect()
    sent = env.half(b"x")
    for _ in range(3):
        (check,) = env.advance(INTERVAL_MS)
        answer(env, check)
    env.advance(INTERVAL_MS)
    appends = env.stored(HALF)
    counts = [half.properties.get("TRANSACTION_CHECK_TIMES") for half in appends]
    assert counts == [None, "1", "2", "3"]
    for half in appends[1:]:
        assert half.properties["TRAN_PREPARED_QUEUE_OFFSET"] == "0"
        assert half.prepared_offset == sent.log_offset
        assert (half.body, half.born_ms) == (b"x", appends[0].born_ms)
    assert env.ops() == [b"0,", b"1,", b"2,"]  # outdated appends get op messages


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_any_append_resolves_it_once(env: TransactionFixture, which: int, restarted: bool) -> None:
    env.connect()
    handles = [env.half(b"x")]
    for _ in range(3):
        (check,) = env.advance(INTERVAL_MS)
        if check.handle not in handles:
            handles.append(check.handle)
        answer(env, check)
    assert len(handles) == 3
    if restarted:
        env = env.restart()
    assert env.end(handles[which]).remark == "committed"
    for handle in handles:
        assert env.end(handle).remark == "already committed"
        assert env.end(handle, ROLLBACK).code == 200
    assert env.bodies() == [b"first", b"x"]
    (message,) = env.stored()[1:]
    assert message.prepared_offset == handles[0].log_offset
    env = env.restart()
    for handle in handles:
        assert env.end(handle).remark == "already committed"
    env.connect()
    assert env.advance(100_000) == []
    env.close()


def test_the_first_append_resolves_it_after_its_record_was_deleted(env: TransactionFixture) -> None:
    env.connect()
    sent = env.half(b"x")
    for _ in range(2):
        (check,) = env.advance(INTERVAL_MS)
        answer(env, check)
    while env.store.log.end < 4 * small_config(sync_flush=False).segment_bytes:
        env.send(body=b"y" * 1000)
    env.advance(INTERVAL_MS)
    pin = env.transactions.pinned_from()
    assert pin is not None
    assert pin > sent.log_offset
    assert env.end(sent, ROLLBACK, group="Q").code == 1
    assert env.end(sent, ROLLBACK).remark == "rolled back"


def test_an_immune_half_message_is_resolved_in_time_or_by_a_check(
    env: TransactionFixture,
) -> None:
    env.connect()
    immune = {"CHECK_IMMUNITY_TIME_IN_SECONDS": "10"}
    one, two = env.half(b"1", properties=immune), env.half(b"2", properties=immune)
    env.advance(9_000)
    assert env.end(one).code == 0
    checks = env.advance(2_000)
    late = env.end(two)
    assert late.code == 604
    assert "CHECK_IMMUNITY_TIME_IN_SECONDS" in (late.remark or "")
    assert env.end(two, ROLLBACK).code == 604
    assert env.end(one).remark == "already committed"
    answer(env, checks[0], COMMIT)
    assert env.bodies() == [b"first", b"1", b"2"]


# --- bounds --------------------------------------------------------------------------------------


def test_a_tick_is_bounded(env: TransactionFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_queues, "FOLLOW_MAX", 8)
    monkeypatch.setattr(check_back, "READ_COUNT_MAX", 4)
    monkeypatch.setattr(check_back, "DUE_MAX", 10)
    env.connect()
    for _ in range(100):
        env.half()
    env.tick(0)
    assert env.open < 20
    assert env.broker.due() <= env.now_ms
    env.now_ms += TIMEOUT_MS
    env.tick(1)
    assert len(env.checks()) <= 8
    checks = env.advance(2000)
    assert env.open == 100
    assert len({check.handle for check in checks}) >= 90


def test_checks_in_flight_per_connection_are_limited(
    env: TransactionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_back, "CHECKS_IN_FLIGHT_MAX", 5)
    env.connect()
    for _ in range(12):
        env.half()
    checks = env.advance(TIMEOUT_MS + 2000)
    assert len(checks) == 5
    for check in checks[:3]:
        answer(env, check, COMMIT)
    checks = env.advance(2000)
    assert len(checks) == 3
    env.connect(2)
    assert len(env.advance(2000)) == 4


def test_a_lagging_half_message_is_appended_again_without_counting(
    env: TransactionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_back, "MOVE_AFTER", 20)
    old = env.half(b"old")
    young = env.half(b"young", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "99999"})
    env.advance(TIMEOUT_MS + 1000)
    for _ in range(30):
        env.end(env.half(), ROLLBACK)
    env.advance(3000)
    again = [half for half in env.stored(HALF) if "TRAN_PREPARED_QUEUE_OFFSET" in half.properties]
    assert [half.body for half in again] == [b"old", b"young"]
    assert {half.properties["TRANSACTION_CHECK_TIMES"] for half in again} == {"0"}
    env = env.restart()
    assert env.open == 2
    assert env.end(old).remark == "committed"
    assert env.end(young).remark == "committed"
    env.close()


class SlowDisk:
    """A thread pool that runs its work when `do` is called."""

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


def test_a_half_message_resolved_during_its_read_is_not_checked(
    env: TransactionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    env.connect()
    one, two = env.half(b"1"), env.half(b"2")
    env.advance(1000)
    slow = SlowDisk()
    monkeypatch.setattr(env.store.disk, "submit", slow.submit)
    assert env.advance(TIMEOUT_MS) == []
    assert slow.work
    env.end(one)
    env.disconnect()
    slow.do()
    assert env.advance(1000) == []
    env.connect()
    env.advance(1000)
    slow.do()
    (check,) = env.advance(1000)
    assert check.handle == two
    slow.do()
    monkeypatch.undo()


# --- resuming ------------------------------------------------------------------------------------


def offset_id(env: TransactionFixture, topic: str, number: int = 0) -> str:
    return env.stored(topic)[number].offset_id


def test_a_discarded_half_message_can_be_resumed(env: TransactionFixture) -> None:
    env.connect()
    env.half(b"x")
    check_until_discarded(env, answered=True)
    answered = env.handle(
        RequestCode.RESUME_CHECK_HALF_MESSAGE, topic=DISCARDED, msgId=offset_id(env, DISCARDED)
    )
    assert answered.code == 0  # type: ignore[union-attr]
    (check,) = env.advance(TIMEOUT_MS + 2000)
    assert check.message.properties["TRANSACTION_CHECK_TIMES"] == "1"
    answer(env, check, COMMIT)
    assert env.bodies() == [b"first", b"x"]
    assert env.end(check.handle).remark == "already committed"


def test_resume_resets_the_checks_of_an_open_half_message(env: TransactionFixture) -> None:
    env.connect()
    env.half(b"x")
    for _ in range(3):
        (check,) = env.advance(INTERVAL_MS)
        answer(env, check)
    answered = env.handle(
        RequestCode.RESUME_CHECK_HALF_MESSAGE, topic=HALF, msgId=offset_id(env, HALF, 1)
    )
    assert answered.code == 0  # type: ignore[union-attr]
    assert env.open == 1
    assert env.stored(HALF)[-1].properties["TRANSACTION_CHECK_TIMES"] == "0"
    assert check_until_discarded(env, answered=True) == 5


def test_other_messages_can_not_be_resumed(env: TransactionFixture) -> None:
    code = RequestCode.RESUME_CHECK_HALF_MESSAGE
    env.end(env.half())
    end = env.store.log.end
    nowhere = "7F00000100002A9F00000000000F0000"
    for msg_id, expected in (
        (offset_id(env, HALF), 1),
        (offset_id(env, "T"), 1),
        (nowhere, 1),
        ("xyz", 29),
    ):
        command = Command(code, {"topic": "T", "msgId": msg_id}, now_ms=env.now_ms)
        assert env.answer(command).code == expected
    assert env.store.log.end == end


# --- memory --------------------------------------------------------------------------------------


def test_half_messages_that_are_resolved_at_once_are_never_read(
    env: TransactionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_messages, "OUTCOMES_MAX", 10)
    for _ in range(50):
        env.end(env.half(), ROLLBACK)
    monkeypatch.setattr(env.transactions._queues, "read", None)
    env.advance(1000)
    assert env.open == 0
    assert env.transactions.pinned_from() is None
    assert env.transactions.half_messages.position == 50
    assert len(env.transactions.half_messages._outcomes) == 10


def test_the_oldest_open_half_message_pins_the_log(env: TransactionFixture) -> None:
    assert env.transactions.pinned_from() is None
    one, two = env.half(), env.half()
    pin = env.transactions.pinned_from()
    assert pin is not None
    assert pin <= one.log_offset
    env.advance(1000)
    assert env.transactions.pinned_from() == one.log_offset
    env.end(one)
    assert env.transactions.pinned_from() == two.log_offset
    env.end(two)
    assert env.transactions.pinned_from() is None
