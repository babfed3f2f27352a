"""What the tests of request windows share: the requests that they send, and responses to them."""

from collections.abc import Mapping, Sequence

from penstock.cli.bench.pipelined.load_recorder import LoadRecorder
from penstock.cli.bench.pipelined.request_window import RequestWindow
from penstock.wire.fields import FLAG_RESPONSE
from penstock.wire.frame import Request
from penstock.wire.output import encode

QUEUES = [("broker-a", 0), ("broker-a", 11), ("broker-a", 2)]
FOREVER_NS = 1 << 60


def recorder() -> LoadRecorder:
    """One whose window is all times."""
    made = LoadRecorder()
    made.set_window(0, FOREVER_NS)
    return made


def requests(frames: bytes) -> list[tuple[int, int, dict[str, str], bytes]]:
    """Code, opaque, fields and body of each request, as a broker reads them."""
    buffer = memoryview(bytearray(frames))
    request = Request()
    request.bind(buffer)
    found = []
    at = 0
    while at < len(buffer):
        length = request.read(at, len(buffer))
        assert length > 0
        assert not request.is_response()
        found.append((request.code, request.opaque, request.ext(), request.body()))
        at += length
    return found


def response(
    opaque: int,
    code: int = 0,
    ext: Mapping[str, str] | None = None,
    body: bytes = b"",
    *,
    encoding: int = 1,
) -> bytes:
    return encode(code, ext, body, opaque=opaque, flag=FLAG_RESPONSE, encoding=encoding)


def take(window: RequestWindow, data: bytes, now_ns: int) -> int:
    """Give a window these bytes; returns how many it has taken."""
    window.bind(memoryview(bytearray(data)))
    return window.take(0, len(data), now_ns)


def opaques(frames: bytes) -> Sequence[int]:
    return [opaque for _, opaque, _, _ in requests(frames)]
