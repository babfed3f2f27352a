"""Queues are assigned and released as members, routes and locks change."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from penstock.client.consumer.dispatch.orderly import OrderlyQueueLocks
from penstock.client.consumer.offset_store import LocalFileOffsetStore, RemoteBrokerOffsetStore
from penstock.client.consumer.rebalance import Rebalancer, StartAt
from penstock.client.messages import MessageQueue
from penstock.errors import BadSetting
from penstock.wire.codes import RequestCode
from tests.unit.client.consumer.group_kit import GROUP, FakeCluster, FakeListener, FakeSession, run


class Consumer:
    """A member with its rebalancer."""

    def __init__(
        self,
        cluster: FakeCluster,
        name: str = "me",
        *,
        topics: tuple[str, ...] = ("t",),
        orderly: bool = False,
        start_at: StartAt = "last",
        broadcast: bool = False,
        strategy: str = "averagely",
    ) -> None:
        self.session = FakeSession(cluster, name)
        self.listener = FakeListener(topics)
        session = self.session.real
        self.offsets = (
            LocalFileOffsetStore() if broadcast else RemoteBrokerOffsetStore(session, GROUP)
        )
        self.locks = OrderlyQueueLocks(session, GROUP, self._lock_lost) if orderly else None
        self.rebalancer = Rebalancer(
            session,
            GROUP,
            self.listener,
            self.offsets,
            locks=self.locks,
            start_at=start_at,
            broadcast=broadcast,
            strategy=strategy,
        )

    def _lock_lost(self, queue: MessageQueue) -> None:
        self.rebalancer.lock_lost(queue)

    async def __aenter__(self) -> "Consumer":
        await self.session.send_heartbeats()
        self.rebalancer.start()
        await self.session.clock.elapse(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.end()

    async def leave(self) -> None:
        await self.rebalancer.close()
        for members in self.session.cluster.members.values():
            members.remove(self.session.client_id)


def test_single_member_gets_all_queues_and_starts_as_configured() -> None:
    async def body(start_at: StartAt, topic: str, offset: int) -> None:
        cluster = FakeCluster()
        queues = cluster.add_topic(topic, {"a": 2, "b": 1})
        cluster.ends = dict.fromkeys(queues, (3, 9))
        cluster.stored[queues[1]] = 5
        async with Consumer(cluster, topics=(topic,), start_at=start_at) as one:
            assert one.listener.queues == {queues[0]: offset, queues[1]: 5, queues[2]: offset}
            assert one.rebalancer.assigned == set(queues)
            assert one.rebalancer.start_offset(queues[0]) == offset
            assert [allocation.clients for allocation in one.listener.allocations] == [("me",)]

    moment = datetime.fromtimestamp(1_700_000_000.007, UTC)
    run(body("last", "t", 9))
    run(body("first", "t", 3))
    run(body(moment, "t", 7))
    run(body("last", "%RETRY%g", 3))
    run(body("first", "%RETRY%g", 3))
    run(body(moment, "%RETRY%g", 3))


def test_members_get_disjoint_queues_and_offsets_are_handed_over() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        queues = cluster.add_topic("t", {"a": 4, "b": 4})
        async with Consumer(cluster, "1") as one:
            for queue in queues:
                one.offsets.update(queue, 10)
            async with Consumer(cluster, "2") as two:
                one.rebalancer.wake()
                two.rebalancer.wake()
                await cluster.clock.elapse(1_000)
                assert list(one.listener.queues) == queues[:4]
                assert two.listener.queues == dict.fromkeys(queues[4:], 10)
                await two.leave()
                one.rebalancer.wake()
                await cluster.clock.elapse(1_000)
                assert sorted(one.listener.queues) == queues
            assert {q: cluster.stored[q] for q in queues[4:]} == dict.fromkeys(queues[4:], 10)

    run(body())


def test_burst_of_notifications_causes_one_rebalance() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        cluster.add_topic("t", {"a": 4})
        async with Consumer(cluster) as one:
            before = cluster.count(RequestCode.GET_CONSUMER_LIST_BY_GROUP)
            for _ in range(20):
                one.rebalancer.wake()
                await cluster.clock.elapse(3)
            await cluster.clock.elapse(1_000)
            assert cluster.count(RequestCode.GET_CONSUMER_LIST_BY_GROUP) == before + 1
            await cluster.clock.elapse(100_000)
            assert cluster.count(RequestCode.GET_CONSUMER_LIST_BY_GROUP) == before + 6

    run(body())


def test_topic_created_later_is_assigned_soon() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        async with Consumer(cluster) as one:
            assert one.rebalancer.allocations["t"].problem is not None
            await cluster.clock.elapse(5_000)
            queues = cluster.add_topic("t", {"a": 2})
            await one.session.send_heartbeats()
            await cluster.clock.elapse(8_000)
            assert list(one.listener.queues) == queues
            assert one.rebalancer.allocations["t"].problem is None

    run(body())


def test_failed_query_of_members_changes_nothing() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        queues = cluster.add_topic("t", {"a": 2, "b": 2})
        async with Consumer(cluster) as one:
            cluster.down = {"a"}
            assert await one.rebalancer.rebalance(), "b tells the members too"
            cluster.down = {"a", "b"}
            assert not await one.rebalancer.rebalance()
            assert sorted(one.listener.queues) == queues

    run(body())


def test_broker_that_lost_our_registration_gets_a_heartbeat_and_is_queried_again() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        queues = cluster.add_topic("t", {"a": 4})
        async with Consumer(cluster, "2") as one:
            cluster.members["a"] = ["1"]
            assert await one.rebalancer.rebalance()
            await cluster.clock.elapse(0)
            assert list(one.listener.queues) == queues[2:]

    run(body())


def test_unknown_start_offset_is_queried_again() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        queues = cluster.add_topic("t", {"a": 2})
        cluster.refuse[RequestCode.GET_MAX_OFFSET] = 1
        async with Consumer(cluster, orderly=True) as one:
            assert not one.listener.queues
            assert not cluster.locked, "what is not taken is not kept from others"
            cluster.refuse.clear()
            await cluster.clock.elapse(2_000)
            assert list(one.listener.queues) == queues
            assert set(cluster.locked) == set(queues)

    run(body())


def test_ordered_queues_wait_for_their_lock() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        queues = cluster.add_topic("t", {"a": 2})
        free = asyncio.Event()
        async with Consumer(cluster, "1", orderly=True) as one:
            one.listener.on_remove = free.wait
            for queue in queues:
                one.offsets.update(queue, 4)
            async with Consumer(cluster, "2", orderly=True) as two:
                await one.rebalancer.rebalance()
                await cluster.clock.elapse(10_000)
                assert list(one.listener.queues) == queues[:1]
                assert not two.listener.queues, "a handler of the other member still works on it"
                allocation = two.rebalancer.allocations["t"]
                assert allocation.problem == "1 queues are still locked by another member"
                free.set()
                await cluster.clock.elapse(10_000)
                assert two.listener.queues == {queues[1]: 4}

    run(body())


def test_close_stores_offsets_and_unlocks_queues() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        queues = cluster.add_topic("t", {"a": 2, "b": 2})
        async with Consumer(cluster, orderly=True) as one:
            for queue in queues:
                one.offsets.update(queue, 4)
            await one.rebalancer.close()
            assert not one.listener.queues
            assert not cluster.locked
            assert cluster.stored == dict.fromkeys(queues, 4)
            assert not one.session.tasks

    run(body())


def test_restarted_queue_starts_at_the_stored_offset() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        queues = cluster.add_topic("t", {"a": 2})
        async with Consumer(cluster) as one:
            one.offsets.freeze(queues[0], 77)
            await one.rebalancer.restart_queue(queues[0])
            assert list(one.listener.queues) == queues[1:]
            await cluster.clock.elapse(1_000)
            assert one.listener.queues == {queues[1]: 0, queues[0]: 77}

    run(body())


def test_queues_of_unsubscribed_topics_are_released() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        cluster.add_topic("t", {"a": 2})
        queues = cluster.add_topic("u", {"a": 1})
        async with Consumer(cluster, topics=("t", "u")) as one:
            one.listener.wanted.remove("t")
            assert await one.rebalancer.rebalance()
            await cluster.clock.elapse(0)
            assert list(one.listener.queues) == queues
            assert list(one.rebalancer.allocations) == ["u"]

    run(body())


def test_broadcast_assigns_all_queues_without_queries() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        queues = cluster.add_topic("t", {"a": 2})
        async with (
            Consumer(cluster, "1", broadcast=True) as one,
            Consumer(cluster, "2", broadcast=True) as two,
        ):
            assert list(one.listener.queues) == list(two.listener.queues) == queues
            assert cluster.count(RequestCode.GET_CONSUMER_LIST_BY_GROUP) == 0
            await one.rebalancer.close()
            assert cluster.count(RequestCode.UPDATE_CONSUMER_OFFSET) == 0

    run(body())


def test_notification_resets_the_back_off() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        queues = cluster.add_topic("t", {"a": 2})
        async with Consumer(cluster, "2", orderly=True) as two:
            await two.rebalancer.close()
            cluster.locked = {queue: ("1", cluster.clock.now_ms() + 100_000) for queue in queues}
            two.rebalancer.start()
            await cluster.clock.elapse(30_000)
            before = cluster.count(RequestCode.LOCK_BATCH_MQ)
            two.rebalancer.wake()
            await cluster.clock.elapse(1_000)
            assert cluster.count(RequestCode.LOCK_BATCH_MQ) == before + 2
            cluster.locked.clear()
            await cluster.clock.elapse(5_000)
            assert list(two.listener.queues) == queues

    run(body())


def test_duplicate_client_ids_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        cluster = FakeCluster()
        cluster.add_topic("t", {"a": 2})
        cluster.members["a"] = ["me", "me"]
        async with Consumer(cluster) as one:
            await cluster.clock.elapse(1_000)
            await one.rebalancer.rebalance()
            assert caplog.text.count("several members have the client id me") == 1

    run(body())


def test_failing_strategy_changes_nothing() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        queues = cluster.add_topic("t", {"a": 2})
        async with Consumer(cluster) as one:
            one.rebalancer._strategy = lambda *_: [MessageQueue("t", "z", 9)]
            assert not await one.rebalancer.rebalance()
            assert "unknown queues" in str(one.rebalancer.allocations["t"].problem)
            one.rebalancer._strategy = lambda *_: 1 / 0  # type: ignore[assignment]
            assert not await one.rebalancer.rebalance()
            assert list(one.listener.queues) == queues

    run(body())


def test_bad_start_at_is_refused() -> None:
    with pytest.raises(BadSetting, match="newest"):
        Consumer(FakeCluster(), start_at="newest")  # type: ignore[arg-type]


def test_queue_with_a_lost_lock_restarts_at_the_offset_of_the_other_member() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        queues = cluster.add_topic("t", {"a": 2})
        async with Consumer(cluster, orderly=True) as one:
            assert one.locks is not None
            one.session.spawn(one.locks.keep_locked())
            one.offsets.update(queues[0], 4)
            cluster.locked[queues[0]] = ("other", cluster.clock.now_ms())
            cluster.stored[queues[0]] = 200
            await cluster.clock.elapse(21_000)
            assert list(one.listener.queues) == queues[1:]
            assert cluster.stored[queues[0]] == 200, "our progress is not that of the group"
            cluster.locked.pop(queues[0])
            await cluster.clock.elapse(10_000)
            assert one.listener.queues[queues[0]] == 200

    run(body())


def test_lock_that_may_have_expired_counts_as_lost() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        queues = cluster.add_topic("t", {"a": 1})
        async with Consumer(cluster, orderly=True) as one:
            assert one.locks is not None
            one.session.spawn(one.locks.keep_locked())
            one.offsets.update(queues[0], 4)
            cluster.down = {"a"}
            await cluster.clock.elapse(70_000)
            cluster.down = set()
            cluster.stored[queues[0]] = 200
            await cluster.clock.elapse(10_000)
            assert one.listener.queues == {queues[0]: 200}

    run(body())


def test_strategy_with_unknown_queues_changes_nothing() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        queues = cluster.add_topic("t", {"a": 2})
        async with Consumer(cluster) as one:
            things: list[list[Any]] = [[None, 3], [[]], [queues[0], "x"]]
            for nonsense in things:
                one.rebalancer._strategy = lambda *_, found=nonsense: found
                assert not await one.rebalancer.rebalance()
                assert one.rebalancer.allocations["t"].problem is not None
            assert list(one.listener.queues) == queues
            one.rebalancer._strategy = lambda *_: []
            assert await one.rebalancer.rebalance()
            await cluster.clock.elapse(0)
            one.rebalancer._strategy = lambda *_: [queues[0], queues[0]]
            assert await one.rebalancer.rebalance()
            assert list(one.listener.queues) == queues[:1], "taken once"

    run(body())


def test_refused_member_list_is_reported() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        cluster.add_topic("t", {"a": 2})
        cluster.refuse[RequestCode.GET_CONSUMER_LIST_BY_GROUP] = 16
        async with Consumer(cluster) as one:
            assert "refused by the test" in str(one.rebalancer.allocations["t"].problem)

    run(body())


def test_queue_of_an_unsubscribed_topic_is_not_started() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        queues = cluster.add_topic("t", {"a": 1})
        async with Consumer(cluster, topics=()) as one:
            one.listener.wanted = ["t"]
            working = asyncio.ensure_future(one.rebalancer.rebalance())
            while not cluster.count(RequestCode.QUERY_CONSUMER_OFFSET):
                await asyncio.sleep(0)
            one.listener.wanted = []
            await working
            assert not one.rebalancer.assigned
            one.listener.wanted = ["t"]
            await one.rebalancer.rebalance()
            assert list(one.listener.queues) == queues

    run(body())
