"""A view of one record in read-only bytes (a pull response or a log file): positions, no objects.

`wire.record` defines the layout. `parse` checks every length; after that fields may be read.
`parse_properties` finds the properties and those that have columns. Irregular properties (not
UTF-8, a repeated name, very many) are first rewritten by the rules of
`wire.message.decode_properties`.
"""

from array import array

from penstock.arrow.columns import byte_access
from penstock.wire import layout, octets
from penstock.wire.message import decode_properties
from penstock.wire.record import (
    NOTHING,
    PROPERTIES_BYTES_MAX,
    RECORD,
    StoredRecord,
)

# Problems of a record: numbers of `wire.record.PROBLEMS`, and one more.
SHORT, MAGIC, BEYOND, LENGTHS, CRC, ELSEWHERE = 1, 3, 4, 5, 6, 7
_SHORT, _MAGIC, _BEYOND, _LENGTHS = SHORT, MAGIC, BEYOND, LENGTHS
NO_NUMBER = -(2**63)
_NO_NUMBER = NO_NUMBER

_PROPERTIES_MAX = 32  # beyond this, names are not compared with each other
_TAGS = int.from_bytes(b"TAGS", "big")
_KEYS = int.from_bytes(b"KEYS", "big")
_UNIQ_KEY = int.from_bytes(b"UNIQ_KEY", "big")
_D, _T, _LOW_LINE, _PLUS, _MINUS, _ZERO = b"DT_+-0"
_I64_MAX = 2**63 - 1
_ONE = 1


class RecordView:
    """One record of the bytes it is bound to; reused for the next.

    Fields named `…_at` are positions in `source`, those of properties in `text`. All are valid
    until the next `parse`; those of properties from `parse_properties` on.
    """

    def __init__(self) -> None:
        self.source: memoryview = memoryview(b"\0")  # until the next `bind`
        self.at: int = 0
        self.size: int = 0
        self.sys_flag: int = 0
        self.born_host_length: int = 8
        self.store_at: int = 0
        self.store_host_length: int = 8
        self.body_at: int = 0
        self.body_length: int = 0
        self.topic_at: int = 0
        self.topic_length: int = 0
        self.text: memoryview = self.source  # the properties: `source`, or rewritten ones
        self.text_at: int = 0
        self.text_length: int = 0
        self.rewritten: bool = False  # `text` is not `source`
        self.property_count: int = 0
        self.spans: memoryview = memoryview(array("i", bytes(16 * (PROPERTIES_BYTES_MAX // 4 + 1))))
        self.tags_at: int = 0
        self.tags_length: int = 0
        self.keys_at: int = 0
        self.keys_length: int = 0
        self.unique_at: int = 0
        self.unique_length: int = 0
        self.transaction_at: int = 0
        self.transaction_length: int = 0
        self.level_at: int = 0
        self.level_length: int = 0
        self.deliver_at: int = 0
        self.deliver_length: int = 0
        self.delay_at: int = 0
        self.delay_length: int = 0
        self.delay_unit_ms: int = 0

    def bind(self, source: memoryview) -> None:
        self.source = source
        self.text = source
        self.rewritten = False

    def parse(self, at: int, end: int) -> int:
        """Read the layout of the record at `at`, which ends at `end` at most: 0 or a problem.

        For LENGTHS and later problems, and for MAGIC, `size` is within the bytes.
        """
        self.at = at
        if end - at < layout.HEAD_BYTES:
            return _SHORT
        size = octets.get_i32(self.source, at + layout.SIZE_AT)
        magic = octets.get_i32(self.source, at + layout.MAGIC_AT)
        self.size = size
        if size < layout.FIXED_BYTES or size > end - at:
            return _BEYOND
        if magic != layout.MAGIC_V1 and magic != layout.MAGIC_V2:
            return _MAGIC
        end = at + size
        sys_flag = octets.get_i32(self.source, at + layout.SYS_FLAG_AT)
        self.sys_flag = sys_flag
        self.born_host_length = layout.born_host_length(sys_flag)
        self.store_host_length = layout.store_host_length(sys_flag)
        self.store_at = at + layout.store_ms_at(sys_flag)
        place = at + layout.body_at(sys_flag)
        if place > end:
            return _LENGTHS
        length = octets.get_i32(self.source, place - layout.BODY_LENGTH_BEFORE_BODY)
        self.body_at = place
        self.body_length = length
        prefix = layout.topic_length_bytes(magic)
        if length < 0 or length > end - place - prefix - layout.PROPERTIES_LENGTH_BYTES:
            return _LENGTHS
        place += length
        length = octets.get_i16(self.source, place) if prefix == 2 else self.source[place]
        place += prefix
        self.topic_at = place
        self.topic_length = length
        if length < 0 or length > end - place - layout.PROPERTIES_LENGTH_BYTES:
            return _LENGTHS
        place += length
        length = octets.get_i16(self.source, place)
        self.text_at = place + layout.PROPERTIES_LENGTH_BYTES
        self.text_length = length
        if length < 0 or self.text_at + length != end:
            return _LENGTHS
        return 0

    def matches_crc(self) -> bool:
        """Whether the body, as it is stored (perhaps compressed), matches the record's CRC."""
        crc = octets.crc31(self.source, self.body_at, self.body_length)
        return crc == octets.get_i32(self.source, self.at + layout.BODY_CRC_AT)

    # --- properties

    def parse_properties(self, distinct: bool) -> None:
        """Find the properties and those that have columns.

        Of several with the same name the last counts. With `distinct`, no name is repeated.
        """
        if self.rewritten:
            self.rewritten = False
            self.text = self.source
        clean = self._split() or byte_access.is_utf8(self.text, self.text_at, self.text_length)
        may_repeat = self._find_known()
        if clean and distinct and may_repeat:
            clean = self.property_count <= _PROPERTIES_MAX and not self._repeats()
        if not clean:
            self._rewrite()
            self._split()
            self._find_known()

    def _split(self) -> bool:
        """Find the properties; whether all are ASCII."""
        end = self.text_at + self.text_length
        property_count = byte_access.split_properties(self.text, self.text_at, end, self.spans)
        self.property_count = property_count if property_count >= 0 else -1 - property_count
        return property_count >= 0

    def _repeats(self) -> bool:
        """Whether a name is repeated."""
        for i in range(4, 4 * self.property_count, 4):
            at = self.text_at + self.spans[i]
            length = self.spans[i + 1]
            for k in range(0, i, 4):
                other = self.text_at + self.spans[k]
                if (
                    self.spans[k + 1] == length
                    and self.text[at] == self.text[other]
                    and octets.same(self.text, at, self.text, other, length)
                ):
                    return True
        return False

    def _rewrite(self) -> None:
        properties = decode_properties(self.raw(self.text_at, self.text_length))
        text = b"".join(
            name.encode() + b"\x01" + value.encode() + b"\x02" for name, value in properties.items()
        )
        self.rewritten = True
        self.text = memoryview(text or b"\0")
        self.text_at = 0
        self.text_length = len(text)

    def _find_known(self) -> bool:
        """Find the properties that have columns; whether a name may be repeated."""
        base = self.text_at
        self.tags_length = 0
        self.keys_length = 0
        self.unique_length = 0
        self.transaction_length = 0
        self.level_length = 0
        self.deliver_length = 0
        self.delay_length = 0
        seen = 0
        may_repeat = False
        for i in range(0, 4 * self.property_count, 4):
            name = base + self.spans[i]
            length = self.spans[i + 1]
            bit = _ONE << (self.text[name] + 5 * length + self.text[name + length - 1] & 63)
            may_repeat = may_repeat or seen & bit != 0
            seen |= bit
            if length == 4:
                word = octets.get_u32(self.text, name)
                if word == _TAGS:
                    self.tags_at = base + self.spans[i + 2]
                    self.tags_length = self.spans[i + 3]
                elif word == _KEYS:
                    self.keys_at = base + self.spans[i + 2]
                    self.keys_length = self.spans[i + 3]
            elif length == 8:
                if octets.get_i64(self.text, name) == _UNIQ_KEY:
                    self.unique_at = base + self.spans[i + 2]
                    self.unique_length = self.spans[i + 3]
            elif self.text[name] in (_D, _T, _LOW_LINE):
                self._find_rare(name, length, base + self.spans[i + 2], self.spans[i + 3])
        return may_repeat

    def _find_rare(self, name: int, name_length: int, at: int, length: int) -> None:
        if name_length == 5 and octets.matches(self.text, name, b"DELAY"):
            self.level_at = at
            self.level_length = length
        elif name_length == 14 and octets.matches(self.text, name, b"TIMER_DELAY_MS"):
            # TIMER_DELAY_SEC takes precedence, as in brokers.
            if self.delay_length == 0 or self.delay_unit_ms == 1:
                self.delay_at = at
                self.delay_length = length
                self.delay_unit_ms = 1
        elif name_length == 15 and octets.matches(self.text, name, b"TIMER_DELAY_SEC"):
            self.delay_at = at
            self.delay_length = length
            self.delay_unit_ms = 1000
        elif name_length == 16 and octets.matches(self.text, name, b"TIMER_DELIVER_MS"):
            self.deliver_at = at
            self.deliver_length = length
        elif name_length == 17 and octets.matches(self.text, name, b"__transactionId__"):
            self.transaction_at = at
            self.transaction_length = length

    def tagged(self, tags: tuple[bytes, ...]) -> bool:
        """Whether the record's tag is one of these; needs `parse_properties`."""
        for tag in tags:
            if len(tag) == self.tags_length and octets.matches(self.text, self.tags_at, tag):
                return len(tag) > 0
        return False

    def number(self, at: int, length: int) -> int:
        """The value of a property, parsed as Java parses a long, or NO_NUMBER."""
        negative = self.text[at] == _MINUS
        if negative or self.text[at] == _PLUS:
            at += 1
            length -= 1
        if length < 1 or length > 19:
            return _NO_NUMBER
        value = 0
        for i in range(at, at + length):
            digit = self.text[i] - _ZERO
            if digit < 0 or digit > 9 or value > (_I64_MAX - digit) // 10:
                return _NO_NUMBER
            value = value * 10 + digit
        return -value if negative else value

    # --- rarely needed

    def raw(self, at: int, length: int) -> bytes:
        return bytes(self.source[at : at + length])

    def torn(self, physical_offset: int) -> int:
        """The problem if a sector of the record was never written; 0 if there is none."""
        data = bytearray(self.raw(self.at, self.size))
        # The checksum of the body has been checked before, if wanted.
        crc = octets.crc31(data, self.body_at - self.at, self.body_length)
        octets.put_i32(data, layout.BODY_CRC_AT, crc)
        stored = StoredRecord()
        stored.bind(memoryview(data))
        if stored.read(0, self.size) != RECORD or stored.check(physical_offset) == NOTHING:
            return stored.problem
        return 0
