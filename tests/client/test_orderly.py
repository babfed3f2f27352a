"""Ordered consumers: one message of a queue at a time, retried in place."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Iterator

from penstock import Message, MessageQueue, ReceivedMessage

from .environment import Environment, Inbox, eventually, numbers, running


class Order:
    """Handlers that record calls and fail when two run for one queue at a time."""

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.offsets: dict[MessageQueue, list[int]] = defaultdict(list)
        self.owners: dict[MessageQueue, list[str]] = defaultdict(list)
        self.overlaps: list[MessageQueue] = []
        self._busy: set[MessageQueue] = set()

    @contextlib.contextmanager
    def call(self, message: ReceivedMessage, owner: str = "") -> Iterator[None]:
        if message.queue in self._busy:
            self.overlaps.append(message.queue)
        self._busy.add(message.queue)
        try:
            yield
        finally:
            self._busy.discard(message.queue)
        self.offsets[message.queue].append(message.queue_offset)
        self.owners[message.queue].append(owner)
        self.inbox.add(message)

    def check(self) -> None:
        """Every queue was consumed in order; a repetition continues in order, too."""
        assert not self.overlaps
        for queue, offsets in self.offsets.items():
            expected = 0
            for offset in offsets:
                assert offset <= expected, f"{queue}: {offset} before {expected}: {offsets}"
                expected = max(expected, offset + 1)


async def _send_in_order(env: Environment, topic: str, per_queue: int) -> None:
    async with env.producer() as producer:
        for queue in await producer.queues(topic):
            await producer.send_batch(
                [Message(topic, body) for body in numbers(per_queue)], queue=queue
            )


async def test_each_queue_is_consumed_in_order(env: Environment) -> None:
    topic = env.topic(queues=3)
    order = Order()
    await _send_in_order(env, topic, 40)
    consumer = env.consumer(start_at="first", orderly=True)

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> None:
        with order.call(message):
            await asyncio.sleep(0.001 * (message.queue_offset % 3))

    async with running(consumer):
        await order.inbox.count(240)
    order.check()
    assert {tuple(offsets) for offsets in order.offsets.values()} == {tuple(range(40))}
    assert len(order.offsets) == 6
    await eventually(lambda: env.progress(topic, env.name("c")) == 240)


async def test_blocking_handlers_keep_the_order(env: Environment) -> None:
    topic = env.topic(queues=2)
    order = Order()
    loop = asyncio.get_running_loop()
    seen: dict[MessageQueue, list[int]] = defaultdict(list)
    await _send_in_order(env, topic, 30)
    consumer = env.consumer(start_at="first", orderly=True, concurrency=8)

    @consumer.on(topic)
    def handle(message: ReceivedMessage) -> None:
        seen[message.queue].append(message.queue_offset)
        loop.call_soon_threadsafe(order.inbox.add, message)

    async with running(consumer):
        await order.inbox.count(120)
    assert {tuple(offsets) for offsets in seen.values()} == {tuple(range(30))}


async def test_a_failed_message_is_retried_before_the_next_one(env: Environment) -> None:
    topic = env.topic(queues=1, brokers=["broker-a"])
    calls: list[tuple[str, int]] = []
    inbox = Inbox()
    await _send_in_order(env, topic, 6)
    consumer = env.consumer(start_at="first", orderly=True)

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> bool | None:
        body = message.body.decode()
        calls.append((body, message.reconsume_times))
        if body == "2" and message.reconsume_times < 2:
            raise RuntimeError("as a test wants it")
        if body == "4" and message.reconsume_times < 1:
            return False
        inbox.add(message)
        return None

    async with running(consumer):
        await inbox.count(6)
    assert calls == [
        ("0", 0), ("1", 0), ("2", 0), ("2", 1), ("2", 2), ("3", 0), ("4", 0), ("4", 1), ("5", 0)
    ]  # fmt: skip


async def test_a_message_that_keeps_failing_becomes_a_dead_letter(env: Environment) -> None:
    topic, group = env.topic(queues=1, brokers=["broker-b"]), env.name("c")
    inbox = Inbox()
    await _send_in_order(env, topic, 3)
    consumer = env.consumer(start_at="first", orderly=True, retries_max=1)

    @consumer.on(topic)
    async def handle(message: ReceivedMessage) -> None:
        if message.body == b"1":
            raise RuntimeError("as a test wants it")
        inbox.add(message)

    async with running(consumer):
        await inbox.count(2)
        dead = await eventually(lambda: env.stored(f"%DLQ%{group}"))
    assert inbox.bodies == ["0", "2"]
    assert [message.body for message in dead] == [b"1"]


async def test_a_queue_is_handed_over_without_overlap(env: Environment) -> None:
    topic = env.topic(queues=2)
    order = Order()

    def worker(name: str) -> object:
        consumer = env.consumer(start_at="first", orderly=True)

        @consumer.on(topic)
        async def handle(message: ReceivedMessage) -> None:
            with order.call(message, name):
                await asyncio.sleep(0.002)

        return consumer

    first, second = worker("first"), worker("second")
    async with env.producer() as producer, running(first):
        queues = await producer.queues(topic)

        async def feed(turn: int) -> None:
            for queue in queues:
                await producer.send_batch(
                    [Message(topic, f"{turn}-{n}") for n in range(50)], queue=queue
                )

        await feed(0)
        await order.inbox.count(20)
        async with running(second):
            await feed(1)
            await eventually(lambda: len({w[-1] for w in order.owners.values() if w}) == 2)
            await order.inbox.count(400)
        await feed(2)
        await order.inbox.until(
            lambda: all(max(order.offsets[queue], default=-1) == 149 for queue in queues)
        )
    order.check()
    assert {owner for owners in order.owners.values() for owner in owners} == {"first", "second"}
