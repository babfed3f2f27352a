"""A problem that `verify` has found: what is wrong, where, and what it means."""

from collections.abc import Iterator

import msgspec

DAMAGE = "damage"
"""Stored bytes contradict each other, and recovery does not repair that."""
NOTE = "note"
"""Worth knowing but harmless, above all what recovery repairs after a crash."""


class Problem(msgspec.Struct, frozen=True):
    """`kind` is a stable name for programs, `text` is for people.

    `file` is relative to the store, `offset` a byte of that file. Neighbouring problems of one kind
    are one problem with a `count`.
    """

    severity: str
    kind: str
    file: str
    offset: int
    text: str
    count: int = 1


def merge_neighbours(found: Iterator[tuple[int, Problem]]) -> Iterator[Problem]:
    """Merge problems of one kind whose entry numbers are consecutive into one with a count."""
    first: Problem | None = None
    count = 0
    last = -2
    for number, problem in found:
        if first is not None and problem.kind == first.kind and number == last + 1:
            count += 1
        else:
            if first is not None:
                yield _counted(first, count)
            first, count = problem, 1
        last = number
    if first is not None:
        yield _counted(first, count)


def _counted(problem: Problem, count: int) -> Problem:
    return Problem(
        problem.severity,
        problem.kind,
        problem.file,
        problem.offset,
        problem.text if count == 1 else f"{problem.text}, and {count - 1} more behind it",
        count,
    )
