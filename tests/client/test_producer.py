"""The ways to send, and what the brokers store."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta

import pytest

from penstock import Batching, Message, MessageQueue, SendStatus
from penstock.errors import (
    ClientClosed,
    MessageIllegal,
    NoQueue,
    NoRoute,
    PenstockError,
    TooMuchInFlight,
)
from penstock.wire.codes import SYS_COMPRESSED
from penstock.wire.compression import compression_of, decompress
from penstock.wire.message import StoredMessage
from penstock.wire.message_ids import decode_unique_id
from tests.depth import rounds

from .environment import Environment, eventually, numbers, send_all, text

MIB = 1024 * 1024


async def test_every_field_of_a_message_is_stored(env: Environment) -> None:
    topic = env.topic()
    message = Message(
        topic, "héllo 世界", tags="trial", keys=["k1", "k2"],
        properties={"color": "blue", "größe": "12 µm"}, flag=7,
    )  # fmt: skip
    async with env.producer() as producer:
        receipt = await producer.send(message)
    (stored,) = env.stored(topic)
    assert (stored.topic, stored.body.decode(), stored.flag) == (topic, "héllo 世界", 7)
    assert (stored.tags, stored.keys) == ("trial", ["k1", "k2"])
    assert stored.properties["KEYS"] == "k1 k2"
    assert {stored.properties[name] for name in ("color", "größe")} == {"blue", "12 µm"}
    assert stored.properties["WAIT"] == "true"
    assert receipt.status is SendStatus.SEND_OK
    assert receipt.message_id == stored.unique_id == stored.properties["UNIQ_KEY"]
    assert receipt.offset_id == stored.offset_id
    assert (receipt.queue.topic, receipt.queue.queue_id) == (topic, stored.queue_id)
    assert receipt.queue_offset == stored.queue_offset == 0
    assert receipt.queue.broker_name in ("broker-a", "broker-b")
    assert receipt.recall_handle is None
    assert stored.reconsume_times == 0
    assert abs(stored.born_ms - stored.store_ms) < 60_000


async def test_message_ids_have_the_format_of_rocketmq(env: Environment) -> None:
    topic = env.topic()
    async with env.producer() as producer:
        receipts = await send_all(producer, topic, numbers(50))
    ids = [decode_unique_id(receipt.message_id) for receipt in receipts]
    assert len({receipt.message_id for receipt in receipts}) == 50
    assert {one.pid for one in ids} == {os.getpid() & 0xFFFF}
    counters = [(one.counter - ids[0].counter) & 0xFFFF for one in ids]
    assert counters == list(range(50)), "one counter for the whole process"
    assert {len(receipt.message_id) for receipt in receipts} == {32}
    assert {receipt.message_id for receipt in receipts} == {
        message.unique_id for message in env.stored(topic)
    }


async def test_queues_of_all_brokers_are_used_in_round_robin(env: Environment) -> None:
    topic = env.topic(queues=4)
    async with env.producer(avoid_faulty=False) as producer:
        queues = await producer.queues(topic)
        await send_all(producer, topic, numbers(8))  # connections exist
        receipts = [await producer.send(Message(topic, body)) for body in numbers(24)]
    assert list(queues) == [
        MessageQueue(topic, name, n) for name in ("broker-a", "broker-b") for n in range(4)
    ]
    assert Counter(receipt.queue for receipt in receipts) == dict.fromkeys(queues, 3)


async def test_a_queue_can_be_chosen(env: Environment) -> None:
    topic = env.topic()
    async with env.producer() as producer:
        queue = (await producer.queues(topic))[5]
        receipts = [await producer.send(Message(topic, b), queue=queue) for b in numbers(5)]
        assert [receipt.queue for receipt in receipts] == [queue] * 5
        assert [receipt.queue_offset for receipt in receipts] == list(range(5))

        last = await producer.send(
            Message(topic, "x"), selector=lambda queues, message: queues[len(message.body) + 1]
        )
        assert last.queue == MessageQueue(topic, "broker-a", 2)
        with pytest.raises(PenstockError):
            await producer.send(Message(topic, "x"), queue=MessageQueue(topic, "broker-z", 0))


async def test_messages_with_the_same_ordering_key_use_the_same_queue(env: Environment) -> None:
    topic = env.topic(queues=4)
    keys = [f"order-{n}" for n in range(40)]
    places: dict[str, set[MessageQueue]] = {key: set() for key in keys}
    for _ in range(2):  # another producer chooses the same queue
        async with env.producer() as producer:
            for key in keys:
                receipt = await producer.send(Message(topic, key), ordering_key=key)
                places[key].add(receipt.queue)
    assert {len(queues) for queues in places.values()} == {1}
    assert len(set.union(*places.values())) > 4, "keys are spread"


async def test_delay_levels_and_delivery_times_defer_messages(env: Environment) -> None:
    topic = env.topic()
    messages = [
        Message(topic, "level", delay_level=1),
        Message(topic, "delay", delay=timedelta(milliseconds=1500)),
        Message(topic, "moment", deliver_at=datetime.now() + timedelta(milliseconds=1500)),
    ]
    async with env.producer() as producer:
        receipts = [await producer.send(message) for message in messages]
        assert {receipt.status for receipt in receipts} == {SendStatus.SEND_OK}
        assert env.stored(topic) == []
        stored = await eventually(lambda: _if_all(env.stored(topic), 3))
    assert {message.body.decode() for message in stored} == {"level", "delay", "moment"}
    assert all(message.store_ms - message.born_ms >= 900 for message in stored)
    assert {message.unique_id for message in stored} == {r.message_id for r in receipts}


async def test_a_recalled_message_is_never_delivered(env: Environment) -> None:
    topic = env.topic()
    async with env.producer() as producer:
        kept, unwanted = [
            await producer.send(Message(topic, body, delay=timedelta(seconds=2)))
            for body in ("kept", "unwanted")
        ]
        assert kept.recall_handle
        assert unwanted.recall_handle
        assert await producer.recall(topic, unwanted.recall_handle) == unwanted.message_id
        await producer.send(Message(topic, "last", delay=timedelta(seconds=4)))
        stored = await eventually(lambda: _if_all(env.stored(topic), 2))
        assert sorted(text(stored)) == ["kept", "last"]
        with pytest.raises(PenstockError):
            await producer.recall(topic, "no handle")


def _if_all(found: Sequence[StoredMessage], count: int) -> Sequence[StoredMessage]:
    return found if len(found) >= count else ()


async def test_a_batch_has_a_receipt_for_each_message(env: Environment) -> None:
    topic = env.topic()
    messages = [
        Message(topic, body, tags=f"t{n % 3}", keys=[f"key-{n}"], properties={"n": body})
        for n, body in enumerate(numbers(100))
    ]
    async with env.producer() as producer:
        receipts = await producer.send_batch(messages)
    assert [receipt.queue_offset for receipt in receipts] == list(range(100))
    assert len({receipt.queue for receipt in receipts}) == 1
    stored = env.stored(topic)
    assert text(stored) == numbers(100)
    assert [message.properties["n"] for message in stored] == numbers(100)
    assert [m.unique_id for m in stored] == [receipt.message_id for receipt in receipts]
    assert [m.offset_id for m in stored] == [receipt.offset_id for receipt in receipts]
    assert [m.tags for m in stored] == [message.tags for message in messages]


async def test_a_batch_is_split_by_size_and_topic(env: Environment) -> None:
    topics = [env.topic("one"), env.topic("two")]
    bodies = [os.urandom(MIB + 1000) for _ in range(10)]
    messages = [Message(topics[n % 2], body) for n, body in enumerate(bodies)]
    async with env.producer() as producer:
        receipts = await producer.send_batch(messages, timeout_ms=15_000)
    assert [receipt.queue.topic for receipt in receipts] == [m.topic for m in messages]
    assert len({receipt.message_id for receipt in receipts}) == 10
    for n, topic in enumerate(topics):
        stored = {message.unique_id: message.body for message in env.stored(topic)}
        assert stored == {
            r.message_id: b for r, b in zip(receipts[n::2], bodies[n::2], strict=True)
        }


async def test_batches_of_messages_that_can_not_be_batched_are_refused(env: Environment) -> None:
    topic = env.topic()
    async with env.producer() as producer:
        with pytest.raises(MessageIllegal):
            await producer.send_batch([Message(topic, "a"), Message(topic, "b", delay_level=1)])
        assert await producer.send_batch([]) == []
    assert env.stored(topic) == []


def _kind(sys_flag: int) -> str | None:
    return compression_of(sys_flag).name.lower() if sys_flag & SYS_COMPRESSED else None


@pytest.mark.parametrize("kind", ["zlib", "lz4", "zstd", None])
async def test_large_bodies_are_compressed(env: Environment, kind: str | None) -> None:
    topic = env.topic(queues=1, brokers=["broker-a"])
    large, small = b"0123456789abcdef" * 1000, b"x" * 4000
    async with env.producer(compression=kind) as producer:
        for body in (large, small):
            await producer.send(Message(topic, body))
    first, second = env.stored(topic)
    assert (_kind(first.sys_flag), _kind(second.sys_flag)) == (kind, None)
    assert second.body == small
    assert decompress(first.body, first.sys_flag, limit=MIB) == large
    assert (len(first.body) < 2000) == (kind is not None)


async def test_the_compression_threshold_can_be_set(env: Environment) -> None:
    topic = env.topic(queues=1, brokers=["broker-a"])
    async with env.producer(compress_above_bytes=100) as producer:
        for size in (99, 101):  # Java compresses from the threshold on, others above it
            await producer.send(Message(topic, b"z" * size))
    assert [_kind(message.sys_flag) for message in env.stored(topic)] == [None, "zlib"]


async def test_oneway_messages_arrive(env: Environment) -> None:
    topic = env.topic()
    async with env.producer() as producer:
        for body in numbers(20):
            await producer.send_oneway(Message(topic, body))
        stored = await eventually(lambda: _if_all(env.stored(topic), 20))
    assert sorted(text(stored), key=int) == numbers(20)


async def test_submitted_messages_are_pipelined_without_a_task_each(env: Environment) -> None:
    topic = env.topic()
    count = rounds(ci=3_000, proof=30_000)
    async with env.producer(in_flight_max=count, avoid_faulty=False, timeout_ms=30_000) as producer:
        await send_all(producer, topic, numbers(8))  # route and connections exist
        futures = [producer.submit(Message(topic, body)) for body in numbers(count)]
        assert len(asyncio.all_tasks()) < 20
        await producer.flush()
        assert all(future.done() for future in futures)
    receipts = [future.result() for future in futures]
    assert Counter(r.queue for r in receipts) == dict.fromkeys(
        {r.queue for r in receipts}, count // 8
    )
    for queue in {receipt.queue for receipt in receipts}:
        offsets = [r.queue_offset for r in receipts if r.queue == queue]
        if env.cluster.kind == "apache":  # its threads overtake each other
            offsets.sort()
        first = offsets[0]
        assert offsets == list(range(first, first + count // 8)), "the order of submission is kept"


async def test_sends_beyond_the_in_flight_limit_wait_or_fail(env: Environment) -> None:
    """In both cases the limit is kept and no message is lost silently."""
    topic = env.topic()
    async with env.producer(in_flight_max=10) as producer:
        await producer.queues(topic)
        sent = []
        for body in numbers(100):
            with contextlib.suppress(TooMuchInFlight):
                sent.append(producer.submit(Message(topic, body)))
        outcomes = await asyncio.gather(*sent, return_exceptions=True)
        good = [one for one in outcomes if not isinstance(one, BaseException)]
        assert len(good) >= 10
        await asyncio.gather(*(producer.send(Message(topic, body)) for body in numbers(100)))
    assert len(env.stored(topic)) == len(good) + 100


async def test_small_sends_are_accumulated_into_batches(env: Environment) -> None:
    topic = env.topic()
    async with env.producer(batching=Batching(linger_ms=20)) as producer:
        receipts = await send_all(producer, topic, numbers(500), tags="t")
        late = producer.submit(Message(topic, "late"))
        await producer.flush()
        assert late.done()
        waiting = producer.submit(Message(topic, "last"))
    assert waiting.done(), "closing sends what waits"
    stored = {message.unique_id: message.body.decode() for message in env.stored(topic)}
    assert len(stored) == 502
    assert [stored[receipt.message_id] for receipt in receipts] == numbers(500)
    assert stored[waiting.result().message_id] == "last"


async def test_a_topic_is_created_by_its_first_message(env: Environment) -> None:
    topic = env.name("new")
    async with env.producer() as producer:
        receipts = [await producer.send(Message(topic, body)) for body in numbers(8)]
    assert {receipt.status for receipt in receipts} == {SendStatus.SEND_OK}
    assert sorted(text(env.stored(topic))) == numbers(8)


async def test_an_unknown_topic_error_suggests_similar_names(env: Environment) -> None:
    topic = env.topic("orders")
    async with env.producer() as producer:
        with pytest.raises(NoRoute) as caught:
            await producer.queues(f"{topic}s")
    assert topic in str(caught.value)
    assert env.nameservers in str(caught.value)
    assert caught.value.hint


async def test_a_send_to_a_read_only_topic_fails(env: Environment) -> None:
    topic = env.topic(perm=4)
    async with env.producer() as producer:
        with pytest.raises(NoQueue) as caught:
            await producer.send(Message(topic, "x"))
    assert topic in str(caught.value)


async def test_invalid_messages_are_refused_before_they_are_sent(env: Environment) -> None:
    topic = env.topic()
    async with env.producer(message_bytes_max=1000, compression=None) as producer:
        await producer.send(Message(topic, b"x" * 1000))
        with pytest.raises(MessageIllegal) as caught:
            await producer.send(Message(topic, b"x" * 1001))
        assert "1001" in str(caught.value).replace(",", "")
        for bad in ("with space", "t" * 128, "tab\t", "slash/"):
            with pytest.raises(PenstockError):
                await producer.send(Message(bad, "x"))
        with pytest.raises(PenstockError):
            await producer.send(Message(topic, "x", properties={"KEYS": "mine"}))
        with pytest.raises(PenstockError):
            await producer.send(Message(topic, "x", properties={"bad\x01name": "x"}))
    assert len(env.stored(topic)) == 1


async def test_wait_stored_can_be_disabled(env: Environment) -> None:
    topic = env.topic()
    async with env.producer() as producer:
        await producer.send(Message(topic, "x", wait_stored=False))
    (stored,) = env.stored(topic)
    assert stored.properties["WAIT"] == "false"


async def test_a_producer_that_is_not_started_or_closed_raises(env: Environment) -> None:
    topic = env.topic()
    producer = env.producer()
    with pytest.raises(ClientClosed):
        await producer.send(Message(topic, "x"))
    async with producer:
        await producer.send(Message(topic, "x"))
    with pytest.raises(ClientClosed):
        await producer.send(Message(topic, "x"))
    await producer.close()  # closing again is allowed
    assert len(env.stored(topic)) == 1


async def test_the_producer_works_after_cancelled_sends(env: Environment) -> None:
    topic = env.topic()
    async with env.producer() as producer:
        for _ in range(20):
            sending = asyncio.ensure_future(producer.send(Message(topic, "x")))
            await asyncio.sleep(0)
            sending.cancel()
            await asyncio.wait([sending])
        receipt = await producer.send(Message(topic, "last"))
    assert receipt.status is SendStatus.SEND_OK
    assert "last" in text(env.stored(topic))
