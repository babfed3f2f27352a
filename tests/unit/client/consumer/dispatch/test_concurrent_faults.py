"""Unusual handlers, handlers that raise or hang, dropped queues, threads that fail to start."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from penstock.client.consumer.dispatch.completion import LOCAL_RETRY_MS
from penstock.client.consumer.dispatch.concurrent import CANCEL_MS
from penstock.client.consumer.dispatch.handler_calls import is_handling
from penstock.client.consumer.dispatch.handlers import Handlers
from penstock.client.received_message import ReceivedMessage
from penstock.errors import InvalidParameter, PeerLost
from tests.unit.client.consumer.consumer_kit import (
    FakeSendBack,
    make_process_queue,
    messages,
    until,
)
from tests.unit.client.consumer.dispatch.test_concurrent import (
    KINDS,
    DispatchFixture,
    handler_of,
    run,
)


def test_coroutine_returned_by_a_plain_function_is_awaited() -> None:
    async def test() -> None:
        fixture = DispatchFixture()
        done: list[int] = []

        async def real(message: ReceivedMessage) -> bool:
            await asyncio.sleep(0)
            done.append(message.queue_offset)
            return message.queue_offset != 1

        fixture.on(lambda message: real(message))
        fixture.give(0, 1)
        await fixture.wait_for_progress(2)
        assert sorted(done) == [0, 1]
        assert fixture.send_back.taken == [(1, 0)]
        await fixture.close()

    run(test)


def test_generator_functions_are_refused_as_handlers() -> None:
    def plain(message: object) -> Iterator[object]:
        yield message

    async def later(message: object) -> AsyncIterator[object]:
        yield message

    for function in (plain, later):
        with pytest.raises(InvalidParameter, match="generator"):
            Handlers().add("Orders", "*", function)


class Ended(BaseException):
    """A BaseException, as the outcomes of pytest and others."""


@pytest.mark.parametrize("batch", [1, 2])
@KINDS
def test_any_exception_of_a_handler_is_a_failure(kind: str, batch: int) -> None:
    def handle(argument: object) -> None:
        raise Ended

    async def test() -> None:
        fixture = DispatchFixture(handle_batch=batch)
        fixture.on(handler_of(kind, handle))
        fixture.give(0, 1)
        await fixture.wait_for_progress(2)
        assert sorted(fixture.send_back.taken) == [(0, 0), (1, 0)]
        await fixture.close()

    run(test)


def test_message_being_sent_back_is_not_sent_back_again() -> None:
    async def test() -> None:
        fixture = DispatchFixture()
        release, taken = asyncio.Event(), asyncio.Event()

        async def slow_back(message: ReceivedMessage, delay_level: int) -> None:
            fixture.send_back.taken.append((message.queue_offset, delay_level))
            taken.set()
            await release.wait()

        fixture.completion._send_back = slow_back

        async def handle(message: ReceivedMessage) -> bool:
            fixture.session.clock.advance(1_001)
            return False

        fixture.on(handle)
        fixture.give(0)
        await taken.wait()
        await fixture.completion.expire_stuck([fixture.queue], 1_000)
        release.set()
        await fixture.wait_for_progress(1)
        assert fixture.send_back.taken == [(0, 0)]
        await fixture.close()

    run(test)


def test_stuck_message_that_no_broker_takes_back_is_handled_again() -> None:
    async def test() -> None:
        fixture = DispatchFixture(
            send_back=FakeSendBack([PeerLost("gone", address="b:1") for _ in range(3)])
        )
        began: list[int] = []
        release = asyncio.Event()

        async def handle(message: ReceivedMessage) -> None:
            began.append(message.local_retries)
            if len(began) == 1:
                await release.wait()

        fixture.on(handle)
        fixture.give(0)
        await until(lambda: bool(began))
        fixture.session.clock.advance(1_001)
        for _ in range(3):
            await fixture.completion.expire_stuck([fixture.queue], 1_000)
        await fixture.session.clock.elapse(LOCAL_RETRY_MS)
        await fixture.wait_for_progress(1)
        await until(lambda: not fixture.session.tasks)
        assert began == [0, 1]
        assert fixture.queue.failed == 1
        release.set()
        await fixture.close()

    run(test)


@KINDS
def test_messages_of_a_dropped_queue_are_discarded(kind: str) -> None:
    async def test() -> None:
        fixture = DispatchFixture(concurrency=1)
        thread_release, release = threading.Event(), asyncio.Event()
        began: list[int] = []

        def slow(message: ReceivedMessage) -> None:
            began.append(message.queue_offset)
            thread_release.wait()

        async def slow_async(message: ReceivedMessage) -> None:
            began.append(message.queue_offset)
            await release.wait()

        fixture.on(slow if kind == "sync" else slow_async)
        fixture.give(*range(100))
        await until(lambda: bool(began))
        other = make_process_queue(500)
        kept = messages(500)
        other.add(kept, 501)
        fixture.dispatch.submit(other, kept)
        fixture.queue.drop()
        await fixture.dispatch.stop(fixture.queue)
        jobs = fixture.dispatch._jobs or fixture.dispatch._threads._jobs
        assert list(jobs) == kept
        thread_release.set()
        release.set()
        await until(lambda: other.progress == 501)
        assert began == [0, 500]
        await fixture.close()

    run(test)


def test_close_does_not_wait_for_a_handler_that_ignores_cancellation() -> None:
    async def test() -> None:
        fixture = DispatchFixture()
        release = asyncio.Event()
        began: list[int] = []

        async def stubborn(message: ReceivedMessage) -> None:
            began.append(1)
            while not release.is_set():
                try:
                    await release.wait()
                except asyncio.CancelledError:
                    continue

        fixture.on(stubborn)
        fixture.give(0)
        await until(lambda: bool(began))
        closing = asyncio.ensure_future(fixture.dispatch.close(100))
        await fixture.session.clock.elapse(100 + CANCEL_MS)
        await closing
        assert fixture.queue.progress == 0
        release.set()
        await until(lambda: not fixture.dispatch._workers)

    run(test)


def test_failed_thread_start_is_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        fixture = DispatchFixture()
        seen: list[int] = []
        fixture.on(lambda message: seen.append(message.queue_offset))
        with monkeypatch.context() as full:

            def refuse(thread: threading.Thread) -> None:
                raise RuntimeError("can't start new thread")

            full.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError):
                fixture.give(0)
        fixture.give(1)
        await fixture.wait_for_progress(2)
        assert sorted(seen) == [0, 1]
        await fixture.close()

    run(test)


def test_is_handling_only_in_handlers_of_the_consumer() -> None:
    async def test() -> None:
        fixture, stranger = DispatchFixture(), DispatchFixture()
        inside: list[bool] = []

        async def handle(message: object) -> None:
            inside.extend([is_handling(fixture.completion), is_handling(stranger.completion)])

        fixture.on(handle)
        fixture.give(0)
        await fixture.wait_for_progress(1)
        assert inside == [True, False]
        assert not is_handling(fixture.completion)
        await fixture.close()

    run(test)
