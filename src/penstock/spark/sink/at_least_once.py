"""The at-least-once writer: sends the rows of a task until each one is acknowledged.

Temporary failures are retried until `deliveryTimeout`. An attempt whose response was lost may have
been stored, hence at least once. A row that can't be a message is reported by its number. If a
broker has stored a row but not as safely as configured (FLUSH_DISK_TIMEOUT and the like), it is
sent a few more times; then the task fails, unless `acks=1`.

Requests run on the clients' event loop, in its own thread, while the task's thread reads the next
rows from Spark: responses do not wait for a slow query, nor the query for responses.
"""

import asyncio
import atexit
import logging
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Final, Protocol, Self

from penstock.arrow.backoff import (
    BACKOFF_MS,
    BACKOFF_MS_MAX,
    PERMISSION_RETRY_MS,
    permanent_cause,
    permission_error,
)
from penstock.client.messages import Message, SendReceipt, SendStatus
from penstock.client.producer.async_producer import AsyncProducer
from penstock.client.sync.loop_thread import loop_thread
from penstock.clock import Clock, LoopClock, pause
from penstock.errors import (
    MessageIllegal,
    NoRoute,
    PenstockError,
    RecordError,
    RowRefused,
    SendFailed,
    WriteGaveUp,
)
from penstock.spark.sink.row_messages import RowMessage
from penstock.spark.sink.send_batches import SendBatch, make_send_batches
from penstock.spark.sink.sink_options import NEW_TOPIC_MS, SinkOptions

log = logging.getLogger(__name__)

SEND_BATCHES_MAX: Final = 64
"""Send batches in flight of one task, besides the limit on their bytes."""
NOT_DURABLE_MAX: Final = 3
"""How often a row is sent that its broker stores but not durably: each attempt adds a copy."""
PRODUCERS_MAX: Final = 4
"""Producers that a worker process keeps open for later tasks."""


class SinkProducer(Protocol):
    """The methods of AsyncProducer that the sink uses."""

    def submit(
        self, message: Message, *, ordering_key: str | None = None
    ) -> "asyncio.Future[SendReceipt]": ...

    async def send_batch(
        self, messages: Sequence[Message], *, ordering_key: str | None = None
    ) -> list[SendReceipt]: ...


# --- on the event loop ---------------------------------------------------------------------------


class BatchSender:
    """Sends batches with retries, on the event loop of its producer."""

    def __init__(
        self,
        producer: SinkProducer,
        options: SinkOptions,
        *,
        partition: int,
        known_topics: set[str],
        clock: Clock,
    ) -> None:
        self._producer = producer
        self._options = options
        self._partition = partition
        self._known_topics = known_topics
        """Topics that this process has sent to."""
        self._clock = clock

    async def deliver(self, batch: SendBatch) -> None:
        """Return when all rows are acknowledged.

        Raises RowRefused, WriteGaveUp, or an error about the topic or permissions.
        """
        for request in batch.requests:
            await self._retry(request, together=batch.together and len(request) > 1)

    async def _retry(self, rows: list[RowMessage], *, together: bool) -> None:
        began_ms = self._clock.monotonic_ms()
        attempts = not_durable = 0
        while True:
            try:
                results = await self._attempt(rows, together=together)
            except (MessageIllegal, RecordError):  # send them one by one to find the bad row
                for row in rows:
                    await self._retry([row], together=False)
                return
            left, error = self._unacknowledged(rows, results)
            if error is None:
                return
            attempts += 1
            not_durable += isinstance(error, _NotDurable)
            waited_ms = self._clock.monotonic_ms() - began_ms
            limit_ms = self._options.delivery_timeout_ms
            if isinstance(error, NoRoute) and left[0].message.topic not in self._known_topics:
                limit_ms = min(limit_ms, NEW_TOPIC_MS)
            refused = permission_error(error)
            if refused is not None and waited_ms >= PERMISSION_RETRY_MS:
                refused.add_note(f"while sending {self._describe(left)}")
                raise refused from error
            if not_durable >= NOT_DURABLE_MAX or waited_ms >= limit_ms:
                raise self._give_up_error(left, error, waited_ms)
            log.warning("sending %s again: %s", self._describe(left), error)
            await pause(self._clock, min(BACKOFF_MS << min(attempts, 8), BACKOFF_MS_MAX))
            rows = left

    async def _attempt(
        self, rows: list[RowMessage], *, together: bool
    ) -> Sequence[SendReceipt | BaseException]:
        """The result for each row. Raises the error of a bad row in a batch; none is stored."""
        if together and len(rows) > 1:
            messages = [row.message for row in rows]
            try:
                return await self._producer.send_batch(messages, ordering_key=rows[0].queue_key)
            except (MessageIllegal, RecordError):
                raise
            except PenstockError as error:
                return [error] * len(rows)
        futures = []
        for row in rows:
            try:
                future = self._producer.submit(row.message, ordering_key=row.queue_key)
            except PenstockError as error:
                future = asyncio.get_running_loop().create_future()
                future.set_exception(error)
            futures.append(future)
        return await asyncio.gather(*futures, return_exceptions=True)

    def _unacknowledged(
        self, rows: list[RowMessage], results: Sequence[SendReceipt | BaseException]
    ) -> tuple[list[RowMessage], PenstockError | None]:
        """The rows to send again, and why; raises errors that are permanent."""
        if all(
            isinstance(one, SendReceipt) and one.status is SendStatus.SEND_OK for one in results
        ):
            self._known_topics.update({row.message.topic for row in rows})
            return [], None
        left: list[RowMessage] = []
        why: PenstockError | None = None
        for row, result in zip(rows, results, strict=True):
            error: PenstockError
            if isinstance(result, SendReceipt):
                if result.status is SendStatus.SEND_OK or not self._options.require_durable:
                    self._known_topics.add(row.message.topic)
                    continue
                error = _NotDurable(f"{result.queue.broker_name} answers {result.status.name}")
            elif isinstance(result, PenstockError):
                error = result
            else:
                raise result
            if isinstance(error, MessageIllegal | RecordError):
                raise RowRefused.at(row.row, self._partition, error.message, error.hint) from error
            error = permanent_cause(error) or error
            if not error.retry:
                error.add_note(f"while sending {self._describe([row])}")
                raise error
            left.append(row)
            why = error
        return left, why

    def _give_up_error(
        self, rows: list[RowMessage], error: PenstockError, waited_ms: int
    ) -> PenstockError:
        place = self._describe(rows)
        if isinstance(error, NoRoute):
            error.add_note(f"while sending {place}")
            return error
        if isinstance(error, _NotDurable):
            failure = WriteGaveUp(
                f"{place}: stored {NOT_DURABLE_MAX} times, but never durably: {error}",
                hint="check the broker's disk and slaves, or accept this with acks=1",
            )
        else:
            failure = WriteGaveUp(f"{place}: not acknowledged after {waited_ms} ms: {error}")
        failure.__cause__ = error
        return failure

    def _describe(self, rows: list[RowMessage]) -> str:
        first, last = rows[0].row, rows[-1].row
        names = f"row {first}" if first == last else f"{len(rows)} rows, {first} to {last},"
        return f"{names} of partition {self._partition} for the topic {rows[0].message.topic!r}"


class _NotDurable(SendFailed):
    """A broker has stored the message, but its disk or its slaves have not, or not yet."""


# --- in the task's thread ------------------------------------------------------------------------


class AtLeastOnceWriter:
    """Sends the rows of a task; a context manager for the task's thread.

    Its end waits until all rows are acknowledged. If it ends with an error, rows that are not sent
    yet are dropped.
    """

    def __init__(self, options: SinkOptions, partition: int) -> None:
        self._options = options
        self._partition = partition
        self._sender: BatchSender | None = None
        self._in_flight: deque[tuple[Future[None], int]] = deque()
        self._size = 0

    def put(self, rows: Sequence[RowMessage]) -> None:
        """Send rows; waits while too much is in flight. Raises the error of earlier rows."""
        if not rows:
            return
        if self._sender is None:
            producer, known_topics = _producer(self._options)
            self._sender = BatchSender(
                producer,
                self._options,
                partition=self._partition,
                known_topics=known_topics,
                clock=LoopClock(),
            )
        if any(row.queue_key is not None for row in rows):
            self._wait(0, 0)
        for batch in make_send_batches(rows, self._options):
            self._wait(SEND_BATCHES_MAX - 1, max(self._options.in_flight_bytes - batch.size, 0))
            future = loop_thread().submit(self._sender.deliver, batch)
            self._in_flight.append((future, batch.size))
            self._size += batch.size

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._wait(0, 0)
        finally:
            for future, _ in self._in_flight:
                future.cancel()

    def _wait(self, count: int, size: int) -> None:
        """Wait until at most `count` batches and `size` bytes are in flight."""
        while len(self._in_flight) > count or self._size > size:
            future, length = self._in_flight[0]
            future.result()
            self._in_flight.popleft()
            self._size -= length


# --- producers that stay open --------------------------------------------------------------------


class _OpenProducers:
    """The producers of one process, each with the topics it has sent to.

    Those of the parent process are not closed: their connections belong to the parent.
    """

    def __init__(self, parent: "_OpenProducers | None" = None) -> None:
        self.pid = os.getpid()
        self.producers: dict[object, tuple[AsyncProducer, set[str]]] = {}
        self.parent = parent


_open = _OpenProducers()


def _producer(options: SinkOptions) -> tuple[AsyncProducer, set[str]]:
    """A started producer for these options, and the topics it has sent to."""
    global _open
    if _open.pid != os.getpid():
        _open = _OpenProducers(parent=_open)
    key = options.producer_key()
    found = _open.producers.pop(key, None)
    if found is None:
        producer = options.producer()
        loop_thread().run(producer.start)
        found = producer, set()
    _open.producers[key] = found  # the one used last comes last
    while len(_open.producers) > PRODUCERS_MAX:
        oldest, _ = _open.producers.pop(next(iter(_open.producers)))
        loop_thread().run(oldest.close)
    return found


def close_producers() -> None:
    """Close the producers of this process."""
    if _open.pid == os.getpid():
        while _open.producers:
            producer, _ = _open.producers.popitem()[1]
            loop_thread().run(producer.close)


atexit.register(close_producers)
