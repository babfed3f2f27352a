"""Members of groups that outlive a master: in order with queue locks, and by POP.

They check what they see, and record it.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise

from penstock.client.pop.async_pop_consumer import AsyncPopConsumer
from penstock.client.pop.popped_messages import receipt_of
from penstock.client.received_message import ReceivedMessage
from penstock.errors import PenstockError
from penstock.wire.codes import RequestCode
from tests.compat.test_replication import call
from tests.faults.driver import GROUP, PAUSE_S, Driver, Received

UNLOCKS = 0.1
"""How often a consumer gives its queue up."""
LEFT = 0.3
"""How many popped messages are not acknowledged the first time."""
INVISIBLE_MS = 3_000


class GroupOffset:
    """The offset of the group in the first queue of a topic."""

    def __init__(self, driver: Driver, topic: str) -> None:
        self._driver = driver
        self._fields = {"consumerGroup": GROUP, "topic": topic, "queueId": "0"}

    async def read(self) -> int | None:
        """At the master; None if it does not answer."""
        answer = await self._driver.ask(RequestCode.QUERY_CONSUMER_OFFSET, self._fields)
        return None if answer is None else int(answer.ext.get("offset", 0))

    async def read_at(self, address: str) -> int:
        """At any replica."""
        code = RequestCode.QUERY_CONSUMER_OFFSET
        answer = await asyncio.to_thread(call, address, code, self._fields)
        return int(answer.ext.get("offset", 0))

    async def commit(self, offset: int) -> None:
        fields = {**self._fields, "commitOffset": str(offset)}
        await self._driver.ask(RequestCode.UPDATE_CONSUMER_OFFSET, fields)


@dataclass
class OrderedQueue:
    """What the members of the group saw of the queue that they consume in order: the first one of a
    topic."""

    topic: str
    got: list[Received] = field(default_factory=list)
    end: int = 0
    """The offset behind the last message that a member got."""
    kept: int = 0
    """An offset that the group must not go back behind: all replicas have it."""
    owners: dict[int, str] = field(default_factory=dict)
    """Who has locked the queue now, by the life of the broker."""
    locked: set[int] = field(default_factory=set)
    """Lives of the broker in which somebody had the queue."""


class OrderedConsumer:
    """A member of the group: it locks the queue before each pull, and goes on at the offset of the
    group."""

    def __init__(self, driver: Driver, client_id: str, queue: OrderedQueue) -> None:
        self._driver = driver
        self._client_id = client_id
        self._queue = queue
        self._offset = GroupOffset(driver, queue.topic)

    async def run(self) -> None:
        while True:
            if await self._lock():
                await self._consume()
                if self._driver.rng.random() < UNLOCKS:
                    await self._unlock()
            await asyncio.sleep(self._driver.rng.uniform(0, 0.02))

    async def _consume(self) -> None:
        offset = await self._offset.read()
        if offset is None:
            return
        assert self._queue.kept <= offset <= self._queue.end, "the group goes on elsewhere"
        rows = await self._driver.pull(self._queue.topic, 0, offset)
        self._queue.got += rows
        self._queue.end = max(self._queue.end, offset + len(rows))
        if rows:
            await self._offset.commit(offset + len(rows))

    def _body(self) -> bytes:
        queue = {"topic": self._queue.topic, "brokerName": "", "queueId": 0}
        request = {"consumerGroup": GROUP, "clientId": self._client_id, "mqSet": [queue]}
        return json.dumps(request).encode()

    async def _lock(self) -> bool:
        answer = await self._driver.ask(RequestCode.LOCK_BATCH_MQ, {}, self._body())
        if answer is None or not json.loads(answer.body).get("lockOKMQSet"):
            return False
        owner = self._queue.owners.setdefault(self._driver.life, self._client_id)
        assert owner == self._client_id, "the queue has two owners"
        self._queue.locked.add(self._driver.life)
        return True

    async def _unlock(self) -> None:
        self._queue.owners.pop(self._driver.life, None)
        await self._driver.ask(RequestCode.UNLOCK_BATCH_MQ, {}, self._body())


@dataclass
class Pop:
    """A popped message."""

    life: int
    """In which life of the broker it was received."""
    got_s: float
    pop_ms: int
    asked: bool = False
    """Whether it was to be acknowledged. The response may be lost."""
    acked: bool = False
    """Whether that succeeded within the invisible time."""


class Popper:
    """A POP consumer, which leaves some messages until they come back."""

    def __init__(self, driver: Driver, nameserver: str, topic: str) -> None:
        self.pops: dict[str, list[Pop]] = {}
        self._driver = driver
        self._nameserver = nameserver
        self._topic = topic

    async def run(self) -> None:
        async with AsyncPopConsumer(
            self._nameserver, group="pops", start_at="first", route_refresh_ms=500
        ) as consumer:
            consumer.subscribe(self._topic)
            while True:
                try:
                    found = await consumer.receive(wait_ms=500, invisible_ms=INVISIBLE_MS)
                except PenstockError:
                    await asyncio.sleep(PAUSE_S)
                    continue
                got_s = time.monotonic()
                for message in found:
                    await self._got(consumer, message, got_s)

    async def _got(
        self, consumer: AsyncPopConsumer, message: ReceivedMessage, got_s: float
    ) -> None:
        receipt = receipt_of(message)
        pops = self.pops.setdefault(message.body.decode(), [])
        pops.append(pop := Pop(self._driver.life, got_s, receipt.handle.pop_ms))
        if len(pops) == 1 and self._driver.rng.random() < LEFT:
            return
        pop.asked = True
        try:
            await consumer.ack(message)
        except PenstockError:
            return
        pop.acked = time.monotonic() * 1000 < receipt.visible_ms

    def done(self) -> set[str]:
        """Messages that need not come again."""
        return {name for name, pops in self.pops.items() if pops[-1].asked}

    def in_flight(self) -> set[str]:
        return self.pops.keys() - self.done()

    def check(self) -> int:
        """Messages in flight come back in time, and not if they were acknowledged. Returns how many
        came back.

        A pop that was not confirmed when the master died never happened for the next one.
        """
        back = 0
        for name, pops in self.pops.items():
            for before, after in pairwise(pops):
                if before.got_s <= self._driver.acked_s.get(before.life, 0):
                    back += 1
                    assert not before.acked, f"{name} was acknowledged and came again: {pops}"
                    early_ms = before.pop_ms + INVISIBLE_MS - after.pop_ms
                    assert early_ms <= 0, f"{name} came back {early_ms} ms early: {pops}"
        return back
