"""The transactional sink where several things go wrong together."""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from penstock.errors import NoPermission, NoRoute, RowRefused, SinkTaken
from penstock.spark.sink import sink_client
from penstock.spark.sink.batch_status import HERE, Body, Kind, Note, Part, Standing, fold
from penstock.spark.sink.control_topic import _STATE, Control, _number
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


# --- two queries with one sinkId -----------------------------------------------------------------


def test_a_decision_of_another_query_is_not_taken_for_ones_own(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver dies between the decision and its number; somebody deletes the checkpoint."""

    async def body() -> None:
        sink = Sink(broker)
        handles = await sink.halves("a")
        with monkeypatch.context() as patch:
            _die_in(patch, Control, "note_decided")
            with pytest.raises(OSError, match="dies"):
                await sink.commit(*handles)
        with pytest.raises(SinkTaken, match="batches of another query"):
            await sink.task(query="other").begin()
        await sink.commit(*handles)
        assert sink.seen() == ["a"]

    _run(body())


@pytest.mark.parametrize("done", [False, True])
def test_two_queries_that_begin_together(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    async def body() -> None:
        sink = Sink(broker)
        one, two = await sink.halves("a", query="q"), await sink.halves("b", query="r")
        with monkeypatch.context() as patch:
            if not done:
                _die_in(patch, Control, "note_decided")
            try:
                await sink.commit(*one, query="q")
            except OSError:
                assert not done
        with pytest.raises(SinkTaken, match="batches of another query"):
            await sink.commit(*two, query="r")
        await sink.commit(*one, query="q")
        assert sink.seen() == ["a"]

    _run(body())


# --- drivers that are late -----------------------------------------------------------------------


def test_a_number_that_goes_back_does_not_let_a_batch_be_sent_again(
    broker: InProcessBroker,
) -> None:
    """A driver that is thought dead sets `state`, having read it long before."""

    async def body() -> None:
        sink = Sink(broker)
        await sink.commit(*await sink.halves("a"))
        await sink.commit(*await sink.halves("b", batch=1), batch=1)
        sink.set_number(_STATE, 1)
        assert not await sink.begins(batch=1)
        await sink.commit(batch=1, decided=True)
        sink.set_number(_STATE, 1)
        with pytest.raises(SinkTaken, match="comes after its batch 1"):
            await sink.begins(batch=0)
        assert sink.seen() == ["a", "b"]

    _run(body())


def _note(kind: Kind, name: str, offset: int) -> Note:
    body = Body("s", 0, id=name, parts=[Part(HERE, [(name, 1)])])
    return Note(kind, offset, body, b"")


def test_what_is_done_needs_no_decision() -> None:
    """The decision lies before the position that was read, a second one after it."""
    one, two = _note(Kind.DECIDED, "one", 4), _note(Kind.DECIDED, "two", 5)
    done = _note(Kind.DONE, "one", 6)
    assert fold([one, two, done]) == Standing(True, one)
    assert fold([two, done]) == Standing(True, None)
    assert fold([done, two]) == Standing(True, None)
    assert fold([two]) == Standing(False, two)


# --- batches that are left half done -------------------------------------------------------------


@pytest.mark.parametrize("step", ["note_decided", "_end"])
def test_a_decided_batch_is_finished_before_the_next_one(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Whoever counts batches by himself may go on after an error."""

    async def body() -> None:
        sink = Sink(broker)
        handles = await sink.halves("a", "b")
        with monkeypatch.context() as patch:
            patch.setattr(sink_client, "ENDS_AT_ONCE", 1)
            _die_in(patch, Control if step == "note_decided" else sink_client.SinkClient, step)
            with pytest.raises(OSError, match="dies"):
                await sink.commit(*handles)
        await sink.commit(*await sink.halves("c", batch=1), batch=1)
        assert sink.seen() == ["a", "b", "c"]
        await sink.commit(*await sink.halves("d", batch=2), batch=2)
        assert sink.seen() == ["a", "b", "c", "d"]

    _run(body())


def test_a_late_decision_of_a_done_batch_is_not_finished(broker: InProcessBroker) -> None:
    async def body() -> None:
        sink = Sink(broker)
        late = await sink.halves("a")
        await sink.commit(*await sink.halves("a"))
        await sink.commit(*await sink.halves("b", batch=1), batch=1)
        async with sink_client.SinkClient(sink.options, lambda client: lambda message: None) as it:
            control = it.control("s", "q")
            await control.locate(1)
            await control.write_decision(0, late)
        sink.set_number(_STATE, 1)
        await sink.commit(*await sink.halves("c", batch=2), batch=2)
        assert sink.seen() == ["a", "b", "c"]

    _run(body())


# --- brokers that forget -------------------------------------------------------------------------


def test_a_broker_that_dies_soon_after_the_first_batch(broker: InProcessBroker) -> None:
    """It has the notes, and had not written the numbers to its disk yet."""

    async def body() -> None:
        sink = Sink(broker)
        await sink.commit(*await sink.halves("a"))
        sink.forget_numbers()
        assert not await sink.begins()
        sink.forget_numbers()
        await sink.commit(*await sink.halves("b", batch=1), batch=1)
        assert sink.seen() == ["a", "b"]

    _run(body())


class _Homes(Control):
    """A sink on brokers that exist only here."""

    def __init__(self, homes: dict[str, int | None], away: set[str]) -> None:
        self.sink_id, self._name, self._topic, self._queue_id = "s", "0", "t", 3
        self.homes, self._away = homes, away
        self._session = self  # type: ignore[assignment]
        self.brokers = tuple(homes)

    async def find_route(self, topic: str) -> "_Homes":
        return self

    async def _get(self, broker: str, queue_id: int) -> int | None:
        if broker in self._away:
            raise NoRoute(broker)
        return self.homes[broker]

    async def _set(self, broker: str, queue_id: int, number: int) -> None:
        self.homes[broker] = number


def test_brokers_that_name_two_homes_are_made_to_agree() -> None:
    """Two tasks chose at the same time, and one of them did not know of both brokers yet."""

    async def body() -> None:
        a, b = _number("home", "a"), _number("home", "b")
        control = _Homes({"a": a, "b": b}, set())
        home = await control._find_home(1, None)
        assert set(control.homes.values()) == {min(a, b)}
        for away in "ab":
            assert await _Homes(control.homes, {away})._find_home(1, None) == home
        with pytest.raises(NoRoute):
            await _Homes({"a": a, "b": b, "c": None}, {"c"})._find_home(1, None)

    _run(body())


# --- rows and rights -----------------------------------------------------------------------------


def test_notes_may_be_longer_than_rows(broker: InProcessBroker) -> None:
    async def body() -> None:
        sink = Sink(broker, messageBytesMax="50")
        await sink.commit(*await sink.halves("a", "b"))
        assert sink.seen() == ["a", "b"]

    _run(body())


def test_a_row_with_too_many_properties_is_named(broker: InProcessBroker) -> None:
    async def body() -> None:
        task = Sink(broker).task(partition=3)
        assert await task.begin()
        with pytest.raises(RowRefused, match="row 5 of partition 3"):
            await task.send([row(4, "good"), row(5, "x", properties={"p": "y" * 40_000})])
        await task.roll_back()

    _run(body())


def test_a_commit_that_is_not_allowed_is_no_loss(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        sink = Sink(broker)
        handles = await sink.halves("a")
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
                await sink.commit(*handles)
        await sink.commit(*handles)
        assert sink.seen() == ["a"]

    _run(body())
