"""Messages with a time of delivery of their own: parked in rmq_sys_wheel_timer, stored in their own queue
when that time has come, recalled before on demand. (Contract; its owner fills it in.)"""

from penstock.broker.answers import Table
from penstock.broker.parts import Parts
from penstock.broker.router import Row
from penstock.errors import MessageIllegal
from penstock.metrics import Registry
from penstock.store.consumequeue import ConsumeQueue

NEVER = 1 << 62


class Timers:
    """The timer of a broker."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def rows(self) -> list[Row]:
        return []

    def park(
        self, topic: str, queue_id: int, properties: dict[str, str], now_ms: int
    ) -> ConsumeQueue | None:
        """The queue where a message waits, noted in its properties; None if it is due already."""
        raise MessageIllegal("timed messages are not served by this release")

    def recall_handle(self, topic: str, properties: dict[str, str]) -> bytes:
        """What a producer can call a parked message back with."""
        return b""

    def tables(self) -> tuple[Table, ...]:
        return ()

    def due(self) -> int:
        return NEVER

    def tick(self, now_ms: int) -> None:
        pass

    def finish(self, now_ms: int) -> None:
        """Before a clean end."""

    def pinned_from(self) -> int | None:
        """Log offset of the first message that still waits; None if none does."""
        return None

    def add_metrics(self, registry: Registry) -> None:
        pass
