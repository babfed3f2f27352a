"""A blocking connection: pieces of frames, frames that are not the response, and failures."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from penstock.errors import PeerLost, PeerTimeout
from penstock.transport.blocking_connection import BlockingConnection
from penstock.wire.frame import BINARY
from penstock.wire.output import encode, response

CODE = 310


@contextmanager
def connected(serve: Callable[[socket.socket], None]) -> Iterator[BlockingConnection]:
    """A connection to a server that runs `serve` and then closes it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        accepted, _ = listener.accept()
        with accepted:
            serve(accepted)

    thread = threading.Thread(target=accept)
    thread.start()
    host, port = listener.getsockname()
    connection = BlockingConnection("broker:1", host, port, connect_ms=5_000)
    try:
        yield connection
    finally:
        connection.close()
        thread.join(10)
        listener.close()
        assert not thread.is_alive()


def call(connection: BlockingConnection, timeout_ms: int = 5_000) -> bytes:
    """Send a request; returns the body of the response."""
    opaque = connection.next_opaque()
    connection.output.append(encode(CODE, {}, b"?", opaque=opaque, encoding=BINARY))
    return connection.exchange(opaque, CODE, timeout_ms).body()


def answer(opaque: int, body: bytes) -> bytes:
    return response(0, opaque, BINARY, ext={"a": "1"}, body=body)


@pytest.mark.parametrize("length", [1, 5, 40, 1_000_000])
def test_responses_may_come_in_pieces_and_be_longer_than_the_buffer(length: int) -> None:
    def serve(server: socket.socket) -> None:
        for opaque in (1, 2):
            server.recv(1024)
            frame = answer(opaque, b"x" * 100_000)
            for at in range(0, 200, length):
                server.sendall(frame[at : min(at + length, 200)])
            server.sendall(frame[200:])

    with connected(serve) as connection:
        assert call(connection) == call(connection) == b"x" * 100_000


def test_other_frames_are_skipped() -> None:
    def serve(server: socket.socket) -> None:
        server.recv(1024)
        request = encode(40, {}, b"", opaque=1, encoding=BINARY)
        server.sendall(request + answer(77, b"late") + answer(1, b"right"))

    with connected(serve) as connection:
        assert call(connection) == b"right"


def test_a_response_that_does_not_come_ends_the_connection() -> None:
    def serve(server: socket.socket) -> None:
        while server.recv(1024):
            pass

    with connected(serve) as connection:
        with pytest.raises(PeerTimeout, match=r"broker:1: no response to request 310 within 50 ms"):
            call(connection, 50)
        with pytest.raises(PeerLost):
            call(connection)


def test_a_response_that_comes_byte_by_byte_does_not_prolong_the_timeout() -> None:
    ended = threading.Event()

    def serve(server: socket.socket) -> None:
        server.recv(1024)
        for byte in answer(1, b"x" * 10_000):
            if ended.wait(0.005):
                return
            server.sendall(bytes((byte,)))

    with connected(serve) as connection:
        with pytest.raises(PeerTimeout):
            call(connection, 60)
        ended.set()


def test_a_server_that_closes_the_connection_is_lost() -> None:
    with (
        connected(lambda server: server.recv(1024) and None) as connection,
        pytest.raises(PeerLost, match="the server closed the connection"),
    ):
        call(connection)


def test_an_invalid_frame_ends_the_connection() -> None:
    def serve(server: socket.socket) -> None:
        server.recv(1024)
        server.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        server.recv(1024)

    with connected(serve) as connection:
        with pytest.raises(PeerLost, match="the server sent an invalid frame: frame too long"):
            call(connection)
        with pytest.raises(PeerLost):
            call(connection)


def test_a_server_that_does_not_listen_raises_at_once() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    listener.close()
    with pytest.raises(OSError, match="refused"):
        BlockingConnection("broker:1", host, port, connect_ms=5_000)
