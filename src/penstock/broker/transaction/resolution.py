"""How a half ends: as a message of its own topic, or not at all, and then perhaps parked.

| Ends as | What is stored |
|---|---|
| committed | the message in its own queue (or where it waits for its time), then the op message |
| rolled back | the op message |
| given up | a copy in TRANS_CHECK_MAX_TIME_TOPIC for a person to look at, then the op message |

The committed message has the log offset of the half's first append as its prepared offset, so that
its half is known to have ended even if the op message is lost.
"""

import logging
from collections import Counter
from typing import Final

from penstock.broker.context import BrokerContext
from penstock.broker.transaction.half_messages import (
    ASKED,
    COMMITTED,
    ROLLED_BACK,
    Half,
    with_checks,
)
from penstock.broker.transaction.half_queues import HalfLog
from penstock.errors import PenstockError, TopicNotExist
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

_PARKING_QUEUES: Final = 1
_PARKED: Final = ("too long to be parked", "parked")
_LATENCY_BOUNDS_S: Final = (5, 60, 600, 3_600, 43_200, 86_400)  # RocketMQ's


class Endings:
    """Ends halves, and counts how."""

    def __init__(self, context: BrokerContext, half_log: HalfLog, host: bytes) -> None:
        self._context = context
        self._log = half_log
        self._host = host
        self.committed: Counter[str] = Counter()  # by topic
        self.rolled_back: Counter[str] = Counter()
        self.parked = 0
        self.latency = Histogram(_LATENCY_BOUNDS_S)  # from birth to commit, in seconds

    def commit(self, half: Half, data: bytes, now_ms: int) -> None:
        """Store the message of a half, which a record of it holds, in its own queue.

        Raises a PenstockError if that can't be; the half is open then, unless its topic is gone.
        """
        context, rewriter = self._context, self._context.rewriter
        rewriter.read(data)
        properties = rewriter.properties()
        queue = self._destination(half, properties, now_ms)
        if queue is None:
            self.give_up(half, data, now_ms)
            raise TopicNotExist(
                f"the topic {half.topic} was deleted after the message had been sent",
                hint=f"a copy of the message lies in {TOPIC_TRANS_CHECK_MAX_TIME}",
            )
        for name in (PROPERTY_REAL_TOPIC, PROPERTY_REAL_QUEUE_ID):  # as Apache stores it
            properties.pop(name, None)
        sys_flag = rewriter.stored.sys_flag & ~SYS_TRANSACTION_MASK | SYS_TRANSACTION_COMMIT
        topic = queue.topic.decode()
        redirect = context.redirects.wait(topic, queue.queue_id, properties, sys_flag, now_ms)
        if redirect is not None:
            queue, sys_flag = redirect.queue, redirect.sys_flag
            properties.pop(PROPERTY_TRANSACTION_PREPARED, None)  # as Apache stores it
        checks = half.checks + (half.state == ASKED)
        status = ILLEGAL
        for shown in (with_checks(properties, checks), properties) if checks else (properties,):
            if status == ILLEGAL:  # the count is left out where it makes the message too long
                status = rewriter.put(
                    queue,
                    now_ms,
                    properties=shown,
                    sys_flag=sys_flag,
                    prepared_offset=half.prepared,
                    store_host=self._host,
                )
        if status != PUT_OK:
            raise rewriter.fault(status)
        self._log.close(half, COMMITTED, now_ms)
        self.committed[half.topic] += 1
        self.latency.observe(max(now_ms - rewriter.stored.born_ms, 0) // 1000)

    def roll_back(self, half: Half, now_ms: int) -> None:
        """Let a half be forgotten."""
        self._log.close(half, ROLLED_BACK, now_ms)
        self.rolled_back[half.topic] += 1

    def give_up(self, half: Half, data: bytes | None, now_ms: int) -> None:
        """Park a copy of a half and roll it back. Raises a PenstockError if the store refuses."""
        rewriter = self._context.rewriter
        if data is None or not rewriter.read(data):
            log.error("the half at the log offset %d can't be read: rolled back", half.place)
            self.roll_back(half, now_ms)
            return
        properties = with_checks(rewriter.properties(), half.checks)
        name = TOPIC_TRANS_CHECK_MAX_TIME
        self._context.topics.ensure(name, _PARKING_QUEUES, PERM_READ_WRITE, now_ms)
        queue = self._context.store.make_queue(name.encode(), 0)
        assert queue is not None
        status = rewriter.put(
            queue,
            now_ms,
            properties=properties,
            prepared_offset=half.prepared,
            store_host=self._host,
        )
        if status not in (PUT_OK, ILLEGAL):
            raise rewriter.fault(status)
        self.parked += status == PUT_OK
        log.warning(
            "a half of %s for %s is rolled back after %d checks and %s in %s: %s",
            half.group.name,
            half.topic,
            half.checks,
            _PARKED[status == PUT_OK],
            name,
            properties.get("UNIQ_KEY"),
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
            "Seconds from the birth of a message to its commit.",
            _LATENCY_BOUNDS_S,
        )
        registry.counter(
            "penstock_halves_parked_total",
            "Halves that were given up; their copies lie in TRANS_CHECK_MAX_TIME_TOPIC.",
            read=lambda: self.parked,
        )

    def _destination(
        self, half: Half, properties: dict[str, str], now_ms: int
    ) -> ConsumeQueue | None:
        topic = properties.get(PROPERTY_REAL_TOPIC, "")
        try:
            number = int(properties.get(PROPERTY_REAL_QUEUE_ID, ""))
            return self._context.rewriter.destination(topic, number, half.prepared, now_ms)
        except (ValueError, PenstockError) as error:
            log.error("a half has no place in %r: %s", topic, error)
            return None
