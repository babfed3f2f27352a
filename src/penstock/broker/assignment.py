"""Which queues a client shall consume, and how: QUERY_ASSIGNMENT and SET_MESSAGE_REQUEST_MODE.
(Contract; its owner fills it in.)"""

from penstock.broker.answers import Table
from penstock.broker.parts import Parts
from penstock.broker.router import Row


class Assignments:
    """Shares queues among the members of a group."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def rows(self) -> list[Row]:
        return []

    def tables(self) -> tuple[Table, ...]:
        return ()
