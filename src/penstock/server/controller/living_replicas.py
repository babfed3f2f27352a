"""Which replicas are alive, by their heartbeats."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.controller.broker_set import LiveReplica, Living
from penstock.rpc.answers import ClientId

LOST_MS = 1_500
"""A replica whose connection is closed has this long for its next heartbeat. One that was killed is
found soon, and one that only reconnects is not taken for dead: heartbeats come every second."""


@dataclass(slots=True)
class _Heartbeat:
    live: LiveReplica
    until_ms: int
    client: ClientId


class LivingReplicas:
    """The last heartbeats of all replicas. Times are of a clock that is never set."""

    def __init__(self) -> None:
        self._sets: dict[str, dict[int, _Heartbeat]] = {}

    def heartbeat(
        self, name: str, replica_id: int, live: LiveReplica, until_ms: int, client: ClientId
    ) -> bool:
        """Note a heartbeat; returns whether the replica was not alive before."""
        replicas = self._sets.setdefault(name, {})
        new = replica_id not in replicas
        replicas[replica_id] = _Heartbeat(live, until_ms, client)
        return new

    def disconnected(self, client: ClientId, now_ms: int) -> None:
        """Expect the next heartbeat of the replica that used a connection soon."""
        for replicas in self._sets.values():
            for heartbeat in replicas.values():
                if heartbeat.client == client:
                    heartbeat.until_ms = min(heartbeat.until_ms, now_ms + LOST_MS)

    def of(self, name: str) -> Living:
        """The living replicas of a broker set."""
        return {one: heartbeat.live for one, heartbeat in self._sets.get(name, {}).items()}

    def expire(self, now_ms: int) -> list[tuple[str, int]]:
        """Remove replicas whose time is over; returns their names and ids."""
        dead = [
            (name, one)
            for name, replicas in self._sets.items()
            for one, heartbeat in replicas.items()
            if heartbeat.until_ms <= now_ms
        ]
        for name, one in dead:
            del self._sets[name][one]
            if not self._sets[name]:
                del self._sets[name]
        return dead
