"""The system clock is set while servers run: clients, brokers and locks expire by elapsed time."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.config import BrokerConfig, NameServerConfig, ServerConfig, Settings
from penstock.server.services.broker_service import BrokerService
from penstock.server.services.nameserver_service import NameServerService
from penstock.testing.virtual_clock import VirtualClock
from penstock.transport.peer import Peer, Response
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import (
    ConsumerData,
    HeartbeatData,
    LockBatchRequestBody,
    LockBatchResponseBody,
    MessageQueue,
    ProducerData,
)
from penstock.wire.codes import RequestCode
from tests.integration.test_broker_service import free_port
from tests.store_kit import small_config

HOURS = 3_600_000
STEPS = pytest.mark.parametrize("step_ms", [3 * HOURS, -3 * HOURS], ids=["forward", "back"])
NEVER_IDLE = ServerConfig(idle_ms=86_400_000)


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def ask(peer: Peer, code: int, body: object = None, **ext: str) -> Response:
    data = b"" if body is None else fastjson.encode(body)
    answer = await peer.call(code, ext, data, timeout_ms=20_000)
    assert answer.code == 0, answer.remark
    return answer


@STEPS
def test_a_nameserver_keeps_its_brokers(step_ms: int) -> None:
    async def body() -> None:
        clock = VirtualClock()
        settings = Settings(nameserver=NameServerConfig(port=free_port()), server=NEVER_IDLE)
        service = NameServerService(settings, clock)
        await service.start()
        brokers = service.nameserver._routes.brokers
        peer = Peer(f"127.0.0.1:{settings.nameserver.port}", clock=clock)
        fields = {"clusterName": "c", "brokerName": "b", "brokerAddr": "h:1", "brokerId": "0"}
        await ask(peer, RequestCode.REGISTER_BROKER, **fields)
        await clock.elapse(60_000)
        clock.set_by(step_ms)
        await clock.elapse(50_000)
        assert brokers
        await ask(peer, RequestCode.BROKER_HEARTBEAT, **fields)
        await clock.elapse(100_000)
        assert brokers
        await clock.elapse(30_000)
        assert not brokers, "it was silent for 130 s"
        await peer.close()
        await service.stop()

    asyncio.run(body())


class BrokerFixture:
    """A broker with a virtual clock."""

    def __init__(self, root: Path) -> None:
        self.clock = VirtualClock()
        self.settings = Settings(
            broker=BrokerConfig(port=free_port(), data=str(root), probe_port=0, vip_port=0),
            store=small_config(sync_flush=False),
            server=NEVER_IDLE,
        )
        self.service = BrokerService(self.settings, self.clock)

    async def __aenter__(self) -> "BrokerFixture":
        await self.service.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        stopping = asyncio.ensure_future(self.service.stop())
        while not stopping.done():
            await self.clock.elapse(10)
        await stopping

    def connect(self) -> Peer:
        return Peer(f"127.0.0.1:{self.settings.broker.port}", clock=self.clock)


@STEPS
def test_a_broker_keeps_its_clients(step_ms: int, tmp_path: Path) -> None:
    async def body() -> None:
        async with BrokerFixture(tmp_path) as env:
            clients, clock, peer = env.service.broker.context.clients, env.clock, env.connect()
            beat = HeartbeatData(
                client_id="c1",
                consumer_data_set=[ConsumerData(group_name="g")],
                producer_data_set=[ProducerData(group_name="p")],
            )
            await ask(peer, RequestCode.HEART_BEAT, beat)
            await clock.elapse(60_000)
            clock.set_by(step_ms)
            await clock.elapse(50_000)
            assert clients.consumer_group("g")
            assert clients.producers("p")
            await ask(peer, RequestCode.HEART_BEAT, beat)
            await clock.elapse(100_000)
            assert clients.consumer_group("g")
            await clock.elapse(30_000)
            assert not clients.consumer_group("g"), "it was silent for 130 s"
            assert not clients.producers("p")
            await peer.close()

    asyncio.run(body())


@STEPS
def test_queue_locks_last_for_their_lease(step_ms: int, tmp_path: Path) -> None:
    async def body() -> None:
        async with BrokerFixture(tmp_path) as env:
            clock, peer = env.clock, env.connect()
            queue = MessageQueue(topic="TBW102", broker_name="broker-a", queue_id=0)

            async def lock(client_id: str) -> bool:
                request = LockBatchRequestBody(
                    consumer_group="g", client_id=client_id, mq_set=[queue]
                )
                answer = await ask(peer, RequestCode.LOCK_BATCH_MQ, request)
                return bool(fastjson.decode(answer.body, LockBatchResponseBody).lock_ok_mq_set)

            assert await lock("one")
            await clock.elapse(30_000)
            clock.set_by(step_ms)
            await clock.elapse(20_000)
            assert not await lock("two")
            await clock.elapse(15_000)
            assert await lock("two"), "the lease of 60 s is over"
            await peer.close()

    asyncio.run(body())


def test_a_suspended_pull_is_answered_when_the_clock_is_set_back(tmp_path: Path) -> None:
    async def body() -> None:
        async with BrokerFixture(tmp_path) as env:
            peer = env.connect()
            ext = {
                "consumerGroup": "g", "topic": "SELF_TEST_TOPIC", "queueId": "0",
                "queueOffset": "0", "maxMsgNums": "32", "sysFlag": "6", "commitOffset": "0",
                "suspendTimeoutMillis": "15000", "subscription": "*", "subVersion": "0",
            }  # fmt: skip
            call = peer.call(RequestCode.PULL_MESSAGE, ext, timeout_ms=60_000)
            waiting = asyncio.ensure_future(call)
            await until(lambda: len(env.service.broker.context.long_polling))
            env.clock.set_by(-3 * HOURS)
            await env.clock.elapse(20_000)
            assert waiting.done()
            assert (await waiting).code == 19
            await peer.close()

    asyncio.run(body())
