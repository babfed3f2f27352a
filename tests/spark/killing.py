"""The format `killing`: Penstock's sink with a writer that kills the driver at a given step.

A step is a request of the sink before it is sent, or a half message after it was stored. Options
besides those of the sink: `killBatch`, `killStep`, `driver` (its process group), and the file
`steps`, which grows by one byte for each step of this batch in any process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSource, DataSourceStreamArrowWriter, WriterCommitMessage

from penstock.client.client_session import Session
from penstock.spark.sink.data_writer import BATCH_ID, make_stream_writer
from penstock.spark.sink.sink_client import SinkClient

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType


class KillingSource(DataSource):
    """The data source of the format."""

    @classmethod
    def name(cls) -> str:
        return "killing"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        options = dict(self.options)
        killer = Killer(
            batch=int(options.pop("killbatch")), step=int(options.pop("killstep")),
            driver=int(options.pop("driver")), steps=options.pop("steps"),
        )  # fmt: skip
        return KillingWriter(make_stream_writer(options, schema, overwrite), killer)


class Killer:
    """Counts the steps of one batch and kills the driver at one of them."""

    def __init__(self, *, batch: int, step: int, driver: int, steps: str) -> None:
        self.batch = batch
        self.step = step
        self.driver = driver
        self.steps = steps
        self.current_batch = -1

    def count(self) -> None:
        """Count a step, and kill the driver if it is the chosen one."""
        if self.current_batch != self.batch:
            return
        file = os.open(self.steps, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, b".")
        if os.fstat(file).st_size >= self.step:
            os.killpg(self.driver, signal.SIGKILL)
            os._exit(1)
        os.close(file)

    def watch(self, batch: int) -> None:
        """Count the steps of this process from now on."""
        self.current_batch = batch
        if not _current:
            _patch_sink()
        _current[:] = [self]


_current: list[Killer] = []
"""The killer of the current task; Spark uses a process for many tasks."""


def _patch_sink() -> None:
    send_half_messages = SinkClient.send_half_messages

    async def send_and_count(
        client: SinkClient, rows: Any, properties: Any, partition: int, on_stored: Any
    ) -> None:
        def count(*half: Any) -> None:
            on_stored(*half)
            _current[0].count()

        await send_half_messages(client, rows, properties, partition, count)

    for kind, name in ((Session, "call"), (SinkClient, "_send_control_record")):
        setattr(kind, name, _before(getattr(kind, name)))
    setattr(SinkClient, "send_half_messages", send_and_count)  # noqa: B010


def _before(step: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def counted(*args: Any, **more: Any) -> Any:
        _current[0].count()
        return await step(*args, **more)

    return counted


class KillingWriter(DataSourceStreamArrowWriter):
    """The writer of the sink, with counted steps."""

    def __init__(self, writer: DataSourceStreamArrowWriter, killer: Killer) -> None:
        self._writer = writer
        self._killer = killer

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        self._killer.watch(int(context.getLocalProperty(BATCH_ID) or 0))
        return self._writer.write(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._killer.watch(batchId)
        self._writer.commit(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._writer.abort(messages, batchId)
