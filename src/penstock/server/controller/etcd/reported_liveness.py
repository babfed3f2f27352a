"""Living replicas of several controllers: by their reports in etcd, and by the own heartbeats.

A replica is alive if this controller gets its heartbeats, or another one reports it. When the last
report of another controller is deleted, the replica may have to be replaced, unless this one hears
from it. Before a decision the reports are read again, so an old view kills nobody.

While the watch is interrupted, reports may expire because controllers can't reach etcd. So a report
that is gone afterwards says nothing: the controller behaves as after its start. The same holds if
etcd has not confirmed this controller for longer than its lease. The watch may go on then as if
nothing had happened, and tell of reports that have expired meanwhile. It may also have told of them
shortly before this controller noticed that etcd does not answer: such deaths are forgotten.
"""

from __future__ import annotations

import asyncio

from penstock.clock import Clock
from penstock.controller.broker_set import Heartbeat, Living
from penstock.rpc.answers import ClientId
from penstock.server.controller.etcd.controller_lease import TTL_S, ControllerLease
from penstock.server.controller.etcd.reports import Reports
from penstock.server.controller.etcd.view import View
from penstock.server.controller.liveness import GRACE_MS, Death, LocalLiveness
from penstock.server.controller.living_replicas import ReplicaKey

NOT_HEARD = "no controller gets its heartbeats"


class ReportedLiveness:
    """A `Liveness` that controllers share. `report_deaths` is a task."""

    def __init__(self, clock: Clock, reports: Reports, view: View, lease: ControllerLease) -> None:
        self._reports = reports
        self._lease = lease
        self._view = view
        self._clock = clock
        self._interruptions = 0
        self._isolated_ms = clock.monotonic_ms() - GRACE_MS
        """When this controller was isolated last."""
        self._local = LocalLiveness(clock, reports)
        self.deaths: asyncio.Queue[Death] = self._local.deaths

    def heartbeat(self, heartbeat: Heartbeat) -> None:
        self._local.heartbeat(heartbeat)
        self._reports.heartbeat(heartbeat)

    def isolated(self) -> str:
        age_ms = self._lease.age_ms
        return f"etcd has not answered for {age_ms} ms" if age_ms > TTL_S * 1000 else ""

    def disconnected(self, client: ClientId) -> None:
        self._local.disconnected(client)

    async def living(self, name: str) -> Living:
        reported = await self._reports.of(name)
        return {**reported, **self._local.last_seen(name)}  # own heartbeats are newer

    def last_seen(self, name: str) -> Living:
        state = self._view.states.get(name)
        local = self._local.last_seen(name)
        if state is None:
            return local
        reported = {}
        for one in state[1].replicas:
            found = self._view.reports.get(ReplicaKey(name, one))
            if found:
                reported[one] = next(reversed(found.values())).value.live
        return {**reported, **local}

    def is_alive(self, key: ReplicaKey) -> bool:
        return self._local.is_alive(key) or key in self._view.reports

    def is_dead(self, key: ReplicaKey) -> bool:
        return self._local.is_dead(key)

    def why_dead(self, key: ReplicaKey) -> str:
        return self._local.why_dead(key)

    def suspect(self, key: ReplicaKey, address: str) -> None:
        self._local.suspect(key, address)

    def tick(self) -> None:
        self._local.heard_elsewhere(self._view.reports)
        if self.isolated():
            self._isolated_ms = self._clock.monotonic_ms()
            self._local.begin_grace()
            self._local.forget_deaths(NOT_HEARD)
        if self._interruptions != self._view.interruptions:
            self._interruptions = self._view.interruptions
            self._local.begin_grace()
        self._local.tick()

    def count(self) -> int:
        return len(self._view.reports.keys() | self._view.own_reports.keys())

    async def report_deaths(self) -> None:
        """Report replicas that no other controller reports any more, until cancelled."""
        while True:
            key = await self._view.gone.get()
            if not self._local.is_alive(key) and not self._was_isolated():
                self._local.died(key, NOT_HEARD)

    def _was_isolated(self) -> bool:
        """Whether others may have lost their leases while this controller did not reach etcd, and
        may not have reported again since."""
        now_ms = self._clock.monotonic_ms()
        return bool(self.isolated()) or now_ms - self._isolated_ms < GRACE_MS

    async def close(self) -> None:
        await self._local.close()
