"""One round of a consumer over a backlog; prints one JSON line, as tests/compat/java's Drain.

python -m benchmarks.client_consumer NAMESERVERS TOPIC GROUP WARM_MESSAGES MESSAGES KIND

KIND is `async` (AsyncConsumer, coroutine handler), `sync` (AsyncConsumer, plain handler) or
`consumer` (Consumer, plain handler). The plain handlers run in threads.
"""

import asyncio
import json
import sys
import threading
import time

import uvloop

from penstock import AsyncConsumer, Consumer, ReceivedMessage


class Count:
    """Counts handled messages; records time and CPU after the warm-up and at the end."""

    def __init__(self, warm: int, wanted: int) -> None:
        self._warm = warm
        self._wanted = warm + wanted
        self._seen = 0
        self._marks: list[tuple[int, float, float]] = []
        self.ended = threading.Event()

    def add(self) -> None:
        self._seen += 1  # handlers in threads may miss a count, which only lowers the result
        if self._seen >= self._warm and not self._marks:
            self._mark()
        elif self._seen >= self._wanted and len(self._marks) == 1:
            self._mark()
            self.ended.set()

    def _mark(self) -> None:
        self._marks.append((self._seen, time.monotonic(), time.process_time()))

    def show(self) -> None:
        (first, began, cpu), (last, done, cpu_done) = self._marks
        result = {
            "messages": last - first,
            "failed": 0,
            "seconds": done - began,
            "cpu_seconds": cpu_done - cpu,
        }
        print(json.dumps(result), flush=True)


async def consume_async(names: str, topic: str, group: str, count: Count, *, plain: bool) -> None:
    consumer = AsyncConsumer(names, group=group, start_at="first")
    if plain:

        @consumer.on(topic)
        def handle_in_thread(message: ReceivedMessage) -> None:
            count.add()

    else:

        @consumer.on(topic)
        async def handle(message: ReceivedMessage) -> None:
            count.add()

    async with consumer:
        await asyncio.to_thread(count.ended.wait)
        count.show()


def consume(names: str, topic: str, group: str, count: Count) -> None:
    with Consumer(names, group=group, start_at="first") as consumer:

        @consumer.on(topic)
        def handle(message: ReceivedMessage) -> None:
            count.add()

        consumer.start()
        count.ended.wait()
        count.show()


def main() -> None:
    names, topic, group, warm, wanted, kind = sys.argv[1:7]
    count = Count(int(warm), int(wanted))
    if kind == "consumer":
        consume(names, topic, group, count)
    else:
        uvloop.run(consume_async(names, topic, group, count, plain=kind == "sync"))


if __name__ == "__main__":
    main()
