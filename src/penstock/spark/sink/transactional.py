"""Each row once: `delivery=transactional`, from the first half to the last commit.

1.  A task asks whether its batch is decided (`begin`). If so it sends nothing. Otherwise it sends
    its rows as half messages, which no consumer sees, and hands their offsets over (`finish`), or
    takes them back when it fails (`roll_back`).
2.  `commit_batch` writes all tasks' halves as the decision, commits each of them, and notes that
    this is done. Commits may be repeated: brokers answer the second one, and store nothing.
3.  A decision is final. `commit_batch` and `abort_batch`, of this run of the batch or a later one,
    finish what is decided and roll back only halves that are not part of it. `abort_batch` without
    a decision first notes the abort, so that a decision that is still on its way is void.

**Halves that nobody mentions.** An attempt that is killed, a speculative one that loses, an answer
that gets lost before a send is tried again: such halves are in no decision, so they are never
published. They expire after `transactionTimeout`; until then they are open at their broker, count
for its `open_transactions_max`, and keep its log from being cleaned. Then the broker asks a
producer of the group (any sink that runs with the same `group` answers, `Judge`), and rolls them
back; if there is none, it does so after `retain_hours`, with a copy for people to look at.

**Drivers that do not know that they are dead.** Two of them may run the same batch. Each has halves
of its own; the queue of the control topic orders their decisions, and the one that comes second
finds the first, finishes it and rolls back its own. A batch older than one that is decided is
refused (SinkTaken), and so is one of another query: a decision tells whose it is.

**Batch writes** are one batch of their `sinkId`, number `batchId` (0). The same again is the same
batch: it publishes nothing more. Who goes on with a higher number after a commit that failed half
way has the earlier batch finished first.
"""

import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from penstock.client.received_message import ReceivedMessage
from penstock.client.transaction.async_transaction_producer import Decision
from penstock.client.transaction.transaction_checks import Check
from penstock.errors import BatchNotDecided, DecisionLost, PenstockError, RowsExpired, SinkTaken
from penstock.spark.sink.batch_status import Note, Standing, rows_in
from penstock.spark.sink.commit_messages import (
    ROWS_MAX,
    HalfOffsets,
    Parcel,
    Place,
    decode,
    digest,
    label,
)
from penstock.spark.sink.control_topic import Control
from penstock.spark.sink.row_messages import (
    PROPERTY_ATTEMPT,
    PROPERTY_BATCH,
    PROPERTY_PARTITION,
    PROPERTY_SINK,
    Outgoing,
)
from penstock.spark.sink.sink_client import NOTHING, SinkClient
from penstock.spark.sink.sink_options import SinkOptions
from penstock.wire.codes import PROPERTY_CHECK_IMMUNITY_SECONDS

log = logging.getLogger(__name__)

MARGIN: Final = 0.9
"""A batch is decided within this part of `transactionTimeout`: its commits need time too."""


@dataclass(frozen=True, slots=True)
class TaskId:
    """One attempt of one task; picklable."""

    sink_id: str
    batch_id: int
    partition: int
    attempt: int
    query_id: str = ""
    """The streaming query's; "" in a batch write. A sinkId that another query has used is refused:
    batches of this one would be taken for batches of that one, which are published."""


class TransactionalTask:
    """What one task sends; started and used on one event loop."""

    def __init__(self, options: SinkOptions, task: TaskId) -> None:
        self._options = options
        self._task = task
        self._client = SinkClient(options, judge)
        self._expires_ms = 0
        self._full: list[bytes] = []
        self._open: dict[Place, list[HalfOffsets]] = {}
        self._count = 0

    async def begin(self) -> bool:
        """Whether to send: False if the batch is decided. Then nothing is to be sent; `finish` and
        `roll_back` do nothing."""
        task, client = self._task, self._client
        await client.start()
        control = client.control(task.sink_id, task.query_id)
        try:
            await control.locate(task.batch_id, self._options.control_broker)
            standing = await control.claim(task.batch_id)
        except BaseException:
            await client.close()
            raise
        if standing.done or standing.decision is not None:
            await client.close()
            return False
        return True

    async def send(self, rows: Sequence[Outgoing]) -> None:
        """Send halves; returns when all are acknowledged."""
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
        await self._client.send_halves(rows, properties, task.partition, self._stored)

    def _stored(self, place: Place, half: HalfOffsets) -> None:
        self._open.setdefault(place, []).append(half)
        self._count += 1
        if self._count >= ROWS_MAX:
            self._seal()

    def _seal(self) -> None:
        group = self._client.group_name
        if self._open:
            self._full.append(Parcel(group, self._expires_ms, self._open).encode())
        self._open, self._count = {}, 0

    async def finish(self) -> tuple[bytes, ...]:
        """What the commit message carries: a few bytes for each row. Closes the connections."""
        self._seal()
        await self._client.close()
        return tuple(self._full)

    async def roll_back(self) -> None:
        """After a failure: take back what was sent, as far as brokers can be reached. Closes."""
        self._seal()
        if self._full:
            await self._client.start()  # a task may fail after `finish`
        for data in self._full:
            await self._client.roll_back_halves(decode(data))
        await self._client.close()


async def commit_batch(
    options: SinkOptions,
    sink_id: str,
    batch_id: int,
    handles: Sequence[bytes],
    *,
    query_id: str,
    decided: bool = False,
) -> None:
    """Publish a batch. `handles` are what all tasks' `finish` gave, together; `decided` says that
    `begin` of one of them found the batch decided."""
    async with _batch(options, sink_id, batch_id, query_id) as batch:
        standing = await batch.look_or_roll_back(handles)
        if not standing.done and standing.decision is None:
            if decided:
                raise DecisionLost(
                    f"a task found batch {batch_id} of the sink {sink_id!r} decided, and now no "
                    "decision is to be found"
                )
            batch.check_time(handles)
            await batch.finish_earlier()
            await batch.control.write_decision(batch_id, handles)
            standing = await batch.control.look(batch_id)
            if not standing.done and standing.decision is None:
                raise BatchNotDecided(
                    f"batch {batch_id} of the sink {sink_id!r} was aborted before it was decided"
                )
        await batch.finish(standing, handles)


async def abort_batch(
    options: SinkOptions,
    sink_id: str,
    batch_id: int,
    handles: Sequence[bytes],
    query_id: str | None = None,
) -> None:
    """Take a batch back; if it is decided, finish it instead. Without the tasks' messages nobody
    knows the query.

    What can't be done now is logged: a later run finishes what is decided, other halves expire, and
    an error would take the place of the one because of which Spark aborts.
    """
    try:
        async with _batch(options, sink_id, batch_id, query_id) as batch:
            standing = await batch.look_or_roll_back(handles)
            if not standing.done and standing.decision is None and handles:
                await batch.control.write_abort(batch_id, handles)
                standing = await batch.control.look(batch_id)
            await batch.finish(standing, handles)
    except PenstockError as error:
        log.warning("batch %d of the sink %r is left as it is: %s", batch_id, sink_id, error)


@asynccontextmanager
async def _batch(
    options: SinkOptions, sink_id: str, batch_id: int, query_id: str | None
) -> "AsyncIterator[_Batch]":
    async with SinkClient(options, judge) as client:
        control = client.control(sink_id, query_id)
        await control.locate(batch_id, options.control_broker)
        yield _Batch(options, client, control, batch_id)


class _Batch:
    """A batch at its end."""

    def __init__(
        self, options: SinkOptions, client: SinkClient, control: Control, batch_id: int
    ) -> None:
        self._options = options
        self._client = client
        self.control = control
        self._batch_id = batch_id

    async def look_or_roll_back(self, handles: Sequence[bytes]) -> Standing:
        """How it stands; where the sink has gone on without this run, its halves are taken back."""
        try:
            return await self.control.look(self._batch_id)
        except SinkTaken:
            await self._roll_back(handles)
            raise

    def check_time(self, handles: Iterable[bytes]) -> None:
        """Raise BatchNotDecided if halves may expire before they are committed."""
        timeout_ms = self._options.transaction_timeout_ms
        first_ms = min((label(data).expires_ms for data in handles), default=None)
        if first_ms is None:
            return
        took_ms = self._client.now_ms() - (first_ms - timeout_ms)
        if took_ms > MARGIN * timeout_ms:
            raise BatchNotDecided.over(
                f"batch {self._batch_id} of the sink {self.control.sink_id!r} took too long to be "
                f"published: {rows_in(handles)} rows",
                figure=took_ms,
                limit=round(MARGIN * timeout_ms),
                unit="ms",
                setting="transactionTimeout",
                hint="raise transactionTimeout, or write smaller batches",
            )

    async def finish(self, standing: Standing, handles: Iterable[bytes]) -> None:
        """Publish what is decided, take back what is not; raises RowsExpired, DecisionLost."""
        decision = standing.decision
        kept = decision.digests if decision is not None else frozenset()
        await self._roll_back(data for data in handles if digest(data) not in kept)
        if decision is None:
            return
        if not standing.done:
            await self.control.note_decided(decision)
            await self._commit(decision)
        await self.control.note_done(decision)

    async def finish_earlier(self) -> None:
        """Streams have no such batches: Spark runs one until it succeeds."""
        for decision in await self.control.unfinished(self._batch_id):
            await self.finish(Standing(False, decision), ())

    async def _roll_back(self, handles: Iterable[bytes]) -> None:
        for data in handles:
            await self._client.roll_back_halves(decode(data))

    async def _commit(self, decision: Note) -> None:
        lost = NOTHING
        async for data in self.control.parcels(decision):
            lost = lost.plus(await self._client.commit_halves(decode(data)))
        if lost.rows:
            seconds = self._options.transaction_timeout_ms // 1000
            raise RowsExpired(
                f"{lost.rows} of {decision.body.rows} rows of batch {decision.body.batch} of the "
                f"sink {self.control.sink_id!r} can't be published any more, the others are: "
                f"{lost.why} (transactionTimeout {seconds} s)"
            )


def judge(client: SinkClient) -> Check:
    """What brokers are told that ask about a half after its time."""

    async def check(message: ReceivedMessage) -> Decision:
        sink_id = message.properties.get(PROPERTY_SINK, "")
        batch = message.properties.get(PROPERTY_BATCH, "")
        if not sink_id or not (batch.isascii() and batch.isdigit() and len(batch) < 19):
            return Decision.UNKNOWN
        control = client.control(sink_id, None)
        try:
            await control.locate(int(batch))
            standing = await control.look(int(batch))
        except SinkTaken:  # the sink is beyond that batch
            return Decision.ROLLBACK
        except PenstockError as error:
            log.info("a half of the sink %r can't be judged now: %s", sink_id, error)
            return Decision.UNKNOWN
        # A decided half is late, not unwanted: it stays for its commit, or for people to look at.
        open_decision = standing.decision is not None and not standing.done
        return Decision.UNKNOWN if open_decision else Decision.ROLLBACK

    return check
