"""What one client makes its neighbours wait: sends of one connection beside clients that attack.

A healthy client sends one message after another and measures each send. Beside it, in a process of
their own, connections keep expensive requests in flight (`benchmarks.attacks`). All processes share
the machine's cores, so a second healthy client measures an idle server in the same way: what it
waits is the machine's share, not the broker's.
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.compat import penstock
from tests.faults.healthy_client import read_frame

from benchmarks.attacks import ATTACKS
from penstock.wire.output import response

SECONDS = 5.0


def serve_idle() -> None:
    """A server that only answers: prints its port, serves one connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
        with connection:
            while True:
                try:
                    request = read_frame(connection)
                except ConnectionError:
                    return
                connection.sendall(response(0, request.opaque, request.encoding))


@contextmanager
def healthy_client(port: int) -> Iterator[list[float]]:
    """Sends until the block ends; the durations are in the list afterwards."""
    command = [sys.executable, "-m", "tests.faults.healthy_client", str(port)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    taken: list[float] = []
    yield taken
    output, _ = process.communicate()
    taken += sorted(json.loads(output))


@contextmanager
def idle_server() -> Iterator[int]:
    """The port of a server that does nothing but answer."""
    command = [sys.executable, "-m", "benchmarks.neighbour", "idle"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline())
        process.wait()


def measure(port: int, attack: str) -> tuple[list[float], list[float], float]:
    """The durations of sends to the broker and to the idle server, and the attack's rate."""
    command = [sys.executable, "-m", "benchmarks.attacks", str(port), attack, str(SECONDS)]
    rate = 0.0
    with idle_server() as idle_port:
        if not attack:
            with healthy_client(port) as taken, healthy_client(idle_port) as idle:
                time.sleep(SECONDS)
            return taken, idle, rate
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            with healthy_client(port) as taken, healthy_client(idle_port) as idle:
                rate = json.loads(process.stdout.readline())
    return taken, idle, rate


def at(taken: list[float], share: float) -> str:
    return f"{taken[min(int(len(taken) * share), len(taken) - 1)]:.1f}"


def main(names: list[str] | None = None) -> None:
    table = Table(title=f"a neighbour's sends, ms ({SECONDS:.0f} s each)")
    columns = ("beside it", "sends", "p50", "p99", "max", "idle server p99", "max", "requests/s")
    for column in columns:
        table.add_column(column, justify="left" if column == "beside it" else "right")
    for name in names or ["", *ATTACKS]:
        with (
            tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
            penstock.Up(Path(folder)) as up,
        ):
            taken, idle, rate = measure(int(up.broker_address.rpartition(":")[2]), name)
            table.add_row(
                ATTACKS[name].what if name else "none",
                f"{len(taken):,}",
                *(at(taken, share) for share in (0.5, 0.99, 1)),
                *(at(idle, share) for share in (0.99, 1)),
                f"{rate:,.0f}",
            )
    Console(width=150).print(table)


if __name__ == "__main__":
    if sys.argv[1:] == ["idle"]:
        serve_idle()
    else:
        main(sys.argv[1:])
