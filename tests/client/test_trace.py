"""Traces of sends and consumption in the format of RocketMQ's clients."""

from __future__ import annotations

from typing import Any

from penstock import AsyncTransactionProducer, Message, ReceivedMessage
from penstock.wire.message import decode_messages

from .clusters import ask
from .environment import Environment, Inbox, eventually, running

TRACES = "RMQ_SYS_TRACE_TOPIC"
QUERY = 12


def find(env: Environment, key: str, topic: str = TRACES) -> list[list[str]]:
    """All records of the traces with this key, looked up in the brokers' index."""
    records = []
    for broker in env.cluster.brokers:
        answer = ask(broker.address, QUERY, {
            "topic": topic, "key": key, "maxNum": "32", "beginTimestamp": "0",
            "endTimestamp": str((1 << 63) - 1), "_UNIQUE_KEY_QUERY": "false",
        })  # fmt: skip
        if answer.code == 0:
            for message in decode_messages(answer.body):
                lines = message.body.decode().split("\x02")
                records += [line.split("\x01") for line in lines if line]
    return [record for record in records if key in record or key in " ".join(record)]


async def traced(env: Environment, key: str, kind: str, count: int = 1, **where: str) -> Any:
    """Wait for this many records of a kind; returns them."""

    def look() -> list[list[str]]:
        found = [record for record in find(env, key, **where) if record[0] == kind]
        return found if len(found) >= count else []

    return await eventually(look)


async def test_sends_and_consumption_are_traced(env: Environment) -> None:
    topic, group = env.topic(), env.name("c")
    async with env.producer(trace=True) as producer:
        receipt = await producer.send(Message(topic, "hello", tags="t", keys=[env.name("key")]))
    (pub,) = await traced(env, receipt.message_id, "Pub")
    assert pub[3:6] == [env.name("p"), topic, receipt.message_id]
    assert (pub[6], pub[7], pub[9], pub[11]) == ("t", env.name("key"), "5", "0")
    assert (pub[12], pub[13]) == (receipt.offset_id, "true")
    assert await traced(env, env.name("key"), "Pub") == [pub]

    inbox = Inbox()
    consumer = env.consumer(start_at="first", trace=True)

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> None:
        inbox.add(message)
        if message.reconsume_times == 0:
            raise RuntimeError("as a test wants it")

    async with running(consumer):
        await inbox.count(2)
    before = await traced(env, receipt.message_id, "SubBefore", 2)
    assert {record[3] for record in before} == {group}
    assert {record[6] for record in before} == {"0", "1"}, "times tried before"
    after = await traced(env, receipt.message_id, "SubAfter", 2)
    assert sorted(record[4] for record in after) == ["false", "true"]
    # Fields of a record before: kind, time, region, group, request id, message id, times.
    assert {record[1] for record in after} == {record[4] for record in before}


async def test_batches_transactions_and_delays_are_traced(env: Environment) -> None:
    topic = env.topic()
    async with env.producer(trace=True) as producer:
        delayed = await producer.send(Message(topic, "later", delay_level=1))
        batch = await producer.send_batch([Message(topic, "a"), Message(topic, "b")])
    async with env.make(AsyncTransactionProducer, group=env.name("tx"), trace=True) as transactions:
        handle = await transactions.prepare(Message(topic, "half"))
        await transactions.commit(handle)
    (pub,) = await traced(env, delayed.message_id, "Pub")
    assert pub[11] == "3"
    for receipt in batch:
        assert await traced(env, receipt.message_id, "Pub")
    stored = await eventually(lambda: [m for m in env.stored(topic) if m.body == b"half"])
    (end,) = await traced(env, stored[0].message_id, "EndTransaction")
    assert end[11] == "COMMIT_MESSAGE"
    (pub,) = await traced(env, stored[0].message_id, "Pub")
    assert pub[11] == "1"


async def test_traces_can_be_written_to_another_topic(env: Environment) -> None:
    topic, own = env.topic(), env.topic("traces")
    async with env.producer(trace=own) as producer:
        receipt = await producer.send(Message(topic, "hello"))
    assert await traced(env, receipt.message_id, "Pub", topic=own)
    assert find(env, receipt.message_id) == []


async def test_nothing_is_traced_by_default(env: Environment) -> None:
    topic, own = env.topic(), env.topic("traces")
    async with env.producer() as silent, env.producer(trace=True) as producer:
        quiet = await silent.send(Message(topic, "quiet"))
        loud = await producer.send(Message(topic, "loud"))
    await traced(env, loud.message_id, "Pub")
    assert find(env, quiet.message_id) == []
    assert env.stored(own) == []
