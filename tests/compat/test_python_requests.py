"""Request and reply between Python clients, and between Python and Java in both directions."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from penstock.client.messages import Message
from penstock.client.producer.async_producer import AsyncProducer
from penstock.client.received_message import ReceivedMessage
from penstock.errors import NoReply, PenstockError, Refused

from . import clusters
from .java_session import JavaSession
from .python_reading import eventually, read_topic

pytestmark = [pytest.mark.compat, pytest.mark.slow]

REPLY_TOPIC = "DefaultCluster_REPLY_TOPIC"


@pytest.fixture(scope="module")
def two(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[clusters.Cluster]:
    """Two brokers; the first one is named."""
    directory = tmp_path_factory.mktemp("two")
    with (
        clusters.name_server(directory / "namesrv") as names,
        clusters.broker(directory / "a", names.address, brokerName="broker-a") as first,
        clusters.broker(directory / "b", names.address, brokerName="broker-b"),
    ):
        yield clusters.Cluster(names.address, first.name, first.address)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def asked(cluster: clusters.Cluster, topic: str, body: bytes) -> ReceivedMessage:
    """The request with this body, once it is there."""

    async def look() -> list[ReceivedMessage]:
        return [one for one in await read_topic(cluster.namesrv, topic) if one.body == body]

    return (await eventually(look))[0]


def test_python_asks_and_python_replies(two: clusters.Cluster, fresh: str) -> None:
    long = random.Random(1).randbytes(3_000) * 40

    async def work() -> None:
        async with (
            AsyncProducer(two.namesrv, group=f"{fresh}-asker") as asker,
            AsyncProducer(two.namesrv, group=f"{fresh}-replier") as replier,
        ):
            for number, answer in enumerate([b"yes", long]):
                question = f"question {number}".encode()
                asking = asyncio.ensure_future(
                    asker.request(Message(fresh, question, tags="Q"), timeout_ms=20_000)
                )
                request = await asked(two, fresh, question)
                receipt = await replier.reply(request, answer, tags="A", properties={"own": "1"})
                assert receipt.queue.broker_name == request.broker_name
                reply = await asking
                assert reply.body == answer
                assert (reply.topic, reply.tags) == (REPLY_TOPIC, "A")
                assert reply.properties["own"] == "1"
                for name in ("CORRELATION_ID", "REPLY_TO_CLIENT", "TTL"):
                    assert reply.properties[name] == request.properties[name]

    run(work())


def test_many_requests_at_once_get_each_its_own_reply(
    two: clusters.Cluster, java54: JavaSession, fresh: str
) -> None:
    async def work() -> None:
        async with AsyncProducer(two.namesrv, group=fresh) as asker:
            await asker.send(Message(fresh, b"so that the topic is there"))
            await asyncio.to_thread(
                java54.do, "reply.start", consumer=fresh, group=fresh, namesrv=two.namesrv,
                topic=fresh,
            )  # fmt: skip
            bodies = [f"question {number}" for number in range(100)]
            replies = await asyncio.gather(
                *(asker.request(Message(fresh, body), timeout_ms=40_000) for body in bodies)
            )
            assert [reply.body.decode() for reply in replies] == [f"{body}!" for body in bodies]
            assert {reply.topic for reply in replies} == {REPLY_TOPIC}
            outcomes = java54.do("reply.outcomes", consumer=fresh, count=100)
            done = [one for one in outcomes if one["asked"].startswith("question")]
            assert {one["status"] for one in done} == {"SEND_OK"}
        java54.do("reply.stop", consumer=fresh)

    run(work())


def test_java_asks_and_python_replies(
    two: clusters.Cluster, java54: JavaSession, fresh: str
) -> None:
    async def work() -> None:
        async with AsyncProducer(two.namesrv, group=fresh) as replier:
            await replier.send(Message(fresh, b"so that the topic is there"))
            java54.do("request.start", producer=fresh, namesrv=two.namesrv)
            messages = [{"topic": fresh, "body": "question"}]
            asking = asyncio.ensure_future(
                asyncio.to_thread(java54.do, "request.ask", producer=fresh, messages=messages)
            )
            request = await asked(two, fresh, b"question")
            await replier.reply(request, b"answer" * 1_000)  # compressed
            [line] = await asking
            assert (line["topic"], line["body_length"]) == (REPLY_TOPIC, 6_000)
            java54.do("request.stop", producer=fresh)

    run(work())


def test_nobody_replies_and_nobody_waits(two: clusters.Cluster, fresh: str) -> None:
    async def work() -> None:
        async with AsyncProducer(two.namesrv, group=f"{fresh}-replier") as replier:
            async with AsyncProducer(two.namesrv, group=fresh) as asker:
                with pytest.raises(NoReply, match="within 300 ms"):
                    await asker.request(Message(fresh, b"anybody?"), timeout_ms=300)
                request = await asked(two, fresh, b"anybody?")
                await replier.reply(request, b"too late")  # the client is there and takes it
            with pytest.raises(PenstockError) as caught:
                await replier.reply(request, b"much too late")
            causes = getattr(caught.value, "attempts", (caught.value,))
            assert all(isinstance(cause, Refused) for cause in causes)

    run(work())
