"""The push-style consumer: messages come to handlers, or one by one to `async for`.

    async with AsyncConsumer("localhost:9876", group="coupons") as consumer:
        @consumer.on("UserRegistered", tags="trial || vip")
        async def grant(message): ...
        await consumer.run()

Messages are delivered at least once. A group's progress in a queue is the smallest offset that is
still in work, so a message may come again after a crash or while queues change hands.
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
from penstock.client.consumer.dispatch.message_iterator import Mailbox, MessageIterator
from penstock.client.consumer.subscription import Subscription
from penstock.client.lifetime import Lifetime
from penstock.client.messages import MessageQueue, SendReceipt
from penstock.client.producer.request_client import reply_message, send_reply
from penstock.client.received_message import ReceivedMessage
from penstock.errors import BadSetting, ClientClosed, InvalidParameter
from penstock.wire.codes import topic_fault

HandlerT = TypeVar("HandlerT", bound=Function)


@dataclass(frozen=True, slots=True)
class QueueState:
    """One queue of this consumer at one moment."""

    queue: MessageQueue
    progress: int
    """Everything before this offset is settled."""
    next_offset: int
    """What the next pull asks for."""
    lag: int | None
    """Messages of the queue that are not settled; None before the first answer."""
    in_work: int
    in_work_bytes: int
    oldest_age_ms: int | None
    """How long ago the oldest message in work came here."""
    received: int
    finished: int
    failed: int
    paused: bool
    throttled: int
    """How often pulling has waited because too much was in work."""


class AsyncConsumer(Lifetime):
    """Consumes topics for a group. Options are described at `ConsumerOptions`.

    A handler takes a message (a list of messages where `handle_batch` is more than 1). It is done
    when the handler returns; it comes again later when the handler raises, or returns False or
    `Retry(delay_level)`. Async handlers run on the event loop, others in threads: `concurrency` at
    a time, and with `orderly` one at a time for each queue.

    With `model="broadcast"` every consumer gets every message; failed ones are logged and dropped,
    as in RocketMQ. Their progress is in memory, or in the file `offsets_path`.
    """

    @takes_options(ConsumerOptions)
    def __init__(self, options: ConsumerOptions) -> None:
        self.group = options.group
        self._session = Session(options)
        self._handlers = Handlers(takes_list=options.handle_batch > 1)
        self._core = ConsumerCore(self._session, options, self._handlers)
        self._starting = asyncio.Lock()
        self._unwanted = False
        self._closing: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    # --- life

    async def start(self) -> None:
        """Begin to consume; `async with`, `run` and `async for` do it.

        Without a subscription it begins with the first one.
        """
        async with self._starting:
            if self._closing is not None:
                raise _closed()
            if self._session.started:
                self._session.check_alive()
                return
            await self._start()

    async def _start(self) -> None:
        self._unwanted = False
        self._loop = asyncio.get_running_loop()
        await self._session.start()
        try:
            if self._unwanted:
                raise _closed()
            if self._core.subscribes:
                await self._begin()
        except BaseException:
            if self._closing is None:
                await self._core.abandon()
                await self._session.close()
            raise

    async def _begin(self) -> None:
        """Begin, or wait until another caller has; raises ClientClosed if `close` comes between."""
        beginning = self._core.begin()
        await asyncio.wait([beginning])
        if beginning.cancelled():
            raise _closed()
        beginning.result()

    def stop(self) -> None:
        """Let `run` end; a handler may call it, also in a thread."""
        if self._loop is None or self._loop is _running_loop():
            self._ended.set()
        else:
            with contextlib.suppress(RuntimeError):  # that loop is closed: nothing runs
                self._loop.call_soon_threadsafe(self._ended.set)

    async def close(self) -> None:
        """Stop pulling, wait (at most `drain_ms`) for handlers, store progress, say goodbye.

        In a handler, which would wait for itself, it only begins with that.
        """
        if self._session.started:
            self._session.check_alive()
            if self._closing is None:
                self._closing = asyncio.ensure_future(self._close())
        elif self._closing is None:
            self._unwanted = True  # a start that is under way goes no further
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
        """Consume until `stop`, `close` or until this is cancelled; closes the consumer then."""
        try:
            if await self._consume():
                await self._ended.wait()
        finally:
            await self.close()

    async def _consume(self) -> bool:
        """Whether it has begun; False if it is closed meanwhile."""
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
        if not self._core.subscribes:
            raise InvalidParameter(
                "nothing is subscribed",
                hint="name topics by @consumer.on(topic) or subscribe(topic)",
            )
        await self._begin()

    # --- what to consume

    def subscribe(self, topic: str, tags: str = "*", *, sql: str | None = None) -> None:
        """Consume a topic: all of it, some tags ("a || b"), or what an SQL92 expression selects.

        A second subscription to a topic replaces the first.
        """
        self._subscribe(topic, tags, sql, merge=False)

    def unsubscribe(self, topic: str) -> None:
        """Consume a topic no more."""
        self._core.unsubscribe(self._session.with_namespace(topic))

    def on(
        self, topic: str, tags: str = "*", *, sql: str | None = None
    ) -> Callable[[HandlerT], HandlerT]:
        """Decorate a function, async or not, that is called with the messages of a topic.

        Several handlers of a topic share its messages by their tags: the first that fits gets it.
        """

        def add(function: HandlerT) -> HandlerT:
            if self._session.started and self._core.mailbox is not None:
                raise InvalidParameter(
                    "a handler for a consumer that was started without one",
                    hint="add handlers before the consumer starts, or use `async for` only",
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
            raise BadSetting(f"no topic can be called {topic[:80]!r}: {fault}", hint="check it")
        name = self._session.with_namespace(topic)
        version = self._core.next_version()
        self._core.subscribe(Subscription.of(name, tags, sql, version=version), merge=merge)

    def __aiter__(self) -> MessageIterator:
        """Messages one by one; a message is done when the next one is asked for.

        `message.retry()` before that lets it come again later.
        """
        return MessageIterator(self._mailbox)

    async def _mailbox(self) -> Mailbox | None:
        if not await self._consume():
            return None
        if self._core.mailbox is None:
            raise InvalidParameter(
                "`async for` over a consumer with handlers", hint="use subscribe() instead of on()"
            )
        return self._core.mailbox

    # --- flow

    def pause(self, topic: str | None = None) -> None:
        """Pull no more messages of a topic, or of all; those that are here are still handled."""
        self._core.pause(self._names(topic))

    def resume(self, topic: str | None = None) -> None:
        """Pull them again."""
        self._core.resume(self._names(topic))

    def _names(self, topic: str | None) -> list[str]:
        if self._session.started:
            self._session.check_alive()
        return list(self._core.topics()) if topic is None else [self._session.with_namespace(topic)]

    def queues(self) -> list[QueueState]:
        """The queues that are this consumer's now, and how it does there."""
        if self._session.started:
            self._session.check_alive()
        now_ms = self._session.clock.now_ms()
        states = []
        for queue, work in sorted(self._core.works.items()):
            oldest = work.oldest
            topic = self._session.without_namespace(queue.topic)
            states.append(
                QueueState(
                    queue=MessageQueue(topic, queue.broker_name, queue.queue_id),
                    progress=work.progress,
                    next_offset=work.next_offset,
                    lag=max(work.end_offset - work.progress, 0) if work.end_offset >= 0 else None,
                    in_work=work.count,
                    in_work_bytes=work.bytes,
                    oldest_age_ms=None if oldest is None else now_ms - oldest.received_ms,
                    received=work.received,
                    finished=work.finished,
                    failed=work.failed,
                    paused=work.paused,
                    throttled=work.throttled,
                )
            )
        return states

    async def explain(self) -> list[str]:
        """Why nothing comes: a sentence for each topic from which nothing does, or can.

        The log says the same by itself, within a heartbeat and once.
        """
        self._session.check_alive()
        return await self._core.explain()

    # --- replies

    async def reply(
        self, message: ReceivedMessage, body: bytes | str, **fields: Any
    ) -> SendReceipt:
        """Answer a message that was sent as a request; `fields` are those of Message."""
        answer = reply_message(message, body, **fields)
        return await send_reply(
            self._session,
            message,
            answer,
            self._core.send,
            timeout_ms=self._session.options.timeout_ms,
        )


def _closed() -> ClientClosed:
    return ClientClosed("the consumer was closed", hint="make another one")


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
