"""Readers of batch queries: topics by offset ranges, and the log files of a store by slices.

A stream reads the ranges of its micro-batches by the same functions.
"""

import gc
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    DataSourceReader,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from penstock.client.namespace import with_namespace
from penstock.errors import BadSetting
from penstock.spark.message_schema import DATE, arrow_schema, stored_columns
from penstock.spark.source.offset_ranges import QueueRange, split
from penstock.spark.source.queue_offsets import (
    QueueOffsets,
    readable_ranges,
    report_losses,
    resolve_offsets,
)
from penstock.spark.source.range_reader import ReadSettings, read_range
from penstock.spark.source.source_options import SourceOptions
from penstock.spark.worker_entry import in_worker
from penstock.spark.worker_logs import show_warnings

if TYPE_CHECKING:
    from penstock.spark.cluster_metadata import ClusterMetadata
    from penstock.wire.bodies.client_bodies import MessageQueue

_GROUP_TOPICS: Final = "%RETRY%|%DLQ%"
"""The prefixes of retry and dead-letter topics, which come before the namespace."""


class ArrowRows:
    """Converts batches to Spark's schema, nullability included, and topics to names without the
    namespace."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        wanted = to_arrow_schema(schema, timezone="UTC")
        stored = arrow_schema(stored_columns(options.columns))
        self._schema = None if wanted.equals(stored) else wanted
        self._namespace = options.connection.namespace if "topic" in options.columns else ""

    def fit(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same rows in Spark's schema."""
        if self._schema is None and not self._namespace:
            return batches
        return map(self._fitted, batches)

    def _fitted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        wanted = self._schema or batch.schema
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        if DATE in wanted.names:
            columns[DATE] = columns["store_timestamp"].cast(pa.date32())
        if self._namespace:
            columns["topic"] = pc.replace_substring_regex(
                columns["topic"],
                pattern=f"^({_GROUP_TOPICS})?{re.escape(self._namespace)}%",
                replacement=r"\1",
            )
        arrays = [columns[field.name].cast(field.type) for field in wanted]
        return pa.RecordBatch.from_arrays(arrays, schema=wanted)


def prepare_worker() -> None:
    """Prepare a Spark worker process for many tasks.

    Spark runs the garbage collector after each task, which takes 40 ms with all modules loaded.
    Objects that exist by now are frozen, so that it skips them.
    """
    show_warnings()
    if not gc.get_freeze_count():
        gc.freeze()


def read_ranges(
    options: SourceOptions, rows: ArrowRows, partition: InputPartition
) -> Iterator[pa.RecordBatch]:
    """Read the ranges of one task, one after another."""
    reading = ReadSettings(
        columns=stored_columns(options.columns),
        group=options.group,
        tags=options.tags,
        fail_on_data_loss=options.fail_on_data_loss,
        timeout_ms=options.read_timeout_ms,
    )
    prepare_worker()
    for part in partition.value or ():
        yield from rows.fit(read_range(options.connection, part, reading))


class TopicReader(DataSourceReader):
    """Reads ranges of queues that are fixed when the query is planned."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._rows = ArrowRows(options, schema)

    @in_worker()
    def partitions(self) -> list[InputPartition]:
        from penstock.spark.cluster_metadata import ClusterMetadata

        options = self._options
        with ClusterMetadata(options.connection, timeout_ms=options.read_timeout_ms) as cluster:
            queues = cluster.required_queues(options.topics)
            begins, ends = cluster.all_min_offsets(queues), cluster.all_max_offsets(queues)
            start = boundary_offsets(cluster, options, "starting", begins, ends)
            end = boundary_offsets(cluster, options, "ending", begins, ends)
        return make_partitions(options, _checked_start(options, start, end), end, begins, ends)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_ranges(self._options, self._rows, partition)


def boundary_offsets(
    cluster: "ClusterMetadata",
    options: SourceOptions,
    side: str,
    begins: QueueOffsets,
    ends: QueueOffsets,
) -> dict["MessageQueue", int]:
    """The starting or ending offset of each queue, from the options."""
    wanted = options.starting if side == "starting" else options.ending
    if wanted == "earliest":
        return dict(begins)
    if wanted == "latest":
        return dict(ends)
    if isinstance(wanted, int):
        found = cluster.all_offsets_at(ends, wanted)
        # Messages may have arrived since the ends were queried.
        return {q: min(max(found[q], begins[q]), ends[q]) for q in ends}
    assert not isinstance(wanted, str)
    return resolve_offsets(wanted, begins, ends, f"{side}Offsets")


def _checked_start(options: SourceOptions, start: QueueOffsets, end: QueueOffsets) -> QueueOffsets:
    """The starting offsets, none after the end.

    A timestamp or `latest` after the end is an empty range; an offset after the end is an error.
    """
    if isinstance(options.starting, Mapping) and isinstance(options.ending, Mapping):
        for queue in sorted(start):
            if start[queue] > end[queue]:
                raise BadSetting(
                    f"queue {queue.queue_id} of {queue.topic} at {queue.broker_name}: "
                    f"startingOffsets has {start[queue]}, endingOffsets {end[queue]}",
                    hint="start before the end",
                )
    return {queue: min(offset, end[queue]) for queue, offset in start.items()}


def make_partitions(
    options: SourceOptions,
    start: QueueOffsets,
    end: QueueOffsets,
    begins: QueueOffsets,
    ends: QueueOffsets,
) -> list[InputPartition]:
    """The ranges of each task; raises DataLost if messages are missing and `failOnDataLoss` is
    set."""
    found, losses = readable_ranges(start, end, begins, ends)
    if losses:
        report_losses(losses, fail=options.fail_on_data_loss)
    ranges = [
        QueueRange(queue.topic, queue.broker_name, queue.queue_id, first, until)
        for queue, (first, until) in found.items()
    ]
    return [InputPartition(parts) for parts in split(ranges, options.partitions_min)]


class LogReader(DataSourceReader):
    """Reads the commit-log files of a store in slices, without a broker."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        from penstock.spark.source.log_reader import LogSelection

        assert options.log_path is not None
        self._path = options.log_path
        self._rows = ArrowRows(options, schema)
        self._tasks_min = options.partitions_min
        topics, pattern = _log_topics(options)
        self._scan = LogSelection(
            columns=stored_columns(options.columns),
            topics=topics,
            pattern=pattern,
            tags=options.tags,
            from_ms=options.starting_ms,
            until_ms=options.ending_ms,
            broker=options.broker,
            check_crc=options.check_crc,
            fail_on_data_loss=options.fail_on_data_loss,
        )

    @in_worker()
    def partitions(self) -> list[InputPartition]:
        from penstock.spark.source.log_reader import plan_scan

        slices = plan_scan(self._path, self._scan, tasks_min=self._tasks_min)
        tasks = groupby(slices, key=lambda part: part.task)
        return [InputPartition(tuple(parts)) for _, parts in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        from penstock.spark.source.log_reader import read_slice

        if partition.value is not None:  # None if there is no partition
            prepare_worker()
            for part in partition.value:
                yield from self._rows.fit(read_slice(part, self._scan))


def _log_topics(options: SourceOptions) -> tuple[frozenset[str] | None, str | None]:
    """Names or pattern of the topics as the log has them, with the namespace."""
    namespace, chosen = options.connection.namespace, options.topics
    if chosen.names:
        return frozenset(with_namespace(namespace, name) for name in chosen.names), None
    if not namespace:
        return None, chosen.pattern
    return None, f"({_GROUP_TOPICS})?{re.escape(namespace)}%(?:{chosen.pattern or '.*'})"
