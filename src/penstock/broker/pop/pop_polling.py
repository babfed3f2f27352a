"""Pops and notifications that wait: one line for each group, topic and queue (or all queues).

A line hears of messages in its queues and in the group's retry topics, also in one that is made
while it waits. What else may let a pop succeed calls a line by hand: an acknowledgement in an
ordered queue, the end of its invisible time, a queue that was being read for somebody else.
"""

from collections.abc import Iterator
from operator import is_not
from typing import Final

from penstock.broker.context import Parts
from penstock.broker.long_polling import Line
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

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._lines: dict[tuple[str, str], dict[tuple[bool, int], Line]] = {}
        self._tidy_ms = 0

    def retry_topics(self, topic: str, group: str) -> list[str]:
        """The names of the retry topics that the group pops from, the one in use first."""
        if topic.startswith(RETRY_TOPIC_PREFIX):
            return []  # what is not acknowledged there comes back there
        broker = self._parts.settings.current.broker
        if not broker.pop_retry_topic_v2:
            return [retry_topic(topic, group, RetryKind.V1)]
        kinds = [RetryKind.V2, RetryKind.V1][: 2 if broker.pop_retry_topic_v1_read else 1]
        return [retry_topic(topic, group, kind) for kind in kinds]

    def line(self, ask: Ask, *, notify: bool) -> Line | None:
        """Where a request waits; None if too many wait already."""
        broker = self._parts.settings.current.broker
        lines = self._lines.setdefault((ask.topic, ask.group), {})
        line = lines.get((notify, ask.queue_id))
        if line is None:
            line = lines[notify, ask.queue_id] = Line()
        full = len(line.waiting) > broker.pop_waiting_per_queue_max
        if full or self._parts.holds.lined >= broker.pop_waiting_max:
            return None
        topics = self._parts.topics
        names = [ask.topic, *self.retry_topics(ask.topic, ask.group)]
        origin = tuple(map(topics.get, names))
        # The very same: one that was deleted and made anew has other queues.
        if len(origin) != len(line.origin) or any(map(is_not, origin, line.origin)):
            line.origin = origin
            line.listen_at(self._queues(ask, names))
        # From now on, not from when the request is in the line: its turn may go on with a send.
        self._parts.holds.listen(line)
        return line

    def _queues(self, ask: Ask, names: list[str]) -> Iterator[ConsumeQueue]:
        store, topics = self._parts.store, self._parts.topics
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
        line = self._lines.get((topic, group), {}).get((False, queue_id))
        return 0 if line is None else len(line.waiting)

    def call(self, topic: str, group: str, queue_id: int) -> None:
        """A queue has something for whoever waits for it, or for any queue; first come."""
        for (_, place), line in list(self._lines.get((topic, group), {}).items()):
            if place in (ALL_QUEUES, queue_id) or queue_id == ANY_LINE:
                self._parts.holds.call(line)

    def call_for(self, topic: str, group: str, place: tuple[str, int]) -> None:
        """As `call`, for a queue of the topic or of one of its retry topics."""
        self.call(topic, group, place[1] if place[0] == topic else ANY_LINE)

    def listen(self, topic: str, group: str, queue: ConsumeQueue) -> None:
        """A retry queue of the group gets messages: hear of them."""
        for line in self._lines.get((topic, group), {}).values():
            line.listen_at((queue,))
            if line.waiting:
                self._parts.holds.listen(line)

    def tick(self, now_ms: int) -> None:
        """Forget lines in which nobody waits."""
        if 0 <= now_ms - self._tidy_ms < TIDY_MS:
            return
        self._tidy_ms = now_ms
        for name, lines in list(self._lines.items()):
            for key, line in list(lines.items()):
                if not line.waiting:
                    self._parts.holds.dismiss(line)
                    del lines[key]
            if not lines:
                del self._lines[name]
