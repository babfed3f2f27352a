"""Fixtures for pytest, which loads this module automatically (`-p no:penstock` prevents it).

    def test_bad_orders_are_dead_letters(penstock_broker, penstock_producer, penstock_consumer):
        penstock_broker.create_topic("orders")
        consumer = penstock_consumer(group="billing")

        @consumer.on("orders")
        def bill(message):
            raise ValueError("no such customer")

        consumer.start()
        penstock_producer.send(Message("orders", b"42"))
        penstock_broker.clock.advance(days=3)
        assert [message.body for message in penstock_broker.dead_letters("billing")] == [b"42"]

The broker is imported only when a test uses a fixture.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from penstock.client import Consumer, Producer
    from penstock.testing.in_process_broker import InProcessBroker


@pytest.fixture
def penstock_settings() -> dict[str, Any]:
    """Settings of the broker, by full name. Override this fixture to change some."""
    return {}


@pytest.fixture
def penstock_broker(penstock_settings: dict[str, Any]) -> "Iterator[InProcessBroker]":
    """A broker for one test. Its clock stands still until `clock.advance(days=3)`."""
    from penstock.testing.in_process_broker import InProcessBroker

    with InProcessBroker(penstock_settings) as broker:
        yield broker


@pytest.fixture
def penstock_producer(penstock_broker: "InProcessBroker") -> "Iterator[Producer]":
    """A started synchronous producer."""
    from penstock.client import Producer

    with Producer(penstock_broker.address) as producer:
        yield producer


@pytest.fixture
def penstock_consumer(
    penstock_broker: "InProcessBroker",
) -> "Iterator[Callable[..., Consumer]]":
    """Creates synchronous consumers with `group` and any other options of `Consumer`.

    They start at the first message and are closed after the test. Add handlers, then call
    `start()`.
    """
    from penstock.client import Consumer

    consumers = ExitStack()

    def create(*, group: str, **options: Any) -> Consumer:
        consumer = Consumer(
            penstock_broker.address, group=group, **{"start_at": "first", **options}
        )
        consumers.callback(consumer.close)
        return consumer

    with consumers:
        yield create
