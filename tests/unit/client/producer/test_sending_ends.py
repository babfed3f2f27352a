"""Every way a send can end: its future is done, and it is no longer counted as in flight."""

import asyncio
import gc
import random
from collections.abc import Coroutine
from enum import Enum
from typing import Any

import pytest

from penstock.client.messages import Message, MessageQueue, SendReceipt, SendStatus
from penstock.client.producer.outgoing import BATCH_COUNT_MAX, Packer
from penstock.client.producer.producer_options import SendOptions
from penstock.errors import (
    ClientClosed,
    ClientError,
    FrameError,
    MessageIllegal,
    PeerError,
    PeerLost,
    SendFailed,
    TooMuchInFlight,
)
from penstock.transport.pending_calls import CALLS_MAX, Call
from penstock.wire.codes import ResponseCode
from penstock.wire.frame import HEADER_BYTES_MAX
from tests.unit.client.producer.sending_kit import FakeCluster, properties_of

ORDER = Message("Orders", b"one")


class Names(str, Enum):  # noqa: UP042 (as many applications have them; str() is another text)
    TOPIC = "Orders"
    TAG = "paid"
    VALUE = "high"


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(body)


async def answer_and_wait(cluster: FakeCluster, sending: "asyncio.Future[Any]") -> Any:
    """Answer the requests of the first broker; returns the result of the send."""
    await cluster.run_pending()
    for frame in cluster["broker-a"].requests():
        cluster["broker-a"].answer(frame)
    return await sending


def test_failed_write_is_not_counted_as_in_flight() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        sender = cluster.sender(in_flight_max=CALLS_MAX * 2)
        await answer_and_wait(cluster, sender.submit(ORDER))
        pending = cluster["broker-a"]._calls.pending
        pending.update(dict.fromkeys(range(-CALLS_MAX, 0), Call(1, 1, 1)))
        with pytest.raises(PeerError, match=f"limit is {CALLS_MAX}"):
            sender.submit(ORDER)
        assert (sender.in_flight.count, sender.in_flight.byte_count) == (0, 0)

    run(body())


@pytest.mark.parametrize("known", [False, True])
def test_request_that_cannot_be_encoded_is_not_counted(known: bool) -> None:
    async def body() -> None:
        fails = False

        def sign(code: int, ext: dict[str, str], body: bytes) -> dict[str, str]:
            if fails:
                raise FrameError("too long")
            return ext

        cluster = FakeCluster(sign=sign)
        sender = cluster.sender()
        if known:
            await answer_and_wait(cluster, sender.submit(ORDER))
        fails = True
        with pytest.raises(FrameError):
            await sender.submit(ORDER)
        assert (sender.in_flight.count, sender.in_flight.flush_group.count) == (0, 0)
        assert not cluster["broker-a"]._calls.pending

    run(body())


def test_busy_brokers_are_retried_with_pauses() -> None:
    async def body() -> None:
        cluster = FakeCluster("broker-a", "broker-b")
        sender = cluster.sender(retries=2)
        sending = sender.submit(ORDER)
        for _ in range(20):
            await cluster.run_pending()
            for broker in cluster.brokers.values():
                for frame in broker.requests():
                    broker.answer(frame, ResponseCode.SYSTEM_BUSY)
        calls = sum(len(broker.seen) for broker in cluster.brokers.values())
        assert calls == 3
        await cluster.clock.elapse(150)
        (broker,) = [b for b in cluster.brokers.values() if b._calls.pending]
        (frame,) = broker.requests()
        broker.answer(frame)
        assert (await sending).status is SendStatus.SEND_OK
        await cluster.end()

    run(body())


def test_deferred_retry_stops_at_the_timeout() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        sender = cluster.sender()
        sending = sender.submit(ORDER, timeout_ms=1_000)
        await cluster.clock.elapse(980)
        assert len(cluster["broker-a"].requests()) == 1
        cluster["broker-a"].fail(PeerLost)
        await cluster.clock.elapse(500)
        with pytest.raises(SendFailed, match="after 1 attempt"):
            await sending
        assert cluster["broker-a"].requests() == []
        assert sender.in_flight.count == 0
        await cluster.end()

    run(body())


def test_cancelled_deferred_send_is_not_written() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        cluster["broker-a"].connects = False
        sender = cluster.sender()
        sender.submit(ORDER).cancel()
        again = sender.submit(ORDER)
        await cluster.run_pending()
        assert len(cluster["broker-a"].requests()) == 1
        cluster["broker-a"].fail(PeerLost)
        await cluster.run_pending()
        again.cancel()
        await cluster.clock.elapse(500)
        assert cluster["broker-a"].requests() == []
        assert sender.in_flight.count == 0
        assert sender.deferred_counts == {}
        await cluster.end()

    run(body())


def test_unused_place_goes_to_the_next_waiter() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        sender = cluster.sender(in_flight_max=1)
        first = sender.submit(ORDER)
        bad = asyncio.ensure_future(sender.send(Message("Orders", b"")))
        good = asyncio.ensure_future(sender.send(ORDER))
        await answer_and_wait(cluster, first)
        with pytest.raises(MessageIllegal):
            await bad
        await answer_and_wait(cluster, good)
        assert sender.in_flight.count == 0

    run(body())


def test_close_wakes_all_waiters() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        sender = cluster.sender(in_flight_max=1)
        first = sender.submit(ORDER)
        waiting = [asyncio.ensure_future(sender.send(ORDER)) for _ in range(3)]
        await cluster.run_pending()
        closing = asyncio.ensure_future(sender.close(1_000))
        await answer_and_wait(cluster, first)
        await closing
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(one) for one in found] == [ClientClosed] * 3

    run(body())


def test_batch_count_is_limited_by_the_response_header() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        sender = cluster.sender()
        messages = [Message("Orders", b"%d" % n) for n in range(2 * BATCH_COUNT_MAX + 1)]
        sending = asyncio.ensure_future(sender.send_batch(messages))
        await cluster.run_pending()
        for frame in cluster["broker-a"].requests():
            ids = ["F" * 56] * (BATCH_COUNT_MAX if frame.code == 320 else 1)
            assert len(",".join(ids)) + 1_024 < HEADER_BYTES_MAX
            cluster["broker-a"].answer(frame, msgId=",".join(ids))
        assert len(await sending) == len(messages)

    run(body())


def test_batch_over_the_limit_tells_how_many_were_acknowledged() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        for topic in ("Others", "More"):
            cluster.add(topic)
        sender = cluster.sender(in_flight_max=1)
        messages = [Message(topic, b"x") for topic in ("Orders", "Others", "More")]
        sending = asyncio.ensure_future(sender.send_batch(messages))
        await cluster.clock.elapse(3_000)
        (frame,) = cluster["broker-a"].requests()
        cluster["broker-a"].answer(frame)
        with pytest.raises(TooMuchInFlight) as caught:
            await sending
        assert caught.value.__notes__[-1] == "1 of 3 messages were acknowledged"
        assert sender.in_flight.count == 0

    run(body())


def test_cancelled_batch_leaves_no_unretrieved_exception() -> None:
    async def body() -> None:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, c: complaints.append(c))
        cluster = FakeCluster()
        cluster.add("Others")
        sender = cluster.sender(retries=0)
        sending = asyncio.ensure_future(
            sender.send_batch([Message("Orders", b"x"), Message("Others", b"x")])
        )
        await cluster.run_pending()
        _, other = cluster["broker-a"].requests()
        cluster["broker-a"].answer(other, 13)
        sending.cancel()
        await cluster.run_pending()
        cluster["broker-a"].fail(PeerLost)
        await cluster.run_pending()
        assert sending.cancelled()
        assert sender.in_flight.count == 0
        gc.collect()
        assert complaints == []
        await cluster.end()

    run(body())


def test_bodies_in_a_batch_are_checked() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        sender = cluster.sender()
        bodies: list[Any] = [bytearray(b"one"), memoryview(b"two")]
        sending = asyncio.ensure_future(
            sender.send_batch([Message("Orders", content) for content in bodies])
        )
        await cluster.run_pending()
        (frame,) = cluster["broker-a"].requests()
        assert b"one" in frame.body
        assert b"two" in frame.body
        cluster["broker-a"].answer(frame)
        assert len(await sending) == 2
        nothing: Any = None
        with pytest.raises(MessageIllegal, match="body cannot be of type NoneType"):
            await sender.send_batch([Message("Orders", nothing)])
        assert Message("Orders", bodies[0]).content == b"one"

    run(body())


@pytest.mark.parametrize("many", [False, True])
def test_string_enum_members_are_accepted(many: bool) -> None:
    async def body() -> None:
        cluster = FakeCluster(namespace="acme")
        sender = cluster.sender()
        message = Message(Names.TOPIC, b"x", Names.TAG, [Names.TAG], {"level": Names.VALUE})
        sending: asyncio.Future[Any]
        if many:
            sending = asyncio.ensure_future(sender.send_batch([message, message]))
            await cluster.run_pending()
            (frame,) = cluster["broker-a"].requests()
            assert b"TAGS\x01paid" in frame.body
        else:
            sending = sender.submit(message)
            await cluster.run_pending()
            (frame,) = cluster["broker-a"].requests()
            properties = properties_of(frame)
            assert (properties["TAGS"], properties["KEYS"]) == ("paid", "paid")
            assert properties["level"] == "high"
        assert frame.ext["b"] == "acme%Orders"
        cluster["broker-a"].answer(frame)
        await sending
        assert [type(topic) for topic in sender.publish_infos] == [str]

    run(body())


@pytest.mark.parametrize("parts", [{"tags": 5}, {"topic": 5}, {"properties": {(): "x"}}])
def test_values_that_are_not_strings_are_refused(parts: dict[str, Any]) -> None:
    async def body() -> None:
        sender = FakeCluster().sender()
        with pytest.raises(MessageIllegal, match=r"not int|must be strings"):
            sender.submit(Message(**{"topic": "Orders", "body": b"x", **parts}))

    run(body())


def test_deferred_send_keeps_its_queue() -> None:
    async def body() -> None:
        cluster = FakeCluster(queues=4)
        broker, sender = cluster["broker-a"], cluster.sender()
        first: SendReceipt = await answer_and_wait(cluster, sender.submit(ORDER))
        calls = []

        def select(queues: Any, message: Message) -> MessageQueue:
            calls.append(1)
            found: MessageQueue = queues[2]
            return found

        for number in (1, 2, 3):
            broker.connects = False
            receipt = await answer_and_wait(cluster, sender.submit(ORDER))
            assert receipt.queue.queue_id == (first.queue.queue_id + number) % 4
        broker.connects = False
        assert (
            await answer_and_wait(cluster, sender.submit(ORDER, selector=select))
        ).queue.queue_id == 2
        assert calls == [1]

    run(body())


def test_use_on_another_thread_or_loop_is_refused() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        sender = cluster.sender()
        await answer_and_wait(cluster, sender.submit(ORDER))

        async def elsewhere() -> None:
            sender.submit(ORDER)

        for call in (lambda: sender.submit(ORDER), lambda: asyncio.run(elsewhere())):
            with pytest.raises(ClientError, match="another event loop or thread"):
                await asyncio.to_thread(call)
        with pytest.raises(ClientError, match="another event loop or thread"):
            await asyncio.to_thread(sender.check_usable)
        assert sender.in_flight.count == 0
        assert cluster["broker-a"].requests() == []

    run(body())


def test_unreachable_broker_does_not_delay_the_others() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        sender = cluster.sender()
        reports: list[str] = []
        sender.faults.report = lambda name, ms, **_: reports.append(name)  # type: ignore[method-assign]
        sender.faulty_brokers.add("broker-z")
        await answer_and_wait(cluster, sender.submit(ORDER))
        assert reports == []
        sender.faulty_brokers.add("broker-a")
        await answer_and_wait(cluster, sender.submit(ORDER))
        assert reports == ["broker-a"]
        assert sender.faulty_brokers == {"broker-z"}

    run(body())


def test_close_cancels_route_queries() -> None:
    async def body() -> None:
        cluster = FakeCluster()

        async def never(topic: str) -> None:
            await asyncio.Event().wait()

        cluster.find_route = never  # type: ignore[method-assign]
        sender = cluster.sender()
        sending = sender.submit(Message("Unknown", b"x"), timeout_ms=60_000)
        oneway = asyncio.ensure_future(
            sender.send_oneway(Message("Unknown", b"x"), timeout_ms=60_000)
        )
        await cluster.run_pending()
        closing = asyncio.ensure_future(sender.close(1_000))
        await cluster.clock.elapse(1_000)
        await closing
        for waiting in (sending, oneway):
            with pytest.raises(ClientClosed):
                await waiting
        await cluster.run_pending()
        assert sender._route_queries == {}
        assert sender.in_flight.count == 0

    run(body())


def test_restart_uses_new_connections() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        sender = cluster.sender()
        await answer_and_wait(cluster, sender.submit(ORDER))
        await sender.close(1_000)
        before = cluster.brokers["broker-a"]
        cluster.brokers["broker-a"] = type(before)(before.name, before.address)
        sender.start()
        await answer_and_wait(cluster, sender.submit(ORDER))
        assert len(cluster["broker-a"].seen) == 1

    run(body())


def test_message_ids_do_not_depend_on_the_random_seed() -> None:
    def make() -> str:
        random.seed(7)
        found: str = Packer(SendOptions(), "", "10.0.0.1").next_id(1_700_000_000_000)
        return found

    assert make() != make()
