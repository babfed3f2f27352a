"""Consumers over a whole broker without sockets: the broker's real answers, in virtual time.

`FixtureSession` replaces the session of a client. Its only broker is a `ClientBrokerFixture`.
Requests and responses can be lost (`lose`), and requests are counted.
"""

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from penstock.broker.long_polling import SuspendedRequest
from penstock.client.client_options import ClientOptions
from penstock.client.client_session import SessionMember
from penstock.client.topic_routes import Route
from penstock.config import Settings
from penstock.errors import ClientClosed, NoRoute, PeerTimeout, refusal
from penstock.rpc.answers import Reply, Suspend
from penstock.testing.virtual_clock import VirtualClock
from penstock.transport.peer import Response
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import BrokerData, HeartbeatData, QueueData, TopicRouteData
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.frame import JSON, Request
from penstock.wire.output import encode, response
from tests.unit.broker.broker_kit import BrokerFixture
from tests.unit.broker.pop.pop_kit import advance
from tests.unit.client.consumer.group_kit import FakeNameServers

T = TypeVar("T")

BROKER = "broker-a"
NEVER = 2**40


class ClientBrokerFixture(BrokerFixture):
    """A broker that answers suspended requests when they are woken."""

    def __init__(self, root: Path, settings: Settings | None = None) -> None:
        super().__init__(root, settings)
        self.waiting: dict[int, asyncio.Future[Reply]] = {}
        self.context.long_polling.on_wake(self._answer)

    def _answer(self, suspended: SuspendedRequest, last: bool) -> None:
        answer = self.finish(suspended.suspend.retry(last))
        if isinstance(answer, Suspend):
            self.context.long_polling.add(1, suspended.pending_response, answer)
            return
        assert isinstance(answer, Reply)
        future = self.waiting.pop(suspended.pending_response, None)
        if future is not None and not future.done():
            future.set_result(answer)


class FixturePeer:
    """The connection to the broker."""

    address = BROKER

    def __init__(self, session: "FixtureSession") -> None:
        self._session = session

    async def read(
        self, code: int, ext: Mapping[str, str], *, reader: Callable[[Request], T],
        timeout_ms: int, encoding: int,
    ) -> T:  # fmt: skip
        reply = await self._session.ask(code, ext, b"", timeout_ms)
        data = response(
            reply.code, 1, encoding, ext=reply.ext or {}, body=reply.body, remark=reply.remark
        )
        request = Request()
        request.bind(memoryview(bytearray(data)))
        assert request.read(0, len(data)) == len(data)
        return reader(request)


class FixtureSession:
    """As much of a Session as consumers use."""

    def __init__(self, broker_fixture: ClientBrokerFixture) -> None:
        self.broker_fixture = broker_fixture
        self.clock = VirtualClock(broker_fixture.now_ms)
        self.options = ClientOptions()
        self.client_id = "10.1.2.3@test"
        self.started = False
        self.nameservers = FakeNameServers()
        self.lose: Callable[[int], str | None] = lambda code: None
        """For a request's code: "request" or "answer" is lost, or None."""
        self.refuse: dict[int, int] = {}
        self.counts: Counter[int] = Counter()
        self.beats = 0
        self.members: list[SessionMember] = []
        self.tasks: set[asyncio.Task[object]] = set()
        self.failures: list[BaseException] = []
        self._known: dict[str, Route] = {}
        self._opaques = itertools.count(100)

    # --- life cycle

    async def start(self) -> None:
        self.started = True

    async def close(self) -> None:
        self.started = False
        for task in list(self.tasks):
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.broker_fixture.context.long_polling.drop(1)  # the connection ends
        assert not self.failures, self.failures

    def check_alive(self) -> None:
        if not self.started:
            raise ClientClosed("not started")

    async def join(self, member: SessionMember) -> None:
        self.members.append(member)
        await self.send_heartbeats()

    async def leave(self, member: SessionMember) -> None:
        self.members.remove(member)

    def spawn(self, work: Awaitable[object]) -> asyncio.Task[object]:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[object]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append(error)

    async def elapse(self, ms: int) -> None:
        """Let time pass here and at the broker."""
        most = 500 if ms < 20_000 else 1_000
        while ms > 0:
            step = min(ms, most)
            await self.clock.elapse(step)
            advance(self.broker_fixture, self.clock.now_ms() - self.broker_fixture.now_ms)
            await self.clock.elapse(0)
            ms -= step

    # --- names and routes

    def with_namespace(self, name: str) -> str:
        return name

    def without_namespace(self, name: str) -> str:
        return name

    async def find_route(self, topic: str) -> Route | None:
        config = self.broker_fixture.context.topics.get(topic)
        if config is None:
            return None
        route = self._known[topic] = Route.of(
            topic,
            TopicRouteData(
                queue_datas=[
                    QueueData(
                        broker_name=BROKER, read_queue_nums=config.read_queue_nums,
                        write_queue_nums=config.write_queue_nums, perm=config.perm,
                    )
                ],
                broker_datas=[BrokerData(broker_name=BROKER, broker_addrs={0: f"{BROKER}:1"})],
            ),
        )  # fmt: skip
        return route

    def cached_route(self, topic: str) -> Route | None:
        return self._known.get(topic)

    async def route(self, topic: str) -> Route:
        route = await self.find_route(topic)
        if route is None:
            raise NoRoute(f"no broker has the topic {topic!r}")
        return route

    def address_of(self, broker_name: str, broker_id: int = 0) -> str | None:
        return BROKER

    def peer(self, address: str) -> FixturePeer:
        return FixturePeer(self)

    def broker(self, broker_name: str, broker_id: int = 0) -> FixturePeer:
        assert broker_name == BROKER
        return FixturePeer(self)

    def master(self, broker_name: str) -> FixturePeer:
        return self.broker(broker_name)

    def other_address(self, broker_name: str, address: str) -> str | None:
        return None

    # --- requests

    async def send_heartbeats(self) -> None:
        self.beats += 1
        data = HeartbeatData(
            client_id=self.client_id,
            consumer_data_set=[data for member in self.members for data in member.consumers()],
        )
        await self.ask(RequestCode.HEART_BEAT, {}, fastjson.encode(data), NEVER)

    async def ensure_heartbeat(self, broker_name: str, broker_id: int = 0) -> None:
        pass

    async def call(
        self, peer: FixturePeer, code: int, ext: Mapping[str, str] | None = None, body: bytes = b"",
        *, timeout_ms: int | None = None, good: Iterable[int] = (ResponseCode.SUCCESS,),
    ) -> Response:  # fmt: skip
        self.check_alive()
        reply = await self.ask(code, ext or {}, body, timeout_ms or self.options.timeout_ms)
        if reply.code not in good:
            raise refusal(reply.code, reply.remark, BROKER)
        return Response(reply.code, dict(reply.ext or {}), reply.body, reply.remark)

    async def ask(self, code: int, ext: Mapping[str, str], body: bytes, timeout_ms: int) -> Reply:
        self.counts[code] += 1
        lost = self.lose(code)
        await asyncio.sleep(0)
        if lost == "request":
            raise PeerTimeout("lost on the way", address=BROKER)
        if code in self.refuse:
            return Reply(self.refuse[code], remark="as the test wants it")
        broker_fixture, opaque = self.broker_fixture, next(self._opaques)
        broker_fixture.now_ms = max(broker_fixture.now_ms, self.clock.now_ms())
        answer = broker_fixture.frame(
            encode(code, ext, body, opaque=opaque, version=493, encoding=JSON)
        )
        broker_fixture.store.publish()
        if isinstance(answer, Suspend):
            future = broker_fixture.waiting[opaque] = asyncio.get_running_loop().create_future()
            alarm = self.clock.wake_at(
                self.clock.now_ms() + timeout_ms, lambda: _give_up(future, timeout_ms)
            )
            try:
                answer = await future
            finally:
                alarm.cancel()
        assert isinstance(answer, Reply), answer
        if lost == "answer":
            raise PeerTimeout("the answer is lost", address=BROKER)
        return answer


def _give_up(future: "asyncio.Future[Any]", ms: int) -> None:
    if not future.done():
        future.set_exception(PeerTimeout(f"no answer within {ms} ms", address=BROKER))


@contextlib.contextmanager
def session_of(module: str, session: FixtureSession) -> Iterator[None]:
    """Make the clients of a module use this session."""
    with patch(f"penstock.client.{module}.Session", lambda options: session):
        yield
