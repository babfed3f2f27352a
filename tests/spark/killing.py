"""The format `killing`: Penstock's sink, which kills the driver at one of its steps.

A step is a request of the sink's protocol that is about to go out, or a half whose receipt has
come. Options besides the sink's: `killBatch`, `killStep`, `driver` (its process group) and `steps`,
a file that grows by a byte for each step of that batch, in whichever process it is.
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
    """The format."""

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
    """Counts the steps of one batch, and kills."""

    def __init__(self, *, batch: int, step: int, driver: int, steps: str) -> None:
        self.batch = batch
        self.step = step
        self.driver = driver
        self.steps = steps
        self.now = -1

    def count(self) -> None:
        """A step begins."""
        if self.now != self.batch:
            return
        file = os.open(self.steps, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, b".")
        if os.fstat(file).st_size >= self.step:
            os.killpg(self.driver, signal.SIGKILL)
            os._exit(1)
        os.close(file)

    def watch(self, batch: int) -> None:
        """From here on this process counts."""
        self.now = batch
        if not _current:
            _hook()
        _current[:] = [self]


_current: list[Killer] = []
"""Whoever counts in this process, which Spark uses for many tasks."""


def _hook() -> None:
    send_halves = SinkClient.send_halves

    async def halves(
        client: SinkClient, rows: Any, properties: Any, partition: int, stored: Any
    ) -> None:
        def noted(*half: Any) -> None:
            stored(*half)
            _current[0].count()

        await send_halves(client, rows, properties, partition, noted)

    for kind, name in ((Session, "call"), (SinkClient, "_send_note")):
        setattr(kind, name, _before(getattr(kind, name)))
    setattr(SinkClient, "send_halves", halves)  # noqa: B010


def _before(step: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    async def counted(*args: Any, **more: Any) -> Any:
        _current[0].count()
        return await step(*args, **more)

    return counted


class KillingWriter(DataSourceStreamArrowWriter):
    """The sink's, watched."""

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
