"""A driver of the transactional sink as a separate process, which tests kill.

    python -m tests.integration.sink_driver NAMESERVERS TOPIC SINK BATCHES ROWS CHECKPOINT

The checkpoint is a file with the number of finished batches. The driver prints a line before each
batch, so that the test knows when to kill it.
"""

import asyncio
import sys
from pathlib import Path

from penstock.client.messages import Message
from penstock.spark.sink.row_messages import RowMessage
from penstock.spark.sink.sink_options import SinkOptions
from penstock.spark.sink.task_id import TaskId
from penstock.spark.sink.transactional import TransactionalTask, commit_batch

TASKS = 2
QUERY = "query"


def options_of(
    nameservers: str, topic: str, sink_id: str, *, delivery_timeout: str = "60s"
) -> SinkOptions:
    """The sink's options."""
    return SinkOptions.of(
        {
            "nameserver": nameservers, "topic": topic, "delivery": "transactional",
            "sinkId": sink_id, "requestTimeout": "3s", "deliveryTimeout": delivery_timeout,
        },
        stream=True,
    )  # fmt: skip


def bodies(batch: int, partition: int, rows: int) -> list[str]:
    """The rows of a task."""
    return [f"{batch}.{partition}.{number}" for number in range(rows)]


async def write_task(
    options: SinkOptions, batch: int, partition: int, rows: int
) -> tuple[tuple[bytes, ...], bool]:
    """Run a task; returns its chunks, and whether the batch was already decided."""
    assert options.topic is not None
    assert options.sink_id is not None
    task = TransactionalTask(options, TaskId(options.sink_id, batch, partition, 0, QUERY))
    if not await task.begin():
        return (), True
    texts = bodies(batch, partition, rows)
    await task.send(
        [RowMessage(n, Message(options.topic, text), None) for n, text in enumerate(texts)]
    )
    return await task.finish(), False


async def write_batch(options: SinkOptions, batch: int, rows: int) -> None:
    """Run a batch as Spark's driver does."""
    assert options.sink_id is not None
    written = await asyncio.gather(
        *(write_task(options, batch, partition, rows) for partition in range(TASKS))
    )
    chunks = [chunk for sent, _ in written for chunk in sent]
    decided = any(found for _, found in written)
    await commit_batch(options, options.sink_id, batch, chunks, query_id=QUERY, decided=decided)


async def main(nameservers: str, topic: str, sink: str, batches: int, rows: int, at: Path) -> None:
    """Run all batches after the checkpoint."""
    options = options_of(nameservers, topic, sink)
    for batch in range(int(at.read_text()), batches):
        print(batch, flush=True)
        await write_batch(options, batch, rows)
        draft = at.with_suffix(".new")
        draft.write_text(str(batch + 1))
        draft.replace(at)


if __name__ == "__main__":
    _, servers, topic_name, sink_id, count, row_count, path = sys.argv
    asyncio.run(main(servers, topic_name, sink_id, int(count), int(row_count), Path(path)))
