"""Resolution of half messages: commit, rollback, discard.

| Resolution | What is stored |
|---|---|
| commit | the message in its real queue (or in a delay or timer queue), then the op message |
| rollback | the op message |
| discard | a copy in TRANS_CHECK_MAX_TIME_TOPIC for an operator to examine, then the op message |

The prepared offset of the committed message is the log offset of the first append of the half
message, so the half message is known to be resolved even if the op message is lost.
"""

import logging
from collections import Counter
from typing import Final

from penstock.broker.context import BrokerContext
from penstock.broker.delay.delay_redirect import DelayRedirect
from penstock.broker.transaction.half_messages import (
    CHECKING,
    COMMITTED,
    ROLLED_BACK,
    HalfMessage,
    with_checks,
)
from penstock.broker.transaction.half_queues import HalfQueues
from penstock.errors import Refused, TopicNotExist
from penstock.metrics import Histogram, Registry
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.put import ILLEGAL, PUT_OK
from penstock.wire.codes import (
    PERM_READ_WRITE,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TRANSACTION_PREPARED,
    SYS_TRANSACTION_COMMIT,
    SYS_TRANSACTION_MASK,
    TOPIC_TRANS_CHECK_MAX_TIME,
)

log = logging.getLogger(__name__)

_DISCARD_QUEUES: Final = 1

_LATENCY_BOUNDS_S: Final = (5, 60, 600, 3_600, 43_200, 86_400)  # RocketMQ's


class Resolution:
    """Resolves half messages and counts the outcomes."""

    def __init__(
        self, context: BrokerContext, queues: HalfQueues, delayed: DelayRedirect, host: bytes
    ) -> None:
        self._context = context
        self._queues = queues
        self._delayed = delayed
        self._host = host
        self.committed: Counter[str] = Counter()  # by topic
        self.rolled_back: Counter[str] = Counter()
        self.discarded = 0
        self.latency = Histogram(_LATENCY_BOUNDS_S)  # seconds from creation to commit

    def commit(self, half: HalfMessage, data: bytes, now_ms: int) -> None:
        """Store the message of a half message, read from its record `data`, in its real queue.

        Raises a PenstockError if the store refuses it. The half message then stays open, unless it
        has no queue to go to.
        """
        rewriter = self._context.rewriter
        rewriter.read(data)
        properties = rewriter.properties()
        try:
            queue = self._destination(half, properties, now_ms)
        except Refused as error:
            self.discard(half, data, error.message, now_ms)
            hint = f"a copy of the message is in {TOPIC_TRANS_CHECK_MAX_TIME}"
            raise type(error)(error.message, hint=hint) from None
        for name in (PROPERTY_REAL_TOPIC, PROPERTY_REAL_QUEUE_ID):  # as Apache stores it
            properties.pop(name, None)
        sys_flag = rewriter.stored.sys_flag & ~SYS_TRANSACTION_MASK | SYS_TRANSACTION_COMMIT
        topic = queue.topic.decode()
        redirect = self._delayed.find_redirect(topic, queue.queue_id, properties, sys_flag, now_ms)
        if redirect is not None:
            queue, sys_flag = redirect.queue, redirect.sys_flag
            properties.pop(PROPERTY_TRANSACTION_PREPARED, None)  # as Apache stores it
        checks = half.checks + (half.state == CHECKING)
        status = ILLEGAL
        for stored_properties in (
            (with_checks(properties, checks), properties) if checks else (properties,)
        ):
            if status == ILLEGAL:  # without the number of checks if that makes it too long
                status = rewriter.put(
                    queue,
                    now_ms,
                    properties=stored_properties,
                    sys_flag=sys_flag,
                    prepared_offset=half.prepared_offset,
                    store_host=self._host,
                )
        if status != PUT_OK:
            raise rewriter.fault(status)
        self._queues.resolve(half, COMMITTED, now_ms)
        self.committed[half.topic] += 1
        self.latency.observe(max(now_ms - rewriter.stored.born_ms, 0) // 1000)

    def roll_back(self, half: HalfMessage, now_ms: int) -> None:
        """Resolve a half message without storing its message."""
        self._queues.resolve(half, ROLLED_BACK, now_ms)
        self.rolled_back[half.topic] += 1

    def discard(self, half: HalfMessage, data: bytes | None, reason: str, now_ms: int) -> None:
        """Roll a half message back and keep a copy for an operator.

        `reason` is logged. Raises a PenstockError if the store refuses the copy.
        """
        rewriter = self._context.rewriter
        if data is None or not rewriter.read(data):
            log.error("rolled back an unreadable half message at log offset %d", half.log_offset)
            self.roll_back(half, now_ms)
            return
        properties = with_checks(rewriter.properties(), half.checks)
        name = TOPIC_TRANS_CHECK_MAX_TIME
        self._context.topics.ensure(name, _DISCARD_QUEUES, PERM_READ_WRITE, now_ms)
        queue = self._context.store.make_queue(name.encode(), 0)
        assert queue is not None
        status = rewriter.put(
            queue,
            now_ms,
            properties=properties,
            prepared_offset=half.prepared_offset,
            store_host=self._host,
        )
        if status not in (PUT_OK, ILLEGAL):
            raise rewriter.fault(status)
        self.discarded += status == PUT_OK
        log.warning(
            "rolled back a half message of topic %s (group %s, id %s): %s; %s",
            half.topic,
            half.group.name,
            properties.get("UNIQ_KEY"),
            reason,
            f"a copy is in {name}" if status == PUT_OK else f"it is too long for a copy in {name}",
        )
        self.roll_back(half, now_ms)

    def add_metrics(self, registry: Registry) -> None:
        registry.counter(
            "rocketmq_commit_messages_total",
            "Transactions that were committed.",
            ("topic",),
            read=lambda: [((topic,), count) for topic, count in self.committed.items()],
        )
        registry.counter(
            "rocketmq_rollback_messages_total",
            "Transactions that were rolled back.",
            ("topic",),
            read=lambda: [((topic,), count) for topic, count in self.rolled_back.items()],
        )
        self.latency = registry.histogram(
            "rocketmq_finish_message_latency",
            "Seconds from the creation of a message to its commit.",
            _LATENCY_BOUNDS_S,
        )
        registry.counter(
            "penstock_half_messages_discarded_total",
            "Half messages that were discarded; their copies are in TRANS_CHECK_MAX_TIME_TOPIC.",
            read=lambda: self.discarded,
        )

    def _destination(
        self, half: HalfMessage, properties: dict[str, str], now_ms: int
    ) -> ConsumeQueue:
        """The queue that the message was sent to; raises Refused if there is none."""
        queue = self._context.rewriter.destination(properties, half.prepared_offset, now_ms)
        if queue is None:
            raise TopicNotExist(f"the topic {half.topic} was deleted after the message was sent")
        return queue
