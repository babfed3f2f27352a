"""Pops over real sockets: a suspended pop, redelivery, a restart."""

import asyncio
from pathlib import Path

import pytest

from penstock.clock import LoopClock
from penstock.transport.peer import Peer, Response
from penstock.wire.codes import RequestCode
from penstock.wire.message import decode_messages
from tests.integration.loops import Run, run  # noqa: F401
from tests.integration.test_broker_service import CALL_MS, broker, send
from tests.store_kit import small_config


async def pop(peer: Peer, invisible_ms: int, wait_ms: int = CALL_MS) -> Response:
    ext = {
        "consumerGroup": "G", "topic": "T", "queueId": "-1", "maxMsgNums": "32",
        "invisibleTime": str(invisible_ms), "pollTime": str(wait_ms), "initMode": "0",
        "bornTime": str(LoopClock().now_ms()), "order": "false",
    }  # fmt: skip
    return await peer.call(RequestCode.POP_MESSAGE, ext, timeout_ms=2 * CALL_MS)


async def ack(peer: Peer, receipt: str, topic: str) -> Response:
    words = receipt.split(" ")
    ext = {
        "consumerGroup": "G", "topic": topic, "queueId": words[6], "offset": words[7],
        "extraInfo": receipt,
    }  # fmt: skip
    return await peer.call(RequestCode.ACK_MESSAGE, ext, timeout_ms=CALL_MS)


@pytest.mark.parametrize("sync_flush", [False, True])
def test_a_message_is_invisible_until_it_is_acknowledged(
    run: Run,  # noqa: F811
    tmp_path: Path,
    sync_flush: bool,
) -> None:
    async def body() -> None:
        config = small_config(sync_flush=sync_flush)
        async with broker(tmp_path, config) as (peer, _):
            await send(peer, 1)
            first = await pop(peer, 100)
            assert [m.body for m in decode_messages(first.body)] == [b"1"]
            waiting = asyncio.ensure_future(pop(peer, 60_000))
            await send(peer, 2)  # in another queue
            found = decode_messages((await waiting).body)
            if len(found) < 2:
                found += decode_messages((await pop(peer, 60_000)).body)
            messages = {m.body: (m.topic, m.reconsume_times) for m in found}
            assert messages == {b"1": ("T", 1), b"2": ("T", 0)}
        async with broker(tmp_path, config) as (peer, _):
            assert (await pop(peer, 1000, wait_ms=100)).code == 210
            (receipt,) = [m.properties["POP_CK"] for m in found if m.body == b"1"]
            assert (await ack(peer, receipt, "%RETRY%G_T")).code == 0

    run(body())
