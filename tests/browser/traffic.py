"""Traffic for the browser tests and the screenshots: producers and consumers in a thread."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import msgspec

from penstock.client import (
    AsyncConsumer,
    AsyncProducer,
    AsyncTransactionProducer,
    Decision,
    Message,
)
from penstock.client.admin.async_admin import AsyncAdmin
from penstock.client.received_message import ReceivedMessage

T = TypeVar("T")

TOPICS = {
    "orders": "NORMAL",
    "payments": "TRANSACTION",
    "shipments": "FIFO",
    "reminders": "DELAY",
    "clicks": "NORMAL",
    "invoices": "NORMAL",
    "stock-levels": "NORMAL",
}
XSS = '<img src=x onerror="window.__xss=1"><script>window.__xss=1</script>'
HOSTILE_NAME = "<b>x</b>"
DEAD = 6
"""Messages that become dead letters of the group mailer."""
CALL_S = 60.0


@dataclass
class Traffic:
    """Clients of a cluster on an event loop of their own."""

    nameserver: str
    rate: float = 40.0
    """Orders per second."""
    received: dict[str, list[str]] = field(default_factory=dict)
    """Group → ids of the messages that its handler has finished."""
    healed: bool = False
    """From now on the mailer succeeds."""

    def __post_init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._stack = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop of the clients."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(CALL_S)

    def start(self) -> None:
        self.call(self._start())

    def stop(self) -> None:
        self.call(self._stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def send(self, message: Message) -> Any:
        """Send one message and return its receipt."""
        return self.call(self.producer.send(message))

    # --- in the loop

    async def _start(self) -> None:
        self.admin = await self._stack.enter_async_context(AsyncAdmin(self.nameserver))
        for topic, kind in TOPICS.items():
            await self.admin.create_topic(topic, queues=4, attributes={"message.type": kind})
        await self.admin.create_group("mailer", retries_max=1)
        self.producer = await self._stack.enter_async_context(
            AsyncProducer(self.nameserver, group="shop", trace=True)
        )
        for number in range(200):  # before the group archive, which then stops
            await self.producer.send(_order(number))
        await self._consume("archive", "orders", stop_after=150)
        await self._consume("billing", "orders")
        await self._consume("analytics", "clicks", seconds=0.25)
        await self._consume("warehouse", "shipments", instance_name=HOSTILE_NAME)
        await self._mailer()
        await self._special()
        self._tasks.append(asyncio.create_task(self._orders()))

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    async def _consume(
        self, group: str, topic: str, *, seconds: float = 0.0, stop_after: int = 0, **options: Any
    ) -> None:
        done = self.received.setdefault(group, [])
        enough = asyncio.Event()
        consumer = AsyncConsumer(
            self.nameserver, group=group, start_at="first", trace=True, concurrency=2, **options
        )

        @consumer.on(topic)
        async def handle(message: ReceivedMessage) -> None:
            await asyncio.sleep(seconds)
            done.append(message.message_id)
            if stop_after and len(done) >= stop_after:
                enough.set()
                await asyncio.sleep(0.01)

        if stop_after:
            await consumer.start()
            await enough.wait()
            await consumer.close()
        else:
            await self._stack.enter_async_context(consumer)

    async def _mailer(self) -> None:
        done = self.received.setdefault("mailer", [])
        consumer = AsyncConsumer(
            self.nameserver, group="mailer", start_at="first", trace=True, retries_max=1,
            route_refresh_ms=500, rebalance_ms=500,
        )  # fmt: skip

        @consumer.on("invoices")
        async def mail(message: ReceivedMessage) -> bool:
            if not self.healed:
                return False
            done.append(message.message_id)
            return True

        await self._stack.enter_async_context(consumer)
        for number in range(DEAD):
            body = json.dumps({"invoice": 9000 + number, "to": "customer@example.com"})
            await self.producer.send(Message("invoices", body, keys=[f"INV-{9000 + number}"]))
        while len((await self.admin.dead_letters("mailer")).messages) < DEAD:
            await asyncio.sleep(0.2)

    async def _special(self) -> None:
        send = self.producer.send
        for number in range(12):
            await send(
                Message(
                    "reminders",
                    json.dumps({"reminder": number, "text": "Your cart is waiting"}),
                    keys=[f"REM-{number}"],
                    delay=timedelta(minutes=20 + 7 * number),
                )
            )
        await send(Message("reminders", "by level", keys=["REM-LEVEL"], delay_level=17))
        packed = msgspec.msgpack.encode({"sku": "A-17", "left": 3, "shelf": b"\x01\x02"})
        await send(Message("stock-levels", packed, tags="low", keys=["A-17"]))
        await send(Message("stock-levels", bytes(range(48)), tags="raw", keys=["RAW-1"]))
        await send(
            Message("stock-levels", XSS, tags="<b>tag</b>", keys=[XSS], properties={"<i>p": XSS})
        )
        transactions = AsyncTransactionProducer(self.nameserver, group="pay-service", trace=True)
        transactions.checker(lambda message: Decision.UNKNOWN)
        await self._stack.enter_async_context(transactions)
        for number in range(4):
            handle = await transactions.prepare(
                Message("payments", json.dumps({"payment": 500 + number}), keys=[f"PAY-{number}"])
            )
            if number == 0:
                await transactions.commit(handle)

    async def _orders(self) -> None:
        random.seed(7)
        number = 200
        while True:
            await asyncio.sleep(1 / self.rate)
            number += 1
            await self.producer.send(_order(number))
            clicks = [Message("clicks", json.dumps({"page": f"/item/{number % 40}"}), tags="view")]
            for message in clicks * random.randint(1, 3):
                await self.producer.send(message)
            if number % 5 == 0:
                await self.producer.send(
                    Message("shipments", json.dumps({"order": number}), tags="sent")
                )


def _order(number: int) -> Message:
    body = {
        "order": 10_000 + number,
        "customer": f"customer-{number % 97}",
        "items": [{"sku": f"A-{number % 50}", "count": 1 + number % 3}],
        "total": round(9.9 + number % 200 * 1.35, 2),
    }
    tag = ("created", "paid", "cancelled")[number % 3]
    return Message(
        "orders", json.dumps(body), tags=tag, keys=[f"ORD-{10_000 + number}"],
        properties={"source": "web" if number % 2 else "app"},
    )  # fmt: skip
