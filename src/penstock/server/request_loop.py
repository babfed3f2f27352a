"""Serves the requests of one read: frames in, handlers, one output. No asyncio, no sockets.

Requests with an `InPlaceRow` (sends and pulls) are handled in the connection's buffer. All others
are copied into a Command for the service's router. Answers that are not a response yet are left in
`deferred` for the answer executor.
"""

import logging
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any, Protocol

from penstock.broker.send import SendHandler
from penstock.errors import PenstockError, SystemBusy
from penstock.rpc.answers import Answer, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import InPlaceHandler, bug_text
from penstock.store.disk import disk_failure
from penstock.store.put import StoreWriter
from penstock.wire.frame import FRAME_BYTES_MAX, HEADER_BYTES_MAX, Request
from penstock.wire.output import Output, response

log = logging.getLogger(__name__)

_FAST_CODES = 512  # send codes below this are found by a table
SLICE_NS = 2_000_000
"""Other connections are served after one has taken this long, not counting sends: a read of them is
short."""
_SLICE_NS = SLICE_NS
_CREATIONS_MAX = 4  # topics that the sends of one read may create: each creates files
_SYSTEM_ERROR = 1
_RESPONSE = 1
_ONEWAY = 2


class AccessCheck(Protocol):
    """Access control."""

    def check(self, command: Command) -> Reply | None:
        """None if the request is allowed, else the refusal."""


class Service(Protocol):
    """What a server serves: a broker or a NameServer."""

    def handle(self, command: Command) -> Answer: ...

    def connected(self, client: int, peer: str, now_ms: int) -> None: ...

    def disconnected(self, client: int, now_ms: int) -> None: ...

    def due(self) -> int: ...

    def tick(self, now_ms: int) -> None: ...

    def clock_stepped(self, step_ms: int) -> None:
        """The system clock was set forward by this time, or back: shift what expires."""


class RequestLoop:
    """Serves the bytes of one connection at a time."""

    def __init__(
        self,
        service: Service,
        in_place: Mapping[int, InPlaceHandler] | None = None,
        access: AccessCheck | None = None,
        *,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        header_bytes_max: int = HEADER_BYTES_MAX,
        output_bytes_max: int = 1024 * 1024,
        time_ns: Callable[[], int] = perf_counter_ns,
    ) -> None:
        """`in_place` is that of the service's router; without `access` everything is allowed."""
        self.service: Service = service
        self.access: AccessCheck | None = access
        self._time_ns: Callable[[], int] = time_ns
        # Handlers by code, as the router marks them.
        self.in_place: dict[int, InPlaceHandler] = dict(in_place or {})
        # The compiled one of them is called directly, without a dictionary lookup. Its codes: a
        # byte per code, 1 where the code is a send. Looked up once, here.
        self.send: SendHandler | None = None
        for handler in self.in_place.values():
            if isinstance(handler, SendHandler):
                self.send = handler
        self._send_codes: memoryview = memoryview(
            bytes(
                self.send is not None and self.in_place.get(code) is self.send
                for code in range(_FAST_CODES)
            )
        )
        # Where sends are appended; what it appended is published after each read.
        self.writer: StoreWriter | None = self.send.writer if self.send is not None else None
        # The current request. Its fields refer to the bound buffer until the next one is read.
        self.request: Request = Request(frame_bytes_max, header_bytes_max)
        # Responses of this read; the server takes them after `serve`.
        self.output: Output = Output()
        self.output_bytes_max: int = output_bytes_max
        # The connection whose bytes are served, until the next `set_client`.
        self.client: int = 0
        self.peer: str = ""
        # Counters since the start; refusals by the error's name.
        self.requests: int = 0
        self.refusals: dict[str, int] = {}
        # The last `serve` stopped before the end of the bytes, for the sake of other connections.
        self.stopped_early: bool = False
        # Set by the connection before each read: all requests are refused, memory is short.
        self.overloaded: bool = False
        # Messages have arrived that suspended requests wait for; the server resets it.
        self.arrivals: bool = False
        # (opaque, encoding, one-way, answer), and responses of clients to requests of ours, by
        # opaque; the server takes both after each read.
        self.deferred: list[tuple[int, int, bool, Any]] = []
        self.responses: list[tuple[int, Reply]] = []

    def bind(self, buffer: memoryview, born_host: bytes) -> None:
        """Read from this buffer."""
        self.request.bind(buffer)
        if self.send is not None:
            self.send.bind(buffer, born_host)

    def set_client(self, client: int, peer: str, born_host: bytes) -> None:
        """Name the connection whose bytes are in the buffer."""
        self.client = client
        self.peer = peer
        if self.send is not None:
            self.send.set_born_host(born_host)

    def serve(self, at: int, end: int, now_ms: int) -> int:
        """Serve the whole frames in [at, end); returns where the first unserved one begins.

        Raises a WireError for a frame that violates the protocol; the responses to the requests
        before it are in the output. A valid frame with invalid fields gets an error response.
        """
        request = self.request
        self.stopped_early = False
        created = self.send.creations if self.send is not None else 0
        stop_ns = 0  # set by the first request other than a send
        timed = False
        try:
            while at < end:
                if (
                    self.output.length >= self.output_bytes_max
                    or (timed and self._time_ns() >= stop_ns)
                    or (self.send is not None and self.send.creations - created >= _CREATIONS_MAX)
                ):
                    self.stopped_early = True
                    break
                length = request.read(at, end)
                if length == 0:
                    break
                at += length
                self.requests += 1
                if request.flag & _RESPONSE:
                    self._add_response()
                elif (
                    self.send is not None
                    and self.access is None
                    and not self.overloaded
                    and 0 <= request.code < _FAST_CODES
                    and self._send_codes[request.code]
                ):
                    try:
                        answer = self.send.handle(request, self.output, self.client, now_ms)
                        if answer is not None:
                            self._respond(answer)
                    except PenstockError as error:
                        self._refuse(error)
                    except Exception as error:
                        self._fail(error)
                else:
                    if not timed:
                        timed = True
                        stop_ns = self._time_ns() + _SLICE_NS
                    self._serve_one(now_ms)
        finally:
            if self.writer is not None and self.writer.publish():
                self.arrivals = True
        return at

    def _serve_one(self, now_ms: int) -> None:
        """Serve any request; a bug in a handler affects this request only."""
        request = self.request
        before = self.output.length
        try:
            if self.overloaded:
                raise SystemBusy(
                    "[OVERLOAD] unfinished requests and unsent responses take more memory than "
                    "memory_bytes_max allows"
                )
            command = None
            if self.access is not None:
                command = self._command(now_ms)
                refused = self.access.check(command)
                if refused is not None:
                    self._count("NoPermission")
                    self._respond(refused)
                    return
            handler = self.in_place.get(request.code)
            if handler is None:
                self._respond(self.service.handle(command or self._command(now_ms)))
            else:
                self._respond(handler.handle(request, self.output, self.client, now_ms))
                if request.is_oneway():
                    self.output.length = before
        except PenstockError as error:
            self.output.length = before  # remove an incomplete response
            self._refuse(error)
        except Exception as error:
            self.output.length = before
            self._fail(error)

    def _command(self, now_ms: int) -> Command:
        request = self.request
        return Command(
            request.code,
            request.ext(),
            request.body(),
            client=self.client,
            peer=self.peer,
            now_ms=now_ms,
            flag=request.flag,
            opaque=request.opaque,
            version=request.version,
            language=request.language,
            encoding=request.encoding,
            remark=request.remark(),
        )

    def _add_response(self) -> None:
        request = self.request
        reply = Reply(request.code, request.ext(), request.body(), request.remark())
        self.responses.append((request.opaque, reply))

    def _respond(self, answer: Answer) -> None:
        if answer is None:
            return
        request = self.request
        oneway = request.flag & _ONEWAY != 0
        if isinstance(answer, Reply):
            if not oneway:
                self.output.append(
                    response(
                        answer.code,
                        request.opaque,
                        request.encoding,
                        ext=answer.ext,
                        body=answer.body,
                        remark=answer.remark,
                    )
                )
        else:
            self.deferred.append((request.opaque, request.encoding, oneway, answer))

    def _fail(self, error: Exception) -> None:
        failure = disk_failure(error)
        if failure is not None:
            log.error("a request failed: %s", failure)
            self._refuse(failure)
            return
        log.exception("request %d from %s failed", self.request.code, self.peer)
        self._count(type(error).__name__)
        self._respond_error(_SYSTEM_ERROR, bug_text(error))

    def _refuse(self, error: PenstockError) -> None:
        self._count(type(error).__name__)
        self._respond_error(error.code, error.remark())

    def _count(self, name: str) -> None:
        self.refusals[name] = self.refusals.get(name, 0) + 1

    def _respond_error(self, code: int, remark: str) -> None:
        request = self.request
        if not request.is_oneway():
            self.output.append(response(code, request.opaque, request.encoding, remark=remark))
