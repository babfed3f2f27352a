"""An HTTP server that does with each request what a script says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

from penstock.server.controller.etcd.etcd_client import EtcdEndpoint


class Received(NamedTuple):
    """A request."""

    path: str
    headers: dict[str, str]
    message: Any


Step = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


def reply(message: object, status: int = 200) -> Step:
    """Answer with a JSON body."""
    return raw_reply(json.dumps(message).encode(), status)


def raw_reply(body: bytes, status: int = 200) -> Step:
    async def step(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))

    return step


def raw(data: bytes) -> Step:
    """Answer with any bytes and close the connection."""

    async def step(request: Received, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        writer.close()

    return step


async def lose(request: Received, writer: asyncio.StreamWriter) -> None:
    """Execute the request and lose the answer."""
    writer.close()


async def be_silent(request: Received, writer: asyncio.StreamWriter) -> None:
    """Never answer, and keep the connection open."""


class ScriptedServer:
    """A server; an async context manager. The last step of the script is repeated."""

    def __init__(self, *script: Step) -> None:
        self.script = list(script)
        self.received: list[Received] = []
        self.connections = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> EtcdEndpoint:
        return EtcdEndpoint("127.0.0.1", self._server.sockets[0].getsockname()[1])

    def close_connections(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()
        self.close_connections()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not writer.is_closing():
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                line, *fields = head.strip().split("\r\n")
                headers = {
                    name.lower(): value for name, value in (f.split(": ", 1) for f in fields)
                }
                body = await reader.readexactly(int(headers["content-length"]))
                try:
                    message = json.loads(body)
                except ValueError:  # several objects
                    message = body.decode()
                request = Received(line.split()[1], headers, message)
                self.received.append(request)
                step = self.script.pop(0) if len(self.script) > 1 else self.script[0]
                await step(request, writer)
        except (OSError, EOFError):
            pass
        finally:
            writer.close()
