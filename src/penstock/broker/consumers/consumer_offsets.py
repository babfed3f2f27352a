"""Consumer offsets, pending resets and the offsets of the last pulls.

Only the offsets are in the table and its file. A pending reset (the consumer does not know its new
offset yet) and the offset of the last pull are in memory only. After a restart they are gone; the
offset that a reset has set stays.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

from penstock.config import LiveSettings
from penstock.store.store import MessageStore
from penstock.store.tables.consumer_offset_table import ConsumerOffsetTable
from penstock.wire.codes import is_internal_topic

log = logging.getLogger(__name__)

Queues = dict[int, int]  # queue → offset


class ConsumerOffsets:
    """The offsets of all consumer groups."""

    def __init__(
        self,
        table: ConsumerOffsetTable,
        store: MessageStore,
        settings: LiveSettings,
        *,
        commits: dict[tuple[str, str, int], int] | None = None,
    ) -> None:
        """`commits` collects the last commit of each group, topic and queue, for the master."""
        self.table = table
        self._commits = commits
        self._store = store
        self._settings = settings
        self._resets = _OffsetsInMemory()
        self._pulled = _OffsetsInMemory()

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
        if self._commits is not None:
            self._commits[group, topic, queue_id] = offset
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
        self._pulled.make(group, topic)[queue_id] = offset

    def pulled(self, group: str, topic: str, queue_id: int) -> int | None:
        """The offset of the group's last pull; the committed one if there was none since start."""
        queues = self._pulled.of(group, topic)
        offset = None if queues is None else queues.get(queue_id)
        return self.get(group, topic, queue_id) if offset is None else offset

    def pulled_in(self, group: str, topic: str) -> Mapping[int, int]:
        """The offsets of the group's last pulls since the start, by queue."""
        return self._pulled.of(group, topic) or {}

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
        pulled = self._pulled.of(group, topic)
        if pulled is not None:
            for queue_id in offsets:
                pulled.pop(queue_id, None)
        if self._settings.current.broker.server_side_reset and offsets:
            self._resets.make(group, topic).update(offsets)

    def has_resets(self) -> bool:
        """Whether any reset is pending."""
        return bool(self._resets)

    def has_reset(self, group: str, topic: str, queue_id: int) -> bool:
        """Whether a reset of this queue is pending."""
        return queue_id in (self._resets.of(group, topic) or ())

    def take_reset(self, group: str, topic: str, queue_id: int) -> int | None:
        """Take the pending reset of a queue."""
        if not self._resets:
            return None
        queues = self._resets.of(group, topic)
        if queues is None or queue_id not in queues:
            return None
        offset = queues.pop(queue_id)
        if not queues:
            self._resets.remove(group, topic)
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
        if not self.table.copy(topic, source, target, now_ms):
            return False
        self._resets.remove(target, topic)
        self._pulled.remove(target, topic)
        return True

    def remove_topic(self, topic: str, now_ms: int) -> Iterator[None]:
        """Remove the offsets of all groups on a deleted topic, one group after another."""
        in_memory = (self._resets.groups_of(topic), self._pulled.groups_of(topic))
        for group in {*self.groups_of_topic(topic), *in_memory[0], *in_memory[1]}:
            self._remove(group, topic, now_ms)
            yield

    def remove_group(self, group: str, now_ms: int) -> Iterator[None]:
        """Remove all offsets of a deleted group, except the broker's own on internal topics, one
        topic after another."""
        in_memory = (self._resets.topics_of(group), self._pulled.topics_of(group))
        for topic in {*self.topics_of_group(group), *in_memory[0], *in_memory[1]}:
            if not is_internal_topic(topic):
                self._remove(group, topic, now_ms)
            yield

    def _remove(self, group: str, topic: str, now_ms: int) -> None:
        self.table.remove(topic, group, now_ms)
        self._resets.remove(group, topic)
        self._pulled.remove(group, topic)


class _OffsetsInMemory:
    """Offsets by group and topic that are not in the table."""

    def __init__(self) -> None:
        self._queues: dict[tuple[str, str], Queues] = {}
        self._topics: dict[str, dict[str, None]] = {}  # by group
        self._groups: dict[str, dict[str, None]] = {}  # by topic

    def __bool__(self) -> bool:
        return bool(self._queues)

    def of(self, group: str, topic: str) -> Queues | None:
        return self._queues.get((group, topic))

    def make(self, group: str, topic: str) -> Queues:
        """The offsets of the group on the topic, to be changed."""
        queues = self._queues.get((group, topic))
        if queues is None:
            queues = self._queues[group, topic] = {}
            self._topics.setdefault(group, {})[topic] = None
            self._groups.setdefault(topic, {})[group] = None
        return queues

    def remove(self, group: str, topic: str) -> None:
        if self._queues.pop((group, topic), None) is None:
            return
        for table, name, other in ((self._topics, group, topic), (self._groups, topic, group)):
            del table[name][other]
            if not table[name]:
                del table[name]

    def topics_of(self, group: str) -> Iterable[str]:
        return self._topics.get(group, ())

    def groups_of(self, topic: str) -> Iterable[str]:
        return self._groups.get(topic, ())
