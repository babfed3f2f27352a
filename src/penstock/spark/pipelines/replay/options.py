"""The options of pipeline `replay` as values: selection, pace, source and sink."""

import re
from typing import Final

from penstock.arrow.message_schema import DEFAULT_COLUMNS
from penstock.errors import BadSetting
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
"""The options that can't be changed when a run is continued; the pace can."""


def check_run(run: str) -> None:
    """Raise BadSetting if this is not a valid name of a run."""
    if not _RUN.fullmatch(run) or run.startswith("."):
        raise BadSetting(
            f"{run!r} is not a valid name of a run",
            hint="use up to 64 letters, digits, '.', '-' and '_'; the first is not a dot",
        )


def selection_of(job: PipelineJob) -> Selection:
    """The selected messages; raises BadSetting."""
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


def _names(job: PipelineJob, option: str, separator: str) -> tuple[str, ...]:
    if job[option] is None:
        return ()
    names = tuple(name.strip() for name in job[option].split(separator))
    if "" in names:
        raise BadSetting(f"--{option}: {job[option]!r} has an empty name")
    return names


def pace_of(job: PipelineJob) -> Pace:
    """The pace; raises BadSetting."""
    if job["speed"] is not None and job["pace"] == FAST:
        raise BadSetting("--pace fast and --speed can't be combined", hint="remove one of them")
    is_original = job["pace"] == ORIGINAL or job["speed"] is not None
    speed = (job["speed"] if job["speed"] is not None else 1.0) if is_original else None
    return Pace(
        speed=speed,
        rate=job["rate"],
        step_ms=job.option_reader("step").duration_ms("step", default=STEP_MS),
        slice_rows=job["slice_rows"],
    )


def sink_options(job: PipelineJob) -> dict[str, str]:
    """The options of the sink for every slice."""
    return {**job.connection, "delivery": job["delivery"]}


def run_directory(job: PipelineJob, run: str) -> str:
    """The directory of the run, for its rows and its progress."""
    if job.checkpoint is not None:
        return f"{job.checkpoint.rstrip('/')}/{run}"
    if job["lake"] is not None:
        return f"{job['lake'].rstrip('/')}/{REPLAYS}/{run}"
    raise BadSetting(
        "--checkpoint is missing: a directory for the selected messages and the progress",
        hint="it needs enough space for the messages; with --lake it is optional",
    )


def fixed_options(job: PipelineJob) -> dict[str, str]:
    """The options that must be the same when the run is continued."""
    return {
        "--" + name.replace("_", "-"): str(job[name])
        for name in _FIXED
        if job[name] is not None and job[name] is not False
    }


def source_options(job: PipelineJob, chosen: Selection) -> dict[str, str]:
    """The options of the source, with as much of the selection as the source can apply."""
    options: dict[str, str] = {
        # Only a condition can need columns that are not sent.
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
