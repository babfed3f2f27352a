"""Analyses messages: rates, sizes, queues, hot keys, latencies.

Each function takes messages with the columns of the source, or the result of `without_bodies`, and
returns a small DataFrame. Only Spark's built-in expressions are used. Times are store times.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from penstock.wire.bodies.client_bodies import MessageQueue

MESSAGE_COLUMNS: Final = (
    "topic",
    "broker",
    "queue_id",
    "message_id",
    "keys",
    "body",
    "born_timestamp",
    "store_timestamp",
)
PERCENTILES: Final = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
MINUTE_MS: Final = 60_000
BORN_TO_STORE: Final = "born to store"
_ACCURACY: Final = 10_000


def without_bodies(messages: "DataFrame") -> "DataFrame":
    """The messages with the length of their bodies only, small enough to be cached."""
    columns = [name for name in MESSAGE_COLUMNS if name != "body" and name in messages.columns]
    return messages.select(*columns, _bytes(messages).alias("bytes"))


def rates(messages: "DataFrame", *, bucket_ms: int = MINUTE_MS) -> "DataFrame":
    """For each topic and time bucket: messages, bytes of their bodies, messages per minute."""
    from pyspark.sql import functions as f

    grouped = messages.groupBy("topic", time_bucket("store_timestamp", bucket_ms).alias("time"))
    count = f.count(f.lit(1))
    return grouped.agg(
        count.alias("messages"),
        f.sum(_bytes(messages)).alias("bytes"),
        (count * (MINUTE_MS / bucket_ms)).alias("per_minute"),
    ).orderBy("topic", "time")


def sizes(messages: "DataFrame") -> "DataFrame":
    """For each topic: messages, bytes of bodies in total, mean, percentiles, minimum, maximum."""
    from pyspark.sql import functions as f

    sized = messages.select("topic", "store_timestamp", _bytes(messages).alias("size"))
    found = f.percentile_approx("size", list(PERCENTILES.values()), _ACCURACY).alias("found")
    return (
        sized.groupBy("topic")
        .agg(
            f.count(f.lit(1)).alias("messages"),
            f.sum("size").alias("bytes"),
            f.avg("size").alias("mean_bytes"),
            found,
            f.min("size").alias("min_bytes"),
            f.max("size").alias("max_bytes"),
            f.min("store_timestamp").alias("first"),
            f.max("store_timestamp").alias("last"),
        )
        .select("*", *percentile_columns("bytes"))
        .drop("found")
        .orderBy("topic")
    )


def queue_balance(
    messages: "DataFrame", known: "Iterable[MessageQueue] | None" = None
) -> "DataFrame":
    """For each queue: messages, bytes, its share of the topic, and `load` (1 is an even share).

    Queues in `known` are included even if they have no messages.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    queues = messages.groupBy("topic", "broker", "queue_id").agg(
        f.count(f.lit(1)).alias("messages"), f.sum(_bytes(messages)).alias("bytes")
    )
    if known is not None:
        ddl = "topic string, broker string, queue_id int, messages bigint, bytes bigint"
        rows = [(queue.topic, queue.broker_name, queue.queue_id, 0, 0) for queue in known]
        queues = (
            queues.union(messages.sparkSession.createDataFrame(rows, ddl))
            .groupBy("topic", "broker", "queue_id")
            .agg(f.sum("messages").alias("messages"), f.sum("bytes").alias("bytes"))
        )
    topic = Window.partitionBy("topic")
    share = f.try_divide(f.col("messages"), f.sum("messages").over(topic))
    return queues.select(
        "*", share.alias("share"), (share * f.count(f.lit(1)).over(topic)).alias("load")
    ).orderBy("topic", "broker", "queue_id")


def hot_keys(messages: "DataFrame", *, top: int = 20) -> "DataFrame":
    """The most frequent keys of each topic: rank, messages, share of the topic's messages."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    order = Window.partitionBy("topic").orderBy(f.desc("messages"), "key")
    totals = messages.groupBy("topic").agg(f.count(f.lit(1)).alias("total"))
    return (
        _by_key(messages)
        .withColumn("rank", f.row_number().over(order))
        .where(f.col("rank") <= top)
        .join(totals, "topic")
        .select(
            "topic", "rank", "key", "messages", (f.col("messages") / f.col("total")).alias("share")
        )
        .orderBy("topic", "rank")
    )


def key_skew(messages: "DataFrame") -> "DataFrame":
    """For each topic, how its messages are distributed over keys.

    `skew` is the number of messages of the hottest key, relative to the average key.
    """
    from pyspark.sql import functions as f

    keys = (
        _by_key(messages)
        .groupBy("topic")
        .agg(
            f.count(f.lit(1)).alias("keys"),
            f.min_by("key", f.struct(-f.col("messages"), "key")).alias("hottest"),
            f.max("messages").alias("hottest_messages"),
            (f.max("messages") / f.avg("messages")).alias("skew"),
        )
    )
    has_key = f.length(f.trim(f.coalesce("keys", f.lit("")))) > 0
    totals = messages.groupBy("topic").agg(
        f.count(f.lit(1)).alias("messages"), f.count_if(has_key).alias("with_key")
    )
    return (
        totals.join(keys, "topic", "left")
        .select(
            "topic",
            "messages",
            "with_key",
            f.coalesce("keys", f.lit(0)).alias("keys"),
            "hottest",
            "hottest_messages",
            (f.col("hottest_messages") / f.col("messages")).alias("hottest_share"),
            "skew",
        )
        .orderBy(f.desc_nulls_last("skew"), "topic")
    )


def store_latencies(messages: "DataFrame") -> "DataFrame":
    """The time of each message from its creation to its storage, as input for `latencies`.

    It includes waiting for a delay or a transaction, and compares the clocks of two machines.
    """
    from pyspark.sql import functions as f

    took = f.unix_millis("store_timestamp") - f.unix_millis("born_timestamp")
    return messages.select(
        f.lit(BORN_TO_STORE).alias("stage"),
        "topic",
        f.lit(None).cast("string").alias("group"),
        f.col("store_timestamp").alias("time"),
        took.alias("took_ms"),
    )


def latencies(took: "DataFrame", *, bucket_ms: int | None = None) -> "DataFrame":
    """Percentiles by stage, topic and group, and by time bucket if its length is given.

    `took` has the columns stage, topic, group, time, took_ms. A negative time, which is possible
    because clocks differ, counts as 0; `negative` is the number of such times.
    """
    from pyspark.sql import functions as f

    by = ["stage", "topic", "group"]
    frame = took.where(f.col("took_ms").isNotNull())
    if bucket_ms is not None:
        frame = frame.withColumn("time", time_bucket("time", bucket_ms))
        by.append("time")
    duration = f.greatest(f.col("took_ms"), f.lit(0))
    found = f.percentile_approx(duration, list(PERCENTILES.values()), _ACCURACY).alias("found")
    return (
        frame.groupBy(*by)
        .agg(
            f.count(f.lit(1)).alias("count"),
            found,
            f.max(duration).alias("max_ms"),
            f.count_if(f.col("took_ms") < 0).alias("negative"),
        )
        .select(*by, "count", *percentile_columns("ms"), "max_ms", "negative")
        .orderBy(*by)
    )


def percentile_columns(unit: str) -> "list[Column]":
    """The elements of the column `found` as separate columns."""
    from pyspark.sql import functions as f

    return [
        f.col("found")[number].alias(f"{name}_{unit}") for number, name in enumerate(PERCENTILES)
    ]


def time_bucket(column: str, bucket_ms: int) -> "Column":
    """The start of the time bucket of a timestamp.

    Calculated by arithmetic, because date functions use the time zone of the session.
    """
    from pyspark.sql import functions as f

    ms = f.unix_millis(column)
    return f.timestamp_millis(ms - f.pmod(ms, f.lit(bucket_ms)))


def _by_key(messages: "DataFrame") -> "DataFrame":
    """The number of messages of each key; a message with several keys counts for each of them."""
    from pyspark.sql import functions as f

    each = f.explode(f.array_distinct(f.split("keys", " +"))).alias("key")
    return (
        messages.select("topic", each)
        .where(f.col("key") != "")
        .groupBy("topic", "key")
        .agg(f.count(f.lit(1)).alias("messages"))
    )


def _bytes(messages: "DataFrame") -> "Column":
    from pyspark.sql import functions as f

    if "bytes" in messages.columns:
        return f.col("bytes")
    if "body" in messages.columns:
        return f.octet_length("body").cast("bigint")
    return f.lit(None).cast("bigint")  # a lake of JSON columns has no bodies
