"""Living replicas in etcd: keys, leases, and what a controller sends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from penstock.controller.broker_set import BrokerSet, Heartbeat, LiveReplica, ReplicaRecord
from penstock.server.controller.etcd.client import EtcdClient
from penstock.server.controller.etcd.keys import Keys
from penstock.server.controller.etcd.leases import OFFSETS_MS, RENEWALS_MAX, WINDOW_MS, Leases
from penstock.server.controller.etcd.messages import KeyValue
from penstock.server.controller.etcd.view import View
from penstock.server.controller.living_replicas import ReplicaKey
from penstock.testing.clock import VirtualClock

from . import etcd_model
from .etcd_model import EtcdModel

KEYS = Keys("/p/")
NAME = "b"
FIRST = ReplicaKey(NAME, 1)
STATE = BrokerSet("c", NAME, {1: ReplicaRecord("h:1", ""), 2: ReplicaRecord("h:2", "")}, 3)


class Fixture:
    """Controllers over one etcd."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.etcd = EtcdModel()
        self.tasks: list[asyncio.Task[None]] = []
        self.leases, self.view = self.controller("one:1")

    def controller(self, address: str) -> tuple[Leases, View]:
        view = View(KEYS)
        view.learn(KeyValue(KEYS.broker_set(NAME), STATE.encode(), 1, 1))
        client = cast(EtcdClient, self.etcd)
        leases = Leases(client, KEYS, view, self.clock, address=address)
        self.tasks.append(asyncio.ensure_future(leases.run()))
        return leases, view

    def heartbeat(self, client: int = 1, replica_id: int = 1, **live: int) -> Heartbeat:
        return Heartbeat(NAME, replica_id, "h:1", LiveReplica(**live), 3_000, client)

    async def send(self, heartbeat: Heartbeat | None = None) -> list[str]:
        """Send a heartbeat; the calls that it causes."""
        self.etcd.calls.clear()
        self.leases.heartbeat(heartbeat or self.heartbeat())
        await self.clock.elapse(WINDOW_MS)
        return list(self.etcd.calls)


def run(main: Callable[[Fixture], Coroutine[Any, Any, None]]) -> None:
    async def with_fixture() -> None:
        fixture = Fixture()
        try:
            await main(fixture)
        finally:
            for task in fixture.tasks:
                task.cancel()
            await fixture.leases.close()

    asyncio.run(with_fixture())


def test_the_first_heartbeat_creates_a_key_with_a_lease() -> None:
    async def main(f: Fixture) -> None:
        assert await f.send(f.heartbeat(epoch=3)) == ["/v3/lease/grant", "/v3/kv/txn"]
        assert (await f.leases.of(NAME))[1].epoch == 3
        assert f.view.replicas[FIRST].lease in f.etcd.leases

    run(main)


def test_a_lost_answer_creates_one_key() -> None:
    async def main(f: Fixture) -> None:
        for path in ("/v3/kv/txn", "/v3/lease/grant"):
            f.etcd.lose_answer(path)
        await f.send()
        assert len(f.etcd.leases) == 1
        assert f.view.replicas[FIRST].lease in f.etcd.leases

    run(main)


def test_heartbeats_of_unknown_replicas_create_nothing() -> None:
    async def main(f: Fixture) -> None:
        assert await f.send(f.heartbeat(replica_id=3)) == []
        other = Heartbeat("other", 1, "h:1", LiveReplica(), 3_000, 1)
        assert await f.send(other) == []

    run(main)


def test_a_lease_is_renewed_at_a_third_of_its_time() -> None:
    async def main(f: Fixture) -> None:
        await f.send()
        assert await f.send() == []
        await f.clock.elapse(2_000 // 3)
        assert await f.send() == ["/v3/lease/keepalive"]
        assert await f.send() == []

    run(main)


def test_renewals_are_sent_together() -> None:
    async def main(f: Fixture) -> None:
        for number in (1, 2):
            await f.send(f.heartbeat(replica_id=number))
        await f.clock.elapse(1_000)
        f.leases.heartbeat(f.heartbeat(replica_id=1))
        assert await f.send(f.heartbeat(replica_id=2)) == ["/v3/lease/keepalive"]

    run(main)


def test_renewals_that_the_gateway_has_not_read_are_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(etcd_model, "GATEWAY_BYTES", 30)

    async def main(f: Fixture) -> None:
        for number in (1, 2):
            await f.send(f.heartbeat(replica_id=number))
        await f.clock.elapse(1_000)
        f.leases.heartbeat(f.heartbeat(replica_id=1))
        await f.send(f.heartbeat(replica_id=2))
        await f.clock.elapse(WINDOW_MS)
        assert f.etcd.calls == ["/v3/lease/keepalive"] * 2
        await f.clock.elapse(WINDOW_MS)
        assert len(f.etcd.calls) == 2

    run(main)


def test_a_request_with_renewals_is_short_enough() -> None:
    one = b'{"ID":"%d"}' % ((1 << 63) - 1)
    assert len(one) * RENEWALS_MAX <= etcd_model.GATEWAY_BYTES


def test_an_expired_lease_is_replaced() -> None:
    async def main(f: Fixture) -> None:
        await f.send()
        lease = f.view.replicas[FIRST].lease
        f.etcd.expire(lease)
        await f.clock.elapse(1_000)
        assert await f.send() == ["/v3/lease/keepalive"]  # the watch has not reported it yet
        assert f.view.gone.get_nowait() == FIRST
        assert await f.send() == ["/v3/lease/grant", "/v3/kv/txn"]
        assert f.view.replicas[FIRST].lease != lease

    run(main)


def test_controllers_share_the_lease_of_a_replica() -> None:
    async def main(f: Fixture) -> None:
        await f.send()
        lease = f.view.replicas[FIRST].lease
        other, view = f.controller("two:1")
        other.heartbeat(f.heartbeat())
        await f.clock.elapse(WINDOW_MS)
        assert view.replicas[FIRST].lease == lease
        assert f.etcd.leases == {lease}

    run(main)


def test_what_matters_for_elections_is_written_at_once() -> None:
    async def main(f: Fixture) -> None:
        await f.send(f.heartbeat(epoch=1, max_offset=5))
        assert await f.send(f.heartbeat(epoch=1, max_offset=6)) == []
        assert await f.send(f.heartbeat(epoch=2, max_offset=6)) == ["/v3/kv/txn"]
        assert (await f.leases.of(NAME))[1] == LiveReplica(epoch=2, max_offset=6)
        await f.clock.elapse(OFFSETS_MS)
        assert "/v3/kv/txn" in await f.send(f.heartbeat(epoch=2, max_offset=7))
        assert (await f.leases.of(NAME))[1].max_offset == 7

    run(main)


def test_a_write_that_failed_is_repeated() -> None:
    async def main(f: Fixture) -> None:
        await f.send(f.heartbeat(client=1))
        f.etcd.down = True
        await f.send(f.heartbeat(client=2))
        f.etcd.down = False
        assert "/v3/kv/txn" in await f.send(f.heartbeat(client=2))

    run(main)


def test_a_key_that_was_deleted_is_not_written_again_but_created() -> None:
    async def main(f: Fixture) -> None:
        await f.send(f.heartbeat(epoch=1))
        f.etcd.delete(KEYS.replica(FIRST))
        await f.send(f.heartbeat(epoch=2))
        assert await f.leases.of(NAME) == {}

    run(main)


def test_a_replica_is_forgotten_unless_somebody_has_heard_from_it() -> None:
    async def main(f: Fixture) -> None:
        await f.send(f.heartbeat(client=1))
        revision = await f.leases.revision(FIRST)
        other, _ = f.controller("two:1")
        other.heartbeat(f.heartbeat(client=1))
        await f.clock.elapse(WINDOW_MS)  # it finds the key
        other.heartbeat(f.heartbeat(client=2))
        await f.clock.elapse(WINDOW_MS)
        assert not await f.leases.forget(FIRST, revision)
        assert sorted(await f.leases.of(NAME)) == [1]
        f.etcd.lose_answer("/v3/kv/txn")
        assert await f.leases.forget(FIRST, await f.leases.revision(FIRST))
        assert await f.leases.of(NAME) == {}
        assert FIRST not in f.view.replicas
        assert await f.leases.forget(FIRST, 0)

    run(main)
