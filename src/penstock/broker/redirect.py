"""Redirects: messages that are not stored in the queue they were sent to, in the order of checks.

| Message | Stored in | By |
|---|---|---|
| consumed too often, or sent back by a group that consumes in order | %DLQ%group | `retry` |
| prepared in a transaction | RMQ_SYS_TRANS_HALF_TOPIC | `transaction` |
| with a delay level | SCHEDULE_TOPIC_XXXX | `delay.delay_levels` |
| with a delivery time in the future | rmq_sys_wheel_timer | `delay.timers` |
"""

from typing import Final

from penstock.broker.delay.delay_levels import delay_level
from penstock.broker.delay.delay_redirect import DelayRedirect, Redirect
from penstock.broker.retry.dead_letter_queues import DeadLetterQueues
from penstock.broker.transaction.transactions import Transactions
from penstock.errors import MessageIllegal
from penstock.wire.codes import (
    PROPERTY_TRANSACTION_PREPARED,
    RETRY_TOPIC_PREFIX,
    SYS_TRANSACTION_COMMIT,
    SYS_TRANSACTION_MASK,
)
from penstock.wire.layout import BLANK_BYTES

_VISIBLE: Final = (0, SYS_TRANSACTION_COMMIT)


class Redirects:
    """Finds the redirect of each message that is sent."""

    def __init__(
        self,
        dead_letters: DeadLetterQueues,
        transactions: Transactions,
        delayed: DelayRedirect,
        *,
        segment_bytes: int,
    ) -> None:
        self._dead_letters = dead_letters
        self._transactions = transactions
        self._delayed = delayed
        self._segment_bytes = segment_bytes

    def find_redirect(
        self,
        topic: str,
        queue_id: int,
        properties: dict[str, str],
        *,
        sys_flag: int,
        reconsume_times: int,
        reconsume_times_max: int | None,
        now_ms: int,
    ) -> Redirect | None:
        """The redirect of a message, or None. Adds to the properties what delivery needs later."""
        if topic.startswith(RETRY_TOPIC_PREFIX):
            dead = self._dead_letters.redirect(
                topic, properties, reconsume_times, reconsume_times_max, now_ms
            )
            if dead is not None:
                return Redirect(dead, _visible(sys_flag))
        if properties.get(PROPERTY_TRANSACTION_PREPARED, "").lower() == "true":
            if reconsume_times <= 0 or delay_level(properties) <= 0:
                queue = self._transactions.redirect(topic, queue_id, properties, now_ms)
                return Redirect(queue, sys_flag & ~SYS_TRANSACTION_MASK)
            # Clients before 4.6.1 do not remove the property from messages that they send back.
            sys_flag = _visible(sys_flag)
        if sys_flag & SYS_TRANSACTION_MASK not in _VISIBLE:
            raise MessageIllegal(
                "the message is marked as prepared, but not as part of a transaction (TRAN_MSG)",
                hint="send it with a transaction producer",
            )
        return self._delayed.find_redirect(topic, queue_id, properties, sys_flag, now_ms)

    def check_length(self, record_bytes: int, topic_bytes: int, topic: str) -> None:
        """Refuse a redirected message that would not fit in a segment under its own topic.

        Its record under the redirect's topic of `topic_bytes` has `record_bytes`.
        """
        longer = max(len(topic.encode()) - topic_bytes, 0) + 1
        if record_bytes + longer + BLANK_BYTES > self._segment_bytes:
            raise MessageIllegal.over(
                "the message is too long",
                figure=record_bytes + longer,
                limit=self._segment_bytes - BLANK_BYTES,
                setting="segment_bytes",
            )


def _visible(sys_flag: int) -> int:
    """Without the mark of a half message, which hides it from consumers."""
    if sys_flag & SYS_TRANSACTION_MASK in _VISIBLE:
        return sys_flag
    return sys_flag & ~SYS_TRANSACTION_MASK
