"""The transactional sink in particular cases; tests/sim/test_sink_protocol.py has the crashes."""

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest

from penstock.client.transaction.async_transaction_producer import AsyncTransactionProducer
from penstock.errors import (
    BadSetting,
    BatchNotDecided,
    DecisionLost,
    NotTransactional,
    RowRefused,
    RowsExpired,
    SinkTaken,
)
from penstock.spark.sink import batch_status, sink_client, transactional
from penstock.spark.sink import control_topic as control_module
from penstock.spark.sink.commit_messages import decode
from penstock.testing import InProcessBroker
from tests.unit.spark.sink.sink_kit import Sink, row

PARKED = "TRANS_CHECK_MAX_TIME_TOPIC"


@pytest.fixture
def broker() -> Iterator[InProcessBroker]:
    with InProcessBroker({"store.retain_hours": 72}) as broker:
        broker.create_topic("orders", queues=2)
        yield broker


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_rows_are_seen_when_they_are_committed(broker: InProcessBroker) -> None:
    async def body() -> None:
        sink = Sink(broker)
        handles = await sink.halves("a", "b")
        assert sink.seen() == []
        await sink.commit(*handles)
        assert sink.seen() == ["a", "b"]
        assert not await sink.begins()
        await sink.commit(decided=True)
        await sink.abort(*handles)
        assert sink.seen() == ["a", "b"]
        properties = dict(broker.messages("orders")[0].properties)
        assert properties["PENSTOCK_SINK"] == "s"
        assert properties["PENSTOCK_BATCH"] == properties["PENSTOCK_PARTITION"] == "0"

    _run(body())


def test_a_failed_task_and_an_aborted_batch_leave_nothing(broker: InProcessBroker) -> None:
    async def body() -> None:
        sink = Sink(broker)
        task = sink.task()
        assert await task.begin()
        await task.send([row(0, "lost")])
        await task.roll_back()
        handles = await sink.halves("lost too")
        await sink.abort(*handles)
        with pytest.raises(BatchNotDecided, match="batch 0 of the sink 's' was aborted"):
            await sink.commit(*handles)
        await sink.commit(*await sink.halves("a"))
        assert sink.seen() == ["a"]

    _run(body())


def test_the_first_of_two_drivers_decides(broker: InProcessBroker) -> None:
    async def body() -> None:
        sink = Sink(broker)
        one, two = await sink.halves("a"), await sink.halves("a")
        await sink.commit(*two)
        await sink.commit(*one)
        assert sink.seen() == ["a"]
        late = await sink.halves("b", batch=1)
        await sink.commit(*await sink.halves("b", batch=1), batch=1)
        await sink.commit(*await sink.halves("c", batch=2), batch=2)
        with pytest.raises(SinkTaken, match="batch 1 of the sink 's' comes after its batch 2"):
            await sink.commit(*late, batch=1)
        assert sink.seen() == ["a", "b", "c"]

    _run(body())


def test_a_decision_larger_than_a_message(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "INLINE_BYTES_MAX", 10)
    monkeypatch.setattr(batch_status, "PART_BYTES_MAX", 300)
    monkeypatch.setattr(transactional, "ROWS_MAX", 3)

    async def body() -> None:
        sink = Sink(broker)
        handles = await sink.halves(*map(str, range(10)))
        assert len(handles) == 4
        await sink.commit(*handles)
        assert sink.seen() == sorted(map(str, range(10)))
        notes = [str(note.tags).split("-")[0] for note in broker.messages(control_module.TOPIC)]
        assert notes.count("part") >= 2
        assert notes[-2:] == ["decided", "done"]

    _run(body())


def test_parts_without_their_decision_are_none(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "INLINE_BYTES_MAX", 10)

    async def body() -> None:
        sink = Sink(broker)
        handles = await sink.halves("a")
        append = control_module.Control._append

        async def torn(self: Any, kind: Any, note: Any, inline: bytes = b"") -> int:
            if kind is batch_status.Kind.DECIDED:
                raise OSError("the driver dies here")
            return await append(self, kind, note, inline)

        with monkeypatch.context() as patch:
            patch.setattr(control_module.Control, "_append", torn)
            with pytest.raises(OSError, match="dies"):
                await sink.commit(*handles)
        assert await sink.begins()
        assert sink.seen() == []
        await sink.commit(*await sink.halves("a"))
        assert sink.seen() == ["a"]

    _run(body())


def test_a_decision_is_finished_after_days(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker's memory of the sink outlives the notes; what has expired is said."""

    async def body() -> None:
        sink = Sink(broker)
        handles = await sink.halves("a", "b", "c")
        with monkeypatch.context() as patch:
            _die_after_commits(patch, 1)
            with pytest.raises(OSError, match="dies"):
                await sink.commit(*handles)
        assert sink.seen() == ["a"]
        await broker.restart()
        await broker.clock.advance(hours=30)
        await broker.clock.advance(minutes=1)  # its registrations may have been too slow for it
        assert not await sink.begins()
        for _ in range(2):
            with pytest.raises(RowsExpired) as caught:
                await sink.commit(decided=True)
            text = str(caught.value)
            assert "2 of 3 rows of batch 0 of the sink 's'" in text
            assert "transactionTimeout 86400 s" in text
        assert sink.seen() == ["a"]

    _run(body())


def test_a_decision_that_retention_has_taken(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        sink = Sink(broker)
        handles = await sink.halves("a", "b")
        with monkeypatch.context() as patch:
            _die_after_commits(patch, 1)
            with pytest.raises(OSError, match="dies"):
                await sink.commit(*handles)
        monkeypatch.setattr(control_module, "fold", lambda notes: batch_status.fold([]))
        await sink.abort(*handles)
        for work in (sink.begins(), sink.commit(*handles)):
            with pytest.raises(DecisionLost, match="retention has removed how"):
                await work

    _run(body())


def _die_after_commits(patch: pytest.MonkeyPatch, count: int) -> None:
    end = sink_client.SinkClient._end
    patch.setattr(sink_client, "ENDS_AT_ONCE", 1)
    done = 0

    async def dying(self: Any, *args: Any) -> str:
        nonlocal done
        if done == count:
            raise OSError("the driver dies here")
        done += 1
        return await end(self, *args)

    patch.setattr(sink_client.SinkClient, "_end", dying)


def test_a_done_batch_stays_done_when_its_notes_are_gone(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        sink = Sink(broker)
        await sink.commit(*await sink.halves("a"))
        await broker.restart()
        monkeypatch.setattr(control_module, "fold", lambda notes: batch_status.fold([]))
        assert not await sink.begins()
        await sink.commit(decided=True)
        assert sink.seen() == ["a"]

    _run(body())


def test_a_task_that_found_a_decision_is_believed(broker: InProcessBroker) -> None:
    async def body() -> None:
        with pytest.raises(DecisionLost, match="a task found batch 0 of the sink 's' decided"):
            await Sink(broker).commit(decided=True)

    _run(body())


def test_another_query_can_not_have_the_sink(broker: InProcessBroker) -> None:
    async def body() -> None:
        sink = Sink(broker)
        assert await sink.begins(query="died before it decided anything")
        await sink.commit(*await sink.halves("a"))
        with pytest.raises(SinkTaken, match=r"batches of another query \(up to batch 0\)"):
            await sink.task(batch=1, query="other").begin()

    _run(body())


def test_a_new_sink_in_the_midst_of_a_stream(broker: InProcessBroker) -> None:
    async def body() -> None:
        with pytest.raises(
            DecisionLost, match=r"no broker knows the sink 's', .* batch 7"
        ) as caught:
            await Sink(broker).task(7).begin()
        assert "controlBroker" in caught.value.hint
        with pytest.raises(BadSetting, match=r"'nowhere' \(controlBroker\) has no topic"):
            await Sink(broker, controlBroker="nowhere").task(7).begin()
        sink = Sink(broker, controlBroker="broker-a")
        await sink.commit(*await sink.halves("a", batch=7), batch=7)
        plain = Sink(broker)
        await plain.commit(*await plain.halves("b", batch=8), batch=8)
        with pytest.raises(BadSetting, match="lie on broker-a, not on nowhere"):
            await Sink(broker, controlBroker="nowhere").task(9).begin()
        assert sink.seen() == ["a", "b"]

    _run(body())


def test_a_batch_that_took_too_long_is_not_decided(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        sink = Sink(broker, transactionTimeout="1h")
        handles = await sink.halves("a")
        late = sink_client.SinkClient.now_ms
        with monkeypatch.context() as patch:
            patch.setattr(sink_client.SinkClient, "now_ms", lambda self: late(self) + 55 * 60_000)
            with pytest.raises(BatchNotDecided, match="transactionTimeout"):
                await sink.commit(*handles)
        await sink.abort(*handles)
        await sink.commit(*await sink.halves("a"))
        assert sink.seen() == ["a"]

    _run(body())


def test_expired_halves_are_rolled_back_when_a_sink_is_there(broker: InProcessBroker) -> None:
    async def body() -> None:
        sink = Sink(broker, transactionTimeout="1h")
        await sink.halves("forgotten")
        other = Sink(broker, sinkId="other").task()
        assert await other.begin()
        await broker.clock.advance(hours=2)
        assert sink.seen() == []
        assert broker.messages(PARKED) == []
        await other.finish()

    _run(body())


def test_rows_that_can_not_be_halves(broker: InProcessBroker) -> None:
    async def body() -> None:
        sink = Sink(broker)
        task = sink.task(partition=3)
        assert await task.begin()
        for bad in (row(5, "x", delay_level=1), row(5, "")):
            with pytest.raises(RowRefused, match="row 5 of partition 3"):
                await task.send([row(4, "good"), bad])
        await task.roll_back()
        assert sink.seen() == []

    _run(body())


def test_brokers_of_apache_are_refused(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        sink = Sink(broker)
        task = sink.task()
        assert await task.begin()
        monkeypatch.setattr(sink_client, "PENSTOCK", "what Apache's brokers do not have")
        with pytest.raises(NotTransactional, match="broker-a is not one"):
            await task.send([row(0, "a")])
        await task.roll_back()
        assert broker.messages("RMQ_SYS_TRANS_HALF_TOPIC") == []
        await broker.restart()

    _run(body())


def test_a_broker_without_an_index_can_not_be_believed() -> None:
    """What has ended before its last start may be rolled back as well as committed."""
    with InProcessBroker({"store.index_enabled": False}) as broker:
        broker.create_topic("orders", queues=1)

        async def body() -> None:
            sink = Sink(broker)
            handles = await sink.halves("a")
            async with AsyncTransactionProducer(broker.address, group="g"):
                await sink.abort(*handles)
            await broker.restart()
            client = sink_client.SinkClient(sink.options, transactional.judge)
            async with client:
                lost = await client.commit_halves(decode(handles[0]))
            assert lost.rows == 1

        _run(body())
