"""The format `flaky`: Penstock's sink with a writer that fails at random steps.

Options besides those of the sink: the directory `breaks` and the number `breaksMax`. Each failure
creates a file in the directory; when there are `breaksMax` files, nothing fails any more. All of
this runs in Spark's Python workers.
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

FAILURE_PROBABILITY = 0.3


class BrokenError(Exception):
    """A simulated failure."""


class FlakySource(DataSource):
    """The data source of the format."""

    @classmethod
    def name(cls) -> str:
        return "flaky"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        options = dict(self.options)
        directory, most = options.pop("breaks"), int(options.pop("breaksmax"))
        return FlakyWriter(make_stream_writer(options, schema, overwrite), directory, most)


class FlakyWriter(DataSourceStreamArrowWriter):
    """Fails before, during and after the steps of the writer."""

    def __init__(self, writer: DataSourceStreamArrowWriter, directory: str, most: int) -> None:
        self._writer = writer
        self._directory = directory
        self._most = most

    def _fail_sometimes(self, where: str) -> None:
        if random.random() < FAILURE_PROBABILITY and len(os.listdir(self._directory)) < self._most:
            path = os.path.join(self._directory, f"{where}-{uuid.uuid4().hex}")
            os.close(os.open(path, os.O_CREAT))
            raise BrokenError(where)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        self._fail_sometimes("task before")

        def rows() -> Iterator[pa.RecordBatch]:
            yield from iterator
            self._fail_sometimes("task during")

        written = self._writer.write(rows())
        self._fail_sometimes("task after")
        return written

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._fail_sometimes("commit before")
        end = sink_client.SinkClient._end
        ends = random.randint(0, 30)

        async def end_or_fail(client: Any, *args: Any) -> str:
            nonlocal ends
            ends -= 1
            if ends == 0:
                self._fail_sometimes("commit during")
            return await end(client, *args)

        setattr(sink_client.SinkClient, "_end", end_or_fail)  # noqa: B010
        try:
            self._writer.commit(messages, batchId)
        finally:
            setattr(sink_client.SinkClient, "_end", end)  # noqa: B010
        self._fail_sometimes("commit after")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._fail_sometimes("abort before")
        self._writer.abort(messages, batchId)
