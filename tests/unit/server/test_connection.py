"""A connection without a socket: which reads are followed by a pause, and when it is stuck."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from penstock.config import ServerConfig
from penstock.rpc.answers import Answer, Reply
from penstock.rpc.command import Command
from penstock.server.connection import FRAME_MS_MAX, PROGRESS_BYTES, ClientConnection
from penstock.server.full_reads import FullReads
from penstock.server.memory_limit import REPORT_MS, MemoryLimit
from penstock.server.request_loop import RequestLoop
from penstock.wire.output import encode

BUFFER_BYTES = 1024
NOW_MS = 1_700_000_000_000


class OkService:
    def handle(self, command: Command) -> Answer:
        return Reply(0)

    def connected(self, client: int, peer: str, now_ms: int) -> None: ...

    def disconnected(self, client: int, now_ms: int) -> None: ...

    def due(self) -> int:
        return 0

    def tick(self, now_ms: int) -> None: ...

    def clock_stepped(self, step_ms: int) -> None: ...


class FakeServer:
    """Serves reads; calls for the next loop iteration wait in `next_iteration`."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(BUFFER_BYTES))
        self.full_reads = FullReads(self.buffer, self.soon)
        self.request_loop = RequestLoop(OkService(), time_ns=lambda: 0)
        self.request_loop.bind(self.buffer, bytes(8))
        self.memory = MemoryLimit(lambda: 1 << 30, {})
        self.bad_frames = 0
        self.steady_ms = 5_000
        self.next_iteration: list[tuple[Callable[..., None], Any]] = []

    def config(self) -> ServerConfig:
        return ServerConfig()

    def now_ms(self) -> int:
        return NOW_MS

    def monotonic_ms(self) -> int:
        return self.steady_ms

    def soon(self, call: Callable[..., None], *arguments: Any) -> None:
        self.next_iteration.append((call, arguments))

    def connected(self, connection: ClientConnection) -> None:
        connection.client = 1

    def disconnected(self, connection: ClientConnection) -> None: ...

    def after_read(self, connection: ClientConnection) -> None:
        connection.write(self.request_loop.output.take())

    def report_time(self, ns: int, code: int) -> None: ...

    def wake(self, suspended: object, last: bool) -> None: ...

    def run_iteration(self) -> None:
        calls, self.next_iteration = self.next_iteration, []
        for call, arguments in calls:
            call(*arguments)


class FakeTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 5)})
        self.reading = True
        self.written = 0

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def write(self, data: object) -> None:
        self.written += 1

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


class Connection:
    """A connection that is read from as libuv does: as long as it does not pause."""

    def __init__(self) -> None:
        self.server = FakeServer()
        self.transport = FakeTransport()
        self.protocol = ClientConnection(self.server)
        self.protocol.connection_made(self.transport)

    def receive(self, data: bytes) -> bytes:
        """Read until the connection pauses; returns what was not read."""
        while data and self.transport.reading:
            buffer = self.protocol.get_buffer(-1)
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            data = data[count:]
            self.protocol.buffer_updated(count)
        return data

    def receive_all(self, data: bytes) -> None:
        """Read to the end, in as many loop iterations as it takes."""
        while data := self.receive(data):
            self.server.run_iteration()

    @property
    def requests(self) -> int:
        return self.server.request_loop.requests


def frames(total_bytes: int) -> bytes:
    """Requests with this total length."""
    one = encode(1, {}, b"x" * 50, opaque=1)
    count, rest = divmod(total_bytes, len(one))
    last = encode(1, {}, b"x" * (50 + rest), opaque=1)
    assert count > 0
    return one * (count - 1) + last


def test_a_read_that_fills_the_buffer_is_the_last_of_its_loop_iteration() -> None:
    connection = Connection()
    flood = frames(5 * BUFFER_BYTES)
    left = connection.receive(flood)
    assert len(left) == len(flood) - BUFFER_BYTES
    iterations = 1
    while left:
        connection.server.run_iteration()
        left = connection.receive(left)
        iterations += 1
    assert iterations >= 5
    assert connection.requests == len(flood) // len(frames(len(encode(1, {}, b"x" * 50))))


@pytest.mark.parametrize("size", [200, BUFFER_BYTES - 1])
def test_a_read_that_leaves_space_pauses_nothing(size: int) -> None:
    connection = Connection()
    assert connection.receive(frames(size)) == b""
    assert connection.transport.reading
    assert connection.server.next_iteration == []


def test_a_frame_that_is_longer_than_the_buffer_arrives_in_several_iterations() -> None:
    connection = Connection()
    left = encode(1, {}, bytes(20 * BUFFER_BYTES), opaque=1)
    while left := connection.receive(left):
        connection.server.run_iteration()
    assert connection.requests == 1
    connection.server.run_iteration()
    assert connection.transport.reading


def test_a_connection_that_can_not_write_stays_paused() -> None:
    connection = Connection()
    connection.receive(frames(BUFFER_BYTES))
    connection.protocol.pause_writing()
    connection.server.run_iteration()
    assert not connection.transport.reading
    connection.protocol.resume_writing()
    assert connection.transport.reading


@pytest.mark.parametrize(
    ("step", "stuck_at"),
    [(1, 1_000), (PROGRESS_BYTES // 2, FRAME_MS_MAX)],
    ids=["drips", "makes progress"],
)
def test_a_connection_whose_frame_makes_little_progress_is_stuck(step: int, stuck_at: int) -> None:
    connection = Connection()
    server = connection.server
    frame = encode(1, {}, bytes(4_000_000), opaque=1)
    connection.receive_all(frame[:100_000])
    began, at = server.steady_ms, 100_000
    while not connection.protocol.slowness(server.steady_ms)[0]:
        server.steady_ms += 500
        connection.receive_all(frame[at : at + step])
        at += step
    assert server.steady_ms - began == stuck_at


def test_refusals_for_lack_of_memory_are_logged_from_time_to_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = MemoryLimit(lambda: 1000, {})
    for now_ms in range(0, REPORT_MS + 1, REPORT_MS // 10):
        memory.report_refusal(now_ms)
    assert [line.split()[0] for line in caplog.messages] == ["1", "10"]
