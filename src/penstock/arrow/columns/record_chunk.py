"""Plain records, about a hundred at a time: the positions of everything that columns need.

The fast path: a walk collects positions as long as records are plain, which nearly all are. It
stops before the first record that is not. That one takes the slow path (`record_view`), which finds
out what is wrong with it, or handles it. So the fast path decides nothing that is in doubt, and
every column is written in one loop (`record_batch`).
"""

from array import array
from collections.abc import Callable

from penstock.arrow.columns import byte_access
from penstock.wire import layout, octets
from penstock.wire.codes import (
    SYS_COMPRESSED,
    SYS_INNER_BATCH,
    SYS_NEED_UNWRAP,
    SYS_TRANSACTION_MASK,
    SYS_TRANSACTION_PREPARED,
    SYS_TRANSACTION_ROLLBACK,
)

ROWS = 128  # their bytes and positions stay in the processor's cache
RECORD_BYTES_MAX = 1 << 20
# The numbers of a row: positions from `base`, followed by the length where there is one.
WIDTH = 16
AT, STORE_AT, BODY, TOPIC, UNIQUE, TAGS, KEYS, PROPERTIES_END = 0, 1, 2, 4, 6, 8, 10, 12
NAMES, VALUES, SPAN_WIDTH = 0, 2, 4  # the numbers of a property

# Copies with a C type, which are not visible from outside.
_ROWS, _WIDTH, _RECORD_BYTES_MAX = ROWS, WIDTH, RECORD_BYTES_MAX
_STORE_AT, _BODY, _TOPIC, _UNIQUE, _TAGS, _PROPERTIES_END = (
    STORE_AT,
    BODY,
    TOPIC,
    UNIQUE,
    TAGS,
    PROPERTIES_END,
)
_SLACK = byte_access.READ_SLACK
_RARE, _NEW_NAMES, _COUNT = (
    byte_access.FLAG_RARE,
    byte_access.FLAG_NEW_NAMES,
    byte_access.FLAG_RARE - 1,
)
_PROPERTIES_CAPACITY = ROWS * 16
_PROPERTIES_FULL = _PROPERTIES_CAPACITY - byte_access.PROPERTIES_MAX
_DISTANCE_MAX = 1 << 30
_COMPRESSED, _NOT_PLAIN = SYS_COMPRESSED, SYS_INNER_BATCH | SYS_NEED_UNWRAP
_TRANSACTION = SYS_TRANSACTION_MASK
_PREPARED, _ROLLBACK = SYS_TRANSACTION_PREPARED, SYS_TRANSACTION_ROLLBACK
_CACHE_SIZE = 256  # topics whose match is cached; a power of two
_UNWANTED, _WANTED, _NOT_ASCII = 1, 2, 3  # matches; a _NOT_ASCII topic is wanted, too


class RecordChunk:
    """Positions of `rows` records that are not written into columns yet.

    Before a walk the caller sets the filter and the limits.
    """

    def __init__(self, *, body: bool, topic: bool, properties: bool) -> None:
        self.source: memoryview = memoryview(b"\0")  # the bytes that contain the records
        # The records of this chunk, until `clear`.
        self.base: int = 0  # all positions are relative to this one
        self.rows: int = 0
        self.property_count: int = 0
        self.weight: int = 0  # upper bound of the bytes that the rows need
        self.rare: bool = False  # a record may have a rare property
        self.same_names: bool = True  # all records are known to have the first one's property names
        self.same_topic: bool = True  # all records are known to have the first one's topic
        self.full: bool = False  # the last walk stopped because of a limit
        self.places: memoryview = memoryview(array("i", bytes(4 * WIDTH * ROWS)))
        self.spans: memoryview = memoryview(
            array("i", bytes(4 * SPAN_WIDTH * _PROPERTIES_CAPACITY))
        )
        self._parse_state: memoryview = memoryview(
            array("Q", bytes(8 * byte_access.PARSE_STATE_WORDS))
        )
        # What the columns need of a record.
        self._body: bool = body
        self._topic: bool = topic
        self._properties: bool = properties
        # Limits of the next walk.
        self._row_bytes: int = 0
        self._rows_max: int = 0
        self._weight_max: int = 0
        self.offset: int = 0  # pull responses: the next queue offset
        # The filter, until the next set_filter or set_period.
        self._tags: tuple[bytes, ...] | None = None
        self._needs_properties: bool = properties
        self._topics: Callable[[bytes], bool] | None = None
        self._first_ms: int = 0
        self._until_ms: int = 0
        self._check_crc: bool = False
        # Whether topics match: a hash table of the filter's answers.
        self._cached_topics: list[bytes | None] = [None] * _CACHE_SIZE
        self._cached_matches: bytearray = bytearray(_CACHE_SIZE)
        self._last_slot: int = 0

    # --- filter and limits

    def set_filter(
        self,
        topics: Callable[[bytes], bool] | None,
        tags: tuple[bytes, ...] | None,
        check_crc: bool,
    ) -> None:
        """Select records of these topics (None: all) and tags; bodies may have to match the CRC."""
        if topics is not self._topics:
            self._topics = topics
            self._cached_topics = [None] * _CACHE_SIZE
        self._tags = tags
        self._check_crc = check_crc
        self._needs_properties = self._properties or tags is not None

    def set_period(self, first_ms: int, until_ms: int) -> None:
        """Select records of a log that were stored in this period."""
        self._first_ms, self._until_ms = first_ms, until_ms

    def set_limits(self, rows: int, weight: int, row_bytes: int) -> None:
        """Limit the rows and their bytes; a row has `row_bytes` and its texts."""
        self._rows_max = min(rows, _ROWS)
        self._weight_max = weight
        self._row_bytes = row_bytes

    def bind(self, source: memoryview) -> None:
        self.source = source
        self.clear()

    def clear(self) -> None:
        self.rows = 0
        self.property_count = 0
        self.weight = 0
        self.rare = False
        self.same_names = True
        self.same_topic = True

    # --- walks

    def walk_answer(self, at: int, end: int, until: int) -> int:
        """Add plain records of a pull response from `offset` on; returns where it stopped."""
        self._begin(at)
        while at < end and not self._is_full(at):
            size = self._locate(at, end)
            if size == 0:
                break
            offset = octets.get_i64(self.source, at + layout.QUEUE_OFFSET_AT)
            if offset >= until:
                break
            if offset >= self.offset:
                if self._topic and self._row_topic_match() != _WANTED:
                    break
                if not self._matches_crc(at) or not self._add_row(at, size):
                    break
                self.offset = offset + 1
            at += size
        return at

    def walk_log(self, at: int, end: int, limit: int, log_offset: int) -> int:
        """Add plain records of a log that start before `end` and skip unwanted ones; returns where
        it stopped."""
        self._begin(at)
        while at < end and not self._is_full(at):
            size = self._locate(at, limit)
            if size == 0:
                break
            if octets.get_i64(self.source, at + layout.PHYSICAL_OFFSET_AT) != log_offset + at:
                break
            if self._is_visible(at):
                topic_match = self._row_topic_match()
                if topic_match != _UNWANTED:
                    if topic_match == _NOT_ASCII and self._topic:
                        break
                    if self._is_damaged(at) or not self._add_row(at, size):
                        break
            at += size
        return at

    def _begin(self, at: int) -> None:
        if self.rows == 0:
            self.base = at

    def _is_full(self, at: int) -> bool:
        self.full = (
            self.rows >= self._rows_max
            or self.weight >= self._weight_max
            or self.property_count > _PROPERTIES_FULL
            or at - self.base > _DISTANCE_MAX
        )
        return self.full

    def _locate(self, at: int, end: int) -> int:
        """Write the record's positions after the last row; returns its size, or 0 if it is not
        plain."""
        left = end - at - _SLACK
        if left < layout.FIXED_BYTES:
            return 0
        size = octets.get_i32(self.source, at + layout.SIZE_AT)
        magic = octets.get_i32(self.source, at + layout.MAGIC_AT)
        if size < layout.FIXED_BYTES or size > left or size > _RECORD_BYTES_MAX:
            return 0
        if magic != layout.MAGIC_V1 and magic != layout.MAGIC_V2:
            return 0
        sys_flag = octets.get_i32(self.source, at + layout.SYS_FLAG_AT)
        if sys_flag & _NOT_PLAIN or (self._body and sys_flag & _COMPRESSED):
            return 0
        row = self.rows * _WIDTH
        left = at + size
        self.places[row] = at - self.base
        self.places[row + _STORE_AT] = at + layout.store_ms_at(sys_flag) - self.base
        place = at + layout.body_at(sys_flag)
        if place > left:
            return 0
        length = octets.get_i32(self.source, place - layout.BODY_LENGTH_BEFORE_BODY)
        prefix = layout.topic_length_bytes(magic)
        if length < 0 or length > left - place - prefix - layout.PROPERTIES_LENGTH_BYTES:
            return 0
        self.places[row + _BODY] = place - self.base
        self.places[row + _BODY + 1] = length
        place += length
        length = octets.get_i16(self.source, place) if prefix == 2 else self.source[place]
        place += prefix
        if length < 0 or length > left - place - layout.PROPERTIES_LENGTH_BYTES:
            return 0
        self.places[row + _TOPIC] = place - self.base
        self.places[row + _TOPIC + 1] = length
        place += length
        length = octets.get_i16(self.source, place)
        place += layout.PROPERTIES_LENGTH_BYTES
        return size if length >= 0 and place + length == left else 0

    def _is_visible(self, at: int) -> bool:
        """Whether the record is not a half message, and was stored in the wanted period."""
        transaction = octets.get_i32(self.source, at + layout.SYS_FLAG_AT) & _TRANSACTION
        if transaction in (_PREPARED, _ROLLBACK):
            return False
        store_at = self.base + self.places[self.rows * _WIDTH + _STORE_AT]
        stored_ms = octets.get_i64(self.source, store_at)
        return self._first_ms <= stored_ms < self._until_ms

    def _is_damaged(self, at: int) -> bool:
        """Whether the record needs the slow path; `_add_row` finds other reasons."""
        if not self._matches_crc(at):
            return True
        if self._needs_properties:
            return False
        row = self.rows * _WIDTH
        text_at = self.base + self.places[row + _TOPIC] + self.places[row + _TOPIC + 1] + 2
        end = at + octets.get_i32(self.source, at + layout.SIZE_AT)
        return octets.find(self.source, text_at, end, 0) >= 0

    def _matches_crc(self, at: int) -> bool:
        """Whether the body matches the record's CRC, or need not."""
        if not self._check_crc:
            return True
        row = self.rows * _WIDTH + _BODY
        crc = octets.crc31(self.source, self.base + self.places[row], self.places[row + 1])
        return crc == octets.get_i32(self.source, at + layout.BODY_CRC_AT)

    def _add_row(self, at: int, size: int) -> bool:
        """Add the record as a row if its tag is wanted; False if it is not plain."""
        row = self.rows * _WIDTH
        text_at = self.base + self.places[row + _TOPIC] + self.places[row + _TOPIC + 1] + 2
        length = at + size - text_at
        if self._needs_properties:
            count = byte_access.parse_properties(
                self.source,
                text_at,
                length,
                self.base,
                self.spans,
                self.property_count,
                self.places,
                row + _UNIQUE,
                self._parse_state,
            )
            if count < 0:
                return False
            if count & _NEW_NAMES and self.rows > 0:
                self.same_names = False
            if self._tags is not None and not self._is_tagged(row):
                return True
            self.rare = self.rare or count & _RARE != 0
            self.property_count += count & _COUNT
        self.places[row + _PROPERTIES_END] = self.property_count
        self.rows += 1
        self.weight += self._row_bytes + size + 4 * length
        return True

    def _is_tagged(self, row: int) -> bool:
        at, length = self.base + self.places[row + _TAGS], self.places[row + _TAGS + 1]
        assert self._tags is not None
        for tag in self._tags:
            if len(tag) == length and octets.matches(self.source, at, tag):
                return length > 0
        return False

    # --- topics

    def _row_topic_match(self) -> int:
        row = self.rows * _WIDTH + _TOPIC
        return self.topic_match(self.base + self.places[row], self.places[row + 1])

    def wants(self, topic_at: int, length: int) -> bool:
        """Whether records of this topic are wanted."""
        return self.topic_match(topic_at, length) != _UNWANTED

    def topic_match(self, at: int, length: int) -> int:
        slot = self._last_slot
        if not self._is_cached(slot, at, length):
            slot = octets.mix_hash(self.source, at, length, 0) & (_CACHE_SIZE - 1)
            if not self._is_cached(slot, at, length):
                self._match_topic(slot, at, length)
            self._last_slot = slot
            self.same_topic = self.rows == 0
        return self._cached_matches[slot]

    def _is_cached(self, slot: int, at: int, length: int) -> bool:
        """Whether this slot of the cache holds this topic."""
        known = self._cached_topics[slot]
        return known is not None and len(known) == length and octets.matches(self.source, at, known)

    def _match_topic(self, slot: int, at: int, length: int) -> None:
        topic = bytes(self.source[at : at + length])
        topic_match = _WANTED if topic.isascii() else _NOT_ASCII
        if self._topics is not None and not self._topics(topic):
            topic_match = _UNWANTED
        self._cached_matches[slot] = topic_match
        self._cached_topics[slot] = topic
