"""Request and reply: a message that is answered, as if it were a call."""

from __future__ import annotations

import asyncio

import pytest

from penstock import Message, ReceivedMessage
from penstock.errors import NoReply, PenstockError

from .environment import Environment, Inbox, eventually, numbers, running


async def test_a_consumer_replies(env: Environment) -> None:
    topic = env.topic()
    consumer = env.consumer(start_at="first")

    @consumer.on(topic)
    async def serve(message: ReceivedMessage) -> None:
        await consumer.reply(message, b"re: " + message.body)

    async with running(consumer), env.producer() as producer:
        reply = await producer.request(Message(topic, "hello"), timeout_ms=30_000)
        assert reply.body == b"re: hello"
        replies = await asyncio.gather(
            *(producer.request(Message(topic, b), timeout_ms=30_000) for b in numbers(50))
        )
        assert [reply.body.decode() for reply in replies] == [f"re: {b}" for b in numbers(50)]


async def test_a_producer_replies_with_properties(env: Environment) -> None:
    topic = env.topic()
    consumer = env.consumer(start_at="first")
    async with env.producer(group=env.name("replies")) as answering:

        @consumer.on(topic)
        async def serve(message: ReceivedMessage) -> None:
            body = message.body.upper() * 3000  # large: it is compressed on its way
            await answering.reply(message, body, properties={"x": "y"})

        async with running(consumer), env.producer() as producer:
            reply = await producer.request(Message(topic, "abc"), timeout_ms=30_000)
    assert reply.body == b"ABC" * 3000
    assert reply.properties["x"] == "y"


async def test_a_request_without_a_reply_times_out(env: Environment) -> None:
    topic = env.topic()
    async with env.producer() as producer:
        with pytest.raises(NoReply) as caught:
            await producer.request(Message(topic, "hello?"), timeout_ms=500)
        assert caught.value.retry
        assert topic in str(caught.value)
        # A request is a message all the same.
        assert len(await eventually(lambda: env.stored(topic))) == 1


async def test_each_requester_gets_its_own_replies(env: Environment) -> None:
    topic = env.topic()
    consumer = env.consumer(start_at="first")

    @consumer.on(topic)
    async def serve(message: ReceivedMessage) -> None:
        await consumer.reply(message, message.body)

    async with running(consumer), env.producer() as one, env.producer() as other:
        pairs = await asyncio.gather(
            *(
                producer.request(Message(topic, f"{name}-{n}"), timeout_ms=30_000)
                for n in range(10)
                for name, producer in (("one", one), ("other", other))
            )
        )
        assert [reply.body.decode() for reply in pairs] == [
            f"{name}-{n}" for n in range(10) for name in ("one", "other")
        ]


async def test_a_message_that_is_not_a_request_can_not_be_replied_to(env: Environment) -> None:
    topic = env.topic()
    inbox = Inbox()
    consumer = env.consumer(start_at="first")
    consumer.on(topic)(inbox)
    async with running(consumer), env.producer() as producer:
        await producer.send(Message(topic, "plain"))
        (message,) = await inbox.count(1)
        with pytest.raises(PenstockError):
            await consumer.reply(message, b"x")
        with pytest.raises(PenstockError):
            await producer.reply(message, b"x")
