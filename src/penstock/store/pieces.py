"""Reading files in pieces, to look at them: never mapped, so a failing disk raises no signal."""

import errno
import os
from pathlib import Path
from typing import NamedTuple

from penstock.errors import ReadFailed
from penstock.wire import octets
from penstock.wire.record import MAGIC_V1, MAGIC_V2, RECORD, StoredRecord

CHUNK_BYTES = 8 * 1024 * 1024
"""How much of the log is read at a time."""
_MAGICS = tuple(magic.to_bytes(4, "big", signed=True) for magic in (MAGIC_V1, MAGIC_V2))
_MAGIC_HEAD = _MAGICS[0][:3]  # both begin with it


class LogFile(NamedTuple):
    """One CommitLog file: `length` is what it has, which may be less than a segment."""

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
    """The first whole record of a file from byte `at` on, by its magic number."""
    stored = StoredRecord()
    least = at
    end = min(file.length, segment_bytes)
    while at < end:
        at = _skip_hole(file.path, at)
        if at < 0 or at >= end:
            break
        data = read_piece(file.path, at, min(CHUNK_BYTES, end - at))
        if not data:
            break
        hit = data.find(_MAGIC_HEAD)
        while hit >= 0:
            begin = at + hit - 4
            if data[hit : hit + 4] in _MAGICS and begin >= least:
                size = octets.get_i32(read_piece(file.path, begin, 4) + bytes(4), 0)
                if 0 < size <= end - begin:
                    stored.bind(memoryview(read_piece(file.path, begin, size)))
                    if (
                        stored.read(0, size) == RECORD
                        and stored.check(file.start + begin) == RECORD
                    ):
                        return file.start + begin
            hit = data.find(_MAGIC_HEAD, hit + 1)
        # A magic may lie across two chunks.
        at += max(len(data) - 3, 1) if at + len(data) < end else len(data)
    return None


def _skip_hole(path: Path, at: int) -> int:
    """The first place from `at` on that the file system holds bytes for, or -1."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        return -1 if error.errno == errno.ENXIO else at
    finally:
        os.close(fd)
