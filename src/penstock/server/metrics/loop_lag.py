"""How late the event loop is: a timer that measures its own delay.

A delay is the time in which the loop did something else, or in which the process got no processor.
"""

import asyncio
from time import perf_counter

from penstock.metrics import Histogram, Registry

EVERY_S = 0.5
BOUNDS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
"""Timers of the loop are rounded up to 1 ms, so smaller bounds would say nothing."""


class LoopLag:
    """Measures the delay twice a second, from `start` to `stop`."""

    def __init__(self, registry: Registry) -> None:
        self._histogram: Histogram = registry.histogram(
            "penstock_loop_lag_seconds",
            "How late timers of the event loop were, measured twice a second.",
            BOUNDS_S,
        )
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = 0.0

    def start(self) -> None:
        """Measure from now on."""
        self._due_s = perf_counter() + EVERY_S
        self._timer = asyncio.get_running_loop().call_later(EVERY_S, self._measure)

    def stop(self) -> None:
        """Measure no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _measure(self) -> None:
        self._histogram.observe(max(perf_counter() - self._due_s, 0.0))
        self.start()
