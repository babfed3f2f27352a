"""A Spark worker's way to the brokers: an event loop of its own, and a session on it.

Spark's Python workers are plain threads that serve one task after another. A link is made for the
first task that needs one, and kept for the tasks after it. It belongs to its thread and to its
process: after a fork a new one is made, and the old one is left alone, since its sockets are the
parent's.

    with link(connection) as here:
        answer = here.run(here.session.route("orders"))
"""

import asyncio
import atexit
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from penstock.client.client_session import Session
from penstock.spark.connection_options import Connection

T = TypeVar("T")

LINKS_MAX: Final = 4
"""Links that a thread keeps while nobody uses them."""

_left_behind: Final[list[object]] = []
"""Links of the process that this one was forked from: closing them would disturb the parent."""


class Link:
    """An event loop that runs while `run` does, and a session that lives on it."""

    def __init__(self, connection: Connection) -> None:
        self.users = 0
        self.session = Session(connection.client_options())
        self._loop = _new_loop()
        try:
            self.run(self.session.start())
        except BaseException:
            self._loop.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for this in the caller's thread."""
        return self._loop.run_until_complete(work)

    def close(self) -> None:
        """End the connections and the loop."""
        self.run(self.session.close())
        self.run(self._loop.shutdown_default_executor())
        self._loop.close()


class _Links(threading.local):
    """The links of one thread."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.kept: dict[Connection, Link] = {}

    def after_fork(self) -> None:
        if self.pid != os.getpid():
            _left_behind.append(self.kept)
            self.pid, self.kept = os.getpid(), {}

    def make_room(self) -> None:
        idle = [connection for connection, link in self.kept.items() if not link.users]
        for connection in idle[: max(len(self.kept) - LINKS_MAX, 0)]:
            self.kept.pop(connection).close()


_links = _Links()


@contextmanager
def link(connection: Connection) -> Iterator[Link]:
    """This thread's link to a cluster; it stays open for the next task that asks for it."""
    _links.after_fork()
    here = _links.kept.pop(connection, None) or Link(connection)
    _links.kept[connection] = here  # the one used last stands last
    here.users += 1
    try:
        yield here
    finally:
        here.users -= 1
        _links.make_room()


def close_links() -> None:
    """Close what this thread keeps; for the end of a process, and for tests."""
    _links.after_fork()
    for connection in [c for c, link in _links.kept.items() if not link.users]:
        _links.kept.pop(connection).close()


def _new_loop() -> asyncio.AbstractEventLoop:
    make: Callable[[], asyncio.AbstractEventLoop]
    try:
        from uvloop import new_event_loop as make
    except ImportError:  # not built for this platform
        make = asyncio.new_event_loop
    return make()


atexit.register(close_links)
