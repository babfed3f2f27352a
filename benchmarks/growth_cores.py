"""For `benchmarks.growth`: several brokers on one machine, and what they cost while they are idle.

`cores` compares one broker on one core with two brokers on two cores; each shares its core with the
process that sends to it, so that two cores are enough. `brokers` starts up to 16 of them, which are
loaded one after another: memory, files, CPU per message and the CPU of the NameServer. `idle` is
what a broker with many topics and its NameServer do without any messages.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.compat import penstock

from benchmarks.growth_load import (
    Connections,
    MeasuredBroker,
    process_cpu_s,
    send_blocks,
)

SECONDS = 8.0
ROUNDS = 2
IDLE_S = 32.0
"""More than a period in which brokers register (`register_ms`)."""
BROKERS = (1, 4, 16)
MESSAGES = 60_000
IDLE_TOPICS = (1, 10_000)
PORTS_APART = 10


def brokers_of(up: penstock.Up) -> dict[int, int]:
    """Process ids of the brokers, by port. The NameServer is in the process of `up`."""
    port = int(up.broker_address.rpartition(":")[2])
    pids = Path(f"/proc/{up.pid}/task/{up.pid}/children").read_text().split()
    return {port + PORTS_APART * number: int(pid) for number, pid in enumerate(pids)}


def pin(pid: int, core: int) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


def anonymous_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("the kernel does not say")


# --- cores


def cores() -> None:
    table = Table(title="a broker and its sender on each core")
    for column in ("brokers", "cores", "messages/s", "ratio", "broker µs per message"):
        table.add_column(column, justify="right")
    usable = sorted(os.sched_getaffinity(0))[:2]
    found: dict[int, list[tuple[float, float]]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        penstock.Up(Path(folder), brokers=len(usable)) as up,
    ):
        brokers = brokers_of(up)
        for _ in range(ROUNDS):
            for count in range(1, len(usable) + 1):
                some = dict(islice(brokers.items(), count))
                found.setdefault(count, []).append(_loaded(some, usable))
    for count, rounds in found.items():
        rate, us = max(one[0] for one in rounds), min(one[1] for one in rounds)
        ratio = rate / max(one[0] for one in found[1])
        table.add_row(str(count), str(count), f"{rate:,.0f}", f"{ratio:.2f}", f"{us:.2f}")
    Console().print(table)


def _loaded(brokers: dict[int, int], usable: list[int]) -> tuple[float, float]:
    """Messages per second of all brokers together, and the CPU of a broker per message in µs."""
    senders = []
    before = {pid: process_cpu_s(pid) for pid in brokers.values()}
    for core, (port, pid) in zip(usable, brokers.items(), strict=False):
        pin(pid, core)
        command = [sys.executable, "-m", "benchmarks.growth_cores", str(port), str(core)]
        senders.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    counts = [json.loads(sender.communicate()[0]) for sender in senders]
    cpu_s = sum(process_cpu_s(pid) - before[pid] for pid in brokers.values())
    return sum(counts) / SECONDS, cpu_s / sum(counts) * 1e6


def send_for(port: int, core: int) -> int:
    """Send as fast as possible for a while, from this core; returns the messages."""
    os.sched_setaffinity(0, {core})
    blocks = cycle(send_blocks([("T", number) for number in range(4)], queues=4))
    done, ends = 0, time.monotonic() + SECONDS
    with Connections(port) as connections:
        while time.monotonic() < ends:
            done += connections.run(islice(blocks, 20))
    return done


# --- many brokers


def brokers() -> None:
    table = Table(title="brokers on one machine, loaded one after another")
    columns = (
        "brokers", "start s", "anonymous MiB each", "fds each", "idle % each", "NameServer MiB",
        "NameServer idle %", "best µs per message", "worst broker",
    )  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right")
    for count in BROKERS:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-"))
            began = time.monotonic()
            up = stack.enter_context(penstock.Up(Path(folder), brokers=count, timeout=120))
            took = time.monotonic() - began
            table.add_row(str(count), f"{took:.1f}", *_costs(up))
    Console(width=150).print(table)


def _costs(up: penstock.Up) -> list[str]:
    brokers = brokers_of(up)
    blocks = send_blocks([("T", number) for number in range(4)], queues=4)
    us = []
    for port, pid in brokers.items():
        best = 1e9
        with Connections(port) as connections:
            connections.run(blocks)
            for _ in range(2):
                began = process_cpu_s(pid)
                done = connections.run(islice(cycle(blocks), MESSAGES // blocks[0].requests))
                best = min(best, (process_cpu_s(pid) - began) / done * 1e6)
        us.append(best)
    pids = [up.pid, *brokers.values()]
    before = [process_cpu_s(pid) for pid in pids]
    time.sleep(IDLE_S)
    idle = [
        (process_cpu_s(pid) - cpu) / IDLE_S * 100 for pid, cpu in zip(pids, before, strict=True)
    ]
    count = len(brokers)
    return [
        f"{sum(map(anonymous_mib, pids[1:])) / count:.1f}",
        f"{sum(len(os.listdir(f'/proc/{pid}/fd')) for pid in pids[1:]) / count:.0f}",
        f"{sum(idle[1:]) / count:.2f}", f"{anonymous_mib(up.pid):.1f}", f"{idle[0]:.2f}",
        f"{min(us):.2f}", f"{max(us):.2f}",
    ]  # fmt: skip


# --- idle


def idle() -> None:
    table = Table(title=f"CPU without messages, % of a core (over {IDLE_S:.0f} s)")
    for column in ("topics", "broker", "its NameServer"):
        table.add_column(column, justify="right")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        pids = []
        for topics in IDLE_TOPICS:
            names = stack.enter_context(penstock.NameServer(folder / f"names-{topics}"))
            settings = {"BROKER_TOPICS_MAX": 20_000, "BROKER_AUTO_CREATIONS_MAX": 20_000}
            broker = MeasuredBroker(folder / f"broker-{topics}", settings, names.address)
            stack.enter_context(broker)
            with Connections(broker.port) as connections:
                connections.run(send_blocks([(f"topic-{n:05d}", 0) for n in range(topics)]))
            pids += [broker.pid, names.pid]
        time.sleep(2)
        before = [process_cpu_s(pid) for pid in pids]
        time.sleep(IDLE_S)
        shares = [
            (process_cpu_s(pid) - cpu) / IDLE_S for pid, cpu in zip(pids, before, strict=True)
        ]
    for number, topics in enumerate(IDLE_TOPICS):
        cells = [f"{share:.2%}" for share in shares[2 * number : 2 * number + 2]]
        table.add_row(f"{topics:,}", *cells)
    Console().print(table)


DIMENSIONS = {"idle": idle, "cores": cores, "brokers": brokers}


if __name__ == "__main__":
    print(json.dumps(send_for(int(sys.argv[1]), int(sys.argv[2]))))
