"""Filtered read: `find` and `copy_to` of a reader, for the messages that match a filter.

Records are copied out of the log in steps and examined; those that match are kept. If none matches
within the limits, the client pulls again at once, after the examined messages.
"""

import struct
from typing import Protocol

from penstock.store import get
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.get import Reader
from penstock.wire.layout import SIZE_AT
from penstock.wire.octets import get_i32
from penstock.wire.output import Output

EXAMINED_MAX = 256
"""Messages that one find examines in the event loop: less than a millisecond."""
EXAMINED_IN_THREAD_MAX = get.SCAN_ENTRIES_MAX
CHEAP_TESTS = 10
"""A filter with more tests than this examines fewer messages per find."""
EXAMINED_BYTES_MAX = 1024 * 1024
"""Bytes of messages that one find examines, except in its last step."""


class RecordFilter(Protocol):
    """Decides which records are wanted."""

    cost: int  # number of tests per record

    def matches_record(self, data: bytes, at: int) -> bool:
        """Whether the record that starts at `at` is wanted."""


class FilteredReader:
    """Finds messages that match a filter; the fields are the results of the last `find`."""

    def __init__(self, reader: Reader, message_filter: RecordFilter) -> None:
        self._reader = reader
        self._filter = message_filter
        self._matching: list[bytes] = []
        self.next_offset = 0
        self.min_offset = 0
        self.max_offset = 0
        self.count = 0
        self.total = 0

    def find(
        self,
        queue: ConsumeQueue,
        offset: int,
        count_max: int,
        bytes_max: int,
        confirm_offset: int,
        wait: bool = False,
    ) -> int:
        """Like `Reader.find`: up to `count_max` matching messages from `offset` on."""
        reader = self._reader
        self._matching.clear()
        self.count = self.total = 0
        examined = examined_bytes = 0
        examined_max = EXAMINED_IN_THREAD_MAX if wait else EXAMINED_MAX
        examined_max = max(1, examined_max * CHEAP_TESTS // max(CHEAP_TESTS, self._filter.cost))
        while examined < examined_max and examined_bytes < EXAMINED_BYTES_MAX:
            step = min(count_max - self.count, examined_max - examined)
            status = reader.find(queue, offset, step, bytes_max - self.total, confirm_offset, wait)
            if examined == 0:
                self.min_offset, self.max_offset = reader.min_offset, reader.max_offset
                self.next_offset = reader.next_offset
            if status == get.FOUND:
                status = self._examine(bytes_max, wait)
            if status != get.FOUND:
                if examined == 0:
                    return status
                break  # the result of the previous steps is valid
            examined += reader.count
            examined_bytes += reader.total
            offset = self.next_offset = reader.next_offset
            full = self.count >= count_max or self.total >= bytes_max
            if full or offset >= self.max_offset:
                break
        return get.FOUND if self.count > 0 else get.NO_MATCHED_MESSAGE

    def copy_to(self, output: Output, wait: bool = False) -> bool:
        """Append the matching messages to `output`."""
        output.reserve(self.total)
        for data in self._matching:
            output.view[output.length : output.length + len(data)] = data
            output.length += len(data)
        return True

    def _examine(self, bytes_max: int, wait: bool) -> int:
        """Examine what the reader found; keep what matches."""
        reader = self._reader
        if self.count > 0 and self.total + reader.total > bytes_max:
            return get.NO_MATCHED_MESSAGE  # one large message, for the next response
        output = Output(max(reader.total, 1))
        if not reader.copy_to(output, wait):
            return get.MESSAGE_WAS_REMOVING if wait else get.COLD
        data, at = output.take(), 0
        for _ in range(reader.count):
            size = get_i32(data, at + SIZE_AT) if at + 4 <= len(data) else 0
            if size <= 0:
                break  # a damaged record: the start of the next one is unknown
            if self._matches(data, at):
                self._matching.append(data[at : at + size])
                self.count += 1
                self.total += size
            at += size
        return get.FOUND

    def _matches(self, data: bytes, at: int) -> bool:
        try:
            return self._filter.matches_record(data, at)
        except (struct.error, IndexError):  # damaged: delivered, as without a filter
            return True
