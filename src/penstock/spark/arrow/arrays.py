"""Arrow columns that grow and become arrays without a copy.

Buffers are Arrow's own, doubled when they are full; after `finish` the next ones are as long as the
last came out. Rows come one by one, or many at once, whose places stand in a table of numbers
(`spark.chunk`). Offsets of texts have 32 bits: whoever adds rows sees to it that they suffice.
"""

import pyarrow as pa

from penstock.spark.arrow import byte_access
from penstock.spark.arrow.record_view import PlacedRecord
from penstock.wire import octets

_SLACK = byte_access.COPY_SLACK
_ROWS_MIN, _DATA_MIN = 1024, 16 * 1024
_EMPTY = pa.py_buffer(b"")


def _grown(old: memoryview, used: int, room: int) -> pa.Buffer:
    """A buffer of `room` bytes that begins with what was used of the old one."""
    made = pa.allocate_buffer(room)
    if used > 0:
        octets.copy(memoryview(made).cast("B"), 0, old, 0, used)
    return made


class Column:
    """Numbers of 32 or 64 bits, or offsets; with a bitmap as soon as there is a null."""

    def __init__(self, on: bool, width: int = 4) -> None:
        self.on: bool = on
        self.width: int = width
        self.count: int = 0
        self.nulls: int = 0
        self.room: int = 0
        self.room_next: int = _ROWS_MIN
        self._nothing: memoryview = memoryview(bytearray(1))
        self.values: memoryview = self._nothing
        self.valid: memoryview = self._nothing
        self.values_buffer: pa.Buffer | None = None
        self.valid_buffer: pa.Buffer | None = None

    def put(self, value: int) -> None:
        if self.count == self.room:
            self.grow()
        if self.nulls > 0:
            byte_access.set_bit(self.valid, self.count)
        if self.width == 4:
            byte_access.put_i32(self.values, self.count, value)
        else:
            byte_access.put_i64(self.values, self.count, value)
        self.count += 1

    def put_null(self) -> None:
        self._note_null()
        if self.width == 4:
            byte_access.put_i32(self.values, self.count, 0)
        else:
            byte_access.put_i64(self.values, self.count, 0)
        self.count += 1

    def close(self, end: int) -> None:
        """A row of offsets: it ends there, and began where the one before ended."""
        if self.count == self.room:
            self.grow()
        if self.nulls > 0:
            byte_access.set_bit(self.valid, self.count)
        self.count += 1
        byte_access.put_i32(self.values, self.count, end)

    def close_null(self, end: int) -> None:
        self._note_null()
        self.count += 1
        byte_access.put_i32(self.values, self.count, end)

    def _note_null(self) -> None:
        if self.count == self.room:
            self.grow()
        self._note_nulls(1)

    def _note_nulls(self, count: int) -> None:
        if self.nulls == 0:  # all before them are valid
            self._make_bitmap(0)
            byte_access.set_bits(self.valid, 0, self.count)
        self.nulls += count

    # --- many at once

    def reserve(self, count: int) -> None:
        """Room for so many rows more."""
        while self.count + count > self.room:
            self.grow()

    def add(self, count: int) -> None:
        """So many were written behind the last, none of them null."""
        if self.nulls > 0:
            byte_access.set_bits(self.valid, self.count, count)
        self.count += count

    def add_or_null(self, lengths: memoryview, at: int, step: int, count: int) -> None:
        """The same where each is null whose length is zero."""
        zeros = byte_access.count_zeros(lengths, at, step, count)
        if zeros > 0:
            self._note_nulls(zeros)
        if self.nulls > 0:
            byte_access.set_bits_where(self.valid, self.count, lengths, at, step, count)
        self.count += count

    def put_many(
        self, source: memoryview, base: int, places: memoryview, at: int, step: int, count: int
    ) -> None:
        """Numbers as `cells.gather_i32` takes them."""
        self.reserve(count)
        if self.width == 4:
            byte_access.gather_i32(self.values, self.count, source, base, places, at, step, count)
        else:
            byte_access.gather_i64(self.values, self.count, source, base, places, at, step, count)
        self.add(count)

    def scale(self, limit: int, factor: int, count: int) -> None:
        """Multiply the last so many, as `cells.scale_i64` does."""
        byte_access.scale_i64(self.values, self.count - count, limit, factor, count)

    def put_nulls(self, count: int) -> None:
        self.reserve(count)
        self._note_nulls(count)
        octets.zero(self.values, self.count * self.width, count * self.width)
        self.count += count

    def close_nulls(self, end: int, count: int) -> None:
        """So many rows of offsets that are null."""
        self.reserve(count)
        self._note_nulls(count)
        for row in range(self.count + 1, self.count + 1 + count):
            byte_access.put_i32(self.values, row, end)
        self.count += count

    def grow(self) -> None:
        before = self.room
        used = (before + 1) * self.width if before > 0 else 0
        self.room = max(2 * before, self.room_next)
        self.values_buffer = _grown(self.values, used, (self.room + 1) * self.width)
        self.values = memoryview(self.values_buffer).cast("B")
        if before == 0:
            byte_access.put_i32(self.values, 0, 0)  # where offsets begin
        if self.nulls > 0:
            self._make_bitmap((before + 7) // 8)

    def _make_bitmap(self, used: int) -> None:
        length = (self.room + 7) // 8
        self.valid_buffer = _grown(self.valid, used, length)
        self.valid = memoryview(self.valid_buffer).cast("B")
        octets.zero(self.valid, used, length - used)

    def buffers(self, values: int) -> list[pa.Buffer | None]:
        """The bitmap, and so many values."""
        assert self.values_buffer is not None, "a column without rows has no buffers"
        return [self.valid_buffer, self.values_buffer.slice(0, values * self.width)]

    def finish(self, kind: pa.DataType) -> pa.Array:
        """The numbers; the column is empty after that."""
        array = pa.Array.from_buffers(kind, self.count, self.buffers(self.count), self.nulls)
        self.forget()
        return array

    def forget(self) -> None:
        self.room_next = max(_ROWS_MIN, self.count)
        self.count = self.nulls = self.room = 0
        self.values = self._nothing
        self.valid = self._nothing
        self.values_buffer = self.valid_buffer = None


class Texts:
    """Texts or bytes, copied from `source`: offsets, and the data that they cut."""

    def __init__(self, on: bool) -> None:
        self.on: bool = on
        self.offsets: Column = Column(on)
        self.source: memoryview = memoryview(b"\0")
        self.used: int = 0
        self.room: int = 0
        self.room_next: int = _DATA_MIN
        self._nothing: memoryview = memoryview(bytearray(1))
        self.data: memoryview = self._nothing
        self.data_buffer: pa.Buffer | None = None

    def put(self, at: int, length: int) -> None:
        """The text at this place of the source."""
        if self.used + length + _SLACK > self.room:
            self._grow(length)
        byte_access.copy_text(self.data, self.used, self.source, at, length)
        self.used += length
        self.offsets.close(self.used)

    def put_pieces(self, record: PlacedRecord, part: int) -> None:
        """All names (`part` 0) or values (1) of a record's properties."""
        offsets = self.offsets
        self.reserve(record.text_length)
        while offsets.count + record.pieces > offsets.room:
            offsets.grow()
        self.used = byte_access.copy_pieces(
            self.data,
            self.used,
            offsets.values,
            offsets.count + 1,
            self.source,
            record.text_at,
            record.spans,
            part,
            record.pieces,
        )
        offsets.count += record.pieces

    def put_many(
        self, base: int, places: memoryview, at: int, step: int, count: int, null: bool
    ) -> None:
        """Texts of the source as `cells.gather_texts` takes them; `null`: those that are empty."""
        offsets = self.offsets
        offsets.reserve(count)
        first = offsets.count
        end = byte_access.put_ends(
            offsets.values, first + 1, self.used, places, at + 1, step, count
        )
        self.reserve(end - self.used)
        byte_access.gather_texts(
            self.data, offsets.values, first, self.source, base, places, at, step, count
        )
        self.used = end
        if null:
            offsets.add_or_null(places, at + 1, step, count)
        else:
            offsets.add(count)

    def repeat(self, count: int, times: int) -> None:
        """The last `count` rows, none of them null, so many times again."""
        offsets = self.offsets
        offsets.reserve(count * times)
        first = offsets.count - count
        begin = byte_access.own_i32(offsets.values, first)
        length = self.used - begin
        self.reserve(length * times)
        byte_access.repeat(self.data, begin, length, offsets.values, first + 1, count, times)
        self.used += length * times
        offsets.add(count * times)

    def put_nulls(self, count: int) -> None:
        self.offsets.close_nulls(self.used, count)

    def put_bytes(self, text: bytes) -> None:
        self.reserve(len(text))
        self.close(octets.put_bytes(self.data, self.used, text))

    def put_null(self) -> None:
        self.offsets.close_null(self.used)

    def reserve(self, length: int) -> None:
        """Room for so many bytes at `used` of the data."""
        if self.used + length + _SLACK > self.room:
            self._grow(length)

    def close(self, length: int) -> None:
        """So many bytes were written there: a row."""
        self.used += length
        self.offsets.close(self.used)

    def _grow(self, length: int) -> None:
        self.room = max(2 * self.room, self.room_next, self.used + length + _SLACK)
        self.data_buffer = _grown(self.data, self.used, self.room)
        self.data = memoryview(self.data_buffer).cast("B")

    def finish(self, kind: pa.DataType) -> pa.Array:
        """The texts; the column is empty after that."""
        count = self.offsets.count
        if count == 0:  # the entries of empty maps
            return pa.array([], kind)
        buffers = self.offsets.buffers(count + 1)
        buffers.append(_EMPTY if self.data_buffer is None else self.data_buffer.slice(0, self.used))
        array = pa.Array.from_buffers(kind, count, buffers, self.offsets.nulls)
        self.forget()
        return array

    def forget(self) -> None:
        self.room_next = max(_DATA_MIN, self.used + self.used // 8)
        self.used = self.room = 0
        self.data = self._nothing
        self.data_buffer = None
        self.offsets.forget()
