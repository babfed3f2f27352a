"""The session of a client: routes, connections to brokers, heartbeats, requests from brokers.

A session belongs to one client object (a producer with its tracer, a consumer) and to the event
loop on which it was started. Topic and group names in its methods include the namespace
(`Session.with_namespace`).
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
from penstock.client.nameserver_client import NameServerClient
from penstock.client.namespace import with_namespace, without_namespace
from penstock.client.topic_routes import MASTER_ID, Route, address_to_read
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
from penstock.wire.signing import signer, strict_signer

log = logging.getLogger(__name__)

ROUTES_MAX = 1_024
"""Routes that no member needs are dropped when more than this are cached."""

_instance_numbers = itertools.count(1)

MemberResponse = Response | Awaitable[Response | None] | None
"""A member's response to a broker's request: now, later, or none (one-way)."""


class SessionMember(Protocol):
    """A producer or consumer that shares the session's connections."""

    def producers(self) -> Iterable[ProducerData]:
        """The producer groups; brokers send check-backs to them."""

    def consumers(self) -> Iterable[ConsumerData]:
        """The consumer groups with their subscriptions."""

    def topics(self) -> Iterable[str]:
        """The topics whose routes are refreshed periodically."""

    def route_changed(self, route: Route) -> None:
        """The queues or brokers of a topic have changed."""

    def handle_request(self, ask: PeerRequest, address: str) -> MemberResponse | bool:
        """Handle a request from a broker; False if it is not for this member."""


class Session:
    """Routes, connections and heartbeats of one client."""

    def __init__(self, options: ClientOptions) -> None:
        self.options = options
        self.clock: Clock = options.clock or LoopClock()
        sign = None
        if options.access_key:
            keys = options.access_key, options.secret_key
            sign = signer(*keys, options.security_token)
            if options.strict_signing:
                sign = strict_signer(*keys, self.clock.now_ms, options.security_token)
        self._sign = sign
        self.nameservers = NameServerClient(options, self.clock, sign)
        self.client_id = ""
        self._pid = os.getpid()
        self._routes: dict[str, Route] = {}
        self._route_queries: dict[str, asyncio.Task[Route | None]] = {}
        self._peers: dict[str, Peer] = {}
        self._members: list[SessionMember] = []
        self._tasks: set[asyncio.Task[object]] = set()
        self._registered: set[str] = set()  # addresses that acknowledged a heartbeat
        self._heartbeats: dict[str, asyncio.Task[object]] = {}  # address → heartbeat in flight
        self._started = False
        self.brokers: dict[str, dict[int, str]] = {}
        """Broker name → broker id → address, from all routes."""
        self.versions: dict[str, int] = {}
        """Address → version of the broker, from its last response to a heartbeat."""

    # --- lifecycle

    async def start(self) -> None:
        """Connect to the NameServers, then refresh routes and send heartbeats periodically."""
        if self._started:
            return
        self._pid = os.getpid()
        # Containers on different machines often have the same address and process id.
        instance = f"{self._pid}#{next(_instance_numbers)}#{secrets.token_hex(4)}"
        instance = self.options.instance_name or instance
        self.client_id = f"{_local_ip()}@{instance}"
        await self.nameservers.start()
        self._started = True
        self.spawn(self._keep_routes())
        self.spawn(self._keep_sending_heartbeats())

    async def close(self) -> None:
        """Close all connections; members must have left before (`leave`)."""
        self._started = False
        tasks, self._tasks = self._tasks, set()
        tasks |= set(self._route_queries.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        peers, self._peers = self._peers, {}
        await asyncio.gather(*(peer.close() for peer in peers.values()))
        await self.nameservers.close()

    @property
    def started(self) -> bool:
        return self._started

    def check_alive(self) -> None:
        """Raise ClientForked or ClientClosed if this session cannot be used."""
        if self._pid != os.getpid():
            raise ClientForked(
                f"this client belongs to process {self._pid}, this is process {os.getpid()}"
            )
        if not self._started:
            raise ClientClosed("the client is not started or already closed")

    def spawn(self, work: Awaitable[object]) -> asyncio.Task[object]:
        """Run a background task; it is cancelled with the session, and a failure is logged."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def _task_done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: a background task failed", self.client_id, exc_info=error)

    # --- members

    async def join(self, member: SessionMember) -> None:
        """Add a member: refresh its routes, and send a heartbeat to the known brokers."""
        self._members.append(member)
        for topic in member.topics():
            await self.find_route(topic)
        await self.send_heartbeats()

    async def leave(self, member: SessionMember) -> None:
        """Remove a member and unregister its groups at the brokers."""
        if member not in self._members:
            return
        self._members.remove(member)
        groups = [{"producerGroup": producer.group_name} for producer in member.producers()]
        groups += [{"consumerGroup": consumer.group_name} for consumer in member.consumers()]
        peers = [self._peers[address] for address in sorted(self._registered & self._peers.keys())]
        await asyncio.gather(
            *(self._unregister(peer, group) for peer in peers if peer.connected for group in groups)
        )

    async def _unregister(self, peer: Peer, group: Mapping[str, str]) -> None:
        ext = {"clientID": self.client_id, **group}
        timeout_ms = self.options.timeout_ms
        try:
            await peer.call(RequestCode.UNREGISTER_CLIENT, ext, timeout_ms=timeout_ms)
        except PenstockError as error:
            (name,) = group.values()
            log.info("cannot unregister group %s at %s: %s", name, peer.address, error)

    # --- namespace

    def with_namespace(self, name: str) -> str:
        """A topic or group as servers know it."""
        return with_namespace(self.options.namespace, name)

    def without_namespace(self, name: str) -> str:
        """A topic or group as the application knows it."""
        return without_namespace(self.options.namespace, name)

    # --- routes

    def cached_route(self, topic: str) -> Route | None:
        """The cached route, without a request."""
        return self._routes.get(topic)

    async def route(self, topic: str) -> Route:
        """The route of a topic, cached or from a NameServer; raises NoRoute."""
        known = self._routes.get(topic) or await self.find_route(topic)
        if known is None:
            raise await self.nameservers.no_route(topic)
        return known

    async def find_route(self, topic: str) -> Route | None:
        """Query a NameServer for a route; None if there is none. Raises NoNameServer."""
        self.check_alive()
        query = self._route_queries.get(topic)
        if query is None:
            query = self._route_queries[topic] = asyncio.ensure_future(self._query_route(topic))
            query.add_done_callback(lambda done: self._route_query_done(topic, done))
        try:
            return await asyncio.shield(query)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._started and not (task is not None and task.cancelling()):
                raise ClientClosed("the client was closed while it queried a route") from None
            raise

    def _route_query_done(self, topic: str, done: asyncio.Task[Route | None]) -> None:
        del self._route_queries[topic]
        if not done.cancelled():
            done.exception()  # mark as retrieved: the waiters have raised it

    async def _query_route(self, topic: str) -> Route | None:
        data = await self.nameservers.find_route(topic)
        old = self._routes.get(topic)
        if data is None or not data.queue_datas:
            return None  # keep the cached route: the NameServer may just have restarted
        route = old if old is not None and old.data == data else Route.of(topic, data)
        self.brokers.update((name, dict(ids)) for name, ids in route.addresses.items())
        if route is old:
            return old
        self._routes[topic] = route
        log.debug("new route of topic %s: %d brokers", topic, len(route.brokers))
        for member in list(self._members):
            member.route_changed(route)
        return route

    async def _keep_routes(self) -> None:
        while True:
            await pause(self.clock, self.options.route_refresh_ms)
            await self._forget_unused_brokers(await self.refresh())

    async def refresh(self) -> set[str]:
        """Query the routes of all members' topics now; returns these topics.

        Other cached routes are refreshed too, and dropped if their topic is gone.
        """
        topics = {topic for member in self._members for topic in member.topics()}
        for topic in sorted(topics | self._routes.keys()):
            try:
                if await self.find_route(topic) is None and topic not in topics:
                    self._routes.pop(topic, None)
            except PenstockError as error:
                log.warning("cannot refresh the route of topic %s: %s", topic, error)
                if isinstance(error, NoNameServer):
                    break
        return topics

    async def _forget_unused_brokers(self, topics: set[str]) -> None:
        """Close connections to addresses that are no longer in any route."""
        for topic in self._routes.keys() - topics:
            if len(self._routes) > ROUTES_MAX:
                del self._routes[topic]
        names = {name for route in self._routes.values() for name in route.addresses}
        self.brokers = {name: ids for name, ids in self.brokers.items() if name in names}
        known = {address for ids in self.brokers.values() for address in ids.values()}
        for address in [a for a, peer in self._peers.items() if not peer.connected]:
            if address not in known:
                await self._peers.pop(address).close()
                self._registered.discard(address)

    # --- brokers

    def peer(self, address: str) -> Peer:
        """The peer of an address; it connects on demand."""
        peer = self._peers.get(address)
        if peer is None:
            self.check_alive()
            peer = self._peers[address] = Peer(
                address,
                ssl=self.options.ssl_context,
                sign=self._sign,
                clock=self.clock,
                on_request=lambda ask: self._handle_request(address, ask),
                on_lost=lambda: self._registered.discard(address),
            )
        return peer

    def address_of(self, broker_name: str, broker_id: int = MASTER_ID) -> str | None:
        """The address of a broker: of this broker id, else of the master, else of any replica."""
        return address_to_read(self.brokers.get(broker_name, {}), broker_id)

    def master_address(self, broker_name: str) -> str | None:
        """The address of a broker's master."""
        return self.brokers.get(broker_name, {}).get(MASTER_ID)

    def other_address(self, broker_name: str, address: str) -> str | None:
        """The address of another member of a broker set, of the master first; None if there is
        none."""
        members = sorted(self.brokers.get(broker_name, {}).items())
        return next((other for _, other in members if other != address), None)

    def broker(self, broker_name: str, broker_id: int = MASTER_ID) -> Peer:
        """The peer of a broker; raises NoRoute if no route has its address."""
        address = self.address_of(broker_name, broker_id)
        if address is None:
            raise NoRoute(f"the address of broker {broker_name!r} is not known")
        return self.peer(address)

    def master(self, broker_name: str) -> Peer:
        """The peer of a broker's master, which alone accepts changes; raises NoRoute."""
        address = self.master_address(broker_name)
        if address is None:
            problem = "broker {!r} has no master now; replicas accept no changes"
            if not self.brokers.get(broker_name):
                problem = "the address of broker {!r} is not known"
            raise NoRoute(problem.format(broker_name), hint="wait for the broker, or start it")
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
        """A broker's response with one of the `good` codes; raises the error of any other code."""
        self.check_alive()
        answer = await peer.call(code, ext, body, timeout_ms=timeout_ms or self.options.timeout_ms)
        if answer.code not in good:
            raise refusal(answer.code, answer.remark, peer.address)
        return answer

    # --- heartbeats

    async def send_heartbeats(self) -> None:
        """Send a heartbeat with all groups to all known brokers now."""
        body = self._heartbeat()
        if body is not None:
            await asyncio.gather(
                *(self._send_heartbeat(address, body) for address in self._heartbeat_addresses())
            )

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

    def _heartbeat_addresses(self) -> list[str]:
        """The masters; with consumers also the replicas, from which consumers may read."""
        consumers = any(True for member in self._members for _ in member.consumers())
        return sorted(
            {
                address
                for addresses in self.brokers.values()
                for number, address in addresses.items()
                if consumers or number == MASTER_ID
            }
        )

    async def ensure_heartbeat(self, broker_name: str, broker_id: int = MASTER_ID) -> None:
        """Send a heartbeat to a broker that has not acknowledged one on this connection."""
        address = self.address_of(broker_name, broker_id)
        if address is None or address in self._registered:
            return
        heartbeat = self._heartbeats.get(address)
        if heartbeat is None:
            body = self._heartbeat()
            if body is None:
                return
            heartbeat = self._heartbeats[address] = self.spawn(self._send_heartbeat(address, body))
            heartbeat.add_done_callback(lambda done: self._heartbeats.pop(address))
        await asyncio.shield(heartbeat)  # shared by all waiters

    def is_registered_at(self, broker_name: str) -> bool:
        """Whether a broker has acknowledged a heartbeat on this connection."""
        address = self.address_of(broker_name)
        return address is None or address in self._registered

    async def _send_heartbeat(self, address: str, body: bytes) -> None:
        try:
            answer = await self.peer(address).call(
                RequestCode.HEART_BEAT, {}, body, timeout_ms=self.options.timeout_ms
            )
        except PenstockError as error:
            log.info("cannot send a heartbeat to %s: %s", address, error)
            return
        if answer.code == ResponseCode.SUCCESS:
            self._registered.add(address)
            self.versions[address] = answer.version
        else:
            log.warning("%s rejected the heartbeat: %s", address, answer.remark)

    async def _keep_sending_heartbeats(self) -> None:
        while True:
            await pause(self.clock, self.options.heartbeat_ms)
            await self.send_heartbeats()

    # --- requests from brokers

    def _handle_request(self, address: str, ask: PeerRequest) -> Response | None:
        for member in list(self._members):
            answer = member.handle_request(ask, address)
            if answer is False:
                continue
            if answer is None or isinstance(answer, Response):
                return answer
            assert not isinstance(answer, bool)
            self.spawn(self._reply_later(address, ask, answer))
            return None
        remark = f" request type {ask.code} not supported"
        return Response(ResponseCode.REQUEST_CODE_NOT_SUPPORTED, remark=remark)

    async def _reply_later(
        self, address: str, ask: PeerRequest, work: Awaitable[Response | None]
    ) -> None:
        try:
            answer = await work
        except Exception as error:  # usually raised by the application's handler
            log.exception("request %d from %s failed", ask.code, address)
            answer = Response(ResponseCode.SYSTEM_ERROR, remark=f"{type(error).__name__}: {error}")
        if answer is not None and address in self._peers:
            self._peers[address].reply(ask, answer)


def _local_ip() -> str:
    """The address of this machine's default route; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
