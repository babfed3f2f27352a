"""The transactional sink at one of Apache's brokers: refused before anything is sent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from penstock import Admin
from penstock.client.messages import Message
from penstock.errors import NotTransactional
from penstock.spark.sink.row_messages import RowMessage
from penstock.spark.sink.sink_client import SinkClient
from penstock.spark.sink.sink_options import SinkOptions
from penstock.spark.sink.task_id import TaskId
from penstock.spark.sink.transactional import TransactionalTask

from . import apache

pytestmark = [pytest.mark.compat, pytest.mark.slow, pytest.mark.usefixtures("java")]


def test_it_is_refused(tmp_path: Path) -> None:
    with (
        apache.NameServer(tmp_path / "ns") as names,
        apache.Broker(tmp_path / "b", tmp_path / "store", names.address) as broker,
    ):
        with Admin(names.address) as admin:
            admin.create_topic("orders", queues=2)
        options = SinkOptions.of(
            {
                "nameserver": names.address, "topic": "orders", "delivery": "transactional",
                "sinkId": "s", "deliveryTimeout": "10s",
            },
            stream=True,
        )  # fmt: skip

        async def body() -> None:
            task = TransactionalTask(options, TaskId("s", 0, 0, 0, "q"))
            with pytest.raises(NotTransactional, match=f"and {broker.name} is not one"):
                await task.begin()
            # In a mixed cluster the control topic is on Penstock; rows may go to Apache.
            async with SinkClient(options, lambda client: lambda message: None) as client:
                rows = [RowMessage(0, Message("orders", "x"), None)]
                with pytest.raises(NotTransactional, match=f"and {broker.name} is not one"):
                    await client.send_half_messages(rows, {}, 0, lambda place, half: None)

        asyncio.run(body())
        logs = [path.read_bytes() for path in (broker.store_dir / "commitlog").iterdir()]
        assert not any(b"TRANS_HALF" in data or b"orders" in data for data in logs)
        with Admin(names.address) as admin:
            assert "PENSTOCK_SINK_CONTROL" not in [topic.name for topic in admin.topics()]
