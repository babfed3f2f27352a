"""A master, a slave and a NameServer as processes, on the machines of a network."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.errors import PeerError
from penstock.transport.peer import Peer, Response
from penstock.wire.codes import RequestCode, ResponseCode

from . import apache
from .java_session import eventually
from .replication_network import Host, Network

BROKER = "pair"
SEGMENT_BYTES = 1024 * 1024
REPORT_MS, IDLE_MS = 300, 1_500
LAG_MS_MAX = 4_000
SLAVE_TIMEOUT_MS = 300
RECOVERY_S = 60.0
"""Longer than any recovery takes on a busy machine; reaching it is an error."""


class Machine:
    """A host with one broker and its disk."""

    def __init__(self, host: Host, root: Path, nameserver_port: int, settings: str) -> None:
        self.name = host.name
        self.address = f"{host.address}:{host.port}"
        self.disk = root / f"disk-{host.name}"
        self.log = root / f"{host.name}.log"
        self._host = host
        self._file = root / f"{host.name}.toml"
        self._nameserver = f"{host.nameserver_host}:{nameserver_port}"
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None

    def configure(self, role: str, broker_id: int, master: str) -> None:
        """Write the settings; `master` is the HA address of the master, if slaves are told it."""
        host = self._host
        self._file.write_text(
            f"""
            [broker]
            name = "{BROKER}"
            id = {broker_id}
            host = "0.0.0.0"
            announce = "{host.address}"
            port = {host.port}
            data = "{self.disk}"
            nameservers = "{self._nameserver}"
            probe_port = 0
            vip_port = 0
            [store]
            sync_flush = true
            segment_bytes = {SEGMENT_BYTES}
            [replication]
            role = "{role}"
            announce = "{host.ha_address}"
            port = {host.ha_port}
            master = "{master}"
            read_from_slaves = true
            report_ms = {REPORT_MS}
            idle_ms = {IDLE_MS}
            lag_ms_max = {LAG_MS_MAX}
            slave_timeout_ms = {SLAVE_TIMEOUT_MS}
            {self._settings}
            """
        )

    def start(self) -> None:
        """Start the broker and wait until it is ready."""
        command = ("broker", "-c", str(self._file))
        self._process = run_penstock(self.log, *command, enter=self._host.enter)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, unless it is not running."""
        process, self._process = self._process, None
        if process is not None:
            with process:
                process.kill()

    def delete_disk(self) -> None:
        """Delete all that the broker has stored; it must not be running."""
        shutil.rmtree(self.disk)

    def log_bytes(self) -> bytes:
        """All segments of the log, without the empty end of the last one."""
        files = sorted((self.disk / "commitlog").iterdir())
        return b"".join(file.read_bytes() for file in files).rstrip(b"\0")

    def ha_status(self) -> dict[str, Any]:
        """What mqadmin's haStatus would show."""
        answer = asyncio.run(_call(self.address, RequestCode.GET_BROKER_HA_STATUS))
        assert answer.code == ResponseCode.SUCCESS, answer.remark
        status: dict[str, Any] = json.loads(answer.body)
        return status


class Pair:
    """A NameServer, a master and a slave. The slave can be promoted."""

    def __init__(
        self, network: Network, root: Path, role: str, replication: Mapping[str, Any]
    ) -> None:
        """`replication` are settings of both brokers."""
        self.network = network
        self.role = role
        self.protocol = replication["protocol"]
        self._root = root
        port = apache.free_port()
        self.nameserver = f"127.0.0.1:{port}"
        settings = "\n".join(f"{key} = {json.dumps(value)}" for key, value in replication.items())
        self.master, self.slave = (
            Machine(host, root, port, settings) for host in network.hosts.values()
        )
        self._names: subprocess.Popen[bytes] | None = None
        self._slave_id = 1

    def start(self) -> None:
        port = self.nameserver.rpartition(":")[2]
        self._names = run_penstock(
            self._root / "names.log", "nameserver", "--host", "0.0.0.0", "--port", port
        )
        self.master.configure(self.role, 0, self._ha_address())
        self.start_master()
        self.start_slave()

    def _ha_address(self) -> str:
        return self.network.slaves_connect_to(self.master.name)

    def start_master(self) -> None:
        """It has the role of its settings, or that of the last promotion."""
        self.master.start()

    def start_slave(self) -> None:
        self.slave.configure("slave", self._slave_id, self._ha_address())
        self.slave.start()

    def start_old_master(self) -> None:
        """Start the master that was replaced, as a slave with an id that it has not had before:
        only changed settings count more than the role that it was given."""
        self._slave_id += 1
        self.start_slave()

    def promote(self, *options: str) -> None:
        """Exchange the roles with `penstock cluster promote`. With `--force`, the master does not
        run or is cut off."""
        command = (
            *("cluster", "promote", BROKER, str(self._slave_id), "--yes", *options),
            *("--role", self.role, "-n", self.nameserver, "--timeout-ms", "1000"),
        )
        done = subprocess.run(
            penstock_command(*command), capture_output=True, text=True, env=penstock_environment()
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{self.last_words()}"
        self.master, self.slave = self.slave, self.master
        self._ha_address()  # a proxy leads to the new master

    def await_in_sync(self) -> None:
        """Wait until the slave is in sync and has all that the master has now."""
        end = -1

        def in_sync() -> bool:
            nonlocal end
            try:
                status = self.master.ha_status()
            except PeerError:  # its connection to us may have to recover from lost packets
                return False
            end = status["masterCommitLogMaxOffset"] if end < 0 else end
            slaves = status["haConnectionInfo"]
            return any(one["inSync"] and one["slaveAckOffset"] >= end for one in slaves)

        assert eventually(in_sync, within_s=RECOVERY_S), self.last_words()

    def last_words(self) -> str:
        """The end of the log of each broker."""
        machines = (self.master, self.slave)
        return "\n".join(f"--- {one.name}\n{one.log.read_text()[-3000:]}" for one in machines)

    def stop(self) -> None:
        self.network.restore()
        for machine in (self.master, self.slave):
            machine.kill()
        if self._names is not None:
            with self._names as names:
                names.kill()


@contextmanager
def running(
    network: Network, root: Path, role: str, replication: Mapping[str, Any]
) -> Iterator[Pair]:
    """A master and a slave that is in sync."""
    pair = Pair(network, root, role, replication)
    try:
        pair.start()
        pair.await_in_sync()
        yield pair
    finally:
        pair.stop()


def penstock_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "penstock.cli.main", *arguments]


def penstock_environment() -> dict[str, str]:
    """Settings of this machine's user must not reach the tests; the mode of the core must."""
    kept = {"PENSTOCK_PURE", "PENSTOCK_EXPECT"}
    return {k: v for k, v in os.environ.items() if k in kept or not k.startswith("PENSTOCK_")}


def run_penstock(
    log: Path, *arguments: str, enter: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    """Start a server, on the machine that `enter` leads to; returns when it is ready."""
    command = [*enter, *penstock_command(*arguments)]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=output, env=penstock_environment()
        )
    assert process.stdout is not None
    if not process.stdout.readline():
        with process:
            process.kill()
        raise RuntimeError(f"penstock {arguments[0]} did not start:\n{log.read_text()[-3000:]}")
    return process


async def _call(address: str, code: int) -> Response:
    peer = Peer(address)
    try:
        return await peer.call(code, {}, timeout_ms=1_000)
    finally:
        await peer.close()
