"""The files of queue locks: a journal that is written, but never flushed while the broker runs.

A response to a lock must not wait for the disk: clients give up after a second. A written line
survives the death of the process, because it is in the page cache. Only a power failure can lose
it; the start after one is told so (`QueueLocks.load`). A clean stop flushes the files.

    line: CRC-32 of the rest in 8 hex digits, space, JSON of a `Line`, line feed

There are two files. When the current one is long, a line with all locks begins the other one. What
a file still has behind its last line is older than that line and does not count.
"""

import logging
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from penstock.store.disk import Disk

log = logging.getLogger(__name__)

FILES: Final = ("penstock-locks-0.log", "penstock-locks-1.log")
FILE_BYTES = 1024 * 1024
"""A file is long from this size on, or from GROWTH times the size of its first line."""
GROWTH = 8
_CRC_DIGITS: Final = 8


class LockChange(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Queues that an owner has locked, or unlocked if `renewed_ms` is negative."""

    group: str
    owner: str
    renewed_ms: int
    queues: dict[str, list[int]]  # queue ids by topic


class Line(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One write. `whole`: the changes are all locks, and lines before this one do not count."""

    number: int
    changes: list[LockChange]
    whole: bool = False
    grants_from_ms: int = 0  # no lock is granted before this time


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Line)


class LockJournal:
    """The journal of a broker; none of its methods but `open` and `close` waits for the disk."""

    def __init__(self, disk: Disk, folder: Path) -> None:
        self._disk = disk
        self._paths = [folder / name for name in FILES]
        self._fds: list[int] = []
        self._current = 0  # the file that is written
        self._position = 0
        self._first_line_bytes = 0
        self._number = 0
        self._failing = False

    def open(self) -> list[Line]:
        """Open the files; returns the lines that count, in order."""
        lines: list[Line] = []
        for index, path in enumerate(self._paths):
            found = list(_read(self._disk.read(path) or b""))
            newest = max((line.number for line in found), default=0)
            if newest > self._number:
                self._number, self._current = newest, index
            lines += found
            exists = self._disk.stat(str(path)) is not None
            self._fds.append(self._disk.open(path) if exists else self._disk.create(path, 0))
        lines.sort(key=lambda line: line.number)
        begin = max((n for n, line in enumerate(lines) if line.whole), default=0)
        return lines[begin:]

    @property
    def is_long(self) -> bool:
        """Whether the next line should be one with all locks (`begin_file`)."""
        return self._position >= max(FILE_BYTES, GROWTH * self._first_line_bytes)

    def append(self, changes: list[LockChange]) -> bool:
        """Write a line; returns whether it is written. A failure is logged once."""
        return self._write(Line(self._number + 1, changes))

    def begin_file(self, changes: list[LockChange], grants_from_ms: int) -> bool:
        """Write all locks into the other file, which is the current one from then on."""
        before = self._current, self._position
        self._current, self._position = 1 - self._current, 0
        if not self._write(Line(self._number + 1, changes, True, grants_from_ms)):
            self._current, self._position = before
            return False
        self._first_line_bytes = self._position
        return True

    def close(self) -> None:
        """Flush and close the files."""
        try:
            for fd in self._fds:
                self._disk.sync(fd)
            self._disk.sync_directory(self._paths[0].parent)
        except OSError as error:
            log.error("can't flush the queue locks: %s", error.strerror)
        finally:
            self._close_files()

    def __del__(self) -> None:
        self._close_files()

    def _close_files(self) -> None:
        fds, self._fds = self._fds, []
        for fd in fds:
            self._disk.close_file(fd)

    def _write(self, line: Line) -> bool:
        text = _encoder.encode(line)
        data = b"%08x %s\n" % (zlib.crc32(text), text)
        try:
            self._disk.write(self._fds[self._current], memoryview(data), self._position)
        except OSError as error:
            if not self._failing:
                log.error(
                    "can't save queue locks, a restart of the broker would release them: %s",
                    error.strerror,
                )
            self._failing = True
            return False
        if self._failing:
            self._failing = False
            log.info("queue locks are saved again")
        self._number = line.number
        self._position += len(data)
        return True


def _read(data: bytes) -> Iterable[Line]:
    """The valid lines of a file; a line that was not written to its end is not one of them."""
    for text in data.split(b"\n"):
        crc, _, body = text.partition(b" ")
        if len(crc) != _CRC_DIGITS or crc != b"%08x" % zlib.crc32(body):
            continue
        try:
            yield _decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeError):
            log.warning("a line of the queue locks is of another version and is ignored")
