"""Consumption rates by topic, for admin tools that query them now and then.

Nothing is measured between queries. Rates are those since an earlier query that was at least ten
seconds ago, or since the start of the consumer.
"""

from collections.abc import Iterable
from typing import NamedTuple

from penstock.client.consumer.process_queue import ProcessQueue
from penstock.clock import Clock
from penstock.wire.bodies.admin_bodies import ConsumeStatus

WINDOW_MS = 10_000


class CounterSample(NamedTuple):
    """The counters of a topic at one time."""

    ms: int
    received: int = 0
    finished: int = 0
    failed: int = 0
    busy_ms: int = 0


class Rates:
    """Keeps two samples of each topic."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._started_ms = clock.monotonic_ms()
        self._samples: dict[str, tuple[CounterSample, CounterSample]] = {}

    def status(self, topic: str, process_queues: Iterable[ProcessQueue]) -> ConsumeStatus:
        """The rates of a topic with these queues; released queues do not count."""
        process_queues = list(process_queues)
        now = CounterSample(
            self._clock.monotonic_ms(),
            sum(w.received for w in process_queues),
            sum(w.finished for w in process_queues),
            sum(w.failed for w in process_queues),
            sum(w.busy_ms for w in process_queues),
        )
        start = CounterSample(self._started_ms)
        older, newer = self._samples.get(topic, (start, start))
        if now.ms - newer.ms >= WINDOW_MS:
            older, newer = newer, now
        self._samples[topic] = (older, newer)
        seconds = max(now.ms - older.ms, 1) / 1000
        handled = now.finished - older.finished
        failed = max(now.failed - older.failed, 0)
        return ConsumeStatus(
            pull_tps=max(now.received - older.received, 0) / seconds,
            consume_rt=max(now.busy_ms - older.busy_ms, 0) / max(handled, 1),
            consume_ok_tps=max(handled - failed, 0) / seconds,
            consume_failed_tps=failed / seconds,
            consume_failed_msgs=now.failed,
        )
