"""Reads a whole topic through a session of the Python client, below its consumers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.client.client_options import ClientOptions
from penstock.client.client_session import Session
from penstock.client.received_message import ReceivedMessage, decode_records
from penstock.clock import LoopClock, pause
from penstock.wire.codes import RequestCode, ResponseCode

T = TypeVar("T")

PULL = {
    "consumerGroup": "python-reader", "maxMsgNums": "32", "sysFlag": "4", "commitOffset": "0",
    "suspendTimeoutMillis": "0", "subscription": "*", "subVersion": "0", "expressionType": "TAG",
}  # fmt: skip


async def read_topic(namesrv: str, topic: str) -> list[ReceivedMessage]:
    """Every message of a topic, queue by queue; none if there is no such topic."""
    session = Session(ClientOptions(nameservers=(namesrv,)))
    await session.start()
    try:
        route = await session.find_route(topic)
        messages: list[ReceivedMessage] = []
        for queue in () if route is None else route.read_queues:
            peer, offset = session.broker(queue.broker_name), 0
            while True:
                fields = {"topic": topic, "queueId": str(queue.queue_id)}
                answer = await session.call(
                    peer, RequestCode.PULL_MESSAGE,
                    {**PULL, **fields, "queueOffset": str(offset)}, good=list(ResponseCode),
                )  # fmt: skip
                offset = int(answer.ext.get("nextBeginOffset", offset))
                if answer.code == ResponseCode.PULL_OFFSET_MOVED:
                    continue
                if answer.code != ResponseCode.SUCCESS:
                    break
                messages += decode_records(answer.body, queue.broker_name)
        return messages
    finally:
        await session.close()


async def read_bodies(namesrv: str, topic: str) -> list[str]:
    return sorted(message.body.decode() for message in await read_topic(namesrv, topic))


async def eventually(look: Callable[[], Awaitable[T]], *, within_s: float = 30.0) -> T:
    """What `look` gives once that is true; after `within_s`, whatever it gives then."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while not (seen := await look()) and loop.time() < deadline:
        await pause(LoopClock(), 100)
    return seen
