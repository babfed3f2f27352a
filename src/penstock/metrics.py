"""Metrics in Prometheus' text format. They are read at a scrape and cost nothing per message.

    registry = Registry({"cluster": "c1"})
    registry.gauge("connections", "Open connections.", read=lambda: len(connections))
    registry.counter("in_total", "Messages in.", ("topic",), read=lambda: [(("t",), 7)])

`read` returns a number, or (label values, number) pairs. It may be a generator; other code runs
between its items, so it must not iterate over a table that may change. The text is written apart
from it, perhaps in a thread. Where there may be many samples, `read` returns a list of anything,
and `finish` makes the pairs of it, in the same thread. prometheus_client is not used because it
adds 30 to 70 ms to the start-up and 5 MB of memory.

This module imports nothing else from Penstock.
"""

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Sample: TypeAlias = tuple[Sequence[str], float]
Read: TypeAlias = Callable[[], float | Iterable[Any]]
Finish: TypeAlias = Callable[[list[Any]], Iterable[Sample]]


class Histogram:
    """Counts values by bucket; a bucket holds the values up to its upper bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(bounds)
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    @classmethod
    def of(cls, bounds: Sequence[float], counts: Sequence[int], total: float) -> "Histogram":
        """A histogram that was counted elsewhere: a count for each bound, and one above them."""
        assert len(counts) == len(bounds) + 1
        made = cls(bounds)
        made.counts = list(counts)
        made.total = total
        return made

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class Family:
    """A metric with all its samples."""

    __slots__ = ("finish", "help", "kind", "labels", "name", "read")

    def __init__(
        self,
        kind: str,
        name: str,
        help: str,
        labels: Sequence[str],
        read: Read,
        finish: Finish | None = None,
    ) -> None:
        self.finish = finish
        self.kind = kind
        self.name = name
        self.help = help
        self.labels = tuple(labels)
        self.read = read

    def samples(self) -> Iterable[Any]:
        """The present samples: (label values, number) pairs, or what `finish` makes them of."""
        found = self.read()
        return [((), found)] if isinstance(found, int | float) else found

    def lines(self, common: str = "", samples: Iterable[Any] | None = None) -> Iterator[str]:
        """The metric as text, with these samples or the present ones.

        `common` holds labels for every sample, already formatted.
        """
        yield f"# HELP {self.name} {_escape_help(self.help)}\n"
        yield f"# TYPE {self.name} {self.kind}\n"
        found = self.samples() if samples is None else samples
        if self.finish is not None:
            found = self.finish(list(found))
        for values, value in found:
            yield from self._sample_lines(self._labels(common, values), value)

    def _sample_lines(self, labels: str, value: Any) -> Iterable[str]:
        return (f"{self.name}{labels} {_number(value)}\n",)

    def _labels(self, common: str, values: Sequence[str]) -> str:
        assert len(values) == len(self.labels), f"{self.name}: {values} for {self.labels}"
        pairs = [
            f'{name}="{_escape(value)}"' for name, value in zip(self.labels, values, strict=True)
        ]
        if common:
            pairs.insert(0, common)
        return f"{{{','.join(pairs)}}}" if pairs else ""


LabelledHistogram: TypeAlias = tuple[Sequence[str], Histogram]


class HistogramFamily(Family):
    """A metric whose samples are histograms."""

    __slots__ = ("_read_histograms",)

    def __init__(
        self,
        name: str,
        help: str,
        read: Histogram | Callable[[], Iterable[LabelledHistogram]],
        labels: Sequence[str] = (),
    ) -> None:
        """`read` returns (label values, histogram) pairs, or is the only histogram."""
        super().__init__("histogram", name, help, labels, lambda: ())
        self._read_histograms = read

    def samples(self) -> Iterable[LabelledHistogram]:
        found = self._read_histograms
        for values, one in [((), found)] if isinstance(found, Histogram) else found():
            # A copy: counting goes on while it is written as text.
            yield values, Histogram.of(one.bounds, one.counts, one.total)

    def _sample_lines(self, labels: str, histogram: Any) -> Iterator[str]:
        below = 0
        head = f"{self.name}_bucket{labels[:-1]}," if labels else f"{self.name}_bucket{{"
        bounds = [*map(_number, histogram.bounds), "+Inf"]
        for bound, count in zip(bounds, histogram.counts, strict=True):
            below += count
            yield f'{head}le="{bound}"}} {below}\n'
        yield f"{self.name}_sum{labels} {_number(histogram.total)}\n"
        yield f"{self.name}_count{labels} {below}\n"


class Registry:
    """The metrics of one server; `labels` are added to every sample."""

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        self.common = ",".join(f'{name}="{_escape(text)}"' for name, text in (labels or {}).items())
        self.families: list[Family] = []
        self.preparations: list[Callable[[], Awaitable[None]]] = []
        """Called before the metrics are read: they read what may wait for the disk."""
        self._names: set[str] = set()

    def counter(
        self,
        name: str,
        help: str,
        labels: Sequence[str] = (),
        *,
        read: Read,
        finish: Finish | None = None,
    ) -> None:
        """Add a counter: a value that only increases, or restarts at 0."""
        self.add(Family("counter", name, help, labels, read, finish))

    def gauge(
        self,
        name: str,
        help: str,
        labels: Sequence[str] = (),
        *,
        read: Read,
        finish: Finish | None = None,
    ) -> None:
        """Add a gauge: a value that goes up and down."""
        self.add(Family("gauge", name, help, labels, read, finish))

    def histogram(self, name: str, help: str, bounds: Sequence[float]) -> Histogram:
        """Add a histogram; the caller passes its values to `observe`."""
        histogram = Histogram(bounds)
        self.add(HistogramFamily(name, help, histogram))
        return histogram

    def text(self) -> str:
        """All metrics as text."""
        return "".join(line for family in self.families for line in family.lines(self.common))

    def add(self, family: Family) -> None:
        """Add a metric that exists already."""
        assert family.name not in self._names, f"duplicate metric {family.name}"
        self._names.add(family.name)
        self.families.append(family)


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(int(value))  # also for bool
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() and abs(value) < 1e15 else repr(value)


def _escape(value: str) -> str:
    if "\\" in value or '"' in value or "\n" in value:
        value = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return value


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")
