"""Append to the CommitLog and dispatch to ConsumeQueue and index, in one call.

The same dispatch serves new records (`put`) and, after a crash, those found in the log
(`replay`), where the record's own queue offset decides which entry it gets.
"""

from array import array

from penstock.errors import DiskFull, NotMaster, StoreError, WriteStopped
from penstock.store.commitlog import CommitLog
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.consumequeue.queue_files import has_fillers, last_real, write_replayed
from penstock.store.consumequeue.queue_table import QueueTable
from penstock.store.disk import is_full
from penstock.store.flusher import Flusher
from penstock.store.index import Index, IndexFile
from penstock.store.recovery_report import RecoveryReport, ReplayDamage
from penstock.wire import layout
from penstock.wire.record import (
    BATCH_BROKEN,
    BATCH_SPECIAL,
    BODY_TOO_LONG,
    SPECIAL_PRIORITY,
    TOO_LONG_FOR_SEGMENT,
    BatchWalk,
    PropertyMarks,
    Record,
    StoredRecord,
)

# Results of a put.
PUT_OK = 0
ILLEGAL = 1  # `problem` says which limit
NO_QUEUE = 2  # there is no such queue yet: make it and put again
REFUSED = 3  # `fault` says why; while there is a `refusal`, every put is refused
_PUT_OK, _ILLEGAL, _NO_QUEUE, _REFUSED = PUT_OK, ILLEGAL, NO_QUEUE, REFUSED

QUEUE_OFFSET_MAX = 1 << 56
NO_JUMP, FROM_EMPTY = -2, -1
"""In place of the queue offset that was expected before a gap: there is no gap, or the queue was
empty."""
"""More than any queue can have: the byte position would not fit a file name."""

REPLAYED_MAX = 1_000_000
"""How many entries recovery keeps in memory, so that it opens each queue's file once."""
_REPLAYED_MAX = REPLAYED_MAX

SIZE_BOUNDS = (1 << 10, 4 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20)
"""Buckets of the sizes of records, as in RocketMQ's metrics."""
_SIZE_BUCKETS = len(SIZE_BOUNDS)

MS_MAX = OFFSET_MAX = (1 << 63) - 1

_TRANSACTION_MASK = 0x0C
_PREPARED = 0x04
_ROLLBACK = 0x0C
_SPACE = 32
_SPECIAL_PRIORITY = SPECIAL_PRIORITY


Entry = tuple[int, int, int, int]
"""A queue entry: queue offset, physical offset, size, tag hash."""


class StoreWriter:
    """Appends records to the log and dispatches them; single writer.

    Results of the last call are fields, so that a put makes no object.
    """

    def __init__(
        self, log: CommitLog, queues: QueueTable, index: Index | None, flusher: Flusher
    ) -> None:
        self.log: CommitLog = log
        self.flusher: Flusher = flusher
        # Readers see the log up to here; moved by `publish`.
        self.confirm_offset: int = 0
        self.queues: QueueTable = queues
        self.index: Index | None = index
        # Whether tags are indexed; a live setting.
        self.index_tags: bool = True
        # Why every put is refused, or None. The maintenance clears it unless writing has stopped.
        self.refusal: Exception | None = None
        # Why the last put was REFUSED, and the limit that the last ILLEGAL record broke.
        self.fault: Exception | None = None
        self.problem: int = 0
        # Physical offset and queue offset of the last message stored; the first one's of a batch.
        # Valid until the next put.
        self.offset: int = 0
        self.queue_offset: int = 0
        # Physical offset of the last record appended since the start, or -1.
        self.last_offset: int = -1
        # Replay: queues that continue after a gap, and records that got no entry.
        self.gaps: int = 0
        self.unplaced: int = 0
        # Replay: the damage that it has met, which explains gaps.
        self.damage: ReplayDamage = ReplayDamage(RecoveryReport(), 0)
        # Readers see nothing beyond this log offset, because a replica does not have it yet.
        self.confirm_limit: int = OFFSET_MAX
        # Whether sends wait for replicas, and up to which log offset enough of them have the log.
        self.replicated: bool = False
        self.replicated_to: int = 0
        # Store time of the newest record; never goes back.
        self.store_ms: int = 0
        # Replay: a later store time is taken for damage, because a record's head has no checksum.
        self.plausible_to_ms: int = MS_MAX
        # Messages and bytes stored since the start.
        self.puts: int = 0
        self.put_bytes: int = 0
        # The same messages by the size of their records: a count for each bound, and one above.
        self.size_counts: memoryview = memoryview(array("q", bytes(8 * (len(SIZE_BOUNDS) + 1))))
        self._size_bounds: memoryview = memoryview(array("q", SIZE_BOUNDS))
        # Puts that were REFUSED or ILLEGAL since the start; a batch is one put.
        self.failed_puts: int = 0
        # The log offset that the flusher was last told of.
        self._flusher_told: int = 0
        # Queues written since `take_dirty`; watched queues that got a message, and files that
        # need more blocks. `MessageStore` takes the last two after each `publish`.
        self.dirty: list[ConsumeQueue] = []
        self.arrived: list[ConsumeQueue] = []
        self.to_preallocate: list[ConsumeQueue | IndexFile] = []
        # Replay: queues with entries that are not in their files yet, and the number of entries.
        self._replayed: list[ConsumeQueue] = []
        self._replayed_count: int = 0
        # Replay: per queue an entry that is accepted only if the queue's next record follows it.
        self._unconfirmed: dict[ConsumeQueue, Entry] = {}
        # Received: queues whose last record left a gap, and the queue offset that was expected.
        self._jumped: dict[ConsumeQueue, int] = {}
        # The batch being stored: its walk, the physical offsets of its messages and their number
        # (valid until the next batch), and what `_measure` counted.
        self._batch: BatchWalk = BatchWalk()
        self.batch_offsets: memoryview = memoryview(array("q", bytes(8 * 64)))
        self.batch_count: int = 0
        self._batch_messages: int = 0
        self._batch_keys: int = 0

    def put(self, record: Record, now_ms: int) -> int:
        """Store one message in the queue that it names."""
        status = self.check(record)
        if status != _PUT_OK:
            return status
        queue = self.queues.find(
            record.source, record.topic_at, record.topic_length, record.queue_id
        )
        if queue is None:
            return _NO_QUEUE
        return self.put_in(record, queue, now_ms)

    def check(self, record: Record) -> int:
        """Whether a message can be stored; afterwards `record.marks` point at its properties."""
        if self.refusal is not None:
            return self._refused(self.refusal)
        problem = record.prepare()
        if problem == 0 and record.size + layout.BLANK_BYTES > self.log.segments.segment_bytes:
            problem = TOO_LONG_FOR_SEGMENT
        if problem != 0:
            return self._illegal(problem)
        return _PUT_OK

    def put_in(self, record: Record, queue: ConsumeQueue, now_ms: int) -> int:
        """Store a message that `check` has accepted, in this queue."""
        if now_ms > self.store_ms:  # store time never goes back: searches by time rely on it
            self.store_ms = now_ms
        return self._append(record, queue)

    def put_batch(self, record: Record, now_ms: int) -> int:
        """Store the messages of a batch body one after the other, in one segment.

        Nothing is stored unless all of them can be. `queue_offset` and `offset` are the first's,
        `batch_offsets` has all; the record's body, properties and flag are overwritten.
        """
        if self.refusal is not None:
            return self._refused(self.refusal)
        queue = self.queues.find(
            record.source, record.topic_at, record.topic_length, record.queue_id
        )
        if queue is None:
            return _NO_QUEUE
        body_at = record.body_at
        body_length = record.body_length
        if body_length > record.body_bytes_max:
            return self._illegal(BODY_TOO_LONG)
        total = self._measure(record)
        if total < 0:
            return self._illegal(self.problem)
        if now_ms > self.store_ms:
            self.store_ms = now_ms
        try:
            queue.reserve(self._batch_messages)
            if self.index is not None:
                self.index.reserve(self._batch_keys, self.store_ms)
        except (StoreError, OSError) as error:
            return self._fail(error)
        try:
            if self.log.make_room(total) < 0:
                return self._refuse()
        except OSError as error:
            return self._write_failed(error)
        if self._batch_messages > len(self.batch_offsets):
            self.batch_offsets = memoryview(array("q", bytes(8 * self._batch_messages)))
        self._batch.start(body_at, body_length)
        count = 0
        first_queue_offset = queue.max_offset
        while self._batch.next(record) > 0:
            record.prepare()
            status = self._append(record, queue)
            if status != _PUT_OK:
                return status
            self.batch_offsets[count] = self.offset
            count += 1
        self.batch_count = count
        self.offset = self.batch_offsets[0]
        self.queue_offset = first_queue_offset
        return _PUT_OK

    def publish(self) -> bool:
        """Write staged records to the page cache and move the confirm offset.

        Returns whether `MessageStore.notify` has work: a watched queue got messages, or a file
        will soon need blocks.
        """
        log = self.log
        if log.written != log.end:
            try:
                log.write_staged()
            except OSError as error:
                self._write_failed(error)
        if log.written != self._flusher_told:
            self._flusher_told = log.written
            self.flusher.want(log.written)
        if not self.flusher.group_commit:
            self.confirm_offset = min(log.written, self.confirm_limit)
        elif self.flusher.failed() == 0:
            self.confirm_offset = min(self.flusher.flushed(), self.confirm_limit)
        return len(self.arrived) > 0 or len(self.to_preallocate) > 0

    def take_dirty(self) -> list[ConsumeQueue]:
        """The queues that were written since the last call; the caller syncs them."""
        dirty, self.dirty = self.dirty, []
        for queue in dirty:
            queue.dirty = False
        return dirty

    def mark_dirty(self, queue: ConsumeQueue) -> None:
        """The queue's files have changed: the next `take_dirty` returns it."""
        if not queue.dirty:
            queue.dirty = True
            self.dirty.append(queue)

    def _measure(self, record: Record) -> int:
        """The log bytes that a batch takes, or -1 with the `problem`; counts messages and keys."""
        body_at = record.body_at
        body_length = record.body_length
        total = 0
        self._batch_messages = 0
        self._batch_keys = 0
        self._batch.start(body_at, body_length)
        while True:
            more = self._batch.next(record)
            if more < 0 or (more == 0 and total == 0):
                self.problem = BATCH_BROKEN
                return -1
            if more == 0:
                break
            problem = record.prepare()
            if problem == 0 and record.marks.special & ~_SPECIAL_PRIORITY != 0:
                problem = BATCH_SPECIAL
            if problem != 0:
                self.problem = problem
                return -1
            total += record.size
            self._batch_messages += 1
            self._batch_keys += 2 + (record.marks.keys_length + 1) // 2  # unique id, tag, keys
        if total + layout.BLANK_BYTES > self.log.segments.segment_bytes:
            self.problem = TOO_LONG_FOR_SEGMENT
            return -1
        return total

    def _append(self, record: Record, queue: ConsumeQueue) -> int:
        transaction = record.sys_flag & _TRANSACTION_MASK
        queued = transaction != _PREPARED and transaction != _ROLLBACK
        queue_offset = queue.max_offset if queued else 0
        try:
            if queued:
                queue.ready()
            if self.index is not None:
                self._index_ready(self.index)
        except (StoreError, OSError) as error:
            return self._fail(error)
        try:
            offset = self.log.append(record, queue_offset, self.store_ms)
        except OSError as error:
            return self._write_failed(error)
        if offset < 0:
            return self._refuse()
        self.last_offset = offset
        self.offset = offset
        self.queue_offset = queue_offset
        if queued:
            self._add_entry(queue, offset, record.size, record.tags_code)
        if self.index is not None and transaction != _ROLLBACK:
            try:
                self._put_keys(record.marks, queue, offset)
            except (StoreError, OSError) as error:  # more keys than were reserved
                self.refusal = error
        self._count(queue, record.size)
        return _PUT_OK

    def _add_entry(self, queue: ConsumeQueue, offset: int, size: int, tags_code: int) -> None:
        """Append the entry of a record to its queue."""
        if queue.delay_ms < 0:
            queue.append(offset, size, tags_code)
        else:
            queue.append(offset, size, self.store_ms + queue.delay_ms)
        if not queue.dirty:
            queue.dirty = True
            self.dirty.append(queue)
        if queue.watched:
            queue.watched = False
            self.arrived.append(queue)
        if queue.needs_blocks:
            queue.needs_blocks = False
            self.to_preallocate.append(queue)

    def _count(self, queue: ConsumeQueue, size: int) -> None:
        self.puts += 1
        self.put_bytes += size
        queue.puts += 1
        queue.put_bytes += size
        bucket = 0
        while bucket < _SIZE_BUCKETS and size > self._size_bounds[bucket]:
            bucket += 1
        self.size_counts[bucket] += 1

    def dispatch(self, stored: StoredRecord) -> int:
        """Dispatch a record that was received from the master and is in the log.

        Returns PUT_OK; NO_QUEUE if the queue does not exist yet; or REFUSED with the `fault`, and
        then nothing was dispatched.
        """
        queue = self.queues.find(
            stored.buffer, stored.topic_at, stored.topic_length, stored.queue_id
        )
        if queue is None:
            return _NO_QUEUE
        transaction = stored.sys_flag & _TRANSACTION_MASK
        queued = transaction != _PREPARED and transaction != _ROLLBACK
        stored.scan()
        try:
            if queued:
                if stored.queue_offset != queue.max_offset:
                    queued = self._continue_at(queue, stored.queue_offset)
                elif self._jumped:
                    self._jumped.pop(queue, None)
                queue.ready()
            if self.index is not None:
                self._index_ready(self.index)
        except (StoreError, OSError) as error:
            return self._refused(error)
        self.note_store_ms(stored.store_ms)
        self.last_offset = stored.physical_offset
        if queued:
            self._add_entry(queue, stored.physical_offset, stored.size, stored.marks.tags_code())
        if self.index is not None and transaction != _ROLLBACK:
            try:
                self._put_keys(stored.marks, queue, stored.physical_offset)
            except (StoreError, OSError) as error:  # more keys than were reserved
                return self._refused(error)
        self._count(queue, stored.size)
        return _PUT_OK

    def _continue_at(self, queue: ConsumeQueue, offset: int) -> bool:
        """A received record does not continue its queue. Returns whether it gets an entry.

        Zero: the topic was deleted and created again at the master. Higher: the queue is empty
        because the slave's log begins later, or messages between were lost to damage.

        A record's head has no checksum, so an offset may itself be damaged. As in a replay, a gap
        has a limit, and the queue's next record confirms it: if it continues what was before the
        gap, the gap and its record's entry are removed.
        """
        before = self._jumped.pop(queue, NO_JUMP)
        gap = offset - queue.max_offset
        if before == offset - 1 or (before == FROM_EMPTY and not 0 < gap <= self._gap_max(queue)):
            queue.cut(max(before, 0))
            if before == FROM_EMPTY:
                queue.min_offset = queue.hot_from = 0
            self.unplaced += 1
            gap = offset - queue.max_offset
        if offset == 0:
            queue.cut(0)
            queue.min_offset = queue.max_offset = queue.hot_from = 0
        elif queue.max_offset == queue.min_offset and 0 < offset < QUEUE_OFFSET_MAX:
            queue.begin_at(offset)
            self._jumped[queue] = FROM_EMPTY
        elif 0 < gap <= self._gap_max(queue):
            if before != offset - 1:
                self._jumped[queue] = queue.max_offset
            self.fill(queue, offset)
        else:
            self.unplaced += 1
            return False
        return True

    def _write_failed(self, error: OSError) -> int:
        """Records can't be written to the page cache.

        On a full disk they stay staged until there is space: none has been acknowledged. After
        any other error no acknowledgement is safe any more.
        """
        if is_full(error):
            return self._fail(DiskFull(f"no space to write {self.log.segments.folder}"))
        self.refusal = WriteStopped(f"writing {self.log.segments.folder} failed: {error}")
        return self._refused(self.refusal)

    def _fail(self, error: Exception) -> int:
        """One queue's files failed, which refuses this put; a full disk refuses all."""
        if isinstance(error, DiskFull) and not isinstance(self.refusal, NotMaster):
            self.refusal = error  # it ends when there is space, which NotMaster does not
        return self._refused(error)

    def _refuse(self) -> int:
        self.refusal = self.log.refusal
        return self._refused(self.log.refusal)

    def _refused(self, fault: Exception | None) -> int:
        self.failed_puts += 1
        self.fault = fault
        return _REFUSED

    def _illegal(self, problem: int) -> int:
        self.failed_puts += 1
        self.problem = problem
        return _ILLEGAL

    def _index_ready(self, index: Index) -> None:
        """Ensure that an index file has space, so that a full disk is noticed before the append."""
        current = index.current
        if current is None or current.is_full():
            current = index.add(self.store_ms)
        current.ready()
        if current.needs_blocks:
            current.needs_blocks = False
            self.to_preallocate.append(current)

    def _put_keys(self, marks: PropertyMarks, queue: ConsumeQueue, offset: int) -> None:
        if marks.unique_length > 0:
            self._put_key(marks, marks.unique_at, marks.unique_length, queue.key_seed, offset)
        if self.index_tags and marks.tags_length > 0:
            self._put_key(marks, marks.tags_at, marks.tags_length, queue.tag_seed, offset)
        if marks.keys_length > 0:
            seed = queue.key_seed
            at = marks.keys_at
            end = at + marks.keys_length
            start = at
            while at <= end:
                if at == end or marks.buffer[at] == _SPACE:
                    if at > start:
                        self._put_key(marks, start, at - start, seed, offset)
                    start = at + 1
                at += 1

    def _put_key(self, marks: PropertyMarks, at: int, length: int, seed: int, offset: int) -> None:
        key_hash = marks.hash(at, length, seed)
        if key_hash < 0:
            key_hash = 0 if key_hash == -0x80000000 else -key_hash
        self.index.put(key_hash, offset, self.store_ms)  # type: ignore[union-attr]

    def replay(self, stored: StoredRecord) -> int:
        """Dispatch a record that is in the log. Returns PUT_OK or NO_QUEUE."""
        queue = self.queues.find(
            stored.buffer, stored.topic_at, stored.topic_length, stored.queue_id
        )
        if queue is None:
            return _NO_QUEUE
        transaction = stored.sys_flag & _TRANSACTION_MASK
        stored.scan()
        if transaction != _PREPARED and transaction != _ROLLBACK and not queue.complete:
            code = stored.marks.tags_code()
            if queue.delay_ms >= 0:
                code = self._plausible_ms(stored.store_ms) + queue.delay_ms
            if stored.queue_offset != queue.max_offset:
                entry = (stored.queue_offset, stored.physical_offset, stored.size, code)
                write_replayed(queue)
                self._replay_elsewhere(queue, entry)
            else:
                if queue.replayed is None:
                    self._replayed.append(queue)
                queue.add_replayed(stored.physical_offset, stored.size, code)
                self._replayed_count += 1
                if self._unconfirmed and queue in self._unconfirmed:
                    del self._unconfirmed[queue]
                    self.unplaced += 1
            if not queue.dirty:
                queue.dirty = True
                self.dirty.append(queue)
        if self._replayed_count >= _REPLAYED_MAX:
            self.write_replayed()
        self.note_store_ms(stored.store_ms)
        # An index file begins with a time: a first record whose own is damaged is left out.
        if self.index is not None and transaction != _ROLLBACK and self.store_ms > 0:
            self._put_keys(stored.marks, queue, stored.physical_offset)
        return _PUT_OK

    def note_store_ms(self, store_ms: int) -> None:
        """A record of the log was stored at this time."""
        self.store_ms = max(self.store_ms, self._plausible_ms(store_ms))

    def _plausible_ms(self, store_ms: int) -> int:
        """This store time, or the one of the record before it."""
        return store_ms if store_ms <= self.plausible_to_ms else self.store_ms

    def write_replayed(self) -> None:
        """Write the replayed entries to the queues' files, one queue after another."""
        queues, self._replayed = self._replayed, []
        self._replayed_count = 0
        for queue in queues:
            write_replayed(queue)

    def _replay_elsewhere(self, queue: ConsumeQueue, entry: Entry) -> None:
        """A record whose queue offset is not the queue's next one.

        Zero: the topic was deleted and created again, so the queue starts over. Higher: the entries
        before it were deleted with their segments, or are unknown. As a record's head has no
        checksum, either is accepted only if the queue's next record continues from there, or none
        follows. Any other offset is damage: the record gets no entry.
        """
        offset = entry[0]
        unconfirmed = self._unconfirmed.pop(queue, None)
        empty = queue.max_offset == queue.min_offset
        if unconfirmed is not None and unconfirmed[0] + 1 == offset:
            self._place(queue, unconfirmed)
            queue.append(entry[1], entry[2], entry[3])
            return
        furthest = QUEUE_OFFSET_MAX if empty else self._gap_max(queue)
        if unconfirmed is not None and self._successor_lost(unconfirmed, offset):
            self._place(queue, unconfirmed)
            unconfirmed = None
        if offset == 0 or 0 < offset - queue.max_offset <= furthest:
            self._unconfirmed[queue] = entry
        else:
            self.unplaced += 1
        if unconfirmed is not None:
            self.unplaced += 1

    def _successor_lost(self, entry: Entry, offset: int) -> bool:
        """Whether damage explains that an entry is followed by this queue offset."""
        return offset > entry[0] + 1 and self.damage.explains(entry[1])

    def _gap_max(self, queue: ConsumeQueue) -> int:
        """The longest plausible gap in entries."""
        return max(queue.file_entries, self.damage.bytes_met // layout.FIXED_BYTES)

    def fill(self, queue: ConsumeQueue, offset: int) -> None:
        """Fillers up to this queue offset, for messages that were lost to damage."""
        write_replayed(queue)
        begin = queue.max_offset
        last = queue.entry(last_real(queue, begin))
        queue.fill_to(offset, last[0] + 1 if last is not None else 0)
        self.mark_dirty(queue)
        self.damage.add_lost(queue.topic, queue.queue_id, begin, offset)

    def end_replay(self) -> None:
        """No more records follow: entries without a successor are accepted."""
        self.write_replayed()
        unconfirmed, self._unconfirmed = self._unconfirmed, {}
        for queue, entry in unconfirmed.items():
            self._place(queue, entry)

    def _place(self, queue: ConsumeQueue, entry: Entry) -> None:
        """Start a queue over, or continue it behind a gap; fillers stand for unknown entries."""
        if entry[0] == 0:
            queue.cut(0)
        if queue.max_offset == queue.min_offset:
            if entry[0] != 0:
                self.gaps += 1
            queue.begin_at(entry[0])
        else:
            before = queue.entry(last_real(queue, queue.max_offset))
            if before is None or not (
                self.damage.explains(before[0]) or has_fillers(queue, entry[0], before[0] + 1)
            ):
                self.gaps += 1
            self.fill(queue, entry[0])
        queue.append(entry[1], entry[2], entry[3])
