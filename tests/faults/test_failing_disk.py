"""A disk that fails to sync or is full: writes stop with a reason, and resume if that is safe."""

import errno
import logging
import os
from pathlib import Path
from random import Random

import pytest

from penstock.errors import DiskFull, ReadFailed, StoreError, WriteStopped
from penstock.rpc.persistence import Persistence
from penstock.store.disk import Disk, disk_failure
from penstock.store.put import PUT_OK, REFUSED
from penstock.store.store import MessageStore
from penstock.store.tables.config_tables import TopicTable
from penstock.testing import FaultyDisk
from penstock.testing.faulty_disk import PAGE_BYTES
from penstock.wire.bodies.client_bodies import TopicConfig
from tests.store_kit import (
    START_MS,
    Message,
    Model,
    abandon,
    flush,
    open_store,
    put,
    put_ok,
    small_config,
    verify,
)

BODY = bytes(1000)


def fresh(root: Path, *, sync_flush: bool = True) -> tuple[MessageStore, FaultyDisk, Model]:
    disk = FaultyDisk(root)
    return open_store(root, small_config(sync_flush=sync_flush), disk), disk, Model()


@pytest.mark.parametrize("sync_flush", [True, False])
def test_a_failed_fsync_of_the_log_stops_writes_permanently(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, sync_flush: bool
) -> None:
    store, disk, model = fresh(tmp_path / "s", sync_flush=sync_flush)
    put_ok(store, model, [Message("t", 0, b"safe")], START_MS)
    flush(store)
    safe = store.confirm_offset
    assert put(store, [Message("t", 0, b"doubtful")], START_MS) == PUT_OK
    disk.failing = 1
    with caplog.at_level(logging.ERROR):
        flush(store)
    assert isinstance(store.refusal, WriteStopped)
    assert str(tmp_path / "s" / "commitlog") in str(store.refusal)
    assert str(store.refusal) in caplog.text
    if sync_flush:
        assert store.confirm_offset == safe, "what is not durable was shown to readers"
    assert put(store, [Message("t", 0, b"more")], START_MS) == REFUSED
    flush(store)  # the disk works again, but it is unknown what it has lost meanwhile
    store.tick(START_MS + 60_000)
    assert put(store, [Message("t", 0, b"more")], START_MS) == REFUSED
    assert store.flusher.flushed() == safe
    store.close()
    assert (tmp_path / "s" / "abort").exists(), "not closed cleanly: the next start must look"
    store = open_store(tmp_path / "s", small_config(sync_flush=sync_flush), disk)
    assert store.log.end >= safe
    store.close()


class PagesTakenForClean(FaultyDisk):
    """As Linux: the pages that an fsync could not write are clean after it. They can be read, but
    no later fsync writes them unless they are written again."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self._clean: dict[int, dict[int, bytes]] = {}  # by file and position

    def write(self, fd: int, data: memoryview, at: int) -> None:
        super().write(fd, data, at)
        clean = self._clean.get(os.fstat(fd).st_ino, {})
        for page in range(at - at % PAGE_BYTES, at + len(data), PAGE_BYTES):
            clean.pop(page, None)

    def sync(self, fd: int) -> None:
        file = self._file(fd)
        before, now = file.image, file.content()
        clean = self._clean.setdefault(file.number(), {})
        try:
            super().sync(fd)
        except OSError:
            for page in range(0, len(now), PAGE_BYTES):
                held = now[page : page + PAGE_BYTES]
                if held != before[page : page + PAGE_BYTES]:
                    clean[page] = held
            raise
        image = bytearray(now)
        for page, held in clean.items():
            if now[page : page + PAGE_BYTES] == held:
                image[page : page + PAGE_BYTES] = before[page : page + PAGE_BYTES]
        file.make_durable(bytes(image))


@pytest.mark.parametrize("sync_flush", [True, False])
def test_what_a_failed_fsync_left_in_memory_is_durable_after_the_next_start(
    tmp_path: Path, sync_flush: bool
) -> None:
    """The process is killed before it can note that an fsync has failed."""
    disk, config = PagesTakenForClean(tmp_path / "s"), small_config(sync_flush=sync_flush)
    store, model = open_store(disk.root, config, disk), Model()
    put_ok(store, model, [Message("t", 0, b"safe")], START_MS)
    flush(store)
    put_ok(store, model, [Message("t", 0, BODY * 3) for _ in range(3)], START_MS)
    disk.failing = 1
    flush(store)
    assert isinstance(store.refusal, WriteStopped)
    abandon(store)
    store = open_store(disk.root, config, disk)
    verify(store, model)  # readers and replicas rely on it now
    abandon(store)
    for seed in range(5):
        left = disk.crash(tmp_path / f"after-{seed}", Random(seed))
        store = open_store(left, config, FaultyDisk(left))
        verify(store, model)
        abandon(store)


class NoQueueSync(Disk):
    """A real disk, with threads, that can't sync queue files."""

    def sync(self, fd: int) -> None:
        raise OSError(5, "Input/output error")


def test_a_failed_fsync_of_a_queue_stops_writes_and_keeps_the_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path / "s", small_config(sync_flush=False), Disk())
    assert put(store, [Message("t", 0, b"x")], START_MS) == PUT_OK
    store.publish()
    store.disk.close()  # waits for the thread pool
    store.queues.rows[0].disk.__class__ = NoQueueSync
    with caplog.at_level(logging.ERROR):
        store.tick(START_MS + 5_000)
        store.disk.close()
        store.tick(START_MS + 5_001)
    store.disk.__class__ = Disk
    assert isinstance(store.refusal, WriteStopped)
    assert str(tmp_path / "s") in str(store.refusal)
    assert put(store, [Message("t", 0, b"x")], START_MS) == REFUSED
    assert not (tmp_path / "s" / "checkpoint").exists(), "it would promise what is not durable"
    abandon(store)


def refused_and_unchanged(store: MessageStore, model: Model, messages: list[Message]) -> None:
    """A put is refused for lack of space, again after a tick, and has changed nothing."""
    for now_ms in (START_MS, START_MS + 1):
        assert put(store, messages, now_ms) == REFUSED
        assert isinstance(store.refusal, DiskFull)
        assert store.log.end == model.end
        flush(store)
        verify(store, model)
        store.tick(now_ms)


def resumed(store: MessageStore, disk: FaultyDisk, model: Model, messages: list[Message]) -> None:
    """There is space again: the next tick allows writes, and a restart finds everything."""
    disk.space_left = None
    store.tick(START_MS + 2)
    assert store.refusal is None
    put_ok(store, model, messages, START_MS + 2)
    flush(store)
    verify(store, model)
    assert disk.stores_into_holes() == []
    store.close()
    store = open_store(disk.root, small_config(sync_flush=True), FaultyDisk(disk.root))
    assert store.report.clean
    put_ok(store, model, [Message("t", 0, b"restarted", keys=("again",))], START_MS + 3)
    flush(store)
    verify(store, model)
    store.close()


def test_a_put_without_space_for_the_next_segment_is_refused_until_there_is_space(
    tmp_path: Path,
) -> None:
    store, disk, model = fresh(tmp_path / "s")
    for _ in range(14):
        put_ok(store, model, [Message("t", 0, BODY)], START_MS)
    disk.space_left = 8192
    refused_and_unchanged(store, model, [Message("t", 0, bytes(2000))])
    assert (tmp_path / "s" / "commitlog").exists()
    assert len(list((tmp_path / "s" / "commitlog").iterdir())) == 1, "half a segment stays behind"
    resumed(store, disk, model, [Message("t", 0, bytes(2000))])


def test_a_put_without_space_for_a_new_queue_is_refused_until_there_is_space(
    tmp_path: Path,
) -> None:
    store, disk, model = fresh(tmp_path / "s")
    put_ok(store, model, [Message("t", 0, b"x", keys=("k",))], START_MS)
    disk.space_left = 0
    refused_and_unchanged(store, model, [Message("other", 1, b"x")])
    resumed(store, disk, model, [Message("other", 1, b"x")])


def test_a_put_without_space_for_an_index_file_is_refused_until_there_is_space(
    tmp_path: Path,
) -> None:
    store, disk, model = fresh(tmp_path / "s")
    for serial in range(21):
        keys = tuple(f"k{serial}.{i}" for i in range(19))
        put_ok(store, model, [Message("t", 0, b"x", keys=keys)], START_MS)
    assert len(store.index.files) == 1
    assert store.index.current.is_full()
    disk.space_left = 0
    refused_and_unchanged(store, model, [Message("t", 0, b"x", keys=("one", "more"))])
    assert len(list((tmp_path / "s" / "index").iterdir())) == 1, "a file without a head stays"
    resumed(store, disk, model, [Message("t", 0, b"x", keys=("one", "more"))])


def test_a_batch_without_space_in_the_middle_is_refused_completely(tmp_path: Path) -> None:
    store, disk, model = fresh(tmp_path / "s")
    for _ in range(48):
        put_ok(store, model, [Message("t", 0, b"x")], START_MS)
    disk.space_left = 0
    batch = [Message("t", 0, b"%d" % i, keys=(f"b{i}",)) for i in range(5)]
    refused_and_unchanged(store, model, batch)
    resumed(store, disk, model, batch)


@pytest.mark.parametrize("sync_flush", [True, False])
def test_a_checkpoint_without_space_does_not_stop_writes(
    tmp_path: Path, sync_flush: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store, disk, model = fresh(tmp_path / "s", sync_flush=sync_flush)
    put_ok(store, model, [Message("t", 0, b"x")], START_MS)
    disk.space_left = 0
    for now_ms in (START_MS + 5_000, START_MS + 10_000):
        store.tick(now_ms)
        assert store.refusal is None
        put_ok(store, model, [Message("t", 0, b"y")], now_ms)
    assert "no space to write" in caplog.text
    disk.space_left = None
    store.tick(START_MS + 15_000)
    assert (tmp_path / "s" / "checkpoint").exists()
    store.close()
    store = open_store(disk.root, small_config(sync_flush=sync_flush), FaultyDisk(disk.root))
    assert store.report.clean
    store.close()


class FullDisk(FaultyDisk):
    """A disk on which a write into allocated blocks needs space, as with copy-on-write."""

    full = False

    def write(self, fd: int, data: memoryview, at: int) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, data, at)


@pytest.mark.parametrize("batch", [False, True])
def test_records_that_the_disk_had_no_space_for_are_written_when_there_is_space(
    tmp_path: Path, batch: bool
) -> None:
    disk = FullDisk(tmp_path / "s")
    store, model = open_store(disk.root, small_config(sync_flush=True), disk), Model()
    put_ok(store, model, [Message("t", 0, b"first", keys=("k",))], START_MS)
    flush(store)
    durable = store.confirm_offset
    disk.full = True
    staged = [Message("t", 0, b"staged%d" % n) for n in range(3 if batch else 1)]
    put_ok(store, model, staged, START_MS)
    flush(store)
    assert store.confirm_offset == durable, "what is not written was shown or acknowledged"
    assert isinstance(store.refusal, DiskFull)
    assert put(store, [Message("t", 0, b"refused")], START_MS) == REFUSED
    disk.full = False
    store.tick(START_MS + 1)
    assert store.refusal is None
    put_ok(store, model, [Message("t", 0, b"resumed", keys=("r",))], START_MS + 1)
    flush(store)
    assert store.confirm_offset == store.log.end
    verify(store, model)
    store.close()


def test_a_roll_without_space_is_tried_again(tmp_path: Path) -> None:
    disk = FullDisk(tmp_path / "s")
    store, model = open_store(disk.root, small_config(sync_flush=True), disk), Model()
    for _ in range(14):
        put_ok(store, model, [Message("t", 0, BODY)], START_MS)
    disk.full = True
    assert put(store, [Message("t", 0, bytes(2000))], START_MS) == REFUSED
    assert isinstance(store.refusal, DiskFull)
    disk.full = False
    store.tick(START_MS + 1)
    put_ok(store, model, [Message("t", 0, bytes(2000))], START_MS + 1)
    flush(store)
    verify(store, model)
    store.close()


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("count", [1, 20, 90])
def test_a_store_whose_process_was_killed_on_a_full_disk_opens_again(
    tmp_path: Path, count: int, checkpoint: bool
) -> None:
    store, disk, model = fresh(tmp_path / "s")
    for n in range(count):
        put_ok(store, model, [Message("t", n % 3, BODY, keys=(f"k{n}", f"l{n}"))], START_MS)
    if checkpoint:
        flush(store)
        store.tick(START_MS + 5_000)
    disk.space_left = 0
    more = [Message("t", 0, BODY, keys=("m", "n"))]
    while store.writer.refusal is None:
        if put(store, more, START_MS) == PUT_OK:
            model.put(more, START_MS)
    flush(store)
    verify(store, model)
    abandon(store)
    for _ in range(2):
        store = open_store(disk.root, small_config(sync_flush=True), disk)
        verify(store, model)
        assert put(store, more, START_MS) == REFUSED
        assert isinstance(store.refusal, DiskFull)
        abandon(store)
    store = open_store(disk.root, small_config(sync_flush=True), disk)
    resumed(store, disk, model, more)


def test_a_store_that_needs_space_to_open_is_refused_with_the_way_out(tmp_path: Path) -> None:
    disk = FullDisk(tmp_path / "s")
    store, model = open_store(disk.root, small_config(sync_flush=True), disk), Model()
    put_ok(store, model, [Message("t", 0, b"x", keys=("k",))], START_MS)
    flush(store)
    abandon(store)
    disk.full = True
    with pytest.raises(DiskFull, match="can't be opened: the disk is full") as caught:
        open_store(disk.root, small_config(sync_flush=True), disk)
    assert caught.value.hint == "free disk space and start again; no stored message is lost"
    disk.full = False
    store = open_store(disk.root, small_config(sync_flush=True), disk)
    verify(store, model)
    store.close()


def test_a_failed_sync_outside_of_the_flusher_stops_writes_too(tmp_path: Path) -> None:
    store, disk, model = fresh(tmp_path / "s", sync_flush=False)
    put_ok(store, model, [Message("t", 0, b"x")], START_MS)
    store.publish()
    disk.failing = 1
    with pytest.raises(OSError, match="Input/output error"):
        store.sync_log(store.log.end)
    store.publish()
    assert isinstance(store.refusal, WriteStopped), "the kernel reports the loss only once"
    abandon(store)


def test_a_full_disk_refuses_changes_of_tables_with_a_clear_error(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path)
    (tmp_path / "config").mkdir()
    table, persistence = TopicTable(), Persistence(disk, tmp_path)
    table.put(TopicConfig(topic_name="orders"), START_MS)
    disk.space_left = 0
    with pytest.raises(DiskFull, match=r"no space to save config/topics\.json"):
        persistence.save(table)()
    assert table.dirty
    disk.space_left = None
    persistence.save(table)()
    again = TopicTable()
    assert again.load(persistence.file(TopicTable.FILE))
    assert again.get("orders") == table.get("orders")


@pytest.mark.parametrize(
    ("code", "kind"), [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, ReadFailed)]
)
def test_a_disk_error_is_not_called_a_bug(code: int, kind: type[StoreError]) -> None:
    assert type(disk_failure(OSError(code, os.strerror(code), "file"))) is kind
    assert disk_failure(OSError(errno.EBADF, "closed")) is None
