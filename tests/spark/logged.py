"""The format `logged`: Penstock's source, whose log goes to a file.

Option besides the source's: `logFile`. What plans, streams and tasks log is there, a line each;
otherwise it is on the stderr of Spark's processes, where a test can't see it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.arrow.source_options import SourceOptions
from penstock.spark.source.batch_readers import TopicReader
from penstock.spark.source.data_source import DefaultSource
from penstock.spark.source.stream_reader import TopicStreamReader

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import InputPartition
    from pyspark.sql.types import StructType


def log_to(path: str) -> None:
    """Write all log lines of this process to a file only."""
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    root.addHandler(logging.FileHandler(path))


class LoggedReader(TopicReader):
    """A batch read."""

    log_file = ""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        log_to(self.log_file)
        return super().read(partition)


class LoggedStreamReader(TopicStreamReader):
    """A stream."""

    log_file = ""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        log_to(self.log_file)
        return super().read(partition)


class LoggedSource(DefaultSource):
    """The format."""

    @classmethod
    def name(cls) -> str:
        return "logged"

    def schema(self) -> StructType:
        return DefaultSource(self._others()).schema()

    def reader(self, schema: StructType) -> LoggedReader:
        reader = LoggedReader(SourceOptions.of(self._others()), schema)
        reader.log_file = self._log_file()
        return reader

    def streamReader(self, schema: StructType) -> LoggedStreamReader:  # noqa: N802
        reader = LoggedStreamReader(SourceOptions.of(self._others(), stream=True), schema)
        reader.log_file = self._log_file()
        return reader

    def _log_file(self) -> str:
        path = self.options["logFile"]
        log_to(path)
        return path

    def _others(self) -> dict[str, str]:
        return {name: value for name, value in self.options.items() if name.lower() != "logfile"}
