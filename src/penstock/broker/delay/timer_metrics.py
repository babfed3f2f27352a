"""Metrics of the timer: the counters of RocketMQ by topic, and how punctual it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, ClassVar, Final

from penstock.errors import StoreDamaged
from penstock.metrics import Histogram, HistogramFamily, Registry, Sample
from penstock.store.tables.config_tables import ConfigFile
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import DataVersion
from penstock.wire.bodies.table_bodies import Metric, TimerMetricsSerializeWrapper
from penstock.wire.record import java_hash

if TYPE_CHECKING:
    from penstock.broker.delay.timers import Timers

BOUNDS_S: Final = (5, 60, 300, 900, 3_600, 14_400, 28_800, 86_400)
"""Bounds of the distribution of waiting messages, as in RocketMQ."""
LATENCY_BOUNDS_S: Final = (60, 600, 3_600, 43_200, 86_400, 259_200)
_RATE_MS: Final = 10_000


class Rate:
    """Events per second, over the last complete ten seconds."""

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


class TimerMetrics:
    """Counters of the timer; also the table `config/timermetrics`: waiting messages by topic."""

    FILE: ClassVar[str] = "config/timermetrics"

    def __init__(self) -> None:
        self.dirty = False
        self.counts: dict[str, Metric] = {}
        self.version = DataVersion()
        self.enqueued_total: Counter[str] = Counter()
        self.dequeued_total: Counter[str] = Counter()
        self.delays: dict[str, Histogram] = {}
        self.enqueue_rate, self.dequeue_rate = Rate(), Rate()
        self.enqueued_ms = 0
        self.rolled = 0
        self.recalled = 0
        self.dropped = 0
        self.late_ms = 0  # of the last one delivered

    # --- counting

    def enqueued(self, topic: str, now_ms: int, delay_ms: int) -> None:
        """Count a message that was added to the timer, with the rest of its delay."""
        self.enqueued_total[topic] += 1
        histogram = self.delays.get(topic)
        if histogram is None:
            histogram = self.delays[topic] = Histogram(DELAY_BOUNDS_S)
        histogram.observe(max(delay_ms, 0) / 1000)
        self.enqueue_rate.add()
        self._count(topic, 1, now_ms)

    def dequeued(self, topic: str, now_ms: int) -> None:
        """Count a message that left the timer."""
        self.dequeued_total[topic] += 1
        self.dequeue_rate.add()
        self._count(topic, -1, now_ms)

    def on_read(self, now_ms: int) -> None:
        self.enqueued_ms = now_ms

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
        """Restore the counts after a crash from the timer log, which holds hashes of topics."""
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
        """Load the counts from the file; an unreadable file is ignored."""
        try:
            found = file.load(lambda data: fastjson.decode(data, TimerMetricsSerializeWrapper))
        except StoreDamaged:
            return
        if found is not None:
            self.counts, self.version = dict(found.timing_count), found.data_version


_TOPIC = ("topic",)
DELAY_BOUNDS_S = (60, 600, 3_600, 43_200, 86_400, 259_200)
"""As in RocketMQ."""


def add_timer_metrics(registry: Registry, timers: Timers) -> None:
    """Register all metrics of a timer."""
    _add_rocketmq_metrics(registry, timers)
    _add_penstock_metrics(registry, timers.metrics)


def _add_rocketmq_metrics(registry: Registry, timers: Timers) -> None:
    metrics = timers.metrics
    registry.gauge(
        "rocketmq_timing_messages",
        "Messages in the timer and in its queue.",
        _TOPIC,
        read=lambda: [((topic,), metric.count) for topic, metric in metrics.counts.items()],
    )
    registry.gauge(
        "rocketmq_timer_message_snapshot",
        "Waiting messages by the seconds until they are due: from the previous bound to this one.",
        ("timer_bound_s",),
        read=lambda: [((str(bound),), count) for bound, count in timers.distribution()],
    )
    registry.gauge(
        "rocketmq_timer_enqueue_lag",
        "Messages in the queue of the timer that were not enqueued yet.",
        read=lambda: timers.enqueue.lag,
    )
    registry.gauge(
        "rocketmq_timer_enqueue_latency",
        "Time since the last message was enqueued while others wait, in ms.",
        read=timers.enqueue_latency_ms,
    )
    registry.gauge(
        "rocketmq_timer_dequeue_lag",
        "Messages in the timer.",
        read=lambda: timers.files.wheel.total(),
    )
    registry.gauge(
        "rocketmq_timer_dequeue_latency",
        "How far the current slot is behind the clock, in ms.",
        read=timers.dequeue_latency_ms,
    )
    registry.add(
        HistogramFamily(
            "rocketmq_delay_message_latency",
            "Delays of messages that were added to the timer, in seconds.",
            lambda: [((topic,), delays) for topic, delays in list(metrics.delays.items())],
            _TOPIC,
        )
    )
    registry.counter(
        "rocketmq_timer_enqueue_total",
        "Messages that were added to the timer.",
        _TOPIC,
        read=lambda: _by_topic(metrics.enqueued_total),
    )
    registry.counter(
        "rocketmq_timer_dequeue_total",
        "Messages that left the timer.",
        _TOPIC,
        read=lambda: _by_topic(metrics.dequeued_total),
    )


def _add_penstock_metrics(registry: Registry, metrics: TimerMetrics) -> None:
    registry.gauge(
        "penstock_timer_late_ms",
        "Delay of the last delivered message, in ms.",
        read=lambda: metrics.late_ms,
    )
    registry.counter(
        "penstock_timer_rolled_total",
        "Messages that were rolled: stored again because of a long delay.",
        read=lambda: metrics.rolled,
    )
    registry.counter(
        "penstock_timer_recalled_total",
        "Messages that were not delivered because of a recall.",
        read=lambda: metrics.recalled,
    )
    registry.counter(
        "penstock_timer_dropped_total",
        "Messages that could not be delivered, such as those of a deleted topic; see the log.",
        read=lambda: metrics.dropped,
    )


def _by_topic(counts: Counter[str]) -> list[Sample]:
    return [((topic,), count) for topic, count in counts.items()]
