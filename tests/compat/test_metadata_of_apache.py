"""A Penstock slave copies the tables of an Apache master."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from penstock.transport.peer import Peer
from penstock.wire.codes import RequestCode
from tests.integration.test_metadata_sync import NOW_MS, Slave

from . import apache, clusters
from .variants import server_versions

pytestmark = [
    pytest.mark.compat,
    pytest.mark.slow,
    pytest.mark.skipif(clusters.APACHE, reason="both kinds of server take part"),
]

TOPIC, GROUP = "copied-topic", "copied-group"


async def call(peer: Peer, code: int, ext: dict[str, str], body: bytes = b"") -> None:
    response = await peer.call(code, ext, body, timeout_ms=10_000)
    assert response.code == 0, response


async def fill(peer: Peer) -> None:
    """A topic, a group, offsets, delayed and timer messages at the master."""
    topic = {
        "topic": TOPIC, "defaultTopic": "TBW102", "readQueueNums": "3", "writeQueueNums": "3",
        "perm": "6", "topicFilterType": "SINGLE_TAG", "topicSysFlag": "0", "order": "false",
    }  # fmt: skip
    await call(peer, RequestCode.UPDATE_AND_CREATE_TOPIC, topic)
    group = json.dumps({"groupName": GROUP, "retryMaxTimes": 3}).encode()
    await call(peer, RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, group)
    for number, properties in enumerate(("", "DELAY\x011\x02", "TIMER_DELAY_SEC\x011\x02")):
        ext = {
            "a": "p", "b": TOPIC, "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1", "h": "0",
            "i": f"UNIQ_KEY\x01{number:032X}\x02{properties}",
        }  # fmt: skip
        await call(peer, RequestCode.SEND_MESSAGE_V2, ext, b"%d" % number)
    for queue_id in range(3):
        offset = {
            "consumerGroup": GROUP, "topic": TOPIC, "queueId": str(queue_id),
            "commitOffset": str(queue_id),
        }  # fmt: skip
        await call(peer, RequestCode.UPDATE_CONSUMER_OFFSET, offset)


@server_versions
def test_the_tables_are_copied_and_commits_come_back(
    java: None, tmp_path: Path, version: str
) -> None:
    async def copy(address: str) -> None:
        peer = Peer(address)
        await fill(peer)
        slave = Slave(tmp_path / "slave", secret="Apache has none")
        slave.sync.start()
        slave.set_master(address)
        offsets, state = slave.broker.context.offsets, slave.sync.state
        try:
            await slave.until(lambda: offsets.get(GROUP, TOPIC, 2) == 2)
            context = slave.broker.context
            assert context.topics.need(TOPIC).read_queue_nums == 3
            config = context.groups.get(GROUP)
            assert config is not None
            assert config.retry_max_times == 3
            offsets.commit(GROUP, TOPIC, 0, 1, NOW_MS)
            rounds = state.rounds
            await slave.until(lambda: state.rounds >= rounds + 3 and not slave.role.commits)
            assert offsets.get(GROUP, TOPIC, 0) == 1
            asked = {"consumerGroup": GROUP, "topic": TOPIC, "queueId": "0"}
            answer = await peer.call(RequestCode.QUERY_CONSUMER_OFFSET, asked, timeout_ms=10_000)
            assert (answer.ext or {})["offset"] == "1"
            assert state.failures_total == 0, state
            await slave.until(lambda: context.delay.table.get(1) == 1)
            replicated = slave.broker.replicated
            assert replicated is not None
            await slave.until(lambda: replicated._state.content.timer_queue_offset == 1)
            assert replicated._state.content.timer_read_ms > 0
        finally:
            await slave.close()
            await peer.close()

    with (
        apache.NameServer(tmp_path / "names", version=version) as names,
        apache.Broker(
            tmp_path / "broker",
            tmp_path / "store",
            names.address,
            version=version,
            timerWheelEnable=True,
            timerFlushIntervalMs=1000,  # a slave copies the progress of the last flush
        ) as broker,
    ):
        asyncio.run(copy(broker.address))
