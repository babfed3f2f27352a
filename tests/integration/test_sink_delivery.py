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
from penstock.spark.sink.row_messages import Outgoing
from penstock.spark.sink.transactional import TaskId, TransactionalTask, commit_batch
from tests.client.houses import House
from tests.depth import rounds
from tests.integration.sink_driver import QUERY, TASKS, bodies, options_of, write_batch, write_task

pytestmark = pytest.mark.slow

ROWS = 200
POLL_MS = 10_000
QUIET_MS = 300


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    house = House("penstock", tmp_path_factory.mktemp("house"))
    house.start()
    yield house
    house.kill()


def check(house: House, topic: str, batches: int) -> None:
    """Each row once, and nothing else."""
    wanted = Counter(
        body.encode()
        for batch in range(batches)
        for partition in range(TASKS)
        for body in bodies(batch, partition, ROWS)
    )
    assert Counter(read(house, topic, wanted.total())) == wanted


def read(house: House, topic: str, rows: int) -> list[bytes]:
    """What lies in a topic, at least so many, and whatever else; each queue in its order."""
    found: list[bytes] = []
    with PullConsumer(house.nameservers, group="sink-check", auto_commit=False) as consumer:
        queues = consumer.queues(topic)
        consumer.assign(queues)
        for queue in queues:
            consumer.seek_to_begin(queue)
        while len(found) < rows and (batch := consumer.poll(POLL_MS)):
            found += [message.body for message in batch]
        while more := consumer.poll(QUIET_MS):
            found += [message.body for message in more]
    return found


def test_the_driver_is_killed(house: House, tmp_path: Path) -> None:
    topic = house.make_topic("driver-killed")
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_text("0")
    chance = random.Random(7)
    batches = 3
    command = [
        sys.executable, "-m", "tests.integration.sink_driver", house.nameservers, topic, topic,
        str(batches), str(ROWS), str(checkpoint),
    ]  # fmt: skip
    for _ in range(rounds(ci=4, proof=60)):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
            assert driver.stdout is not None
            driver.stdout.readline()
            try:
                driver.wait(chance.random() * 1.5)
            except subprocess.TimeoutExpired:
                os.kill(driver.pid, signal.SIGKILL)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=150)
    assert checkpoint.read_text() == str(batches)
    check(house, topic, batches)


def test_rows_of_one_key_keep_their_order(house: House) -> None:
    topic = house.make_topic("in-order")
    rows, keys = rounds(ci=3_000, proof=50_000), 5

    async def write() -> None:
        options = options_of(house.nameservers, topic, topic)
        task = TransactionalTask(options, TaskId(topic, 0, 0, 0, QUERY))
        assert await task.begin()
        await task.send(
            [
                Outgoing(number, Message(topic, str(number).encode()), str(number % keys))
                for number in range(rows)
            ]
        )
        await commit_batch(options, topic, 0, await task.finish(), query_id=QUERY)

    asyncio.run(write())
    found: dict[int, list[int]] = {key: [] for key in range(keys)}
    for body in read(house, topic, rows):
        found[int(body) % keys].append(int(body))
    assert found == {key: list(range(key, rows, keys)) for key in range(keys)}


@pytest.mark.parametrize("name", ["broker-a", "broker-b"])
def test_a_broker_is_killed_during_the_commit(
    house: House, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    topic = house.make_topic(f"killed-{name}")
    end = sink_client.SinkClient._end
    kills = set(random.Random(name).sample(range(2 * TASKS * ROWS), rounds(ci=2, proof=20)))
    ended = 0
    one_at_a_time = asyncio.Lock()

    async def ending(self: Any, *args: Any) -> str:
        nonlocal ended
        ended += 1
        if ended in kills:
            async with one_at_a_time:
                await asyncio.to_thread(_kill_and_start, house, name)
        return await end(self, *args)

    monkeypatch.setattr(sink_client.SinkClient, "_end", ending)

    async def body() -> None:
        options = options_of(house.nameservers, topic, topic)
        for batch in range(2):
            await write_batch(options, batch, ROWS)

    asyncio.run(body())
    assert kills <= set(range(ended + 1))
    check(house, topic, 2)


def test_a_broker_is_killed_while_halves_are_sent(house: House) -> None:
    topic = house.make_topic("killed-sending")

    async def body() -> None:
        options = options_of(house.nameservers, topic, topic)
        writing = asyncio.ensure_future(write_batch(options, 0, ROWS))
        await asyncio.to_thread(_kill_and_start, house, "broker-b")
        await writing

    asyncio.run(body())
    check(house, topic, 1)


def _kill_and_start(house: House, name: str) -> None:
    broker = house.broker(name)
    broker.kill()
    broker.start()


def test_the_home_of_a_sink_is_never_another_broker(house: House) -> None:
    """Not when it is away, and not when the sink is asked for while it is."""
    topic = house.make_topic("homeless")

    async def body() -> None:
        options = options_of(house.nameservers, topic, topic)
        await write_batch(options, 0, ROWS)
        home = await _home(house, topic)
        other = next(broker.name for broker in house.brokers if broker.name != home)
        handles = [(await write_task(options, 1, partition, ROWS))[0] for partition in range(TASKS)]
        house.broker(home).kill()
        try:
            while set(house.route(topic)) != {other}:
                await asyncio.sleep(0.05)
            quick = options_of(house.nameservers, topic, topic, patience="1s")
            task = TransactionalTask(quick, TaskId(topic, 1, 0, 1, QUERY))
            with pytest.raises(NoRoute, match="decisions of the sink 'homeless' is away"):
                await task.begin()
        finally:
            house.broker(home).start()
        house.await_route(topic, [home, other])
        await commit_batch(
            options, topic, 1, [data for given in handles for data in given], query_id=QUERY
        )

    asyncio.run(body())
    check(house, topic, 2)


async def _home(house: House, sink_id: str) -> str:
    async with sink_client.SinkClient(
        options_of(house.nameservers, sink_id, sink_id), lambda client: lambda message: None
    ) as client:
        control = client.control(sink_id, QUERY)
        await control.locate(1)
        return control.home
