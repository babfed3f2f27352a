"""Queries the NameServers for routes of topics over all brokers.

A broker knows only its own queues. To assign the queues of a topic to consumers it needs those of
the other brokers too. Routes are cached briefly, because a group of many consumers asks often.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from penstock.clock import Clock, LoopClock
from penstock.errors import PenstockError
from penstock.transport.peer import Peer
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import TopicRouteData
from penstock.wire.codes import RequestCode, ResponseCode

log = logging.getLogger(__name__)

CALL_MS = 3_000
CACHE_MS = 2_000
"""How long a route is cached; clients look for new queues every 20 s."""
CACHED_MAX = 1_024


class RouteServers(Protocol):
    """The NameServers to query."""

    @property
    def peers(self) -> Sequence[Peer]:
        """In the order of preference."""


class RouteQueries:
    """Queries and caches routes."""

    def __init__(self, servers: RouteServers, clock: Clock | None = None) -> None:
        self._servers = servers
        self._clock = clock or LoopClock()
        self._cache: dict[str, tuple[int, asyncio.Future[TopicRouteData | None]]] = {}

    def find(self, topic: str) -> asyncio.Future[TopicRouteData | None]:
        """The route of a topic; None if it is unknown or no NameServer responds."""
        now_ms = self._clock.monotonic_ms()
        cached = self._cache.get(topic)
        if cached is not None and now_ms - cached[0] < CACHE_MS:
            return cached[1]
        if len(self._cache) >= CACHED_MAX:
            self._cache.clear()
        query = asyncio.ensure_future(self._query(topic))
        self._cache[topic] = now_ms, query
        return query

    async def _query(self, topic: str) -> TopicRouteData | None:
        for peer in self._servers.peers:
            try:
                response = await peer.call(
                    RequestCode.GET_ROUTEINFO_BY_TOPIC,
                    {"topic": topic, "acceptStandardJsonOnly": "true"},
                    timeout_ms=CALL_MS,
                )
                if response.code == ResponseCode.SUCCESS:
                    return fastjson.decode(response.body, TopicRouteData)
                if response.code == ResponseCode.TOPIC_NOT_EXIST:
                    return None
            except PenstockError as error:
                log.warning("can't query the route of %s: %s", topic, error)
        return None
