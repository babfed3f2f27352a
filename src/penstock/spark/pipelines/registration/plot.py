"""A chart of the tables of pipeline `registration`: counts, latencies, stuck users."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import LakeDamaged
from penstock.spark.pipelines.registration.events import ACCEPTED, STEP_NAMES
from penstock.spark.pipelines.registration.registration_pipeline import (
    COUNTS,
    LATENCIES,
    table_path,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ACCEPTED_COLORS: Final = ("#2a6f97", "#61a5c2", "#a9d6e5")
OTHER_COLORS: Final = ("#b23a48", "#e07a5f", "#f2cc8f")
STEP_COLORS: Final = ("#2a6f97", "#e9a03b", "#b23a48")
PERCENTILE_STYLES: Final = {"p50_ms": ".:", "p95_ms": "o-", "p99_ms": "^--"}
"""Markers and lines that also differ in the small legend."""
_HEIGHT: Final = 8.5
_WIDTH: Final = 10


@dataclass(frozen=True, slots=True)
class RegistrationStatistics:
    """The tables of counts and latencies, by minute."""

    counts: Mapping[tuple[datetime, str, str], int]
    """Registrations by minute, channel and outcome."""
    latencies: Mapping[tuple[datetime, str], Mapping[str, Any]]
    """The other columns by minute and step."""

    @property
    def minutes(self) -> list[datetime]:
        return sorted({key[0] for key in self.counts} | {key[0] for key in self.latencies})


def read_statistics(spark: "SparkSession", output: str) -> RegistrationStatistics:
    """Read the tables below `output`; raises LakeDamaged if rows are duplicated."""
    counts = _read(spark, output, COUNTS, "channel", "outcome")
    latencies = _read(spark, output, LATENCIES, "step")
    return RegistrationStatistics(
        {key: row["registrations"] for key, row in counts.items()},
        latencies,
    )


def _read(spark: "SparkSession", output: str, table: str, *key: str) -> dict[Any, dict[str, Any]]:
    """The rows of a table by minute and the other key columns."""
    from pyspark.sql import functions as f

    path = table_path(output, table)
    # As a number, because a timestamp would be converted to the time zone of the session.
    rows = spark.read.parquet(path).withColumn("minute", f.unix_seconds("minute")).collect()
    found = {(_time(row.minute), *(row[name] for name in key)): row.asDict() for row in rows}
    if len(found) < len(rows):
        raise LakeDamaged(f"{path} has duplicate rows: {len(rows):,} rows, {len(found):,} keys")
    return found


def _time(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def draw(
    statistics: RegistrationStatistics, path: Path, *, title: str, steps: Sequence[str] = STEP_NAMES
) -> None:
    """Write the chart; the suffix of the path selects the format (png, svg, pdf)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    FigureCanvasAgg(figure)
    counts_axes, latency_axes, stuck_axes = figure.subplots(
        3, 1, sharex=True, height_ratios=(3, 3, 1.4)
    )
    minutes = statistics.minutes
    labels = [f"{minute:%H:%M}" for minute in minutes]
    positions = range(len(minutes))

    heights = [0] * len(minutes)
    for label, color, values in _bars(statistics):
        counts_axes.bar(positions, values, bottom=heights, color=color, label=label)
        heights = [sum(pair) for pair in zip(heights, values, strict=True)]
    counts_axes.set_ylabel("registrations per minute")
    counts_axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))

    for color, step in zip(cycle(STEP_COLORS), steps, strict=False):
        for percentile, style in PERCENTILE_STYLES.items():
            values_s = [_seconds(statistics, minute, step, percentile) for minute in minutes]
            name = f"{step}, {percentile.removesuffix('_ms')}"
            latency_axes.plot(positions, values_s, style, color=color, label=name)
        missing = [_value(statistics, minute, step, "missing") for minute in minutes]
        shift = (steps.index(step) - (len(steps) - 1) / 2) * 0.8 / len(steps)
        bars = [position + shift for position in positions]
        stuck_axes.bar(bars, missing, width=0.8 / len(steps), color=color, label=step)
    latency_axes.set_yscale("log")
    latency_axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    latency_axes.yaxis.set_minor_formatter(NullFormatter())
    latency_axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    latency_axes.set_ylabel("seconds until the step is done")
    stuck_axes.set_ylabel("users stuck")
    stuck_axes.yaxis.get_major_locator().set_params(integer=True)
    stuck_axes.set_xticks(positions, labels, rotation=45)
    stuck_axes.set_xlabel("minute of the registration (UTC)")
    for axes in (counts_axes, latency_axes, stuck_axes):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize="x-small", ncols=3, loc="upper right", handlelength=5)
    figure.suptitle(title)
    figure.savefig(path, dpi=130)


def _bars(statistics: RegistrationStatistics) -> Iterator[tuple[str, str, list[int]]]:
    """Label, colour and heights: accepted users by channel, all others by outcome."""
    kinds: dict[tuple[bool, str], Counter[datetime]] = {}
    for (minute, channel, outcome), count in statistics.counts.items():
        key = (False, channel) if outcome == ACCEPTED else (True, outcome)
        kinds.setdefault(key, Counter())[minute] += count
    colors = {False: cycle(ACCEPTED_COLORS), True: cycle(OTHER_COLORS)}
    for (is_other, label), minutes in sorted(kinds.items()):
        yield label, next(colors[is_other]), [minutes[minute] for minute in statistics.minutes]


def _value(statistics: RegistrationStatistics, minute: datetime, step: str, column: str) -> float:
    """A value of a table, or NaN, which is not drawn."""
    row = statistics.latencies.get((minute, step))
    value = None if row is None else row[column]
    return float("nan") if value is None else float(value)


def _seconds(statistics: RegistrationStatistics, minute: datetime, step: str, column: str) -> float:
    return max(_value(statistics, minute, step, column) / 1000, 0.001)
