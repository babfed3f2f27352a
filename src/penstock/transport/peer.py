"""Calls out: one connection to a server, made on demand, with many calls on it at a time.

A call is answered, or it raises one of the PeerErrors; an answer with an error code is an answer.
When the connection ends, all calls on it fail at once and the next call connects anew: the name of
the server is looked up again then. Requests from the server go to `on_request`.

Limits: a frame that breaks the protocol or its limits ends the connection. Callers wait while the
server does not read; answers to its own requests that it does not read end the connection.
"""

import asyncio
import ipaddress
import logging
import os
import socket
import ssl as tls
from collections.abc import Callable, Mapping
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from penstock.clock import Clock, LoopClock, finish_within
from penstock.errors import (
    PeerLost,
    PeerTimeout,
    PeerUnreachable,
    PeerUntrusted,
    PenstockError,
)
from penstock.transport.peer_connection import PeerConnection, PeerRequest, Response
from penstock.transport.pending_calls import Call, PendingCalls
from penstock.wire.codes import ResponseCode
from penstock.wire.fields import FLAG_ONEWAY
from penstock.wire.frame import FRAME_BYTES_MAX, JSON, Request
from penstock.wire.output import encode, response

__all__ = ["Call", "Peer", "PeerConnection", "PeerRequest", "Response", "split_address"]

log = logging.getLogger(__name__)

CONNECT_MS = 3_000

Sign: TypeAlias = Callable[[int, Mapping[str, str], bytes], Mapping[str, str]]
"""(code, fields, body) → the fields to send, with the signature among them."""

T = TypeVar("T")


class Peer:
    """A server to call."""

    def __init__(
        self,
        address: str,
        *,
        ssl: tls.SSLContext | None = None,
        sign: Sign | None = None,
        on_request: Callable[[PeerRequest], Response | None] | None = None,
        on_lost: Callable[[], object] | None = None,
        clock: Clock | None = None,
        connect_ms: int = CONNECT_MS,
        frame_bytes_max: int = FRAME_BYTES_MAX,
    ) -> None:
        self.address = address
        self.host, self.port = split_address(address)
        self._ssl = ssl
        self._sign = sign
        self._on_request = on_request
        self._on_lost = on_lost
        self._clock = clock or LoopClock()
        self._connect_ms = connect_ms
        self._frame_bytes_max = frame_bytes_max
        self._connection: PeerConnection | None = None
        self.calls: PendingCalls | None = None
        """Where calls go out at the moment, if there is a connection."""
        self._connecting: asyncio.Task[PeerConnection] | None = None
        self._closed = False

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def connection(self) -> PeerConnection | None:
        """The connection at the moment."""
        return self._connection

    @property
    def signs(self) -> bool:
        """Whether requests have to be signed, which `encode` does."""
        return self._sign is not None

    async def call(
        self,
        code: int,
        ext: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        timeout_ms: int,
        encoding: int = JSON,
    ) -> Response:
        """The server's answer. Raises PeerUnreachable, PeerTimeout or PeerLost."""
        return await self.read(
            code, ext, body, reader=_response, timeout_ms=timeout_ms, encoding=encoding
        )

    async def read(
        self,
        code: int,
        ext: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        reader: Callable[[Request], T],
        timeout_ms: int,
        encoding: int = JSON,
    ) -> T:
        """What `reader` makes of the server's answer, whose bytes it sees in place: they are gone
        when it returns. Raises as `call` does, and what the reader raises of our errors."""
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        connection = await self.writable(timeout_ms)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        call = _Call(code, timeout_ms, deadline_ms, answer, reader)
        call.sent_ms = self._clock.monotonic_ms()
        opaque = connection.expect(call)
        try:
            connection.write(self.encode(code, ext, body, opaque=opaque, flag=0, encoding=encoding))
            return await answer
        finally:
            connection.forget(opaque)

    async def oneway(
        self,
        code: int,
        ext: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        timeout_ms: int,
        encoding: int = JSON,
    ) -> None:
        """Send a request that is not answered; `timeout_ms` is for getting it on its way."""
        connection = await self.writable(timeout_ms)
        opaque = connection.calls.next_opaque()
        connection.write(
            self.encode(code, ext, body, opaque=opaque, flag=FLAG_ONEWAY, encoding=encoding)
        )

    def reply(self, ask: PeerRequest, answer: Response) -> None:
        """Answer a request of the server's that `on_request` left open; late is in vain."""
        if not ask.oneway and ask.connection is self._connection:
            ask.connection.write_answer(
                response(
                    answer.code,
                    ask.opaque,
                    ask.encoding,
                    ext=answer.ext,
                    body=answer.body,
                    remark=answer.remark,
                )
            )

    async def close(self) -> None:
        """Fail what waits and end the connection after what was written has left."""
        self._closed = True
        connecting = self._connecting
        if connecting is not None:
            connecting.cancel()
        connection, self._connection, self.calls = self._connection, None, None
        if connection is not None:
            await connection.close()
        if connecting is not None:
            await asyncio.wait([connecting])

    async def writable(self, timeout_ms: int) -> PeerConnection:
        """A connection that takes bytes now; others who wait may fill it up meanwhile.

        Connects once: a server that hangs up on a new connection is not called again and again.
        """
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        fresh = False
        while (connection := self._connection) is None or connection.full:
            if connection is None and fresh and not self._closed:
                raise PeerLost("the connection was closed at once", address=self.address)
            left_ms = deadline_ms - self._clock.monotonic_ms()
            try:
                await finish_within(self._clock, left_ms, self._become_writable())
                fresh = connection is None
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

    async def _connected(self) -> PeerConnection:
        """One attempt at a time, shared by all who wait for it."""
        if self._closed:
            raise PeerUnreachable("closed on our side", address=self.address)
        connecting = self._connecting
        if connecting is None:
            connecting = self._connecting = asyncio.ensure_future(self._connect())
            connecting.add_done_callback(self._connect_done)
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if connecting.cancelled() and not (me is not None and me.cancelling()):
                raise PeerUnreachable("closed on our side", address=self.address) from None
            raise

    async def _connect(self) -> PeerConnection:
        try:
            return await finish_within(self._clock, self._connect_ms, self._open())
        except TimeoutError:
            message = f"no connection within {self._connect_ms} ms"
            raise PeerUnreachable(message, address=self.address) from None
        except tls.SSLCertVerificationError as error:
            message = f"the server's certificate is not trusted: {error.verify_message}"
            raise PeerUntrusted(message, address=self.address) from None
        except (OSError, UnicodeError) as error:  # refused, no such name, TLS failed
            message = f"can't connect: {_reason(error)}"
            raise PeerUnreachable(message, address=self.address) from None

    async def _open(self) -> PeerConnection:
        """A connection to the first address of the host that answers."""
        failure: OSError | None = None
        for number in await _numbers_of(self.host, self.port):
            try:
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: PeerConnection(
                        self.address,
                        self._asked,
                        self._lost,
                        clock=self._clock,
                        frame_bytes_max=self._frame_bytes_max,
                    ),
                    number,
                    self.port,
                    ssl=self._ssl,
                    server_hostname=None if self._ssl is None else self.host,
                )
            except OSError as error:
                failure = failure or error
            else:
                return self._use(connection)
        assert failure is not None, "a name has at least one address"
        raise failure

    def _use(self, connection: PeerConnection) -> PeerConnection:
        """Take a new connection, in the very step in which it is there: `close` then finds it."""
        if connection.transport is None:  # it ended before we got here
            raise PeerLost("the connection was closed at once", address=self.address)
        if self._closed:
            connection.abort("closed on our side")
            raise PeerUnreachable("closed on our side", address=self.address)
        self._connection = connection
        self.calls = connection.calls
        return connection

    def _connect_done(self, task: asyncio.Task[PeerConnection]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # those who waited have it

    def _lost(self, connection: PeerConnection) -> None:
        if self._connection is connection:
            self._connection = self.calls = None
            if self._on_lost is not None and not self._closed:
                self._on_lost()

    def _asked(self, ask: PeerRequest) -> None:
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

    def encode(
        self,
        code: int,
        ext: Mapping[str, str] | None,
        body: bytes,
        *,
        opaque: int,
        flag: int,
        encoding: int = JSON,
    ) -> bytes:
        """A request's frame, signed where this peer signs."""
        if self._sign is not None:
            ext = self._sign(code, ext or {}, body)
        return encode(
            code,
            ext,
            body,
            opaque=opaque,
            flag=flag,
            encoding=encoding,
            frame_bytes_max=self._frame_bytes_max,
        )


class _Call(Call, Generic[T]):
    """A call whose caller awaits a future."""

    def __init__(
        self,
        code: int,
        timeout_ms: int,
        deadline_ms: int,
        answer: "asyncio.Future[T]",
        reader: Callable[[Request], T],
    ) -> None:
        Call.__init__(self, code, timeout_ms, deadline_ms)
        self._answer = answer
        self._reader = reader

    def answered(self, request: Request) -> None:
        if self._answer.done():
            return
        try:
            self._answer.set_result(self._reader(request))
        except PenstockError as error:  # it is not what this kind of answer has to be
            self._answer.set_exception(error)

    def failed(self, error: PenstockError) -> None:
        if not self._answer.done():
            self._answer.set_exception(error)


def _response(request: Request) -> Response:
    return Response(
        request.code,
        request.ext(),
        request.body(),
        request.remark(),
        request.version,
        request.language,
    )


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`; an IPv6 host may stand in brackets."""
    host, colon, port = address.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"{address!r} is no address: host:port")
    return host, int(port)


async def _numbers_of(host: str, port: int) -> list[str]:
    """The addresses of a host by number.

    Not by `create_connection`: uvloop asks in threads of libuv's own, and a process that forks
    after that has children that crash when they end.
    """
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        find = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(None, find)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))
    return [host]


def _reason(error: OSError | UnicodeError) -> str:
    """What went wrong, without the loops' own words for it."""
    if isinstance(error, tls.SSLError | socket.gaierror | UnicodeError) or not error.errno:
        return str(error)
    return os.strerror(error.errno)
