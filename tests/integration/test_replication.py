"""A master and its slave over real sockets, in this process, in both protocols."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.config import (
    AccessConfig,
    BrokerConfig,
    LiveSettings,
    NameServerConfig,
    Settings,
    StoreConfig,
)
from penstock.config.replication_settings import ReplicationConfig
from penstock.errors import BadSetting, ReplicationError
from penstock.server.replication.replica_calls import ReplicaCalls
from penstock.server.replication.replication import UNSUPERVISED_MAX
from penstock.server.services.broker_service import BrokerService
from penstock.server.services.nameserver_service import NameServerService
from penstock.store.store import MessageStore
from penstock.transport.peer import Peer
from penstock.wire.codes import ResponseCode
from tests.integration.loops import Run, Wire, run, serving  # noqa: F401
from tests.integration.test_broker_service import free_port, pull, send
from tests.store_kit import small_config

PROTOCOLS = ("static", "epochs")


def log_of(store: MessageStore) -> bytes:
    data = b"".join(bytes(segment.view) for segment in store.log.segments.items)
    return data[: store.log.end - store.log.begin()]


async def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Wait until a condition holds that sockets and threads of this process bring about."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


class Pair:
    """The settings of a master and a slave, which can be started and stopped one by one."""

    def __init__(self, root: Path, store: StoreConfig | None = None, **replication: Any) -> None:
        self.ha_port = free_port()
        self.replication = {"port": self.ha_port, "report_ms": 200, **replication}
        self.store = store or small_config(sync_flush=False)
        self.root = root
        self.nameservers = ""

    def settings(self, name: str, **replication: Any) -> Settings:
        slave = name != "master"
        config = {**self.replication, **replication}
        if slave:
            config = {"master": f"127.0.0.1:{self.ha_port}", **config, "role": "slave", "port": 0}
        return Settings(
            broker=BrokerConfig(
                id=int(slave),
                port=free_port(),
                data=str(self.root / name),
                probe_port=0,
                vip_port=0,
                nameservers=self.nameservers,
            ),
            store=self.store,
            replication=ReplicationConfig(**config),
        )

    @asynccontextmanager
    async def broker(
        self, name: str, **replication: Any
    ) -> AsyncIterator[tuple[Peer, BrokerService]]:
        settings = self.settings(name, **replication)
        service = BrokerService(settings)
        await service.start()
        peer = Peer(f"127.0.0.1:{settings.broker.port}")
        try:
            yield peer, service
        finally:
            await peer.close()
            await service.stop()


def has_failed(slave: BrokerService) -> bool:
    follower = slave.replication.slave
    return follower is not None and bool(follower.error)


async def assert_equal(master: BrokerService, slave: BrokerService) -> None:
    """The slave gets the master's log, byte by byte, and shows the same queues."""
    first, second = master.broker.context.store, slave.broker.context.store
    await until(lambda: second.confirm_offset == first.log.end)
    assert log_of(second) == log_of(first)[second.log.begin() - first.log.begin() :]
    for queue in first.queues.rows:
        copy = second.queues.get(queue.topic, queue.queue_id)
        assert (copy.max_offset if copy else 0) == queue.max_offset


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("sync_flush", [False, True])
def test_a_slave_has_the_log_of_its_master(
    tmp_path: Path,
    run: Run,  # noqa: F811
    protocol: str,
    sync_flush: bool,
) -> None:
    pair = Pair(tmp_path, small_config(sync_flush=sync_flush), protocol=protocol)

    async def body() -> None:
        async with pair.broker("master") as (client, master):
            for number in range(100):
                assert (await send(client, number)).code == 0
            async with pair.broker("slave") as (_, slave):
                await assert_equal(master, slave)
                for number in range(100, 200):
                    assert (await send(client, number)).code == 0
                await assert_equal(master, slave)
            for number in range(200, 300):
                assert (await send(client, number)).code == 0
            async with pair.broker("slave") as (_, slave):
                await assert_equal(master, slave)

    run(body())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_sends_wait_for_a_synchronous_slave(
    tmp_path: Path,
    run: Run,  # noqa: F811
    protocol: str,
) -> None:
    pair = Pair(tmp_path, protocol=protocol)

    async def body() -> None:
        async with pair.broker("master", role="sync_master", slave_timeout_ms=300) as (
            client,
            master,
        ):
            assert (await send(client, 1)).code == ResponseCode.FLUSH_SLAVE_TIMEOUT
            async with pair.broker("slave") as (_, slave):
                await assert_equal(master, slave)
                sends = [send(client, number) for number in range(2, 100)]
                assert {answer.code for answer in await asyncio.gather(*sends)} == {0}
                assert slave.broker.context.store.log.end == master.broker.context.store.log.end
            assert (await send(client, 100)).code == ResponseCode.FLUSH_SLAVE_TIMEOUT

    run(body())


def test_writes_are_refused_while_too_few_replicas_are_in_sync(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    pair = Pair(tmp_path)

    async def body() -> None:
        rules = {"role": "sync_master", "min_in_sync_replicas": 2, "lag_ms_max": 500}
        async with pair.broker("master", **rules) as (client, master):
            refused = await send(client, 1)
            assert refused.code == ResponseCode.SYSTEM_BUSY
            assert "in-sync replicas not enough" in (refused.remark or "")
            store = master.broker.context.store
            async with pair.broker("slave"):
                await until(lambda: store.refusal is None)
                assert (await send(client, 2)).code == 0
            await until(lambda: store.refusal is not None)

    run(body())


def test_a_slave_serves_pulls_and_refuses_sends(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    """It finds its master through the NameServer, and copies the topics from it."""

    async def body() -> None:
        names = NameServerService(Settings(nameserver=NameServerConfig(port=0)))
        await names.start()
        pair = Pair(tmp_path, read_from_slaves=True)
        pair.nameservers = f"127.0.0.1:{names.server.port}"
        async with pair.broker("master") as (client, master):
            assert (await send(client, 0)).code == 0
            async with pair.broker("slave", master="") as (reader, slave):
                await assert_equal(master, slave)
                topics = slave.broker.context.topics
                await until(lambda: "T" in topics.table.topics)
                assert (await pull(reader, 0, 0)).code == ResponseCode.SUCCESS
                refused = await send(reader, 1)
                assert refused.code == ResponseCode.SYSTEM_BUSY
                assert client.address in (refused.remark or "")
        await names.stop()

    run(body())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_shared_secret_is_required(
    tmp_path: Path,
    run: Run,  # noqa: F811
    protocol: str,
) -> None:
    pair = Pair(tmp_path, protocol=protocol)

    async def body() -> None:
        async with pair.broker("master", secret="right") as (client, master):
            assert (await send(client, 0)).code == 0
            for secret in ("wrong", ""):
                async with pair.broker("slave", secret=secret) as (_, slave):
                    await until(partial(has_failed, slave))
                    assert slave.broker.context.store.log.end == 0
            async with pair.broker("slave", secret="right") as (_, slave):
                await assert_equal(master, slave)

    run(body())


def test_a_log_that_was_written_by_a_replaced_master_is_truncated(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    """The slave has been a master of its own for a while; the other one has a later epoch."""
    pair = Pair(tmp_path)

    async def body() -> None:
        async with pair.broker("master") as (client, master):
            for number in range(50):
                await send(client, number)
            async with pair.broker("slave") as (_, slave):
                await assert_equal(master, slave)
        apart = Pair(tmp_path)
        apart.root = tmp_path / "apart"
        (tmp_path / "apart").mkdir()
        (tmp_path / "slave").rename(tmp_path / "apart" / "master")
        async with apart.broker("master") as (client, alone):
            for number in range(100, 120):
                await send(client, number)
            lost = log_of(alone.broker.context.store)
        (tmp_path / "apart" / "master").rename(tmp_path / "slave")
        async with pair.broker("master") as (client, master):
            store = master.broker.context.store
            common = store.log.end
            master.replication.history.append(UNSUPERVISED_MAX + 10, common)
            for number in range(200, 230):
                await send(client, number)
            async with pair.broker("slave") as (_, slave):
                await until(
                    lambda: (
                        slave._broker is not None
                        and slave.broker.context.store.log.end == store.log.end
                    )
                )
                await assert_equal(master, slave)
                saved = slave.broker.context.store.paths.truncated.iterdir()
                assert [path.read_bytes() for path in saved] == [lost[common:]]

    run(body())


def test_the_ha_port_is_closed_if_it_would_show_protected_messages(
    tmp_path: Path,
    run: Run,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body(host: str, secret: str) -> bool:
        pair = Pair(tmp_path, host=host, secret=secret)
        settings = pair.settings("master")
        settings = msgspec.structs.replace(
            settings,
            access=AccessConfig(authentication=True, initial_user="admin:secret123"),
            broker=msgspec.structs.replace(settings.broker, host="0.0.0.0", announce="127.0.0.1"),
        )
        service = BrokerService(settings)
        await service.start()
        opened = service.replication.listening
        await service.stop()
        return opened

    async def all_of_them() -> None:
        assert not await body("", "")
        assert "set replication.secret" in caplog.text
        assert await body("", "secret")
        assert await body("127.0.0.1", "")

    run(all_of_them())


def test_a_peer_that_is_no_slave_is_disconnected(
    tmp_path: Path,
    run: Run,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.server.replication.master_service.AUTHENTICATION_MS", 300)

    async def body() -> None:
        for secret, sent in (("secret", b"PENST"), ("secret", bytes(100)), ("", b"\xff" * 64)):
            pair = Pair(tmp_path, secret=secret)
            async with pair.broker("master") as (client, _):
                reader, writer = await asyncio.open_connection("127.0.0.1", pair.ha_port)
                writer.write(sent)
                with contextlib.suppress(ConnectionResetError):
                    assert await asyncio.wait_for(reader.read(), 20) == b""
                writer.close()
                with contextlib.suppress(ConnectionResetError):
                    await writer.wait_closed()
                assert (await send(client, 1)).code == 0

    run(body())


def test_a_sync_master_without_a_port_for_slaves_does_not_start(
    tmp_path: Path,
    run: Run,  # noqa: F811
) -> None:
    """It would acknowledge messages of which there is one copy."""
    pair = Pair(tmp_path)

    async def body() -> None:
        service = BrokerService(pair.settings("master", role="sync_master", port=0))
        with pytest.raises(BadSetting, match="the HA port is off"):
            await service.start()

    run(body())


def test_an_empty_slave_must_know_the_begin_of_the_log(run: Run) -> None:  # noqa: F811
    """Apache's master can't tell it during its first second: the slave tries again."""
    known = {"body": b'{"table":{"commitLogMinOffset":"4096"}}'}
    unknown = {"code": ResponseCode.SYSTEM_ERROR, "remark": "NoSuchElementException"}
    answers: list[dict[str, Any]] = [known, unknown]

    calls = ReplicaCalls(LiveSettings(Settings()))

    async def serve(wire: Wire) -> None:
        wire.answer(await wire.read(), **answers.pop())

    async def body() -> None:
        async with serving(serve) as server:
            with pytest.raises(ReplicationError, match="NoSuchElement"):
                await calls.log_begin(server.address)
            assert await calls.log_begin(server.address) == 4096
        assert await calls.log_begin("") == 0

    run(body())
