"""The one door: a whole store opened, cared for and closed, also with threads."""

import gc
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.errors import PenstockError, WriteStopped
from penstock.store import get
from penstock.store.directory import StorePaths
from penstock.store.disk import Disk
from penstock.store.put import PUT_OK, REFUSED
from penstock.store.recovery.checkpoint import (
    SLACK_MS,
    Checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from penstock.store.store import MessageStore
from tests.unit.store.conftest import (
    NOW_MS,
    SEGMENT_BYTES,
    WAIT_SECONDS,
    Bench,
    WatchedDisk,
    bodies,
    body_of,
    flush,
    properties,
    put,
    reached,
    record,
    sized,
    split,
)


def settled(store: MessageStore) -> None:
    """Wait until the flusher's thread has brought all to the disk."""
    store.publish()
    store.flusher.demand()
    assert reached(store.flusher, store.log.end)
    store.publish()


def cared(store: MessageStore) -> None:
    """Wait for the work that a tick gave to the pool."""
    if store.maintenance._job is not None:
        store.maintenance._job.exception(WAIT_SECONDS)


@pytest.mark.parametrize("sync_flush", [False, True])
@pytest.mark.parametrize("append_by", ["mapping", "pwrite", "auto"])
def test_a_store_with_threads_keeps_all_over_restarts(
    bench: Bench, sync_flush: bool, append_by: str
) -> None:
    expected: list[bytes] = []
    for end in (bench.close, bench.crash, bench.close):
        store = bench.open(Disk(), sync_flush=sync_flush, append_by=append_by)
        for n in range(30):
            expected.append(f"{len(expected)}".encode() * (n * 7 % 150))
            put(store, record(expected[-1], text=properties(keys=f"k{n}")))
        settled(store)
        assert bodies(store) == expected
        end(store)
    store = bench.open(Disk(), sync_flush=sync_flush, append_by=append_by)
    assert bodies(store) == expected


def test_files_have_rocketmqs_names(bench: Bench) -> None:
    store = bench.open()
    put(store, record(topic="%RETRY%g", queue_id=3, text=properties(keys="k")))
    names = set(os.listdir(bench.root))
    assert names >= {"commitlog", "consumequeue", "index", "config", "abort", "lock"}
    assert (bench.root / "abort").read_text() == str(os.getpid())
    assert os.listdir(bench.root / "commitlog") == [f"{0:020d}"]
    assert os.listdir(bench.root / "consumequeue" / "%RETRY%g" / "3") == [f"{0:020d}"]
    assert len(os.listdir(bench.root / "index")[0]) == 17
    bench.close(store)
    names = set(os.listdir(bench.root))
    assert "checkpoint" in names
    assert "abort" not in names


def test_get_gives_records_and_where_to_go_on(bench: Bench) -> None:
    store = bench.open()
    put(store, *[record(bytes([n])) for n in range(6)])
    found = store.get("t", 0, 2, count_max=3)
    assert (found.status, found.count, found.next_offset) == (get.FOUND, 3, 5)
    assert (found.min_offset, found.max_offset) == (0, 6)
    assert [body_of(r) for r in split(found.data)] == [b"\x02", b"\x03", b"\x04"]
    assert store.get("t", 7, 0).status == get.NO_MATCHED_LOGIC_QUEUE
    assert (store.max_offset("t", 7), store.min_offset("t", 7)) == (0, 0)


def test_ticks_flush_queues_and_later_the_index(bench: Bench) -> None:
    disk = WatchedDisk()
    store = bench.open(disk, queue_flush_ms=5000, index_flush_ms=60_000)
    put(store, record(text=properties(keys="k")))
    flush(store)
    disk.synced.clear()
    store.tick(NOW_MS + 4999)
    assert disk.synced == []
    store.tick(NOW_MS + 5000)
    kinds = [p.relative_to(bench.root).parts[0] for p in disk.synced]
    assert kinds == ["consumequeue", "checkpoint"]
    assert read_checkpoint(disk, store.paths)[:3] == (NOW_MS, NOW_MS, 0)
    disk.synced.clear()
    store.tick(NOW_MS + 60_000)
    kinds = [p.relative_to(bench.root).parts[0] for p in disk.synced]
    assert set(kinds) == {"index", "checkpoint"}
    assert read_checkpoint(disk, store.paths)[:3] == (NOW_MS, NOW_MS, NOW_MS)


def test_a_tick_with_threads_works_in_the_pool(bench: Bench) -> None:
    store = bench.open(Disk())
    put(store, record())
    settled(store)
    store.tick(NOW_MS + 5000)
    cared(store)
    store.tick(NOW_MS + 5001)
    assert read_checkpoint(store.disk, store.paths).queues_ms == NOW_MS


class FailingDisk(Disk):
    """A disk with threads where syncing some files fails."""

    def __init__(self, fails: Callable[[Path], bool]) -> None:
        super().__init__()
        self.fails = fails

    def sync(self, fd: int) -> None:
        if self.fails(Path(os.readlink(f"/proc/self/fd/{fd}"))):
            raise OSError(5, os.strerror(5))
        super().sync(fd)


def stopped_by_a_queue(bench: Bench) -> MessageStore:
    """A store whose queue file failed to sync."""
    store = bench.open(FailingDisk(lambda path: "consumequeue" in path.parts))
    put(store, record())
    settled(store)
    store.tick(NOW_MS + 5000)
    cared(store)
    return store


def test_a_queue_that_cannot_be_synced_stops_writing(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    store = stopped_by_a_queue(bench)
    store.tick(NOW_MS + 5001)
    assert isinstance(store.refusal, WriteStopped)
    assert "Input/output error" in caplog.text
    assert store.put(record(), NOW_MS) == REFUSED


def test_after_a_failed_sync_of_a_queue_the_end_is_not_clean(bench: Bench) -> None:
    store = stopped_by_a_queue(bench)
    store.tick(NOW_MS + 5001)
    assert isinstance(store.disk, FailingDisk)
    store.disk.fails = lambda path: False  # the next fsync succeeds, like Linux's
    bench.close(store)
    assert store.paths.abort.exists()


def test_a_store_can_be_closed_after_a_failure(bench: Bench) -> None:
    store = stopped_by_a_queue(bench)
    bench.close(store)
    assert store.paths.abort.exists()
    bench.open()


def test_a_failed_log_flush_leaves_the_store_marked_open(bench: Bench) -> None:
    disk = WatchedDisk()
    store = bench.open(disk, sync_flush=True)
    put(store, record(b"durable"))
    flush(store)
    put(store, record(b"lost"))
    disk.sync_fails = lambda path: "commitlog" in path.parts
    flush(store)
    bench.close(store)
    assert store.paths.abort.exists()
    assert not store.paths.snapshot.exists()
    store = bench.open()
    assert bodies(store)[0] == b"durable"


def test_the_flusher_thread_reports_a_failure(bench: Bench) -> None:
    store = bench.open(Disk(), sync_flush=True)
    put(store, record())
    settled(store)
    reading, writing = os.pipe()
    os.dup2(writing, store.log.current_fd())  # fdatasync of a pipe is EINVAL
    store.disk.write = lambda fd, data, at: None  # type: ignore[method-assign]
    store.put(record(), NOW_MS)
    store.publish()
    assert not reached(store.flusher, store.log.end)
    store.publish()
    assert isinstance(store.refusal, WriteStopped)
    assert "Invalid argument" in str(store.refusal)
    assert store.max_offset("t", 0) == 1
    os.close(reading)
    os.close(writing)


def test_a_closed_store_refuses(bench: Bench) -> None:
    store = bench.open()
    put(store, record())
    bench.close(store)
    assert store.refusal is not None


def test_closing_gives_back_all_handles(bench: Bench) -> None:
    bench.close(bench.open())
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        store = bench.open()
        put(store, *[sized(3000) for _ in range(5)])
        bench.close(store)
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()


def test_a_failed_opening_gives_back_all_handles(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = WatchedDisk()
    disk.no_space = lambda path: True
    bench.root.mkdir()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(Exception, match="no space"):
            bench.open(disk)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_hungry_files_are_fed_at_the_end_of_a_turn(bench: Bench) -> None:
    store = bench.open(Disk(), queue_file_entries=8, index_entries=2000)
    for n in range(7):
        put(store, record(bytes([n])))
    store.disk.close()  # waits for the pool
    assert sorted(os.listdir(store.paths.queues / "t" / "0")) == [f"{n:020d}" for n in (0, 160)]
    assert [store.put(record(), NOW_MS) for _ in range(3)] == [PUT_OK] * 3


def test_the_segment_being_written_can_be_locked_in_memory(bench: Bench) -> None:
    store = bench.open(Disk(), lock_memory=True)
    put(store, *[sized(3000) for _ in range(4)])
    assert len(bodies(store)) == 4
    assert store.log.segments.items[-1].start == 3 * SEGMENT_BYTES


@pytest.mark.parametrize("name", ["queue_file_entries", "index_slots"])
def test_a_size_of_nothing_is_refused(bench: Bench, name: str) -> None:
    with pytest.raises((PenstockError, ValueError), match=name):
        bench.open(None, **{name: 0})  # type: ignore[arg-type]


def test_recovery_begins_below_all_three_times() -> None:
    checkpoint = Checkpoint(log_ms=50_000, queues_ms=40_000, index_ms=30_000)
    assert checkpoint.recover_from_ms(with_index=True) == 30_000 - SLACK_MS
    assert checkpoint.recover_from_ms(with_index=False) == 40_000 - SLACK_MS
    assert Checkpoint(1, 1, 1).recover_from_ms(with_index=True) == 0


def test_the_checkpoint_is_apaches_page(tmp_path: Path) -> None:
    disk, paths = Disk(), StorePaths(tmp_path)
    assert read_checkpoint(disk, paths) == Checkpoint()
    write_checkpoint(disk, paths, Checkpoint(1, 2, 3, 4, 5))
    data = paths.checkpoint.read_bytes()
    assert data == struct.pack(">qqqqq", 1, 2, 3, 4, 5) + bytes(4096 - 40)
    assert read_checkpoint(disk, paths) == Checkpoint(1, 2, 3, 4, 5)
    paths.checkpoint.write_bytes(b"short")
    assert read_checkpoint(disk, paths) == Checkpoint()
