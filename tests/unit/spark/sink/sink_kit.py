"""A transactional sink as one query has it, for tests."""

from typing import Any

from penstock.client.messages import Message
from penstock.spark.message_schema import CONTROL_TOPIC
from penstock.spark.sink.control_topic import GROUP_PREFIX, _number
from penstock.spark.sink.row_messages import Outgoing
from penstock.spark.sink.sink_options import SinkOptions
from penstock.spark.sink.transactional import TaskId, TransactionalTask, abort_batch, commit_batch
from penstock.testing import InProcessBroker


class Sink:
    """A sink as one query has it."""

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

    async def begins(self, batch: int = 0, query: str = "q") -> bool:
        """Whether a task would send."""
        task = self.task(batch, query)
        sends = await task.begin()
        await task.roll_back()
        return sends

    async def halves(self, *bodies: str, batch: int = 0, query: str = "q") -> tuple[bytes, ...]:
        task = self.task(batch, query)
        assert await task.begin()
        await task.send([row(n, body) for n, body in enumerate(bodies)])
        return await task.finish()

    async def commit(
        self, *handles: bytes, batch: int = 0, decided: bool = False, query: str = "q"
    ) -> None:
        await commit_batch(
            self.options, self.sink_id, batch, handles, query_id=query, decided=decided
        )

    async def abort(self, *handles: bytes, batch: int = 0) -> None:
        await abort_batch(self.options, self.sink_id, batch, handles)

    def forget_numbers(self) -> None:
        """The broker dies before it has written them to its disk."""

        def forget(house: Any) -> None:
            table = house._broker().context.offsets.table
            assert table.queues(CONTROL_TOPIC, self._group())
            table.remove(CONTROL_TOPIC, self._group(), 0)

        self.broker._read(forget)

    def set_number(self, queue_id: int, number: int) -> None:
        """What a driver says that is late."""

        def put(house: Any) -> None:
            house._broker().context.offsets.table.commit(
                CONTROL_TOPIC, self._group(), queue_id, number, 0
            )

        self.broker._read(put)

    def _group(self) -> str:
        return GROUP_PREFIX + f"{_number('sink', '', self.sink_id):016x}"

    def seen(self) -> list[str]:
        return sorted(message.body.decode() for message in self.broker.messages("orders"))


def row(number: int, body: str, **fields: Any) -> Outgoing:
    return Outgoing(number, Message("orders", body, **fields), None)
