"""The connection of a `Peer`: frames in and out, and the calls that wait for a response.

All frames of one loop iteration are sent in one write. One timer serves the deadlines of all calls.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from penstock.clock import Alarm, Clock, finish_within
from penstock.errors import PeerLost, PeerTimeout, WireError
from penstock.transport.pending_calls import BATCH_BYTES_MAX, NEVER_MS, Call, PendingCalls
from penstock.wire.frame import Request

log = logging.getLogger(__name__)

OUTPUT_BYTES_MAX = 1024 * 1024
"""Unsent bytes above which callers wait."""
RESPONSE_BYTES_MAX = 32 * 1024 * 1024
"""Unsent bytes above which the connection is closed if the server does not read responses: two
frames."""

CLOSE_MS = 1_000
"""How long a closing connection may take to send what was written."""
NEEDS_TLS_HINT = "the server may require TLS: turn it on in the client; otherwise retry"
SILENT_MS = 3_000
"""When a call times out and nothing was received since it was sent, and for at least this long, the
connection is considered dead."""

_BUFFER_BYTES = 64 * 1024
_TLS_ALERT = b"\x15\x03"


@dataclass(frozen=True, slots=True)
class Response:
    """A response of the server, or to a request of the server."""

    code: int = 0
    ext: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    remark: str | None = None
    version: int = 0
    language: int = 0


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """A request of the server."""

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
        on_request: Callable[[PeerRequest], None],
        on_lost: Callable[["PeerConnection"], None],
        *,
        frame_bytes_max: int,
        clock: Clock,
    ) -> None:
        self.transport: asyncio.Transport | None = None
        self.calls = PendingCalls(
            address, frame_bytes_max, self._set_alarm, self._schedule_flush, self._flush
        )
        self._address = address
        self._on_request = on_request
        self._on_lost = on_lost
        self._clock = clock
        self._cause = ""
        self.encrypted = False
        self.remote: tuple[str, int] | None = None  # numeric host and port of the server
        self._speaks_tls = False  # the server has answered in TLS, and this side does not use it
        self._alarm: Alarm | None = None
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self.calls.request.bind(self._buffer)
        self._begin = 0
        self._end = 0
        self._loop = asyncio.get_running_loop()
        self._resumed: asyncio.Future[None] | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()

    # --- for the peer

    @property
    def unsent(self) -> int:
        """Bytes that are not handed to the operating system yet."""
        if self.transport is None:
            return 0
        return self.transport.get_write_buffer_size() + self.calls.output.length

    @property
    def full(self) -> bool:
        """Whether callers have to wait because too much is unsent."""
        return self.transport is not None and (self.calls.paused or self.unsent > OUTPUT_BYTES_MAX)

    def expect(self, call: Call) -> int:
        """Add a call; returns the opaque of its request.

        Raises PeerLost if the connection is closed, PeerError if too many calls wait.
        """
        if self.transport is None:
            raise self._lost_error()
        return self.calls.expect(call)

    def forget(self, opaque: int) -> None:
        """Remove a call whose caller has given up."""
        self.calls.pending.pop(opaque, None)

    def write(self, frame: bytes) -> None:
        """Send bytes: whole frames, or the body of the one whose header was written last."""
        if self.transport is None:
            raise self._lost_error()
        if len(frame) > BATCH_BYTES_MAX:
            self._flush()
            self.transport.write(frame)
        else:
            self.calls.output.append(frame)
            self.calls.flush_soon()

    def write_response(self, frame: bytes) -> None:
        """As `write`, for responses to the server: closes the connection if too much is unsent."""
        if self.transport is not None:
            self.write(frame)
            if self.unsent > RESPONSE_BYTES_MAX:
                self.abort("the server does not read the responses to its requests")

    async def resumed(self) -> None:
        """Wait until the connection is no longer full, or is closed."""
        while self.full:
            if not self.calls.paused:  # uvloop tries to send in the next loop iteration
                await asyncio.sleep(0)
                continue
            if self._resumed is None:
                self._resumed = self._loop.create_future()
            await asyncio.shield(self._resumed)

    def abort(self, cause: str) -> None:
        """Close the connection now and fail its calls."""
        if self.transport is not None:
            self._cause = cause
            self.transport.abort()
            self._end_calls()

    async def close(self) -> None:
        """Close the connection after what was written is sent, or after CLOSE_MS."""
        transport = self.transport
        if transport is None:
            return
        self._cause = "closed by this client"
        self._flush()
        transport.close()
        self._end_calls()
        try:
            await finish_within(self._clock, CLOSE_MS, asyncio.shield(self._closed))
        except TimeoutError:
            transport.abort()

    # --- asyncio's protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=OUTPUT_BYTES_MAX)
        self.encrypted = transport.get_extra_info("ssl_object") is not None
        remote = transport.get_extra_info("peername")
        self.remote = None if remote is None else (remote[0], remote[1])

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._cause:
            self._cause = (
                f"the connection failed: {exc}" if exc else "the server closed the connection"
            )
        self._end_calls()
        if not self._closed.done():
            self._closed.set_result(None)

    def pause_writing(self) -> None:
        self.calls.paused = True

    def resume_writing(self) -> None:
        self.calls.paused = False
        self._wake_writers()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        self.calls.reads += 1
        try:
            self._read_frames()
        except WireError as error:
            self._speaks_tls = self._buffer[self._begin : self._begin + 2] == _TLS_ALERT
            reason = "this is TLS" if self._speaks_tls else str(error)
            log.warning("closing the connection to %s: invalid frame: %s", self._address, reason)
            self.abort(f"the server sent an invalid frame: {reason}")

    # --- frames

    def _read_frames(self) -> None:
        calls = self.calls
        now_ms = self._clock.monotonic_ms()
        while self.transport is not None:
            self._begin = calls.take_responses(self._begin, self._end, now_ms)
            if not calls.has_request:
                self._make_space(calls.request.missing)
                return
            self._on_request(_copy(calls.request, self))

    def _make_space(self, missing: int) -> None:
        """Make space for the rest of the first frame."""
        have = self._end - self._begin
        if have and missing <= len(self._buffer) - self._end:
            return
        old, size = self._buffer, max(have + missing, _BUFFER_BYTES)
        if size > len(old) or (have == 0 and len(old) > _BUFFER_BYTES):
            self._buffer = memoryview(bytearray(size))
            self.calls.request.bind(self._buffer)
        self._buffer[:have] = old[self._begin : self._end]
        self._begin, self._end = 0, have

    def _schedule_flush(self) -> None:
        self._loop.call_soon(self._flush_scheduled)

    def _flush_scheduled(self) -> None:
        self.calls.flush_scheduled = False
        self._flush()

    def _flush(self) -> None:
        if self.calls.output.length and self.transport is not None:
            self.transport.write(self.calls.output.take())

    # --- deadlines and closing

    def _set_alarm(self, monotonic_ms: int) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self.calls.alarm_ms = monotonic_ms
        left_ms = monotonic_ms - self._clock.monotonic_ms()
        self._alarm = self._clock.wake_at(self._clock.now_ms() + left_ms, self._expire)

    def _expire(self) -> None:
        """Fail the calls whose deadline has passed, and set the timer for the next one."""
        self._alarm, self.calls.alarm_ms = None, NEVER_MS
        now_ms = self._clock.monotonic_ms()
        silent_ms = 0
        pending = self.calls.pending
        for opaque in [o for o, call in pending.items() if call.deadline_ms <= now_ms]:
            call = pending.pop(opaque)
            if call.reads == self.calls.reads and now_ms - call.sent_ms >= SILENT_MS:
                silent_ms = now_ms - call.sent_ms
            message = f"no response to request {call.code} within {call.timeout_ms} ms"
            call.failed(PeerTimeout(message, address=self._address))
        if silent_ms:
            self.abort(f"nothing was received for {silent_ms} ms")
        elif pending:
            self._set_alarm(min(call.deadline_ms for call in pending.values()))

    def _end_calls(self) -> None:
        if self.transport is None:
            return
        self.transport = None
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._on_lost(self)
        pending, self.calls.pending = self.calls.pending, {}
        for call in pending.values():
            call.failed(self._lost_error())
        self._wake_writers()

    def _wake_writers(self) -> None:
        if self._resumed is not None:
            self._resumed.set_result(None)
            self._resumed = None

    def _lost_error(self) -> PeerLost:
        silent = self.calls.reads == 0 and not self.encrypted
        return PeerLost(
            self._cause or "the connection was closed",
            address=self._address,
            hint=NEEDS_TLS_HINT if silent or self._speaks_tls else None,
        )


def _copy(request: Request, connection: PeerConnection) -> PeerRequest:
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
