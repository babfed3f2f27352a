"""Delayed messages: parked by their level, stored again in their own queue when their time comes.

A message with DELAY > 0 lies in SCHEDULE_TOPIC_XXXX, in the queue of its level, with its own topic
and queue in REAL_TOPIC and REAL_QID. All messages of a level wait equally long, so the queue is in
the order of delivery, and its entries carry the time instead of a tag's hash.

    entries  the next ones of a level, read ahead: when is the first one due?
    records  of those that are due within AHEAD_MS, so that nothing waits for the disk then

Neither is read by the loop if that would wait for the disk. `tick` delivers a bounded number; `due`
says when it has to be called again. How far a level is goes into the table only when the delivered
copies are on the disk: after a crash some are delivered twice, none is lost.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from penstock.broker.rewrite import MessageRewriter
from penstock.config import delays_ms
from penstock.errors import MessageIllegal, PenstockError
from penstock.rpc.answers import PersistentTable
from penstock.store.consumequeue.consumequeue import ConsumeQueue, unpack_entries
from penstock.store.get import COLD, FOUND, Reader
from penstock.store.put import ILLEGAL, PUT_OK
from penstock.store.store import MessageStore
from penstock.store.tables import DelayOffsetTable
from penstock.wire import layout, octets
from penstock.wire.codes import (
    PROPERTY_DELAY,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    TOPIC_SCHEDULE,
)
from penstock.wire.message import split_records
from penstock.wire.output import Output

log = logging.getLogger(__name__)

AHEAD_MS: Final = 1_500
"""Records are read so long before they are due: longer than the server sleeps at most."""
ENTRIES_MAX: Final = 500
"""Entries of a level that are read at once."""
RECORDS_MAX: Final = 128
RECORDS_BYTES_MAX: Final = 256 * 1024
"""Messages of a level that are kept in memory: at least one, however long it is."""
TICK_MESSAGES_MAX: Final = 128
TICK_BYTES_MAX: Final = 1024 * 1024
"""Messages delivered before others have their turn."""
POLL_MS: Final = 5
"""How often a read that waits for the disk is asked for."""
RETRY_MS: Final = 100
"""After a store that refused, as in RocketMQ."""
NEVER: Final = 1 << 62

TIMER_PROPERTIES: Final = ("TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS")

_SCHEDULE: Final = TOPIC_SCHEDULE.encode()
_I32_MAX: Final = (1 << 31) - 1
_NO_LEVEL: Final = 1 << 31


def delay_level(properties: dict[str, str]) -> int:
    """The level that a message asks for, 0 or less for none; MessageIllegal if it is no number."""
    text = properties.get(PROPERTY_DELAY, "0")
    digits = text[1:] if text[:1] in ("+", "-") else text
    number = int(text) if digits.isascii() and digits.isdigit() and len(text) <= 11 else _NO_LEVEL
    if not -_I32_MAX - 1 <= number <= _I32_MAX:
        raise MessageIllegal(
            f"the delay level (DELAY) is no number: {text[:32]!r}",
            hint="set a level from 1 on, or leave it away",
        )
    return number


@dataclass(slots=True)
class Ahead:
    """What was read of a level: entries from `base` on, and the records of the first of them."""

    base: int = 0
    entries: list[tuple[int, int, int]] = field(default_factory=list)  # log offset, size, due
    records: dict[int, bytes] = field(default_factory=dict)  # by log offset
    read_to: int = 0  # queue offset up to which records were asked for

    @property
    def end(self) -> int:
        return self.base + len(self.entries)


@dataclass(slots=True)
class Line:
    """One level: its queue, and how far it is."""

    queue: ConsumeQueue
    offset: int  # the next one to deliver
    ahead: Ahead = field(default_factory=Ahead)
    reading: "Future[Ahead] | None" = None
    due_ms: int = 0
    ceiling: tuple[int, int] = (0, 0)  # messages below this offset are due at this time
    mark: tuple[int, int] | None = None  # delivered below this offset: durable from this log offset
    delivered: int = 0

    @property
    def level(self) -> int:
        return self.queue.queue_id + 1

    def head(self) -> tuple[int, int, int] | None:
        """Log offset, size and time of the next message, if it was read already."""
        place = self.offset - self.ahead.base
        return self.ahead.entries[place] if 0 <= place < len(self.ahead.entries) else None


class Delay:
    """The delay levels of a broker."""

    def __init__(
        self, table: DelayOffsetTable, store: MessageStore, rewriter: MessageRewriter, levels: str
    ) -> None:
        self.table = table
        self._store = store
        self._rewriter = rewriter
        self.levels = len(delays_ms(levels))
        self.lines: dict[int, Line] = {}  # by queue id
        self.dropped = 0
        self.late_ms = 0  # of the last one delivered
        self._turn = 0
        self._refused = False

    # --- parking

    def park(
        self, topic: str, queue_id: int, properties: dict[str, str], level: int
    ) -> ConsumeQueue:
        """The queue where a message waits; its own place is noted in its properties."""
        if level > self.levels:
            level = self.levels
            properties[PROPERTY_DELAY] = str(level)
        for name in TIMER_PROPERTIES:  # the level counts more
            properties.pop(name, None)
        properties[PROPERTY_REAL_TOPIC] = topic
        properties[PROPERTY_REAL_QUEUE_ID] = str(queue_id)
        queue = self._store.make_queue(_SCHEDULE, level - 1)
        assert queue is not None
        return queue

    # --- time

    def tables(self) -> tuple[PersistentTable, ...]:
        return (self.table,)

    def due(self) -> int:
        """When `tick` has something to do, as far as is known: it looks for new ones itself."""
        return min((line.due_ms for line in self.lines.values()), default=NEVER)

    def tick(self, now_ms: int) -> None:
        """Deliver what is due, level by level, but not more than a turn may take."""
        for queue in self._store.queues.of(_SCHEDULE):
            if queue.queue_id not in self.lines:
                self.lines[queue.queue_id] = Line(queue, self._begin(queue))
        lines = list(self.lines.values())
        messages, space = TICK_MESSAGES_MAX, TICK_BYTES_MAX
        self._turn += 1
        for number in range(len(lines)):
            line = lines[(self._turn + number) % len(lines)]
            line.due_ms = now_ms  # unless it says otherwise: the turn may be over before
            if messages > 0 and space > 0:
                messages, space = self._serve(line, now_ms, messages, space)
        self._note_progress(now_ms)

    def finish(self, now_ms: int) -> None:
        """Before a clean end, which makes all that was delivered durable: note where we are."""
        for line in self.lines.values():
            if line.offset != self.table.get(line.level):
                self.table.commit(line.level, line.offset, now_ms)

    def pinned_from(self) -> int | None:
        """Log offset of the first message that still waits; None if none does."""
        first = NEVER
        for queue in self._store.queues.of(_SCHEDULE):
            line = self.lines.get(queue.queue_id)
            if line is None or line.offset < queue.max_offset:
                head = line.head() if line is not None else None
                first = min(first, head[0] if head is not None else 0)
        return None if first == NEVER else first

    def waiting(self) -> list[tuple[int, int, int]]:
        """(level, next offset, end of its queue) of the levels that have ever been used."""
        confirm_offset = self._store.confirm_offset
        return [
            (line.level, line.offset, line.queue.visible_max(confirm_offset))
            for _, line in sorted(self.lines.items())
            if line.queue.max_offset > 0
        ]

    def _begin(self, queue: ConsumeQueue) -> int:
        """Where a level goes on: by the table, if its queue has got that place."""
        wanted = self.table.get(queue.queue_id + 1)
        offset = min(max(wanted, queue.min_offset), queue.max_offset)
        if offset != wanted and wanted > 0:
            log.warning(
                "delay level %d goes on at %d instead of %d, which its queue does not have",
                queue.queue_id + 1,
                offset,
                wanted,
            )
        return offset

    def _note_progress(self, now_ms: int) -> None:
        flushed = self._store.flusher.flushed()
        for line in self.lines.values():
            if line.mark is not None and line.mark[1] <= flushed:
                self.table.commit(line.level, line.mark[0], now_ms)
                line.mark = None
            if line.mark is None and line.offset != self.table.get(line.level):
                line.mark = (line.offset, self._store.log.end)

    # --- one level

    def _serve(self, line: Line, now_ms: int, messages: int, space: int) -> tuple[int, int]:
        """Deliver what is due of a level; what is left of the turn. Sets when it is due again."""
        while messages > 0 and space > 0:
            if line.reading is not None and not self._take_read(line, now_ms):
                return messages, space
            head = line.head()
            if head is None:
                if not self._read_on(line, now_ms):
                    return messages, space
                continue
            place, size, due_ms = head
            if due_ms > now_ms + max(line.queue.delay_ms, 0):
                self._set_ceiling(line, now_ms)
                continue
            if due_ms - now_ms <= AHEAD_MS and line.offset >= line.ahead.read_to:
                if not self._read_on(line, now_ms):
                    return messages, space
                continue
            if due_ms > now_ms:
                line.due_ms = due_ms
                return messages, space
            data = line.ahead.records.pop(place, None)
            if data is not None:
                if not self._deliver(data, place, now_ms):
                    line.ahead.records[place] = data
                    line.due_ms = now_ms + RETRY_MS
                    return messages, space
                line.delivered += 1
                self.late_ms = now_ms - due_ms
                messages, space = messages - 1, space - size
            line.offset += 1  # where there is no record, it is gone or never was
        return messages, space

    def _set_ceiling(self, line: Line, now_ms: int) -> None:
        """The clock was set back, or the level's delay made shorter: all that was stored before
        this moment has waited long enough after one more delay."""
        log.warning(
            "messages of delay level %d are due later than their delay allows: they are delivered "
            "in %d ms at the latest",
            line.level,
            line.queue.delay_ms,
        )
        line.ceiling = (line.queue.max_offset, now_ms + max(line.queue.delay_ms, 0))
        line.ahead = Ahead()

    def _read_on(self, line: Line, now_ms: int) -> bool:
        """Read from the level's place on; False if there is nothing, or the disk is waited for."""
        queue, confirm_offset = line.queue, self._store.confirm_offset
        line.offset = max(line.offset, queue.min_offset)
        end = queue.visible_max(confirm_offset)
        if line.offset >= end:
            line.ahead = Ahead()
            line.due_ms = NEVER
            return False
        read = self._reading(line, end, confirm_offset, now_ms + AHEAD_MS)
        found = read(False)
        if found is not None:
            line.ahead = found
            return True
        line.reading = self._store.disk.submit(lambda: _waited(read))
        line.due_ms = now_ms + POLL_MS
        return False

    def _take_read(self, line: Line, now_ms: int) -> bool:
        """Whether a read that waited for the disk is done; its outcome is the level's."""
        assert line.reading is not None
        if not line.reading.done():
            line.due_ms = now_ms + POLL_MS
            return False
        done, line.reading = line.reading, None
        error = done.exception()
        if error is not None:
            log.error("delay level %d can't be read: %s", line.level, error)
            line.due_ms = now_ms + RETRY_MS
            return False
        line.ahead = done.result()
        return True

    def _reading(
        self, line: Line, end: int, confirm_offset: int, soon_ms: int
    ) -> "Callable[[bool], Ahead | None]":
        """The work of reading; None if it would wait for the disk and may not. It changes nothing:
        it may run in the pool."""
        queue, base = line.queue, line.offset
        below, ceiling_ms = line.ceiling
        store = self._store

        def read(wait: bool) -> Ahead | None:
            data = queue.read(base, min(ENTRIES_MAX, end - base), wait=wait)
            if data is None:
                return None
            entries = unpack_entries(data)
            if base < below:
                entries = [
                    (place, size, min(due_ms, ceiling_ms) if offset < below else due_ms)
                    for offset, (place, size, due_ms) in enumerate(entries, base)
                ]
            if not entries:  # a hole: go on in the next file
                gap = queue.file_entries - base % queue.file_entries
                return Ahead(base, [(0, 0, 0)] * min(gap, end - base), read_to=end)
            soon = 0
            while soon < min(len(entries), RECORDS_MAX) and entries[soon][2] <= soon_ms:
                soon += 1
            ahead = Ahead(base, entries, read_to=base)
            if soon and not _read_records(
                store.new_reader(), queue, ahead, soon, confirm_offset, wait
            ):
                return None
            return ahead

        return read

    # --- one message

    def _deliver(self, data: bytes, place: int, now_ms: int) -> bool:
        """Store a message in its own queue; False if the store refuses for now."""
        rewriter = self._rewriter
        if not rewriter.read(data):
            return self._drop(place, "it is no message")
        properties = rewriter.properties()
        topic = properties.get(PROPERTY_REAL_TOPIC, "")
        try:
            number = int(properties.get(PROPERTY_REAL_QUEUE_ID, ""))
            queue = rewriter.destination(topic, number, place, now_ms)
        except (ValueError, PenstockError) as error:
            return self._drop(place, f"it has no place in {topic!r}: {error}")
        if queue is None:
            return self._drop(place, f"the topic {topic!r} was deleted after it had been sent")
        status = rewriter.put(queue, now_ms)
        if status == ILLEGAL:
            return self._drop(place, f"it can't be stored (problem {self._store.writer.problem})")
        if status != PUT_OK and not self._refused:
            log.error("delayed messages have to wait: %s", self._store.writer.fault)
        self._refused = status != PUT_OK
        return not self._refused

    def _drop(self, place: int, why: str) -> bool:
        self.dropped += 1
        log.error("the delayed message at the log offset %d is not delivered: %s", place, why)
        return True


def _waited(read: "Callable[[bool], Ahead | None]") -> Ahead:
    found = read(True)
    assert found is not None, "a read that may wait has an outcome"
    return found


def _read_records(
    reader: Reader, queue: ConsumeQueue, ahead: Ahead, count: int, confirm_offset: int, wait: bool
) -> bool:
    """Have the first records; False if that would wait for the disk and may not."""
    status = reader.find(queue, ahead.base, count, RECORDS_BYTES_MAX, confirm_offset, wait)
    if status == COLD:
        return False
    # What could not be found is gone: the level must get past it.
    ahead.read_to = max(reader.next_offset, ahead.base + 1)
    if status == FOUND:
        output = Output(1024)
        if reader.copy_to(output, wait):
            for record in split_records(output.take()):
                ahead.records[octets.get_i64(record, layout.PHYSICAL_OFFSET_AT)] = record
        elif not wait:
            return False
    return True
