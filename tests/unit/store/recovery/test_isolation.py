"""Damage inside the log: recovery isolates it, keeps what follows, and destroys no byte."""

import errno
import os
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import DiskFull
from penstock.store.get import FOUND
from penstock.store.recovery import damage
from penstock.store.store import MessageStore
from penstock.store.tools.inspection import StoreFiles
from penstock.store.tools.problem import DAMAGE, Problem
from penstock.store.tools.verify import Verification
from penstock.wire import layout
from tests.unit.store.conftest import (
    EVER_MS,
    NOW_MS,
    SEGMENT_BYTES,
    StoreFixture,
    WatchedDisk,
    body_of,
    flush,
    properties,
    put,
    record,
    split,
)

COUNT = 40


def body(n: int) -> bytes:
    return f"body {n:4d}".encode() * 20


def fill(store: MessageStore, count: int = COUNT) -> list[tuple[int, int]]:
    """Messages in two queues, flushed; returns the place and size of each in the log."""
    places = []
    for n in range(count):
        made = record(body(n), queue_id=n % 2, text=properties(keys=f"k{n}", tags="a"))
        (offset,) = put(store, made, now_ms=NOW_MS + n)
        places.append((offset, made.size))
    flush(store)
    return places


def change(store: MessageStore, offset: int, data: bytes) -> None:
    path = store.paths.log / f"{offset - offset % SEGMENT_BYTES:020d}"
    with open(path, "r+b") as target:
        target.seek(offset % SEGMENT_BYTES)
        target.write(data)


def flip(store: MessageStore, offset: int, bit: int = 1) -> None:
    path = store.paths.log / f"{offset - offset % SEGMENT_BYTES:020d}"
    with open(path, "rb") as source:
        source.seek(offset % SEGMENT_BYTES)
        old = source.read(1)[0]
    change(store, offset, bytes([old ^ bit]))


def as_after_power_cut(store: MessageStore) -> None:
    """The system has restarted since the store was opened: sectors may be missing."""
    store.paths.abort.write_bytes(b"1 another-boot")


def message(store: MessageStore, n: int) -> list[bytes]:
    """The bodies of a read of one message, at its queue offset."""
    found = store.get("t", n % 2, n // 2, count_max=1, wait=True)
    return [body_of(data) for data in split(found.data)] if found.status == FOUND else []


def consumed(store: MessageStore, queue_id: int) -> list[bytes]:
    """All bodies of a queue as a consumer reads them: on from what the store answers."""
    found, offset = [], 0
    while offset < store.max_offset("t", queue_id):
        got = store.get("t", queue_id, offset, wait=True)
        assert got.next_offset > offset
        found += [body_of(data) for data in split(got.data)]
        offset = got.next_offset
    return found


def assert_others(store: MessageStore, lost: set[int], count: int = COUNT) -> None:
    """Every message but the lost ones is at its queue offset, in its queue and in the index."""
    ask = {"begin_ms": 0, "end_ms": EVER_MS, "most": 9, "confirm_offset": store.confirm_offset}
    for n in range(count):
        if n not in lost:
            assert message(store, n) == [body(n)], f"{n}: {store.report}"
            assert len(store.lookup.by_key("t", f"k{n}", **ask)) == 1, f"k{n}"
    for queue_id in (0, 1):
        kept = [body(n) for n in range(queue_id, count, 2) if n not in lost]
        assert [b for b in consumed(store, queue_id) if b in kept] == kept


def verified(store: MessageStore) -> list[Problem]:
    return list(Verification(StoreFiles(store.paths.root)).run())


DAMAGE_AT = {
    "body": 110,
    "body CRC": layout.BODY_CRC_AT,
    "size": layout.SIZE_AT + 2,
    "magic": layout.MAGIC_AT + 1,
    "physical offset": layout.PHYSICAL_OFFSET_AT + 7,
    "body length": 84 + 3,
}


@pytest.mark.parametrize("at", DAMAGE_AT.values(), ids=DAMAGE_AT)
@pytest.mark.parametrize("victim", [0, 11, 12, 30])
def test_a_damaged_record_costs_no_other(stores: StoreFixture, at: int, victim: int) -> None:
    store = stores.open()
    places = fill(store)
    end = store.log.end
    stores.crash(store)
    flip(store, places[victim][0] + at)
    before = {p.name: p.read_bytes() for p in store.paths.log.iterdir()}
    for _ in range(3):  # a second crash gives the same result
        store = stores.open()
        assert store.log.end == end
        assert_others(store, {victim})
        assert body(victim) not in consumed(store, victim % 2)
        (found,) = store.report.damage
        assert (found.offset, found.length) == places[victim]
        # A queue whose first message is lost begins with the second.
        assert store.report.lost_messages == 1 or victim == 0
        assert {p.name: p.read_bytes() for p in store.paths.log.iterdir()} == before
        assert not store.paths.truncated.exists()
        damage_found = [p for p in verified(store) if p.severity == DAMAGE]
        assert [p.offset for p in damage_found] == [places[victim][0] % SEGMENT_BYTES]
        stores.crash(store)


def test_the_log_line_names_the_message(
    stores: StoreFixture, caplog: pytest.LogCaptureFixture
) -> None:
    store = stores.open()
    places = fill(store)
    stores.crash(store)
    flip(store, places[20][0] + 110)
    stores.open()
    text = "\n".join(r.getMessage() for r in caplog.records if r.levelname == "WARNING")
    assert f"the log is damaged at offset {places[20][0]}: {places[20][1]} bytes" in text
    assert "the body does not match its CRC" in text
    assert "a message of topic t, queue 0, queue offset 10" in text
    assert "queue 0 of topic t: the message at queue offset 10 is lost to the damage" in text


def test_many_records_of_a_queue_may_be_lost(stores: StoreFixture) -> None:
    """More than the entries of a queue file, and every second record of what remains."""
    store = stores.open()
    places = fill(store)
    stores.crash(store)
    begin, end = places[3][0], places[31][0] + 50
    for offset in range(begin, end):
        change(store, offset, b"\xaa")
    for n in (33, 35):
        change(store, places[n][0], b"\xff\xff\xff\xff")
    for _ in range(2):
        store = stores.open()
        assert_others(store, {*range(3, 32), 33, 35})
        assert store.report.damaged_bytes >= end - begin
        stores.crash(store)


def test_the_last_record_of_a_queue_keeps_its_queue_offset(stores: StoreFixture) -> None:
    store = stores.open()
    places = fill(store)
    put(store, *[record(b"other", queue_id=5) for _ in range(3)])
    flush(store)
    stores.crash(store)
    flip(store, places[COUNT - 1][0] + 110)
    for _ in range(2):
        store = stores.open()
        assert store.max_offset("t", 1) == COUNT // 2
        stores.crash(store)


UNREADABLE = b"\xaa" * 84
"""In place of a record's header: neither its queue nor its queue offset is known."""


@pytest.mark.parametrize("lost", [1, 3])
@pytest.mark.parametrize("at_end", [False, True], ids=["inside the log", "at its end"])
def test_queue_offsets_of_unreadable_records_are_not_used_again(
    stores: StoreFixture, lost: int, at_end: bool
) -> None:
    """A consumer that has read them would skip the next messages."""
    store = stores.open()
    places = fill(store)
    if not at_end:
        put(store, *[record(b"other", queue_id=5) for _ in range(3)])
        flush(store)
    stores.crash(store)
    for n in range(COUNT - 2 * lost, COUNT):
        change(store, places[n][0], UNREADABLE)
    for further in range(3):
        store = stores.open()
        assert [store.max_offset("t", q) for q in (0, 1)] == [COUNT // 2 + further] * 2
        put(store, record(b"next", queue_id=0), record(b"next", queue_id=1))
        flush(store)
        new = [COUNT // 2 + n for n in range(further + 1)]
        for queue_id in (0, 1):
            assert store.writer.queue_offset == new[-1]
            assert consumed(store, queue_id)[-len(new) :] == [b"next"] * len(new)
            assert store.get("t", queue_id, new[0], wait=True).count == len(new)
        assert store.report.lost_messages == 2 * lost
        assert_others(store, set(range(COUNT - 2 * lost, COUNT)))
        stores.crash(store)


@pytest.mark.parametrize("at", [layout.QUEUE_ID_AT + 3, layout.QUEUE_OFFSET_AT + 6])
def test_queue_offset_of_a_record_with_a_wrong_header_is_not_used_again(
    stores: StoreFixture, at: int
) -> None:
    store = stores.open()
    places = fill(store)
    stores.crash(store)
    flip(store, places[COUNT - 1][0] + at, 1 << 5)
    for _ in range(2):
        store = stores.open()
        assert store.max_offset("t", 1) == COUNT // 2
        stores.crash(store)


def test_an_entry_from_before_a_power_failure_leaves_no_gap(stores: StoreFixture) -> None:
    """A power failure may bring an entry back whose log offset a later record has taken."""
    store = stores.open()
    places = fill(store)
    stores.crash(store)
    offset, size = places[COUNT - 1]  # a record of queue 1
    path = store.paths.queues / "t" / "0" / f"{0:020d}"
    with open(path, "r+b") as target:
        target.seek(COUNT // 2 * layout.ENTRY_BYTES)
        target.write(struct.pack(">qiq", offset, size, 0))
    store = stores.open()
    assert store.max_offset("t", 0) == COUNT // 2
    assert store.report.lost_messages == 0


@pytest.mark.parametrize("victim", [0, 11, 12, COUNT - 1])
@pytest.mark.parametrize(("byte", "bit"), [(0, 0x40), (0, 0x80), (1, 0x10), (3, 0x80)])
def test_a_damaged_store_time_moves_no_other(
    stores: StoreFixture, victim: int, byte: int, bit: int
) -> None:
    """Store time never goes back, so a wrong one would be the time of all later messages."""
    store = stores.open()
    places = fill(store)
    stores.crash(store)
    flip(store, places[victim][0] + layout.store_ms_at(0) + byte, bit)
    for n in range(2):
        store = stores.open()
        assert_others(store, {victim})
        assert message(store, victim) == [body(victim)]
        (offset,) = put(store, record(b"next", queue_id=3), now_ms=NOW_MS + 1000 + n)
        flush(store)
        assert store.lookup.store_ms(offset) == NOW_MS + 1000 + n
        stores.crash(store)


def test_a_clock_that_was_ahead_for_long_costs_no_message(stores: StoreFixture) -> None:
    years_ms = 20 * 365 * 24 * 3600 * 1000
    store = stores.open()
    put(store, record(b"ahead", text=properties(keys="k")), now_ms=NOW_MS + years_ms)
    flush(store)
    stores.crash(store)
    store = stores.open()
    assert consumed(store, 0) == [b"ahead"]


def test_queue_offset_of_the_only_record_is_not_used_again(stores: StoreFixture) -> None:
    store = stores.open()
    (offset,) = put(store, record(b"first", queue_id=3))
    fill(store)
    stores.crash(store)
    change(store, offset, UNREADABLE)
    for n in (1, 2, 3):
        store = stores.open()
        assert (store.max_offset("t", 3), store.min_offset("t", 3)) == (n, 1)
        put(store, record(b"next", queue_id=3))
        assert store.writer.queue_offset == n
        stores.crash(store)


def test_a_known_gap_in_a_queue_costs_no_replay_of_the_whole_log(stores: StoreFixture) -> None:
    store = stores.open(index_flush_ms=1, queue_flush_ms=1)
    places = []
    for n in range(COUNT):
        places += put(store, record(body(n), queue_id=n % 2), now_ms=NOW_MS + 1000 * n)
    flush(store)
    store.tick(NOW_MS + 1000 * COUNT)
    places += put(store, record(body(0), queue_id=0))
    stores.crash(store)
    change(store, places[-1], UNREADABLE)
    for _ in range(2):
        store = stores.open()
        assert store.report.replayed_from > 0
        put(store, record(body(1), queue_id=0))
        stores.crash(store)


def test_entries_of_records_that_were_never_written_are_removed(stores: StoreFixture) -> None:
    """A killed process may have made queue entries of records that were not in the log yet."""
    store = stores.open()
    offset, size = fill(store)[-1]
    stores.crash(store)
    change(store, offset, bytes(size))
    store = stores.open()
    assert store.max_offset("t", 1) == COUNT // 2 - 1
    assert store.report.lost_messages == 0


def test_damage_below_the_confirm_offset_is_kept_also_at_the_end(stores: StoreFixture) -> None:
    store = stores.open()
    places = fill(store)
    end = store.log.end
    stores.close(store)
    flip(store, places[COUNT - 1][0] + 110)
    store = stores.open()
    assert store.log.end == end
    assert store.max_offset("t", 1) == COUNT // 2
    put(store, record(b"next", queue_id=1))
    assert store.writer.queue_offset == COUNT // 2
    assert not store.paths.truncated.exists()
    assert_others(store, {COUNT - 1})


def test_queues_that_were_complete_are_not_rebuilt_from_the_whole_log(
    stores: StoreFixture,
) -> None:
    store = stores.open(index_flush_ms=1, queue_flush_ms=1)
    for n in range(COUNT):
        put(store, record(body(n), queue_id=n % 2), now_ms=NOW_MS + 1000 * n)
    flush(store)
    store.tick(NOW_MS + 1000 * COUNT)
    end = store.log.end
    places = [put(store, record(body(n), queue_id=n % 2))[0] for n in range(6)]
    flush(store)
    stores.crash(store)
    change(store, places[2], b"\xff\xff\xff\xff")
    store = stores.open()
    assert 0 < store.report.replayed_from < end
    assert store.report.lost_messages == 1


# --- a torn tail


def test_a_torn_tail_is_saved_before_it_is_cut(stores: StoreFixture) -> None:
    store = stores.open()
    places = fill(store)
    end = store.log.end
    stores.crash(store)
    as_after_power_cut(store)
    torn = places[20][0]
    sector = torn - torn % 512 + 512
    change(store, sector, bytes(512))
    whole = b"".join(p.read_bytes() for p in sorted(store.paths.log.iterdir()))
    store = stores.open()
    cut = store.report.log_end
    assert torn - 1024 < cut <= torn + 512
    (path,) = store.paths.truncated.iterdir()
    assert path.name == f"{cut:020d}-{end - cut}"
    assert path.read_bytes() == whole[cut:end]
    assert store.report.saved_bytes == end - cut
    assert any(str(path) in text for text in store.report.warnings())
    assert [p.kind for p in verified(store) if "truncated/" in p.file] == ["log.truncated"]


class FailingDisk(WatchedDisk):
    """Fails when the log's tail is saved, or when it is cut."""

    def __init__(self, *, full: bool) -> None:
        super().__init__()
        self.full = full

    def write(self, fd: int, data: memoryview, at: int) -> None:
        if self.full and "truncated" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, data, at)

    def truncate(self, fd: int, size: int) -> None:
        if "commitlog" in os.readlink(f"/proc/self/fd/{fd}"):
            raise KeyboardInterrupt
        super().truncate(fd, size)


def test_a_crash_between_saving_and_cutting_is_safe(stores: StoreFixture) -> None:
    store = stores.open()
    places = fill(store)
    stores.crash(store)
    change(store, places[-1][0] + 100, bytes(100))
    with pytest.raises(KeyboardInterrupt):
        stores.open(FailingDisk(full=False))
    assert len(list(store.paths.truncated.iterdir())) == 1
    store = stores.open()
    assert len(list(store.paths.truncated.iterdir())) == 1
    assert_others(store, {COUNT - 1})


def test_without_space_to_save_the_tail_the_store_is_not_opened(stores: StoreFixture) -> None:
    store = stores.open()
    places = fill(store)
    stores.crash(store)
    change(store, places[-1][0] + 100, bytes(100))
    before = {p.name: p.read_bytes() for p in store.paths.log.iterdir()}
    with pytest.raises(DiskFull, match=f"truncated at offset {places[-1][0]}"):
        stores.open(FailingDisk(full=True))
    assert {p.name: p.read_bytes() for p in store.paths.log.iterdir()} == before
    assert list(store.paths.truncated.iterdir()) == []
    assert_others(stores.open(), {COUNT - 1})


def test_what_recovery_has_shown_is_not_cut_after_a_power_cut(stores: StoreFixture) -> None:
    """The first recovery knows that nothing is torn; the second one must not decide otherwise."""
    store = stores.open()
    places = fill(store)
    stores.crash(store)
    change(store, places[20][0] - places[20][0] % 512, bytes(1024))
    store = stores.open()
    end, lost = store.log.end, store.report.lost_messages
    assert lost > 1
    stores.crash(store)
    as_after_power_cut(store)
    store = stores.open()
    assert (store.log.end, store.report.lost_messages) == (end, lost)


# --- the search


def test_the_search_reads_records_of_another_place_once(tmp_path: Path) -> None:
    """Misplaced data is full of records; only their heads are read."""
    made = record(bytes(10_000))
    made.prepare()
    one = bytearray(made.size)
    made.put(memoryview(one), 0, 0, 1 << 40, NOW_MS)
    data = bytes(one) * 100
    sizes = []

    def read(at: int, length: int) -> bytes:
        sizes.append(length)
        return data[at : at + length]

    part = damage.LogPart(0, len(data), read, lambda at, end: [(at, end)])
    assert damage.search(part, 1, len(data)) is None
    assert sum(sizes) < 2 * len(data)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(victim=st.integers(0, COUNT - 1), at=st.integers(0, 170), bit=st.integers(0, 7))
@pytest.mark.slow
def test_any_flipped_bit_costs_at_most_its_own_record(
    tmp_path_factory: pytest.TempPathFactory, victim: int, at: int, bit: int
) -> None:
    fixture = StoreFixture(tmp_path_factory.mktemp("flip") / "store")
    try:
        store = fixture.open()
        places = fill(store)
        fixture.crash(store)
        # Queue id, queue offset, transaction type and the topic's name have no checksum: a record
        # may then take another one's place in a queue, if it is the next there.
        unchecked = (*range(12, 16), *range(20, 28), *range(36, 40))
        if at in unchecked or at >= places[victim][1]:
            return
        flip(store, places[victim][0] + at, 1 << bit)
        store = fixture.open()
        assert_others(store, {victim})
        fixture.crash(store)
        assert_others(fixture.open(), {victim})
    finally:
        fixture.end()


def test_a_flipped_size_is_repaired_by_the_search(stores: StoreFixture) -> None:
    store = stores.open()
    places = fill(store)
    stores.crash(store)
    offset, size = places[9]
    change(store, offset, struct.pack(">i", size + 7))
    store = stores.open()
    assert [(d.offset, d.length) for d in store.report.damage] == [(offset, size)]
