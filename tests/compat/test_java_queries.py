"""Messages that wait, come back or die are found by key, unique id, offset id, place and time."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.wire.message_ids import encode_offset_id

from . import clusters
from .clients import mqadmin
from .java_session import ClientError, JavaSession, eventually
from .maven import V4_9
from .variants import each_release

pytestmark = [pytest.mark.compat, pytest.mark.slow]

SCHEDULE, TIMER = "SCHEDULE_TOPIC_XXXX", "rmq_sys_wheel_timer"
HALF = "RMQ_SYS_TRANS_HALF_TOPIC"
NO_MESSAGE = 208
FAMILIES = {"timed": "timer", "committed": "trace", "undone": "trace"}
"""Whose command sends a kind of message."""


class Expected(NamedTuple):
    """A message: its answer, its key, where it is found, where never."""

    acked: Any
    key: str
    topics: tuple[str, ...]
    absent: str = ""


@pytest.fixture(scope="module")
def quick(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[clusters.Cluster]:
    """A cluster whose delay levels are seconds."""
    with clusters.running(
        tmp_path_factory.mktemp("queries"), brokerName="queries", messageDelayLevel="1s 1s 1s"
    ) as cluster:
        yield cluster


def send(client: JavaSession, cluster: clusters.Cluster, topic: str, kind: str) -> tuple[Any, str]:
    """Send one message of a kind; its answer and its key."""
    key = f"{topic}-{kind}"
    message: dict[str, Any] = {"topic": topic, "body": kind, "keys": [key], "tags": "T"}
    family = FAMILIES.get(kind, "producer")
    how: dict[str, Any] = {}
    if kind == "timed":
        message |= {"keys": key, "properties": {"TIMER_DELAY_MS": "1000"}}
    elif kind in ("committed", "undone"):
        message["body"] = "commit" if kind == "committed" else "rollback"
        how["how"] = "transaction"
    elif kind == "delayed":
        message["delay_level"] = 1
    name = f"{family}-{cluster.broker}"
    (acked,) = client.do(f"{family}.send", producer=name, messages=[message], **how)
    assert acked.get("status") == "SEND_OK", acked
    return acked, key


def send_all(client: JavaSession, cluster: clusters.Cluster, fresh: str) -> dict[str, Expected]:
    """One message of each kind."""
    retry, dead = f"{fresh}-retry", f"{fresh}-dead"
    ways = {
        "plain": (fresh, (fresh,)),
        "delayed": (fresh, (SCHEDULE, fresh)),
        "timed": (fresh, (TIMER, fresh)),
        "committed": (fresh, (HALF, fresh)),
        "undone": (fresh, (HALF,)),
        "retried": (retry, (retry, f"%RETRY%{retry}")),
        "dead": (dead, (dead, f"%DLQ%{dead}")),
    }
    common = {"namesrv": cluster.namesrv}
    for start in ("producer.start", "timer.start", "trace.producer"):
        client.do(start, producer=f"{start.partition('.')[0]}-{cluster.broker}", **common)
    made = {}
    for kind, (topic, topics) in ways.items():
        acked, key = send(client, cluster, topic, kind)
        made[kind] = Expected(acked, key, topics, topic if topic not in topics else "")
    for topic, times, most in ((retry, 1, 16), (dead, 99, 0)):
        client.do(
            "push.start", consumer=topic, group=topic, topics={topic: "*"}, fail_times=times,
            max_reconsume_times=most, **common,
        )  # fmt: skip
    return made


def query(client: JavaSession, cluster: clusters.Cluster, topic: str, key: str) -> list[Any]:
    try:
        found: list[Any] = client.do(
            "producer.query", producer=f"producer-{cluster.broker}", topic=topic, key=key
        )
    except ClientError as error:
        if error.code not in (17, NO_MESSAGE):  # no route yet, or no message
            raise
        return []
    return found


def offset_id(cluster: clusters.Cluster, place: int) -> str:
    """The offset id of the record at a place in the log."""
    host, port = cluster.broker_address.split(":")
    return encode_offset_id(ip_address(host).packed, int(port), place)


def check_found(client: JavaSession, cluster: clusters.Cluster, one: Expected, topic: str) -> Any:
    """A message is found under a topic in every way, and it is the same record each time."""
    (found,) = eventually(lambda: query(client, cluster, topic, one.key)) or [None]
    assert found is not None, f"{one.key} is not found under {topic}"
    assert (found["msg_id"], found["topic"]) == (one.acked["msg_id"], topic)
    place = found["physical_offset"]
    for some_id in (one.acked["msg_id"], offset_id(cluster, place)):
        seen = client.do(
            "producer.view", producer=f"producer-{cluster.broker}", topic=topic, id=some_id
        )
        assert (seen["physical_offset"], seen["msg_id"]) == (place, one.acked["msg_id"])
    client.do("pull.start", consumer="queries", namesrv=cluster.namesrv, group="queries")
    queue = {
        "consumer": "queries", "topic": topic, "broker": cluster.broker,
        "queue_id": found["queue_id"],
    }  # fmt: skip
    stored_ms, offset = found["store_timestamp"], found["queue_offset"]
    assert client.do("pull.search", timestamp_ms=stored_ms, **queue) <= offset
    assert client.do("pull.search", timestamp_ms=stored_ms + 1, **queue) > offset
    return found


@each_release
def test_messages_of_every_kind_are_found(
    client: JavaSession, quick: clusters.Cluster, fresh: str, tmp_path: Path
) -> None:
    made = send_all(client, quick, fresh)
    found: dict[tuple[str, str], Any] = {}
    for kind, one in made.items():
        for topic in one.topics:
            found[kind, topic] = check_found(client, quick, one, topic)
    for kind, one in made.items():
        # The answer to the send names the record that was stored then.
        first = found[kind, one.topics[0]]
        if one.acked["offset_msg_id"]:  # clients keep it from the users of transactions
            assert one.acked["offset_msg_id"] == offset_id(quick, first["physical_offset"])
        if one.absent:
            assert query(client, quick, one.absent, one.key) == []
    if client.version != V4_9:
        look_with_mqadmin(client, quick, found)
    for topic in (made["retried"].topics[0], made["dead"].topics[0]):
        client.do("push.stop", consumer=topic)


def look_with_mqadmin(
    client: JavaSession, cluster: clusters.Cluster, found: dict[tuple[str, str], Any]
) -> None:
    def run(command: str, topic: str, *words: str) -> str:
        return mqadmin(client, cluster.namesrv, command, "-t", topic, *words)

    for (_, topic), one in found.items():
        unique, key = one["msg_id"], one["keys"]
        place_id = offset_id(cluster, one["physical_offset"])
        assert place_id in run("queryMsgById", topic, "-i", place_id)
        assert key in run("queryMsgByUniqueKey", topic, "-i", unique)
        assert unique in run("queryMsgByKey", topic, "-k", key)
    for kind, topic in (("retried", "%RETRY%"), ("dead", "%DLQ%"), ("timed", "")):
        one = next(
            line
            for (name, where), line in found.items()
            if name == kind and where.startswith(topic) and where != TIMER
        )
        queue, offset = str(one["queue_id"]), str(one["queue_offset"])
        place = ("-b", cluster.broker, "-i", queue, "-o", offset)
        assert one["msg_id"] in run("queryMsgByOffset", one["topic"], *place)
        stored_ms = one["store_timestamp"]
        span = ("-b", str(stored_ms), "-e", str(stored_ms + 1))
        assert one["msg_id"] in run("printMsg", one["topic"], *span)
