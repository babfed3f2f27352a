"""Acknowledging lent messages, and lending them for another time.

An acknowledgement is in the journal before it is answered (under sync flush: on the disk). One of a
message that is not lent any more, because its time is over or it was acknowledged before, changes
nothing and is answered as done: as in RocketMQ, where it is only found out later.

A changed invisible time is a batch of its own with this one message, and acknowledges the old one:
receipts given before are worth nothing afterwards.
"""

from collections.abc import Iterable, Sequence
from typing import NoReturn

from penstock.broker.context import BrokerContext
from penstock.broker.pop.checkpoints import BATCH_MAX, Key, Loan
from penstock.broker.pop.ordered_pop import NOT_LENT, OrderedPops, OrderedQueue
from penstock.broker.pop.pop_polling import Waiting
from penstock.broker.pop.pop_request import check_invisible
from penstock.broker.pop.revive_log import Journal
from penstock.errors import BodyError, MessageIllegal, PenstockError, SystemBusy
from penstock.rpc.answers import Answer, Reply, TickAt, reply_when_flushed
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.wire.bodies.client_bodies import BatchAck, decode_batch_ack
from penstock.wire.codes import POP_ORDER_REVIVE_QUEUE, RequestCode, ResponseCode
from penstock.wire.receipt_handle import Receipt, RetryKind, parse_receipt, plain_topic, retry_topic

BATCHES_MAX = 1_024
"""Most batches that one request acknowledges messages of."""
BITS_BYTES_MAX = 4_096
"""Longest bit set of acknowledged offsets."""
_KINDS = frozenset(kind.value for kind in RetryKind)


class Acks:
    """ACK_MESSAGE, BATCH_ACK_MESSAGE and CHANGE_MESSAGE_INVISIBLETIME."""

    def __init__(
        self, context: BrokerContext, journal: Journal, order: OrderedPops, waiting: Waiting
    ) -> None:
        self._context = context
        self._journal = journal
        self._order = order
        self._waiting = waiting

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.ACK_MESSAGE, self.ack),
            Row(RequestCode.BATCH_ACK_MESSAGE, self.ack_batch),
            Row(RequestCode.CHANGE_MESSAGE_INVISIBLETIME, self.change),
        ]

    # --- acknowledging

    def ack(self, command: Command) -> Answer:
        """One message."""
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
            queue = OrderedQueue(topic, group, queue_id)
            self._ack_in_order(queue, [offset], receipt.pop_ms, command.now_ms)
            return self._noted(command, Reply())
        key = Key(topic, group, queue_id, receipt.start_offset, receipt.pop_ms)
        self._ack(key, receipt.revive_queue_id, receipt.visible_ms, [offset], command.now_ms)
        return self._noted(command, Reply())

    def ack_batch(self, command: Command) -> Answer:
        """Several messages of several batches."""
        acks = decode_batch_ack(command.body).acks if command.body else []
        if not acks:
            return Reply(ResponseCode.NO_MESSAGE, remark="nothing is acknowledged by the request")
        if len(acks) > BATCHES_MAX:
            raise BodyError.over(
                "the request acknowledges too much",
                figure=len(acks),
                limit=BATCHES_MAX,
                unit="batches",
            )
        for ack in acks:
            self._ack_several(ack, command)
        return self._noted(command, Reply())

    def _ack_several(self, ack: BatchAck, command: Command) -> None:
        if ack.retry not in _KINDS or len(ack.bit_set) > BITS_BYTES_MAX:
            raise BodyError(f"an acknowledgement of {ack.topic} makes no sense")
        count = int.from_bytes(ack.bit_set, "little").bit_count()
        if count > BATCH_MAX:
            raise BodyError.over(
                f"an acknowledgement of {ack.topic} names more than a pop lends",
                figure=count,
                limit=BATCH_MAX,
                unit="messages",
            )
        topic = retry_topic(ack.topic, ack.consumer_group, RetryKind(ack.retry))
        store, queue_id = self._context.store, ack.queue_id
        queue = store.queue(topic, queue_id)
        if queue is None:
            return  # deleted meanwhile
        low, high = queue.min_offset, queue.visible_max(store.confirmed)
        offsets = [offset for offset in ack.offsets() if low <= offset <= high]
        if ack.revive_queue_id == POP_ORDER_REVIVE_QUEUE:
            ordered = OrderedQueue(topic, ack.consumer_group, queue_id)
            self._ack_in_order(ordered, offsets, ack.pop_time, command.now_ms)
        elif offsets:
            key = Key(topic, ack.consumer_group, queue_id, ack.start_offset, ack.pop_time)
            visible_ms = ack.pop_time + ack.invisible_time
            self._ack(key, ack.revive_queue_id, visible_ms, offsets, command.now_ms)

    def _ack(
        self, key: Key, queue_id: int, visible_ms: int, offsets: Sequence[int], now_ms: int
    ) -> None:
        loan = self._journal.loans.get(key)
        if loan is not None:
            before = self._journal.loans.in_flight[key[:3]]
            count = self._journal.ack(loan, offsets, now_ms)
            self._context.stats.acked(key.group, key.topic, count)
            limit = self._context.settings.current.broker.pop_in_flight_max
            if before > limit >= before - count:  # the group may have more of this queue again
                plain = plain_topic(key.topic, key.group)
                self._waiting.call_for(plain, key.group, (key.topic, key.queue_id))
        elif self._is_foreign(key, queue_id, visible_ms, now_ms):
            self._journal.ack_unknown(key, queue_id, offsets, now_ms)

    def _is_foreign(self, key: Key, queue_id: int, visible_ms: int, now_ms: int) -> bool:
        """Whether a batch that is not known may have been lent by the broker that had this store
        before us: then it is still to come out of the timer."""
        if not self._journal.taken_over or key.pop_ms >= self._context.started_ms:
            return False
        return visible_ms > now_ms and queue_id < len(self._journal.queues)

    def _ack_in_order(
        self, queue: OrderedQueue, acked: Iterable[int], pop_ms: int, now_ms: int
    ) -> None:
        """Acknowledgements of an ordered pop: the group's progress follows them."""
        topic, group, queue_id = queue
        before = self._context.offsets.get(group, topic, queue_id)
        if self._order.state(queue) is None:
            # Nobody knows what is done of the messages between.
            end = self._context.store.max_offset(topic, queue_id)
            acked = [offset for offset in acked if offset == before and offset < end]
        count, go_on, wrong = 0, -1, -1
        for offset in acked:
            if before is not None and offset < before:
                continue
            after = self._order.commit_and_next(topic, group, queue_id, offset, pop_ms)
            if after >= 0:
                count, go_on = count + 1, after
            elif after == NOT_LENT:
                wrong = offset
        if count:
            self._journal.note_order(queue, go_on, now_ms)
            self._context.stats.acked(group, topic, count)
            if not self._order.check_block(None, topic, group, queue_id, now_ms):
                self._waiting.call(topic, group, queue_id)
        if wrong >= 0:
            raise MessageIllegal(
                f"offset is illegal, key:{topic}@{group}@{queue_id}, old:{before}, "
                f"commit:{wrong}, next:{NOT_LENT}",
                hint="it is not among the messages of the last pop in order",
            )

    # --- lending for another time

    def change(self, command: Command) -> Answer:
        """Let a lent message come back at another time; the answer has a new receipt's figures."""
        group, topic = command.text("consumerGroup"), command.text("topic")
        queue_id, offset = command.i32("queueId"), command.i64("offset")
        invisible_ms = command.i64("invisibleTime")
        receipt = parse_receipt(command.text("extraInfo"))
        check_invisible(invisible_ms)
        low, high = self._range(topic, queue_id)
        if not low <= offset < high:
            remark = f"the queue {queue_id} of {topic} holds {low} to {high}: {offset} is not lent"
            return Reply(ResponseCode.NO_MESSAGE, _figures(0, 0, 0), remark=remark)
        if receipt.ordered:
            queue = OrderedQueue(topic, group, queue_id)
            figures = self._change_in_order(queue, receipt, offset, invisible_ms, command.now_ms)
            return self._noted(command, Reply(ext=figures))
        pop_ms = self._lend_again(
            Key(topic, group, queue_id, receipt.start_offset, receipt.pop_ms),
            receipt,
            offset,
            invisible_ms,
            command.now_ms,
        )
        figures = _figures(pop_ms, invisible_ms, receipt.revive_queue_id)
        return self._noted(command, Reply(ext=figures))

    def _change_in_order(
        self, queue: OrderedQueue, receipt: Receipt, offset: int, invisible_ms: int, now_ms: int
    ) -> dict[str, str]:
        """Let a message of an ordered pop be visible at another time; the answer's figures."""
        visible_ms, pop_ms = now_ms + invisible_ms, receipt.pop_ms
        before = self._context.offsets.get(queue.group, queue.topic, queue.queue_id)
        if before is not None and offset < before:
            return _figures(0, 0, 0)
        if self._order.update_next_visible(*queue, offset, pop_ms, visible_ms):
            self._journal.note_order(queue, offset if before is None else before, now_ms)
            self._context.effects.put(TickAt(self._order.due()))
        return _figures(pop_ms, visible_ms - pop_ms, POP_ORDER_REVIVE_QUEUE)

    def _lend_again(
        self, key: Key, receipt: Receipt, offset: int, invisible_ms: int, now_ms: int
    ) -> int:
        """Lend one message of a batch by itself; gives its pop time."""
        journal, queue_id = self._journal, receipt.revive_queue_id
        loan = journal.loans.get(key)
        pop_ms = self.free_pop_ms([Key(*key[:3], offset, now_ms)], now_ms)
        if loan is None:
            if not self._is_foreign(key, queue_id, receipt.visible_ms, now_ms):
                return pop_ms  # its time is over, or it was acknowledged: nothing is lent
        else:
            queue_id = loan.revive_queue_id
            if loan.acked & loan.bit_of(offset) or not loan.bit_of(offset):
                return pop_ms
        self._check_room(loan)
        again = Loan(Key(*key[:3], offset, pop_ms), invisible_ms, [offset], queue_id)
        again.place = self._context.store.log.begin() if loan is None else loan.place
        journal.lend(again, now_ms)
        try:
            if loan is None:
                journal.ack_unknown(key, queue_id, [offset], now_ms)
            else:
                journal.ack(loan, [offset], now_ms)
        except PenstockError:
            journal.loans.close(again)  # the client goes on with its old receipt
            raise
        return pop_ms

    def _check_room(self, loan: Loan | None) -> None:
        """Changes take batches apart: refuse that where twice as many are open as pops may make."""
        limit = 2 * self._context.settings.current.broker.pop_batches_max
        if len(self._journal.loans) >= limit and (loan is None or loan.lent() > 1):
            raise SystemBusy.over(
                "too many batches of popped messages are not acknowledged",
                figure=len(self._journal.loans),
                limit=limit,
                unit="batches",
                setting="pop_batches_max",
            )

    def free_pop_ms(self, keys: Iterable[Key], now_ms: int) -> int:
        """A pop time that no open batch of this queue and start offset has."""
        loans = self._journal.loans
        keys = list(keys)
        while any(loans.get(key._replace(pop_ms=now_ms)) is not None for key in keys):
            now_ms += 1
        return now_ms

    # --- common

    def _range(self, topic: str, queue_id: int) -> tuple[int, int]:
        """The offsets of a queue that clients may name."""
        config = self._context.topics.need(topic)
        if not 0 <= queue_id < config.read_queue_nums:
            self._refuse_queue(topic, queue_id, config.read_queue_nums)
        store = self._context.store
        return store.min_offset(topic, queue_id), store.max_offset(topic, queue_id)

    def _refuse_queue(self, topic: str, queue_id: int, queues: int) -> NoReturn:
        raise MessageIllegal(
            f"queueId[{queue_id}] is illegal, topic:[{topic}] topicConfig.readQueueNums:[{queues}]",
            hint="it is in the receipt of the message",
        )

    def _noted(self, command: Command, reply: Reply) -> Answer:
        """The answer, under sync flush when the journal is on the disk."""
        return reply_when_flushed(self._context.store, command, reply, "noted")


def _figures(pop_ms: int, invisible_ms: int, queue_id: int) -> dict[str, str]:
    return {
        "popTime": str(pop_ms),
        "invisibleTime": str(invisible_ms),
        "reviveQid": str(queue_id),
    }
