"""Route queries: the order of NameServers, and the cache."""

import asyncio

from penstock.server.registration.route_queries import CACHE_MS, RouteQueries
from penstock.testing.virtual_clock import VirtualClock
from penstock.transport.peer import Peer
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import QueueData, TopicRouteData
from tests.integration.loops import Run, Wire, run, serving

__all__ = ["run"]

ROUTE = TopicRouteData(queue_datas=[QueueData(broker_name="broker-b", read_queue_nums=4)])


class NameServer:
    """Has one topic, and counts its queries."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.asked = 0

    async def serve(self, wire: Wire) -> None:
        while True:
            frame = await wire.read()
            self.asked += 1
            known = frame.ext["topic"] == "T" and self.code == 0
            wire.answer(frame, 0 if known else self.code or 17, body=fastjson.encode(ROUTE))


class Servers:
    """NameServers by address."""

    def __init__(self, *addresses: str) -> None:
        self.peers = [Peer(address) for address in addresses]

    async def close(self) -> None:
        for peer in self.peers:
            await peer.close()


def test_a_route_is_queried_and_cached(run: Run) -> None:
    async def body() -> None:
        names, clock = NameServer(), VirtualClock()
        async with serving(names.serve) as server:
            servers = Servers(server.address)
            routes = RouteQueries(servers, clock)
            assert await routes.find("T") == ROUTE
            assert await routes.find("T") == ROUTE
            assert names.asked == 1
            clock.advance(CACHE_MS)
            assert await routes.find("T") == ROUTE
            assert names.asked == 2
            await servers.close()

    run(body())


def test_an_unknown_topic_has_no_route(run: Run) -> None:
    async def body() -> None:
        names = NameServer()
        async with serving(names.serve) as server:
            servers = Servers(server.address)
            assert await RouteQueries(servers).find("U") is None
            await servers.close()

    run(body())


def test_the_next_nameserver_is_queried_if_the_first_fails_or_refuses(run: Run) -> None:
    async def body() -> None:
        names, busy = NameServer(), NameServer(code=2)
        async with serving(names.serve) as server, serving(busy.serve) as other:
            servers = Servers("127.0.0.1:1", other.address, server.address)
            assert await RouteQueries(servers).find("T") == ROUTE
            assert busy.asked == 1
            await servers.close()

    run(body())


def test_there_is_no_route_without_nameservers() -> None:
    async def body() -> None:
        assert await RouteQueries(Servers()).find("T") is None

    asyncio.run(body())
