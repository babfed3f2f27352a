"""Writes a stream to a table of Parquet files, each batch exactly once.

    <table>/data/*.parquet              the rows
    <table>/_penstock/…                 metadata as in a lake, and the checkpoint
    <table>/_penstock/settings.json     settings that can't be changed after the first batch

A batch that is run again after a crash runs its whole plan, because the state of its operators must
advance. Then it finds that it is committed already.
"""

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from penstock.errors import LakeRefused
from penstock.spark.pipelines.lake.batch_commits import METADATA_DIR, BatchCommitter
from penstock.spark.pipelines.lake.lake_files import HadoopFiles
from penstock.spark.pipelines.lake.lake_owner import LakeLease
from penstock.spark.pipelines.query_errors import translate_batch_errors
from penstock.spark.pipelines.running import Trigger

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    Transform = Callable[[DataFrame], DataFrame]
    BeforeCommit = Callable[[DataFrame, int], None]

_SETTINGS: Final = f"{METADATA_DIR}/settings.json"


class TableWriter:
    """Writes the batches of one query to a table."""

    def __init__(self, spark: "SparkSession", table: str, checkpoint: str | None = None) -> None:
        """Become the owner of the table; raises LakeRefused if another checkpoint owns it."""
        self._files = HadoopFiles(spark, table)
        self._checkpoint = HadoopFiles(
            spark, checkpoint or self._files.url(f"{METADATA_DIR}/checkpoint")
        )
        self._committer = BatchCommitter(self._files)
        self._lease = LakeLease(
            self._files, self._checkpoint, self._files.url(), self._checkpoint.url()
        )
        try:
            self._owner = self._lease.acquire(adopt=False)
        except LakeRefused as error:
            # The checkpoint contains the state of users, so that no other one can continue.
            hint = "use the checkpoint that wrote it, or choose another --output"
            raise LakeRefused(str(error), hint=hint) from None
        self._committer.remove_leftovers(self.query, self._owner.number)

    @property
    def query(self) -> str:
        """The id of the query that owns the table."""
        return self._owner.query

    def check_settings(self, settings: Mapping[str, str]) -> None:
        """Record the settings of a new query; raises LakeRefused if they have changed later."""
        if not self._checkpoint.walk("offsets"):
            self._files.remove(_SETTINGS)
        if self._files.write_new(_SETTINGS, json.dumps(dict(settings)).encode()):
            return
        recorded = json.loads(self._files.read(_SETTINGS))
        for name, value in settings.items():
            if recorded.get(name, value) != value:
                raise LakeRefused(
                    f"{self._files.url()} was started with {name} {recorded[name]}, which can't be "
                    f"changed to {value}: the state of waiting users depends on it",
                    hint="use the same options as before, or choose another --output",
                )

    def start(
        self,
        rows: "DataFrame",
        trigger: Trigger,
        name: str,
        *,
        transform: "Transform | None" = None,
        before_commit: "BeforeCommit | None" = None,
    ) -> "StreamingQuery":
        """Start the query.

        `transform` turns the rows of a batch into rows of the table. `before_commit` is called with
        the rows and the number of each batch that has rows, and of batch 0 in any case.
        """

        @translate_batch_errors()
        def write_batch(rows: "DataFrame", number: int) -> None:
            self._write_batch(rows, number, transform, before_commit)

        writer = rows.writeStream.queryName(name).outputMode("append")
        writer = writer.option("checkpointLocation", self._checkpoint.url())
        return trigger.apply(writer.foreachBatch(write_batch)).start()

    def _write_batch(
        self,
        rows: "DataFrame",
        number: int,
        transform: "Transform | None",
        before_commit: "BeforeCommit | None",
    ) -> None:
        rows.persist()
        try:
            # count() runs all partitions, which isEmpty() would not; each has state to commit.
            count = rows.count()
            self._check_owner()
            if self._committer.finish(self.query, number):
                return
            attempt = self._committer.new_attempt(self.query, number, self._owner.number)
            if before_commit is not None and (count or not number):
                before_commit(rows, number)
            if count:
                table = rows if transform is None else transform(rows)
                self._write(table, f"{attempt}/data")
            offsets = self._lease.offsets(number)
            self._committer.commit(self.query, number, attempt, offsets, self._check_owner)
        finally:
            rows.unpersist()

    def _check_owner(self) -> None:
        self._lease.check(self._owner)

    def _write(self, rows: "DataFrame", folder: str) -> None:
        rows.sparkSession.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        rows.coalesce(1).write.parquet(self._files.url(folder))
