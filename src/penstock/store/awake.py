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
    from penstock.store.consumequeue import ConsumeQueue



def mapped_max(disk: Disk, config: StoreConfig) -> int:
    """How many queue files may be mapped: where each costs a handle, half of what there are."""
    limit = disk.handles_for_mappings()
    most = config.queues_mapped_max
    return most if limit is None else max(min(most, limit // 2), 1)


class Awake:
    """The queues that have a file mapped; the writer's thread only."""

    def __init__(self, most: int = 1 << 30) -> None:
        self.most = max(most, 1)
        self._row: OrderedDict[ConsumeQueue, None] = OrderedDict()
        self._owed = 0

    def __len__(self) -> int:
        return len(self._row)

    def add(self, queue: "ConsumeQueue") -> None:
        """A queue is about to map a file: others rest at once if they are too many."""
        while len(self._row) >= self.most:
            first = self._next()
            if first is not None:
                first.rest(0)
        self._row[queue] = None

    def drop(self, queue: "ConsumeQueue") -> None:
        """The queue's file is no longer mapped."""
        self._row.pop(queue, None)

    def turn(self, elapsed_ms: int, rest_ms: int, confirmed: int) -> list[object]:
        """Look at as many as are due if all are looked at once in `rest_ms`; the idle ones rest.

        So a queue rests when it was not used for once to twice that time. Gives their mappings:
        letting go of one costs some microseconds, and belongs into the pool.
        """
        due, self._owed = divmod(self._owed + len(self._row) * elapsed_ms, max(rest_ms, 1))
        mappings = []
        for _ in range(min(due, len(self._row))):
            queue = self._next(clean=True)
            if queue is not None:
                mappings.append(queue.rest(confirmed))
        return mappings

    def rest_all(self) -> None:
        """Let go of everything, at once."""
        for queue in list(self._row):
            queue.rest(0)

    def _next(self, *, clean: bool = False) -> "ConsumeQueue | None":
        """The first of the row if it may rest; if it was used (or is not synced) it moves back."""
        queue = next(iter(self._row))
        if queue.used or (clean and queue.dirty):
            queue.used = False
            self._row.move_to_end(queue)
            return None
        return queue
