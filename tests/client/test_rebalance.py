"""Consumers join and leave a group: queues are shared completely and without overlap."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import Any

import pytest

from penstock import Message, MessageQueue, ReceivedMessage

from .environment import Environment, Inbox, eventually, numbers, running, send_all
from .proxy import Network

STRATEGIES = ["averagely", "circle", "consistent_hash", "sticky"]


def assigned_queues(consumer: Any, topic: str) -> set[MessageQueue]:
    return {state.queue for state in consumer.queues() if state.queue.topic == topic}


def shared(consumers: list[Any], topic: str, count: int, *, idle: bool = False) -> bool:
    """Whether each of `count` queues has one owner and, unless `idle`, each consumer a queue."""
    if not idle and not all(assigned_queues(consumer, topic) for consumer in consumers):
        return False
    owners = Counter(queue for consumer in consumers for queue in assigned_queues(consumer, topic))
    return len(owners) == count and set(owners.values()) == {1}


def make(env: Environment, topic: str, inbox: Inbox, **options: Any) -> Any:
    consumer = env.consumer(start_at="first", **options)

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> None:
        inbox.add(message)

    return consumer


@pytest.mark.parametrize("strategy", STRATEGIES)
async def test_queues_are_shared_among_consumers(env: Environment, strategy: str) -> None:
    topic = env.topic(queues=6)
    inbox = Inbox()
    consumers = [make(env, topic, inbox, strategy=strategy) for _ in range(3)]
    async with env.producer() as producer, running(*consumers):
        # By their hash, one of three may get nothing.
        idle = strategy == "consistent_hash"
        await eventually(lambda: shared(consumers, topic, 12, idle=idle))
        if not idle:
            await eventually(
                lambda: [len(assigned_queues(c, topic)) for c in consumers] == [4, 4, 4]
            )
        await send_all(producer, topic, numbers(120))
        await inbox.count(120)
        async with running(late := make(env, topic, inbox, strategy=strategy)):
            await eventually(lambda: shared([*consumers, late], topic, 12, idle=idle))
            await send_all(producer, topic, numbers(120, 1000))
            await inbox.distinct(numbers(120, 1000))
        # A leaving consumer unregisters, and the others take over at once.
        await eventually(lambda: shared(consumers, topic, 12, idle=idle))
        await send_all(producer, topic, numbers(120, 2000))
        await inbox.distinct(numbers(120, 2000))
    counts = Counter(inbox.bodies)
    assert set(counts) == {*numbers(120), *numbers(120, 1000), *numbers(120, 2000)}


async def test_notifications_trigger_a_rebalance_at_once(env: Environment) -> None:
    """Queues are reassigned at once when a consumer joins or leaves, long before 20 s."""
    topic = env.topic(queues=2)
    first, second = (make(env, topic, Inbox(), rebalance_ms=600_000) for _ in range(2))
    async with running(first):
        await eventually(lambda: shared([first], topic, 4))
        async with running(second):
            await eventually(lambda: shared([first, second], topic, 4), within_s=15)
            await eventually(lambda: len(assigned_queues(first, topic)) == 2, within_s=15)
        await eventually(lambda: shared([first], topic, 4), within_s=15)


async def test_no_message_is_lost_while_members_join_and_leave(env: Environment) -> None:
    topic = env.topic(queues=4)
    inbox = Inbox()
    sent: list[str] = []
    steady = make(env, topic, inbox)
    async with env.producer() as producer, running(steady):
        stopping = asyncio.Event()

        async def send_continuously() -> None:
            while not stopping.is_set():
                bodies = numbers(20, len(sent))
                await send_all(producer, topic, bodies)
                sent.extend(bodies)
                await asyncio.sleep(0.02)

        flooding = asyncio.ensure_future(send_continuously())
        try:
            for _ in range(3):
                group = [steady, *(make(env, topic, inbox) for _ in range(2))]
                async with running(*group[1:]):
                    await eventually(partial(shared, group, topic, 8))
                await eventually(lambda: shared([steady], topic, 8))
        finally:
            stopping.set()
            await flooding
        await inbox.distinct(sent)
    duplicates = len(inbox.messages) - len(set(inbox.bodies))
    print(f"{len(sent)} messages, {duplicates} of them twice, over 12 changes of the group")
    # A reassigned queue may repeat only messages that its old owner had in memory.
    assert duplicates <= 12 * 8 * 32


async def test_a_consumer_without_queues_logs_the_reason(
    env: Environment, caplog: pytest.LogCaptureFixture
) -> None:
    topic = env.topic(queues=1, brokers=["broker-a"])
    inbox = Inbox()
    consumers = [make(env, topic, inbox) for _ in range(2)]
    with caplog.at_level("WARNING", logger="penstock"):
        async with env.producer() as producer, running(*consumers):
            await eventually(lambda: shared(consumers, topic, 1, idle=True))
            await producer.send(Message(topic, "x"))
            await inbox.count(1)
            lines = await eventually(
                lambda: [r.getMessage() for r in caplog.records if topic in r.getMessage()]
            )
    assert any("2" in line and "1" in line for line in lines), lines


async def test_a_consumer_without_a_route_logs_the_reason(
    env: Environment, caplog: pytest.LogCaptureFixture
) -> None:
    topic = env.name("nowhere")
    with caplog.at_level("WARNING", logger="penstock"):
        async with running(make(env, topic, Inbox())):
            await eventually(
                lambda: [r for r in caplog.records if topic in r.getMessage()], within_s=20
            )


async def test_different_subscriptions_of_a_group_are_logged(
    env: Environment, caplog: pytest.LogCaptureFixture
) -> None:
    """A frequent mistake: two subscriptions in one group, and messages that never arrive."""
    topic = env.topic()
    first, second = env.consumer(start_at="first"), env.consumer(start_at="first")
    first.on(topic, tags="a")(Inbox())
    second.on(topic, tags="b")(Inbox())
    with caplog.at_level("WARNING", logger="penstock"):
        async with running(first, second):
            await eventually(
                lambda: [
                    r for r in caplog.records
                    if topic in r.getMessage() and "subscri" in r.getMessage()
                ]
            )  # fmt: skip


async def test_the_queues_of_a_dead_consumer_are_taken_over(env: Environment) -> None:
    """A killed consumer: its connections are closed, and brokers notify the others."""
    topic = env.topic(queues=2)
    inbox = Inbox()
    survivor = make(env, topic, inbox)
    async with Network(env.cluster) as network:
        victim = make(env, topic, inbox, nameservers=network.nameservers)
        async with running(survivor), running(victim), env.producer() as producer:
            await eventually(lambda: shared([survivor, victim], topic, 4))
            for proxy in network.brokers.values():
                proxy.refusing = True
                proxy.cut()
            await eventually(lambda: len(assigned_queues(survivor, topic)) == 4)
            await send_all(producer, topic, numbers(40))
            await inbox.distinct(numbers(40))
