"""Single cases of the transactional sink; tests/sim/test_sink_protocol.py tests crashes."""

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

CHECK_MAX_TIME_TOPIC = "TRANS_CHECK_MAX_TIME_TOPIC"


@pytest.fixture
def broker() -> Iterator[InProcessBroker]:
    with InProcessBroker({"store.retain_hours": 72}) as broker:
        broker.create_topic("orders", queues=2)
        yield broker


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_rows_are_visible_after_the_commit(broker: InProcessBroker) -> None:
    async def body() -> None:
        sink = Sink(broker)
        chunks = await sink.send_rows("a", "b")
        assert sink.published() == []
        await sink.commit(*chunks)
        assert sink.published() == ["a", "b"]
        assert not await sink.starts()
        await sink.commit(decided=True)
        await sink.abort(*chunks)
        assert sink.published() == ["a", "b"]
        properties = dict(broker.messages("orders")[0].properties)
        assert properties["PENSTOCK_SINK"] == "s"
        assert properties["PENSTOCK_BATCH"] == properties["PENSTOCK_PARTITION"] == "0"

    _run(body())


def test_failed_task_and_aborted_batch_publish_nothing(broker: InProcessBroker) -> None:
    async def body() -> None:
        sink = Sink(broker)
        task = sink.task()
        assert await task.begin()
        await task.send([row(0, "lost")])
        await task.roll_back()
        chunks = await sink.send_rows("lost too")
        await sink.abort(*chunks)
        with pytest.raises(BatchNotDecided, match="batch 0 of the sink 's' was aborted"):
            await sink.commit(*chunks)
        await sink.commit(*await sink.send_rows("a"))
        assert sink.published() == ["a"]

    _run(body())


def test_first_of_two_drivers_decides(broker: InProcessBroker) -> None:
    async def body() -> None:
        sink = Sink(broker)
        one, two = await sink.send_rows("a"), await sink.send_rows("a")
        await sink.commit(*two)
        await sink.commit(*one)
        assert sink.published() == ["a"]
        late = await sink.send_rows("b", batch=1)
        await sink.commit(*await sink.send_rows("b", batch=1), batch=1)
        await sink.commit(*await sink.send_rows("c", batch=2), batch=2)
        with pytest.raises(SinkTaken, match="batch 1 of the sink 's' comes after its batch 2"):
            await sink.commit(*late, batch=1)
        assert sink.published() == ["a", "b", "c"]

    _run(body())


def test_decision_larger_than_a_message_is_split(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "INLINE_BYTES_MAX", 10)
    monkeypatch.setattr(batch_status, "PART_BYTES_MAX", 300)
    monkeypatch.setattr(transactional, "CHUNK_ROWS_MAX", 3)

    async def body() -> None:
        sink = Sink(broker)
        chunks = await sink.send_rows(*map(str, range(10)))
        assert len(chunks) == 4
        await sink.commit(*chunks)
        assert sink.published() == sorted(map(str, range(10)))
        kinds = [str(record.tags).split("-")[0] for record in broker.messages(control_module.TOPIC)]
        assert kinds.count("part") >= 2
        assert kinds[-2:] == ["decided", "done"]

    _run(body())


def test_parts_without_a_decision_are_ignored(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_module, "INLINE_BYTES_MAX", 10)

    async def body() -> None:
        sink = Sink(broker)
        chunks = await sink.send_rows("a")
        append = control_module.ControlTopic._append

        async def torn(self: Any, kind: Any, body: Any, inline: bytes = b"") -> int:
            if kind is batch_status.ControlRecordKind.DECIDED:
                raise OSError("the driver dies here")
            return await append(self, kind, body, inline)

        with monkeypatch.context() as patch:
            patch.setattr(control_module.ControlTopic, "_append", torn)
            with pytest.raises(OSError, match="dies"):
                await sink.commit(*chunks)
        assert await sink.starts()
        assert sink.published() == []
        await sink.commit(*await sink.send_rows("a"))
        assert sink.published() == ["a"]

    _run(body())


def test_decision_is_finished_after_days(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stored numbers outlive the control records; expired rows are reported."""

    async def body() -> None:
        sink = Sink(broker)
        chunks = await sink.send_rows("a", "b", "c")
        with monkeypatch.context() as patch:
            _die_after_commits(patch, 1)
            with pytest.raises(OSError, match="dies"):
                await sink.commit(*chunks)
        assert sink.published() == ["a"]
        await broker.restart()
        await broker.clock.advance(hours=30)
        await broker.clock.advance(minutes=1)  # its registrations may have been too slow for it
        assert not await sink.starts()
        for _ in range(2):
            with pytest.raises(RowsExpired) as caught:
                await sink.commit(decided=True)
            text = str(caught.value)
            assert "2 of 3 rows of batch 0 of the sink 's'" in text
            assert "transactionTimeout 86400 s" in text
        assert sink.published() == ["a"]

    _run(body())


def test_decision_deleted_by_retention_is_an_error(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        sink = Sink(broker)
        chunks = await sink.send_rows("a", "b")
        with monkeypatch.context() as patch:
            _die_after_commits(patch, 1)
            with pytest.raises(OSError, match="dies"):
                await sink.commit(*chunks)
        monkeypatch.setattr(control_module, "status_of", lambda records: batch_status.status_of([]))
        await sink.abort(*chunks)
        for work in (sink.starts(), sink.commit(*chunks)):
            with pytest.raises(DecisionLost, match="retention has deleted the decision"):
                await work

    _run(body())


def _die_after_commits(patch: pytest.MonkeyPatch, count: int) -> None:
    end = sink_client.SinkClient._end
    patch.setattr(sink_client, "END_WINDOW", 1)
    done = 0

    async def dying(self: Any, *args: Any) -> str:
        nonlocal done
        if done == count:
            raise OSError("the driver dies here")
        done += 1
        return await end(self, *args)

    patch.setattr(sink_client.SinkClient, "_end", dying)


def test_done_batch_stays_done_without_its_control_records(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        sink = Sink(broker)
        await sink.commit(*await sink.send_rows("a"))
        await broker.restart()
        monkeypatch.setattr(control_module, "status_of", lambda records: batch_status.status_of([]))
        assert not await sink.starts()
        await sink.commit(decided=True)
        assert sink.published() == ["a"]

    _run(body())


def test_decision_seen_by_a_task_must_exist_at_the_commit(broker: InProcessBroker) -> None:
    async def body() -> None:
        with pytest.raises(DecisionLost, match="a task found batch 0 of the sink 's' decided"):
            await Sink(broker).commit(decided=True)

    _run(body())


def test_sink_of_another_query_is_refused(broker: InProcessBroker) -> None:
    async def body() -> None:
        sink = Sink(broker)
        assert await sink.starts(query="died before it decided anything")
        await sink.commit(*await sink.send_rows("a"))
        with pytest.raises(SinkTaken, match=r"batches of another query \(up to batch 0\)"):
            await sink.task(batch=1, query="other").begin()

    _run(body())


def test_new_sink_after_batch_0_needs_a_control_broker(broker: InProcessBroker) -> None:
    async def body() -> None:
        with pytest.raises(
            DecisionLost, match=r"no broker knows the sink 's', .* batch 7"
        ) as caught:
            await Sink(broker).task(7).begin()
        assert "controlBroker" in caught.value.hint
        with pytest.raises(BadSetting, match=r"'nowhere' \(controlBroker\) has no topic"):
            await Sink(broker, controlBroker="nowhere").task(7).begin()
        sink = Sink(broker, controlBroker="broker-a")
        await sink.commit(*await sink.send_rows("a", batch=7), batch=7)
        plain = Sink(broker)
        await plain.commit(*await plain.send_rows("b", batch=8), batch=8)
        with pytest.raises(BadSetting, match="are on broker-a, not on nowhere"):
            await Sink(broker, controlBroker="nowhere").task(9).begin()
        assert sink.published() == ["a", "b"]

    _run(body())


def test_batch_that_took_too_long_is_not_decided(
    broker: InProcessBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        sink = Sink(broker, transactionTimeout="1h")
        chunks = await sink.send_rows("a")
        late = sink_client.SinkClient.now_ms
        with monkeypatch.context() as patch:
            patch.setattr(sink_client.SinkClient, "now_ms", lambda self: late(self) + 55 * 60_000)
            with pytest.raises(BatchNotDecided, match="transactionTimeout"):
                await sink.commit(*chunks)
        await sink.abort(*chunks)
        await sink.commit(*await sink.send_rows("a"))
        assert sink.published() == ["a"]

    _run(body())


def test_expired_half_messages_are_rolled_back_by_any_running_sink(broker: InProcessBroker) -> None:
    async def body() -> None:
        sink = Sink(broker, transactionTimeout="1h")
        await sink.send_rows("forgotten")
        other = Sink(broker, sinkId="other").task()
        assert await other.begin()
        await broker.clock.advance(hours=2)
        assert sink.published() == []
        assert broker.messages(CHECK_MAX_TIME_TOPIC) == []
        await other.finish()

    _run(body())


def test_delayed_and_empty_rows_are_refused(broker: InProcessBroker) -> None:
    async def body() -> None:
        sink = Sink(broker)
        task = sink.task(partition=3)
        assert await task.begin()
        for bad in (row(5, "x", delay_level=1), row(5, "")):
            with pytest.raises(RowRefused, match="row 5 of partition 3"):
                await task.send([row(4, "good"), bad])
        await task.roll_back()
        assert sink.published() == []

    _run(body())


def test_apache_brokers_are_refused(
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


def test_broker_without_an_index_reports_ended_messages_as_lost() -> None:
    """A transaction that ended before its last start may be rolled back or committed."""
    with InProcessBroker({"store.index_enabled": False}) as broker:
        broker.create_topic("orders", queues=1)

        async def body() -> None:
            sink = Sink(broker)
            chunks = await sink.send_rows("a")
            async with AsyncTransactionProducer(broker.address, group="g"):
                await sink.abort(*chunks)
            await broker.restart()
            client = sink_client.SinkClient(sink.options, transactional.transaction_check)
            async with client:
                lost = await client.commit_half_messages(decode(chunks[0]))
            assert lost.rows == 1

        _run(body())
