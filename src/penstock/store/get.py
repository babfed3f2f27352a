"""Reading: from a queue offset to ranges of the log, and from there into a response.

`find` walks queue entries, compares tag hashes as integers and merges neighbouring records into
ranges; `copy_to` copies the ranges into a response. Neither waits for the disk: where bytes are not
in memory the status is COLD, and the same call with `wait` belongs in the thread pool.

Bytes of the hot window (the newest part of the log, written since the start) come from the mapping,
older ones by `preadv(RWF_NOWAIT)`, which fails rather than waits. A call costs more than the copy
of a few pages: ranges that lie close together, as those of a topic with several queues, are read
with one call, and what is between them is dropped.
"""

from array import array
from collections.abc import Sequence

from penstock.errors import ReadFailed
from penstock.store.commitlog import CommitLog
from penstock.store.consumequeue.consumequeue import FILLER_SIZE, ConsumeQueue
from penstock.store.segment import Segment
from penstock.wire import layout, octets
from penstock.wire.output import Output
from penstock.wire.record import PROBLEMS, RECORD, StoredRecord

# Results of a find; the names are RocketMQ's.
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
"""The maximum number of messages of one find: in the worst case each is a separate range."""
GAP_BYTES_MAX = 4 * 1024
"""Ranges that are this close together are read with one call."""
SPAN_BYTES = 256 * 1024
"""At most this much is read with one call, unless a single range is longer."""
TAG_HASHES_MAX = 256
"""The maximum number of tags that are compared here."""
SCAN_ENTRIES_MAX = 800
"""The maximum number of entries that one find looks at, so that a rare tag does not block the loop;
RocketMQ's value."""
_RANGES_MAX = RANGES_MAX
_GAP_BYTES_MAX, _SPAN_BYTES = GAP_BYTES_MAX, SPAN_BYTES
_SCAN_ENTRIES_MAX = SCAN_ENTRIES_MAX
_FILLER_SIZE = FILLER_SIZE
_RECORD = RECORD
_ALL = 1 << 62


class Reader:
    """Finds messages; reusable, one per thread. Results of the last `find` are its fields."""

    def __init__(self, log: CommitLog, hot_bytes: int, check: bool = True) -> None:
        self.log: CommitLog = log
        # Whether records outside of the hot window are checked; damaged ones are left out.
        self.check: bool = check
        # Size of the hot window, a live setting: a changed one makes a new reader.
        self.hot_bytes: int = hot_bytes
        # Results of the last `find`, valid until the next: where to read on, the queue's range
        # that readers may see, messages and bytes found.
        self.next_offset: int = 0
        self.min_offset: int = 0
        self.max_offset: int = 0
        self.count: int = 0
        self.total: int = 0
        # The ranges found: their number, log offsets and lengths. Valid until the next `find`.
        self.ranges: int = 0
        self._offsets: memoryview = memoryview(array("q", bytes(8 * RANGES_MAX)))
        self._lengths: memoryview = memoryview(array("q", bytes(8 * RANGES_MAX)))
        # The sizes of the messages found; a damaged one's is negative after `copy_to`.
        self._sizes: memoryview = memoryview(array("q", bytes(8 * RANGES_MAX)))
        # The record being checked, and the queue of the last `find`.
        self._stored: StoredRecord = StoredRecord()
        self._stored.durable_to = _ALL
        self._queue: ConsumeQueue | None = None
        # Hashes of the wanted tags, until the next `set_tag_hashes`.
        self._tag_hashes: memoryview = memoryview(array("q", bytes(8 * TAG_HASHES_MAX)))
        self._tag_hash_count: int = 0
        # The running `find`: its limits, and whether it met an entry whose record is deleted.
        self._count_max: int = 0
        self._bytes_max: int = 0
        self._removed: bool = False
        # Where ranges are read together; allocated on first use.
        self._span: memoryview = memoryview(bytearray(1))

    def set_tag_hashes(self, codes: Sequence[int]) -> None:
        """Find only messages whose tag has one of these hashes; none means all."""
        assert len(codes) <= TAG_HASHES_MAX
        for place, code in enumerate(codes):
            self._tag_hashes[place] = code
        self._tag_hash_count = len(codes)

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
        self._queue = queue
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
            self._scan(queue._view, (offset - queue._mapped_from) * layout.ENTRY_BYTES, scan)
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
                    # Its segment is deleted, and the queue's minimum has not moved up yet.
                    self.min_offset = self.next_offset + 1
            elif self._tag_hash_count == 0 or self._matches_tag(
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
                self._sizes[self.count] = size
                self.total += size
                self.count += 1
                if self.count >= self._count_max:
                    self.next_offset += 1
                    break
            self.next_offset += 1
            at += layout.ENTRY_BYTES
            count -= 1

    def _matches_tag(self, code: int) -> bool:
        i = 0
        while i < self._tag_hash_count:
            if self._tag_hashes[i] == code:
                return True
            i += 1
        return False

    def copy_to(self, output: Output, wait: bool = False) -> bool:
        """Append the bytes of all ranges to `output`; False if that would wait for the disk.

        Damaged records are left out: `count` and `total` then become smaller, perhaps 0.
        """
        i = 0
        while i < self.ranges:  # before memory is reserved: an entry may be damaged
            segment = self.log.segments.find(self._offsets[i])
            if segment is None or (
                self._offsets[i] + self._lengths[i] > segment.start + segment.size
            ):
                return False
            i += 1
        output.reserve(self.total)
        hot_from = max(self.log.hot_from, self.log.written - self.hot_bytes)
        before = output.length
        together = True
        i = 0
        while i < self.ranges:
            offset = self._offsets[i]
            length = self._lengths[i]
            segment = self.log.segments.find(offset)
            if segment is None:  # deleted by retention meanwhile
                output.length = before
                return False
            if offset >= hot_from:
                octets.copy(
                    output.view, output.length, segment.view, offset - segment.start, length
                )
                output.length += length
                i += 1
                continue
            last = i + 1
            if together:
                last = self._last_of_span(i, min(hot_from, segment.start + segment.size))
            if last > i + 1 and not self._read_span(segment, i, last, output, wait):
                together = False
                last = i + 1
            if last == i + 1:
                if not self._read(segment, offset, length, output, wait):
                    output.length = before
                    return False
                output.length += length
            i = last
        cold = self.ranges > 0 and self._offsets[0] < hot_from
        if cold and self.check and self._count_damaged(output, before, hot_from) > 0:
            self._remove_damaged(output, before)
        return True

    def _last_of_span(self, first: int, end: int) -> int:
        """The number of the range behind those that are read together with this one: they follow it
        closely in the log, and are below `end`."""
        begin = self._offsets[first]
        last_end = begin + self._lengths[first]
        i = first + 1
        while i < self.ranges:
            offset = self._offsets[i]
            if offset < last_end or offset - last_end > _GAP_BYTES_MAX:
                break
            if offset + self._lengths[i] > end or offset + self._lengths[i] - begin > _SPAN_BYTES:
                break
            last_end = offset + self._lengths[i]
            i += 1
        return i

    def _read_span(
        self, segment: Segment, first: int, last: int, output: Output, wait: bool
    ) -> bool:
        """Append the ranges [first, last), read at once with what is between them. False if that is
        not possible; then each of them may still be."""
        if len(self._span) < _SPAN_BYTES:
            self._span = memoryview(bytearray(_SPAN_BYTES))
        begin = self._offsets[first]
        length = self._offsets[last - 1] + self._lengths[last - 1] - begin
        target = memoryview(self._span)[:length]
        try:
            if not self._read_into(segment, begin - segment.start, target, wait):
                return False
        except (ReadFailed, OSError):  # perhaps of something that lies between the ranges
            return False
        i = first
        while i < last:
            octets.copy(
                output.view, output.length, self._span, self._offsets[i] - begin, self._lengths[i]
            )
            output.length += self._lengths[i]
            i += 1
        return True

    def _count_damaged(self, output: Output, at: int, hot_from: int) -> int:
        """Check the records that were not in the hot window; negates the sizes of damaged ones."""
        stored = self._stored
        stored.bind(output.view)
        damaged = 0
        number = 0
        i = 0
        while i < self.ranges:
            offset = self._offsets[i]
            end = offset + self._lengths[i]
            cold = offset < hot_from
            while offset < end:
                size = self._sizes[number]
                if cold and (
                    stored.read(at, at + size) != _RECORD
                    or stored.size != size
                    or stored.check(offset) != _RECORD
                ):
                    self._note_damage(offset)
                    self._sizes[number] = -size
                    damaged += 1
                offset += size
                at += size
                number += 1
            i += 1
        stored.release()
        return damaged

    def _note_damage(self, offset: int) -> None:
        queue, problem = self._queue, self._stored.problem
        assert queue is not None
        name = queue.topic.decode("utf-8", "replace")
        why = PROBLEMS[problem] if problem else "it has another size than its queue entry"
        self.log.note_damage(offset, f"a message of topic {name}, queue {queue.queue_id},", why)

    def _remove_damaged(self, output: Output, begin: int) -> None:
        data, at = bytes(memoryview(output.view)[begin : output.length]), 0
        kept = []
        for number in range(self.count):
            size = self._sizes[number]
            if size > 0:
                kept.append(data[at : at + size])
            at += abs(size)
        whole = b"".join(kept)
        memoryview(output.view)[begin : begin + len(whole)] = whole
        output.length = begin + len(whole)
        self.count, self.total = len(kept), len(whole)

    def _read(self, segment: Segment, offset: int, length: int, output: Output, wait: bool) -> bool:
        target = memoryview(output.view)[output.length : output.length + length]
        return self._read_into(segment, offset - segment.start, target, wait)

    def _read_into(self, segment: Segment, at: int, target: memoryview, wait: bool) -> bool:
        """Fill `target`; False if that would wait, or if the file is too short."""
        if not wait:
            return bool(segment.disk.read_now(segment.fd, target, at))
        data = segment.disk.read_at(segment.fd, len(target), at)
        if len(data) != len(target):
            return False
        target[:] = data
        return True
