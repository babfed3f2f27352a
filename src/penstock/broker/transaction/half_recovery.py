"""The open halves of a store that was just opened: from its halves, its op messages, and the log.

A half is open unless an op message names its newest append, or a message lies in the log that was
committed from it (its prepared offset is the half's): between the two a broker may have died. The
log is searched only where that can be, from the place on up to which all op messages are known to
be written; of a store that another broker wrote, from its first open half on. Apache's brokers
write op messages up to seconds later, many at once.

This waits for the disk.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Final

from penstock.broker.context import BrokerContext
from penstock.broker.transaction.half_messages import (
    COMMITTED,
    NOWHERE,
    ROLLED_BACK,
    Half,
    HalfRecord,
    Halves,
    read_half,
)
from penstock.broker.transaction.half_queues import DONE_TAG, HALF, OP, HalfLog, done_by, needed_of
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.get import FOUND
from penstock.store.store import MessageStore
from penstock.wire import octets
from penstock.wire.codes import (
    GROUP_SYS_TRANS,
    PROPERTY_TAGS,
    SYS_TRANSACTION_COMMIT,
    SYS_TRANSACTION_MASK,
    TOPIC_TRANS_CHECK_MAX_TIME,
    TOPIC_TRANS_HALF,
    TOPIC_TRANS_OP_HALF,
)
from penstock.wire.message import decode_properties, split_records
from penstock.wire.output import Output
from penstock.wire.record import BLANK_BYTES, MAGIC_BLANK, RECORD, StoredRecord

log = logging.getLogger(__name__)

READ_COUNT: Final = 1024
READ_BYTES: Final = 1024 * 1024
_PARKED: Final = TOPIC_TRANS_CHECK_MAX_TIME.encode()


class HalfScan:
    """One recovery of the open halves."""

    def __init__(
        self,
        context: BrokerContext,
        halves: Halves,
        half_log: HalfLog,
        schedule: Callable[[Half, HalfRecord], None],
    ) -> None:
        self._context = context
        self._schedule = schedule
        self._store = context.store
        self._halves = halves
        self._log = half_log
        self._keys: dict[str, Half] = {}  # the last one of each unique id
        self._key_of: dict[Half, str] = {}
        self._done: set[int] = set()

    def run(self) -> None:
        """Fill the table of open halves."""
        queue, ops = self._store.queues.get(HALF, 0), self._store.queues.get(OP, 0)
        begin = self._begin(TOPIC_TRANS_HALF, queue)
        op_begin = self._begin(TOPIC_TRANS_OP_HALF, ops)
        self._log.begin_progress(begin, op_begin)
        self._halves.position = begin
        if queue is None:
            return
        if ops is not None:
            for data in self._records(ops, op_begin):
                self._take_op(data)
        self._take_halves(queue, begin)
        ended = self._search() if self._halves.open else 0
        if self._halves.open or ended:
            log.info(
                "%d halves are open; %d were ended without a note of it",
                len(self._halves.open),
                ended,
            )

    def _begin(self, topic: str, queue: ConsumeQueue | None) -> int:
        """Where the last run stood, if the queue has got that place."""
        if queue is None:
            return 0
        wanted = self._context.offsets.get(GROUP_SYS_TRANS, topic, 0)
        if wanted is None:
            return queue.min_offset
        begin = min(max(wanted, queue.min_offset), queue.max_offset)
        if begin < wanted:
            log.warning(
                "%s goes on at %d instead of %d, which it does not have", topic, begin, wanted
            )
        return begin

    def _records(self, queue: ConsumeQueue, offset: int) -> Iterator[bytes]:
        confirmed, end = self._store.confirmed, queue.max_offset
        reader, count = self._store.fresh_reader(), READ_COUNT
        while offset < end:
            status = reader.find(queue, offset, count, READ_BYTES, confirmed, True)
            output = Output(1024)
            following = max(reader.next_offset, offset + 1)
            if status == FOUND:
                if reader.copy_to(output, True):
                    yield from split_records(output.take())
                elif count > 1:  # one of them is gone, not all
                    count = 1
                    continue
            offset, count = following, READ_COUNT

    def _take_op(self, data: bytes) -> None:
        stored = _read(data)
        if stored is None:
            return
        text = data[stored.properties_at : stored.properties_at + stored.properties_length]
        if decode_properties(text).get(PROPERTY_TAGS) == DONE_TAG:
            body = data[stored.body_at : stored.body_at + stored.body_length]
            self._done.update(done_by(body))

    def _take_halves(self, queue: ConsumeQueue, begin: int) -> None:
        store, halves = self._store, self._halves
        for offset in range(begin, queue.max_offset):
            if offset not in self._done:
                entry = queue.entry(offset)
                data = store.lookup.record(entry[0], store.confirmed) if entry else None
                record = read_half(data) if data is not None else None
                if record is not None:
                    self._admit(record)
            halves.passed(offset)

    def _admit(self, record: HalfRecord) -> None:
        older, again = None, record.first != record.queue_offset
        if again and record.prepared_offset == 0 and record.first in self._done:
            return  # left in peace by Apache's broker meanwhile, and ended by its first handle
        if record.checks > 0 and not again and record.key:
            # Apache's brokers do not say of which half it is another append.
            older = self._keys.get(record.key)
            if older is not None and older.group.name != record.group:
                older = None
        known = older or self._halves.find(record.first)
        before = known.newest if known is not None else NOWHERE
        half = self._halves.admit(record, self._log.origin_of(record), older)
        if half is not None:
            if half is known and before not in needed_of(half):
                # Its op message is lost; without it the next start might take it for an open half.
                self._log.undone.append(before)
            self._keys[record.key] = half
            self._key_of[half] = record.key
            self._schedule(half, record)

    # --- committed messages without an op message

    def _search(self) -> int:
        """End the halves whose outcome lies in the log; gives how many."""
        store = self._store
        places: dict[int, Half] = {}
        for half in self._halves.open.values():
            places[half.place] = half
            if half.origin != NOWHERE:
                places[half.origin] = half
        begin, table = max(min(places), store.log.begin()), self._log.table
        if table.searched_to > store.log.end:
            table.forget()
        begin = max(begin, table.searched_to)
        ended = 0
        for stored in walk(store, begin):
            outcome = _outcome(stored)
            if outcome is None:
                continue
            half_or_none = self._match(stored, places)
            if half_or_none is not None and half_or_none.newest in self._halves.open:
                self._halves.close(half_or_none, outcome)
                self._log.undone += needed_of(half_or_none)
                ended += 1
        return ended

    def _match(self, stored: StoredRecord, places: dict[int, Half]) -> Half | None:
        """The half that a message was committed from."""
        stored.scan()
        at, length = stored.marks.unique_at, stored.marks.unique_length
        key = bytes(stored.buffer[at : at + length]).decode("utf-8", "replace") if length else ""
        half = places.get(stored.prepared_offset)
        # A delayed message loses its prepared offset, so that 0 may be anybody's.
        if half is not None and self._key_of.get(half) == key:
            return half
        half = self._keys.get(key)
        return half if half is not None and half.key else None


def walk(store: MessageStore, offset: int) -> Iterator[StoredRecord]:
    """The records of the log from this one on; each is good until the next one is asked for."""
    stored, row, end = StoredRecord(), store.log.row, store.confirmed
    least = READ_BYTES
    while offset < end:
        segment = row.find(offset)
        if segment is None:
            return
        room = segment.start + segment.size - offset
        data = segment.disk.read_at(segment.fd, min(least, room), offset - segment.start)
        stored.bind(memoryview(bytearray(data or b"\0")))
        at = 0
        while offset + at < end and stored.read(at, len(data)) == RECORD:
            yield stored
            at += stored.size
        offset, room, left = offset + at, room - at, len(data) - at
        if left < BLANK_BYTES:
            if room < BLANK_BYTES:
                offset += room
            elif at == 0:
                return
            continue
        size = octets.get_i32(data, at)
        if octets.get_i32(data, at + 4) == MAGIC_BLANK:
            offset += room
        elif left < size <= room:  # cut off by the end of what was read
            least = max(size, READ_BYTES)
        else:
            return


def _read(data: bytes) -> StoredRecord | None:
    stored = StoredRecord()
    stored.bind(memoryview(bytearray(data or b"\0")))
    return stored if stored.read(0, len(data)) == RECORD else None


def _outcome(stored: StoredRecord) -> int | None:
    if stored.sys_flag & SYS_TRANSACTION_MASK == SYS_TRANSACTION_COMMIT:
        return COMMITTED
    if stored.topic_length != len(_PARKED):
        return None
    topic = bytes(stored.buffer[stored.topic_at : stored.topic_at + stored.topic_length])
    return ROLLED_BACK if topic == _PARKED else None
