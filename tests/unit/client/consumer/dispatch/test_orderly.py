"""Locks of queues, and messages that keep their order whatever fails."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from penstock.client.consumer.dispatch.handlers import Retry
from penstock.client.consumer.dispatch.orderly import OrderlyDispatch, QueueLocks
from penstock.client.consumer.dispatch.send_back import SendBack
from penstock.client.consumer.offset_store import RemoteOffsets
from penstock.client.received_message import ReceivedMessage
from penstock.transport.peer import Response
from penstock.wire.codes import RequestCode
from tests.unit.client.consumer.consumer_kit import QUEUE, messages, work
from tests.unit.client.consumer.group_kit import GROUP, Cluster, FakePeer, FakeSession, run

Verdict = Callable[[ReceivedMessage], Retry | None]


class Ordered:
    """An orderly dispatch over one queue, with a handler of the test's."""

    def __init__(
        self, verdict: Verdict, *, handle_batch: int = 1, retries_max: int = -1,
        broadcast: bool = False,
    ) -> None:  # fmt: skip
        self.cluster = Cluster()
        self.clock = self.cluster.clock
        self.cluster.add_topic("Orders", {"broker-a": 4})
        self.cluster.add_topic("%RETRY%g", {"broker-a": 1, "broker-b": 1})
        self.session = FakeSession(self.cluster)
        real = self.session.real
        self.offsets = RemoteOffsets(real, GROUP)
        self.locks = QueueLocks(real, GROUP)
        self.seen: list[int] = []
        self.tried: list[int] = []
        self.work = work(ordered=True)
        self.go = asyncio.Event()
        self.go.set()
        self._verdict = verdict
        self.dispatch = OrderlyDispatch(
            real, GROUP, self.offsets, handle=self._handle, handle_batch=handle_batch,
            retries_max=retries_max, locks=None if broadcast else self.locks,
            send_back=None if broadcast else SendBack(real, GROUP, retries_max=retries_max),
        )  # fmt: skip

    async def _handle(self, batch: list[ReceivedMessage]) -> Retry | None:
        await self.go.wait()
        self.tried += [message.queue_offset for message in batch]
        verdicts = [self._verdict(message) for message in batch]
        if all(verdict is None for verdict in verdicts):
            self.seen += [message.queue_offset for message in batch]
        return next((verdict for verdict in verdicts if verdict is not None), None)

    def feed(self, *offsets: int, **fields: int) -> None:
        found = messages(*offsets, **fields)
        self.work.add(found, offsets[-1] + 1)
        self.dispatch.submit(self.work, found)

    def sent(self, code: int) -> list[dict[str, str]]:
        return [ext for _, seen, ext in self.cluster.log if seen == code]


def fails(times: int, offset: int = 1) -> Verdict:
    return lambda m: Retry() if m.queue_offset == offset and m.reconsume_times < times else None


def test_a_failed_message_holds_up_its_queue_and_nothing_is_passed_over() -> None:
    async def body() -> None:
        one = Ordered(fails(3))
        one.feed(0, 1, 2)
        await one.clock.elapse(0)
        assert one.seen == [0]
        assert one.offsets.get(QUEUE) == 1
        one.feed(3)
        await one.clock.elapse(2_500)
        assert one.tried == [0, 1, 1, 1]
        await one.clock.elapse(1_000)
        assert one.seen == [0, 1, 2, 3]
        assert one.offsets.get(QUEUE) == 4
        assert one.work.failed == 3
        assert not one.session.tasks, "no worker stays behind"

    run(body())


def test_after_enough_retries_the_message_is_a_dead_letter() -> None:
    async def body() -> None:
        one = Ordered(fails(99), retries_max=2)
        one.feed(0, 1, 2)
        await one.clock.elapse(10_000)
        assert one.tried == [0, 1, 1, 1, 2]
        assert one.seen == [0, 2]
        (copy,) = one.sent(RequestCode.SEND_MESSAGE_V2)
        assert (copy["b"], copy["j"], copy["l"]) == ("%RETRY%g", "3", "2")
        assert "RETRY_TOPIC\x01Orders\x02" in copy["i"]
        assert one.offsets.get(QUEUE) == 3

    run(body())


def test_a_dead_letter_that_nobody_takes_is_tried_again() -> None:
    async def body() -> None:
        one = Ordered(fails(99), retries_max=0)
        one.cluster.refuse[RequestCode.SEND_MESSAGE_V2] = 14
        one.feed(1, 2)
        await one.clock.elapse(5_000)
        assert one.tried == [1] * 6
        assert one.offsets.get(QUEUE) == 1
        one.cluster.refuse.clear()
        await one.clock.elapse(1_000)
        assert one.seen == [2]

    run(body())


def test_handlers_say_how_long_to_rest_or_to_give_up() -> None:
    async def body() -> None:
        one = Ordered(lambda m: Retry(2) if m.reconsume_times < 1 else None)
        one.feed(1)
        await one.clock.elapse(4_900)
        assert one.tried == [1]
        await one.clock.elapse(200)
        assert one.seen == [1]
        two = Ordered(lambda m: Retry(-1) if m.queue_offset == 1 else None)
        two.feed(1, 2)
        await two.clock.elapse(0)
        assert two.seen == [2]
        (back,) = two.sent(RequestCode.CONSUMER_SEND_MSG_BACK)
        assert back["delayLevel"] == "-1"

    run(body())


def test_of_a_batch_only_what_failed_comes_again() -> None:
    async def body() -> None:
        one = Ordered(lambda m: None, handle_batch=4)
        first = True

        def once(message: ReceivedMessage) -> None:
            nonlocal first
            if message.queue_offset == 2 and first:
                first = False
                message.retry()

        one._verdict = once
        one.feed(1, 2, 3)
        await one.clock.elapse(0)
        assert one.offsets.get(QUEUE) == 2
        await one.clock.elapse(1_000)
        assert one.tried == [1, 2, 3, 2]
        assert one.offsets.get(QUEUE) == 4

    run(body())


def test_a_batch_goes_to_one_handler_after_another() -> None:
    async def body() -> None:
        one = Ordered(lambda m: None, handle_batch=8)
        batches: list[list[int]] = []

        async def handle(batch: list[ReceivedMessage]) -> None:
            batches.append([message.queue_offset for message in batch])

        one.dispatch._handle = handle
        one.dispatch._handler_of = lambda message: message.queue_offset >= 3
        one.feed(1, 2, 3, 4)
        await one.clock.elapse(0)
        assert batches == [[1, 2], [3, 4]]

    run(body())


def test_nothing_is_handled_without_the_lock() -> None:
    async def body() -> None:
        one = Ordered(fails(0))
        one.cluster.locked[QUEUE] = ("other", one.clock.now_ms())
        one.feed(1)
        await one.clock.elapse(50_000)
        assert one.tried == []
        await one.clock.elapse(15_000)  # the other is dead: brokers forget it after a minute
        assert one.seen == [1]

    run(body())


def test_locks_are_renewed_and_believed_for_a_while_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        one = Ordered(fails(0))
        locks = one.locks
        one.session.spawn(locks.keep_locked())
        assert await locks.lock([QUEUE]) == {QUEUE}
        await one.clock.elapse(200_000)
        assert locks.holds(QUEUE)
        assert one.cluster.count(RequestCode.LOCK_BATCH_MQ) == 11
        one.cluster.down = {"broker-a"}
        await one.clock.elapse(29_000)
        assert locks.holds(QUEUE)
        await one.clock.elapse(2_000)
        assert not locks.holds(QUEUE)
        assert locks.held() == {QUEUE}
        one.cluster.down = set()
        one.cluster.locked[QUEUE] = ("other", one.clock.now_ms())
        await one.clock.elapse(20_000)
        assert not locks.holds(QUEUE)
        assert locks.age_ms(QUEUE) is None
        assert caplog.text.count("no locks from broker-a") == 1
        await one.clock.elapse(45_000)
        assert locks.holds(QUEUE), "a lost lock is asked for again"
        await locks.unlock([QUEUE])
        assert not one.cluster.locked
        await one.clock.elapse(60_000)
        assert not one.cluster.locked, "what was given back stays so"
        await one.session.end()

    run(body())


def test_a_lock_under_way_is_given_back_after_it() -> None:
    async def body() -> None:
        one = Ordered(fails(0))
        asking = asyncio.ensure_future(one.locks.lock([QUEUE]))
        await asyncio.sleep(0)
        await one.locks.unlock([QUEUE])
        assert await asking == {QUEUE}
        assert not one.locks.holds(QUEUE)
        assert not one.cluster.locked

    run(body())


def test_a_dropped_queue_is_left_when_its_handler_is_done() -> None:
    async def body() -> None:
        one = Ordered(fails(0))
        one.go.clear()
        one.feed(1, 2)
        await one.clock.elapse(0)
        one.work.drop()
        stopping = asyncio.ensure_future(one.dispatch.stop(one.work))
        await one.clock.elapse(5_000)
        assert not stopping.done()
        one.go.set()
        await stopping
        assert one.tried == [1]
        assert one.offsets.get(QUEUE) is None, "what a dropped queue has done counts no more"

    run(body())


def test_a_handler_that_hangs_holds_up_others_for_a_while_only(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        one = Ordered(fails(0))
        one.go.clear()
        one.feed(1)
        await one.clock.elapse(0)
        one.work.drop()
        stopping = asyncio.ensure_future(one.dispatch.stop(one.work))
        await one.clock.elapse(20_000)
        assert stopping.done()
        assert "still works on" in caplog.text
        await one.session.end()

    run(body())


def test_a_resting_queue_ends_at_once() -> None:
    async def body() -> None:
        one = Ordered(fails(99))
        one.feed(1)
        await one.clock.elapse(0)
        one.work.drop()
        await one.dispatch.stop(one.work)
        two = Ordered(fails(99))
        two.feed(1)
        await two.clock.elapse(0)
        await two.dispatch.close(1_000)
        two.feed(2)
        assert not one.session.tasks
        assert not two.session.tasks

    run(body())


def test_close_waits_for_handlers_and_then_no_longer(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        one = Ordered(fails(0))
        one.go.clear()
        one.feed(1, 2)
        await one.clock.elapse(0)
        closing = asyncio.ensure_future(one.dispatch.close(3_000))
        await one.clock.elapse(2_900)
        assert not closing.done()
        await one.clock.elapse(200)
        await closing
        assert "1 handlers have not come back" in caplog.text
        assert not one.session.tasks

    run(body())


def test_at_most_so_many_handlers_at_a_time() -> None:
    async def body() -> None:
        one = Ordered(fails(0))
        one.dispatch._slots = asyncio.Semaphore(2)
        one.go.clear()
        running = 0
        most = 0

        async def handle(batch: list[ReceivedMessage]) -> None:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await one.go.wait()
            running -= 1

        one.dispatch._handle = handle
        works = [work(ordered=True) for _ in range(5)]
        for each in works:
            found = messages(1)
            each.add(found, 2)
            one.dispatch.submit(each, found)
        await one.clock.elapse(0)
        assert most == 2
        one.go.set()
        await one.clock.elapse(0)
        assert [each.finished for each in works] == [1] * 5

    run(body())


def test_broadcast_needs_no_lock_and_drops_what_fails() -> None:
    async def body() -> None:
        one = Ordered(fails(99), broadcast=True, retries_max=1)
        one.feed(1, 2)
        await one.clock.elapse(5_000)
        assert one.tried == [1, 1, 2]
        assert one.cluster.log == []

    run(body())


def test_a_lock_that_is_lost_while_waiting_for_a_slot_counts() -> None:
    async def body() -> None:
        one = Ordered(fails(0))
        one.dispatch._slots = asyncio.Semaphore(0)
        one.feed(1)
        await one.clock.elapse(0)
        assert one.locks.holds(QUEUE)
        one.cluster.locked[QUEUE] = ("other", one.clock.now_ms())
        await one.locks.lock([QUEUE])
        one.dispatch._slots.release()
        await one.clock.elapse(2_000)
        assert one.tried == [], "another member may be at it"
        one.cluster.locked.clear()
        await one.clock.elapse(2_000)
        assert one.seen == [1]

    run(body())


class Hangs(FakeSession):
    """A session one of whose brokers does not answer."""

    def __init__(self, cluster: Cluster, broker_name: str) -> None:
        super().__init__(cluster)
        self.broker_name = broker_name
        self.answers = asyncio.Event()

    async def call(self, peer: FakePeer, *arguments: Any, **options: Any) -> Response:
        if peer.address == self.broker_name:
            await self.answers.wait()
        return await super().call(peer, *arguments, **options)


def test_a_broker_that_hangs_holds_up_its_own_locks_only() -> None:
    async def body() -> None:
        cluster = Cluster()
        queues = cluster.add_topic("t", {"a": 1, "b": 8})
        session = Hangs(cluster, "b")
        locks = QueueLocks(session.real, GROUP)
        late = asyncio.ensure_future(locks.lock(queues[1:]))
        await cluster.clock.elapse(0)
        assert await locks.lock(queues[:1]) == set(queues[:1])
        session.spawn(locks.keep_locked())
        await cluster.clock.elapse(50_000)
        assert locks.holds(queues[0]), "it is renewed"
        back = [asyncio.ensure_future(locks.unlock([queue])) for queue in queues]
        await cluster.clock.elapse(0)
        assert queues[0] not in cluster.locked
        session.answers.set()
        assert await late == set(queues[1:])
        await asyncio.gather(*back)
        assert not cluster.locked
        assert cluster.count(RequestCode.UNLOCK_BATCH_MQ) <= 3, "not one for each queue"
        await session.end()

    run(body())
