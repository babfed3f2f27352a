"""Requests of brokers, and responses in the format of Java's tools."""

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from penstock.client.consumer import broker_requests
from penstock.client.consumer.consume_rates import Rates
from penstock.client.consumer.dispatch.orderly import OrderlyQueueLocks
from penstock.client.consumer.offset_store import RemoteBrokerOffsetStore
from penstock.client.consumer.rebalance import Rebalancer
from penstock.client.messages import MessageQueue
from penstock.client.received_message import HANDLING
from penstock.testing.virtual_clock import VirtualClock
from penstock.transport.peer import PeerRequest, Response
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import (
    ConsumeMessageDirectlyResult,
    ConsumerRunningInfo,
    ProcessQueueInfo,
    ResetOffsetBody,
)
from penstock.wire.codes import RequestCode
from tests.unit.client.consumer.consumer_kit import QUEUE, make_process_queue, messages
from tests.unit.client.consumer.group_kit import GROUP, FakeCluster, FakeListener, FakeSession, run

OTHER = MessageQueue("Orders", "broker-a", 2)


def request_of(code: int, body: bytes = b"", **ext: str) -> PeerRequest:
    return PeerRequest(code, ext, body, None, False, 1, 0, 0, 0, cast(Any, None))


class Consumer:
    """A consumer that records its calls."""

    group = GROUP

    def __init__(self) -> None:
        self.woken = 0
        self.resets: list[tuple[str, Mapping[MessageQueue, int]]] = []
        self.direct: list[tuple[bytes, str]] = []

    def members_changed(self) -> None:
        self.woken += 1

    async def reset(self, topic: str, offsets: Mapping[MessageQueue, int]) -> None:
        self.resets.append((topic, offsets))

    def progress(self, topic: str) -> dict[MessageQueue, int]:
        return {MessageQueue(topic, "broker-a", 3): 7}

    def running_info(self) -> ConsumerRunningInfo:
        return ConsumerRunningInfo(properties={"a": "b"})

    async def consume_directly(
        self, record: bytes, broker_name: str
    ) -> ConsumeMessageDirectlyResult:
        self.direct.append((record, broker_name))
        return ConsumeMessageDirectlyResult(consume_result="CR_SUCCESS")


def answer_to(consumer: Consumer, ask: PeerRequest) -> Response | None:
    """The answer, awaited if necessary."""
    found = broker_requests.handle_request(consumer, ask, "broker:1")
    assert not isinstance(found, bool)
    if found is None or isinstance(found, Response):
        return found

    async def wait() -> Response | None:
        return await found

    return asyncio.run(wait())


def test_members_changed_and_requests_of_other_groups() -> None:
    consumer = Consumer()
    ask = request_of(RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, consumerGroup=GROUP)
    assert answer_to(consumer, ask) is None
    assert consumer.woken == 1
    for code in (40, 220, 221, 307, 309):
        assert (
            broker_requests.handle_request(
                consumer, request_of(code, consumerGroup="h", group="h"), "b"
            )
            is False
        )
    assert (
        broker_requests.handle_request(consumer, request_of(326, consumerGroup=GROUP), "b") is False
    )
    assert broker_requests.handle_request(consumer, request_of(39), "b") is False


@pytest.mark.parametrize(
    "body",
    [
        fastjson.encode(ResetOffsetBody(offset_table={QUEUE: 5, MessageQueue("t", "b", 0): 1})),
        b'{"offsetTable":[{"brokerName":"broker-a","offset":5,"queueId":3,"topic":"Orders"}]}',
    ],
)
def test_reset_request_in_both_formats(body: bytes) -> None:
    consumer = Consumer()
    ask = request_of(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, body, topic="Orders", group=GROUP)
    assert answer_to(consumer, ask) is None
    assert consumer.resets == [("Orders", {QUEUE: 5})]


def test_malformed_reset_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    consumer = Consumer()
    ask = request_of(RequestCode.RESET_CONSUMER_CLIENT_OFFSET, b"{{", topic="Orders", group=GROUP)
    assert answer_to(consumer, ask) is None
    assert consumer.resets == []
    assert "cannot decode" in caplog.text


def test_status_and_running_info_use_javas_names() -> None:
    consumer = Consumer()
    status = answer_to(
        consumer,
        request_of(RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT, topic="Orders", group=GROUP),
    )
    assert status is not None
    assert status.body == (
        b'{"consumerTable":{},"messageQueueTable":'
        b'{{"brokerName":"broker-a","queueId":3,"topic":"Orders"}:7}}'
    )
    code = RequestCode.GET_CONSUMER_RUNNING_INFO
    plain = answer_to(consumer, request_of(code, consumerGroup=GROUP, jstackEnable="false"))
    assert plain is not None
    assert b"jstack" not in plain.body

    async def with_stacks() -> None:
        ask = request_of(code, consumerGroup=GROUP, jstackEnable="true")
        answer = broker_requests.handle_request(consumer, ask, "b")
        assert isinstance(answer, Response)
        info = fastjson.decode(answer.body, ConsumerRunningInfo)
        assert info.jstack is not None
        assert "test_broker_requests" in info.jstack
        assert info.properties == {"a": "b"}

    run(with_stacks())


def test_consume_message_directly() -> None:
    consumer = Consumer()
    code = RequestCode.CONSUME_MESSAGE_DIRECTLY
    answer = answer_to(
        consumer, request_of(code, b"REC", consumerGroup=GROUP, brokerName="broker-a")
    )
    assert answer is not None
    assert consumer.direct == [(b"REC", "broker-a")]
    assert answer.body == (
        b'{"autoCommit":true,"consumeResult":"CR_SUCCESS","order":false,"spentTimeMills":0}'
    )


def test_result_of_a_handler_decides_about_the_message() -> None:
    async def body() -> None:
        clock = VirtualClock()

        async def done() -> bool:
            clock.advance(12)
            return True

        async def later() -> bool:
            return False

        async def fails() -> bool:
            raise ValueError("no such order")

        result = await broker_requests.try_handler(done, clock, orderly=True)
        assert (result.consume_result, result.spent_time_mills, result.order) == (
            "CR_SUCCESS", 12, True,
        )  # fmt: skip
        assert (
            await broker_requests.try_handler(later, clock, orderly=False)
        ).consume_result == "CR_LATER"
        result = await broker_requests.try_handler(fails, clock, orderly=False)
        assert result.consume_result == "CR_THROW_EXCEPTION"
        assert result.remark == "ValueError: no such order"

    run(body())


def test_reset_restarts_the_queues() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        queues = cluster.add_topic("t", {"a": 2})
        session = FakeSession(cluster)
        listener = FakeListener(["t"])
        offsets = RemoteBrokerOffsetStore(session.real, GROUP)
        rebalancer = Rebalancer(session.real, GROUP, listener, offsets)
        await session.send_heartbeats()
        rebalancer.start()
        await cluster.clock.elapse(0)
        offsets.update(queues[0], 50)
        strange = MessageQueue("t", "z", 0)
        await broker_requests.reset_queues(rebalancer, offsets, {queues[0]: 3, strange: 4})
        await cluster.clock.elapse(1_000)
        assert listener.queues == {queues[1]: 0, queues[0]: 3}
        assert cluster.stored[queues[0]] == 3
        await session.end()

    run(body())


def test_running_info() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        session = FakeSession(cluster)
        offsets = RemoteBrokerOffsetStore(session.real, GROUP)
        locks = OrderlyQueueLocks(session.real, GROUP, lambda queue: None)
        cluster.add_topic("Orders", {"broker-a": 4})
        await locks.lock([QUEUE])
        cluster.clock.advance(1_000)
        process_queue = make_process_queue(4)
        process_queue.add(messages(4, 5, 6), 7)
        process_queue.failed = 2
        process_queue.last_failure = "ValueError: no"
        process_queue.pause()
        oldest = process_queue.oldest
        assert oldest is not None
        oldest.state, oldest.handling_since_ms = HANDLING, cluster.clock.monotonic_ms() - 300
        offsets.update(QUEUE, 4)
        info = broker_requests.running_info(
            session.real, subscriptions=[], process_queues=[process_queue], offsets=offsets,
            started_ms=17, settings={"consumerGroup": GROUP}, orderly=True, concurrency=20,
            locks=locks, rates=Rates(cluster.clock),
        )  # fmt: skip
        assert info.properties["PROP_CONSUMEORDERLY"] == "true"
        assert info.properties["PROP_CONSUMER_START_TIMESTAMP"] == "17"
        assert info.properties["PROP_NAMESERVER_ADDR"] == "ns:9876"
        assert info.mq_table == {
            QUEUE: ProcessQueueInfo(
                commit_offset=4, cached_msg_min_offset=4, cached_msg_max_offset=6,
                cached_msg_count=3, locked=True,
                last_lock_timestamp=cluster.clock.now_ms() - 1_000,
            )
        }  # fmt: skip
        queue = broker_requests.queue_text(QUEUE)
        assert info.user_consumer_info == {
            f"paused {queue}": "true",
            f"oldestInWorkSince {queue}": str(cluster.clock.now_ms() - 300),
            f"lastFailure {queue}": "ValueError: no",
        }

    run(body())


def test_rates_are_measured_since_an_earlier_query() -> None:
    clock = VirtualClock()
    rates = Rates(clock)
    process_queue = make_process_queue(0)
    clock.advance(10_000)
    process_queue.received, process_queue.finished, process_queue.failed, process_queue.busy_ms = (
        100,
        80,
        20,
        400,
    )
    first = rates.status("Orders", [process_queue])
    assert (first.pull_tps, first.consume_ok_tps, first.consume_failed_tps) == (10.0, 6.0, 2.0)
    assert (first.consume_rt, first.consume_failed_msgs) == (5.0, 20)
    clock.advance(5_000)
    process_queue.finished += 10
    assert rates.status("Orders", [process_queue]).consume_ok_tps == 70 / 15
    clock.advance(5_000)
    assert rates.status("Orders", [process_queue]).consume_ok_tps == 1.0, "since the first question"
    assert rates.status("Orders", []).consume_ok_tps == 0.0, "its queue has left"
    assert rates.status("Other", []).consume_rt == 0.0
