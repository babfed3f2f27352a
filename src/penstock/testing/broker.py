"""A broker for tests, in this process: `with InProcessBroker() as broker: …`.

The servers run in a thread of their own, so that plain tests, asyncio tests and blocking clients
all use them in the same way, over real connections.
"""

import asyncio
import inspect
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from penstock.client.received_message import ReceivedMessage
from penstock.client.sync.loop_thread import LoopThread
from penstock.clock import LoopClock, pause
from penstock.testing.clock import BrokerClock
from penstock.testing.house import House
from penstock.wire.codes import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

T = TypeVar("T")

WAIT_SECONDS = 10.0
LOOK_MS = 2


class InProcessBroker:
    """A NameServer with one broker on free ports of 127.0.0.1.

    `address` is what clients are given. The broker's time stands still: `clock.advance(days=3)`
    moves it. Settings are given by their full names: `InProcessBroker({"store.sync_flush": True})`.
    Without `data` the messages lie in a temporary directory that goes with the broker.
    """

    def __init__(
        self, settings: dict[str, Any] | None = None, *, data: Path | str | None = None
    ) -> None:
        self._given = settings or {}
        self._data = data
        self._pid = 0
        self._remove_folder: Callable[[], object] = _nothing
        self._thread: LoopThread | None = None
        self._house: House | None = None
        self.clock = BrokerClock(LoopClock().now_ms(), self._move)
        self.address = ""
        """The NameServer's: what clients take."""
        self.broker_address = ""

    # --- life

    def start(self) -> None:
        """Begin; `with` does so."""
        assert self._thread is None, "the broker is started already"
        self._pid = os.getpid()
        data = self._data
        if data is None:
            data = tempfile.mkdtemp(prefix="penstock-test-")
            # Also at the end of a process that forgot to close it.
            self._remove_folder = weakref.finalize(self, _remove, data, self._pid)
        try:
            self._house = house = House(self.clock, Path(data), self._given)
            # Not uvloop: whoever forks after it has looked up a name has children that crash.
            self._thread = LoopThread("penstock-test-broker", asyncio.new_event_loop())
            self._thread.run(house.start)
        except BaseException:
            self.close()
            raise
        self.address, self.broker_address = house.nameserver, house.address

    def close(self) -> None:
        """End; `with` does so."""
        thread, house = self._thread, self._house
        self._thread = self._house = None
        remove, self._remove_folder = self._remove_folder, _nothing
        if self._pid != os.getpid():
            return  # a child process: the broker is its parent's
        try:
            if thread is not None and house is not None:
                try:
                    thread.run(house.stop)
                finally:
                    thread.end()
        finally:
            remove()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def restart(self) -> Awaitable[None]:
        """Stop the broker in order and start it again on its port, with what it has stored."""
        thread, house = self._running()
        return _either(thread.begin(house.restart))

    # --- messages

    def create_topic(self, topic: str, *, queues: int = 4) -> None:
        """Make a topic; sends to one that does not exist make it too."""
        thread, house = self._running()
        thread.run(house.create_topic, topic, queues)

    def topics(self) -> list[str]:
        """The topics there are, those of retries and dead letters included."""
        return self._read(lambda house: house.topics())

    def messages(self, topic: str) -> list[ReceivedMessage]:
        """All that was ever stored in a topic, queue by queue: consumed or not."""
        return self._read(lambda house: house.messages(topic))

    def dead_letters(self, group: str) -> list[ReceivedMessage]:
        """The messages that a group has given up."""
        return self.messages(DLQ_TOPIC_PREFIX + group)

    def retries(self, group: str) -> list[ReceivedMessage]:
        """The messages that were delivered to a group once more, each time anew."""
        return self.messages(RETRY_TOPIC_PREFIX + group)

    def wait_until(
        self, predicate: Callable[[], object], *, seconds: float = WAIT_SECONDS
    ) -> Awaitable[None]:
        """Wait, in real time, until something is so; TimeoutError if it never is.

        Where an event loop runs this is to be awaited, and the predicate may be a coroutine.
        """
        if asyncio._get_running_loop() is not None:
            return asyncio.ensure_future(_become_true(predicate, seconds))
        until = time.monotonic() + seconds
        while not predicate():
            if time.monotonic() > until:
                raise TimeoutError(_not_so(predicate, seconds))
            time.sleep(LOOK_MS / 1000)
        return _Done(None)

    # --- inside

    def _move(self, ms: int) -> Awaitable[None]:
        thread, house = self._running()
        return _either(thread.begin(house.move, ms))

    def _read(self, read: Callable[[House], T]) -> T:
        thread, house = self._running()

        async def look() -> T:
            return read(house)

        return thread.run(look)

    def _running(self) -> tuple[LoopThread, House]:
        assert self._thread is not None, "the broker is not started, or closed"
        assert self._house is not None
        return self._thread, self._house


class _Done(Generic[T]):
    """What is there already, and may be awaited all the same."""

    def __init__(self, value: T) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, T]:
        return self._value
        yield


def _nothing() -> None:
    """There is no folder to remove."""


def _remove(folder: str, pid: int) -> None:
    if pid == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)


def _either(future: "Future[T]") -> Awaitable[T]:
    """The outcome of something in the broker's loop: to be awaited where a loop runs, else there
    when this returns."""
    if asyncio._get_running_loop() is not None:
        return asyncio.wrap_future(future)
    return _Done(future.result())


async def _become_true(predicate: Callable[[], object], seconds: float) -> None:
    clock = LoopClock()
    until_ms = clock.monotonic_ms() + seconds * 1000
    while True:
        outcome = predicate()
        if inspect.isawaitable(outcome):
            outcome = await outcome
        if outcome:
            return
        if clock.monotonic_ms() > until_ms:
            raise TimeoutError(_not_so(predicate, seconds))
        await pause(clock, LOOK_MS)


def _not_so(predicate: Callable[[], object], seconds: float) -> str:
    name = getattr(predicate, "__qualname__", repr(predicate))
    return f"{name} was not true within {seconds:g} s"
