"""A ConsumeQueue: the messages of one topic and queue as fixed entries, read like an array.

    | physical offset i64 | record size i32 | tag hash i64 |     20 bytes

Entry n lies at byte 20·n of the queue, in files of equal size named by their first byte. In the
queues of delayed messages (`delay_ms` ≥ 0) the time of delivery stands in place of the tag hash.

Files are sparse at full length; blocks are allocated in steps before the write position gets
there, so a full disk is an error and never a signal. Only the file being written is mapped, from a
message on until the queue rests (`store.awake`): an idle queue costs a small object.

Entries written since the queue was opened or last rested are hot (their pages are in memory);
older ones are read from the file, at once if the page cache has them. The mapping belongs to the
writer's thread; the pool reads, syncs and allocates by name.
"""

import struct
import threading
from collections.abc import Iterable
from pathlib import Path

from penstock.errors import StoreError
from penstock.store.consumequeue.mapped_queues import MappedQueues
from penstock.store.disk import Disk
from penstock.store.segment import NAME_DIGITS, is_number, segment_name
from penstock.wire import layout, octets
from penstock.wire.record import java_hash

ALLOCATE_BYTES = 64 * 1024
_STEP_ENTRIES = ALLOCATE_BYTES // layout.ENTRY_BYTES
BLOCK_BYTES = 4096
_FIRST_ENTRIES = BLOCK_BYTES // layout.ENTRY_BYTES
"""The first step of a new queue is one block: most of very many queues hold little."""
SCAN_ENTRIES = 500
"""How many entries are read at once where fillers are passed over."""
FILLER_SIZE = 0x7FFFFFFF
"""Size field of entries before the first message of a queue that does not begin at 0."""
_FILLER_SIZE = FILLER_SIZE
_ENTRY = struct.Struct(">qiq")
_NEVER = 1 << 62
_NO_VIEW = memoryview(bytearray(1))
"""Of a queue that has no file mapped."""

renaming = threading.Lock()
"""Held while the directory of a deleted topic is renamed and its queues are told. Whoever misses a
file asks under it whether that is why: the pool works at the same time."""


class ConsumeQueue:
    """One queue's entries; single writer."""

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        topic: bytes,
        queue_id: int,
        file_entries: int,
        mapped_queues: MappedQueues | None = None,
    ) -> None:
        self.disk: Disk = disk
        self.folder: Path = folder
        self.topic: bytes = topic
        self.queue_id: int = queue_id
        self.file_entries: int = file_entries
        self.key_seed: int = java_hash(topic.decode("utf-8", "replace") + "#")
        self.tag_seed: int = java_hash(topic.decode("utf-8", "replace") + "#T#")
        self.delay_ms: int = -1
        self.min_offset: int = 0
        self.max_offset: int = 0
        self.hot_from: int = 0
        self.watched: bool = False
        self.watched_from: int = 0
        self.dirty: bool = False
        self.needs_blocks: bool = False
        self.writable: bool = False
        self.used: bool = False
        self.puts: int = 0
        self.put_bytes: int = 0
        self.deleted: bool = False
        self.file_starts: list[int] = []
        self._mapped_queues: MappedQueues = (
            mapped_queues if mapped_queues is not None else MappedQueues()
        )
        self._map: object = None
        self._view: memoryview = _NO_VIEW
        self._end: int = 0
        self._open_from: int = _NEVER
        self._open_to: int = 0
        self._allocated: int = 0
        self._ahead: int = 0
        self._unsynced: list[int] = []
        self._names_changed: bool = False

    def append(self, physical_offset: int, size: int, tags_code: int) -> int:
        """Add the next entry; returns its queue offset. Raises DiskFull before anything changes."""
        offset = self.max_offset
        if offset >= self._allocated or offset < self._open_from:
            self._make_room(offset)
        at = (offset - self._open_from) * layout.ENTRY_BYTES
        octets.put_i64(self._view, at + layout.ENTRY_OFFSET_AT, physical_offset)
        octets.put_i32(self._view, at + layout.ENTRY_SIZE_AT, size)
        octets.put_i64(self._view, at + layout.ENTRY_TAG_AT, tags_code)
        self.max_offset = offset + 1
        self._end = physical_offset + size
        self.used = True
        if offset >= self._ahead:
            self._ahead = _NEVER
            self.needs_blocks = True
        return offset

    def ready(self) -> None:
        """Make sure that the next `append` needs nothing from the disk."""
        if self.max_offset >= self._allocated or self.max_offset < self._open_from:
            self._make_room(self.max_offset)

    def reserve(self, count: int) -> None:
        """Allocate the blocks of the next `count` entries, in new files too if need be."""
        self._refuse_if_deleted()
        place = max(self.max_offset, self._allocated)
        while place < self.max_offset + count:
            start = place - place % self.file_entries
            if not self.file_starts:
                self.disk.make_directory(self.folder, durable=False)
            fd = self.disk.create(self.path(start), self.file_entries * layout.ENTRY_BYTES)
            try:
                place = self._allocate(fd, place)
            finally:
                self.disk.close_file(fd)

    def begin_at(self, offset: int) -> None:
        """Let an empty queue begin at `offset`: the file's entries before it are fillers."""
        assert self.max_offset == self.min_offset
        first = offset - offset % self.file_entries
        if offset > first:
            self.max_offset = first
            self.fill_to(offset)
        self.min_offset = self.max_offset = self.hot_from = offset

    def fill_to(self, offset: int) -> None:
        """Put fillers where the entries before `offset` are unknown."""
        while self.max_offset < offset:
            self.append(0, _FILLER_SIZE, 0)

    def cut(self, offset: int) -> None:
        """Forget the entries from `offset` on; their bytes become zero, durably with `sync`."""
        if offset >= self.max_offset and not self.file_starts:
            return
        self._close_file()
        self._allocated = self._end = 0
        keep = offset - offset % self.file_entries
        for start in [s for s in self.file_starts if s > keep]:
            self.disk.unlink(self.path(start))
            self.file_starts.remove(start)
        if keep in self.file_starts:
            fd = self.disk.open(self.path(keep))
            try:
                self._clear(fd, (offset - keep) * layout.ENTRY_BYTES)
            finally:
                self.disk.close_file(fd)
            self._unsynced.append(keep)
        self._names_changed = True
        self.max_offset = max(offset, 0)
        self.min_offset = min(self.min_offset, self.max_offset)
        self.hot_from = min(self.hot_from, self.max_offset)

    def _clear(self, fd: int, at: int) -> None:
        """Let a file's bytes from a place on be zero."""
        size = self.file_entries * layout.ENTRY_BYTES
        beyond = at + ALLOCATE_BYTES
        if beyond < size and self.disk.next_data(fd, beyond) >= 0:
            self.disk.truncate(fd, at)
            self.disk.truncate(fd, size)
        else:  # giving blocks back and taking them again costs ten times as much
            data = self.disk.read_at(fd, ALLOCATE_BYTES, at)
            for place in range(0, len(data), BLOCK_BYTES):
                left = data[place : place + BLOCK_BYTES]
                if left != bytes(len(left)):
                    zeros = memoryview(bytes(len(left.rstrip(b"\0"))))
                    self.disk.write(fd, zeros, at + place)

    def visible_max(self, confirm_offset: int) -> int:
        """One past the last entry whose record lies wholly below the confirmed log offset."""
        high = self.max_offset
        if self._end <= confirm_offset:
            return high
        if self._open_to == 0:  # it had to rest before the flusher got there
            return self._visible_before(high, confirm_offset)
        low = max(self._open_from, self.min_offset)
        while low < high:
            middle = (low + high) // 2
            if self._end_of(middle) <= confirm_offset:
                low = middle + 1
            else:
                high = middle
        # The queue went on in a new file since the last flush: look at the end of the old one.
        return low if low > self._open_from else self._visible_before(low, confirm_offset)

    def visible_by_file(self, confirm_offset: int) -> int:
        """As `visible_max`, without the mapping that the writer may just change: for the pool."""
        return self._visible_before(self.max_offset, confirm_offset)

    def _visible_before(self, offset: int, confirm_offset: int) -> int:
        while offset > self.hot_from:  # what was there when the queue was loaded is confirmed
            entry = unpack_entry(self.read(offset - 1, 1) or b"")
            if entry is None or entry[1] == FILLER_SIZE or entry[0] + entry[1] <= confirm_offset:
                break
            offset -= 1
        return offset

    def _end_of(self, offset: int) -> int:
        at = (offset - self._open_from) * layout.ENTRY_BYTES
        size = octets.get_i32(self._view, at + layout.ENTRY_SIZE_AT)
        if size == _FILLER_SIZE:
            return 0
        return octets.get_i64(self._view, at + layout.ENTRY_OFFSET_AT) + size

    def is_hot(self, offset: int) -> bool:
        """Whether this entry can be read from memory."""
        if self.hot_from <= offset and self._open_from <= offset < self._open_to:
            self.used = True
            return True
        return False

    def read(self, offset: int, count: int, *, wait: bool = True) -> bytes | None:
        """Entries from the file: at most `count`, never beyond its end or the queue's.

        With `wait` false, None if that would wait for the disk.
        """
        start = offset - offset % self.file_entries
        count = min(count, start + self.file_entries - offset, self.max_offset - offset)
        if count <= 0 or start not in self.file_starts:
            return b""
        at = (offset - start) * layout.ENTRY_BYTES
        try:
            fd = self.disk.open_to_read(self.path(start))
        except FileNotFoundError:  # retention was quicker
            return b""
        try:
            if wait:
                return self.disk.read_at(fd, count * layout.ENTRY_BYTES, at)
            room = bytearray(count * layout.ENTRY_BYTES)
            return bytes(room) if self.disk.read_now(fd, memoryview(room), at) else None
        finally:
            self.disk.close_file(fd)

    def entry(self, offset: int) -> tuple[int, int, int] | None:
        """(physical offset, size, tag hash) of an entry, or None; may wait for the disk."""
        if not self.min_offset <= offset < self.max_offset:
            return None
        return unpack_entry(self.read(offset, 1) or b"")

    def next_real(self, offset: int, end: int) -> tuple[int, tuple[int, int, int]] | None:
        """The first entry in [offset, end) that is no filler, with its place; may wait."""
        while offset < end:
            data = self.read(offset, min(SCAN_ENTRIES, end - offset)) or b""
            if len(data) < layout.ENTRY_BYTES:
                return None
            for number, entry in enumerate(unpack_entries(data)):
                if entry[1] != FILLER_SIZE:
                    return offset + number, entry
            offset += len(data) // layout.ENTRY_BYTES
        return None

    def correct_min(self, log_begin: int) -> None:
        """Let the queue begin with the first entry whose record still exists; may wait.

        A filler is judged by the entry behind it: it says nothing by itself.
        """
        if self.deleted or not self.file_starts or self.min_offset >= self.max_offset:
            return
        low = max(self.min_offset, self.file_starts[0])
        high = self.max_offset
        found = self.next_real(low, high)
        if found is not None and found[1][0] >= log_begin:  # nothing of this queue has gone
            self.min_offset = found[0]
            return
        while low < high:
            middle = (low + high) // 2
            found = self.next_real(middle, high)
            if found is not None and found[1][0] < log_begin:
                low = found[0] + 1
            else:
                high = middle
        first = self.next_real(low, self.max_offset)
        self.min_offset = first[0] if first is not None else self.max_offset

    def sync(self, parents: set[Path] | None = None) -> None:
        """Make entries durable, and the names of files that are new; may wait for the disk.

        `parents` are directories that this round has synced for others.
        """
        done = set() if parents is None else parents
        opened = self._open_from  # first: whoever closes it meanwhile adds it to `_unsynced`
        unsynced, self._unsynced = self._unsynced, []
        changed, self._names_changed = self._names_changed, False
        try:
            for start in {*unsynced, opened} & set(self.file_starts):
                self.disk.sync_file(self.path(start))
            if changed:  # the queue's and the topic's directory may be new too
                self.disk.sync_directory(self.folder)
                for folder in (self.folder.parent, self.folder.parent.parent):
                    if folder not in done:
                        self.disk.sync_directory(folder)
                        done.add(folder)
        except OSError:
            if self._was_renamed():
                return
            self._unsynced += unsynced
            self._names_changed = self._names_changed or changed
            raise

    def load(self) -> None:
        """Find the files; positions are set by recovery."""
        self._names_changed = True  # a process that died may not have made them durable
        size = self.file_entries * layout.ENTRY_BYTES
        names = self.disk.names(self.folder)
        self.file_starts = [
            int(n) // layout.ENTRY_BYTES
            for n in names
            if is_number(n) and len(n) == NAME_DIGITS and int(n) % size == 0
        ]

    def warm(self) -> None:
        """Bring the page of the next entry into the page cache; may wait for the disk."""
        if self.max_offset > self.min_offset:
            self.read(self.max_offset - 1, 1)

    def drop_files_before(self, offset: int) -> None:
        """Delete files whose entries all lie before `offset`, but never the last one."""
        files = self.file_starts
        old = [s for s in files[: len(files) - 1] if s + self.file_entries <= offset]
        try:
            for start in old:
                self.disk.unlink(self.path(start))
                self.file_starts.remove(start)
            if old:
                self.disk.sync_directory(self.folder)
        except OSError:
            if not self._was_renamed():  # else they are on their way out with all the others
                raise

    def retire(self, folder: Path) -> None:
        """The topic is deleted, the files lie in another folder and will go (under `renaming`).

        Whoever still holds the queue may read what is left, and finds nothing to write or to sync.
        """
        self.deleted = True
        self.writable = False
        self.folder = folder
        self._close_file()

    def resume(self, first: int, files: int, low: int, high: int) -> None:
        """Take over what a clean shutdown noted: all of it is durable, and nothing is looked at."""
        self.file_starts = [first + n * self.file_entries for n in range(files)]
        self.min_offset, self.max_offset, self.hot_from = low, high, high

    def unmap(self, confirm_offset: int) -> object:
        """Let go of the file until the next message; the writer's thread only.

        Gives the mapping: it goes, and its file handle with it, when the caller lets go of it.
        """
        if self._end <= confirm_offset:
            self.hot_from = self.max_offset
        mapping = self._map
        self._close_file()
        return mapping

    def close(self) -> None:
        """Give back the mapping and its file handle; nothing is written any more."""
        self._close_file()

    def path(self, start: int) -> Path:
        """The file that begins with this entry."""
        return self.folder / segment_name(start * layout.ENTRY_BYTES)

    def _close_file(self) -> None:
        if self._open_to > 0:
            self._unsynced.append(self._open_from)
            self._mapped_queues.discard(self)
        # What is allocated stays so; beginning nowhere, nothing can be appended without opening.
        self._open_from = _NEVER
        self._open_to = self._ahead = 0
        self._view = _NO_VIEW
        self._map = None

    def _make_room(self, offset: int) -> None:
        """Have the file of this entry open and its blocks allocated; may wait for the disk."""
        self._refuse_if_deleted()
        if not self._open_from <= offset < self._open_to:
            self._open_file(offset)
        elif offset >= self._allocated:
            fd = self.disk.open(self.path(self._open_from))
            try:
                self._allocated = self._allocate(fd, offset)
            finally:
                self.disk.close_file(fd)
        self._ahead = (self._allocated + max(self._allocated - _STEP_ENTRIES, self._open_from)) // 2

    def preallocate(self) -> None:
        """Allocate the step after the current one, in the next file if need be: for the pool."""
        self.needs_blocks = False
        if self.deleted:
            return
        start, end, following = self._open_from, self._open_to, self._allocated
        if end == 0:  # it rests
            return
        if following < end:
            fd = self.disk.open(self.path(start))
        else:
            start = following = end
            fd = self.disk.create(self.path(start), self.file_entries * layout.ENTRY_BYTES)
        try:
            allocated = self._allocate(fd, following)
        finally:
            self.disk.close_file(fd)
        if start == self._open_from and not self.deleted:
            self._allocated = allocated
            self._ahead = following

    def prepare(self) -> None:
        """Make the first file of a queue that has no message yet: for the pool."""
        with renaming:  # else a deletion could overlook what is made here
            if not self.deleted and not self.file_starts and self.max_offset == 0:
                self.disk.make_directory(self.folder, durable=False)
                fd = self.disk.create(self.path(0), self.file_entries * layout.ENTRY_BYTES)
                try:
                    self._allocate(fd, 0)
                finally:
                    self.disk.close_file(fd)

    def _was_renamed(self) -> bool:
        """Whether the topic is deleted; if that is being tried just now, waits for the outcome."""
        with renaming:
            return self.deleted

    def _refuse_if_deleted(self) -> None:
        if self.deleted:
            raise StoreError(f"the queue {self.queue_id} was deleted with its topic")

    def _allocate(self, fd: int, offset: int) -> int:
        """Allocate the step that holds an entry; gives the first entry behind it."""
        start = offset - offset % self.file_entries
        begin = offset - (offset - start) % _STEP_ENTRIES
        end = _FIRST_ENTRIES if offset < _FIRST_ENTRIES else begin + _STEP_ENTRIES
        end = min(end, start + self.file_entries)
        at, length = (begin - start) * layout.ENTRY_BYTES, (end - begin) * layout.ENTRY_BYTES
        self.disk.allocate(fd, at, length, self.path(start))
        return end

    def _open_file(self, offset: int) -> None:
        """Map the file of this entry, with its blocks allocated."""
        size = self.file_entries * layout.ENTRY_BYTES
        start = offset - offset % self.file_entries
        path = self.path(start)
        try:
            if not self.file_starts:
                self.disk.make_directory(self.folder, durable=False)
            fd = self.disk.create(path, size)
        except OSError as error:
            raise StoreError(f"the queue file {path} can't be made: {error}") from error
        try:
            allocated = self._allocated  # of this file, if it is the one that was let go
            if not offset < allocated <= start + self.file_entries:
                allocated = self._allocate(fd, offset)
            opened = self.disk.map_alone(fd, size)
        finally:
            self.disk.close_file(fd)
        self._close_file()
        self._mapped_queues.add(self)
        self._map = opened
        self._view = memoryview(opened)
        self._open_from = start
        self._open_to = start + self.file_entries
        self._allocated = allocated
        if start not in self.file_starts:
            self.file_starts.append(start)
            self._names_changed = True


def sync_all(queues: Iterable[ConsumeQueue]) -> None:
    """Make the entries of all these queues durable; waits for the disk."""
    parents: set[Path] = set()
    for queue in queues:
        queue.sync(parents)


def unpack_entry(data: bytes | bytearray) -> tuple[int, int, int] | None:
    """(physical offset, size, tag hash) of the first entry in these bytes, or None."""
    return _ENTRY.unpack_from(data) if len(data) >= _ENTRY.size else None


def unpack_entries(data: bytes | bytearray) -> list[tuple[int, int, int]]:
    """(physical offset, size, tag hash) of each whole entry in these bytes."""
    return list(_ENTRY.iter_unpack(data[: len(data) - len(data) % _ENTRY.size]))
