"""Read-only access to a store's files, in any state: no lock, no write.

`StoreFiles` finds the files and reads parts of them; it never maps, so a file that shrinks or a
disk that fails is an error and never a signal. `survey` (statistics), `verify` (consistency) and
`dump` (messages) use it.

Sizes come from the caller, else from `penstock.json`, else they are guessed: a segment from the
distance of two file names or the length of one, a queue file from its length, an index file from
its length if it has RocketMQ's four entries per slot.
"""

import itertools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.errors import StoreError
from penstock.store.consumequeue.consumequeue import FILLER_SIZE, unpack_entry
from penstock.store.consumequeue.queue_removal import PREFIX, read_ends
from penstock.store.directory import Sizes, StorePaths
from penstock.store.disk import Disk
from penstock.store.index import NAME_DIGITS as INDEX_NAME_DIGITS
from penstock.store.index import index_file_bytes
from penstock.store.recovery.checkpoint import Checkpoint
from penstock.store.recovery.shutdown_snapshot import ShutdownSnapshot
from penstock.store.segment import NAME_DIGITS
from penstock.store.tools.file_pieces import CHUNK_BYTES, LogFile, read_piece, search
from penstock.store.tools.log_scan import LogWindow
from penstock.wire import layout, octets
from penstock.wire.record import RECORD, StoredRecord

ENTRIES_AT_A_TIME = 400
"""Queue entries read at a time: with 20,000 queues 160 MB, and one read serves many records."""
SLOTS_DEFAULT, ENTRIES_DEFAULT = 5_000_000, 20_000_000
ENTRIES_PER_SLOT = 4


class QueueFile(NamedTuple):
    """One ConsumeQueue file, in entries."""

    path: Path
    start: int
    entries: int


class IndexHead(NamedTuple):
    """The header of an index file."""

    begin_ms: int
    end_ms: int
    begin_offset: int
    end_offset: int
    slots_used: int
    next_number: int


class SizeHints(NamedTuple):
    """Sizes that the caller knows; 0 means unknown."""

    segment_bytes: int = 0
    queue_file_entries: int = 0
    index_slots: int = 0
    index_entries: int = 0


class StoreFiles:
    """A store's directory at the time of construction.

    `crashed`: it was not closed; `live`: because a process has it open. With `stop` set, the log is
    read only up to there, and not as far as a live writer gets.
    """

    def __init__(self, root: Path, hints: SizeHints | None = None) -> None:
        self.root = root
        self.paths = StorePaths(root)
        if not (self.paths.log.is_dir() or self.paths.queues.is_dir()):
            raise StoreError(
                f"{root} is not a store: it has no commitlog/ directory",
                hint="give the directory that holds commitlog/, consumequeue/ and index/",
            )
        self.sizes, self.sizes_from = _find_sizes(self.paths, hints or SizeHints())
        self.crashed = self.paths.abort.exists()
        self.live = self.crashed and _is_locked(self.paths.lock)
        self.stop: int | None = None
        # How much of the log is read at a time.
        self.chunk_bytes = CHUNK_BYTES
        self.log = _log_files(self.paths)
        self.snapshot = self._read_snapshot()
        self.removed = read_ends(Disk(), self.paths)

    # --- the log

    @property
    def log_begin(self) -> int:
        return self.log[0].start if self.log else 0

    @property
    def log_beyond(self) -> int:
        """The end of the last file, which is behind the log's end."""
        return self.log[-1].start + self.sizes.segment_bytes if self.log else 0

    def log_file(self, offset: int) -> LogFile | None:
        """The file whose segment holds this offset."""
        size = self.sizes.segment_bytes
        place = (offset - self.log_begin) // size if size and self.log else -1
        if 0 <= place < len(self.log) and self.log[place].start == offset - offset % size:
            return self.log[place]
        return next((f for f in self.log if f.start <= offset < f.start + size), None)

    def fetch_log(self, offset: int, least: int) -> tuple[bytearray, int]:
        """Log bytes for a window: at most a chunk, or `least` if that is more."""
        file = self.log_file(offset)
        if file is None:
            return bytearray(), 0
        at = offset - file.start
        end = min(file.length, self.sizes.segment_bytes)
        if self.stop is not None:
            end = min(end, self.stop - file.start)
        left = max(end - at, 0)
        return read_piece(file.path, at, min(max(self.chunk_bytes, least), left)), left

    def window(self) -> LogWindow:
        return LogWindow(self.fetch_log)

    def record(self, offset: int) -> tuple[StoredRecord, bytes] | None:
        """The record at an offset and its bytes, if its lengths are consistent; no other check."""
        file = self.log_file(offset) if offset >= 0 else None
        if file is None:
            return None
        head = read_piece(file.path, offset - file.start, layout.HEAD_BYTES)
        if len(head) < layout.HEAD_BYTES:
            return None
        size = octets.get_i32(head, layout.SIZE_AT)
        if not 0 < size <= file.length - (offset - file.start):
            return None
        data = read_piece(file.path, offset - file.start, size)
        stored = StoredRecord()
        stored.bind(memoryview(data))
        if len(data) != size or stored.read(0, size) != RECORD:
            return None
        return stored, bytes(data)

    def next_valid(self, offset: int) -> int | None:
        """The offset of the first valid record from `offset` on, or None."""
        for file in self.log:
            if file.start + file.length <= offset:
                continue
            found = search(file, max(offset - file.start, 0), self.sizes.segment_bytes)
            if found is not None:
                return found
        return None

    # --- queues

    def queues(self) -> Iterator[tuple[str, int]]:
        """(topic, queue id) of all queues that have files."""
        for topic in _names(self.paths.queues):
            if topic.startswith(PREFIX):
                continue  # being deleted
            for name in sorted(_names(self.paths.queues / topic), key=lambda n: (len(n), n)):
                if name.isdigit():
                    yield topic, int(name)

    def queue_files(self, topic: str, queue_id: int) -> list[QueueFile]:
        folder = self.paths.queues / topic / str(queue_id)
        return [
            QueueFile(
                folder / name,
                int(name) // layout.ENTRY_BYTES,
                _size(folder / name) // layout.ENTRY_BYTES,
            )
            for name in _names(folder)
            if name.isdigit() and len(name) == NAME_DIGITS
        ]

    # --- index, checkpoint, snapshot

    def index_files(self) -> list[Path]:
        folder = self.paths.index
        names = [n for n in _names(folder) if n.isdigit() and len(n) == INDEX_NAME_DIGITS]
        return [folder / name for name in names]

    def index_bytes(self) -> int:
        """The expected length of an index file; 0 if it is not known."""
        if not self.sizes.index_slots:
            return 0
        return index_file_bytes(self.sizes.index_slots, self.sizes.index_entries)

    def index_head(self, path: Path) -> IndexHead | None:
        head = read_piece(path, 0, layout.INDEX_HEADER_BYTES)
        if len(head) < layout.INDEX_HEADER_BYTES:
            return None
        return IndexHead(
            begin_ms=octets.get_i64(head, layout.INDEX_BEGIN_MS_AT),
            end_ms=octets.get_i64(head, layout.INDEX_END_MS_AT),
            begin_offset=octets.get_i64(head, layout.INDEX_BEGIN_OFFSET_AT),
            end_offset=octets.get_i64(head, layout.INDEX_END_OFFSET_AT),
            slots_used=octets.get_i32(head, layout.INDEX_SLOTS_USED_AT),
            next_number=octets.get_i32(head, layout.INDEX_NEXT_NUMBER_AT),
        )

    def checkpoint(self) -> Checkpoint | None:
        """The checkpoint, or None if the file is absent or too short."""
        if not self.paths.checkpoint.exists():
            return None
        data = read_piece(self.paths.checkpoint, 0, 40)
        if len(data) < 40:
            return None
        return Checkpoint(*(octets.get_i64(data, 8 * i) for i in range(5)))

    def replay_from(self) -> int:
        """Where recovery would begin after a crash; the end of all files if closed cleanly."""
        if not self.crashed:
            return self.log_beyond
        checkpoint = self.checkpoint() or Checkpoint()
        threshold = checkpoint.recover_from_ms(with_index=self.paths.sizes.exists())
        for file in reversed(self.log):
            found = self.record(file.start)
            if found is None:
                continue
            stored, _ = found
            if stored.check(file.start) == RECORD and 0 < stored.store_ms <= threshold:
                return file.start
        return self.log_begin

    def _read_snapshot(self) -> ShutdownSnapshot | None:
        if not self.paths.snapshot.exists():
            return None
        try:
            return msgspec.json.decode(self.paths.snapshot.read_bytes(), type=ShutdownSnapshot)
        except ValueError:
            return None


class QueueEntries:
    """The entries of one queue, and its range as the files show it."""

    def __init__(self, files: StoreFiles, topic: str, queue_id: int) -> None:
        self.files = files.queue_files(topic, queue_id)
        self.topic = topic
        self.queue_id = queue_id
        self.first = self.files[0].start if self.files else 0
        self.end = self._find_end()

    def fetch(self, offset: int) -> bytearray:
        """Entries from `offset` on, to the end of their file at most."""
        return self.read(offset, ENTRIES_AT_A_TIME)

    def read(self, offset: int, count: int) -> bytearray:
        for file in self.files:
            if file.start <= offset < file.start + file.entries:
                count = min(count, file.start + file.entries - offset)
                at = (offset - file.start) * layout.ENTRY_BYTES
                data = read_piece(file.path, at, count * layout.ENTRY_BYTES)
                return data[: len(data) - len(data) % layout.ENTRY_BYTES]
        return bytearray()

    def entry(self, offset: int) -> tuple[int, int, int] | None:
        """(physical offset, size, tag hash), or None where no entry was written."""
        data = self.read(offset, 1)
        if not data.strip(b"\0"):
            return None
        return unpack_entry(data)

    def min_offset(self, log_begin: int) -> int:
        """The first entry whose record still exists, by binary search."""
        low, high = self.first, self.end
        while low < high:
            middle = (low + high) // 2
            entry = self.entry(middle)
            if entry is not None and _is_gone(entry, log_begin):
                low = middle + 1
            else:
                high = middle
        return low

    def _find_end(self) -> int:
        """One past the last entry; what follows the entries is zero."""
        for file in reversed(self.files):
            low, high = file.start, file.start + file.entries
            while low < high:
                middle = (low + high) // 2
                if self.entry(middle) is None:
                    high = middle
                else:
                    low = middle + 1
            if low > file.start:
                return low
        return self.first


def _is_gone(entry: tuple[int, int, int], log_begin: int) -> bool:
    """Whether an entry's record is deleted. A filler has its place in the log as its tag hash, or
    0 before the queue's first message."""
    if entry[1] == FILLER_SIZE:
        return entry[2] == 0 or entry[2] < log_begin
    return entry[0] < log_begin


def _is_locked(path: Path) -> bool:
    """Whether a process holds the store's lock, by the kernel's list: trying it would disturb."""

    try:
        inode = str(path.stat().st_ino)
        locks = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return False
    return any(
        ("POSIX" in line or "OFDLCK" in line) and place.rpartition(":")[2] == inode
        for line in locks
        for place in line.split()
        if place.count(":") == 2
    )


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # deleted by a live store's retention meanwhile
        return 0


def _log_files(paths: StorePaths) -> list[LogFile]:
    names = [n for n in _names(paths.log) if n.isdigit() and len(n) == NAME_DIGITS]
    return [LogFile(paths.log / n, int(n), _size(paths.log / n)) for n in names]


def _find_sizes(paths: StorePaths, hints: SizeHints) -> tuple[Sizes, str]:
    made = _made_with(paths)
    guess = made or _guess_sizes(paths)
    sizes = Sizes(
        *(getattr(hints, name) or getattr(guess, name) for name in Sizes.__struct_fields__)
    )
    if any(hints):
        return sizes, "the command line"
    return sizes, paths.sizes.name if made else "the files (a guess)"


def _made_with(paths: StorePaths) -> Sizes | None:
    try:
        made = msgspec.json.decode(paths.sizes.read_bytes(), type=Sizes)
    except (OSError, ValueError):
        return None
    return made if all(getattr(made, name) > 0 for name in Sizes.__struct_fields__) else None


def _guess_sizes(paths: StorePaths) -> Sizes:
    log = _log_files(paths)
    steps = Counter(b.start - a.start for a, b in itertools.pairwise(log))
    # A missing file makes one distance a multiple of the others, so the smallest is right.
    segment = min(steps) if steps else max((f.length for f in log), default=0)
    queue_bytes = max(
        (_size(p) for t in _names(paths.queues) for p in (paths.queues / t).glob("*/*")),
        default=0,
    )
    index = max((_size(paths.index / n) for n in _names(paths.index)), default=0)
    slots, entries = SLOTS_DEFAULT, ENTRIES_DEFAULT
    per_slot = layout.INDEX_SLOT_BYTES + ENTRIES_PER_SLOT * layout.INDEX_ENTRY_BYTES
    if index and index != index_file_bytes(slots, entries):
        slots, rest = divmod(index - layout.INDEX_HEADER_BYTES, per_slot)
        slots, entries = (slots, slots * ENTRIES_PER_SLOT) if rest == 0 else (0, 0)
    return Sizes(segment, queue_bytes // layout.ENTRY_BYTES, slots, entries)
