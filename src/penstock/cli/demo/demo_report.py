"""What the demo's pipelines have written, compared with its story and shown as tables."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.demo.story import SPIKE_MINUTE, UNREADABLE, Story
from penstock.spark.pipelines.registration.event_tables import PERCENTILES
from penstock.spark.pipelines.registration.events import ACCEPTED, ALERTS, STEP_NAMES
from penstock.spark.pipelines.registration.registration_pipeline import (
    UNREADABLE as UNREADABLE_TABLE,
)
from penstock.spark.pipelines.registration.registration_pipeline import table_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.table import Table

    from penstock.spark.pipelines.registration.plot import Figures

_QUIET_MS: Final = 500
"""Nothing more is expected of a topic that has given nothing for so long."""
_ALERT_MS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Findings:
    """What is there and what should be."""

    story: Story
    figures: "Figures"
    lake_rows: int
    lake_messages: int
    """Rows of the lake that are different messages."""
    alerts: Counter[str]
    """How often each user was alerted about."""
    unreadable: int
    """Messages that were kept apart as no events."""

    @classmethod
    def gather(
        cls, spark: "SparkSession", story: Story, *, output: str, lake: str, address: str
    ) -> "Findings":
        from penstock.spark.pipelines.registration.plot import read_figures

        figures = read_figures(spark, output)
        rows = spark.read.parquet(f"{lake}/data")
        messages = rows.select("topic", "broker", "queue_id", "queue_offset").distinct()
        alerts = _read_alerts(address, len(_stuck(story)))
        unreadable = spark.read.parquet(table_path(output, UNREADABLE_TABLE)).count()
        return cls(story, figures, rows.count(), messages.count(), alerts, unreadable)

    @property
    def wrong_minutes(self) -> int:
        """Minutes that are missing, or whose users are not those of the story."""
        found: Counter[tuple[int, str, str]] = Counter()
        for (minute, channel, outcome), count in self.figures.counts.items():
            found[self._number(minute), channel, outcome] += count
        there = {key[0] for key in found} | set(range(self.story.counted_minutes))
        wanted = {key: count for key, count in self.story.counts.items() if key[0] in there}
        differing = wanted.items() ^ found.items()
        return len({key[0] for key, _ in differing} | self._wrong_latencies())

    def _wrong_latencies(self) -> set[int]:
        accepted: Counter[int] = Counter()
        for (minute, _, outcome), count in self.story.counts.items():
            accepted[minute] += count if outcome == ACCEPTED else 0
        users = {
            (self._number(m), s): row["users"] for (m, s), row in self.figures.latencies.items()
        }
        there = {minute for minute, _ in users} | set(range(self.story.closed_minutes))
        wanted = {(minute, step): accepted[minute] for minute in there for step in STEP_NAMES}
        return {key[0] for key, _ in wanted.items() ^ users.items()}

    @property
    def wrong_alerts(self) -> int:
        """Users who should have one alert and have not, or the other way round."""
        wanted = _stuck(self.story)
        return sum(self.alerts[user] != (user in wanted) for user in {*wanted, *self.alerts})

    @property
    def lake_is_right(self) -> bool:
        return self.lake_rows == self.lake_messages == len(self.story.messages)

    @property
    def good(self) -> bool:
        wrong = self.wrong_minutes or self.wrong_alerts or self.unreadable != UNREADABLE
        return self.lake_is_right and not wrong

    def show(self, *, told_s: float, batches: int, seconds: float) -> None:
        """Two tables: minute by minute, and the whole."""
        from rich.console import Console

        console = Console()
        console.print(self._minutes())
        rows = [
            ("sent", f"{len(self.story.messages):,} messages in {told_s:.1f} s"),
            ("the spike", f"minute {self.story.began + timedelta(minutes=SPIKE_MINUTE):%H:%M}"),
            ("batches of Spark", f"{batches:,} of four queries"),
            ("lake", f"{self.lake_rows:,} rows, {self.lake_messages:,} different messages"),
            (
                "minutes counted",
                f"{len({key[0] for key in self.figures.counts}):,}, {self.wrong_minutes:,} wrong",
            ),
            (
                "alerts",
                f"{sum(self.alerts.values()):,} for users whose steps are missing, "
                f"{self.wrong_alerts:,} wrong",
            ),
            ("unreadable", f"{self.unreadable:,} kept apart, {UNREADABLE:,} sent"),
        ]
        verdict = "each message once" if self.good else "SOMETHING IS WRONG"
        console.print(_table(f"Penstock on Spark: {verdict} ({seconds:.0f} s in all)", rows))

    def _minutes(self) -> "Table":
        from rich.table import Table

        table = Table(title="Minute by minute; seconds until a step is done: p50/p95/p99")
        for name in ("minute", "users", "rejected", *STEP_NAMES, "stuck"):
            table.add_column(name, justify="right", no_wrap=True)
        for minute in self.figures.minutes:
            kinds = {k: n for k, n in self.figures.counts.items() if k[0] == minute}
            accepted = sum(count for key, count in kinds.items() if key[2] == ACCEPTED)
            steps = [self.figures.latencies.get((minute, name)) for name in STEP_NAMES]
            cells = ["" if row is None else _percentiles(row) for row in steps]
            stuck = sum(
                self.alerts[u] for u, m in _stuck(self.story).items() if m == self._number(minute)
            )
            table.add_row(
                f"{minute:%H:%M}",
                f"{accepted:,}",
                f"{sum(kinds.values()) - accepted:,}",
                *cells,
                f"{stuck:,}" if steps[0] else "",
            )
        return table

    def _number(self, minute: datetime) -> int:
        """Which minute of the story it is."""
        return round((minute - self.story.began) / timedelta(minutes=1))


def _percentiles(row: Mapping[str, Any]) -> str:
    """In seconds; a dash where nobody has the step."""
    values = [row[name] for name in PERCENTILES]
    return "/".join("-" if ms is None else f"{ms / 1000:.{int(ms < 9950)}f}" for ms in values)


def _stuck(story: Story) -> dict[str, int]:
    """Users for whom there must be an alert by now."""
    return {user: minute for user, minute in story.stuck.items() if minute < story.closed_minutes}


def _read_alerts(address: str, wanted: int) -> Counter[str]:
    """All alerts of the topic: as many as are wanted, and whatever is there besides."""
    from penstock import PullConsumer

    found: Counter[str] = Counter()
    with PullConsumer(address, group="demo-alerts", auto_commit=False) as consumer:
        queues = consumer.queues(ALERTS)
        consumer.assign(queues)
        for queue in queues:
            consumer.seek_to_begin(queue)
        while batch := consumer.poll(_ALERT_MS if found.total() < wanted else _QUIET_MS):
            found.update(json.loads(message.body)["id"] for message in batch)
    return found


def _table(title: str, rows: list[tuple[str, str]]) -> "Table":
    from rich.table import Table

    table = Table(title=title, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for row in rows:
        table.add_row(*row)
    return table
