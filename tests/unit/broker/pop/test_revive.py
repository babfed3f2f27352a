"""Lent messages across restarts: what is open comes back, what is done does not."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.pop import revive, revive_log
from penstock.broker.pop.checkpoints import Key, Loan, Loans
from penstock.broker.pop.revive_log import REVIVE_GROUP
from penstock.config import Settings, StoreConfig
from penstock.errors import DiskFull
from penstock.wire import fastjson
from penstock.wire.bodies.pop_bodies import AckMsg, PopCheckPoint
from penstock.wire.message import encode_properties
from penstock.wire.receipt_handle import Receipt, RetryKind
from penstock.wire.record import Record
from tests.unit.broker.broker_kit import BORN, House, house
from tests.unit.broker.pop.pop_kit import (
    REVIVE,
    Popped,
    Popper,
    let_pass,
    persist,
    pop_settings,
    reopen,
    stored,
)

Restart = Callable[[], House]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[House]:
    with house(tmp_path / "store") as made:
        yield made


def send(home: House, *texts: bytes, queue_id: int = 0) -> None:
    for text in texts:
        assert home.send(body=text, queue_id=queue_id).code == 0
    home.store.settle()


def journal(home: House) -> list[tuple[str | None, int]]:
    """Tags and queues of all entries of the revive log."""
    return [(m.tags, m.queue_id) for n in range(8) for m in stored(home, REVIVE, n)]


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("persisted", [False, True])
def test_what_is_lent_stays_lent(tmp_path: Path, crash: bool, persisted: bool) -> None:
    root = tmp_path / "store"
    home = House(root)
    send(home, b"a", b"b", b"c")
    popper = Popper(home)
    first = popper.pop(maxMsgNums=2)
    popper.ack(first[0])
    let_pass(home, 6_000)
    if persisted:
        persist(home)
    home = reopen(home, root, crash=crash)
    try:
        popper = Popper(home)
        assert popper.bodies() == [b"c"]
        assert popper.pop() == []
        let_pass(home, 4_000)
        home.store.settle()
        assert popper.bodies() == [b"b"]
        let_pass(home, 20_000)
        home.store.settle()
        assert sorted(popper.bodies()) == [b"b", b"c"]
    finally:
        home.close()


def test_receipts_count_after_a_restart(tmp_path: Path) -> None:
    root = tmp_path / "store"
    home = House(root)
    send(home, b"a", b"b", b"c")
    first, second, third = Popper(home).pop()
    home = reopen(home, root, crash=True)
    try:
        popper = Popper(home)
        popper.ack(first)
        changed = popper.change(second, 30_000)
        home = reopen(home, root, crash=True)
        popper = Popper(home)
        let_pass(home, 10_000)
        home.store.settle()
        assert popper.bodies() == [b"c"]
        popper.ack(changed)
        home = reopen(home, root, crash=True)
        let_pass(home, 5_000)
        assert Popper(home).pop() == []
        assert third.body == b"c"
    finally:
        home.close()


def test_time_that_passes_meanwhile_counts(tmp_path: Path) -> None:
    root = tmp_path / "store"
    home = House(root)
    send(home, b"a")
    Popper(home).pop()
    home.now_ms += 60_000
    home = reopen(home, root, crash=True)
    try:
        home.tick(1)
        assert Popper(home).bodies() == [b"a"]
    finally:
        home.close()


def test_a_reset_is_not_undone_by_a_restart(tmp_path: Path) -> None:
    root = tmp_path / "store"
    home = House(root)
    send(home, b"0", b"1", b"2", b"3")
    popper = Popper(home)
    popper.ack_all(popper.pop(maxMsgNums=2))
    popper.pop(maxMsgNums=1)
    home.context.offsets.reset("G", "T", {0: 1}, home.now_ms)
    let_pass(home, 6_000)
    persist(home)
    home = reopen(home, root, crash=True)
    try:
        assert home.context.offsets.get("G", "T", 0) == 1
        assert Popper(home).bodies() == [b"1", b"2", b"3"]
    finally:
        home.close()


def test_a_crash_between_copy_and_note_brings_it_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "store"
    home = House(root)
    send(home, b"a")
    Popper(home).pop()

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(home.broker.pop.journal, "ack", die)
    with pytest.raises(KeyboardInterrupt):
        let_pass(home, 10_000)
    home = reopen(home, root, crash=True)
    try:
        home.tick(1)
        home.store.settle()
        assert Popper(home).bodies() == [b"a", b"a"]
    finally:
        home.close()


def test_the_second_kind_of_retry_topics_survives(tmp_path: Path) -> None:
    root = tmp_path / "store"
    home = House(root, pop_settings(pop_retry_topic_v2=True))
    send(home, b"a")
    Popper(home).pop()
    let_pass(home, 10_000)
    home = reopen(home, root, crash=True)
    try:
        (again,) = Popper(home).pop()
        assert (again.body, again.receipt.kind) == (b"a", RetryKind.V2)
    finally:
        home.close()


# --- the journal's place


def test_the_journal_is_read_from_the_first_open_batch(home: House) -> None:
    popper = Popper(home)
    send(home, *[b"%d" % n for n in range(30)])
    batches = [popper.pop(maxMsgNums=1) for _ in range(24)]
    for number, batch in enumerate(batches):
        if number != 9:
            popper.ack_all(batch)
    home.tick(1)
    (open_one,) = home.broker.pop.journal.loans
    for queue_id in range(8):
        place = home.context.offsets.get(REVIVE_GROUP, REVIVE, queue_id)
        end = home.store.max_offset(REVIVE, queue_id)
        assert place == (open_one.entry if queue_id == open_one.revive_queue_id else end) - 1


def test_a_batch_that_stays_open_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revive_log, "SPAN_LEAST", 8)
    root = tmp_path / "store"
    home = House(root)
    send(home, b"long", b"longer")
    popper = Popper(home)
    first = popper.pop(invisibleTime=3_600_000)
    popper.ack(first[0])
    for number in range(200):
        send(home, b"%d" % number)
        popper.ack_all(popper.pop())
        if number % 10 == 0:
            home.tick(1000)
    (loan,) = home.broker.pop.journal.loans
    assert loan.entry > 20
    assert (loan.acked, loan.open_offsets()) == (1, [1])
    assert home.broker.pop.journal.behind(loan.revive_queue_id) < 32
    persist(home)
    home = reopen(home, root, crash=True)
    try:
        popper = Popper(home)
        (loan,) = home.broker.pop.journal.loans
        assert loan.open_offsets() == [1]
        assert home.context.offsets.get("G", "T", 0) == 202  # not back to that of the old batch
        let_pass(home, 3_600_000)
        home.store.settle()
        assert popper.bodies() == [b"longer"]
    finally:
        home.close()


def test_retention_keeps_what_is_lent(home: House) -> None:
    popper = Popper(home)
    assert home.broker.pop.pinned_from() is None
    send(home, b"a")
    place = home.store.log.end
    send(home, b"b", b"c")
    first, second, third = popper.pop()
    assert home.broker.pop.pinned_from() == 0
    popper.ack(first)
    popper.change(second, 20_000)
    popper.ack(third)
    pinned = home.broker.pop.pinned_from()
    assert pinned is not None
    assert pinned <= place


def test_a_message_that_is_gone_ends_its_loan(
    home: House, caplog: pytest.LogCaptureFixture
) -> None:
    popper = Popper(home)
    send(home, b"a" * 900)
    popper.pop()
    send(home, *[b"x" * 900] * 200)
    home.store.expire(1)
    queue = home.store.queue("T", 0)
    assert queue is not None
    assert queue.min_offset > 0
    with caplog.at_level(logging.WARNING):
        let_pass(home, 10_000)
    assert "is gone" in caplog.text
    assert home.broker.pop.revive.lost == 1
    assert len(home.broker.pop.journal.loans) == 0


# --- bringing back


def test_a_turn_brings_back_a_bounded_number(home: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revive, "TICK_MESSAGES_MAX", 10)
    popper = Popper(home)
    send(home, *[b"%d" % n for n in range(45)])
    for _ in range(9):
        popper.pop(maxMsgNums=5)
    home.now_ms += 20_000
    counts = []
    for _ in range(6):
        home.tick(0)
        counts.append(len(stored(home, "%RETRY%G_T")))
    assert counts == [10, 20, 30, 40, 45, 45]


def test_a_store_that_refuses_makes_them_wait(home: House) -> None:
    popper = Popper(home)
    send(home, b"a")
    popper.pop()
    home.now_ms += 10_000
    home.store.path.refusal = DiskFull("full")
    home.broker.pop.tick(home.now_ms)
    assert home.broker.pop.due() == home.now_ms + revive.RETRY_MS
    assert home.broker.pop.journal.loans.in_flight == {("T", "G", 0): 1}
    home.store.path.refusal = None
    let_pass(home, 200)
    home.store.settle()
    assert popper.bodies() == [b"a"]


def test_messages_are_read_by_the_pool(home: House, monkeypatch: pytest.MonkeyPatch) -> None:
    read = revive._read

    def from_disk(*arguments: Any) -> Any:
        return read(*arguments) if arguments[-1] else None

    monkeypatch.setattr(revive, "_read", from_disk)
    popper = Popper(home)
    send(home, b"a", b"b", b"c")
    popped = popper.pop()
    home.now_ms += 10_000
    jobs: list[Any] = []
    submit = home.store.disk.submit

    def put_off(work: Any) -> _Pending:
        jobs.append(work)
        return _Pending()

    monkeypatch.setattr(home.store.disk, "submit", put_off)
    home.broker.pop.tick(home.now_ms)
    assert home.broker.pop.due() <= home.now_ms + revive.POLL_MS
    popper.ack(popped[1])  # while it is read
    monkeypatch.setattr(home.store.disk, "submit", submit)
    (loan,) = home.broker.pop.journal.loans
    home.broker.pop.revive._reading = loan, submit(jobs[0])
    let_pass(home, 100)
    home.store.settle()
    assert popper.bodies() == [b"a", b"c"]


class _Pending:
    def done(self) -> bool:
        return False


@pytest.mark.parametrize("length", [32_500, 32_600, 32_610, 32_620])
def test_full_properties_do_not_keep_a_message_back(tmp_path: Path, length: int) -> None:
    settings = Settings(store=StoreConfig(segment_bytes=1 << 20, queue_file_entries=50))
    with house(tmp_path / "store", settings) as home:
        popper = Popper(home)
        assert home.send(body=b"a", properties={"p": "x" * length}).code == 0
        home.store.settle()
        for times in range(3):
            (again,) = popper.pop()
            assert again.message.reconsume_times == times
            assert again.message.properties["p"] == "x" * length
            let_pass(home, 10_000)
            home.store.settle()


def test_the_clock_is_set_back(home: House) -> None:
    popper = Popper(home)
    send(home, b"a")
    popper.pop()
    home.tick(100)
    home.now_ms -= 3_600_000
    home.tick(0)
    let_pass(home, 10_000)
    home.store.settle()
    assert popper.bodies() == [b"a"]


def test_names_too_long_together_are_refused(home: House) -> None:
    home.send(topic="T" * 120, body=b"a")
    answer = Popper(home, "T" * 120, "G" * 140).ask()
    assert answer.code in (26, 29)  # type: ignore[union-attr]


# --- another broker's entries


def put(home: House, tag: str, body: Any, queue_id: int, **properties: str) -> None:
    """What the timer of RocketMQ's broker delivers."""
    record = Record()
    text = encode_properties({"TAGS": tag, "TIMER_OUT_MS": "1", **properties})
    record.fill(REVIVE.encode(), fastjson.encode(body), text)
    record.queue_id, record.born_host, record.store_host = queue_id, BORN, BORN
    assert home.store.put(record, home.now_ms) == 0
    home.store.settle()


def test_batches_of_the_broker_before_us_come_back(home: House) -> None:
    send(home, b"0", b"1", b"2")
    home.context.offsets.commit("G", "T", 0, 3, home.now_ms)
    popper = Popper(home)
    assert popper.pop() == []
    pop_ms = home.now_ms - 5_000
    names = {"consumer_group": "G", "topic": "T", "queue_id": 0, "pop_time": pop_ms}
    put(home, "ack", AckMsg(ack_offset=0, **names), 3)  # type: ignore[arg-type]
    ck = PopCheckPoint(num=3, invisible_time=6_000, offset_diffs=(0, 1, 2), **names)  # type: ignore[arg-type]
    put(home, "ck", ck, 3)
    home.tick(1_000)
    put(home, "ack", AckMsg(ack_offset=2, **names), 3)  # type: ignore[arg-type]
    put(home, "ck", {"so": "no"}, 3)
    let_pass(home, 10_000)
    home.store.settle()
    assert popper.bodies() == [b"1"]


def test_an_acknowledgement_before_its_batch_is_kept(tmp_path: Path) -> None:
    root = tmp_path / "store"
    home = House(root)
    send(home, b"0", b"1")
    home.context.offsets.commit("G", "T", 0, 2, home.now_ms)
    (message, _) = stored(home)
    pop_ms = home.now_ms
    home.now_ms += 1_000
    home.close()
    home = House(root, now_ms=home.now_ms)
    popped = Popped(message, Receipt(0, pop_ms, 20_000, 2, RetryKind.NORMAL, "broker-a", 0, 0))
    try:
        popper = Popper(home)
        assert popper.ack(popped).code == 0
        ck = PopCheckPoint(
            num=2, invisible_time=20_000, offset_diffs=(0, 1), consumer_group="G", topic="T",
            pop_time=pop_ms,
        )  # fmt: skip
        put(home, "ck", ck, 2)
        let_pass(home, 30_000)
        home.store.settle()
        assert popper.bodies() == [b"1"]
    finally:
        home.close()


# --- state


def test_the_heap_does_not_grow_with_what_is_over() -> None:
    loans = Loans(8)
    for number in range(5_000):
        loan = Loan(Key("T", "G", 0, number, 5), 60_000, [number], number % 8)
        loans.add(loan)
        loans.ack(loan, 1)
    assert len(loans) == 0
    assert len(loans._ends) < 2_100
    assert loans.in_flight == {}
    assert loans.due() == 1 << 62
    assert [loans.oldest(n) for n in range(8)] == [None] * 8


def test_early_acknowledgements_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    loans = Loans(8)
    for number in range(20_000):
        loans.ack_early(Key("T", "G", 0, number, 5), [number])
    assert len(loans._early) == 10_000


def test_offsets_are_written_after_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with house(tmp_path / "store", pop_settings()) as home:
        send(home, b"a")
        Popper(home).pop()
        synced: list[int] = []
        monkeypatch.setattr(home.store, "sync_log", synced.append)
        work = home.context.persistence.save(home.context.offsets.table)
        assert synced == []
        work()
        assert synced == [home.store.log.end]
        monkeypatch.undo()
        home.store.flusher.pump()
        home.context.persistence.save(home.context.offsets.table)()
        assert synced == [home.store.log.end]
