"""`penstock demo broker`: a million messages, a killed broker, and proof that nothing is lost.

A broker runs in a process of its own; this one sends to it over TCP and counts what it
acknowledges. At a random moment after the wanted number the broker is killed with SIGKILL. Then
this process recovers the store, reads every message back, closes it, and checks its files.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

if TYPE_CHECKING:
    from penstock.cli.terminal import Progress
    from penstock.store.store import MessageStore

MESSAGES = 1_000_000
MESSAGES_UNCOMPILED = 100_000
"""What fits into a minute without a compiled kernel."""
KEYS_SAMPLED = 1000
_MIB = 1024 * 1024


class Written(NamedTuple):
    """What the broker had done when it was killed."""

    lanes: list[int]  # acknowledged in each
    ready_seconds: float
    seconds: float
    per_second: float
    cpu_us: float
    rss_bytes: int
    private_bytes: int

    @property
    def acknowledged(self) -> int:
        return sum(self.lanes)


class ReadBack(NamedTuple):
    """What was found after recovery."""

    messages: int
    lost: int
    wrong: int
    keys_missed: int
    seconds: float


@click.command()
@click.option("--messages", type=click.IntRange(min=1), help="How many (default: a million).")
@click.option("--sync-flush", is_flag=True, help="Acknowledge only what is on the disk.")
@click.option(
    "--dir",
    "parent",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Where the temporary store goes (default: the system's place).",
)
@click.option("--seed", type=int, help="For the moment of the kill.")
def broker(messages: int | None, sync_flush: bool, parent: Path | None, seed: int | None) -> int:
    """Send a million messages to a broker, kill it, recover, verify, show the figures."""
    import penstock
    from penstock.cli.terminal import say_if_uncompiled

    say_if_uncompiled()
    if messages is None:
        messages = MESSAGES if penstock.compiled() else MESSAGES_UNCOMPILED
        if messages < MESSAGES:
            print(f"scaled down to {messages:,} messages: the kernel is not compiled")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-demo-", dir=parent) as folder:
        root = Path(folder) / "store"
        chance = random.Random(seed)
        return _run(root, messages, sync_flush=sync_flush, chance=chance, began=began)


def _run(
    root: Path, messages: int, *, sync_flush: bool, chance: random.Random, began: float
) -> int:
    from penstock.cli.terminal import progress_bars
    from penstock.store.tools.inspection import StoreFiles
    from penstock.store.tools.verify import Verification

    with progress_bars() as tell:
        written = _write(root, messages, sync_flush=sync_flush, chance=chance, tell=tell)
        with _step("recovering") as took:
            store = _open(root, sync_flush=sync_flush, tell=tell)
        recovery_seconds, report = took[0], store.report
        with _step("reading everything back"):
            back = _read_back(store, written.lanes, chance, tell)
        log_bytes = store.log.end
        store.close()
        with _step("verifying the files") as took:
            verification = Verification(StoreFiles(root), tell)
            problems = list(verification.run())
    for problem in problems[:10]:
        print(f"{problem.severity}: {problem.file} @{problem.offset}: {problem.text}")
    totals = verification.totals
    good = not (back.lost or back.wrong or back.keys_missed or totals.damage)
    rate = written.per_second
    per_message = log_bytes / max(totals.records, 1)
    rows = [
        ("acknowledged before the kill", f"{written.acknowledged:,} messages"),
        ("start of the broker", f"{written.ready_seconds:.2f} s"),
        (
            "sending",
            f"{written.seconds:.1f} s: {rate:,.0f} messages/s, "
            f"{rate * per_message / _MIB:,.0f} MiB/s of log, over TCP from one process",
        ),
        ("broker's CPU", f"{written.cpu_us:.1f} µs per message"),
        ("flush", "sync (group commit)" if sync_flush else "async"),
        (
            "memory of the broker",
            f"{written.rss_bytes / _MIB:,.0f} MiB resident (mapped files "
            f"included), {written.private_bytes / _MIB:,.0f} MiB private",
        ),
        ("recovery", f"{recovery_seconds:.2f} s, {report.records:,} records replayed"),
        ("read back", f"{back.messages:,} messages in {back.seconds:.1f} s, {back.wrong:,} wrong"),
        ("keys looked up", f"{KEYS_SAMPLED:,}, {back.keys_missed:,} missed"),
        (
            "verified",
            f"{totals.records:,} records, {totals.queue_entries:,} queue entries, "
            f"{totals.index_entries:,} index entries in {took[0]:.1f} s; "
            f"damage: {totals.damage:,}",
        ),
        ("lost", f"{back.lost:,}"),
    ]
    _show(rows, good=good, seconds=time.monotonic() - began)
    return 0 if good else 1


def _write(
    root: Path, messages: int, *, sync_flush: bool, chance: random.Random, tell: "Progress"
) -> Written:
    """Send until `messages` and some more are acknowledged, then kill the broker."""
    from penstock.cli.demo.demo_sender import Producers
    from penstock.server.service import run

    print("== starting a broker in a process of its own", flush=True)
    began = time.monotonic()
    broker, port = _start_broker(root, sync_flush=sync_flush)
    ready_seconds = time.monotonic() - began
    wanted = messages + chance.randrange(max(messages // 50, 2))
    print(f"== sending {messages:,} messages over TCP", flush=True)
    began, done, figures = time.monotonic(), 0, (0.0, 0, 0, 0.0)

    def told(count: int) -> None:
        nonlocal done, figures
        tell("send", min(count, messages), messages)
        if done < wanted <= count:
            seconds = time.monotonic() - began
            figures = (count / seconds, *_memory(broker.pid), _cpu_seconds(broker.pid))
            loop = asyncio.get_running_loop()
            loop.call_later(chance.random() * 0.02, broker.send_signal, signal.SIGKILL)
        done = count

    producers = Producers(port, told)
    try:
        run(producers.run())
    finally:
        broker.kill()
        broker.wait()
    seconds = time.monotonic() - began
    if producers.refused or done < wanted:
        raise click.ClickException(producers.refused or f"the broker ended after {done:,} messages")
    rate, rss, private, cpu = figures
    lanes = producers.acknowledged
    print(f"== killed (SIGKILL) after {sum(lanes):,} acknowledged messages", flush=True)
    return Written(lanes, ready_seconds, seconds, rate, cpu * 1e6 / wanted, rss, private)


def _start_broker(root: Path, *, sync_flush: bool) -> tuple["subprocess.Popen[bytes]", int]:
    """A broker over the demo's store, and its port."""
    from penstock.cli.demo import load

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    settings = root.parent / "penstock.toml"
    settings.write_text(load.toml(sync_flush=sync_flush))
    command = [sys.executable, "-m", "penstock.cli.main", "broker", "-c", str(settings)]
    command += ["--port", str(port), "--data", str(root)]
    log = root.parent / "broker.log"
    with log.open("wb") as lines:
        broker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=lines)
    assert broker.stdout is not None
    with broker.stdout:
        if not broker.stdout.readline():
            raise click.ClickException(f"the broker did not start: {log.read_text()[-1000:]}")
    return broker, port


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> tuple[int, int]:
    """Resident and private (anonymous) bytes of a process."""
    figures = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split()[:2]
        figures[name] = int(value) * 1024
    return figures.get("Rss:", 0), figures.get("Anonymous:", 0)


def _open(root: Path, *, sync_flush: bool, tell: "Progress") -> "MessageStore":
    from penstock.cli.demo import load
    from penstock.store.store import MessageStore

    config = load.config(sync_flush=sync_flush)
    return MessageStore(root, config, now_ms=time.time_ns() // 1_000_000, progress=tell)


def _read_back(
    store: "MessageStore", lanes: list[int], chance: random.Random, tell: "Progress"
) -> ReadBack:
    """Read all queues like a consumer, compare each message with what was written."""
    from penstock.cli.demo import load

    began = time.monotonic()
    messages = lost = wrong = 0
    for place, promised in enumerate(lanes):
        found, bad = _read_lane(store, place)
        messages += found
        wrong += bad
        lost += max(promised - found, 0)
        tell("read", place + 1, load.LANES)
    seconds = time.monotonic() - began
    missed = 0
    everywhere = min(lanes) * load.LANES
    for number in chance.sample(range(everywhere), min(KEYS_SAMPLED, everywhere)):
        topic, _ = load.lane(number)
        hits = store.lookup.by_key(
            topic.decode(),
            load.key(number),
            begin_ms=0,
            end_ms=1 << 60,
            most=4,
            confirmed=store.confirmed,
        )
        missed += not any(load.body(number) in hit for hit in hits)
    return ReadBack(messages, lost, wrong, missed, seconds)


def _read_lane(store: "MessageStore", place: int) -> tuple[int, int]:
    """(messages, how many of them are not what was written) of one queue."""
    from penstock.cli.demo import load
    from penstock.store.get import FOUND
    from penstock.wire.output import Output
    from penstock.wire.record import RECORD, StoredRecord

    topic, queue_id = load.lane(place)
    queue = store.queue(topic.decode(), queue_id)
    if queue is None:
        return 0, 0
    reader, stored = store.fresh_reader(), StoredRecord()
    offset = wrong = 0
    while reader.find(queue, offset, 800, 4 * _MIB, store.confirmed, True) == FOUND:
        output = Output()
        assert reader.copy_to(output, True)
        data = bytearray(output.take())
        stored.bind(memoryview(data))
        at = 0
        while at < len(data):
            good = stored.read(at, len(data)) == RECORD
            good = good and stored.check(stored.physical_offset) == RECORD
            number = offset * load.LANES + place
            body = data[stored.body_at : stored.body_at + stored.body_length]
            wrong += not (good and stored.queue_offset == offset and body == load.body(number))
            if not good:
                return offset, wrong
            at += stored.size
            offset += 1
    return offset, wrong


@contextmanager
def _step(what: str) -> Iterator[list[float]]:
    """Say what is going on; the list holds how long it took afterwards."""
    print(f"== {what}", flush=True)
    took: list[float] = []
    began = time.monotonic()
    yield took
    took.append(time.monotonic() - began)


def _show(rows: list[tuple[str, str]], *, good: bool, seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    verdict = "nothing lost" if good else "SOMETHING IS WRONG"
    table = Table(title=f"Penstock: {verdict} ({seconds:.0f} s in all)", show_header=False)
    table.add_column(style="bold")
    table.add_column()
    for row in rows:
        table.add_row(*row)
    Console().print(table)
