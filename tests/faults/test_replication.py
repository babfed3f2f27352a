"""A master and a slave as processes: kill -9, stopped processes, cut connections, deleted disks.

Each round sends messages to a sync_master with sync flush, hits one side, and goes on. In the end
the master's disk is deleted and the slave becomes the master: it has each acknowledged message.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from penstock import Message, Producer
from penstock.client.messages import SendStatus
from penstock.errors import PenstockError
from penstock.store.store import MessageStore
from penstock.wire.message import decode_messages
from tests.depth import rounds

READY_S = 60
NAMES = ("master", "slave")


def free_ports() -> list[int]:
    """A broker's port, its HA port behind it, and the port of a NameServer."""
    found = []
    for _ in range(3):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            found.append(probe.getsockname()[1])
    return found


class Cluster:
    """A NameServer, a master and a slave. Roles can be exchanged."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.broker_ports = dict(zip(NAMES, free_ports(), strict=False))
        self.ha_ports = dict(zip(NAMES, free_ports(), strict=False))
        self.nameserver = f"127.0.0.1:{free_ports()[0]}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start_nameserver(self) -> None:
        port = self.nameserver.rpartition(":")[2]
        process = self._begin("nameserver", ["nameserver", "--port", port])
        assert process.stdout is not None
        assert process.stdout.readline(), self.log("nameserver")

    def start(self, name: str, role: str) -> None:
        """Start a broker, and wait until it is ready."""
        self.configure(name, role, int(role == "slave"))
        process = self.begin(name)
        assert process.stdout is not None
        assert process.stdout.readline(), self.log(name)

    def log(self, name: str) -> str:
        """What a process has logged."""
        return (self.root / f"{name}.log").read_text()

    def configure(self, name: str, role: str, broker_id: int) -> None:
        """Write the settings of a broker."""
        settings = self.root / f"{name}.toml"
        settings.write_text(
            f"""
            [broker]
            name = "broker-a"
            id = {broker_id}
            port = {self.broker_ports[name]}
            data = "{self.root / name}"
            nameservers = "{self.nameserver}"
            probe_port = 0
            vip_port = 0
            [store]
            sync_flush = true
            segment_bytes = 1048576
            [replication]
            role = "{role}"
            port = {self.ha_ports[name]}
            read_from_slaves = true
            """
        )

    def _begin(self, name: str, arguments: list[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "penstock.cli.main", *arguments]
        with (self.root / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        self.processes[name] = process
        return process

    def begin(self, name: str) -> subprocess.Popen[bytes]:
        """Start a broker with the settings that it has, without waiting for it."""
        return self._begin(name, ["broker", "-c", str(self.root / f"{name}.toml")])

    def kill(self, name: str) -> None:
        with self.processes.pop(name) as process:
            process.kill()

    def stop_all(self) -> None:
        for name in list(self.processes):
            self.kill(name)


@contextmanager
def cluster(root: Path) -> Iterator[Cluster]:
    made = Cluster(root)
    try:
        made.start_nameserver()
        made.start("master", "sync_master")
        made.start("slave", "slave")
        yield made
    finally:
        made.stop_all()


def send(servers: Cluster, serial: int, count: int, acknowledged: set[bytes]) -> int:
    """Send messages for a while; notes those that were acknowledged by both replicas."""
    with Producer(servers.nameserver, group="g") as producer:
        for number in range(serial, serial + count):
            body = b"%d" % number
            try:
                receipt = producer.send(Message("T", body))
            except PenstockError:
                continue
            if receipt.status == SendStatus.SEND_OK:
                acknowledged.add(body)
    return serial + count


def hit(servers: Cluster, fault: str) -> None:
    """One fault; the process is running again at the end."""
    if fault == "kill slave":
        servers.kill("slave")
        servers.start("slave", "slave")
    elif fault == "kill master":
        servers.kill("master")
        servers.start("master", "sync_master")
    elif fault == "delete slave":
        servers.kill("slave")
        shutil.rmtree(servers.root / "slave")
        servers.start("slave", "slave")
    elif fault in ("freeze slave", "freeze master"):
        process = servers.processes[fault.split()[1]]
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        process.send_signal(signal.SIGCONT)


def stored(root: Path) -> list[bytes]:
    """The bodies of all messages in a store, after its process has ended."""
    store = MessageStore(root, now_ms=int(time.time() * 1000))
    found = []
    for queue in [q for q in store.queues.rows if q.topic == b"T"]:
        offset = queue.min_offset
        while offset < queue.max_offset:
            got = store.get("T", queue.queue_id, offset, wait=True)
            found += [message.body for message in decode_messages(got.data)]
            offset = max(got.next_offset, offset + 1)
    store.close()
    return found


@pytest.mark.parametrize("seed", range(rounds(ci=2, proof=20)))
def test_nothing_acknowledged_is_lost_with_the_disk_of_the_master(
    tmp_path: Path, seed: int
) -> None:
    rng = Random(seed)
    faults = ["kill slave", "kill master", "freeze slave", "freeze master", "delete slave"]
    acknowledged: set[bytes] = set()
    serial = 0
    with cluster(tmp_path) as servers:
        serial = send(servers, serial, 50, acknowledged)
        for fault in rng.sample(faults, k=3):
            hit(servers, fault)
            serial = send(servers, serial, 50, acknowledged)
        assert len(acknowledged) >= 60, f"only {len(acknowledged)} of {serial} were acknowledged"
        servers.kill("master")
        shutil.rmtree(tmp_path / "master")
        servers.kill("slave")
        servers.start("slave", "sync_master")
        servers.start("master", "slave")  # the other way round now
        serial = send(servers, serial, 50, acknowledged)
    for name in NAMES:
        lost = acknowledged - set(stored(tmp_path / name))
        assert not lost, f"{name} lacks {len(lost)} of {len(acknowledged)} acknowledged messages"
    logs = [
        b"".join(path.read_bytes() for path in sorted((tmp_path / name / "commitlog").iterdir()))
        for name in NAMES
    ]
    shorter = min(len(log.rstrip(b"\0")) for log in logs)
    assert logs[0][:shorter] == logs[1][:shorter]
    assert os.path.exists(tmp_path / "slave" / "epochFileCheckpoint")
