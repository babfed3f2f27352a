"""A table of Parquet files that a stream fills, each batch exactly once.

    <table>/data/*.parquet        the rows, for any reader of Parquet
    <table>/_penstock/…           the books (`publication.py`, `ownership.py`), and the checkpoint
    <table>/_penstock/settings.json    what the query was begun with, and has to go on with

A batch that is run again after a crash runs all of its plan, since the state of its operators has
to move on, and is then seen to be in the table already.
"""

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from penstock.errors import LakeRefused
from penstock.spark.pipelines.lake.lake_files import HadoopFiles
from penstock.spark.pipelines.lake.lake_owner import Claim
from penstock.spark.pipelines.lake.publication import ROOM, Ledger
from penstock.spark.pipelines.query_errors import translate_batch_errors
from penstock.spark.pipelines.running import Trigger

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_SETTINGS: Final = f"{ROOM}/settings.json"


class TableWriter:
    """Brings the batches of one query into a table."""

    def __init__(self, spark: "SparkSession", table: str, checkpoint: str | None = None) -> None:
        """Take the table; raises LakeRefused if it is another checkpoint's."""
        self._files = HadoopFiles(spark, table)
        place = checkpoint or self._files.url(f"{ROOM}/checkpoint")
        self._checkpoint = HadoopFiles(spark, place)
        self._ledger = Ledger(self._files)
        self._claim = Claim(
            self._files, self._checkpoint, self._files.url(), self._checkpoint.url()
        )
        try:
            self._deed = self._claim.take(adopt=False)
        except LakeRefused as error:
            # What a query remembers of users is in its checkpoint: no other one can go on with it.
            hint = "use the checkpoint that wrote it, or choose another --output"
            raise LakeRefused(str(error), hint=hint) from None
        self._ledger.sweep(self.query, self._deed.number)
        self._make: Callable[[DataFrame], DataFrame] = lambda rows: rows
        self._announce: Callable[[DataFrame, int], None] | None = None

    @property
    def query(self) -> str:
        """The id of the query that the table belongs to."""
        return self._deed.query

    def hold_to(self, settings: Mapping[str, str]) -> None:
        """Note what a new query begins with; raises LakeRefused where one goes on otherwise."""
        if not self._checkpoint.walk("offsets"):
            self._files.remove(_SETTINGS)
        if self._files.write_new(_SETTINGS, json.dumps(dict(settings)).encode()):
            return
        begun = json.loads(self._files.read(_SETTINGS))
        for name, value in settings.items():
            if begun.get(name, value) != value:
                raise LakeRefused(
                    f"{self._files.url()} was begun with {name} {begun[name]}, which can't become "
                    f"{value}: what is known of users who still wait was made for that",
                    hint="start it as before, or choose another --output",
                )

    def start(
        self,
        rows: "DataFrame",
        trigger: Trigger,
        name: str,
        *,
        make: "Callable[[DataFrame], DataFrame] | None" = None,
        announce: "Callable[[DataFrame, int], None] | None" = None,
    ) -> "StreamingQuery":
        """Start the query. `make` turns the rows of a batch into the table's; `announce` sends
        what else is to be said of them, before the batch is in the table: for batch 0 in any case,
        for others if they have rows."""
        self._make = make or self._make
        self._announce = announce
        writer = rows.writeStream.queryName(name).outputMode("append")
        writer = writer.option("checkpointLocation", self._checkpoint.url())
        return trigger.apply(writer.foreachBatch(self._write_batch)).start()

    @translate_batch_errors()
    def _write_batch(self, rows: "DataFrame", number: int) -> None:
        rows.persist()
        try:
            # Counting runs every partition, which `isEmpty` would not: each has state to commit.
            count = rows.count()
            self._check_held()
            if self._ledger.settle(self.query, number):
                return
            attempt = self._ledger.attempt(self.query, number, self._deed.number)
            if self._announce is not None and (count or not number):
                self._announce(rows, number)
            if count:
                self._write(self._make(rows), f"{attempt}/data")
            offsets = self._claim.offsets(number)
            self._ledger.publish(self.query, number, attempt, offsets, self._check_held)
        finally:
            rows.unpersist()

    def _check_held(self) -> None:
        self._claim.check_held(self._deed)

    def _write(self, rows: "DataFrame", folder: str) -> None:
        rows.sparkSession.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        rows.coalesce(1).write.parquet(self._files.url(folder))
