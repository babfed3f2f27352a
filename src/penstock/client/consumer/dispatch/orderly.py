"""Consuming in order: one message of a queue after another, and only by whoever holds its lock.

Brokers lock queues for a client of a group, so that even while members disagree about their shares
only one of them works on a queue. A lock is asked for anew every 20 s and believed for 30 s;
brokers keep it for 60 s.

A message whose handler fails stops its queue for a moment and is tried again, with a count of its
own, until it is done or has been tried often enough: then it goes to the dead letter topic and the
queue moves on.

A lock that another member got, or may have got, is not simply taken back: what is here of the queue
is old then. `on_lost` tells the rebalancer, which begins with the queue anew.
"""

import asyncio
import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable
from itertools import takewhile

from penstock.client.client_session import Session
from penstock.client.consumer.dispatch.handlers import Retry, again
from penstock.client.consumer.dispatch.send_back import SendBack
from penstock.client.consumer.offset_store import Offsets
from penstock.client.consumer.process_queue import ProcessQueue
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
TRUST_MS = 30_000
KEPT_MS = 60_000
"""How long a broker keeps a lock that is not asked for again; then any member may get it."""
CALL_MS = 1_000
LOCK_AGAIN_MS = 3_000
"""How long a queue waits whose lock another member holds."""
SUSPEND_MS = 1_000
"""How long a queue rests after a failure that does not say how long."""
LEVEL_MS = (1_000, 5_000, 10_000, 30_000)
"""Rests by delay level; longer ones would let a whole queue wait for one message."""
STOP_MS = 20_000
"""A handler may hold up a queue that is given up for so long; then another member gets the lock."""


class QueueLocks:
    """The locks of a group's queues that this client holds."""

    def __init__(self, session: Session, group: str) -> None:
        self._session = session
        self._group = group
        self._since_ms: dict[MessageQueue, int] = {}
        self._lost: set[MessageQueue] = set()
        self._failing: dict[str, str] = {}
        # At each broker, a lock that was asked for must not arrive after its return.
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._asking: Counter[MessageQueue] = Counter()
        self._returning: set[MessageQueue] = set()
        self._renewing: set[str] = set()
        self.on_lost: Callable[[MessageQueue], object] = lambda queue: None
        """Told of each queue whose lock another member has now, or may have had meanwhile."""

    def holds(self, queue: MessageQueue) -> bool:
        """Whether the queue is locked for us, as far as can be known here."""
        since_ms = self._since_ms.get(queue)
        return since_ms is not None and self._session.clock.monotonic_ms() - since_ms <= TRUST_MS

    def held(self) -> set[MessageQueue]:
        """The queues whose locks we have, or had and want back."""
        return {*self._since_ms, *self._lost}

    def age_ms(self, queue: MessageQueue) -> int | None:
        """How long ago a lock was asked for with success; None if it is not ours."""
        since_ms = self._since_ms.get(queue)
        return None if since_ms is None else self._session.clock.monotonic_ms() - since_ms

    async def lock(self, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Lock these, or keep them locked; returns those that are ours now."""
        wanted = list(queues)
        self._asking.update(wanted)
        try:
            answers = await asyncio.gather(
                *(self._lock_in_turn(name, some) for name, some in _by_broker(wanted).items())
            )
        finally:
            self._asking -= Counter(wanted)
        return {queue for locked in answers for queue in locked}

    async def unlock(self, queues: Iterable[MessageQueue]) -> None:
        """Give these back; a broker that does not hear of it lets them go after a minute."""
        gone = list(queues)
        self._returning.update(gone)
        try:
            await asyncio.gather(
                *(self._unlock_in_turn(name, some) for name, some in _by_broker(gone).items())
            )
        finally:
            self._returning.difference_update(gone)

    async def keep_locked(self) -> None:
        """Ask for all locks again and again, also for lost ones; to be spawned.

        Each broker by itself: one that does not answer holds up no other's locks.
        """
        while True:
            await pause(self._session.clock, RENEW_MS)
            for name in _by_broker(self.held()).keys() - self._renewing:
                self._renewing.add(name)
                self._session.spawn(self._renew(name))

    async def _renew(self, broker_name: str) -> None:
        """Ask a broker until it has confirmed all locks that we want of it."""
        try:
            while True:
                async with self._turns[broker_name]:
                    wanted = [queue for queue in self.held() if queue.broker_name == broker_name]
                    locked = await self._lock_at(broker_name, wanted) if wanted else set()
                if locked.issuperset(wanted):
                    return
                await pause(self._session.clock, LOCK_AGAIN_MS)
        finally:
            self._renewing.discard(broker_name)

    async def _lock_in_turn(
        self, broker_name: str, queues: list[MessageQueue]
    ) -> set[MessageQueue]:
        async with self._turns[broker_name]:
            return await self._lock_at(broker_name, queues)

    async def _unlock_in_turn(self, broker_name: str, queues: list[MessageQueue]) -> None:
        """One request for all that wait for their turn, unless a lock is asked for in between."""
        async with self._turns[broker_name]:
            gone = [
                queue
                for queue in self._returning
                if queue in queues or (queue.broker_name == broker_name and not self._asking[queue])
            ]
            self._returning.difference_update(gone)
            for queue in gone:
                self._lost.discard(queue)
                self._since_ms.pop(queue, None)
            if not gone:
                return  # another has done it
            try:
                await self._call(broker_name, RequestCode.UNLOCK_BATCH_MQ, gone)
            except PenstockError as error:
                log.info("%s: %s keeps locks for a minute: %s", self._group, broker_name, error)

    async def _lock_at(self, broker_name: str, queues: list[MessageQueue]) -> set[MessageQueue]:
        asked_ms = self._session.clock.monotonic_ms()
        try:
            body = await self._call(broker_name, RequestCode.LOCK_BATCH_MQ, queues)
            locked = set(fastjson.decode(body, LockBatchResponseBody).lock_ok_mq_set)
        except PenstockError as error:
            # Those that we hold stay ours until nobody has confirmed them for too long.
            if self._failing.get(broker_name) != str(error):
                self._failing[broker_name] = str(error)
                log.warning("%s: no locks from %s: %s", self._group, broker_name, error)
            return set()
        self._failing.pop(broker_name, None)
        locked.intersection_update(queues)
        for queue in queues:
            since_ms = self._since_ms.get(queue)
            stale = since_ms is not None and asked_ms - since_ms > KEPT_MS
            if queue in locked and not stale:
                self._since_ms[queue] = asked_ms
                self._lost.discard(queue)
            elif since_ms is not None:
                locked.discard(queue)
                del self._since_ms[queue]
                self._lost.add(queue)
                have = "may have had" if stale else "has"
                log.warning("%s: another member %s the lock of %s now", self._group, have, queue)
                self.on_lost(queue)
        return locked

    async def _call(self, broker_name: str, code: int, queues: list[MessageQueue]) -> bytes:
        body = LockBatchRequestBody(
            consumer_group=self._group, client_id=self._session.client_id, mq_set=queues
        )
        answer = await self._session.call(
            self._session.broker(broker_name), code, {}, fastjson.encode(body), timeout_ms=CALL_MS
        )
        return answer.body


class OrderlyDispatch:
    """Hands messages to the handler in order, queue by queue; at most `concurrency` at a time.

    `handle` calls the application: None for done, a Retry for again. Without `locks` (broadcast)
    every queue is ours; without `send_back` a message that is given up is only logged. Messages are
    handled together if `handler_of` gives the same for them.
    """

    def __init__(
        self,
        session: Session,
        group: str,
        offsets: Offsets,
        *,
        handle: Callable[[list[ReceivedMessage]], Awaitable[Retry | None]],
        handler_of: Callable[[ReceivedMessage], object] = lambda message: None,
        locks: QueueLocks | None,
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
        self._resting: dict[ProcessQueue, asyncio.Event] = {}

    def submit(self, work: ProcessQueue, messages: list[ReceivedMessage]) -> None:
        """Messages have come: begin with them unless the queue's worker is at it already."""
        if not (work.dropped or self._closing or work in self._workers):
            self._workers[work] = self._session.spawn(self._work(work))

    async def stop(self, work: ProcessQueue) -> None:
        """Return when nobody works on a dropped queue any more, or a handler takes too long."""
        worker = self._workers.get(work)
        if worker is None:
            return
        if work in self._resting:
            self._resting[work].set()
        try:
            await finish_within(self._session.clock, STOP_MS, asyncio.wait({worker}))
        except TimeoutError:
            log.warning(
                "%s: a handler still works on %s after %d ms; another member goes on beside it",
                self._group,
                work.queue,
                STOP_MS,
            )

    async def close(self, drain_ms: int) -> None:
        """Begin no more messages, and wait for the handlers that have begun."""
        self._closing = True
        for resting in self._resting.values():
            resting.set()
        workers = set(self._workers.values())
        if not workers:
            return
        with contextlib.suppress(TimeoutError):
            await finish_within(self._session.clock, drain_ms, asyncio.wait(workers))
        late = [worker for worker in workers if not worker.done()]
        if late:
            log.warning(
                "%s: %d handlers have not come back within %d ms; their messages will come again",
                self._group,
                len(late),
                drain_ms,
            )
        for worker in late:
            worker.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _work(self, work: ProcessQueue) -> None:
        messages: list[ReceivedMessage] = []
        try:
            while not (work.dropped or self._closing):
                if not await self._ours(work):
                    await self._rest(work, LOCK_AGAIN_MS)
                    continue
                async with self._slots:
                    if work.dropped or self._closing:
                        return
                    if not self._holds(work):  # any more: the slot has let us wait
                        continue
                    messages = messages or work.take(self._handle_batch)
                    if not messages:
                        return
                    run = self._for_one_handler(messages)
                    left, rest_ms = await self._attempt(work, run)
                    messages = left + messages[len(run) :]
                if rest_ms:
                    await self._rest(work, rest_ms)
        finally:
            del self._workers[work]

    def _for_one_handler(self, messages: list[ReceivedMessage]) -> list[ReceivedMessage]:
        """The first messages, as far as they have the same handler."""
        handler = self._handler_of(messages[0])
        return list(takewhile(lambda message: self._handler_of(message) is handler, messages))

    async def _ours(self, work: ProcessQueue) -> bool:
        """Whether we hold the lock; asks for it if not."""
        locks = self._locks
        return locks is None or self._holds(work) or bool(await locks.lock([work.queue]))

    def _holds(self, work: ProcessQueue) -> bool:
        return self._locks is None or self._locks.holds(work.queue)

    async def _attempt(
        self, work: ProcessQueue, messages: list[ReceivedMessage]
    ) -> tuple[list[ReceivedMessage], int]:
        """Call the handler once; which messages it must see again, and after how long."""
        begun_ms = self._session.clock.monotonic_ms()
        for message in messages:
            message.again = None
            message.since_ms = begun_ms
        result = await self._handle(messages)
        work.busy_ms += self._session.clock.monotonic_ms() - begun_ms
        left = []
        level = 0
        for message in messages:
            retry = again(message, result)
            if retry is None or await self._give_up(message, retry):
                work.finish_one(message)
            else:
                message.local_retries += 1
                level = max(level, retry.delay_level)
                left.append(message)
        if not work.dropped:
            self._offsets.update(work.queue, work.progress)
        if not left:
            return [], 0
        work.failed += len(left)
        return left, self._suspend_ms if level < 1 else LEVEL_MS[min(level, len(LEVEL_MS)) - 1]

    async def _give_up(self, message: ReceivedMessage, retry: Retry) -> bool:
        """Send a message to the dead letters if it is time for that; whether it is gone."""
        tried_enough = 0 <= self._retries_max <= message.reconsume_times
        if retry.delay_level >= 0 and not tried_enough:
            return False
        if self._send_back is None:
            log.error(
                "%s: %r is given up after %d retries", self._group, message, message.reconsume_times
            )
            return True
        try:
            if tried_enough:
                await self._send_back.resend(message)
            else:
                await self._send_back(message, retry.delay_level)
        except PenstockError as error:
            log.warning("%s: %r can't be given up yet: %s", self._group, message, error)
            return False
        log.warning(
            "%s: %r is a dead letter after %d retries",
            self._group,
            message,
            message.reconsume_times,
        )
        return True

    async def _rest(self, work: ProcessQueue, ms: int) -> None:
        if work.dropped or self._closing:
            return
        awake = self._resting[work] = asyncio.Event()
        clock = self._session.clock
        alarm = clock.wake_at(clock.now_ms() + ms, awake.set)
        try:
            await awake.wait()
        finally:
            alarm.cancel()
            del self._resting[work]


def _by_broker(queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
    brokers: dict[str, list[MessageQueue]] = {}
    for queue in queues:
        brokers.setdefault(queue.broker_name, []).append(queue)
    return brokers
