"""Batching on the client's side."""

import asyncio
from collections.abc import Coroutine, Sequence
from datetime import timedelta
from typing import Any

import pytest

from penstock.client.messages import Message, MessageQueue, SendReceipt, SendStatus
from penstock.client.producer.accumulator import Accumulator, Batching
from penstock.errors import (
    BadSetting,
    ClientClosed,
    MessageIllegal,
    PeerTimeout,
    PenstockError,
    TooMuchInFlight,
)
from penstock.testing.virtual_clock import VirtualClock


class Sends:
    """Records batches, and answers or fails them."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[bytes], MessageQueue | None]] = []
        self.error: Exception | None = None
        self.refused: dict[bytes, PenstockError] = {}
        self.release: asyncio.Event | None = None

    async def __call__(
        self, messages: Sequence[Message], queue: MessageQueue | None
    ) -> list[SendReceipt | PenstockError]:
        self.batches.append(([message.content for message in messages], queue))
        if self.release is not None:
            await self.release.wait()
        if self.error is not None:
            raise self.error
        if any(message.content == b"bad" for message in messages):
            raise MessageIllegal("a bad one among them")
        target = queue or MessageQueue("T", "a", 0)
        return [
            self.refused.get(message.content)
            or SendReceipt(SendStatus.SEND_OK, message.content.decode(), "", target, number)
            for number, message in enumerate(messages)
        ]

    @property
    def bodies(self) -> list[list[bytes]]:
        return [bodies for bodies, _ in self.batches]


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def _made(
    batching: Batching = Batching(),  # noqa: B008 (frozen)
) -> tuple[Accumulator, Sends, VirtualClock]:
    clock, sends = VirtualClock(), Sends()
    return Accumulator(sends, batching, clock), sends, clock


def test_batch_is_sent_after_linger_ms() -> None:
    async def run() -> None:
        accumulator, sends, clock = _made()
        first = accumulator.add(Message("T", b"1"))
        await clock.elapse(6)
        second = accumulator.add(Message("T", b"2"))
        await clock.elapse(3)
        assert sends.batches == []
        await clock.elapse(1)
        assert sends.bodies == [[b"1", b"2"]]
        assert [(await first).message_id, (await second).message_id] == ["1", "2"]
        assert clock.pending() == 0

    _run(run())


def test_full_batch_is_sent_at_once() -> None:
    async def run() -> None:
        accumulator, sends, clock = _made(Batching(count_max=3))
        futures = [accumulator.add(Message("T", str(n))) for n in range(7)]
        await clock.elapse(0)
        assert sends.bodies == [[b"0", b"1", b"2"], [b"3", b"4", b"5"]]
        await accumulator.flush()
        assert [future.result().message_id for future in futures] == list("0123456")

    _run(run())


def test_batch_is_limited_by_bytes() -> None:
    async def run() -> None:
        accumulator, sends, _ = _made(Batching(bytes_max=1_000))
        for _ in range(3):
            accumulator.add(Message("T", bytes(350)))
        await accumulator.flush()
        assert [len(bodies) for bodies in sends.bodies] == [2, 1]

    _run(run())


def test_batch_has_one_topic_queue_and_wait_stored() -> None:
    async def run() -> None:
        accumulator, sends, _ = _made()
        queue = MessageQueue("T", "a", 3)
        accumulator.add(Message("T", b"1"))
        accumulator.add(Message("U", b"2"))
        accumulator.add(Message("T", b"3"), queue)
        accumulator.add(Message("T", b"4", wait_stored=False))
        accumulator.add(Message("T", b"5"))
        accumulator.add(Message("T", b"6"), queue)
        await accumulator.flush()
        assert sends.batches == [
            ([b"1", b"5"], None), ([b"2"], None), ([b"3", b"6"], queue), ([b"4"], None),
        ]  # fmt: skip

    _run(run())


@pytest.mark.parametrize(
    "message",
    [
        Message("T", b"x", delay_level=3),
        Message("T", b"x", delay=timedelta(seconds=5)),
        Message("%RETRY%g", b"x"),
        Message("T", b"x", properties={"PGROUP": "g"}),
        Message("T", bytes(40_000)),
    ],
)
def test_message_that_cannot_be_batched_is_sent_alone_at_once(message: Message) -> None:
    async def run() -> None:
        accumulator, sends, clock = _made()
        accumulator.add(Message("T", b"1"))
        alone = accumulator.add(message)
        await clock.elapse(0)
        assert sends.bodies == [[message.content]]
        assert alone.done()
        await accumulator.close()

    _run(run())


def test_failed_batch_fails_each_of_its_messages() -> None:
    async def run() -> None:
        accumulator, sends, _ = _made()
        sends.error = PeerTimeout("no answer")
        futures = [accumulator.add(Message("T", b"1")), accumulator.add(Message("T", b"2"))]
        await accumulator.flush()
        assert [future.exception() for future in futures] == [sends.error, sends.error]
        assert len(sends.batches) == 1

    _run(run())


def test_bad_message_does_not_fail_the_others() -> None:
    async def run() -> None:
        accumulator, _sends, _ = _made()
        good, bad, last = (accumulator.add(Message("T", body)) for body in ("1", "bad", "2"))
        await accumulator.flush()
        assert (good.result().message_id, last.result().message_id) == ("1", "2")
        assert isinstance(bad.exception(), MessageIllegal)

    _run(run())


def test_unexpected_error_fails_each_message() -> None:
    async def run() -> None:
        accumulator, sends, _ = _made()
        sends.error = TypeError("no flag")
        futures = [accumulator.add(Message("T", b"1")), accumulator.add(Message("T", b"2"))]
        await accumulator.flush()
        assert [future.exception() for future in futures] == [sends.error, sends.error]
        assert accumulator.in_flight.count == 0

    _run(run())


def test_stored_messages_of_a_failed_batch_are_not_sent_again() -> None:
    """As for a batch that was split into two requests."""

    async def run() -> None:
        accumulator, sends, _ = _made()
        late, wrong = PeerTimeout("no answer"), MessageIllegal("refused")
        sends.refused = {b"2": late, b"3": wrong}
        one, two, three, four = (accumulator.add(Message("T", f"{n}")) for n in (1, 2, 3, 4))
        await accumulator.flush()
        assert (one.result().message_id, four.result().message_id) == ("1", "4")
        assert (two.exception(), three.exception()) == (late, wrong)
        assert sends.bodies == [[b"1", b"2", b"3", b"4"], [b"3"]]

    _run(run())


def test_messages_in_flight_are_limited() -> None:
    async def run() -> None:
        clock, sends = VirtualClock(), Sends()
        sends.release = asyncio.Event()
        accumulator = Accumulator(sends, Batching(count_max=2), clock, 3)
        accumulator.add(Message("T", b"1"))
        accumulator.add(Message("T", b"2"))
        accumulator.add(Message("T", b"3")).cancel()
        with pytest.raises(TooMuchInFlight, match="the limit is 3"):
            accumulator.add(Message("T", b"4"))
        await clock.elapse(10)
        accumulator.add(Message("T", b"4"))
        sends.release.set()
        await accumulator.close()
        assert (accumulator.in_flight.count, accumulator.in_flight.byte_count) == (0, 0)

    _run(run())


def test_flush_does_not_wait_for_later_messages() -> None:
    async def run() -> None:
        accumulator, sends, clock = _made(Batching(count_max=1))
        sends.release = asyncio.Event()
        first = accumulator.add(Message("T", b"1"))
        flushing = asyncio.ensure_future(accumulator.flush())
        await clock.elapse(0)
        sends.release.set()
        sends.release = asyncio.Event()
        accumulator.add(Message("T", b"2"))
        await flushing
        assert first.done()
        sends.release.set()
        await accumulator.close()

    _run(run())


def test_cancelled_message_is_not_sent() -> None:
    async def run() -> None:
        accumulator, sends, _ = _made()
        accumulator.add(Message("T", b"1")).cancel()
        accumulator.add(Message("T", b"2"))
        accumulator.add(Message("U", b"3")).cancel()
        await accumulator.flush()
        assert sends.bodies == [[b"2"]]

    _run(run())


def test_close_flushes_and_refuses_further_messages() -> None:
    async def run() -> None:
        accumulator, sends, clock = _made()
        sends.release = asyncio.Event()
        future = accumulator.add(Message("T", b"1"))
        closing = asyncio.ensure_future(accumulator.close())
        await clock.elapse(0)
        assert sends.bodies == [[b"1"]]
        assert not closing.done()
        with pytest.raises(ClientClosed):
            accumulator.add(Message("T", b"2"))
        sends.release.set()
        await closing
        assert future.done()

    _run(run())


@pytest.mark.parametrize("name", ["linger_ms", "bytes_max", "count_max"])
def test_batching_limits_must_be_positive(name: str) -> None:
    with pytest.raises(BadSetting, match=name):
        Batching(**{name: 0})
