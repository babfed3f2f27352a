"""POP consumption: messages are delivered for a limited time; queues are not assigned to clients.

A pop reads one queue or all queues of a topic, and the group's retry topics. Its messages are
invisible to the group until they are acknowledged. If the invisible time ends first, they are
delivered again through the retry topic.

| Module | Responsibility |
|---|---|
| `in_place` | the usual pops, acks and changes, in the connection's buffer |
| `pop_request` | reads and checks requests |
| `pop_queues` | chooses the queues to read, by round robin or priority |
| `pop_reader` | reads the messages of a queue |
| `pop_result` | the search of a pop, its result and the fields of its response |
| `checkpoints` | messages in flight |
| `revive_log`, `revive_writer` | the same in the log, to survive a restart |
| `pop_ack` | acks and changes of the invisible time |
| `revive` | delivers messages again that were not acknowledged in time |
| `ordered_pop` | ordered POP: one open pop per queue and group |
| `pop_polling` | requests that wait for messages |
| `pop_notification` | NOTIFICATION, PEEK_MESSAGE, POLLING_INFO |
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import islice
from typing import Final

from penstock.broker.context import BrokerContext
from penstock.broker.long_polling import WaitQueue
from penstock.broker.pop.checkpoints import CheckpointKey, PopCheckpoint
from penstock.broker.pop.in_place.pop_handler import PopHandler
from penstock.broker.pop.ordered_pop import GroupQueue, OrderedPops
from penstock.broker.pop.pop_ack import PopAcks
from penstock.broker.pop.pop_metrics import add_pop_metrics
from penstock.broker.pop.pop_notification import PopNotification
from penstock.broker.pop.pop_polling import QUEUES_PER_STEP, PopPolling
from penstock.broker.pop.pop_queues import PopQueues
from penstock.broker.pop.pop_reader import ReadBatch, read_messages, restore_topic
from penstock.broker.pop.pop_request import LateRequest, PopRequest, PopRequestReader
from penstock.broker.pop.pop_result import (
    PopResult,
    PopSearch,
    empty_response_fields,
    has_other_retry_topic,
    response_fields,
)
from penstock.broker.pop.revive import Revive
from penstock.broker.pop.revive_log import ReviveLog
from penstock.broker.pull.pull_subscription import SubscriptionError
from penstock.errors import NoPermission, PenstockError, SystemBusy
from penstock.metrics import Registry
from penstock.rpc.answers import (
    Answer,
    InThread,
    NextIteration,
    PersistentTable,
    Reply,
    Suspend,
    TickAt,
)
from penstock.rpc.command import Command
from penstock.rpc.router import Row
from penstock.store.consumequeue.consumequeue import ConsumeQueue
from penstock.wire.codes import (
    POP_ORDER_REVIVE_QUEUE,
    RETRY_TOPIC_PREFIX,
    RequestCode,
    ResponseCode,
)
from penstock.wire.receipt_handle import (
    Receipt,
    kind_of,
)

CLEAN_MS: Final = 60_000
"""Interval at which unused ordered queues are removed."""
_ARRIVAL_MS: Final = 60_000


class Pop:
    """POP of a broker; `host` is the broker's address as stored in messages."""

    def __init__(self, context: BrokerContext, host: bytes) -> None:
        self._context = context
        self._store = context.store
        self._order = OrderedPops()
        self._order.load(context.persistence.file(OrderedPops.FILE))
        self._requests = PopRequestReader(context)
        self._polling = PopPolling(context)
        self._queues = PopQueues(context, self._polling)
        self.revive_log = ReviveLog(context, host, self._order)
        self.revive = Revive(context, self.revive_log, host, self._polling.watch_retry_queue)
        self._acks = PopAcks(context, self.revive_log, self._order, self._polling)
        self._notification = PopNotification(
            context, self._requests, self._order, self._polling, self.now
        )
        self._queues_in_read: set[GroupQueue] = set()  # being read in the thread pool
        self._handler = PopHandler(context, self, self._queues, self._polling, self._queues_in_read)
        self._now_ms = self._clean_ms = self._tick_ms = context.started_ms

    @property
    def order(self) -> OrderedPops:
        """The open ordered pops."""
        return self._order

    def rows(self) -> list[Row]:
        return [
            Row(RequestCode.POP_MESSAGE, self.pop, self._handler),
            *self._acks.rows(self.set_time),
            *self._notification.rows(),
        ]

    def set_time(self, now_ms: int) -> None:
        """The time of a request, for the pops that it wakes."""
        self._now_ms = now_ms

    # --- time and state

    def tables(self) -> tuple[PersistentTable, ...]:
        return (self._order,)

    def due(self) -> int:
        return min(self.revive.due(), self._order.due())

    def tick(self, now_ms: int) -> None:
        if now_ms < self._tick_ms - 1_000:
            self.revive_log.checkpoints.on_clock_set_back(now_ms)
            self._order.on_clock_set_back(now_ms)
        self._now_ms = self._tick_ms = now_ms
        self.revive_log.read_new_entries(now_ms)
        self.revive.tick(now_ms)
        for queue in self._order.take_unblocked(now_ms):
            self._polling.wake(queue.topic, queue.group, queue.queue_id)
        self.revive_log.tick(now_ms)
        self._polling.tick(now_ms)
        if not 0 <= now_ms - self._clean_ms < CLEAN_MS:
            self._clean_ms = now_ms
            self._order.clean(now_ms, self._read_queues, self._has_group)

    def finish(self, now_ms: int) -> None:
        """Store the progress before the broker stops."""
        self.revive_log.tick(now_ms)

    def pinned_from(self) -> int | None:
        """Lowest log offset that messages in flight need; None if there are none."""
        return self.revive_log.checkpoints.pinned_from()

    def add_metrics(self, registry: Registry) -> None:
        add_pop_metrics(registry, self.revive_log, self.revive)

    def _read_queues(self, topic: str) -> int:
        config = self._context.topics.get(topic)
        return 0 if config is None else config.read_queue_nums

    def _has_group(self, group: str) -> bool:
        return self._context.groups.get(group) is not None

    def now(self) -> int:
        """The current time outside of a request: that of the last stored message, if it is later
        than the last request or tick."""
        stored_ms = self._store.writer.store_ms
        near = self._now_ms < stored_ms <= self._now_ms + _ARRIVAL_MS
        return stored_ms if near else self._now_ms

    # --- pops

    def pop(self, command: Command) -> Answer:
        """POP_MESSAGE."""
        request = self.read(command)
        return request if isinstance(request, Reply) else self.serve(request)

    def read(self, command: Command) -> PopRequest | Reply:
        """POP_MESSAGE: the request if it is allowed, or the response to a late one."""
        self.set_time(command.now_ms)
        try:
            return self._requests.pop(command)
        except LateRequest:
            remark = "the request arrived after its polling time had passed"
            return Reply(ResponseCode.POLLING_TIMEOUT, empty_response_fields(), remark=remark)
        except SubscriptionError as error:
            return Reply(error.wire_code, remark=error.remark())

    def serve(self, request: PopRequest) -> Answer:
        """The answer to a request that was read just now."""
        limit = self._context.settings.current.broker.pop_batches_max
        if len(self.revive_log.checkpoints) >= limit:
            raise SystemBusy.over(
                "too many POP checkpoints are open",
                figure=len(self.revive_log.checkpoints),
                limit=limit,
                unit="checkpoints",
                setting="pop_batches_max",
            )
        return self._try_pop(request, last=False)

    def _try_pop(
        self, request: PopRequest, *, last: bool, watched: WaitQueue | None = None
    ) -> Answer:
        """Read messages; `last` if the polling time of the client is over.

        `watched` is the wait queue of the request if all its queues are watched. Only then can the
        search take several steps and end with a suspended request: arrivals between the steps are
        counted.
        """
        notifications = watched.notifications if watched is not None else 0
        search = PopSearch(request, last, self._queues.order(request), watched, notifications)
        return self._search(search)

    def _search(self, search: PopSearch) -> Answer:
        """Look at the next queues; if there is nothing, go on in the next step."""
        request, result = search.request, PopResult()
        now_ms = self.now()
        looked = 0
        for topic, queue_id in islice(search.queues, QUEUES_PER_STEP):
            looked += 1
            answer = self._look_at(
                request, result, GroupQueue(topic, request.group, queue_id), now_ms, search.last
            )
            if answer is not None:
                return answer
        search.skipped = search.skipped or result.skipped
        search.rest += result.rest
        if result.batches:
            # Messages are taken in the step that delivers them, so this is the last one.
            return self._deliver(request, result, now_ms, complete=looked < QUEUES_PER_STEP)
        if looked < QUEUES_PER_STEP:
            return self._wait(search)
        return self._search_on(search)

    def _look_at(
        self, request: PopRequest, result: PopResult, key: GroupQueue, now_ms: int, last: bool
    ) -> Answer:
        """Read messages of a queue into the result, if there are any.

        Returns an answer if nothing has been found yet and the disk is needed.
        """
        topic, group, queue_id = key
        queue = self._store.queue(topic, queue_id)
        if queue is None:
            self._start_before_first_message(request, key)
            return None
        if key in self._queues_in_read or (
            topic != request.topic and has_other_retry_topic(result, topic)
        ):
            return None
        if self._context.offsets.take_reset(group, topic, queue_id) is not None:
            self._order.clear(topic, group, queue_id)
        offset = self._context.offsets.get(group, topic, queue_id)
        if offset is None:
            initial = self._initial_offset(request, key, queue, last)
            if isinstance(initial, InThread):
                if result.batches:
                    result.rest += queue.visible_max(self._store.confirm_offset)
                    return None
                return initial
            offset = initial
        return self._read_queue(request, result, key, queue, offset, now_ms, last)

    def _search_on(self, search: PopSearch) -> Answer:
        """Look at more queues in the next step, or at all of them again while they are watched."""
        request, config = search.request, self._context.topics.get(search.request.topic)
        if search.watched is None and self._waits(search):
            wait_queue = self._polling.wait_queue(request, notify=False)
            if wait_queue is not None:
                again = functools.partial(self._search_watched, request, wait_queue)
                return self._polling.when_watched(wait_queue, again, again)
        search.several_steps = True

        def go_on() -> Answer:
            self._check_again(request)
            if self._context.topics.get(request.topic) is not config:
                return self._try_pop(request, last=search.last)
            return self._search(search)

        return NextIteration(go_on)

    def _search_watched(self, request: PopRequest, watched: WaitQueue) -> Answer:
        """Search from the start: all queues are watched from now on."""
        self._check_again(request)
        return self._try_pop(request, last=False, watched=watched)

    def _read_queue(
        self,
        request: PopRequest,
        result: PopResult,
        key: GroupQueue,
        queue: ConsumeQueue,
        offset: int,
        now_ms: int,
        last: bool,
    ) -> Answer:
        """Read messages of a queue into the result.

        Returns an answer if nothing has been found yet and the read has to wait for the disk.
        """
        high = queue.visible_max(self._store.confirm_offset)
        if offset == high or self._is_blocked(request, key, now_ms):
            return None
        config = self._context.settings.current.broker
        over_limit = self.revive_log.checkpoints.in_flight_in(key) > config.pop_in_flight_max
        if result.count >= request.count_max or (config.pop_in_flight_limited and over_limit):
            result.rest += max(high - offset, 0)
            return None
        space = config.pull_bytes_max - result.size
        if space <= 0:
            result.rest += max(high - offset, 0)
            return None
        batch = read_messages(
            key.topic,
            key.group,
            queue,
            offset,
            reader=self._store.reader,
            count_max=request.count_max - result.count,
            bytes_max=space,
            wanted=request.wanted,
            confirm_offset=self._store.confirm_offset,
            wait=False,
        )
        if batch is None:
            if not result.batches:
                return self._read_in_thread(request, key, queue, offset, last)
            result.rest += max(high - offset, 0)
            return None
        self._add_batch(request, result, batch)
        return None

    def _is_blocked(self, request: PopRequest, key: GroupQueue, now_ms: int) -> bool:
        return request.ordered and self._order.check_block(request.attempt_id, *key, now_ms)

    def _add_batch(self, request: PopRequest, result: PopResult, batch: ReadBatch) -> None:
        """Add the messages of a queue; commit the offset past messages that are filtered out."""
        result.rest += batch.rest()
        if batch.offsets:
            result.batches.append(batch)
            result.count += len(batch.offsets)
            result.size += len(batch.data)
        elif batch.next_offset != self._context.offsets.get(
            request.group, batch.topic, batch.queue.queue_id
        ):
            self._context.offsets.commit(
                request.group, batch.topic, batch.queue.queue_id, batch.next_offset, self._now_ms
            )
            result.skipped = True

    # --- reads from disk

    def _read_in_thread(
        self, request: PopRequest, key: GroupQueue, queue: ConsumeQueue, offset: int, last: bool
    ) -> InThread:
        """Read a queue in the thread pool; other pops of the group skip it meanwhile."""
        store, confirm_offset = self._store, self._store.confirm_offset
        bytes_max = self._context.settings.current.broker.pull_bytes_max
        self._queues_in_read.add(key)

        def work() -> ReadBatch | Exception:
            try:
                return read_messages(
                    key.topic,
                    key.group,
                    queue,
                    offset,
                    reader=store.new_reader(),
                    count_max=request.count_max,
                    bytes_max=bytes_max,
                    wanted=request.wanted,
                    confirm_offset=confirm_offset,
                    wait=True,
                ) or ReadBatch(key.topic, queue, offset, offset)
            except Exception as error:  # raised in `then`, after the queue is released
                return error

        def then(batch: ReadBatch | Exception) -> Answer:
            self._queues_in_read.discard(key)
            if isinstance(batch, Exception):
                self._polling.wake_for(request.topic, request.group, (key.topic, key.queue_id))
                raise batch
            return self._deliver_read(request, key, batch, offset, last)

        return InThread(work, then)

    def _deliver_read(
        self, request: PopRequest, key: GroupQueue, batch: ReadBatch, offset: int, last: bool
    ) -> Answer:
        offsets, now_ms = self._context.offsets, self.now()
        here = offsets.get(request.group, key.topic, key.queue_id)
        gone = (
            batch.queue.deleted
            or here != offset
            or offsets.has_reset(request.group, key.topic, key.queue_id)
        )
        if gone or self._is_blocked(request, key, now_ms):
            return self._try_pop(request, last=last)  # the queue changed during the read
        result = PopResult()
        self._add_batch(request, result, batch)
        if result.batches:
            answer = self._deliver(request, result, now_ms)
        else:
            search = PopSearch(request, last, iter(()), rest=result.rest, skipped=result.skipped)
            answer = self._wait(search)
        self._polling.wake_for(request.topic, request.group, (key.topic, key.queue_id))
        return answer

    # --- initial offset of a group

    def _initial_offset(
        self, request: PopRequest, key: GroupQueue, queue: ConsumeQueue, last: bool
    ) -> int | InThread:
        """Where a group without an offset begins; finding out may need the disk."""
        if _starts_first(request, key.topic):
            return self._commit_initial_offset(key, queue.min_offset)
        at_zero: bool | Callable[[], bool] = False
        if self._context.settings.current.broker.pop_first_if_young:
            at_zero = self._context.offsets.starts_at_zero(key.topic, key.queue_id)
        if isinstance(at_zero, bool):
            return self._commit_initial_offset(key, 0 if at_zero else self._latest_offset(queue))
        return InThread(at_zero, lambda young: self._set_initial_offset(request, key, young, last))

    def _start_before_first_message(self, request: PopRequest, key: GroupQueue) -> None:
        """Record that a group waits for the first messages of a queue that does not exist yet.

        Otherwise a group that begins with the newest message would skip what arrives until its
        next pop.
        """
        offset = self._context.offsets.get(key.group, key.topic, key.queue_id)
        if offset is None and not _starts_first(request, key.topic):
            self._commit_initial_offset(key, 0)

    def _set_initial_offset(
        self, request: PopRequest, key: GroupQueue, young: bool, last: bool
    ) -> Answer:
        queue = self._store.queue(key.topic, key.queue_id)
        if (
            queue is not None
            and self._context.offsets.get(key.group, key.topic, key.queue_id) is None
        ):
            self._commit_initial_offset(key, 0 if young else self._latest_offset(queue))
        return self._try_pop(request, last=last)

    def _latest_offset(self, queue: ConsumeQueue) -> int:
        return max(queue.visible_max(self._store.confirm_offset) - 1, 0)

    def _commit_initial_offset(self, key: GroupQueue, offset: int) -> int:
        self._context.offsets.commit(key.group, key.topic, key.queue_id, offset, self._now_ms)
        return offset

    # --- responses

    def _deliver(
        self, request: PopRequest, result: PopResult, now_ms: int, *, complete: bool = True
    ) -> Answer:
        """Create the checkpoints for what was read, and the response; `complete` if the search has
        looked at all queues."""
        revive_queue_id = (
            POP_ORDER_REVIVE_QUEUE if request.ordered else self.revive_log.next_queue()
        )
        keys = [
            CheckpointKey(
                batch.topic, request.group, batch.queue.queue_id, batch.start_offset, now_ms
            )
            for batch in result.batches
        ]
        pop_ms = self._acks.unused_pop_ms(keys, now_ms)
        counts: list[str] = []
        given: list[ReadBatch] = []
        for key, batch in zip(keys, result.batches, strict=True):
            try:
                if request.ordered:
                    counts.append(self._record_ordered_pop(request, batch, pop_ms, now_ms))
                else:
                    key = key._replace(pop_ms=pop_ms)
                    checkpoint = PopCheckpoint(
                        key, request.invisible_ms, batch.offsets, revive_queue_id
                    )
                    checkpoint.log_offset = batch.log_offset
                    self.revive_log.add_checkpoint(checkpoint, now_ms, batch.next_offset)
            except PenstockError:
                if not given:
                    raise
                result.rest += len(batch.offsets)
                continue
            given.append(batch)
        receipt = Receipt(
            0,
            pop_ms,
            request.invisible_ms,
            revive_queue_id,
            kind_of(request.topic),
            self._context.settings.current.broker.name,
            0,
            0,
        )
        body = b"".join([self._encode_batch(request, batch, receipt, now_ms) for batch in given])
        ext = response_fields(request, pop_ms, revive_queue_id, result.rest, given)
        if request.ordered:
            ext["orderCountInfo"] = ";".join(counts)
        if result.rest > 0 or not complete:
            self._polling.wake(request.topic, request.group, request.queue_id)
        return Reply(ResponseCode.SUCCESS, ext, body, "FOUND")

    def _record_ordered_pop(
        self, request: PopRequest, batch: ReadBatch, pop_ms: int, now_ms: int
    ) -> str:
        """Record an ordered pop; the group's offset stays at its first message."""
        queue = GroupQueue(batch.topic, request.group, batch.queue.queue_id)
        before = self._order.state(queue)
        counts = self._order.update(
            request.attempt_id, *queue, pop_ms, request.invisible_ms, batch.offsets
        )
        try:
            self.revive_log.record_ordered_pop(queue, batch.start_offset, now_ms)
        except PenstockError:
            self._order.restore(queue, before)
            raise
        self._context.effects.put(TickAt(self._order.due()))
        return counts

    def _encode_batch(
        self, request: PopRequest, batch: ReadBatch, receipt: Receipt, now_ms: int
    ) -> bytes:
        """Count the messages of a queue and encode them for the client."""
        context = self._context
        behind_ms = max(now_ms - batch.stored_ms, 0)
        context.stats.got(
            request.group, batch.topic, len(batch.offsets), len(batch.data), behind_ms
        )
        if not request.ordered:
            context.stats.popped(request.group, request.topic)
        shown = context.settings.current.broker.pop_retry_topic_shown
        if batch.topic == request.topic or shown:
            return batch.data
        receipt = receipt._replace(
            start_offset=batch.start_offset,
            kind=kind_of(batch.topic),
            queue_id=batch.queue.queue_id,
        )
        texts = [receipt._replace(queue_offset=offset).format() for offset in batch.offsets]
        return restore_topic(batch.data, request.topic, texts)

    def _waits(self, search: PopSearch) -> bool:
        return not search.last and search.request.deadline_ms > self.now()

    def _wait(self, search: PopSearch) -> Answer:
        """Suspend a pop that found nothing, or respond if its polling time is over."""
        request = search.request
        code = ResponseCode.POLLING_TIMEOUT
        if self._waits(search):
            if search.skipped and search.rest > 0:
                # There is more to read; let other requests run first.
                return InThread(lambda: None, lambda _: self._try_pop(request, last=False))
            wait_queue = self._polling.wait_queue(request, notify=False)
            if wait_queue is not None:
                again = functools.partial(self._search_watched, request, wait_queue)
                suspend = functools.partial(self._suspend, search, wait_queue)
                # In several steps, arrivals in queues that were not watched may be missed.
                missed = search.several_steps and search.watched is not wait_queue
                return self._polling.when_watched(wait_queue, again if missed else suspend, again)
            code = ResponseCode.POLLING_FULL
        self._context.stats.missed()
        ext = response_fields(request, self.now(), 0, search.rest, [])
        return Reply(code, ext, remark="NO_MESSAGE_IN_QUEUE")

    def _suspend(self, search: PopSearch, wait_queue: WaitQueue) -> Answer:
        watched = search.watched is wait_queue
        notifications = search.notifications if watched else wait_queue.notifications
        retry = functools.partial(self._retry, search.request)
        return Suspend(wait_queue, search.request.deadline_ms, retry, notifications)

    def _retry(self, request: PopRequest, last: bool) -> Answer:
        """Retry a suspended pop."""
        self._check_again(request)
        return self._try_pop(request, last=last)

    def _check_again(self, request: PopRequest) -> None:
        """Raise an error if the request is not allowed any more."""
        try:
            self._requests.readable(request.topic, request.queue_id)
            group = self._context.groups.get(request.group)
            if group is not None and not group.consume_enable:
                raise NoPermission(f"consumption is disabled for the group {request.group}")
        except PenstockError:
            self._polling.wake(
                request.topic, request.group, request.queue_id
            )  # the next one fails too
            raise


def _starts_first(request: PopRequest, topic: str) -> bool:
    """Whether a group without an offset starts at the first message of the topic's queues."""
    return request.from_first or topic.startswith(RETRY_TOPIC_PREFIX)
