"""Handlers in disguise, handlers that raise or hang, queues that go, threads that can't be had."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from penstock.client.consumer.dispatch.completion import AGAIN_MS
from penstock.client.consumer.dispatch.concurrent import END_MS
from penstock.client.consumer.dispatch.handler_calls import is_handling
from penstock.client.consumer.dispatch.handlers import Handlers
from penstock.client.received_message import ReceivedMessage
from penstock.errors import InvalidParameter, PeerLost
from tests.unit.client.consumer.consumer_kit import Backs, messages, until, work
from tests.unit.client.consumer.dispatch.test_concurrent import KINDS, Bench, handler_of, run


def test_a_plain_function_that_gives_a_coroutine_is_waited_for() -> None:
    async def test() -> None:
        bench = Bench()
        done: list[int] = []

        async def real(message: ReceivedMessage) -> bool:
            await asyncio.sleep(0)
            done.append(message.queue_offset)
            return message.queue_offset != 1

        bench.on(lambda message: real(message))
        bench.give(0, 1)
        await bench.settled(2)
        assert sorted(done) == [0, 1]
        assert bench.backs.taken == [(1, 0)]
        await bench.close()

    run(test)


def test_generators_are_no_handlers() -> None:
    def plain(message: object) -> Iterator[object]:
        yield message

    async def later(message: object) -> AsyncIterator[object]:
        yield message

    for function in (plain, later):
        with pytest.raises(InvalidParameter, match="generator"):
            Handlers().add("Orders", "*", function)


class Ended(BaseException):
    """As pytest's and others' outcomes: no Exception."""


@pytest.mark.parametrize("batch", [1, 2])
@KINDS
def test_whatever_a_handler_raises_is_a_failure(kind: str, batch: int) -> None:
    def handle(argument: object) -> None:
        raise Ended

    async def test() -> None:
        bench = Bench(handle_batch=batch)
        bench.on(handler_of(kind, handle))
        bench.give(0, 1)
        await bench.settled(2)
        assert sorted(bench.backs.taken) == [(0, 0), (1, 0)]
        await bench.close()

    run(test)


def test_a_message_on_its_way_back_is_not_handed_back_again() -> None:
    async def test() -> None:
        bench = Bench()
        gate, taken = asyncio.Event(), asyncio.Event()

        async def slow_back(message: ReceivedMessage, delay_level: int) -> None:
            bench.backs.taken.append((message.queue_offset, delay_level))
            taken.set()
            await gate.wait()

        bench.settling._give_back = slow_back

        async def handle(message: ReceivedMessage) -> bool:
            bench.session.clock.advance(1_001)
            return False

        bench.on(handle)
        bench.give(0)
        await taken.wait()
        await bench.settling.expire([bench.queue], 1_000)
        gate.set()
        await bench.settled(1)
        assert bench.backs.taken == [(0, 0)]
        await bench.close()

    run(test)


def test_what_no_broker_takes_back_after_a_timeout_is_handled_once_more() -> None:
    async def test() -> None:
        bench = Bench(backs=Backs([PeerLost("gone", address="b:1") for _ in range(3)]))
        began: list[int] = []
        gate = asyncio.Event()

        async def handle(message: ReceivedMessage) -> None:
            began.append(message.local_retries)
            if len(began) == 1:
                await gate.wait()

        bench.on(handle)
        bench.give(0)
        await until(lambda: bool(began))
        bench.session.clock.advance(1_001)
        for _ in range(3):
            await bench.settling.expire([bench.queue], 1_000)
        await bench.session.clock.elapse(AGAIN_MS)
        await bench.settled(1)
        await until(lambda: not bench.session.tasks)
        assert began == [0, 1]
        assert bench.queue.failed == 1
        gate.set()
        await bench.close()

    run(test)


@KINDS
def test_a_dropped_queue_leaves_no_messages_behind(kind: str) -> None:
    async def test() -> None:
        bench = Bench(concurrency=1)
        release, gate = threading.Event(), asyncio.Event()
        began: list[int] = []

        def slow(message: ReceivedMessage) -> None:
            began.append(message.queue_offset)
            release.wait()

        async def slow_async(message: ReceivedMessage) -> None:
            began.append(message.queue_offset)
            await gate.wait()

        bench.on(slow if kind == "sync" else slow_async)
        bench.give(*range(100))
        await until(lambda: bool(began))
        other = work(500)
        kept = messages(500)
        other.add(kept, 501)
        bench.dispatch.submit(other, kept)
        bench.queue.drop()
        await bench.dispatch.stop(bench.queue)
        jobs = bench.dispatch._jobs or bench.dispatch._threads._jobs
        assert list(jobs) == kept
        release.set()
        gate.set()
        await until(lambda: other.progress == 501)
        assert began == [0, 500]
        await bench.close()

    run(test)


def test_closing_does_not_wait_for_a_handler_that_will_not_be_cancelled() -> None:
    async def test() -> None:
        bench = Bench()
        gate = asyncio.Event()
        began: list[int] = []

        async def stubborn(message: ReceivedMessage) -> None:
            began.append(1)
            while not gate.is_set():
                try:
                    await gate.wait()
                except asyncio.CancelledError:
                    continue

        bench.on(stubborn)
        bench.give(0)
        await until(lambda: bool(began))
        closing = asyncio.ensure_future(bench.dispatch.close(100))
        await bench.session.clock.elapse(100 + END_MS)
        await closing
        assert bench.queue.progress == 0
        gate.set()
        await until(lambda: not bench.dispatch._workers)

    run(test)


def test_a_thread_that_cant_be_started_stops_nothing_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        bench = Bench()
        seen: list[int] = []
        bench.on(lambda message: seen.append(message.queue_offset))
        with monkeypatch.context() as full:

            def refuse(thread: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            full.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError):
                bench.give(0)
        bench.give(1)
        await bench.settled(2)
        assert sorted(seen) == [0, 1]
        await bench.close()

    run(test)


def test_only_handlers_of_a_consumer_are_inside_it() -> None:
    async def test() -> None:
        bench, stranger = Bench(), Bench()
        inside: list[bool] = []

        async def handle(message: object) -> None:
            inside.extend([is_handling(bench.settling), is_handling(stranger.settling)])

        bench.on(handle)
        bench.give(0)
        await bench.settled(1)
        assert inside == [True, False]
        assert not is_handling(bench.settling)
        await bench.close()

    run(test)
