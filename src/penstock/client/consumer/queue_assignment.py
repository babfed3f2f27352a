"""Who gets which queues: strategies that every member of a group works out by itself.

Nobody decides for the others. Each member has the same sorted queues and the same sorted client
ids and applies the same rule, so the shares fit together. **All members of a group must use the
same strategy**, with the same parameters: members with different rules take queues twice or leave
some to nobody. All but `sticky` give exactly what RocketMQ's Java classes give, so that a group may
have Java and Python members.

    averagely        a run of neighbours for each           AllocateMessageQueueAveragely
    circle           every n-th                             …AveragelyByCircle
    consistent_hash  by a ring of hashes; uneven            …ConsistentHash
    machine_room     brokers named `room@name`, by room     …ByMachineRoom
    room_nearby      own room first                         AllocateMachineRoomNearby
    sticky           even, and few queues move              ours

`sticky` remembers nothing, so members that come later or restart agree with the others. Each pair
of a queue and a client has a weight, a hash of both names. The heaviest pairs win, as long as the
client's share is not full; shares differ by one queue at most. When a member comes or goes, the
weights of all other pairs stay what they were, and most queues stay where they are.
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
"""Java's; other members use it too unless they were told otherwise."""


def averagely(
    group: str, client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]
) -> list[MessageQueue]:
    """Neighbouring queues for each client; the first clients get one more."""
    if client_id not in clients:
        return []
    index = clients.index(client_id)
    each, more = divmod(len(queues), len(clients))
    begin = index * each + min(index, more)
    return list(queues[begin : begin + each + (index < more)])


def circle(
    group: str, client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]
) -> list[MessageQueue]:
    """The queues are dealt out one by one."""
    if client_id not in clients:
        return []
    return list(queues[clients.index(client_id) :: len(clients)])


def consistent_hash(virtual_nodes: int = VIRTUAL_NODES) -> Strategy:
    """Each client has some places on a ring; a queue belongs to the next place after its own."""
    if virtual_nodes < 1:
        raise BadSetting(
            f"a ring of {virtual_nodes} virtual nodes has no place for anybody",
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
                ring[_ring_place(f"{client}-{number}")] = client
            nodes[client] += virtual_nodes
        places = sorted(ring)
        return [q for q in queues if ring[_next_place(places, _java_text(q))] == client_id]

    return assign


def machine_room(rooms: Iterable[str] | None = None) -> Strategy:
    """Only queues of brokers named `room@name` with one of these rooms; the rest after the rounds.

    Without rooms all brokers count, whatever their names: then no queue is left to nobody.
    """
    wanted = None if rooms is None else frozenset(rooms)

    def assign(
        group: str, client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]
    ) -> list[MessageQueue]:
        if client_id not in clients:
            return []
        near = [q for q in queues if wanted is None or _room(q.broker_name) in wanted]
        index = clients.index(client_id)
        each, more = divmod(len(near), len(clients))
        share = near[index * each : (index + 1) * each]
        if index < more:
            share.append(near[index + each * len(clients)])
        return share

    return assign


def room_nearby(
    room_of_queue: Callable[[MessageQueue], str],
    room_of_client: Callable[[str], str],
    inner: Strategy = averagely,
) -> Strategy:
    """Queues go to clients of their own room; those of rooms without a client go to all clients."""

    def assign(
        group: str, client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]
    ) -> list[MessageQueue]:
        if client_id not in clients:
            return []
        rooms: dict[str, list[MessageQueue]] = {}
        for queue in queues:
            rooms.setdefault(room_of_queue(queue), []).append(queue)
        inhabited: dict[str, list[str]] = {}
        for client in clients:
            inhabited.setdefault(room_of_client(client), []).append(client)
        home = room_of_client(client_id)
        share: list[MessageQueue] = []
        if home in rooms:
            share += inner(group, client_id, rooms[home], inhabited[home])
        for room in sorted(rooms.keys() - inhabited.keys()):
            share += inner(group, client_id, rooms[room], clients)
        return share

    return assign


def sticky(
    group: str, client_id: str, queues: Sequence[MessageQueue], clients: Sequence[str]
) -> list[MessageQueue]:
    """Even shares of which few queues move when members come or go; ours, not Java's."""
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
    """A strategy by its name, or the application's own; raises BadSetting."""
    if callable(given):
        return given
    if given not in STRATEGIES:
        known = ", ".join(STRATEGIES)
        raise BadSetting(f"no strategy is called {given!r}", hint=f"take one of {known}")
    return STRATEGIES[given]


def sorted_clients(clients: Iterable[str]) -> list[str]:
    """Client ids in the order of all members: Java compares UTF-16 units."""
    return sorted(clients, key=lambda client: client.encode("utf-16-be", "surrogatepass"))


def _room(broker_name: str) -> str | None:
    """`room` of `room@name`; Java takes a name with more or fewer parts for none of a room."""
    parts = broker_name.rstrip("@").split("@")
    return parts[0] if len(parts) == 2 else None


def _java_text(queue: MessageQueue) -> str:
    """The text that Java hashes for a queue."""
    return (
        f"MessageQueue [topic={queue.topic}, brokerName={queue.broker_name},"
        f" queueId={queue.queue_id}]"
    )


def _ring_place(text: str) -> int:
    digest = hashlib.md5(text.encode("utf-8", "replace"), usedforsecurity=False).digest()
    return int.from_bytes(digest[:4], "big")


def _next_place(places: Sequence[int], text: str) -> int:
    at = bisect_left(places, _ring_place(text))
    return places[at if at < len(places) else 0]


def _weight(queue: MessageQueue, client: str) -> bytes:
    text = f"{queue.topic}\0{queue.broker_name}\0{queue.queue_id}\0{client}"
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
