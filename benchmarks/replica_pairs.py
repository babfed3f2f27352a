"""A master and its slaves as processes, of Penstock or of Apache, for the benchmark of replication.

Both kinds get the same settings. Apache's JVM has the full compiler, which the tests leave out.
"""

import asyncio
import json
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.compat import apache, penstock

from penstock.config import StoreConfig
from penstock.replication.epochs import EpochHistory
from penstock.store.put import PUT_OK
from penstock.store.store import MessageStore
from penstock.transport.peer import Peer
from penstock.wire.codes import RequestCode
from penstock.wire.record import Record

APACHE, EPOCHS, STATIC = "Apache", "Penstock, epochs", "Penstock, static"
KINDS = (EPOCHS, STATIC, APACHE)
TOPIC, QUEUES = "Load", 8
SEGMENT_BYTES = 1 << 30
CALL_MS = 5_000
START_S = 60.0
EPOCH_FILE = "epochFileCheckpoint"

_COMMON: Mapping[str, Any] = {
    "brokerName": "replicated",
    "haSendHeartbeatInterval": 1_000,  # Apache's slave reports nothing before it has passed once
    "mappedFileSizeCommitLog": SEGMENT_BYTES,
    "mappedFileSizeConsumeQueue": 6_000_000,
    "maxHashSlotNum": 5_000_000,
    "maxIndexNum": 20_000_000,
}
ALONE: Mapping[str, Any] = {**_COMMON, "brokerRole": "ASYNC_MASTER"}
SYNC: Mapping[str, Any] = {**_COMMON, "brokerRole": "SYNC_MASTER", "inSyncReplicas": 2}
_SLAVE: Mapping[str, Any] = {**_COMMON, "brokerRole": "SLAVE"}
_JVM = ("-Xms1g", "-Xmx1g", "-XX:MaxDirectMemorySize=1g", "-XX:+UseG1GC")

AnyBroker = apache.Broker | penstock.Broker


class Pair:
    """A NameServer and the brokers of one name, started one by one."""

    def __init__(self, kind: str, root: Path, stack: ExitStack) -> None:
        self.kind = kind
        self._root = root
        self._stack = stack
        names = apache.NameServer if kind == APACHE else penstock.NameServer
        self.namesrv = stack.enter_context(names(root / "names")).address

    def store_dir(self, broker_id: int) -> Path:
        return self._root / f"store-{broker_id}"

    def start(self, conf: Mapping[str, Any], broker_id: int = 0) -> AnyBroker:
        """Start a master, or a slave by its id."""
        folders = self._root / f"broker-{broker_id}", self.store_dir(broker_id)
        conf = {**conf, "brokerId": broker_id}
        broker: AnyBroker
        if self.kind == APACHE:
            broker = apache.Broker(*folders, self.namesrv, **conf)
            broker.jvm = _JVM
        else:
            protocol = {"PENSTOCK_REPLICATION_PROTOCOL": self.kind.rpartition(" ")[2]}
            broker = penstock.Broker(*folders, self.namesrv, settings=protocol, **conf)
        self._stack.enter_context(broker)
        if broker_id == 0:
            create_topic(broker)
        return broker

    def start_slave(self, broker_id: int = 1) -> AnyBroker:
        slave = self.start(_SLAVE, broker_id)
        if self.kind == APACHE:
            await_true(lambda: _knows_master(slave), "the slave knows its master")
        return slave


@contextmanager
def pair(kind: str, root: Path) -> Iterator[Pair]:
    """Brokers in a directory that is deleted afterwards."""
    try:
        with ExitStack() as stack:
            yield Pair(kind, root, stack)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def await_true(look: Callable[[], object], what: str, *, within_s: float = START_S) -> None:
    deadline = time.monotonic() + within_s
    while not look():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {within_s:.0f} s: {what}")
        time.sleep(0.1)


def create_topic(broker: AnyBroker) -> None:
    settings = {
        "topic": TOPIC, "defaultTopic": "TBW102", "readQueueNums": str(QUEUES),
        "writeQueueNums": str(QUEUES), "perm": "6", "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0", "order": "false",
    }  # fmt: skip
    assert apache.request(broker.address, RequestCode.UPDATE_AND_CREATE_TOPIC, settings) == 0


def ask(broker: AnyBroker, code: int, body: bytes = b"") -> dict[str, Any]:
    """The JSON body of a broker's response."""

    async def call() -> bytes:
        peer = Peer(broker.address)
        try:
            return (await peer.call(code, {}, body, timeout_ms=CALL_MS)).body
        finally:
            await peer.close()

    told: dict[str, Any] = json.loads(asyncio.run(call()) or b"{}")
    return told


def log_end(broker: AnyBroker) -> int:
    status = ask(broker, RequestCode.GET_BROKER_HA_STATUS)
    if status["master"]:
        return int(status["masterCommitLogMaxOffset"])
    return int(status["haClientRuntimeInfo"]["maxOffset"])


def undispatched_bytes(broker: AnyBroker) -> int:
    """What is in the log, but not yet in the queues."""
    table = ask(broker, RequestCode.GET_BROKER_RUNTIME_INFO)["table"]
    return int(table["dispatchBehindBytes"])


def await_in_sync(master: AnyBroker, slaves: int) -> None:
    """Wait until this many slaves are in sync."""

    def connections() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = ask(master, RequestCode.GET_BROKER_HA_STATUS)[
            "haConnectionInfo"
        ]
        return found

    await_true(
        lambda: sum(one["inSync"] for one in connections()) == slaves, "all slaves are in sync"
    )


def _knows_master(slave: AnyBroker) -> bool:
    status = ask(slave, RequestCode.GET_BROKER_HA_STATUS)
    if status["haClientRuntimeInfo"].get("masterAddr"):
        return True
    # Setting this (to the default) makes it register at once; otherwise after ten seconds.
    ask(slave, RequestCode.UPDATE_BROKER_CONFIG, b"brokerPermission=6\n")
    return False


def make_stores(first: Path, whole: Path, *, first_bytes: int, size: int, body_bytes: int) -> int:
    """Make the store of a master, and a copy of its first bytes for a slave that was away.

    An empty slave of Apache would copy only the last file. Returns the number of messages that the
    slave lacks.
    """
    _append(whole, first_bytes, body_bytes)
    copy(whole, first)
    return _append(whole, size, body_bytes)


def _append(folder: Path, size: int, body_bytes: int) -> int:
    store = MessageStore(folder, StoreConfig(), now_ms=int(time.time() * 1000))
    record = Record()
    record.store_host = record.born_host = bytes((127, 0, 0, 1, 0, 0, 42, 159))
    number, begin = 0, store.log.end
    while store.log.end < size:
        body = (b"%016d" % number) * (body_bytes // 16)
        unique = b"UNIQ_KEY\x01%016X%016X\x02" % (begin, number)
        record.fill(TOPIC.encode(), body, b"TAGS\x01tag\x02" + unique)
        record.queue_id = number % QUEUES
        assert store.put(record, int(time.time() * 1000)) == PUT_OK
        number += 1
        if number % 1000 == 0:
            store.publish()
    store.publish()
    store.close()
    # Both logs belong to the same epoch: otherwise they count as different.
    history = EpochHistory()
    history.append(1, 0)
    (folder / EPOCH_FILE).write_bytes(history.encode())
    return number


def copy(source: Path, target: Path) -> None:
    """Copy a store; its files stay sparse."""
    target.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cp", "-r", "--sparse=always", str(source), str(target)], check=True)
