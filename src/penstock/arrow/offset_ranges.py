"""Ranges of queue offsets: what a Spark task reads."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

PACKED_ROWS_MAX: Final = 4_096
"""Small ranges share a task up to this many messages: each task costs Spark about 50 ms."""


@dataclass(frozen=True, slots=True, order=True)
class QueueRange:
    """The messages of a queue from offset `first` to before `until`; topic without namespace."""

    topic: str
    broker: str
    queue_id: int
    first: int
    until: int

    @property
    def rows(self) -> int:
        return max(self.until - self.first, 0)


def split(ranges: Iterable[QueueRange], partitions_min: int | None) -> list[tuple[QueueRange, ...]]:
    """The ranges of each task: one queue each, in at least `partitions_min` tasks if there are as
    many messages; small ranges share a task if enough tasks are left."""
    full = [part for part in ranges if part.rows]
    wanted = partitions_min or 1
    if wanted > len(full):
        return [(part,) for part in _cut(full, wanted)]
    packed = _packed(full)
    return packed if len(packed) >= wanted else [(part,) for part in full]


def _cut(ranges: Sequence[QueueRange], wanted: int) -> list[QueueRange]:
    """The ranges, with large ones cut into pieces of about the same size."""
    total = sum(part.rows for part in ranges)
    found = []
    for part in ranges:
        pieces = min(-(-part.rows * wanted // total), part.rows)
        marks = [part.first + part.rows * n // pieces for n in range(pieces + 1)]
        found += [
            QueueRange(part.topic, part.broker, part.queue_id, first, until)
            for first, until in pairwise(marks)
        ]
    return found


def _packed(ranges: Sequence[QueueRange]) -> list[tuple[QueueRange, ...]]:
    """Small ranges packed together, in order."""
    found: list[tuple[QueueRange, ...]] = []
    pack: list[QueueRange] = []
    rows = 0
    for part in sorted(ranges):
        if pack and rows + part.rows > PACKED_ROWS_MAX:
            found.append(tuple(pack))
            pack, rows = [], 0
        pack.append(part)
        rows += part.rows
    if pack:
        found.append(tuple(pack))
    return found
