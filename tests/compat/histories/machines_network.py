"""A network of machines, each in a network namespace of its own, on one switch.

    clients (this process) --- switch --- broker-1
                                     +--- broker-2
                                     +--- controller-1 ...

The switch is a Linux bridge in a namespace of its own. Each machine has a fixed table of the
hardware addresses of the others. A lost direction is an entry that leads to a hardware address
which nobody has: so packets can be lost between any two machines, and in one direction only.
"""

from __future__ import annotations

import os
import subprocess
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from tests.compat.replication_network import (
    NOBODY,
    NotAllowedError,
    hold_namespace,
    reason,
    run_command,
)

CLIENTS = "clients"
NETWORK = "198.19"
"""Reserved for tests of networks (RFC 2544)."""

Direction = tuple[str, str]
"""The sender and the receiver."""


class MachinesNetwork:
    """Machines that reach each other, until packets between some of them are lost."""

    def __init__(self, names: Sequence[str]) -> None:
        """Raises NotAllowedError if this machine can't do it."""
        self.names = tuple(names)
        self._block = _free_block()
        self._numbers = {name: number for number, name in enumerate((CLIENTS, *names), start=1)}
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._lost: Counter[Direction] = Counter()
        self._changing = threading.Lock()
        """Held while directions are lost or restored: faults overlap, each in threads."""
        self._device = f"pst{os.getpid()}"
        try:
            self._create()
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | subprocess.CalledProcessError):
                raise NotAllowedError(reason(error)) from None
            raise

    def address(self, name: str) -> str:
        return f"{self._block}.{self._numbers[name]}"

    def enter(self, name: str) -> tuple[str, ...]:
        """The words before a command that is to run on a machine."""
        holder = self._holders.get(name)
        return () if holder is None else ("nsenter", f"--net=/proc/{holder.pid}/ns/net")

    def _hardware(self, name: str) -> str:
        return f"02:50:00:00:01:{self._numbers[name]:02x}"

    def _device_of(self, name: str) -> str:
        # The clients' namespace is the one of this process, which has other interfaces.
        return self._device if name == CLIENTS else "to-switch"

    def _create(self) -> None:
        if os.geteuid() != 0:
            raise NotAllowedError("only root can create network namespaces")
        switch = self._holders["switch"] = hold_namespace()
        enter_switch = self.enter("switch")
        run_command("ip link add switch type bridge", enter_switch)
        run_command("ip link set switch up", enter_switch)
        for name, number in self._numbers.items():
            if name != CLIENTS:
                self._holders[name] = hold_namespace()
                run_command("ip link set lo up", self.enter(name))
            near, far = self._device_of(name), f"port{number}"
            run_command(
                f"ip link add {near} address {self._hardware(name)} type veth "
                f"peer name {far} netns {switch.pid}",
                self.enter(name),
            )
            run_command(f"ip link set {far} master switch up", enter_switch)
            run_command(f"ip address add {self.address(name)}/24 dev {near}", self.enter(name))
            run_command(f"ip link set {near} up", self.enter(name))
        everything = [(one, other) for one in self._numbers for other in self._numbers]
        self._aim(everything, lost=False)

    def _aim(self, directions: Iterable[Direction], *, lost: bool) -> None:
        """Send packets to their receivers, or to nobody."""
        lines = defaultdict(list)
        for sender, receiver in directions:
            if sender != receiver:
                hardware = NOBODY if lost else self._hardware(receiver)
                lines[sender].append(
                    f"neighbour replace {self.address(receiver)} lladdr {hardware} "
                    f"nud permanent dev {self._device_of(sender)}\n"
                )
        for sender, several in lines.items():
            command = [*self.enter(sender), "ip", "-batch", "-"]
            text = "".join(several).encode()
            subprocess.run(command, input=text, check=True, capture_output=True)

    def lose(self, directions: Iterable[Direction]) -> None:
        """Lose packets; a direction that is lost several times has to be restored as often."""
        directions = list(directions)
        with self._changing:
            self._aim([one for one in directions if not self._lost[one]], lost=True)
            self._lost.update(directions)

    def restore(self, directions: Iterable[Direction]) -> None:
        directions = list(directions)
        with self._changing:
            self._lost.subtract(directions)
            self._aim([one for one in directions if self._lost[one] <= 0], lost=False)
            self._lost = +self._lost

    def restore_all(self) -> None:
        with self._changing:
            lost, self._lost = self._lost, Counter()
            self._aim(lost, lost=False)

    def close(self) -> None:
        """Delete what is in the namespace of this process; the others vanish soon."""
        subprocess.run(["ip", "link", "delete", self._device], check=False, capture_output=True)
        for holder in self._holders.values():
            with holder:
                holder.kill()


def _free_block() -> str:
    """The first three numbers of addresses that no other run of these tests uses."""
    shown = subprocess.run(["ip", "-o", "-4", "address"], check=False, capture_output=True)
    blocks = (f"{NETWORK}.{(os.getpid() + number) % 256}" for number in range(256))
    return next(block for block in blocks if f" {block}.".encode() not in shown.stdout)


def both_ways(ones: Iterable[str], others: Iterable[str]) -> list[Direction]:
    """All directions between two groups of machines."""
    others = list(others)
    pairs = [(one, other) for one in ones for other in others if one != other]
    return [*pairs, *((other, one) for one, other in pairs)]
