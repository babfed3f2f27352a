"""Blocks of the log: allocated in steps that grow with the log, always ahead of what is written."""

import gc
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import StoreConfig
from penstock.errors import DiskFull
from penstock.store import commitlog, segment
from penstock.store.commitlog import NO_ROOM, CommitLog, allocation_step
from penstock.store.disk import STAT_BLOCK_BYTES, Disk
from penstock.store.index import IndexFile, index_file_bytes
from penstock.store.put import REFUSED
from penstock.store.segment import SegmentList
from penstock.store.store import MessageStore
from penstock.wire.layout import BLANK_BYTES
from tests.depth import rounds
from tests.unit.store.conftest import (
    NOW_MS,
    StoreFixture,
    WatchedDisk,
    bodies,
    properties,
    put,
    record,
    sized,
)

BLOCK_BYTES = 4096
MEBIBYTE = 1 << 20

T = TypeVar("T")


def occupied(root: Path) -> int:
    return sum(p.stat().st_blocks for p in root.rglob("*") if p.is_file()) * STAT_BLOCK_BYTES


def fill(store: MessageStore, count: int, body: bytes) -> None:
    for number in range(count):
        put(store, record(body, text=properties(tags="a", unique=f"{number:032d}")))


@pytest.mark.parametrize("sync_flush", [False, True])
def test_a_new_store_with_ten_messages_takes_less_than_32_mib(
    tmp_path: Path, sync_flush: bool
) -> None:
    store = MessageStore(tmp_path, StoreConfig(sync_flush=sync_flush), now_ms=NOW_MS)
    fill(store, 10, b"x" * 100)
    store.close()
    assert occupied(tmp_path) < 32 * MEBIBYTE
    assert (tmp_path / "commitlog" / f"{0:020d}").stat().st_size == 1 << 30


def test_a_log_takes_at_most_three_times_what_it_holds(tmp_path: Path) -> None:
    store = MessageStore(tmp_path, StoreConfig(index_enabled=False), now_ms=NOW_MS)
    fill(store, 40, b"x" * MEBIBYTE)
    held = store.log.end
    store.disk.close()  # waits for allocations
    assert held < store.disk_bytes() <= 3 * held + segment.FIRST_BYTES
    assert store.disk_bytes() == occupied(tmp_path / "commitlog")
    store.close()


@pytest.mark.parametrize(
    ("held", "step"),
    [
        (0, 8 * MEBIBYTE),
        (8 * MEBIBYTE, 8 * MEBIBYTE),
        (20 * MEBIBYTE, 20 * MEBIBYTE),
        (64 * MEBIBYTE, 64 * MEBIBYTE),
        (1 << 40, 64 * MEBIBYTE),
    ],
)
def test_steps_grow_with_the_log(held: int, step: int) -> None:
    assert allocation_step(held) == step


class LazyFuture(Future[T]):
    """Work of a pool that has not begun."""

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__()
        self._work = work

    def work(self) -> None:
        if not self.done():
            try:
                self.set_result(self._work())
            except Exception as error:
                self.set_exception(error)

    def result(self, timeout: float | None = None) -> T:
        self.work()
        return super().result(timeout)


class CountingDisk(WatchedDisk):
    """Knows the blocks that were allocated; the pool works when the test says so."""

    threads = True

    def __init__(self, space: int) -> None:
        super().__init__()
        self.space_left = space
        self.blocks: dict[str, set[int]] = {}
        self.waiting: list[LazyFuture[Any]] = []

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future = LazyFuture(work)
        self.waiting.append(future)
        return future

    def work(self) -> None:
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            future.work()

    def allocate(self, fd: int, at: int, length: int, path: Path) -> None:
        mine = self.blocks.setdefault(path.name, set())
        new = set(range(at // BLOCK_BYTES, -(-(at + length) // BLOCK_BYTES))) - mine
        if len(new) * BLOCK_BYTES > self.space_left:
            raise DiskFull(f"no space for {length} bytes of {path}")
        self.space_left -= len(new) * BLOCK_BYTES
        mine |= new
        super().allocate(fd, at, length, path)

    def holes_below(self, name: str, end: int) -> set[int]:
        return set(range(-(-end // BLOCK_BYTES))) - self.blocks[name]


SEGMENT_BYTES = 80 * BLOCK_BYTES
sizes = st.one_of(st.integers(93, 300), st.integers(93, SEGMENT_BYTES - BLANK_BYTES))
steps = st.one_of(
    st.tuples(st.just("append"), sizes),
    st.tuples(st.just("batch"), st.lists(st.integers(93, 20_000), min_size=1, max_size=16)),
    st.tuples(st.just("ahead"), st.none()),
    st.tuples(st.just("pool"), st.none()),
    st.tuples(st.just("space"), st.sampled_from([0, BLOCK_BYTES, 6 * BLOCK_BYTES, 1 << 30])),
)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "FIRST_BYTES", 8 * BLOCK_BYTES)
    monkeypatch.setattr(commitlog, "FIRST_BYTES", 8 * BLOCK_BYTES)
    monkeypatch.setattr(commitlog, "STEP_BYTES_MAX", 16 * BLOCK_BYTES)
    monkeypatch.setattr(segment, "ALLOCATE_BYTES", BLOCK_BYTES)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.parametrize("by_mapping", [True, False])
def test_a_record_is_appended_only_where_blocks_are_allocated(
    tmp_path_factory: pytest.TempPathFactory, by_mapping: bool
) -> None:
    @settings(max_examples=rounds(ci=60, proof=2000), deadline=None)
    @given(st.lists(steps, max_size=30))
    def check(todo: list[tuple[str, Any]]) -> None:
        disk = CountingDisk(1 << 30)
        segments = SegmentList(disk, tmp_path_factory.mktemp("log"), SEGMENT_BYTES)
        log = CommitLog(disk, segments, by_mapping=by_mapping)
        log.start(0, lambda old, new: None)
        for what, value in todo:
            if what == "ahead":
                log._prepare_ahead(1)
            elif what == "pool":
                disk.work()
            elif what == "space":
                disk.space_left = value
            else:
                _write(log, value if what == "batch" else [value])
            for item in segments.items:
                last = item is segments.items[-1]
                # A blank record always fits behind the last record.
                end = log.end - item.start + BLANK_BYTES if last and log.end else 0
                assert item.allocated - item.start >= end
                assert not disk.holes_below(item.path.name, item.allocated - item.start)
        log.close()
        disk.waiting.clear()  # its references keep the files of segments open

    check()
    gc.collect()  # closes the files of segments that refusals still refer to


def _write(log: CommitLog, wanted: list[int]) -> None:
    """Append records as one batch; if there is no space, nothing has changed but the segment."""
    if sum(wanted) + BLANK_BYTES > SEGMENT_BYTES:
        return
    before, rolls = log.end, log.rolls
    if log.make_room(sum(wanted)) == NO_ROOM:
        assert isinstance(log.refusal, DiskFull)
        assert log.end == before or log.rolls == rolls + 1
        return
    end = log.end
    for size in wanted:
        assert log.append(sized(size), 0, NOW_MS) >= 0
    assert log.end == end + sum(wanted)


def test_pages_are_faulted_in_only_where_blocks_are_allocated(tmp_path: Path) -> None:
    """A store into a hole would take blocks, and raise SIGBUS on a full disk."""
    made = SegmentList(Disk(), tmp_path, 64 * MEBIBYTE).create(0)
    before = os.fstat(made.fd).st_blocks
    made.prefault(4 * MEBIBYTE, 60 * MEBIBYTE)
    made.disk.sync(made.fd)
    assert made.allocated == segment.FIRST_BYTES
    assert os.fstat(made.fd).st_blocks == before


def read_all(path: Path) -> None:
    """Read a file as another program does: the page cache gets large folios."""
    with path.open("rb", buffering=0) as file:
        while file.read(64 * 1024):
            pass


def blocks_after_a_store(path: Path, mapping: Any, at: int) -> tuple[int, int]:
    """The blocks of a file before and after a store into its mapping."""
    before = path.stat().st_blocks
    read_all(path)
    mapping[at] = 1
    Disk().sync_file(path)
    return before, path.stat().st_blocks


def test_a_store_at_the_end_of_the_allocated_log_takes_no_more_blocks(tmp_path: Path) -> None:
    """If it took more, it would raise SIGBUS on a full disk."""
    made = SegmentList(Disk(), tmp_path, 64 * MEBIBYTE).create(0)
    before, after = blocks_after_a_store(made.path, made.map, made.allocated - 1)
    assert after == before


def test_a_store_at_the_end_of_the_allocated_index_takes_no_more_blocks(tmp_path: Path) -> None:
    file = IndexFile(Disk(), tmp_path / "i", 1000, 600_000, new=True)
    file.ready()
    end = index_file_bytes(1000, file.allocated)
    before, after = blocks_after_a_store(file.path, file.map, end - 1)
    assert after == before


def test_a_store_on_a_full_disk_opens_for_reading_and_writes_when_there_is_space(
    stores: StoreFixture, caplog: pytest.LogCaptureFixture
) -> None:
    store = stores.open()
    put(store, record(b"one"))
    stores.close(store)
    disk = WatchedDisk()
    disk.no_space = lambda path: path.parent.name == "commitlog"
    store = stores.open(disk)
    assert "writing is refused until there is space" in caplog.text
    assert bodies(store) == [b"one"]
    assert store.put(record(b"two"), NOW_MS) == REFUSED
    assert isinstance(store.refusal, DiskFull)
    disk.no_space = lambda path: False
    store.tick(NOW_MS + 1000)
    put(store, record(b"two"))
    assert bodies(store) == [b"one", b"two"]
