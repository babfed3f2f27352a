"""Which rows leave in one request, and which after which.

Rows of one topic leave together, in requests of `batchCount` rows or `batchBytes`. Alone leave
those that wait for their time (brokers take no such batches) and those long enough to be
compressed. Rows with a queue key leave together with those of the same key, one request after the
other, so that a second attempt changes no order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from penstock.client.messages import Message
from penstock.spark.sink.row_messages import Outgoing
from penstock.spark.sink.sink_options import SinkOptions

ALONE_MAX: Final = 500
"""Rows that leave alone and are looked after together."""
_OVERHEAD_BYTES: Final = 150
"""About what a row has beside its body and its properties."""


@dataclass(slots=True)
class Bundle:
    """Rows that are looked after together, as requests one after the other."""

    requests: list[list[Outgoing]]
    size: int
    together: bool
    """Whether the rows of a request leave as one, or each alone, at the same time."""


class _Growing:
    """Rows of one topic and key that wait for company."""

    __slots__ = ("requests", "rows", "size", "total")

    def __init__(self) -> None:
        self.requests: list[list[Outgoing]] = []
        self.rows: list[Outgoing] = []
        self.size = 0
        self.total = 0

    def close_request(self) -> None:
        if self.rows:
            self.requests.append(self.rows)
            self.total += self.size
            self.rows, self.size = [], 0

    def bundle(self, *, together: bool) -> Bundle:
        self.close_request()
        return Bundle(self.requests, self.total, together)


def bundles(rows: Sequence[Outgoing], options: SinkOptions) -> Iterator[Bundle]:
    """Rows as they leave; those with one topic and key stay in order."""
    together: dict[tuple[str, str | None], _Growing] = {}
    alone = _Growing()
    compress_from = options.compress_above_bytes if options.compression else 1 << 62
    properties: Mapping[str, str] = {}
    beside = _OVERHEAD_BYTES
    for row in rows:
        message = row.message
        if message.properties is not properties:  # those of a whole batch may be one
            properties = message.properties
            beside = _OVERHEAD_BYTES + _length(properties)
        length = len(message.body)
        size = length + beside
        apart = length >= compress_from or _waits(message)
        if apart and row.queue_key is None:
            alone.rows.append(row)
            alone.size += size
            if len(alone.rows) >= ALONE_MAX or alone.size >= options.batch_bytes:
                yield alone.bundle(together=False)
                alone = _Growing()
            continue
        kind = (message.topic, row.queue_key)
        growing = together.get(kind)
        if growing is None:
            growing = together[kind] = _Growing()
        if apart or (
            growing.rows
            and (
                growing.size + size > options.batch_bytes
                or len(growing.rows) >= options.batch_count
            )
        ):
            growing.close_request()
            if row.queue_key is None:
                yield growing.bundle(together=True)
                growing = together[kind] = _Growing()
        growing.rows.append(row)
        growing.size += size
        if apart:
            growing.close_request()
    yield from _leftover(together, alone)


def _leftover(
    together: dict[tuple[str, str | None], _Growing], alone: _Growing
) -> Iterator[Bundle]:
    for (_, key), growing in together.items():
        bundle = growing.bundle(together=True)
        if key is not None and len(bundle.requests) == 1 and len(bundle.requests[0]) == 1:
            alone.rows += bundle.requests[0]  # nothing else has its key: it need not wait
            alone.size += bundle.size
            if len(alone.rows) >= ALONE_MAX:
                alone.close_request()
        elif bundle.requests:
            yield bundle
    alone.close_request()
    for request in alone.requests:
        yield Bundle([request], alone.total // len(alone.requests), False)


def _length(properties: Mapping[str, str]) -> int:
    return sum(map(len, properties)) + sum(map(len, properties.values()))


def _waits(message: Message) -> bool:
    return bool(message.delay_level or message.delay is not None or message.deliver_at is not None)
