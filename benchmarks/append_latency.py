"""Latency of an append while the flusher runs, by mapping and by pwrite, in both flush modes.

About 5,000 appends of 1 KiB per second, one at a time, each measured in wall-clock time.
"""

import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock.config import StoreConfig
from penstock.store.put import PUT_OK
from penstock.store.store import MessageStore
from penstock.wire.record import Record

APPENDS = 25_000
PACE_S = 0.0002


def measure(folder: Path, *, sync_flush: bool, append_by: str) -> list[float]:
    config = StoreConfig(
        sync_flush=sync_flush, append_by=append_by, flush_interval_ms=20, index_enabled=False
    )
    store = MessageStore(folder, config, now_ms=1)
    record = Record()
    record.fill(b"BenchTopic", b"x" * 1024)
    took = []
    for i in range(APPENDS):
        started = time.perf_counter()
        assert store.put(record, i) == PUT_OK
        store.writer.publish()
        ended = time.perf_counter()
        took.append((ended - started) * 1e6)
        while time.perf_counter() < started + PACE_S:
            pass
    syncs = store.flusher.syncs()
    store.close()
    return [*sorted(took[500:]), syncs]


def main() -> None:
    table = Table(title=f"append while flushing, µs ({APPENDS:,} appends of 1 KiB)")
    for column in ("flush", "append by", "p50", "p99", "p99.9", "max", "syncs"):
        table.add_column(column, justify="left" if column in ("flush", "append by") else "right")
    for sync_flush in (False, True):
        for append_by in ("mapping", "pwrite"):
            with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
                *took, syncs = measure(Path(folder), sync_flush=sync_flush, append_by=append_by)
            at = [took[int(len(took) * share)] for share in (0.5, 0.99, 0.999)]
            table.add_row(
                "sync" if sync_flush else "async", append_by, *(f"{v:,.1f}" for v in at),
                f"{took[-1]:,.0f}", f"{syncs:,.0f}",
            )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
