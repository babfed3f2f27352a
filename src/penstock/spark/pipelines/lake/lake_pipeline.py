"""Pipeline `lake`: topics into Parquet files by date and topic, each message exactly once.

    <lake>/data/date=2026-08-01/topic=orders/*.parquet

Any reader of Parquet sees each message once; no table format and no log beside the files is needed.
How a batch gets in is in `publication.py`, to whom a lake belongs in `ownership.py`.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from penstock.errors import BadSetting, LakeDamaged, LakeRefused
from penstock.spark.message_schema import (
    COLUMNS_WITHOUT_STATISTICS,
    DATE,
    spark_schema,
    wanted_columns,
)
from penstock.spark.pipelines.lake.json_bodies import BAD, BodySchema
from penstock.spark.pipelines.lake.lake_compaction import LARGE_BYTES, Compacted, compact_lake
from penstock.spark.pipelines.lake.lake_files import File, HadoopFiles
from penstock.spark.pipelines.lake.lake_owner import Claim, Deed
from penstock.spark.pipelines.lake.publication import ROOM, Ledger
from penstock.spark.pipelines.query_errors import translate_batch_errors
from penstock.spark.pipelines.query_start import start_query
from penstock.spark.pipelines.running import Option, Pipeline, PipelineJob, PipelineOutput, Trigger
from penstock.spark.source.queue_offsets import EARLIEST, LATEST, from_json, to_json

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from penstock.wire.bodies.client_bodies import MessageQueue

WRITERS_MAX: Final = 64
"""Files that a task has open at a time: beyond it Spark sorts the rows by date and topic."""
DATE_COLUMNS: Final = ("store_timestamp", "born_timestamp")
PARTITIONS: Final = (DATE, "topic")
CODECS: Final = ("snappy", "zstd", "gzip", "lz4", "none")
_LZ4: Final = "lz4_raw"
"""Spark's plain `lz4` is a kind of Hadoop's own, which other readers do not know."""
_COMMITTER: Final = "mapreduce.fileoutputcommitter.algorithm.version"
"""1: files of tasks that failed or were too slow never get to those of a finished job."""
_NO_STATISTICS: Final = {
    f"parquet.column.statistics.enabled#{path}": "false"
    for paths in COLUMNS_WITHOUT_STATISTICS.values()
    for path in paths
}
_staging: "Final[WeakSet[SparkSession]]" = WeakSet()
"""Sessions that know the format of `staging.py`."""
_DAY_US: Final = 86_400_000_000


@dataclass(frozen=True)
class LakeSettings:
    """How a lake is written."""

    schema: str | None = None
    """Columns of JSON bodies in Spark's DDL; without it bodies stay as they are."""
    prefix: str = ""
    """Put before the names of those columns."""
    date_from: str = "store_timestamp"
    """The column whose date, in UTC, a row is filed under."""
    columns: tuple[str, ...] = ()
    """Those to keep of the messages' columns; none: all of them."""
    files_per_batch: int | None = None
    compression: str = "snappy"
    """One of `CODECS`."""
    compact: bool = False
    """Compact the dates that are over, at the start and when a day ends."""
    large_bytes: int = LARGE_BYTES

    @property
    def is_plain(self) -> bool:
        """Whether rows go into files as they come, by the date of their storing."""
        return (
            self.schema is None
            and self.files_per_batch is None
            and self.date_from == DATE_COLUMNS[0]
        )

    @property
    def codec(self) -> str:
        """The compression as Spark calls it."""
        return _LZ4 if self.compression == "lz4" else self.compression

    def body(self, kept: Iterable[str]) -> BodySchema | None:
        """The schema of bodies beside columns that are kept; raises BadSetting."""
        if self.schema is None:
            return None
        taken = {*kept, *PARTITIONS} - {"body"}
        return BodySchema.parse(self.schema, prefix=self.prefix, taken=taken)


def write_lake(
    messages: "DataFrame",
    lake: str,
    *,
    checkpoint: str | None = None,
    trigger: str = "1 minute",
    settings: LakeSettings | None = None,
    name: str = "lake",
) -> "StreamingQuery":
    """Write a stream with the columns `topic` and `store_timestamp` into a lake, exactly once.

    The stream must be one that Spark can replay, as format `penstock` is. Raises LakeRefused where
    the checkpoint (`<lake>/_penstock/checkpoint`, if none is named) is not the lake's.
    """
    writer = LakeWriter(messages.sparkSession, lake, settings or LakeSettings(), checkpoint)
    return writer.start(messages, Trigger.parse(trigger), name)


class LakeWriter:
    """Brings the batches of one query into a lake."""

    def __init__(
        self,
        spark: "SparkSession",
        lake: str,
        settings: LakeSettings,
        checkpoint: str | None = None,
        *,
        adopt: bool = False,
    ) -> None:
        """Take the lake; raises LakeRefused if it is not this checkpoint's."""
        self.files = HadoopFiles(spark, lake)
        self.checkpoint = HadoopFiles(spark, checkpoint or self.files.url(f"{ROOM}/checkpoint"))
        self.settings = settings
        self.ledger = Ledger(self.files)
        self.claim = Claim(self.files, self.checkpoint, self.files.url(), self.checkpoint.url())
        self.deed = self.claim.take(adopt=adopt)
        self.ledger.sweep(self.deed.query, self.deed.number)
        self._spark = spark
        self._body: BodySchema | None = None  # known when it starts
        self._is_tuned = False
        self._compacted = datetime.now(UTC).date()

    def start(
        self, messages: "DataFrame", trigger: Trigger, name: str, *, dated: bool = False
    ) -> "StreamingQuery":
        """Start the query. `dated`: the stream has the date that its rows are filed under."""
        from pyspark.sql import functions as f

        kept = self._kept(messages.columns, dated=dated)
        self._body = self.settings.body(kept)
        # Arithmetic instead of to_date(), which takes the session's time zone.
        days = f"unix_micros({self.settings.date_from}) div {_DAY_US}"
        day = f.col(DATE) if dated else f.expr(f"date_from_unix_date(cast({days} as int))")
        rows = messages.select(day.alias(DATE), *(f.col(column) for column in kept))
        good = rows if self._body is None else self._body.good(self._body.parsed(rows))
        columns = {each.name: each.dataType.simpleString() for each in good.schema.fields}
        self.deed = self.claim.describe(self.deed, columns)
        return self._start(rows, trigger, name, self.write_batch)

    def start_staged(
        self, job: PipelineJob, source: Mapping[str, str], local: str, name: str
    ) -> "StreamingQuery":
        """Start the query with tasks that write the files themselves (`staging.py`): `local` is
        the lake's directory, and `source` the options of format `penstock`."""
        from penstock.spark.sink.staging import CODEC, STAGING, StagingSource, files_of

        kept = wanted_columns(source["columns"])
        columns = {each.name: each.dataType.simpleString() for each in spark_schema(kept).fields}
        self.deed = self.claim.describe(self.deed, columns)
        attempt = self.ledger.attempt_of_all(self.deed.query, self.deed.number)
        if self._spark not in _staging:  # Spark warns of a second time
            self._spark.dataSource.register(StagingSource)
            _staging.add(self._spark)
        place = {STAGING: f"{local}/{attempt}", CODEC: self.settings.compression}
        staged = job.stream(self._spark, StagingSource.name(), **source, **place)

        @translate_batch_errors()
        def publish_batch(rows: "DataFrame", number: int) -> None:
            if not self._is_due(number):
                return
            files = files_of([row.asDict() for row in rows.collect()], local)
            job.rows[name, number] = sum(count for _, _, count in files)
            self._publish(number, attempt, [File(path, size) for path, size, _ in files])

        return self._start(staged, job.trigger, name, publish_batch)

    def _start(
        self,
        rows: "DataFrame",
        trigger: Trigger,
        name: str,
        each: "Callable[[DataFrame, int], None]",
    ) -> "StreamingQuery":
        writer = rows.writeStream.queryName(name).option(
            "checkpointLocation", self.checkpoint.url()
        )
        return start_query(trigger.apply(writer.foreachBatch(each)).start)

    @translate_batch_errors()
    def write_batch(self, rows: "DataFrame", number: int) -> None:
        """Bring a batch into the lake, if it is not there yet."""
        if not self._is_tuned:
            self._tune(rows.sparkSession)
        if not self._is_due(number):
            return
        attempt = self.ledger.attempt(self.deed.query, number, self.deed.number)
        if self.settings.files_per_batch is not None:
            rows = rows.coalesce(self.settings.files_per_batch)
        if self._body is None:
            self._write(rows, f"{attempt}/data")
        else:
            self._write_parsed(self._body, rows, attempt)
        self._publish(number, attempt)

    def _is_due(self, number: int) -> bool:
        """Whether a batch is not in the lake yet; raises LakeRefused if that is not ours."""
        self.claim.check_held(self.deed)
        return not self.ledger.settle(self.deed.query, number)

    def _publish(self, number: int, attempt: str, written: Sequence[File] | None = None) -> None:
        offsets = self.claim.offsets(number)
        if not offsets:
            raise LakeDamaged(
                f"the checkpoint {self.checkpoint.url()} does not have batch {number} any more",
                hint="if it was deleted, go on with a new one and --adopt",
            )
        self.ledger.publish(
            self.deed.query,
            number,
            attempt,
            offsets,
            lambda: self.claim.check_held(self.deed),
            written,
        )
        if self.settings.compact and self._compacted != datetime.now(UTC).date():
            self.compact()

    def compact(self) -> Compacted:
        """Compact the dates that are over."""
        self._compacted = datetime.now(UTC).date()
        return compact_lake(
            self._spark,
            self.files.url(),
            large_bytes=self.settings.large_bytes,
            compression=self.settings.codec,
        )

    def _kept(self, columns: Sequence[str], *, dated: bool) -> list[str]:
        """The columns that rows go on with; raises BadSetting for those that are not there."""
        kept = list(self.settings.columns or columns)
        if dated and DATE in kept:
            kept.remove(DATE)
        if "topic" not in kept:
            kept.insert(0, "topic")
        if self.settings.schema is not None and "body" not in kept:
            kept.append("body")
        if DATE in kept:
            raise BadSetting("the stream has a column 'date', as the lake has", hint="rename it")
        needed = (*kept, *([] if dated else [self.settings.date_from]))
        for name in needed:
            if name not in columns:
                raise BadSetting(
                    f"the stream has no column {name!r}", hint=f"it has {', '.join(columns)}"
                )
        return kept

    def _tune(self, session: "SparkSession") -> None:
        """The query has a session of its own: nobody else's settings change."""
        for name, value in {
            "spark.sql.maxConcurrentOutputFileWriters": str(WRITERS_MAX),
            "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        }.items():
            session.conf.set(name, value)
        self._is_tuned = True

    def _write(self, rows: "DataFrame", folder: str) -> None:
        writer = rows.write.partitionBy(*PARTITIONS)
        options = {"compression": self.settings.codec, _COMMITTER: "1", **_NO_STATISTICS}
        writer.options(**options).parquet(self.files.url(folder))

    def _write_parsed(self, body: BodySchema, rows: "DataFrame", attempt: str) -> None:
        """Good rows, counting bad ones; only if there are any is the batch read again for them."""
        from pyspark.sql import Observation
        from pyspark.sql import functions as f

        parsed = body.parsed(rows)
        first, second = Observation(), Observation()
        bad = f.count_if(BAD).alias("bad")
        self._write(body.good(parsed.observe(first, bad)), f"{attempt}/data")
        if not (count := first.get["bad"]):
            return
        again = body.bad(parsed).observe(second, f.count(f.lit(1)).alias("rows"))
        self._write(again, f"{attempt}/bad")
        if second.get["rows"] != count:
            raise LakeDamaged(
                f"a batch had {count:,} bad rows, and {second.get['rows']:,} when read again",
                hint="start again: the batch is read anew",
            )


def starting_offsets(
    deed: Deed, queues: "Iterable[MessageQueue]", *, others: int = EARLIEST
) -> str | None:
    """The option startingOffsets for a query that took a lake over; None for others.

    Queues of topics that the lake has had are read on, or from their beginning where they are new.
    Topics that it has not had begin at `others`; those that are not read any more are left out.
    """
    if not deed.start:
        return None
    if len(deed.start) != 1:
        raise BadSetting(
            f"the lake was written from {len(deed.start)} sources, this pipeline reads from one",
            hint="choose another lake",
        )
    ended = from_json(json.loads(deed.start[0]))
    had, wanted = {queue.topic for queue in ended}, {queue.topic for queue in queues}
    marks = {queue: EARLIEST if queue.topic in had else others for queue in queues}
    marks |= {queue: offset for queue, offset in ended.items() if queue.topic in wanted}
    return json.dumps(to_json(marks))


def check_topics(deed: Deed, ended: Sequence[str], queues: "Iterable[MessageQueue]") -> None:
    """Raise LakeRefused for topics that the lake has had from a query before, and this one not.

    The source would take them for new ones and read them from their beginning.
    """
    if len(deed.start) != 1 or len(ended) != 1:
        return
    before, now = (_topics(each) for each in (deed.start[0], ended[0]))
    if again := (before - now) & {queue.topic for queue in queues}:
        raise LakeRefused(
            f"the lake has had {', '.join(sorted(again))} from the query before this one, which "
            "has not read it so far",
            hint="go on with another new checkpoint and --adopt: it begins where each topic ended",
        )


def _topics(offsets: str) -> set[str]:
    return {queue.topic for queue in from_json(json.loads(offsets))}


def start(spark: "SparkSession", job: PipelineJob) -> "list[StreamingQuery]":
    """The pipeline's function."""
    settings, source = _read(job)
    settings.body(settings.columns)
    if source is None:
        done = compact_lake(
            spark, job["lake"], large_bytes=settings.large_bytes, compression=settings.codec
        )
        job.say(f"compacted: {done}")
        return []
    queues = job.queues(**source)  # before the lake is taken: what can't be leaves no trace
    writer = LakeWriter(spark, job["lake"], settings, job.checkpoint, adopt=job["adopt"])
    if settings.compact:
        job.say(f"compacted: {writer.compact()}")
    if last := writer.ledger.last(writer.deed.query):
        check_topics(writer.deed, last.offsets, queues)
    others = LATEST if job["start"] == "latest" else EARLIEST
    if adopted := starting_offsets(writer.deed, queues, others=others):
        source["startingOffsets"] = adopted
    local = writer.files.local
    if local is not None and settings.is_plain:
        return [writer.start_staged(job, source, local, "lake")]
    stream = job.stream(spark, **source)
    return [writer.start(stream, job.trigger, "lake", dated=DATE in stream.columns)]


def verify(job: PipelineJob) -> None:
    """Raise what is wrong with options, servers or topics."""
    _, source = _read(job)
    if source is not None:
        job.queues(**source)


def _read(job: PipelineJob) -> tuple[LakeSettings, dict[str, str] | None]:
    """How the lake is written, and options of the source; none where it is only compacted."""
    settings = _settings(job)
    if job["topics"] is not None and job["pattern"] is not None:
        raise BadSetting("--topics and --pattern exclude each other")
    if job["topics"] is not None or job["pattern"] is not None:
        return settings, _source_options(job, settings)
    if not settings.compact:
        raise BadSetting("no topics are named", hint="give --topics, --pattern or --compact")
    return settings, None


def _settings(job: PipelineJob) -> LakeSettings:
    if job["prefix"] and job["schema"] is None:
        raise BadSetting("--prefix is for the columns of --schema", hint="give both, or none")
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
    """What the source is asked for: the columns that are kept, and those that are needed.

    They come in the order in which they are written, so that Spark need not copy rows for it.
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
    summary="Topics into Parquet files by date and topic, each message exactly once.",
    options=(
        Option("lake", "Directory of the lake: a path, or hdfs://…, s3a://….", required=True),
        Option("topics", "Topics to read, with commas between."),
        Option("pattern", "Or a regular expression that names of topics match; new ones join."),
        Option(
            "start",
            "Where a new lake begins: earliest, latest, or offsets as JSON.",
            default="earliest",
        ),
        Option("tags", 'Only messages with these tags: "a || b".'),
        Option("max_rows", "At most so many messages in a batch.", kind=int),
        Option(
            "schema",
            'Columns of JSON bodies: "id STRING NOT NULL, amount DOUBLE"; rows that '
            "do not fit go to <lake>/bad with the reason.",
        ),
        Option("prefix", "Put before the names of the schema's columns.", default=""),
        Option("columns", "Columns of the messages to keep, with commas between; * for all."),
        Option(
            "date_from",
            "The time whose date in UTC counts.",
            default=DATE_COLUMNS[0],
            choices=DATE_COLUMNS,
        ),
        Option("compression", "Of the Parquet files.", default="snappy", choices=CODECS),
        Option(
            "files_per_batch",
            "At most so many files for a topic and date in each batch: fewer tasks write then.",
            kind=int,
        ),
        Option("group", "Show progress as this consumer group."),
        Option(
            "skip_lost",
            "Go on where messages were deleted before they were read.",
            kind=bool,
            default=False,
        ),
        Option(
            "adopt", "Let a new checkpoint go on where the lake ends.", kind=bool, default=False
        ),
        Option(
            "compact",
            "Make large files of small ones for dates that are over; without topics "
            "nothing else is done.",
            kind=bool,
            default=False,
        ),
        Option(
            "large_mib",
            "What compaction makes files up to, in MiB.",
            kind=int,
            default=LARGE_BYTES >> 20,
        ),
    ),
    outputs=(
        PipelineOutput(
            "{lake}/data/date=…/topic=…", "The messages, or their JSON bodies as columns."
        ),
        PipelineOutput(
            "{lake}/bad/date=…/topic=…", "Messages whose body does not fit, with the reason."
        ),
    ),
    start=start,
    trigger="1 minute",
    verify=verify,
)
