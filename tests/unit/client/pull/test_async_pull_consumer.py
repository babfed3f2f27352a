"""Pull consumers: polling, positions, commits, rebalancing."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from penstock.client.messages import MessageQueue
from penstock.client.pull.async_pull_consumer import AsyncPullConsumer
from penstock.client.received_message import ReceivedMessage
from penstock.errors import (
    BadSetting,
    ClientClosed,
    InvalidParameter,
    PeerTimeout,
    QueueNotAssigned,
)
from penstock.transport.peer import PeerRequest, Response
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import (
    ConsumerRunningInfo,
    GetConsumerStatusBody,
    ResetOffsetBody,
)
from penstock.wire.codes import RequestCode
from tests.unit.client.client_kit import BROKER, ClientBrokerFixture, FixtureSession, session_of

PULL, UPDATE = RequestCode.PULL_MESSAGE, RequestCode.UPDATE_CONSUMER_OFFSET
Q = [MessageQueue("T", BROKER, number) for number in range(4)]


class PullFixture:
    """A broker with the topic T of four queues, a session and a consumer of the group G."""

    def __init__(self, broker_fixture: ClientBrokerFixture, **options: Any) -> None:
        self.broker_fixture = broker_fixture
        self.session = FixtureSession(broker_fixture)
        options = {"start_at": "first", **options}
        with session_of("pull.async_pull_consumer", self.session):
            self.consumer = AsyncPullConsumer(group="G", **options)

    def send(self, queue_id: int, *bodies: str, tag: str = "") -> None:
        for body in bodies:
            assert self.broker_fixture.send("T", queue_id, body.encode(), tag).code == 0
        self.broker_fixture.store.publish()

    async def poll(self, count_max: int = 100) -> list[ReceivedMessage]:
        """All messages that can be polled now."""
        await self.session.elapse(1)
        return await self.consumer.poll(0, count_max=count_max)

    async def bodies(self, count_max: int = 100) -> list[str]:
        return sorted(message.body.decode() for message in await self.poll(count_max))

    def stored(self, queue_id: int = 0) -> int | None:
        return self.broker_fixture.context.offsets.get("G", "T", queue_id)


@pytest.fixture
def run_test(tmp_path: Path) -> Callable[..., None]:
    def run(body: Callable[[PullFixture], Coroutine[Any, Any, None]], **options: Any) -> None:
        async def main() -> None:
            async with pull_fixture(tmp_path / "store", **options) as made:
                await body(made)

        asyncio.run(main())

    return run


@asynccontextmanager
async def pull_fixture(root: Path, **options: Any) -> AsyncIterator[PullFixture]:
    broker_fixture = ClientBrokerFixture(root)
    try:
        broker_fixture.send("T", 0, b"first")
        made = PullFixture(broker_fixture, **options)
        async with made.consumer:
            yield made
    finally:
        broker_fixture.close()


# --- polling


def test_assigned_queues_are_polled_in_order(run_test: Any) -> None:
    async def body(fixture: PullFixture) -> None:
        consumer = fixture.consumer
        assert await consumer.queues("T") == Q
        consumer.assign(Q[:2])
        assert consumer.assignment() == Q[:2]
        fixture.send(0, *"abc")
        fixture.send(1, *"xyz")
        fixture.send(2, "not ours")
        got = await fixture.poll()
        for queue in Q[:2]:
            mine = [m.queue_offset for m in got if m.queue == queue]
            assert mine == list(range(len(mine)))
            assert await consumer.position(queue) == len(mine)
        assert sorted(m.body for m in got) == sorted([b"first", *map(str.encode, "abcxyz")])
        assert await fixture.poll() == []

    run_test(body)


def test_poll_waits_for_the_first_message(run_test: Any) -> None:
    async def body(fixture: PullFixture) -> None:
        fixture.consumer.assign(Q)
        assert await fixture.bodies() == ["first"]
        polling = asyncio.ensure_future(fixture.consumer.poll(30_000))
        await fixture.session.elapse(20_000)
        assert not polling.done()
        fixture.send(3, "now")
        await fixture.session.elapse(500)
        assert [m.body for m in await polling] == [b"now"]
        polling = asyncio.ensure_future(fixture.consumer.poll(2_000))
        await fixture.session.elapse(2_500)
        assert await polling == []

    run_test(body)


def test_poll_is_limited_and_all_queues_get_a_turn(run_test: Any) -> None:
    async def body(fixture: PullFixture) -> None:
        for queue_id in range(4):
            fixture.send(queue_id, *(f"{queue_id}{n}" for n in range(10)))
        fixture.consumer.assign(Q)
        begun = set()
        for _ in range(4):
            (message,) = await fixture.poll(1)
            begun.add(message.queue)
        assert begun == set(Q)
        assert len(await fixture.poll(30)) == 30
        assert len(await fixture.poll(30)) == 7

    run_test(body)


def test_fetched_messages_are_limited(run_test: Any) -> None:
    async def body(fixture: PullFixture) -> None:
        fixture.send(0, *map(str, range(200)))
        fixture.consumer.assign(Q[:1])
        await fixture.session.elapse(5_000)
        pulls = fixture.session.counts[PULL]
        await fixture.session.elapse(60_000)
        assert fixture.session.counts[PULL] == pulls == 4
        got = 0
        while some := await fixture.poll():
            got += len(some)
        assert got == 201

    run_test(body, messages_max=100)


def test_position_advances_over_filtered_messages(run_test: Any) -> None:
    async def body(fixture: PullFixture) -> None:
        fixture.send(0, *"ab", tag="x")
        fixture.send(0, *"cd", tag="y")
        # "Aa" and "BB" have the same hash
        fixture.send(0, "e", tag="Aa")
        fixture.send(0, "f", tag="BB")
        consumer = fixture.consumer
        consumer.assign(Q[:1], "x || Aa")
        assert await fixture.bodies() == ["a", "b", "e"]
        assert await consumer.position(Q[0]) == 7
        consumer.assign(Q[:1], sql="TAGS = 'y'")
        await consumer.seek_to_begin(Q[0])
        assert await fixture.bodies() == ["c", "d"]

    run_test(body)


def test_paused_queues_keep_fetched_messages(run_test: Any) -> None:
    async def body(fixture: PullFixture) -> None:
        consumer = fixture.consumer
        consumer.assign(Q[:2])
        consumer.pause(Q[:1])  # before it has started
        fixture.send(1, "x")
        assert await fixture.bodies() == ["x"]
        consumer.resume(Q[:1])
        await fixture.session.elapse(100)
        consumer.pause(Q[:2])
        assert await fixture.poll() == []
        polling = asyncio.ensure_future(consumer.poll(5_000))
        await fixture.session.elapse(1_000)
        consumer.resume(Q[:1])
        await fixture.session.elapse(100)
        assert [m.body for m in await polling] == [b"first"]

    run_test(body)


# --- positions


def test_seek(run_test: Any) -> None:
    async def body(fixture: PullFixture) -> None:
        consumer = fixture.consumer
        fixture.send(0, *"abcdef")
        consumer.assign(Q[:1])
        await fixture.poll()
        await consumer.seek(Q[0], 5)
        assert await consumer.position(Q[0]) == 5
        assert await fixture.bodies() == ["e", "f"]
        await consumer.seek_to_begin(Q[0])
        assert len(await fixture.bodies()) == 7
        await consumer.seek_to_end(Q[0])
        assert await fixture.bodies() == []
        fixture.send(0, "g")
        assert await fixture.bodies() == ["g"]
        await consumer.seek_to_time(Q[0], datetime(2001, 1, 1, tzinfo=UTC))
        assert len(await fixture.bodies()) == 8
        assert await consumer.begin_offset(Q[0]) == 0
        assert await consumer.end_offset(Q[0]) == 8
        for wrong in (-1, 9):
            with pytest.raises(InvalidParameter, match="0 to 8"):
                await consumer.seek(Q[0], wrong)
        assert await consumer.position(Q[0]) == 8

    run_test(body)


def test_messages_fetched_before_a_seek_are_discarded(run_test: Any) -> None:
    async def body(fixture: PullFixture) -> None:
        fixture.send(0, *map(str, range(40)))
        fixture.consumer.assign(Q[:1])
        assert len(await fixture.poll(10)) == 10
        await fixture.consumer.seek(Q[0], 30)
        assert [m.queue_offset for m in await fixture.poll()] == list(range(30, 41))

    run_test(body)


def test_position_that_the_broker_does_not_have_is_moved(run_test: Any) -> None:
    async def body(fixture: PullFixture) -> None:
        fixture.broker_fixture.context.offsets.commit(
            "G", "T", 0, 50, fixture.broker_fixture.now_ms
        )
        fixture.consumer.assign(Q[:1])
        await fixture.session.elapse(100)
        assert await fixture.consumer.position(Q[0]) == 1
        fixture.send(0, "next")
        assert await fixture.bodies() == ["next"]

    run_test(body)


def test_assign_replaces_the_assignment(run_test: Any) -> None:
    async def body(fixture: PullFixture) -> None:
        consumer = fixture.consumer
        fixture.send(1, "a", "b")
        consumer.assign(Q[:2])
        assert await fixture.bodies() == ["a", "b", "first"]
        assert await fixture.poll() == []
        consumer.assign(Q[1:3])
        await fixture.session.elapse(100)
        assert fixture.stored(0) == 1, "progress of what is given up is stored"
        assert consumer.assignment() == Q[1:3]
        with pytest.raises(QueueNotAssigned):
            await consumer.seek(Q[0], 0)
        with pytest.raises(QueueNotAssigned):
            consumer.pause(Q[:1])
        assert await fixture.poll() == []
        consumer.assign([])
        assert await fixture.poll() == []
        consumer.assign(Q[:2])
        fixture.send(0, "c")
        assert await fixture.bodies() == ["c"]

    run_test(body)


# --- progress


def test_auto_commit_after_the_next_poll(run_test: Any) -> None:
    async def body(fixture: PullFixture) -> None:
        fixture.consumer.assign(Q[:1])
        assert await fixture.bodies() == ["first"]
        await fixture.session.elapse(11_000)
        assert fixture.stored() is None, "the application may still be at it"
        await fixture.poll()
        await fixture.session.elapse(6_000)
        assert fixture.stored() == 1

    run_test(body)


def test_offsets_are_committed_at_the_end_unless_there_is_an_error(tmp_path: Path) -> None:
    async def body(error: type[Exception] | None, stored: int | None) -> None:
        broker_fixture = ClientBrokerFixture(tmp_path / str(error))
        broker_fixture.send("T", 0, b"first")
        one = PullFixture(broker_fixture)
        try:
            async with one.consumer as consumer:
                consumer.assign(Q[:1])
                assert await one.bodies() == ["first"]
                if error is not None:
                    raise error
        except KeyError:
            pass
        assert one.stored() == stored
        broker_fixture.close()

    asyncio.run(body(None, 1))
    asyncio.run(body(KeyError, None))


def test_offsets_are_committed_manually(run_test: Any) -> None:
    async def body(fixture: PullFixture) -> None:
        consumer = fixture.consumer
        fixture.send(0, *"abc")
        fixture.send(1, "x")
        consumer.assign(Q[:2])
        assert await consumer.committed(Q[0]) is None
        assert len(await fixture.poll()) == 5
        await fixture.poll()
        await fixture.session.elapse(20_000)
        assert (fixture.stored(0), fixture.session.counts[UPDATE]) == (None, 0)
        await consumer.commit({Q[0]: 2})
        assert (fixture.stored(0), fixture.stored(1)) == (2, None)
        for wrong in (5, -1):
            with pytest.raises(InvalidParameter, match="its position is 4"):
                await consumer.commit({Q[0]: wrong})
        with pytest.raises(QueueNotAssigned):
            await consumer.commit({Q[3]: 0})
        await consumer.commit()
        assert (fixture.stored(0), fixture.stored(1)) == (4, 1)
        assert await consumer.committed(Q[0]) == 4
        await consumer.seek(Q[0], 1)
        await consumer.commit()
        assert fixture.stored(0) == 1, "back is a direction too"
        fixture.session.lose = lambda code: "request" if code == UPDATE else None
        with pytest.raises(PeerTimeout):
            await consumer.commit()

    run_test(body, auto_commit=False)


def test_start_position_of_a_new_group(run_test: Any) -> None:
    async def body(fixture: PullFixture) -> None:
        fixture.consumer.assign(Q[:1])
        # Brokers return 0 for a new group on a young queue, which has all its messages.
        assert await fixture.bodies() == ["first"]

    run_test(body, start_at="last")


def test_broadcast_offsets_are_local(run_test: Any, tmp_path: Path) -> None:
    file = tmp_path / "offsets.json"

    async def body(fixture: PullFixture) -> None:
        fixture.consumer.assign(Q[:1])
        assert await fixture.bodies() == ["first"]
        await fixture.consumer.commit()
        assert await fixture.consumer.committed(Q[0]) == 1
        assert fixture.stored() is None
        assert file.exists()

    run_test(body, model="broadcast", offsets_path=file)


# --- rebalancing


def test_subscribed_topics_are_assigned_and_listeners_are_called(run_test: Any) -> None:
    heard: list[tuple[str, list[MessageQueue]]] = []

    async def revoked(queues: list[MessageQueue]) -> None:
        heard.append(("-", queues))
        raise ValueError("a listener's own fault")

    async def body(fixture: PullFixture) -> None:
        consumer = fixture.consumer
        consumer.subscribe("T")
        await fixture.session.elapse(1_000)
        assert consumer.assignment() == Q
        assert heard == [("+", Q)]
        assert await fixture.bodies() == ["first"]
        with pytest.raises(InvalidParameter, match="subscribed"):
            consumer.assign(Q)
        consumer.unsubscribe("T")
        await fixture.session.elapse(21_000)
        assert consumer.assignment() == []
        assert sorted(heard[1:]) == [("-", [queue]) for queue in Q]
        assert fixture.stored() in (None, 0), "what was polled last does not count as done yet"

    run_test(body, on_assigned=lambda queues: heard.append(("+", queues)), on_revoked=revoked)


def test_listener_can_commit_a_revoked_queue(run_test: Any) -> None:
    scenes: list[PullFixture] = []

    async def revoked(queues: list[MessageQueue]) -> None:
        consumer = scenes[0].consumer
        for queue in queues:
            await consumer.commit({queue: await consumer.position(queue)})

    async def body(fixture: PullFixture) -> None:
        scenes.append(fixture)
        fixture.consumer.subscribe("T")
        await fixture.session.elapse(1_000)
        assert await fixture.bodies() == ["first"]
        await fixture.consumer.close()
        assert fixture.stored() == 1
        await fixture.consumer.start()

    run_test(body, auto_commit=False, on_revoked=revoked)


def test_subscriptions_are_in_heartbeats(run_test: Any) -> None:
    async def body(fixture: PullFixture) -> None:
        core = fixture.session.members[0]
        (data,) = core.consumers()
        assert (data.consume_type, data.message_model) == ("CONSUME_ACTIVELY", "CLUSTERING")
        fixture.consumer.assign(Q)
        (data,) = core.consumers()
        assert data.subscription_data_set == [], "assigned queues are not subscribed"
        with pytest.raises(InvalidParameter, match="assigned"):
            fixture.consumer.subscribe("T")

    run_test(body)

    async def subscribed(fixture: PullFixture) -> None:
        fixture.consumer.subscribe("T", "a || b")
        (data,) = fixture.session.members[0].consumers()
        (subscription,) = data.subscription_data_set
        assert (subscription.topic, subscription.tags_set) == ("T", frozenset({"a", "b"}))

    run_test(subscribed)


# --- requests of brokers


def send_request(fixture: PullFixture, code: int, body: bytes = b"", **ext: str) -> Any:
    ask = PeerRequest(code, ext, body, None, False, 1, 0, 493, 0, None)  # type: ignore[arg-type]
    return fixture.session.members[0].handle_request(ask, BROKER)


def test_consumer_status_and_reset_requests(run_test: Any) -> None:
    async def body(fixture: PullFixture) -> None:
        fixture.send(0, *"abc")
        fixture.consumer.assign(Q[:1])
        await fixture.poll()
        await fixture.poll()
        answer = send_request(
            fixture, RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, group="G", topic="T"
        )
        assert isinstance(answer, Response)
        status = fastjson.decode(answer.body, GetConsumerStatusBody)
        assert status.message_queue_table == {Q[0]: 4}
        answer = send_request(fixture, RequestCode.GET_CONSUMER_RUNNING_INFO, consumerGroup="G")
        info = fastjson.decode(answer.body, ConsumerRunningInfo)
        assert list(info.mq_table) == Q[:1]
        table = fastjson.encode(ResetOffsetBody(offset_table={Q[0]: 2, Q[1]: 5}))
        await send_request(
            fixture, RequestCode.RESET_CONSUMER_CLIENT_OFFSET, table, group="G", topic="T"
        )
        assert fixture.stored() == 2
        assert await fixture.bodies() == ["b", "c"]
        assert (
            send_request(fixture, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, consumerGroup="G")
            is None
        )
        assert (
            send_request(fixture, RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, consumerGroup="H")
            is False
        )

    run_test(body)


def test_wrong_calls_have_a_hint(run_test: Any) -> None:
    async def body(fixture: PullFixture) -> None:
        consumer = fixture.consumer
        with pytest.raises(InvalidParameter, match="no subscription or assignment"):
            await consumer.poll()
        consumer.assign(Q[:1])
        with pytest.raises(InvalidParameter, match="count_max"):
            await consumer.poll(count_max=0)
        with pytest.raises(QueueNotAssigned):
            await consumer.position(Q[1])
        await consumer.close()
        await consumer.close()
        with pytest.raises(ClientClosed):
            await consumer.poll()
        await consumer.start()

    run_test(body)
    wrongs: list[dict[str, Any]] = [
        {"group": ""}, {"auto_commit_ms": 0}, {"model": "x"}, {"offsets_path": "x"},
    ]  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(BadSetting):
            AsyncPullConsumer(**{"group": "G", **wrong})
