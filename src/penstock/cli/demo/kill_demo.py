"""`penstock demo broker`: kills a broker under load and shows that no message is lost.

The broker runs in a child process. This process sends messages over TCP and counts the
acknowledgements. At a random time after the given number it kills the broker with SIGKILL. Then
it recovers the store, reads every message, closes the store, and verifies its files.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from penstock.cli.terminal import free_port

if TYPE_CHECKING:
    from penstock.cli.terminal import Progress
    from penstock.store.store import MessageStore

MESSAGES = 1_000_000
MESSAGES_UNCOMPILED = 100_000
"""The number of messages for a run of about a minute without the compiled core."""
KEYS_SAMPLED = 1000
_MIB = 1024 * 1024


class SendStatistics(NamedTuple):
    """Statistics of the broker until it was killed."""

    acknowledged_by_queue: list[int]
    ready_seconds: float
    seconds: float
    per_second: float
    cpu_us: float
    rss_bytes: int
    private_bytes: int

    @property
    def acknowledged(self) -> int:
        return sum(self.acknowledged_by_queue)


class ReadBack(NamedTuple):
    """The result of reading all messages after recovery."""

    messages: int
    lost: int
    wrong: int
    keys_missed: int
    seconds: float


@click.command(short_help="Kill a broker under load, then recover and verify its store.")
@click.option(
    "--messages", type=click.IntRange(min=1), help="Number of messages.  [default: 1000000]"
)
@click.option("--sync-flush", is_flag=True, help="Flush messages before they are acknowledged.")
@click.option(
    "--dir",
    "parent",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Parent of the temporary store.  [default: the system's temporary directory]",
)
@click.option("--seed", type=int, help="Seed for the time of the kill.")
def broker(messages: int | None, sync_flush: bool, parent: Path | None, seed: int | None) -> int:
    """Send a million messages to a broker, kill it, recover and verify the store."""
    import penstock
    from penstock.cli.terminal import say_if_uncompiled

    say_if_uncompiled()
    if messages is None:
        messages = MESSAGES if penstock.compiled() else MESSAGES_UNCOMPILED
        if messages < MESSAGES:
            print(f"using {messages:,} messages, because the core is not compiled")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-demo-", dir=parent) as directory:
        root = Path(directory) / "store"
        rng = random.Random(seed)
        return _run(root, messages, sync_flush=sync_flush, rng=rng, started=started)


def _run(root: Path, messages: int, *, sync_flush: bool, rng: random.Random, started: float) -> int:
    from penstock.cli.terminal import print_summary, progress_bars
    from penstock.store.tools.inspection import StoreFiles
    from penstock.store.tools.verify import Verification

    with progress_bars() as progress:
        sent = _send_and_kill(root, messages, sync_flush=sync_flush, rng=rng, progress=progress)
        with _step("recovering the store") as recovery:
            store = _open(root, sync_flush=sync_flush, progress=progress)
        replayed = store.report.records
        with _step("reading all messages"):
            back = _read_back(store, sent.acknowledged_by_queue, rng, progress)
        log_bytes = store.log.end
        store.close()
        with _step("verifying the files") as verifying:
            verification = Verification(StoreFiles(root), progress)
            problems = list(verification.run())
    for problem in problems[:10]:
        print(f"{problem.severity}: {problem.file} @{problem.offset}: {problem.text}")
    totals = verification.totals
    rows = [
        *_sending_rows(sent, log_bytes / max(totals.records, 1)),
        ("flush", "sync (group commit)" if sync_flush else "async"),
        ("recovery", f"{recovery[0]:.2f} s, {replayed:,} records replayed"),
        ("read", f"{back.messages:,} messages in {back.seconds:.1f} s, {back.wrong:,} wrong"),
        ("keys queried", f"{KEYS_SAMPLED:,}, {back.keys_missed:,} not found"),
        (
            "verified",
            f"{totals.records:,} records, {totals.queue_entries:,} queue entries, "
            f"{totals.index_entries:,} index entries in {verifying[0]:.1f} s; "
            f"damage: {totals.damage:,}",
        ),
        ("lost", f"{back.lost:,}"),
    ]
    good = not (back.lost or back.wrong or back.keys_missed or totals.damage)
    verdict = "nothing lost" if good else "FAILED"
    print_summary(f"Penstock: {verdict} ({time.monotonic() - started:.0f} s in total)", rows)
    return 0 if good else 1


def _sending_rows(sent: SendStatistics, bytes_per_message: float) -> list[tuple[str, str]]:
    rate = sent.per_second
    return [
        ("acknowledged before the kill", f"{sent.acknowledged:,} messages"),
        ("start of the broker", f"{sent.ready_seconds:.2f} s"),
        (
            "sending",
            f"{sent.seconds:.1f} s: {rate:,.0f} messages/s, "
            f"{rate * bytes_per_message / _MIB:,.0f} MiB/s of log, over TCP from one process",
        ),
        ("CPU of the broker", f"{sent.cpu_us:.1f} µs per message"),
        (
            "memory of the broker",
            f"{sent.rss_bytes / _MIB:,.0f} MiB resident (including mapped files), "
            f"{sent.private_bytes / _MIB:,.0f} MiB private",
        ),
    ]


def _send_and_kill(
    root: Path, messages: int, *, sync_flush: bool, rng: random.Random, progress: "Progress"
) -> SendStatistics:
    """Send until `messages` and some more are acknowledged, then kill the broker."""
    from penstock.cli.demo.demo_sender import DemoProducers
    from penstock.server.services.service import run

    print("== starting a broker in a child process", flush=True)
    started = time.monotonic()
    broker, port = _start_broker(root, sync_flush=sync_flush)
    ready_seconds = time.monotonic() - started
    kill_after = messages + rng.randrange(max(messages // 50, 2))
    print(f"== sending {messages:,} messages over TCP", flush=True)
    started, done, measured = time.monotonic(), 0, (0.0, 0, 0, 0.0)

    def on_progress(count: int) -> None:
        nonlocal done, measured
        progress("send", min(count, messages), messages)
        if done < kill_after <= count:
            seconds = time.monotonic() - started
            measured = (count / seconds, *_memory(broker.pid), _cpu_seconds(broker.pid))
            loop = asyncio.get_running_loop()
            loop.call_later(rng.random() * 0.02, broker.send_signal, signal.SIGKILL)
        done = count

    producers = DemoProducers(port, on_progress)
    try:
        run(producers.run())
    finally:
        broker.kill()
        broker.wait()
    seconds = time.monotonic() - started
    if producers.refused or done < kill_after:
        raise click.ClickException(producers.refused or f"the broker ended after {done:,} messages")
    rate, rss, private, cpu = measured
    acknowledged_by_queue = producers.acknowledged
    total = sum(acknowledged_by_queue)
    print(f"== killed the broker (SIGKILL) after {total:,} acknowledged messages", flush=True)
    return SendStatistics(
        acknowledged_by_queue, ready_seconds, seconds, rate, cpu * 1e6 / kill_after, rss, private
    )


def _start_broker(root: Path, *, sync_flush: bool) -> tuple["subprocess.Popen[bytes]", int]:
    """Start a broker on the demo's store; returns the process and the port."""
    from penstock.cli.demo import demo_messages

    port = free_port()
    settings = root.parent / "penstock.toml"
    settings.write_text(demo_messages.toml(sync_flush=sync_flush))
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
    """The user and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> tuple[int, int]:
    """Resident and private (anonymous) bytes of a process."""
    measured = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split()[:2]
        measured[name] = int(value) * 1024
    return measured.get("Rss:", 0), measured.get("Anonymous:", 0)


def _open(root: Path, *, sync_flush: bool, progress: "Progress") -> "MessageStore":
    from penstock.cli.demo import demo_messages
    from penstock.store.store import MessageStore

    config = demo_messages.config(sync_flush=sync_flush)
    return MessageStore(root, config, now_ms=time.time_ns() // 1_000_000, progress=progress)


def _read_back(
    store: "MessageStore",
    acknowledged_by_queue: list[int],
    rng: random.Random,
    progress: "Progress",
) -> ReadBack:
    """Read all queues as a consumer does, and compare each message with what was sent."""
    from penstock.cli.demo import demo_messages

    started = time.monotonic()
    messages = lost = wrong = 0
    for index, acknowledged in enumerate(acknowledged_by_queue):
        found, bad = _read_queue(store, index)
        messages += found
        wrong += bad
        lost += max(acknowledged - found, 0)
        progress("read", index + 1, demo_messages.QUEUES_TOTAL)
    seconds = time.monotonic() - started
    missed = 0
    everywhere = min(acknowledged_by_queue) * demo_messages.QUEUES_TOTAL
    for number in rng.sample(range(everywhere), min(KEYS_SAMPLED, everywhere)):
        topic, _ = demo_messages.queue_of(number)
        hits = store.lookup.by_key(
            topic.decode(),
            demo_messages.key(number),
            begin_ms=0,
            end_ms=1 << 60,
            most=4,
            confirm_offset=store.confirm_offset,
        )
        missed += not any(demo_messages.body(number) in hit for hit in hits)
    return ReadBack(messages, lost, wrong, missed, seconds)


def _read_queue(store: "MessageStore", index: int) -> tuple[int, int]:
    """Read one queue; returns the number of messages and of wrong messages."""
    from penstock.cli.demo import demo_messages
    from penstock.store.get import FOUND
    from penstock.wire.output import Output
    from penstock.wire.record import RECORD, StoredRecord

    topic, queue_id = demo_messages.queue_of(index)
    queue = store.queue(topic.decode(), queue_id)
    if queue is None:
        return 0, 0
    reader, stored = store.new_reader(), StoredRecord()
    offset = wrong = 0
    while reader.find(queue, offset, 800, 4 * _MIB, store.confirm_offset, True) == FOUND:
        output = Output()
        assert reader.copy_to(output, True)
        data = bytearray(output.take())
        stored.bind(memoryview(data))
        at = 0
        while at < len(data):
            good = stored.read(at, len(data)) == RECORD
            good = good and stored.check(stored.physical_offset) == RECORD
            number = offset * demo_messages.QUEUES_TOTAL + index
            body = data[stored.body_at : stored.body_at + stored.body_length]
            wrong += not (
                good and stored.queue_offset == offset and body == demo_messages.body(number)
            )
            if not good:
                return offset, wrong
            at += stored.size
            offset += 1
    return offset, wrong


@contextmanager
def _step(what: str) -> Iterator[list[float]]:
    """Print the name of a step; afterwards the list holds its duration in seconds."""
    print(f"== {what}", flush=True)
    elapsed: list[float] = []
    started = time.monotonic()
    yield elapsed
    elapsed.append(time.monotonic() - started)
