"""kill -9 of all replicas while the end of the master's log is not confirmed."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.compat import clusters
from tests.compat.java_session import eventually
from tests.compat.test_controller import Servers
from tests.compat.test_replication import log_end
from tests.faults.driver import Driver, Sent, now_ms
from tests.faults.test_failover_kinds import REFUSED, REPLICAS, servers

__all__ = ["servers"]

TOPIC = "unconfirmed"
COUNT = 5


async def send(driver: Driver, name: str) -> int | None:
    """The queue offset of an acknowledged message."""
    answer = await driver.send(name, TOPIC, 0, Sent(now_ms(), now_ms()), {})
    return None if answer is None else int(answer.ext["queueOffset"])


@pytest.mark.slow
@pytest.mark.skipif(clusters.APACHE, reason="all servers are ours")
def test_new_messages_take_no_queue_offsets_of_unconfirmed_ones(
    servers: Servers,
) -> None:
    """A restarted master stores new messages behind those that no slave has (RocketMQ recovered
    only what is confirmed, and messages shared places in a queue: apache/rocketmq#7689)."""
    state = servers.await_in_sync(REPLICAS)
    master = servers.brokers[state["masterAddress"]]
    slaves = [broker for broker in servers.brokers.values() if broker is not master]

    async def body() -> None:
        driver = Driver(master.address, "unconfirmed", refused=REFUSED)
        await driver.broker_is_up()
        for offset in range(COUNT):
            assert await send(driver, f"confirmed-{offset}") == offset
        end = await asyncio.to_thread(log_end, master)
        for slave in slaves:
            os.kill(slave.pid, signal.SIGSTOP)
        waiting = asyncio.ensure_future(send(driver, "unconfirmed-0"))
        assert await asyncio.to_thread(eventually, lambda: log_end(master) > end)
        assert not waiting.done()
        assert len(await driver.pull(TOPIC, 0, 0)) == COUNT
        for broker in (*slaves, master):
            await asyncio.to_thread(broker.kill)
        assert await waiting is None
        await asyncio.to_thread(restart)
        await driver.broker_is_up()
        for number in range(COUNT):
            assert await send(driver, f"later-{number}") == COUNT + 1 + number
        names = [one.name for one in await driver.pull(TOPIC, 0, 0)]
        await driver.close()
        confirmed = [f"confirmed-{number}" for number in range(COUNT)]
        later = [f"later-{number}" for number in range(COUNT)]
        assert names == [*confirmed, "unconfirmed-0", *later]

    def restart() -> None:
        """The old master first, so that it is elected again."""
        master.begin()
        elected = state["masterEpoch"] + 1
        assert eventually(lambda: servers.replicas()["masterEpoch"] == elected)
        for slave in slaves:
            slave.begin()
        for broker in servers.brokers.values():
            broker.await_ready()
        assert servers.await_in_sync(REPLICAS)["masterAddress"] == master.address

    asyncio.run(body())
