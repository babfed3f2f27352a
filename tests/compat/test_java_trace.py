"""Real Java clients trace what they send and consume; the traces are found by id and key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from . import clusters
from .clients import mqadmin
from .java_session import ClientError, JavaSession, eventually
from .maven import V4_9
from .variants import any_client, each_release

pytestmark = [pytest.mark.compat, pytest.mark.slow]

TRACES = "RMQ_SYS_TRACE_TOPIC"
# Places of the fields of a record.
PUB_GROUP, PUB_TOPIC, PUB_ID, PUB_KEYS, PUB_HOST, PUB_KIND, PUB_OFFSET_ID, PUB_OK = (
    3, 4, 5, 7, 8, 11, 12, 13,
)  # fmt: skip
BEFORE_GROUP, BEFORE_ID, BEFORE_TIMES = 3, 5, 6
AFTER_ID, AFTER_OK, AFTER_HOW = 2, 4, 6
END_ID, END_STATE = 5, 11


@pytest.fixture(scope="module")
def traced(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[clusters.Cluster]:
    """A cluster with the trace topic, whose retries come soon."""
    with clusters.running(
        tmp_path_factory.mktemp("traced"),
        brokerName="traced",
        traceTopicEnable=True,
        messageDelayLevel="1s 1s 1s 1s",
        regionId="far-away",
    ) as cluster:
        yield cluster


def start_producer(
    client: JavaSession, cluster: clusters.Cluster, fresh: str, **options: Any
) -> None:
    client.do("trace.producer", producer=fresh, namesrv=cluster.namesrv, **options)


@pytest.fixture
def watcher(client: JavaSession, traced: clusters.Cluster, fresh: str) -> str:
    """A client that looks for traces and leaves none."""
    name = f"watch-{fresh}"
    start_producer(client, traced, name)
    return name


def send(client: JavaSession, fresh: str, *bodies: str, how: str = "sync", **fields: Any) -> Any:
    messages = [
        {"topic": fresh, "body": body, "keys": [f"{fresh}-{body}"], **fields} for body in bodies
    ]
    return client.do("trace.send", producer=fresh, messages=messages, how=how)


def records(
    client: JavaSession, producer: str, key: str, kind: str, topic: str = TRACES
) -> list[Any]:
    """The records of a kind in the messages of a trace topic that have this key."""
    try:
        found = client.do("trace.find", producer=producer, topic=topic, key=key)
    except ClientError as error:
        if error.code not in (17, 208):  # no route, or no message
            raise
        return []
    lines = [line.split("\x01") for _, text in found for line in text.split("\x02") if line]
    return [line for line in lines if line[0] == kind and key in line]


def traces(
    client: JavaSession, producer: str, key: str, kind: str, count: int = 1, topic: str = TRACES
) -> list[Any]:
    """So many records of a kind; clients send them when they like."""

    def look() -> list[Any]:
        found = records(client, producer, key, kind, topic)
        return found if len(found) >= count else []

    return eventually(look)


@each_release
def test_a_message_is_traced_from_its_sending_to_its_end(
    client: JavaSession, traced: clusters.Cluster, watcher: str, fresh: str
) -> None:
    start_producer(client, traced, fresh)
    (acked,) = send(client, fresh, "hello")
    # So that the group's retry topic is there: a consumer that starts without it looks 20 s later.
    client.do("pull.start", consumer=fresh, namesrv=traced.namesrv, group=f"{fresh}-c")
    client.do("pull.stop", consumer=fresh)
    client.do(
        "trace.consumer", consumer=fresh, group=f"{fresh}-c", namesrv=traced.namesrv, topic=fresh,
        fail_times=1,
    )  # fmt: skip
    assert client.do("trace.consumed", consumer=fresh, count=2)
    (pub,) = traces(client, watcher, acked["msg_id"], "Pub")
    assert (pub[2], pub[PUB_GROUP], pub[PUB_TOPIC]) == ("far-away", fresh, fresh)
    assert (pub[PUB_ID], pub[PUB_OFFSET_ID]) == (acked["msg_id"], acked["offset_msg_id"])
    assert pub[PUB_HOST].endswith(traced.broker_address)
    assert (pub[PUB_KIND], pub[PUB_OK]) == ("0", "true")
    assert traces(client, watcher, f"{fresh}-hello", "Pub") == [pub]
    before = traces(client, watcher, acked["msg_id"], "SubBefore", 2)
    assert [line[BEFORE_GROUP] for line in before] == [f"{fresh}-c"] * 2
    assert {line[BEFORE_TIMES] for line in before} == {"0", "1"}  # it failed once
    after = traces(client, watcher, acked["msg_id"], "SubAfter", 2)
    assert {line[AFTER_ID] for line in after} == {acked["msg_id"]}
    assert {(line[AFTER_OK], line[AFTER_HOW]) for line in after} == {("false", "4"), ("true", "0")}
    if client.version != V4_9:
        text = mqadmin(client, traced.namesrv, "queryMsgTraceById", "-i", acked["msg_id"])
        rows = [line.split() for line in text.splitlines() if line.startswith(("Pub", "Sub"))]
        assert sorted((row[0], row[1], row[-1]) for row in rows) == [
            ("Pub", fresh, "success"), ("Sub", f"{fresh}-c", "failed"),
            ("Sub", f"{fresh}-c", "success"),
        ]  # fmt: skip


@any_client
def test_delayed_messages_and_batches_are_traced(
    client: JavaSession, traced: clusters.Cluster, watcher: str, fresh: str
) -> None:
    start_producer(client, traced, fresh)
    (delayed,) = send(client, fresh, "later", delay_level=1)
    batch = send(client, fresh, "a", "b", "c", how="batch")
    (pub,) = traces(client, watcher, delayed["msg_id"], "Pub")
    assert (pub[PUB_KIND], pub[PUB_OFFSET_ID]) == ("3", delayed["offset_msg_id"])
    assert batch["msg_id"].count(",") == 2
    (pub,) = traces(client, watcher, batch["msg_id"], "Pub")
    assert (pub[PUB_ID], pub[PUB_OFFSET_ID]) == (batch["msg_id"], batch["offset_msg_id"])


@any_client
def test_the_end_of_a_transaction_is_traced(
    client: JavaSession, traced: clusters.Cluster, watcher: str, fresh: str
) -> None:
    start_producer(client, traced, fresh)
    commit, rollback = send(client, fresh, "commit", "rollback", how="transaction")
    for acked, state in ((commit, "COMMIT_MESSAGE"), (rollback, "ROLLBACK_MESSAGE")):
        (pub,) = traces(client, watcher, acked["msg_id"], "Pub")
        assert (pub[PUB_KIND], pub[PUB_OK]) == ("1", "true")
        (end,) = traces(client, watcher, acked["msg_id"], "EndTransaction")
        assert (end[END_ID], end[END_STATE]) == (acked["msg_id"], state)


@any_client
def test_traces_go_to_a_topic_of_ones_own(
    client: JavaSession, traced: clusters.Cluster, watcher: str, fresh: str
) -> None:
    own = f"{fresh}-traces"
    client.do("producer.start", producer=f"maker-{traced.broker}", namesrv=traced.namesrv)
    client.do("producer.create_topic", producer=f"maker-{traced.broker}", topic=own, queues=1)
    start_producer(client, traced, fresh, trace_topic=own)
    (acked,) = send(client, fresh, "hello")
    (pub,) = traces(client, watcher, acked["msg_id"], "Pub", topic=own)
    assert pub[PUB_OFFSET_ID] == acked["offset_msg_id"]
    assert records(client, watcher, acked["msg_id"], "Pub") == []


@any_client
def test_a_broker_switches_traces_off(
    client: JavaSession, java54: JavaSession, traced: clusters.Cluster, watcher: str, fresh: str
) -> None:
    java54.do("admin.start", admin=fresh, namesrv=traced.namesrv)

    def switch(on: str) -> None:
        args = [traced.broker_address, {"traceOn": on}]
        java54.do("admin.call", admin=fresh, method="updateBrokerConfig", args=args)

    start_producer(client, traced, fresh)
    switch("false")
    try:
        (acked,) = send(client, fresh, "quiet")
    finally:
        switch("true")
    assert acked["trace_on"] is False
    (loud,) = send(client, fresh, "loud")
    assert loud["trace_on"] is True
    client.do(
        "trace.consumer", consumer=fresh, group=f"{fresh}-c", namesrv=traced.namesrv, topic=fresh
    )
    assert client.do("trace.consumed", consumer=fresh, count=2)
    for kind in ("Pub", "SubBefore", "SubAfter"):
        assert traces(client, watcher, loud["msg_id"], kind)
        assert records(client, watcher, acked["msg_id"], kind) == []
