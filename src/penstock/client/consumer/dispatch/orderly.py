"""Ordered consumption: the messages of a queue one after another, under a lock of the broker.

Brokers lock queues for one client of a group, so only one member handles a queue even while members
disagree about the assignment. A lock is renewed every 20 s and considered valid for 30 s; brokers
keep it for 60 s.

A failed message suspends its queue for a short time and is handled again, with a local retry count,
until it is done or its retries are used up; then it goes to the dead letter topic.

If another member has, or may have had, the lock of a queue, our messages of the queue are stale.
`on_lost` tells the rebalancer, which starts the queue again at the committed offset.
"""

import asyncio
import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from itertools import takewhile

from penstock.client.client_session import Session
from penstock.client.consumer.dispatch.handlers import Retry, retry_for
from penstock.client.consumer.dispatch.send_back import SendBack
from penstock.client.consumer.offset_store import OffsetStore
from penstock.client.consumer.process_queue import ProcessQueue, queue_text
from penstock.client.received_message import ReceivedMessage
from penstock.clock import finish_within, pause
from penstock.errors import PenstockError
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import (
    LockBatchRequestBody,
    LockBatchResponseBody,
    MessageQueue,
)
from penstock.wire.codes import RequestCode

log = logging.getLogger(__name__)

RENEW_MS = 20_000
LOCK_VALID_MS = 30_000
BROKER_LOCK_MS = 60_000
"""How long a broker keeps a lock that is not renewed; then any member may get it."""
CALL_MS = 1_000
LOCK_RETRY_MS = 3_000
"""Interval of attempts to lock a queue that another member has locked."""
SUSPEND_MS = 1_000
"""How long a failure without a delay level suspends its queue."""
LEVEL_MS = (1_000, 5_000, 10_000, 30_000)
"""Suspension by delay level; limited, since the whole queue waits for one message."""
STOP_MS = 20_000
"""How long a handler may delay the unlocking of a dropped queue."""


class OrderlyQueueLocks:
    """The queue locks of this client.

    `on_lost` is called with each queue whose lock another member has, or may have had.
    """

    def __init__(
        self, session: Session, group: str, on_lost: Callable[[MessageQueue], object]
    ) -> None:
        self._session = session
        self._group = group
        self._on_lost = on_lost
        self._since_ms: dict[MessageQueue, int] = {}  # time of the last successful lock request
        self._lost: set[MessageQueue] = set()
        self._failing: dict[str, str] = {}  # broker name → last logged failure
        # One request at a time per broker: a lock request must not overtake an unlock request.
        self._request_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._locking: Counter[MessageQueue] = Counter()
        self._unlocking: set[MessageQueue] = set()
        self._renewing: set[str] = set()

    def holds(self, queue: MessageQueue) -> bool:
        """Whether we hold a valid lock of the queue."""
        since_ms = self._since_ms.get(queue)
        return (
            since_ms is not None and self._session.clock.monotonic_ms() - since_ms <= LOCK_VALID_MS
        )

    def held(self) -> set[MessageQueue]:
        """The queues that we have locked, or want to lock again after a loss."""
        return {*self._since_ms, *self._lost}

    def age_ms(self, queue: MessageQueue) -> int | None:
        """The time since the last successful lock request; None if the lock is not ours."""
        since_ms = self._since_ms.get(queue)
        return None if since_ms is None else self._session.clock.monotonic_ms() - since_ms

    async def lock(self, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Lock queues or renew their locks; returns those that are locked for us."""
        wanted = list(queues)
        self._locking.update(wanted)
        try:
            answers = await asyncio.gather(
                *(self._lock_in_turn(name, some) for name, some in _by_broker(wanted).items())
            )
        finally:
            self._locking -= Counter(wanted)
        return {queue for locked in answers for queue in locked}

    async def unlock(self, queues: Iterable[MessageQueue]) -> None:
        """Unlock queues; a broker that cannot be reached unlocks them after a minute."""
        unlocked = list(queues)
        self._unlocking.update(unlocked)
        try:
            await asyncio.gather(
                *(self._unlock_in_turn(name, some) for name, some in _by_broker(unlocked).items())
            )
        finally:
            self._unlocking.difference_update(unlocked)

    async def keep_locked(self) -> None:
        """Renew all locks periodically, also lost ones.

        Brokers are independent: one that does not respond does not delay the others.
        """
        while True:
            await pause(self._session.clock, RENEW_MS)
            for name in _by_broker(self.held()).keys() - self._renewing:
                self._renewing.add(name)
                self._session.spawn(self._renew(name))

    async def _renew(self, broker_name: str) -> None:
        """Request locks from a broker until it has confirmed all of them."""
        try:
            while True:
                async with self._request_locks[broker_name]:
                    wanted = [queue for queue in self.held() if queue.broker_name == broker_name]
                    locked = await self._lock_at(broker_name, wanted) if wanted else set()
                if locked.issuperset(wanted):
                    return
                await pause(self._session.clock, LOCK_RETRY_MS)
        finally:
            self._renewing.discard(broker_name)

    async def _lock_in_turn(
        self, broker_name: str, queues: list[MessageQueue]
    ) -> set[MessageQueue]:
        async with self._request_locks[broker_name]:
            return await self._lock_at(broker_name, queues)

    async def _unlock_in_turn(self, broker_name: str, queues: list[MessageQueue]) -> None:
        """Unlock all waiting queues in one request, except those that are being locked again."""
        async with self._request_locks[broker_name]:
            unlocked = [
                queue
                for queue in self._unlocking
                if queue in queues
                or (queue.broker_name == broker_name and not self._locking[queue])
            ]
            self._unlocking.difference_update(unlocked)
            for queue in unlocked:
                self._lost.discard(queue)
                self._since_ms.pop(queue, None)
            if not unlocked:
                return  # done by another call
            try:
                await self._call(broker_name, RequestCode.UNLOCK_BATCH_MQ, unlocked)
            except PenstockError as error:
                log.info(
                    "%s: cannot unlock queues at %s, it keeps the locks for a minute: %s",
                    self._group,
                    broker_name,
                    error,
                )

    async def _lock_at(self, broker_name: str, queues: list[MessageQueue]) -> set[MessageQueue]:
        asked_ms = self._session.clock.monotonic_ms()
        try:
            body = await self._call(broker_name, RequestCode.LOCK_BATCH_MQ, queues)
            locked = set(fastjson.decode(body, LockBatchResponseBody).lock_ok_mq_set)
        except PenstockError as error:
            # Locks that we hold stay valid until LOCK_VALID_MS.
            if self._failing.get(broker_name) != str(error):
                self._failing[broker_name] = str(error)
                log.warning("%s: cannot lock queues at %s: %s", self._group, broker_name, error)
            return set()
        self._failing.pop(broker_name, None)
        locked.intersection_update(queues)
        for queue in queues:
            since_ms = self._since_ms.get(queue)
            stale = since_ms is not None and asked_ms - since_ms > BROKER_LOCK_MS
            if queue in locked and not stale:
                self._since_ms[queue] = asked_ms
                self._lost.discard(queue)
            elif since_ms is not None:
                locked.discard(queue)
                del self._since_ms[queue]
                self._lost.add(queue)
                log.warning(
                    "%s: lost the lock of queue %s: another member %s it",
                    self._group,
                    queue_text(queue),
                    "may have had" if stale else "has",
                )
                self._on_lost(queue)
        return locked

    async def _call(self, broker_name: str, code: int, queues: list[MessageQueue]) -> bytes:
        body = LockBatchRequestBody(
            consumer_group=self._group, client_id=self._session.client_id, mq_set=queues
        )
        answer = await self._session.call(
            self._session.master(broker_name), code, {}, fastjson.encode(body), timeout_ms=CALL_MS
        )
        return answer.body


class OrderlyDispatch:
    """Handles the messages of each queue in order; at most `concurrency` queues at a time.

    `handle` calls the application and returns None or a Retry. Without `locks` (broadcast) no queue
    is locked; without `send_back` a message whose retries are used up is only logged. A batch has
    messages for which `handler_of` returns the same handler.
    """

    def __init__(
        self,
        session: Session,
        group: str,
        offsets: OffsetStore,
        *,
        handle: Callable[[list[ReceivedMessage]], Awaitable[Retry | None]],
        handler_of: Callable[[ReceivedMessage], object] = lambda message: None,
        locks: OrderlyQueueLocks | None,
        send_back: SendBack | None,
        handle_batch: int = 1,
        retries_max: int = -1,
        concurrency: int = 20,
        suspend_ms: int = SUSPEND_MS,
    ) -> None:
        self._session = session
        self._group = group
        self._offsets = offsets
        self._handle = handle
        self._handler_of = handler_of
        self._locks = locks
        self._send_back = send_back
        self._handle_batch = handle_batch
        self._retries_max = retries_max
        self._suspend_ms = suspend_ms
        self._closing = False
        self._slots = asyncio.Semaphore(concurrency)
        self._workers: dict[ProcessQueue, asyncio.Task[object]] = {}
        self._suspended: dict[ProcessQueue, asyncio.Event] = {}  # the event ends the wait

    def submit(self, process_queue: ProcessQueue, messages: list[ReceivedMessage]) -> None:
        """Start a worker for the queue if it has none."""
        if not (process_queue.dropped or self._closing or process_queue in self._workers):
            self._workers[process_queue] = self._session.spawn(self._work(process_queue))

    async def stop(self, process_queue: ProcessQueue) -> None:
        """Return when the worker of a dropped queue has ended, or its handler takes too long."""
        worker = self._workers.get(process_queue)
        if worker is None:
            return
        if process_queue in self._suspended:
            self._suspended[process_queue].set()
        try:
            await finish_within(self._session.clock, STOP_MS, asyncio.wait({worker}))
        except TimeoutError:
            log.warning(
                "%s: a handler of the dropped queue %s has not returned within %d ms",
                self._group,
                queue_text(process_queue.queue),
                STOP_MS,
            )

    async def close(self, drain_ms: int) -> None:
        """Start no more handlers, and wait up to `drain_ms` for running ones."""
        self._closing = True
        for event in self._suspended.values():
            event.set()
        workers = set(self._workers.values())
        if not workers:
            return
        with contextlib.suppress(TimeoutError):
            await finish_within(self._session.clock, drain_ms, asyncio.wait(workers))
        late = [worker for worker in workers if not worker.done()]
        if late:
            log.warning(
                "%s: %d handlers have not returned within %d ms; their messages are redelivered",
                self._group,
                len(late),
                drain_ms,
            )
        for worker in late:
            worker.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _work(self, process_queue: ProcessQueue) -> None:
        messages: list[ReceivedMessage] = []
        try:
            while not (process_queue.dropped or self._closing):
                if not await self._ensure_lock(process_queue):
                    await self._suspend(process_queue, LOCK_RETRY_MS)
                    continue
                async with self._slots:
                    if process_queue.dropped or self._closing:
                        return
                    if not self._holds(process_queue):  # lost while we waited for the slot
                        continue
                    messages = messages or process_queue.take(self._handle_batch)
                    if not messages:
                        return
                    batch = self._for_one_handler(messages)
                    left, suspend_ms = await self._attempt(process_queue, batch)
                    messages = left + messages[len(batch) :]
                if suspend_ms:
                    await self._suspend(process_queue, suspend_ms)
        finally:
            del self._workers[process_queue]

    def _for_one_handler(self, messages: list[ReceivedMessage]) -> list[ReceivedMessage]:
        """The first messages that have the same handler."""
        handler = self._handler_of(messages[0])
        return list(takewhile(lambda message: self._handler_of(message) is handler, messages))

    async def _ensure_lock(self, process_queue: ProcessQueue) -> bool:
        """Lock the queue if it is not locked; whether we have the lock."""
        locks = self._locks
        return (
            locks is None
            or self._holds(process_queue)
            or bool(await locks.lock([process_queue.queue]))
        )

    def _holds(self, process_queue: ProcessQueue) -> bool:
        return self._locks is None or self._locks.holds(process_queue.queue)

    async def _attempt(
        self, process_queue: ProcessQueue, messages: list[ReceivedMessage]
    ) -> tuple[list[ReceivedMessage], int]:
        """Call the handler; returns the messages to handle again and the time to wait before."""
        started_ms = self._session.clock.monotonic_ms()
        for message in messages:
            message.retry_level = None
            message.handling_since_ms = started_ms
        result = await self._handle(messages)
        process_queue.busy_ms += self._session.clock.monotonic_ms() - started_ms
        left = []
        level = 0
        for message in messages:
            retry = retry_for(message, result)
            if retry is None or await self._make_dead_letter(message, retry):
                process_queue.finish_one(message)
            else:
                message.local_retries += 1
                level = max(level, retry.delay_level)
                left.append(message)
        if not process_queue.dropped:
            self._offsets.update(process_queue.queue, process_queue.progress)
        if not left:
            return [], 0
        process_queue.failed += len(left)
        return left, self._suspend_ms if level < 1 else LEVEL_MS[min(level, len(LEVEL_MS)) - 1]

    async def _make_dead_letter(self, message: ReceivedMessage, retry: Retry) -> bool:
        """Make a message a dead letter if its retries are used up; whether it is one."""
        used_up = 0 <= self._retries_max <= message.reconsume_times
        if retry.delay_level >= 0 and not used_up:
            return False
        if self._send_back is None:
            log.error(
                "%s: dropping message %s after %d retries",
                self._group,
                message.message_id,
                message.reconsume_times,
            )
            return True
        try:
            if used_up:
                await self._send_back.resend(message)
            else:
                await self._send_back(message, retry.delay_level)
        except PenstockError as error:
            log.warning(
                "%s: cannot make message %s a dead letter: %s",
                self._group,
                message.message_id,
                error,
            )
            return False
        log.warning(
            "%s: message %s is a dead letter after %d retries",
            self._group,
            message.message_id,
            message.reconsume_times,
        )
        return True

    async def _suspend(self, process_queue: ProcessQueue, ms: int) -> None:
        if process_queue.dropped or self._closing:
            return
        event = self._suspended[process_queue] = asyncio.Event()
        clock = self._session.clock
        alarm = clock.wake_at(clock.now_ms() + ms, event.set)
        try:
            await event.wait()
        finally:
            alarm.cancel()
            del self._suspended[process_queue]


def _by_broker(queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
    brokers: dict[str, list[MessageQueue]] = {}
    for queue in queues:
        brokers.setdefault(queue.broker_name, []).append(queue)
    return brokers
