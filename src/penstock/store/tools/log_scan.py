"""The loop of the store tools: walks a part of the log and compares it with the queues' entries.

It opens no files: callables bring the bytes. Results are codes and numbers in fields; `verify`
turns them into problems. The loop stops at the first irregularity and is called again behind it.

Cost model: compiled, a valid record costs its CRC and about 100 ns. No object is made per record.
"""

from array import array
from collections.abc import Callable

from penstock.wire import layout, octets
from penstock.wire.record import NOTHING, RECORD, StoredRecord

# Why `LogScan.run` returned.
MORE = 0  # the window ends: load another one at `offset` with at least `needs` bytes
AT_END = 1  # at the end of the segment
AT_BLANK = 2  # at a blank record of `blank` bytes
BAD = 3  # no valid record at `offset`; `stored.problem` says why
_MORE, _AT_END, _AT_BLANK, _BAD = MORE, AT_END, AT_BLANK, BAD

_TRANSACTION_MASK = 0x0C
_PREPARED = 0x04
_ROLLBACK = 0x0C
_SPACE = 32

Fetch = Callable[[int, int], tuple[bytearray, int]]
"""(log offset, least bytes) → bytes from there on, and how many its file has from there on."""


class LogWindow:
    """A part of one segment in memory."""

    def __init__(self, fetch: Fetch) -> None:
        self.fetch: Fetch = fetch
        # The bytes loaded, the log offset of the first and their number. Valid until `load`.
        self.view: memoryview = memoryview(bytearray(1))
        self.start: int = 0
        self.length: int = 0
        # How many bytes the segment's file has from `start` on.
        self.left: int = 0

    def load(self, offset: int, least: int) -> None:
        """Load bytes from `offset` on: at least `least`, unless the file ends before."""
        data, left = self.fetch(offset, least)
        self.length = len(data)
        self.left = left
        self.start = offset
        self.view = memoryview(data) if data else memoryview(bytearray(1))


class QueueComparison:
    """The records of one queue, compared with the queue's entries.

    `fetch(queue offset)` returns entries from there on, or nothing. `matches` are the ranges of
    queue offsets whose entry and record agree; `misses` are (from, to, first physical offset) of
    records whose entry is missing or different. Neighbours are merged in both.
    """

    def __init__(self, topic: bytes, queue_id: int, fetch: Callable[[int], bytearray]) -> None:
        self.topic: bytes = topic
        self.queue_id: int = queue_id
        self.fetch: Callable[[int], bytearray] = fetch
        # Whether tag hashes are not compared: entries of delay levels hold the delivery time.
        self.any_tag: bool = False
        # Records and their bytes so far, and those whose entry agrees.
        self.records: int = 0
        self.log_bytes: int = 0
        self.matched: int = 0
        # Complete only after `finish`.
        self.matches: list[tuple[int, int]] = []
        self.misses: list[tuple[int, int, int]] = []
        # The open ranges at the end of both lists.
        self._match_from: int = 0
        self._match_to: int = 0
        self._miss_from: int = 0
        self._miss_to: int = 0
        self._miss_at: int = 0
        # Entries [_from, _to) of the queue, loaded by `fetch`; until the next `_load`.
        self._entries: memoryview = memoryview(bytearray(1))
        self._from: int = 0
        self._to: int = 0

    def compare(self, stored: StoredRecord) -> None:
        """Compare a record of this queue, which has been scanned, with its entry."""
        offset = stored.queue_offset
        self.records += 1
        self.log_bytes += stored.size
        if offset < self._from or offset >= self._to:
            self._load(offset)
        if self._from <= offset < self._to and self._agrees(stored, offset):
            self.matched += 1
            if offset != self._match_to:
                self._close_match()
                self._match_from = offset
            self._match_to = offset + 1
        else:
            if offset != self._miss_to:
                self._close_miss()
                self._miss_from = offset
                self._miss_at = stored.physical_offset
            self._miss_to = offset + 1

    def _agrees(self, stored: StoredRecord, offset: int) -> bool:
        entries = self._entries
        at = (offset - self._from) * layout.ENTRY_BYTES
        if octets.get_i64(entries, at + layout.ENTRY_OFFSET_AT) != stored.physical_offset:
            return False
        if octets.get_i32(entries, at + layout.ENTRY_SIZE_AT) != stored.size:
            return False
        if self.any_tag:
            return True
        return octets.get_i64(entries, at + layout.ENTRY_TAG_AT) == stored.marks.tags_code()

    def finish(self) -> None:
        """The log has been walked: add the open ranges to the lists."""
        self._close_match()
        self._close_miss()

    def _close_match(self) -> None:
        if self._match_to > self._match_from:
            self.matches.append((self._match_from, self._match_to))
        self._match_from = self._match_to

    def _close_miss(self) -> None:
        if self._miss_to > self._miss_from:
            self.misses.append((self._miss_from, self._miss_to, self._miss_at))
        self._miss_from = self._miss_to

    def _load(self, offset: int) -> None:
        data = self.fetch(offset)
        self._from = offset
        self._to = offset + len(data) // layout.ENTRY_BYTES
        if data:
            self._entries = memoryview(data)


class LogScan:
    """One walk over the log, window by window; its counts are fields.

    `make_queue(topic, queue id)` is called for each queue at its first record; without it only the
    log is checked.
    """

    def __init__(self, make_queue: Callable[[bytes, int], QueueComparison] | None) -> None:
        self.make_queue: Callable[[bytes, int], QueueComparison] | None = make_queue
        # The record at hand, bound to the window only while `run` is working; its problem stays.
        self.stored: StoredRecord = StoredRecord()
        # Results of the last `run`: where it stopped, what it needs there, the blank's size.
        self.offset: int = 0
        self.needs: int = 0
        self.blank: int = 0
        # Valid records so far, their bytes, those with a queue entry, and keys in the index.
        self.records: int = 0
        self.log_bytes: int = 0
        self.queued: int = 0
        self.keys: int = 0
        # Keys are counted for records in this range of log offsets, which the index covers.
        self.keys_from: int = 0
        self.keys_to: int = 0
        # Physical offset of the last record, store times of the first and the newest, and how
        # often the store time stepped back.
        self.last_offset: int = -1
        self.first_ms: int = 0
        self.last_ms: int = 0
        self.backwards: int = 0
        # The queues met, and a hash table of them as in `QueueTable`.
        self.queues: list[QueueComparison] = []
        self._slots: memoryview = memoryview(array("i", bytes(4 * 64)))
        self._mask: int = 63

    def run(self, window: LogWindow) -> int:
        """Walk from the window's start up to anything that is not a valid record."""
        stored = self.stored
        view = window.view
        stored.bind(view)
        start = window.start
        length = window.length
        at = 0
        why = _MORE
        while True:
            left = length - at
            self.needs = layout.HEAD_BYTES
            if left < layout.HEAD_BYTES:
                if length >= window.left:
                    why = _AT_END
                break
            size = octets.get_i32(view, at + layout.SIZE_AT)
            magic = octets.get_i32(view, at + layout.MAGIC_AT)
            if magic == layout.MAGIC_BLANK:
                self.blank = size
                why = _AT_BLANK
                break
            known = magic in (layout.MAGIC_V1, layout.MAGIC_V2)
            if known and left < size <= window.left - at:
                self.needs = size
                break
            if stored.read(at, length) != RECORD or stored.check(start + at) == NOTHING:
                why = _BAD
                break
            self._take(stored)
            at += stored.size
        self.offset = start + at
        stored.release()
        return why

    def finish(self) -> None:
        """The log has been walked."""
        for queue in self.queues:
            queue.finish()

    def _take(self, stored: StoredRecord) -> None:
        self.records += 1
        self.log_bytes += stored.size
        self.last_offset = stored.physical_offset
        if self.records == 1:
            self.first_ms = stored.store_ms
        if stored.store_ms < self.last_ms:
            self.backwards += 1
        else:
            self.last_ms = stored.store_ms
        if self.make_queue is not None:
            self._compare(stored)

    def _compare(self, stored: StoredRecord) -> None:
        """Compare a record with its queue entry, and count its keys."""
        stored.scan()
        transaction = stored.sys_flag & _TRANSACTION_MASK
        if transaction != _ROLLBACK and self.keys_from <= stored.physical_offset <= self.keys_to:
            self.keys += count_keys(stored)
        if transaction != _PREPARED and transaction != _ROLLBACK:
            self.queued += 1
            queue = self._find(stored)
            if queue is None:
                queue = self._add_queue(stored)
            queue.compare(stored)

    def _find(self, stored: StoredRecord) -> QueueComparison | None:
        slot = (
            octets.mix_hash(stored.buffer, stored.topic_at, stored.topic_length, stored.queue_id)
            & self._mask
        )
        while True:
            number = self._slots[slot]
            if number == 0:
                return None
            queue = self.queues[number - 1]
            if (
                queue.queue_id == stored.queue_id
                and len(queue.topic) == stored.topic_length
                and octets.matches(stored.buffer, stored.topic_at, queue.topic)
            ):
                return queue
            slot = (slot + 1) & self._mask

    def _add_queue(self, stored: StoredRecord) -> QueueComparison:
        topic = bytes(stored.buffer[stored.topic_at : stored.topic_at + stored.topic_length])
        assert self.make_queue is not None
        queue = self.make_queue(topic, stored.queue_id)
        self.queues.append(queue)
        if 2 * len(self.queues) > self._mask:
            self._mask = 2 * self._mask + 1
            self._slots = memoryview(array("i", bytes(4 * (self._mask + 1))))
            for number in range(1, len(self.queues) + 1):
                self._insert(number)
        else:
            self._insert(len(self.queues))
        return queue

    def _insert(self, number: int) -> None:
        queue = self.queues[number - 1]
        name = bytearray(queue.topic + b"\0")
        slot = octets.mix_hash(name, 0, len(queue.topic), queue.queue_id) & self._mask
        while self._slots[slot]:
            slot = (slot + 1) & self._mask
        self._slots[slot] = number


def count_keys(stored: StoredRecord) -> int:
    """How many index entries a scanned record has: its unique id and each of its keys."""
    marks = stored.marks
    count = 1 if marks.unique_length > 0 else 0
    if marks.keys_length > 0:
        at = marks.keys_at
        end = at + marks.keys_length
        start = at
        while at <= end:
            if at == end or stored.buffer[at] == _SPACE:
                if at > start:
                    count += 1
                start = at + 1
            at += 1
    return count
