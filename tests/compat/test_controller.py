"""Apache's brokers under our controllers: ids, elections, failover, and mqadmin's commands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.wire.codes import RequestCode, ResponseCode
from tests.depth import DEPTH

from . import apache, clusters, maven, penstock
from .conftest import Sessions
from .etcd_cluster import EtcdCluster
from .java_session import ClientError, JavaSession, eventually
from .mqadmin_shell import AdminShell
from .reading import read_all
from .test_replication import call

pytestmark = [
    pytest.mark.compat,
    pytest.mark.slow,
    pytest.mark.skipif(clusters.APACHE, reason="both kinds of server take part"),
]

NAME, TOPIC = "elected", "elected-topic"
BROKER: dict[str, Any] = {
    "brokerName": NAME,
    "enableControllerMode": True,
    "allAckInSyncStateSet": True,
    "haSendHeartbeatInterval": 200,
    **apache.SMALL_STORE,
}


STORES = ("file", "etcd")
EACH_ONCE = list(zip(maven.SERVER_VERSIONS, STORES, strict=True))
"""Versions of the brokers with stores of the controllers."""
ALL = list(product(maven.SERVER_VERSIONS, STORES))


class Servers(NamedTuple):
    """A NameServer, a controller or two with etcd, and two brokers of Apache."""

    names: penstock.NameServer
    controller: penstock.Controller | apache.Controller
    brokers: dict[str, Any]
    """By their address."""
    other: penstock.Controller | None = None

    def replicas(self) -> dict[str, Any]:
        """What the controller says of the broker set."""
        body = json.dumps([NAME]).encode()
        code = RequestCode.CONTROLLER_GET_SYNC_STATE_DATA
        answer = call(self.controller.address, code, {}, body)
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        table: dict[str, Any] = json.loads(answer.body)["replicasInfoTable"]
        return table.get(NAME, {})

    def await_in_sync(self, count: int) -> dict[str, Any]:
        def enough() -> dict[str, Any] | None:
            found = self.replicas()
            in_sync = found.get("inSyncReplicas", ())
            alive = sum(one["alive"] for one in in_sync)
            return found if len(in_sync) == alive == count else None

        found = eventually(enough, within_s=60)
        assert found, self.replicas()
        return found


@pytest.fixture(params=ALL if DEPTH == "proof" else EACH_ONCE, ids=lambda both: "-".join(both))
def servers(java: None, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Servers]:
    version, store = request.param
    with ExitStack() as stack:
        names = stack.enter_context(penstock.NameServer(tmp_path / "names"))
        etcd = ""
        if store == "etcd":
            request.getfixturevalue("go_tool")
            etcd = stack.enter_context(EtcdCluster(tmp_path / "etcd")).endpoints
        controllers = [
            stack.enter_context(penstock.Controller(tmp_path / f"controller-{number}", etcd=etcd))
            for number in range(2 if etcd else 1)
        ]
        brokers = [
            stack.enter_context(
                apache.Broker(
                    tmp_path / f"broker-{number}",
                    tmp_path / f"store-{number}",
                    names.address,
                    version=version,
                    controllerAddr=";".join(one.address for one in controllers),
                    **BROKER,
                )
            )
            for number in range(2)
        ]
        other = controllers[1] if etcd else None
        by_address = {broker.address: broker for broker in brokers}
        yield Servers(names, controllers[0], by_address, other)


def send(java: JavaSession, count: int) -> set[str]:
    """Send until this many messages are acknowledged; returns their ids."""
    sent: set[str] = set()

    def send_one() -> bool:
        message = {"topic": TOPIC, "body": "x"}
        try:
            (line,) = java.do("producer.send", producer=NAME, messages=[message])
        except ClientError:
            return False
        if line.get("status") == "SEND_OK":
            sent.add(line["msg_id"])
        return len(sent) >= count

    assert eventually(send_one, within_s=60), sent
    return sent


def test_apaches_brokers_fail_over(servers: Servers, sessions: Sessions) -> None:
    """Nothing that was acknowledged is lost, and the old master comes back as a slave."""
    java = sessions(next(iter(servers.brokers.values())).version)
    first = servers.await_in_sync(2)
    java.do("producer.start", producer=NAME, namesrv=servers.names.address, poll_namesrv_ms=500)
    java.do("producer.create_topic", producer=NAME, topic=TOPIC, queues=4)
    sent = send(java, 30)
    if servers.other is not None:
        servers.other.kill()
    old = servers.brokers[first["masterAddress"]]
    old.kill()
    sent |= send(java, 30)
    second = servers.replicas()
    assert second["masterAddress"] != first["masterAddress"]
    assert second["masterEpoch"] == first["masterEpoch"] + 1
    reason = second["electionHistory"][-1]["reason"]
    assert reason == f"replica {first['masterBrokerId']} is dead: connection refused"
    old.start()
    assert servers.await_in_sync(2)["masterBrokerId"] == second["masterBrokerId"]
    sent |= send(java, 10)
    java.do("producer.stop", producer=NAME)
    cluster = clusters.Cluster(servers.names.address, "", "")
    assert {line["msg_id"] for line in read_all(java, cluster, TOPIC)} >= sent


def test_mqadmin_asks_and_changes(servers: Servers, tmp_path: Path) -> None:
    state = servers.await_in_sync(2)
    controller, names = servers.controller.address, servers.names.address
    version = next(iter(servers.brokers.values())).version
    with AdminShell(names, tmp_path / "tool", version) as shell:
        shown = shell.run("getControllerMetaData", "-a", controller).out
        assert re.search(rf"#ControllerLeaderAddress\s+{controller}\b", shown), shown
        shown = shell.run("getSyncStateSet", "-a", controller, "-b", NAME).out
        assert re.search(r"#SyncStateSetNums\s+2\b", shown), shown

        other = next(a for a in servers.brokers if a != state["masterAddress"])
        number = next(
            one["brokerId"] for one in state["inSyncReplicas"] if one["brokerAddress"] == other
        )
        words = ("-a", controller, "-b", str(number), "-bn", NAME, "-c", "DefaultCluster")
        printed = shell.run("electMaster", *words)
        assert re.search(rf"#BrokerMasterAddr\s+{other}\b", printed.out), printed
        assert servers.await_in_sync(2)["masterAddress"] == other

        words = ("-a", controller, "-k", "enableElectUncleanMaster", "-v", "true")
        assert "success" in shell.run("updateControllerConfig", *words).out
        shown = shell.run("getControllerConfig", "-a", controller).out
        assert re.search(r"enableElectUncleanMaster\s+=\s+true", shown), shown

        servers.brokers[state["masterAddress"]].kill()
        gone = str(state["masterBrokerId"])
        words = ("-a", controller, "-b", gone, "-bn", NAME, "-c", "DefaultCluster")

        def cleaned() -> bool:
            return "success" in shell.run("cleanBrokerMetadata", *words).out

        assert eventually(cleaned)
        left = servers.replicas()
        known = left["inSyncReplicas"] + left["notInSyncReplicas"]
        assert [one["brokerAddress"] for one in known] == [other]
