"""One fixed-size mapped file of a log (RocketMQ's MappedFile), and the list of them.

A file is named by the offset of its first byte, 20 digits, so an offset finds its file by a
division. A segment is reference-counted: retention takes it out of the list and unlinks its name,
and the file is unmapped when the last reader has released it.

A file has its full length from the start and is sparse. Its blocks are allocated in steps ahead of
the write position (`allocate`), so a full disk is an error and never a signal.
"""

import logging
import mmap
import os
import threading
from pathlib import Path

from penstock.store import native
from penstock.store.disk import FOLIO_BYTES_MAX, Disk

log = logging.getLogger(__name__)

NAME_DIGITS = 20
PREFAULT_BYTES = 4 * 1024 * 1024
"""How far ahead of the write position pages are faulted in, and how much at a time."""
ALLOCATE_BYTES = FOLIO_BYTES_MAX
"""Blocks are allocated in multiples of this."""
FIRST_BYTES = max(8 * 1024 * 1024, ALLOCATE_BYTES)
"""How much is allocated of a new segment; not less than what is faulted in ahead."""


def segment_name(offset: int) -> str:
    return f"{offset:0{NAME_DIGITS}d}"


def is_number(name: str) -> bool:
    """Whether a file's name is a number; `isdigit` alone accepts digits that `int` does not."""
    return name.isascii() and name.isdigit()


class Segment:
    """A mapped file that holds the bytes [start, start + size) of a log."""

    def __init__(
        self, disk: Disk, path: Path, start: int, size: int, fd: int, allocated: int = 0
    ) -> None:
        # The open file, closed with the segment. Set first, so that `__del__` always closes it.
        self.fd: int = fd
        self.map: object = None
        self.disk: Disk = disk
        self.path: Path = path
        # Log offset of the first byte, and the length of the file. Never change.
        self.start: int = start
        self.size: int = size
        # The mapping and a view of all of it, valid as long as the segment.
        self.map = disk.map(fd, size)
        self.view: memoryview = memoryview(self.map)
        # Whether the pages are locked in memory; set by the pool, see `lock_or_warn`.
        self.locked: bool = False
        # Set when the log has moved on to the next segment; never unset.
        self.retired: bool = False
        # Log offset up to which blocks are allocated, from the write position on. Any thread may
        # move it up, one at a time.
        self.allocated: int = start + allocated
        self._allocating: threading.Lock = threading.Lock()

    def __del__(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
            self._unmap()

    def _unmap(self) -> None:
        """Close the mapping without the GIL, which its deallocation would hold: for a deleted file
        that takes as long as freeing its pages and blocks."""
        mapping, self.map = self.map, None
        self.view = memoryview(bytearray(1))
        if isinstance(mapping, mmap.mmap):
            try:
                mapping.close()
            except BufferError:  # a slice is in use and keeps it
                return

    def slice(self, at: int, length: int) -> memoryview:
        """A read-only view of log bytes; it keeps the mapping alive."""
        begin = at - self.start
        return memoryview(self.map)[begin : begin + length].toreadonly()  # type: ignore[arg-type]

    def write_from(self, offset: int) -> None:
        """The next record begins here: what is allocated behind it is not known."""
        self.allocated = offset - (offset - self.start) % ALLOCATE_BYTES

    def allocate(self, end: int) -> None:
        """Allocate the blocks up to this log offset; may wait for the disk. Raises DiskFull."""
        if end <= self.allocated:
            return
        with self._allocating:
            begin = self.allocated
            steps = -(-(end - self.start) // ALLOCATE_BYTES)
            end = self.start + min(steps * ALLOCATE_BYTES, self.size)
            if end > begin:
                self.disk.allocate(self.fd, begin - self.start, end - begin, self.path)
                self.allocated = end

    def prefault(self, at: int, length: int) -> None:
        """Fault in [at, at + length) for writing, without the GIL where compiled.

        Only what is allocated: a store into a hole raises SIGBUS on a full disk.
        """
        begin = max(at - self.start, 0)
        length = min(length, self.allocated - self.start - begin)
        if length > 0:
            native.touch(self.view, begin, length)

    def prepare(self, end: int, at: int) -> None:
        """Allocate the blocks up to log offset `end`, and fault in the pages from `at` on."""
        self.allocate(end)
        self.prefault(at, PREFAULT_BYTES)

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
        """Make the file that begins at `start`, with its first blocks; may wait for the disk.

        `push` puts it into the list.
        """
        path = self.folder / segment_name(start)
        first = min(FIRST_BYTES, self.segment_bytes)
        fd = self.disk.create(path, self.segment_bytes)
        try:
            self.disk.allocate(fd, 0, first, path)
            self.disk.sync(fd)
            self.disk.sync_directory(self.folder)
        except BaseException:
            self.disk.close_file(fd)
            self.disk.unlink(path)
            raise
        segment = Segment(self.disk, path, start, self.segment_bytes, fd, first)
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
