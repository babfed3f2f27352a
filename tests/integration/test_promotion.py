"""A slave becomes the master, by `AsyncAdmin.promote`: brokers and a NameServer in this process."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.broker.replicas.replica_state import ReplicaState
from penstock.client import AsyncAdmin
from penstock.config import BrokerConfig, NameServerConfig, Settings
from penstock.config.replication_settings import ReplicationConfig
from penstock.errors import BrokerNameTaken, PeerTimeout, Refused
from penstock.replication.assigned_role import load_assigned_role
from penstock.server.registration import nameserver_registration
from penstock.server.replication import role_changes
from penstock.server.replication.replica_calls import ReplicaCalls
from penstock.server.services import broker_service
from penstock.server.services.broker_service import BrokerService
from penstock.server.services.nameserver_service import NameServerService
from penstock.store.disk import Disk
from penstock.transport.peer import Peer
from penstock.wire.codes import ResponseCode
from penstock.wire.message import decode_messages
from tests.integration.loops import Run, run  # noqa: F401
from tests.integration.test_broker_service import free_port, pull, send
from tests.integration.test_replication import PROTOCOLS, assert_equal, until
from tests.store_kit import small_config


class Replicas:
    """Replicas of one broker, by their number: 0 is the master at first."""

    def __init__(self, root: Path, **replication: Any) -> None:
        self.root = root
        self.replication = {
            "report_ms": 200,
            "role": "sync_master",
            "slave_timeout_ms": 500,
            **replication,
        }
        self.names = NameServerService(Settings(nameserver=NameServerConfig(port=0)))
        self.services: dict[int, BrokerService] = {}
        self.clients: dict[int, Peer] = {}
        self._configured: dict[int, Settings] = {}

    def settings(self, number: int) -> Settings:
        if number not in self._configured:
            port = free_port()
            role = {"role": "slave"} if number else {}
            self._configured[number] = Settings(
                broker=BrokerConfig(
                    id=number,
                    port=port,
                    data=str(self.root / str(number)),
                    probe_port=0,
                    vip_port=0,
                    nameservers=f"127.0.0.1:{self.names.server.port}",
                ),
                store=small_config(sync_flush=False),
                replication=ReplicationConfig(**{**self.replication, "port": free_port(), **role}),
            )
        return self._configured[number]

    async def start(self, number: int) -> BrokerService:
        service = BrokerService(self.settings(number))
        await service.start()
        self.services[number] = service
        self.clients[number] = Peer(f"127.0.0.1:{self.settings(number).broker.port}")
        return service

    async def stop(self, number: int) -> None:
        await self.clients.pop(number).close()
        await self.services.pop(number).stop()

    @asynccontextmanager
    async def running(self, count: int) -> AsyncIterator[AsyncAdmin]:
        await self.names.start()
        try:
            for number in range(count):
                await self.start(number)
            async with AsyncAdmin(f"127.0.0.1:{self.names.server.port}") as admin:
                await self.in_sync(*range(1, count))
                yield admin
        finally:
            for number in sorted(self.services, reverse=True):
                await self.stop(number)
            await self.names.stop()

    async def in_sync(self, *ids: int, master: int = 0) -> None:
        def all_are() -> bool:
            service = self.services[master].replication.master
            known = [] if service is None else service.replicas.in_sync
            return {replica.name for replica in known} >= {str(number) for number in ids}

        if self.replication.get("protocol") != "static":
            await until(all_are)
        await until(lambda: all(self.services[n].broker.role.master_online for n in ids))

    async def follows(self, number: int) -> None:
        """Wait until this replica is a slave whose master answers."""

        def is_slave() -> bool:
            broker = self.services[number]._broker  # None while it restarts
            return broker is not None and broker.role.slave and broker.role.master_online

        await until(is_slave)

    async def serves(self, number: int, *, slave: bool) -> None:
        """Wait until this replica has restarted in a role."""

        def has_role() -> bool:
            service = self.services[number]
            broker, server = service._broker, service._server  # None while it restarts
            if broker is None or server is None:
                return False
            return broker.role.slave == slave and bool(server._listeners)

        await until(has_role)

    async def bodies(self, number: int) -> list[bytes]:
        """The messages that this replica serves."""
        found = []
        for queue_id in range(4):
            offset = 0
            while (answer := await pull(self.clients[number], queue_id, offset)).code == 0:
                records = decode_messages(answer.body)
                found += [record.body for record in records]
                offset += len(records)
        return sorted(found, key=int)


@pytest.fixture(params=PROTOCOLS)
def replicas(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Replicas]:
    return Replicas(tmp_path, protocol=request.param)


def test_a_slave_becomes_the_master_and_back(replicas: Replicas, run: Run) -> None:  # noqa: F811
    """Both keep their roles when they restart; nothing is lost, and the logs stay equal."""

    async def body() -> None:
        async with replicas.running(2) as admin:
            for number in range(20):
                assert (await send(replicas.clients[0], number)).code == 0
            plan = await admin.plan_promotion("broker-a", 1)
            assert (plan.role, plan.others) == ("sync_master", ())
            assert await admin.promote(plan) == ()
            await replicas.follows(0)
            for number in range(20, 40):
                assert (await send(replicas.clients[1], number)).code == 0
            await assert_equal(replicas.services[1], replicas.services[0])
            refused = await send(replicas.clients[0], 0)
            assert refused.code == ResponseCode.SYSTEM_BUSY
            assert replicas.clients[1].address in (refused.remark or "")
            statuses = await admin.replicas()
            assert [(one.broker.id, one.role) for one in statuses] == [
                (0, "sync_master"),
                (1, "slave"),
            ]
            assert statuses[0].broker.address == replicas.clients[1].address

            for number in (0, 1):
                await replicas.stop(number)
            for number in (1, 0):
                await replicas.start(number)
            await replicas.follows(0)
            assert (await send(replicas.clients[1], 40)).code == 0
            back = await admin.plan_promotion("broker-a", 1)
            assert back.slave.broker.address == replicas.clients[0].address
            assert await admin.promote(back) == ()
            await replicas.follows(1)
            assert (await send(replicas.clients[0], 41)).code == 0
            await assert_equal(replicas.services[0], replicas.services[1])
            assert await replicas.bodies(0) == [b"%d" % number for number in range(42)]

    run(body())


def test_other_slaves_follow_the_new_master(tmp_path: Path, run: Run) -> None:  # noqa: F811
    replicas = Replicas(tmp_path, in_sync_replicas=3)

    async def body() -> None:
        async with replicas.running(3) as admin:
            assert (await send(replicas.clients[0], 0)).code == 0
            assert await admin.promote(await admin.plan_promotion("broker-a", 2)) == ()
            await replicas.follows(0)
            await replicas.in_sync(1, master=2)
            assert (await send(replicas.clients[2], 1)).code == 0
            for number in (0, 1):
                await assert_equal(replicas.services[2], replicas.services[number])

    run(body())


def test_a_master_whose_slave_does_not_follow_stays_the_master(
    tmp_path: Path,
    run: Run,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(role_changes, "PREPARE_MS", 200)
    replicas = Replicas(tmp_path)

    async def body() -> None:
        async with replicas.running(2) as admin:
            plan = await admin.plan_promotion("broker-a", 1)
            follower = replicas.services[1].replication.slave
            assert follower is not None
            await follower.close()
            message = asyncio.ensure_future(send(replicas.clients[0], 0))
            log = replicas.services[0].broker.context.store.log
            await until(lambda: log.end > 0)
            with pytest.raises(Refused, match=r"still the master: .* 197 bytes behind"):
                await admin.promote(plan)
            follower.start()
            assert (await message).code == 0
            assert (await send(replicas.clients[0], 1)).code == 0
            assert not replicas.services[0].broker.role.slave

    run(body())


def test_a_promotion_without_the_master_must_be_forced(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    """The old master comes back, finds that it was replaced, and does not start as a master."""
    replicas = Replicas(tmp_path)

    async def body() -> None:
        async with replicas.running(3) as admin:
            for number in range(10):
                assert (await send(replicas.clients[0], number)).code == 0
            await assert_equal(replicas.services[0], replicas.services[1])
            await replicas.stop(0)
            with pytest.raises(Refused, match="no master is registered"):
                await admin.plan_promotion("broker-a", 1)
            plan = await admin.plan_promotion("broker-a", 1, force=True)
            assert plan.master is None
            assert await admin.promote(plan) == ()
            await replicas.in_sync(2, master=1)
            assert (await send(replicas.clients[1], 10)).code == 0
            with pytest.raises(BrokerNameTaken, match="has replaced this broker as the master"):
                await replicas.start(0)
            assert await replicas.bodies(1) == [b"%d" % number for number in range(11)]

    run(body())


def test_the_slave_with_the_longer_log_must_be_promoted(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    replicas = Replicas(tmp_path)

    async def body() -> None:
        async with replicas.running(3) as admin:
            follower = replicas.services[1].replication.slave
            assert follower is not None
            await follower.close()
            assert (await send(replicas.clients[0], 0)).code == 0
            await replicas.stop(0)
            with pytest.raises(Refused, match=r"slave 2 .* has more of the log"):
                await admin.plan_promotion("broker-a", 1, force=True)
            plan = await admin.plan_promotion("broker-a", 2, force=True)
            assert await admin.promote(plan) == ()

    run(body())


def test_a_master_that_was_replaced_accepts_no_messages(
    tmp_path: Path,
    run: Run,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was cut off from the NameServers and its slave, which was promoted, and ran on."""
    monkeypatch.setattr(role_changes, "DISCONNECT_MS", 100)
    replicas = Replicas(tmp_path, role="async_master")

    async def body() -> None:
        async with replicas.running(2) as admin:
            registration = replicas.services[0]._registration
            assert registration is not None
            for task in registration._tasks:
                task.cancel()
            await asyncio.gather(*(link._unregister() for link in registration._links))
            plan = await admin.plan_promotion("broker-a", 1, force=True)
            with pytest.raises(Refused, match="this slave receives its log"):
                await admin.promote(plan)
            slave = replicas.services[1].replication.slave
            assert slave is not None
            await slave.close()
            assert await admin.promote(plan) == ()
            assert (await send(replicas.clients[0], 0)).code == 0
            registration._tasks.clear()
            registration.start()
            await until(lambda: replicas.services[0].broker.context.store.refusal is not None)
            refused = await send(replicas.clients[0], 1)
            assert refused.code == ResponseCode.SYSTEM_BUSY
            assert replicas.clients[1].address in (refused.remark or "")
            masters = [one.address for one in await admin.masters()]
            assert masters == [replicas.clients[1].address]

    run(body())


def test_settings_that_change_decide_again(tmp_path: Path, run: Run) -> None:  # noqa: F811
    replicas = Replicas(tmp_path)

    async def body() -> None:
        async with replicas.running(2) as admin:
            await admin.promote(await admin.plan_promotion("broker-a", 1))
            await replicas.follows(0)
            assert load_assigned_role(Disk(), tmp_path / "1") is not None
            await replicas.stop(1)
            configured = replicas.settings(1)
            other_id = msgspec.structs.replace(configured.broker, id=7)
            service = BrokerService(msgspec.structs.replace(configured, broker=other_id))
            await service.start()
            assert service.broker.role.slave
            assert service.settings.current.broker.id == 7
            await service.stop()
            await replicas.start(1)

    run(body())


def test_a_role_is_not_given_twice(tmp_path: Path, run: Run) -> None:  # noqa: F811
    replicas = Replicas(tmp_path)

    async def body() -> None:
        async with replicas.running(2) as admin:
            plan = await admin.plan_promotion("broker-a", 1)
            assert await admin.promote(plan) == ()
            await replicas.follows(0)
            with pytest.raises(Refused, match="this broker is a slave now"):
                await admin.promote(plan)
            with pytest.raises(Refused, match="is the master already"):
                await admin.plan_promotion("broker-a", 0)

    run(body())


def test_a_new_master_that_is_killed_at_once_continues_its_epoch(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    """A slave of its own accord would begin an epoch far ahead, and could not be replaced."""
    replicas = Replicas(tmp_path)

    async def body() -> None:
        async with replicas.running(2) as admin:
            plan = await admin.plan_promotion("broker-a", 1)
            assert await admin.promote(plan) == ()
            await replicas.serves(1, slave=False)
            epoch = replicas.services[1].replication.epoch
            await replicas.stop(1)
            # As if it had been killed before it noted that it is the master.
            (tmp_path / "1" / ReplicaState.FILE).write_text('{"slave": true}')
            await replicas.start(1)
            assert replicas.services[1].replication.epoch == epoch

    run(body())


def test_an_old_plan_is_refused(replicas: Replicas, run: Run) -> None:  # noqa: F811
    """The master has stepped down for another slave meanwhile: that is not its consent."""

    async def body() -> None:
        async with replicas.running(3) as admin:
            old = await admin.plan_promotion("broker-a", 2)
            other = await admin.plan_promotion("broker-a", 1)
            assert other.master is not None
            await admin._change_role(other, other.master, "stepDown")
            await replicas.serves(0, slave=True)
            with pytest.raises(Refused, match="this broker is a slave now"):
                await admin.promote(old)
            assert replicas.services[2].broker.role.slave
            # The first promotion can still be finished.
            await admin._take_over(other)
            await replicas.follows(0)
            assert (await send(replicas.clients[1], 0)).code == 0

    run(body())


def test_settings_alone_do_not_replace_a_master_that_runs(
    tmp_path: Path,
    run: Run,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nameserver_registration, "FIRST_ROUND_MS", 500)
    replicas = Replicas(tmp_path)

    async def body() -> None:
        async with replicas.running(2):
            await replicas.stop(1)
            configured = replicas.settings(1)
            service = BrokerService(
                msgspec.structs.replace(
                    configured,
                    broker=msgspec.structs.replace(configured.broker, id=0),
                    replication=msgspec.structs.replace(
                        configured.replication, role="async_master"
                    ),
                )
            )
            with pytest.raises(BrokerNameTaken, match="lists another broker"):
                await service.start()
            await service.stop()
            assert (await send(replicas.clients[0], 0)).code == ResponseCode.FLUSH_SLAVE_TIMEOUT

    run(body())


def test_a_role_that_was_replaced_by_settings_does_not_come_back(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    replicas = Replicas(tmp_path)

    async def body() -> None:
        async with replicas.running(2) as admin:
            await admin.promote(await admin.plan_promotion("broker-a", 1))
            await replicas.follows(0)
            await replicas.stop(1)
            assert await admin.promote(await admin.plan_promotion("broker-a", 1, force=True)) == ()
            configured = replicas.settings(1)
            other_id = msgspec.structs.replace(configured.broker, id=7)
            for settings in (
                msgspec.structs.replace(configured, broker=other_id),
                configured,
            ):
                service = BrokerService(settings)
                await service.start()
                assert service.broker.role.slave
                assert service.settings.current.broker.id == settings.broker.id
                await service.stop()

    run(body())


def test_a_master_that_does_not_answer_is_not_taken_for_dead(
    tmp_path: Path,
    run: Run,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A former master comes back while its successor is slow."""
    monkeypatch.setattr(nameserver_registration, "FIRST_ROUND_MS", 500)
    replicas = Replicas(tmp_path)

    async def silent(calls: ReplicaCalls, address: str) -> Any:
        raise PeerTimeout("no response", address=address)

    async def body() -> None:
        async with replicas.running(2) as admin:
            await admin.promote(await admin.plan_promotion("broker-a", 1))
            await replicas.follows(0)
            await replicas.stop(1)
            await admin.promote(await admin.plan_promotion("broker-a", 1, force=True))
            monkeypatch.setattr(ReplicaCalls, "describe", silent)
            with pytest.raises(BrokerNameTaken):
                await replicas.start(1)

    run(body())


def test_tables_that_changed_a_moment_ago_are_kept(
    replicas: Replicas,
    run: Run,  # noqa: F811
) -> None:
    async def body() -> None:
        async with replicas.running(2) as admin:
            await admin.create_topic("young", queues=3)
            await admin.promote(await admin.plan_promotion("broker-a", 1))
            await replicas.follows(0)
            for number in (0, 1):
                topics = replicas.services[number].broker.context.topics
                await until(lambda topics=topics: "young" in topics.table.topics)

    run(body())


def test_a_slave_does_not_replace_a_master_that_it_hears(
    tmp_path: Path,
    run: Run,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The master runs, but the NameServer does not list it."""
    monkeypatch.setattr(role_changes, "DISCONNECT_MS", 100)
    replicas = Replicas(tmp_path)

    async def body() -> None:
        async with replicas.running(2) as admin:
            registration = replicas.services[0]._registration
            assert registration is not None
            for task in registration._tasks:
                task.cancel()
            await asyncio.gather(*(link._unregister() for link in registration._links))
            plan = await admin.plan_promotion("broker-a", 1, force=True)
            with pytest.raises(Refused, match="is running: this slave receives its log"):
                await admin.promote(plan)
            assert (await send(replicas.clients[0], 0)).code == 0

    run(body())


def test_a_restart_that_fails_is_repeated_and_logged(
    tmp_path: Path,
    run: Run,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(broker_service, "RESTART_MS", 10)
    replicas = Replicas(tmp_path)
    open_store = broker_service.open_store
    failures = [ValueError("first"), OSError("second")]

    def fail(*arguments: Any) -> Any:
        if failures:
            raise failures.pop(0)
        return open_store(*arguments)

    async def body() -> None:
        async with replicas.running(1):
            service = replicas.services[0]
            monkeypatch.setattr(broker_service, "open_store", fail)
            service._restart_soon()
            restarting = service._restarting
            assert restarting is not None
            await restarting
            sent = await send(replicas.clients[0], 0)
            assert sent.code == ResponseCode.FLUSH_SLAVE_TIMEOUT

    run(body())
    assert "retrying in 0 s: first" in caplog.text
    assert "retrying in 0 s: second" in caplog.text
