"""Priority messages: Java's and our own clients with our broker and with Apache's.

A pop reads the queues in the order of priority and each queue from its first message, so the order
of all messages is known as long as one client pops and nothing is sent meanwhile. A push consumer
with one thread handles messages in that order too, because one pop returns all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import Admin, Message, PopConsumer, Producer

from . import apache, clusters, maven
from .clusters import Cluster, OwnCluster
from .java_session import JavaSession
from .test_java_pop import BODY, Popper, admin, bodies, let_pop, send, start_consumers
from .variants import at_depth, clients

pytestmark = [pytest.mark.compat, pytest.mark.slow]

java_client = clients(at_depth("5.5.1-json", among=("5.5.1-json", "5.4.0-json")))

QUEUES = 4
PRIORITIES = (1, 3, 0, 9, 2, 1)
# Body, which is the priority and the position: 9 is stored with 3, the highest of four queues.
SENT = [f"{priority}-{position}" for position, priority in enumerate(PRIORITIES)]
HIGHER_FIRST = ["3-1", "9-3", "2-4", "1-0", "1-5", "0-2"]
LOWER_FIRST = ["0-2", "1-0", "1-5", "2-4", "3-1", "9-3"]


@pytest.fixture(scope="module")
def ours(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnCluster]:
    """Our NameServer and broker."""
    directory = tmp_path_factory.mktemp("priority")
    with clusters.running(directory, brokerName="priority") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def apaches(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnCluster]:
    """Apache's NameServer and broker of RocketMQ 5.5."""
    directory = tmp_path_factory.mktemp("apache-priority")
    # Without its timer Apache's broker does not pop.
    conf = {"version": maven.V5_5, "timerWheelEnable": True}
    with (
        apache.NameServer(directory / "names", version=maven.V5_5) as names,
        apache.Broker(directory / "broker", directory / "store", names.address, **conf) as broker,
    ):
        yield OwnCluster(names.address, broker.name, broker.address, broker)


def make_priority_topic(cluster: Cluster, topic: str) -> None:
    with Admin(cluster.namesrv) as python_admin:
        python_admin.create_topic(topic, queues=QUEUES, attributes={"message.type": "PRIORITY"})


def set_order(java: JavaSession, cluster: Cluster, *, ascending: bool) -> None:
    value = "true" if ascending else "false"
    admin(java, cluster, "updateBrokerConfig", cluster.broker_address, {"priorityOrderAsc": value})


def send_from_java(java: JavaSession, cluster: Cluster, topic: str) -> None:
    messages: list[dict[str, Any]] = [
        {"topic": topic, "body": body, "priority": priority}
        for body, priority in zip(SENT, PRIORITIES, strict=True)
    ]
    send(java, cluster, *messages)


def send_from_python(cluster: Cluster, topic: str) -> None:
    with Producer(cluster.namesrv) as producer:
        for body, priority in zip(SENT, PRIORITIES, strict=True):
            receipt = producer.send(Message(topic, body, priority=priority))
            assert receipt.queue.queue_id == min(priority, QUEUES - 1)


def pop_with_python(cluster: Cluster, topic: str, group: str) -> list[str]:
    """All messages, popped one by one."""
    found: list[str] = []
    deadline = time.monotonic() + 30
    with PopConsumer(cluster.namesrv, group=group, start_at="first") as consumer:
        consumer.subscribe(topic)
        while len(found) < len(SENT) and time.monotonic() < deadline:
            for message in consumer.receive(count_max=1, wait_ms=1_000):
                found.append(message.body.decode())
                consumer.ack(message)
    return found


def pop_with_java(java: JavaSession, cluster: Cluster, topic: str, group: str) -> list[str]:
    """All messages, popped one by one."""
    popper = Popper(java, cluster, topic, group)
    found = [popper.pop(count=1, poll_ms=1_000) for _ in SENT]
    assert [len(messages) for messages in found] == [1] * len(SENT)
    return [body for messages in found for body in bodies(messages)]


@java_client
def test_java_and_python_pop_what_java_sends_in_order(
    client: JavaSession, ours: OwnCluster, fresh: str
) -> None:
    make_priority_topic(ours, fresh)
    send_from_java(client, ours, fresh)
    assert pop_with_java(client, ours, fresh, f"{fresh}-java") == HIGHER_FIRST
    assert pop_with_python(ours, fresh, f"{fresh}-python") == HIGHER_FIRST
    let_pop(client, ours, fresh)
    start_consumers(client, ours, fresh, fresh, threads=1)
    rows = client.do("push.received", consumer=fresh, count=len(SENT))
    assert [row[BODY] for row in rows] == HIGHER_FIRST
    client.do("push.stop", consumer=fresh)


@java_client
def test_apaches_broker_pops_what_python_sends_in_order(
    client: JavaSession, apaches: OwnCluster, fresh: str
) -> None:
    make_priority_topic(apaches, fresh)
    send_from_python(apaches, fresh)
    assert pop_with_java(client, apaches, fresh, f"{fresh}-java") == HIGHER_FIRST
    assert pop_with_python(apaches, fresh, f"{fresh}-python") == HIGHER_FIRST


@java_client
@pytest.mark.parametrize("broker", ["ours", "apaches"])
def test_a_broker_can_pop_lower_priorities_first(
    client: JavaSession, request: pytest.FixtureRequest, broker: str, fresh: str
) -> None:
    cluster: OwnCluster = request.getfixturevalue(broker)
    make_priority_topic(cluster, fresh)
    send_from_python(cluster, fresh)
    set_order(client, cluster, ascending=False)
    try:
        assert pop_with_java(client, cluster, fresh, f"{fresh}-java") == LOWER_FIRST
        assert pop_with_python(cluster, fresh, f"{fresh}-python") == LOWER_FIRST
    finally:
        set_order(client, cluster, ascending=True)
    assert pop_with_python(cluster, fresh, f"{fresh}-again") == HIGHER_FIRST
