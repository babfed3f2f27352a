"""Compares the output of the demo's pipelines with the scenario and prints tables."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.demo.scenario import SPIKE_MINUTE, UNREADABLE, Scenario
from penstock.cli.terminal import print_summary
from penstock.spark.pipelines.registration.event_tables import PERCENTILES
from penstock.spark.pipelines.registration.events import ACCEPTED, ALERTS, STEP_NAMES
from penstock.spark.pipelines.registration.registration_pipeline import (
    UNREADABLE as UNREADABLE_TABLE,
)
from penstock.spark.pipelines.registration.registration_pipeline import table_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from rich.table import Table

    from penstock.spark.pipelines.registration.plot import RegistrationStatistics

_IDLE_MS: Final = 500
"""Reading a topic ends after this time without messages."""
_ALERT_MS: Final = 10_000


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """The output of the pipelines, and the scenario with the expected output."""

    scenario: Scenario
    statistics: "RegistrationStatistics"
    lake_rows: int
    lake_messages: int
    """The number of distinct messages in the lake."""
    alerts: Counter[str]
    """The number of alerts per user."""
    unreadable: int
    """Messages that could not be decoded, which the pipeline stores in a separate table."""

    @classmethod
    def gather(
        cls, spark: "SparkSession", scenario: Scenario, *, output: str, lake: str, address: str
    ) -> "ScenarioResult":
        from penstock.spark.pipelines.registration.plot import read_statistics

        statistics = read_statistics(spark, output)
        rows = spark.read.parquet(f"{lake}/data")
        messages = rows.select("topic", "broker", "queue_id", "queue_offset").distinct()
        alerts = _read_alerts(address, len(_expected_alerts(scenario)))
        unreadable = spark.read.parquet(table_path(output, UNREADABLE_TABLE)).count()
        return cls(scenario, statistics, rows.count(), messages.count(), alerts, unreadable)

    @property
    def wrong_minutes(self) -> int:
        """The number of minutes that are missing or differ from the scenario."""
        found: Counter[tuple[int, str, str]] = Counter()
        for (minute, channel, outcome), count in self.statistics.counts.items():
            found[self._number(minute), channel, outcome] += count
        minutes = {key[0] for key in found} | set(range(self.scenario.counted_minutes))
        expected = {key: count for key, count in self.scenario.counts.items() if key[0] in minutes}
        differing = expected.items() ^ found.items()
        return len({key[0] for key, _ in differing} | self._wrong_latencies())

    def _wrong_latencies(self) -> set[int]:
        accepted: Counter[int] = Counter()
        for (minute, _, outcome), count in self.scenario.counts.items():
            accepted[minute] += count if outcome == ACCEPTED else 0
        users = {
            (self._number(m), s): row["users"] for (m, s), row in self.statistics.latencies.items()
        }
        minutes = {minute for minute, _ in users} | set(range(self.scenario.closed_minutes))
        expected = {(minute, step): accepted[minute] for minute in minutes for step in STEP_NAMES}
        return {key[0] for key, _ in expected.items() ^ users.items()}

    @property
    def wrong_alerts(self) -> int:
        """The number of users with a missing or an unexpected alert."""
        expected = _expected_alerts(self.scenario)
        return sum(self.alerts[user] != (user in expected) for user in {*expected, *self.alerts})

    @property
    def lake_is_right(self) -> bool:
        return self.lake_rows == self.lake_messages == len(self.scenario.messages)

    @property
    def good(self) -> bool:
        wrong = self.wrong_minutes or self.wrong_alerts or self.unreadable != UNREADABLE
        return self.lake_is_right and not wrong

    def show(self, *, sent_s: float, batches: int, seconds: float) -> None:
        """Print two tables: one row per minute, and a summary."""
        from rich.console import Console

        console = Console()
        console.print(self._minutes())
        counted_minutes = {key[0] for key in self.statistics.counts}
        rows = [
            ("sent", f"{len(self.scenario.messages):,} messages in {sent_s:.1f} s"),
            (
                "spike",
                f"minute {self.scenario.started + timedelta(minutes=SPIKE_MINUTE):%H:%M}",
            ),
            ("Spark batches", f"{batches:,} of four queries"),
            ("lake", f"{self.lake_rows:,} rows, {self.lake_messages:,} distinct messages"),
            (
                "minutes counted",
                f"{len(counted_minutes):,}, {self.wrong_minutes:,} wrong",
            ),
            (
                "alerts",
                f"{sum(self.alerts.values()):,} for users with missing steps, "
                f"{self.wrong_alerts:,} wrong",
            ),
            ("unreadable", f"{self.unreadable:,} stored separately, {UNREADABLE:,} sent"),
        ]
        verdict = "each message exactly once" if self.good else "FAILED"
        print_summary(f"Penstock on Spark: {verdict} ({seconds:.0f} s in total)", rows)

    def _minutes(self) -> "Table":
        from rich.table import Table

        table = Table(title="Registrations per minute; seconds until each step: p50/p95/p99")
        for name in ("minute", "users", "rejected", *STEP_NAMES, "stuck"):
            table.add_column(name, justify="right", no_wrap=True)
        for minute in self.statistics.minutes:
            kinds = {k: n for k, n in self.statistics.counts.items() if k[0] == minute}
            accepted = sum(count for key, count in kinds.items() if key[2] == ACCEPTED)
            steps = [self.statistics.latencies.get((minute, name)) for name in STEP_NAMES]
            cells = ["" if row is None else _percentiles(row) for row in steps]
            stuck = sum(
                self.alerts[u]
                for u, m in _expected_alerts(self.scenario).items()
                if m == self._number(minute)
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
        """The number of a minute, from the start of the scenario."""
        return round((minute - self.scenario.started) / timedelta(minutes=1))


def _percentiles(row: Mapping[str, Any]) -> str:
    """The percentiles in seconds; a dash if no user has the step."""
    values = [row[name] for name in PERCENTILES]
    return "/".join("-" if ms is None else f"{ms / 1000:.{int(ms < 9950)}f}" for ms in values)


def _expected_alerts(scenario: Scenario) -> dict[str, int]:
    """The users for whom the pipeline must have sent an alert."""
    return {
        user: minute for user, minute in scenario.stuck.items() if minute < scenario.closed_minutes
    }


def _read_alerts(address: str, expected: int) -> Counter[str]:
    """Read all alerts of the topic, waiting until at least `expected` have arrived."""
    from penstock import PullConsumer

    found: Counter[str] = Counter()
    with PullConsumer(address, group="demo-alerts", auto_commit=False) as consumer:
        queues = consumer.queues(ALERTS)
        consumer.assign(queues)
        for queue in queues:
            consumer.seek_to_begin(queue)
        while batch := consumer.poll(_ALERT_MS if found.total() < expected else _IDLE_MS):
            found.update(json.loads(message.body)["id"] for message in batch)
    return found
