"""Paths of a store's files, the lock of an open store, and the stores that are refused."""

import fcntl
import os
import struct
from pathlib import Path

import msgspec

from penstock.config import StoreConfig
from penstock.errors import StoreLocked, StoreRefused
from penstock.store.disk import Disk
from penstock.store.tables.rocksdb_records import has_half_messages, has_timers


class Sizes(msgspec.Struct, frozen=True):
    """The file sizes of a store, kept in `penstock.json`.

    With them, a short file is known to be damaged, and not just of another size.
    """

    segment_bytes: int
    queue_file_entries: int
    index_slots: int
    index_entries: int


class StorePaths:
    """The paths below a store's root; names are RocketMQ's."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "commitlog"
        self.queues = root / "consumequeue"
        self.index = root / "index"
        self.config = root / "config"
        self.checkpoint = root / "checkpoint"
        self.abort = root / "abort"
        self.lock = root / "lock"
        self.sizes = root / "penstock.json"
        self.snapshot = root / "penstock.snapshot"
        self.removed = root / "penstock.removed"
        self.truncated = root / "penstock.truncated"
        self.truncation = root / "penstock.truncation"
        self.delivered = root / "penstock.delivered"


def refuse_foreign(disk: Disk, paths: StorePaths) -> None:
    """Raise StoreRefused if the store holds data that Penstock can't read."""
    kinds = (
        ("batchconsumequeue", "BatchCQ queues (topic attribute queue.type=BatchCQ)"),
        ("consumequeue_ext", "extended queue entries (enableConsumeQueueExt)"),
        ("compaction/compactionLog", "compacted topics (cleanup.policy=COMPACTION)"),
        ("kvStore", "POP records in RocksDB (popConsumerKVServiceEnable)"),
    )
    for name, what in kinds:
        names = disk.names(paths.root / name)
        if names:
            raise StoreRefused(f"{paths.root} holds {what} in {name}/, e.g. {names[0]}")
    databases = ("topics", "subscriptionGroups", "consumerOffsets", "rdb")
    queues = (paths.queues, paths.root / "consumequeue_rocksdb")
    for folder in (*queues, *(paths.config / name for name in databases)):
        if "CURRENT" in disk.names(folder):
            raise StoreRefused(f"{paths.root} holds a RocksDB database in {folder.name}/")
    _refuse_rocksdb_records(disk, paths)
    for name in disk.names(paths.queues):
        if name.startswith("%LMQ%"):
            raise StoreRefused(f"{paths.root} holds light message queues (enableLmq), e.g. {name}")
    for name in disk.names(paths.root):
        if name.startswith("dledger"):
            raise StoreRefused(f"{paths.root} holds DLedger (Raft) log files in {name}/")


def _refuse_rocksdb_records(disk: Disk, paths: StorePaths) -> None:
    """Timers in RocksDB would be delivered again, and half messages never be resolved."""
    database = paths.root / "rocksdbstore"
    found = []
    if has_timers(disk, database):
        found.append("timers (timerRocksDBEnable)")
    if has_half_messages(disk, database, paths.queues, paths.log):
        found.append("half messages (transRocksDBEnable)")
    if found:
        raise StoreRefused(
            f"{paths.root} holds {' and '.join(found)} in a RocksDB database in {database.name}/",
            hint=(
                "let Apache's broker deliver these timers or resolve these transactions, stop it "
                f"and remove {database.name}/; docs/migration.md has the commands"
            ),
        )


def stored_config(disk: Disk, paths: StorePaths) -> StoreConfig:
    """The defaults, with the sizes that an existing store was made with."""
    data = disk.read(paths.sizes)
    if data is None:
        return StoreConfig()
    try:
        sizes = msgspec.json.decode(data, type=Sizes)
    except ValueError:
        return StoreConfig()
    return msgspec.structs.replace(StoreConfig(), **msgspec.structs.asdict(sizes))


def _sizes_of(config: StoreConfig) -> Sizes:
    return Sizes(
        config.segment_bytes, config.queue_file_entries, config.index_slots, config.index_entries
    )


def check_sizes(disk: Disk, paths: StorePaths, config: StoreConfig) -> bool:
    """Compare with the sizes that the store was made with.

    Returns whether they are known: false for an Apache store that Penstock has never opened.
    """
    ours = _sizes_of(config)
    data = disk.read(paths.sizes)
    if data is not None:
        try:
            made = msgspec.json.decode(data, type=Sizes)
        except ValueError:  # DecodeError, or not UTF-8
            made = None  # torn when it was first written
        if made is not None:
            for name in Sizes.__struct_fields__:
                if getattr(made, name) != getattr(ours, name):
                    raise StoreRefused(
                        f"{paths.root} was made with {name} = {getattr(made, name)}, "
                        f"the setting is {getattr(ours, name)}",
                        hint=f"set {name} to {getattr(made, name)}",
                    )
            return True
    return not disk.names(paths.log)


def write_sizes(disk: Disk, paths: StorePaths, config: StoreConfig) -> None:
    """Store the sizes of a store that was opened."""
    data = msgspec.json.encode(_sizes_of(config))
    if disk.read(paths.sizes) != data:
        disk.write_file(paths.sizes, data)


_SYNCED = b"\nsync flush"


def mark_open(disk: Disk, paths: StorePaths, *, sync_flush: bool) -> None:
    """Write `abort`, which exists while the store is open, with the process and the system.

    `sync_flush`: what this run acknowledges is on the disk.
    """
    mark = f"{os.getpid()} {disk.system_id(paths.root)}".encode()
    disk.write_file(paths.abort, mark + _SYNCED if sync_flush else mark)


def opened_here(disk: Disk, paths: StorePaths) -> bool:
    """Whether this system, not restarted since, opened the store that was not closed.

    Then a process died and the page cache has everything that it wrote. False if that is unknown.
    """
    data = disk.read(paths.abort) or b""
    system = disk.system_id(paths.root).encode()
    return bool(system) and data.removesuffix(_SYNCED).partition(b" ")[2] == system


def may_lack_acknowledged(disk: Disk, paths: StorePaths) -> bool:
    """Whether a power failure may have taken what the last run has acknowledged. Asked before the
    store is opened."""
    data = disk.read(paths.abort)
    return data is not None and not data.endswith(_SYNCED) and not opened_here(disk, paths)


class StoreLock:
    """Excludes other processes from an open store, Apache's broker included.

    The lock belongs to the open file, not to the process: it also excludes a second store of the
    same process, and is not lost when other code opens and closes the file.
    """

    def __init__(self, paths: StorePaths, mode: int = 0o600) -> None:
        self._fd = os.open(paths.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        first_byte = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, first_byte)
        except OSError as error:
            os.close(self._fd)
            raise StoreLocked(f"{paths.root} is already open") from error
        os.pwrite(self._fd, b"lock", 0)

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
