"""The input of pipeline `insight`: messages of brokers, of a lake, or of log files."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.arrow.log_slices import group_topic_prefixes
from penstock.arrow.message_schema import CONTROL_TOPIC, FIELDS
from penstock.client.admin.admin_topics import kind_of
from penstock.client.admin.admin_values import TopicKind
from penstock.errors import BadSetting, NoRoute
from penstock.spark.pipelines.insight.dead_letters import DEAD_COLUMNS
from penstock.spark.pipelines.insight.profiles import MESSAGE_COLUMNS
from penstock.spark.pipelines.insight.trace_latency import TRACE_COLUMNS
from penstock.spark.pipelines.lake.lake_rows import lake_rows
from penstock.spark.pipelines.running import PipelineJob
from penstock.spark.spark_schema import spark_schema
from penstock.wire.codes import DLQ_TOPIC_PREFIX

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.wire.bodies.client_bodies import MessageQueue

ALL: Final = ".*"
_LAKE_NEEDED: Final = ("topic", "store_timestamp")


@dataclass(frozen=True, slots=True)
class InsightSelection:
    """The topics, groups and store times to analyse; `until_ms` is exclusive."""

    topics: tuple[str, ...]
    pattern: str | None
    groups: tuple[str, ...]
    trace_topic: str | None
    since_ms: int | None
    until_ms: int | None

    @property
    def names_topics(self) -> bool:
        """Whether topics were selected."""
        return bool(self.topics) or self.pattern is not None

    @property
    def internal_topics(self) -> tuple[str, ...]:
        """Topics that no pattern includes, although their names look like application topics."""
        return (CONTROL_TOPIC, *([] if self.trace_topic is None else [self.trace_topic]))

    def includes(self, topic: str) -> bool:
        """Whether messages of this topic are analysed.

        A pattern matches application topics. It matches retry and dead-letter topics only if it
        begins with their prefix.
        """
        if self.topics:
            return topic in self.topics
        pattern = self.pattern or ALL
        is_eligible = kind_of(topic) is TopicKind.NORMAL or topic.startswith(
            group_topic_prefixes(pattern)
        )
        return (
            is_eligible
            and topic not in self.internal_topics
            and re.fullmatch(pattern, topic) is not None
        )

    def includes_dead_letters(self, topic: str) -> bool:
        """Whether this is a dead-letter topic of a selected group."""
        group = topic.removeprefix(DLQ_TOPIC_PREFIX)
        return topic != group and (not self.groups or group in self.groups)


@dataclass(frozen=True, slots=True)
class Inputs:
    """DataFrames of messages, dead letters and traces; empty if there are none."""

    origin: str
    messages: "DataFrame"
    dead: "DataFrame"
    traces: "DataFrame | None"
    queues: "frozenset[MessageQueue] | None" = None
    notes: tuple[str, ...] = ()


def open_inputs(spark: "SparkSession", job: PipelineJob, selection: InsightSelection) -> Inputs:
    """The input that the options select; nothing is read yet."""
    if job["lake"] is not None:
        return _lake_inputs(spark, job["lake"], selection)
    if job["log"] is not None:
        return _log_inputs(spark, job, selection)
    return _broker_inputs(spark, job, selection)


def wanted_queues(job: PipelineJob, selection: InsightSelection) -> "frozenset[MessageQueue]":
    """The queues of the selected topics; raises NoRoute if a topic does not exist."""
    if selection.topics:
        return frozenset(job.queues(subscribe=",".join(selection.topics)))
    by_pattern = job.queues(subscribePattern=selection.pattern or ALL)
    found = frozenset(queue for queue in by_pattern if selection.includes(queue.topic))
    if selection.pattern is not None and not found:
        raise NoRoute(
            f"no topic matches {selection.pattern}", hint="`penstock topic list` lists all topics"
        )
    return found


def _broker_inputs(spark: "SparkSession", job: PipelineJob, selection: InsightSelection) -> Inputs:
    queues = wanted_queues(job, selection)
    dead_letter_topics = f"{DLQ_TOPIC_PREFIX}{ALL}"
    dead = {
        q.topic
        for q in job.queues(subscribePattern=dead_letter_topics)
        if selection.includes_dead_letters(q.topic)
    }
    notes = []
    has_traces = selection.trace_topic is not None
    if selection.trace_topic is not None:
        try:
            job.queues(subscribe=selection.trace_topic)
        except NoRoute:
            has_traces = False
            notes.append(f"There are no traces: the topic {selection.trace_topic} does not exist.")

    def read(topics: Iterable[str], columns: Sequence[str]) -> "DataFrame":
        return _read(spark, job, selection, ",".join(sorted(topics)), columns)

    return Inputs(
        origin=f"brokers of {job.connection.get('nameserver', 'the default NameServers')}",
        messages=read({queue.topic for queue in queues}, MESSAGE_COLUMNS),
        dead=read(dead, DEAD_COLUMNS),
        traces=read([selection.trace_topic or ""], TRACE_COLUMNS) if has_traces else None,
        queues=queues,
        notes=tuple(notes),
    )


def _log_inputs(spark: "SparkSession", job: PipelineJob, selection: InsightSelection) -> Inputs:
    from pyspark.sql import functions as f

    def read(topics: Sequence[str], pattern: str, columns: Sequence[str]) -> "DataFrame":
        return _read(
            spark,
            job,
            selection,
            ",".join(topics),
            columns,
            pattern=None if topics else pattern,
            mode="log",
            path=job["log"],
        )

    messages = read(selection.topics, selection.pattern or ALL, MESSAGE_COLUMNS)
    if not selection.topics:
        messages = messages.where(~f.col("topic").isin(*selection.internal_topics))
    traces = None
    if selection.trace_topic is not None:
        traces = read([selection.trace_topic], ALL, TRACE_COLUMNS)
    groups = [DLQ_TOPIC_PREFIX + group for group in selection.groups]
    return Inputs(
        origin=f"log files in {job['log']}",
        messages=messages,
        dead=read(groups, f"{DLQ_TOPIC_PREFIX}{ALL}", DEAD_COLUMNS),
        traces=traces,
    )


def _read(
    spark: "SparkSession",
    job: PipelineJob,
    selection: InsightSelection,
    topics: str,
    columns: Sequence[str],
    *,
    pattern: str | None = None,
    **options: str,
) -> "DataFrame":
    if not topics and pattern is None:
        return spark.createDataFrame([], spark_schema(columns))
    options |= {"subscribe": topics} if pattern is None else {"subscribePattern": pattern}
    options |= {"columns": ",".join(columns)}
    options |= {"failOnDataLoss": "false" if job["skip_lost"] else "true"}
    if selection.since_ms is not None:
        options["startingTimestamp"] = str(selection.since_ms)
    if selection.until_ms is not None:
        options["endingTimestamp"] = str(selection.until_ms)
    frame = spark.read.format("penstock").options(**job.connection, **options).load()
    return _in_time_range(frame, selection)


def _lake_inputs(spark: "SparkSession", lake: str, selection: InsightSelection) -> Inputs:
    """Messages of a lake; dead letters and traces only if their topics were written to it."""
    from pyspark.sql import functions as f

    found = lake_rows(spark, lake)
    for name in _LAKE_NEEDED:
        if name not in found.columns:
            raise BadSetting(
                f"the lake {lake} has no column {name!r}",
                hint="use a lake that the pipeline `lake` has written",
            )
    rows = _in_time_range(found, selection)
    topics = [row.topic for row in rows.select("topic").distinct().collect()]
    missing = [name for name in selection.topics if name not in topics]
    notes = [f"The lake has no messages of {name} in this time range." for name in missing]
    has_traces = selection.trace_topic is not None and "body" in rows.columns
    return Inputs(
        origin=f"lake {lake}",
        messages=_select(rows, filter(selection.includes, topics), MESSAGE_COLUMNS),
        dead=_select(rows, filter(selection.includes_dead_letters, topics), DEAD_COLUMNS),
        traces=rows.where(f.col("topic") == f.lit(selection.trace_topic)).select(*TRACE_COLUMNS)
        if has_traces
        else None,
        notes=tuple(notes),
    )


def _select(rows: "DataFrame", topics: Iterable[str], columns: Sequence[str]) -> "DataFrame":
    """Rows of these topics; missing columns are null, except the body."""
    from pyspark.sql import functions as f

    wanted = []
    for name in columns:
        if name in rows.columns:
            wanted.append(f.col(name))
        elif name != "body":
            wanted.append(f.lit(None).cast(FIELDS[name][1]).alias(name))
    return rows.where(f.col("topic").isin(list(topics))).select(*wanted)


def _in_time_range(rows: "DataFrame", selection: InsightSelection) -> "DataFrame":
    """The rows within the time range; brokers find its ends only approximately."""
    from pyspark.sql import functions as f

    stored = f.unix_millis("store_timestamp")
    if selection.since_ms is not None:
        rows = rows.where(stored >= selection.since_ms)
    if selection.until_ms is not None:
        rows = rows.where(stored < selection.until_ms)
    return rows
