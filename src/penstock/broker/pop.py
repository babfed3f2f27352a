"""POP consumption: messages are lent for a time, not assigned by queue. (Contract; its owner fills it in.)"""

from penstock.broker.answers import Table
from penstock.broker.parts import Parts
from penstock.broker.retry import Retry
from penstock.broker.router import Row
from penstock.metrics import Registry

NEVER = 1 << 62


class Pop:
    """Pops, acknowledgements and what comes back; `host` is the broker's address as messages note it."""

    def __init__(self, parts: Parts, retry: Retry, host: bytes) -> None:
        self._parts = parts
        self._retry = retry
        self._host = host

    def rows(self) -> list[Row]:
        return []

    def tables(self) -> tuple[Table, ...]:
        return ()

    def due(self) -> int:
        return NEVER

    def tick(self, now_ms: int) -> None:
        pass

    def finish(self, now_ms: int) -> None:
        """Before a clean end."""

    def pinned_from(self) -> int | None:
        """Log offset of the first record that lent messages need; None if none are lent."""
        return None

    def add_metrics(self, registry: Registry) -> None:
        pass
