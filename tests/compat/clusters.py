"""Clusters for the tests of real clients: our servers, or Apache's by the environment.

`PENSTOCK_COMPAT_PEER=apache` (or `apache-5.5.1`) runs the very same tests against Apache RocketMQ,
which tells whether a test asks for what RocketMQ does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import apache, maven, penstock

PEER, _, _VERSION = os.environ.get("PENSTOCK_COMPAT_PEER", "").partition("-")
APACHE = PEER == "apache"
APACHE_VERSION = _VERSION or maven.V5_4

AnyBroker = apache.Broker | penstock.Broker
AnyNameServer = apache.NameServer | penstock.NameServer

# Room for bodies of 4 MiB; apache.Broker has tiny files otherwise.
LARGE_FILES: dict[str, Any] = {
    "mappedFileSizeCommitLog": 64 * 1024 * 1024,
    "mappedFileSizeConsumeQueue": 600_000,
    "maxHashSlotNum": 50_000,
    "maxIndexNum": 200_000,
    # Without it Apache 5.4.0 fails to delete a topic.
    "timerWheelEnable": True,
    # Ours is on by default.
    "enablePropertyFilter": True,
}


@dataclass(frozen=True)
class Cluster:
    """A NameServer and one broker, by address and name."""

    namesrv: str
    broker: str
    broker_address: str


@dataclass(frozen=True)
class OwnCluster(Cluster):
    """A cluster whose broker a test may kill, stop and start."""

    server: AnyBroker


def name_server(directory: Path, **conf: Any) -> AnyNameServer:
    """A NameServer of the kind under test, not yet started."""
    if APACHE:
        return apache.NameServer(directory, version=APACHE_VERSION, **conf)
    return penstock.NameServer(directory, **conf)


def broker(directory: Path, namesrv: str, **conf: Any) -> AnyBroker:
    """A broker of the kind under test, not yet started; its store is in `directory`."""
    conf = {**LARGE_FILES, **conf}
    if APACHE:
        return apache.Broker(
            directory, directory / "store", namesrv, version=APACHE_VERSION, **conf
        )
    return penstock.Broker(directory, directory / "store", namesrv, **conf)


@contextlib.contextmanager
def running(
    directory: Path, *, nameserver: Mapping[str, Any] | None = None, **conf: Any
) -> Iterator[OwnCluster]:
    """A NameServer and a broker with these settings, for a test or a module of them."""
    with (
        name_server(directory / "namesrv", **(nameserver or {})) as names,
        broker(directory / "broker", names.address, **conf) as server,
    ):
        yield OwnCluster(names.address, server.name, server.address, server)


@contextlib.contextmanager
def common(directory: Path) -> Iterator[Cluster]:
    """The cluster that most tests share: `penstock up`, or Apache's two servers."""
    if APACHE:
        with running(directory, brokerName="broker-a") as cluster:
            yield cluster
        return
    with penstock.Up(directory) as up:
        yield Cluster(up.address, "broker-a", up.broker_address)
