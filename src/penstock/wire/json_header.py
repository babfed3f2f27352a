"""The JSON header, scanned in place into `Fields`.

A header is an object whose `extFields` is an object of scalars. Other members are skipped by
counting brackets. Escapes are decoded in place (the text only gets shorter), so the buffer must be
writable and a header can be read only once.
"""

from penstock.errors import HeaderError
from penstock.wire import octets
from penstock.wire.fields import Fields

DEPTH_MAX = 32
"""Deepest nesting of an unknown member."""
_DEPTH_MAX = DEPTH_MAX

_QUOTE = 34
_COMMA = 44
_COLON = 58
_BACKSLASH = 92
_OPEN = 123
_CLOSE = 125


class JsonHeader:
    """A scanner of headers; reusable.

    Short methods use `self.buffer`: compiled, a local variable of that type counts references.
    """

    def __init__(self) -> None:
        # The buffer and the end of the header that `read` is scanning.
        self.buffer: memoryview = memoryview(bytearray(1))
        self.end: int = 0
        # The string or scalar scanned last, valid until the next; a length of -1 is null.
        self.text_at: int = 0
        self.text_length: int = 0

    def read(self, fields: Fields, at: int, end: int) -> int:
        """Fill `fields` from the header in [at, end) of their buffer."""
        self.buffer = fields.buffer
        self.end = end
        at = self._expect(at, _OPEN)
        at = self._blank(at)
        if at < end and self.buffer[at] == _CLOSE:
            return self._finish(at + 1)
        while True:
            at = self._string(at)
            key_at = self.text_at
            key_length = self.text_length
            at = self._blank(self._expect(at, _COLON))
            at = self._member(fields, at, key_at, key_length)
            at = self._blank(at)
            if at >= end:
                raise HeaderError("JSON header ends inside its object")
            if self.buffer[at] == _CLOSE:
                return self._finish(at + 1)
            at = self._expect(at, _COMMA)

    def _member(self, fields: Fields, at: int, key_at: int, key_length: int) -> int:
        if key_length == 9 and octets.matches(self.buffer, key_at, b"extFields"):
            return self._ext(fields, at)
        if key_length == 4 and octets.matches(self.buffer, key_at, b"code"):
            at = self._scalar(at)
            fields.code = self._int()
        elif key_length == 4 and octets.matches(self.buffer, key_at, b"flag"):
            at = self._scalar(at)
            fields.flag = self._int()
        elif key_length == 6 and octets.matches(self.buffer, key_at, b"opaque"):
            at = self._scalar(at)
            fields.opaque = self._int()
        elif key_length == 7 and octets.matches(self.buffer, key_at, b"version"):
            at = self._scalar(at)
            fields.version = self._int()
        elif key_length == 8 and octets.matches(self.buffer, key_at, b"language"):
            at = self._scalar(at)
            fields.set_language(self.text_at, self.text_length)
        elif key_length == 6 and octets.matches(self.buffer, key_at, b"remark"):
            at = self._scalar(at)
            fields.set_remark(self.text_at, max(self.text_length, 0))
        else:
            at = self._skip(at)
        return at

    def _ext(self, fields: Fields, at: int) -> int:
        if at < self.end and self.buffer[at] == 110:  # null
            return self._scalar(at)
        at = self._blank(self._expect(at, _OPEN))
        if at < self.end and self.buffer[at] == _CLOSE:
            return at + 1
        while True:
            at = self._string(at)
            key_at = self.text_at
            key_length = self.text_length
            at = self._blank(self._expect(at, _COLON))
            at = self._scalar(at)
            if self.text_length >= 0:
                fields.add(key_at, key_length, self.text_at, self.text_length)
            at = self._blank(at)
            if at >= self.end:
                raise HeaderError("JSON header ends inside extFields")
            if self.buffer[at] == _CLOSE:
                return at + 1
            at = self._expect(at, _COMMA)

    def _blank(self, at: int) -> int:
        end = self.end
        while at < end and self.buffer[at] <= 32:
            byte = self.buffer[at]
            if byte != 32 and byte != 9 and byte != 10 and byte != 13:
                break
            at += 1
        return at

    def _expect(self, at: int, byte: int) -> int:
        at = self._blank(at)
        if at >= self.end or self.buffer[at] != byte:
            raise HeaderError(f"JSON header has no {chr(byte)!r} at byte {at}")
        return at + 1

    def _finish(self, at: int) -> int:
        if self._blank(at) != self.end:
            raise HeaderError("JSON header has bytes behind its object")
        return 0

    def _string(self, at: int) -> int:
        """Scan the string at `at`: sets text_at and text_length, returns the position behind it."""
        at = self._expect(at, _QUOTE)
        end = self.end
        close = octets.find(self.buffer, at, end, _QUOTE)
        if close < 0:
            raise HeaderError("JSON header ends inside a string")
        escape = octets.find(self.buffer, at, close, _BACKSLASH)
        self.text_at = at
        if escape < 0:
            self.text_length = close - at
            return close + 1
        return self._escaped(at, escape)

    def _escaped(self, start: int, at: int) -> int:
        """Scan the rest of a string whose first escape is at `at`, and decode it in place."""
        buffer = self.buffer
        end = self.end
        out = at
        while at < end:
            byte = buffer[at]
            if byte == _QUOTE:
                self.text_length = out - start
                return at + 1
            if byte != _BACKSLASH:
                buffer[out] = byte
                out += 1
                at += 1
                continue
            if at + 1 >= end:
                break
            byte = buffer[at + 1]
            at += 2
            if byte == 117:
                unit = self._unit(at)
                at += 4
                if 0xD800 <= unit < 0xDC00 and at + 6 <= end:
                    low = self._low_surrogate(at)
                    if low:
                        unit = 0x10000 + ((unit - 0xD800) << 10) + (low - 0xDC00)
                        at += 6
                out = self._put_utf8(out, unit)
            else:
                if byte == 110:
                    byte = 10
                elif byte == 116:
                    byte = 9
                elif byte == 114:
                    byte = 13
                elif byte == 98:
                    byte = 8
                elif byte == 102:
                    byte = 12
                elif byte != _QUOTE and byte != _BACKSLASH and byte != 47:
                    raise HeaderError(f"JSON header has the unknown escape \\{chr(byte)}")
                buffer[out] = byte
                out += 1
        raise HeaderError("JSON header ends inside a string")

    def _unit(self, at: int) -> int:
        """Four hex digits as a UTF-16 unit."""
        if at + 4 > self.end:
            raise HeaderError("JSON header ends inside an escape")
        unit = 0
        for i in range(4):
            byte = self.buffer[at + i]
            if 48 <= byte <= 57:
                byte -= 48
            elif 65 <= byte <= 70:
                byte -= 55
            elif 97 <= byte <= 102:
                byte -= 87
            else:
                raise HeaderError("JSON header has an invalid \\u escape")
            unit = unit * 16 + byte
        return unit

    def _low_surrogate(self, at: int) -> int:
        """The low surrogate escaped at `at`, or 0."""
        if self.buffer[at] != _BACKSLASH or self.buffer[at + 1] != 117:
            return 0
        unit = self._unit(at + 2)
        return unit if 0xDC00 <= unit < 0xE000 else 0

    def _put_utf8(self, out: int, unit: int) -> int:
        if unit < 0x80:
            self.buffer[out] = unit
            return out + 1
        if unit < 0x800:
            self.buffer[out] = 0xC0 | unit >> 6
            self.buffer[out + 1] = 0x80 | unit & 63
            return out + 2
        if 0xD800 <= unit < 0xE000:
            self.buffer[out] = 63  # a lone surrogate: Java writes a question mark
            return out + 1
        if unit < 0x10000:
            self.buffer[out] = 0xE0 | unit >> 12
            self.buffer[out + 1] = 0x80 | unit >> 6 & 63
            self.buffer[out + 2] = 0x80 | unit & 63
            return out + 3
        self.buffer[out] = 0xF0 | unit >> 18
        self.buffer[out + 1] = 0x80 | unit >> 12 & 63
        self.buffer[out + 2] = 0x80 | unit >> 6 & 63
        self.buffer[out + 3] = 0x80 | unit & 63
        return out + 4

    def _scalar(self, at: int) -> int:
        """Scan a string, number or literal; text_length is -1 for null."""
        end = self.end
        if at < end and self.buffer[at] == _QUOTE:
            return self._string(at)
        start = at
        while at < end and (
            48 <= self.buffer[at] <= 57
            or 97 <= self.buffer[at] <= 122
            or self.buffer[at] == 45
            or self.buffer[at] == 43
            or self.buffer[at] == 46
            or self.buffer[at] == 69
        ):
            at += 1
        if at == start:
            raise HeaderError(f"JSON header has no scalar at byte {at}")
        self.text_at = start
        self.text_length = at - start
        if at - start == 4 and octets.matches(self.buffer, start, b"null"):
            self.text_length = -1
        return at

    def _int(self) -> int:
        """The scalar scanned last, as a 32-bit number."""
        at = self.text_at
        end = at + self.text_length
        negative = at < end and self.buffer[at] == 45
        if negative:
            at += 1
        if at >= end or end - at > 10:
            raise HeaderError("JSON header has an invalid number")
        value = 0
        while at < end:
            if self.buffer[at] < 48 or self.buffer[at] > 57:
                raise HeaderError("JSON header has an invalid number")
            value = value * 10 + (self.buffer[at] - 48)
            at += 1
        if negative:
            value = -value
        if value > 0x7FFFFFFF or value < -0x80000000:
            raise HeaderError("JSON header has a number of more than 32 bits")
        return value

    def _skip(self, at: int) -> int:
        """Skip the value of an unknown member."""
        end = self.end
        if at >= end or (self.buffer[at] != _OPEN and self.buffer[at] != 91):
            return self._scalar(at)
        depth = 0
        while at < end:
            byte = self.buffer[at]
            if byte == _QUOTE:
                at = self._string(at)
                continue
            at += 1
            if byte == _OPEN or byte == 91:
                depth += 1
                if depth > _DEPTH_MAX:
                    raise HeaderError(f"JSON header is nested deeper than {DEPTH_MAX}")
            elif byte == _CLOSE or byte == 93:
                depth -= 1
                if depth == 0:
                    return at
        raise HeaderError("JSON header ends inside a value")
