"""The message record: the bytes of a message in the log, on the wire, in replication.

`Record` is a message that is to be appended, `StoredRecord` one that is in the log. Both are reused
and hold positions, so neither makes an object per message. `wire.layout` has the layout.
"""

from penstock.wire import layout, octets

BODY_BYTES_MAX = 4 * 1024 * 1024
PROPERTIES_BYTES_MAX = 32767
TOPIC_BYTES_MAX = 255

# What is wrong with a message that is to be stored (0: nothing).
OK = 0
BODY_TOO_LONG = 1
PROPERTIES_TOO_LONG = 2
TOPIC_TOO_LONG = 3
TOPIC_EMPTY = 4
BATCH_BROKEN = 5
TOO_LONG_FOR_SEGMENT = 6
PROPERTIES_WITH_ZERO = 7  # recovery recognizes sectors that were never written by their zeros
BATCH_SPECIAL = 8  # a message of a batch that needs more than to be stored
_PROPERTIES_BYTES_MAX = PROPERTIES_BYTES_MAX
_TOPIC_BYTES_MAX = TOPIC_BYTES_MAX

# Bits of `PropertyMarks.special`: the message needs more than to be stored as it is.
SPECIAL_DELAY = 1  # DELAY
SPECIAL_TIMER = 2  # TIMER_DELAY_SEC, TIMER_DELAY_MS, TIMER_DELIVER_MS
SPECIAL_PREPARED = 4  # TRAN_MSG
SPECIAL_STRIP = 8  # POP_CK and transient properties, which are never stored
SPECIAL_PRIORITY = 16  # _SYS_MSG_PRIORITY_
_SPECIAL_DELAY, _SPECIAL_TIMER, _SPECIAL_PREPARED, _SPECIAL_STRIP = 1, 2, 4, 8
_SPECIAL_PRIORITY = SPECIAL_PRIORITY

# What is at a position of the log.
NOTHING = 0
RECORD = 1
BLANK = 2
_NOTHING, _RECORD, _BLANK = NOTHING, RECORD, BLANK

PROBLEMS = (
    "the record is valid",
    "the bytes end before the record's header",
    "no record was written here",
    "the magic number is unknown",
    "the size exceeds the segment",
    "the lengths of the fields do not add up to the size",
    "the body does not match its CRC",
    "the record belongs to another log offset",
    "a sector of the record was never written",
)
UNWRITTEN = 2
"""The problem's number at the end of the log."""
_SHORT, _UNWRITTEN, _MAGIC, _BEYOND, _LENGTHS, _CRC, _ELSEWHERE, _TORN = range(1, 9)
_SECTOR_BYTES = 512

_SEPARATOR = 2
_ASSIGN = 1


def java_hash(text: str) -> int:
    """Java's String.hashCode: a signed 32-bit number over UTF-16 units."""
    units = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for i in range(0, len(units), 2):
        value = (31 * value + (units[i] << 8 | units[i + 1])) & 0xFFFFFFFF
    return value - (1 << 32) if value & 0x80000000 else value


def continue_hash(seed: int, text: str) -> int:
    """Java's hash of a text that begins with what hashes to `seed` and continues with `text`."""
    units = len(text.encode("utf-16-be", "surrogatepass")) // 2
    value = (seed * pow(31, units, 1 << 32) + java_hash(text)) & 0xFFFFFFFF
    return value - (1 << 32) if value & 0x80000000 else value


class PropertyMarks:
    """Positions of the broker's own properties in a properties text: one pass, no objects.

    By Java's rules a property ends at 0x02 or the end and its name at the first 0x01; one with an
    empty name or value is ignored; the last of several with the same name wins.
    """

    def __init__(self) -> None:
        # The buffer that positions refer to, from `bind` to `release`.
        self.buffer: memoryview = memoryview(bytearray(1))
        # Results of the last `scan`, valid until the next. A length of 0: no such property.
        self.tags_at: int = 0
        self.tags_length: int = 0
        self.keys_at: int = 0
        self.keys_length: int = 0
        self.unique_at: int = 0
        self.unique_length: int = 0
        # The property WAIT: whether the producer waits for the flush.
        self.wait: bool = True
        # SPECIAL_… bits of the properties found.
        self.special: int = 0

    def bind(self, buffer: memoryview) -> None:
        self.buffer = buffer

    def release(self) -> None:
        self.buffer = memoryview(bytearray(1))

    def scan(self, at: int, end: int) -> None:
        self.tags_length = 0
        self.keys_length = 0
        self.unique_length = 0
        self.wait = True
        self.special = 0
        while at < end:
            stop = octets.find(self.buffer, at, end, _SEPARATOR)
            if stop < 0:
                stop = end
            if stop - at >= 3:
                assign = octets.find(self.buffer, at, stop, _ASSIGN)
                if at < assign < stop - 1:
                    self._mark(at, assign - at, assign + 1, stop - assign - 1)
            at = stop + 1

    def _mark(self, name_at: int, name_length: int, at: int, length: int) -> None:
        if name_length == 4:
            if octets.matches(self.buffer, name_at, b"TAGS"):
                self.tags_at = at
                self.tags_length = length
            elif octets.matches(self.buffer, name_at, b"KEYS"):
                self.keys_at = at
                self.keys_length = length
            elif octets.matches(self.buffer, name_at, b"WAIT"):
                self.wait = not (length == 5 and octets.matches(self.buffer, at, b"false"))
        elif name_length == 8:
            if octets.matches(self.buffer, name_at, b"UNIQ_KEY"):
                self.unique_at = at
                self.unique_length = length
            elif octets.matches(self.buffer, name_at, b"TRAN_MSG"):
                self.special |= _SPECIAL_PREPARED
        else:
            self._mark_special(name_at, name_length)

    def _mark_special(self, name_at: int, name_length: int) -> None:
        if name_length == 5:
            if octets.matches(self.buffer, name_at, b"DELAY"):
                self.special |= _SPECIAL_DELAY
        elif name_length == 6:
            if octets.matches(self.buffer, name_at, b"POP_CK"):
                self.special |= _SPECIAL_STRIP
        elif name_length >= 14 and self.buffer[name_at] == 84:  # T
            if (
                (name_length == 14 and octets.matches(self.buffer, name_at, b"TIMER_DELAY_MS"))
                or (name_length == 15 and octets.matches(self.buffer, name_at, b"TIMER_DELAY_SEC"))
                or (name_length == 16 and octets.matches(self.buffer, name_at, b"TIMER_DELIVER_MS"))
            ):
                self.special |= _SPECIAL_TIMER
        elif name_length >= 16 and self.buffer[name_at] == 95:  # _
            if octets.matches(self.buffer, name_at, b"__RMQ.TRANSIENT."):
                self.special |= _SPECIAL_STRIP
            elif name_length == 18 and octets.matches(self.buffer, name_at, b"_SYS_MSG_PRIORITY_"):
                self.special |= _SPECIAL_PRIORITY

    def tags_code(self) -> int:
        """The hash that queue entries carry: 0 without a tag."""
        if self.tags_length == 0:
            return 0
        return self.hash(self.tags_at, self.tags_length, 0)

    def hash(self, at: int, length: int, seed: int) -> int:
        """Java's hash of the text at this position, continued from `seed`."""
        if octets.is_ascii(self.buffer, at, length):
            return octets.ascii_hash(self.buffer, at, length, seed)
        return continue_hash(seed, bytes(self.buffer[at : at + length]).decode("utf-8", "replace"))


class Record:
    """A message that is to be appended: positions in a source buffer, and numbers; reused."""

    def __init__(self, body_bytes_max: int = BODY_BYTES_MAX) -> None:
        self.body_bytes_max: int = body_bytes_max
        # The buffer that topic, properties and body are in, from `bind` to `release`.
        self.source: memoryview = memoryview(bytearray(1))
        # Positions of the broker's own properties; valid after `prepare`.
        self.marks: PropertyMarks = PropertyMarks()
        # The message. The caller sets these fields, and they stay until it sets them again.
        self.topic_at: int = 0
        self.topic_length: int = 0
        self.properties_at: int = 0
        self.properties_length: int = 0
        self.body_at: int = 0
        self.body_length: int = 0
        self.queue_id: int = 0
        self.flag: int = 0
        self.sys_flag: int = 0
        self.born_ms: int = 0
        self.born_host: bytes = bytes(8)
        self.store_host: bytes = bytes(8)
        self.reconsume_times: int = 0
        self.prepared_offset: int = 0
        # Properties that the broker appends to those of the message.
        self.extra: bytes = b""
        # Computed by `prepare`: the size of the record and the hash of its tag.
        self.size: int = 0
        self.tags_code: int = 0

    def bind(self, source: memoryview) -> None:
        """Set the buffer that topic, properties and body are in."""
        self.source = source
        self.marks.bind(source)

    def release(self) -> None:
        self.source = memoryview(bytearray(1))
        self.marks.release()

    def fill(self, topic: bytes, body: bytes, properties: bytes = b"") -> None:
        """Take values instead of positions in a frame; not for the hot path."""
        self.bind(memoryview(bytearray(b"".join((topic, properties, body, b"\0")))))
        self.topic_at = 0
        self.topic_length = len(topic)
        self.properties_at = len(topic)
        self.properties_length = len(properties)
        self.body_at = len(topic) + len(properties)
        self.body_length = len(body)

    def prepare(self) -> int:
        """Check the limits, find tags and keys, compute the size. Returns OK or the problem."""
        properties = self._properties_bytes()
        if self.body_length > self.body_bytes_max:
            return BODY_TOO_LONG
        if properties > _PROPERTIES_BYTES_MAX:
            return PROPERTIES_TOO_LONG
        if self.topic_length > _TOPIC_BYTES_MAX:
            return TOPIC_TOO_LONG
        if self.topic_length == 0:
            return TOPIC_EMPTY
        end = self.properties_at + self.properties_length
        if octets.find(self.source, self.properties_at, end, 0) >= 0:
            return PROPERTIES_WITH_ZERO
        self.marks.scan(self.properties_at, self.properties_at + self.properties_length)
        self.tags_code = self.marks.tags_code()
        self.size = (
            layout.FIXED_BYTES
            - 2 * layout.HOST_V4_BYTES
            + len(self.born_host)
            + len(self.store_host)
            + (1 if self.topic_length > 127 else 0)
            + self.body_length
            + self.topic_length
            + properties
        )
        return 0

    def _properties_bytes(self) -> int:
        length = self.properties_length
        extra = len(self.extra)
        if extra > 0 and length > 0 and self.source[self.properties_at + length - 1] != _SEPARATOR:
            extra += 1
        return length + extra

    def put(
        self, target: memoryview, at: int, queue_offset: int, physical_offset: int, store_ms: int
    ) -> None:
        """Write the prepared record to `target`, which has `size` bytes at `at`."""
        source = self.source
        long_topic = self.topic_length > 127
        sys_flag = self.sys_flag & ~(layout.BORN_HOST_V6 | layout.STORE_HOST_V6)
        if len(self.born_host) == layout.HOST_V6_BYTES:
            sys_flag |= layout.BORN_HOST_V6
        if len(self.store_host) == layout.HOST_V6_BYTES:
            sys_flag |= layout.STORE_HOST_V6
        magic = layout.MAGIC_V2 if long_topic else layout.MAGIC_V1
        crc = octets.crc31(source, self.body_at, self.body_length)
        octets.put_i32(target, at + layout.SIZE_AT, self.size)
        octets.put_i32(target, at + layout.MAGIC_AT, magic)
        octets.put_i32(target, at + layout.BODY_CRC_AT, crc)
        octets.put_i32(target, at + layout.QUEUE_ID_AT, self.queue_id)
        octets.put_i32(target, at + layout.FLAG_AT, self.flag)
        octets.put_i64(target, at + layout.QUEUE_OFFSET_AT, queue_offset)
        octets.put_i64(target, at + layout.PHYSICAL_OFFSET_AT, physical_offset)
        octets.put_i32(target, at + layout.SYS_FLAG_AT, sys_flag)
        octets.put_i64(target, at + layout.BORN_MS_AT, self.born_ms)
        at += layout.BORN_HOST_AT
        at += octets.put_bytes(target, at, self.born_host)
        octets.put_i64(target, at, store_ms)
        at += 8
        at += octets.put_bytes(target, at, self.store_host)
        at += layout.RECONSUME_TIMES_BEFORE_BODY
        octets.put_i32(target, at - layout.RECONSUME_TIMES_BEFORE_BODY, self.reconsume_times)
        octets.put_i64(target, at - layout.PREPARED_OFFSET_BEFORE_BODY, self.prepared_offset)
        octets.put_i32(target, at - layout.BODY_LENGTH_BEFORE_BODY, self.body_length)
        octets.copy(target, at, source, self.body_at, self.body_length)
        at += self.body_length
        if long_topic:
            octets.put_i16(target, at, self.topic_length)
            at += 2
        else:
            target[at] = self.topic_length
            at += 1
        octets.copy(target, at, source, self.topic_at, self.topic_length)
        at += self.topic_length
        self._put_properties(target, at)

    def _put_properties(self, target: memoryview, at: int) -> None:
        source = self.source
        length = self.properties_length
        octets.put_i16(target, at, self._properties_bytes())
        at += 2
        octets.copy(target, at, source, self.properties_at, length)
        if len(self.extra) > 0:
            if length > 0 and source[self.properties_at + length - 1] != _SEPARATOR:
                target[at + length] = _SEPARATOR
                at += 1
            octets.put_bytes(target, at + length, self.extra)


class BatchWalk:
    """The messages inside a batch body, one after another."""

    def __init__(self) -> None:
        self.at: int = 0
        self.end: int = 0

    def start(self, at: int, length: int) -> None:
        self.at = at
        self.end = at + length

    def next(self, record: Record) -> int:
        """Point `record` at the next message; returns 1, 0 at the end, -1 if it is not valid."""
        at = self.at
        left = self.end - at
        if left == 0:
            return 0
        source = record.source
        if left < layout.BATCH_FIXED_BYTES:
            return -1
        size = octets.get_i32(source, at + layout.SIZE_AT)
        if size < layout.BATCH_FIXED_BYTES or size > left:
            return -1
        body_length = octets.get_i32(source, at + layout.BATCH_BODY_LENGTH_AT)
        if body_length < 0 or body_length > size - layout.BATCH_FIXED_BYTES:
            return -1
        properties_length = octets.get_i16(source, at + layout.BATCH_BODY_AT + body_length)
        if (
            properties_length < 0
            or size != layout.BATCH_FIXED_BYTES + body_length + properties_length
        ):
            return -1
        record.flag = octets.get_i32(source, at + layout.BATCH_FLAG_AT)
        record.body_at = at + layout.BATCH_BODY_AT
        record.body_length = body_length
        record.properties_at = at + layout.BATCH_FIXED_BYTES + body_length
        record.properties_length = properties_length
        self.at = at + size
        return 1


class StoredRecord:
    """One record in place, reused; all lengths are checked before any other field is read."""

    def __init__(self) -> None:
        # The buffer that positions refer to, from `bind` to `release`.
        self.buffer: memoryview = memoryview(bytearray(1))
        # Positions of the broker's own properties; valid after `scan`.
        self.marks: PropertyMarks = PropertyMarks()
        # Records below this log offset are known to be on the disk; set by recovery.
        self.durable_to: int = 0
        # Why the last `read` or `check` returned NOTHING: an index of PROBLEMS.
        self.problem: int = 0
        # The record found by the last `read`, valid until the next. Positions count from the
        # begin of the buffer.
        self.at: int = 0
        self.size: int = 0
        self.magic: int = 0
        self.body_crc: int = 0
        self.queue_id: int = 0
        self.flag: int = 0
        self.queue_offset: int = 0
        self.physical_offset: int = 0
        self.sys_flag: int = 0
        self.born_ms: int = 0
        self.born_host_length: int = 8
        self.store_ms: int = 0
        self.store_host_at: int = 0
        self.store_host_length: int = 8
        self.reconsume_times: int = 0
        self.prepared_offset: int = 0
        self.body_at: int = 0
        self.body_length: int = 0
        self.topic_at: int = 0
        self.topic_length: int = 0
        self.properties_at: int = 0
        self.properties_length: int = 0

    def bind(self, buffer: memoryview) -> None:
        self.buffer = buffer
        self.marks.bind(buffer)

    def release(self) -> None:
        self.buffer = memoryview(bytearray(1))
        self.marks.release()

    def read(self, at: int, end: int) -> int:
        """What is at `at` of the bound buffer, whose content ends at `end`.

        RECORD with all fields set, BLANK with `size` set, or NOTHING with the `problem`'s number.
        """
        self.at = at
        if end - at < layout.HEAD_BYTES:
            return self._nothing(_SHORT)
        size = octets.get_i32(self.buffer, at + layout.SIZE_AT)
        magic = octets.get_i32(self.buffer, at + layout.MAGIC_AT)
        self.size = size
        self.magic = magic
        if magic == layout.MAGIC_BLANK:
            if size < layout.BLANK_BYTES or size > end - at:
                return self._nothing(_BEYOND)
            self.problem = 0
            return _BLANK
        if magic != layout.MAGIC_V1 and magic != layout.MAGIC_V2:
            return self._nothing(_UNWRITTEN if magic == 0 and size == 0 else _MAGIC)
        if size < layout.FIXED_BYTES or size > end - at:
            return self._nothing(_BEYOND)
        return self._read_lengths(at, at + size)

    def _read_lengths(self, at: int, end: int) -> int:
        sys_flag = octets.get_i32(self.buffer, at + layout.SYS_FLAG_AT)
        self.sys_flag = sys_flag
        self.born_host_length = layout.born_host_length(sys_flag)
        self.store_host_length = layout.store_host_length(sys_flag)
        self.body_at = at + layout.body_at(sys_flag)
        if self.body_at > end:
            return self._nothing(_LENGTHS)
        self.body_length = octets.get_i32(
            self.buffer, self.body_at - layout.BODY_LENGTH_BEFORE_BODY
        )
        topic_prefix = layout.topic_length_bytes(self.magic)
        left = end - self.body_at - topic_prefix - layout.PROPERTIES_LENGTH_BYTES
        if self.body_length < 0 or self.body_length > left:
            return self._nothing(_LENGTHS)
        place = self.body_at + self.body_length
        if topic_prefix == 2:
            self.topic_length = octets.get_i16(self.buffer, place)
        else:
            self.topic_length = self.buffer[place]
        self.topic_at = place + topic_prefix
        left = end - self.topic_at - layout.PROPERTIES_LENGTH_BYTES
        if self.topic_length < 0 or self.topic_length > left:
            return self._nothing(_LENGTHS)
        place = self.topic_at + self.topic_length
        self.properties_length = octets.get_i16(self.buffer, place)
        self.properties_at = place + layout.PROPERTIES_LENGTH_BYTES
        if self.properties_length < 0 or self.properties_at + self.properties_length != end:
            return self._nothing(_LENGTHS)
        self._read_numbers(at)
        return _RECORD

    def _read_numbers(self, at: int) -> None:
        self.problem = 0
        self.body_crc = octets.get_i32(self.buffer, at + layout.BODY_CRC_AT)
        self.queue_id = octets.get_i32(self.buffer, at + layout.QUEUE_ID_AT)
        self.flag = octets.get_i32(self.buffer, at + layout.FLAG_AT)
        self.queue_offset = octets.get_i64(self.buffer, at + layout.QUEUE_OFFSET_AT)
        self.physical_offset = octets.get_i64(self.buffer, at + layout.PHYSICAL_OFFSET_AT)
        self.born_ms = octets.get_i64(self.buffer, at + layout.BORN_MS_AT)
        self.store_ms = octets.get_i64(self.buffer, at + layout.store_ms_at(self.sys_flag))
        self.store_host_at = at + layout.store_host_at(self.sys_flag)
        at = self.body_at
        self.reconsume_times = octets.get_i32(self.buffer, at - layout.RECONSUME_TIMES_BEFORE_BODY)
        self.prepared_offset = octets.get_i64(self.buffer, at - layout.PREPARED_OFFSET_BEFORE_BODY)

    def check(self, physical_offset: int) -> int:
        """After `read` returned RECORD: RECORD if it is complete and belongs to this log offset.

        Records below `durable_to` are known to be on the disk, so they can't be torn.
        """
        if self.physical_offset != physical_offset:
            return self._nothing(_ELSEWHERE)
        if octets.crc31(self.buffer, self.body_at, self.body_length) != self.body_crc:
            return self._nothing(_CRC)
        if physical_offset + self.size > self.durable_to and self._sector_missing(physical_offset):
            return self._nothing(_TORN)
        return _RECORD

    def _sector_missing(self, physical_offset: int) -> bool:
        """Whether topic and properties are all zeros in one of their sectors.

        The body has a CRC, the text behind it has none. Segments are zero until they are written,
        so a sector that a power cut lost is zero.
        """
        end = self.properties_at + self.properties_length
        if self.properties_length == 0:
            end = self.topic_at + self.topic_length  # the length field is zero then
        place = self.topic_at
        to_next = _SECTOR_BYTES - (physical_offset + (place - self.at)) % _SECTOR_BYTES
        while place < end:
            stop = min(place + to_next, end)
            share = place
            while share < stop and self.buffer[share] == 0:
                share += 1
            if share == stop:
                return True
            place = stop
            to_next = _SECTOR_BYTES
        return False

    def scan(self) -> None:
        """Find tags and keys among the properties."""
        self.marks.scan(self.properties_at, self.properties_at + self.properties_length)

    def _nothing(self, problem: int) -> int:
        self.problem = problem
        return _NOTHING
