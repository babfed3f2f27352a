"""The sink: what Spark calls to write a DataFrame to topics, in batches and in streams.

How Spark 4.3 runs a writer (all of it tried):

- it is made where the write is planned, in the driver's Python worker: a bad option or column is
  refused there, before anything is sent;
- `write` runs in a task. The task's local properties have a stream's query and batch id; a batch
  write has neither, except in foreachBatch, where several writes would share them;
- a batch's `commit` and `abort` get the very writer that the tasks had; those of a stream get a new
  one, which knows the options and the tasks' messages and no query id;
- an abort may run while tasks still do: they are not told.

At least once there is nothing to commit: a task has its acknowledgements before it returns, and
does not load what transactions need.
"""

import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from penstock.client.sync.loop_thread import loop_thread
from penstock.errors import BadSetting
from penstock.spark.sink.at_least_once import Outbox
from penstock.spark.sink.row_messages import (
    PROPERTY_BATCH,
    PROPERTY_PARTITION,
    PROPERTY_SINK,
    RowPlan,
    RowReader,
)
from penstock.spark.sink.sink_options import SinkOptions
from penstock.spark.worker_entry import in_worker

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

log = logging.getLogger(__name__)

QUERY_ID: Final = "sql.streaming.queryId"
BATCH_ID: Final = "streaming.sql.batchId"


class Writing(NamedTuple):
    """Which attempt of which task; `query_id` is "" in batch writes."""

    sink_id: str
    batch_id: int
    partition: int
    attempt: int
    query_id: str


@dataclass(frozen=True)
class TaskWritten(WriterCommitMessage):
    """What one task has written."""

    task: Writing
    rows: int
    decided: bool = False
    """Transactional: the batch was decided before, so this task has sent nothing."""
    handles: tuple[bytes, ...] = ()
    """Transactional: what was sent, to be published by the commit."""


@in_worker()
def make_writer(
    options: Mapping[str, str], schema: "StructType", overwrite: bool
) -> DataSourceArrowWriter:
    """For a batch write; raises BadSetting."""
    if overwrite:
        raise BadSetting(
            'a topic can\'t be overwritten: mode("overwrite") is refused',
            hint='write with mode("append"); brokers delete old messages by their age',
        )
    return BatchWriter(_Write(options, schema, stream=False))


@in_worker()
def make_stream_writer(
    options: Mapping[str, str], schema: "StructType", overwrite: bool
) -> DataSourceStreamArrowWriter:
    """For a stream; raises BadSetting."""
    if overwrite:
        raise BadSetting(
            'a topic can\'t be overwritten: outputMode("complete") is refused',
            hint='use outputMode("append") or ("update")',
        )
    return StreamWriter(_Write(options, schema, stream=True))


class BatchWriter(DataSourceArrowWriter):
    """Writes a DataFrame."""

    def __init__(self, write: "_Write") -> None:
        self._write = write

    def write(self, iterator: Iterator["pa.RecordBatch"]) -> TaskWritten:
        return self._write.run(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self._write.commit(messages, self._write.options.batch_id)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self._write.abort(messages, self._write.options.batch_id)


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes each batch of a stream."""

    def __init__(self, write: "_Write") -> None:
        self._write = write

    def write(self, iterator: Iterator["pa.RecordBatch"]) -> TaskWritten:
        return self._write.run(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._write.commit(messages, batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._write.abort(messages, batchId)


class _Write:
    """A write as it is planned, and its part in each task; goes from process to process."""

    def __init__(self, options: Mapping[str, str], schema: "StructType", *, stream: bool) -> None:
        self.options = SinkOptions.of(options, stream=stream)
        self._stream = stream
        columns = [(field.name, field.dataType.simpleString()) for field in schema.fields]
        self._plan = RowPlan.of(columns, self.options.topic)
        self._made_id = uuid.uuid4().hex

    # --- in a task

    @in_worker()
    def run(self, batches: Iterator["pa.RecordBatch"]) -> TaskWritten:
        task = self._task()
        options = self.options
        reader = RowReader(
            self._plan,
            partition=task.partition,
            properties=self._properties(task),
            message_bytes_max=options.message_bytes_max,
            now_ms=time.time_ns() // 1_000_000,
            may_wait=not options.transactional,
        )
        if options.transactional:
            return self._run_once(task, reader, batches)
        with Outbox(options, task.partition) as outbox:
            for batch in batches:
                outbox.put(reader.read(batch))
        return TaskWritten(task, reader.rows)

    def _run_once(
        self, task: Writing, reader: RowReader, batches: Iterator["pa.RecordBatch"]
    ) -> TaskWritten:
        from penstock.spark.sink.transactional import TaskId, TransactionalTask

        run = loop_thread().run
        sending = TransactionalTask(self.options, TaskId(*task))
        if not run(sending.begin):
            return TaskWritten(task, 0, decided=True)
        try:
            for batch in batches:
                run(sending.send, reader.read(batch))
            return TaskWritten(task, reader.rows, handles=run(sending.finish))
        except BaseException:
            run(sending.roll_back)
            raise

    def _task(self) -> Writing:
        context = TaskContext.get()
        assert context is not None, "write() runs in tasks"
        query_id = context.getLocalProperty(QUERY_ID) or ""
        batch_id = self.options.batch_id
        if self._stream:
            batch_id = int(context.getLocalProperty(BATCH_ID) or 0)
        return Writing(
            sink_id=self.options.sink_id or (query_id if self._stream else "") or self._made_id,
            batch_id=batch_id,
            partition=context.partitionId(),
            attempt=context.attemptNumber(),
            query_id=query_id if self._stream else "",
        )

    def _properties(self, task: Writing) -> dict[str, str]:
        """What every message says of where it comes from; transactions say more, by themselves."""
        if self.options.transactional or not self.options.identify:
            return {}
        return {
            PROPERTY_SINK: task.sink_id,
            PROPERTY_BATCH: str(task.batch_id),
            PROPERTY_PARTITION: str(task.partition),
        }

    # --- after the tasks

    @in_worker()
    def commit(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        written = _written(messages)
        if self.options.transactional and written:
            from penstock.spark.sink.transactional import commit_batch

            loop_thread().run(
                commit_batch,
                self.options,
                written[0].task.sink_id,
                batch_id,
                _handles(written),
                query_id=written[0].task.query_id,
                decided=any(one.decided for one in written),
            )
        log.info("batch %d: %d rows are written", batch_id, sum(one.rows for one in written))

    @in_worker()
    def abort(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Failed tasks have taken back what they sent; the others' is taken back here. Where none
        has left a message and no sinkId is given, nothing is known to take back."""
        written = _written(messages)
        sink_id, query_id = self.options.sink_id, None
        if written:
            sink_id, query_id = written[0].task.sink_id, written[0].task.query_id
        if self.options.transactional and sink_id is not None:
            from penstock.spark.sink.transactional import abort_batch

            loop_thread().run(
                abort_batch, self.options, sink_id, batch_id, _handles(written), query_id
            )


def _written(messages: Sequence[WriterCommitMessage | None]) -> list[TaskWritten]:
    return [message for message in messages if isinstance(message, TaskWritten)]


def _handles(written: Sequence[TaskWritten]) -> list[bytes]:
    return [handle for one in written for handle in one.handles]
