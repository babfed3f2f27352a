"""Living replicas that controllers share: what a report that is gone says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

from penstock.controller.broker_set import BrokerSet, Heartbeat, LiveReplica, ReplicaRecord
from penstock.server.controller.etcd.controller_lease import TTL_S, ControllerLease
from penstock.server.controller.etcd.etcd_client import EtcdClient
from penstock.server.controller.etcd.etcd_keys import Keys
from penstock.server.controller.etcd.etcd_messages import KeyValue
from penstock.server.controller.etcd.reported_liveness import ReportedLiveness
from penstock.server.controller.etcd.reports import Reports
from penstock.server.controller.etcd.view import View
from penstock.server.controller.liveness import GRACE_MS, TICK_MS
from penstock.server.controller.living_replicas import ReplicaKey
from penstock.testing.virtual_clock import VirtualClock

from .etcd_model import EtcdModel

KEYS = Keys("/p/")
NAME = "b"
FIRST = ReplicaKey(NAME, 1)
STATE = BrokerSet("c", NAME, {1: ReplicaRecord("h:1", "")}, 2)
TIMEOUT_MS = 3_000
OWN, OTHER = 1, 2


class Fixture:
    """One controller; what another one reports is written into its view."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.etcd = EtcdModel()
        client = cast(EtcdClient, self.etcd)
        self.view = View(KEYS, OWN)
        self.lease = ControllerLease(client, self.clock)
        reports = Reports(client, KEYS, self.view, self.lease, self.clock, own=OWN)
        self.liveness = ReportedLiveness(self.clock, reports, self.view, self.lease)
        work = (self.lease.run(), self.liveness.report_deaths())
        self.tasks = [asyncio.ensure_future(one) for one in work]
        self.view.learn(KeyValue(KEYS.broker_set(NAME), STATE.encode(), 1, 1))
        self._revision = 1

    def heartbeat(self) -> None:
        self.liveness.heartbeat(Heartbeat(NAME, 1, "h:1", LiveReplica(), TIMEOUT_MS, 1))

    def report(self) -> None:
        """The other controller reports the replica."""
        self._revision += 1
        self.view.changed(KeyValue(KEYS.report(FIRST, OTHER), b"{}", mod_revision=self._revision))

    def report_expires(self, *, late: bool = False) -> None:
        self._revision += 1
        kv = KeyValue(KEYS.report(FIRST, OTHER), mod_revision=self._revision)
        self.view.deleted(kv, late=late)

    async def elapse(self, ms: int) -> None:
        for _ in range(0, ms, TICK_MS):
            await self.clock.elapse(TICK_MS)
            self.liveness.tick()

    def deaths(self) -> int:
        count = 0
        while not self.liveness.deaths.empty():
            self.liveness.deaths.get_nowait()
            count += 1
        return count


def run(main: Callable[[Fixture], Coroutine[Any, Any, None]]) -> None:
    async def with_fixture() -> None:
        fixture = Fixture()
        await fixture.elapse(GRACE_MS)
        try:
            await main(fixture)
        finally:
            for task in fixture.tasks:
                task.cancel()
            await fixture.liveness.close()

    asyncio.run(with_fixture())


def test_a_replica_whose_last_report_expires_may_be_dead() -> None:
    async def main(f: Fixture) -> None:
        f.report()
        f.report_expires()
        await f.elapse(TICK_MS)
        assert f.deaths() == 1
        assert f.liveness.is_dead(FIRST)

    run(main)


def test_a_replica_that_others_heard_is_not_dead_after_an_interruption() -> None:
    async def main(f: Fixture) -> None:
        f.heartbeat()
        f.report()
        await f.elapse(TIMEOUT_MS + TICK_MS)  # this controller has lost it
        assert f.deaths() == 1
        f.view.interruptions += 1
        f.report_expires(late=True)  # perhaps the other one did not reach etcd either
        await f.elapse(GRACE_MS - TICK_MS)
        assert not f.liveness.is_dead(FIRST)
        await f.elapse(2 * TICK_MS)
        assert f.liveness.is_dead(FIRST)
        assert not f.deaths()

    run(main)


def test_a_replica_that_nobody_heard_stays_dead_during_an_interruption() -> None:
    async def main(f: Fixture) -> None:
        f.heartbeat()
        await f.elapse(TIMEOUT_MS + TICK_MS)
        f.view.interruptions += 1
        await f.elapse(TICK_MS)
        assert f.liveness.is_dead(FIRST)

    run(main)


def test_a_watch_that_goes_on_after_the_lease_was_not_renewed_kills_nobody() -> None:
    async def main(f: Fixture) -> None:
        f.report()
        f.etcd.down = True
        await f.elapse(TTL_S * 1000 + 1_000)
        assert f.liveness.isolated()
        f.etcd.down = False
        await f.elapse(1_000)
        assert not f.liveness.isolated()
        f.report_expires()
        await f.elapse(TICK_MS)
        assert not f.deaths()
        assert not f.liveness.is_dead(FIRST)
        await f.elapse(GRACE_MS)
        assert f.liveness.is_dead(FIRST)

    run(main)


def test_a_report_that_expires_before_an_outage_of_etcd_is_noticed_kills_nobody() -> None:
    """The lease of the other controller ends first, because it was renewed first."""

    async def main(f: Fixture) -> None:
        f.report()
        f.etcd.down = True
        await f.elapse(TTL_S * 1000 - 1_000)
        assert not f.liveness.isolated()
        f.report_expires()
        await f.elapse(TICK_MS)
        assert f.deaths() == 1
        await f.elapse(2_000)
        assert f.liveness.isolated()
        assert not f.liveness.is_dead(FIRST)
        f.etcd.down = False
        await f.elapse(GRACE_MS - TICK_MS)
        assert not f.liveness.is_dead(FIRST)

    run(main)
