"""IndexFiles: from the hash of a key to log offsets.

A file has a header, slots and entries (`wire.layout`). A slot holds the number of its newest
entry, 0 if it has none. A key is `topic#key`, for keys and unique ids alike; tags are kept as
`topic#T#tag`. Entry numbers start at 1 and grow with the log, and each entry links to the one
before it in its slot, so the slots and the header can be rebuilt from the entries: that is how an
index survives a crash (`rethread`).

The file is sparse at full length. Slots are allocated when it is created, entries in steps that
end where a folio ends.
"""

from datetime import datetime
from pathlib import Path

from penstock.errors import DiskFull
from penstock.store.disk import Disk, folio_end
from penstock.store.segment import is_number
from penstock.wire import layout, octets

ALLOCATE_BYTES = 1024 * 1024
NAME_DIGITS = 17
KEYS_AHEAD = 64
"""Entries allocated ahead of a message; one with more keys allocates in between."""
_KEYS_AHEAD = KEYS_AHEAD
_NEVER = 1 << 62


def file_name(now_ms: int) -> str:
    """The name of an index file that begins now: local time, as RocketMQ has it."""
    now = datetime.fromtimestamp(now_ms // 1000)
    return f"{now:%Y%m%d%H%M%S}{now_ms % 1000:03d}"


def index_file_bytes(slots: int, entries: int) -> int:
    """The length of an index file with this many slots and entries."""
    return (
        layout.INDEX_HEADER_BYTES
        + slots * layout.INDEX_SLOT_BYTES
        + entries * layout.INDEX_ENTRY_BYTES
    )


class IndexFile:
    """One mapped index file."""

    def __init__(self, disk: Disk, path: Path, slots: int, entries: int, *, new: bool) -> None:
        self.disk: Disk = disk
        self.path: Path = path
        # Numbers of slots and entries, the file's length and the byte where entries begin.
        self.slots: int = slots
        self.entries: int = entries
        self.size: int = index_file_bytes(slots, entries)
        self.entries_at: int = index_file_bytes(slots, 0)
        # Blocks are allocated up to this entry; 0 in a file that was just opened.
        self.allocated: int = 0
        # Whether the pool should allocate more blocks; until the writer has noticed.
        self.needs_blocks: bool = False
        # At this entry `needs_blocks` is set; 0 before the first allocation.
        self._preallocate_at: int = 0
        fd = disk.create(path, self.size) if new else disk.open(path)
        try:
            if new:
                disk.allocate(fd, 0, self._allocation_end(self.entries_at), path)
            self.map: object = disk.map(fd, self.size)
        finally:
            disk.close_file(fd)
        self.view: memoryview = memoryview(self.map)
        if new:
            octets.put_i32(self.view, layout.INDEX_NEXT_NUMBER_AT, 1)
        elif not 1 <= octets.get_i32(self.view, layout.INDEX_NEXT_NUMBER_AT) <= entries:
            self.rethread(_NEVER)  # a damaged count would make `put` write outside the file

    def prepare(self) -> None:
        """Allocate the slots before the file is written: Apache's files are sparse."""
        self.disk.allocate_in(self.path, 0, self._allocation_end(self.entries_at))

    def next_number(self) -> int:
        return octets.get_i32(self.view, layout.INDEX_NEXT_NUMBER_AT)

    def begin_ms(self) -> int:
        return octets.get_i64(self.view, layout.INDEX_BEGIN_MS_AT)

    def end_ms(self) -> int:
        return octets.get_i64(self.view, layout.INDEX_END_MS_AT)

    def begin_offset(self) -> int:
        return octets.get_i64(self.view, layout.INDEX_BEGIN_OFFSET_AT)

    def end_offset(self) -> int:
        return octets.get_i64(self.view, layout.INDEX_END_OFFSET_AT)

    def is_full(self) -> bool:
        return octets.get_i32(self.view, layout.INDEX_NEXT_NUMBER_AT) >= self.entries

    def ready(self) -> None:
        """Make sure that the next entries need nothing from the disk."""
        number = octets.get_i32(self.view, layout.INDEX_NEXT_NUMBER_AT)
        if number + _KEYS_AHEAD > self.allocated and self.allocated < self.entries:
            self._allocate(number, _KEYS_AHEAD)
        elif number >= self._preallocate_at:
            self._preallocate_at = _NEVER
            self.needs_blocks = True

    def reserve(self, count: int) -> None:
        """Allocate the blocks of the next `count` entries, as far as they fit."""
        number = self.next_number()
        while self.allocated < min(number + count, self.entries):
            self._allocate(max(number, self.allocated), _KEYS_AHEAD)

    def preallocate(self) -> None:
        """Allocate the step after the current one; for the pool."""
        self._preallocate_at = self.allocated
        if self.allocated < self.entries:
            self._allocate(self.allocated, _KEYS_AHEAD)

    def put(self, key_hash: int, physical_offset: int, store_ms: int) -> None:
        """Add an entry to a file that is not full. Raises DiskFull before anything changes."""
        view = self.view
        number = octets.get_i32(view, layout.INDEX_NEXT_NUMBER_AT)
        if number >= self.allocated:
            self._allocate(number, 1)
        if number == 1:
            octets.put_i64(view, layout.INDEX_BEGIN_MS_AT, store_ms)
            octets.put_i64(view, layout.INDEX_BEGIN_OFFSET_AT, physical_offset)
        seconds = (store_ms - octets.get_i64(view, layout.INDEX_BEGIN_MS_AT)) // 1000
        if seconds < 0:
            seconds = 0
        elif seconds > 0x7FFFFFFF:
            seconds = 0x7FFFFFFF
        slot_at = layout.INDEX_HEADER_BYTES + (key_hash % self.slots) * layout.INDEX_SLOT_BYTES
        previous = octets.get_i32(view, slot_at)
        if previous < 0 or previous >= number:
            previous = 0
        at = self.entries_at + number * layout.INDEX_ENTRY_BYTES
        octets.put_i32(view, at + layout.INDEX_KEY_HASH_AT, key_hash)
        octets.put_i64(view, at + layout.INDEX_OFFSET_AT, physical_offset)
        octets.put_i32(view, at + layout.INDEX_SECONDS_AT, seconds)
        octets.put_i32(view, at + layout.INDEX_PREVIOUS_AT, previous)
        octets.put_i32(view, slot_at, number)
        if previous == 0:
            used = octets.get_i32(view, layout.INDEX_SLOTS_USED_AT)
            octets.put_i32(view, layout.INDEX_SLOTS_USED_AT, used + 1)
        octets.put_i64(view, layout.INDEX_END_MS_AT, store_ms)
        octets.put_i64(view, layout.INDEX_END_OFFSET_AT, physical_offset)
        octets.put_i32(view, layout.INDEX_NEXT_NUMBER_AT, number + 1)

    def find(self, key_hash: int, begin_ms: int, end_ms: int, most: int) -> list[int]:
        """Physical offsets of entries with this hash and time, newest first; may wait.

        Reads the file instead of the mapping: a page fault would wait while holding the GIL.
        Times are kept in seconds, so an entry matches if its second overlaps the range.
        """
        found: list[int] = []
        fd = self.disk.open_to_read(self.path)
        try:
            slot_at = index_file_bytes(key_hash % self.slots, 0)
            slot = self.disk.read_at(fd, layout.INDEX_SLOT_BYTES, slot_at)
            number = octets.get_i32(slot, 0)
            # Read after the slot: a put in between writes its entry before both.
            first_ms, limit = self.begin_ms(), self.next_number()
            while 0 < number <= limit and number < self.entries and len(found) < most:
                at = self.entries_at + number * layout.INDEX_ENTRY_BYTES
                entry = self.disk.read_at(fd, layout.INDEX_ENTRY_BYTES, at)
                at_ms = first_ms + octets.get_i32(entry, layout.INDEX_SECONDS_AT) * 1000
                if at_ms + 999 < begin_ms:
                    break
                if octets.get_i32(entry, layout.INDEX_KEY_HASH_AT) == key_hash and at_ms <= end_ms:
                    found.append(octets.get_i64(entry, layout.INDEX_OFFSET_AT))
                previous = octets.get_i32(entry, layout.INDEX_PREVIOUS_AT)
                if previous >= number:  # damaged: a chain only goes back
                    break
                number = previous
        finally:
            self.disk.close_file(fd)
        return found

    def warm(self) -> None:
        """Read what `put` will touch into the page cache: header, slots, the next entry."""
        fd = self.disk.open_to_read(self.path)
        try:
            for at in range(0, self.entries_at, ALLOCATE_BYTES):
                self.disk.read_at(fd, min(ALLOCATE_BYTES, self.entries_at - at), at)
            end = self.entries_at + self.next_number() * layout.INDEX_ENTRY_BYTES
            self.disk.read_at(fd, 4096, end)
        finally:
            self.disk.close_file(fd)

    def rethread(self, end_offset: int) -> int:
        """Keep the entries of records below `end_offset` and rebuild slots and header from them.

        Returns how many entries were kept. For files whose slots and header can't be trusted:
        entries of records below `end_offset` are known to be on the disk, later ones are not.
        """
        kept = self._count_below(end_offset)
        self._truncate(kept)
        kept_end = self.entries_at + (kept + 1) * layout.INDEX_ENTRY_BYTES
        self.disk.allocate_in(self.path, 0, self._allocation_end(kept_end))
        view = self.view
        first_ms = octets.get_i64(view, layout.INDEX_BEGIN_MS_AT)
        first_offset = octets.get_i64(view, layout.INDEX_BEGIN_OFFSET_AT)
        octets.zero(view, 0, self.entries_at)
        used = 0
        number = 1
        at = self.entries_at + layout.INDEX_ENTRY_BYTES
        while number <= kept:
            key_hash = octets.get_i32(view, at + layout.INDEX_KEY_HASH_AT)
            slot_at = layout.INDEX_HEADER_BYTES + (key_hash % self.slots) * layout.INDEX_SLOT_BYTES
            previous = octets.get_i32(view, slot_at)
            if previous == 0:
                used += 1
            octets.put_i32(view, at + layout.INDEX_PREVIOUS_AT, previous)
            octets.put_i32(view, slot_at, number)
            number += 1
            at += layout.INDEX_ENTRY_BYTES
        if kept > 0:
            last = self.entries_at + kept * layout.INDEX_ENTRY_BYTES
            last_ms = first_ms + octets.get_i32(view, last + layout.INDEX_SECONDS_AT) * 1000
            last_offset = octets.get_i64(view, last + layout.INDEX_OFFSET_AT)
            octets.put_i64(view, layout.INDEX_BEGIN_MS_AT, first_ms)
            octets.put_i64(view, layout.INDEX_END_MS_AT, last_ms)
            octets.put_i64(view, layout.INDEX_BEGIN_OFFSET_AT, first_offset)
            octets.put_i64(view, layout.INDEX_END_OFFSET_AT, last_offset)
        octets.put_i32(view, layout.INDEX_SLOTS_USED_AT, used)
        octets.put_i32(view, layout.INDEX_NEXT_NUMBER_AT, kept + 1)
        return kept

    def _truncate(self, kept: int) -> None:
        """Zero the later entries, so that recovery after another crash does not believe them."""
        fd = self.disk.open(self.path)
        try:
            self.disk.truncate(fd, self.entries_at + (kept + 1) * layout.INDEX_ENTRY_BYTES)
            self.disk.truncate(fd, self.size)
        finally:
            self.disk.close_file(fd)
        self.allocated = self._preallocate_at = 0

    def _count_below(self, end_offset: int) -> int:
        """How many entries from the first on are valid and refer to records below `end_offset`."""
        view = self.view
        kept = 0
        last_offset = 0
        if octets.get_i64(view, layout.INDEX_BEGIN_MS_AT) <= 0:  # no first entry was ever put
            return 0
        at = self.entries_at + layout.INDEX_ENTRY_BYTES
        while kept + 1 < self.entries:
            key_hash = octets.get_i32(view, at + layout.INDEX_KEY_HASH_AT)
            offset = octets.get_i64(view, at + layout.INDEX_OFFSET_AT)
            seconds = octets.get_i32(view, at + layout.INDEX_SECONDS_AT)
            written = offset > 0 or key_hash > 0 or seconds > 0
            if kept == 0 and octets.get_i64(view, layout.INDEX_BEGIN_OFFSET_AT) == 0:
                written = True  # the log's first record may hash to 0
            if not written or offset < last_offset or offset >= end_offset:
                break
            if key_hash < 0 or seconds < 0:
                break
            last_offset = offset
            kept += 1
            at += layout.INDEX_ENTRY_BYTES
        return kept

    def sync(self) -> None:
        """Make it durable; may wait for the disk."""
        self.disk.sync_file(self.path)

    def _allocate(self, number: int, count: int) -> None:
        """Allocate a step from entry `number` on; on a full disk only `count` entries.

        So a recovery needs no more blocks than the file had before, whatever its steps were.
        """
        at = self.entries_at + number * layout.INDEX_ENTRY_BYTES
        least = self._allocation_end(at + count * layout.INDEX_ENTRY_BYTES)
        step_bytes = KEYS_AHEAD * layout.INDEX_ENTRY_BYTES + ALLOCATE_BYTES
        allocated_to = self._allocation_end(at + step_bytes)
        try:
            self.disk.allocate_in(self.path, at, allocated_to - at)
        except DiskFull:
            if least == allocated_to:
                raise
            allocated_to = least
            self.disk.allocate_in(self.path, at, allocated_to - at)
        end = self.allocated = (allocated_to - self.entries_at) // layout.INDEX_ENTRY_BYTES
        if self._preallocate_at == 0:
            self._preallocate_at = (number + end) // 2

    def _allocation_end(self, at: int) -> int:
        """Up to where blocks must be allocated for a store before position `at`."""
        return min(folio_end(at), self.size)


class Index:
    """All index files, oldest first."""

    def __init__(self, disk: Disk, folder: Path, slots: int, entries: int) -> None:
        self.disk: Disk = disk
        self.folder: Path = folder
        self.slots: int = slots
        self.entries: int = entries
        # The writer appends, the pool drops the oldest.
        self.files: list[IndexFile] = []
        # The file being written, which is the last of `files`; None before the first key.
        self.current: IndexFile | None = None
        # Full or new files that were not synced yet.
        self.dirty: list[IndexFile] = []
        # A file made ahead by `reserve`; becomes `current` when the current one is full.
        self._spare: IndexFile | None = None

    def load(self, *, extend: bool) -> list[str]:
        """Open the existing files; returns the names of those that are not valid index files.

        With `extend`, a short file is known to be truncated, and is extended.
        """
        size = index_file_bytes(self.slots, self.entries)
        invalid = []
        for name in self.disk.names(self.folder):
            path = self.folder / name
            length = self.disk.size(path)
            if not (is_number(name) and len(name) == NAME_DIGITS) or (
                length != size and not (extend and length < size)
            ):
                invalid.append(name)
                continue
            if length < size:
                self.disk.close_file(self.disk.create(path, size))
            self.files.append(IndexFile(self.disk, path, self.slots, self.entries, new=False))
        self._enter()
        if self.current is not None:
            self.current.prepare()
            self.current.warm()
        return invalid

    def put(self, key_hash: int, physical_offset: int, store_ms: int) -> None:
        """Add an entry, in a new file if there is none or the current one is full."""
        current = self.current
        if current is None or current.is_full():
            current = self.add(store_ms)
        current.put(key_hash, physical_offset, store_ms)

    def reserve(self, count: int, now_ms: int) -> None:
        """Allocate `count` more entries, in another file if the current one gets full."""
        current = self.current
        if current is None or current.is_full():
            current = self.add(now_ms)
        current.reserve(count)
        if current.next_number() + count > self.entries and self._spare is None:
            self._spare = self._make(now_ms)
            self._spare.reserve(count)

    def find(self, key_hash: int, begin_ms: int, end_ms: int, most: int) -> list[int]:
        """Physical offsets with this key hash in a time range, newest first; may wait."""
        found: list[int] = []
        for file in reversed(list(self.files)):
            if file.next_number() <= 1:
                continue
            if len(found) >= most or file.end_ms() + 999 < begin_ms:
                break
            if file.begin_ms() <= end_ms:
                try:
                    found += file.find(key_hash, begin_ms, end_ms, most - len(found))
                except FileNotFoundError:  # deleted by retention meanwhile
                    break
        return found

    def cut(self, end_offset: int) -> None:
        """Keep only entries of records below `end_offset`; the files may be in any state."""
        while self.files:
            last = self.files[len(self.files) - 1]
            if last.rethread(end_offset) > 0:
                last.sync()
                break
            self._delete(self.files.pop())
        if self.folder.is_dir():
            self.disk.sync_directory(self.folder)
        self._enter()

    def drop_before(self, begin_offset: int) -> None:
        """Delete files whose records are all deleted, but never the last one; may wait."""
        while len(self.files) > 1 and self.files[0].end_offset() < begin_offset:
            self._delete(self.files.pop(0))
            self.disk.sync_directory(self.folder)

    def sync(self) -> None:
        """Make all entries durable; may wait for the disk."""
        dirty, self.dirty = self.dirty, []
        try:
            for file in dirty:
                file.sync()
            if self.current is not None and self.current not in dirty:
                self.current.sync()
            if dirty:
                self.disk.sync_directory(self.folder)
        except OSError:
            self.dirty += dirty
            raise

    def close(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            self.disk.unlink(spare.path)
        self.files = []
        self.current = None
        self.dirty = []

    def add(self, now_ms: int) -> IndexFile:
        """Continue in a new file."""
        file, self._spare = self._spare, None
        if file is None:
            file = self._make(now_ms)
        if self.current is not None and self.current not in self.dirty:
            self.dirty.append(self.current)
        self.dirty.append(file)
        self.files.append(file)
        self.current = file
        return file

    def _delete(self, file: IndexFile) -> None:
        while file in self.dirty:
            self.dirty.remove(file)
        self.disk.unlink(file.path)

    def _enter(self) -> None:
        self.current = self.files[len(self.files) - 1] if self.files else None

    def _make(self, now_ms: int) -> IndexFile:
        if not self.files:
            self.disk.make_directory(self.folder)
        name = file_name(now_ms)
        if self.files:  # names stay in order when local time steps back
            last = self.files[len(self.files) - 1].path.name
            name = max(name, f"{int(last) + 1:0{NAME_DIGITS}d}")
        path = self.folder / name
        try:
            return IndexFile(self.disk, path, self.slots, self.entries, new=True)
        except BaseException:
            if path.exists():
                self.disk.unlink(path)  # a file without a header is not valid
            raise
