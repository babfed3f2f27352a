"""Files that were deleted or truncated while the store was closed: the start notices it."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

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
)

COUNT = 40


def body(n: int) -> bytes:
    return f"body {n:4d}".encode() * 20


def fill(store: MessageStore, count: int = COUNT, first: int = 0) -> None:
    """Messages in two queues of one topic and one of another, each with its own key."""
    for n in range(first, first + count):
        made = record(body(n), queue_id=n % 2, text=properties(keys=f"k{n}", tags="a"))
        put(store, made, record(b"other", topic="u"), now_ms=NOW_MS + n)
    flush(store)


def assert_all(store: MessageStore, count: int = COUNT) -> None:
    assert bodies(store, queue_id=0) == [body(n) for n in range(0, count, 2)]
    assert bodies(store, queue_id=1) == [body(n) for n in range(1, count, 2)]
    assert store.max_offset("u", 0) == count
    ask = {"begin_ms": 0, "end_ms": EVER_MS, "most": 9, "confirm_offset": store.confirm_offset}
    for n in range(count):
        assert len(store.lookup.by_key("t", f"k{n}", **ask)) == 1, f"k{n}"


def last(folder: Path) -> Path:
    return sorted(folder.iterdir())[-1]


def overwrite(path: Path, byte: bytes, at: int = 0, length: int | None = None) -> None:
    """Fill a file, or a part of it, with a byte, some time after it was written."""
    with open(path, "r+b") as target:
        target.seek(at)
        target.write(byte * (path.stat().st_size - at if length is None else length))
    stat = path.stat()  # file times are only as fine as the ticks of the Linux kernel
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1_000_000_000))


def swap(one: Path, other: Path) -> None:
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def empty(path: Path) -> None:
    """Zero a file; its length stays."""
    size = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, size)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a topic's queues deleted": (lambda r: shutil.rmtree(r / "consumequeue/t"), "consumequeue/t/0"),
    "all queues deleted": (lambda r: shutil.rmtree(r / "consumequeue"), "consumequeue/t/0"),
    "a queue deleted": (lambda r: shutil.rmtree(r / "consumequeue/t/1"), "consumequeue/t/1"),
    "the last queue file deleted": (
        lambda r: last(r / "consumequeue/t/1").unlink(), "consumequeue/t/1",
    ),
    "the first queue file deleted": (
        lambda r: (r / "consumequeue/t/1" / f"{0:020d}").unlink(), "consumequeue/t/1",
    ),
    "a queue file truncated": (
        lambda r: os.truncate(last(r / "consumequeue/t/0"), 30), "consumequeue/t/0",
    ),
    "a queue file zeroed": (lambda r: empty(last(r / "consumequeue/t/0")), "consumequeue/t/0"),
    "an older queue file zeroed": (
        lambda r: empty(r / "consumequeue/t/0" / f"{0:020d}"), "consumequeue/t/0",
    ),
    "a queue file of negative numbers": (
        lambda r: overwrite(last(r / "consumequeue/t/0"), b"\xff"), "consumequeue/t/0",
    ),
    "a queue file of positive garbage": (
        lambda r: overwrite(last(r / "consumequeue/t/0"), b"\x11"), "consumequeue/t/0",
    ),
    "an older queue file of garbage": (
        lambda r: overwrite(r / "consumequeue/t/0" / f"{0:020d}", b"\xff"), "consumequeue/t/0",
    ),
    "the first entries of a queue file overwritten": (
        lambda r: overwrite(last(r / "consumequeue/t/0"), b"\xff", 0, 20), "consumequeue/t/0",
    ),
    "another queue's file": (
        lambda r: swap(last(r / "consumequeue/t/1"), r / "consumequeue/u/0" / f"{320:020d}"),
        "consumequeue/t/1",
    ),
    "an index file deleted": (lambda r: last(r / "index").unlink(), "index/2"),
    "an index file truncated": (lambda r: os.truncate(last(r / "index"), 100), "index/2"),
    "an index file zeroed": (lambda r: empty(sorted((r / "index").iterdir())[0]), "index/2"),
    "the index deleted": (lambda r: shutil.rmtree(r / "index"), "index/2"),
}  # fmt: skip


@pytest.mark.parametrize(("do", "name"), DAMAGE.values(), ids=DAMAGE)
def test_missing_files_are_rebuilt_after_a_clean_stop(
    stores: StoreFixture,
    do: Callable[[Path], object],
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = stores.open()
    fill(store)
    stores.close(store)
    do(stores.root)
    store = stores.open()
    assert_all(store)
    assert any(found.startswith(name) for found in store.report.rebuilt)
    assert f"({store.report.rebuilt[0]}" in caplog.text
    assert "rebuilt from the log" in caplog.text
    put(store, record(queue_id=0), record(queue_id=1))
    assert store.writer.queue_offset == COUNT // 2
    stores.close(store)
    store = stores.open()
    assert store.report.clean
    assert store.report.rebuilt == []
    assert store.max_offset("t", 1) == COUNT // 2 + 1


def test_a_block_inside_a_changed_queue_file_is_checked(stores: StoreFixture) -> None:
    count, block = 700, 204 * 20
    store = stores.open(queue_file_entries=1000)
    put(store, *[record(f"{n}".encode()) for n in range(count)])
    flush(store)
    stores.close(store)
    for byte in (b"\0", b"\xff", b"\x11"):
        overwrite(last(store.paths.queues / "t" / "0"), byte, block, block)
        store = stores.open(queue_file_entries=1000)
        assert store.report.rebuilt == ["consumequeue/t/0"]
        assert bodies(store) == [f"{n}".encode() for n in range(count)]
        stores.close(store)


@pytest.mark.parametrize("byte", [b"\0", b"\xff", b"\x11"])
@pytest.mark.parametrize("stop", ["crash", "close"])
def test_damaged_entries_that_the_checkpoint_covers_are_noticed_without_a_snapshot(
    stores: StoreFixture, byte: bytes, stop: str
) -> None:
    """The log is replayed only from its last segments on, and they have no record of this queue."""
    count = 20
    store = stores.open(queue_file_entries=100)
    put(store, *[record(f"{n}".encode()) for n in range(count)])
    for n in range(60):
        put(store, record(b"x" * 200, topic="u"), now_ms=NOW_MS + 10_000 * n)
    flush(store)
    store.tick(NOW_MS + 900_000)
    store.maintenance.finish()
    getattr(stores, stop)(store)
    store.paths.snapshot.unlink(missing_ok=True)
    overwrite(last(store.paths.queues / "t" / "0"), byte, 5 * 20, 5 * 20)
    store = stores.open(queue_file_entries=100)
    assert bodies(store) == [f"{n}".encode() for n in range(count)]
    put(store, record())
    assert store.writer.queue_offset == count


@pytest.mark.parametrize("stop", ["crash", "close"])
def test_a_directory_in_place_of_a_queue_file_is_named(stores: StoreFixture, stop: str) -> None:
    store = stores.open()
    fill(store)
    getattr(stores, stop)(store)
    path = last(store.paths.queues / "t" / "0")
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        stores.open()
    assert caught.value.filename == str(path)
    path.rmdir()
    assert_all(stores.open())


def test_a_start_without_changes_reads_no_queue_file(stores: StoreFixture) -> None:
    store = stores.open()
    fill(store)
    stores.close(store)
    disk = WatchedDisk()
    store = stores.open(disk)
    assert not [p for p in disk.opened if store.paths.queues in p.parents]
    assert (store.report.rebuilt, store.report.records) == ([], 0)


def test_a_truncated_queue_is_rebuilt_from_its_last_entry_on(stores: StoreFixture) -> None:
    store = stores.open()
    fill(store)
    end = store.log.end
    stores.close(store)
    os.truncate(last(store.paths.queues / "t" / "1"), 20)
    store = stores.open()
    assert end // 2 < store.report.replayed_from < end
    assert_all(store)


def test_rebuilding_a_queue_opens_no_file_of_the_others(stores: StoreFixture) -> None:
    store = stores.open()
    fill(store)
    stores.close(store)
    shutil.rmtree(store.paths.queues / "t" / "1")
    disk = WatchedDisk()
    store = stores.open(disk)
    folders = {path.parent for path in disk.opened if store.paths.queues in path.parents}
    assert folders == {store.paths.queues / "t" / "1"}
    assert store.report.rebuilt == ["consumequeue/t/1"]
    assert_all(store)
    fill(store, 4, first=COUNT)
    assert_all(store, COUNT + 4)


def test_a_crash_during_the_rebuild_is_safe(stores: StoreFixture) -> None:
    store = stores.open()
    fill(store)
    stores.close(store)
    shutil.rmtree(store.paths.queues / "t")
    for step in range(1, 40):

        class Dying(WatchedDisk):
            left = step

            def create(self, path: Path, size: int) -> int:
                self.left -= store.paths.queues in path.parents
                if self.left == 0:
                    raise KeyboardInterrupt
                return super().create(path, size)

        try:
            stores.open(Dying())
            break
        except KeyboardInterrupt:
            continue
    assert step > 2
    stores.end()
    assert_all(stores.open())


def test_a_topic_that_another_program_deleted_stays_deleted(stores: StoreFixture) -> None:
    store = stores.open()
    fill(store)
    stores.close(store)
    shutil.rmtree(store.paths.queues / "t")
    shutil.rmtree(store.paths.queues / "u")
    (store.paths.config / "topics.json").write_text('{"topicConfigTable": {"u": {}}}')
    store = stores.open()
    assert store.max_offset("t", 0) == 0
    assert store.max_offset("u", 0) == COUNT
    assert store.report.deleted_topics == ["t"]
    assert any("consumequeue/t is missing" in text for text in store.report.warnings())


@pytest.mark.parametrize("count", [8, 11])
def test_a_queue_without_messages_keeps_its_offset(stores: StoreFixture, count: int) -> None:
    """Its messages were deleted by retention; only the snapshot knows where it ended."""
    store = stores.open()
    put(store, *[record(b"old", topic="old") for _ in range(count)])
    fill(store)
    flush(store)
    while store.log.begin() < SEGMENT_BYTES:
        store.expire(1)
    stores.close(store)
    shutil.rmtree(store.paths.queues / "old")
    for end in (stores.crash, stores.close):
        store = stores.open()
        assert store.max_offset("old", 0) == count
        end(store)
    put(stores.open(), record(topic="old"))
