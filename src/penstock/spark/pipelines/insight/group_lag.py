"""What pipeline `insight` tells of consumer groups: how far they are behind, run after run.

Brokers know only how far a group is now. So each run adds what it finds as a file of its own to a
table, which becomes a series over time.
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
    """How far groups are at one moment; `unknown` says of which that could not be told, and why."""

    rows: tuple[tuple[object, ...], ...]
    unknown: tuple[str, ...]

    def frame(self, spark: "SparkSession") -> "DataFrame":
        return spark.createDataFrame(list(self.rows), LAG_COLUMNS)


def sample_lag(
    connection: "Mapping[str, str]", *, groups: Sequence[str] = (), now: datetime
) -> LagSample:
    """Ask the brokers about these groups, or about all; `connection` as options of the source.

    Raises GroupNotExist for one that is named and not there.
    """
    rows: list[tuple[object, ...]] = []
    unknown: list[str] = []
    with connect_admin(connection) as admin:
        there = [group.name for group in admin.groups()]
        for name in groups:
            if name not in there:
                raise GroupNotExist(
                    f"no broker knows the group {name}", hint="`penstock group list` shows all"
                )
        for name in groups or there:
            try:
                progress = admin.progress(name)
            except PenstockError as error:  # others can still be told
                unknown.append(f"{name}: {error.message}")
                continue
            unknown += [f"{name}: {broker} does not answer" for broker in progress.unreachable]
            for at in progress.queues:
                consumed = None if at.consumed_ms is None else _time(at.consumed_ms)
                rows.append(
                    (
                        now,
                        name,
                        at.queue.topic,
                        at.queue.broker_name,
                        at.queue.queue_id,
                        at.max_offset,
                        at.committed,
                        at.lag,
                        at.lag_ms,
                        consumed,
                    )
                )
    return LagSample(tuple(rows), tuple(unknown))


def group_lag(lag: "DataFrame") -> "DataFrame":
    """By group, topic and moment: messages behind, and the age of the oldest of them.

    Queues in which a group has never committed are not behind by any number: `unknown` counts them.
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
