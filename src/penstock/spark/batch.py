"""Arrow columns that grow row by row and become a record batch without a copy.

Buffers are Arrow's own, doubled when they are full; after `take` the next ones are as long as the
last came out. Offsets of texts have 32 bits: whoever adds rows asks `has_room` before.
"""

from collections.abc import Sequence

import pyarrow as pa

from penstock.client.records import BODY_BYTES_MAX
from penstock.errors import CompressionError
from penstock.spark import cells, schema
from penstock.spark.placed import NO_NUMBER, PlacedRecord
from penstock.wire import octets
from penstock.wire.codes import SYS_COMPRESSED
from penstock.wire.compress import decompress
from penstock.wire.message import decode_host

COLUMN_BYTES_MAX = 1 << 30
# Twins for the compiler, which keeps them to itself.
_COLUMN_BYTES_MAX = COLUMN_BYTES_MAX
_COMPRESSED, _NO_NUMBER = SYS_COMPRESSED, NO_NUMBER
_SLACK = cells.COPY_SLACK
_ROWS_MIN, _DATA_MIN = 1024, 16 * 1024
_MS_MAX = (2**63 - 1) // 1000
_I32_MAX = 2**31 - 1
_DOT, _COLON = b".:"
_ID_BYTES_MAX = 2 * (20 + 8)
_IPV4_BYTES_MAX = 27
_EMPTY = pa.py_buffer(b"")


def _grown(old: memoryview, used: int, room: int) -> pa.Buffer:
    """A buffer of `room` bytes that begins with what was used of the old one."""
    made = pa.allocate_buffer(room)
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
        self.values: memoryview = memoryview(bytearray(1))
        self.valid: memoryview = self.values
        self.values_buffer: pa.Buffer | None = None
        self.valid_buffer: pa.Buffer | None = None

    def put(self, value: int) -> None:
        if self.count == self.room:
            self.grow()
        if self.nulls > 0:
            cells.set_bit(self.valid, self.count)
        if self.width == 4:
            cells.put_i32(self.values, self.count, value)
        else:
            cells.put_i64(self.values, self.count, value)
        self.count += 1

    def put_null(self) -> None:
        self._note_null()
        if self.width == 4:
            cells.put_i32(self.values, self.count, 0)
        else:
            cells.put_i64(self.values, self.count, 0)
        self.count += 1

    def close(self, end: int) -> None:
        """A row of offsets: it ends there, and began where the one before ended."""
        if self.count == self.room:
            self.grow()
        if self.nulls > 0:
            cells.set_bit(self.valid, self.count)
        self.count += 1
        cells.put_i32(self.values, self.count, end)

    def close_null(self, end: int) -> None:
        self._note_null()
        self.count += 1
        cells.put_i32(self.values, self.count, end)

    def _note_null(self) -> None:
        if self.count == self.room:
            self.grow()
        if self.nulls == 0:  # all before it are valid
            self._make_bitmap(0)
            for row in range(self.count):
                cells.set_bit(self.valid, row)
        self.nulls += 1

    def grow(self) -> None:
        before = self.room
        used = (before + 1) * self.width if before > 0 else 0
        self.room = max(2 * before, self.room_next)
        self.values_buffer = _grown(self.values, used, (self.room + 1) * self.width)
        self.values = memoryview(self.values_buffer).cast("B")
        if before == 0:
            cells.put_i32(self.values, 0, 0)  # where offsets begin
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
        self.values = self.valid = memoryview(bytearray(1))
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
        self.data: memoryview = memoryview(bytearray(1))
        self.data_buffer: pa.Buffer | None = None

    def put(self, at: int, length: int) -> None:
        """The text at this place of the source."""
        if self.used + length + _SLACK > self.room:
            self._grow(length)
        cells.copy_text(self.data, self.used, self.source, at, length)
        self.used += length
        self.offsets.close(self.used)

    def put_pieces(self, record: PlacedRecord, part: int) -> None:
        """All names (`part` 0) or values (1) of a record's properties."""
        offsets = self.offsets
        self.reserve(record.text_length)
        while offsets.count + record.pieces > offsets.room:
            offsets.grow()
        self.used = cells.copy_pieces(
            self.data, self.used, offsets.values, offsets.count + 1, self.source, record.text_at,
            record.spans, part, record.pieces,
        )  # fmt: skip
        offsets.count += record.pieces

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
        self.data = memoryview(bytearray(1))
        self.data_buffer = None
        self.offsets.forget()


class RowBatch:
    """Rows of some of `schema.FIELDS`, made of placed records.

    `topic` and `broker` are said of every row; without them the topic is the record's and the
    broker null.
    """

    def __init__(self, columns: Sequence[str], topic: bytes | None, broker: bytes | None) -> None:
        self.rows: int = 0
        self.size: int = 0
        self._schema: pa.Schema = schema.arrow_schema(columns)
        on = {name: name in columns for name in schema.FIELDS}
        self._topic: Texts = Texts(on["topic"])
        self._broker: Texts = Texts(on["broker"])
        self._message_id: Texts = Texts(on["message_id"])
        self._tags: Texts = Texts(on["tags"])
        self._keys: Texts = Texts(on["keys"])
        self._body: Texts = Texts(on["body"])
        self._born_host: Texts = Texts(on["born_host"])
        self._store_host: Texts = Texts(on["store_host"])
        self._offset_id: Texts = Texts(on["offset_id"])
        self._transaction_id: Texts = Texts(on["transaction_id"])
        self._properties: Column = Column(on["properties"])
        self._names: Texts = Texts(on["properties"])
        self._contents: Texts = Texts(on["properties"])
        self._queue_id: Column = Column(on["queue_id"])
        self._reconsume_times: Column = Column(on["reconsume_times"])
        self._flag: Column = Column(on["flag"])
        self._sys_flag: Column = Column(on["sys_flag"])
        self._delay_level: Column = Column(on["delay_level"])
        self._queue_offset: Column = Column(on["queue_offset"], 8)
        self._log_offset: Column = Column(on["commit_log_offset"], 8)
        self._born: Column = Column(on["born_timestamp"], 8)
        self._store: Column = Column(on["store_timestamp"], 8)
        self._deliver: Column = Column(on["deliver_timestamp"], 8)
        # What all rows say is copied like anything else, from a source of its own.
        self._topic_length: int = -1 if topic is None else len(topic)
        self._topic.source = memoryview((topic or b"") + bytes(_SLACK))
        self._broker_length: int = -1 if broker is None else len(broker)
        self._broker.source = memoryview((broker or b"") + bytes(_SLACK))
        self._delays: bool = on["delay_level"] or on["deliver_timestamp"]
        self._rare: bool = any(on[name] for name in _RARE)
        self.needs_distinct: bool = on["properties"]
        self.needs_properties: bool = any(on[name] for name in _FROM_PROPERTIES)
        self._row_bytes: int = sum(8 if kind in _WIDE else 4 for kind in self._schema.types)

    def bind(self, source: memoryview) -> None:
        """Take the bytes that the next records lie in."""
        if self._topic_length < 0:
            self._topic.source = source
        self._body.source = source
        self._bind_text(source)

    def _bind_text(self, text: memoryview) -> None:
        self._message_id.source = text
        self._tags.source = text
        self._keys.source = text
        self._transaction_id.source = text
        self._names.source = text
        self._contents.source = text

    def has_room(self, record_bytes: int) -> bool:
        """Whether a record of this size may still be added."""
        return self.rows == 0 or self.size + record_bytes <= _COLUMN_BYTES_MAX

    def add(self, record: PlacedRecord) -> bool:
        """A row; False where the body can't be unpacked. The properties have been scanned, if
        `needs_properties`."""
        if self._body.on:
            if record.sys_flag & _COMPRESSED:
                if not self._put_unpacked(record):
                    return False
            else:
                self._body.put(record.body_at, record.body_length)
        if record.rewritten:
            self._bind_text(record.text)
        self._put_numbers(record)
        self._put_texts(record)
        if self._properties.on:
            self._put_properties(record)
        if self._delays:
            self._put_delays(record)
        if self._rare:
            self._put_rare(record)
        if record.rewritten:
            self._bind_text(record.source)
        self.rows += 1
        self._weigh()
        return True

    def _put_unpacked(self, record: PlacedRecord) -> bool:
        body = record.raw(record.body_at, record.body_length)
        try:
            self._body.put_bytes(decompress(body, record.sys_flag, limit=BODY_BYTES_MAX))
        except CompressionError:
            return False
        return True

    def _put_numbers(self, record: PlacedRecord) -> None:
        at = record.at
        if self._queue_id.on:
            self._queue_id.put(octets.get_i32(record.source, at + 12))
        if self._queue_offset.on:
            self._queue_offset.put(octets.get_i64(record.source, at + 20))
        if self._born.on:
            self._born.put(_micros(octets.get_i64(record.source, at + 40)))
        if self._store.on:
            self._store.put(_micros(octets.get_i64(record.source, record.store_at)))
        if self._reconsume_times.on:
            self._reconsume_times.put(octets.get_i32(record.source, record.body_at - 16))

    def _put_texts(self, record: PlacedRecord) -> None:
        if self._topic.on:
            self._put_topic(record)
        if self._broker.on:
            if self._broker_length < 0:
                self._broker.put_null()
            else:
                self._broker.put(0, self._broker_length)
        if self._message_id.on:
            if record.unique_length > 0:
                self._message_id.put(record.unique_at, record.unique_length)
            else:
                self._put_offset_id(self._message_id, record)
        if self._tags.on:
            if record.tags_length > 0:
                self._tags.put(record.tags_at, record.tags_length)
            else:
                self._tags.put_null()
        if self._keys.on:
            if record.keys_length > 0:
                self._keys.put(record.keys_at, record.keys_length)
            else:
                self._keys.put_null()

    def _put_topic(self, record: PlacedRecord) -> None:
        if self._topic_length >= 0:
            self._topic.put(0, self._topic_length)
        elif octets.is_ascii(record.source, record.topic_at, record.topic_length):
            self._topic.put(record.topic_at, record.topic_length)
        else:
            topic = record.raw(record.topic_at, record.topic_length)
            self._topic.put_bytes(topic.decode("utf-8", "replace").encode())

    def _put_properties(self, record: PlacedRecord) -> None:
        if record.pieces > 0:
            self._names.put_pieces(record, 0)
            self._contents.put_pieces(record, 1)
        self._properties.close(self._names.offsets.count)

    def _put_delays(self, record: PlacedRecord) -> None:
        if self._delay_level.on:
            level = _NO_NUMBER
            if record.level_length > 0:
                level = record.number(record.level_at, record.level_length)
            if -_I32_MAX <= level <= _I32_MAX:
                self._delay_level.put(level)
            else:
                self._delay_level.put_null()
        if self._deliver.on:
            due_ms = _NO_NUMBER
            if record.deliver_length > 0:
                due_ms = record.number(record.deliver_at, record.deliver_length)
            elif record.delay_length > 0:
                due_ms = _after(
                    octets.get_i64(record.source, record.at + 40),
                    record.number(record.delay_at, record.delay_length),
                    record.delay_unit_ms,
                )
            if due_ms == _NO_NUMBER:
                self._deliver.put_null()
            else:
                self._deliver.put(_micros(due_ms))

    def _put_rare(self, record: PlacedRecord) -> None:
        at = record.at
        if self._flag.on:
            self._flag.put(octets.get_i32(record.source, at + 16))
        if self._sys_flag.on:
            self._sys_flag.put(record.sys_flag)
        if self._log_offset.on:
            self._log_offset.put(octets.get_i64(record.source, at + 28))
        if self._born_host.on:
            _put_host(self._born_host, record, at + 48, record.born_host_length)
        if self._store_host.on:
            _put_host(self._store_host, record, record.store_at + 8, record.store_host_length)
        if self._offset_id.on:
            self._put_offset_id(self._offset_id, record)
        if self._transaction_id.on:
            if record.transaction_length > 0:
                self._transaction_id.put(record.transaction_at, record.transaction_length)
            elif record.unique_length > 0:
                self._transaction_id.put(record.unique_at, record.unique_length)
            else:
                self._transaction_id.put_null()

    def _put_offset_id(self, column: Texts, record: PlacedRecord) -> None:
        length = record.store_host_length
        column.reserve(_ID_BYTES_MAX)
        octets.put_hex(column.data, column.used, record.source, record.store_at + 8, length)
        octets.put_hex(column.data, column.used + 2 * length, record.source, record.at + 28, 8)
        column.close(2 * length + 16)

    def _weigh(self) -> None:
        self.size = (
            self.rows * self._row_bytes + 8 * self._names.offsets.count
            + self._topic.used + self._broker.used + self._message_id.used + self._tags.used
            + self._keys.used + self._body.used + self._names.used + self._contents.used
            + self._born_host.used + self._store_host.used + self._offset_id.used
            + self._transaction_id.used
        )  # fmt: skip

    def take(self) -> pa.RecordBatch:
        """The rows; there are none after that."""
        if self.rows == 0:
            return pa.RecordBatch.from_pylist([], schema=self._schema)
        columns: dict[str, Column | Texts] = {
            "topic": self._topic, "broker": self._broker, "queue_id": self._queue_id,
            "queue_offset": self._queue_offset, "message_id": self._message_id, "tags": self._tags,
            "keys": self._keys, "body": self._body, "born_timestamp": self._born,
            "store_timestamp": self._store, "reconsume_times": self._reconsume_times,
            "delay_level": self._delay_level, "deliver_timestamp": self._deliver,
            "flag": self._flag, "sys_flag": self._sys_flag, "born_host": self._born_host,
            "store_host": self._store_host, "offset_id": self._offset_id,
            "commit_log_offset": self._log_offset, "transaction_id": self._transaction_id,
        }  # fmt: skip
        arrays = [
            self._finish_maps(field.type)
            if field.name == "properties"
            else columns[field.name].finish(field.type)
            for field in self._schema
        ]
        self.rows = self.size = 0
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _finish_maps(self, kind: pa.MapType) -> pa.Array:
        offsets, count = self._properties.buffers(self._properties.count + 1), self.rows
        self._properties.forget()
        entries = pa.StructArray.from_arrays(
            [self._names.finish(kind.key_type), self._contents.finish(kind.item_type)],
            fields=[kind.key_field, kind.item_field],
        )
        return pa.Array.from_buffers(kind, count, offsets, 0, children=[entries])


_FROM_PROPERTIES = (
    "message_id", "tags", "keys", "properties", "delay_level", "deliver_timestamp",
    "transaction_id",
)  # fmt: skip
_WIDE = (pa.int64(), schema.FIELDS["born_timestamp"][0])
_RARE = tuple(schema.FIELDS)[len(schema.DEFAULT_COLUMNS) :]


def _micros(ms: int) -> int:
    """Microseconds, as far as they go."""
    return max(-_MS_MAX, min(ms, _MS_MAX)) * 1000


def _after(born_ms: int, delay: int, unit_ms: int) -> int:
    """When what was sent at `born_ms` is due, or _NO_NUMBER."""
    if delay == _NO_NUMBER:
        return _NO_NUMBER
    limit = _MS_MAX // 1000
    return max(-_MS_MAX, min(born_ms, _MS_MAX)) + max(-limit, min(delay, limit)) * unit_ms


def _put_host(column: Texts, record: PlacedRecord, at: int, length: int) -> None:
    """Address and port as `wire.message.decode_host` writes them."""
    if length == 8:
        _put_ipv4(column, record, at)
    else:
        column.put_bytes(decode_host(record.raw(at, length)).encode())


def _put_ipv4(column: Texts, record: PlacedRecord, at: int) -> None:
    column.reserve(_IPV4_BYTES_MAX)
    place = column.used
    for i in range(4):
        place += octets.put_decimal(column.data, place, record.source[at + i])
        column.data[place] = _DOT if i < 3 else _COLON
        place += 1
    place += octets.put_decimal(column.data, place, octets.get_i32(record.source, at + 4))
    column.close(place - column.used)
