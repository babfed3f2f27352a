"""The last heartbeats that a controller got, by replica.

Times are of a clock that is never set. Only the connection that carried the newest heartbeat of a
replica says something about it: an older one may be closed at any time, because the broker has
connected again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from penstock.controller.broker_set import LiveReplica, Living
from penstock.errors import SystemBusy
from penstock.rpc.answers import ClientId

REPLICAS_MAX = 100_000
"""Most replicas in the table, because anybody may send heartbeats."""


class ReplicaKey(NamedTuple):
    """A replica of a broker set."""

    name: str
    replica_id: int

    def __str__(self) -> str:
        return f"replica {self.replica_id} of {self.name}"


@dataclass(slots=True)
class Heartbeats:
    """What is known of a replica that sends heartbeats."""

    key: ReplicaKey
    address: str
    live: LiveReplica
    timeout_ms: int
    until_ms: int
    client: ClientId
    reachable: bool = False
    """This controller has been able to connect to its address."""


class LivingReplicas:
    """The replicas that have sent heartbeats in time."""

    def __init__(self) -> None:
        self._sets: dict[str, dict[int, Heartbeats]] = {}
        self._by_client: dict[ClientId, set[ReplicaKey]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def find(self, key: ReplicaKey) -> Heartbeats | None:
        return self._sets.get(key.name, {}).get(key.replica_id)

    def note(self, heartbeat: Heartbeats) -> Heartbeats | None:
        """Note a heartbeat; returns what was known of the replica before, None if nothing."""
        key = heartbeat.key
        before = self.find(key)
        if before is None:
            if self._count >= REPLICAS_MAX:
                raise SystemBusy.over(
                    "replicas", figure=self._count, limit=REPLICAS_MAX, unit="replicas"
                )
            self._count += 1
        elif before.client != heartbeat.client:
            self._leave_client(before)
        if before is None or before.client != heartbeat.client:
            self._by_client.setdefault(heartbeat.client, set()).add(key)
        if before is not None and before.address == heartbeat.address:
            heartbeat.reachable = before.reachable
        self._sets.setdefault(key.name, {})[key.replica_id] = heartbeat
        return before

    def of_client(self, client: ClientId) -> list[Heartbeats]:
        """The replicas whose newest heartbeat came over this connection."""
        keys = self._by_client.get(client, ())
        return [found for key in keys if (found := self.find(key)) is not None]

    def of(self, name: str) -> Living:
        """The living replicas of a broker set."""
        return {one: found.live for one, found in self._sets.get(name, {}).items()}

    def remove(self, heartbeat: Heartbeats) -> None:
        """A replica is dead, unless another connection has carried a newer heartbeat."""
        key = heartbeat.key
        found = self.find(key)
        if found is None or found.client != heartbeat.client:
            return
        self._leave_client(found)
        del self._sets[key.name][key.replica_id]
        if not self._sets[key.name]:
            del self._sets[key.name]
        self._count -= 1

    def expired(self, now_ms: int) -> list[Heartbeats]:
        """Remove and return the replicas whose time is over."""
        dead = [
            found
            for replicas in self._sets.values()
            for found in replicas.values()
            if found.until_ms <= now_ms
        ]
        for found in dead:
            self.remove(found)
        return dead

    def postpone(self, ms: int) -> None:
        """This controller did not run for a while: give all replicas that time."""
        for replicas in self._sets.values():
            for found in replicas.values():
                found.until_ms += ms

    def _leave_client(self, found: Heartbeats) -> None:
        keys = self._by_client.get(found.client)
        if keys is not None:
            keys.discard(found.key)
            if not keys:
                del self._by_client[found.client]
