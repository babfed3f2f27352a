"""The time that a scrape of /metrics takes from the event loop.

    python -m benchmarks.metrics_scrape [QUEUES]

A broker with this number of queues (8 in a topic, and one in a topic), each consumed by a group
that lags behind. The loop time is the CPU time of the callbacks of the event loop during the
scrape; the longest of them delays messages. The text is written by another thread, which competes
for the GIL only.
"""

import asyncio
import gc
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.unit.broker.broker_kit import broker_fixture

from penstock.broker.metrics.broker_metrics import broker_metrics
from penstock.broker.metrics.group_lags import GroupLags
from penstock.clock import LoopClock
from penstock.server.metrics.probe import Probe
from penstock.server.metrics.scrape import read_lags
from penstock.wire.record import Record

QUEUES = 10_000
SHAPES = (8, 1)
"""Queues of a topic."""
ROUNDS = 3


class LoopTimes:
    """The times of the callbacks of the loop, measured around `Handle._run`."""

    def __init__(self) -> None:
        self.total_s = 0.0
        self.longest_s = 0.0

    @contextmanager
    def measured(self):  # type: ignore[no-untyped-def]
        before = asyncio.events.Handle._run

        def run(handle):  # type: ignore[no-untyped-def]
            began = time.thread_time()
            before(handle)
            if asyncio.events.Handle._run is not run:  # the last one goes on after the scrape
                return
            took = time.thread_time() - began
            self.total_s += took
            self.longest_s = max(self.longest_s, took)

        asyncio.events.Handle._run = run  # type: ignore[method-assign]
        try:
            yield self
        finally:
            asyncio.events.Handle._run = before  # type: ignore[method-assign]


async def scrape(probe: Probe) -> tuple[LoopTimes, float, int]:
    """The times of one scrape, its duration and the number of lines."""
    times = LoopTimes()
    began = time.perf_counter()
    with times.measured():
        text = await asyncio.ensure_future(probe._metrics())
    return times, time.perf_counter() - began, text.count(b"\n")


async def measure(folder: Path, queues: int, per_topic: int) -> tuple[LoopTimes, float, int]:
    with broker_fixture(folder) as home:
        store, offsets = home.broker.context.store, home.broker.context.offsets
        record = Record()
        for number in range(queues):
            name = f"topic-{number // per_topic:06d}"
            record.fill(name.encode(), b"x" * 100)
            record.queue_id = number % per_topic
            for _ in range(3):
                assert store.put(record, home.now_ms) == 0, store.writer.fault
            if number % 100 == 0:
                store.publish()
            offsets.commit("group", name, record.queue_id, 1, home.now_ms)
            home.broker.context.stats.got("group", name, 1, 100, 5)
        store.publish()
        lags = GroupLags(home.broker.context)
        registry = broker_metrics(home.broker, lags)
        registry.preparations.append(lambda: read_lags(lags, store, LoopClock()))
        probe = Probe(registry, lambda: None, LoopClock())
        gc.collect()
        gc.freeze()  # as a server does after its start
        found = [await scrape(probe) for _ in range(ROUNDS)]
        gc.unfreeze()
        return min(found, key=lambda one: one[0].total_s)


def main() -> None:
    queues = int(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1].isdecimal() else QUEUES
    table = Table(title=f"scrape of /metrics with {queues:,} queues")
    for column in ("queues of a topic", "lines", "loop time ms", "longest ms", "scrape ms"):
        table.add_column(column, justify="right")
    for per_topic in SHAPES:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            times, took_s, lines = asyncio.run(measure(Path(folder), queues, per_topic))
        table.add_row(
            str(per_topic),
            f"{lines:,}",
            f"{times.total_s * 1000:.1f}",
            f"{times.longest_s * 1000:.1f}",
            f"{took_s * 1000:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
