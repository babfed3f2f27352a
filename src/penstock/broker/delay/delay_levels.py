"""Delay levels: messages are stored by level, and delivered to their real queue when they are due.

A message with DELAY > 0 is stored in SCHEDULE_TOPIC_XXXX, in the queue of its level, with its real
topic and queue in REAL_TOPIC and REAL_QID. All messages of a level have the same delay, so the
queue is in the order of delivery. Its entries hold the delivery time in place of the tag hash.

    entries  the next entries of a level are prefetched to know when the first message is due
    records  those that are due within PREFETCH_MS are prefetched, so that delivery reads no disk

The event loop never waits for the disk. `tick` delivers a bounded number of messages; `due` says
when to call it again. The offset of a level is saved only when the delivered messages are on the
disk: after a power failure some are delivered twice, but none is lost. Their flush is demanded
every SAVE_MS, and the offsets are saved with the next tick. If only the process dies,
`delivered_offsets` tells what was delivered, also if it dies again and again after each start.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final

from penstock.broker.delay.delivered_offsets import DeliveredOffsets
from penstock.broker.rewrite import MessageRewriter
from penstock.config import delays_ms
from penstock.errors import MessageIllegal, PenstockError
from penstock.rpc.answers import PersistentTable
from penstock.store.consumequeue.consumequeue import ConsumeQueue, unpack_entries
from penstock.store.get import COLD, FOUND, Reader
from penstock.store.put import ILLEGAL, PUT_OK
from penstock.store.store import MessageStore
from penstock.store.tables.config_tables import DelayOffsetTable
from penstock.wire import layout, octets
from penstock.wire.codes import (
    PROPERTY_DELAY,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    TOPIC_SCHEDULE,
)
from penstock.wire.java_numbers import parse_int
from penstock.wire.message import split_records
from penstock.wire.output import Output

log = logging.getLogger(__name__)

PREFETCH_MS: Final = 1_500
"""Records are prefetched this long before they are due: longer than the server ever sleeps."""
ENTRIES_MAX: Final = 500
"""Entries of a level that are prefetched."""
RECORDS_MAX: Final = 128
RECORDS_BYTES_MAX: Final = 256 * 1024
"""Records of a level that are prefetched: at least one, whatever its size."""
TICK_MESSAGES_MAX: Final = 128
TICK_BYTES_MAX: Final = 1024 * 1024
"""Messages that one tick delivers."""
POLL_MS: Final = 5
"""Interval at which a read in the thread pool is polled."""
RETRY_MS: Final = 100
"""Pause after the store refused a message, as in RocketMQ."""
SAVE_MS: Final = 500
"""Interval at which delivered messages are flushed and offsets are saved while there are any."""
NEVER: Final = 1 << 62

TIMER_PROPERTIES: Final = ("TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS")

_SCHEDULE: Final = TOPIC_SCHEDULE.encode()


def delay_level(properties: dict[str, str]) -> int:
    """The delay level of a message, 0 or less for none; raises MessageIllegal if not a number."""
    text = properties.get(PROPERTY_DELAY, "0")
    level = parse_int(text)
    if level is None:
        raise MessageIllegal(
            f"the delay level (DELAY) is not a number: {text[:32]!r}",
            hint="use a level of 1 or more, or remove the property",
        )
    return level


@dataclass(slots=True)
class Prefetched:
    """Prefetched entries of a level from the offset `base` on, and records of the first ones."""

    base: int = 0
    entries: list[tuple[int, int, int]] = field(default_factory=list)  # log offset, size, due
    records: dict[int, bytes] = field(default_factory=dict)  # by log offset
    read_to: int = 0  # records were read up to this queue offset

    @property
    def end(self) -> int:
        return self.base + len(self.entries)


@dataclass(slots=True)
class DelayLevel:
    """One delay level: its queue and its progress."""

    queue: ConsumeQueue
    offset: int  # of the next message to deliver
    prefetched: Prefetched = field(default_factory=Prefetched)
    reading: "Future[Prefetched] | None" = None
    due_ms: int = 0
    # Messages below the first value are due at the second value at the latest.
    ceiling: tuple[int, int] = (0, 0)
    # An offset that is saved once the log is flushed up to the second value.
    unflushed: tuple[int, int] | None = None
    delivered: int = 0

    @property
    def number(self) -> int:
        return self.queue.queue_id + 1

    def head(self) -> tuple[int, int, int] | None:
        """Log offset, size and delivery time of the next message, if it was prefetched."""
        log_offset = self.offset - self.prefetched.base
        return (
            self.prefetched.entries[log_offset]
            if 0 <= log_offset < len(self.prefetched.entries)
            else None
        )


class Delay:
    """The delay levels of a broker."""

    def __init__(
        self,
        table: DelayOffsetTable,
        store: MessageStore,
        rewriter: MessageRewriter,
        levels: str,
        *,
        copied: bool = False,
    ) -> None:
        """With `copied` the table is that of the master, and nothing is delivered here."""
        self.table = table
        self._store = store
        self._rewriter = rewriter
        self.level_count = len(delays_ms(levels))
        self.levels: dict[int, DelayLevel] = {}  # by queue id
        self.dropped = 0
        self.late_ms = 0  # of the last delivered message
        self._note = DeliveredOffsets(store)
        if copied:
            self._note.delete()
        self._noted = self._note.load()  # by level
        self._round_robin = 0
        self._refused = False
        self._demanded_ms = self._saved_ms = 0

    # --- redirect

    def redirect(
        self, topic: str, queue_id: int, properties: dict[str, str], level: int
    ) -> ConsumeQueue:
        """The queue of a level; the real topic and queue are added to the properties."""
        if level > self.level_count:
            level = self.level_count
            properties[PROPERTY_DELAY] = str(level)
        for name in TIMER_PROPERTIES:  # the delay level takes precedence
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
        """When `tick` has to be called, by what was read so far; it finds new messages itself."""
        return min((level.due_ms for level in self.levels.values()), default=NEVER)

    def tick(self, now_ms: int) -> None:
        """Deliver the messages that are due, level by level, up to the limits of a tick."""
        for queue in self._store.queues.of(_SCHEDULE):
            if queue.queue_id not in self.levels:
                self.levels[queue.queue_id] = DelayLevel(queue, self._start_offset(queue))
        levels = list(self.levels.values())
        messages, space = TICK_MESSAGES_MAX, TICK_BYTES_MAX
        self._round_robin += 1
        for number in range(len(levels)):
            level = levels[(self._round_robin + number) % len(levels)]
            level.due_ms = now_ms  # in case the limits of this tick are reached first
            if messages > 0 and space > 0:
                messages, space = self._deliver_level(level, now_ms, messages, space)
        self._note_delivered()
        self._save_progress(now_ms)

    def finish(self, now_ms: int) -> None:
        """Save all offsets before a clean stop, which flushes the delivered messages."""
        for level in self.levels.values():
            if level.offset != self.table.get(level.number):
                self.table.commit(level.number, level.offset, now_ms)

    def pinned_from(self) -> int | None:
        """Log offset of the oldest message that is not delivered; None if there is none."""
        first = NEVER
        for queue in self._store.queues.of(_SCHEDULE):
            level = self.levels.get(queue.queue_id)
            if level is None or level.offset < queue.max_offset:
                head = level.head() if level is not None else None
                first = min(first, head[0] if head is not None else 0)
        return None if first == NEVER else first

    def progress(self) -> list[tuple[int, int, int]]:
        """(level, next offset, end of its queue) for each level that has been used."""
        confirm_offset = self._store.confirm_offset
        return [
            (level.number, level.offset, level.queue.visible_max(confirm_offset))
            for _, level in sorted(self.levels.items())
            if level.queue.max_offset > 0
        ]

    def _start_offset(self, queue: ConsumeQueue) -> int:
        """The saved or noted offset of a level, limited to what its queue holds."""
        level = queue.queue_id + 1
        wanted = max(self.table.get(level), self._noted.get(level, 0))
        offset = min(max(wanted, queue.min_offset), queue.max_offset)
        if offset != wanted and wanted > 0:
            log.warning(
                "delay level %d continues at offset %d: its queue does not hold offset %d",
                level,
                offset,
                wanted,
            )
        return offset

    def _note_delivered(self) -> None:
        offsets = {level.number: level.offset for level in self.levels.values()}
        if offsets == self._noted:
            return
        self._store.writer.publish()  # the note must not be ahead of the log
        if self._store.log.written == self._store.log.end:
            self._note.write(offsets)
            self._noted = offsets

    def _save_progress(self, now_ms: int) -> None:
        flushed = self._store.flusher.flushed()
        for level in self.levels.values():
            if level.unflushed is not None and level.unflushed[1] <= flushed:
                self.table.commit(level.number, level.unflushed[0], now_ms)
                level.unflushed = None
            if level.unflushed is None and level.offset != self.table.get(level.number):
                level.unflushed = (level.offset, self._store.log.end)
        if any(level.unflushed is not None for level in self.levels.values()) and not (
            0 <= now_ms - self._demanded_ms < SAVE_MS
        ):
            self._demanded_ms = now_ms
            self._store.writer.publish()  # what this tick has put is to be flushed as well
            self._store.flusher.demand()

    def take_save(self, now_ms: int) -> bool:
        """Whether the table of offsets is to be saved now, before the regular time."""
        if not self.table.dirty or 0 <= now_ms - self._saved_ms < SAVE_MS:
            return False
        self._saved_ms = now_ms
        return True

    # --- one level

    def _deliver_level(
        self, level: DelayLevel, now_ms: int, messages: int, space: int
    ) -> tuple[int, int]:
        """Deliver the due messages of a level and set its next due time.

        Returns the messages and bytes that are left of the tick's limits.
        """
        while messages > 0 and space > 0:
            if level.reading is not None and not self._finish_read(level, now_ms):
                return messages, space
            head = level.head()
            if head is None:
                if not self._prefetch(level, now_ms):
                    return messages, space
                continue
            log_offset, size, due_ms = head
            if due_ms > now_ms + max(level.queue.delay_ms, 0):
                self._set_ceiling(level, now_ms)
                continue
            if due_ms - now_ms <= PREFETCH_MS and level.offset >= level.prefetched.read_to:
                if not self._prefetch(level, now_ms):
                    return messages, space
                continue
            if due_ms > now_ms:
                level.due_ms = due_ms
                return messages, space
            data = level.prefetched.records.pop(log_offset, None)
            if data is not None:
                if not self._deliver(data, log_offset, now_ms):
                    level.prefetched.records[log_offset] = data
                    level.due_ms = now_ms + RETRY_MS
                    return messages, space
                level.delivered += 1
                self.late_ms = now_ms - due_ms
                messages, space = messages - 1, space - size
            level.offset += 1  # an entry without a record was deleted by retention
        return messages, space

    def _set_ceiling(self, level: DelayLevel, now_ms: int) -> None:
        """Limit the delay after the clock was set back or the level's delay was shortened: messages
        stored before now are due after one more delay at the latest."""
        log.warning(
            "messages of delay level %d are due later than their delay allows; "
            "they will be delivered within %d ms",
            level.number,
            level.queue.delay_ms,
        )
        level.ceiling = (level.queue.max_offset, now_ms + max(level.queue.delay_ms, 0))
        level.prefetched = Prefetched()

    def _prefetch(self, level: DelayLevel, now_ms: int) -> bool:
        """Prefetch from the level's offset on; False if there is nothing or a read is in flight."""
        queue, confirm_offset = level.queue, self._store.confirm_offset
        level.offset = max(level.offset, queue.min_offset)
        end = queue.visible_max(confirm_offset)
        if level.offset >= end:
            level.prefetched = Prefetched()
            level.due_ms = NEVER
            return False
        read = self._read_job(level, end, confirm_offset, now_ms + PREFETCH_MS)
        found = read(False)
        if found is not None:
            level.prefetched = found
            return True
        level.reading = self._store.disk.submit(lambda: _require(read))
        level.due_ms = now_ms + POLL_MS
        return False

    def _finish_read(self, level: DelayLevel, now_ms: int) -> bool:
        """Take the result of a read in the thread pool; False if it is not done or failed."""
        assert level.reading is not None
        if not level.reading.done():
            level.due_ms = now_ms + POLL_MS
            return False
        done, level.reading = level.reading, None
        error = done.exception()
        if error is not None:
            log.error("can't read delay level %d: %s", level.number, error)
            level.due_ms = now_ms + RETRY_MS
            return False
        level.prefetched = done.result()
        return True

    def _read_job(
        self, level: DelayLevel, end: int, confirm_offset: int, soon_ms: int
    ) -> "Callable[[bool], Prefetched | None]":
        """A function that prefetches; it returns None if it needs the disk and may not wait.

        The function changes no state, so it may run in the thread pool.
        """
        queue, base = level.queue, level.offset
        below, ceiling_ms = level.ceiling
        store = self._store

        def read(wait: bool) -> Prefetched | None:
            data = queue.read(base, min(ENTRIES_MAX, end - base), wait=wait)
            if data is None:
                return None
            entries = unpack_entries(data)
            if base < below:
                entries = [
                    (log_offset, size, min(due_ms, ceiling_ms) if offset < below else due_ms)
                    for offset, (log_offset, size, due_ms) in enumerate(entries, base)
                ]
            if not entries:  # a gap: continue in the next file
                gap = queue.file_entries - base % queue.file_entries
                return Prefetched(base, [(0, 0, 0)] * min(gap, end - base), read_to=end)
            soon = 0
            while soon < min(len(entries), RECORDS_MAX) and entries[soon][2] <= soon_ms:
                soon += 1
            prefetched = Prefetched(base, entries, read_to=base)
            if soon and not _read_records(
                store.new_reader(), queue, prefetched, soon, confirm_offset, wait
            ):
                return None
            return prefetched

        return read

    # --- one message

    def _deliver(self, data: bytes, log_offset: int, now_ms: int) -> bool:
        """Store a message in its real queue; False if the store refuses it for now."""
        rewriter = self._rewriter
        if not rewriter.read(data):
            return self._drop(log_offset, "it is not a message")
        properties = rewriter.properties()
        topic = properties.get(PROPERTY_REAL_TOPIC, "")
        try:
            queue = rewriter.destination(properties, log_offset, now_ms)
        except PenstockError as error:
            return self._drop(log_offset, f"it can't be stored in topic {topic}: {error}")
        if queue is None:
            return self._drop(log_offset, f"the topic {topic} was deleted after it was sent")
        status = rewriter.put(queue, now_ms)
        if status == ILLEGAL:
            return self._drop(
                log_offset, f"it can't be stored (problem {self._store.writer.problem})"
            )
        if status != PUT_OK and not self._refused:
            log.error("can't store delayed messages, will retry: %s", self._store.writer.fault)
        self._refused = status != PUT_OK
        return not self._refused

    def _drop(self, log_offset: int, why: str) -> bool:
        self.dropped += 1
        log.error("dropped the delayed message at log offset %d: %s", log_offset, why)
        return True


def _require(read: "Callable[[bool], Prefetched | None]") -> Prefetched:
    found = read(True)
    assert found is not None, "a read that may wait returns a result"
    return found


def _read_records(
    reader: Reader,
    queue: ConsumeQueue,
    prefetched: Prefetched,
    count: int,
    confirm_offset: int,
    wait: bool,
) -> bool:
    """Read the first records; False if it needs the disk and may not wait."""
    status = reader.find(queue, prefetched.base, count, RECORDS_BYTES_MAX, confirm_offset, wait)
    if status == COLD:
        return False
    # A record that was not found is deleted: the level continues after it.
    prefetched.read_to = max(reader.next_offset, prefetched.base + 1)
    if status == FOUND:
        output = Output(1024)
        if reader.copy_to(output, wait):
            for record in split_records(output.take()):
                prefetched.records[octets.get_i64(record, layout.PHYSICAL_OFFSET_AT)] = record
        elif not wait:
            return False
    return True
