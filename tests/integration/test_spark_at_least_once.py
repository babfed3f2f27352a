"""The at-least-once writer with real servers: a broker is killed and started again."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock import Admin, Message
from penstock.spark.sink.at_least_once import AtLeastOnceWriter, close_producers
from penstock.spark.sink.row_messages import RowMessage
from penstock.spark.sink.sink_options import SinkOptions
from tests.compat.penstock import Broker, NameServer
from tests.spark.kit import read_topic

pytestmark = pytest.mark.slow
TOPIC = "rows"


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[NameServer, Broker]]:
    """A NameServer, and a broker with the topic."""
    with (
        NameServer(tmp_path / "names") as names,
        Broker(tmp_path / "broker", tmp_path / "store", names.address) as broker,
    ):
        with Admin(names.address) as admin:
            admin.create_topic(TOPIC)
        yield names, broker
        close_producers()


def rows(numbers: range) -> list[RowMessage]:
    return [RowMessage(n, Message(TOPIC, str(n)), None) for n in numbers]


def test_killed_broker_gets_every_row_after_its_restart(
    servers: tuple[NameServer, Broker],
) -> None:
    names, broker = servers
    options = SinkOptions.of({"nameserver": names.address, "topic": TOPIC}, stream=False)

    def write_more() -> None:
        with AtLeastOnceWriter(options, 0) as writer:
            writer.put(rows(range(2_000, 5_000)))

    with AtLeastOnceWriter(options, 0) as writer:
        writer.put(rows(range(2_000)))
    broker.kill()
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write_more)
        broker.start()
        writing.result(100)
    found = {int(m.body) for m in read_topic(names, TOPIC, 5_000)}  # type: ignore[arg-type]
    assert found == set(range(5_000))
