"""Transactions: commit, rollback, checks, and ends by another process."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Sequence

import pytest

from penstock import AsyncTransactionProducer, Decision, Message, ReceivedMessage, TransactionHandle
from penstock.errors import PenstockError

from .environment import Environment, eventually, text


def _producer(env: Environment, **options: object) -> AsyncTransactionProducer:
    return env.make(AsyncTransactionProducer, **{"group": env.name("tx"), **options})


async def _delivered(env: Environment, topic: str, bodies: Sequence[str]) -> None:
    await eventually(lambda: sorted(text(env.stored(topic))) == sorted(bodies))


async def test_a_block_that_ends_normally_commits(env: Environment) -> None:
    topic = env.topic()
    async with _producer(env) as producer:
        message = Message(topic, "paid", tags="t", keys=["k"], properties={"a": "b"})
        async with producer.transaction(message) as tx:
            assert tx.receipt.message_id if hasattr(tx, "receipt") else True
            assert env.stored(topic) == [], "a half message is invisible"
        await _delivered(env, topic, ["paid"])
    (stored,) = env.stored(topic)
    assert (stored.tags, stored.keys, stored.properties["a"]) == ("t", ["k"], "b")
    assert stored.unique_id


async def test_an_exception_in_the_block_rolls_back_and_is_raised(env: Environment) -> None:
    topic = env.topic()
    async with _producer(env) as producer:
        with pytest.raises(ZeroDivisionError):
            async with producer.transaction(Message(topic, "never")):
                raise ZeroDivisionError
        async with producer.transaction(Message(topic, "committed")):
            pass
        await _delivered(env, topic, ["committed"])
        # A rolled back message is not checked; a check would come within seconds.
        async with producer.transaction(Message(topic, "last")):
            await asyncio.sleep(0)
        await _delivered(env, topic, ["committed", "last"])


async def test_another_producer_can_end_a_transaction_by_its_handle(env: Environment) -> None:
    topic = env.topic()
    async with _producer(env) as producer:
        kept = await producer.prepare(Message(topic, "kept"))
        dropped = await producer.prepare(Message(topic, "dropped"))
    assert len(str(kept)) < 500
    assert TransactionHandle.parse(str(kept)) == kept
    assert pickle.loads(pickle.dumps(dropped)) == dropped
    async with _producer(env) as other:
        await other.commit(TransactionHandle.parse(str(kept)))
        await other.rollback(pickle.loads(pickle.dumps(dropped)))
        await _delivered(env, topic, ["kept"])


END = """
import asyncio, sys
from penstock import AsyncTransactionProducer, TransactionHandle

async def main(nameservers, group, handle):
    async with AsyncTransactionProducer(nameservers, group=group) as producer:
        await producer.commit(TransactionHandle.parse(handle))

asyncio.run(main(*sys.argv[1:]))
"""


async def test_another_process_can_commit_a_transaction(env: Environment) -> None:
    topic = env.topic()
    async with _producer(env) as producer:
        handle = await producer.prepare(Message(topic, "across"))
        command = [sys.executable, "-c", END, env.nameservers, env.name("tx"), str(handle)]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        await _delivered(env, topic, ["across"])


def test_text_that_is_not_a_handle_is_refused() -> None:
    for bad in ("", "x", "a:b:c:d:e:f:g", "{}", "é" * 50):
        with pytest.raises((PenstockError, ValueError)):
            TransactionHandle.parse(bad)


async def test_open_half_messages_are_checked(env: Environment) -> None:
    topic = env.topic()
    asked: list[ReceivedMessage] = []
    answers: dict[str, list[Decision | bool | Exception | None]] = {
        "commit": [Decision.COMMIT],
        "true": [True],
        "later": [Decision.UNKNOWN, None, Decision.COMMIT],
        "raises": [None, ValueError("the database is down"), Decision.COMMIT],
        "rollback": [Decision.ROLLBACK],
        "false": [False],
    }

    def check(message: ReceivedMessage) -> Decision | bool | None:
        asked.append(message)
        answer = answers[message.body.decode()].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async with _producer(env, check=check) as producer:
        handles = {
            body: await producer.prepare(Message(topic, body, keys=[body], properties={"p": body}))
            for body in answers
        }
        assert len(handles) == 6
        await _delivered(env, topic, ["commit", "true", "later", "raises"])
        await eventually(lambda: not any(answers.values()))
    first = next(message for message in asked if message.body == b"later")
    assert (first.topic, list(first.keys), first.properties["p"]) == (topic, ["later"], "later")
    stored = {message.body.decode(): message for message in env.stored(topic)}
    assert first.message_id == stored["later"].unique_id
    assert "rollback" not in stored
    assert "false" not in stored


async def test_a_check_may_be_a_coroutine_or_a_decorated_function(env: Environment) -> None:
    topic = env.topic()
    async with _producer(env) as producer:

        @producer.checker
        async def decide(message: ReceivedMessage) -> Decision:
            await asyncio.sleep(0.01)
            return Decision.COMMIT if message.body == b"yes" else Decision.ROLLBACK

        await producer.prepare(Message(topic, "no"))
        await producer.prepare(Message(topic, "yes"))
        await _delivered(env, topic, ["yes"])


async def test_half_messages_of_a_dead_producer_are_checked_with_another_of_its_group(
    env: Environment,
) -> None:
    topic = env.topic()
    async with _producer(env) as producer:
        await producer.prepare(Message(topic, "orphan"))
    # It has sent nothing: `topics` name the brokers that may check.
    async with _producer(env, check=lambda message: Decision.COMMIT, topics=[topic]):
        await _delivered(env, topic, ["orphan"])
