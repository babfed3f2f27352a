"""A NameServer and a broker to run mqadmin against: ours, or Apache's with the same names."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import apache

NAME = "broker-a"
CLUSTER = "DefaultCluster"
ROOT = ("root", "0123456789")
"""The super user of a house with access control."""
_AUTH = "org.apache.rocketmq.auth"
_PATIENCE_S = 30.0


@dataclass(frozen=True)
class House:
    """Where to find it."""

    names: str
    broker: str


@contextmanager
def our_house(folder: Path, *, access: bool) -> Iterator[House]:
    """`penstock up`."""
    names, broker = apache.free_port(), apache.free_port(below=2, above=2)
    folder.mkdir(parents=True)
    conf = folder / "penstock.toml"
    text = f'[access]\ninitial_user = "{":".join(ROOT)}"\n'
    text += "authentication = true\nauthorization = true\n" if access else ""
    conf.write_text(text)
    ports = ["--nameserver-port", str(names), "--broker-port", str(broker), "--no-console"]
    command = [sys.executable, "-m", "penstock.cli.main", "up", "-c", str(conf)]
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--data", str(folder / "data"), *ports],
            stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        if not first.startswith("penstock is up"):
            raise RuntimeError(f"penstock did not start:\n{(folder / 'log.txt').read_text()}")
        yield House(f"127.0.0.1:{names}", f"127.0.0.1:{broker}")
        process.send_signal(signal.SIGTERM)
        assert process.wait(_PATIENCE_S) == 0, (folder / "log.txt").read_text()
    finally:
        process.kill()
        process.communicate()


@contextmanager
def apache_house(folder: Path, *, access: bool) -> Iterator[House]:
    """Apache's servers, with the settings that are our defaults."""
    conf: dict[str, Any] = {
        "initAuthenticationUser": json.dumps({"username": ROOT[0], "password": ROOT[1]}),
        "authenticationEnabled": access,
        "authorizationEnabled": access,
        "timerWheelEnable": True,
        "traceTopicEnable": True,
    }
    for area in ("authentication", "authorization"):
        provider, noun = f"{_AUTH}.{area}.provider", area.capitalize()
        conf[f"{area}Provider"] = f"{provider}.Default{noun}Provider"
        conf[f"{area}MetadataProvider"] = f"{provider}.Local{noun}MetadataProvider"
    with (
        apache.NameServer(folder / "names") as names,
        apache.Broker(
            folder / "broker", folder / "store", names.address, brokerName=NAME, **conf
        ) as broker,
    ):
        yield House(names.address, broker.address)
        broker.kill()  # a clean shutdown takes seconds, and nobody reads the store
