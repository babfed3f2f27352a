"""A master and its slave, one of them Apache's: RocketMQ's static HA protocol in both directions.

The logs must be equal byte by byte, and every message that a Java client sent must be read from the
slave.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.store.store import MessageStore
from penstock.transport.peer import Peer, Response
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.record import RECORD, StoredRecord
from tests.depth import DEPTH

from . import apache, clients, clusters, penstock
from .conftest import Sessions
from .java_session import JavaSession, eventually
from .python_reading import PULL
from .test_store_exchange import SIZES, Content, Place, as_ours, check_files, content_of
from .test_store_exchange import read_all as read_store
from .variants import server_versions

pytestmark = [
    pytest.mark.compat,
    pytest.mark.slow,
    pytest.mark.skipif(clusters.APACHE, reason="both kinds of server take part"),
]

NAME = "replicated"
TOPIC = "replicated-topic"
QUEUES = 4
COUNT = 600
SEGMENT_BYTES = 128 * 1024
PAIR: Mapping[str, Any] = {
    "brokerName": NAME,
    "brokerIP2": "127.0.0.1",
    "haSendHeartbeatInterval": 200,  # Apache's slave sends its first report after this time
    "slaveReadEnable": True,
    **apache.SMALL_STORE,
    "mappedFileSizeCommitLog": SEGMENT_BYTES,
}
SLAVE: Mapping[str, Any] = {**PAIR, "brokerRole": "SLAVE", "brokerId": 1}
SYNC: Mapping[str, Any] = {
    **PAIR,
    "brokerRole": "SYNC_MASTER",
    "inSyncReplicas": 2,
    "slaveTimeout": 1000,
}

COMMITS: Mapping[str, str] = {"consumerGroup": "G", "topic": TOPIC, "queueId": "0"}
COMMITTED = 7

NO_MESSAGE = (
    ResponseCode.PULL_NOT_FOUND,
    ResponseCode.PULL_RETRY_IMMEDIATELY,  # from Apache's slave: the master may have more
    ResponseCode.TOPIC_NOT_EXIST,
)

AnyBroker = apache.Broker | penstock.Broker


def call(address: str, code: int, ext: Mapping[str, str], body: bytes = b"") -> Response:
    """The response of a server to one request."""

    async def ask() -> Response:
        peer = Peer(address)
        try:
            return await peer.call(code, ext, body, timeout_ms=10_000)
        finally:
            await peer.close()

    return asyncio.run(ask())


def commit(broker: AnyBroker, offset: int) -> None:
    """Create a group and commit its offset of the first queue."""
    group = json.dumps({"groupName": COMMITS["consumerGroup"]}).encode()
    for code, ext, body in (
        (RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, group),
        (RequestCode.UPDATE_CONSUMER_OFFSET, {**COMMITS, "commitOffset": str(offset)}, b""),
    ):
        answer = call(broker.address, code, ext, body)
        assert answer.code == ResponseCode.SUCCESS, answer.remark


def committed_at(broker: AnyBroker) -> int:
    answer = call(broker.address, RequestCode.QUERY_CONSUMER_OFFSET, COMMITS)
    return int(answer.ext.get("offset", -1))


def create_topic(*brokers: AnyBroker) -> None:
    """On the slave as well: Apache's slaves copy the table of topics only once a minute."""
    ext = {
        "topic": TOPIC, "defaultTopic": "TBW102", "readQueueNums": str(QUEUES),
        "writeQueueNums": str(QUEUES), "perm": "6", "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0", "order": "false",
    }  # fmt: skip
    for broker in brokers:
        answer = call(broker.address, RequestCode.UPDATE_AND_CREATE_TOPIC, ext)
        assert answer.code == ResponseCode.SUCCESS, answer.remark


def produce(java: JavaSession, namesrv: str, count: int, seed: int) -> dict[Place, Content]:
    """Send messages, all with the status SEND_OK."""
    return as_ours(clients.produce(java, namesrv, {TOPIC: count}, seed=seed))


def ha_status(broker: AnyBroker) -> dict[str, Any]:
    answer = call(broker.address, RequestCode.GET_BROKER_HA_STATUS, {})
    assert answer.code == ResponseCode.SUCCESS, answer.remark
    status: dict[str, Any] = json.loads(answer.body)
    return status


def log_end(broker: AnyBroker) -> int:
    status = ha_status(broker)
    end: int = status["masterCommitLogMaxOffset"]
    return end if status["master"] else int(status["haClientRuntimeInfo"]["maxOffset"])


def slaves_of(broker: AnyBroker) -> list[dict[str, Any]]:
    """The slaves that are in sync and have all of the log; an empty one of ours reports 1."""
    status = ha_status(broker)
    end = status["masterCommitLogMaxOffset"]
    connected = status["haConnectionInfo"]
    return [one for one in connected if one["inSync"] and one["slaveAckOffset"] >= end]


def await_log(slave: AnyBroker, master: AnyBroker) -> int:
    """Wait until the slave has the master's log; returns its end."""
    end = log_end(master)
    assert end > 0
    assert eventually(lambda: log_end(slave) == end), slave.log.read_text()[-4000:]
    return end


def await_master(slave: apache.Broker) -> None:
    """Wait until a slave of Apache knows its master.

    Only a NameServer can tell it: Apache 5 forgets a configured haMasterAddress before its HA
    client exists, and then never takes the NameServer's.
    """

    def known() -> bool:
        if ha_status(slave)["haClientRuntimeInfo"].get("masterAddr"):
            return True
        # Setting this (to the default) makes it register at once; otherwise after ten seconds.
        body = b"brokerPermission=6\n"
        call(slave.address, RequestCode.UPDATE_BROKER_CONFIG, {}, body)
        return False

    assert eventually(known), ha_status(slave)


def log_bytes(broker: AnyBroker, end: int, *, begin: int = 0) -> bytes:
    """The files of the log, which has no gap."""
    files = sorted((broker.store_dir / "commitlog").iterdir())
    starts = [int(file.name) for file in files]
    assert starts == [begin + SEGMENT_BYTES * number for number in range(len(starts))]
    return b"".join(file.read_bytes() for file in files)[: end - begin]


def open_store(root: Path) -> MessageStore:
    sizes = msgspec.structs.replace(SIZES, segment_bytes=SEGMENT_BYTES)
    return MessageStore(root, sizes, now_ms=int(time.time() * 1000))


def pull_all(broker: AnyBroker) -> dict[Place, Content]:
    """Every message of the topic, pulled from this broker."""
    found: dict[Place, Content] = {}
    for queue_id in range(QUEUES):
        for data in pulled(broker, queue_id):
            found.update(contents(bytearray(data)))
    return found


def pulled(broker: AnyBroker, queue_id: int) -> Iterator[bytes]:
    offset = 0
    while True:
        ext = {**PULL, "topic": TOPIC, "queueId": str(queue_id), "queueOffset": str(offset)}
        answer = call(broker.address, RequestCode.PULL_MESSAGE, ext)
        if answer.code != ResponseCode.SUCCESS:
            assert answer.code in NO_MESSAGE, answer.remark
            return
        yield answer.body
        offset = int(answer.ext["nextBeginOffset"])


def contents(data: bytearray) -> dict[Place, Content]:
    stored = StoredRecord()
    stored.bind(memoryview(data))
    found: dict[Place, Content] = {}
    at = 0
    while at < len(data):
        assert stored.read(at, len(data)) == RECORD
        found[TOPIC, stored.queue_id, stored.queue_offset] = content_of(data, stored)
        at += stored.size
    return found


def send_status(java: JavaSession, namesrv: str, producer: str) -> set[str]:
    """The status of a few sends."""
    java.do("producer.start", producer=producer, namesrv=namesrv)
    messages = [{"topic": TOPIC, "body": str(number)} for number in range(3)]
    lines = java.do("producer.send", producer=producer, messages=messages)
    return {line["status"] for line in lines}


def assert_equal_logs(master: AnyBroker, slave: AnyBroker, end: int) -> None:
    assert end > 2 * SEGMENT_BYTES  # or the change to the next file is not tested
    assert log_bytes(slave, end) == log_bytes(master, end)


def assert_readable(slave: penstock.Broker, sent: dict[Place, Content]) -> None:
    """The store of a slave that has stopped is complete and without damage."""
    check_files(slave.store_dir)
    store = open_store(slave.store_dir)
    assert store.report.clean
    assert read_store(store, (TOPIC,)) == sent
    store.close()


@server_versions
def test_slave_of_an_async_master_of_apache(
    sessions: Sessions, tmp_path: Path, version: str
) -> None:
    java = sessions(version)
    with (
        apache.NameServer(tmp_path / "names", version=version) as names,
        apache.Broker(
            tmp_path / "master", tmp_path / "store-m", names.address, version=version, **PAIR
        ) as master,
    ):
        create_topic(master)
        sent = produce(java, names.address, COUNT, seed=1)
        slave = penstock.Broker(tmp_path / "slave", tmp_path / "store-s", names.address, **SLAVE)
        with slave:
            await_log(slave, master)  # the whole log, although it is more than the last file
            assert eventually(lambda: slaves_of(master)), ha_status(master)
            sent |= produce(java, names.address, 100, seed=2)
            await_log(slave, master)
        sent |= produce(java, names.address, 100, seed=3)
        with slave:  # continues where it was
            end = await_log(slave, master)
            assert eventually(lambda: slaves_of(master)), ha_status(master)
            assert eventually(lambda: pull_all(slave) == sent)  # once it knows the topic
        assert_equal_logs(master, slave, end)
        assert_readable(slave, sent)


@server_versions
def test_slave_of_an_apache_master_whose_first_messages_are_deleted(
    sessions: Sessions, tmp_path: Path, version: str
) -> None:
    java = sessions(version)
    with (
        penstock.NameServer(tmp_path / "names") as names,
        apache.Broker(
            tmp_path / "master", tmp_path / "store-m", names.address, version=version, **PAIR
        ) as master,
    ):
        create_topic(master)
        deleted = produce(java, names.address, COUNT, seed=1)
        master.kill()
        (master.store_dir / "commitlog" / f"{0:020}").unlink()
        master.start()
        with penstock.Broker(
            tmp_path / "slave", tmp_path / "store-s", names.address, **SLAVE
        ) as slave:
            await_log(slave, master)
            sent = produce(java, names.address, 100, seed=2)
            end = await_log(slave, master)
        first, second = (log_bytes(one, end, begin=SEGMENT_BYTES) for one in (master, slave))
        assert first == second
        check_files(slave.store_dir)
        store = open_store(slave.store_dir)
        found = read_store(store, (TOPIC,))
        store.close()
        assert sent.items() < found.items() < (deleted | sent).items()


@server_versions
def test_slave_of_a_sync_master_of_apache(sessions: Sessions, tmp_path: Path, version: str) -> None:
    java = sessions(version)
    with (
        penstock.NameServer(tmp_path / "names") as names,
        apache.Broker(
            tmp_path / "master", tmp_path / "store-m", names.address, version=version, **SYNC
        ) as master,
        penstock.Broker(tmp_path / "slave", tmp_path / "store-s", names.address, **SLAVE) as slave,
    ):
        create_topic(master)
        assert eventually(lambda: slaves_of(master)), ha_status(master)
        sent = produce(java, names.address, COUNT, seed=1)
        end = await_log(slave, master)
        slave.stop()
        assert_equal_logs(master, slave, end)
        assert_readable(slave, sent)
        assert send_status(java, names.address, NAME) == {"FLUSH_SLAVE_TIMEOUT"}


@server_versions
def test_slave_of_apache_with_our_master(sessions: Sessions, tmp_path: Path, version: str) -> None:
    java = sessions(version)
    with (
        penstock.NameServer(tmp_path / "names") as names,
        penstock.Broker(tmp_path / "master", tmp_path / "store-m", names.address, **PAIR) as master,
    ):
        create_topic(master)
        sent = produce(java, names.address, COUNT, seed=1)
        with apache.Broker(
            tmp_path / "slave", tmp_path / "store-s", names.address, version=version, **SLAVE
        ) as slave:
            await_master(slave)
            await_log(slave, master)
            sent |= produce(java, names.address, 100, seed=2)
            end = await_log(slave, master)
            create_topic(slave)
            assert eventually(lambda: pull_all(slave) == sent)
            assert_equal_logs(master, slave, end)


@server_versions
@pytest.mark.skipif(DEPTH != "proof", reason="Apache's slaves copy tables once a minute")
def test_a_slave_of_apache_copies_our_offsets(java: None, tmp_path: Path, version: str) -> None:
    with (
        penstock.NameServer(tmp_path / "names") as names,
        penstock.Broker(tmp_path / "master", tmp_path / "store-m", names.address, **PAIR) as master,
        apache.Broker(
            tmp_path / "slave", tmp_path / "store-s", names.address, version=version, **SLAVE
        ) as slave,
    ):
        create_topic(master)
        commit(master, COMMITTED)
        await_master(slave)
        assert eventually(lambda: committed_at(slave) == COMMITTED, within_s=90)


@server_versions
def test_sends_wait_for_a_slave_of_apache(sessions: Sessions, tmp_path: Path, version: str) -> None:
    java = sessions(version)
    with (
        apache.NameServer(tmp_path / "names", version=version) as names,
        penstock.Broker(tmp_path / "master", tmp_path / "store-m", names.address, **SYNC) as master,
    ):
        create_topic(master)
        assert send_status(java, names.address, "early") == {"FLUSH_SLAVE_TIMEOUT"}
        with apache.Broker(
            tmp_path / "slave", tmp_path / "store-s", names.address, version=version, **SLAVE
        ) as slave:
            await_master(slave)
            await_log(slave, master)
            sent = produce(java, names.address, COUNT, seed=1)
            end = log_end(master)
            assert end == log_end(slave)
            assert_equal_logs(master, slave, end)
            slave.kill()
            assert send_status(java, names.address, "late") == {"FLUSH_SLAVE_TIMEOUT"}
        assert sent.items() <= pull_all(master).items()
