"""Rebalancing: assigns queues to this consumer, every 20 s and when members or routes change.

Every member of a group rebalances on its own (see `queue_assignment`). A broker of the topic lists
the members, the strategy allocates the queues, and the listener gets each change. To release a
queue, the listener stops, then the offset is stored, then the queue is unlocked; only after that
another member, or this one again, continues with it.

A rebalance that is incomplete (no route yet, a queue is locked elsewhere, a broker does not
respond) is retried after half a second, with a back-off of up to five seconds.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol, TypeAlias

from penstock.client.client_session import Session
from penstock.client.consumer.offset_store import OffsetStore, offset_of_response, peer_of_queue
from penstock.client.consumer.process_queue import queue_text
from penstock.client.consumer.queue_assignment import Strategy, sorted_clients, strategy_of
from penstock.client.topic_routes import Route
from penstock.clock import pause
from penstock.errors import BadSetting, NoRoute, PenstockError, Refused
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import GetConsumerListByGroupResponseBody, MessageQueue
from penstock.wire.codes import RETRY_TOPIC_PREFIX, RequestCode, ResponseCode

log = logging.getLogger(__name__)

REBALANCE_MS = 20_000
RETRY_MS = 500
RETRY_MS_MAX = 5_000
"""An incomplete rebalance is retried after RETRY_MS; the time doubles after each failure."""
HANDOVER_MS = 300
"""Time for the previous owner of a queue to store its offset.

It avoids most duplicates. Ordered queues do not need it, they are locked."""
INTERVAL_MS_MIN = 100
"""Shortest time between two rebalances: notifications come in bursts, one from each broker."""
CALL_MS = 5_000

StartAt: TypeAlias = Literal["last", "first"] | datetime
"""Where a group without committed offsets begins: at the end, at the start, or at a time."""


class RebalanceListener(Protocol):
    """The consumer that gets the queues."""

    def topics(self) -> Iterable[str]:
        """The subscribed topics with namespace, and the retry topic if there is one."""

    def add_queue(self, queue: MessageQueue, offset: int) -> None:
        """A queue was assigned: start at this offset."""

    async def remove_queue(self, queue: MessageQueue) -> None:
        """A queue is released: stop it.

        Returns when the listener does not change the queue's offset any more.
        """

    def allocation_changed(self, allocation: "Allocation") -> None:
        """The assigned queues of a topic have changed."""


class Locks(Protocol):
    """Queue locks of an ordered consumer (`orderly.OrderlyQueueLocks`)."""

    async def lock(self, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Lock queues; returns those that are locked for us."""

    async def unlock(self, queues: Iterable[MessageQueue]) -> None:
        """Unlock queues."""

    def held(self) -> set[MessageQueue]:
        """All locked queues."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The last result for a topic; `problem` tells why the rebalance is incomplete."""

    topic: str
    queues: tuple[MessageQueue, ...] = ()
    clients: tuple[str, ...] = ()
    assigned: frozenset[MessageQueue] = frozenset()
    problem: str | None = None


class Rebalancer:
    """Assigns queues of the listener's topics.

    Call `start` after `Session.join`, `wake` when members or routes change, and `close` before
    `Session.leave`: it releases all queues, stores their offsets and unlocks them.
    """

    def __init__(
        self,
        session: Session,
        group: str,
        listener: RebalanceListener,
        offsets: OffsetStore,
        *,
        broadcast: bool = False,
        strategy: str | Strategy = "averagely",
        start_at: StartAt = "last",
        locks: Locks | None = None,
        rebalance_ms: int = REBALANCE_MS,
    ) -> None:
        self._session = session
        self._group = group
        self._listener = listener
        self._offsets = offsets
        self.broadcast = broadcast
        self._strategy = strategy_of(strategy)
        self._start_at = check_start_at(start_at)
        self._locks = locks
        self._rebalance_ms = rebalance_ms
        self._assigned: dict[MessageQueue, int] = {}  # queue → offset at which it was started
        self._releasing: dict[MessageQueue, asyncio.Task[object]] = {}
        self._duplicate_ids: list[str] = []
        self._rebalance_lock = asyncio.Lock()
        self._due = asyncio.Event()
        self._retry_ms = RETRY_MS
        self._task: asyncio.Task[object] | None = None
        self.allocations: dict[str, Allocation] = {}
        """The last result, by topic."""

    @property
    def assigned(self) -> frozenset[MessageQueue]:
        """The assigned queues."""
        return frozenset(self._assigned)

    def start_offset(self, queue: MessageQueue) -> int | None:
        """The offset at which a queue was started; None if it is not assigned."""
        return self._assigned.get(queue)

    def start(self) -> None:
        """Rebalance now and periodically."""
        self._task = self._session.spawn(self._run())

    def wake(self) -> None:
        """Rebalance soon: members or routes have changed."""
        self._retry_ms = RETRY_MS
        self._due.set()

    async def close(self) -> None:
        """Release all queues: store their offsets and unlock them."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for queue in list(self._assigned):
            self._start_release(queue)
        await asyncio.gather(*self._releasing.values(), return_exceptions=True)
        if self._locks is not None and (left := self._locks.held()):  # locked but not started
            await self._locks.unlock(left)

    async def restart_queue(self, queue: MessageQueue) -> None:
        """Release a queue and, if it is assigned again, start it at its stored offset."""
        if queue in self._assigned:
            self._start_release(queue)
        releasing = self._releasing.get(queue)
        if releasing is not None:
            await asyncio.shield(releasing)
        self.wake()

    def lock_lost(self, queue: MessageQueue) -> None:
        """Restart a queue at the offset that the other member has stored; ours is not stored."""
        if queue in self._assigned:
            self._offsets.forget(queue)
            self._start_release(queue, store=False)
            self.wake()

    async def rebalance(self) -> bool:
        """Rebalance now; False if the result is incomplete."""
        async with self._rebalance_lock:
            topics = set(self._listener.topics())
            complete = True
            for topic in sorted(topics):
                complete &= await self._allocate_topic(topic)
            for queue in [queue for queue in self._assigned if queue.topic not in topics]:
                self._start_release(queue)
            for topic in self.allocations.keys() - topics:
                del self.allocations[topic]
            return complete

    def owners(self, allocation: Allocation) -> list[tuple[str, int]]:
        """The members that have queues of a topic and their numbers of queues, by our strategy."""
        owners = []
        for client in allocation.clients:
            try:
                count = len(
                    self._strategy(self._group, client, allocation.queues, allocation.clients)
                )
            except Exception:  # raised by the application's strategy
                log.debug(
                    "%s: the strategy failed for client %s", self._group, client, exc_info=True
                )
                continue
            if count:
                owners.append((client, count))
        return owners

    async def _run(self) -> None:
        clock = self._session.clock
        while True:
            self._due.clear()
            started_ms = clock.monotonic_ms()
            if await self.rebalance():
                wait_ms, self._retry_ms = self._rebalance_ms, RETRY_MS
            else:
                wait_ms = min(self._retry_ms, self._rebalance_ms)
                self._retry_ms = min(2 * self._retry_ms, RETRY_MS_MAX)
            alarm = clock.wake_at(clock.now_ms() + wait_ms, self._due.set)
            try:
                await self._due.wait()
            finally:
                alarm.cancel()
            await pause(clock, max(started_ms + INTERVAL_MS_MIN - clock.monotonic_ms(), 0))

    # --- one topic

    async def _allocate_topic(self, topic: str) -> bool:
        clients: list[str] = []
        queues: tuple[MessageQueue, ...] = ()
        try:
            route = self._session.cached_route(topic) or await self._session.find_route(topic)
            if route is None:
                raise NoRoute(f"no broker has the topic {topic!r} yet")
            queues = route.read_queues
            if self.broadcast:
                wanted = list(queues)
            else:
                clients = await self._members(route)
                wanted = self._allocate(queues, clients)
        except PenstockError as error:
            known = self.allocations.get(topic)
            if known is None or known.problem != str(error):
                # The broker creates the retry topic only after the first heartbeat.
                level = logging.INFO if topic.startswith(RETRY_TOPIC_PREFIX) else logging.WARNING
                log.log(level, "%s: cannot rebalance topic %s: %s", self._group, topic, error)
            self._set_allocation(topic, queues, clients, str(error))
            return False
        return await self._apply(topic, queues, clients, wanted)

    def _allocate(self, queues: tuple[MessageQueue, ...], clients: list[str]) -> list[MessageQueue]:
        if not queues:
            return []
        try:
            given = self._strategy(self._group, self._session.client_id, queues, clients)
            wanted = set(given)
        except Exception as error:  # usually raised by the application's strategy
            log.exception("%s: the strategy failed", self._group)
            raise Refused(f"the strategy failed: {type(error).__name__}: {error}") from error
        unknown = sorted(map(str, wanted.difference(queues)))
        if unknown:
            raise Refused(f"the strategy returned unknown queues: {', '.join(unknown[:3])}")
        return [queue for queue in queues if queue in wanted]

    async def _apply(
        self,
        topic: str,
        queues: tuple[MessageQueue, ...],
        clients: list[str],
        wanted: list[MessageQueue],
    ) -> bool:
        before = {queue for queue in self._assigned if queue.topic == topic}
        for queue in before.difference(wanted):
            self._start_release(queue)
        waiting = [queue for queue in wanted if queue in self._releasing]
        new = [
            queue
            for queue in wanted
            if queue not in self._assigned and queue not in self._releasing
        ]
        problem = "queues are still being released" if waiting else None
        if new and self._locks is not None:
            locked = await self._locks.lock(new)
            if len(locked) < len(new):
                problem = f"{len(new) - len(locked)} queues are still locked by another member"
                new = [queue for queue in new if queue in locked]
        elif new and len(clients) > 1:
            await pause(self._session.clock, HANDOVER_MS)
        failures = await asyncio.gather(*(self._start_queue(queue) for queue in new))
        problem = next((failure for failure in failures if failure), problem)
        after = {queue for queue in self._assigned if queue.topic == topic}
        self._set_allocation(topic, queues, clients, problem)
        if after != before:
            log.info(
                "%s: assigned %d of %d queues of topic %s, members %d: %s",
                self._group,
                len(after),
                len(queues),
                topic,
                max(len(clients), 1),
                _text(after),
            )
            self._listener.allocation_changed(self.allocations[topic])
        return problem is None

    def _set_allocation(
        self, topic: str, queues: tuple[MessageQueue, ...], clients: list[str], problem: str | None
    ) -> None:
        assigned = frozenset(queue for queue in self._assigned if queue.topic == topic)
        self.allocations[topic] = Allocation(topic, queues, tuple(clients), assigned, problem)

    async def _start_queue(self, queue: MessageQueue) -> str | None:
        """Start a queue; returns the problem, or None."""
        self._offsets.forget(queue)
        try:
            offset = await first_offset(self._session, self._offsets, queue, self._start_at)
        except PenstockError as error:
            log.warning(
                "%s: cannot find the start offset of queue %s: %s",
                self._group,
                queue_text(queue),
                error,
            )
            if self._locks is not None:
                await self._locks.unlock([queue])
            return f"cannot find the start offset: {error}"
        if queue.topic not in self._listener.topics():  # unsubscribed meanwhile
            if self._locks is not None:
                await self._locks.unlock([queue])
            return None
        self._assigned[queue] = offset
        self._listener.add_queue(queue, offset)
        return None

    def _start_release(self, queue: MessageQueue, *, store: bool = True) -> None:
        self._assigned.pop(queue, None)
        self._releasing[queue] = self._session.spawn(self._release(queue, store=store))

    async def _release(self, queue: MessageQueue, *, store: bool) -> None:
        try:
            await self._listener.remove_queue(queue)
            if store:
                await self._offsets.persist([queue])
            self._offsets.forget(queue)
            if self._locks is not None:
                await self._locks.unlock([queue])
        finally:
            del self._releasing[queue]

    # --- members

    async def _members(self, route: Route) -> list[str]:
        """The client ids of the group, from the first broker of the topic that responds.

        All members query the brokers in the same order, so they get the same list. A broker that
        does not know us (it has restarted, our heartbeat is late) gets a heartbeat and is queried
        again.
        """
        failure: PenstockError = NoRoute(f"topic {route.topic!r} has no broker")
        for broker_name in route.brokers:
            try:
                await self._session.ensure_heartbeat(broker_name)
                clients = await self._query_members(broker_name)
                if self._session.client_id not in clients:
                    await self._session.send_heartbeats()
                    clients = await self._query_members(broker_name)
            except PenstockError as error:
                failure = error
                continue
            if clients:
                self._warn_of_duplicate_ids(clients)
                return sorted_clients(clients)
            failure = Refused(f"broker {broker_name} knows no member of group {self._group}")
        raise failure

    def _warn_of_duplicate_ids(self, clients: list[str]) -> None:
        duplicates = sorted(client for client, count in Counter(clients).items() if count > 1)
        if duplicates and duplicates != self._duplicate_ids:
            log.warning(
                "%s: several members have the client id %s; give each its own instance_name,"
                " otherwise some queues are consumed twice and others not at all",
                self._group,
                ", ".join(duplicates),
            )
        self._duplicate_ids = duplicates

    async def _query_members(self, broker_name: str) -> list[str]:
        peer = self._session.broker(broker_name)
        fields = {"consumerGroup": self._group, "bname": broker_name}
        try:
            answer = await self._session.call(
                peer, RequestCode.GET_CONSUMER_LIST_BY_GROUP, fields, timeout_ms=CALL_MS
            )
        except Refused as error:
            if error.answer_code != ResponseCode.SYSTEM_ERROR:
                raise
            return []  # RocketMQ's response for a group without members
        return fastjson.decode(answer.body, GetConsumerListByGroupResponseBody).consumer_id_list


def check_start_at(start_at: StartAt) -> StartAt:
    """Raise BadSetting if this is not a valid start position."""
    if start_at not in ("last", "first") and not isinstance(start_at, datetime):
        raise BadSetting(f"start_at is {start_at!r}", hint='give "last", "first" or a datetime')
    return start_at


async def first_offset(
    session: Session, offsets: OffsetStore, queue: MessageQueue, start_at: StartAt
) -> int:
    """The start offset of a newly assigned queue; raises PenstockError.

    It is the stored offset. Without one `start_at` applies ("last" as in RocketMQ: a queue that
    still has its first message starts there). Messages of a retry topic are never skipped.
    """
    retry = queue.topic.startswith(RETRY_TOPIC_PREFIX)
    stored = await offsets.read(queue, exact=isinstance(start_at, datetime) and not retry)
    if stored is not None:
        return stored
    if retry or start_at == "first":
        return await query_offset(session, queue, RequestCode.GET_MIN_OFFSET)
    if start_at == "last":
        return await query_offset(session, queue, RequestCode.GET_MAX_OFFSET)
    assert isinstance(start_at, datetime)
    return await query_offset(
        session,
        queue,
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
        timestamp=str(int(start_at.timestamp() * 1000)),
    )


async def query_offset(session: Session, queue: MessageQueue, code: int, **fields: str) -> int:
    """The min, max or found offset of a queue, from its broker."""
    peer = await peer_of_queue(session, queue)
    ext = {
        "topic": queue.topic,
        "queueId": str(queue.queue_id),
        "bname": queue.broker_name,
        **fields,
    }
    return offset_of_response((await session.call(peer, code, ext, timeout_ms=CALL_MS)).ext)


def _text(queues: Iterable[MessageQueue]) -> str:
    """Queues for log lines: `broker-a 0 1 2, broker-b 3`."""
    brokers: dict[str, list[str]] = {}
    for queue in sorted(queues):
        brokers.setdefault(queue.broker_name, []).append(str(queue.queue_id))
    return ", ".join(f"{name} {' '.join(numbers)}" for name, numbers in brokers.items()) or "none"
