"""Failing disks, lost answers, copies, and brokers that had data before they had controllers."""

import asyncio
import errno
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.config import Settings
from penstock.config.replication_settings import ReplicationConfig
from penstock.errors import PeerError
from penstock.server.services import broker_service
from penstock.server.services.broker_service import BrokerService
from penstock.store.store import MessageStore
from penstock.transport.peer import Response
from penstock.wire.codes import RequestCode, ResponseCode
from tests.integration.failover_kit import ControlledSet, crash
from tests.integration.loops import Run, run  # noqa: F401
from tests.integration.test_broker_service import send
from tests.integration.test_replication import assert_equal, until


@pytest.mark.parametrize("failures", [1, 1_000_000], ids=["once", "always"])
def test_a_replica_whose_disk_fails_at_the_takeover_does_not_lead(
    tmp_path: Path,
    run: Run,  # noqa: F811
    failures: int,
) -> None:
    """After an fsync that failed, the next one succeeds, although the bytes may be lost."""
    brokers = ControlledSet(tmp_path)
    failed = 0

    async def body() -> None:
        async with brokers.running(3):
            await brokers.await_in_sync(3)
            first = await brokers.await_master()
            assert await brokers.send_to(first, 0) == ResponseCode.SUCCESS
            slaves = [one for one in brokers.services if one != first]
            broken, healthy = sorted(slaves, key=lambda one: replica_id(brokers, one))
            end = brokers.services[first].broker.context.store.log.end
            liveness = brokers.controller._liveness
            await until(  # with equal logs, the smaller id is elected
                lambda: {one.max_offset for one in liveness.last_seen("broker-a").values()} == {end}
            )
            fail_syncs(brokers.services[broken])
            await crash(brokers.services.pop(first))
            assert await brokers.await_master(besides=first) == healthy
            assert await brokers.send_to(healthy, 1) == ResponseCode.SUCCESS
            if failures == 1:  # it has opened its store again, and followed
                await assert_equal(await brokers.await_in_sync(2), brokers.services[broken])

    def fail_syncs(service: BrokerService) -> None:
        store = service.broker.context.store
        disk, real = store.disk, store.disk.sync
        log = {segment.fd for segment in store.log.segments.items}

        def sync(fd: int) -> None:
            nonlocal failed
            failed += fd in log
            if fd in log and failed <= failures:
                raise OSError(errno.EIO, "Input/output error")
            real(fd)

        disk.sync = sync  # type: ignore[method-assign]

    run(body())
    assert 1 <= failed < 20, "no attempt in a tight loop"


@pytest.mark.parametrize("others", ["follow", "come back later"])
def test_a_replica_that_is_elected_and_cannot_open_its_store_gives_way(
    tmp_path: Path,
    run: Run,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    others: str,
) -> None:
    """It has taken over: then the in-sync set is this replica alone."""
    brokers = ControlledSet(tmp_path)
    stores = UnopenedStores(monkeypatch)

    async def body() -> None:
        async with brokers.running(3):
            await brokers.await_in_sync(3)
            first = await brokers.await_master()
            assert await brokers.send_to(first, 0) == ResponseCode.SUCCESS
            broken, healthy = (one for one in brokers.services if one != first)
            stores.refuse(brokers.settings(broken).broker.data)
            await elect(brokers, broken)
            service = brokers.services[broken]
            await until(lambda: "Input/output error" in (service._not_in_sync() or ""))
            if others == "come back later":
                await crash(brokers.services.pop(first))
                await crash(brokers.services.pop(healthy))
                stores.refused.clear()
                await brokers.start(first, healthy)
                await brokers.await_in_sync(3)
                await brokers.await_master()
                return
            other = await brokers.await_master(besides=broken)
            await brokers.await_in_sync(2)
            assert await brokers.send_to(other, 1) == ResponseCode.SUCCESS
            stores.refused.clear()
            master = await brokers.await_in_sync(3)
            await assert_equal(master, service)
            await until(lambda: service._not_in_sync() is None)

    run(body())


def test_a_slave_that_cannot_open_its_store_is_not_the_master(
    tmp_path: Path,
    run: Run,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brokers = ControlledSet(tmp_path)
    stores = UnopenedStores(monkeypatch)

    async def body() -> None:
        async with brokers.running(3):
            await brokers.await_in_sync(3)
            first = await brokers.await_master()
            slaves = [one for one in brokers.services if one != first]
            broken, healthy = sorted(slaves, key=lambda one: replica_id(brokers, one))
            service = brokers.services[broken]
            stores.refuse(brokers.settings(broken).broker.data)
            service._restart_soon()
            await until(lambda: "Input/output error" in (service._not_in_sync() or ""))
            await crash(brokers.services.pop(first))
            await until(lambda: brokers.master() is not None)
            assert brokers.master() == healthy  # and waits for a second replica
            stores.refused.clear()
            await assert_equal(await brokers.await_in_sync(2), service)

    run(body())


def replica_id(brokers: ControlledSet, number: int) -> int:
    contact = brokers.services[number].contact
    assert contact is not None
    return contact.replica_id


async def elect(brokers: ControlledSet, number: int) -> None:
    """Designate a replica as the master."""
    contact = brokers.services[number].contact
    assert contact is not None
    assert await contact._elect(contact.replica_id, designate=True)


class UnopenedStores:
    """Stores that can't be opened, by their directories."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused: set[str] = set()
        self._real = broker_service.open_store
        monkeypatch.setattr(broker_service, "open_store", self._open)

    def refuse(self, directory: str) -> None:
        self.refused.add(directory)

    def _open(self, config: Settings, *arguments: Any) -> MessageStore:
        if config.broker.data in self.refused:
            raise OSError(errno.EIO, "Input/output error")
        return self._real(config, *arguments)


def test_a_slave_whose_disk_has_failed_follows_again(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    brokers = ControlledSet(tmp_path)

    async def body() -> None:
        async with brokers.running(3):
            await brokers.await_in_sync(3)
            number = await brokers.await_master()
            slave = next(one for one in brokers.services.values() if one.broker.role.slave)
            store = slave.broker.context.store
            store.flusher.fail(OSError(errno.EIO, "Input/output error"))
            await until(lambda: slave._broker is not None and slave.broker.context.store != store)
            await brokers.await_in_sync(3)
            assert await brokers.send_to(number, 1) == ResponseCode.SUCCESS
            await assert_equal(brokers.services[number], slave)

    run(body())


def test_a_hand_over_whose_answer_is_lost_elects_once(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    brokers = ControlledSet(tmp_path)
    lost = 0

    async def body() -> None:
        async with brokers.running(3):
            await brokers.await_in_sync(3)
            contact = brokers.services[await brokers.await_master()].contact
            assert contact is not None
            assert contact.role is not None
            epoch = contact.role.epoch
            lose_answers(contact._controllers.peer(contact._controllers.addresses[0]))
            assert await contact.hand_over()
            await brokers.await_in_sync(3)
            assert contact.role.epoch == epoch + 1

    def lose_answers(peer: Any) -> None:
        real = peer.call

        async def call(code: int, *arguments: Any, **more: Any) -> Response:
            nonlocal lost
            response: Response = await real(code, *arguments, **more)
            if code == RequestCode.CONTROLLER_ELECT_MASTER and not lost:
                lost += 1
                raise PeerError("the connection is lost")
            return response

        peer.call = call

    run(body())
    assert lost == 1


def test_controllers_may_be_named_in_another_way_than_they_announce_themselves(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    brokers = ControlledSet(tmp_path, min_in_sync_replicas=1)
    brokers._replication["controllers"] = f"localhost:{brokers.controller_port}"

    async def body() -> None:
        async with brokers.running(1):
            contact = brokers.services[0].contact
            assert contact is not None
            confirmed_ms = contact.confirmed_ms
            await until(lambda: contact.confirmed_ms > confirmed_ms + 1_000)
            assert await brokers.send_to(0, 0) == ResponseCode.SUCCESS

    run(body())


def test_a_replica_is_ready_when_it_is_in_sync(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    """Otherwise a rolling restart goes on while a replica still copies the log."""
    brokers = ControlledSet(tmp_path, rate_bytes_max=20_000, slave_timeout_ms=20_000)

    async def body() -> None:
        async with brokers.running(2):
            await brokers.await_in_sync(2)
            number = await brokers.await_master()
            async with brokers.client(number) as peer:
                sent = await asyncio.gather(*(send(peer, message) for message in range(300)))
            assert {one.code for one in sent} == {ResponseCode.SUCCESS}
            await brokers.start(2)  # prints its ready line while it copies the log
            late = brokers.services[2]
            assert late._not_in_sync() == "this replica has not joined the in-sync set yet"
            await brokers.await_in_sync(3)
            await until(lambda: late._not_in_sync() is None)

    run(body())


def test_the_log_of_a_broker_that_gets_controllers_is_never_truncated(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    """An empty replica asks first and becomes the master. Both logs have an epoch 1."""
    brokers = ControlledSet(tmp_path)

    async def body() -> None:
        async with brokers.running(0):
            old = await fill(brokers)
            brokers.services[1] = BrokerService(brokers.settings(1))
            starting = asyncio.ensure_future(brokers.services[1].start())
            await until(lambda: brokers.master() == 1)
            brokers.services[0] = BrokerService(brokers.settings(0))
            joining = asyncio.ensure_future(brokers.services[0].start())
            await until(lambda: "no epoch in common" in error_of(brokers.services[0]))
            assert log_of(brokers.services[0]) == old
            assert len(brokers.services[1].replication.master.replicas.in_sync) == 0  # type: ignore[union-attr]
            joining.cancel()
            starting.cancel()

    def error_of(service: BrokerService) -> str:
        slave = None if service._replication is None else service._replication.slave
        return "" if slave is None else slave.error

    run(body())


def test_a_broker_that_gets_controllers_gives_its_log_to_new_replicas(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    """It starts first, as the documentation says."""
    brokers = ControlledSet(tmp_path)

    async def body() -> None:
        async with brokers.running(0):
            old = await fill(brokers)
            brokers.services[0] = BrokerService(brokers.settings(0))
            starting = asyncio.ensure_future(brokers.services[0].start())
            await until(lambda: brokers.master() == 0)
            await brokers.start(1)
            master = await brokers.await_in_sync(2)
            await starting
            assert log_of(master)[: len(old)] == old
            await assert_equal(master, brokers.services[1])

    run(body())


async def fill(brokers: ControlledSet) -> bytes:
    """Run the first broker without controllers; the log that it has then."""
    settings = brokers.settings(0)
    ha_port = settings.replication.port
    alone = msgspec.structs.replace(settings, replication=ReplicationConfig(port=ha_port))
    service = BrokerService(alone)
    await service.start()
    for message in range(20):
        assert await brokers.send_to(0, message) == ResponseCode.SUCCESS
    log = log_of(service)
    await service.stop()
    return log


def log_of(service: BrokerService) -> bytes:
    log = service.broker.context.store.log
    segment = log.segments.find(0)
    assert segment is not None
    return bytes(segment.slice(0, log.end))
