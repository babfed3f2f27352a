"""Pipeline `registration`: who registers, how long the steps after it take, and who is stuck.

    <output>/counts       registrations for each minute, channel and outcome
    <output>/latencies    for each minute and step: users, done, failed, missing, p50, p95, p99
    <output>/unreadable   messages that are no events, with the reason
    RegistrationAlerts    a message for each accepted user whose steps are not all done in time

Three queries: each table belongs to one, and alerts are sent by the one of the latencies. All go by
the time in the events. A minute is counted `late` after its end, and its latencies and alerts come
`stuck_after` later. Each row of a table is there exactly once, whatever is killed when. Alerts come
at least once, or with `delivery=transactional` exactly once.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.errors import BadSetting
from penstock.spark.pipelines.query_start import start_queries
from penstock.spark.pipelines.registration import event_tables as tables
from penstock.spark.pipelines.registration import events
from penstock.spark.pipelines.registration.output_table import TableWriter
from penstock.spark.pipelines.running import (
    Option,
    Pipeline,
    PipelineJob,
    PipelineOutput,
    connect_admin,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

COUNTS: Final = "counts"
LATENCIES: Final = "latencies"
UNREADABLE: Final = "unreadable"
LATE: Final = "2m"
STUCK_AFTER: Final = "5m"
DELIVERIES: Final = ("at-least-once", "transactional")


def table_path(output: str, table: str) -> str:
    """Where a table's Parquet files are."""
    return f"{output.rstrip('/')}/{table}/data"


@dataclass(frozen=True, slots=True)
class Alerting:
    """Sends alerts for the users of a batch that are stuck.

    Batch 0 has none, and is written all the same: with it a transactional sink chooses its home.
    """

    sink: Mapping[str, str]

    def send(self, users: "DataFrame", number: int) -> None:
        stuck = tables.alerts(users)
        sink = {**self.sink, "batchId": str(number)}
        stuck.coalesce(1).write.format("penstock").options(**sink).mode("append").save()


def start(spark: "SparkSession", job: PipelineJob) -> "list[StreamingQuery]":
    """The pipeline's function."""
    late_ms, stuck_after_ms = _duration_ms(job, "late"), _duration_ms(job, "stuck_after")
    names = _step_names(job)
    of_users, of_steps = job["registrations"], job["steps"]
    both = f"{of_users},{of_steps}"
    writers = {
        table: TableWriter(spark, f"{job['output'].rstrip('/')}/{table}", _checkpoint(job, table))
        for table in (COUNTS, LATENCIES, UNREADABLE)
    }
    writers[LATENCIES].check_settings(
        {
            "--delivery": job["delivery"],
            "--names": ",".join(names),
            "--stuck-after": f"{stuck_after_ms} ms",
        }
    )
    counted = events.registrations_of(_events(spark, job, of_users))
    users = tables.journeys(
        _events(spark, job, both, progress=True),
        stuck_after_ms=stuck_after_ms,
        late_ms=late_ms,
        names=names,
    )
    alerting = Alerting(_sink_options(job, writers[LATENCIES].query))
    unreadable = events.unreadable(_events(spark, job, both))
    return start_queries(
        lambda: writers[COUNTS].start(tables.counts(counted, late_ms=late_ms), job.trigger, COUNTS),
        lambda: writers[LATENCIES].start(
            users, job.trigger, LATENCIES, transform=tables.latencies, before_commit=alerting.send
        ),
        lambda: writers[UNREADABLE].start(unreadable, job.trigger, UNREADABLE),
    )


def verify(job: PipelineJob) -> None:
    """Raise what is wrong with options, servers or topics."""
    for name in ("late", "stuck_after"):
        _duration_ms(job, name)
    _step_names(job)
    if job["max_rows"] is not None and job["max_rows"] < 1:
        raise BadSetting(f"--max-rows: {job['max_rows']} is less than 1")
    topics = [job["registrations"], job["steps"]]
    if len({*topics, job["alerts"]}) < 3:
        raise BadSetting("--registrations, --steps and --alerts must be different topics")
    job.queues(**_source_options(job, ",".join(topics)))
    _check_alerts(job)


def _events(
    spark: "SparkSession", job: PipelineJob, topics: str, *, progress: bool = False
) -> "DataFrame":
    options = _source_options(job, topics)
    if progress and job["group"] is not None:
        options["commitGroup"] = job["group"]
    return events.events_of(job.stream(spark, **options), job["registrations"], job["steps"])


def _source_options(job: PipelineJob, topics: str) -> dict[str, str]:
    options = {
        "subscribe": topics,
        "columns": events.MESSAGE_COLUMNS,
        "startingOffsets": job["start"],
        "failOnDataLoss": "false" if job["skip_lost"] else "true",
    }
    if job["max_rows"] is not None:
        options["maxOffsetsPerTrigger"] = str(job["max_rows"])
    return options


def _sink_options(job: PipelineJob, query: str) -> dict[str, str]:
    return {
        **job.connection,
        "topic": job["alerts"],
        "delivery": job["delivery"],
        "sinkId": f"registration-{query}",
    }


def _check_alerts(job: PipelineJob) -> None:
    """Raise NoRoute where the topic is missing: without it the first alert would end the query."""
    with connect_admin(job.connection) as admin:
        admin.route(job["alerts"])


def _duration_ms(job: PipelineJob, name: str) -> int:
    return job.option_reader(name).duration_ms(name, default=0)


def _step_names(job: PipelineJob) -> tuple[str, ...]:
    names = tuple(name.strip() for name in job["names"].split(","))
    if "" in names or len(set(names)) < len(names):
        raise BadSetting(f"--names: {job['names']!r} has an empty name or one twice")
    return names


def _checkpoint(job: PipelineJob, table: str) -> str | None:
    return None if job.checkpoint is None else f"{job.checkpoint.rstrip('/')}/{table}"


PIPELINE: Final = Pipeline(
    name="registration",
    summary="Registrations by minute, latencies of the steps after them, alerts for stuck users.",
    options=(
        Option("output", "Directory of the tables: a path, or hdfs://…, s3a://….", required=True),
        Option("registrations", "Topic of the registrations.", default=events.REGISTRATIONS),
        Option("steps", "Topic of the steps.", default=events.STEPS),
        Option("alerts", "Topic that alerts go to; it must exist.", default=events.ALERTS),
        Option(
            "names",
            "The steps that every accepted user should come to, commas between.",
            default=",".join(events.STEP_NAMES),
        ),
        Option("late", "So far an event may be behind the newest one: 30s, 2m, 1h.", default=LATE),
        Option(
            "stuck_after", "An accepted user may wait so long for the steps.", default=STUCK_AFTER
        ),
        Option("delivery", "Of the alerts.", default=DELIVERIES[0], choices=DELIVERIES),
        Option(
            "start",
            "Where new tables begin: earliest, latest, or offsets as JSON.",
            default="earliest",
        ),
        Option("max_rows", "At most so many messages in a batch.", kind=int),
        Option("group", "Show progress as this consumer group."),
        Option(
            "skip_lost",
            "Go on where messages were deleted before they were read.",
            kind=bool,
            default=False,
        ),
    ),
    outputs=(
        PipelineOutput("{output}/counts/data", "Registrations by minute, channel and outcome."),
        PipelineOutput(
            "{output}/latencies/data",
            "Users, done, failed, missing and percentiles in "
            "milliseconds, by minute of the registration and step.",
        ),
        PipelineOutput("{output}/unreadable/data", "Messages that are no events, with the reason."),
        PipelineOutput(
            "topic {alerts}", "Accepted users with a step missing; the tag is the step."
        ),
    ),
    start=start,
    verify=verify,
)
