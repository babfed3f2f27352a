"""Topics, queues and offsets of a cluster, from which a read is planned.

A `ClusterMetadata` lives while a query is planned, or as long as a stream runs. An unavailable
broker is not a broker without messages: methods named `all_…` wait for it (`with_retries`), the
others report its queues as unavailable.
"""

import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from penstock.arrow.backoff import as_temporary, permanent_cause, retry
from penstock.arrow.batch_plan import boundary_offsets, checked_start, existing_ranges
from penstock.arrow.connection_options import ConnectionOptions
from penstock.arrow.message_schema import CONTROL_TOPIC
from penstock.arrow.offset_ranges import QueueRange
from penstock.arrow.queue_offsets import OffsetSpec, QueueOffsets, format_queues
from penstock.arrow.source_options import SourceOptions, TopicSelection
from penstock.client.admin.admin_topics import kind_of
from penstock.client.admin.admin_values import BrokerAddress, TopicKind
from penstock.client.admin.async_admin import AsyncAdmin
from penstock.client.client_session import Session
from penstock.client.consumer.offset_store import offset_of_response, peer_of_queue
from penstock.client.lifetime import Lifetime
from penstock.client.sync.sync_client import SyncClient, blocking
from penstock.errors import (
    GroupNotExist,
    NoNameServer,
    NoQueue,
    NoRoute,
    PenstockError,
    ReadGaveUp,
)
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

FIRST_CONTACT_MS: Final = 5_000
"""How long to wait for a NameServer that has never answered. With the last attempt it is at most
10 s."""
_NO_OFFSET: Final = "-1"
"""Apache's answer for a queue that it has not created yet, and for a search without a result."""


@dataclass(frozen=True, slots=True)
class QueriedOffsets:
    """One offset of each queue, and the queues whose brokers could not be asked."""

    offsets: dict[MessageQueue, int] = field(default_factory=dict)
    unavailable: dict[MessageQueue, PenstockError] = field(default_factory=dict)
    """Queues of brokers that do not answer, with the error."""
    from_replica: frozenset[MessageQueue] = frozenset()
    """Queues whose master is unavailable: the replica that answered may be behind."""


class AsyncClusterMetadata(Lifetime):
    """Queries topics, queues and groups; topics are named without the namespace."""

    def __init__(self, connection: ConnectionOptions, *, timeout_ms: int) -> None:
        self._admin = AsyncAdmin(connection.nameservers, **connection.client_keywords())
        self._session = self._admin.session
        self._timeout_ms = timeout_ms

    async def start(self) -> None:
        await self._admin.start()

    async def close(self) -> None:
        await self._admin.close()

    @property
    def session(self) -> Session:
        """The session of all queries."""
        return self._session

    # --- topics and queues

    async def queues(self, topics: TopicSelection) -> set[MessageQueue]:
        """The queues to read; a topic that does not exist has none. Raises if no server answers."""
        if topics.assigned is not None:
            return assigned_queues(topics)
        names = topics.names if topics.pattern is None else await self._matching(topics.pattern)
        found = await self._admin.for_each(names, self._readable)
        return {queue for queues in found for queue in queues}

    async def all_queues(self, topics: TopicSelection) -> set[MessageQueue]:
        """As `queues`; waits for a NameServer and a registered broker. Raises ReadGaveUp."""
        await self.with_retries(self._check_any_broker)
        return await self.with_retries(lambda: self.queues(topics))

    async def required_queues(self, topics: TopicSelection) -> set[MessageQueue]:
        """As `all_queues`, for the start of a query, when all topics must exist.

        Raises NoRoute, NoQueue; ReadGaveUp if there is no broker for too long.
        """
        found = await self.all_queues(topics)
        if topics.assigned is not None:
            await self.with_retries(lambda: self._check_assigned(found))
            return found
        for name in topics.names:
            if not any(queue.topic == name for queue in found):
                full = self._session.with_namespace(name)
                if await self._session.find_route(full) is None:
                    raise await self._session.nameservers.no_route(full)
                raise NoQueue(f"the topic {name} has no queue that can be read")
        return found

    async def check_topic(self, topic: str | None) -> None:
        """Return if a broker is registered, and one has the topic. Raises NoRoute, ReadGaveUp."""
        await self.with_retries(self._check_any_broker)
        if topic is not None:
            name = self._session.with_namespace(topic)
            if await self.with_retries(lambda: self._session.find_route(name)) is None:
                raise await self._session.nameservers.no_route(name)

    async def _check_any_broker(self) -> None:
        if not await self._admin.brokers():
            raise NoRoute(
                f"the NameServers {self._session.nameservers.text()} know no broker",
                hint="start one (`penstock up`), or check which NameServers the brokers know",
            )

    async def _check_assigned(self, wanted: set[MessageQueue]) -> None:
        """Raise NoRoute if a broker of these queues is missing, NoQueue if it lacks a queue."""
        names = sorted({queue.topic for queue in wanted})
        existing = {
            queue
            for queues in await self._admin.for_each(names, self._readable)
            for queue in queues
        }
        brokers = {(queue.topic, queue.broker_name) for queue in existing}
        missing = wanted - existing
        if not missing:
            return
        text = f"assign names queues that do not exist: {format_queues(missing)}"
        hint = f"existing queues: {format_queues(existing) or 'none'}"
        if all((queue.topic, queue.broker_name) in brokers for queue in missing):
            raise _Permanent(NoQueue(text, hint=hint))
        raise NoRoute(text, hint=hint)

    async def _readable(self, topic: str) -> list[MessageQueue]:
        route = await self._session.find_route(self._session.with_namespace(topic))
        if route is None:
            return []
        return [MessageQueue(topic, q.broker_name, q.queue_id) for q in route.read_queues]

    async def _matching(self, pattern: str) -> list[str]:
        """Topics that match a pattern; retry and dead-letter topics only if the pattern starts
        with their prefix."""
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

    async def min_offsets(self, queues: Iterable[MessageQueue]) -> QueriedOffsets:
        """The offset of the first message in each queue."""
        return await self._ask(queues, RequestCode.GET_MIN_OFFSET)

    async def max_offsets(self, queues: Iterable[MessageQueue]) -> QueriedOffsets:
        """The offset that the next message of each queue will get."""
        return await self._ask(queues, RequestCode.GET_MAX_OFFSET)

    async def offsets_at(self, queues: Iterable[MessageQueue], ms: int) -> QueriedOffsets:
        """The offset of the first message stored at `ms` or later, or else the queue's end."""
        return await self._ask(queues, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, timestamp=str(ms))

    async def all_min_offsets(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        """As `min_offsets`, but waits for unavailable brokers. Raises ReadGaveUp."""
        return await self._complete(queues, self.min_offsets)

    async def all_max_offsets(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
        """As `max_offsets`, but waits for unavailable brokers. Raises ReadGaveUp."""
        return await self._complete(queues, self.max_offsets)

    async def all_offsets_at(
        self, queues: Iterable[MessageQueue], ms: int
    ) -> dict[MessageQueue, int]:
        """As `offsets_at`, but waits for unavailable brokers. Raises ReadGaveUp."""
        return await self._complete(queues, lambda some: self.offsets_at(some, ms))

    async def batch_ranges(self, options: SourceOptions) -> list[QueueRange]:
        """The messages that a batch reads, fixed now.

        Raises as `required_queues`, BadSetting for impossible offsets, and DataLost.
        """
        queues = await self.required_queues(options.topics)
        begins, ends = await self.all_min_offsets(queues), await self.all_max_offsets(queues)

        async def boundary(wanted: OffsetSpec, option: str) -> dict[MessageQueue, int]:
            at = await self.all_offsets_at(ends, wanted) if isinstance(wanted, int) else {}
            return boundary_offsets(wanted, option, begins, ends, at)

        start = await boundary(options.starting, "startingOffsets")
        end = await boundary(options.ending, "endingOffsets")
        return existing_ranges(options, checked_start(options, start, end), end, begins, ends)

    async def _ask(
        self, queues: Iterable[MessageQueue], code: int, **fields: str
    ) -> QueriedOffsets:
        wanted = sorted(queues)

        async def one(queue: MessageQueue) -> int | PenstockError:
            try:
                return await self._offset(self._admin.full_queue(queue), code, fields)
            except PenstockError as error:
                if error.retry:
                    return error
                if (temporary := as_temporary(error)).retry:
                    return temporary
                raise

        answers = await self._admin.for_each(wanted, one)
        result = QueriedOffsets(
            from_replica=frozenset(q for q in wanted if not self._has_master(q.broker_name))
        )
        for queue, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, int):
                result.offsets[queue] = answer
            else:
                result.unavailable[queue] = answer
        return result

    async def _offset(self, queue: MessageQueue, code: int, fields: dict[str, str]) -> int:
        fields = {
            "topic": queue.topic,
            "queueId": str(queue.queue_id),
            "bname": queue.broker_name,
            **fields,
        }
        peer = await peer_of_queue(self._session, queue)
        ext = (await self._session.call(peer, code, fields)).ext
        return 0 if ext.get("offset") == _NO_OFFSET else offset_of_response(ext)

    def _has_master(self, broker: str) -> bool:
        return MASTER_ID in self._session.brokers.get(broker, {})

    async def _complete(
        self,
        queues: Iterable[MessageQueue],
        ask: Callable[[Iterable[MessageQueue]], Coroutine[object, object, QueriedOffsets]],
    ) -> dict[MessageQueue, int]:
        found: dict[MessageQueue, int] = {}
        wanted = set(queues)

        async def rest() -> None:
            result = await ask(wanted - found.keys())
            found.update(result.offsets)
            for queue, error in result.unavailable.items():
                await self._session.find_route(self._session.with_namespace(queue.topic))
                raise error

        await self.with_retries(rest)
        return found

    async def deleted_queues(self, queues: Iterable[MessageQueue]) -> set[MessageQueue]:
        """Those of the queues whose brokers answer that the topic or the queue does not exist.

        Queues of brokers that are unavailable, or too old to tell, are not among them.
        """
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
                log.warning(
                    "could not check whether broker %s still has topic %s: %s",
                    place[1],
                    place[0],
                    error,
                )
                return None

        counts = dict(zip(places, await self._admin.for_each(places, count), strict=True))
        deleted = set()
        for queue in wanted:
            queue_count = counts.get((queue.topic, queue.broker_name))
            if queue_count is not None and queue.queue_id >= queue_count:
                deleted.add(queue)
        return deleted

    async def _count_queues(self, topic: str, broker: BrokerAddress) -> int:
        """The number of queues of a topic that can be read on a broker; 0 if it lacks the topic."""
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

    async def commit_offsets(self, group: str, offsets: QueueOffsets) -> dict[MessageQueue, int]:
        """Commit offsets of a group; returns those that were committed.

        Failures are only logged: Spark's checkpoint has the offsets that matter.
        """
        name = self._session.with_namespace(group)

        async def one(queue: MessageQueue) -> PenstockError | None:
            try:
                await self._commit_offset(name, self._admin.full_queue(queue), offsets[queue])
            except PenstockError as error:
                return error
            return None

        queues = sorted(offsets)
        failures = await self._admin.for_each(queues, one)
        if any(isinstance(failure, GroupNotExist) for failure in failures):
            try:
                await self._admin.create_group(group)
                failures = await self._admin.for_each(queues, one)
            except PenstockError as error:
                log.warning("could not create the group %s: %s", group, error)
        failed = {queue: f for queue, f in zip(queues, failures, strict=True) if f is not None}
        for queue, failure in list(failed.items())[:1]:
            log.warning(
                "could not commit offsets of the group %s for %d queues, such as %s: %s",
                group,
                len(failed),
                format_queues([queue]),
                failure,
            )
        return {queue: offsets[queue] for queue in queues if queue not in failed}

    async def _commit_offset(self, group: str, queue: MessageQueue, offset: int) -> None:
        fields = {
            "consumerGroup": group,
            "topic": queue.topic,
            "queueId": str(queue.queue_id),
            "commitOffset": str(offset),
            "bname": queue.broker_name,
        }
        peer = await peer_of_queue(self._session, queue)
        await self._session.call(peer, RequestCode.UPDATE_CONSUMER_OFFSET, fields)

    # --- retries

    async def with_retries(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`, which is retried while servers are unavailable.

        Raises ReadGaveUp, TlsError for a server that is not trusted, and NoNameServer if none
        has ever answered: then the address is probably wrong, and waiting longer does not help.
        """
        is_logged = False
        clock = self._session.clock
        began_ms = clock.monotonic_ms()

        async def attempt() -> T:
            nonlocal is_logged
            try:
                return await work()
            except PenstockError as error:
                if (
                    isinstance(error, NoNameServer)
                    and not self._session.nameservers.reached
                    and clock.monotonic_ms() - began_ms >= FIRST_CONTACT_MS
                ):
                    raise _Permanent(error) from None
                if error.retry and permanent_cause(error) is None and not is_logged:
                    is_logged = True
                    log.warning("waiting up to %g s: %s", self._timeout_ms / 1000, error)
                raise

        try:
            return await retry(clock, self._timeout_ms, attempt)
        except _Permanent as error:
            raise error.reason from None
        except PenstockError as error:
            if not error.retry:
                raise
            raise ReadGaveUp(
                f"{error.message} (waited {self._timeout_ms / 1000:g} s)",
                hint=f"{error.hint}; readTimeout sets how long to wait",
            ) from error


class _Permanent(PenstockError):  # noqa: N818
    """Wraps an error that is not retried, although its class has `retry`."""

    def __init__(self, reason: PenstockError) -> None:
        super().__init__(reason.message)
        self.reason = reason


def assigned_queues(topics: TopicSelection) -> set[MessageQueue]:
    """The queues of the option assign."""
    return {
        MessageQueue(topic, broker, number)
        for topic, brokers in (topics.assigned or {}).items()
        for broker, numbers in brokers.items()
        for number in numbers
    }


class ClusterMetadata(SyncClient[AsyncClusterMetadata]):
    """`AsyncClusterMetadata` for Spark's callbacks, which are synchronous."""

    def __init__(self, connection: ConnectionOptions, *, timeout_ms: int) -> None:
        super().__init__(lambda: AsyncClusterMetadata(connection, timeout_ms=timeout_ms))

    queues = blocking(AsyncClusterMetadata.queues)
    all_queues = blocking(AsyncClusterMetadata.all_queues)
    required_queues = blocking(AsyncClusterMetadata.required_queues)
    check_topic = blocking(AsyncClusterMetadata.check_topic)
    min_offsets = blocking(AsyncClusterMetadata.min_offsets)
    max_offsets = blocking(AsyncClusterMetadata.max_offsets)
    all_min_offsets = blocking(AsyncClusterMetadata.all_min_offsets)
    all_max_offsets = blocking(AsyncClusterMetadata.all_max_offsets)
    all_offsets_at = blocking(AsyncClusterMetadata.all_offsets_at)
    batch_ranges = blocking(AsyncClusterMetadata.batch_ranges)
    deleted_queues = blocking(AsyncClusterMetadata.deleted_queues)
    commit_offsets = blocking(AsyncClusterMetadata.commit_offsets)
