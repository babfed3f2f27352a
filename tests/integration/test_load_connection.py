"""Connections of the compiled generator to servers that misbehave: an error, never a hang."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from penstock.cli.bench.pipelined.frame_templates import OPAQUE_FIRST, send_templates
from penstock.cli.bench.pipelined.load_connection import LoadConnection
from penstock.cli.bench.pipelined.load_recorder import LoadRecorder
from penstock.cli.bench.pipelined.send_window import NEVER_NS, SendWindow
from penstock.errors import PeerError, PeerLost, PeerTimeout, PeerUnreachable
from penstock.wire.fields import FLAG_RESPONSE
from penstock.wire.frame import BINARY
from penstock.wire.output import encode
from tests.integration.loops import Server, Wire

Serve = Callable[[Wire], Coroutine[Any, Any, None]]
PATIENCE_S = 30


def window(size: int) -> SendWindow:
    templates = send_templates(
        "t", [("broker-a", 0)], body=b"x", batch=1, tags=None, encoding=BINARY
    )
    made = SendWindow(templates, size, LoadRecorder(), 1)
    made.stop_ns = NEVER_NS
    return made


async def run(serve: Serve, sends: SendWindow, *, timeout_s: float = PATIENCE_S) -> None:
    """Send to this server until the connection fails, whose error is raised."""
    server = Server(serve)
    await server.start()
    connection = await LoadConnection.open(server.address, sends, ssl=None, timeout_s=PATIENCE_S)
    try:
        connection.push(time.monotonic_ns())
        async with asyncio.timeout(PATIENCE_S):
            while True:
                connection.check(time.monotonic_ns(), timeout_s)
                await asyncio.sleep(0.001)
    finally:
        connection.close()
        await server.stop()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "invalid response: frame too long"),
        (bytes(64), "invalid response: invalid frame length 0"),
        (encode(0, {}, opaque=5, flag=FLAG_RESPONSE), "which no request in flight has"),
    ],
)
def test_an_invalid_response_ends_the_connection(data: bytes, text: str) -> None:
    async def serve(wire: Wire) -> None:
        await wire.read()
        wire.writer.write(data)
        await wire.reader.read()

    with pytest.raises(PeerError, match=text):
        asyncio.run(run(serve, window(3)))


def test_a_server_that_closes_the_connection() -> None:
    async def serve(wire: Wire) -> None:
        await wire.read()
        wire.writer.transport.abort()

    with pytest.raises(PeerLost):
        asyncio.run(run(serve, window(3)))


def test_a_server_that_does_not_respond() -> None:
    async def serve(wire: Wire) -> None:
        await wire.reader.read()

    with pytest.raises(PeerTimeout, match="3 requests are in flight, and nothing was received"):
        asyncio.run(run(serve, window(3), timeout_s=0.05))


def test_an_unreachable_server() -> None:
    async def connect() -> None:
        server = Server(lambda wire: wire.reader.read())
        await server.start()
        await server.stop()
        await LoadConnection.open(server.address, window(1), ssl=None, timeout_s=PATIENCE_S)

    with pytest.raises(PeerUnreachable, match="can't connect"):
        asyncio.run(connect())


def test_responses_in_pieces_and_longer_than_the_buffer() -> None:
    """Every byte boundary, and a response that does not fit into the buffer at first."""
    sends = window(2)
    small = encode(0, {}, opaque=OPAQUE_FIRST, flag=FLAG_RESPONSE, encoding=BINARY)
    large = encode(0, {}, bytes(3 << 20), opaque=OPAQUE_FIRST + 1, flag=FLAG_RESPONSE)

    async def serve(wire: Wire) -> None:
        await wire.read()
        sends.left = 0  # nothing more
        for at in range(len(small)):
            wire.writer.write(small[at : at + 1])
            await asyncio.sleep(0)
        wire.writer.write(large)
        while sends.in_flight:
            await asyncio.sleep(0.001)
        wire.writer.transport.abort()

    with pytest.raises(PeerLost):
        asyncio.run(run(serve, sends))
    assert (sends.in_flight, sends.recorder.acknowledged) == (0, 2)
