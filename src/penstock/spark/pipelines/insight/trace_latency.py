"""Latencies from message traces, from the send to the end of the handler.

The records are decoded by the client's decoder, so that the format is known in one place.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from penstock.client.trace.trace_records import ConsumeCode, TraceRecord, decode_traces

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

TRACE_COLUMNS: Final = ("topic", "body", "store_timestamp")
SEND: Final = "send"
STORE_TO_CONSUME: Final = "store to consume"
HANDLE: Final = "handle"
SEND_TO_CONSUME: Final = "send to consume"
SEND_TO_DONE: Final = "send to done"
_RECORDS: Final = (
    "type string, message_id string, time_ms bigint, group string, topic string, cost_ms bigint, "
    "success boolean, request_id string, retry_times int, outcome string"
)
_ARROW: Final = pa.schema(
    [
        ("type", pa.string()),
        ("message_id", pa.string()),
        ("time_ms", pa.int64()),
        ("group", pa.string()),
        ("topic", pa.string()),
        ("cost_ms", pa.int64()),
        ("success", pa.bool_()),
        ("request_id", pa.string()),
        ("retry_times", pa.int32()),
        ("outcome", pa.string()),
    ]
)
_LONG_MAX: Final = 2**62
_INT_MAX: Final = 2**31


def trace_records(
    messages: "DataFrame", wanted: Callable[[str], bool] | None = None
) -> "DataFrame":
    """One row per record in the messages of a trace topic.

    Invalid records are skipped, and so are records of topics that are not `wanted`. Records of
    consumers have no topic.
    """

    def decode(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = [
                _row(record)
                for body in batch.column(0)
                for record in decode_traces(body.as_buffer().to_pybytes())
                if wanted is None or record.topic is None or wanted(record.topic)
            ]
            yield pa.RecordBatch.from_pylist(rows, schema=_ARROW)

    return messages.select("body").mapInArrow(decode, _RECORDS)


def trace_latencies(records: "DataFrame", messages: "DataFrame | None" = None) -> "DataFrame":
    """The time of each traced message in each stage, as input for `latencies`.

    `send` ends with the broker's response, `send to consume` when a handler first receives the
    message, and `send to done` when a handler succeeds. `handle` is the time of each attempt in a
    handler. `store to consume` needs the messages, too. The topic of a consumed message is known
    only from the trace of its send or from the message.
    """
    from pyspark.sql import functions as f

    sent = _sent(records)
    attempts = _attempts(records)
    known = sent.select("message_id", "topic")
    if messages is not None:
        stored = _stored(messages)
        known = known.union(stored.select("message_id", "topic"))
    topics = known.groupBy("message_id").agg(f.min("topic").alias("topic"))
    firsts = attempts.groupBy("message_id", "group").agg(
        f.min("began_ms").alias("first_ms"),
        f.min(f.when(f.col("success"), f.col("ended_ms"))).alias("done_ms"),
    )
    consumed = sent.drop("group").join(firsts, "message_id")
    stages = [
        _stage(sent, SEND, f.col("sent_ms"), f.col("cost_ms"), grouped=False),
        _stage(consumed, SEND_TO_CONSUME, f.col("first_ms"), f.col("first_ms") - f.col("sent_ms")),
        _stage(consumed, SEND_TO_DONE, f.col("done_ms"), f.col("done_ms") - f.col("sent_ms")),
        _stage(
            attempts.join(topics, "message_id", "left"), HANDLE, f.col("began_ms"), f.col("cost_ms")
        ),
    ]
    if messages is not None:
        waits = stored.join(firsts, "message_id")
        took = f.col("first_ms") - f.col("stored_ms")
        stages.append(_stage(waits, STORE_TO_CONSUME, f.col("first_ms"), took))
    result = stages[0]
    for stage in stages[1:]:
        result = result.union(stage)
    return result.where(f.col("took_ms").isNotNull() & f.col("time").isNotNull())


def last_outcomes(records: "DataFrame") -> "DataFrame":
    """The outcome of the last attempt: message_id, group, outcome."""
    from pyspark.sql import functions as f

    ended = f.struct("ended_ms", "outcome")
    return (
        _attempts(records)
        .where(f.col("outcome").isNotNull())
        .groupBy("message_id", "group")
        .agg(f.max(ended).alias("last"))
        .select("message_id", "group", f.col("last.outcome").alias("outcome"))
    )


def _sent(records: "DataFrame") -> "DataFrame":
    """The first successful send of each message."""
    from pyspark.sql import functions as f

    pubs = records.where((f.col("type") == "Pub") & f.col("success"))
    return (
        pubs.groupBy("message_id", "topic")
        .agg(f.min(f.struct("time_ms", "cost_ms")).alias("first"), f.first("group").alias("group"))
        .select(
            "message_id",
            "topic",
            "group",
            f.col("first.time_ms").alias("sent_ms"),
            f.col("first.cost_ms").alias("cost_ms"),
        )
    )


def _attempts(records: "DataFrame") -> "DataFrame":
    """Each attempt of a handler to process a message.

    Older clients do not record when an attempt ended; then it is the start plus the duration.
    """
    from pyspark.sql import functions as f

    started = (
        records.where(f.col("type") == "SubBefore")
        .groupBy("request_id", "message_id")
        .agg(f.first("group").alias("group"), f.min("time_ms").alias("began_ms"))
    )
    ended = (
        records.where(f.col("type") == "SubAfter")
        .groupBy("request_id", "message_id")
        .agg(
            f.max("cost_ms").alias("cost_ms"),
            f.bool_or("success").alias("success"),
            f.max("outcome").alias("outcome"),
            f.max("time_ms").alias("recorded_ms"),
        )
    )
    both = started.join(ended, ["request_id", "message_id"], "left")
    ended_ms = f.coalesce("recorded_ms", f.col("began_ms") + f.col("cost_ms"))
    return both.withColumn("ended_ms", ended_ms).drop("recorded_ms")


def _stored(messages: "DataFrame") -> "DataFrame":
    from pyspark.sql import functions as f

    return messages.groupBy("message_id", "topic").agg(
        f.min(f.unix_millis("store_timestamp")).alias("stored_ms")
    )


def _stage(
    frame: "DataFrame", name: str, time_ms: "Column", took_ms: "Column", *, grouped: bool = True
) -> "DataFrame":
    from pyspark.sql import functions as f

    group = f.col("group") if grouped else f.lit(None).cast("string")
    return frame.select(
        f.lit(name).alias("stage"),
        "topic",
        group.alias("group"),
        f.timestamp_millis(time_ms).alias("time"),
        took_ms.cast("bigint").alias("took_ms"),
    )


def _row(record: TraceRecord) -> dict[str, object]:
    """A record as a row. Any client can write to the topic, so impossible numbers are dropped."""
    return {
        "type": record.type,
        "message_id": record.message_id,
        "time_ms": _number(record.time_ms, _LONG_MAX // 1_000_000),
        "group": record.group,
        "topic": record.topic,
        "cost_ms": _number(record.cost_ms, _LONG_MAX // 1_000_000),
        "success": record.success,
        "request_id": record.request_id,
        "retry_times": _number(record.retry_times, _INT_MAX),
        "outcome": _outcome(record.code),
    }


def _number(value: int | None, limit: int) -> int | None:
    return value if value is not None and -limit < value < limit else None


def _outcome(code: ConsumeCode | None) -> str | None:
    return None if code is None else code.name.lower()
