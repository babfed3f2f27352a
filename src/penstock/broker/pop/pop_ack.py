"""Acks of popped messages, and changes of their invisible time.

An ack is in the revive log before its response is sent (under sync flush: on the disk). An ack of a
message that is no longer in flight changes nothing and succeeds, as in RocketMQ.

A change of the invisible time creates a new checkpoint with this one message and acknowledges it in
the old checkpoint, so earlier receipt handles become invalid.
"""

from collections.abc import Callable, Iterable
from typing import NoReturn

from penstock.broker.context import BrokerContext
from penstock.broker.pop.checkpoints import CHECKPOINT_MESSAGES_MAX, CheckpointKey, PopCheckpoint
from penstock.broker.pop.in_place.pop_ack_handler import AckHandler, InvisibleTimeHandler
from penstock.broker.pop.ordered_pop import NOT_IN_FLIGHT, GroupQueue, OrderedPops
from penstock.broker.pop.pop_polling import PopPolling
from penstock.broker.pop.pop_request import check_invisible_ms
from penstock.broker.pop.revive_log import ReviveLog
from penstock.broker.topics import refuse_internal
from penstock.errors import BodyError, MessageIllegal, PenstockError, SystemBusy
from penstock.rpc.answers import Answer, Reply, TickAt, reply_when_flushed
from penstock.rpc.command import Command
from penstock.rpc.router import Handler, Row
from penstock.wire.bodies.client_bodies import BatchAck, decode_batch_ack
from penstock.wire.codes import POP_ORDER_REVIVE_QUEUE, RequestCode, ResponseCode
from penstock.wire.receipt_handle import Receipt, RetryKind, parse_receipt, plain_topic, retry_topic

BATCHES_MAX = 1_024
"""Maximum number of entries in one BATCH_ACK_MESSAGE request."""
BITS_BYTES_MAX = 4_096
"""Maximum size of the bit set of one entry."""
_RETRY_KINDS = frozenset(kind.value for kind in RetryKind)


class PopAcks:
    """ACK_MESSAGE, BATCH_ACK_MESSAGE and CHANGE_MESSAGE_INVISIBLETIME."""

    def __init__(
        self, context: BrokerContext, revive_log: ReviveLog, order: OrderedPops, polling: PopPolling
    ) -> None:
        self._context = context
        self._revive_log = revive_log
        self._order = order
        self._polling = polling

    def rows(self, set_time: Callable[[int], None]) -> list[Row]:
        """`set_time` is told the time of each request, for the pops that it wakes."""

        def with_time(handler: Handler) -> Handler:
            def handle(command: Command) -> Answer:
                set_time(command.now_ms)
                return handler(command)

            return handle

        ack, change = with_time(self.ack), with_time(self.change_invisible_time)
        return [
            Row(RequestCode.ACK_MESSAGE, ack, AckHandler(self._context, self, ack, set_time)),
            Row(RequestCode.BATCH_ACK_MESSAGE, with_time(self.ack_batch)),
            Row(
                RequestCode.CHANGE_MESSAGE_INVISIBLETIME,
                change,
                InvisibleTimeHandler(self._context, self, change, set_time),
            ),
        ]

    # --- acks

    def ack(self, command: Command) -> Answer:
        """ACK_MESSAGE: one message."""
        group, topic = command.text("consumerGroup"), command.text("topic")
        queue_id, offset = command.i32("queueId"), command.i64("offset")
        receipt = parse_receipt(command.text("extraInfo"))
        low, high = self._range(topic, queue_id)
        if not low <= offset <= high:
            remark = (
                f"offset is illegal, key:{topic}@{queue_id}, commit:{offset}, store:{low}~{high}"
            )
            return Reply(ResponseCode.NO_MESSAGE, remark=remark)
        if receipt.ordered:
            queue = GroupQueue(topic, group, queue_id)
            self._ack_in_order(queue, [offset], receipt.pop_ms, command.now_ms)
            return self._reply(command, Reply())
        key = CheckpointKey(topic, group, queue_id, receipt.start_offset, receipt.pop_ms)
        revive_queue_id, visible_ms = receipt.revive_queue_id, receipt.visible_ms
        self.acknowledge(key, revive_queue_id, visible_ms, offset, command.now_ms)
        return self._reply(command, Reply())

    def ack_batch(self, command: Command) -> Answer:
        """BATCH_ACK_MESSAGE: messages of several checkpoints."""
        acks = decode_batch_ack(command.body).acks if command.body else []
        if not acks:
            return Reply(ResponseCode.NO_MESSAGE, remark="the request contains no acks")
        if len(acks) > BATCHES_MAX:
            raise BodyError.over(
                "the request contains too many acks",
                figure=len(acks),
                limit=BATCHES_MAX,
                unit="entries",
            )
        for ack in acks:
            self._ack_several(ack, command)
        return self._reply(command, Reply())

    def _ack_several(self, ack: BatchAck, command: Command) -> None:
        if ack.retry not in _RETRY_KINDS or len(ack.bit_set) > BITS_BYTES_MAX:
            raise BodyError(f"the ack of {ack.topic} is not valid (retry {ack.retry})")
        distances = ack.distances()
        count = distances.bit_count()
        if count > CHECKPOINT_MESSAGES_MAX:
            raise BodyError.over(
                f"the ack of {ack.topic} names more messages than a pop delivers",
                figure=count,
                limit=CHECKPOINT_MESSAGES_MAX,
                unit="messages",
            )
        topic = retry_topic(ack.topic, ack.consumer_group, RetryKind(ack.retry))
        store, queue_id = self._context.store, ack.queue_id
        queue = store.queue(topic, queue_id)
        if queue is None:
            return  # the topic was deleted since
        low, high = queue.min_offset, queue.visible_max(store.confirm_offset)
        first, end = ack.start_offset, ack.start_offset + distances.bit_length()
        if first < low or end > high + 1:  # else all of them are in the queue
            distances = _bits_between(distances, low - first, high - first)
        if ack.revive_queue_id == POP_ORDER_REVIVE_QUEUE:
            ordered = GroupQueue(topic, ack.consumer_group, queue_id)
            offsets = _offsets(first, distances)
            self._ack_in_order(ordered, offsets, ack.pop_time, command.now_ms)
        elif distances:
            key = CheckpointKey(topic, ack.consumer_group, queue_id, first, ack.pop_time)
            visible_ms = ack.pop_time + ack.invisible_time
            self._acknowledge(key, ack.revive_queue_id, visible_ms, distances, command.now_ms)

    def acknowledge(
        self, key: CheckpointKey, revive_queue_id: int, visible_ms: int, offset: int, now_ms: int
    ) -> None:
        """Acknowledge a message of a checkpoint; raises the error of the store.

        The numbers after the key are those of the receipt handle.
        """
        checkpoint = self._revive_log.checkpoints.get(key)
        if checkpoint is not None:
            self._ack(checkpoint, checkpoint.bit_of(offset), now_ms)
        elif self._is_of_other_broker(key, revive_queue_id, visible_ms, now_ms):
            self._revive_log.ack_unknown(key, revive_queue_id, [offset], now_ms)

    def _acknowledge(
        self,
        key: CheckpointKey,
        revive_queue_id: int,
        visible_ms: int,
        distances: int,
        now_ms: int,
    ) -> None:
        """The same for several messages: bit k is the one at distance k from the start offset."""
        checkpoint = self._revive_log.checkpoints.get(key)
        if checkpoint is not None:
            self._ack(checkpoint, checkpoint.bits_of(distances), now_ms)
        elif self._is_of_other_broker(key, revive_queue_id, visible_ms, now_ms):
            offsets = _offsets(key.start_offset, distances)
            self._revive_log.ack_unknown(key, revive_queue_id, offsets, now_ms)

    def _ack(self, checkpoint: PopCheckpoint, bits: int, now_ms: int) -> None:
        topic, group, queue_id = checkpoint.queue
        before = self._revive_log.checkpoints.in_flight_in(checkpoint.queue)
        count = self._revive_log.writer.ack(checkpoint, bits, now_ms)
        self._context.stats.acked(group, topic, count)
        limit = self._context.settings.current.broker.pop_in_flight_max
        if before > limit >= before - count:  # below the in-flight limit again
            self._polling.wake_for(plain_topic(topic, group), group, (topic, queue_id))

    def _is_of_other_broker(
        self, key: CheckpointKey, queue_id: int, visible_ms: int, now_ms: int
    ) -> bool:
        """Whether an unknown checkpoint may be one of the RocketMQ broker that used this store
        before: its entry is then still in the timer."""
        if not self._revive_log.from_other_broker or key.pop_ms >= self._context.started_ms:
            return False
        return visible_ms > now_ms and queue_id < len(self._revive_log.queues)

    def _ack_in_order(
        self, queue: GroupQueue, acked: Iterable[int], pop_ms: int, now_ms: int
    ) -> None:
        """Acks of an ordered pop; they move the group's offset."""
        topic, group, queue_id = queue
        before = self._context.offsets.get(group, topic, queue_id)
        if self._order.state(queue) is None:
            # Without an open pop it is unknown whether earlier messages were consumed.
            end = self._context.store.max_offset(topic, queue_id)
            acked = [offset for offset in acked if offset == before and offset < end]
        count, next_offset, not_in_flight = 0, -1, -1
        for offset in acked:
            if before is not None and offset < before:
                continue
            after = self._order.commit_and_next(topic, group, queue_id, offset, pop_ms)
            if after >= 0:
                count, next_offset = count + 1, after
            elif after == NOT_IN_FLIGHT:
                not_in_flight = offset
        if count:
            self._revive_log.record_ordered_pop(queue, next_offset, now_ms)
            self._context.stats.acked(group, topic, count)
            if not self._order.check_block(None, topic, group, queue_id, now_ms):
                self._polling.wake(topic, group, queue_id)
        if not_in_flight >= 0:
            raise MessageIllegal(
                f"offset is illegal, key:{topic}@{group}@{queue_id}, old:{before}, "
                f"commit:{not_in_flight}, next:{NOT_IN_FLIGHT}",
                hint="the message is not in the group's latest ordered pop of this queue",
            )

    # --- invisible time

    def change_invisible_time(self, command: Command) -> Answer:
        """CHANGE_MESSAGE_INVISIBLETIME; the response has the fields of the new receipt handle."""
        group, topic = command.text("consumerGroup"), command.text("topic")
        queue_id, offset = command.i32("queueId"), command.i64("offset")
        invisible_ms = command.i64("invisibleTime")
        receipt = parse_receipt(command.text("extraInfo"))
        check_invisible_ms(invisible_ms)
        low, high = self._range(topic, queue_id)
        if not low <= offset < high:
            remark = f"offset {offset} is not in queue {queue_id} of {topic} ({low} to {high})"
            return Reply(ResponseCode.NO_MESSAGE, _response_fields(0, 0, 0), remark=remark)
        if receipt.ordered:
            queue = GroupQueue(topic, group, queue_id)
            fields = self._change_in_order(queue, receipt, offset, invisible_ms, command.now_ms)
            return self._reply(command, Reply(ext=fields))
        key = CheckpointKey(topic, group, queue_id, receipt.start_offset, receipt.pop_ms)
        revive_queue_id, visible_ms = receipt.revive_queue_id, receipt.visible_ms
        pop_ms = self.renew(key, revive_queue_id, visible_ms, offset, invisible_ms, command.now_ms)
        fields = _response_fields(pop_ms, invisible_ms, receipt.revive_queue_id)
        return self._reply(command, Reply(ext=fields))

    def _change_in_order(
        self, queue: GroupQueue, receipt: Receipt, offset: int, invisible_ms: int, now_ms: int
    ) -> dict[str, str]:
        """Change when a message of an ordered pop becomes visible; returns the response fields."""
        visible_ms, pop_ms = now_ms + invisible_ms, receipt.pop_ms
        before = self._context.offsets.get(queue.group, queue.topic, queue.queue_id)
        if before is not None and offset < before:
            return _response_fields(0, 0, 0)
        if self._order.update_next_visible(*queue, offset, pop_ms, visible_ms):
            self._revive_log.record_ordered_pop(queue, offset if before is None else before, now_ms)
            self._context.effects.put(TickAt(self._order.due()))
        return _response_fields(pop_ms, visible_ms - pop_ms, POP_ORDER_REVIVE_QUEUE)

    def renew(
        self,
        key: CheckpointKey,
        revive_queue_id: int,
        visible_ms: int,
        offset: int,
        invisible_ms: int,
        now_ms: int,
    ) -> int:
        """Move one message to a checkpoint of its own; returns the new pop time.

        `revive_queue_id` and `visible_ms` are those of the receipt handle. Raises the error of the
        store.
        """
        revive_log, queue_id = self._revive_log, revive_queue_id
        checkpoint = revive_log.checkpoints.get(key)
        pop_ms = self.unused_pop_ms([CheckpointKey(*key[:3], offset, now_ms)], now_ms)
        if checkpoint is None:
            if not self._is_of_other_broker(key, queue_id, visible_ms, now_ms):
                return pop_ms  # no longer in flight
        else:
            queue_id = checkpoint.revive_queue_id
            if checkpoint.acked & checkpoint.bit_of(offset) or not checkpoint.bit_of(offset):
                return pop_ms
        self._check_limit(checkpoint)
        renewed = PopCheckpoint(
            CheckpointKey(*key[:3], offset, pop_ms), invisible_ms, [offset], queue_id
        )
        renewed.log_offset = (
            self._context.store.log.begin() if checkpoint is None else checkpoint.log_offset
        )
        revive_log.add_checkpoint(renewed, now_ms)
        try:
            if checkpoint is None:
                revive_log.ack_unknown(key, queue_id, [offset], now_ms)
            else:
                revive_log.ack(checkpoint, [offset], now_ms)
        except PenstockError:
            revive_log.checkpoints.close(renewed)  # the old receipt handle stays valid
            raise
        return pop_ms

    def _check_limit(self, checkpoint: PopCheckpoint | None) -> None:
        """Refuse to split a checkpoint when twice as many are open as pops may create."""
        limit = 2 * self._context.settings.current.broker.pop_batches_max
        if len(self._revive_log.checkpoints) >= limit and (
            checkpoint is None or checkpoint.in_flight_count() > 1
        ):
            raise SystemBusy.over(
                "too many POP checkpoints are open",
                figure=len(self._revive_log.checkpoints),
                limit=limit,
                unit="checkpoints",
                setting="twice pop_batches_max",
            )

    def unused_pop_ms(self, keys: Iterable[CheckpointKey], now_ms: int) -> int:
        """A pop time that no open checkpoint with the same queue and start offset has."""
        checkpoints = self._revive_log.checkpoints
        keys = list(keys)
        while any(checkpoints.get(key._replace(pop_ms=now_ms)) is not None for key in keys):
            now_ms += 1
        return now_ms

    # --- common

    def _range(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The minimum and maximum offset of a queue."""
        refuse_internal(topic)
        config = self._context.topics.need(topic)
        if not 0 <= queue_id < config.read_queue_nums:
            self._refuse_queue(topic, queue_id, config.read_queue_nums)
        store = self._context.store
        return store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)

    def _refuse_queue(self, topic: str, queue_id: int, queues: int) -> NoReturn:
        raise MessageIllegal(
            f"queueId[{queue_id}] is illegal, topic:[{topic}] topicConfig.readQueueNums:[{queues}]",
            hint="use the queue id of the message's receipt handle",
        )

    def _reply(self, command: Command, reply: Reply) -> Answer:
        """The response; under sync flush it is sent when the revive log has been flushed."""
        return reply_when_flushed(self._context.store, command, reply)


def _bits_between(bits: int, first: int, last: int) -> int:
    """Those of these bits that have a number from `first` to `last`."""
    length = bits.bit_length()
    first, end = min(max(first, 0), length), min(max(last + 1, 0), length)
    return bits & ((1 << end) - 1) & ~((1 << first) - 1)


def _offsets(start_offset: int, distances: int) -> list[int]:
    """Offsets by their distances from the start offset, ascending."""
    return [
        start_offset + distance
        for distance in range(distances.bit_length())
        if distances >> distance & 1
    ]


def _response_fields(pop_ms: int, invisible_ms: int, queue_id: int) -> dict[str, str]:
    return {
        "popTime": str(pop_ms),
        "invisibleTime": str(invisible_ms),
        "reviveQid": str(queue_id),
    }
