"""Which queues have a file mapped, and which of them rest next.

Only writing maps a queue's file (reading never does), so what is idle can let go of it. The clock
algorithm decides: queues stand in a row; whoever comes to its front and was used since it last
stood there goes to the end, the others rest. Being used costs one store (`ConsumeQueue.used`).

Mappings are used by the writer's thread alone; the pool reads and syncs files by name. So they are
taken away here, in that thread, without asking anybody.
"""

from collections import OrderedDict
from typing import TYPE_CHECKING

from penstock.config import StoreConfig
from penstock.store.disk import Disk

if TYPE_CHECKING:
    from penstock.store.consumequeue.consumequeue import ConsumeQueue


def mapped_max(disk: Disk, config: StoreConfig) -> int:
    """How many queue files may be mapped: where each costs a handle, half of what there are."""
    limit = disk.handles_for_mappings()
    most = config.queues_mapped_max
    return most if limit is None else max(min(most, limit // 2), 1)


LOOKS_MAX = 512
"""Most queues that are looked at in one turn: about a millisecond's work."""


class Awake:
    """The queues that have a file mapped; the writer's thread only."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.most = most
        self._row: OrderedDict[ConsumeQueue, int] = OrderedDict()  # since when it stands there
        self._time_ms = 0

    def __len__(self) -> int:
        return len(self._row)

    def add(self, queue: "ConsumeQueue") -> None:
        """A queue maps a file: others rest at once if they are too many."""
        while len(self._row) >= max(self.most, 1):
            first = next(iter(self._row))
            if first.used:
                self._move_back(first)
            else:
                first.rest(0)
        self._row[queue] = self._time_ms

    def drop(self, queue: "ConsumeQueue") -> None:
        """The queue's file is no longer mapped."""
        self._row.pop(queue, None)

    def turn(self, elapsed_ms: int, rest_ms: int, confirmed: int) -> list[object]:
        """Time has passed: those rest that were not used (and are synced) for `rest_ms` at least.

        Each is looked at once in that time, so it is twice as long at most. Gives their mappings:
        letting go of one costs some microseconds, and belongs into the pool.
        """
        self._time_ms += elapsed_ms
        due: list[ConsumeQueue] = []
        for queue, since_ms in self._row.items():
            if len(due) >= LOOKS_MAX or since_ms > self._time_ms - rest_ms:
                break
            due.append(queue)
        mappings = []
        for queue in due:
            if queue.used or queue.dirty:
                self._move_back(queue)
            else:
                mappings.append(queue.rest(confirmed))
        return mappings

    def rest_all(self) -> None:
        """Let go of everything, at once."""
        for queue in list(self._row):
            queue.rest(0)

    def _move_back(self, queue: "ConsumeQueue") -> None:
        queue.used = False
        self._row[queue] = self._time_ms
        self._row.move_to_end(queue)
