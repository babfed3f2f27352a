"""Calls of a broker to its controllers.

Each of Penstock's controllers answers all requests. Of Apache's, only the leader does; the others
say who that is. So a call goes to a controller that calls itself the leader, and after a failure to
the next one that is found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from penstock.controller.controller import GROUP
from penstock.errors import ControllerUnreachable, PeerError
from penstock.transport.peer import Peer, Response, Sign
from penstock.wire.codes import RequestCode, ResponseCode

if TYPE_CHECKING:
    import ssl as tls

    from penstock.clock import Clock

CALL_MS = 3_000
CONNECT_MS = 1_000
ATTEMPTS = 2
"""How often a call is tried, each time with another leader."""


class ControllerInfo(NamedTuple):
    """What a controller says of itself."""

    leader: str
    """The address of the leader; each of Penstock's names itself."""
    penstock: bool


class Controllers:
    """The controllers of one broker set."""

    def __init__(
        self,
        addresses: list[str],
        clock: Clock,
        *,
        sign: Sign | None = None,
        ssl: tls.SSLContext | None = None,
    ) -> None:
        self._clock = clock
        self._sign = sign
        self._ssl = ssl
        self._peers: dict[str, Peer] = {}
        self.addresses = addresses
        self._leader = ""
        self.penstock = False
        """Whether the last controller that answered is one of Penstock's."""

    async def close(self) -> None:
        peers, self._peers = self._peers, {}
        await asyncio.gather(*(peer.close() for peer in peers.values()))

    def peer(self, address: str) -> Peer:
        """The connection to one controller."""
        if address not in self._peers:
            self._peers[address] = Peer(
                address, sign=self._sign, ssl=self._ssl, clock=self._clock, connect_ms=CONNECT_MS
            )
        return self._peers[address]

    async def call(
        self, code: int, fields: Mapping[str, str], body: bytes = b"", *, attempts: int = ATTEMPTS
    ) -> Response:
        """Ask the leader; the response may have an error code.

        Raises ControllerUnreachable if no leader answers. Then the request may have had an effect.
        So it may have if a later attempt is refused: use one attempt where that matters.
        """
        problem = ""
        for _ in range(attempts):
            leader = self._leader or await self.find_leader()
            try:
                response = await self.peer(leader).call(code, fields, body, timeout_ms=CALL_MS)
            except PeerError as error:
                problem = str(error)
            else:
                if response.code != ResponseCode.CONTROLLER_NOT_LEADER:
                    return response
                problem = f"{leader} is not the leader of the controllers"
            self._leader = ""
        raise ControllerUnreachable(problem)

    async def find_leader(self) -> str:
        """The address of a controller that answers requests; raises ControllerUnreachable."""
        found = await asyncio.gather(*(self.describe(address) for address in self.addresses))
        self._leader = next((info.leader for info in found if info.leader), "")
        if not self._leader:
            raise ControllerUnreachable(
                f"no controller of {';'.join(self.addresses)} answers, or they have no leader"
            )
        return self._leader

    async def describe(self, address: str) -> ControllerInfo:
        """What one controller says of itself; nothing if it does not answer."""
        code = RequestCode.CONTROLLER_GET_METADATA_INFO
        try:
            response = await self.peer(address).call(code, {}, timeout_ms=CONNECT_MS)
        except PeerError:
            return ControllerInfo("", penstock=False)
        if response.code != ResponseCode.SUCCESS:
            return ControllerInfo("", penstock=False)
        leader = response.ext.get("controllerLeaderAddress", "")
        info = ControllerInfo(leader, penstock=response.ext.get("group") == GROUP)
        if leader:
            self.penstock = info.penstock
        return info
