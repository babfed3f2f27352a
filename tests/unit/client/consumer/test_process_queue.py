"""Unfinished messages of a queue: progress, flow control, drop."""

import asyncio
import sys

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.client.consumer.process_queue import FlowLimits, ProcessQueue
from penstock.client.received_message import FINISHED, ReceivedMessage
from penstock.errors import BadSetting
from tests.unit.client.consumer.consumer_kit import QUEUE, make_process_queue, messages, until


def test_progress_is_the_smallest_unfinished_offset() -> None:
    queue = make_process_queue(10)
    assert queue.progress == 10
    first, second, third = got = messages(10, 11, 14)
    queue.add(got, 16)
    assert (queue.progress, queue.count, queue.bytes) == (10, 3, sum(m.size for m in got))
    assert queue.oldest is first
    assert queue.finish([second]) == 10
    assert queue.finish([first]) == 14
    assert queue.oldest is third
    assert queue.finish([third]) == 16
    assert (queue.count, queue.bytes, queue.oldest) == (0, 0, None)
    queue.add([], 20)
    assert queue.progress == 20


def test_message_is_finished_once() -> None:
    queue = make_process_queue()
    (message,) = got = messages(0)
    queue.add(got, 1)
    assert queue.finish_one(message)
    assert not queue.finish_one(message)
    assert (queue.count, queue.finished) == (0, 1)
    (stranger,) = messages(0)
    assert not queue.finish_one(stranger)
    assert queue.count == 0


def test_ordered_queue_gives_messages_in_order() -> None:
    queue = make_process_queue(ordered=True)
    queue.add(messages(0, 1), 2)
    queue.add(messages(2), 3)
    assert [m.queue_offset for m in queue.take(2)] == [0, 1]
    assert [m.queue_offset for m in queue.take(2)] == [2]
    assert queue.take(2) == []
    assert queue.progress == 0


def test_dropped_queue_ignores_messages() -> None:
    queue = make_process_queue(ordered=True)
    queue.add(messages(0, 1), 2)
    (first,) = queue.take(1)
    queue.drop()
    assert queue.take(5) == []
    queue.add(messages(2), 3)
    assert (queue.next_offset, queue.count) == (2, 2)
    assert queue.finish([first]) == 1


@pytest.mark.parametrize(
    ("limits", "word"),
    [
        ({"messages_max": 2}, "messages"),
        ({"bytes_max": 150}, "bytes"),
        ({"span_max": 3}, "offsets"),
    ],
)
def test_pull_continues_when_messages_are_finished(limits: dict[str, int], word: str) -> None:
    async def main() -> None:
        queue = make_process_queue(**limits)
        got = messages(0, 4)
        queue.add(got, 5)
        assert word in (queue.full or "")
        waiting = asyncio.ensure_future(queue.wait_for_pull())
        await asyncio.sleep(0)
        assert not waiting.done()
        queue.finish(got)
        await waiting
        assert queue.full is None

    asyncio.run(main())


def test_resume_and_drop_end_the_wait_for_pull() -> None:
    async def main() -> None:
        queue = make_process_queue()
        queue.pause()
        waiting = asyncio.ensure_future(queue.wait_for_pull())
        await asyncio.sleep(0)
        got = messages(0)
        queue.add(got, 1)
        queue.finish(got)
        await asyncio.sleep(0)
        assert not waiting.done()
        queue.resume()
        await waiting
        queue.pause()
        waiting = asyncio.ensure_future(queue.wait_for_pull())
        await asyncio.sleep(0)
        queue.drop()
        await waiting

    asyncio.run(main())


def test_cancelled_wait_leaves_no_tasks() -> None:
    async def main() -> None:
        queue = make_process_queue(messages_max=1)
        got = messages(0)
        queue.add(got, 1)
        waiting = asyncio.ensure_future(queue.wait_for_pull())
        await asyncio.sleep(0)
        waiting.cancel()
        await until(waiting.done)
        queue.finish(got)
        await queue.wait_for_pull()

    asyncio.run(main())


def test_ordered_queue_has_no_span_limit() -> None:
    queue = make_process_queue(ordered=True, span_max=1)
    queue.add(messages(0, 100), 101)
    assert queue.full is None


def test_messages_with_stuck_handlers_are_found() -> None:
    queue = make_process_queue()
    got = messages(0, 1, 2)
    queue.add(got, 3)
    for message, handling_since_ms in zip(got, (100, 200, 300), strict=True):
        message.state, message.handling_since_ms = 1, handling_since_ms
    queue.finish(got[:1])
    assert queue.handling_since_before(300) == [got[1]]


def test_flow_limits_must_be_positive() -> None:
    with pytest.raises(BadSetting, match="span_max"):
        FlowLimits(span_max=0)


def test_finished_messages_are_released_behind_unfinished_ones() -> None:
    queue = make_process_queue()
    queue.add(messages(0), 1)
    (later,) = got = messages(1)
    queue.add(got, 2)
    source = later.source
    queue.finish_one(later)
    del later, got
    assert sys.getrefcount(source) == 2  # the queue, and this check
    assert (queue.progress, queue.count) == (0, 1)


class ProcessQueueMachine(RuleBasedStateMachine):
    """Against a model: received offsets, finished offsets, position of the pulls."""

    @initialize(start=st.integers(0, 50))
    def begin(self, start: int) -> None:
        self.queue = ProcessQueue(QUEUE, start, FlowLimits())
        self.start = self.next = start
        self.open: dict[int, ReceivedMessage] = {}
        self.finished: set[int] = set()
        self.skipped: set[int] = set()
        self.last = start

    @rule(kept=st.lists(st.booleans(), max_size=8))
    def pull(self, kept: list[bool]) -> None:
        offsets = [self.next + n for n, keep in enumerate(kept) if keep]
        if self.queue.dropped:  # a late response
            self.queue.add(messages(*offsets), self.next + len(kept))
            return
        self.skipped |= {self.next + n for n, keep in enumerate(kept) if not keep}
        got = messages(*offsets)
        self.next += len(kept)
        self.queue.add(got, self.next)
        self.open.update((message.queue_offset, message) for message in got)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def finish_message(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.open)))
        assert self.queue.finish_one(self.open.pop(offset))
        self.finished.add(offset)

    @precondition(lambda self: self.finished)
    @rule()
    def finish_again(self) -> None:
        count = self.queue.count
        stale = messages(min(self.finished))
        assert self.queue.finish(stale) == self.queue.progress
        assert self.queue.count == count

    @precondition(lambda self: not self.queue.dropped)
    @rule()
    def drop(self) -> None:
        self.queue.drop()

    @invariant()
    def nothing_is_skipped(self) -> None:
        if not hasattr(self, "queue"):
            return
        progress = self.queue.progress
        assert progress == min(self.open, default=self.next)
        assert progress >= self.last
        self.last = progress
        for offset in range(self.start, progress):
            assert offset in self.finished or offset in self.skipped
        assert self.queue.count == len(self.open)
        assert self.queue.bytes == sum(message.size for message in self.open.values())
        assert all(message.state != FINISHED for message in self.open.values())


TestProcessQueueMachine = ProcessQueueMachine.TestCase
