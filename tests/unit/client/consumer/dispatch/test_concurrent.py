"""Concurrent dispatch: tasks, threads, failures, timeouts, close."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from penstock.client.client_session import Session
from penstock.client.consumer.dispatch.completion import LOCAL_RETRY_MS, Completion
from penstock.client.consumer.dispatch.concurrent import MESSAGES_PER_TURN, ConcurrentDispatch
from penstock.client.consumer.dispatch.handler_calls import HandlerCalls
from penstock.client.consumer.dispatch.handlers import Handlers, Retry
from penstock.client.received_message import ReceivedMessage
from penstock.errors import PeerLost
from tests.unit.client.consumer.consumer_kit import (
    FakeSendBack,
    PlainSession,
    make_process_queue,
    messages,
    until,
)


class DispatchFixture:
    """A concurrent dispatch with one queue."""

    def __init__(
        self,
        *,
        broadcast: bool = False,
        concurrency: int = 4,
        handle_batch: int = 1,
        send_back: FakeSendBack | None = None,
    ) -> None:
        self.session = PlainSession()
        session = cast(Session, self.session)
        self.send_back = send_back or FakeSendBack()
        self.completion = Completion(
            session,
            "g",
            send_back=None if broadcast else self.send_back,
            retries_max=16,
            resubmit=lambda message: self.dispatch.submit(self.queue, [message]),
        )
        self.handlers = Handlers(takes_list=handle_batch > 1)
        self.calls = HandlerCalls(
            self.handlers, self.completion, None, name="test", threads=concurrency
        )
        self.dispatch = ConcurrentDispatch(
            session,
            self.handlers,
            self.calls,
            self.completion,
            name="test",
            concurrency=concurrency,
            handle_batch=handle_batch,
        )
        self.queue = make_process_queue()

    def on(self, function: Callable[..., Any], tags: str = "*") -> None:
        self.handlers.add("Orders", tags, function)

    def give(self, *offsets: int, **fields: Any) -> list[ReceivedMessage]:
        got = messages(*offsets, **fields)
        self.queue.add(got, offsets[-1] + 1)
        self.dispatch.submit(self.queue, got)
        return got

    async def wait_for_progress(self, progress: int) -> None:
        await until(lambda: self.queue.progress == progress and self.queue.count == 0)

    async def close(self, drain_ms: int = 10_000) -> None:
        await self.dispatch.close(drain_ms)
        await self.calls.close(cast(Session, self.session), 0)
        await until(lambda: not self.session.tasks)
        assert self.session.failures == []


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(test(), 20)

    asyncio.run(main())


def handler_of(kind: str, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    if kind == "sync":
        return function

    async def handle(argument: Any) -> Any:
        await asyncio.sleep(0)
        return function(argument)

    return handle


KINDS = pytest.mark.parametrize("kind", ["sync", "async"])


@KINDS
def test_every_message_is_handled_and_progress_advances(kind: str) -> None:
    async def test() -> None:
        fixture = DispatchFixture()
        seen: list[int] = []
        fixture.on(handler_of(kind, lambda message: seen.append(message.queue_offset)))
        for start in range(0, 300, 30):
            fixture.give(*range(start, start + 30))
        await fixture.wait_for_progress(300)
        assert sorted(seen) == list(range(300))
        await fixture.close()

    run(test)


@KINDS
def test_failed_messages_are_sent_back_with_their_delay_level(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def handle(message: ReceivedMessage) -> object:
        if message.queue_offset == 0:
            raise ValueError("not today")
        if message.queue_offset == 4:
            message.retry(delay_level=-1)
        return [None, False, Retry(5), True, None, "whatever"][message.queue_offset]

    async def test() -> None:
        fixture = DispatchFixture()
        fixture.on(handler_of(kind, handle))
        fixture.give(0, 1, 2, 3, 4, 5, reconsume_times=3)
        await fixture.wait_for_progress(6)
        assert sorted(fixture.send_back.taken) == [(0, 0), (1, 0), (2, 5), (4, -1)]
        assert fixture.queue.failed == 4
        await fixture.close()

    with caplog.at_level(logging.WARNING):
        run(test)
    (entry,) = caplog.records
    assert "Orders" in entry.message
    assert "retry 4 of 16" in entry.message
    assert entry.exc_info
    assert isinstance(entry.exc_info[1], ValueError)


def test_broadcast_drops_failed_messages(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        fixture = DispatchFixture(broadcast=True)

        async def handle(message: ReceivedMessage) -> None:
            raise ValueError("no")

        fixture.on(handle)
        fixture.give(0)
        await fixture.wait_for_progress(1)
        assert fixture.send_back.taken == []
        await fixture.close()

    run(test)
    assert "it is dropped" in caplog.text


def test_message_that_no_broker_takes_back_is_handled_again() -> None:
    async def test() -> None:
        fixture = DispatchFixture(send_back=FakeSendBack([PeerLost("gone")]))
        times: list[int] = []

        async def handle(message: ReceivedMessage) -> bool:
            times.append(message.reconsume_times)
            return len(times) > 1

        fixture.on(handle)
        fixture.give(0)
        await until(lambda: fixture.session.clock.pending() == 1)
        assert fixture.queue.progress == 0
        await fixture.session.clock.elapse(LOCAL_RETRY_MS)
        await fixture.wait_for_progress(1)
        assert times == [0, 1]
        assert fixture.send_back.taken == []
        await fixture.close()

    run(test)


@KINDS
def test_slow_message_does_not_delay_others(kind: str) -> None:
    async def test() -> None:
        fixture = DispatchFixture(concurrency=2)
        thread_release = threading.Event()
        release = asyncio.Event()

        def slow(message: ReceivedMessage) -> None:
            if message.queue_offset == 0:
                thread_release.wait()

        async def slow_async(message: ReceivedMessage) -> None:
            if message.queue_offset == 0:
                await release.wait()

        fixture.on(slow if kind == "sync" else slow_async)
        fixture.give(*range(50))
        await until(lambda: fixture.queue.count == 1)
        assert fixture.queue.progress == 0
        thread_release.set()
        release.set()
        await fixture.wait_for_progress(50)
        await fixture.close()

    run(test)


@KINDS
def test_ordered_concurrency_is_limited(kind: str) -> None:
    async def test() -> None:
        fixture = DispatchFixture(concurrency=3)
        lock = threading.Lock()
        running = most = 0
        barrier = threading.Barrier(3)

        def enter() -> None:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)

        def leave() -> None:
            nonlocal running
            with lock:
                running -= 1

        def handle(message: ReceivedMessage) -> None:
            enter()
            barrier.wait(10)
            leave()

        async def handle_async(message: ReceivedMessage) -> None:
            enter()
            for _ in range(10):
                await asyncio.sleep(0)
            leave()

        fixture.on(handle if kind == "sync" else handle_async)
        fixture.give(*range(30))
        await fixture.wait_for_progress(30)
        assert most == 3
        await fixture.close()

    run(test)


def test_messages_of_a_topic_go_to_handlers_by_tag() -> None:
    async def test() -> None:
        fixture = DispatchFixture()
        seen: list[tuple[str, str | None, bool]] = []
        main = threading.get_ident()

        def plain(message: ReceivedMessage) -> None:
            seen.append(("plain", message.tags, threading.get_ident() == main))

        async def on_loop(message: ReceivedMessage) -> None:
            seen.append(("loop", message.tags, threading.get_ident() == main))

        fixture.on(plain, "a || b")
        fixture.on(on_loop, "c")
        for offset, tag in enumerate("abcd"):
            fixture.give(offset, properties={"TAGS": tag})
        await fixture.wait_for_progress(4)
        assert sorted(seen) == [
            ("loop", "c", True), ("plain", "a", False), ("plain", "b", False),
            ("plain", "d", False),
        ]  # fmt: skip
        await fixture.close()

    run(test)


@KINDS
def test_handlers_take_lists_of_messages(kind: str) -> None:
    async def test() -> None:
        fixture = DispatchFixture(handle_batch=4)
        sizes: list[int] = []

        def handle(got: list[ReceivedMessage]) -> None:
            sizes.append(len(got))
            got[0].retry(2)

        fixture.on(handler_of(kind, handle))
        fixture.give(*range(10))
        await fixture.wait_for_progress(10)
        assert sorted(sizes) == [2, 4, 4]
        assert sorted(fixture.send_back.taken) == [(0, 2), (4, 2), (8, 2)]
        await fixture.close()

    run(test)


def test_message_without_handler_is_redelivered(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        fixture = DispatchFixture()

        async def handle(message: ReceivedMessage) -> None: ...

        fixture.handlers.add("Another", "*", handle)
        fixture.give(0)
        await fixture.wait_for_progress(1)
        assert fixture.send_back.taken == [(0, 0)]
        await fixture.close()

    run(test)
    assert "no handler for topic 'Orders'" in caplog.text


def test_cancellation_inside_a_handler_is_a_failure() -> None:
    async def test() -> None:
        fixture = DispatchFixture()

        async def handle(message: ReceivedMessage) -> None:
            raise asyncio.CancelledError

        fixture.on(handle)
        fixture.give(0, 1)
        await fixture.wait_for_progress(2)
        assert fixture.send_back.taken == [(0, 0), (1, 0)]
        await fixture.close()

    run(test)


@KINDS
def test_messages_of_stuck_handlers_are_sent_back(kind: str) -> None:
    async def test() -> None:
        fixture = DispatchFixture()
        thread_release = threading.Event()
        release = asyncio.Event()
        began: list[int] = []

        def slow(message: ReceivedMessage) -> None:
            began.append(1)
            thread_release.wait()

        async def slow_async(message: ReceivedMessage) -> None:
            began.append(1)
            await release.wait()

        fixture.on(slow if kind == "sync" else slow_async)
        fixture.give(0)
        await until(lambda: bool(began))
        fixture.session.clock.advance(900_001)
        await fixture.completion.expire_stuck([fixture.queue], 900_000)
        assert fixture.send_back.taken == [(0, 3)]
        assert fixture.queue.progress == 1
        thread_release.set()
        release.set()
        await fixture.close()
        assert fixture.queue.finished == 1
        assert fixture.send_back.taken == [(0, 3)]

    run(test)


@KINDS
def test_results_for_a_dropped_queue_are_ignored(kind: str) -> None:
    async def test() -> None:
        fixture = DispatchFixture(concurrency=1)
        thread_release = threading.Event()
        release = asyncio.Event()
        began: list[int] = []

        def slow(message: ReceivedMessage) -> None:
            began.append(message.queue_offset)
            thread_release.wait()
            raise ValueError("too late")

        async def slow_async(message: ReceivedMessage) -> None:
            began.append(message.queue_offset)
            await release.wait()
            raise ValueError("too late")

        fixture.on(slow if kind == "sync" else slow_async)
        fixture.give(0, 1)
        await until(lambda: bool(began))
        fixture.queue.drop()
        thread_release.set()
        release.set()
        await fixture.close()
        assert began == [0]
        assert fixture.send_back.taken == []
        assert fixture.queue.progress == 0

    run(test)


@KINDS
def test_close_waits_for_running_handlers_and_starts_no_more(kind: str) -> None:
    async def test() -> None:
        fixture = DispatchFixture(concurrency=1)
        thread_release = threading.Event()
        release = asyncio.Event()
        began: list[int] = []

        def slow(message: ReceivedMessage) -> None:
            began.append(message.queue_offset)
            thread_release.wait()

        async def slow_async(message: ReceivedMessage) -> None:
            began.append(message.queue_offset)
            await release.wait()

        fixture.on(slow if kind == "sync" else slow_async)
        fixture.give(0, 1, 2)
        await until(lambda: bool(began))
        closing = asyncio.ensure_future(fixture.close())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not closing.done()
        thread_release.set()
        release.set()
        await closing
        assert began == [0]
        assert fixture.queue.progress == 1

    run(test)


@KINDS
def test_close_waits_until_failed_messages_are_sent_back(kind: str) -> None:
    async def test() -> None:
        fixture = DispatchFixture()
        began, accepted = asyncio.Event(), asyncio.Event()

        async def slow_back(message: ReceivedMessage, delay_level: int) -> None:
            began.set()
            await accepted.wait()

        fixture.completion._send_back = slow_back
        fixture.on(handler_of(kind, lambda message: False))
        fixture.give(0)
        await began.wait()
        closing = asyncio.ensure_future(fixture.dispatch.close(10_000))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not closing.done()
        accepted.set()
        await closing
        assert fixture.queue.progress == 1

    run(test)


@KINDS
def test_close_waits_at_most_drain_ms(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        fixture = DispatchFixture()
        thread_release = threading.Event()
        began: list[int] = []

        def slow(message: ReceivedMessage) -> None:
            began.append(1)
            thread_release.wait()

        async def slow_async(message: ReceivedMessage) -> None:
            began.append(1)
            await asyncio.Event().wait()

        fixture.on(slow if kind == "sync" else slow_async)
        fixture.give(0)
        await until(lambda: bool(began))
        closing = asyncio.ensure_future(fixture.dispatch.close(5_000))
        await fixture.session.clock.elapse(5_000)
        await closing
        assert fixture.queue.progress == 0
        thread_release.set()

    run(test)
    assert "1 handlers have not returned within 5000 ms" in caplog.text


def test_handlers_that_never_await_do_not_block_the_loop() -> None:
    async def test() -> None:
        fixture = DispatchFixture(concurrency=1)
        turns: list[int] = []
        seen = 0

        async def handle(message: ReceivedMessage) -> None:
            nonlocal seen
            seen += 1

        def tick() -> None:
            turns.append(seen)
            if seen < 3 * MESSAGES_PER_TURN:
                asyncio.get_running_loop().call_soon(tick)

        fixture.on(handle)
        fixture.give(*range(3 * MESSAGES_PER_TURN))
        tick()
        await fixture.wait_for_progress(3 * MESSAGES_PER_TURN)
        assert {MESSAGES_PER_TURN, 2 * MESSAGES_PER_TURN} <= set(turns)
        await fixture.close()

    run(test)


def test_worker_wakes_others_only_while_messages_are_waiting() -> None:
    async def test() -> None:
        fixture = DispatchFixture(concurrency=8)

        async def handle(message: ReceivedMessage) -> None: ...

        fixture.on(handle)
        for start in range(0, 640, 32):
            fixture.give(*range(start, start + 32))
            await fixture.wait_for_progress(start + 32)
        assert len(asyncio.all_tasks()) <= 4
        await fixture.close()

    run(test)


def test_direct_calls_return_the_result_of_the_handler() -> None:
    async def test() -> None:
        fixture = DispatchFixture()

        def plain(message: ReceivedMessage) -> object:
            if message.queue_offset == 1:
                raise SystemExit(3)
            return "value"

        fixture.on(plain)
        assert await fixture.calls.call(messages(0)) == "value"
        with pytest.raises(RuntimeError, match="SystemExit"):
            await fixture.calls.call(messages(1))
        assert await fixture.calls.handle(messages(0)) is None
        assert await fixture.calls.handle(messages(1)) == Retry()
        await fixture.close()

    run(test)
