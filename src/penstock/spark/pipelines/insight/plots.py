"""The charts of the report of pipeline `insight`, as SVG inside an HTML page.

Text and axes have the text colour of the page, which can be light or dark. Names come from
messages, so they are never interpreted as formulas, markup or hidden labels.
"""

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final

from penstock.spark.pipelines.insight.report_data import SERIES_MAX, ReportData, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLORS: Final = (
    "#3b82c4",
    "#e08a2e",
    "#3f9b6b",
    "#c8504f",
    "#8f6fc4",
    "#a8734c",
    "#c76ba3",
    "#7d8896",
)
"""Visible on white and on black."""
_INK: Final = "#010203"
"""A placeholder that is replaced by the text colour in the SVG."""
_LABEL_CHARS_MAX: Final = 36
_WIDTH: Final = 9.0
_SINGLE_POINT_MARGIN: Final = 5
"""Time steps that are shown on both sides of a single point."""
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "penstock",
    "text.parse_math": False,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _INK,
    "grid.alpha": 0.15,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "legend.facecolor": "none",
    "legend.framealpha": 0.0,
    "legend.edgecolor": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
}
_REMOVED: Final = re.compile(
    r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", re.S
)
_ID: Final = re.compile(r'(\bid="|url\(#|href="#)')
_WHITESPACE: Final = re.compile(r"\s+")
_HIDDEN: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""Characters that are not allowed in XML or that change the direction of text."""


def one_line(text: object, chars_max: int = _LABEL_CHARS_MAX) -> str:
    """A value from a message as one short line of visible characters."""
    line = _HIDDEN.sub("\N{REPLACEMENT CHARACTER}", _WHITESPACE.sub(" ", str(text)))
    return line if len(line) <= chars_max else line[: chars_max - 1] + "…"


def svg(name: str, draw: "Callable[[Figure], None]", *, height: float = 3.2) -> str:
    """A chart as an SVG element; `name` makes its ids unique in the page."""
    with figure(draw, height=height) as chart:
        text = io.StringIO()
        chart.savefig(text, format="svg")
    element = _REMOVED.sub("", text.getvalue()).strip()
    return _ID.sub(rf"\g<1>{name}-", element).replace(_INK, "currentColor")


@contextmanager
def figure(draw: "Callable[[Figure], None]", *, height: float = 3.2) -> "Iterator[Figure]":
    """A drawn chart, inside of its style."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # A browser has glyphs that the font for measuring the text does not have.
    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        chart = Figure(figsize=(_WIDTH, height), layout="constrained")
        FigureCanvasAgg(chart)
        draw(chart)
        yield chart


def draw_rates(data: ReportData) -> "Callable[[Figure], None]":
    """Messages and bytes per minute over time, one line per topic."""
    step = data.bucket_ms
    all_rows = data.rates.rows
    has_bytes = any(row["bytes_per_minute"] is not None for row in all_rows)

    def draw(chart: "Figure") -> None:
        panels = {"per_minute": "messages per minute"}
        if has_bytes:
            panels["bytes_per_minute"] = "KiB per minute"
        grid = chart.subplots(len(panels), squeeze=False)
        for axes, (column, label) in zip(grid[:, 0], panels.items(), strict=True):
            unit = 1024 if column == "bytes_per_minute" else 1
            for color, (topic, rows) in _series(all_rows, "topic"):
                times, values = _without_gaps(rows, column, step)
                _line(axes, times, [(value or 0) / unit for value in values], color, topic)
            axes.set_ylabel(label)
            _from_zero(axes)
            _finish(axes, all_rows, step, legend=column == "per_minute")

    return draw


def draw_sizes(data: ReportData) -> "Callable[[Figure], None]":
    """For each topic, a bar from the median to p99 and a mark at the maximum."""
    rows = [row for row in data.sizes.rows if row["p50_bytes"] is not None][:SERIES_MAX]

    def draw(chart: "Figure") -> None:
        axes = chart.subplots()
        places = range(len(rows))
        low = [max(row["p50_bytes"], 1) for row in rows]
        high = [max(row["p99_bytes"], 1) for row in rows]
        wide = [max(end - begin, begin * 0.02) for begin, end in zip(low, high, strict=True)]
        axes.barh(places, wide, left=low, height=0.5, color=COLORS[0], label="p50 to p99")
        most = [max(row["max_bytes"], 1) for row in rows]
        axes.plot(most, places, "|", color=COLORS[3], markersize=14, label="largest")
        axes.set_xscale("log")
        axes.set_xlim(*_log_limits([*low, *most]))
        _plain_numbers(axes.xaxis)
        axes.set_xlabel("bytes of a body")
        _names_on_y(axes, [row["topic"] for row in rows])
        _legend(axes)

    return draw


def draw_balance(data: ReportData) -> "Callable[[Figure], None]":
    """For each topic, the smallest and the largest load of a queue."""
    rows = data.queues.rows[:SERIES_MAX]

    def draw(chart: "Figure") -> None:
        axes = chart.subplots()
        places = range(len(rows))
        low, high = [row["least"] for row in rows], [row["most"] for row in rows]
        axes.hlines(places, low, high, color=COLORS[0], linewidth=5, alpha=0.6)
        axes.plot(high, places, "o", color=COLORS[3], label="fullest queue")
        axes.plot(low, places, "o", color=COLORS[2], label="emptiest queue")
        axes.axvline(1, color=_INK, linewidth=1, linestyle=":")
        axes.set_xlim(0, max([*high, 1.2]) * 1.08)
        axes.set_xlabel("load (1 is an even share)")
        _names_on_y(axes, [row["topic"] for row in rows])
        _legend(axes)

    return draw


def draw_keys(data: ReportData) -> "Callable[[Figure], None]":
    """The most frequent keys and their share of the topic."""
    rows = data.keys.rows[:15]

    def draw(chart: "Figure") -> None:
        axes = chart.subplots()
        topics = list(dict.fromkeys(row["topic"] for row in rows))
        colors = dict(zip(topics, cycle(COLORS), strict=False))
        for topic in topics:
            at = [place for place, row in enumerate(rows) if row["topic"] == topic]
            shares = [100 * rows[place]["share"] for place in at]
            axes.barh(at, shares, height=0.7, color=colors[topic], label=_label(topic))
        axes.set_xlabel("% of the topic's messages")
        _names_on_y(axes, [row["key"] for row in rows])
        _legend(axes)

    return draw


def draw_latencies(data: ReportData) -> "Callable[[Figure], None]":
    """The largest p95 of each stage over time."""

    def draw(chart: "Figure") -> None:
        axes = chart.subplots()
        all_values: list[float] = []
        for color, (stage, rows) in _series(data.latency_times.rows, "stage"):
            values = [max(row["p95_ms"], 1) for row in rows]
            all_values += values
            _line(axes, [_time(row["time"]) for row in rows], values, color, stage)
        axes.set_yscale("log")
        axes.set_ylim(*_log_limits(all_values))
        _plain_numbers(axes.yaxis)
        axes.set_ylabel("milliseconds, p95")
        _finish(axes, data.latency_times.rows, data.bucket_ms)

    return draw


def draw_dead(data: ReportData) -> "Callable[[Figure], None]":
    """Dead letters over time, as bars stacked by cause."""
    step = data.dead_bucket_ms

    def draw(chart: "Figure") -> None:
        from matplotlib.ticker import MaxNLocator

        axes = chart.subplots()
        heights: dict[int, float] = {}
        for color, (cause, rows) in _series(data.dead_times.rows, "cause"):
            places: Any = [_time(row["time"]) for row in rows]
            width: Any = timedelta(milliseconds=0.9 * step)  # a gap between bars
            below = [heights.get(row["time"], 0) for row in rows]
            values = [row["messages"] for row in rows]
            axes.bar(places, values, width, below, align="edge", color=color, label=_label(cause))
            for row in rows:
                heights[row["time"]] = heights.get(row["time"], 0) + row["messages"]
        axes.set_ylabel(f"dead letters per {duration_text(step)}")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        _finish(axes, data.dead_times.rows, step)

    return draw


def draw_lag(data: ReportData) -> "Callable[[Figure], None]":
    """The lag over time, one line per group and one point per run."""

    def draw(chart: "Figure") -> None:
        axes = chart.subplots()
        for color, (group, rows) in _series(data.lag_times.rows, "group"):
            values = [float("nan") if row["lag"] is None else row["lag"] for row in rows]
            _line(axes, [_time(row["time"]) for row in rows], values, color, group)
        axes.set_ylabel("lag in messages")
        _from_zero(axes)
        _finish(axes, data.lag_times.rows, data.bucket_ms)

    return draw


def _series(rows: Sequence[Row], by: str) -> Iterator[tuple[str, tuple[str, list[Row]]]]:
    """A colour and the rows of each value, ordered by time."""
    grouped: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (str(row[by]), row["time"])):
        grouped.setdefault(str(row[by]), []).append(row)
    yield from zip(cycle(COLORS), grouped.items(), strict=False)


def _without_gaps(rows: Sequence[Row], column: str, step: int) -> tuple[list[datetime], list[Any]]:
    """Times and values, with 0 for time buckets without messages."""
    values: Mapping[int, Any] = {row["time"]: row[column] for row in rows}
    times = list(range(min(values), max(values) + 1, step))
    return [_time(time) for time in times], [values.get(time, 0) for time in times]


def _line(
    axes: "Axes", times: Sequence[datetime], values: Sequence[Any], color: str, name: str
) -> None:
    marker = "." if len(times) < 60 else ""
    axes.plot(times, values, color=color, marker=marker, linewidth=1.4, label=_label(name))  # type: ignore[arg-type]


def _names_on_y(axes: "Axes", names: Sequence[object]) -> None:
    axes.set_yticks(range(len(names)), [one_line(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def _log_limits(values: Sequence[float]) -> tuple[float, float]:
    """Limits of a logarithmic axis that contain at least two powers of ten."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return 10.0**low * 0.9, 10.0 ** max(high, low + 1) * 1.1


def _plain_numbers(axis: "Axis") -> None:
    """Labels such as 1,000, because powers of ten would be formulas."""
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.set_minor_formatter(NullFormatter())


def _from_zero(axes: "Axes") -> None:
    axes.set_ylim(-0.01 * max(axes.get_ylim()[1], 1), max(axes.get_ylim()[1], 1))
    axes.yaxis.set_major_formatter("{x:,.10g}")


def _finish(axes: "Axes", rows: Sequence[Row], step: int, *, legend: bool = True) -> None:
    """Set the time axis to the range of the rows; the default shows years around one point."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    first, last = min(row["time"] for row in rows), max(row["time"] for row in rows)
    margin = max(step, (last - first) // 40) if last > first else _SINGLE_POINT_MARGIN * step
    ends: Any = (_time(first - margin), _time(last + margin + step))
    axes.set_xlim(*ends)
    locator = AutoDateLocator(tz=UTC)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    labels = ConciseDateFormatter(locator, tz=UTC)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_formatter(labels)
    axes.set_xlabel("time (UTC)")
    if legend:
        _legend(axes)


def _legend(axes: "Axes") -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small", borderaxespad=0)


def _label(name: object) -> str:
    """A label; matplotlib hides labels that begin with an underscore."""
    text = one_line(name)
    return "\N{ZERO WIDTH SPACE}" + text if text.startswith("_") else text


def duration_text(ms: int) -> str:
    """A duration in its largest unit."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if ms >= size:
            return f"{ms / size:,.1f}".removesuffix(".0") + f" {unit}"
    return f"{ms} ms"


def _time(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)
