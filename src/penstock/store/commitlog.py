"""The CommitLog: one endless sequence of records in segments of equal size.

A record never ends at the end of a file: at least 8 bytes remain for the blank record that fills a
segment up (`size i32 | magic i32`), and a record or batch that does not fit begins the next one.

Where bytes go first is hidden here. `by_mapping`: straight into the segment's mapping (async
flush). Otherwise into a staging buffer, which `hand_over` gives to the page cache with one pwrite
per turn, because a store into a page under writeback stalls (sync flush).

Positions: `end` (appended) ≥ `written` (in the page cache) ≥ flushed (on the disk).
"""

from concurrent.futures import Future

from penstock.errors import NotWriteable, StoreError
from penstock.store.disk import Disk
from penstock.store.segment import PREFAULT_BYTES, Segment, SegmentList
from penstock.wire import layout, octets
from penstock.wire.record import Record

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
        self.end: int = 0
        self.written: int = 0
        self.hot_from: int = 0
        self.rolls: int = 0
        self.refusal: StoreError | None = None
        self._current: Segment | None = None
        self._target: memoryview = memoryview(bytearray(1))
        self._target_start: int = 0
        self._target_size: int = 0
        self._segment_end: int = 0
        self._faulted: int = 0
        self._coming: Future[Segment] | None = None
        self._on_roll: object = None

    def start(self, end: int, on_roll: object) -> None:
        """Go on writing at `end`. `on_roll(old segment, new segment)` is called at every roll."""
        self._on_roll = on_roll
        self.end = self.written = self.hot_from = end
        current = self.segments.find(end)
        if current is None:
            current = self.segments.create(end - end % self.segments.segment_bytes)
            self.segments.push(current)
        else:  # Apache RocketMQ leaves its files sparse
            self.disk.allocate(current.fd, 0, current.size, current.path)
        self._enter(current)

    def append(self, record: Record, queue_offset: int, store_ms: int) -> int:
        """Write a prepared record; returns its offset, or NO_ROOM."""
        offset = self.end
        if offset + record.size + layout.BLANK_BYTES > self._segment_end:
            if self.make_room(record.size) < 0:
                return NO_ROOM
            offset = self.end
        if offset + record.size - self._target_start > self._target_size:
            self.write_staged()
            if record.size > self._target_size:
                self._widen(record.size)
        record.put(self._target, offset - self._target_start, queue_offset, offset, store_ms)
        self.end = offset + record.size
        if self.by_mapping:
            self.written = self.end
        if self.end > self._faulted:
            self._fault_ahead()
        return offset

    def make_room(self, size: int) -> int:
        """See to it that `size` bytes (a record, or a whole batch) fit into the current segment.

        Returns 0, or NO_ROOM.
        """
        if self.end + size + layout.BLANK_BYTES <= self._segment_end:
            return 0
        assert size + layout.BLANK_BYTES <= self.segments.segment_bytes, (
            "the put path refuses what never fits"
        )
        return self._roll()

    def write_staged(self) -> None:
        """Give the staged bytes to the page cache."""
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
        self.write_staged()
        rest = self._segment_end - self.end
        blank = bytearray(layout.BLANK_BYTES)
        octets.put_i32(blank, layout.SIZE_AT, rest)
        octets.put_i32(blank, layout.MAGIC_AT, layout.MAGIC_BLANK)
        self.disk.write(old.fd, memoryview(blank), self.end - old.start)
        self.end = self.written = old.start + old.size
        self.segments.push(following)
        self.rolls += 1
        self._enter(following)
        self._on_roll(old, following)  # type: ignore[operator]
        old.unlock()
        return 0

    def _next_segment(self) -> Segment:
        coming, self._coming = self._coming, None
        if coming is not None:
            return coming.result()  # seldom unfinished: it was asked for a segment ago
        return self.segments.create(self._segment_end)

    def _enter(self, segment: Segment) -> None:
        self._current = segment
        self._segment_end = segment.start + segment.size
        if self.by_mapping:
            self._target = segment.view
            self._target_start = segment.start
            self._target_size = segment.size
        else:
            self._widen(min(STAGING_BYTES, segment.size))
            self._target_start = self.end
        self._faulted = self.end - self.end % _PREFAULT_BYTES
        if self.disk.threads:
            if self.lock_memory:
                self.disk.submit(segment.lock_or_warn)
            following = segment.start + segment.size
            self._coming = self.disk.submit(lambda: self.segments.create(following))
        self._fault_ahead()

    def _widen(self, size: int) -> None:
        self._target = memoryview(bytearray(size))
        self._target_size = size

    def _fault_ahead(self) -> None:
        """Have the pages ahead faulted in by the pool."""
        segment = self._current
        assert segment is not None
        if self.by_mapping and self.disk.threads and self._faulted < self._segment_end:
            begin = self._faulted + _PREFAULT_BYTES
            self.disk.submit(lambda: segment.prefault(begin, PREFAULT_BYTES))
        self._faulted = min(self._faulted + _PREFAULT_BYTES, self._segment_end)

    def close(self) -> None:
        """Let go of the files; a segment that was made ahead and not used is deleted."""
        coming, self._coming = self._coming, None
        if coming is not None:
            try:
                unused = coming.result()
            except (StoreError, OSError):
                unused = None
            if unused is not None:
                self.segments.unlink(unused)
        self._current = None
        self._target = memoryview(bytearray(1))
        self._target_size = 0
        self.segments.items.clear()
