"""Pipeline `replay`: messages out of a lake, a store's log or a topic's history into a topic again.

They are chosen by time, topic, key, tag and condition, marked, and sent at a pace, those of one
queue in their order. `replay_rows.py` says what is sent, `replay_run.py` how a run goes on after a
crash, `replay_pace.py` how fast it goes.
"""

import secrets
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from penstock.errors import BadSetting, PipelineFailed
from penstock.spark.pipelines.job_cancel import Stopped, cancel_on_stop
from penstock.spark.pipelines.lake.lake_rows import lake_rows
from penstock.spark.pipelines.replay import options
from penstock.spark.pipelines.replay.pace import PACES, SLICE_ROWS, STEP_MS, Pace, time_text
from penstock.spark.pipelines.replay.replay_run import Plan, Run
from penstock.spark.pipelines.replay.selection import (
    TIMES,
    Selection,
    first_rows,
    outgoing,
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
from penstock.spark.source.log_slices import LogScan, plan_scan
from penstock.spark.source.source_options import SourceOptions

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
    """Send rows with the source's columns (`Selection.of` chooses some) to a topic, marked, in
    their order; `target` None, with `same_topic`, sends each to its own.

    What was sent is noted in `directory`: the same run again goes on there, and does nothing when
    all was sent. Each row goes at least once, with `sink={"delivery": "transactional"}` exactly
    once. False if `stop` was set before the end. Raises BadSetting, and PipelineFailed
    without rows.
    """
    options.check_run(run)
    about = {"target": target or "", "delivery": sink.get("delivery", options.DELIVERIES[0])}
    made = Run(
        rows.sparkSession,
        directory,
        run,
        pace or Pace(),
        sink,
        deliver=deliver,
        about=about,
        say=say or (lambda line: None),
    )
    stop = stop or threading.Event()
    try:
        plan = made.plan() or made.stage(
            outgoing(rows, run=run, target=target, by=by),
            lambda plan: check_routes(plan.routes, same_topic=same_topic),
            stop,
        )
    except Stopped:
        return False
    if plan is None:
        raise PipelineFailed("there are no rows to send", hint="choose others")
    return made.send(plan, stop)


def check_routes(routes: list[tuple[str, str]], *, same_topic: bool) -> None:
    """Raise BadSetting for topics that would feed themselves."""
    own = sorted({origin for origin, target in routes if origin == target})
    if own and not same_topic:
        raise BadSetting(
            f"messages of {', '.join(own)} would go to the topic that they came from: its "
            "consumers get them a second time",
            hint="give another --target, or --same-topic if that is what you want",
        )


# --- the pipeline


def start(spark: "SparkSession", job: PipelineJob) -> "list[StreamingQuery]":
    """The pipeline's function: all is done, or stopped, when it returns."""
    chosen = options.selection(job)
    with stop_signals() as stop:
        try:
            if job["dry_run"]:
                with cancel_on_stop(spark, stop):
                    _show(spark, job, chosen)
            else:
                _replay(spark, job, chosen, stop)
        except Stopped:
            job.say("stopped before the messages were chosen; nothing was sent")
    return []


def _replay(
    spark: "SparkSession", job: PipelineJob, chosen: Selection, stop: threading.Event
) -> None:
    run = job["run"] or f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    made = Run(
        spark,
        options.directory(job, run),
        run,
        options.pace_of(job),
        options.sink_options(job),
        deliver=job["deliver"],
        about=options.about(job),
        say=job.say,
    )
    plan = made.plan()
    if plan is None:
        job.say(f"run {run}: choosing messages")
        plan = _staged(spark, job, made, chosen, stop)
    slices = "1 slice" if len(plan.slices) == 1 else f"{len(plan.slices):,} slices"
    job.say(f"run {run}: {plan.rows:,} messages in {slices}, {made.pace}")
    if made.send(plan, stop):
        job.say(f"run {run}: all {plan.rows:,} messages are sent")
    else:
        job.say(f"run {run} is stopped; the same with --run {run} goes on")


def _staged(
    spark: "SparkSession", job: PipelineJob, made: Run, chosen: Selection, stop: threading.Event
) -> Plan:
    with cancel_on_stop(spark, stop):  # finding out the columns of a lake is a job
        rows = outgoing(
            chosen.of(source(spark, job, chosen)),
            run=made.name,
            target=job["target"],
            by=chosen.by,
            limit=job["limit"],
        )

    def check(plan: Plan) -> None:
        check_routes(plan.routes, same_topic=job["same_topic"])
        _check_targets(job, {target for _, target in plan.routes})

    plan = made.stage(rows, check, stop)
    if plan is None:
        raise _nothing(spark, job, chosen)
    return plan


def source(spark: "SparkSession", job: PipelineJob, chosen: Selection) -> "DataFrame":
    """The rows to choose from, narrowed where the source can do that."""
    if job["lake"] is not None:
        return lake_rows(spark, job["lake"])
    return spark.read.format("penstock").options(**options.source_options(job, chosen)).load()


def _nothing(spark: "SparkSession", job: PipelineJob, chosen: Selection) -> PipelineFailed:
    """Tells what there is where nothing was chosen."""
    every = Selection(topics=chosen.topics, by=chosen.by)
    there = survey(every.of(source(spark, job, every)), chosen.by)
    if there is None:
        return PipelineFailed(
            "there are no messages to choose from", hint="check the topics and the place"
        )
    return PipelineFailed(
        f"none of the messages is chosen; there are {there.span}",
        hint="check range, keys, tags and condition; --dry-run shows what is chosen",
    )


def _show(spark: "SparkSession", job: PipelineJob, chosen: Selection) -> None:
    """The dry run."""
    rows = chosen.of(source(spark, job, chosen))
    if job["limit"] is not None:
        rows = first_rows(rows, job["limit"], by=chosen.by)
    found = survey(rows, chosen.by)
    if found is None:
        raise _nothing(spark, job, chosen)
    target = job["target"]
    check_routes([(t, target or t) for t in found.topics], same_topic=job["same_topic"])
    _check_targets(job, {target or topic for topic in found.topics})
    for line in found.lines():
        job.say(line)
    pace = options.pace_of(job)
    takes_ms = pace.takes_ms(rows=found.rows, span_ms=found.last_ms - found.first_ms)
    least = f", which takes {time_text(takes_ms)} at least" if takes_ms else ""
    where = "their own topics" if target is None else f"the topic {target}"
    job.say(f"they would go to {where}, {pace}{least}; nothing was sent")


def verify(job: PipelineJob) -> None:
    """Raise what is wrong with options, servers or topics."""
    chosen = options.selection(job)
    options.pace_of(job)
    if job.trigger.text != PIPELINE.trigger:
        raise BadSetting("replay has no --trigger", hint="its --pace says when messages are sent")
    if job["run"] is not None:
        options.check_run(job["run"])
    if job["limit"] is not None and job["limit"] < 1:
        raise BadSetting(f"--limit: {job['limit']} is less than 1")
    named = {"sinkId": "replay", **({"topic": job["target"]} if job["target"] else {})}
    SinkOptions.of({**options.sink_options(job), **named}, stream=False)
    if job["target"] is None and not job["same_topic"]:
        raise BadSetting(
            "no target is named", hint="give --target, or --same-topic for the topics they are of"
        )
    if job["deliver"] and (
        job["delivery"] != options.DELIVERIES[0] or options.pace_of(job).speed is None
    ):
        raise BadSetting(
            "--deliver sends messages ahead of their time",
            hint="it needs --pace original or --speed, and can't be transactional",
        )
    if not job["dry_run"]:
        options.directory(job, "run")
    _check_source(job, chosen)
    if job["target"] is not None:
        check_routes(
            [(each, job["target"]) for each in chosen.topics], same_topic=job["same_topic"]
        )
        _check_targets(job, {job["target"]})


def _check_source(job: PipelineJob, chosen: Selection) -> None:
    if job["lake"] is not None and job["log"] is not None:
        raise BadSetting("--lake and --log exclude each other")
    if job["lake"] is not None:
        return
    if job["log"] is None and not chosen.topics:
        raise BadSetting(
            "it is not said where messages come from",
            hint="give --lake, --log, or --topics to read those from their brokers",
        )
    SourceOptions.of(options.source_options(job, chosen))
    if job["run"] is not None:  # one that goes on has its messages, whatever became of the source
        return
    if job["log"] is not None:
        plan_scan(job["log"], LogScan(columns=("topic",)))
    else:
        job.queues(subscribe=",".join(chosen.topics))


def _check_targets(job: PipelineJob, topics: set[str]) -> None:
    """Raise NoRoute for a topic that is missing."""
    with connect_admin(job.connection) as admin:
        for topic in sorted(topics):
            admin.route(topic)


PIPELINE: Final = Pipeline(
    name="replay",
    summary="Messages of a lake, a log or a topic into a topic again, by time and key, at a pace.",
    options=(
        Option("lake", "Messages come from this lake."),
        Option("log", "Or from the commit log of this store: its directory; no broker is asked."),
        Option(
            "topics",
            "Only messages of these topics, commas between. Without --lake and --log "
            "they are read from their brokers.",
        ),
        Option("from", "From this time on: 2026-08-01T12:00:00+00:00, or milliseconds."),
        Option("until", "Before this time."),
        Option(
            "by", "The time that counts, for range and pace.", default="store", choices=tuple(TIMES)
        ),
        Option("keys", "Only messages with one of these keys, commas between."),
        Option("tags", 'Only messages with these tags: "a || b".'),
        Option("where", "Only messages that this SQL condition on their columns holds for."),
        Option("limit", "Only the first so many.", kind=int),
        Option("target", "The topic that they go to; it must exist."),
        Option(
            "same_topic",
            "Let messages go to the topic that they came from; without --target all do.",
            kind=bool,
            default=False,
        ),
        Option(
            "pace",
            "fast, as it is without --speed, or original: with the gaps as they were.",
            choices=PACES,
        ),
        Option("speed", "The gaps so many times shorter: 10, or 0.5.", kind=float),
        Option("rate", "At most so many messages in a second.", kind=int),
        Option("step", "How finely gaps and rate are kept.", default=f"{STEP_MS // 1000}s"),
        Option("slice_rows", "At most so many messages in one job.", kind=int, default=SLICE_ROWS),
        Option(
            "deliver",
            "Do not wait: send all now, each timed to be delivered when it is due.",
            kind=bool,
            default=False,
        ),
        Option(
            "delivery",
            "Of the messages.",
            default=options.DELIVERIES[0],
            choices=options.DELIVERIES,
        ),
        Option(
            "run",
            "The name of the run; the same again goes on where it stopped. "
            "Without it one is made up and told.",
        ),
        Option("dry_run", "Show what would be sent, and send nothing.", kind=bool, default=False),
    ),
    outputs=(
        PipelineOutput(
            "topic {target}",
            "The messages, with properties PENSTOCK_REPLAY_* that say which "
            "run, topic, message, offset and time they are of.",
        ),
        PipelineOutput(
            "{checkpoint}/{run}",
            "What the run is to send and how far it is; the messages are deleted at the end.",
        ),
    ),
    start=start,
    trigger="once",
    verify=verify,
)
