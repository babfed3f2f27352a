"""A client and a broker set: reads go to a replica while there is no master, changes do not."""

from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

import pytest

from penstock.client.client_options import ClientOptions
from penstock.client.client_session import Session
from penstock.client.consumer.dispatch.orderly import OrderlyQueueLocks
from penstock.client.consumer.offset_store import RemoteBrokerOffsetStore
from penstock.client.messages import MessageQueue
from penstock.client.producer.publish_info import TopicPublishInfo
from penstock.errors import NoQueue, NoRoute
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import (
    BrokerData,
    ConsumerData,
    LockBatchResponseBody,
    QueueData,
    TopicRouteData,
)
from penstock.wire.codes import RequestCode
from tests.integration.loops import Run, Wire, run, serving
from tests.integration.test_session import Group

__all__ = ["run"]

QUEUE = MessageQueue("Orders", "a", 0)
MASTER, REPLICA = 0, 1


class BrokerSet:
    """A NameServer, a master and a replica, which record the codes of their requests."""

    def __init__(self) -> None:
        self.addresses: dict[int, str] = {}
        self.order: str | None = None
        self.codes: dict[int, list[int]] = {MASTER: [], REPLICA: []}

    async def names(self, wire: Wire) -> None:
        while True:
            frame = await wire.read()
            route = TopicRouteData(
                order_topic_conf=self.order,
                queue_datas=[
                    QueueData(broker_name="a", read_queue_nums=1, write_queue_nums=1, perm=6)
                ],
                broker_datas=[BrokerData(broker_name="a", broker_addrs=self.addresses)],
            )
            wire.answer(frame, body=fastjson.encode_strict(route))

    def member(self, number: int) -> Callable[[Wire], Coroutine[Any, Any, None]]:
        async def serve(wire: Wire) -> None:
            while True:
                frame = await wire.read()
                self.codes[number].append(frame.code)
                body = b""
                if frame.code == RequestCode.LOCK_BATCH_MQ:
                    body = fastjson.encode(LockBatchResponseBody(lock_ok_mq_set=[QUEUE]))
                wire.answer(frame, ext={"offset": "7"}, body=body)

        return serve

    def took(self, code: int) -> list[int]:
        """The ids of the members that received a request with this code."""
        return [number for number, codes in self.codes.items() if code in codes]


class Producers(Group):
    def consumers(self) -> Iterable[ConsumerData]:
        return []


async def with_broker_set(body: Callable[[BrokerSet, Session], Awaitable[None]]) -> None:
    brokers = BrokerSet()
    async with (
        serving(brokers.names) as names,
        serving(brokers.member(MASTER)) as master,
        serving(brokers.member(REPLICA)) as replica,
    ):
        brokers.addresses = {MASTER: master.address, REPLICA: replica.address}
        session = Session(ClientOptions(names.address))
        await session.start()
        try:
            await session.route("Orders")
            await body(brokers, session)
        finally:
            await session.close()


async def lose_master(brokers: BrokerSet, session: Session) -> None:
    del brokers.addresses[MASTER]
    await session.find_route("Orders")


@pytest.mark.parametrize(
    ("member", "beaten"), [(Group, [MASTER, REPLICA]), (Producers, [MASTER])]
)  # fmt: skip
def test_consumers_send_heartbeats_to_all_and_producers_to_masters(
    run: Run, member: type[Group], beaten: list[int]
) -> None:
    async def body(brokers: BrokerSet, session: Session) -> None:
        await session.join(member())
        assert brokers.took(RequestCode.HEART_BEAT) == beaten

    run(with_broker_set(body))


def test_a_replica_gets_a_heartbeat_before_the_first_pull(run: Run) -> None:
    async def body(brokers: BrokerSet, session: Session) -> None:
        replica = brokers.addresses.pop(REPLICA)
        await session.find_route("Orders")
        await session.join(Group())
        brokers.addresses[REPLICA] = replica
        await session.find_route("Orders")
        await session.ensure_heartbeat("a", REPLICA)
        assert brokers.codes[REPLICA] == [RequestCode.HEART_BEAT]

    run(with_broker_set(body))


def test_offsets_are_read_and_stored_at_a_replica_only_without_a_master(run: Run) -> None:
    async def body(brokers: BrokerSet, session: Session) -> None:
        offsets = RemoteBrokerOffsetStore(session, "g")
        codes = [RequestCode.QUERY_CONSUMER_OFFSET, RequestCode.UPDATE_CONSUMER_OFFSET]
        assert await offsets.read(QUEUE) == 7
        await offsets.commit(QUEUE, 8)
        assert brokers.codes == {MASTER: codes, REPLICA: []}
        await lose_master(brokers, session)
        assert await offsets.read(QUEUE) == 7
        await offsets.commit(QUEUE, 8)
        assert brokers.codes == {MASTER: codes, REPLICA: codes}

    run(with_broker_set(body))


def test_a_master_is_required_for_locks(run: Run) -> None:
    """A lock at a replica would not exclude a consumer that still reaches the master."""

    async def body(brokers: BrokerSet, session: Session) -> None:
        locks = OrderlyQueueLocks(session, "g", lambda queue: None)
        assert await locks.lock([QUEUE]) == {QUEUE}
        await lose_master(brokers, session)
        assert await locks.lock([QUEUE]) == set()
        assert brokers.took(RequestCode.LOCK_BATCH_MQ) == [MASTER]

    run(with_broker_set(body))


def test_messages_are_sent_to_masters_only(run: Run) -> None:
    async def body(brokers: BrokerSet, session: Session) -> None:
        route = await session.route("Orders")
        (target,) = TopicPublishInfo(session, "g", "Orders", route).targets
        assert target.peer is not None
        assert target.peer.address == brokers.addresses[MASTER]
        await lose_master(brokers, session)
        route = await session.route("Orders")
        with pytest.raises(NoQueue, match="brokers in its route: a"):
            TopicPublishInfo(session, "g", "Orders", route)
        with pytest.raises(NoRoute, match="broker 'a' has no master now"):
            session.master("a")
        with pytest.raises(NoRoute, match="the address of broker 'b' is not known"):
            session.master("b")
        brokers.order = "a:1"  # the queues of an ordered topic do not depend on brokers
        route = await session.find_route("Orders") or route
        (target,) = TopicPublishInfo(session, "g", "Orders", route).targets
        assert target.peer is None

    run(with_broker_set(body))


def test_another_member_is_known_for_each_address(run: Run) -> None:
    async def body(brokers: BrokerSet, session: Session) -> None:
        master, replica = brokers.addresses[MASTER], brokers.addresses[REPLICA]
        assert session.other_address("a", master) == replica
        assert session.other_address("a", replica) == master
        await lose_master(brokers, session)
        assert session.other_address("a", replica) is None
        assert session.other_address("b", replica) is None

    run(with_broker_set(body))
