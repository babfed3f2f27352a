"""A driver of the transactional sink as a process of its own, to be killed.

    python -m tests.integration.sink_driver NAMESERVERS TOPIC SINK BATCHES ROWS CHECKPOINT

The checkpoint is a file with the number of batches that have ended. A line is printed before each
batch, so that whoever kills it knows how far it is.
"""

import asyncio
import sys
from pathlib import Path

from penstock.client.messages import Message
from penstock.spark.sink.row_messages import Outgoing
from penstock.spark.sink.sink_options import SinkOptions
from penstock.spark.sink.transactional import TaskId, TransactionalTask, commit_batch

TASKS = 2
QUERY = "query"


def options_of(nameservers: str, topic: str, sink_id: str, *, patience: str = "60s") -> SinkOptions:
    """The sink's options."""
    return SinkOptions.of(
        {
            "nameserver": nameservers, "topic": topic, "delivery": "transactional",
            "sinkId": sink_id, "requestTimeout": "3s", "deliveryTimeout": patience,
        },
        stream=True,
    )  # fmt: skip


def bodies(batch: int, partition: int, rows: int) -> list[str]:
    """The rows of a task."""
    return [f"{batch}.{partition}.{number}" for number in range(rows)]


async def write_task(
    options: SinkOptions, batch: int, partition: int, rows: int
) -> tuple[tuple[bytes, ...], bool]:
    """A task: what it sent, and whether the batch was decided before."""
    assert options.topic is not None
    assert options.sink_id is not None
    task = TransactionalTask(options, TaskId(options.sink_id, batch, partition, 0, QUERY))
    if not await task.begin():
        return (), True
    texts = bodies(batch, partition, rows)
    await task.send(
        [Outgoing(n, Message(options.topic, text), None) for n, text in enumerate(texts)]
    )
    return await task.finish(), False


async def write_batch(options: SinkOptions, batch: int, rows: int) -> None:
    """A batch, as Spark's driver runs it."""
    assert options.sink_id is not None
    written = await asyncio.gather(
        *(write_task(options, batch, partition, rows) for partition in range(TASKS))
    )
    handles = [data for given, _ in written for data in given]
    decided = any(found for _, found in written)
    await commit_batch(options, options.sink_id, batch, handles, query_id=QUERY, decided=decided)


async def main(nameservers: str, topic: str, sink: str, batches: int, rows: int, at: Path) -> None:
    """All batches from where the checkpoint stands."""
    options = options_of(nameservers, topic, sink)
    for batch in range(int(at.read_text()), batches):
        print(batch, flush=True)
        await write_batch(options, batch, rows)
        beside = at.with_suffix(".new")
        beside.write_text(str(batch + 1))
        beside.replace(at)


if __name__ == "__main__":
    _, given, name, its_id, count, each, path = sys.argv
    asyncio.run(main(given, name, its_id, int(count), int(each), Path(path)))
