"""How the queues of a topic are shared among the consumers of a group: RocketMQ's arithmetic.

Both lists are sorted, so that everybody comes to the same result: queues by broker name and number,
consumers by client id. Shares are found by position; a topic may have a million queues, and only
those of the asking consumer are made.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, TypeAlias, overload

from penstock.wire.bodies.client_bodies import MessageQueue

ALL_QUEUES: Final = -1
"""In place of a queue's number: every queue of the broker."""

Strategy: TypeAlias = Callable[[int, int, int], range]
"""The positions that belong to the consumer `index` of `consumers`, out of `queues`."""


class TopicQueues(Sequence[MessageQueue]):
    """The queues of a topic, sorted, by how many each broker has."""

    def __init__(self, topic: str, counts: Mapping[str, int]) -> None:
        self.topic = topic
        self.brokers = sorted(name for name, count in counts.items() if count > 0)
        self._ends = list(accumulate(counts[name] for name in self.brokers))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> MessageQueue: ...

    @overload
    def __getitem__(self, index: slice) -> list[MessageQueue]: ...

    def __getitem__(self, index: int | slice) -> MessageQueue | list[MessageQueue]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        broker = bisect_right(self._ends, index)
        first = self._ends[broker - 1] if broker else 0
        return MessageQueue(self.topic, self.brokers[broker], index - first)

    def whole_brokers(self) -> Iterator[MessageQueue]:
        """One entry per broker, which stands for all of its queues."""
        return (MessageQueue(self.topic, broker, ALL_QUEUES) for broker in self.brokers)


def _averagely(index: int, consumers: int, queues: int) -> range:
    """Runs of neighbours; the first consumers get one more each where it does not come out even."""
    share, more = divmod(queues, consumers)
    first = index * share + min(index, more)
    return range(first, first + share + (index < more))


def _by_circle(index: int, consumers: int, queues: int) -> range:
    """Dealt out one by one."""
    return range(index, queues, consumers)


STRATEGIES: Final[Mapping[str, Strategy]] = {"AVG": _averagely, "AVG_BY_CIRCLE": _by_circle}
"""By the names that clients send; others can't be computed here, as in Apache's broker."""


def share_to_pull(
    strategy: Strategy, client_id: str, queues: TopicQueues, consumers: Sequence[str]
) -> list[MessageQueue] | None:
    """The queues that only this consumer pulls; None if there is nothing to share."""
    if not queues or not consumers:
        return None
    if client_id not in consumers:
        return []
    return [queues[at] for at in strategy(consumers.index(client_id), len(consumers), len(queues))]


def share_to_pop(
    strategy: Strategy, client_id: str, queues: TopicQueues, consumers: Sequence[str], helpers: int
) -> list[MessageQueue] | None:
    """The queues that this consumer pops from, with others; None if there is nothing to share.

    Each consumer takes part in the shares of the `helpers` consumers that follow it. With none
    given, or so many that it would be all, everybody pops from every broker as a whole.
    """
    if helpers <= 0 or helpers >= len(consumers) - 1:
        return list(queues.whole_brokers())
    if not queues:
        return None
    if client_id not in consumers:
        return []
    index, count = consumers.index(client_id), len(consumers)
    if count > len(queues):  # nobody shall be without a queue
        return [queues[index % len(queues)]]
    places = ((index + step) % count for step in range(helpers + 1))
    return [queues[at] for place in places for at in strategy(place, count, len(queues))]
