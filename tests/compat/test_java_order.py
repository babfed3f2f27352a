"""Real Java clients consume in order: one per queue, whoever comes, goes, fails or dies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.depth import rounds

from . import clusters, maven
from .java_session import ClientError, JavaSession, eventually
from .reading import read_all
from .variants import VARIANTS, any_client, at_depth, each_release

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.timeout(300)]

# Places of what an orderly consumer tells of each call of its listener.
CONSUMER, BROKER, QUEUE, OFFSET, BODY, TIMES, FINE, FROM_NS, TO_NS = range(9)

LEASE_MS = 6_000
QUICK_LOCKS = {
    "rocketmq.client.rebalance.lockInterval": "1000",
    "rocketmq.client.rebalance.lockMaxLiveTime": "3000",
    "rocketmq.client.rebalance.waitInterval": "1000",
}
"""A client that renews its locks every second and trusts them for three."""


def start(
    client: JavaSession, cluster: clusters.Cluster, topic: str, name: str, **options: Any
) -> None:
    options = {"group": topic, **options}
    client.do("orderly.start", consumer=name, namesrv=cluster.namesrv, topic=topic, **options)


def calls_of(client: JavaSession, group: str) -> list[Any]:
    calls: list[Any] = client.do("orderly.calls", group=group)
    return calls


def make_topic(client: JavaSession, cluster: clusters.Cluster, topic: str, queues: int) -> str:
    """Gives the name of a producer; the topic is known everywhere."""
    name = f"p-{topic}"
    client.do("producer.start", producer=name, namesrv=cluster.namesrv)
    client.do("producer.create_topic", producer=name, topic=topic, queues=queues)
    return name


def assert_one_at_a_time(calls: Iterable[Any]) -> None:
    """No two calls for a queue at the same time."""
    for queue, row in by_queue(calls).items():
        for earlier, later in pairwise(row):
            assert earlier[TO_NS] <= later[FROM_NS], (queue, earlier, later)


def assert_in_order(calls: Iterable[Any]) -> None:
    """The group goes on with the next message of a queue, or back to where progress was kept."""
    for queue, row in by_queue(calls).items():
        reached = -1
        for call in row:
            assert call[OFFSET] <= reached + 1, (queue, call, reached)
            if call[FINE]:
                reached = max(call[OFFSET], reached)


def by_queue(calls: Iterable[Any]) -> dict[Any, list[Any]]:
    queues = defaultdict(list)
    for call in sorted(calls, key=lambda call: int(call[FROM_NS])):
        queues[call[BROKER], call[QUEUE]].append(call)
    return queues


def await_all(look: Callable[[], list[Any]], acked: list[Any], *, within_s: float = 150) -> None:
    """Until every acknowledged message of a flood was consumed."""
    wanted = {(name, queue, offset) for name, queue, _, offset in acked}

    def missing() -> set[Any]:
        return wanted - {tuple(call[BROKER : OFFSET + 1]) for call in look() if call[FINE]}

    eventually(lambda: not missing(), within_s=within_s)
    assert not missing()


@any_client
def test_consumers_come_and_go_and_the_order_stays(
    client: JavaSession, cluster: clusters.Cluster, fresh: str
) -> None:
    producer = make_topic(client, cluster, fresh, 6)
    running: list[str] = []
    assert client.do("flood.start", producer=producer, flood=fresh, topic=fresh, pause_ms=10) == 6

    def join(name: str) -> None:
        start(client, cluster, fresh, name, work_ms=2)
        running.append(name)
        assert eventually(lambda: any(call[CONSUMER] == name for call in calls_of(client, fresh)))

    names = (f"{fresh}-{n}" for n in range(100))
    join(next(names))
    for _ in range(rounds(ci=1, proof=4)):
        join(next(names))
        join(next(names))
        client.do("orderly.stop", consumer=running.pop(0))
        client.do("orderly.stop", consumer=running.pop(1))
        join(next(names))
        client.do("orderly.stop", consumer=running.pop(0))
    flood = client.do("flood.stop", flood=fresh)
    await_all(lambda: calls_of(client, fresh), flood["acknowledged"])
    calls = calls_of(client, fresh)
    assert_one_at_a_time(calls)
    assert_in_order(calls)
    for name in running:
        client.do("orderly.stop", consumer=name)


@each_release
def test_a_message_that_fails_holds_its_queue_back(
    client: JavaSession, cluster: clusters.Cluster, fresh: str
) -> None:
    producer = make_topic(client, cluster, fresh, 2)

    def send(queue: int, *messages: dict[str, Any]) -> None:
        client.do(
            "producer.send", producer=producer, how="queue", broker=cluster.broker, queue_id=queue,
            messages=[{"topic": fresh, **message} for message in messages],
        )  # fmt: skip

    send(
        0, {"body": "a0"}, {"body": "a1", "properties": {"fail": "4"}}, {"body": "a2"},
        {"body": "a3", "properties": {"fail": "1"}},
    )  # fmt: skip
    send(1, {"body": "b0"}, {"body": "b1"})
    start(client, cluster, fresh, fresh, suspend_ms=100)
    calls: list[Any] = eventually(lambda: [] if len(seen := calls_of(client, fresh)) < 11 else seen)
    rows = by_queue(calls)
    assert [(call[BODY], call[TIMES], call[FINE]) for call in rows[cluster.broker, 0]] == [
        ("a0", 0, True),
        ("a1", 0, False), ("a1", 1, False), ("a1", 2, False), ("a1", 3, False), ("a1", 4, True),
        ("a2", 0, True),
        ("a3", 0, False), ("a3", 1, True),
    ]  # fmt: skip
    assert [call[BODY] for call in rows[cluster.broker, 1]] == ["b0", "b1"]
    assert_one_at_a_time(calls)
    suspended = [call for call in rows[cluster.broker, 0] if call[BODY] == "a1"]
    for earlier, later in pairwise(suspended):
        assert later[FROM_NS] - earlier[TO_NS] >= 100 * 1_000_000
    client.do("orderly.stop", consumer=fresh)


@any_client
def test_after_its_times_a_message_is_a_dead_letter_and_the_queue_goes_on(
    client: JavaSession, cluster: clusters.Cluster, fresh: str
) -> None:
    producer = make_topic(client, cluster, fresh, 1)
    messages = [
        {"topic": fresh, "body": "bad", "keys": ["k"], "properties": {"fail": "99"}},
        {"topic": fresh, "body": "good"},
    ]
    acked = client.do("producer.send", producer=producer, messages=messages)
    start(client, cluster, fresh, fresh, suspend_ms=50, max_reconsume_times=2)
    calls: list[Any] = eventually(lambda: [] if len(seen := calls_of(client, fresh)) < 4 else seen)
    tried = [(call[BODY], call[TIMES]) for call in calls]
    assert tried == [("bad", 0), ("bad", 1), ("bad", 2), ("good", 0)]

    def look() -> list[Any]:
        try:
            return read_all(client, cluster, f"%DLQ%{fresh}")
        except ClientError:  # the topic comes with the first letter
            return []

    (letter,) = eventually(look)
    assert letter["msg_id"] == acked[0]["msg_id"]
    assert letter["keys"] == "k"
    assert letter["properties"]["RETRY_TOPIC"] == fresh
    client.do("orderly.stop", consumer=fresh)


@pytest.mark.usefixtures("java")
def test_the_queues_of_a_consumer_that_died_pass_on(
    tmp_path: Path, start_java: Callable[..., JavaSession], fresh: str
) -> None:
    dying, staying = (start_java(properties=QUICK_LOCKS) for _ in range(2))
    with (
        clusters.name_server(tmp_path / "namesrv") as names,
        # Apache knows no such setting: its lease is a minute.
        clusters.broker(
            tmp_path / "broker", names.address, brokerName="leasing",
            **{"broker.lock_lease_ms": LEASE_MS},
        ) as broker,
    ):  # fmt: skip
        cluster = clusters.Cluster(names.address, broker.name, broker.address)
        producer = make_topic(staying, cluster, fresh, 4)
        flood = {"producer": producer, "flood": "f", "topic": fresh, "pause_ms": 20}
        staying.do("flood.start", **flood)
        start(dying, cluster, fresh, "dying")
        assert eventually(lambda: calls_of(dying, fresh))
        start(staying, cluster, fresh, "staying")
        assert eventually(lambda: len(by_queue(calls_of(staying, fresh))) == 2)
        acked = staying.do("flood.stop", flood="f")["acknowledged"]
        await_all(lambda: calls_of(dying, fresh) + calls_of(staying, fresh), acked)
        dead = calls_of(dying, fresh)
        dying.kill()
        staying.do("flood.start", **flood)
        assert eventually(lambda: len(by_queue(calls_of(staying, fresh))) == 4, within_s=120)
        acked += staying.do("flood.stop", flood="f")["acknowledged"]
        await_all(lambda: dead + calls_of(staying, fresh), acked)
        calls = dead + calls_of(staying, fresh)
        assert_one_at_a_time(calls)
        assert_in_order(calls)


@pytest.fixture
def ordered_cluster(java: None, tmp_path: Path) -> Iterator[clusters.Cluster]:
    """A cluster whose routes carry order configs."""
    with (
        clusters.name_server(tmp_path / "namesrv", orderMessageEnable=True) as names,
        clusters.broker(tmp_path / "broker", names.address, brokerName="ordering") as broker,
    ):
        yield clusters.Cluster(names.address, broker.name, broker.address)


def test_an_order_config_says_which_queues_are_written_to(
    ordered_cluster: clusters.Cluster,
    java54: JavaSession,
    start_java: Callable[..., JavaSession],
    fresh: str,
) -> None:
    cluster = ordered_cluster
    make_topic(java54, cluster, fresh, 8)
    java54.do("admin.start", admin=fresh, namesrv=cluster.namesrv)

    def admin(method: str, *args: Any) -> Any:
        return java54.do("admin.call", admin=fresh, method=method, args=list(args))

    admin("createOrUpdateOrderConf", fresh, f"{cluster.broker}:3", True)

    def told() -> Any:
        return admin("examineTopicRouteInfo", fresh)["orderTopicConf"]

    assert eventually(told) == f"{cluster.broker}:3"
    # The broker hears of it with its next registration, which another topic brings about.
    make_topic(java54, cluster, f"{fresh}-other", 1)
    assert eventually(
        lambda: admin("examineTopicConfig", cluster.broker_address, fresh)["order"] is True,
        within_s=40,
    )
    for version, binary in (VARIANTS[name] for name in at_depth("5.4.0-json", "4.9.8-binary")):
        client = start_java(version, binary=binary)
        client.do("producer.start", producer="p", namesrv=cluster.namesrv)
        flood = client.do("flood.start", producer="p", flood="f", topic=fresh, pause_ms=20)
        assert flood == 3
        group = f"{fresh}-{maven.VERSIONS.index(version)}-{binary}"
        start(client, cluster, fresh, "c", group=group)
        acked = client.do("flood.stop", flood="f")["acknowledged"]
        assert {queue for _, queue, _, _ in acked} == {0, 1, 2}
        await_all(lambda: calls_of(client, group), acked)  # noqa: B023
        client.kill()
    java54.do("admin.stop", admin=fresh)
