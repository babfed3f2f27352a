"""A real etcd of three members, as child processes.

    with EtcdCluster(tmp) as etcd:
        etcd.endpoints  # "127.0.0.1:…,127.0.0.1:…,127.0.0.1:…"
        etcd.kill(etcd.leader())

The program is built from the module in the directory ``etcd`` (see go_program).
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.integration.certificates import Pair

from . import apache
from .go_program import program

ETCD_DIR = Path(__file__).parent / "etcd"
READY_S = 30.0
CALL_S = 5.0


class EtcdCluster:
    """A cluster; a context manager. Members are numbers from 0 on."""

    def __init__(
        self,
        directory: Path,
        *,
        members: int = 3,
        tls: Pair | None = None,
        options: Sequence[str] = (),
    ) -> None:
        """`tls` is the certificate of all members, and of this class as their client."""
        self._directory = directory
        self._options = tuple(options)
        self._tls = tls
        self._ports = [(apache.free_port(), apache.free_port()) for _ in range(members)]
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def members(self) -> range:
        return range(len(self._ports))

    @property
    def endpoints(self) -> str:
        return ",".join(map(self.endpoint, self.members))

    def endpoint(self, member: int) -> str:
        return f"127.0.0.1:{self._ports[member][0]}"

    def __enter__(self) -> Self:
        try:
            for member in self.members:
                self._launch(member)
            self.await_leader()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def start(self, member: int) -> None:
        """Start a member that was killed, and wait until it knows a leader."""
        self._launch(member)
        self._eventually(lambda: self.status(member).get("leader"), f"member {member} has started")

    def restart(self, member: int) -> None:
        """Start a member that was killed, and wait until it listens."""
        self._launch(member)
        self._eventually(lambda: self._listens(member), f"member {member} listens")

    def kill(self, member: int) -> None:
        """End a member at once, as a crash would."""
        process = self._processes.pop(member)
        process.kill()
        process.wait()

    def stop(self, member: int) -> None:
        """Stop a member with SIGSTOP: its connections stay open, and it does not answer."""
        self._processes[member].send_signal(signal.SIGSTOP)

    def resume(self, member: int) -> None:
        self._processes[member].send_signal(signal.SIGCONT)

    def leader(self) -> int:
        """The member that leads, as most members say."""
        return self._eventually(self._find_leader, "etcd has a leader")

    def pids(self) -> list[int]:
        """The process ids of the running members."""
        return [process.pid for process in self._processes.values()]

    def await_leader(self) -> None:
        self.leader()

    def call(self, path: str, message: Any, member: int | None = None) -> dict[str, Any]:
        """The answer of a member to a request of its gateway; of the leader, if none is named."""
        member = self.leader() if member is None else member
        connection = self._connect(member)
        try:
            connection.request("POST", path, json.dumps(message))
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer
        finally:
            connection.close()

    def status(self, member: int) -> dict[str, Any]:
        """The state of a member; empty if it does not answer."""
        try:
            return self.call("/v3/maintenance/status", {}, member)
        except (OSError, http.client.HTTPException, ValueError):
            return {}

    def _connect(self, member: int) -> http.client.HTTPConnection:
        port = self._ports[member][0]
        if self._tls is None:
            return http.client.HTTPConnection("127.0.0.1", port, timeout=CALL_S)
        context = ssl.create_default_context(cafile=str(self._tls.certificate))
        context.load_cert_chain(*self._tls)
        return http.client.HTTPSConnection("127.0.0.1", port, timeout=CALL_S, context=context)

    def _listens(self, member: int) -> bool | None:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._ports[member][0])) == 0 or None

    def _find_leader(self) -> int | None:
        """A member that says that it leads; another one must agree, if there is one."""
        found = {member: self.status(member) for member in self._processes}
        votes: dict[str, int] = {}
        for status in found.values():
            leader = status.get("leader", "0")
            votes[leader] = votes.get(leader, 0) + 1
        for member, status in found.items():
            own = status.get("header", {}).get("member_id")
            if own and votes.get(own, 0) > len(self._ports) // 2:
                return member
        return None

    def _launch(self, member: int) -> None:
        client, peer = (f"http://127.0.0.1:{port}" for port in self._ports[member])
        tls: tuple[str, ...] = ()
        if self._tls is not None:
            client = client.replace("http:", "https:")
            tls = ("--cert-file", str(self._tls.certificate), "--key-file", str(self._tls.key))
        cluster = ",".join(
            f"m{number}=http://127.0.0.1:{port}" for number, (_, port) in enumerate(self._ports)
        )
        command = [
            str(program(ETCD_DIR, "etcd")),
            *("--name", f"m{member}", "--data-dir", str(self._directory / f"m{member}")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", cluster, "--initial-cluster-token", "penstock"),
            *tls,
            *self._options,
        ]
        self._directory.mkdir(parents=True, exist_ok=True)
        # Settings of this machine's user must not reach the tests.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ETCD_")}
        with (self._directory / f"m{member}.log").open("ab") as log:
            self._processes[member] = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment
            )

    def _eventually(self, check: Any, what: str) -> Any:
        deadline = time.monotonic() + READY_S
        while (found := check()) is None or found == "0":
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {READY_S} s: {what}; logs: {self._directory}")
            time.sleep(0.05)
        return found

    def _end(self) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT)
            process.kill()
        for process in self._processes.values():
            process.wait()
        self._processes.clear()
