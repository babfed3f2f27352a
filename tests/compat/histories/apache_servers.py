"""Apache's brokers and controller, on machines of the network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.compat import apache

SAFE: Mapping[str, Any] = {
    "allAckInSyncStateSet": True,
    "inSyncReplicas": 2,
    "minInSyncReplicas": 2,
}
"""What Penstock does by default."""
HEARTBEAT_MS, TIMEOUT_MS, SCAN_MS = 200, 1_500, 200
HA_HEARTBEAT_MS = 200
"""Masters and slaves of Penstock take a connection for dead that is silent for longer than their
`idle_ms`."""
JVM = ("-Xms128m", "-Xmx384m", "-XX:MaxDirectMemorySize=256m", *apache.QUICK_START)


class ApacheCommand(NamedTuple):
    """How to start a server."""

    words: list[str]
    environment: dict[str, str]


def broker(
    root: Path,
    store: Path,
    *,
    name: str,
    host: str,
    port: int,
    nameserver: str,
    controllers: str,
    settings: Mapping[str, Any],
    version: str,
) -> ApacheCommand:
    server = apache.Broker(
        root,
        store,
        nameserver,
        version=version,
        brokerName=name,
        brokerIP1=host,
        brokerIP2=host,
        listenPort=port,
        haListenPort=port + 1,
        enableControllerMode=True,
        controllerAddr=controllers,
        brokerHeartbeatInterval=HEARTBEAT_MS,
        controllerHeartBeatTimeoutMills=TIMEOUT_MS,
        haHousekeepingInterval=2_000,
        haSendHeartbeatInterval=HA_HEARTBEAT_MS,
        slaveReadEnable=True,
        autoCreateTopicEnable=False,
        **settings,
    )
    server.jvm = JVM
    return ApacheCommand(*server.prepare())


def controller(root: Path, *, host: str, port: int, version: str) -> ApacheCommand:
    server = apache.Controller(
        root,
        version=version,
        controllerDLegerPeers=f"n0-{host}:{port}",
        scanNotActiveBrokerInterval=SCAN_MS,
        scanInactiveMasterInterval=SCAN_MS,
    )
    server.jvm = JVM
    return ApacheCommand(*server.prepare())
