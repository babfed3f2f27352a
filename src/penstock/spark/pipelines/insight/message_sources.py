"""Where pipeline `insight` has its messages from: brokers, a lake, or the log files of a store."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.client.admin.admin_topics import kind_of
from penstock.client.admin.admin_values import TopicKind
from penstock.errors import BadSetting, NoRoute
from penstock.spark.message_schema import CONTROL_TOPIC, FIELDS, spark_schema
from penstock.spark.pipelines.insight.dead_letters import DEAD_COLUMNS
from penstock.spark.pipelines.insight.profiles import MESSAGE_COLUMNS
from penstock.spark.pipelines.insight.trace_latency import TRACE_COLUMNS
from penstock.spark.pipelines.lake.lake_rows import lake_rows
from penstock.spark.pipelines.running import PipelineJob
from penstock.spark.source.log_slices import group_topic_prefixes
from penstock.wire.codes import DLQ_TOPIC_PREFIX

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.wire.bodies.client_bodies import MessageQueue

ALL: Final = ".*"
_LAKE_NEEDED: Final = ("topic", "store_timestamp")


@dataclass(frozen=True, slots=True)
class Choice:
    """What is to be looked at; times are those of the store, `until_ms` not included."""

    topics: tuple[str, ...]
    pattern: str | None
    groups: tuple[str, ...]
    trace_topic: str | None
    since_ms: int | None
    until_ms: int | None

    @property
    def names_topics(self) -> bool:
        """Whether it is said which topics are looked at."""
        return bool(self.topics) or self.pattern is not None

    @property
    def machinery(self) -> tuple[str, ...]:
        """Topics that no pattern means, though their names are like those of others."""
        return (CONTROL_TOPIC, *([] if self.trace_topic is None else [self.trace_topic]))

    def includes(self, topic: str) -> bool:
        """Whether messages of this topic are looked at; a pattern means topics of applications,
        and those of groups if it begins as their names do."""
        if self.topics:
            return topic in self.topics
        pattern = self.pattern or ALL
        may = kind_of(topic) is TopicKind.NORMAL or topic.startswith(group_topic_prefixes(pattern))
        return may and topic not in self.machinery and re.fullmatch(pattern, topic) is not None

    def includes_dead(self, topic: str) -> bool:
        """Whether it is a topic of dead letters that are looked at."""
        group = topic.removeprefix(DLQ_TOPIC_PREFIX)
        return topic != group and (not self.groups or group in self.groups)


@dataclass(frozen=True, slots=True)
class Inputs:
    """Messages, dead letters and messages of traces; empty where there are none."""

    origin: str
    messages: "DataFrame"
    dead: "DataFrame"
    traces: "DataFrame | None"
    queues: "frozenset[MessageQueue] | None" = None
    notes: tuple[str, ...] = ()


def open_inputs(spark: "SparkSession", job: PipelineJob, choice: Choice) -> Inputs:
    """What to read, by the options; nothing is read yet."""
    if job["lake"] is not None:
        return _of_lake(spark, job["lake"], choice)
    if job["log"] is not None:
        return _of_log(spark, job, choice)
    return _of_brokers(spark, job, choice)


def wanted_queues(job: PipelineJob, choice: Choice) -> "frozenset[MessageQueue]":
    """The queues of the topics; raises NoRoute for one that is not there."""
    if choice.topics:
        return frozenset(job.queues(subscribe=",".join(choice.topics)))
    by_pattern = job.queues(subscribePattern=choice.pattern or ALL)
    found = frozenset(queue for queue in by_pattern if choice.includes(queue.topic))
    if choice.pattern is not None and not found:
        raise NoRoute(
            f"no topic matches {choice.pattern}", hint="`penstock topic list` shows those there are"
        )
    return found


def _of_brokers(spark: "SparkSession", job: PipelineJob, choice: Choice) -> Inputs:
    queues = wanted_queues(job, choice)
    by_group = f"{DLQ_TOPIC_PREFIX}{ALL}"
    dead = {q.topic for q in job.queues(subscribePattern=by_group) if choice.includes_dead(q.topic)}
    notes = []
    has_traces = choice.trace_topic is not None
    if choice.trace_topic is not None:
        try:
            job.queues(subscribe=choice.trace_topic)
        except NoRoute:
            has_traces = False
            notes.append(f"There is no topic {choice.trace_topic}: nothing is known from traces.")

    def read(topics: Iterable[str], columns: Sequence[str]) -> "DataFrame":
        return _read(spark, job, choice, ",".join(sorted(topics)), columns)

    return Inputs(
        origin=f"brokers of {job.connection.get('nameserver', 'the NameServers by environment')}",
        messages=read({queue.topic for queue in queues}, MESSAGE_COLUMNS),
        dead=read(dead, DEAD_COLUMNS),
        traces=read([choice.trace_topic or ""], TRACE_COLUMNS) if has_traces else None,
        queues=queues,
        notes=tuple(notes),
    )


def _of_log(spark: "SparkSession", job: PipelineJob, choice: Choice) -> Inputs:
    from pyspark.sql import functions as f

    def read(topics: Sequence[str], pattern: str, columns: Sequence[str]) -> "DataFrame":
        return _read(
            spark,
            job,
            choice,
            ",".join(topics),
            columns,
            pattern=None if topics else pattern,
            mode="log",
            path=job["log"],
        )

    messages = read(choice.topics, choice.pattern or ALL, MESSAGE_COLUMNS)
    if not choice.topics:
        messages = messages.where(~f.col("topic").isin(*choice.machinery))
    traces = None
    if choice.trace_topic is not None:
        traces = read([choice.trace_topic], ALL, TRACE_COLUMNS)
    groups = [DLQ_TOPIC_PREFIX + group for group in choice.groups]
    return Inputs(
        origin=f"log files in {job['log']}",
        messages=messages,
        dead=read(groups, f"{DLQ_TOPIC_PREFIX}{ALL}", DEAD_COLUMNS),
        traces=traces,
    )


def _read(
    spark: "SparkSession",
    job: PipelineJob,
    choice: Choice,
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
    if choice.since_ms is not None:
        options["startingTimestamp"] = str(choice.since_ms)
    if choice.until_ms is not None:
        options["endingTimestamp"] = str(choice.until_ms)
    frame = spark.read.format("penstock").options(**job.connection, **options).load()
    return _within(frame, choice)


def _of_lake(spark: "SparkSession", lake: str, choice: Choice) -> Inputs:
    """Dead letters and traces are in a lake if it was written from their topics too."""
    from pyspark.sql import functions as f

    found = lake_rows(spark, lake)
    for name in _LAKE_NEEDED:
        if name not in found.columns:
            raise BadSetting(
                f"the lake {lake} has no column {name!r}",
                hint="name a lake that pipeline `lake` writes",
            )
    rows = _within(found, choice)
    topics = [row.topic for row in rows.select("topic").distinct().collect()]
    missing = [name for name in choice.topics if name not in topics]
    notes = [f"The lake has no messages of {name} in this time." for name in missing]
    has_traces = choice.trace_topic is not None and "body" in rows.columns
    return Inputs(
        origin=f"lake {lake}",
        messages=_chosen(rows, filter(choice.includes, topics), MESSAGE_COLUMNS),
        dead=_chosen(rows, filter(choice.includes_dead, topics), DEAD_COLUMNS),
        traces=rows.where(f.col("topic") == f.lit(choice.trace_topic)).select(*TRACE_COLUMNS)
        if has_traces
        else None,
        notes=tuple(notes),
    )


def _chosen(rows: "DataFrame", topics: Iterable[str], columns: Sequence[str]) -> "DataFrame":
    """Rows of these topics; columns that the lake does not keep are null, bodies left out."""
    from pyspark.sql import functions as f

    wanted = []
    for name in columns:
        if name in rows.columns:
            wanted.append(f.col(name))
        elif name != "body":
            wanted.append(f.lit(None).cast(FIELDS[name][1]).alias(name))
    return rows.where(f.col("topic").isin(list(topics))).select(*wanted)


def _within(rows: "DataFrame", choice: Choice) -> "DataFrame":
    """Only what was stored in the time: brokers find its ends by whole index entries."""
    from pyspark.sql import functions as f

    stored = f.unix_millis("store_timestamp")
    if choice.since_ms is not None:
        rows = rows.where(stored >= choice.since_ms)
    if choice.until_ms is not None:
        rows = rows.where(stored < choice.until_ms)
    return rows
