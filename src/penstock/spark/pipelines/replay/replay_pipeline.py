"""Pipeline `replay`: sends messages of a lake, a commit log or a topic to a topic again.

Messages are selected by time, topic, key, tag and condition. They get properties that name their
origin, and the messages of a queue keep their order. `selection.py` selects and prepares the rows,
`replay_run.py` sends them and continues after a crash, `pace.py` determines when.
"""

import secrets
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from penstock.arrow.log_slices import LogSelection, plan_scan
from penstock.arrow.source_options import SourceOptions
from penstock.errors import BadSetting, PipelineFailed
from penstock.spark.pipelines.job_cancel import Stopped, cancel_on_stop
from penstock.spark.pipelines.lake.lake_rows import check_lake, lake_rows
from penstock.spark.pipelines.replay import options
from penstock.spark.pipelines.replay.pace import PACES, SLICE_ROWS, STEP_MS, Pace, duration_text
from penstock.spark.pipelines.replay.replay_run import ReplayPlan, ReplayRun
from penstock.spark.pipelines.replay.selection import (
    TIMES,
    Selection,
    first_rows,
    outgoing_rows,
    survey,
)
from penstock.spark.pipelines.running import (
    Option,
    Pipeline,
    PipelineJob,
    PipelineOutput,
    connect_admin,
    stop_signals,
)
from penstock.spark.sink.sink_options import SinkOptions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


def replay(
    rows: "DataFrame",
    directory: str,
    *,
    run: str,
    target: str | None,
    pace: Pace | None = None,
    by: str = "store",
    sink: Mapping[str, str] = MappingProxyType({}),
    deliver: bool = False,
    same_topic: bool = False,
    stop: threading.Event | None = None,
    say: Callable[[str], None] | None = None,
) -> bool:
    """Send rows with the columns of the source to a topic; False if `stop` was set before the end.

    With `target` None and `same_topic`, each row is sent to its own topic. The progress is recorded
    in `directory`: the same run continues there, and a finished run does nothing. Each row is sent
    at least once, or exactly once with `sink={"delivery": "transactional"}`. Raises BadSetting, and
    PipelineFailed if there are no rows.
    """
    options.check_run(run)
    fixed = {"target": target or "", "delivery": sink.get("delivery", options.DELIVERIES[0])}
    replay_run = ReplayRun(
        rows.sparkSession,
        directory,
        run,
        pace or Pace(),
        sink,
        deliver=deliver,
        options=fixed,
        say=say or (lambda line: None),
    )
    stop = stop or threading.Event()
    try:
        plan = replay_run.plan() or replay_run.stage(
            outgoing_rows(rows, run=run, target=target, by=by),
            lambda plan: check_routes(plan.routes, same_topic=same_topic),
            stop,
        )
    except Stopped:
        return False
    if plan is None:
        raise PipelineFailed("there are no rows to send", hint="check the selection")
    return replay_run.send(plan, stop)


def check_routes(routes: list[tuple[str, str]], *, same_topic: bool) -> None:
    """Raise BadSetting if messages would be sent to their own topic without `same_topic`."""
    own = sorted({origin for origin, target in routes if origin == target})
    if own and not same_topic:
        raise BadSetting(
            f"messages of {', '.join(own)} would be sent to the topic they came from, whose "
            "consumers would receive them a second time",
            hint="use another --target, or --same-topic if this is intended",
        )


# --- the pipeline


def start(spark: "SparkSession", job: PipelineJob) -> "list[StreamingQuery]":
    """Run the replay until it is finished or stopped; starts no queries."""
    chosen = options.selection_of(job)
    with stop_signals() as stop:
        try:
            if job["dry_run"]:
                with cancel_on_stop(spark, stop):
                    _dry_run(spark, job, chosen)
            else:
                _replay(spark, job, chosen, stop)
        except Stopped:
            job.say("stopped before the messages were selected; nothing was sent")
    return []


def _replay(
    spark: "SparkSession", job: PipelineJob, chosen: Selection, stop: threading.Event
) -> None:
    run = job["run"] or f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    replay_run = ReplayRun(
        spark,
        options.run_directory(job, run),
        run,
        options.pace_of(job),
        options.sink_options(job),
        deliver=job["deliver"],
        options=options.fixed_options(job),
        say=job.say,
    )
    plan = replay_run.plan()
    if plan is None:
        job.say(f"run {run}: selecting messages")
        plan = _stage(spark, job, replay_run, chosen, stop)
    slices = "1 slice" if len(plan.slices) == 1 else f"{len(plan.slices):,} slices"
    job.say(f"run {run}: {plan.rows:,} messages in {slices}, {replay_run.pace}")
    if replay_run.send(plan, stop):
        job.say(f"run {run}: all {plan.rows:,} messages were sent")
    else:
        job.say(f"run {run} was stopped; to continue it, use the same command with --run {run}")


def _stage(
    spark: "SparkSession",
    job: PipelineJob,
    replay_run: ReplayRun,
    chosen: Selection,
    stop: threading.Event,
) -> ReplayPlan:
    with cancel_on_stop(spark, stop):  # reading the columns of a lake runs a Spark job
        rows = outgoing_rows(
            chosen.of(source(spark, job, chosen)),
            run=replay_run.name,
            target=job["target"],
            by=chosen.by,
            limit=job["limit"],
        )

    def check(plan: ReplayPlan) -> None:
        check_routes(plan.routes, same_topic=job["same_topic"])
        _check_targets(job, {target for _, target in plan.routes})

    plan = replay_run.stage(rows, check, stop)
    if plan is None:
        raise _empty_selection(spark, job, chosen)
    return plan


def source(spark: "SparkSession", job: PipelineJob, chosen: Selection) -> "DataFrame":
    """The rows of the source, with as much of the selection as the source can apply."""
    if job["lake"] is not None:
        return lake_rows(spark, job["lake"])
    return spark.read.format("penstock").options(**options.source_options(job, chosen)).load()


def _empty_selection(spark: "SparkSession", job: PipelineJob, chosen: Selection) -> PipelineFailed:
    """An error that says what the source contains."""
    all_rows = Selection(topics=chosen.topics, by=chosen.by)
    found = survey(all_rows.of(source(spark, job, all_rows)), chosen.by)
    if found is None:
        return PipelineFailed("the source has no messages", hint="check the topics and the source")
    return PipelineFailed(
        f"no message is selected; the source has {found.span}",
        hint="check time range, keys, tags and condition",
    )


def _dry_run(spark: "SparkSession", job: PipelineJob, chosen: Selection) -> None:
    """Show what would be sent."""
    rows = chosen.of(source(spark, job, chosen))
    if job["limit"] is not None:
        rows = first_rows(rows, job["limit"], by=chosen.by)
    found = survey(rows, chosen.by)
    if found is None:
        raise _empty_selection(spark, job, chosen)
    target = job["target"]
    check_routes([(t, target or t) for t in found.topics], same_topic=job["same_topic"])
    _check_targets(job, {target or topic for topic in found.topics})
    for line in found.lines():
        job.say(line)
    pace = options.pace_of(job)
    duration_ms = pace.duration_min_ms(rows=found.rows, span_ms=found.last_ms - found.first_ms)
    duration = f", in at least {duration_text(duration_ms)}" if duration_ms else ""
    where = "their own topics" if target is None else f"topic {target}"
    job.say(f"they would be sent to {where} {pace}{duration}; nothing was sent")


def verify(job: PipelineJob) -> None:
    """Raise errors in options, servers or topics."""
    chosen = options.selection_of(job)
    options.pace_of(job)
    if job.trigger.text != PIPELINE.trigger:
        raise BadSetting("replay has no --trigger", hint="use --pace, --speed or --rate")
    if job["run"] is not None:
        options.check_run(job["run"])
    if job["limit"] is not None and job["limit"] < 1:
        raise BadSetting(f"--limit: {job['limit']} is less than 1")
    named = {"sinkId": "replay", **({"topic": job["target"]} if job["target"] else {})}
    SinkOptions.of({**options.sink_options(job), **named}, stream=False)
    if job["target"] is None and not job["same_topic"]:
        raise BadSetting(
            "no target is given",
            hint="use --target, or --same-topic to send messages to their own topics",
        )
    if job["deliver"] and (
        job["delivery"] != options.DELIVERIES[0] or options.pace_of(job).speed is None
    ):
        raise BadSetting(
            "--deliver needs --pace original or --speed, and at-least-once delivery",
            hint="it sends all messages now as timer messages",
        )
    if not job["dry_run"]:
        options.run_directory(job, "run")
    _check_source(job, chosen)
    if job["target"] is not None:
        check_routes(
            [(each, job["target"]) for each in chosen.topics], same_topic=job["same_topic"]
        )
        _check_targets(job, {job["target"]})
    if job["lake"] is not None and job["run"] is None:  # a continued run does not need it
        check_lake(job, job["lake"])


def _check_source(job: PipelineJob, chosen: Selection) -> None:
    if job["lake"] is not None and job["log"] is not None:
        raise BadSetting("--lake and --log can't be combined")
    if job["lake"] is not None:
        return
    if job["log"] is None and not chosen.topics:
        raise BadSetting(
            "no source is given",
            hint="use --lake, --log, or --topics to read from the brokers",
        )
    SourceOptions.of(options.source_options(job, chosen))
    if job["run"] is not None:  # a run that is continued does not need the source
        return
    if job["log"] is not None:
        plan_scan(job["log"], LogSelection(columns=("topic",)))
    else:
        job.queues(subscribe=",".join(chosen.topics))


def _check_targets(job: PipelineJob, topics: set[str]) -> None:
    """Raise NoRoute if a topic does not exist."""
    with connect_admin(job.connection) as admin:
        for topic in sorted(topics):
            admin.route(topic)


PIPELINE: Final = Pipeline(
    name="replay",
    summary="Send messages of a lake, a commit log or a topic to a topic again.",
    options=(
        Option("lake", "Read messages from this lake."),
        Option("log", "Read messages from the commit log of this store, without a broker."),
        Option(
            "topics",
            "Topics, separated by commas. Without --lake and --log they are read from the brokers.",
        ),
        Option(
            "from",
            "Start of the time range: 2026-08-01T12:00:00+00:00, or milliseconds since 1970.",
        ),
        Option("until", "End of the time range, exclusive."),
        Option(
            "by", "The time used for the range and the pace.", default="store", choices=tuple(TIMES)
        ),
        Option("keys", "Only messages with one of these keys, separated by commas."),
        Option("tags", 'Only messages with these tags: "a || b".'),
        Option("where", "Only messages that match this SQL condition on the columns."),
        Option("limit", "Only the first messages, up to this number.", kind=int),
        Option("target", "Topic to send to; it must exist."),
        Option(
            "same_topic",
            "Allow messages to be sent to the topic they came from; without --target, all are.",
            kind=bool,
            default=False,
        ),
        Option(
            "pace",
            "fast, or original to keep the time between messages; fast unless --speed is given.",
            choices=PACES,
        ),
        Option(
            "speed",
            "Factor for the original pace: 10 is ten times as fast, 0.5 half as fast.",
            kind=float,
        ),
        Option("rate", "Maximum number of messages per second.", kind=int),
        Option("step", "Precision of pace and rate.", default=f"{STEP_MS // 1000}s"),
        Option(
            "slice_rows", "Maximum number of messages per Spark job.", kind=int, default=SLICE_ROWS
        ),
        Option(
            "deliver",
            "Send all messages now as timer messages, which the broker delivers when they are due.",
            kind=bool,
            default=False,
        ),
        Option(
            "delivery",
            "Delivery of the messages.",
            default=options.DELIVERIES[0],
            choices=options.DELIVERIES,
        ),
        Option(
            "run",
            "Name of the run; the same name continues an interrupted run. "
            "Without it, a name is generated and printed.",
        ),
        Option("dry_run", "Print what would be sent, and send nothing.", kind=bool, default=False),
    ),
    outputs=(
        PipelineOutput(
            "topic {target}",
            "The messages, with properties PENSTOCK_REPLAY_* that name the run and the original's "
            "topic, message id, offset and store time.",
        ),
        PipelineOutput(
            "{checkpoint}/{run}",
            "The plan and the progress of the run; its copy of the messages is deleted at the end.",
        ),
    ),
    start=start,
    trigger="once",
    verify=verify,
)
