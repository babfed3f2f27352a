"""The connection under a `Peer`: frames in and out, and the calls that wait on it."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from penstock.clock import Clock, finish_within
from penstock.errors import PeerLost, WireError
from penstock.wire.frame import Request

log = logging.getLogger(__name__)

PENDING_MAX = 65_536
"""Most calls that wait on one connection."""

OUTPUT_BYTES_MAX = 1024 * 1024
"""Unsent bytes above which callers wait."""
ANSWER_BYTES_MAX = 32 * 1024 * 1024
"""Unsent bytes above which a server that does not read our answers is given up: two frames."""

CLOSE_MS = 1_000
"""How long a closing connection may take to send what was written."""

_ROOM_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Response:
    """An answer, the server's or ours."""

    code: int = 0
    ext: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    remark: str | None = None
    version: int = 0
    language: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """A request of the server's."""

    code: int
    ext: Mapping[str, str]
    body: bytes
    remark: str | None
    oneway: bool
    opaque: int
    encoding: int
    version: int
    language: int
    connection: "Connection"


class Connection(asyncio.BufferedProtocol):
    """One TCP or TLS connection to a server."""

    def __init__(
        self, address: str, asked: Callable[[Ask], None], lost: Callable[["Connection"], None], *,
        frame_bytes_max: int,
    ) -> None:  # fmt: skip
        self.transport: asyncio.Transport | None = None
        self.pending: dict[int, asyncio.Future[Response]] = {}
        self._paused = False
        self.reads = 0
        self._address = address
        self._asked = asked
        self._lost = lost
        self._cause = ""
        self._request = Request(frame_bytes_max)
        self._room = memoryview(bytearray(_ROOM_BYTES))
        self._request.bind(self._room)
        self._begin = 0
        self._end = 0
        self._loop = asyncio.get_running_loop()
        self._resumed: asyncio.Future[None] | None = None
        self._gone: asyncio.Future[None] = self._loop.create_future()

    # --- what the peer asks for

    @property
    def full(self) -> bool:
        """Whether so much is unsent that callers have to wait."""
        transport = self.transport
        return transport is not None and (
            self._paused or transport.get_write_buffer_size() > OUTPUT_BYTES_MAX
        )

    def expect(self, opaque: int) -> asyncio.Future[Response]:
        """The answer to come; raises PeerLost if the connection has ended."""
        if self.transport is None:
            raise self._lost_error()
        answer: asyncio.Future[Response] = self._loop.create_future()
        self.pending[opaque] = answer
        return answer

    def write(self, frame: bytes) -> None:
        if self.transport is None:
            raise self._lost_error()
        self.transport.write(frame)

    def write_answer(self, frame: bytes) -> None:
        """As `write`, for what the server asked for: never waits, never piles up."""
        if self.transport is not None:
            self.transport.write(frame)
            if self.transport.get_write_buffer_size() > ANSWER_BYTES_MAX:
                self.abort("the server does not read what it asked for")

    async def resumed(self) -> None:
        """Return when bytes are taken again, or the connection has ended."""
        while self.full:
            if not self._paused:  # uvloop learns with the next turn whether the kernel takes it
                await asyncio.sleep(0)
                continue
            if self._resumed is None:
                self._resumed = self._loop.create_future()
            await asyncio.shield(self._resumed)

    def abort(self, cause: str) -> None:
        """End the connection now, and fail what waits on it."""
        if self.transport is not None:
            self._cause = cause
            self.transport.abort()
            self._end_calls()

    async def close(self, clock: Clock) -> None:
        """End the connection once what was written has left, or after a moment anyway."""
        transport = self.transport
        if transport is None:
            return
        self._cause = "closed on our side"
        transport.close()
        self._end_calls()
        try:
            await finish_within(clock, CLOSE_MS, asyncio.shield(self._gone))
        except TimeoutError:
            transport.abort()

    # --- what the event loop tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=OUTPUT_BYTES_MAX)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._cause:
            self._cause = f"the connection broke: {exc}" if exc else "the server closed it"
        self._end_calls()
        if not self._gone.done():
            self._gone.set_result(None)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._wake_writers()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        self.reads += 1
        try:
            self._take_frames()
        except WireError as error:
            log.warning("%s sent a bad frame, closing: %s", self._address, error)
            self.abort(f"it sent a bad frame: {error}")

    # --- frames

    def _take_frames(self) -> None:
        request = self._request
        while self.transport is not None:
            length = request.read(self._begin, self._end)
            if length == 0:
                self._make_room(request.missing)
                return
            self._begin += length
            if request.is_response():
                self._answered(request)
            else:
                self._asked(_ask(request, self))

    def _answered(self, request: Request) -> None:
        answer = self.pending.pop(request.opaque, None)
        if answer is None or answer.done():
            return  # its caller has given up
        answer.set_result(
            Response(
                request.code, request.ext(), request.body(), request.remark(), request.version,
                request.language,
            )
        )  # fmt: skip

    def _make_room(self, missing: int) -> None:
        """See to it that the rest of the first frame fits behind what is there of it."""
        have = self._end - self._begin
        if have and missing <= len(self._room) - self._end:
            return
        old, size = self._room, max(have + missing, _ROOM_BYTES)
        if size > len(old) or (have == 0 and len(old) > _ROOM_BYTES):
            self._room = memoryview(bytearray(size))
            self._request.bind(self._room)
        self._room[:have] = old[self._begin : self._end]
        self._begin, self._end = 0, have

    def _end_calls(self) -> None:
        if self.transport is None:
            return
        self.transport = None
        pending, self.pending = self.pending, {}
        for answer in pending.values():
            if not answer.done():
                answer.set_exception(self._lost_error())
        self._wake_writers()
        self._lost(self)

    def _wake_writers(self) -> None:
        if self._resumed is not None:
            self._resumed.set_result(None)
            self._resumed = None

    def _lost_error(self) -> PeerLost:
        return PeerLost(self._cause or "the connection ended", address=self._address)


def _ask(request: Request, connection: Connection) -> Ask:
    return Ask(
        code=request.code, ext=request.ext(), body=request.body(), remark=request.remark(),
        oneway=request.is_oneway(), opaque=request.opaque, encoding=request.encoding,
        version=request.version, language=request.language, connection=connection,
    )  # fmt: skip
