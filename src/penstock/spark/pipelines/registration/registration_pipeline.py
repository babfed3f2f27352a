"""Pipeline `registration`: counts registrations, measures their steps, and sends alerts.

    <output>/counts       registrations for each minute, channel and outcome
    <output>/latencies    for each minute and step: users, done, failed, missing, p50, p95, p99
    <output>/unreadable   messages that are not valid events, with the reason
    RegistrationAlerts    a message for each accepted user whose steps are not all done in time

Each table has its own query; the query of the latencies also sends the alerts. All use the time in
the events. A minute is counted `late` after its end, and its latencies and alerts follow
`stuck_after` later. Each row of a table is written exactly once. Alerts are sent at least once, or
exactly once with `delivery=transactional`.
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
    """The directory of a table's Parquet files."""
    return f"{output.rstrip('/')}/{table}/data"


@dataclass(frozen=True, slots=True)
class AlertSender:
    """Sends an alert for each user of a batch who is stuck.

    Batch 0 is sent even without alerts, because a transactional sink then chooses its broker.
    """

    sink: Mapping[str, str]

    def send(self, users: "DataFrame", number: int) -> None:
        stuck = tables.alerts(users)
        sink = {**self.sink, "batchId": str(number)}
        stuck.coalesce(1).write.format("penstock").options(**sink).mode("append").save()


def start(spark: "SparkSession", job: PipelineJob) -> "list[StreamingQuery]":
    """Start the three queries."""
    late_ms, stuck_after_ms = _duration_ms(job, "late"), _duration_ms(job, "stuck_after")
    names = _step_names(job)
    topics = f"{job['registrations']},{job['steps']}"
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
    registrations = events.registrations_of(_events(spark, job, job["registrations"]))
    users = tables.journeys(
        _events(spark, job, topics, commit=True),
        stuck_after_ms=stuck_after_ms,
        late_ms=late_ms,
        names=names,
    )
    alerts = AlertSender(_sink_options(job, writers[LATENCIES].query))
    unreadable = events.unreadable(_events(spark, job, topics))
    return start_queries(
        lambda: writers[COUNTS].start(
            tables.counts(registrations, late_ms=late_ms), job.trigger, COUNTS
        ),
        lambda: writers[LATENCIES].start(
            users, job.trigger, LATENCIES, transform=tables.latencies, before_commit=alerts.send
        ),
        lambda: writers[UNREADABLE].start(unreadable, job.trigger, UNREADABLE),
    )


def verify(job: PipelineJob) -> None:
    """Raise errors in options, servers or topics."""
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
    spark: "SparkSession", job: PipelineJob, topics: str, *, commit: bool = False
) -> "DataFrame":
    options = _source_options(job, topics)
    if commit and job["group"] is not None:
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
    """Raise NoRoute if the topic of the alerts does not exist; the first alert would fail."""
    with connect_admin(job.connection) as admin:
        admin.route(job["alerts"])


def _duration_ms(job: PipelineJob, name: str) -> int:
    return job.option_reader(name).duration_ms(name, default=0)


def _step_names(job: PipelineJob) -> tuple[str, ...]:
    names = tuple(name.strip() for name in job["names"].split(","))
    if "" in names or len(set(names)) < len(names):
        raise BadSetting(f"--names: {job['names']!r} has an empty or a duplicate name")
    return names


def _checkpoint(job: PipelineJob, table: str) -> str | None:
    return None if job.checkpoint is None else f"{job.checkpoint.rstrip('/')}/{table}"


PIPELINE: Final = Pipeline(
    name="registration",
    summary="Count registrations, measure the steps that follow them, and send alerts.",
    options=(
        Option("output", "Directory of the tables: a path, hdfs://… or s3a://….", required=True),
        Option("registrations", "Topic of the registrations.", default=events.REGISTRATIONS),
        Option("steps", "Topic of the steps.", default=events.STEPS),
        Option("alerts", "Topic for alerts; it must exist.", default=events.ALERTS),
        Option(
            "names",
            "Steps that every accepted user should complete, separated by commas.",
            default=",".join(events.STEP_NAMES),
        ),
        Option(
            "late", "How far an event may be behind the newest event: 30s, 2m, 1h.", default=LATE
        ),
        Option(
            "stuck_after", "How long an accepted user may wait for the steps.", default=STUCK_AFTER
        ),
        Option("delivery", "Delivery of the alerts.", default=DELIVERIES[0], choices=DELIVERIES),
        Option(
            "start",
            "Where new tables begin: earliest, latest, or offsets as JSON.",
            default="earliest",
        ),
        Option("max_rows", "Maximum number of messages per batch.", kind=int),
        Option("group", "Commit the progress as this consumer group."),
        Option(
            "skip_lost",
            "Continue if messages were deleted before they were read.",
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
        PipelineOutput(
            "{output}/unreadable/data", "Messages that are not valid events, with the reason."
        ),
        PipelineOutput(
            "topic {alerts}", "Accepted users with a missing step; the tag is the step."
        ),
    ),
    start=start,
    verify=verify,
)
