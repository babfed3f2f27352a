"""For `benchmarks.growth`: CPU per message of brokers that differ in one number.

All brokers of a table run at the same time and are loaded in turn, so that what else the machine
does hits all of them. The best and the median round are shown.
"""

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.attacks import topic_frame
from benchmarks.growth_load import (
    PER_BLOCK,
    Block,
    Connections,
    MeasuredBroker,
    cpu_per_message,
    parsed,
    pull_request,
    send_blocks,
    send_request,
)
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import KVTable
from penstock.wire.codes import RequestCode
from penstock.wire.output import encode

ROUNDS = 5
MESSAGES = 100_000
"""Messages of a round, at least."""
GROWTH_MAX = 0.20
TIMERS = 1_000_000
TIMER_DAYS = 30
STORE_SCALE = 256
"""The store dimension: all files are smaller than usual by this factor, the messages are not. So
the store has the number of files of a larger one, and rolls to new files more often."""
STORE_GB = (1, 50)
GIB = 1 << 30


@dataclass
class Case:
    """A broker to measure: how it is prepared, and the load of a round."""

    label: str
    load: Callable[[Connections], int]
    prepare: Callable[[Connections], object] = lambda connections: None
    connections: int = 1
    settings: Mapping[str, object] = field(default_factory=dict)


def repeated(blocks: Sequence[Block], at_once: int = 1) -> Callable[[Connections], int]:
    """A load that continues with the next block in the next round."""
    following = cycle(blocks)
    count = -(-MESSAGES // blocks[0].requests)
    return lambda connections: connections.run(islice(following, count), at_once=at_once)


def run(title: str, what: str, cases: Sequence[Case], *, unit: str = "messages") -> None:
    """Measure the cases in turns and print a table."""
    found: list[list[float]] = [[] for _ in cases]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        running = []
        for number, case in enumerate(cases):
            broker = MeasuredBroker(folder / str(number), case.settings)
            stack.enter_context(broker)
            with Connections(broker.port) as connections:
                case.prepare(connections)
            running.append((broker, case))
        loads = []
        for broker, case in running:  # not before: a broker closes idle connections
            connections = stack.enter_context(Connections(broker.port, case.connections))
            case.load(connections)
            loads.append((broker, connections, case.load))
        for _ in range(ROUNDS):
            for us, (broker, connections, load) in zip(found, loads, strict=True):
                us.append(cpu_per_message(broker, lambda c=connections, work=load: work(c)))
    table = Table(title=title)
    for column in (what, f"best µs per {unit[:-1]}", "growth", "median µs", "growth"):
        table.add_column(column, justify="right")
    for case, us in zip(cases, found, strict=True):
        cells = []
        for value, first in (
            (min(us), min(found[0])),
            (statistics.median(us), statistics.median(found[0])),
        ):
            growth = value / first - 1
            mark = " (goal < 20 %)" if growth >= GROWTH_MAX else ""
            cells += [f"{value:.2f}", f"{growth:+.0%}{mark}" if us is not found[0] else ""]
        table.add_row(case.label, *cells)
    Console(width=110).print(table)


# --- dimensions


def topics() -> None:
    many = {"BROKER_TOPICS_MAX": 20_000, "BROKER_AUTO_CREATIONS_MAX": 20_000}
    cases = []
    for count in (1, 100, 1_000, 10_000):
        blocks = send_blocks([(f"topic-{number:05d}", 0) for number in range(count)])
        cases.append(Case(f"{count:,}", repeated(blocks), _once(blocks), settings=many))
    run("sends to many topics of one queue", "topics", cases)


def queues() -> None:
    cases = []
    for count in (1, 100, 10_000):
        blocks = send_blocks([("T", number) for number in range(count)], queues=count)
        created = Block(0, 1, topic_frame("T", count))
        cases.append(Case(f"{count:,}", repeated(blocks), _once([created, *blocks])))
    run("sends to many queues of one topic", "queues", cases)


def connections() -> None:
    for at_once in (1, 1_000):
        cases = []
        for count in (1, 100, 1_000):
            blocks = send_blocks([("T", number) for number in range(4)], queues=4,
                                 connections=count)  # fmt: skip
            load = repeated(blocks, min(at_once, count))
            cases.append(Case(f"{count:,}", load, connections=count))
        how = "in turn" if at_once == 1 else "at the same time"
        run(f"sends of {PER_BLOCK} messages, connections {how}", "connections", cases)


def groups() -> None:
    cases = [Case(str(count), _behind(count), _filled, connections=count) for count in (1, 4, 16)]
    run(f"groups that read old messages in memory, {PER_BLOCK} per pull", "groups", cases)
    cases = [Case(str(count), _waiting(count), connections=count + 1) for count in (1, 4, 16)]
    run("groups that wait for messages (sends included)", "groups", cases)


def store() -> None:
    settings = {
        "STORE_SEGMENT_BYTES": GIB // STORE_SCALE,
        "STORE_QUEUE_FILE_ENTRIES": 300_000 // STORE_SCALE,
        "STORE_INDEX_SLOTS": 5_000_000 // STORE_SCALE,
        "STORE_INDEX_ENTRIES": 20_000_000 // STORE_SCALE,
    }
    blocks = send_blocks([("T", number) for number in range(4)], queues=4)
    record_bytes = 330
    cases = []
    for gigabytes in STORE_GB:
        count = gigabytes * GIB // STORE_SCALE // record_bytes // PER_BLOCK
        prepare = _once(islice(cycle(blocks), count))
        cases.append(Case(f"{gigabytes} GB", repeated(blocks), prepare, settings=settings))
    run(f"sends to stores with the files of this size, scaled by {STORE_SCALE}", "store", cases)


def timers() -> None:
    blocks = send_blocks([("T", number) for number in range(4)], queues=4)
    cases = [Case("0", repeated(blocks)), Case(f"{TIMERS:,}", repeated(blocks), _timers)]
    run("sends beside pending timer messages", "timers", cases)


def _once(blocks: "islice[Block] | Sequence[Block]") -> Callable[[Connections], object]:
    return lambda connections: connections.run(blocks)


FILLED = 8_192
"""Messages that groups read again and again."""


def _filled(connections: Connections) -> None:
    connections.run(send_blocks([("T", 0)])[: FILLED // PER_BLOCK])


def _behind(groups: int) -> Callable[[Connections], int]:
    blocks = [
        Block(group, 1, pull_request(f"group-{group}", offset))
        for offset in range(0, FILLED - PER_BLOCK, PER_BLOCK)
        for group in range(groups)
    ]
    following = cycle(blocks)
    count = 4 * MESSAGES // PER_BLOCK
    return lambda connections: PER_BLOCK * connections.run(islice(following, count))


def _waiting(groups: int) -> Callable[[Connections], int]:
    """Each group waits on its connection, then a block is sent on one more; the messages that are
    stored and delivered are counted."""
    sends = [Block(groups, block.requests, block.data) for block in send_blocks([("T", 0)])]
    offset = 0

    def load(connections: Connections) -> int:
        nonlocal offset
        done = 0
        for block in islice(cycle(sends), MESSAGES // PER_BLOCK // groups):
            for group in range(groups):
                request = pull_request(f"group-{group}", offset, suspend=True)
                connections.sockets[group].sendall(request)
            connections.run([block])
            offset += block.requests
            for group in range(groups):
                connections.read(group, 1)
            done += block.requests * (1 + groups)
        return done

    return load


def _timers(connections: Connections) -> None:
    """Send timer messages and wait until the broker has put them into the timer's files."""
    now_ms, distinct = int(time.time() * 1000), 1 << 16
    span_ms = TIMER_DAYS * 86_400_000

    def frames() -> Iterator[bytes]:
        for number in range(distinct):
            due_ms = now_ms + 3_600_000 + number * span_ms // distinct
            yield send_request("Timers", 0, number, properties=f"TIMER_DELIVER_MS\x01{due_ms}\x02")

    every, size = list(frames()), 128
    blocks = [
        Block(0, size, b"".join(every[first : first + size])) for first in range(0, distinct, size)
    ]
    connections.run(islice(cycle(blocks), -(-TIMERS // size)))
    while int(_runtime_info(connections)["timerOffsetBehind"]) > 0:
        time.sleep(0.1)


def _runtime_info(connections: Connections) -> dict[str, str]:
    connections.sockets[0].sendall(encode(RequestCode.GET_BROKER_RUNTIME_INFO, {}, opaque=1))
    return fastjson.decode(parsed(connections.read(0, 1)).body(), KVTable).table


DIMENSIONS = {
    "topics": topics,
    "queues": queues,
    "connections": connections,
    "groups": groups,
    "store": store,
    "timers": timers,
}
