"""Decodes commands from a byte stream, without sockets.

    | length i32 | mark i32: encoding (1 byte), header length (3 bytes) | header | body |

`length` counts what follows it. One `Request` is reused for all frames of a connection: its fields
are positions in the connection's buffer, the same for both header encodings.

Every length is checked against the limits and the frame before it is used; an invalid frame raises
a WireError, after which the stream can't be trusted and the connection is closed.
"""

from penstock.errors import FrameError, HeaderError
from penstock.wire import octets
from penstock.wire.fields import Fields
from penstock.wire.json_header import JsonHeader

FRAME_BYTES_MAX = 16 * 1024 * 1024
"""Longest frame, with its length field, as in Java."""
HEADER_BYTES_MAX = 1024 * 1024
"""Longest header, for servers (setting `header_bytes_max`) and clients. Java has no limit. A
request whose properties are too long still gets a response."""

JSON = 0
BINARY = 1
_JSON = JSON
_BINARY = BINARY
_BINARY_BYTES_MIN = 21


class Request(Fields):
    """One command (a request or a response), in place in the buffer it was read from."""

    def __init__(
        self, frame_bytes_max: int = FRAME_BYTES_MAX, header_bytes_max: int = HEADER_BYTES_MAX
    ) -> None:
        Fields.__init__(self)
        self.frame_bytes_max: int = frame_bytes_max
        self.header_bytes_max: int = header_bytes_max
        # Of the frame that was read last, valid until the next `read`: the encoding of its header
        # (JSON or BINARY), and where its body is.
        self.encoding: int = JSON
        self.body_at: int = 0
        self.body_length: int = 0
        # How many bytes at least an incomplete frame still needs; 0 after a complete one.
        self.missing: int = 0
        # The scanner of JSON headers, reused.
        self._json: JsonHeader = JsonHeader()

    def read(self, at: int, end: int) -> int:
        """Read the frame at `at` of the bound buffer, whose content ends at `end`.

        Returns the frame's length with its length field, or 0 if it is incomplete: `missing` then
        says how many more bytes it needs at least.
        """
        have = end - at
        if have < 8:
            if have >= 4:
                self._check_length(octets.get_i32(self.buffer, at))
            self.missing = 8 - have
            return 0
        length = octets.get_i32(self.buffer, at)
        if length < 4 or length > self.frame_bytes_max - 4:
            self._check_length(length)
        mark = octets.get_i32(self.buffer, at + 4)
        header_length = mark & 0xFFFFFF
        if header_length > length - 4 or header_length > self.header_bytes_max:
            self._refuse_header(header_length, length)
        encoding = mark >> 24
        if encoding != _JSON and encoding != _BINARY:
            raise FrameError(f"unknown header encoding {encoding & 0xFF}")
        if have < length + 4:
            self.missing = length + 4 - have
            return 0
        self.clear()
        self.missing = 0
        self.encoding = encoding
        self.body_at = at + 8 + header_length
        self.body_length = length - 4 - header_length
        if encoding == _BINARY:
            self._read_binary(at + 8, at + 8 + header_length)
        else:
            self._json.read(self, at + 8, at + 8 + header_length)
        return length + 4

    def release(self) -> None:
        """Release the buffer, so that its owner may resize or close it."""
        Fields.release(self)
        self._json = JsonHeader()

    def body(self) -> bytes:
        """The body, copied out."""
        return bytes(self.buffer[self.body_at : self.body_at + self.body_length])

    def _read_binary(self, at: int, end: int) -> int:
        if end - at < _BINARY_BYTES_MIN:
            raise HeaderError(f"binary header of {end - at} bytes is too short")
        self.code = octets.get_i16(self.buffer, at)
        self.language = self.buffer[at + 2]
        self.version = octets.get_i16(self.buffer, at + 3)
        self.opaque = octets.get_i32(self.buffer, at + 5)
        self.flag = octets.get_i32(self.buffer, at + 9)
        length = octets.get_i32(self.buffer, at + 13)
        at += 17
        if length < 0 or length > end - at - 4:
            raise HeaderError(f"binary header's remark of {length} bytes does not fit")
        self.set_remark(at, length)
        at += length
        length = octets.get_i32(self.buffer, at)
        at += 4
        if length < 0 or length > end - at:
            raise HeaderError(f"binary header's fields of {length} bytes do not fit")
        end = at + length
        while at < end:
            if end - at < 6:
                raise HeaderError("binary header ends inside a field")
            key_length = octets.get_i16(self.buffer, at)
            key_at = at + 2
            if key_length < 0 or key_length > end - at - 6:
                raise HeaderError(f"binary header's field name of {key_length} bytes does not fit")
            length = octets.get_i32(self.buffer, key_at + key_length)
            at = key_at + key_length + 4
            if length < 0 or length > end - at:
                raise HeaderError(f"binary header's field of {length} bytes does not fit")
            if key_length > 0 and length > 0:  # Java reads an empty text as null
                self.add(key_at, key_length, at, length)
            at += length
        return 0

    def _check_length(self, length: int) -> int:
        if length < 4:
            raise FrameError(f"invalid frame length {length}")
        if length > self.frame_bytes_max - 4:
            raise FrameError.over(
                "frame too long",
                figure=length + 4,
                limit=self.frame_bytes_max,
                setting="frame_bytes_max",
            )
        return 0

    def _refuse_header(self, header_length: int, length: int) -> int:
        if header_length > length - 4:
            raise FrameError(f"header of {header_length} bytes in a frame of {length}")
        raise FrameError.over(
            "header too long",
            figure=header_length,
            limit=self.header_bytes_max,
            setting="header_bytes_max",
        )
