"""Handing messages to handlers: tasks, threads, failures, timeouts, the end."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from penstock.client.client_session import Session
from penstock.client.consumer.dispatch.completion import AGAIN_MS, Settling
from penstock.client.consumer.dispatch.concurrent import RUN_MAX, ConcurrentDispatch
from penstock.client.consumer.dispatch.handler_calls import Calls
from penstock.client.consumer.dispatch.handlers import Handlers, Retry
from penstock.client.received_message import ReceivedMessage
from penstock.errors import PeerLost
from tests.unit.client.consumer.consumer_kit import Backs, PlainSession, messages, until, work


class Bench:
    """A dispatch, and a queue whose messages it handles."""

    def __init__(
        self, *, broadcast: bool = False, concurrency: int = 4, handle_batch: int = 1,
        backs: Backs | None = None,
    ) -> None:  # fmt: skip
        self.session = PlainSession()
        session = cast(Session, self.session)
        self.backs = backs or Backs()
        give_back = None if broadcast else self.backs
        self.settling = Settling(session, "g", give_back=give_back, retries_max=16)
        self.handlers = Handlers(takes_list=handle_batch > 1)
        self.calls = Calls(self.handlers, self.settling, None, name="test", threads=concurrency)
        self.dispatch = ConcurrentDispatch(
            session, self.handlers, self.calls, self.settling, name="test",
            concurrency=concurrency, handle_batch=handle_batch,
        )  # fmt: skip
        self.queue = work()

    def on(self, function: Callable[..., Any], tags: str = "*") -> None:
        self.handlers.add("Orders", tags, function)

    def give(self, *offsets: int, **fields: Any) -> list[ReceivedMessage]:
        got = messages(*offsets, **fields)
        self.queue.add(got, offsets[-1] + 1)
        self.dispatch.submit(self.queue, got)
        return got

    async def settled(self, progress: int) -> None:
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
def test_every_message_is_handled_and_progress_moves(kind: str) -> None:
    async def test() -> None:
        bench = Bench()
        seen: list[int] = []
        bench.on(handler_of(kind, lambda message: seen.append(message.queue_offset)))
        for start in range(0, 300, 30):
            bench.give(*range(start, start + 30))
        await bench.settled(300)
        assert sorted(seen) == list(range(300))
        await bench.close()

    run(test)


@KINDS
def test_failures_go_back_with_what_they_asked_for(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def handle(message: ReceivedMessage) -> object:
        if message.queue_offset == 0:
            raise ValueError("not today")
        if message.queue_offset == 4:
            message.retry(delay_level=-1)
        return [None, False, Retry(5), True, None, "whatever"][message.queue_offset]

    async def test() -> None:
        bench = Bench()
        bench.on(handler_of(kind, handle))
        bench.give(0, 1, 2, 3, 4, 5, reconsume_times=3)
        await bench.settled(6)
        assert sorted(bench.backs.taken) == [(0, 0), (1, 0), (2, 5), (4, -1)]
        assert bench.queue.failed == 4
        await bench.close()

    with caplog.at_level(logging.WARNING):
        run(test)
    (entry,) = caplog.records
    assert "Orders" in entry.message
    assert "retry 4 of 16" in entry.message
    assert entry.exc_info
    assert isinstance(entry.exc_info[1], ValueError)


def test_broadcast_drops_what_failed(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        bench = Bench(broadcast=True)

        async def handle(message: ReceivedMessage) -> None:
            raise ValueError("no")

        bench.on(handle)
        bench.give(0)
        await bench.settled(1)
        assert bench.backs.taken == []
        await bench.close()

    run(test)
    assert "it is dropped" in caplog.text


def test_what_no_broker_takes_back_is_handled_here_again() -> None:
    async def test() -> None:
        bench = Bench(backs=Backs([PeerLost("gone")]))
        times: list[int] = []

        async def handle(message: ReceivedMessage) -> bool:
            times.append(message.reconsume_times)
            return len(times) > 1

        bench.on(handle)
        bench.give(0)
        await until(lambda: bench.session.clock.pending() == 1)
        assert bench.queue.progress == 0
        await bench.session.clock.elapse(AGAIN_MS)
        await bench.settled(1)
        assert times == [0, 1]
        assert bench.backs.taken == []
        await bench.close()

    run(test)


@KINDS
def test_a_slow_message_holds_up_no_other(kind: str) -> None:
    async def test() -> None:
        bench = Bench(concurrency=2)
        release = threading.Event()
        gate = asyncio.Event()

        def slow(message: ReceivedMessage) -> None:
            if message.queue_offset == 0:
                release.wait()

        async def slow_async(message: ReceivedMessage) -> None:
            if message.queue_offset == 0:
                await gate.wait()

        bench.on(slow if kind == "sync" else slow_async)
        bench.give(*range(50))
        await until(lambda: bench.queue.count == 1)
        assert bench.queue.progress == 0
        release.set()
        gate.set()
        await bench.settled(50)
        await bench.close()

    run(test)


@KINDS
def test_at_most_so_many_at_a_time(kind: str) -> None:
    async def test() -> None:
        bench = Bench(concurrency=3)
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

        bench.on(handle if kind == "sync" else handle_async)
        bench.give(*range(30))
        await bench.settled(30)
        assert most == 3
        await bench.close()

    run(test)


def test_handlers_share_a_topic_by_tags_and_kind() -> None:
    async def test() -> None:
        bench = Bench()
        seen: list[tuple[str, str | None, bool]] = []
        main = threading.get_ident()

        def plain(message: ReceivedMessage) -> None:
            seen.append(("plain", message.tags, threading.get_ident() == main))

        async def on_loop(message: ReceivedMessage) -> None:
            seen.append(("loop", message.tags, threading.get_ident() == main))

        bench.on(plain, "a || b")
        bench.on(on_loop, "c")
        for offset, tag in enumerate("abcd"):
            bench.give(offset, properties={"TAGS": tag})
        await bench.settled(4)
        assert sorted(seen) == [
            ("loop", "c", True), ("plain", "a", False), ("plain", "b", False),
            ("plain", "d", False),
        ]  # fmt: skip
        await bench.close()

    run(test)


@KINDS
def test_lists_of_messages(kind: str) -> None:
    async def test() -> None:
        bench = Bench(handle_batch=4)
        sizes: list[int] = []

        def handle(got: list[ReceivedMessage]) -> None:
            sizes.append(len(got))
            got[0].retry(2)

        bench.on(handler_of(kind, handle))
        bench.give(*range(10))
        await bench.settled(10)
        assert sorted(sizes) == [2, 4, 4]
        assert sorted(bench.backs.taken) == [(0, 2), (4, 2), (8, 2)]
        await bench.close()

    run(test)


def test_a_topic_without_handler_comes_again(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        bench = Bench()

        async def handle(message: ReceivedMessage) -> None: ...

        bench.handlers.add("Another", "*", handle)
        bench.give(0)
        await bench.settled(1)
        assert bench.backs.taken == [(0, 0)]
        await bench.close()

    run(test)
    assert "no handler for the topic 'Orders'" in caplog.text


def test_what_is_cancelled_inside_a_handler_is_a_failure_of_it() -> None:
    async def test() -> None:
        bench = Bench()

        async def handle(message: ReceivedMessage) -> None:
            raise asyncio.CancelledError

        bench.on(handle)
        bench.give(0, 1)
        await bench.settled(2)
        assert bench.backs.taken == [(0, 0), (1, 0)]
        await bench.close()

    run(test)


@KINDS
def test_handlers_that_do_not_come_back_lose_their_message(kind: str) -> None:
    async def test() -> None:
        bench = Bench()
        release = threading.Event()
        gate = asyncio.Event()
        began: list[int] = []

        def slow(message: ReceivedMessage) -> None:
            began.append(1)
            release.wait()

        async def slow_async(message: ReceivedMessage) -> None:
            began.append(1)
            await gate.wait()

        bench.on(slow if kind == "sync" else slow_async)
        bench.give(0)
        await until(lambda: bool(began))
        bench.session.clock.advance(900_001)
        await bench.settling.expire([bench.queue], 900_000)
        assert bench.backs.taken == [(0, 3)]
        assert bench.queue.progress == 1
        release.set()
        gate.set()
        await bench.close()
        assert bench.queue.finished == 1
        assert bench.backs.taken == [(0, 3)]

    run(test)


@KINDS
def test_results_for_a_dropped_queue_count_no_more(kind: str) -> None:
    async def test() -> None:
        bench = Bench(concurrency=1)
        release = threading.Event()
        gate = asyncio.Event()
        began: list[int] = []

        def slow(message: ReceivedMessage) -> None:
            began.append(message.queue_offset)
            release.wait()
            raise ValueError("too late")

        async def slow_async(message: ReceivedMessage) -> None:
            began.append(message.queue_offset)
            await gate.wait()
            raise ValueError("too late")

        bench.on(slow if kind == "sync" else slow_async)
        bench.give(0, 1)
        await until(lambda: bool(began))
        bench.queue.drop()
        release.set()
        gate.set()
        await bench.close()
        assert began == [0]
        assert bench.backs.taken == []
        assert bench.queue.progress == 0

    run(test)


@KINDS
def test_closing_waits_for_what_has_begun_and_begins_nothing_more(kind: str) -> None:
    async def test() -> None:
        bench = Bench(concurrency=1)
        release = threading.Event()
        gate = asyncio.Event()
        began: list[int] = []

        def slow(message: ReceivedMessage) -> None:
            began.append(message.queue_offset)
            release.wait()

        async def slow_async(message: ReceivedMessage) -> None:
            began.append(message.queue_offset)
            await gate.wait()

        bench.on(slow if kind == "sync" else slow_async)
        bench.give(0, 1, 2)
        await until(lambda: bool(began))
        closing = asyncio.ensure_future(bench.close())
        for _ in range(20):
            await asyncio.sleep(0)
        assert not closing.done()
        release.set()
        gate.set()
        await closing
        assert began == [0]
        assert bench.queue.progress == 1

    run(test)


@KINDS
def test_closing_gives_up_after_a_while(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        bench = Bench()
        release = threading.Event()
        began: list[int] = []

        def slow(message: ReceivedMessage) -> None:
            began.append(1)
            release.wait()

        async def slow_async(message: ReceivedMessage) -> None:
            began.append(1)
            await asyncio.Event().wait()

        bench.on(slow if kind == "sync" else slow_async)
        bench.give(0)
        await until(lambda: bool(began))
        closing = asyncio.ensure_future(bench.dispatch.close(5_000))
        await bench.session.clock.elapse(5_000)
        await closing
        assert bench.queue.progress == 0
        release.set()

    run(test)
    assert "1 handlers have not come back within 5000 ms" in caplog.text


def test_handlers_that_never_wait_leave_the_loop_its_turns() -> None:
    async def test() -> None:
        bench = Bench(concurrency=1)
        turns: list[int] = []
        seen = 0

        async def handle(message: ReceivedMessage) -> None:
            nonlocal seen
            seen += 1

        def tick() -> None:
            turns.append(seen)
            if seen < 3 * RUN_MAX:
                asyncio.get_running_loop().call_soon(tick)

        bench.on(handle)
        bench.give(*range(3 * RUN_MAX))
        tick()
        await bench.settled(3 * RUN_MAX)
        assert {RUN_MAX, 2 * RUN_MAX} <= set(turns)
        await bench.close()

    run(test)


def test_a_worker_wakes_others_only_while_there_is_work() -> None:
    async def test() -> None:
        bench = Bench(concurrency=8)

        async def handle(message: ReceivedMessage) -> None: ...

        bench.on(handle)
        for start in range(0, 640, 32):
            bench.give(*range(start, start + 32))
            await bench.settled(start + 32)
        assert len(asyncio.all_tasks()) <= 4
        await bench.close()

    run(test)


def test_direct_calls_give_back_what_the_handler_does() -> None:
    async def test() -> None:
        bench = Bench()

        def plain(message: ReceivedMessage) -> object:
            if message.queue_offset == 1:
                raise SystemExit(3)
            return "value"

        bench.on(plain)
        assert await bench.calls.call(messages(0)) == "value"
        with pytest.raises(RuntimeError, match="SystemExit"):
            await bench.calls.call(messages(1))
        assert await bench.calls.handle(messages(0)) is None
        assert await bench.calls.handle(messages(1)) == Retry()
        await bench.close()

    run(test)
