"""Messages with a time of delivery of their own: parked in rmq_sys_wheel_timer, stored in their own
queue at that millisecond, recalled before on demand.

    send → `park` → the queue → `timerfeed` → the timer's files → `timernear` → here → their queue

A message gets a unit in the timer's files soon after it is stored. When its slot comes near, the
chain of the slot is read and sorted by the messages' own milliseconds; `tick` delivers what is due,
in bounded turns, and `due` says when the next one is. How far that is, is noted once the delivered
copies are on the disk: after a crash some are delivered twice, none is lost.
"""

import logging
from concurrent.futures import Future
from typing import Final

from penstock.broker.delay.delivery_time import asked_ms, due_of, key_of, recalled_key, slot_of
from penstock.broker.delay.recall_handle import make_recall_handle
from penstock.broker.delay.timer_counters import BOUNDS_S, TimerFigures
from penstock.broker.delay.timer_enqueue import Feed, rolled_on
from penstock.broker.delay.timer_metrics import add_timer_metrics
from penstock.broker.delay.timer_prefetch import NEVER, Near
from penstock.broker.rewrite import MessageRewriter
from penstock.broker.topics import Topics
from penstock.config import Live
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
from penstock.store.timer.timer_slots import Chain, Waiting
from penstock.store.timer.timer_store import Progress, TimerStore
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

FEED_MS: Final = 20
"""A message is in the timer's files so long after it was stored, if it is not due before."""
TICK_MESSAGES_MAX: Final = 128
TICK_BYTES_MAX: Final = 1024 * 1024
"""Messages delivered before others have their turn."""
RETRY_MS: Final = 100
"""After a store that refused."""
READ_AGAIN_MS: Final = 1000
POLL_MS: Final = 5
IDLE_NOTE_MS: Final = 60_000
"""How often it is noted that nothing was due."""
UNWRITTEN_SOON: Final = 1024 * 1024
PROPERTIES_SPARE: Final = 192
"""Bytes of properties that the timer needs itself when it stores a message again."""

_TIMER: Final = TOPIC_TIMER.encode()


class Timers:
    """The timer of a broker."""

    def __init__(
        self,
        settings: Live,
        store: MessageStore,
        persistence: Persistence,
        topics: Topics,
        rewriter: MessageRewriter,
        effects: EffectQueue,
        *,
        now_ms: int,
    ) -> None:
        self._settings = settings
        self._store = store
        self._topics = topics
        self._rewriter = rewriter
        self._effects = effects
        config = store.config
        self.figures = TimerFigures()
        self.figures.load(persistence.file(TimerFigures.FILE))
        self.files = TimerStore(
            store.disk,
            store.paths.root,
            precision_ms=config.timer_precision_ms,
            segment_bytes=config.timer_log_bytes,
            now_ms=now_ms,
        )
        found = self.files.open(store.log.end, self._queue_offset_of, now_ms)
        self._begin(again=not found, now_ms=now_ms)
        self._due_ms = self._now_ms = 0
        self._refused = False
        self._damage: StoreDamaged | None = None
        self._processed = 0
        self._round: Future[None] | None = None
        self._round_ms = 0
        self._mark: tuple[Progress, int] | None = None  # durable from this log offset on
        self._stamp = self._now_stamp()

    def _begin(self, *, again: bool, now_ms: int) -> None:
        self.near = Near(self._store, self.files)
        self.feed = Feed(self._store, self.files, self.near, self.figures)
        self.feed.open(again=again)
        if again:
            self.figures.counts.clear()
        elif not self.files.clean:
            topics = self._topics.table.topics
            self.figures.recount(self.files.count_topics(), topics, now_ms)

    def _queue_offset_of(self, offset: int) -> int | None:
        data = self._store.lookup.record(offset, self._store.log.end)
        if data is None:
            return None
        stored = StoredRecord()
        stored.bind(memoryview(bytearray(data)))
        stored.read(0, len(data))
        return stored.queue_offset

    # --- parking

    def park(
        self, topic: str, queue_id: int, properties: dict[str, str], now_ms: int
    ) -> ConsumeQueue | None:
        """The queue where a message waits, noted in its properties; None if it is due already."""
        if PROPERTY_TIMER_OUT_MS in properties:  # it has waited, and is sent on as it was received
            return None
        due_ms = asked_ms(properties, now_ms)
        if due_ms is None:
            return None
        if due_ms <= now_ms:
            if PROPERTY_TIMER_DEL_UNIQKEY in properties:
                raise MessageIllegal(
                    "the message to recall was due already", hint="recall it before its time"
                )
            return None
        config = self._store.config
        if not config.timers_enabled:
            raise NotWriteable(
                "messages may have no time of delivery here (timers_enabled)",
                hint="set timers_enabled, or send without a time",
            )
        if due_ms - now_ms > config.timer_delay_s_max * 1000:
            raise MessageIllegal.over(
                "the time of delivery is too far ahead",
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
        if length > PROPERTIES_BYTES_MAX - PROPERTIES_SPARE:  # it could not be stored at its time
            raise MessageIllegal.over(
                "the properties leave no room for those of the timer",
                figure=length,
                limit=PROPERTIES_BYTES_MAX - PROPERTIES_SPARE,
                unit="bytes",
                hint="send fewer or shorter ones",
            )
        self.wake_for(due_ms, now_ms)
        return self.queue()

    def queue(self) -> ConsumeQueue:
        """Where messages wait."""
        queue = self._store.make_queue(_TIMER, 0)
        assert queue is not None
        return queue

    def wake_for(self, due_ms: int, now_ms: int) -> None:
        """A message is about to be stored in the queue: see to it that `tick` is not too late."""
        wake_ms = max(min(now_ms + FEED_MS, due_ms), now_ms)
        if wake_ms < self._due_ms:
            self._due_ms = wake_ms
            self._effects.put(TickAt(wake_ms))

    def recall_handle(self, topic: str, properties: dict[str, str]) -> bytes:
        """What a producer can call a parked message back with."""
        if topic.startswith(RETRY_TOPIC_PREFIX):
            return b""
        return make_recall_handle(topic, self._settings.current.broker.name, properties)

    # --- time

    def tables(self) -> tuple[PersistentTable, ...]:
        return (self.figures,)

    def due(self) -> int:
        """When `tick` has something to do."""
        return self._due_ms

    def tick(self, now_ms: int) -> None:
        """Take new messages into the timer, deliver what is due, note how far that is."""
        self._due_ms, self._now_ms = NEVER, now_ms
        try:
            if self._damage is not None:
                self._rebuild(self._damage, now_ms)
            self._turn(now_ms)
        except StoreDamaged as error:
            self._damage = error
            self._want(now_ms)
        except (OSError, ReadFailed) as error:
            log.error("the timer can't read: %s", error)
            self._want(now_ms + READ_AGAIN_MS)
        self.figures.tick(now_ms)

    def _turn(self, now_ms: int) -> None:
        self.feed.tick(now_ms)
        self._want(self.feed.due_ms)
        if self.feed.caught_up:  # a recall among the last messages counts
            self.near.load(now_ms)
            self._deliver(now_ms)
            self._want(self.near.due_ms)
        self._note_progress(now_ms)

    def _want(self, ms: int) -> None:
        self._due_ms = min(self._due_ms, ms)

    def _rebuild(self, error: StoreDamaged, now_ms: int) -> None:
        """The files are damaged: drop them; `feed` fills them anew, and until then all waits."""
        log.error("the timer's files are made anew from its queue: %s", error)
        self._wait()
        self.files.rebuild(now_ms)
        self._begin(again=True, now_ms=now_ms)
        self._mark = self._damage = None

    # --- delivering

    def _deliver(self, now_ms: int) -> None:
        messages, space = TICK_MESSAGES_MAX, TICK_BYTES_MAX
        while messages > 0 and space > 0:
            chain = self._first_chain(now_ms)
            if chain is None:
                return
            waiting = chain.head() if chain.ready else None
            if waiting is None:
                return
            if waiting.due_ms > now_ms:
                self._want(waiting.due_ms)
                return
            data = self.near.record(waiting, now_ms)
            if data is None:  # the disk is waited for
                return
            if not self._process(chain, waiting, data, now_ms):
                self.near.keep(waiting, data)
                self._want(now_ms + RETRY_MS)
                return
            chain.pop(waiting.due_ms)
            progress = self.files.progress
            if chain.slot_ms == progress.read_ms:
                self.files.progress = progress._replace(due_ms=chain.due_ms, done=chain.done)
            self._processed += 1
            messages, space = messages - 1, space - waiting.size
        self._want(now_ms)

    def _first_chain(self, now_ms: int) -> Chain | None:
        """The chain in work. Slots that are over and empty are left behind."""
        files, chains = self.files, self.near.chains
        current_ms = min(files.slot_of(now_ms), self.near.loaded_to_ms)
        while (read_ms := files.progress.read_ms) < current_ms:
            chain = chains.get(read_ms)
            if chain is not None and (not chain.ready or chain.head() is not None):
                return chain
            self.near.drop(read_ms)
            later = (slot_ms for slot_ms in chains if slot_ms > read_ms)
            files.pass_slots(min(min(later, default=current_ms), current_ms))
        chain = chains.get(files.progress.read_ms)
        if chain is None or (chain.ready and chain.head() is None):
            self._want(self._next_due(files.progress.read_ms))
        return chain

    def _next_due(self, read_ms: int) -> int:
        """When the first message of the slots to come is due; `near` says it of a chain in work."""
        for slot_ms in sorted(self.near.chains):
            chain = self.near.chains[slot_ms]
            head = chain.head() if slot_ms > read_ms and chain.ready else None
            if head is not None:
                return head.due_ms
        return NEVER

    def _process(self, chain: Chain, waiting: Waiting, data: bytes, now_ms: int) -> bool:
        """Store a message where it goes; False if the store refuses for now."""
        rewriter = self._rewriter
        place = waiting.offset
        if data == GONE or not rewriter.read(data) or rewriter.stored.physical_offset != place:
            return self._drop(place, "it is not in the log any more")
        properties = rewriter.properties()
        topic = properties.get(PROPERTY_REAL_TOPIC, "")
        key = key_of(properties)
        recall = PROPERTY_TIMER_DEL_UNIQKEY in properties
        if key[1] and not recall and (key in chain.recalled or key in self.feed.expected):
            self.figures.recalled += 1
            self.figures.dequeued(topic, now_ms)
            return True
        if place < self._store.deleted_below(topic.encode()):
            self.figures.dequeued(topic, now_ms)
            return self._drop(place, f"the topic {topic!r} was deleted after it had been sent")
        if waiting.roll:
            return self._roll(waiting, properties, now_ms)
        if recall:
            return True
        return self._store_copy(waiting, topic, properties, now_ms)

    def _store_copy(
        self, waiting: Waiting, topic: str, properties: dict[str, str], now_ms: int
    ) -> bool:
        rewriter, place = self._rewriter, waiting.offset
        try:
            number = int(properties.get(PROPERTY_REAL_QUEUE_ID, ""))
            queue = rewriter.destination(topic, number, place, now_ms)
        except (ValueError, PenstockError) as error:
            return self._drop(place, f"it has no place in {topic!r}: {error}")
        if queue is None:
            return self._drop(place, f"{topic!r} takes no messages that waited")
        properties[PROPERTY_TIMER_ENQUEUE_MS] = str(waiting.enqueued_ms)
        properties[PROPERTY_TIMER_DEQUEUE_MS] = str(now_ms)
        if not self._put(queue, properties, place, now_ms):
            return False
        self.figures.dequeued(topic, now_ms)
        self.figures.late_ms = now_ms - waiting.due_ms
        return True

    def _roll(self, waiting: Waiting, properties: dict[str, str], now_ms: int) -> bool:
        """A message that waits on: store it once more."""
        place = waiting.offset
        due_ms = due_of(properties, self._rewriter.stored.store_ms)
        if due_ms is None:
            return self._drop(place, "it has no time of delivery")
        properties = rolled_on(properties, due_ms)
        properties[PROPERTY_TIMER_ENQUEUE_MS] = str(waiting.enqueued_ms)
        properties[PROPERTY_TIMER_DEQUEUE_MS] = str(now_ms)
        if not self._put(self.queue(), properties, place, now_ms):
            return False
        self.figures.rolled += 1
        recalls = recalled_key(properties)
        if recalls is not None:  # it counts before it is back
            self.feed.expect(recalls)
        else:
            self.figures.dequeued(properties.get(PROPERTY_REAL_TOPIC, ""), now_ms)
        self._want(now_ms + FEED_MS)
        return True

    def _put(
        self, queue: ConsumeQueue, properties: dict[str, str], place: int, now_ms: int
    ) -> bool:
        try:
            status = self._rewriter.put(queue, now_ms, properties=properties)
        except PenstockError as error:  # the properties are too long with ours
            return self._drop(place, str(error))
        if status == ILLEGAL:
            return self._drop(place, f"it can't be stored (problem {self._store.writer.problem})")
        if status != PUT_OK and not self._refused:
            log.error("timed messages have to wait: %s", self._store.writer.fault)
        self._refused = status != PUT_OK
        return not self._refused

    def _drop(self, place: int, why: str) -> bool:
        self.figures.dropped += 1
        log.error("the timed message at the log offset %d is not delivered: %s", place, why)
        return True

    # --- durability

    def _now_stamp(self) -> tuple[int, int, int]:
        return self.files.log.end, self.files.progress.queue_offset, self._processed

    def _note_progress(self, now_ms: int) -> None:
        """Have the files written from time to time, with progress that is durable."""
        period_ms = self._store.config.timer_flush_ms
        if self._round is not None:
            if not self._round.done():
                self._want(now_ms + POLL_MS)
                return
            self._finish_round()
        if self._mark is None and self._stamp == self._now_stamp():
            self.feed.done_ms = self.files.progress.read_ms  # nothing happened since it was noted
        passed_ms = now_ms - self._round_ms
        soon = self.files.log.unwritten > UNWRITTEN_SOON
        if 0 <= passed_ms < period_ms and not soon:
            if self._mark is not None or self._stamp != self._now_stamp():
                self._want(self._round_ms + period_ms)
            return
        idle = 0 <= passed_ms < IDLE_NOTE_MS or self.files.wheel.total() == 0
        if self._mark is None and self._stamp == self._now_stamp() and idle:
            return
        if self._mark is None and not self.files.rebuilding:
            self._stamp = self._now_stamp()
            progress = self.files.progress._replace(log_end=self.files.log.end)
            self._mark = (progress, self._store.log.end)
        self._round_ms = now_ms
        noted = None
        if self._mark is not None and self._store.flusher.flushed() >= self._mark[1]:
            noted, self._mark = self._mark[0], None
        if noted is not None or self.files.log.unwritten:
            work = self.files.round(noted, self._store.log.begin())
            self._round = self._store.disk.submit(work)
            self._want(now_ms + (POLL_MS if self._store.disk.threads else 0))

    def _finish_round(self) -> None:
        assert self._round is not None
        done, self._round = self._round, None
        error = done.exception()
        if error is None:
            self.files.rounded()
            self.feed.done_ms = self.files.noted.read_ms
        elif isinstance(error, OSError | PenstockError):
            log.error("the timer's files can't be written, it is tried again: %s", error)
            self._stamp = (-1, -1, -1)
        else:
            raise error

    def _wait(self) -> None:
        """Wait for the pool."""
        self.near.wait()
        self.feed.wait()
        if self._round is not None:
            self._round.exception()
            self._finish_round()

    def finish(self, now_ms: int) -> None:
        """Before a clean end: make what was delivered durable, and note where we are."""
        store = self._store
        self._wait()
        try:
            if not isinstance(store.refusal, WriteStopped):
                store.publish()
                store.sync_log(store.log.end)
                progress = self.files.progress._replace(log_end=self.files.log.end)
                if self.files.rebuilding:  # the next start begins with that once more
                    pass
                elif self._now_stamp() != (0, 0, 0) or self.files.noted != Progress():
                    self.files.round(progress, store.log.begin(), clean=True)()
                    self.files.rounded()
        except (OSError, PenstockError) as error:
            log.error("the timer's files can't be written, the next start recovers: %s", error)
        self.files.close()

    def pinned_from(self) -> int | None:
        """Log offset of the first message that still waits; None if none does."""
        return self.feed.pinned_from()

    # --- figures

    def checkpoint(self) -> TimerCheckpoint:
        return self.files.checkpoint()

    def runtime(self, now_ms: int) -> dict[str, str]:
        """RocketMQ's figures for its tools."""
        behind_ms = max(now_ms - self.files.progress.read_ms, 0)
        return {
            "timerReadBehind": str(behind_ms // 1000),
            "timerOffsetBehind": str(self.feed.behind),
            "timerCongestNum": str(self.files.wheel.total()),
            "timerEnqueueTps": str(self.figures.enqueue_rate),
            "timerDequeueTps": str(self.figures.dequeue_rate),
        }

    def enqueue_latency_ms(self) -> int:
        """How long nothing was taken from the queue, though there is something."""
        return max(self._now_ms - self.figures.fed_ms, 0) if self.feed.behind else 0

    def dequeue_latency_ms(self) -> int:
        """How far the slot in work is behind the time."""
        return max(self.files.slot_of(self._now_ms) - self.files.progress.read_ms, 0)

    def distribution(self) -> list[tuple[int, int]]:
        """(bound in seconds, how many wait between the bound before and this one)."""
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
