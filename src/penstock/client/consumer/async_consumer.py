"""`AsyncConsumer`, the push consumer: calls handlers, or gives messages to `async for`.

    async with AsyncConsumer("localhost:9876", group="coupons") as consumer:
        @consumer.on("UserRegistered", tags="trial || vip")
        async def grant(message): ...
        await consumer.run()

Messages are delivered at least once. The committed offset of a queue is the smallest offset that is
not handled, so a message can be delivered again after a crash or a rebalance.
"""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.client.client_options import takes_options
from penstock.client.client_session import Session
from penstock.client.consumer.consumer_core import ConsumerCore
from penstock.client.consumer.consumer_options import ConsumerOptions
from penstock.client.consumer.dispatch.handlers import Function, Handlers
from penstock.client.consumer.dispatch.message_iterator import IteratorDispatch, MessageIterator
from penstock.client.consumer.subscription import Subscription
from penstock.client.lifetime import Lifetime
from penstock.client.messages import MessageQueue, SendReceipt
from penstock.client.producer.request_client import reply_message, send_reply
from penstock.client.received_message import ReceivedMessage
from penstock.errors import BadSetting, ClientClosed, InvalidParameter
from penstock.wire.codes import topic_fault

HandlerT = TypeVar("HandlerT", bound=Function)


@dataclass(frozen=True, slots=True)
class ConsumerQueueState:
    """The state of an assigned queue."""

    queue: MessageQueue
    progress: int
    """All messages before this offset are handled."""
    next_offset: int
    """The offset of the next pull."""
    lag: int | None
    """Messages of the queue that are not handled; None before the first response."""
    in_work: int
    """Messages that were received and are not handled."""
    in_work_bytes: int
    oldest_age_ms: int | None
    """Time since the oldest of these messages was received."""
    received: int
    finished: int
    failed: int
    paused: bool
    throttled: int
    """Number of pauses by flow control."""
    last_failure: str | None = None
    """The last failure of a handler: exception, text and line."""


class AsyncConsumer(Lifetime):
    """Consumes topics for a group. The options are described at `ConsumerOptions`.

    A handler takes a message, or a list of messages if `handle_batch` is above 1. The message is
    acknowledged when the handler returns. It is redelivered later if the handler raises, or returns
    False or `Retry(delay_level)`. Async handlers run on the event loop, others in threads.

    With `model="broadcast"` failed messages are logged and dropped, as in RocketMQ.
    """

    @takes_options(ConsumerOptions)
    def __init__(self, options: ConsumerOptions) -> None:
        self.group = options.group
        self._session = Session(options)
        self._handlers = Handlers(takes_list=options.handle_batch > 1)
        self._core = ConsumerCore(self._session, options, self._handlers)
        self._start_lock = asyncio.Lock()
        self._start_cancelled = False  # by a close during the start
        self._closing: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None  # from the start on

    # --- lifecycle

    async def start(self) -> None:
        """Start to consume; `async with`, `run` and `async for` do it.

        Without a subscription, consuming starts with the first one.
        """
        async with self._start_lock:
            if self._closing is not None:
                raise _closed()
            if self._session.started:
                self._session.check_alive()
                return
            await self._start()

    async def _start(self) -> None:
        self._start_cancelled = False
        self._loop = asyncio.get_running_loop()
        await self._session.start()
        try:
            if self._start_cancelled:
                raise _closed()
            if self._core.has_subscriptions:
                await self._start_core()
        except BaseException:
            if self._closing is None:
                await self._core.cancel_start()
                await self._session.close()
            raise

    async def _start_core(self) -> None:
        """Start, or wait for a start in progress; raises ClientClosed if it is cancelled."""
        starting = self._core.start()
        await asyncio.wait([starting])
        if starting.cancelled():
            raise _closed()
        starting.result()

    def stop(self) -> None:
        """Let `run` return; handlers may call it, also in a thread."""
        if self._loop is None or self._loop is _running_loop():
            self._ended.set()
        else:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._ended.set)

    async def close(self) -> None:
        """Stop pulling, wait up to `drain_ms` for handlers, commit offsets and unregister.

        Called in a handler, which would wait for itself, it does not wait.
        """
        if self._session.started:
            self._session.check_alive()
            if self._closing is None:
                self._closing = asyncio.ensure_future(self._close())
        elif self._closing is None:
            self._start_cancelled = True
            return
        if not self._core.is_handling:
            await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await self._core.close()
        finally:
            await self._session.close()
            self._ended.set()

    async def run(self) -> None:
        """Consume until `stop`, `close` or a cancellation; then close the consumer."""
        try:
            if await self._consume():
                await self._ended.wait()
        finally:
            await self.close()

    async def _consume(self) -> bool:
        """Start consuming; False if the consumer is closed meanwhile."""
        closed_before = self._closing is not None
        try:
            await self._start_all()
        except ClientClosed:
            if closed_before:
                raise
            return False
        return True

    async def _start_all(self) -> None:
        await self.start()
        if not self._core.has_subscriptions:
            raise InvalidParameter(
                "there is no subscription",
                hint="use @consumer.on(topic) or subscribe(topic)",
            )
        await self._start_core()

    # --- subscriptions

    def subscribe(self, topic: str, tags: str = "*", *, sql: str | None = None) -> None:
        """Subscribe to a topic: all messages, some tags ("a || b"), or by an SQL92 expression.

        A second subscription to a topic replaces the first.
        """
        self._subscribe(topic, tags, sql, merge=False)

    def unsubscribe(self, topic: str) -> None:
        """Remove the subscription to a topic."""
        self._core.unsubscribe(self._session.with_namespace(topic))

    def on(
        self, topic: str, tags: str = "*", *, sql: str | None = None
    ) -> Callable[[HandlerT], HandlerT]:
        """Decorate a handler of a topic, async or not.

        If a topic has several handlers, the first one whose tags match gets a message.
        """

        def add(function: HandlerT) -> HandlerT:
            if self._session.started and self._core.iterator_dispatch is not None:
                raise InvalidParameter(
                    "the consumer was started without handlers",
                    hint="add handlers before the start, or use only `async for`",
                )
            self._subscribe(topic, tags, sql, merge=True)
            self._handlers.add(topic, tags, function)
            return function

        return add

    def _subscribe(self, topic: str, tags: str, sql: str | None, *, merge: bool) -> None:
        if self._session.started:
            self._session.check_alive()
        fault = topic_fault(topic)
        if fault is not None:
            raise BadSetting(f"bad topic name {topic[:80]!r}: {fault}", hint="use another name")
        name = self._session.with_namespace(topic)
        version = self._core.next_version()
        self._core.subscribe(Subscription.of(name, tags, sql, version=version), merge=merge)

    def __aiter__(self) -> MessageIterator:
        """Messages one by one; a message is acknowledged when the next one is requested.

        `message.retry()` before that lets the broker redeliver it later.
        """
        return MessageIterator(self._start_iterating)

    async def _start_iterating(self) -> IteratorDispatch | None:
        if not await self._consume():
            return None
        if self._core.iterator_dispatch is None:
            raise InvalidParameter(
                "`async for` is not possible with handlers", hint="use subscribe() instead of on()"
            )
        return self._core.iterator_dispatch

    # --- flow control

    def pause(self, topic: str | None = None) -> None:
        """Stop pulling a topic or all topics; messages already received are still handled."""
        self._core.pause(self._names(topic))

    def resume(self, topic: str | None = None) -> None:
        """Pull a topic or all topics again."""
        self._core.resume(self._names(topic))

    def _names(self, topic: str | None) -> list[str]:
        if self._session.started:
            self._session.check_alive()
        return list(self._core.topics()) if topic is None else [self._session.with_namespace(topic)]

    def queues(self) -> list[ConsumerQueueState]:
        """The state of each assigned queue."""
        if self._session.started:
            self._session.check_alive()
        now_ms = self._session.clock.now_ms()
        states = []
        for queue, process_queue in sorted(self._core.process_queues.items()):
            oldest = process_queue.oldest
            topic = self._session.without_namespace(queue.topic)
            states.append(
                ConsumerQueueState(
                    queue=MessageQueue(topic, queue.broker_name, queue.queue_id),
                    progress=process_queue.progress,
                    next_offset=process_queue.next_offset,
                    lag=max(process_queue.end_offset - process_queue.progress, 0)
                    if process_queue.end_offset >= 0
                    else None,
                    in_work=process_queue.count,
                    in_work_bytes=process_queue.bytes,
                    oldest_age_ms=None if oldest is None else now_ms - oldest.received_ms,
                    received=process_queue.received,
                    finished=process_queue.finished,
                    failed=process_queue.failed,
                    last_failure=process_queue.last_failure,
                    paused=process_queue.paused,
                    throttled=process_queue.throttled,
                )
            )
        return states

    async def explain(self) -> list[str]:
        """Why no messages are received or handled: a sentence for each topic or kind of failure.

        Reasons why none are received are also logged once, within a heartbeat interval.
        """
        self._session.check_alive()
        return await self._core.explain()

    # --- replies

    async def reply(
        self, message: ReceivedMessage, body: bytes | str, **fields: Any
    ) -> SendReceipt:
        """Reply to a message that was sent as a request; `fields` are those of Message."""
        answer = reply_message(message, body, **fields)
        return await send_reply(
            self._session,
            message,
            answer,
            self._core.send,
            timeout_ms=self._session.options.timeout_ms,
        )


def _closed() -> ClientClosed:
    return ClientClosed("the consumer was closed", hint="create another one")


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
