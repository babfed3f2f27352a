"""Messages that are not stored in the queue they were sent to: who takes them, in which order.

| Message | Goes to | Taken by |
|---|---|---|
| retried too often, or by a group that consumes in order | %DLQ%group | `retry` |
| prepared in a transaction | RMQ_SYS_TRANS_HALF_TOPIC | `transaction` |
| with a delay level | SCHEDULE_TOPIC_XXXX | `delay` |
| with a time of delivery in the future | rmq_sys_wheel_timer | `timer` |
"""

from typing import Final, NamedTuple

from penstock.broker.context import BrokerContext
from penstock.broker.delay.delay_levels import TIMER_PROPERTIES, delay_level
from penstock.broker.retry.consumer_retry import Retry
from penstock.errors import MessageIllegal
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.wire.codes import (
    PROPERTY_TRANSACTION_PREPARED,
    RETRY_TOPIC_PREFIX,
    SYS_TRANSACTION_COMMIT,
    SYS_TRANSACTION_MASK,
)
from penstock.wire.layout import BLANK_BYTES

_STORED_AT_ONCE: Final = (0, SYS_TRANSACTION_COMMIT)


class Redirect(NamedTuple):
    """Where a message goes instead, as what, and how it can be called back from there."""

    queue: ConsumeQueue
    sys_flag: int
    recall_handle: bytes = b""


class Redirects:
    """Finds the way of messages that wait for something."""

    def __init__(self, context: BrokerContext, retry: Retry) -> None:
        self._context = context
        self._retry = retry

    def place(
        self,
        topic: str,
        queue_id: int,
        properties: dict[str, str],
        *,
        sys_flag: int,
        reconsumed: int,
        times_max: int | None,
        now_ms: int,
    ) -> Redirect | None:
        """The detour of a message that is sent, or None.

        What the detour has to know later is noted in the message's properties.
        """
        if topic.startswith(RETRY_TOPIC_PREFIX):
            dead = self._retry.end(topic, properties, reconsumed, times_max, now_ms)
            if dead is not None:
                return Redirect(dead, _visible(sys_flag))
        if properties.get(PROPERTY_TRANSACTION_PREPARED, "").lower() == "true":
            if reconsumed <= 0 or delay_level(properties) <= 0:
                queue = self._context.transactions.redirect(topic, queue_id, properties, now_ms)
                return Redirect(queue, sys_flag & ~SYS_TRANSACTION_MASK)
            # Clients before 4.6.1 forget to take the mark off what they retry.
            sys_flag = _visible(sys_flag)
        if sys_flag & SYS_TRANSACTION_MASK not in _STORED_AT_ONCE:
            raise MessageIllegal(
                "the message is marked as prepared, but not as part of a transaction (TRAN_MSG)",
                hint="send it with a transaction producer",
            )
        return self.wait(topic, queue_id, properties, sys_flag, now_ms)

    def wait(
        self, topic: str, queue_id: int, properties: dict[str, str], sys_flag: int, now_ms: int
    ) -> Redirect | None:
        """The detour of a message that waits for a time, or None if it does not."""
        context = self._context
        level = delay_level(properties)
        if level > 0:
            return Redirect(context.delay.park(topic, queue_id, properties, level), sys_flag)
        if any(name in properties for name in TIMER_PROPERTIES):
            queue = context.timers.park(topic, queue_id, properties, now_ms)
            if queue is not None:
                return Redirect(queue, sys_flag, context.timers.recall_handle(topic, properties))
        return None

    def check_length(self, record_bytes: int, topic_bytes: int, topic: str) -> None:
        """Refuse a message that could be parked under a topic of `parked` bytes, but would be too
        long for a segment under its own."""
        longer = max(len(topic.encode()) - topic_bytes, 0) + 1
        segment_bytes = self._context.store.log.row.size
        if record_bytes + longer + BLANK_BYTES > segment_bytes:
            raise MessageIllegal.over(
                "the message is too long",
                figure=record_bytes + longer,
                limit=segment_bytes - BLANK_BYTES,
                setting="segment_bytes",
            )


def _visible(sys_flag: int) -> int:
    """Without the mark of a half: what bears it is shown to no consumer."""
    marked = sys_flag & SYS_TRANSACTION_MASK not in _STORED_AT_ONCE
    return sys_flag & ~SYS_TRANSACTION_MASK if marked else sys_flag
