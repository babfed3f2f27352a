"""One round of the consumer over a backlog; prints one JSON line, as tests/compat/java's Drain.

python -m benchmarks.client_consumer NAMESERVERS TOPIC GROUP WARM_MESSAGES MESSAGES async|sync
"""

import asyncio
import json
import sys
import time

import uvloop

from penstock import AsyncConsumer, ReceivedMessage


class Count:
    """Counts handled messages; records time and CPU after the warm-up and at the end."""

    def __init__(self, warm: int, wanted: int, ended: asyncio.Event) -> None:
        self._warm = warm
        self._wanted = warm + wanted
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._seen = 0
        self.marks: list[tuple[int, float, float]] = []

    def add(self) -> None:
        self._seen += 1  # handlers in threads may miss a count, which only lowers the result
        if self._seen >= self._warm and not self.marks:
            self.marks.append((self._seen, time.monotonic(), time.process_time()))
        elif self._seen >= self._wanted and len(self.marks) == 1:
            self.marks.append((self._seen, time.monotonic(), time.process_time()))
            self._loop.call_soon_threadsafe(self._ended.set)


async def main() -> None:
    names, topic, group, warm, wanted, kind = sys.argv[1:7]
    ended = asyncio.Event()
    count = Count(int(warm), int(wanted), ended)
    consumer = AsyncConsumer(names, group=group, start_at="first")
    if kind == "async":

        @consumer.on(topic)
        async def handle(message: ReceivedMessage) -> None:
            count.add()

    else:

        @consumer.on(topic)
        def handle_in_thread(message: ReceivedMessage) -> None:
            count.add()

    async with consumer:
        await ended.wait()
        (first, began, cpu), (last, done, cpu_done) = count.marks
        print(
            json.dumps(
                {
                    "messages": last - first,
                    "failed": 0,
                    "seconds": done - began,
                    "cpu_seconds": cpu_done - cpu,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    uvloop.run(main())
