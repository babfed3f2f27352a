"""Large requests: pages of a table, and the limit of queues.

Slaves and tools of RocketMQ 5.3 and later read large tables page by page. They send the version
that their pages belong to. If the table has changed since, or no version is given, they get the
first page and start again.
"""

from collections.abc import Collection

from penstock.errors import Refused
from penstock.rpc.command import Command
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import DataVersion

PAGE_MAX = 2_000
"""Entries of one page, as in RocketMQ (splitMetadataSize)."""
QUEUES_MAX = 100_000
"""Queues of one request or response: more do not fit into a frame."""


class Pages:
    """The pages of one table, in the order of its names."""

    def __init__(self, *, first: str, count: str) -> None:
        """The header fields with the index of the first entry and the size of the page."""
        self._first = first
        self._count = count
        self._version: DataVersion | None = None
        self._names: list[str] = []

    def names(
        self, command: Command, names: Collection[str], version: DataVersion
    ) -> list[str] | None:
        """The names of the requested page; None if the request wants the whole table."""
        if not any(command.ext.get(field) for field in ("dataVersion", self._first, self._count)):
            return None
        begin = max(command.i32_or(self._first, 0), 0)
        size = max(min(command.i32_or(self._count, PAGE_MAX), PAGE_MAX), 0)
        given = command.text_or("dataVersion")
        if not given.strip() or fastjson.decode(given.encode(), DataVersion) != version:
            begin = 0
        if self._version != version or len(self._names) != len(names):
            self._version, self._names = version, sorted(names)
        end = begin + size
        if size and end == len(self._names) - 1:
            end += 1  # RocketMQ's clients stop when one entry is missing
        return self._names[begin:end]


def refuse_too_many_queues(what: str, queues: int, *, hint: str) -> None:
    """Raise Refused for more than QUEUES_MAX queues."""
    if queues > QUEUES_MAX:
        raise Refused.over(what, figure=queues, limit=QUEUES_MAX, unit="queues", hint=hint)
