"""A transaction producer in its session: brokers can check its transactions from the start."""

import asyncio

import pytest

from penstock.client.transaction.async_transaction_producer import AsyncTransactionProducer
from penstock.errors import NoNameServer
from penstock.testing.virtual_clock import VirtualClock
from tests.integration.loops import Run, run, serving
from tests.integration.test_session import DEAD, FakeCluster

__all__ = ["run"]


def test_a_transaction_producer_is_registered_before_it_sends(run: Run) -> None:
    async def body() -> None:
        cluster = FakeCluster(("TBW102",))
        async with serving(cluster.names) as names, serving(cluster.serve_broker) as broker:
            cluster.broker = broker.address
            async with AsyncTransactionProducer(names.address, group="g"):
                await cluster.heard.wait()
                (beat,) = cluster.beats()
                assert [data.group_name for data in beat.producer_data_set] == ["g"]
        async with AsyncTransactionProducer(DEAD, group="g"):
            pass  # does not prevent a start

    run(body())


def test_a_transaction_producer_that_fails_to_start_leaks_nothing(run: Run) -> None:
    async def body() -> None:
        producer = AsyncTransactionProducer(DEAD, group="g", topics=["Orders"])
        with pytest.raises(NoNameServer):
            await producer.start()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(body())


def test_a_transaction_producer_registers_once_a_nameserver_is_available(run: Run) -> None:
    clock = VirtualClock()

    async def body() -> None:
        cluster = FakeCluster(())
        async with serving(cluster.names) as names, serving(cluster.serve_broker) as broker:
            cluster.broker = broker.address
            async with AsyncTransactionProducer(names.address, group="g", clock=clock):
                while not cluster.requests:
                    await asyncio.sleep(0)
                cluster.topics.add("TBW102")
                while not cluster.beats():
                    await clock.elapse(30_000)

    run(body())
