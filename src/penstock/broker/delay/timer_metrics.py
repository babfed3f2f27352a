"""The timer's metrics, in RocketMQ's names where it has them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from penstock.metrics import Registry, Sample

if TYPE_CHECKING:
    from penstock.broker.delay.timers import Timers

_TOPIC = ("topic",)


def add_timer_metrics(registry: Registry, timers: Timers) -> None:
    """All figures of a timer."""
    figures = timers.figures
    registry.gauge(
        "rocketmq_timing_messages", "Messages that wait for their time.", _TOPIC,
        read=lambda: [((topic,), metric.count) for topic, metric in figures.counts.items()],
    )  # fmt: skip
    registry.gauge(
        "rocketmq_timer_message_snapshot",
        "Messages that wait, by the seconds until they are due: up to this bound, from the one "
        "before.", ("timer_bound_s",),
        read=lambda: [((str(bound),), count) for bound, count in timers.distribution()],
    )  # fmt: skip
    registry.gauge(
        "rocketmq_timer_enqueue_lag", "Messages that are stored and not in the timer yet.",
        read=lambda: timers.feed.behind,
    )  # fmt: skip
    registry.gauge(
        "rocketmq_timer_enqueue_latency", "How long the oldest of them waits for that, in ms.",
        read=timers.enqueue_latency_ms,
    )  # fmt: skip
    registry.gauge(
        "rocketmq_timer_dequeue_lag", "Messages in the timer.",
        read=lambda: timers.files.wheel.total(),
    )  # fmt: skip
    registry.gauge(
        "rocketmq_timer_dequeue_latency", "How far the slot in work is behind the time, in ms.",
        read=timers.dequeue_latency_ms,
    )  # fmt: skip
    registry.counter(
        "rocketmq_timer_enqueue_total", "Messages that came into the timer.", _TOPIC,
        read=lambda: _by_topic(figures.enqueued_total),
    )  # fmt: skip
    registry.counter(
        "rocketmq_timer_dequeue_total", "Messages that left the timer.", _TOPIC,
        read=lambda: _by_topic(figures.dequeued_total),
    )  # fmt: skip
    registry.gauge(
        "penstock_timer_late_ms", "How late the last message was delivered.",
        read=lambda: figures.late_ms,
    )  # fmt: skip
    registry.counter(
        "penstock_timer_rolled_total",
        "Messages that were stored once more because they wait so long.",
        read=lambda: figures.rolled,
    )  # fmt: skip
    registry.counter(
        "penstock_timer_recalled_total", "Messages that were not delivered because of a recall.",
        read=lambda: figures.recalled,
    )  # fmt: skip
    registry.counter(
        "penstock_timer_dropped_total",
        "Messages that had no place to go to any more; the log names them.",
        read=lambda: figures.dropped,
    )  # fmt: skip


def _by_topic(counts: Counter[str]) -> list[Sample]:
    return [((topic,), count) for topic, count in counts.items()]
