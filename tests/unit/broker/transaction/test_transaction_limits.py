"""Transactions under hard conditions: concurrent requests, unreadable records, missing op messages,
and tables that must not grow without limit."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.transaction import check_back, half_messages
from penstock.errors import ReadFailed
from penstock.rpc.answers import InThread, Reply, TickAt
from penstock.rpc.command import Command
from penstock.wire.codes import RequestCode
from tests.unit.broker.transaction.test_half_recovery import (
    put_committed,
    put_half,
    put_op,
    save_progress,
)
from tests.unit.broker.transaction.transaction_kit import (
    COMMIT,
    DISCARDED,
    HALF,
    INTERVAL_MS,
    ROLLBACK,
    TIMEOUT_MS,
    UNKNOWN,
    Sent,
    TransactionFixture,
)

HOUR_MS = 3_600_000


@pytest.fixture
def env(tmp_path: Path) -> Iterator[TransactionFixture]:
    made = TransactionFixture(tmp_path / "store")
    made.send(body=b"first")
    yield made
    made.close()


def check_once(env: TransactionFixture) -> None:
    """Check all open half messages; every answer is unknown."""
    for check in env.advance(INTERVAL_MS):
        env.end(check.handle, UNKNOWN, checked=True)


# --- concurrent requests -------------------------------------------------------------------------


def command(env: TransactionFixture, sent: Sent, state: int) -> Command:
    ext = {
        "producerGroup": "P",
        "tranStateTableOffset": str(sent.queue_offset),
        "commitLogOffset": str(sent.log_offset),
        "commitOrRollback": str(state),
    }
    return Command(RequestCode.END_TRANSACTION, ext, now_ms=env.now_ms, client=1)


@pytest.mark.parametrize("second", [COMMIT, ROLLBACK])
def test_two_requests_by_the_first_append_at_once(env: TransactionFixture, second: int) -> None:
    env.connect()
    sent = env.half(b"x")
    for _ in range(2):
        check_once(env)
    answers = [env.broker.handle(command(env, sent, state)) for state in (COMMIT, second)]
    assert all(isinstance(answer, InThread) for answer in answers)  # it was appended again
    done = env.finish(answers[0])
    assert isinstance(done, Reply)
    assert done.remark == "committed"
    late = answers[1]
    assert isinstance(late, InThread)
    data = late.work()
    if second == COMMIT:
        again = env.finish(late.then(data))
        assert isinstance(again, Reply)
        assert again.remark == "already committed"
    else:
        with pytest.raises(Exception, match="already committed"):
            late.then(data)
    assert env.bodies() == [b"first", b"x"]


# --- missing op messages -------------------------------------------------------------------------


@pytest.mark.parametrize("state", [COMMIT, ROLLBACK])
def test_a_half_message_is_resolved_for_good_without_the_op_message_of_its_move(
    env: TransactionFixture, state: int
) -> None:
    env.half(b"old", "nobody")  # so that recovery reads from here
    sent = env.half(b"x")
    env.connect()
    check_once(env)
    env.transactions._queues._put_op = lambda body, now_ms: False  # type: ignore[method-assign]
    check_once(env)
    assert len(env.stored(HALF)) == 3
    env = env.restart()
    assert env.open == 2
    env.end(sent, state)
    save_progress(env)
    env = env.restart()
    assert env.open == 1
    wanted = [b"first", b"x"] if state == COMMIT else [b"first"]
    env.end(sent, state)
    assert env.bodies() == wanted
    env.close()


def test_all_appends_of_another_broker_are_resolved(env: TransactionFixture) -> None:
    env.half(b"old", "nobody")
    stray = put_half(env, "K", TRANSACTION_CHECK_TIMES="1")
    for times in "23":
        put_half(env, "K", TRANSACTION_CHECK_TIMES=times)
    env = env.restart()
    assert env.open == 2
    assert env.end(stray).code == 0
    save_progress(env)
    env = env.restart()
    assert env.open == 1
    assert env.bodies() == [b"first", b"K"]
    env.close()


def test_a_committed_half_message_without_a_known_first_append_stays_resolved(
    env: TransactionFixture,
) -> None:
    env.half(b"old", "nobody")
    stray = put_half(env, "K", TRANSACTION_CHECK_TIMES="1")
    again = put_half(
        env, "K", TRANSACTION_CHECK_TIMES="2", TRAN_PREPARED_QUEUE_OFFSET=str(stray.queue_offset)
    )
    put_committed(env, again)
    for _ in range(2):
        env = env.restart()
        assert env.open == 1
        save_progress(env)
    env.close()


@pytest.mark.slow
def test_half_messages_without_unique_id_are_not_confused(env: TransactionFixture) -> None:
    put_half(env, "")
    put_half(env, "", TRANSACTION_CHECK_TIMES="1")
    env = env.restart()
    assert env.open == 2
    env.close()


def test_the_outcome_without_unique_id_is_not_guessed(env: TransactionFixture) -> None:
    sent = put_half(env, "")
    put_committed(env, sent)
    put_op(env, b"0,")
    env = env.restart()
    assert env.open == 0
    assert (env.end(sent).remark or "").startswith("already")
    env.close()


def test_a_search_position_beyond_the_log_is_reset(env: TransactionFixture) -> None:
    env.half(b"x")
    env.transactions._queues.table.update(env.store.log.end + 10_000, env.now_ms)
    env.save()
    env = env.restart()
    assert env.transactions._queues.table.searched_to == 0
    save_progress(env)
    assert 0 < env.transactions._queues.table.searched_to <= env.store.log.end
    env.close()


# --- unreadable records --------------------------------------------------------------------------


def fail_at(env: TransactionFixture, sent: Sent) -> None:
    """Let reads of a half message fail."""
    read = env.store.lookup.record

    def record(offset: int, confirm_offset: int) -> bytes | None:
        if offset == sent.log_offset:
            raise ReadFailed("a bad sector")
        return read(offset, confirm_offset)

    env.store.lookup.record = record  # type: ignore[method-assign]


def test_an_unreadable_half_message_does_not_block_others(env: TransactionFixture) -> None:
    env.connect()
    sent = [env.half(b"%d" % n) for n in range(3)]
    fail_at(env, sent[1])
    checks = env.advance(TIMEOUT_MS + 2000)
    assert [check.handle for check in checks] == [sent[0], sent[2]]
    assert env.open == 3


@pytest.mark.parametrize("gone", [True, False])
def test_an_unmovable_half_message_does_not_keep_the_broker_busy(
    env: TransactionFixture, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    monkeypatch.setattr(check_back, "MOVE_AFTER", 5)
    sent = env.half(b"old", "nobody")
    env.advance(TIMEOUT_MS + 2000)
    for _ in range(8):
        env.end(env.half(), ROLLBACK)
    if gone:
        read = env.store.lookup.record
        env.store.lookup.record = (  # type: ignore[method-assign]
            lambda offset, confirm_offset: (
                None if offset == sent.log_offset else read(offset, confirm_offset)
            )
        )
    else:
        monkeypatch.setattr(
            "penstock.broker.transaction.half_queues.properties_fit", lambda properties: False
        )
    env.tick(1)
    ticks = 0
    end = env.now_ms + 1000
    while env.now_ms < end:
        env.tick(max(min(env.broker.due(), end) - env.now_ms, 1))
        ticks += 1
    assert ticks < 50


# --- time ----------------------------------------------------------------------------------------


def test_the_immunity_time_ends_with_the_retention_time(env: TransactionFixture) -> None:
    env.half(properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "9" * 18})
    env.advance(10_000)
    assert env.broker.transactions.pinned_from() is not None
    env.now_ms += 72 * HOUR_MS
    env.advance(300_000)
    assert env.open == 0
    assert env.bodies(DISCARDED) == [b"x"]
    assert env.broker.transactions.pinned_from() is None


def test_producers_have_time_to_reconnect_after_a_restart(env: TransactionFixture) -> None:
    sent = env.half()
    env.advance(10_000)
    env.now_ms += 200 * HOUR_MS
    env = env.restart()
    env.advance(30_000)
    assert env.open == 1
    env.connect()
    (check,) = env.advance(2000)
    assert check.handle == sent
    env.end(sent, checked=True)
    assert env.bodies() == [b"first", b"x"]
    env.close()


@pytest.mark.slow
def test_an_immune_half_message_does_not_hold_back_progress(
    env: TransactionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_back, "MOVE_AFTER", 20)
    sent = env.half(b"x", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "3600"})
    env.connect()
    for _ in range(60):
        env.end(env.half(), ROLLBACK)
        assert env.advance(100) == []
    env.advance(3000)
    assert env.transactions._queues.done_to() > 20
    env = env.restart()
    env.connect()
    assert env.advance(HOUR_MS - 60_000) == []
    assert env.end(sent).remark == "committed"
    env.close()


def test_answers_let_more_checks_be_sent(
    env: TransactionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_back, "CHECKS_IN_FLIGHT_MAX", 4)
    env.connect()
    for n in range(12):
        env.half(b"%d" % n)
    checks = env.advance(TIMEOUT_MS + 1000)
    assert len(checks) == 4
    for check in checks[:2]:
        env.end(check.handle, checked=True)
    effects = env.broker.effects.take()
    assert TickAt(env.now_ms) in effects
    env.tick(1)
    assert len(env.checks()) == 2


# --- size of the tables --------------------------------------------------------------------------


@pytest.mark.slow
def test_resolved_half_messages_leave_the_tables(env: TransactionFixture) -> None:
    env.connect()
    env.half(b"old", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "86400"})
    env.advance(1000)
    for _ in range(40):
        for _ in range(50):
            env.half()
        for check in env.advance(TIMEOUT_MS + 2000):
            env.end(check.handle, checked=True)
    assert env.open == 1
    checks, table = env.transactions._checks, env.transactions.half_messages
    assert len(checks._due) < 1500  # each would stay there for three days
    assert len(table._in_order) < 1500


def test_outcomes_are_kept_until_the_queue_is_followed(
    env: TransactionFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_messages, "OUTCOMES_MAX", 1)
    table = env.transactions.half_messages
    for _ in range(4):
        env.end(env.half(), ROLLBACK)
    table.position = 2
    table.forget_outcomes()
    assert [table.outcome(n) is not None for n in range(4)] == [False, False, True, True]
