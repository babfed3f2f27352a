"""The memory that the connections of a server take: unfinished requests and unsent responses.

Above three quarters of `memory_bytes_max` the slowest connection is closed and large frames are
refused. The rest is for clients that read their responses and for requests that arrive whole.
Above `memory_bytes_max` every request is refused.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

log = logging.getLogger(__name__)

SOFT_SHARE = 0.75
REPORT_MS = 10_000
"""The shortest time between two warnings about refusals."""


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
        self._refusals = 0  # since the last warning
        self._report_ms: int | None = None  # when the next warning may be logged

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

    def report_refusal(self, now_ms: int) -> None:
        """Count a refusal; log the count from time to time."""
        self._refusals += 1
        if self._report_ms is None or now_ms >= self._report_ms:
            log.warning(
                "%d times requests were refused (SYSTEM_BUSY): %d connections hold %d bytes of "
                "unfinished requests and unsent responses; memory_bytes_max is %d",
                self._refusals,
                len(self._connections),
                self.used,
                self._bytes_max(),
            )
            self._refusals, self._report_ms = 0, now_ms + REPORT_MS

    def _is_above(self, limit: int) -> bool:
        # What was sent since a connection's last write is not known without asking it, so all
        # connections are asked before anything is refused.
        if self.used > limit:
            self.recount()
        return self.used > limit
