"""Traces of the Python client beside those of a Java client for the same deeds."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from datetime import timedelta
from typing import Any

import pytest

from penstock.client.messages import Message, SendReceipt
from penstock.client.producer.async_producer import AsyncProducer
from penstock.client.trace.trace_writer import (
    ConsumeCode,
    MessageKind,
    TraceRecord,
    decode_traces,
    make_tracer,
)
from penstock.client.transaction.async_transaction_producer import (
    AsyncTransactionProducer,
    Decision,
)

from . import clusters
from .java_session import JavaSession
from .python_reading import eventually, read_topic

pytestmark = [pytest.mark.compat, pytest.mark.slow]

TRACES = "RMQ_SYS_TRACE_TOPIC"
SETTINGS: dict[str, Any] = {}
if clusters.APACHE:
    # It would otherwise ask about what is finished and not yet noted in the op topic.
    SETTINGS = {"recallMessageEnable": True, "transactionOpBatchInterval": 100}
Line = dict[str, Any]


@pytest.fixture(scope="module")
def traced(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[clusters.Cluster]:
    with clusters.running(
        tmp_path_factory.mktemp("traced"),
        brokerName="traced",
        traceTopicEnable=True,
        regionId="far-away",
        transactionTimeOut=1000,
        transactionCheckInterval=1000,
        **SETTINGS,
    ) as cluster:
        yield cluster


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def records_of(
    cluster: clusters.Cluster, message_id: str, kind: str, count: int = 1
) -> tuple[list[TraceRecord], list[str]]:
    """The records of a kind about a message, and the keys of the messages that hold them."""

    async def look() -> tuple[list[TraceRecord], list[str]] | None:
        keys: list[str] = []
        records: list[TraceRecord] = []
        for message in await read_topic(cluster.namesrv, TRACES):
            found = [
                record
                for record in decode_traces(message.body)
                if record.type == kind and record.message_id == message_id
            ]
            if found:
                keys += message.keys
                records += found
        return (records, keys) if len(records) >= count else None

    found = await eventually(look)
    assert found is not None
    return found


def java_send(
    client: JavaSession, topic: str, *bodies: str, how: str = "sync", **more: Any
) -> list[Line]:
    messages = [
        {"topic": topic, "body": body, "keys": ["key-1", body], "tags": "red", **more}
        for body in bodies
    ]
    lines: list[Line] = client.do("trace.send", producer=topic, messages=messages, how=how)
    return lines


SAME = ("type", "region", "group", "topic", "tags", "keys", "store_host", "body_bytes", "kind",
        "success", "state", "from_check")  # fmt: skip


def same_fields(ours: TraceRecord, theirs: TraceRecord) -> None:
    for name in SAME:
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("time_ms", "cost_ms", "offset_id", "transaction_id"):
        assert (getattr(ours, name) is None) == (getattr(theirs, name) is None), name


def test_sends_leave_the_same_trace_as_javas(
    traced: clusters.Cluster, java54: JavaSession, fresh: str
) -> None:
    async def work() -> None:
        java54.do("trace.producer", producer=fresh, namesrv=traced.namesrv)
        [plain] = java_send(java54, fresh, "hello")
        [later] = java_send(java54, fresh, "later", delay_level=1)
        java54.do("trace.stop", producer=fresh)
        async with AsyncProducer(traced.namesrv, group=fresh, trace=True) as producer:
            ours_plain = await producer.send(
                Message(fresh, b"hello", tags="red", keys=["key-1", "hello"])
            )
            ours_later = await producer.send(
                Message(fresh, b"later", tags="red", keys=["key-1", "later"], delay_level=1)
            )
            batch = await producer.send_batch([Message(fresh, body) for body in ("a", "b")])
        for receipt, line in ((ours_plain, plain), (ours_later, later)):
            [ours], keys = await records_of(traced, receipt.message_id, "Pub")
            [theirs], their_keys = await records_of(traced, line["msg_id"], "Pub")
            same_fields(ours, theirs)
            assert ours.offset_id == receipt.offset_id
            assert set(keys) >= {receipt.message_id, "key-1"}
            assert set(their_keys) >= {line["msg_id"], "key-1"}
        for receipt in batch:
            [ours], keys = await records_of(traced, receipt.message_id, "Pub")
            assert (ours.body_bytes, ours.offset_id) == (1, receipt.offset_id)
            assert receipt.message_id in keys
        assert {m.topic for m in await read_topic(traced.namesrv, TRACES)} == {TRACES}
        traced_topics = {
            record.topic
            for message in await read_topic(traced.namesrv, TRACES)
            for record in decode_traces(message.body)
        }
        assert TRACES not in traced_topics

    run(work())


def test_ends_of_transactions_leave_the_same_trace_as_javas(
    traced: clusters.Cluster, java54: JavaSession, fresh: str
) -> None:
    async def work() -> None:
        java54.do("trace.producer", producer=fresh, namesrv=traced.namesrv)
        java_lines = java_send(java54, fresh, "commit", "rollback", how="transaction")
        java54.do("trace.stop", producer=fresh)
        handles = {}
        async with AsyncTransactionProducer(
            traced.namesrv, group=fresh, trace=True, check=lambda message: True
        ) as producer:
            for body, decision in (("commit", Decision.COMMIT), ("rollback", Decision.ROLLBACK)):
                message = Message(fresh, body, tags="red", keys=["key-1", body])
                async with producer.transaction(message) as transaction:
                    transaction.decision = decision
                handles[body] = transaction.handle
            checked = await producer.prepare(Message(fresh, b"checked", tags="red"))
            handles["checked"] = checked

            async def committed() -> bool:
                found = await read_topic(traced.namesrv, fresh)
                return any(one.body == b"checked" for one in found)

            assert await eventually(committed)
        for body, line in zip(("commit", "rollback"), java_lines, strict=True):
            for kind in ("Pub", "EndTransaction"):
                [ours], keys = await records_of(traced, handles[body].message_id, kind)
                [theirs], _ = await records_of(traced, line["msg_id"], kind)
                same_fields(ours, theirs)
                assert {handles[body].message_id, "key-1", body} <= set(keys)
            assert (ours.transaction_id == ours.message_id) is (
                theirs.transaction_id == theirs.message_id
            )
        [end], _ = await records_of(traced, checked.message_id, "EndTransaction")
        assert (end.state, end.from_check, end.tags) == ("COMMIT_MESSAGE", True, "red")
        assert (end.region, end.kind) == ("far-away", MessageKind.COMMIT)

    run(work())


def test_consuming_leaves_the_same_trace_as_javas(
    traced: clusters.Cluster, java54: JavaSession, fresh: str
) -> None:
    async def work() -> None:
        async with AsyncProducer(traced.namesrv, group=fresh, trace=True) as producer:
            receipt = await producer.send(Message(fresh, b"hello", keys=["key-1"]))
            group = f"{fresh}-c"
            java54.do(
                "trace.consumer", consumer=fresh, group=group, namesrv=traced.namesrv, topic=fresh
            )
            assert java54.do("trace.consumed", consumer=fresh, count=1)
            java54.do("trace.stop", consumer=fresh)
            [before], _ = await records_of(traced, receipt.message_id, "SubBefore")
            [after], _ = await records_of(traced, receipt.message_id, "SubAfter")
            tracer = make_tracer(producer._session, group, producer._send_trace)
            assert tracer is not None
            token = tracer.consuming(await read_topic(traced.namesrv, fresh))
            tracer.consumed(token, ConsumeCode.SUCCESS)
            await tracer.close()
        both, keys = await records_of(traced, receipt.message_id, "SubBefore", 2)
        assert "key-1" in keys
        [ours] = [record for record in both if record.request_id != before.request_id]
        for name in (*SAME, "retry_times", "code"):
            assert getattr(ours, name) == getattr(before, name), name
        afters, _ = await records_of(traced, receipt.message_id, "SubAfter", 2)
        [end] = [record for record in afters if record.request_id == ours.request_id]
        for name in (*SAME, "code"):
            assert getattr(end, name) == getattr(after, name), name

    run(work())


def test_a_recall_is_traced(traced: clusters.Cluster, fresh: str) -> None:
    async def work() -> SendReceipt:
        async with AsyncProducer(traced.namesrv, group=fresh, trace=True) as producer:
            receipt = await producer.send(Message(fresh, b"never", delay=timedelta(hours=1)))
            assert receipt.recall_handle is not None
            assert await producer.recall(fresh, receipt.recall_handle) == receipt.message_id
        [pub], _ = await records_of(traced, receipt.message_id, "Pub")
        assert pub.kind is MessageKind.DELAY
        [recall], keys = await records_of(traced, receipt.message_id, "Recall")
        assert (recall.topic, recall.group, recall.success) == (fresh, fresh, True)
        assert receipt.message_id in keys
        return receipt

    asyncio.run(work())
