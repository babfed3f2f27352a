"""A ConsumeQueue: the messages of one topic and queue as fixed entries, read like an array.

    | physical offset i64 | record size i32 | tag hash i64 |     20 bytes

Entry n is at byte 20·n of the queue, in files of equal size named by their first byte. In the
queues of delayed messages (`delay_ms` ≥ 0) the delivery time replaces the tag hash.

Files are sparse at full length; blocks are allocated in steps before the write position gets
there, so a full disk is an error and never a signal. Only the file being written is mapped, from
the first message until the queue is idle (`mapped_queues`): an idle queue costs a small object.

Entries written since the queue was opened or last unmapped are hot (their pages are in memory);
older ones are read from the file, at once if the page cache has them. Only the writer's thread uses
the mapping; the pool reads, syncs and allocates by name.
"""

import struct
import threading
from collections.abc import Iterator, Sequence
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
"""The first step of a new queue is one block: where there are many queues, most hold little."""
SYNC_SINGLY_MAX = 256
"""Beyond this number of queues the whole file system is synced: a queue of its own costs three
syncs, of its file and two directories."""
SCAN_ENTRIES = 500
"""How many entries are read at once to skip fillers."""
FILLER_SIZE = 0x7FFFFFFF
"""Size field of entries without a message: before the first one of a queue that does not begin at
0, and for messages that were lost to damage. The latter have a log offset as their tag hash."""
_FILLER_SIZE = FILLER_SIZE
_ENTRY = struct.Struct(">qiq")
_NEVER = 1 << 62
_NO_VIEW = memoryview(bytearray(1))
"""The view of a queue that has no file mapped."""

renaming = threading.Lock()
"""Held while the directory of a deleted topic is renamed and while its queues are marked as
deleted. A thread of the pool that misses a file takes it to find out whether that is the reason."""
renamed_folders: set[str] = set()
"""Former directories of deleted topics, some of whose queues may not be marked yet."""


class ConsumeQueue:
    """One queue's entries; single writer."""

    def __init__(
        self,
        disk: Disk,
        folder: Path | str,
        topic: bytes,
        queue_id: int,
        file_entries: int,
        mapped_queues: MappedQueues | None = None,
        *,
        delay_ms: int = -1,
    ) -> None:
        self.disk: Disk = disk
        # The queue's directory; another one once the topic is deleted. A Path takes four times as
        # much memory as its text.
        self._folder: str = str(folder)
        self.topic: bytes = topic
        self.queue_id: int = queue_id
        self.file_entries: int = file_entries
        # Java's hashes of `topic#` and `topic#T#`, from which index keys are hashed on.
        self.key_seed: int = java_hash(topic.decode("utf-8", "replace") + "#")
        self.tag_seed: int = java_hash(topic.decode("utf-8", "replace") + "#T#")
        # Delay of a level's queue, whose entries hold the delivery time; -1 for other queues.
        self.delay_ms: int = delay_ms
        # The queue's offsets: [min_offset, max_offset). Entries from `hot_from` on were written
        # since the queue was opened or unmapped.
        self.min_offset: int = 0
        self.max_offset: int = 0
        self.hot_from: int = 0
        # Whether the next message calls the arrival listeners, and what readers saw before it.
        self.watched: bool = False
        self.watched_from: int = 0
        # Whether the queue is in the writer's list `dirty`; until the next `take_dirty`.
        self.dirty: bool = False
        # Whether the pool should allocate more blocks; until the writer has noticed.
        self.needs_blocks: bool = False
        # Whether the broker accepts sends to the queue without asking again; until its topic,
        # permissions or the topic's deletion change that.
        self.writable: bool = False
        # Whether the mapping was used since `MappedQueues` last looked.
        self.used: bool = False
        # Messages and bytes stored since the start.
        self.puts: int = 0
        self.put_bytes: int = 0
        # Whether the topic is deleted; never unset.
        self.deleted: bool = False
        # The first entry of each file there is, in order.
        self.file_starts: list[int] = []
        self._mapped_queues: MappedQueues = (
            mapped_queues if mapped_queues is not None else MappedQueues()
        )
        # The mapped file and its entries [_mapped_from, _mapped_to); while nothing is mapped
        # `_mapped_from` is _NEVER and `_mapped_to` is 0.
        self._map: object = None
        self._view: memoryview = _NO_VIEW
        self._mapped_from: int = _NEVER
        self._mapped_to: int = 0
        # Log offset behind the record of the last entry.
        self._end: int = 0
        # Blocks are allocated up to this entry; at `_preallocate_at` the pool is asked for more.
        self._allocated: int = 0
        self._preallocate_at: int = 0
        # Recovery: the last entries before `max_offset`, if they are not in the file yet, and
        # whether `min_offset` is right and the files have nothing behind `max_offset`.
        self.replayed: bytearray | None = None
        self.checked: bool = False
        # Recovery: whether the queue has all its entries, and the replay adds none.
        self.complete: bool = False
        # Files that were unmapped and not synced since, and whether file names have changed
        # since the last sync of the directories.
        self._unsynced: list[int] = []
        self._names_changed: bool = False

    def append(self, physical_offset: int, size: int, tags_code: int) -> int:
        """Add the next entry; returns its queue offset. Raises DiskFull before anything changes."""
        offset = self.max_offset
        if offset >= self._allocated or offset < self._mapped_from:
            self._allocate_entry(offset)
        at = (offset - self._mapped_from) * layout.ENTRY_BYTES
        octets.put_i64(self._view, at + layout.ENTRY_OFFSET_AT, physical_offset)
        octets.put_i32(self._view, at + layout.ENTRY_SIZE_AT, size)
        octets.put_i64(self._view, at + layout.ENTRY_TAG_AT, tags_code)
        self.max_offset = offset + 1
        self._end = physical_offset + size
        self.used = True
        if offset >= self._preallocate_at:
            self._preallocate_at = _NEVER
            self.needs_blocks = True
        return offset

    def add_replayed(self, physical_offset: int, size: int, tags_code: int) -> None:
        """`append` for recovery: the entry is in memory until `queue_files.write_replayed`."""
        if self.replayed is None:
            self.replayed = bytearray()
        self.replayed += _ENTRY.pack(physical_offset, size, tags_code)
        self.max_offset += 1
        self._end = physical_offset + size

    def note_written(self, start: int) -> None:
        """Recovery has checked or written a file without mapping it: the next `sync` syncs it."""
        if start not in self.file_starts:
            self.file_starts = sorted([*self.file_starts, start])
            self._names_changed = True
        if start not in self._unsynced:
            self._unsynced.append(start)

    def ready(self) -> None:
        """Make sure that the next `append` needs nothing from the disk."""
        if self.max_offset >= self._allocated or self.max_offset < self._mapped_from:
            self._allocate_entry(self.max_offset)

    def reserve(self, count: int) -> None:
        """Allocate the blocks of the next `count` entries, in new files too if needed."""
        self._refuse_if_deleted()
        offset = max(self.max_offset, self._allocated)
        while offset < self.max_offset + count:
            start = offset - offset % self.file_entries
            if not self.file_starts:
                self.disk.make_directory(self.folder, durable=False)
            fd = self.disk.create(self.path(start), self.file_entries * layout.ENTRY_BYTES)
            try:
                offset = self._allocate(fd, offset)
            finally:
                self.disk.close_file(fd)

    def begin_at(self, offset: int) -> None:
        """Start an empty queue at `offset`: the file's entries before it are fillers."""
        assert self.max_offset == self.min_offset
        first = offset - offset % self.file_entries
        if offset > first:
            self.max_offset = first
            self.fill_to(offset)
        self.min_offset = self.max_offset = self.hot_from = offset

    def fill_to(self, offset: int, place: int = 0) -> None:
        """Append fillers for the unknown entries before `offset`.

        `place` is a log offset between the entries around them; 0 at the begin of a queue.
        """
        while self.max_offset < offset:
            self.append(0, _FILLER_SIZE, place)

    def cut(self, offset: int) -> None:
        """Remove the entries from `offset` on; their bytes become zero, durably after `sync`."""
        if offset >= self.max_offset and not self.file_starts:
            return
        self._unmap_file()
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
        """Zero a file's bytes from a position on."""
        size = self.file_entries * layout.ENTRY_BYTES
        beyond = at + ALLOCATE_BYTES
        if beyond < size and self.disk.next_data(fd, beyond) >= 0:
            self.disk.truncate(fd, at)
            self.disk.truncate(fd, size)
        else:  # freeing blocks and allocating them again costs ten times as much
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
        if self._mapped_to == 0:  # unmapped before the flusher got there
            return self._visible_before(high, confirm_offset)
        low = max(self._mapped_from, self.min_offset)
        while low < high:
            middle = (low + high) // 2
            if self._end_of(middle) <= confirm_offset:
                low = middle + 1
            else:
                high = middle
        # The queue continues in a new file since the last flush: look at the end of the old one.
        return low if low > self._mapped_from else self._visible_before(low, confirm_offset)

    def visible_by_file(self, confirm_offset: int) -> int:
        """`visible_max` for the pool: without the mapping, which the writer may change."""
        return self._visible_before(self.max_offset, confirm_offset)

    def _visible_before(self, offset: int, confirm_offset: int) -> int:
        while offset > self.hot_from:  # entries loaded at the start are confirmed
            entry = unpack_entry(self.read(offset - 1, 1) or b"")
            if entry is None or entry[1] == FILLER_SIZE or entry[0] + entry[1] <= confirm_offset:
                break
            offset -= 1
        return offset

    def _end_of(self, offset: int) -> int:
        at = (offset - self._mapped_from) * layout.ENTRY_BYTES
        size = octets.get_i32(self._view, at + layout.ENTRY_SIZE_AT)
        if size == _FILLER_SIZE:
            return 0
        return octets.get_i64(self._view, at + layout.ENTRY_OFFSET_AT) + size

    def is_hot(self, offset: int) -> bool:
        """Whether this entry can be read from memory."""
        if self.hot_from <= offset and self._mapped_from <= offset < self._mapped_to:
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
        path = self.path(start)
        try:
            fd = self.disk.open_to_read(path)
        except FileNotFoundError:  # deleted by retention meanwhile
            return b""
        try:
            if wait:
                return self.disk.read_at(fd, count * layout.ENTRY_BYTES, at)
            buffer = bytearray(count * layout.ENTRY_BYTES)
            return bytes(buffer) if self.disk.read_now(fd, memoryview(buffer), at) else None
        except OSError as error:
            error.filename = str(path)
            raise
        finally:
            self.disk.close_file(fd)

    def entry(self, offset: int) -> tuple[int, int, int] | None:
        """(physical offset, size, tag hash) of an entry, or None; may wait for the disk.

        None also for a filler: it has no message.
        """
        if not self.min_offset <= offset < self.max_offset:
            return None
        entry = unpack_entry(self.read(offset, 1) or b"")
        return entry if entry is None or entry[1] != FILLER_SIZE else None

    def next_real(self, offset: int, end: int) -> tuple[int, tuple[int, int, int]] | None:
        """The first entry in [offset, end) that is not a filler, with its offset; may wait."""
        while offset < end:
            data = self.read(offset, min(SCAN_ENTRIES, end - offset)) or b""
            if len(data) < layout.ENTRY_BYTES:
                return None
            for number, entry in enumerate(each_entry(data)):
                if entry[1] != FILLER_SIZE:
                    return offset + number, entry
            offset += len(data) // layout.ENTRY_BYTES
        return None

    def correct_min(self, log_begin: int) -> None:
        """Move the minimum up to the first entry whose record still exists; may wait.

        A filler counts as the entry that follows it.
        """
        if self._is_removed() or not self.file_starts or self.min_offset >= self.max_offset:
            return
        low = max(self.min_offset, self.file_starts[0])
        high = self.max_offset
        found = self.next_real(low, high)
        if found is not None and found[1][0] >= log_begin:  # nothing of this queue was deleted
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
        """Make entries and the names of new files durable; may wait for the disk.

        `parents` are directories that this round has already synced.
        """
        done = set() if parents is None else parents
        mapped = self._mapped_from  # read first: `unmap` adds the file to `_unsynced`
        unsynced, changed = self.take_unsynced()
        try:
            for start in {*unsynced, mapped} & set(self.file_starts):
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
            self.return_unsynced(unsynced, changed)
            raise

    def take_unsynced(self) -> tuple[list[int], bool]:
        """The unmapped files to sync and whether names have changed; the caller syncs them."""
        unsynced, self._unsynced = self._unsynced, []
        changed, self._names_changed = self._names_changed, False
        return unsynced, changed

    def return_unsynced(self, unsynced: list[int], changed: bool) -> None:
        """What was taken is not durable: the next `sync` tries again."""
        self._unsynced += unsynced
        self._names_changed = self._names_changed or changed

    def load(self) -> None:
        """Find the files; positions are set by recovery."""
        self._names_changed = True  # a process that died may not have made them durable
        size = self.file_entries * layout.ENTRY_BYTES
        names = self.disk.names(self._folder)
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
            if not self._was_renamed():  # else they are deleted with the topic
                raise

    def retire(self, folder: str) -> None:
        """The topic is deleted: its files are in another folder and will be deleted.

        Call it under `renaming`. The queue can still be read, but not written or synced.
        """
        self.deleted = True
        self.writable = False
        self._folder = folder
        self._unmap_file()

    def resume(self, first: int, files: int, low: int, high: int) -> None:
        """Take over the positions of a clean shutdown, without looking at the files."""
        self.file_starts = [first + n * self.file_entries for n in range(files)]
        self.min_offset, self.max_offset, self.hot_from = low, high, high

    def unmap(self, confirm_offset: int) -> object:
        """Unmap the file until the next message; for the writer's thread only.

        Returns the mapping, which is closed when the caller drops it.
        """
        if self._end <= confirm_offset:
            self.hot_from = self.max_offset
        mapping = self._map
        self._unmap_file()
        return mapping

    def close(self) -> None:
        """Drop the mapping; nothing is written any more."""
        self._unmap_file()

    def path(self, start: int) -> Path:
        """The file that begins with this entry."""
        return Path(f"{self._folder}/{segment_name(start * layout.ENTRY_BYTES)}")

    @property
    def folder(self) -> Path:
        """The queue's directory."""
        return Path(self._folder)

    def _unmap_file(self) -> None:
        if self._mapped_to > 0:
            self._unsynced.append(self._mapped_from)
            self._mapped_queues.discard(self)
        # `_allocated` stays; with `_mapped_from` at _NEVER every append maps a file first.
        self._mapped_from = _NEVER
        self._mapped_to = self._preallocate_at = 0
        self._view = _NO_VIEW
        self._map = None

    def _allocate_entry(self, offset: int) -> None:
        """Map the file of this entry and allocate its blocks; may wait for the disk."""
        self._refuse_if_deleted()
        if not self._mapped_from <= offset < self._mapped_to:
            self._map_file(offset)
        elif offset >= self._allocated:
            fd = self.disk.open(self.path(self._mapped_from))
            try:
                self._allocated = self._allocate(fd, offset)
            finally:
                self.disk.close_file(fd)
        self._preallocate_at = (
            self._allocated + max(self._allocated - _STEP_ENTRIES, self._mapped_from)
        ) // 2

    def preallocate(self) -> None:
        """Allocate the step after the current one, in the next file if needed; for the pool."""
        self.needs_blocks = False
        if self._is_removed():
            return
        start, end, following = self._mapped_from, self._mapped_to, self._allocated
        if end == 0:  # unmapped meanwhile
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
        if start == self._mapped_from and not self.deleted:
            self._allocated = allocated
            self._preallocate_at = following

    def prepare(self) -> None:
        """Make the first file of a queue that has no message yet; for the pool."""
        with renaming:  # so that a deletion does not miss the file
            if not self._is_removed() and not self.file_starts and self.max_offset == 0:
                self.disk.make_directory(self.folder, durable=False)
                fd = self.disk.create(self.path(0), self.file_entries * layout.ENTRY_BYTES)
                try:
                    self._allocate(fd, 0)
                finally:
                    self.disk.close_file(fd)

    def _was_renamed(self) -> bool:
        """Whether the topic is deleted; waits if that is being tried now."""
        with renaming:
            return self._is_removed()

    def _is_removed(self) -> bool:
        """Whether the topic is deleted, or its directory was renamed for that already."""
        return self.deleted or self._folder.rpartition("/")[0] in renamed_folders

    def _refuse_if_deleted(self) -> None:
        if self._is_removed():
            raise StoreError(f"queue {self.queue_id} was deleted with its topic")

    def _allocate(self, fd: int, offset: int) -> int:
        """Allocate the step that holds an entry; returns the first entry behind it."""
        start = offset - offset % self.file_entries
        begin = offset - (offset - start) % _STEP_ENTRIES
        end = _FIRST_ENTRIES if offset < _FIRST_ENTRIES else begin + _STEP_ENTRIES
        end = min(end, start + self.file_entries)
        at, length = (begin - start) * layout.ENTRY_BYTES, (end - begin) * layout.ENTRY_BYTES
        self.disk.allocate(fd, at, length, self.path(start))
        return end

    def _map_file(self, offset: int) -> None:
        """Map the file of this entry, with its blocks allocated."""
        size = self.file_entries * layout.ENTRY_BYTES
        start = offset - offset % self.file_entries
        path = self.path(start)
        try:
            if not self.file_starts:
                self.disk.make_directory(self.folder, durable=False)
            fd = self.disk.create(path, size)
        except OSError as error:
            raise StoreError(f"can't create the queue file {path}: {error}") from error
        try:
            allocated = self._allocated  # of this file, if it is the one that was unmapped
            if not offset < allocated <= start + self.file_entries:
                allocated = self._allocate(fd, offset)
            mapping = self.disk.map_without_readahead(fd, size)
        finally:
            self.disk.close_file(fd)
        self._unmap_file()
        self._mapped_queues.add(self)
        self._map = mapping
        self._view = mapping
        self._mapped_from = start
        self._mapped_to = start + self.file_entries
        self._allocated = allocated
        if start not in self.file_starts:
            self.file_starts.append(start)
            self._names_changed = True


def sync_all(queues: Sequence[ConsumeQueue]) -> None:
    """Make the entries of all these queues durable; waits for the disk."""
    if len(queues) > SYNC_SINGLY_MAX:
        taken = [queue.take_unsynced() for queue in queues]
        if queues[0].disk.sync_filesystem():
            return
        for queue, (unsynced, changed) in zip(queues, taken, strict=True):
            queue.return_unsynced(unsynced, changed)
    parents: set[Path] = set()
    for queue in queues:
        queue.sync(parents)


def unpack_entry(data: bytes | bytearray) -> tuple[int, int, int] | None:
    """(physical offset, size, tag hash) of the first entry in these bytes, or None."""
    return _ENTRY.unpack_from(data) if len(data) >= _ENTRY.size else None


def unpack_entries(data: bytes | bytearray) -> list[tuple[int, int, int]]:
    """(physical offset, size, tag hash) of each whole entry in these bytes."""
    return list(each_entry(data))


def each_entry(data: bytes | bytearray) -> Iterator[tuple[int, int, int]]:
    """`unpack_entries` where mostly the first ones are enough."""
    return _ENTRY.iter_unpack(data[: len(data) - len(data) % _ENTRY.size])
