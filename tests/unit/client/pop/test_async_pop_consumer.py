"""Popping consumers: what is lent is acknowledged, kept for longer, or comes again."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
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
from tests.unit.client.client_kit import BROKER, ClientBrokerFixture, FixtureSession, session_of
from tests.unit.client.consumer.consumer_kit import messages as plain_messages
from tests.unit.client.consumer.consumer_kit import until

ACK, BATCH_ACK = RequestCode.ACK_MESSAGE, RequestCode.BATCH_ACK_MESSAGE
POP = RequestCode.POP_MESSAGE
CHANGE = RequestCode.CHANGE_MESSAGE_INVISIBLETIME


class Scene:
    """A broker, a session and a consumer of the group G."""

    def __init__(self, broker_fixture: ClientBrokerFixture, **options: Any) -> None:
        self.broker_fixture = broker_fixture
        self.session = FixtureSession(broker_fixture)
        with session_of("pop.async_pop_consumer", self.session):
            self.consumer = AsyncPopConsumer(group="G", start_at="first", **options)

    def send(self, *bodies: str, topic: str = "T", queue_id: int = 0, tag: str = "") -> None:
        for body in bodies:
            assert self.broker_fixture.send(topic, queue_id, body.encode(), tag).code == 0
        self.broker_fixture.store.publish()

    async def receive(self, **options: Any) -> list[ReceivedMessage]:
        return await self.consumer.receive(wait_ms=0, **options)

    async def bodies(self, **options: Any) -> list[str]:
        return texts(await self.receive(**options))

    def acked(self) -> int:
        return self.session.counts[ACK] + self.session.counts[BATCH_ACK]


def texts(messages: list[ReceivedMessage]) -> list[str]:
    return [message.body.decode() for message in messages]


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., None]:
    def run(body: Callable[[Scene], Coroutine[Any, Any, None]], **options: Any) -> None:
        async def main() -> None:
            async with scene(tmp_path / "store", **options) as made:
                await body(made)

        asyncio.run(main())

    return run


@asynccontextmanager
async def scene(root: Path, *, subscribe: bool = True, **options: Any) -> AsyncIterator[Scene]:
    broker_fixture = ClientBrokerFixture(root)
    made = Scene(broker_fixture, **options)
    try:
        if subscribe:
            made.send("first")
            made.consumer.subscribe("T")
        async with made.consumer:
            if subscribe:
                (first,) = await made.receive()
                await made.consumer.ack(first)
                made.session.counts.clear()
            yield made
    finally:
        broker_fixture.close()


# --- receiving


def test_received_message_is_invisible_until_it_is_acknowledged(play: Any) -> None:
    async def body(scene: Scene) -> None:
        scene.send("a", "b")
        a, b = await scene.receive(invisible_ms=10_000)
        assert (a.topic, a.broker_name, a.queue_offset, a.reconsume_times) == ("T", BROKER, 1, 0)
        assert await scene.bodies() == []
        await scene.consumer.ack(a)
        await scene.session.elapse(11_000)
        (again,) = await scene.receive()
        assert (again.body, again.topic, again.reconsume_times) == (b"b", "T", 1)
        assert receipt_of(again).handle.kind is not RetryKind.NORMAL
        await scene.consumer.ack(again)
        await scene.consumer.ack(again)  # says nothing more
        await scene.session.elapse(100_000)
        assert await scene.bodies() == []
        assert scene.acked() == 2
        await scene.consumer.ack(b)  # too late, and harmless

    play(body)


def test_receive_waits_for_messages(play: Any) -> None:
    async def body(scene: Scene) -> None:
        waiting = asyncio.ensure_future(scene.consumer.receive(wait_ms=30_000))
        await scene.session.elapse(25_000)
        assert not waiting.done()
        assert scene.session.counts[POP] == 2, "one request waits 20 s at most"
        scene.send("now")
        await scene.session.elapse(500)
        assert texts(await waiting) == ["now"]
        empty = asyncio.ensure_future(scene.consumer.receive(wait_ms=3_000))
        await scene.session.elapse(2_000)
        assert not empty.done()
        await scene.session.elapse(1_500)
        assert await empty == []

    play(body)


def test_receive_waits_for_several_topics_at_once(play: Any) -> None:
    async def body(scene: Scene) -> None:
        scene.send("u", topic="U")
        scene.consumer.subscribe("U")
        (message,) = await scene.receive()
        assert (message.body, message.topic) == (b"u", "U")
        await scene.consumer.ack(message)
        for topic in ("T", "U", "T"):
            waiting = asyncio.ensure_future(scene.consumer.receive(wait_ms=60_000))
            await scene.session.elapse(25_000)
            pops = scene.session.counts[POP]
            await scene.session.elapse(10_000)
            assert scene.session.counts[POP] <= pops + 4, (
                "it waits, it does not ask again and again"
            )
            scene.send("x", topic=topic)
            await scene.session.elapse(1_000)
            (message,) = await waiting
            assert message.topic == topic
            await scene.consumer.ack(message)

    play(body)


def test_busy_broker_is_not_flooded_with_pops(play: Any) -> None:
    async def body(scene: Scene) -> None:
        scene.session.refuse[POP] = ResponseCode.POLLING_FULL
        waiting = asyncio.ensure_future(scene.consumer.receive(wait_ms=10_000))
        await scene.session.elapse(10_500)
        assert await waiting == []
        assert 50 < scene.session.counts[POP] < 150

    play(body)


def test_messages_of_a_cancelled_receive_are_not_lost(play: Any) -> None:
    async def body(scene: Scene) -> None:
        for _ in range(3):
            waiting = asyncio.ensure_future(scene.consumer.receive(wait_ms=15_000))
            await scene.session.elapse(100)
            waiting.cancel()
            await asyncio.wait([waiting])
        assert scene.session.counts[POP] == 1, "the request that waits is taken over"
        assert await scene.bodies() == []
        scene.send("a", "b")
        await scene.session.elapse(100)
        assert await scene.bodies(count_max=1) == ["a"]
        assert await scene.bodies() == ["b"]
        assert scene.session.counts[POP] == 2

    play(body)


def test_messages_of_an_abandoned_receive_become_visible_again(play: Any) -> None:
    async def body(scene: Scene) -> None:
        waiting = asyncio.ensure_future(scene.consumer.receive(wait_ms=15_000, invisible_ms=5_000))
        await scene.session.elapse(100)
        waiting.cancel()
        await asyncio.wait([waiting])
        scene.send("a")
        await scene.session.elapse(6_500)
        (again,) = await scene.receive()
        assert (again.body, again.reconsume_times) == (b"a", 1)

    play(body)


def test_filter_is_sent_with_each_pop(play: Any) -> None:
    async def body(scene: Scene) -> None:
        scene.consumer.subscribe("T", "x || y")
        scene.send("1", tag="x")
        scene.send("2", tag="z")
        # the same hash as "Aa": the broker can't tell them apart
        scene.send("3", tag="BB")
        scene.send("4", tag="y")
        assert await scene.bodies() == ["1", "4"]
        scene.consumer.subscribe("T", "Aa")
        scene.send("5", tag="BB")
        scene.send("6", tag="Aa")
        assert await scene.bodies(invisible_ms=5_000) == ["6"]
        await scene.session.elapse(6_000)
        assert scene.acked() == 1, "what only looked like ours is acknowledged"
        assert await scene.bodies() == ["6"]
        scene.consumer.subscribe("T", sql="a >")
        with pytest.raises(BadFilter):
            await scene.receive()

    play(body)


def test_wrong_calls_have_a_hint(play: Any) -> None:
    async def body(scene: Scene) -> None:
        consumer = scene.consumer
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

    play(body, subscribe=False)
    wrongs: list[dict[str, Any]] = [{"group": "a b"}, {"start_at": "now"}, {"concurrency": 0}]
    for wrong in wrongs:
        with pytest.raises(BadSetting):
            AsyncPopConsumer(**{"group": "G", **wrong})


# --- giving back


def test_acks_are_sent_in_batches(play: Any) -> None:
    async def body(scene: Scene) -> None:
        scene.send(*map(str, range(60)))
        scene.send(*map(str, range(60, 90)), queue_id=2)
        messages = []
        while some := await scene.receive():
            messages += some
        assert len(messages) == 90
        await asyncio.gather(*map(scene.consumer.ack, messages))
        assert (scene.session.counts[BATCH_ACK], scene.session.counts[ACK]) == (1, 0)
        await scene.session.elapse(100_000)
        assert await scene.bodies() == []

    play(body)


def test_broker_without_batch_ack_gets_single_acks(play: Any) -> None:
    async def body(scene: Scene) -> None:
        scene.session.refuse[BATCH_ACK] = ResponseCode.REQUEST_CODE_NOT_SUPPORTED
        for number in range(2):
            scene.send("a", "b", "c")
            await asyncio.gather(*map(scene.consumer.ack, await scene.receive()))
            assert scene.session.counts[BATCH_ACK] == 1, "it is asked once"
            assert scene.session.counts[ACK] == 3 * (number + 1)
        await scene.session.elapse(100_000)
        assert await scene.bodies() == []

    play(body)


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_lost_acks_are_retried(play: Any, lost: str) -> None:
    async def body(scene: Scene) -> None:
        scene.send("a")
        (message,) = await scene.receive()
        losses = [lost, lost]
        scene.session.lose = lambda code: losses.pop() if losses and code == ACK else None
        acking = asyncio.ensure_future(scene.consumer.ack(message))
        await scene.session.elapse(1_000)
        await acking
        assert scene.session.counts[ACK] == 3
        scene.send("b")
        (message,) = await scene.receive()
        losses += [lost] * 3
        acking = asyncio.ensure_future(scene.consumer.ack(message))
        await scene.session.elapse(1_000)
        with pytest.raises(PeerTimeout):
            await acking
        await scene.consumer.ack(message)  # may be tried again
        await scene.session.elapse(100_000)
        assert await scene.bodies() == []

    play(body)


def test_invisible_time_is_extended(play: Any) -> None:
    async def body(scene: Scene) -> None:
        scene.send("a", "b")
        a, b = await scene.receive(invisible_ms=5_000)
        for _ in range(3):
            await scene.session.elapse(4_000)
            await scene.consumer.extend(a, 5_000)
        (again,) = await scene.receive()
        assert again.body == b"b"
        await scene.consumer.ack(a)
        await scene.consumer.extend(again, 1)
        await scene.session.elapse(1_000)
        assert await scene.bodies() == ["b"], "handed back at once"
        with pytest.raises(NotInFlight):
            await scene.consumer.extend(a, 5_000)
        await scene.session.elapse(100_000)
        assert await scene.bodies() == ["b"]
        assert b.body == b"b"

    play(body)


def test_ack_waits_for_an_extension_in_flight(play: Any) -> None:
    async def body(scene: Scene) -> None:
        scene.send("a")
        (a,) = await scene.receive(invisible_ms=5_000)
        await asyncio.gather(scene.consumer.extend(a, 8_000), scene.consumer.ack(a))
        await scene.session.elapse(100_000)
        assert await scene.bodies() == []

    play(body)


# --- in order


def test_fifo_queue_is_blocked_until_all_messages_are_acknowledged(play: Any) -> None:
    async def body(scene: Scene) -> None:
        scene.send(*"abcd")
        assert await scene.bodies(count_max=2, invisible_ms=9_000) == ["a", "b"]
        assert await scene.bodies() == []
        await scene.session.elapse(9_500)
        a, b = await scene.receive(count_max=2)
        assert (texts([a, b]), a.reconsume_times) == (["a", "b"], 1)
        await scene.consumer.ack(b)
        assert await scene.bodies() == []
        await scene.consumer.ack(a)
        c, d = await scene.receive()
        assert texts([c, d]) == ["c", "d"]
        await asyncio.gather(scene.consumer.ack(c), scene.consumer.ack(d))
        assert scene.session.counts[BATCH_ACK] == 0, "their answers count one by one"

    play(body, fifo=True)


def test_fifo_pop_with_a_lost_response_is_repeated(play: Any) -> None:
    async def body(scene: Scene) -> None:
        scene.send("a", "b")
        scene.session.lose = lambda code: "answer" if code == POP else None
        with pytest.raises(PeerTimeout):
            await scene.receive()
        scene.session.lose = lambda code: None
        assert await scene.bodies() == ["a", "b"]
        assert await scene.bodies() == []

    play(body, fifo=True)


# --- handlers


class Handled:
    """What a handler got, and how it answers."""

    def __init__(self, scene: Scene, answers: dict[str, list[object]] | None = None) -> None:
        self.seen: list[tuple[str, int]] = []
        self.times: list[int] = []
        self.answers = answers or {}
        self.scene = scene
        scene.consumer.on("T")(self.handle)

    async def handle(self, message: ReceivedMessage) -> object:
        text = message.body.decode()
        self.seen.append((text, message.reconsume_times))
        self.times.append(self.scene.session.clock.now_ms() // 1000)
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
async def running(scene: Scene) -> AsyncIterator[None]:
    run = asyncio.ensure_future(scene.consumer.run())
    await scene.session.elapse(100)
    yield
    closing = asyncio.ensure_future(scene.consumer.close())
    while not closing.done():
        await scene.session.elapse(100)
    await closing
    await run


def test_handled_messages_are_acknowledged(play: Any) -> None:
    async def body(scene: Scene) -> None:
        handled = Handled(scene)
        async with running(scene):
            scene.send(*map(str, range(150)))
            await scene.session.elapse(2_000)
            assert Counter(text for text, _ in handled.seen) == Counter(map(str, range(150)))
            assert scene.acked() < 50
            await scene.session.elapse(100_000)
            assert len(handled.seen) == 150

    play(body)


def test_failed_messages_are_redelivered_with_growing_delays_until_they_are_dead_letters(
    play: Any,
) -> None:
    async def body(scene: Scene) -> None:
        handled = Handled(scene, {"a": [ValueError("x"), False, RuntimeError("y"), None]})
        async with running(scene):
            scene.send("a")
            await scene.session.elapse(300_000)
        assert handled.seen == [("a", times) for times in range(4)]
        assert handled.waits() == pytest.approx([10, 30, 60], abs=2)

    play(body)


def test_failed_message_with_negative_level_becomes_a_dead_letter(play: Any) -> None:
    async def body(scene: Scene) -> None:
        handled = Handled(scene, {"a": [False] * 9, "b": [Retry(-1)], "c": [Retry(1), Retry(18)]})
        async with running(scene):
            scene.send("a", "b", "c")
            await scene.session.elapse(100_000)
        assert Counter(text for text, _ in handled.seen) == {"a": 2, "b": 1, "c": 2}
        dead = scene.broker_fixture.store.max_offset("%DLQ%G", 0)
        assert dead == 3
        scene.broker_fixture.tick(1000)

    play(body, retries_max=1)


def test_invisible_time_is_extended_while_the_handler_runs(play: Any) -> None:
    async def body(scene: Scene) -> None:
        done = asyncio.Event()
        handled = Handled(scene, {"long": [done]})
        async with running(scene):
            scene.send("long")
            await scene.session.elapse(60_000)
            assert len(handled.seen) == 1
            done.set()
            await scene.session.elapse(60_000)
            assert len(handled.seen) == 1
            assert 20 <= scene.session.counts[CHANGE] <= 40
            assert scene.acked() == 1

    play(body, invisible_ms=5_000)


def test_message_of_a_stuck_handler_is_redelivered(play: Any) -> None:
    async def body(scene: Scene) -> None:
        handled = Handled(scene, {"hangs": [asyncio.Event()]})
        async with running(scene):
            scene.send("hangs")
            await scene.session.elapse(40_000)
            assert handled.seen == [("hangs", 0), ("hangs", 1)]

    play(body, invisible_ms=5_000, consume_timeout_ms=20_000, drain_ms=10)


def test_pops_are_limited_by_messages_max(play: Any) -> None:
    async def body(scene: Scene) -> None:
        gate = asyncio.Event()
        handled = Handled(scene, {str(n): [gate] for n in range(100)})
        async with running(scene):
            scene.send(*map(str, range(100)))
            await scene.session.elapse(3_000)
            assert len(handled.seen) == 4
            assert len(await scene.receive(count_max=32)) == 32, "others get the rest"
            gate.set()
            await scene.session.elapse(3_000)
            assert len(handled.seen) == 68

    play(body, concurrency=4, messages_max=10)


def test_close_waits_for_handlers_and_returns_other_messages(play: Any) -> None:
    async def body(scene: Scene) -> None:
        gate = asyncio.Event()
        handled = Handled(scene, {"0": [gate]})
        async with running(scene):
            scene.send(*map(str, range(5)))
            await scene.session.elapse(1_000)
            assert len(handled.seen) == 1
            scene.session.clock.wake_at(scene.session.clock.now_ms() + 1_000, gate.set)
        assert scene.acked() == 1
        await scene.consumer.start()
        await scene.session.elapse(2_000)
        messages = await scene.receive()
        assert sorted(texts(messages)) == ["1", "2", "3", "4"]

    play(body, concurrency=1, invisible_ms=60_000)


def test_close_cancels_stuck_handlers_and_returns_their_messages(play: Any) -> None:
    async def body(scene: Scene) -> None:
        handled = Handled(scene, {"a": [asyncio.Event()]})
        async with running(scene):
            scene.send("a")
            await scene.session.elapse(1_000)
        assert len(handled.seen) == 1
        await scene.consumer.start()
        await scene.session.elapse(2_000)
        assert await scene.bodies() == ["a"]

    play(body, drain_ms=2_000)


def test_fifo_failure_blocks_only_its_queue(play: Any) -> None:
    async def body(scene: Scene) -> None:
        handled = Handled(scene, {"b": [False, False]})
        async with running(scene):
            scene.send("a", "b", "c", queue_id=1)
            scene.send("x", "y", "z", queue_id=2)
            await scene.session.elapse(3_000)
            assert sorted(text for text, _ in handled.seen) == ["a", "b", "x", "y", "z"]
            await scene.session.elapse(100_000)
            line = [text for text, _ in handled.seen if text in "abc"]
            assert line == ["a", "b", "b", "b", "c"]
            assert scene.session.counts[BATCH_ACK] == 0

    play(body, fifo=True)


def test_plain_functions_run_in_threads(play: Any) -> None:
    async def body(scene: Scene) -> None:
        seen: list[tuple[str, bool]] = []

        @scene.consumer.on("T", "t")
        def handle(message: ReceivedMessage) -> object:
            own = threading.current_thread() is not threading.main_thread()
            seen.append((message.body.decode(), own))
            if message.body == b"fails" and message.reconsume_times == 0:
                raise ValueError
            return None

        async with running(scene):
            scene.send("a", "fails", tag="t")
            await scene.session.elapse(1_000)
            await until(lambda: len(seen) == 2)
            await scene.session.elapse(14_000)
            await until(lambda: len(seen) == 3)
        assert seen == [("a", True), ("fails", True), ("fails", True)]

    play(body)


def test_failure_of_one_broker_does_not_stop_the_others(play: Any) -> None:
    async def body(scene: Scene) -> None:
        handled = Handled(scene)
        async with running(scene):
            scene.session.lose = lambda code: "request" if code == POP else None
            await scene.session.elapse(30_000)
            scene.session.lose = lambda code: None
            scene.send("a")
            await scene.session.elapse(4_000)
            assert handled.seen == [("a", 0)]
            scene.session.lose = lambda code: "request" if code == ACK else None
            scene.send("b")
            await scene.session.elapse(4_000)
            scene.session.lose = lambda code: None
            await scene.session.elapse(60_000)
            assert handled.seen == [("a", 0), ("b", 0), ("b", 1)], (
                "not acknowledged: it comes again"
            )

    play(body)
