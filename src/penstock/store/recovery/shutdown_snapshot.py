"""The snapshot of a clean shutdown: where the log, each queue and each index file ended.

At the next start it is compared with the files: that they exist and have their length, and, where a
file has been changed since or has too few blocks, that its entries can be right (`entry_check`).
That costs one `stat` per file.
"""

import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.store.directory import StorePaths
from penstock.store.disk import STAT_BLOCK_BYTES, Disk
from penstock.store.index import Index, IndexFile
from penstock.store.segment import segment_name
from penstock.wire import layout, octets
from penstock.wire.codes import is_system_topic


class ShutdownSnapshot(msgspec.Struct):
    """The state at a clean shutdown, in `penstock.snapshot`."""

    log_begin: int
    log_end: int
    last_offset: int
    store_ms: int
    queues: list[tuple[str, int, int, int]]  # topic, queue id, min, max
    files: list[tuple[int, int]]  # of each queue: first entry of the first file, number of files
    index: list[tuple[str, int, int]] = []  # file name, log offset of the first entry, next number
    check: int = 0  # CRC of the other fields

    def sealed(self) -> "ShutdownSnapshot":
        return msgspec.structs.replace(self, check=self._crc())

    def is_whole(self) -> bool:
        return self.check == self._crc() and len(self.files) == len(self.queues)

    def _crc(self) -> int:
        return zlib.crc32(msgspec.json.encode(msgspec.structs.replace(self, check=0)))

    def rows(self) -> Iterator["QueueRow"]:
        for (topic, queue_id, low, high), (first, files) in zip(
            self.queues, self.files, strict=True
        ):
            yield QueueRow(topic, queue_id, low, high, first, files)


class QueueRow(msgspec.Struct, frozen=True):
    """A queue at a clean shutdown."""

    topic: str
    queue_id: int
    low: int
    high: int
    first: int
    files: int


def read_snapshot(disk: Disk, paths: StorePaths) -> ShutdownSnapshot | None:
    """The snapshot, or None if there is none or it is damaged."""
    data = disk.read(paths.snapshot)
    if data is None:
        return None
    try:
        snapshot = msgspec.json.decode(data, type=ShutdownSnapshot)
    except ValueError:  # DecodeError, or not UTF-8
        return None
    return snapshot if snapshot.is_whole() else None


def index_rows(index: Index | None) -> list[tuple[str, int, int]]:
    """The index files as the snapshot lists them."""
    files = index.files if index is not None else []
    return [(file.path.name, file.begin_offset(), file.next_number()) for file in files]


class FileCheck:
    """Compares the files with a snapshot."""

    def __init__(self, disk: Disk, paths: StorePaths, file_entries: int) -> None:
        self._disk = disk
        self._folder = str(paths.queues)
        self._file_entries = file_entries
        stat = disk.stat(str(paths.snapshot))
        self._written_ns = stat.st_mtime_ns if stat is not None else 0

    def changed(self, row: QueueRow) -> list[int] | None:
        """The last queue offset of each file that may have changed; None if one is missing."""
        entries, size = self._file_entries, self._file_entries * layout.ENTRY_BYTES
        folder = f"{self._folder}/{row.topic}/{row.queue_id}/"
        suspects = []
        for start in range(row.first, row.first + row.files * entries, entries):
            found = self._disk.stat(folder + segment_name(start * layout.ENTRY_BYTES))
            if found is None or found.st_size != size:
                return None
            used = min(row.high - start, entries) * layout.ENTRY_BYTES
            changed = found.st_mtime_ns > self._written_ns
            if used > 0 and (changed or found.st_blocks * STAT_BLOCK_BYTES < used):
                suspects.append(min(row.high, start + entries) - 1)
        return suspects if row.files or row.high == row.low else None


def find_bad_index_file(
    snapshot: ShutdownSnapshot, index: Index, short: set[str]
) -> tuple[str, int] | None:
    """The oldest index file that is not as it was, and the log offset of its first entry.

    `short` are the names of files that were too short, and have been extended.
    """
    files: dict[str, IndexFile] = {file.path.name: file for file in index.files}
    for name, begin_offset, next_number in snapshot.index:
        file = files.get(name)
        if file is None or name in short or file.next_number() != next_number:
            return name, begin_offset
        if next_number > 1:
            at = file.entries_at + (next_number - 1) * layout.INDEX_ENTRY_BYTES
            if octets.get_i64(file.view, at + layout.INDEX_OFFSET_AT) != file.end_offset():
                return name, begin_offset
    return None


def deleted_topics(disk: Disk, table: Path, topics: set[str]) -> set[str]:
    """Those of these topics that the topic table does not have: another program deleted them."""
    try:
        known = msgspec.json.decode(disk.read(table) or b"", type=_TopicTable).topicConfigTable
    except ValueError:
        return set()
    return {topic for topic in topics if topic not in known and not is_system_topic(topic)}


class _TopicTable(msgspec.Struct):
    topicConfigTable: dict[str, msgspec.Raw]  # noqa: N815
