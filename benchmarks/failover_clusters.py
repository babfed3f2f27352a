"""Three replicas of a broker and their controllers, of Penstock or of Apache, as processes."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.compat import apache, maven, penstock
from tests.compat.etcd_cluster import EtcdCluster

from penstock.errors import PenstockError
from penstock.transport.peer import Peer, Response
from penstock.wire.codes import RequestCode

NAME = "failover"
REPLICAS = 3
IN_SYNC_S = 120.0
CALL_MS = 3_000
STOP_S = 60.0
"""A master that has handed over forwards requests until Java's clients ask for the route, for up to
35 s."""
HEARTBEAT_MS, TIMEOUT_MS, SCAN_MS = 500, 3_000, 250
"""Penstock's defaults."""
BROKER: Mapping[str, Any] = {
    "brokerName": NAME,
    "enableControllerMode": True,
    "allAckInSyncStateSet": True,
    "inSyncReplicas": 2,
    "minInSyncReplicas": 2,
    "brokerHeartbeatInterval": HEARTBEAT_MS,
    "controllerHeartBeatTimeoutMills": TIMEOUT_MS,
    "autoCreateTopicEnable": False,
    **apache.SMALL_STORE,
    "mappedFileSizeCommitLog": 16 << 20,
}
JVM = ("-Xms256m", "-Xmx512m", "-XX:MaxDirectMemorySize=256m", "-XX:+UseSerialGC")
"""With the full compiler, which the tests leave out."""

AnyBroker = apache.Broker | penstock.Broker
AnyController = apache.Controller | penstock.Controller


class FailoverCluster:
    """A NameServer, controllers and brokers that run."""

    def __init__(
        self,
        kind: str,
        nameserver: str,
        controllers: Sequence[AnyController],
        brokers: Sequence[AnyBroker],
    ) -> None:
        self.kind = kind
        self.nameserver = nameserver
        self._controllers = controllers
        self._brokers = {broker.address: broker for broker in brokers}

    def _state(self) -> dict[str, Any]:
        """What a controller says of the replicas; empty if none answers."""
        body = json.dumps([NAME]).encode()
        for controller in self._controllers:
            code = RequestCode.CONTROLLER_GET_SYNC_STATE_DATA
            answer = call(controller.address, code, {}, body)
            if answer is not None and answer.code == 0:
                found: dict[str, Any] = json.loads(answer.body)["replicasInfoTable"].get(NAME, {})
                return found
        return {}

    def await_in_sync(self) -> None:
        deadline = time.monotonic() + IN_SYNC_S
        while True:
            state = self._state()
            members = state.get("inSyncReplicas", ())
            if len(members) == REPLICAS == sum(one["alive"] for one in members):
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"not in sync: {state}")
            time.sleep(0.1)

    def replace_master(self, what: str) -> AnyBroker | None:
        """kill -9 or SIGTERM (`stop`) of the master, which is returned; or `promote` a slave."""
        state = self._state()
        master = self._brokers[state["masterAddress"]]
        if what == "kill":
            master.kill()
        elif what == "stop":
            master.stop()
        else:
            self._promote(state)
            return None
        return master

    def _promote(self, state: dict[str, Any]) -> None:
        slave = next(
            one for one in state["inSyncReplicas"] if one["brokerAddress"] != state["masterAddress"]
        )
        fields = {
            "clusterName": "DefaultCluster", "brokerName": NAME, "brokerId": str(slave["brokerId"]),
            "designateElect": "true",
        }  # fmt: skip
        for controller in self._controllers:
            answer = call(controller.address, RequestCode.CONTROLLER_ELECT_MASTER, fields)
            if answer is not None and answer.code == 0:
                return
        raise RuntimeError(f"not elected: {answer}")

    def start(self, broker: AnyBroker) -> None:
        broker.start()

    def create_topic(self, topic: str) -> None:
        self.await_in_sync()
        settings = {
            "topic": topic, "defaultTopic": "TBW102", "readQueueNums": "4", "writeQueueNums": "4",
            "perm": "6", "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0", "order": "false",
        }  # fmt: skip
        # At each replica, because slaves copy the table of topics from time to time only. Ours do
        # not accept it; they copy it within a few seconds.
        for address in self._brokers:
            call(address, RequestCode.UPDATE_AND_CREATE_TOPIC, settings)
        time.sleep(12)


def call(address: str, code: int, fields: Mapping[str, str], body: bytes = b"") -> Response | None:
    """The response of a server; None if it does not answer."""

    async def ask() -> Response | None:
        peer = Peer(address)
        try:
            return await peer.call(code, fields, body, timeout_ms=CALL_MS)
        except PenstockError:
            return None
        finally:
            await peer.close()

    return asyncio.run(ask())


def _penstock(stack: ExitStack, root: Path, *, etcd: bool) -> FailoverCluster:
    names = stack.enter_context(penstock.NameServer(root / "names"))
    endpoints = stack.enter_context(EtcdCluster(root / "etcd")).endpoints if etcd else ""
    controllers = [
        stack.enter_context(penstock.Controller(root / f"controller-{number}", etcd=endpoints))
        for number in range(2 if etcd else 1)
    ]
    addresses = ";".join(one.address for one in controllers)
    brokers = [
        penstock.Broker(
            root / f"broker-{number}",
            root / f"store-{number}",
            names.address,
            controllerAddr=addresses,
            timeout=STOP_S,
            **BROKER,
        )
        for number in range(REPLICAS)
    ]
    for broker in brokers:
        stack.callback(broker.kill)
        broker.begin()
    for broker in brokers:
        broker.await_ready()
    kind = "Penstock, etcd" if etcd else "Penstock, file"
    return FailoverCluster(kind, names.address, controllers, brokers)


def _apache(stack: ExitStack, root: Path, version: str) -> FailoverCluster:
    names = stack.enter_context(apache.NameServer(root / "names", version=version))
    controller = apache.Controller(
        root / "controller",
        version=version,
        scanNotActiveBrokerInterval=SCAN_MS,
        scanInactiveMasterInterval=SCAN_MS,
    )
    stack.enter_context(controller)
    brokers = []
    for number in range(REPLICAS):
        broker = apache.Broker(
            root / f"broker-{number}",
            root / f"store-{number}",
            names.address,
            version=version,
            controllerAddr=controller.address,
            **BROKER,
        )
        broker.jvm = JVM
        brokers.append(stack.enter_context(broker))
    return FailoverCluster(f"Apache {version}", names.address, [controller], brokers)


CLUSTERS: Mapping[str, Callable[[ExitStack, Path], FailoverCluster]] = {
    "file": lambda stack, root: _penstock(stack, root, etcd=False),
    "etcd": lambda stack, root: _penstock(stack, root, etcd=True),
    maven.V5_4: lambda stack, root: _apache(stack, root, maven.V5_4),
    maven.V5_5: lambda stack, root: _apache(stack, root, maven.V5_5),
}
