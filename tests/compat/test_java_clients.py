"""Real Java producers: every way to send, every size, every script, and the queries they offer."""

from __future__ import annotations

import time
from typing import Any

import pytest

from . import maven
from .clusters import Cluster
from .java_session import ClientError, JavaSession, eventually
from .reading import read_all
from .variants import at_depth, clients

# Nearly every variant: here the serialization of headers matters most.
CLIENTS = at_depth("5.4.0-json", "4.9.8-binary", "5.5.1-json", "5.4.0-binary", "4.9.8-json")
pytestmark = [pytest.mark.compat, pytest.mark.slow, clients(CLIENTS)]

MIB = 1024 * 1024
NO_COMPRESSION = 16 * MIB
MESSAGE_ILLEGAL = 13
INVALID_PARAMETER = 29
CHINESE = "订单"
EMOJI = "🚀🎉"


@pytest.fixture
def producer(client: JavaSession, cluster: Cluster) -> str:
    client.do("producer.start", producer="common", namesrv=cluster.namesrv)
    return "common"


def send(client: JavaSession, producer: str, topic: str, *bodies: str, **options: Any) -> Any:
    messages = [{"topic": topic, "body": body} for body in bodies]
    return client.do("producer.send", producer=producer, messages=messages, **options)


def test_every_way_to_send(
    client: JavaSession, cluster: Cluster, producer: str, fresh: str
) -> None:
    """And the first send creates the topic, with as many queues as the producer asks for."""
    bodies = [f"body {n}" for n in range(120)]
    acked = send(client, producer, fresh, *bodies[:20])
    acked += send(client, producer, fresh, *bodies[20:60], how="async")
    assert {line.get("status") for line in acked} == {"SEND_OK"}, acked
    assert {line["broker"] for line in acked} == {cluster.broker}
    batch = send(client, producer, fresh, *bodies[60:80], how="batch")
    assert batch["status"] == "SEND_OK"
    assert len(batch["offset_msg_id"].split(",")) == 20
    assert send(client, producer, fresh, *bodies[80:90], how="oneway") == [{}] * 10
    [given] = send(
        client, producer, fresh, bodies[90], how="queue", broker=cluster.broker, queue_id=3
    )
    assert given["queue_id"] == 3
    sharded = client.do(
        "producer.send",
        producer=producer,
        how="selector",
        messages=[
            {"topic": fresh, "body": body, "properties": {"shard": f"user-{n % 5}"}}
            for n, body in enumerate(bodies[91:])
        ],
    )
    assert {line.get("status") for line in sharded} == {"SEND_OK"}
    for shard in range(5):
        assert len({line["queue_id"] for line in sharded[shard::5]}) == 1

    # One-way sends are not acknowledged: they arrive when they arrive.
    read = eventually(lambda: r if len(r := read_all(client, cluster, fresh)) >= 120 else [])
    assert sorted(line["body_length"] for line in read) == sorted(len(b) for b in bodies)
    assert {line["queue_id"] for line in read} == {0, 1, 2, 3}
    where = {(line["queue_id"], line["queue_offset"]): line for line in read}
    assert len(where) == 120
    for line in [*acked, given, *sharded]:
        stored = where[line["queue_id"], line["queue_offset"]]
        assert (stored["msg_id"], stored["body_crc"]) == (line["msg_id"], line["body_crc"])
    first = batch["queue_offset"]
    ids = [where[batch["queue_id"], first + n]["msg_id"] for n in range(20)]
    assert ids == batch["msg_id"].split(",")


def test_a_queue_that_is_not_there_is_refused(
    client: JavaSession, cluster: Cluster, producer: str, fresh: str
) -> None:
    send(client, producer, fresh, "first")
    [line] = send(client, producer, fresh, "x", how="queue", broker=cluster.broker, queue_id=77)
    assert line["error"] == "MQBrokerException"
    assert line["code"] == INVALID_PARAMETER
    [line] = send(client, producer, fresh, "after")
    assert line["status"] == "SEND_OK"


def test_bodies_of_every_size_up_to_the_limit(
    client: JavaSession, cluster: Cluster, fresh: str
) -> None:
    client.do(
        "producer.start",
        producer=fresh,
        namesrv=cluster.namesrv,
        body_max=8 * MIB,
        compress_over=NO_COMPRESSION,
        timeout_ms=20_000,
        retries=0,
    )
    sizes = [1, 2, 127, 128, 4095, 4096, 4097, 65_535, 65_536, 262_145, MIB, 4 * MIB - 1, 4 * MIB]
    messages = [{"topic": fresh, "size": size} for size in (*sizes, 4 * MIB + 1, 3)]
    *acked, refused, after = client.do("producer.send", producer=fresh, messages=messages)
    assert [line.get("status") for line in [*acked, after]] == ["SEND_OK"] * (len(sizes) + 1)
    assert (refused["error"], refused["code"]) == ("MQBrokerException", MESSAGE_ILLEGAL)

    [empty] = client.do("producer.send", producer=fresh, messages=[{"topic": fresh, "size": 0}])
    assert (empty["error"], empty["code"]) == ("MQClientException", MESSAGE_ILLEGAL)

    read = {line["body_length"]: line["body_crc"] for line in read_all(client, cluster, fresh)}
    assert read == {line["body_length"]: line["body_crc"] for line in [*acked, after]}
    client.do("producer.stop", producer=fresh, later_ms=0)


def test_chinese_and_emoji_everywhere(
    client: JavaSession, cluster: Cluster, producer: str, fresh: str
) -> None:
    properties = {"城市": "北京", "mood": EMOJI, "plain": "x y:z=1", "quote": '"\\{}'}
    message = {
        "topic": fresh,
        "body": f"{CHINESE} {EMOJI}",
        "tags": CHINESE,
        "keys": [f"{CHINESE}-1", EMOJI],
        "properties": properties,
    }
    other = {"topic": fresh, "body": "other", "tags": EMOJI}
    for line in client.do("producer.send", producer=producer, messages=[message, other]):
        assert line["status"] == "SEND_OK"
    everything = read_all(client, cluster, fresh)
    assert len(everything) == 2
    [read] = read_all(client, cluster, fresh, expression=CHINESE)
    assert read["tags"] == CHINESE
    assert read["keys"] == f"{CHINESE}-1 {EMOJI}"
    assert read["properties"].items() >= properties.items()
    [by_emoji] = read_all(client, cluster, fresh, expression=f"nothing || {EMOJI}")
    assert by_emoji["tags"] == EMOJI
    for key in (f"{CHINESE}-1", EMOJI):
        [found] = client.do("producer.query", producer=producer, topic=fresh, key=key)
        assert found["msg_id"] == read["msg_id"]


def test_compressed_bodies(client: JavaSession, cluster: Cluster, fresh: str) -> None:
    codecs = ["ZLIB", "LZ4", "ZSTD"] if client.version != maven.V4_9 else ["ZLIB"]
    acked = []
    for codec in codecs:
        client.do("producer.start", producer=codec, namesrv=cluster.namesrv, compress_with=codec)
        messages = [
            {"topic": fresh, "size": size, "random": False, "tags": codec}
            for size in (100_000, 3 * MIB)
        ]
        acked += client.do("producer.send", producer=codec, messages=messages)
        client.do("producer.stop", producer=codec, later_ms=0)
    assert {line.get("status") for line in acked} == {"SEND_OK"}
    read = read_all(client, cluster, fresh)
    lengths = [(line["body_length"], line["body_crc"]) for line in read]
    assert sorted(lengths) == sorted((line["body_length"], line["body_crc"]) for line in acked)
    assert all(line["store_size"] < line["body_length"] / 50 for line in read)


def test_queries_by_id_key_and_time(
    client: JavaSession, cluster: Cluster, producer: str, fresh: str
) -> None:
    before_ms = int(time.time() * 1000)
    messages = [
        {"topic": fresh, "body": f"{n}", "keys": [f"key-{n}", f"pair-{n // 2}"]} for n in range(8)
    ]
    acked = client.do("producer.send", producer=producer, messages=messages)
    offset_id, unique_id = acked[5]["offset_msg_id"], acked[5]["msg_id"]
    for id_ in (offset_id, unique_id):
        seen = client.do("producer.view", producer=producer, topic=fresh, id=id_)
        assert (seen["keys"], seen["queue_offset"]) == ("key-5 pair-2", acked[5]["queue_offset"])
    found = client.do("producer.query", producer=producer, topic=fresh, key="pair-2")
    assert sorted(line["keys"] for line in found) == ["key-4 pair-2", "key-5 pair-2"]
    with pytest.raises(ClientError):
        client.do("producer.query", producer=producer, topic=fresh, key="no-such-key")
    with pytest.raises(ClientError):
        client.do(
            "producer.query", producer=producer, topic=fresh, key="pair-2", to_ms=before_ms - 60_000
        )

    client.do("pull.start", consumer=fresh, namesrv=cluster.namesrv, group=fresh)
    queues = client.do("pull.queues", consumer=fresh, topic=fresh)
    assert sum(queue["max"] - queue["min"] for queue in queues) == 8
    for queue in queues:
        place = {"consumer": fresh, "topic": fresh, "broker": cluster.broker}
        place["queue_id"] = queue["queue_id"]
        assert client.do("pull.search", timestamp_ms=before_ms - 1000, **place) == 0
        late = client.do("pull.search", timestamp_ms=before_ms + 3_600_000, **place)
        assert late == queue["max"]
        assert queue["earliest_ms"] >= before_ms - 1000
    client.do("pull.stop", consumer=fresh, later_ms=0)


def test_a_topic_created_with_so_many_queues(
    client: JavaSession, cluster: Cluster, producer: str, fresh: str
) -> None:
    client.do("producer.create_topic", producer=producer, topic=fresh, queues=7)
    acked = send(client, producer, fresh, *map(str, range(21)))
    assert {line["queue_id"] for line in acked} == set(range(7))
