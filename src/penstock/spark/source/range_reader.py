"""A part of a queue as Arrow batches.

Every offset of the part is accounted for: its message is in a batch, or the tags do not want it,
or it is lost. Lost are messages that the broker no longer has (retention, a queue that was cut
off, a topic that was deleted) and those that can't be read. `failOnDataLoss` decides whether that
is an error; otherwise they are counted and said.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from penstock.client.consumer.pull_loop import PullAnswer
from penstock.client.consumer.subscription import Subscription
from penstock.clock import pause
from penstock.errors import DataLost, TopicNotExist
from penstock.spark.arrow.columns import BAD, DONE, FULL, ColumnBuilder
from penstock.spark.connection_options import READ_MS, ConnectionOptions
from penstock.spark.source.offset_ranges import QueueRange
from penstock.spark.source.queue_pulls import BACKOFF_MS, BACKOFF_MS_MAX, Pulls
from penstock.spark.worker_connection import WorkerConnection, worker_connection
from penstock.wire.codes import ResponseCode

log = logging.getLogger(__name__)

BEHIND_MS: Final = 10_000
"""How long a queue may end before the part does: a replica may be behind its master, and a broker
that has just started may not show all of its log yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How to read, for all parts of a query; goes to the workers by pickle."""

    columns: tuple[str, ...]
    group: str
    """The consumer group that brokers see; need not exist, and commits nothing."""
    tags: str | None = None
    """Tags as `a || b`; None: all messages."""
    fail_on_data_loss: bool = True
    timeout_ms: int = READ_MS
    """The option readTimeout: how long a broker may be away."""


def read_range(
    connection: ConnectionOptions, part: QueueRange, reading: Reading
) -> Iterator[pa.RecordBatch]:
    """The messages of a queue from `part.first` up to `part.until`, which is not read any more.

    Raises DataLost, ReadGaveUp, and what a broker refuses for good.
    """
    if part.first >= part.until:
        return
    with worker_connection(connection) as here:
        work = RangeReader(here, part, reading)
        try:
            while (batch := here.run(work.batch())) is not None:
                yield batch
        finally:
            work.close()


class RangeReader:
    """One part on its way into batches."""

    def __init__(self, here: WorkerConnection, part: QueueRange, reading: Reading) -> None:
        subscription = Subscription.of(part.topic, reading.tags, version=0)
        self._part = part
        self._fail = reading.fail_on_data_loss
        self._tags = subscription.tag_bytes
        self._clock = here.session.clock
        self._builder = ColumnBuilder(reading.columns, topic=part.topic, broker=part.broker)
        self._pulls = Pulls(
            here.session,
            part,
            group=reading.group,
            expression=subscription.expression,
            timeout_ms=reading.timeout_ms,
        )
        self._behind_ms = min(BEHIND_MS, reading.timeout_ms)
        self._behind_since_ms: int | None = None
        self._again_ms = BACKOFF_MS
        self._at = part.first
        self._answer: PullAnswer | None = None  # what is being decoded
        self._position = 0  # how far
        self._goal = 0  # rows there have to be after it, if each offset has its message
        self._taken = 0  # rows in batches that were handed over
        self.lost = 0
        """Messages that were not there."""

    async def batch(self) -> pa.RecordBatch | None:
        """The next messages; None at the end."""
        while self._answer is not None or self._at < self._part.until:
            if self._answer is not None:
                if self._decode(self._answer) == FULL:
                    return self._hand_over()
                continue
            try:
                await self._take(await self._pulls.answer(self._at))
            except TopicNotExist as error:
                self._lose(self._part.until, f"the broker says: {error}")
        if self._builder.rows:
            return self._hand_over()
        if self.lost:
            log.warning("data loss: %s %d messages in all", self._place, self.lost)
        return None

    def close(self) -> None:
        """Call off what is in flight."""
        self._pulls.call_off()

    def _hand_over(self) -> pa.RecordBatch:
        self._taken += self._builder.rows
        return self._builder.take()

    async def _take(self, answer: PullAnswer) -> None:
        """Look at an answer; messages are left for `_decode`."""
        at, code, next_offset = self._at, answer.code, answer.next_offset
        if next_offset <= at:
            await self._behind(answer)
            return
        self._behind_since_ms, self._again_ms = None, BACKOFF_MS
        await self._pulls.ask_ahead(next_offset)
        if self._tags is not None and at < answer.min_offset:
            # Messages without a wanted tag leave gaps, too: only the queue's begin tells.
            self._lose(min(answer.min_offset, next_offset), f"offsets {_there(answer)} are there")
        if code == ResponseCode.SUCCESS:
            self._answer, self._position = answer, 0
            self._goal = self._seen + min(next_offset, self._part.until) - at
        elif code == ResponseCode.PULL_RETRY_IMMEDIATELY and self._tags is not None:
            self._at = next_offset  # none of them has a tag that is wanted
        elif self._at < next_offset:
            self._lose(next_offset, f"offsets {_there(answer)} are there")

    @property
    def _seen(self) -> int:
        """Rows made, and messages missed, up to now."""
        return self._taken + self._builder.rows + self.lost

    def _decode(self, answer: PullAnswer) -> int:
        """Go on with the answer's messages: FULL, or another reason why that ended."""
        builder, part, data = self._builder, self._part, answer.body
        why = builder.add_answer(
            data, self._position, len(data), first=self._at, until=part.until, tags=self._tags
        )
        before, self._at, self._position = self._at, builder.offset, builder.position
        if why == BAD:
            self._position = builder.resume
            if builder.resume < 0:  # nobody knows where the next record begins
                self._answer = None
                if self._at > before:  # pull once more from this one on
                    return why
                self._at += 1
            self._note_lost(1, f"{self._place} offset {builder.offset}: {builder.problem}")
        elif why == DONE:
            self._answer = None
            self._at = max(self._at, min(answer.next_offset, part.until))
            missing = self._goal - self._seen
            if self._tags is None and missing > 0:
                self._note_lost(
                    missing,
                    f"{self._place} {missing} messages before offset {self._at} are missing,"
                    f" offsets {_there(answer)} are there",
                )
        return why

    @property
    def _place(self) -> str:
        part = self._part
        return (
            f"topic {part.topic}, broker {part.broker} ({self._pulls.address}),"
            f" queue {part.queue_id}:"
        )

    async def _behind(self, answer: PullAnswer) -> None:
        """The queue ends too early: wait a little, then believe it."""
        now_ms = self._clock.monotonic_ms()
        if self._behind_since_ms is None:
            self._behind_since_ms = now_ms
        if now_ms - self._behind_since_ms + self._again_ms > self._behind_ms:
            self._lose(self._part.until, f"offsets {_there(answer)} are there")
            return
        await pause(self._clock, self._again_ms)
        self._again_ms = min(2 * self._again_ms, BACKOFF_MS_MAX)
        await self._pulls.elsewhere()

    def _lose(self, until: int, why: str) -> None:
        """The messages from here up to this offset are not there."""
        part, first = self._part, self._at
        self._at = min(until, part.until)
        wanted = f"offsets {first} to {self._at - 1} are wanted"
        self._note_lost(self._at - first, f"{self._place} {wanted}, {why}")

    def _note_lost(self, count: int, message: str) -> None:
        if self._fail:
            raise DataLost(message)
        self.lost += count
        log.warning("data loss: %s", message)


def _there(answer: PullAnswer) -> str:
    return f"{answer.min_offset} to {answer.max_offset - 1}" if answer.max_offset else "none"
