"""Our Python client and real Java clients on one broker: each understands what the other wrote."""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock import (
    Consumer,
    Decision,
    Message,
    Producer,
    PullConsumer,
    ReceivedMessage,
    TransactionProducer,
)

from . import clusters
from .java_session import JavaSession, eventually
from .maven import V4_9
from .reading import read_all
from .test_java_trace import records
from .variants import at_depth, clients

pytestmark = [pytest.mark.compat, pytest.mark.slow]

one_client = clients(at_depth("5.4.0-json"))

CONF = {
    "brokerName": "bilingual",
    "messageDelayLevel": "1s 1s 1s 1s",
    "traceTopicEnable": True,
    "transactionTimeOut": 1000,
    "transactionCheckInterval": 1000,
}
BODIES = {"plain": b"hello", "text": "héllo 世界".encode(), "bytes": bytes(range(256))}
LARGE = b"0123456789abcdef" * 1000
OPTIONS: dict[str, Any] = {"route_refresh_ms": 1_000, "heartbeat_ms": 3_000}


@pytest.fixture(scope="module")
def both(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[clusters.Cluster]:
    """A cluster in which retries, questions and traces come soon."""
    with clusters.running(tmp_path_factory.mktemp("both"), **CONF) as cluster:
        yield cluster


def java_producer(
    client: JavaSession, cluster: clusters.Cluster, topic: str, queues: int = 4
) -> str:
    """A Java producer, and a topic for this test."""
    name = f"java-{cluster.broker}"
    client.do("producer.start", producer=name, namesrv=cluster.namesrv)
    client.do("producer.create_topic", producer=name, topic=topic, queues=queues)
    return name


def make(kind: Callable[..., Any], cluster: clusters.Cluster, group: str, **options: Any) -> Any:
    return kind(cluster.namesrv, group=group, **{**OPTIONS, **options})


@contextmanager
def consuming(consumer: Consumer) -> Iterator[None]:
    """A Python consumer at work."""
    with consumer:
        thread = threading.Thread(target=consumer.run)
        thread.start()
        try:
            yield
        finally:
            consumer.close()
            thread.join(30)
    assert not thread.is_alive()


def crc(body: bytes) -> int:
    """As RocketMQ counts it: 31 bits."""
    return zlib.crc32(body) & 0x7FFFFFFF


def compressions(client: JavaSession) -> list[str]:
    """Old Java clients know no other."""
    return ["zlib", "lz4", "zstd"] if client.version != V4_9 else ["zlib"]


@one_client
def test_java_reads_what_python_sent(
    client: JavaSession, both: clusters.Cluster, fresh: str
) -> None:
    java_producer(client, both, fresh)
    sent: dict[str, tuple[Any, bytes]] = {}
    with make(Producer, both, fresh) as producer:
        for name, body in BODIES.items():
            message = Message(
                fresh, body, tags=name, keys=[f"{fresh}-{name}", "more"],
                properties={"größe": "12 µm", "name": name}, flag=len(name),
            )  # fmt: skip
            sent[name] = producer.send(message), body
        batch = [Message(fresh, b, tags=f"batch-{n}") for n, b in enumerate(BODIES.values())]
        for message, receipt in zip(batch, producer.send_batch(batch), strict=True):
            sent[str(message.tags)] = receipt, message.content
    for kind in compressions(client):
        with make(Producer, both, fresh, compression=kind) as producer:
            sent[kind] = producer.send(Message(fresh, LARGE, tags=kind)), LARGE
    lines = {line["tags"]: line for line in read_all(client, both, fresh)}
    assert lines.keys() == sent.keys()
    for name, (receipt, body) in sent.items():
        line = lines[name]
        assert (line["body_crc"], line["body_length"]) == (crc(body), len(body)), name
        assert line["msg_id"] == receipt.message_id
        assert (line["queue_id"], line["queue_offset"]) == (
            receipt.queue.queue_id, receipt.queue_offset
        )  # fmt: skip
        assert (line["store_size"] < len(body)) == (body is LARGE), "compressed"
    for name in BODIES:
        line = lines[name]
        assert (line["keys"], line["flag"]) == (f"{fresh}-{name} more", len(name))
        assert (line["properties"]["größe"], line["properties"]["name"]) == ("12 µm", name)
    producer = f"java-{both.broker}"

    def by_key() -> list[Any]:
        found: list[Any] = client.do(
            "producer.query", producer=producer, topic=fresh, key=f"{fresh}-text"
        )
        return found

    assert [line["msg_id"] for line in eventually(by_key)] == [sent["text"][0].message_id]
    viewed = client.do(
        "producer.view", producer=producer, topic=fresh, id=sent["text"][0].offset_id
    )
    assert viewed["tags"] == "text"


@one_client
def test_python_reads_what_java_sent(
    client: JavaSession, both: clusters.Cluster, fresh: str
) -> None:
    producer = java_producer(client, both, fresh)
    messages: list[dict[str, Any]] = [
        {
            "topic": fresh, "body": "héllo 世界", "tags": "plain", "keys": ["k1", "k2"], "flag": 7,
            "properties": {"größe": "12 µm"},
        },
        {"topic": fresh, "size": 3000, "tags": "random"},
    ]  # fmt: skip
    acked = client.do("producer.send", producer=producer, messages=messages)
    batch = client.do(
        "producer.send", producer=producer, how="batch",
        messages=[{"topic": fresh, "body": f"b{n}", "tags": f"batch-{n}"} for n in range(3)],
    )  # fmt: skip
    ids = [line["msg_id"] for line in acked] + batch["msg_id"].split(",")
    for kind in compressions(client):
        name = f"java-{kind}-{both.broker}"
        client.do("producer.start", producer=name, namesrv=both.namesrv, compress_with=kind.upper())
        message = {"topic": fresh, "size": 20_000, "random": False, "tags": kind}
        ids += [
            line["msg_id"] for line in client.do("producer.send", producer=name, messages=[message])
        ]
    got: list[ReceivedMessage] = []
    with make(PullConsumer, both, fresh) as consumer:
        queues = consumer.queues(fresh)
        consumer.assign(queues)
        for queue in queues:
            consumer.seek_to_begin(queue)

        def poll() -> bool:
            got.extend(consumer.poll(timeout_ms=500))
            return len(got) >= len(ids)

        assert eventually(poll)
    assert {message.message_id for message in got} == set(ids)
    by_tag = {message.tags: message for message in got}
    plain = by_tag["plain"]
    assert (plain.body.decode(), plain.flag, list(plain.keys)) == ("héllo 世界", 7, ["k1", "k2"])
    assert plain.properties["größe"] == "12 µm"
    assert (plain.message_id, plain.offset_id) == (acked[0]["msg_id"], acked[0]["offset_msg_id"])
    assert crc(by_tag["random"].body) == acked[1]["body_crc"]
    assert [by_tag[f"batch-{n}"].body for n in range(3)] == [b"b0", b"b1", b"b2"]
    for kind in compressions(client):
        assert by_tag[kind].body == bytes(20_000)


@one_client
def test_ordering_keys_mean_the_same_queues(
    client: JavaSession, both: clusters.Cluster, fresh: str
) -> None:
    producer = java_producer(client, both, fresh, queues=7)
    keys = [f"order-{n}" for n in range(30)] + ["", "ß", "世界", "polygenelubricants"]
    messages = [{"topic": fresh, "body": key, "properties": {"shard": key}} for key in keys if key]
    lines = client.do("producer.send", producer=producer, how="hash", messages=messages)
    java = {str(m["body"]): line["queue_id"] for m, line in zip(messages, lines, strict=True)}
    with make(Producer, both, fresh) as ours:
        python = {
            key: ours.send(Message(fresh, key), ordering_key=key).queue.queue_id for key in java
        }
    assert python == java


@one_client
def test_order_is_kept_both_ways(client: JavaSession, both: clusters.Cluster, fresh: str) -> None:
    producer = java_producer(client, both, fresh, queues=2)
    with make(Producer, both, fresh) as ours:
        queues = list(ours.queues(fresh))
        for number in range(40):
            for queue in queues:
                if number % 2:
                    ours.send(Message(fresh, str(number)), queue=queue)
                else:
                    client.do(
                        "producer.send", producer=producer, how="queue",
                        messages=[{"topic": fresh, "body": str(number)}],
                        broker=queue.broker_name, queue_id=queue.queue_id,
                    )  # fmt: skip
    client.do(
        "push.start", consumer=fresh, namesrv=both.namesrv, group=f"{fresh}-j", orderly=True,
        topics={fresh: "*"},
    )  # fmt: skip
    rows = client.do("push.received", consumer=fresh, count=80)
    client.do("push.stop", consumer=fresh, later_ms=0)
    seen: list[tuple[int, str]] = []
    consumer = make(Consumer, both, f"{fresh}-p", orderly=True, start_at="first", rebalance_ms=1000)

    @consumer.on(fresh)
    def handle(message: ReceivedMessage) -> None:
        seen.append((message.queue_id, message.body.decode()))

    with consuming(consumer):
        assert eventually(lambda: len(seen) >= 80)
    expected = [str(number) for number in range(40)]
    for queue_id in range(2):
        assert [row[3] for row in rows if row[1] == queue_id] == expected
        assert [body for place, body in seen if place == queue_id] == expected


@one_client
def test_a_failed_message_comes_again_at_the_other_client(
    client: JavaSession, both: clusters.Cluster, fresh: str
) -> None:
    """Python gives a message back; Java of the same group gets it, with the same id."""
    java_producer(client, both, fresh)
    failed: list[str] = []
    consumer = make(Consumer, both, fresh, start_at="first", rebalance_ms=1000)

    @consumer.on(fresh)
    def handle(message: ReceivedMessage) -> bool:
        failed.append(message.message_id)
        return False

    with consuming(consumer), make(Producer, both, fresh) as producer:
        receipt = producer.send(Message(fresh, "again"))
        assert eventually(lambda: failed)
    client.do("push.start", consumer=fresh, namesrv=both.namesrv, group=fresh, topics={fresh: "*"})
    (row, *_) = client.do("push.received", consumer=fresh, count=1)
    client.do("push.stop", consumer=fresh, later_ms=0)
    assert (row[3], row[6], row[9]) == ("again", receipt.message_id, fresh)
    assert row[10] >= 1


@one_client
def test_transactions_of_one_are_answered_by_the_other(
    client: JavaSession, both: clusters.Cluster, fresh: str
) -> None:
    java_producer(client, both, fresh)
    group = f"{fresh}-tx"
    tx = {"producer": fresh, "namesrv": both.namesrv, "group": group}
    # Java's halves, whose producer goes away: Python of the same group is asked.
    client.do("tx.start", **tx)
    client.do("tx.send", producer=fresh, messages=[
        {"topic": fresh, "body": body, "properties": {"local": local, "checks": "unknown"}}
        for body, local in (("j-commit", "commit"), ("j-rollback", "rollback"),
                            ("j-asked", "unknown"), ("j-dropped", "unknown"))
    ])  # fmt: skip
    client.do("tx.stop", producer=fresh)
    asked: list[ReceivedMessage] = []

    def check(message: ReceivedMessage) -> Decision:
        asked.append(message)
        return Decision.COMMIT if message.body == b"j-asked" else Decision.ROLLBACK

    with make(TransactionProducer, both, group, check=check) as producer:
        with producer.transaction(Message(fresh, "p-commit")):
            pass
        with pytest.raises(KeyError), producer.transaction(Message(fresh, "p-rollback")):
            raise KeyError
        assert eventually(lambda: len({message.body for message in asked}) == 2)
        producer.prepare(Message(fresh, "p-asked", properties={"checks": "commit"}))
        producer.prepare(Message(fresh, "p-dropped", properties={"checks": "rollback"}))
    # And the other way round.
    client.do("tx.start", **tx)
    client.do("tx.send", producer=fresh, messages=[  # so it knows the broker, and the broker it
        {"topic": fresh, "body": "j-again", "properties": {"local": "commit"}}
    ])  # fmt: skip
    checks = client.do("tx.checks", producer=fresh, count=2)
    assert {check["body"] for check in checks} == {"p-asked", "p-dropped"}

    def bodies() -> list[int] | None:
        lines = read_all(client, both, fresh)
        return sorted(line["body_crc"] for line in lines) if len(lines) >= 5 else None

    committed = (b"j-commit", b"j-asked", b"j-again", b"p-commit", b"p-asked")
    expected = sorted(map(crc, committed))
    assert eventually(bodies) == expected
    client.do("tx.stop", producer=fresh)


@one_client
def test_traces_are_alike(client: JavaSession, both: clusters.Cluster, fresh: str) -> None:
    java_producer(client, both, fresh)
    watcher = f"watch-{fresh}"
    client.do("trace.producer", producer=watcher, namesrv=both.namesrv)
    client.do("trace.producer", producer=fresh, group=fresh, namesrv=both.namesrv)
    fields = {"topic": fresh, "body": "hello", "tags": "t", "keys": [f"{fresh}-key"]}
    (acked,) = client.do("trace.send", producer=fresh, messages=[fields])
    client.do("trace.stop", producer=fresh)
    with make(Producer, both, fresh, trace=True) as producer:
        receipt = producer.send(Message(fresh, "hello", tags="t", keys=[f"{fresh}-key"]))
    (java,) = eventually(lambda: records(client, watcher, acked["msg_id"], "Pub"))
    (python,) = eventually(lambda: records(client, watcher, receipt.message_id, "Pub"))
    # Of kind, time, region, group, topic, id, tags, keys, broker, length, cost, type, offset id,
    # success and (5.x) client host, all but times, ids and hosts are the same.
    differing = {1, 5, 10, 12, 14}
    assert len(python) in (len(java), len(java) - 1)
    for place in set(range(len(python))) - differing:
        assert python[place] == java[place], (place, python, java)
    assert python[5] == receipt.message_id
    assert python[12] == receipt.offset_id
    for group, run in ((f"{fresh}-j", _java_reads), (f"{fresh}-p", _python_reads)):
        run(client, both, fresh, group)
    for group in (f"{fresh}-j", f"{fresh}-p"):
        for msg_id in (acked["msg_id"], receipt.message_id):

            def found(kind: str, msg_id: str = msg_id, group: str = group) -> list[Any]:
                return [r for r in records(client, watcher, msg_id, kind) if group in r]

            (before,) = eventually(lambda: found("SubBefore"))
            assert (before[3], before[5]) == (group, msg_id)
    client.do("trace.stop", producer=watcher)


def _java_reads(client: JavaSession, cluster: clusters.Cluster, topic: str, group: str) -> None:
    client.do("trace.consumer", consumer=group, group=group, namesrv=cluster.namesrv, topic=topic)
    assert client.do("trace.consumed", consumer=group, count=2)
    client.do("trace.stop", consumer=group)


def _python_reads(client: JavaSession, cluster: clusters.Cluster, topic: str, group: str) -> None:
    came: list[str] = []
    consumer = make(Consumer, cluster, group, trace=True, start_at="first", rebalance_ms=1000)

    @consumer.on(topic)
    def handle(message: ReceivedMessage) -> None:
        came.append(message.message_id)

    with consuming(consumer):
        assert eventually(lambda: len(came) == 2)


@one_client
def test_broadcast_offsets_are_one_file(
    client: JavaSession, both: clusters.Cluster, fresh: str, tmp_path: Path
) -> None:
    """Python goes on where Java was, and Java where Python was."""
    producer = java_producer(client, both, fresh, queues=2)

    def send(bodies: range) -> None:
        messages = [{"topic": fresh, "body": str(number)} for number in bodies]
        client.do("producer.send", producer=producer, messages=messages)

    start = {
        "consumer": fresh, "namesrv": both.namesrv, "group": fresh, "topics": {fresh: "*"},
        "broadcast": True,
    }  # fmt: skip
    send(range(20))
    client.do("push.start", **start)
    assert len(client.do("push.received", consumer=fresh, count=20)) == 20
    client_id = client.do("push.client_id", consumer=fresh)
    client.do("push.stop", consumer=fresh)
    path = client.log.parent / "offsets" / client_id / fresh / "offsets.json"
    assert eventually(path.exists)
    send(range(20, 40))
    came: list[int] = []
    consumer = make(
        Consumer, both, fresh, model="broadcast", start_at="first", offsets_path=path,
        rebalance_ms=1000,
    )  # fmt: skip

    @consumer.on(fresh)
    def handle(message: ReceivedMessage) -> None:
        came.append(int(message.body))

    with consuming(consumer):
        assert eventually(lambda: len(came) >= 20)
    assert sorted(came) == list(range(20, 40))
    send(range(40, 60))
    client.do("push.start", **start)
    rows = client.do("push.received", consumer=fresh, count=20)
    client.do("push.stop", consumer=fresh, later_ms=0)
    assert sorted(int(row[3]) for row in rows) == list(range(40, 60))


@one_client
@pytest.mark.parametrize("python_first", [True, False])
def test_one_java_and_one_python_consumer_share_a_group(
    client: JavaSession, both: clusters.Cluster, fresh: str, python_first: bool
) -> None:
    producer = java_producer(client, both, fresh, queues=8)
    came: list[str] = []
    consumer = make(Consumer, both, fresh, start_at="first", rebalance_ms=1000)

    @consumer.on(fresh)
    def handle(message: ReceivedMessage) -> None:
        came.append(message.body.decode())

    def start_java() -> None:
        client.do(
            "push.start", consumer=fresh, namesrv=both.namesrv, group=fresh, topics={fresh: "*"}
        )

    def shares() -> tuple[set[int], set[int]]:
        python = {state.queue.queue_id for state in consumer.queues() if state.queue.topic == fresh}
        java = {row[1] for row in client.do("push.queues", consumer=fresh, topic=fresh)}
        return python, java

    def settled() -> bool:
        python, java = shares()
        return len(python) == len(java) == 4 and python | java == set(range(8))

    if not python_first:
        start_java()
    with consuming(consumer):
        if python_first:
            start_java()
        assert eventually(settled), shares()
        assert len(client.do("push.received", consumer=fresh)) == len(came) == 0
        messages = [{"topic": fresh, "body": str(number)} for number in range(200)]
        client.do("producer.send", producer=producer, messages=messages)
        assert eventually(
            lambda: len(came) + len(client.do("push.received", consumer=fresh)) >= 200
        )
        time.sleep(0.5)  # for what would come twice
        java = [row[3] for row in client.do("push.received", consumer=fresh)]
        assert sorted([*came, *java], key=int) == [str(number) for number in range(200)]
        assert len(came) == len(java) == 100
    # Python has left: Java has all.
    assert eventually(lambda: len(client.do("push.queues", consumer=fresh, topic=fresh)) == 8)
    client.do("push.stop", consumer=fresh, later_ms=0)


@one_client
def test_one_java_and_one_python_consumer_in_order(
    client: JavaSession, both: clusters.Cluster, fresh: str
) -> None:
    """Queues change hands under their locks: nothing is overtaken."""
    producer = java_producer(client, both, fresh, queues=4)
    calls: list[tuple[int, int, float, float]] = []
    consumer = make(Consumer, both, fresh, orderly=True, start_at="first", rebalance_ms=1000)
    chance = random.Random(1)

    @consumer.on(fresh)
    def handle(message: ReceivedMessage) -> None:
        begin = time.monotonic_ns()
        time.sleep(chance.uniform(0, 0.004))
        calls.append((message.queue_id, message.queue_offset, begin, time.monotonic_ns()))

    def java_calls() -> list[tuple[int, int, float, float]]:
        rows = client.do("orderly.calls", group=fresh)
        return [(row[2], row[3], row[7], row[8]) for row in rows]

    client.do(
        "orderly.start", consumer=fresh, namesrv=both.namesrv, group=fresh, topic=fresh, work_ms=2
    )
    client.do("flood.start", producer=producer, flood=fresh, topic=fresh, pause_ms=5)
    assert eventually(lambda: len(java_calls()) > 50)
    with consuming(consumer):
        assert eventually(lambda: len({call[0] for call in calls}) == 2)
        assert eventually(lambda: len(calls) > 100)
    client.do("flood.stop", flood=fresh)
    java = java_calls()
    for queue_id in range(4):
        # Both JVM and Python count from the machine's start: their clocks are one.
        both_calls = sorted(
            (call for call in [*calls, *java] if call[0] == queue_id), key=lambda call: call[2]
        )
        for earlier, later in pairwise(both_calls):
            assert later[2] >= earlier[3], "two handlers in one queue at a time"
            assert later[1] <= earlier[1] + 1, "something was left out"
    client.do("orderly.stop", consumer=fresh)


@one_client
def test_requests_are_replied_to_across_languages(
    client: JavaSession, both: clusters.Cluster, fresh: str
) -> None:
    java_producer(client, both, fresh)
    other = f"{fresh}-2"
    java_producer(client, both, other)
    consumer = make(Consumer, both, f"{fresh}-c", start_at="first", rebalance_ms=1000)

    @consumer.on(fresh)
    def serve(message: ReceivedMessage) -> None:
        consumer.reply(message, message.body.upper())

    client.do("request.start", producer=fresh, namesrv=both.namesrv)
    with consuming(consumer):
        lines = client.do(
            "request.ask", producer=fresh, messages=[{"topic": fresh, "body": "hello"}]
        )
        assert [line["body"] for line in lines] == ["HELLO"], lines
    client.do("request.stop", producer=fresh)
    client.do("reply.start", consumer=other, namesrv=both.namesrv, group=f"{other}-c", topic=other)
    with make(Producer, both, fresh) as producer:
        reply = producer.request(Message(other, "hello"), timeout_ms=30_000)
    assert reply.body == b"hello!"
    client.do("reply.stop", consumer=other)
