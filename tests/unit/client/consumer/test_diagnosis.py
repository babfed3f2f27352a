"""A consumer without messages logs the reason once."""

import logging
from datetime import datetime
from typing import Literal

import pytest

from penstock.client.consumer.diagnosis import Diagnosis
from penstock.client.consumer.dispatch.orderly import OrderlyQueueLocks
from penstock.client.consumer.offset_store import RemoteBrokerOffsetStore
from penstock.client.consumer.process_queue import FlowLimits, ProcessQueue
from penstock.client.consumer.rebalance import Rebalancer
from penstock.client.messages import MessageQueue
from penstock.wire.bodies.admin_bodies import ConsumerConnection
from penstock.wire.bodies.client_bodies import SubscriptionData
from penstock.wire.codes import RequestCode
from tests.unit.client.consumer.consumer_kit import messages
from tests.unit.client.consumer.group_kit import GROUP, FakeCluster, FakeListener, FakeSession, run

TOPIC = "Orders"


def subscription(text: str = "*", topic: str = TOPIC) -> SubscriptionData:
    tags = frozenset() if text == "*" else frozenset(text.split(" || "))
    return SubscriptionData(topic=topic, sub_string=text, tags_set=tags)


class Consumer:
    """A consumer whose queues the test fills."""

    group = GROUP
    start_at: Literal["last", "first"] | datetime = "last"

    def __init__(self, cluster: FakeCluster, *, name: str = "me", orderly: bool = False) -> None:
        self.cluster = cluster
        self.session = FakeSession(cluster, name)
        self.listener = FakeListener([TOPIC, "%RETRY%g"])
        self.process_queues: dict[MessageQueue, ProcessQueue] = {}
        self.wanted = [subscription()]
        real = self.session.real
        self.locks = OrderlyQueueLocks(real, GROUP, lambda queue: None) if orderly else None
        self.rebalancer = Rebalancer(
            real, GROUP, self.listener, RemoteBrokerOffsetStore(real, GROUP), locks=self.locks
        )
        self.diagnosis = Diagnosis(real, self, self.rebalancer, self.locks)

    def subscriptions(self) -> list[SubscriptionData]:
        return [*self.wanted, subscription("*", "%RETRY%g")]

    async def balance(self) -> None:
        await self.session.send_heartbeats()
        for _ in range(2):
            done = self.session.spawn(self.rebalancer.rebalance())
            await self.cluster.clock.elapse(1_000)
            assert done.done()
        self.process_queues = {
            queue: ProcessQueue(queue, offset, FlowLimits(messages_max=2))
            for queue, offset in self.listener.queues.items()
            if queue.topic == TOPIC
        }
        for process_queue in self.process_queues.values():
            process_queue.end_offset = process_queue.next_offset

    async def reason(self) -> str:
        (found,) = await self.diagnosis.explain()
        return found


def test_missing_route_is_explained() -> None:
    async def body() -> None:
        one = Consumer(FakeCluster())
        await one.balance()
        assert await one.reason() == "no broker has the topic 'Orders'"

    run(body())


def test_missing_subscription_is_explained() -> None:
    async def body() -> None:
        one = Consumer(FakeCluster())
        one.wanted.clear()
        assert await one.reason() == "there is no subscription"

    run(body())


def test_more_members_than_queues_is_explained() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        cluster.add_topic(TOPIC, {"broker-a": 2})
        cluster.members["broker-a"] = ["c1", "c2", "z9"]
        one = Consumer(cluster, name="z9")
        await one.balance()
        assert await one.reason() == (
            "no queue of Orders is assigned: its 2 queues go to 2 of the 3 members of g"
            " (c1 has 1, c2 has 1); stop members, or add queues to the topic"
        )

    run(body())


def test_strategy_that_assigns_nothing_is_explained() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        cluster.add_topic(TOPIC, {"broker-a": 2})
        cluster.members["broker-a"] = ["c1"]
        one = Consumer(cluster)
        one.rebalancer._strategy = lambda g, client, qs, cs: list(qs) if client == "c1" else []
        await one.balance()
        assert "the strategy assigns its 2 queues to others of the 2 members (c1 has 2)" in (
            await one.reason()
        )

    run(body())


def test_locks_of_other_members_are_explained() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        (queue,) = cluster.add_topic(TOPIC, {"broker-a": 1})
        cluster.locked[queue] = ("old", cluster.clock.now_ms())
        one = Consumer(cluster, orderly=True)
        await one.balance()
        assert await one.reason() == (
            "no queue of Orders is assigned yet: 1 queues are still locked by another member"
        )
        cluster.locked.clear()
        await one.balance()
        cluster.locked[queue] = ("old", cluster.clock.now_ms())
        assert one.locks is not None
        await one.locks.lock([queue])
        assert (
            "the locks of our 1 queues of Orders are held by a member that has left"
            in await one.reason()
        )
        cluster.locked.clear()
        await one.locks.lock([queue])
        await cluster.clock.elapse(31_000)
        assert await one.reason() == (
            "the locks of our 1 queues of Orders could not be renewed in time: check broker-a"
        )

    run(body())


async def alone(queues: int = 2) -> Consumer:
    cluster = FakeCluster()
    cluster.add_topic(TOPIC, {"broker-a": queues})
    one = Consumer(cluster)
    await one.balance()
    assert len(one.process_queues) == queues
    return one


def test_paused_and_busy_topics_are_explained() -> None:
    async def body() -> None:
        one = await alone()
        for work in one.process_queues.values():
            work.pause()
        assert await one.reason() == "Orders is paused: call resume() to continue"
        for work in one.process_queues.values():
            work.resume()
            work.add(messages(0, 1), 2)
        assert await one.reason() == (
            "flow control pauses the pulls of Orders: 2 messages are not handled, the limit is 2"
            " (in the first of its queues)"
        )

    run(body())


def test_filter_without_match_and_idle_topic_are_explained() -> None:
    async def body() -> None:
        one = await alone()
        one.wanted = [subscription("gold")]
        assert (await one.reason()).startswith(
            "there are no new messages in our 2 queues of Orders; a new group"
        )
        first = next(iter(one.process_queues.values()))
        first.add([], 90)
        assert await one.reason() == (
            "no message of Orders has matched 'gold' (TAG): compare the filter with the messages"
        )
        first.add(messages(90), 91)
        assert await one.diagnosis.explain() == []

    run(body())


def test_different_subscriptions_are_explained() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        cluster.add_topic(TOPIC, {"broker-a": 4})
        cluster.members["broker-a"] = ["other"]
        one = Consumer(cluster)
        one.wanted = [subscription("a || b")]
        await one.balance()
        cluster.connection = ConsumerConnection(subscription_table={TOPIC: subscription("c")})
        assert await one.reason() == (
            "members of g subscribe to Orders differently: others with 'c', this one with 'a || b';"
            " all members must have the same subscriptions"
        )
        cluster.connection = ConsumerConnection(subscription_table={TOPIC: subscription("b || a")})
        assert "no new messages" in await one.reason()
        cluster.connection = ConsumerConnection()
        assert "other members of g do not subscribe to Orders" in await one.reason()
        cluster.refuse[RequestCode.GET_CONSUMER_CONNECTION_LIST] = 16
        assert "no new messages" in await one.reason()

    run(body())


def test_each_reason_is_logged_once_until_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="penstock.client.consumer.diagnosis")

    def said() -> list[tuple[str, str]]:
        found = [(r.levelname, r.getMessage().partition(": ")[2][:12]) for r in caplog.records]
        caplog.clear()
        return found

    async def body() -> None:
        cluster = FakeCluster()
        one = Consumer(cluster)
        one.session.spawn(one.diagnosis.keep_explaining())
        await cluster.clock.elapse(9_000)
        caplog.clear()
        await cluster.clock.elapse(2_000)
        assert said() == [("WARNING", "no broker ha")]
        await cluster.clock.elapse(100_000)
        assert said() == []
        cluster.add_topic(TOPIC, {"broker-a": 1})
        await one.balance()
        await cluster.clock.elapse(30_000)
        assert ("INFO", "there are no") in said()
        (work,) = one.process_queues.values()
        work.add(messages(0), 1)
        await cluster.clock.elapse(30_000)
        assert said() == []
        work.pause()
        await cluster.clock.elapse(60_000)
        assert said() == [("INFO", "Orders is pa")]
        work.resume()
        await cluster.clock.elapse(30_000)
        work.pause()
        await cluster.clock.elapse(30_000)
        assert said() == [("INFO", "Orders is pa")]
        await one.session.end()

    run(body())


def test_failing_pulls_are_explained() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        cluster.add_topic(TOPIC, {"a": 2})
        one = Consumer(cluster)
        await one.balance()
        failing = next(iter(one.process_queues.values()))
        failing.pull_failure = "broker-a refuses: no permission"
        assert await one.reason() == (
            "pulls from 1 of our 2 queues of Orders fail: broker-a refuses: no permission"
        )
        failing.pull_failure = None
        assert "there are no new messages" in await one.reason()

    run(body())
