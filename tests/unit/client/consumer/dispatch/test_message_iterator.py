"""`async for` over messages: when they are finished, and when the iterator ends."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from penstock.client.client_session import Session
from penstock.client.consumer.dispatch.completion import Completion
from penstock.client.consumer.dispatch.handlers import Retry
from penstock.client.consumer.dispatch.message_iterator import IteratorDispatch, MessageIterator
from penstock.client.received_message import ReceivedMessage
from tests.unit.client.consumer.consumer_kit import (
    FakeSendBack,
    PlainSession,
    make_process_queue,
    messages,
    until,
)


class DispatchFixture:
    """An iterator dispatch with one queue."""

    def __init__(self) -> None:
        session = cast(Session, PlainSession())
        self.send_back = FakeSendBack()
        self.completion = Completion(
            session,
            "g",
            send_back=self.send_back,
            retries_max=16,
            resubmit=lambda message: self.dispatch.submit(self.queue, [message]),
        )
        self.dispatch = IteratorDispatch(session, self.completion)
        self.queue = make_process_queue()

    def give(self, *offsets: int) -> None:
        got = messages(*offsets)
        self.queue.add(got, offsets[-1] + 1)
        self.dispatch.submit(self.queue, got)

    def reader(self) -> MessageIterator:
        async def start() -> IteratorDispatch:
            return self.dispatch

        return MessageIterator(start)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(test(), 20)

    asyncio.run(main())


def test_message_is_done_when_the_next_is_requested() -> None:
    async def test() -> None:
        fixture = DispatchFixture()
        fixture.give(0, 1, 2)
        reader = fixture.reader()
        for offset in range(3):
            message = await anext(reader)
            assert (message.queue_offset, fixture.queue.progress) == (offset, offset)
        waiting = asyncio.ensure_future(anext(reader))
        await until(lambda: fixture.queue.progress == 3)
        await fixture.dispatch.close(0)
        with pytest.raises(StopAsyncIteration):
            await waiting

    run(test)


def test_retry_redelivers_the_message() -> None:
    async def test() -> None:
        fixture = DispatchFixture()
        fixture.give(0, 1)
        reader = fixture.reader()
        (await anext(reader)).retry(delay_level=7)
        await anext(reader)
        assert fixture.send_back.taken == [(0, 7)]
        assert fixture.queue.progress == 1

    run(test)


def test_readers_share_the_messages() -> None:
    async def test() -> None:
        fixture = DispatchFixture()
        first, second = fixture.reader(), fixture.reader()
        waiting = [asyncio.ensure_future(anext(reader)) for reader in (first, second)]
        await asyncio.sleep(0)
        fixture.give(0, 1)
        assert [(await one).queue_offset for one in waiting] == [0, 1]
        assert fixture.queue.progress == 0

    run(test)


def test_cancelled_reader_wakes_another() -> None:
    async def test() -> None:
        fixture = DispatchFixture()
        leaving = asyncio.ensure_future(fixture.dispatch.next_message())
        staying = asyncio.ensure_future(fixture.dispatch.next_message())
        await asyncio.sleep(0)
        fixture.give(0)  # wakes the first, which is cancelled before it runs
        leaving.cancel()
        message = await staying
        assert message is not None
        assert message.queue_offset == 0
        assert leaving.cancelled()

    run(test)


def test_messages_of_dropped_queues_are_skipped() -> None:
    async def test() -> None:
        fixture = DispatchFixture()
        fixture.give(0, 1)
        fixture.queue.drop()
        other = make_process_queue(5)
        got = messages(5)
        other.add(got, 6)
        fixture.dispatch.submit(other, got)
        assert await fixture.dispatch.next_message() is got[0]

    run(test)


def test_fetched_message_that_is_not_done_is_redelivered() -> None:
    async def test() -> None:
        fixture = DispatchFixture()
        fixture.give(0, 1)
        await anext(fixture.reader())
        await fixture.dispatch.close(0)
        assert fixture.queue.progress == 0
        with pytest.raises(StopAsyncIteration):
            await anext(fixture.reader())

    run(test)


def test_ordered_messages_wait_for_their_reader() -> None:
    async def test() -> None:
        fixture = DispatchFixture()
        got = messages(0)
        fixture.queue.add(got, 1)
        reader = fixture.reader()
        for retry in (None, Retry(3)):
            got[0].retry_level = None
            handling = asyncio.ensure_future(fixture.dispatch.handle(got))
            message = await anext(reader)
            if retry is not None:
                message.retry(3)
            assert not handling.done()
            asking = asyncio.ensure_future(anext(reader))
            assert await handling == retry
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        handling = asyncio.ensure_future(fixture.dispatch.handle(got))
        await anext(reader)
        await fixture.dispatch.close(0)
        with pytest.raises(asyncio.CancelledError):
            await handling

    run(test)


def test_waiting_messages_of_a_dropped_queue_are_discarded() -> None:
    async def test() -> None:
        fixture = DispatchFixture()
        fixture.give(0, 1)
        ordered = make_process_queue(7, ordered=True)
        got = messages(7)
        ordered.add(got, 8)
        handling = asyncio.ensure_future(fixture.dispatch.handle(got))
        await asyncio.sleep(0)
        ordered.drop()
        await fixture.dispatch.stop(ordered)
        with pytest.raises(asyncio.CancelledError):
            await handling
        fixture.queue.drop()
        await fixture.dispatch.stop(fixture.queue)
        assert not fixture.dispatch._waiting
        assert not fixture.dispatch._results

    run(test)


def test_message_is_sent_back_even_if_its_reader_is_cancelled() -> None:
    async def test() -> None:
        fixture = DispatchFixture()
        release, taken = asyncio.Event(), asyncio.Event()

        async def slow_back(message: ReceivedMessage, delay_level: int) -> None:
            taken.set()
            await release.wait()

        fixture.completion._send_back = slow_back
        fixture.give(0)
        reader = fixture.reader()
        (await anext(reader)).retry()
        asking = asyncio.ensure_future(anext(reader))
        await taken.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        release.set()
        await until(lambda: fixture.queue.progress == 1)

    run(test)


def test_ordered_message_is_handled_again_if_its_reader_leaves() -> None:
    async def test() -> None:
        fixture = DispatchFixture()
        got = messages(0)
        fixture.queue.add(got, 1)
        handling = asyncio.ensure_future(fixture.dispatch.handle(got))
        async for _ in fixture.reader():
            break
        assert await handling == Retry()

    run(test)
