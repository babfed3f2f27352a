"""Detects timers and half messages that an Apache broker keeps track of in RocksDB.

RocketMQ 5.4 and later create the database `rocksdbstore` in every store, with the column families
`default` (indexes), `timer` and `trans`. They stay empty unless the broker ran with
`indexRocksDBEnable`, `timerRocksDBEnable`, or `transRocksDBEnable` without
`transWriteOriginTransHalfEnable`.

RocksDB's formats are not parsed. A table file names its column family in its properties, near its
end. A write-ahead log is searched for the key of the checkpoint that RocketMQ writes with the
timers. Timers that are in neither file were lost in a crash, and both brokers read them again from
their topic.

Half messages with a state in RocksDB are in a topic of their own. If the directory `rocksdbstore`
does not exist, all of them count as resolved: a user who knows that none is open deletes it.
"""

from pathlib import Path
from typing import Final

from penstock.store.disk import Disk
from penstock.wire.codes import TOPIC_ROCKSDB_TRANS_HALF

_TABLE_END_BYTES: Final = 16 * 1024
"""More than the properties (1 KB), the list of such blocks and the footer."""

# The entry of the property `rocksdb.column.family.name` in a table file. RocksDB stores each key
# as the number of bytes that it shares with the key before it, and the rest. So an entry is that
# number (22), the length of the rest, the length of the value, the rest of the key, and the value.
_TRANS_TABLE: Final = b"\x16\x04\x05nametrans"
_DEFAULT_TABLE: Final = b"\x16\x04\x07namedefault"
# The operation (put), the id of the column family, the key's length and the key.
_TIMER_CHECKPOINT: Final = b"\x05\x01\x20sys_topic_scan_offset_checkpoint"

_ENTRY_BYTES: Final = 20  # of a ConsumeQueue; the offset in the CommitLog comes first


def has_timers(disk: Disk, database: Path) -> bool:
    """Whether the database has records of timers, or a table file that can't be understood."""
    for name in disk.names(database):
        path = database / name
        if name.endswith(".log") and _contains(disk, path, 0, _TIMER_CHECKPOINT):
            return True
        if name.endswith(".sst"):
            start = max(disk.size(path) - _TABLE_END_BYTES, 0)
            if not _contains(disk, path, start, _DEFAULT_TABLE, _TRANS_TABLE):
                return True
    return False


def has_half_messages(disk: Disk, database: Path, queues: Path, log: Path) -> bool:
    """Whether the CommitLog still has half messages whose state is in the database."""
    if not disk.names(database):
        return False
    segments = [int(name) for name in disk.names(log) if name.isdecimal()]
    if not segments:
        return False
    topic = queues / TOPIC_ROCKSDB_TRANS_HALF
    return any(
        _last_log_offset(disk, topic / queue / name) >= segments[0]
        for queue in disk.names(topic)
        for name in disk.names(topic / queue)
    )


def _last_log_offset(disk: Disk, path: Path) -> int:
    """Where the message of the last entry of a ConsumeQueue file is in the log; -1 if empty."""
    data = disk.read(path) or b""
    used = len(data.rstrip(b"\0"))  # the rest of the file is preallocated
    at = (used - 1) // _ENTRY_BYTES * _ENTRY_BYTES
    return int.from_bytes(data[at : at + 8], "big") if used else -1


def _contains(disk: Disk, path: Path, start: int, *patterns: bytes) -> bool:
    """Whether one of the patterns occurs in a file at or after a position."""
    size = disk.size(path)
    if size == 0:  # can't be mapped
        return False
    fd = disk.open_to_read(path)
    try:
        with disk.map(fd, size, writable=False) as content:
            return any(content.find(pattern, start) >= 0 for pattern in patterns)
    finally:
        disk.close_file(fd)
