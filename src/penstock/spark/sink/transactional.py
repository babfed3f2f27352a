"""`delivery=transactional`: each row is published once, from the first half message to the commit.

1.  A task asks whether its batch is decided (`begin`). If so, it sends nothing. Otherwise it sends
    its rows as half messages, which consumers do not see, and returns their offsets (`finish`), or
    rolls them back if it fails (`roll_back`).
2.  `commit_batch` writes the half messages of all tasks as the decision, commits each of them, and
    records that the batch is done. Commits may be repeated: brokers answer the second one and store
    nothing.
3.  A decision is final. `commit_batch` and `abort_batch`, of this run of the batch or a later one,
    finish what is decided and roll back only half messages that are not part of the decision.
    Without a decision `abort_batch` first records the abort, which makes a later decision void.

**Half messages without a decision** come from attempts that were killed, speculative attempts that
lost, and sends whose response was lost before a retry. They are never published. They expire after
`transactionTimeout`. Until then they count for the broker's `open_transactions_max`, and their log
segments are not deleted. Then the broker checks back with a producer of the group, that is any
running sink with the same `group` (`transaction_check`), and rolls them back. If there is none, it
does so after `retain_hours`, and keeps a copy.

**Two drivers** may run the same batch if one does not know that it was replaced. Each sends its own
half messages. The queue of the control topic orders their decisions: the second one finds the
first, finishes it and rolls back its own half messages. A batch that is older than a decided one is
refused (SinkTaken), and so is a batch of another query: a decision contains its query.

**A batch write** is one batch of its `sinkId`, with the number `batchId` (0). Running it again
publishes nothing more. If a commit failed half way, a write with a higher number first finishes the
earlier batch.
"""

import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Final

from penstock.client.received_message import ReceivedMessage
from penstock.client.transaction.async_transaction_producer import Decision
from penstock.client.transaction.transaction_checks import Check
from penstock.errors import BatchNotDecided, DecisionLost, PenstockError, RowsExpired, SinkTaken
from penstock.spark.sink.batch_status import BatchStatus, ControlRecord, rows_in
from penstock.spark.sink.commit_messages import (
    CHUNK_ROWS_MAX,
    HalfMessageOffsets,
    HalfMessages,
    HalfMessageTopic,
    decode,
    digest,
    read_header,
)
from penstock.spark.sink.control_topic import ControlTopic
from penstock.spark.sink.row_messages import (
    PROPERTY_ATTEMPT,
    PROPERTY_BATCH,
    PROPERTY_PARTITION,
    PROPERTY_SINK,
    RowMessage,
)
from penstock.spark.sink.sink_client import NOTHING_LOST, SinkClient
from penstock.spark.sink.sink_options import SinkOptions
from penstock.spark.sink.task_id import TaskId
from penstock.wire.codes import PROPERTY_CHECK_IMMUNITY_SECONDS

log = logging.getLogger(__name__)

DECISION_TIME_SHARE: Final = 0.9
"""A batch must be decided within this share of `transactionTimeout`: commits need time, too."""


class TransactionalTask:
    """Sends the half messages of one task; used on one event loop."""

    def __init__(self, options: SinkOptions, task: TaskId) -> None:
        self._options = options
        self._task = task
        self._client = SinkClient(options, transaction_check)
        self._expires_ms = 0
        self._chunks: list[bytes] = []
        self._open: dict[HalfMessageTopic, list[HalfMessageOffsets]] = {}
        self._count = 0

    async def begin(self) -> bool:
        """Whether to send. If the batch is decided, `finish` and `roll_back` do nothing."""
        task, client = self._task, self._client
        await client.start()
        control = client.control(task.sink_id, task.query_id)
        try:
            await control.find_control_broker(task.batch_id, self._options.control_broker)
            status = await control.take_ownership(task.batch_id)
        except BaseException:
            await client.close()
            raise
        if status.done or status.decision is not None:
            await client.close()
            return False
        return True

    async def send(self, rows: Sequence[RowMessage]) -> None:
        """Send half messages; returns when all are acknowledged."""
        task, timeout_ms = self._task, self._options.transaction_timeout_ms
        if not self._expires_ms:
            self._expires_ms = self._client.now_ms() + timeout_ms
        properties = {
            PROPERTY_SINK: task.sink_id,
            PROPERTY_BATCH: str(task.batch_id),
            PROPERTY_PARTITION: str(task.partition),
            PROPERTY_ATTEMPT: str(task.attempt),
            PROPERTY_CHECK_IMMUNITY_SECONDS: str(-(-timeout_ms // 1000)),
        }
        await self._client.send_half_messages(rows, properties, task.partition, self._on_stored)

    def _on_stored(self, topic: HalfMessageTopic, half: HalfMessageOffsets) -> None:
        self._open.setdefault(topic, []).append(half)
        self._count += 1
        if self._count >= CHUNK_ROWS_MAX:
            self._close_chunk()

    def _close_chunk(self) -> None:
        group = self._client.group_name
        if self._open:
            self._chunks.append(HalfMessages(group, self._expires_ms, self._open).encode())
        self._open, self._count = {}, 0

    async def finish(self) -> tuple[bytes, ...]:
        """The chunks for the commit message, a few bytes for each row. Closes the connections."""
        self._close_chunk()
        await self._client.close()
        return tuple(self._chunks)

    async def roll_back(self) -> None:
        """After a failure: roll back what was sent, if possible. Closes the connections."""
        self._close_chunk()
        if self._chunks:
            await self._client.start()  # a task may fail after `finish`
        for chunk in self._chunks:
            await self._client.roll_back_half_messages(decode(chunk))
        await self._client.close()


async def commit_batch(
    options: SinkOptions,
    sink_id: str,
    batch_id: int,
    chunks: Sequence[bytes],
    *,
    query_id: str,
    decided: bool = False,
) -> None:
    """Publish a batch. `chunks` are the results of all tasks' `finish`; `decided` says that `begin`
    of one of them found the batch decided."""
    async with _batch(options, sink_id, batch_id, query_id) as batch:
        status = await batch.status_or_roll_back(chunks)
        if not status.done and status.decision is None:
            if decided:
                raise DecisionLost(
                    f"a task found batch {batch_id} of the sink {sink_id!r} decided, but now its "
                    "decision is missing"
                )
            batch.check_time_left(chunks)
            await batch.finish_earlier()
            await batch.control.write_decision(batch_id, chunks)
            status = await batch.control.status(batch_id)
            if not status.done and status.decision is None:
                raise BatchNotDecided(
                    f"batch {batch_id} of the sink {sink_id!r} was aborted before it was decided"
                )
        await batch.finish(status, chunks)


async def abort_batch(
    options: SinkOptions,
    sink_id: str,
    batch_id: int,
    chunks: Sequence[bytes],
    query_id: str | None = None,
) -> None:
    """Roll a batch back, or finish it if it is decided; the query is unknown without task messages.

    Failures are only logged: a later run finishes what is decided, other half messages expire, and
    an error here would hide the error because of which Spark aborts.
    """
    try:
        async with _batch(options, sink_id, batch_id, query_id) as batch:
            status = await batch.status_or_roll_back(chunks)
            if not status.done and status.decision is None and chunks:
                await batch.control.write_abort(batch_id, chunks)
                status = await batch.control.status(batch_id)
            await batch.finish(status, chunks)
    except PenstockError as error:
        log.warning("could not abort batch %d of the sink %s: %s", batch_id, sink_id, error)


@asynccontextmanager
async def _batch(
    options: SinkOptions, sink_id: str, batch_id: int, query_id: str | None
) -> "AsyncIterator[_BatchCommit]":
    async with SinkClient(options, transaction_check) as client:
        control = client.control(sink_id, query_id)
        await control.find_control_broker(batch_id, options.control_broker)
        yield _BatchCommit(options, client, control, batch_id)


class _BatchCommit:
    """Commits or rolls back one batch."""

    def __init__(
        self, options: SinkOptions, client: SinkClient, control: ControlTopic, batch_id: int
    ) -> None:
        self._options = options
        self._client = client
        self.control = control
        self._batch_id = batch_id

    async def status_or_roll_back(self, chunks: Sequence[bytes]) -> BatchStatus:
        """The status of the batch; rolls back this run's half messages if the sink is taken."""
        try:
            return await self.control.status(self._batch_id)
        except SinkTaken:
            await self._roll_back(chunks)
            raise

    def check_time_left(self, chunks: Iterable[bytes]) -> None:
        """Raise BatchNotDecided if half messages may expire before they are committed."""
        timeout_ms = self._options.transaction_timeout_ms
        first_ms = min((read_header(chunk).expires_ms for chunk in chunks), default=None)
        if first_ms is None:
            return
        took_ms = self._client.now_ms() - (first_ms - timeout_ms)
        if took_ms > DECISION_TIME_SHARE * timeout_ms:
            raise BatchNotDecided.over(
                f"batch {self._batch_id} of the sink {self.control.sink_id!r} took too long to be "
                f"published: {rows_in(chunks)} rows",
                figure=took_ms,
                limit=round(DECISION_TIME_SHARE * timeout_ms),
                unit="ms",
                setting="transactionTimeout",
                hint="raise transactionTimeout, or write smaller batches",
            )

    async def finish(self, status: BatchStatus, chunks: Iterable[bytes]) -> None:
        """Commit what is decided, roll back what is not; raises RowsExpired, DecisionLost."""
        decision = status.decision
        kept = decision.digests if decision is not None else frozenset()
        await self._roll_back(chunk for chunk in chunks if digest(chunk) not in kept)
        if decision is None:
            return
        if not status.done:
            await self.control.record_decided(decision)
            await self._commit(decision)
        await self.control.record_done(decision)

    async def finish_earlier(self) -> None:
        """Finish earlier batches. Streams have none: Spark repeats a batch until it succeeds."""
        for decision in await self.control.unfinished(self._batch_id):
            await self.finish(BatchStatus(False, decision), ())

    async def _roll_back(self, chunks: Iterable[bytes]) -> None:
        for chunk in chunks:
            await self._client.roll_back_half_messages(decode(chunk))

    async def _commit(self, decision: ControlRecord) -> None:
        lost = NOTHING_LOST
        async for chunk in self.control.chunks_of(decision):
            lost = lost.plus(await self._client.commit_half_messages(decode(chunk)))
        if lost.rows:
            seconds = self._options.transaction_timeout_ms // 1000
            raise RowsExpired(
                f"{lost.rows} of {decision.body.rows} rows of batch {decision.body.batch} of the "
                f"sink {self.control.sink_id!r} can't be published any more; the others are: "
                f"{lost.why} (transactionTimeout {seconds} s)"
            )


def transaction_check(client: SinkClient) -> Check:
    """Answers brokers that check back about a half message that has expired."""

    async def check(message: ReceivedMessage) -> Decision:
        sink_id = message.properties.get(PROPERTY_SINK, "")
        batch = message.properties.get(PROPERTY_BATCH, "")
        if not sink_id or not (batch.isascii() and batch.isdigit() and len(batch) < 19):
            return Decision.UNKNOWN
        control = client.control(sink_id, None)
        try:
            await control.find_control_broker(int(batch))
            status = await control.status(int(batch))
        except SinkTaken:  # the sink is beyond that batch
            return Decision.ROLLBACK
        except PenstockError as error:
            log.info("could not check a half message of the sink %s: %s", sink_id, error)
            return Decision.UNKNOWN
        # A decided half message is late, not unwanted: keep it for its commit or an operator.
        open_decision = status.decision is not None and not status.done
        return Decision.UNKNOWN if open_decision else Decision.ROLLBACK

    return check
