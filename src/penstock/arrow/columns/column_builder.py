"""Records of pull responses and of the log as Arrow columns, without a Python object per row.

A builder parses records in place, selects the wanted ones and writes their columns
(`record_batch`): plain records a hundred at a time (`record_chunk`), others one by one. It stops
when a batch is full, at a record that is not valid, and where a log ends; the caller decides what
to do then. The values are those of `client.received_message.ReceivedMessage`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pyarrow as pa

from penstock.arrow.columns.record_batch import COLUMN_BYTES_MAX, RowBatch
from penstock.arrow.columns.record_chunk import RECORD_BYTES_MAX, RecordChunk
from penstock.arrow.columns.record_view import CRC, ELSEWHERE, LENGTHS, MAGIC, RecordView
from penstock.arrow.message_schema import CONTROL_TOPIC
from penstock.client.received_message import BadRecord, decode_records
from penstock.wire import layout, octets
from penstock.wire.codes import (
    DLQ_TOPIC_PREFIX,
    LMQ_PREFIX,
    RETRY_TOPIC_PREFIX,
    SYS_INNER_BATCH,
    SYS_NEED_UNWRAP,
    SYS_TRANSACTION_MASK,
    SYS_TRANSACTION_PREPARED,
    SYS_TRANSACTION_ROLLBACK,
    is_system_topic,
)
from penstock.wire.record import PROBLEMS

ROWS_MAX = 32_768
BYTES_MAX = 16 * 1024 * 1024
OFFSET_MAX = 2**63 - 1

# Why `add_answer` and `add_log` returned.
DONE = 0  # all bytes were read, or `until` was reached
FULL = 1  # take() the rows, then continue at `position`
BAD = 2  # no valid record at `position`: see `problem`; continue at `resume` unless it is -1
BLANK = 3  # log: a blank record at `position`; the rest of the segment is empty
UNWRITTEN = 4  # log: zeros at `position`
CUT = 5  # log: the record at `position` ends after the limit
_DONE, _FULL, _BAD, _BLANK, _UNWRITTEN, _CUT = DONE, FULL, BAD, BLANK, UNWRITTEN, CUT

# Copies with a C type, which are not visible from outside.
_CRC, _ELSEWHERE, _LENGTHS, _MAGIC = CRC, ELSEWHERE, LENGTHS, MAGIC
_WRAPPED = SYS_INNER_BATCH | SYS_NEED_UNWRAP
_TRANSACTION = SYS_TRANSACTION_MASK
_PREPARED, _ROLLBACK = SYS_TRANSACTION_PREPARED, SYS_TRANSACTION_ROLLBACK
# Below this size any plain record fits.
_CHUNKED_BYTES_MAX = COLUMN_BYTES_MAX - 4 * RECORD_BYTES_MAX


class LogFilter(NamedTuple):
    """Which records of a log become rows; half messages never do."""

    topics: Callable[[bytes], bool]
    """Called for each topic, rarely more than once."""
    tags: frozenset[bytes] | None = None
    first_ms: int = 0
    """Stored at this time or later."""
    until_ms: int = OFFSET_MAX
    """Stored before this time."""
    check_crc: bool = False


def is_user_topic(topic: bytes) -> bool:
    """Whether applications send to this topic: no system, retry, dead-letter or control topic."""
    name = topic.decode("utf-8", "replace")
    prefixes = (RETRY_TOPIC_PREFIX, DLQ_TOPIC_PREFIX, LMQ_PREFIX)
    is_control = name.rpartition("%")[2] == CONTROL_TOPIC  # in any namespace
    return not is_control and not is_system_topic(name) and not name.startswith(prefixes)


class ColumnBuilder:
    """Builds rows of `message_schema.arrow_schema(columns)`; it holds `rows` rows of `size` bytes.

    `topic` and `broker` are the values of these columns; the defaults are the record's topic and
    no broker.
    """

    def __init__(
        self,
        columns: Sequence[str],
        *,
        topic: str | None = None,
        broker: str | None = None,
        rows_max: int = ROWS_MAX,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        assert min(rows_max, bytes_max) > 0, "a batch that is always full never gets a row"
        # Results of the last add.
        self.position: int = 0  # where in the bytes it stopped
        self.offset: int = 0  # pull responses: the next queue offset
        self.resume: int = -1  # after BAD: where the next record starts, if that is known
        self.problem: str = ""  # after BAD: what is wrong
        # Limits of a batch.
        self._rows_max: int = rows_max
        self._bytes_max: int = bytes_max
        self._record: RecordView = RecordView()  # the record that is read now
        self._batch: RowBatch = RowBatch(
            columns,
            None if topic is None else topic.encode(),
            None if broker is None else broker.encode(),
        )
        self._chunk: RecordChunk = RecordChunk(
            body=self._batch.needs_body,
            topic=self._batch.needs_topic,
            properties=self._batch.needs_properties,
        )
        # The filter of the current add.
        self._tags: tuple[bytes, ...] | None = None
        self._first_ms: int = 0
        self._until_ms: int = 0
        self._check_crc: bool = False

    @property
    def rows(self) -> int:
        return self._batch.rows

    @property
    def size(self) -> int:
        return self._batch.size

    def take(self) -> pa.RecordBatch:
        """The rows, without a copy; empties the builder."""
        return self._batch.take()

    def add_answer(
        self,
        data: octets.Bytes,
        begin: int,
        end: int,
        *,
        first: int,
        until: int,
        tags: frozenset[bytes] | None = None,
        check_crc: bool = False,
    ) -> int:
        """Add the records of a pull response in [begin, end) with queue offsets in [first, until).

        Returns DONE, FULL or BAD. `offset` is then `until` if that was reached, else the one after
        the last record, or `first` if there was none. A record that is repeated is added once.
        After BAD because of the content of a record, `offset` is that of the record.
        """
        self._tags = None if tags is None else tuple(tags)
        self._check_crc = check_crc
        self._chunk.set_filter(None, self._tags, check_crc)
        self._open(data, begin, end)
        try:
            why = self._walk_answer(begin, end, first, until)
            self._flush()
            return why
        finally:
            self._bind(memoryview(b"\0"))

    def add_log(
        self,
        data: object,
        begin: int,
        end: int,
        *,
        limit: int,
        log_offset: int,
        wanted: LogFilter,
    ) -> int:
        """Add the records of a log that start in [begin, end) of `data`, a bytes-like object.

        Byte 0 is at `log_offset` of the log; nothing from `limit` on is read. A record must start
        at `begin`. After DONE, `position` is where the first record of the next slice starts. After
        BAD, `resume` is known if only the content of the record is wrong.
        """
        self._tags = None if wanted.tags is None else tuple(wanted.tags)
        self._first_ms, self._until_ms = wanted.first_ms, wanted.until_ms
        self._check_crc = wanted.check_crc
        self._chunk.set_filter(wanted.topics, self._tags, wanted.check_crc)
        self._chunk.set_period(wanted.first_ms, wanted.until_ms)
        self._open(data, begin, limit)
        try:
            why = self._walk_log(begin, end, limit, log_offset)
            self._flush()
            return why
        finally:
            self._bind(memoryview(b"\0"))

    # --- reading records

    def _open(self, data: object, begin: int, limit: int) -> None:
        view = memoryview(data)  # type: ignore[arg-type]  # raises TypeError for other objects
        if not 0 <= begin <= limit <= len(view):
            raise ValueError(f"bytes {begin} to {limit} of {len(view)}")
        self._bind(view if len(view) > 0 else memoryview(b"\0"))
        self.problem = ""
        self.resume = -1

    def _bind(self, view: memoryview) -> None:
        self._record.bind(view)
        self._batch.bind(view)
        self._chunk.bind(view)

    def _walk_answer(self, at: int, end: int, first: int, until: int) -> int:
        record = self._record
        why = _DONE
        self.offset = first
        while at < end:
            at = self._add_plain_answer(at, end, until)
            if at >= end:
                break
            problem = record.parse(at, end)
            size = record.size
            if problem != 0:
                why = self._bad(PROBLEMS[problem])
                if problem in (_MAGIC, _LENGTHS):
                    self.resume = at + size
                break
            offset = octets.get_i64(record.source, at + layout.QUEUE_OFFSET_AT)
            if offset >= until:
                self.offset = until
                break
            wrapped = record.sys_flag & _WRAPPED == _WRAPPED
            if wrapped or offset >= self.offset:
                why = self._add_checked(wrapped, until)
            if why == _BAD:
                self.offset = max(self.offset, offset)
            if why != _DONE:
                break
            if offset >= self.offset:
                self.offset = offset + 1
            at += size
        self.position = at
        return why

    def _walk_log(self, at: int, end: int, limit: int, log_offset: int) -> int:
        record = self._record
        why = _DONE
        while at < end:
            at = self._add_plain_log(at, end, limit, log_offset)
            if at >= end:
                break
            why = self._parse_logged(at, limit, log_offset)
            if why != _DONE:
                break
            size = record.size
            if self._is_wanted():
                problem = self._find_damage(log_offset + at)
                if problem != 0:
                    why = self._bad(PROBLEMS[problem])
                    self.resume = at + size
                    break
                if record.sys_flag & _WRAPPED == _WRAPPED:
                    self.offset = 0
                    why = self._add_inner(at, OFFSET_MAX)
                else:
                    why = self._add()
                if why != _DONE:
                    break
            at += size
        self.position = at
        return why

    def _parse_logged(self, at: int, limit: int, log_offset: int) -> int:
        """DONE if a record of the log starts here, else what does."""
        record = self._record
        left = limit - at
        if left < layout.HEAD_BYTES:
            return _CUT
        size = octets.get_i32(record.source, at + layout.SIZE_AT)
        magic = octets.get_i32(record.source, at + layout.MAGIC_AT)
        if magic == layout.MAGIC_BLANK:
            return _BLANK
        if size == 0 and magic == 0:
            return _UNWRITTEN
        if magic in (layout.MAGIC_V1, layout.MAGIC_V2) and size > left:
            return _CUT
        problem = record.parse(at, limit)
        if problem == 0:
            offset = octets.get_i64(record.source, at + layout.PHYSICAL_OFFSET_AT)
            if offset != log_offset + at:
                problem = _ELSEWHERE
        return _DONE if problem == 0 else self._bad(PROBLEMS[problem])

    def _is_wanted(self) -> bool:
        """Whether a record of the log passes the filter; tags are checked later."""
        record = self._record
        transaction = record.sys_flag & _TRANSACTION
        if transaction in (_PREPARED, _ROLLBACK):
            return False
        stored_ms = octets.get_i64(record.source, record.store_at)
        if stored_ms < self._first_ms or stored_ms >= self._until_ms:
            return False
        return self._chunk.wants(record.topic_at, record.topic_length)

    def _find_damage(self, physical_offset: int) -> int:
        """The problem in the content of a record of the log whose lengths are valid; 0 if none."""
        record = self._record
        if self._check_crc and not record.matches_crc():
            return _CRC
        at = record.text_at
        if octets.find(record.source, at, at + record.text_length, 0) >= 0:
            return record.torn(physical_offset)
        return 0

    def _bad(self, problem: str) -> int:
        self.problem = problem
        return _BAD

    # --- plain records

    def _add_plain_answer(self, at: int, end: int, until: int) -> int:
        """Add plain records up to another kind of record or a full batch; returns the position."""
        chunk = self._chunk
        while self._set_chunk_limits():
            chunk.offset = self.offset
            at = chunk.walk_answer(at, end, until)
            self.offset = chunk.offset
            if not chunk.full:
                break
            self._flush()
        return at

    def _add_plain_log(self, at: int, end: int, limit: int, log_offset: int) -> int:
        """As `_add_plain_answer`, in a log."""
        chunk = self._chunk
        while self._set_chunk_limits():
            at = chunk.walk_log(at, end, limit, log_offset)
            if not chunk.full:
                break
            self._flush()
        return at

    def _set_chunk_limits(self) -> bool:
        """Set how much the chunk may hold; False if the batch is full."""
        batch = self._batch
        rows = self._rows_max - batch.rows
        weight = min(self._bytes_max, _CHUNKED_BYTES_MAX) - batch.size
        if rows <= 0 or weight <= 0:
            return False
        self._chunk.set_limits(rows, weight, batch.row_bytes_max)
        return True

    def _flush(self) -> None:
        """Add the chunk's records to the batch."""
        if self._chunk.rows > 0:
            self._batch.add_chunk(self._chunk)
            self._chunk.clear()

    # --- rows

    def _add_checked(self, wrapped: bool, until: int) -> int:
        """Add the parsed record of a pull response, unless its body is damaged."""
        record = self._record
        if self._check_crc and not record.matches_crc():
            self.resume = record.at + record.size
            return self._bad(PROBLEMS[_CRC])
        return self._add_inner(record.at, until) if wrapped else self._add()

    def _add(self) -> int:
        """Add the parsed record if its tag is wanted."""
        self._flush()
        record = self._record
        batch = self._batch
        if self._is_full(record.size):
            return _FULL
        if batch.needs_properties or self._tags is not None:
            record.parse_properties(batch.needs_distinct)
            if self._tags is not None and not record.tagged(self._tags):
                return _DONE
        if not batch.add(record):
            self.resume = record.at + record.size
            return self._bad("the body can't be decompressed")
        return _DONE

    def _is_full(self, size: int) -> bool:
        batch = self._batch
        return batch.rows >= self._rows_max or batch.size >= self._bytes_max or not batch.fits(size)

    def _add_inner(self, at: int, until: int) -> int:
        """Add the messages inside a batch record from `offset` on, all at once."""
        self._flush()
        record = self._record
        source, size = record.source, record.size
        if self._is_full(size):
            return _FULL
        bad: list[BadRecord] = []
        inner = decode_records(record.raw(at, size), "", bad=bad)
        data = b"".join(message.record for message in inner)
        if inner:
            self._bind(memoryview(data))
            self._add_inner_records(len(data), until)
            self._bind(source)
        if bad:
            self.resume = at + size
            return self._bad(bad[0].problem)
        return _DONE

    def _add_inner_records(self, end: int, until: int) -> None:
        record = self._record
        batch = self._batch
        at = 0
        while at < end:
            problem = record.parse(at, end)
            assert problem == 0, "these records have been decoded before"
            offset = octets.get_i64(record.source, at + layout.QUEUE_OFFSET_AT)
            if self.offset <= offset < until:
                record.parse_properties(batch.needs_distinct)
                if self._tags is None or record.tagged(self._tags):
                    batch.add(record)
                self.offset = offset + 1
            at += record.size
