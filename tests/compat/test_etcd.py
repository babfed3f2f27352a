"""The controller's store and liveness over a real etcd of three members, with failures."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from penstock.controller.broker_set import (
    BrokerSet,
    Heartbeat,
    LiveReplica,
    ReplicaRecord,
)
from penstock.errors import EtcdError
from penstock.server.controller.etcd import etcd_watch as watch_module
from penstock.server.controller.living_replicas import ReplicaKey
from tests.client.proxy import Proxy
from tests.depth import rounds
from tests.integration.test_controller import NAME as BROKER
from tests.integration.test_controller import controller as listening_controller
from tests.integration.test_controller import join, until_master, until_told
from tests.integration.toy_broker import ToyBroker, describe

from .etcd_cluster import EtcdCluster
from .etcd_controllers import WAIT_S, BareController, LossyProxy, controller, until

pytestmark = [pytest.mark.compat, pytest.mark.slow]

DECISIONS = rounds(ci=100, proof=2_000)
FAULTS = rounds(ci=1, proof=10)
TIMEOUT_MS = 2_000


@pytest.fixture(scope="module")
def etcd(go_tool: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture
def prefix() -> str:
    return f"/test-{uuid.uuid4().hex}/"


async def count_often(controllers: list[BareController], name: str, decisions: int) -> None:
    async def work(one: BareController) -> None:
        for _ in range(decisions):
            await one.count(name)

    await asyncio.gather(*map(work, controllers))


# --- decisions


def test_two_controllers_race_and_every_decision_counts_once(
    etcd: EtcdCluster, prefix: str
) -> None:
    async def main() -> None:
        async with (
            controller(etcd.endpoints, 1, etcd_prefix=prefix) as one,
            controller(etcd.endpoints, 2, etcd_prefix=prefix) as two,
        ):
            await count_often([one, two], "b", DECISIONS // 2)
            assert await one.counted("b") == await two.counted("b") == DECISIONS // 2 * 2
            await until(lambda: one.store.last_seen("b") == two.store.last_seen("b"), "same view")

    asyncio.run(main())


def test_decisions_whose_answers_are_lost_count_once(etcd: EtcdCluster, prefix: str) -> None:
    async def main() -> None:
        async with (
            LossyProxy(etcd.endpoint(0), lost=0.2, seed=1) as first,
            LossyProxy(etcd.endpoint(1), lost=0.2, seed=2) as second,
            controller(f"{first.address},{second.address}", 1, etcd_prefix=prefix) as one,
            controller(f"{second.address},{first.address}", 2, etcd_prefix=prefix) as two,
        ):
            await count_often([one, two], "b", DECISIONS // 2)
            assert first.cuts + second.cuts > DECISIONS // 10
            assert await one.counted("b") == DECISIONS // 2 * 2

    asyncio.run(main())


def test_decisions_go_on_when_the_leader_is_killed(etcd: EtcdCluster, prefix: str) -> None:
    async def main() -> None:
        async with (
            controller(etcd.endpoints, 1, etcd_prefix=prefix) as one,
            controller(etcd.endpoints, 2, etcd_prefix=prefix) as two,
        ):
            for number in range(FAULTS):
                name = f"b{number}"
                work = asyncio.ensure_future(count_often([one, two], name, DECISIONS // 2))
                await until(lambda name=name: one.store.last_seen(name) is not None, "begun")
                leader = await asyncio.to_thread(etcd.leader)
                etcd.kill(leader)
                await work
                await asyncio.to_thread(etcd.start, leader)
                assert await two.counted(name) == DECISIONS // 2 * 2

    asyncio.run(main())


def test_a_stopped_member_is_left(etcd: EtcdCluster, prefix: str) -> None:
    """And a write that it holds does not take effect a second time when it goes on."""

    async def main() -> None:
        async with controller(etcd.endpoints, etcd_prefix=prefix) as one:
            await one.count("b")
            etcd.stop(0)
            try:
                await count_often([one], "b", 9)
            finally:
                etcd.resume(0)
            assert await one.counted("b") == 10
            await asyncio.to_thread(etcd.call, "/v3/maintenance/status", {}, 0)
            assert await one.counted("b") == 10

    asyncio.run(main())


def test_without_a_majority_nothing_is_decided(
    etcd: EtcdCluster, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with controller(etcd.endpoints, etcd_prefix=prefix) as one:
            await one.count("b")
            monkeypatch.setattr(one.backend.client, "_call_ms", 500)
            for member in (1, 2):
                etcd.stop(member)
            try:
                with pytest.raises(EtcdError):
                    await one.count("b")
            finally:
                for member in (1, 2):
                    etcd.resume(member)
            monkeypatch.setattr(one.backend.client, "_call_ms", 10_000)
            # The one whose outcome is unknown has counted, or not.
            before = await one.counted("b")
            await one.count("b")
            assert before in (1, 2)
            assert await one.counted("b") == before + 1

    asyncio.run(main())


# --- living replicas


def broker_set() -> BrokerSet:
    replicas = {one: ReplicaRecord(f"127.0.0.1:{one}", "") for one in (1, 2)}
    return BrokerSet("c", "b", replicas, 3, 1, 1, (1, 2), 1)


class Heartbeats:
    """Sends heartbeats of replicas to controllers, every 200 ms."""

    def __init__(self, *controllers: BareController) -> None:
        self._controllers = controllers
        self.alive = {1, 2}

    async def __aenter__(self) -> Heartbeats:
        self._task = asyncio.ensure_future(self._send())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _send(self) -> None:
        while True:
            for one in self.alive:
                beat = Heartbeat("b", one, f"127.0.0.1:{one}", LiveReplica(), TIMEOUT_MS, one)
                for hearing in self._controllers:
                    hearing.states.heartbeat(beat)
            await asyncio.sleep(0.2)


def test_a_silent_master_is_replaced_once(etcd: EtcdCluster, prefix: str) -> None:
    """Two controllers see that its lease has expired; one of them decides."""

    async def main() -> None:
        async with (
            controller(etcd.endpoints, 1, elections=True, etcd_prefix=prefix) as one,
            controller(etcd.endpoints, 2, elections=True, etcd_prefix=prefix) as two,
        ):
            assert await one.store.replace("b", broker_set(), 0)
            await until(lambda: two.store.last_seen("b") is not None, "both know the set")
            async with Heartbeats(one, two) as heartbeats:
                both = {ReplicaKey("b", 1), ReplicaKey("b", 2)}
                await until(lambda: set(one.backend.view.reports) == both, "both are reported")
                await until(lambda: set(two.backend.view.reports) == both, "both are reported")
                heartbeats.alive.discard(1)

                def elected() -> bool:
                    states = [each.store.last_seen("b") for each in (one, two)]
                    return all(state and state.master_id == 2 for state in states)

                await until(elected, "replica 2 is the master")
            state = one.store.last_seen("b")
            assert state is not None
            assert (state.master_epoch, state.in_sync, len(state.history)) == (2, (2,), 1)
            assert one.states.elections + two.states.elections == 1

    asyncio.run(main())


def test_a_replica_lives_while_any_controller_hears_from_it(etcd: EtcdCluster, prefix: str) -> None:
    """Even if that one can't be reached by the others, until its lease is over."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            one, two = [
                await stack.enter_async_context(
                    controller(etcd.endpoints, number, elections=True, etcd_prefix=prefix)
                )
                for number in (1, 2)
            ]
            assert await one.store.replace("b", broker_set(), 0)
            await until(lambda: two.store.last_seen("b") is not None, "both know the set")
            async with Heartbeats(one):
                reports = two.backend.view.reports
                await until(lambda: len(reports) == 2, "the other one knows of them")
                await asyncio.sleep(TIMEOUT_MS / 1000 + 1)
                assert sorted(await two.liveness.living("b")) == [1, 2]
            # The controller dies: its lease is not renewed.
            for task in one.backend._tasks:
                task.cancel()
            await until(lambda: not two.backend.view.reports, "its reports have expired")
            assert await two.liveness.living("b") == {}

    asyncio.run(main())


def test_all_controllers_know_the_new_master_and_one_tells_the_replicas(
    etcd: EtcdCluster, prefix: str, tmp_path: Path
) -> None:
    """The process of the master ends; its timeout is too long to be the reason."""

    async def main() -> None:
        async with AsyncExitStack() as stack:
            settings = {"etcd": etcd.endpoints, "etcd_prefix": prefix}
            one, two = [
                await stack.enter_async_context(listening_controller(tmp_path, **settings))
                for _ in range(2)
            ]
            first, second, third = [
                await stack.enter_async_context(ToyBroker(BROKER, [one, two], timeout_ms=600_000))
                for _ in range(3)
            ]
            await join(first, second, third)
            await first.end()
            async with asyncio.timeout(WAIT_S):
                while (found := await describe(one, BROKER))["masterEpoch"] < 2:
                    await asyncio.sleep(0.01)
            master = second if found["masterBrokerId"] == second.id else third
            assert found == await until_master(two, master, 2)
            assert found["electionHistory"][-1]["reason"].startswith("replica 1 is dead")
            for broker in (second, third):
                await until_told(broker, 2)
                assert len([one for one in broker.told if one["masterEpoch"] == "2"]) == 1

    asyncio.run(main())


# --- the watch


def test_the_watch_goes_on_after_an_interruption_and_a_compaction(
    etcd: EtcdCluster, prefix: str
) -> None:
    async def main() -> None:
        async with (
            Proxy(etcd.endpoint(0)) as proxy,
            controller(proxy.address, 1, etcd_prefix=prefix) as watching,
            controller(etcd.endpoints, 2, etcd_prefix=prefix) as other,
        ):
            watch = watching.backend.watch
            await other.count("a")
            await until(lambda: watching.store.last_seen("a") is not None, "the watch works")
            assert proxy.cut()
            await other.count("b")
            await until(lambda: watching.store.last_seen("b") is not None, "it goes on")
            assert watch.resyncs == 1

            proxy.refusing = True
            proxy.cut()
            await other.count("a")
            await other.count("c")
            version = (await other.store.read("c")).version
            await asyncio.to_thread(etcd.call, "/v3/kv/compaction", {"revision": str(version)})
            proxy.refusing = False
            await until(lambda: watching.store.last_seen("c") is not None, "everything was read")
            state = watching.store.last_seen("a")
            assert state is not None
            assert (state.next_id, watch.resyncs) == (2, 2)

    asyncio.run(main())


def test_a_watch_that_reports_nothing_is_replaced(
    etcd: EtcdCluster, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream stays open at a member that is stopped."""
    monkeypatch.setattr(watch_module, "TICK_MS", 300)

    async def main() -> None:
        async with (
            Proxy(etcd.endpoint(0)) as proxy,
            controller(f"{proxy.address},{etcd.endpoint(1)}", 1, etcd_prefix=prefix) as watching,
            controller(etcd.endpoints, 2, etcd_prefix=prefix) as other,
        ):
            proxy.stall()
            await other.count("b")
            await until(lambda: watching.store.last_seen("b") is not None, "seen elsewhere")
            assert watching.backend.watch.resyncs == 2
            proxy.flow()

    asyncio.run(main())
