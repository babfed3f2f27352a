"""Recovery of open half messages after restarts, in every phase of a transaction."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.broker.transaction import half_recovery
from penstock.broker.transaction.half_queues import decode_op_body
from penstock.errors import TransactionRolledBack
from penstock.store.put import PUT_OK
from penstock.store.store import MessageStore
from penstock.wire.message import encode_properties
from penstock.wire.record import Record, StoredRecord
from tests.unit.broker.transaction.transaction_kit import (
    COMMIT,
    DISCARDED,
    HALF,
    INTERVAL_MS,
    OP,
    ROLLBACK,
    TIMEOUT_MS,
    UNKNOWN,
    Killed,
    Sent,
    TransactionFixture,
    transaction_fixture,
)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[TransactionFixture]:
    made = TransactionFixture(tmp_path / "store")
    made.send(body=b"first")
    yield made
    made.close()


def die_at_op_message(env: TransactionFixture) -> None:
    """Let the broker be killed between a committed message and its op message."""

    def put_op(body: bytes, now_ms: int) -> bool:
        raise Killed

    env.transactions._queues._put_op = put_op  # type: ignore[method-assign]


def save_progress(env: TransactionFixture) -> None:
    """Let progress be stored and saved, as the server does."""
    for _ in range(2):
        env.flush()
        env.tick(1000)
    env.save()


def put(
    env: TransactionFixture,
    topic: str,
    body: bytes,
    properties: dict[str, str],
    *,
    queue_id: int = 0,
    sys_flag: int = 0,
    prepared: int = 0,
) -> Sent:
    """Store a message as another broker does."""
    record = Record()
    record.fill(topic.encode(), body, encode_properties(properties))
    record.queue_id, record.sys_flag, record.prepared_offset = queue_id, sys_flag, prepared
    record.born_ms = env.now_ms
    assert env.store.put(record, env.now_ms) == PUT_OK
    path = env.store.writer
    return Sent(path.queue_offset, path.offset, properties.get("UNIQ_KEY", ""))


def put_half(env: TransactionFixture, key: str, **more: str) -> Sent:
    properties = {
        "UNIQ_KEY": key,
        "PGROUP": "P",
        "TRAN_MSG": "true",
        "REAL_TOPIC": "T",
        "REAL_QID": "0",
    }
    return put(env, HALF, key.encode(), {**properties, **more})


def put_committed(env: TransactionFixture, half: Sent, prepared: int | None = None) -> None:
    properties = {"UNIQ_KEY": half.key, "PGROUP": "P", "TRAN_MSG": "true"}
    prepared = half.log_offset if prepared is None else prepared
    put(env, "T", half.key.encode(), properties, sys_flag=COMMIT, prepared=prepared)


def put_op(env: TransactionFixture, body: bytes, tag: str = "d") -> None:
    put(env, OP, body, {"TAGS": tag})


# --- our own store -------------------------------------------------------------------------------


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("saved", [True, False])
def test_open_half_messages_are_recovered(
    env: TransactionFixture, clean: bool, saved: bool
) -> None:
    sent = [env.half(str(n).encode()) for n in range(6)]
    env.end(sent[1])
    env.end(sent[2], ROLLBACK)
    env.advance(2000)
    env.end(sent[4])
    if saved:
        save_progress(env)
        assert env.progress(HALF) is None  # the first one is open
    env = env.restart(clean=clean)
    assert env.open == 3
    assert env.bodies() == [b"first", b"1", b"4"]
    assert [env.end(half).remark for half in sent[:3]] == [
        "committed",
        "already committed",
        f"the transaction is already rolled back; {TransactionRolledBack.hint}",
    ]
    env.connect()
    checks = env.advance(TIMEOUT_MS + 2000)
    assert [check.handle for check in checks] == [sent[3], sent[5]]
    for check, state in zip(checks, (COMMIT, ROLLBACK), strict=True):
        env.end(check.handle, state, checked=True)
    assert env.bodies() == [b"first", b"1", b"4", b"0", b"3"]
    env = env.restart(clean=clean)
    assert env.open == 0
    for half, state, code in zip(sent, (8, 8, 12, 8, 8, 12), (0,) * 6, strict=True):
        assert env.end(half, state).code == code
        assert env.end(half, 20 - state).code in (200, 201)
    env.close()


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("moved", [False, True])
def test_a_committed_message_resolves_its_half_message_without_an_op_message(
    env: TransactionFixture, saved: bool, moved: bool
) -> None:
    sent, other = env.half(b"x"), env.half(b"y")
    if moved:
        env.connect()
        for _ in range(2):
            for check in env.advance(INTERVAL_MS):
                env.end(check.handle, UNKNOWN, checked=True)
    if saved:
        save_progress(env)
        assert env.transactions._queues.table.searched_to > 0
    die_at_op_message(env)
    with suppress(Killed):
        env.end(sent)
    env = env.restart()
    assert env.open == 1
    assert env.end(sent).remark == "already committed"
    assert env.end(sent, ROLLBACK).code == 200
    assert env.bodies() == [b"first", b"x"]
    env.tick(0)
    assert sent.queue_offset in decode_op_body(env.ops()[-1]) or moved  # it is written now
    env = env.restart()
    assert env.open == 1
    assert env.end(other).remark == "committed"
    assert env.bodies() == [b"first", b"x", b"y"]
    env.close()


def test_a_delayed_message_resolves_its_half_message(env: TransactionFixture) -> None:
    sent = env.half(b"x", properties={"DELAY": "1"})
    die_at_op_message(env)
    with suppress(Killed):
        env.end(sent)
    env = env.restart()
    assert env.open == 0
    env.advance(2000)
    assert env.bodies() == [b"first", b"x"]
    assert env.end(sent).remark == "already committed"
    env.close()


def test_a_half_message_at_log_offset_zero(tmp_path: Path) -> None:
    env = TransactionFixture(tmp_path / "store")
    sent = env.half(b"x")
    assert sent.log_offset == 0
    other = env.half(b"y", properties={"DELAY": "1"})
    env.end(other)
    env.advance(2000)
    env = env.restart()
    assert env.open == 1  # a delivered message of another has the prepared offset 0
    env.connect()
    for _ in range(2):
        (check,) = env.advance(INTERVAL_MS)
        env.end(check.handle, UNKNOWN, checked=True)
    env = env.restart()
    assert env.open == 1
    die_at_op_message(env)
    with suppress(Killed):
        env.end(sent)
    env = env.restart()
    assert env.open == 0
    assert env.end(sent).remark == "already committed"
    assert env.bodies().count(b"x") == 1
    env = env.restart()
    assert env.open == 0
    env.close()


def test_a_half_message_is_discarded_once(env: TransactionFixture) -> None:
    env.connect()
    sent = env.half(b"x")
    for _ in range(5):
        (check,) = env.advance(INTERVAL_MS)
        if check.message.properties["TRANSACTION_CHECK_TIMES"] == "5":
            die_at_op_message(env)
        env.end(check.handle, UNKNOWN, checked=True)
    with pytest.raises(Killed):
        env.advance(1000)
    env = env.restart()
    assert env.open == 0
    assert env.bodies(DISCARDED) == [b"x"]
    assert env.end(sent).code == 201
    env.close()


@pytest.mark.parametrize("unknown", [1, 2, 3, 4])
def test_the_number_of_checks_survives_a_restart(env: TransactionFixture, unknown: int) -> None:
    env.connect()
    env.half(b"x")
    for _ in range(unknown):
        (check,) = env.advance(INTERVAL_MS)
        env.end(check.handle, UNKNOWN, checked=True)
    env.advance(INTERVAL_MS)  # checked once more: the count is in the store
    env = env.restart()
    env.connect()
    (check,) = env.advance(INTERVAL_MS + 1000)
    assert check.message.properties["TRANSACTION_CHECK_TIMES"] == str(unknown + 1)
    env.close()


def test_a_restart_between_second_append_and_op_message(env: TransactionFixture) -> None:
    env.connect()
    sent = env.half(b"x")
    (check,) = env.advance(TIMEOUT_MS + 1000)
    env.end(check.handle, UNKNOWN, checked=True)
    die_at_op_message(env)
    with pytest.raises(Killed):
        env.advance(INTERVAL_MS)
    assert len(env.stored(HALF)) == 2
    env = env.restart()
    assert env.open == 1
    assert env.end(sent).remark == "committed"
    env = env.restart()
    assert env.open == 0
    assert env.bodies() == [b"first", b"x"]
    env.close()


def test_progress_is_stored_after_a_flush(env: TransactionFixture) -> None:
    sent = [env.half() for _ in range(4)]
    for half in sent[:2]:
        env.end(half)
    env.advance(3000)
    assert (env.progress(HALF), env.progress(OP)) == (None, None)
    save_progress(env)
    assert (env.progress(HALF), env.progress(OP)) == (2, None)
    env.end(sent[3])
    save_progress(env)
    assert env.progress(HALF) == 2
    env.end(sent[2])
    env.advance(3000)
    assert env.progress(HALF) == 2
    save_progress(env)
    assert (env.progress(HALF), env.progress(OP)) == (4, 4)
    end = env.store.log.end
    env = env.restart()
    assert env.open == 0
    assert env.transactions.half_messages.position == 4
    env.advance(100_000)
    assert env.store.log.end == end
    env.close()


def test_op_messages_out_of_order_are_recovered(env: TransactionFixture) -> None:
    """The op message of a later half message may precede that of an earlier one."""
    sent = []
    for number in range(40):
        sent.append(env.half(str(number).encode()))
        if number % 3:
            env.end(sent[-1], ROLLBACK)
        if number % 5 == 0:
            save_progress(env)
    save_progress(env)
    for half in sent[:20:3]:
        env.end(half, ROLLBACK)
    save_progress(env)
    assert env.progress(HALF) == 21
    assert (env.progress(OP) or 0) > 0
    env = env.restart()
    left = {half.first_offset for half in env.transactions.half_messages.open.values()}
    assert left == set(range(21, 40, 3))
    env.close()


def test_recovery_searches_only_the_end_of_the_log(
    env: TransactionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    env.half(b"x")
    for _ in range(50):
        env.send(body=b"y")
    save_progress(env)
    searched = env.transactions._queues.table.searched_to
    assert searched > 0
    for _ in range(3):
        env.send(body=b"z")
    seen: list[int] = []
    walk_log = half_recovery.walk_log

    def record_walk(store: MessageStore, offset: int) -> Iterator[StoredRecord]:
        seen.append(offset)
        return walk_log(store, offset)

    monkeypatch.setattr(half_recovery, "walk_log", record_walk)
    env = env.restart()
    assert seen == [searched]
    env.close()


def test_the_whole_log_can_be_walked(env: TransactionFixture) -> None:
    sizes = [10, 3000, 1, 12_000, 200, 5000] * 8
    for size in sizes:
        env.send(body=b"x" * size)
    env.store.publish()
    found = [stored.body_length for stored in half_recovery.walk_log(env.store, 0)]
    assert found == [5, *sizes]


def test_the_walk_continues_behind_damaged_records(env: TransactionFixture) -> None:
    sizes = [10, 3000, 1, 12_000, 200, 5000] * 4
    places = []
    for size in sizes:
        env.send(body=b"x" * size)
        places.append(env.store.writer.last_offset)
    env.store.publish()
    for victim in (1, 8, 9):
        segment = env.store.log.segments.find(places[victim])
        assert segment is not None
        os.pwrite(segment.fd, b"\xff\xff", places[victim] - segment.start)
    found = [stored.body_length for stored in half_recovery.walk_log(env.store, 0)]
    assert found == [5, *(size for n, size in enumerate(sizes) if n not in (1, 8, 9))]


def test_the_log_can_be_walked_with_small_reads(
    env: TransactionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [10, 3000, 1, 12_000, 200, 5000] * 4
    for size in sizes:
        env.send(body=b"x" * size)
    env.store.publish()
    for most in (8, 100, 1000):
        monkeypatch.setattr(half_recovery, "READ_BYTES", most)
        found = [stored.body_length for stored in half_recovery.walk_log(env.store, 0)]
        assert found == [5, *sizes]


def test_a_walk_can_look_for_texts(
    env: TransactionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at the beginning and the end of a record, and where a read ends within the text."""
    bodies = [b"red" + b"x" * 3000, b"x" * 50, b"x" * 2000 + b"blue", b"re", b"d", b"redblue"] * 4
    for body in bodies:
        env.send(body=body)
    env.store.publish()
    wanted = [len(body) for body in bodies if b"red" in body or b"blue" in body]
    for most in (8, 100, 1000, 1 << 20):
        monkeypatch.setattr(half_recovery, "READ_BYTES", most)
        walk = half_recovery.walk_log(env.store, 0, (b"red", b"blue"))
        assert [stored.body_length for stored in walk] == wanted
        assert list(half_recovery.walk_log(env.store, 0, (b"green",))) == []


# --- stores of other brokers ---------------------------------------------------------------------


def test_op_messages_of_apache_name_many_half_messages(env: TransactionFixture) -> None:
    sent = [put_half(env, f"K{n}") for n in range(6)]
    put_op(env, b"0,2,")
    put_op(env, b"5")  # as 4.x writes them
    put_op(env, b"1,", tag="x")
    put_op(env, b"nonsense,-1,99999999999999999999999,,")
    env = env.restart()
    assert env.open == 3
    assert env.end(sent[1]).remark == "committed"
    assert env.end(sent[5]).code == 201
    env.close()


def test_a_batched_op_that_apache_did_not_write_in_time(env: TransactionFixture) -> None:
    sent = [put_half(env, f"K{n}") for n in range(4)]
    put_committed(env, sent[0])
    put_committed(env, sent[2])
    for _ in range(30):
        env.send(body=b"others")
    put_op(env, b"0,")
    for _ in range(30):
        env.send(body=b"others")
    env = env.restart()
    assert env.open == 2
    assert env.end(sent[2]).remark == "already committed"
    assert env.end(sent[3]).remark == "committed"
    assert env.bodies().count(b"K2") == 1
    env.close()


@pytest.mark.parametrize("passed", [False, True])
def test_a_half_message_that_apache_appended_again(env: TransactionFixture, passed: bool) -> None:
    first = put_half(env, "K")
    again = put_half(env, "K", TRANSACTION_CHECK_TIMES="1")
    third = put_half(env, "K", TRANSACTION_CHECK_TIMES="2")
    if passed:  # Apache's stored progress is past the older appends
        env.context.offsets.table.commit(HALF, "CID_RMQ_SYS_TRANS", 0, 2, env.now_ms)
        env.save()
    env = env.restart()
    assert env.open == 1
    env.connect()
    (check,) = env.advance(INTERVAL_MS + TIMEOUT_MS)
    assert check.message.properties["TRANSACTION_CHECK_TIMES"] == "3"
    assert check.handle == third
    assert env.end(again if passed else first).remark == "committed"
    assert env.bodies() == [b"first", b"K"]
    assert env.end(third).remark == "already committed"
    env.close()


def test_two_sends_of_one_message_are_two_half_messages(env: TransactionFixture) -> None:
    one, two = put_half(env, "K"), put_half(env, "K")
    env = env.restart()
    assert env.open == 2
    env.end(two)
    env = env.restart()
    assert env.open == 1
    assert env.end(one, ROLLBACK).remark == "rolled back"
    env.close()


def test_apache_commits_by_the_first_append(env: TransactionFixture) -> None:
    first = put_half(env, "K")
    again = put_half(env, "K", TRANSACTION_CHECK_TIMES="1")
    put_committed(env, first)
    put_op(env, b"0,")
    env.context.offsets.table.commit(HALF, "CID_RMQ_SYS_TRANS", 0, 1, env.now_ms)
    env.save()
    env = env.restart()
    assert env.open == 0
    assert env.bodies() == [b"first", b"K"]
    env.tick(0)
    assert decode_op_body(env.ops()[-1]) == [again.queue_offset]
    env.close()


@pytest.mark.parametrize("ended", [False, True])
def test_a_half_message_that_apache_appended_again_as_immune(
    env: TransactionFixture, ended: bool
) -> None:
    immune = {"CHECK_IMMUNITY_TIME_IN_SECONDS": "60", "TRANSACTION_CHECK_TIMES": "1"}
    first = put_half(env, "K", CHECK_IMMUNITY_TIME_IN_SECONDS="60")
    put_half(env, "other")
    put_half(env, "K", TRAN_PREPARED_QUEUE_OFFSET="0", **immune)
    if ended:
        put_op(env, b"0,")
    env.context.offsets.table.commit(HALF, "CID_RMQ_SYS_TRANS", 0, 1, env.now_ms)
    env.save()
    env = env.restart()
    assert env.open == (1 if ended else 2)
    if not ended:
        assert env.end(first).remark == "committed"
        assert env.stored()[-1].prepared_offset == first.log_offset
    env.close()


@pytest.mark.parametrize(("immunity_s", "expected"), [("60", "1"), ("", "5")])
def test_a_half_message_that_apache_counted_often_is_checked_before_it_is_discarded(
    env: TransactionFixture, immunity_s: str, expected: str
) -> None:
    more = {"CHECK_IMMUNITY_TIME_IN_SECONDS": immunity_s} if immunity_s else {}
    put_half(env, "K", **more)
    put_half(env, "K", TRAN_PREPARED_QUEUE_OFFSET="0", TRANSACTION_CHECK_TIMES="9", **more)
    env = env.restart()
    env.connect()
    (check,) = env.advance(60_000 + INTERVAL_MS + TIMEOUT_MS)[:1]
    assert check.message.properties["TRANSACTION_CHECK_TIMES"] == expected
    env.close()


def test_progress_beyond_the_queue_is_limited(env: TransactionFixture) -> None:
    env.half(b"x")
    env.context.offsets.table.commit(HALF, "CID_RMQ_SYS_TRANS", 0, 99, env.now_ms)
    env.context.offsets.table.commit(OP, "CID_RMQ_SYS_TRANS", 0, 99, env.now_ms)
    env.save()
    env = env.restart()
    assert env.transactions.half_messages.position == 1
    env.close()


def test_a_damaged_position_only_makes_the_search_longer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with transaction_fixture(tmp_path) as env:
        env.send(body=b"first")
        env.half(b"open")
        env.end(env.half(b"committed"))
        save_progress(env)
    for name in ("penstock-transactions.json", "penstock-transactions.json.bak"):
        (tmp_path / "config" / name).write_bytes(b"{")
    with transaction_fixture(tmp_path) as env:
        assert env.open == 1
    assert "searching the log from the first open half message on" in caplog.text
