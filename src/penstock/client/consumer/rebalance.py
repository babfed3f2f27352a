"""Which queues are ours: worked out every 20 s, and at once when members or routes change.

Every member of a group does this for itself (see `assign`). A broker of the topic is asked who the
members are, the strategy says what is ours, and the holder is told queue by queue. A queue that is
given up is dropped by the holder first, then its progress is stored, then its lock is given back:
only after that another member, or we again, go on with it.

What could not be settled (no route yet, a lock still held elsewhere, a broker that does not answer)
is tried again after half a second, then at growing distances up to five.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, Protocol, TypeAlias

from penstock.client.client_session import Session
from penstock.client.consumer.offset_store import Offsets, broker_of, offset_in
from penstock.client.consumer.queue_assignment import Strategy, sorted_clients, strategy_of
from penstock.client.topic_routes import Route
from penstock.clock import pause
from penstock.errors import BadSetting, NoRoute, PenstockError, Refused
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import GetConsumerListByGroupResponseBody, MessageQueue
from penstock.wire.codes import RETRY_TOPIC_PREFIX, RequestCode, ResponseCode

log = logging.getLogger(__name__)

REBALANCE_MS = 20_000
AGAIN_MS = 500
AGAIN_MS_MAX = 5_000
"""After so long what could not be settled is tried again; twice as long after each failure."""
HANDOVER_MS = 300
"""So long a member that loses queues has to store its progress before others begin with them.

Locks see to that for ordered queues; for others it saves most of the messages that would come
twice."""
GAP_MS = 100
"""Between two beginnings at least: notifications come in bursts, one from each broker."""
CALL_MS = 5_000

StartAt: TypeAlias = Literal["last", "first"] | datetime
"""Where a group begins that has no progress yet: with new messages, with the oldest, at a time."""


class Holder(Protocol):
    """The consumer whose queues are shared out."""

    def topics(self) -> Iterable[str]:
        """What it subscribes to, as servers know it, with its %RETRY% topic where it has one."""

    def take(self, queue: MessageQueue, offset: int) -> None:
        """The queue is ours from now on: begin at this offset."""

    async def drop(self, queue: MessageQueue) -> None:
        """The queue is not ours any more: stop at once.

        Returns when the holder will not change the queue's offset any more.
        """

    def shared(self, share: "Share") -> None:
        """Our part of a topic has changed."""


class Locks(Protocol):
    """Locks at the brokers, for consumers that keep the order (`orderly.QueueLocks`)."""

    on_lost: Callable[[MessageQueue], object]
    """Told of each queue whose lock another member has now, or may have had meanwhile."""

    async def lock(self, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Lock these; returns those that are ours now."""

    async def unlock(self, queues: Iterable[MessageQueue]) -> None:
        """Give them back."""

    def held(self) -> set[MessageQueue]:
        """All that are locked."""


@dataclass(frozen=True, slots=True)
class Share:
    """What the last rebalance found for a topic; `problem` says why it could not be settled."""

    topic: str
    queues: tuple[MessageQueue, ...] = ()
    clients: tuple[str, ...] = ()
    ours: frozenset[MessageQueue] = frozenset()
    problem: str | None = None


class Rebalancer:
    """Shares out the queues of the holder's topics, now and again.

    `start()` after `Session.join`, `wake()` when members or routes change, `close()` before
    `Session.leave`: it drops all queues, stores their progress and unlocks them.
    """

    def __init__(
        self,
        session: Session,
        group: str,
        holder: Holder,
        offsets: Offsets,
        *,
        broadcast: bool = False,
        strategy: str | Strategy = "averagely",
        start_at: StartAt = "last",
        locks: Locks | None = None,
        rebalance_ms: int = REBALANCE_MS,
    ) -> None:
        self._session = session
        self._group = group
        self._holder = holder
        self._offsets = offsets
        self.broadcast = broadcast
        self._strategy = strategy_of(strategy)
        self._start_at = check_start_at(start_at)
        self._locks = locks
        if locks is not None:
            locks.on_lost = self._lock_lost
        self._rebalance_ms = rebalance_ms
        self._ours: dict[MessageQueue, int] = {}
        self._leaving: dict[MessageQueue, asyncio.Task[object]] = {}
        self._twins: list[str] = []
        self._one_at_a_time = asyncio.Lock()
        self._due = asyncio.Event()
        self._again_ms = AGAIN_MS
        self._task: asyncio.Task[object] | None = None
        self.shares: dict[str, Share] = {}
        """By topic, what the last rebalance found."""

    @property
    def ours(self) -> frozenset[MessageQueue]:
        """The queues that are ours now."""
        return frozenset(self._ours)

    def begun_at(self, queue: MessageQueue) -> int | None:
        """The offset at which we began with a queue; None if it is not ours."""
        return self._ours.get(queue)

    def start(self) -> None:
        """Rebalance from now on; the first time at once."""
        self._task = self._session.spawn(self._run())

    def wake(self) -> None:
        """Rebalance soon: members or routes have changed."""
        self._again_ms = AGAIN_MS
        self._due.set()

    async def close(self) -> None:
        """Give all queues up: progress is stored and locks are given back."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for queue in list(self._ours):
            self._let_go(queue)
        await asyncio.gather(*self._leaving.values(), return_exceptions=True)
        if self._locks is not None and (left := self._locks.held()):  # locked, and not taken yet
            await self._locks.unlock(left)

    async def give_up(self, queue: MessageQueue) -> None:
        """Drop a queue and take it anew at its stored offset, if it is still ours then."""
        if queue in self._ours:
            self._let_go(queue)
        leaving = self._leaving.get(queue)
        if leaving is not None:
            await asyncio.shield(leaving)
        self.wake()

    async def rebalance(self) -> bool:
        """Share out now; False if something could not be settled."""
        async with self._one_at_a_time:
            topics = set(self._holder.topics())
            settled = True
            for topic in sorted(topics):
                settled &= await self._share_topic(topic)
            for queue in [queue for queue in self._ours if queue.topic not in topics]:
                self._let_go(queue)
            for topic in self.shares.keys() - topics:
                del self.shares[topic]
            return settled

    def owners(self, share: Share) -> list[tuple[str, int]]:
        """Which members have queues of a topic, and how many, by our strategy."""
        owners = []
        for client in share.clients:
            try:
                count = len(self._strategy(self._group, client, share.queues, share.clients))
            except Exception:  # the application's own strategy
                log.debug("%s: the strategy fails for %s", self._group, client, exc_info=True)
                continue
            if count:
                owners.append((client, count))
        return owners

    async def _run(self) -> None:
        clock = self._session.clock
        while True:
            self._due.clear()
            begun_ms = clock.monotonic_ms()
            if await self.rebalance():
                wait_ms, self._again_ms = self._rebalance_ms, AGAIN_MS
            else:
                wait_ms = min(self._again_ms, self._rebalance_ms)
                self._again_ms = min(2 * self._again_ms, AGAIN_MS_MAX)
            alarm = clock.wake_at(clock.now_ms() + wait_ms, self._due.set)
            try:
                await self._due.wait()
            finally:
                alarm.cancel()
            await pause(clock, max(begun_ms + GAP_MS - clock.monotonic_ms(), 0))

    # --- one topic

    async def _share_topic(self, topic: str) -> bool:
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
                wanted = self._choose(queues, clients)
        except PenstockError as error:
            known = self.shares.get(topic)
            if known is None or known.problem != str(error):
                # A broker makes the retry topic when it hears of the group: that takes a moment.
                level = logging.INFO if topic.startswith(RETRY_TOPIC_PREFIX) else logging.WARNING
                log.log(
                    level, "%s: the queues of %s stay as they are: %s", self._group, topic, error
                )
            self._note(topic, queues, clients, str(error))
            return False
        return await self._settle(topic, queues, clients, wanted)

    def _choose(self, queues: tuple[MessageQueue, ...], clients: list[str]) -> list[MessageQueue]:
        if not queues:
            return []
        try:
            given = self._strategy(self._group, self._session.client_id, queues, clients)
            wanted = set(given)
        except Exception as error:  # the application's own strategy, mostly
            log.exception("%s: the strategy failed", self._group)
            raise Refused(f"the strategy failed: {error!r}") from error
        strange = sorted(map(repr, wanted.difference(queues)))
        if strange:
            raise Refused(f"the strategy names queues that are not there: {', '.join(strange[:3])}")
        return [queue for queue in queues if queue in wanted]

    async def _settle(
        self,
        topic: str,
        queues: tuple[MessageQueue, ...],
        clients: list[str],
        wanted: list[MessageQueue],
    ) -> bool:
        before = {queue for queue in self._ours if queue.topic == topic}
        for queue in before.difference(wanted):
            self._let_go(queue)
        waiting = [queue for queue in wanted if queue in self._leaving]
        new = [queue for queue in wanted if queue not in self._ours and queue not in self._leaving]
        problem = "queues are still being given up" if waiting else None
        if new and self._locks is not None:
            locked = await self._locks.lock(new)
            if len(locked) < len(new):
                problem = f"{len(new) - len(locked)} queues are still locked by another member"
                new = [queue for queue in new if queue in locked]
        elif new and len(clients) > 1:
            await pause(self._session.clock, HANDOVER_MS)
        failures = await asyncio.gather(*(self._take(queue) for queue in new))
        problem = next((failure for failure in failures if failure), problem)
        after = {queue for queue in self._ours if queue.topic == topic}
        self._note(topic, queues, clients, problem)
        if after != before:
            log.info(
                "%s: %d of %d queues of %s are ours, among %d members: %s",
                self._group,
                len(after),
                len(queues),
                topic,
                max(len(clients), 1),
                _text(after),
            )
            self._holder.shared(self.shares[topic])
        return problem is None

    def _note(
        self, topic: str, queues: tuple[MessageQueue, ...], clients: list[str], problem: str | None
    ) -> None:
        ours = frozenset(queue for queue in self._ours if queue.topic == topic)
        self.shares[topic] = Share(topic, queues, tuple(clients), ours, problem)

    async def _take(self, queue: MessageQueue) -> str | None:
        """Begin with a queue; what went wrong, or None."""
        self._offsets.forget(queue)
        try:
            offset = await first_offset(self._session, self._offsets, queue, self._start_at)
        except PenstockError as error:
            log.warning("%s: where to begin in %s is not known yet: %s", self._group, queue, error)
            if self._locks is not None:
                await self._locks.unlock([queue])
            return f"where to begin is not known: {error}"
        if queue.topic not in self._holder.topics():  # any more
            if self._locks is not None:
                await self._locks.unlock([queue])
            return None
        self._ours[queue] = offset
        self._holder.take(queue, offset)
        return None

    def _lock_lost(self, queue: MessageQueue) -> None:
        """Begin anew, at what the other member has stored: our progress must not undo his."""
        if queue in self._ours:
            self._offsets.forget(queue)
            self._let_go(queue, store=False)
            self.wake()

    def _let_go(self, queue: MessageQueue, *, store: bool = True) -> None:
        self._ours.pop(queue, None)
        self._leaving[queue] = self._session.spawn(self._leave(queue, store=store))

    async def _leave(self, queue: MessageQueue, *, store: bool) -> None:
        try:
            await self._holder.drop(queue)
            if store:
                await self._offsets.persist([queue])
            self._offsets.forget(queue)
            if self._locks is not None:
                await self._locks.unlock([queue])
        finally:
            del self._leaving[queue]

    # --- members

    async def _members(self, route: Route) -> list[str]:
        """The client ids of the group, by the first broker of the topic that tells them.

        All members ask the brokers in the same order, so that they hear the same. A broker that
        does not know us (it has just begun, our heartbeat is late) hears from us and is asked
        again.
        """
        failure: PenstockError = NoRoute(f"no broker of {route.topic!r} is known")
        for broker_name in route.brokers:
            try:
                await self._session.ensure_heartbeat(broker_name)
                clients = await self._ask_members(broker_name)
                if self._session.client_id not in clients:
                    await self._session.send_heartbeats()
                    clients = await self._ask_members(broker_name)
            except PenstockError as error:
                failure = error
                continue
            if clients:
                self._warn_of_twins(clients)
                return sorted_clients(clients)
            failure = Refused(f"{broker_name} knows no member of {self._group}, not even us")
        raise failure

    def _warn_of_twins(self, clients: list[str]) -> None:
        twins = sorted(client for client, count in Counter(clients).items() if count > 1)
        if twins and twins != self._twins:
            log.warning(
                "%s: several members are called %s, so some queues are read twice or by nobody:"
                " give each its own instance_name",
                self._group,
                ", ".join(twins),
            )
        self._twins = twins

    async def _ask_members(self, broker_name: str) -> list[str]:
        peer = self._session.broker(broker_name)
        fields = {"consumerGroup": self._group, "bname": broker_name}
        try:
            answer = await self._session.call(
                peer, RequestCode.GET_CONSUMER_LIST_BY_GROUP, fields, timeout_ms=CALL_MS
            )
        except Refused as error:
            if error.answer_code != ResponseCode.SYSTEM_ERROR:
                raise
            return []  # nobody there: how RocketMQ says it
        return fastjson.decode(answer.body, GetConsumerListByGroupResponseBody).consumer_id_list


def check_start_at(start_at: StartAt) -> StartAt:
    """Raises BadSetting where this is no place to begin."""
    if start_at not in ("last", "first") and not isinstance(start_at, datetime):
        raise BadSetting(f"start_at is {start_at!r}", hint='give "last", "first" or a datetime')
    return start_at


async def first_offset(
    session: Session, offsets: Offsets, queue: MessageQueue, start_at: StartAt
) -> int:
    """Where to begin in a queue that is new to us; raises PenstockError.

    Stored progress decides. A group without any begins as it asked for ("last" as in RocketMQ: on
    a topic that still has its first message, that is where it begins); failed messages that come
    again are never skipped.
    """
    retry = queue.topic.startswith(RETRY_TOPIC_PREFIX)
    stored = await offsets.read(queue, exact=isinstance(start_at, datetime) and not retry)
    if stored is not None:
        return stored
    if retry or start_at == "first":
        return await ask_offset(session, queue, RequestCode.GET_MIN_OFFSET)
    if start_at == "last":
        return await ask_offset(session, queue, RequestCode.GET_MAX_OFFSET)
    assert isinstance(start_at, datetime)
    return await ask_offset(
        session,
        queue,
        RequestCode.SEARCH_OFFSET_BY_TIMESTAMP,
        timestamp=str(int(start_at.timestamp() * 1000)),
    )


async def ask_offset(session: Session, queue: MessageQueue, code: int, **fields: str) -> int:
    """The smallest, the next or a found offset of a queue, by its broker."""
    peer = await broker_of(session, queue)
    ext = {
        "topic": queue.topic,
        "queueId": str(queue.queue_id),
        "bname": queue.broker_name,
        **fields,
    }
    return offset_in((await session.call(peer, code, ext, timeout_ms=CALL_MS)).ext)


def _text(queues: Iterable[MessageQueue]) -> str:
    """Queues for a log line: `broker-a 0 1 2, broker-b 3`."""
    brokers: dict[str, list[str]] = {}
    for queue in sorted(queues):
        brokers.setdefault(queue.broker_name, []).append(str(queue.queue_id))
    return ", ".join(f"{name} {' '.join(numbers)}" for name, numbers in brokers.items()) or "none"
