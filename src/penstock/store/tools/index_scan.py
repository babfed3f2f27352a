"""The loop over an index file's entries, each compared with the record that it points at.

Like `log_scan` it opens no file and makes no object per entry; it stops at a bad entry with a code
and is called again behind it.
"""

from array import array

from penstock.store.tools.log_scan import LogWindow
from penstock.wire import layout, octets
from penstock.wire.record import RECORD, StoredRecord

# What is wrong with the index entry at which `run` stopped.
ENTRY_OK = 0
ENTRY_GARBLED = 1  # impossible values
ENTRY_CHAIN = 2  # does not link to the entry before it in its slot
ENTRY_BEYOND = 3  # points behind the log's end
ENTRY_NO_RECORD = 4  # no record begins where it points
ENTRY_OTHER_KEY = 5  # the record has no key with this hash
ENTRY_TIME = 6  # the record was stored at another time
_ENTRY_OK, _ENTRY_GARBLED, _ENTRY_CHAIN, _ENTRY_BEYOND = 0, 1, 2, 3
_ENTRY_NO_RECORD, _ENTRY_OTHER_KEY, _ENTRY_TIME = 4, 5, 6

_SPACE = 32
_SECONDS_MAX = 0x7FFFFFFF


class IndexScan:
    """One walk over the entries of an index file, compared with the log; counts are fields."""

    def __init__(self, slots: int, *, log_begin: int, log_end: int, begin_ms: int) -> None:
        self.slots: int = slots
        self.log_begin: int = log_begin
        self.log_end: int = log_end
        self.begin_ms: int = begin_ms
        # The next entry to check, and what is wrong with the one before it if `run` was False.
        self.number: int = 1
        self.problem: int = 0
        # Entries whose record exists, entries whose record is deleted, slots in use.
        self.alive: int = 0
        self.deleted: int = 0
        self.used: int = 0
        # The record at hand, and its log offset; bound to the window while `run` is working.
        self.stored: StoredRecord = StoredRecord()
        self._at: int = -1
        # The newest entry of each slot so far, as the entries tell it.
        self.newest: memoryview = memoryview(array("i", bytes(4 * slots)))
        # Entries of tags among those that are alive.
        self.tags: int = 0
        # Hash of `topic#` of the record at hand, from which its keys are hashed on.
        self._seed: int = 0
        self._separators: memoryview = memoryview(bytearray(b"#T#"))

    def run(self, entries: memoryview, first: int, window: LogWindow) -> bool:
        """Continue at entry `number`; entry `first` is the first of `entries`.

        True at their end; False at a bad entry with its `problem`: `number` is already behind it.
        """
        end = first + len(entries) // layout.INDEX_ENTRY_BYTES
        number = self.number
        problem = _ENTRY_OK
        self.stored.bind(window.view)
        while number < end:
            problem = self._check(
                entries, (number - first) * layout.INDEX_ENTRY_BYTES, number, window
            )
            number += 1
            if problem != _ENTRY_OK:
                break
        self.number = number
        self.problem = problem
        self.stored.release()
        self._at = -1
        return problem == _ENTRY_OK

    def differing_slot(self, slots: memoryview, first: int) -> int:
        """The first of `slots`, which begin with slot `first`, that does not hold its newest entry;
        or -1."""
        count = len(slots) // layout.INDEX_SLOT_BYTES
        i = 0
        while i < count:
            if octets.get_i32(slots, layout.INDEX_SLOT_BYTES * i) != self.newest[first + i]:
                return first + i
            i += 1
        return -1

    def _check(self, entries: memoryview, at: int, number: int, window: LogWindow) -> int:
        key_hash = octets.get_i32(entries, at + layout.INDEX_KEY_HASH_AT)
        offset = octets.get_i64(entries, at + layout.INDEX_OFFSET_AT)
        seconds = octets.get_i32(entries, at + layout.INDEX_SECONDS_AT)
        previous = octets.get_i32(entries, at + layout.INDEX_PREVIOUS_AT)
        if key_hash < 0 or offset < 0 or seconds < 0 or previous < 0 or previous >= number:
            return _ENTRY_GARBLED
        slot = key_hash % self.slots
        before = self.newest[slot]
        self.newest[slot] = number
        if before == 0:
            self.used += 1
        if previous != before:
            return _ENTRY_CHAIN
        if offset < self.log_begin:
            self.deleted += 1
            return _ENTRY_OK
        if offset >= self.log_end:
            return _ENTRY_BEYOND
        self.alive += 1
        return self._check_record(key_hash, offset, seconds, window)

    def _check_record(self, key_hash: int, offset: int, seconds: int, window: LogWindow) -> int:
        stored = self.stored
        if offset != self._at:  # entries of one record are neighbours
            self._at = -1
            if not self._read(offset, window):
                return _ENTRY_NO_RECORD
            self._at = offset
        if not self._has_key(stored, key_hash):
            return _ENTRY_OTHER_KEY
        expected = (stored.store_ms - self.begin_ms) // 1000
        if expected < 0:
            expected = 0
        if expected > _SECONDS_MAX:
            expected = _SECONDS_MAX
        if seconds < expected - 1 or seconds > expected + 1:
            return _ENTRY_TIME
        return _ENTRY_OK

    def _read(self, offset: int, window: LogWindow) -> bool:
        """Read and scan the record at `offset`; False if there is none."""
        if offset < window.start or offset + layout.HEAD_BYTES > window.start + window.length:
            window.load(offset, layout.HEAD_BYTES)
            self.stored.bind(window.view)
        if window.length < layout.HEAD_BYTES:
            return False
        size = octets.get_i32(window.view, offset - window.start + layout.SIZE_AT)
        if size > window.start + window.length - offset:
            window.load(offset, size)
            self.stored.bind(window.view)
        stored = self.stored
        if stored.read(offset - window.start, window.length) != RECORD:
            return False
        if stored.physical_offset != offset:
            return False
        stored.scan()
        self._seed = stored.marks.hash(stored.topic_at, stored.topic_length, 0)
        self._seed = octets.ascii_hash(self._separators, 0, 1, self._seed)
        return True

    def _has_key(self, stored: StoredRecord, wanted: int) -> bool:
        marks = stored.marks
        seed = self._seed
        if marks.unique_length > 0:
            found = marks.hash(marks.unique_at, marks.unique_length, seed)
            if _positive(found) == wanted:
                return True
        at = marks.keys_at
        end = at + marks.keys_length
        start = at
        while at <= end and marks.keys_length > 0:
            if at == end or stored.buffer[at] == _SPACE:
                if at > start and _positive(marks.hash(start, at - start, seed)) == wanted:
                    return True
                start = at + 1
            at += 1
        return self._has_tag(stored, wanted, seed)

    def _has_tag(self, stored: StoredRecord, wanted: int, seed: int) -> bool:
        """Whether the hash is that of the tag: some brokers index tags as `topic#T#tag`."""
        marks = stored.marks
        if marks.tags_length > 0:
            seed = octets.ascii_hash(self._separators, 1, 2, seed)
            if _positive(marks.hash(marks.tags_at, marks.tags_length, seed)) == wanted:
                self.tags += 1
                return True
        return False


def _positive(value: int) -> int:
    if value >= 0:
        return value
    return 0 if value == -0x80000000 else -value
