"""Which stores can be opened: unsupported data, other sizes, locks."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import StoreLocked, StoreRefused
from penstock.store.directory import (
    StoreLock,
    StorePaths,
    check_sizes,
    may_lack_acknowledged,
    opened_here,
    refuse_foreign,
    write_sizes,
)
from penstock.store.disk import Disk
from penstock.store.store import MessageStore
from tests.unit.store.conftest import (
    NOW_MS,
    SEGMENT_BYTES,
    StoreFixture,
    WatchedDisk,
    bodies,
    put,
    record,
    small_config,
)


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("batchconsumequeue/t/0/00000000000000000000", "BatchCQ"),
        ("consumequeue_ext/t/0/00000000000000000000", "enableConsumeQueueExt"),
        ("compaction/compactionLog/t/0/00000000000000000000", "COMPACTION"),
        ("kvStore/CURRENT", "RocksDB"),
        ("consumequeue/CURRENT", "RocksDB"),
        ("consumequeue_rocksdb/CURRENT", "RocksDB"),
        ("config/topics/CURRENT", "RocksDB"),
        ("config/rdb/CURRENT", "RocksDB"),
        ("dledger-n0/data/00000000000000000000", "DLedger"),
    ],
)
def test_unsupported_store_files_are_refused_by_name(
    stores: StoreFixture, path: str, what: str
) -> None:
    target = stores.root / path
    target.parent.mkdir(parents=True)
    target.write_bytes(b"x")
    with pytest.raises(StoreRefused, match=what) as caught:
        stores.open()
    assert str(stores.root) in str(caught.value)
    assert "RocketMQ" in caught.value.remark()
    assert not (stores.root / "abort").exists()
    shutil.rmtree(stores.root / Path(path).parts[0])
    stores.open()


@pytest.mark.parametrize(
    "folder", ["batchconsumequeue", "kvStore", "compaction/compactionLog", "transaction"]
)
def test_empty_directories_of_apache_are_accepted(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(parents=True)
    refuse_foreign(Disk(), StorePaths(tmp_path))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("segment_bytes", 8192),
        ("queue_file_entries", 9),
        ("index_slots", 17),
        ("index_entries", 41),
    ],
)
def test_other_sizes_are_refused_by_name(stores: StoreFixture, name: str, other: int) -> None:
    before = getattr(small_config(), name)
    stores.close(stores.open())
    with pytest.raises(StoreRefused, match=f"{name} = {before}.*setting is {other}") as caught:
        stores.open(None, **{name: other})  # type: ignore[arg-type]
    assert f"set {name} to {before}" in caught.value.remark()
    stores.open()


def test_sizes_are_stored_when_a_store_is_opened(tmp_path: Path) -> None:
    paths, disk, config = StorePaths(tmp_path), Disk(), small_config()
    assert check_sizes(disk, paths, config)
    paths.log.mkdir()
    (paths.log / f"{0:020d}").touch()
    assert not check_sizes(disk, paths, config)
    write_sizes(disk, paths, config)
    assert check_sizes(disk, paths, config)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"segment_bytes": "x"}'])
def test_a_torn_size_file_is_ignored(tmp_path: Path, content: bytes) -> None:
    paths = StorePaths(tmp_path)
    paths.sizes.write_bytes(content)
    assert check_sizes(Disk(), paths, small_config())


def test_without_settings_a_store_keeps_its_sizes(stores: StoreFixture) -> None:
    store = stores.open()
    put(store, record())
    stores.close(store)
    store = MessageStore(stores.root, disk=WatchedDisk(), now_ms=NOW_MS)
    assert store.config.segment_bytes == SEGMENT_BYTES
    assert len(bodies(store)) == 1
    store.close()


def test_segments_of_another_size_are_refused_without_a_size_file(stores: StoreFixture) -> None:
    stores.close(stores.open())
    (stores.root / "penstock.json").unlink()
    with pytest.raises(StoreRefused, match=r"4096 bytes.*segment_bytes is 8192"):
        stores.open(segment_bytes=8192)


@pytest.mark.parametrize("entries", [4, 16])
def test_queue_files_of_another_size_are_refused_without_a_size_file(
    stores: StoreFixture, entries: int
) -> None:
    store = stores.open()
    put(store, *[record() for _ in range(20)])
    stores.close(store)
    (stores.root / "penstock.json").unlink()
    (stores.root / "penstock.snapshot").unlink()
    with pytest.raises(StoreRefused, match="queue_file_entries"):
        stores.open(queue_file_entries=entries)


def test_a_store_is_opened_once_in_a_process(stores: StoreFixture) -> None:
    store = stores.open()
    with pytest.raises(StoreLocked, match="already open"):
        stores.open()
    with pytest.raises(StoreLocked):
        stores.open(root=stores.root / ".." / stores.root.name)
    put(store, record())
    stores.close(store)
    stores.open()


def test_the_lock_file_is_that_of_apache(tmp_path: Path) -> None:
    lock = StoreLock(StorePaths(tmp_path))
    assert (tmp_path / "lock").read_bytes() == b"lock"
    lock.release()
    StoreLock(StorePaths(tmp_path)).release()


def test_a_store_is_opened_by_one_process(stores: StoreFixture) -> None:
    store = stores.open()
    (stores.root / "lock").read_bytes()  # opening and closing the file does not release the lock
    program = (
        "import sys; from pathlib import Path\n"
        "from penstock.errors import StoreLocked\n"
        "from penstock.store.directory import StorePaths, StoreLock\n"
        "try: StoreLock(StorePaths(Path(sys.argv[1])))\n"
        "except StoreLocked as error: sys.exit(str(error))\n"
    )
    command = [sys.executable, "-c", program, str(stores.root)]
    other = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    assert other.returncode == 1
    assert "is already open" in other.stderr
    stores.close(store)
    assert subprocess.run(command, check=False, env={**os.environ}).returncode == 0


def test_a_failed_open_leaves_the_store_unlocked(stores: StoreFixture) -> None:
    stores.close(stores.open())
    for _ in range(2):
        with pytest.raises(StoreRefused):
            stores.open(segment_bytes=8192)
    stores.open()


@pytest.mark.parametrize(
    ("abort", "lacks"),
    [
        (None, False),
        ("{pid} {system}", False),
        ("{pid} {system}\nsync flush", False),
        ("1 another-boot", True),
        ("1 another-boot\nsync flush", False),
        ("", True),  # RocketMQ's: nobody knows
    ],
)
def test_a_power_failure_may_have_taken_what_was_acknowledged(
    stores: StoreFixture, abort: str | None, lacks: bool
) -> None:
    store = stores.open()
    stores.close(store)
    if abort is not None:
        system = store.disk.system_id(store.paths.root)
        store.paths.abort.write_text(abort.format(pid=1, system=system))
    assert may_lack_acknowledged(store.disk, store.paths) == lacks


@pytest.mark.parametrize("sync_flush", [False, True])
def test_an_open_store_says_how_it_flushes(stores: StoreFixture, sync_flush: bool) -> None:
    store = stores.open(sync_flush=sync_flush)
    data = store.paths.abort.read_bytes()
    assert data.endswith(b"\nsync flush") == sync_flush
    assert opened_here(store.disk, store.paths)
