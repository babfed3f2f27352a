"""ACK_MESSAGE and CHANGE_MESSAGE_INVISIBLETIME in the connection's buffer: the usual ones.

The usual ones name a queue that was found before, which is kept as a target and compared on every
use with what it was found out from, and a receipt handle of a pop that was not in order. What they
do to the checkpoint is decided by `PopAcks`. Whatever is unusual is left to it as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from penstock.broker.consumers.consumer_targets import ConsumerTarget, TargetKey, TargetTable
from penstock.broker.pop.checkpoints import CheckpointKey
from penstock.broker.pop.pop_request import INVISIBLE_MS_MAX
from penstock.errors import HeaderError
from penstock.rpc.command import Command
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.put import StoreWriter
from penstock.wire.codes import POP_ORDER_REVIVE_QUEUE
from penstock.wire.frame import Request
from penstock.wire.output import Output

if TYPE_CHECKING:
    from penstock.broker.context import BrokerContext
    from penstock.broker.pop.pop_ack import PopAcks
    from penstock.broker.replicas.replica_role import ReplicaRole
    from penstock.rpc.answers import Answer
    from penstock.store.store import MessageStore
    from penstock.wire.bodies.client_bodies import TopicConfig

_SUCCESS = 0
_ONEWAY = 2
_INT_MAX = 0x7FFFFFFF
_INVISIBLE_MS_MAX = INVISIBLE_MS_MAX
_ORDERED = POP_ORDER_REVIVE_QUEUE
_HANDLE_BYTES_MAX = 1024  # `parse_receipt` reads no more characters
_DIGITS_MAX = 18
_SPACE, _ZERO, _TWO = 32, 48, 50


class ReceiptReader:
    """Reads receipt handles in a buffer: `parse_receipt` without objects."""

    def __init__(self) -> None:
        # What the last `read` found.
        self.start_offset: int = 0
        self.pop_ms: int = 0
        self.invisible_ms: int = 0
        self.revive_queue_id: int = 0
        # The next word of the handle, and its end.
        self._at: int = 0
        self._end: int = 0

    def read(self, buffer: memoryview, at: int, length: int) -> bool:
        """Read a receipt handle; False if it is not the usual text of a valid one."""
        if length > _HANDLE_BYTES_MAX:
            return False
        self._at = at
        self._end = at + length
        self.start_offset = self._number(buffer)
        self.pop_ms = self._number(buffer)
        self.invisible_ms = self._number(buffer)
        self.revive_queue_id = self._number(buffer)
        if (
            self.start_offset < 0
            or self.pop_ms < 0
            or self.invisible_ms < 0
            or not 0 <= self.revive_queue_id <= _INT_MAX
        ):
            return False
        at = self._at  # the kind
        if at + 2 > self._end or not _ZERO <= buffer[at] <= _TWO or buffer[at + 1] != _SPACE:
            return False
        at += 2
        while at < self._end and buffer[at] != _SPACE:  # the name of the broker
            if buffer[at] > 126:  # characters are not bytes
                return False
            at += 1
        self._at = at + 1
        if not 0 <= self._number(buffer) <= _INT_MAX:  # the queue, as in the header
            return False
        # Old clients leave the offset of the message out.
        return self._at > self._end or self._number(buffer) >= 0

    def _number(self, buffer: memoryview) -> int:
        """The next word as a number; -1 if it is not one."""
        at = start = self._at
        value = 0
        while at < self._end and buffer[at] != _SPACE:
            if not _ZERO <= buffer[at] <= _ZERO + 9 or at - start >= _DIGITS_MAX:
                return -1
            value = 10 * value + buffer[at] - _ZERO
            at += 1
        self._at = at + 1
        return value if at > start else -1


class AckTarget(ConsumerTarget):
    """A queue whose messages a group may acknowledge."""

    def __init__(self, key: TargetKey, queue: ConsumeQueue) -> None:
        ConsumerTarget.__init__(self, key, queue)
        # What it was resolved from.
        self.topic_config: TopicConfig | None = None


class ReceiptRequests:
    """What both requests have in common."""

    def __init__(
        self,
        context: BrokerContext,
        acks: PopAcks,
        by_rules: Callable[[Command], Answer],
        set_time: Callable[[int], None],
    ) -> None:
        """`set_time` is told the time of each request, for the pops that it wakes."""
        self._acks: PopAcks = acks
        self._by_rules: Callable[[Command], Answer] = by_rules
        self._set_time: Callable[[int], None] = set_time
        self._role: ReplicaRole = context.role
        self._store: MessageStore = context.store
        self._writer: StoreWriter = context.store.writer
        self._topics: Mapping[str, TopicConfig] = context.topics.table.topics
        self._table: TargetTable = TargetTable()
        # The current request, until the next one: its key, target, receipt handle and offset.
        self._key: TargetKey = TargetKey()
        self._target: AckTarget | None = None
        self._receipt: ReceiptReader = ReceiptReader()
        self._offset: int = 0
        # -1 if it has none.
        self._invisible_ms: int = -1

    def _read(self, request: Request) -> bool:
        """Read a usual request; False if it is not one, and then `_resolve` answers it.

        Raises NotMaster.
        """
        self._role.refuse_if_stepping_down()
        try:
            return self._read_fields(request)
        except HeaderError:  # something is not a number
            return False

    def _read_fields(self, request: Request) -> bool:
        field = request.find(b"invisibleTime")
        self._invisible_ms = -1 if field < 0 else request.number(field)
        offset = request.find(b"offset")
        receipt = request.find(b"extraInfo")
        if (
            offset < 0
            or receipt < 0
            or request.flag & _ONEWAY != 0
            or self._store.sends_wait
            or not self._key.read(request, None)
        ):
            return False
        at, length = request.value_at(receipt), request.value_length(receipt)
        if not self._receipt.read(request.buffer, at, length):
            return False
        if self._receipt.revive_queue_id == _ORDERED:
            return False
        target: AckTarget | None = self._table.find(self._key)
        if (
            target is None
            or target.queue.deleted
            or self._topics.get(target.topic) is not target.topic_config
        ):
            return False
        self._target = target
        self._offset = request.number(offset)
        return self._offset >= target.queue.min_offset

    def _checkpoint_key(self) -> CheckpointKey:
        target, receipt = self._target, self._receipt
        assert target is not None
        return CheckpointKey(
            target.topic, target.group, target.queue_id, receipt.start_offset, receipt.pop_ms
        )

    def _resolve(self, request: Request, client: int, now_ms: int) -> Answer:
        """Let `PopAcks` answer, and keep the target if it accepts."""
        command = Command(
            request.code,
            request.ext(),
            client=client,
            now_ms=now_ms,
            flag=request.flag,
            opaque=request.opaque,
            encoding=request.encoding,
        )
        answer = self._by_rules(command)
        key = self._key
        if key.read(request, None):
            queue = self._store.queues.get(key.topic(), key.queue_id)
            if queue is not None:
                target = AckTarget(key, queue)
                target.topic_config = self._topics.get(target.topic)
                self._table.put(key, target)
        return answer


class AckHandler(ReceiptRequests):
    """Handles ACK_MESSAGE."""

    def handle(self, request: Request, output: Output, client: int, now_ms: int) -> Answer:
        """Write the response into the output, or return another answer."""
        if self._read(request):
            target, receipt = self._target, self._receipt
            assert target is not None
            if self._offset <= target.queue.visible_max(self._writer.confirm_offset):
                self._set_time(now_ms)
                self._acks.acknowledge(
                    self._checkpoint_key(),
                    receipt.revive_queue_id,
                    receipt.pop_ms + receipt.invisible_ms,
                    self._offset,
                    now_ms,
                )
                output.begin(request.encoding, _SUCCESS, request.opaque)
                output.end(0)
                return None
        return self._resolve(request, client, now_ms)


class InvisibleTimeHandler(ReceiptRequests):
    """Handles CHANGE_MESSAGE_INVISIBLETIME."""

    def handle(self, request: Request, output: Output, client: int, now_ms: int) -> Answer:
        """Write the response into the output, or return another answer."""
        if self._read(request):
            target, receipt = self._target, self._receipt
            assert target is not None
            invisible_ms = self._invisible_ms
            end = target.queue.visible_max(self._writer.confirm_offset)
            if 0 <= invisible_ms <= _INVISIBLE_MS_MAX and self._offset < end:
                self._set_time(now_ms)
                pop_ms = self._acks.renew(
                    self._checkpoint_key(),
                    receipt.revive_queue_id,
                    receipt.pop_ms + receipt.invisible_ms,
                    self._offset,
                    invisible_ms,
                    now_ms,
                )
                output.begin(request.encoding, _SUCCESS, request.opaque)
                output.field_number(b"popTime", pop_ms)
                output.field_number(b"invisibleTime", invisible_ms)
                output.field_number(b"reviveQid", receipt.revive_queue_id)
                output.end(0)
                return None
        return self._resolve(request, client, now_ms)
