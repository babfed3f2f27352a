"""Assignment strategies: exactly Java's results, and properties of every strategy.

`tests/fixtures/assign/java.txt` was printed by a Java program that ran the real classes of
RocketMQ 5.4.0 over these queues and clients; a line is strategy, set of brokers, queues per broker,
number of clients, and for each client the places of its queues in the sorted list.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.client.consumer import queue_assignment
from penstock.client.consumer.queue_assignment import Strategy
from penstock.errors import BadSetting
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.record import java_hash

FIXTURE = Path(__file__).parents[3] / "fixtures" / "assign" / "java.txt"
BROKERS = (("hz@a",), ("hz@a", "sh@b", "plain"), ("@x", "hz@", "hz@a@b", "hz@c"))


def queues_of(brokers: Sequence[str], each: int, topic: str = "orders") -> list[MessageQueue]:
    return sorted(MessageQueue(topic, name, n) for name in brokers for n in range(each))


def clients_of(count: int) -> list[str]:
    return sorted(f"10.0.0.{n * 7 % 23}@{100 + n * 31}#{n * 977}" for n in range(count))


JAVA: dict[str, Strategy] = {
    "averagely": queue_assignment.averagely,
    "circle": queue_assignment.circle,
    "consistent_hash": queue_assignment.consistent_hash(),
    "consistent_hash_3": queue_assignment.consistent_hash(3),
    "rooms_hz": queue_assignment.machine_room({"hz", ""}),
    "nearby": queue_assignment.room_nearby(
        lambda queue: queue.broker_name.partition("@")[0] + "!",
        lambda client: "sh!" if java_hash(client) % 2 else "hz!",
    ),
}


def test_strategies_give_the_same_result_as_java() -> None:
    seen = 0
    for line in FIXTURE.read_text().splitlines()[1:]:
        name, brokers, each, count, allocations = line.split(" ")
        queues = queues_of(BROKERS[int(brokers)], int(each))
        clients = clients_of(int(count))
        ours = "|".join(
            ",".join(str(queues.index(q)) for q in JAVA[name]("g", client, queues, clients))
            for client in clients
        )
        assert ours == allocations, line
        seen += 1
    assert seen == 6 * 3 * 3 * 5


NAMES = st.text("abcdefghij0123456789@#.-_", min_size=1, max_size=12)
GROUPS = st.tuples(
    st.lists(st.tuples(NAMES, st.integers(1, 6)), min_size=1, max_size=4, unique_by=lambda b: b[0]),
    st.lists(NAMES, min_size=1, max_size=9, unique=True),
)


@pytest.mark.parametrize("name", sorted(queue_assignment.STRATEGIES))
@given(group=GROUPS)
def test_each_queue_has_one_owner(
    name: str, group: tuple[list[tuple[str, int]], list[str]]
) -> None:
    brokers, ids = group
    queues = sorted(MessageQueue("t", broker, n) for broker, count in brokers for n in range(count))
    clients = queue_assignment.sorted_clients(ids)
    strategy = queue_assignment.strategy_of(name)
    allocations = [strategy("g", client, queues, clients) for client in clients]
    assert sorted(queue for allocation in allocations for queue in allocation) == queues
    assert allocations == [strategy("g", client, tuple(queues), clients) for client in clients]
    if name != "consistent_hash":
        sizes = [len(allocation) for allocation in allocations]
        assert max(sizes) - min(sizes) <= 1
    assert strategy("g", "a stranger", queues, clients) == []


def owners(
    strategy: Strategy, queues: list[MessageQueue], ids: list[str]
) -> dict[MessageQueue, str]:
    clients = queue_assignment.sorted_clients(ids)
    return {q: client for client in clients for q in strategy("g", client, queues, clients)}


def moved(strategy: Strategy, count: int) -> int:
    """Queues reassigned although their owner stays, when one member of `count` leaves."""
    queues = queues_of(("a", "b", "c"), 16)
    clients = clients_of(count)
    before = owners(strategy, queues, clients)
    total = 0
    for leaver in clients:
        after = owners(strategy, queues, [client for client in clients if client != leaver])
        total += sum(before[q] not in (leaver, after[q]) for q in queues)
    return total


def test_sticky_moves_few_queues() -> None:
    for count in (3, 4, 6, 8):
        assert moved(queue_assignment.sticky, count) < moved(queue_assignment.averagely, count) / 2
        assert moved(queue_assignment.sticky, count) < moved(queue_assignment.circle, count) / 2


def test_strategy_is_a_name_or_a_function() -> None:
    assert queue_assignment.strategy_of(queue_assignment.circle) is queue_assignment.circle
    with pytest.raises(BadSetting, match="averagly"):
        queue_assignment.strategy_of("averagly")
    with pytest.raises(BadSetting, match="virtual_nodes is 0"):
        queue_assignment.consistent_hash(0)


def test_client_ids_are_sorted_as_in_java() -> None:
    assert queue_assignment.sorted_clients(["\uffff", "\U0001f600", "b", "A"]) == [
        "A", "b", "\U0001f600", "\uffff",
    ]  # fmt: skip
