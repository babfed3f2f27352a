"""All queues of a store, found by name without making an object: open addressing over FNV.

One thread adds, removes and finds. Others may `get`, and go over a copy of `rows`.
"""

from array import array

from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.wire import octets


class QueueTable:
    """Queues by topic bytes and queue id."""

    def __init__(self) -> None:
        self.rows: list[ConsumeQueue] = []
        self.topics: dict[bytes, dict[int, ConsumeQueue]] = {}
        self._places: memoryview = memoryview(array("i", bytes(4 * 64)))
        self._mask: int = 63

    def find(self, buffer: memoryview, at: int, length: int, queue_id: int) -> ConsumeQueue | None:
        """The queue of the topic whose name lies at this place."""
        place = octets.mix_hash(buffer, at, length, queue_id) & self._mask
        while True:
            number = self._places[place]
            if number == 0:
                return None
            queue = self.rows[number - 1]
            if (
                queue.queue_id == queue_id
                and len(queue.topic) == length
                and octets.matches(buffer, at, queue.topic)
            ):
                return queue
            place = (place + 1) & self._mask

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
            self._spread(2 * (self._mask + 1))
        else:
            self._place(len(self.rows))

    def remove(self, topic: bytes) -> list[ConsumeQueue]:
        """Take out all queues of a topic; this costs no more because there are many others."""
        removed = self.of(topic)
        self.topics.pop(topic, None)
        for queue in removed:
            self._take_out(queue)
        return removed

    def _spread(self, places: int) -> None:
        self._places = memoryview(array("i", bytes(4 * places)))
        self._mask = places - 1
        for number in range(1, len(self.rows) + 1):
            self._place(number)

    def _place(self, number: int) -> None:
        place = self._home(self.rows[number - 1])
        while self._places[place]:
            place = (place + 1) & self._mask
        self._places[place] = number

    def _home(self, queue: ConsumeQueue) -> int:
        """The place where a search for the queue begins."""
        room = bytearray(queue.topic + b"\0")
        return octets.mix_hash(room, 0, len(queue.topic), queue.queue_id) & self._mask

    def _place_of(self, queue: ConsumeQueue) -> int:
        place = self._home(queue)
        while self.rows[self._places[place] - 1] is not queue:
            place = (place + 1) & self._mask
        return place

    def _take_out(self, queue: ConsumeQueue) -> None:
        """Free the queue's place; the last row takes over its number."""
        place = self._place_of(queue)
        number = self._places[place]
        last = self.rows[len(self.rows) - 1]
        self._places[self._place_of(last)] = number
        self.rows[number - 1] = last
        self.rows.pop()
        self._close_gap(place)

    def _close_gap(self, gap: int) -> None:
        """Move up those that a search would no longer get to: it ends where a place is free."""
        place = (gap + 1) & self._mask
        while self._places[place]:
            home = self._home(self.rows[self._places[place] - 1])
            if (place - home) & self._mask >= (place - gap) & self._mask:
                self._places[gap] = self._places[place]
                gap = place
            place = (place + 1) & self._mask
        self._places[gap] = 0
