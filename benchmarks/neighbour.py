"""What one client makes its neighbours wait: sends of one connection beside clients that flood.

A healthy client sends one message after another and measures each send. Beside it, in a process of
their own, connections keep thousands of sends in flight. All processes share the machine's cores,
so the figures of the runs are to be compared with each other.
"""

import json
import selectors
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
from tests.faults.healthy_client import send_frame

SECONDS = 5.0
WINDOW = 5_000
"""Sends in flight per connection of the flood."""
BLOCK = 250
"""Sends that a connection of the flood writes at once."""
FLOODS = (0, 1, 10)


class FloodConnection:
    """Keeps WINDOW sends in flight on one connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setblocking(False)
        self.answered = 0
        self._sent = 0
        self._block = memoryview(b"".join(send_frame(n) for n in range(BLOCK)))
        self._unsent = self._block[:0]
        self._received = bytearray()

    def write(self) -> None:
        """Write as much as the window and the socket's buffer take."""
        try:
            while self._unsent or self._sent - self.answered <= WINDOW - BLOCK:
                if not self._unsent:
                    self._unsent = self._block
                    self._sent += BLOCK
                self._unsent = self._unsent[self.socket.send(self._unsent) :]
        except BlockingIOError:
            return

    def read(self) -> None:
        """Count the responses that have arrived."""
        try:
            data = self.socket.recv(1 << 18)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionError("the broker closed the connection")
        received, at = self._received, 0
        received += data
        while at + 4 <= len(received):
            end = at + 4 + int.from_bytes(received[at : at + 4], "big")
            if end > len(received):
                break
            at = end
            self.answered += 1
        del received[:at]


def flood(port: int, count: int, seconds: float) -> None:
    """Run `count` flooding connections; prints "begun", then the sends per second."""
    connections = [FloodConnection(port) for _ in range(count)]
    selector = selectors.DefaultSelector()
    for connection in connections:
        selector.register(
            connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, connection
        )
    began = time.monotonic()
    print("begun", flush=True)
    while time.monotonic() < began + seconds:
        for key, events in selector.select(0.1):
            if events & selectors.EVENT_READ:
                key.data.read()
            key.data.write()
    answered = sum(connection.answered for connection in connections)
    print(json.dumps(answered / (time.monotonic() - began)), flush=True)


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
    taken += json.loads(output)


def measure(port: int, floods: int) -> tuple[list[float], float]:
    """The durations of the neighbour's sends in ms, and the flood's sends per second."""
    command = [sys.executable, "-m", "benchmarks.neighbour", str(port), str(floods), str(SECONDS)]
    rate = 0.0
    with healthy_client(port) as taken:
        if floods:
            rate = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
        else:
            time.sleep(SECONDS)
    return sorted(taken), rate


def main() -> None:
    table = Table(title=f"a neighbour's sends, ms ({SECONDS:.0f} s each)")
    for column in ("beside it", "sends", "p50", "p99", "max", "flood, sends/s"):
        table.add_column(column, justify="left" if column == "beside it" else "right")
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        penstock.Up(Path(folder)) as up,
    ):
        for floods in FLOODS:
            taken, rate = measure(int(up.broker_address.rpartition(":")[2]), floods)
            at = [taken[int(len(taken) * share)] for share in (0.5, 0.99)]
            beside = f"{floods} producers with {WINDOW:,} sends in flight" if floods else "none"
            table.add_row(
                beside,
                f"{len(taken):,}",
                *(f"{value:.1f}" for value in at),
                f"{taken[-1]:.1f}",
                f"{rate:,.0f}",
            )
    Console().print(table)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        flood(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
    else:
        main()
