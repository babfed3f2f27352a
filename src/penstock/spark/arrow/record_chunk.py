"""Plain records, some hundred at a time: where everything lies that their columns are made of.

A walk notes places as long as records are as nearly all are. It stops before the first that is not,
which then goes the long way by itself (`spark.placed`): there it is found out what is wrong with
it, or it is taken by rules that need more time. So nothing is decided here that could be disputed,
and columns are written (`spark.batch`) in one loop each.
"""

from array import array
from collections.abc import Callable

from penstock.spark.arrow import byte_access
from penstock.wire import layout, octets
from penstock.wire.codes import (
    SYS_COMPRESSED,
    SYS_INNER_BATCH,
    SYS_NEED_UNWRAP,
    SYS_TRANSACTION_MASK,
    SYS_TRANSACTION_PREPARED,
    SYS_TRANSACTION_ROLLBACK,
)

ROWS = 128  # their bytes and places stay near the processor
RECORD_BYTES_MAX = 1 << 20
# The numbers of a row; places are counted from `base` on, and what has a length has it next to it.
WIDTH = 16
AT, STORE_AT, BODY, TOPIC, UNIQUE, TAGS, KEYS, PIECES_END = 0, 1, 2, 4, 6, 8, 10, 12
NAMES, CONTENTS, SPAN = 0, 2, 4  # the numbers of a piece

# Twins for the compiler, which keeps them to itself.
_ROWS, _WIDTH, _RECORD_BYTES_MAX = ROWS, WIDTH, RECORD_BYTES_MAX
_STORE_AT, _BODY, _TOPIC, _UNIQUE, _TAGS, _PIECES_END = (
    STORE_AT,
    BODY,
    TOPIC,
    UNIQUE,
    TAGS,
    PIECES_END,
)
_SLACK = byte_access.CUT_SLACK
_RARE, _FRESH, _COUNT = (
    byte_access.PIECES_RARE,
    byte_access.PIECES_FRESH,
    byte_access.PIECES_RARE - 1,
)
_PIECES = ROWS * 16
_PIECES_FULL = _PIECES - byte_access.PIECES_MAX
_REACH = 1 << 30
_COMPRESSED, _UNPLAIN = SYS_COMPRESSED, SYS_INNER_BATCH | SYS_NEED_UNWRAP
_TRANSACTION = SYS_TRANSACTION_MASK
_PREPARED, _ROLLBACK = SYS_TRANSACTION_PREPARED, SYS_TRANSACTION_ROLLBACK
_KNOWN = 256  # topics whose verdict is kept; a power of two
_NO, _YES, _ODD = 1, 2, 3  # verdicts; a topic that is wanted may have more than ASCII


class Chunk:
    """Places of `rows` records that were not written into columns yet.

    `rare`: some may have properties of which few columns are made; `same_names`, `same_topic`: all
    have those of the first, as far as that is known.

    Whoever walks says before what is needed of a record, which ones are wanted, and how many rows
    and bytes there may be.
    """

    def __init__(self, *, body: bool, topic: bool, properties: bool) -> None:
        self.source: memoryview = memoryview(b"\0")
        self.base: int = 0
        self.rows: int = 0
        self.pieces: int = 0
        self.weight: int = 0
        self.rare: bool = False
        self.same_names: bool = True
        self.same_topic: bool = True
        self.full: bool = False
        self.places: memoryview = memoryview(array("i", bytes(4 * WIDTH * ROWS)))
        self.spans: memoryview = memoryview(array("i", bytes(4 * SPAN * _PIECES)))
        self._notes: memoryview = memoryview(array("Q", bytes(8 * byte_access.CUT_NOTES)))
        self._body: bool = body
        self._topic: bool = topic
        self._properties: bool = properties
        self._row_bytes: int = 0
        self._rows_max: int = 0
        self._weight_max: int = 0
        self.offset: int = 0
        self._tags: tuple[bytes, ...] | None = None
        self._cut: bool = properties
        self._topics: Callable[[bytes], bool] | None = None
        self._first_ms: int = 0
        self._until_ms: int = 0
        self._check_crc: bool = False
        self._known: list[bytes | None] = [None] * _KNOWN
        self._verdicts: bytearray = bytearray(_KNOWN)
        self._last: int = 0

    # --- what is wanted

    def ask(self, topics: Callable[[bytes], bool] | None, tags: tuple[bytes, ...] | None) -> None:
        """Take records of these topics (None: of all) and tags."""
        if topics is not self._topics:
            self._topics = topics
            self._known = [None] * _KNOWN
        self._tags = tags
        self._cut = self._properties or tags is not None

    def ask_log(self, first_ms: int, until_ms: int, check_crc: bool) -> None:
        self._first_ms, self._until_ms, self._check_crc = first_ms, until_ms, check_crc

    def allow(self, rows: int, weight: int, row_bytes: int) -> None:
        """There may be so many rows in all, and bytes if each has `row_bytes` and its texts."""
        self._rows_max = min(rows, _ROWS)
        self._weight_max = weight
        self._row_bytes = row_bytes

    def bind(self, source: memoryview) -> None:
        self.source = source
        self.clear()

    def clear(self) -> None:
        self.rows = 0
        self.pieces = 0
        self.weight = 0
        self.rare = False
        self.same_names = True
        self.same_topic = True

    # --- walks

    def walk_answer(self, at: int, end: int, until: int) -> int:
        """Note plain records of an answer with offsets from `offset` on; where that ended."""
        self._begin(at)
        while at < end and not self._is_full(at):
            size = self._place(at, end)
            if size == 0:
                break
            offset = octets.get_i64(self.source, at + layout.QUEUE_OFFSET_AT)
            if offset >= until:
                break
            if offset >= self.offset:
                if self._topic and self._verdict() != _YES:
                    break
                if not self._take(at, size):
                    break
                self.offset = offset + 1
            at += size
        return at

    def walk_log(self, at: int, end: int, limit: int, log_offset: int) -> int:
        """Note plain records of a log that begin before `end`, and pass over those that are not
        wanted; where that ended."""
        self._begin(at)
        while at < end and not self._is_full(at):
            size = self._place(at, limit)
            if size == 0:
                break
            if octets.get_i64(self.source, at + layout.PHYSICAL_OFFSET_AT) != log_offset + at:
                break
            if self._is_whole(at):
                verdict = self._verdict()
                if verdict != _NO:
                    if verdict == _ODD and self._topic:
                        break
                    if self._is_damaged(at) or not self._take(at, size):
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
            or self.pieces > _PIECES_FULL
            or at - self.base > _REACH
        )
        return self.full

    def _place(self, at: int, end: int) -> int:
        """The size of the record there, whose places are noted behind the last row; 0 if it is not
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
        if sys_flag & _UNPLAIN or (self._body and sys_flag & _COMPRESSED):
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

    def _is_whole(self, at: int) -> bool:
        """Whether it is no half of a transaction, and stored when it should be."""
        transaction = octets.get_i32(self.source, at + layout.SYS_FLAG_AT) & _TRANSACTION
        if transaction in (_PREPARED, _ROLLBACK):
            return False
        store_at = self.base + self.places[self.rows * _WIDTH + _STORE_AT]
        stored_ms = octets.get_i64(self.source, store_at)
        return self._first_ms <= stored_ms < self._until_ms

    def _is_damaged(self, at: int) -> bool:
        """Whether it has to be looked at; `_take` finds other reasons."""
        row = self.rows * _WIDTH
        body_at, length = self.base + self.places[row + _BODY], self.places[row + _BODY + 1]
        if self._check_crc:
            crc = octets.get_i32(self.source, at + layout.BODY_CRC_AT)
            if octets.crc31(self.source, body_at, length) != crc:
                return True
        if self._cut:
            return False
        text_at = self.base + self.places[row + _TOPIC] + self.places[row + _TOPIC + 1] + 2
        end = at + octets.get_i32(self.source, at + layout.SIZE_AT)
        return octets.find(self.source, text_at, end, 0) >= 0

    def _take(self, at: int, size: int) -> bool:
        """Make the placed record a row, if its tag is wanted; False if it is not plain."""
        row = self.rows * _WIDTH
        text_at = self.base + self.places[row + _TOPIC] + self.places[row + _TOPIC + 1] + 2
        length = at + size - text_at
        if self._cut:
            count = byte_access.cut(
                self.source,
                text_at,
                length,
                self.base,
                self.spans,
                self.pieces,
                self.places,
                row + _UNIQUE,
                self._notes,
            )
            if count < 0:
                return False
            if count & _FRESH and self.rows > 0:
                self.same_names = False
            if self._tags is not None and not self._is_tagged(row):
                return True
            self.rare = self.rare or count & _RARE != 0
            self.pieces += count & _COUNT
        self.places[row + _PIECES_END] = self.pieces
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

    def _verdict(self) -> int:
        row = self.rows * _WIDTH + _TOPIC
        return self.verdict(self.base + self.places[row], self.places[row + 1])

    def wants(self, topic_at: int, length: int) -> bool:
        """Whether records of this topic are wanted."""
        return self.verdict(topic_at, length) != _NO

    def verdict(self, at: int, length: int) -> int:
        place = self._last
        if not self._knows(place, at, length):
            place = octets.mix_hash(self.source, at, length, 0) & (_KNOWN - 1)
            if not self._knows(place, at, length):
                self._judge(place, at, length)
            self._last = place
            self.same_topic = self.rows == 0
        return self._verdicts[place]

    def _knows(self, place: int, at: int, length: int) -> bool:
        """Whether the verdict there is about this topic."""
        known = self._known[place]
        return known is not None and len(known) == length and octets.matches(self.source, at, known)

    def _judge(self, place: int, at: int, length: int) -> None:
        topic = bytes(self.source[at : at + length])
        verdict = _YES if topic.isascii() else _ODD
        if self._topics is not None and not self._topics(topic):
            verdict = _NO
        self._verdicts[place] = verdict
        self._known[place] = topic
