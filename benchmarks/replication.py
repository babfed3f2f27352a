"""Replication: Penstock's master and slave, with both protocols, beside Apache's.

* `catch_up`: a slave that was away copies 2 GiB. MB/s, CPU per MB and per message, memory.
* `sends`: 64 threads send 128-byte messages synchronously. The master has one slave and waits for
  it, or it is alone.
* `stopped`: the same sends to Penstock beside nine slaves that are stopped (SIGSTOP).

CPU is the user and system time of the broker processes. All processes share the machine's cores. In
a virtual machine, the system time of a catch-up may be mostly the host's: for pages of memory that
the machine has not used for a while. The user time does not depend on that.

Needs Java and Maven. `python -m benchmarks.replication [PART …]` runs some parts.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.compat import maven

from benchmarks import replica_pairs
from benchmarks.java_load import cpu_seconds
from benchmarks.replica_pairs import (
    ALONE,
    APACHE,
    EPOCHS,
    KINDS,
    SYNC,
    TOPIC,
    AnyBroker,
    Pair,
    await_in_sync,
    await_true,
    log_end,
    undispatched_bytes,
)

ROUNDS = 3
SIZE = 2 << 30
FIRST_BYTES = 4 << 20
CATCH_UP_BODY_BYTES = 1024
CATCH_UP_S = 300.0
CONNECT_S = 3.0
"""A slave connects to its master within this time."""
POLL_S = 0.05
THREADS = 64
BODY_BYTES = 128
WARM_S = 8
SECONDS = 10
STOPPED = 9
SPEED_GOAL, CPU_GOAL = 2.0, 0.2
_MB = 1e6


def user_seconds(pid: int) -> float:
    """User time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> tuple[float, float]:
    """Resident memory: private pages, and pages of mapped files."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kb = {name: int(rest.split()[0]) for name, _, rest in (s.partition(":") for s in lines)
          if name.startswith("Rss")}  # fmt: skip
    return kb["RssAnon"] / 1024, (kb["RssFile"] + kb["RssShmem"]) / 1024


# --- catching up


@dataclass(frozen=True)
class CatchUp:
    """What copying a log took."""

    size: int
    messages: int
    seconds: float
    master_cpu: float
    slave_cpu: float
    user_cpu: float
    private_mb: float
    mapped_mb: float

    @property
    def rate(self) -> float:
        """MB per second."""
        return self.size / _MB / self.seconds

    @property
    def cpu(self) -> float:
        return self.master_cpu + self.slave_cpu


def measure_catch_up(pair: Pair, messages: int) -> CatchUp:
    """Connect both while the master is stopped; then measure until the slave has dispatched all."""
    master = pair.start(ALONE)
    wanted = log_end(master)
    os.kill(master.pid, signal.SIGSTOP)
    try:
        slave = pair.start_slave()
        time.sleep(CONNECT_S)
    finally:
        os.kill(master.pid, signal.SIGCONT)
    began = time.monotonic()
    before = [cpu_seconds(one.pid) for one in (master, slave)]
    user = user_seconds(master.pid) + user_seconds(slave.pid)
    private = mapped = 0.0
    while (end := log_end(slave)) < wanted:
        if time.monotonic() - began > CATCH_UP_S:
            raise TimeoutError(f"the slave has {end} of {wanted} bytes")
        memory = memory_mb(slave.pid)
        private, mapped = max(private, memory[0]), max(mapped, memory[1])
        time.sleep(POLL_S)
    seconds = time.monotonic() - began
    await_true(lambda: undispatched_bytes(slave) == 0, "the slave has dispatched all")
    return CatchUp(
        wanted - FIRST_BYTES,
        messages,
        seconds,
        cpu_seconds(master.pid) - before[0],
        cpu_seconds(slave.pid) - before[1],
        user_seconds(master.pid) + user_seconds(slave.pid) - user,
        private,
        mapped,
    )


def catch_up(root: Path) -> None:
    """The part `catch_up`."""
    stores = root / "first", root / "whole"
    messages = replica_pairs.make_stores(
        *stores, first_bytes=FIRST_BYTES, size=SIZE, body_bytes=CATCH_UP_BODY_BYTES
    )
    results: dict[str, list[CatchUp]] = defaultdict(list)
    for number in range(ROUNDS):
        for kind in KINDS:
            with replica_pairs.pair(kind, root / "pair") as pair:
                for broker_id, source in enumerate(reversed(stores)):
                    replica_pairs.copy(source, pair.store_dir(broker_id))
                os.sync()  # the copies must not be written to the disk while a slave is measured
                results[kind].append(measure_catch_up(pair, messages))
            print(f"round {number + 1}, {kind}: {results[kind][-1]}, load {load_average()}")
    show_catch_up(results)


def show_catch_up(results: Mapping[str, Sequence[CatchUp]]) -> None:
    columns = (
        *("MB/s", "CPU ms/MB", "master", "slave", "user", "CPU µs/message"),
        *("slave: private MB", "mapped MB"),
    )
    table = new_table(f"Catch-up, {CATCH_UP_BODY_BYTES} B, median of {ROUNDS}", columns)
    for kind, found in results.items():
        table.add_row(
            kind,
            f"{median(one.rate for one in found):,.0f}",
            f"{median(one.cpu * 1e3 / (one.size / _MB) for one in found):.2f}",
            f"{median(one.master_cpu * 1e3 / (one.size / _MB) for one in found):.2f}",
            f"{median(one.slave_cpu * 1e3 / (one.size / _MB) for one in found):.2f}",
            f"{median(one.user_cpu * 1e3 / (one.size / _MB) for one in found):.2f}",
            f"{median(one.cpu * 1e6 / one.messages for one in found):.2f}",
            f"{median(one.private_mb for one in found):.0f}",
            f"{median(one.mapped_mb for one in found):.0f}",
        )
    Console(width=120).print(table)
    theirs = results[APACHE]
    for kind, found in results.items():
        if kind != APACHE:
            rate = median(one.rate for one in found) / median(one.rate for one in theirs)
            cpu = median(one.cpu for one in found) / median(one.cpu for one in theirs)
            user = median(one.user_cpu for one in found) / median(one.user_cpu for one in theirs)
            print(
                f"{kind}: {rate:.2f} times Apache's rate (goal: {SPEED_GOAL}), {cpu:.2f} times its "
                f"CPU (goal: {CPU_GOAL}), {user:.2f} times its user time"
            )


# --- sends that wait for a slave


@dataclass(frozen=True)
class Sends:
    """What a load of sends took."""

    result: Mapping[str, Any]
    master_cpu: float
    slave_cpu: float

    @property
    def rate(self) -> float:
        return float(self.result["sent"] / self.result["seconds"])

    @property
    def master_us(self) -> float:
        """CPU of the master per message."""
        return float(self.master_cpu * 1e6 / self.result["sent"])

    @property
    def slave_us(self) -> float:
        return float(self.slave_cpu * 1e6 / self.result["sent"])


def measure_sends(namesrv: str, master: AnyBroker, slaves: Sequence[AnyBroker]) -> Sends:
    """Run the load generator; its first seconds do not count."""
    logback = f"-Drmq.logback.configurationFile={maven.JAVA_DIR / 'logback.xml'}"
    command = maven.java_command(
        "penstock.Load", namesrv, TOPIC, str(THREADS), str(SECONDS), str(BODY_BYTES), str(WARM_S),
        jvm=("-Xmx1g", "-XX:+UseParallelGC", logback),
    )  # fmt: skip
    environment = maven.java_environment()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "warm\n"
        before = cpu_seconds(master.pid), sum(cpu_seconds(slave.pid) for slave in slaves)
        result: Mapping[str, Any] = json.loads(process.stdout.readline())
        after = cpu_seconds(master.pid), sum(cpu_seconds(slave.pid) for slave in slaves)
    assert result["failed"] == 0, result
    return Sends(result, after[0] - before[0], after[1] - before[1])


def sends(root: Path) -> None:
    """The part `sends`."""
    results: dict[tuple[str, bool], list[Sends]] = defaultdict(list)
    cases = [(kind, slave) for kind in KINDS for slave in (True, False)]
    for number in range(ROUNDS):
        for kind, with_slave in cases:
            if kind == replica_pairs.STATIC and not with_slave:
                continue  # without a slave, the protocol makes no difference
            with replica_pairs.pair(kind, root / "pair") as pair:
                master = pair.start(SYNC if with_slave else ALONE)
                slaves = [pair.start_slave()] if with_slave else []
                await_in_sync(master, len(slaves))
                results[kind, with_slave].append(measure_sends(pair.namesrv, master, slaves))
            print(
                f"round {number + 1}, {kind}, {'one slave' if with_slave else 'alone'}: "
                f"{results[kind, with_slave][-1]}, load {load_average()}"
            )
    show_sends(results)


def show_sends(results: Mapping[tuple[str, bool], Sequence[Sends]]) -> None:
    columns = ("messages/s", "p50 µs", "p99 µs", "master CPU µs/message", "slave", "sum")
    title = f"{THREADS} threads, {BODY_BYTES} B, sync sends, median of {ROUNDS}"
    table = new_table(title, columns)
    for (kind, with_slave), found in results.items():
        table.add_row(
            f"{kind}, {'one slave' if with_slave else 'alone'}",
            f"{median(one.rate for one in found):,.0f}",
            f"{median(one.result['p50_us'] for one in found):,.0f}",
            f"{median(one.result['p99_us'] for one in found):,.0f}",
            f"{median(one.master_us for one in found):.1f}",
            f"{median(one.slave_us for one in found):.1f}",
            f"{median(one.master_us + one.slave_us for one in found):.1f}",
        )
    Console(width=120).print(table)
    theirs = results[APACHE, True]
    for (kind, with_slave), found in results.items():
        if kind == APACHE or not with_slave:
            continue
        rate = median(one.rate for one in found) / median(one.rate for one in theirs)
        cpu = median(s.master_us + s.slave_us for s in found)
        cpu /= median(s.master_us + s.slave_us for s in theirs)
        print(
            f"{kind}: {rate:.2f} times Apache's throughput (goal: {SPEED_GOAL}), {cpu:.2f} times "
            f"its CPU per message (goal: {CPU_GOAL})"
        )


# --- slaves that are stopped


def stopped(root: Path) -> None:
    """The part `stopped`."""
    columns = ("messages/s", "p50 µs", "p99 µs", "CPU µs/message", "private MB", "before", "mapped")
    table = new_table(f"{EPOCHS}: slaves of the master", columns)
    for count in (0, STOPPED):
        with replica_pairs.pair(EPOCHS, root / "pair") as pair:
            master = pair.start(SYNC)
            slave, *others = [pair.start_slave(number + 1) for number in range(1 + count)]
            await_in_sync(master, 1 + count)
            before, _ = memory_mb(master.pid)
            for one in others:
                os.kill(one.pid, signal.SIGSTOP)
            try:
                result = measure_sends(pair.namesrv, master, [slave])
                private, mapped = memory_mb(master.pid)
            finally:
                for one in others:
                    os.kill(one.pid, signal.SIGCONT)
        table.add_row(
            f"one, and {count} stopped" if count else "one",
            f"{result.rate:,.0f}",
            f"{result.result['p50_us']:,}",
            f"{result.result['p99_us']:,}",
            f"{result.master_us:.1f}",
            f"{private:.0f}",
            f"{before:.0f}",
            f"{mapped:.0f}",
        )
    Console(width=120).print(table)


PARTS = {"catch_up": catch_up, "sends": sends, "stopped": stopped}


def new_table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def load_average() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def main(parts: Sequence[str] = ()) -> None:
    if maven.missing_tools():
        print(f"skipped: needs {' and '.join(maven.missing_tools())}")
        return
    for part in parts or PARTS:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
            PARTS[part](Path(scratch))


if __name__ == "__main__":
    main(sys.argv[1:])
