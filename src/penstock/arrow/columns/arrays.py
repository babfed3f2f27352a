"""Columns that grow and become Arrow arrays without a copy.

Buffers are Arrow's own and double when they are full. After `finish`, new buffers start with the
size that the last ones reached. Rows are added one by one, or many at once from a table of
positions (`record_chunk`). Offsets of texts have 32 bits: the caller keeps within that.
"""

import pyarrow as pa

from penstock.arrow.columns import byte_access
from penstock.arrow.columns.record_view import RecordView
from penstock.wire import octets

_SLACK = byte_access.COPY_SLACK
_ROWS_MIN, _DATA_MIN = 1024, 16 * 1024
_EMPTY = pa.py_buffer(b"")


def _grow_buffer(old: memoryview, used: int, capacity: int) -> pa.Buffer:
    """A buffer of `capacity` bytes that starts with the used bytes of the old one."""
    made = pa.allocate_buffer(capacity)
    if used > 0:
        octets.copy(memoryview(made).cast("B"), 0, old, 0, used)
    return made


class Column:
    """32- or 64-bit integers, or offsets; it has a validity bitmap from the first null on.

    Counters and buffers are valid until `reset`.
    """

    def __init__(self, enabled: bool, width: int = 4) -> None:
        self.enabled: bool = enabled  # whether the reader wants this column
        self.width: int = width  # bytes of a value
        self.count: int = 0  # rows
        self.nulls: int = 0  # rows that are null
        self.capacity: int = 0  # rows that the buffers have space for
        self.next_capacity: int = _ROWS_MIN  # the capacity of the next buffers
        self._empty: memoryview = memoryview(bytearray(1))  # stands for a missing buffer
        self.values: memoryview = self._empty  # view of values_buffer
        self.valid: memoryview = self._empty  # view of valid_buffer
        self.values_buffer: pa.Buffer | None = None
        self.valid_buffer: pa.Buffer | None = None  # the bitmap; None without nulls

    def put(self, value: int) -> None:
        if self.count == self.capacity:
            self.grow()
        if self.nulls > 0:
            byte_access.set_bit(self.valid, self.count)
        if self.width == 4:
            byte_access.put_i32(self.values, self.count, value)
        else:
            byte_access.put_i64(self.values, self.count, value)
        self.count += 1

    def put_null(self) -> None:
        self._count_null()
        if self.width == 4:
            byte_access.put_i32(self.values, self.count, 0)
        else:
            byte_access.put_i64(self.values, self.count, 0)
        self.count += 1

    def end_row(self, end: int) -> None:
        """Add a row of offsets that starts at the end of the previous row."""
        if self.count == self.capacity:
            self.grow()
        if self.nulls > 0:
            byte_access.set_bit(self.valid, self.count)
        self.count += 1
        byte_access.put_i32(self.values, self.count, end)

    def end_null_row(self, end: int) -> None:
        self._count_null()
        self.count += 1
        byte_access.put_i32(self.values, self.count, end)

    def _count_null(self) -> None:
        if self.count == self.capacity:
            self.grow()
        self._count_nulls(1)

    def _count_nulls(self, count: int) -> None:
        if self.nulls == 0:  # all rows before are valid
            self._make_bitmap(0)
            byte_access.set_bits(self.valid, 0, self.count)
        self.nulls += count

    # --- many rows at once

    def reserve(self, count: int) -> None:
        """Make space for `count` more rows."""
        while self.count + count > self.capacity:
            self.grow()

    def add(self, count: int) -> None:
        """Count rows that were written after the last one, none of them null."""
        if self.nulls > 0:
            byte_access.set_bits(self.valid, self.count, count)
        self.count += count

    def add_or_null(self, lengths: memoryview, at: int, step: int, count: int) -> None:
        """As `add`; rows with length zero are null."""
        zeros = byte_access.count_zeros(lengths, at, step, count)
        if zeros > 0:
            self._count_nulls(zeros)
        if self.nulls > 0:
            byte_access.set_bits_where(self.valid, self.count, lengths, at, step, count)
        self.count += count

    def put_many(
        self, source: memoryview, base: int, places: memoryview, at: int, step: int, count: int
    ) -> None:
        """Add integers with `byte_access.gather_i32` or `gather_i64`."""
        self.reserve(count)
        if self.width == 4:
            byte_access.gather_i32(self.values, self.count, source, base, places, at, step, count)
        else:
            byte_access.gather_i64(self.values, self.count, source, base, places, at, step, count)
        self.add(count)

    def scale(self, limit: int, factor: int, count: int) -> None:
        """Multiply the last `count` values with `byte_access.scale_i64`."""
        byte_access.scale_i64(self.values, self.count - count, limit, factor, count)

    def put_nulls(self, count: int) -> None:
        self.reserve(count)
        self._count_nulls(count)
        octets.zero(self.values, self.count * self.width, count * self.width)
        self.count += count

    def end_null_rows(self, end: int, count: int) -> None:
        """Add rows of offsets that are null."""
        self.reserve(count)
        self._count_nulls(count)
        for row in range(self.count + 1, self.count + 1 + count):
            byte_access.put_i32(self.values, row, end)
        self.count += count

    def grow(self) -> None:
        before = self.capacity
        used = (before + 1) * self.width if before > 0 else 0
        self.capacity = max(2 * before, self.next_capacity)
        self.values_buffer = _grow_buffer(self.values, used, (self.capacity + 1) * self.width)
        self.values = memoryview(self.values_buffer).cast("B")
        if before == 0:
            byte_access.put_i32(self.values, 0, 0)  # the start of the first row of offsets
        if self.nulls > 0:
            self._make_bitmap((before + 7) // 8)

    def _make_bitmap(self, used: int) -> None:
        length = (self.capacity + 7) // 8
        self.valid_buffer = _grow_buffer(self.valid, used, length)
        self.valid = memoryview(self.valid_buffer).cast("B")
        octets.zero(self.valid, used, length - used)

    def buffers(self, values: int) -> list[pa.Buffer | None]:
        """The bitmap, and the first `values` values."""
        assert self.values_buffer is not None, "a column without rows has no buffers"
        return [self.valid_buffer, self.values_buffer.slice(0, values * self.width)]

    def finish(self, kind: pa.DataType) -> pa.Array:
        """The array; empties the column."""
        array = pa.Array.from_buffers(kind, self.count, self.buffers(self.count), self.nulls)
        self.reset()
        return array

    def reset(self) -> None:
        self.next_capacity = max(_ROWS_MIN, self.count)
        self.count = self.nulls = self.capacity = 0
        self.values = self._empty
        self.valid = self._empty
        self.values_buffer = self.valid_buffer = None


class TextColumn:
    """Strings or bytes that are copied from `source`: offsets and data."""

    def __init__(self, enabled: bool) -> None:
        self.enabled: bool = enabled  # whether the reader wants this column
        self.offsets: Column = Column(enabled)
        self.source: memoryview = memoryview(b"\0")  # the bytes to copy from; set by the batch
        self.used: int = 0  # bytes of data, until `reset`
        self.capacity: int = 0  # bytes that the data buffer has space for
        self.next_capacity: int = _DATA_MIN  # the capacity of the next buffer
        self._empty: memoryview = memoryview(bytearray(1))  # stands for a missing buffer
        self.data: memoryview = self._empty  # view of data_buffer
        self.data_buffer: pa.Buffer | None = None

    def put(self, at: int, length: int) -> None:
        """Add the text at this position of the source."""
        if self.used + length + _SLACK > self.capacity:
            self._grow(length)
        byte_access.copy_text(self.data, self.used, self.source, at, length)
        self.used += length
        self.offsets.end_row(self.used)

    def put_properties(self, record: RecordView, part: int) -> None:
        """Add all names (`part` 0) or values (1) of a record's properties."""
        offsets = self.offsets
        self.reserve(record.text_length)
        while offsets.count + record.property_count > offsets.capacity:
            offsets.grow()
        self.used = byte_access.copy_properties(
            self.data,
            self.used,
            offsets.values,
            offsets.count + 1,
            self.source,
            record.text_at,
            record.spans,
            part,
            record.property_count,
        )
        offsets.count += record.property_count

    def put_many(
        self, base: int, places: memoryview, at: int, step: int, count: int, null: bool
    ) -> None:
        """Add texts with `byte_access.gather_texts`; with `null`, empty ones are null."""
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
        """Add the last `count` rows, none of them null, `times` times again."""
        offsets = self.offsets
        offsets.reserve(count * times)
        first = offsets.count - count
        begin = byte_access.native_i32(offsets.values, first)
        length = self.used - begin
        self.reserve(length * times)
        byte_access.repeat(self.data, begin, length, offsets.values, first + 1, count, times)
        self.used += length * times
        offsets.add(count * times)

    def put_nulls(self, count: int) -> None:
        self.offsets.end_null_rows(self.used, count)

    def put_bytes(self, text: bytes) -> None:
        self.reserve(len(text))
        self.end_row(octets.put_bytes(self.data, self.used, text))

    def put_null(self) -> None:
        self.offsets.end_null_row(self.used)

    def reserve(self, length: int) -> None:
        """Make space for `length` bytes at position `used` of the data."""
        if self.used + length + _SLACK > self.capacity:
            self._grow(length)

    def end_row(self, length: int) -> None:
        """Add a row of `length` bytes that were written at position `used`."""
        self.used += length
        self.offsets.end_row(self.used)

    def _grow(self, length: int) -> None:
        self.capacity = max(2 * self.capacity, self.next_capacity, self.used + length + _SLACK)
        self.data_buffer = _grow_buffer(self.data, self.used, self.capacity)
        self.data = memoryview(self.data_buffer).cast("B")

    def finish(self, kind: pa.DataType) -> pa.Array:
        """The array; empties the column."""
        count = self.offsets.count
        if count == 0:  # the entries of empty maps
            return pa.array([], kind)
        buffers = self.offsets.buffers(count + 1)
        buffers.append(_EMPTY if self.data_buffer is None else self.data_buffer.slice(0, self.used))
        array = pa.Array.from_buffers(kind, count, buffers, self.offsets.nulls)
        self.reset()
        return array

    def reset(self) -> None:
        self.next_capacity = max(_DATA_MIN, self.used + self.used // 8)
        self.used = self.capacity = 0
        self.data = self._empty
        self.data_buffer = None
        self.offsets.reset()
