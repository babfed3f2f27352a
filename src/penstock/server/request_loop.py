"""Serves the requests of one read: frames in, handlers, one output. No asyncio, no sockets.

Sends, pulls, commits of offsets, pops and acks are handled in the connection's buffer. All others
are copied into a Command for the service's router. Answers that are not a response yet are left in
`deferred` for the answer executor.
"""

import logging
from array import array
from collections.abc import Callable, Mapping
from time import perf_counter_ns
from typing import Any, Protocol

from penstock.broker.consumers.offset_commits import OffsetCommits
from penstock.broker.pull.pull_handler import PullHandler
from penstock.broker.send import SEND_BATCH_MESSAGE, SEND_MESSAGE, SEND_MESSAGE_V2, SendHandler
from penstock.errors import PenstockError, SystemBusy
from penstock.rpc.answers import Answer, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import InPlaceHandler, bug_text
from penstock.store.disk import disk_failure
from penstock.store.put import StoreWriter
from penstock.wire.codes import CUT_CODES
from penstock.wire.frame import BINARY, FRAME_BYTES_MAX, HEADER_BYTES_MAX, Request
from penstock.wire.output import Output, response

log = logging.getLogger(__name__)

_FAST_CODES = 512  # codes below this are found by a table of these kinds
_SEND, _PULL, _COMMIT = 1, 2, 3
SLICE_NS = 2_000_000
"""Other connections are served after one has taken this long, not counting sends: a read of them is
short."""
_SLICE_NS = SLICE_NS
RPC_BOUNDS_NS = tuple(ms * 1_000_000 for ms in (1, 3, 5, 7, 10, 100, 1_000, 2_000, 3_000))
"""Buckets of the time of requests, as in RocketMQ's metrics."""
APPEND_BOUNDS_NS = tuple(
    us * 1_000 for us in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 5_000, 20_000, 100_000)
)
SEND_CODES = (SEND_MESSAGE, SEND_MESSAGE_V2, SEND_BATCH_MESSAGE)
_SEND_V1, _SEND_V2 = SEND_MESSAGE, SEND_MESSAGE_V2
_RPC_WIDTH = len(RPC_BOUNDS_NS) + 2  # a count for each bound, one above them, and the sum
_RPC_BUCKETS = len(RPC_BOUNDS_NS)
_APPEND_BUCKETS = len(APPEND_BOUNDS_NS)
_CREATIONS_MAX = 4  # topics that the sends of one read may create: each creates files
_BINARY = BINARY
_SUCCESS = 0
_SYSTEM_ERROR = 1
_RESPONSE = 1
_ONEWAY = 2


class AccessCheck(Protocol):
    """Decides whether a request is allowed: access control, or the signatures of changes."""

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
        # The compiled ones of them are called directly, without a dictionary lookup. Their codes: a
        # byte per code, which is 0 for all other codes. Looked up once, here.
        self.send: SendHandler | None = None
        self.pull: PullHandler | None = None
        self.commits: OffsetCommits | None = None
        kinds = bytearray(_FAST_CODES)
        for code, handler in self.in_place.items():
            if isinstance(handler, SendHandler):
                self.send = handler
                kinds[code] = _SEND
            elif isinstance(handler, PullHandler):
                self.pull = handler
                kinds[code] = _PULL
            elif isinstance(handler, OffsetCommits):
                self.commits = handler
                kinds[code] = _COMMIT
        self._kinds: memoryview = memoryview(bytes(kinds))
        # Handlers by what binary headers have of their codes.
        self._in_place_cut: dict[int, InPlaceHandler] = {
            cut: self.in_place[code] for cut, code in CUT_CODES.items() if code in self.in_place
        }
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
        # Sends of the last read whose response is in an output, by SEND_CODES; other requests of
        # the last read with a response, by request code << 16 | response code.
        self.sends_v1: int = 0
        self.sends_v2: int = 0
        self.sends_batch: int = 0
        self.answered: dict[int, int] = {}
        # Their times: for each of SEND_CODES, counts by RPC_BOUNDS_NS and the sum; the average time
        # of a send in its read, by APPEND_BOUNDS_NS, and the sum.
        self.send_times: memoryview = memoryview(array("q", bytes(8 * _RPC_WIDTH * 3)))
        self.append_times: memoryview = memoryview(array("q", bytes(8 * (_APPEND_BUCKETS + 2))))
        self._rpc_bounds: memoryview = memoryview(array("q", RPC_BOUNDS_NS))
        self._append_bounds: memoryview = memoryview(array("q", APPEND_BOUNDS_NS))
        # The last `serve` stopped before the end of the bytes, for the sake of other connections.
        self.stopped_early: bool = False
        # Set by the connection before each read: all requests are refused, memory is short.
        self.overloaded: bool = False
        # Messages have arrived that suspended requests wait for; the server resets it.
        self.arrivals: bool = False
        # (opaque, encoding, one-way, answer, code), and responses of clients to requests of ours,
        # by opaque; the server takes both after each read.
        self.deferred: list[tuple[int, int, bool, Any, int]] = []
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
        self.sends_v1 = self.sends_v2 = self.sends_batch = 0
        created = self.send.creations if self.send is not None else 0
        stop_ns = 0  # set by the first request other than a send
        timed = False
        open_to_all = self.access is None and not self.overloaded
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
                kind = 0
                if open_to_all and 0 <= request.code < _FAST_CODES:
                    kind = self._kinds[request.code]
                if request.flag & _RESPONSE:
                    self._add_response()
                elif kind == _SEND and self.send is not None:
                    try:
                        answer = self.send.handle(request, self.output, self.client, now_ms)
                        if answer is not None:
                            self._respond(answer)
                        elif request.flag & _ONEWAY == 0:
                            self._count_send(request.code)
                    except PenstockError as error:
                        self._refuse(error)
                    except Exception as error:
                        self._fail(error)
                else:
                    if not timed:
                        timed = True
                        stop_ns = self._time_ns() + _SLICE_NS
                    if kind == _COMMIT or (kind == _PULL and request.flag & _ONEWAY == 0):
                        self._serve_in_place(kind, now_ms)
                    else:
                        self._serve_one(now_ms)
        finally:
            if self.writer is not None and self.writer.publish():
                self.arrivals = True
        return at

    def finish_read(self, took_ns: int) -> None:
        """Count the sends of the last read, which took this time.

        If their responses wait for a flush or for replicas, only the time of the appends counts
        now: `count_sends` counts the rest.
        """
        sends = self.sends_v1 + self.sends_v2 + self.sends_batch
        if sends > 0:
            bucket = 0
            average_ns = took_ns // sends
            while bucket < _APPEND_BUCKETS and average_ns > self._append_bounds[bucket]:
                bucket += 1
            self.append_times[bucket] += sends
            self.append_times[_APPEND_BUCKETS + 1] += took_ns
            if self.send is not None and self.send.pending.length == 0:
                self.count_sends(self.sends_v1, self.sends_v2, self.sends_batch, took_ns)

    def count_sends(self, v1: int, v2: int, batch: int, took_ns: int) -> None:
        """Count sends with a successful response after this time, by SEND_CODES."""
        bucket = 0
        while bucket < _RPC_BUCKETS and took_ns > self._rpc_bounds[bucket]:
            bucket += 1
        times = self.send_times
        times[bucket] += v1
        times[_RPC_WIDTH + bucket] += v2
        times[2 * _RPC_WIDTH + bucket] += batch
        times[_RPC_WIDTH - 1] += v1 * took_ns
        times[2 * _RPC_WIDTH - 1] += v2 * took_ns
        times[3 * _RPC_WIDTH - 1] += batch * took_ns

    def _count_send(self, code: int) -> None:
        if code == _SEND_V2:
            self.sends_v2 += 1
        elif code == _SEND_V1:
            self.sends_v1 += 1
        else:
            self.sends_batch += 1

    def _note(self, response_code: int) -> None:
        """Count a response other than that to a send."""
        key = self.request.code << 16 | response_code
        self.answered[key] = self.answered.get(key, 0) + 1

    def _serve_in_place(self, kind: int, now_ms: int) -> None:
        """Serve a pull or a commit."""
        before = self.output.length
        try:
            if kind == _PULL and self.pull is not None:
                answer = self.pull.handle(self.request, self.output, self.client, now_ms)
            else:
                assert self.commits is not None
                answer = self.commits.handle(self.request, self.output, self.client, now_ms)
            if answer is not None:
                self._respond(answer)
            elif self.request.flag & _ONEWAY == 0:
                self._note(_SUCCESS)
        except PenstockError as error:
            self.output.length = before  # remove an incomplete response
            self._refuse(error)
        except Exception as error:
            self.output.length = before
            self._fail(error)

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
            if handler is None and request.encoding == _BINARY:
                handler = self._in_place_cut.get(request.code)
            if handler is None:
                self._respond(self.service.handle(command or self._command(now_ms)))
            else:
                answer = handler.handle(request, self.output, self.client, now_ms)
                self._respond(answer)
                if request.is_oneway():
                    self.output.length = before
                elif answer is None and handler is self.send:
                    self._count_send(request.code)
                elif answer is None:
                    self._note(_SUCCESS)
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
                self._note(answer.code)
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
            self.deferred.append((request.opaque, request.encoding, oneway, answer, request.code))

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
            self._note(code)
            self.output.append(response(code, request.opaque, request.encoding, remark=remark))
