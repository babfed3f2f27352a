"""Blocking consumers that run until they are told to stop: by `stop`, SIGINT or SIGTERM."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Generic, Protocol, Self, TypeVar

from penstock.client.consumer.dispatch.handlers import Function
from penstock.client.sync.loop_thread import Client, Face, await_result, loop_thread
from penstock.errors import ClientClosed

HandlerT = TypeVar("HandlerT", bound=Function)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Runs(Client, Protocol):
    """An asynchronous consumer with handlers; `run` ends when it is closed."""

    def on(
        self, topic: str, tags: str = "*", *, sql: str | None = None
    ) -> Callable[[HandlerT], HandlerT]: ...

    def subscribe(self, topic: str, tags: str = "*", *, sql: str | None = None) -> None: ...

    async def run(self) -> None: ...


Running = TypeVar("Running", bound=Runs)


class RunningFace(Face[Running], Generic[Running]):
    """What consumers with handlers have in common.

    `with` starts one that knows what to consume; one that does not is started by what follows, so
    that handlers may be decorated inside the block.
    """

    _reopens = False

    def _reset(self) -> None:
        self._declared = False
        self._entered = False

    def _renew(self) -> None:
        raise ClientClosed(
            f"the {type(self).__name__} was closed", hint="make another one, with its handlers"
        )

    def __enter__(self) -> Self:
        self._live()
        self._entered = True
        if self._declared:
            self.start()
        return self

    def _ends(self) -> bool:
        ends = super()._ends()
        self._entered = False
        return ends

    def _open(self) -> Running:
        if self._entered and not self._started:
            self.start()
        return super()._open()

    def subscribe(self, topic: str, tags: str = "*", *, sql: str | None = None) -> None:
        """Consume a topic: all of it, some tags ("a || b"), or what an SQL92 expression selects."""
        self._do(lambda: self._live().subscribe(topic, tags, sql=sql))
        self._declared = True

    def on(
        self, topic: str, tags: str = "*", *, sql: str | None = None
    ) -> Callable[[HandlerT], HandlerT]:
        """Decorate a function that is called with the messages of a topic: in a thread, or, if it
        is async, on the event loop of the blocking clients.

        The message is done when it returns. It comes again later when it raises, or returns False
        or `Retry(delay_level)`.
        """

        def add(function: HandlerT) -> HandlerT:
            self._do(lambda: self._live().on(topic, tags, sql=sql)(function))
            self._declared = True
            return function

        return add

    def run(self) -> None:
        """Consume until `stop`, SIGINT (Ctrl-C) or SIGTERM; then finish in order and return.

        Signals are heard in the main thread only. A second one does what it does without us.
        """
        inner = self._live()
        self._check_caller()
        if not self._started:
            if self._goodbye is not None:
                self._renew()
            self._note_started()
        try:
            with _stopped_by_signals(self.stop):
                await_result(loop_thread().begin(inner.run))
        finally:
            self.close()

    def stop(self) -> None:
        """Let `run`, in whatever thread it is, come to its end; a handler may call it.

        Does not wait for that: `close`, in a handler, waits `drain_ms` for the handler itself.
        """
        if self._started:
            loop_thread().begin(self._inner.close)


@contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Whoever started the process with a signal ignored, as nohup does, wants that; and a handler
    # that is not Python's (None) could not be put back.
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    before = {
        number: handler
        for number, handler in handlers.items()
        if handler not in (None, signal.SIG_IGN)
    }
    pid = os.getpid()

    def give_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def heard(number: int, frame: FrameType | None) -> None:
        give_back()
        if pid == os.getpid():
            stop()
        else:  # in a child that a handler has forked: the signal is for the child
            signal.raise_signal(number)

    for number in before:
        signal.signal(number, heard)
    try:
        yield
    finally:
        give_back()
