"""The queues of transactions in the store: half messages and op messages.

| Topic | Holds |
|---|---|
| RMQ_SYS_TRANS_HALF_TOPIC | half messages, appended again when checks are counted |
| RMQ_SYS_TRANS_OP_HALF_TOPIC | the queue offsets of appends that are resolved or outdated |

An op message has the tag `d` and a body of queue offsets, `12,13,`. It follows directly after the
committed message. If it could not be stored, its offsets are written first in the body of the next
op message. So everything before an op message of this broker has its own op message.

The progress in both queues is stored as consumer offsets of the group CID_RMQ_SYS_TRANS, as
Apache's brokers do. It never runs ahead of what has been flushed.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import ClassVar, Final, NamedTuple

from penstock.broker.context import BrokerContext
from penstock.broker.transaction.half_messages import (
    UNKNOWN_OFFSET,
    HalfMessage,
    HalfRecord,
    OpenHalfMessages,
    properties_fit,
    read_half,
)
from penstock.errors import PenstockError, StoreDamaged
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.get import COLD, FOUND, OFFSET_OVERFLOW_BADLY, OFFSET_OVERFLOW_ONE
from penstock.store.put import ILLEGAL, PUT_OK
from penstock.store.tables.config_tables import ConfigFile
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import Body, DataVersion
from penstock.wire.codes import (
    GROUP_SYS_TRANS,
    PROPERTY_TAGS,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET,
    TOPIC_TRANS_HALF,
    TOPIC_TRANS_OP_HALF,
)
from penstock.wire.message import encode_properties, split_records
from penstock.wire.output import Output
from penstock.wire.record import Record

log = logging.getLogger(__name__)

HALF_TOPIC: Final = TOPIC_TRANS_HALF.encode()
OP_TOPIC: Final = TOPIC_TRANS_OP_HALF.encode()
OP_TAG: Final = "d"
_OP_PROPERTIES: Final = encode_properties({PROPERTY_TAGS: OP_TAG})

OP_BYTES_MAX: Final = 4096
"""Longest body of an op message, as in RocketMQ."""
FOLLOW_MAX: Final = 256
FOLLOW_BYTES_MAX: Final = 1024 * 1024
"""Half messages that one tick reads."""
POLL_MS: Final = 5
"""Interval at which a read in the thread pool is polled."""
RETRY_MS: Final = 100
"""Pause after a failed read or a write that the store refused."""
OP_POSITIONS_MAX: Final = 1024
"""Pairs of positions that are kept to map half messages to their op messages."""
NEVER: Final = 1 << 62

_OFFSET_DIGITS_MAX: Final = 18


class TransactionsFile(Body):
    """Content of config/penstock-transactions.json."""

    data_version: DataVersion = DataVersion()
    searched_to: int = 0


class TransactionTable:
    """The log offset below which every committed message has its op message.

    The next start searches only the log beyond it.
    """

    FILE: ClassVar[str] = "config/penstock-transactions.json"

    def __init__(self) -> None:
        self.dirty = False
        self._content = TransactionsFile()

    @property
    def searched_to(self) -> int:
        return self._content.searched_to

    def load(self, file: ConfigFile) -> None:
        """Load the file. A damaged one only makes the search longer."""
        try:
            found = file.load(lambda data: fastjson.decode(data, TransactionsFile))
        except StoreDamaged as error:
            log.warning("%s: searching the log from the first open half message on", error)
            return
        if found is not None:
            self._content = found

    def update(self, searched_to: int, now_ms: int) -> None:
        version = self._content.data_version.next(now_ms)
        self._content = TransactionsFile(data_version=version, searched_to=searched_to)
        self.dirty = True

    def reset(self) -> None:
        """Drop the position: it refers to a log that no longer exists."""
        self._content = TransactionsFile(data_version=self._content.data_version)
        self.dirty = True

    def snapshot(self) -> bytes:
        self.dirty = False
        return fastjson.encode_pretty(self._content)


class HalfBatch(NamedTuple):
    """Records of half messages from `begin` to `end` of the queue."""

    begin: int
    end: int
    records: list[bytes]


class HalfProgress(NamedTuple):
    """Progress that is stored as soon as the log has been flushed up to `log_end`."""

    half: int
    op: int
    log_end: int


class HalfQueues:
    """Reads and writes the queues of half messages and op messages."""

    def __init__(
        self, context: BrokerContext, half_messages: OpenHalfMessages, host: bytes
    ) -> None:
        self._context = context
        self._store = context.store
        self._half_messages = half_messages
        self._host = host
        self._record = Record()
        self.table = TransactionTable()
        self.table.load(context.persistence.file(self.table.FILE))
        self.pending_ops: list[int] = []
        """Queue offsets that the next op message will name."""
        self.ops_refused = False
        self.followed_to = self._store.log.end
        """Every half message below this log offset has been followed."""
        self._reading: Future[HalfBatch | None] | None = None
        self._unflushed_progress: HalfProgress | None = None
        self._op_positions: deque[tuple[int, int]] = deque()
        """Ascending pairs (half, op): op messages before `op` name only appends before `half`."""

    @property
    def queue(self) -> ConsumeQueue | None:
        """The queue of half messages, if there is one."""
        return self._store.queues.get(HALF_TOPIC, 0)

    def make_queue(self) -> ConsumeQueue:
        queue = self._store.make_queue(HALF_TOPIC, 0)
        assert queue is not None
        return queue

    # --- op messages

    def mark_done(self, appends: Iterable[int], now_ms: int) -> None:
        """Write an op message for these appends; if the store refuses, it is written later."""
        self.pending_ops += appends
        self.write_ops(now_ms)

    def resolve(self, half: HalfMessage, outcome: int, now_ms: int) -> None:
        """Resolve a half message in the table and by an op message."""
        self._half_messages.resolve(half, outcome)
        self.mark_done(offsets_to_resolve(half), now_ms)

    def write_ops(self, now_ms: int) -> None:
        """Write the pending op messages."""
        while self.pending_ops:
            body, count = b"", 0
            while count < len(self.pending_ops) and len(body) < OP_BYTES_MAX:
                body += b"%d," % self.pending_ops[count]
                count += 1
            if not self._put_op(body, now_ms):
                return
            del self.pending_ops[:count]

    def _put_op(self, body: bytes, now_ms: int) -> bool:
        queue = self._store.make_queue(OP_TOPIC, 0)
        assert queue is not None
        record, writer = self._record, self._store.writer
        record.fill(OP_TOPIC, body, _OP_PROPERTIES)
        record.born_ms = now_ms
        record.born_host = record.store_host = self._host
        status = writer.check(record)
        if status == PUT_OK:
            status = writer.put_in(record, queue, now_ms)
        record.release()
        if status != PUT_OK and not self.ops_refused:
            log.error("can't store op messages, will retry: %s", writer.fault)
        self.ops_refused = status != PUT_OK
        return not self.ops_refused

    # --- half messages

    def append_again(self, half: HalfMessage, data: bytes, now_ms: int) -> int:
        """Append a half message again with its number of checks; returns a status of `store.put`.

        An op message marks the previous append as outdated.
        """
        rewriter = self._context.rewriter
        rewriter.read(data)
        properties = rewriter.properties()
        properties[PROPERTY_TRANSACTION_CHECK_TIMES] = str(half.checks)
        properties[PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET] = str(half.first_offset)
        if not properties_fit(properties):
            return ILLEGAL
        status = rewriter.put(
            self.make_queue(),
            now_ms,
            properties=properties,
            prepared_offset=max(half.first_log_offset, 0),
            store_host=self._host,
        )
        if status == PUT_OK:
            writer, before = self._store.writer, half.queue_offset
            size = self._store.log.end - writer.offset
            self._half_messages.move(half, writer.queue_offset, writer.offset, size)
            half.stored_checks = half.checks
            # At 0, the op message would look like the resolution of the first append.
            if half.first_log_offset > 0:
                self.mark_done((before,), now_ms)
        return status

    def find_first_log_offset(self, record: HalfRecord) -> int:
        """Log offset of a half message's first append.

        Records of other brokers do not name it; then this may wait for the disk.
        """
        if record.first_offset == record.queue_offset:
            return record.log_offset
        if 0 < record.prepared_offset < record.log_offset:
            return record.prepared_offset
        queue = self.queue
        entry = queue.entry(record.first_offset) if queue is not None else None
        return entry[0] if entry is not None else UNKNOWN_OFFSET

    # --- following the queue

    def follow(self, now_ms: int, add: Callable[[HalfRecord], object]) -> int:
        """Add the half messages that were stored since; returns when to continue."""
        queue = self.queue
        if queue is None:
            return NEVER
        left = FOLLOW_MAX
        while left > 0:
            batch = self._next_batch(queue)
            if batch is None:
                return NEVER if self._reading is None else now_ms + POLL_MS
            if batch.end == batch.begin:
                return now_ms + RETRY_MS
            left -= self._add_batch(batch, add)
        return now_ms

    def _next_batch(self, queue: ConsumeQueue) -> HalfBatch | None:
        """The next half messages; None if there are no more, or if a read is in flight."""
        half_messages, confirm_offset = self._half_messages, self._store.confirm_offset
        if self._reading is None:
            end = queue.visible_max(confirm_offset)
            self._skip_known(max(half_messages.position, queue.min_offset), end)
            if half_messages.position >= end:
                self.followed_to = confirm_offset
                half_messages.forget_outcomes()
                return None
            begin, end = half_messages.position, self._unknown_to(half_messages.position, end)
            try:
                batch = self.read(begin, end, confirm_offset)
            except PenstockError as error:
                log.error("can't read half messages: %s", error)
                return HalfBatch(begin, begin, [])
            if batch is not None:
                return batch
            self._reading = self._store.disk.submit(
                lambda: self.read(begin, end, confirm_offset, wait=True)
            )
        if not self._reading.done():
            return None
        done, self._reading = self._reading, None
        error_or_none = done.exception()
        if error_or_none is not None:
            log.error("can't read half messages: %s", error_or_none)
            return HalfBatch(half_messages.position, half_messages.position, [])
        return done.result()

    def _skip_known(self, position: int, end: int) -> None:
        """Advance past the entries that are known without reading them."""
        half_messages = self._half_messages
        half_messages.position = position
        while half_messages.position < end and half_messages.is_known(half_messages.position):
            half_messages.advance_past(half_messages.position)

    def _unknown_to(self, begin: int, end: int) -> int:
        """The end of the run of unknown entries that starts here."""
        end = min(end, begin + FOLLOW_MAX)
        for queue_offset in range(begin + 1, end):
            if self._half_messages.is_known(queue_offset):
                return queue_offset
        return end

    def _add_batch(self, batch: HalfBatch, add: Callable[[HalfRecord], object]) -> int:
        half_messages = self._half_messages
        for data in batch.records:
            record = read_half(data)
            # An entry without a record was deleted with its segment.
            if record is not None and half_messages.position <= record.queue_offset < batch.end:
                self._advance_to(record.queue_offset)
                if not half_messages.is_known(record.queue_offset):
                    add(record)
                half_messages.advance_past(record.queue_offset)
        self._advance_to(batch.end)
        return max(len(batch.records), 1)

    def _advance_to(self, end: int) -> None:
        half_messages = self._half_messages
        while half_messages.position < end:
            half_messages.advance_past(half_messages.position)

    def read(
        self, begin: int, end: int, confirm_offset: int, *, wait: bool = False
    ) -> HalfBatch | None:
        """Records of half messages from an entry on; None if it needs the disk and may not wait.

        Changes no state, so it may run in the thread pool.
        """
        queue = self.queue
        assert queue is not None
        reader = self._store.new_reader()
        status = reader.find(queue, begin, end - begin, FOLLOW_BYTES_MAX, confirm_offset, wait)
        if status == COLD:
            return None
        if status in (OFFSET_OVERFLOW_ONE, OFFSET_OVERFLOW_BADLY):  # not visible yet
            return HalfBatch(begin, begin, [])
        following = min(max(reader.next_offset, begin + 1), end)
        output = Output(1024)
        if status == FOUND and not reader.copy_to(output, wait):
            if not wait:
                return None
            if following > begin + 1:  # perhaps only one of the records is gone
                return self.read(begin, begin + 1, confirm_offset, wait=True)
        return HalfBatch(begin, following, list(split_records(output.take())))

    # --- progress

    def begin_progress(self, half: int, op: int) -> None:
        """Set the positions that the last run of the broker stored."""
        self._op_positions.append((half, op))

    def save_progress(self, now_ms: int) -> None:
        """Store the progress in both queues, as far as the log has been flushed."""
        self._track_op_position()
        progress, store, offsets = self._unflushed_progress, self._store, self._context.offsets
        if progress is not None and progress.log_end <= store.flusher.flushed():
            reached = ((TOPIC_TRANS_HALF, progress.half), (TOPIC_TRANS_OP_HALF, progress.op))
            for topic, offset in reached:
                if offset != (offsets.get(GROUP_SYS_TRANS, topic, 0) or 0):
                    offsets.table.commit(topic, GROUP_SYS_TRANS, 0, offset, now_ms)
            # Without open half messages the next start searches nothing.
            if self._half_messages.open and progress.log_end > self.table.searched_to:
                self.table.update(progress.log_end, now_ms)
            self._unflushed_progress = None
        if self._unflushed_progress is None and not self.pending_ops:
            half, op = self._done_to()
            self._unflushed_progress = HalfProgress(half, op, store.log.end)

    def done_to(self) -> int:
        """Queue offset of the oldest append that is still needed."""
        oldest = self._half_messages.oldest()
        return self._half_messages.position if oldest is None else oldest.queue_offset

    def _done_to(self) -> tuple[int, int]:
        half, positions = self.done_to(), self._op_positions
        while len(positions) > 1 and positions[1][0] <= half:
            positions.popleft()
        return half, (positions[0][1] if positions and positions[0][0] <= half else 0)

    def _track_op_position(self) -> None:
        queue, ops, positions = self.queue, self._store.queues.get(OP_TOPIC, 0), self._op_positions
        if queue is None or ops is None:
            return
        position = (queue.max_offset, ops.max_offset)
        if not positions or position != positions[-1]:
            if positions and position[0] == positions[-1][0] and len(positions) > 1:
                positions.pop()
            positions.append(position)
        if len(positions) > OP_POSITIONS_MAX:
            self._op_positions = deque(list(positions)[::2])


def offsets_to_resolve(half: HalfMessage) -> tuple[int, ...]:
    """The appends that the op message of a resolved half message has to name: the newest one, and
    the first one if its log offset is unknown."""
    if half.first_offset != half.queue_offset and half.first_log_offset <= 0:
        return (half.first_offset, half.queue_offset)
    return (half.queue_offset,)


def decode_op_body(body: bytes) -> list[int]:
    """The queue offsets in the body of an op message."""
    return [
        int(text) for text in body.split(b",") if text.isdigit() and len(text) <= _OFFSET_DIGITS_MAX
    ]
