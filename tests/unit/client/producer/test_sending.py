"""Where messages go, what is tried again, and how much is under way: without a server."""

import asyncio
from collections.abc import Coroutine
from datetime import timedelta
from typing import Any

import pytest

from penstock.client.messages import Message, MessageQueue, SendReceipt, SendStatus
from penstock.client.producer.outgoing import BATCH_BYTES_MAX, SendOptions
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
from tests.unit.client.producer.sending_kit import House, properties_of

ORDER = Message("Orders", b"one", tags="t", keys=["k1", "k2"])


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(body)


def test_queues_take_turns() -> None:
    async def body() -> None:
        house = House(queues=3)
        sender = house.sender()
        sending = [sender.submit(ORDER) for _ in range(6)]
        await house.turn()
        sending += [sender.submit(ORDER) for _ in range(3)]
        frames = house["broker-a"].requests()
        ids = [int(frame.ext["e"]) for frame in frames]
        assert [(one - ids[0]) % 3 for one in ids] == [0, 1, 2] * 3
        for frame in frames:
            house["broker-a"].answer(frame)
        receipts = await asyncio.gather(*sending)
        assert {receipt.queue.queue_id for receipt in receipts} == {0, 1, 2}
        assert len({receipt.message_id for receipt in receipts}) == 9
        assert sender.in_flight.count == 0
        assert sender.in_flight.size == 0

    run(body())


def test_request_carries_the_message_and_leaves_it_alone() -> None:
    async def body() -> None:
        house = House(namespace="acme")
        sender = house.sender()
        message = Message("Orders", b"one", "t", ["k1", "k2"], {"mine": "1"}, flag=9)
        sending = [sender.submit(message), sender.submit(message)]
        await house.turn()
        first, second = house["broker-a"].requests()
        assert (first.code, first.encoding, first.body) == (310, BINARY, b"one")
        fields = {name: first.ext[name] for name in "abcdfhn"}
        assert fields == {
            "a": "acme%group", "b": "acme%Orders", "c": "TBW102", "d": "4", "f": "0", "h": "9",
            "n": "broker-a",
        }  # fmt: skip
        assert first.ext["g"] == str(house.clock.now_ms())
        properties = properties_of(first)
        assert properties_of(second)["UNIQ_KEY"] != properties.pop("UNIQ_KEY")
        assert properties == {
            "TAGS": "t", "KEYS": "k1 k2", "mine": "1", "WAIT": "true", "INSTANCE_ID": "acme",
        }  # fmt: skip
        assert message == Message("Orders", b"one", "t", ["k1", "k2"], {"mine": "1"}, flag=9)
        house["broker-a"].answer(first)
        house["broker-a"].answer(second)
        assert (await sending[0]).queue.topic == "Orders"

    run(body())


def test_unknown_topic_goes_by_the_template_until_it_has_a_route() -> None:
    async def body() -> None:
        house = House()
        house.add("TBW102", queues=8)
        sender = house.sender()
        for _ in range(9):
            sender.submit(Message("New", b"x"))
        await house.turn()
        frames = house["broker-a"].requests()
        assert {frame.ext["e"] for frame in frames} == {"0", "1", "2", "3"}
        assert "New" in sender.topics()
        sender.route_changed(house.add("New", queues=1))
        sender.submit(Message("New", b"x"))
        await house.turn()
        (frame,) = house["broker-a"].requests()
        assert frame.ext["e"] == "0"
        assert house.routes_asked == ["New", "TBW102"] or house.routes_asked == ["New"]

    run(body())


def test_topic_without_any_route_is_an_error() -> None:
    async def body() -> None:
        house = House()
        sender = house.sender()
        with pytest.raises(NoRoute, match="'Nowhere'"):
            await sender.send(Message("Nowhere", b"x"))
        house.add("Closed", perm=4)
        with pytest.raises(NoQueue, match="'Closed' can be written to"):
            await sender.send(Message("Closed", b"x"))
        assert sender.in_flight.count == 0
        assert sender.waiting == {}

    run(body())


@pytest.mark.parametrize(
    ("message", "kind", "reason"),
    [
        (Message("Orders", b""), MessageIllegal, "without a body"),
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
        house = House()
        sender = house.sender(message_bytes_max=100)
        with pytest.raises(kind, match=reason):
            sender.submit(message)
        assert sender.in_flight.count == 0

    run(body())


@pytest.mark.parametrize("code", sorted(RETRYABLE_RESPONSES))
def test_retryable_answers_go_to_another_broker(code: int) -> None:
    async def body() -> None:
        house = House("broker-a", "broker-b")
        sender = house.sender()
        sending = sender.submit(ORDER)
        await house.turn()
        first = next(b for b in house.brokers.values() if b._calls.pending)
        (frame,) = first.requests()
        first.answer(frame, code)
        await house.turn()
        (other,) = [b for b in house.brokers.values() if b is not first]
        (again,) = other.requests()
        assert properties_of(again)["UNIQ_KEY"] == properties_of(frame)["UNIQ_KEY"]
        other.answer(again)
        receipt = await sending
        assert receipt.queue.broker_name == other.name
        assert not sender.faults.available(first.name)
        await house.end()

    run(body())


@pytest.mark.parametrize("code", [13, 29, 604, 3])
def test_other_answers_are_final(code: int) -> None:
    async def body() -> None:
        house = House("broker-a", "broker-b")
        sender = house.sender()
        sending = sender.submit(ORDER)
        await house.turn()
        first = next(b for b in house.brokers.values() if b._calls.pending)
        (frame,) = first.requests()
        first.answer(frame, code)
        with pytest.raises(PenstockError, match="so it is") as caught:
            await sending
        assert caught.value.answer_code == code
        assert sender.faults.available(first.name)  # the message's fault, not the broker's

    run(body())


def test_lost_and_unreachable_brokers_are_left_for_others_until_the_retries_are_used_up() -> None:
    async def body() -> None:
        house = House("broker-a", "broker-b")
        sender = house.sender(retries=3)
        sending = sender.submit(ORDER)
        await house.turn()
        first = next(b for b in house.brokers.values() if b._calls.pending)
        (other,) = [b for b in house.brokers.values() if b is not first]
        first.up = other.up = False
        first.fail(PeerLost)
        await house.clock.elapse(1_000)
        with pytest.raises(SendFailed, match="after 4 attempts") as caught:
            await sending
        kinds = [type(error) for error in caught.value.attempts]
        assert kinds == [PeerLost, PeerUnreachable, PeerUnreachable, PeerUnreachable]
        assert caught.value.__cause__ is caught.value.attempts[-1]
        assert not sender.faults.reachable(first.name)
        assert "Orders" in house.routes_asked  # maybe there is another route now
        await house.end()

    run(body())


def test_no_time_no_retry() -> None:
    async def body() -> None:
        house = House("broker-a", "broker-b")
        sender = house.sender()
        sending = sender.submit(ORDER, timeout_ms=500)
        await house.turn()
        first = next(b for b in house.brokers.values() if b._calls.pending)
        await house.clock.elapse(500)
        first.fail(PeerTimeout)
        with pytest.raises(SendFailed, match="after 1 attempt in 500 ms"):
            await sending
        await house.end()

    run(body())


def test_busy_broker_is_given_time() -> None:
    async def body() -> None:
        house = House()
        sender = house.sender(retries=1)
        sending = sender.submit(ORDER)
        await house.turn()
        for _ in range(5):
            (frame,) = house["broker-a"].requests()
            house["broker-a"].answer(frame, ResponseCode.SYSTEM_BUSY)
            await house.clock.elapse(300)
        (frame,) = house["broker-a"].requests()
        house["broker-a"].answer(frame)
        assert (await sending).status is SendStatus.SEND_OK

    run(body())


def test_no_retries_means_none() -> None:
    async def body() -> None:
        house = House()
        sender = house.sender(retries=0)
        sending = sender.submit(ORDER)
        await house.turn()
        (frame,) = house["broker-a"].requests()
        house["broker-a"].answer(frame, ResponseCode.SYSTEM_BUSY)
        with pytest.raises(SendFailed, match="1 attempt"):
            await sending

    run(body())


@pytest.mark.parametrize("way", ["queue", "ordering_key", "selector"])
def test_message_bound_to_a_queue_stays_with_it(way: str) -> None:
    async def body() -> None:
        house = House("broker-a", "broker-b", queues=2)
        sender = house.sender()
        queues = [MessageQueue("Orders", b, n) for b in ("broker-a", "broker-b") for n in (0, 1)]
        key = "customer-7"
        place = abs(java_hash(key)) % 4 if way == "ordering_key" else 3
        ways: dict[str, dict[str, Any]] = {
            "queue": {"queue": queues[3]},
            "ordering_key": {"ordering_key": key},
            "selector": {"selector": lambda those, message: those[3]},
        }
        sending = [sender.submit(ORDER, **ways[way]) for _ in range(3)]
        await house.turn()
        broker = house[queues[place].broker_name]
        frames = broker.requests()
        assert [int(frame.ext["e"]) for frame in frames] == [queues[place].queue_id] * 3
        key_found = properties_of(frames[0]).get("__SHARDINGKEY")
        assert key_found == (key if way == "ordering_key" else None)
        broker.fail(PeerLost)
        await house.clock.elapse(200)
        frames = broker.requests()
        assert len(frames) == 3
        for frame in frames:
            broker.answer(frame)
        assert [receipt.queue for receipt in await asyncio.gather(*sending)] == [queues[place]] * 3
        await house.end()

    run(body())


def test_ways_to_a_queue_exclude_each_other_and_belong_to_the_topic() -> None:
    async def body() -> None:
        house = House()
        sender = house.sender()
        queue = MessageQueue("Orders", "broker-a", 0)
        with pytest.raises(TypeError, match="one of"):
            sender.submit(ORDER, queue=queue, ordering_key="k")
        with pytest.raises(MessageIllegal, match="empty ordering key"):
            sender.submit(ORDER, ordering_key="")
        with pytest.raises(MessageIllegal, match="queue of 'Others'"):
            await sender.send(ORDER, queue=MessageQueue("Others", "broker-a", 0))

        def broken(queues: Any, message: Message) -> MessageQueue:
            raise LookupError("mine")

        with pytest.raises(LookupError, match="mine"):  # known topic or not
            await sender.send(Message("Orders", b"x"), selector=broken)
        with pytest.raises(LookupError, match="mine"):
            await sender.send(Message("Orders", b"x"), selector=broken)
        sending = sender.submit(ORDER, queue=MessageQueue("Orders", "broker-z", 0))
        await house.clock.elapse(1_000)
        with pytest.raises(SendFailed, match="no route names the broker 'broker-z'"):
            await sending
        assert sender.in_flight.count == 0
        await house.end()

    run(body())


def test_stored_less_safely_is_a_status_or_tried_again() -> None:
    async def body() -> None:
        house = House("broker-a", "broker-b")
        plain, careful = house.sender(), house.sender(retry_not_stored=True)

        async def send(sender: Any, *codes: int) -> SendReceipt:
            sending: asyncio.Future[SendReceipt] = sender.submit(ORDER)
            await house.turn()
            for code in codes:
                broker = next(b for b in house.brokers.values() if b._calls.pending)
                (frame,) = broker.requests()
                broker.answer(frame, code, msgId=f"ID-{code}")
                await house.clock.elapse(200)
            return await sending

        assert (await send(plain, 10)).status is SendStatus.FLUSH_DISK_TIMEOUT
        assert (await send(careful, 12, 0)).status is SendStatus.SEND_OK
        receipt = await send(careful, 11, 1, 13)  # what is stored is better than an error
        assert receipt.status is SendStatus.SLAVE_NOT_AVAILABLE
        await house.end()

    run(body())


def test_messages_leave_in_the_order_of_their_submission() -> None:
    async def body() -> None:
        house = House(queues=1)
        broker = house["broker-a"]
        broker.connects = False
        sender = house.sender()
        sending = [sender.submit(Message("Orders", b"%d" % n)) for n in range(5)]
        while not broker.connects:
            await asyncio.sleep(0)
        sending.append(sender.submit(Message("Orders", b"5")))  # connected now: still behind them
        await house.turn()
        sending.append(sender.submit(Message("Orders", b"6")))
        frames = broker.requests()
        assert [frame.body for frame in frames] == [b"%d" % n for n in range(7)]
        for frame in frames:
            broker.answer(frame)
        await asyncio.gather(*sending)

    run(body())


def test_at_most_so_many_are_under_way() -> None:
    async def body() -> None:
        house = House()
        broker = house["broker-a"]
        sender = house.sender(in_flight_max=2)
        sending = [sender.submit(ORDER), sender.submit(ORDER)]
        with pytest.raises(TooMuchInFlight, match="3 messages, the limit is 2"):
            sender.submit(ORDER)
        late = asyncio.ensure_future(sender.send(ORDER))
        given_up = asyncio.ensure_future(sender.send(ORDER))
        impatient = asyncio.ensure_future(sender.send(ORDER, timeout_ms=100))
        await house.clock.elapse(100)
        with pytest.raises(TooMuchInFlight):
            await impatient
        frames = broker.requests()
        assert len(frames) == 2
        broker.answer(frames[0])
        given_up.cancel()
        await house.turn()
        (third,) = broker.requests()
        broker.answer(third)
        broker.answer(frames[1])
        await asyncio.gather(*sending, late)
        assert sender.in_flight.count == 0

    run(body())


def test_flush_waits_for_what_was_sent_before() -> None:
    async def body() -> None:
        house = House()
        broker = house["broker-a"]
        sender = house.sender()
        await sender.in_flight.flush()
        early = [sender.submit(ORDER), sender.submit(ORDER)]
        flushing = asyncio.ensure_future(sender.in_flight.flush())
        await house.turn()
        sender.submit(ORDER)
        one, two, three = broker.requests()
        broker.answer(three)
        broker.answer(one)
        await house.turn()
        assert not flushing.done()
        broker.answer(two)
        sender.submit(ORDER)
        await flushing
        assert all(one.done() for one in early)
        assert sender.in_flight.count == 1

    run(body())


def test_answer_to_nobody_frees_the_place() -> None:
    async def body() -> None:
        house = House()
        sender = house.sender()
        sending = sender.submit(ORDER)
        await house.turn()
        sending.cancel()
        assert sender.in_flight.count == 1
        (frame,) = house["broker-a"].requests()
        house["broker-a"].answer(frame, 2)  # nobody wants it any more: no retry
        assert sender.in_flight.count == 0

    run(body())


def test_signed_requests_carry_the_same_fields() -> None:
    async def body() -> None:
        def sign(code: int, ext: dict[str, str], body: bytes) -> dict[str, str]:
            return {**ext, "Signature": f"{code}:{len(body)}"}

        house = House(sign=sign)
        sender = house.sender()
        sending = sender.submit(ORDER)
        await house.turn()
        (frame,) = house["broker-a"].requests()
        assert (frame.encoding, frame.ext["Signature"]) == (JSON, "310:3")
        assert properties_of(frame)["KEYS"] == "k1 k2"
        house["broker-a"].answer(frame)
        await sending

    run(body())


@pytest.mark.parametrize("kind", ["zlib", "lz4", "zstd", None])
def test_long_bodies_are_compressed(kind: str | None) -> None:
    async def body() -> None:
        house = House()
        sender = house.sender(compression=kind, compress_above_bytes=100)
        long, noise = b"ab" * 500, bytes(range(256))
        for content in (long, b"short", noise):
            sender.submit(Message("Orders", content))
        await house.turn()
        frames = house["broker-a"].requests()
        flags = [int(frame.ext["f"]) for frame in frames]
        expected = {"zlib": 0x301, "lz4": 0x101, "zstd": 0x201, None: 0}[kind]
        assert flags == [expected, 0, 0]
        assert decompress(frames[0].body, flags[0], limit=1000) == long
        assert (len(frames[0].body) < 500) == (kind is not None)
        assert [frame.body for frame in frames[1:]] == [b"short", noise]

    run(body())


def test_one_way_needs_no_answer() -> None:
    async def body() -> None:
        house = House("broker-a", "broker-b")
        sender = house.sender()
        house["broker-a"].up = False
        for _ in range(4):
            await sender.send_oneway(ORDER)
        frames = house["broker-b"].requests()
        assert [frame.flag for frame in frames] == [2] * 4
        assert not house["broker-b"]._calls.pending
        house["broker-b"].up = False
        with pytest.raises(PeerUnreachable):
            await sender.send_oneway(ORDER)
        await house.end()

    run(body())


def test_batches_are_split_by_topic_size_and_wait() -> None:
    async def body() -> None:
        house = House(queues=1)
        house.add("Others", queues=1)
        broker = house["broker-a"]
        sender = house.sender()
        size = BATCH_BYTES_MAX // 3
        messages = [Message("Orders", b"%d" % n + bytes(size)) for n in range(4)]
        messages += [Message("Others", b"%d" % n) for n in range(2)]
        messages += [Message("Others", b"x", wait_stored=False)]
        sending = asyncio.ensure_future(sender.send_batch(messages))
        await house.turn()
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


def test_failed_part_of_a_batch_says_how_many_were_stored() -> None:
    async def body() -> None:
        house = House()
        house.add("Others")
        sender = house.sender()
        messages = [Message(topic, b"x") for topic in ("Orders", "Orders", "Others")]
        sending = asyncio.ensure_future(sender.send_batch(messages))
        await house.turn()
        for frame in house["broker-a"].requests():
            many = frame.code == 320
            house["broker-a"].answer(frame, 0 if many else 13, msgId="A,B")
        with pytest.raises(MessageIllegal) as caught:
            await sending
        assert caught.value.__notes__ == ["2 of 3 messages were acknowledged"]
        with pytest.raises(MessageIllegal, match="in a batch"):
            await sender.send_batch([Message("Orders", b"x", delay_level=1)])
        assert await sender.send_batch([]) == []

    run(body())


def test_internal_messages_use_the_header() -> None:
    async def body() -> None:
        house = House(namespace="acme")
        house.routes["c_REPLY_TOPIC"] = house.add("x")
        house.add("%RETRY%g")
        sender = house.sender()
        half = Message("Orders", b"x", properties={"TRAN_MSG": "true", "PGROUP": "g"})
        reply = Message("c_REPLY_TOPIC", b"x", properties={"MSG_TYPE": "reply"})
        back = Message(
            "%RETRY%g", b"x", properties={"RECONSUME_TIME": "3", "MAX_RECONSUME_TIMES": "16"}
        )
        for message in (half, reply, back):
            sender.submit(message, internal=True)
            await house.turn()
        first, second, third = house["broker-a"].requests()
        assert (first.ext["f"], properties_of(first)["PGROUP"]) == ("4", "g")
        assert (second.code, second.ext["b"]) == (325, "c_REPLY_TOPIC")
        assert (third.ext["j"], third.ext["l"], third.ext["b"]) == ("3", "16", "%RETRY%acme%g")
        assert "RECONSUME_TIME" not in properties_of(third)
        assert back.properties["RECONSUME_TIME"] == "3"

    run(body())


def test_closing_waits_a_while_and_then_takes_no_more() -> None:
    async def body() -> None:
        house = House()
        sender = house.sender()
        sending = sender.submit(ORDER)
        await house.turn()
        closing = asyncio.ensure_future(sender.close(1_000))
        await house.turn()
        assert not closing.done()
        with pytest.raises(ClientClosed):
            sender.submit(ORDER)
        (frame,) = house["broker-a"].requests()
        house["broker-a"].answer(frame)
        await closing
        assert sending.done()

        stuck = house.sender()
        sending = stuck.submit(ORDER)
        await house.turn()
        closing = asyncio.ensure_future(stuck.close(1_000))
        await house.clock.elapse(1_000)
        await closing
        house["broker-a"].fail(PeerLost)
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
