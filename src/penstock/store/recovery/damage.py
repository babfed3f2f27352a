"""Decides what it means that the log has no valid record at a position; for recovery and `verify`.

Three cases:

* END: no valid record follows. This is the log's end, perhaps with a record that a crash left
  incomplete.
* TORN: valid records follow, but a sector before them was never written, as after a power failure.
  It is the same as an end: nothing from there on was promised.
* DAMAGED: valid records follow, or the checkpoint says that the bytes were on the disk. Nobody but
  a faulty disk, or another program, changes such bytes: what follows them is kept.

A power failure loses only what was not on the disk. So nothing is torn below the confirm offset of
the checkpoint, in a store that was closed, or if the operating system has not restarted since the
store was opened (`opened_here`): then only the process died, and the page cache has everything.

The next valid record is found by its magic number, plausible lengths, its own log offset and the
CRC of its body. Files are read, never mapped.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from penstock.store.segment import Segment
from penstock.wire import layout, octets
from penstock.wire.codes import (
    SYS_TRANSACTION_MASK,
    SYS_TRANSACTION_PREPARED,
    SYS_TRANSACTION_ROLLBACK,
)
from penstock.wire.record import PROBLEMS, RECORD, StoredRecord

END, TORN, DAMAGED = range(3)

SECTOR_BYTES = 512
TORN_BYTES_LEAST = 64
"""Fewer zeros in a sector may be a message's own data."""
TORN_BYTES_MAX = 8 * 1024 * 1024
"""How much of an invalid range is searched for a sector that was never written."""
RECORD_BYTES_MAX = 64 * 1024 * 1024
"""Longer ranges are not read as one record to find out whose message was there."""
_SEARCH_BYTES_LEAST, _SEARCH_BYTES_MAX = 4096, 1024 * 1024
_ZEROS = bytes(_SEARCH_BYTES_MAX)
LENGTHS = 5
"""The problem of lengths that do not add up; after a greater number the size is plausible."""
HEAD_BYTES = layout.SYS_FLAG_AT
"""Up to the log offset that a record carries."""


def _magic(number: int) -> bytes:
    return number.to_bytes(4, "big", signed=True)


_MAGICS = (_magic(layout.MAGIC_V1), _magic(layout.MAGIC_V2))
_MAGIC_HEAD = _MAGICS[0][:3]  # both begin with it
_MAGIC_BLANK = _magic(layout.MAGIC_BLANK)


class LogPart(NamedTuple):
    """One file of the log. `length` may be less than a segment; positions count from its begin."""

    start: int
    length: int
    read: Callable[[int, int], bytes | bytearray]
    """(position, length) → bytes, fewer at the end of the file."""
    data_ranges: Callable[[int, int], list[tuple[int, int]]]
    """(begin, end) → the ranges of positions between them that are not holes."""


def part_of(segment: Segment) -> LogPart:
    """An open segment; may wait for the disk."""
    disk, fd = segment.disk, segment.fd
    return LogPart(
        segment.start,
        segment.size,
        lambda at, length: disk.read_at(fd, length, at),
        lambda at, end: disk.data_ranges(fd, at, end),
    )


class LostMessage(NamedTuple):
    """What can still be read of a damaged record."""

    topic: bytes
    queue_id: int
    queue_offset: int
    queued: bool
    """Whether it had a queue entry."""

    def __str__(self) -> str:
        text = f"a message of topic {self.topic.decode()}, queue {self.queue_id}"
        return text + f", queue offset {self.queue_offset}" if self.queued else text


class DamageVerdict(NamedTuple):
    """What is at a position without a valid record."""

    case: int
    following: int
    """Where valid records, or the bytes that the checkpoint covers, continue; at the END the
    position itself."""
    reason: str


class DamageJudge:
    """Judges positions of one log.

    `durable_to`: nothing below is torn. `confirm_offset`: the checkpoint's, up to which the log was
    on the disk. `durable_to` is not smaller.
    """

    def __init__(
        self,
        parts: Sequence[LogPart],
        segment_bytes: int,
        *,
        durable_to: int,
        confirm_offset: int,
    ) -> None:
        self._parts = parts
        self._segment_bytes = segment_bytes
        self._durable_to = durable_to
        self._confirm_offset = confirm_offset

    def judge(self, offset: int, problem: int, size: int) -> DamageVerdict:
        """Judge a position without a valid record.

        `problem` and `size` are the fields of the StoredRecord that was read there. Problem 0 means
        a blank record that does not reach the segment's end.
        """
        reason = PROBLEMS[problem] if problem else "the blank record ends before the segment"
        following = self._following(offset, problem, size)
        if following is None:
            if offset < self._confirm_offset and self._has_data(offset, self._confirm_offset):
                return DamageVerdict(DAMAGED, self._confirm_offset, reason)
            return DamageVerdict(END, offset, reason)
        if self._is_torn(offset, following, problem):
            return DamageVerdict(TORN, following, reason)
        return DamageVerdict(DAMAGED, following, reason)

    def lost_message(
        self, offset: int, following: int, problem: int, size: int
    ) -> LostMessage | None:
        """Whose message was at a damaged position, if its header is readable."""
        part = self._part(offset)
        if part is None:
            return None
        sizes = [size] if problem > LENGTHS else []
        for length in (*sizes, following - offset):
            if not layout.FIXED_BYTES <= length <= RECORD_BYTES_MAX:
                continue
            data = bytearray(part.read(offset - part.start, length))
            found = _read_leniently(data, offset) if len(data) == length else None
            if found is not None:
                topic = bytes(data[found.topic_at : found.topic_at + found.topic_length])
                kind = found.sys_flag & SYS_TRANSACTION_MASK
                queued = kind not in (SYS_TRANSACTION_PREPARED, SYS_TRANSACTION_ROLLBACK)
                return LostMessage(topic, found.queue_id, found.queue_offset, queued)
        return None

    def next_record(self, offset: int) -> int | None:
        """Where the first valid record from `offset` on begins, or None."""
        return self._search(offset, blanks=False)

    def data_end(self, offset: int) -> int:
        """Behind the last byte from `offset` on that is not zero; `offset` if there is none."""
        end = offset
        for part in self._parts:
            if part.start + part.length > offset:
                for at, piece in _pieces(part, max(offset - part.start, 0), part.length):
                    end = part.start + at + len(piece.rstrip(b"\0"))
        return end

    def _following(self, offset: int, problem: int, size: int) -> int | None:
        """Where records continue behind an invalid one, or None."""
        if problem > LENGTHS:  # its size is plausible
            behind = offset + size
            part = self._part(behind)
            if part is not None and self._begins_record(part, behind - part.start):
                return behind
        return self._search(offset + 1, blanks=True)

    def _search(self, offset: int, *, blanks: bool) -> int | None:
        for part in self._parts:
            if part.start + part.length > offset:
                at = max(offset - part.start, 0)
                found = search(part, at, self._segment_bytes, self._durable_to, blanks=blanks)
                if found is not None:
                    return found
        return None

    def _begins_record(self, part: LogPart, at: int) -> bool:
        """Whether a record begins there that names this log offset: it may be damaged too."""
        end = min(part.length, self._segment_bytes)
        head = part.read(at, HEAD_BYTES)
        if is_blank(head, at, self._segment_bytes):
            return True
        size = plausible_size(head, part.start + at, end - at)
        stored = StoredRecord()
        if size == 0:
            return False
        stored.bind(memoryview(bytearray(part.read(at, size))))
        return stored.read(0, size) == RECORD

    def _is_torn(self, offset: int, following: int, problem: int) -> bool:
        """Whether a sector of an invalid range was never written."""
        part = self._part(offset)
        if offset < self._durable_to or part is None:
            return False
        at = offset - part.start
        end = min(following - part.start, part.length)
        data = part.read(at, min(end - at, TORN_BYTES_MAX))
        to_sector = SECTOR_BYTES - at % SECTOR_BYTES
        edges = [0, *range(to_sector % SECTOR_BYTES, len(data), SECTOR_BYTES), len(data)]
        if any(
            high - low >= TORN_BYTES_LEAST and not any(data[low:high])
            for low, high in itertools.pairwise(edges)
        ):
            return True
        # A sector that ended here when it was last written, and then a record that was: its size,
        # or the first bytes of its size, are missing.
        known = min(to_sector, 4)
        missing = (following - offset) >> 8 * (4 - known)
        return problem <= LENGTHS and missing > 0 and not any(data[:to_sector])

    def _has_data(self, offset: int, end: int) -> bool:
        for part in self._parts:
            begin, stop = max(offset - part.start, 0), min(end - part.start, part.length)
            if begin < stop and any(True for _ in _pieces(part, begin, stop)):
                return True
        return False

    def _part(self, offset: int) -> LogPart | None:
        return next((p for p in self._parts if p.start <= offset < p.start + p.length), None)


def _read_leniently(data: bytearray, offset: int) -> StoredRecord | None:
    """The record in these bytes, whatever its size and magic number are.

    One byte of its log offset may be damaged; if more differ it belongs elsewhere.
    """
    octets.put_i32(data, layout.SIZE_AT, len(data))
    if data[layout.MAGIC_AT : layout.BODY_CRC_AT] not in _MAGICS:
        data[layout.MAGIC_AT : layout.BODY_CRC_AT] = _MAGICS[0]
    stored = StoredRecord()
    stored.bind(memoryview(data))
    if stored.read(0, len(data)) != RECORD or stored.topic_length == 0:
        return None
    named = stored.physical_offset.to_bytes(8, "big", signed=True)
    wrong = sum(a != b for a, b in zip(named, offset.to_bytes(8, "big"), strict=True))
    return stored if wrong <= 1 else None


def search(
    part: LogPart, at: int, segment_bytes: int, durable_to: int = 0, *, blanks: bool = False
) -> int | None:
    """The log offset of a file's first valid record from position `at` on, or None.

    With `blanks`, and if there is none, that of the blank record at the segment's end.
    """
    least, end, blank = at, min(part.length, segment_bytes), None
    stored = StoredRecord()
    stored.durable_to = durable_to
    for begin, data in _pieces(part, at, end, overlap=3):
        for hit in record_places(data):
            place = begin + hit
            if place >= least and is_record(stored, part, place, end):
                return part.start + place
        for hit in blank_places(data) if blanks and blank is None else ():
            place = begin + hit
            if place >= least and is_blank(part.read(place, 8), place, segment_bytes):
                blank = part.start + place
    return blank


def _pieces(
    part: LogPart, at: int, end: int, overlap: int = 0
) -> Iterator[tuple[int, bytes | bytearray]]:
    """Pieces of a file that are not zero, with their positions.

    Each begins with the last bytes of the one before. They grow: mostly the first one is enough.
    """
    size = _SEARCH_BYTES_LEAST
    # All ranges before anything is read: read-ahead brings the next hole into the page cache, and
    # then it counts as data. So reading could go on to the end of the file.
    for begin, stop in part.data_ranges(at, end):
        at = begin
        while at < stop:
            data = part.read(at, min(size, stop - at))
            if not data:
                return
            if not _ZEROS.startswith(data):
                yield at, data
            at += max(len(data) - overlap, 1) if at + len(data) < stop else len(data)
            size = min(4 * size, _SEARCH_BYTES_MAX)


def record_places(data: bytes | bytearray) -> Iterator[int]:
    """Where a record may begin by its magic number; less than 0 if that is before `data`."""
    for hit in _finds(data, _MAGIC_HEAD):
        if data[hit : hit + 4] in _MAGICS:
            yield hit - layout.MAGIC_AT


def blank_places(data: bytes | bytearray) -> Iterator[int]:
    """Where a blank record may begin by its magic number."""
    return (hit - layout.MAGIC_AT for hit in _finds(data, _MAGIC_BLANK))


def _finds(data: bytes | bytearray, what: bytes) -> Iterator[int]:
    hit = data.find(what)
    while hit >= 0:
        yield hit
        hit = data.find(what, hit + 1)


def is_record(stored: StoredRecord, part: LogPart, at: int, end: int) -> bool:
    """Whether a valid record begins there."""
    size = plausible_size(part.read(at, HEAD_BYTES), part.start + at, end - at)
    if size == 0:
        return False
    stored.bind(memoryview(bytearray(part.read(at, size))))
    return stored.read(0, size) == RECORD and stored.check(part.start + at) == RECORD


def plausible_size(head: bytes | bytearray, offset: int, left: int) -> int:
    """The size of the record with this head if it is plausible and names this offset, else 0.

    Nothing else of a record is read then: the search must not be quadratic in a range full of
    records that belong elsewhere.
    """
    if len(head) < HEAD_BYTES:
        return 0
    size = octets.get_i32(head, layout.SIZE_AT)
    if not layout.FIXED_BYTES <= size <= left:
        return 0
    return size if octets.get_i64(head, layout.PHYSICAL_OFFSET_AT) == offset else 0


def is_blank(head: bytes | bytearray, at: int, segment_bytes: int) -> bool:
    """Whether this is a blank record that reaches the segment's end."""
    return (
        len(head) >= layout.BLANK_BYTES
        and octets.get_i32(head, layout.MAGIC_AT) == layout.MAGIC_BLANK
        and at + octets.get_i32(head, layout.SIZE_AT) == segment_bytes
    )
