"""Queue locks, and the order of messages despite failures."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from penstock.client.consumer.dispatch.handlers import Retry
from penstock.client.consumer.dispatch.orderly import OrderlyDispatch, OrderlyQueueLocks
from penstock.client.consumer.dispatch.send_back import SendBack
from penstock.client.consumer.offset_store import RemoteBrokerOffsetStore
from penstock.client.messages import MessageQueue
from penstock.client.received_message import ReceivedMessage
from penstock.transport.peer import Response
from penstock.wire.codes import RequestCode
from tests.unit.client.consumer.consumer_kit import QUEUE, make_process_queue, messages
from tests.unit.client.consumer.group_kit import GROUP, FakeCluster, FakePeer, FakeSession, run

Decide = Callable[[ReceivedMessage], Retry | None]


class OrderlyFixture:
    """An orderly dispatch with one queue; `decide` is the result of the handler."""

    def __init__(
        self,
        decide: Decide,
        *,
        handle_batch: int = 1,
        retries_max: int = -1,
        broadcast: bool = False,
    ) -> None:
        self.cluster = FakeCluster()
        self.clock = self.cluster.clock
        self.cluster.add_topic("Orders", {"broker-a": 4})
        self.cluster.add_topic("%RETRY%g", {"broker-a": 1, "broker-b": 1})
        self.session = FakeSession(self.cluster)
        real = self.session.real
        self.offsets = RemoteBrokerOffsetStore(real, GROUP)
        self.lost: list[MessageQueue] = []
        self.locks = OrderlyQueueLocks(real, GROUP, self.lost.append)
        self.seen: list[int] = []
        self.tried: list[int] = []
        self.process_queue = make_process_queue(ordered=True)
        self.go = asyncio.Event()
        self.go.set()
        self._decide = decide
        self.dispatch = OrderlyDispatch(
            real,
            GROUP,
            self.offsets,
            handle=self._handle,
            handle_batch=handle_batch,
            retries_max=retries_max,
            locks=None if broadcast else self.locks,
            send_back=None if broadcast else SendBack(real, GROUP, retries_max=retries_max),
        )

    async def _handle(self, batch: list[ReceivedMessage]) -> Retry | None:
        await self.go.wait()
        self.tried += [message.queue_offset for message in batch]
        retries = [self._decide(message) for message in batch]
        if all(retry is None for retry in retries):
            self.seen += [message.queue_offset for message in batch]
        return next((retry for retry in retries if retry is not None), None)

    def submit(self, *offsets: int, **fields: int) -> None:
        found = messages(*offsets, **fields)
        self.process_queue.add(found, offsets[-1] + 1)
        self.dispatch.submit(self.process_queue, found)

    def sent(self, code: int) -> list[dict[str, str]]:
        return [ext for _, seen, ext in self.cluster.log if seen == code]


def fails(times: int, offset: int = 1) -> Decide:
    return lambda m: Retry() if m.queue_offset == offset and m.reconsume_times < times else None


def test_failed_message_blocks_its_queue_and_is_not_skipped() -> None:
    async def body() -> None:
        one = OrderlyFixture(fails(3))
        one.submit(0, 1, 2)
        await one.clock.elapse(0)
        assert one.seen == [0]
        assert one.offsets.get(QUEUE) == 1
        one.submit(3)
        await one.clock.elapse(2_500)
        assert one.tried == [0, 1, 1, 1]
        await one.clock.elapse(1_000)
        assert one.seen == [0, 1, 2, 3]
        assert one.offsets.get(QUEUE) == 4
        assert one.process_queue.failed == 3
        assert not one.session.tasks, "no worker stays behind"

    run(body())


def test_message_becomes_a_dead_letter_after_its_retries() -> None:
    async def body() -> None:
        one = OrderlyFixture(fails(99), retries_max=2)
        one.submit(0, 1, 2)
        await one.clock.elapse(10_000)
        assert one.tried == [0, 1, 1, 1, 2]
        assert one.seen == [0, 2]
        (copy,) = one.sent(RequestCode.SEND_MESSAGE_V2)
        assert (copy["b"], copy["j"], copy["l"]) == ("%RETRY%g", "3", "2")
        assert "RETRY_TOPIC\x01Orders\x02" in copy["i"]
        assert one.offsets.get(QUEUE) == 3

    run(body())


def test_dead_letter_that_no_broker_takes_is_retried() -> None:
    async def body() -> None:
        one = OrderlyFixture(fails(99), retries_max=0)
        one.cluster.refuse[RequestCode.SEND_MESSAGE_V2] = 14
        one.submit(1, 2)
        await one.clock.elapse(5_000)
        assert one.tried == [1] * 6
        assert one.offsets.get(QUEUE) == 1
        one.cluster.refuse.clear()
        await one.clock.elapse(1_000)
        assert one.seen == [2]

    run(body())


def test_handler_chooses_the_suspension_or_a_dead_letter() -> None:
    async def body() -> None:
        one = OrderlyFixture(lambda m: Retry(2) if m.reconsume_times < 1 else None)
        one.submit(1)
        await one.clock.elapse(4_900)
        assert one.tried == [1]
        await one.clock.elapse(200)
        assert one.seen == [1]
        two = OrderlyFixture(lambda m: Retry(-1) if m.queue_offset == 1 else None)
        two.submit(1, 2)
        await two.clock.elapse(0)
        assert two.seen == [2]
        (back,) = two.sent(RequestCode.CONSUMER_SEND_MSG_BACK)
        assert back["delayLevel"] == "-1"

    run(body())


def test_only_failed_messages_of_a_batch_are_handled_again() -> None:
    async def body() -> None:
        one = OrderlyFixture(lambda m: None, handle_batch=4)
        first = True

        def once(message: ReceivedMessage) -> None:
            nonlocal first
            if message.queue_offset == 2 and first:
                first = False
                message.retry()

        one._decide = once
        one.submit(1, 2, 3)
        await one.clock.elapse(0)
        assert one.offsets.get(QUEUE) == 2
        await one.clock.elapse(1_000)
        assert one.tried == [1, 2, 3, 2]
        assert one.offsets.get(QUEUE) == 4

    run(body())


def test_batch_is_split_by_handler() -> None:
    async def body() -> None:
        one = OrderlyFixture(lambda m: None, handle_batch=8)
        batches: list[list[int]] = []

        async def handle(batch: list[ReceivedMessage]) -> None:
            batches.append([message.queue_offset for message in batch])

        one.dispatch._handle = handle
        one.dispatch._handler_of = lambda message: message.queue_offset >= 3
        one.submit(1, 2, 3, 4)
        await one.clock.elapse(0)
        assert batches == [[1, 2], [3, 4]]

    run(body())


def test_nothing_is_handled_without_the_lock() -> None:
    async def body() -> None:
        one = OrderlyFixture(fails(0))
        one.cluster.locked[QUEUE] = ("other", one.clock.now_ms())
        one.submit(1)
        await one.clock.elapse(50_000)
        assert one.tried == []
        await one.clock.elapse(15_000)  # the other member is dead: its locks expire after a minute
        assert one.seen == [1]

    run(body())


def test_locks_are_renewed_and_expire(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        one = OrderlyFixture(fails(0))
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
        assert caplog.text.count("cannot lock queues at broker-a") == 1
        await one.clock.elapse(45_000)
        assert locks.holds(QUEUE), "a lost lock is asked for again"
        await locks.unlock([QUEUE])
        assert not one.cluster.locked
        await one.clock.elapse(60_000)
        assert not one.cluster.locked, "what was given back stays so"
        await one.session.end()

    run(body())


def test_unlock_waits_for_a_lock_request_in_flight() -> None:
    async def body() -> None:
        one = OrderlyFixture(fails(0))
        asking = asyncio.ensure_future(one.locks.lock([QUEUE]))
        await asyncio.sleep(0)
        await one.locks.unlock([QUEUE])
        assert await asking == {QUEUE}
        assert not one.locks.holds(QUEUE)
        assert not one.cluster.locked

    run(body())


def test_dropped_queue_is_released_when_its_handler_returns() -> None:
    async def body() -> None:
        one = OrderlyFixture(fails(0))
        one.go.clear()
        one.submit(1, 2)
        await one.clock.elapse(0)
        one.process_queue.drop()
        stopping = asyncio.ensure_future(one.dispatch.stop(one.process_queue))
        await one.clock.elapse(5_000)
        assert not stopping.done()
        one.go.set()
        await stopping
        assert one.tried == [1]
        assert one.offsets.get(QUEUE) is None, "what a dropped queue has done counts no more"

    run(body())


def test_stuck_handler_delays_the_release_for_a_limited_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def body() -> None:
        one = OrderlyFixture(fails(0))
        one.go.clear()
        one.submit(1)
        await one.clock.elapse(0)
        one.process_queue.drop()
        stopping = asyncio.ensure_future(one.dispatch.stop(one.process_queue))
        await one.clock.elapse(20_000)
        assert stopping.done()
        assert "has not returned within" in caplog.text
        await one.session.end()

    run(body())


def test_suspended_queue_stops_at_once() -> None:
    async def body() -> None:
        one = OrderlyFixture(fails(99))
        one.submit(1)
        await one.clock.elapse(0)
        one.process_queue.drop()
        await one.dispatch.stop(one.process_queue)
        two = OrderlyFixture(fails(99))
        two.submit(1)
        await two.clock.elapse(0)
        await two.dispatch.close(1_000)
        two.submit(2)
        assert not one.session.tasks
        assert not two.session.tasks

    run(body())


def test_close_waits_for_handlers_up_to_drain_ms(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        one = OrderlyFixture(fails(0))
        one.go.clear()
        one.submit(1, 2)
        await one.clock.elapse(0)
        closing = asyncio.ensure_future(one.dispatch.close(3_000))
        await one.clock.elapse(2_900)
        assert not closing.done()
        await one.clock.elapse(200)
        await closing
        assert "1 handlers have not returned" in caplog.text
        assert not one.session.tasks

    run(body())


def test_handler_concurrency_is_limited() -> None:
    async def body() -> None:
        one = OrderlyFixture(fails(0))
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
        process_queues = [make_process_queue(ordered=True) for _ in range(5)]
        for each in process_queues:
            found = messages(1)
            each.add(found, 2)
            one.dispatch.submit(each, found)
        await one.clock.elapse(0)
        assert most == 2
        one.go.set()
        await one.clock.elapse(0)
        assert [each.finished for each in process_queues] == [1] * 5

    run(body())


def test_ordered_broadcast_needs_no_lock_and_drops_failed_messages() -> None:
    async def body() -> None:
        one = OrderlyFixture(fails(99), broadcast=True, retries_max=1)
        one.submit(1, 2)
        await one.clock.elapse(5_000)
        assert one.tried == [1, 1, 2]
        assert one.cluster.log == []

    run(body())


def test_lock_lost_while_waiting_for_a_slot_is_respected() -> None:
    async def body() -> None:
        one = OrderlyFixture(fails(0))
        one.dispatch._slots = asyncio.Semaphore(0)
        one.submit(1)
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
    """A session with a broker that does not answer."""

    def __init__(self, cluster: FakeCluster, broker_name: str) -> None:
        super().__init__(cluster)
        self.broker_name = broker_name
        self.answers = asyncio.Event()

    async def call(self, peer: FakePeer, *arguments: Any, **options: Any) -> Response:
        if peer.address == self.broker_name:
            await self.answers.wait()
        return await super().call(peer, *arguments, **options)


def test_hanging_broker_does_not_delay_locks_of_other_brokers() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        queues = cluster.add_topic("t", {"a": 1, "b": 8})
        session = Hangs(cluster, "b")
        locks = OrderlyQueueLocks(session.real, GROUP, lambda queue: None)
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
