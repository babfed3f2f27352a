"""Our brokers under Apache's controllers: ids, election, failover, and a master that comes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.depth import rounds

from . import apache, clusters, maven, penstock
from .conftest import Sessions
from .reading import read_all
from .test_controller import NAME, TOPIC, Servers, send

pytestmark = [
    pytest.mark.compat,
    pytest.mark.slow,
    pytest.mark.skipif(clusters.APACHE, reason="both kinds of server take part"),
]

BROKER: dict[str, Any] = {
    "brokerName": NAME,
    "enableControllerMode": True,
    "controllerHeartBeatTimeoutMills": 3000,
    "haSendHeartbeatInterval": 200,
    **apache.SMALL_STORE,
}


CONTROLLERS = [
    (maven.V5_4, "DLedger"),
    (maven.V5_5, "jRaft"),
    (maven.V5_5, "DLedger"),
    (maven.V5_4, "jRaft"),
][: rounds(ci=2, proof=4)]


@pytest.fixture(params=CONTROLLERS)
def servers(java: None, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Servers]:
    version, kind = request.param
    with ExitStack() as stack:
        names = stack.enter_context(penstock.NameServer(tmp_path / "names"))
        controller = stack.enter_context(
            apache.Controller(tmp_path / "controller", version=version, kind=kind)
        )
        brokers = [
            penstock.Broker(
                tmp_path / f"broker-{number}",
                tmp_path / f"store-{number}",
                names.address,
                controllerAddr=controller.address,
                **BROKER,
            )
            for number in range(3)
        ]
        for broker in brokers:
            broker.begin()
        for broker in brokers:
            stack.callback(broker.kill)
            broker.await_ready()
        yield Servers(names, controller, {broker.address: broker for broker in brokers})


def test_our_brokers_fail_over(servers: Servers, sessions: Sessions) -> None:
    """Nothing that was acknowledged is lost, and the old master comes back as a slave."""
    java = sessions(maven.V5_5)
    first = servers.await_in_sync(3)
    java.do("producer.start", producer=NAME, namesrv=servers.names.address, poll_namesrv_ms=500)
    java.do("producer.create_topic", producer=NAME, topic=TOPIC, queues=4)
    sent = send(java, 30)
    old = servers.brokers[first["masterAddress"]]
    old.kill()
    sent |= send(java, 30)
    second = servers.replicas()
    assert second["masterAddress"] != first["masterAddress"]
    assert second["masterEpoch"] == first["masterEpoch"] + 1
    old.start()
    assert servers.await_in_sync(3)["masterBrokerId"] == second["masterBrokerId"]
    sent |= send(java, 10)
    java.do("producer.stop", producer=NAME)
    cluster = clusters.Cluster(servers.names.address, "", "")
    assert {line["msg_id"] for line in read_all(java, cluster, TOPIC)} >= sent
