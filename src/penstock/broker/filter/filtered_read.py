"""Reads a queue through a filter: a reader's `find` and `copy_to`, with only what matches.

The records have to be looked at, so they are copied out of the log in steps of as many as may still
be given; those that match are kept. Where nothing is found within the limits the client is told to
come again at once, behind what was looked at.
"""

import struct

from penstock.broker.filter.filters import Filter
from penstock.store import get
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.get import Reader
from penstock.wire.layout import SIZE_AT
from penstock.wire.octets import get_i32
from penstock.wire.output import Output

LOOKS_MAX = 256
"""Messages looked at by one find in the loop: under a millisecond."""
LOOKS_IN_POOL_MAX = get.SCAN_ENTRIES_MAX
LIGHT = 10
"""Filters of more tests than this may look at fewer messages in one find."""
LOOK_BYTES_MAX = 1024 * 1024
"""Bytes of messages looked at by one find, but for the last step."""


class Sieve:
    """Finds messages that a filter wants; reusable. Results of the last `find` are its fields."""

    def __init__(self, reader: Reader, wanted: Filter) -> None:
        self._reader = reader
        self._wanted = wanted
        self._kept: list[bytes] = []
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
        """As a reader's, with the filter: up to `count_max` matching messages from `offset` on."""
        reader = self._reader
        self._kept.clear()
        self.count = self.total = 0
        looked = looked_bytes = 0
        looks_max = LOOKS_IN_POOL_MAX if wait else LOOKS_MAX
        looks_max = max(1, looks_max * LIGHT // max(LIGHT, self._wanted.weight))
        while looked < looks_max and looked_bytes < LOOK_BYTES_MAX:
            step = min(count_max - self.count, looks_max - looked)
            status = reader.find(queue, offset, step, bytes_max - self.total, confirm_offset, wait)
            if looked == 0:
                self.min_offset, self.max_offset = reader.min_offset, reader.max_offset
                self.next_offset = reader.next_offset
            if status == get.FOUND:
                status = self._look(bytes_max, wait)
            if status != get.FOUND:
                if looked == 0:
                    return status
                break  # what was looked at before counts
            looked += reader.count
            looked_bytes += reader.total
            offset = self.next_offset = reader.next_offset
            full = self.count >= count_max or self.total >= bytes_max
            if full or offset >= self.max_offset:
                break
        return get.FOUND if self.count > 0 else get.NO_MATCHED_MESSAGE

    def copy_to(self, output: Output, wait: bool = False) -> bool:
        """Append what was found to `output`."""
        output.reserve(self.total)
        for data in self._kept:
            output.view[output.length : output.length + len(data)] = data
            output.length += len(data)
        return True

    def _look(self, bytes_max: int, wait: bool) -> int:
        """Keep what matches of the reader's find."""
        reader = self._reader
        if self.count > 0 and self.total + reader.total > bytes_max:
            return get.NO_MATCHED_MESSAGE  # one large message, for the next answer
        output = Output(max(reader.total, 1))
        if not reader.copy_to(output, wait):
            return get.MESSAGE_WAS_REMOVING if wait else get.COLD
        data, at = output.take(), 0
        for _ in range(reader.count):
            size = get_i32(data, at + SIZE_AT) if at + 4 <= len(data) else 0
            if size <= 0:
                break  # a damaged record: where the next begins is not known
            if self._is_wanted(data, at):
                self._kept.append(data[at : at + size])
                self.count += 1
                self.total += size
            at += size
        return get.FOUND

    def _is_wanted(self, data: bytes, at: int) -> bool:
        try:
            return self._wanted.matches_record(data, at)
        except (struct.error, IndexError):  # damaged: the client shall see it, as without a filter
            return True
