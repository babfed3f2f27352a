"""Recovery of the open half messages when a store is opened.

A half message is open unless an op message names its newest append, or unless the log holds the
message that was committed from it (found by its prepared offset): a broker may have died between
the two. The log is searched only from the offset on up to which all op messages are known to be
written. In a store that another broker wrote it is searched from the oldest open half message on,
because Apache's brokers write op messages in batches, up to seconds later.

Recovery waits for the disk.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from penstock.broker.context import BrokerContext
from penstock.broker.transaction.half_messages import (
    COMMITTED,
    ROLLED_BACK,
    UNKNOWN_OFFSET,
    HalfMessage,
    HalfRecord,
    OpenHalfMessages,
    read_half,
)
from penstock.broker.transaction.half_queues import (
    HALF_TOPIC,
    OP_TAG,
    OP_TOPIC,
    HalfQueues,
    decode_op_body,
    offsets_to_resolve,
)
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.get import FOUND
from penstock.store.recovery.damage import part_of, search
from penstock.store.store import MessageStore
from penstock.wire import layout, octets
from penstock.wire.codes import (
    GROUP_SYS_TRANS,
    PROPERTY_CHECK_IMMUNITY_SECONDS,
    PROPERTY_TAGS,
    SYS_TRANSACTION_COMMIT,
    SYS_TRANSACTION_MASK,
    TOPIC_TRANS_CHECK_MAX_TIME,
    TOPIC_TRANS_HALF,
    TOPIC_TRANS_OP_HALF,
)
from penstock.wire.message import decode_properties, split_records
from penstock.wire.output import Output
from penstock.wire.record import RECORD, StoredRecord

log = logging.getLogger(__name__)

READ_COUNT: Final = 1024
READ_BYTES: Final = 1024 * 1024
_DISCARD_TOPIC: Final = TOPIC_TRANS_CHECK_MAX_TIME.encode()


class HalfRecovery:
    """Fills the table of open half messages from the store."""

    def __init__(
        self,
        context: BrokerContext,
        half_messages: OpenHalfMessages,
        queues: HalfQueues,
        schedule: Callable[[HalfMessage, HalfRecord], None],
    ) -> None:
        self._context = context
        self._schedule = schedule
        self._store = context.store
        self._half_messages = half_messages
        self._queues = queues
        self._keys: dict[str, HalfMessage] = {}  # the newest one of each unique id
        self._key_of: dict[HalfMessage, str] = {}
        self._resolved_offsets: set[int] = set()

    def run(self) -> None:
        """Read half messages and op messages, then search the log for committed messages."""
        queue, ops = self._store.queues.get(HALF_TOPIC, 0), self._store.queues.get(OP_TOPIC, 0)
        start_offset = self._start_offset(TOPIC_TRANS_HALF, queue)
        op_start_offset = self._start_offset(TOPIC_TRANS_OP_HALF, ops)
        self._queues.begin_progress(start_offset, op_start_offset)
        self._half_messages.position = start_offset
        if queue is None:
            return
        if ops is not None:
            for data in self._read_records(ops, op_start_offset):
                self._read_op(data)
        self._read_half_messages(queue, start_offset)
        ended = self._find_committed() if self._half_messages.open else 0
        if self._half_messages.open or ended:
            log.info(
                "%d half messages are open; %d were committed without an op message",
                len(self._half_messages.open),
                ended,
            )

    def _start_offset(self, topic: str, queue: ConsumeQueue | None) -> int:
        """The stored progress, limited to what the queue holds."""
        if queue is None:
            return 0
        wanted = self._context.offsets.get(GROUP_SYS_TRANS, topic, 0)
        if wanted is None:
            return queue.min_offset
        start_offset = min(max(wanted, queue.min_offset), queue.max_offset)
        if start_offset < wanted:
            log.warning(
                "%s continues at offset %d: it does not hold the stored offset %d",
                topic,
                start_offset,
                wanted,
            )
        return start_offset

    def _read_records(self, queue: ConsumeQueue, offset: int) -> Iterator[bytes]:
        confirm_offset, end = self._store.confirm_offset, queue.max_offset
        reader, count = self._store.new_reader(), READ_COUNT
        while offset < end:
            status = reader.find(queue, offset, count, READ_BYTES, confirm_offset, True)
            output = Output(1024)
            following = max(reader.next_offset, offset + 1)
            if status == FOUND:
                if reader.copy_to(output, True):
                    yield from split_records(output.take())
                elif count > 1:  # perhaps only one of the records is gone
                    count = 1
                    continue
            offset, count = following, READ_COUNT

    def _read_op(self, data: bytes) -> None:
        stored = _read(data)
        if stored is None:
            return
        text = data[stored.properties_at : stored.properties_at + stored.properties_length]
        if decode_properties(text).get(PROPERTY_TAGS) == OP_TAG:
            body = data[stored.body_at : stored.body_at + stored.body_length]
            self._resolved_offsets.update(decode_op_body(body))

    def _read_half_messages(self, queue: ConsumeQueue, start_offset: int) -> None:
        store, half_messages = self._store, self._half_messages
        for offset in range(start_offset, queue.max_offset):
            if offset not in self._resolved_offsets:
                entry = queue.entry(offset)
                data = store.lookup.record(entry[0], store.confirm_offset) if entry else None
                record = read_half(data) if data is not None else None
                if record is not None:
                    self._add(record)
            half_messages.advance_past(offset)

    def _add(self, record: HalfRecord) -> None:
        older, again = None, record.first_offset != record.queue_offset
        if again and record.prepared_offset == 0 and record.first_offset in self._resolved_offsets:
            return  # appended again by Apache's broker as immune, and resolved by its first append
        if record.checks > 0 and not again and record.key:
            # Apache's brokers do not name the first append.
            older = self._keys.get(record.key)
            if older is not None and older.group.name != record.group:
                older = None
        known = older or self._half_messages.find(record.first_offset)
        before = known.queue_offset if known is not None else UNKNOWN_OFFSET
        half = self._half_messages.add(record, self._queues.find_first_log_offset(record), older)
        if half is not None:
            if half is known and before not in offsets_to_resolve(half):
                # Its op message is lost: without it the next start might take this append as open.
                self._queues.pending_ops.append(before)
            self._keys[record.key] = half
            self._key_of[half] = record.key
            half.checks = half.stored_checks = self._checks_made(half, record)
            self._schedule(half, record)

    def _checks_made(self, half: HalfMessage, record: HalfRecord) -> int:
        """The number of checks that reached a producer, as far as the record tells.

        Apache's brokers also count when they find a half message immune, and their limit is higher.
        So this broker checks at least once before it discards a half message.
        """
        settings = self._context.settings.current
        immune = PROPERTY_CHECK_IMMUNITY_SECONDS in record.properties
        if immune and record.store_ms < half.first_store_ms + record.immunity_ms(settings):
            return 0
        return min(half.checks, settings.broker.transaction_checks_max - 1)

    # --- committed messages without an op message

    def _find_committed(self) -> int:
        """Resolve the half messages whose outcome is in the log; returns their number."""
        store = self._store
        by_log_offset: dict[int, HalfMessage] = {}
        for half in self._half_messages.open.values():
            by_log_offset[half.log_offset] = half
            if half.first_log_offset != UNKNOWN_OFFSET:
                by_log_offset[half.first_log_offset] = half
        start_offset, table = max(min(by_log_offset), store.log.begin()), self._queues.table
        if table.searched_to > store.log.end:
            table.reset()
        start_offset = max(start_offset, table.searched_to)
        ended = 0
        for stored in walk_log(store, start_offset):
            outcome = _outcome(stored)
            if outcome is None:
                continue
            half_or_none = self._find_half(stored, by_log_offset)
            if half_or_none is not None and half_or_none.queue_offset in self._half_messages.open:
                self._half_messages.resolve(half_or_none, outcome)
                self._queues.pending_ops += offsets_to_resolve(half_or_none)
                ended += 1
        return ended

    def _find_half(
        self, stored: StoredRecord, by_log_offset: dict[int, HalfMessage]
    ) -> HalfMessage | None:
        """The half message that a message was committed from."""
        stored.scan()
        at, length = stored.marks.unique_at, stored.marks.unique_length
        key = bytes(stored.buffer[at : at + length]).decode("utf-8", "replace") if length else ""
        half = by_log_offset.get(stored.prepared_offset)
        # A delayed message loses its prepared offset, so 0 identifies no half message.
        if half is not None and self._key_of.get(half) == key:
            return half
        half = self._keys.get(key)
        return half if half is not None and half.key else None


def walk_log(
    store: MessageStore, offset: int, marks: Sequence[bytes] = ()
) -> Iterator[StoredRecord]:
    """The records of the log from `offset` on; each is valid until the next one is yielded.

    With `marks`, only those that contain one of these texts: several times as fast. Damaged parts
    are skipped.
    """
    stored, row, end = StoredRecord(), store.log.segments, store.confirm_offset
    least = READ_BYTES
    while offset < end:
        segment = row.find(offset)
        if segment is None:
            return
        room = segment.start + segment.size - offset
        data = segment.disk.read_at(segment.fd, min(least, room), offset - segment.start)
        stored.bind(memoryview(bytearray(data or b"\0")))
        at, mark_at = 0, _find_mark(data, 0, marks)
        while offset + at < end and stored.read(at, len(data)) == RECORD:
            at += stored.size
            if at > mark_at:
                yield stored
                mark_at = _find_mark(data, at, marks)
        offset, room, left = offset + at, room - at, len(data) - at
        if left < layout.BLANK_BYTES:
            if room < layout.BLANK_BYTES:
                offset += room
            elif at == 0:
                return
            continue
        size = octets.get_i32(data, at + layout.SIZE_AT)
        if octets.get_i32(data, at + layout.MAGIC_AT) == layout.MAGIC_BLANK:
            offset += room
        elif left < size <= room:  # the read ended within this record
            least = max(size, READ_BYTES)
        else:
            at = offset + 1 - segment.start
            found = search(part_of(segment), at, segment.size, blanks=True)
            offset = segment.start + segment.size if found is None else found


def _find_mark(data: bytes, at: int, marks: Sequence[bytes]) -> int:
    """Where the next of the texts begins; without texts here, with none of them the end."""
    if not marks:
        return at
    found = [place for mark in marks if (place := data.find(mark, at)) >= 0]
    return min(found, default=len(data))


def _read(data: bytes) -> StoredRecord | None:
    stored = StoredRecord()
    stored.bind(memoryview(bytearray(data or b"\0")))
    return stored if stored.read(0, len(data)) == RECORD else None


def _outcome(stored: StoredRecord) -> int | None:
    if stored.sys_flag & SYS_TRANSACTION_MASK == SYS_TRANSACTION_COMMIT:
        return COMMITTED
    if stored.topic_length != len(_DISCARD_TOPIC):
        return None
    topic = bytes(stored.buffer[stored.topic_at : stored.topic_at + stored.topic_length])
    return ROLLED_BACK if topic == _DISCARD_TOPIC else None
