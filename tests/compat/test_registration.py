"""Our registration at Apache's NameServer: 10,000 topics known, found, and forgotten at stop."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from penstock.clock import LoopClock
from penstock.config import BrokerConfig, LiveSettings, Settings
from penstock.server.registration.nameserver_registration import NameServerRegistration
from penstock.transport.peer import Peer
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import ClusterInfo, DataVersion, TopicConfig, TopicRouteData
from penstock.wire.bodies.registration_bodies import RegisterBrokerBody
from penstock.wire.bodies.table_bodies import TopicConfigAndMappingSerializeWrapper
from penstock.wire.codes import RequestCode, ResponseCode

from . import apache, maven

pytestmark = [pytest.mark.compat, pytest.mark.slow]

ADDRESS = "127.0.0.1:10911"


@pytest.fixture(scope="module", params=maven.SERVER_VERSIONS)
def names(
    java: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[apache.NameServer]:
    """Apache's NameServer of each release in turn."""
    with apache.NameServer(tmp_path_factory.mktemp("names"), version=request.param) as names:
        yield names


def test_apache_name_server_knows_a_broker_of_ours(names: apache.NameServer) -> None:
    table = {f"topic-{n}": TopicConfig(topic_name=f"topic-{n}", perm=6) for n in range(10_000)}
    version = DataVersion(counter=1, timestamp=1_700_000_000_000)

    def describe() -> RegisterBrokerBody:
        return RegisterBrokerBody(
            topic_config_serialize_wrapper=TopicConfigAndMappingSerializeWrapper(
                topic_config_table=table, data_version=version
            )
        )

    async def body() -> None:
        nonlocal version
        peer = Peer(names.address)

        async def route(topic: str) -> TopicRouteData | None:
            answer = await peer.call(
                RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": topic}, timeout_ms=5000
            )
            if answer.code == ResponseCode.TOPIC_NOT_EXIST:
                return None
            assert answer.code == ResponseCode.SUCCESS, answer.remark
            return fastjson.decode(answer.body, TopicRouteData)

        settings = Settings(broker=BrokerConfig(nameservers=names.address, name="ours"))
        registration = NameServerRegistration(
            LiveSettings(settings), describe, ADDRESS, "127.0.0.1:10912"
        )
        assert await registration.first_round()
        found = await route("topic-9999")
        assert found is not None
        assert [data.broker_addrs for data in found.broker_datas] == [{0: ADDRESS}]
        assert found.queue_datas[0].read_queue_nums == 16
        info = await peer.call(RequestCode.GET_BROKER_CLUSTER_INFO, timeout_ms=5000)
        clusters = fastjson.decode(info.body, ClusterInfo)
        assert clusters.cluster_addr_table == {"DefaultCluster": ["ours"]}

        table["made-later"] = TopicConfig(topic_name="made-later", write_queue_nums=3)
        version = version.next(1_700_000_000_001)
        registration.register_soon()
        while (later := await route("made-later")) is None:
            await asyncio.sleep(0.02)
        assert later.queue_datas[0].write_queue_nums == 3

        table["single"] = TopicConfig(topic_name="single", write_queue_nums=5)
        version = version.next(1_700_000_000_002)
        await registration.register_topics(("single",), LoopClock().now_ms() + 20_000)
        single = await route("single")
        assert single is not None
        assert single.queue_datas[0].write_queue_nums == 5

        await registration.close()
        while await route("topic-1") is not None:  # it unregisters in a thread of its own
            await asyncio.sleep(0.02)
        await peer.close()

    asyncio.run(body())


def test_apache_name_server_gets_us_back_after_its_restart(names: apache.NameServer) -> None:
    def describe() -> RegisterBrokerBody:
        table = {name: TopicConfig(topic_name=name) for name in ("a", "b")}
        return RegisterBrokerBody(
            topic_config_serialize_wrapper=TopicConfigAndMappingSerializeWrapper(
                topic_config_table=table, data_version=DataVersion(counter=1, timestamp=1)
            )
        )

    async def body() -> None:
        settings = Settings(broker=BrokerConfig(nameservers=names.address))
        registration = NameServerRegistration(
            LiveSettings(settings), describe, ADDRESS, "127.0.0.1:10912"
        )
        assert await registration.first_round()
        names.kill()
        while registration.not_ready() is None:
            await asyncio.sleep(0.02)
        await asyncio.to_thread(names.start)
        while registration.not_ready() is not None:
            await asyncio.sleep(0.02)
        await registration.close()

    asyncio.run(body())
