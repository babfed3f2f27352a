"""How far each group has consumed, with pending resets and remembered pull offsets.

Only the offsets themselves are in the table and so in its file. A pending reset (the consumer has
not been sent to its new offset yet) and the place of the last pull live in memory; a restart
forgets them, and the offset that the reset has set stands.
"""

import logging
from collections.abc import Callable, Mapping

from penstock.config import Live
from penstock.store.store import MessageStore
from penstock.store.tables import ConsumerOffsetTable

log = logging.getLogger(__name__)

Queues = dict[int, int]  # queue → offset


class Offsets:
    """Progress of consumer groups."""

    def __init__(self, table: ConsumerOffsetTable, store: MessageStore, settings: Live) -> None:
        self.table = table
        self._store = store
        self._settings = settings
        self._resets: dict[tuple[str, str], Queues] = {}  # by (group, topic)
        self._pulled: dict[tuple[str, str], Queues] = {}

    # --- one queue

    def get(self, group: str, topic: str, queue_id: int) -> int | None:
        """The committed offset (a pending reset's, where there is one)."""
        # A reset sets the offset too, and no commit passes it: the table says both.
        return self.table.get(topic, group, queue_id)

    def commit(self, group: str, topic: str, queue_id: int, offset: int, now_ms: int) -> bool:
        """Note progress; False while a reset of this queue is pending: a commit must not undo it.

        An offset smaller than before is taken too: a consumer may go back by itself.
        """
        if self._resets and self.has_reset(group, topic, queue_id):
            return False
        before = self.table.commit(topic, group, queue_id, offset, now_ms)
        if before is not None and offset < before:
            log.info(
                "%s goes back from %d to %d on queue %d of %s",
                group,
                before,
                offset,
                queue_id,
                topic,
            )
        return True

    def note_pull(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Remember where the group pulled last; in memory only."""
        queues = self._pulled.get((group, topic))
        if queues is None:
            queues = self._pulled[group, topic] = {}
        queues[queue_id] = offset

    def pulled(self, group: str, topic: str, queue_id: int) -> int | None:
        """Where the group pulled last; its committed offset if it did not pull since the start."""
        offset = self._pulled.get((group, topic), {}).get(queue_id)
        return self.get(group, topic, queue_id) if offset is None else offset

    def starts_young(self, topic: str, queue_id: int) -> Callable[[], bool] | None:
        """Whether a group without progress begins this queue with its first message.

        It does while the queue is young: its message 0 exists and lies in the newest `hot_bytes` of
        the log. RocketMQ asks whether that message is in the page cache; a distance in the log
        means the same and stands across restarts, when a group that has not committed yet would
        otherwise skip what it was about to consume. None means no; the work may read the disk.
        """
        store = self._store
        queue = store.queue(topic, queue_id)
        if queue is None or queue.min_offset > 0 or store.max_offset(topic, queue_id) <= 0:
            return None
        young_from = store.confirm_offset - self._settings.current.store.hot_bytes

        def look() -> bool:
            entry = queue.entry(0)
            return entry is not None and entry[0] >= max(young_from, store.log.begin())

        return look

    # --- resets

    def reset(self, group: str, topic: str, offsets: Mapping[int, int], now_ms: int) -> None:
        """Set offsets; the next pull of each queue is sent there (`take_reset`).

        Until then commits are ignored. Without `server_side_reset` consumers are to be told in
        another way, and nothing is pending.
        """
        for queue_id, offset in offsets.items():
            self.table.commit(topic, group, queue_id, offset, now_ms)
        pulled = self._pulled.get((group, topic), {})
        for queue_id in offsets:
            pulled.pop(queue_id, None)
        if self._settings.current.broker.server_side_reset and offsets:
            self._resets.setdefault((group, topic), {}).update(offsets)

    def has_reset(self, group: str, topic: str, queue_id: int) -> bool:
        """Whether a reset of this queue is pending."""
        return queue_id in self._resets.get((group, topic), ())

    def take_reset(self, group: str, topic: str, queue_id: int) -> int | None:
        """The pending reset of a queue, which is done with this."""
        if not self._resets:
            return None
        queues = self._resets.get((group, topic))
        if queues is None or queue_id not in queues:
            return None
        offset = queues.pop(queue_id)
        if not queues:
            del self._resets[group, topic]
        return offset

    # --- topics and groups

    def queues(self, group: str, topic: str) -> Mapping[int, int]:
        """All committed offsets of the group on the topic, by queue."""
        return self.table.queues(topic, group)

    def topics_of_group(self, group: str) -> list[str]:
        """The topics on which the group has progress."""
        return self.table.topics_of(group)

    def groups_of_topic(self, topic: str) -> list[str]:
        """The groups that have progress on the topic."""
        return self.table.groups_of(topic)

    def clone(self, source: str, target: str, topic: str, now_ms: int) -> bool:
        """Let a group stand where another one stands on a topic; False if that stands nowhere.

        Progress of the target on queues where the source has none is forgotten.
        """
        offsets = dict(self.queues(source, topic))
        if not offsets:
            return False
        self._forget(target, topic, now_ms)
        for queue_id, offset in offsets.items():
            self.table.commit(topic, target, queue_id, offset, now_ms)
        return True

    def remove_topic(self, topic: str, now_ms: int) -> None:
        """The topic is gone: forget the progress of all groups on it."""
        in_memory = {group for group, other in (*self._resets, *self._pulled) if other == topic}
        for group in in_memory.union(self.groups_of_topic(topic)):
            self._forget(group, topic, now_ms)

    def remove_group(self, group: str, now_ms: int) -> None:
        """The group is gone: forget its progress on all topics."""
        in_memory = {topic for other, topic in (*self._resets, *self._pulled) if other == group}
        for topic in in_memory.union(self.topics_of_group(group)):
            self._forget(group, topic, now_ms)

    def _forget(self, group: str, topic: str, now_ms: int) -> None:
        self.table.remove(topic, group, now_ms)
        self._resets.pop((group, topic), None)
        self._pulled.pop((group, topic), None)
