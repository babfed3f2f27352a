"""Encodes commands: all responses of one read are collected in one `Output` and sent in one write.

The hot path appends header fields straight to the buffer (`begin`, `field_…`, `end`), in the
encoding of the request. `encode` is for everything that is not per message.
"""

import json
from collections.abc import Mapping

from penstock.errors import FrameError, ResponseTooLong
from penstock.wire import octets
from penstock.wire.fields import FLAG_RESPONSE, LANGUAGES
from penstock.wire.frame import BINARY, FRAME_BYTES_MAX, JSON

VERSION = 493
"""The release in the headers of Penstock's commands: V5_4_0."""
LANGUAGE = 3  # PYTHON

_VERSION = VERSION
_LANGUAGE = LANGUAGE
_BINARY = BINARY
_START_BYTES = 128  # more than the fixed part of either header
_NUMBER_BYTES = 20
_BINARY_FIXED_BYTES = 21  # of a binary header: all except remark and fields

_JSON_SENDER = (
    f',"flag":{FLAG_RESPONSE},"language":"{LANGUAGES[LANGUAGE].decode()}","opaque":'.encode()
)
_JSON_FIELDS = f',"version":{VERSION},"extFields":{{'.encode()


class Output:
    """A growing buffer of responses."""

    def __init__(self, capacity: int = 16 * 1024) -> None:
        # The buffer, a view of all of it and its size; replaced when it grows.
        self.data: bytearray = bytearray(capacity)
        self.view: memoryview = memoryview(self.data)
        self.capacity: int = capacity
        # Bytes used so far.
        self.length: int = 0
        # The frame between `begin` and `end`: its encoding, where it and (binary) the length of
        # its fields are, and whether (JSON) the next field is the first.
        self._encoding: int = 0
        self._frame_at: int = 0
        self._ext_at: int = 0
        self._first: bool = False

    def take(self) -> bytes:
        """A copy of the content; the output is empty afterwards."""
        taken = bytes(self.view[: self.length])
        self.length = 0
        return taken

    def reserve(self, length: int) -> None:
        """Grow the buffer if it has no space for `length` more bytes."""
        if self.capacity - self.length < length:
            self._grow(length)

    def _grow(self, length: int) -> None:
        capacity = max(self.capacity, 1)
        while capacity - self.length < length:
            capacity *= 2
        data = bytearray(capacity)
        data[: self.length] = self.view[: self.length]
        self.data = data
        self.view = memoryview(data)
        self.capacity = capacity

    def begin(self, encoding: int, code: int, opaque: int) -> None:
        """Begin a response frame; its named fields follow."""
        self.reserve(_START_BYTES)
        at = self.length
        self._encoding = encoding
        self._frame_at = at
        self._first = True
        at += 8
        if encoding == _BINARY:
            octets.put_i16(self.view, at, code)
            self.view[at + 2] = _LANGUAGE
            octets.put_i16(self.view, at + 3, _VERSION)
            octets.put_i32(self.view, at + 5, opaque)
            octets.put_i32(self.view, at + 9, 1)
            octets.put_i32(self.view, at + 13, 0)
            self._ext_at = at + 17
            self.length = at + 21
        else:
            at += octets.put_bytes(self.view, at, b'{"code":')
            at += octets.put_decimal(self.view, at, code)
            at += octets.put_bytes(self.view, at, _JSON_SENDER)
            at += octets.put_decimal(self.view, at, opaque)
            self.length = at + octets.put_bytes(self.view, at, _JSON_FIELDS)

    def field_number(self, name: bytes, value: int) -> None:
        """A named field that holds a number."""
        self.reserve(len(name) + _NUMBER_BYTES + 16)
        at = self._name(name)
        if self._encoding == _BINARY:
            length = octets.put_decimal(self.view, at + 4, value)
            octets.put_i32(self.view, at, length)
            self.length = at + 4 + length
        else:
            at += octets.put_decimal(self.view, at, value)
            self.view[at] = 34
            self.length = at + 1

    def field_plain(self, name: bytes, value: bytes) -> None:
        """A named field whose text needs no escaping in JSON."""
        self.reserve(len(name) + len(value) + 16)
        at = self._name(name)
        if self._encoding == _BINARY:
            octets.put_i32(self.view, at, len(value))
            self.length = at + 4 + octets.put_bytes(self.view, at + 4, value)
        else:
            at += octets.put_bytes(self.view, at, value)
            self.view[at] = 34
            self.length = at + 1

    def field_offset_id(self, name: bytes, host: bytes, offset: int) -> None:
        """A named field that holds an offset message id: host and physical offset in hex."""
        digits = 2 * len(host) + 16
        self.reserve(len(name) + digits + 16)
        at = self._name(name)
        if self._encoding == _BINARY:
            octets.put_i32(self.view, at, digits)
            at += 4
        at += octets.put_hex_bytes(self.view, at, host)
        octets.put_hex_i64(self.view, at, offset)
        at += 16
        if self._encoding != _BINARY:
            self.view[at] = 34
            at += 1
        self.length = at

    def field_offset_ids(self, name: bytes, host: bytes, offsets: memoryview, count: int) -> None:
        """A named field that holds several offset message ids, separated by commas."""
        digits = 2 * len(host) + 16
        length = count * (digits + 1) - 1
        self.reserve(len(name) + length + 16)
        at = self._name(name)
        view = self.view
        if self._encoding == _BINARY:
            octets.put_i32(view, at, length)
            at += 4
        i = 0
        while i < count:
            if i > 0:
                view[at] = 44
                at += 1
            at += octets.put_hex_bytes(view, at, host)
            octets.put_hex_i64(view, at, offsets[i])
            at += 16
            i += 1
        if self._encoding != _BINARY:
            view[at] = 34
            at += 1
        self.length = at

    def field_span(self, name: bytes, source: memoryview, at: int, length: int) -> bool:
        """A named field copied from another buffer; False if JSON would have to escape it."""
        i = 0
        while i < length:
            letter = source[at + i]
            if letter < 32 or letter == 34 or letter == 92 or letter > 126:
                return False
            i += 1
        self.reserve(len(name) + length + 16)
        place = self._name(name)
        if self._encoding == _BINARY:
            octets.put_i32(self.view, place, length)
            place += 4
        octets.copy(self.view, place, source, at, length)
        place += length
        if self._encoding != _BINARY:
            self.view[place] = 34
            place += 1
        self.length = place
        return True

    def end(self, body_length: int) -> None:
        """End the header of a frame; a body of this length follows."""
        self.reserve(4)
        start = self._frame_at
        at = self.length
        if self._encoding == _BINARY:
            octets.put_i32(self.view, self._ext_at, at - self._ext_at - 4)
        else:
            self.view[at] = 125
            self.view[at + 1] = 125
            at += 2
        header_length = at - start - 8
        octets.put_i32(self.view, start, 4 + header_length + body_length)
        octets.put_i32(self.view, start + 4, self._encoding << 24 | header_length)
        self.length = at

    def append(self, data: bytes) -> None:
        """Append encoded bytes: a frame made by `encode`, or a body."""
        self.reserve(len(data))
        self.length += octets.put_bytes(self.view, self.length, data)

    def _name(self, name: bytes) -> int:
        at = self.length
        if self._encoding == _BINARY:
            octets.put_i16(self.view, at, len(name))
            return at + 2 + octets.put_bytes(self.view, at + 2, name)
        if not self._first:
            self.view[at] = 44
            at += 1
        self._first = False
        self.view[at] = 34
        at += 1 + octets.put_bytes(self.view, at + 1, name)
        return at + octets.put_bytes(self.view, at, b'":"')


def encode(
    code: int,
    ext: Mapping[str, str] | None = None,
    body: bytes = b"",
    *,
    opaque: int = 0,
    flag: int = 0,
    encoding: int = JSON,
    remark: str | None = None,
    language: int = LANGUAGE,
    version: int = VERSION,
    frame_bytes_max: int = FRAME_BYTES_MAX,
) -> bytes:
    """One complete frame. In the binary encoding empty values are not sent."""
    if encoding == BINARY:
        header = _binary_header(code, ext, opaque, flag, remark, language, version)
    else:
        header = _json_header(code, ext, opaque, flag, remark, language, version)
    length = 4 + len(header) + len(body)
    if length + 4 > frame_bytes_max or len(header) > 0xFFFFFF:
        raise FrameError.over(
            "frame too long", figure=length + 4, limit=frame_bytes_max, setting="frame_bytes_max"
        )
    mark = encoding << 24 | len(header)
    return length.to_bytes(4, "big") + mark.to_bytes(4, "big") + header + body


def response(
    code: int,
    opaque: int,
    encoding: int,
    *,
    ext: Mapping[str, str] | None = None,
    body: bytes = b"",
    remark: str | None = None,
) -> bytes:
    """One complete response frame; raises ResponseTooLong."""
    try:
        return encode(
            code, ext, body, opaque=opaque, flag=FLAG_RESPONSE, encoding=encoding, remark=remark
        )
    except FrameError as error:
        if error.figure is None or error.limit is None:
            raise
        raise ResponseTooLong.over(
            "the response is too long", figure=error.figure, limit=error.limit
        ) from None


def _json_header(
    code: int,
    ext: Mapping[str, str] | None,
    opaque: int,
    flag: int,
    remark: str | None,
    language: int,
    version: int,
) -> bytes:
    import msgspec

    header: dict[str, object] = {"code": code}
    if ext is not None:
        header["extFields"] = dict(ext)
    header.update(flag=flag, language=LANGUAGES[language].decode(), opaque=opaque)
    if remark is not None:
        header["remark"] = remark
    header.update(serializeTypeCurrentRPC="JSON", version=version)
    try:
        return msgspec.json.encode(header)
    except UnicodeEncodeError:  # a lone surrogate: Java writes a question mark
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


def _binary_header(
    code: int,
    ext: Mapping[str, str] | None,
    opaque: int,
    flag: int,
    remark: str | None,
    language: int,
    version: int,
) -> bytes:
    if not -0x8000 <= code <= 0x7FFF:
        raise FrameError(f"code {code} does not fit the binary header; use JSON")
    pieces: list[bytes] = []  # names and values in turn
    fields_length = 0
    for key, value in (ext or {}).items():
        name, text = key.encode("utf-8", "replace"), value.encode("utf-8", "replace")
        if not name or not text:
            continue
        if len(name) > 0x7FFF:
            raise FrameError.over("field name too long", figure=len(name), limit=0x7FFF)
        pieces.append(name)
        pieces.append(text)
        fields_length += 6 + len(name) + len(text)
    remark_text = (remark or "").encode("utf-8", "replace")
    header = bytearray(_BINARY_FIXED_BYTES + len(remark_text) + fields_length)
    view = memoryview(header)
    octets.put_i16(view, 0, code)
    view[2] = language
    octets.put_i16(view, 3, version)
    octets.put_i32(view, 5, opaque)
    octets.put_i32(view, 9, flag)
    octets.put_i32(view, 13, len(remark_text))
    at = 17 + octets.put_bytes(view, 17, remark_text)
    octets.put_i32(view, at, fields_length)
    at += 4
    for i in range(0, len(pieces), 2):
        name, text = pieces[i], pieces[i + 1]
        octets.put_i16(view, at, len(name))
        at += 2 + octets.put_bytes(view, at + 2, name)
        octets.put_i32(view, at, len(text))
        at += 4 + octets.put_bytes(view, at + 4, text)
    return bytes(header)
