"""Routes of topics over all brokers, as the NameServers know them.

A broker knows its own queues only; who shares the queues of a topic among consumers has to know
those of the others too. Answers are kept for a moment: a group of many consumers asks often.
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
KEEP_MS = 2_000
"""How long a route may be old; clients look for new queues every 20 s."""
KEPT_MAX = 1_024


class NameServers(Protocol):
    """Who can be asked."""

    @property
    def peers(self) -> Sequence[Peer]:
        """The best one first."""


class Routes:
    """Asks for routes."""

    def __init__(self, servers: NameServers, clock: Clock | None = None) -> None:
        self._servers = servers
        self._clock = clock or LoopClock()
        self._kept: dict[str, tuple[int, asyncio.Future[TopicRouteData | None]]] = {}

    def find(self, topic: str) -> asyncio.Future[TopicRouteData | None]:
        """The route of a topic; None if it is not known, or nobody answers."""
        now_ms = self._clock.monotonic_ms()
        kept = self._kept.get(topic)
        if kept is not None and now_ms - kept[0] < KEEP_MS:
            return kept[1]
        if len(self._kept) >= KEPT_MAX:
            self._kept.clear()
        asking = asyncio.ensure_future(self._ask(topic))
        self._kept[topic] = now_ms, asking
        return asking

    async def _ask(self, topic: str) -> TopicRouteData | None:
        for peer in self._servers.peers:
            try:
                answer = await peer.call(
                    RequestCode.GET_ROUTEINFO_BY_TOPIC,
                    {"topic": topic, "acceptStandardJsonOnly": "true"},
                    timeout_ms=CALL_MS,
                )
                if answer.code == ResponseCode.SUCCESS:
                    return fastjson.decode(answer.body, TopicRouteData)
                if answer.code == ResponseCode.TOPIC_NOT_EXIST:
                    return None
            except PenstockError as error:
                log.warning("no route of %s from a NameServer: %s", topic, error)
        return None
