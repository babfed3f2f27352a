"""Sending without a server: choice of queues, retries, limits of sends in flight."""

import asyncio
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

import pytest

from penstock.client.messages import Message, MessageQueue, SendReceipt, SendStatus
from penstock.client.producer.outgoing import BATCH_BYTES_MAX
from penstock.client.producer.producer_options import SendOptions
from penstock.errors import (
    BadSetting,
    ClientClosed,
    MessageIllegal,
    NoPermission,
    NoQueue,
    NoRoute,
    PeerLost,
    PeerTimeout,
    PeerUnreachable,
    PenstockError,
    SendFailed,
    TooMuchInFlight,
)
from penstock.wire.codes import RETRYABLE_RESPONSES, ResponseCode
from penstock.wire.compression import decompress
from penstock.wire.frame import BINARY, JSON
from penstock.wire.record import java_hash
from tests.unit.client.producer.sending_kit import FakeCluster, properties_of

ORDER = Message("Orders", b"one", tags="t", keys=["k1", "k2"])


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(body)


def test_queues_are_used_in_turn() -> None:
    async def body() -> None:
        cluster = FakeCluster(queues=3)
        sender = cluster.sender()
        sending = [sender.submit(ORDER) for _ in range(6)]
        await cluster.run_pending()
        sending += [sender.submit(ORDER) for _ in range(3)]
        frames = cluster["broker-a"].requests()
        ids = [int(frame.ext["e"]) for frame in frames]
        assert [(one - ids[0]) % 3 for one in ids] == [0, 1, 2] * 3
        for frame in frames:
            cluster["broker-a"].answer(frame)
        receipts = await asyncio.gather(*sending)
        assert {receipt.queue.queue_id for receipt in receipts} == {0, 1, 2}
        assert len({receipt.message_id for receipt in receipts}) == 9
        assert sender.in_flight.count == 0
        assert sender.in_flight.byte_count == 0

    run(body())


def test_request_carries_the_message_without_changing_it() -> None:
    async def body() -> None:
        cluster = FakeCluster(namespace="acme")
        sender = cluster.sender()
        message = Message("Orders", b"one", "t", ["k1", "k2"], {"mine": "1"}, flag=9)
        sending = [sender.submit(message), sender.submit(message)]
        await cluster.run_pending()
        first, second = cluster["broker-a"].requests()
        assert (first.code, first.encoding, first.body) == (310, BINARY, b"one")
        fields = {name: first.ext[name] for name in "abcdfhn"}
        assert fields == {
            "a": "acme%group", "b": "acme%Orders", "c": "TBW102", "d": "4", "f": "0", "h": "9",
            "n": "broker-a",
        }  # fmt: skip
        assert first.ext["g"] == str(cluster.clock.now_ms())
        properties = properties_of(first)
        assert properties_of(second)["UNIQ_KEY"] != properties.pop("UNIQ_KEY")
        assert properties == {
            "TAGS": "t", "KEYS": "k1 k2", "mine": "1", "WAIT": "true", "INSTANCE_ID": "acme",
        }  # fmt: skip
        assert message == Message("Orders", b"one", "t", ["k1", "k2"], {"mine": "1"}, flag=9)
        cluster["broker-a"].answer(first)
        cluster["broker-a"].answer(second)
        assert (await sending[0]).queue.topic == "Orders"

    run(body())


def test_unknown_topic_uses_the_template_topic_until_it_has_a_route() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        cluster.add("TBW102", queues=8)
        sender = cluster.sender()
        for _ in range(9):
            sender.submit(Message("New", b"x"))
        await cluster.run_pending()
        frames = cluster["broker-a"].requests()
        assert {frame.ext["e"] for frame in frames} == {"0", "1", "2", "3"}
        assert "New" in sender.topics()
        sender.route_changed(cluster.add("New", queues=1))
        sender.submit(Message("New", b"x"))
        await cluster.run_pending()
        (frame,) = cluster["broker-a"].requests()
        assert frame.ext["e"] == "0"
        assert cluster.routes_asked == ["New", "TBW102"] or cluster.routes_asked == ["New"]

    run(body())


def test_topic_without_any_route_is_an_error() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        sender = cluster.sender()
        with pytest.raises(NoRoute, match="'Nowhere'"):
            await sender.send(Message("Nowhere", b"x"))
        cluster.add("Closed", perm=4)
        with pytest.raises(NoQueue, match="'Closed' has no writable queue"):
            await sender.send(Message("Closed", b"x"))
        assert sender.in_flight.count == 0
        assert sender.deferred_counts == {}

    run(body())


@pytest.mark.parametrize(
    ("message", "kind", "reason"),
    [
        (Message("Orders", b""), MessageIllegal, "is empty"),
        (Message("Orders", bytes(101)), MessageIllegal, "101 bytes, the limit is 100"),
        (Message("no/name", b"x"), MessageIllegal, "contains '/'"),
        (Message("T" * 128, b"x"), MessageIllegal, "128 characters, the limit is 127"),
        (Message("SCHEDULE_TOPIC_XXXX", b"x"), NoPermission, "only brokers"),
        (Message("Orders", b"x", delay_level=19), MessageIllegal, "delay level 19"),
        (Message("Orders", b"x", delay=timedelta(seconds=-1)), MessageIllegal, "-1000 ms"),
        (Message("Orders", b"x", flag=1 << 31), MessageIllegal, "flag 2147483648"),
    ],
)
def test_bad_messages_are_refused_at_once(
    message: Message, kind: type[PenstockError], reason: str
) -> None:
    async def body() -> None:
        cluster = FakeCluster()
        sender = cluster.sender(message_bytes_max=100)
        with pytest.raises(kind, match=reason):
            sender.submit(message)
        assert sender.in_flight.count == 0

    run(body())


@pytest.mark.parametrize("code", sorted(RETRYABLE_RESPONSES))
def test_retryable_response_is_retried_on_another_broker(code: int) -> None:
    async def body() -> None:
        cluster = FakeCluster("broker-a", "broker-b")
        sender = cluster.sender()
        sending = sender.submit(ORDER)
        await cluster.run_pending()
        first = next(b for b in cluster.brokers.values() if b._calls.pending)
        (frame,) = first.requests()
        first.answer(frame, code)
        await cluster.run_pending()
        (other,) = [b for b in cluster.brokers.values() if b is not first]
        (again,) = other.requests()
        assert properties_of(again)["UNIQ_KEY"] == properties_of(frame)["UNIQ_KEY"]
        other.answer(again)
        receipt = await sending
        assert receipt.queue.broker_name == other.name
        assert not sender.faults.available(first.name)
        await cluster.end()

    run(body())


@pytest.mark.parametrize("code", [13, 29, 604, 3])
def test_other_responses_are_not_retried(code: int) -> None:
    async def body() -> None:
        cluster = FakeCluster("broker-a", "broker-b")
        sender = cluster.sender()
        sending = sender.submit(ORDER)
        await cluster.run_pending()
        first = next(b for b in cluster.brokers.values() if b._calls.pending)
        (frame,) = first.requests()
        first.answer(frame, code)
        with pytest.raises(PenstockError, match="set by the test") as caught:
            await sending
        assert caught.value.answer_code == code
        assert sender.faults.available(first.name)  # an error of the message, not of the broker

    run(body())


def test_a_send_that_may_be_stored_is_retried_elsewhere_until_retries_are_used_up() -> None:
    async def body() -> None:
        cluster = FakeCluster("broker-a", "broker-b")
        sender = cluster.sender(retries=3)
        sending = sender.submit(ORDER)
        for _ in range(4):
            await cluster.clock.elapse(100)
            for broker in cluster.brokers.values():
                if broker._calls.pending:
                    broker.fail(PeerLost)
        with pytest.raises(SendFailed, match="after 4 attempts") as caught:
            await sending
        assert [type(error) for error in caught.value.attempts] == [PeerLost] * 4
        assert caught.value.__cause__ is caught.value.attempts[-1]
        assert "Orders" in cluster.routes_asked  # the route may have changed
        await cluster.end()

    run(body())


def test_nothing_is_retried_after_the_timeout() -> None:
    async def body() -> None:
        cluster = FakeCluster("broker-a", "broker-b")
        sender = cluster.sender()
        sending = sender.submit(ORDER, timeout_ms=500)
        await cluster.run_pending()
        first = next(b for b in cluster.brokers.values() if b._calls.pending)
        await cluster.clock.elapse(500)
        first.fail(PeerTimeout)
        with pytest.raises(SendFailed, match="after 1 attempt in 500 ms"):
            await sending
        await cluster.end()

    run(body())


def test_busy_broker_is_retried_until_the_timeout() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        sender = cluster.sender(retries=1)
        sending = sender.submit(ORDER)
        await cluster.run_pending()
        for _ in range(5):
            (frame,) = cluster["broker-a"].requests()
            cluster["broker-a"].answer(frame, ResponseCode.SYSTEM_BUSY)
            await cluster.clock.elapse(300)
        (frame,) = cluster["broker-a"].requests()
        cluster["broker-a"].answer(frame)
        assert (await sending).status is SendStatus.SEND_OK

    run(body())


def test_zero_retries_means_one_attempt() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        sender = cluster.sender(retries=0)
        sending = sender.submit(ORDER)
        await cluster.run_pending()
        (frame,) = cluster["broker-a"].requests()
        cluster["broker-a"].answer(frame, ResponseCode.SYSTEM_BUSY)
        with pytest.raises(SendFailed, match="1 attempt"):
            await sending

    run(body())


@pytest.mark.parametrize("way", ["queue", "ordering_key", "selector"])
def test_message_bound_to_a_queue_is_retried_on_that_queue(way: str) -> None:
    async def body() -> None:
        cluster = FakeCluster("broker-a", "broker-b", queues=2)
        sender = cluster.sender()
        queues = [MessageQueue("Orders", b, n) for b in ("broker-a", "broker-b") for n in (0, 1)]
        key = "customer-7"
        place = abs(java_hash(key)) % 4 if way == "ordering_key" else 3
        ways: dict[str, dict[str, Any]] = {
            "queue": {"queue": queues[3]},
            "ordering_key": {"ordering_key": key},
            "selector": {"selector": lambda those, message: those[3]},
        }
        sending = [sender.submit(ORDER, **ways[way]) for _ in range(3)]
        await cluster.run_pending()
        broker = cluster[queues[place].broker_name]
        frames = broker.requests()
        assert [int(frame.ext["e"]) for frame in frames] == [queues[place].queue_id] * 3
        key_found = properties_of(frames[0]).get("__SHARDINGKEY")
        assert key_found == (key if way == "ordering_key" else None)
        broker.fail(PeerLost)
        await cluster.clock.elapse(200)
        frames = broker.requests()
        assert len(frames) == 3
        for frame in frames:
            broker.answer(frame)
        assert [receipt.queue for receipt in await asyncio.gather(*sending)] == [queues[place]] * 3
        await cluster.end()

    run(body())


def test_queue_key_and_selector_exclude_each_other() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        sender = cluster.sender()
        queue = MessageQueue("Orders", "broker-a", 0)
        with pytest.raises(TypeError, match="one of"):
            sender.submit(ORDER, queue=queue, ordering_key="k")
        with pytest.raises(MessageIllegal, match="ordering key is empty"):
            sender.submit(ORDER, ordering_key="")
        with pytest.raises(MessageIllegal, match="queue of 'Others'"):
            await sender.send(ORDER, queue=MessageQueue("Others", "broker-a", 0))

        def broken(queues: Any, message: Message) -> MessageQueue:
            raise LookupError("mine")

        with pytest.raises(LookupError, match="mine"):  # known topic or not
            await sender.send(Message("Orders", b"x"), selector=broken)
        with pytest.raises(LookupError, match="mine"):
            await sender.send(Message("Orders", b"x"), selector=broken)
        unknown = MessageQueue("Orders", "broker-z", 0)
        sending = sender.submit(ORDER, queue=unknown, timeout_ms=500)
        await cluster.clock.elapse(1_000)
        with pytest.raises(SendFailed, match="no master of broker 'broker-z' is known"):
            await sending
        assert sender.in_flight.count == 0
        await cluster.end()

    run(body())


def test_other_status_than_send_ok_is_returned_or_retried() -> None:
    async def body() -> None:
        cluster = FakeCluster("broker-a", "broker-b")
        plain, careful = cluster.sender(), cluster.sender(retry_not_stored=True)

        async def send(sender: Any, *codes: int) -> SendReceipt:
            sending: asyncio.Future[SendReceipt] = sender.submit(ORDER)
            await cluster.run_pending()
            for code in codes:
                broker = next(b for b in cluster.brokers.values() if b._calls.pending)
                (frame,) = broker.requests()
                broker.answer(frame, code, msgId=f"ID-{code}")
                await cluster.clock.elapse(200)
            return await sending

        assert (await send(plain, 10)).status is SendStatus.FLUSH_DISK_TIMEOUT
        assert (await send(careful, 12, 0)).status is SendStatus.SEND_OK
        receipt = await send(careful, 11, 1, 13)  # a stored message is better than an error
        assert receipt.status is SendStatus.SLAVE_NOT_AVAILABLE
        await cluster.end()

    run(body())


def test_messages_are_written_in_the_order_of_submission() -> None:
    async def body() -> None:
        cluster = FakeCluster(queues=1)
        broker = cluster["broker-a"]
        broker.connects = False
        sender = cluster.sender()
        sending = [sender.submit(Message("Orders", b"%d" % n)) for n in range(5)]
        while not broker.connects:
            await asyncio.sleep(0)
        sending.append(sender.submit(Message("Orders", b"5")))  # connected now: still behind them
        await cluster.run_pending()
        sending.append(sender.submit(Message("Orders", b"6")))
        frames = broker.requests()
        assert [frame.body for frame in frames] == [b"%d" % n for n in range(7)]
        for frame in frames:
            broker.answer(frame)
        await asyncio.gather(*sending)

    run(body())


def test_sends_in_flight_are_limited() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        broker = cluster["broker-a"]
        sender = cluster.sender(in_flight_max=2)
        sending = [sender.submit(ORDER), sender.submit(ORDER)]
        with pytest.raises(TooMuchInFlight, match="3 messages, the limit is 2"):
            sender.submit(ORDER)
        late = asyncio.ensure_future(sender.send(ORDER))
        given_up = asyncio.ensure_future(sender.send(ORDER))
        impatient = asyncio.ensure_future(sender.send(ORDER, timeout_ms=100))
        await cluster.clock.elapse(100)
        with pytest.raises(TooMuchInFlight):
            await impatient
        frames = broker.requests()
        assert len(frames) == 2
        broker.answer(frames[0])
        given_up.cancel()
        await cluster.run_pending()
        (third,) = broker.requests()
        broker.answer(third)
        broker.answer(frames[1])
        await asyncio.gather(*sending, late)
        assert sender.in_flight.count == 0

    run(body())


def test_flush_waits_for_earlier_sends() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        broker = cluster["broker-a"]
        sender = cluster.sender()
        await sender.in_flight.flush()
        early = [sender.submit(ORDER), sender.submit(ORDER)]
        flushing = asyncio.ensure_future(sender.in_flight.flush())
        await cluster.run_pending()
        sender.submit(ORDER)
        one, two, three = broker.requests()
        broker.answer(three)
        broker.answer(one)
        await cluster.run_pending()
        assert not flushing.done()
        broker.answer(two)
        sender.submit(ORDER)
        await flushing
        assert all(one.done() for one in early)
        assert sender.in_flight.count == 1

    run(body())


def test_response_to_a_cancelled_send_is_counted() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        sender = cluster.sender()
        sending = sender.submit(ORDER)
        await cluster.run_pending()
        sending.cancel()
        assert sender.in_flight.count == 1
        (frame,) = cluster["broker-a"].requests()
        cluster["broker-a"].answer(frame, 2)  # cancelled, so there is no retry
        assert sender.in_flight.count == 0

    run(body())


def test_signed_requests_carry_the_same_fields() -> None:
    async def body() -> None:
        def sign(code: int, ext: dict[str, str], body: bytes) -> dict[str, str]:
            return {**ext, "Signature": f"{code}:{len(body)}"}

        cluster = FakeCluster(sign=sign)
        sender = cluster.sender()
        sending = sender.submit(ORDER)
        await cluster.run_pending()
        (frame,) = cluster["broker-a"].requests()
        assert (frame.encoding, frame.ext["Signature"]) == (JSON, "310:3")
        assert properties_of(frame)["KEYS"] == "k1 k2"
        cluster["broker-a"].answer(frame)
        await sending

    run(body())


@pytest.mark.parametrize("kind", ["zlib", "lz4", "zstd", None])
def test_long_bodies_are_compressed(kind: str | None) -> None:
    async def body() -> None:
        cluster = FakeCluster()
        sender = cluster.sender(compression=kind, compress_above_bytes=100)
        long, noise = b"ab" * 500, bytes(range(256))
        for content in (long, b"short", noise):
            sender.submit(Message("Orders", content))
        await cluster.run_pending()
        frames = cluster["broker-a"].requests()
        flags = [int(frame.ext["f"]) for frame in frames]
        expected = {"zlib": 0x301, "lz4": 0x101, "zstd": 0x201, None: 0}[kind]
        assert flags == [expected, 0, 0]
        assert decompress(frames[0].body, flags[0], limit=1000) == long
        assert (len(frames[0].body) < 500) == (kind is not None)
        assert [frame.body for frame in frames[1:]] == [b"short", noise]

    run(body())


def test_oneway_needs_no_response() -> None:
    async def body() -> None:
        cluster = FakeCluster("broker-a", "broker-b")
        sender = cluster.sender()
        cluster["broker-a"].up = False
        for _ in range(4):
            await sender.send_oneway(ORDER)
        frames = cluster["broker-b"].requests()
        assert [frame.flag for frame in frames] == [2] * 4
        assert not cluster["broker-b"]._calls.pending
        cluster["broker-b"].up = False
        with pytest.raises(PeerUnreachable):
            await sender.send_oneway(ORDER)
        await cluster.end()

    run(body())


def test_batches_are_split_by_topic_size_and_wait_stored() -> None:
    async def body() -> None:
        cluster = FakeCluster(queues=1)
        cluster.add("Others", queues=1)
        broker = cluster["broker-a"]
        sender = cluster.sender()
        size = BATCH_BYTES_MAX // 3
        messages = [Message("Orders", b"%d" % n + bytes(size)) for n in range(4)]
        messages += [Message("Others", b"%d" % n) for n in range(2)]
        messages += [Message("Others", b"x", wait_stored=False)]
        sending = asyncio.ensure_future(sender.send_batch(messages))
        await cluster.run_pending()
        frames = broker.requests()
        assert sorted(frame.code for frame in frames) == [310, 320, 320, 320]
        assert all(len(frame.body) <= BATCH_BYTES_MAX for frame in frames)
        for number, frame in enumerate(frames):
            ids = "A,B" if frame.code == 320 else "A"
            broker.answer(frame, msgId=ids, queueOffset=str(10 * number))
        receipts = await sending
        assert len(receipts) == 7
        assert [r.queue_offset % 10 for r in receipts] == [0, 1, 0, 1, 0, 1, 0]
        assert [r.queue.topic for r in receipts] == ["Orders"] * 4 + ["Others"] * 3

    run(body())


def test_failed_batch_tells_how_many_messages_were_stored() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        cluster.add("Others")
        sender = cluster.sender()
        messages = [Message(topic, b"x") for topic in ("Orders", "Orders", "Others")]
        sending = asyncio.ensure_future(sender.send_batch(messages))
        await cluster.run_pending()
        for frame in cluster["broker-a"].requests():
            many = frame.code == 320
            cluster["broker-a"].answer(frame, 0 if many else 13, msgId="A,B")
        with pytest.raises(MessageIllegal) as caught:
            await sending
        assert caught.value.__notes__[-1] == "2 of 3 messages were acknowledged"
        with pytest.raises(MessageIllegal, match="in a batch"):
            await sender.send_batch([Message("Orders", b"x", delay_level=1)])
        assert await sender.send_batch([]) == []

    run(body())


def test_internal_properties_move_to_the_header() -> None:
    async def body() -> None:
        cluster = FakeCluster(namespace="acme")
        cluster.routes["c_REPLY_TOPIC"] = cluster.add("x")
        cluster.add("%RETRY%g")
        sender = cluster.sender()
        half = Message("Orders", b"x", properties={"TRAN_MSG": "true", "PGROUP": "g"})
        reply = Message("c_REPLY_TOPIC", b"x", properties={"MSG_TYPE": "reply"})
        back = Message(
            "%RETRY%g", b"x", properties={"RECONSUME_TIME": "3", "MAX_RECONSUME_TIMES": "16"}
        )
        for message in (half, reply, back):
            sender.submit(message, internal=True)
            await cluster.run_pending()
        first, second, third = cluster["broker-a"].requests()
        assert (first.ext["f"], properties_of(first)["PGROUP"]) == ("4", "g")
        assert (second.code, second.ext["b"]) == (325, "c_REPLY_TOPIC")
        assert (third.ext["j"], third.ext["l"], third.ext["b"]) == ("3", "16", "%RETRY%acme%g")
        assert "RECONSUME_TIME" not in properties_of(third)
        assert back.properties["RECONSUME_TIME"] == "3"

    run(body())


def test_close_waits_for_sends_in_flight_and_refuses_further_ones() -> None:
    async def body() -> None:
        cluster = FakeCluster()
        sender = cluster.sender()
        sending = sender.submit(ORDER)
        await cluster.run_pending()
        closing = asyncio.ensure_future(sender.close(1_000))
        await cluster.run_pending()
        assert not closing.done()
        with pytest.raises(ClientClosed):
            sender.submit(ORDER)
        (frame,) = cluster["broker-a"].requests()
        cluster["broker-a"].answer(frame)
        await closing
        assert sending.done()

        stuck = cluster.sender()
        sending = stuck.submit(ORDER)
        await cluster.run_pending()
        closing = asyncio.ensure_future(stuck.close(1_000))
        await cluster.clock.elapse(1_000)
        await closing
        cluster["broker-a"].fail(PeerLost)
        with pytest.raises(SendFailed):
            await sending

    run(body())


@pytest.mark.parametrize(
    "bad",
    [
        {"compression": "gzip"}, {"message_bytes_max": 0}, {"message_bytes_max": 1 << 24},
        {"retries": -1}, {"in_flight_max": 0}, {"avoid_ms": -1},
    ],
)  # fmt: skip
def test_bad_options_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(BadSetting):
        SendOptions(**bad)
