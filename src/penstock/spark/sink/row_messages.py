"""Rows of a DataFrame as messages.

    topic                string          the topic, unless the option `topic` is set
    body, or value       string, binary  required; a message has at least one byte
    tags                 string
    keys                 string (separated by spaces), or array<string>
    properties           map<string,string>
    queue_key            string or integer: rows with the same key go to one queue, in order
    delay_level          integer, RocketMQ's 1 to 18; 0 or null: no delay
    delay_ms             integer, from when the broker receives the message
    deliver_timestamp    timestamp; no delay if it is in the past
    flag                 integer

Columns that only the source has (`broker`, `queue_offset`, `message_id`, …) are ignored, and so are
RocketMQ's internal properties: rows that were read can be written unchanged. Any other column is
refused when the write is planned, because it would be lost silently. With delivery=transactional
rows with the same queue_key keep their order unless a request is retried: their order is that of
the commits, many of which are in flight at once.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import repeat
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from penstock.arrow.message_schema import FIELDS
from penstock.client.messages import Message
from penstock.client.producer.outgoing import check_topic
from penstock.errors import BadSetting, PenstockError, RowRefused
from penstock.wire.codes import (
    PROPERTY_CHECK_IMMUNITY_SECONDS,
    PROPERTY_FORWARD_QUEUE_ID,
    PROPERTY_INNER_BASE,
    PROPERTY_INNER_MULTI_DISPATCH,
    PROPERTY_INNER_NUM,
    PROPERTY_REDIRECT,
    PROPERTY_SHARDING_KEY,
    PROPERTY_TIMER_ROLL_LABEL,
    PROPERTY_TRACE_CONTEXT,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_TRANSACTION_ID,
    PROPERTY_TRANSIENT_PREFIX,
    RESERVED_PROPERTIES,
)

PROPERTY_SINK: Final = "PENSTOCK_SINK"
"""The sink that wrote a message: the option sinkId, the query's id, or an id of this write."""
PROPERTY_BATCH: Final = "PENSTOCK_BATCH"
PROPERTY_PARTITION: Final = "PENSTOCK_PARTITION"
PROPERTY_ATTEMPT: Final = "PENSTOCK_ATTEMPT"

DROPPED_PROPERTIES: Final = RESERVED_PROPERTIES | {
    PROPERTY_CHECK_IMMUNITY_SECONDS,
    PROPERTY_FORWARD_QUEUE_ID,
    PROPERTY_INNER_BASE,
    PROPERTY_INNER_MULTI_DISPATCH,
    PROPERTY_INNER_NUM,
    PROPERTY_REDIRECT,
    PROPERTY_SHARDING_KEY,
    PROPERTY_TIMER_ROLL_LABEL,
    PROPERTY_TRACE_CONTEXT,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_TRANSACTION_ID,
    PROPERTY_SINK,
    PROPERTY_BATCH,
    PROPERTY_PARTITION,
    PROPERTY_ATTEMPT,
}
"""Properties of a row that are not sent: they describe the message that the row was read from."""

_TEXT: Final = ("string",)
_BYTES: Final = ("string", "binary")
_NUMBERS: Final = ("tinyint", "smallint", "int", "bigint")
COLUMN_TYPES: Final[dict[str, tuple[str, ...]]] = {
    "topic": _TEXT,
    "body": _BYTES,
    "value": _BYTES,
    "tags": _TEXT,
    "keys": ("string", "array<string>"),
    "properties": ("map<string,string>",),
    "queue_key": ("string", *_NUMBERS),
    "delay_level": _NUMBERS,
    "delay_ms": _NUMBERS,
    "deliver_timestamp": ("timestamp",),
    "flag": _NUMBERS,
}
_IGNORED_COLUMNS: Final = frozenset(FIELDS) - frozenset(COLUMN_TYPES)
_DELAY_COLUMNS: Final = ("delay_level", "delay_ms", "deliver_timestamp")
_DROPPED_ARRAY: Final = pa.array(sorted(DROPPED_PROPERTIES))


class RowMessage(NamedTuple):
    """A row as a message; `row` is its number within the task, from 0."""

    row: int
    message: Message
    queue_key: str | None


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Which column holds which part of a message; made once, when the write is planned."""

    topic: str | None
    columns: Mapping[str, int]

    @classmethod
    def of(cls, columns: Iterable[tuple[str, str]], topic: str | None) -> "RowPlan":
        """From the names and Spark types of a DataFrame's columns; raises BadSetting."""
        places: dict[str, int] = {}
        for place, (name, kind) in enumerate(columns):
            part = _part_of(name, kind)
            if part is None:
                continue
            if part in places:
                raise BadSetting(
                    f"two columns hold the {part} of messages", hint="select one of them"
                )
            places[part] = place
        if "body" not in places:
            raise BadSetting(
                "no column holds the body of messages",
                hint="name one `body` or `value`, of type string or binary (for example with"
                " to_json(struct(*)))",
            )
        if topic is None and "topic" not in places:
            raise BadSetting(
                "no topic is named", hint="set the option topic, or add a column `topic`"
            )
        return cls(topic, places)


def _part_of(name: str, kind: str) -> str | None:
    part = name.lower()
    kinds = COLUMN_TYPES.get(part)
    if kinds is None:
        if part in _IGNORED_COLUMNS:
            return None
        raise BadSetting(
            f"the sink does not know the column {name!r}",
            hint=f"drop it, or put it into body or properties; known columns are"
            f" {', '.join(COLUMN_TYPES)}; these columns of the source are ignored:"
            f" {', '.join(sorted(_IGNORED_COLUMNS))}",
        )
    if kind not in kinds:
        raise BadSetting(
            f"the column {name!r} is of type {kind}", hint=f"cast it to {' or '.join(kinds)}"
        )
    return "body" if part == "value" else part


class RowReader:
    """Makes messages from the Arrow batches of one task; rows are numbered from 0."""

    def __init__(
        self,
        plan: RowPlan,
        *,
        partition: int,
        properties: Mapping[str, str],
        message_bytes_max: int,
        now_ms: int,
        allow_delays: bool = True,
    ) -> None:
        self._columns = plan.columns
        self._topic = plan.topic
        self._partition = partition
        self._sink_properties = dict(properties)
        self._bytes_max = message_bytes_max
        self._now_ms = now_ms
        self._allow_delays = allow_delays
        self._topics: set[str] = set()
        self.rows = 0
        """The number of rows read."""

    def read(self, batch: pa.RecordBatch) -> list[RowMessage]:
        """The messages of a batch; raises RowRefused."""
        count = batch.num_rows
        if count == 0:
            return []
        bodies = self._bodies(batch)
        topics = self._topics_of(batch)
        tags = self._column(batch, "tags")
        keys = self._keys(batch)
        properties = self._properties(batch)
        rows = range(self.rows, self.rows + count)
        messages = list(map(Message, topics, bodies, tags, keys, properties))
        self._set_flags(batch, messages)
        self._set_delays(batch, messages)
        queue_keys = self._queue_keys(batch)
        self.rows += count
        return list(map(RowMessage, rows, messages, queue_keys))

    # --- columns

    def _array(self, batch: pa.RecordBatch, part: str) -> pa.Array | None:
        """The column of a part; None if there is none, or all values are null."""
        place = self._columns.get(part)
        if place is None:
            return None
        array = batch.column(place)
        return None if array.null_count == len(array) else array

    def _column(self, batch: pa.RecordBatch, part: str) -> Iterable[Any]:
        array = self._array(batch, part)
        return repeat(None) if array is None else array.to_pylist()

    def _bodies(self, batch: pa.RecordBatch) -> list[bytes]:
        array = batch.column(self._columns["body"])
        if array.null_count:
            raise self._refused(_first(array.is_null()), "its body is null", "filter such rows out")
        if pa.types.is_string(array.type):
            array = array.cast(pa.binary())
        elif pa.types.is_large_string(array.type):
            array = array.cast(pa.large_binary())
        lengths = pc.binary_length(array)
        span = pc.min_max(lengths).as_py()
        if span["min"] == 0:
            raise self._refused(
                _first(pc.equal(lengths, 0)),
                "its body is empty",
                "RocketMQ has no messages without a body: filter such rows out",
            )
        if span["max"] > self._bytes_max:
            number = _first(pc.greater(lengths, self._bytes_max))
            raise self._refused(
                number,
                f"its body has {lengths[number]} bytes, the limit is {self._bytes_max}"
                " (messageBytesMax)",
                "make it smaller, or raise the option and the broker's limit (maxMessageSize)",
            )
        bodies: list[bytes] = array.to_pylist()
        return bodies

    def _topics_of(self, batch: pa.RecordBatch) -> Iterable[str]:
        if self._topic is not None:
            return repeat(self._topic)
        array = batch.column(self._columns["topic"])
        if array.null_count:
            raise self._refused(
                _first(array.is_null()),
                "its topic is null",
                "give it one, or name one for all rows by the option topic",
            )
        topics: list[str] = array.to_pylist()
        for topic in set(topics) - self._topics:
            try:
                check_topic(topic)
            except PenstockError as error:
                raise self._refused(topics.index(topic), str(error), error.hint) from None
            self._topics.add(topic)
        return topics

    def _keys(self, batch: pa.RecordBatch) -> Iterable[Any]:
        array = self._array(batch, "keys")
        if array is None:
            return repeat(())
        values = array.to_pylist()
        if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
            return [[key for key in value if key] if value else () for value in values]
        return [(value,) if value else () for value in values]

    def _properties(self, batch: pa.RecordBatch) -> Iterable[Mapping[str, str]]:
        array = self._array(batch, "properties")
        if array is None:
            return repeat(self._sink_properties)
        names, values = array.keys, array.items
        dropped = pc.any(pc.is_in(names, value_set=_DROPPED_ARRAY)).as_py()
        transient = pc.any(pc.starts_with(names, PROPERTY_TRANSIENT_PREFIX)).as_py()
        empty = values.null_count or pc.any(pc.equal(pc.binary_length(values), 0)).as_py()
        return self._maps(
            names.to_pylist(),
            values.to_pylist(),
            array.offsets.to_pylist(),
            clean=not (dropped or transient or empty),
        )

    def _maps(
        self, names: list[str], values: list[str | None], offsets: list[int], *, clean: bool
    ) -> Iterator[dict[str, Any]]:
        own = self._sink_properties
        begin = offsets[0]
        for end in offsets[1:]:
            pairs = zip(names[begin:end], values[begin:end], strict=True)
            if clean:
                yield {**dict(pairs), **own}
            else:
                yield {**{n: v for n, v in pairs if v and _is_sent(n)}, **own}
            begin = end

    def _queue_keys(self, batch: pa.RecordBatch) -> Iterable[str | None]:
        array = self._array(batch, "queue_key")
        if array is None:
            return repeat(None)
        if pa.types.is_integer(array.type):
            array = array.cast(pa.string())
        return [value or None for value in array.to_pylist()]

    # --- columns that are rarely used

    def _set_flags(self, batch: pa.RecordBatch, messages: list[Message]) -> None:
        array = self._array(batch, "flag")
        if array is not None:
            for message, flag in zip(messages, array.to_pylist(), strict=True):
                message.flag = flag or 0

    def _set_delays(self, batch: pa.RecordBatch, messages: list[Message]) -> None:
        arrays = [self._array(batch, part) for part in _DELAY_COLUMNS]
        if all(array is None for array in arrays):
            return
        levels, delays, times = (
            repeat(None) if array is None else _integers(array).to_pylist() for array in arrays
        )
        for number, (message, level, delay_ms, micros) in enumerate(
            zip(messages, levels, delays, times, strict=False)
        ):
            self._set_delay(number, message, level or 0, delay_ms or 0, micros)

    def _set_delay(
        self, number: int, message: Message, level: int, delay_ms: int, micros: int | None
    ) -> None:
        if micros is not None and micros // 1000 <= self._now_ms:
            micros = None
        waits = (level != 0) + (delay_ms != 0) + (micros is not None)
        if waits == 0:
            return
        if waits > 1:
            raise self._refused(
                number, "it has more than one delay", f"set one of {', '.join(_DELAY_COLUMNS)}"
            )
        if not self._allow_delays:
            raise self._refused(
                number,
                "it has a delay, which delivery=transactional does not support",
                "write delayed rows with another sink, without delivery=transactional",
            )
        try:
            message.delay_level = level
            message.delay = timedelta(milliseconds=delay_ms) if delay_ms else None
            message.deliver_at = micros if micros is None else _datetime(micros)
        except OverflowError:
            raise self._refused(
                number, "its delay is too long", "delay_ms is in milliseconds"
            ) from None

    def _refused(self, number: int, why: str, hint: str) -> RowRefused:
        return RowRefused.at(self.rows + number, self._partition, why, hint)


def _is_sent(name: str) -> bool:
    return name not in DROPPED_PROPERTIES and not name.startswith(PROPERTY_TRANSIENT_PREFIX)


def _integers(array: pa.Array) -> pa.Array:
    """The array, with timestamps as microseconds since 1970."""
    if pa.types.is_timestamp(array.type):
        return array.cast(pa.timestamp("us", tz=array.type.tz)).cast(pa.int64())
    return array


def _datetime(micros: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=micros)


def _first(found: pa.BooleanArray) -> int:
    """The index of the first true value."""
    place: int = pc.index(found, True).as_py()
    return place
