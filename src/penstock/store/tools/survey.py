"""Statistics of a store, for `penstock store stat`.

Fast for any size: queue ranges are found by binary search and the log's end by walking from the
last record that has a queue entry. With `exact` the whole log is walked and records are counted.
"""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.store.directory import Sizes
from penstock.store.disk import STAT_BLOCK_BYTES
from penstock.store.recovery.checkpoint import Checkpoint
from penstock.store.tools.inspection import QueueEntries, StoreFiles
from penstock.store.tools.log_scan import AT_BLANK, AT_END, MORE, LogScan, QueueComparison

Progress = Callable[[str, int, int], None]
"""Called with the phase, how much of it is done and how much there is."""


class QueueStatistics(msgspec.Struct, frozen=True):
    """One queue: `count` messages in [min_offset, max_offset)."""

    topic: str
    queue_id: int
    min_offset: int
    max_offset: int
    files: int

    @property
    def count(self) -> int:
        return max(self.max_offset - self.min_offset, 0)


class IndexStatistics(msgspec.Struct, frozen=True):
    """One index file."""

    name: str
    entries: int
    slots_used: int
    begin_ms: int
    end_ms: int


class StoreStatistics(msgspec.Struct, frozen=True):
    """Everything that `store stat` shows."""

    root: str
    sizes: Sizes
    sizes_from: str
    state: str
    segments: int
    log_begin: int
    log_end: int
    records: int
    records_exact: bool
    first_ms: int
    last_ms: int
    queues: list[QueueStatistics]
    index: list[IndexStatistics]
    checkpoint: Checkpoint | None
    tables: list[str]
    disk_bytes: int


def survey(
    files: StoreFiles, *, exact: bool = False, progress: Progress | None = None
) -> StoreStatistics:
    """The statistics of a store."""
    tell = progress or (lambda what, done, of: None)
    names = list(files.queues())
    queues = []
    known_end = files.log_begin
    for done, (topic, queue_id) in enumerate(names):
        tell("queues", done, len(names))
        entries = QueueEntries(files, topic, queue_id)
        low = entries.min_offset(files.log_begin)
        queues.append(QueueStatistics(topic, queue_id, low, entries.end, len(entries.files)))
        last = entries.entry(entries.end - 1) if entries.end > low else None
        if last is not None and last[0] > known_end and _is_record(files, last[0]):
            known_end = last[0]
    tell("queues", len(names), len(names))
    first_ms = _store_ms(files, files.log_begin)
    scan = LogScan(
        lambda topic, queue_id: QueueComparison(topic, queue_id, lambda offset: bytearray())
    )
    end = walk_to_end(files, scan, files.log_begin if exact else known_end, tell)
    return StoreStatistics(
        root=str(files.root),
        sizes=files.sizes,
        sizes_from=files.sizes_from,
        state=state_of(files),
        segments=len(files.log),
        log_begin=files.log_begin,
        log_end=end,
        records=scan.records if exact else sum(q.count for q in queues),
        records_exact=exact,
        first_ms=first_ms,
        last_ms=scan.last_ms,
        queues=queues,
        index=[_index_statistics(files, path) for path in files.index_files()],
        checkpoint=files.checkpoint(),
        tables=_tables(files.paths.config),
        disk_bytes=disk_bytes(files.root),
    )


def walk_to_end(files: StoreFiles, scan: LogScan, offset: int, tell: Progress) -> int:
    """Walk valid records from `offset` on; returns where they end."""
    window = files.window()
    begin, beyond = offset, files.log_beyond
    needs = 0
    while files.log_file(offset) is not None:
        tell("log", offset - begin, beyond - begin)
        window.load(offset, needs)
        needs = 0
        why = scan.run(window)
        offset = scan.offset
        if why == MORE:
            needs = scan.needs
        elif why in (AT_BLANK, AT_END):
            following = offset - offset % files.sizes.segment_bytes + files.sizes.segment_bytes
            if why == AT_BLANK and offset + scan.blank != following:
                break
            offset = following
        else:
            break
    tell("log", beyond - begin, beyond - begin)
    return offset


def dispatched_end(files: StoreFiles) -> int:
    """The end of the last record with a queue entry: a live log does not change before it."""
    end = files.log_begin
    for topic, queue_id in files.queues():
        entries = QueueEntries(files, topic, queue_id)
        last = entries.entry(entries.end - 1)
        if last is not None and _is_record(files, last[0]):
            end = max(end, last[0] + last[1])
    return end


def state_of(files: StoreFiles) -> str:
    """How the store was left."""
    if files.live:
        return "open (a process holds its lock)"
    if files.crashed:
        return "crashed, or a copy of an open store (abort exists)"
    if files.snapshot is not None:
        return "closed cleanly"
    return "closed cleanly, without a snapshot (another broker's, or new)"


def disk_bytes(root: Path) -> int:
    """Bytes that the store's files occupy on the disk."""
    total = 0
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_blocks * STAT_BLOCK_BYTES
            except FileNotFoundError:  # deleted by a live store meanwhile
                continue
    return total


def _is_record(files: StoreFiles, offset: int) -> bool:
    found = files.record(offset)
    return found is not None and found[0].physical_offset == offset


def _store_ms(files: StoreFiles, offset: int) -> int:
    found = files.record(offset)
    return found[0].store_ms if found is not None else 0


def _index_statistics(files: StoreFiles, path: Path) -> IndexStatistics:
    head = files.index_head(path)
    if head is None:
        return IndexStatistics(path.name, 0, 0, 0, 0)
    return IndexStatistics(
        path.name, max(head.next_number - 1, 0), head.slots_used, head.begin_ms, head.end_ms
    )


def _tables(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("*.json")) if folder.is_dir() else []
