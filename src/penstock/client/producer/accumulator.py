"""Automatic batching: many small sends become few requests.

Messages of one topic (and one queue, if given) are collected until the batch is full or the oldest
message has waited `linger_ms`. Each message has its own future.

Messages that cannot be in a batch are sent alone: those with a delay, retries and half messages. So
is a message that would fill a batch: alone it can be compressed, in a batch it cannot.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from penstock.client.messages import Message, MessageQueue, SendReceipt
from penstock.client.producer.in_flight import InFlightLimit
from penstock.clock import Alarm, Clock
from penstock.errors import BadSetting, ClientClosed, MessageIllegal, PenstockError, RecordError
from penstock.wire.codes import PROPERTY_PRODUCER_GROUP, RETRY_TOPIC_PREFIX

SendBatch: TypeAlias = Callable[
    [Sequence[Message], MessageQueue | None], Awaitable[Sequence[SendReceipt | PenstockError]]
]
"""Sends messages of one topic in one request (a single one as a plain send); returns a receipt or
an error for each, in order. Raises if nothing was sent."""

OVERHEAD_BYTES: Final = 100
"""Bytes of a message in a batch besides body, tags, keys and properties."""

_BatchKey: TypeAlias = tuple[str, MessageQueue | None, bool]


@dataclass(frozen=True, slots=True)
class Batching:
    """When a batch is sent: as soon as one of the limits is reached."""

    linger_ms: int = 10
    bytes_max: int = 32 * 1024
    count_max: int = 1_000

    def __post_init__(self) -> None:
        for name in ("linger_ms", "bytes_max", "count_max"):
            value = getattr(self, name)
            if value <= 0:
                raise BadSetting(
                    f"{name} of Batching is {value}", hint="give a number greater than 0"
                )


class Accumulator:
    """Collects messages into batches. At most `count_max` messages are without a receipt."""

    def __init__(
        self,
        send_batch: SendBatch,
        batching: Batching,
        clock: Clock,
        count_max: int = 10_000,
        *,
        prepare: Callable[[Message], Message] | None = None,
    ) -> None:
        """`prepare` replaces each message when it is added, in the context of the caller."""
        self.in_flight = InFlightLimit(count_max, clock)
        self._send_batch = send_batch
        self._prepare = prepare
        self._batching = batching
        self._clock = clock
        self._open: dict[_BatchKey, _GatheringBatch] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._closed = False

    def add(
        self, message: Message, queue: MessageQueue | None = None
    ) -> asyncio.Future[SendReceipt]:
        """Add a message; returns the future of its receipt. Raises TooMuchInFlight.

        A message that cannot be in a batch, or that fills one, is sent alone at once.
        """
        if self._closed:
            raise ClientClosed("the producer is closed")
        future: asyncio.Future[SendReceipt] = asyncio.get_running_loop().create_future()
        if self._prepare is not None:
            message = self._prepare(message)
        limits, size, alone = self._batching, _size(message), not _can_be_batched(message)
        self.in_flight.add(size)
        if alone or size >= limits.bytes_max:
            self._start([_BatchedMessage(message, future, size)], queue)
            return future
        key = (message.topic, queue, message.wait_stored)
        batch = self._open.get(key)
        if batch is not None and batch.size + size > limits.bytes_max:
            self._close_batch(key)
            batch = None
        if batch is None:
            due_ms = self._clock.now_ms() + limits.linger_ms
            alarm = self._clock.wake_at(due_ms, lambda: self._close_batch(key))
            batch = self._open[key] = _GatheringBatch(alarm)
        batch.messages.append(_BatchedMessage(message, future, size))
        batch.size += size
        if len(batch.messages) >= limits.count_max or batch.size >= limits.bytes_max:
            self._close_batch(key)
        return future

    async def flush(self) -> None:
        """Send all open batches now; returns when every message has a receipt or an error."""
        for key in list(self._open):
            self._close_batch(key)
        if self._sending:  # messages that are added meanwhile do not belong to this flush
            await asyncio.wait(list(self._sending))

    async def close(self) -> None:
        """Flush, and accept no more messages: `add` raises ClientClosed."""
        self._closed = True
        await self.flush()

    def _close_batch(self, key: _BatchKey) -> None:
        batch = self._open.pop(key)
        batch.alarm.cancel()
        messages = []
        for one in batch.messages:
            if one.future.done():  # cancelled by the caller
                self.in_flight.remove(self.in_flight.flush_group, one.size)
            else:
                messages.append(one)
        if messages:
            self._start(messages, key[1])

    def _start(self, messages: "list[_BatchedMessage]", queue: MessageQueue | None) -> None:
        task = asyncio.ensure_future(self._send(messages, queue))
        self._sending.add(task)
        task.add_done_callback(lambda done: self._sent(done, messages))

    def _sent(self, task: "asyncio.Task[None]", messages: "list[_BatchedMessage]") -> None:
        self._sending.discard(task)
        for one in messages:
            self.in_flight.remove(self.in_flight.flush_group, one.size)
            if not one.future.done():  # the task was cancelled with the event loop
                one.future.cancel()

    async def _send(self, messages: "list[_BatchedMessage]", queue: MessageQueue | None) -> None:
        outcomes: Sequence[SendReceipt | Exception]
        try:
            outcomes = await self._send_batch([one.message for one in messages], queue)
        except Exception as error:  # also TypeError and the like of a bad message
            outcomes = [error] * len(messages)
        rejected = []
        for one, outcome in zip(messages, outcomes, strict=True):
            if len(messages) > 1 and _is_rejected(outcome):
                rejected.append(one)
            else:
                one.complete(outcome)
        # A bad message rejects its whole batch, and nothing was stored: send them one by one.
        for one in rejected:
            if not one.future.done():
                await self._send([one], queue)


class _BatchedMessage:
    """A message and the future of its receipt."""

    __slots__ = ("future", "message", "size")

    def __init__(self, message: Message, future: "asyncio.Future[SendReceipt]", size: int) -> None:
        self.message = message
        self.future = future
        self.size = size

    def complete(self, outcome: SendReceipt | Exception) -> None:
        if self.future.done():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class _GatheringBatch:
    """A batch that still grows; `alarm` closes it after `linger_ms`."""

    __slots__ = ("alarm", "messages", "size")

    def __init__(self, alarm: Alarm) -> None:
        self.alarm = alarm
        self.messages: list[_BatchedMessage] = []
        self.size = 0


def _is_rejected(outcome: SendReceipt | Exception) -> bool:
    """Whether the request was rejected because of a bad message; then nothing was stored."""
    if isinstance(outcome, PenstockError):
        return isinstance(outcome, MessageIllegal | RecordError)
    return isinstance(outcome, Exception)


def _can_be_batched(message: Message) -> bool:
    return not (
        message.delay_level > 0
        or message.delay is not None
        or message.deliver_at is not None
        or message.priority is not None
        or message.topic.startswith(RETRY_TOPIC_PREFIX)
        or (message.properties and PROPERTY_PRODUCER_GROUP in message.properties)
    )


def _size(message: Message) -> int:
    """The approximate bytes of a message in a batch."""
    size = OVERHEAD_BYTES + len(message.body) + len(message.tags or "")
    for key in message.keys:
        size += len(key) + 1
    for name, value in message.properties.items():
        size += len(name) + len(value) + 2
    return size
