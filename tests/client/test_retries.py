"""A producer whose brokers are dead, slow or silent: retries, and brokers it avoids for a while."""

from __future__ import annotations

import asyncio

import pytest

from penstock import AsyncProducer, Message, MessageQueue
from penstock.errors import NoNameServer, PeerTimeout, PenstockError, SendFailed

from .environment import Environment, eventually, numbers, text
from .proxy import Network


async def _brokers_of(producer: AsyncProducer, topic: str, count: int) -> set[str]:
    """The brokers that this many messages are sent to."""
    receipts = [await producer.send(Message(topic, body)) for body in numbers(count)]
    return {receipt.queue.broker_name for receipt in receipts}


async def test_no_message_is_lost_with_a_dead_broker(env: Environment) -> None:
    topic = env.topic()
    async with (
        Network(env.cluster) as network,
        env.producer(nameservers=network.nameservers, retries=2) as producer,
    ):
        assert await _brokers_of(producer, topic, 8) == {"broker-a", "broker-b"}
        network.broker("broker-a").refusing = True
        network.broker("broker-a").cut()
        assert await _brokers_of(producer, topic, 16) == {"broker-b"}
    assert len(env.stored(topic)) == 24


async def test_a_silent_broker_is_avoided_for_the_configured_period(env: Environment) -> None:
    topic = env.topic()
    async with (
        Network(env.cluster) as network,
        env.producer(
            nameservers=network.nameservers, avoid_ms=300_000, timeout_ms=1_000
        ) as producer,
    ):
        await _brokers_of(producer, topic, 8)
        silent = network.broker("broker-a")
        silent.stall()
        with pytest.raises(PenstockError):
            await producer.send(Message(topic, "x"), queue=MessageQueue(topic, "broker-a", 0))
        assert await _brokers_of(producer, topic, 24) == {"broker-b"}
        silent.flow()
        assert await _brokers_of(producer, topic, 24) == {"broker-b"}, "still avoided"


async def test_a_broker_is_tried_again_after_the_period(env: Environment) -> None:
    topic = env.topic()
    async with (
        Network(env.cluster) as network,
        env.producer(nameservers=network.nameservers, avoid_ms=700) as producer,
    ):
        await _brokers_of(producer, topic, 8)
        dead = network.broker("broker-a")
        dead.refusing = True
        dead.cut()
        assert await _brokers_of(producer, topic, 8) == {"broker-b"}
        dead.refusing = False

        async def both() -> bool:
            return len(await _brokers_of(producer, topic, 8)) == 2

        assert await eventually(both, within_s=10)


async def test_a_slow_broker_is_avoided_by_its_latency(env: Environment) -> None:
    topic = env.topic()
    async with (
        Network(env.cluster) as network,
        env.producer(nameservers=network.nameservers, timeout_ms=10_000) as producer,
    ):
        await _brokers_of(producer, topic, 8)
        network.broker("broker-b").delay_s = 0.4  # per direction: RocketMQ avoids above 550 ms
        queue = MessageQueue(topic, "broker-b", 0)
        await producer.send(Message(topic, "slow"), queue=queue)
        assert await _brokers_of(producer, topic, 16) == {"broker-a"}
        network.broker("broker-b").delay_s = 0.0


async def test_avoidance_can_be_disabled(env: Environment) -> None:
    topic = env.topic()
    async with (
        Network(env.cluster) as network,
        env.producer(
            nameservers=network.nameservers, avoid_faulty=False, timeout_ms=10_000
        ) as producer,
    ):
        await _brokers_of(producer, topic, 8)
        network.broker("broker-b").delay_s = 0.4
        await producer.send(Message(topic, "slow"), queue=MessageQueue(topic, "broker-b", 0))
        network.broker("broker-b").delay_s = 0.0
        assert await _brokers_of(producer, topic, 8) == {"broker-a", "broker-b"}


async def test_the_final_error_lists_all_attempts(env: Environment) -> None:
    topic = env.topic()
    async with (
        Network(env.cluster) as network,
        env.producer(nameservers=network.nameservers, retries=2) as producer,
    ):
        await _brokers_of(producer, topic, 8)
        for proxy in network.brokers.values():
            proxy.refusing = True
            proxy.cut()
        with pytest.raises(SendFailed) as caught:
            await producer.send(Message(topic, "x"))
        assert caught.value.retry
        assert len(caught.value.attempts) == 3
        assert topic in str(caught.value)
        shown = str(caught.value) + "".join(map(str, caught.value.attempts))
        assert all(proxy.address in shown for proxy in network.brokers.values())
        # A send to a given queue is not retried on another one.
        with pytest.raises(PenstockError):
            await producer.send(Message(topic, "x"), queue=MessageQueue(topic, "broker-a", 0))
        for proxy in network.brokers.values():
            proxy.refusing = False

        async def again() -> bool:
            try:
                return bool(await producer.send(Message(topic, "healed")))
            except SendFailed:
                return False

        await eventually(again)
    assert "healed" in text(env.stored(topic))


async def test_a_send_fails_at_its_timeout_and_names_it(env: Environment) -> None:
    topic = env.topic()
    async with (
        Network(env.cluster) as network,
        env.producer(nameservers=network.nameservers, retries=0) as producer,
    ):
        await _brokers_of(producer, topic, 8)
        for proxy in network.brokers.values():
            proxy.stall()
        with pytest.raises(PenstockError) as caught:
            async with asyncio.timeout(5):
                await producer.send(Message(topic, "x"), timeout_ms=300)
        causes = getattr(caught.value, "attempts", ()) or (caught.value,)
        assert isinstance(causes[0], PeerTimeout)
        for proxy in network.brokers.values():
            proxy.flow()


async def test_the_error_without_a_nameserver_names_each_address(env: Environment) -> None:
    async with Network(env.cluster) as network:
        network.names.refusing = True
        dead = "127.0.0.1:1"
        producer = env.producer(nameservers=[dead, network.nameservers])
        with pytest.raises(NoNameServer) as caught:
            async with producer:
                await producer.send(Message(env.name(), "x"))
    assert dead in str(caught.value)
    assert network.nameservers in str(caught.value)
    assert caught.value.retry
