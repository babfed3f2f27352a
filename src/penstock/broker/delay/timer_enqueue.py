"""Enqueue: adds the messages of the timer's queue to the timer's files.

A message with a distant delivery time is put into an earlier slot and rolled there: it is stored
again before retention deletes it. So the log is needed for a window of hours or days, and not for
the whole delay of a message.
"""

import logging
from collections import deque
from collections.abc import Container
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from penstock.broker.delay.delivery_time import (
    SLOT_MS_MAX,
    TimerKey,
    due_of,
    message_key,
    recalled_key,
    slot_of,
)
from penstock.broker.delay.timer_metrics import TimerMetrics
from penstock.broker.delay.timer_prefetch import TimerPrefetch, read_properties
from penstock.store.consumequeue.consumequeue import (
    FILLER_SIZE,
    ConsumeQueue,
    unpack_entries,
)
from penstock.store.lookup import GONE
from penstock.store.store import MessageStore
from penstock.store.timer.timer_store import TimerStore
from penstock.wire.codes import (
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_OUT_MS,
    PROPERTY_TIMER_ROLL_TIMES,
    TOPIC_TIMER,
)
from penstock.wire.java_numbers import parse_int

log = logging.getLogger(__name__)

TICK_MESSAGES_MAX: Final = 256
TICK_BYTES_MAX: Final = 1024 * 1024
UNWRITTEN_BYTES_MAX: Final = 8 * 1024 * 1024
"""Unwritten bytes of the timer log above which messages stay in the queue."""
POLL_MS: Final = 5
RETRY_MS: Final = 100
PIN_STEP_MS: Final = 60_000
WINDOW_SLOTS_MIN: Final = 60
NEVER: Final = 1 << 62
_TIMER: Final = TOPIC_TIMER.encode()

Batch = list[tuple[int, bytes]]
"""Messages of the queue from an offset on: log offset and record of each."""


@dataclass(slots=True)
class LogPin:
    """The log is needed from `offset` on until all slots before `until_ms` are done."""

    offset: int
    until_ms: int = 0


class Superseded:
    """During a rebuild: which messages were rolled to a newer record or recalled."""

    def __init__(self) -> None:
        # By topic and unique key: log offset of the newest record; log offset and due time of the
        # recall.
        self._rolled: dict[tuple[str, str], int] = {}
        self._recalled: dict[tuple[str, str], tuple[int, int]] = {}

    def add(self, properties: dict[str, str], log_offset: int, due_ms: int) -> None:
        recalls = recalled_key(properties)
        if recalls is not None:
            self._recalled[recalls] = (log_offset, due_ms)
        elif PROPERTY_TIMER_ROLL_TIMES in properties:
            self._rolled[message_key(properties)] = log_offset

    def contains(self, properties: dict[str, str], log_offset: int, due_ms: int) -> bool:
        """Whether a message has a newer record or was recalled."""
        key = message_key(properties)
        if not key[1] or recalled_key(properties) is not None:
            return False
        recall = self._recalled.get(key)
        if recall is not None and recall[0] > log_offset and abs(recall[1] - due_ms) <= SLOT_MS_MAX:
            return True  # the precision may have been different when it was recalled
        return self._rolled.get(key, 0) > log_offset


class TimerEnqueue:
    """Follows the timer's queue and adds its messages to the timer's files."""

    def __init__(
        self,
        store: MessageStore,
        files: TimerStore,
        prefetch: TimerPrefetch,
        metrics: TimerMetrics,
        *,
        rebuild: bool,
        delivered: Container[TimerKey] = (),
    ) -> None:
        """With `rebuild` the whole queue is read again, without messages that were `delivered`."""
        self._delivered = delivered
        self._store = store
        self._files = files
        self._prefetch = prefetch
        self._metrics = metrics
        queue = store.make_queue(_TIMER, 0)
        assert queue is not None
        self._queue: ConsumeQueue = queue
        self.start_offset = queue.max_offset
        self._reading: Future[tuple[Batch, int]] | None = None
        self._rebuild_to = 0  # a rebuild reads the queue up to this offset; 0: none
        self._scanning: Future[Superseded] | None = None  # the scan that precedes a rebuild
        self._superseded = Superseded()
        self.due_ms = NEVER
        self.pending_recalls: dict[tuple[str, str], int] = {}
        """Number of recalls by key that are stored but not yet in the files."""
        self.done_to_ms = 0
        """All slots before this time are done, and that is on the disk."""
        self._pins: deque[LogPin] = deque()  # ascending; the last one is of the current minute
        self._pinned_ms = -PIN_STEP_MS
        self._next_log_offset = 0
        self._window_ms = 0
        self._open(queue, rebuild=rebuild)

    # --- opening

    def _open(self, queue: ConsumeQueue, *, rebuild: bool) -> None:
        offset = self._files.progress.queue_offset
        if rebuild:
            offset, self._rebuild_to = queue.min_offset, queue.max_offset
            if offset < self._rebuild_to:
                self._scan_superseded()
            else:
                self._finish_rebuild()
        self._set_offset(min(max(offset, queue.min_offset), queue.max_offset))
        entry = queue.entry(self.offset)
        self._next_log_offset = entry[0] if entry is not None else self._store.log.end
        self._pins.extend(
            LogPin(log_offset, until) for until, log_offset in self._files.first_offsets()
        )

    def _scan_superseded(self) -> None:
        queue, end = self._queue, self._rebuild_to

        def scan() -> Superseded:
            superseded = Superseded()
            offset = queue.min_offset
            while offset < end:
                batch, count = self._read(queue, offset, end, wait=True) or ([], 0)
                for log_offset, data in batch:
                    found = read_properties(data, log_offset)
                    due_ms = due_of(found[0], found[1].store_ms) if found is not None else None
                    if found is not None and due_ms is not None:
                        superseded.add(found[0], log_offset, due_ms)
                offset += max(count, 1)
            return superseded

        self._scanning = self._store.disk.submit(scan)

    def _finish_scan(self, now_ms: int) -> bool:
        """Whether no scan is in flight."""
        if self._scanning is None:
            return True
        if not self._scanning.done():
            self.due_ms = now_ms + POLL_MS
            return False
        error = self._scanning.exception()
        if error is not None:
            log.error("can't read the queue of the timer: %s", error)
            self._scan_superseded()
            self.due_ms = now_ms + RETRY_MS
            return False
        self._superseded, self._scanning = self._scanning.result(), None
        return True

    def _finish_rebuild(self) -> None:
        self._rebuild_to, self._superseded, self._scanning = 0, Superseded(), None
        self._files.rebuild_done()

    @property
    def offset(self) -> int:
        return self._files.progress.queue_offset

    def _set_offset(self, offset: int) -> None:
        self._files.progress = self._files.progress._replace(queue_offset=offset)

    @property
    def lag(self) -> int:
        """The number of messages that are not in the files yet."""
        return max(self._queue.max_offset - self.offset, 0)

    @property
    def caught_up(self) -> bool:
        """Whether all messages that were in the queue at start are in the files."""
        return self.offset >= self.start_offset

    # --- time

    def tick(self, now_ms: int) -> None:
        """Enqueue messages up to the limits of a tick; sets `due_ms`."""
        queue = self._find_queue()
        self.due_ms = NEVER
        if not self._finish_scan(now_ms):
            return
        if self._files.log.unwritten > UNWRITTEN_BYTES_MAX:
            self.due_ms = now_ms + RETRY_MS
            return
        end = queue.visible_max(self._store.confirm_offset)
        if self._reading is not None:
            batch = self._finish_read(now_ms)
        elif self.offset < end:
            batch = self._start_read(queue, end, now_ms)
        else:
            batch = None
        if batch is not None:
            for log_offset, data in batch[0]:
                self._next_log_offset = log_offset
                self._enqueue(log_offset, data, now_ms)
                self._next_log_offset = log_offset + len(data)
            self._set_offset(self.offset + batch[1])
            self._metrics.on_read(now_ms)
            if self._rebuild_to and self.offset >= self._rebuild_to:
                self._finish_rebuild()
        if self.offset < queue.max_offset:
            unconfirmed = self.offset >= end
            self.due_ms = min(
                self.due_ms, now_ms + (POLL_MS if unconfirmed or self._reading else 0)
            )

    def _find_queue(self) -> ConsumeQueue:
        queue = self._store.queues.get(_TIMER, 0) or self._store.make_queue(_TIMER, 0)
        assert queue is not None
        if queue is not self._queue:  # the topic was deleted; its messages are in the files
            self._queue = queue
            self._reading = None
            self._set_offset(queue.min_offset)
            self._finish_rebuild()
            self.start_offset = queue.max_offset
        if not queue.min_offset <= self.offset <= queue.max_offset:
            self._set_offset(min(max(self.offset, queue.min_offset), queue.max_offset))
        return queue

    def _start_read(self, queue: ConsumeQueue, end: int, now_ms: int) -> tuple[Batch, int] | None:
        offset = self.offset
        found = self._read(queue, offset, end, wait=False)
        if found is None:
            self._reading = self._store.disk.submit(
                lambda: self._read(queue, offset, end, wait=True) or ([], 0)
            )
            self.due_ms = now_ms + POLL_MS
        return found

    def _finish_read(self, now_ms: int) -> tuple[Batch, int] | None:
        assert self._reading is not None
        if not self._reading.done():
            self.due_ms = now_ms + POLL_MS
            return None
        done, self._reading = self._reading, None
        error = done.exception()
        if error is not None:
            log.error("can't read the queue of the timer: %s", error)
            self.due_ms = now_ms + RETRY_MS
            return None
        return done.result()

    def _read(
        self, queue: ConsumeQueue, offset: int, end: int, *, wait: bool
    ) -> tuple[Batch, int] | None:
        """Messages from an offset on and the number of entries; None if it would have to wait."""
        entries = queue.read(offset, min(TICK_MESSAGES_MAX, end - offset), wait=wait)
        if entries is None:
            return None
        batch: Batch = []
        count = total = 0
        for log_offset, size, _ in unpack_entries(entries):
            count += 1
            if not 0 < size < FILLER_SIZE:
                continue
            data = self._store.lookup.read_record(log_offset, size, wait=wait)
            if data is None:
                if batch:
                    return batch, count - 1
                return None
            if data != GONE:
                batch.append((log_offset, data))
                total += size
            if total >= TICK_BYTES_MAX:
                break
        if count == 0:  # a gap: continue in the next file
            count = min(queue.file_entries - offset % queue.file_entries, end - offset)
        return batch, count

    # --- one message

    def _enqueue(self, log_offset: int, data: bytes, now_ms: int) -> None:
        found = read_properties(data, log_offset)
        due_ms = due_of(found[0], found[1].store_ms) if found is not None else None
        if found is None or due_ms is None:
            self._metrics.dropped += 1
            log.error("the timer message at log offset %d has no delivery time", log_offset)
            return
        properties = found[0]
        recalls = recalled_key(properties)
        if self._rebuild_to and (
            self._files.was_delivered(found[1].queue_offset, due_ms)
            or self._superseded.contains(properties, log_offset, due_ms)
            or (*message_key(properties), properties[PROPERTY_TIMER_OUT_MS]) in self._delivered
        ):
            return
        self._add_to_slot(log_offset, len(data), properties, due_ms, now_ms)
        if recalls is None:
            topic = properties.get(PROPERTY_REAL_TOPIC, "")
            self._metrics.enqueued(topic, now_ms, due_ms - now_ms)
        elif recalls in self.pending_recalls:
            self.pending_recalls[recalls] -= 1
            if self.pending_recalls[recalls] <= 0:
                del self.pending_recalls[recalls]

    def _add_to_slot(
        self, log_offset: int, size: int, properties: dict[str, str], due_ms: int, now_ms: int
    ) -> None:
        """Add a message to the slot of its delivery time, or to an earlier one to be rolled.

        A recall has the first millisecond of the slot that its message had when it was sent. The
        precision may have been different then, so a recall is added to all slots of SLOT_MS_MAX.
        """
        files = self._files
        self._set_window(now_ms)
        wanted_ms = slot_of(due_ms, files.precision_ms)
        slot_ms, roll = files.choose_slot(wanted_ms, now_ms, self._window_ms)
        recalls = recalled_key(properties)
        last_ms = slot_ms
        if recalls is not None and not roll:
            last_ms = max(slot_ms, slot_of(due_ms - 1 + SLOT_MS_MAX, files.precision_ms))
        pin = self._pins[-1]
        pin.until_ms = max(pin.until_ms, last_ms + files.precision_ms)
        for at_ms in range(last_ms, slot_ms - 1, -files.precision_ms):
            self._prefetch.add(
                at_ms,
                now_ms,
                offset=log_offset,
                size=size,
                topic=properties.get(PROPERTY_REAL_TOPIC, ""),
                due_ms=slot_ms if roll else due_ms,
                roll=roll,
                recalls=recalls,
                copy=at_ms != slot_ms,
            )

    def add_pending_recall(self, recalls: tuple[str, str]) -> None:
        """Count a recall that is stored but not yet in the files."""
        self.pending_recalls[recalls] = self.pending_recalls.get(recalls, 0) + 1

    # --- retention

    def _set_window(self, now_ms: int) -> None:
        """Set how far ahead a slot may be without rolling its messages."""
        config, precision_ms = self._store.config, self._files.precision_ms
        window_ms = min(config.timer_roll_slots * precision_ms, config.retain_hours * 1_800_000)
        self._window_ms = max(window_ms, WINDOW_SLOTS_MIN * precision_ms)
        if not self._pins or not 0 <= now_ms - self._pinned_ms < PIN_STEP_MS:
            self._pinned_ms = now_ms
            self._pins.append(LogPin(self._next_log_offset))

    def _drop_pins(self) -> None:
        while self._pins and self._pins[0].until_ms <= self.done_to_ms:
            self._pins.popleft()

    def pinned_from(self) -> int | None:
        """Log offset of the oldest message that may be needed; None if there is none."""
        self._drop_pins()
        pins = [self._pins[0].offset] if self._pins else []
        if self.lag:
            pins.append(self._next_log_offset)
        return min(pins, default=None)

    def wait_for_reads(self) -> None:
        """Wait for reads in the thread pool and discard their results."""
        if self._scanning is not None:
            self._scanning.exception()
            self._scanning = None
        if self._reading is not None:
            self._reading.exception()
            self._reading = None


def rolled_properties(properties: dict[str, str], due_ms: int) -> dict[str, str]:
    """The properties of a message that is rolled."""
    times = parse_int(properties.get(PROPERTY_TIMER_ROLL_TIMES, "")) or 0
    return {
        **properties,
        PROPERTY_TIMER_ROLL_TIMES: str(times + 1),
        "TIMER_DELIVER_MS": str(due_ms),
    }
