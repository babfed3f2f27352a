"""Reading parts of files without mapping them: a failing disk is an error, not a signal."""

import os
from pathlib import Path
from typing import NamedTuple

from penstock.errors import ReadFailed
from penstock.store.disk import Disk
from penstock.store.recovery.damage import LogPart
from penstock.store.recovery.damage import search as search_part

CHUNK_BYTES = 8 * 1024 * 1024
"""How much of the log is read at a time."""


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
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # as `Disk.open_to_read`
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


def log_part(file: LogFile) -> LogPart:
    """The file as `recovery.damage` reads it; raises ReadFailed."""
    return LogPart(
        file.start,
        file.length,
        lambda at, length: read_piece(file.path, at, length),
        lambda at, end: _data_ranges(file.path, at, end),
    )


def search(file: LogFile, at: int, segment_bytes: int) -> int | None:
    """The log offset of a file's first valid record from byte `at` on; raises ReadFailed."""
    return search_part(log_part(file), at, segment_bytes)


def _data_ranges(path: Path, at: int, end: int) -> list[tuple[int, int]]:
    """The ranges of positions in [at, end) that are not holes; all of it if that is unknown."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return Disk().data_ranges(fd, at, end)
        finally:
            os.close(fd)
    except OSError:
        return [(at, end)]
