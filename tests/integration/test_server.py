"""The server over real sockets: frames in any shape, limits, and clients that misbehave."""

import asyncio
import contextlib
import struct
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.config import LiveSettings, ServerConfig, Settings
from penstock.errors import InvalidParameter
from penstock.rpc.answers import (
    Answer,
    CallClient,
    CloseConnection,
    EffectQueue,
    InThread,
    NotifyClient,
    RegisterTopics,
    Reply,
)
from penstock.rpc.command import Command
from penstock.rpc.persistence import Persistence
from penstock.server.answer_executor import NameServerCalls
from penstock.server.request_loop import RequestLoop
from penstock.server.server import Server
from penstock.wire.bodies.client_bodies import TopicRouteData
from penstock.wire.frame import BINARY, JSON
from penstock.wire.output import encode, response
from tests.integration.loops import Frame, Run, Wire, run  # noqa: F401

ECHO, SLOWLY, BIG, CALL, NOTIFY, BUG, REFUSE, CLOSE, REGISTER, ORDERED = range(1000, 1010)


class Echo:
    """A service that answers by the request code: see the codes above."""

    def __init__(self) -> None:
        self.effects = EffectQueue()
        self.clients: list[int] = []
        self.gone: list[int] = []
        self.release = threading.Event()
        self.turns = 0

    def handle(self, command: Command) -> Answer:
        code = command.code
        if code == SLOWLY:
            return InThread(self._wait, lambda done: Reply(0, {"done": str(done)}))
        if code == ORDERED:
            work = {"1": self._wait, "0": lambda: None}.get(command.ext["slow"])
            return InThread(work, self._count_turn, ordered_by=command.client)
        if code == BIG:
            return Reply(body=bytes(command.i64("size")))
        if code == CALL:
            return CallClient(
                command.i64("client"), 77, {"q": "?"}, b"", lambda reply: Reply(0, reply.ext),
                command.now_ms + command.i64("ms"), Reply(207, remark="no answer"),
            )  # fmt: skip
        if code == REGISTER:
            return RegisterTopics(Reply, 77, ("T",))
        if code == NOTIFY:
            self.effects.put(NotifyClient(command.client, 40, {"consumerGroup": "g"}))
        elif code == BUG:
            raise ZeroDivisionError("oops")
        elif code == REFUSE:
            raise InvalidParameter("never")
        elif code == CLOSE:
            self.effects.put(CloseConnection(command.client, "asked to"))
        return Reply(0, command.ext, command.body, "heard")

    def _count_turn(self, _: object) -> Reply:
        self.turns += 1
        return Reply(0, {"turn": str(self.turns)})

    def _wait(self) -> bool:
        return self.release.wait(20)

    def connected(self, client: int, peer: str, now_ms: int) -> None:
        self.clients.append(client)

    def disconnected(self, client: int, now_ms: int) -> None:
        self.gone.append(client)

    def due(self) -> int:
        return 1 << 62

    def tick(self, now_ms: int) -> None: ...

    def clock_stepped(self, step_ms: int) -> None: ...


class ServerFixture:
    """A server of an Echo service."""

    def __init__(self, server: Server, echo: Echo) -> None:
        self.server = server
        self.echo = echo
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> Wire:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        self._writers.append(writer)
        return Wire(reader, writer)

    def memory_is_released(self) -> bool:
        """Whether all counted memory is released, after a recount."""
        self.server.memory.recount()
        return self.server.memory.used == 0

    async def leave(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@asynccontextmanager
async def serving_echo(
    nameservers: NameServerCalls | None = None,
    persistence: Persistence | None = None,
    **limits: int,
) -> AsyncIterator[ServerFixture]:
    config = ServerConfig(**{"stop_ms": 500, **limits})
    pool = ThreadPoolExecutor(4)

    def submit(work: Callable[[], Any]) -> Future[Any]:
        return pool.submit(work)

    echo = Echo()
    request_loop = RequestLoop(
        echo, frame_bytes_max=config.frame_bytes_max, header_bytes_max=config.header_bytes_max,
        output_bytes_max=config.output_bytes_max,
    )  # fmt: skip
    server = Server(
        LiveSettings(Settings(server=config)),
        echo,
        request_loop,
        echo.effects,
        submit=submit,
        persistence=persistence,
        nameservers=nameservers,
    )
    await server.start("127.0.0.1", 0)
    fixture = ServerFixture(server, echo)
    try:
        yield fixture
    finally:
        echo.release.set()
        await server.stop()
        await fixture.leave()
        pool.shutdown()


def no_future(*_: object) -> Any:
    raise AssertionError("not expected")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def ask(wire: Wire, code: int, **ext: str) -> Frame:
    wire.writer.write(encode(code, ext, opaque=5))
    return await wire.read()


@pytest.mark.parametrize("encoding", [JSON, BINARY])
def test_requests_are_answered_in_their_encoding(run: Run, encoding: int) -> None:  # noqa: F811
    async def body() -> None:
        async with serving_echo() as fixture:
            wire = await fixture.connect()
            frames = [encode(ECHO, {"n": str(n)}, b"x" * n, opaque=n, encoding=encoding)
                      for n in range(50)]  # fmt: skip
            wire.writer.write(b"".join(frames))
            for n in range(50):
                answer = await wire.read()
                assert (answer.opaque, answer.encoding, answer.flag) == (n, encoding, 1)
                assert (answer.ext, answer.body) == ({"n": str(n)}, b"x" * n)

    run(body())


@pytest.mark.parametrize("piece", [1, 3, 7, 4096])
def test_frames_may_arrive_in_pieces(run: Run, piece: int) -> None:  # noqa: F811
    async def body() -> None:
        async with serving_echo() as fixture:
            wire = await fixture.connect()
            size = 40 if piece < 4096 else 3_000_000
            data = b"".join(encode(ECHO, {}, bytes([n]) * size, opaque=n) for n in range(3))
            for at in range(0, len(data), piece):
                wire.writer.write(data[at : at + piece])
                if piece < 10:
                    await asyncio.sleep(0)
            for n in range(3):
                assert (await wire.read()).body == bytes([n]) * size
            await until(fixture.memory_is_released)

    run(body())


def test_one_way_and_unknown_and_failing_requests(run: Run) -> None:  # noqa: F811
    async def body() -> None:
        async with serving_echo() as fixture:
            wire = await fixture.connect()
            wire.writer.write(encode(ECHO, opaque=1, flag=2) + encode(BUG, opaque=2, flag=2))
            assert (await ask(wire, BUG)).code == 1
            assert (await ask(wire, REFUSE)).code == 29
            assert (await ask(wire, ECHO)).code == 0

    run(body())


BAD = [
    b"\xff\xff\xff\xff" + bytes(20),
    b"\x7f\xff\xff\xff" + bytes(20),
    struct.pack(">ii", 100, 5 << 24) + bytes(100),
    struct.pack(">ii", 10, 0xFFFF) + bytes(100),
    struct.pack(">ii", 4 + 21, 1 << 24 | 21) + b"\xff" * 21,
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
]


@pytest.mark.parametrize("bad", BAD)
def test_an_invalid_frame_closes_only_its_connection(run: Run, bad: bytes) -> None:  # noqa: F811
    async def body() -> None:
        async with serving_echo() as fixture:
            good, wire = await fixture.connect(), await fixture.connect()
            wire.writer.write(encode(ECHO, opaque=9) + bad)
            assert (await wire.read()).opaque == 9
            assert await wire.reader.read() == b""
            assert (await ask(good, ECHO)).code == 0
            await until(lambda: len(fixture.server.connections) == 1)
            assert fixture.server.memory.used == 0

    run(body())


def nameserver_calls(
    register_topics: Callable[[tuple[str, ...], int], asyncio.Future[None]] = no_future,
    find_route: Callable[[str], asyncio.Future[TopicRouteData | None]] = no_future,
) -> NameServerCalls:
    return NameServerCalls(lambda: None, register_topics, find_route)


def test_answers_do_not_wait_for_a_registration_without_nameservers(run: Run) -> None:  # noqa: F811
    async def body() -> None:
        async with serving_echo() as fixture:
            wire = await fixture.connect()
            assert (await ask(wire, REGISTER)).code == 0

    run(body())


def test_an_answer_waits_for_the_registration_of_its_topics(run: Run) -> None:  # noqa: F811
    async def body() -> None:
        calls: list[tuple[tuple[str, ...], int, asyncio.Future[None]]] = []

        def register(topics: tuple[str, ...], deadline_ms: int) -> asyncio.Future[None]:
            calls.append((topics, deadline_ms, asyncio.get_running_loop().create_future()))
            return calls[-1][2]

        async with serving_echo(nameserver_calls(register)) as fixture:
            wire = await fixture.connect()
            wire.writer.write(encode(REGISTER, opaque=1) + encode(ECHO, opaque=2))
            assert (await wire.read()).opaque == 2
            topics, deadline_ms, future = calls[0]
            assert (topics, deadline_ms) == (("T",), 77)
            future.set_result(None)
            assert (await wire.read()).opaque == 1
            (connection,) = fixture.server.connections.values()
            assert connection.in_flight == 0

            wire.writer.write(encode(REGISTER, opaque=3) + encode(REGISTER, opaque=4))
            await until(lambda: len(calls) == 3)
            wire.writer.transport.abort()
            await until(lambda: not fixture.server.connections)
            calls[1][2].set_result(None)
            calls[2][2].cancel()
            await until(lambda: connection.in_flight == 0)
            assert fixture.server.memory.used == 0

    run(body())


def test_thread_work_does_not_block_other_requests(run: Run) -> None:  # noqa: F811
    async def body() -> None:
        async with serving_echo() as fixture:
            wire = await fixture.connect()
            wire.writer.write(encode(SLOWLY, opaque=1) + encode(ECHO, opaque=2))
            assert (await wire.read()).opaque == 2
            fixture.echo.release.set()
            answer = await wire.read()
            assert (answer.opaque, answer.ext) == (1, {"done": "True"})

    run(body())


def test_a_connection_with_many_requests_in_flight_is_not_read_from(run: Run) -> None:  # noqa: F811
    async def body() -> None:
        async with serving_echo() as fixture:
            wire, other = await fixture.connect(), await fixture.connect()
            wire.writer.write(b"".join(encode(SLOWLY, opaque=n) for n in range(300)))
            await until(lambda: fixture.server.answer_executor.thread_jobs >= 256)
            assert (await ask(other, ECHO)).code == 0
            fixture.echo.release.set()
            got = {(await wire.read()).opaque for _ in range(300)}
            assert got == set(range(300))

    run(body())


def test_ordered_thread_work_is_answered_in_order(run: Run) -> None:  # noqa: F811
    async def body() -> None:
        async with serving_echo() as fixture:
            wire, other = await fixture.connect(), await fixture.connect()
            for number, slow in enumerate(("1", "0", "never", "1", "never", "0")):
                wire.writer.write(encode(ORDERED, {"slow": slow}, opaque=number))
            await until(lambda: fixture.server.answer_executor.thread_jobs == 6)
            assert (await ask(other, ORDERED, slow="0")).ext == {"turn": "1"}
            fixture.echo.release.set()
            turns = {}
            for _ in range(6):
                answer = await wire.read()
                turns[answer.opaque] = answer.ext
            assert turns == {number: {"turn": str(number + 2)} for number in range(6)}
            assert (await ask(wire, ORDERED, slow="never")).ext == {"turn": "8"}

    run(body())


def test_a_client_is_called_and_its_response_is_returned(run: Run) -> None:  # noqa: F811
    async def body() -> None:
        async with serving_echo() as fixture:
            asker, other = await fixture.connect(), await fixture.connect()
            await ask(other, ECHO)
            target = fixture.echo.clients[1]
            asker.writer.write(encode(CALL, {"client": str(target), "ms": "20000"}, opaque=3))
            question = await other.read()
            assert (question.code, question.ext, question.flag) == (77, {"q": "?"}, 0)
            other.writer.write(response(0, question.opaque, JSON, ext={"a": "!"}))
            assert (await asker.read()).ext == {"a": "!"}
            answer = await ask(asker, CALL, client=str(target), ms="20")
            assert answer.code == 207
            assert (await ask(asker, CALL, client="999", ms="20000")).code == 207

    run(body())


def test_notifications_and_closes_reach_the_client(run: Run) -> None:  # noqa: F811
    async def body() -> None:
        async with serving_echo() as fixture:
            wire = await fixture.connect()
            wire.writer.write(encode(NOTIFY, opaque=1))
            first, second = await wire.read(), await wire.read()
            assert {first.code, second.code} == {0, 40}
            notification = first if first.code == 40 else second
            assert (notification.flag, notification.ext) == (2, {"consumerGroup": "g"})
            assert (await ask(wire, CLOSE)).code == 0
            assert await wire.reader.read() == b""
            await until(lambda: bool(fixture.echo.gone))

    run(body())


def test_a_client_that_does_not_read_is_not_read_from(run: Run) -> None:  # noqa: F811
    async def body() -> None:
        async with serving_echo(output_bytes_max=100_000) as fixture:
            reader, good = await fixture.connect(), await fixture.connect()
            reader.reader._transport.pause_reading()  # type: ignore[attr-defined]
            request = encode(BIG, {"size": "50000"})
            reader.writer.write(request * 3000)
            await until(lambda: fixture.server.memory.used > 0)
            for _ in range(20):
                assert (await ask(good, ECHO)).code == 0
            # Two responses fit into the limit, and one more request may have been in flight.
            assert fixture.server.memory.used < 1_000_000
            reader.reader._transport.resume_reading()  # type: ignore[attr-defined]
            for _ in range(3000):
                assert len((await reader.read()).body) == 50_000
            await until(lambda: fixture.server.memory.used == 0)

    run(body())


def test_the_memory_of_all_connections_is_limited(run: Run) -> None:  # noqa: F811
    async def body() -> None:
        async with serving_echo(memory_bytes_max=200_000) as fixture:
            senders = [await fixture.connect() for _ in range(8)]
            frame = encode(ECHO, {}, bytes(100_000), opaque=1)
            for sender in senders:
                sender.writer.write(frame[:60_000])
            await until(lambda: fixture.server.memory.used > 100_000)
            wire = await fixture.connect()
            wire.writer.write(frame[:60_000])
            refused = await wire.read()
            assert refused.code == 2
            assert "memory_bytes_max" in (refused.remark or "")
            for sender in senders:
                sender.writer.close()
            await until(lambda: fixture.server.memory.used < 1000)
            wire.writer.write(frame[60_000:])
            assert (await ask(wire, ECHO)).code == 0

    run(body())


def test_connections_are_limited(run: Run) -> None:  # noqa: F811
    async def body() -> None:
        async with serving_echo(connections_max=3) as fixture:
            wires = [await fixture.connect() for _ in range(3)]
            for wire in wires:
                assert (await ask(wire, ECHO)).code == 0
            refused = await fixture.connect()
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await ask(refused, ECHO)
            wires[0].writer.close()
            await until(lambda: len(fixture.server.connections) == 2)
            assert (await ask(await fixture.connect(), ECHO)).code == 0

    run(body())


def test_idle_and_unfinished_connections_are_closed(run: Run) -> None:  # noqa: F811
    async def body() -> None:
        async with serving_echo(idle_ms=60_000) as fixture:
            idle, slow, good = [await fixture.connect() for _ in range(3)]
            for wire in (idle, slow, good):
                assert (await ask(wire, ECHO)).code == 0
            slow.writer.write(encode(ECHO, {}, bytes(1000))[:500])
            await until(lambda: fixture.server.memory.used > 0)
            later = fixture.server.monotonic_ms() + 61_000
            first, second, third = fixture.server.connections.values()
            second.active_ms = third.active_ms = later
            fixture.server._sweep(later)
            assert await idle.reader.read() == b""
            assert await slow.reader.read() == b""
            assert (await ask(good, ECHO)).code == 0
            assert first.client in fixture.echo.gone
            assert fixture.server.memory.used == 0

    run(body())


def test_stopping_sends_pending_responses(run: Run) -> None:  # noqa: F811
    async def body() -> None:
        async with serving_echo(stop_ms=10_000) as fixture:
            wire = await fixture.connect()
            wire.writer.write(encode(SLOWLY, opaque=1))
            await until(lambda: fixture.server.answer_executor.thread_jobs == 1)
            stopping = asyncio.create_task(fixture.server.stop())
            await asyncio.sleep(0)
            fixture.echo.release.set()
            assert (await wire.read()).opaque == 1
            assert await wire.reader.read() == b""
            await stopping

    run(body())


def test_small_requests_are_served_while_large_ones_use_the_memory(run: Run) -> None:  # noqa: F811
    async def body() -> None:
        async with serving_echo(memory_bytes_max=200_000) as fixture:
            fixture.server.memory.used += 160_000  # memory of active clients that send large frames
            wire = await fixture.connect()
            frame = encode(ECHO, {}, bytes(100), opaque=1)
            for number in range(40):  # each write ends inside a frame's header
                wire.writer.write((frame[6:] if number else frame) + frame[:6])
                assert (await wire.read()).code == 0
            large = await fixture.connect()
            large.writer.write(encode(ECHO, {}, bytes(100_000), opaque=9)[:50_000])
            assert (await large.read()).code == 2, "a large one has to wait"
            fixture.server.memory.used -= 160_000

    run(body())
