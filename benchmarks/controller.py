"""A controller over a real etcd of three members: latency of decisions, and its cost at rest.

*Compare-and-swap*: one state after another is replaced, and the same for several broker sets at a
time. *At rest*: 1,000 broker sets with 3 replicas each, every replica with a connection of its own
and one heartbeat per second, as Apache's brokers send them; the CPU time of the controller and of
all members of etcd over some seconds, in percent of one core. All processes share this machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from itertools import chain
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tests.compat import penstock
from tests.compat.etcd_cluster import EtcdCluster

from penstock.clock import LoopClock
from penstock.config import ControllerConfig
from penstock.controller.broker_set import BrokerSet, ReplicaRecord
from penstock.server.controller.etcd.etcd_backend import EtcdBackend
from penstock.wire.codes import RequestCode
from penstock.wire.fields import FLAG_ONEWAY
from penstock.wire.output import encode

CHANGES = 1_000
AT_A_TIME = 8
SETS, REPLICAS = 1_000, 3
TIMEOUTS_MS = (3_000, 10_000)
SETTLE_S = 15.0
MEASURE_S = 20.0
SLICES = 50
"""Heartbeats of one second are sent in this many slices."""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        root = Path(folder)
        with EtcdCluster(root / "etcd") as etcd:
            asyncio.run(_measure_changes(etcd))
            for timeout_ms in TIMEOUTS_MS:
                prefix = f"/rest-{timeout_ms}/"
                asyncio.run(_create_sets(etcd, prefix))
                with _controller(root / f"controller-{timeout_ms}", etcd, prefix) as server:
                    asyncio.run(_measure_rest(etcd, server, prefix, timeout_ms))


# --- compare-and-swap


async def _measure_changes(etcd: EtcdCluster) -> None:
    table = Table(title="one change of a state (compare-and-swap) in etcd")
    for column in ("at a time", "p50 ms", "p99 ms", "per second"):
        table.add_column(column, justify="right")
    async with _backend(etcd, "/changes/") as backend:
        for workers in (1, AT_A_TIME):
            began = time.perf_counter()
            work = (_change_often(backend, f"b-{workers}-{n}", workers) for n in range(workers))
            times = sorted(chain.from_iterable(await asyncio.gather(*work)))
            took = time.perf_counter() - began
            table.add_row(
                str(workers),
                f"{times[len(times) // 2] * 1000:.1f}",
                f"{times[len(times) * 99 // 100] * 1000:.1f}",
                f"{len(times) / took:,.0f}",
            )
    Console().print(table)


async def _change_often(backend: EtcdBackend, name: str, workers: int) -> list[float]:
    """The times of changes, without the reads between them."""
    times = []
    state, version = _broker_set(name, ""), 0
    for _ in range(CHANGES // workers):
        began = time.perf_counter()
        assert await backend.store.replace(name, state, version)
        times.append(time.perf_counter() - began)
        found, version = await backend.store.read(name)
        assert found is not None
        state = found
    return times


# --- at rest


async def _create_sets(etcd: EtcdCluster, prefix: str) -> None:
    async with _backend(etcd, prefix) as backend:
        for start in range(0, SETS, AT_A_TIME):
            names = [f"b-{n}" for n in range(start, min(start + AT_A_TIME, SETS))]
            states = [_broker_set(name, "127.0.0.1:1") for name in names]
            work = (backend.store.replace(state.name, state, 0) for state in states)
            assert all(await asyncio.gather(*work))


async def _measure_rest(
    etcd: EtcdCluster, server: penstock.Controller, prefix: str, timeout_ms: int
) -> None:
    listener = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    address = f"127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    host, port = server.address.split(":")
    writers = []
    for number in range(SETS):
        for replica in range(1, REPLICAS + 1):
            _, writer = await asyncio.open_connection(host, int(port))
            frame = _heartbeat(f"b-{number}", replica, address, timeout_ms)
            writer.write(frame)  # few connections may be open without a byte
            writers.append((writer, frame))
    sending = asyncio.ensure_future(_send(writers))
    await asyncio.sleep(SETTLE_S)
    pids = [server.pid, *etcd.pids()]
    before, began = [_cpu_s(pid) for pid in pids], time.monotonic()
    await asyncio.sleep(MEASURE_S)
    took = time.monotonic() - began
    own, *members = [100 * (_cpu_s(pid) - b) / took for pid, b in zip(pids, before, strict=True)]
    async with _backend(etcd, prefix) as backend:
        living = len(backend.view.reports)
    table = Table(title=f"{SETS:,} broker sets × {REPLICAS}, heartbeats valid for {timeout_ms} ms")  # noqa: RUF001
    for column in ("living replicas", "controller %", "etcd, 3 members %", "memory MB"):
        table.add_column(column, justify="right")
    memory = f"{_memory_mb(server.pid):.0f}"
    table.add_row(f"{living:,}", f"{own:.0f}", f"{sum(members):.0f}", memory)
    Console().print(table)
    sending.cancel()
    for writer, _ in writers:
        writer.transport.abort()
    listener.close()


async def _send(writers: list[tuple[asyncio.StreamWriter, bytes]]) -> None:
    """Send all heartbeats once per second, evenly."""
    size = -(-len(writers) // SLICES)
    due = time.monotonic()
    while True:
        for start in range(0, len(writers), size):
            for writer, frame in writers[start : start + size]:
                writer.write(frame)
            due += 1 / SLICES
            await asyncio.sleep(max(due - time.monotonic(), 0))


def _heartbeat(name: str, replica: int, address: str, timeout_ms: int) -> bytes:
    fields = {
        "clusterName": "c",
        "brokerName": name,
        "brokerId": str(replica),
        "brokerAddr": address,
        "heartbeatTimeoutMills": str(timeout_ms),
        "epoch": "1",
        "maxOffset": "1000",
        "confirmOffset": "1000",
    }
    return encode(RequestCode.BROKER_HEARTBEAT, fields, opaque=1, flag=FLAG_ONEWAY)


# --- processes


def _broker_set(name: str, address: str) -> BrokerSet:
    replicas = {one: ReplicaRecord(address, f"{address};0") for one in range(1, REPLICAS + 1)}
    members = tuple(replicas)
    return BrokerSet("c", name, replicas, REPLICAS + 1, 1, 1, members, 1)


@contextlib.asynccontextmanager
async def _backend(etcd: EtcdCluster, prefix: str) -> AsyncIterator[EtcdBackend]:
    config = ControllerConfig(etcd=etcd.endpoints, etcd_prefix=prefix)
    backend = EtcdBackend(config, LoopClock(), "benchmark:1")
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


@contextlib.contextmanager
def _controller(folder: Path, etcd: EtcdCluster, prefix: str) -> Iterator[penstock.Controller]:
    server = penstock.Controller(folder, etcd=etcd.endpoints)
    server._settings = {"PENSTOCK_CONTROLLER_ETCD_PREFIX": prefix}
    with server:
        yield server


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0


if __name__ == "__main__":
    main()
