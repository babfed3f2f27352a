"""The transactional sink with real processes: drivers and brokers are killed with -9."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import Message, PullConsumer
from penstock.errors import NoRoute
from penstock.spark.sink import sink_client
from penstock.spark.sink.row_messages import RowMessage
from penstock.spark.sink.task_id import TaskId
from penstock.spark.sink.transactional import TransactionalTask, commit_batch
from tests.client.clusters import Cluster
from tests.depth import rounds
from tests.integration.sink_driver import QUERY, TASKS, bodies, options_of, write_batch, write_task

pytestmark = pytest.mark.slow

ROWS = 200
POLL_MS = 10_000
IDLE_MS = 300


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster("penstock", tmp_path_factory.mktemp("cluster"))
    cluster.start()
    yield cluster
    cluster.kill()


def check(cluster: Cluster, topic: str, batches: int) -> None:
    """Each row once, and nothing else."""
    wanted = Counter(
        body.encode()
        for batch in range(batches)
        for partition in range(TASKS)
        for body in bodies(batch, partition, ROWS)
    )
    assert Counter(read(cluster, topic, wanted.total())) == wanted


def read(cluster: Cluster, topic: str, rows: int) -> list[bytes]:
    """All messages of a topic, at least `rows`; each queue in order."""
    found: list[bytes] = []
    with PullConsumer(cluster.nameservers, group="sink-check", auto_commit=False) as consumer:
        queues = consumer.queues(topic)
        consumer.assign(queues)
        for queue in queues:
            consumer.seek_to_begin(queue)
        while len(found) < rows and (batch := consumer.poll(POLL_MS)):
            found += [message.body for message in batch]
        while more := consumer.poll(IDLE_MS):
            found += [message.body for message in more]
    return found


def test_driver_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    topic = cluster.make_topic("driver-killed")
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_text("0")
    rng = random.Random(7)
    batches = 3
    command = [
        sys.executable, "-m", "tests.integration.sink_driver", cluster.nameservers, topic, topic,
        str(batches), str(ROWS), str(checkpoint),
    ]  # fmt: skip
    for _ in range(rounds(ci=4, proof=60)):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
            assert driver.stdout is not None
            driver.stdout.readline()
            try:
                driver.wait(rng.random() * 1.5)
            except subprocess.TimeoutExpired:
                os.kill(driver.pid, signal.SIGKILL)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=150)
    assert checkpoint.read_text() == str(batches)
    check(cluster, topic, batches)


def test_rows_with_the_same_key_keep_their_order(cluster: Cluster) -> None:
    topic = cluster.make_topic("in-order")
    rows, keys = rounds(ci=3_000, proof=50_000), 5

    async def write() -> None:
        options = options_of(cluster.nameservers, topic, topic)
        task = TransactionalTask(options, TaskId(topic, 0, 0, 0, QUERY))
        assert await task.begin()
        await task.send(
            [
                RowMessage(number, Message(topic, str(number).encode()), str(number % keys))
                for number in range(rows)
            ]
        )
        await commit_batch(options, topic, 0, await task.finish(), query_id=QUERY)

    asyncio.run(write())
    found: dict[int, list[int]] = {key: [] for key in range(keys)}
    for body in read(cluster, topic, rows):
        found[int(body) % keys].append(int(body))
    assert found == {key: list(range(key, rows, keys)) for key in range(keys)}


@pytest.mark.parametrize("name", ["broker-a", "broker-b"])
def test_broker_is_killed_during_the_commit(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    topic = cluster.make_topic(f"killed-{name}")
    end = sink_client.SinkClient._end
    kills = set(random.Random(name).sample(range(2 * TASKS * ROWS), rounds(ci=2, proof=20)))
    ended = 0
    one_at_a_time = asyncio.Lock()

    async def ending(self: Any, *args: Any) -> str:
        nonlocal ended
        ended += 1
        if ended in kills:
            async with one_at_a_time:
                await asyncio.to_thread(_kill_and_start, cluster, name)
        return await end(self, *args)

    monkeypatch.setattr(sink_client.SinkClient, "_end", ending)

    async def body() -> None:
        options = options_of(cluster.nameservers, topic, topic)
        for batch in range(2):
            await write_batch(options, batch, ROWS)

    asyncio.run(body())
    assert kills <= set(range(ended + 1))
    check(cluster, topic, 2)


def test_broker_is_killed_while_half_messages_are_sent(cluster: Cluster) -> None:
    topic = cluster.make_topic("killed-sending")

    async def body() -> None:
        options = options_of(cluster.nameservers, topic, topic)
        writing = asyncio.ensure_future(write_batch(options, 0, ROWS))
        await asyncio.to_thread(_kill_and_start, cluster, "broker-b")
        await writing

    asyncio.run(body())
    check(cluster, topic, 1)


def _kill_and_start(cluster: Cluster, name: str) -> None:
    broker = cluster.broker(name)
    broker.kill()
    broker.start()


def test_control_broker_of_a_sink_never_changes(cluster: Cluster) -> None:
    """Not even while it is unavailable and a task starts."""
    topic = cluster.make_topic("control-broker-down")

    async def body() -> None:
        options = options_of(cluster.nameservers, topic, topic)
        await write_batch(options, 0, ROWS)
        control_broker = await _control_broker(cluster, topic)
        other = next(broker.name for broker in cluster.brokers if broker.name != control_broker)
        chunks = [(await write_task(options, 1, partition, ROWS))[0] for partition in range(TASKS)]
        cluster.broker(control_broker).kill()
        try:
            while set(cluster.route(topic)) != {other}:
                await asyncio.sleep(0.05)
            quick = options_of(cluster.nameservers, topic, topic, delivery_timeout="1s")
            task = TransactionalTask(quick, TaskId(topic, 1, 0, 1, QUERY))
            with pytest.raises(
                NoRoute, match="decisions of the sink 'control-broker-down' is unavailable"
            ):
                await task.begin()
        finally:
            cluster.broker(control_broker).start()
        cluster.await_route(topic, [control_broker, other])
        await commit_batch(
            options, topic, 1, [data for given in chunks for data in given], query_id=QUERY
        )

    asyncio.run(body())
    check(cluster, topic, 2)


async def _control_broker(cluster: Cluster, sink_id: str) -> str:
    async with sink_client.SinkClient(
        options_of(cluster.nameservers, sink_id, sink_id), lambda client: lambda message: None
    ) as client:
        control = client.control(sink_id, QUERY)
        await control.find_control_broker(1)
        return control.control_broker
