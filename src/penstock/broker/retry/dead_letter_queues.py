"""Dead letters: messages that a group could not process after the last retry, in `%DLQ%group`.

A consumer that can't send a message back by its offset sends it to the retry topic `%RETRY%group`
itself. `redirect` decides whether such a send goes to the dead letters instead.
"""

import logging
from collections import Counter
from typing import Final

from penstock.broker.context import BrokerContext
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.wire.codes import (
    DLQ_TOPIC_PREFIX,
    PERM_READ_WRITE,
    PROPERTY_DELAY,
    PROPERTY_RETRY_TOPIC,
    RETRY_TOPIC_PREFIX,
)

log = logging.getLogger(__name__)

DEAD_LETTER_QUEUES: Final = 1


def group_of(topic: str) -> str:
    """The group of a retry topic; in retry topics of POP consumers a topic may follow it."""
    return topic.removeprefix(RETRY_TOPIC_PREFIX).partition("+")[0]


class DeadLetterQueues:
    """The dead letters of all groups."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        self.counts: Counter[tuple[str, str]] = Counter()  # by (group, topic)

    def redirect(
        self,
        topic: str,
        properties: dict[str, str],
        reconsume_times: int,
        reconsume_times_max: int | None,
        now_ms: int,
    ) -> ConsumeQueue | None:
        """The dead-letter queue if a message was sent to a retry topic too often, else None."""
        group = group_of(topic)
        config = self._context.groups.find(group, now_ms)
        limit = config.retry_max_times if reconsume_times_max is None else reconsume_times_max
        # A group that consumes in order has retried enough: nothing is delivered out of order.
        if reconsume_times <= limit and not self._context.locks.is_locked(group, now_ms):
            return None
        properties[PROPERTY_DELAY] = "-1"
        self.count(group, properties.get(PROPERTY_RETRY_TOPIC, topic), properties)
        return self.queue(group, now_ms)

    def queue(self, group: str, now_ms: int) -> ConsumeQueue:
        """The queue of a group's dead letters."""
        name = DLQ_TOPIC_PREFIX + group
        self._context.topics.ensure(name, DEAD_LETTER_QUEUES, PERM_READ_WRITE, now_ms)
        queue = self._context.store.make_queue(name.encode(), 0)
        assert queue is not None
        return queue

    def count(self, group: str, topic: str, properties: dict[str, str]) -> None:
        """Count and log a dead letter."""
        self.counts[group, topic] += 1
        log.info(
            "moved message %s of topic %s to the dead letters of group %s",
            properties.get("UNIQ_KEY"),
            topic,
            group,
        )
