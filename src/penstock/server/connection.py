"""One client's connection: a thin BufferedProtocol that runs on uvloop and on stdlib asyncio.

Bytes land in the server's one shared buffer, because almost every read holds whole frames only. The
rest of an unfinished frame moves into a buffer of the connection's own, which grows with the bytes
that have really come, so that a peer pays for the memory it takes by sending.

Reading pauses while
* unsent answers are longer than `output_bytes_max`,
* the last read's requests could not all be served because the output was full, or
* too many of its requests are under way in the pool.
"""

import asyncio
import logging
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from penstock.errors import SystemBusy, WireError
from penstock.wire.message import encode_host
from penstock.wire.output import response

if TYPE_CHECKING:
    from penstock.broker.long_polling import SuspendedRequest
    from penstock.server.server import Server

log = logging.getLogger(__name__)

OWN_BYTES_MIN = 4 * 1024
"""First size of a connection's own buffer, unless its frame needs less."""
STUCK_MS = 1_000
"""A connection that was silent this long is the first to go when memory is short."""
UNDER_WAY_MAX = 256
"""Requests of one connection in the pool above which it is not read from."""


class ClientConnection(asyncio.BufferedProtocol):
    """Reads frames, writes answers; what they mean is the server's business."""

    def __init__(self, server: "Server") -> None:
        self._server = server
        self._transport: Any = None
        self._own: memoryview | None = None
        self._from = 0
        self._have = 0
        self._need = 0
        self._skip = 0
        self._stalled = False
        self._choked = False
        self._paused = False
        self._held_back: list[tuple[SuspendedRequest, bool]] = []
        self._backlog = 0
        self._closing = False
        self._cut = False
        self.under_way = 0
        self.client = 0
        self.peer = ""
        self.born_host = bytes(8)
        self.active_ms = 0
        self.frame_since_ms = 0

    # --- the life of the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        name = transport.get_extra_info("peername")
        if not name:  # gone already
            transport.close()
            return
        host, port = name[0].split("%")[0], name[1]
        self.peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.born_host = encode_host(self.peer)
        high = self._server.config().output_bytes_max
        self._transport.set_write_buffer_limits(high=high, low=high // 4)
        self.active_ms = self._server.now_ms()
        self._server.joined(self)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._server.memory -= self._backlog
        self._backlog = 0
        self._drop_own()
        self._held_back.clear()
        if self.client:
            self._server.left(self)

    def close(self, why: str) -> None:
        """End the connection once what was written has left."""
        if self._transport is not None:
            log.info("closing %s: %s", self.peer, why)
            self._closing = True
            self._transport.close()

    def abort(self, why: str) -> None:
        """End the connection at once; unsent answers are lost."""
        if self._transport is not None:
            log.warning("closing %s: %s", self.peer, why)
            self._closing = True
            self._transport.abort()

    def cut(self, why: str) -> None:
        """As `abort`, but after the present call: the caller may be in the midst of something."""
        self._closing = self._cut = True
        self._drop_own()
        self._server.memory -= self._backlog  # as good as gone
        self._backlog = 0
        self._server.soon(self.abort, why)

    @property
    def unsent(self) -> int:
        """Bytes that were written here and have not left."""
        return 0 if self._transport is None else int(self._transport.get_write_buffer_size())

    # --- bytes in

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._own is None:
            return self._server.buffer
        return self._own[self._have :]

    def buffer_updated(self, count: int) -> None:
        if self._closing:  # asyncio's TLS may read once more from within close()
            return
        now_ms = self._server.now_ms()
        self.active_ms = now_ms
        if self._own is None:
            at = 0
            if self._skip:
                at = min(self._skip, count)
                self._skip -= at
            if at < count:
                self._serve(self._server.buffer, at, count, now_ms)
        else:
            self._have += count
            if self._stalled:  # one more read came through after reading was paused
                self._need = self._have + OWN_BYTES_MIN
                self._grow()
            elif self._have >= self._need:
                self._serve_own(now_ms)
            elif self._have == len(self._own):
                self._grow()

    def _serve_own(self, now_ms: int) -> None:
        own, have = self._own, self._have
        assert own is not None
        request_loop = self._server.request_loop
        request_loop.bind(own, self.born_host)
        try:
            self._serve(own, self._from, have, now_ms)
        finally:
            request_loop.bind(self._server.buffer, self.born_host)

    def _serve(self, view: memoryview, at: int, end: int, now_ms: int) -> None:
        server = self._server
        request_loop = server.request_loop
        request_loop.set_client(self.client, self.peer, self.born_host)
        request_loop.overloaded = server.is_over(server.config().memory_bytes_max)
        began = perf_counter_ns()
        fault: WireError | None = None
        try:
            at = request_loop.serve(at, end, now_ms)
        except WireError as error:
            fault = error
        server.note_lag(perf_counter_ns() - began, request_loop.request.code)
        # What is left is put aside before anything is written: a write may lead to another read.
        if fault is None and at < end:
            self._keep(view, at, end, now_ms)
        else:
            self._drop_own()
        server.after_turn(self, now_ms)
        if fault is not None:
            server.bad_frames += 1
            self.close(f"bad frame: {fault.remark()}")
        elif self._stalled:
            if not self._choked:  # the transport took all of it: go on after others had their turn
                server.soon(self._go_on)
            self._adjust()
        elif (
            self._own is not None
            and len(self._own) > OWN_BYTES_MIN  # small remainders are what the rest is for
            and server.is_over(server.held_max())
        ):
            self._make_room()

    def _keep(self, view: memoryview, at: int, end: int, now_ms: int) -> None:
        """Put what is left of a read aside: part of a frame, or frames that have to wait."""
        request_loop = self._server.request_loop
        if view is self._own and request_loop.stopped_early:  # the rest stays where it is
            self._from = at
            self.frame_since_ms = now_ms
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
        self._own, self._from, self._have, self._need = own, 0, have, need
        self._stalled = request_loop.stopped_early
        self.frame_since_ms = now_ms
        self._server.memory += size

    def _grow(self) -> None:
        assert self._own is not None
        if self._server.is_over(self._server.held_max()) and not self._make_room():
            return
        size = max(self._have, min(self._need, 2 * len(self._own)))
        own = memoryview(bytearray(size))
        own[: self._have] = self._own[: self._have]
        self._server.memory += size - len(self._own)
        self._own = own

    def _make_room(self) -> bool:
        """Cut off who is stuck, or give up this frame; whether it may go on."""
        if self._server.cut_slowest() and not self._closing:
            return True
        if self._stalled:
            self.abort("it sent more while its requests had to wait (memory_bytes_max)")
        elif not self._closing:
            self._refuse_frame()
        return False

    def _refuse_frame(self) -> None:
        """No memory for this frame: say so if its header has come, and let its bytes pass by."""
        own, have = self._own, self._have
        assert own is not None
        limit = self._server.held_max()
        busy = SystemBusy.over(
            "[OVERLOAD] unfinished requests and unsent responses of all clients",
            limit=limit,
            figure=self._server.memory,
            setting="memory_bytes_max",
        )
        header = self._server.peek_header(own[:have])
        if header is None:
            self.abort(busy.remark())
            return
        opaque, encoding, oneway = header
        self._skip = self._need - have
        self._drop_own()
        if not oneway:
            self.write(response(busy.code, opaque, encoding, remark=busy.remark()))

    def _drop_own(self) -> None:
        if self._own is not None:
            self._server.memory -= len(self._own)
            self._own = None
            self._stalled = False
            self.frame_since_ms = 0

    # --- bytes out

    def write(self, data: bytes) -> None:
        """Send; what does not leave at once waits in the transport."""
        if self._transport is None or self._transport.is_closing():
            return
        self._transport.write(data)
        self.account()
        if self._backlog and self._server.is_over(self._server.held_max()):
            self._server.cut_slowest()

    def account(self) -> None:
        """Tell the server how much has not left."""
        if self._cut:
            return
        unsent = self.unsent
        if unsent != self._backlog:
            self._server.memory += unsent - self._backlog
            self._backlog = unsent

    def slowness(self, now_ms: int) -> tuple[bool, int]:
        """The greater, the more this connection keeps others from being served."""
        held = self._backlog + (len(self._own) if self._own is not None else 0)
        if self._cut or not held:
            return False, 0
        stuck = self._closing or self._choked or now_ms - self.active_ms >= STUCK_MS
        return stuck, held

    def pause_writing(self) -> None:
        self._choked = True
        self._adjust()

    def resume_writing(self) -> None:
        self._choked = False
        self.active_ms = self._server.now_ms()
        self.account()
        held, self._held_back = self._held_back, []
        for one, last in held:
            self._server.answer_executor.wake(one, last)
        self._go_on()

    def hold_back(self, held: "SuspendedRequest", last: bool) -> bool:
        """Whether a woken pull has to wait until this connection takes answers again."""
        if self._choked:
            self._held_back.append((held, last))
        return self._choked

    def adjust_work(self, change: int) -> None:
        """So many more (or fewer) of its requests are under way elsewhere."""
        self.under_way += change
        if self.under_way in (UNDER_WAY_MAX, UNDER_WAY_MAX - 1):
            self._adjust()

    def _go_on(self) -> None:
        if self._stalled and not self._choked and self._transport is not None:
            self._serve_own(self._server.now_ms())
        self._adjust()

    def _adjust(self) -> None:
        wanted = self._choked or self._stalled or self.under_way >= UNDER_WAY_MAX
        if wanted != self._paused and self._transport is not None:
            self._paused = wanted
            if wanted:
                self._transport.pause_reading()
            elif not self._transport.is_closing():
                self._transport.resume_reading()
