"""Format `penstock-staging`: tasks write Parquet files themselves and return their paths.

Passing rows through Spark's JVM to its Parquet writer costs several times as much as reading them.
Here Arrow batches become Parquet files in the Python process, and Spark gets one row per file. The
pipeline `lake` uses it on file systems that are local paths on all workers.

Options besides those of the format `penstock`, whose columns must include `date` and `topic`:
`staging`, a directory, and `codec`. A task that fails leaves files behind; the pipeline removes the
directory later.
"""

import os
import uuid
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, InputPartition
from pyspark.sql.types import LongType, StringType, StructField, StructType

from penstock.arrow.message_schema import COLUMNS_WITHOUT_STATISTICS, DATE
from penstock.arrow.source_options import SourceOptions
from penstock.spark.source.batch_readers import read_ranges
from penstock.spark.source.stream_reader import TopicStreamReader
from penstock.spark.spark_schema import spark_schema
from penstock.spark.worker_entry import in_worker

NAME: Final = "penstock-staging"
STAGING: Final = "staging"
CODEC: Final = "codec"
GROUP_BYTES: Final = 64 * 1024 * 1024
"""The size of a row group in memory."""
FILES_OPEN_MAX: Final = 64
FILES: Final = pa.schema(
    [
        pa.field("path", pa.string(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("rows", pa.int64(), nullable=False),
    ]
)
_ESCAPED: Final = frozenset("\"#%'*/:=?\\\x7f{[]^")
"""Characters that Spark escapes in directory names, besides control characters."""


class StagingSource(DataSource):
    """The data source."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        kinds = (StringType(), LongType(), LongType())
        fields = zip(FILES.names, kinds, strict=True)
        return StructType([StructField(name, kind, nullable=False) for name, kind in fields])

    @in_worker()
    def streamReader(self, schema: StructType) -> "StagingReader":  # noqa: N802
        options = dict(self.options)
        folder, codec = options.pop(STAGING), options.pop(CODEC)
        return StagingReader(SourceOptions.of(options, stream=True), folder, codec)


class StagingReader(TopicStreamReader):
    """A stream of messages whose tasks return files instead of rows."""

    def __init__(self, options: SourceOptions, folder: str, codec: str) -> None:
        super().__init__(options, spark_schema(options.columns))
        self._folder = folder
        self._codec = codec

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with StagedFiles(self._folder, self._codec) as files:
            for batch in read_ranges(self._options, self._rows, partition):
                files.add(batch)
            yield files.finish()


class StagedFiles:
    """The Parquet files of a task, by date and topic."""

    def __init__(self, folder: str, codec: str) -> None:
        self._folder = folder
        self._codec = codec
        self._open: dict[tuple[date, str], _ParquetFile] = {}
        self._done: list[tuple[str, int, int]] = []

    def __enter__(self) -> "StagedFiles":
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._open.values():
            file.abandon()

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows of one topic."""
        topic = batch.column("topic")[0].as_py()
        days = batch.column(DATE)
        data = batch.drop_columns([DATE, "topic"])
        ends = pc.min_max(days)
        if ends["min"] == ends["max"]:
            self._file(ends["min"].as_py(), topic).add(data)
            return
        for day in pc.unique(days):
            self._file(day.as_py(), topic).add(data.filter(pc.equal(days, day)))

    def finish(self) -> pa.RecordBatch:
        """Close all files; returns their paths, sizes and row counts."""
        self._close_all()
        columns = zip(*self._done, strict=True) if self._done else ((), (), ())
        arrays = [pa.array(column, kind) for column, kind in zip(columns, FILES.types, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=FILES)

    def _file(self, day: date, topic: str) -> "_ParquetFile":
        file = self._open.get((day, topic))
        if file is None:
            if len(self._open) >= FILES_OPEN_MAX:
                self._close_all()
            place = Path(self._folder, "data", f"{DATE}={day}", f"topic={escaped(topic)}")
            file = self._open[day, topic] = _ParquetFile(place, self._codec)
        return file

    def _close_all(self) -> None:
        while self._open:
            _, file = self._open.popitem()
            self._done.append(file.close())


class _ParquetFile:
    """A Parquet file that is being written, a row group at a time."""

    def __init__(self, folder: Path, codec: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{uuid.uuid4().hex}.parquet"
        self._codec = codec
        self._writer: Any = None
        self._batches: list[pa.RecordBatch] = []
        self._size = 0
        self._rows = 0

    def add(self, batch: pa.RecordBatch) -> None:
        self._batches.append(batch)
        self._size += batch.nbytes
        self._rows += batch.num_rows
        if self._size >= GROUP_BYTES:
            self._write()

    def _write(self) -> None:
        table = pa.Table.from_batches(self._batches)
        if self._writer is None:
            searched = [
                name for name in table.schema.names if name not in COLUMNS_WITHOUT_STATISTICS
            ]
            self._writer = pq.ParquetWriter(
                self._path,
                table.schema,
                compression=self._codec,
                write_statistics=searched,
                store_schema=False,
            )
        self._writer.write_table(table, row_group_size=table.num_rows)
        self._batches.clear()
        self._size = 0

    def close(self) -> tuple[str, int, int]:
        """Finish the file; returns its path, size and row count."""
        if self._batches:
            self._write()
        self._writer.close()
        return str(self._path), os.path.getsize(self._path), self._rows

    def abandon(self) -> None:
        """Close the file descriptor after an error."""
        if self._writer is not None:
            self._writer.close()


def escaped(value: str) -> str:
    """A value as Spark escapes it in the path of a partition."""
    return "".join(
        f"%{ord(each):02X}" if each in _ESCAPED or each < " " else each for each in value
    )


def files_of(rows: "list[Mapping[str, Any]]", root: str) -> list[tuple[str, int, int]]:
    """The files that tasks returned: paths relative to the root, sizes, row counts."""
    return [(os.path.relpath(row["path"], root), row["size"], row["rows"]) for row in rows]
