"""Reads a range of a queue as Arrow batches.

Every offset of the range is accounted for: its message is in a batch, it does not match the tags,
or it is lost. Lost messages are those that the broker no longer has (retention, a truncated queue,
a deleted topic) and those that can't be read. `failOnDataLoss` decides whether that is an error;
otherwise they are counted and logged.
"""

import logging
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from penstock.arrow.columns.column_builder import BAD, DONE, FULL, ColumnBuilder
from penstock.arrow.connection_options import READ_MS
from penstock.arrow.message_schema import stored_columns
from penstock.arrow.offset_ranges import QueueRange
from penstock.arrow.queue_pulls import BACKOFF_MS, BACKOFF_MS_MAX, QueuePuller
from penstock.arrow.source_options import SourceOptions
from penstock.client.client_session import Session
from penstock.client.consumer.pull_loop import PullAnswer
from penstock.client.consumer.subscription import Subscription
from penstock.clock import pause
from penstock.errors import DataLost, TopicNotExist
from penstock.wire.codes import ResponseCode

log = logging.getLogger(__name__)

LAG_WAIT_MS: Final = 10_000
"""How long to wait if a queue ends before the range does.

A replica may be behind its master, and a broker that has just started may not show its whole log.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSettings:
    """How to read all ranges of a query; Spark pickles it for its workers."""

    columns: tuple[str, ...]
    group: str
    """The consumer group that brokers see; it need not exist, and commits nothing."""
    tags: str | None = None
    """Tags as `a || b`; None: all messages."""
    fail_on_data_loss: bool = True
    check_crc: bool = True
    timeout_ms: int = READ_MS
    """The option readTimeout: how long a broker may be unavailable."""

    @classmethod
    def of(cls, options: SourceOptions) -> "ReadSettings":
        """From the options of a read."""
        return cls(
            columns=stored_columns(options.columns),
            group=options.group,
            tags=options.tags,
            fail_on_data_loss=options.fail_on_data_loss,
            check_crc=options.check_crc,
            timeout_ms=options.read_timeout_ms,
        )


class RangeReader:
    """Reads one range."""

    def __init__(self, session: Session, part: QueueRange, reading: ReadSettings) -> None:
        subscription = Subscription.of(part.topic, reading.tags, version=0)
        self._part = part
        self._fail = reading.fail_on_data_loss
        self._tags = subscription.tag_bytes
        self._check_crc = reading.check_crc
        self._clock = session.clock
        self._builder = ColumnBuilder(reading.columns, topic=part.topic, broker=part.broker)
        self._puller = QueuePuller(
            session,
            part,
            group=reading.group,
            expression=subscription.expression,
            timeout_ms=reading.timeout_ms,
        )
        self._lag_wait_ms = min(LAG_WAIT_MS, reading.timeout_ms)
        self._lagging_since_ms: int | None = None
        self._backoff_ms = BACKOFF_MS
        self._at = part.first
        self._answer: PullAnswer | None = None  # the response that is being decoded
        self._position = 0  # how far it is decoded
        self._goal = 0  # rows and losses after it, if no message is missing
        self._taken = 0  # rows of batches that were returned
        self.lost = 0
        """Messages that were missing."""

    async def batch(self) -> pa.RecordBatch | None:
        """The next messages; None at the end."""
        while self._answer is not None or self._at < self._part.until:
            if self._answer is not None:
                if self._decode(self._answer) == FULL:
                    return self._take_batch()
                continue
            try:
                await self._handle_answer(await self._puller.answer(self._at))
            except TopicNotExist as error:
                self._report_lost(self._part.until, f"the broker answers: {error}")
        if self._builder.rows:
            return self._take_batch()
        if self.lost:
            log.warning("data loss: %s %d messages in total", self._describe, self.lost)
        return None

    def close(self) -> None:
        """Cancel pulls in flight."""
        self._puller.cancel()

    def _take_batch(self) -> pa.RecordBatch:
        self._taken += self._builder.rows
        return self._builder.take()

    async def _handle_answer(self, answer: PullAnswer) -> None:
        """Handle a response; `_decode` reads its messages."""
        at, code, next_offset = self._at, answer.code, answer.next_offset
        if next_offset <= at:
            await self._wait_for_lag(answer)
            return
        self._lagging_since_ms, self._backoff_ms = None, BACKOFF_MS
        await self._puller.prefetch(next_offset)
        if self._tags is not None and at < answer.min_offset:
            # Messages without a wanted tag leave gaps, too: only the queue's minimum offset tells.
            self._report_lost(
                min(answer.min_offset, next_offset), f"offsets {_available(answer)} exist"
            )
        if code == ResponseCode.SUCCESS:
            self._answer, self._position = answer, 0
            self._goal = self._seen + min(next_offset, self._part.until) - at
        elif code == ResponseCode.PULL_RETRY_IMMEDIATELY and self._tags is not None:
            self._at = next_offset  # no message has a wanted tag
        elif self._at < next_offset:
            self._report_lost(next_offset, f"offsets {_available(answer)} exist")

    @property
    def _seen(self) -> int:
        """Rows and lost messages so far."""
        return self._taken + self._builder.rows + self.lost

    def _decode(self, answer: PullAnswer) -> int:
        """Decode more messages of the response; returns why it stopped, such as FULL."""
        builder, part, data = self._builder, self._part, answer.body
        why = builder.add_answer(
            data,
            self._position,
            len(data),
            first=self._at,
            until=part.until,
            tags=self._tags,
            check_crc=self._check_crc,
        )
        before, self._at, self._position = self._at, builder.offset, builder.position
        if why == BAD:
            self._position = builder.resume
            if builder.resume < 0:  # the start of the next record is unknown
                self._answer = None
                if self._at > before:  # pull again from this offset
                    return why
                self._at += 1
            self._add_lost(1, f"{self._describe} offset {builder.offset}: {builder.problem}")
        elif why == DONE:
            self._answer = None
            self._at = max(self._at, min(answer.next_offset, part.until))
            missing = self._goal - self._seen
            if self._tags is None and missing > 0:
                self._add_lost(
                    missing,
                    f"{self._describe} {missing} messages before offset {self._at} are missing,"
                    f" offsets {_available(answer)} exist",
                )
        return why

    @property
    def _describe(self) -> str:
        part = self._part
        return (
            f"topic {part.topic}, broker {part.broker} ({self._puller.address}),"
            f" queue {part.queue_id}:"
        )

    async def _wait_for_lag(self, answer: PullAnswer) -> None:
        """Wait, because the queue ends before the range; after LAG_WAIT_MS messages are lost."""
        now_ms = self._clock.monotonic_ms()
        if self._lagging_since_ms is None:
            self._lagging_since_ms = now_ms
        if now_ms - self._lagging_since_ms + self._backoff_ms > self._lag_wait_ms:
            self._report_lost(self._part.until, f"offsets {_available(answer)} exist")
            return
        await pause(self._clock, self._backoff_ms)
        self._backoff_ms = min(2 * self._backoff_ms, BACKOFF_MS_MAX)
        await self._puller.switch_to_master()

    def _report_lost(self, until: int, why: str) -> None:
        """Report that the messages from here to before this offset are missing."""
        part, first = self._part, self._at
        self._at = min(until, part.until)
        wanted = f"offsets {first} to {self._at - 1} are wanted"
        self._add_lost(self._at - first, f"{self._describe} {wanted}, {why}")

    def _add_lost(self, count: int, message: str) -> None:
        if self._fail:
            raise DataLost(message)
        self.lost += count
        log.warning("data loss: %s", message)


def _available(answer: PullAnswer) -> str:
    return f"{answer.min_offset} to {answer.max_offset - 1}" if answer.max_offset else "none"
