"""Living replicas of several controllers: by leases in etcd, and by the own heartbeats.

A replica is alive if its key exists, or if this controller has got a heartbeat in time: then the
key is about to be created. When a key is deleted, its replica may have to be replaced, unless this
controller hears from it. Before a decision the keys are read again, so an old view kills nobody.

While the watch is interrupted, keys may expire because controllers can't reach etcd. So a key that
is gone afterwards says nothing: the controller behaves as after its start.
"""

from __future__ import annotations

import asyncio
import logging

from penstock.clock import Clock
from penstock.controller.broker_set import Heartbeat, Living
from penstock.rpc.answers import ClientId
from penstock.server.controller.etcd.leases import Leases
from penstock.server.controller.etcd.view import View
from penstock.server.controller.liveness import Death, LocalLiveness
from penstock.server.controller.living_replicas import ReplicaKey

log = logging.getLogger(__name__)

NOT_HEARD = "no controller gets its heartbeats"


class LeaseLiveness:
    """A `Liveness` that controllers share."""

    def __init__(self, clock: Clock, leases: Leases, view: View) -> None:
        self._leases = leases
        self._view = view
        self._interruptions = 0
        self._local = LocalLiveness(clock, leases)
        self.deaths: asyncio.Queue[Death] = self._local.deaths

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        self._local.heartbeat(heartbeat)
        self._leases.heartbeat(heartbeat)

    def disconnected(self, client: ClientId) -> None:
        self._local.disconnected(client)

    async def living(self, name: str) -> Living:
        found = await self._leases.of(name)
        return {**found, **self._local.last_seen(name)}  # own heartbeats are newer

    def last_seen(self, name: str) -> Living:
        state = self._view.states.get(name)
        local = self._local.last_seen(name)
        if state is None:
            return local
        shared = {
            one: found.value.live
            for one in state[1].replicas
            if (found := self._view.replicas.get(ReplicaKey(name, one))) is not None
        }
        return {**shared, **local}

    def is_alive(self, key: ReplicaKey) -> bool:
        return key in self._view.replicas or self._local.is_alive(key)

    def is_dead(self, key: ReplicaKey) -> bool:
        return self._local.is_dead(key)

    def why_dead(self, key: ReplicaKey) -> str:
        return self._local.why_dead(key)

    def suspect(self, key: ReplicaKey, address: str) -> None:
        self._local.suspect(key, address)

    def tick(self) -> None:
        if self._interruptions != self._view.interruptions:
            self._interruptions = self._view.interruptions
            self._local.begin_grace()
        self._local.tick()

    def count(self) -> int:
        return len(self._view.replicas)

    async def report_deaths(self) -> None:
        """Report replicas whose keys were deleted, until cancelled."""
        while True:
            key = await self._view.gone.get()
            if not self._local.is_alive(key):
                self._leases.forget_upkeep(key)
                self._local.died(key, NOT_HEARD)

    async def close(self) -> None:
        await self._local.close()
        await self._leases.close()
