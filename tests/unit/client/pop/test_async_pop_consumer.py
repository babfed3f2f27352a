"""POP consumers: receiving, acknowledging, extending the invisible time, redelivery, handlers."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from penstock.client.consumer.dispatch.handlers import Retry
from penstock.client.pop.async_pop_consumer import AsyncPopConsumer
from penstock.client.pop.popped_messages import receipt_of
from penstock.client.received_message import ReceivedMessage
from penstock.errors import (
    BadFilter,
    BadSetting,
    ClientClosed,
    InvalidParameter,
    NoRoute,
    NotInFlight,
    PeerTimeout,
)
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.receipt_handle import RetryKind
from tests.unit.client.client_kit import BROKER
from tests.unit.client.consumer.consumer_kit import messages as plain_messages
from tests.unit.client.consumer.consumer_kit import until
from tests.unit.client.pop.pop_consumer_kit import ACK, BATCH_ACK, PopFixture, texts

POP = RequestCode.POP_MESSAGE
CHANGE = RequestCode.CHANGE_MESSAGE_INVISIBLETIME


# --- receiving


def test_received_message_is_invisible_until_it_is_acknowledged(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        fixture.send("a", "b")
        a, b = await fixture.receive(invisible_ms=10_000)
        assert (a.topic, a.broker_name, a.queue_offset, a.reconsume_times) == ("T", BROKER, 1, 0)
        assert await fixture.bodies() == []
        await fixture.consumer.ack(a)
        await fixture.session.elapse(11_000)
        (again,) = await fixture.receive()
        assert (again.body, again.topic, again.reconsume_times) == (b"b", "T", 1)
        assert receipt_of(again).handle.kind is not RetryKind.NORMAL
        await fixture.consumer.ack(again)
        await fixture.consumer.ack(again)  # has no effect
        await fixture.session.elapse(100_000)
        assert await fixture.bodies() == []
        assert fixture.acked() == 2
        await fixture.consumer.ack(b)  # too late, without effect

    run_test(body)


def test_receive_waits_for_messages(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        waiting = asyncio.ensure_future(fixture.consumer.receive(wait_ms=30_000))
        await fixture.session.elapse(25_000)
        assert not waiting.done()
        assert fixture.session.counts[POP] == 2, "one request waits 20 s at most"
        fixture.send("now")
        await fixture.session.elapse(500)
        assert texts(await waiting) == ["now"]
        empty = asyncio.ensure_future(fixture.consumer.receive(wait_ms=3_000))
        await fixture.session.elapse(2_000)
        assert not empty.done()
        await fixture.session.elapse(1_500)
        assert await empty == []

    run_test(body)


def test_receive_waits_for_several_topics_at_once(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        fixture.send("u", topic="U")
        fixture.consumer.subscribe("U")
        (message,) = await fixture.receive()
        assert (message.body, message.topic) == (b"u", "U")
        await fixture.consumer.ack(message)
        for topic in ("T", "U", "T"):
            waiting = asyncio.ensure_future(fixture.consumer.receive(wait_ms=60_000))
            await fixture.session.elapse(25_000)
            pops = fixture.session.counts[POP]
            await fixture.session.elapse(10_000)
            assert fixture.session.counts[POP] <= pops + 4, (
                "it waits, it does not ask again and again"
            )
            fixture.send("x", topic=topic)
            await fixture.session.elapse(1_000)
            (message,) = await waiting
            assert message.topic == topic
            await fixture.consumer.ack(message)

    run_test(body)


def test_busy_broker_is_not_flooded_with_pops(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        fixture.session.refuse[POP] = ResponseCode.POLLING_FULL
        waiting = asyncio.ensure_future(fixture.consumer.receive(wait_ms=10_000))
        await fixture.session.elapse(10_500)
        assert await waiting == []
        assert 50 < fixture.session.counts[POP] < 150

    run_test(body)


def test_messages_of_a_cancelled_receive_are_not_lost(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        for _ in range(3):
            waiting = asyncio.ensure_future(fixture.consumer.receive(wait_ms=15_000))
            await fixture.session.elapse(100)
            waiting.cancel()
            await asyncio.wait([waiting])
        assert fixture.session.counts[POP] == 1, "the request that waits is taken over"
        assert await fixture.bodies() == []
        fixture.send("a", "b")
        await fixture.session.elapse(100)
        assert await fixture.bodies(count_max=1) == ["a"]
        assert await fixture.bodies() == ["b"]
        assert fixture.session.counts[POP] == 2

    run_test(body)


def test_messages_of_an_abandoned_receive_become_visible_again(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        waiting = asyncio.ensure_future(
            fixture.consumer.receive(wait_ms=15_000, invisible_ms=5_000)
        )
        await fixture.session.elapse(100)
        waiting.cancel()
        await asyncio.wait([waiting])
        fixture.send("a")
        await fixture.session.elapse(6_500)
        (again,) = await fixture.receive()
        assert (again.body, again.reconsume_times) == (b"a", 1)

    run_test(body)


def test_filter_is_sent_with_each_pop(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        fixture.consumer.subscribe("T", "x || y")
        fixture.send("1", tag="x")
        fixture.send("2", tag="z")
        # the same hash as "Aa": the broker can't distinguish them
        fixture.send("3", tag="BB")
        fixture.send("4", tag="y")
        assert await fixture.bodies() == ["1", "4"]
        fixture.consumer.subscribe("T", "Aa")
        fixture.send("5", tag="BB")
        fixture.send("6", tag="Aa")
        assert await fixture.bodies(invisible_ms=5_000) == ["6"]
        await fixture.session.elapse(6_000)
        assert fixture.acked() == 1, "what only looked like ours is acknowledged"
        assert await fixture.bodies() == ["6"]
        fixture.consumer.subscribe("T", sql="a >")
        with pytest.raises(BadFilter):
            await fixture.receive()

    run_test(body)


def test_wrong_calls_have_a_hint(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        consumer = fixture.consumer
        with pytest.raises(InvalidParameter, match="subscription"):
            await consumer.receive()
        consumer.subscribe("nowhere")
        with pytest.raises(NoRoute, match="nowhere"):
            await consumer.receive()
        with pytest.raises(InvalidParameter, match="count_max"):
            await consumer.receive(0)
        with pytest.raises(InvalidParameter, match="invisible_ms"):
            await consumer.receive(invisible_ms=0)
        with pytest.raises(NotInFlight):
            await consumer.ack(plain_messages(1)[0])
        with pytest.raises(InvalidParameter, match="handler"):
            await consumer.run()
        await consumer.close()
        with pytest.raises(ClientClosed):
            await consumer.receive()
        await consumer.start()

    run_test(body, subscribe=False)
    wrongs: list[dict[str, Any]] = [{"group": "a b"}, {"start_at": "now"}, {"concurrency": 0}]
    for wrong in wrongs:
        with pytest.raises(BadSetting):
            AsyncPopConsumer(**{"group": "G", **wrong})


# --- acks and extensions


def test_acks_are_sent_in_batches(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        fixture.send(*map(str, range(60)))
        fixture.send(*map(str, range(60, 90)), queue_id=2)
        messages = []
        while some := await fixture.receive():
            messages += some
        assert len(messages) == 90
        await asyncio.gather(*map(fixture.consumer.ack, messages))
        assert (fixture.session.counts[BATCH_ACK], fixture.session.counts[ACK]) == (1, 0)
        await fixture.session.elapse(100_000)
        assert await fixture.bodies() == []

    run_test(body)


def test_broker_without_batch_ack_gets_single_acks(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        fixture.session.refuse[BATCH_ACK] = ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        for number in range(2):
            fixture.send("a", "b", "c")
            await asyncio.gather(*map(fixture.consumer.ack, await fixture.receive()))
            assert fixture.session.counts[BATCH_ACK] == 1, "it is asked once"
            assert fixture.session.counts[ACK] == 3 * (number + 1)
        await fixture.session.elapse(100_000)
        assert await fixture.bodies() == []

    run_test(body)


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_lost_acks_are_retried(run_test: Any, lost: str) -> None:
    async def body(fixture: PopFixture) -> None:
        fixture.send("a")
        (message,) = await fixture.receive()
        losses = [lost, lost]
        fixture.session.lose = lambda code: losses.pop() if losses and code == ACK else None
        acking = asyncio.ensure_future(fixture.consumer.ack(message))
        await fixture.session.elapse(1_000)
        await acking
        assert fixture.session.counts[ACK] == 3
        fixture.send("b")
        (message,) = await fixture.receive()
        losses += [lost] * 3
        acking = asyncio.ensure_future(fixture.consumer.ack(message))
        await fixture.session.elapse(1_000)
        with pytest.raises(PeerTimeout):
            await acking
        await fixture.consumer.ack(message)  # can be retried
        await fixture.session.elapse(100_000)
        assert await fixture.bodies() == []

    run_test(body)


def test_invisible_time_is_extended(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        fixture.send("a", "b")
        a, b = await fixture.receive(invisible_ms=5_000)
        for _ in range(3):
            await fixture.session.elapse(4_000)
            await fixture.consumer.extend(a, 5_000)
        (again,) = await fixture.receive()
        assert again.body == b"b"
        await fixture.consumer.ack(a)
        await fixture.consumer.extend(again, 1)
        await fixture.session.elapse(1_000)
        assert await fixture.bodies() == ["b"], "handed back at once"
        with pytest.raises(NotInFlight):
            await fixture.consumer.extend(a, 5_000)
        await fixture.session.elapse(100_000)
        assert await fixture.bodies() == ["b"]
        assert b.body == b"b"

    run_test(body)


def test_ack_waits_for_an_extension_in_flight(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        fixture.send("a")
        (a,) = await fixture.receive(invisible_ms=5_000)
        await asyncio.gather(fixture.consumer.extend(a, 8_000), fixture.consumer.ack(a))
        await fixture.session.elapse(100_000)
        assert await fixture.bodies() == []

    run_test(body)


# --- in order


def test_fifo_queue_is_blocked_until_all_messages_are_acknowledged(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        fixture.send(*"abcd")
        assert await fixture.bodies(count_max=2, invisible_ms=9_000) == ["a", "b"]
        assert await fixture.bodies() == []
        await fixture.session.elapse(9_500)
        a, b = await fixture.receive(count_max=2)
        assert (texts([a, b]), a.reconsume_times) == (["a", "b"], 1)
        await fixture.consumer.ack(b)
        assert await fixture.bodies() == []
        await fixture.consumer.ack(a)
        c, d = await fixture.receive()
        assert texts([c, d]) == ["c", "d"]
        await asyncio.gather(fixture.consumer.ack(c), fixture.consumer.ack(d))
        assert fixture.session.counts[BATCH_ACK] == 0, "their answers count one by one"

    run_test(body, fifo=True)


def test_fifo_pop_with_a_lost_response_is_repeated(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        fixture.send("a", "b")
        fixture.session.lose = lambda code: "answer" if code == POP else None
        with pytest.raises(PeerTimeout):
            await fixture.receive()
        fixture.session.lose = lambda code: None
        assert await fixture.bodies() == ["a", "b"]
        assert await fixture.bodies() == []

    run_test(body, fifo=True)


# --- handlers


class Handled:
    """The messages of a handler, and its results."""

    def __init__(self, fixture: PopFixture, answers: dict[str, list[object]] | None = None) -> None:
        self.seen: list[tuple[str, int]] = []
        self.times: list[int] = []
        self.answers = answers or {}
        self.fixture = fixture
        fixture.consumer.on("T")(self.handle)

    async def handle(self, message: ReceivedMessage) -> object:
        text = message.body.decode()
        self.seen.append((text, message.reconsume_times))
        self.times.append(self.fixture.session.clock.now_ms() // 1000)
        answer = self.answers.get(text, [])
        result = answer.pop(0) if answer else None
        if isinstance(result, Exception):
            raise result
        if isinstance(result, asyncio.Event):
            await result.wait()
        return result

    def waits(self) -> list[int]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


@asynccontextmanager
async def running(fixture: PopFixture) -> AsyncIterator[None]:
    run = asyncio.ensure_future(fixture.consumer.run())
    await fixture.session.elapse(100)
    yield
    closing = asyncio.ensure_future(fixture.consumer.close())
    while not closing.done():
        await fixture.session.elapse(100)
    await closing
    await run


def test_handled_messages_are_acknowledged(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        handled = Handled(fixture)
        async with running(fixture):
            fixture.send(*map(str, range(150)))
            await fixture.session.elapse(2_000)
            assert Counter(text for text, _ in handled.seen) == Counter(map(str, range(150)))
            assert fixture.acked() < 50
            await fixture.session.elapse(100_000)
            assert len(handled.seen) == 150

    run_test(body)


@pytest.mark.slow
def test_failed_messages_are_redelivered_with_growing_delays_until_they_are_dead_letters(
    run_test: Any,
) -> None:
    async def body(fixture: PopFixture) -> None:
        handled = Handled(fixture, {"a": [ValueError("x"), False, RuntimeError("y"), None]})
        async with running(fixture):
            fixture.send("a")
            await fixture.session.elapse(300_000)
        assert handled.seen == [("a", times) for times in range(4)]
        assert handled.waits() == pytest.approx([10, 30, 60], abs=2)

    run_test(body)


def test_failed_message_with_negative_level_becomes_a_dead_letter(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        handled = Handled(fixture, {"a": [False] * 9, "b": [Retry(-1)], "c": [Retry(1), Retry(18)]})
        async with running(fixture):
            fixture.send("a", "b", "c")
            await fixture.session.elapse(100_000)
        assert Counter(text for text, _ in handled.seen) == {"a": 2, "b": 1, "c": 2}
        dead = fixture.broker_fixture.store.max_offset("%DLQ%G", 0)
        assert dead == 3
        fixture.broker_fixture.tick(1000)

    run_test(body, retries_max=1)


def test_invisible_time_is_extended_while_the_handler_runs(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        done = asyncio.Event()
        handled = Handled(fixture, {"long": [done]})
        async with running(fixture):
            fixture.send("long")
            await fixture.session.elapse(60_000)
            assert len(handled.seen) == 1
            done.set()
            await fixture.session.elapse(60_000)
            assert len(handled.seen) == 1
            assert 20 <= fixture.session.counts[CHANGE] <= 40
            assert fixture.acked() == 1

    run_test(body, invisible_ms=5_000)


def test_message_of_a_stuck_handler_is_redelivered(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        handled = Handled(fixture, {"hangs": [asyncio.Event()]})
        async with running(fixture):
            fixture.send("hangs")
            await fixture.session.elapse(40_000)
            assert handled.seen == [("hangs", 0), ("hangs", 1)]

    run_test(body, invisible_ms=5_000, consume_timeout_ms=20_000, drain_ms=10)


def test_pops_are_limited_by_messages_max(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        release = asyncio.Event()
        handled = Handled(fixture, {str(n): [release] for n in range(100)})
        async with running(fixture):
            fixture.send(*map(str, range(100)))
            await fixture.session.elapse(3_000)
            assert len(handled.seen) == 4
            assert len(await fixture.receive(count_max=32)) == 32, "others get the rest"
            release.set()
            await fixture.session.elapse(3_000)
            assert len(handled.seen) == 68

    run_test(body, concurrency=4, messages_max=10)


def test_close_waits_for_handlers_and_returns_other_messages(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        release = asyncio.Event()
        handled = Handled(fixture, {"0": [release]})
        async with running(fixture):
            fixture.send(*map(str, range(5)))
            await fixture.session.elapse(1_000)
            assert len(handled.seen) == 1
            fixture.session.clock.wake_at(fixture.session.clock.now_ms() + 1_000, release.set)
        assert fixture.acked() == 1
        await fixture.consumer.start()
        await fixture.session.elapse(2_000)
        messages = await fixture.receive()
        assert sorted(texts(messages)) == ["1", "2", "3", "4"]

    run_test(body, concurrency=1, invisible_ms=60_000)


def test_close_cancels_stuck_handlers_and_returns_their_messages(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        handled = Handled(fixture, {"a": [asyncio.Event()]})
        async with running(fixture):
            fixture.send("a")
            await fixture.session.elapse(1_000)
        assert len(handled.seen) == 1
        await fixture.consumer.start()
        await fixture.session.elapse(2_000)
        assert await fixture.bodies() == ["a"]

    run_test(body, drain_ms=2_000)


def test_fifo_failure_blocks_only_its_queue(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        handled = Handled(fixture, {"b": [False, False]})
        async with running(fixture):
            fixture.send("a", "b", "c", queue_id=1)
            fixture.send("x", "y", "z", queue_id=2)
            await fixture.session.elapse(3_000)
            assert sorted(text for text, _ in handled.seen) == ["a", "b", "x", "y", "z"]
            await fixture.session.elapse(100_000)
            line = [text for text, _ in handled.seen if text in "abc"]
            assert line == ["a", "b", "b", "b", "c"]
            assert fixture.session.counts[BATCH_ACK] == 0

    run_test(body, fifo=True)


def test_plain_functions_run_in_threads(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        seen: list[tuple[str, bool]] = []

        @fixture.consumer.on("T", "t")
        def handle(message: ReceivedMessage) -> object:
            own = threading.current_thread() is not threading.main_thread()
            seen.append((message.body.decode(), own))
            if message.body == b"fails" and message.reconsume_times == 0:
                raise ValueError
            return None

        async with running(fixture):
            fixture.send("a", "fails", tag="t")
            await fixture.session.elapse(1_000)
            await until(lambda: len(seen) == 2)
            await fixture.session.elapse(14_000)
            await until(lambda: len(seen) == 3)
        assert seen == [("a", True), ("fails", True), ("fails", True)]

    run_test(body)


def test_failure_of_one_broker_does_not_stop_the_others(run_test: Any) -> None:
    async def body(fixture: PopFixture) -> None:
        handled = Handled(fixture)
        async with running(fixture):
            fixture.session.lose = lambda code: "request" if code == POP else None
            await fixture.session.elapse(30_000)
            fixture.session.lose = lambda code: None
            fixture.send("a")
            await fixture.session.elapse(4_000)
            assert handled.seen == [("a", 0)]
            fixture.session.lose = lambda code: "request" if code == ACK else None
            fixture.send("b")
            await fixture.session.elapse(4_000)
            fixture.session.lose = lambda code: None
            await fixture.session.elapse(60_000)
            assert handled.seen == [("a", 0), ("b", 0), ("b", 1)], (
                "not acknowledged: it comes again"
            )

    run_test(body)
