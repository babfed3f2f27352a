"""The error of a send, and what does not count as one: denied sends, blocked loops, long bodies."""

import pytest

from penstock.client.messages import Message, SendStatus
from penstock.client.topic_routes import Route
from penstock.clock import pause
from penstock.errors import NoPermission, NoRoute, SendFailed
from penstock.wire.codes import ResponseCode
from tests.unit.client.producer.sending_kit import FakeCluster
from tests.unit.client.producer.test_sending import ORDER, run


@pytest.mark.parametrize("names", [("broker-a",), ("broker-a", "broker-b", "broker-c")])
def test_a_broker_that_denies_permission_gets_no_further_attempt(names: tuple[str, ...]) -> None:
    async def body() -> None:
        cluster = FakeCluster(*names)
        sending = cluster.sender(retries=5).submit(ORDER)
        for _ in range(6):
            await cluster.clock.elapse(300)
            for broker in cluster.brokers.values():
                for frame in broker.requests():
                    broker.answer(frame, ResponseCode.NO_PERMISSION)
        assert [len(broker.seen) for broker in cluster.brokers.values()] == [1] * len(names)
        with pytest.raises(SendFailed) as caught:
            await sending
        assert {type(error) for error in caught.value.attempts} == {NoPermission}
        assert caught.value.hint == NoPermission.hint
        await cluster.end()

    run(body())


def test_identical_failures_are_told_once_with_their_count() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        cluster["broker-a"].up = False
        sending = cluster.sender(retries=2).submit(ORDER, timeout_ms=100)
        await cluster.clock.elapse(1_000)
        with pytest.raises(SendFailed, match="after 2 attempts in 100 ms") as caught:
            await sending
        assert str(caught.value).endswith(": broker-a:10911: can't connect: refused (2 times)")
        assert len(caught.value.attempts) == 2
        await cluster.end()

    run(body())


def test_time_in_which_the_application_blocks_the_loop_is_not_part_of_the_timeout() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        route = cluster.routes.pop("Orders")

        async def find_route(topic: str) -> Route:
            await pause(cluster.clock, 100)
            return route

        cluster.find_route = find_route  # type: ignore[assignment]
        sending = cluster.sender().submit(ORDER, timeout_ms=500)
        cluster.clock.advance(10_000)  # nothing else could run
        await cluster.clock.elapse(200)
        (frame,) = cluster["broker-a"].requests()
        cluster["broker-a"].answer(frame)
        assert (await sending).status is SendStatus.SEND_OK
        await cluster.end()

    run(body())


def test_unknown_topic_is_not_created_if_the_producer_must_not() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        cluster.add("TBW102", queues=8)
        sending = cluster.sender(create_topics=False).submit(Message("New", b"x"))
        await cluster.run_pending()
        with pytest.raises(NoRoute, match="'New'"):
            await sending
        assert cluster["broker-a"].requests() == []
        await cluster.end()

    run(body())


def test_an_unreachable_broker_is_tried_until_the_timeout() -> None:
    """Nothing was sent, and meanwhile another replica may be elected."""

    async def body() -> None:
        cluster = FakeCluster()
        broker = cluster["broker-a"]
        broker.up = False
        sender = cluster.sender(retries=1)
        sending, late = sender.submit(ORDER), sender.submit(ORDER, timeout_ms=500)
        await cluster.clock.elapse(1_500)
        with pytest.raises(SendFailed, match="attempts in 500 ms"):
            await late
        assert not sender.faults.reachable(broker.name)
        broker.up = True
        await cluster.clock.elapse(1_000)
        (frame,) = broker.requests()
        broker.answer(frame)
        assert (await sending).status is SendStatus.SEND_OK
        await cluster.end()

    run(body())
