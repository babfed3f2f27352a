"""Pops and notifications that wait: one line for each group, topic and queue (or all queues).

A line hears of messages in its queues and in the group's retry topics, also in one that is made
while it waits. What else may let a pop succeed calls a line by hand: an acknowledgement in an
ordered queue, the end of its invisible time, a queue that was being read for somebody else.
"""

from collections.abc import Iterator
from operator import is_not
from typing import Final

from penstock.broker.context import BrokerContext
from penstock.broker.long_polling import WaitQueue
from penstock.broker.pop.pop_request import Ask
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.wire.codes import RETRY_TOPIC_PREFIX
from penstock.wire.receipt_handle import RetryKind, retry_topic

TIDY_MS: Final = 60_000
"""How often lines are looked at in which nobody waits."""
ALL_QUEUES: Final = -1
ANY_LINE: Final = -2
"""In place of a queue: a retry queue, from which every pop of the group takes."""


class Waiting:
    """The lines."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        self._wait_queues: dict[tuple[str, str], dict[tuple[bool, int], WaitQueue]] = {}
        self._tidy_ms = 0

    def retry_topics(self, topic: str, group: str) -> list[str]:
        """The names of the retry topics that the group pops from, the one in use first."""
        if topic.startswith(RETRY_TOPIC_PREFIX):
            return []  # what is not acknowledged there comes back there
        broker = self._context.settings.current.broker
        if not broker.pop_retry_topic_v2:
            return [retry_topic(topic, group, RetryKind.V1)]
        kinds = [RetryKind.V2, RetryKind.V1][: 2 if broker.pop_retry_topic_v1_read else 1]
        return [retry_topic(topic, group, kind) for kind in kinds]

    def wait_queue(self, ask: Ask, *, notify: bool) -> WaitQueue | None:
        """Where a request waits; None if too many wait already."""
        broker = self._context.settings.current.broker
        wait_queues = self._wait_queues.setdefault((ask.topic, ask.group), {})
        wait_queue = wait_queues.get((notify, ask.queue_id))
        if wait_queue is None:
            wait_queue = wait_queues[notify, ask.queue_id] = WaitQueue()
        full = len(wait_queue.waiting) > broker.pop_waiting_per_queue_max
        if full or self._context.long_polling.in_wait_queues >= broker.pop_waiting_max:
            return None
        topics = self._context.topics
        names = [ask.topic, *self.retry_topics(ask.topic, ask.group)]
        origin = tuple(map(topics.get, names))
        # The very same: one that was deleted and made anew has other queues.
        if len(origin) != len(wait_queue.resolved_from) or any(
            map(is_not, origin, wait_queue.resolved_from)
        ):
            wait_queue.resolved_from = origin
            wait_queue.add_queues(self._queues(ask, names))
        # From now on, not from when the request is in the line: its turn may go on with a send.
        self._context.long_polling.watch(wait_queue)
        return wait_queue

    def _queues(self, ask: Ask, names: list[str]) -> Iterator[ConsumeQueue]:
        store, topics = self._context.store, self._context.topics
        for name in names:
            config = topics.get(name)
            if config is None:
                continue
            queue_ids = range(config.read_queue_nums)
            if name == ask.topic and ask.queue_id != ALL_QUEUES:
                queue_ids = range(ask.queue_id, ask.queue_id + 1)
            for queue_id in queue_ids:
                queue = store.make_queue(name.encode(), queue_id)
                if queue is not None:
                    yield queue

    def count(self, topic: str, group: str, queue_id: int) -> int:
        """How many pops wait in a line."""
        wait_queue = self._wait_queues.get((topic, group), {}).get((False, queue_id))
        return 0 if wait_queue is None else len(wait_queue.waiting)

    def call(self, topic: str, group: str, queue_id: int) -> None:
        """A queue has something for whoever waits for it, or for any queue; first come."""
        for (_, place), wait_queue in list(self._wait_queues.get((topic, group), {}).items()):
            if place in (ALL_QUEUES, queue_id) or queue_id == ANY_LINE:
                self._context.long_polling.wake_next(wait_queue)

    def call_for(self, topic: str, group: str, place: tuple[str, int]) -> None:
        """As `call`, for a queue of the topic or of one of its retry topics."""
        self.call(topic, group, place[1] if place[0] == topic else ANY_LINE)

    def listen(self, topic: str, group: str, queue: ConsumeQueue) -> None:
        """A retry queue of the group gets messages: hear of them."""
        for wait_queue in self._wait_queues.get((topic, group), {}).values():
            wait_queue.add_queues((queue,))
            if wait_queue.waiting:
                self._context.long_polling.watch(wait_queue)

    def tick(self, now_ms: int) -> None:
        """Forget lines in which nobody waits."""
        if 0 <= now_ms - self._tidy_ms < TIDY_MS:
            return
        self._tidy_ms = now_ms
        for name, wait_queues in list(self._wait_queues.items()):
            for key, wait_queue in list(wait_queues.items()):
                if not wait_queue.waiting:
                    self._context.long_polling.unwatch(wait_queue)
                    del wait_queues[key]
            if not wait_queues:
                del self._wait_queues[name]
