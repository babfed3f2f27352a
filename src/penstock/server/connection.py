"""One client's connection: a thin BufferedProtocol that runs on uvloop and on asyncio's own loop.

Bytes are read into the server's shared buffer, because almost every read holds whole frames. The
rest of an unfinished frame moves into a buffer of the connection's own. It grows with the bytes
that have arrived, so a client pays for the memory it takes by sending.

Reading pauses while
* unsent responses are longer than `output_bytes_max`,
* requests of the last read wait because the output was full,
* too many of the client's requests are in flight in the thread pool, or
* the last read filled its buffer: libuv would read the same socket up to 32 times in a row, so the
  connection continues in the next loop iteration, after other connections were served.
"""

import asyncio
import logging
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Protocol

from penstock.config import ServerConfig
from penstock.errors import SystemBusy, WireError
from penstock.server.full_reads import FullReads
from penstock.server.memory_limit import MemoryLimit
from penstock.server.request_loop import RequestLoop
from penstock.wire.frame import Request
from penstock.wire.message import encode_host
from penstock.wire.output import response

if TYPE_CHECKING:
    from penstock.broker.long_polling import SuspendedRequest

log = logging.getLogger(__name__)

OWN_BYTES_MIN = 4 * 1024
"""First size of a connection's own buffer, unless its frame needs less."""
STUCK_MS = 1_000
"""When memory is short, connections are closed that were silent this long, or of whose frame less
than PROGRESS_BYTES arrived in this time."""
PROGRESS_BYTES = 64 * 1024
FRAME_MS_MAX = 10_000
"""When memory is short, a frame that takes longer is not waited for."""
IN_FLIGHT_MAX = 256
"""Requests of one connection in the thread pool above which it is not read from."""


class ConnectionServer(Protocol):
    """What a connection needs of its server."""

    buffer: memoryview
    full_reads: FullReads
    request_loop: RequestLoop
    memory: MemoryLimit
    bad_frames: int

    def config(self) -> ServerConfig: ...

    def now_ms(self) -> int: ...

    def monotonic_ms(self) -> int: ...

    def soon(self, call: Callable[..., None], *arguments: Any) -> None: ...

    def connected(self, connection: "ClientConnection") -> None: ...

    def disconnected(self, connection: "ClientConnection") -> None: ...

    def after_read(self, connection: "ClientConnection") -> None:
        """Send the responses of a read and execute its other answers."""

    def report_time(self, ns: int, code: int) -> None:
        """Take the time of a read, whose last request had this code."""

    def wake(self, suspended: "SuspendedRequest", last: bool) -> None:
        """Retry a suspended request."""


class ClientConnection(asyncio.BufferedProtocol):
    """Reads requests and writes responses."""

    def __init__(self, server: ConnectionServer) -> None:
        self._server = server
        self._transport: Any = None
        # The connection's own buffer: bytes [_start, _end) are not served yet; the first frame is
        # whole when _end reaches _frame_end. None if the last read was served to its end.
        self._own: memoryview | None = None
        self._start = 0
        self._end = 0
        self._frame_end = 0
        # Bytes still to come of a frame that was refused.
        self._discard = 0
        # Whole requests wait in the own buffer because the output was full.
        self._requests_wait = False
        # The transport holds more than `output_bytes_max`; reading is paused.
        self._write_paused = False
        self._read_paused = False
        # The last read filled its buffer; reading continues when it is the connection's turn.
        self._yielding = False
        # Requests that were woken while writing was paused.
        self._postponed: list[tuple[SuspendedRequest, bool]] = []
        # Unsent bytes, as counted in `memory`.
        self._unsent_counted = 0
        self._closing = False
        self._aborting = False
        self.in_flight = 0
        self.client = 0  # the number of the connection; 0 until it is accepted
        self.peer = ""
        self.born_host = bytes(8)
        # By the monotonic clock: when bytes were last read or sent, and since when the own buffer
        # is in use.
        self.active_ms = 0
        self.frame_since_ms = 0
        # When the unfinished frame last got PROGRESS_BYTES, and the end of the own buffer then.
        self._progress_ms = 0
        self._progress_end = 0

    # --- opening and closing

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        name = transport.get_extra_info("peername")
        if not name:  # closed already
            transport.close()
            return
        host, port = name[0].split("%")[0], name[1]
        self.peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.born_host = encode_host(self.peer)
        high = self._server.config().output_bytes_max
        self._transport.set_write_buffer_limits(high=high, low=high // 4)
        self.active_ms = self._server.monotonic_ms()
        self._server.connected(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._server.memory.used -= self._unsent_counted
        self._unsent_counted = 0
        self._drop_own()
        self._postponed.clear()
        if self.client:
            self._server.disconnected(self)

    def close(self, why: str) -> None:
        """Close the connection after what was written is sent."""
        if self._transport is not None:
            log.info("closing %s: %s", self.peer, why)
            self._closing = True
            self._transport.close()

    def abort(self, why: str) -> None:
        """Close the connection at once; unsent responses are lost."""
        if self._transport is not None:
            log.warning("closing %s: %s", self.peer, why)
            self._closing = True
            self._transport.abort()

    def abort_soon(self, why: str) -> None:
        """As `abort`, but after the present call returns: the caller may be serving a request."""
        self._closing = self._aborting = True
        self._drop_own()
        self._server.memory.used -= self._unsent_counted
        self._unsent_counted = 0
        self._server.soon(self.abort, why)

    @property
    def unsent(self) -> int:
        """Bytes that were written and are not sent yet."""
        return 0 if self._transport is None else int(self._transport.get_write_buffer_size())

    # --- reading

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._own is None:
            return self._server.full_reads.view
        return self._own[self._end :]

    def buffer_updated(self, count: int) -> None:
        if self._closing:  # asyncio's TLS may read once more from within close()
            return
        now_ms = self._server.now_ms()
        self.active_ms = self._server.monotonic_ms()
        own = self._own
        full_reads = self._server.full_reads
        size = len(full_reads.view) if own is None else len(own) - self._end
        self._take_bytes(count, now_ms)
        if count == size and not self._closing:
            self._yielding = True
            self._adjust_reading()
            full_reads.wait(self)

    def end_yield(self) -> None:
        """Read again, after other connections were served."""
        self._yielding = False
        self._adjust_reading()

    def _take_bytes(self, count: int, now_ms: int) -> None:
        """Serve the bytes that were read, or put them aside."""
        if self._own is None:
            at = 0
            if self._discard:
                at = min(self._discard, count)
                self._discard -= at
            if at < count:
                self._serve(self._server.buffer, at, count, now_ms)
        else:
            self._end += count
            if self._end - self._progress_end >= PROGRESS_BYTES:
                self._note_progress()
            if self._requests_wait:  # one more read arrived after reading was paused
                self._frame_end = self._end + OWN_BYTES_MIN
                self._grow_own()
            elif self._end >= self._frame_end:
                self._serve_own(now_ms)
            elif self._end == len(self._own):
                self._grow_own()

    def _serve_own(self, now_ms: int) -> None:
        own, end = self._own, self._end
        assert own is not None
        request_loop = self._server.request_loop
        request_loop.bind(own, self.born_host)
        try:
            self._serve(own, self._start, end, now_ms)
        finally:
            request_loop.bind(self._server.buffer, self.born_host)

    def _serve(self, view: memoryview, at: int, end: int, now_ms: int) -> None:
        server = self._server
        request_loop = server.request_loop
        request_loop.set_client(self.client, self.peer, self.born_host)
        request_loop.overloaded = server.memory.is_exceeded()
        if request_loop.overloaded:
            server.memory.report_refusal(self.active_ms)
        began = perf_counter_ns()
        fault: WireError | None = None
        try:
            at = request_loop.serve(at, end, now_ms)
        except WireError as error:
            fault = error
        server.report_time(perf_counter_ns() - began, request_loop.request.code)
        # The rest is put aside before anything is written: a write may lead to another read.
        if fault is None and at < end:
            self._keep(view, at, end)
        else:
            self._drop_own()
        server.after_read(self)
        if fault is not None:
            server.bad_frames += 1
            self.close(f"invalid frame: {fault.remark()}")
        elif self._requests_wait:
            if not self._write_paused:  # all was sent: go on after other connections were served
                server.soon(self._go_on)
            self._adjust_reading()
        elif (
            self._own is not None
            and len(self._own) > OWN_BYTES_MIN  # small buffers are covered by the reserve
            and server.memory.is_soft_exceeded()
        ):
            self._make_room()

    def _keep(self, view: memoryview, at: int, end: int) -> None:
        """Put the rest of a read aside: part of a frame, or requests that have to wait."""
        request_loop = self._server.request_loop
        if view is self._own and request_loop.stopped_early:  # the rest stays where it is
            self._start = at
            self._note_progress()
            self.frame_since_ms = self._progress_ms
            return
        have = end - at
        if request_loop.stopped_early:
            need = size = have + OWN_BYTES_MIN
        else:
            need = have + request_loop.request.missing
            size = min(need, max(2 * have, OWN_BYTES_MIN))
        own = memoryview(bytearray(size))
        own[:have] = view[at:end]
        self._drop_own()
        self._own, self._start, self._end, self._frame_end = own, 0, have, need
        self._requests_wait = request_loop.stopped_early
        self._note_progress()
        self.frame_since_ms = self._progress_ms
        self._server.memory.used += size

    def _note_progress(self) -> None:
        self._progress_ms = self._server.monotonic_ms()
        self._progress_end = self._end

    def _grow_own(self) -> None:
        assert self._own is not None
        if self._server.memory.is_soft_exceeded() and not self._make_room():
            return
        size = max(self._end, min(self._frame_end, 2 * len(self._own)))
        own = memoryview(bytearray(size))
        own[: self._end] = self._own[: self._end]
        self._server.memory.used += size - len(self._own)
        self._own = own

    def _make_room(self) -> bool:
        """Close the slowest connection, or refuse this frame; whether this one may go on."""
        if self._server.memory.close_slowest(self._server.monotonic_ms()) and not self._closing:
            return True
        if self._requests_wait:
            self.abort("it sent more while its requests had to wait (memory_bytes_max)")
        elif not self._closing:
            self._refuse_frame()
        return False

    def _refuse_frame(self) -> None:
        """Discard the frame, with a response if its header has arrived."""
        own, have = self._own, self._end
        assert own is not None
        busy = SystemBusy.over(
            "[OVERLOAD] unfinished requests and unsent responses of all clients",
            limit=self._server.memory.soft_limit,
            figure=self._server.memory.used,
            setting="memory_bytes_max",
        )
        self._server.memory.report_refusal(self._server.monotonic_ms())
        request = _read_header(own[:have], self._server.config())
        if request is None:
            self.abort(busy.remark())
            return
        self._discard = self._frame_end - have
        self._drop_own()
        if not request.is_oneway() and not request.is_response():
            self.write(response(busy.code, request.opaque, request.encoding, remark=busy.remark()))

    def _drop_own(self) -> None:
        if self._own is not None:
            self._server.memory.used -= len(self._own)
            self._own = None
            self._requests_wait = False
            self.frame_since_ms = 0

    # --- writing

    def write(self, data: bytes) -> None:
        """Send; the transport keeps what can't be sent at once."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(data)
        self.count_unsent()
        if self._unsent_counted and self._server.memory.is_soft_exceeded():
            self._server.memory.close_slowest(self._server.monotonic_ms())

    def count_unsent(self) -> None:
        """Count the unsent bytes in the server's memory."""
        if self._aborting:
            return
        unsent = self.unsent
        if unsent != self._unsent_counted:
            self._server.memory.used += unsent - self._unsent_counted
            self._unsent_counted = unsent

    def slowness(self, now_ms: int) -> tuple[bool, int]:
        """Whether the client is stuck, and the bytes that it makes the server hold."""
        held = self._unsent_counted + (len(self._own) if self._own is not None else 0)
        if self._aborting or not held:
            return False, 0
        stuck = self._closing or self._write_paused or now_ms - self.active_ms >= STUCK_MS
        if self._own is not None and not self._requests_wait:
            stuck = (
                stuck
                or now_ms - self._progress_ms >= STUCK_MS
                or now_ms - self.frame_since_ms >= FRAME_MS_MAX
            )
        return stuck, held

    def pause_writing(self) -> None:
        self._write_paused = True
        self._adjust_reading()

    def resume_writing(self) -> None:
        self._write_paused = False
        self.active_ms = self._server.monotonic_ms()
        self.count_unsent()
        postponed, self._postponed = self._postponed, []
        for suspended, last in postponed:
            self._server.wake(suspended, last)
        self._go_on()

    def postpone(self, suspended: "SuspendedRequest", last: bool) -> bool:
        """Whether a woken request has to wait until the client reads its responses."""
        if self._write_paused:
            self._postponed.append((suspended, last))
        return self._write_paused

    def adjust_in_flight(self, change: int) -> None:
        """Count requests whose response waits for something else than the connection."""
        self.in_flight += change
        if self.in_flight in (IN_FLIGHT_MAX, IN_FLIGHT_MAX - 1):
            self._adjust_reading()

    def _go_on(self) -> None:
        if self._requests_wait and not self._write_paused and self._transport is not None:
            self._serve_own(self._server.now_ms())
        self._adjust_reading()

    def _adjust_reading(self) -> None:
        pause = (
            self._write_paused
            or self._requests_wait
            or self._yielding
            or self.in_flight >= IN_FLIGHT_MAX
        )
        if pause != self._read_paused and self._transport is not None:
            self._read_paused = pause
            if pause:
                self._transport.pause_reading()
            elif not self._transport.is_closing():
                self._transport.resume_reading()


def _read_header(data: memoryview, config: ServerConfig) -> Request | None:
    """The request whose header is in `data`, without its body; None if there is no whole header."""
    if len(data) < 8:
        return None
    length = int.from_bytes(data[4:8], "big") & 0xFFFFFF
    if len(data) < 8 + length:
        return None
    frame = bytearray(data[: 8 + length])
    frame[0:4] = (4 + length).to_bytes(4, "big")
    request = Request(config.frame_bytes_max, config.header_bytes_max)
    request.bind(memoryview(frame))
    try:
        request.read(0, len(frame))
    except WireError:
        return None
    return request
