"""Transactions: halves that wait for a commit, the requests that end them, their check-back.

| Request | |
|---|---|
| SEND_MESSAGE with TRAN_MSG | `park`: the message becomes a half |
| END_TRANSACTION | commits it, rolls it back, or tells that the producer does not know yet |
| RESUME_CHECK_HALF_MESSAGE | lets a half be checked anew, or one that was given up |

A half is named by a handle: queue offset and log offset of one of its appends. Any of them will do,
and what ended stays ended: a request that comes again is answered, and nothing is stored again.
"""

from collections import Counter
from typing import Final, NamedTuple

from penstock.broker.context import BrokerContext
from penstock.broker.transaction.check_back import CheckBack
from penstock.broker.transaction.half_messages import (
    COMMITTED,
    ROLLED_BACK,
    Half,
    HalfRecord,
    Halves,
    fits,
    read_half,
)
from penstock.broker.transaction.half_queues import HalfLog
from penstock.broker.transaction.half_recovery import HalfScan
from penstock.broker.transaction.resolution import Endings
from penstock.errors import (
    InvalidParameter,
    MessageIllegal,
    NoPermission,
    NotWriteable,
    Refused,
    SystemBusy,
    TransactionCommitted,
    TransactionRolledBack,
    TransactionTooLate,
)
from penstock.metrics import Registry
from penstock.rpc.answers import (
    Answer,
    ClientId,
    InThread,
    PersistentTable,
    Reply,
    reply_when_flushed,
)
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.get import FOUND
from penstock.store.lookup import QUERY_MAX
from penstock.store.put import PUT_OK
from penstock.store.store import MessageStore
from penstock.wire.codes import (
    PROPERTY_CHECK_IMMUNITY_SECONDS,
    PROPERTY_PRODUCER_GROUP,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TRANSACTION_CHECK_TIMES,
    PROPERTY_TRANSACTION_ID,
    PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET,
    PROPERTY_UNIQ_KEY,
    SYS_TRANSACTION_COMMIT,
    SYS_TRANSACTION_MASK,
    SYS_TRANSACTION_NONE,
    SYS_TRANSACTION_ROLLBACK,
    TOPIC_SCHEDULE,
    TOPIC_TIMER,
    TOPIC_TRANS_CHECK_MAX_TIME,
    RequestCode,
)
from penstock.wire.message import decode_message
from penstock.wire.message_ids import decode_offset_id
from penstock.wire.output import Output
from penstock.wire.record import StoredRecord

SPARE_BYTES: Final = 512
"""Room in the properties of a half for what is noted there later."""
_RECORD_BYTES_MAX: Final = (1 << 31) - 1
_EVER_MS: Final = 1 << 62
_BEFORE_MS: Final = 1_000  # index entries know seconds

_DONE: Final = {COMMITTED: "committed", ROLLED_BACK: "rolled back"}
_WANTED: Final = {SYS_TRANSACTION_COMMIT: COMMITTED, SYS_TRANSACTION_ROLLBACK: ROLLED_BACK}


class Handle(NamedTuple):
    """Which half a request ends, and how; None if its producer does not know."""

    group: str
    queue_offset: int
    log_offset: int
    wanted: int | None
    checked: bool


class Transactions:
    """The transactions of a broker; `host` is its address as messages note it."""

    def __init__(self, context: BrokerContext, host: bytes) -> None:
        self._context = context
        self._host = host
        self.halves = Halves()
        self._log = HalfLog(context, self.halves, host)
        self._endings = Endings(context, self._log, host)
        self._checks = CheckBack(context, self.halves, self._log, self._endings, host)
        HalfScan(context, self.halves, self._log, self._checks.schedule).run()
        self._due_ms = 0
        self._behind: Counter[ClientId] = Counter()
        """Requests that wait until the record of a half is read."""

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.END_TRANSACTION, self.end),
            Row(RequestCode.RESUME_CHECK_HALF_MESSAGE, self.resume),
        ]

    # --- halves

    def park(
        self, topic: str, queue_id: int, properties: dict[str, str], now_ms: int
    ) -> ConsumeQueue:
        """The queue where a half waits, its own place noted in its properties."""
        config = self._context.settings.current.broker
        if config.reject_transactions:
            raise NoPermission(
                f"the broker {config.name} takes no transactional messages",
                hint="its settings say so (reject_transactions)",
            )
        if not properties.get(PROPERTY_PRODUCER_GROUP):
            raise MessageIllegal(
                "the message is part of a transaction, but names no producer group (PGROUP)",
                hint="send it with a transaction producer",
            )
        if len(self.halves.open) >= config.open_transactions_max:
            raise SystemBusy.over(
                "too many transactions are open",
                figure=len(self.halves.open),
                limit=config.open_transactions_max,
                unit="halves",
                setting="open_transactions_max",
                hint="end them, or let their producers be asked",
            )
        key = properties.get(PROPERTY_UNIQ_KEY)
        if key:
            properties[PROPERTY_TRANSACTION_ID] = key
        properties[PROPERTY_REAL_TOPIC] = topic
        properties[PROPERTY_REAL_QUEUE_ID] = str(queue_id)
        for name in (PROPERTY_TRANSACTION_CHECK_TIMES, PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET):
            properties.pop(name, None)  # it would look like a half that was appended again
        later = dict(properties)
        self._context.redirects.wait(
            topic, queue_id, later, 0, now_ms
        )  # refuses what could never be
        if not fits(later, SPARE_BYTES):
            raise MessageIllegal("the properties leave no room for those of a transaction")
        return self._log.make_queue()

    # --- ending them

    def end(self, command: Command) -> Answer:
        """END_TRANSACTION."""
        state = command.i32("commitOrRollback")
        if state not in (SYS_TRANSACTION_NONE, *_WANTED):
            raise InvalidParameter(f"commitOrRollback can't be {state}: it is 0, 8 or 12")
        handle = Handle(
            command.text("producerGroup"),
            command.i64("tranStateTableOffset"),
            command.i64("commitLogOffset"),
            _WANTED.get(state),
            command.truth("fromTransactionCheck"),
        )
        half = self.halves.find(handle.queue_offset)
        moved = half is not None and half.origin == handle.log_offset and half.newest != half.first
        place = half.place if half is not None and moved else handle.log_offset
        data = None if moved else self._read_now(handle)
        if data is None or command.client in self._behind:
            return self._end_in_line(command, handle, place, data)
        return self._end(command, handle, data)

    def _end_in_line(
        self, command: Command, handle: Handle, place: int, data: bytes | None
    ) -> InThread:
        """End a half when its record is read; later requests of this client wait until then.

        Whoever commits halves one after another wants the messages in that order.
        """
        store, handed, client = self._context.store, self._context.store.log.handed, command.client
        self._behind[client] += 1

        def read() -> bytes | Exception | None:
            try:
                return store.lookup.record(place, handed)
            except Exception as error:  # whatever it is, those behind it have their turn
                return error

        def end(found: bytes | Exception | None) -> Answer:
            self._behind[client] -= 1
            if not self._behind[client]:
                del self._behind[client]
            if isinstance(found, Exception):
                raise found
            return self._end(command, handle, found if data is None else data)

        return InThread(read if data is None else None, end, ordered_by=("transactions", client))

    def _read_now(self, handle: Handle) -> bytes | None:
        """The record that a handle names, if it can be had without waiting for the disk."""
        queue, store = self._log.queue, self._context.store
        if queue is None:
            return None
        reader = store.reader
        reader.only(())  # pulls have left their tags in it
        status = reader.find(queue, handle.queue_offset, 1, _RECORD_BYTES_MAX, store.confirmed)
        output = Output(1024)
        if status != FOUND or not reader.copy_to(output):
            return None
        return output.take()

    def _end(self, command: Command, handle: Handle, data: bytes | None) -> Answer:
        record = read_half(data) if data is not None else None
        if record is None or data is None:
            raise Refused(f"no half begins at the log offset {handle.log_offset}")
        half = self._find(handle, record)
        refusal = self._context.access.check_write(command, record.topic)
        if refusal is not None:
            return refusal
        if half is None:
            outcome = self.halves.outcome(record.first)
            if outcome is not None:
                return self._answer_ended(command, handle, outcome)
            return self._search(command, handle, record)
        if handle.wanted is None:
            if handle.checked:
                self._checks.answered(half, command.now_ms)
                self._checks.go_on(half.group, command.now_ms)
            return self._answered(
                command, "unknown: the half stays open, its producer is asked later"
            )
        self._refuse_late(handle, half, record, command.now_ms)
        self._finish(half, handle.wanted, data, command.now_ms)
        self._checks.go_on(half.group, command.now_ms)
        self._promise(handle.wanted, command.now_ms)
        return self._answered(command, f"done: {_DONE[handle.wanted]}")

    def _promise(self, outcome: int, now_ms: int) -> None:
        """See to it that what is answered is in the store: a commit is, with its message."""
        if outcome == ROLLED_BACK and self._log.undone:
            self._log.write_ops(now_ms)
            if self._log.undone:
                raise NotWriteable("that the transaction is rolled back can't be noted now")

    def _find(self, handle: Handle, record: HalfRecord) -> Half | None:
        """The open half of a handle whose record was read; raises Refused if it is another's."""
        if record.group != handle.group:
            raise Refused(
                "the producer group is wrong: the half belongs to another one",
                hint="end a transaction with the group that sent its message",
            )
        half = self.halves.find_like(record)
        if half is None:  # it may have ended while its newest append was read
            first = (record.first, self._log.origin_of(record))
        else:
            first = (half.first, half.origin)
        named = (handle.queue_offset, handle.log_offset)
        if named not in ((record.queue_offset, record.log_offset), first):
            raise Refused(
                f"the offsets do not belong together: the half at {record.log_offset} of the log "
                f"is number {record.queue_offset} of its queue"
            )
        return half or self._admit_now(record)

    def _admit_now(self, record: HalfRecord) -> Half | None:
        """Take up a half that the queue was not followed up to yet."""
        if record.queue_offset < self.halves.position or self.halves.is_known(record.queue_offset):
            return None
        return self._checks.admit(record)

    def _refuse_late(self, handle: Handle, half: Half, record: HalfRecord, now_ms: int) -> None:
        """A half that asks for a time of peace is ended within it, or by an answer to a check."""
        if handle.checked or not record.properties.get(PROPERTY_CHECK_IMMUNITY_SECONDS):
            return
        waited_ms = now_ms - half.since_ms
        immunity_ms = record.immunity_ms(self._context.settings.current)
        if waited_ms > immunity_ms:
            raise TransactionTooLate.over(
                "the half is checked already, so only an answer to a check ends it",
                figure=waited_ms,
                limit=immunity_ms,
                unit="ms",
                setting=PROPERTY_CHECK_IMMUNITY_SECONDS,
            )

    def _finish(self, half: Half, wanted: int, data: bytes, now_ms: int) -> None:
        if wanted == ROLLED_BACK:
            self._endings.roll_back(half, now_ms)
            return
        try:
            self._endings.commit(half, data, now_ms)
        except NotWriteable:
            self._checks.postpone(half)
            raise

    # --- what has ended

    def _search(self, command: Command, handle: Handle, record: HalfRecord) -> Answer:
        """Find out what became of a half that ended before the last start, or long ago."""
        store, first, confirmed = self._context.store, record.first, self._context.store.log.handed
        indexed = store.index is not None and record.key

        def search() -> int | None:
            if not indexed:
                return None
            places = {self._log.origin_of(record), record.log_offset}
            found = _is_committed(store, record, places, confirmed)
            return COMMITTED if found else ROLLED_BACK

        def answer(outcome: int | None) -> Answer:
            # It may have ended while the index was read.
            known = self.halves.outcome(first)
            return self._answer_ended(command, handle, outcome if known is None else known)

        return InThread(search, answer)

    def _answer_ended(self, command: Command, handle: Handle, outcome: int | None) -> Answer:
        if outcome is None:
            return self._answered(command, "done before: how is not known, as it is not indexed")
        if handle.wanted not in (None, outcome):
            if outcome == COMMITTED:
                raise TransactionCommitted(
                    "the transaction was committed before: too late for this"
                )
            raise TransactionRolledBack("the transaction was rolled back before: too late for this")
        self._promise(outcome, command.now_ms)
        return self._answered(command, f"done before: {_DONE[outcome]}")

    def _answered(self, command: Command, remark: str) -> Answer:
        """The answer. Under sync flush it waits for the disk: it makes a promise."""
        return (
            None
            if command.oneway
            else reply_when_flushed(self._context.store, command, Reply(remark=remark))
        )

    # --- checking anew

    def resume(self, command: Command) -> Answer:
        """RESUME_CHECK_HALF_MESSAGE."""
        offset = decode_offset_id(command.text("msgId")).offset
        store, handed = self._context.store, self._context.store.log.handed

        def resume(data: bytes | None) -> Answer:
            if data is None:
                raise Refused(f"no message begins at the log offset {offset}")
            return self._resume(command, data)

        return InThread(lambda: store.lookup.record(offset, handed), resume)

    def _resume(self, command: Command, data: bytes) -> Answer:
        record = read_half(data)
        if record is None:
            return self._unpark(command, data)
        half = self.halves.find_like(record) or self._admit_now(record)
        if half is None:
            raise Refused(
                "the half has ended already",
                hint=f"if it was given up, resume its copy in {TOPIC_TRANS_CHECK_MAX_TIME}",
            )
        self._checks.reset(half, command.now_ms)
        status = self._log.append_again(half, data, command.now_ms)
        if status != PUT_OK:
            raise self._context.rewriter.fault(status)
        return self._answered(command, "the checks of the half are counted anew")

    def _unpark(self, command: Command, data: bytes) -> Answer:
        """Let a half that was given up become a new one."""
        message, rewriter = decode_message(data), self._context.rewriter
        if message.topic != TOPIC_TRANS_CHECK_MAX_TIME:
            raise Refused(f"the message is no half: it lies in {message.topic}")
        rewriter.read(data)
        properties = rewriter.properties()
        properties.pop(PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET, None)
        properties[PROPERTY_TRANSACTION_CHECK_TIMES] = "0"
        status = rewriter.put(
            self._log.make_queue(), command.now_ms, properties=properties, store_host=self._host
        )
        if status != PUT_OK:
            raise rewriter.fault(status)
        return self._answered(command, "the half is open again")

    # --- time

    def tables(self) -> tuple[PersistentTable, ...]:
        return (self._log.table,)

    def due(self) -> int:
        return self._due_ms

    def tick(self, now_ms: int) -> None:
        """Follow the halves that were stored, ask about those that wait too long."""
        if self._log.undone:
            self._log.write_ops(now_ms)
        more_ms = self._log.follow(now_ms, self._admit)
        self._due_ms = min(more_ms, self._checks.tick(now_ms))
        self._log.note_progress(now_ms)

    def _admit(self, record: HalfRecord) -> None:
        self._checks.admit(record)

    def finish(self, now_ms: int) -> None:
        """Before a clean end."""
        self._log.note_progress(now_ms)

    def pinned_from(self) -> int | None:
        """Log offset of the first half that still waits; None if none does."""
        oldest, queue = self.halves.oldest(), self._log.queue
        behind = queue is not None and self.halves.position < queue.max_offset
        pins = [oldest.place] if oldest is not None else []
        return min([*pins, self._log.followed_to]) if behind else min(pins, default=None)

    # --- metrics

    def add_metrics(self, registry: Registry) -> None:
        registry.gauge(
            "rocketmq_half_messages",
            "Halves that are open.",
            ("topic",),
            read=lambda: [((topic,), count) for topic, count in self.halves.topics.items()],
        )
        self._endings.add_metrics(registry)
        self._checks.add_metrics(registry)


def _is_committed(
    store: MessageStore, record: HalfRecord, places: set[int], confirmed: int
) -> bool:
    """Whether a message lies in the log that was committed from a half; waits for the disk."""
    stored = StoredRecord()
    # Apache's brokers do not say where the first append of one that they appended again is.
    anywhere = record.checks > 0 and record.first == record.queue_offset
    since_ms = min(record.born_ms, record.store_ms) - _BEFORE_MS
    for topic in (record.topic, TOPIC_SCHEDULE, TOPIC_TIMER):
        found = store.lookup.by_key(
            topic,
            record.key,
            begin_ms=since_ms,
            end_ms=_EVER_MS,
            most=QUERY_MAX,
            confirmed=confirmed,
        )
        for data in found:
            stored.bind(memoryview(bytearray(data)))
            stored.read(0, len(data))
            committed = stored.sys_flag & SYS_TRANSACTION_MASK == SYS_TRANSACTION_COMMIT
            if committed and (anywhere or stored.prepared_offset in places):
                return True
    return False
