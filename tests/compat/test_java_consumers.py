"""Real Java consumers on one broker: push, orderly, pull, lite pull, tags, broadcast, start."""

from __future__ import annotations

import datetime
import time
from itertools import pairwise
from typing import Any

import pytest

from .clusters import Cluster
from .java_session import JavaSession, eventually
from .variants import each_release

pytestmark = [pytest.mark.compat, pytest.mark.slow, each_release]

CLIENT_TIME = "%Y%m%d%H%M%S"  # UTC, as every JVM here

# Places of what a push consumer tells of each message.
BROKER, QUEUE, OFFSET, BODY, TAGS = range(5)


@pytest.fixture
def producer(client: JavaSession, cluster: Cluster) -> str:
    client.do("producer.start", producer="common", namesrv=cluster.namesrv)
    return "common"


def send(client: JavaSession, topic: str, bodies: range, *, tags: str = "") -> list[Any]:
    """Send so many messages, whose bodies are the numbers; with tags these in turn."""
    messages = [
        {"topic": topic, "body": str(n), **({"tags": tags[n % len(tags)]} if tags else {})}
        for n in bodies
    ]
    acked: list[Any] = client.do("producer.send", producer="common", messages=messages)
    assert {line.get("status") for line in acked} == {"SEND_OK"}, acked
    return acked


def push(client: JavaSession, cluster: Cluster, consumer: str, topic: str, **options: Any) -> None:
    arguments = {"group": topic, "topics": {topic: "*"}, **options}
    client.do("push.start", consumer=consumer, namesrv=cluster.namesrv, **arguments)


def bodies(client: JavaSession, consumer: str, count: int, **options: Any) -> list[int]:
    """The numbers a push consumer received, once there are `count`."""
    rows = client.do("push.received", consumer=consumer, count=count, **options)
    return [int(row[BODY]) for row in rows]


@pytest.mark.usefixtures("producer")
def test_push_consumer_gets_old_and_new_messages(
    client: JavaSession, cluster: Cluster, fresh: str
) -> None:
    send(client, fresh, range(50))
    push(client, cluster, "c", fresh)
    assert sorted(bodies(client, "c", 50)) == list(range(50))
    send(client, fresh, range(50, 150))
    assert sorted(bodies(client, "c", 150)) == list(range(150))
    client.do("push.stop", consumer="c")

    # Progress was kept: the next one of the group goes on there.
    send(client, fresh, range(150, 160))
    push(client, cluster, "d", fresh)
    assert sorted(bodies(client, "d", 10)) == list(range(150, 160))
    client.do("push.stop", consumer="d", later_ms=0)


@pytest.mark.usefixtures("producer")
def test_tags_filter(client: JavaSession, cluster: Cluster, fresh: str) -> None:
    send(client, fresh, range(60), tags="ABC")
    push(client, cluster, "one", fresh, group=f"{fresh}-1", topics={fresh: "A"})
    push(client, cluster, "two", fresh, group=f"{fresh}-2", topics={fresh: "A || C"})
    assert sorted(bodies(client, "one", 20)) == list(range(0, 60, 3))
    assert sorted(bodies(client, "two", 40)) == [n for n in range(60) if n % 3 != 1]
    send(client, fresh, range(60, 63), tags="ABC")
    assert sorted(bodies(client, "one", 21)) == list(range(0, 63, 3))
    assert sorted(bodies(client, "two", 42)) == [n for n in range(63) if n % 3 != 1]
    client.do("push.stop", consumer="one", later_ms=0)
    client.do("push.stop", consumer="two", later_ms=0)


@pytest.mark.usefixtures("producer")
def test_orderly_consumers_keep_the_order_of_each_queue(
    client: JavaSession, cluster: Cluster, fresh: str
) -> None:
    send(client, fresh, range(100))
    push(client, cluster, "a", fresh, orderly=True, pause_ms=2, threads=8)
    bodies(client, "a", 20)
    push(client, cluster, "b", fresh, orderly=True, pause_ms=2, threads=8)
    send(client, fresh, range(100, 200))
    assert eventually(lambda: [len(held(client, name, fresh)) for name in "ab"] == [2, 2])
    send(client, fresh, range(200, 400))

    def received() -> list[Any]:
        rows = [client.do("push.received", consumer=name) for name in "ab"]
        return rows if len({int(r[BODY]) for r in rows[0] + rows[1]}) == 400 else []

    by_consumer = eventually(received, within_s=60)
    assert len(by_consumer) == 2
    for rows in by_consumer:
        for queue in range(4):
            offsets = [row[OFFSET] for row in rows if row[QUEUE] == queue]
            # A queue that changes hands may be redelivered from its last kept offset on.
            assert all(after <= before + 1 for before, after in pairwise(offsets)), offsets
    assert len(by_consumer[1]) > 0
    client.do("push.stop", consumer="a", later_ms=0)
    client.do("push.stop", consumer="b", later_ms=0)


@pytest.mark.usefixtures("producer")
def test_broadcast_reaches_every_consumer(
    client: JavaSession, cluster: Cluster, fresh: str
) -> None:
    send(client, fresh, range(10))
    now = datetime.datetime.now(datetime.UTC)
    hour_ago = (now - datetime.timedelta(hours=1)).strftime(CLIENT_TIME)
    push(client, cluster, "first", fresh, broadcast=True)
    push(client, cluster, "last", fresh, broadcast=True, **{"from": "LAST_OFFSET"})
    push(
        client, cluster, "time", fresh, broadcast=True,
        timestamp=hour_ago, **{"from": "TIMESTAMP"},
    )  # fmt: skip
    assert sorted(bodies(client, "first", 10)) == list(range(10))
    assert sorted(bodies(client, "time", 10)) == list(range(10))
    assert eventually(lambda: len(held(client, "last", fresh)) == 4)
    send(client, fresh, range(10, 50))
    assert sorted(bodies(client, "first", 50)) == list(range(50))
    assert sorted(bodies(client, "time", 50)) == list(range(50))
    # It may have looked for the end between two of the later messages, but not before them.
    last = set(bodies(client, "last", 40))
    assert last == set(range(10, 50))
    for name in ("first", "last", "time"):
        client.do("push.stop", consumer=name, later_ms=0)


def held(client: JavaSession, consumer: str, topic: str) -> list[Any]:
    queues: list[Any] = client.do("push.queues", consumer=consumer, topic=topic)
    return queues


@pytest.mark.usefixtures("producer")
def test_new_groups_of_a_young_topic_start_at_its_beginning(
    client: JavaSession, cluster: Cluster, fresh: str
) -> None:
    """Whatever they ask for: RocketMQ answers 0 while nothing of the topic has left memory."""
    send(client, fresh, range(12))
    starts = ("FIRST_OFFSET", "LAST_OFFSET", "TIMESTAMP")
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    for start in starts:
        push(
            client, cluster, start, fresh, group=f"{fresh}-{start}",
            timestamp=later.strftime(CLIENT_TIME), **{"from": start},
        )  # fmt: skip
    for start in starts:
        assert sorted(bodies(client, start, 12)) == list(range(12))
        client.do("push.stop", consumer=start, later_ms=0)


@pytest.mark.usefixtures("producer")
def test_pull_consumer(client: JavaSession, cluster: Cluster, fresh: str) -> None:
    acked = send(client, fresh, range(40), tags="AB")
    client.do("pull.start", consumer="pull", namesrv=cluster.namesrv, group="pull-group")
    place = {"consumer": "pull", "topic": fresh, "broker": cluster.broker, "queue_id": 1}
    mine = [line for line in acked if line["queue_id"] == 1]
    end = len(mine)

    pulled = client.do("pull.messages", count=4, **place)
    assert (pulled["status"], pulled["next"], pulled["min"], pulled["max"]) == ("FOUND", 4, 0, end)
    assert [m["msg_id"] for m in pulled["messages"]] == [line["msg_id"] for line in mine[:4]]
    nothing = client.do("pull.messages", offset=end, **place)
    assert (nothing["status"], nothing["next"]) == ("NO_NEW_MSG", end)
    filtered = client.do("pull.messages", expression="C", **place)
    assert (filtered["status"], filtered["messages"]) == ("NO_MATCHED_MSG", [])
    assert filtered["next"] == end
    beyond = client.do("pull.messages", offset=end + 100, **place)
    assert (beyond["status"], beyond["next"]) == ("OFFSET_ILLEGAL", end)

    client.do("pull.commit", offset=7, **place)
    assert eventually(lambda: client.do("pull.committed", **place) == 7)


@pytest.mark.usefixtures("producer")
def test_waiting_pull_gets_the_next_message(
    client: JavaSession, cluster: Cluster, fresh: str
) -> None:
    send(client, fresh, range(4))
    client.do("pull.start", consumer="pull", namesrv=cluster.namesrv, group="pull-group")
    place = {"consumer": "pull", "topic": fresh, "broker": cluster.broker}
    queues = client.do("pull.queues", consumer="pull", topic=fresh)
    target = min(queues, key=lambda queue: int(queue["queue_id"]))
    later = {"topic": fresh, "body": "late"}
    client.do(
        "producer.send", producer="common", messages=[later], later_ms=300,
        how="queue", broker=cluster.broker, queue_id=target["queue_id"],
    )  # fmt: skip
    began = time.monotonic()
    pulled = client.do(
        "pull.messages", wait=True, offset=target["max"], queue_id=target["queue_id"], **place
    )
    assert [m["body_length"] for m in pulled["messages"]] == [4]
    # Long before the 20 s after which a waiting pull is answered anyway.
    assert time.monotonic() - began < 15


@pytest.mark.usefixtures("producer")
def test_lite_pull_consumer(client: JavaSession, cluster: Cluster, fresh: str) -> None:
    send(client, fresh, range(60), tags="ABC")
    start = {"namesrv": cluster.namesrv, "group": fresh, "topic": fresh}
    client.do("lite.start", consumer="a", expression="A", **start)
    read = client.do("lite.poll", consumer="a", count=20)
    assert [line["tags"] for line in read] == ["A"] * 20
    client.do("lite.commit", consumer="a")
    # Of each queue, at most two messages lie behind the last one with this tag.
    assert eventually(lambda: client.do("lite.committed", consumer="a") >= 60 - 4 * 2)
    client.do("lite.stop", consumer="a")

    new = {line["msg_id"] for line in send(client, fresh, range(60, 80), tags="A")}
    client.do("lite.start", consumer="b", expression="A", **start)
    read = client.do("lite.poll", consumer="b", count=20)
    assert {line["msg_id"] for line in read} == new
    client.do("lite.stop", consumer="b", later_ms=0)

    client.do("lite.start", consumer="c", assign=True, **{**start, "group": f"{fresh}-c"})
    assert len(client.do("lite.poll", consumer="c", count=80)) == 80
    client.do("lite.seek", consumer="c", offset=0)
    assert len(client.do("lite.poll", consumer="c", count=80)) == 80
    client.do("lite.stop", consumer="c", later_ms=0)
