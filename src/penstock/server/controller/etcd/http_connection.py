"""One HTTP/1.1 connection to a server, for POST requests with JSON bodies, one after another.

Every size is limited: the header of a response, its body, and one line of a stream. A violation of
the protocol or a limit raises HttpError, and the connection can't be used any more.
"""

import asyncio
import contextlib
import ssl as tls
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple, Self

import h11

from penstock.transport.peer import resolve

HEADER_BYTES_MAX = 16 * 1024
BODY_BYTES_MAX = 16 * 1024 * 1024
"""The maximum size of a response, and of one line of a stream."""
_READ_BYTES = 64 * 1024


class HttpError(Exception):
    """The connection broke, or the server does not speak HTTP/1.1 within the limits."""

    def __init__(self, message: str, *, sent: bool) -> None:
        """`sent`: the server may have got the request."""
        super().__init__(message)
        self.sent = sent


class HttpResponse(NamedTuple):
    """A whole response."""

    status: int
    body: bytes


class HttpConnection:
    """A connection; made by `open`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._host = host
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEADER_BYTES_MAX)

    @classmethod
    async def open(cls, host: str, port: int, ssl: tls.SSLContext | None) -> Self:
        """Connect to the first address of the host that accepts it. Raises HttpError."""
        failure: Exception | None = None
        try:
            addresses = await resolve(host, port)
        except OSError as error:
            raise HttpError(f"can't resolve {host}: {error}", sent=False) from None
        name = host if ssl is not None else None
        for address in addresses:
            try:
                streams = await asyncio.open_connection(
                    address, port, ssl=ssl, server_hostname=name, limit=_READ_BYTES
                )
            except tls.SSLCertVerificationError as error:
                text = f"its certificate is not trusted: {error.verify_message}"
                raise HttpError(text, sent=False) from None
            except OSError as error:
                failure = failure or error
            else:
                return cls(*streams, f"{host}:{port}")
        raise HttpError(f"can't connect: {failure}", sent=False)

    @property
    def reusable(self) -> bool:
        """Whether the next request can be sent."""
        idle = self._http.our_state is h11.IDLE and self._http.their_state is h11.IDLE
        return idle and not self._reader.at_eof()

    def close(self) -> None:
        """Close at once."""
        self._writer.transport.abort()

    async def post(self, path: str, headers: Mapping[str, str], body: bytes) -> HttpResponse:
        """Send a request and read the whole response. Raises HttpError."""
        status = await self._begin(path, headers, body)
        parts = []
        size = 0
        async for part in self._parts():
            size += len(part)
            if size > BODY_BYTES_MAX:
                text = f"the response is longer than {BODY_BYTES_MAX} bytes"
                raise HttpError(text, sent=True)
            parts.append(part)
        with contextlib.suppress(h11.LocalProtocolError):  # the server wants to close it
            self._http.start_next_cycle()
        return HttpResponse(status, b"".join(parts))

    async def stream(
        self, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, AsyncIterator[bytes]]:
        """Send a request; the status and the lines of the response, which may never end."""
        return await self._begin(path, headers, body), self._lines()

    async def _begin(self, path: str, headers: Mapping[str, str], body: bytes) -> int:
        """Send a request and read the head of the response."""
        fields = [
            ("Host", self._host),
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            *headers.items(),
        ]
        request = h11.Request(method="POST", target=path, headers=fields)
        data = [self._http.send(part) for part in (request, h11.Data(body), h11.EndOfMessage())]
        try:
            self._writer.write(b"".join(filter(None, data)))
            await self._writer.drain()
        except OSError as error:
            raise HttpError(f"the connection was lost: {error}", sent=True) from None
        while True:
            event = await self._event()
            if isinstance(event, h11.Response):
                return event.status_code
            if not isinstance(event, h11.InformationalResponse):
                raise HttpError("the server closed the connection", sent=True)

    async def _parts(self) -> AsyncIterator[bytes]:
        while True:
            event = await self._event()
            if isinstance(event, h11.EndOfMessage):
                return
            if not isinstance(event, h11.Data):
                raise HttpError("the server closed the connection", sent=True)
            yield bytes(event.data)

    async def _lines(self) -> AsyncIterator[bytes]:
        """The lines of the body, without empty ones."""
        rest = bytearray()
        async for part in self._parts():
            searched = len(rest)
            rest += part
            while (end := rest.find(b"\n", searched)) >= 0:
                line = bytes(rest[:end])
                del rest[: end + 1]
                searched = 0
                if line.strip():
                    yield line
            if len(rest) > BODY_BYTES_MAX:
                raise HttpError(f"a line is longer than {BODY_BYTES_MAX} bytes", sent=True)
        if rest.strip():
            yield bytes(rest)

    async def _event(self) -> object:
        """The next event of the response; ConnectionClosed if the server has closed it."""
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(_READ_BYTES))
        except h11.RemoteProtocolError as error:
            raise HttpError(f"not a valid response: {error}", sent=True) from None
        except OSError as error:
            raise HttpError(f"the connection was lost: {error}", sent=True) from None
        return event
