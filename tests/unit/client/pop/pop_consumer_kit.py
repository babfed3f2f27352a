"""A POP consumer on a whole broker, for the tests of the consumer."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.client.pop.async_pop_consumer import AsyncPopConsumer
from penstock.client.received_message import ReceivedMessage
from penstock.wire.codes import RequestCode
from tests.unit.client.client_kit import ClientBrokerFixture, FixtureSession, session_of

ACK, BATCH_ACK = RequestCode.ACK_MESSAGE, RequestCode.BATCH_ACK_MESSAGE


class PopFixture:
    """A broker, a session and a consumer of the group G."""

    def __init__(self, broker_fixture: ClientBrokerFixture, **options: Any) -> None:
        self.broker_fixture = broker_fixture
        self.session = FixtureSession(broker_fixture)
        with session_of("pop.async_pop_consumer", self.session):
            self.consumer = AsyncPopConsumer(group="G", start_at="first", **options)

    def send(self, *bodies: str, topic: str = "T", queue_id: int = 0, tag: str = "") -> None:
        for body in bodies:
            assert self.broker_fixture.send(topic, queue_id, body.encode(), tag).code == 0
        self.broker_fixture.store.publish()

    async def receive(self, **options: Any) -> list[ReceivedMessage]:
        return await self.consumer.receive(wait_ms=0, **options)

    async def bodies(self, **options: Any) -> list[str]:
        return texts(await self.receive(**options))

    def acked(self) -> int:
        return self.session.counts[ACK] + self.session.counts[BATCH_ACK]


def texts(messages: list[ReceivedMessage]) -> list[str]:
    return [message.body.decode() for message in messages]


@asynccontextmanager
async def pop_fixture(
    root: Path, *, subscribe: bool = True, **options: Any
) -> AsyncIterator[PopFixture]:
    broker_fixture = ClientBrokerFixture(root)
    made = PopFixture(broker_fixture, **options)
    try:
        if subscribe:
            made.send("first")
            made.consumer.subscribe("T")
        async with made.consumer:
            if subscribe:
                (first,) = await made.receive()
                await made.consumer.ack(first)
                made.session.counts.clear()
            yield made
    finally:
        broker_fixture.close()
