"""`penstock demo failover`: kills the master of three replicas and shows that sending goes on.

`penstock up --replicas 3` runs in a child process: a NameServer, a controller and three replicas of
a broker. Clients in this process send messages one after another. The master is killed with
SIGKILL. The controller elects another replica, the clients find it, and the killed one comes back
as a slave. Then all messages are read, and compared with the acknowledged ones.
"""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

if TYPE_CHECKING:
    from penstock.client import AsyncAdmin, AsyncProducer

REPLICAS = 3
CLIENTS = 16
"""Clients that send one message after another."""
TOPIC = "Ordered"
BEFORE_S = 3.0
"""How long messages are sent before the kill."""
AFTER_S = 2.0
"""How long they are sent after the killed replica is in sync again."""
START_S = 60.0
RECOVERY_S = 60.0
POLL_S = 0.1
READ_IDLE_MS = 1_000
"""Reading ends after this time without messages."""
_PORTS = 60
"""Ports from the first one that the servers of `penstock up` use."""


class Servers(NamedTuple):
    """The servers of `penstock up`."""

    process: "subprocess.Popen[bytes]"
    nameserver: str


class Acknowledgements:
    """What the clients have sent."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        """Of the acknowledged messages, in the order of their acknowledgements."""
        self.times: list[float] = []
        self.failures = 0
        self._next = 0
        self.stopping = False

    async def send(self, producer: "AsyncProducer") -> None:
        """Send one message after another, each until it is acknowledged."""
        from penstock import Message, PenstockError, SendStatus

        while not self.stopping:
            number, self._next = self._next, self._next + 1
            while True:
                try:
                    receipt = await producer.send(Message(TOPIC, b"%d" % number))
                except PenstockError:
                    self.failures += 1
                else:
                    if receipt.status is SendStatus.SEND_OK:
                        break
                    self.failures += 1
            self.numbers.append(number)
            self.times.append(time.monotonic())

    def gap(self, since: float) -> float:
        """The longest time without an acknowledgement after a time."""
        times = [since, *(moment for moment in self.times if moment > since)]
        return max((later - before for before, later in pairwise(times)), default=0.0)


class Failover(NamedTuple):
    """What happened."""

    ready_s: float
    before: int
    """Messages that were acknowledged before the kill."""
    gap_s: float
    back_s: float
    """How long after its end the killed replica was in sync again."""
    election: str


@click.command(short_help="Kill the master of three replicas under load.")
@click.option(
    "--dir",
    "parent",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Parent of the temporary stores.  [default: the system's temporary directory]",
)
def failover(parent: Path | None) -> int:
    """Run three replicas of a broker, kill the master, and compare what was acknowledged with what
    can be read."""
    from penstock.cli.terminal import say_if_uncompiled
    from penstock.server.services.service import run

    say_if_uncompiled()
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="penstock-demo-", dir=parent) as directory,
        _servers(Path(directory)) as servers,
    ):
        ready_s = time.monotonic() - started
        lost = 0

        async def main() -> None:
            nonlocal lost
            lost = await _run(servers, ready_s)

        run(main())
        return 0 if lost == 0 else 1


async def _run(servers: Servers, ready_s: float) -> int:
    """Run the demo; returns the number of lost messages."""
    from penstock.cli.terminal import print_summary

    sent = Acknowledgements()
    happened = await _send_and_kill(servers, sent, ready_s)
    print("== reading all messages", flush=True)
    found = await _read(servers.nameserver)
    acknowledged = set(sent.numbers)
    lost = len(acknowledged - found.keys())
    repeated = sum(found.values()) - len(found)
    rows = [
        ("start of all servers", f"{happened.ready_s:.1f} s"),
        ("acknowledged before the kill", f"{happened.before:,} messages"),
        ("acknowledged after it", f"{len(sent.numbers) - happened.before:,} messages"),
        ("longest time without an acknowledgement", f"{happened.gap_s:.2f} s"),
        ("election", happened.election),
        ("killed replica", f"in sync again after {happened.back_s:.1f} s, as a slave"),
        ("sends that failed and were repeated", f"{sent.failures:,}"),
        ("read", f"{sum(found.values()):,} messages, {repeated:,} of them repeated"),
        ("lost", f"{lost:,}"),
    ]
    verdict = "nothing lost" if lost == 0 else "FAILED"
    print_summary(f"Penstock: {verdict} when the master is killed", rows)
    return lost


async def _send_and_kill(servers: Servers, sent: Acknowledgements, ready_s: float) -> Failover:
    from penstock import AsyncAdmin, AsyncProducer

    async with (
        AsyncAdmin(servers.nameserver) as admin,
        AsyncProducer(servers.nameserver, group="demo") as producer,
    ):
        await _until(lambda: _in_sync(admin), START_S, "the replicas are not in sync")
        await admin.create_topic(TOPIC, queues=8)
        print(f"== sending messages with {CLIENTS} clients", flush=True)
        clients = [asyncio.ensure_future(sent.send(producer)) for _ in range(CLIENTS)]
        await asyncio.sleep(BEFORE_S)
        master = await _master_port(admin)
        process = _broker_process(servers.process.pid, master)
        before, killed = len(sent.numbers), time.monotonic()
        os.kill(process, signal.SIGKILL)
        print(f"== killed the master (SIGKILL) after {before:,} messages", flush=True)
        await _until(lambda: _moved(admin, master), RECOVERY_S, "no other master was elected")
        print("== another replica is the master; waiting for the killed one", flush=True)
        await _until(lambda: _in_sync(admin), RECOVERY_S, "the killed replica is not in sync")
        back_s = time.monotonic() - killed
        await asyncio.sleep(AFTER_S)
        sent.stopping = True
        await asyncio.gather(*clients)
        last = (await admin.elections())[-1]
        election = f"replica {last.master_id}, epoch {last.epoch}: {last.reason}"
    return Failover(ready_s, before, sent.gap(killed), back_s, election)


async def _read(nameserver: str) -> Counter[int]:
    """Read all messages; returns how often each number was found."""
    from penstock import AsyncPullConsumer

    found: Counter[int] = Counter()
    async with AsyncPullConsumer(nameserver, group="demo") as consumer:
        queues = await consumer.queues(TOPIC)
        consumer.assign(queues)
        for queue in queues:
            await consumer.seek_to_begin(queue)
        while messages := await consumer.poll(READ_IDLE_MS):
            found.update(int(message.body) for message in messages)
    return found


# --- the servers


@contextmanager
def _servers(directory: Path) -> Iterator[Servers]:
    """`penstock up` with three replicas."""
    print(f"== starting a NameServer, a controller and {REPLICAS} replicas", flush=True)
    port = _free_ports()
    command = [sys.executable, "-P", "-m", "penstock.cli.main", "up", "--data", str(directory)]
    command += ["--replicas", str(REPLICAS), "--no-console"]
    command += ["--nameserver-port", str(port), "--broker-port", str(port + 10)]
    log = directory / "up.log"
    with log.open("wb") as lines:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=lines)
    assert process.stdout is not None
    try:
        if not process.stdout.readline().startswith(b"penstock is up"):
            raise click.ClickException(f"not started: {log.read_text()[-1000:]}")
        yield Servers(process, f"127.0.0.1:{port}")
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()  # not before: more lines follow the first one


def _free_ports() -> int:
    """The first of `_PORTS` ports of 127.0.0.1 that are free now. They are below those that systems
    use for outgoing connections."""
    for _ in range(100):
        first = random.randrange(20_000, 30_000)
        if all(_is_free(port) for port in range(first, first + _PORTS)):
            return first
    raise click.ClickException(f"there are no {_PORTS} free ports in a row")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _broker_process(parent: int, port: int) -> int:
    """The process id of the broker that listens on a port."""
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"--port" in words and words[words.index(b"--port") + 1] == b"%d" % port:
            return int(child)
    raise click.ClickException(f"no process of a broker on port {port}")


# --- the replicas


async def _in_sync(admin: "AsyncAdmin") -> bool:
    """Whether there is a master with all its slaves in sync."""
    replicas = await admin.replicas()
    slaves = [one for one in replicas if not one.broker.is_master]
    return len(replicas) == REPLICAS and all(one.in_sync for one in slaves)


async def _master_port(admin: "AsyncAdmin") -> int:
    for one in await admin.brokers():
        if one.is_master:
            return int(one.address.rpartition(":")[2])
    return 0


async def _moved(admin: "AsyncAdmin", port: int) -> bool:
    """Whether the master is another one than that on this port."""
    return await _master_port(admin) not in (0, port)


async def _until(condition: Callable[[], Awaitable[bool]], seconds: float, problem: str) -> None:
    from penstock import PenstockError

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if await condition():
                return
        except PenstockError:
            pass  # a broker that was just killed
        await asyncio.sleep(POLL_S)
    raise click.ClickException(f"{problem} after {seconds:.0f} s")
