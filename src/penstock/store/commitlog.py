"""The CommitLog: one endless sequence of records in segments of equal size.

A record never ends at the end of a file: at least 8 bytes remain for the blank record that fills a
segment up (`size i32 | magic i32`), and a record or batch that does not fit begins the next one.

With `by_mapping` records are written straight into the segment's mapping (async flush). Otherwise
they are staged in a buffer, which `write_staged` writes to the page cache with one pwrite per
read of a connection, because a store into a page under writeback stalls (sync flush).

Positions: `end` (appended) ≥ `written` (in the page cache) ≥ flushed (on the disk). Blocks are
allocated ahead of `end` in steps that grow with the log, by the pool: a record is appended only
where they are allocated.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from penstock.errors import DiskFull, NotWriteable, StoreError
from penstock.store.disk import Disk
from penstock.store.segment import FIRST_BYTES, PREFAULT_BYTES, Segment, SegmentList
from penstock.wire import layout, octets
from penstock.wire.record import Record

log = logging.getLogger(__name__)

DAMAGED_MAX = 10_000
"""The maximum number of damaged records that are remembered, so that each is logged once."""
STAGING_BYTES = 1024 * 1024
STEP_BYTES_MAX = 64 * 1024 * 1024
"""The maximum of `allocation_step`: half a second of writing at the speed of a fast disk."""
PREFAULTS_OF_COPIES = 4
"""So many times PREFAULT_BYTES are faulted in ahead while a slave copies the log of its master, by
several threads: new pages may cost more time than the copying, most of all in virtual machines."""
_PREFAULT_BYTES = PREFAULT_BYTES
_PREFAULTS_OF_COPIES = PREFAULTS_OF_COPIES

NO_ROOM = -1
"""`append` could not get the next blocks or segment; `CommitLog.refusal` says why."""


def allocation_step(held: int) -> int:
    """How far blocks are allocated at least ahead of the write position of a log of `held` bytes.

    As much as the log holds: a small one does not take much more of the disk than its messages.
    """
    return min(max(held, FIRST_BYTES), STEP_BYTES_MAX)


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
        # Why there is no space for a record; cleared by the maintenance, then tried again.
        self.refusal: StoreError | None = None
        # The segment being written; changes at every roll. None before `start` and after `close`.
        self._current: Segment | None = None
        # Where records are encoded: the current segment's mapping, or the staging buffer.
        # The log offset of its first byte, and its length. Valid until the next roll, or until
        # the next `write_staged` for a staging buffer.
        self._target: memoryview = memoryview(bytearray(1))
        self._target_start: int = 0
        self._target_size: int = 0
        # Log offset behind the current segment, and the end of what is known to be allocated.
        self._segment_end: int = 0
        self._allocated_to: int = 0
        # When the log gets here, the pool prepares what is ahead; see `_prepare_ahead`.
        self._prefaulted_to: int = 0
        # Up to this log offset the pool was asked to fault pages in.
        self._prefault_asked_to: int = 0
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
        else:
            current.write_from(end)
            try:
                current.allocate(end + FIRST_BYTES)
            except DiskFull as error:  # each put tries again; what is stored can be read
                log.warning("%s: writing is refused until there is space", error)
        self._enter(current)

    def create_begin(self, offset: int) -> Callable[[], Segment]:
        """Work that creates the segment at which an empty log is to begin; waits for the disk.

        It may be the one that was made ahead, which is deleted first.
        """
        made_ahead, self._next = self._next, None

        def create() -> Segment:
            self._discard(made_ahead)
            return self.segments.create(offset)

        return create

    def begin_at(self, following: Segment) -> Callable[[], None]:
        """Move an empty log to the segment that `create_begin` has created.

        Returns work that deletes the old one; it waits for the disk.
        """
        old = self._current
        assert old is not None
        assert self.end == self.segments.first
        self.segments.drop_last()
        self.segments.push(following)
        self.end = self.written = self.hot_from = following.start
        self._enter(following)
        self._on_roll(old, following)  # type: ignore[operator]

        return partial(self.segments.unlink, old)

    def append(self, record: Record, queue_offset: int, store_ms: int) -> int:
        """Write a prepared record; returns its offset, or NO_ROOM."""
        offset = self.end
        if (
            offset + record.size + layout.BLANK_BYTES > self._allocated_to
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
            self._prepare_ahead(1)
        return offset

    def append_raw(self, data: memoryview) -> int:
        """Write whole records of the master's log as they are; returns 0, or NO_ROOM.

        They fit into the current segment and leave space for a blank record. Raises OSError.
        """
        length = len(data)
        needed = self.end + length + layout.BLANK_BYTES
        assert needed <= self._segment_end, "the caller has checked the sizes"
        if needed > self._allocated_to and self._allocate(needed) < 0:
            return NO_ROOM
        segment = self._current
        assert segment is not None
        if self.by_mapping:
            at = self.end - self._target_start
            self._target[at : at + length] = data
        else:
            self.disk.write(segment.fd, memoryview(data), self.end - segment.start)
            self._target_start = self.end + length
        self.end += length
        self.written = self.end
        if self.end > self._prefaulted_to:
            self._prepare_ahead(_PREFAULTS_OF_COPIES)
        return 0

    def make_room(self, size: int) -> int:
        """Roll if `size` bytes (a record, or a whole batch) do not fit into the current segment.

        Then their blocks are allocated, and that of a blank record behind them. They also fit into
        the staging buffer, so that no record of a batch waits for a write. Returns 0, or NO_ROOM.
        """
        if self.end + size + layout.BLANK_BYTES > self._segment_end:
            assert size + layout.BLANK_BYTES <= self.segments.segment_bytes, (
                "the put path refuses what never fits"
            )
            if self.roll() < 0:
                return NO_ROOM
        needed = self.end + size + layout.BLANK_BYTES
        if needed > self._allocated_to and self._allocate(needed) < 0:
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

    def _allocate(self, end: int) -> int:
        """Take over what the pool has allocated meanwhile, or allocate up to `end` here."""
        segment = self._current
        assert segment is not None
        try:
            segment.allocate(end)
        except StoreError as error:
            self.refusal = error
            return NO_ROOM
        except OSError as error:
            self.refusal = NotWriteable(f"{segment.path} can't be extended: {error}")
            return NO_ROOM
        self._allocated_to = segment.allocated
        return 0

    def roll(self) -> int:
        """Fill the segment up with a blank record and continue in the next; returns 0 or NO_ROOM.

        Raises OSError.
        """
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
        try:
            self.write_staged()
            blank = _blank_record(self._segment_end - self.end)
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
            return made_ahead.result()  # rarely unfinished: it was started at least a step ago
        return self.segments.create(self._segment_end)

    def _enter(self, segment: Segment) -> None:
        self._current = segment
        self._segment_end = segment.start + segment.size
        self._allocated_to = segment.allocated
        if self.by_mapping:
            self._target = segment.view
            self._target_start = segment.start
            self._target_size = segment.size
        else:
            self._resize_staging(min(STAGING_BYTES, segment.size))
            self._target_start = self.end
        self._prefaulted_to = self.end - self.end % _PREFAULT_BYTES
        self._prefault_asked_to = self._prefaulted_to + _PREFAULT_BYTES
        if self.disk.threads and self.lock_memory:
            self.disk.submit(segment.lock_or_warn)
        self._prepare_ahead(1)

    def _resize_staging(self, size: int) -> None:
        self._target = memoryview(bytearray(size))
        self._target_size = size

    def _prepare_ahead(self, prefaults: int) -> None:
        """Have the pool allocate blocks and fault in pages ahead of the write position.

        When the segment is allocated to its end, the pool makes the next one.
        """
        segment = self._current
        assert segment is not None
        self._prefaulted_to = min(self._prefaulted_to + _PREFAULT_BYTES, self._segment_end)
        if not self.disk.threads:
            return
        segment_end = self._segment_end
        step = allocation_step(self.end - self.segments.first)
        ahead = min(self.end + 2 * step, segment_end)
        if ahead == segment_end and self._next is None:
            self._next = self.disk.submit(lambda: self.segments.create(segment_end))
        due = segment.allocated < min(self.end + step, segment_end)
        allocate_to = ahead if due else 0
        wanted = min(self._prefaulted_to + prefaults * _PREFAULT_BYTES, segment_end)
        starts = range(self._prefault_asked_to, wanted if self.by_mapping else 0, _PREFAULT_BYTES)
        # If the pool fails, the append that needs the blocks tries again and reports it.
        for start in starts:
            self.disk.submit(partial(segment.prepare, allocate_to, start))
            self._prefault_asked_to = start + _PREFAULT_BYTES
        if due and not starts:
            self.disk.submit(partial(segment.allocate, allocate_to))

    def close(self) -> None:
        """Close the files."""
        self._drop_next()
        self._current = None
        self._target = memoryview(bytearray(1))
        self._target_size = 0
        self.segments.items.clear()

    def _drop_next(self) -> None:
        """Delete the segment that was made ahead, if there is one."""
        made_ahead, self._next = self._next, None
        self._discard(made_ahead)

    def _discard(self, made_ahead: Future[Segment] | None) -> None:
        if made_ahead is not None:
            try:
                unused = made_ahead.result()
            except (StoreError, OSError):
                unused = None
            if unused is not None:
                self.segments.unlink(unused)


def _blank_record(size: int) -> bytearray:
    """The head of a blank record of this size."""
    record = bytearray(layout.BLANK_BYTES)
    octets.put_i32(record, layout.SIZE_AT, size)
    octets.put_i32(record, layout.MAGIC_AT, layout.MAGIC_BLANK)
    return record
