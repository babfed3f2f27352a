"""A write to a wrong address or a misspelt topic fails before the first row is sent."""

import asyncio
from collections.abc import Iterator

import pytest

from penstock.arrow import cluster_metadata
from penstock.client.messages import Message
from penstock.errors import NoNameServer, NoRoute
from penstock.spark.sink import sink_client
from penstock.spark.sink.at_least_once import AtLeastOnceWriter, close_producers
from penstock.spark.sink.data_writer import make_writer
from penstock.spark.sink.row_messages import RowMessage
from penstock.spark.sink.sink_options import SinkOptions
from penstock.spark.sink.target_check import check_target
from penstock.spark.spark_schema import spark_schema
from penstock.testing import InProcessBroker


@pytest.fixture
def broker() -> Iterator[InProcessBroker]:
    with InProcessBroker() as broker:
        broker.create_topic("orders", queues=1)
        yield broker
    close_producers()


def options(address: str, **more: str) -> SinkOptions:
    return SinkOptions.of({"nameserver": address, **more}, stream=False)


def test_misspelt_topic_is_refused_where_the_write_is_planned(broker: InProcessBroker) -> None:
    given = {"nameserver": broker.address, "topic": "ordesr"}
    with pytest.raises(NoRoute, match="similar topics: orders") as caught:
        make_writer(given, spark_schema(["body"]), overwrite=False)
    assert "createTopics=true" in caught.value.hint
    assert broker.topics() == ["orders"]
    make_writer({**given, "topic": "orders"}, spark_schema(["body"]), overwrite=False)


def test_misspelt_topic_of_a_row_is_refused(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.spark.sink.at_least_once.NEW_TOPIC_MS", 0)
    row = RowMessage(0, Message("ordesr", b"1"), None)
    with (
        pytest.raises(NoRoute, match="similar topics: orders"),
        AtLeastOnceWriter(options(broker.address), 0) as writer,
    ):
        writer.put([row])
    assert broker.topics() == ["orders"]


def test_misspelt_topic_of_a_transactional_row_is_refused(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_client, "NEW_TOPIC_MS", 0)
    given = options(broker.address, delivery="transactional", sinkId="s")
    row = RowMessage(0, Message("ordesr", b"1"), None)

    async def body() -> None:
        async with sink_client.SinkClient(given, lambda client: lambda message: None) as client:
            with pytest.raises(NoRoute, match="similar topics: orders"):
                await client.send_half_messages([row], {}, 0, lambda topic, half: None)

    asyncio.run(body())
    assert broker.topics() == ["orders"]


def test_topic_is_created_if_the_write_may(broker: InProcessBroker) -> None:
    given = options(broker.address, topic="new", createTopics="true")
    check_target(given)
    with AtLeastOnceWriter(given, 0) as writer:
        writer.put([RowMessage(0, Message("new", b"1"), None)])
    assert [message.body for message in broker.messages("new")] == [b"1"]


def test_wrong_address_is_refused_without_waiting_for_the_delivery_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_metadata, "FIRST_CONTACT_MS", 0)
    with pytest.raises(NoNameServer, match="refused"):
        check_target(options("127.0.0.1:1", topic="orders", deliveryTimeout="10m"))
