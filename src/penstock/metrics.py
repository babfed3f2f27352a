"""Metrics in Prometheus' text format. They are read at a scrape and cost nothing per message.

    registry = Registry({"cluster": "c1"})
    registry.gauge("connections", "Open connections.", read=lambda: len(connections))
    registry.counter("in_total", "Messages in.", ("topic",), read=lambda: [(("t",), 7)])

`read` returns a number, or (label values, number) pairs. It may be a generator; other code runs
between its items, so it must not iterate over a table that may change. prometheus_client is not
used because it adds 30 to 70 ms to the start-up and 5 MB of memory.

This module imports nothing else from Penstock.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Sample: TypeAlias = tuple[Sequence[str], float]
Read: TypeAlias = Callable[[], float | Iterable[Sample]]


class Histogram:
    """Counts values by bucket; a bucket holds the values up to its upper bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(bounds)
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Family:
    """A metric with all its samples."""

    __slots__ = ("help", "kind", "labels", "name", "read")

    def __init__(self, kind: str, name: str, help: str, labels: Sequence[str], read: Read) -> None:
        self.kind = kind
        self.name = name
        self.help = help
        self.labels = tuple(labels)
        self.read = read

    def lines(self, common: str = "") -> Iterator[str]:
        """The metric as text; `common` holds labels for every sample, already formatted."""
        yield f"# HELP {self.name} {_escape_help(self.help)}\n"
        yield f"# TYPE {self.name} {self.kind}\n"
        found = self.read()
        if isinstance(found, int | float):
            found = [((), found)]
        for values, number in found:
            yield f"{self.name}{self._labels(common, values)} {_number(number)}\n"

    def _labels(self, common: str, values: Sequence[str]) -> str:
        assert len(values) == len(self.labels), f"{self.name}: {values} for {self.labels}"
        pairs = [
            f'{name}="{_escape(value)}"' for name, value in zip(self.labels, values, strict=True)
        ]
        if common:
            pairs.insert(0, common)
        return f"{{{','.join(pairs)}}}" if pairs else ""


class HistogramFamily(Family):
    """A histogram without labels."""

    __slots__ = ("histogram",)

    def __init__(self, name: str, help: str, histogram: Histogram) -> None:
        super().__init__("histogram", name, help, (), lambda: ())
        self.histogram = histogram

    def lines(self, common: str = "") -> Iterator[str]:
        yield from super().lines(common)
        below = 0
        comma = "," if common else ""
        bounds = [*map(_number, self.histogram.bounds), "+Inf"]
        for bound, count in zip(bounds, self.histogram.counts, strict=True):
            below += count
            yield f'{self.name}_bucket{{{common}{comma}le="{bound}"}} {below}\n'
        labels = self._labels(common, ())
        yield f"{self.name}_sum{labels} {_number(self.histogram.total)}\n"
        yield f"{self.name}_count{labels} {below}\n"


class Registry:
    """The metrics of one server; `labels` are added to every sample."""

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        self.common = ",".join(f'{name}="{_escape(text)}"' for name, text in (labels or {}).items())
        self.families: list[Family] = []
        self._names: set[str] = set()

    def counter(self, name: str, help: str, labels: Sequence[str] = (), *, read: Read) -> None:
        """Add a counter: a value that only increases, or restarts at 0."""
        self.add(Family("counter", name, help, labels, read))

    def gauge(self, name: str, help: str, labels: Sequence[str] = (), *, read: Read) -> None:
        """Add a gauge: a value that goes up and down."""
        self.add(Family("gauge", name, help, labels, read))

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
