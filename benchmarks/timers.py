"""Timer messages: how late they are delivered, and the memory for a million of them.

The broker is a process of its own, over TCP. Messages are due evenly over a minute and are sent in
random order; the lateness is the store time of the delivered message minus its delivery time.
Memory is the private memory of the process and the resident pages of the timer's files.
"""

import random
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
from tests.compat import apache

from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import KVTable
from penstock.wire.codes import RequestCode
from penstock.wire.frame import Request
from penstock.wire.message import decode_messages, encode_properties
from penstock.wire.output import encode

SPREAD = 100_000
SPREAD_S = 60
LEAD_S = 60
PENDING = 1_000_000
DAYS = 40
QUEUES = 4
BURST = 200
BODY = b"x" * 128
MEMORY_MB_MAX = 150


class Client:
    """One connection that sends requests in bursts."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._data = bytearray()

    def ask(self, frames: list[bytes]) -> list[Request]:
        """Send requests in one write; returns the responses."""
        self._socket.sendall(b"".join(frames))
        return [self._read() for _ in frames]

    def _read(self) -> Request:
        while len(self._data) < 4 or len(self._data) < 4 + int.from_bytes(self._data[:4], "big"):
            self._data += self._socket.recv(1 << 20)
        length = 4 + int.from_bytes(self._data[:4], "big")
        frame, self._data = self._data[:length], self._data[length:]
        request = Request()
        request.bind(memoryview(frame))
        request.read(0, length)
        return request

    def send_all(self, due_ms: list[int]) -> float:
        """Send a message for each time; returns the duration in seconds."""
        started = time.monotonic()
        for at in range(0, len(due_ms), BURST):
            frames = [
                _send(number % QUEUES, due_ms[number])
                for number in range(at, min(at + BURST, len(due_ms)))
            ]
            for answer in self.ask(frames):
                if answer.code != 0:
                    raise RuntimeError(answer.remark())
        return time.monotonic() - started

    def info(self) -> dict[str, str]:
        (answer,) = self.ask([encode(RequestCode.GET_BROKER_RUNTIME_INFO, {}, opaque=1)])
        return fastjson.decode(answer.body(), KVTable).table

    def late_ms(self, queue_id: int) -> Iterator[int]:
        """The lateness of each message of a queue."""
        offset = 0
        while True:
            ext = {
                "consumerGroup": "G", "topic": "T", "queueId": str(queue_id),
                "queueOffset": str(offset), "maxMsgNums": "1000", "sysFlag": "4",
                "commitOffset": "0", "suspendTimeoutMillis": "0", "subscription": "*",
                "subVersion": "0",
            }  # fmt: skip
            (answer,) = self.ask([encode(RequestCode.PULL_MESSAGE, ext, opaque=1)])
            if answer.code != 0:
                return
            for message in decode_messages(answer.body()):
                yield message.store_ms - int(message.properties["TIMER_DELIVER_MS"])
            offset = int(answer.ext()["nextBeginOffset"])


def _send(queue_id: int, due_ms: int) -> bytes:
    ext = {
        "a": "g", "b": "T", "c": "TBW102", "d": str(QUEUES), "e": str(queue_id), "f": "0",
        "g": str(due_ms), "h": "0", "j": "0", "m": "false",
        "i": encode_properties({"TIMER_DELIVER_MS": str(due_ms)}).decode(),
    }  # fmt: skip
    return encode(RequestCode.SEND_MESSAGE_V2, ext, BODY, opaque=1)


@contextmanager
def _broker() -> Iterator[tuple[int, int]]:
    """Run a broker; yields its process id and its port."""
    port = apache.free_port(above=3)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        command = [
            sys.executable, "-m", "penstock.cli.main", "broker", "--port", str(port),
            "--data", str(Path(folder) / "store"),
        ]  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError("the broker does not start")
        try:
            yield process.pid, port
        finally:
            process.terminate()
            process.wait()


def _memory_mb(pid: int) -> tuple[float, float]:
    """Private memory, and resident pages of the timer's files."""
    anonymous = mapped = 0
    name = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        field, *values = line.split()
        if not field.endswith(":"):
            name = values[-1] if len(values) > 4 else ""
        elif field == "Anonymous:":
            anonymous += int(values[0])
        elif field == "Rss:" and "/timer" in name:
            mapped += int(values[0])
    return anonymous / 1024, mapped / 1024


def _lateness(table: Table) -> None:
    with _broker() as (_, port):
        client = Client(port)
        begin_ms = int(time.time() * 1000) + LEAD_S * 1000
        due_ms = [begin_ms + number * SPREAD_S * 1000 // SPREAD for number in range(SPREAD)]
        random.Random(1).shuffle(due_ms)
        took = client.send_all(due_ms)
        time.sleep(max(begin_ms / 1000 + SPREAD_S + 2 - time.time(), 0))
        late = sorted(ms for queue_id in range(QUEUES) for ms in client.late_ms(queue_id))
    if len(late) != SPREAD:
        raise RuntimeError(f"{len(late)} of {SPREAD} messages were delivered")
    table.add_row(
        f"{SPREAD:,} over {SPREAD_S} s", f"sent in {took:.1f} s",
        f"late p50 {late[SPREAD // 2]} ms, p99 {late[SPREAD * 99 // 100]} ms, "
        f"max {late[-1]} ms, early: {sum(ms < 0 for ms in late)}",
    )  # fmt: skip


def _memory(table: Table) -> None:
    with _broker() as (pid, port):
        client = Client(port)
        client.send_all([0] * BURST)
        before, _ = _memory_mb(pid)
        rng = random.Random(2)
        now_ms = int(time.time() * 1000)
        span_ms = DAYS * 86_400_000 - 3_600_000
        took = client.send_all(
            [now_ms + 1_800_000 + rng.randrange(span_ms) for _ in range(PENDING)]
        )
        while int(client.info()["timerOffsetBehind"]) > 0:
            time.sleep(0.1)
        time.sleep(3)
        anonymous, mapped = _memory_mb(pid)
        pending = client.info()["timerCongestNum"]
    table.add_row(
        f"{int(pending):,} over {DAYS} days", f"sent in {took:.1f} s",
        f"anonymous {anonymous:.1f} MB ({before:.1f} before) + timer pages {mapped:.1f} MB, "
        f"target < {MEMORY_MB_MAX}",
    )  # fmt: skip


def main() -> None:
    table = Table(title="timer messages")
    for column in ("timers", "sends", "result"):
        table.add_column(column)
    _lateness(table)
    _memory(table)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
