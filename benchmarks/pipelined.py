"""The most that one broker process does on one core: pipelined sends, large pulls, sync flush.

The broker is pinned to one core, and the generator (`penstock bench --pipeline`) to another one.
Rounds alternate between the goals. CPU is the user and system time of the processes: it depends
less on what else the machine does. For the rates the machine has to be quiet.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from tests.compat import apache
from tests.compat.penstock import NameServer

from benchmarks.java_load import cpu_seconds
from penstock import Admin

ROUNDS = 5
SECONDS = 5
SENDS = ("--duration", f"{SECONDS}s", "--warmup", "1s", "--size", "128")
FILLED_TOPIC = "filled"
FILLED = 2_000_000
READY_S = 60


class Case(NamedTuple):
    """One goal: a load of one of the two brokers."""

    title: str
    broker: str
    arguments: tuple[str, ...]
    goal: int


CASES = (
    Case("sends, async flush", "async",
         ("send", *SENDS, "--pipeline", "512", "--producers", "2"), 200_000),
    Case("sends, JSON headers", "async",
         ("send", *SENDS, "--pipeline", "512", "--producers", "2", "--header", "json"), 0),
    Case("catch-up, pulls of 1,024", "async",
         ("consume", "--pipeline", "4", "--consumers", "2", "--pull-size", "1024"), 1_000_000),
    Case("sends, sync flush", "sync",
         ("send", *SENDS, "--pipeline", "512", "--producers", "4"), 60_000),
)  # fmt: skip


class Round(NamedTuple):
    """What one run has measured."""

    per_second: float
    broker_us: float
    generator_us: float
    p99_ms: float | None
    failed: int


@contextmanager
def pinned_broker(root: Path, name: str, names: str, cores: list[int]) -> Iterator[int]:
    """Run a broker on a core; yields its process id."""
    settings = root / f"{name}.toml"
    settings.write_text(
        "[broker]\npull_bytes_max = 1048576\n"  # the default is less than 1,024 messages
        f"[store]\nsync_flush = {'true' if name == 'sync' else 'false'}\n"
    )
    port = apache.free_port(above=3)
    command = [
        sys.executable, "-m", "penstock.cli.main", "broker", "-c", str(settings), "-n", names,
        "--port", str(port), "--name", name, "--data", str(root / name),
    ]  # fmt: skip
    log_file = root / f"{name}.log"
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
    try:
        os.sched_setaffinity(process.pid, cores)  # threads that are started later inherit it
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(log_file.read_text()[-2000:])
        yield process.pid
    finally:
        process.terminate()
        process.wait()


def bench(names: str, cores: list[int], *arguments: str) -> dict[str, Any]:
    """One run of `penstock bench` on a core."""
    printed = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "bench", *arguments, "-n", names, "--json"],
        capture_output=True, text=True, check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    ).stdout  # fmt: skip
    found: dict[str, Any] = json.loads(printed)
    return found


def measure(case: Case, names: str, pid: int, cores: list[int]) -> Round:
    topic = FILLED_TOPIC if case.arguments[0] == "consume" else f"to-{case.broker}"
    before = cpu_seconds(pid)
    found = bench(names, cores, *case.arguments, "--topic", topic)
    broker_s = cpu_seconds(pid) - before
    measured_s = found["seconds"]
    # A run of sends has a warm-up, in which the broker works too.
    share = measured_s / (measured_s + found["warmup_seconds"])
    count = max(found["messages"], 1)
    return Round(
        found["messages_per_second"] or 0.0,
        broker_s * share * 1e6 / count,
        found["generator"]["cpu_percent"] / 100 * measured_s * 1e6 / count,
        found["latency_ms"]["p99"],
        sum(found["errors"].values()) + sum(found["statuses"].values()),
    )


def measure_all() -> dict[Case, list[Round]]:
    usable = sorted(os.sched_getaffinity(0))
    broker_core, generator_core = [usable[0]], [usable[-1]]
    rounds: dict[Case, list[Round]] = {case: [] for case in CASES}
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        NameServer(Path(folder) / "names") as server,
        pinned_broker(Path(folder), "async", server.address, broker_core) as async_pid,
        pinned_broker(Path(folder), "sync", server.address, broker_core) as sync_pid,
    ):
        names = server.address
        pids = {"async": async_pid, "sync": sync_pid}
        create_topics(names, list(pids))
        bench(names, generator_core, "consume", "--topic", FILLED_TOPIC, "--pipeline", "8",
              "--fill", str(FILLED))  # fmt: skip
        for _ in range(ROUNDS):
            for case in CASES:
                rounds[case].append(measure(case, names, pids[case.broker], generator_core))
    return rounds


def create_topics(names: str, brokers: list[str]) -> None:
    """A topic for each broker, as soon as the NameServer knows it."""
    deadline = time.monotonic() + READY_S
    with Admin(names) as admin:
        while {broker.name for broker in admin.brokers()} != {*brokers}:
            assert time.monotonic() < deadline, "the brokers are not registered"
        for broker in brokers:
            admin.create_topic(f"to-{broker}", queues=8, brokers=[broker])
        admin.create_topic(FILLED_TOPIC, queues=8, brokers=["async"])


def spread(values: list[float]) -> str:
    """The median, and how far the rounds are apart, in thousands."""
    low, middle, high = (value / 1_000 for value in (min(values), median(values), max(values)))
    return f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"


def main() -> None:
    table = Table(
        title="one broker on one core: thousands of messages per second, and CPU per message "
        f"({ROUNDS} rounds, bodies of 128 B)"
    )
    for column in ("load", "1,000/s", "goal", "broker µs", "load µs", "p99 ms", "failed"):
        table.add_column(column, justify="left" if column == "load" else "right")
    for case, rounds in measure_all().items():
        p99 = [found.p99_ms for found in rounds if found.p99_ms is not None]
        table.add_row(
            case.title,
            spread([found.per_second for found in rounds]),
            f"≥ {case.goal // 1_000:,}" if case.goal else "",
            f"{median(found.broker_us for found in rounds):.2f}",
            f"{median(found.generator_us for found in rounds):.2f}",
            f"{median(p99):.1f}" if p99 else "",
            str(sum(found.failed for found in rounds)),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
