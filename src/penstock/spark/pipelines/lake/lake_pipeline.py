"""Pipeline `lake`: writes topics to Parquet files by date and topic, exactly once."""

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from penstock.arrow.message_schema import DATE, wanted_columns
from penstock.arrow.queue_offsets import EARLIEST, LATEST, from_json, to_json
from penstock.errors import BadSetting, LakeRefused
from penstock.spark.pipelines.lake.lake_compaction import LARGE_BYTES, compact_lake
from penstock.spark.pipelines.lake.lake_owner import LakeOwner
from penstock.spark.pipelines.lake.lake_writer import (
    CODECS,
    DATE_COLUMNS,
    LakeSettings,
    LakeWriter,
)
from penstock.spark.pipelines.running import Option, Pipeline, PipelineJob, PipelineOutput

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.wire.bodies.client_bodies import MessageQueue

_QUERY_NAME: Final = "lake"


def start(spark: "SparkSession", job: PipelineJob) -> "list[StreamingQuery]":
    """Start the pipeline; without topics, only compact the lake."""
    settings, source = _parse(job)
    settings.body_schema(settings.columns)
    if source is None:
        result = compact_lake(
            spark, job["lake"], large_bytes=settings.large_bytes, compression=settings.codec
        )
        job.say(f"compaction: {result}")
        return []
    queues = job.queues(**source)  # first, so that wrong options leave no trace in the lake
    writer = LakeWriter(spark, job["lake"], settings, job.checkpoint, adopt=job["adopt"])
    if settings.compact:
        job.say(f"compaction: {writer.compact()}")
    if last := writer.committer.last_batch(writer.owner.query):
        check_topics(writer.owner, last.offsets, queues)
    default = LATEST if job["start"] == "latest" else EARLIEST
    if adopted := starting_offsets(writer.owner, queues, default=default):
        source["startingOffsets"] = adopted
    local = writer.files.local
    if local is not None and settings.is_plain:
        return [writer.start_staged(job, source, local, _QUERY_NAME)]
    stream = job.stream(spark, **source)
    return [writer.start(stream, job.trigger, _QUERY_NAME, has_date=DATE in stream.columns)]


def verify(job: PipelineJob) -> None:
    """Raise errors in options, servers or topics."""
    settings, source = _parse(job)
    settings.check_schema(settings.columns)
    if source is not None:
        job.queues(**source)


def starting_offsets(
    owner: LakeOwner, queues: "Iterable[MessageQueue]", *, default: int = EARLIEST
) -> str | None:
    """The option startingOffsets for a query that has taken over a lake; None for others.

    Topics of the lake continue where they ended; their new queues are read from the beginning.
    Other topics start at `default`. Topics that are not read any more are left out.
    """
    if not owner.start:
        return None
    if len(owner.start) != 1:
        raise BadSetting(
            f"the lake was written from {len(owner.start)} sources, but this pipeline reads one",
            hint="choose another lake",
        )
    ended = from_json(json.loads(owner.start[0]))
    earlier, wanted = {queue.topic for queue in ended}, {queue.topic for queue in queues}
    offsets = {queue: EARLIEST if queue.topic in earlier else default for queue in queues}
    offsets |= {queue: offset for queue, offset in ended.items() if queue.topic in wanted}
    return json.dumps(to_json(offsets))


def check_topics(owner: LakeOwner, ended: Sequence[str], queues: "Iterable[MessageQueue]") -> None:
    """Raise LakeRefused for topics that a previous query wrote and this one has not read.

    The source would take them for new topics and read them from the beginning.
    """
    if len(owner.start) != 1 or len(ended) != 1:
        return
    before, now = (_topics(each) for each in (owner.start[0], ended[0]))
    if again := (before - now) & {queue.topic for queue in queues}:
        raise LakeRefused(
            f"a previous query wrote {', '.join(sorted(again))} to the lake, and this query has "
            "not read it so far",
            hint="continue with another new checkpoint and --adopt; it starts where each topic "
            "ended",
        )


def _topics(offsets: str) -> set[str]:
    return {queue.topic for queue in from_json(json.loads(offsets))}


def _parse(job: PipelineJob) -> tuple[LakeSettings, dict[str, str] | None]:
    """The settings of the lake and the options of the source; None to only compact the lake."""
    settings = _settings(job)
    if job["topics"] is not None and job["pattern"] is not None:
        raise BadSetting("--topics and --pattern can't be combined")
    if job["topics"] is not None or job["pattern"] is not None:
        return settings, _source_options(job, settings)
    if not settings.compact:
        raise BadSetting("no topics are given", hint="use --topics, --pattern or --compact")
    return settings, None


def _settings(job: PipelineJob) -> LakeSettings:
    if job["prefix"] and job["schema"] is None:
        raise BadSetting("--prefix needs --schema", hint="use both or neither")
    for name in ("files_per_batch", "large_mib", "max_rows"):
        if job[name] is not None and job[name] < 1:
            raise BadSetting(f"--{name.replace('_', '-')}: {job[name]} is less than 1")
    columns = tuple(name for name in wanted_columns(job["columns"]) if name != DATE)
    if job["schema"] is not None and job["columns"] is None:
        columns = tuple(name for name in columns if name != "body")
    return LakeSettings(
        schema=job["schema"],
        prefix=job["prefix"],
        date_from=job["date_from"],
        columns=columns,
        files_per_batch=job["files_per_batch"],
        compression=job["compression"],
        compact=job["compact"],
        large_bytes=job["large_mib"] << 20,
    )


def _source_options(job: PipelineJob, settings: LakeSettings) -> dict[str, str]:
    """The options of the source.

    The columns have the order in which they are written, so that Spark need not copy rows.
    """
    needed = ["topic"] * ("topic" not in settings.columns) + [*settings.columns]
    needed += ["body"] * (settings.schema is not None)
    if settings.date_from == DATE_COLUMNS[0]:
        needed = [DATE, *needed]
    else:
        needed.append(settings.date_from)
    options = {
        "subscribe": job["topics"],
        "subscribePattern": job["pattern"],
        "columns": ",".join(dict.fromkeys(needed)),
        "startingOffsets": job["start"],
        "maxOffsetsPerTrigger": job["max_rows"],
        "tags": job["tags"],
        "commitGroup": job["group"],
        "failOnDataLoss": "false" if job["skip_lost"] else "true",
    }
    return {name: str(value) for name, value in options.items() if value is not None}


PIPELINE: Final = Pipeline(
    name="lake",
    summary="Write topics to Parquet files by date and topic, each message exactly once.",
    options=(
        Option("lake", "Directory of the lake: a path, hdfs://… or s3a://….", required=True),
        Option("topics", "Topics, separated by commas."),
        Option(
            "pattern",
            "Instead of --topics: regular expression that matches whole topic names; topics that "
            "are created later are included.",
        ),
        Option(
            "start",
            "Where a new lake begins: earliest, latest, or offsets as JSON.",
            default="earliest",
        ),
        Option("tags", 'Tag filter, evaluated by the broker: "a || b".'),
        Option("max_rows", "Maximum number of messages per batch.", kind=int),
        Option(
            "schema",
            'Columns of JSON bodies: "id STRING NOT NULL, amount DOUBLE"; rows that do not match '
            "are written to <lake>/bad with the reason.",
        ),
        Option("prefix", "Prefix for the names of the schema's columns.", default=""),
        Option("columns", "Columns of messages to write, separated by commas; * for all."),
        Option(
            "date_from",
            "Timestamp whose UTC date selects the partition.",
            default=DATE_COLUMNS[0],
            choices=DATE_COLUMNS,
        ),
        Option(
            "compression", "Compression of the Parquet files.", default="snappy", choices=CODECS
        ),
        Option(
            "files_per_batch",
            "Maximum number of files per topic and date in a batch; fewer tasks then write.",
            kind=int,
        ),
        Option("group", "Commit the progress as this consumer group."),
        Option(
            "skip_lost",
            "Continue if messages were deleted before they were read.",
            kind=bool,
            default=False,
        ),
        Option(
            "adopt",
            "Let a new checkpoint take over the lake and start where it ends.",
            kind=bool,
            default=False,
        ),
        Option(
            "compact",
            "Compact the dates before today; without topics, do nothing else.",
            kind=bool,
            default=False,
        ),
        Option(
            "large_mib",
            "Target file size of compaction, in MiB.",
            kind=int,
            default=LARGE_BYTES >> 20,
        ),
    ),
    outputs=(
        PipelineOutput(
            "{lake}/data/date=…/topic=…", "The messages, or their JSON bodies as columns."
        ),
        PipelineOutput(
            "{lake}/bad/date=…/topic=…",
            "Messages whose body does not match the schema, with the reason.",
        ),
    ),
    start=start,
    trigger="1 minute",
    verify=verify,
)
