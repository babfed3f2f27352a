"""Calls of a broker to its controllers.

Each of Penstock's controllers answers all requests. Of Apache's, only the leader does; the others
say who that is. So a call goes to a controller that calls itself the leader, and after a failure to
the next one that is found.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

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

    async def call(self, code: int, fields: Mapping[str, str], body: bytes = b"") -> Response:
        """Ask the leader; the response may have an error code.

        Raises ControllerUnreachable if no leader answers. Then the request may have had an effect.
        """
        problem = ""
        for _ in range(ATTEMPTS):
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
        found = await asyncio.gather(*(self.leader_of(address) for address in self.addresses))
        self._leader = next((address for address in found if address), "")
        if not self._leader:
            raise ControllerUnreachable(
                f"no controller of {';'.join(self.addresses)} answers, or they have no leader"
            )
        return self._leader

    async def leader_of(self, address: str) -> str:
        """Who is the leader, as one controller says; empty if it does not answer."""
        code = RequestCode.CONTROLLER_GET_METADATA_INFO
        try:
            response = await self.peer(address).call(code, {}, timeout_ms=CONNECT_MS)
        except PeerError:
            return ""
        if response.code != ResponseCode.SUCCESS:
            return ""
        return response.ext.get("controllerLeaderAddress", "")
