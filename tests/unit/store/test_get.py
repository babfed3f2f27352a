"""From a queue offset to ranges of the log: statuses, filters, limits, three ways to read."""

import errno
import struct

import pytest

from penstock.errors import ReadFailed
from penstock.store import get
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.get import Reader
from penstock.store.store import MessageStore
from penstock.wire.output import Output
from penstock.wire.record import java_hash
from tests.unit.store.conftest import (
    StoreFixture,
    WatchedDisk,
    bodies,
    body_of,
    flush,
    properties,
    put,
    record,
    sized,
    split,
)

PLENTY = 1 << 20


def queue_of(store: MessageStore, queue_id: int = 0) -> ConsumeQueue:
    queue = store.queue("t", queue_id)
    assert queue is not None
    return queue


def find(
    store: MessageStore, offset: int, count: int = 32, most: int = PLENTY, *, wait: bool = False,
    codes: tuple[int, ...] = (),
) -> tuple[str, Reader]:  # fmt: skip
    reader = store.new_reader(codes)
    status = reader.find(queue_of(store), offset, count, most, store.confirm_offset, wait)
    return get.STATUS_NAMES[status], reader


def copied(reader: Reader, *, wait: bool = False) -> bytes | None:
    output = Output()
    return output.take() if reader.copy_to(output, wait) else None


@pytest.fixture(params=[True, False], ids=["hot", "cold"])
def ten(request: pytest.FixtureRequest, stores: StoreFixture) -> MessageStore:
    """Ten messages of 100 bytes, in memory or only in files."""
    store = stores.open()
    put(store, *[sized(100) for _ in range(10)])
    if not request.param:
        stores.close(store)
        store = stores.open()
    return store


@pytest.mark.parametrize(
    ("offset", "status", "next_offset", "count"),
    [
        (-1, "OFFSET_TOO_SMALL", 0, 0),
        (0, "FOUND", 8, 8),  # a read ends at its queue file
        (7, "FOUND", 8, 1),
        (8, "FOUND", 10, 2),
        (9, "FOUND", 10, 1),
        (10, "OFFSET_OVERFLOW_ONE", 10, 0),
        (11, "OFFSET_OVERFLOW_BADLY", 10, 0),
        (1 << 60, "OFFSET_OVERFLOW_BADLY", 10, 0),
    ],
)
def test_each_position_has_rocketmqs_status(
    ten: MessageStore, offset: int, status: str, next_offset: int, count: int
) -> None:
    found, reader = find(ten, offset)
    assert (found, reader.next_offset, reader.count) == (status, next_offset, count)
    assert (reader.min_offset, reader.max_offset) == (0, 10)
    if count:
        data = copied(reader)
        assert data is not None
        assert len(data) == reader.total == 100 * count


def test_an_empty_queue_and_no_queue(stores: StoreFixture) -> None:
    store = stores.open()
    store.make_queue(b"t", 0)
    assert find(store, 0)[0] == find(store, 5)[0] == "NO_MESSAGE_IN_QUEUE"
    assert find(store, 5)[1].next_offset == 0
    assert store.get("u", 0, 0).status == get.NO_MATCHED_LOGIC_QUEUE


def test_unconfirmed_messages_do_not_exist_yet(stores: StoreFixture) -> None:
    store = stores.open(sync_flush=True)
    put(store, sized(100))
    assert find(store, 0)[0] == "NO_MESSAGE_IN_QUEUE"
    flush(store)
    put(store, *[sized(100) for _ in range(9)])
    assert find(store, 0)[1].count == 1
    assert find(store, 1)[0] == "OFFSET_OVERFLOW_ONE"
    assert find(store, 2)[0] == "OFFSET_OVERFLOW_BADLY"


def test_an_offset_below_the_minimum_is_too_small(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, *[sized(1900) for _ in range(6)])
    store.expire(2)
    found, reader = find(store, 3)
    assert (found, reader.next_offset, reader.min_offset) == ("OFFSET_TOO_SMALL", 4, 4)


def test_entries_of_deleted_segments_are_messages_being_removed(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, *[sized(1900) for _ in range(6)])
    store.log.segments.drop_first()  # the queue is corrected later
    found, reader = find(store, 0, 2)
    assert (found, reader.next_offset) == ("FOUND", 4)
    store.log.segments.drop_first()
    store.log.segments.drop_first()
    found, reader = find(store, 0)
    assert (found, reader.next_offset) == ("MESSAGE_WAS_REMOVING", 6)


def test_a_missing_queue_file_is_skipped(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, *[sized(100) for _ in range(20)])
    queue_of(store).file_starts.remove(8)
    found, reader = find(store, 9)
    assert (found, reader.next_offset) == ("OFFSET_FOUND_NULL", 16)


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (3, 3), (0, 1), (-5, 1), (8, 8)])
def test_the_number_of_messages_is_limited(ten: MessageStore, count: int, expected: int) -> None:
    _, reader = find(ten, 0, count)
    assert (reader.count, reader.next_offset) == (expected, expected)


@pytest.mark.parametrize(
    ("most", "expected"), [(0, 1), (99, 1), (100, 1), (199, 1), (200, 2), (350, 3)]
)
def test_bytes_are_limited_except_for_the_first_message(
    ten: MessageStore, most: int, expected: int
) -> None:
    _, reader = find(ten, 0, 32, most)
    assert (reader.count, reader.total, reader.next_offset) == (expected, 100 * expected, expected)


def test_only_matching_tags_are_found(stores: StoreFixture) -> None:
    store = stores.open()
    for n, tag in enumerate(("a", "b", "a", "", "c", "b")):
        put(store, record(bytes([n]), text=properties(tags=tag)))
    found, reader = find(store, 0, codes=(java_hash("b"), java_hash("c")))
    assert (found, reader.count, reader.next_offset) == ("FOUND", 3, 6)
    data = copied(reader)
    assert data is not None
    assert [body_of(r) for r in split(data)] == [b"\x01", b"\x04", b"\x05"]
    found, reader = find(store, 0, codes=(java_hash("none"),))
    assert (found, reader.count, reader.next_offset) == ("NO_MATCHED_MESSAGE", 0, 6)
    assert find(store, 0, 1, codes=(java_hash("b"),))[1].next_offset == 2


def test_a_rare_tag_is_searched_in_steps(stores: StoreFixture) -> None:
    store = stores.open(queue_file_entries=2000, index_enabled=False, segment_bytes=1 << 18)
    put(store, *[record(b"") for _ in range(1500)])
    found, reader = find(store, 0, codes=(1,))
    assert (found, reader.next_offset) == ("NO_MATCHED_MESSAGE", get.SCAN_ENTRIES_MAX)


def test_adjacent_records_become_one_range(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, sized(100), sized(110), sized(500, queue_id=1), sized(120), sized(3500), sized(130))
    _, reader = find(store, 0)
    assert (reader.ranges, reader.total) == (3, 210 + 120 + 3630)
    data = copied(reader)
    assert data is not None
    assert [len(r) for r in split(data)] == [100, 110, 120, 3500, 130]


def test_records_that_are_not_in_memory_are_cold_until_they_are_read(
    stores: StoreFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = stores.open()
    put(store, *[sized(100) for _ in range(10)])
    stores.close(store)
    disk = WatchedDisk()
    store = stores.open(disk)
    monkeypatch.setattr(disk, "read_now", lambda fd, target, at: False)
    assert find(store, 0)[0] == "COLD"
    found, reader = find(store, 0, wait=True)
    assert found == "FOUND"
    assert copied(reader) is None
    data = copied(reader, wait=True)
    assert data is not None
    assert len(data) == 800
    assert store.get("t", 0, 0).status == get.COLD
    assert store.get("t", 0, 0, wait=True).status == get.FOUND
    put(store, sized(200))
    assert find(store, 10)[0] == "FOUND"  # messages written since are hot
    assert copied(find(store, 10)[1]) is not None


def test_outside_the_hot_window_the_file_is_read(
    stores: StoreFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = WatchedDisk()
    store = stores.open(disk, hot_bytes=250)
    put(store, *[sized(100) for _ in range(5)])
    monkeypatch.setattr(disk, "read_now", lambda fd, target, at: False)
    assert copied(find(store, 2)[1]) is None
    assert copied(find(store, 3)[1]) is not None


def scattered(
    stores: StoreFixture, disk: WatchedDisk, gaps: tuple[int, int], **changes: int
) -> Reader:
    """Three records of one queue, with records of this many bytes of another one between them."""
    store = stores.open(disk, hot_bytes=0, **changes)
    put(store, sized(100), sized(gaps[0], queue_id=1), sized(120), sized(gaps[1], queue_id=1))
    put(store, sized(130))
    _, reader = find(store, 0)
    assert reader.ranges == 3
    return reader


@pytest.mark.parametrize("wait", [False, True])
def test_ranges_that_lie_close_together_are_read_with_one_call(
    stores: StoreFixture, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    disk = WatchedDisk()
    calls: list[tuple[int, int]] = []
    read_now, read_at = disk.read_now, disk.read_at

    def now(fd: int, target: memoryview, at: int) -> bool:
        calls.append((at, len(target)))
        return read_now(fd, target, at)

    def waiting(fd: int, length: int, at: int) -> bytes:
        calls.append((at, length))
        return read_at(fd, length, at)

    reader = scattered(stores, disk, (500, 6_000), segment_bytes=64 * 1024)
    monkeypatch.setattr(disk, "read_now", now)
    monkeypatch.setattr(disk, "read_at", waiting)
    data = copied(reader, wait=wait)
    assert data is not None
    assert [len(found) for found in split(data)] == [100, 120, 130]
    assert calls == [(0, 720), (6_720, 130)]


@pytest.mark.parametrize("error", [None, ReadFailed("no"), OSError(errno.EIO, "no")])
def test_what_lies_between_ranges_need_not_be_readable(
    stores: StoreFixture, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    disk = WatchedDisk()
    read_now = disk.read_now

    def read(fd: int, target: memoryview, at: int) -> bool:
        if len(target) <= 130:
            return read_now(fd, target, at)
        if error is not None:
            raise error
        return False  # it is not in the page cache

    reader = scattered(stores, disk, (500, 300))
    monkeypatch.setattr(disk, "read_now", read)
    data = copied(reader)
    assert data is not None
    assert [len(found) for found in split(data)] == [100, 120, 130]


def test_output_is_unchanged_when_bytes_are_cold(
    stores: StoreFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = WatchedDisk()
    store = stores.open(disk, hot_bytes=0)
    put(store, sized(100))
    monkeypatch.setattr(disk, "read_now", lambda fd, target, at: False)
    output = Output()
    output.append(b"before")
    assert not find(store, 0)[1].copy_to(output)
    assert output.take() == b"before"


def damaged(stores: StoreFixture, offset: int, size: int) -> MessageStore:
    """Ten messages with a wrong queue entry for the fourth one."""
    store = stores.open()
    put(store, *[sized(100) for _ in range(10)])
    stores.close(store)
    with open(store.paths.queues / "t" / "0" / f"{0:020d}", "r+b") as target:
        target.seek(20 * 3)
        target.write(struct.pack(">qi", offset, size))
    return stores.open()


def test_a_damaged_size_allocates_no_memory(stores: StoreFixture) -> None:
    store = damaged(stores, 300, 64 << 20)
    output = Output()
    assert not find(store, 3, 1, wait=True)[1].copy_to(output, True)
    assert output.capacity < 1 << 20


@pytest.mark.parametrize(
    ("offset", "size"),
    [(1 << 40, 100), (300, 8000), (-5, 100), (0, 0), (0, -1), (4000, 500)],
)
def test_a_damaged_entry_neither_fails_nor_blocks_a_read(
    stores: StoreFixture, offset: int, size: int
) -> None:
    store = damaged(stores, offset, size)
    got = store.get("t", 0, 3, count_max=1, wait=True)
    assert got.status in (get.MESSAGE_WAS_REMOVING, get.NO_MATCHED_MESSAGE, get.FOUND)
    assert got.next_offset > 3
    assert len(bodies(store, offset=8)) == 2


def test_a_queue_file_deleted_during_a_read_does_not_fail_it(
    stores: StoreFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = WatchedDisk()
    store = stores.open(disk)
    put(store, *[sized(100) for _ in range(20)])
    queue = queue_of(store)
    real = disk.open_to_read

    def late(path):  # type: ignore[no-untyped-def]
        monkeypatch.setattr(disk, "open_to_read", real)
        queue.drop_files_before(8)
        return real(path)

    monkeypatch.setattr(disk, "open_to_read", late)
    assert find(store, 2, wait=True)[0] == "OFFSET_FOUND_NULL"
