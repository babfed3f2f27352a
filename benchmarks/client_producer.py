"""One round of the producer; prints one JSON line, as tests/compat/java's AsyncLoad does.

python -m benchmarks.client_producer NAMESERVERS TOPIC IN_FLIGHT WARM_S SECONDS BODY_BYTES
"""

import asyncio
import json
import sys
import time

import uvloop

from penstock import AsyncProducer, Message

_LOOK = 64
"""Sends between two checks of the clock."""


class Load:
    """Sends with a fixed number of messages in flight."""

    def __init__(self, producer: AsyncProducer, topic: str, in_flight: int, body: bytes) -> None:
        self._producer = producer
        self._topic = topic
        self._room = in_flight
        self._body = body
        self._waiter: asyncio.Future[None] | None = None
        self.sent = 0
        self.failed = 0

    async def send_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(_LOOK):
                while self._room == 0:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
                self._room -= 1
                future = self._producer.submit(Message(self._topic, self._body))
                future.add_done_callback(self._done)

    def _done(self, future: asyncio.Future[object]) -> None:
        if future.exception() is None:
            self.sent += 1
        else:
            self.failed += 1
        self._room += 1
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def main() -> None:
    names, topic, in_flight, warm, seconds, size = sys.argv[1:7]
    async with AsyncProducer(names, group="penstock-load") as producer:
        await producer.send(Message(topic, b"first"))
        load = Load(producer, topic, int(in_flight), b"x" * int(size))
        await load.send_for(float(warm))
        sent, failed = load.sent, load.failed
        began, cpu = time.monotonic(), time.process_time()
        await load.send_for(float(seconds))
        print(
            json.dumps(
                {
                    "messages": load.sent - sent,
                    "failed": load.failed - failed,
                    "seconds": time.monotonic() - began,
                    "cpu_seconds": time.process_time() - cpu,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    uvloop.run(main())
