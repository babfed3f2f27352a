"""A broker with many topics: memory, disk, stop and start.

    python -m benchmarks.many_topics [TOPICS [QUEUES]]

Sends create the topics, with a few messages in each queue. Then the broker is stopped and started,
and killed and started: after a clean stop, after kill -9 while it was idle, and after kill -9 right
after a message to each topic. The times include the start of Python; CPU seconds are of all threads
of the process.
"""

import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.table import Table
from tests.compat import penstock

from penstock.wire.frame import Request
from penstock.wire.output import encode

TOPICS, QUEUES = 20_000, 1
MESSAGES = 3
"""Messages of each queue."""
WINDOW = 200
"""Sends in flight."""
BODY = b"x" * 100


def frames(topics: int, queues: int, messages: int) -> Iterator[bytes]:
    """Sends to all topics, one message after another."""
    for number in range(messages):
        for topic in range(topics):
            for queue_id in range(queues):
                opaque = (topic * queues + queue_id) * messages + number
                ext = {
                    "a": "g", "b": f"topic-{topic:06d}", "c": "TBW102", "d": str(queues),
                    "e": str(queue_id), "f": "0", "g": "1", "h": "0",
                    "i": f"UNIQ_KEY\x01{opaque:032X}\x02", "j": "0", "m": "false",
                }  # fmt: skip
                yield encode(310, ext, BODY, opaque=opaque)


def read_response(stream: BinaryIO) -> None:
    """Read one response; raises if it is not a success."""
    size = stream.read(4)
    if len(size) < 4:
        raise ConnectionError("the broker closed the connection")
    data = bytearray(size + stream.read(int.from_bytes(size, "big")))
    answer = Request()
    answer.bind(memoryview(data))
    assert answer.read(0, len(data)) == len(data)
    assert answer.code == 0, answer.remark()


def send_all(port: int, requests: Iterator[bytes]) -> None:
    """Send with a window of requests in flight."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=120) as connection,
        connection.makefile("rb") as stream,
    ):
        in_flight = 0
        for frame in requests:
            connection.sendall(frame)
            in_flight += 1
            if in_flight == WINDOW:
                read_response(stream)
                in_flight -= 1
        for _ in range(in_flight):
            read_response(stream)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> tuple[int, int]:
    """Resident bytes: all, and those of no file."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    return int(status["VmRSS"].split()[0]) * 1024, int(status["RssAnon"].split()[0]) * 1024


def disk_bytes(folder: Path) -> int:
    return sum(
        os.lstat(os.path.join(path, name)).st_blocks * 512
        for path, folders, files in os.walk(folder)
        for name in (*folders, *files)
    )


class Steps:
    """The rows of the table."""

    def __init__(self, broker: penstock.Broker, topics: int) -> None:
        self.broker = broker
        self.topics = topics
        self.table = Table()
        for column in ("", "s", "CPU s", "resident MB", "anonymous MB", "KB per topic", "disk MB"):
            self.table.add_column(column, justify="left" if not column else "right")

    def run(self, title: str, work: Callable[[], object], *, running: bool = True) -> None:
        """Measure a step, and the broker if it is running afterwards."""
        began = time.monotonic()
        work()
        taken = time.monotonic() - began
        row = [f"{taken:.1f}"]
        if running:
            pid = self.broker.pid
            rss, anonymous = resident(pid)
            row += [
                f"{cpu_seconds(pid):.1f}",
                f"{rss / 1e6:,.0f}",
                f"{anonymous / 1e6:,.0f}",
                f"{anonymous / 1e3 / self.topics:.1f}",
            ]
        else:
            row += ["", "", "", ""]
        print(f"{title}: {taken:.1f} s", file=sys.stderr, flush=True)
        self.table.add_row(title, *row, f"{disk_bytes(self.broker.store_dir) / 1e6:,.0f}")


def measure(folder: Path, topics: int, queues: int) -> Steps:
    names = ("TOPICS_MAX", "AUTO_CREATIONS_MAX")
    settings = {f"PENSTOCK_BROKER_{name}": str(topics + 1000) for name in names}
    broker = penstock.Broker(folder, folder / "store", "", timeout=900, settings=settings)
    steps = Steps(broker, topics)

    def send(messages: int) -> None:
        send_all(broker.port, frames(topics, queues, messages))

    try:
        steps.run("start, empty", broker.start)
        steps.run("create by sends", lambda: send(1))
        steps.run("more messages", lambda: send(MESSAGES - 1))
        steps.run("stop", broker.stop, running=False)
        steps.run("start after a clean stop", broker.start)
        broker.kill()
        steps.run("start after kill -9, idle", broker.start)
        send(1)
        broker.kill()
        steps.run("start after kill -9, written", broker.start)
        steps.run("stop again", broker.stop, running=False)
    finally:
        broker.kill()
    return steps


def main(topics: int = TOPICS, queues: int = QUEUES) -> None:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        steps = measure(Path(folder), topics, queues)
    steps.table.title = f"{topics:,} topics, queues each: {queues}, messages each: {MESSAGES}"
    Console().print(steps.table)


if __name__ == "__main__":
    main(*(int(value) for value in sys.argv[1:]))
