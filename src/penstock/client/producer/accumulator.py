"""Batching on the client's side: many small sends become few requests.

Messages wait until enough of one kind have come together or the oldest has waited long enough. One
kind is one topic, and one queue where the sender named it. Each message has its own future.

What a broker stores one by one goes alone: messages that wait for their time, retries and halves.
So does a message that would fill a batch by itself; batches are not compressed, it may be.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from penstock.client.messages import Message, MessageQueue, SendReceipt
from penstock.client.producer.in_flight import InFlight
from penstock.clock import Alarm, Clock
from penstock.errors import BadSetting, ClientClosed, MessageIllegal, PenstockError, RecordError
from penstock.wire.codes import PROPERTY_PRODUCER_GROUP, RETRY_TOPIC_PREFIX

SendBatch: TypeAlias = Callable[
    [Sequence[Message], MessageQueue | None], Awaitable[Sequence[SendReceipt | PenstockError]]
]
"""Sends messages of one topic as one request (a single one as a plain send): what became of each,
in order. Raises if none was sent."""

OVERHEAD_BYTES: Final = 100
"""What a message takes in a batch beside body, tags, keys and properties, with its id."""

_Kind: TypeAlias = tuple[str, MessageQueue | None, bool]


@dataclass(frozen=True, slots=True)
class Batching:
    """When waiting messages leave: whichever comes first."""

    linger_ms: int = 10
    bytes_max: int = 32 * 1024
    count_max: int = 1_000

    def __post_init__(self) -> None:
        for name in ("linger_ms", "bytes_max", "count_max"):
            value = getattr(self, name)
            if value <= 0:
                raise BadSetting(
                    f"{name} of Batching is {value}", hint="give a number above 0, or no batching"
                )


class Accumulator:
    """Messages that wait for company. Those without a receipt yet count against `count_max`."""

    def __init__(
        self, send_batch: SendBatch, batching: Batching, clock: Clock, count_max: int = 10_000
    ) -> None:
        self.held = InFlight(count_max, clock)
        self._send_batch = send_batch
        self._batching = batching
        self._clock = clock
        self._open: dict[_Kind, _Batch] = {}
        self._sending: set[asyncio.Task[None]] = set()
        self._closed = False

    def add(
        self, message: Message, queue: MessageQueue | None = None
    ) -> asyncio.Future[SendReceipt]:
        """Take a message; its future has the receipt or the error of its own. Never blocks, but
        raises TooMuchInFlight.

        A message that waits for its time, or that fills a batch by itself, goes alone, at once.
        """
        if self._closed:
            raise ClientClosed("the producer is closed: it takes no more messages")
        future: asyncio.Future[SendReceipt] = asyncio.get_running_loop().create_future()
        limits, size, alone = self._batching, _size(message), not _can_be_batched(message)
        self.held.enter(size)
        if alone or size >= limits.bytes_max:
            self._start([_Waiter(message, future, size)], queue)
            return future
        kind = (message.topic, queue, message.wait_stored)
        batch = self._open.get(kind)
        if batch is not None and batch.size + size > limits.bytes_max:
            self._leave(kind)
            batch = None
        if batch is None:
            due_ms = self._clock.now_ms() + limits.linger_ms
            alarm = self._clock.wake_at(due_ms, lambda: self._leave(kind))
            batch = self._open[kind] = _Batch(alarm)
        batch.waiting.append(_Waiter(message, future, size))
        batch.size += size
        if len(batch.waiting) >= limits.count_max or batch.size >= limits.bytes_max:
            self._leave(kind)
        return future

    async def flush(self) -> None:
        """Send what waits now; returns when all of it has an answer (errors are the futures')."""
        for kind in list(self._open):
            self._leave(kind)
        if self._sending:  # what is added from now on is none of this flush's
            await asyncio.wait(list(self._sending))

    async def close(self) -> None:
        """The same, and take no more: `add` raises ClientClosed from then on."""
        self._closed = True
        await self.flush()

    def _leave(self, kind: _Kind) -> None:
        batch = self._open.pop(kind)
        batch.alarm.cancel()
        waiting = []
        for one in batch.waiting:
            if one.future.done():  # called off
                self.held.leave(self.held.wave, one.size)
            else:
                waiting.append(one)
        if waiting:
            self._start(waiting, kind[1])

    def _start(self, waiting: "list[_Waiter]", queue: MessageQueue | None) -> None:
        task = asyncio.ensure_future(self._send(waiting, queue))
        self._sending.add(task)
        task.add_done_callback(lambda done: self._sent(done, waiting))

    def _sent(self, task: "asyncio.Task[None]", waiting: "list[_Waiter]") -> None:
        self._sending.discard(task)
        for one in waiting:
            self.held.leave(self.held.wave, one.size)
            if not one.future.done():  # our task was cancelled: the loop ends
                one.future.cancel()

    async def _send(self, waiting: "list[_Waiter]", queue: MessageQueue | None) -> None:
        outcomes: Sequence[SendReceipt | Exception]
        try:
            outcomes = await self._send_batch([one.message for one in waiting], queue)
        except Exception as error:  # also for what is wrong with the application's message
            outcomes = [error] * len(waiting)
        wrong = []
        for one, outcome in zip(waiting, outcomes, strict=True):
            if len(waiting) > 1 and _is_wrong(outcome):
                wrong.append(one)
            else:
                one.settle(outcome)
        # Nothing of them was stored. One of them is wrong: the others are not to suffer from it.
        for one in wrong:
            if not one.future.done():
                await self._send([one], queue)


class _Waiter:
    """A message that waits for its receipt."""

    __slots__ = ("future", "message", "size")

    def __init__(self, message: Message, future: "asyncio.Future[SendReceipt]", size: int) -> None:
        self.message = message
        self.future = future
        self.size = size

    def settle(self, outcome: SendReceipt | Exception) -> None:
        if self.future.done():
            return
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class _Batch:
    __slots__ = ("alarm", "size", "waiting")

    def __init__(self, alarm: Alarm) -> None:
        self.alarm = alarm
        self.waiting: list[_Waiter] = []
        self.size = 0


def _is_wrong(outcome: SendReceipt | Exception) -> bool:
    """Whether a message can't be sent as it is, so that nothing of its request was stored."""
    if isinstance(outcome, PenstockError):
        return isinstance(outcome, MessageIllegal | RecordError)
    return isinstance(outcome, Exception)


def _can_be_batched(message: Message) -> bool:
    return not (
        message.delay_level > 0
        or message.delay is not None
        or message.deliver_at is not None
        or message.topic.startswith(RETRY_TOPIC_PREFIX)
        or (message.properties and PROPERTY_PRODUCER_GROUP in message.properties)
    )


def _size(message: Message) -> int:
    """About how many bytes a message takes in a batch."""
    size = OVERHEAD_BYTES + len(message.body) + len(message.tags or "")
    for key in message.keys:
        size += len(key) + 1
    for name, value in message.properties.items():
        size += len(name) + len(value) + 2
    return size
