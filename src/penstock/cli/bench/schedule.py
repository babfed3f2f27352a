"""When an open-loop benchmark sends, and which messages count.

The schedule is fixed before the first message is sent. The latency of a message begins at its
intended time, not at the time when the generator got round to sending it. A server that stalls
therefore shows its stall in the latency of every message that was due meanwhile, also if the
generator had to wait (no coordinated omission).
"""

import math
from dataclasses import dataclass

SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Window:
    """The time that is measured: from the end of the warm-up, `seconds` long."""

    begin_ns: int
    end_ns: int

    @classmethod
    def after(cls, start_ns: int, warmup_s: float, seconds: float) -> "Window":
        """The window of a run that starts at this time."""
        begin_ns = start_ns + round(warmup_s * SECOND_NS)
        return cls(begin_ns, begin_ns + round(seconds * SECOND_NS))

    def __contains__(self, time_ns: int) -> bool:
        return self.begin_ns <= time_ns < self.end_ns

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / SECOND_NS


@dataclass(frozen=True, slots=True)
class Schedule:
    """Requests at equal intervals: request `n` is due at `at(n)`, for n from 0 to `count` - 1."""

    start_ns: int
    per_second: float
    count: int

    @classmethod
    def until(cls, start_ns: int, end_ns: int, per_second: float) -> "Schedule":
        """All requests that are due before the end."""
        count = math.ceil((end_ns - start_ns) * per_second / SECOND_NS)
        return cls(start_ns, per_second, max(count, 1))

    def at(self, number: int) -> int:
        """The intended time of a request. It has no cumulative rounding error."""
        return self.start_ns + round(number * SECOND_NS / self.per_second)
