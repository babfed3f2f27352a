"""Consumer offsets, pending resets and the offsets of the last pulls.

Only the offsets are in the table and its file. A pending reset (the consumer does not know its new
offset yet) and the offset of the last pull are in memory only. After a restart they are gone; the
offset that a reset has set stays.
"""

import logging
from collections.abc import Callable, Mapping

from penstock.config import LiveSettings
from penstock.store.store import MessageStore
from penstock.store.tables import ConsumerOffsetTable
from penstock.wire.codes import is_internal_topic

log = logging.getLogger(__name__)

Queues = dict[int, int]  # queue → offset


class ConsumerOffsets:
    """The offsets of all consumer groups."""

    def __init__(
        self, table: ConsumerOffsetTable, store: MessageStore, settings: LiveSettings
    ) -> None:
        self.table = table
        self._store = store
        self._settings = settings
        self._resets: dict[tuple[str, str], Queues] = {}  # by (group, topic)
        self._pulled: dict[tuple[str, str], Queues] = {}

    # --- one queue

    def get(self, group: str, topic: str, queue_id: int) -> int | None:
        """The committed offset, or that of a pending reset."""
        # A reset sets the offset too, and no commit overrides it: the table has both.
        return self.table.get(topic, group, queue_id)

    def commit(self, group: str, topic: str, queue_id: int, offset: int, now_ms: int) -> bool:
        """Set the offset; False while a reset of this queue is pending: a commit must not undo it.

        An offset may be smaller than before: a consumer may seek backwards.
        """
        if self._resets and self.has_reset(group, topic, queue_id):
            return False
        before = self.table.commit(topic, group, queue_id, offset, now_ms)
        if before is not None and offset < before:
            log.info(
                "group %s moved back from offset %d to %d on queue %d of %s",
                group,
                before,
                offset,
                queue_id,
                topic,
            )
        return True

    def record_pull(self, group: str, topic: str, queue_id: int, offset: int) -> None:
        """Record the offset of the group's last pull, in memory only."""
        queues = self._pulled.get((group, topic))
        if queues is None:
            queues = self._pulled[group, topic] = {}
        queues[queue_id] = offset

    def pulled(self, group: str, topic: str, queue_id: int) -> int | None:
        """The offset of the group's last pull; the committed one if there was none since start."""
        offset = self._pulled.get((group, topic), {}).get(queue_id)
        return self.get(group, topic, queue_id) if offset is None else offset

    def starts_at_zero(self, topic: str, queue_id: int) -> bool | Callable[[], bool]:
        """Whether a group without an offset starts this queue at its first message.

        It does if the queue has never had a visible message: "first" and "last" are the same
        offset, and a client that asked for the maximum offset instead would skip what arrives in
        between. It also does while the queue is young: message 0 is in the newest `hot_bytes` of
        the log. RocketMQ checks whether that message is in the page cache. A distance in the log
        means the same and survives restarts, after which a group that has not committed yet would
        skip messages. A returned function may read the disk.
        """
        store = self._store
        queue = store.queue(topic, queue_id)
        if queue is None:
            return True
        if queue.min_offset > 0:
            return False
        if store.max_offset(topic, queue_id) <= 0:
            return True
        young_from = store.confirm_offset - self._settings.current.store.hot_bytes

        def is_young() -> bool:
            entry = queue.entry(0)
            return entry is not None and entry[0] >= max(young_from, store.log.begin())

        return is_young

    # --- resets

    def reset(self, group: str, topic: str, offsets: Mapping[int, int], now_ms: int) -> None:
        """Set offsets; the next pull of each queue is directed there (`take_reset`).

        Until then commits are ignored. Without `server_side_reset` consumers are notified in
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
        """Take the pending reset of a queue."""
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
        """The topics on which the group has offsets."""
        return self.table.topics_of(group)

    def groups_of_topic(self, topic: str) -> list[str]:
        """The groups that have offsets on the topic."""
        return self.table.groups_of(topic)

    def clone(self, source: str, target: str, topic: str, now_ms: int) -> bool:
        """Copy the offsets of a group on a topic to another group; False if it has none.

        Offsets of the target on queues where the source has none are removed.
        """
        offsets = dict(self.queues(source, topic))
        if not offsets:
            return False
        self._forget(target, topic, now_ms)
        for queue_id, offset in offsets.items():
            self.table.commit(topic, target, queue_id, offset, now_ms)
        return True

    def remove_topic(self, topic: str, now_ms: int) -> None:
        """Remove the offsets of all groups on a deleted topic."""
        in_memory = {group for group, other in (*self._resets, *self._pulled) if other == topic}
        for group in in_memory.union(self.groups_of_topic(topic)):
            self._forget(group, topic, now_ms)

    def remove_group(self, group: str, now_ms: int) -> None:
        """Remove all offsets of a deleted group, except the broker's own on internal topics."""
        in_memory = {topic for other, topic in (*self._resets, *self._pulled) if other == group}
        for topic in in_memory.union(self.topics_of_group(group)):
            if not is_internal_topic(topic):
                self._forget(group, topic, now_ms)

    def _forget(self, group: str, topic: str, now_ms: int) -> None:
        self.table.remove(topic, group, now_ms)
        self._resets.pop((group, topic), None)
        self._pulled.pop((group, topic), None)
