"""Unmapped queues: what they release, what they still answer, which is unmapped first."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import StoreConfig
from penstock.errors import DiskFull
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.consumequeue.mapped_queues import CHECKED_MAX, MappedQueues, mapped_max
from penstock.store.disk import Disk
from penstock.store.get import FOUND
from penstock.store.store import MessageStore
from tests.unit.store.conftest import (
    NOW_MS,
    StoreFixture,
    WatchedDisk,
    batch,
    bodies,
    flush,
    put,
    record,
    sized,
)

FILE_ENTRIES = 8
SIZE = 100
IDLE_MS = 60_000

Make = Callable[..., ConsumeQueue]


@pytest.fixture
def disk() -> WatchedDisk:
    return WatchedDisk()


@pytest.fixture
def make(disk: WatchedDisk, tmp_path: Path) -> Make:
    mapped_queues = MappedQueues(3)

    def made(queue_id: int = 0, mapped_queues: MappedQueues = mapped_queues) -> ConsumeQueue:
        return ConsumeQueue(
            disk, tmp_path / str(queue_id), b"t", queue_id, FILE_ENTRIES, mapped_queues
        )

    return made


def fill(queue: ConsumeQueue, count: int = 1) -> None:
    for _ in range(count):
        queue.append(queue.max_offset * SIZE, SIZE, queue.max_offset)


def mapped(folder: Path) -> int:
    """The number of files below a directory that this process has mapped."""
    gc.collect()
    return sum(f" {folder}/" in line for line in Path("/proc/self/maps").read_text().splitlines())


def handles(folder: Path) -> int:
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").startswith(f"{folder}/")
        except FileNotFoundError:  # the one that lists them
            continue
    return found


# --- one queue


def test_a_queue_has_no_handle_and_an_unmapped_one_no_mapping(make: Make, tmp_path: Path) -> None:
    queue = make()
    fill(queue, 3)
    assert (mapped(tmp_path), handles(tmp_path)) == (1, 0)
    queue.unmap(3 * SIZE)
    assert (mapped(tmp_path), handles(tmp_path)) == (0, 0)
    assert (queue.min_offset, queue.max_offset, queue.visible_max(3 * SIZE)) == (0, 3, 3)
    assert not queue.is_hot(2)
    assert queue.entry(2) == (2 * SIZE, SIZE, 2)


def test_the_mapping_stays_until_the_caller_releases_it(make: Make, tmp_path: Path) -> None:
    """So that the thread pool unmaps it and the event loop does not wait."""
    queue = make()
    fill(queue)
    mapping = queue.unmap(SIZE)
    assert mapped(tmp_path) == 1
    del mapping
    assert mapped(tmp_path) == 0


@given(rests=st.lists(st.integers(0, 30), max_size=12))
def test_unmapping_between_appends_changes_nothing(
    rests: list[int], tmp_path_factory: object
) -> None:
    folder = tmp_path_factory.mktemp("q")  # type: ignore[attr-defined]
    queue = ConsumeQueue(WatchedDisk(), folder / "t" / "0", b"t", 0, FILE_ENTRIES, MappedQueues(1))
    for n in range(30):
        for _ in range(rests.count(n)):
            queue.unmap(n * SIZE)
        assert queue.append(n * SIZE, SIZE, n) == n
        assert queue.visible_max(n * SIZE) == n
        assert queue.visible_max((n + 1) * SIZE) == n + 1
    assert [queue.entry(n) for n in range(30)] == [(n * SIZE, SIZE, n) for n in range(30)]


def test_offsets_of_an_unmapped_queue_need_no_file(make: Make, disk: WatchedDisk) -> None:
    queue = make()
    fill(queue, 5)
    queue.unmap(5 * SIZE)
    disk.opened.clear()
    assert queue.visible_max(5 * SIZE) == 5
    assert not queue.is_hot(0)
    assert disk.opened == []


@pytest.mark.parametrize("written", [1, 7, 8, 9, 20])
def test_unconfirmed_entries_stay_invisible_while_the_queue_is_unmapped(
    make: Make, written: int
) -> None:
    queue = make()
    fill(queue, written)
    queue.unmap(0)
    for confirm_offset in range(0, (written + 1) * SIZE, 50):
        assert queue.visible_max(confirm_offset) == min(confirm_offset // SIZE, written)
    fill(queue)
    for confirm_offset in range(0, (written + 2) * SIZE, 50):
        assert queue.visible_max(confirm_offset) == min(confirm_offset // SIZE, written + 1)


def test_mapping_again_opens_one_file_and_allocates_nothing(make: Make, disk: WatchedDisk) -> None:
    queue = make()
    fill(queue, 3)
    queue.unmap(3 * SIZE)
    disk.opened.clear()
    disk.no_space = lambda path: True
    fill(queue)
    assert len(disk.opened) == 1
    assert queue.entry(3) == (3 * SIZE, SIZE, 3)


def test_mapping_on_a_full_disk_is_refused_and_changes_nothing(
    make: Make, disk: WatchedDisk, tmp_path: Path
) -> None:
    queue = make()
    fill(queue, FILE_ENTRIES)
    queue.unmap(FILE_ENTRIES * SIZE)
    disk.no_space = lambda path: True
    with pytest.raises(DiskFull):
        fill(queue)
    assert queue.max_offset == FILE_ENTRIES
    assert mapped(tmp_path) == 0
    disk.no_space = lambda path: False
    fill(queue)
    assert queue.max_offset == FILE_ENTRIES + 1


def test_entries_written_before_an_unmap_are_synced(make: Make, disk: WatchedDisk) -> None:
    queue = make()
    fill(queue, FILE_ENTRIES + 2)
    queue.unmap(0)
    queue.sync()
    assert {p.name for p in disk.synced} == {f"{n * FILE_ENTRIES * 20:020d}" for n in (0, 1)}


def test_a_file_unmapped_during_a_sync_is_still_synced(
    make: Make, disk: WatchedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread pool syncs the older file while the event loop unmaps the newer one."""
    queue = make()
    fill(queue, FILE_ENTRIES + 2)
    sync = disk.sync_file

    def resting(path: Path) -> None:
        queue.unmap(0)
        sync(path)

    monkeypatch.setattr(disk, "sync_file", resting)
    queue.sync()
    assert {p.name for p in disk.synced} == {f"{n * FILE_ENTRIES * 20:020d}" for n in (0, 1)}


def test_an_unmapped_queue_is_not_preallocated(make: Make, disk: WatchedDisk) -> None:
    queue = make()
    while not queue.needs_blocks:
        fill(queue)
    queue.unmap(0)
    disk.opened.clear()
    queue.preallocate()
    assert disk.opened == []
    fill(queue, 2 * FILE_ENTRIES)
    assert queue.entry(queue.max_offset - 1) is not None


def test_a_queue_unmapped_during_preallocation_stays_unmapped(
    make: Make, disk: WatchedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The preallocated blocks must not count as space in a mapping that was released."""
    queue = ConsumeQueue(disk, make().folder, b"t", 0, 10_000)
    while not queue.needs_blocks:
        fill(queue)
    allocate = disk.allocate

    def resting(fd: int, at: int, length: int, path: Path) -> None:
        allocate(fd, at, length, path)
        queue.unmap(0)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "allocate", resting)
        queue.preallocate()
    before = queue.max_offset
    fill(queue, 5000)
    found = [queue.entry(n) for n in range(before + 5000)]
    assert found == [(n * SIZE, SIZE, n) for n in range(before + 5000)]


def test_a_preallocated_file_is_used(make: Make, disk: WatchedDisk) -> None:
    queue = make()
    queue.prepare()
    assert queue.max_offset == 0
    disk.no_space = lambda path: False
    fill(queue)
    queue.prepare()
    assert queue.entry(0) == (0, SIZE, 0)


def test_the_queue_of_a_deleted_topic_is_not_preallocated(make: Make, tmp_path: Path) -> None:
    queue = make()
    queue.retire(str(tmp_path / "gone"))
    queue.prepare()
    assert not (tmp_path / "gone").exists()


# --- many queues


@pytest.mark.slow
def test_the_number_of_mapped_queues_is_limited(make: Make, tmp_path: Path) -> None:
    queues = [make(n) for n in range(10)]
    for queue in queues:
        fill(queue)
        assert mapped(tmp_path) <= 3
    assert mapped(tmp_path) == 3
    for n, queue in enumerate(queues):
        assert queue.entry(0) == (0, SIZE, 0), n


def test_the_least_recently_used_queue_is_unmapped_first(make: Make) -> None:
    mapped_queues = MappedQueues(3)
    queues = [make(n, mapped_queues) for n in range(4)]
    for queue in queues[:3]:
        fill(queue)
    mapped_queues.unmap_idle(IDLE_MS, IDLE_MS, 0)  # all have been checked
    assert queues[0].is_hot(0)
    fill(queues[3])
    assert [q.is_hot(0) for q in queues] == [True, False, True, True]


@given(
    most=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 2)), max_size=60),
)
def test_appends_and_unmaps_in_any_order(
    most: int, steps: list[tuple[int, int]], tmp_path_factory: object
) -> None:
    folder = tmp_path_factory.mktemp("q")  # type: ignore[attr-defined]
    mapped_queues = MappedQueues(most)
    disk = WatchedDisk()
    queues = [
        ConsumeQueue(disk, folder / str(n), b"t", n, FILE_ENTRIES, mapped_queues) for n in range(8)
    ]
    written = [0] * 8
    end = 0
    for number, kind in steps:
        if kind == 0:
            mapped_queues.unmap_idle(number * 10_000, IDLE_MS, end)
        else:
            assert queues[number].append(end, SIZE, end) == written[number]
            written[number] += 1
            end += SIZE
        assert len(mapped_queues) <= most
    for queue, count in zip(queues, written, strict=True):
        assert queue.visible_max(end) == queue.max_offset == count
        assert None not in [queue.entry(n) for n in range(count)]


def test_a_queue_is_unmapped_after_one_to_two_idle_times(make: Make) -> None:
    mapped_queues = MappedQueues(100)
    queues = [make(n, mapped_queues) for n in range(7)]
    for queue in queues:
        fill(queue)
    for _ in range(59):
        assert mapped_queues.unmap_idle(1000, IDLE_MS, SIZE) == []
    assert (
        mapped_queues.unmap_idle(1000, IDLE_MS, SIZE) == []
    )  # from now on their idle time is measured
    assert queues[4].is_hot(0)
    unmapped = [len(mapped_queues.unmap_idle(1000, IDLE_MS, SIZE)) for _ in range(60)]
    assert unmapped == [0] * 59 + [6]
    unmapped = [len(mapped_queues.unmap_idle(1000, IDLE_MS, SIZE)) for _ in range(60)]
    assert unmapped == [0] * 59 + [1]
    assert len(mapped_queues) == 0


def test_many_idle_queues_are_unmapped_in_steps(make: Make) -> None:
    mapped_queues = MappedQueues(1000)
    queues = [make(n, mapped_queues) for n in range(CHECKED_MAX + 10)]
    for queue in queues:
        fill(queue)
        queue.used = False
    unmapped = [len(mapped_queues.unmap_idle(ms, IDLE_MS, SIZE)) for ms in (IDLE_MS, 1000, 1000)]
    assert unmapped == [CHECKED_MAX, 10, 0]


def test_a_queue_that_is_not_synced_stays_mapped(make: Make) -> None:
    mapped_queues = MappedQueues(100)
    queue = make(0, mapped_queues)
    fill(queue)
    queue.dirty = True
    assert [mapped_queues.unmap_idle(IDLE_MS, IDLE_MS, SIZE) for _ in range(5)] == [[]] * 5
    queue.dirty = False
    assert len(mapped_queues.unmap_idle(IDLE_MS, IDLE_MS, SIZE)) == 1


# --- a store


def idle(store: MessageStore) -> None:
    """Let enough time pass to unmap all queues."""
    for n in range(1, 5):
        store.tick(NOW_MS + n * 60_000)


def test_an_idle_store_maps_no_queue(stores: StoreFixture) -> None:
    store = stores.open(queues_mapped_max=100)
    for queue_id in range(20):
        put(store, record(b"%d" % queue_id, queue_id=queue_id))
    assert mapped(store.paths.queues) == 20
    flush(store)
    idle(store)
    assert (mapped(store.paths.queues), handles(store.paths.queues)) == (0, 0)
    for queue_id in range(20):
        assert bodies(store, "t", queue_id) == [b"%d" % queue_id]
    put(store, record(b"more", queue_id=7))
    flush(store)
    assert bodies(store, "t", 7) == [b"7", b"more"]
    assert mapped(store.paths.queues) == 1


def test_a_queue_that_is_read_stays_mapped(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, record(b"a"))
    flush(store)
    for n in range(1, 10):
        store.tick(NOW_MS + n * 60_000)
        assert store.get("t", 0, 0).status == FOUND
    assert mapped(store.paths.queues) == 1


def test_waiting_for_messages_of_unmapped_queues_opens_nothing(stores: StoreFixture) -> None:
    disk = WatchedDisk()
    store = stores.open(disk)
    woken: list[int] = []
    store.on_arrival(lambda queue: woken.append(queue.queue_id))
    for queue_id in range(20):
        put(store, record(b"x", queue_id=queue_id))
    flush(store)
    idle(store)
    disk.opened.clear()
    for queue_id in range(20):
        queue = store.queue("t", queue_id)
        assert queue is not None
        store.watch(queue)
        assert store.max_offset("t", queue_id) == 1
    assert disk.opened == []
    put(store, record(b"y", queue_id=11))
    flush(store)
    assert woken == [11]


def test_a_batch_maps_an_unmapped_queue(stores: StoreFixture) -> None:
    store = stores.open(queues_mapped_max=1)
    put(store, record(b"a"), record(b"b", queue_id=1))
    flush(store)
    assert store.put_batch(batch([b"c", b"d"] * 6), NOW_MS) == 0
    flush(store)
    assert bodies(store) == [b"a"] + [b"c", b"d"] * 6


def test_the_limit_of_mapped_queues_is_a_live_setting(stores: StoreFixture) -> None:
    store = stores.open(queues_mapped_max=100)
    for queue_id in range(10):
        put(store, record(b"x", queue_id=queue_id))
    store.reconfigure(StoreConfig(queues_mapped_max=2))
    put(store, record(b"x", queue_id=10))
    assert mapped(store.paths.queues) == 2


@pytest.mark.parametrize("crash", [False, True])
def test_a_start_maps_no_queue(stores: StoreFixture, crash: bool) -> None:
    store = stores.open(queues_mapped_max=4)
    for n in range(60):
        put(store, sized(150, queue_id=n % 12))
    flush(store)
    (stores.crash if crash else stores.close)(store)
    disk = WatchedDisk()
    again = stores.open(disk, queues_mapped_max=4)
    assert again.report.clean is not crash
    assert len(again.maintenance.mapped_queues) == 0
    if not crash:
        assert not [p for p in disk.opened if again.paths.queues in p.parents]
    for queue_id in range(12):
        assert again.max_offset("t", queue_id) == 5
        assert len(bodies(again, "t", queue_id)) == 5


def test_a_topic_is_deleted_while_its_queues_are_unmapped(stores: StoreFixture) -> None:
    store = stores.open(queues_mapped_max=1)
    put(store, record(b"a"), record(b"b", queue_id=1), record(b"c", topic="u"))
    flush(store)
    list(store.remove_queues(b"t"))
    store.finish_removal()
    assert os.listdir(store.paths.queues) == ["u"]
    put(store, record(b"new"))
    flush(store)
    idle(store)
    assert bodies(store) == [b"new"]


def test_a_deleted_topic_with_preallocated_queues_leaves_no_files(stores: StoreFixture) -> None:
    store = stores.open(Disk())
    store.prepare("t", 3)
    store.disk.close()  # waits for submitted work
    assert len(list(store.paths.queues.rglob("0000*"))) == 3
    assert store.max_offset("t", 2) == 0
    list(store.remove_queues(b"t"))
    store.finish_removal()
    assert os.listdir(store.paths.queues) == []


def test_preallocated_queues_are_empty_after_a_crash(stores: StoreFixture) -> None:
    store = stores.open(Disk())
    store.prepare("t", 3)
    store.disk.close()
    put(store, record(b"a", queue_id=1))
    stores.crash(store)
    again = stores.open()
    assert [again.max_offset("t", n) for n in range(3)] == [0, 1, 0]
    put(again, record(b"b", queue_id=2))
    flush(again)
    assert bodies(again, "t", 2) == [b"b"]


def test_no_more_files_are_mapped_than_the_system_allows() -> None:
    disk = Disk()
    assert disk.mappings_max() > 1000
    assert mapped_max(disk, StoreConfig(queues_mapped_max=1 << 30)) == disk.mappings_max() // 2
    assert mapped_max(disk, StoreConfig(queues_mapped_max=100)) == 100
