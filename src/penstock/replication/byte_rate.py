"""How many bytes per second a counter grows by."""

from typing import Final

PERIOD_MS: Final = 1_000


class ByteRate:
    """The growth of a counter in the last whole period. `sample` must be called about as often."""

    def __init__(self, now_ms: int) -> None:
        self.per_second = 0
        self._total = 0
        self._sampled_ms = now_ms

    def sample(self, total: int, now_ms: int) -> None:
        """Note the value of the counter. Times are of a clock that is never set."""
        passed_ms = now_ms - self._sampled_ms
        if passed_ms >= PERIOD_MS:
            self.per_second = (total - self._total) * 1000 // passed_ms
            self._total, self._sampled_ms = total, now_ms
