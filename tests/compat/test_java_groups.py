"""A consumer group of real Java clients: members join, leave and crash; offsets are reset."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.depth import rounds

from . import clusters, maven, penstock
from .clusters import Cluster
from .java_session import JavaSession, eventually

pytestmark = [pytest.mark.compat, pytest.mark.slow]

QUEUES = 8
BODY = 3
VERSIONS = maven.VERSIONS[: rounds(ci=1, proof=3)]


class Group:
    """A group whose consumers live in several JVMs."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self.cluster = cluster
        self.topic = topic
        self.homes: dict[str, JavaSession] = {}
        self.seen: set[int] = set()

    def join(self, jvm: JavaSession, consumer: str, **options: Any) -> None:
        jvm.do(
            "push.start",
            consumer=consumer,
            namesrv=self.cluster.namesrv,
            group=self.topic,
            topics={self.topic: "*"},
            **options,
        )
        self.homes[consumer] = jvm

    def leave(self, consumer: str) -> None:
        self.look(consumer)
        self.homes.pop(consumer).do("push.stop", consumer=consumer)

    def look(self, consumer: str) -> None:
        rows = self.homes[consumer].do("push.received", consumer=consumer)
        self.seen |= {int(row[BODY]) for row in rows}

    def has_seen(self, count: int) -> bool:
        """Whether the members, past and present, received all numbers below `count`."""
        for consumer in self.homes:
            self.look(consumer)
        return self.seen == set(range(count))

    def is_owned(self) -> bool:
        """Whether any member has a queue."""
        return any(
            jvm.do("push.queues", consumer=name, topic=self.topic)
            for name, jvm in self.homes.items()
        )

    def is_shared(self) -> bool:
        """Whether every queue has one owner and no member has two queues more than another."""
        owned = [
            [tuple(queue) for queue in jvm.do("push.queues", consumer=name, topic=self.topic)]
            for name, jvm in self.homes.items()
        ]
        flat = [queue for queues in owned for queue in queues]
        sizes = [len(queues) for queues in owned]
        return len(flat) == len(set(flat)) == QUEUES and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("version", VERSIONS)
def test_members_join_leave_and_crash(
    cluster: Cluster, fresh: str, start_java: Callable[..., JavaSession], version: str
) -> None:
    """Every message reaches the group, and when it is at rest no queue has two owners."""
    steady, doomed = start_java(version), start_java(version)
    steady.do("producer.start", producer="p", namesrv=cluster.namesrv)
    steady.do("producer.create_topic", producer="p", topic=fresh, queues=QUEUES)
    sent = 0

    def send(count: int) -> None:
        nonlocal sent
        messages = [{"topic": fresh, "body": str(n)} for n in range(sent, sent + count)]
        acked = steady.do("producer.send", producer="p", messages=messages)
        assert {line.get("status") for line in acked} == {"SEND_OK"}
        sent += count

    group = Group(cluster, fresh)
    send(40)
    group.join(steady, "a")
    assert eventually(lambda: group.has_seen(40))
    group.join(steady, "b")
    send(40)
    group.join(doomed, "c")
    send(40)
    # Well under the 20 s after which clients look by themselves: the broker tells them.
    assert eventually(group.is_shared, within_s=10)
    send(80)
    assert eventually(lambda: group.has_seen(200))

    group.leave("b")
    send(40)
    assert eventually(group.is_shared, within_s=10)
    assert eventually(lambda: group.has_seen(240))

    group.look("c")
    doomed.kill()
    del group.homes["c"]
    send(40)
    assert eventually(group.is_shared, within_s=10)
    assert eventually(lambda: group.has_seen(280))
    assert len(steady.do("push.queues", consumer="a", topic=fresh)) == QUEUES
    group.leave("a")


def test_offsets_are_reset_under_a_running_consumer(
    java54: JavaSession, cluster: Cluster, fresh: str
) -> None:
    java54.do("producer.start", producer="common", namesrv=cluster.namesrv)
    java54.do("admin.start", admin="common", namesrv=cluster.namesrv)
    messages = [{"topic": fresh, "body": str(n)} for n in range(20)]
    java54.do("producer.send", producer="common", messages=messages)
    middle_ms = int(time.time() * 1000)
    eventually(lambda: int(time.time() * 1000) > middle_ms + 20)
    messages = [{"topic": fresh, "body": str(n)} for n in range(20, 40)]
    java54.do("producer.send", producer="common", messages=messages)
    group = Group(cluster, fresh)
    group.join(java54, "early")
    assert eventually(lambda: group.has_seen(40))
    # Only a group with progress can be reset, and a client keeps it when it leaves.
    group.leave("early")
    group.join(java54, "reset")
    assert eventually(group.is_owned)

    def reset(timestamp_ms: int, expected: list[int]) -> None:
        before = len(java54.do("push.received", consumer="reset"))
        java54.do(
            "admin.call",
            admin="common",
            method="resetOffsetByTimestamp",
            args=[fresh, fresh, timestamp_ms, True],
        )
        rows = java54.do(
            "push.received", consumer="reset", since=before, count=before + len(expected),
            within_ms=90_000,
        )  # fmt: skip
        assert sorted(int(row[BODY]) for row in rows) == expected

    reset(middle_ms + 10, list(range(20, 40)))
    if not clusters.APACHE:  # where a reset soon after another is lost at times
        reset(0, list(range(40)))
    group.leave("reset")


@pytest.mark.skipif(clusters.APACHE, reason="Apache asks the kernel what is in memory")
def test_new_groups_of_an_old_topic_start_where_they_ask(
    java54: JavaSession, tmp_path: Path, fresh: str
) -> None:
    with (
        clusters.name_server(tmp_path / "namesrv") as names,
        penstock.Broker(
            tmp_path / "broker",
            tmp_path / "store",
            names.address,
            # Every message counts as one that has long left memory.
            settings={"PENSTOCK_STORE_HOT_BYTES": "0"},
        ),
    ):
        java54.do("producer.start", producer=fresh, namesrv=names.address)

        def send(numbers: range) -> None:
            messages = [{"topic": fresh, "body": str(n)} for n in numbers]
            acked = java54.do("producer.send", producer=fresh, messages=messages)
            assert {line.get("status") for line in acked} == {"SEND_OK"}

        send(range(8))
        # The client's time has no fractions of a second.
        moment = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        moment += datetime.timedelta(seconds=1)
        assert eventually(lambda: datetime.datetime.now(datetime.UTC) > moment)
        send(range(8, 16))
        expected = {"FIRST_OFFSET": 0, "TIMESTAMP": 8, "LAST_OFFSET": 16}
        for start in expected:
            java54.do(
                "push.start", consumer=start, namesrv=names.address, group=f"{fresh}-{start}",
                topics={fresh: "*"}, timestamp=moment.strftime("%Y%m%d%H%M%S"), **{"from": start},
            )  # fmt: skip

        def all_hold_queues() -> bool:
            held = [java54.do("push.queues", consumer=one, topic=fresh) for one in expected]
            return [len(queues) for queues in held] == [4, 4, 4]

        assert eventually(all_hold_queues)
        # Where it starts to pull from a queue is settled before it holds it.
        send(range(16, 24))
        for start, first in expected.items():
            rows = java54.do("push.received", consumer=start, count=24 - first)
            assert sorted(int(row[BODY]) for row in rows) == list(range(first, 24))
            java54.do("push.stop", consumer=start, later_ms=0)
        java54.do("producer.stop", producer=fresh)
