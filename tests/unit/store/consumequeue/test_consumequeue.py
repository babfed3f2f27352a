"""Queue files: entries, rolls, fillers, cuts, visible entries, preallocation."""

import errno
import os
import struct
from pathlib import Path

import pytest

from penstock.errors import DiskFull, StoreError
from penstock.store.consumequeue import queue_files
from penstock.store.consumequeue.consumequeue import (
    FILLER_SIZE,
    ConsumeQueue,
)
from penstock.store.consumequeue.queue_table import QueueTable
from penstock.wire.layout import ENTRY_BYTES
from tests.unit.store.conftest import WatchedDisk

FILE_ENTRIES = 8
FILE_BYTES = FILE_ENTRIES * ENTRY_BYTES
SIZE = 100


@pytest.fixture
def disk() -> WatchedDisk:
    return WatchedDisk()


@pytest.fixture
def queue(disk: WatchedDisk, tmp_path: Path) -> ConsumeQueue:
    return ConsumeQueue(disk, tmp_path / "t" / "0", b"t", 0, FILE_ENTRIES)


def again(queue: ConsumeQueue) -> ConsumeQueue:
    """The same queue after the store is opened again."""
    found = ConsumeQueue(queue.disk, queue.folder, queue.topic, queue.queue_id, queue.file_entries)
    found.load()
    found.max_offset = found.hot_from = queue.max_offset
    found.min_offset = queue.min_offset
    return found


def fill(queue: ConsumeQueue, count: int, first: int | None = None) -> None:
    """Append entries of consecutive records of SIZE bytes."""
    at = queue.max_offset * SIZE if first is None else first
    for n in range(count):
        queue.append(at + n * SIZE, SIZE, n)


def names(queue: ConsumeQueue) -> list[str]:
    return sorted(os.listdir(queue.folder))


def entries(queue: ConsumeQueue) -> list[tuple[int, int, int] | None]:
    return [queue.entry(n) for n in range(queue.min_offset, queue.max_offset)]


def test_an_entry_is_offset_size_and_tag_hash(queue: ConsumeQueue) -> None:
    assert queue.append(1 << 40, 123, -5) == 0
    assert queue.append((1 << 40) + 123, 77, 1 << 33) == 1
    data = (queue.folder / f"{0:020d}").read_bytes()
    assert len(data) == FILE_BYTES
    assert data[:40] == struct.pack(">qiqqiq", 1 << 40, 123, -5, (1 << 40) + 123, 77, 1 << 33)
    assert data[40:] == bytes(FILE_BYTES - 40)


def test_a_full_file_is_followed_by_the_next_one(queue: ConsumeQueue) -> None:
    fill(queue, 2 * FILE_ENTRIES + 1)
    assert names(queue) == [f"{n * FILE_BYTES:020d}" for n in range(3)]
    assert entries(queue) == [(n * SIZE, SIZE, n) for n in range(17)]
    assert entries(again(queue)) == entries(queue)


def test_reading_ends_at_the_file_and_at_the_queue(queue: ConsumeQueue) -> None:
    fill(queue, 10)
    assert len(queue.read(5, 100) or b"") == 3 * ENTRY_BYTES
    assert len(queue.read(8, 100) or b"") == 2 * ENTRY_BYTES
    assert queue.read(10, 100) == b""
    assert queue.read(1000, 100) == b""


def test_an_entry_out_of_range_is_none(queue: ConsumeQueue) -> None:
    fill(queue, 3)
    assert [queue.entry(n) for n in (-1, 3, 1 << 50)] == [None, None, None]


def test_a_read_that_would_block_is_none(
    queue: ConsumeQueue, disk: WatchedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(queue, 3)
    assert queue.read(0, 3, wait=False) == queue.read(0, 3)
    monkeypatch.setattr(disk, "read_now", lambda fd, target, at: False)
    assert queue.read(0, 3, wait=False) is None


@pytest.mark.parametrize("begin", [0, 3, 8, 21, 1 << 40])
def test_a_queue_may_start_at_any_offset(queue: ConsumeQueue, begin: int) -> None:
    queue.begin_at(begin)
    assert (queue.min_offset, queue.max_offset) == (begin, begin)
    assert queue.append(500, SIZE, 7) == begin
    start = begin - begin % FILE_ENTRIES
    assert names(queue) == [f"{start * ENTRY_BYTES:020d}"]
    data = (queue.folder / names(queue)[0]).read_bytes()
    filler = struct.pack(">qiq", 0, FILLER_SIZE, 0)
    assert data.startswith(filler * (begin - start) + struct.pack(">qiq", 500, SIZE, 7))
    assert queue.entry(begin) == (500, SIZE, 7)
    assert queue.entry(begin - 1) is None


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 9, 15, 16])
def test_cut_removes_entries_and_zeroes_their_bytes(queue: ConsumeQueue, keep: int) -> None:
    fill(queue, 20)
    queue.cut(keep)
    assert queue.max_offset == keep
    data = b"".join((queue.folder / name).read_bytes() for name in names(queue))
    assert data[keep * ENTRY_BYTES :].strip(b"\0") == b""
    assert not queue_files.has_data_from(again(queue), keep)
    assert entries(queue) == [(n * SIZE, SIZE, n) for n in range(keep)]
    fill(queue, 20 - keep, 5000)
    assert queue.entry(keep) == (5000, SIZE, 0)
    assert queue.max_offset == 20


def test_cut_of_a_queue_without_files_does_nothing(queue: ConsumeQueue) -> None:
    queue.cut(0)
    assert queue.max_offset == 0


def test_cut_below_the_first_file_empties_the_queue(queue: ConsumeQueue) -> None:
    queue.begin_at(20)
    fill(queue, 3, 100)
    queue.cut(0)
    assert (queue.min_offset, queue.max_offset, queue.file_starts) == (0, 0, [])
    assert queue.append(900, SIZE, 0) == 0
    assert queue.entry(0) == (900, SIZE, 0)


@pytest.mark.parametrize(
    ("log_begin", "expected"),
    [(0, 0), (1, 1), (100, 1), (750, 8), (800, 8), (1800, 18), (1900, 19), (2000, 20), (9999, 20)],
)
def test_the_min_offset_is_that_of_the_first_existing_record(
    queue: ConsumeQueue, log_begin: int, expected: int
) -> None:
    fill(queue, 20)
    queue.correct_min(log_begin)
    assert (queue.min_offset, queue.max_offset) == (expected, 20)


def test_fillers_are_not_messages(queue: ConsumeQueue) -> None:
    queue.begin_at(5)
    fill(queue, 2, 0)
    found = again(queue)
    found.min_offset = 0
    found.correct_min(0)
    assert found.min_offset == 5


def test_files_without_existing_records_are_deleted_except_the_last(queue: ConsumeQueue) -> None:
    fill(queue, 20)
    queue.drop_files_before(15)
    assert names(queue) == [f"{n * FILE_BYTES:020d}" for n in (1, 2)]
    queue.drop_files_before(20)
    assert names(queue) == [f"{2 * FILE_BYTES:020d}"]
    assert queue.entry(19) == (1900, SIZE, 19)


@pytest.mark.parametrize(("durable_to", "left"), [(1601, [16]), (1600, [0])])
def test_a_gap_between_files_is_closed(
    queue: ConsumeQueue, durable_to: int, left: list[int]
) -> None:
    """If files behind the gap are durable, those before it were deleted; otherwise the reverse."""
    fill(queue, 20)
    os.unlink(queue.folder / f"{FILE_BYTES:020d}")
    (queue.folder / "notes.txt").touch()
    found = again(queue)
    assert found.file_starts == [0, 16]
    queue_files.close_gaps(found, durable_to)
    assert found.file_starts == left


@pytest.mark.parametrize("written", range(1, 20))
def test_readers_see_confirmed_entries_only(queue: ConsumeQueue, written: int) -> None:
    fill(queue, written)
    for confirm_offset in range(0, 2001, 50):
        assert queue.visible_max(confirm_offset) == min(confirm_offset // SIZE, written)


def test_a_preallocated_file_shows_no_unconfirmed_entries(queue: ConsumeQueue) -> None:
    fill(queue, FILE_ENTRIES)
    queue.ready()
    assert queue.visible_max(0) == 0
    assert queue.visible_max(350) == 3


def test_a_failed_creation_of_the_next_file_shows_no_unconfirmed_entries(
    queue: ConsumeQueue, disk: WatchedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, size: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    fill(queue, FILE_ENTRIES)
    monkeypatch.setattr(disk, "create", refuse)
    with pytest.raises(StoreError):
        queue.ready()
    assert queue.visible_max(0) == 0


def test_a_queue_that_starts_at_a_later_offset_shows_only_its_entries(queue: ConsumeQueue) -> None:
    queue.begin_at(5)
    assert queue.visible_max(0) == 5
    queue.append(1000, SIZE, 0)
    assert queue.visible_max(1099) == 5
    assert queue.visible_max(1100) == 6


def test_a_full_disk_refuses_before_anything_changes(
    queue: ConsumeQueue, disk: WatchedDisk
) -> None:
    fill(queue, FILE_ENTRIES)
    disk.no_space = lambda path: True
    for _ in range(2):
        with pytest.raises(DiskFull):
            queue.append(800, SIZE, 0)
        assert queue.max_offset == FILE_ENTRIES
    disk.no_space = lambda path: False
    assert queue.append(800, SIZE, 0) == FILE_ENTRIES
    assert entries(queue)[-2:] == [(700, SIZE, 7), (800, SIZE, 0)]


def test_blocks_are_allocated_in_steps(disk: WatchedDisk, tmp_path: Path) -> None:
    queue = ConsumeQueue(disk, tmp_path / "q", b"t", 0, 300_000)
    queue.append(0, SIZE, 0)
    stat = os.stat(queue.folder / f"{0:020d}")
    assert stat.st_size == 6_000_000
    assert stat.st_blocks * 512 == 4096
    fill(queue, 300)
    stat = os.stat(queue.folder / f"{0:020d}")
    assert 60_000 <= stat.st_blocks * 512 <= 128 * 1024


def test_a_preallocated_queue_allocates_nothing_on_append(
    queue: ConsumeQueue, disk: WatchedDisk
) -> None:
    while not queue.needs_blocks:
        queue.append(queue.max_offset * SIZE, SIZE, 0)
    assert queue.max_offset < FILE_ENTRIES
    queue.preallocate()
    assert not queue.needs_blocks
    assert names(queue) == [f"{n * FILE_BYTES:020d}" for n in (0, 1)]
    assert os.stat(queue.folder / f"{FILE_BYTES:020d}").st_blocks > 0
    fill(queue, FILE_ENTRIES)
    found = entries(queue)
    assert len(found) == queue.max_offset > FILE_ENTRIES
    assert [e and e[:2] for e in found] == [(n * SIZE, SIZE) for n in range(len(found))]


def test_preallocation_within_a_file_allocates_the_next_step(
    disk: WatchedDisk, tmp_path: Path
) -> None:
    queue = ConsumeQueue(disk, tmp_path / "q", b"t", 0, 300_000)
    while not queue.needs_blocks:
        queue.append(queue.max_offset * SIZE, SIZE, 0)
    before = os.stat(queue.folder / f"{0:020d}").st_blocks
    queue.preallocate()
    assert os.stat(queue.folder / f"{0:020d}").st_blocks > before
    disk.no_space = lambda path: True
    opened = len(disk.opened)
    while not queue.needs_blocks:  # the preallocated step is used without an allocation
        queue.append(queue.max_offset * SIZE, SIZE, 0)
    assert len(disk.opened) == opened


def test_entries_are_durable_after_sync(queue: ConsumeQueue, disk: WatchedDisk) -> None:
    fill(queue, 3)
    queue.sync()
    disk.synced.clear()
    fill(queue, FILE_ENTRIES)
    queue.sync()
    assert {p.name for p in disk.synced} == {f"{0:020d}", f"{FILE_BYTES:020d}"}


def test_a_closed_queue_is_synced(queue: ConsumeQueue, disk: WatchedDisk) -> None:
    fill(queue, FILE_ENTRIES + 2)
    queue.close()
    queue.sync()
    assert {p.name for p in disk.synced} >= {f"{0:020d}", f"{FILE_BYTES:020d}"}
    assert entries(queue) == [(n * SIZE, SIZE, n) for n in range(FILE_ENTRIES + 2)]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 30])
def test_reserved_entries_need_no_more_space(
    queue: ConsumeQueue, disk: WatchedDisk, count: int
) -> None:
    fill(queue, 3)
    queue.reserve(count)
    for name in names(queue):
        assert os.stat(queue.folder / name).st_blocks > 0
    assert len(names(queue)) == (3 + count + FILE_ENTRIES - 1) // FILE_ENTRIES
    fill(queue, count)
    assert queue.max_offset == 3 + count


@pytest.mark.parametrize("good", [0, 1, 7, 8, 9, 16, 17, 20])
def test_entries_below_a_log_offset_are_counted(queue: ConsumeQueue, good: int) -> None:
    fill(queue, 20)
    found = again(queue)
    found.max_offset = 0
    assert queue_files.find_below(found, good * SIZE) == good


def test_queues_are_found_by_topic_and_number(disk: WatchedDisk, tmp_path: Path) -> None:
    table = QueueTable()
    made = {}
    for topic in (b"a", b"ab", b"b", b"%RETRY%g"):
        for queue_id in range(40):
            queue = ConsumeQueue(disk, tmp_path, topic, queue_id, FILE_ENTRIES)
            table.add(queue)
            made[topic, queue_id] = queue
    assert all(table.get(*key) is queue for key, queue in made.items())
    assert table.get(b"a", 40) is None
    assert table.get(b"", 0) is None
    assert table.get(b"a", -1) is None
