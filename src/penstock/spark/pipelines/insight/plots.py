"""The plots of the report of pipeline `insight`, as SVG that stands in an HTML page.

Letters and axes take the colour of the text around them, so that a page may be light or dark. Names
come from messages: nothing in them is taken for a formula, for markup, or for a hidden label.
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

from penstock.spark.pipelines.insight.findings import SERIES_MAX, Findings, Row

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
"""Each can be told from white and from black."""
_INK: Final = "#010203"
"""Stands for the colour of the text until the SVG is made."""
_LABEL_CHARS_MAX: Final = 36
_WIDTH: Final = 9.0
_ALONE: Final = 5
"""So many steps of time are shown on both sides of a single point."""
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
_DROPPED: Final = re.compile(
    r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", re.S
)
_ID: Final = re.compile(r'(\bid="|url\(#|href="#)')
_BREAK: Final = re.compile(r"\s+")
_HIDDEN: Final = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
"""Characters that XML can't have, or that turn the text around them."""


def plain(text: object, chars_max: int = _LABEL_CHARS_MAX) -> str:
    """A value from a message as one short line that can be shown."""
    line = _HIDDEN.sub("\N{REPLACEMENT CHARACTER}", _BREAK.sub(" ", str(text)))
    return line if len(line) <= chars_max else line[: chars_max - 1] + "…"


def svg(name: str, draw: "Callable[[Figure], None]", *, height: float = 3.2) -> str:
    """A plot as an element of a page; `name` tells its ids from those of other plots."""
    with figure(draw, height=height) as made:
        text = io.StringIO()
        made.savefig(text, format="svg")
    lean = _DROPPED.sub("", text.getvalue()).strip()
    return _ID.sub(rf"\g<1>{name}-", lean).replace(_INK, "currentColor")


@contextmanager
def figure(draw: "Callable[[Figure], None]", *, height: float = 3.2) -> "Iterator[Figure]":
    """The plot itself, while its style holds."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Glyphs that our measure of the text does not have are found by whoever shows the page.
    with rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        made = Figure(figsize=(_WIDTH, height), layout="constrained")
        FigureCanvasAgg(made)
        draw(made)
        yield made


def draw_rates(findings: Findings) -> "Callable[[Figure], None]":
    """Messages and bytes per minute over time, a line for each topic."""
    step = findings.bucket_ms
    every = findings.rates.rows
    has_bytes = any(row["bytes_per_minute"] is not None for row in every)

    def draw(made: "Figure") -> None:
        panels = {"per_minute": "messages per minute"}
        if has_bytes:
            panels["bytes_per_minute"] = "KiB per minute"
        grid = made.subplots(len(panels), squeeze=False)
        for axes, (column, label) in zip(grid[:, 0], panels.items(), strict=True):
            unit = 1024 if column == "bytes_per_minute" else 1
            for color, (topic, rows) in _series(every, "topic"):
                times, values = _without_gaps(rows, column, step)
                _line(axes, times, [(value or 0) / unit for value in values], color, topic)
            axes.set_ylabel(label)
            _from_zero(axes)
            _finish(axes, every, step, legend=column == "per_minute")

    return draw


def draw_sizes(findings: Findings) -> "Callable[[Figure], None]":
    """For each topic a bar from the median to p99 and a mark at the largest."""
    rows = [row for row in findings.sizes.rows if row["p50_bytes"] is not None][:SERIES_MAX]

    def draw(made: "Figure") -> None:
        axes = made.subplots()
        places = range(len(rows))
        low = [max(row["p50_bytes"], 1) for row in rows]
        high = [max(row["p99_bytes"], 1) for row in rows]
        wide = [max(end - begin, begin * 0.02) for begin, end in zip(low, high, strict=True)]
        axes.barh(places, wide, left=low, height=0.5, color=COLORS[0], label="p50 to p99")
        most = [max(row["max_bytes"], 1) for row in rows]
        axes.plot(most, places, "|", color=COLORS[3], markersize=14, label="largest")
        axes.set_xscale("log")
        axes.set_xlim(*_decades([*low, *most]))
        _plain_numbers(axes.xaxis)
        axes.set_xlabel("bytes of a body")
        _names_on_y(axes, [row["topic"] for row in rows])
        _legend(axes)

    return draw


def draw_balance(findings: Findings) -> "Callable[[Figure], None]":
    """For each topic the least and the most that a queue has of an even share."""
    rows = findings.queues.rows[:SERIES_MAX]

    def draw(made: "Figure") -> None:
        axes = made.subplots()
        places = range(len(rows))
        low, high = [row["least"] for row in rows], [row["most"] for row in rows]
        axes.hlines(places, low, high, color=COLORS[0], linewidth=5, alpha=0.6)
        axes.plot(high, places, "o", color=COLORS[3], label="fullest queue")
        axes.plot(low, places, "o", color=COLORS[2], label="emptiest queue")
        axes.axvline(1, color=_INK, linewidth=1, linestyle=":")
        axes.set_xlim(0, max([*high, 1.2]) * 1.08)
        axes.set_xlabel("times an even share")
        _names_on_y(axes, [row["topic"] for row in rows])
        _legend(axes)

    return draw


def draw_keys(findings: Findings) -> "Callable[[Figure], None]":
    """The hottest keys and their share of their topics."""
    rows = findings.keys.rows[:15]

    def draw(made: "Figure") -> None:
        axes = made.subplots()
        topics = list(dict.fromkeys(row["topic"] for row in rows))
        colors = dict(zip(topics, cycle(COLORS), strict=False))
        for topic in topics:
            at = [place for place, row in enumerate(rows) if row["topic"] == topic]
            shares = [100 * rows[place]["share"] for place in at]
            axes.barh(at, shares, height=0.7, color=colors[topic], label=_shown(topic))
        axes.set_xlabel("percent of the topic's messages")
        _names_on_y(axes, [row["key"] for row in rows])
        _legend(axes)

    return draw


def draw_latencies(findings: Findings) -> "Callable[[Figure], None]":
    """The worst p95 of each stage over time."""

    def draw(made: "Figure") -> None:
        axes = made.subplots()
        every: list[float] = []
        for color, (stage, rows) in _series(findings.latency_times.rows, "stage"):
            values = [max(row["p95_ms"], 1) for row in rows]
            every += values
            _line(axes, [_time(row["time"]) for row in rows], values, color, stage)
        axes.set_yscale("log")
        axes.set_ylim(*_decades(every))
        _plain_numbers(axes.yaxis)
        axes.set_ylabel("milliseconds, p95")
        _finish(axes, findings.latency_times.rows, findings.bucket_ms)

    return draw


def draw_dead(findings: Findings) -> "Callable[[Figure], None]":
    """Dead letters over time, causes upon each other."""
    step = findings.dead_bucket_ms

    def draw(made: "Figure") -> None:
        from matplotlib.ticker import MaxNLocator

        axes = made.subplots()
        heights: dict[int, float] = {}
        for color, (cause, rows) in _series(findings.dead_times.rows, "cause"):
            places: Any = [_time(row["time"]) for row in rows]
            width: Any = timedelta(milliseconds=0.9 * step)  # neighbours do not touch
            below = [heights.get(row["time"], 0) for row in rows]
            values = [row["messages"] for row in rows]
            axes.bar(places, values, width, below, align="edge", color=color, label=_shown(cause))
            for row in rows:
                heights[row["time"]] = heights.get(row["time"], 0) + row["messages"]
        axes.set_ylabel(f"dead letters in {span_text(step)}")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        _finish(axes, findings.dead_times.rows, step)

    return draw


def draw_lag(findings: Findings) -> "Callable[[Figure], None]":
    """Messages behind, a line for each group; a point for each run."""

    def draw(made: "Figure") -> None:
        axes = made.subplots()
        for color, (group, rows) in _series(findings.lag_times.rows, "group"):
            values = [float("nan") if row["lag"] is None else row["lag"] for row in rows]
            _line(axes, [_time(row["time"]) for row in rows], values, color, group)
        axes.set_ylabel("messages behind")
        _from_zero(axes)
        _finish(axes, findings.lag_times.rows, findings.bucket_ms)

    return draw


def _series(rows: Sequence[Row], by: str) -> Iterator[tuple[str, tuple[str, list[Row]]]]:
    """A colour, and the rows of each value in their order of time."""
    grouped: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (str(row[by]), row["time"])):
        grouped.setdefault(str(row[by]), []).append(row)
    yield from zip(cycle(COLORS), grouped.items(), strict=False)


def _without_gaps(rows: Sequence[Row], column: str, step: int) -> tuple[list[datetime], list[Any]]:
    """Spans of time without a message are zero, not a line between their neighbours."""
    values: Mapping[int, Any] = {row["time"]: row[column] for row in rows}
    times = list(range(min(values), max(values) + 1, step))
    return [_time(time) for time in times], [values.get(time, 0) for time in times]


def _line(
    axes: "Axes", times: Sequence[datetime], values: Sequence[Any], color: str, name: str
) -> None:
    mark = "." if len(times) < 60 else ""
    axes.plot(times, values, color=color, marker=mark, linewidth=1.4, label=_shown(name))  # type: ignore[arg-type]


def _names_on_y(axes: "Axes", names: Sequence[object]) -> None:
    axes.set_yticks(range(len(names)), [plain(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(visible=False, axis="y")


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Ends of a logarithmic axis on powers of ten: at least two of them have their number."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return 10.0**low * 0.9, 10.0 ** max(high, low + 1) * 1.1


def _plain_numbers(axis: "Axis") -> None:
    """1,000 and not a power of ten, which would be a formula."""
    from matplotlib.ticker import NullFormatter, StrMethodFormatter

    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.set_minor_formatter(NullFormatter())


def _from_zero(axes: "Axes") -> None:
    axes.set_ylim(-0.01 * max(axes.get_ylim()[1], 1), max(axes.get_ylim()[1], 1))
    axes.yaxis.set_major_formatter("{x:,.10g}")


def _finish(axes: "Axes", rows: Sequence[Row], step: int, *, legend: bool = True) -> None:
    """An axis of time that is as long as the rows; left alone, one point has years around it."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    first, last = min(row["time"] for row in rows), max(row["time"] for row in rows)
    beside = max(step, (last - first) // 40) if last > first else _ALONE * step
    ends: Any = (_time(first - beside), _time(last + beside + step))
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


def _shown(name: object) -> str:
    """A label; one that begins with an underscore would be left out."""
    text = plain(name)
    return "\N{ZERO WIDTH SPACE}" + text if text.startswith("_") else text


def span_text(ms: int) -> str:
    """A length of time by its largest unit."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if ms >= size:
            return f"{ms / size:,.1f}".removesuffix(".0") + f" {unit}"
    return f"{ms} ms"


def _time(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)
