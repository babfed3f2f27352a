"""A transaction producer in its session: brokers can ask it from the start."""

import asyncio

import pytest

from penstock.client.transaction.async_transaction_producer import AsyncTransactionProducer
from penstock.errors import NoNameServer
from penstock.testing.clock import VirtualClock
from tests.integration.loops import Run, run, serving
from tests.integration.test_session import DEAD, World

__all__ = ["run"]


def test_a_transaction_producer_can_be_asked_before_it_has_sent_anything(run: Run) -> None:
    async def body() -> None:
        world = World(("TBW102",))
        async with serving(world.names) as names, serving(world.serve_broker) as broker:
            world.broker = broker.address
            async with AsyncTransactionProducer(names.address, group="g"):
                await world.heard.wait()
                (beat,) = world.beats()
                assert [data.group_name for data in beat.producer_data_set] == ["g"]
        async with AsyncTransactionProducer(DEAD, group="g"):
            pass  # no reason not to start

    run(body())


def test_a_transaction_producer_that_can_not_start_leaves_nothing_behind(run: Run) -> None:
    async def body() -> None:
        producer = AsyncTransactionProducer(DEAD, group="g", topics=["Orders"])
        with pytest.raises(NoNameServer):
            await producer.start()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(body())


def test_a_transaction_producer_is_known_once_there_is_a_nameserver(run: Run) -> None:
    clock = VirtualClock()

    async def body() -> None:
        world = World(())
        async with serving(world.names) as names, serving(world.serve_broker) as broker:
            world.broker = broker.address
            async with AsyncTransactionProducer(names.address, group="g", clock=clock):
                while not world.requests:
                    await asyncio.sleep(0)
                world.topics.add("TBW102")
                while not world.beats():
                    await clock.elapse(30_000)

    run(body())
