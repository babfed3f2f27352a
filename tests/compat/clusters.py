"""Which servers the tests of real clients run against: ours, or Apache's by the environment.

`PENSTOCK_COMPAT_PEER=apache` runs the very same tests against Apache RocketMQ, which tells whether
a test asks for what RocketMQ does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import apache, penstock

APACHE = os.environ.get("PENSTOCK_COMPAT_PEER") == "apache"

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
    """A NameServer and one broker that runs for many tests."""

    namesrv: str
    broker: str
    broker_address: str


def name_server(directory: Path, **conf: Any) -> AnyNameServer:
    """A NameServer of the cluster under test, not yet started."""
    return (apache.NameServer if APACHE else penstock.NameServer)(directory, **conf)


def broker(directory: Path, namesrv: str, **conf: Any) -> AnyBroker:
    """A broker of the cluster under test, not yet started; its store is in `directory`."""
    kind = apache.Broker if APACHE else penstock.Broker
    return kind(directory, directory / "store", namesrv, **{**LARGE_FILES, **conf})


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    """The common cluster: `penstock up`, or Apache's two servers."""
    if not APACHE:
        with penstock.Up(directory) as up:
            yield Cluster(up.address, "broker-a", up.broker_address)
        return
    with (
        name_server(directory / "namesrv") as names,
        broker(directory / "broker", names.address, brokerName="broker-a") as one,
    ):
        yield Cluster(names.address, one.name, one.address)
