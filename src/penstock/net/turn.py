"""One read's worth of work: frames → handlers → one output. No asyncio, no sockets."""

from penstock.broker.send import SEND_MESSAGE, SEND_MESSAGE_V2, SendHandler
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
        the output.
        """
        request = self.request
        while at < end:
            length = request.read(at, end)
            if length == 0:
                break
            at += length
            if request.code == _SEND_MESSAGE_V2 or request.code == _SEND_MESSAGE:
                self.send.handle(request, self.output, now_ms)
            elif request.flag & 3 == 0:
                self._not_supported()
        self.path.settle()
        return at

    def _not_supported(self) -> None:
        request = self.request
        self.output.append(
            response(
                _REQUEST_CODE_NOT_SUPPORTED,
                request.opaque,
                request.encoding,
                remark=f" request type {request.code} not supported",
            )
        )
