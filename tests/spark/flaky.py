"""The format `flaky`: Penstock's sink with a writer that breaks now and then, in any of its steps.

Options besides the sink's: `breaks`, a directory, and `breaksMax`. Each break leaves a file there,
and when there are enough of them nothing breaks any more. All of it runs in Spark's Python workers.
"""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage

from penstock.spark.sink import sink_client
from penstock.spark.sink.data_writer import make_stream_writer

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

CHANCE = 0.3


class BrokenError(Exception):
    """It broke."""


class FlakySource(DataSource):
    """The format."""

    @classmethod
    def name(cls) -> str:
        return "flaky"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        options = dict(self.options)
        directory, most = options.pop("breaks"), int(options.pop("breaksmax"))
        return FlakyWriter(make_stream_writer(options, schema, overwrite), directory, most)


class FlakyWriter(DataSourceStreamArrowWriter):
    """Breaks before, within and after what the writer does."""

    def __init__(self, writer: DataSourceStreamArrowWriter, directory: str, most: int) -> None:
        self._writer = writer
        self._directory = directory
        self._most = most

    def _break(self, where: str) -> None:
        if random.random() < CHANCE and len(os.listdir(self._directory)) < self._most:
            path = os.path.join(self._directory, f"{where}-{uuid.uuid4().hex}")
            os.close(os.open(path, os.O_CREAT))
            raise BrokenError(where)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        self._break("task before")

        def rows() -> Iterator[pa.RecordBatch]:
            yield from iterator
            self._break("task within")

        written = self._writer.write(rows())
        self._break("task after")
        return written

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._break("commit before")
        end = sink_client.SinkClient._end
        ends = random.randint(0, 30)

        async def ending(client: Any, *args: Any) -> str:
            nonlocal ends
            ends -= 1
            if ends == 0:
                self._break("commit within")
            return await end(client, *args)

        setattr(sink_client.SinkClient, "_end", ending)  # noqa: B010
        try:
            self._writer.commit(messages, batchId)
        finally:
            setattr(sink_client.SinkClient, "_end", end)  # noqa: B010
        self._break("commit after")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._break("abort before")
        self._writer.abort(messages, batchId)
