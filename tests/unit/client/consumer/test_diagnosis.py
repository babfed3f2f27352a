"""A consumer that gets nothing says why, once."""

import logging
from datetime import datetime
from typing import Literal

import pytest

from penstock.client.consumer.diagnosis import Diagnosis
from penstock.client.consumer.dispatch.orderly import QueueLocks
from penstock.client.consumer.offset_store import RemoteOffsets
from penstock.client.consumer.process_queue import FlowLimits, ProcessQueue
from penstock.client.consumer.rebalance import Rebalancer
from penstock.client.messages import MessageQueue
from penstock.wire.bodies.admin_bodies import ConsumerConnection
from penstock.wire.bodies.client_bodies import SubscriptionData
from penstock.wire.codes import RequestCode
from tests.unit.client.consumer.consumer_kit import messages
from tests.unit.client.consumer.group_kit import GROUP, Cluster, FakeSession, Hands, run

TOPIC = "Orders"


def subscription(text: str = "*", topic: str = TOPIC) -> SubscriptionData:
    tags = frozenset() if text == "*" else frozenset(text.split(" || "))
    return SubscriptionData(topic=topic, sub_string=text, tags_set=tags)


class Consumer:
    """A consumer whose queues hold what the test puts there."""

    group = GROUP
    start_at: Literal["last", "first"] | datetime = "last"

    def __init__(self, cluster: Cluster, *, name: str = "me", orderly: bool = False) -> None:
        self.cluster = cluster
        self.session = FakeSession(cluster, name)
        self.hands = Hands([TOPIC, "%RETRY%g"])
        self.works: dict[MessageQueue, ProcessQueue] = {}
        self.wanted = [subscription()]
        real = self.session.real
        self.locks = QueueLocks(real, GROUP) if orderly else None
        self.rebalancer = Rebalancer(
            real, GROUP, self.hands, RemoteOffsets(real, GROUP), locks=self.locks
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
        self.works = {
            queue: ProcessQueue(queue, offset, FlowLimits(messages_max=2))
            for queue, offset in self.hands.holds.items()
            if queue.topic == TOPIC
        }
        for work in self.works.values():
            work.end_offset = work.next_offset

    async def reason(self) -> str:
        (found,) = await self.diagnosis.explain()
        return found


def test_no_route() -> None:
    async def body() -> None:
        one = Consumer(Cluster())
        await one.balance()
        assert await one.reason() == "no broker has the topic 'Orders'"

    run(body())


def test_no_subscription() -> None:
    async def body() -> None:
        one = Consumer(Cluster())
        one.wanted.clear()
        assert await one.reason() == "it subscribes to no topic"

    run(body())


def test_more_members_than_queues() -> None:
    async def body() -> None:
        cluster = Cluster()
        cluster.add_topic(TOPIC, {"broker-a": 2})
        cluster.members["broker-a"] = ["c1", "c2", "z9"]
        one = Consumer(cluster, name="z9")
        await one.balance()
        assert await one.reason() == (
            "no queue of Orders is ours: its 2 queues go to 2 of the 3 members of g"
            " (c1 has 1, c2 has 1); stop members, or give the topic more queues"
        )

    run(body())


def test_a_strategy_that_gives_us_nothing() -> None:
    async def body() -> None:
        cluster = Cluster()
        cluster.add_topic(TOPIC, {"broker-a": 2})
        cluster.members["broker-a"] = ["c1"]
        one = Consumer(cluster)
        one.rebalancer._strategy = lambda g, client, qs, cs: list(qs) if client == "c1" else []
        await one.balance()
        assert "the strategy gives its 2 queues to others of 2 members (c1 has 2)" in (
            await one.reason()
        )

    run(body())


def test_locks_that_others_hold() -> None:
    async def body() -> None:
        cluster = Cluster()
        (queue,) = cluster.add_topic(TOPIC, {"broker-a": 1})
        cluster.locked[queue] = ("old", cluster.clock.now_ms())
        one = Consumer(cluster, orderly=True)
        await one.balance()
        assert await one.reason() == (
            "no queue of Orders is ours yet: 1 queues are still locked by another member"
        )
        cluster.locked.clear()
        await one.balance()
        cluster.locked[queue] = ("old", cluster.clock.now_ms())
        assert one.locks is not None
        await one.locks.lock([queue])
        assert "the locks of our 1 queues of Orders are held elsewhere" in await one.reason()
        cluster.locked.clear()
        await one.locks.lock([queue])
        await cluster.clock.elapse(31_000)
        assert await one.reason() == (
            "the locks of our 1 queues of Orders could not be renewed in time:"
            " does broker-a answer?"
        )

    run(body())


async def alone(queues: int = 2) -> Consumer:
    cluster = Cluster()
    cluster.add_topic(TOPIC, {"broker-a": queues})
    one = Consumer(cluster)
    await one.balance()
    assert len(one.works) == queues
    return one


def test_paused_and_busy() -> None:
    async def body() -> None:
        one = await alone()
        for work in one.works.values():
            work.pause()
        assert await one.reason() == "Orders is paused: resume() lets it go on"
        for work in one.works.values():
            work.resume()
            work.add(messages(0, 1), 2)
        assert await one.reason() == (
            "the handlers of Orders have too much in work: 2 messages in work, the limit is 2"
            " (in the first of its queues)"
        )

    run(body())


def test_a_filter_that_fits_nothing_and_an_idle_topic() -> None:
    async def body() -> None:
        one = await alone()
        one.wanted = [subscription("gold")]
        assert (await one.reason()).startswith(
            "nothing new has come to the 2 queues of Orders that are ours; a new group"
        )
        first = next(iter(one.works.values()))
        first.add([], 90)
        assert await one.reason() == (
            "messages of Orders came by and none fits 'gold' (TAG): check the filter against what"
            " is sent"
        )
        first.add(messages(90), 91)
        assert await one.diagnosis.explain() == []

    run(body())


def test_members_that_subscribe_differently() -> None:
    async def body() -> None:
        cluster = Cluster()
        cluster.add_topic(TOPIC, {"broker-a": 4})
        cluster.members["broker-a"] = ["other"]
        one = Consumer(cluster)
        one.wanted = [subscription("a || b")]
        await one.balance()
        cluster.connection = ConsumerConnection(subscription_table={TOPIC: subscription("c")})
        assert await one.reason() == (
            "members of g subscribe to Orders differently, others by 'c', we by 'a || b':"
            " all must have the same subscription"
        )
        cluster.connection = ConsumerConnection(subscription_table={TOPIC: subscription("b || a")})
        assert "nothing new" in await one.reason()
        cluster.connection = ConsumerConnection()
        assert "other members of g do not subscribe to Orders" in await one.reason()
        cluster.refuse[RequestCode.GET_CONSUMER_CONNECTION_LIST] = 16
        assert "nothing new" in await one.reason()

    run(body())


def test_each_reason_is_said_once_until_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="penstock.client.consumer.diagnosis")

    def said() -> list[tuple[str, str]]:
        found = [(r.levelname, r.getMessage().partition(": ")[2][:12]) for r in caplog.records]
        caplog.clear()
        return found

    async def body() -> None:
        cluster = Cluster()
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
        assert ("INFO", "nothing new ") in said()
        (work,) = one.works.values()
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
