"""Synchronous consumers that run handlers until `stop`, SIGINT or SIGTERM."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Generic, Protocol, Self, TypeVar

from penstock.client.consumer.dispatch.handlers import Function
from penstock.client.sync.loop_thread import await_result, loop_thread
from penstock.client.sync.sync_client import AsyncClient, SyncClient
from penstock.errors import ClientClosed

HandlerT = TypeVar("HandlerT", bound=Function)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class HandlerClient(AsyncClient, Protocol):
    """An asyncio consumer with handlers; `run` returns when it is closed."""

    def on(
        self, topic: str, tags: str = "*", *, sql: str | None = None
    ) -> Callable[[HandlerT], HandlerT]: ...

    def subscribe(self, topic: str, tags: str = "*", *, sql: str | None = None) -> None: ...

    async def run(self) -> None: ...


HandlerClientT = TypeVar("HandlerClientT", bound=HandlerClient)


class SyncHandlerClient(SyncClient[HandlerClientT], Generic[HandlerClientT]):
    """A synchronous consumer with handlers.

    `with` starts a consumer that has a subscription. One without starts with the next call, so
    handlers can be decorated inside the block.
    """

    _survives_fork = False

    def _reset_state(self) -> None:
        self._subscribed = False
        self._entered = False

    def _recreate(self) -> None:
        raise ClientClosed(
            f"the {type(self).__name__} was closed", hint="create another one, with its handlers"
        )

    def __enter__(self) -> Self:
        self._current()
        self._entered = True
        if self._subscribed:
            self.start()
        return self

    def _mark_closed(self) -> bool:
        closes = super()._mark_closed()
        self._entered = False
        return closes

    def _started_client(self) -> HandlerClientT:
        if self._entered and not self._started:
            self.start()
        return super()._started_client()

    def subscribe(self, topic: str, tags: str = "*", *, sql: str | None = None) -> None:
        """Subscribe to a topic: all messages, some tags ("a || b"), or by an SQL92 expression."""
        self._call_in_loop(lambda: self._current().subscribe(topic, tags, sql=sql))
        self._subscribed = True

    def on(
        self, topic: str, tags: str = "*", *, sql: str | None = None
    ) -> Callable[[HandlerT], HandlerT]:
        """Decorate a handler of a topic: it runs in a thread or, if it is async, on the event loop
        of the synchronous clients.

        A message is acknowledged when its handler returns. It is redelivered later if the handler
        raises, or returns False or `Retry(delay_level)`.
        """

        def add(function: HandlerT) -> HandlerT:
            self._call_in_loop(lambda: self._current().on(topic, tags, sql=sql)(function))
            self._subscribed = True
            return function

        return add

    def run(self) -> None:
        """Consume until `stop`, SIGINT (Ctrl-C) or SIGTERM; then close and return.

        Signals are handled only in the main thread. A second signal has its usual effect.
        """
        client = self._current()
        self._check_caller()
        if not self._started:
            if self._finalizer is not None:
                self._recreate()
            self._mark_started()
        try:
            with _stopped_by_signals(self.stop):
                await_result(loop_thread().submit(client.run))
        finally:
            self.close()

    def stop(self) -> None:
        """Let `run` return, in any thread; handlers may call it.

        It does not wait: `close` in a handler would wait `drain_ms` for the handler itself.
        """
        if self._started:
            loop_thread().submit(self._client.close)


@contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # An ignored signal (nohup) stays ignored; a handler that is not Python's (None) could not be
    # restored.
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    previous = {
        number: handler
        for number, handler in handlers.items()
        if handler not in (None, signal.SIG_IGN)
    }
    pid = os.getpid()

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def on_signal(number: int, frame: FrameType | None) -> None:
        restore()
        if pid == os.getpid():
            stop()
        else:  # in a child process that a handler has forked
            signal.raise_signal(number)

    for number in previous:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        restore()
