"""`mode=log`: reads commit-log files straight into Arrow, in slices, without a broker.

A slice contains the records that start in it. The first one is found by its magic number and its
own log offset, which every record contains. The log ends where nothing was written: in the last
file without a mark, in earlier files with a blank record. Bytes between valid records that can't be
read are damage: they are reported with their log offsets, and `failOnDataLoss` decides.

Files are read, never mapped. Nothing is locked or written: the store may be in use, or a copy that
was made file by file while the broker was running.
"""

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa

from penstock.arrow.columns.column_builder import (
    BLANK,
    CUT,
    DONE,
    FULL,
    UNWRITTEN,
    ColumnBuilder,
)
from penstock.arrow.log_slices import LogSelection, LogSlice, plan_scan
from penstock.errors import DataLost, ReadFailed
from penstock.store.tools.file_pieces import LogFile, search
from penstock.wire import layout, octets

__all__ = ["LogSelection", "LogSlice", "plan_scan", "read_slice"]

log = logging.getLogger(__name__)

WINDOW_BYTES: Final = 2 * 1024 * 1024
"""Bytes read at a time: they are still in the processor's cache when they are decoded."""
RECORD_BYTES_MAX: Final = 64 * 1024 * 1024
"""A longer record is damaged; by default brokers accept bodies of 4 MB."""
_HEAD_BYTES: Final = 64
"""Enough of a record to recognise it."""
_MAGICS: Final = tuple(
    magic.to_bytes(4, "big", signed=True) for magic in (layout.MAGIC_V1, layout.MAGIC_V2)
)
_MAGIC_HEAD: Final = _MAGICS[0][:3]  # both begin with it
_BLANK_MAGIC: Final = layout.MAGIC_BLANK.to_bytes(4, "big", signed=True)


def read_slice(part: LogSlice, scan: LogSelection) -> Iterator[pa.RecordBatch]:
    """The messages of a slice in log order. Raises DataLost, ReadFailed."""
    builder = ColumnBuilder(scan.columns, broker=scan.broker)
    try:
        opened = _FileWindow(part.path)
    except ReadFailed as error:
        if not _is_deleted(error, part.path):
            raise
        lost = (part.start + part.begin, part.start + part.end)
        _report_lost(part.path, *lost, "the file was deleted since", fail=scan.fail_on_data_loss)
        return
    with opened as file:
        yield from _SliceReader(file, part, scan, builder).batches()


def _is_deleted(error: ReadFailed, path: str) -> bool:
    """Whether only this file is missing: retention deletes files of a store in use."""
    cause = error.__cause__
    gone = isinstance(cause, OSError) and cause.errno == errno.ENOENT
    return gone and os.path.isdir(os.path.dirname(path))


def _report_lost(path: str, first: int, until: int, problem: str, *, fail: bool) -> None:
    """Report that these offsets of the log can't be read."""
    message = (
        f"{path}: no messages from log offset {first} to {until - 1}"
        f" ({until - first} bytes): {problem}"
    )
    if fail:
        raise DataLost(message)
    log.warning("data loss: %s", message)


class _FileWindow:
    """A log file, and the part of it that is in memory."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.begin = 0
        self.length = 0
        self.data = memoryview(bytearray(WINDOW_BYTES))
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._failed(error, 0) from error
        self.size = os.fstat(self._fd).st_size
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def __enter__(self) -> "_FileWindow":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)

    @property
    def at_end(self) -> bool:
        """Whether the part in memory reaches the end of the file."""
        return self.begin + self.length >= self.size

    def load(self, at: int, least: int = 0) -> None:
        """Load the part that starts here; at least `least` bytes except at the end of the file."""
        if least > len(self.data):
            self.data = memoryview(bytearray(least))
        self.begin, self.length = at, 0
        end = min(len(self.data), self.size - at)
        try:
            while self.length < end:
                count = os.preadv(self._fd, [self.data[self.length : end]], at + self.length)
                if not count:  # the file has been truncated
                    self.size = at + self.length
                    break
                self.length += count
        except OSError as error:
            raise self._failed(error, at + self.length) from error

    def _failed(self, error: OSError, at: int) -> ReadFailed:
        return ReadFailed(
            f"{self.path} can't be read at byte {at}: {error.strerror}",
            hint="with Spark, the path must lead to the same files on every machine of its cluster",
        )


class _SliceReader:
    """Reads one slice."""

    def __init__(
        self, file: _FileWindow, part: LogSlice, scan: LogSelection, builder: ColumnBuilder
    ) -> None:
        self._file = file
        self._part = part
        self._filter = scan.filter()
        self._builder = builder
        self._fail = scan.fail_on_data_loss
        self._start = part.start
        self._retried_at = -1

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The messages of the slice."""
        file, builder, end = self._file, self._builder, self._part.end
        at = self._first()
        if at >= 0:
            file.load(at)
        while 0 <= at < end:
            why = builder.add_log(
                file.data,
                at - file.begin,
                min(end - file.begin, file.length),
                limit=file.length,
                log_offset=self._start + file.begin,
                wanted=self._filter,
            )
            at = file.begin + builder.position
            if why == FULL:
                yield builder.take()
            elif why == DONE and at >= end:
                at = self._check_next_record(at)
            elif why in (DONE, CUT):
                at = self._load_more(at)
            elif why == BLANK:
                break
            elif why == UNWRITTEN:
                at = self._skip_damage(at, "nothing was written there")
            elif builder.resume >= 0:
                at = self._skip_record(at, file.begin + builder.resume, builder.problem)
            else:
                at = self._skip_damage(at, builder.problem)
        if builder.rows:
            yield builder.take()

    def _first(self) -> int:
        """The start of the slice's first record; -1 if there is none."""
        file, at, end = self._file, self._part.begin, self._part.end
        if at == 0:
            return 0 if end > 0 else self._at_end(0)
        while at < min(end, file.size):
            file.load(at)
            stop = file.length if file.at_end else file.length - _HEAD_BYTES
            found = _find_head(file.data[: file.length], min(stop, end - at), self._start + at)
            if found >= 0:
                return at + found
            at += max(stop, 1)
        return -1

    def _load_more(self, at: int) -> int:
        """Load more: the part in memory ends at or in the record that starts here. Returns -1 at
        the end."""
        file = self._file
        if not file.at_end:
            least = 2 * len(file.data) if at == file.begin else 0
            if least > 2 * RECORD_BYTES_MAX:
                return self._skip_damage(at, f"a record is longer than {RECORD_BYTES_MAX} bytes")
            file.load(at, least)
            return at
        return self._at_end(at)

    def _at_end(self, at: int) -> int:
        """The file ends at or in the record that starts here."""
        next_file = self._part.next_file
        is_complete = next_file is None or self._start + at + layout.BLANK_BYTES > next_file
        return (
            -1 if is_complete and at >= self._file.size else self._skip_damage(at, "the file ends")
        )

    def _check_next_record(self, at: int) -> int:
        """Check that a record follows the slice. Otherwise its loss would go unnoticed: the next
        slice starts with the first record that it recognises."""
        file = self._file
        if at >= file.size:
            return self._at_end(at)
        file.load(at)
        head = file.data[: min(_HEAD_BYTES, file.length)]
        if head[4:8] == _BLANK_MAGIC or _find_head(head, 1, self._start + at) == 0:
            return at
        return self._skip_damage(at, "no record begins here")

    def _skip_record(self, at: int, until: int, problem: str) -> int:
        """The end of a record whose content is damaged; or its start, to read it again if a broker
        was still writing it."""
        file = self._file
        size = until - at
        seen = bytes(file.data[at - file.begin : until - file.begin])
        file.load(at, size)
        if bytes(file.data[: min(size, file.length)]) != seen:
            return at
        _report_lost(file.path, self._start + at, self._start + until, problem, fail=self._fail)
        return until

    def _skip_damage(self, at: int, problem: str) -> int:
        """The next valid record of the file after damage; -1 if there is none."""
        file, part = self._file, self._part
        # A running broker may have completed the record meanwhile: look once more.
        begin = at + 1 if at == self._retried_at else at
        self._retried_at = at
        found = self._search(begin, file.size)
        if found is not None and found > at:  # ... or completed it during the search
            nearer = self._search(begin, found)
            found = found if nearer is None else nearer
        if found is None and part.next_file is None:  # not damage: the log ends here
            log.info("%s: the log ends at offset %d: %s", part.path, self._start + at, problem)
            return -1
        if found != at:
            until = part.next_file if found is None else self._start + found
            assert until is not None
            _report_lost(part.path, self._start + at, until, problem, fail=self._fail)
        if found is None:
            return -1
        file.load(found)
        return found

    def _search(self, begin: int, end: int) -> int | None:
        """The position of the first valid record in these bytes of the file."""
        found = search(LogFile(Path(self._file.path), self._start, end), begin, end)
        return None if found is None else found - self._start


def _find_head(data: memoryview, end: int, log_offset: int) -> int:
    """The start of the first record before `end` in these bytes of the log; -1 if there is none.

    Only the head is checked: damage in the rest is found when the record is read.
    """
    text = bytes(data)
    hit = text.find(_MAGIC_HEAD, 4, end + 4 + len(_MAGIC_HEAD))
    while hit >= 0:
        at = hit - 4
        known = len(text) - at >= layout.SYS_FLAG_AT and text[hit : hit + 4] in _MAGICS
        if (
            known
            and octets.get_i64(text, at + layout.PHYSICAL_OFFSET_AT) == log_offset + at
            and at < end
        ):
            return at
        hit = text.find(_MAGIC_HEAD, hit + 1, end + 4 + len(_MAGIC_HEAD))
    return -1
