"""Routes: the queues of a topic and the brokers that hold them."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from penstock.errors import BodyError
from penstock.transport.peer import split_address
from penstock.wire.bodies.client_bodies import BrokerData, MessageQueue, TopicRouteData
from penstock.wire.codes import PERM_READ, PERM_WRITE

log = logging.getLogger(__name__)

MASTER_ID = 0
QUEUES_MAX = 100_000
"""Most queues of one topic; a route with more is treated as corrupt."""


@dataclass(frozen=True)
class Route:
    """Queues and brokers of a topic. Immutable: a change replaces the whole route."""

    topic: str
    data: TopicRouteData
    addresses: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Broker name → broker id → address."""

    @classmethod
    def of(cls, topic: str, data: TopicRouteData) -> Self:
        """Build a route from a NameServer's response; raises BodyError if it is not plausible."""
        addresses = {b.broker_name: _addresses(b) for b in data.broker_datas}
        route = cls(topic, data, addresses)
        numbers = [max(q.read_queue_nums, q.write_queue_nums, 0) for q in data.queue_datas]
        if max(sum(numbers), sum(count for _, count in route._order())) > QUEUES_MAX:
            raise BodyError(f"the route of topic {topic!r} has more than {QUEUES_MAX} queues")
        return route

    @cached_property
    def write_queues(self) -> tuple[MessageQueue, ...]:
        """The writable queues: those of brokers that have a master, as in RocketMQ."""
        ordered = self._ordered_queues()
        if ordered:
            return ordered
        return tuple(
            MessageQueue(self.topic, queue.broker_name, number)
            for queue in sorted(self.data.queue_datas, key=lambda queue: queue.broker_name)
            if queue.perm & PERM_WRITE and MASTER_ID in self.addresses.get(queue.broker_name, {})
            for number in range(queue.write_queue_nums)
        )

    @cached_property
    def read_queues(self) -> tuple[MessageQueue, ...]:
        """The readable queues, in the order that all clients use."""
        return tuple(
            MessageQueue(self.topic, queue.broker_name, number)
            for queue in sorted(self.data.queue_datas, key=lambda queue: queue.broker_name)
            if queue.perm & PERM_READ
            for number in range(queue.read_queue_nums)
        )

    @cached_property
    def brokers(self) -> tuple[str, ...]:
        """Names of the brokers that have the topic."""
        return tuple(sorted({queue.broker_name for queue in self.data.queue_datas}))

    @property
    def lacks_master(self) -> bool:
        """Whether messages could be sent to this topic if one of its brokers had a master."""
        writable = any(queue.perm & PERM_WRITE for queue in self.data.queue_datas)
        return not self.write_queues and writable

    def _ordered_queues(self) -> tuple[MessageQueue, ...]:
        """Queues fixed by the order configuration of the NameServers (`broker:count;…`)."""
        return tuple(
            MessageQueue(self.topic, name, number)
            for name, count in self._order()
            for number in range(count)
        )

    def _order(self) -> Iterator[tuple[str, int]]:
        for piece in (self.data.order_topic_conf or "").split(";"):
            name, _, count = piece.partition(":")
            if name and count.isascii() and count.isdigit() and len(count) < 10:
                yield name, int(count)


def address_to_read(members: Mapping[int, str], broker_id: int) -> str | None:
    """The address of this broker id, else of the master, else of the replica with the smallest id;
    None if there is none."""
    if not members:
        return None
    return members.get(broker_id) or members.get(MASTER_ID) or members[min(members)]


def _addresses(broker: BrokerData) -> dict[int, str]:
    """The valid addresses of a broker set, by broker id."""
    found = {}
    for number, address in broker.broker_addrs.items():
        try:
            split_address(address)
        except ValueError as error:
            log.warning("ignoring an address of broker %s: %s", broker.broker_name, error)
        else:
            found[number] = address
    return found
