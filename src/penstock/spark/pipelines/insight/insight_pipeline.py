"""Pipeline `insight`: analyses the messages of a time range, and writes tables and a report.

    <output>/<table>       Parquet files of the last run
    <output>/lag/run=…     one Parquet file per run: the lag of groups
    <output>/report.html   the report

Messages are read once, so that all tables of a run have the same input. Each run replaces the
tables, except `lag`, to which it adds.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from penstock.arrow.log_slices import LogSelection, plan_scan
from penstock.errors import BadSetting
from penstock.spark.pipelines.insight import dead_letters, profiles
from penstock.spark.pipelines.insight import trace_latency as traces
from penstock.spark.pipelines.insight.group_lag import LAG_COLUMNS, group_lag, sample_lag
from penstock.spark.pipelines.insight.message_sources import (
    Inputs,
    InsightSelection,
    open_inputs,
    wanted_queues,
)
from penstock.spark.pipelines.insight.report import report
from penstock.spark.pipelines.insight.report_data import collect_report_data
from penstock.spark.pipelines.job_cancel import Stopped, cancel_on_stop
from penstock.spark.pipelines.lake.batch_commits import METADATA_DIR
from penstock.spark.pipelines.lake.lake_files import HadoopFiles
from penstock.spark.pipelines.lake.lake_rows import check_lake
from penstock.spark.pipelines.local_paths import local_path
from penstock.spark.pipelines.running import (
    Option,
    Pipeline,
    PipelineJob,
    PipelineOutput,
    stop_signals,
)
from penstock.wire.codes import TOPIC_TRACE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

REPORT: Final = "report.html"
LAG: Final = "lag"
MARKER: Final = f"{METADATA_DIR}/insight"
"""A file that marks the output directory of this pipeline."""
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
_AGE: Final = re.compile(r"\d+\s*(ms|s|m|min|h|d)")


def start(spark: "SparkSession", job: PipelineJob) -> "list[StreamingQuery]":
    """Run the analysis until it is finished or stopped; starts no queries."""
    with stop_signals() as stop:
        try:
            with cancel_on_stop(spark, stop):
                _run(spark, job)
        except Stopped:
            job.say("stopped; some tables may be from the previous run; run it again")
    return []


def _run(spark: "SparkSession", job: PipelineJob) -> None:
    selection, bucket_ms = _selection(job), _bucket_ms(job)
    now = datetime.now(UTC)
    files = _output(spark, job["output"])
    inputs = open_inputs(spark, job, selection)
    notes = list(inputs.notes)
    with _microsecond_timestamps(spark):
        if _is_live(job):
            notes += _append_lag(spark, files, job, selection, now)
        job.say(f"reading {inputs.origin}")
        with _cache_inputs(inputs, job, selection) as read:
            about = _about(inputs, selection, read, now)
            for name, frame in _tables(job, inputs, read, bucket_ms).items():
                frame.coalesce(1).write.mode("overwrite").parquet(files.url(name))
    tables = {name: spark.read.parquet(files.url(name)) for name in TABLES}
    tables["group_lag"] = group_lag(_all_lag(spark, files))
    data = collect_report_data(tables, bucket_ms=bucket_ms, about=about, notes=notes)
    page = report(data, title=job["title"])
    files.remove(REPORT)
    files.write_new(REPORT, page.encode())
    job.say(", ".join(f"{name}: {value}" for name, value in about[2:]))
    job.say(f"report: {files.url(REPORT)}")


def verify(job: PipelineJob) -> None:
    """Raise errors in options, servers or topics."""
    selection = _selection(job)
    _bucket_ms(job)
    if job.trigger.text != PIPELINE.trigger or job.checkpoint is not None:
        raise BadSetting(
            "insight has neither --trigger nor --checkpoint",
            hint="it reads once and ends; use cron to run it regularly",
        )
    if _is_live(job):
        wanted_queues(job, selection)
    elif job["log"] is not None:
        plan_scan(job["log"], LogSelection(columns=("topic",)))
    else:
        check_lake(job, job["lake"])
    output = local_path(job, job["output"])
    is_ours = output is None or (output / MARKER).exists()
    if output is not None and not is_ours and any(path.is_file() for path in output.rglob("*")):
        raise _foreign_output(job["output"])


@dataclass(frozen=True, slots=True)
class _CachedInputs:
    """The input, cached by Spark until all tables are written."""

    messages: "DataFrame"
    took: "DataFrame"
    dead: "DataFrame"
    trace_records: int


@contextmanager
def _cache_inputs(
    inputs: Inputs, job: PipelineJob, selection: InsightSelection
) -> Iterator[_CachedInputs]:
    """Cache messages without bodies, latencies, and dead letters with their causes."""
    from pyspark import StorageLevel

    level = StorageLevel.MEMORY_AND_DISK
    with ExitStack() as undo:

        def cache(frame: "DataFrame") -> "DataFrame":
            cached = frame.persist(level)
            undo.callback(cached.unpersist)
            return cached

        messages = cache(profiles.without_bodies(inputs.messages))
        took, outcomes, count = profiles.store_latencies(messages), None, 0
        if inputs.traces is not None:
            records = cache(traces.trace_records(inputs.traces, selection.includes))
            count = records.count()
            if count:  # planning the joins takes a while, even without rows
                outcomes = traces.last_outcomes(records)
                traced = traces.trace_latencies(records, messages)
                if selection.names_topics:
                    traced = traced.where("topic is not null")
                took = cache(took.union(traced))
        causes = [name.strip() for name in job["causes"].split(",") if name.strip()]
        dead = cache(dead_letters.dead_letters(inputs.dead, outcomes, properties=causes))
        yield _CachedInputs(messages, took, dead, count)


def _tables(
    job: PipelineJob, inputs: Inputs, read: _CachedInputs, bucket_ms: int
) -> "dict[str, DataFrame]":
    """The tables by name."""
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
    inputs: Inputs, selection: InsightSelection, read: _CachedInputs, now: datetime
) -> tuple[tuple[str, str], ...]:
    """The head of the report; counting the rows also fills the cache."""
    since = "the beginning" if selection.since_ms is None else _time_text(selection.since_ms)
    until = "now" if selection.until_ms is None else _time_text(selection.until_ms)
    return (
        ("Created", f"{now:%Y-%m-%d %H:%M:%S} UTC"),
        ("Source", f"{inputs.origin}, stored from {since} until {until}"),
        ("Messages", f"{read.messages.count():,}"),
        ("Trace records", f"{read.trace_records:,}"),
        ("Dead letters", f"{read.dead.count():,}"),
    )


def _output(spark: "SparkSession", output: str) -> HadoopFiles:
    """The output directory; raises BadSetting if it contains other files."""
    files = HadoopFiles(spark, output)
    if files.size(MARKER) is None:
        if files.walk(""):
            raise _foreign_output(output)
        files.write_new(MARKER, b"Tables and report of `penstock pipeline run insight`.\n")
    return files


def _foreign_output(output: str) -> BadSetting:
    return BadSetting(
        f"--output {output} contains files of other programs",
        hint="use a new or an empty directory",
    )


def _append_lag(
    spark: "SparkSession",
    files: HadoopFiles,
    job: PipelineJob,
    selection: InsightSelection,
    now: datetime,
) -> list[str]:
    """Add the current lag to the table; returns notes about groups without a result."""
    sample = sample_lag(job.connection, groups=selection.groups, now=now)
    run = f"{LAG}/run={now:%Y%m%dT%H%M%S%f}"
    sample.frame(spark).coalesce(1).write.mode("overwrite").parquet(files.url(run))
    return [f"The lag is incomplete for {text}." for text in sample.unknown]


def _all_lag(spark: "SparkSession", files: HadoopFiles) -> "DataFrame":
    """The lag of this run and of all earlier runs."""
    if files.size(LAG) is None:
        return spark.createDataFrame([], LAG_COLUMNS)
    return spark.read.schema(LAG_COLUMNS).parquet(files.url(LAG))


@contextmanager
def _microsecond_timestamps(spark: "SparkSession") -> Iterator[None]:
    """Write timestamps that all Parquet readers support, and restore the setting afterwards."""
    name = "spark.sql.parquet.outputTimestampType"
    before = spark.conf.get(name)
    spark.conf.set(name, "TIMESTAMP_MICROS")
    try:
        yield
    finally:
        spark.conf.set(name, before or "INT96")


def _is_live(job: PipelineJob) -> bool:
    """Whether messages are read from brokers."""
    return job["lake"] is None and job["log"] is None


def _selection(job: PipelineJob) -> InsightSelection:
    """What to analyse; raises BadSetting."""
    for one, other in (("topics", "pattern"), ("lake", "log")):
        if job[one] is not None and job[other] is not None:
            raise BadSetting(f"--{one} and --{other} can't be combined")
    if job["top"] < 1:
        raise BadSetting(f"--top: {job['top']} is less than 1")
    topics = _names(job, "topics")
    if job["pattern"] is not None:
        try:
            re.compile(job["pattern"])
        except re.error as error:
            raise BadSetting(
                f"--pattern: {job['pattern']!r} is not a regular expression: {error}",
                hint="it must match whole topic names",
            ) from None
    now_ms = round(datetime.now(UTC).timestamp() * 1000)
    since_ms, until_ms = (_time_ms(job, name, now_ms) for name in ("since", "until"))
    if since_ms is not None and until_ms is not None and since_ms >= until_ms:
        raise BadSetting(f"--since {job['since']} is not before --until {job['until']}")
    return InsightSelection(
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
        raise BadSetting(f"--{option}: {job[option]!r} contains no name")
    return names


def _time_ms(job: PipelineJob, name: str, now_ms: int) -> int | None:
    """A time, given as such or as an age."""
    text = job[name]
    if text is None:
        return None
    option_reader = job.option_reader(name)
    if _AGE.fullmatch(text.strip().lower()):
        return now_ms - option_reader.duration_ms(name, default=0)
    return option_reader.timestamp_ms(name)


def _bucket_ms(job: PipelineJob) -> int:
    return job.option_reader("bucket").duration_ms("bucket", default=profiles.MINUTE_MS)


def _time_text(ms: int) -> str:
    return f"{datetime.fromtimestamp(ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"


PIPELINE: Final = Pipeline(
    name="insight",
    summary="Report dead letters, hot keys, rates, sizes, latencies and lag.",
    options=(
        Option(
            "output",
            "Directory of the tables and of report.html: a path, hdfs://… or s3a://….",
            required=True,
        ),
        Option("topics", "Topics, separated by commas; all application topics by default."),
        Option(
            "pattern",
            "Instead of --topics: regular expression that matches whole topic names.",
        ),
        Option("since", "Messages stored at this time or later: a time, or an age such as 24h."),
        Option("until", "Messages stored before this time: a time, or an age."),
        Option("lake", "Read this lake instead of the brokers."),
        Option(
            "log", "Read the log files of this store instead: its directory, or commitlog in it."
        ),
        Option("groups", "Only dead letters and lag of these groups, separated by commas."),
        Option("trace_topic", "Topic of the message traces.", default=TOPIC_TRACE),
        Option("skip_traces", "Ignore traces.", kind=bool, default=False),
        Option(
            "causes",
            "Properties that can contain the cause of a dead letter, separated by commas.",
            default=",".join(dead_letters.CAUSE_PROPERTIES),
        ),
        Option("top", "Number of hot keys per topic.", kind=int, default=TOP),
        Option("bucket", "Length of the time buckets in the tables: 10s, 1m, 1h.", default=BUCKET),
        Option("title", "Title of the report.", default="Insight"),
        Option(
            "skip_lost",
            "Continue if messages are deleted before they are read.",
            kind=bool,
            default=False,
        ),
    ),
    outputs=(
        PipelineOutput("{output}/report.html", "The report, with charts."),
        PipelineOutput("{output}/rates", "Messages and bytes by topic and time bucket."),
        PipelineOutput("{output}/sizes", "Body sizes by topic."),
        PipelineOutput(
            "{output}/queues", "Messages by queue, and the load relative to an even share."
        ),
        PipelineOutput("{output}/hot_keys", "The most frequent keys of each topic."),
        PipelineOutput("{output}/key_skew", "Distribution of messages over keys, by topic."),
        PipelineOutput("{output}/latencies", "Latencies by stage, topic and group."),
        PipelineOutput(
            "{output}/latency_times", "Latencies by stage, topic, group and time bucket."
        ),
        PipelineOutput("{output}/dead_letters", "Each dead letter with its origin and cause."),
        PipelineOutput(
            "{output}/dead_letter_counts", "Dead letters by group, topic, tag, cause and hour."
        ),
        PipelineOutput(
            "{output}/dead_letter_samples",
            "The latest dead letters of each group, topic and cause.",
        ),
        PipelineOutput("{output}/lag/run=…", "The lag of groups, one directory per run."),
    ),
    start=start,
    trigger="once",
    verify=verify,
)
