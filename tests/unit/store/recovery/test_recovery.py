"""Start-up: from files in any state to a log, queues and an index that agree."""

import os
import shutil
import struct
from pathlib import Path

import pytest

from penstock.errors import StoreDamaged
from penstock.store.disk import Disk
from penstock.store.put import PUT_OK
from penstock.store.recovery.checkpoint import Checkpoint, read_checkpoint
from penstock.store.store import MessageStore
from tests.unit.store.conftest import (
    EVER_MS,
    NOW_MS,
    SEGMENT_BYTES,
    StoreFixture,
    WatchedDisk,
    bodies,
    flush,
    properties,
    put,
    record,
    sized,
)


def body(n: int) -> bytes:
    return f"body {n:4d}".encode() * 40


def fill(store: MessageStore, count: int, *, first: int = 0, step_ms: int = 1000) -> None:
    """Messages in two queues, each with its own key."""
    for n in range(first, first + count):
        made = record(body(n), queue_id=n % 2, text=properties(keys=f"k{n}", tags="a"))
        put(store, made, now_ms=NOW_MS + n * step_ms)
    flush(store)


def assert_messages(store: MessageStore, count: int) -> None:
    """The store has exactly the first `count` messages, in queues and index."""
    assert bodies(store, queue_id=0) == [body(n) for n in range(0, count, 2)]
    assert bodies(store, queue_id=1) == [body(n) for n in range(1, count, 2)]
    ask = {"begin_ms": 0, "end_ms": EVER_MS, "most": 9, "confirm_offset": store.confirm_offset}
    for n in range(count + 2):
        assert len(store.lookup.by_key("t", f"k{n}", **ask)) == (n < count), f"k{n}"


def log_file(store: MessageStore, number: int) -> Path:
    return store.paths.log / f"{number * SEGMENT_BYTES:020d}"


def as_after_power_cut(store: MessageStore) -> None:
    """The system has restarted since the store was opened: sectors may be missing."""
    store.paths.abort.write_bytes(b"1 another-boot")


def overwrite(path: Path, at: int, data: bytes) -> None:
    with open(path, "r+b") as target:
        target.seek(at)
        target.write(data)


# --- clean


def test_a_clean_start_opens_no_queue_file(stores: StoreFixture) -> None:
    store = stores.open()
    fill(store, 30)
    stores.close(store)
    assert not store.paths.abort.exists()
    assert store.paths.snapshot.exists()
    disk = WatchedDisk()
    store = stores.open(disk)
    assert not [p for p in disk.opened if store.paths.queues in p.parents]
    assert store.report.clean
    assert store.report.records == 0
    assert store.paths.abort.exists()
    assert not store.paths.snapshot.exists()
    assert_messages(store, 30)
    fill(store, 4, first=30)
    assert_messages(store, 34)


SNAPSHOTS = {
    "missing": None,
    "empty": b"",
    "not JSON": b"{\x00",
    "not UTF-8": b"\xff\xfe\xfa",
    "another shape": b'{"log_end": 5}',
}


@pytest.mark.parametrize("content", SNAPSHOTS.values(), ids=SNAPSHOTS)
def test_a_store_opens_without_its_snapshot(stores: StoreFixture, content: bytes | None) -> None:
    store = stores.open()
    fill(store, 30)
    stores.close(store)
    store.paths.snapshot.unlink()
    if content is not None:
        store.paths.snapshot.write_bytes(content)
    store = stores.open()
    assert store.report.log_end == store.log.end
    assert_messages(store, 30)
    fill(store, 4, first=30)
    stores.close(store)
    assert_messages(stores.open(), 34)


def test_an_outdated_snapshot_is_ignored(stores: StoreFixture) -> None:
    store = stores.open()
    fill(store, 10)
    stores.close(store)
    old = store.paths.snapshot.read_bytes()
    store = stores.open()
    fill(store, 10, first=10)
    stores.close(store)
    store.paths.snapshot.write_bytes(old)
    assert_messages(stores.open(), 20)


def test_topics_deleted_by_another_program_are_detected(stores: StoreFixture) -> None:
    store = stores.open()
    fill(store, 10)
    stores.close(store)
    shutil.rmtree(store.paths.queues / "t")
    store = stores.open()
    assert store.queue("t", 0) is None or store.max_offset("t", 0) in (0, 5)


def test_the_last_store_time_is_kept(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, record(), now_ms=NOW_MS + 5000)
    for end in (stores.close, stores.crash):
        end(store)
        store = stores.open(now_ms=NOW_MS)
        put(store, record(), now_ms=NOW_MS)
        assert store.lookup.store_ms(store.writer.offset) == NOW_MS + 5000


@pytest.mark.parametrize(("offset", "size"), [(2 * SEGMENT_BYTES + 3000, 300), (10, 1 << 20)])
def test_without_a_snapshot_one_damaged_entry_does_not_move_the_end(
    stores: StoreFixture, offset: int, size: int
) -> None:
    store = stores.open()
    fill(store, 20)
    stores.close(store)
    end = store.log.end
    assert 2 * SEGMENT_BYTES < end < 2 * SEGMENT_BYTES + 3000
    store.paths.snapshot.unlink()
    last = store.paths.queues / "t" / "1" / f"{160:020d}"
    overwrite(last, 20, struct.pack(">qi", offset, size))
    assert stores.open().log.end == end


def test_a_replay_is_marked_as_open_before_it_writes(stores: StoreFixture) -> None:
    store = stores.open()
    fill(store, 10)
    stores.close(store)
    store.paths.snapshot.unlink()
    shutil.rmtree(store.paths.queues)
    marked = []

    class Noting(WatchedDisk):
        def create(self, path: Path, size: int) -> int:
            if store.paths.queues in path.parents:
                marked.append(store.paths.abort.exists())
            return super().create(path, size)

    stores.open(Noting())
    assert marked
    assert all(marked)


# --- crash


@pytest.mark.parametrize("append_by", ["mapping", "pwrite"])
def test_nothing_is_lost_after_a_crash(stores: StoreFixture, append_by: str) -> None:
    store = stores.open(append_by=append_by)
    fill(store, 30)
    stores.crash(store)
    store = stores.open(append_by=append_by)
    assert not store.report.clean
    assert store.report.records == 30
    assert_messages(store, 30)
    fill(store, 5, first=30)
    stores.crash(store)
    assert_messages(stores.open(append_by=append_by), 35)


def test_recovery_opens_each_queue_file_a_few_times_and_leaves_what_is_right(
    stores: StoreFixture,
) -> None:
    """However the messages of many queues alternate in the log."""
    queues, messages = 12, 8
    store = stores.open(queues_mapped_max=2)
    for n in range(queues * messages):
        put(store, record(b"%d" % n, queue_id=n % queues))
    flush(store)
    stores.crash(store)

    class Writes(WatchedDisk):
        writes = 0

        def write(self, fd: int, data: memoryview, at: int) -> None:
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            self.writes += store.paths.queues in path.parents
            super().write(fd, data, at)

    disk = Writes()
    store = stores.open(disk, queues_mapped_max=2)
    assert store.report.records == queues * messages
    for queue_id in range(queues):
        assert bodies(store, queue_id=queue_id) == [
            b"%d" % n for n in range(queue_id, queues * messages, queues)
        ]
    folder = store.paths.queues / "t" / "0"
    assert len([path for path in disk.opened if path.parent == folder]) < messages
    assert disk.writes == 0
    store.tick(NOW_MS + 10_000)
    assert {path.parent.name for path in disk.synced if path.parents[1] == folder.parent} == {
        str(queue_id) for queue_id in range(queues)
    }, "the process that died may not have synced them"


def test_recovery_does_not_read_the_space_behind_the_log(stores: StoreFixture) -> None:
    """Blocks are allocated there; the read-ahead of one read must not lead to the next."""
    segment_bytes = 64 * 1024 * 1024

    class Counting(WatchedDisk):
        read_bytes = 0

        def read_at(self, fd: int, length: int, at: int) -> bytes:
            data = super().read_at(fd, length, at)
            self.read_bytes += len(data)
            return data

    store = stores.open(segment_bytes=segment_bytes)
    fill(store, 4)
    stores.crash(store)
    disk = Counting()
    assert_messages(stores.open(disk, segment_bytes=segment_bytes), 4)
    assert disk.read_bytes < segment_bytes // 2


def test_queues_and_index_are_rebuilt(stores: StoreFixture) -> None:
    store = stores.open()
    fill(store, 30)
    stores.crash(store)
    shutil.rmtree(store.paths.queues)
    shutil.rmtree(store.paths.index)
    assert_messages(stores.open(), 30)


def test_a_partial_record_at_the_end_is_cut(stores: StoreFixture) -> None:
    store = stores.open()
    fill(store, 20)
    stores.crash(store)
    overwrite(log_file(store, 2), store.writer.offset % SEGMENT_BYTES + 200, bytes(40))
    store = stores.open()
    assert store.report.cut_reason is not None
    assert "CRC" in store.report.cut_reason
    assert str(store.log.end) in store.report.cut_reason
    assert_messages(store, 19)
    fill(store, 5, first=19)
    assert_messages(store, 24)


def test_nothing_stale_stays_behind_the_cut(stores: StoreFixture) -> None:
    store = stores.open()
    fill(store, 30)
    stores.crash(store)
    as_after_power_cut(store)
    overwrite(log_file(store, 1), 0, bytes(512))
    store = stores.open()
    cut = store.report.log_end
    assert SEGMENT_BYTES <= cut < SEGMENT_BYTES + 301
    assert [s.start for s in store.log.segments.items] == [0, SEGMENT_BYTES]
    assert not log_file(store, 2).exists()
    assert log_file(store, 1).read_bytes()[cut - SEGMENT_BYTES :].strip(b"\0") == b""
    assert_messages(store, store.report.records)


def test_a_bad_blank_costs_no_record(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, sized(3000), sized(3000))
    end = store.log.end
    stores.crash(store)
    overwrite(log_file(store, 0), 3000, struct.pack(">i", 100))
    store = stores.open()
    assert store.log.end == end
    assert store.max_offset("t", 0) == 2
    assert (store.report.damaged_ranges, store.report.lost_messages) == (1, 0)


def test_a_record_with_another_offset_ends_the_log(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, sized(200), sized(200))
    stores.crash(store)
    data = log_file(store, 0).read_bytes()[:200]
    overwrite(log_file(store, 0), 400, data)
    store = stores.open()
    assert store.log.end == 400
    assert "another log offset" in (store.report.cut_reason or "")


def test_a_recreated_queue_takes_precedence(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, *[record(b"old") for _ in range(20)])
    queue = store.queue("t", 0)
    assert queue is not None
    queue.cut(0)
    put(store, record(b"new 0"), record(b"new 1"))
    stores.crash(store)
    store = stores.open()
    assert store.max_offset("t", 0) == 2
    assert bodies(store) == [b"new 0", b"new 1"]
    assert put(store, record(b"new 2"))
    assert store.writer.queue_offset == 2


def test_entries_before_the_oldest_segment_become_fillers(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, *[sized(1900) for _ in range(11)])
    stores.crash(store)
    log_file(store, 0).unlink()
    log_file(store, 1).unlink()
    shutil.rmtree(store.paths.queues)
    store = stores.open()
    assert (store.min_offset("t", 0), store.max_offset("t", 0)) == (4, 11)
    assert len(bodies(store, offset=4)) == 7


def test_a_malformed_property_does_not_end_the_log(stores: StoreFixture) -> None:
    store = stores.open()
    text = b"a\x01" + bytes(1500) + b"b\x02"
    status = store.put(record(b"poison", text=text), NOW_MS)
    put(store, record(b"after"))
    flush(store)
    stores.crash(store)
    expected = [b"poison", b"after"] if status == PUT_OK else [b"after"]
    assert bodies(stores.open()) == expected


# --- the checkpoint


def test_a_clean_shutdown_is_written_to_the_checkpoint(stores: StoreFixture) -> None:
    store = stores.open()
    fill(store, 10)
    stores.close(store)
    last_ms = NOW_MS + 9000
    expected = Checkpoint(last_ms, last_ms, last_ms, 0, store.log.end)
    assert read_checkpoint(Disk(), store.paths) == expected


def test_ticks_advance_the_checkpoint_and_shorten_the_replay(stores: StoreFixture) -> None:
    store = stores.open(index_flush_ms=5000, queue_flush_ms=5000)
    fill(store, 16)
    store.tick(NOW_MS + 16_000)
    checkpoint = read_checkpoint(Disk(), store.paths)
    assert checkpoint[:3] == (NOW_MS + 15_000,) * 3
    fill(store, 8, first=16)
    stores.crash(store)
    store = stores.open()
    assert store.report.replayed_from == 1 * SEGMENT_BYTES  # its first record is old enough
    assert store.report.records < 24
    assert_messages(store, 24)


def test_the_log_time_waits_for_the_flusher(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, record(), now_ms=NOW_MS)
    store.tick(NOW_MS + 5000)
    assert read_checkpoint(Disk(), store.paths).log_ms == 0
    flush(store)
    store.tick(NOW_MS + 10_000)
    assert read_checkpoint(Disk(), store.paths).log_ms == NOW_MS


def test_without_a_checkpoint_everything_is_replayed(stores: StoreFixture) -> None:
    store = stores.open(index_flush_ms=5000)
    fill(store, 20)
    store.tick(NOW_MS + 20_000)
    stores.crash(store)
    store.paths.checkpoint.unlink()
    store = stores.open()
    assert (store.report.replayed_from, store.report.records) == (0, 20)
    assert_messages(store, 20)


# --- segments


def test_a_short_last_segment_is_extended(stores: StoreFixture) -> None:
    store = stores.open()
    fill(store, 10)
    stores.crash(store)
    last = log_file(store, 1)
    last.write_bytes(last.read_bytes()[:1500])
    store = stores.open()
    assert last.stat().st_size == SEGMENT_BYTES
    assert_messages(store, store.report.records)


def test_an_empty_last_segment_is_deleted(stores: StoreFixture) -> None:
    store = stores.open()
    fill(store, 3)
    stores.crash(store)
    log_file(store, 1).touch()
    assert_messages(stores.open(), 3)


def test_a_missing_segment_is_named_in_the_error(stores: StoreFixture) -> None:
    store = stores.open()
    fill(store, 20)
    stores.close(store)
    log_file(store, 1).unlink()
    with pytest.raises(StoreDamaged, match=f"segment {SEGMENT_BYTES:020d}"):
        stores.open()


def test_recovery_reports_its_progress(stores: StoreFixture) -> None:
    store = stores.open()
    fill(store, 10)
    stores.crash(store)
    told: list[tuple[str, int, int]] = []
    store = MessageStore(
        stores.root, store.config, disk=WatchedDisk(), now_ms=NOW_MS,
        progress=lambda what, done, of: told.append((what, done, of)),
    )  # fmt: skip
    assert {what for what, _, _ in told} == {"queues", "index", "log"}
    assert told[-1][1] == told[-1][2] > 0
    assert all(0 <= done <= of for _, done, of in told)
    store.close()
