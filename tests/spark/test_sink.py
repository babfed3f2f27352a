"""DataFrames and streams written to topics at least once; errors of failing writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock import Admin
from tests.compat.penstock import Broker, NameServer
from tests.spark import kit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.compat.apache import Server
    from tests.compat.penstock import Up

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SCHEMA = (
    "topic string, body binary, tags string, keys array<string>, properties map<string,string>,"
    " queue_key string, delay_ms bigint"
)


def write(cluster: Server, rows: DataFrame, **options: object) -> None:
    given = {"nameserver": cluster.address, **{name: str(v) for name, v in options.items()}}
    rows.write.format("penstock").options(**given).mode("append").save()


def numbered(spark: SparkSession, count: int, partitions: int = 2) -> DataFrame:
    """Rows with bodies `0`, `1`, …"""
    return spark.range(0, count, 1, partitions).selectExpr("cast(id as string) as value")


# --- batches -------------------------------------------------------------------------------------


def test_a_row_becomes_a_message_with_all_fields(
    spark: SparkSession, cluster: Up, fresh: str
) -> None:
    one, two = kit.create_topic(cluster, f"{fresh}-1"), kit.create_topic(cluster, f"{fresh}-2")
    large = bytes(range(256)) * 80
    rows = spark.createDataFrame(
        [
            (one, b"plain", None, None, None, None, None),
            (one, large, "vip", ["k1", "k2"], {"a": "1", "UNIQ_KEY": "x"}, None, None),
            (one, b"late", None, ["k3"], None, None, 300),
            (two, b"keyed", None, None, {"b": "2", "empty": ""}, "user-7", None),
        ],
        SCHEMA,
    )
    write(cluster, rows, sinkId="nightly", batchId=12)
    found = {m.body: m for m in kit.read_topic(cluster, one, 3)}
    assert set(found) == {b"plain", large, b"late"}
    assert (found[large].tags, found[large].keys) == ("vip", ["k1", "k2"])
    properties = found[large].properties
    assert (properties["a"], properties["PENSTOCK_SINK"]) == ("1", "nightly")
    assert (properties["PENSTOCK_BATCH"], properties["UNIQ_KEY"] != "x") == ("12", True)
    assert found[b"late"].keys == ["k3"]
    (keyed,) = kit.read_topic(cluster, two, 1)
    assert (keyed.properties["b"], keyed.properties["__SHARDINGKEY"]) == ("2", "user-7")


def test_all_rows_of_all_partitions_are_sent_once(
    spark: SparkSession, cluster: Up, fresh: str
) -> None:
    topic = kit.create_topic(cluster, fresh)
    write(cluster, numbered(spark, 25_000, 3), topic=topic, inFlightBytes=1_000_000)
    found = kit.read_topic(cluster, topic, 25_000)
    assert sorted(int(m.body) for m in found) == list(range(25_000))
    marks = {(m.properties["PENSTOCK_SINK"], m.properties["PENSTOCK_PARTITION"]) for m in found}
    assert [partition for _, partition in sorted(marks)] == ["0", "1", "2"]
    assert {m.properties["PENSTOCK_BATCH"] for m in found} == {"0"}


def test_rows_with_one_key_stay_in_order_in_one_queue(
    spark: SparkSession, cluster: Up, fresh: str
) -> None:
    topic = kit.create_topic(cluster, fresh)
    rows = spark.range(0, 3_000, 1, 2).selectExpr(
        "cast(id as string) as body", "id % 7 as queue_key"
    )
    write(cluster, rows.repartition(2, "queue_key").sortWithinPartitions("body"), topic=topic)
    queues: dict[str, set[int]] = {}
    order: dict[str, list[bytes]] = {}
    for message in sorted(kit.read_topic(cluster, topic, 3_000), key=lambda m: m.queue_offset):
        key = message.properties["__SHARDINGKEY"]
        queues.setdefault(key, set()).add(message.queue_id)
        order.setdefault(key, []).append(message.body)
    assert sorted(order) == [str(key) for key in range(7)]
    for key, bodies in order.items():
        assert len(queues[key]) == 1
        assert bodies == sorted(bodies)


def test_rows_read_by_the_source_can_be_written_unchanged(
    spark: SparkSession, cluster: Up, fresh: str
) -> None:
    source, target = kit.create_topic(cluster, fresh), kit.create_topic(cluster, f"{fresh}-copy")
    bodies = kit.send_numbers(cluster, source, 50)
    write(cluster, kit.reader(spark, cluster, source, columns="*").load(), topic=target)
    found = kit.read_topic(cluster, target, 50)
    assert sorted(m.body for m in found) == sorted(bodies)
    for message in found:
        number = message.body.decode()
        assert message.tags == ("odd" if int(number) % 2 else "even")
        assert message.keys == [number]
        assert message.properties["n"] == number


# --- streams -------------------------------------------------------------------------------------


def file_stream(spark: SparkSession, directory: Path, files: list[list[str]]) -> DataFrame:
    """A stream of rows with one file a batch."""
    directory.mkdir()
    for number, lines in enumerate(files):
        text = "".join(json.dumps({"value": line}) + "\n" for line in lines)
        (directory / f"{number}.json").write_text(text)
    reader = spark.readStream.schema("value string").option("maxFilesPerTrigger", 1)
    return reader.json(str(directory))


def test_messages_of_a_stream_have_its_query_and_batch_ids(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    topic = kit.create_topic(cluster, fresh)
    rows = file_stream(spark, tmp_path / "in", [["a", "b"], ["c"]])
    query = (
        rows.writeStream.format("penstock")
        .options(nameserver=cluster.address, topic=topic)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(60)
    found = kit.read_topic(cluster, topic, 3)
    assert sorted(m.body for m in found) == [b"a", b"b", b"c"]
    assert {m.properties["PENSTOCK_SINK"] for m in found} == {query.id}
    batches = {m.body: m.properties["PENSTOCK_BATCH"] for m in found}
    assert batches[b"a"] == batches[b"b"]
    assert set(batches.values()) == {"0", "1"}


def test_the_batch_id_can_be_given_in_foreach_batch(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    topic = kit.create_topic(cluster, fresh)

    def each(rows: DataFrame, batch_id: int) -> None:
        write(cluster, rows, topic=topic, sinkId=fresh, batchId=batch_id)

    rows = file_stream(spark, tmp_path / "in", [["a"], ["b"]])
    query = rows.writeStream.foreachBatch(each).trigger(availableNow=True).start()
    assert query.awaitTermination(60)
    found = kit.read_topic(cluster, topic, 2)
    assert sorted(m.properties["PENSTOCK_BATCH"] for m in found) == ["0", "1"]
    assert {m.properties["PENSTOCK_SINK"] for m in found} == {fresh}


# --- each row once -------------------------------------------------------------------------------


def test_a_repeated_batch_publishes_nothing(spark: SparkSession, cluster: Up, fresh: str) -> None:
    topic = kit.create_topic(cluster, fresh)
    once = {"topic": topic, "delivery": "transactional", "sinkId": fresh}
    for _ in range(2):
        write(cluster, numbered(spark, 6_000), **once)
    assert len(kit.read_topic(cluster, topic, 6_000)) == 6_000
    write(cluster, numbered(spark, 10), **once, batchId=1)
    found = kit.read_topic(cluster, topic, 6_010)
    assert len(found) == 6_010
    assert {m.properties["PENSTOCK_BATCH"] for m in found} == {"0", "1"}


def test_a_write_that_fails_publishes_nothing(spark: SparkSession, cluster: Up, fresh: str) -> None:
    topic = kit.create_topic(cluster, fresh)
    once = {"topic": topic, "delivery": "transactional", "sinkId": fresh}
    rows = spark.range(0, 1_000, 1, 2)
    bad = rows.selectExpr("if(id = 999, '', cast(id as string)) as body")
    assert "row 499 of partition 1: its body is empty" in failure(cluster, bad, **once)
    write(cluster, rows.selectExpr("cast(id as string) as body"), **once)
    found = kit.read_topic(cluster, topic, 1_000)
    assert sorted(int(m.body) for m in found) == list(range(1_000))


def test_a_stream_publishes_each_row_once(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    topic = kit.create_topic(cluster, fresh)
    rows = file_stream(spark, tmp_path / "in", [["a", "b"], ["c"]])
    query = (
        rows.writeStream.format("penstock")
        .options(nameserver=cluster.address, topic=topic, delivery="transactional")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(100)
    found = kit.read_topic(cluster, topic, 3)
    assert sorted(m.body for m in found) == [b"a", b"b", b"c"]
    assert {m.properties["PENSTOCK_SINK"] for m in found} == {query.id}


# --- errors ------------------------------------------------------------------------------------


def failure(cluster: Server, rows: DataFrame, **options: object) -> str:
    """The error that the user gets when a write fails."""
    from pyspark.errors import PySparkException

    with pytest.raises(PySparkException) as caught:
        write(cluster, rows, **options)
    return str(caught.value)


def test_a_bad_plan_is_refused_before_anything_is_sent(spark: SparkSession, cluster: Up) -> None:
    from pyspark.errors import PySparkException

    rows = numbered(spark, 2)
    text = failure(cluster, rows.selectExpr("value", "1.5 as price"), topic="t")
    assert "the sink does not know the column 'price'" in text
    assert "What to do: drop it, or put it into body or properties" in text
    assert "no topic is named" in failure(cluster, rows)
    assert "needs the option sinkId" in failure(cluster, rows, topic="t", delivery="transactional")
    assert "did you mean topic" in failure(cluster, rows, topics="t")
    writer = rows.write.format("penstock").options(nameserver=cluster.address, topic="t")
    with pytest.raises(PySparkException, match="a topic can't be overwritten"):
        writer.mode("overwrite").save()


def test_a_bad_row_is_named(spark: SparkSession, cluster: Up, fresh: str) -> None:
    topic = kit.create_topic(cluster, fresh)
    rows = spark.range(0, 30_000, 1, 1)
    bad = rows.selectExpr("if(id = 23456, null, cast(id as string)) as body")
    assert "row 23456 of partition 0: its body is null" in failure(cluster, bad, topic=topic)
    bad = rows.selectExpr("'x' as body", "map('a', if(id = 23456, '\u0001', 'b')) as properties")
    text = failure(cluster, bad, topic=topic)
    assert "row 23456 of partition 0: property 'a' contains" in text
    assert "What to do: use other characters" in text


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[NameServer, Broker]]:
    """A NameServer and a broker for one test, without automatic creation of topics."""
    with NameServer(tmp_path / "names") as names:
        store = tmp_path / "store"
        with Broker(
            tmp_path / "broker", store, names.address, autoCreateTopicEnable="false"
        ) as broker:
            yield names, broker


def test_a_missing_topic_is_named(
    spark: SparkSession, servers: tuple[NameServer, Broker], fresh: str
) -> None:
    names, _ = servers
    with Admin(names.address) as admin:
        admin.create_topic(fresh)
    text = failure(names, numbered(spark, 2, 1), topic=f"{fresh}x", deliveryTimeout="2s")
    assert "NoRoute" in text
    assert f"{fresh}x" in text
    assert "What to do: create the topic" in text
