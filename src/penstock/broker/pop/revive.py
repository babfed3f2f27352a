"""Lent messages that nobody has acknowledged in time: each is copied to the group's retry topic.

The copy counts one consumption more and notes when the message was first popped; the topic is found
again in the retry topic's name. First the copy is stored, then the journal is told that the message
is done with its batch: a crash between the two brings it twice, never not at all.

Messages are read by the loop where they are in memory, else by the pool, one piece at a time. A
turn copies a bounded number.
"""

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from penstock.broker.context import BrokerContext
from penstock.broker.pop.checkpoints import NEVER, Loan
from penstock.broker.pop.revive_log import Journal
from penstock.errors import PenstockError, RecordError
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.get import COLD, FOUND, Reader
from penstock.store.put import ILLEGAL, PUT_OK
from penstock.wire.codes import PERM_READ_WRITE, PROPERTY_FIRST_POP_TIME, RETRY_TOPIC_PREFIX
from penstock.wire.output import Output
from penstock.wire.receipt_handle import RetryKind, plain_topic, retry_topic

log = logging.getLogger(__name__)

TICK_MESSAGES_MAX: Final = 64
TICK_BYTES_MAX: Final = 1024 * 1024
"""Messages copied before others have their turn."""
PIECE_BYTES_MAX: Final = 256 * 1024
"""Messages of a batch that are read at once: at least one, however long it is."""
POLL_MS: Final = 5
"""How often a read that waits for the disk is asked for."""
RETRY_MS: Final = 100
"""After a store that refused."""
UNREADABLE_MS: Final = 1_000
"""After a read that failed; others have their turn meanwhile."""


@dataclass(slots=True)
class Piece:
    """Some messages of a batch, as records; None for those that are gone."""

    loan: Loan
    records: list[tuple[int, bytes | None]] = field(default_factory=list)  # by offset


class Revive:
    """Brings back what was not acknowledged."""

    def __init__(
        self,
        context: BrokerContext,
        journal: Journal,
        host: bytes,
        prepare: Callable[[str, str, ConsumeQueue], None],
    ) -> None:
        self._context = context
        self._store = context.store
        self._journal = journal
        self._loans = journal.loans
        self._host = host
        self._prepare = prepare  # told of topic, group and the retry queue that gets a message
        self._reading: tuple[Loan, Future[Piece]] | None = None
        self._wait_to_ms = 0
        self._refused = False
        self.retried: Counter[tuple[str, str]] = Counter()  # by (group, topic)
        self.lost = 0
        self.late_ms = 0  # of the last one

    def due(self) -> int:
        """When something is to be brought back, or looked for."""
        due_ms = self._loans.due()
        return NEVER if due_ms == NEVER else max(due_ms, self._wait_to_ms)

    def tick(self, now_ms: int) -> None:
        """Bring back what is due, within limits."""
        if now_ms < self._wait_to_ms <= now_ms + RETRY_MS:
            return
        messages, space = TICK_MESSAGES_MAX, TICK_BYTES_MAX
        while messages > 0 and space > 0:
            piece = self._next_piece(now_ms)
            if piece is None:
                return
            copied, size = self._bring_back(piece, now_ms)
            messages, space = messages - max(copied, 1), space - size
            if self._refused:
                self._wait_to_ms = now_ms + RETRY_MS
                return

    # --- reading

    def _next_piece(self, now_ms: int) -> Piece | None:
        """Messages that are due; None if there are none, or the disk is waited for."""
        if self._reading is not None:
            loan, done = self._reading
            if not done.done():
                self._wait_to_ms = now_ms + POLL_MS
                return None
            self._reading = None
            error = done.exception()
            return done.result() if error is None else self._put_off(loan, error, now_ms)
        due = self._loans.first_due(now_ms)
        return None if due is None else self._begin_piece(due, now_ms)

    def _begin_piece(self, loan: Loan, now_ms: int) -> Piece | None:
        """Messages of a batch, none if there is nothing to bring back; None if the disk is waited
        for."""
        why = self._void(loan, now_ms)
        if why is not None:
            log.warning("%d lent messages are not brought back: %s", loan.lent(), why)
            self._loans.close(loan)
            return Piece(loan)
        queue = self._store.queue(loan.key.topic, loan.key.queue_id)
        assert queue is not None
        offsets, confirmed = loan.open_offsets(), self._store.confirmed
        try:
            piece = _read(loan, self._store.fresh_reader(), queue, offsets, confirmed, False)
        except OSError as error:
            return self._put_off(loan, error, now_ms)
        if piece is None:
            reader = self._store.fresh_reader()
            job = self._store.disk.submit(
                lambda: _waited(_read(loan, reader, queue, offsets, confirmed, True))
            )
            self._reading = loan, job
            self._wait_to_ms = now_ms + POLL_MS
        return piece

    def _put_off(self, loan: Loan, error: BaseException, now_ms: int) -> Piece:
        """A batch that can't be read keeps no other back."""
        log.error("messages lent from %s can't be read: %s", loan.key.topic, error)
        if loan.open:
            self._loans.set_due(loan, now_ms + UNREADABLE_MS)
        return Piece(loan)

    def _void(self, loan: Loan, now_ms: int) -> str | None:
        """Why a batch does not matter any more, or None."""
        key = loan.key
        plain = plain_topic(key.topic, key.group)
        if self._context.topics.get(plain) is None or self._journal.is_deleted(loan):
            return f"the topic {plain} was deleted"
        if self._store.queue(key.topic, key.queue_id) is None:
            return f"{key.topic} has no queue {key.queue_id} any more"
        try:
            self._context.groups.find(key.group, now_ms)
        except PenstockError as error:
            return error.remark()
        return None

    # --- copying

    def _bring_back(self, piece: Piece, now_ms: int) -> tuple[int, int]:
        """Copy messages to the retry topic; how many, and their bytes."""
        loan, done, size = piece.loan, [], 0
        self._refused = False
        for offset, data in piece.records:
            if not loan.open or loan.acked & loan.bit_of(offset):
                continue  # acknowledged while it was read
            if data is None:
                self.lost += 1
                log.warning(
                    "the message %d of queue %d of %s, lent to %s, is gone: it is not brought back",
                    offset,
                    loan.key.queue_id,
                    loan.key.topic,
                    loan.key.group,
                )
            elif not self._copy(loan, data, now_ms):
                self._refused = True
                break
            else:
                size += len(data)
                self.late_ms = max(now_ms - loan.key.pop_ms - loan.invisible_ms, 0)
            done.append(offset)
        if done:
            try:
                self._journal.ack(loan, done, now_ms)
            except PenstockError as error:
                # They are stored: what is not noted is only brought back twice after a crash.
                log.error("copies of lent messages can't be noted: %s", error)
                self._journal.cover_log()
                for offset in done:
                    self._loans.ack(loan, loan.bit_of(offset))
                self._refused = True
        return len(done), size

    def _copy(self, loan: Loan, data: bytes, now_ms: int) -> bool:
        """Store a message in the retry topic; False if the store refuses for now."""
        key, rewriter = loan.key, self._context.rewriter
        if not rewriter.read(data):
            self.lost += 1
            log.error("the message at the log offset %d is damaged", loan.place)
            return True
        try:
            queue = self._retries(key.topic, key.group, now_ms)
        except PenstockError as error:
            self.lost += 1
            log.error("a message lent to %s has no way back: %s", key.group, error)
            return True
        properties = rewriter.properties()
        properties.setdefault(PROPERTY_FIRST_POP_TIME, str(key.pop_ms))
        reconsumed = rewriter.stored.reconsume_times + 1
        try:
            status = rewriter.put(
                queue, now_ms, properties=properties, reconsumed=reconsumed, store_host=self._host
            )
        except RecordError:  # its properties have no room for one more
            status = rewriter.put(queue, now_ms, reconsumed=reconsumed, store_host=self._host)
        if status == ILLEGAL:
            self.lost += 1
            log.error("a lent message can't be stored again: %s", rewriter.fault(status))
            return True
        if status != PUT_OK:
            if not self._refused:
                log.error("lent messages have to wait: %s", self._store.path.fault)
            return False
        self.retried[key.group, key.topic] += 1
        return True

    def _retries(self, topic: str, group: str, now_ms: int) -> ConsumeQueue:
        """The queue of a group's retry topic for messages of this topic."""
        context = self._context
        name = topic
        if not topic.startswith(RETRY_TOPIC_PREFIX):
            v2 = context.settings.current.broker.pop_retry_topic_v2
            name = retry_topic(topic, group, RetryKind.V2 if v2 else RetryKind.V1)
        context.topics.ensure(name, 1, PERM_READ_WRITE, now_ms)
        if context.offsets.get(group, name, 0) is None:
            context.offsets.commit(group, name, 0, 0, now_ms)
        queue = context.store.make_queue(name.encode(), 0)
        assert queue is not None
        self._prepare(plain_topic(topic, group), group, queue)
        return queue


def _read(
    loan: Loan, reader: Reader, queue: ConsumeQueue, offsets: list[int], confirmed: int, wait: bool
) -> Piece | None:
    """Have the first of these messages; None if that would wait for the disk and may not. It
    changes nothing: it may run in the pool."""
    piece, size = Piece(loan), 0
    for offset in offsets:
        if size >= PIECE_BYTES_MAX:
            break
        status = reader.find(queue, offset, 1, PIECE_BYTES_MAX, confirmed, wait)
        if status == COLD:
            return None
        data = None
        if status == FOUND and reader.next_offset == offset + 1:
            output = Output(reader.total + 1)
            if reader.copy_to(output, wait):
                data = output.take()
            elif not wait:
                return None
        piece.records.append((offset, data))
        size += len(data or b"")
    return piece


def _waited(piece: Piece | None) -> Piece:
    assert piece is not None, "a read that may wait has an outcome"
    return piece
