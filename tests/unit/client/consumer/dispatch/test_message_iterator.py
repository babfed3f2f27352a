"""`async for` over messages: when they are done, and when there are no more."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import cast

import pytest

from penstock.client.client_session import Session
from penstock.client.consumer.dispatch.completion import Settling
from penstock.client.consumer.dispatch.handlers import Retry
from penstock.client.consumer.dispatch.message_iterator import Mailbox, MessageIterator
from penstock.client.received_message import ReceivedMessage
from tests.unit.client.consumer.consumer_kit import Backs, PlainSession, messages, until, work


class Post:
    """A mailbox with one queue."""

    def __init__(self) -> None:
        session = cast(Session, PlainSession())
        self.backs = Backs()
        self.settling = Settling(session, "g", give_back=self.backs, retries_max=16)
        self.box = Mailbox(session, self.settling)
        self.queue = work()

    def give(self, *offsets: int) -> None:
        got = messages(*offsets)
        self.queue.add(got, offsets[-1] + 1)
        self.box.submit(self.queue, got)

    def reader(self) -> MessageIterator:
        async def find() -> Mailbox:
            return self.box

        return MessageIterator(find)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(test(), 20)

    asyncio.run(main())


def test_a_message_is_done_when_the_next_is_asked_for() -> None:
    async def test() -> None:
        post = Post()
        post.give(0, 1, 2)
        reader = post.reader()
        for offset in range(3):
            message = await anext(reader)
            assert (message.queue_offset, post.queue.progress) == (offset, offset)
        waiting = asyncio.ensure_future(anext(reader))
        await until(lambda: post.queue.progress == 3)
        await post.box.close(0)
        with pytest.raises(StopAsyncIteration):
            await waiting

    run(test)


def test_retry_lets_it_come_again() -> None:
    async def test() -> None:
        post = Post()
        post.give(0, 1)
        reader = post.reader()
        (await anext(reader)).retry(delay_level=7)
        await anext(reader)
        assert post.backs.taken == [(0, 7)]
        assert post.queue.progress == 1

    run(test)


def test_readers_share_the_messages() -> None:
    async def test() -> None:
        post = Post()
        first, second = post.reader(), post.reader()
        waiting = [asyncio.ensure_future(anext(reader)) for reader in (first, second)]
        await asyncio.sleep(0)
        post.give(0, 1)
        assert [(await one).queue_offset for one in waiting] == [0, 1]
        assert post.queue.progress == 0

    run(test)


def test_a_reader_that_leaves_wakes_another() -> None:
    async def test() -> None:
        post = Post()
        leaving = asyncio.ensure_future(post.box.next())
        staying = asyncio.ensure_future(post.box.next())
        await asyncio.sleep(0)
        post.give(0)  # wakes the first, which is cancelled before it runs
        leaving.cancel()
        message = await staying
        assert message is not None
        assert message.queue_offset == 0
        assert leaving.cancelled()

    run(test)


def test_messages_of_dropped_queues_are_passed_over() -> None:
    async def test() -> None:
        post = Post()
        post.give(0, 1)
        post.queue.drop()
        other = work(5)
        got = messages(5)
        other.add(got, 6)
        post.box.submit(other, got)
        assert await post.box.next() is got[0]

    run(test)


def test_what_was_fetched_and_not_settled_comes_again() -> None:
    async def test() -> None:
        post = Post()
        post.give(0, 1)
        await anext(post.reader())
        await post.box.close(0)
        assert post.queue.progress == 0
        with pytest.raises(StopAsyncIteration):
            await anext(post.reader())

    run(test)


def test_messages_in_order_wait_for_their_reader() -> None:
    async def test() -> None:
        post = Post()
        got = messages(0)
        post.queue.add(got, 1)
        reader = post.reader()
        for retry in (None, Retry(3)):
            got[0].again = None
            handling = asyncio.ensure_future(post.box.handle(got))
            message = await anext(reader)
            if retry is not None:
                message.retry(3)
            assert not handling.done()
            asking = asyncio.ensure_future(anext(reader))
            assert await handling == retry
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        handling = asyncio.ensure_future(post.box.handle(got))
        await anext(reader)
        await post.box.close(0)
        with pytest.raises(asyncio.CancelledError):
            await handling

    run(test)


def test_a_dropped_queue_leaves_nothing_behind() -> None:
    async def test() -> None:
        post = Post()
        post.give(0, 1)
        ordered = work(7, ordered=True)
        got = messages(7)
        ordered.add(got, 8)
        handling = asyncio.ensure_future(post.box.handle(got))
        await asyncio.sleep(0)
        ordered.drop()
        await post.box.stop(ordered)
        with pytest.raises(asyncio.CancelledError):
            await handling
        post.queue.drop()
        await post.box.stop(post.queue)
        assert not post.box._waiting
        assert not post.box._handled

    run(test)


def test_a_reader_that_is_cancelled_does_not_keep_a_message_from_going_back() -> None:
    async def test() -> None:
        post = Post()
        gate, taken = asyncio.Event(), asyncio.Event()

        async def slow_back(message: ReceivedMessage, delay_level: int) -> None:
            taken.set()
            await gate.wait()

        post.settling._give_back = slow_back
        post.give(0)
        reader = post.reader()
        (await anext(reader)).retry()
        asking = asyncio.ensure_future(anext(reader))
        await taken.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        gate.set()
        await until(lambda: post.queue.progress == 1)

    run(test)


def test_a_message_in_order_comes_again_when_its_reader_leaves() -> None:
    async def test() -> None:
        post = Post()
        got = messages(0)
        post.queue.add(got, 1)
        handling = asyncio.ensure_future(post.box.handle(got))
        async for _ in post.reader():
            break
        assert await handling == Retry()

    run(test)
