"""Ordered POP: a group has at most one open pop per queue.

After an ordered pop the queue is blocked for the group until every message of that pop is
acknowledged or visible again. The invisible time of a message counts from the pop, or from its last
change. A request with the same attempt id may pop again at once: its response was lost.

The group's offset follows the acks: `commit_and_next` returns the offset of the first message that
is not acknowledged. Messages that are popped again are counted, and the response carries the count.

`due` and `take_unblocked` say when queues are unblocked by time, so that suspended requests can be
woken.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Final, NamedTuple

from penstock.store.tables.config_tables import FILE_BYTES_MAX, ConfigFile
from penstock.wire import fastjson
from penstock.wire.bodies.table_bodies import ConsumerOrderInfoFile, OrderInfo
from penstock.wire.receipt_handle import QueueKey, format_order_counts, kind_of

NEVER: Final = 1 << 62
NOT_IN_FLIGHT: Final = -1
"""Result of `commit_and_next`: the message is not in the open pop."""
OUTDATED: Final = -2
"""Result of `commit_and_next`: the queue has been popped again since."""

OFFSETS_MAX: Final = 64  # acknowledgements are the bits of a Java long
IDLE_MS: Final = 24 * 3600 * 1000
INVISIBLE_MS: Final = 60_000
"""Default for files of older brokers, which do not store an invisible time."""

CLOCK_TOLERANCE_MS: Final = 1_000
_LONG_MASK: Final = (1 << 64) - 1


class GroupQueue(NamedTuple):
    """A queue of one consumer group."""

    topic: str
    group: str
    queue_id: int


class _OpenPop:
    """The latest pop of a queue."""

    __slots__ = (
        "acked",
        "attempt_id",
        "counts",
        "invisible_ms",
        "offsets",
        "pop_ms",
        "unblocked_ms",
        "used_ms",
        "visible_ms",
    )

    def __init__(
        self, attempt_id: str | None, pop_ms: int, invisible_ms: int, offsets: list[int]
    ) -> None:
        self.attempt_id = attempt_id
        self.pop_ms = pop_ms
        self.invisible_ms = invisible_ms
        self.offsets = offsets
        self.acked = 0  # bit k: the k-th offset
        self.visible_ms: dict[int, int] = {}  # by offset, for changed invisible times
        self.counts: dict[int, int] | None = None  # by offset, for messages popped before
        self.used_ms = pop_ms
        self.unblocked_ms = pop_ms + invisible_ms

    def open_offsets(self) -> Iterator[int]:
        """Offsets that are not acknowledged."""
        for index, offset in enumerate(self.offsets):
            if not self.acked >> index & 1:
                yield offset

    def update_unblocked_ms(self) -> None:
        """Compute when the queue is unblocked by time."""
        visible_times = (
            self.visible_ms.get(offset, self.pop_ms + self.invisible_ms)
            for offset in self.open_offsets()
        )
        self.unblocked_ms = max(visible_times, default=0)


class OrderedPops:
    """The open pop of each (topic, group, queue) that is popped in order."""

    FILE: ClassVar[str] = "config/consumerOrderInfo.json"

    def __init__(self) -> None:
        self.dirty = False
        self._pops: dict[GroupQueue, _OpenPop] = {}
        self._unblock_heap: list[tuple[int, GroupQueue]] = []  # heap; stale ones are skipped

    def __len__(self) -> int:
        return len(self._pops)

    def check_block(
        self, attempt_id: str | None, topic: str, group: str, queue_id: int, now_ms: int
    ) -> bool:
        """Whether the queue is blocked for the group."""
        pop = self._pops.get(GroupQueue(topic, group, queue_id))
        if pop is None or (pop.attempt_id is not None and pop.attempt_id == attempt_id):
            return False
        return now_ms < pop.unblocked_ms

    def update(
        self,
        attempt_id: str | None,
        topic: str,
        group: str,
        queue_id: int,
        pop_ms: int,
        invisible_ms: int,
        offsets: Sequence[int],
    ) -> str:
        """Replace the open pop by one of these ascending offsets; returns the queue's items of
        orderCountInfo."""
        assert 0 < len(offsets) <= OFFSETS_MAX, f"an ordered pop of {len(offsets)} messages"
        queue = GroupQueue(topic, group, queue_id)
        pop = _OpenPop(attempt_id, pop_ms, invisible_ms, list(offsets))
        before = self._pops.get(queue)
        if before is not None:
            pop.counts = _consume_counts(before, pop)
        self._pops[queue] = pop
        self._schedule_unblock(queue, pop)
        counts = pop.counts or {}
        least = min(counts.values()) if counts and len(counts) == len(offsets) else 0
        return format_order_counts(QueueKey(kind_of(topic), queue_id), least, counts.items())

    def commit_and_next(
        self, topic: str, group: str, queue_id: int, offset: int, pop_ms: int
    ) -> int:
        """Acknowledge a message; returns the next offset of the group, NOT_IN_FLIGHT or OUTDATED.

        Without an open pop the next offset is the one after the message.
        """
        queue = GroupQueue(topic, group, queue_id)
        pop = self._pops.get(queue)
        if pop is None:
            return offset + 1
        if pop.pop_ms != pop_ms:
            return OUTDATED
        if offset not in pop.offsets:
            return NOT_IN_FLIGHT
        pop.acked |= 1 << pop.offsets.index(offset)
        self._update_unblocked_ms(queue, pop)
        return next(pop.open_offsets(), pop.offsets[-1] + 1)

    def update_next_visible(
        self, topic: str, group: str, queue_id: int, offset: int, pop_ms: int, visible_ms: int
    ) -> bool:
        """Change when a message becomes visible; False if it is not in the open pop."""
        queue = GroupQueue(topic, group, queue_id)
        pop = self._pops.get(queue)
        if pop is None or pop.pop_ms != pop_ms or offset not in pop.offsets:
            return False
        pop.visible_ms[offset] = visible_ms
        self._update_unblocked_ms(queue, pop)
        return True

    # --- state for the revive log

    def state(self, queue: GroupQueue) -> OrderInfo | None:
        """The open pop of a queue in the form of the file; None if there is none."""
        pop = self._pops.get(queue)
        return None if pop is None else _to_file(pop)

    def restore(self, queue: GroupQueue, info: OrderInfo | None) -> None:
        """Replace the open pop of a queue; None removes it."""
        if info is None or not 0 < len(info.offset_list) <= OFFSETS_MAX:
            self.clear(*queue)
            return
        self._pops[queue] = pop = _from_file(info)
        self._schedule_unblock(queue, pop)

    def on_clock_set_back(self, now_ms: int) -> None:
        """Adjust pops with a pop time in the future: their invisible time counts from now on."""
        for queue, pop in self._pops.items():
            if pop.pop_ms > now_ms + CLOCK_TOLERANCE_MS:
                end_ms = now_ms + pop.invisible_ms
                for offset in pop.open_offsets():
                    pop.visible_ms[offset] = min(pop.visible_ms.get(offset, end_ms), end_ms)
                self._update_unblocked_ms(queue, pop)

    def clear(self, topic: str, group: str, queue_id: int) -> None:
        """Remove the open pop, as after a reset of the group's offset: the queue is unblocked."""
        if self._pops.pop(GroupQueue(topic, group, queue_id), None) is not None:
            self.dirty = True

    def clean(
        self, now_ms: int, read_queues: Callable[[str], int], has_group: Callable[[str], bool]
    ) -> None:
        """Remove deleted queues and groups, and unblocked queues that were not popped for a day.

        `read_queues` returns a topic's number of read queues, 0 if it does not exist.
        """
        for queue, pop in list(self._pops.items()):
            idle = now_ms - pop.used_ms > IDLE_MS and now_ms >= pop.unblocked_ms
            if idle or queue.queue_id >= read_queues(queue.topic) or not has_group(queue.group):
                del self._pops[queue]
                self.dirty = True

    # --- queues that are unblocked by time

    def due(self) -> int:
        """When the next queue is unblocked by time; NEVER if none is blocked."""
        while self._unblock_heap and not self._is_current(self._unblock_heap[0]):
            heapq.heappop(self._unblock_heap)
        return self._unblock_heap[0][0] if self._unblock_heap else NEVER

    def take_unblocked(self, now_ms: int) -> list[GroupQueue]:
        """The queues that were unblocked by time since the last call."""
        found: dict[GroupQueue, None] = {}
        while self.due() <= now_ms:
            found[heapq.heappop(self._unblock_heap)[1]] = None
        return list(found)

    def _update_unblocked_ms(self, queue: GroupQueue, pop: _OpenPop) -> None:
        before = pop.unblocked_ms
        pop.update_unblocked_ms()
        if pop.unblocked_ms != before:
            self._schedule_unblock(queue, pop)
        self.dirty = True

    def _schedule_unblock(self, queue: GroupQueue, pop: _OpenPop) -> None:
        self.dirty = True
        if pop.unblocked_ms > 0:  # else all is acknowledged: the ack wakes waiting requests
            heapq.heappush(self._unblock_heap, (pop.unblocked_ms, queue))
        if len(self._unblock_heap) > 2 * len(self._pops) + 64:
            self._unblock_heap = list(
                {entry for entry in self._unblock_heap if self._is_current(entry)}
            )
            heapq.heapify(self._unblock_heap)

    def _is_current(self, entry: tuple[int, GroupQueue]) -> bool:
        """Whether a heap entry is still valid."""
        pop = self._pops.get(entry[1])
        return pop is not None and pop.unblocked_ms == entry[0]

    # --- the file

    def load(self, file: ConfigFile) -> bool:
        """Load the file; False if it does not exist."""
        loaded = file.load(_parse)
        if loaded is None:
            return False
        self._pops = {}
        for key, queues in loaded.table.items():
            topic, _, group = key.rpartition("@")
            for queue_id, info in queues.items():
                if 0 < len(info.offset_list) <= OFFSETS_MAX:
                    self._pops[GroupQueue(topic, group, queue_id)] = _from_file(info)
        self._unblock_heap = [
            (pop.unblocked_ms, queue) for queue, pop in self._pops.items() if pop.unblocked_ms > 0
        ]
        heapq.heapify(self._unblock_heap)
        self.dirty = False
        return True

    def snapshot(self) -> bytes:
        """The content of the file; clears `dirty`."""
        self.dirty = False
        return self.body()

    def body(self) -> bytes:
        """The content of the file, for a slave."""
        table: dict[str, dict[int, OrderInfo]] = {}
        for queue, pop in self._pops.items():
            key = f"{queue.topic}@{queue.group}"
            table.setdefault(key, {})[queue.queue_id] = _to_file(pop)
        return fastjson.encode_pretty(ConsumerOrderInfoFile(table=table))


def _consume_counts(before: _OpenPop, pop: _OpenPop) -> dict[int, int]:
    """How often each message of a pop was popped before; messages popped first are left out."""
    counts = before.counts or {}
    if before.attempt_id is not None and before.attempt_id == pop.attempt_id:
        return {offset: counts[offset] for offset in pop.offsets if offset in counts}
    before_offsets = set(before.offsets)
    return {offset: counts.get(offset, 0) + 1 for offset in pop.offsets if offset in before_offsets}


def _parse(data: bytes) -> ConsumerOrderInfoFile:
    return fastjson.decode(
        data, ConsumerOrderInfoFile, bytes_max=FILE_BYTES_MAX, loose_bytes_max=FILE_BYTES_MAX
    )


def _from_file(info: OrderInfo) -> _OpenPop:
    first, *more = info.offset_list
    invisible_ms = info.invisible_time or 0
    pop = _OpenPop(
        info.attempt_id,
        info.pop_time,
        invisible_ms if invisible_ms > 0 else INVISIBLE_MS,
        [first, *(first + distance for distance in more)],
    )
    pop.acked = info.commit_offset_bit & _LONG_MASK
    pop.visible_ms = dict(info.offset_next_visible_time or {})
    pop.counts = info.offset_consumed_count and dict(info.offset_consumed_count)
    pop.used_ms = info.last_consume_timestamp
    pop.update_unblocked_ms()
    return pop


def _to_file(pop: _OpenPop) -> OrderInfo:
    first, *more = pop.offsets
    return OrderInfo(
        pop_time=pop.pop_ms,
        invisible_time=pop.invisible_ms,
        offset_list=[first, *(offset - first for offset in more)],
        offset_next_visible_time=pop.visible_ms or None,
        offset_consumed_count=pop.counts,
        last_consume_timestamp=pop.used_ms,
        commit_offset_bit=pop.acked if pop.acked < 1 << 63 else pop.acked - (1 << 64),
        attempt_id=pop.attempt_id,
    )
