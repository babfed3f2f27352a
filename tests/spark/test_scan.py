"""`mode=log`: the files of a store have the messages that its broker serves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.functions import spark_partition_id

import penstock.arrow
from penstock import Message
from tests.spark.kit import create_topic, reader, send

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tests.compat.penstock import Up

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def store_of(cluster: Up) -> Path:
    """The store of the cluster's broker."""
    (folder,) = cluster.log.parent.glob("data/**/commitlog")
    return folder.parent


def scan(spark: SparkSession, path: Path, **options: object) -> DataFrame:
    frame = spark.read.format("penstock").option("mode", "log").option("path", str(path))
    return frame.options(**{name: str(value) for name, value in options.items()}).load()


def test_the_log_files_of_a_running_broker_have_the_messages_it_serves(
    spark: SparkSession, cluster: Up, fresh: str
) -> None:
    create_topic(cluster, fresh, 3)
    send(
        cluster,
        (
            Message(
                fresh, f"{n}" * (n % 700 + 1), "odd" if n % 2 else "even", [f"k{n}"], {"n": str(n)}
            )
            for n in range(3_000)
        ),
    )
    order = ["queue_id", "queue_offset"]
    given = reader(spark, cluster, fresh).load().drop("broker").orderBy(order).collect()
    whole = scan(spark, store_of(cluster), subscribe=fresh, minPartitions=3).drop("broker")
    assert len(given) == 3_000
    assert whole.orderBy(order).collect() == given
    table = penstock.arrow.read(fresh, nameserver=cluster.address, columns=given[0].__fields__)
    arrow = table.to_pylist(maps_as_pydicts="strict")
    for row in arrow:  # collected rows have local times
        for name in ("born_timestamp", "store_timestamp"):
            row[name] = row[name].astimezone().replace(tzinfo=None)
    assert arrow == [row.asDict() for row in given]
    # Earlier tests may have filled most of the log, and this topic's messages be in one slice.
    everything = scan(spark, store_of(cluster), minPartitions=3)
    assert everything.select(spark_partition_id()).distinct().count() >= 2

    odd = scan(spark, store_of(cluster) / "commitlog", subscribePattern=fresh + ".*", tags="odd")
    wanted = [row for row in given if row.tags == "odd"]
    assert odd.drop("broker").orderBy(order).collect() == wanted

    middle_ms = round(given[1_500].store_timestamp.timestamp() * 1000)
    late = scan(spark, store_of(cluster), subscribe=fresh, startingTimestamp=middle_ms)
    count = sum(row.store_timestamp.timestamp() * 1000 >= middle_ms for row in given)
    assert late.count() == count


def test_a_path_without_a_log_is_refused_with_a_hint(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(PySparkException, match="holds no commit log"):
        scan(spark, tmp_path).count()


def test_damage_is_named_in_the_error(
    spark: SparkSession, cluster: Up, fresh: str, tmp_path: Path
) -> None:
    create_topic(cluster, fresh, 1)
    send(cluster, (Message(fresh, b"good" * 20) for _ in range(10)))
    frame = scan(spark, store_of(cluster), subscribe=fresh, columns="commit_log_offset")
    places = sorted(row.commit_log_offset for row in frame.collect())
    (tmp_path / "commitlog").mkdir()
    (source,) = (store_of(cluster) / "commitlog").glob("0" * 20)
    with source.open("rb") as file:
        data = bytearray(file.read(places[-1] + 1_000))
    data[places[4] + 100] ^= 1  # in the body
    (tmp_path / "commitlog" / source.name).write_bytes(data)
    with pytest.raises(PySparkException, match=f"log offset {places[4]} to {places[5] - 1}"):
        scan(spark, tmp_path, subscribe=fresh).count()
    assert scan(spark, tmp_path, subscribe=fresh, failOnDataLoss="false").count() == 9
