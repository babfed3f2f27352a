"""The pull consumer: assigned or subscribed queues, read at the caller's pace."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest

from penstock import AsyncPullConsumer, Message, MessageQueue, ReceivedMessage
from penstock.errors import PenstockError

from .environment import Environment, eventually, numbers, send_all


def make(env: Environment, **options: Any) -> AsyncPullConsumer:
    return env.make(AsyncPullConsumer, **options)


async def poll_all(
    consumer: AsyncPullConsumer, count: int, **options: Any
) -> list[ReceivedMessage]:
    """Poll until this many messages were received."""
    messages: list[ReceivedMessage] = []
    async with asyncio.timeout(40):
        while len(messages) < count:
            messages += await consumer.poll(timeout_ms=1_000, **options)
    return messages


async def fill(env: Environment, topic: str, per_queue: int) -> list[MessageQueue]:
    async with env.producer() as producer:
        queues = list(await producer.queues(topic))
        for queue in queues:
            await producer.send_batch(
                [Message(topic, body) for body in numbers(per_queue)], queue=queue
            )
    return queues


async def test_seek_sets_the_position_in_assigned_queues(env: Environment) -> None:
    topic = env.topic(queues=2)
    await fill(env, topic, 20)
    async with make(env) as consumer:
        queues = list(await consumer.queues(topic))
        assert len(queues) == 4
        consumer.assign(queues[:2])
        for queue in queues[:2]:
            await consumer.seek_to_begin(queue)
        messages = await poll_all(consumer, 40)
        assert {message.queue for message in messages} == set(queues[:2])
        for queue in queues[:2]:
            offsets = [m.queue_offset for m in messages if m.queue == queue]
            assert offsets == list(range(20))
            assert await consumer.position(queue) == 20
        await consumer.seek(queues[0], 15)
        again = await poll_all(consumer, 5)
        assert [(m.queue, m.queue_offset) for m in again] == [
            (queues[0], offset) for offset in range(15, 20)
        ]
        await consumer.seek_to_end(queues[1])
        assert await consumer.poll(timeout_ms=200) == []


async def test_offsets_are_committed_manually(env: Environment) -> None:
    topic, group = env.topic(queues=1, brokers=["broker-a"]), env.name("c")
    (queue,) = await fill(env, topic, 10)
    async with make(env, auto_commit=False) as consumer:
        consumer.assign([queue])
        await consumer.seek_to_begin(queue)
        await poll_all(consumer, 10)
        assert await consumer.committed(queue) in (None, -1)
        await consumer.commit({queue: 4})
        assert env.committed(topic, group, "broker-a", 0) == 4
        assert await consumer.committed(queue) == 4
    assert env.committed(topic, group, "broker-a", 0) == 4, "close commits nothing"
    async with make(env, auto_commit=False) as consumer:
        consumer.assign([queue])
        messages = await poll_all(consumer, 6)
        assert [message.queue_offset for message in messages] == list(range(4, 10))
        await consumer.commit()
    await eventually(lambda: env.committed(topic, group, "broker-a", 0) == 10)


async def test_offsets_are_committed_automatically(env: Environment) -> None:
    topic, group = env.topic(queues=2), env.name("c")
    await fill(env, topic, 5)
    async with make(env, start_at="first") as consumer:
        consumer.subscribe(topic)
        assert len(await poll_all(consumer, 20)) == 20
        await consumer.poll(timeout_ms=10)
    await eventually(lambda: env.progress(topic, group) == 20)


async def test_subscribers_share_the_queues(env: Environment) -> None:
    topic = env.topic(queues=3)
    await fill(env, topic, 10)
    async with make(env, start_at="first") as one, make(env, start_at="first") as other:
        for consumer in (one, other):
            consumer.subscribe(topic)
        got: list[ReceivedMessage] = []

        async def look() -> bool:
            for consumer in (one, other):
                got.extend(await consumer.poll(timeout_ms=100))
            return len({(m.queue, m.queue_offset) for m in got}) == 60

        await eventually(look)


async def test_subscriptions_are_filtered_by_tags_and_sql(env: Environment) -> None:
    topic = env.topic()
    async with env.producer() as producer:
        for n in range(10):
            message = Message(topic, str(n), tags="ab"[n % 2], properties={"n": str(n)})
            await producer.send(message)
    for options, expected in (({"tags": "a"}, "02468"), ({"sql": "n >= 7"}, "789")):
        group = env.name(f"c-{expected}")
        async with make(env, group=group, start_at="first") as consumer:
            consumer.subscribe(topic, **options)
            messages = await poll_all(consumer, len(expected))
            assert sorted(message.body.decode() for message in messages) == list(expected)


async def test_begin_end_and_time_offsets_of_a_queue(env: Environment) -> None:
    topic = env.topic(queues=1, brokers=["broker-b"])
    queue = MessageQueue(topic, "broker-b", 0)
    async with env.producer() as producer, make(env) as consumer:
        assert await consumer.end_offset(queue) == 0
        await producer.send_batch([Message(topic, body) for body in numbers(5)])
        await asyncio.sleep(1.1)
        middle = datetime.now()
        await asyncio.sleep(1.1)
        await producer.send_batch([Message(topic, body) for body in numbers(5)])
        assert await consumer.begin_offset(queue) == 0
        assert await consumer.end_offset(queue) == 10
        assert await consumer.offset_at(queue, middle) == 5
        assert await consumer.offset_at(queue, middle - timedelta(hours=1)) == 0


async def test_paused_queues_are_not_polled(env: Environment) -> None:
    topic = env.topic(queues=1)
    queues = await fill(env, topic, 10)
    async with make(env) as consumer:
        consumer.assign(queues)
        consumer.pause([queues[0]])
        for queue in queues:
            await consumer.seek_to_begin(queue)
        messages = await poll_all(consumer, 10)
        messages += await consumer.poll(timeout_ms=200)
        assert {message.queue for message in messages} == {queues[1]}
        consumer.resume([queues[0]])
        assert {m.queue for m in await poll_all(consumer, 10)} == {queues[0]}


async def test_poll_waits_for_the_first_message_and_respects_its_limit(
    env: Environment,
) -> None:
    topic = env.topic(queues=1, brokers=["broker-a"])
    async with env.producer() as producer, make(env) as consumer:
        queue = MessageQueue(topic, "broker-a", 0)
        consumer.assign([queue])
        await consumer.seek(queue, 0)
        waiting = asyncio.ensure_future(consumer.poll(timeout_ms=20_000))
        await asyncio.sleep(0.3)
        await producer.send(Message(topic, "now"))
        assert [message.body for message in await waiting] == [b"now"]
        await producer.send_batch([Message(topic, body) for body in numbers(50)])
        got: list[str] = []
        async with asyncio.timeout(20):
            while len(got) < 50:
                some = await consumer.poll(timeout_ms=1_000, count_max=7)
                assert len(some) <= 7
                got += [message.body.decode() for message in some]
        assert got == numbers(50)


async def test_seek_in_a_queue_that_is_not_assigned_is_refused(env: Environment) -> None:
    topic = env.topic(queues=1, brokers=["broker-a"])
    async with make(env) as consumer:
        with pytest.raises(PenstockError):
            await consumer.seek(MessageQueue(topic, "broker-a", 0), 0)


async def test_messages_sent_while_polling_are_received(env: Environment) -> None:
    topic = env.topic(queues=4)
    async with env.producer() as producer, make(env, start_at="first") as consumer:
        consumer.subscribe(topic)
        sending = asyncio.ensure_future(send_all(producer, topic, numbers(2_000)))
        messages = await poll_all(consumer, 2_000)
        await sending
    assert sorted((m.body.decode() for m in messages), key=int) == numbers(2_000)
