"""Pops in order: of each queue one group has one pop open at a time.

A queue that was popped in order is blocked for its group until every message of that pop is
acknowledged or visible again. Each message counts from the pop on, or from the last change of its
invisible time. The same attempt may pop again at once: its answer was lost on the way.

The progress of the group follows the acknowledgements: `commit_and_next` tells the offset from
which the group goes on, which is the first message that is still open. When messages that were not
acknowledged are popped again, they are counted, and the answer tells clients how often.

Plain state: nothing here waits, reads a clock or writes. `due` and `freed` tell when queues open by
themselves, so that held requests can be woken.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Final, NamedTuple

from penstock.store.tables import FILE_BYTES_MAX, ConfigFile
from penstock.wire import fastjson
from penstock.wire.bodies.table_bodies import ConsumerOrderInfoFile, OrderInfo
from penstock.wire.receipt_handle import QueueKey, format_order_counts, kind_of

NEVER: Final = 1 << 62
NOT_LENT: Final = -1
"""Answer of `commit_and_next`: the open pop holds no such message."""
OUTDATED: Final = -2
"""Answer of `commit_and_next`: the queue was popped again since."""

OFFSETS_MAX: Final = 64  # acknowledgements are the bits of a Java long
IDLE_MS: Final = 24 * 3600 * 1000
INVISIBLE_MS: Final = 60_000
"""For files of old brokers, which noted no invisible time."""

_CLOCK_MS: Final = 1_000
_LONG_MASK: Final = (1 << 64) - 1


class OrderedQueue(NamedTuple):
    """A queue as one group sees it."""

    topic: str
    group: str
    queue_id: int


class _OpenPop:
    """The last pop of a queue."""

    __slots__ = (
        "acked",
        "attempt_id",
        "counts",
        "free_ms",
        "invisible_ms",
        "offsets",
        "pop_ms",
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
        self.visible_ms: dict[int, int] = {}  # by offset, where it was changed
        self.counts: dict[int, int] | None = None  # by offset, where it was lent before
        self.used_ms = pop_ms
        self.free_ms = pop_ms + invisible_ms

    def open_offsets(self) -> Iterator[int]:
        """What is not acknowledged."""
        for index, offset in enumerate(self.offsets):
            if not self.acked >> index & 1:
                yield offset

    def settle(self) -> None:
        """Find out anew when the queue is free."""
        ends = (
            self.visible_ms.get(offset, self.pop_ms + self.invisible_ms)
            for offset in self.open_offsets()
        )
        self.free_ms = max(ends, default=0)


class OrderedPops:
    """The open pop of each (topic, group, queue) that is popped in order."""

    FILE: ClassVar[str] = "config/consumerOrderInfo.json"

    def __init__(self) -> None:
        self.dirty = False
        self._pops: dict[OrderedQueue, _OpenPop] = {}
        self._ends: list[tuple[int, OrderedQueue]] = []  # heap; stale ones are skipped

    def __len__(self) -> int:
        return len(self._pops)

    def check_block(
        self, attempt_id: str | None, topic: str, group: str, queue_id: int, now_ms: int
    ) -> bool:
        """Whether the group has to wait before it may pop from the queue again."""
        pop = self._pops.get(OrderedQueue(topic, group, queue_id))
        if pop is None or (pop.attempt_id is not None and pop.attempt_id == attempt_id):
            return False
        return now_ms < pop.free_ms

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
        """Note a pop of these messages, ascending, which takes the place of the last one; gives the
        queue's items of orderCountInfo."""
        assert 0 < len(offsets) <= OFFSETS_MAX, f"an ordered pop of {len(offsets)} messages"
        queue = OrderedQueue(topic, group, queue_id)
        pop = _OpenPop(attempt_id, pop_ms, invisible_ms, list(offsets))
        before = self._pops.get(queue)
        if before is not None:
            pop.counts = _count_again(before, pop)
        self._pops[queue] = pop
        self._await_end(queue, pop)
        counts = pop.counts or {}
        least = min(counts.values()) if counts and len(counts) == len(offsets) else 0
        return format_order_counts(QueueKey(kind_of(topic), queue_id), least, counts.items())

    def commit_and_next(
        self, topic: str, group: str, queue_id: int, offset: int, pop_ms: int
    ) -> int:
        """Acknowledge a message; gives the offset from which the group goes on, or NOT_LENT or
        OUTDATED. Of a queue without an open pop nothing is known: the group goes on behind it."""
        queue = OrderedQueue(topic, group, queue_id)
        pop = self._pops.get(queue)
        if pop is None:
            return offset + 1
        if pop.pop_ms != pop_ms:
            return OUTDATED
        if offset not in pop.offsets:
            return NOT_LENT
        pop.acked |= 1 << pop.offsets.index(offset)
        self._settle(queue, pop)
        return next(pop.open_offsets(), pop.offsets[-1] + 1)

    def update_next_visible(
        self, topic: str, group: str, queue_id: int, offset: int, pop_ms: int, visible_ms: int
    ) -> bool:
        """A message of the open pop shall be visible at another time; False if it is not in it."""
        queue = OrderedQueue(topic, group, queue_id)
        pop = self._pops.get(queue)
        if pop is None or pop.pop_ms != pop_ms or offset not in pop.offsets:
            return False
        pop.visible_ms[offset] = visible_ms
        self._settle(queue, pop)
        return True

    def needs_ack(self, topic: str, group: str, queue_id: int, offset: int, pop_ms: int) -> bool:
        """Whether the message is in the open pop and not acknowledged yet."""
        pop = self._pops.get(OrderedQueue(topic, group, queue_id))
        return pop is not None and pop.pop_ms == pop_ms and offset in pop.open_offsets()

    # --- as values, for the journal

    def state(self, queue: OrderedQueue) -> OrderInfo | None:
        """The open pop of a queue as its file has it; None if there is none."""
        pop = self._pops.get(queue)
        return None if pop is None else _to_file(pop)

    def restore(self, queue: OrderedQueue, info: OrderInfo | None) -> None:
        """Put this open pop in the place of whatever the queue has; None for none."""
        if info is None or not 0 < len(info.offset_list) <= OFFSETS_MAX:
            self.clear(*queue)
            return
        self._pops[queue] = pop = _from_file(info)
        self._await_end(queue, pop)

    def set_back(self, now_ms: int) -> None:
        """The clock was set back: what was popped later than now is lent from now on."""
        for queue, pop in self._pops.items():
            if pop.pop_ms > now_ms + _CLOCK_MS:
                end_ms = now_ms + pop.invisible_ms
                for offset in pop.open_offsets():
                    pop.visible_ms[offset] = min(pop.visible_ms.get(offset, end_ms), end_ms)
                self._settle(queue, pop)

    def clear(self, topic: str, group: str, queue_id: int) -> None:
        """Forget the open pop, as after a reset of the group's progress: the queue is free."""
        if self._pops.pop(OrderedQueue(topic, group, queue_id), None) is not None:
            self.dirty = True

    def clean(
        self, now_ms: int, read_queues: Callable[[str], int], has_group: Callable[[str], bool]
    ) -> None:
        """Forget queues that are gone, by their topic's number of queues (0 for no topic), groups
        that are gone, and queues that are free and were not used for a day."""
        for queue, pop in list(self._pops.items()):
            idle = now_ms - pop.used_ms > IDLE_MS and now_ms >= pop.free_ms
            if idle or queue.queue_id >= read_queues(queue.topic) or not has_group(queue.group):
                del self._pops[queue]
                self.dirty = True

    # --- queues that open by themselves

    def due(self) -> int:
        """When the next queue opens by itself; NEVER if none is blocked."""
        while self._ends and not self._holds(self._ends[0]):
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else NEVER

    def freed(self, now_ms: int) -> list[OrderedQueue]:
        """The queues that have opened by themselves since this was asked last."""
        found: dict[OrderedQueue, None] = {}
        while self.due() <= now_ms:
            found[heapq.heappop(self._ends)[1]] = None
        return list(found)

    def _settle(self, queue: OrderedQueue, pop: _OpenPop) -> None:
        before = pop.free_ms
        pop.settle()
        if pop.free_ms != before:
            self._await_end(queue, pop)
        self.dirty = True

    def _await_end(self, queue: OrderedQueue, pop: _OpenPop) -> None:
        self.dirty = True
        if pop.free_ms > 0:  # else all is acknowledged: whoever did that wakes those who wait
            heapq.heappush(self._ends, (pop.free_ms, queue))
        if len(self._ends) > 2 * len(self._pops) + 64:
            self._ends = list({end for end in self._ends if self._holds(end)})
            heapq.heapify(self._ends)

    def _holds(self, end: tuple[int, OrderedQueue]) -> bool:
        """Whether an end is still the one of its queue."""
        pop = self._pops.get(end[1])
        return pop is not None and pop.free_ms == end[0]

    # --- the file

    def load(self, file: ConfigFile) -> bool:
        """Take over what the file holds; False if there is none yet."""
        loaded = file.load(_parse)
        if loaded is None:
            return False
        self._pops = {}
        for key, queues in loaded.table.items():
            topic, _, group = key.rpartition("@")
            for queue_id, info in queues.items():
                if 0 < len(info.offset_list) <= OFFSETS_MAX:
                    self._pops[OrderedQueue(topic, group, queue_id)] = _from_file(info)
        self._ends = [(pop.free_ms, queue) for queue, pop in self._pops.items() if pop.free_ms > 0]
        heapq.heapify(self._ends)
        self.dirty = False
        return True

    def snapshot(self) -> bytes:
        """The whole file; the table counts as clean from here on."""
        table: dict[str, dict[int, OrderInfo]] = {}
        for queue, pop in self._pops.items():
            key = f"{queue.topic}@{queue.group}"
            table.setdefault(key, {})[queue.queue_id] = _to_file(pop)
        self.dirty = False
        return fastjson.encode_pretty(ConsumerOrderInfoFile(table=table))


def _count_again(before: _OpenPop, pop: _OpenPop) -> dict[int, int]:
    """How often the messages of a pop were lent before it; those never lent are left out."""
    counts = before.counts or {}
    if before.attempt_id is not None and before.attempt_id == pop.attempt_id:
        return {offset: counts[offset] for offset in pop.offsets if offset in counts}
    lent = set(before.offsets)
    return {offset: counts.get(offset, 0) + 1 for offset in pop.offsets if offset in lent}


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
    pop.settle()
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
