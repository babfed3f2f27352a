"""Transactions: halves that wait for a commit, the check-back of those that wait too long.
(Contract; its owner fills it in.)"""

from penstock.broker.answers import Table
from penstock.broker.parts import Parts
from penstock.broker.router import Row
from penstock.errors import MessageIllegal
from penstock.metrics import Registry
from penstock.store.consumequeue import ConsumeQueue

NEVER = 1 << 62


class Transactions:
    """The transactions of a broker; `host` is its address as messages note it."""

    def __init__(self, parts: Parts, host: bytes) -> None:
        self._parts = parts
        self._host = host

    def rows(self) -> list[Row]:
        return []

    def park(
        self, topic: str, queue_id: int, properties: dict[str, str], now_ms: int
    ) -> ConsumeQueue:
        """The queue where a half waits, its own place noted in its properties."""
        raise MessageIllegal("transactional messages are not served by this release")

    def tables(self) -> tuple[Table, ...]:
        return ()

    def due(self) -> int:
        return NEVER

    def tick(self, now_ms: int) -> None:
        pass

    def finish(self, now_ms: int) -> None:
        """Before a clean end."""

    def pinned_from(self) -> int | None:
        """Log offset of the first half that still waits; None if none does."""
        return None

    def add_metrics(self, registry: Registry) -> None:
        pass
