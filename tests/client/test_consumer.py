"""Push consumers with concurrent handlers in a cluster."""

from __future__ import annotations

import asyncio
import threading
from datetime import datetime, timedelta
from typing import TypeVar

import pytest

from penstock import AsyncConsumer, Message, MessageQueue, ReceivedMessage, Retry
from penstock.errors import PenstockError

from .environment import Environment, Inbox, eventually, numbers, running, send_all

T = TypeVar("T")


async def test_every_message_is_received_once_and_complete(env: Environment) -> None:
    topic = env.topic()
    inbox = Inbox()
    async with env.producer() as producer:
        sent = await producer.send(
            Message(topic, "héllo", tags="t", keys=["a", "b"], properties={"x": "y"}, flag=3)
        )
        receipts = [sent, *await send_all(producer, topic, numbers(200))]
    consumer = env.consumer(start_at="first")
    consumer.on(topic)(inbox)
    async with running(consumer):
        await inbox.count(201)
    assert sorted(inbox.bodies) == sorted([*numbers(200), "héllo"])
    assert {m.message_id for m in inbox.messages} == {r.message_id for r in receipts}
    first = next(message for message in inbox.messages if message.body == "héllo".encode())
    assert (first.topic, first.tags, list(first.keys), first.flag) == (topic, "t", ["a", "b"], 3)
    assert first.properties["x"] == "y"
    assert (first.queue, first.queue_offset) == (sent.queue, sent.queue_offset)
    assert (first.offset_id, first.unique_id) == (sent.offset_id, sent.message_id)
    assert (first.broker_name, first.queue_id) == (sent.queue.broker_name, sent.queue.queue_id)
    assert first.reconsume_times == 0
    assert abs(first.store_ms - first.born_ms) < 60_000
    # Closing commits, without waiting for an answer.
    await eventually(lambda: env.progress(topic, env.name("c")) == 201)


async def test_a_new_consumer_continues_at_the_committed_offset(env: Environment) -> None:
    topic = env.topic()
    came: list[str] = []
    async with env.producer() as producer:
        for turn in range(3):
            inbox = Inbox()
            await send_all(producer, topic, numbers(50, 100 * turn))
            consumer = env.consumer(start_at="first")
            consumer.on(topic)(inbox)
            async with running(consumer):
                await inbox.count(50)
            came += inbox.bodies
    assert sorted(came, key=int) == [*numbers(50), *numbers(50, 100), *numbers(50, 200)]


async def test_compressed_bodies_are_decompressed(env: Environment) -> None:
    topic = env.topic()
    body = "0123456789" * 2000
    inbox = Inbox()
    for kind in ("zlib", "lz4", "zstd"):
        async with env.producer(compression=kind) as producer:
            await producer.send(Message(topic, body + kind))
    consumer = env.consumer(start_at="first")
    consumer.on(topic)(inbox)
    async with running(consumer):
        await inbox.count(3)
    assert sorted(inbox.bodies) == sorted(body + kind for kind in ("zlib", "lz4", "zstd"))


async def test_blocking_handlers_run_concurrently_in_threads(env: Environment) -> None:
    topic = env.topic()
    barrier = threading.Barrier(4)
    names: set[str] = set()
    inbox = Inbox()
    loop = asyncio.get_running_loop()
    async with env.producer() as producer:
        await send_all(producer, topic, numbers(8))
    consumer = env.consumer(start_at="first", concurrency=4)

    @consumer.on(topic)
    def handle(message: ReceivedMessage) -> None:
        barrier.wait(20)  # passes only if four are here at a time
        names.add(threading.current_thread().name)
        loop.call_soon_threadsafe(inbox.add, message)

    async with running(consumer):
        await inbox.count(8)
    assert len(names) == 4
    assert threading.current_thread().name not in names


async def test_coroutine_handlers_run_concurrently_up_to_the_limit(env: Environment) -> None:
    topic = env.topic()
    inbox = Inbox()
    now = most = 0
    async with env.producer() as producer:
        await send_all(producer, topic, numbers(40))
    consumer = env.consumer(start_at="first", concurrency=5)

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.02)
        now -= 1
        inbox.add(message)

    async with running(consumer):
        await inbox.count(40)
    assert most == 5
    assert sorted(inbox.bodies, key=int) == numbers(40)


async def test_a_consumer_can_be_iterated(env: Environment) -> None:
    topic = env.topic()
    bodies: list[str] = []
    async with env.producer() as producer:
        await send_all(producer, topic, numbers(30))
    async with env.consumer(start_at="first") as consumer:
        consumer.subscribe(topic)
        async for message in consumer:
            bodies.append(message.body.decode())
            if len(bodies) == 30:
                break
    assert sorted(bodies, key=int) == numbers(30)
    # The last message is not finished, because the iterator was not asked for another one.
    await eventually(lambda: env.progress(topic, env.name("c")) in (29, 30))


async def test_an_iterated_message_can_be_retried(env: Environment) -> None:
    topic = env.topic()
    seen: list[tuple[str, int]] = []
    async with env.producer() as producer:
        await send_all(producer, topic, ["good", "bad"])
    async with env.consumer(start_at="first") as consumer:
        consumer.subscribe(topic)
        async with asyncio.timeout(40):
            async for message in consumer:
                seen.append((message.body.decode(), message.reconsume_times))
                if message.body == b"bad" and message.reconsume_times == 0:
                    message.retry(delay_level=1)
                if len(seen) == 3:
                    break
    assert sorted(seen) == [("bad", 0), ("bad", 1), ("good", 0)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tags": "a"}, "aaa"),
        ({"tags": "a || b"}, "aaabbb"),
        ({"tags": "*"}, "aaabbbccc"),
        ({"sql": "TAGS = 'a' AND n > 1"}, "aa"),
        ({"sql": "n BETWEEN 1 AND 2 OR kind IN ('none')"}, "aabbcc"),
    ],
)
async def test_subscriptions_are_filtered_by_tags_and_sql(
    env: Environment, options: dict[str, str], expected: str
) -> None:
    topic = env.topic()
    inbox = Inbox()
    async with env.producer() as producer:
        for tag in "abc":
            for n in "123":
                await producer.send(Message(topic, tag, tags=tag, properties={"n": n}))
    consumer = env.consumer(start_at="first")
    consumer.on(topic, **options)(inbox)
    async with running(consumer):
        await inbox.count(len(expected))
        async with env.producer() as producer:
            await producer.send(Message(topic, "end", tags="a", properties={"n": "2"}))
        await inbox.distinct(["end"])
    assert sorted(inbox.bodies) == sorted([*expected, "end"])


async def test_an_invalid_filter_is_refused(env: Environment) -> None:
    topic = env.topic()
    async with env.producer() as producer:
        await producer.send(Message(topic, "x"))

    async def consume() -> None:
        consumer = env.consumer(start_at="first")
        consumer.on(topic, sql="n >")(Inbox())
        async with asyncio.timeout(20):
            await consumer.run()

    with pytest.raises(PenstockError) as caught:
        await consume()
    assert caught.value.hint


async def test_each_topic_can_have_its_own_handler(env: Environment) -> None:
    first, second = env.topic("one"), env.topic("two")
    ones, twos = Inbox(), Inbox()
    async with env.producer() as producer:
        await send_all(producer, first, numbers(20))
        await send_all(producer, second, numbers(20, 100))
    consumer = env.consumer(start_at="first")
    consumer.on(first)(ones)
    consumer.on(second, tags="*")(twos)
    async with running(consumer):
        await ones.count(20)
        await twos.count(20)
    assert sorted(ones.bodies, key=int) == numbers(20)
    assert sorted(twos.bodies, key=int) == numbers(20, 100)


async def test_a_new_group_starts_at_the_configured_position(env: Environment) -> None:
    topic = env.topic()
    async with env.producer() as producer:
        await send_all(producer, topic, [f"old{n}" for n in range(16)])
        await asyncio.sleep(1.1)
        middle = datetime.now()
        await asyncio.sleep(1.1)
        await send_all(producer, topic, [f"new{n}" for n in range(16)])
        inboxes = {}
        consumers = []
        for name, start_at in (("first", "first"), ("middle", middle), ("last", "last")):
            consumer = env.consumer(group=env.name(name), start_at=start_at)
            inboxes[name] = inbox = Inbox()
            consumer.on(topic)(inbox)
            consumers.append(consumer)
        async with running(*consumers):
            await inboxes["first"].count(32)
            await inboxes["middle"].count(16)

            # The position "last" is determined when the queues are assigned, some time from now.
            async def last_has_come() -> bool:
                await send_all(producer, topic, ["extra"] * 8)
                return "extra" in inboxes["last"].bodies

            await eventually(last_has_come)
    old = {f"old{n}" for n in range(16)}
    assert old <= set(inboxes["first"].bodies)
    assert not old & set(inboxes["middle"].bodies)
    # RocketMQ reads a queue from the beginning if that is still in memory and the topic is new:
    # then a "last" group gets all messages. It must not get some old ones and miss others.
    came = old & set(inboxes["last"].bodies)
    assert came in (set(), old)


async def test_failed_messages_are_retried_until_they_are_dead_letters(
    env: Environment,
) -> None:
    topic, group = env.topic(), env.name("c")
    tries: dict[str, list[int]] = {}
    inbox = Inbox()
    consumer = env.consumer(start_at="first", retries_max=2)

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> object:
        body = message.body.decode()
        tries.setdefault(body, []).append(message.reconsume_times)
        inbox.add(message)
        if body == "raises":
            raise RuntimeError("as a test wants it")
        if body == "says so":
            return Retry(delay_level=1)
        if body == "false":
            return False
        if body == "once" and message.reconsume_times == 0:
            return Retry()
        return None

    async with env.producer() as producer:
        receipts = await send_all(producer, topic, ["raises", "says so", "false", "once", "fine"])
    async with running(consumer):
        await inbox.count(3 + 3 + 3 + 2 + 1)
        dead = await eventually(lambda: _if_all(env.stored(f"%DLQ%{group}"), 3))
    assert tries == {
        "raises": [0, 1, 2], "says so": [0, 1, 2], "false": [0, 1, 2], "once": [0, 1], "fine": [0]
    }  # fmt: skip
    again = [message for message in inbox.messages if message.reconsume_times == 1]
    assert {message.topic for message in again} == {topic}, "the retry topic is hidden"
    assert {m.message_id for m in again} <= {r.message_id for r in receipts}, "the id stays"
    assert {message.body.decode() for message in dead} == {"raises", "says so", "false"}


def _if_all(found: list[T], count: int) -> list[T]:
    """The messages, if there are this many."""
    return found if len(found) == count else []


async def test_handlers_can_take_several_messages(env: Environment) -> None:
    topic = env.topic(queues=1, brokers=["broker-a"])
    inbox = Inbox()
    sizes: list[int] = []
    async with env.producer() as producer:
        await producer.send_batch([Message(topic, body) for body in numbers(100)])
    consumer = env.consumer(start_at="first", handle_batch=10)

    @consumer.on(topic)
    async def handle(messages: list[ReceivedMessage]) -> None:
        sizes.append(len(messages))
        for message in messages:
            inbox.add(message)

    async with running(consumer):
        await inbox.count(100)
    assert sorted(inbox.bodies, key=int) == numbers(100)
    assert max(sizes) <= 10
    assert max(sizes) > 1


async def test_messages_waiting_for_a_handler_are_limited(env: Environment) -> None:
    """Flow control: nothing is pulled beyond the limit, and every message is received at last."""
    topic = env.topic(queues=1, brokers=["broker-a"])
    release = asyncio.Event()
    inbox = Inbox()
    async with env.producer() as producer:
        await producer.send_batch([Message(topic, body) for body in numbers(300)])
    consumer = env.consumer(start_at="first", messages_max=64, pull_batch=16, concurrency=2)

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> None:
        await release.wait()
        inbox.add(message)

    async with running(consumer):
        (state,) = await eventually(
            lambda: [s for s in consumer.queues() if s.queue.topic == topic and s.in_work >= 64]
        )
        await asyncio.sleep(0.5)
        (state,) = [s for s in consumer.queues() if s.queue.topic == topic]
        assert 64 <= state.in_work <= 64 + 16
        release.set()
        await inbox.count(300)
    assert sorted(inbox.bodies, key=int) == numbers(300)


async def test_the_span_of_unfinished_offsets_is_limited(env: Environment) -> None:
    """A message that hangs blocks progress, so at most `span_max` offsets beyond it are read."""
    topic = env.topic(queues=1, brokers=["broker-a"])
    release = asyncio.Event()
    inbox = Inbox()
    async with env.producer() as producer:
        await producer.send_batch([Message(topic, body) for body in numbers(600)])
    consumer = env.consumer(start_at="first", span_max=100, pull_batch=32)

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> None:
        if message.body == b"0":
            await release.wait()
        inbox.add(message)

    async with running(consumer):
        await inbox.count(100)
        await asyncio.sleep(0.5)
        assert len(inbox.messages) <= 100 + 2 * 32
        release.set()
        await inbox.count(600)
    assert sorted(inbox.bodies, key=int) == numbers(600)


async def test_pause_and_resume(env: Environment) -> None:
    first, second = env.topic("one"), env.topic("two")
    ones, twos = Inbox(), Inbox()
    consumer = env.consumer(start_at="first")
    consumer.on(first)(ones)
    consumer.on(second)(twos)
    async with env.producer() as producer, running(consumer):
        await send_all(producer, first, numbers(8))
        await send_all(producer, second, numbers(8))
        await ones.count(8)
        await twos.count(8)
        consumer.pause(first)
        await asyncio.sleep(0.2)
        # A pull that already waits at the broker may still bring one message per queue.
        await send_all(producer, first, ["flush"] * 8)
        await asyncio.sleep(0.5)
        before = len(ones.messages)
        await send_all(producer, first, numbers(8, 100))
        await send_all(producer, second, numbers(8, 100))
        await twos.count(16)
        await asyncio.sleep(0.5)
        assert len(ones.messages) == before
        consumer.resume(first)
        await ones.distinct(numbers(8, 100))
        consumer.pause()
        consumer.resume()
        await send_all(producer, second, ["end"] * 8)
        await twos.distinct(["end"])


async def test_queues_report_unfinished_messages(env: Environment) -> None:
    topic = env.topic(queues=2)
    release, entered = asyncio.Event(), asyncio.Event()
    consumer = env.consumer(start_at="first")

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> None:
        entered.set()
        await release.wait()

    async with env.producer() as producer, running(consumer):
        receipt = await producer.send(Message(topic, "slow"))
        await asyncio.wait_for(entered.wait(), 30)
        states = await eventually(
            lambda: _if_all([s for s in consumer.queues() if s.queue.topic == topic], 4)
        )
        assert {state.queue for state in states} == set(await producer.queues(topic))
        (busy,) = [state for state in states if state.queue == receipt.queue]
        assert busy.in_work == 1
        await eventually(lambda: _oldest(consumer, receipt.queue) >= 100)
        release.set()
        await eventually(lambda: not _oldest(consumer, receipt.queue))


def _oldest(consumer: AsyncConsumer, queue: MessageQueue) -> int:
    (state,) = [state for state in consumer.queues() if state.queue == queue]
    return state.oldest_age_ms or 0


async def test_progress_never_passes_an_unfinished_message(env: Environment) -> None:
    """A crash loses nothing: no unfinished message is below the committed offset."""
    topic, group = env.topic(queues=1, brokers=["broker-a"]), env.name("c")
    release = asyncio.Event()
    inbox = Inbox()
    async with env.producer() as producer:
        await producer.send_batch([Message(topic, body) for body in numbers(50)])
    consumer = env.consumer(start_at="first", drain_ms=100)

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> None:
        if message.body == b"7":
            await release.wait()
        inbox.add(message)

    async with running(consumer):
        await inbox.count(49)
        # 8 to 49 are finished, 7 is not; close abandons it after the drain time.
    await eventually(lambda: env.committed(topic, group, "broker-a", 0) == 7)
    again = Inbox()
    second = env.consumer(start_at="first")
    second.on(topic)(again)
    async with running(second):
        await again.count(43)
    assert sorted(again.bodies, key=int) == numbers(43, 7)


async def test_closing_waits_for_handlers_and_commits(env: Environment) -> None:
    topic, group = env.topic(queues=1, brokers=["broker-b"]), env.name("c")
    finished: list[str] = []
    entered = asyncio.Event()
    consumer = env.consumer(start_at="first", concurrency=3)

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> None:
        entered.set()
        await asyncio.sleep(0.3)
        finished.append(message.body.decode())

    async with env.producer() as producer:
        await producer.send_batch([Message(topic, body) for body in numbers(3)])
    async with running(consumer):
        await entered.wait()
    assert sorted(finished) == numbers(3)
    await eventually(lambda: env.committed(topic, group, "broker-b", 0) == 3)


async def test_a_topic_created_later_is_found(env: Environment) -> None:
    topic = env.name()
    inbox = Inbox()
    consumer = env.consumer(start_at="first")
    consumer.on(topic)(inbox)
    async with running(consumer):
        await asyncio.to_thread(env.topic)
        async with env.producer() as producer:
            await send_all(producer, topic, numbers(16))
        await inbox.count(16)
    assert sorted(inbox.bodies, key=int) == numbers(16)


async def test_new_queues_are_found(env: Environment) -> None:
    topic = env.topic(queues=2)
    inbox = Inbox()
    consumer = env.consumer(start_at="first")
    consumer.on(topic)(inbox)
    async with running(consumer), env.producer() as producer:
        await send_all(producer, topic, numbers(8))
        await inbox.count(8)
        await asyncio.to_thread(env.topic, queues=6)
        await eventually(lambda: len(consumer.queues()) >= 12)

        async def all_queues() -> bool:
            return len(await producer.queues(topic)) == 12

        await eventually(all_queues)
        await send_all(producer, topic, numbers(24, 100))
        await inbox.distinct(numbers(24, 100))
    assert len({message.queue for message in inbox.messages}) == 12


async def test_delayed_messages_are_received_when_they_are_due(env: Environment) -> None:
    topic = env.topic()
    inbox = Inbox()
    consumer = env.consumer(start_at="first")
    consumer.on(topic)(inbox)
    async with running(consumer), env.producer() as producer:
        sent = [
            await producer.send(Message(topic, "level", delay_level=1)),
            await producer.send(Message(topic, "delay", delay=timedelta(seconds=2))),
        ]
        await inbox.count(2)
    assert {m.message_id for m in inbox.messages} == {receipt.message_id for receipt in sent}
    assert all(message.store_ms - message.born_ms >= 900 for message in inbox.messages)
