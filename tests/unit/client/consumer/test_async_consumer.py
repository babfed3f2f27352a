"""The push consumer without servers: options, start, run and close."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from penstock.client.consumer.async_consumer import AsyncConsumer
from penstock.client.consumer.consumer_options import ConsumerOptions
from penstock.client.consumer.pull_loop import RETRY_MS_MAX, Puller
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
from penstock.testing.virtual_clock import VirtualClock
from tests.unit.client.consumer.consumer_kit import QUEUE

DEAD_ADDRESS = "127.0.0.1:1"


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


def test_default_retries_are_those_of_rocketmq() -> None:
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


def test_start_fails_without_a_nameserver() -> None:
    async def test() -> None:
        consumer = AsyncConsumer(DEAD_ADDRESS, group="g")
        consumer.subscribe("T")
        for _ in range(2):
            with pytest.raises(NoNameServer, match=DEAD_ADDRESS):
                await consumer.start()
        with pytest.raises(NoNameServer, match=DEAD_ADDRESS):
            await consumer.run()
        with pytest.raises(NoNameServer, match=DEAD_ADDRESS):
            await anext(aiter(consumer))
        assert len(asyncio.all_tasks()) == 2

    run(test)


def test_run_needs_a_subscription() -> None:
    async def test() -> None:
        with pytest.raises(InvalidParameter, match="there is no subscription"):
            await AsyncConsumer(DEAD_ADDRESS, group="g").run()
        async with AsyncConsumer(DEAD_ADDRESS, group="g") as consumer:
            assert consumer.queues() == []
            with pytest.raises(InvalidParameter, match="there is no subscription"):
                await anext(aiter(consumer))

    run(test)


def test_handler_added_inside_the_block_starts_consuming(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with AsyncConsumer(DEAD_ADDRESS, group="g") as consumer:

            @consumer.on("T")
            async def handle(message: object) -> None: ...

            with pytest.raises(NoNameServer):
                await consumer.run()

    run(test)
    assert "g: cannot start consuming: no NameServer answers" in caplog.text


def test_closed_consumer_cannot_be_started_again() -> None:
    async def test() -> None:
        consumer = AsyncConsumer(DEAD_ADDRESS, group="g")
        await consumer.close()  # never started: nothing to do
        await consumer.start()
        await consumer.close()
        await consumer.close()
        with pytest.raises(ClientClosed):
            await consumer.start()

    run(test)


def test_stop_ends_run() -> None:
    async def test() -> None:
        consumer = AsyncConsumer(DEAD_ADDRESS, group="g")
        consumer.stop()
        consumer.subscribe("T")
        with pytest.raises(NoNameServer):
            await consumer.run()

    run(test)


def test_forked_consumer_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        consumer = AsyncConsumer(DEAD_ADDRESS, group="g")
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
    """A NameServer that never answers."""

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


def test_close_cancels_a_start_in_progress() -> None:
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
                await running  # as after any close: it ends without a cancellation
                with pytest.raises(ClientClosed):
                    await consumer.run()

    run(test)


def test_start_raises_if_closed_meanwhile() -> None:
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


def test_close_before_the_session_is_started_cancels_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        consumer = AsyncConsumer(DEAD_ADDRESS, group="g")
        release, begun = asyncio.Event(), asyncio.Event()

        async def slow() -> None:
            begun.set()
            await release.wait()

        monkeypatch.setattr(consumer._session.nameservers, "start", slow)
        starting = [asyncio.ensure_future(consumer.start()) for _ in range(2)]
        await begun.wait()
        await consumer.close()
        release.set()
        with pytest.raises(ClientClosed):
            await starting[0]
        await starting[1]  # starts after the close
        assert len(asyncio.all_tasks()) == 4  # the main task, this one, and one of the session
        await consumer.close()

    run(test)


def test_cancelled_start_can_be_repeated() -> None:
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


def test_stop_can_be_called_in_a_thread() -> None:
    async def test() -> None:
        consumer = AsyncConsumer(DEAD_ADDRESS, group="g")
        await consumer.start()
        waiting = asyncio.ensure_future(consumer._ended.wait())
        await asyncio.sleep(0)
        asyncio.get_running_loop().set_debug(True)  # reports calls that are not thread-safe
        await asyncio.to_thread(consumer.stop)
        await waiting
        await consumer.close()

    run(test)


def test_explain_before_the_start() -> None:
    async def test() -> None:
        async with AsyncConsumer(DEAD_ADDRESS, group="g") as consumer:
            assert await consumer.explain() == ["there is no subscription"]

    run(test)


def test_subscriptions_have_growing_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = VirtualClock()
    consumer = AsyncConsumer(group="g", clock=clock)
    versions = []
    for tags in ("a", "b", "c"):
        consumer.subscribe("T", tags)
        versions += [s.sub_version for s in consumer._core.subscriptions() if s.topic == "T"]
    assert versions == [clock.now_ms() + n for n in range(3)]


def test_queue_is_restarted_after_a_failure_of_its_pull_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    restarted: list[MessageQueue] = []

    async def restart_queue(rebalancer: Rebalancer, queue: MessageQueue) -> None:
        restarted.append(queue)

    async def fail(puller: Puller) -> None:
        raise KeyError("unexpected")

    async def test() -> None:
        clock = VirtualClock()
        consumer = AsyncConsumer(DEAD_ADDRESS, group="g", clock=clock)
        await consumer._session.start()
        core = consumer._core
        core.subscribe(Subscription("Orders"), merge=False)
        await asyncio.gather(core.start(), return_exceptions=True)
        monkeypatch.setattr(Rebalancer, "restart_queue", restart_queue)
        monkeypatch.setattr(Puller, "run", fail)
        core.add_queue(QUEUE, 7)
        await clock.elapse(RETRY_MS_MAX)
        assert restarted == [QUEUE]
        assert not core._pull_tasks
        await consumer.close()

    run(test)
