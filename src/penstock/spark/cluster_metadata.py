"""What a cluster has: topics, queues and their ends. Asked by the driver while it plans.

One `Cluster` lives as long as a plan is made, or as long as a stream runs. A broker that is away is
no broker without messages: who asks for a whole picture waits for it (`patiently`), and who can go
on without it is told which queues are unknown.
"""

import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from penstock.client.admin.admin_topics import kind_of
from penstock.client.admin.admin_values import BrokerAddress, TopicKind
from penstock.client.admin.async_admin import AsyncAdmin
from penstock.client.consumer.offset_store import broker_of, offset_in
from penstock.client.lifetime import Lifetime
from penstock.client.sync.loop_thread import Face, blocking
from penstock.errors import (
    GroupNotExist,
    NoNameServer,
    NoQueue,
    NoRoute,
    PenstockError,
    ReadGaveUp,
)
from penstock.spark.backoff import hopeless, insist, passing
from penstock.spark.connection_options import Connection
from penstock.spark.message_schema import CONTROL_TOPIC
from penstock.spark.source.queue_offsets import Marks, listed
from penstock.spark.source.source_options import Topics
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import TopicConfigAndQueueMapping
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.codes import (
    DLQ_TOPIC_PREFIX,
    MASTER_ID,
    RETRY_TOPIC_PREFIX,
    RequestCode,
    ResponseCode,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

_NOTHING: Final = "-1"
"""Apache's offset of a queue that it has not made yet, and of a search that finds nothing."""


@dataclass(frozen=True, slots=True)
class Ends:
    """An end of each queue, as far as its broker could be asked."""

    found: dict[MessageQueue, int] = field(default_factory=dict)
    away: dict[MessageQueue, PenstockError] = field(default_factory=dict)
    """Queues of brokers that do not answer."""
    by_replica: frozenset[MessageQueue] = frozenset()
    """Queues whose master is away: their replica may be behind."""


class AsyncCluster(Lifetime):
    """Questions about topics, queues and groups; topics are named without the namespace."""

    def __init__(self, connection: Connection, *, patience_ms: int) -> None:
        self._admin = AsyncAdmin(connection.nameservers, **connection.keywords())
        self._session = self._admin.session
        self._patience_ms = patience_ms

    async def start(self) -> None:
        await self._admin.start()

    async def close(self) -> None:
        await self._admin.close()

    # --- topics and queues

    async def queues(self, topics: Topics) -> set[MessageQueue]:
        """The queues to read; topics that are not there have none. Raises where nobody answers."""
        if topics.assigned is not None:
            return assigned_queues(topics)
        names = topics.names if topics.pattern is None else await self._matching(topics.pattern)
        found = await self._admin.for_each(names, self._readable)
        return {queue for queues in found for queue in queues}

    async def all_queues(self, topics: Topics) -> set[MessageQueue]:
        """The same; waits for a NameServer, and for a broker that it knows. Raises ReadGaveUp."""
        await self.patiently(self._some_broker)
        return await self.patiently(lambda: self.queues(topics))

    async def settled_queues(self, topics: Topics) -> set[MessageQueue]:
        """The same for the beginning of a query, when all topics have to be there.

        Raises NoRoute, NoQueue; ReadGaveUp where there is no broker for too long.
        """
        found = await self.all_queues(topics)
        if topics.assigned is not None:
            await self.patiently(lambda: self._check_assigned(found))
            return found
        for name in topics.names:
            if not any(queue.topic == name for queue in found):
                full = self._session.with_namespace(name)
                if await self._session.find_route(full) is None:
                    raise await self._session.nameservers.no_route(full)
                raise NoQueue(f"the topic {name} has no queue that can be read")
        return found

    async def _some_broker(self) -> None:
        if not await self._admin.brokers():
            raise NoRoute(
                f"the NameServers {self._session.nameservers.text()} know no broker",
                hint="start one (`penstock up`), or check which NameServers the brokers know",
            )

    async def _check_assigned(self, wanted: set[MessageQueue]) -> None:
        """Whether the brokers of these queues are there; raises NoRoute, and NoQueue for a queue
        that a broker does not have."""
        names = sorted({queue.topic for queue in wanted})
        there = {
            queue
            for queues in await self._admin.for_each(names, self._readable)
            for queue in queues
        }
        having = {(queue.topic, queue.broker_name) for queue in there}
        missing = wanted - there
        if not missing:
            return
        text = f"assign names queues that are not there: {listed(missing)}"
        if all((queue.topic, queue.broker_name) in having for queue in missing):
            raise _Final(NoQueue(text, hint=f"there are {listed(there) or 'none'}"))
        raise NoRoute(text, hint=f"there are {listed(there) or 'none'}")

    async def _readable(self, topic: str) -> list[MessageQueue]:
        route = await self._session.find_route(self._session.with_namespace(topic))
        if route is None:
            return []
        return [MessageQueue(topic, q.broker_name, q.queue_id) for q in route.read_queues]

    async def _matching(self, pattern: str) -> list[str]:
        """Topics by pattern; those of groups only if the pattern begins as their names do."""
        brokers = await self._admin.brokers()
        own = {name for broker in brokers for name in (broker.cluster, broker.name)}
        kinds = {TopicKind.NORMAL}
        for kind, prefix in (
            (TopicKind.RETRY, RETRY_TOPIC_PREFIX),
            (TopicKind.DLQ, DLQ_TOPIC_PREFIX),
        ):
            if pattern.startswith(prefix):
                kinds.add(kind)
        matches = re.compile(pattern).fullmatch
        names = [name for name in await self._admin.topic_names() if name != CONTROL_TOPIC]
        return [name for name in names if matches(name) and kind_of(name, own) in kinds]

    # --- offsets

    async def begins(self, queues: Iterable[MessageQueue]) -> Ends:
        """The offset of the first message of each queue."""
        return await self._ask(queues, RequestCode.GET_MIN_OFFSET)

    async def ends(self, queues: Iterable[MessageQueue]) -> Ends:
        """The offset that the next message of each queue will get."""
        return await self._ask(queues, RequestCode.GET_MAX_OFFSET)

    async def at(self, queues: Iterable[MessageQueue], ms: int) -> Ends:
        """The offset of the first message that was stored then or later; else the queue's end."""
        return await self._ask(queues, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, timestamp=str(ms))

    async def all_begins(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        """As `begins`, of all of them: waits for brokers that are away. Raises ReadGaveUp."""
        return await self._whole(queues, self.begins)

    async def all_ends(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        """As `ends`, of all of them: waits for brokers that are away. Raises ReadGaveUp."""
        return await self._whole(queues, self.ends)

    async def all_at(self, queues: Iterable[MessageQueue], ms: int) -> dict[MessageQueue, int]:
        """As `at`, of all of them: waits for brokers that are away. Raises ReadGaveUp."""
        return await self._whole(queues, lambda some: self.at(some, ms))

    async def _ask(self, queues: Iterable[MessageQueue], code: int, **fields: str) -> Ends:
        wanted = sorted(queues)

        async def one(queue: MessageQueue) -> int | PenstockError:
            try:
                return await self._offset(self._admin.full_queue(queue), code, fields)
            except PenstockError as error:
                if error.retry:
                    return error
                if (passed := passing(error)).retry:
                    return passed
                raise

        answers = await self._admin.for_each(wanted, one)
        ends = Ends(by_replica=frozenset(q for q in wanted if not self._has_master(q.broker_name)))
        for queue, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, int):
                ends.found[queue] = answer
            else:
                ends.away[queue] = answer
        return ends

    async def _offset(self, queue: MessageQueue, code: int, fields: dict[str, str]) -> int:
        fields = {
            "topic": queue.topic,
            "queueId": str(queue.queue_id),
            "bname": queue.broker_name,
            **fields,
        }
        peer = await broker_of(self._session, queue)
        ext = (await self._session.call(peer, code, fields)).ext
        return 0 if ext.get("offset") == _NOTHING else offset_in(ext)

    def _has_master(self, broker: str) -> bool:
        return MASTER_ID in self._session.brokers.get(broker, {})

    async def _whole(
        self,
        queues: Iterable[MessageQueue],
        ask: Callable[[Iterable[MessageQueue]], Coroutine[object, object, Ends]],
    ) -> dict[MessageQueue, int]:
        found: dict[MessageQueue, int] = {}
        wanted = set(queues)

        async def rest() -> None:
            ends = await ask(wanted - found.keys())
            found.update(ends.found)
            for queue, error in ends.away.items():
                await self._session.find_route(self._session.with_namespace(queue.topic))
                raise error

        await self.patiently(rest)
        return found

    async def gone(self, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Those of the queues whose brokers are there and say that they have no such topic, or no
        such queue to read. Nobody knows while a broker is away, or too old to tell."""
        wanted = set(queues)
        try:
            masters = {b.name: b for b in await self._admin.brokers() if b.is_master}
        except NoNameServer:
            return set()
        places = sorted({(q.topic, q.broker_name) for q in wanted if q.broker_name in masters})

        async def count(place: tuple[str, str]) -> int | None:
            try:
                return await self._count_queues(place[0], masters[place[1]])
            except PenstockError as error:
                log.warning("whether %s still has %s is unknown: %s", place[1], place[0], error)
                return None

        counts = dict(zip(places, await self._admin.for_each(places, count), strict=True))
        gone = set()
        for queue in wanted:
            queue_count = counts.get((queue.topic, queue.broker_name))
            if queue_count is not None and queue.queue_id >= queue_count:
                gone.add(queue)
        return gone

    async def _count_queues(self, topic: str, broker: BrokerAddress) -> int:
        """How many queues of a topic can be read at a broker; 0 where it has no such topic."""
        answer = await self._admin.ask(
            broker.address,
            RequestCode.GET_TOPIC_CONFIG,
            {"topic": self._session.with_namespace(topic)},
            good=(ResponseCode.SUCCESS, ResponseCode.TOPIC_NOT_EXIST),
        )
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            return 0
        return fastjson.decode(answer.body, TopicConfigAndQueueMapping).read_queue_nums

    # --- groups

    async def commit(self, group: str, marks: Marks) -> dict[MessageQueue, int]:
        """Store a group's progress; gives what is stored. Failures are logged: nothing is lost by
        them, since Spark keeps the offsets that count."""
        name = self._session.with_namespace(group)

        async def one(queue: MessageQueue) -> PenstockError | None:
            try:
                await self._store(name, self._admin.full_queue(queue), marks[queue])
            except PenstockError as error:
                return error
            return None

        queues = sorted(marks)
        failures = await self._admin.for_each(queues, one)
        if any(isinstance(failure, GroupNotExist) for failure in failures):
            try:
                await self._admin.create_group(group)
                failures = await self._admin.for_each(queues, one)
            except PenstockError as error:
                log.warning("the group %s can't be made: %s", group, error)
        failed = {queue: f for queue, f in zip(queues, failures, strict=True) if f is not None}
        for queue, failure in list(failed.items())[:1]:
            log.warning(
                "progress of %s is not stored for %d queues, such as %s: %s",
                group,
                len(failed),
                listed([queue]),
                failure,
            )
        return {queue: marks[queue] for queue in queues if queue not in failed}

    async def _store(self, group: str, queue: MessageQueue, offset: int) -> None:
        fields = {
            "consumerGroup": group,
            "topic": queue.topic,
            "queueId": str(queue.queue_id),
            "commitOffset": str(offset),
            "bname": queue.broker_name,
        }
        peer = await broker_of(self._session, queue)
        await self._session.call(peer, RequestCode.UPDATE_CONSUMER_OFFSET, fields)

    # --- patience

    async def patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """What `work` comes to; as long as it fails because servers are away it is tried again.

        Raises ReadGaveUp, and TlsError for a server that is not trusted.
        """
        is_told = False

        async def attempt() -> T:
            nonlocal is_told
            try:
                return await work()
            except PenstockError as error:
                if error.retry and hopeless(error) is None and not is_told:
                    is_told = True
                    log.warning("waiting up to %g s: %s", self._patience_ms / 1000, error)
                raise

        try:
            return await insist(self._session.clock, self._patience_ms, attempt)
        except _Final as error:
            raise error.reason from None
        except PenstockError as error:
            if not error.retry:
                raise
            raise ReadGaveUp(
                f"{error.message} (waited {self._patience_ms / 1000:g} s)",
                hint=f"{error.hint}; readTimeout says how long to wait",
            ) from error


class _Final(PenstockError):  # noqa: N818
    """What waiting does not mend, whatever its class says."""

    def __init__(self, reason: PenstockError) -> None:
        super().__init__(reason.message)
        self.reason = reason


def assigned_queues(topics: Topics) -> set[MessageQueue]:
    """The queues of the option assign."""
    return {
        MessageQueue(topic, broker, number)
        for topic, brokers in (topics.assigned or {}).items()
        for broker, numbers in brokers.items()
        for number in numbers
    }


class Cluster(Face[AsyncCluster]):
    """`AsyncCluster` for Spark's code, which blocks."""

    def __init__(self, connection: Connection, *, patience_ms: int) -> None:
        super().__init__(lambda: AsyncCluster(connection, patience_ms=patience_ms))

    queues = blocking(AsyncCluster.queues)
    all_queues = blocking(AsyncCluster.all_queues)
    settled_queues = blocking(AsyncCluster.settled_queues)
    begins = blocking(AsyncCluster.begins)
    ends = blocking(AsyncCluster.ends)
    all_begins = blocking(AsyncCluster.all_begins)
    all_ends = blocking(AsyncCluster.all_ends)
    all_at = blocking(AsyncCluster.all_at)
    gone = blocking(AsyncCluster.gone)
    commit = blocking(AsyncCluster.commit)
