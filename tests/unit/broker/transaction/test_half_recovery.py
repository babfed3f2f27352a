"""Transactions across restarts: the open halves are known again, in every phase."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.broker.transaction import half_recovery
from penstock.broker.transaction.half_queues import done_by
from penstock.errors import TransactionRolledBack
from penstock.store.put import PUT_OK
from penstock.store.store import MessageStore
from penstock.wire.message import encode_properties
from penstock.wire.record import Record, StoredRecord
from tests.unit.broker.transaction.transaction_kit import (
    COMMIT,
    HALF,
    INTERVAL_MS,
    OP,
    PARKED,
    ROLLBACK,
    TIMEOUT_MS,
    UNKNOWN,
    Killed,
    Sent,
    Trade,
)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Trade]:
    made = Trade(tmp_path / "store")
    made.send(body=b"first")
    yield made
    made.close()


def die_at_the_op(home: Trade) -> None:
    """Let the broker be killed between a committed message and its op message."""

    def put_op(body: bytes, now_ms: int) -> bool:
        raise Killed

    home.transactions._log._put_op = put_op  # type: ignore[method-assign]


def note(home: Trade) -> None:
    """Let progress be noted and written, as the server does."""
    for _ in range(2):
        home.flush()
        home.tick(1000)
    home.save()


def put(
    home: Trade, topic: str, body: bytes, properties: dict[str, str], *, queue_id: int = 0,
    sys_flag: int = 0, prepared: int = 0,
) -> Sent:  # fmt: skip
    """Store a message as another broker would have."""
    record = Record()
    record.fill(topic.encode(), body, encode_properties(properties))
    record.queue_id, record.sys_flag, record.prepared_offset = queue_id, sys_flag, prepared
    record.born_ms = home.now_ms
    assert home.store.put(record, home.now_ms) == PUT_OK
    path = home.store.path
    return Sent(path.queue_offset, path.offset, properties.get("UNIQ_KEY", ""))


def put_half(home: Trade, key: str, **more: str) -> Sent:
    properties = {
        "UNIQ_KEY": key, "PGROUP": "P", "TRAN_MSG": "true", "REAL_TOPIC": "T", "REAL_QID": "0",
    }  # fmt: skip
    return put(home, HALF, key.encode(), {**properties, **more})


def put_real(home: Trade, half: Sent, prepared: int | None = None) -> None:
    properties = {"UNIQ_KEY": half.key, "PGROUP": "P", "TRAN_MSG": "true"}
    prepared = half.log_offset if prepared is None else prepared
    put(home, "T", half.key.encode(), properties, sys_flag=COMMIT, prepared=prepared)


def put_op(home: Trade, body: bytes, tag: str = "d") -> None:
    put(home, OP, body, {"TAGS": tag})


# --- our own store -------------------------------------------------------------------------------


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("noted", [True, False])
def test_open_halves_are_known_again(home: Trade, clean: bool, noted: bool) -> None:
    sent = [home.half(str(n).encode()) for n in range(6)]
    home.end(sent[1])
    home.end(sent[2], ROLLBACK)
    home.let_pass(2000)
    home.end(sent[4])
    if noted:
        note(home)
        assert home.progress(HALF) is None  # the first one is open
    home = home.restart(clean=clean)
    assert home.open == 3
    assert home.bodies() == [b"first", b"1", b"4"]
    assert [home.end(half).remark for half in sent[:3]] == [
        "done: committed",
        "done before: committed",
        f"the transaction was rolled back before: too late for this; {TransactionRolledBack.hint}",
    ]
    home.come()
    checks = home.let_pass(TIMEOUT_MS + 2000)
    assert [check.handle for check in checks] == [sent[3], sent[5]]
    for check, state in zip(checks, (COMMIT, ROLLBACK), strict=True):
        home.end(check.handle, state, checked=True)
    assert home.bodies() == [b"first", b"1", b"4", b"0", b"3"]
    home = home.restart(clean=clean)
    assert home.open == 0
    for half, state, code in zip(sent, (8, 8, 12, 8, 8, 12), (0,) * 6, strict=True):
        assert home.end(half, state).code == code
        assert home.end(half, 20 - state).code in (200, 201)
    home.close()


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize("moved", [False, True])
def test_a_message_ends_its_half_even_if_the_op_is_lost(
    home: Trade, noted: bool, moved: bool
) -> None:
    sent, other = home.half(b"x"), home.half(b"y")
    if moved:
        home.come()
        for _ in range(2):
            for check in home.let_pass(INTERVAL_MS):
                home.end(check.handle, UNKNOWN, checked=True)
    if noted:
        note(home)
        assert home.transactions._log.table.searched_to > 0
    die_at_the_op(home)
    with suppress(Killed):
        home.end(sent)
    home = home.restart()
    assert home.open == 1
    assert home.end(sent).remark == "done before: committed"
    assert home.end(sent, ROLLBACK).code == 200
    assert home.bodies() == [b"first", b"x"]
    home.tick(0)
    assert sent.queue_offset in done_by(home.ops()[-1]) or moved  # it is noted now
    home = home.restart()
    assert home.open == 1
    assert home.end(other).remark == "done: committed"
    assert home.bodies() == [b"first", b"x", b"y"]
    home.close()


def test_a_delayed_message_ends_its_half_too(home: Trade) -> None:
    sent = home.half(b"x", properties={"DELAY": "1"})
    die_at_the_op(home)
    with suppress(Killed):
        home.end(sent)
    home = home.restart()
    assert home.open == 0
    home.let_pass(2000)
    assert home.bodies() == [b"first", b"x"]
    assert home.end(sent).remark == "done before: committed"
    home.close()


def test_the_half_at_the_beginning_of_the_log(tmp_path: Path) -> None:
    home = Trade(tmp_path / "store")
    sent = home.half(b"x")
    assert sent.log_offset == 0
    other = home.half(b"y", properties={"DELAY": "1"})
    home.end(other)
    home.let_pass(2000)
    home = home.restart()
    assert home.open == 1  # a delivered message of another has the prepared offset 0
    home.come()
    for _ in range(2):
        (check,) = home.let_pass(INTERVAL_MS)
        home.end(check.handle, UNKNOWN, checked=True)
    home = home.restart()
    assert home.open == 1
    die_at_the_op(home)
    with suppress(Killed):
        home.end(sent)
    home = home.restart()
    assert home.open == 0
    assert home.end(sent).remark == "done before: committed"
    assert home.bodies().count(b"x") == 1
    home = home.restart()
    assert home.open == 0
    home.close()


def test_a_half_that_was_given_up_is_parked_once(home: Trade) -> None:
    home.come()
    sent = home.half(b"x")
    for _ in range(5):
        (check,) = home.let_pass(INTERVAL_MS)
        if check.message.properties["TRANSACTION_CHECK_TIMES"] == "5":
            die_at_the_op(home)
        home.end(check.handle, UNKNOWN, checked=True)
    with pytest.raises(Killed):
        home.let_pass(1000)
    home = home.restart()
    assert home.open == 0
    assert home.bodies(PARKED) == [b"x"]
    assert home.end(sent).code == 201
    home.close()


@pytest.mark.parametrize("unknown", [1, 2, 3, 4])
def test_what_was_counted_before_is_not_forgotten(home: Trade, unknown: int) -> None:
    home.come()
    home.half(b"x")
    for _ in range(unknown):
        (check,) = home.let_pass(INTERVAL_MS)
        home.end(check.handle, UNKNOWN, checked=True)
    home.let_pass(INTERVAL_MS)  # asked once more: what was counted is in the store
    home = home.restart()
    home.come()
    (check,) = home.let_pass(INTERVAL_MS + 1000)
    assert check.message.properties["TRANSACTION_CHECK_TIMES"] == str(unknown + 1)
    home.close()


def test_a_restart_between_append_and_op_of_a_counted_half(home: Trade) -> None:
    home.come()
    sent = home.half(b"x")
    (check,) = home.let_pass(TIMEOUT_MS + 1000)
    home.end(check.handle, UNKNOWN, checked=True)
    die_at_the_op(home)
    with pytest.raises(Killed):
        home.let_pass(INTERVAL_MS)
    assert len(home.stored(HALF)) == 2
    home = home.restart()
    assert home.open == 1
    assert home.end(sent).remark == "done: committed"
    home = home.restart()
    assert home.open == 0
    assert home.bodies() == [b"first", b"x"]
    home.close()


def test_progress_is_noted_when_it_is_durable(home: Trade) -> None:
    sent = [home.half() for _ in range(4)]
    for half in sent[:2]:
        home.end(half)
    home.let_pass(3000)
    assert (home.progress(HALF), home.progress(OP)) == (None, None)
    note(home)
    assert (home.progress(HALF), home.progress(OP)) == (2, None)
    home.end(sent[3])
    note(home)
    assert home.progress(HALF) == 2
    home.end(sent[2])
    home.let_pass(3000)
    assert home.progress(HALF) == 2
    note(home)
    assert (home.progress(HALF), home.progress(OP)) == (4, 4)
    end = home.store.log.end
    home = home.restart()
    assert home.open == 0
    assert home.transactions.halves.position == 4
    home.let_pass(100_000)
    assert home.store.log.end == end
    home.close()


def test_ops_of_open_halves_are_read_from_where_they_may_be(home: Trade) -> None:
    """The op of a later half may lie before that of an earlier one."""
    sent = []
    for number in range(40):
        sent.append(home.half(str(number).encode()))
        if number % 3:
            home.end(sent[-1], ROLLBACK)
        if number % 5 == 0:
            note(home)
    note(home)
    for half in sent[:20:3]:
        home.end(half, ROLLBACK)
    note(home)
    assert home.progress(HALF) == 21
    assert (home.progress(OP) or 0) > 0
    home = home.restart()
    left = {half.first for half in home.transactions.halves.open.values()}
    assert left == set(range(21, 40, 3))
    home.close()


def test_only_so_much_of_the_log_is_searched(home: Trade, monkeypatch: pytest.MonkeyPatch) -> None:
    home.half(b"x")
    for _ in range(50):
        home.send(body=b"y")
    note(home)
    searched = home.transactions._log.table.searched_to
    assert searched > 0
    for _ in range(3):
        home.send(body=b"z")
    seen: list[int] = []
    walk = half_recovery.walk

    def note_walk(store: MessageStore, offset: int) -> Iterator[StoredRecord]:
        seen.append(offset)
        return walk(store, offset)

    monkeypatch.setattr(half_recovery, "walk", note_walk)
    home = home.restart()
    assert seen == [searched]
    home.close()


def test_the_whole_log_can_be_walked(home: Trade) -> None:
    sizes = [10, 3000, 1, 12_000, 200, 5000] * 8
    for size in sizes:
        home.send(body=b"x" * size)
    home.store.settle()
    found = [stored.body_length for stored in half_recovery.walk(home.store, 0)]
    assert found == [5, *sizes]


def test_walking_with_small_reads(home: Trade, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [10, 3000, 1, 12_000, 200, 5000] * 4
    for size in sizes:
        home.send(body=b"x" * size)
    home.store.settle()
    for most in (8, 100, 1000):
        monkeypatch.setattr(half_recovery, "READ_BYTES", most)
        found = [stored.body_length for stored in half_recovery.walk(home.store, 0)]
        assert found == [5, *sizes]


# --- stores of other brokers ---------------------------------------------------------------------


def test_ops_of_apache_name_many_halves(home: Trade) -> None:
    sent = [put_half(home, f"K{n}") for n in range(6)]
    put_op(home, b"0,2,")
    put_op(home, b"5")  # as 4.x writes them
    put_op(home, b"1,", tag="x")
    put_op(home, b"nonsense,-1,99999999999999999999999,,")
    home = home.restart()
    assert home.open == 3
    assert home.end(sent[1]).remark == "done: committed"
    assert home.end(sent[5]).code == 201
    home.close()


def test_a_batched_op_that_apache_did_not_write_in_time(home: Trade) -> None:
    sent = [put_half(home, f"K{n}") for n in range(4)]
    put_real(home, sent[0])
    put_real(home, sent[2])
    for _ in range(30):
        home.send(body=b"others")
    put_op(home, b"0,")
    for _ in range(30):
        home.send(body=b"others")
    home = home.restart()
    assert home.open == 2
    assert home.end(sent[2]).remark == "done before: committed"
    assert home.end(sent[3]).remark == "done: committed"
    assert home.bodies().count(b"K2") == 1
    home.close()


@pytest.mark.parametrize("passed", [False, True])
def test_a_half_that_apache_appended_again(home: Trade, passed: bool) -> None:
    first = put_half(home, "K")
    again = put_half(home, "K", TRANSACTION_CHECK_TIMES="1")
    third = put_half(home, "K", TRANSACTION_CHECK_TIMES="2")
    if passed:  # Apache notes that it is past the older ones
        home.context.offsets.table.commit(HALF, "CID_RMQ_SYS_TRANS", 0, 2, home.now_ms)
        home.save()
    home = home.restart()
    assert home.open == 1
    home.come()
    (check,) = home.let_pass(INTERVAL_MS + TIMEOUT_MS)
    assert check.message.properties["TRANSACTION_CHECK_TIMES"] == "3"
    assert check.handle == third
    assert home.end(again if passed else first).remark == "done: committed"
    assert home.bodies() == [b"first", b"K"]
    assert home.end(third).remark == "done before: committed"
    home.close()


def test_two_sends_of_one_message_are_two_halves(home: Trade) -> None:
    one, two = put_half(home, "K"), put_half(home, "K")
    home = home.restart()
    assert home.open == 2
    home.end(two)
    home = home.restart()
    assert home.open == 1
    assert home.end(one, ROLLBACK).remark == "done: rolled back"
    home.close()


def test_apache_commits_by_the_first_handle_what_it_appended_again(home: Trade) -> None:
    first = put_half(home, "K")
    again = put_half(home, "K", TRANSACTION_CHECK_TIMES="1")
    put_real(home, first)
    put_op(home, b"0,")
    home.context.offsets.table.commit(HALF, "CID_RMQ_SYS_TRANS", 0, 1, home.now_ms)
    home.save()
    home = home.restart()
    assert home.open == 0
    assert home.bodies() == [b"first", b"K"]
    home.tick(0)
    assert done_by(home.ops()[-1]) == [again.queue_offset]
    home.close()


@pytest.mark.parametrize("ended", [False, True])
def test_a_half_that_apache_leaves_in_peace(home: Trade, ended: bool) -> None:
    immune = {"CHECK_IMMUNITY_TIME_IN_SECONDS": "60", "TRANSACTION_CHECK_TIMES": "1"}
    first = put_half(home, "K", CHECK_IMMUNITY_TIME_IN_SECONDS="60")
    put_half(home, "other")
    put_half(home, "K", TRAN_PREPARED_QUEUE_OFFSET="0", **immune)
    if ended:
        put_op(home, b"0,")
    home.context.offsets.table.commit(HALF, "CID_RMQ_SYS_TRANS", 0, 1, home.now_ms)
    home.save()
    home = home.restart()
    assert home.open == (1 if ended else 2)
    if not ended:
        assert home.end(first).remark == "done: committed"
        assert home.stored()[-1].prepared_offset == first.log_offset
    home.close()


def test_progress_beyond_the_queue_is_not_believed(home: Trade) -> None:
    home.half(b"x")
    home.context.offsets.table.commit(HALF, "CID_RMQ_SYS_TRANS", 0, 99, home.now_ms)
    home.context.offsets.table.commit(OP, "CID_RMQ_SYS_TRANS", 0, 99, home.now_ms)
    home.save()
    home = home.restart()
    assert home.transactions.halves.position == 1
    home.close()
