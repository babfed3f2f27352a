"""At least once: a task's rows on their way to the brokers, until each is acknowledged.

What fails for a while is sent again until `deliveryTimeout`: an attempt whose answer was lost may
have been stored, hence at least once. A row that can't be a message is named. A broker that has a
row less safely than it should (FLUSH_DISK_TIMEOUT and the like) gets it a few times more; after
that the task fails, unless `acks=1` says that stored is enough.

Requests are made on the clients' event loop, in its own thread, while the task's thread reads the
next rows from Spark: an answer never waits for a slow query, nor a query for an answer.
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
from penstock.spark.backoff import (
    BACKOFF_MS,
    BACKOFF_MS_MAX,
    PERMISSION_RETRY_MS,
    permanent_cause,
    permission_error,
)
from penstock.spark.sink.row_messages import Outgoing
from penstock.spark.sink.send_batches import Bundle, bundles
from penstock.spark.sink.sink_options import SinkOptions

log = logging.getLogger(__name__)

_OK: Final = SendStatus.SEND_OK

BUNDLES_MAX: Final = 64
"""Requests under way of one task, beside the bound on their bytes."""
UNSAFE_MAX: Final = 3
"""How often a row is sent that its broker has and does not hold safely: each adds a copy."""
NEW_TOPIC_MS: Final = 10_000
"""How long a topic may be missing that this worker has never sent to: a broker that starts tells of
its topics within moments, and a misspelt one never comes."""
PRODUCERS_MAX: Final = 4
"""Producers that a worker keeps open for its next tasks."""


class Producer(Protocol):
    """What is asked of an AsyncProducer."""

    def submit(
        self, message: Message, *, ordering_key: str | None = None
    ) -> "asyncio.Future[SendReceipt]": ...

    async def send_batch(
        self, messages: Sequence[Message], *, ordering_key: str | None = None
    ) -> list[SendReceipt]: ...


# --- until it is acknowledged --------------------------------------------------------------------


class Courier:
    """Delivers bundles, on the event loop of its producer."""

    def __init__(
        self,
        producer: Producer,
        options: SinkOptions,
        *,
        partition: int,
        known: set[str],
        clock: Clock,
    ) -> None:
        self._producer = producer
        self._options = options
        self._partition = partition
        self._known = known
        """Topics that this process has sent to."""
        self._clock = clock

    async def deliver(self, bundle: Bundle) -> None:
        """Return when all rows are acknowledged; raises RowRefused, WriteGaveUp, or what is wrong
        with topic or rights."""
        for request in bundle.requests:
            if bundle.together and len(request) > 1:
                await self._retry(request, together=True)
            else:
                await self._retry(request, together=False)

    async def _retry(self, rows: list[Outgoing], *, together: bool) -> None:
        began_ms = self._clock.monotonic_ms()
        attempts = unsafe = 0
        while True:
            try:
                results = await self._attempt(rows, together=together)
            except (MessageIllegal, RecordError):  # one of them is wrong: which one?
                for row in rows:
                    await self._retry([row], together=False)
                return
            left, error = self._sort_out(rows, results)
            if error is None:
                return
            attempts += 1
            unsafe += isinstance(error, _Unsafe)
            waited_ms = self._clock.monotonic_ms() - began_ms
            limit_ms = self._options.delivery_timeout_ms
            if isinstance(error, NoRoute) and left[0].message.topic not in self._known:
                limit_ms = min(limit_ms, NEW_TOPIC_MS)
            if (
                refused := permission_error(error)
            ) is not None and waited_ms >= PERMISSION_RETRY_MS:
                refused.add_note(f"while sending {self._place(left)}")
                raise refused from error
            if unsafe >= UNSAFE_MAX or waited_ms >= limit_ms:
                raise self._given_up(left, error, waited_ms)
            log.warning("%s: sent again: %s", self._place(left), error)
            await pause(self._clock, min(BACKOFF_MS << min(attempts, 8), BACKOFF_MS_MAX))
            rows = left

    async def _attempt(
        self, rows: list[Outgoing], *, together: bool
    ) -> Sequence[SendReceipt | BaseException]:
        """What became of each row. Raises what is wrong with one of several, none being stored."""
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

    def _sort_out(
        self, rows: list[Outgoing], results: Sequence[SendReceipt | BaseException]
    ) -> tuple[list[Outgoing], PenstockError | None]:
        """The rows to send again, and why; raises what sending again does not mend."""
        if all(
            isinstance(one, SendReceipt) and one.status is SendStatus.SEND_OK for one in results
        ):
            self._known.update({row.message.topic for row in rows})
            return [], None
        left: list[Outgoing] = []
        why: PenstockError | None = None
        for row, result in zip(rows, results, strict=True):
            error: PenstockError
            if isinstance(result, SendReceipt):
                if result.status is _OK or not self._options.only_safe:
                    self._known.add(row.message.topic)
                    continue
                error = _Unsafe(f"{result.queue.broker_name} answers {result.status.name}")
            elif isinstance(result, PenstockError):
                error = result
            else:
                raise result
            if isinstance(error, MessageIllegal | RecordError):
                raise RowRefused.at(row.row, self._partition, error.message, error.hint) from error
            error = permanent_cause(error) or error
            if not error.retry:
                error.add_note(f"while sending {self._place([row])}")
                raise error
            left.append(row)
            why = error
        return left, why

    def _given_up(
        self, rows: list[Outgoing], error: PenstockError, waited_ms: int
    ) -> PenstockError:
        place = self._place(rows)
        if isinstance(error, NoRoute):
            error.add_note(f"while sending {place}")
            return error
        if isinstance(error, _Unsafe):
            failure = WriteGaveUp(
                f"{place}: stored {UNSAFE_MAX} times, and never safely: {error}",
                hint="look at the broker's disk and slaves, or take it as written by acks=1",
            )
        else:
            failure = WriteGaveUp(f"{place}: not acknowledged after {waited_ms} ms: {error}")
        failure.__cause__ = error
        return failure

    def _place(self, rows: list[Outgoing]) -> str:
        first, last = rows[0].row, rows[-1].row
        names = f"row {first}" if first == last else f"{len(rows)} rows, {first} to {last},"
        return f"{names} of partition {self._partition} for the topic {rows[0].message.topic!r}"


class _Unsafe(SendFailed):
    """A broker has it, and its disk or its slaves do not, or not yet."""


# --- the task's side -----------------------------------------------------------------------------


class Outbox:
    """What a task hands over is sent; used in the task's thread, with `with`.

    Not before its end is all acknowledged. Where it ends by an error, what has not left does not
    leave any more.
    """

    def __init__(self, options: SinkOptions, partition: int) -> None:
        self._options = options
        self._partition = partition
        self._courier: Courier | None = None
        self._under_way: deque[tuple[Future[None], int]] = deque()
        self._size = 0

    def put(self, rows: Sequence[Outgoing]) -> None:
        """Take rows; waits while too much is under way. Raises what became of rows before."""
        if not rows:
            return
        if self._courier is None:
            producer, known = _producer(self._options)
            self._courier = Courier(
                producer, self._options, partition=self._partition, known=known, clock=LoopClock()
            )
        if any(row.queue_key is not None for row in rows):
            self._wait(0, 0)
        for bundle in bundles(rows, self._options):
            self._wait(BUNDLES_MAX - 1, max(self._options.in_flight_bytes - bundle.size, 0))
            future = loop_thread().submit(self._courier.deliver, bundle)
            self._under_way.append((future, bundle.size))
            self._size += bundle.size

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
            for future, _ in self._under_way:
                future.cancel()

    def _wait(self, count: int, size: int) -> None:
        while len(self._under_way) > count or self._size > size:
            future, length = self._under_way[0]
            future.result()
            self._under_way.popleft()
            self._size -= length


# --- producers that stay open --------------------------------------------------------------------


class _Kept:
    """The producers of one process. Those of the process it was forked from are left alone: their
    connections are the parent's."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.producers: dict[object, tuple[AsyncProducer, set[str]]] = {}
        self.before: _Kept | None = None


_kept = _Kept()


def _producer(options: SinkOptions) -> tuple[AsyncProducer, set[str]]:
    """A started producer for such options, and the topics it has sent to."""
    global _kept
    if _kept.pid != os.getpid():
        parent, _kept = _kept, _Kept()
        _kept.before = parent
    key = options.producer_key()
    found = _kept.producers.pop(key, None)
    if found is None:
        producer = options.producer()
        loop_thread().run(producer.start)
        found = producer, set()
    _kept.producers[key] = found  # the one used last stands last
    while len(_kept.producers) > PRODUCERS_MAX:
        oldest, _ = _kept.producers.pop(next(iter(_kept.producers)))
        loop_thread().run(oldest.close)
    return found


def close_producers() -> None:
    """Close what this process keeps open."""
    if _kept.pid == os.getpid():
        while _kept.producers:
            producer, _ = _kept.producers.popitem()[1]
            loop_thread().run(producer.close)


atexit.register(close_producers)
