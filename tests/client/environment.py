"""Shared by the client tests: clients with unique names, and the messages that handlers receive."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar, overload

from penstock import AsyncConsumer, AsyncProducer, Message, ReceivedMessage, SendReceipt
from penstock.wire.message import StoredMessage, decode_messages

from .clusters import Cluster, ask

T = TypeVar("T")

WAIT_S = 90.0
"""Longer than the interval at which a consumer stores its offsets again."""
PULL, COMMITTED, RUNTIME_INFO, MAX_OFFSET = 11, 14, 28, 30

QUICK: dict[str, Any] = {"route_refresh_ms": 1_000, "heartbeat_ms": 5_000}
"""Tests are in more of a hurry than applications."""


class Environment:
    """A cluster, and names that are unique to the test."""

    def __init__(self, cluster: Cluster, fresh: str) -> None:
        self.cluster = cluster
        self.fresh = fresh

    @property
    def nameservers(self) -> str:
        return self.cluster.nameservers

    def name(self, suffix: str = "") -> str:
        return f"{self.fresh}-{suffix}" if suffix else self.fresh

    def topic(self, suffix: str = "", **options: Any) -> str:
        """A new topic on both brokers (`queues`, `brokers`, `perm`)."""
        return self.cluster.make_topic(self.name(suffix), **options)

    def producer(self, **options: Any) -> AsyncProducer:
        return AsyncProducer(**self._options(options, "p"))

    def consumer(self, **options: Any) -> AsyncConsumer:
        return AsyncConsumer(**self._options({"rebalance_ms": 1_000, **options}, "c"))

    def make(self, kind: type[T], **options: Any) -> T:
        """Any other client, in the group of the consumers."""
        return kind(**self._options(options, "c"))

    def _options(self, options: dict[str, Any], group: str) -> dict[str, Any]:
        return {"nameservers": self.nameservers, "group": self.name(group), **QUICK, **options}

    # --- inspecting the servers without the client under test

    def stored(self, topic: str) -> list[StoredMessage]:
        """Every stored message of a topic, queue by queue, read from the brokers."""
        found: list[StoredMessage] = []
        for broker in self.cluster.brokers:
            await_dispatch(broker.address)
            for queue_id in range(64):
                place = {"topic": topic, "queueId": str(queue_id)}
                at, end = 0, int(ask(broker.address, MAX_OFFSET, place).ext.get("offset", 0))
                while at < end:
                    answer = ask(broker.address, PULL, {
                        **place, "consumerGroup": "TOOLS_CONSUMER", "queueOffset": str(at),
                        "maxMsgNums": "32", "sysFlag": "4", "commitOffset": "0", "subVersion": "0",
                        "suspendTimeoutMillis": "0", "subscription": "*", "expressionType": "TAG",
                    })  # fmt: skip
                    if answer.code == 0:
                        found += decode_messages(answer.body)
                    before, at = at, int(answer.ext["nextBeginOffset"])
                    assert at > before, answer
        return found

    def committed(self, topic: str, group: str, broker: str, queue_id: int) -> int:
        """The committed offset of a group in a queue; -1 if there is none."""
        answer = ask(self.cluster.broker(broker).address, COMMITTED, {
            "consumerGroup": group, "topic": topic, "queueId": str(queue_id),
            "setZeroIfNotFound": "false",
        })  # fmt: skip
        return int(answer.ext["offset"]) if answer.code == 0 else -1

    def progress(self, topic: str, group: str, queues: int = 4) -> int:
        """The sum of a group's committed offsets over all queues of a topic."""
        return sum(
            max(0, self.committed(topic, group, broker.name, n))
            for broker in self.cluster.brokers
            for n in range(queues)
        )


class Inbox:
    """Keeps the messages of a handler, and lets tests wait for them."""

    def __init__(self) -> None:
        self.messages: list[ReceivedMessage] = []
        self._came = asyncio.Event()

    async def __call__(self, message: ReceivedMessage) -> None:
        self.add(message)

    def add(self, message: ReceivedMessage) -> None:
        self.messages.append(message)
        self._came.set()

    @property
    def bodies(self) -> list[str]:
        return [message.body.decode() for message in self.messages]

    async def until(self, done: Callable[[], object], within_s: float = WAIT_S) -> None:
        """Wait until `done` returns true; it is called after each message."""
        try:
            async with asyncio.timeout(within_s):
                while not done():
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            raise AssertionError(f"{len(self.messages)} came: {self.bodies[:50]}") from None

    async def count(self, count: int, within_s: float = WAIT_S) -> list[ReceivedMessage]:
        """Wait for this many messages; returns them."""
        await self.until(lambda: len(self.messages) >= count, within_s)
        return self.messages

    async def distinct(self, bodies: Iterable[str], within_s: float = WAIT_S) -> None:
        """Wait until each of these bodies was received at least once."""
        wanted = set(bodies)
        await self.until(lambda: wanted <= set(self.bodies), within_s)


@contextlib.asynccontextmanager
async def running(*consumers: Any) -> AsyncIterator[None]:
    """Run consumers and close them afterwards; `run` must return then."""
    async with contextlib.AsyncExitStack() as stack:
        tasks = []
        for consumer in consumers:
            await stack.enter_async_context(consumer)
            tasks.append(asyncio.ensure_future(consumer.run()))
        try:
            yield
        finally:
            await asyncio.gather(*(consumer.close() for consumer in consumers))
            await asyncio.gather(*tasks)


@overload
async def eventually(look: Callable[[], Awaitable[T]], within_s: float = WAIT_S) -> T: ...


@overload
async def eventually(look: Callable[[], T], within_s: float = WAIT_S) -> T: ...


async def eventually(look: Callable[[], Any], within_s: float = WAIT_S) -> Any:
    """Poll `look` until its result is true; returns it. Fails after `within_s`."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while True:
        seen = look()
        if isinstance(seen, Awaitable):
            seen = await seen
        if seen:
            return seen
        assert loop.time() < deadline, f"it never came to be: {seen!r}"
        await asyncio.sleep(0.05)


async def send_all(
    producer: AsyncProducer, topic: str, bodies: Iterable[str], **fields: Any
) -> list[SendReceipt]:
    """Send one message per body, pipelined; returns the receipts in order."""
    futures = [producer.submit(Message(topic, body, **fields)) for body in bodies]
    return await asyncio.gather(*futures)


def await_dispatch(address: str) -> None:
    """Wait until all messages of a broker are in their queues: Apache dispatches them later."""
    deadline = time.monotonic() + WAIT_S
    while True:
        table = json.loads(ask(address, RUNTIME_INFO, {}).body)["table"]
        if table["dispatchBehindBytes"] == "0":
            return
        assert time.monotonic() < deadline, table
        time.sleep(0.005)


def numbers(count: int, first: int = 0) -> list[str]:
    return [str(n) for n in range(first, first + count)]


def text(messages: Sequence[StoredMessage]) -> list[str]:
    return [message.body.decode() for message in messages]
