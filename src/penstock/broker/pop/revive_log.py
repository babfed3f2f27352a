"""The revive log: checkpoints and acks as messages of the topic rmq_sys_REVIVE_LOG_<cluster>.

| Tag | Body | Written when |
|---|---|---|
| `ck` | PopCheckPoint | messages are popped; again if they stay in flight while the log grows |
| `ack`, `bAck` | AckMsg, BatchAckMsg | messages are acknowledged or revived |
| `order` | OrderedPop | a queue is popped in order, or messages of that pop are acknowledged |

The bodies are RocketMQ's, except the last one, which its brokers ignore. RocketMQ's brokers send
these messages through the timer, so that they appear when the invisible time is over. Penstock
appends them at once and keeps the open checkpoints in memory. After a restart the log is read from
the offset of the group CID_RMQ_SYS_REVIVE_GROUP on, which never passes the entry of an open
checkpoint.

A pop moves the group's offset; the entry contains the new offset (POP_NEXT). The table of consumer
offsets also contains the position in the revive log that it covers (as offsets of the group
CID_RMQ_SYS_REVIVE_PLACES), so a restart knows which entries are newer than the offsets and applies
them. The table is saved only after the revive log has been flushed up to that position, so an
offset is never ahead of its checkpoint. The file of ordered pops is saved before it, so it never
lags behind the offsets.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from penstock.broker.context import BrokerContext
from penstock.broker.pop.checkpoints import (
    CHECKPOINT_MESSAGES_MAX,
    CheckpointKey,
    PopCheckpoint,
    PopCheckpoints,
)
from penstock.broker.pop.ordered_pop import GroupQueue, OrderedPops
from penstock.broker.pop.revive_writer import NEXT_PROPERTY, NO_OFFSET, ReviveWriter
from penstock.errors import BodyError, PenstockError
from penstock.rpc.answers import TickAt
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.get import FOUND
from penstock.wire.bodies.pop_bodies import (
    AckMsg,
    OrderedPop,
    decode_ack,
    decode_acks,
    decode_check_point,
    decode_ordered_pop,
)
from penstock.wire.codes import PROPERTY_TAGS, REVIVE_TOPIC_PREFIX
from penstock.wire.java_numbers import parse_nonnegative
from penstock.wire.message import decode_properties
from penstock.wire.record import RECORD, StoredRecord

log = logging.getLogger(__name__)

REVIVE_GROUP: Final = "CID_RMQ_SYS_REVIVE_GROUP"
POSITIONS_GROUP: Final = "CID_RMQ_SYS_REVIVE_PLACES"

REWRITE_AFTER: Final = 1_024
"""A checkpoint is written again when this many entries follow it, plus four per open checkpoint, so
that rewriting costs only a fraction of the log."""
REWRITES_MAX: Final = 16
"""Checkpoints of a queue that one tick writes again."""
_READ_MESSAGES: Final = 512
_READ_BYTES: Final = 1024 * 1024
_TIMER_GRACE_MS: Final = 3_000
"""RocketMQ's brokers deliver acks a second after their checkpoint."""
_TIMER_MARK: Final = "TIMER_OUT_MS"  # set on messages that a timer delivered
_OFFSET_MAX: Final = 1 << 62
_encode: Final = msgspec.json.encode


class ReviveEntry(NamedTuple):
    """A message of the revive log."""

    queue_offset: int
    log_offset: int
    properties: dict[str, str]
    body: bytes

    @property
    def next_offset(self) -> int | None:
        """The new offset of the group, if the entry contains one."""
        return parse_nonnegative(self.properties.get(NEXT_PROPERTY, ""))


class ReviveLog:
    """Writes and reads the revive log; keeps checkpoints and ordered pops consistent with it."""

    def __init__(self, context: BrokerContext, host: bytes, order: OrderedPops) -> None:
        self._context = context
        self._order = order
        self._store = context.store
        broker = context.settings.current.broker
        self.topic = REVIVE_TOPIC_PREFIX + broker.cluster
        config = context.topics.need(self.topic)
        self.queues = [self._queue(queue_id) for queue_id in range(max(config.write_queue_nums, 1))]
        self.checkpoints = PopCheckpoints(len(self.queues))
        self.writer = ReviveWriter(
            context.store.writer, self.queues, self.checkpoints, broker.name, host
        )
        self._read_to = self.writer.read_to
        self._committed = [-1] * len(self.queues)
        self.from_other_broker = True  # the store has no sign that Penstock popped from it
        self._round_robin = 0
        self.entries_read: Counter[tuple[str, str, str]] = Counter()
        context.persistence.before(context.offsets.table.FILE, self._before_offsets_are_saved)
        self._recover(context.started_ms)

    def _queue(self, queue_id: int) -> ConsumeQueue:
        queue = self._store.make_queue(self.topic.encode(), queue_id)
        assert queue is not None
        return queue

    # --- writing

    def next_queue(self) -> int:
        """The queue of the revive log for the next pop."""
        self._round_robin = (self._round_robin + 1) % len(self.queues)
        return self._round_robin

    def add_checkpoint(
        self, checkpoint: PopCheckpoint, now_ms: int, next_offset: int | None = None
    ) -> None:
        """Write and add a checkpoint; the group's offset becomes `next_offset`, if given.

        Raises the error of the store if it can't be written.
        """
        self.writer.add(checkpoint, now_ms, NO_OFFSET if next_offset is None else next_offset)
        if self.checkpoints.due() == checkpoint.due_ms:
            self._context.effects.put(TickAt(checkpoint.due_ms))
        if next_offset is not None:
            self._commit_offset(
                checkpoint.key,
                next_offset,
                checkpoint.revive_queue_id,
                checkpoint.revive_offset,
                now_ms,
            )

    def ack(self, checkpoint: PopCheckpoint, offsets: Sequence[int], now_ms: int) -> int:
        """Write and apply acks of a checkpoint; returns how many messages were in flight."""
        bits = 0
        for offset in offsets:
            bits |= checkpoint.bit_of(offset)
        return self.writer.ack(checkpoint, bits, now_ms)

    def ack_unknown(
        self, key: CheckpointKey, queue_id: int, offsets: Sequence[int], now_ms: int
    ) -> None:
        """Write acks of a checkpoint of another broker, which its timer has not delivered yet."""
        self.writer.write_acks(key, queue_id, list(offsets)[:CHECKPOINT_MESSAGES_MAX], now_ms)
        self.checkpoints.ack_early(key, offsets)

    def record_ordered_pop(self, queue: GroupQueue, next_offset: int, now_ms: int) -> None:
        """Write the open ordered pop of a queue; the group's offset becomes `next_offset`.

        Raises the error of the store if it can't be written.
        """
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
        entry = self.writer.write(body, "order", queue_id, now_ms)
        self._commit_offset(queue, next_offset, queue_id, entry, now_ms)

    def require_flush(self) -> None:
        """Require the log to be flushed up to its current end before offsets are saved."""
        self.writer.flush_to = self._store.log.end

    # --- consumer offsets

    def _commit_offset(
        self,
        key: CheckpointKey | GroupQueue,
        next_offset: int,
        queue_id: int,
        entry: int,
        now_ms: int,
    ) -> None:
        """Set the group's offset, and the position in the revive log that the offsets cover."""
        offsets = self._context.offsets
        offsets.commit(key.group, key.topic, key.queue_id, next_offset, now_ms)
        offsets.table.commit(self.topic, POSITIONS_GROUP, queue_id, entry + 1, now_ms)

    def _before_offsets_are_saved(self) -> Callable[[], None] | None:
        """The work that has to precede saving the table of offsets."""
        store, end = self._store, self.writer.flush_to
        save = self._context.persistence.save(self._order) if self._order.dirty else None
        if store.flusher.flushed() >= end:
            return save
        store.writer.publish()  # write what was put in this loop iteration

        def work() -> None:
            store.sync_log(end)
            if save is not None:
                save()

        return work

    # --- the oldest entry that is needed

    def tick(self, now_ms: int) -> None:
        """Store which entries are no longer needed; rewrite checkpoints that lag behind."""
        table = self._context.offsets.table
        for queue_id, queue in enumerate(self.queues):
            self._rewrite_checkpoints(queue_id, queue, now_ms)
            oldest = self.checkpoints.oldest(queue_id)
            first_needed = self._read_to[queue_id] if oldest is None else oldest.revive_offset
            # RocketMQ stores the offset of the last finished entry, not of the next one to read.
            if first_needed > 0 and self._committed[queue_id] != first_needed - 1:
                self._committed[queue_id] = first_needed - 1
                table.commit(self.topic, REVIVE_GROUP, queue_id, first_needed - 1, now_ms)

    def _rewrite_checkpoints(self, queue_id: int, queue: ConsumeQueue, now_ms: int) -> None:
        span_max = REWRITE_AFTER + 4 * self.checkpoints.open_by_queue[queue_id]
        for _ in range(REWRITES_MAX):
            oldest = self.checkpoints.oldest(queue_id)
            if oldest is None or queue.max_offset - oldest.revive_offset <= span_max:
                return
            if self.is_deleted(oldest):
                self.checkpoints.close(oldest)
                continue
            try:
                self.writer.write_checkpoint(oldest, now_ms)
            except PenstockError as error:
                log.warning("can't rewrite a POP checkpoint, will retry: %s", error)
                return
            self.checkpoints.rewritten(oldest)

    def is_deleted(self, checkpoint: PopCheckpoint) -> bool:
        """Whether the topic was deleted since; a new topic of that name has other messages."""
        return checkpoint.revive_log_offset < self._store.deleted_below(
            checkpoint.key.topic.encode()
        )

    def lag(self, queue_id: int) -> int:
        """The number of entries since the oldest open checkpoint."""
        oldest = self.checkpoints.oldest(queue_id)
        return 0 if oldest is None else self._read_to[queue_id] - oldest.revive_offset

    # --- recovery

    def _recover(self, now_ms: int) -> None:
        """Read the open checkpoints at start; waits for the disk."""
        replays: list[tuple[int, int, int, CheckpointKey | OrderedPop, int]] = []
        for queue_id, queue in enumerate(self.queues):
            done = self._context.offsets.get(REVIVE_GROUP, self.topic, queue_id)
            replay_from = self._context.offsets.get(POSITIONS_GROUP, self.topic, queue_id) or 0
            self.from_other_broker &= replay_from == 0
            self._read_to[queue_id] = max(0 if done is None else done + 1, queue.min_offset)
            for entry in self._entries(queue_id, queue.max_offset):
                target = self._apply(entry, queue_id, now_ms)
                offset = target.next_offset if isinstance(target, OrderedPop) else entry.next_offset
                if target is not None and offset is not None and entry.queue_offset >= replay_from:
                    replays.append((entry.log_offset, queue_id, entry.queue_offset, target, offset))
            self._read_to[queue_id] = queue.max_offset
        self.from_other_broker &= not replays
        for log_offset, queue_id, queue_offset, target, offset in sorted(
            replays, key=lambda move: move[0]
        ):
            if log_offset >= self._store.deleted_below(target.topic.encode()):
                self._replay_offset(target, offset, queue_id, queue_offset, now_ms)
        for checkpoint in list(self.checkpoints):
            row = self._store.queue(checkpoint.key.topic, checkpoint.key.queue_id)
            found = None if row is None else row.entry(checkpoint.open_offsets()[0])
            checkpoint.log_offset = (
                checkpoint.revive_log_offset
                if found is None
                else min(found[0], checkpoint.revive_log_offset)
            )
        self.checkpoints.on_clock_set_back(now_ms)
        self._order.on_clock_set_back(now_ms)
        if len(self.checkpoints):
            log.info("%d POP checkpoints are open", len(self.checkpoints))

    def _replay_offset(
        self,
        target: CheckpointKey | OrderedPop,
        offset: int,
        queue_id: int,
        queue_offset: int,
        now_ms: int,
    ) -> None:
        """Apply the offset of an entry that is newer than the saved offsets."""
        if isinstance(target, OrderedPop):
            queue = GroupQueue(target.topic, target.consumer_group, target.queue_id)
            self._order.restore(queue, target.open_pop)
            self._commit_offset(queue, offset, queue_id, queue_offset, now_ms)
        else:
            self._commit_offset(target, offset, queue_id, queue_offset, now_ms)

    def read_new_entries(self, now_ms: int) -> None:
        """Read the entries of another broker that its timer has delivered."""
        for queue_id, queue in enumerate(self.queues):
            end = queue.visible_max(self._store.confirm_offset)
            if self._read_to[queue_id] < end:
                # They are new, so they are in memory; entries of this broker are applied already.
                for entry in self._entries(queue_id, end):
                    if _TIMER_MARK in entry.properties:
                        self._apply(entry, queue_id, now_ms)

    def _entries(self, queue_id: int, end: int) -> Iterator[ReviveEntry]:
        """The entries of a queue that have not been read yet."""
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

    def _apply(
        self, entry: ReviveEntry, queue_id: int, now_ms: int
    ) -> CheckpointKey | OrderedPop | None:
        """Apply an entry; returns the checkpoint's key or the ordered pop, if it is one."""
        tag = entry.properties.get(PROPERTY_TAGS)
        try:
            if tag == "ck":
                return self._apply_check_point(entry, queue_id, now_ms)
            if tag == "order":  # applied if it is newer than the offsets
                return decode_ordered_pop(entry.body)
            if tag == "ack":
                ack = decode_ack(entry.body)
                self._apply_acks(ack, [ack.ack_offset])
            elif tag == "bAck":
                acks = decode_acks(entry.body)
                self._apply_acks(acks, acks.ack_offsets)
        except PenstockError as error:
            log.warning(
                "can't read entry %d in queue %d of the revive log: %s",
                entry.queue_offset,
                queue_id,
                error,
            )
        return None

    def _apply_check_point(
        self, entry: ReviveEntry, queue_id: int, now_ms: int
    ) -> CheckpointKey | None:
        ck = decode_check_point(entry.body)
        self.entries_read[ck.consumer_group, ck.topic, "CK"] += 1
        key = CheckpointKey(ck.topic, ck.consumer_group, ck.queue_id, ck.start_offset, ck.pop_time)
        checkpoint = self.checkpoints.get(key)
        offsets = list(ck.offsets())[:CHECKPOINT_MESSAGES_MAX]
        if checkpoint is None:
            if not offsets or offsets != sorted(set(offsets)) or not 0 <= offsets[-1] < _OFFSET_MAX:
                raise BodyError(
                    f"the checkpoint of {ck.topic[:80]} has invalid offsets ({offsets[:3]}, …)"
                )
            checkpoint = PopCheckpoint(key, max(ck.invisible_time, 0), offsets, queue_id)
            checkpoint.acked = ck.bit_map & ((1 << len(offsets)) - 1)
            checkpoint.revive_offset, checkpoint.revive_log_offset = (
                entry.queue_offset,
                entry.log_offset,
            )
            checkpoint.log_offset = entry.log_offset
            if _TIMER_MARK in entry.properties:
                # Its acks may still be in the timer, overdue as the checkpoint itself.
                checkpoint.due_ms = max(checkpoint.due_ms, now_ms) + _TIMER_GRACE_MS
                self.checkpoints.apply_early_acks(
                    checkpoint
                )  # acks of this broker never precede their checkpoint
            self.checkpoints.add(checkpoint)
        elif checkpoint.revive_queue_id == queue_id:  # written again
            checkpoint.revive_offset, checkpoint.revive_log_offset = (
                entry.queue_offset,
                entry.log_offset,
            )
            self.checkpoints.ack(checkpoint, ck.bit_map & ((1 << len(checkpoint)) - 1))
            self.checkpoints.rewritten(checkpoint)
        return key

    def _apply_acks(self, ack: AckMsg, offsets: Sequence[int]) -> None:
        self.entries_read[ack.consumer_group, ack.topic, "ACK"] += 1
        key = CheckpointKey(
            ack.topic, ack.consumer_group, ack.queue_id, ack.start_offset, ack.pop_time
        )
        checkpoint = self.checkpoints.get(key)
        if checkpoint is None:
            self.checkpoints.ack_early(key, offsets)
            return
        for offset in offsets:
            self.checkpoints.ack(checkpoint, checkpoint.bit_of(offset))


def _split(data: bytes) -> Iterator[ReviveEntry]:
    """The entries in consecutive records."""
    stored, at = StoredRecord(), 0
    stored.bind(memoryview(bytearray(data)))
    while stored.read(at, len(data)) == RECORD:
        body_at, text_at = stored.body_at, stored.properties_at
        yield ReviveEntry(
            stored.queue_offset,
            stored.physical_offset,
            decode_properties(data[text_at : text_at + stored.properties_length]),
            data[body_at : body_at + stored.body_length],
        )
        at += stored.size
