"""A NameServer and a broker to run mqadmin against: ours, or Apache's with the same names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from . import apache, penstock
from .clusters import Cluster

NAME = "broker-a"
CLUSTER = "DefaultCluster"
ROOT = ("root", "0123456789")
"""The super user of a cluster with access control."""


@contextmanager
def our_cluster(folder: Path, *, access: bool) -> Iterator[Cluster]:
    """`penstock up`."""
    folder.mkdir(parents=True)
    settings = folder / "penstock.toml"
    text = f'[access]\ninitial_user = "{":".join(ROOT)}"\n'
    text += "authentication = true\nauthorization = true\n" if access else ""
    settings.write_text(text)
    with penstock.Up(folder, "--config", str(settings)) as up:
        yield Cluster(up.address, NAME, up.broker_address)


@contextmanager
def apache_cluster(folder: Path, version: str, *, access: bool) -> Iterator[Cluster]:
    """Apache's servers, with the settings that are our defaults."""
    conf: dict[str, Any] = {
        **apache.access_control(*ROOT, enabled=access),
        "timerWheelEnable": True,
        "timerMaxDelaySec": 40 * 24 * 3600,
        "recallMessageEnable": True,
        "transactionCheckMax": 5,
        "enablePropertyFilter": True,
        "traceTopicEnable": True,
        "brokerName": NAME,
    }
    with (
        apache.NameServer(folder / "names", version=version) as names,
        apache.Broker(
            folder / "broker", folder / "store", names.address, version=version, **conf
        ) as broker,
    ):
        yield Cluster(names.address, NAME, broker.address)
