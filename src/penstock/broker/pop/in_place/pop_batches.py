"""The messages that a pop has found: their records, by queue, and the response with them.

Everything is kept in buffers that the next pop uses again, so no object is made per message.
"""

from __future__ import annotations

from array import array

from penstock.broker.pop.pop_request import MESSAGES_MAX
from penstock.store.get import Reader
from penstock.wire import layout, octets
from penstock.wire.output import Output
from penstock.wire.receipt_handle import RetryKind

_SUCCESS = 0
_NORMAL = int(RetryKind.NORMAL)
_NUMBER_BYTES = 20
_BLANK, _COMMA, _SEMICOLON = 32, 44, 59


class FoundBatch:
    """Messages of one queue; used again by the next pop."""

    def __init__(self) -> None:
        self.queue_id: int = 0
        self.start_offset: int = 0
        self.next_offset: int = 0
        self.count: int = 0
        # Where the records are in the bodies.
        self.at: int = 0
        self.length: int = 0
        # Where their queue offsets begin among those of the pop.
        self.first: int = 0
        # The lowest log offset of the records, and the store time of the first.
        self.log_offset: int = 0
        self.stored_ms: int = 0
        # Whether its checkpoint is written, so that it is delivered.
        self.given: bool = False


class PopBatches:
    """Messages of the requested topic, for the pop that is served."""

    def __init__(self) -> None:
        # The messages of each queue; the first `batch_count` are those of this pop.
        self.batches: list[FoundBatch] = [FoundBatch() for _ in range(MESSAGES_MAX)]
        self.batch_count: int = 0
        # The number of messages, and the bytes of their records.
        self.count: int = 0
        self.size: int = 0
        # The records of all queues, and the queue offsets of the messages.
        self._bodies: Output = Output()
        self._offsets: memoryview = memoryview(array("q", bytes(8 * MESSAGES_MAX)))
        # Fields of the response.
        self._text: Output = Output(1024)

    def clear(self) -> None:
        self.batch_count = 0
        self.count = 0
        self.size = 0
        self._bodies.length = 0

    def add(self, reader: Reader, queue_id: int, offset: int) -> bool:
        """Add what the reader has found in a queue from an offset on; False if it is not in memory
        or damaged."""
        bodies = self._bodies
        at = bodies.length
        total = reader.total
        if total < layout.FIXED_BYTES or not reader.copy_to(bodies) or reader.total != total:
            return False
        batch = self.batches[self.batch_count]
        batch.queue_id = queue_id
        batch.start_offset = offset
        batch.next_offset = reader.next_offset
        batch.at = at
        batch.length = bodies.length - at
        batch.count = reader.count
        self.batch_count += 1
        self.size = bodies.length
        return self._read_records(batch)

    def _read_records(self, batch: FoundBatch) -> bool:
        """Read the offsets of a queue's messages; False if a record is damaged."""
        view = self._bodies.view
        at = batch.at
        end = at + batch.length
        sys_flag = octets.get_i32(view, at + layout.SYS_FLAG_AT)
        batch.stored_ms = octets.get_i64(view, at + layout.store_ms_at(sys_flag))
        batch.log_offset = octets.get_i64(view, at + layout.PHYSICAL_OFFSET_AT)
        batch.first = self.count
        for _ in range(batch.count):
            size = octets.get_i32(view, at + layout.SIZE_AT)
            if size < layout.FIXED_BYTES or size > end - at:
                return False
            self._offsets[self.count] = octets.get_i64(view, at + layout.QUEUE_OFFSET_AT)
            log_offset = octets.get_i64(view, at + layout.PHYSICAL_OFFSET_AT)
            batch.log_offset = min(batch.log_offset, log_offset)
            self.count += 1
            at += size
        return at == end

    def offsets_of(self, batch: FoundBatch) -> range | list[int]:
        """The queue offsets of a queue's messages."""
        first = self._offsets[batch.first]
        if self._offsets[batch.first + batch.count - 1] == first + batch.count - 1:
            return range(first, first + batch.count)
        return [self._offsets[batch.first + index] for index in range(batch.count)]

    def write(
        self,
        output: Output,
        encoding: int,
        opaque: int,
        pop_ms: int,
        invisible_ms: int,
        revive_queue_id: int,
        rest: int,
    ) -> None:
        """Write the response with the batches that are given."""
        total = 0
        text = self._text
        text.length = 0
        for number in range(self.batch_count):
            batch = self.batches[number]
            if batch.given:
                total += batch.length
                self._put_queue(batch, text.length > 0)
                self._put_number(batch.start_offset)
        starts = text.length
        for number in range(self.batch_count):
            batch = self.batches[number]
            if batch.given:
                self._put_queue(batch, text.length > starts)
                for index in range(batch.count):
                    if index > 0:
                        self._put_byte(_COMMA)
                    self._put_number(self._offsets[batch.first + index])
        output.begin(encoding, _SUCCESS, opaque, b"FOUND")
        output.field_number(b"popTime", pop_ms)
        output.field_number(b"invisibleTime", invisible_ms)
        output.field_number(b"reviveQid", revive_queue_id)
        output.field_number(b"restNum", rest)
        output.field_span(b"startOffsetInfo", text.view, 0, starts)
        output.field_span(b"msgOffsetInfo", text.view, starts, text.length - starts)
        output.end(total)
        output.reserve(total)
        for number in range(self.batch_count):
            batch = self.batches[number]
            if batch.given:
                octets.copy(output.view, output.length, self._bodies.view, batch.at, batch.length)
                output.length += batch.length

    def _put_queue(self, batch: FoundBatch, separated: bool) -> None:
        """Begin the item of a queue: the kind of its topic, and its id."""
        if separated:
            self._put_byte(_SEMICOLON)
        self._put_number(_NORMAL)
        self._put_byte(_BLANK)
        self._put_number(batch.queue_id)
        self._put_byte(_BLANK)

    def _put_byte(self, byte: int) -> None:
        text = self._text
        text.reserve(1)
        text.view[text.length] = byte
        text.length += 1

    def _put_number(self, number: int) -> None:
        text = self._text
        text.reserve(_NUMBER_BYTES)
        text.length += octets.put_decimal(text.view, text.length, number)
