"""Allocation strategies: which member of a group gets which queues.

There is no coordinator. Every member applies the same strategy to the same sorted queues and client
ids, so the results fit together. **All members of a group must use the same strategy** with the
same parameters; otherwise some queues are consumed twice and others not at all. All strategies
except `sticky` give the same result as RocketMQ's Java classes, so a group can have Java and Python
members.

    averagely        contiguous queues for each client      AllocateMessageQueueAveragely
    circle           every n-th queue                       …AveragelyByCircle
    consistent_hash  by a ring of hashes; uneven            …ConsistentHash
    machine_room     brokers named `room@name`, by room     …ByMachineRoom
    room_nearby      own room first                         AllocateMachineRoomNearby
    sticky           even, and few queues move              Penstock's own

`sticky` has no state, so members that join later or restart agree with the others. Each pair of a
queue and a client has a weight, a hash of both names. Pairs are taken in the order of their weights
until the client has its share; shares differ by at most one queue. When a member joins or leaves,
the weights of the other pairs do not change, so most queues stay where they are.
"""

import hashlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from penstock.errors import BadSetting
from penstock.wire.bodies.client_bodies import MessageQueue

Strategy = Callable[[str, str, Sequence[MessageQueue], Sequence[str]], Sequence[MessageQueue]]
"""(group, client id, all queues sorted, all client ids sorted) → the queues of this client."""

VIRTUAL_NODES = 10
"""The default of RocketMQ's Java class."""


def averagely(
    group: str, client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]
) -> list[MessageQueue]:
    """Contiguous queues for each client; the first clients get one more."""
    if client_id not in clients:
        return []
    index = clients.index(client_id)
    each, more = divmod(len(queues), len(clients))
    begin = index * each + min(index, more)
    return list(queues[begin : begin + each + (index < more)])


def circle(
    group: str, client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]
) -> list[MessageQueue]:
    """Every n-th queue for each client."""
    if client_id not in clients:
        return []
    return list(queues[clients.index(client_id) :: len(clients)])


def consistent_hash(virtual_nodes: int = VIRTUAL_NODES) -> Strategy:
    """Each client has virtual nodes on a hash ring; a queue belongs to the next node."""
    if virtual_nodes < 1:
        raise BadSetting(
            f"virtual_nodes is {virtual_nodes}",
            hint="give 1 or more",
        )

    def assign(
        group: str, client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]
    ) -> list[MessageQueue]:
        if client_id not in clients:
            return []
        ring: dict[int, str] = {}
        nodes: Counter[str] = Counter()
        for client in clients:
            for number in range(nodes[client], nodes[client] + virtual_nodes):
                ring[_ring_position(f"{client}-{number}")] = client
            nodes[client] += virtual_nodes
        positions = sorted(ring)
        return [q for q in queues if ring[_next_node(positions, _java_text(q))] == client_id]

    return assign


def machine_room(rooms: Iterable[str] | None = None) -> Strategy:
    """Only queues of brokers named `room@name` in one of these rooms.

    Without rooms the queues of all brokers are allocated.
    """
    wanted = None if rooms is None else frozenset(rooms)

    def assign(
        group: str, client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]
    ) -> list[MessageQueue]:
        if client_id not in clients:
            return []
        eligible = [q for q in queues if wanted is None or _room(q.broker_name) in wanted]
        index = clients.index(client_id)
        each, more = divmod(len(eligible), len(clients))
        own = eligible[index * each : (index + 1) * each]
        if index < more:
            own.append(eligible[index + each * len(clients)])
        return own

    return assign


def room_nearby(
    room_of_queue: Callable[[MessageQueue], str],
    room_of_client: Callable[[str], str],
    inner: Strategy = averagely,
) -> Strategy:
    """Queues go to clients of their room; queues of rooms without a client go to all clients."""

    def assign(
        group: str, client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]
    ) -> list[MessageQueue]:
        if client_id not in clients:
            return []
        rooms: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            rooms.setdefault(room_of_queue(queue), []).append(queue)
        room_clients: dict[str, list[str]] = {}
        for client in clients:
            room_clients.setdefault(room_of_client(client), []).append(client)
        home = room_of_client(client_id)
        own: list[MessageQueue] = []
        if home in rooms:
            own += inner(group, client_id, rooms[home], room_clients[home])
        for room in sorted(rooms.keys() - room_clients.keys()):
            own += inner(group, client_id, rooms[room], clients)
        return own

    return assign


def sticky(
    group: str, client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]
) -> list[MessageQueue]:
    """Even shares; few queues move when members join or leave. Not available in Java."""
    if client_id not in clients:
        return []
    members = list(dict.fromkeys(clients))
    each, fuller = divmod(len(queues), len(members))
    pairs = sorted(
        (_weight(queue, client), at, number)
        for at, queue in enumerate(queues)
        for number, client in enumerate(members)
    )
    owners: dict[int, int] = {}
    loads = [0] * len(members)
    for _, at, number in pairs:
        if at in owners or loads[number] > each:
            continue
        if loads[number] == each:
            if not fuller:
                continue
            fuller -= 1
        owners[at] = number
        loads[number] += 1
    return [queue for at, queue in enumerate(queues) if members[owners[at]] == client_id]


STRATEGIES: dict[str, Strategy] = {
    "averagely": averagely,
    "circle": circle,
    "consistent_hash": consistent_hash(),
    "machine_room": machine_room(),
    "sticky": sticky,
}


def strategy_of(given: str | Strategy) -> Strategy:
    """A strategy by name, or the application's own function; raises BadSetting."""
    if callable(given):
        return given
    if given not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise BadSetting(f"there is no strategy {given!r}", hint=f"give one of {known}")
    return STRATEGIES[given]


def sorted_clients(clients: Iterable[str]) -> list[str]:
    """Client ids in the order of Java, which compares UTF-16 code units."""
    return sorted(clients, key=lambda client: client.encode("utf-16-be", "surrogatepass"))


def _room(broker_name: str) -> str | None:
    """The room of `room@name`; None for other names, as in Java."""
    parts = broker_name.rstrip("@").split("@")
    return parts[0] if len(parts) == 2 else None


def _java_text(queue: MessageQueue) -> str:
    """The text of a queue that Java hashes."""
    return (
        f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name},"
        f" queueId={queue.queue_id}]"
    )


def _ring_position(text: str) -> int:
    digest = hashlib.md5(text.encode("utf-8", "replace"), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")


def _next_node(positions: Sequence[int], text: str) -> int:
    index = bisect_left(positions, _ring_position(text))
    return positions[index if index < len(positions) else 0]


def _weight(queue: MessageQueue, client: str) -> bytes:
    text = f"{queue.topic}\0{queue.broker_name}\0{queue.queue_id}\0{client}"
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
