"""Rows as columns (`arrays`) that become a record batch without a copy.

Rows are added from one parsed record (`record_view`), or from a chunk of plain records
(`record_chunk`). Offsets of texts have 32 bits: callers check `fits` before they add a row.
"""

from collections.abc import Sequence

import pyarrow as pa

from penstock.arrow import message_schema
from penstock.arrow.columns import byte_access
from penstock.arrow.columns.arrays import Column, TextColumn
from penstock.arrow.columns.record_chunk import (
    AT,
    BODY,
    KEYS,
    NAMES,
    PROPERTIES_END,
    SPAN_WIDTH,
    STORE_AT,
    TAGS,
    TOPIC,
    UNIQUE,
    VALUES,
    WIDTH,
    RecordChunk,
)
from penstock.arrow.columns.record_view import NO_NUMBER, RecordView
from penstock.client.received_message import BODY_BYTES_MAX
from penstock.errors import CompressionError
from penstock.wire import layout, octets
from penstock.wire.codes import SYS_COMPRESSED
from penstock.wire.compression import decompress
from penstock.wire.message import decode_host

COLUMN_BYTES_MAX = 1 << 30
# Copies with a C type, which are not visible from outside.
_COLUMN_BYTES_MAX = COLUMN_BYTES_MAX
_COMPRESSED, _NO_NUMBER = SYS_COMPRESSED, NO_NUMBER
_SLACK = byte_access.COPY_SLACK
_MS_MAX = (2**63 - 1) // 1000
_I32_MAX = 2**31 - 1
_DOT, _COLON = b".:"
_ID_BYTES_MAX = 2 * (20 + 8)
_IPV4_BYTES_MAX = 27
_AT, _STORE_AT, _BODY, _TOPIC, _UNIQUE = AT, STORE_AT, BODY, TOPIC, UNIQUE
_TAGS, _KEYS, _PROPERTIES_END, _WIDTH = TAGS, KEYS, PROPERTIES_END, WIDTH
_NAMES, _VALUES, _SPAN_WIDTH = NAMES, VALUES, SPAN_WIDTH

_TEXT_COLUMNS = (
    "topic",
    "broker",
    "message_id",
    "tags",
    "keys",
    "body",
    "born_host",
    "store_host",
    "offset_id",
    "transaction_id",
)
_NUMBER_COLUMNS = {
    "queue_id": 4,
    "queue_offset": 8,
    "born_timestamp": 8,
    "store_timestamp": 8,
    "reconsume_times": 4,
    "delay_level": 4,
    "deliver_timestamp": 8,
    "flag": 4,
    "sys_flag": 4,
    "commit_log_offset": 8,
}
"""The bytes of a value by column."""


class RowBatch:
    """Rows with some of the columns `message_schema.FIELDS`.

    `topic` and `broker` are the same in every row; the defaults are the record's topic and null.
    """

    def __init__(self, columns: Sequence[str], topic: bytes | None, broker: bytes | None) -> None:
        self.rows: int = 0  # until `take`
        self.size: int = 0  # bytes of the rows, until `take`
        self._found: RecordView = RecordView()  # reused by `_view_of`
        self._schema: pa.Schema = message_schema.arrow_schema(columns)
        enabled = {name: name in columns for name in message_schema.FIELDS}
        texts = {name: TextColumn(enabled[name]) for name in _TEXT_COLUMNS}
        numbers = {name: Column(enabled[name], width) for name, width in _NUMBER_COLUMNS.items()}
        self._topic: TextColumn = texts["topic"]
        self._broker: TextColumn = texts["broker"]
        self._message_id: TextColumn = texts["message_id"]
        self._tags: TextColumn = texts["tags"]
        self._keys: TextColumn = texts["keys"]
        self._body: TextColumn = texts["body"]
        self._born_host: TextColumn = texts["born_host"]
        self._store_host: TextColumn = texts["store_host"]
        self._offset_id: TextColumn = texts["offset_id"]
        self._transaction_id: TextColumn = texts["transaction_id"]
        self._properties: Column = Column(enabled["properties"])
        self._property_names: TextColumn = TextColumn(enabled["properties"])
        self._property_values: TextColumn = TextColumn(enabled["properties"])
        self._queue_id: Column = numbers["queue_id"]
        self._reconsume_times: Column = numbers["reconsume_times"]
        self._flag: Column = numbers["flag"]
        self._sys_flag: Column = numbers["sys_flag"]
        self._delay_level: Column = numbers["delay_level"]
        self._queue_offset: Column = numbers["queue_offset"]
        self._log_offset: Column = numbers["commit_log_offset"]
        self._born: Column = numbers["born_timestamp"]
        self._store: Column = numbers["store_timestamp"]
        self._deliver: Column = numbers["deliver_timestamp"]
        arrays: dict[str, Column | TextColumn] = {**texts, **numbers}
        self._order: list[tuple[Column | TextColumn | None, pa.DataType]] = [
            (arrays.get(field.name), field.type) for field in self._schema
        ]  # None for the map of properties, which is three columns here
        # A value that all rows share is copied like any other, from its own source.
        self._topic_length: int = -1 if topic is None else len(topic)
        self._topic.source = memoryview((topic or b"") + bytes(_SLACK))
        self._broker_length: int = -1 if broker is None else len(broker)
        self._broker.source = memoryview((broker or b"") + bytes(_SLACK))
        # Which groups of columns are enabled, and what they need of a record.
        self._delays: bool = enabled["delay_level"] or enabled["deliver_timestamp"]
        self._hosts: bool = enabled["born_host"] or enabled["store_host"] or enabled["offset_id"]
        self._rare: bool = any(enabled[name] for name in _RARE)
        self.needs_distinct: bool = enabled["properties"]
        self.needs_body: bool = enabled["body"]
        self.needs_topic: bool = enabled["topic"] and topic is None
        self.needs_properties: bool = any(enabled[name] for name in _FROM_PROPERTIES)
        self._row_bytes: int = sum(8 if kind in _WIDE else 4 for kind in self._schema.types)
        # The maximum size of a row without the bytes copied from its record.
        self.row_bytes_max: int = (
            self._row_bytes + max(self._topic_length, 0) + max(self._broker_length, 0) + 4 * 64
        )

    def bind(self, source: memoryview) -> None:
        """Set the bytes that contain the next records."""
        if self._topic_length < 0:
            self._topic.source = source
        self._body.source = source
        self._found.bind(source)
        self._bind_text(source)

    def _bind_text(self, text: memoryview) -> None:
        self._message_id.source = text
        self._tags.source = text
        self._keys.source = text
        self._transaction_id.source = text
        self._property_names.source = text
        self._property_values.source = text

    def fits(self, record_bytes: int) -> bool:
        """Whether a record of this size can be added."""
        return self.rows == 0 or self.size + record_bytes <= _COLUMN_BYTES_MAX

    def add(self, record: RecordView) -> bool:
        """Add a row; False if the body can't be decompressed. If `needs_properties`, the properties
        must have been parsed."""
        if self._body.enabled:
            if record.sys_flag & _COMPRESSED:
                if not self._put_decompressed(record):
                    return False
            else:
                self._body.put(record.body_at, record.body_length)
        if record.rewritten:
            self._bind_text(record.text)
        self._put_numbers(record)
        self._put_texts(record)
        if self._properties.enabled:
            self._put_properties(record)
        if self._delays:
            self._put_delays(record)
        if self._rare:
            self._put_rare(record)
        if record.rewritten:
            self._bind_text(record.source)
        self.rows += 1
        self._update_size()
        return True

    def _put_decompressed(self, record: RecordView) -> bool:
        body = record.raw(record.body_at, record.body_length)
        try:
            self._body.put_bytes(decompress(body, record.sys_flag, limit=BODY_BYTES_MAX))
        except CompressionError:
            return False
        return True

    def _put_numbers(self, record: RecordView) -> None:
        at = record.at
        if self._queue_id.enabled:
            self._queue_id.put(octets.get_i32(record.source, at + layout.QUEUE_ID_AT))
        if self._queue_offset.enabled:
            self._queue_offset.put(octets.get_i64(record.source, at + layout.QUEUE_OFFSET_AT))
        if self._born.enabled:
            self._born.put(_to_micros(octets.get_i64(record.source, at + layout.BORN_MS_AT)))
        if self._store.enabled:
            self._store.put(_to_micros(octets.get_i64(record.source, record.store_at)))
        if self._reconsume_times.enabled:
            at = record.body_at - layout.RECONSUME_TIMES_BEFORE_BODY
            self._reconsume_times.put(octets.get_i32(record.source, at))

    def _put_texts(self, record: RecordView) -> None:
        if self._topic.enabled:
            self._put_topic(record)
        if self._broker.enabled:
            if self._broker_length < 0:
                self._broker.put_null()
            else:
                self._broker.put(0, self._broker_length)
        if self._message_id.enabled:
            if record.unique_length > 0:
                self._message_id.put(record.unique_at, record.unique_length)
            else:
                self._put_offset_id(self._message_id, record)
        if self._tags.enabled:
            if record.tags_length > 0:
                self._tags.put(record.tags_at, record.tags_length)
            else:
                self._tags.put_null()
        if self._keys.enabled:
            if record.keys_length > 0:
                self._keys.put(record.keys_at, record.keys_length)
            else:
                self._keys.put_null()

    def _put_topic(self, record: RecordView) -> None:
        if self._topic_length >= 0:
            self._topic.put(0, self._topic_length)
        elif octets.is_ascii(record.source, record.topic_at, record.topic_length):
            self._topic.put(record.topic_at, record.topic_length)
        else:
            topic = record.raw(record.topic_at, record.topic_length)
            self._topic.put_bytes(topic.decode("utf-8", "replace").encode())

    def _put_properties(self, record: RecordView) -> None:
        if record.property_count > 0:
            self._property_names.put_properties(record, 0)
            self._property_values.put_properties(record, 1)
        self._properties.end_row(self._property_names.offsets.count)

    def _put_delays(self, record: RecordView) -> None:
        if self._delay_level.enabled:
            level = _NO_NUMBER
            if record.level_length > 0:
                level = record.number(record.level_at, record.level_length)
            if -_I32_MAX <= level <= _I32_MAX:
                self._delay_level.put(level)
            else:
                self._delay_level.put_null()
        if self._deliver.enabled:
            due_ms = _NO_NUMBER
            if record.deliver_length > 0:
                due_ms = record.number(record.deliver_at, record.deliver_length)
            elif record.delay_length > 0:
                due_ms = _due_ms(
                    octets.get_i64(record.source, record.at + layout.BORN_MS_AT),
                    record.number(record.delay_at, record.delay_length),
                    record.delay_unit_ms,
                )
            if due_ms == _NO_NUMBER:
                self._deliver.put_null()
            else:
                self._deliver.put(_to_micros(due_ms))

    def _put_rare(self, record: RecordView) -> None:
        at = record.at
        if self._flag.enabled:
            self._flag.put(octets.get_i32(record.source, at + layout.FLAG_AT))
        if self._sys_flag.enabled:
            self._sys_flag.put(record.sys_flag)
        if self._log_offset.enabled:
            self._log_offset.put(octets.get_i64(record.source, at + layout.PHYSICAL_OFFSET_AT))
        if self._hosts:
            self._put_hosts(record)
        if self._transaction_id.enabled:
            self._put_transaction_id(record)

    def _put_hosts(self, record: RecordView) -> None:
        if self._born_host.enabled:
            at = record.at + layout.BORN_HOST_AT
            _put_host(self._born_host, record, at, record.born_host_length)
        if self._store_host.enabled:
            at = record.at + layout.store_host_at(record.sys_flag)
            _put_host(self._store_host, record, at, record.store_host_length)
        if self._offset_id.enabled:
            self._put_offset_id(self._offset_id, record)

    def _put_transaction_id(self, record: RecordView) -> None:
        if record.transaction_length > 0:
            self._transaction_id.put(record.transaction_at, record.transaction_length)
        elif record.unique_length > 0:
            self._transaction_id.put(record.unique_at, record.unique_length)
        else:
            self._transaction_id.put_null()

    def _put_offset_id(self, column: TextColumn, record: RecordView) -> None:
        length = record.store_host_length
        column.reserve(_ID_BYTES_MAX)
        at = record.at + layout.store_host_at(record.sys_flag)
        octets.put_hex(column.data, column.used, record.source, at, length)
        at = record.at + layout.PHYSICAL_OFFSET_AT
        octets.put_hex(column.data, column.used + 2 * length, record.source, at, 8)
        column.end_row(2 * length + 16)

    # --- many rows at once

    def add_chunk(self, chunk: RecordChunk) -> None:
        """Add rows of plain records, which are in the bound bytes."""
        rows = chunk.rows
        if self._body.enabled:
            self._body.put_many(chunk.base, chunk.places, _BODY, _WIDTH, rows, False)
        self._put_many_numbers(chunk)
        self._put_many_texts(chunk)
        if self._properties.enabled:
            self._put_many_properties(chunk)
        if self._delays:
            self._put_many_delays(chunk)
        if self._rare:
            self._put_many_rare(chunk)
        self.rows += rows
        self._update_size()

    def _view_of(self, chunk: RecordChunk, row: int) -> RecordView:
        """The record of this row of the chunk."""
        record = self._found
        at = chunk.base + chunk.places[row * _WIDTH]
        problem = record.parse(at, at + octets.get_i32(chunk.source, at + layout.SIZE_AT))
        assert problem == 0, "the record has been parsed before"
        return record

    def _put_many_numbers(self, chunk: RecordChunk) -> None:
        source, base, places, rows = chunk.source, chunk.base, chunk.places, chunk.rows
        if self._queue_id.enabled:
            at = base + layout.QUEUE_ID_AT
            self._queue_id.put_many(source, at, places, _AT, _WIDTH, rows)
        if self._queue_offset.enabled:
            at = base + layout.QUEUE_OFFSET_AT
            self._queue_offset.put_many(source, at, places, _AT, _WIDTH, rows)
        if self._born.enabled:
            at = base + layout.BORN_MS_AT
            self._born.put_many(source, at, places, _AT, _WIDTH, rows)
            self._born.scale(_MS_MAX, 1000, rows)
        if self._store.enabled:
            self._store.put_many(source, base, places, _STORE_AT, _WIDTH, rows)
            self._store.scale(_MS_MAX, 1000, rows)
        if self._reconsume_times.enabled:
            at = base - layout.RECONSUME_TIMES_BEFORE_BODY
            self._reconsume_times.put_many(source, at, places, _BODY, _WIDTH, rows)

    def _put_many_texts(self, chunk: RecordChunk) -> None:
        base, places, rows = chunk.base, chunk.places, chunk.rows
        if self._topic.enabled:
            if self._topic_length >= 0:
                self._topic.put(0, self._topic_length)
                self._topic.repeat(1, rows - 1)
            elif chunk.same_topic:
                self._topic.put_many(base, places, _TOPIC, _WIDTH, 1, False)
                self._topic.repeat(1, rows - 1)
            else:
                self._topic.put_many(base, places, _TOPIC, _WIDTH, rows, False)
        if self._broker.enabled:
            if self._broker_length >= 0:
                self._broker.put(0, self._broker_length)
                self._broker.repeat(1, rows - 1)
            else:
                self._broker.put_nulls(rows)
        if self._message_id.enabled:
            if byte_access.count_zeros(places, _UNIQUE + 1, _WIDTH, rows) == 0:
                self._message_id.put_many(base, places, _UNIQUE, _WIDTH, rows, False)
            else:
                self._put_message_ids(chunk)
        if self._tags.enabled:
            self._tags.put_many(base, places, _TAGS, _WIDTH, rows, True)
        if self._keys.enabled:
            self._keys.put_many(base, places, _KEYS, _WIDTH, rows, True)

    def _put_message_ids(self, chunk: RecordChunk) -> None:
        """A message without UNIQ_KEY has its offset id."""
        for row in range(chunk.rows):
            at = row * _WIDTH + _UNIQUE
            if chunk.places[at + 1] > 0:
                self._message_id.put(chunk.base + chunk.places[at], chunk.places[at + 1])
            else:
                self._put_offset_id(self._message_id, self._view_of(chunk, row))

    def _put_many_properties(self, chunk: RecordChunk) -> None:
        before = self._property_names.offsets.count
        if chunk.same_names and chunk.property_count > 0:
            property_count = chunk.property_count // chunk.rows
            self._property_names.put_many(
                chunk.base, chunk.spans, _NAMES, _SPAN_WIDTH, property_count, False
            )
            self._property_names.repeat(property_count, chunk.rows - 1)
        else:
            self._property_names.put_many(
                chunk.base, chunk.spans, _NAMES, _SPAN_WIDTH, chunk.property_count, False
            )
        self._property_values.put_many(
            chunk.base, chunk.spans, _VALUES, _SPAN_WIDTH, chunk.property_count, False
        )
        self._properties.reserve(chunk.rows)
        for row in range(chunk.rows):
            self._properties.end_row(before + chunk.places[row * _WIDTH + _PROPERTIES_END])

    def _put_many_delays(self, chunk: RecordChunk) -> None:
        if chunk.rare:
            for row in range(chunk.rows):
                record = self._view_of(chunk, row)
                record.parse_properties(False)
                self._put_delays(record)
        else:
            if self._delay_level.enabled:
                self._delay_level.put_nulls(chunk.rows)
            if self._deliver.enabled:
                self._deliver.put_nulls(chunk.rows)

    def _put_many_rare(self, chunk: RecordChunk) -> None:
        source, base, places, rows = chunk.source, chunk.base, chunk.places, chunk.rows
        if self._flag.enabled:
            at = base + layout.FLAG_AT
            self._flag.put_many(source, at, places, _AT, _WIDTH, rows)
        if self._sys_flag.enabled:
            at = base + layout.SYS_FLAG_AT
            self._sys_flag.put_many(source, at, places, _AT, _WIDTH, rows)
        if self._log_offset.enabled:
            at = base + layout.PHYSICAL_OFFSET_AT
            self._log_offset.put_many(source, at, places, _AT, _WIDTH, rows)
        if self._hosts:
            for row in range(rows):
                self._put_hosts(self._view_of(chunk, row))
        if self._transaction_id.enabled:
            if chunk.rare:
                for row in range(rows):
                    record = self._view_of(chunk, row)
                    record.parse_properties(False)
                    self._put_transaction_id(record)
            else:
                self._transaction_id.put_many(base, places, _UNIQUE, _WIDTH, rows, True)

    def _update_size(self) -> None:
        self.size = (
            self.rows * self._row_bytes
            + 8 * self._property_names.offsets.count
            + self._topic.used
            + self._broker.used
            + self._message_id.used
            + self._tags.used
            + self._keys.used
            + self._body.used
            + self._property_names.used
            + self._property_values.used
            + self._born_host.used
            + self._store_host.used
            + self._offset_id.used
            + self._transaction_id.used
        )

    def take(self) -> pa.RecordBatch:
        """The rows; empties the batch."""
        if self.rows == 0:
            return pa.RecordBatch.from_pylist([], schema=self._schema)
        arrays = [
            self._finish_maps(kind) if column is None else column.finish(kind)
            for column, kind in self._order
        ]
        self.rows = self.size = 0
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _finish_maps(self, kind: pa.MapType) -> pa.Array:
        offsets, count = self._properties.buffers(self._properties.count + 1), self.rows
        self._properties.reset()
        entries = pa.StructArray.from_arrays(
            [
                self._property_names.finish(kind.key_type),
                self._property_values.finish(kind.item_type),
            ],
            fields=[kind.key_field, kind.item_field],
        )
        return pa.Array.from_buffers(kind, count, offsets, 0, children=[entries])


_FROM_PROPERTIES = (
    "message_id",
    "tags",
    "keys",
    "properties",
    "delay_level",
    "deliver_timestamp",
    "transaction_id",
)
_WIDE = (pa.int64(), message_schema.FIELDS["born_timestamp"][0])
_RARE = tuple(message_schema.FIELDS)[len(message_schema.DEFAULT_COLUMNS) :]


def _to_micros(ms: int) -> int:
    """Milliseconds as microseconds, clamped to 64 bits."""
    return max(-_MS_MAX, min(ms, _MS_MAX)) * 1000


def _due_ms(born_ms: int, delay: int, unit_ms: int) -> int:
    """The delivery time of a message that was sent at `born_ms`, or _NO_NUMBER."""
    if delay == _NO_NUMBER:
        return _NO_NUMBER
    limit = _MS_MAX // 1000
    return max(-_MS_MAX, min(born_ms, _MS_MAX)) + max(-limit, min(delay, limit)) * unit_ms


def _put_host(column: TextColumn, record: RecordView, at: int, length: int) -> None:
    """Add the address and port as `wire.message.decode_host` formats them."""
    if length == 8:
        _put_ipv4(column, record, at)
    else:
        column.put_bytes(decode_host(record.raw(at, length)).encode())


def _put_ipv4(column: TextColumn, record: RecordView, at: int) -> None:
    column.reserve(_IPV4_BYTES_MAX)
    place = column.used
    for i in range(4):
        place += octets.put_decimal(column.data, place, record.source[at + i])
        column.data[place] = _DOT if i < 3 else _COLON
        place += 1
    place += octets.put_decimal(column.data, place, octets.get_i32(record.source, at + 4))
    column.end_row(place - column.used)
