"""Fixtures for pytest, which finds this module by itself (`-p no:penstock` keeps it away).

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

Nothing of the broker is loaded before a test asks for it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from penstock.client import Consumer, Producer
    from penstock.testing.broker import InProcessBroker


@pytest.fixture
def penstock_settings() -> dict[str, Any]:
    """Settings of the broker, by their full names; override this fixture to change some."""
    return {}


@pytest.fixture
def penstock_broker(penstock_settings: dict[str, Any]) -> "Iterator[InProcessBroker]":
    """A broker of the test's own, whose time stands still: `clock.advance(days=3)`."""
    from penstock.testing.broker import InProcessBroker

    with InProcessBroker(penstock_settings) as broker:
        yield broker


@pytest.fixture
def penstock_producer(penstock_broker: "InProcessBroker") -> "Iterator[Producer]":
    """A blocking producer, ready to send."""
    from penstock.client import Producer

    with Producer(penstock_broker.address) as producer:
        yield producer


@pytest.fixture
def penstock_consumer(
    penstock_broker: "InProcessBroker",
) -> "Iterator[Callable[..., Consumer]]":
    """Makes blocking consumers, which take `group` and all other options of `Consumer`, begin with
    the first message, and are closed at the end. Add handlers, then call `start()`."""
    from penstock.client import Consumer

    made = ExitStack()

    def make(*, group: str, **options: Any) -> Consumer:
        consumer = Consumer(
            penstock_broker.address, group=group, **{"start_at": "first", **options}
        )
        made.callback(consumer.close)
        return consumer

    with made:
        yield make
