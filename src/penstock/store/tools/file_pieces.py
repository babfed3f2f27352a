"""Reading parts of files without mapping them: a failing disk is an error, not a signal."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from penstock.errors import ReadFailed
from penstock.wire import octets
from penstock.wire.layout import MAGIC_AT, MAGIC_V1, MAGIC_V2
from penstock.wire.record import RECORD, StoredRecord

CHUNK_BYTES = 8 * 1024 * 1024
"""How much of the log is read at a time."""
_SEARCH_BYTES = 1024 * 1024
"""The same for a search: small enough for the processor's cache."""
_ZEROS = bytes(_SEARCH_BYTES)
_MAGICS = tuple(magic.to_bytes(4, "big", signed=True) for magic in (MAGIC_V1, MAGIC_V2))
_MAGIC_HEAD = _MAGICS[0][:3]  # both begin with it


class LogFile(NamedTuple):
    """One CommitLog file; its `length` may be less than a segment."""

    path: Path
    start: int
    length: int


def read_piece(path: Path, at: int, length: int) -> bytearray:
    """Up to `length` bytes of a file, fewer at its end; ReadFailed if the disk fails."""
    data = bytearray(max(length, 0))
    view = memoryview(data)
    done = 0
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while done < length:
                count = os.preadv(fd, [view[done:]], at + done)
                if count == 0:
                    break
                done += count
        finally:
            os.close(fd)
    except OSError as error:
        raise ReadFailed(f"{path} can't be read at byte {at + done}: {error.strerror}") from error
    view.release()
    del data[done:]
    return data


def search(file: LogFile, at: int, segment_bytes: int) -> int | None:
    """The log offset of a file's first valid record from byte `at` on; found by its magic number.

    Raises ReadFailed. Most of what is searched is zeros: the unwritten rest of a file.
    """
    stored = StoredRecord()
    least = at
    end = min(file.length, segment_bytes)
    piece = memoryview(data := bytearray(_SEARCH_BYTES))
    try:
        with open(file.path, "rb", buffering=0) as opened:
            while at < end:
                at = _skip_hole(opened.fileno(), at)
                if at < 0 or at >= end:
                    break
                count = os.preadv(opened.fileno(), [piece[: min(_SEARCH_BYTES, end - at)]], at)
                if not count:
                    break
                for hit in () if _ZEROS.startswith(piece[:count]) else _hits(data, count):
                    begin = at + hit
                    if begin >= least and _is_record(stored, file, begin, end):
                        return file.start + begin
                # A magic number may be split between two parts.
                at += max(count - 3, 1) if at + count < end else count
    except OSError as error:
        raise ReadFailed(f"{file.path} can't be read at byte {at}: {error.strerror}") from error
    return None


def _hits(data: bytearray, end: int) -> Iterator[int]:
    """Where a record would begin for each magic number in the bytes up to `end`."""
    hit = data.find(_MAGIC_HEAD, 0, end)
    while hit >= 0:
        if data[hit : min(hit + 4, end)] in _MAGICS:
            yield hit - MAGIC_AT
        hit = data.find(_MAGIC_HEAD, hit + 1, end)


def _is_record(stored: StoredRecord, file: LogFile, begin: int, end: int) -> bool:
    """Whether a valid record begins there."""
    size = octets.get_i32(read_piece(file.path, begin, 4) + bytes(4), 0)
    if not 0 < size <= end - begin:
        return False
    stored.bind(memoryview(read_piece(file.path, begin, size)))
    return stored.read(0, size) == RECORD and stored.check(file.start + begin) == RECORD


def _skip_hole(fd: int, at: int) -> int:
    """The first position from `at` on that is not a hole, or -1."""
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        return -1 if error.errno == errno.ENXIO else at
