"""One read's worth of work: frames → handlers → one output. No asyncio, no sockets."""

from penstock.broker.send import SEND_MESSAGE, SEND_MESSAGE_V2, SendHandler
from penstock.errors import WireError
from penstock.store.put import PutPath
from penstock.wire.frame import Request
from penstock.wire.output import Output, response

_SEND_MESSAGE = SEND_MESSAGE
_SEND_MESSAGE_V2 = SEND_MESSAGE_V2
_REQUEST_CODE_NOT_SUPPORTED = 3


class Turn:
    """Serves the bytes of one connection at a time."""

    def __init__(self, path: PutPath, send: SendHandler) -> None:
        self.path: PutPath = path
        self.send: SendHandler = send
        self.request: Request = Request()
        self.output: Output = Output()

    def bind(self, buffer: memoryview, born_host: bytes) -> None:
        """Take a connection's buffer."""
        self.request.bind(buffer)
        self.send.bind(buffer, born_host)

    def serve(self, at: int, end: int, now_ms: int) -> int:
        """Handle the whole frames in [at, end); returns where the first incomplete one begins.

        Raises a WireError for a frame that breaks the protocol; what was answered before it is in
        the output. A sound frame whose fields make no sense is answered with an error.
        """
        request = self.request
        try:
            while at < end:
                length = request.read(at, end)
                if length == 0:
                    break
                at += length
                if request.is_response():
                    continue  # nothing was asked of this peer
                if request.code == _SEND_MESSAGE_V2 or request.code == _SEND_MESSAGE:
                    try:
                        self.send.handle(request, self.output, now_ms)
                    except WireError as error:
                        self._answer(error.code, error.remark())
                else:
                    self._answer(
                        _REQUEST_CODE_NOT_SUPPORTED, f" request type {request.code} not supported"
                    )
        finally:
            self.path.settle()
        return at

    def _answer(self, code: int, remark: str) -> None:
        """An error, unless nobody waits for one."""
        request = self.request
        if not request.is_oneway():
            answer = response(code, request.opaque, request.encoding, remark=remark)
            self.output.append(answer)
