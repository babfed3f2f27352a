"""The options of pipeline `replay` as values: what is chosen, at which pace, into which topics."""

import re
from typing import Final

from penstock.errors import BadSetting
from penstock.spark.message_schema import DEFAULT_COLUMNS
from penstock.spark.pipelines.lake.batch_commits import METADATA_DIR
from penstock.spark.pipelines.replay.pace import FAST, ORIGINAL, STEP_MS, Pace
from penstock.spark.pipelines.replay.selection import Selection
from penstock.spark.pipelines.running import PipelineJob

DELIVERIES: Final = ("at-least-once", "transactional")
REPLAYS: Final = f"{METADATA_DIR}/replays"
_RUN: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_FIXED: Final = (
    "lake",
    "log",
    "topics",
    "from",
    "until",
    "by",
    "keys",
    "tags",
    "where",
    "limit",
    "target",
    "same_topic",
    "delivery",
    "deliver",
)
"""The options that a run keeps for ever; its pace may change."""


def check_run(run: str) -> None:
    """Raise BadSetting for what is no name of a run."""
    if not _RUN.fullmatch(run) or run.startswith("."):
        raise BadSetting(
            f"{run!r} is no name of a run", hint="up to 64 letters, digits, dots, - and _"
        )


def selection(job: PipelineJob) -> Selection:
    """The options as a selection; raises BadSetting."""
    option_reader = job.option_reader("from", "until")
    return Selection(
        topics=_names(job, "topics", ","),
        from_ms=option_reader.timestamp_ms("from"),
        until_ms=option_reader.timestamp_ms("until"),
        by=job["by"],
        keys=_names(job, "keys", ","),
        tags=_names(job, "tags", "||"),
        where=job["where"],
    )


def _names(job: PipelineJob, option: str, between: str) -> tuple[str, ...]:
    if job[option] is None:
        return ()
    names = tuple(name.strip() for name in job[option].split(between))
    if "" in names:
        raise BadSetting(f"--{option}: {job[option]!r} has an empty name")
    return names


def pace_of(job: PipelineJob) -> Pace:
    """The options as a pace; raises BadSetting."""
    if job["speed"] is not None and job["pace"] == FAST:
        raise BadSetting("--pace fast has no --speed", hint="leave one of them out")
    is_original = job["pace"] == ORIGINAL or job["speed"] is not None
    speed = (job["speed"] if job["speed"] is not None else 1.0) if is_original else None
    return Pace(
        speed=speed,
        rate=job["rate"],
        step_ms=job.option_reader("step").duration_ms("step", default=STEP_MS),
        slice_rows=job["slice_rows"],
    )


def sink_options(job: PipelineJob) -> dict[str, str]:
    """What every slice is written with."""
    return {**job.connection, "delivery": job["delivery"]}


def directory(job: PipelineJob, run: str) -> str:
    """Where the run keeps its rows and notes."""
    if job.checkpoint is not None:
        return f"{job.checkpoint.rstrip('/')}/{run}"
    if job["lake"] is not None:
        return f"{job['lake'].rstrip('/')}/{REPLAYS}/{run}"
    raise BadSetting(
        "--checkpoint is missing: a directory for the chosen messages and for what was sent",
        hint="it needs room for the messages until they are sent; only a --lake has its own",
    )


def about(job: PipelineJob) -> dict[str, str]:
    """What a second start of a run must ask for too."""
    return {
        "--" + name.replace("_", "-"): str(job[name])
        for name in _FIXED
        if job[name] is not None and job[name] is not False
    }


def source_options(job: PipelineJob, chosen: Selection) -> dict[str, str]:
    """What format `penstock` is asked for, narrowed as far as it can do that."""
    options: dict[str, str] = {
        # Only a condition can need more columns than are sent.
        "columns": "*" if chosen.where is not None else ",".join((*DEFAULT_COLUMNS, "flag")),
    }
    if chosen.topics:
        options["subscribe"] = ",".join(chosen.topics)
    if chosen.tags:
        options["tags"] = " || ".join(chosen.tags)
    if chosen.by == "store":
        for name, ms in (("starting", chosen.from_ms), ("ending", chosen.until_ms)):
            if ms is not None:
                options[f"{name}Timestamp"] = str(ms)
    if job["log"] is not None:
        return {"mode": "log", "path": job["log"], **options}
    return {**job.connection, **options}
