"""Requests of a broker to the other replicas of its set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import ReplicationError
from penstock.transport.peer import Peer, Response, Sign
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import KVTable
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.java_numbers import parse_long

if TYPE_CHECKING:
    import ssl as tls

    from penstock.config import LiveSettings

CALL_MS = 3_000


class OtherReplica(NamedTuple):
    """What a broker says of itself."""

    ours: bool
    """Whether it has the same cluster and broker name."""
    role: str
    """One of the values of `replication.role`; empty for Apache's brokers."""
    epoch: int


class ReplicaCalls:
    """Asks brokers by their address. All methods raise PenstockError."""

    def __init__(
        self, settings: LiveSettings, sign: Sign | None = None, ssl: tls.SSLContext | None = None
    ) -> None:
        self._settings = settings
        self._sign = sign
        self._ssl = ssl

    async def ask(
        self,
        address: str,
        code: int,
        fields: Mapping[str, str] | None = None,
        *,
        timeout_ms: int = CALL_MS,
    ) -> Response:
        """The response of a broker."""
        peer = Peer(address, sign=self._sign, ssl=self._ssl)
        try:
            return await peer.call(code, fields or {}, timeout_ms=timeout_ms)
        finally:
            await peer.close()

    async def log_begin(self, address: str) -> int:
        """Where the log of a master begins; 0 if the master's address is not known.

        Raises PenstockError if the master does not say it, as Apache's during its first second:
        from an offset that it has deleted, it would send heartbeats for ever.
        """
        if not address:
            return 0
        table = await self._runtime_info(address)
        return max(parse_long(table.get("commitLogMinOffset", "")) or 0, 0)

    async def describe(self, address: str) -> OtherReplica:
        """What the broker at an address is."""
        table = await self._runtime_info(address)
        broker = self._settings.current.broker
        names = table.get("penstockClusterName"), table.get("penstockBrokerName")
        return OtherReplica(
            ours=names == (broker.cluster, broker.name),
            role=table.get("penstockRole", ""),
            epoch=parse_long(table.get("penstockEpoch", "")) or 0,
        )

    async def ha_address(self, address: str) -> str:
        """The HA address of the master at an address; empty if it is not a master of this broker.

        An Apache master does not tell its name.
        """
        answer = await self.ask(address, RequestCode.EXCHANGE_BROKER_HA_INFO)
        _check(answer)
        name = answer.ext.get("brokerName", self._settings.current.broker.name)
        ours = name == self._settings.current.broker.name
        return answer.ext.get("masterHaAddress", "") if ours else ""

    async def _runtime_info(self, address: str) -> Mapping[str, str]:
        answer = await self.ask(address, RequestCode.GET_BROKER_RUNTIME_INFO)
        _check(answer)
        return fastjson.decode(answer.body, KVTable).table


def _check(answer: Response) -> None:
    if answer.code != ResponseCode.SUCCESS:
        raise ReplicationError(f"another replica refuses to tell its state: {answer.remark}")
