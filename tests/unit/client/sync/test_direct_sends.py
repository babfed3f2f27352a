"""Direct sends: which sends the caller's thread makes itself, and what happens if they fail."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import Message, Producer, SendStatus
from penstock.client.sync.direct_sends import CALM_SENDS
from penstock.client.sync.in_flight_gate import InFlightGate
from penstock.errors import BlockingInLoop, ClientClosed, MessageIllegal, SendFailed
from penstock.wire.codes import ResponseCode

from .thread_broker import Sent, ThreadBroker

TOPIC = "Orders"


@pytest.fixture
def broker() -> Iterator[ThreadBroker]:
    with ThreadBroker() as started:
        yield started


def calm_producer(broker: ThreadBroker, **options: Any) -> Producer:
    """A started producer whose next send may be direct."""
    producer = Producer(broker.address, group="p", **options)
    producer.start()
    for _ in range(CALM_SENDS):
        producer.send(Message(TOPIC, b"before"))
    assert len(broker.connections()) == 1
    broker.sent.clear()
    return producer


def loop_connection(broker: ThreadBroker, producer: Producer) -> int:
    """The connection of the loop thread: that of a submitted message."""
    producer.submit(Message(TOPIC, b"submitted")).result()
    return broker.sent.pop().connection


def test_calm_sends_use_a_connection_of_their_own_and_all_queues(broker: ThreadBroker) -> None:
    with calm_producer(broker) as producer:
        receipts = [producer.send(Message(TOPIC, b"%d" % n)) for n in range(8)]
        assert {receipt.status for receipt in receipts} == {SendStatus.SEND_OK}
        assert [receipt.message_id for receipt in receipts] == [
            sent.message_id for sent in broker.sent
        ]
        assert len({receipt.message_id for receipt in receipts}) == 8
        assert [receipt.queue.queue_id for receipt in receipts] == [
            sent.queue_id for sent in broker.sent
        ]
        assert sorted(sent.queue_id for sent in broker.sent) == [0, 0, 1, 1, 2, 2, 3, 3]
        (direct,) = broker.connections()
        assert direct != loop_connection(broker, producer)


def test_an_ordering_key_selects_the_same_queue_on_both_paths(broker: ThreadBroker) -> None:
    with calm_producer(broker) as producer:
        for key in ("a", "b", "c", "d", "e"):
            direct = producer.send(Message(TOPIC, b"x"), ordering_key=key)
            other = producer.submit(Message(TOPIC, b"x"), ordering_key=key).result()
            assert direct.queue == other.queue
        assert len(broker.connections()) == 2
        with pytest.raises(MessageIllegal, match="the ordering key is empty"):
            producer.send(Message(TOPIC, b"x"), ordering_key="")


def test_a_send_behind_a_submitted_message_does_not_overtake_it(broker: ThreadBroker) -> None:
    may_answer = threading.Event()

    def answer(sent: Sent) -> int:
        if sent.body == b"first":
            assert may_answer.wait(10)
        return ResponseCode.SUCCESS

    with calm_producer(broker) as producer:
        broker.answer_send = answer
        first = producer.submit(Message(TOPIC, b"first"))
        second = threading.Thread(target=producer.send, args=(Message(TOPIC, b"second"),))
        second.start()
        may_answer.set()
        second.join(10)
        first.result(10)
        assert [sent.body for sent in broker.sent] == [b"first", b"second"]
        assert len(broker.connections()) == 1


def test_sends_of_a_producer_that_sends_one_way_are_not_direct(broker: ThreadBroker) -> None:
    with calm_producer(broker) as producer:
        producer.send(Message(TOPIC, b"direct"))
        direct = broker.sent.pop().connection
        producer.send_oneway(Message(TOPIC, b"one-way"))
        producer.send(Message(TOPIC, b"after it"))
        assert direct not in broker.connections()


@pytest.mark.parametrize(
    ("options", "body"),
    [
        ({"batching": True}, b"x"),
        ({"retry_not_stored": True}, b"x"),
        ({"compress_above_bytes": 10}, b"x" * 10),
        ({}, b"x" * 40_000),
    ],
)
def test_sends_that_need_more_are_not_direct(
    broker: ThreadBroker, options: dict[str, Any], body: bytes
) -> None:
    with calm_producer(broker, **options) as producer:
        for _ in range(4):
            producer.send(Message(TOPIC, body))
        assert sorted(sent.queue_id for sent in broker.sent) == [0, 1, 2, 3]
        assert broker.connections() == {loop_connection(broker, producer)}


def test_a_lost_connection_is_retried_with_the_same_message_id(broker: ThreadBroker) -> None:
    def cut_first(sent: Sent) -> int | None:
        if len(broker.sent) == 1:
            broker.cut(sent.connection)
            return None
        return ResponseCode.SUCCESS

    with calm_producer(broker) as producer:
        broker.answer_send = cut_first
        receipt = producer.send(Message(TOPIC, b"x"))
        first, second = broker.sent
        assert first.message_id == second.message_id == receipt.message_id
        assert first.connection != second.connection


def test_a_refusal_that_may_be_retried_is_retried(broker: ThreadBroker) -> None:
    with calm_producer(broker) as producer:
        broker.answer_send = lambda sent: (
            ResponseCode.SYSTEM_BUSY if len(broker.sent) == 1 else ResponseCode.SUCCESS
        )
        receipt = producer.send(Message(TOPIC, b"x"))
        assert [sent.message_id for sent in broker.sent] == [receipt.message_id] * 2


def test_a_final_refusal_is_raised_at_once(broker: ThreadBroker) -> None:
    with calm_producer(broker) as producer:
        broker.answer_send = lambda sent: ResponseCode.MESSAGE_ILLEGAL
        with pytest.raises(MessageIllegal):
            producer.send(Message(TOPIC, b"x"))
        assert len(broker.sent) == 1
        broker.answer_send = lambda sent: ResponseCode.SUCCESS
        producer.send(Message(TOPIC, b"y"))  # the connection is still usable
        assert len(broker.connections()) == 1


def test_a_broker_that_does_not_answer_ends_the_send_after_its_timeout(
    broker: ThreadBroker,
) -> None:
    with calm_producer(broker) as producer:
        broker.answer_send = lambda sent: None
        with pytest.raises(SendFailed, match="no response to request 310 within 50 ms"):
            producer.send(Message(TOPIC, b"x"), timeout_ms=50)
        assert len(broker.sent) == 1
        broker.answer_send = lambda sent: ResponseCode.SUCCESS
        assert producer.send(Message(TOPIC, b"y")).status is SendStatus.SEND_OK


def test_a_timeout_of_zero_ends_a_send_as_on_the_other_path(broker: ThreadBroker) -> None:
    with calm_producer(broker) as producer:
        broker.answer_send = lambda sent: None
        with pytest.raises(SendFailed, match="no response to request 310 within 0 ms"):
            producer.submit(Message(TOPIC, b"x"), timeout_ms=0).result()
        with pytest.raises(SendFailed, match="no response to request 310 within 0 ms"):
            producer.send(Message(TOPIC, b"x"), timeout_ms=0)


def test_without_the_loop_threads_connection_there_is_no_direct_send(broker: ThreadBroker) -> None:
    with calm_producer(broker) as producer:
        producer.send(Message(TOPIC, b"direct"))
        direct = broker.sent.pop().connection
        broker.cut(loop_connection(broker, producer))
        while producer.send(Message(TOPIC, b"x")) and broker.sent.pop().connection == direct:
            pass  # until the loop thread has noticed it
        assert direct not in {producer.send(Message(TOPIC, b"y")) and broker.sent.pop().connection}


def test_flush_waits_for_a_direct_send_of_another_thread(broker: ThreadBroker) -> None:
    arrived, may_answer = threading.Event(), threading.Event()

    def answer(sent: Sent) -> int:
        arrived.set()
        assert may_answer.wait(10)
        return ResponseCode.SUCCESS

    with calm_producer(broker) as producer:
        broker.answer_send = answer
        sending = threading.Thread(target=producer.send, args=(Message(TOPIC, b"x"),))
        sending.start()
        assert arrived.wait(10)
        flushing = threading.Thread(target=producer.flush)
        flushing.start()
        flushing.join(0.02)
        assert flushing.is_alive()
        may_answer.set()
        flushing.join(10)
        sending.join(10)
        assert not flushing.is_alive()
        assert not sending.is_alive()


def test_an_interrupt_ends_the_send_and_its_connection(broker: ThreadBroker) -> None:
    def interrupt(sent: Sent) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    with calm_producer(broker) as producer:
        broker.answer_send = interrupt
        with pytest.raises(KeyboardInterrupt):
            producer.send(Message(TOPIC, b"x"))
        interrupted = broker.sent.pop().connection
        broker.answer_send = lambda sent: ResponseCode.SUCCESS
        producer.send(Message(TOPIC, b"y"))
        assert interrupted not in broker.connections()


def test_a_closed_producer_sends_nothing(broker: ThreadBroker) -> None:
    producer = calm_producer(broker)
    producer.send(Message(TOPIC, b"x"))
    producer.close()
    with pytest.raises(ClientClosed):
        producer.send(Message(TOPIC, b"y"))
    with producer:  # it can be started again
        producer.send(Message(TOPIC, b"z"))
    assert [sent.body for sent in broker.sent] == [b"x", b"z"]


def test_a_bad_message_raises_as_on_the_other_path(broker: ThreadBroker) -> None:
    with calm_producer(broker) as producer:
        bad = Message(TOPIC, b"x", flag=1 << 32)
        with pytest.raises(MessageIllegal, match="flag 4294967296 is out of range"):
            producer.send(bad)
        with pytest.raises(MessageIllegal, match="flag 4294967296 is out of range"):
            producer.submit(bad).result()
        assert not broker.sent


def test_many_threads_send_each_message_once(broker: ThreadBroker) -> None:
    with calm_producer(broker) as producer:

        def work(first: int) -> None:
            for number in range(first, first + 50):
                producer.send(Message(TOPIC, b"%d" % number))

        threads = [threading.Thread(target=work, args=(50 * n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(int(sent.body) for sent in broker.sent) == list(range(200))
        assert len({sent.message_id for sent in broker.sent}) == 200


def test_in_an_event_loop_a_send_is_refused(broker: ThreadBroker) -> None:
    async def send(producer: Producer) -> None:
        with pytest.raises(BlockingInLoop, match="AsyncProducer"):
            producer.send(Message(TOPIC, b"x"))

    with calm_producer(broker) as producer:
        asyncio.run(send(producer))
        assert not broker.sent


# --- the gate


def test_the_gate_lets_a_direct_send_in_only_alone() -> None:
    gate = InFlightGate(2)
    gate.enter()
    assert not gate.enter_direct()
    gate.leave()
    assert gate.enter_direct()
    assert not gate.enter_direct()
    gate.enter()
    gate.leave_direct()
    assert not gate.enter_direct()
    gate.leave()
    assert gate.enter_direct()


def test_the_gate_counts_a_direct_send_towards_its_limit() -> None:
    gate = InFlightGate(1)
    assert gate.enter_direct()
    entered = threading.Thread(target=gate.enter)
    entered.start()
    entered.join(0.02)
    assert entered.is_alive()
    gate.leave_direct()
    entered.join(10)
    assert not entered.is_alive()
    assert not gate.enter_direct()


def test_waiting_for_a_direct_send_ends_with_it_or_with_the_timeout() -> None:
    gate = InFlightGate(10)
    gate.wait_for_direct()
    gate.enter()
    gate.wait_for_direct()  # this one is not direct
    gate.leave()
    assert gate.enter_direct()
    gate.wait_for_direct(0.01)
    waiting = threading.Thread(target=gate.wait_for_direct)
    waiting.start()
    gate.enter()
    gate.leave()
    waiting.join(0.02)
    assert waiting.is_alive()
    gate.leave_direct()
    waiting.join(10)
    assert not waiting.is_alive()
