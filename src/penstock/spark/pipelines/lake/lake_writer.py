"""Writes a stream of messages to a lake: Parquet files by date and topic, exactly once.

    <lake>/data/date=2026-08-01/topic=orders/*.parquet

Any Parquet reader can read the files; no table format or transaction log is needed. The commit of
a batch is in `batch_commits.py`, the ownership of a lake in `lake_owner.py`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final
from weakref import WeakSet

from penstock.arrow.message_schema import (
    COLUMNS_WITHOUT_STATISTICS,
    DATE,
    wanted_columns,
)
from penstock.errors import BadSetting, LakeDamaged
from penstock.spark.pipelines.lake.batch_commits import METADATA_DIR, BatchCommitter
from penstock.spark.pipelines.lake.json_bodies import BAD, BodySchema
from penstock.spark.pipelines.lake.lake_compaction import (
    LARGE_BYTES,
    CompactionResult,
    compact_lake,
)
from penstock.spark.pipelines.lake.lake_files import File, HadoopFiles
from penstock.spark.pipelines.lake.lake_owner import LakeLease
from penstock.spark.pipelines.lake.schema_text import check_schema_text
from penstock.spark.pipelines.query_errors import translate_batch_errors
from penstock.spark.pipelines.query_start import start_query
from penstock.spark.pipelines.running import PipelineJob, Trigger
from penstock.spark.spark_schema import spark_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

OPEN_FILES_MAX: Final = 64
"""Files that a task writes at a time; with more, Spark sorts the rows by date and topic."""
DATE_COLUMNS: Final = ("store_timestamp", "born_timestamp")
PARTITIONS: Final = (DATE, "topic")
CODECS: Final = ("snappy", "zstd", "gzip", "lz4", "none")
_LZ4: Final = "lz4_raw"
"""Spark's `lz4` is a format of Hadoop that other readers do not support."""
_COMMITTER: Final = "mapreduce.fileoutputcommitter.algorithm.version"
"""Version 1: files of failed or slow task attempts never reach the files of a finished job."""
_NO_STATISTICS: Final = {
    f"parquet.column.statistics.enabled#{path}": "false"
    for paths in COLUMNS_WITHOUT_STATISTICS.values()
    for path in paths
}
_DAY_US: Final = 86_400_000_000
_sessions_with_staging: "Final[WeakSet[SparkSession]]" = WeakSet()
"""Sessions in which the staging format is registered; Spark warns of a second registration."""


@dataclass(frozen=True)
class LakeSettings:
    """How a lake is written."""

    schema: str | None = None
    """Columns of JSON bodies as Spark DDL; without it bodies are written unchanged."""
    prefix: str = ""
    """Prefix for the names of these columns."""
    date_from: str = "store_timestamp"
    """The timestamp column whose UTC date selects the partition."""
    columns: tuple[str, ...] = ()
    """Columns of messages to write; empty for all columns."""
    files_per_batch: int | None = None
    """Maximum number of files per topic and date in a batch."""
    compression: str = "snappy"
    """One of `CODECS`."""
    compact: bool = False
    """Compact past dates at the start and at the end of each day."""
    large_bytes: int = LARGE_BYTES
    """Target file size of compaction."""

    @property
    def is_plain(self) -> bool:
        """Whether messages are written unchanged, by the date of their store time."""
        return (
            self.schema is None
            and self.files_per_batch is None
            and self.date_from == DATE_COLUMNS[0]
        )

    @property
    def codec(self) -> str:
        """The compression by its name in Spark."""
        return _LZ4 if self.compression == "lz4" else self.compression

    def body_schema(self, columns: Iterable[str]) -> BodySchema | None:
        """The schema of bodies beside these columns; raises BadSetting."""
        if self.schema is None:
            return None
        return BodySchema.parse(self.schema, prefix=self.prefix, taken=_taken(columns))

    def check_schema(self, columns: Iterable[str]) -> None:
        """As `body_schema`, as far as it can be checked without Spark."""
        if self.schema is not None:
            check_schema_text(self.schema, prefix=self.prefix, taken=_taken(columns))


def _taken(columns: Iterable[str]) -> set[str]:
    """The names that columns of bodies can't have."""
    return {*columns, *PARTITIONS} - {"body"}


def write_lake(
    messages: "DataFrame",
    lake: str,
    *,
    checkpoint: str | None = None,
    trigger: str = "1 minute",
    settings: LakeSettings | None = None,
    name: str = "lake",
) -> "StreamingQuery":
    """Write a stream with the columns `topic` and `store_timestamp` to a lake, exactly once.

    Spark must be able to replay the stream, as it is with format `penstock`. The default checkpoint
    is `<lake>/_penstock/checkpoint`. Raises LakeRefused if the lake belongs to another checkpoint.
    """
    writer = LakeWriter(messages.sparkSession, lake, settings or LakeSettings(), checkpoint)
    return writer.start(messages, Trigger.parse(trigger), name)


class LakeWriter:
    """Writes the batches of one query to a lake."""

    def __init__(
        self,
        spark: "SparkSession",
        lake: str,
        settings: LakeSettings,
        checkpoint: str | None = None,
        *,
        adopt: bool = False,
    ) -> None:
        """Become the owner of the lake; raises LakeRefused if it belongs to another checkpoint."""
        self.files = HadoopFiles(spark, lake)
        self.committer = BatchCommitter(self.files)
        self._spark = spark
        self._settings = settings
        self._checkpoint = HadoopFiles(
            spark, checkpoint or self.files.url(f"{METADATA_DIR}/checkpoint")
        )
        self._lease = LakeLease(
            self.files, self._checkpoint, self.files.url(), self._checkpoint.url()
        )
        self.owner = self._lease.acquire(adopt=adopt)
        self.committer.remove_leftovers(self.owner.query, self.owner.number)
        self._compacted_on = datetime.now(UTC).date()

    def start(
        self, messages: "DataFrame", trigger: Trigger, name: str, *, has_date: bool = False
    ) -> "StreamingQuery":
        """Start the query; with `has_date` the stream has a column with the partition's date."""
        from pyspark.sql import functions as f

        kept = self._kept_columns(messages.columns, has_date=has_date)
        body = self._settings.body_schema(kept)
        # Arithmetic instead of to_date(), which uses the time zone of the session.
        days = f"unix_micros({self._settings.date_from}) div {_DAY_US}"
        day = f.col(DATE) if has_date else f.expr(f"date_from_unix_date(cast({days} as int))")
        rows = messages.select(day.alias(DATE), *(f.col(column) for column in kept))
        good = rows if body is None else body.good(body.parsed(rows))
        columns = {each.name: each.dataType.simpleString() for each in good.schema.fields}
        self.owner = self._lease.add_columns(self.owner, columns)

        @translate_batch_errors()
        def write_batch(rows: "DataFrame", number: int) -> None:
            self._write_batch(rows, number, body)

        return self._start(rows, trigger, name, write_batch)

    def start_staged(
        self, job: PipelineJob, source: Mapping[str, str], local: str, name: str
    ) -> "StreamingQuery":
        """Start the query with tasks that write the files themselves (`spark.sink.staging`).

        `local` is the path of the lake, and `source` has the options of format `penstock`.
        """
        from penstock.spark.sink.staging import CODEC, STAGING, StagingSource, files_of

        kept = wanted_columns(source["columns"])
        columns = {each.name: each.dataType.simpleString() for each in spark_schema(kept).fields}
        self.owner = self._lease.add_columns(self.owner, columns)
        attempt = self.committer.new_run_attempt(self.owner.query, self.owner.number)
        if self._spark not in _sessions_with_staging:
            self._spark.dataSource.register(StagingSource)
            _sessions_with_staging.add(self._spark)
        staging = {STAGING: f"{local}/{attempt}", CODEC: self._settings.compression}
        staged = job.stream(self._spark, StagingSource.name(), **source, **staging)

        @translate_batch_errors()
        def commit_batch(rows: "DataFrame", number: int) -> None:
            if self._is_committed(number):
                return
            files = files_of([row.asDict() for row in rows.collect()], local)
            job.rows[name, number] = sum(count for _, _, count in files)
            self._commit(number, attempt, [File(path, size) for path, size, _ in files])

        return self._start(staged, job.trigger, name, commit_batch)

    def compact(self) -> CompactionResult:
        """Compact the dates before today."""
        self._compacted_on = datetime.now(UTC).date()
        return compact_lake(
            self._spark,
            self.files.url(),
            large_bytes=self._settings.large_bytes,
            compression=self._settings.codec,
        )

    def _start(
        self,
        rows: "DataFrame",
        trigger: Trigger,
        name: str,
        on_batch: "Callable[[DataFrame, int], None]",
    ) -> "StreamingQuery":
        writer = rows.writeStream.queryName(name).option(
            "checkpointLocation", self._checkpoint.url()
        )
        return start_query(trigger.apply(writer.foreachBatch(on_batch)).start)

    def _write_batch(self, rows: "DataFrame", number: int, body: BodySchema | None) -> None:
        """Write and commit a batch, unless it is committed already."""
        _configure(rows.sparkSession)
        if self._is_committed(number):
            return
        attempt = self.committer.new_attempt(self.owner.query, number, self.owner.number)
        if self._settings.files_per_batch is not None:
            rows = rows.coalesce(self._settings.files_per_batch)
        if body is None:
            self._write(rows, f"{attempt}/data")
        else:
            self._write_parsed(body, rows, attempt)
        self._commit(number, attempt)

    def _is_committed(self, number: int) -> bool:
        """Whether a batch is committed; raises LakeRefused if another run owns the lake."""
        self._check_owner()
        return self.committer.finish(self.owner.query, number)

    def _commit(self, number: int, attempt: str, written: Sequence[File] | None = None) -> None:
        offsets = self._lease.offsets(number)
        if not offsets:
            raise LakeDamaged(
                f"the checkpoint {self._checkpoint.url()} does not have batch {number} any more",
                hint="if it was deleted, continue with a new checkpoint and --adopt",
            )
        self.committer.commit(
            self.owner.query, number, attempt, offsets, self._check_owner, written
        )
        if self._settings.compact and self._compacted_on != datetime.now(UTC).date():
            self.compact()

    def _check_owner(self) -> None:
        self._lease.check(self.owner)

    def _kept_columns(self, columns: Sequence[str], *, has_date: bool) -> list[str]:
        """The columns of the stream that are used; raises BadSetting if one does not exist."""
        kept = list(self._settings.columns or columns)
        if has_date and DATE in kept:
            kept.remove(DATE)
        if "topic" not in kept:
            kept.insert(0, "topic")
        if self._settings.schema is not None and "body" not in kept:
            kept.append("body")
        if DATE in kept:
            raise BadSetting(
                "the stream has a column 'date', which the lake adds itself",
                hint="rename the column",
            )
        needed = (*kept, *([] if has_date else [self._settings.date_from]))
        for name in needed:
            if name not in columns:
                raise BadSetting(
                    f"the stream has no column {name!r}",
                    hint=f"its columns are {', '.join(columns)}",
                )
        return kept

    def _write(self, rows: "DataFrame", folder: str) -> None:
        writer = rows.write.partitionBy(*PARTITIONS)
        options = {"compression": self._settings.codec, _COMMITTER: "1", **_NO_STATISTICS}
        writer.options(**options).parquet(self.files.url(folder))

    def _write_parsed(self, body: BodySchema, rows: "DataFrame", attempt: str) -> None:
        """Write the good rows; only if there are bad rows, read the batch again for them."""
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
                f"a batch had {count:,} bad rows at first, but {second.get['rows']:,} when it was "
                "read again",
                hint="start again; the batch is repeated",
            )


def _configure(session: "SparkSession") -> None:
    """Set options of the session of a query, which no other query uses."""
    session.conf.set("spark.sql.maxConcurrentOutputFileWriters", str(OPEN_FILES_MAX))
    session.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
