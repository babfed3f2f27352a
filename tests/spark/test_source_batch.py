"""The source in batch reads: ranges, columns, tasks, errors."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.functions import col, spark_partition_id

from penstock import Admin, Message
from tests.spark.kit import create_topic, reader, send, send_numbers, source_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.compat.penstock import Up

pytestmark = [pytest.mark.spark, pytest.mark.slow]

BROKER = "broker-a"


def bodies(frame: DataFrame) -> list[bytes]:
    return sorted(bytes(row.body) for row in frame.select("body").collect())


def numbers(first: int, until: int) -> list[bytes]:
    return sorted(str(n).encode() for n in range(first, until))


def test_all_fields_of_a_message_are_columns(spark: SparkSession, cluster: Up, fresh: str) -> None:
    create_topic(cluster, fresh, 1)
    before = datetime.now(UTC)
    send(cluster, [Message(fresh, b"\x00body", "vip", ["k1", "k2"], {"channel": "sms"})])
    [row] = reader(spark, cluster, fresh).load().collect()
    assert (row.topic, row.broker, row.queue_id, row.queue_offset) == (fresh, BROKER, 0, 0)
    assert (bytes(row.body), row.tags, row["keys"]) == (b"\x00body", "vip", "k1 k2")
    assert row.properties["channel"] == "sms"
    assert row.message_id == row.properties["UNIQ_KEY"]
    assert row.reconsume_times == 0
    assert row.delay_level is None
    stored = row.store_timestamp.astimezone(UTC)
    assert abs((stored - before).total_seconds()) < 60


def test_ranges_are_given_by_offset_or_time(spark: SparkSession, cluster: Up, fresh: str) -> None:
    create_topic(cluster, fresh, 2)
    send_numbers(cluster, fresh, 40)
    whole = reader(spark, cluster, fresh).load().collect()
    by_place = {(row.queue_id, row.queue_offset): bytes(row.body) for row in whole}
    assert sorted(by_place) == [(q, n) for q in range(2) for n in range(20)]

    start, end = {fresh: {BROKER: {"0": 5, "1": -2}}}, {fresh: {BROKER: {"0": 9, "1": -1}}}
    part = reader(
        spark, cluster, fresh, startingOffsets=json.dumps(start), endingOffsets=json.dumps(end)
    )
    wanted = [(0, n) for n in range(5, 9)] + [(1, n) for n in range(20)]
    assert bodies(part.load()) == sorted(by_place[place] for place in wanted)

    middle = max(row.store_timestamp for row in whole).timestamp() * 1000 + 1
    send_numbers(cluster, fresh, range(40, 50))
    assert bodies(reader(spark, cluster, fresh, startingTimestamp=round(middle)).load()) == numbers(
        40, 50
    )
    iso = datetime.fromtimestamp(round(middle) / 1000, UTC).isoformat()
    assert bodies(reader(spark, cluster, fresh, endingTimestamp=iso).load()) == numbers(0, 40)
    ahead = reader(spark, cluster, fresh, startingTimestamp=round(middle) + 3_600_000)
    assert ahead.load().collect() == []


def test_topics_by_pattern_and_queues_by_assignment(
    spark: SparkSession, cluster: Up, fresh: str
) -> None:
    for number in range(2):
        create_topic(cluster, f"{fresh}-{number}", 2)
        send_numbers(cluster, f"{fresh}-{number}", range(10 * number, 10 * number + 10))
    create_topic(cluster, f"other-{fresh}", 1)
    send_numbers(cluster, f"other-{fresh}", 3)

    options = source_options(cluster, "", subscribePattern=f"{fresh}-.*")
    del options["subscribe"]
    frame = spark.read.format("penstock").options(**options).load()
    assert {(row.topic, row["count"]) for row in frame.groupBy("topic").count().collect()} == {
        (f"{fresh}-0", 10), (f"{fresh}-1", 10),
    }  # fmt: skip

    assign = json.dumps({f"{fresh}-1": {BROKER: [1]}})
    options = source_options(cluster, "", assign=assign)
    del options["subscribe"]
    rows = spark.read.format("penstock").options(**options).load().collect()
    assert {(row.topic, row.queue_id) for row in rows} == {(f"{fresh}-1", 1)}
    assert len(rows) == 5

    both = reader(spark, cluster, f"{fresh}-0,{fresh}-1", tags="odd || none").load()
    assert bodies(both) == sorted(str(n).encode() for n in range(1, 20, 2))


def test_only_selected_columns_are_read(spark: SparkSession, cluster: Up, fresh: str) -> None:
    create_topic(cluster, fresh, 1)
    send_numbers(cluster, fresh, 3)
    frame = reader(spark, cluster, fresh, columns="queue_offset, body,born_host").load()
    assert frame.columns == ["queue_offset", "body", "born_host"]
    assert [(row.queue_offset, bytes(row.body)) for row in frame.collect()] == [
        (n, str(n).encode()) for n in range(3)
    ]
    given = reader(spark, cluster, fresh).schema("properties map<string,string>, body binary")
    assert [row.properties["n"] for row in given.load().collect()] == ["0", "1", "2"]
    every = reader(spark, cluster, fresh, columns="*").load()
    assert every.select("commit_log_offset", "store_host").distinct().count() == 3


def test_the_number_of_tasks_can_be_set(spark: SparkSession, cluster: Up, fresh: str) -> None:
    create_topic(cluster, fresh, 2)
    send_numbers(cluster, fresh, 40)

    def tasks(**options: object) -> int:
        frame = reader(spark, cluster, fresh, **options).load()
        assert bodies(frame) == numbers(0, 40)
        return frame.select(spark_partition_id()).distinct().count()

    assert tasks() == 1
    assert tasks(minPartitions=2) == 2
    assert tasks(minPartitions=8) == 8


def test_an_empty_topic_is_an_empty_table(spark: SparkSession, cluster: Up, fresh: str) -> None:
    create_topic(cluster, fresh, 2)
    assert reader(spark, cluster, fresh).load().collect() == []
    options = source_options(cluster, "", subscribePattern=f"nothing-{fresh}.*")
    del options["subscribe"]
    assert spark.read.format("penstock").options(**options).load().count() == 0


def test_a_view_in_sql(spark: SparkSession, cluster: Up, fresh: str) -> None:
    create_topic(cluster, fresh, 1)
    send_numbers(cluster, fresh, 6)
    name = f"view_{fresh.replace('-', '_')}"
    spark.sql(
        f"create temporary view {name} using penstock "
        f"options (nameserver '{cluster.address}', subscribe '{fresh}')"
    )
    [row] = spark.sql(f"select count(*) n, max(queue_offset) m from {name} where tags = 'odd'")\
        .collect()  # fmt: skip
    assert (row.n, row.m) == (3, 5)


def test_the_log_is_read_without_its_broker(spark: SparkSession, cluster: Up, fresh: str) -> None:
    create_topic(cluster, fresh, 2)
    send_numbers(cluster, fresh, 20)
    [store] = [path.parent for path in cluster.log.parent.rglob("commitlog")]
    read = spark.read.format("penstock").option("mode", "log").option("subscribe", fresh)
    frame = read.option("brokerName", "copy").load(str(store))
    assert bodies(frame) == numbers(0, 20)
    assert {row.broker for row in frame.select("broker").collect()} == {"copy"}
    early = read.option("endingTimestamp", "1000").load(str(store))
    assert early.filter(col("topic") == fresh).count() == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [({"subscribe": "no-such-topic"}, "no broker has the topic 'no-such-topic'"),
     ({"startingOffset": "earliest"}, "did you mean startingOffsets"),
     ({"startingOffset": "earliest"}, "What to do: its options are accessKey"),
     ({"columns": "price"}, "a message has no column 'price'"),
     ({"maxOffsetsPerTrigger": "5"}, "for streams only"),
     ({"nameserver": "127.0.0.1:1", "readTimeout": "1s"}, "no NameServer answers"),
     ({"startingOffsets": '{"TOPIC": {"broker-a": {"0": 0}}}'}, "has no offset for"),
     ({"startingOffsets": '{"TOPIC": {"broker-x": {"0": 0, "1": 0}}}'}, "do not exist"),
     ({"startingOffsets": '{"TOPIC": {"broker-a": {"0": 9, "1": 0}}}'}, "is after its end"),
     ({"subscribe": None, "assign": '{"TOPIC": {"broker-a": [7]}}'},
      "do not exist: TOPIC broker-a 7"),
     ({"subscribe": None, "assign": '{"TOPIC": {"broker-z": [0]}}', "readTimeout": "1s"},
      "broker-z 0")],
)  # fmt: skip
def test_errors_name_their_cause(
    spark: SparkSession, cluster: Up, fresh: str, options: dict[str, str | None], text: str
) -> None:
    create_topic(cluster, fresh, 2)
    with Admin(cluster.address) as admin:
        assert fresh in admin.topic_names()
    named = {k: v and v.replace("TOPIC", fresh) for k, v in options.items()}
    with pytest.raises(PySparkException) as failure:
        reader(spark, cluster, fresh, **named).load().count()
    assert text.replace("TOPIC", fresh) in str(failure.value)


def test_namespaces_are_not_part_of_names(spark: SparkSession, cluster: Up, fresh: str) -> None:
    create_topic(cluster, f"acme%{fresh}", 1)
    create_topic(cluster, fresh, 1)
    send_numbers(cluster, f"acme%{fresh}", 3)
    frame = reader(spark, cluster, fresh, namespace="acme").load()
    assert {(row.topic, bytes(row.body)) for row in frame.collect()} == {
        (fresh, str(n).encode()) for n in range(3)
    }
    [store] = [path.parent for path in cluster.log.parent.rglob("commitlog")]
    read = spark.read.format("penstock").option("mode", "log").option("namespace", "acme")
    assert {row.topic for row in read.load(str(store)).collect()} == {fresh}
    named = read.option("subscribe", fresh).option("columns", "topic,body").load(str(store))
    assert [row.topic for row in named.collect()] == [fresh] * 3
