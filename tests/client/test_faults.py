"""Brokers and NameServers that die, connections that break: nothing acknowledged is lost.

Each test sends continuously, records what was acknowledged, and lets a consumer read everything.
Every acknowledged message must be received. A message may be received twice only if it was
unfinished or sent again by a retry. Counts are printed (`pytest -s`).
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections import Counter
from collections.abc import Awaitable
from typing import Any

import pytest

from penstock import AsyncPopConsumer, AsyncTransactionProducer, Message, ReceivedMessage
from penstock.errors import PenstockError
from tests.depth import rounds

from .clean_loop import open_sockets
from .clusters import AnyBroker
from .environment import Environment, Inbox, eventually, numbers, running
from .proxy import Network

pytestmark = pytest.mark.slow

BATCH = 20


class ContinuousSender:
    """Sends numbers until it is stopped, and records which were acknowledged."""

    def __init__(self, producer: Any, topic: str, pause_s: float = 0.01) -> None:
        self._producer = producer
        self._topic = topic
        self._pause_s = pause_s
        self.sent = 0
        self.acknowledged: set[str] = set()
        self.errors: Counter[str] = Counter()
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> ContinuousSender:
        self._task = asyncio.ensure_future(self._run())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._stopping.set()
        assert self._task is not None
        await self._task

    async def more(self, count: int) -> None:
        """Wait until this many further messages were acknowledged."""
        goal = len(self.acknowledged) + count
        await eventually(lambda: len(self.acknowledged) >= goal)

    async def _run(self) -> None:
        while not self._stopping.is_set():
            bodies = numbers(BATCH, self.sent)
            self.sent += BATCH
            outcomes = await asyncio.gather(
                *(self._producer.send(Message(self._topic, body)) for body in bodies),
                return_exceptions=True,
            )
            for body, outcome in zip(bodies, outcomes, strict=True):
                if isinstance(outcome, BaseException):
                    _check_retry(outcome)
                    self.errors[type(outcome).__name__] += 1
                else:
                    self.acknowledged.add(body)
            await asyncio.sleep(self._pause_s)


async def _outcome(work: Awaitable[object]) -> object:
    """The result, or the exception that is raised."""
    return (await asyncio.gather(work, return_exceptions=True))[0]


def _check_retry(error: BaseException) -> None:
    """Raise the error unless the network caused it."""
    if not isinstance(error, PenstockError):
        raise error
    assert error.retry, error


def report(
    name: str, env: Environment, sender: ContinuousSender, inbox: Inbox, **details: object
) -> int:
    """Print the counts; returns how many messages were received more than once."""
    counts = Counter(inbox.bodies)
    twice = sum(count - 1 for count in counts.values())
    more = "".join(f", {value} {key}" for key, value in details.items())
    print(
        f"\n{name} ({env.cluster.kind}): {sender.sent} sent,"
        f" {len(sender.acknowledged)} acknowledged,"
        f" {sum(sender.errors.values())} failed {dict(sender.errors)}, {len(counts)} came,"
        f" {twice} again{more}"
    )
    return twice


async def restart(broker: AnyBroker) -> None:
    broker.kill()
    await asyncio.to_thread(broker.start)


async def test_acknowledged_messages_survive_broker_kills(env: Environment) -> None:
    topic, group = env.topic(), env.name("c")
    inbox = Inbox()
    consumer = env.consumer(start_at="first")
    consumer.on(topic)(inbox)
    kills = rounds(ci=1, proof=6)
    again_max = 0
    async with running(consumer), env.producer(retries=3, timeout_ms=5_000) as producer:
        async with ContinuousSender(producer, topic) as sender:
            await sender.more(100)
            for turn in range(kills):
                broker = env.cluster.brokers[turn % 2]
                broker.kill()
                await sender.more(200)  # the other broker is enough
                await asyncio.to_thread(broker.start)
                await asyncio.to_thread(env.cluster.await_route, topic, [broker.name])
                again_max += sender.sent
                await sender.more(100)
        await inbox.distinct(sender.acknowledged)
        unfinished = [state.in_work for state in consumer.queues()]
        assert max(unfinished) <= 1000
        # Messages whose progress a dead broker had not saved are received and committed again.
        await eventually(
            lambda: env.progress(topic, group) >= len(sender.acknowledged), within_s=60
        )
    twice = report("broker killed -9", env, sender, inbox, kills=kills)
    # Received again: messages sent again by a retry, and those whose progress a dead broker had
    # not saved. It saves every 5 s and is killed more often, so at most all it had by then.
    assert twice <= again_max


async def test_clients_survive_a_killed_nameserver(env: Environment) -> None:
    topic = env.topic()
    inbox = Inbox()
    consumer = env.consumer(start_at="first")
    consumer.on(topic)(inbox)
    async with running(consumer), env.producer() as producer:
        async with ContinuousSender(producer, topic) as sender:
            await sender.more(100)
            env.cluster.names.kill()
            try:
                await asyncio.sleep(1.5)  # a refresh of the routes fails
                await sender.more(200)
            finally:
                await asyncio.to_thread(env.cluster.names.start)
                await asyncio.to_thread(env.cluster.register_anew)
            await sender.more(100)
        await inbox.distinct(sender.acknowledged)
        new = await asyncio.to_thread(env.topic, "new")
        await producer.send(Message(new, "x"))
    twice = report("NameServer killed -9", env, sender, inbox)
    assert not sender.errors, "brokers are all that sending needs"
    # A NameServer that has just begun may know one broker before the other: the queues of the
    # other one are given up for a moment, and what was in work there comes again.
    assert twice <= 1_000


async def test_acknowledged_messages_survive_random_connection_cuts(env: Environment) -> None:
    topic = env.topic()
    inbox = Inbox()
    messages = rounds(ci=1_500, proof=20_000)
    async with Network(env.cluster, seed=7) as network:
        consumer = env.consumer(nameservers=network.nameservers, start_at="first")
        consumer.on(topic)(inbox)
        async with (
            running(consumer),
            env.producer(
                nameservers=network.nameservers, retries=5, timeout_ms=10_000, avoid_ms=100
            ) as producer,
        ):
            await producer.send(Message(topic, "warm"))
            for proxy in network.brokers.values():
                proxy.cut_bytes_mean = 30_000
            network.names.cut_bytes_mean = 3_000
            async with ContinuousSender(producer, topic, pause_s=0.0) as sender:
                await eventually(lambda: len(sender.acknowledged) >= messages, within_s=90)
            for proxy in (*network.brokers.values(), network.names):
                proxy.cut_bytes_mean = 0
            await inbox.distinct(sender.acknowledged)
        cuts = network.cuts
    twice = report("cut at random", env, sender, inbox, cuts=cuts)
    assert cuts >= 10
    # One cut can repeat what was in flight in one direction: a batch of sends, a pull per queue.
    assert twice <= cuts * (BATCH + 8 * 32)


async def test_clients_survive_a_broker_that_stalls(env: Environment) -> None:
    topic = env.topic()
    inbox = Inbox()
    async with Network(env.cluster) as network:
        consumer = env.consumer(nameservers=network.nameservers, start_at="first")
        consumer.on(topic)(inbox)
        async with (
            running(consumer),
            env.producer(
                nameservers=network.nameservers, timeout_ms=1_000, avoid_ms=1_000
            ) as producer,
        ):
            async with ContinuousSender(producer, topic) as sender:
                await sender.more(100)
                for name in ("broker-a", "broker-b"):
                    proxy = network.broker(name)
                    proxy.stall()
                    await sender.more(100)
                    proxy.flow()
                    await sender.more(100)
                network.broker("broker-a").delay_s = 0.2
                await sender.more(100)
                network.broker("broker-a").delay_s = 0
                network.broker("broker-b").half_close()
                await sender.more(100)
            await inbox.distinct(sender.acknowledged)
    report("stalled, slow, half closed", env, sender, inbox)


async def test_reconnects_leak_no_resources(
    env: Environment, caplog: pytest.LogCaptureFixture
) -> None:
    """Every connection is cut repeatedly; tasks, sockets and memory do not grow."""
    import tracemalloc

    caplog.set_level(logging.CRITICAL, "penstock")  # pytest keeps log records
    topic = env.topic(queues=2)
    reconnects = rounds(ci=40, proof=1_000)
    inbox = Inbox()
    async with Network(env.cluster) as network:
        consumer = env.consumer(nameservers=network.nameservers, start_at="first")

        @consumer.on(topic)
        async def handle(message: ReceivedMessage) -> None:
            inbox.add(message)

        async with (
            running(consumer),
            env.producer(
                nameservers=network.nameservers, retries=5, avoid_faulty=False, timeout_ms=10_000
            ) as producer,
        ):

            async def one_round(body: str) -> int:
                """Send to both brokers, wait for the messages, cut all connections."""
                queues = await producer.queues(topic)
                await asyncio.gather(
                    *(_send_until(producer, Message(topic, body), queue=queue) for queue in queues)
                )
                await inbox.until(lambda: Counter(inbox.bodies)[body] >= len(queues))
                inbox.messages.clear()
                return sum(p.cut() for p in (*network.brokers.values(), network.names))

            async def measure() -> tuple[int, int, int]:
                for proxy in network.brokers.values():
                    await eventually(lambda proxy=proxy: proxy.open >= 2)  # type: ignore[misc]
                await asyncio.sleep(0.3)
                gc.collect()
                return (
                    len(asyncio.all_tasks()), len(open_sockets()),
                    tracemalloc.get_traced_memory()[0],
                )  # fmt: skip

            for turn in range(rounds(ci=4, proof=10)):
                await one_round(f"warm {turn}")
            tracemalloc.start()
            await one_round("first")
            tasks, sockets, memory = await measure()
            cuts = turns = 0
            while cuts < reconnects:
                cuts += await one_round(f"turn {turns}")
                turns += 1
            tasks_after, sockets_after, memory_after = await measure()
            tracemalloc.stop()
    print(
        f"\n{cuts} reconnects ({env.cluster.kind}): tasks {tasks} → {tasks_after},"
        f" sockets {sockets} → {sockets_after}, memory {(memory_after - memory) / 1024:+.0f} KiB"
    )
    assert tasks_after <= tasks + 4
    assert sockets_after <= sockets + 4
    assert memory_after - memory < 256 * 1024 + 200 * cuts


async def _send_until(producer: Any, message: Message, **where: Any) -> None:
    """A send to a given queue is not retried on another queue, so the caller retries."""
    for _ in range(20):
        outcome = await _outcome(producer.send(message, **where))
        if not isinstance(outcome, BaseException):
            return
        _check_retry(outcome)
    raise AssertionError("twenty sends failed")


async def test_pop_survives_a_killed_broker(env: Environment) -> None:
    topic = env.topic(queues=2)
    inbox = Inbox()
    consumer = env.make(AsyncPopConsumer, start_at="first", invisible_ms=5_000)

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> None:
        inbox.add(message)

    async with running(consumer), env.producer(retries=3, timeout_ms=5_000) as producer:
        async with ContinuousSender(producer, topic, pause_s=0.02) as sender:
            await sender.more(60)
            await restart(env.cluster.brokers[0])
            await sender.more(60)
        await inbox.distinct(sender.acknowledged, within_s=60)
    report("POP, broker killed -9", env, sender, inbox)


async def test_transactions_survive_connection_cuts(env: Environment) -> None:
    """Committed messages are delivered and rolled back ones never, with any connection cuts."""
    topic = env.topic()
    chance = random.Random(3)
    inbox = Inbox()
    fates: dict[str, str] = {}
    consumer = env.consumer(start_at="first")
    consumer.on(topic)(inbox)

    def check(message: ReceivedMessage) -> bool | None:
        return {"commit": True, "rollback": False}.get(fates[message.body.decode()])

    async with Network(env.cluster, seed=5) as network:
        async with (
            running(consumer),
            env.make(
                AsyncTransactionProducer, group=env.name("tx"), check=check,
                nameservers=network.nameservers,
            ) as producer,
        ):  # fmt: skip
            await _end(producer, topic, "warm", "commit", fates)
            for proxy in network.brokers.values():
                proxy.cut_bytes_mean = 6_000
            for n in range(rounds(ci=40, proof=400)):
                await _end(producer, topic, str(n), chance.choice(["commit", "rollback"]), fates)
            for proxy in network.brokers.values():
                proxy.cut_bytes_mean = 0
            wanted = {body for body, fate in fates.items() if fate == "commit"}
            await inbox.distinct(wanted)
        cuts = network.cuts
    print(f"\ntransactions ({env.cluster.kind}): {len(fates)}, {cuts} cuts")
    assert {body for body in inbox.bodies if fates.get(body) == "rollback"} == set()


async def _end(producer: Any, topic: str, body: str, fate: str, fates: dict[str, str]) -> None:
    fates[body] = fate
    try:
        handle = await producer.prepare(Message(topic, body))
    except PenstockError:
        fates[body] = "unsure"
        return
    ending = producer.commit(handle) if fate == "commit" else producer.rollback(handle)
    outcome = await _outcome(ending)
    if isinstance(outcome, BaseException):
        _check_retry(outcome)  # then the broker checks
