"""Calls out: one connection to a server, made on demand, with many calls on it at a time.

A call is answered, or it raises one of the PeerErrors; an answer with an error code is an answer.
When the connection ends, all calls on it fail at once and the next call connects anew: the name of
the server is looked up again then. Requests from the server go to `on_request`.

Limits: a frame that breaks the protocol or its limits ends the connection. Callers wait while the
server does not read; answers to its own requests that it does not read end the connection.
"""

import asyncio
import logging
import os
import socket
import ssl as tls
from collections.abc import Callable, Mapping
from typing import TypeAlias

from penstock.clock import Alarm, Clock, LoopClock, finish_within
from penstock.errors import PeerError, PeerLost, PeerTimeout, PeerUnreachable
from penstock.net.peer_connection import PENDING_MAX, Ask, Connection, Response
from penstock.wire.codes import ResponseCode
from penstock.wire.fields import FLAG_ONEWAY
from penstock.wire.frame import FRAME_BYTES_MAX, JSON
from penstock.wire.output import encode, response

__all__ = ["Ask", "Peer", "Response", "split_address"]

log = logging.getLogger(__name__)

CONNECT_MS = 3_000
SILENT_MS = 3_000
"""A connection that has brought nothing for as long as a call waited, and for so long at least, is
taken for dead when that call ends without an answer."""

Sign: TypeAlias = Callable[[int, Mapping[str, str], bytes], Mapping[str, str]]
"""(code, fields, body) → the fields to send, with the signature among them."""


class Peer:
    """A server to call."""

    def __init__(
        self, address: str, *, ssl: tls.SSLContext | None = None, sign: Sign | None = None,
        on_request: Callable[[Ask], Response | None] | None = None,
        on_lost: Callable[[], object] | None = None, clock: Clock | None = None,
        connect_ms: int = CONNECT_MS, frame_bytes_max: int = FRAME_BYTES_MAX,
    ) -> None:  # fmt: skip
        self.address = address
        self.host, self.port = split_address(address)
        self._ssl = ssl
        self._sign = sign
        self._on_request = on_request
        self._on_lost = on_lost
        self._clock = clock or LoopClock()
        self._connect_ms = connect_ms
        self._frame_bytes_max = frame_bytes_max
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None
        self._opaque = 0
        self._closed = False

    @property
    def connected(self) -> bool:
        return self._connection is not None

    async def call(
        self, code: int, ext: Mapping[str, str] | None = None, body: bytes = b"", *,
        timeout_ms: int, encoding: int = JSON,
    ) -> Response:  # fmt: skip
        """The server's answer. Raises PeerUnreachable, PeerTimeout or PeerLost."""
        deadline_ms = self._clock.now_ms() + timeout_ms
        connection = await self._writable(timeout_ms)
        opaque = self._next_opaque(connection)
        frame = self._encode(code, ext, body, opaque=opaque, flag=0, encoding=encoding)
        answer = connection.expect(opaque)
        reads = connection.reads
        alarm: Alarm | None = None

        def give_up() -> None:
            if answer.done():
                return
            message = f"no answer to request {code} within {timeout_ms} ms"
            answer.set_exception(PeerTimeout(message, address=self.address))
            if connection.reads == reads and timeout_ms >= SILENT_MS:
                connection.abort(f"nothing came for {timeout_ms} ms")

        try:
            alarm = self._clock.wake_at(deadline_ms, give_up)
            connection.write(frame)
            return await answer
        finally:
            if alarm is not None:
                alarm.cancel()
            connection.pending.pop(opaque, None)

    async def oneway(
        self, code: int, ext: Mapping[str, str] | None = None, body: bytes = b"", *,
        timeout_ms: int, encoding: int = JSON,
    ) -> None:  # fmt: skip
        """Send a request that is not answered; `timeout_ms` is for getting it on its way."""
        connection = await self._writable(timeout_ms)
        opaque = self._next_opaque(connection)
        connection.write(
            self._encode(code, ext, body, opaque=opaque, flag=FLAG_ONEWAY, encoding=encoding)
        )

    def reply(self, ask: Ask, answer: Response) -> None:
        """Answer a request of the server's that `on_request` left open; late is in vain."""
        if not ask.oneway and ask.connection is self._connection:
            ask.connection.write_answer(
                response(
                    answer.code, ask.opaque, ask.encoding, ext=answer.ext, body=answer.body,
                    remark=answer.remark,
                )
            )  # fmt: skip

    async def close(self) -> None:
        """Fail what waits and end the connection after what was written has left."""
        self._closed = True
        if self._connecting is not None:
            self._connecting.cancel()
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close(self._clock)

    async def _writable(self, timeout_ms: int) -> Connection:
        """A connection that takes bytes now; others who wait may fill it up meanwhile."""
        deadline_ms = self._clock.now_ms() + timeout_ms
        while (connection := self._connection) is None or connection.full:
            left_ms = deadline_ms - self._clock.now_ms()
            try:
                await finish_within(self._clock, left_ms, self._become_writable())
            except TimeoutError:
                if self._connection is not None:
                    message = f"the server took no bytes for {timeout_ms} ms"
                    raise PeerTimeout(message, address=self.address) from None
                message = f"no connection within {timeout_ms} ms"
                raise PeerUnreachable(message, address=self.address) from None
        return connection

    async def _become_writable(self) -> None:
        connection = self._connection or await self._connected()
        await connection.resumed()

    async def _connected(self) -> Connection:
        """One attempt at a time, shared by all who wait for it."""
        if self._closed:
            raise PeerUnreachable("closed on our side", address=self.address)
        if self._connecting is None:
            self._connecting = asyncio.ensure_future(self._connect())
            self._connecting.add_done_callback(self._connect_done)
        try:
            return await asyncio.shield(self._connecting)
        except asyncio.CancelledError:
            if self._closed:
                raise PeerUnreachable("closed on our side", address=self.address) from None
            raise

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        attempt = loop.create_connection(
            lambda: Connection(
                self.address, self._asked, self._lost, frame_bytes_max=self._frame_bytes_max
            ),
            self.host, self.port, ssl=self._ssl,
        )  # fmt: skip
        try:
            _, connection = await finish_within(self._clock, self._connect_ms, attempt)
        except TimeoutError:
            message = f"no connection within {self._connect_ms} ms"
            raise PeerUnreachable(message, address=self.address) from None
        except OSError as error:  # refused, no such name, TLS failed
            message = f"can't connect: {_reason(error)}"
            raise PeerUnreachable(message, address=self.address) from None
        if connection.transport is None:  # it ended before we got here
            raise PeerLost("the connection was closed at once", address=self.address)
        self._connection = connection
        return connection

    def _connect_done(self, task: asyncio.Task[Connection]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # those who waited have it

    def _lost(self, connection: Connection) -> None:
        if self._connection is connection:
            self._connection = None
            if self._on_lost is not None and not self._closed:
                self._on_lost()

    def _asked(self, ask: Ask) -> None:
        answer: Response | None
        if self._on_request is None:
            remark = f" request type {ask.code} not supported"
            answer = Response(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)
        else:
            try:
                answer = self._on_request(ask)
            except Exception as error:  # a fault of ours; the calls on this connection go on
                log.exception("request %d of %s failed", ask.code, self.address)
                answer = Response(ResponseCode.SYSTEM_ERROR, remark=repr(error))
        if answer is not None:
            self.reply(ask, answer)

    def _encode(
        self, code: int, ext: Mapping[str, str] | None, body: bytes, *, opaque: int, flag: int,
        encoding: int,
    ) -> bytes:  # fmt: skip
        if self._sign is not None:
            ext = self._sign(code, ext or {}, body)
        return encode(
            code, ext, body, opaque=opaque, flag=flag, encoding=encoding,
            frame_bytes_max=self._frame_bytes_max,
        )  # fmt: skip

    def _next_opaque(self, connection: Connection) -> int:
        if len(connection.pending) >= PENDING_MAX:
            raise PeerError.over(
                f"{self.address}: calls that wait for an answer",
                figure=len(connection.pending) + 1, limit=PENDING_MAX, unit="calls",
            )  # fmt: skip
        self._opaque = (self._opaque + 1) & 0x7FFFFFFF
        return self._opaque


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`; an IPv6 host may stand in brackets."""
    host, colon, port = address.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"{address!r} is no address: host:port")
    return host, int(port)


def _reason(error: OSError) -> str:
    """What went wrong, without the loops' own words for it."""
    if isinstance(error, tls.SSLError | socket.gaierror) or not error.errno:
        return str(error)
    return os.strerror(error.errno)
