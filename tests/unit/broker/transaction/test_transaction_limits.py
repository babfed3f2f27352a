"""Transactions under hard conditions: requests that overtake each other, records that can't be
read, op messages that are missing, tables that would grow."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.transaction import check_back, half_messages
from penstock.errors import ReadFailed
from penstock.rpc.answers import InThread, Reply, TickAt
from penstock.rpc.command import Command
from penstock.wire.codes import RequestCode
from tests.unit.broker.transaction.test_half_recovery import note, put_half, put_op, put_real
from tests.unit.broker.transaction.transaction_kit import (
    COMMIT,
    HALF,
    INTERVAL_MS,
    PARKED,
    ROLLBACK,
    TIMEOUT_MS,
    UNKNOWN,
    Sent,
    Trade,
)

HOUR_MS = 3_600_000


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Trade]:
    made = Trade(tmp_path / "store")
    made.send(body=b"first")
    yield made
    made.close()


def ask_once(home: Trade) -> None:
    """Let all open halves be asked about; nobody knows."""
    for check in home.let_pass(INTERVAL_MS):
        home.end(check.handle, UNKNOWN, checked=True)


# --- requests that overtake each other -----------------------------------------------------------


def command(home: Trade, sent: Sent, state: int) -> Command:
    ext = {
        "producerGroup": "P", "tranStateTableOffset": str(sent.queue_offset),
        "commitLogOffset": str(sent.log_offset), "commitOrRollback": str(state),
    }  # fmt: skip
    return Command(RequestCode.END_TRANSACTION, ext, now_ms=home.now_ms, client=1)


@pytest.mark.parametrize("second", [COMMIT, ROLLBACK])
def test_two_ends_by_the_first_handle_at_once(home: Trade, second: int) -> None:
    home.come()
    sent = home.half(b"x")
    for _ in range(2):
        ask_once(home)
    answers = [home.broker.handle(command(home, sent, state)) for state in (COMMIT, second)]
    assert all(isinstance(answer, InThread) for answer in answers)  # it was appended again
    done = home.finish(answers[0])
    assert isinstance(done, Reply)
    assert done.remark == "done: committed"
    late = answers[1]
    assert isinstance(late, InThread)
    data = late.work()
    if second == COMMIT:
        again = home.finish(late.then(data))
        assert isinstance(again, Reply)
        assert again.remark == "done before: committed"
    else:
        with pytest.raises(Exception, match="committed before"):
            late.then(data)
    assert home.bodies() == [b"first", b"x"]


# --- op messages that are missing ----------------------------------------------------------------


@pytest.mark.parametrize("state", [COMMIT, ROLLBACK])
def test_a_half_whose_move_lacks_its_op_ends_for_good(home: Trade, state: int) -> None:
    home.half(b"old", "nobody")  # holds up what is read at a start
    sent = home.half(b"x")
    home.come()
    ask_once(home)
    home.transactions._log._put_op = lambda body, now_ms: False  # type: ignore[method-assign]
    ask_once(home)
    assert len(home.stored(HALF)) == 3
    home = home.restart()
    assert home.open == 2
    home.end(sent, state)
    note(home)
    home = home.restart()
    assert home.open == 1
    wanted = [b"first", b"x"] if state == COMMIT else [b"first"]
    home.end(sent, state)
    assert home.bodies() == wanted
    home.close()


def test_all_appends_of_another_broker_are_done_with(home: Trade) -> None:
    home.half(b"old", "nobody")
    stray = put_half(home, "K", TRANSACTION_CHECK_TIMES="1")
    for times in "23":
        put_half(home, "K", TRANSACTION_CHECK_TIMES=times)
    home = home.restart()
    assert home.open == 2
    assert home.end(stray).code == 0
    note(home)
    home = home.restart()
    assert home.open == 1
    assert home.bodies() == [b"first", b"K"]
    home.close()


def test_a_half_of_an_unknown_origin_that_was_found_committed_stays_so(home: Trade) -> None:
    home.half(b"old", "nobody")
    stray = put_half(home, "K", TRANSACTION_CHECK_TIMES="1")
    again = put_half(
        home, "K", TRANSACTION_CHECK_TIMES="2", TRAN_PREPARED_QUEUE_OFFSET=str(stray.queue_offset)
    )
    put_real(home, again)
    for _ in range(2):
        home = home.restart()
        assert home.open == 1
        note(home)
    home.close()


def test_halves_without_unique_id_are_not_taken_for_each_other(home: Trade) -> None:
    put_half(home, "")
    put_half(home, "", TRANSACTION_CHECK_TIMES="1")
    home = home.restart()
    assert home.open == 2
    home.close()


def test_how_one_without_unique_id_ended_is_not_guessed(home: Trade) -> None:
    sent = put_half(home, "")
    put_real(home, sent)
    put_op(home, b"0,")
    home = home.restart()
    assert home.open == 0
    assert (home.end(sent).remark or "").startswith("done before")
    home.close()


def test_progress_beyond_the_end_of_the_log_is_forgotten(home: Trade) -> None:
    home.half(b"x")
    home.transactions._log.table.note(home.store.log.end + 10_000, home.now_ms)
    home.save()
    home = home.restart()
    assert home.transactions._log.table.searched_to == 0
    note(home)
    assert 0 < home.transactions._log.table.searched_to <= home.store.log.end
    home.close()


# --- records that can't be read ------------------------------------------------------------------


def fail_at(home: Trade, sent: Sent) -> None:
    """Let the disk fail where a half lies."""
    read = home.store.lookup.record

    def record(offset: int, confirmed: int) -> bytes | None:
        if offset == sent.log_offset:
            raise ReadFailed("a bad sector")
        return read(offset, confirmed)

    home.store.lookup.record = record  # type: ignore[method-assign]


def test_a_half_that_can_t_be_read_does_not_hold_up_others(home: Trade) -> None:
    home.come()
    sent = [home.half(b"%d" % n) for n in range(3)]
    fail_at(home, sent[1])
    checks = home.let_pass(TIMEOUT_MS + 2000)
    assert [check.handle for check in checks] == [sent[0], sent[2]]
    assert home.open == 3


@pytest.mark.parametrize("gone", [True, False])
def test_a_half_that_can_t_be_moved_does_not_keep_the_broker_busy(
    home: Trade, monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    monkeypatch.setattr(check_back, "ROLL_AFTER", 5)
    sent = home.half(b"old", "nobody")
    home.let_pass(TIMEOUT_MS + 2000)
    for _ in range(8):
        home.end(home.half(), ROLLBACK)
    if gone:
        read = home.store.lookup.record
        home.store.lookup.record = (  # type: ignore[method-assign]
            lambda offset, confirmed: None if offset == sent.log_offset else read(offset, confirmed)
        )
    else:
        monkeypatch.setattr(
            "penstock.broker.transaction.half_queues.fits", lambda properties: False
        )
    home.tick(1)
    ticks = 0
    end = home.now_ms + 1000
    while home.now_ms < end:
        home.tick(max(min(home.broker.due(), end) - home.now_ms, 1))
        ticks += 1
    assert ticks < 50


# --- time ----------------------------------------------------------------------------------------


def test_peace_ends_when_the_log_would_be_deleted(home: Trade) -> None:
    home.half(properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "9" * 18})
    home.let_pass(10_000)
    assert home.context.transactions.pinned_from() is not None
    home.now_ms += 72 * HOUR_MS
    home.let_pass(300_000)
    assert home.open == 0
    assert home.bodies(PARKED) == [b"x"]
    assert home.context.transactions.pinned_from() is None


def test_producers_have_time_to_come_back_after_a_long_break(home: Trade) -> None:
    sent = home.half()
    home.let_pass(10_000)
    home.now_ms += 200 * HOUR_MS
    home = home.restart()
    home.let_pass(30_000)
    assert home.open == 1
    home.come()
    (check,) = home.let_pass(2000)
    assert check.handle == sent
    home.end(sent, checked=True)
    assert home.bodies() == [b"first", b"x"]
    home.close()


def test_a_half_in_peace_does_not_hold_up_what_is_done_with(
    home: Trade, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_back, "ROLL_AFTER", 20)
    sent = home.half(b"x", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "3600"})
    home.come()
    for _ in range(60):
        home.end(home.half(), ROLLBACK)
        assert home.let_pass(100) == []
    home.let_pass(3000)
    assert home.transactions._log.done_to() > 20
    home = home.restart()
    home.come()
    assert home.let_pass(HOUR_MS - 60_000) == []
    assert home.end(sent).remark == "done: committed"
    home.close()


def test_whoever_answers_fast_is_asked_on(home: Trade, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_back, "ASKED_MAX", 4)
    home.come()
    for n in range(12):
        home.half(b"%d" % n)
    checks = home.let_pass(TIMEOUT_MS + 1000)
    assert len(checks) == 4
    for check in checks[:2]:
        home.end(check.handle, checked=True)
    effects = home.broker.effects.take()
    assert TickAt(home.now_ms) in effects
    home.tick(1)
    assert len(home.checks()) == 2


# --- tables that would grow ----------------------------------------------------------------------


def test_halves_that_ended_leave_the_tables(home: Trade) -> None:
    home.come()
    home.half(b"old", properties={"CHECK_IMMUNITY_TIME_IN_SECONDS": "86400"})
    home.let_pass(1000)
    for _ in range(40):
        for _ in range(50):
            home.half()
        for check in home.let_pass(TIMEOUT_MS + 2000):
            home.end(check.handle, checked=True)
    assert home.open == 1
    checks, table = home.transactions._checks, home.transactions.halves
    assert len(checks._due) < 1500  # each would stay there for three days
    assert len(table._line) < 1500


def test_outcomes_of_what_is_still_to_be_followed_are_kept(
    home: Trade, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(half_messages, "ENDED_MAX", 1)
    table = home.transactions.halves
    for _ in range(4):
        home.end(home.half(), ROLLBACK)
    table.position = 2
    table.forget()
    assert [table.outcome(n) is not None for n in range(4)] == [False, False, True, True]
