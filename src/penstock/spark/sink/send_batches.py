"""Groups rows into requests, and says which requests must follow each other.

Rows of one topic are sent together, in requests of `batchCount` rows or `batchBytes`. Delayed rows
are sent one by one, because brokers refuse them in batches, and so are rows that are large enough
to be compressed. Rows with a queue key are sent with those of the same key, one request after the
other, so that a retry does not change their order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.client.messages import Message
from penstock.spark.sink.row_messages import RowMessage
from penstock.spark.sink.sink_options import SinkOptions

SINGLE_ROWS_MAX: Final = 500
"""Rows of one send batch that are sent one by one."""
_OVERHEAD_BYTES: Final = 150
"""The approximate size of a message without its body and properties."""


@dataclass(slots=True)
class SendBatch:
    """Requests that are sent one after the other."""

    requests: list[list[RowMessage]]
    size: int
    together: bool
    """Whether a request sends its rows as one batch, or each as its own message."""


class _OpenBatch:
    """Collects rows of one topic and queue key."""

    __slots__ = ("requests", "rows", "size", "total")

    def __init__(self) -> None:
        self.requests: list[list[RowMessage]] = []
        self.rows: list[RowMessage] = []
        self.size = 0
        self.total = 0

    def close_request(self) -> None:
        if self.rows:
            self.requests.append(self.rows)
            self.total += self.size
            self.rows, self.size = [], 0

    def close(self, *, together: bool) -> SendBatch:
        self.close_request()
        return SendBatch(self.requests, self.total, together)


def make_send_batches(rows: Sequence[RowMessage], options: SinkOptions) -> Iterator[SendBatch]:
    """The rows in send batches; rows with the same topic and key keep their order."""
    open_batches: dict[tuple[str, str | None], _OpenBatch] = {}
    singles = _OpenBatch()
    compress_from = options.compress_above_bytes if options.compression else 1 << 62
    properties: Mapping[str, str] = {}
    overhead = _OVERHEAD_BYTES
    for row in rows:
        message = row.message
        if message.properties is not properties:  # all rows of a batch may share one mapping
            properties = message.properties
            overhead = _OVERHEAD_BYTES + _length(properties)
        length = len(message.body)
        size = length + overhead
        is_single = length >= compress_from or is_delayed(message)
        if is_single and row.queue_key is None:
            singles.rows.append(row)
            singles.size += size
            if len(singles.rows) >= SINGLE_ROWS_MAX or singles.size >= options.batch_bytes:
                yield singles.close(together=False)
                singles = _OpenBatch()
            continue
        key = (message.topic, row.queue_key)
        batch = open_batches.get(key)
        if batch is None:
            batch = open_batches[key] = _OpenBatch()
        if is_single or (
            batch.rows
            and (batch.size + size > options.batch_bytes or len(batch.rows) >= options.batch_count)
        ):
            batch.close_request()
            if row.queue_key is None:
                yield batch.close(together=True)
                batch = open_batches[key] = _OpenBatch()
        batch.rows.append(row)
        batch.size += size
        if is_single:
            batch.close_request()
    yield from _close_all(open_batches, singles)


def _close_all(
    open_batches: dict[tuple[str, str | None], _OpenBatch], singles: _OpenBatch
) -> Iterator[SendBatch]:
    for (_, key), open_batch in open_batches.items():
        batch = open_batch.close(together=True)
        if key is not None and len(batch.requests) == 1 and len(batch.requests[0]) == 1:
            singles.rows += batch.requests[0]  # the only row of its key need not wait for others
            singles.size += batch.size
            if len(singles.rows) >= SINGLE_ROWS_MAX:
                singles.close_request()
        elif batch.requests:
            yield batch
    singles.close_request()
    for request in singles.requests:
        yield SendBatch([request], singles.total // len(singles.requests), False)


def _length(properties: Mapping[str, str]) -> int:
    return sum(map(len, properties)) + sum(map(len, properties.values()))


def is_delayed(message: Message) -> bool:
    """Whether the message has a delay level, a delay or a delivery time."""
    return bool(message.delay_level or message.delay is not None or message.deliver_at is not None)
