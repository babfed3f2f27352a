"""The sink: what Spark calls to write a DataFrame to topics, in batches and in streams.

How Spark 4.3 runs a writer (as observed):

- It is created where the write is planned, in the driver's Python worker: a bad option or column is
  refused there, before anything is sent.
- `write` runs in a task. The task's local properties have a stream's query and batch id. A batch
  write has neither, except in foreachBatch, where several writes would share them.
- `commit` and `abort` of a batch write use the same writer as the tasks. Those of a stream use a
  new one, which has the options and the tasks' messages but no query id.
- An abort may run while tasks still run: they are not notified.

At-least-once delivery has nothing to commit: a task has all acknowledgements before it returns, and
does not load the modules for transactions.
"""

import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)

from penstock.client.sync.loop_thread import loop_thread
from penstock.errors import BadSetting
from penstock.spark.sink.at_least_once import AtLeastOnceWriter
from penstock.spark.sink.row_messages import (
    PROPERTY_BATCH,
    PROPERTY_PARTITION,
    PROPERTY_SINK,
    RowPlan,
    RowReader,
)
from penstock.spark.sink.sink_options import SinkOptions
from penstock.spark.sink.target_check import check_target
from penstock.spark.sink.task_id import TaskId
from penstock.spark.worker_entry import in_worker

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

log = logging.getLogger(__name__)

QUERY_ID: Final = "sql.streaming.queryId"
BATCH_ID: Final = "streaming.sql.batchId"


@dataclass(frozen=True)
class TaskWritten(WriterCommitMessage):
    """The result of one task."""

    task: TaskId
    rows: int
    decided: bool = False
    """Transactional: the batch was already decided, so this task has sent nothing."""
    chunks: tuple[bytes, ...] = ()
    """Transactional: the half messages that the commit publishes."""


@in_worker()
def make_writer(
    options: Mapping[str, str], schema: "StructType", overwrite: bool
) -> DataSourceArrowWriter:
    """The writer of a batch write; raises BadSetting, and as `check_target`."""
    if overwrite:
        raise BadSetting(
            'a topic can\'t be overwritten: mode("overwrite") is refused',
            hint='write with mode("append"); brokers delete old messages by age',
        )
    plan = _WritePlan(options, schema, stream=False)
    check_target(plan.options)
    return BatchWriter(plan)


@in_worker()
def make_stream_writer(
    options: Mapping[str, str], schema: "StructType", overwrite: bool
) -> DataSourceStreamArrowWriter:
    """The writer of a stream; raises BadSetting."""
    if overwrite:
        raise BadSetting(
            'a topic can\'t be overwritten: outputMode("complete") is refused',
            hint='use outputMode("append") or ("update")',
        )
    return StreamWriter(_WritePlan(options, schema, stream=True))


class BatchWriter(DataSourceArrowWriter):
    """Writes a DataFrame."""

    def __init__(self, write: "_WritePlan") -> None:
        self._write = write

    def write(self, iterator: Iterator["pa.RecordBatch"]) -> TaskWritten:
        return self._write.run(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self._write.commit(messages, self._write.options.batch_id)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self._write.abort(messages, self._write.options.batch_id)


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes each batch of a stream."""

    def __init__(self, write: "_WritePlan") -> None:
        self._write = write

    def write(self, iterator: Iterator["pa.RecordBatch"]) -> TaskWritten:
        return self._write.run(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._write.commit(messages, batchId)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._write.abort(messages, batchId)


class _WritePlan:
    """A planned write; pickled for the tasks."""

    def __init__(self, options: Mapping[str, str], schema: "StructType", *, stream: bool) -> None:
        self.options = SinkOptions.of(options, stream=stream)
        self._stream = stream
        columns = [(field.name, field.dataType.simpleString()) for field in schema.fields]
        self._plan = RowPlan.of(columns, self.options.topic)
        self._generated_id = uuid.uuid4().hex

    # --- in a task

    @in_worker()
    def run(self, batches: Iterator["pa.RecordBatch"]) -> TaskWritten:
        task = self._task()
        options = self.options
        if self._stream and task.batch_id == 0:
            check_target(options)  # a batch write has been checked where it was planned
        reader = RowReader(
            self._plan,
            partition=task.partition,
            properties=self._properties(task),
            message_bytes_max=options.message_bytes_max,
            now_ms=time.time_ns() // 1_000_000,
            allow_delays=not options.transactional,
        )
        if options.transactional:
            return self._run_transactional(task, reader, batches)
        with AtLeastOnceWriter(options, task.partition) as writer:
            for batch in batches:
                writer.put(reader.read(batch))
        return TaskWritten(task, reader.rows)

    def _run_transactional(
        self, task: TaskId, reader: RowReader, batches: Iterator["pa.RecordBatch"]
    ) -> TaskWritten:
        from penstock.spark.sink.transactional import TransactionalTask

        run = loop_thread().run
        sender = TransactionalTask(self.options, task)
        if not run(sender.begin):
            return TaskWritten(task, 0, decided=True)
        try:
            for batch in batches:
                run(sender.send, reader.read(batch))
            return TaskWritten(task, reader.rows, chunks=run(sender.finish))
        except BaseException:
            run(sender.roll_back)
            raise

    def _task(self) -> TaskId:
        context = TaskContext.get()
        assert context is not None, "write() runs in tasks"
        query_id = context.getLocalProperty(QUERY_ID) or ""
        batch_id = self.options.batch_id
        if self._stream:
            batch_id = int(context.getLocalProperty(BATCH_ID) or 0)
        return TaskId(
            sink_id=self.options.sink_id
            or (query_id if self._stream else "")
            or self._generated_id,
            batch_id=batch_id,
            partition=context.partitionId(),
            attempt=context.attemptNumber(),
            query_id=query_id if self._stream else "",
        )

    def _properties(self, task: TaskId) -> dict[str, str]:
        """The properties that identify the sink; the transactional sink adds its own."""
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
                _chunks(written),
                query_id=written[0].task.query_id,
                decided=any(one.decided for one in written),
            )
        log.info("batch %d: wrote %d rows", batch_id, sum(one.rows for one in written))

    @in_worker()
    def abort(self, messages: Sequence[WriterCommitMessage | None], batch_id: int) -> None:
        """Roll back what successful tasks have sent; failed tasks have done so themselves.

        Without a message of a task and without a sinkId there is nothing to roll back.
        """
        written = _written(messages)
        sink_id, query_id = self.options.sink_id, None
        if written:
            sink_id, query_id = written[0].task.sink_id, written[0].task.query_id
        if self.options.transactional and sink_id is not None:
            from penstock.spark.sink.transactional import abort_batch

            loop_thread().run(
                abort_batch, self.options, sink_id, batch_id, _chunks(written), query_id
            )


def _written(messages: Sequence[WriterCommitMessage | None]) -> list[TaskWritten]:
    return [message for message in messages if isinstance(message, TaskWritten)]


def _chunks(written: Sequence[TaskWritten]) -> list[bytes]:
    return [chunk for one in written for chunk in one.chunks]
