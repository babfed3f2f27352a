"""One history: a cluster, its clients, faults by seed, the recovery, and the verdict."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from penstock.errors import PenstockError
from tests.compat.histories import faults
from tests.compat.histories.checker import Counts, Violation, check
from tests.compat.histories.clients import (
    QUEUES,
    TOPIC,
    GroupConsumer,
    NumberProducer,
    ReplicaReader,
    read_all,
)
from tests.compat.histories.cluster import BROKERS, RECOVERY_S, Cluster, Plan, running
from tests.compat.histories.history import Fault, History, Record, Send, write_history
from tests.compat.histories.java_flood import JAVA_TOPIC, JavaFlood
from tests.compat.histories.machines_network import MachinesNetwork
from tests.compat.java_session import JavaSession

FAULTS = 3
PAUSE_S = (0.1, 0.8)
"""Between two faults."""
OVERLAP = 0.4
"""How often a fault begins before the last one has ended."""
PRODUCERS = 3
DELIVERY_S = 30.0
PROGRESS_S = 30.0


class Result(NamedTuple):
    """What a history has shown."""

    seed: int
    violations: list[Violation]
    counts: Counts
    elections: int
    seconds: float
    recovery_s: float
    """From the end of the last fault until all replicas were in sync."""
    folder: Path
    """The history and the logs, if there is a violation."""

    def __str__(self) -> str:
        counts = self.counts
        bad = "; ".join(f"{one.kind.upper()}: {one.text}" for one in self.violations)
        return (
            f"seed {self.seed}: {counts.acknowledged} acknowledged, {counts.unknown} unknown "
            f"({counts.stored_although_unknown} stored), {counts.failed} refused, "
            f"{counts.duplicates} duplicates, {self.elections} elections, "
            f"recovery {self.recovery_s:.1f} s, {self.seconds:.1f} s in total. "
            + (bad or "No violations.")
        )


def plan_of(seed: int, *, etcd: bool) -> Plan:
    """Two of three histories use etcd, where it is available."""
    rng = Random(seed)
    uses_etcd = etcd and seed % 3 != 2
    return Plan(
        controllers=rng.choice((2, 3)) if uses_etcd else 1,
        etcd=uses_etcd,
        sync_flush=rng.random() < 0.5,
        topics=(TOPIC, JAVA_TOPIC),
        queues=QUEUES,
    )


def run_history(
    seed: int,
    network: MachinesNetwork,
    root: Path,
    *,
    etcd: bool = False,
    plan: Plan | None = None,
    java: JavaSession | None = None,
    faults_max: int = FAULTS,
    keep: bool = False,
) -> Result:
    """Run one history, with the servers of `plan` or of the seed.

    Its files are deleted unless there is a violation, or with `keep`. Those of a violation get a
    name of their own, so that a repetition does not replace them.
    """
    plan = plan or plan_of(seed, etcd=etcd)
    history = OneHistory(seed, network, root, plan, java, faults_max)
    result = asyncio.run(history.run())
    write_history(root / "history.jsonl", history.records)
    (root / "verdict.txt").write_text(f"{result}\n")
    if result.violations:
        folder = root.rename(root.with_name(f"{root.name}-failed-{int(time.time())}"))
        return result._replace(folder=folder)
    if not keep:
        shutil.rmtree(root, ignore_errors=True)
    return result


class OneHistory:
    """The history of a seed."""

    def __init__(
        self,
        seed: int,
        network: MachinesNetwork,
        root: Path,
        plan: Plan,
        java: JavaSession | None,
        faults_max: int,
    ) -> None:
        self.seed = seed
        self.records: History = []
        self._rng = Random(f"history {seed}")
        self._network = network
        self._root = root
        self._plan = plan
        self._java = java
        self._faults_max = faults_max
        self._began = time.monotonic()
        self._recovery_s = 0.0
        self._elections = 0
        self._broken: list[Violation] = []

    def _clock(self) -> float:
        return round(time.monotonic() - self._began, 4)

    def _note(self, record: Record) -> None:
        self.records.append(record)

    def _say(self, what: str) -> None:
        self._note(Fault(what, self._clock()))

    async def run(self) -> Result:
        shutil.rmtree(self._root, ignore_errors=True)
        self._say(f"seed {self.seed}: {self._plan}")
        async with running(self._network, self._root, self._plan) as cluster:
            self._say("all replicas are in sync")
            try:
                await self._play(cluster)
            except TimeoutError as error:
                self._broken.append(Violation("no recovery", str(error)))
        verdict = check(self.records)
        # Without the last read, everything would seem to be lost.
        violations = self._broken or verdict.violations
        seconds = time.monotonic() - self._began
        return Result(
            self.seed,
            violations,
            verdict.counts,
            self._elections,
            seconds,
            self._recovery_s,
            self._root,
        )

    async def _play(self, cluster: Cluster) -> None:
        flood = None
        if self._java is not None:
            flood = JavaFlood(self._java, cluster, self._clock)
            await asyncio.to_thread(flood.start)
        consumer = GroupConsumer(cluster.nameserver, self._clock, self._note)
        producers = [
            NumberProducer(
                f"p{number}",
                cluster.nameserver,
                self._clock,
                self._note,
                retries=2 if number == 0 else 0,
            )
            for number in range(PRODUCERS)
        ]
        readers = [
            ReplicaReader(name, cluster.servers[name].address, self._clock, self._note)
            for name in BROKERS
        ]
        sending = [_spawn(producer.run()) for producer in producers]
        reading = [_spawn(reader.run()) for reader in readers]
        try:
            await consumer.start()
            await self._fail(cluster)
            await self._recover(cluster, producers)
            for producer in producers:
                producer.stop()
            await asyncio.gather(*sending)
            if flood is not None:
                self.records += await asyncio.to_thread(flood.stop)
            wanted = [
                (one.queue, one.body)
                for one in self.records
                if isinstance(one, Send) and one.outcome == "acknowledged"
                if one.queue.startswith(f"{TOPIC}/")
            ]
            await consumer.await_all(wanted, DELIVERY_S)
            self._say("the consumer has all that is acknowledged, or the time is over")
        finally:
            for task in (*sending, *reading):
                task.cancel()
            await asyncio.wait([*sending, *reading])
            with suppress(TimeoutError):
                async with asyncio.timeout(5):
                    await consumer.close()
        for task in reading:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        await self._read_all(cluster)

    async def _read_all(self, cluster: Cluster) -> None:
        """The last read; again if there was an election meanwhile, on a busy machine."""
        while True:
            state = await cluster.await_in_sync()
            found: History = []
            try:
                await read_all(cluster, state.master or "", self._plan.topics, found.append)
            except PenstockError as error:
                self._say(f"the last read is repeated: {error.message}")
                continue
            after = await cluster.state()
            if after is not None and (after.master, after.epoch) == (state.master, state.epoch):
                break
            self._say("the last read is repeated: there was an election")
        self.records += found
        self._elections = state.epoch
        self._say("the last read has ended")

    async def _fail(self, cluster: Cluster) -> None:
        """Faults, one after another or overlapping."""
        rng = self._rng
        chosen = faults.chosen_faults(cluster, self.seed, rng, self._faults_max)
        await asyncio.sleep(rng.uniform(0.2, 0.6))
        async with AsyncExitStack() as active:
            for fault in chosen:
                if fault in faults.NEEDS_ALL_REPLICAS:
                    await active.aclose()
                what = await active.enter_async_context(fault(cluster, rng))
                self._say(what)
                await asyncio.sleep(faults.length_s(fault, rng))
                if rng.random() >= OVERLAP:
                    await active.aclose()
                    self._say("ended")
                    await asyncio.sleep(rng.uniform(*PAUSE_S))
        await asyncio.to_thread(cluster.network.restore_all)
        cluster.start_missing()
        self._say("all faults have ended")

    async def _recover(self, cluster: Cluster, producers: list[NumberProducer]) -> None:
        """Wait until all replicas are in sync and sends are acknowledged."""
        began = time.monotonic()
        state = await cluster.await_in_sync(within_s=RECOVERY_S)
        self._recovery_s = time.monotonic() - began
        self._say(f"all replicas are in sync: {state}")
        before = [producer.acknowledged for producer in producers]
        deadline = time.monotonic() + PROGRESS_S
        while any(p.acknowledged < n + 3 for p, n in zip(producers, before, strict=True)):
            if time.monotonic() > deadline:
                raise TimeoutError("all replicas are in sync, but sends are not acknowledged")
            await asyncio.sleep(0.05)
        self._say("sends are acknowledged")


def _spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.create_task(work)
