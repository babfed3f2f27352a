"""How fast a consumer is, topic by topic: for tools that ask now and then.

Nothing is measured while nobody asks. Each question is answered for the time since an earlier one,
ten seconds ago at least, or since the consumer began.
"""

from collections.abc import Iterable
from typing import NamedTuple

from penstock.client.consumer.process_queue import ProcessQueue
from penstock.clock import Clock
from penstock.wire.bodies.admin_bodies import ConsumeStatus

WINDOW_MS = 10_000


class Sample(NamedTuple):
    """The counts of a topic at one moment."""

    ms: int
    received: int = 0
    finished: int = 0
    failed: int = 0
    busy_ms: int = 0


class Rates:
    """Remembers two moments of each topic."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._begun_ms = clock.monotonic_ms()
        self._samples: dict[str, tuple[Sample, Sample]] = {}

    def status(self, topic: str, works: Iterable[ProcessQueue]) -> ConsumeStatus:
        """The figures of a topic whose queues these are; a queue that left counts no more."""
        works = list(works)
        now = Sample(
            self._clock.monotonic_ms(),
            sum(w.received for w in works),
            sum(w.finished for w in works),
            sum(w.failed for w in works),
            sum(w.busy_ms for w in works),
        )
        begin = Sample(self._begun_ms)
        older, newer = self._samples.get(topic, (begin, begin))
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
