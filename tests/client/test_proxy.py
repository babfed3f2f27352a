"""The proxies of the fault tests work as documented."""

from __future__ import annotations

import asyncio

import pytest

from penstock.client.client_options import ClientOptions
from penstock.client.client_session import Session
from penstock.errors import PeerLost, PeerTimeout
from penstock.wire.codes import RequestCode

from .environment import Environment
from .proxy import Network

MAX_OFFSET = RequestCode.GET_MAX_OFFSET


async def test_all_traffic_goes_through_the_proxies(env: Environment) -> None:
    topic = env.topic(queues=2)
    async with Network(env.cluster) as network:
        session = Session(ClientOptions(network.nameservers))
        await session.start()
        try:
            route = await session.route(topic)
            masters = [{0: proxy.address} for proxy in network.brokers.values()]
            assert [route.addresses[name] for name in route.brokers] == masters
            place = {"topic": topic, "queueId": "0"}
            for name in route.brokers:
                answer = await session.call(session.broker(name), MAX_OFFSET, place)
                assert answer.ext["offset"] == "0"
            proxy = network.broker("broker-a")
            assert (proxy.accepted, proxy.open) == (1, 1)
            peer = session.broker("broker-a")
            proxy.stall()
            with pytest.raises(PeerTimeout):
                await peer.call(MAX_OFFSET, place, timeout_ms=100)
            waiting = asyncio.ensure_future(peer.call(MAX_OFFSET, place, timeout_ms=20_000))
            await asyncio.sleep(0)
            assert proxy.cut() == 1
            with pytest.raises(PeerLost):
                await waiting
            proxy.flow()
            assert (await peer.call(MAX_OFFSET, place, timeout_ms=5_000)).code == 0
            proxy.half_close()
            await asyncio.sleep(0.05)
            assert (await peer.call(MAX_OFFSET, place, timeout_ms=5_000)).code == 0
            assert proxy.accepted == 3
            proxy.cut_bytes_mean = 300
            answered = 0
            for _ in range(100):
                try:
                    await peer.call(MAX_OFFSET, place, timeout_ms=5_000)
                    answered += 1
                except PeerLost:
                    pass
            assert proxy.cuts > 10
            assert answered > 10
        finally:
            await session.close()
