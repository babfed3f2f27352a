"""The tables of pipeline `registration` as a picture: registrations, latencies, stuck users."""

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
_HEIGHT: Final = 8.5
_WIDTH: Final = 10


@dataclass(frozen=True, slots=True)
class RegistrationStatistics:
    """What the tables say, by minute."""

    counts: Mapping[tuple[datetime, str, str], int]
    """Minute, channel and outcome → registrations."""
    latencies: Mapping[tuple[datetime, str], Mapping[str, Any]]
    """Minute and step → the other columns."""

    @property
    def minutes(self) -> list[datetime]:
        return sorted({key[0] for key in self.counts} | {key[0] for key in self.latencies})


def read_statistics(spark: "SparkSession", output: str) -> RegistrationStatistics:
    """The tables below `output`, which must have rows; raises LakeDamaged for doubled ones."""
    counts = _read(spark, output, COUNTS, "channel", "outcome")
    latencies = _read(spark, output, LATENCIES, "step")
    return RegistrationStatistics(
        {key: row["registrations"] for key, row in counts.items()},
        latencies,
    )


def _read(spark: "SparkSession", output: str, table: str, *key: str) -> dict[Any, dict[str, Any]]:
    """Rows by minute and the other columns of their key."""
    from pyspark.sql import functions as f

    path = table_path(output, table)
    # As a number: a time would be taken for one of the session's zone.
    rows = spark.read.parquet(path).withColumn("minute", f.unix_seconds("minute")).collect()
    found = {(_time(row.minute), *(row[name] for name in key)): row.asDict() for row in rows}
    if len(found) < len(rows):
        raise LakeDamaged(f"{path} has rows twice: {len(rows):,} rows, {len(found):,} keys")
    return found


def _time(seconds: int) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def draw(
    statistics: RegistrationStatistics, path: Path, *, title: str, steps: Sequence[str] = STEP_NAMES
) -> None:
    """Write the picture; the name's ending says in which format (png, svg, pdf)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    FigureCanvasAgg(figure)
    above, middle, below = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1.4))
    minutes = statistics.minutes
    labels = [f"{minute:%H:%M}" for minute in minutes]
    places = range(len(minutes))

    heights = [0] * len(minutes)
    for label, color, values in _bars(statistics):
        above.bar(places, values, bottom=heights, color=color, label=label)
        heights = [sum(pair) for pair in zip(heights, values, strict=True)]
    above.set_ylabel("registrations per minute")
    above.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))

    for color, step in zip(cycle(STEP_COLORS), steps, strict=False):
        for percentile, style in (("p50_ms", ":"), ("p95_ms", "-"), ("p99_ms", "--")):
            values_s = [_seconds(statistics, minute, step, percentile) for minute in minutes]
            name = f"{step}, {percentile.removesuffix('_ms')}"
            middle.plot(places, values_s, style, marker=".", color=color, label=name)
        missing = [_figure(statistics, minute, step, "missing") for minute in minutes]
        shift = (steps.index(step) - (len(steps) - 1) / 2) * 0.8 / len(steps)
        bars = [place + shift for place in places]
        below.bar(bars, missing, width=0.8 / len(steps), color=color, label=step)
    middle.set_yscale("log")
    middle.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    middle.yaxis.set_minor_formatter(NullFormatter())
    middle.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    middle.set_ylabel("seconds until the step is done")
    below.set_ylabel("users stuck")
    below.yaxis.get_major_locator().set_params(integer=True)
    below.set_xticks(places, labels, rotation=45)
    below.set_xlabel("minute of the registration (UTC)")
    for axes in (above, middle, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize="x-small", ncols=3, loc="upper right")
    figure.suptitle(title)
    figure.savefig(path, dpi=130)


def _bars(statistics: RegistrationStatistics) -> Iterator[tuple[str, str, list[int]]]:
    """Accepted users by channel, all others by outcome: a label, a colour and the heights."""
    kinds: dict[tuple[bool, str], Counter[datetime]] = {}
    for (minute, channel, outcome), count in statistics.counts.items():
        key = (False, channel) if outcome == ACCEPTED else (True, outcome)
        kinds.setdefault(key, Counter())[minute] += count
    colors = {False: cycle(ACCEPTED_COLORS), True: cycle(OTHER_COLORS)}
    for (is_other, label), minutes in sorted(kinds.items()):
        yield label, next(colors[is_other]), [minutes[minute] for minute in statistics.minutes]


def _figure(statistics: RegistrationStatistics, minute: datetime, step: str, column: str) -> float:
    """NaN where there is none: nothing is drawn there."""
    row = statistics.latencies.get((minute, step))
    value = None if row is None else row[column]
    return float("nan") if value is None else float(value)


def _seconds(statistics: RegistrationStatistics, minute: datetime, step: str, column: str) -> float:
    return max(_figure(statistics, minute, step, column) / 1000, 0.001)
