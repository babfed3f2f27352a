"""Traces: the records of each event, their sending and their decoding."""

import asyncio
from collections.abc import Awaitable, Coroutine
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.client.client_options import ClientOptions
from penstock.client.client_session import Session
from penstock.client.messages import Message, MessageQueue, SendReceipt, SendStatus
from penstock.client.received_message import ReceivedMessage
from penstock.client.trace.trace_writer import (
    FLUSH_AT,
    WAITING_MAX,
    ConsumeCode,
    MessageKind,
    Tracer,
    TraceRecord,
    decode_traces,
    make_tracer,
)
from penstock.errors import PeerTimeout
from penstock.testing.virtual_clock import VirtualClock

TOPIC = "RMQ_SYS_TRACE_TOPIC"
ID = "7F0000010539659C1B2D6D5B2F0A0000"


class Traces:
    """Records sent trace messages."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.fails = False
        self.release: asyncio.Event | None = None

    async def __call__(self, message: Message) -> None:
        if self.release is not None:
            await self.release.wait()
        if self.fails:
            raise PeerTimeout("no answer")
        self.sent.append(message)

    @property
    def lines(self) -> list[list[str]]:
        return [
            line.split("\x01")
            for message in self.sent
            for line in message.content.decode().split("\x02")
            if line
        ]


def _made() -> tuple[Tracer, Traces, VirtualClock]:
    clock, traces = VirtualClock(), Traces()

    def spawn(work: Awaitable[object]) -> asyncio.Future[object]:
        return asyncio.ensure_future(work)

    session = SimpleNamespace(
        options=ClientOptions(trace=TOPIC), clock=clock, client_id="10.0.0.1@1", spawn=spawn
    )
    tracer = make_tracer(cast(Session, session), "g", traces)
    assert tracer is not None
    return tracer, traces, clock


def _receipt(status: SendStatus = SendStatus.SEND_OK, message_id: str = ID) -> SendReceipt:
    return SendReceipt(status, message_id, "OFFSETID", MessageQueue("T", "a", 0), 7)


def _received(**more: object) -> ReceivedMessage:
    properties = {"MSG_REGION": "R", "TRACE_ON": "true"}
    values = {
        "topic": "T", "message_id": ID, "keys": ["k1", "k2"], "reconsume_times": 2,
        "properties": properties, **more,
    }  # fmt: skip
    return cast(ReceivedMessage, SimpleNamespace(**values))


def _run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_no_tracer_without_the_trace_option() -> None:
    session = SimpleNamespace(options=ClientOptions())
    assert make_tracer(cast(Session, session), "g", Traces()) is None


def test_send_writes_a_record_with_all_fields() -> None:
    async def run() -> None:
        tracer, traces, clock = _made()
        born_ms = clock.now_ms()
        clock.advance(12)
        message = Message("T", b"12345", tags="red", keys=["k1", "k2"])
        tracer.sent(message, _receipt(), address="10.0.0.9:10911", born_ms=born_ms)
        await tracer.flush()
        assert traces.lines == [
            ["Pub", str(born_ms), "DefaultRegion", "g", "T", ID, "red", "k1 k2",
             "10.0.0.9:10911", "5", "12", "0", "OFFSETID", "true"]
        ]  # fmt: skip
        assert traces.sent[0].topic == TOPIC
        assert traces.sent[0].keys == [ID, "k1", "k2"]

    _run(run())


def test_missing_fields_are_null_and_only_send_ok_is_success() -> None:
    async def run() -> None:
        tracer, traces, clock = _made()
        receipt = _receipt(SendStatus.FLUSH_DISK_TIMEOUT)
        tracer.sent(Message("T", b""), receipt, address="x", born_ms=clock.now_ms())
        await tracer.flush()
        line = traces.lines[0]
        assert (line[6], line[7], line[13]) == ("null", "null", "false")

    _run(run())


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (Message("T"), "0"),
        (Message("T", properties={"TRAN_MSG": "true"}), "1"),
        (Message("T", delay_level=3), "3"),
        (Message("T", delay=timedelta(seconds=1)), "3"),
    ],
)
def test_kinds_of_messages(message: Message, kind: str) -> None:
    async def run() -> None:
        tracer, traces, clock = _made()
        tracer.sent(message, _receipt(), address="x", born_ms=clock.now_ms())
        await tracer.flush()
        assert traces.lines[0][11] == kind

    _run(run())


def test_trace_topic_and_brokers_without_traces_are_not_traced() -> None:
    async def run() -> None:
        tracer, traces, clock = _made()
        now_ms = clock.now_ms()
        tracer.sent(Message(TOPIC), _receipt(), address="x", born_ms=now_ms)
        tracer.sent(Message("T"), _receipt(), address="x", born_ms=now_ms, trace_on=False)
        assert tracer.consuming([_received(properties={"TRACE_ON": "false"})]) is None
        tracer.consumed(None, ConsumeCode.SUCCESS)
        await tracer.flush()
        assert traces.sent == []
        assert clock.pending() == 0

    _run(run())


def test_consuming_writes_a_record_before_and_after() -> None:
    async def run() -> None:
        tracer, traces, clock = _made()
        born_ms = clock.now_ms()
        token = tracer.consuming([_received(), _received(message_id="OTHER", keys=[])])
        clock.advance(10)
        tracer.consumed(token, ConsumeCode.FAILED)
        await tracer.flush()
        before, other, after, other_after = traces.lines
        request = before[4]
        assert len(request) == 32
        assert before == ["SubBefore", str(born_ms), "R", "g", request, ID, "2", "k1 k2"]
        assert other == ["SubBefore", str(born_ms), "R", "g", request, "OTHER", "2", "null"]
        end_ms = str(clock.now_ms())
        assert after == ["SubAfter", request, ID, "5", "false", "k1 k2", "4", end_ms, "g"]
        assert other_after[2] == "OTHER"
        assert traces.sent[0].keys == [ID, "k1", "k2", "OTHER"]

    _run(run())


def test_end_of_a_transaction_and_recall_are_traced() -> None:
    async def run() -> None:
        tracer, traces, clock = _made()
        tracer.ended(
            topic="T", message_id=ID, tags=None, keys="k", address="10.0.0.9:10911",
            transaction_id=ID, state="COMMIT_MESSAGE", from_check=True,
        )  # fmt: skip
        tracer.recalled(topic="T", message_id=ID, success=True)
        await tracer.flush()
        now = str(clock.now_ms())
        assert traces.lines == [
            ["EndTransaction", now, "DefaultRegion", "g", "T", ID, "null", "k", "10.0.0.9:10911",
             "2", ID, "COMMIT_MESSAGE", "true"],
            ["Recall", now, "DefaultRegion", "g", "T", ID, "true"],
        ]  # fmt: skip

    _run(run())


def test_records_are_sent_when_there_are_enough_or_after_five_seconds() -> None:
    async def run() -> None:
        tracer, traces, clock = _made()

        def trace(count: int) -> None:
            for _ in range(count):
                tracer.sent(Message("T"), _receipt(), address="x", born_ms=clock.now_ms())

        trace(FLUSH_AT - 1)
        await clock.elapse(4_999)
        assert traces.sent == []
        await clock.elapse(1)
        assert [len(traces.lines), len(traces.sent)] == [FLUSH_AT - 1, 1]
        trace(FLUSH_AT)
        await clock.elapse(0)
        assert len(traces.sent) == 2
        assert clock.pending() == 0

    _run(run())


def test_trace_message_has_one_topic_and_a_limited_size() -> None:
    async def run() -> None:
        tracer, traces, clock = _made()
        for number in range(600):
            receipt = _receipt(message_id=f"{number:032d}")
            topic = "T" if number % 2 else "U"
            tracer.sent(Message(topic), receipt, address="x", born_ms=clock.now_ms())
        await tracer.flush()
        assert len(traces.lines) == 600
        assert all(sum(map(len, message.keys)) <= 8_192 for message in traces.sent)
        for message in traces.sent:
            assert len({record.topic for record in decode_traces(message.content)}) == 1

    _run(run())


def test_records_beyond_the_limit_are_dropped_and_counted() -> None:
    async def run() -> None:
        tracer, traces, clock = _made()
        traces.release = asyncio.Event()
        for _ in range(WAITING_MAX + 5):
            tracer.sent(Message("T"), _receipt(), address="x", born_ms=clock.now_ms())
        assert tracer.dropped == 5
        traces.release.set()
        await tracer.close()
        assert len(traces.lines) == WAITING_MAX

    _run(run())


def test_failure_is_logged_once_and_close_does_not_hang(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        tracer, traces, clock = _made()
        traces.fails = True
        for _ in range(2):
            tracer.sent(Message("T"), _receipt(), address="x", born_ms=clock.now_ms())
            await tracer.flush()
        assert len(caplog.records) == 1
        traces.release = asyncio.Event()
        tracer.sent(Message("T"), _receipt(), address="x", born_ms=clock.now_ms())
        closing = asyncio.ensure_future(tracer.close())
        await clock.elapse(5_000)
        assert closing.done()
        traces.release.set()

    _run(run())


def test_records_are_decoded_also_those_of_older_clients() -> None:
    lines = [
        ["Pub", "1", "R", "g", "T", ID, "null", "k1 k2", "h:1", "5", "12", "0", "OFF", "true"],
        ["Pub", "1", "R", "g", "T", ID, "", "k", "h:1", "5", "12", "3", "false"],
        ["Pub", "1", "R", "g", "T", ID, "t", "k", "h:1", "5", "12", "1", "OFF", "true", "c:1"],
        ["SubBefore", "1", "R", "g", "REQ", ID, "2", "k"],
        ["SubAfter", "REQ", ID, "5", "true", "k", "0", "9", "g"],
        ["SubAfter", "REQ", ID, "5", "false", "k"],
        ["EndTransaction", "1", "R", "g", "T", ID, "t", "k", "h:1", "2", "TX", "UNKNOW", "true"],
        ["Recall", "1", "R", "g", "T", ID, "true"],
        ["Pub", "not a number"],
        ["Something", "new"],
    ]
    body = "".join("\x01".join(line) + "\x02" for line in lines).encode() + b"\xff"
    records = decode_traces(body)
    assert [record.type for record in records] == [line[0] for line in lines[:8]]
    assert records[0] == TraceRecord(
        type="Pub", time_ms=1, region="R", group="g", topic="T", message_id=ID, keys="k1 k2",
        store_host="h:1", body_bytes=5, cost_ms=12, kind=MessageKind.NORMAL, offset_id="OFF",
        success=True,
    )  # fmt: skip
    assert (records[1].offset_id, records[1].success) == (None, False)
    assert records[2].client_host == "c:1"
    assert (records[4].code, records[4].time_ms, records[4].group) == (ConsumeCode.SUCCESS, 9, "g")
    assert records[5].code is None
    assert (records[6].state, records[6].from_check) == ("UNKNOW", True)


def test_records_after_close_are_dropped() -> None:
    async def run() -> None:
        tracer, traces, clock = _made()
        await tracer.close()
        for _ in range(FLUSH_AT):
            tracer.recalled(topic="T", message_id=ID, success=True)
        assert clock.pending() == 0
        await clock.elapse(10_000)
        assert not traces.sent

    _run(run())
