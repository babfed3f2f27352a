"""Broker CPU per message under RocketMQ's Java producer: Penstock and Apache in turns.

64 threads send 128-byte messages synchronously. Load generator and brokers share the cores of the
machine. CPU is the user and system time of the broker process only. Needs Java and Maven.
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
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.compat import apache, maven

ROUNDS = 3
SECONDS = 10
THREADS = 64
BODY_BYTES = 128
TARGET = 0.2


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def anonymous_mb(pid: int) -> float:
    """Private memory: resident pages that do not belong to mapped files."""
    status = Path(f"/proc/{pid}/status").read_text()
    kb = next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon"))
    return int(kb) / 1024


@contextmanager
def penstock_broker(folder: Path, namesrv: str) -> Iterator[int]:
    """Run a Penstock broker; yields its process id."""
    port = apache.free_port(above=3)
    command = [
        sys.executable, "-m", "penstock.cli.main", "broker", "-n", namesrv, "--port", str(port),
        "--name", "penstock", "--data", str(folder),
    ]  # fmt: skip
    with (folder.parent / "penstock.log").open("wb") as log:
        started = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError((folder.parent / "penstock.log").read_text()[-2000:])
        print(f"Penstock was ready after {time.monotonic() - started:.2f} s")
        try:
            yield process.pid
        finally:
            process.terminate()
            process.wait()


def load(namesrv: str, topic: str, seconds: int, serialize: str) -> dict[str, Any]:
    """One round of the load generator."""
    flags = ("-Xmx1g", f"-Drocketmq.serialize.type={serialize}", "-XX:+UseParallelGC")
    command = maven.java_command(
        "penstock.Load", namesrv, topic, str(THREADS), str(seconds), str(BODY_BYTES),
        jvm=(*flags, f"-Drmq.logback.configurationFile={maven.JAVA_DIR / 'logback.xml'}"),
    )  # fmt: skip
    printed = subprocess.run(
        command, env=maven.java_environment(), capture_output=True, text=True, check=True
    ).stdout
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return result


def main() -> None:
    if maven.missing_tools():
        print(f"skipped: needs {' and '.join(maven.missing_tools())}")
        return
    serialize = os.environ.get("SERIALIZE", "JSON")
    rows: dict[str, list[tuple[float, float, dict[str, Any]]]] = {"penstock": [], "apache": []}
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        root = Path(scratch)
        (root / "penstock").mkdir()
        sizes = {"mappedFileSizeCommitLog": 1 << 30, "mappedFileSizeConsumeQueue": 6_000_000,
                 "maxHashSlotNum": 5_000_000, "maxIndexNum": 20_000_000}  # fmt: skip
        with (
            apache.NameServer(root / "n1") as penstock_names,
            apache.NameServer(root / "n2") as apache_names,
            penstock_broker(root / "penstock" / "store", penstock_names.address) as penstock_pid,
            apache.Broker(root / "b", root / "apache", apache_names.address, **sizes) as broker,
        ):
            peers = {
                "penstock": (penstock_names.address, penstock_pid),
                "apache": (apache_names.address, broker.pid),
            }
            for name, (address, _) in peers.items():  # warm up both, especially the JVM
                print(f"warming {name} up: {load(address, 'Load', SECONDS, serialize)}")
            for number in range(ROUNDS):
                for name, (address, pid) in peers.items():
                    before = cpu_seconds(pid)
                    result = load(address, "Load", SECONDS, serialize)
                    cpu = cpu_seconds(pid) - before
                    rows[name].append((cpu * 1e6 / result["sent"], anonymous_mb(pid), result))
                    print(f"round {number + 1} {name}: {rows[name][-1]}")
    show(rows, serialize)


def show(rows: dict[str, list[tuple[float, float, dict[str, Any]]]], serialize: str) -> None:
    table = Table(title=f"Java producer, {THREADS} threads, {BODY_BYTES} B, sync, {serialize}")
    for column in ("broker", "CPU µs/message", "messages/s", "p50 µs", "p99 µs", "private MB"):
        table.add_column(column, justify="left" if column == "broker" else "right")
    for name, results in rows.items():
        table.add_row(
            name,
            " ".join(f"{r[0]:.1f}" for r in results),
            f"{median(r[2]['sent'] / r[2]['seconds'] for r in results):,.0f}",
            f"{median(r[2]['p50_us'] for r in results)}",
            f"{median(r[2]['p99_us'] for r in results)}",
            f"{results[-1][1]:.0f}",
        )
    Console().print(table)
    ratio = median(r[0] for r in rows["penstock"]) / median(r[0] for r in rows["apache"])
    print(f"ratio of CPU per message: {ratio:.3f} (target: at most {TARGET})")


if __name__ == "__main__":
    main()
