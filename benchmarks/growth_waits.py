"""For `benchmarks.growth`: how long a start takes, and what makes a producer wait.

The producer is a process that sends one message after another. A second one does the same with a
server that only answers: what it waits is the machine's part.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.growth_load import (
    Connections,
    MeasuredBroker,
    check_responses,
    parsed,
    pull_request,
    send_blocks,
)
from benchmarks.neighbour import healthy_client, idle_server
from penstock.wire.codes import RequestCode
from penstock.wire.output import encode

START_TOPICS = (1, 1_000, 10_000)
STARTS = 3
SECONDS = 6.0
ROUNDS = 2
GIB = 1 << 30
COLD_BODY = b"x" * 1024
COLD_MESSAGES = 900_000
"""A little more than a GiB of records."""
LARGE_BODY = b"x" * (1 << 20)


# --- start


def start() -> None:
    table = Table(title="start after a clean stop (one queue with messages per topic)")
    for column in ("topics", "s", "CPU s until ready", "CPU s afterwards"):
        table.add_column(column, justify="right")
    for topics in START_TOPICS:
        settings = {"BROKER_TOPICS_MAX": 20_000, "BROKER_AUTO_CREATIONS_MAX": 20_000}
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            broker = MeasuredBroker(Path(folder), settings)
            with broker, Connections(broker.port) as connections:
                names = [(f"topic-{number:05d}", 0) for number in range(topics)]
                connections.run(send_blocks(names))
            rows = []
            for _ in range(STARTS):
                began = time.monotonic()
                with broker:
                    took, cpu_s = time.monotonic() - began, broker.cpu_s()
                    time.sleep(1)
                    rows.append((took, cpu_s, broker.cpu_s() - cpu_s))
        table.add_row(f"{topics:,}", *(f"{min(column):.2f}" for column in zip(*rows, strict=True)))
    Console().print(table)


# --- producers that wait


@contextmanager
def producer(port: int) -> Iterator[dict[str, list[float]]]:
    """The durations of a producer's sends, and of those to a server that only answers, in ms."""
    with (
        idle_server() as idle_port,
        healthy_client(port) as taken,
        healthy_client(idle_port) as idle,
    ):
        found = {"broker": taken, "idle server": idle}
        yield found


def compared(title: str, rounds: list[tuple[str, Callable[[int], str]]], port: int) -> None:
    """Measure the producer beside each of these in turn."""
    table = Table(title=title)
    for column in ("beside it", "p50 ms", "p99", "longest", "idle server p99", "longest", ""):
        table.add_column(column, justify="right" if column != "beside it" else "left")
    found: dict[str, tuple[list[float], list[float], str]] = {}
    for _ in range(ROUNDS):
        for name, beside in rounds:
            with producer(port) as times:
                said = beside(port)
            broker, idle, _ = found.setdefault(name, ([], [], ""))
            found[name] = (broker + times["broker"], idle + times["idle server"], said)
    for name, (broker, idle, said) in found.items():
        broker.sort()
        idle.sort()
        figures = [
            broker[len(broker) // 2], broker[len(broker) * 99 // 100], broker[-1],
            idle[len(idle) * 99 // 100], idle[-1],
        ]  # fmt: skip
        table.add_row(name, *(f"{value:.2f}" for value in figures), said)
    Console(width=120).print(table)


def nothing(port: int) -> str:
    time.sleep(SECONDS)
    return ""


def retention() -> None:
    """Deletion of a segment of 1 GiB."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        broker = MeasuredBroker(Path(folder))
        with broker, Connections(broker.port) as connections:
            blocks = send_blocks([("Old", 0)], per_block=8, body=LARGE_BODY, distinct=8)
            count = (ROUNDS * GIB + GIB // 16) // len(LARGE_BODY) // 8
            connections.run(islice(cycle(blocks), count))
            log = broker.store_dir / "commitlog"
            _write_back(log)

            def delete(port: int) -> str:
                first = min(log.iterdir())
                os.utime(first, (1, 1))
                time.sleep(SECONDS / 2)
                connections.sockets[0].sendall(encode(RequestCode.DELETE_EXPIRED_COMMITLOG, {}))
                check_responses(connections.read(0, 1))
                time.sleep(SECONDS / 2)
                return "deleted" if not first.exists() else "NOT deleted"

            rounds = [("nothing", nothing), ("deletion of a GiB", delete)]
            compared("a producer's sends while a segment is deleted", rounds, broker.port)


def cold_consumer() -> None:
    """A consumer that reads a GiB which is not in memory."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        broker = MeasuredBroker(Path(folder))
        with broker, Connections(broker.port) as connections:
            blocks = send_blocks([("T", 0)], body=COLD_BODY)
            connections.run(islice(cycle(blocks), COLD_MESSAGES // blocks[0].requests))
        log = broker.store_dir / "commitlog"
        with broker:

            def read_cold(port: int) -> str:
                _write_back(log)
                command = [sys.executable, "-m", "benchmarks.growth_waits", str(port), str(SECONDS)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                return f"{float(done.stdout):.0f} MB/s"

            rounds = [("nothing", nothing), ("cold consumer", read_cold)]
            compared("a producer's sends beside a cold consumer", rounds, broker.port)


def _write_back(log: Path) -> None:
    """Write files to the disk and drop them from the page cache, as far as they are not mapped."""
    for path in log.iterdir():
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def consume(port: int, seconds: float) -> float:
    """Pull a queue from its beginning, again and again; returns MB/s."""
    ends, offset, done = time.monotonic() + seconds, 0, 0
    with Connections(port) as connections:
        while time.monotonic() < ends:
            request = pull_request("cold", offset)
            connections.sockets[0].sendall(request)
            response = connections.read(0, 1)
            answer = parsed(response)
            offset = int(answer.ext()["nextBeginOffset"]) if answer.code == 0 else 0
            done += len(response)
    return done / seconds / 1e6


DIMENSIONS = {"start": start, "retention": retention, "cold": cold_consumer}


if __name__ == "__main__":
    print(consume(int(sys.argv[1]), float(sys.argv[2])))
