"""The transactional sink with several failures at once."""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from penstock.errors import NoPermission, NoRoute, RowRefused, SinkTaken
from penstock.spark.sink import sink_client
from penstock.spark.sink.batch_status import (
    INLINE_OFFSET,
    BatchStatus,
    ControlRecord,
    ControlRecordBody,
    ControlRecordKind,
    Part,
    status_of,
)
from penstock.spark.sink.control_topic import _STATE, ControlTopic, _number
from penstock.testing import InProcessBroker
from tests.unit.spark.sink.sink_kit import Sink, row


@pytest.fixture
def broker() -> Iterator[InProcessBroker]:
    with InProcessBroker() as broker:
        broker.create_topic("orders", queues=2)
        yield broker


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def _die_in(patch: pytest.MonkeyPatch, kind: type, name: str, calls: int = 0) -> None:
    """Let the driver die at a call of this method."""
    method = getattr(kind, name)
    done = 0

    async def dying(self: Any, *args: Any) -> Any:
        nonlocal done
        if done == calls:
            raise OSError("the driver dies here")
        done += 1
        return await method(self, *args)

    patch.setattr(kind, name, dying)


# --- two queries with the same sinkId------------------------------------------------------------


def test_decision_of_another_query_is_refused(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver dies between the decision and its stored state; the checkpoint is deleted."""

    async def body() -> None:
        sink = Sink(broker)
        chunks = await sink.send_rows("a")
        with monkeypatch.context() as patch:
            _die_in(patch, ControlTopic, "record_decided")
            with pytest.raises(OSError, match="dies"):
                await sink.commit(*chunks)
        with pytest.raises(SinkTaken, match="batches of another query"):
            await sink.task(query="other").begin()
        await sink.commit(*chunks)
        assert sink.published() == ["a"]

    _run(body())


@pytest.mark.parametrize("done", [False, True])
def test_two_queries_that_start_together(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    async def body() -> None:
        sink = Sink(broker)
        one, two = await sink.send_rows("a", query="q"), await sink.send_rows("b", query="r")
        with monkeypatch.context() as patch:
            if not done:
                _die_in(patch, ControlTopic, "record_decided")
            try:
                await sink.commit(*one, query="q")
            except OSError:
                assert not done
        with pytest.raises(SinkTaken, match="batches of another query"):
            await sink.commit(*two, query="r")
        await sink.commit(*one, query="q")
        assert sink.published() == ["a"]

    _run(body())


# --- drivers that are late -----------------------------------------------------------------------


def test_stored_state_that_goes_back_does_not_repeat_a_batch(
    broker: InProcessBroker,
) -> None:
    """A replaced driver stores `state`, which it read long before."""

    async def body() -> None:
        sink = Sink(broker)
        await sink.commit(*await sink.send_rows("a"))
        await sink.commit(*await sink.send_rows("b", batch=1), batch=1)
        sink.set_number(_STATE, 1)
        assert not await sink.starts(batch=1)
        await sink.commit(batch=1, decided=True)
        sink.set_number(_STATE, 1)
        with pytest.raises(SinkTaken, match="comes after its batch 1"):
            await sink.starts(batch=0)
        assert sink.published() == ["a", "b"]

    _run(body())


def _record(kind: ControlRecordKind, name: str, offset: int) -> ControlRecord:
    body = ControlRecordBody("s", 0, id=name, parts=[Part(INLINE_OFFSET, [(name, 1)])])
    return ControlRecord(kind, offset, body, b"")


def test_done_batch_needs_no_decision() -> None:
    """The decision is before the position that was read, a second one after it."""
    one, two = (
        _record(ControlRecordKind.DECIDED, "one", 4),
        _record(ControlRecordKind.DECIDED, "two", 5),
    )
    done = _record(ControlRecordKind.DONE, "one", 6)
    assert status_of([one, two, done]) == BatchStatus(True, one)
    assert status_of([two, done]) == BatchStatus(True, None)
    assert status_of([done, two]) == BatchStatus(True, None)
    assert status_of([two]) == BatchStatus(False, two)


# --- unfinished batches --------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["record_decided", "_end"])
def test_decided_batch_is_finished_before_the_next_one(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """An application that numbers its batches may continue after an error."""

    async def body() -> None:
        sink = Sink(broker)
        chunks = await sink.send_rows("a", "b")
        with monkeypatch.context() as patch:
            patch.setattr(sink_client, "END_WINDOW", 1)
            _die_in(
                patch, ControlTopic if step == "record_decided" else sink_client.SinkClient, step
            )
            with pytest.raises(OSError, match="dies"):
                await sink.commit(*chunks)
        await sink.commit(*await sink.send_rows("c", batch=1), batch=1)
        assert sink.published() == ["a", "b", "c"]
        await sink.commit(*await sink.send_rows("d", batch=2), batch=2)
        assert sink.published() == ["a", "b", "c", "d"]

    _run(body())


def test_late_decision_of_a_done_batch_is_ignored(broker: InProcessBroker) -> None:
    async def body() -> None:
        sink = Sink(broker)
        late = await sink.send_rows("a")
        await sink.commit(*await sink.send_rows("a"))
        await sink.commit(*await sink.send_rows("b", batch=1), batch=1)
        async with sink_client.SinkClient(sink.options, lambda client: lambda message: None) as it:
            control = it.control("s", "q")
            await control.find_control_broker(1)
            await control.write_decision(0, late)
        sink.set_number(_STATE, 1)
        await sink.commit(*await sink.send_rows("c", batch=2), batch=2)
        assert sink.published() == ["a", "b", "c"]

    _run(body())


# --- brokers that lose state----------------------------------------------------------------------


def test_broker_that_crashes_soon_after_the_first_batch(broker: InProcessBroker) -> None:
    """It has the control records, but had not written the numbers to disk."""

    async def body() -> None:
        sink = Sink(broker)
        await sink.commit(*await sink.send_rows("a"))
        sink.lose_numbers()
        assert not await sink.starts()
        sink.lose_numbers()
        await sink.commit(*await sink.send_rows("b", batch=1), batch=1)
        assert sink.published() == ["a", "b"]

    _run(body())


class _FakeBrokers(ControlTopic):
    """The control topic on brokers that exist only in this test."""

    def __init__(self, hashes: dict[str, int | None], unavailable: set[str]) -> None:
        self.sink_id, self._name, self._topic, self._queue_id = "s", "0", "t", 3
        self.hashes, self._unavailable = hashes, unavailable
        self._session = self  # type: ignore[assignment]
        self.brokers = tuple(hashes)

    async def find_route(self, topic: str) -> "_FakeBrokers":
        return self

    async def _get(self, broker: str, queue_id: int) -> int | None:
        if broker in self._unavailable:
            raise NoRoute(broker)
        return self.hashes[broker]

    async def _set(self, broker: str, queue_id: int, number: int) -> None:
        self.hashes[broker] = number


def test_brokers_that_disagree_on_the_control_broker_are_corrected() -> None:
    """Two tasks chose at the same time, and one did not know both brokers yet."""

    async def body() -> None:
        a, b = _number("home", "a"), _number("home", "b")
        control = _FakeBrokers({"a": a, "b": b}, set())
        control_broker = await control._look_up_broker(1, None)
        assert set(control.hashes.values()) == {min(a, b)}
        for away in "ab":
            assert (
                await _FakeBrokers(control.hashes, {away})._look_up_broker(1, None)
                == control_broker
            )
        with pytest.raises(NoRoute):
            await _FakeBrokers({"a": a, "b": b, "c": None}, {"c"})._look_up_broker(1, None)

    _run(body())


# --- rows and permissions ------------------------------------------------------------------------


def test_control_records_may_exceed_message_bytes_max(broker: InProcessBroker) -> None:
    async def body() -> None:
        sink = Sink(broker, messageBytesMax="50")
        await sink.commit(*await sink.send_rows("a", "b"))
        assert sink.published() == ["a", "b"]

    _run(body())


def test_row_with_too_many_properties_is_named(broker: InProcessBroker) -> None:
    async def body() -> None:
        task = Sink(broker).task(partition=3)
        assert await task.begin()
        with pytest.raises(RowRefused, match="row 5 of partition 3"):
            await task.send([row(4, "good"), row(5, "x", properties={"p": "y" * 40_000})])
        await task.roll_back()

    _run(body())


def test_commit_without_permission_loses_nothing(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        sink = Sink(broker)
        chunks = await sink.send_rows("a")
        address = sink_client.SinkClient._address_of

        async def refuse(self: Any, *args: Any, **named: Any) -> str:
            call = self._session.call

            async def not_allowed(*args: Any, **named: Any) -> Any:
                self._session.call = call
                raise NoPermission("the key was changed")

            self._session.call = not_allowed
            return await address(self, *args, **named)

        with monkeypatch.context() as patch:
            patch.setattr(sink_client.SinkClient, "_address_of", refuse)
            with pytest.raises(NoPermission, match="the key was changed"):
                await sink.commit(*chunks)
        await sink.commit(*chunks)
        assert sink.published() == ["a"]

    _run(body())
