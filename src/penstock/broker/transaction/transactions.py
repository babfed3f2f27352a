"""Transactions: the requests that create, resolve and resume half messages.

| Request | |
|---|---|
| SEND_MESSAGE with TRAN_MSG | `redirect`: the message becomes a half message |
| END_TRANSACTION | commits it, rolls it back, or reports that the producer does not know yet |
| RESUME_CHECK_HALF_MESSAGE | resets the checks of a half message, or restores a discarded one |

A request names a half message by queue offset and log offset of any of its appends. A repeated
request gets an answer, but stores nothing again.
"""

from collections import Counter
from functools import partial
from typing import Final, NamedTuple

from penstock.broker.auth.policies import Action
from penstock.broker.context import BrokerContext
from penstock.broker.delay.delay_redirect import DelayRedirect
from penstock.broker.transaction.check_back import CheckBack
from penstock.broker.transaction.half_messages import (
    COMMITTED,
    ROLLED_BACK,
    HalfMessage,
    HalfRecord,
    OpenHalfMessages,
    properties_fit,
    read_half,
)
from penstock.broker.transaction.half_queues import HalfQueues
from penstock.broker.transaction.half_recovery import HalfRecovery
from penstock.broker.transaction.resolution import Resolution
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
    REMARK_OUTCOME_UNKNOWN,
    SYS_TRANSACTION_COMMIT,
    SYS_TRANSACTION_MASK,
    SYS_TRANSACTION_NONE,
    SYS_TRANSACTION_ROLLBACK,
    TOPIC_SCHEDULE,
    TOPIC_TIMER,
    TOPIC_TRANS_CHECK_MAX_TIME,
    RequestCode,
    real_topic,
)
from penstock.wire.message import decode_message
from penstock.wire.message_ids import decode_offset_id
from penstock.wire.output import Output
from penstock.wire.record import StoredRecord

SPARE_BYTES: Final = 512
"""Bytes that stay free in the properties of a half message for those that are added later."""
_RECORD_BYTES_MAX: Final = (1 << 31) - 1
_ANY_MS: Final = 1 << 62
_BEFORE_MS: Final = 1_000  # index entries have a resolution of seconds

_OUTCOME_NAMES: Final = {COMMITTED: "committed", ROLLED_BACK: "rolled back"}
_OUTCOMES: Final = {SYS_TRANSACTION_COMMIT: COMMITTED, SYS_TRANSACTION_ROLLBACK: ROLLED_BACK}


class EndRequest(NamedTuple):
    """Fields of END_TRANSACTION; the outcome is None if the producer does not know it."""

    group: str
    queue_offset: int
    log_offset: int
    outcome: int | None
    from_check: bool


class Transactions:
    """The transactions of a broker; `host` is its address as stored in messages."""

    def __init__(
        self, context: BrokerContext, host: bytes, delayed: DelayRedirect, now_ms: int
    ) -> None:
        self._context = context
        self._delayed = delayed
        self._host = host
        self.half_messages = OpenHalfMessages(by_topic=context.access.enabled())
        self._queues = HalfQueues(context, self.half_messages, host)
        self._resolution = Resolution(context, self._queues, delayed, host)
        self._checks = CheckBack(context, self.half_messages, self._queues, self._resolution, host)
        schedule = partial(self._checks.schedule, now_ms=now_ms)
        HalfRecovery(context, self.half_messages, self._queues, schedule).run()
        self._due_ms = 0
        self._reads_in_flight: Counter[ClientId] = Counter()
        """END_TRANSACTION requests whose half message is being read, by connection."""

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.END_TRANSACTION, self.end_transaction),
            Row(RequestCode.RESUME_CHECK_HALF_MESSAGE, self.resume_check),
        ]

    # --- half messages

    def redirect(
        self, topic: str, queue_id: int, properties: dict[str, str], now_ms: int
    ) -> ConsumeQueue:
        """The queue of half messages; the real topic and queue are stored in the properties."""
        config = self._context.settings.current.broker
        if config.reject_transactions:
            raise NoPermission(
                f"the broker {config.name} does not accept transactional messages",
                hint="set reject_transactions to false to allow them",
            )
        if not properties.get(PROPERTY_PRODUCER_GROUP):
            raise MessageIllegal(
                "the transactional message has no producer group (property PGROUP)",
                hint="send it with a transaction producer",
            )
        if len(self.half_messages.open) >= config.open_transactions_max:
            raise SystemBusy.over(
                "too many transactions are open",
                figure=len(self.half_messages.open),
                limit=config.open_transactions_max,
                unit="half messages",
                setting="open_transactions_max",
                hint="commit or roll back open transactions",
            )
        key = properties.get(PROPERTY_UNIQ_KEY)
        if key:
            properties[PROPERTY_TRANSACTION_ID] = key
        properties[PROPERTY_REAL_TOPIC] = topic
        properties[PROPERTY_REAL_QUEUE_ID] = str(queue_id)
        for name in (PROPERTY_TRANSACTION_CHECK_TIMES, PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET):
            properties.pop(name, None)  # would look like a half message that was appended again
        later = dict(properties)
        # Refuses an invalid delay now, not at the commit.
        self._delayed.find_redirect(topic, queue_id, later, 0, now_ms)
        if not properties_fit(later, SPARE_BYTES):
            raise MessageIllegal(
                "the properties leave no room for those of a transaction",
                hint=f"leave {SPARE_BYTES} bytes of the size limit of properties free",
            )
        return self._queues.make_queue()

    # --- commit and rollback

    def end_transaction(self, command: Command) -> Answer:
        """END_TRANSACTION."""
        state = command.i32("commitOrRollback")
        if state not in (SYS_TRANSACTION_NONE, *_OUTCOMES):
            raise InvalidParameter(f"commitOrRollback is {state}, but it must be 0, 8 or 12")
        request = EndRequest(
            command.text("producerGroup"),
            command.i64("tranStateTableOffset"),
            command.i64("commitLogOffset"),
            _OUTCOMES.get(state),
            command.truth("fromTransactionCheck"),
        )
        half = self.half_messages.find(request.queue_offset)
        # The client names the first append, but checks have appended the half message again.
        appended_again = (
            half is not None
            and half.first_log_offset == request.log_offset
            and half.queue_offset != half.first_offset
        )
        log_offset = half.log_offset if half is not None and appended_again else request.log_offset
        data = None if appended_again else self._read_now(request)
        if data is None or command.client in self._reads_in_flight:
            return self._end_after_read(command, request, log_offset, data)
        return self._end(command, request, data)

    def _end_after_read(
        self, command: Command, request: EndRequest, log_offset: int, data: bytes | None
    ) -> InThread:
        """Resolve a half message once its record is read; later requests of this client wait.

        A client that commits several transactions expects the messages in that order.
        """
        store, written, client = (
            self._context.store,
            self._context.store.log.written,
            command.client,
        )
        self._reads_in_flight[client] += 1

        def read() -> bytes | Exception | None:
            try:
                return store.lookup.record(log_offset, written)
            except Exception as error:  # raised in `end`, so that the next request can run
                return error

        def end(found: bytes | Exception | None) -> Answer:
            self._reads_in_flight[client] -= 1
            if not self._reads_in_flight[client]:
                del self._reads_in_flight[client]
            if isinstance(found, Exception):
                raise found
            return self._end(command, request, found if data is None else data)

        return InThread(read if data is None else None, end, ordered_by=("transactions", client))

    def _read_now(self, request: EndRequest) -> bytes | None:
        """The record that a request names, if it can be read without waiting for the disk."""
        queue, store = self._queues.queue, self._context.store
        if queue is None:
            return None
        reader = store.reader
        reader.set_tag_hashes(())  # remove the tag filter of the last pull
        status = reader.find(
            queue, request.queue_offset, 1, _RECORD_BYTES_MAX, store.confirm_offset
        )
        output = Output(1024)
        if status != FOUND or not reader.copy_to(output):
            return None
        return output.take()

    def _end(self, command: Command, request: EndRequest, data: bytes | None) -> Answer:
        record = read_half(data) if data is not None else None
        if record is None or data is None:
            raise Refused(f"there is no half message at log offset {request.log_offset}")
        half = self._find(request, record, command.now_ms)
        refusal = self._context.access.check_write(command, record.topic)
        if refusal is not None:
            return refusal
        if half is None:
            outcome = self.half_messages.outcome(record.first_offset)
            if outcome is not None:
                return self._reply_resolved(command, request, outcome)
            return self._look_up_outcome(command, request, record)
        if request.outcome is None:
            if request.from_check:
                self._checks.on_unknown(half, command.now_ms)
                self._checks.resume_checks(half.group, command.now_ms)
            return self._reply(command, "unknown: the transaction stays open and is checked later")
        self._refuse_late(request, half, record, command.now_ms)
        self._resolve(half, request.outcome, data, command.now_ms)
        self._checks.resume_checks(half.group, command.now_ms)
        self._ensure_stored(request.outcome, command.now_ms)
        return self._reply(command, _OUTCOME_NAMES[request.outcome])

    def _ensure_stored(self, outcome: int, now_ms: int) -> None:
        """Write a pending op message before a rollback is confirmed.

        A commit needs none: the committed message is stored already.
        """
        if outcome == ROLLED_BACK and self._queues.pending_ops:
            self._queues.write_ops(now_ms)
            if self._queues.pending_ops:
                raise NotWriteable("the rollback of the transaction can't be stored now")

    def _find(self, request: EndRequest, record: HalfRecord, now_ms: int) -> HalfMessage | None:
        """The open half message that a request names; raises Refused if the record differs."""
        if record.group != request.group:
            raise Refused(
                "the transaction belongs to another producer group",
                hint="end a transaction with the producer group that sent its message",
            )
        half = self.half_messages.find_by_record(record)
        if half is None:  # it may have been resolved while its newest append was read
            first_offset = (record.first_offset, self._queues.find_first_log_offset(record))
        else:
            first_offset = (half.first_offset, half.first_log_offset)
        named = (request.queue_offset, request.log_offset)
        if named not in ((record.queue_offset, record.log_offset), first_offset):
            raise Refused(
                f"the offsets do not match: the half message at log offset {record.log_offset} "
                f"has queue offset {record.queue_offset}"
            )
        return half or self._add_now(record, now_ms)

    def _add_now(self, record: HalfRecord, now_ms: int) -> HalfMessage | None:
        """Add a half message that `tick` has not read from the queue yet."""
        if record.queue_offset < self.half_messages.position or self.half_messages.is_known(
            record.queue_offset
        ):
            return None
        return self._checks.add(record, now_ms)

    def _refuse_late(
        self, request: EndRequest, half: HalfMessage, record: HalfRecord, now_ms: int
    ) -> None:
        """Refuse a late resolution: an immunity time is also the time limit, except for checks."""
        if request.from_check or not record.properties.get(PROPERTY_CHECK_IMMUNITY_SECONDS):
            return
        waited_ms = now_ms - half.first_store_ms
        immunity_ms = record.immunity_ms(self._context.settings.current)
        if waited_ms > immunity_ms:
            raise TransactionTooLate.over(
                "the immunity time is over: only the answer to a check resolves the transaction",
                figure=waited_ms,
                limit=immunity_ms,
                unit="ms",
                setting=PROPERTY_CHECK_IMMUNITY_SECONDS,
            )

    def _resolve(self, half: HalfMessage, outcome: int, data: bytes, now_ms: int) -> None:
        if outcome == ROLLED_BACK:
            self._resolution.roll_back(half, now_ms)
            return
        try:
            self._resolution.commit(half, data, now_ms)
        except NotWriteable:
            self._checks.postpone(half)
            raise

    # --- resolved transactions

    def _look_up_outcome(self, command: Command, request: EndRequest, record: HalfRecord) -> Answer:
        """Look up the outcome of a half message in the index: it is not in memory any more."""
        store, first_offset = self._context.store, record.first_offset
        log_end = store.log.written
        indexed = store.index is not None and record.key

        def search() -> int | None:
            if not indexed:
                return None
            log_offsets = {self._queues.find_first_log_offset(record), record.log_offset}
            found = _is_committed(store, record, log_offsets, log_end)
            return COMMITTED if found else ROLLED_BACK

        def answer(outcome: int | None) -> Answer:
            # It may have been resolved while the index was read.
            known = self.half_messages.outcome(first_offset)
            return self._reply_resolved(command, request, outcome if known is None else known)

        return InThread(search, answer)

    def _reply_resolved(self, command: Command, request: EndRequest, outcome: int | None) -> Answer:
        if outcome is None:
            return self._reply(command, REMARK_OUTCOME_UNKNOWN)
        if request.outcome not in (None, outcome):
            if outcome == COMMITTED:
                raise TransactionCommitted("the transaction is already committed")
            raise TransactionRolledBack("the transaction is already rolled back")
        self._ensure_stored(outcome, command.now_ms)
        return self._reply(command, f"already {_OUTCOME_NAMES[outcome]}")

    def _reply(self, command: Command, remark: str) -> Answer:
        """The response; under sync flush it is sent when the log has been flushed."""
        return (
            None
            if command.oneway
            else reply_when_flushed(self._context.store, command, Reply(remark=remark))
        )

    # --- resuming checks

    def resume_check(self, command: Command) -> Answer:
        """RESUME_CHECK_HALF_MESSAGE."""
        offset = decode_offset_id(command.text("msgId")).offset
        store, written = self._context.store, self._context.store.log.written

        def resume(data: bytes | None) -> Answer:
            if data is None:
                raise Refused(f"there is no message at log offset {offset}")
            return self._resume(command, data)

        return InThread(lambda: store.lookup.record(offset, written), resume)

    def _resume(self, command: Command, data: bytes) -> Answer:
        message = decode_message(data)
        topic = real_topic(message.topic, message.properties)
        refusal = self._context.access.check_topic(command, topic, Action.UPDATE)
        if refusal is not None:
            return refusal
        record = read_half(data)
        if record is None:
            return self._restore_discarded(command, data, message.topic)
        half = self.half_messages.find_by_record(record) or self._add_now(record, command.now_ms)
        if half is None:
            raise Refused(
                "the half message is already resolved",
                hint=f"if it was discarded, resume its copy in {TOPIC_TRANS_CHECK_MAX_TIME}",
            )
        self._checks.reset(half, command.now_ms)
        status = self._queues.append_again(half, data, command.now_ms)
        if status != PUT_OK:
            raise self._context.rewriter.fault(status)
        return self._reply(command, "the number of checks was reset")

    def _restore_discarded(self, command: Command, data: bytes, topic: str) -> Answer:
        """Store a discarded half message as a new one."""
        rewriter = self._context.rewriter
        if topic != TOPIC_TRANS_CHECK_MAX_TIME:
            raise Refused(f"the message is not a half message: its topic is {topic}")
        rewriter.read(data)
        properties = rewriter.properties()
        properties.pop(PROPERTY_TRANSACTION_PREPARED_QUEUE_OFFSET, None)
        properties[PROPERTY_TRANSACTION_CHECK_TIMES] = "0"
        status = rewriter.put(
            self._queues.make_queue(), command.now_ms, properties=properties, store_host=self._host
        )
        if status != PUT_OK:
            raise rewriter.fault(status)
        return self._reply(command, "the half message is open again")

    # --- time

    def tables(self) -> tuple[PersistentTable, ...]:
        return (self._queues.table,)

    def due(self) -> int:
        return self._due_ms

    def tick(self, now_ms: int) -> None:
        """Follow the queue of half messages and send the checks that are due."""
        if self._queues.pending_ops:
            self._queues.write_ops(now_ms)
        more_ms = self._queues.follow(now_ms, partial(self._checks.add, now_ms=now_ms))
        self._due_ms = min(more_ms, self._checks.tick(now_ms))
        self._queues.save_progress(now_ms)

    def clock_stepped(self, step_ms: int) -> None:
        """The clock was set."""
        self._checks.clock_stepped(step_ms)
        self._due_ms = 0

    def finish(self, now_ms: int) -> None:
        """Store the progress before the broker stops."""
        self._queues.save_progress(now_ms)

    def pinned_from(self) -> int | None:
        """Log offset that retention must keep: that of the oldest open half message, if any."""
        oldest, queue = self.half_messages.oldest(), self._queues.queue
        behind = queue is not None and self.half_messages.position < queue.max_offset
        pins = [oldest.log_offset] if oldest is not None else []
        return min([*pins, self._queues.followed_to]) if behind else min(pins, default=None)

    # --- metrics

    def add_metrics(self, registry: Registry) -> None:
        registry.gauge(
            "rocketmq_half_messages",
            "Open half messages.",
            ("topic",),
            read=lambda: [((topic,), count) for topic, count in self.half_messages.topics.items()],
        )
        self._resolution.add_metrics(registry)
        self._checks.add_metrics(registry)


def _is_committed(
    store: MessageStore, record: HalfRecord, log_offsets: set[int], log_end: int
) -> bool:
    """Whether the log holds the committed message of a half message; waits for the disk."""
    stored = StoredRecord()
    # Apache's brokers do not name the first append of a half message that they append again.
    any_offset = record.checks > 0 and record.first_offset == record.queue_offset
    first_store_ms = min(record.born_ms, record.store_ms) - _BEFORE_MS
    for topic in (record.topic, TOPIC_SCHEDULE, TOPIC_TIMER):
        found = store.lookup.by_key(
            topic,
            record.key,
            begin_ms=first_store_ms,
            end_ms=_ANY_MS,
            most=QUERY_MAX,
            confirm_offset=log_end,
        )
        for data in found:
            stored.bind(memoryview(bytearray(data)))
            stored.read(0, len(data))
            committed = stored.sys_flag & SYS_TRANSACTION_MASK == SYS_TRANSACTION_COMMIT
            if committed and (any_offset or stored.prepared_offset in log_offsets):
                return True
    return False
