"""`mode=log`: commit-log files straight into Arrow, in slices, without a broker.

A slice takes the records that begin in it. Its first one is found by magic number and by its own
place in the log, which every record names. The log ends where nothing more was written: quietly in
the last file that holds anything, and with the blank record in those before it. What can't be read
between good records, or in place of them, is damage: it is named by its log offsets, and
`failOnDataLoss` decides.

Files are read and never mapped, nothing is locked and nothing written: the store may be a live one,
or the copy of one that was taken file by file while the broker went on.
"""

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa

from penstock.errors import DataLost, ReadFailed
from penstock.spark.arrow.columns import (
    BLANK,
    CUT,
    DONE,
    FULL,
    UNWRITTEN,
    ColumnBuilder,
)
from penstock.spark.source.log_slices import LogScan, LogSlice, plan_scan
from penstock.store.tools.file_pieces import LogFile, search
from penstock.wire import layout, octets

__all__ = ["LogScan", "LogSlice", "plan_scan", "read_slice"]

log = logging.getLogger(__name__)

WINDOW_BYTES: Final = 2 * 1024 * 1024
"""Read at a time: what was just read is still near the processor when it is decoded."""
RECORD_BYTES_MAX: Final = 64 * 1024 * 1024
"""A record that claims to be longer is damaged; brokers take 4 MB bodies unless told otherwise."""
_HEAD_BYTES: Final = 64
"""Enough of a record to know it by."""
_MAGICS: Final = tuple(
    magic.to_bytes(4, "big", signed=True) for magic in (layout.MAGIC_V1, layout.MAGIC_V2)
)
_MAGIC_HEAD: Final = _MAGICS[0][:3]  # both begin with it
_BLANK_MAGIC: Final = layout.MAGIC_BLANK.to_bytes(4, "big", signed=True)


def read_slice(part: LogSlice, scan: LogScan) -> Iterator[pa.RecordBatch]:
    """The messages of a slice, in the order of the log. Raises DataLost, ReadFailed."""
    builder = ColumnBuilder(scan.columns, broker=scan.broker)
    try:
        opened = _File(part.path)
    except ReadFailed as error:
        if not _deleted(error, part.path):
            raise
        lost = (part.start + part.begin, part.start + part.end)
        _lose(part.path, *lost, "the file was deleted since", fail=scan.fail_on_data_loss)
        return
    with opened as file:
        yield from _Walk(file, part, scan, builder).batches()


def _deleted(error: ReadFailed, path: str) -> bool:
    """Whether only this file is gone, as retention takes it from a live store."""
    cause = error.__cause__
    gone = isinstance(cause, OSError) and cause.errno == errno.ENOENT
    return gone and os.path.isdir(os.path.dirname(path))


def _lose(path: str, first: int, until: int, problem: str, *, fail: bool) -> None:
    """Nothing can be read of these offsets of the log."""
    message = (
        f"{path}: no messages from log offset {first} to {until - 1}"
        f" ({until - first} bytes): {problem}"
    )
    if fail:
        raise DataLost(message)
    log.warning("data loss: %s", message)


class _File:
    """A file, and the piece of it that is looked at."""

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

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._fd)

    @property
    def at_end(self) -> bool:
        """Whether the piece reaches to the end of the file."""
        return self.begin + self.length >= self.size

    def load(self, at: int, least: int = 0) -> None:
        """Let the piece begin here; fewer bytes than `least` only at the end of the file."""
        if least > len(self.data):
            self.data = memoryview(bytearray(least))
        self.begin, self.length = at, 0
        end = min(len(self.data), self.size - at)
        try:
            while self.length < end:
                count = os.preadv(self._fd, [self.data[self.length : end]], at + self.length)
                if not count:  # it has become shorter
                    self.size = at + self.length
                    break
                self.length += count
        except OSError as error:
            raise self._failed(error, at + self.length) from error

    def _failed(self, error: OSError, at: int) -> ReadFailed:
        return ReadFailed(
            f"{self.path} can't be read at byte {at}: {error.strerror}",
            hint="the path has to lead to the same files on every machine of the cluster",
        )


class _Walk:
    """The walk through one slice."""

    def __init__(self, file: _File, part: LogSlice, scan: LogScan, builder: ColumnBuilder) -> None:
        self._file = file
        self._part = part
        self._filter = scan.filter()
        self._builder = builder
        self._fail = scan.fail_on_data_loss
        self._start = part.start
        self._doubted = -1

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All of them."""
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
                at = self._check_next(at)
            elif why in (DONE, CUT):
                at = self._go_on(at)
            elif why == BLANK:
                break
            elif why == UNWRITTEN:
                at = self._pass_over(at, "nothing was written there")
            elif builder.resume >= 0:
                at = self._skip(at, file.begin + builder.resume, builder.problem)
            else:
                at = self._pass_over(at, builder.problem)
        if builder.rows:
            yield builder.take()

    def _first(self) -> int:
        """Where the slice's first record begins; -1 if none does."""
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

    def _go_on(self, at: int) -> int:
        """The piece in memory ends at or in the record that begins here: load on; -1 at the end."""
        file = self._file
        if not file.at_end:
            least = 2 * len(file.data) if at == file.begin else 0
            if least > 2 * RECORD_BYTES_MAX:
                return self._pass_over(at, f"a record is longer than {RECORD_BYTES_MAX} bytes")
            file.load(at, least)
            return at
        return self._at_end(at)

    def _at_end(self, at: int) -> int:
        """The bytes of the file end at or in the record that begins here."""
        following = self._part.following
        whole = following is None or self._start + at + layout.BLANK_BYTES > following
        return -1 if whole and at >= self._file.size else self._pass_over(at, "the file ends")

    def _check_next(self, at: int) -> int:
        """What follows the slice has to begin with a record, or its loss would go unnoticed: the
        next slice only looks for the first one that it can know."""
        file = self._file
        if at >= file.size:
            return self._at_end(at)
        file.load(at)
        head = file.data[: min(_HEAD_BYTES, file.length)]
        if head[4:8] == _BLANK_MAGIC or _find_head(head, 1, self._start + at) == 0:
            return at
        return self._pass_over(at, "no record begins here")

    def _skip(self, at: int, until: int, problem: str) -> int:
        """The end of a record that is whole but for its content; or its begin, to read it again
        where a broker was still writing it."""
        file = self._file
        size = until - at
        seen = bytes(file.data[at - file.begin : until - file.begin])
        file.load(at, size)
        if bytes(file.data[: min(size, file.length)]) != seen:
            return at
        _lose(file.path, self._start + at, self._start + until, problem, fail=self._fail)
        return until

    def _pass_over(self, at: int, problem: str) -> int:
        """The next good record of the file behind something else; -1 if there is none."""
        file, part = self._file, self._part
        # Under a broker that writes, the record may have become whole meanwhile: look once more.
        begin = at + 1 if at == self._doubted else at
        self._doubted = at
        found = self._search(begin, file.size)
        if found is not None and found > at:  # ... or while that one was searched
            nearer = self._search(begin, found)
            found = found if nearer is None else nearer
        if found is None and part.following is None:  # not damage: the log just ends
            log.info("%s: the log ends at offset %d: %s", part.path, self._start + at, problem)
            return -1
        if found != at:
            until = part.following if found is None else self._start + found
            assert until is not None
            _lose(part.path, self._start + at, until, problem, fail=self._fail)
        if found is None:
            return -1
        file.load(found)
        return found

    def _search(self, begin: int, end: int) -> int | None:
        """Where in these bytes of the file the first whole record lies."""
        found = search(LogFile(Path(self._file.path), self._start, end), begin, end)
        return None if found is None else found - self._start


def _find_head(data: memoryview, end: int, log_offset: int) -> int:
    """Where before `end` the first record of these bytes of the log begins; -1 if none does.

    Its head is enough: if the rest is damaged, that is found when it is read.
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
