"""The processor time of the generator during the measurement."""

import asyncio
import time

from penstock.cli.bench.schedule import SECOND_NS, Window


class GeneratorCpu:
    """The processor time of this process from the begin of the window on."""

    def __init__(self, window: Window) -> None:
        self._begin: tuple[float, float] | None = None
        delay_s = (window.begin_ns - time.monotonic_ns()) / SECOND_NS
        asyncio.get_running_loop().call_later(max(delay_s, 0.0), self._start)

    def percent(self, idle_s: float = 0.0) -> float:
        """The share of one processor, in percent; without a time at the end in which it idled."""
        if self._begin is None:
            return 0.0
        busy_s = time.monotonic() - self._begin[0] - idle_s
        return 100 * (time.process_time() - self._begin[1]) / busy_s if busy_s > 0 else 0.0

    def _start(self) -> None:
        self._begin = time.monotonic(), time.process_time()
