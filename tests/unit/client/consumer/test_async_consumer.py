"""The push-style consumer without servers: its options, and the order of its life."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from penstock.client.consumer.async_consumer import AsyncConsumer
from penstock.client.consumer.consumer_options import ConsumerOptions
from penstock.client.consumer.pull_loop import AGAIN_MS_MAX, Puller
from penstock.client.consumer.rebalance import Rebalancer
from penstock.client.consumer.subscription import Subscription
from penstock.client.messages import MessageQueue
from penstock.errors import (
    BadFilter,
    BadSetting,
    ClientClosed,
    ClientForked,
    InvalidParameter,
    NoNameServer,
)
from penstock.testing.clock import VirtualClock
from tests.unit.client.consumer.consumer_kit import QUEUE

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


class Silent:
    """A NameServer that takes calls and never answers."""

    async def __aenter__(self) -> str:
        self.server = await asyncio.start_server(self._talk, "127.0.0.1", 0)
        host, port = self.server.sockets[0].getsockname()
        self.heard = asyncio.Event()
        return f"{host}:{port}"

    async def __aexit__(self, *_: object) -> None:
        self.server.close()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1000):
            self.heard.set()
        writer.close()


def test_closing_ends_what_is_about_to_begin() -> None:
    async def iterate(consumer: AsyncConsumer) -> None:
        async for _ in consumer:
            raise AssertionError

    async def test() -> None:
        for begin in (AsyncConsumer.run, iterate):
            silent = Silent()
            async with silent as address:
                consumer = AsyncConsumer(address, group="g")
                consumer.subscribe("T")
                running = asyncio.ensure_future(begin(consumer))
                await silent.heard.wait()
                await consumer.close()
                await running  # as after any close: it ends, and nobody is cancelled
                with pytest.raises(ClientClosed):
                    await consumer.run()

    run(test)


def test_start_says_that_it_was_closed_meanwhile() -> None:
    async def test() -> None:
        silent = Silent()
        async with silent as address:
            consumer = AsyncConsumer(address, group="g")
            consumer.subscribe("T")
            starting = asyncio.ensure_future(consumer.start())
            await silent.heard.wait()
            await asyncio.gather(consumer.close(), consumer.close())
            with pytest.raises(ClientClosed):
                await starting

    run(test)


def test_a_close_before_the_session_has_begun_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        consumer = AsyncConsumer(NOBODY, group="g")
        gate, begun = asyncio.Event(), asyncio.Event()

        async def slow() -> None:
            begun.set()
            await gate.wait()

        monkeypatch.setattr(consumer._session.nameservers, "start", slow)
        starting = [asyncio.ensure_future(consumer.start()) for _ in range(2)]
        await begun.wait()
        await consumer.close()
        gate.set()
        with pytest.raises(ClientClosed):
            await starting[0]
        await starting[1]  # begins after the close
        assert len(asyncio.all_tasks()) == 4  # main, this, and once what a session keeps doing
        await consumer.close()

    run(test)


def test_a_start_that_was_cancelled_may_be_tried_again() -> None:
    async def test() -> None:
        silent = Silent()
        async with silent as address:
            consumer = AsyncConsumer(address, group="g", timeout_ms=100)
            consumer.subscribe("T")
            starting = asyncio.ensure_future(consumer.start())
            await silent.heard.wait()
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert not consumer._session.started
            with pytest.raises(NoNameServer):
                await consumer.start()

    run(test)


def test_stop_may_be_called_in_a_thread() -> None:
    async def test() -> None:
        consumer = AsyncConsumer(NOBODY, group="g")
        await consumer.start()
        waiting = asyncio.ensure_future(consumer._ended.wait())
        await asyncio.sleep(0)
        asyncio.get_running_loop().set_debug(True)  # says what is not safe in threads
        await asyncio.to_thread(consumer.stop)
        await waiting
        await consumer.close()

    run(test)


def test_explain_before_there_is_anything() -> None:
    async def test() -> None:
        async with AsyncConsumer(NOBODY, group="g") as consumer:
            assert await consumer.explain() == ["nothing is subscribed"]

    run(test)


def test_subscriptions_have_growing_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    consumer = AsyncConsumer(group="g", clock=clock)
    versions = []
    for tags in ("a", "b", "c"):
        consumer.subscribe("T", tags)
        versions += [s.sub_version for s in consumer._core.subscriptions() if s.topic == "T"]
    assert versions == [clock.now_ms() + n for n in range(3)]


def test_a_puller_that_fails_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sharing:
        def __init__(self) -> None:
            self.given_up: list[MessageQueue] = []

        async def give_up(self, queue: MessageQueue) -> None:
            self.given_up.append(queue)

    async def fail(puller: Puller) -> None:
        raise KeyError("nobody thought of it")

    async def test() -> None:
        clock = VirtualClock()
        consumer = AsyncConsumer(NOBODY, group="g", clock=clock)
        await consumer._session.start()
        core, sharing = consumer._core, Sharing()
        core.subscribe(Subscription("Orders"), merge=False)
        await asyncio.gather(core.begin(), return_exceptions=True)
        core._make_dispatch()
        core._rebalancer = cast(Rebalancer, sharing)
        monkeypatch.setattr(Puller, "run", fail)
        core.take(QUEUE, 7)
        await clock.elapse(AGAIN_MS_MAX)
        assert sharing.given_up == [QUEUE]
        assert not core._pullers
        await consumer.close()

    run(test)
