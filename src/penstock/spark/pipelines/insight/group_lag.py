"""Measures the lag of consumer groups.

Brokers know only the current lag. Each run adds one measurement to a table, so that the table shows
the lag over time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from penstock.errors import GroupNotExist, PenstockError
from penstock.spark.pipelines.running import connect_admin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import DataFrame, SparkSession

LAG_COLUMNS: Final = (
    "sampled timestamp, group string, topic string, broker string, queue_id int, "
    "max_offset bigint, committed bigint, lag bigint, lag_ms bigint, consumed timestamp"
)


@dataclass(frozen=True, slots=True)
class LagSample:
    """The lag of groups at one time; `unknown` lists groups without a result, and why."""

    rows: tuple[tuple[object, ...], ...]
    unknown: tuple[str, ...]

    def frame(self, spark: "SparkSession") -> "DataFrame":
        return spark.createDataFrame(list(self.rows), LAG_COLUMNS)


def sample_lag(
    connection: "Mapping[str, str]", *, groups: Sequence[str] = (), now: datetime
) -> LagSample:
    """Ask the brokers for the lag of these groups, or of all groups.

    `connection` has the connection options of the source. Raises GroupNotExist if one of the given
    groups does not exist.
    """
    rows: list[tuple[object, ...]] = []
    unknown: list[str] = []
    with connect_admin(connection) as admin:
        existing = [group.name for group in admin.groups()]
        for name in groups:
            if name not in existing:
                raise GroupNotExist(
                    f"the group {name} does not exist",
                    hint="`penstock group list` lists all groups",
                )
        for name in groups or existing:
            try:
                progress = admin.progress(name)
            except PenstockError as error:  # continue with the other groups
                unknown.append(f"{name}: {error.message}")
                continue
            unknown += [f"{name}: {broker} does not answer" for broker in progress.unreachable]
            for each in progress.queues:
                consumed = None if each.consumed_ms is None else _time(each.consumed_ms)
                rows.append(
                    (
                        now,
                        name,
                        each.queue.topic,
                        each.queue.broker_name,
                        each.queue.queue_id,
                        each.max_offset,
                        each.committed,
                        each.lag,
                        each.lag_ms,
                        consumed,
                    )
                )
    return LagSample(tuple(rows), tuple(unknown))


def group_lag(lag: "DataFrame") -> "DataFrame":
    """The lag by measurement, group and topic, in messages and as the age of the oldest message.

    A group that has never committed in a queue has no lag there; `unknown` counts such queues.
    """
    from pyspark.sql import functions as f

    return (
        lag.groupBy("sampled", "group", "topic")
        .agg(
            f.count(f.lit(1)).alias("queues"),
            f.sum("lag").alias("lag"),
            f.max("lag_ms").alias("lag_ms"),
            f.count_if(f.col("lag").isNull()).alias("unknown"),
        )
        .orderBy("sampled", "group", "topic")
    )


def _time(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)
