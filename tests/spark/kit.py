"""Shared by the tests with Spark: create topics, send, read back; and Spark's readers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from penstock import Admin, Message, Producer, PullConsumer, ReceivedMessage

if TYPE_CHECKING:
    from pyspark.sql import DataFrameReader, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamReader

    from tests.compat.penstock import Up

SESSION_CONF = {"spark.sql.shuffle.partitions": "2", "spark.driver.memory": "1g"}
POLL_MS = 20_000


def create_topic(cluster: Up, topic: str, queues: int = 4) -> str:
    """Create a topic with this many queues; returns its name."""
    with Admin(cluster.address) as admin:
        admin.create_topic(topic, queues=queues)
    return topic


def send(cluster: Up, messages: Iterable[Message]) -> int:
    """Send all messages to the queues in round robin; returns their number."""
    with Producer(cluster.address, group="spark-tests") as producer:
        futures = [producer.submit(message) for message in messages]
        for future in futures:
            future.result()
    return len(futures)


def send_numbers(cluster: Up, topic: str, numbers: Sequence[int] | int) -> list[bytes]:
    """Messages with bodies `0`, `1`, …, tag `even` or `odd`, key and property `n`; the bodies."""
    numbers = range(numbers) if isinstance(numbers, int) else numbers
    messages = [
        Message(topic, str(n), "odd" if n % 2 else "even", [str(n)], {"n": str(n)}) for n in numbers
    ]
    send(cluster, messages)
    return [message.content for message in messages]


def read_topic(cluster: Up, topic: str, count: int, *, more_ms: int = 100) -> list[ReceivedMessage]:
    """The first `count` messages of a topic and whatever comes within `more_ms` after them.

    So one that is there twice is seen. Raises where `count` do not come.
    """
    found: list[ReceivedMessage] = []
    with PullConsumer(cluster.address, group="spark-tests-read", auto_commit=False) as consumer:
        queues = consumer.queues(topic)
        consumer.assign(queues)
        for queue in queues:
            consumer.seek_to_begin(queue)
        while len(found) < count:
            batch = consumer.poll(POLL_MS)
            assert batch, f"{topic}: {len(found)} messages came, {count} expected"
            found += batch
        while batch := consumer.poll(more_ms):
            found += batch
    return found


def reader(spark: SparkSession, cluster: Up, topic: str, **options: object) -> DataFrameReader:
    """`spark.read` of a topic of the cluster, with further options of the source."""
    return spark.read.format("penstock").options(**source_options(cluster, topic, **options))


def stream_reader(
    spark: SparkSession, cluster: Up, topic: str, **options: object
) -> DataStreamReader:
    """`spark.readStream` of a topic of the cluster, with further options of the source."""
    stream = spark.readStream.format("penstock")
    return stream.options(**source_options(cluster, topic, **options))


def source_options(cluster: Up, topic: str, **options: object) -> dict[str, str]:
    """The options that `reader` gives, as text; one whose value is None is left out."""
    given = {"nameserver": cluster.address, "subscribe": topic, **options}
    return {name: str(value) for name, value in given.items() if value is not None}
