"""What a benchmark has measured so far. Times are nanoseconds of the monotonic clock."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.cli.bench.histogram import LogHistogram
from penstock.cli.bench.schedule import SECOND_NS, Window

PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p99.9": 99.9}
MS_NS = 1_000_000


class Measurement:
    """Counts messages by their outcome. A message counts if its begin is in the window.

    The begin is the intended time in an open loop and the time of the send in a closed one; for
    consumers without own producers it is the time of the arrival.
    """

    def __init__(self, window: Window) -> None:
        self.window = window
        self.latency = LogHistogram()
        self.behind = LogHistogram()
        """How much later than intended requests were sent."""
        self.messages = 0
        self.byte_count = 0
        self.errors: Counter[str] = Counter()
        self.statuses: Counter[str] = Counter()
        self.last_ns = window.begin_ns
        """When the last message that counts was acknowledged or received."""

    def sent(self, intended_ns: int, now_ns: int) -> None:
        """A request was written `now`."""
        if intended_ns in self.window:
            self.behind.record(now_ns - intended_ns)

    def succeeded(
        self, begin_ns: int, end_ns: int, byte_count: int, *, messages: int = 1, status: str = ""
    ) -> None:
        """Messages were acknowledged or received; `status` is set if it is not SEND_OK."""
        if begin_ns not in self.window:
            return
        self.latency.record(end_ns - begin_ns, messages)
        self.messages += messages
        self.byte_count += byte_count
        self.last_ns = max(self.last_ns, end_ns)
        if status:
            self.statuses[status] += messages

    def arrived(self, now_ns: int, age_ns: int | None, byte_count: int) -> None:
        """A message was received that was sent by someone else; its age may be unknown."""
        if now_ns not in self.window:
            return
        if age_ns is not None:
            self.latency.record(age_ns)
        self.messages += 1
        self.byte_count += byte_count
        self.last_ns = max(self.last_ns, now_ns)

    def failed(self, begin_ns: int, kind: str, messages: int = 1) -> None:
        """Messages failed with this kind of error."""
        if begin_ns in self.window:
            self.errors[kind] += messages


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles in ms, by name; None if there are no values."""

    values: Mapping[str, float | None]

    @classmethod
    def of(cls, histogram: LogHistogram) -> "Percentiles":
        """The percentiles of a histogram of nanoseconds."""
        found = {name: _ms(histogram.percentile(p)) for name, p in PERCENTILES.items()}
        some = histogram.count > 0
        return cls(
            {
                **found,
                "max": _ms(histogram.max if some else None),
                "min": _ms(histogram.min if some else None),
                "mean": _ms(histogram.mean),
            }
        )

    def __getitem__(self, name: str) -> float | None:
        return self.values[name]


def _ms(value_ns: float | None) -> float | None:
    return None if value_ns is None else round(value_ns / MS_NS, 4)


def elapsed_s(measurement: Measurement, *, drained: bool = False) -> float:
    """The time in which the messages were processed.

    At least the window; longer if messages of the window were acknowledged after it. If the
    messages ended before the window did (`drained`), it ends with the last one.
    """
    until_last = (measurement.last_ns - measurement.window.begin_ns) / SECOND_NS
    return until_last if drained else max(until_last, measurement.window.seconds)
