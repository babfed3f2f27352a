"""Brokers under a controller, in this process: election, failover, planned switch, lease."""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.broker import Broker
from penstock.client import AsyncAdmin
from penstock.errors import PeerError, WriteStopped
from penstock.server.replication import master_service
from penstock.server.replication.controlled_broker import INCOMPLETE, ControlledBroker
from penstock.server.replication.replication import Replication
from penstock.server.services.broker_service import BrokerService
from penstock.transport.peer import Peer
from penstock.wire.bodies.client_bodies import BrokerData
from penstock.wire.codes import ResponseCode
from tests.integration.failover_kit import ControlledSet, crash
from tests.integration.loops import Run, run  # noqa: F401
from tests.integration.test_broker_service import send
from tests.integration.test_replication import assert_equal, until


def test_a_slave_is_elected_when_the_master_fails(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    brokers = ControlledSet(tmp_path)

    async def body() -> None:
        async with brokers.running(3):
            await brokers.await_in_sync(3)
            first = await brokers.await_master()
            assert await brokers.send_to(first, 0) == ResponseCode.SUCCESS
            epoch = brokers.services[first].replication.epoch
            await crash(brokers.services.pop(first))
            second = await brokers.await_master(besides=first)
            assert brokers.services[second].replication.epoch == epoch + 1
            assert await brokers.send_to(second, 1) == ResponseCode.SUCCESS
            await brokers.start(first)
            master = await brokers.await_in_sync(3)
            assert brokers.services[first].broker.role.slave
            await assert_equal(master, brokers.services[first])

    run(body())


def test_a_master_without_enough_replicas_accepts_nothing(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    brokers = ControlledSet(tmp_path)

    async def body() -> None:
        async with brokers.running(2):
            number = await brokers.await_master()
            master = await brokers.await_in_sync(2)
            other = next(one for one in brokers.services if one != number)
            await crash(brokers.services.pop(other))
            await until(lambda: master._not_ready() is not None)
            assert await brokers.send_to(number, 0) == ResponseCode.SYSTEM_BUSY
            await brokers.start(other)
            await brokers.await_in_sync(2)
            assert await brokers.send_to(number, 1) == ResponseCode.SUCCESS

    run(body())


@pytest.mark.parametrize("promoted", [True, False], ids=["new master", "old master"])
def test_nothing_is_answered_before_the_replication_has_started(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Run,  # noqa: F811
    promoted: bool,
) -> None:
    """Otherwise a new master acknowledges messages that no replica has, and an old one refuses
    requests that it could forward."""
    brokers = ControlledSet(tmp_path)
    real_start = Replication.start

    async def body() -> None:
        async with brokers.running(3):
            await brokers.await_in_sync(3)
            old = await brokers.await_master()
            held, proceed = asyncio.Event(), asyncio.Event()

            async def start(self: Replication, broker: Broker, *others: Any) -> None:
                if broker.role.slave != promoted:
                    held.set()
                    await proceed.wait()
                await real_start(self, broker, *others)

            monkeypatch.setattr(Replication, "start", start)
            async with AsyncAdmin(f"127.0.0.1:{brokers.names.server.port}") as admin:
                slaves = [one for one in await admin.replicas() if not one.broker.is_master]
                plan = await admin.plan_promotion("broker-a", slaves[0].broker.id)
                promotion = asyncio.ensure_future(admin.promote(plan))
                await held.wait()
                number = brokers.master() if promoted else old
                assert number is not None
                sent = asyncio.ensure_future(brokers.send_to(number, 1))
                done, _ = await asyncio.wait({sent}, timeout=0.3)
                proceed.set()
                await promotion
                assert not done, f"a request was answered: {sent}"
                with contextlib.suppress(PeerError):
                    assert await sent in (ResponseCode.SUCCESS, ResponseCode.SYSTEM_BUSY)

    run(body())


def test_a_new_master_waits_for_its_replicas(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Run,  # noqa: F811
) -> None:
    """Producers try a refused send again at once, and give up after three attempts."""
    monkeypatch.setattr(master_service, "JOIN_MS", 60_000)
    brokers = ControlledSet(tmp_path)
    real_ask = ControlledBroker.ask_for_set

    async def body() -> None:
        async with brokers.running(3):
            await brokers.await_in_sync(3)
            asked: list[Callable[[], None]] = []
            first_asked = asyncio.Event()

            def ask(self: ControlledBroker, *arguments: Any) -> None:
                asked.append(lambda: real_ask(self, *arguments))
                first_asked.set()

            async with AsyncAdmin(f"127.0.0.1:{brokers.names.server.port}") as admin:
                slaves = [one for one in await admin.replicas() if not one.broker.is_master]
                plan = await admin.plan_promotion("broker-a", slaves[0].broker.id)
                monkeypatch.setattr(ControlledBroker, "ask_for_set", ask)
                promotion = asyncio.ensure_future(admin.promote(plan))
                await first_asked.wait()
                number = brokers.master()
                assert number is not None
                assert brokers.services[number]._not_ready() is not None
                sent = asyncio.ensure_future(brokers.send_to(number, 1))
                done, _ = await asyncio.wait({sent}, timeout=0.2)
                assert not done, f"the send was answered: {sent}"
                monkeypatch.setattr(ControlledBroker, "ask_for_set", real_ask)
                for proceed in asked:
                    proceed()
                assert await sent == ResponseCode.SUCCESS
                await promotion

    run(body())


@pytest.mark.parametrize("switch", ["promoted", "stopped"])
def test_the_route_always_has_a_master_in_a_planned_switch(
    tmp_path: Path,
    run: Run,  # noqa: F811
    switch: str,
) -> None:
    """A producer whose route has no master fails at once."""
    brokers = ControlledSet(tmp_path)
    seen: list[dict[int, str]] = []

    async def body() -> None:
        async with brokers.running(3):
            await brokers.await_in_sync(3)
            old = await brokers.await_master()
            routes = brokers.names.nameserver._routes
            await until(lambda: len(routes.broker_sets["broker-a"].broker_addrs) == 3)
            routes.broker_sets = RecordedSets(routes.broker_sets, seen)
            if switch == "promoted":
                async with AsyncAdmin(f"127.0.0.1:{brokers.names.server.port}") as admin:
                    slaves = [one for one in await admin.replicas() if not one.broker.is_master]
                    await admin.promote(await admin.plan_promotion("broker-a", slaves[0].broker.id))
                await brokers.await_in_sync(3)
                await until(lambda: len(routes.broker_sets["broker-a"].broker_addrs) == 3)
            else:
                await brokers.services.pop(old).stop()
            await brokers.await_master(besides=old)
            before = f"127.0.0.1:{brokers.settings(old).broker.port}"
            assert routes.broker_sets["broker-a"].broker_addrs[0] != before
            assert len(seen) > 1
            assert all(0 in addresses for addresses in seen), seen

    run(body())


class RecordedSets(dict[str, BrokerData]):
    """The broker sets of a NameServer, which notes all that was ever in them."""

    def __init__(self, content: Mapping[str, BrokerData], seen: list[dict[int, str]]) -> None:
        super().__init__(content)
        self._seen = seen

    def __setitem__(self, name: str, data: BrokerData) -> None:
        self._seen.append(data.broker_addrs)
        super().__setitem__(name, data)

    def __delitem__(self, name: str) -> None:
        self._seen.append({})
        super().__delitem__(name)


def test_a_master_that_its_controllers_do_not_confirm_acknowledges_nothing(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    brokers = ControlledSet(tmp_path)

    async def body() -> None:
        async with brokers.running(3):
            await brokers.await_in_sync(3)
            number = await brokers.await_master()
            assert await brokers.send_to(number, 0) == ResponseCode.SUCCESS
            await brokers.controller.stop()
            await until(lambda: brokers.services[number]._not_ready() is not None)
            async with brokers.client(number) as peer:
                refused = await send(peer, 1)
            assert refused.code == ResponseCode.SYSTEM_BUSY
            assert "no controller has confirmed" in (refused.remark or "")
            await brokers.restart_controller()
            number = await brokers.await_master()
            assert await brokers.send_to(number, 2) == ResponseCode.SUCCESS

    run(body())


def test_an_operator_moves_the_master(tmp_path: Path, run: Run) -> None:  # noqa: F811
    brokers = ControlledSet(tmp_path)

    async def body() -> None:
        async with brokers.running(3):
            await brokers.await_in_sync(3)
            first = await brokers.await_master()
            async with AsyncAdmin(f"127.0.0.1:{brokers.names.server.port}") as admin:
                slaves = [one for one in await admin.replicas() if not one.broker.is_master]
                plan = await admin.plan_promotion("broker-a", slaves[0].broker.id)
                assert plan.controllers == (f"127.0.0.1:{brokers.controller_port}",)
                assert await admin.promote(plan) == ()
                elections = await admin.elections()
                assert [one.epoch for one in elections] == [1, 2]
                assert elections[1].master_id == slaves[0].broker.id
            second = await brokers.await_master(besides=first)
            assert f":{brokers.settings(second).broker.port}" in slaves[0].broker.address
            await brokers.await_in_sync(3)
            assert brokers.services[first].broker.role.slave

    run(body())


def test_clients_that_know_only_the_old_master_go_on(tmp_path: Path, run: Run) -> None:  # noqa: F811
    """As RocketMQ's producers do: three attempts, one right after the other, at one address."""
    brokers = ControlledSet(tmp_path)
    sent: list[int] = []

    async def send_one(peer: Peer, message: int) -> int:
        for _ in range(3):
            with contextlib.suppress(PeerError):
                response = await send(peer, message)
                if response.code == ResponseCode.SUCCESS:
                    return response.code
        return -1

    async def body() -> None:
        async with brokers.running(3):
            await brokers.await_in_sync(3)
            old = await brokers.await_master()

            async def send_all() -> None:
                async with brokers.client(old) as peer:
                    while not switched.is_set():
                        assert await send_one(peer, len(sent)) == ResponseCode.SUCCESS
                        sent.append(len(sent))

            switched = asyncio.Event()
            sending = asyncio.ensure_future(send_all())
            await until(lambda: len(sent) > 10)
            async with AsyncAdmin(f"127.0.0.1:{brokers.names.server.port}") as admin:
                other = next(one for one in brokers.services if one != old)
                contact = brokers.services[other].contact
                assert contact is not None
                plan = await admin.plan_promotion("broker-a", contact.replica_id)
                await admin.promote(plan)
            await brokers.await_master(besides=old)
            slave = brokers.services[old]
            await until(lambda: forwarded(slave) > 10 or sending.done())
            switched.set()
            await sending

    run(body())
    assert len(sent) > 20


def forwarded(service: BrokerService) -> int:
    """How many requests a broker has sent on to the master."""
    replication = service._replication
    forwarding = None if replication is None else replication.forwarding
    return 0 if forwarding is None else forwarding.count


def test_a_slave_that_forwards_goes_on_while_clients_need_it(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    """A master is replaced and stopped right after that; clients still send to it."""
    brokers = ControlledSet(tmp_path, heartbeat_timeout_ms=60_000)

    async def body() -> None:
        async with brokers.running(3):
            await brokers.await_in_sync(3)
            old = await brokers.await_master()
            async with AsyncAdmin(f"127.0.0.1:{brokers.names.server.port}") as admin:
                slaves = [one for one in await admin.replicas() if not one.broker.is_master]
                await admin.promote(await admin.plan_promotion("broker-a", slaves[0].broker.id))
            await brokers.await_master(besides=old)
            assert await brokers.send_to(old, 0) == ResponseCode.SUCCESS
            service = brokers.services.pop(old)
            assert forwarded(service) == 1
            stopping = asyncio.ensure_future(service.stop())
            for number in range(1, 6):
                assert await brokers.send_to(old, number) == ResponseCode.SUCCESS
            await stopping

    run(body())


def test_a_master_that_stops_hands_over(tmp_path: Path, run: Run) -> None:  # noqa: F811
    """It forwards the requests of clients until they know the new master."""
    brokers = ControlledSet(tmp_path, heartbeat_timeout_ms=60_000)

    async def body() -> None:
        async with brokers.running(3):
            await brokers.await_in_sync(3)
            first = await brokers.await_master()
            service = brokers.services.pop(first)
            stopping = asyncio.ensure_future(service.stop())
            second = await brokers.await_master(besides=first)
            for number in range(5):
                assert await brokers.send_to(first, number) == ResponseCode.SUCCESS
            assert forwarded(service) >= 5
            await stopping
            assert await brokers.send_to(second, 5) == ResponseCode.SUCCESS

    run(body())


@pytest.mark.parametrize("controller", [False, True])
def test_replicas_restart_in_the_same_roles_or_others(
    tmp_path: Path,
    run: Run,  # noqa: F811
    controller: bool,
) -> None:
    """All replicas stop, and perhaps the controller; nothing is lost."""
    brokers = ControlledSet(tmp_path)

    async def body() -> None:
        async with brokers.running(3):
            await brokers.await_in_sync(3)
            number = await brokers.await_master()
            for message in range(5):
                assert await brokers.send_to(number, message) == ResponseCode.SUCCESS
            end = brokers.services[number].broker.context.store.log.end
            await asyncio.gather(*(crash(service) for service in brokers.services.values()))
            brokers.services.clear()
            if controller:
                await brokers.controller.stop()
                await brokers.restart_controller()
            await brokers.start(0, 1, 2)
            master = await brokers.await_in_sync(3)
            assert master.broker.context.store.log.end >= end
            for service in brokers.services.values():
                if service is not master:
                    await assert_equal(master, service)

    run(body())


def test_a_master_whose_disk_has_failed_is_replaced(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    brokers = ControlledSet(tmp_path)

    async def body() -> None:
        async with brokers.running(3):
            await brokers.await_in_sync(3)
            first = await brokers.await_master()
            store = brokers.services[first].broker.context.store
            store.writer.refusal = WriteStopped("flushing failed")
            second = await brokers.await_master(besides=first)
            await brokers.await_in_sync(3)  # the first one has opened its store again
            assert await brokers.send_to(second, 1) == ResponseCode.SUCCESS

    run(body())


def test_a_replica_that_takes_over_acknowledges_nothing_more_to_the_old_master(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    """What it acknowledges after the flush would be lost with its power, and no other replica need
    have it any more."""
    brokers = ControlledSet(tmp_path, slave_timeout_ms=10_000)

    async def body() -> None:
        async with brokers.running(2):
            master = await brokers.await_in_sync(2)
            number = await brokers.await_master()
            other = next(one for one in brokers.services if one != number)
            slave = brokers.services[other]
            assert slave._controlled is not None
            assert slave.replication.slave is not None
            await slave._controlled.prepare()
            store = slave.broker.context.store
            end = store.log.end
            assert store.flusher.flushed() >= end or not store.flusher.group_commit
            await until(lambda: not acknowledging(master))
            sent = asyncio.ensure_future(brokers.send_to(number, 0))
            done, _ = await asyncio.wait({sent}, timeout=1.0)
            assert not done, "a send was acknowledged"
            assert store.log.end == end
            sent.cancel()

    def acknowledging(master: BrokerService) -> bool:
        assert master.replication.master is not None
        replicas = master.replication.master.replicas
        return any(one.connected for one in replicas.slaves.values())

    run(body())


def test_a_power_failure_is_remembered_until_a_start_succeeds(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    """The first start after it opens the store, and so covers its traces."""
    brokers = ControlledSet(tmp_path)

    async def body() -> None:
        async with brokers.running(3):
            await brokers.await_in_sync(3)
            number = await brokers.await_master()
            slave = next(one for one in brokers.services if one != number)
            await brokers.services.pop(slave).stop()
            root = Path(brokers.settings(slave).broker.data)
            (root / "abort").write_bytes(b"1 another-boot")
            with socket.create_server(("127.0.0.1", brokers.settings(slave).broker.port)):
                failing = BrokerService(brokers.settings(slave))
                with pytest.raises(OSError, match="listen"):
                    await failing.start()
                await failing.stop()
            assert (root / INCOMPLETE).exists()
            await brokers.start(slave)
            await brokers.await_in_sync(3)
            await until(lambda: not (root / INCOMPLETE).exists())

    run(body())
