"""Transactions of the Python client: committed, rolled back, forgotten, asked for, ended elsewhere.

The same on our servers and on Apache's (PENSTOCK_COMPAT_PEER=apache).
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from penstock.client.messages import Message
from penstock.client.received_message import ReceivedMessage
from penstock.client.transaction.async_transaction_producer import (
    AsyncTransactionProducer,
    Decision,
    TransactionHandle,
)
from penstock.errors import TransactionCommitted, TransactionRolledBack

from . import clusters
from .python_reading import eventually, read_bodies, read_topic

pytestmark = [pytest.mark.compat, pytest.mark.slow]

QUICK: dict[str, Any] = {
    "transactionTimeOut": 1000,
    "transactionCheckInterval": 1000,
    "transactionCheckMax": 15,
    "traceTopicEnable": True,
}
if clusters.APACHE:
    QUICK["transactionOpBatchInterval"] = 100

ENDER = """
import asyncio, sys
from penstock import AsyncTransactionProducer, TransactionHandle

async def end(namesrv, how, text):
    async with AsyncTransactionProducer(namesrv, group="somebody-else") as producer:
        await getattr(producer, how)(TransactionHandle.parse(text))

asyncio.run(end(*sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def trading(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[clusters.Cluster]:
    """A cluster that asks after a second, every second."""
    with clusters.running(
        tmp_path_factory.mktemp("trading"), brokerName="trading", **QUICK
    ) as cluster:
        yield cluster


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def until_read(cluster: clusters.Cluster, topic: str, count: int) -> list[str]:
    async def look() -> list[str]:
        bodies = await read_bodies(cluster.namesrv, topic)
        return bodies if len(bodies) >= count else []

    return await eventually(look)


def test_a_block_commits_at_its_end_and_rolls_back_on_an_error(
    trading: clusters.Cluster, fresh: str
) -> None:
    async def work() -> None:
        async with AsyncTransactionProducer(trading.namesrv, group=fresh) as producer:
            async with producer.transaction(Message(fresh, b"good", tags="t", keys=["k"])) as good:
                assert await read_bodies(trading.namesrv, fresh) == []
            with pytest.raises(KeyError):
                async with producer.transaction(Message(fresh, b"bad")):
                    raise KeyError("the work beside it failed")
            async with producer.transaction(Message(fresh, b"withdrawn")) as withdrawn:
                withdrawn.decision = Decision.ROLLBACK
            assert await until_read(trading, fresh, 1) == ["good"]
            [message] = await read_topic(trading.namesrv, fresh)
            assert message.message_id == good.handle.message_id
            assert message.transaction_id == good.handle.transaction_id == message.message_id
            assert (message.tags, message.keys) == ("t", ["k"])
            assert message.prepared_offset == good.handle.log_offset

    run(work())


def test_the_check_decides_what_nobody_has_told(trading: clusters.Cluster, fresh: str) -> None:
    asked: list[ReceivedMessage] = []
    answers: dict[str, list[Any]] = {
        "yes": [True], "no": [Decision.ROLLBACK], "later": [None, Decision.UNKNOWN, True],
        "error": [ValueError("what?"), Decision.COMMIT], "odd": ["perhaps", True],
    }  # fmt: skip

    def check(message: ReceivedMessage) -> Any:
        asked.append(message)
        answer = answers[message.body.decode()].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def work() -> None:
        async with AsyncTransactionProducer(trading.namesrv, group=fresh, check=check) as producer:
            handles = {
                body: await producer.prepare(Message(fresh, body, keys=[f"key-{body}"]))
                for body in answers
            }
            async with producer.transaction(Message(fresh, b"told")) as told:
                pass
            assert await until_read(trading, fresh, 5) == ["error", "later", "odd", "told", "yes"]

            async def all_asked() -> bool:
                return not any(answers.values())

            assert await eventually(all_asked)
            assert told.handle.message_id not in {message.message_id for message in asked}
            for message in asked:
                body = message.body.decode()
                assert message.message_id == handles[body].message_id
                assert (message.topic, message.keys) == (fresh, [f"key-{body}"])
            await asyncio.sleep(2)  # no further questions, no further messages
            assert not any(answers.values())
            assert len(await read_bodies(trading.namesrv, fresh)) == 5

    run(work())


def test_a_check_may_be_a_coroutine(trading: clusters.Cluster, fresh: str) -> None:
    async def work() -> None:
        producer = AsyncTransactionProducer(trading.namesrv, group=fresh)

        @producer.checker
        async def check(message: ReceivedMessage) -> bool:
            await asyncio.sleep(0)
            return True

        async with producer:
            await producer.prepare(Message(fresh, b"asked for"))
            assert await until_read(trading, fresh, 1) == ["asked for"]

    run(work())


def test_a_producer_that_has_sent_nothing_answers_for_a_dead_one(
    trading: clusters.Cluster, fresh: str
) -> None:
    async def work() -> None:
        async with AsyncTransactionProducer(trading.namesrv, group=fresh) as dead:
            await dead.prepare(Message(fresh, b"left behind"))
        async with AsyncTransactionProducer(
            trading.namesrv, group=fresh, check=lambda message: True, topics=[fresh]
        ):
            assert await until_read(trading, fresh, 1) == ["left behind"]

    run(work())


def test_another_process_ends_it_by_the_handle(trading: clusters.Cluster, fresh: str) -> None:
    async def end(how: str, handle: TransactionHandle) -> None:
        command = [sys.executable, "-c", ENDER, trading.namesrv, how, str(handle)]
        await asyncio.to_thread(subprocess.run, command, check=True, timeout=30)

    async def work() -> None:
        async with AsyncTransactionProducer(trading.namesrv, group=fresh) as producer:
            good = await producer.prepare(Message(fresh, b"good"))
            bad = await producer.prepare(Message(fresh, b"bad"))
        await end("commit", good)
        await end("rollback", bad)
        assert await until_read(trading, fresh, 1) == ["good"]

    run(work())


@pytest.mark.skipif(clusters.APACHE, reason="Apache forgets what became of a transaction")
def test_ending_it_twice(trading: clusters.Cluster, fresh: str) -> None:
    async def work() -> None:
        async with AsyncTransactionProducer(trading.namesrv, group=fresh) as producer:
            good = await producer.prepare(Message(fresh, b"good"))
            await producer.commit(good)
            await producer.commit(good)
            with pytest.raises(TransactionCommitted):
                await producer.rollback(good)
            bad = await producer.prepare(Message(fresh, b"bad"))
            await producer.rollback(bad)
            with pytest.raises(TransactionRolledBack):
                await producer.commit(bad)
            assert await read_bodies(trading.namesrv, fresh) == ["good"]

    run(work())
