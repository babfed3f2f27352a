"""How fast a replay goes: slices of messages, and when each of them is due.

A slice is what one Spark job sends: at most so many rows, and where gaps are kept, those of one
step of time. Slices go one after another, so within a slice messages go as fast as they can, and
the step is how finely gaps are kept.
"""

from dataclasses import dataclass
from typing import Final

import msgspec

from penstock.errors import BadSetting

FAST: Final = "fast"
ORIGINAL: Final = "original"
PACES: Final = (FAST, ORIGINAL)
SLICE_ROWS: Final = 100_000
STEP_MS: Final = 2_000
"""A job of Spark's takes a few tenths of a second, so shorter steps would only fall behind."""
SLICES_MAX: Final = 500_000


class Slice(msgspec.Struct, frozen=True):
    """Messages that are sent by one job."""

    number: int
    file: str
    """The name of the staged file that has them."""
    rows: int
    bytes: int
    first_ms: int
    """The time of the first message, as the gaps count it."""
    last_ms: int
    begin_ms: int | None = None
    """Only rows of the file from this time on, and before `end_ms`; None: all of them."""
    end_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """What is kept of the time between messages."""

    speed: float | None = None
    """1: gaps as they were, 2: half as long; None: no gaps, as fast as it goes."""
    rate: int | None = None
    """At most so many rows in a second."""
    step_ms: int = STEP_MS
    slice_rows: int = SLICE_ROWS

    def __post_init__(self) -> None:
        if self.speed is not None and not 0 < self.speed <= 1_000_000:
            raise BadSetting(
                f"the speed is {self.speed}", hint="1 keeps gaps as they were, 10 is ten times so"
            )
        for name in ("rate", "step_ms", "slice_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadSetting(f"{name} is {value}", hint="give 1 or more")

    @property
    def rows_max(self) -> int:
        """The rows of a slice at most."""
        if self.rate is None:
            return self.slice_rows
        return max(1, min(self.slice_rows, self.rate * self.step_ms // 1000))

    @property
    def window_ms(self) -> int | None:
        """The time of messages that a slice spans at most; None if it does not matter."""
        return None if self.speed is None else max(1, round(self.step_ms * self.speed))

    def shifted_ms(self, time_ms: int, origin_ms: int) -> float:
        """When a message is due after one of `origin_ms`."""
        return 0.0 if self.speed is None else (time_ms - origin_ms) / self.speed

    def takes_ms(self, *, rows: int, span_ms: int) -> float:
        """How long so many rows over such a time take at least."""
        by_rate = 0.0 if self.rate is None else rows / self.rate * 1000
        return max(by_rate, self.shifted_ms(span_ms, 0))

    def __str__(self) -> str:
        if self.speed is None:
            text = "as fast as it goes"
        elif self.speed == 1:
            text = "with the gaps as they were"
        else:
            text = f"{self.speed:g} times as fast as it was"
        return text if self.rate is None else f"{text}, at most {self.rate:,} rows/s"


class Pacer:
    """Says how long to wait before a slice. A replay that has fallen behind catches up with the
    gaps, and never exceeds the rate."""

    def __init__(self, pace: Pace, first: Slice, now_ms: float) -> None:
        """`first` is the first slice that is sent now: its time is now."""
        self._pace = pace
        self._origin_ms = first.first_ms
        self._begun_ms = now_ms
        self._free_ms = now_ms

    def wait_ms(self, each: Slice, now_ms: float) -> float:
        """Negative where it is late."""
        due_ms = self._begun_ms + self._pace.shifted_ms(each.first_ms, self._origin_ms)
        return max(due_ms, self._free_ms) - now_ms

    def began(self, each: Slice, now_ms: float) -> None:
        """This slice is being sent."""
        if self._pace.rate is not None:
            self._free_ms = now_ms + each.rows / self._pace.rate * 1000


def time_text(ms: float) -> str:
    """A span for people."""
    seconds = ms / 1000
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if minutes < 60 else f"{hours:,.1f} h"
