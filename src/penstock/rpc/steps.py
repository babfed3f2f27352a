"""Long requests in steps: other clients are served between them."""

from collections.abc import Callable, Iterable
from itertools import islice
from typing import TypeVar

from penstock.rpc.answers import Answer, NextIteration

T = TypeVar("T")

STEP_ITEMS = 500
"""Items of one step: a topic or group takes about 20 µs."""


def in_steps(items: Iterable[T], do: Callable[[T], object], then: Callable[[], Answer]) -> Answer:
    """The answer of `then`, after `do` was called for each item."""
    return run_in_steps(map(do, items), then)


def run_in_steps(
    work: Iterable[object], then: Callable[[], Answer], step_items: int = STEP_ITEMS
) -> Answer:
    """The answer of `then`, after the work was iterated over: each item is a small part of it."""
    remaining = iter(work)

    def step() -> Answer:
        done = sum(1 for _ in islice(remaining, step_items))
        return then() if done < step_items else NextIteration(step)

    return step()
