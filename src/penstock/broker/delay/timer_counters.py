"""What the timer counts: RocketMQ's figures by topic, and how well it keeps time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import ClassVar, Final

from penstock.errors import StoreDamaged
from penstock.store.tables import ConfigFile
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import DataVersion
from penstock.wire.bodies.table_bodies import Metric, TimerMetricsSerializeWrapper
from penstock.wire.record import java_hash

BOUNDS_S: Final = (5, 60, 300, 900, 3_600, 14_400, 28_800, 86_400)
"""Of the distribution of what waits, as in RocketMQ."""
LATENCY_BOUNDS_S: Final = (60, 600, 3_600, 43_200, 86_400, 259_200)
_RATE_MS: Final = 10_000


class Rate:
    """Events per second, over the last whole ten seconds."""

    def __init__(self) -> None:
        self._count = 0
        self._since_ms = 0
        self._rate = 0.0

    def add(self) -> None:
        self._count += 1

    def tick(self, now_ms: int) -> None:
        if not 0 <= now_ms - self._since_ms < _RATE_MS:
            self._rate = self._count * 1000 / _RATE_MS
            self._count, self._since_ms = 0, now_ms

    def __str__(self) -> str:
        return f"{self._rate:.1f}"


class TimerFigures:
    """Counts; also the table of `config/timermetrics`: what waits, by topic."""

    FILE: ClassVar[str] = "config/timermetrics"

    def __init__(self) -> None:
        self.dirty = False
        self.counts: dict[str, Metric] = {}
        self.version = DataVersion()
        self.enqueued_total: Counter[str] = Counter()
        self.dequeued_total: Counter[str] = Counter()
        self.enqueue_rate, self.dequeue_rate = Rate(), Rate()
        self.fed_ms = 0
        self.rolled = 0
        self.recalled = 0
        self.dropped = 0
        self.late_ms = 0  # of the last one delivered

    # --- counting

    def enqueued(self, topic: str, now_ms: int) -> None:
        """A message begins to wait."""
        self.enqueued_total[topic] += 1
        self.enqueue_rate.add()
        self._count(topic, 1, now_ms)

    def dequeued(self, topic: str, now_ms: int) -> None:
        """A message waits no more."""
        self.dequeued_total[topic] += 1
        self.dequeue_rate.add()
        self._count(topic, -1, now_ms)

    def fed(self, now_ms: int) -> None:
        self.fed_ms = now_ms

    def tick(self, now_ms: int) -> None:
        self.enqueue_rate.tick(now_ms)
        self.dequeue_rate.tick(now_ms)

    def _count(self, topic: str, change: int, now_ms: int) -> None:
        before = self.counts.pop(topic, None)
        count = (before.count if before is not None else 0) + change
        if count > 0:
            self.counts[topic] = Metric(count=count, time_stamp=now_ms)
        self.version = self.version.next(now_ms)
        self.dirty = True

    def recount(self, by_hash: Mapping[int, int], topics: Iterable[str], now_ms: int) -> None:
        """After a crash: counts from the timer's own log, which knows topics by their hash."""
        names = {java_hash(topic): topic for topic in {*topics, *self.counts}}
        self.counts = {
            names[code]: Metric(count=count, time_stamp=now_ms)
            for code, count in by_hash.items()
            if code in names and count > 0
        }
        self.dirty = True

    # --- the file

    def wrapper(self) -> TimerMetricsSerializeWrapper:
        return TimerMetricsSerializeWrapper(timing_count=self.counts, data_version=self.version)

    def snapshot(self) -> bytes:
        self.dirty = False
        return fastjson.encode(self.wrapper())

    def load(self, file: ConfigFile) -> None:
        """Take over what the file holds; figures that can't be read are none."""
        try:
            found = file.load(lambda data: fastjson.decode(data, TimerMetricsSerializeWrapper))
        except StoreDamaged:
            return
        if found is not None:
            self.counts, self.version = dict(found.timing_count), found.data_version
