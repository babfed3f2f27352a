"""From the queue of timed messages into the timer's files: every message gets its unit there.

Messages far ahead get a slot of today's and roll on from there: they are stored once more before
retention could take them. So the log is needed for a window of some hours or days, and not for as
long as a message may wait.
"""

import logging
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from penstock.broker.delay.delivery_time import SLOT_MS_MAX, due_of, key_of, recalled_key, slot_of
from penstock.broker.delay.timer_counters import TimerFigures
from penstock.broker.delay.timer_prefetch import Near, read_properties
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
    PROPERTY_TIMER_ROLL_TIMES,
    TOPIC_TIMER,
)

log = logging.getLogger(__name__)

TICK_MESSAGES: Final = 256
TICK_BYTES: Final = 1024 * 1024
UNWRITTEN_MAX: Final = 8 * 1024 * 1024
"""Bytes of units that the disk does not take: more wait in their queue."""
POLL_MS: Final = 5
RETRY_MS: Final = 100
PIN_STEP_MS: Final = 60_000
WINDOW_SLOTS_MIN: Final = 60
NEVER: Final = 1 << 62
_TIMER: Final = TOPIC_TIMER.encode()

Batch = list[tuple[int, bytes]]
"""Messages of the queue from an offset on: the place of each in the log, and its bytes."""


@dataclass(slots=True)
class Pin:
    """The log is needed from an offset on, until a slot is done."""

    offset: int
    until_ms: int = 0


class Settled:
    """Where all is taken again: what other messages of the queue say of a message."""

    def __init__(self) -> None:
        self._rolled: dict[tuple[str, str], int] = {}  # the newest record of a message
        self._recalled: dict[tuple[str, str], tuple[int, int]] = {}  # the recall, and for when

    def note(self, properties: dict[str, str], place: int, due_ms: int) -> None:
        recalls = recalled_key(properties)
        if recalls is not None:
            self._recalled[recalls] = (place, due_ms)
        elif PROPERTY_TIMER_ROLL_TIMES in properties:
            self._rolled[key_of(properties)] = place

    def has(self, properties: dict[str, str], place: int, due_ms: int) -> bool:
        """Whether a message is in a newer record, or was recalled."""
        key = key_of(properties)
        if not key[1] or recalled_key(properties) is not None:
            return False
        recall = self._recalled.get(key)
        if recall is not None and recall[0] > place and abs(recall[1] - due_ms) <= SLOT_MS_MAX:
            return True  # slots may have had another length when it was recalled
        return self._rolled.get(key, 0) > place


class Feed:
    """Follows the queue."""

    def __init__(
        self, store: MessageStore, files: TimerStore, near: Near, figures: TimerFigures
    ) -> None:
        self._store = store
        self._files = files
        self._near = near
        self._figures = figures
        self._queue = store.queues.get(_TIMER, 0)
        self._reading: Future[tuple[Batch, int]] | None = None
        self._again_to = 0  # all is taken again up to here
        self._finding: Future[Settled] | None = None  # before that
        self._settled = Settled()
        self.due_ms = NEVER
        self.expected: dict[tuple[str, str], int] = {}
        """Recalls that are stored and not in the files yet, by key: how many."""
        self.done_ms = 0
        """What waited in slots before is done, durably."""
        self._pins: deque[Pin] = deque()  # the last one is of this minute
        self._pinned_ms = -PIN_STEP_MS
        self._next_place = 0
        self._window_ms = 0

    # --- opening

    def open(self, *, again: bool) -> None:
        """Find the place in the queue; `again`: all of it is taken once more."""
        queue = self._store.make_queue(_TIMER, 0) if self._queue is None else self._queue
        assert queue is not None
        self._queue = queue
        offset = self._files.progress.queue_offset
        if again:
            offset, self._again_to = queue.min_offset, queue.max_offset
            if offset < self._again_to:
                self._find_settled()
            else:
                self._end_again()
        self._go_to(min(max(offset, queue.min_offset), queue.max_offset))
        entry = queue.entry(self.offset)
        self._next_place = entry[0] if entry is not None else self._store.log.end
        self._pins.extend(Pin(place, until) for until, place in self._files.first_offsets())
        self.start_offset = queue.max_offset

    def _find_settled(self) -> None:
        queue, end = self._queue, self._again_to
        assert queue is not None

        def find() -> Settled:
            settled = Settled()
            offset = queue.min_offset
            while offset < end:
                batch, count = self._read(queue, offset, end, wait=True) or ([], 0)
                for place, data in batch:
                    found = read_properties(data, place)
                    due_ms = due_of(found[0], found[1].store_ms) if found is not None else None
                    if found is not None and due_ms is not None:
                        settled.note(found[0], place, due_ms)
                offset += max(count, 1)
            return settled

        self._finding = self._store.disk.submit(find)

    def _finish_finding(self, now_ms: int) -> bool:
        """Whether nothing has to be found any more."""
        if self._finding is None:
            return True
        if not self._finding.done():
            self.due_ms = now_ms + POLL_MS
            return False
        error = self._finding.exception()
        if error is not None:
            log.error("the queue of timed messages can't be read: %s", error)
            self._find_settled()
            self.due_ms = now_ms + RETRY_MS
            return False
        self._settled, self._finding = self._finding.result(), None
        return True

    def _end_again(self) -> None:
        self._again_to, self._settled, self._finding = 0, Settled(), None
        self._files.rebuilding = False

    @property
    def offset(self) -> int:
        return self._files.progress.queue_offset

    def _go_to(self, offset: int) -> None:
        self._files.progress = self._files.progress._replace(queue_offset=offset)

    @property
    def behind(self) -> int:
        """How many messages are not in the files yet."""
        return max(self._queue.max_offset - self.offset, 0) if self._queue is not None else 0

    @property
    def caught_up(self) -> bool:
        """Whether all that was in the queue at the start is in the files."""
        return self.offset >= self.start_offset

    # --- time

    def tick(self, now_ms: int) -> None:
        """Take messages, as many as one turn allows. Sets when that has to go on."""
        queue = self._find_queue()
        self.due_ms = NEVER
        if not self._finish_finding(now_ms):
            return
        if self._files.log.unwritten > UNWRITTEN_MAX:
            self.due_ms = now_ms + RETRY_MS
            return
        end = queue.visible_max(self._store.confirm_offset)
        if self._reading is not None:
            batch = self._finish_reading(now_ms)
        elif self.offset < end:
            batch = self._begin_reading(queue, end, now_ms)
        else:
            batch = None
        if batch is not None:
            for place, data in batch[0]:
                self._next_place = place
                self._take(place, data, now_ms)
                self._next_place = place + len(data)
            self._go_to(self.offset + batch[1])
            self._figures.fed(now_ms)
            if self._again_to and self.offset >= self._again_to:
                self._end_again()
        if self.offset < queue.max_offset:
            hidden = self.offset >= end
            self.due_ms = min(self.due_ms, now_ms + (POLL_MS if hidden or self._reading else 0))

    def _find_queue(self) -> ConsumeQueue:
        queue = self._store.queues.get(_TIMER, 0) or self._store.make_queue(_TIMER, 0)
        assert queue is not None
        if queue is not self._queue:  # the topic was deleted: its messages are in the files
            self._queue = queue
            self._reading = None
            self._go_to(queue.min_offset)
            self._end_again()
            self.start_offset = queue.max_offset
        if not queue.min_offset <= self.offset <= queue.max_offset:
            self._go_to(min(max(self.offset, queue.min_offset), queue.max_offset))
        return queue

    def _begin_reading(
        self, queue: ConsumeQueue, end: int, now_ms: int
    ) -> tuple[Batch, int] | None:
        offset = self.offset
        found = self._read(queue, offset, end, wait=False)
        if found is None:
            self._reading = self._store.disk.submit(
                lambda: self._read(queue, offset, end, wait=True) or ([], 0)
            )
            self.due_ms = now_ms + POLL_MS
        return found

    def _finish_reading(self, now_ms: int) -> tuple[Batch, int] | None:
        assert self._reading is not None
        if not self._reading.done():
            self.due_ms = now_ms + POLL_MS
            return None
        done, self._reading = self._reading, None
        error = done.exception()
        if error is not None:
            log.error("the queue of timed messages can't be read: %s", error)
            self.due_ms = now_ms + RETRY_MS
            return None
        return done.result()

    def _read(
        self, queue: ConsumeQueue, offset: int, end: int, *, wait: bool
    ) -> tuple[Batch, int] | None:
        """Messages from an offset on, and how many entries that are; None if it would wait."""
        entries = queue.read(offset, min(TICK_MESSAGES, end - offset), wait=wait)
        if entries is None:
            return None
        batch: Batch = []
        count = total = 0
        for place, size, _ in unpack_entries(entries):
            count += 1
            if not 0 < size < FILLER_SIZE:
                continue
            data = self._store.lookup.read_record(place, size, wait=wait)
            if data is None:
                if batch:
                    return batch, count - 1
                return None
            if data != GONE:
                batch.append((place, data))
                total += size
            if total >= TICK_BYTES:
                break
        if count == 0:  # a hole: go on in the next file
            count = min(queue.file_entries - offset % queue.file_entries, end - offset)
        return batch, count

    # --- one message

    def _take(self, place: int, data: bytes, now_ms: int) -> None:
        found = read_properties(data, place)
        due_ms = due_of(found[0], found[1].store_ms) if found is not None else None
        if found is None or due_ms is None:
            self._figures.dropped += 1
            log.error("the message at the log offset %d has no time of delivery", place)
            return
        properties = found[0]
        recalls = recalled_key(properties)
        if self._again_to and (
            self._files.was_done(found[1].queue_offset, due_ms)
            or self._settled.has(properties, place, due_ms)
        ):
            return
        self._link(place, len(data), properties, due_ms, now_ms)
        if recalls is None:
            self._figures.enqueued(properties.get(PROPERTY_REAL_TOPIC, ""), now_ms)
        elif recalls in self.expected:
            self.expected[recalls] -= 1
            if self.expected[recalls] <= 0:
                del self.expected[recalls]

    def _link(
        self, place: int, size: int, properties: dict[str, str], due_ms: int, now_ms: int
    ) -> None:
        """Let the message at a place of the log wait for its time."""
        files = self._files
        self._set_window(now_ms)
        wanted_ms = slot_of(due_ms, files.precision_ms)
        slot_ms, roll = files.place(wanted_ms, now_ms, self._window_ms)
        pin = self._pins[-1]
        pin.until_ms = max(pin.until_ms, slot_ms + files.precision_ms)
        self._near.add(
            slot_ms,
            now_ms,
            offset=place,
            size=size,
            topic=properties.get(PROPERTY_REAL_TOPIC, ""),
            due_ms=slot_ms if roll else due_ms,
            roll=roll,
            recalls=recalled_key(properties),
        )

    def expect(self, recalls: tuple[str, str]) -> None:
        """A recall was stored that is not in the files yet."""
        self.expected[recalls] = self.expected.get(recalls, 0) + 1

    # --- retention

    def _set_window(self, now_ms: int) -> None:
        """How far ahead messages may lie without being stored again."""
        config, precision_ms = self._store.config, self._files.precision_ms
        window_ms = min(config.timer_roll_slots * precision_ms, config.retain_hours * 1_800_000)
        self._window_ms = max(window_ms, WINDOW_SLOTS_MIN * precision_ms)
        if not self._pins or not 0 <= now_ms - self._pinned_ms < PIN_STEP_MS:
            self._pinned_ms = now_ms
            self._pins.append(Pin(self._next_place))

    def _drop_pins(self) -> None:
        while self._pins and self._pins[0].until_ms <= self.done_ms:
            self._pins.popleft()

    def pinned_from(self) -> int | None:
        """Log offset of the first message that may still wait; None if none does."""
        self._drop_pins()
        pins = [self._pins[0].offset] if self._pins else []
        if self.behind:
            pins.append(self._next_place)
        return min(pins, default=None)

    def wait(self) -> None:
        """Wait for the pool; what it read does not matter any more."""
        if self._finding is not None:
            self._finding.exception()
            self._finding = None
        if self._reading is not None:
            self._reading.exception()
            self._reading = None


def rolled_on(properties: dict[str, str], due_ms: int) -> dict[str, str]:
    """The properties of a message that is stored again because it waits so long."""
    times = properties.get(PROPERTY_TIMER_ROLL_TIMES, "0")
    return {
        **properties,
        PROPERTY_TIMER_ROLL_TIMES: str(int(times) + 1 if times.isdecimal() else 1),
        "TIMER_DELIVER_MS": str(due_ms),
    }
