"""One fixed-size mapped file of a log (RocketMQ's MappedFile), and the list of them.

A file is named by the offset of its first byte, 20 digits, so an offset finds its file by a
division. A segment is reference-counted: retention takes it out of the list and unlinks its name,
and the file is unmapped when the last reader has released it.
"""

import logging
import os
from pathlib import Path

from penstock.store import native
from penstock.store.disk import Disk

log = logging.getLogger(__name__)

NAME_DIGITS = 20
PREFAULT_BYTES = 4 * 1024 * 1024
"""How far ahead of the write position pages are faulted in, and how much at a time."""


def segment_name(offset: int) -> str:
    return f"{offset:0{NAME_DIGITS}d}"


def is_number(name: str) -> bool:
    """Whether a file's name is a number; `isdigit` alone accepts digits that `int` does not."""
    return name.isascii() and name.isdigit()


class Segment:
    """A mapped file that holds the bytes [start, start + size) of a log."""

    def __init__(self, disk: Disk, path: Path, start: int, size: int, fd: int) -> None:
        # The open file, closed with the segment. Set first, so that `__del__` always closes it.
        self.fd: int = fd
        self.disk: Disk = disk
        self.path: Path = path
        # Log offset of the first byte, and the length of the file. Never change.
        self.start: int = start
        self.size: int = size
        # The mapping and a view of all of it, valid as long as the segment.
        self.map: object = disk.map(fd, size)
        self.view: memoryview = memoryview(self.map)
        # Whether the pages are locked in memory; set by the pool, see `lock_or_warn`.
        self.locked: bool = False
        # Set when the log has moved on to the next segment; never unset.
        self.retired: bool = False

    def __del__(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def slice(self, at: int, length: int) -> memoryview:
        """A read-only view of log bytes; it keeps the mapping alive."""
        begin = at - self.start
        return memoryview(self.map)[begin : begin + length].toreadonly()  # type: ignore[arg-type]

    def prefault(self, at: int, length: int) -> None:
        """Fault in [at, at + length) for writing, without the GIL where compiled."""
        begin = max(at - self.start, 0)
        length = min(length, self.size - begin)
        if length > 0:
            native.touch(self.view, begin, length)

    def lock_or_warn(self) -> None:
        """Lock the whole file in memory, or log why that failed; may wait for the disk."""
        failed = native.lock(self.view, 0, self.size)
        self.locked = failed == 0
        if self.retired:
            self.unlock()
        if failed:
            log.warning(
                "%s can't be locked in memory (lock_memory): %s; check the limit on locked memory",
                self.path,
                os.strerror(failed),
            )

    def unlock(self) -> None:
        """The segment is full: unlock its pages, even if the pool is still locking them."""
        self.retired = True
        if self.locked:
            native.unlock(self.view, 0, self.size)
            self.locked = False


class SegmentList:
    """Segments that follow each other without a gap."""

    def __init__(self, disk: Disk, folder: Path, segment_bytes: int) -> None:
        self.disk: Disk = disk
        self.folder: Path = folder
        self.segment_bytes: int = segment_bytes
        # Oldest first. The loop appends and removes; the pool may read a copy.
        self.items: list[Segment] = []
        # Log offset at which the first item begins; moves with every `drop_first`.
        self.first: int = 0

    def find(self, offset: int) -> Segment | None:
        """The segment that holds this offset, or None."""
        if offset < self.first:
            return None
        number = (offset - self.first) // self.segment_bytes
        if number >= len(self.items):
            return None
        segment = self.items[number]
        # The loop may drop the first item while the pool is here.
        return segment if segment.start <= offset else None

    def create(self, start: int) -> Segment:
        """Make and allocate the file that begins at `start`; may wait for the disk.

        `push` puts it into the list.
        """
        path = self.folder / segment_name(start)
        fd = self.disk.create(path, self.segment_bytes)
        try:
            self.disk.allocate(fd, 0, self.segment_bytes, path)
            self.disk.sync(fd)
            self.disk.sync_directory(self.folder)
        except BaseException:
            self.disk.close_file(fd)
            self.disk.unlink(path)  # a sparse file would raise SIGBUS on a full disk
            raise
        segment = Segment(self.disk, path, start, self.segment_bytes, fd)
        segment.prefault(start, PREFAULT_BYTES)
        return segment

    def push(self, segment: Segment) -> None:
        """Append a segment to the list."""
        if not self.items:
            self.first = segment.start
        assert segment.start == self.first + len(self.items) * self.segment_bytes
        self.items.append(segment)

    def drop_first(self) -> Segment:
        """Remove the oldest segment from the list; its file remains until `unlink`."""
        segment = self.items.pop(0)
        self.first = self.items[0].start if self.items else segment.start + segment.size
        return segment

    def drop_last(self) -> Segment:
        return self.items.pop()

    def unlink(self, segment: Segment) -> None:
        """Delete a segment's file; may wait for the disk."""
        self.disk.unlink(segment.path)
        self.disk.sync_directory(self.folder)
