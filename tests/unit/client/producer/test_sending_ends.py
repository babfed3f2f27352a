"""Every way a send can end: its future is done, its place is free, and nothing is sent in vain."""

import asyncio
import gc
import random
from collections.abc import Coroutine
from enum import Enum
from typing import Any

import pytest

from penstock.client.messages import Message, MessageQueue, SendReceipt, SendStatus
from penstock.client.producer.outgoing import BATCH_COUNT_MAX, Packer, SendOptions
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
from tests.unit.client.producer.sending_kit import House, properties_of

ORDER = Message("Orders", b"one")


class Names(str, Enum):  # noqa: UP042 (as many applications have them; str() is another text)
    TOPIC = "Orders"
    TAG = "paid"
    VALUE = "high"


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(body)


async def settle(house: House, sending: "asyncio.Future[Any]") -> Any:
    """Answer what has come to the first broker; the result of the send."""
    await house.turn()
    for frame in house["broker-a"].requests():
        house["broker-a"].answer(frame)
    return await sending


def test_place_is_free_again_if_the_connection_takes_no_more_calls() -> None:
    async def body() -> None:
        house = House()
        sender = house.sender(in_flight_max=CALLS_MAX * 2)
        await settle(house, sender.submit(ORDER))
        pending = house["broker-a"]._calls.pending
        pending.update(dict.fromkeys(range(-CALLS_MAX, 0), Call(1, 1, 1)))
        with pytest.raises(PeerError, match=f"limit is {CALLS_MAX}"):
            sender.submit(ORDER)
        assert (sender.in_flight.count, sender.in_flight.size) == (0, 0)

    run(body())


@pytest.mark.parametrize("known", [False, True])
def test_request_that_can_not_be_encoded_leaves_nothing_behind(known: bool) -> None:
    async def body() -> None:
        fails = False

        def sign(code: int, ext: dict[str, str], body: bytes) -> dict[str, str]:
            if fails:
                raise FrameError("too long")
            return ext

        house = House(sign=sign)
        sender = house.sender()
        if known:
            await settle(house, sender.submit(ORDER))
        fails = True
        with pytest.raises(FrameError):
            await sender.submit(ORDER)
        assert (sender.in_flight.count, sender.in_flight.wave.count) == (0, 0)
        assert not house["broker-a"]._calls.pending

    run(body())


def test_busy_brokers_are_not_asked_in_turn_without_a_pause() -> None:
    async def body() -> None:
        house = House("broker-a", "broker-b")
        sender = house.sender(retries=2)
        sending = sender.submit(ORDER)
        for _ in range(20):
            await house.turn()
            for broker in house.brokers.values():
                for frame in broker.requests():
                    broker.answer(frame, ResponseCode.SYSTEM_BUSY)
        calls = sum(len(broker.seen) for broker in house.brokers.values())
        assert calls == 3
        await house.clock.elapse(150)
        (broker,) = [b for b in house.brokers.values() if b._calls.pending]
        (frame,) = broker.requests()
        broker.answer(frame)
        assert (await sending).status is SendStatus.SEND_OK
        await house.end()

    run(body())


def test_nothing_is_tried_again_after_the_time_is_over() -> None:
    async def body() -> None:
        house = House()
        sender = house.sender()
        sending = sender.submit(ORDER, timeout_ms=1_000)
        await house.clock.elapse(980)
        assert len(house["broker-a"].requests()) == 1
        house["broker-a"].fail(PeerLost)
        await house.clock.elapse(500)
        with pytest.raises(SendFailed, match="after 1 attempt"):
            await sending
        assert house["broker-a"].requests() == []
        assert sender.in_flight.count == 0
        await house.end()

    run(body())


def test_what_is_called_off_before_it_left_does_not_leave() -> None:
    async def body() -> None:
        house = House()
        house["broker-a"].connects = False
        sender = house.sender()
        sender.submit(ORDER).cancel()
        again = sender.submit(ORDER)
        await house.turn()
        assert len(house["broker-a"].requests()) == 1
        house["broker-a"].fail(PeerLost)
        await house.turn()
        again.cancel()
        await house.clock.elapse(500)
        assert house["broker-a"].requests() == []
        assert sender.in_flight.count == 0
        assert sender.waiting == {}
        await house.end()

    run(body())


def test_place_that_is_not_used_goes_to_the_next_who_waits() -> None:
    async def body() -> None:
        house = House()
        sender = house.sender(in_flight_max=1)
        first = sender.submit(ORDER)
        bad = asyncio.ensure_future(sender.send(Message("Orders", b"")))
        good = asyncio.ensure_future(sender.send(ORDER))
        await settle(house, first)
        with pytest.raises(MessageIllegal):
            await bad
        await settle(house, good)
        assert sender.in_flight.count == 0

    run(body())


def test_closing_tells_all_who_wait_for_room() -> None:
    async def body() -> None:
        house = House()
        sender = house.sender(in_flight_max=1)
        first = sender.submit(ORDER)
        waiting = [asyncio.ensure_future(sender.send(ORDER)) for _ in range(3)]
        await house.turn()
        closing = asyncio.ensure_future(sender.close(1_000))
        await settle(house, first)
        await closing
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(one) for one in found] == [ClientClosed] * 3

    run(body())


def test_answer_to_a_batch_fits_into_a_header() -> None:
    async def body() -> None:
        house = House()
        sender = house.sender()
        messages = [Message("Orders", b"%d" % n) for n in range(2 * BATCH_COUNT_MAX + 1)]
        sending = asyncio.ensure_future(sender.send_batch(messages))
        await house.turn()
        for frame in house["broker-a"].requests():
            ids = ["F" * 56] * (BATCH_COUNT_MAX if frame.code == 320 else 1)
            assert len(",".join(ids)) + 1_024 < HEADER_BYTES_MAX
            house["broker-a"].answer(frame, msgId=",".join(ids))
        assert len(await sending) == len(messages)

    run(body())


def test_batch_without_room_says_how_many_were_acknowledged() -> None:
    async def body() -> None:
        house = House()
        for topic in ("Others", "More"):
            house.add(topic)
        sender = house.sender(in_flight_max=1)
        messages = [Message(topic, b"x") for topic in ("Orders", "Others", "More")]
        sending = asyncio.ensure_future(sender.send_batch(messages))
        await house.clock.elapse(3_000)
        (frame,) = house["broker-a"].requests()
        house["broker-a"].answer(frame)
        with pytest.raises(TooMuchInFlight) as caught:
            await sending
        assert caught.value.__notes__ == ["1 of 3 messages were acknowledged"]
        assert sender.in_flight.count == 0

    run(body())


def test_batch_that_is_called_off_leaves_no_error_that_nobody_sees() -> None:
    async def body() -> None:
        complaints: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, c: complaints.append(c))
        house = House()
        house.add("Others")
        sender = house.sender(retries=0)
        sending = asyncio.ensure_future(
            sender.send_batch([Message("Orders", b"x"), Message("Others", b"x")])
        )
        await house.turn()
        _, other = house["broker-a"].requests()
        house["broker-a"].answer(other, 13)
        sending.cancel()
        await house.turn()
        house["broker-a"].fail(PeerLost)
        await house.turn()
        assert sending.cancelled()
        assert sender.in_flight.count == 0
        gc.collect()
        assert complaints == []
        await house.end()

    run(body())


def test_bodies_of_a_batch_are_checked_as_those_of_messages() -> None:
    async def body() -> None:
        house = House()
        sender = house.sender()
        bodies: list[Any] = [bytearray(b"one"), memoryview(b"two")]
        sending = asyncio.ensure_future(
            sender.send_batch([Message("Orders", content) for content in bodies])
        )
        await house.turn()
        (frame,) = house["broker-a"].requests()
        assert b"one" in frame.body
        assert b"two" in frame.body
        house["broker-a"].answer(frame)
        assert len(await sending) == 2
        nothing: Any = None
        with pytest.raises(MessageIllegal, match="a body of type NoneType"):
            await sender.send_batch([Message("Orders", nothing)])
        assert Message("Orders", bodies[0]).content == b"one"

    run(body())


@pytest.mark.parametrize("many", [False, True])
def test_members_of_enums_are_text(many: bool) -> None:
    async def body() -> None:
        house = House(namespace="acme")
        sender = house.sender()
        message = Message(Names.TOPIC, b"x", Names.TAG, [Names.TAG], {"level": Names.VALUE})
        sending: asyncio.Future[Any]
        if many:
            sending = asyncio.ensure_future(sender.send_batch([message, message]))
            await house.turn()
            (frame,) = house["broker-a"].requests()
            assert b"TAGS\x01paid" in frame.body
        else:
            sending = sender.submit(message)
            await house.turn()
            (frame,) = house["broker-a"].requests()
            properties = properties_of(frame)
            assert (properties["TAGS"], properties["KEYS"]) == ("paid", "paid")
            assert properties["level"] == "high"
        assert frame.ext["b"] == "acme%Orders"
        house["broker-a"].answer(frame)
        await sending
        assert [type(topic) for topic in sender.topics_known] == [str]

    run(body())


@pytest.mark.parametrize("parts", [{"tags": 5}, {"topic": 5}, {"properties": {(): "x"}}])
def test_what_is_no_text_is_refused(parts: dict[str, Any]) -> None:
    async def body() -> None:
        sender = House().sender()
        with pytest.raises(MessageIllegal, match=r"of type int|are text"):
            sender.submit(Message(**{"topic": "Orders", "body": b"x", **parts}))

    run(body())


def test_message_keeps_its_turn_while_the_connection_is_made() -> None:
    async def body() -> None:
        house = House(queues=4)
        broker, sender = house["broker-a"], house.sender()
        first: SendReceipt = await settle(house, sender.submit(ORDER))
        calls = []

        def select(queues: Any, message: Message) -> MessageQueue:
            calls.append(1)
            found: MessageQueue = queues[2]
            return found

        for number in (1, 2, 3):
            broker.connects = False
            receipt = await settle(house, sender.submit(ORDER))
            assert receipt.queue.queue_id == (first.queue.queue_id + number) % 4
        broker.connects = False
        assert (await settle(house, sender.submit(ORDER, selector=select))).queue.queue_id == 2
        assert calls == [1]

    run(body())


def test_other_threads_and_loops_are_told() -> None:
    async def body() -> None:
        house = House()
        sender = house.sender()
        await settle(house, sender.submit(ORDER))

        async def elsewhere() -> None:
            sender.submit(ORDER)

        for call in (lambda: sender.submit(ORDER), lambda: asyncio.run(elsewhere())):
            with pytest.raises(ClientError, match="another thread or event loop"):
                await asyncio.to_thread(call)
        with pytest.raises(ClientError, match="another thread or event loop"):
            await asyncio.to_thread(sender.check_usable)
        assert sender.in_flight.count == 0
        assert house["broker-a"].requests() == []

    run(body())


def test_broker_that_is_gone_costs_the_others_nothing() -> None:
    async def body() -> None:
        house = House()
        sender = house.sender()
        reports: list[str] = []
        sender.faults.report = lambda name, ms, **_: reports.append(name)  # type: ignore[method-assign]
        sender.troubled.add("broker-z")
        await settle(house, sender.submit(ORDER))
        assert reports == []
        sender.troubled.add("broker-a")
        await settle(house, sender.submit(ORDER))
        assert reports == ["broker-a"]
        assert sender.troubled == {"broker-z"}

    run(body())


def test_closing_ends_the_search_for_a_route() -> None:
    async def body() -> None:
        house = House()

        async def never(topic: str) -> None:
            await asyncio.Event().wait()

        house.find_route = never  # type: ignore[method-assign]
        sender = house.sender()
        sending = sender.submit(Message("Unknown", b"x"), timeout_ms=60_000)
        oneway = asyncio.ensure_future(
            sender.send_oneway(Message("Unknown", b"x"), timeout_ms=60_000)
        )
        await house.turn()
        closing = asyncio.ensure_future(sender.close(1_000))
        await house.clock.elapse(1_000)
        await closing
        for waiting in (sending, oneway):
            with pytest.raises(ClientClosed):
                await waiting
        await house.turn()
        assert sender._finding == {}
        assert sender.in_flight.count == 0

    run(body())


def test_second_life_begins_with_new_connections() -> None:
    async def body() -> None:
        house = House()
        sender = house.sender()
        await settle(house, sender.submit(ORDER))
        await sender.close(1_000)
        before = house.brokers["broker-a"]
        house.brokers["broker-a"] = type(before)(before.name, before.address)
        sender.start()
        await settle(house, sender.submit(ORDER))
        assert len(house["broker-a"].seen) == 1

    run(body())


def test_ids_differ_whatever_the_application_does_to_random() -> None:
    def make() -> str:
        random.seed(7)
        found: str = Packer(SendOptions(), "", "10.0.0.1").next_id(1_700_000_000_000)
        return found

    assert make() != make()
