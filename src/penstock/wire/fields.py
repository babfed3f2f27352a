"""The header of one command, read in place.

A header has the numbers of every command and a table of named text fields (`extFields`). The table
holds positions in the connection's buffer, so no object is made until a field is read as one. JSON
and binary headers fill the same table.

| per field | key position | key length | value position | value length |

Positions are valid until the buffer is read into again; what is needed longer must be copied out by
`text`, `raw` or `ext`.
"""

from array import array

from penstock.errors import HeaderError
from penstock.wire import octets
from penstock.wire.java_numbers import parse_long

FIELDS_MAX = 96
"""Most named fields of one header; Java's largest request has about 20."""
_FIELDS_MAX = FIELDS_MAX


_I64_DIGITS = 19

FLAG_RESPONSE = 1
FLAG_ONEWAY = 2

LANGUAGES = (
    b"JAVA",
    b"CPP",
    b"DOTNET",
    b"PYTHON",
    b"DELPHI",
    b"ERLANG",
    b"RUBY",
    b"OTHER",
    b"HTTP",
    b"GO",
    b"PHP",
    b"OMS",
    b"RUST",
    b"NODE_JS",
)
LANGUAGE_UNKNOWN = 7


class Fields:
    """Numbers and named fields of one command's header, in the buffer it was read from.

    Short methods use `self.buffer` and `self._table`: compiled, a local variable of that type
    counts references, which takes as long as the rest of `add`.
    """

    def __init__(self) -> None:
        # The connection's buffer, from `bind` to `release`.
        self.buffer: memoryview = memoryview(bytearray(1))
        # The command that was read last; everything below is valid until the next `clear`.
        self.code: int = 0
        self.flag: int = 0
        self.opaque: int = 0
        self.version: int = 0
        self.language: int = 0
        # Number of named fields.
        self.count: int = 0
        self._remark_at: int = 0
        self._remark_length: int = 0
        # Four positions and lengths per field, as described above.
        self._table: memoryview = memoryview(array("i", bytes(4 * 4 * FIELDS_MAX)))
        # 1 + number of the field with each one-letter name (a to z), 0 if there is none.
        self._letters: memoryview = memoryview(array("i", bytes(4 * 26)))

    def bind(self, buffer: memoryview) -> None:
        """Set the writable buffer that positions refer to."""
        self.buffer = buffer

    def release(self) -> None:
        """Release the buffer, so that its owner may resize or close it."""
        self.buffer = memoryview(bytearray(1))

    def clear(self) -> None:
        for i in range(26):
            self._letters[i] = 0
        self.code = 0
        self.flag = 0
        self.opaque = 0
        self.version = 0
        self.language = 0
        self.count = 0
        self._remark_length = 0

    def add(self, key_at: int, key_length: int, at: int, length: int) -> None:
        """Add one field; the last of several with the same name wins, as in Java's map."""
        count = self.count
        if count >= _FIELDS_MAX:
            raise HeaderError(f"header has more than {FIELDS_MAX} fields")
        self._table[4 * count] = key_at
        self._table[4 * count + 1] = key_length
        self._table[4 * count + 2] = at
        self._table[4 * count + 3] = length
        self.count = count + 1
        if key_length == 1:
            letter = self.buffer[key_at] - 97
            if 0 <= letter < 26:
                self._letters[letter] = count + 1

    def find(self, name: bytes) -> int:
        """Number of the field with this name, or -1; the last one if there are several."""
        length = len(name)
        i = self.count - 1
        while i >= 0:
            if self._table[4 * i + 1] == length and octets.matches(
                self.buffer, self._table[4 * i], name
            ):
                return i
            i -= 1
        return -1

    def letter(self, letter: int) -> int:
        """Number of the field with this one-letter name (its character code), or -1."""
        if letter < 97 or letter > 122:
            return -1
        return self._letters[letter - 97] - 1

    def value_at(self, field: int) -> int:
        """Position of a field's value in the buffer."""
        if field < 0 or field >= self.count:
            raise HeaderError(f"the header has no field number {field}")
        return self._table[4 * field + 2]

    def value_length(self, field: int) -> int:
        if field < 0 or field >= self.count:
            raise HeaderError(f"the header has no field number {field}")
        return self._table[4 * field + 3]

    def number(self, field: int) -> int:
        """A field's value as a signed 64-bit number, by the rules of Java's Long.parseLong."""
        if field < 0 or field >= self.count:
            raise HeaderError("a required header field is missing")
        at = self._table[4 * field + 2]
        end = at + self._table[4 * field + 3]
        start = at
        negative = False
        if at < end and (self.buffer[at] == 45 or self.buffer[at] == 43):
            negative = self.buffer[at] == 45
            at += 1
        digits = end - at
        value = 0
        if 0 < digits < _I64_DIGITS:
            while at < end:
                digit = self.buffer[at] - 48
                if digit < 0 or digit > 9:
                    break
                value = value * 10 + digit
                at += 1
            if at == end:
                return -value if negative else value
        return self._number_checked(start, end)

    def number32(self, field: int) -> int:
        """A field's value within Java's int."""
        value = self.number(field)
        if value > 0x7FFFFFFF or value < -0x80000000:
            raise HeaderError(f"a header field is out of range: {value}")
        return value

    def _number_checked(self, at: int, end: int) -> int:
        text = bytes(self.buffer[at:end])
        value = parse_long(text.decode("utf-8", "replace"))
        if value is None:
            raise HeaderError(f"{text[:32].decode('utf-8', 'replace')!r} is not a 64-bit number")
        return value

    def i64(self, name: bytes) -> int:
        """A required number."""
        field = self.find(name)
        if field < 0:
            raise HeaderError(f"the header field {name.decode()} is missing")
        return self.number(field)

    def i64_or(self, name: bytes, default: int) -> int:
        field = self.find(name)
        return default if field < 0 else self.number(field)

    def i32(self, name: bytes) -> int:
        """A required number within Java's int."""
        value = self.i64(name)
        if not -0x80000000 <= value <= 0x7FFFFFFF:
            raise HeaderError(f"the header field {name.decode()} is out of range: {value}")
        return value

    def flag_or(self, name: bytes, default: bool) -> bool:
        """A boolean by Java's rule: `true` in any case is true, everything else is false."""
        field = self.find(name)
        if field < 0:
            return default
        return self.truth(field)

    def truth(self, field: int) -> bool:
        """Whether a field's value reads `true`, in any case; a missing field is false."""
        if field < 0 or self._table[4 * field + 3] != 4:
            return False
        at = self._table[4 * field + 2]
        return (
            self.buffer[at] | 32 == 116
            and self.buffer[at + 1] | 32 == 114
            and self.buffer[at + 2] | 32 == 117
            and self.buffer[at + 3] | 32 == 101
        )

    def raw(self, name: bytes) -> bytes | None:
        """A field's bytes, copied out, or None."""
        field = self.find(name)
        if field < 0:
            return None
        at = self._table[4 * field + 2]
        return bytes(self.buffer[at : at + self._table[4 * field + 3]])

    def text(self, name: bytes) -> str | None:
        """A field as text, or None; invalid UTF-8 is replaced, as in Java."""
        raw = self.raw(name)
        return None if raw is None else raw.decode("utf-8", "replace")

    def remark(self) -> str | None:
        """The remark of the header, or None."""
        if self._remark_length == 0:
            return None
        at = self._remark_at
        return bytes(self.buffer[at : at + self._remark_length]).decode("utf-8", "replace")

    def ext(self) -> dict[str, str]:
        """All named fields as a dict; not for the hot path."""
        fields = {}
        table = self._table
        for i in range(self.count):
            key_at = table[4 * i]
            at = table[4 * i + 2]
            key = bytes(self.buffer[key_at : key_at + table[4 * i + 1]])
            value = bytes(self.buffer[at : at + table[4 * i + 3]])
            fields[key.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
        return fields

    def set_language(self, at: int, length: int) -> None:
        """Set the sender's language by its name; an unknown name is OTHER."""
        self.language = LANGUAGE_UNKNOWN
        for i in range(len(LANGUAGES)):
            name = LANGUAGES[i]
            if len(name) == length and octets.matches(self.buffer, at, name):
                self.language = i
                return

    def set_remark(self, at: int, length: int) -> None:
        self._remark_at = at
        self._remark_length = length

    def is_response(self) -> bool:
        return self.flag & FLAG_RESPONSE != 0

    def is_oneway(self) -> bool:
        return self.flag & FLAG_ONEWAY != 0
