"""A transactional sink for tests."""

from typing import Any

from penstock.arrow.message_schema import CONTROL_TOPIC
from penstock.client.messages import Message
from penstock.spark.sink.control_topic import GROUP_PREFIX, _number
from penstock.spark.sink.row_messages import RowMessage
from penstock.spark.sink.sink_options import SinkOptions
from penstock.spark.sink.task_id import TaskId
from penstock.spark.sink.transactional import TransactionalTask, abort_batch, commit_batch
from penstock.testing import InProcessBroker


class Sink:
    """A transactional sink of one query, on one broker."""

    def __init__(self, broker: InProcessBroker, **options: str) -> None:
        self.broker = broker
        given = {
            "nameserver": broker.address, "topic": "orders", "delivery": "transactional",
            "sinkId": "s", "requestTimeout": "3s", "deliveryTimeout": "3s",
        }  # fmt: skip
        self.options = SinkOptions.of(given | options, stream=True)
        assert self.options.sink_id is not None
        self.sink_id = self.options.sink_id

    def task(self, batch: int = 0, query: str = "q", partition: int = 0) -> TransactionalTask:
        return TransactionalTask(
            self.options, TaskId(self.sink_id, batch, partition, 0, query_id=query)
        )

    async def starts(self, batch: int = 0, query: str = "q") -> bool:
        """Whether a task sends, because its batch is not decided."""
        task = self.task(batch, query)
        sends = await task.begin()
        await task.roll_back()
        return sends

    async def send_rows(self, *bodies: str, batch: int = 0, query: str = "q") -> tuple[bytes, ...]:
        task = self.task(batch, query)
        assert await task.begin()
        await task.send([row(n, body) for n, body in enumerate(bodies)])
        return await task.finish()

    async def commit(
        self, *chunks: bytes, batch: int = 0, decided: bool = False, query: str = "q"
    ) -> None:
        await commit_batch(
            self.options, self.sink_id, batch, chunks, query_id=query, decided=decided
        )

    async def abort(self, *chunks: bytes, batch: int = 0) -> None:
        await abort_batch(self.options, self.sink_id, batch, chunks)

    def lose_numbers(self) -> None:
        """Lose the stored numbers, as a broker does that crashes before it writes them."""

        def remove(fixture: Any) -> None:
            table = fixture._broker().context.offsets.table
            assert table.queues(CONTROL_TOPIC, self._group())
            table.remove(CONTROL_TOPIC, self._group(), 0)

        self.broker._read(remove)

    def set_number(self, queue_id: int, number: int) -> None:
        """Store a number as a late driver does."""

        def put(fixture: Any) -> None:
            fixture._broker().context.offsets.table.commit(
                CONTROL_TOPIC, self._group(), queue_id, number, 0
            )

        self.broker._read(put)

    def _group(self) -> str:
        return GROUP_PREFIX + f"{_number('sink', '', self.sink_id):016x}"

    def published(self) -> list[str]:
        return sorted(message.body.decode() for message in self.broker.messages("orders"))


def row(number: int, body: str, **fields: Any) -> RowMessage:
    return RowMessage(number, Message("orders", body, **fields), None)
