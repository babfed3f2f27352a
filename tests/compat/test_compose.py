"""deploy/compose: its services run as it says, each at a loopback address of its own."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock import Admin, Message, Producer, SendStatus
from penstock.errors import PenstockError

from .etcd_cluster import ETCD_DIR
from .go_program import program

pytestmark = [pytest.mark.compat, pytest.mark.slow]

FILE = Path(__file__).parents[2] / "deploy" / "compose" / "compose.yaml"
READY_S = 60.0


class ComposedServices:
    """The services of the file as processes of this machine."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._services: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())["services"]
        self.addresses = {
            name: f"127.0.53.{number}" for number, name in enumerate(self._services, start=1)
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def names(self, kind: str) -> list[str]:
        return [name for name in self._services if name.startswith(f"{kind}-")]

    def start(self, name: str) -> None:
        service = self._services[name]
        words = [self._here(name, word) for word in shlex.split(service["command"])]
        if words[0] == "etcd":
            words[0] = str(program(ETCD_DIR, "etcd"))
        else:
            words[:1] = [sys.executable, "-m", "penstock.cli.main"]
        settings = service.get("environment", {})
        environment = {**os.environ, **{k: self._here(name, v) for k, v in settings.items()}}
        (self._directory / name).mkdir(exist_ok=True)
        with (self._directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                words, env=environment, stdout=log, stderr=log, cwd=self._directory / name
            )

    def _here(self, service: str, text: str) -> str:
        """A value of the file as it is needed on this machine."""
        text = re.sub(r"\$\{PENSTOCK_SECRET:\?[^}]*\}", "a long random text", text)
        text = text.replace("0.0.0.0", self.addresses[service])
        # In `etcd-1=http://etcd-1:2380` the first is a name, and so is the value of ETCD_NAME.
        host = r"(?<=//)[a-z]+-\d" if service.startswith("etcd-") else r"[a-z]+-\d"
        text = re.sub(host, lambda found: self.addresses[found[0]], text)
        return text.replace("/data", str(self._directory / service))

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def stop(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            process.wait()

    def logs(self) -> str:
        return "\n".join(path.read_text()[-800:] for path in self._directory.glob("*.log"))


@contextmanager
def services(directory: Path) -> Iterator[ComposedServices]:
    found = ComposedServices(directory)
    try:
        for kind in ("etcd", "nameserver", "controller", "broker"):
            for name in found.names(kind):
                found.start(name)
        yield found
    finally:
        found.stop()


def master(admin: Admin, *, in_sync: int) -> str:
    """The address of the master when this many replicas are in sync; empty before."""
    with suppress(PenstockError):
        replicas = admin.replicas()
        if 1 + sum(bool(one.in_sync) for one in replicas) == in_sync:
            return next((one.broker.address for one in replicas if one.broker.is_master), "")
    return ""


def await_master(admin: Admin, composed: ComposedServices, *, in_sync: int) -> str:
    deadline = time.monotonic() + READY_S
    while not (found := master(admin, in_sync=in_sync)):
        assert time.monotonic() < deadline, composed.logs()
        time.sleep(0.1)
    return found


def test_the_services_survive_the_loss_of_a_machine(tmp_path: Path) -> None:
    with services(tmp_path) as composed:
        nameservers = ";".join(
            f"{composed.addresses[name]}:9876" for name in composed.names("nameserver")
        )
        with Admin(nameservers) as admin, Producer(nameservers, group="g") as producer:
            first = await_master(admin, composed, in_sync=3)
            assert producer.send(Message("T", b"1")).status is SendStatus.SEND_OK
            (number,) = (
                name[-1]
                for name in composed.names("broker")
                if composed.addresses[name] == first.partition(":")[0]
            )
            for kind in ("etcd", "nameserver", "controller", "broker"):
                composed.kill(f"{kind}-{number}")
            second = await_master(admin, composed, in_sync=2)
            assert second != first
            assert producer.send(Message("T", b"2")).status is SendStatus.SEND_OK
