"""What all clients stand on: routes, connections to brokers, heartbeats, requests from brokers.

A session belongs to one client object (a producer with its tracer, a consumer) and to the event
loop on which it was started. Names of topics and groups are given as servers know them, with the
namespace (`Session.name`).
"""

import asyncio
import itertools
import logging
import os
import secrets
import socket
from collections.abc import Awaitable, Iterable, Mapping
from typing import Protocol

from penstock.client.client_options import ClientOptions
from penstock.client.nameserver_client import NameServers
from penstock.client.namespace import with_namespace, without_namespace
from penstock.client.topic_routes import MASTER_ID, Route
from penstock.clock import Clock, LoopClock, pause
from penstock.errors import (
    ClientClosed,
    ClientForked,
    NoNameServer,
    NoRoute,
    PenstockError,
    refusal,
)
from penstock.transport.peer import Peer, PeerRequest, Response
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import ConsumerData, HeartbeatData, ProducerData
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.signing import signer

log = logging.getLogger(__name__)

_numbers = itertools.count(1)

Answer = Response | Awaitable[Response | None] | None
"""What a member makes of a broker's request: an answer now, later, or nothing (one-way)."""


class Member(Protocol):
    """A producer or consumer that shares the session's connections."""

    def producers(self) -> Iterable[ProducerData]:
        """The groups it sends for: brokers ask back these."""

    def consumers(self) -> Iterable[ConsumerData]:
        """The groups it consumes for, with their subscriptions."""

    def topics(self) -> Iterable[str]:
        """Topics whose routes are kept fresh."""

    def route_changed(self, route: Route) -> None:
        """A topic has other queues or brokers than before."""

    def asked(self, ask: PeerRequest, address: str) -> Answer | bool:
        """A broker's request; False if it is none of this member's."""


class Session:
    """A client as servers see it."""

    def __init__(self, options: ClientOptions) -> None:
        self.options = options
        self.clock: Clock = options.clock or LoopClock()
        sign = None
        if options.access_key:
            sign = signer(options.access_key, options.secret_key, options.security_token)
        self._sign = sign
        self.names = NameServers(options, self.clock, sign)
        self.client_id = ""
        self._pid = os.getpid()
        self._routes: dict[str, Route] = {}
        self._asking: dict[str, asyncio.Task[Route | None]] = {}
        self._peers: dict[str, Peer] = {}
        self._members: list[Member] = []
        self._tasks: set[asyncio.Task[object]] = set()
        self._beaten: set[str] = set()
        self._beating: dict[str, asyncio.Task[object]] = {}
        self._started = False
        self.brokers: dict[str, dict[int, str]] = {}
        """Broker name → broker id → address, of all routes."""
        self.versions: dict[str, int] = {}
        """Address → the broker's version, by its last answer to a heartbeat."""

    # --- life

    async def start(self) -> None:
        """Begin: find the NameServers, keep routes fresh, send heartbeats."""
        if self._started:
            return
        self._pid = os.getpid()
        # Containers of different machines often share both address and process number.
        instance = f"{self._pid}#{next(_numbers)}#{secrets.token_hex(4)}"
        instance = self.options.instance_name or instance
        self.client_id = f"{_local_ip()}@{instance}"
        await self.names.start()
        self._started = True
        self.spawn(self._keep_routes())
        self.spawn(self._keep_beating())

    async def close(self) -> None:
        """End the connections; members have said goodbye before (`leave`)."""
        self._started = False
        tasks, self._tasks = self._tasks, set()
        tasks |= set(self._asking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        peers, self._peers = self._peers, {}
        await asyncio.gather(*(peer.close() for peer in peers.values()))
        await self.names.close()

    @property
    def started(self) -> bool:
        return self._started

    def check_alive(self) -> None:
        """Raise ClientForked or ClientClosed where this session can't be used."""
        if self._pid != os.getpid():
            raise ClientForked(f"this client was made in process {self._pid}, not in this one")
        if not self._started:
            raise ClientClosed("the client is not started, or closed")

    def spawn(self, work: Awaitable[object]) -> asyncio.Task[object]:
        """Run something beside; it ends with the session, and a failure is logged."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: work beside failed", self.client_id, exc_info=error)

    # --- members

    async def join(self, member: Member) -> None:
        """Keep the member's routes and heartbeats from now on; tells the brokers known by now."""
        self._members.append(member)
        for topic in member.topics():
            await self.find_route(topic)
        await self.beat()

    async def leave(self, member: Member) -> None:
        """Tell brokers that the member's groups end here."""
        if member not in self._members:
            return
        self._members.remove(member)
        groups = [{"producerGroup": producer.group_name} for producer in member.producers()]
        groups += [{"consumerGroup": consumer.group_name} for consumer in member.consumers()]
        peers = [self._peers[address] for address in sorted(self._beaten & self._peers.keys())]
        await asyncio.gather(
            *(self._unregister(peer, group) for peer in peers if peer.connected for group in groups)
        )

    async def _unregister(self, peer: Peer, group: Mapping[str, str]) -> None:
        ext = {"clientID": self.client_id, **group}
        timeout_ms = self.options.timeout_ms
        try:
            await peer.call(RequestCode.UNREGISTER_CLIENT, ext, timeout_ms=timeout_ms)
        except PenstockError as error:
            log.info("%s is not told that %s ends: %s", peer.address, group, error)

    # --- names

    def name(self, name: str) -> str:
        """A topic or group as servers know it."""
        return with_namespace(self.options.namespace, name)

    def bare(self, name: str) -> str:
        """A topic or group as the application knows it."""
        return without_namespace(self.options.namespace, name)

    # --- routes

    def cached_route(self, topic: str) -> Route | None:
        """The route known by now, without asking."""
        return self._routes.get(topic)

    async def route(self, topic: str) -> Route:
        """The route of a topic, from memory or from a NameServer; raises NoRoute."""
        known = self._routes.get(topic) or await self.find_route(topic)
        if known is None:
            raise await self.names.no_route(topic)
        return known

    async def find_route(self, topic: str) -> Route | None:
        """Ask for a route now; None if there is none. Raises NoNameServer."""
        self.check_alive()
        asking = self._asking.get(topic)
        if asking is None:
            asking = self._asking[topic] = asyncio.ensure_future(self._ask_route(topic))
            asking.add_done_callback(lambda done: self._asked_route(topic, done))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if not self._started and not (me is not None and me.cancelling()):
                raise ClientClosed("the client was closed before the route was known") from None
            raise

    def _asked_route(self, topic: str, done: asyncio.Task[Route | None]) -> None:
        del self._asking[topic]
        if not done.cancelled():
            done.exception()  # those who waited have it

    async def _ask_route(self, topic: str) -> Route | None:
        data = await self.names.find_route(topic)
        old = self._routes.get(topic)
        if data is None or not data.queue_datas:
            return None  # what is known may still work: a NameServer may just have begun
        route = old if old is not None and old.data == data else Route.of(topic, data)
        self.brokers.update((name, dict(ids)) for name, ids in route.addresses.items())
        if route is old:
            return old
        self._routes[topic] = route
        log.debug("route of %s: %d brokers", topic, len(route.brokers))
        for member in list(self._members):
            member.route_changed(route)
        return route

    async def _keep_routes(self) -> None:
        while True:
            await pause(self.clock, self.options.route_refresh_ms)
            await self._forget_brokers(await self.refresh())

    async def refresh(self) -> set[str]:
        """Ask for the routes of all members' topics now; gives these topics.

        Other routes that were asked for are looked at too, and forgotten when their topic is gone.
        """
        topics = {topic for member in self._members for topic in member.topics()}
        for topic in sorted(topics | self._routes.keys()):
            try:
                if await self.find_route(topic) is None and topic not in topics:
                    self._routes.pop(topic, None)
            except PenstockError as error:
                log.warning("the route of %s is not fresh: %s", topic, error)
                if isinstance(error, NoNameServer):
                    break
        return topics

    async def _forget_brokers(self, topics: set[str]) -> None:
        """Close connections to addresses that no route names any more."""
        for topic in self._routes.keys() - topics:
            if len(self._routes) > 1_024:
                del self._routes[topic]
        held = {name for route in self._routes.values() for name in route.addresses}
        self.brokers = {name: ids for name, ids in self.brokers.items() if name in held}
        named = {address for ids in self.brokers.values() for address in ids.values()}
        for address in [a for a, peer in self._peers.items() if not peer.connected]:
            if address not in named:
                await self._peers.pop(address).close()
                self._beaten.discard(address)

    # --- brokers

    def peer(self, address: str) -> Peer:
        """The connection to a server, made on demand."""
        peer = self._peers.get(address)
        if peer is None:
            self.check_alive()
            peer = self._peers[address] = Peer(
                address,
                ssl=self.options.ssl,
                sign=self._sign,
                clock=self.clock,
                on_request=lambda ask: self._asked(address, ask),
                on_lost=lambda: self._beaten.discard(address),
            )
        return peer

    def address_of(self, broker_name: str, broker_id: int = MASTER_ID) -> str | None:
        """Where a broker listens: this one of its name, else its master, else any other."""
        known = self.brokers.get(broker_name)
        if not known:
            return None
        return known.get(broker_id) or known.get(MASTER_ID) or known[min(known)]

    def broker(self, broker_name: str, broker_id: int = MASTER_ID) -> Peer:
        """The connection to a broker; raises NoRoute if no route has named it."""
        address = self.address_of(broker_name, broker_id)
        if address is None:
            raise NoRoute(f"no address is known of the broker {broker_name!r}")
        return self.peer(address)

    async def call(
        self,
        peer: Peer,
        code: int,
        ext: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        timeout_ms: int | None = None,
        good: Iterable[int] = (ResponseCode.SUCCESS,),
    ) -> Response:
        """A broker's answer with one of the `good` codes; raises what another code stands for."""
        self.check_alive()
        answer = await peer.call(code, ext, body, timeout_ms=timeout_ms or self.options.timeout_ms)
        if answer.code not in good:
            raise refusal(answer.code, answer.remark, peer.address)
        return answer

    # --- heartbeats

    async def beat(self) -> None:
        """Tell all known brokers now which groups are here."""
        body = self._heartbeat()
        if body is not None:
            await asyncio.gather(*(self._beat(address, body) for address in self._to_beat()))

    def _heartbeat(self) -> bytes | None:
        producers = [data for member in self._members for data in member.producers()]
        consumers = [data for member in self._members for data in member.consumers()]
        if not producers and not consumers:
            return None
        return fastjson.encode(
            HeartbeatData(
                client_id=self.client_id, producer_data_set=producers, consumer_data_set=consumers
            )
        )

    def _to_beat(self) -> list[str]:
        """Masters; consumers may read from replicas too, and these want to know them."""
        consumers = any(True for member in self._members for _ in member.consumers())
        return sorted(
            {
                address
                for addresses in self.brokers.values()
                for number, address in addresses.items()
                if consumers or number == MASTER_ID
            }
        )

    async def beat_at(self, broker_name: str) -> None:
        """See to it that a broker knows our groups before it is asked for more."""
        address = self.address_of(broker_name)
        if address is None or address in self._beaten:
            return
        beating = self._beating.get(address)
        if beating is None:
            body = self._heartbeat()
            if body is None:
                return
            beating = self._beating[address] = self.spawn(self._beat(address, body))
            beating.add_done_callback(lambda done: self._beating.pop(address))
        await asyncio.shield(beating)  # one for all who wait for it

    def is_known_at(self, broker_name: str) -> bool:
        """Whether a broker has our groups from a heartbeat on this connection."""
        address = self.address_of(broker_name)
        return address is None or address in self._beaten

    async def _beat(self, address: str, body: bytes) -> None:
        try:
            answer = await self.peer(address).call(
                RequestCode.HEART_BEAT, {}, body, timeout_ms=self.options.timeout_ms
            )
        except PenstockError as error:
            log.info("no heartbeat to %s: %s", address, error)
            return
        if answer.code == ResponseCode.SUCCESS:
            self._beaten.add(address)
            self.versions[address] = answer.version
        else:
            log.warning("%s refuses our heartbeat: %s", address, answer.remark)

    async def _keep_beating(self) -> None:
        while True:
            await pause(self.clock, self.options.heartbeat_ms)
            await self.beat()

    # --- requests from brokers

    def _asked(self, address: str, ask: PeerRequest) -> Response | None:
        for member in list(self._members):
            answer = member.asked(ask, address)
            if answer is False:
                continue
            if answer is None or isinstance(answer, Response):
                return answer
            assert not isinstance(answer, bool)
            self.spawn(self._answer(address, ask, answer))
            return None
        remark = f" request type {ask.code} not supported"
        return Response(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)

    async def _answer(
        self, address: str, ask: PeerRequest, work: Awaitable[Response | None]
    ) -> None:
        try:
            answer = await work
        except Exception as error:  # a handler of the application's, mostly
            log.exception("request %d of %s failed", ask.code, address)
            answer = Response(ResponseCode.SYSTEM_ERROR, remark=repr(error))
        if answer is not None and address in self._peers:
            self._peers[address].reply(ask, answer)


def _local_ip() -> str:
    """The address from which this machine speaks to others; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
