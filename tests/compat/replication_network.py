"""The network between a master, its slave and their clients, with faults on command.

`Namespaces` gives each machine a network namespace of its own. Three veth pairs connect them:

    clients (this process, the NameServer, the JVM) -- a
    clients -- b
    a -- b, for all that the two machines send each other

Faults are real: lost packets are sent to a hardware address that nobody has, a slow link is a token
bucket (tc tbf), and a reset destroys sockets in the kernel (ss -K). It needs root and iproute2. The
namespaces belong to child processes and vanish with them.

`CuttingProxy` is for machines where that is not allowed: the slave reaches the HA port through a
TCP proxy. It can't separate a machine from its clients.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, NamedTuple

from tests.client.proxy import Proxy

from . import apache

NAMES = ("a", "b")
CLIENTS = "clients"
NOBODY = "02:50:00:00:ff:ff"
"""A hardware address that no interface has."""
LOCAL = "127.0.0.1"
NETWORK = "198.18"
"""Reserved for tests of networks (RFC 2544)."""


class NotAllowedError(Exception):
    """This machine does not let us create networks."""


class Host(NamedTuple):
    """A machine of the network, and how others reach it."""

    name: str
    address: str
    ha_address: str
    nameserver_host: str
    port: int
    ha_port: int
    enter: tuple[str, ...] = ()
    """The words before a command that is to run on this machine."""


class Network(ABC):
    """Two machines and their clients."""

    hosts: dict[str, Host]

    @abstractmethod
    def lose(self, sender: str = "") -> None:
        """Lose what the machines send each other, or only what `sender` sends."""

    @abstractmethod
    def isolate(self, name: str) -> bool:
        """Separate a machine from all others; False if clients can reach it still."""

    @abstractmethod
    def slow(self, kbit_per_s: int) -> None:
        """Limit the rate between the machines."""

    @abstractmethod
    def reset(self, name: str) -> None:
        """Destroy the connections to the other machine; it is told, unless packets are lost."""

    @abstractmethod
    def restore(self) -> None:
        """End all faults."""

    @abstractmethod
    def close(self) -> None: ...

    def slaves_connect_to(self, master: str) -> str:
        """The HA address to set for slaves of this machine; empty if the NameServer tells it."""
        return ""


class _End(NamedTuple):
    """One end of a veth pair."""

    device: str
    address: str
    hardware: str


class Namespaces(Network):
    """A network namespace for each machine."""

    def __init__(self) -> None:
        """Raises NotAllowedError if this machine can't do it."""
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._enter: dict[str, tuple[str, ...]] = {CLIENTS: ()}
        self._links: dict[tuple[str, str], tuple[_End, _End]] = {}
        self._lost: set[tuple[str, str]] = set()
        self._slow = False
        self.hosts = {}
        try:
            self._create()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | subprocess.CalledProcessError):
                raise NotAllowedError(reason(error)) from None
            raise

    def _create(self) -> None:
        if os.geteuid() != 0:
            raise NotAllowedError("only root can create network namespaces")
        for name in NAMES:
            self._holders[name] = hold_namespace()
            pid = self._holders[name].pid
            self._enter[name] = ("nsenter", f"--net=/proc/{pid}/ns/net")
            self._run(name, "ip link set lo up")
        for number, pair in enumerate([(CLIENTS, "a"), (CLIENTS, "b"), NAMES]):
            self._connect(number, *pair)
        for name, other in (NAMES, NAMES[::-1]):
            near, _ = self._links[name, other]
            to_clients, clients = self._links[name, CLIENTS]
            # Machines reach each other only by the link between them.
            self._run(other, f"ip route add {to_clients.address}/32 via {near.address}")
            self.hosts[name] = Host(
                name, to_clients.address, near.address, clients.address, 10911, 10912,
                self._enter[name],
            )  # fmt: skip

    def _connect(self, number: int, first: str, second: str) -> None:
        """Create a link between two machines."""
        block = f"{NETWORK}.{os.getpid() % 256}"
        ends = []
        for name, other, host in ((first, second, 1), (second, first, 2)):
            # The clients' namespace is the one of this process, which has other interfaces.
            device = f"pst{os.getpid()}{other}" if name == CLIENTS else f"to-{other}"
            hardware = f"02:50:00:00:{number:02}:{host:02}"
            ends.append(_End(device, f"{block}.{4 * number + host}", hardware))
        near, far = ends
        where = f"netns {self._holders[first].pid} " if first in self._holders else ""
        run_command(
            f"ip link add {near.device} {where}address {near.hardware} type veth "
            f"peer name {far.device} address {far.hardware} netns {self._holders[second].pid}"
        )
        self._links[first, second] = near, far
        self._links[second, first] = far, near
        for name, end in ((first, near), (second, far)):
            self._run(name, f"ip address add {end.address}/30 dev {end.device}")
            self._run(name, f"ip link set {end.device} up")
        self._aim(first, second, lost=False)
        self._aim(second, first, lost=False)

    def _aim(self, sender: str, receiver: str, *, lost: bool) -> None:
        """Send packets to the receiver, or to nobody."""
        near, far = self._links[sender, receiver]
        hardware = NOBODY if lost else far.hardware
        self._run(
            sender,
            f"ip neighbour replace {far.address} lladdr {hardware} nud permanent dev {near.device}",
        )
        (self._lost.add if lost else self._lost.discard)((sender, receiver))

    def _run(self, name: str, command: str) -> None:
        run_command(command, self._enter[name])

    def lose(self, sender: str = "") -> None:
        for one, other in (NAMES, NAMES[::-1]):
            if sender in ("", one):
                self._aim(one, other, lost=True)

    def isolate(self, name: str) -> bool:
        for one, other in list(self._links):
            if name in (one, other):
                self._aim(one, other, lost=True)
        return True

    def slow(self, kbit_per_s: int) -> None:
        self._slow = True
        for one, other in (NAMES, NAMES[::-1]):
            device = self._links[one, other][0].device
            limits = f"tbf rate {kbit_per_s}kbit burst 4kb latency 1s"
            self._run(one, f"tc qdisc replace dev {device} root {limits}")

    def reset(self, name: str) -> None:
        (other,) = set(NAMES) - {name}
        self._run(name, f"ss --kill --tcp dst {self._links[name, other][1].address}")

    def restore(self) -> None:
        for one, other in list(self._lost):
            self._aim(one, other, lost=False)
        if self._slow:
            self._slow = False
            for one, other in (NAMES, NAMES[::-1]):
                self._run(one, f"tc qdisc del dev {self._links[one, other][0].device} root")

    def close(self) -> None:
        """Delete what is in the namespace of this process; the others vanish soon."""
        for near, _ in [ends for (name, _), ends in self._links.items() if name == CLIENTS]:
            subprocess.run(["ip", "link", "delete", near.device], check=False, capture_output=True)
        for holder in self._holders.values():
            with holder:
                holder.kill()


def hold_namespace() -> subprocess.Popen[bytes]:
    """A process in a namespace of its own; it ends when this process has ended."""
    command = ["unshare", "--net", "sh", "-c", "echo ready; exec cat"]
    holder = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert holder.stdout is not None
    if not holder.stdout.readline():
        with holder:
            holder.kill()
        raise NotAllowedError("unshare --net failed")
    return holder


def run_command(command: str, enter: tuple[str, ...] = ()) -> None:
    subprocess.run([*enter, *command.split()], check=True, capture_output=True)


def reason(error: Exception) -> str:
    stderr = getattr(error, "stderr", None) or b""
    return f"{error} {stderr.decode(errors='replace')}".strip()


class CuttingProxy(Network):
    """All on one machine; only the connection between the HA ports is at risk."""

    def __init__(self) -> None:
        self.hosts = {}
        for name in NAMES:
            port = apache.free_port(above=1)
            self.hosts[name] = Host(name, LOCAL, LOCAL, LOCAL, port, port + 1)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._proxy = Proxy(f"{LOCAL}:0")
        self._do(self._proxy.__aenter__())

    def _do(self, work: Coroutine[Any, Any, Any]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def slaves_connect_to(self, master: str) -> str:
        host = self.hosts[master]
        self._proxy.target = f"{host.ha_address}:{host.ha_port}"
        return self._proxy.address

    def lose(self, sender: str = "") -> None:
        self._loop.call_soon_threadsafe(self._proxy.stall)

    def isolate(self, name: str) -> bool:
        self.lose()
        return False

    def slow(self, kbit_per_s: int) -> None:
        # A write of the slave or the master is a few hundred bytes at the rate of these tests.
        self._proxy.delay_s = 2 / kbit_per_s

    def reset(self, name: str) -> None:
        self._loop.call_soon_threadsafe(self._proxy.cut)

    def restore(self) -> None:
        self._proxy.delay_s = 0
        self._loop.call_soon_threadsafe(self._proxy.flow)

    def close(self) -> None:
        self._do(self._proxy.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
