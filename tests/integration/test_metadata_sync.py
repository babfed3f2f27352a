"""A slave copies the tables of a real master over sockets."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.auth.users import SUPER, User
from penstock.broker.broker import Broker
from penstock.broker.replicas.replica_role import ReplicaRole
from penstock.broker.takeover.replicated_tables import OFFSETS_PER_STEP
from penstock.config import (
    AccessConfig,
    BrokerConfig,
    LiveSettings,
    ReplicationConfig,
    Settings,
)
from penstock.replication.metadata import PAGE_MAX
from penstock.server.replication.metadata_sync import MetadataSync
from penstock.server.services.broker_service import BrokerService
from penstock.store.store import MessageStore
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import (
    DataVersion,
    SetMessageRequestModeRequestBody,
    SubscriptionGroupConfig,
    TopicConfig,
)
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.signing import strict_signer
from tests.integration.loops import Frame, Run, Wire, run, serving
from tests.integration.test_broker_service import free_port, send
from tests.store_kit import small_config

__all__ = ["run"]

NOW_MS = 1_700_000_000_000
SECRET = "of the replicas"
INTERNAL = "internal:password"


def settings(root: Path, access: AccessConfig | None = None, **replication: Any) -> Settings:
    slave = replication.get("role") == "slave"
    return Settings(
        broker=BrokerConfig(
            port=free_port(), data=str(root), probe_port=0, vip_port=0, id=1 if slave else 0
        ),
        replication=ReplicationConfig(**replication),
        store=small_config(sync_flush=False),
        access=access or AccessConfig(),
    )


class Slave:
    """A slave without a port."""

    def __init__(self, root: Path, access: AccessConfig | None = None, secret: str = "") -> None:
        current = settings(root, access, role="slave", secret=secret)
        self.role = ReplicaRole(slave=True)
        self.live = LiveSettings(current)
        self.store = MessageStore(root, current.store, now_ms=NOW_MS)
        self.broker = Broker(
            self.live, self.store, "127.0.0.1:1", "127.0.0.1:1", NOW_MS, role=self.role
        )
        self.arrived = 1 << 62  # the log is not copied here
        internal = self.broker.context.access.internal()
        self.sync = MetadataSync(
            self.live,
            self.broker,
            self.role,
            sign=None if internal is None else strict_signer(*internal, self.now_ms),
            arrived=lambda: self.arrived,
        )

    def now_ms(self) -> int:
        return self.sync._clock.now_ms()

    async def close(self) -> None:
        await self.sync.close()
        self.broker.close()

    def set_master(self, address: str) -> None:
        self.sync.set_master(address)

    async def until(self, done: Callable[[], object]) -> None:
        """Wake the rounds until something has happened."""
        for _ in range(500):
            if done():
                return
            await asyncio.sleep(0.01)
            self.sync._changed.set()
        raise AssertionError(f"not done: {self.sync.state}")


@asynccontextmanager
async def pair(
    root: Path, access: AccessConfig | None = None, secret: str = ""
) -> AsyncIterator[tuple[Broker, Slave, str]]:
    """A master and a slave that copies its tables."""
    current = settings(root / "master", access, secret=secret)
    service = BrokerService(current)
    await service.start()
    address = f"127.0.0.1:{current.broker.port}"
    slave = Slave(root / "slave", access, secret)
    try:
        slave.sync.start()
        slave.set_master(address)
        yield service.broker, slave, address
    finally:
        await slave.close()
        with contextlib.suppress(AttributeError):
            await service.stop()


def test_tables_are_copied(run: Run, tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path) as (master, slave, _):
            source, copy = master.context, slave.broker.context
            source.topics.put(TopicConfig(topic_name="T", read_queue_nums=5), NOW_MS)
            source.groups.put(SubscriptionGroupConfig(group_name="G"), NOW_MS)
            source.offsets.commit("G", "T", 3, 42, NOW_MS)
            source.delay.table.commit(2, 17, NOW_MS)
            mode = SetMessageRequestModeRequestBody(topic="T", consumer_group="G", mode="POP")
            master._assignments.modes.put(mode)
            await slave.until(lambda: copy.offsets.get("G", "T", 3) == 42)
            await slave.until(lambda: copy.delay.table.get(2) == 17)
            assert copy.topics.table.topics == source.topics.table.topics
            assert copy.topics.table.version == source.topics.table.version
            assert copy.groups.table.groups == source.groups.table.groups
            assert copy.groups.table.version == source.groups.table.version
            assert copy.offsets.table.version == source.offsets.table.version
            assert slave.broker._assignments.modes.get("T", "G") == mode
            await slave.until(lambda: slave.role.master_online and slave.sync.state.success_ms > 0)
            list(source.topics.delete("T", NOW_MS))
            await slave.until(lambda: copy.topics.get("T") is None)

    run(body())


def test_a_slave_continues_with_the_copied_tables(run: Run, tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path) as (master, slave, _):
            master.context.topics.put(TopicConfig(topic_name="T"), NOW_MS)
            await slave.until(lambda: slave.broker.context.topics.get("T"))
        restarted = Slave(tmp_path / "slave")
        assert restarted.broker.context.topics.get("T") is not None
        await restarted.close()

    run(body())


def test_large_tables_come_in_pages(run: Run, tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path) as (master, slave, _):
            source, copy = master.context, slave.broker.context
            count = PAGE_MAX + OFFSETS_PER_STEP
            for number in range(count):
                source.topics.table.put(TopicConfig(topic_name=f"T{number}"), NOW_MS)
                source.groups.table.put(SubscriptionGroupConfig(group_name=f"G{number}"), NOW_MS)
                source.offsets.commit(f"G{number}", f"T{number}", 0, number, NOW_MS)
            last = count - 1
            await slave.until(lambda: copy.offsets.get(f"G{last}", f"T{last}", 0) == last)
            assert copy.topics.table.topics == source.topics.table.topics
            assert copy.groups.table.groups == source.groups.table.groups

    run(body())


def test_commits_at_the_slave_come_back_to_the_master(run: Run, tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path) as (master, slave, address):
            source, copy = master.context, slave.broker.context
            source.topics.put(TopicConfig(topic_name="T"), NOW_MS)
            source.groups.put(SubscriptionGroupConfig(group_name="G"), NOW_MS)
            for queue_id, offset in ((0, 10), (1, 10), (2, 10)):
                source.offsets.commit("G", "T", queue_id, offset, NOW_MS)
            await slave.until(lambda: copy.offsets.get("G", "T", 2) == 10)
            slave.set_master("")  # the master is away
            await asyncio.sleep(0.05)
            copy.offsets.commit("G", "T", 0, 15, NOW_MS)  # ahead
            copy.offsets.commit("G", "T", 1, 15, NOW_MS)
            source.offsets.commit("G", "T", 1, 20, NOW_MS)  # the master is ahead
            source.offsets.commit("G", "T", 2, 3, NOW_MS)  # a reset at the master
            slave.set_master(address)
            await slave.until(lambda: copy.offsets.get("G", "T", 2) == 3)
            for context in (source, copy):
                assert [context.offsets.get("G", "T", n) for n in range(3)] == [15, 20, 3]
            assert slave.role.commits == {}

    run(body())


def test_commits_at_a_slave_that_restarts_come_back_to_the_master(
    run: Run,
    tmp_path: Path,
) -> None:
    async def body() -> None:
        async with pair(tmp_path) as (master, slave, _):
            source, copy = master.context, slave.broker.context
            source.topics.put(TopicConfig(topic_name="T"), NOW_MS)
            source.groups.put(SubscriptionGroupConfig(group_name="G"), NOW_MS)
            source.offsets.commit("G", "T", 0, 10, NOW_MS)
            await slave.until(lambda: copy.offsets.get("G", "T", 0) == 10)
            slave.set_master("")  # the master is away
            await asyncio.sleep(0.05)
            copy.offsets.commit("G", "T", 0, 15, NOW_MS)
        async with pair(tmp_path) as (master, slave, _):
            source, copy = master.context, slave.broker.context
            await slave.until(lambda: source.offsets.get("G", "T", 0) == 15)
            await slave.until(lambda: slave.role.commits == {})
            assert copy.offsets.get("G", "T", 0) == 15

    run(body())


def test_offsets_wait_for_the_log(run: Run, tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path) as (master, slave, _):
            slave.arrived = 0
            source, copy = master.context, slave.broker.context
            peer = slave.sync._peer
            while peer is None:
                await asyncio.sleep(0.01)
                peer = slave.sync._peer
            source.groups.put(SubscriptionGroupConfig(group_name="G"), NOW_MS)
            assert (await send(peer, 1)).code == 0
            source.offsets.commit("G", "T", 1, 1, NOW_MS)
            await slave.until(lambda: slave.sync.state.held_to == source.store.log.end)
            await slave.until(lambda: copy.groups.get("G"))  # others do not wait
            assert copy.offsets.get("G", "T", 1) is None
            slave.arrived = source.store.log.end
            await slave.until(lambda: copy.offsets.get("G", "T", 1) == 1)

    run(body())


# --- users ---------------------------------------------------------------------------------------


def access() -> AccessConfig:
    return AccessConfig(authentication=True, authorization=True, internal_user=INTERNAL)


def test_users_are_copied_with_a_shared_secret(run: Run, tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path, access(), SECRET) as (master, slave, _):
            table, copy = master.context.access.table, slave.broker.context.access.table
            table.put_user(User.of("alice", "pass word", SUPER), NOW_MS)
            await slave.until(lambda: "alice" in copy.users)
            assert copy.users["alice"].password == "pass word"
            assert copy.version == table.version
            table.remove_user("alice", NOW_MS)
            await slave.until(lambda: "alice" not in copy.users)
            assert "internal" in copy.users

    run(body())


def test_without_a_secret_users_are_not_copied(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        async with pair(tmp_path, access()) as (master, slave, _):
            master.context.access.table.put_user(User.of("alice", "x"), NOW_MS)
            await slave.until(lambda: slave.sync.state.rounds >= 3)
            assert "alice" not in slave.broker.context.access.table.users

    run(body())
    lines = [line for line in caplog.messages if "are not copied" in line]
    assert len(lines) == 1
    assert "replication.secret is not set" in lines[0]


def test_other_users_do_not_get_the_table(run: Run, tmp_path: Path) -> None:
    async def body() -> None:
        async with pair(tmp_path, access(), SECRET) as (master, slave, _):
            master.context.access.table.put_user(User.of("alice", "x", SUPER), NOW_MS)
            await slave.sync.close()
            slave.sync._sign = strict_signer("alice", "x", slave.now_ms)
            slave.sync.start()
            await slave.until(lambda: slave.sync._access_error)
            assert "only a slave of this broker" in slave.sync._access_error

    run(body())


# --- failures and other masters ------------------------------------------------------------------


def test_failures_are_counted_and_logged_once(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        slave = Slave(tmp_path)
        slave.role.master_online = True
        slave.sync.start()
        slave.set_master(f"127.0.0.1:{free_port()}")
        await slave.until(lambda: slave.sync.state.failures >= 3)
        assert not slave.role.master_online
        assert slave.sync.state.error
        await slave.close()

    with caplog.at_level(logging.WARNING):
        run(body())
    assert sum("can't copy the tables" in line for line in caplog.messages) == 1


def test_the_tables_of_an_apache_master_are_read(run: Run, tmp_path: Path) -> None:
    """Its JSON has numbers as keys, and it does not know all requests."""
    answers = {
        RequestCode.GET_ALL_TOPIC_CONFIG: (
            b'{"dataVersion":{"counter":2,"stateVersion":0,"timestamp":5},"mappingDataVersion":'
            b'{"counter":0},"topicConfigTable":{"T":{"order":false,"perm":6,"readQueueNums":8,'
            b'"topicFilterType":"SINGLE_TAG","topicName":"T","topicSysFlag":0,"writeQueueNums":8}},'
            b'"topicQueueMappingDetailMap":{},"topicQueueMappingInfoMap":{}}'
        ),
        RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: (
            b'{"dataVersion":{"counter":3},"forbiddenTable":{},"subscriptionGroupTable":'
            b'{"G":{"groupName":"G","retryMaxTimes":16}}}'
        ),
        RequestCode.GET_ALL_CONSUMER_OFFSET: (
            b'{"dataVersion":{"counter":4},"groupTopicMap":{"G":["T"]},'
            b'"offsetTable":{"T@G":{0:5,1:7}}}'
        ),
        RequestCode.GET_ALL_DELAY_OFFSET: b'{"offsetTable":{1:2,3:40}}',
        RequestCode.GET_BROKER_HA_STATUS: b'{"master":true,"masterCommitLogMaxOffset":0}',
    }

    async def serve(wire: Wire) -> None:
        while True:
            frame = await wire.read()
            found = answers.get(RequestCode(frame.code))
            if found is None:
                wire.answer(frame, ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
            else:
                wire.answer(frame, body=found)

    async def body() -> None:
        async with serving(serve) as master:
            slave = Slave(tmp_path, secret=SECRET)
            slave.sync.start()
            slave.set_master(master.address)
            context = slave.broker.context
            await slave.until(lambda: slave.sync.state.rounds >= 2)
            assert context.topics.need("T").read_queue_nums == 8
            assert context.topics.table.version == DataVersion(counter=2, timestamp=5)
            assert context.groups.get("G") is not None
            assert [context.offsets.get("G", "T", n) for n in (0, 1)] == [5, 7]
            assert dict(context.delay.table.offsets) == {1: 2, 3: 40}
            await slave.close()

    run(body())


def test_a_table_that_changes_between_pages_is_read_again(run: Run, tmp_path: Path) -> None:
    """The master answers with the first page of the new version."""
    versions = [DataVersion(counter=1), DataVersion(counter=2), DataVersion(counter=2)]
    pages = [["A", "B"], ["A"], ["C"]]
    asked: list[Frame] = []

    async def serve(wire: Wire) -> None:
        while True:
            frame = await wire.read()
            if frame.code != RequestCode.GET_ALL_TOPIC_CONFIG:
                wire.answer(frame, ResponseCode.SYSTEM_ERROR)
                continue
            number = len(asked)
            asked.append(frame)
            page = {name: {"topicName": name} for name in pages[number]}
            content = {"topicConfigTable": page, "dataVersion": versions[number]}
            total = "3" if number == 0 else "2"
            wire.answer(frame, ext={"totalTopicNum": total}, body=fastjson.encode(content))

    async def body() -> None:
        async with serving(serve) as master:
            slave = Slave(tmp_path)
            slave.sync.start()
            slave.set_master(master.address)
            topics = slave.broker.context.topics.table
            await slave.until(lambda: topics.version == versions[-1])
            assert list(topics.topics) == ["A", "C"]
            assert [frame.ext["topicSeq"] for frame in asked[:3]] == ["0", "2", "1"]
            await slave.close()

    run(body())
