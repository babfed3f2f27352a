"""Pipeline `insight`: what the messages of a span of time tell of topics, keys and consumers.

    <output>/<table>       Parquet, of the last run
    <output>/lag/run=…     Parquet, a file for each run: how far groups were then
    <output>/report.html   all of it on one page

Each message is read once; all tables of a run are made of the same messages. The tables are written
anew by each run, only `lag` grows.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from penstock.errors import BadSetting
from penstock.spark.pipelines.insight import dead_letters, profiles
from penstock.spark.pipelines.insight import trace_latency as traces
from penstock.spark.pipelines.insight.findings import gather
from penstock.spark.pipelines.insight.group_lag import LAG_COLUMNS, group_lag, sample_lag
from penstock.spark.pipelines.insight.message_sources import (
    Choice,
    Inputs,
    open_inputs,
    wanted_queues,
)
from penstock.spark.pipelines.insight.report import report
from penstock.spark.pipelines.job_cancel import Stopped, cancel_on_stop
from penstock.spark.pipelines.lake.lake_files import HadoopFiles
from penstock.spark.pipelines.running import (
    Option,
    Pipeline,
    PipelineJob,
    PipelineOutput,
    stop_signals,
)
from penstock.spark.source.log_slices import LogScan, plan_scan
from penstock.wire.codes import TOPIC_TRACE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

REPORT: Final = "report.html"
LAG: Final = "lag"
MARK: Final = "_penstock/insight"
BUCKET: Final = "1m"
TOP: Final = 20
TABLES: Final = (
    "rates",
    "sizes",
    "queues",
    "hot_keys",
    "key_skew",
    "latencies",
    "latency_times",
    "dead_letters",
    "dead_letter_counts",
    "dead_letter_samples",
)
_AGO: Final = re.compile(r"\d+\s*(ms|s|m|min|h|d)")


def start(spark: "SparkSession", job: PipelineJob) -> "list[StreamingQuery]":
    """The pipeline's function: all is done, or stopped, when it returns."""
    with stop_signals() as stop:
        try:
            with cancel_on_stop(spark, stop):
                _run(spark, job)
        except Stopped:
            job.say("stopped; not all tables are of this run, and the next one writes all of them")
    return []


def _run(spark: "SparkSession", job: PipelineJob) -> None:
    choice, bucket_ms = _choice(job), _bucket_ms(job)
    now = datetime.now(UTC)
    files = _output(spark, job["output"])
    inputs = open_inputs(spark, job, choice)
    notes = list(inputs.notes)
    with _microseconds(spark):
        if _is_live(job):
            notes += _append_lag(spark, files, job, choice, now)
        job.say(f"reading {inputs.origin}")
        with _read_once(inputs, job, choice) as read:
            about = _about(inputs, choice, read, now)
            for name, frame in _tables(job, inputs, read, bucket_ms).items():
                frame.coalesce(1).write.mode("overwrite").parquet(files.url(name))
    tables = {name: spark.read.parquet(files.url(name)) for name in TABLES}
    tables["group_lag"] = group_lag(_all_lag(spark, files))
    findings = gather(tables, bucket_ms=bucket_ms, about=about, notes=notes)
    page = report(findings, title=job["title"])
    files.remove(REPORT)
    files.write_new(REPORT, page.encode())
    job.say(f"{', '.join(f'{name}: {value}' for name, value in about[2:])}")
    job.say(f"the report is {files.url(REPORT)}")


def verify(job: PipelineJob) -> None:
    """Raise what is wrong with options, servers or topics."""
    choice = _choice(job)
    _bucket_ms(job)
    if job.trigger.text != PIPELINE.trigger or job.checkpoint is not None:
        raise BadSetting(
            "insight has neither --trigger nor --checkpoint",
            hint="it reads once and ends: let cron start it again",
        )
    if _is_live(job):
        wanted_queues(job, choice)
    elif job["log"] is not None:
        plan_scan(job["log"], LogScan(columns=("topic",)))


@dataclass(frozen=True, slots=True)
class _Read:
    """What was read, kept by Spark until all tables are made."""

    messages: "DataFrame"
    took: "DataFrame"
    dead: "DataFrame"
    trace_records: int


@contextmanager
def _read_once(inputs: Inputs, job: PipelineJob, choice: Choice) -> Iterator[_Read]:
    """Messages without bodies, how long they took, dead letters with their causes."""
    from pyspark import StorageLevel

    level = StorageLevel.MEMORY_AND_DISK
    with ExitStack() as undo:

        def keep(frame: "DataFrame") -> "DataFrame":
            kept = frame.persist(level)
            undo.callback(kept.unpersist)
            return kept

        messages = keep(profiles.essence(inputs.messages))
        took, outcomes, count = profiles.store_latencies(messages), None, 0
        if inputs.traces is not None:
            records = keep(traces.trace_records(inputs.traces, choice.includes))
            count = records.count()
            if count:  # plans of joins take their time, also without rows
                outcomes = traces.last_outcomes(records)
                traced = traces.trace_latencies(records, messages)
                if choice.names_topics:
                    traced = traced.where("topic is not null")
                took = keep(took.union(traced))
        causes = [name.strip() for name in job["causes"].split(",") if name.strip()]
        dead = keep(dead_letters.dead_letters(inputs.dead, outcomes, properties=causes))
        yield _Read(messages, took, dead, count)


def _tables(
    job: PipelineJob, inputs: Inputs, read: _Read, bucket_ms: int
) -> "dict[str, DataFrame]":
    """The tables by their names."""
    messages, took, dead = read.messages, read.took, read.dead
    tables = (
        profiles.rates(messages, bucket_ms=bucket_ms),
        profiles.sizes(messages),
        profiles.queue_balance(messages, inputs.queues),
        profiles.hot_keys(messages, top=job["top"]),
        profiles.key_skew(messages),
        profiles.latencies(took),
        profiles.latencies(took, bucket_ms=bucket_ms),
        dead,
        dead_letters.dead_letter_counts(dead),
        dead_letters.dead_letter_samples(dead),
    )
    return dict(zip(TABLES, tables, strict=True))


def _about(
    inputs: Inputs, choice: Choice, read: _Read, now: datetime
) -> tuple[tuple[str, str], ...]:
    """What stands above the report; counting also reads what is to be kept."""
    begin = "the beginning" if choice.since_ms is None else _moment(choice.since_ms)
    end = "now" if choice.until_ms is None else _moment(choice.until_ms)
    return (
        ("Made", f"{now:%Y-%m-%d %H:%M:%S} UTC"),
        ("From", f"{inputs.origin}, stored from {begin} until {end}"),
        ("Messages", f"{read.messages.count():,}"),
        ("Records of traces", f"{read.trace_records:,}"),
        ("Dead letters", f"{read.dead.count():,}"),
    )


def _output(spark: "SparkSession", output: str) -> HadoopFiles:
    """The directory; one that holds something else is not written over."""
    files = HadoopFiles(spark, output)
    if files.size(MARK) is None:
        if files.walk(""):
            raise BadSetting(
                f"--output {output} has files that are not of this pipeline",
                hint="name an empty or a new directory",
            )
        files.write_new(MARK, b"Tables and report of `penstock pipeline run insight`.\n")
    return files


def _append_lag(
    spark: "SparkSession", files: HadoopFiles, job: PipelineJob, choice: Choice, now: datetime
) -> list[str]:
    """Add how far groups are now to the table; the notes on those of which nobody knows."""
    sample = sample_lag(job.connection, groups=choice.groups, now=now)
    run = f"{LAG}/run={now:%Y%m%dT%H%M%S%f}"
    sample.frame(spark).coalesce(1).write.mode("overwrite").parquet(files.url(run))
    return [f"Not all is known of the lag of {text}." for text in sample.unknown]


def _all_lag(spark: "SparkSession", files: HadoopFiles) -> "DataFrame":
    """The lag of this run and of all before it."""
    if files.size(LAG) is None:
        return spark.createDataFrame([], LAG_COLUMNS)
    return spark.read.schema(LAG_COLUMNS).parquet(files.url(LAG))


@contextmanager
def _microseconds(spark: "SparkSession") -> Iterator[None]:
    """Times in Parquet as all readers know them; the session may be somebody else's."""
    name = "spark.sql.parquet.outputTimestampType"
    before = spark.conf.get(name)
    spark.conf.set(name, "TIMESTAMP_MICROS")
    try:
        yield
    finally:
        spark.conf.set(name, before or "INT96")


def _is_live(job: PipelineJob) -> bool:
    """Whether brokers are asked, and not files."""
    return job["lake"] is None and job["log"] is None


def _choice(job: PipelineJob) -> Choice:
    """What is to be looked at; raises BadSetting."""
    for one, other in (("topics", "pattern"), ("lake", "log")):
        if job[one] is not None and job[other] is not None:
            raise BadSetting(f"--{one} and --{other} exclude each other")
    if job["top"] < 1:
        raise BadSetting(f"--top: {job['top']} is less than 1")
    topics = _names(job, "topics")
    if job["pattern"] is not None:
        try:
            re.compile(job["pattern"])
        except re.error as error:
            raise BadSetting(
                f"--pattern: {job['pattern']!r} is no regular expression: {error}",
                hint="it has to match whole names of topics",
            ) from None
    now_ms = round(datetime.now(UTC).timestamp() * 1000)
    since_ms, until_ms = (_moment_ms(job, name, now_ms) for name in ("since", "until"))
    if since_ms is not None and until_ms is not None and since_ms >= until_ms:
        raise BadSetting(f"--since {job['since']} is not before --until {job['until']}")
    return Choice(
        topics=topics,
        pattern=job["pattern"],
        groups=_names(job, "groups"),
        trace_topic=None if job["skip_traces"] else job["trace_topic"],
        since_ms=since_ms,
        until_ms=until_ms,
    )


def _names(job: PipelineJob, option: str) -> tuple[str, ...]:
    if job[option] is None:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in job[option].split(",") if name.strip()))
    if not names:
        raise BadSetting(f"--{option}: {job[option]!r} has no name")
    return names


def _moment_ms(job: PipelineJob, name: str, now_ms: int) -> int | None:
    """A moment, or how long before now it was."""
    text = job[name]
    if text is None:
        return None
    option_reader = job.option_reader(name)
    if _AGO.fullmatch(text.strip().lower()):
        return now_ms - option_reader.duration_ms(name, default=0)
    return option_reader.timestamp_ms(name)


def _bucket_ms(job: PipelineJob) -> int:
    return job.option_reader("bucket").duration_ms("bucket", default=profiles.MINUTE_MS)


def _moment(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


PIPELINE: Final = Pipeline(
    name="insight",
    summary="Dead letters, hot keys, rates, sizes, latencies and lag: Parquet tables and a report.",
    options=(
        Option(
            "output", "Directory of tables and report: a path, or hdfs://…, s3a://….", required=True
        ),
        Option("topics", "Topics to look at, with commas between."),
        Option("pattern", "Or a regular expression that names match; without both, all topics."),
        Option("since", "Messages stored then or later: a time, or how long ago (24h)."),
        Option("until", "Messages stored before: a time, or how long ago."),
        Option("lake", "Read a lake instead of the brokers."),
        Option("log", "Read log files instead: a store's directory, or its directory commitlog."),
        Option("groups", "Only lag and dead letters of these groups, with commas between."),
        Option("trace_topic", "Where clients write traces.", default=TOPIC_TRACE),
        Option("skip_traces", "Leave traces out.", kind=bool, default=False),
        Option(
            "causes",
            "Properties that may tell why a message was given up, commas between.",
            default=",".join(dead_letters.CAUSE_PROPERTIES),
        ),
        Option("top", "So many hot keys for each topic.", kind=int, default=TOP),
        Option("bucket", "Length of the spans of time in the tables: 10s, 1m, 1h.", default=BUCKET),
        Option("title", "Stands above the report.", default="Insight"),
        Option(
            "skip_lost",
            "Go on where messages are deleted before they are read.",
            kind=bool,
            default=False,
        ),
    ),
    outputs=(
        PipelineOutput("{output}/report.html", "All of it on one page, with plots."),
        PipelineOutput("{output}/rates", "Messages and bytes by topic and span of time."),
        PipelineOutput("{output}/sizes", "Percentiles of the size of bodies by topic."),
        PipelineOutput("{output}/queues", "Messages by queue, and times an even share."),
        PipelineOutput("{output}/hot_keys", "The keys that most messages of a topic have."),
        PipelineOutput("{output}/key_skew", "How messages spread over keys, by topic."),
        PipelineOutput("{output}/latencies", "Percentiles by stage, topic and group."),
        PipelineOutput("{output}/latency_times", "The same by span of time."),
        PipelineOutput("{output}/dead_letters", "Each dead letter with its origin and cause."),
        PipelineOutput("{output}/dead_letter_counts", "By group, topic, tag, cause and hour."),
        PipelineOutput(
            "{output}/dead_letter_samples", "The newest of each group, topic and cause."
        ),
        PipelineOutput("{output}/lag/run=…", "How far groups were, run after run."),
    ),
    start=start,
    trigger="once",
    verify=verify,
)
