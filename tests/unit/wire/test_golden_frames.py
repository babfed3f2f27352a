"""Frames, records, batches and hashes against bytes that real RocketMQ classes made.

The structure of the fixtures is described in tests/compat/golden.py.
"""

from ipaddress import ip_address
from typing import Any

import pytest

from penstock.wire import octets
from penstock.wire.codes import LanguageCode
from penstock.wire.compression import decompress
from penstock.wire.frame import BINARY, JSON
from penstock.wire.message import (
    decode_message,
    decode_messages,
    decode_properties,
    encode_batch,
    encode_host,
    encode_properties,
)
from penstock.wire.output import encode
from penstock.wire.record import RECORD, BatchWalk, PropertyMarks, Record, StoredRecord, java_hash
from tests.compat import golden

from .guarded import read_frame

Case = dict[str, Any]


def each(*sections: str) -> pytest.MarkDecorator:
    found = [
        pytest.param(version, case, id=f"{version}-{section}-{case['name']}")
        for version in golden.VERSIONS
        for section in sections
        for case in golden.load(version)[section]
    ]
    return pytest.mark.parametrize(("version", "case"), found)


def data_of(case: Case, name: str = "hex") -> bytes:
    return bytes.fromhex(case[name] or "")


@pytest.mark.parametrize(("form", "encoding"), [("json", JSON), ("rocketmq", BINARY)])
@each("frames")
def test_frames_are_decoded_to_the_input_of_java(
    version: str, case: Case, form: str, encoding: int
) -> None:
    request = read_frame(data_of(case, form))
    code = case["code"]
    if encoding == BINARY:
        code = (code + 0x8000) % 0x10000 - 0x8000  # Java cuts it to 16 bits
    assert request.encoding == encoding
    assert request.code == code
    for name in ("flag", "opaque", "version"):
        assert getattr(request, name) == case[name]
    assert request.remark() == case["remark"]
    assert request.language == LanguageCode[case["language"]]
    assert request.body() == data_of(case, "body")
    ext = case[f"{form}_ext"] or {}
    assert request.ext() == {name: text for name, text in ext.items() if text is not None}
    for name, value in (case["header"] or {}).items():
        if value is None:
            assert request.text(name.encode()) is None
        elif isinstance(value, bool):
            assert request.flag_or(name.encode(), not value) is value
        elif isinstance(value, int):
            assert request.i64(name.encode()) == value


def without(frame: bytes, entry: bytes) -> bytes:
    """The binary frame without one entry of its fields, with its three lengths put right."""
    remark_length = int.from_bytes(frame[21:25], "big")
    for at in (0, 4, 25 + remark_length):
        length = int.from_bytes(frame[at : at + 4], "big") - len(entry)
        frame = frame[:at] + length.to_bytes(4, "big") + frame[at + 4 :]
    return frame.replace(entry, b"", 1)


@each("frames")
def test_binary_frames_are_written_as_java_writes_them(version: str, case: Case) -> None:
    """Byte by byte, given the fields in the order in which Java's map happened to have them."""
    expected = data_of(case, "rocketmq")
    for name, text in (case["ext"] or {}).items():
        if not text:  # Java sends an empty text and reads it as none; we do not send it
            entry = len(name).to_bytes(2, "big") + name.encode() + bytes(4)
            assert entry in expected
            expected = without(expected, entry)
    request = read_frame(expected)
    made = encode(
        request.code, request.ext(), request.body(), opaque=case["opaque"], flag=case["flag"],
        encoding=BINARY, remark=case["remark"], version=case["version"],
        language=LanguageCode[case["language"]],
    )  # fmt: skip
    assert made == expected


@each("records", "store_records")
def test_records_are_decoded_to_the_input_of_java(version: str, case: Case) -> None:
    data = data_of(case)
    message = decode_message(data)
    assert decode_messages(data + data) == [message, message]
    assert message.size == len(data)
    for ours, theirs in {
        "topic": "topic", "queue_id": "queue_id", "flag": "flag", "queue_offset": "queue_offset",
        "physical_offset": "physical_offset", "sys_flag": "sys_flag", "born_ms": "born_timestamp",
        "store_ms": "store_timestamp", "reconsume_times": "reconsume_times",
        "prepared_offset": "prepared_transaction_offset", "properties": "properties",
    }.items():  # fmt: skip
        assert getattr(message, ours) == case[theirs], ours
    assert encode_host(message.born_host) == host_of(case, "born")
    assert encode_host(message.store_host) == host_of(case, "store")
    stored_body = data_of(case, "stored_body") if "stored_body" in case else data_of(case, "body")
    assert message.body == stored_body
    assert message.body_crc == case.get("body_crc", message.body_crc)
    assert message.offset_id == case.get("msg_id", message.offset_id)
    if "stored_body" in case:
        assert decompress(message.body, message.sys_flag, limit=1 << 20) == data_of(case, "body")


def host_of(case: Case, which: str) -> bytes:
    port: int = case[f"{which}_port"]
    return ip_address(case[f"{which}_host"]).packed + port.to_bytes(4, "big")


@each("records", "store_records")
def test_records_are_written_as_java_writes_them(version: str, case: Case) -> None:
    data = bytearray(data_of(case))
    stored = StoredRecord()
    stored.bind(memoryview(data))
    assert stored.read(0, len(data)) == RECORD
    assert stored.check(case["physical_offset"]) == RECORD
    properties = bytes(data[stored.properties_at : stored.properties_at + stored.properties_length])
    record = Record()
    record.fill(
        case["topic"].encode(),
        bytes(data[stored.body_at : stored.body_at + stored.body_length]),
        properties,
    )
    record.queue_id, record.flag, record.sys_flag = (
        case["queue_id"], case["flag"], case["sys_flag"],
    )  # fmt: skip
    record.born_ms = case["born_timestamp"]
    record.born_host, record.store_host = host_of(case, "born"), host_of(case, "store")
    record.reconsume_times = case["reconsume_times"]
    record.prepared_offset = case["prepared_transaction_offset"]
    assert record.prepare() == 0
    made = bytearray(record.size)
    record.put(
        memoryview(made), 0, case["queue_offset"], case["physical_offset"], case["store_timestamp"]
    )
    if case.get("record_version") == 2 and len(case["topic"]) <= 127:
        # We write version 2 only where it is needed; the message is the same.
        assert len(made) == len(data) - 1
        made_message, given = decode_message(made), decode_message(data)
        assert (made_message.topic, made_message.properties) == (given.topic, given.properties)
    else:
        assert made == data


@each("batches")
def test_batches_are_decoded_to_the_input_of_java(version: str, case: Case) -> None:
    data = bytearray(data_of(case))
    record, walk = Record(), BatchWalk()
    record.bind(memoryview(data))
    walk.start(0, len(data))
    for message in case["messages"]:
        assert walk.next(record) == 1
        assert record.flag == message["flag"]
        body = data[record.body_at : record.body_at + record.body_length]
        text = data[record.properties_at : record.properties_at + record.properties_length]
        assert body == data_of(message, "body")
        assert decode_properties(text) == message["properties"]
    assert walk.next(record) == 0


@pytest.mark.parametrize("case", golden.load("5.4.0")["batches"], ids=lambda case: case["name"])
def test_batches_are_written_as_java_writes_them(case: Case) -> None:
    messages = [
        (data_of(message, "body"), message["flag"], message["properties"])
        for message in case["messages"]
    ]
    assert encode_batch(messages) == data_of(case)


@each("properties_to_text")
def test_properties_are_written_as_java_writes_them(version: str, case: Case) -> None:
    made = encode_properties(case["properties"])
    if version == "4.9.8":  # which sets the separator only between properties
        made = made.removesuffix(b"\x02")
    assert made.decode() == case["text"]


@each("text_to_properties")
def test_properties_are_read_as_java_reads_them(version: str, case: Case) -> None:
    assert decode_properties((case["text"] or "").encode()) == case["properties"]


@each("string_hashes")
def test_tags_hash_as_in_java(version: str, case: Case) -> None:
    text = case["text"].encode()
    assert java_hash(case["text"]) == case["hash"]
    marks = PropertyMarks()
    marks.bind(memoryview(bytearray(b"TAGS\x01" + text + b"\x02")))
    marks.scan(0, 6 + len(text))
    assert marks.tags_code() == case["hash"]


@each("crcs")
def test_crcs_equal_those_of_java(version: str, case: Case) -> None:
    body = data_of(case, "body")
    assert octets.crc31(body, 0, len(body)) == case["crc32"]
    record = Record()
    record.fill(b"t", body)
    assert record.prepare() == 0
    made = bytearray(record.size)
    record.put(memoryview(made), 0, 0, 0, 0)
    assert octets.get_i32(made, 8) == case["crc32"]


@each("offset_ids")
def test_message_ids_equal_those_of_java(version: str, case: Case) -> None:
    record = Record()
    record.fill(b"t", b"")
    record.store_host = ip_address(case["host"]).packed + case["port"].to_bytes(4, "big")
    assert record.prepare() == 0
    made = bytearray(record.size)
    record.put(memoryview(made), 0, 0, case["offset"], 0)
    assert decode_message(made).message_id == case["id"]
