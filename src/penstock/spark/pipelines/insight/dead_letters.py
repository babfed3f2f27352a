"""Analyses dead letters: by group, topic, time and cause.

Brokers do not record why a message became a dead letter. The cause is taken from a property, if a
program has set one, or from the trace of the last attempt (`exception`, `timeout`, …).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from penstock.client.trace.trace_records import ConsumeCode
from penstock.spark.pipelines.insight.profiles import time_bucket
from penstock.wire.codes import (
    DLQ_TOPIC_PREFIX,
    PROPERTY_DLQ_ORIGIN_MESSAGE_ID,
    PROPERTY_DLQ_ORIGIN_TOPIC,
    PROPERTY_ORIGIN_MESSAGE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_RETRY_TOPIC,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

DEAD_COLUMNS: Final = (
    "topic",
    "broker",
    "queue_id",
    "queue_offset",
    "message_id",
    "tags",
    "keys",
    "body",
    "properties",
    "born_timestamp",
    "store_timestamp",
    "reconsume_times",
)
CAUSE_PROPERTIES: Final = ("EXCEPTION", "exception", "error")
HOUR_MS: Final = 3_600_000
UNKNOWN_CAUSE: Final = "not known"
CAUSE_CHARS_MAX: Final = 200
_PREVIEW_BYTES: Final = 200


def dead_letters(
    messages: "DataFrame",
    outcomes: "DataFrame | None" = None,
    *,
    properties: Sequence[str] = CAUSE_PROPERTIES,
) -> "DataFrame":
    """One row per message of the topics %DLQ%…: group, original topic and id, attempts, cause.

    `outcomes` come from `last_outcomes`. `properties` are those that can contain the cause.
    """
    from pyspark.sql import functions as f

    dead = messages.where(f.startswith("topic", f.lit(DLQ_TOPIC_PREFIX))).select(
        f.substr("topic", f.lit(len(DLQ_TOPIC_PREFIX) + 1)).alias("group"),
        _property(PROPERTY_DLQ_ORIGIN_TOPIC, PROPERTY_RETRY_TOPIC, PROPERTY_REAL_TOPIC).alias(
            "origin_topic"
        ),
        _property(PROPERTY_DLQ_ORIGIN_MESSAGE_ID, PROPERTY_ORIGIN_MESSAGE_ID).alias("origin_id"),
        "message_id",
        "tags",
        "keys",
        "reconsume_times",
        "born_timestamp",
        "store_timestamp",
        "broker",
        "queue_id",
        "queue_offset",
        _cause_property(properties).alias("property_cause"),
        _preview(messages).alias("body_start"),
    )
    if outcomes is None:
        dead = dead.withColumn("outcome", f.lit(None).cast("string"))
    else:
        failed = outcomes.where(f.col("outcome") != ConsumeCode.SUCCESS.name.lower())
        dead = dead.join(failed, ["message_id", "group"], "left")
    source = f.when(f.col("property_cause").isNotNull(), "property").when(
        f.col("outcome").isNotNull(), "trace"
    )
    return dead.select(
        *(name for name in dead.columns if name not in ("property_cause", "outcome")),
        f.coalesce("property_cause", "outcome", f.lit(UNKNOWN_CAUSE)).alias("cause"),
        source.alias("cause_from"),
    )


def dead_letter_counts(dead: "DataFrame", *, bucket_ms: int = HOUR_MS) -> "DataFrame":
    """The number of dead letters and attempts by group, original topic, tag, cause and hour."""
    from pyspark.sql import functions as f

    by = ["group", "origin_topic", "tags", "cause"]
    return (
        dead.groupBy(*by, time_bucket("store_timestamp", bucket_ms).alias("time"))
        .agg(
            f.count(f.lit(1)).alias("messages"),
            f.min("reconsume_times").alias("tries_min"),
            f.max("reconsume_times").alias("tries_max"),
        )
        .orderBy("time", *by)
    )


def dead_letter_samples(dead: "DataFrame", *, each: int = 3) -> "DataFrame":
    """The latest dead letters of each group, original topic and cause."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    newest = Window.partitionBy("group", "origin_topic", "cause").orderBy(
        f.desc("store_timestamp"), "message_id"
    )
    return (
        dead.withColumn("rank", f.row_number().over(newest))
        .where(f.col("rank") <= each)
        .orderBy("group", "origin_topic", "cause", "rank")
    )


def _property(*names: str) -> "Column":
    """The first of these properties that a message has."""
    from pyspark.sql import functions as f

    return f.coalesce(*(f.col("properties")[name] for name in names))


def _cause_property(names: Sequence[str]) -> "Column":
    """The first line of the property with the cause, shortened because causes are counted."""
    from pyspark.sql import functions as f

    if not names:
        return f.lit(None).cast("string")
    line = f.rtrim(f.regexp_extract(_property(*names), r"^\s*([^\r\n]*)", 1))
    return f.when(line != "", f.substr(line, f.lit(1), f.lit(CAUSE_CHARS_MAX)))


def _preview(messages: "DataFrame") -> "Column":
    """The start of the body; bytes that are not UTF-8 are replaced."""
    from pyspark.sql import functions as f

    if "body" not in messages.columns:
        return f.lit(None).cast("string")
    start = f.substring("body", 1, _PREVIEW_BYTES)
    return f.make_valid_utf8(start.cast("string"))
