"""The connections of a Spark worker to the brokers: an event loop and a client session on it.

Spark's Python workers are plain threads that run one task after another. A connection is made for
the first task that needs one, and kept for later tasks. It belongs to its thread and its process.
After a fork a new one is made; the old one is not closed, because its sockets belong to the parent.

    with worker_connection(options) as connection:
        route = connection.run(connection.session.route("orders"))
"""

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from penstock.arrow.connection_options import ConnectionOptions
from penstock.client.client_session import Session

T = TypeVar("T")

IDLE_CONNECTIONS_MAX: Final = 4
"""Unused connections that a thread keeps open."""

_parent_connections: Final[list[object]] = []
"""Connections of the parent process, kept from garbage collection: it would close its sockets."""


class WorkerConnection:
    """An event loop that runs only during `run`, and a session that lives on it."""

    def __init__(self, options: ConnectionOptions) -> None:
        self.users = 0
        self.session = Session(options.client_options())
        self._loop = _new_loop()
        try:
            self.run(self.session.start())
        except BaseException:
            self._loop.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end in the caller's thread."""
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        """Close the session and the loop."""
        self.run(self.session.close())
        self.run(self._loop.shutdown_default_executor())
        self._loop.close()


class _ThreadConnections(threading.local):
    """The connections of one thread; the one used last comes last."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.kept: dict[ConnectionOptions, WorkerConnection] = {}

    def check_fork(self) -> None:
        if self.pid != os.getpid():
            _parent_connections.append(self.kept)
            self.pid, self.kept = os.getpid(), {}

    def close_idle(self, keep: int) -> None:
        """Close unused connections, the oldest first, until at most `keep` are left."""
        idle = [options for options, connection in self.kept.items() if not connection.users]
        for options in idle[: max(len(self.kept) - keep, 0)]:
            self.kept.pop(options).close()


_connections = _ThreadConnections()


@contextmanager
def worker_connection(options: ConnectionOptions) -> Iterator[WorkerConnection]:
    """This thread's connection for these options; it stays open for later tasks."""
    _connections.check_fork()
    connection = _connections.kept.pop(options, None) or WorkerConnection(options)
    _connections.kept[options] = connection
    connection.users += 1
    try:
        yield connection
    finally:
        connection.users -= 1
        _connections.close_idle(IDLE_CONNECTIONS_MAX)


def close_worker_connections() -> None:
    """Close this thread's unused connections: at the end of the process, and in tests."""
    _connections.check_fork()
    _connections.close_idle(0)


def _new_loop() -> asyncio.AbstractEventLoop:
    make: Callable[[], asyncio.AbstractEventLoop]
    try:
        from uvloop import new_event_loop as make
    except ImportError:  # not built for this platform
        make = asyncio.new_event_loop
    return make()


atexit.register(close_worker_connections)
