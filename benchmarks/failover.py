"""How long nobody can write when the master of three replicas is lost: Penstock beside Apache.

* `kill`: kill -9 of the master. The gap is the time between the last acknowledged send before and
  the first one after it.
* `stop`: SIGTERM of the master, as for maintenance. The gap is the longest time between two
  acknowledged sends meanwhile.
* `promote`: the controllers elect another master while this one runs.

A master that was killed or stopped is started again half a second later, as `penstock up` and
systemd do it.

Brokers and controllers of both kinds have the same timeouts, which are Penstock's defaults. Three
clients send one message after another at the same time: Penstock's client, and a stock Java
producer that asks the NameServer for the route every 500 ms or, its default, every 30 s. After a
failure the Java producer does not ask before that.

`FAILOVER_KILLS` is the number of kills of each cluster, `FAILOVER_SWITCHES` that of stops and of
promotions. The producer with 30 s takes part in the first `FAILOVER_SLOW` of each.
Needs Java and Maven, and Go for etcd. `python -m benchmarks.failover [CLUSTER …]` measures some
clusters.
"""

import itertools
import os
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from tests.compat import maven
from tests.compat.java_session import ClientError, JavaSession

from benchmarks.failover_clusters import CLUSTERS, FailoverCluster
from penstock import Message, Producer
from penstock.client.messages import SendStatus
from penstock.errors import PenstockError

KILLS = int(os.environ.get("FAILOVER_KILLS", "10"))
SWITCHES = int(os.environ.get("FAILOVER_SWITCHES", "5"))
SLOW_ROUNDS = int(os.environ.get("FAILOVER_SLOW", "3"))
"""Rounds with the Java producer that asks for the route every 30 s."""
TOPIC = "failover"
MESSAGE = {"topic": TOPIC, "body": "x"}
PAUSE_S = 0.005
RESTART_S = 0.5
STEADY_S = 1.0
"""How long all clients send without a failure before and after."""
GAP_S_MAX = 120.0
OURS, JAVA_QUICK, JAVA_SLOW = "Penstock's client", "Java, 500 ms", "Java, 30 s"

Gaps = dict[tuple[str, str, str], list[float]]
"""By cluster, what was done, and client."""


class Sender:
    """Sends one message after another in a thread, and notes when they are acknowledged."""

    def __init__(self, send: Callable[[], str]) -> None:
        """`send` returns the reason of a failure."""
        self._send = send
        self.acknowledged: list[float] = []
        self.failures: list[str] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping:
            if reason := self._send():
                self.failures.append(reason)
            else:
                self.acknowledged.append(time.monotonic())
            time.sleep(PAUSE_S)

    def await_steady(self) -> None:
        """Wait until sends are acknowledged again, for a while."""
        begin, deadline = time.monotonic(), time.monotonic() + GAP_S_MAX
        while time.monotonic() < deadline:
            failures, count = len(self.failures), len(self.acknowledged)
            time.sleep(STEADY_S)
            recent = [one for one in self.acknowledged[count:] if one > begin]
            if len(self.failures) == failures and len(recent) > 5:
                return
        raise TimeoutError(f"no acknowledged sends for {GAP_S_MAX} s")

    def gap_since(self, at: float) -> float:
        """The longest time between two acknowledgements, of those after a time."""
        before = max((one for one in self.acknowledged if one <= at), default=at)
        times = [before, *(one for one in self.acknowledged if one > at)]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    def stop(self) -> None:
        self._stopping = True
        self._thread.join()


def python_sender(stack: ExitStack, nameserver: str) -> Sender:
    producer = stack.enter_context(Producer(nameserver, group="failover"))

    def send() -> str:
        try:
            status = producer.send(Message(TOPIC, b"x")).status
        except PenstockError as error:
            return str(error)
        return "" if status == SendStatus.SEND_OK else status.name

    return Sender(send)


def java_sender(stack: ExitStack, directory: Path, nameserver: str, poll_ms: int) -> Sender:
    java = stack.enter_context(JavaSession(directory, maven.V5_5))
    java.do(
        "producer.start", producer="p", namesrv=nameserver, poll_namesrv_ms=poll_ms,
        timeout_ms=3_000,
    )  # fmt: skip

    def send() -> str:
        try:
            (line,) = java.do("producer.send", producer="p", messages=[MESSAGE])
        except ClientError as error:
            return str(error)
        return "" if line.get("status") == "SEND_OK" else str(line)

    return Sender(send)


def measure(cluster: FailoverCluster, root: Path, gaps: Gaps) -> None:
    """Kill and switch masters."""
    rounds = [("kill", number) for number in range(KILLS)]
    rounds += [(what, number) for what in ("stop", "promote") for number in range(SWITCHES)]
    with ExitStack() as stack:
        nameserver = cluster.nameserver
        senders = {
            OURS: python_sender(stack, nameserver),
            JAVA_QUICK: java_sender(stack, root / "java-quick", nameserver, 500),
        }
        stack.callback(lambda: [sender.stop() for sender in senders.values()])
        for what, number in rounds:
            if number == 0:
                senders[JAVA_SLOW] = java_sender(stack, root / f"java-{what}", nameserver, 30_000)
            _measure_one(cluster, what, senders, gaps)
            if number == min(SLOW_ROUNDS, KILLS if what == "kill" else SWITCHES) - 1:
                senders.pop(JAVA_SLOW).stop()


def _measure_one(
    cluster: FailoverCluster, what: str, senders: Mapping[str, Sender], gaps: Gaps
) -> None:
    cluster.await_in_sync()
    for sender in senders.values():
        sender.await_steady()
    failures = {client: len(sender.failures) for client, sender in senders.items()}
    at = time.monotonic()
    master = cluster.replace_master(what)
    restart = threading.Timer(RESTART_S, lambda: master and cluster.start(master))
    restart.start()
    for sender in senders.values():
        sender.await_steady()
    found = {}
    for client, sender in senders.items():
        found[client] = sender.gap_since(at)
        gaps[cluster.kind, what, client].append(found[client])
    failed = {client: sender.failures[failures[client] :] for client, sender in senders.items()}
    restart.join()
    print(
        f"{cluster.kind}, {what}: "
        + ", ".join(
            f"{one} {s * 1000:,.0f} ms ({len(failed[one])} failed)" for one, s in found.items()
        )
        + f", load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    for client, reasons in failed.items():
        for reason, count in Counter(reasons).most_common(3):
            print(f"  {client}, {count} times: {reason}")


class Figures(NamedTuple):
    """Percentiles of gaps, in seconds."""

    count: int
    p50: float
    p99: float
    most: float


def figures(gaps: Sequence[float]) -> Figures:
    ordered = sorted(gaps)
    last = len(ordered) - 1
    return Figures(
        len(ordered), ordered[last // 2], ordered[min(round(0.99 * last), last)], ordered[-1]
    )


def show(gaps: Gaps) -> None:
    table = Table(title="Time without acknowledged sends, in ms")
    for column in ("cluster", "the master", "client", "count", "p50", "p99", "max"):
        table.add_column(column, justify="right" if column in "count p50 p99 max" else "left")
    for (kind, what, client), several in gaps.items():
        found = figures(several)
        times = (f"{seconds * 1000:,.0f}" for seconds in found[1:])
        happens = {"kill": "is killed", "stop": "gets SIGTERM", "promote": "is replaced"}[what]
        table.add_row(kind, happens, client, str(found.count), *times)
    Console(width=120).print(table)


def main(wanted: Sequence[str] = ()) -> None:
    if maven.missing_tools():
        print(f"skipped: needs {' and '.join(maven.missing_tools())}")
        return
    gaps: Gaps = defaultdict(list)
    for kind, make in CLUSTERS.items():
        if wanted and kind not in wanted:
            continue
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch, ExitStack() as stack:
            root = Path(scratch)
            cluster = make(stack, root)
            cluster.create_topic(TOPIC)
            measure(cluster, root, gaps)
    show(gaps)


if __name__ == "__main__":
    main(sys.argv[1:])
