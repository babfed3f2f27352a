"""The order in which connections read that always have more to read.

A connection that fills its read waits for its turn before it reads again. One loop iteration has
TURNS_MAX such turns. So clients that send without pause share the event loop with each other, and a
client that sends now and then waits for few of them, however many there are.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol

TURNS_MAX = 1
"""Full reads in one loop iteration; a full read of sends takes about 1 ms."""
SHORT_READ_BYTES = 4 * 1024
"""What other connections may read in a loop iteration that had its full reads."""


class Yielding(Protocol):
    """A connection that waits for its turn."""

    def end_yield(self) -> None:
        """Read again."""


class FullReads:
    """The connections that wait for their turn. `view` is the buffer for the next read."""

    def __init__(self, buffer: memoryview, soon: Callable[[Callable[[], None]], None]) -> None:
        self._buffer = self.view = buffer
        self._short_view = buffer[:SHORT_READ_BYTES]
        self._soon = soon
        self._waiting: deque[Yielding] = deque()
        self._count = 0  # in this loop iteration

    def wait(self, connection: Yielding) -> None:
        """Call `end_yield` in one of the next loop iterations."""
        if not self._waiting:
            self._soon(self._next_turns)
        self._waiting.append(connection)
        self._count += 1
        if self._count >= TURNS_MAX:
            self.view = self._short_view

    def _next_turns(self) -> None:
        self._count = 0
        self.view = self._buffer
        for _ in range(min(TURNS_MAX, len(self._waiting))):
            self._waiting.popleft().end_yield()
        if self._waiting:
            self._soon(self._next_turns)
