"""Revive: messages that were not acknowledged in time are copied to the group's retry topic.

The copy has one more reconsume time, the time of the first pop and the name of the group, because
several groups may share the retry topic (`filter.retry_filter`). The copy is stored first, then the
ack is written to the revive log. A crash between the two delivers a message twice, but never loses
it.

Messages in memory are read at once, others in the thread pool, one batch at a time. A tick copies a
bounded number.
"""

import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from penstock.broker.context import BrokerContext
from penstock.broker.pop.checkpoints import NEVER, CheckpointKey, PopCheckpoint
from penstock.broker.pop.revive_log import ReviveLog
from penstock.errors import PenstockError, RecordError
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.get import COLD, FOUND, Reader
from penstock.store.put import ILLEGAL, PUT_OK
from penstock.wire.codes import (
    PERM_READ_WRITE,
    PROPERTY_FIRST_POP_TIME,
    PROPERTY_ORIGIN_GROUP,
    PROPERTY_RETRY_TOPIC,
    RETRY_TOPIC_PREFIX,
)
from penstock.wire.output import Output
from penstock.wire.receipt_handle import RetryKind, plain_topic, retry_topic

log = logging.getLogger(__name__)

TICK_MESSAGES_MAX: Final = 64
TICK_BYTES_MAX: Final = 1024 * 1024
"""Messages that one tick copies."""
READ_BYTES_MAX: Final = 256 * 1024
"""Bytes that are read at once: at least one message, whatever its size."""
POLL_MS: Final = 5
"""Interval at which a read in the thread pool is polled."""
RETRY_MS: Final = 100
"""Pause after the store refused a message."""
UNREADABLE_MS: Final = 1_000
"""Pause of a checkpoint after a failed read; others continue meanwhile."""


@dataclass(slots=True)
class ReviveBatch:
    """Records of a checkpoint's messages; None for those that were deleted."""

    checkpoint: PopCheckpoint
    records: list[tuple[int, bytes | None]] = field(default_factory=list)  # by offset


class Revive:
    """Copies messages to retry topics when their invisible time is over."""

    def __init__(
        self,
        context: BrokerContext,
        revive_log: ReviveLog,
        host: bytes,
        on_retry_queue: Callable[[str, str, ConsumeQueue], None],
    ) -> None:
        self._context = context
        self._store = context.store
        self._revive_log = revive_log
        self._checkpoints = revive_log.checkpoints
        self._host = host
        self._on_retry_queue = (
            on_retry_queue  # called with topic, group and the retry queue before a put
        )
        self._reading: tuple[PopCheckpoint, Future[ReviveBatch]] | None = None
        self._paused_until_ms = 0
        self._refused = False
        self.retried: Counter[tuple[str, str]] = Counter()  # by (group, topic)
        self.lost = 0
        self.latency_ms = 0  # of the last message

    def due(self) -> int:
        """When the next messages are due, or a read is polled."""
        due_ms = self._checkpoints.due()
        return NEVER if due_ms == NEVER else max(due_ms, self._paused_until_ms)

    def tick(self, now_ms: int) -> None:
        """Revive the messages that are due, up to the limits of a tick."""
        if now_ms < self._paused_until_ms <= now_ms + RETRY_MS:
            return
        messages, space = TICK_MESSAGES_MAX, TICK_BYTES_MAX
        while messages > 0 and space > 0:
            batch = self._next_batch(now_ms)
            if batch is None:
                return
            revived, size = self._revive_batch(batch, now_ms)
            messages, space = messages - max(revived, 1), space - size
            if self._refused:
                self._paused_until_ms = now_ms + RETRY_MS
                return

    # --- reading

    def _next_batch(self, now_ms: int) -> ReviveBatch | None:
        """Messages that are due; None if there are none, or if a read is in flight."""
        if self._reading is not None:
            checkpoint, done = self._reading
            if not done.done():
                self._paused_until_ms = now_ms + POLL_MS
                return None
            self._reading = None
            error = done.exception()
            return done.result() if error is None else self._postpone(checkpoint, error, now_ms)
        due = self._checkpoints.first_due(now_ms)
        return None if due is None else self._read_checkpoint(due, now_ms)

    def _read_checkpoint(self, checkpoint: PopCheckpoint, now_ms: int) -> ReviveBatch | None:
        """Read messages of a checkpoint; None if the read has to wait for the disk."""
        why = self._discard_reason(checkpoint, now_ms)
        if why is not None:
            log.warning(
                "%d messages in flight are not revived: %s", checkpoint.in_flight_count(), why
            )
            self._checkpoints.close(checkpoint)
            return ReviveBatch(checkpoint)
        queue = self._store.queue(checkpoint.key.topic, checkpoint.key.queue_id)
        assert queue is not None
        offsets, confirm_offset = checkpoint.open_offsets(), self._store.confirm_offset
        try:
            batch = _read(
                checkpoint, self._store.new_reader(), queue, offsets, confirm_offset, False
            )
        except OSError as error:
            return self._postpone(checkpoint, error, now_ms)
        if batch is None:
            reader = self._store.new_reader()
            job = self._store.disk.submit(
                lambda: _require(_read(checkpoint, reader, queue, offsets, confirm_offset, True))
            )
            self._reading = checkpoint, job
            self._paused_until_ms = now_ms + POLL_MS
        return batch

    def _postpone(
        self, checkpoint: PopCheckpoint, error: BaseException, now_ms: int
    ) -> ReviveBatch:
        """Postpone a checkpoint that can't be read, so that it does not block others."""
        log.error("can't read messages in flight of %s: %s", checkpoint.key.topic, error)
        if checkpoint.open:
            self._checkpoints.set_due(checkpoint, now_ms + UNREADABLE_MS)
        return ReviveBatch(checkpoint)

    def _discard_reason(self, checkpoint: PopCheckpoint, now_ms: int) -> str | None:
        """Why a checkpoint is discarded, or None."""
        key = checkpoint.key
        plain = plain_topic(key.topic, key.group)
        if self._context.topics.get(plain) is None or self._revive_log.is_deleted(checkpoint):
            return f"the topic {plain} was deleted"
        if self._store.queue(key.topic, key.queue_id) is None:
            return f"the topic {key.topic} no longer has queue {key.queue_id}"
        try:
            self._context.groups.find(key.group, now_ms)
        except PenstockError as error:
            return error.remark()
        return None

    # --- copies

    def _revive_batch(self, batch: ReviveBatch, now_ms: int) -> tuple[int, int]:
        """Copy messages to the retry topic; returns their number and bytes."""
        checkpoint, done, size = batch.checkpoint, [], 0
        self._refused = False
        for offset, data in batch.records:
            if not checkpoint.open or checkpoint.acked & checkpoint.bit_of(offset):
                continue  # acknowledged during the read
            if data is None:
                self.lost += 1
                log.warning(
                    "can't revive message %d of queue %d of %s for group %s: "
                    "it was deleted or is damaged",
                    offset,
                    checkpoint.key.queue_id,
                    checkpoint.key.topic,
                    checkpoint.key.group,
                )
            elif not self._put_retry(checkpoint, data, now_ms):
                self._refused = True
                break
            else:
                size += len(data)
                self.latency_ms = max(now_ms - checkpoint.key.pop_ms - checkpoint.invisible_ms, 0)
            done.append(offset)
        if done:
            try:
                self._revive_log.ack(checkpoint, done, now_ms)
            except PenstockError as error:
                # The copies are stored: without the ack a crash only delivers them twice.
                log.error("can't write the acks of revived messages: %s", error)
                self._revive_log.require_flush()
                for offset in done:
                    self._checkpoints.ack(checkpoint, checkpoint.bit_of(offset))
                self._refused = True
        return len(done), size

    def _put_retry(self, checkpoint: PopCheckpoint, data: bytes, now_ms: int) -> bool:
        """Put a message into the retry topic; False if the store refuses it for now."""
        key, rewriter = checkpoint.key, self._context.rewriter
        if not rewriter.read(data):
            self.lost += 1
            log.error("the message at log offset %d is damaged", checkpoint.log_offset)
            return True
        try:
            queue = self._retry_queue(key.topic, key.group, now_ms)
        except PenstockError as error:
            self.lost += 1
            log.error("can't revive a message for group %s: %s", key.group, error)
            return True
        status = self._put_copy(key, queue, now_ms)
        if status == ILLEGAL:
            self.lost += 1
            log.error("can't revive a message for group %s: %s", key.group, rewriter.fault(status))
            return True
        if status != PUT_OK:
            if not self._refused:
                log.error("can't store revived messages, will retry: %s", self._store.writer.fault)
            return False
        self.retried[key.group, key.topic] += 1
        return True

    def _put_copy(self, key: CheckpointKey, queue: ConsumeQueue, now_ms: int) -> int:
        """Put the message that was read into a queue, with as many of the new properties as there
        is room for."""
        rewriter = self._context.rewriter
        properties = rewriter.properties()
        group = {PROPERTY_ORIGIN_GROUP: key.group}
        pop_time = {
            PROPERTY_FIRST_POP_TIME: properties.get(PROPERTY_FIRST_POP_TIME, str(key.pop_ms))
        }
        properties.pop(PROPERTY_ORIGIN_GROUP, None)  # of the sender, or of the last revival
        status = ILLEGAL
        for added in (pop_time | group, group, {}):
            if not added:  # else it would be taken for a message that a consumer sent back
                properties.pop(PROPERTY_RETRY_TOPIC, None)
            try:
                status = rewriter.put(
                    queue,
                    now_ms,
                    properties=properties | added,
                    reconsumed=rewriter.stored.reconsume_times + 1,
                    store_host=self._host,
                )
            except RecordError:  # no room for another property
                continue
            if status != ILLEGAL:
                break
        return status

    def _retry_queue(self, topic: str, group: str, now_ms: int) -> ConsumeQueue:
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
        self._on_retry_queue(plain_topic(topic, group), group, queue)
        return queue


def _read(
    checkpoint: PopCheckpoint,
    reader: Reader,
    queue: ConsumeQueue,
    offsets: list[int],
    confirm_offset: int,
    wait: bool,
) -> ReviveBatch | None:
    """Read the first of these messages; None if it needs the disk and may not wait.

    Changes no state, so it may run in the thread pool.
    """
    batch, size = ReviveBatch(checkpoint), 0
    for offset in offsets:
        if size >= READ_BYTES_MAX:
            break
        status = reader.find(queue, offset, 1, READ_BYTES_MAX, confirm_offset, wait)
        if status == COLD:
            return None
        data = None
        if status == FOUND and reader.next_offset == offset + 1:
            output = Output(reader.total + 1)
            if reader.copy_to(output, wait):
                data = output.take() or None  # it is damaged
            elif not wait:
                return None
        batch.records.append((offset, data))
        size += len(data or b"")
    return batch


def _require(batch: ReviveBatch | None) -> ReviveBatch:
    assert batch is not None, "a read that may wait returns a batch"
    return batch
