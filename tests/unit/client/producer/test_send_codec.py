"""Encoding of send requests, and decoding of their responses."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import errors
from penstock.broker.pull.pull_subscription import PullForbidden
from penstock.client.messages import Message, MessageQueue, SendReceipt, SendStatus
from penstock.client.producer.send_codec import (
    INLINE_BODY_BYTES_MAX,
    SEND_BATCH_MESSAGE,
    SEND_MESSAGE_V2,
    PendingSend,
    SendTarget,
    decode_fields,
    encode_batched,
    encode_fields,
    encode_properties,
    put_send,
)
from penstock.errors import (
    HeaderError,
    MessageIllegal,
    NoPermission,
    PeerLost,
    PenstockError,
    SystemBusy,
)
from penstock.wire.frame import BINARY, JSON, Request
from penstock.wire.message import decode_properties, encode_batch
from penstock.wire.output import Output, response

QUEUE = MessageQueue("Orders", "broker-a", 3)
FIELDS = {"a": "group", "b": "ns%Orders", "c": "TBW102", "d": "4", "e": "3", "n": "broker-a"}


class Peer:
    address = "10.0.0.1:10911"
    signs = False


class RecordingOwner:
    def __init__(self) -> None:
        self.results: list[Any] = []
        self.errors: list[PenstockError] = []

    def send_succeeded(self, pending: PendingSend, result: Any, status: SendStatus) -> None:
        self.results.append(result)

    def send_failed(self, pending: PendingSend, error: PenstockError) -> None:
        self.errors.append(error)


def make_pending(owner: RecordingOwner | None = None, **parts: Any) -> PendingSend:
    pending = PendingSend(
        owner or RecordingOwner(), None, None, "Orders", 1_700_000_000_123, 3_000, 9_000
    )
    pending.target = SendTarget(QUEUE, FIELDS, Peer())
    pending.message_id = "7F000001"
    for name, value in parts.items():
        setattr(pending, name, value)
    return pending


def read(data: bytes) -> list[tuple[Request, dict[str, str], bytes]]:
    buffer = memoryview(bytearray(data))
    found, at = [], 0
    while at < len(data):
        request = Request()
        request.bind(buffer)
        length = request.read(at, len(data))
        assert length > 0
        at += length
        found.append((request, request.ext(), request.body()))
    return found


def put(output: Output, pending: PendingSend, opaque: int, command_flag: int = 0) -> bool:
    assert pending.target is not None
    return put_send(output, pending, pending.target, opaque, command_flag)


def test_several_requests_are_written_one_after_another() -> None:
    output = Output(16)
    first = make_pending(body=b"one", properties=b"UNIQ_KEY\x01ID\x02", flag=-5, sys_flag=0x301)
    batch = make_pending(
        body=b"two", properties=b"WAIT\x01true\x02", code=SEND_BATCH_MESSAGE,
        extra_fields=encode_fields({"m": "true"}),
    )  # fmt: skip
    assert put(output, first, 7)
    assert put(output, batch, 0x7FFFFFFF, command_flag=2)
    (one, ext, body), (two, more, rest) = read(output.take())
    assert (one.code, one.opaque, one.flag, one.encoding) == (SEND_MESSAGE_V2, 7, 0, BINARY)
    assert (one.version, one.language) == (493, 3)
    assert body == b"one"
    assert ext == FIELDS | {
        "f": "769", "g": "1700000000123", "h": "-5", "i": "UNIQ_KEY\x01ID\x02",
    }  # fmt: skip
    assert (two.code, two.opaque, two.is_oneway(), rest) == (320, 0x7FFFFFFF, True, b"two")
    assert more["m"] == "true"


def test_long_body_is_written_separately() -> None:
    output = Output()
    pending = make_pending(body=bytes(INLINE_BODY_BYTES_MAX + 1), properties=b"WAIT\x01true\x02")
    assert not put(output, pending, 1)
    head = output.take()
    assert len(head) < 1024
    ((_, ext, body),) = read(head + pending.body)
    assert len(body) == INLINE_BODY_BYTES_MAX + 1
    assert ext["i"] == "WAIT\x01true\x02"


def test_fields_are_the_same_for_signed_requests() -> None:
    pending = make_pending(
        body=b"x", properties=b"A\x01b\x02", extra_fields=encode_fields({"m": "true"})
    )
    output = Output()
    put(output, pending, 1)
    ((_, ext, _),) = read(output.take())
    assert pending.target is not None
    assert pending.fields(pending.target) == ext


@given(st.dictionaries(st.text("abXY_ü", min_size=1), st.text(min_size=1), max_size=5))
def test_fields_round_trip(fields: dict[str, str]) -> None:
    assert decode_fields(encode_fields(fields)) == fields


text = st.text(st.characters(exclude_characters="\x00\x01\x02", codec="utf-8"), min_size=1)


@given(
    tags=st.none() | text, keys=st.lists(text.filter(lambda key: " " not in key), max_size=3),
    own=st.dictionaries(text.map(lambda name: "x" + name), text, max_size=4), wait=st.booleans(),
)  # fmt: skip
def test_properties_round_trip(
    tags: str | None, keys: list[str], own: dict[str, str], wait: bool
) -> None:
    message = Message("T", b"b", tags, keys, own, wait_stored=wait)
    found = decode_properties(encode_properties(message, "THE-ID", b"INSTANCE_ID\x01n\x02", False))
    expected = own | {"UNIQ_KEY": "THE-ID", "WAIT": str(wait).lower(), "INSTANCE_ID": "n"}
    if tags:
        expected["TAGS"] = tags
    if keys:
        expected["KEYS"] = " ".join(keys)
    assert found == expected


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (Message("T", tags="a\x02b"), "'TAGS' contains"),
        (Message("T", keys=["a\x01b"]), "'KEYS' contains"),
        (Message("T", properties={"UNIQ_KEY": "1"}), "'UNIQ_KEY' is reserved by RocketMQ"),
        (Message("T", properties={"DELAY": "1"}), "'DELAY' is reserved by RocketMQ"),
        (Message("T", properties={"a\x02": "1"}), "contains"),
        (Message("T", properties={"a": ""}), "'a' has no value"),
        (Message("T", properties={"": "a"}), "has no name"),
        (Message("T", properties={"a": 1}), "must be strings"),  # type: ignore[dict-item]
        (Message("T", properties={"a": "x" * 33_000}), "the limit is 32767"),
    ],
)
def test_bad_properties_are_refused_by_name(message: Message, reason: str) -> None:
    with pytest.raises(MessageIllegal, match=reason):
        encode_properties(message, "ID", b"", False)


def test_internal_messages_may_use_reserved_names() -> None:
    message = Message("T", properties={"TRAN_MSG": "true"})
    assert b"TRAN_MSG\x01true\x02" in encode_properties(message, "ID", b"", True)


def test_batch_entry_equals_that_of_the_reference_encoder() -> None:
    properties = {"TAGS": "ü", "UNIQ_KEY": "1"}
    text = b"TAGS\x01\xc3\xbc\x02UNIQ_KEY\x011\x02"
    assert encode_batched(b"body", -3, text) == encode_batch([(b"body", -3, properties)])


ANSWER = {"msgId": "AABB", "queueId": "3", "queueOffset": "42"}


def answer(pending: PendingSend, frame: bytes) -> None:
    ((request, _, _),) = read(frame)
    pending.answered(request)


@pytest.mark.parametrize("encoding", [JSON, BINARY])
@pytest.mark.parametrize("status", SendStatus)
def test_response_becomes_a_receipt(encoding: int, status: SendStatus) -> None:
    owner = RecordingOwner()
    ext = ANSWER | {"transactionId": "T", "recallHandle": "R", "MSG_REGION": "here"}
    answer(make_pending(owner), response(status, 1, encoding, ext=ext))
    assert owner.results == [
        SendReceipt(status, "7F000001", "AABB", QUEUE, 42, "T", "R", "here")
    ]  # fmt: skip


def test_broker_may_choose_another_queue() -> None:
    owner = RecordingOwner()
    answer(make_pending(owner), response(0, 1, JSON, ext=ANSWER | {"queueId": "9"}))
    (receipt,) = owner.results
    assert receipt.queue == MessageQueue("Orders", "broker-a", 9)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("msgId", None),
        ("queueId", None),
        ("queueId", "x"),
        ("queueOffset", None),
        ("queueOffset", "x"),
    ],
)
def test_malformed_response_is_an_error(name: str, value: str | None) -> None:
    ext = {key: text for key, text in (ANSWER | {name: value}).items() if text is not None}
    for parts in ({}, {"batch_ids": ["1", "2"]}):
        owner = RecordingOwner()
        answer(make_pending(owner, **parts), response(0, 1, BINARY, ext=ext))
        assert [type(error) for error in owner.errors] == [HeaderError]


def test_refusal_names_the_broker_and_its_reason() -> None:
    owner = RecordingOwner()
    pending = make_pending(owner)
    answer(pending, response(2, 1, BINARY, remark="broker busy"))
    pending.failed(PeerLost("gone"))
    busy, lost = owner.errors
    assert isinstance(busy, SystemBusy)
    assert busy.answer_code == 2
    assert str(busy) == "10.0.0.1:10911: broker busy"
    assert isinstance(lost, PeerLost)


def test_batch_has_a_receipt_for_each_message() -> None:
    owner = RecordingOwner()
    pending = make_pending(owner, batch_ids=["1", "2", "3"])
    answer(pending, response(0, 1, BINARY, ext=ANSWER | {"msgId": "A,B,C"}))
    (receipts,) = owner.results
    assert [(r.message_id, r.offset_id, r.queue_offset) for r in receipts] == [
        ("1", "A", 42), ("2", "B", 43), ("3", "C", 44),
    ]  # fmt: skip
    answer(pending, response(0, 1, BINARY, ext=ANSWER | {"batchUniqId": "x"}))  # stored as one
    assert [(r.offset_id, r.queue_offset) for r in owner.results[1]] == [
        ("AABB", 42), ("AABB", 43), ("AABB", 44),
    ]  # fmt: skip
    answer(pending, response(0, 1, BINARY, ext=ANSWER | {"msgId": "A,B"}))
    assert "2 message ids for a batch of 3" in str(owner.errors[0])


@pytest.mark.parametrize(("text", "on"), [(None, True), ("true", True), ("false", False)])
def test_broker_can_switch_traces_off(text: str | None, on: bool) -> None:
    pending = make_pending(traced=True)
    answer(pending, response(0, 1, JSON, ext=ANSWER | ({"TRACE_ON": text} if text else {})))
    assert pending.trace_on is on


def test_errors_are_the_same_with_a_broker_in_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert issubclass(PullForbidden, NoPermission)  # whose constructor is another
    monkeypatch.setattr(errors, "_REFUSALS", {})
    owner = RecordingOwner()
    pending = make_pending(owner)
    ((request, _, _),) = read(response(16, 1, BINARY, remark="not you"))
    pending.answered(request)
    assert [type(error) for error in owner.errors] == [NoPermission]
