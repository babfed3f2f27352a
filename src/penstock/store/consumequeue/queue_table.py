"""All queues of a store, found by name without making an object: open addressing over FNV.

One thread adds, removes and finds. Others may call `get` and iterate over a copy of `rows`.
"""

from array import array
from itertools import islice

from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.wire import octets


class QueueTable:
    """Queues by topic bytes and queue id."""

    def __init__(self) -> None:
        # All queues, and the same by topic and queue id.
        self.rows: list[ConsumeQueue] = []
        self.topics: dict[bytes, dict[int, ConsumeQueue]] = {}
        # The hash table: 1 + index into `rows`, 0 for a free slot. Its length is _mask + 1, a power
        # of two, and at least half of the slots are free.
        self._slots: memoryview = memoryview(array("i", bytes(4 * 64)))
        self._mask: int = 63

    def find(self, buffer: memoryview, at: int, length: int, queue_id: int) -> ConsumeQueue | None:
        """The queue of the topic whose name is at this position of the buffer."""
        slot = octets.mix_hash(buffer, at, length, queue_id) & self._mask
        while True:
            number = self._slots[slot]
            if number == 0:
                return None
            queue = self.rows[number - 1]
            if (
                queue.queue_id == queue_id
                and len(queue.topic) == length
                and octets.matches(buffer, at, queue.topic)
            ):
                return queue
            slot = (slot + 1) & self._mask

    def get(self, topic: bytes, queue_id: int) -> ConsumeQueue | None:
        queues = self.topics.get(topic)
        return None if queues is None else queues.get(queue_id)

    def of(self, topic: bytes) -> list[ConsumeQueue]:
        """All queues of a topic."""
        return list(self.topics.get(topic, {}).values())

    def add(self, queue: ConsumeQueue) -> None:
        self.rows.append(queue)
        self.topics.setdefault(queue.topic, {})[queue.queue_id] = queue
        if 2 * len(self.rows) > self._mask:
            self._grow(2 * (self._mask + 1))
        else:
            self._insert(len(self.rows))

    def remove(self, topic: bytes, count_max: int) -> list[ConsumeQueue]:
        """Remove queues of a topic; the cost does not depend on how many others there are."""
        queues = self.topics.get(topic)
        if queues is None:
            return []
        removed = list(islice(queues.values(), count_max))
        for queue in removed:
            del queues[queue.queue_id]
            self._remove(queue)
        if not queues:
            del self.topics[topic]
        return removed

    def _grow(self, slots: int) -> None:
        self._slots = memoryview(array("i", bytes(4 * slots)))
        self._mask = slots - 1
        for number in range(1, len(self.rows) + 1):
            self._insert(number)

    def _insert(self, number: int) -> None:
        slot = self._first_slot(self.rows[number - 1])
        while self._slots[slot]:
            slot = (slot + 1) & self._mask
        self._slots[slot] = number

    def _first_slot(self, queue: ConsumeQueue) -> int:
        """The slot where a search for the queue begins."""
        name = bytearray(queue.topic + b"\0")
        return octets.mix_hash(name, 0, len(queue.topic), queue.queue_id) & self._mask

    def _slot_of(self, queue: ConsumeQueue) -> int:
        slot = self._first_slot(queue)
        while self.rows[self._slots[slot] - 1] is not queue:
            slot = (slot + 1) & self._mask
        return slot

    def _remove(self, queue: ConsumeQueue) -> None:
        """Free the queue's slot; the last row takes over its number."""
        slot = self._slot_of(queue)
        number = self._slots[slot]
        last = self.rows[len(self.rows) - 1]
        self._slots[self._slot_of(last)] = number
        self.rows[number - 1] = last
        self.rows.pop()
        self._close_gap(slot)

    def _close_gap(self, gap: int) -> None:
        """Move queues up that a search would no longer reach: it ends at a free slot."""
        slot = (gap + 1) & self._mask
        while self._slots[slot]:
            first = self._first_slot(self.rows[self._slots[slot] - 1])
            if (slot - first) & self._mask >= (slot - gap) & self._mask:
                self._slots[gap] = self._slots[slot]
                gap = slot
            slot = (slot + 1) & self._mask
        self._slots[gap] = 0
