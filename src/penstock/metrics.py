"""Metrics: read when somebody scrapes, so that they cost nothing per message; Prometheus' text.

    registry = Registry({"cluster": "c1"})
    registry.gauge("connections", "Open connections.", read=lambda: len(connections))
    registry.counter("in_total", "Messages in.", ("topic",), read=lambda: [(("t",), 7)])

`read` gives a number, or (label values, number) pairs; it may be a generator, which is then not
run in one go: it must not walk over a table that others change meanwhile. Hand-written, because
prometheus_client costs 30 to 70 ms of start-up and 5 MB.

Ground floor: imports nobody of ours.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Sample: TypeAlias = tuple[Sequence[str], float]
Read: TypeAlias = Callable[[], float | Iterable[Sample]]


class Histogram:
    """How many values lie at or below each bound."""

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
    """All samples of one name."""

    __slots__ = ("help", "kind", "labels", "name", "read")

    def __init__(self, kind: str, name: str, help: str, labels: Sequence[str], read: Read) -> None:
        self.kind = kind
        self.name = name
        self.help = help
        self.labels = tuple(labels)
        self.read = read

    def lines(self, common: str = "") -> Iterator[str]:
        """The family as text; `common` are labels of every sample, written already."""
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
    """A histogram without labels of its own."""

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
    """The metrics of one server; `labels` stand at every sample."""

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        self.common = ",".join(f'{name}="{_escape(text)}"' for name, text in (labels or {}).items())
        self.families: list[Family] = []
        self._names: set[str] = set()

    def counter(self, name: str, help: str, labels: Sequence[str] = (), *, read: Read) -> None:
        """A figure that only grows, or begins again at 0."""
        self._add(Family("counter", name, help, labels, read))

    def gauge(self, name: str, help: str, labels: Sequence[str] = (), *, read: Read) -> None:
        """A figure that goes up and down."""
        self._add(Family("gauge", name, help, labels, read))

    def histogram(self, name: str, help: str, bounds: Sequence[float]) -> Histogram:
        """A distribution, to be fed by whoever takes the figure."""
        histogram = Histogram(bounds)
        self._add(HistogramFamily(name, help, histogram))
        return histogram

    def text(self) -> str:
        """Everything, in one go."""
        return "".join(line for family in self.families for line in family.lines(self.common))

    def _add(self, family: Family) -> None:
        assert family.name not in self._names, f"two metrics are called {family.name}"
        self._names.add(family.name)
        self.families.append(family)


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(int(value))  # a bool too
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
