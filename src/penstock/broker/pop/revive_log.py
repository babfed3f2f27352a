"""The revive log: what is lent and what was acknowledged, as messages of rmq_sys_REVIVE_LOG_*.

| Tag | Body | Written when |
|---|---|---|
| `ck` | PopCheckPoint | messages are lent; again if they stay so while the log grows |
| `ack`, `bAck` | AckMsg, BatchAckMsg | they are acknowledged, or copied to a retry topic |
| `order` | OrderedPop | a queue is popped in order, or something of that is acknowledged |

The bodies are RocketMQ's, but for the last one, which its brokers pass over. They send these
messages through the timer, so that they show up when a batch is over; ours are appended at once, as
a journal, and what is open is kept in memory (`loans`). After a restart the journal is read from
the place of the group CID_RMQ_SYS_REVIVE_GROUP on, which never passes the entry of an open batch.

Lending moves the group's offset; the entry notes where to (POP_NEXT). Offsets, and how far they
contain the journal (as the group CID_RMQ_SYS_REVIVE_PLACES), are in one table, so a restart knows
which entries are newer than the offsets it has read, and moves those on. The table is written only
when the journal is on the disk that far: an offset never gets ahead of its batch. Before it the
file of ordered pops is written, which so never lags behind the offsets.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from penstock.broker.context import BrokerContext
from penstock.broker.pop.checkpoints import BATCH_MAX, Key, Loan, Loans
from penstock.broker.pop.ordered_pop import OrderedPops, OrderedQueue
from penstock.errors import BodyError, MessageIllegal, NotWriteable, PenstockError
from penstock.rpc.answers import TickAt
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.get import FOUND
from penstock.store.put import ILLEGAL, PUT_OK
from penstock.wire.bodies.pop_bodies import (
    AckMsg,
    OrderedPop,
    decode_ack,
    decode_acks,
    decode_check_point,
    decode_ordered_pop,
)
from penstock.wire.codes import PROPERTY_TAGS, REVIVE_TOPIC_PREFIX
from penstock.wire.message import decode_properties
from penstock.wire.record import RECORD, Record, StoredRecord

log = logging.getLogger(__name__)

REVIVE_GROUP: Final = "CID_RMQ_SYS_REVIVE_GROUP"
PLACES_GROUP: Final = "CID_RMQ_SYS_REVIVE_PLACES"

SPAN_LEAST: Final = 1_024
"""Entries between the first open batch and the end of its queue from which on the batch is written
again; more where more are open, so that this never costs more than a fraction of the log."""
REWRITES_MAX: Final = 16
"""Batches of a queue that are written again in one turn."""
_READ_MESSAGES: Final = 512
_READ_BYTES: Final = 1024 * 1024
_FOREIGN_GRACE_MS: Final = 3_000
"""RocketMQ's brokers have acknowledgements delivered a second after their batch."""
_TIMER_MARK: Final = "TIMER_OUT_MS"  # on what went through a timer
_NEXT: Final = "POP_NEXT"
_OFFSET_MAX: Final = 1 << 62
_encode: Final = msgspec.json.encode
"""Members in the order of their names, as RocketMQ writes them; our own writer takes 40 µs."""


class Entry(NamedTuple):
    """A message of the revive log: `number` in its queue, `place` in the log."""

    number: int
    place: int
    properties: dict[str, str]
    body: bytes

    @property
    def next_offset(self) -> int | None:
        """Where the group goes on, if this entry says so."""
        text = self.properties.get(_NEXT, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


class Journal:
    """Writes and reads the revive log, and keeps `loans` and `order` equal to it."""

    def __init__(self, context: BrokerContext, host: bytes, order: OrderedPops) -> None:
        self._context = context
        self._order = order
        self._store = context.store
        broker = context.settings.current.broker
        self._broker_name = broker.name
        self.topic = REVIVE_TOPIC_PREFIX + broker.cluster
        config = context.topics.need(self.topic)
        self.queues = [self._queue(queue_id) for queue_id in range(max(config.write_queue_nums, 1))]
        self.loans = Loans(len(self.queues))
        self._read_to = [0] * len(self.queues)
        self._noted = [-1] * len(self.queues)
        self._end = 0  # of the last entry in the log
        self.taken_over = True  # nothing in this store says that we have lent anything from it
        self._record = Record()
        self._record.born_host = self._record.store_host = host
        self._turn = 0
        self.written: Counter[tuple[str, str, str]] = Counter()  # by (group, topic, type)
        self.read_again: Counter[tuple[str, str, str]] = Counter()
        context.persistence.before[context.offsets.table.FILE] = self._make_durable
        self._rebuild(context.started_ms)

    def _queue(self, queue_id: int) -> ConsumeQueue:
        queue = self._store.make_queue(self.topic.encode(), queue_id)
        assert queue is not None
        return queue

    # --- writing

    def next_queue(self) -> int:
        """The queue of the revive log for the next pop."""
        self._turn = (self._turn + 1) % len(self.queues)
        return self._turn

    def lend(self, loan: Loan, now_ms: int, next_offset: int | None = None) -> None:
        """Note a batch: it is lent from now on, and the group goes on at `next_offset`, where one
        is given. Raises the store's error if it can't be noted."""
        self._write_check_point(loan, now_ms, next_offset)
        self.loans.add(loan)
        if self.loans.due() == loan.due_ms:
            self._context.effects.put(TickAt(loan.due_ms))
        if next_offset is not None:
            self._move(loan.key, next_offset, loan.revive_queue_id, loan.entry, now_ms)

    def ack(self, loan: Loan, offsets: Sequence[int], now_ms: int) -> int:
        """Note that messages of a batch are acknowledged; how many of them were lent until now."""
        bits, fresh = 0, []
        for offset in offsets:
            bit = loan.bit_of(offset) & ~(loan.acked | bits)
            if bit:
                bits |= bit
                fresh.append(offset)
        if not fresh or not loan.open:
            return 0
        self._write_acks(loan.key, loan.revive_queue_id, fresh, now_ms)
        return self.loans.ack(loan, bits)

    def ack_unknown(self, key: Key, queue_id: int, offsets: Sequence[int], now_ms: int) -> None:
        """Note acknowledgements of a batch that another broker has lent and that is not here yet:
        its checkpoint comes out of the timer when its time is over."""
        self._write_acks(key, queue_id, list(offsets)[:BATCH_MAX], now_ms)
        self.loans.ack_early(key, offsets)

    def note_order(self, queue: OrderedQueue, next_offset: int, now_ms: int) -> None:
        """Note what is open in a queue that is popped in order, and that the group goes on at
        `next_offset`. Raises the store's error if it can't be noted."""
        body = _encode(
            OrderedPop(
                topic=queue.topic,
                consumer_group=queue.group,
                queue_id=queue.queue_id,
                next_offset=next_offset,
                open_pop=self._order.state(queue),
            )
        )
        queue_id = queue.queue_id % len(self.queues)
        self._put(body, "TAGS\x01order\x02", now_ms, queue_id, now_ms)
        self._move(queue, next_offset, queue_id, self._store.path.queue_offset, now_ms)

    def cover_log(self) -> None:
        """Whatever was stored until now has to be on the disk before offsets are written."""
        self._end = self._store.log.end

    def _write_check_point(self, loan: Loan, now_ms: int, next_offset: int | None = None) -> None:
        key, acked = loan.key, loan.acked
        body = _encode(
            {
                "bm": acked if acked < 1 << 31 else acked - (1 << 32),
                "bn": self._broker_name,
                "c": key.group,
                "d": loan.distances(),
                "it": loan.invisible_ms,
                "n": len(loan),
                "pt": key.pop_ms,
                "q": key.queue_id,
                "ro": 0,
                "so": key.start,
                "t": key.topic,
            }
        )
        more = "" if next_offset is None else f"{_NEXT}\x01{next_offset}\x02"
        deliver_ms = key.pop_ms + loan.invisible_ms - 1000
        self._put(body, f"TAGS\x01ck\x02{more}", deliver_ms, loan.revive_queue_id, now_ms)
        path = self._store.path
        loan.entry, loan.entry_place = path.queue_offset, path.offset
        self.written[key.group, key.topic, "CK"] += 1

    def _write_acks(self, key: Key, queue_id: int, offsets: list[int], now_ms: int) -> None:
        several = len(offsets) > 1
        body = _encode(
            {
                "ao": 0 if several else offsets[0],
                **({"aol": offsets} if several else {}),
                "bn": self._broker_name,
                "c": key.group,
                "pt": key.pop_ms,
                "q": key.queue_id,
                "so": key.start,
                "t": key.topic,
            }
        )
        tag = "TAGS\x01bAck\x02" if several else "TAGS\x01ack\x02"
        self._put(body, tag, now_ms, queue_id, now_ms)
        self.written[key.group, key.topic, "ACK"] += 1

    def _put(
        self, body: bytes, properties: str, deliver_ms: int, queue_id: int, now_ms: int
    ) -> None:
        queue, record, path = self.queues[queue_id], self._record, self._store.path
        # Where RocketMQ's brokers look for the time, should one take over this store.
        properties += f"TIMER_DELIVER_MS\x01{deliver_ms}\x02"
        record.fill(queue.topic, body, properties.encode())
        record.queue_id, record.born_ms = queue_id, now_ms
        status = path.check(record)
        if status == PUT_OK:
            status = path.put_in(record, queue, now_ms)
        size = record.size
        record.release()
        if status == ILLEGAL:
            raise MessageIllegal(f"the revive log takes no entry like this ({path.problem})")
        if status != PUT_OK:
            if isinstance(path.fault, PenstockError):
                raise path.fault
            raise NotWriteable(f"the revive log can't be written: {path.fault}")
        self._end = path.offset + size
        if self._read_to[queue_id] == path.queue_offset:
            self._read_to[queue_id] += 1

    # --- the offsets that go with it

    def _move(
        self, key: Key | OrderedQueue, next_offset: int, queue_id: int, entry: int, now_ms: int
    ) -> None:
        """The group goes on behind what it has been lent with this entry."""
        offsets = self._context.offsets
        offsets.commit(key.group, key.topic, key.queue_id, next_offset, now_ms)
        offsets.table.commit(self.topic, PLACES_GROUP, queue_id, entry + 1, now_ms)

    def _make_durable(self) -> Callable[[], None] | None:
        """What has to be done before the offsets are written."""
        store, end = self._store, self._end
        save = self._context.persistence.save(self._order) if self._order.dirty else None
        if store.flusher.flushed() >= end:
            return save
        store.path.settle()  # whatever was put in this turn has to be in the files

        def work() -> None:
            store.sync_log(end)
            if save is not None:
                save()

        return work

    # --- the place from which the journal is needed

    def tick(self, now_ms: int) -> None:
        """Note how far the journal is done, and write batches again that stand in its way."""
        table = self._context.offsets.table
        for queue_id, queue in enumerate(self.queues):
            self._rewrite(queue_id, queue, now_ms)
            oldest = self.loans.oldest(queue_id)
            first = self._read_to[queue_id] if oldest is None else oldest.entry
            # RocketMQ's place is the last entry that is done, not the next one to read.
            if first > 0 and self._noted[queue_id] != first - 1:
                self._noted[queue_id] = first - 1
                table.commit(self.topic, REVIVE_GROUP, queue_id, first - 1, now_ms)

    def _rewrite(self, queue_id: int, queue: ConsumeQueue, now_ms: int) -> None:
        span_max = SPAN_LEAST + 4 * self.loans.open_in[queue_id]
        for _ in range(REWRITES_MAX):
            oldest = self.loans.oldest(queue_id)
            if oldest is None or queue.max_offset - oldest.entry <= span_max:
                return
            if self.is_deleted(oldest):
                self.loans.close(oldest)
                continue
            try:
                self._write_check_point(oldest, now_ms)
            except PenstockError as error:
                log.warning("a batch of lent messages can't be written again yet: %s", error)
                return
            self.loans.logged_again(oldest)

    def is_deleted(self, loan: Loan) -> bool:
        """Whether the topic was deleted since: one of the same name holds other messages."""
        return loan.entry_place < self._store.deleted_below(loan.key.topic.encode())

    def behind(self, queue_id: int) -> int:
        """Entries from the first one that is needed on."""
        oldest = self.loans.oldest(queue_id)
        return 0 if oldest is None else self._read_to[queue_id] - oldest.entry

    # --- reading

    def _rebuild(self, now_ms: int) -> None:
        """Read what is open, at the start; this waits for the disk."""
        moves: list[tuple[int, int, int, Key | OrderedPop, int]] = []
        for queue_id, queue in enumerate(self.queues):
            done = self._context.offsets.get(REVIVE_GROUP, self.topic, queue_id)
            moved = self._context.offsets.get(PLACES_GROUP, self.topic, queue_id) or 0
            self.taken_over &= moved == 0
            self._read_to[queue_id] = max(0 if done is None else done + 1, queue.min_offset)
            for entry in self._entries(queue_id, queue.max_offset):
                what = self._apply(entry, queue_id, now_ms)
                to = what.next_offset if isinstance(what, OrderedPop) else entry.next_offset
                if what is not None and to is not None and entry.number >= moved:
                    moves.append((entry.place, queue_id, entry.number, what, to))
            self._read_to[queue_id] = queue.max_offset
        self.taken_over &= not moves
        for place, queue_id, number, what, to in sorted(moves, key=lambda move: move[0]):
            if place >= self._store.deleted_below(what.topic.encode()):
                self._move_again(what, to, queue_id, number, now_ms)
        for loan in list(self.loans):
            row = self._store.queue(loan.key.topic, loan.key.queue_id)
            found = None if row is None else row.entry(loan.open_offsets()[0])
            loan.place = loan.entry_place if found is None else min(found[0], loan.entry_place)
        self.loans.set_back(now_ms)
        self._order.set_back(now_ms)
        if len(self.loans):
            log.info("%d batches of messages are lent", len(self.loans))

    def _move_again(
        self, what: Key | OrderedPop, to: int, queue_id: int, number: int, now_ms: int
    ) -> None:
        """An entry is newer than the offsets that were read."""
        if isinstance(what, OrderedPop):
            queue = OrderedQueue(what.topic, what.consumer_group, what.queue_id)
            self._order.restore(queue, what.open_pop)
            self._move(queue, to, queue_id, number, now_ms)
        else:
            self._move(what, to, queue_id, number, now_ms)

    def catch_up(self, now_ms: int) -> None:
        """Read entries that somebody else has put: those of another broker that its timer held."""
        for queue_id, queue in enumerate(self.queues):
            end = queue.visible_max(self._store.confirmed)
            if self._read_to[queue_id] < end:
                # They are new, so they are in memory; what we have put ourselves counts already.
                for entry in self._entries(queue_id, end):
                    if _TIMER_MARK in entry.properties:
                        self._apply(entry, queue_id, now_ms)

    def _entries(self, queue_id: int, end: int) -> Iterator[Entry]:
        """The entries of a queue that were not read yet."""
        while (at := self._read_to[queue_id]) < end:
            found = self._store.get(
                self.topic,
                queue_id,
                at,
                count_max=min(_READ_MESSAGES, end - at),
                bytes_max=_READ_BYTES,
                wait=True,
            )
            if found.status == FOUND:
                yield from _split(found.data)
            self._read_to[queue_id] = max(found.next_offset, at + 1)

    def _apply(self, entry: Entry, queue_id: int, now_ms: int) -> Key | OrderedPop | None:
        """Let an entry count; which batch or ordered pop it is, if it is one."""
        tag = entry.properties.get(PROPERTY_TAGS)
        try:
            if tag == "ck":
                return self._apply_check_point(entry, queue_id, now_ms)
            if tag == "order":  # counts where it is newer than the offsets
                return decode_ordered_pop(entry.body)
            if tag == "ack":
                ack = decode_ack(entry.body)
                self._apply_acks(ack, [ack.ack_offset])
            elif tag == "bAck":
                acks = decode_acks(entry.body)
                self._apply_acks(acks, acks.ack_offsets)
        except PenstockError as error:
            log.warning(
                "the entry %d of queue %d of the revive log can't be read: %s",
                entry.number,
                queue_id,
                error,
            )
        return None

    def _apply_check_point(self, entry: Entry, queue_id: int, now_ms: int) -> Key | None:
        ck = decode_check_point(entry.body)
        self.read_again[ck.consumer_group, ck.topic, "CK"] += 1
        key = Key(ck.topic, ck.consumer_group, ck.queue_id, ck.start_offset, ck.pop_time)
        loan = self.loans.get(key)
        offsets = list(ck.offsets())[:BATCH_MAX]
        if loan is None:
            if not offsets or offsets != sorted(set(offsets)) or not 0 <= offsets[-1] < _OFFSET_MAX:
                raise BodyError(
                    f"messages {offsets[:3]} and so on of {ck.topic[:80]} can't be lent"
                )
            loan = Loan(key, max(ck.invisible_time, 0), offsets, queue_id)
            loan.acked = ck.bit_map & ((1 << len(offsets)) - 1)
            loan.entry, loan.entry_place = entry.number, entry.place
            loan.place = entry.place
            if _TIMER_MARK in entry.properties:
                # Its acknowledgements may still wait in the timer, overdue as the batch itself.
                loan.due_ms = max(loan.due_ms, now_ms) + _FOREIGN_GRACE_MS
                self.loans.take_early(loan)  # ours never come before their batch
            self.loans.add(loan)
        elif loan.revive_queue_id == queue_id:  # written again
            loan.entry, loan.entry_place = entry.number, entry.place
            self.loans.ack(loan, ck.bit_map & ((1 << len(loan)) - 1))
            self.loans.logged_again(loan)
        return key

    def _apply_acks(self, ack: AckMsg, offsets: Sequence[int]) -> None:
        self.read_again[ack.consumer_group, ack.topic, "ACK"] += 1
        key = Key(ack.topic, ack.consumer_group, ack.queue_id, ack.start_offset, ack.pop_time)
        loan = self.loans.get(key)
        if loan is None:
            self.loans.ack_early(key, offsets)
            return
        for offset in offsets:
            self.loans.ack(loan, loan.bit_of(offset))


def _split(data: bytes) -> Iterator[Entry]:
    """The entries that lie one after another."""
    stored, at = StoredRecord(), 0
    stored.bind(memoryview(bytearray(data)))
    while stored.read(at, len(data)) == RECORD:
        body_at, text_at = stored.body_at, stored.properties_at
        yield Entry(
            stored.queue_offset,
            stored.physical_offset,
            decode_properties(data[text_at : text_at + stored.properties_length]),
            data[body_at : body_at + stored.body_length],
        )
        at += stored.size
