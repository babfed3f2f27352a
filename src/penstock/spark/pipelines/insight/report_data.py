"""Collects the data of the report from the tables of pipeline `insight`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from penstock.spark.pipelines.insight.dead_letters import HOUR_MS
from penstock.spark.pipelines.insight.profiles import BORN_TO_STORE, MINUTE_MS, time_bucket
from penstock.spark.pipelines.insight.trace_latency import (
    HANDLE,
    SEND,
    SEND_TO_CONSUME,
    SEND_TO_DONE,
    STORE_TO_CONSUME,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROWS_MAX: Final = 40
SERIES_MAX: Final = 8
"""Maximum number of lines in a chart."""
POINTS_MAX: Final = 240
STAGES: Final = (BORN_TO_STORE, SEND, STORE_TO_CONSUME, HANDLE, SEND_TO_CONSUME, SEND_TO_DONE)
"""In the order in which a message passes them."""
STAGE_ROWS_MAX: Final = ROWS_MAX // len(STAGES)
KEYS_MAX: Final = 5
"""Maximum number of hot keys per topic."""
_DAY_MS: Final = 24 * HOUR_MS
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TableExcerpt:
    """The first rows of a table and its number of rows; times are milliseconds since 1970."""

    rows: tuple[Row, ...] = ()
    total: int = 0


@dataclass(frozen=True, slots=True)
class ReportData:
    """The data that the report shows."""

    about: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    bucket_ms: int = MINUTE_MS
    """Length of the time buckets in charts; a multiple of the one in the tables."""
    dead_bucket_ms: int = HOUR_MS
    sizes: TableExcerpt = TableExcerpt()
    rates: TableExcerpt = TableExcerpt()
    queues: TableExcerpt = TableExcerpt()
    skew: TableExcerpt = TableExcerpt()
    keys: TableExcerpt = TableExcerpt()
    latencies: TableExcerpt = TableExcerpt()
    latency_times: TableExcerpt = TableExcerpt()
    dead: TableExcerpt = TableExcerpt()
    dead_times: TableExcerpt = TableExcerpt()
    samples: TableExcerpt = TableExcerpt()
    lag: TableExcerpt = TableExcerpt()
    lag_times: TableExcerpt = TableExcerpt()


def collect_report_data(
    tables: "Mapping[str, DataFrame]",
    *,
    bucket_ms: int,
    about: Sequence[tuple[str, str]],
    notes: Sequence[str],
) -> ReportData:
    """Collect the data from the tables, by name."""
    from pyspark.sql import functions as f

    sizes = excerpt(tables["sizes"].orderBy(f.desc("messages"), "topic"))
    chart_bucket_ms = coarser_bucket_ms(bucket_ms, _span_ms(sizes.rows))
    busiest = [row["topic"] for row in sizes.rows[:SERIES_MAX]]
    dead_ms = _dead_bucket_ms(tables["dead_letter_counts"])
    return ReportData(
        about=tuple(about),
        notes=tuple(notes),
        bucket_ms=chart_bucket_ms,
        dead_bucket_ms=dead_ms,
        sizes=sizes,
        rates=_rates(tables["rates"].where(f.col("topic").isin(busiest)), chart_bucket_ms),
        queues=_queues(tables["queues"]),
        skew=excerpt(tables["key_skew"].where("skew is not null")),
        keys=_keys(tables["hot_keys"]),
        latencies=_latencies(tables["latencies"]),
        latency_times=_worst_latencies(tables["latency_times"], chart_bucket_ms),
        dead=_dead(tables["dead_letter_counts"]),
        dead_times=_dead_times(tables["dead_letter_counts"], dead_ms),
        samples=excerpt(tables["dead_letter_samples"].orderBy("rank", "group", "cause")),
        lag=_lag_now(tables["group_lag"]),
        lag_times=_lag_times(tables["group_lag"]),
    )


def coarser_bucket_ms(bucket_ms: int, span_ms: int) -> int:
    """The smallest multiple of a bucket of which at most POINTS_MAX cover the time span."""
    return bucket_ms * max(1, -(-span_ms // (bucket_ms * POINTS_MAX)))


def excerpt(frame: "DataFrame", limit: int = ROWS_MAX) -> TableExcerpt:
    """The first rows, with times as numbers, which do not depend on the session's time zone."""
    from pyspark.sql import functions as f

    columns = [
        f.unix_millis(name).alias(name) if kind == "timestamp" else f.col(name)
        for name, kind in frame.dtypes
    ]
    rows = frame.limit(limit + 1).select(*columns).collect()
    total = len(rows) if len(rows) <= limit else frame.count()
    return TableExcerpt(tuple(row.asDict() for row in rows[:limit]), total)


def _span_ms(rows: Sequence[Row]) -> int:
    if not rows:
        return 0
    return int(max(row["last"] for row in rows) - min(row["first"] for row in rows))


def _rates(rates: "DataFrame", bucket_ms: int) -> TableExcerpt:
    from pyspark.sql import functions as f

    grouped = rates.groupBy("topic", time_bucket("time", bucket_ms).alias("time"))
    messages = f.sum("messages")
    return excerpt(
        grouped.agg(
            (messages * (MINUTE_MS / bucket_ms)).alias("per_minute"),
            (f.sum("bytes") * (MINUTE_MS / bucket_ms)).alias("bytes_per_minute"),
        ).orderBy("topic", "time"),
        SERIES_MAX * (POINTS_MAX + 1),
    )


def _queues(queues: "DataFrame") -> TableExcerpt:
    """The smallest and the largest load of the queues of each topic."""
    from pyspark.sql import functions as f

    return excerpt(
        queues.groupBy("topic")
        .agg(
            f.count(f.lit(1)).alias("queues"),
            f.sum("messages").alias("messages"),
            f.count_if(f.col("messages") == 0).alias("empty"),
            f.min("load").alias("least"),
            f.max("load").alias("most"),
            f.min_by(
                f.concat_ws(" ", "broker", "queue_id"),
                f.struct(-f.col("load"), "broker", "queue_id"),
            ).alias("fullest"),
        )
        .where("messages > 0")
        .orderBy(f.desc("most"), "topic")
    )


def _keys(keys: "DataFrame") -> TableExcerpt:
    """The hottest keys of each topic, by number of messages: a single message has a share of 1."""
    from pyspark.sql import functions as f

    first = keys.where(f.col("rank") <= KEYS_MAX).orderBy(f.desc("messages"), "topic", "rank")
    return TableExcerpt(excerpt(first).rows, keys.count())


def _latencies(latencies: "DataFrame") -> TableExcerpt:
    """The slowest rows of each stage, so that each stage is shown."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    slowest = Window.partitionBy("stage").orderBy(f.desc("p95_ms"), "topic", "group")
    place = f.array_position(f.array(*(f.lit(stage) for stage in STAGES)), f.col("stage"))
    first = latencies.withColumn("rank", f.row_number().over(slowest)).where(
        f.col("rank") <= STAGE_ROWS_MAX
    )
    return TableExcerpt(excerpt(first.orderBy(place, "rank")).rows, latencies.count())


def _worst_latencies(times: "DataFrame", bucket_ms: int) -> TableExcerpt:
    """The largest p95 by stage and time; limited, since times come from clients' clocks."""
    from pyspark.sql import functions as f

    grouped = times.groupBy("stage", time_bucket("time", bucket_ms).alias("time"))
    return excerpt(
        grouped.agg(f.max("p95_ms").alias("p95_ms")).orderBy(f.desc("time"), "stage"),
        SERIES_MAX * (POINTS_MAX + 1),
    )


def _dead(counts: "DataFrame") -> TableExcerpt:
    from pyspark.sql import functions as f

    return excerpt(
        counts.groupBy("group", "origin_topic", "tags", "cause")
        .agg(
            f.sum("messages").alias("messages"),
            f.max("tries_max").alias("tries"),
            f.min("time").alias("first_hour"),
            f.max("time").alias("last_hour"),
        )
        .orderBy(f.desc("messages"), "group", "origin_topic", "tags", "cause")
    )


def _dead_bucket_ms(counts: "DataFrame") -> int:
    """The width of the bars: hours that divide a day, or whole days."""
    from pyspark.sql import functions as f

    first_ms, last_ms = counts.agg(
        f.unix_millis(f.min("time")), f.unix_millis(f.max("time"))
    ).collect()[0]
    least_ms = coarser_bucket_ms(HOUR_MS, 2 * ((last_ms or 0) - (first_ms or 0)))
    widths = (hours * HOUR_MS for hours in (1, 2, 3, 6, 12))
    return next((ms for ms in widths if ms >= least_ms), -(-least_ms // _DAY_MS) * _DAY_MS)


def _dead_times(counts: "DataFrame", bucket_ms: int) -> TableExcerpt:
    """Dead letters by time and cause, for the most frequent causes."""
    from pyspark.sql import functions as f

    causes = counts.groupBy("cause").agg(f.sum("messages").alias("all"))
    most = [row.cause for row in causes.orderBy(f.desc("all"), "cause").limit(SERIES_MAX).collect()]
    return excerpt(
        counts.where(f.col("cause").isin(most))
        .groupBy(time_bucket("time", bucket_ms).alias("time"), "cause")
        .agg(f.sum("messages").alias("messages"))
        .orderBy(f.desc("time"), "cause"),
        SERIES_MAX * (POINTS_MAX + 1),
    )


def _lag_now(lag: "DataFrame") -> TableExcerpt:
    from pyspark.sql import functions as f

    newest = lag.agg(f.max("sampled").alias("sampled"))
    return excerpt(lag.join(newest, "sampled").orderBy(f.desc_nulls_last("lag"), "group", "topic"))


def _lag_times(lag: "DataFrame") -> TableExcerpt:
    """The lag by time and group, for the groups with the largest lag, latest first."""
    from pyspark.sql import functions as f

    groups = lag.groupBy("sampled", "group").agg(
        f.sum("lag").alias("lag"), f.max("lag_ms").alias("lag_ms")
    )
    most = (
        groups.groupBy("group")
        .agg(f.max("lag").alias("most"))
        .orderBy(f.desc_nulls_last("most"), "group")
    )
    names = [row["group"] for row in most.limit(SERIES_MAX).collect()]
    return excerpt(
        groups.where(f.col("group").isin(names))
        .withColumnRenamed("sampled", "time")
        .orderBy(f.desc("time"), "group"),
        SERIES_MAX * POINTS_MAX,
    )
