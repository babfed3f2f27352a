"""The transactional sink at one of Apache's brokers: refused before anything is sent."""

from __future__ import annotations

import asyncio

import pytest

from penstock import Admin
from penstock.client.messages import Message
from penstock.errors import NotTransactional
from penstock.spark.sink.row_messages import RowMessage
from penstock.spark.sink.sink_client import SinkClient
from penstock.spark.sink.sink_options import SinkOptions
from penstock.spark.sink.task_id import TaskId
from penstock.spark.sink.transactional import TransactionalTask

from .clusters import OwnCluster

pytestmark = [pytest.mark.compat, pytest.mark.slow]


def test_it_is_refused(apache_cluster: OwnCluster, fresh: str) -> None:
    namesrv, broker = apache_cluster.namesrv, apache_cluster.broker
    with Admin(namesrv) as admin:
        admin.create_topic(fresh, queues=2)
    options = SinkOptions.of(
        {
            "nameserver": namesrv,
            "topic": fresh,
            "delivery": "transactional",
            "sinkId": "s",
            "deliveryTimeout": "10s",
        },
        stream=True,
    )

    async def body() -> None:
        task = TransactionalTask(options, TaskId("s", 0, 0, 0, "q"))
        with pytest.raises(NotTransactional, match=f"{broker} is not one"):
            await task.begin()
        # In a mixed cluster the control topic is on Penstock; rows may go to Apache.
        async with SinkClient(options, lambda client: lambda message: None) as client:
            rows = [RowMessage(0, Message(fresh, "x"), None)]
            with pytest.raises(NotTransactional, match=f"{broker} is not one"):
                await client.send_half_messages(rows, {}, 0, lambda place, half: None)

    asyncio.run(body())
    commit_log = apache_cluster.server.store_dir / "commitlog"
    logs = [path.read_bytes() for path in commit_log.iterdir()]
    assert not any(b"TRANS_HALF" in data or fresh.encode() in data for data in logs)
    with Admin(namesrv) as admin:
        assert "PENSTOCK_SINK_CONTROL" not in [topic.name for topic in admin.topics()]
