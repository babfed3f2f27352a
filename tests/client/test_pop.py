"""The POP consumer: messages are acknowledged one by one, or redelivered."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock import AsyncPopConsumer, Message, ReceivedMessage

from .environment import Environment, Inbox, eventually, numbers, running, send_all


def make(env: Environment, **options: Any) -> AsyncPopConsumer:
    return env.make(AsyncPopConsumer, **options)


async def receive_all(
    consumer: AsyncPopConsumer, count: int, *, invisible_ms: int = 60_000
) -> list[ReceivedMessage]:
    messages: list[ReceivedMessage] = []
    async with asyncio.timeout(60):
        while len(messages) < count:
            messages += await consumer.receive(
                count_max=32, wait_ms=1_000, invisible_ms=invisible_ms
            )
    return messages


async def test_each_message_is_received_once_and_acknowledged(env: Environment) -> None:
    topic = env.topic(queues=2)
    async with env.producer() as producer, make(env, start_at="first") as consumer:
        consumer.subscribe(topic)
        receipts = await send_all(producer, topic, numbers(80), tags="t")
        messages = await receive_all(consumer, 80)
        assert sorted((m.body.decode() for m in messages), key=int) == numbers(80)
        assert {m.message_id for m in messages} == {r.message_id for r in receipts}
        assert {(m.topic, m.tags) for m in messages} == {(topic, "t")}
        for message in messages:
            await consumer.ack(message)
        assert await consumer.receive(count_max=32, wait_ms=200, invisible_ms=10_000) == []


async def test_unacknowledged_messages_are_redelivered(env: Environment) -> None:
    topic = env.topic(queues=1)
    async with env.producer() as producer, make(env, start_at="first") as consumer:
        consumer.subscribe(topic)
        await send_all(producer, topic, numbers(10))
        first = await receive_all(consumer, 10, invisible_ms=3_000)
        kept = [message for message in first if int(message.body) % 2]
        for message in first:
            if message not in kept:
                await consumer.ack(message)
        again = await receive_all(consumer, 5)
        assert sorted(m.body.decode() for m in again) == sorted(m.body.decode() for m in kept)
        assert {message.topic for message in again} == {topic}, "the retry topic is hidden"
        for message in again:
            await consumer.ack(message)


async def test_the_invisible_time_can_be_extended(env: Environment) -> None:
    topic = env.topic(queues=1, brokers=["broker-a"])
    async with env.producer() as producer, make(env, start_at="first") as consumer:
        consumer.subscribe(topic)
        await send_all(producer, topic, ["long", "short"])
        messages = await receive_all(consumer, 2, invisible_ms=3_000)
        (long,) = [message for message in messages if message.body == b"long"]
        await consumer.extend(long, 60_000)
        again = await receive_all(consumer, 1)
        assert [message.body for message in again] == [b"short"]
        await consumer.ack(long)
        await consumer.ack(again[0])


async def test_two_consumers_of_one_queue_share_its_messages(env: Environment) -> None:
    topic = env.topic(queues=1, brokers=["broker-b"])
    async with (
        env.producer() as producer,
        make(env, start_at="first") as one,
        make(env, start_at="first") as other,
    ):
        for consumer in (one, other):
            consumer.subscribe(topic)
        await producer.send_batch([Message(topic, body) for body in numbers(100)])
        seen: list[str] = []

        async def drain(consumer: AsyncPopConsumer) -> None:
            while len(seen) < 100:
                for message in await consumer.receive(
                    count_max=8, wait_ms=500, invisible_ms=30_000
                ):
                    seen.append(message.body.decode())
                    await consumer.ack(message)

        async with asyncio.timeout(40):
            await asyncio.gather(drain(one), drain(other))
    assert sorted(seen, key=int) == numbers(100)


async def test_handled_messages_are_acknowledged(env: Environment) -> None:
    topic = env.topic(queues=2)
    inbox = Inbox()
    failed: list[str] = []
    consumer = make(env, start_at="first", invisible_ms=2_000)

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> None:
        body = message.body.decode()
        if body == "3" and body not in failed:
            failed.append(body)
            raise RuntimeError("as a test wants it")
        if body == "slow":
            await asyncio.sleep(5)  # longer than the invisible time, which is extended
        inbox.add(message)

    async with env.producer() as producer, running(consumer):
        await send_all(producer, topic, [*numbers(20), "slow"])
        await inbox.distinct([*numbers(20), "slow"])
        await asyncio.sleep(0.5)
    assert failed == ["3"]
    assert sorted(inbox.bodies) == sorted([*numbers(20), "slow"]), "each one exactly once"


async def test_pops_are_filtered_by_tags(env: Environment) -> None:
    topic = env.topic()
    async with env.producer() as producer, make(env, start_at="first") as consumer:
        consumer.subscribe(topic, tags="a || b")
        for n, tag in enumerate("abcabc"):
            await producer.send(Message(topic, str(n), tags=tag))
        messages = await receive_all(consumer, 4)
        assert sorted(message.body.decode() for message in messages) == list("0134")
        for message in messages:
            await consumer.ack(message)


async def test_a_waiting_receive_returns_when_a_message_arrives(env: Environment) -> None:
    topic = env.topic(queues=1, brokers=["broker-a"])
    async with env.producer() as producer, make(env, start_at="first") as consumer:
        consumer.subscribe(topic)
        await producer.send(Message(topic, "first"))
        (first,) = await receive_all(consumer, 1)
        await consumer.ack(first)
        waiting = asyncio.ensure_future(
            consumer.receive(count_max=8, wait_ms=15_000, invisible_ms=10_000)
        )
        await asyncio.sleep(0.3)
        await producer.send(Message(topic, "now"))
        messages = await waiting
        if not messages:
            messages = await receive_all(consumer, 1)
        assert [message.body for message in messages] == [b"now"]
        await consumer.ack(messages[0])
        await eventually(lambda: True)
