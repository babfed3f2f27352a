"""The pace of a replay: slices of messages, and when each slice is due.

A slice is sent by one Spark job. It has a maximum number of rows and, with the original pace, the
messages of one time step. Slices are sent one after another, and the messages of a slice as fast as
possible, so the step is the precision of the pace.
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
"""A Spark job takes a few tenths of a second, so a replay with shorter steps would be late."""
SLICES_MAX: Final = 500_000


class ReplaySlice(msgspec.Struct, frozen=True):
    """The messages that one Spark job sends; a part of `plan.json`."""

    number: int
    file: str
    """The name of the staged file that contains them."""
    rows: int
    bytes: int
    first_ms: int
    """The time of the first message, by which the pace is calculated."""
    last_ms: int
    begin_ms: int | None = None
    """Only rows of the file from this time until before `end_ms`; None for all rows."""
    end_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast messages are sent."""

    speed: float | None = None
    """Factor for the original pace; None to send as fast as possible."""
    rate: int | None = None
    """Maximum number of rows per second."""
    step_ms: int = STEP_MS
    slice_rows: int = SLICE_ROWS

    def __post_init__(self) -> None:
        if self.speed is not None and not 0 < self.speed <= 1_000_000:
            raise BadSetting(
                f"the speed {self.speed} is out of range",
                hint="1 is the original pace, 10 is ten times as fast",
            )
        for name in ("rate", "step_ms", "slice_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadSetting(f"{name} is {value}", hint="it must be at least 1")

    @property
    def rows_max(self) -> int:
        """The maximum number of rows of a slice."""
        if self.rate is None:
            return self.slice_rows
        return max(1, min(self.slice_rows, self.rate * self.step_ms // 1000))

    @property
    def window_ms(self) -> int | None:
        """The maximum time span of the messages of a slice; None if there is no limit."""
        return None if self.speed is None else max(1, round(self.step_ms * self.speed))

    def delay_ms(self, time_ms: int, origin_ms: int) -> float:
        """How long after a message of `origin_ms` a message of `time_ms` is due."""
        return 0.0 if self.speed is None else (time_ms - origin_ms) / self.speed

    def duration_min_ms(self, *, rows: int, span_ms: int) -> float:
        """The minimum duration of a replay of this many rows over this time span."""
        by_rate = 0.0 if self.rate is None else rows / self.rate * 1000
        return max(by_rate, self.delay_ms(span_ms, 0))

    def __str__(self) -> str:
        if self.speed is None:
            text = "as fast as possible"
        elif self.speed == 1:
            text = "at the original pace"
        else:
            text = f"at {self.speed:g} times the original pace"
        return text if self.rate is None else f"{text}, at most {self.rate:,} rows/s"


class Pacer:
    """Calculates how long to wait before each slice.

    A replay that is late catches up with the original pace, but never exceeds the rate.
    """

    def __init__(self, pace: Pace, first: ReplaySlice, now_ms: float) -> None:
        """`first` is the first slice to send, which is due now."""
        self._pace = pace
        self._origin_ms = first.first_ms
        self._started_ms = now_ms
        self._next_ms = now_ms

    def wait_ms(self, each: ReplaySlice, now_ms: float) -> float:
        """How long to wait before this slice; negative if it is late."""
        due_ms = self._started_ms + self._pace.delay_ms(each.first_ms, self._origin_ms)
        return max(due_ms, self._next_ms) - now_ms

    def slice_started(self, each: ReplaySlice, now_ms: float) -> None:
        """Record that the sending of this slice has started."""
        if self._pace.rate is not None:
            self._next_ms = now_ms + each.rows / self._pace.rate * 1000


def duration_text(ms: float) -> str:
    """A duration as text."""
    seconds = ms / 1000
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.1f} min" if minutes < 60 else f"{hours:,.1f} h"
