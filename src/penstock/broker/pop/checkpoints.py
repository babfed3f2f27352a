"""What is lent: batches of messages that a pop gave away for a time.

A batch is the messages of one queue that one pop (or one change of an invisible time) gave to a
group. It ends when each of them is acknowledged, or has come back to the group by another way.
Plain state: nothing here waits, reads a clock or writes; the revive log (`pop_journal`) is what
makes it survive.

    by key      topic, group, queue, start offset and pop time: what receipts and the log name
    by time     a heap: whose time is over first
    by log      for each queue of the revive log, the open batches in the order of their entries:
                the log is needed from the first of them on
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

NEVER: Final = 1 << 62
BATCH_MAX: Final = 32
"""Most messages of a batch: what a pop may ask for at most."""
EARLY_ACKS_MAX: Final = 10_000
"""Batches whose acknowledgements came before themselves, as in the log of RocketMQ's brokers."""
_CLOCK_MS: Final = 1_000
"""Pop times may be a little ahead: no two batches of a queue and start offset have the same."""
_SLACK: Final = 1024
"""Ends of batches that are over stay in the heap until there are more of them than this and than
open ones."""


class Key(NamedTuple):
    """What tells batches apart."""

    topic: str
    group: str
    queue_id: int
    start: int
    pop_ms: int


class Loan:
    """One batch."""

    __slots__ = (
        "_distances",
        "acked",
        "due_ms",
        "entry",
        "entry_place",
        "invisible_ms",
        "key",
        "open",
        "place",
        "revive_queue_id",
    )

    def __init__(
        self, key: Key, invisible_ms: int, offsets: Sequence[int], revive_queue_id: int
    ) -> None:
        self.key = key
        self.invisible_ms = invisible_ms
        self.revive_queue_id = revive_queue_id
        distances = [offset - key.start for offset in offsets]
        count = len(distances)
        # Mostly they follow each other, and a range is small.
        self._distances: range | array[int] = (
            range(count) if distances == list(range(count)) else array("q", distances)
        )
        self.acked = 0  # bit k: the k-th message
        self.open = True
        self.due_ms = key.pop_ms + invisible_ms  # when it is looked at next
        self.entry = -1  # its place in its queue of the revive log
        self.entry_place = 0  # and of that entry in the log
        self.place = 0  # log offset from which its messages lie

    def __len__(self) -> int:
        return len(self._distances)

    def distances(self) -> list[int]:
        """Of its messages from the start offset."""
        return list(self._distances)

    def offsets(self) -> Iterator[int]:
        """Of its messages, in the order of the bits."""
        return (self.key.start + distance for distance in self._distances)

    def end(self) -> int:
        """One past the last of its messages."""
        return self.key.start + self._distances[-1] + 1 if self._distances else self.key.start

    def bit_of(self, offset: int) -> int:
        """The bit of a message; 0 if it is not in this batch."""
        try:
            return 1 << self._distances.index(offset - self.key.start)
        except ValueError:
            return 0

    def open_offsets(self) -> list[int]:
        """The messages that are still lent."""
        return [
            offset for index, offset in enumerate(self.offsets()) if not self.acked >> index & 1
        ]

    def lent(self) -> int:
        """How many messages are still lent."""
        return len(self) - self.acked.bit_count()


class Loans:
    """All open batches."""

    def __init__(self, queues: int) -> None:
        self._by_key: dict[Key, Loan] = {}
        self._ends: list[tuple[int, int, Loan]] = []
        self._numbers = 0
        self._logged: list[deque[tuple[int, Loan]]] = [deque() for _ in range(queues)]
        self._early: OrderedDict[Key, set[int]] = OrderedDict()
        self.open_in = [0] * queues  # batches by queue of the revive log
        self.in_flight: Counter[tuple[str, str, int]] = Counter()  # topic, group, queue

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Loan]:
        return iter(self._by_key.values())

    def get(self, key: Key) -> Loan | None:
        return self._by_key.get(key)

    # --- batches come and go

    def add(self, loan: Loan) -> None:
        """A batch is lent; its entry is in the log already."""
        assert loan.key not in self._by_key, loan.key
        if loan.lent() == 0:
            loan.open = False
            return
        self._by_key[loan.key] = loan
        self.in_flight[loan.key[:3]] += loan.lent()
        self.open_in[loan.revive_queue_id] += 1
        self._logged[loan.revive_queue_id].append((loan.entry, loan))
        self.set_due(loan, loan.due_ms)

    def ack(self, loan: Loan, bits: int) -> int:
        """These messages are acknowledged, or have come back by another way: how many of them were
        lent until now. The batch is over when none is left."""
        fresh = bits & ~loan.acked
        count = fresh.bit_count()
        if count and loan.open:
            loan.acked |= fresh
            self._take_off(loan, count)
            if loan.lent() == 0:
                self.close(loan)
        return count

    def ack_early(self, key: Key, offsets: Sequence[int]) -> None:
        """Acknowledgements of a batch that is still to come."""
        self._early.setdefault(key, set()).update(offsets[:BATCH_MAX])
        while len(self._early) > EARLY_ACKS_MAX:
            self._early.popitem(last=False)

    def take_early(self, loan: Loan) -> None:
        """Let acknowledgements count that came before their batch."""
        for offset in self._early.pop(loan.key, ()):
            loan.acked |= loan.bit_of(offset)

    def close(self, loan: Loan) -> None:
        """A batch is over, whatever is left of it."""
        if loan.open:
            loan.open = False
            del self._by_key[loan.key]
            self.open_in[loan.revive_queue_id] -= 1
            self._take_off(loan, loan.lent())

    def _take_off(self, loan: Loan, count: int) -> None:
        name = loan.key[:3]
        self.in_flight[name] -= count
        if self.in_flight[name] <= 0:
            del self.in_flight[name]

    # --- by time

    def set_due(self, loan: Loan, due_ms: int) -> None:
        """Look at a batch at this time."""
        loan.due_ms = due_ms
        self._numbers += 1
        heapq.heappush(self._ends, (due_ms, self._numbers, loan))
        if len(self._ends) > 2 * len(self._by_key) + _SLACK:
            self._ends = [end for end in self._ends if _is_current(end)]
            heapq.heapify(self._ends)

    def due(self) -> int:
        """When the time of the next batch is over; NEVER if none is lent."""
        while self._ends and not _is_current(self._ends[0]):
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else NEVER

    def first_due(self, now_ms: int) -> Loan | None:
        """A batch whose time is over; it stays the first until it is over or gets another time."""
        return self._ends[0][2] if self.due() <= now_ms else None

    def set_back(self, now_ms: int) -> None:
        """The clock was set back: what was lent later than now is lent from now on."""
        for loan in self:
            if loan.key.pop_ms > now_ms + _CLOCK_MS:
                loan.due_ms = min(loan.due_ms, now_ms + loan.invisible_ms)
        self._ends = [(loan.due_ms, number, loan) for number, loan in enumerate(self)]
        heapq.heapify(self._ends)
        self._numbers = len(self._ends)

    # --- by the revive log

    def logged_again(self, loan: Loan) -> None:
        """A batch has got a newer entry."""
        self._logged[loan.revive_queue_id].append((loan.entry, loan))

    def oldest(self, queue_id: int) -> Loan | None:
        """The open batch with the first entry of a queue of the revive log."""
        logged = self._logged[queue_id]
        while logged and not (logged[0][1].open and logged[0][1].entry == logged[0][0]):
            logged.popleft()
        return logged[0][1] if logged else None

    def pinned_from(self) -> int | None:
        """Log offset of the first record that open batches need: 15 ms for 200,000 of them."""
        return min((loan.place for loan in self), default=None)


def _is_current(end: tuple[int, int, Loan]) -> bool:
    return end[2].open and end[2].due_ms == end[0]
