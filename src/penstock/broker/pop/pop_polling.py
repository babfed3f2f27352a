"""Suspended pops and notifications: one wait queue per group, topic and queue (or all queues).

A wait queue is notified of messages in its queues and in the group's retry topics, including queues
and retry topics that are created while requests wait. Queues that never had a message are not made
for it: a topic may have a million queues. `wake` is called for every other event that lets a pop
succeed: an ack in an ordered queue, the end of its invisible time, the end of a read in the thread
pool.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from operator import is_not
from typing import Final

from penstock.broker.context import BrokerContext
from penstock.broker.long_polling import WaitQueue
from penstock.broker.pop.pop_request import PollRequest
from penstock.rpc.answers import Answer, NextIteration
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.wire.codes import RETRY_TOPIC_PREFIX
from penstock.wire.receipt_handle import RetryKind, retry_topic

CLEANUP_MS: Final = 60_000
"""Interval at which empty wait queues are removed."""
QUEUES_PER_STEP: Final = 500
"""Queues that a request looks at or watches in one step: about 2 ms."""
UNWATCHED_PER_TICK: Final = 5_000
ALL_QUEUES: Final = -1
ANY_QUEUE: Final = -2
"""In place of a queue id: a retry queue, which every pop of the group reads."""


class PopPolling:
    """The wait queues of POP requests."""

    def __init__(self, context: BrokerContext) -> None:
        self._context = context
        self._wait_queues: dict[tuple[str, str], dict[tuple[bool, int], WaitQueue]] = {}
        self._groups: dict[str, set[str]] = {}  # those in `_wait_queues`, by topic
        self._cleanup_ms = 0
        self._to_unwatch: deque[Iterator[None]] = deque()  # what is left of the last cleanup
        context.store.on_new_queue(self._watch_new_queue)

    def retry_topics(self, topic: str, group: str) -> list[str]:
        """The names of the retry topics that the group reads, the one in use first."""
        if topic.startswith(RETRY_TOPIC_PREFIX):
            return []  # messages of a retry topic are revived to the same topic
        broker = self._context.settings.current.broker
        if not broker.pop_retry_topic_v2:
            return [retry_topic(topic, group, RetryKind.V1)]
        kinds = [RetryKind.V2, RetryKind.V1][: 2 if broker.pop_retry_topic_v1_read else 1]
        return [retry_topic(topic, group, kind) for kind in kinds]

    def wait_queue(self, request: PollRequest, *, notify: bool) -> WaitQueue | None:
        """The wait queue of a request; None if too many requests wait already."""
        broker = self._context.settings.current.broker
        wait_queues = self._wait_queues.setdefault((request.topic, request.group), {})
        wait_queue = wait_queues.get((notify, request.queue_id))
        if wait_queue is None:
            # As in RocketMQ: the newest waiter of a NOTIFICATION is the least likely to be gone.
            wait_queue = WaitQueue(newest_first=notify)
            wait_queues[notify, request.queue_id] = wait_queue
            self._groups.setdefault(request.topic, set()).add(request.group)
        full = len(wait_queue.waiting) > broker.pop_waiting_per_queue_max
        if full or self._context.long_polling.in_wait_queues >= broker.pop_waiting_max:
            return None
        topics = self._context.topics
        names = [request.topic, *self.retry_topics(request.topic, request.group)]
        origin = tuple(map(topics.get, names))
        # Compare by identity: a topic that was deleted and created again has other queues.
        if len(origin) != len(wait_queue.resolved_from) or any(
            map(is_not, origin, wait_queue.resolved_from)
        ):
            wait_queue.resolved_from = origin
            wait_queue.to_add = self._queues(request, names)
        return wait_queue

    def when_watched(
        self,
        wait_queue: WaitQueue,
        at_once: Callable[[], Answer],
        later: Callable[[], Answer],
    ) -> Answer:
        """Watch all queues of a wait queue; with very many queues, in several steps.

        The answer is that of `at_once` if all are watched now, so that no arrival was missed since
        the caller has looked at them. Otherwise it is that of `later`, when all are watched.
        """

        def step() -> Answer:
            return later() if self._watch_some(wait_queue) else NextIteration(step)

        return at_once() if self._watch_some(wait_queue) else NextIteration(step)

    def _watch_some(self, wait_queue: WaitQueue) -> bool:
        """Watch more queues; whether all are watched."""
        added = list(islice(wait_queue.to_add, QUEUES_PER_STEP))
        wait_queue.add_queues(added)
        watched = self._context.long_polling.watch(wait_queue, QUEUES_PER_STEP)
        return watched and len(added) < QUEUES_PER_STEP

    def _queues(self, request: PollRequest, names: list[str]) -> Iterator[ConsumeQueue]:
        store, topics = self._context.store, self._context.topics
        for name in names:
            config = topics.get(name)
            if config is None:
                continue
            if name == request.topic and request.queue_id != ALL_QUEUES:
                queue = store.make_queue(name.encode(), request.queue_id)
                if queue is not None:
                    yield queue
                continue
            for queue in store.queues.of(name.encode()):
                if topics.get(name) is not config:  # changed or deleted meanwhile
                    break
                if queue.queue_id < config.read_queue_nums:
                    yield queue

    def _watch_new_queue(self, queue: ConsumeQueue) -> None:
        """Let the wait queues of its topic watch a queue that was made for a first message."""
        topic = queue.topic.decode()
        config = self._context.topics.get(topic) if topic in self._groups else None
        if config is None or queue.queue_id >= config.read_queue_nums:
            return
        for group in self._groups[topic]:
            for (_, queue_id), wait_queue in self._wait_queues[topic, group].items():
                if queue_id in (ALL_QUEUES, queue.queue_id):
                    wait_queue.add_queues((queue,))
                    self._context.long_polling.watch(wait_queue)

    def _forget(self, topic: str, group: str) -> None:
        groups = self._groups.get(topic, set())
        groups.discard(group)
        if not groups:
            self._groups.pop(topic, None)

    def count(self, topic: str, group: str, queue_id: int) -> int:
        """The number of pops in a wait queue."""
        wait_queue = self._wait_queues.get((topic, group), {}).get((False, queue_id))
        return 0 if wait_queue is None else len(wait_queue.waiting)

    def wake(self, topic: str, group: str, queue_id: int) -> None:
        """Wake one request of each wait queue that reads this queue."""
        for (_, key_queue_id), wait_queue in list(
            self._wait_queues.get((topic, group), {}).items()
        ):
            if key_queue_id in (ALL_QUEUES, queue_id) or queue_id == ANY_QUEUE:
                self._context.long_polling.wake_next(wait_queue)

    def wake_for(self, topic: str, group: str, key_queue_id: tuple[str, int]) -> None:
        """Like `wake`, for a queue of the topic or of one of its retry topics."""
        self.wake(topic, group, key_queue_id[1] if key_queue_id[0] == topic else ANY_QUEUE)

    def watch_retry_queue(self, topic: str, group: str, queue: ConsumeQueue) -> None:
        """Let the wait queues of the group watch a retry queue."""
        for wait_queue in self._wait_queues.get((topic, group), {}).values():
            wait_queue.add_queues((queue,))
            if wait_queue.waiting:
                self._context.long_polling.watch(wait_queue)

    def tick(self, now_ms: int) -> None:
        """Remove empty wait queues; those with very many queues take several ticks."""
        if not 0 <= now_ms - self._cleanup_ms < CLEANUP_MS:
            self._cleanup_ms = now_ms
            for name, wait_queues in list(self._wait_queues.items()):
                for key, wait_queue in list(wait_queues.items()):
                    if not wait_queue.waiting:
                        del wait_queues[key]
                        self._to_unwatch.append(self._context.long_polling.unwatch(wait_queue))
                if not wait_queues:
                    del self._wait_queues[name]
                    self._forget(*name)
        left = UNWATCHED_PER_TICK
        while self._to_unwatch and left > 0:
            done = sum(1 for _ in islice(self._to_unwatch[0], left))
            if done < left:
                self._to_unwatch.popleft()
            left -= done + 1
