"""Messages for `async for`: they wait here until the application asks for the next one."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Self

from penstock.client.client_session import Session
from penstock.client.consumer.dispatch.completion import Settling
from penstock.client.consumer.dispatch.handlers import Retry, again
from penstock.client.consumer.process_queue import ProcessQueue
from penstock.client.received_message import FINISHED, WORKING, ReceivedMessage


class Mailbox:
    """A dispatch whose messages are fetched.

    A message is done when its iterator is asked for the next one. Messages that were fetched when
    the consumer closes are not done: they come again.
    """

    def __init__(self, session: Session, settling: Settling) -> None:
        self._session = session
        self._settling = settling
        self._waiting: deque[ReceivedMessage] = deque()
        self._readers: deque[asyncio.Future[None]] = deque()
        self._handled: dict[ReceivedMessage, asyncio.Future[Retry | None]] = {}
        self._closed = False
        settling.resubmit = self._put_back

    def submit(self, work: ProcessQueue, messages: list[ReceivedMessage]) -> None:
        self._waiting += messages
        self._wake(len(messages))

    async def stop(self, work: ProcessQueue) -> None:
        """Messages of a dropped queue are let go; results of fetched ones count no more."""
        waiting = self._waiting
        for _ in range(len(waiting)):
            message = waiting.popleft()
            if message.owner is work:
                self._let_go(message)
            else:
                waiting.append(message)

    async def close(self, drain_ms: int) -> None:
        """Readers get no more; there is nothing to wait for."""
        self._closed = True
        self._waiting.clear()
        self._wake(len(self._readers))
        for handled in self._handled.values():
            handled.cancel()

    async def handle(self, messages: list[ReceivedMessage]) -> Retry | None:
        """For queues in order: hand the one message over, and wait until it is settled."""
        (message,) = messages
        handled: asyncio.Future[Retry | None] = asyncio.get_running_loop().create_future()
        self._handled[message] = handled
        self._waiting.append(message)
        self._wake(1)
        try:
            return await handled
        finally:
            del self._handled[message]

    async def next(self) -> ReceivedMessage | None:
        """The next message; None when the consumer is closed."""
        while not self._closed:
            while self._waiting:
                message = self._waiting.popleft()
                owner = message.owner
                assert isinstance(owner, ProcessQueue)
                if owner.dropped or message.state == FINISHED:
                    self._let_go(message)
                    continue
                message.state = WORKING
                message.since_ms = self._session.clock.monotonic_ms()
                return message
            reader = asyncio.get_running_loop().create_future()
            self._readers.append(reader)
            try:
                await reader
            except asyncio.CancelledError:
                if reader.done() and not reader.cancelled():
                    self._wake(1)  # another one has to look, now that this one leaves
                raise
        return None

    async def settle(self, message: ReceivedMessage) -> None:
        """The application is through with a message."""
        handled = self._handled.get(message)
        if handled is not None:
            if not handled.done():
                handled.set_result(again(message, None))
            return
        settling = self._settling.settle((message,), None)
        if message.again is None:
            await settling
        else:  # it goes back, also where the reader does not wait for that
            await asyncio.shield(self._session.spawn(settling))

    def abandon(self, message: ReceivedMessage) -> None:
        """Its reader has left the loop. In order it comes again, since all others wait for it;
        else it does so when its handler's time is over, or after the close. From any thread."""
        handled = self._handled.get(message)
        if handled is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                handled.get_loop().call_soon_threadsafe(_fail, handled)

    def _let_go(self, message: ReceivedMessage) -> None:
        handled = self._handled.get(message)
        if handled is not None:
            handled.cancel()

    def _put_back(self, message: ReceivedMessage) -> None:
        self._waiting.append(message)
        self._wake(1)

    def _wake(self, count: int) -> None:
        while count > 0 and self._readers:
            reader = self._readers.popleft()
            if not reader.done():
                reader.set_result(None)
                count -= 1


def _fail(handled: asyncio.Future[Retry | None]) -> None:
    if not handled.done():
        handled.set_result(Retry())


class MessageIterator:
    """One `async for`: each of several gets messages of its own."""

    def __init__(self, find: Callable[[], Awaitable[Mailbox | None]]) -> None:
        """`find` gives None for a consumer that is closed while it begins."""
        self._find = find
        self._mailbox: Mailbox | None = None
        self._last: ReceivedMessage | None = None

    def __del__(self) -> None:
        if self._mailbox is not None and self._last is not None:
            self._mailbox.abandon(self._last)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> ReceivedMessage:
        mailbox = self._mailbox
        if mailbox is None:
            mailbox = self._mailbox = await self._find()
        if mailbox is None:
            raise StopAsyncIteration
        last, self._last = self._last, None
        if last is not None:
            await mailbox.settle(last)
        message = await mailbox.next()
        if message is None:
            raise StopAsyncIteration
        self._last = message
        return message
