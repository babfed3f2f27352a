"""Calls to a server over one connection, opened on demand, with many calls at a time.

A call returns a response, also one with an error code, or raises a PeerError. When the connection
is closed, all its calls fail and the next call opens a new one; the server's name is resolved again
then. Requests of the server go to `on_request`.

Limits: a frame that violates the protocol or a limit closes the connection. Callers wait while the
server does not read. The connection is closed if the server does not read responses to its own
requests.
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

__all__ = ["Call", "Peer", "PeerConnection", "PeerRequest", "Response", "resolve", "split_address"]

log = logging.getLogger(__name__)

CONNECT_MS = 3_000
NO_TLS_HINT = "the server may not use TLS: turn TLS off in the client, or on at the server"
_TLS_FAILURES = (tls.SSLError, ConnectionResetError, ConnectionAbortedError)
"""Errors of a handshake; the last one is a timeout."""

Sign: TypeAlias = Callable[[int, Mapping[str, str], bytes], Mapping[str, str]]
"""(code, fields, body) → the fields to send, including the signature."""

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
        """The calls of the present connection, if there is one."""
        self._connecting: asyncio.Task[PeerConnection] | None = None
        self._closed = False

    def take_over(
        self,
        *,
        ssl: tls.SSLContext | None,
        sign: Sign | None,
        on_lost: Callable[[], object] | None,
    ) -> None:
        """Another part of the program goes on with this peer, over the same connection."""
        self._ssl = ssl
        self._sign = sign
        self._on_lost = on_lost

    @property
    def connected(self) -> bool:
        return self._connection is not None

    @property
    def connection(self) -> PeerConnection | None:
        """The present connection."""
        return self._connection

    @property
    def signs(self) -> bool:
        """Whether `encode` signs requests."""
        return self._sign is not None

    async def call(
        self,
        code: int,
        ext: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        timeout_ms: int,
        encoding: int = JSON,
        remark: str | None = None,
    ) -> Response:
        """The server's response. Raises PeerUnreachable, PeerTimeout or PeerLost."""
        return await self.read(
            code,
            ext,
            body,
            reader=_response,
            timeout_ms=timeout_ms,
            encoding=encoding,
            remark=remark,
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
        remark: str | None = None,
    ) -> T:
        """What `reader` makes of the server's response, whose bytes are valid only during its call.

        Raises as `call` does, and any PenstockError of the reader.
        """
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        connection = await self.writable(timeout_ms)
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        call = _FutureCall(code, timeout_ms, deadline_ms, result, reader)
        call.sent_ms = self._clock.monotonic_ms()
        opaque = connection.expect(call)
        try:
            frame = self.encode(
                code, ext, body, opaque=opaque, flag=0, encoding=encoding, remark=remark
            )
            connection.write(frame)
            return await result
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
        """Send a one-way request; `timeout_ms` limits connecting and writing."""
        connection = await self.writable(timeout_ms)
        opaque = connection.calls.next_opaque()
        connection.write(
            self.encode(code, ext, body, opaque=opaque, flag=FLAG_ONEWAY, encoding=encoding)
        )

    def reply(self, request: PeerRequest, reply: Response) -> None:
        """Respond to a request for which `on_request` returned None; not on a new connection."""
        if not request.oneway and request.connection is self._connection:
            request.connection.write_response(
                response(
                    reply.code,
                    request.opaque,
                    request.encoding,
                    ext=reply.ext,
                    body=reply.body,
                    remark=reply.remark,
                )
            )

    async def close(self) -> None:
        """Fail the waiting calls and close the connection after what was written is sent."""
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
        """A connection that is not full; other callers may fill it before this one runs.

        Connects once: a server that closes new connections is not called again and again.
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
                    message = f"the server read nothing for {timeout_ms} ms"
                    raise PeerTimeout(message, address=self.address) from None
                message = f"no connection within {timeout_ms} ms"
                raise PeerUnreachable(message, address=self.address) from None
        return connection

    async def _become_writable(self) -> None:
        connection = self._connection or await self._connected()
        await connection.resumed()

    async def _connected(self) -> PeerConnection:
        """Connect; concurrent callers share one attempt."""
        if self._closed:
            raise PeerUnreachable("closed by this client", address=self.address)
        connecting = self._connecting
        if connecting is None:
            connecting = self._connecting = asyncio.ensure_future(self._connect())
            connecting.add_done_callback(self._connect_done)
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if connecting.cancelled() and not (task is not None and task.cancelling()):
                raise PeerUnreachable("closed by this client", address=self.address) from None
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
            hint = None
            if self._ssl is not None and isinstance(error, _TLS_FAILURES):
                reason = _reason(error) or "the server closed the connection"
                if isinstance(error, ConnectionAbortedError):
                    reason = f"no answer within {self._handshake_ms} ms"
                message, hint = f"the TLS handshake failed: {reason}", NO_TLS_HINT
            raise PeerUnreachable(message, address=self.address, hint=hint) from None

    async def _open(self) -> PeerConnection:
        """A connection to the first address of the host that accepts it."""
        failure: OSError | None = None
        handshake_s = None if self._ssl is None else self._handshake_ms / 1000
        for numeric_host in await resolve(self.host, self.port):
            try:
                _, connection = await asyncio.get_running_loop().create_connection(
                    lambda: PeerConnection(
                        self.address,
                        self._handle_request,
                        self._connection_lost,
                        clock=self._clock,
                        frame_bytes_max=self._frame_bytes_max,
                    ),
                    numeric_host,
                    self.port,
                    ssl=self._ssl,
                    server_hostname=None if self._ssl is None else self.host,
                    ssl_handshake_timeout=handshake_s,
                )
            except OSError as error:
                failure = failure or error
            else:
                return self._use(connection)
        assert failure is not None, "a name has at least one address"
        raise failure

    @property
    def _handshake_ms(self) -> int:
        """The time for a TLS handshake: less than for the connection, so that a server that ignores
        it is told from one that can't be reached."""
        return self._connect_ms * 4 // 5

    def _use(self, connection: PeerConnection) -> PeerConnection:
        """Use a new connection, in the step in which it was opened, so that `close` finds it."""
        if connection.transport is None:  # closed already
            raise PeerLost("the connection was closed at once", address=self.address)
        if self._closed:
            connection.abort("closed by this client")
            raise PeerUnreachable("closed by this client", address=self.address)
        self._connection = connection
        self.calls = connection.calls
        return connection

    def _connect_done(self, task: asyncio.Task[PeerConnection]) -> None:
        self._connecting = None
        if not task.cancelled():
            task.exception()  # the callers have raised it

    def _connection_lost(self, connection: PeerConnection) -> None:
        if self._connection is connection:
            self._connection = self.calls = None
            if self._on_lost is not None and not self._closed:
                self._on_lost()

    def _handle_request(self, request: PeerRequest) -> None:
        reply: Response | None
        if self._on_request is None:
            remark = f" request type {request.code} not supported"
            reply = Response(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)
        else:
            try:
                reply = self._on_request(request)
            except Exception as error:  # a bug; the calls on this connection must go on
                log.exception("request %d of %s failed", request.code, self.address)
                remark = f"{type(error).__name__}: {error}"
                reply = Response(ResponseCode.SYSTEM_ERROR, remark=remark)
        if reply is not None:
            self.reply(request, reply)

    def encode(
        self,
        code: int,
        ext: Mapping[str, str] | None,
        body: bytes,
        *,
        opaque: int,
        flag: int,
        encoding: int = JSON,
        remark: str | None = None,
    ) -> bytes:
        """The frame of a request, signed if this peer signs."""
        if self._sign is not None:
            ext = self._sign(code, ext or {}, body)
        return encode(
            code,
            ext,
            body,
            opaque=opaque,
            flag=flag,
            encoding=encoding,
            remark=remark,
            frame_bytes_max=self._frame_bytes_max,
        )


class _FutureCall(Call, Generic[T]):
    """A call with a future for its result."""

    def __init__(
        self,
        code: int,
        timeout_ms: int,
        deadline_ms: int,
        result: "asyncio.Future[T]",
        reader: Callable[[Request], T],
    ) -> None:
        Call.__init__(self, code, timeout_ms, deadline_ms)
        self._result = result
        self._reader = reader

    def answered(self, request: Request) -> None:
        if self._result.done():
            return
        try:
            self._result.set_result(self._reader(request))
        except PenstockError as error:  # not a valid response to this request
            self._result.set_exception(error)

    def failed(self, error: PenstockError) -> None:
        if not self._result.done():
            self._result.set_exception(error)


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
    """Host and port of `host:port`; an IPv6 host may be in brackets."""
    host, colon, port = address.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f"{address!r} is not an address of the form host:port")
    return host, int(port)


async def resolve(host: str, port: int) -> list[str]:
    """The numeric addresses of a host.

    Not by `create_connection`: uvloop resolves names in threads of libuv, and child processes
    forked after that crash when they exit.
    """
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        find = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        found = await asyncio.get_running_loop().run_in_executor(None, find)
        return list(dict.fromkeys(str(address[0]) for *_, address in found))
    return [host]


def _reason(error: OSError | UnicodeError) -> str:
    """The cause, without the event loop's own wording."""
    if isinstance(error, tls.SSLError | socket.gaierror | UnicodeError) or not error.errno:
        return str(error)
    return os.strerror(error.errno)
