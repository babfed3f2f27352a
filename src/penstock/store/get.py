"""The store's way out: from a queue offset to ranges of the log.

`find` walks queue entries, compares tag hashes as integers and merges neighbouring records into
ranges; `copy_to` brings the ranges into a response. Neither waits for the disk: where bytes are
not in memory the answer is COLD, and the same call with `wait` belongs into the I/O pool.

Three ways to the bytes of a range:

* in the hot window (the newest part of the log, written since the start): from the mapping;
* large and contiguous there: `views`, which stay valid even when retention deletes the file;
* older: `preadv(RWF_NOWAIT)`, which fails rather than waits.
"""

from array import array
from collections.abc import Sequence

from penstock.store.commitlog import CommitLog
from penstock.store.consumequeue.consumequeue import FILLER_SIZE, ConsumeQueue
from penstock.wire import layout, octets
from penstock.wire.output import Output

# What became of a find; the names are RocketMQ's.
FOUND = 0
NO_MATCHED_MESSAGE = 1
MESSAGE_WAS_REMOVING = 2
OFFSET_FOUND_NULL = 3
OFFSET_OVERFLOW_BADLY = 4
OFFSET_OVERFLOW_ONE = 5
OFFSET_TOO_SMALL = 6
NO_MATCHED_LOGIC_QUEUE = 7
NO_MESSAGE_IN_QUEUE = 8
COLD = 9
STATUS_NAMES = (
    "FOUND",
    "NO_MATCHED_MESSAGE",
    "MESSAGE_WAS_REMOVING",
    "OFFSET_FOUND_NULL",
    "OFFSET_OVERFLOW_BADLY",
    "OFFSET_OVERFLOW_ONE",
    "OFFSET_TOO_SMALL",
    "NO_MATCHED_LOGIC_QUEUE",
    "NO_MESSAGE_IN_QUEUE",
    "COLD",
)
_FOUND, _NO_MATCHED_MESSAGE, _MESSAGE_WAS_REMOVING = FOUND, NO_MATCHED_MESSAGE, MESSAGE_WAS_REMOVING
_COLD = COLD

RANGES_MAX = 1024
"""Most messages of one find: each is at worst a range of its own."""
CODES_MAX = 256
"""Most tags of one subscription that are compared here."""
SCAN_ENTRIES_MAX = 800
"""Entries looked at by one find, so that a rare tag does not hold the loop (RocketMQ's figure)."""
VIEW_BYTES_MIN = 64 * 1024
"""A contiguous range of at least this length is handed out as a view instead of a copy."""
_RANGES_MAX = RANGES_MAX
_SCAN_ENTRIES_MAX = SCAN_ENTRIES_MAX
_FILLER_SIZE = FILLER_SIZE


class Reader:
    """Finds messages; reusable, one per thread. Results of the last `find` are its fields."""

    def __init__(self, log: CommitLog, hot_bytes: int) -> None:
        self.log: CommitLog = log
        self.hot_bytes: int = hot_bytes
        self.next_offset: int = 0
        self.min_offset: int = 0
        self.max_offset: int = 0
        self.count: int = 0
        self.total: int = 0
        self.ranges: int = 0
        self._offsets: memoryview = memoryview(array("q", bytes(8 * RANGES_MAX)))
        self._lengths: memoryview = memoryview(array("q", bytes(8 * RANGES_MAX)))
        self._codes: memoryview = memoryview(array("q", bytes(8 * CODES_MAX)))
        self._code_count: int = 0
        self._count_max: int = 0
        self._bytes_max: int = 0
        self._removed: bool = False

    def set_tag_hashes(self, codes: Sequence[int]) -> None:
        """Look only for messages whose tag has one of these hashes; none means all."""
        assert len(codes) <= CODES_MAX
        for place, code in enumerate(codes):
            self._codes[place] = code
        self._code_count = len(codes)

    def find(
        self,
        queue: ConsumeQueue,
        offset: int,
        count_max: int,
        bytes_max: int,
        confirm_offset: int,
        wait: bool = False,
    ) -> int:
        """Look for `count_max` messages from `offset` on; the first may exceed `bytes_max`."""
        low = queue.min_offset
        high = queue.visible_by_file(confirm_offset) if wait else queue.visible_max(confirm_offset)
        self.min_offset = low
        self.max_offset = high
        self.count = 0
        self.total = 0
        self.ranges = 0
        self.next_offset = offset
        if high == 0:
            self.next_offset = 0
            return NO_MESSAGE_IN_QUEUE
        if offset < low:
            self.next_offset = low
            return OFFSET_TOO_SMALL
        if offset == high:
            return OFFSET_OVERFLOW_ONE
        if offset > high:
            self.next_offset = high
            return OFFSET_OVERFLOW_BADLY
        self._count_max = min(count_max, _RANGES_MAX)
        self._bytes_max = bytes_max
        self._removed = False
        scan = min(high - offset, max(_SCAN_ENTRIES_MAX, self._count_max))
        if not wait and queue.is_hot(offset):
            self._scan(queue._view, (offset - queue._open_from) * layout.ENTRY_BYTES, scan)
        else:
            entries = queue.read(offset, scan, wait=wait)
            if entries is None:
                return _COLD
            if len(entries) < layout.ENTRY_BYTES:
                self.next_offset = offset - offset % queue.file_entries + queue.file_entries
                return OFFSET_FOUND_NULL
            self._scan(memoryview(bytearray(entries)), 0, len(entries) // layout.ENTRY_BYTES)
        if self.count > 0:
            return _FOUND
        return _MESSAGE_WAS_REMOVING if self._removed else _NO_MATCHED_MESSAGE

    def _scan(self, entries: memoryview, at: int, count: int) -> None:
        begin = self.log.begin()
        last_end = -1
        while count > 0:
            offset = octets.get_i64(entries, at + layout.ENTRY_OFFSET_AT)
            size = octets.get_i32(entries, at + layout.ENTRY_SIZE_AT)
            if offset < begin or size <= 0 or size == _FILLER_SIZE:
                self._removed = True
                if offset < begin and size > 0 and size != _FILLER_SIZE:
                    # Its file is gone, and the queue's begin not moved up yet.
                    self.min_offset = self.next_offset + 1
            elif self._code_count == 0 or self._wanted(
                octets.get_i64(entries, at + layout.ENTRY_TAG_AT)
            ):
                if self.count > 0 and self.total + size > self._bytes_max:
                    break
                if offset == last_end:
                    self._lengths[self.ranges - 1] += size
                else:
                    self._offsets[self.ranges] = offset
                    self._lengths[self.ranges] = size
                    self.ranges += 1
                last_end = offset + size
                self.total += size
                self.count += 1
                if self.count >= self._count_max:
                    self.next_offset += 1
                    break
            self.next_offset += 1
            at += layout.ENTRY_BYTES
            count -= 1

    def _wanted(self, code: int) -> bool:
        i = 0
        while i < self._code_count:
            if self._codes[i] == code:
                return True
            i += 1
        return False

    def copy_to(self, output: Output, wait: bool = False) -> bool:
        """Append the bytes of all ranges to `output`; False if that would wait for the disk."""
        i = 0
        while i < self.ranges:  # a damaged entry must not take memory
            segment = self.log.segments.find(self._offsets[i])
            if segment is None or (
                self._offsets[i] + self._lengths[i] > segment.start + segment.size
            ):
                return False
            i += 1
        output.reserve(self.total)
        hot_from = max(self.log.hot_from, self.log.written - self.hot_bytes)
        before = output.length
        i = 0
        while i < self.ranges:
            offset = self._offsets[i]
            length = self._lengths[i]
            segment = self.log.segments.find(offset)
            if segment is None:  # retention was quicker
                output.length = before
                return False
            if offset >= hot_from:
                octets.copy(
                    output.view, output.length, segment.view, offset - segment.start, length
                )
            elif not self._read(segment, offset, length, output, wait):
                output.length = before
                return False
            output.length += length
            i += 1
        return True

    def _read(self, segment: object, offset: int, length: int, output: Output, wait: bool) -> bool:
        target = memoryview(output.view)[output.length : output.length + length]
        disk, fd = segment.disk, segment.fd  # type: ignore[attr-defined]
        at = offset - segment.start  # type: ignore[attr-defined]
        if not wait:
            return bool(disk.read_now(fd, target, at))
        data = disk.read_at(fd, length, at)
        if len(data) != length:
            return False
        target[:] = data
        return True

    def views(self) -> list[memoryview] | None:
        """The bytes as views of the mapping, if all ranges are hot and large; else None."""
        hot_from = max(self.log.hot_from, self.log.written - self.hot_bytes)
        views = []
        for i in range(self.ranges):
            segment = self.log.segments.find(self._offsets[i])
            if segment is None or self._offsets[i] < hot_from:
                return None
            if self._lengths[i] < VIEW_BYTES_MIN:
                return None
            views.append(segment.slice(self._offsets[i], self._lengths[i]))
        return views or None

    def spans(self) -> list[tuple[int, int]]:
        """The ranges as (log offset, length)."""
        return [(self._offsets[i], self._lengths[i]) for i in range(self.ranges)]
