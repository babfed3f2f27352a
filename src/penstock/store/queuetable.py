"""All queues of a store, found by name without making an object: open addressing over FNV."""

from array import array

from penstock.store.consumequeue import ConsumeQueue
from penstock.wire import octets


class QueueTable:
    """Queues by topic bytes and queue id."""

    def __init__(self) -> None:
        self.rows: list[ConsumeQueue] = []
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
        room = bytearray(topic + b"\0")
        return self.find(memoryview(room), 0, len(topic), queue_id)

    def add(self, queue: ConsumeQueue) -> None:
        self.rows.append(queue)
        if 2 * len(self.rows) > self._mask:
            self._spread(2 * (self._mask + 1))
        else:
            self._place(len(self.rows))

    def remove(self, topic: bytes) -> list[ConsumeQueue]:
        """Take out all queues of a topic."""
        removed = [queue for queue in self.rows if queue.topic == topic]
        if removed:
            # In place: others hold the list. The places are dealt anew, so that none stays taken.
            self.rows[:] = [queue for queue in self.rows if queue.topic != topic]
            self._spread(self._mask + 1)
        return removed

    def _spread(self, places: int) -> None:
        self._places = memoryview(array("i", bytes(4 * places)))
        self._mask = places - 1
        for number in range(1, len(self.rows) + 1):
            self._place(number)

    def _place(self, number: int) -> None:
        queue = self.rows[number - 1]
        room = bytearray(queue.topic + b"\0")
        place = octets.mix_hash(room, 0, len(queue.topic), queue.queue_id) & self._mask
        while self._places[place]:
            place = (place + 1) & self._mask
        self._places[place] = number
