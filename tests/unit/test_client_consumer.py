"""The push-style consumer without servers: its options, and the order of its life."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from penstock.client.consumer import AsyncConsumer
from penstock.client.consumer_options import ConsumerOptions
from penstock.errors import (
    BadFilter,
    BadSetting,
    ClientClosed,
    ClientForked,
    InvalidParameter,
    NoNameServer,
)

NOBODY = "127.0.0.1:1"


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(test(), 20)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"group": ""}, "group"),
        ({"group": "a b"}, "group"),
        ({"model": "both"}, "model"),
        ({"concurrency": 0}, "concurrency"),
        ({"handle_batch": 0}, "handle_batch"),
        ({"pull_batch": 0}, "pull_batch"),
        ({"messages_max": 0}, "messages_max"),
        ({"bytes_max": 0}, "bytes_max"),
        ({"drain_ms": -1}, "drain_ms"),
        ({"start_at": "middle"}, "start_at"),
        ({"strategy": "mine"}, "mine"),
        ({"offsets_path": "x"}, "offsets_path"),
    ],
)
def test_options_are_checked(options: dict[str, Any], word: str) -> None:
    with pytest.raises(BadSetting, match=word):
        AsyncConsumer(**{"group": "g", **options})


def test_retries_are_rocketmqs_unless_given() -> None:
    assert ConsumerOptions(group="g").retries == 16
    assert ConsumerOptions(group="g", orderly=True).retries == -1
    assert ConsumerOptions(group="g", orderly=True, retries_max=3).retries == 3


def test_subscriptions_are_checked() -> None:
    consumer = AsyncConsumer(group="g")
    with pytest.raises(BadSetting, match="topic"):
        consumer.subscribe("no such name")
    with pytest.raises(BadFilter):
        consumer.subscribe("T", "a", sql="b = 1")
    consumer.subscribe("T", "a")
    consumer.subscribe("T", sql="b = 1")  # replaces
    with pytest.raises(BadFilter):

        @consumer.on("T", tags="a")
        def handle(message: object) -> None: ...


def test_without_a_nameserver_nothing_begins() -> None:
    async def test() -> None:
        consumer = AsyncConsumer(NOBODY, group="g")
        consumer.subscribe("T")
        for _ in range(2):
            with pytest.raises(NoNameServer, match=NOBODY):
                await consumer.start()
        with pytest.raises(NoNameServer, match=NOBODY):
            await consumer.run()
        with pytest.raises(NoNameServer, match=NOBODY):
            await anext(aiter(consumer))
        assert len(asyncio.all_tasks()) == 2

    run(test)


def test_run_needs_something_to_consume() -> None:
    async def test() -> None:
        with pytest.raises(InvalidParameter, match="nothing is subscribed"):
            await AsyncConsumer(NOBODY, group="g").run()
        async with AsyncConsumer(NOBODY, group="g") as consumer:
            assert consumer.queues() == []
            with pytest.raises(InvalidParameter, match="nothing is subscribed"):
                await anext(aiter(consumer))

    run(test)


def test_a_handler_inside_the_block_lets_it_begin(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with AsyncConsumer(NOBODY, group="g") as consumer:

            @consumer.on("T")
            async def handle(message: object) -> None: ...

            with pytest.raises(NoNameServer):
                await consumer.run()

    run(test)
    assert "g: consuming can't begin: no NameServer answers" in caplog.text


def test_closed_is_closed() -> None:
    async def test() -> None:
        consumer = AsyncConsumer(NOBODY, group="g")
        await consumer.close()  # never started: nothing to do
        await consumer.start()
        await consumer.close()
        await consumer.close()
        with pytest.raises(ClientClosed):
            await consumer.start()

    run(test)


def test_stop_lets_run_end() -> None:
    async def test() -> None:
        consumer = AsyncConsumer(NOBODY, group="g")
        consumer.stop()
        consumer.subscribe("T")
        with pytest.raises(NoNameServer):
            await consumer.run()

    run(test)


def test_a_forked_consumer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        consumer = AsyncConsumer(NOBODY, group="g")
        await consumer.start()
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: -1)
            for call in (consumer.queues, consumer.pause, lambda: consumer.subscribe("T")):
                with pytest.raises(ClientForked):
                    call()
            with pytest.raises(ClientForked):
                await consumer.start()
            with pytest.raises(ClientForked):
                await consumer.close()
        await consumer.close()

    run(test)
