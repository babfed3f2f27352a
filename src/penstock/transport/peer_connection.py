"""The connection under a `Peer`: frames in and out, and the calls that wait on it.

What is written in one turn of the event loop leaves in one write. Calls have deadlines, and one
alarm for all of them.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from penstock.clock import Alarm, Clock, finish_within
from penstock.errors import PeerLost, PeerTimeout, WireError
from penstock.transport.pending_calls import GATHER_BYTES_MAX, NEVER_MS, Call, PendingCalls
from penstock.wire.frame import Request

log = logging.getLogger(__name__)

OUTPUT_BYTES_MAX = 1024 * 1024
"""Unsent bytes above which callers wait."""
ANSWER_BYTES_MAX = 32 * 1024 * 1024
"""Unsent bytes above which a server that does not read our answers is given up: two frames."""

CLOSE_MS = 1_000
"""How long a closing connection may take to send what was written."""
SILENT_MS = 3_000
"""A connection that has brought nothing for as long as a call waited, and for so long at least, is
taken for dead when that call ends without an answer."""

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
class PeerRequest:
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
    connection: "PeerConnection"


class PeerConnection(asyncio.BufferedProtocol):
    """One TCP or TLS connection to a server."""

    def __init__(
        self,
        address: str,
        asked: Callable[[PeerRequest], None],
        lost: Callable[["PeerConnection"], None],
        *,
        frame_bytes_max: int,
        clock: Clock,
    ) -> None:
        self.transport: asyncio.Transport | None = None
        self.calls = PendingCalls(
            address, frame_bytes_max, self._set_alarm, self._wake, self._leave
        )
        self._address = address
        self._asked = asked
        self._lost = lost
        self._clock = clock
        self._cause = ""
        self._alarm: Alarm | None = None
        self._room = memoryview(bytearray(_ROOM_BYTES))
        self.calls.request.bind(self._room)
        self._begin = 0
        self._end = 0
        self._loop = asyncio.get_running_loop()
        self._resumed: asyncio.Future[None] | None = None
        self._gone: asyncio.Future[None] = self._loop.create_future()

    # --- what the peer asks for

    @property
    def unsent(self) -> int:
        """Bytes that the kernel has not taken yet."""
        if self.transport is None:
            return 0
        return self.transport.get_write_buffer_size() + self.calls.output.length

    @property
    def full(self) -> bool:
        """Whether so much is unsent that callers have to wait."""
        return self.transport is not None and (self.calls.paused or self.unsent > OUTPUT_BYTES_MAX)

    def expect(self, call: Call) -> int:
        """Let a call wait for its answer; gives the number that its request has to carry.

        Raises PeerLost if the connection has ended, PeerError if too many wait already.
        """
        if self.transport is None:
            raise self._lost_error()
        return self.calls.expect(call)

    def forget(self, opaque: int) -> None:
        """Let a call go whose caller has given up."""
        self.calls.pending.pop(opaque, None)

    def write(self, frame: bytes) -> None:
        """Send bytes: whole frames, or the body of the one whose header was written last."""
        if self.transport is None:
            raise self._lost_error()
        if len(frame) > GATHER_BYTES_MAX:
            self._leave()
            self.transport.write(frame)
        else:
            self.calls.output.append(frame)
            self.calls.push()

    def write_answer(self, frame: bytes) -> None:
        """As `write`, for what the server asked for: never waits, never piles up."""
        if self.transport is not None:
            self.write(frame)
            if self.unsent > ANSWER_BYTES_MAX:
                self.abort("the server does not read what it asked for")

    async def resumed(self) -> None:
        """Return when bytes are taken again, or the connection has ended."""
        while self.full:
            if not self.calls.paused:  # uvloop learns with the next turn what the kernel takes
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

    async def close(self) -> None:
        """End the connection once what was written has left, or after a moment anyway."""
        transport = self.transport
        if transport is None:
            return
        self._cause = "closed on our side"
        self._leave()
        transport.close()
        self._end_calls()
        try:
            await finish_within(self._clock, CLOSE_MS, asyncio.shield(self._gone))
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
        self.calls.paused = True

    def resume_writing(self) -> None:
        self.calls.paused = False
        self._wake_writers()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        self.calls.reads += 1
        try:
            self._take_frames()
        except WireError as error:
            log.warning("%s sent a bad frame, closing: %s", self._address, error)
            self.abort(f"it sent a bad frame: {error}")

    # --- frames

    def _take_frames(self) -> None:
        calls = self.calls
        now_ms = self._clock.monotonic_ms()
        while self.transport is not None:
            self._begin = calls.take(self._begin, self._end, now_ms)
            if not calls.asked:
                self._make_room(calls.request.missing)
                return
            self._asked(_ask(calls.request, self))

    def _make_room(self, missing: int) -> None:
        """See to it that the rest of the first frame fits behind what is there of it."""
        have = self._end - self._begin
        if have and missing <= len(self._room) - self._end:
            return
        old, size = self._room, max(have + missing, _ROOM_BYTES)
        if size > len(old) or (have == 0 and len(old) > _ROOM_BYTES):
            self._room = memoryview(bytearray(size))
            self.calls.request.bind(self._room)
        self._room[:have] = old[self._begin : self._end]
        self._begin, self._end = 0, have

    def _wake(self) -> None:
        self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self.calls.awake = False
        self._leave()

    def _leave(self) -> None:
        if self.calls.output.length and self.transport is not None:
            self.transport.write(self.calls.output.take())

    # --- deadlines and the end

    def _set_alarm(self, monotonic_ms: int) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self.calls.alarm_ms = monotonic_ms
        left_ms = monotonic_ms - self._clock.monotonic_ms()
        self._alarm = self._clock.wake_at(self._clock.now_ms() + left_ms, self._sweep)

    def _sweep(self) -> None:
        """Fail the calls whose time is over; the others are looked at when the next one's is."""
        self._alarm, self.calls.alarm_ms = None, NEVER_MS
        now_ms = self._clock.monotonic_ms()
        silent_ms = 0
        pending = self.calls.pending
        for opaque in [o for o, call in pending.items() if call.deadline_ms <= now_ms]:
            call = pending.pop(opaque)
            if call.reads == self.calls.reads and now_ms - call.sent_ms >= SILENT_MS:
                silent_ms = now_ms - call.sent_ms
            message = f"no answer to request {call.code} within {call.timeout_ms} ms"
            call.failed(PeerTimeout(message, address=self._address))
        if silent_ms:
            self.abort(f"nothing came for {silent_ms} ms")
        elif pending:
            self._set_alarm(min(call.deadline_ms for call in pending.values()))

    def _end_calls(self) -> None:
        if self.transport is None:
            return
        self.transport = None
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._lost(self)
        pending, self.calls.pending = self.calls.pending, {}
        for call in pending.values():
            call.failed(self._lost_error())
        self._wake_writers()

    def _wake_writers(self) -> None:
        if self._resumed is not None:
            self._resumed.set_result(None)
            self._resumed = None

    def _lost_error(self) -> PeerLost:
        return PeerLost(self._cause or "the connection ended", address=self._address)


def _ask(request: Request, connection: PeerConnection) -> PeerRequest:
    return PeerRequest(
        code=request.code,
        ext=request.ext(),
        body=request.body(),
        remark=request.remark(),
        oneway=request.is_oneway(),
        opaque=request.opaque,
        encoding=request.encoding,
        version=request.version,
        language=request.language,
        connection=connection,
    )
