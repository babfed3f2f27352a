"""Requests to the NameServers: tried one after another until one answers.

NameServers are independent of each other, so any of them can answer. The one that answered last is
tried first. A list of addresses given as a URL is read again every two minutes, as RocketMQ's
clients do.
"""

import asyncio
import http.client
import logging
import urllib.request
from collections.abc import Mapping

from penstock.client.client_options import ClientOptions
from penstock.clock import Clock, pause
from penstock.errors import (
    NoNameServer,
    NoRoute,
    NotNameServer,
    PeerError,
    PeerUnreachable,
    PenstockError,
    refusal,
)
from penstock.transport.peer import Peer, Response, Sign, split_address
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import TopicList, TopicRouteData
from penstock.wire.codes import RequestCode, ResponseCode

log = logging.getLogger(__name__)

LIST_REFRESH_MS = 120_000
LIST_TIMEOUT_S = 3.0
LIST_BYTES_MAX = 64 * 1024
SIMILAR_TOPICS_MAX = 3
EVERY_NAMESERVER = frozenset(
    (RequestCode.GET_ROUTEINFO_BY_TOPIC, RequestCode.GET_BROKER_CLUSTER_INFO)
)
"""Requests that every NameServer answers, and no broker does."""


class NameServerClient:
    """The NameServers of one client."""

    def __init__(self, options: ClientOptions, clock: Clock, sign: Sign | None) -> None:
        self._options = options
        self._clock = clock
        self._sign = sign
        first = options.addresses[0]
        self._url = first if first.startswith(("http://", "https://")) else None
        self.addresses: tuple[str, ...] = () if self._url else options.addresses
        self._peers: dict[str, Peer] = {}
        self._last_good = ""  # address of the NameServer that answered last
        self._refresh_task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the list of addresses if it is given as a URL."""
        if self._url is not None:
            await self._read_list(self._url)
            self._refresh_task = asyncio.ensure_future(self._keep_list_fresh(self._url))

    @property
    def reached(self) -> bool:
        """Whether a NameServer has answered this client."""
        return bool(self._last_good)

    async def close(self) -> None:
        if self._refresh_task is not None:
            self._refresh_task.cancel()
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            await peer.close()

    async def call(
        self,
        code: int,
        ext: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        timeout_ms: int | None = None,
    ) -> Response:
        """The response of the first NameServer that answers; raises NoNameServer."""
        failures: list[PenstockError] = []
        for address in self._in_order():
            try:
                answer = await self._peer(address).call(
                    code, ext, body, timeout_ms=timeout_ms or self._options.timeout_ms
                )
            except PeerError as error:
                failures.append(error)
                continue
            if answer.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED and code in EVERY_NAMESERVER:
                message = "this server is not a NameServer"
                failures.append(NotNameServer(message, address=address))
                continue
            if answer.code == ResponseCode.SYSTEM_BUSY:
                failures.append(refusal(answer.code, answer.remark, address))
                continue
            if address != self._last_good:
                log.info("using NameServer %s", address)
                self._last_good = address
            return answer
        reasons = "; ".join(error.message for error in failures) or f"{self._url} lists none"
        hints = {error.hint for error in failures}
        raise NoNameServer(
            f"no NameServer answers: {reasons}",
            attempts=tuple(failures),
            hint=None if hints <= {PeerUnreachable.hint} or len(hints) > 1 else hints.pop(),
        )

    async def call_all(
        self, code: int, ext: Mapping[str, str] | None = None, body: bytes = b""
    ) -> None:
        """Send a request to every NameServer; raises the first failure."""
        for address in self.addresses:
            answer = await self._peer(address).call(
                code, ext, body, timeout_ms=self._options.timeout_ms
            )
            if answer.code != ResponseCode.SUCCESS:
                raise refusal(answer.code, answer.remark, address)

    async def find_route(self, topic: str) -> TopicRouteData | None:
        """The route of a topic (name with namespace); None if there is none."""
        answer = await self.call(
            RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic, "acceptStandardJsonOnly": "true"}
        )
        if answer.code == ResponseCode.SUCCESS and answer.body:
            return fastjson.decode(answer.body, TopicRouteData)
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            return None
        raise refusal(answer.code, answer.remark, self._last_good)

    async def no_route(self, topic: str) -> NoRoute:
        """The error for a topic without a route; it names the NameServers and similar topics."""
        from difflib import get_close_matches

        message = f"no broker has the topic {topic!r} (NameServers: {self.text()})"
        answer = await self.call(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
        if answer.code == ResponseCode.SUCCESS and answer.body:
            topics = fastjson.decode(answer.body, TopicList).topic_list
            similar = get_close_matches(topic, topics, SIMILAR_TOPICS_MAX, cutoff=0.6)
            if similar:
                message += "; similar topics: " + ", ".join(sorted(similar))
        return NoRoute(message)

    def text(self) -> str:
        """All addresses, for error messages."""
        return ", ".join(self.addresses) or str(self._url)

    def _in_order(self) -> list[str]:
        return sorted(self.addresses, key=lambda address: address != self._last_good)

    def _peer(self, address: str) -> Peer:
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = Peer(
                address, ssl=self._options.ssl_context, sign=self._sign, clock=self._clock
            )
        return peer

    async def _keep_list_fresh(self, url: str) -> None:
        while True:
            await pause(self._clock, LIST_REFRESH_MS)
            try:
                await self._read_list(url)
            except NoNameServer as error:
                log.warning("keeping the previous list of NameServers: %s", error)

    async def _read_list(self, url: str) -> None:
        loop = asyncio.get_running_loop()
        try:
            text = await loop.run_in_executor(None, _read_url, url)
            addresses = tuple(piece.strip() for piece in text.split(";") if piece.strip())
            for address in addresses:
                split_address(address)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise NoNameServer(f"cannot read {url}: {error}") from None
        if not addresses:
            raise NoNameServer(f"{url} lists no NameServer")
        if addresses != self.addresses:
            log.info("NameServers listed by %s: %s", url, ", ".join(addresses))
            self.addresses = addresses
            for address in self._peers.keys() - set(addresses):
                await self._peers.pop(address).close()


def _read_url(url: str) -> str:
    with urllib.request.urlopen(url, timeout=LIST_TIMEOUT_S) as answer:  # http(s): see __init__
        data: bytes = answer.read(LIST_BYTES_MAX)
        return data.decode()
