"""Fills a topic for the Spark benchmarks: python -m benchmarks.spark_load NAMES TOPIC COUNT."""

import asyncio
import sys

import uvloop

from benchmarks.spark_prepared_source import BODY
from penstock import AsyncProducer, Message

BATCH = 500
BATCHES_IN_FLIGHT = 8


async def main() -> None:
    names, topic, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    async with AsyncProducer(names, group="penstock-load", compression=None) as producer:
        room = asyncio.Semaphore(BATCHES_IN_FLIGHT)

        async def send(first: int) -> None:
            try:
                await producer.send_batch(
                    Message(topic, BODY, tags="trial", keys=[str(n)])
                    for n in range(first, min(first + BATCH, count))
                )
            finally:
                room.release()

        async with asyncio.TaskGroup() as tasks:
            for first in range(0, count, BATCH):
                await room.acquire()
                tasks.create_task(send(first))


if __name__ == "__main__":
    uvloop.run(main())
