"""Penstock's client compared with Java's and PyPI's `rocketmq-python-client`, on both brokers.

Every client sends 128-byte messages with 1,000 in flight, and consumes a backlog with a handler
that does nothing: Penstock with a coroutine handler, and with plain handlers of `AsyncConsumer` and
`Consumer`. The results are messages per second of wall-clock time and per second of the client's
CPU time.

Then Penstock's and Java's synchronous producers send one message at a time, while nothing else
happens. Their overhead is what a send takes longer, and what it costs more CPU time, than the same
exchange over a bare socket in the same process (`client_blocking`).

Rounds alternate. Client and broker share the machine's cores. Needs Java and Maven.
"""

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from tests.compat import apache, maven, penstock

from benchmarks.client_blocking import send_request
from benchmarks.grpc_proxy import make_client_environment, proxy

ROUNDS = 3
IN_FLIGHT = 1_000
WARM_S = 5
SECONDS = 10
BODY_BYTES = 128
WARM_MESSAGES = 150_000
MESSAGES = 450_000
SENDS = 10_000
SENT_PER_CORE = 60_000
CONSUMED_PER_S = 200_000
OVERHEAD_US = 25
_CREATE_TOPIC = 17
_STORE = {
    "mappedFileSizeCommitLog": 1 << 30,
    "mappedFileSizeConsumeQueue": 6_000_000,
    "maxHashSlotNum": 5_000_000,
    "maxIndexNum": 20_000_000,
    "timerWheelEnable": True,
}

_HANDLERS = {
    "async": "coroutine handler",
    "sync": "plain handler of AsyncConsumer",
    "consumer": "plain handler of Consumer",
}

Result = Mapping[str, Any]


def python(module: str, *arguments: object) -> Result:
    """Run one of the Python load programs."""
    return _run([sys.executable, "-m", module, *map(str, arguments)])


def java(main_class: str, *arguments: object) -> Result:
    """Run one of the Java load programs, which includes its warm-up."""
    flags = (
        "-Xms1g", "-Xmx1g", "-XX:+UseParallelGC",
        f"-Drmq.logback.configurationFile={maven.JAVA_DIR / 'logback.xml'}",
    )  # fmt: skip
    command = maven.java_command(main_class, *map(str, arguments), jvm=flags)
    return _run(command, maven.java_environment())


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> Result:
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-4000:])
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return result


class BenchmarkCluster:
    """A broker with its NameServer and the topic of the benchmark."""

    def __init__(self, name: str, namesrv: str, broker: str) -> None:
        self.name = name
        self.namesrv = namesrv
        self.broker = broker
        settings = {
            "topic": "Load", "defaultTopic": "TBW102", "readQueueNums": "8", "writeQueueNums": "8",
            "perm": "6", "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0", "order": "false",
        }  # fmt: skip
        assert apache.request(broker, _CREATE_TOPIC, settings) == 0
        self.sent = 0

    def producers(self, endpoint: str | None, foreign: Path | None) -> dict[str, Result]:
        load = ("Load", IN_FLIGHT, WARM_S, SECONDS, BODY_BYTES)
        results = {
            "Penstock": python("benchmarks.client_producer", self.namesrv, *load),
            "Java": java("penstock.AsyncLoad", self.namesrv, *load),
        }
        if endpoint is not None and foreign is not None:
            script = str(Path(__file__).with_name("foreign_producer.py"))
            results["rocketmq-python-client"] = _run(
                [str(foreign), script, endpoint, *map(str, load)]
            )
        self.sent += sum(result["messages"] for result in results.values())
        return results

    def consumers(self, number: int) -> dict[str, Result]:
        wanted = (WARM_MESSAGES, MESSAGES)
        while self.sent < sum(wanted):  # the backlog of the consumers
            load = ("Load", IN_FLIGHT, 0, SECONDS, BODY_BYTES)
            self.sent += python("benchmarks.client_producer", self.namesrv, *load)["messages"]
        ours = "benchmarks.client_consumer"
        return {
            f"Penstock, {name}": python(
                ours, self.namesrv, "Load", f"ours-{kind}-{number}", *wanted, kind
            )
            for kind, name in _HANDLERS.items()
        } | {"Java": java("penstock.Drain", self.namesrv, "Load", f"java-{number}", *wanted)}

    def blocking_producers(self) -> dict[str, Result]:
        request = send_request("Load", BODY_BYTES).hex()
        sends = (self.namesrv, self.broker, "Load", SENDS, BODY_BYTES, request)
        return {
            "Penstock": python("benchmarks.client_blocking", *sends),
            "Java": java("penstock.CalmSends", *sends),
        }


def main() -> None:
    if maven.missing_tools():
        print(f"skipped: needs {' and '.join(maven.missing_tools())}")
        return
    rows: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    calm: dict[tuple[str, str], list[Result]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch, ExitStack() as stack:
        root = Path(scratch)
        names = stack.enter_context(apache.NameServer(root / "names"))
        theirs = stack.enter_context(
            apache.Broker(
                root / "b", root / "store", names.address, brokerName="broker-a", **_STORE
            )
        )
        ours = stack.enter_context(penstock.Up(root / "up"))
        clusters = {
            BenchmarkCluster("penstock", ours.address, ours.broker_address): None,
            BenchmarkCluster("apache", names.address, theirs.address): stack.enter_context(
                proxy(root / "proxy", names.address)
            ),
        }
        foreign = make_client_environment(root / "venv")
        for number in range(ROUNDS):
            for cluster, endpoint in clusters.items():
                for client, result in cluster.producers(endpoint, foreign).items():
                    rows["send", cluster.name, client].append(result)
                    print(f"round {number + 1}: send, {cluster.name}, {client}: {result}")
                for client, result in cluster.consumers(number).items():
                    rows["consume", cluster.name, client].append(result)
                    print(f"round {number + 1}: consume, {cluster.name}, {client}: {result}")
                for client, result in cluster.blocking_producers().items():
                    calm[cluster.name, client].append(result)
                    print(f"round {number + 1}: calm sends, {cluster.name}, {client}: {result}")
    show(rows)
    show_calm(calm)


def show(rows: Mapping[tuple[str, str, str], Sequence[Result]]) -> None:
    table = Table(title=f"Clients, {BODY_BYTES} B, {IN_FLIGHT} in flight, median of {ROUNDS}")
    for column in ("", "broker", "client", "messages/s", "CPU µs/message", "messages/CPU s"):
        table.add_column(column, justify="right" if "message" in column else "left")
    for (what, cluster, client), results in rows.items():
        cost = median(r["cpu_seconds"] * 1e6 / r["messages"] for r in results)
        rates = sorted(r["messages"] / r["seconds"] for r in results)
        rate = f"{median(rates):,.0f} ({rates[0]:,.0f} to {rates[-1]:,.0f})"
        table.add_row(what, cluster, client, rate, f"{cost:.1f}", f"{1e6 / cost:,.0f}")
    Console(width=140).print(table)
    print(
        f"targets: our producer at least {SENT_PER_CORE:,} messages per core and second, no less "
        f"than Java's, our consumer at least {CONSUMED_PER_S:,} messages/s"
    )


def show_calm(rows: Mapping[tuple[str, str], Sequence[Result]]) -> None:
    """The overhead of calm blocking sends over a bare socket: the median of the rounds."""
    table = Table(title=f"Calm blocking sends, {BODY_BYTES} B, median (range) of {ROUNDS}")
    table.add_column("broker")
    table.add_column("client")
    for column in ("send µs", "bare socket µs", "overhead µs", "overhead CPU µs"):
        table.add_column(column, justify="right")

    def cell(values: Sequence[float]) -> str:
        return f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"

    for (cluster, client), results in rows.items():
        table.add_row(
            cluster,
            client,
            cell([r["client"]["wall_us"] for r in results]),
            cell([r["bare"]["wall_us"] for r in results]),
            *(
                cell([r["client"][name] - r["bare"][name] for r in results])
                for name in ("wall_us", "cpu_us")
            ),
        )
    Console(width=140).print(table)
    print(f"target: our overhead at most {OVERHEAD_US} µs")


if __name__ == "__main__":
    main()
