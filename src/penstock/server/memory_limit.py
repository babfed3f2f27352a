"""The memory that the connections of a server take: unfinished requests and unsent responses.

Above three quarters of `memory_bytes_max` the slowest connection is closed and large frames are
refused. The rest is for clients that read their responses and for requests that arrive whole.
Above `memory_bytes_max` every request is refused.
"""

from collections.abc import Callable, Mapping
from typing import Protocol

SOFT_SHARE = 0.75


class MeteredConnection(Protocol):
    """A connection whose memory is counted."""

    def count_unsent(self) -> None:
        """Report the bytes that have not been sent."""

    def slowness(self, now_ms: int) -> tuple[bool, int]:
        """Whether the client is stuck, and the bytes that it makes the server hold."""

    def abort_soon(self, why: str) -> None: ...


class MemoryLimit:
    """Counts the memory of all connections."""

    def __init__(
        self, bytes_max: Callable[[], int], connections: Mapping[int, MeteredConnection]
    ) -> None:
        self._bytes_max = bytes_max
        self._connections = connections
        self.used = 0

    @property
    def soft_limit(self) -> int:
        return int(self._bytes_max() * SOFT_SHARE)

    def is_exceeded(self) -> bool:
        return self._is_above(self._bytes_max())

    def is_soft_exceeded(self) -> bool:
        return self._is_above(self.soft_limit)

    def recount(self) -> None:
        """Have every connection report its unsent bytes."""
        for connection in self._connections.values():
            connection.count_unsent()

    def close_slowest(self, now_ms: int) -> bool:
        """Close the stuck connection that holds the most bytes; whether there was one."""
        slowest = max(self._connections.values(), key=lambda each: each.slowness(now_ms))
        stuck, held = slowest.slowness(now_ms)
        if stuck:
            slowest.abort_soon(
                f"it holds {held} bytes and makes no progress, and all connections together hold "
                f"more than {self.soft_limit} bytes ({SOFT_SHARE:.0%} of memory_bytes_max)"
            )
        return stuck

    def _is_above(self, limit: int) -> bool:
        # What was sent since a connection's last write is not known without asking it, so all
        # connections are asked before anything is refused.
        if self.used > limit:
            self.recount()
        return self.used > limit
