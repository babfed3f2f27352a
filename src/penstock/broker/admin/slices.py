"""Long lists in short steps, so that other clients are served in between."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.rpc.answers import Answer, InThread

T = TypeVar("T")

SLICE = 500
"""Items of one step: a topic or group takes some 20 µs."""


def in_slices(items: Sequence[T], do: Callable[[T], object], then: Callable[[], Answer]) -> Answer:
    """What `then` answers, after `do` with each item in turn."""

    def step(at: int) -> Answer:
        for item in items[at : at + SLICE]:
            do(item)
        if at + SLICE >= len(items):
            return then()
        return InThread(_pass, lambda _: step(at + SLICE))

    return step(0)


def _pass() -> None:
    """Nothing: the way through the pool lets others have their turn."""
