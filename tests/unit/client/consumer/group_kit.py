"""A fake cluster for consumers: offsets and locks, without sockets and real time."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from typing import Any, cast

from penstock.client.client_options import ClientOptions
from penstock.client.client_session import Session
from penstock.client.consumer.rebalance import Allocation
from penstock.client.messages import MessageQueue
from penstock.client.topic_routes import Route
from penstock.errors import NoRoute, PeerUnreachable, refusal
from penstock.testing.virtual_clock import VirtualClock
from penstock.transport.peer import Response
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import ConsumerConnection
from penstock.wire.bodies.client_bodies import (
    BrokerData,
    GetConsumerListByGroupResponseBody,
    LockBatchRequestBody,
    LockBatchResponseBody,
    QueueData,
    TopicRouteData,
)
from penstock.wire.codes import RequestCode, ResponseCode

GROUP = "g"
LOCK_MS = 60_000


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


class FakeCluster:
    """The state of the brokers; `stored` is for one group, and locks expire as a broker's do."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.routes: dict[str, Route] = {}
        self.members: dict[str, list[str]] = {}
        self.stored: dict[MessageQueue, int] = {}
        self.ends: dict[MessageQueue, tuple[int, int]] = {}
        self.locked: dict[MessageQueue, tuple[str, int]] = {}
        self.down: set[str] = set()
        self.log: list[tuple[str, int, dict[str, str]]] = []
        self.bodies: list[bytes] = []
        self.refuse: dict[int, int] = {}
        self.delayed: dict[int, asyncio.Event] = {}
        self.connection = ConsumerConnection()

    def add_topic(self, topic: str, brokers: Mapping[str, int]) -> list[MessageQueue]:
        data = TopicRouteData(
            queue_datas=[
                QueueData(broker_name=b, read_queue_nums=n, write_queue_nums=n, perm=6)
                for b, n in brokers.items()
            ],
            broker_datas=[BrokerData(broker_name=b, broker_addrs={0: f"{b}:1"}) for b in brokers],
        )
        self.routes[topic] = Route.of(topic, data)
        for name in brokers:
            self.members.setdefault(name, [])
        return list(self.routes[topic].read_queues)

    def delay(self, code: int) -> asyncio.Event:
        """Delay the responses to these requests until the event is set."""
        return self.delayed.setdefault(code, asyncio.Event())

    def count(self, code: int) -> int:
        return sum(seen == code for _, seen, _ in self.log)

    def serve(
        self, broker: str, client: str, code: int, ext: dict[str, str], body: bytes
    ) -> Response:
        self.log.append((broker, code, ext))
        self.bodies.append(body)
        if code in self.refuse:
            return Response(self.refuse[code], remark="refused by the test")
        queue = MessageQueue(ext.get("topic", ""), broker, int(ext.get("queueId", 0)))
        low, high = self.ends.get(queue, (0, 0))
        if code == RequestCode.GET_CONSUMER_LIST_BY_GROUP:
            members = self.members[broker]
            if not members:
                return Response(1, remark="nobody")
            listed = GetConsumerListByGroupResponseBody(consumer_id_list=members)
            return Response(body=fastjson.encode(listed))
        if code == RequestCode.QUERY_CONSUMER_OFFSET:
            if queue not in self.stored:
                return Response(ResponseCode.QUERY_NOT_FOUND)
            return Response(ext={"offset": str(self.stored[queue])})
        if code == RequestCode.UPDATE_CONSUMER_OFFSET:
            self.stored[queue] = int(ext["commitOffset"])
        elif code == RequestCode.GET_MIN_OFFSET:
            return Response(ext={"offset": str(low)})
        elif code == RequestCode.GET_MAX_OFFSET:
            return Response(ext={"offset": str(high)})
        elif code == RequestCode.SEARCH_OFFSET_BY_TIMESTAMP:
            return Response(ext={"offset": ext["timestamp"][-3:]})
        elif code in (RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ):
            return self._lock(client, code, fastjson.decode(body, LockBatchRequestBody).mq_set)
        elif code == RequestCode.GET_CONSUMER_CONNECTION_LIST:
            return Response(body=fastjson.encode(self.connection))
        return Response()

    def _lock(self, client: str, code: int, queues: list[MessageQueue]) -> Response:
        now_ms = self.clock.now_ms()
        ours = []
        for queue in queues:
            holder, handling_since_ms = self.locked.get(queue, (client, now_ms))
            if holder != client and now_ms - handling_since_ms <= LOCK_MS:
                continue
            if code == RequestCode.UNLOCK_BATCH_MQ:
                self.locked.pop(queue, None)
            else:
                self.locked[queue] = (client, now_ms)
                ours.append(queue)
        return Response(body=fastjson.encode(LockBatchResponseBody(lock_ok_mq_set=ours)))


class FakePeer:
    """A broker, by its name."""

    def __init__(self, name: str) -> None:
        self.address = name


class FakeNameServers:
    """NameServers that know nothing."""

    addresses = ("ns:9876",)

    async def no_route(self, topic: str) -> NoRoute:
        return NoRoute(f"no broker has the topic {topic!r}")


class FakeSession:
    """As much of a Session as members use."""

    def __init__(self, cluster: FakeCluster, client_id: str = "me") -> None:
        self.cluster = cluster
        self.clock = cluster.clock
        self.client_id = client_id
        self.options = ClientOptions()
        self.nameservers = FakeNameServers()
        self.tasks: set[asyncio.Task[object]] = set()
        self.known: dict[str, Route] = {}

    @property
    def real(self) -> Session:
        return cast(Session, self)

    def spawn(self, work: Awaitable[object]) -> asyncio.Task[object]:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[object]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error

    async def end(self) -> None:
        for task in list(self.tasks):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def without_namespace(self, name: str) -> str:
        return name

    def cached_route(self, topic: str) -> Route | None:
        return self.known.get(topic)

    async def find_route(self, topic: str) -> Route | None:
        route = self.cluster.routes.get(topic)
        if route is not None:
            self.known[topic] = route
        return route

    async def route(self, topic: str) -> Route:
        route = await self.find_route(topic)
        if route is None:
            raise await self.nameservers.no_route(topic)
        return route

    def address_of(self, broker_name: str, broker_id: int = 0) -> str | None:
        return broker_name

    def broker(self, broker_name: str, broker_id: int = 0) -> FakePeer:
        return FakePeer(broker_name)

    def master(self, broker_name: str) -> FakePeer:
        return FakePeer(broker_name)

    async def send_heartbeats(self) -> None:
        for name, members in self.cluster.members.items():
            if self.client_id not in members and name not in self.cluster.down:
                members.append(self.client_id)

    async def ensure_heartbeat(self, broker_name: str, broker_id: int = 0) -> None:
        await self.send_heartbeats()

    async def call(
        self, peer: FakePeer, code: int, ext: Mapping[str, str] | None = None, body: bytes = b"", *,
        timeout_ms: int | None = None, good: Iterable[int] = (0,),
    ) -> Response:  # fmt: skip
        await asyncio.sleep(0)
        if peer.address in self.cluster.down:
            raise PeerUnreachable("down", address=peer.address)
        answer = self.cluster.serve(peer.address, self.client_id, code, dict(ext or {}), body)
        if code in self.cluster.delayed:
            await self.cluster.delayed[code].wait()
        if answer.code not in good:
            raise refusal(answer.code, answer.remark, peer.address)
        return answer


class FakeListener:
    """A rebalance listener that records its queues."""

    def __init__(self, topics: Iterable[str]) -> None:
        self.wanted = list(topics)
        self.queues: dict[MessageQueue, int] = {}
        self.allocations: list[Allocation] = []
        self.on_remove: Callable[[], Awaitable[object]] | None = None

    def topics(self) -> list[str]:
        return self.wanted

    def add_queue(self, queue: MessageQueue, offset: int) -> None:
        assert queue not in self.queues
        self.queues[queue] = offset

    async def remove_queue(self, queue: MessageQueue) -> None:
        del self.queues[queue]
        if self.on_remove is not None:
            await self.on_remove()

    def allocation_changed(self, allocation: Allocation) -> None:
        self.allocations.append(allocation)
