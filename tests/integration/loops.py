"""Runs coroutines on the stdlib's event loop and on uvloop; small servers for tests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
import uvloop

from penstock.wire.frame import Request
from penstock.wire.output import encode, response

Run = Callable[[Coroutine[Any, Any, None]], None]

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(params=list(LOOPS))
def run(request: pytest.FixtureRequest) -> Run:
    def run_on(body: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
            runner.run(body)

    return run_on


class Frame(NamedTuple):
    """A command, copied out."""

    code: int
    flag: int
    opaque: int
    encoding: int
    ext: dict[str, str]
    body: bytes
    remark: str | None


class Wire:
    """The server's end of a connection: whole frames in, anything out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def read(self) -> Frame:
        """The next frame; raises IncompleteReadError at the end."""
        size = await self.reader.readexactly(4)
        data = size + await self.reader.readexactly(int.from_bytes(size, "big"))
        request = Request()
        request.bind(memoryview(bytearray(data)))
        assert request.read(0, len(data)) == len(data)
        return Frame(
            request.code, request.flag, request.opaque, request.encoding, request.ext(),
            request.body(), request.remark(),
        )  # fmt: skip

    def answer(self, frame: Frame, code: int = 0, **parts: Any) -> None:
        self.writer.write(response(code, frame.opaque, frame.encoding, **parts))

    def ask(self, code: int, opaque: int, **parts: Any) -> None:
        self.writer.write(encode(code, opaque=opaque, **parts))


class Server:
    """Counts its connections; each is served by the given coroutine."""

    def __init__(self, serve: Callable[[Wire], Coroutine[Any, Any, None]]) -> None:
        self._serve = serve
        self._tasks: set[asyncio.Task[None]] = set()
        self.wires: list[Wire] = []
        self.address = ""

    async def start(self, port: int = 0, **options: Any) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port, **options)
        self.port = self._server.sockets[0].getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"

    async def stop(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for wire in self.wires:
            wire.writer.transport.abort()
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        wire = Wire(reader, writer)
        self.wires.append(wire)
        try:
            await self._serve(wire)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)


@asynccontextmanager
async def serving(
    serve: Callable[[Wire], Coroutine[Any, Any, None]], **options: Any
) -> AsyncIterator[Server]:
    """A server that is stopped afterwards."""
    server = Server(serve)
    await server.start(**options)
    try:
        yield server
    finally:
        await server.stop()


async def echo(wire: Wire) -> None:
    """Answers each request with its own fields and body."""
    while True:
        frame = await wire.read()
        if not frame.flag & 2:
            wire.answer(frame, frame.code % 3, ext=frame.ext, body=frame.body, remark="heard")
