"""The CommitLog: one endless sequence of records in segments of equal size.

A record never ends at the end of a file: at least 8 bytes remain for the blank record that fills a
segment up (`size i32 | magic i32`), and a record or batch that does not fit begins the next one.

With `by_mapping` records are written straight into the segment's mapping (async flush). Otherwise
they are staged in a buffer, which `write_staged` writes to the page cache with one pwrite per
read of a connection, because a store into a page under writeback stalls (sync flush).

Positions: `end` (appended) ≥ `written` (in the page cache) ≥ flushed (on the disk).
"""

import logging
from concurrent.futures import Future

from penstock.errors import NotWriteable, StoreError
from penstock.store.disk import Disk
from penstock.store.segment import PREFAULT_BYTES, Segment, SegmentList
from penstock.wire import layout, octets
from penstock.wire.record import Record

log = logging.getLogger(__name__)

DAMAGED_MAX = 10_000
"""The maximum number of damaged records that are remembered, so that each is logged once."""
STAGING_BYTES = 1024 * 1024
_PREFAULT_BYTES = PREFAULT_BYTES

NO_ROOM = -1
"""`append` could not get the next segment; `CommitLog.refusal` says why."""


class CommitLog:
    """Appends records and finds bytes; single writer."""

    def __init__(
        self, disk: Disk, segments: SegmentList, *, by_mapping: bool, lock_memory: bool = False
    ) -> None:
        self.disk: Disk = disk
        self.segments: SegmentList = segments
        self.by_mapping: bool = by_mapping
        self.lock_memory: bool = lock_memory
        # Log offsets behind the last byte appended, and behind the last one in the page cache.
        self.end: int = 0
        self.written: int = 0
        # Bytes from this log offset on were written by this process: their pages are in memory.
        self.hot_from: int = 0
        # Log offsets of damaged records that reads have found since the start.
        self.damaged: set[int] = set()
        # How often the log went on in a new segment since the start.
        self.rolls: int = 0
        # Why the next segment could not be made; cleared by the maintenance, then tried again.
        self.refusal: StoreError | None = None
        # The segment being written; changes at every roll. None before `start` and after `close`.
        self._current: Segment | None = None
        # Where records are encoded: the current segment's mapping, or the staging buffer.
        # The log offset of its first byte, and its length. Valid until the next roll, or until
        # the next `write_staged` for a staging buffer.
        self._target: memoryview = memoryview(bytearray(1))
        self._target_start: int = 0
        self._target_size: int = 0
        # Log offset behind the current segment.
        self._segment_end: int = 0
        # Pages up to this log offset were given to the pool to be faulted in.
        self._prefaulted_to: int = 0
        # The segment that the pool makes ahead; taken by the next roll.
        self._next: Future[Segment] | None = None
        # Called with the old and the new segment at every roll; set by `start`.
        self._on_roll: object = None

    def start(self, end: int, on_roll: object) -> None:
        """Continue at `end`; calls `on_roll(old segment, new segment)` at every roll."""
        self._on_roll = on_roll
        self.end = self.written = self.hot_from = end
        current = self.segments.find(end)
        if current is None:
            current = self.segments.create(end - end % self.segments.segment_bytes)
            self.segments.push(current)
        else:  # Apache RocketMQ's files are sparse
            self.disk.allocate(current.fd, 0, current.size, current.path)
        self._enter(current)

    def append(self, record: Record, queue_offset: int, store_ms: int) -> int:
        """Write a prepared record; returns its offset, or NO_ROOM."""
        offset = self.end
        if (
            offset + record.size + layout.BLANK_BYTES > self._segment_end
            or offset + record.size - self._target_start > self._target_size
        ):
            if self.make_room(record.size) < 0:
                return NO_ROOM
            offset = self.end
        record.put(self._target, offset - self._target_start, queue_offset, offset, store_ms)
        self.end = offset + record.size
        if self.by_mapping:
            self.written = self.end
        if self.end > self._prefaulted_to:
            self._prefault()
        return offset

    def make_room(self, size: int) -> int:
        """Roll if `size` bytes (a record, or a whole batch) do not fit into the current segment.

        They also fit into the staging buffer then, so that no record of a batch waits for a write.
        Returns 0, or NO_ROOM.
        """
        if self.end + size + layout.BLANK_BYTES > self._segment_end:
            assert size + layout.BLANK_BYTES <= self.segments.segment_bytes, (
                "the put path refuses what never fits"
            )
            if self._roll() < 0:
                return NO_ROOM
        if self.end + size - self._target_start > self._target_size:
            self.write_staged()
            if size > self._target_size:
                self._resize_staging(size)
        return 0

    def write_staged(self) -> None:
        """Write the staged bytes to the page cache; after an error they are still staged."""
        if self.by_mapping:
            return
        length = self.end - self._target_start
        if length > 0:
            self.disk.write(
                self._current.fd,  # type: ignore[union-attr]
                memoryview(self._target)[:length],
                self._target_start - self._current.start,  # type: ignore[union-attr]
            )
        self.written = self._target_start = self.end

    def current_fd(self) -> int:
        assert self._current is not None
        return self._current.fd

    def note_damage(self, offset: int, message: str, problem: str) -> None:
        """A reader has found a damaged record: log it once. For any thread."""
        if offset not in self.damaged and len(self.damaged) < DAMAGED_MAX:
            self.damaged.add(offset)
            log.warning(
                "%s at log offset %d is damaged and is not delivered: %s", message, offset, problem
            )

    def begin(self) -> int:
        """The lowest offset there is."""
        return self.segments.first

    def _roll(self) -> int:
        old = self._current
        assert old is not None
        try:
            following = self._next_segment()
        except StoreError as error:
            self.refusal = error
            return NO_ROOM
        except OSError as error:
            self.refusal = NotWriteable(f"the next log segment can't be made: {error}")
            return NO_ROOM
        rest = self._segment_end - self.end
        blank = bytearray(layout.BLANK_BYTES)
        octets.put_i32(blank, layout.SIZE_AT, rest)
        octets.put_i32(blank, layout.MAGIC_AT, layout.MAGIC_BLANK)
        try:
            self.write_staged()
            self.disk.write(old.fd, memoryview(blank), self.end - old.start)
        except OSError:
            self._next = Future()  # for the next attempt
            self._next.set_result(following)
            raise
        self.end = self.written = old.start + old.size
        self.segments.push(following)
        self.rolls += 1
        self._enter(following)
        self._on_roll(old, following)  # type: ignore[operator]
        old.unlock()
        return 0

    def _next_segment(self) -> Segment:
        made_ahead, self._next = self._next, None
        if made_ahead is not None:
            return made_ahead.result()  # rarely unfinished: it was started a segment ago
        return self.segments.create(self._segment_end)

    def _enter(self, segment: Segment) -> None:
        self._current = segment
        self._segment_end = segment.start + segment.size
        if self.by_mapping:
            self._target = segment.view
            self._target_start = segment.start
            self._target_size = segment.size
        else:
            self._resize_staging(min(STAGING_BYTES, segment.size))
            self._target_start = self.end
        self._prefaulted_to = self.end - self.end % _PREFAULT_BYTES
        if self.disk.threads:
            if self.lock_memory:
                self.disk.submit(segment.lock_or_warn)
            following = segment.start + segment.size
            self._next = self.disk.submit(lambda: self.segments.create(following))
        self._prefault()

    def _resize_staging(self, size: int) -> None:
        self._target = memoryview(bytearray(size))
        self._target_size = size

    def _prefault(self) -> None:
        """Have the pool fault in the pages ahead of the write position."""
        segment = self._current
        assert segment is not None
        if self.by_mapping and self.disk.threads and self._prefaulted_to < self._segment_end:
            begin = self._prefaulted_to + _PREFAULT_BYTES
            self.disk.submit(lambda: segment.prefault(begin, PREFAULT_BYTES))
        self._prefaulted_to = min(self._prefaulted_to + _PREFAULT_BYTES, self._segment_end)

    def close(self) -> None:
        """Close the files; a segment that was made ahead and not used is deleted."""
        made_ahead, self._next = self._next, None
        if made_ahead is not None:
            try:
                unused = made_ahead.result()
            except (StoreError, OSError):
                unused = None
            if unused is not None:
                self.segments.unlink(unused)
        self._current = None
        self._target = memoryview(bytearray(1))
        self._target_size = 0
        self.segments.items.clear()
