"""Living replicas in etcd: what controllers report, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

from penstock.controller.broker_set import BrokerSet, Heartbeat, LiveReplica, ReplicaRecord
from penstock.errors import EtcdError
from penstock.server.controller.etcd.controller_lease import RENEW_MS, TTL_S, ControllerLease
from penstock.server.controller.etcd.etcd_client import EtcdClient
from penstock.server.controller.etcd.etcd_keys import Keys
from penstock.server.controller.etcd.etcd_messages import KeyValue
from penstock.server.controller.etcd.reported_liveness import ReportedLiveness
from penstock.server.controller.etcd.reports import OFFSETS_MS, RETRY_MS, WINDOW_MS, Reports
from penstock.server.controller.etcd.view import View
from penstock.server.controller.living_replicas import ReplicaKey
from penstock.testing.virtual_clock import VirtualClock

from .etcd_model import EtcdModel

KEYS = Keys("/p/")
NAME = "b"
FIRST = ReplicaKey(NAME, 1)
STATE = BrokerSet("c", NAME, {1: ReplicaRecord("h:1", ""), 2: ReplicaRecord("h:2", "")}, 3)
WRITE = ["/v3/kv/txn"]


def heartbeat(client: int = 1, replica_id: int = 1, **live: int) -> Heartbeat:
    return Heartbeat(NAME, replica_id, "h:1", LiveReplica(**live), 3_000, client)


class OneController:
    """The reports of a controller."""

    def __init__(self, etcd: EtcdModel, clock: VirtualClock, number: int) -> None:
        self.etcd, self.clock, self.number = etcd, clock, number
        self.view = View(KEYS, number)
        self.view.learn(KeyValue(KEYS.broker_set(NAME), STATE.encode(), 1, 1))
        client = cast(EtcdClient, etcd)
        self.lease = ControllerLease(client, clock)
        self.reports = Reports(client, KEYS, self.view, self.lease, clock, own=number)
        work = (self.lease.run(), self.reports.run())
        self.tasks = [asyncio.ensure_future(one) for one in work]

    async def send(self, beat: Heartbeat | None = None) -> list[str]:
        """Send a heartbeat; the calls that it causes."""
        self.etcd.calls.clear()
        self.reports.heartbeat(beat or heartbeat())
        await self.clock.elapse(WINDOW_MS)
        return list(self.etcd.calls)


class Fixture:
    """Two controllers over one etcd."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.etcd = EtcdModel()
        self.one = OneController(self.etcd, self.clock, 1)
        self.two = OneController(self.etcd, self.clock, 2)


def run(main: Callable[[Fixture], Coroutine[Any, Any, None]]) -> None:
    async def with_fixture() -> None:
        fixture = Fixture()
        await fixture.clock.elapse(0)
        try:
            await main(fixture)
        finally:
            for task in fixture.one.tasks + fixture.two.tasks:
                task.cancel()

    asyncio.run(with_fixture())


def test_a_replica_is_reported_once() -> None:
    async def main(f: Fixture) -> None:
        assert await f.one.send(heartbeat(epoch=3)) == WRITE
        assert await f.one.send(heartbeat(epoch=3)) == []
        assert (await f.two.reports.of(NAME))[1].epoch == 3
        assert FIRST in f.two.view.reports
        assert await f.one.reports.of(NAME) == {}  # the own reports are not news

    run(main)


def test_a_controller_that_does_not_reach_etcd_confirms_nobody() -> None:
    async def main(f: Fixture) -> None:
        one = f.one
        liveness = ReportedLiveness(f.clock, one.reports, one.view, one.lease)
        await f.clock.elapse(10 * RENEW_MS)
        assert liveness.isolated() == ""
        f.etcd.down = True
        await f.clock.elapse(TTL_S * 1000)
        assert liveness.isolated() == ""
        await f.clock.elapse(RENEW_MS)
        assert "etcd has not answered" in liveness.isolated()
        f.etcd.down = False
        await f.clock.elapse(RENEW_MS)
        assert liveness.isolated() == ""

    run(main)


def test_controllers_at_rest_renew_one_lease() -> None:
    async def main(f: Fixture) -> None:
        for number in (1, 2):
            await f.one.send(heartbeat(replica_id=number))
        f.etcd.calls.clear()
        for _ in range(3):
            await f.clock.elapse(RENEW_MS)
            for number in (1, 2):
                f.one.reports.heartbeat(heartbeat(replica_id=number))
        assert f.etcd.calls == ["/v3/lease/keepalive"] * 6

    run(main)


def test_several_reports_are_sent_together() -> None:
    async def main(f: Fixture) -> None:
        f.one.reports.heartbeat(heartbeat(replica_id=1))
        assert await f.one.send(heartbeat(replica_id=2)) == WRITE
        assert sorted(await f.two.reports.of(NAME)) == [1, 2]

    run(main)


def test_heartbeats_of_unknown_replicas_are_not_reported() -> None:
    async def main(f: Fixture) -> None:
        assert await f.one.send(heartbeat(replica_id=3)) == []
        other = Heartbeat("other", 1, "h:1", LiveReplica(), 3_000, 1)
        assert await f.one.send(other) == []

    run(main)


def test_what_matters_for_elections_is_written_at_once() -> None:
    async def main(f: Fixture) -> None:
        await f.one.send(heartbeat(epoch=1, max_offset=5))
        assert await f.one.send(heartbeat(epoch=1, max_offset=6)) == []
        assert await f.one.send(heartbeat(epoch=2, max_offset=6)) == WRITE
        assert (await f.two.reports.of(NAME))[1] == LiveReplica(epoch=2, max_offset=6)
        await f.clock.elapse(OFFSETS_MS)
        assert await f.one.send(heartbeat(epoch=2, max_offset=7)) == WRITE
        assert (await f.two.reports.of(NAME))[1].max_offset == 7
        assert await f.one.send(heartbeat(epoch=2, max_offset=8, complete=False)) == WRITE
        assert await f.one.send(heartbeat(epoch=2, max_offset=9, complete=False)) == WRITE

    run(main)


def test_the_newest_report_counts() -> None:
    async def main(f: Fixture) -> None:
        third = OneController(f.etcd, f.clock, 3)
        await f.clock.elapse(0)
        for reporting, epoch in ((f.one, 1), (f.two, 2), (f.one, 3)):
            await reporting.send(heartbeat(epoch=epoch))
            assert (await third.reports.of(NAME))[1].epoch == epoch
        for task in third.tasks:
            task.cancel()

    run(main)


def test_a_silent_replica_is_not_reported_any_more() -> None:
    async def main(f: Fixture) -> None:
        await f.one.send()
        await f.two.send()
        f.one.reports.lost(FIRST)
        await f.clock.elapse(WINDOW_MS)
        assert FIRST not in f.one.view.own_reports
        assert sorted(await f.one.reports.of(NAME)) == [1]  # the other one hears from it
        assert await f.one.send() == WRITE

    run(main)


def test_a_write_that_failed_is_repeated() -> None:
    async def main(f: Fixture) -> None:
        await f.one.send()
        f.etcd.down = True
        f.one.reports.lost(FIRST)
        await f.one.send(heartbeat(replica_id=2))
        f.etcd.down = False
        await f.clock.elapse(RETRY_MS + WINDOW_MS)
        assert FIRST not in f.one.view.own_reports
        assert await f.one.send(heartbeat(replica_id=2)) == WRITE

    run(main)


def test_a_replica_that_is_lost_during_a_write_that_fails_stays_lost() -> None:
    """Otherwise it counts as alive for as long as its controllers run."""

    async def main(f: Fixture) -> None:
        await f.one.send()

        def fail() -> None:
            f.one.reports.lost(FIRST)
            raise EtcdError("no answer")

        f.etcd.before.append(fail)
        await f.one.send(heartbeat(replica_id=2))
        await f.clock.elapse(RETRY_MS + WINDOW_MS)
        assert FIRST not in f.one.view.own_reports

    run(main)


def test_reports_end_with_the_lease_of_their_controller_and_are_written_again() -> None:
    async def main(f: Fixture) -> None:
        await f.one.send()
        f.etcd.expire(f.one.lease.id)
        assert await f.two.reports.of(NAME) == {}
        await f.clock.elapse(RENEW_MS)  # it finds that the lease is gone
        assert await f.one.send() == WRITE
        assert sorted(await f.two.reports.of(NAME)) == [1]

    run(main)


def test_a_lost_answer_gives_one_lease() -> None:
    async def main(f: Fixture) -> None:
        f.etcd.lose_answer("/v3/lease/grant")
        third = OneController(f.etcd, f.clock, 3)
        await f.clock.elapse(0)
        assert third.lease.id in f.etcd.leases
        assert len(f.etcd.leases) == 3
        await third.lease.close()
        assert len(f.etcd.leases) == 2
        for task in third.tasks:
            task.cancel()

    run(main)


def test_a_dead_replica_is_forgotten_by_all() -> None:
    async def main(f: Fixture) -> None:
        await f.one.send()
        await f.two.send()
        revision = await f.one.reports.revision(FIRST)
        f.etcd.lose_answer("/v3/kv/txn")
        assert await f.one.reports.forget(FIRST, revision)
        assert await f.two.reports.of(NAME) == await f.one.reports.of(NAME) == {}
        assert FIRST not in f.one.view.own_reports
        assert await f.one.reports.forget(FIRST, revision)

    run(main)


def test_a_replica_from_which_somebody_has_heard_since_is_not_forgotten() -> None:
    async def main(f: Fixture) -> None:
        await f.one.send(heartbeat(client=1))
        await f.two.send(heartbeat(client=1))
        revision = await f.one.reports.revision(FIRST)
        await f.two.send(heartbeat(client=1))
        assert await f.two.send(heartbeat(client=2)) == WRITE  # on a new connection
        assert not await f.one.reports.forget(FIRST, revision)
        assert sorted(await f.one.reports.of(NAME)) == [1]

    run(main)


def test_a_first_report_also_protects_a_replica() -> None:
    async def main(f: Fixture) -> None:
        await f.one.send()
        revision = await f.one.reports.revision(FIRST)
        await f.two.send()
        assert not await f.one.reports.forget(FIRST, revision)

    run(main)
