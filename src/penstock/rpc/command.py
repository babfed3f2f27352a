"""A request, copied out of its connection's buffer, with typed access to its fields.

A missing or malformed field raises HeaderError or BodyError; the router turns any PenstockError
into a response with the error's code and remark.
"""

from typing import TypeVar

from penstock.errors import HeaderError
from penstock.wire import fastjson
from penstock.wire.codes import CUT_CODES, FLAG_ONE_WAY
from penstock.wire.frame import BINARY
from penstock.wire.java_numbers import parse_int, parse_long

T = TypeVar("T")

LOOSE_BODY_BYTES_MAX = 128 * 1024
"""Longest body in fastjson's non-standard JSON: decoding it takes 0.2 s per MiB."""


class Command:
    """One request."""

    __slots__ = (
        "body",
        "client",
        "code",
        "encoding",
        "ext",
        "flag",
        "language",
        "now_ms",
        "opaque",
        "peer",
        "remark",
        "user",
        "version",
    )

    def __init__(
        self,
        code: int,
        ext: dict[str, str] | None = None,
        body: bytes = b"",
        *,
        client: int = 0,
        peer: str = "",
        now_ms: int = 0,
        flag: int = 0,
        opaque: int = 0,
        version: int = 0,
        language: int = 0,
        encoding: int = 0,
        remark: str | None = None,
    ) -> None:
        self.code = CUT_CODES.get(code, code) if encoding == BINARY else code
        self.ext = ext or {}
        self.body = body
        self.client = client  # ClientId of its connection
        self.peer = peer  # the client's address, host:port
        self.now_ms = now_ms
        self.flag = flag
        self.opaque = opaque
        self.version = version
        self.language = language
        self.encoding = encoding
        self.remark = remark
        self.user = ""  # who signed it; set by access control, empty without

    @property
    def oneway(self) -> bool:
        return self.flag & FLAG_ONE_WAY != 0

    def text(self, name: str) -> str:
        """A required string; an empty one counts as missing."""
        value = self.ext.get(name)
        if not value:
            raise HeaderError(f"the header field {name} is missing")
        return value

    def text_or(self, name: str, default: str = "") -> str:
        return self.ext.get(name) or default

    def i64(self, name: str) -> int:
        """A required number."""
        value = self.text(name)
        return _in_range(name, value, parse_long(value))

    def i64_or(self, name: str, default: int) -> int:
        value = self.ext.get(name)
        return _in_range(name, value, parse_long(value)) if value else default

    def i32(self, name: str) -> int:
        """A required number within Java's int."""
        value = self.text(name)
        return _in_range(name, value, parse_int(value))

    def i32_or(self, name: str, default: int) -> int:
        value = self.ext.get(name)
        return _in_range(name, value, parse_int(value)) if value else default

    def truth(self, name: str, default: bool = False) -> bool:
        """A boolean as Java parses it: `true` in any case is true, everything else is false."""
        value = self.ext.get(name)
        return default if value is None else value.lower() == "true"

    def body_as(self, kind: type[T], *, bytes_max: int = fastjson.BYTES_MAX) -> T:
        """The body, decoded as JSON of this type."""
        return fastjson.decode(
            self.body, kind, bytes_max=bytes_max, loose_bytes_max=LOOSE_BODY_BYTES_MAX
        )


def _in_range(name: str, value: str, number: int | None) -> int:
    if number is None:
        raise HeaderError(f"the header field {name} is not a number in range: {value[:32]!r}")
    return number
