"""A whole store: open, maintenance and close, also with threads."""

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
    StoreFixture,
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


def wait_for_flush(store: MessageStore) -> None:
    """Wait until the flusher thread has flushed everything."""
    store.publish()
    store.flusher.demand()
    assert reached(store.flusher, store.log.end)
    store.publish()


def wait_for_maintenance(store: MessageStore) -> None:
    """Wait for the work that a tick submitted to the thread pool."""
    if store.maintenance._job is not None:
        store.maintenance._job.exception(WAIT_SECONDS)


@pytest.mark.parametrize("sync_flush", [False, True])
@pytest.mark.parametrize("append_by", ["mapping", "pwrite", "auto"])
def test_a_store_with_threads_keeps_everything_over_restarts(
    stores: StoreFixture, sync_flush: bool, append_by: str
) -> None:
    expected: list[bytes] = []
    for end in (stores.close, stores.crash, stores.close):
        store = stores.open(Disk(), sync_flush=sync_flush, append_by=append_by)
        for n in range(30):
            expected.append(f"{len(expected)}".encode() * (n * 7 % 150))
            put(store, record(expected[-1], text=properties(keys=f"k{n}")))
        wait_for_flush(store)
        assert bodies(store) == expected
        end(store)
    store = stores.open(Disk(), sync_flush=sync_flush, append_by=append_by)
    assert bodies(store) == expected


def test_files_have_rocketmqs_names(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, record(topic="%RETRY%g", queue_id=3, text=properties(keys="k")))
    names = set(os.listdir(stores.root))
    assert names >= {"commitlog", "consumequeue", "index", "config", "abort", "lock"}
    assert (stores.root / "abort").read_text().split()[0] == str(os.getpid())
    assert os.listdir(stores.root / "commitlog") == [f"{0:020d}"]
    assert os.listdir(stores.root / "consumequeue" / "%RETRY%g" / "3") == [f"{0:020d}"]
    assert len(os.listdir(stores.root / "index")[0]) == 17
    stores.close(store)
    names = set(os.listdir(stores.root))
    assert "checkpoint" in names
    assert "abort" not in names


def test_get_returns_records_and_the_next_offset(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, *[record(bytes([n])) for n in range(6)])
    found = store.get("t", 0, 2, count_max=3)
    assert (found.status, found.count, found.next_offset) == (get.FOUND, 3, 5)
    assert (found.min_offset, found.max_offset) == (0, 6)
    assert [body_of(r) for r in split(found.data)] == [b"\x02", b"\x03", b"\x04"]
    assert store.get("t", 7, 0).status == get.NO_MATCHED_LOGIC_QUEUE
    assert (store.max_offset("t", 7), store.min_offset("t", 7)) == (0, 0)


def test_ticks_flush_queues_and_later_the_index(stores: StoreFixture) -> None:
    disk = WatchedDisk()
    store = stores.open(disk, queue_flush_ms=5000, index_flush_ms=60_000)
    put(store, record(text=properties(keys="k")))
    flush(store)
    disk.synced.clear()
    store.tick(NOW_MS + 4999)
    assert disk.synced == []
    store.tick(NOW_MS + 5000)
    kinds = [p.relative_to(stores.root).parts[0] for p in disk.synced]
    assert kinds == ["consumequeue", "checkpoint"]
    assert read_checkpoint(disk, store.paths)[:3] == (NOW_MS, NOW_MS, 0)
    disk.synced.clear()
    store.tick(NOW_MS + 60_000)
    kinds = [p.relative_to(stores.root).parts[0] for p in disk.synced]
    assert set(kinds) == {"index", "checkpoint"}
    assert read_checkpoint(disk, store.paths)[:3] == (NOW_MS, NOW_MS, NOW_MS)


def test_a_tick_with_threads_works_in_the_thread_pool(stores: StoreFixture) -> None:
    store = stores.open(Disk())
    put(store, record())
    wait_for_flush(store)
    store.tick(NOW_MS + 5000)
    wait_for_maintenance(store)
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


def stopped_by_a_queue(stores: StoreFixture) -> MessageStore:
    """A store whose queue file failed to sync."""
    store = stores.open(FailingDisk(lambda path: "consumequeue" in path.parts))
    put(store, record())
    wait_for_flush(store)
    store.tick(NOW_MS + 5000)
    wait_for_maintenance(store)
    return store


def test_a_failed_sync_of_a_queue_stops_writes(
    stores: StoreFixture, caplog: pytest.LogCaptureFixture
) -> None:
    store = stopped_by_a_queue(stores)
    store.tick(NOW_MS + 5001)
    assert isinstance(store.refusal, WriteStopped)
    assert "Input/output error" in caplog.text
    assert store.put(record(), NOW_MS) == REFUSED


def test_a_failed_sync_of_a_queue_prevents_a_clean_shutdown(stores: StoreFixture) -> None:
    store = stopped_by_a_queue(stores)
    store.tick(NOW_MS + 5001)
    assert isinstance(store.disk, FailingDisk)
    store.disk.fails = lambda path: False  # the next fsync succeeds, like Linux's
    stores.close(store)
    assert store.paths.abort.exists()


def test_a_store_can_be_closed_after_a_failure(stores: StoreFixture) -> None:
    store = stopped_by_a_queue(stores)
    stores.close(store)
    assert store.paths.abort.exists()
    stores.open()


def test_a_failed_log_flush_leaves_the_store_marked_open(stores: StoreFixture) -> None:
    disk = WatchedDisk()
    store = stores.open(disk, sync_flush=True)
    put(store, record(b"durable"))
    flush(store)
    put(store, record(b"lost"))
    disk.sync_fails = lambda path: "commitlog" in path.parts
    flush(store)
    stores.close(store)
    assert store.paths.abort.exists()
    assert not store.paths.snapshot.exists()
    store = stores.open()
    assert bodies(store)[0] == b"durable"


def test_the_flusher_thread_reports_a_failure(stores: StoreFixture) -> None:
    store = stores.open(Disk(), sync_flush=True)
    put(store, record())
    wait_for_flush(store)
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


def test_a_closed_store_refuses_puts(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, record())
    stores.close(store)
    assert store.refusal is not None


def test_close_releases_all_handles(stores: StoreFixture) -> None:
    stores.close(stores.open())
    gc.collect()
    gc.disable()
    try:
        before = len(os.listdir("/proc/self/fd"))
        store = stores.open()
        put(store, *[sized(3000) for _ in range(5)])
        stores.close(store)
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()


def test_a_failed_open_releases_all_handles(
    stores: StoreFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = WatchedDisk()
    disk.no_space = lambda path: True
    stores.root.mkdir()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(Exception, match="no space"):
            stores.open(disk)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_are_preallocated_at_the_end_of_a_loop_iteration(stores: StoreFixture) -> None:
    store = stores.open(Disk(), queue_file_entries=8, index_entries=2000)
    for n in range(7):
        put(store, record(bytes([n])))
    store.disk.close()  # waits for the thread pool
    assert sorted(os.listdir(store.paths.queues / "t" / "0")) == [f"{n:020d}" for n in (0, 160)]
    assert [store.put(record(), NOW_MS) for _ in range(3)] == [PUT_OK] * 3


def test_the_segment_being_written_can_be_locked_in_memory(stores: StoreFixture) -> None:
    store = stores.open(Disk(), lock_memory=True)
    put(store, *[sized(3000) for _ in range(4)])
    assert len(bodies(store)) == 4
    assert store.log.segments.items[-1].start == 3 * SEGMENT_BYTES


@pytest.mark.parametrize("name", ["queue_file_entries", "index_slots"])
def test_a_size_of_zero_is_refused(stores: StoreFixture, name: str) -> None:
    with pytest.raises((PenstockError, ValueError), match=name):
        stores.open(None, **{name: 0})  # type: ignore[arg-type]


def test_recovery_starts_before_all_three_times() -> None:
    checkpoint = Checkpoint(log_ms=50_000, queues_ms=40_000, index_ms=30_000)
    assert checkpoint.recover_from_ms(with_index=True) == 30_000 - SLACK_MS
    assert checkpoint.recover_from_ms(with_index=False) == 40_000 - SLACK_MS
    assert Checkpoint(1, 1, 1).recover_from_ms(with_index=True) == 0


def test_the_checkpoint_has_the_format_of_apache(tmp_path: Path) -> None:
    disk, paths = Disk(), StorePaths(tmp_path)
    assert read_checkpoint(disk, paths) == Checkpoint()
    write_checkpoint(disk, paths, Checkpoint(1, 2, 3, 4, 5))
    data = paths.checkpoint.read_bytes()
    assert data == struct.pack(">qqqqq", 1, 2, 3, 4, 5) + bytes(4096 - 40)
    assert read_checkpoint(disk, paths) == Checkpoint(1, 2, 3, 4, 5)
    paths.checkpoint.write_bytes(b"short")
    assert read_checkpoint(disk, paths) == Checkpoint()
