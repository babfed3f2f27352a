"""POP checkpoints: the messages of one queue that one pop delivered to a group.

A pop creates one checkpoint per queue; a change of the invisible time creates one with a single
message. A checkpoint is closed when all its messages are acknowledged or revived. This module holds
the state in memory; the revive log (`revive_log`) makes it survive a restart.

    by key            topic, group, queue, start offset and pop time, as in receipt handles
    by time           a heap of the times at which messages become visible again
    by revive offset  the open checkpoints of each queue of the revive log, in the order of their
                      entries: the log is needed from the first one on
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

NEVER: Final = 1 << 62
CHECKPOINT_MESSAGES_MAX: Final = 32
"""Maximum number of messages of a checkpoint, as of a pop."""
EARLY_ACKS_MAX: Final = 10_000
"""Checkpoints whose acks were read before them, as happens in the log of RocketMQ's brokers."""
CLOCK_TOLERANCE_MS: Final = 1_000
"""Pop times may be slightly ahead of the clock, because two checkpoints of a queue and start offset
never share one."""
STALE_MIN: Final = 1024
"""Stale heap entries that are kept, in addition to twice the number of open checkpoints."""
MESSAGES_MAX: Final = 62
"""Maximum number of messages that the bits of a checkpoint can have."""
_int = int


class CheckpointKey(NamedTuple):
    """Identifies a checkpoint."""

    topic: str
    group: str
    queue_id: int
    start_offset: int
    pop_ms: int


class PopCheckpoint:
    """Messages of one queue that are in flight together."""

    def __init__(
        self, key: CheckpointKey, invisible_ms: int, offsets: Sequence[int], revive_queue_id: int
    ) -> None:
        """The offsets are those of its messages, at most MESSAGES_MAX of them."""
        self.key: CheckpointKey = key
        # Topic, group and queue.
        self.queue: tuple[str, str, int] = key[:3]
        self.start_offset: int = key.start_offset
        self.invisible_ms: int = invisible_ms
        self.revive_queue_id: int = revive_queue_id
        self.count: int = len(offsets)
        assert self.count <= MESSAGES_MAX, self.count
        # Distances of the messages from the start offset; None if they are 0, 1, 2, … as usual.
        self._distances: Sequence[int] | None = None
        usual = range(self.start_offset, self.start_offset + self.count)
        if offsets != usual and list(offsets) != list(usual):
            self._distances = array("q", [offset - self.start_offset for offset in offsets])
        # Bit k: the k-th message is acknowledged.
        self.acked: int = 0
        self.open: bool = True
        # When its open messages are revived.
        self.due_ms: int = key.pop_ms + invisible_ms
        # Its entry in the revive log: queue offset and log offset.
        self.revive_offset: int = -1
        self.revive_log_offset: int = 0
        # The lowest log offset of its messages.
        self.log_offset: int = 0

    def __len__(self) -> int:
        return self.count

    def distance(self, index: int) -> int:
        """The distance of a message from the start offset."""
        return index if self._distances is None else self._distances[index]

    def offsets(self) -> list[int]:
        """Queue offsets of its messages, in the order of the bits."""
        return [self.start_offset + self.distance(index) for index in range(self.count)]

    def end_offset(self) -> int:
        """The queue offset after its last message."""
        if self.count == 0:
            return self.start_offset
        return self.start_offset + self.distance(self.count - 1) + 1

    def bit_of(self, offset: int) -> int:
        """The bit of a message; 0 if it is not in this checkpoint."""
        distance = offset - self.start_offset
        bit = 1
        if self._distances is None:
            return bit << distance if 0 <= distance < self.count else 0
        index = 0
        while index < self.count:
            if self._distances[index] == distance:
                return bit << index
            index += 1
        return 0

    def bits_of(self, distances: int) -> int:
        """The bits of messages by their distances from the start offset: bit k for distance k."""
        if self._distances is None:
            bit = 1
            return distances & ((bit << self.count) - 1)
        bits = 0
        for index, distance in enumerate(self._distances):
            bits |= (distances >> distance & 1) << index
        return bits

    def open_offsets(self) -> list[int]:
        """Queue offsets of the messages that are in flight."""
        return [
            offset for index, offset in enumerate(self.offsets()) if not self.acked >> index & 1
        ]

    def in_flight_count(self) -> int:
        """The number of messages that are in flight."""
        return self.count - count_bits(self.acked)


def count_bits(bits: _int) -> _int:
    """The number of bits that are set."""
    count = 0
    while bits:
        bits &= bits - 1
        count += 1
    return count


class PopCheckpoints:
    """All open checkpoints."""

    def __init__(self, queues: int) -> None:
        self._by_key: dict[tuple[str, str, int, int, int], PopCheckpoint] = {}
        self._due_heap: list[tuple[int, int, PopCheckpoint]] = []
        self._sequence: int = 0
        self._by_revive_offset: list[deque[tuple[int, PopCheckpoint]]] = [
            deque() for _ in range(queues)
        ]
        self._early_acks: OrderedDict[CheckpointKey, set[int]] = OrderedDict()
        # Checkpoints by queue of the revive log.
        self.open_by_queue: list[int] = [0] * queues
        # Messages by topic, group and queue; without those that have none.
        self.in_flight: dict[tuple[str, str, int], int] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[PopCheckpoint]:
        return iter(self._by_key.values())

    def get(self, key: tuple[str, str, int, int, int]) -> PopCheckpoint | None:
        """The open checkpoint with this CheckpointKey, or with the same values in a tuple."""
        return self._by_key.get(key)

    def in_flight_in(self, queue: tuple[str, str, int]) -> int:
        """The number of messages in flight of a topic, group and queue."""
        return self.in_flight.get(queue, 0)

    # --- open and close

    def add(self, checkpoint: PopCheckpoint) -> None:
        """Add a checkpoint whose entry is already in the revive log."""
        assert checkpoint.key not in self._by_key, checkpoint.key
        if checkpoint.in_flight_count() == 0:
            checkpoint.open = False
            return
        self._by_key[checkpoint.key] = checkpoint
        queue = checkpoint.queue
        self.in_flight[queue] = self.in_flight_in(queue) + checkpoint.in_flight_count()
        self.open_by_queue[checkpoint.revive_queue_id] += 1
        self._by_revive_offset[checkpoint.revive_queue_id].append(
            (checkpoint.revive_offset, checkpoint)
        )
        self.set_due(checkpoint, checkpoint.due_ms)

    def ack(self, checkpoint: PopCheckpoint, bits: int) -> int:
        """Mark messages as acknowledged or revived; returns how many of them were in flight.

        The checkpoint is closed when none is left.
        """
        fresh = bits & ~checkpoint.acked
        count = count_bits(fresh)
        if count and checkpoint.open:
            checkpoint.acked |= fresh
            self._subtract_in_flight(checkpoint, count)
            if checkpoint.in_flight_count() == 0:
                self.close(checkpoint)
        return count

    def ack_early(self, key: CheckpointKey, offsets: Sequence[int]) -> None:
        """Remember acks of a checkpoint that has not been read yet."""
        self._early_acks.setdefault(key, set()).update(offsets[:CHECKPOINT_MESSAGES_MAX])
        while len(self._early_acks) > EARLY_ACKS_MAX:
            self._early_acks.popitem(last=False)

    def apply_early_acks(self, checkpoint: PopCheckpoint) -> None:
        """Apply the acks that were read before their checkpoint."""
        for offset in self._early_acks.pop(checkpoint.key, ()):
            checkpoint.acked |= checkpoint.bit_of(offset)

    def close(self, checkpoint: PopCheckpoint) -> None:
        """Close a checkpoint; messages that are still in flight are dropped from it."""
        if checkpoint.open:
            checkpoint.open = False
            del self._by_key[checkpoint.key]
            self.open_by_queue[checkpoint.revive_queue_id] -= 1
            self._subtract_in_flight(checkpoint, checkpoint.in_flight_count())

    def _subtract_in_flight(self, checkpoint: PopCheckpoint, count: int) -> None:
        left = self.in_flight_in(checkpoint.queue) - count
        if left > 0:
            self.in_flight[checkpoint.queue] = left
        else:
            self.in_flight.pop(checkpoint.queue, None)

    # --- by time

    def set_due(self, checkpoint: PopCheckpoint, due_ms: int) -> None:
        """Revive the open messages of a checkpoint at this time."""
        checkpoint.due_ms = due_ms
        self._sequence += 1
        heapq.heappush(self._due_heap, (due_ms, self._sequence, checkpoint))
        if len(self._due_heap) > 2 * len(self._by_key) + STALE_MIN:
            self._due_heap = [entry for entry in self._due_heap if _is_current(entry)]
            heapq.heapify(self._due_heap)

    def due(self) -> int:
        """When the next checkpoint is due; NEVER if none is open."""
        while self._due_heap and not _is_current(self._due_heap[0]):
            heapq.heappop(self._due_heap)
        return self._due_heap[0][0] if self._due_heap else NEVER

    def first_due(self, now_ms: int) -> PopCheckpoint | None:
        """The first checkpoint that is due, until it is closed or rescheduled."""
        return self._due_heap[0][2] if self.due() <= now_ms else None

    def on_clock_set_back(self, now_ms: int) -> None:
        """Reschedule checkpoints with a pop time in the future: they count from now on."""
        for checkpoint in self:
            if checkpoint.key.pop_ms > now_ms + CLOCK_TOLERANCE_MS:
                checkpoint.due_ms = min(checkpoint.due_ms, now_ms + checkpoint.invisible_ms)
        self._due_heap = [
            (checkpoint.due_ms, sequence, checkpoint) for sequence, checkpoint in enumerate(self)
        ]
        heapq.heapify(self._due_heap)
        self._sequence = len(self._due_heap)

    # --- by revive offset

    def rewritten(self, checkpoint: PopCheckpoint) -> None:
        """Record that a checkpoint has a newer entry in the revive log."""
        self._by_revive_offset[checkpoint.revive_queue_id].append(
            (checkpoint.revive_offset, checkpoint)
        )

    def oldest(self, queue_id: int) -> PopCheckpoint | None:
        """The open checkpoint with the oldest entry in a queue of the revive log."""
        by_offset = self._by_revive_offset[queue_id]
        while by_offset and not (
            by_offset[0][1].open and by_offset[0][1].revive_offset == by_offset[0][0]
        ):
            by_offset.popleft()
        return by_offset[0][1] if by_offset else None

    def pinned_from(self) -> int | None:
        """Lowest log offset that open checkpoints need; takes 15 ms for 200,000 of them."""
        return min((checkpoint.log_offset for checkpoint in self), default=None)


def _is_current(entry: tuple[int, int, PopCheckpoint]) -> bool:
    """Whether an entry of the heap is not stale."""
    checkpoint = entry[2]
    return checkpoint.open and checkpoint.due_ms == entry[0]
