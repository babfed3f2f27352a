"""Readers of batch queries: topics by offset ranges, and the log files of a store by slices.

A stream reads the ranges of its micro-batches by the same functions.
"""

import gc
from collections.abc import Iterator
from itertools import groupby

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from penstock.arrow.batch_plan import existing_ranges
from penstock.arrow.offset_ranges import split
from penstock.arrow.queue_offsets import QueueOffsets
from penstock.arrow.range_reader import ReadSettings
from penstock.arrow.schema_fitting import SchemaFitting
from penstock.arrow.source_options import SourceOptions
from penstock.spark.source.range_tasks import read_range
from penstock.spark.worker_entry import in_worker
from penstock.spark.worker_logs import show_warnings


def fitting(options: SourceOptions, schema: StructType) -> SchemaFitting:
    """The conversion of batches to Spark's schema."""
    return SchemaFitting(options, to_arrow_schema(schema, timezone="UTC"))


def prepare_worker() -> None:
    """Prepare a Spark worker process for many tasks.

    Spark runs the garbage collector after each task, which takes 40 ms with all modules loaded.
    Objects that exist by now are frozen, so that it skips them.
    """
    show_warnings()
    if not gc.get_freeze_count():
        gc.freeze()


def read_ranges(
    options: SourceOptions, rows: SchemaFitting, partition: InputPartition
) -> Iterator[pa.RecordBatch]:
    """Read the ranges of one task, one after another."""
    reading = ReadSettings.of(options)
    prepare_worker()
    for part in partition.value or ():
        yield from rows.fit(read_range(options.connection, part, reading))


class TopicReader(DataSourceReader):
    """Reads ranges of queues that are fixed when the query is planned."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._rows = fitting(options, schema)

    @in_worker()
    def partitions(self) -> list[InputPartition]:
        from penstock.arrow.cluster_metadata import ClusterMetadata

        options = self._options
        with ClusterMetadata(options.connection, timeout_ms=options.read_timeout_ms) as cluster:
            ranges = cluster.batch_ranges(options)
        return [InputPartition(parts) for parts in split(ranges, options.partitions_min)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_ranges(self._options, self._rows, partition)


def make_partitions(
    options: SourceOptions,
    start: QueueOffsets,
    end: QueueOffsets,
    begins: QueueOffsets,
    ends: QueueOffsets,
) -> list[InputPartition]:
    """The ranges of each task; raises DataLost if messages are missing and `failOnDataLoss` is
    set."""
    ranges = existing_ranges(options, start, end, begins, ends)
    return [InputPartition(parts) for parts in split(ranges, options.partitions_min)]


class LogReader(DataSourceReader):
    """Reads the commit-log files of a store in slices, without a broker."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        from penstock.arrow.log_slices import LogSelection

        assert options.log_path is not None
        self._path = options.log_path
        self._rows = fitting(options, schema)
        self._tasks_min = options.partitions_min
        self._scan = LogSelection.of(options)

    @in_worker()
    def partitions(self) -> list[InputPartition]:
        from penstock.arrow.log_slices import plan_scan

        slices = plan_scan(self._path, self._scan, tasks_min=self._tasks_min)
        tasks = groupby(slices, key=lambda part: part.task)
        return [InputPartition(tuple(parts)) for _, parts in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from penstock.arrow.log_reader import read_slice

        if partition.value is not None:  # None if there is no partition
            prepare_worker()
            for part in partition.value:
                yield from self._rows.fit(read_slice(part, self._scan))
