"""A broker for tests, in this process: `with InProcessBroker() as broker: …`.

The servers run in their own thread, so that synchronous tests, asyncio tests and synchronous
clients all use them in the same way, over real connections.
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
from penstock.testing.in_process_cluster import InProcessCluster
from penstock.testing.virtual_clock import BrokerClock
from penstock.wire.codes import DLQ_TOPIC_PREFIX, RETRY_TOPIC_PREFIX

T = TypeVar("T")

WAIT_SECONDS = 10.0
POLL_MS = 2


class InProcessBroker:
    """A NameServer with one broker on free ports of 127.0.0.1.

    Clients connect to `address`. The broker's clock stands still until `clock.advance(days=3)`.
    Settings have their full names: `InProcessBroker({"store.sync_flush": True})`. Without `data`
    the store is a temporary directory, which is removed with the broker.
    """

    def __init__(
        self, settings: dict[str, Any] | None = None, *, data: Path | str | None = None
    ) -> None:
        self._given = settings or {}
        self._data = data
        self._pid = 0
        self._remove_directory: Callable[[], object] = _nothing
        self._thread: LoopThread | None = None
        self._cluster: InProcessCluster | None = None
        self.clock = BrokerClock(LoopClock().now_ms(), self._advance)
        self.address = ""
        """The address of the NameServer, for clients."""
        self.broker_address = ""

    # --- start and stop

    def start(self) -> None:
        """Start the servers; `with` does this."""
        assert self._thread is None, "the broker is already started"
        self._pid = os.getpid()
        data = self._data
        if data is None:
            data = tempfile.mkdtemp(prefix="penstock-test-")
            # Also when the process ends without a close().
            self._remove_directory = weakref.finalize(self, _remove, data, self._pid)
        try:
            self._cluster = cluster = InProcessCluster(self.clock, Path(data), self._given)
            # Not uvloop: after it has resolved a host name, forked children crash.
            self._thread = LoopThread("penstock-test-broker", asyncio.new_event_loop())
            self._thread.run(cluster.start)
        except BaseException:
            self.close()
            raise
        self.address, self.broker_address = cluster.nameserver, cluster.address

    def close(self) -> None:
        """Stop the servers; `with` does this."""
        thread, cluster = self._thread, self._cluster
        self._thread = self._cluster = None
        remove, self._remove_directory = self._remove_directory, _nothing
        if self._pid != os.getpid():
            return  # after a fork the broker belongs to the parent process
        try:
            if thread is not None and cluster is not None:
                try:
                    thread.run(cluster.stop)
                finally:
                    thread.stop()
        finally:
            remove()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def restart(self) -> Awaitable[None]:
        """Shut the broker down and start it again on the same port with the same store."""
        thread, cluster = self._running()
        return _await_or_wait(thread.submit(cluster.restart))

    # --- messages

    def create_topic(self, topic: str, *, queues: int = 4) -> None:
        """Create a topic. A send to a topic that does not exist creates it too."""
        thread, cluster = self._running()
        thread.run(cluster.create_topic, topic, queues)

    def topics(self) -> list[str]:
        """All topics except the broker's system topics; retry and dead letter topics included."""
        return self._read(lambda cluster: cluster.topics())

    def messages(self, topic: str) -> list[ReceivedMessage]:
        """All messages of a topic, consumed or not, queue by queue."""
        return self._read(lambda cluster: cluster.messages(topic))

    def dead_letters(self, group: str) -> list[ReceivedMessage]:
        """The dead letters of a group."""
        return self.messages(DLQ_TOPIC_PREFIX + group)

    def retries(self, group: str) -> list[ReceivedMessage]:
        """The messages of a group's retry topic; a message is stored there for each retry."""
        return self.messages(RETRY_TOPIC_PREFIX + group)

    def wait_until(
        self, predicate: Callable[[], object], *, seconds: float = WAIT_SECONDS
    ) -> Awaitable[None]:
        """Wait in real time until `predicate` is true; raises TimeoutError after `seconds`.

        If an event loop is running in this thread, await the result; the predicate may then be a
        coroutine function.
        """
        if asyncio._get_running_loop() is not None:
            return asyncio.ensure_future(_poll_until(predicate, seconds))
        until = time.monotonic() + seconds
        while not predicate():
            if time.monotonic() > until:
                raise TimeoutError(_timeout_text(predicate, seconds))
            time.sleep(POLL_MS / 1000)
        return _Completed(None)

    # --- helpers

    def _advance(self, ms: int) -> Awaitable[None]:
        thread, cluster = self._running()
        return _await_or_wait(thread.submit(cluster.advance, ms))

    def _read(self, read: Callable[[InProcessCluster], T]) -> T:
        thread, cluster = self._running()

        async def read_in_loop() -> T:
            return read(cluster)

        return thread.run(read_in_loop)

    def _running(self) -> tuple[LoopThread, InProcessCluster]:
        assert self._thread is not None, "the broker is not started, or is closed"
        assert self._cluster is not None
        return self._thread, self._cluster


class _Completed(Generic[T]):
    """An awaitable that is already complete."""

    def __init__(self, value: T) -> None:
        self._value = value

    def __await__(self) -> Generator[Any, None, T]:
        return self._value
        yield


def _nothing() -> None:
    """There is no directory to remove."""


def _remove(directory: str, pid: int) -> None:
    if pid == os.getpid():
        shutil.rmtree(directory, ignore_errors=True)


def _await_or_wait(future: "Future[T]") -> Awaitable[T]:
    """The result of a call in the broker's loop: awaitable if a loop runs in this thread, else
    complete on return."""
    if asyncio._get_running_loop() is not None:
        return asyncio.wrap_future(future)
    return _Completed(future.result())


async def _poll_until(predicate: Callable[[], object], seconds: float) -> None:
    clock = LoopClock()
    until_ms = clock.monotonic_ms() + seconds * 1000
    while True:
        outcome = predicate()
        if inspect.isawaitable(outcome):
            outcome = await outcome
        if outcome:
            return
        if clock.monotonic_ms() > until_ms:
            raise TimeoutError(_timeout_text(predicate, seconds))
        await pause(clock, POLL_MS)


def _timeout_text(predicate: Callable[[], object], seconds: float) -> str:
    name = getattr(predicate, "__qualname__", repr(predicate))
    return f"{name} was not true within {seconds:g} s"
