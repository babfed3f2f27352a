"""Messages for `async for`: they wait until the application asks for the next one."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Self

from penstock.client.client_session import Session
from penstock.client.consumer.dispatch.completion import Completion
from penstock.client.consumer.dispatch.handlers import Retry, retry_for
from penstock.client.consumer.process_queue import ProcessQueue, process_queue_of
from penstock.client.received_message import FINISHED, HANDLING, ReceivedMessage

if TYPE_CHECKING:
    from penstock.client.telemetry.spans import ClientSpans


class IteratorDispatch:
    """A dispatch from which iterators fetch messages.

    A message is done when its iterator asks for the next one. Messages that are fetched when the
    consumer closes are not done and will be redelivered.
    """

    def __init__(
        self, session: Session, completion: Completion, spans: "ClientSpans | None" = None
    ) -> None:
        self._session = session
        self._spans = spans
        self._completion = completion
        self._waiting: deque[ReceivedMessage] = deque()
        self._readers: deque[asyncio.Future[None]] = deque()
        # Results of messages that `handle` waits for (ordered queues).
        self._results: dict[ReceivedMessage, asyncio.Future[Retry | None]] = {}
        self._closed = False

    def submit(self, process_queue: ProcessQueue, messages: list[ReceivedMessage]) -> None:
        """Add messages of a queue."""
        self._waiting += messages
        self._wake(len(messages))

    async def stop(self, process_queue: ProcessQueue) -> None:
        """Discard messages of a dropped queue; results of fetched ones are ignored."""
        waiting = self._waiting
        for _ in range(len(waiting)):
            message = waiting.popleft()
            if message.process_queue is process_queue:
                self._discard(message)
            else:
                waiting.append(message)

    async def close(self, drain_ms: int) -> None:
        """End all iterations; there is nothing to wait for."""
        self._closed = True
        self._waiting.clear()
        self._wake(len(self._readers))
        for result in self._results.values():
            result.cancel()

    async def handle(self, messages: list[ReceivedMessage]) -> Retry | None:
        """For ordered queues: pass one message to an iterator and wait until it is done."""
        (message,) = messages
        result: asyncio.Future[Retry | None] = asyncio.get_running_loop().create_future()
        self._results[message] = result
        self._waiting.append(message)
        self._wake(1)
        try:
            return await result
        finally:
            del self._results[message]

    async def next_message(self) -> ReceivedMessage | None:
        """The next message; None when the consumer is closed."""
        asked_ns = 0 if self._spans is None else self._spans.now_ns()
        while not self._closed:
            while self._waiting:
                message = self._waiting.popleft()
                if process_queue_of(message).dropped or message.state == FINISHED:
                    self._discard(message)
                    continue
                message.state = HANDLING
                message.handling_since_ms = self._session.clock.monotonic_ms()
                if self._spans is not None:
                    self._spans.received([message], asked_ns)
                return message
            reader = asyncio.get_running_loop().create_future()
            self._readers.append(reader)
            try:
                await reader
            except asyncio.CancelledError:
                if reader.done() and not reader.cancelled():
                    self._wake(1)  # pass the wake-up on to another reader
                raise
        return None

    async def complete(self, message: ReceivedMessage) -> None:
        """The application is done with a message."""
        result = self._results.get(message)
        if result is not None:
            if not result.done():
                result.set_result(retry_for(message, None))
            return
        completion = self._completion.complete((message,), None)
        if message.retry_level is None:
            await completion
        else:  # it is sent back even if the reader is cancelled
            await asyncio.shield(self._session.spawn(completion))

    def abandon(self, message: ReceivedMessage) -> None:
        """The iterator of a message is gone; called in any thread.

        In an ordered queue the message is handled again, since all others wait for it. Otherwise
        it is redelivered when it counts as stuck, or after the close.
        """
        result = self._results.get(message)
        if result is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                result.get_loop().call_soon_threadsafe(_retry, result)

    def _discard(self, message: ReceivedMessage) -> None:
        result = self._results.get(message)
        if result is not None:
            result.cancel()

    def _wake(self, count: int) -> None:
        while count > 0 and self._readers:
            reader = self._readers.popleft()
            if not reader.done():
                reader.set_result(None)
                count -= 1


def _retry(result: asyncio.Future[Retry | None]) -> None:
    if not result.done():
        result.set_result(Retry())


class MessageIterator:
    """One `async for`; several iterators share the messages."""

    def __init__(self, start: Callable[[], Awaitable[IteratorDispatch | None]]) -> None:
        """`start` starts the consumer; it returns None if the consumer is closed meanwhile."""
        self._start = start
        self._dispatch: IteratorDispatch | None = None
        self._last: ReceivedMessage | None = None

    def __del__(self) -> None:
        if self._dispatch is not None and self._last is not None:
            self._dispatch.abandon(self._last)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ReceivedMessage:
        dispatch = self._dispatch
        if dispatch is None:
            dispatch = self._dispatch = await self._start()
        if dispatch is None:
            raise StopAsyncIteration
        last, self._last = self._last, None
        if last is not None:
            await dispatch.complete(last)
        message = await dispatch.next_message()
        if message is None:
            raise StopAsyncIteration
        self._last = message
        return message
