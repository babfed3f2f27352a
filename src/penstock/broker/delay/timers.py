"""The timer: messages with a delivery time are delivered to their real queue at that millisecond.

    send → `redirect` → rmq_sys_wheel_timer → `timer_enqueue` → the timer's files
    the timer's files → `timer_prefetch` → `Timers.tick` → the real queue

A message is added to a slot in the timer's files soon after it is stored. Shortly before the slot
starts, its chain is read and sorted by delivery time. `tick` delivers a bounded number of messages;
`due` says when to call it again. The progress is saved only when the delivered messages are on the
disk: after a crash some are delivered twice, but none is lost.
"""

import logging
from collections.abc import Callable, Container
from concurrent.futures import Future
from typing import Final, NamedTuple

from penstock.broker.delay.delivery_time import (
    TimerKey,
    due_of,
    message_key,
    recalled_key,
    requested_ms,
    slot_of,
)
from penstock.broker.delay.recall_handle import make_recall_handle
from penstock.broker.delay.timer_enqueue import TimerEnqueue, rolled_properties
from penstock.broker.delay.timer_metrics import BOUNDS_S, TimerMetrics, add_timer_metrics
from penstock.broker.delay.timer_prefetch import NEVER, TimerPrefetch
from penstock.broker.rewrite import MessageRewriter
from penstock.broker.topics import Topics
from penstock.config import LiveSettings
from penstock.errors import (
    MessageIllegal,
    NotWriteable,
    PenstockError,
    ReadFailed,
    StoreDamaged,
    WriteStopped,
)
from penstock.metrics import Registry
from penstock.rpc.answers import EffectQueue, PersistentTable, TickAt
from penstock.rpc.persistence import Persistence
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.store.lookup import GONE
from penstock.store.put import ILLEGAL, PUT_OK
from penstock.store.store import MessageStore
from penstock.store.timer.timer_checkpoint import TimerProgress
from penstock.store.timer.timer_slots import Chain, TimerMessage
from penstock.store.timer.timer_store import TimerStore
from penstock.wire.bodies.table_bodies import TimerCheckpoint
from penstock.wire.codes import (
    PROPERTIES_BYTES_MAX,
    PROPERTY_REAL_QUEUE_ID,
    PROPERTY_REAL_TOPIC,
    PROPERTY_TIMER_DEL_UNIQKEY,
    PROPERTY_TIMER_DEQUEUE_MS,
    PROPERTY_TIMER_ENQUEUE_MS,
    PROPERTY_TIMER_OUT_MS,
    RETRY_TOPIC_PREFIX,
    TOPIC_TIMER,
)
from penstock.wire.message import encode_properties
from penstock.wire.record import StoredRecord

log = logging.getLogger(__name__)

ENQUEUE_MS: Final = 20
"""A message is added to the timer's files this long after it was stored, or when it is due."""
TICK_MESSAGES_MAX: Final = 128
"""Messages that one tick delivers."""
TICK_BYTES_MAX: Final = 1024 * 1024
"""Bytes of messages that one tick delivers."""
RETRY_MS: Final = 100
"""Pause after the store refused a message."""
READ_RETRY_MS: Final = 1000
"""Pause after a read of the timer log failed."""
POLL_MS: Final = 5
"""Interval of ticks while messages are due."""
FIRST_SAVE_MS: Final = 50
"""Interval at which progress is first saved after a start, then doubled up to timer_flush_ms: a
broker that has crashed may crash again soon, and should not repeat the same messages."""
FLUSH_POLL_MS: Final = 20
"""Interval at which a flush is polled whose end allows to save the progress."""
IDLE_SAVE_MS: Final = 60_000
"""Interval at which progress is saved while nothing is due."""
EARLY_WRITE_BYTES: Final = 1024 * 1024
PROPERTIES_SPARE: Final = 192
"""Bytes of properties that the timer adds when it stores a message again."""

_TIMER: Final = TOPIC_TIMER.encode()


class OldTimer(NamedTuple):
    """The timer of the master that was replaced."""

    delivered: Container[TimerKey]
    """What it has delivered: a rebuild leaves that out."""
    forget: Callable[[], object]
    """Called when a rebuild is on the disk."""


class Timers:
    """The timer of a broker."""

    def __init__(
        self,
        settings: LiveSettings,
        store: MessageStore,
        persistence: Persistence,
        topics: Topics,
        rewriter: MessageRewriter,
        effects: EffectQueue,
        *,
        now_ms: int,
        old: OldTimer | None = None,
    ) -> None:
        """`old` is the timer of the master that this one replaces."""
        self._settings = settings
        self._store = store
        self._topics = topics
        self._rewriter = rewriter
        self._effects = effects
        self._old = old
        config = store.config
        self.metrics = TimerMetrics()
        self.metrics.load(persistence.file(TimerMetrics.FILE))
        self.files = TimerStore(
            store.disk,
            store.paths.root,
            precision_ms=config.timer_precision_ms,
            segment_bytes=config.timer_log_bytes,
            now_ms=now_ms,
        )
        found = self.files.open(store.log.end, self._queue_offset_of, now_ms)
        try:
            self._start(rebuild=not found, now_ms=now_ms)
        except StoreDamaged as error:
            self._rebuild_files(error, now_ms)
        self._due_ms = self._now_ms = 0
        self._refused = False
        self._damage: StoreDamaged | None = None
        self._delivered_count = 0
        self._writing: Future[None] | None = None
        self._written_ms = now_ms - FIRST_SAVE_MS
        self._period_ms = FIRST_SAVE_MS
        # Progress that is saved once the log is flushed up to the second value.
        self._unflushed: tuple[TimerProgress, int] | None = None
        self._saved_state = self._state()
        self._writes_progress = False
        self._needs_old = old is not None
        if self.enqueue.caught_up:
            self._forget_old()

    def _start(self, *, rebuild: bool, now_ms: int) -> None:
        self.prefetch = TimerPrefetch(self._store, self.files)
        self.enqueue = TimerEnqueue(
            self._store,
            self.files,
            self.prefetch,
            self.metrics,
            rebuild=rebuild,
            delivered=() if self._old is None else self._old.delivered,
        )
        if rebuild:
            self.metrics.counts.clear()
        elif not self.files.clean:
            topics = self._topics.table.topics
            self.metrics.recount(self.files.count_topics(), topics, now_ms)

    def _queue_offset_of(self, offset: int) -> int | None:
        data = self._store.lookup.record(offset, self._store.log.end)
        if data is None:
            return None
        stored = StoredRecord()
        stored.bind(memoryview(bytearray(data)))
        stored.read(0, len(data))
        return stored.queue_offset

    # --- redirect

    def redirect(
        self, topic: str, queue_id: int, properties: dict[str, str], now_ms: int
    ) -> ConsumeQueue | None:
        """The queue of the timer; None if the message is due already.

        Slot, real topic and real queue are added to the properties.
        """
        if PROPERTY_TIMER_OUT_MS in properties:  # a delivered timer message that is sent again
            return None
        due_ms = requested_ms(properties, now_ms)
        if due_ms is None:
            return None
        if due_ms <= now_ms:
            if PROPERTY_TIMER_DEL_UNIQKEY in properties:
                raise MessageIllegal(
                    "the message to recall is already due",
                    hint="recall it before its delivery time",
                )
            return None
        config = self._store.config
        if not config.timers_enabled:
            raise NotWriteable(
                "timer messages are disabled on this broker (timers_enabled)",
                hint="enable timers_enabled, or send without a delivery time",
            )
        if due_ms - now_ms > config.timer_delay_s_max * 1000:
            raise MessageIllegal.over(
                "the delivery time is too far in the future",
                figure=-(-(due_ms - now_ms) // 1000),
                limit=config.timer_delay_s_max,
                unit="s",
                setting="timer_delay_s_max",
                hint="choose an earlier time, or raise the setting",
            )
        properties[PROPERTY_TIMER_OUT_MS] = str(slot_of(due_ms, self.files.precision_ms))
        properties[PROPERTY_REAL_TOPIC] = topic
        properties[PROPERTY_REAL_QUEUE_ID] = str(queue_id)
        length = len(encode_properties(properties))
        if length > PROPERTIES_BYTES_MAX - PROPERTIES_SPARE:  # it could not be stored again later
            raise MessageIllegal.over(
                "the properties leave no room for those of the timer",
                figure=length,
                limit=PROPERTIES_BYTES_MAX - PROPERTIES_SPARE,
                unit="bytes",
                hint="use fewer or shorter properties",
            )
        self.wake_for(due_ms, now_ms)
        return self.queue()

    def queue(self) -> ConsumeQueue:
        """The queue of the timer."""
        queue = self._store.make_queue(_TIMER, 0)
        assert queue is not None
        return queue

    def wake_for(self, due_ms: int, now_ms: int) -> None:
        """Schedule the next tick for a message that is about to be stored in the queue."""
        wake_ms = max(min(now_ms + ENQUEUE_MS, due_ms), now_ms)
        if wake_ms < self._due_ms:
            self._due_ms = wake_ms
            self._effects.put(TickAt(wake_ms))

    def recall_handle(self, topic: str, properties: dict[str, str]) -> bytes:
        """The handle by which a producer can recall a message; empty for retry topics."""
        if topic.startswith(RETRY_TOPIC_PREFIX):
            return b""
        return make_recall_handle(topic, self._settings.current.broker.name, properties)

    # --- time

    def tables(self) -> tuple[PersistentTable, ...]:
        return (self.metrics,)

    def due(self) -> int:
        """When `tick` has to be called."""
        return self._due_ms

    def tick(self, now_ms: int) -> None:
        """Enqueue new messages, deliver those that are due, save the progress."""
        self._due_ms, self._now_ms = NEVER, now_ms
        try:
            if self._damage is None and not self.files.rebuilding:
                self.files.check_clock(self.files.progress, now_ms)
            if self._damage is not None:
                self._rebuild(self._damage, now_ms)
            self._run_tick(now_ms)
        except StoreDamaged as error:
            self._damage = error
            self._wake_at(now_ms)
        except (OSError, ReadFailed) as error:
            log.error("the timer can't read its files, will retry: %s", error)
            self._wake_at(now_ms + READ_RETRY_MS)
        self.metrics.tick(now_ms)

    def _run_tick(self, now_ms: int) -> None:
        self.enqueue.tick(now_ms)
        self._wake_at(self.enqueue.due_ms)
        if self.enqueue.caught_up:  # the last messages may contain a recall
            self.prefetch.load(now_ms)
            self._deliver_due(now_ms)
            self._wake_at(self.prefetch.due_ms)
        self._save_progress(now_ms)

    def _wake_at(self, ms: int) -> None:
        self._due_ms = min(self._due_ms, ms)

    def _rebuild(self, error: StoreDamaged, now_ms: int) -> None:
        """Replace damaged files: `enqueue` reads the whole queue again before delivery resumes."""
        self._wait_for_jobs()
        self._rebuild_files(error, now_ms)
        self._unflushed = self._damage = None

    def _rebuild_files(self, error: StoreDamaged, now_ms: int) -> None:
        log.warning("rebuilding the timer's files from its queue: %s", error)
        self.files.rebuild(now_ms)
        self._start(rebuild=True, now_ms=now_ms)

    # --- delivery

    def _deliver_due(self, now_ms: int) -> None:
        messages, space = TICK_MESSAGES_MAX, TICK_BYTES_MAX
        while messages > 0 and space > 0:
            chain = self._first_chain(now_ms)
            if chain is None:
                return
            waiting = chain.head() if chain.ready else None
            if waiting is None:
                return
            if waiting.due_ms > now_ms:
                self._wake_at(waiting.due_ms)
                return
            data = self.prefetch.take_record(waiting, now_ms)
            if data is None:  # a read is in flight
                return
            if not self._dequeue(chain, waiting, data, now_ms):
                self.prefetch.put_back(waiting, data)
                self._wake_at(now_ms + RETRY_MS)
                return
            chain.pop(waiting.due_ms)
            progress = self.files.progress
            if chain.slot_ms == progress.read_ms:
                self.files.progress = progress._replace(due_ms=chain.due_ms, done=chain.done)
            self._delivered_count += 1
            messages, space = messages - 1, space - waiting.size
        self._wake_at(now_ms)

    def _first_chain(self, now_ms: int) -> Chain | None:
        """The chain of the current slot, after moving past slots that are done."""
        files, chains = self.files, self.prefetch.chains
        current_ms = min(files.slot_of(now_ms), self.prefetch.loaded_to_ms)
        while (read_ms := files.progress.read_ms) < current_ms:
            chain = chains.get(read_ms)
            if chain is not None and (not chain.ready or chain.head() is not None):
                return chain
            self.prefetch.remove_slot(read_ms)
            later = (slot_ms for slot_ms in chains if slot_ms > read_ms)
            files.pass_slots(min(min(later, default=current_ms), current_ms))
        chain = chains.get(files.progress.read_ms)
        if chain is None or (chain.ready and chain.head() is None):
            self._wake_at(self._next_due(files.progress.read_ms))
        return chain

    def _next_due(self, read_ms: int) -> int:
        """When the first message of the loaded slots after the current one is due."""
        for slot_ms in sorted(self.prefetch.chains):
            chain = self.prefetch.chains[slot_ms]
            head = chain.head() if slot_ms > read_ms and chain.ready else None
            if head is not None:
                return head.due_ms
        return NEVER

    def _dequeue(self, chain: Chain, waiting: TimerMessage, data: bytes, now_ms: int) -> bool:
        """Deliver, roll or drop a due message; False if the store refuses it for now."""
        rewriter = self._rewriter
        log_offset = waiting.offset
        if data == GONE or not rewriter.read(data) or rewriter.stored.physical_offset != log_offset:
            return self._drop(log_offset, "it is no longer in the log")
        properties = rewriter.properties()
        topic = properties.get(PROPERTY_REAL_TOPIC, "")
        key = message_key(properties)
        recall = PROPERTY_TIMER_DEL_UNIQKEY in properties
        if key[1] and not recall and (key in chain.recalled or key in self.enqueue.pending_recalls):
            self.metrics.recalled += 1
            self.metrics.dequeued(topic, now_ms)
            return True
        if log_offset < self._store.deleted_below(topic.encode()):
            self.metrics.dequeued(topic, now_ms)
            return self._drop(log_offset, f"the topic {topic} was deleted after it was sent")
        if waiting.roll:
            return self._roll(waiting, properties, now_ms)
        if recall:
            return True
        return self._deliver_message(waiting, topic, properties, now_ms)

    def _deliver_message(
        self, waiting: TimerMessage, topic: str, properties: dict[str, str], now_ms: int
    ) -> bool:
        rewriter, log_offset = self._rewriter, waiting.offset
        try:
            queue = rewriter.destination(properties, log_offset, now_ms, may_be_revive_log=True)
        except PenstockError as error:
            return self._drop(log_offset, f"it can't be stored in topic {topic}: {error}")
        if queue is None:
            return self._drop(log_offset, f"the topic {topic} was deleted after it was sent")
        properties[PROPERTY_TIMER_ENQUEUE_MS] = str(waiting.enqueued_ms)
        properties[PROPERTY_TIMER_DEQUEUE_MS] = str(now_ms)
        if not self._put(queue, properties, log_offset, now_ms):
            return False
        self.metrics.dequeued(topic, now_ms)
        self.metrics.late_ms = now_ms - waiting.due_ms
        return True

    def _roll(self, waiting: TimerMessage, properties: dict[str, str], now_ms: int) -> bool:
        """Store a message again whose delivery time is still distant."""
        log_offset = waiting.offset
        due_ms = due_of(properties, self._rewriter.stored.store_ms)
        if due_ms is None:
            return self._drop(log_offset, "it has no delivery time")
        properties = rolled_properties(properties, due_ms)
        properties[PROPERTY_TIMER_ENQUEUE_MS] = str(waiting.enqueued_ms)
        properties[PROPERTY_TIMER_DEQUEUE_MS] = str(now_ms)
        if not self._put(self.queue(), properties, log_offset, now_ms):
            return False
        self.metrics.rolled += 1
        recalls = recalled_key(properties)
        if recalls is not None:  # it is valid before it is enqueued again
            self.enqueue.add_pending_recall(recalls)
        else:
            self.metrics.dequeued(properties.get(PROPERTY_REAL_TOPIC, ""), now_ms)
        self._wake_at(now_ms + ENQUEUE_MS)
        return True

    def _put(
        self, queue: ConsumeQueue, properties: dict[str, str], log_offset: int, now_ms: int
    ) -> bool:
        try:
            status = self._rewriter.put(queue, now_ms, properties=properties)
        except PenstockError as error:  # too long with the properties of the timer
            return self._drop(log_offset, str(error))
        if status == ILLEGAL:
            return self._drop(
                log_offset, f"it can't be stored (problem {self._store.writer.problem})"
            )
        if status != PUT_OK and not self._refused:
            log.error("can't store timer messages, will retry: %s", self._store.writer.fault)
        self._refused = status != PUT_OK
        return not self._refused

    def _drop(self, log_offset: int, why: str) -> bool:
        self.metrics.dropped += 1
        log.error("dropped the timer message at log offset %d: %s", log_offset, why)
        return True

    # --- durability

    def _state(self) -> tuple[int, int, int]:
        return self.files.log.end, self.files.progress.queue_offset, self._delivered_count

    def _save_progress(self, now_ms: int) -> None:
        """Write the timer's files periodically, with the progress that is on the disk."""
        period_ms = min(self._period_ms, self._store.config.timer_flush_ms)
        if self._writing is not None:
            if not self._writing.done():
                self._wake_at(now_ms + POLL_MS)
                return
            self._finish_write()
        if self._unflushed is None and self._saved_state == self._state():
            # Nothing happened since the progress was saved.
            self.enqueue.done_to_ms = self.files.progress.read_ms
        elapsed_ms = now_ms - self._written_ms
        early = self.files.log.unwritten > EARLY_WRITE_BYTES
        flushed = self._unflushed is not None and self._is_flushed(self._unflushed[1])
        if 0 <= elapsed_ms < period_ms and not early and not flushed:
            if self._unflushed is not None and not self._store.flusher.failed():
                self._wake_at(now_ms + FLUSH_POLL_MS)
            elif self._unflushed is not None or self._saved_state != self._state():
                self._wake_at(self._written_ms + period_ms)
            return
        idle = 0 <= elapsed_ms < IDLE_SAVE_MS or self.files.wheel.total() == 0
        if self._unflushed is None and self._saved_state == self._state() and idle:
            return
        if self._unflushed is None and not self.files.rebuilding:
            self._saved_state = self._state()
            progress = self.files.progress._replace(log_end=self.files.log.end)
            self._unflushed = (progress, self._store.log.end)
            self._store.writer.publish()
            self._store.flusher.demand()  # a crash repeats what was delivered since the last flush
        self._written_ms = now_ms
        progress_to_save = None
        if self._unflushed is not None and self._is_flushed(self._unflushed[1]):
            progress_to_save, self._unflushed = self._unflushed[0], None
            self._period_ms = min(2 * self._period_ms, IDLE_SAVE_MS)
        if progress_to_save is not None or self.files.log.unwritten:
            work = self.files.flush_job(progress_to_save, self._store.log.begin())
            self._writes_progress = progress_to_save is not None
            self._writing = self._store.disk.submit(work)
            self._wake_at(now_ms + (POLL_MS if self._store.disk.threads else 0))
        elif self._unflushed is not None and not self._store.flusher.failed():
            self._wake_at(now_ms + FLUSH_POLL_MS)

    def _is_flushed(self, log_offset: int) -> bool:
        return self._store.flusher.flushed() >= log_offset

    def _finish_write(self) -> None:
        assert self._writing is not None
        done, self._writing = self._writing, None
        error = done.exception()
        if error is None:
            self.files.flush_done()
            self.enqueue.done_to_ms = self.files.done_to_ms
            if self._writes_progress:
                self._forget_old()
        elif isinstance(error, OSError | PenstockError):
            log.error("can't write the timer's files, will retry: %s", error)
            self._saved_state = (-1, -1, -1)
        else:
            raise error

    def _forget_old(self) -> None:
        """The progress on the disk is that of this timer: a restart needs the old one no more."""
        if self._needs_old and self._old is not None and not self.files.rebuilding:
            self._needs_old = False
            self._old.forget()

    def _wait_for_jobs(self) -> None:
        """Wait for all work in the thread pool."""
        self.prefetch.wait_for_reads()
        self.enqueue.wait_for_reads()
        if self._writing is not None:
            self._writing.exception()
            self._finish_write()

    def finish(self, now_ms: int) -> None:
        """Flush the delivered messages and save the progress before the broker stops."""
        store = self._store
        self._wait_for_jobs()
        try:
            if not isinstance(store.refusal, WriteStopped):
                store.publish()
                store.sync_log(store.log.end)
                progress = self.files.progress._replace(log_end=self.files.log.end)
                if self.files.rebuilding:  # the next start rebuilds again
                    pass
                elif self._state() != (0, 0, 0) or self.files.checkpointed != TimerProgress():
                    self.files.flush_job(progress, store.log.begin(), clean=True)()
                    self.files.flush_done()
        except (OSError, PenstockError) as error:
            log.error("can't write the timer's files, the next start will recover: %s", error)
        self.files.close()

    def pinned_from(self) -> int | None:
        """Log offset of the oldest message that may be needed; None if there is none."""
        return self.enqueue.pinned_from()

    # --- metrics

    def checkpoint(self) -> TimerCheckpoint:
        return self.files.checkpoint()

    def runtime(self, now_ms: int) -> dict[str, str]:
        """Run-time information for mqadmin, with RocketMQ's names."""
        behind_ms = max(now_ms - self.files.progress.read_ms, 0)
        return {
            "timerReadBehind": str(behind_ms // 1000),
            "timerOffsetBehind": str(self.enqueue.lag),
            "timerCongestNum": str(self.files.wheel.total()),
            "timerEnqueueTps": str(self.metrics.enqueue_rate),
            "timerDequeueTps": str(self.metrics.dequeue_rate),
        }

    def enqueue_latency_ms(self) -> int:
        """Time since the last message was enqueued, if others wait."""
        return max(self._now_ms - self.metrics.enqueued_ms, 0) if self.enqueue.lag else 0

    def dequeue_latency_ms(self) -> int:
        """How far the current slot is behind the clock."""
        return max(self.files.slot_of(self._now_ms) - self.files.progress.read_ms, 0)

    def distribution(self) -> list[tuple[int, int]]:
        """(bound in seconds, number of messages between the previous bound and this one)."""
        from_ms = self.files.progress.read_ms
        found = []
        before_s = 0
        for bound_s in BOUNDS_S:
            count = self.files.wheel.count(from_ms + before_s * 1000, from_ms + bound_s * 1000)
            found.append((bound_s, count))
            before_s = bound_s
        return found

    def add_metrics(self, registry: Registry) -> None:
        add_timer_metrics(registry, self)
