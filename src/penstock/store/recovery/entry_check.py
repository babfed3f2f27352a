"""Compares queue entries with the log: whether a queue's files can be trusted.

Matching an entry with its record needs a read of the log, so that is done for one entry per file.
Of the others it is checked whether they are possible: one in each block of 4 KiB, so that a block
that was zeroed or overwritten is noticed.
"""

from penstock.store.consumequeue import queue_files
from penstock.store.consumequeue.consumequeue import (
    BLOCK_BYTES,
    FILLER_SIZE,
    ConsumeQueue,
    unpack_entry,
)
from penstock.store.segment import SegmentList
from penstock.wire import layout
from penstock.wire.record import RECORD, StoredRecord

_BLOCK_ENTRIES = BLOCK_BYTES // layout.ENTRY_BYTES
_CHUNK_ENTRIES = 64 * _BLOCK_ENTRIES


class EntryCheck:
    """Checks entries against one log."""

    def __init__(self, segments: SegmentList) -> None:
        self._segments = segments

    def last_matches(self, queue: ConsumeQueue, end: int) -> bool:
        """Whether the entry before `end` matches its record, or the record is deleted."""
        queue_offset = queue_files.last_real(queue, end)
        entry = queue.entry(queue_offset)
        if entry is None:
            return True
        if 0 <= entry[0] < self._segments.first:
            return self._is_possible(entry, 0)
        return self._matches(queue, queue_offset, entry)

    def file_is_whole(self, queue: ConsumeQueue, last: int) -> bool:
        """Whether the file whose last entry is at this queue offset has what it should have.

        The queue's positions are known: records of entries from its minimum on exist.
        """
        start = last - last % queue.file_entries
        first = max(start, queue.min_offset)
        if first > last:
            return any(queue.read(last, 1) or b"")
        if not self._are_possible(queue, first, last):
            return False
        queue_offset = queue_files.last_real(queue, last + 1)
        entry = queue.entry(queue_offset)
        return entry is None or self._matches(queue, queue_offset, entry)

    def contradicts(self, queue: ConsumeQueue, begin: int) -> bool:
        """Whether the files have something behind the queue's end that is neither zero nor an entry
        of a record from log offset `begin` on: then their entries do not end there."""
        entry = queue_files.first_written(queue, queue.max_offset)
        return entry is not None and not self._is_possible(entry, begin)

    def _are_possible(self, queue: ConsumeQueue, first: int, last: int) -> bool:
        """Whether entries in [first, last], one per block, point at ascending log offsets."""
        begin = self._segments.first
        for chunk in range(first, last + 1, _CHUNK_ENTRIES):
            data = queue.read(chunk, min(_CHUNK_ENTRIES, last + 1 - chunk)) or b""
            for at in range(0, len(data), _BLOCK_ENTRIES * layout.ENTRY_BYTES):
                entry = unpack_entry(data[at : at + layout.ENTRY_BYTES])
                if entry is None or not self._is_possible(entry, begin):
                    return False
                if entry[1] != FILLER_SIZE:
                    begin = entry[0] + entry[1]
        return True

    def _is_possible(self, entry: tuple[int, int, int], begin: int) -> bool:
        """Whether this is a filler or an entry of a record in [begin, the log's end)."""
        offset, size, _ = entry
        if size == FILLER_SIZE:
            return True
        segment_bytes = self._segments.segment_bytes
        beyond = self._segments.first + len(self._segments.items) * segment_bytes
        return layout.FIXED_BYTES <= size <= segment_bytes and begin <= offset <= beyond - size

    def _matches(self, queue: ConsumeQueue, queue_offset: int, entry: tuple[int, int, int]) -> bool:
        named = self.named_entry(entry[0], entry[1])
        return named == (queue.topic, queue.queue_id, queue_offset)

    def named_entry(self, offset: int, size: int) -> tuple[bytes, int, int] | None:
        """The topic, queue id and queue offset that the record of this size at a log offset names.

        None if there is no such record, or it is damaged.
        """
        segment = self._segments.find(offset)
        if segment is None:
            return None
        stored = StoredRecord()
        stored.bind(segment.view)
        at = offset - segment.start
        if stored.read(at, segment.size) != RECORD or stored.check(offset) != RECORD:
            return None
        if stored.size != size:
            return None
        topic = bytes(segment.view[stored.topic_at : stored.topic_at + stored.topic_length])
        return topic, stored.queue_id, stored.queue_offset
