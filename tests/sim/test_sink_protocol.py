"""The transactional sink under crashes at every step: consumers see each row exactly once.

A model of Spark runs batches: tasks that fail or run twice, a commit that raises, an abort after
it, the same batch again. Its driver dies at any step (`simulated_process`), a second driver may run
at the same time, and the broker is restarted. The model knows only what Spark's checkpoint has:
which batches ended. The broker is a real one with its store, in this process.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from penstock.client.messages import Message
from penstock.errors import PenstockError
from penstock.spark.sink.row_messages import RowMessage
from penstock.spark.sink.sink_options import SinkOptions
from penstock.spark.sink.task_id import TaskId
from penstock.spark.sink.transactional import TransactionalTask, abort_batch, commit_batch
from penstock.testing import InProcessBroker
from tests.depth import rounds
from tests.sim.simulated_process import Died, SimulatedProcess, run, run_process

TASKS = 2
ROWS = 3
"""Of each task."""


class TaskError(Exception):
    """A task failed."""


@pytest.fixture(scope="module")
def broker() -> Iterator[InProcessBroker]:
    with InProcessBroker() as broker:
        yield broker


class Query:
    """A streaming query: its checkpoint and its drivers."""

    def __init__(self, broker: InProcessBroker, name: str, batches: int, seed: int) -> None:
        self.broker = broker
        self.topic = f"sim-{name}"
        self.random = random.Random(seed)
        self.batches = batches
        self.ended = 0  # Spark's commit log: batches before this one
        self.fails = 0.0
        broker.create_topic(self.topic, queues=2)
        self.options = SinkOptions.of(
            {
                "nameserver": broker.address, "topic": self.topic, "delivery": "transactional",
                "sinkId": name, "requestTimeout": "3s", "deliveryTimeout": "20s",
            },
            stream=True,
        )  # fmt: skip
        self.sink_id = name

    def _happens(self, weight: int = 1) -> bool:
        return self.random.random() < self.fails * weight

    async def drive(self) -> None:
        """Run a driver from the checkpoint to the end."""
        while self.ended < self.batches:
            batch = self.ended
            await self.run_batch(batch)
            self.ended = max(self.ended, batch + 1)

    async def run_batch(self, batch: int) -> None:
        """Repeat a batch until it succeeds, as Spark does."""
        for attempt in range(100):
            messages: list[tuple[tuple[bytes, ...], bool]] = []
            try:
                for partition in range(TASKS):
                    if self._happens():  # a speculative attempt whose result is dropped
                        await self.run_task(batch, partition, attempt)
                    messages.append(await self.run_task(batch, partition, attempt))
                chunks = [chunk for sent, _ in messages for chunk in sent]
                decided = any(found for _, found in messages)
                await self.maybe_fail(
                    commit_batch(
                        self.options, self.sink_id, batch, chunks, query_id="q", decided=decided
                    )
                )
                return
            except (TaskError, PenstockError):
                chunks = [chunk for sent, _ in messages for chunk in sent]
                await abort_batch(self.options, self.sink_id, batch, chunks, "q")
        raise AssertionError(f"batch {batch} never ends")

    async def maybe_fail(self, commit: Coroutine[Any, Any, None]) -> None:
        """Let a commit fail at some point, while its worker may continue for a while."""
        if not self._happens(weight=5):
            await commit
            return
        task = asyncio.ensure_future(commit)
        await asyncio.wait([task], timeout=self.random.random() * 0.08)
        if self.random.random() < 0.5 and not task.done():
            task.cancel()
            await asyncio.wait([task])
        else:
            task.add_done_callback(lambda done: done.cancelled() or done.exception())
        raise TaskError("commit")

    async def run_task(
        self, batch: int, partition: int, attempt: int
    ) -> tuple[tuple[bytes, ...], bool]:
        identity = TaskId(self.sink_id, batch, partition, attempt, query_id="q")
        task = TransactionalTask(self.options, identity)
        if not await task.begin():
            return (), True
        try:
            for row in self.rows(batch, partition):
                await task.send([row])
                if self._happens():
                    raise TaskError(f"partition {partition} of batch {batch}")
            return await task.finish(), False
        except (TaskError, PenstockError):
            await task.roll_back()
            raise

    def rows(self, batch: int, partition: int) -> list[RowMessage]:
        return [
            RowMessage(n, Message(self.topic, f"{batch}.{partition}.{n}"), None)
            for n in range(ROWS)
        ]

    def check(self) -> None:
        """Each row once, and nothing else."""
        wanted = Counter(
            row.message.content
            for batch in range(self.ended)
            for partition in range(TASKS)
            for row in self.rows(batch, partition)
        )
        assert Counter(message.body for message in self.broker.messages(self.topic)) == wanted


def test_driver_dies_at_every_step(broker: InProcessBroker) -> None:
    async def body() -> None:
        process = SimulatedProcess()
        query = Query(broker, "whole", 1, seed=0)
        await run_process(process, query.drive)
        query.check()
        steps = process.steps
        assert steps > 60
        stride = rounds(ci=max(steps // 40, 1), proof=1)
        for dies_at in range(1, steps + 1, stride):
            query = Query(broker, f"step-{dies_at}", 2, seed=dies_at)
            with suppress(Died):
                await run_process(SimulatedProcess(dies_at), query.drive)
            await run_process(SimulatedProcess(), query.drive)
            query.check()

    run(body())


def test_commit_fails_at_every_step(broker: InProcessBroker) -> None:
    """Spark then aborts the batch with all its messages, and runs it again."""

    async def body() -> None:
        steps = 0
        for dies_at in range(1, 1_000, rounds(ci=4, proof=1)):
            query = Query(broker, f"commit-{dies_at}", 1, seed=dies_at)
            name, options = query.sink_id, query.options
            written = [await query.run_task(0, partition, 0) for partition in range(TASKS)]
            chunks = [chunk for sent, _ in written for chunk in sent]
            process = SimulatedProcess(dies_at)
            with suppress(Died):
                await run_process(
                    process, partial(commit_batch, options, name, 0, chunks, query_id="q")
                )
            await abort_batch(options, name, 0, chunks, "q")
            await run_process(SimulatedProcess(), query.drive)
            query.check()
            steps = process.steps
            if not process.died.is_set():
                break
        assert 40 < steps < 900

    run(body())


@pytest.mark.parametrize("seed", range(rounds(ci=6, proof=150)))
def test_random_failures(broker: InProcessBroker, seed: int) -> None:
    """Tasks and commits fail, drivers die or run on after they were replaced, and the broker is
    restarted."""

    async def body() -> None:
        query = Query(broker, f"seed-{seed}", 3, seed)
        query.fails = 0.08
        rng = random.Random(seed)
        drivers: list[asyncio.Task[None]] = []
        for _ in range(rng.randint(1, 4)):
            process = SimulatedProcess(rng.randint(1, 600), delays=random.Random(rng.random()))
            drivers.append(asyncio.ensure_future(_run_driver(process, query)))
            if rng.random() < 0.6:
                await asyncio.wait(drivers[-1:])
            else:
                await asyncio.sleep(rng.random() * 0.3)
            if rng.random() < 0.3:
                await broker.restart()
        await asyncio.wait(drivers)
        query.fails = 0.0
        await run_process(SimulatedProcess(), query.drive)
        query.check()

    run(body())


@pytest.mark.parametrize("seed", range(rounds(ci=4, proof=60)))
def test_concurrent_drivers(broker: InProcessBroker, seed: int) -> None:
    """Drivers that do not know of each other, each with random delays."""

    async def body() -> None:
        query = Query(broker, f"beside-{seed}", 3, seed)
        processes = [
            SimulatedProcess(delays=random.Random(10 * seed + n), delay_probability=0.1)
            for n in range(3)
        ]
        await asyncio.gather(*(_run_driver(process, query) for process in processes))
        await run_process(SimulatedProcess(), query.drive)
        query.check()

    run(body())


async def _run_driver(process: SimulatedProcess, query: Query) -> None:
    """Run a driver that may die, or give up because another one continues its batches."""
    with suppress(Died, PenstockError):
        await run_process(process, query.drive)


def test_half_messages_without_a_decision_expire(broker: InProcessBroker) -> None:
    async def body() -> None:
        query = Query(broker, "forgotten", 1, seed=0)
        for attempt in range(3):  # attempts whose worker is killed
            await query.run_task(0, 0, attempt)
        await run_process(SimulatedProcess(), query.drive)
        query.check()
        await broker.clock.advance(hours=25)
        query.ended = query.batches
        query.check()

    run(body())
