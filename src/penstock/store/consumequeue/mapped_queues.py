"""Which queues have a file mapped, and which of them are unmapped next.

Only writing maps a queue's file (reading never does), so an idle queue can give its mapping back.
The clock algorithm decides: queues stand in a list; one that comes to its front and was used since
it was last there goes to the end, the others are unmapped. Marking a queue as used is one store
(`ConsumeQueue.used`).

Mappings are used by the writer's thread alone; the pool reads and syncs files by name. So queues
are unmapped here, in that thread, without a lock.
"""

from collections import OrderedDict
from typing import TYPE_CHECKING

from penstock.config import StoreConfig
from penstock.store.disk import Disk

if TYPE_CHECKING:
    from penstock.store.consumequeue.consumequeue import ConsumeQueue


def mapped_max(disk: Disk, config: StoreConfig) -> int:
    """How many queue files may be mapped: at most half of what the system allows a process."""
    return max(min(config.queues_mapped_max, disk.mappings_max() // 2), 1)


CHECKED_MAX = 512
"""Most queues that one call of `unmap_idle` looks at: about a millisecond's work."""


class MappedQueues:
    """The queues that have a file mapped; for the writer's thread only."""

    def __init__(self, mapped_max: int = 1 << 30) -> None:
        self.mapped_max = mapped_max
        self._since_ms: OrderedDict[ConsumeQueue, int] = OrderedDict()  # when each was appended
        self._time_ms = 0

    def __len__(self) -> int:
        return len(self._since_ms)

    def add(self, queue: "ConsumeQueue") -> None:
        """A queue maps a file; others are unmapped at once if there are too many."""
        while len(self._since_ms) >= max(self.mapped_max, 1):
            first = next(iter(self._since_ms))
            if first.used:
                self._move_to_end(first)
            else:
                first.unmap(0)
        self._since_ms[queue] = self._time_ms

    def discard(self, queue: "ConsumeQueue") -> None:
        """The queue's file is no longer mapped."""
        self._since_ms.pop(queue, None)

    def unmap_idle(self, elapsed_ms: int, idle_ms: int, confirm_offset: int) -> list[object]:
        """Unmap the queues that were synced and not used for `idle_ms` at least.

        Each is looked at once in that time, so it may take twice as long. Returns the mappings:
        closing one takes some microseconds, so the pool should do it.
        """
        self._time_ms += elapsed_ms
        due: list[ConsumeQueue] = []
        for queue, since_ms in self._since_ms.items():
            if len(due) >= CHECKED_MAX or since_ms > self._time_ms - idle_ms:
                break
            due.append(queue)
        mappings = []
        for queue in due:
            if queue.used or queue.dirty:
                self._move_to_end(queue)
            else:
                mappings.append(queue.unmap(confirm_offset))
        return mappings

    def unmap_all(self) -> None:
        """Unmap every queue."""
        for queue in list(self._since_ms):
            queue.unmap(0)

    def _move_to_end(self, queue: "ConsumeQueue") -> None:
        queue.used = False
        self._since_ms[queue] = self._time_ms
        self._since_ms.move_to_end(queue)
