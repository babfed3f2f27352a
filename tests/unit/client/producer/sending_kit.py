"""A session without servers: the test writes the brokers' responses."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

from penstock.client.client_options import ClientOptions
from penstock.client.client_session import Session
from penstock.client.namespace import with_namespace, without_namespace
from penstock.client.producer.producer_options import SendOptions
from penstock.client.producer.sending import Sender
from penstock.client.topic_routes import Route
from penstock.errors import ClientClosed, NoRoute, PeerError, PeerUnreachable
from penstock.testing.virtual_clock import VirtualClock
from penstock.transport.pending_calls import PendingCalls
from penstock.wire.bodies.client_bodies import BrokerData, QueueData, TopicRouteData
from penstock.wire.frame import FRAME_BYTES_MAX, JSON, Request
from penstock.wire.message import decode_properties
from penstock.wire.output import encode, response
from tests.integration.loops import Frame


class Broker:
    """A broker's end and the client's connection to it, in one."""

    def __init__(self, name: str, address: str, sign: Callable[..., Any] | None = None) -> None:
        self.name = name
        self.address = address
        self.signs = sign is not None
        self._sign = sign
        self.unsent = 0
        self.up = True
        self.connects = True
        self.seen: list[Frame] = []
        self._calls = PendingCalls(
            address, FRAME_BYTES_MAX, lambda ms: None, lambda: None, lambda: None
        )  # fmt: skip
        self.connection: Any = self
        self.transport: Any = object()

    @property
    def calls(self) -> PendingCalls | None:
        return self._calls if self.up and self.connects else None

    async def writable(self, timeout_ms: int) -> Any:
        await asyncio.sleep(0)
        if not self.up:
            raise PeerUnreachable("can't connect: refused", address=self.address)
        self.connects = True
        return SimpleNamespace(calls=self._calls, transport=self.transport, write=self.write)

    def write(self, frame: bytes) -> None:
        self._calls.output.append(frame)

    def encode(self, code: int, ext: Any, body: bytes, *, opaque: int, flag: int) -> bytes:
        assert self._sign is not None
        fields = self._sign(code, ext, body)
        return encode(code, fields, body, opaque=opaque, flag=flag, encoding=JSON)

    def requests(self) -> list[Frame]:
        """The requests since the last call."""
        data = self._calls.output.take()
        target = memoryview(bytearray(data or b"\0"))
        found, at = [], 0
        while at < len(data):
            request = Request()
            request.bind(target)
            at += request.read(at, len(data))
            found.append(
                Frame(
                    request.code, request.flag, request.opaque, request.encoding, request.ext(),
                    request.body(), None,
                )
            )  # fmt: skip
        self.seen += found
        return found

    def answer(self, frame: Frame, code: int = 0, **ext: str) -> None:
        """Deliver a response."""
        fields = {"msgId": "AA", "queueId": frame.ext["e"], "queueOffset": "7", **ext}
        data = response(code, frame.opaque, frame.encoding, ext=fields, remark="set by the test")
        self._calls.request.bind(memoryview(bytearray(data)))
        assert self._calls.take_responses(0, len(data), 0) == len(data)

    def fail(self, error: type[PeerError]) -> None:
        """Fail all pending calls."""
        pending, self._calls.pending = self._calls.pending, {}
        for call in pending.values():
            call.failed(error("set by the test", address=self.address))


class FakeCluster:
    """Brokers and their routes, as a session."""

    def __init__(
        self, *names: str, queues: int = 4, sign: Callable[..., Any] | None = None,
        **client: Any,
    ) -> None:  # fmt: skip
        self.clock = VirtualClock()
        self.options = ClientOptions("ns:9876", **client)
        self.client_id = "10.1.2.3@1#1"
        self.brokers = {
            name: Broker(name, f"{name}:10911", sign) for name in names or ("broker-a",)
        }
        self.routes: dict[str, Route] = {}
        self.routes_asked: list[str] = []
        self.nameservers = SimpleNamespace(no_route=self._no_route, text=lambda: "ns:9876")
        self.tasks: set[asyncio.Task[object]] = set()
        self.alive = True
        self.add("Orders", queues)

    def add(self, topic: str, queues: int = 4, perm: int = 6) -> Route:
        name = self.with_namespace(topic)
        data = TopicRouteData(
            broker_datas=[
                BrokerData(cluster="c", broker_name=b.name, broker_addrs={0: b.address})
                for b in self.brokers.values()
            ],
            queue_datas=[
                QueueData(broker_name=b, read_queue_nums=queues, write_queue_nums=queues, perm=perm)
                for b in self.brokers
            ],
        )
        self.routes[name] = Route.of(name, data)
        return self.routes[name]

    def sender(self, **options: Any) -> Sender:
        sender = Sender(cast(Session, self), "group", SendOptions(**options))
        sender.start()
        return sender

    def __getitem__(self, name: str) -> Broker:
        return self.brokers[name]

    async def run_pending(self) -> None:
        """Run the loop until nothing is left to do."""
        await self.clock.elapse(0)

    async def end(self) -> None:
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    # --- methods of a session

    def with_namespace(self, name: str) -> str:
        return with_namespace(self.options.namespace, name)

    def without_namespace(self, name: str) -> str:
        return without_namespace(self.options.namespace, name)

    def check_alive(self) -> None:
        if not self.alive:
            raise ClientClosed("closed")

    def cached_route(self, topic: str) -> Route | None:
        return self.routes.get(topic)

    async def find_route(self, topic: str) -> Route | None:
        self.routes_asked.append(topic)
        await asyncio.sleep(0)
        return self.routes.get(topic)

    async def _no_route(self, topic: str) -> NoRoute:
        return NoRoute(f"no broker has the topic {topic!r}")

    def address_of(self, broker_name: str, broker_id: int = 0) -> str | None:
        broker = self.brokers.get(broker_name)
        return None if broker is None else broker.address

    master_address = address_of

    def peer(self, address: str) -> Broker:
        return next(broker for broker in self.brokers.values() if broker.address == address)

    def master(self, broker_name: str) -> Broker:
        return self.brokers[broker_name]

    def spawn(self, work: Awaitable[object]) -> asyncio.Task[object]:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task


def properties_of(frame: Frame) -> dict[str, str]:
    return decode_properties(frame.ext["i"].encode())
