"""The error of a send: causes are named once, and a denied send is not repeated."""

import pytest

from penstock.errors import NoPermission, SendFailed
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
        sending = cluster.sender(retries=2).submit(ORDER)
        await cluster.clock.elapse(1_000)
        with pytest.raises(SendFailed) as caught:
            await sending
        assert str(caught.value).endswith(": broker-a:10911: can't connect: refused (3 times)")
        assert len(caught.value.attempts) == 3
        await cluster.end()

    run(body())
