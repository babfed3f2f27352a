"""One read's worth of work: frames → handlers → one output. No asyncio, no sockets.

Sends (and, where given, pulls) go straight from the buffer to their handlers; everything else is
copied out into a Command for the service's router. Answers that are not ready now are left in
`deferred` for the server to carry on.
"""

import logging
from typing import Any, Protocol

from penstock.broker.send import SEND_BATCH_MESSAGE, SEND_MESSAGE, SEND_MESSAGE_V2, SendHandler
from penstock.errors import PenstockError, SystemBusy
from penstock.rpc.answers import Answer, Reply
from penstock.rpc.command import Command
from penstock.store.put import PutPath
from penstock.wire.frame import FRAME_BYTES_MAX, HEADER_BYTES_MAX, Request
from penstock.wire.output import Output, response

log = logging.getLogger(__name__)

_SEND_MESSAGE = SEND_MESSAGE
_SEND_MESSAGE_V2 = SEND_MESSAGE_V2
_SEND_BATCH_MESSAGE = SEND_BATCH_MESSAGE
_PULL_MESSAGE = 11
_LITE_PULL_MESSAGE = 361
_CREATIONS_MAX = 4  # topics that sends may make in one turn: each makes files
_SYSTEM_ERROR = 1
_RESPONSE = 1
_ONEWAY = 2


class Guard(Protocol):
    """Access control."""

    def enabled(self) -> bool: ...

    def check(self, command: Command) -> Reply | None: ...


class Service(Protocol):
    """What a server serves: a broker or a NameServer."""

    def handle(self, command: Command) -> Answer: ...

    def connected(self, client: int, peer: str, now_ms: int) -> None: ...

    def disconnected(self, client: int, now_ms: int) -> None: ...

    def due(self) -> int: ...

    def tick(self, now_ms: int) -> None: ...


class PullService(Protocol):
    """Reads messages: answers into the output, or by a value."""

    def handle(self, request: Request, output: Output, client: int, now_ms: int) -> Answer: ...


class RequestLoop:
    """Serves the bytes of one connection at a time."""

    def __init__(
        self,
        service: Service,
        path: PutPath | None = None,
        send: SendHandler | None = None,
        pull: PullService | None = None,
        guard: Guard | None = None,
        *,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        header_bytes_max: int = HEADER_BYTES_MAX,
        output_bytes_max: int = 1024 * 1024,
    ) -> None:
        self.service: Service = service
        self.path: PutPath | None = path
        self.send: SendHandler | None = send
        self.pull: PullService | None = pull
        self.guard: Guard | None = guard
        self.request: Request = Request(frame_bytes_max, header_bytes_max)
        self.output: Output = Output()
        self.output_bytes_max: int = output_bytes_max
        self.client: int = 0
        self.peer: str = ""
        self.requests: int = 0
        self.refusals: dict[str, int] = {}  # by the error's name
        self.full: bool = False  # stopped early, so that others have their turn
        self.busy: bool = False  # requests are refused: the server has no memory left for them
        self.attend: bool = False  # somebody waits for messages that have come
        self.deferred: list[tuple[int, int, bool, Any]] = []
        self.responses: list[tuple[int, Reply]] = []

    def bind(self, buffer: memoryview, born_host: bytes) -> None:
        """Take the buffer that later positions refer to."""
        self.request.bind(buffer)
        if self.send is not None:
            self.send.bind(buffer, born_host)

    def come_from(self, client: int, peer: str, born_host: bytes) -> None:
        """Name the connection whose bytes the buffer holds."""
        self.client = client
        self.peer = peer
        if self.send is not None:
            self.send.come_from(born_host)

    def serve(self, at: int, end: int, now_ms: int) -> int:
        """Handle the whole frames in [at, end); returns where the first one left begins.

        Raises a WireError for a frame that breaks the protocol; what was answered before it is in
        the output. A sound frame whose fields make no sense is answered with an error.
        """
        request = self.request
        self.full = False
        made = self.send.creations if self.send is not None else 0
        try:
            while at < end:
                if self.output.length >= self.output_bytes_max or (
                    self.send is not None and self.send.creations - made >= _CREATIONS_MAX
                ):
                    self.full = True
                    break
                length = request.read(at, end)
                if length == 0:
                    break
                at += length
                self.requests += 1
                if request.flag & _RESPONSE:
                    self._note_response()
                elif (
                    self.send is not None
                    and self.guard is None
                    and not self.busy
                    and (
                        request.code == _SEND_MESSAGE_V2
                        or request.code == _SEND_MESSAGE
                        or request.code == _SEND_BATCH_MESSAGE
                    )
                ):
                    try:
                        self.send.handle(request, self.output, now_ms)
                        if self.send.created:
                            self._give(self.send.take_created(now_ms))
                    except PenstockError as error:
                        self._refuse(error)
                    except Exception as error:
                        self._fail(error)
                else:
                    self._serve_slowly(now_ms)
        finally:
            if self.path is not None and self.path.settle():
                self.attend = True
        return at

    def _serve_slowly(self, now_ms: int) -> None:
        """Everything but plain sends; a bug in a handler is this request's trouble only."""
        request = self.request
        before = self.output.length
        try:
            if self.busy:
                raise SystemBusy(
                    "[OVERLOAD] unfinished requests and unsent answers take more memory than "
                    "memory_bytes_max allows"
                )
            command = None
            if self.guard is not None:
                command = self._command(now_ms)
                refused = self.guard.check(command)
                if refused is not None:
                    self._count("NoPermission")
                    self._give(refused)
                    return
            code = request.code
            if self.send is not None and code in (10, 310, 320):
                self.send.handle(request, self.output, now_ms)
                if self.send.created:
                    self._give(self.send.take_created(now_ms))
            elif self.pull is not None and code in (_PULL_MESSAGE, _LITE_PULL_MESSAGE):
                self._give(self.pull.handle(request, self.output, self.client, now_ms))
                if request.is_oneway():
                    self.output.length = before
            else:
                self._give(self.service.handle(command or self._command(now_ms)))
        except PenstockError as error:
            self.output.length = before  # a half-written answer must not stay
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

    def _note_response(self) -> None:
        request = self.request
        reply = Reply(request.code, request.ext(), request.body(), request.remark())
        self.responses.append((request.opaque, reply))

    def _give(self, answer: Answer) -> None:
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
        log.exception("request %d from %s failed", self.request.code, self.peer)
        self._count(type(error).__name__)
        self._answer(_SYSTEM_ERROR, f"a bug of Penstock: {type(error).__name__}: {error}")

    def _refuse(self, error: PenstockError) -> None:
        self._count(type(error).__name__)
        self._answer(error.code, error.remark())

    def _count(self, name: str) -> None:
        self.refusals[name] = self.refusals.get(name, 0) + 1

    def _answer(self, code: int, remark: str) -> None:
        """An error, unless nobody waits for one."""
        request = self.request
        if not request.is_oneway():
            answer = response(code, request.opaque, request.encoding, remark=remark)
            self.output.append(answer)
