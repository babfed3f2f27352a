"""Which queues a pop reads, and in which order.

A pop of all queues starts at the next queue in round robin; a pop by priority starts at the queue
of the most urgent messages. The queues of the retry topics come first for `pop_retry_percent` of
the pops that are not by priority, and last otherwise.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from penstock.broker.context import BrokerContext
from penstock.broker.pop.pop_polling import ALL_QUEUES, PopPolling
from penstock.broker.pop.pop_request import PopRequest
from penstock.broker.priority import priority_factor

SPARSE: Final = 20
"""If one in this many queues of a topic is in use, only those are looked at."""


class PopQueues:
    """Chooses the queues of each pop."""

    def __init__(self, context: BrokerContext, polling: PopPolling) -> None:
        self._context = context
        self._polling = polling
        self._pops = 0
        self._round_robin = 0
        # Percent that the pops so far have added up to; at 100 a pop reads retry topics first.
        self._retry_share = 0
        # The same for pops by priority, by topic and group, where the factor is between 0 and 100.
        self._priority_shares: dict[tuple[str, str], int] = {}

    def order(self, request: PopRequest) -> Iterator[tuple[str, int]]:
        """Topic and id of the queues that a pop reads, in order."""
        self._pops += 1
        retries = iter(()) if request.ordered else self._retry_queues(request, self._pops)
        by_priority = self._is_by_priority(request)
        # A pop by priority takes no turn: else a factor of 50 would skip every second queue.
        retries_first = not by_priority and self._take_turn()
        if retries_first:
            yield from retries
        if request.queue_id != ALL_QUEUES:
            yield request.topic, request.queue_id
        else:
            for queue_id in self._all_queues(request, by_priority):
                yield request.topic, queue_id
        if not retries_first:
            yield from retries

    def _all_queues(self, request: PopRequest, by_priority: bool) -> Iterable[int]:
        config = self._context.topics.get(request.topic)
        count = 0 if config is None else config.read_queue_nums
        if not by_priority:
            # A group that begins with the newest message has to look at all of them: it begins
            # with the first message of a queue that has none yet.
            made_only = request.from_first
            return round_robin(self._context, request.topic, count, self._round_robin, made_only)
        higher_first = self._context.settings.current.broker.pop_higher_priority_first
        return range(count - 1, -1, -1) if higher_first else range(count)

    def _retry_queues(self, request: PopRequest, number: int) -> Iterator[tuple[str, int]]:
        names = self._polling.retry_topics(request.topic, request.group)
        if number % 2:
            names.reverse()
        for name in names:
            config = self._context.topics.get(name)
            if config is not None:
                for queue_id in range(config.read_queue_nums):
                    yield name, queue_id

    def next_turn(self) -> tuple[int, bool]:
        """Of the next pop that is not by priority: the number for `round_robin`, and whether it
        reads the retry topics first. `count` takes the turn."""
        return self._round_robin + 1, self._retry_share + self._retry_percent() >= 100

    def count(self) -> None:
        """A pop has read the queues in the order of its turn."""
        self._pops += 1
        self._take_turn()

    def _take_turn(self) -> bool:
        self._round_robin += 1
        self._retry_share += self._retry_percent()
        if self._retry_share < 100:
            return False
        self._retry_share -= 100
        return True

    def _retry_percent(self) -> int:
        return self._context.settings.current.broker.pop_retry_percent

    def _is_by_priority(self, request: PopRequest) -> bool:
        if request.ordered:
            return False
        group = self._context.groups.get(request.group)
        factor = priority_factor(self._context.topics.get(request.topic), group)
        key = (request.topic, request.group)
        if factor in (0, 100):
            self._priority_shares.pop(key, None)
            return factor == 100
        share = self._priority_shares.get(key, 0) + factor
        self._priority_shares[key] = share % 100
        return share >= 100


def round_robin(
    context: BrokerContext, topic: str, count: int, first: int, made_only: bool
) -> Iterable[int]:
    """The ids of a topic's queues, beginning at another one for each value of `first`.

    With `made_only`, queues that were never used may be left out.
    """
    made = context.store.queues.topics.get(topic.encode(), {})
    queue_ids: Sequence[int] = range(count)
    if made_only and len(made) * SPARSE < count:
        queue_ids = [queue_id for queue_id in made if queue_id < count]
    return (queue_ids[(first + step) % len(queue_ids)] for step in range(len(queue_ids)))
