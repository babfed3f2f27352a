"""Allocation of a topic's queues to the consumers of a group, with RocketMQ's strategies.

Both lists are sorted, so that every broker gets the same result: queues by broker name and id,
consumers by client id. Shares are computed by position: a topic may have a million queues, and only
those of one consumer are created.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Final, TypeAlias, overload

from penstock.wire.bodies.client_bodies import MessageQueue

ALL_QUEUES: Final = -1
"""In place of a queue id: all queues of the broker."""

Strategy: TypeAlias = Callable[[int, int, int], range]
"""(index, consumers, queues) → the positions of the queues of the consumer with this index."""


class TopicQueues(Sequence[MessageQueue]):
    """The sorted queues of a topic, from the number of queues per broker."""

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
        """One entry per broker that stands for all its queues."""
        return (MessageQueue(self.topic, broker, ALL_QUEUES) for broker in self.brokers)


def _averagely(index: int, consumers: int, queues: int) -> range:
    """Consecutive queues; the first consumers get one more each if there is a remainder."""
    share, remainder = divmod(queues, consumers)
    first = index * share + min(index, remainder)
    return range(first, first + share + (index < remainder))


def _by_circle(index: int, consumers: int, queues: int) -> range:
    """Queues in round robin."""
    return range(index, queues, consumers)


STRATEGIES: Final[Mapping[str, Strategy]] = {"AVG": _averagely, "AVG_BY_CIRCLE": _by_circle}
"""By the names that clients send; as in Apache's broker, there are no others."""


def allocate_for_pull(
    strategy: Strategy, client_id: str, queues: TopicQueues, consumers: Sequence[str]
) -> list[MessageQueue] | None:
    """The queues that this consumer pulls; None if there are no queues or consumers."""
    if not queues or not consumers:
        return None
    if client_id not in consumers:
        return []
    return [queues[at] for at in strategy(consumers.index(client_id), len(consumers), len(queues))]


def allocate_for_pop(
    strategy: Strategy,
    client_id: str,
    queues: TopicQueues,
    consumers: Sequence[str],
    share_count: int,
) -> list[MessageQueue] | None:
    """The queues that this consumer pops, shared with others; None if there are no queues.

    Each consumer also pops the queues of the `share_count` consumers that follow it. If that is 0,
    or as many as all others, every consumer pops all queues of every broker.
    """
    if share_count <= 0 or share_count >= len(consumers) - 1:
        return list(queues.whole_brokers())
    if not queues:
        return None
    if client_id not in consumers:
        return []
    index, count = consumers.index(client_id), len(consumers)
    if count > len(queues):  # every consumer gets a queue
        return [queues[index % len(queues)]]
    owners = ((index + step) % count for step in range(share_count + 1))
    return [queues[at] for owner in owners for at in strategy(owner, count, len(queues))]
