"""The real Java decoders of every release read the bytes that Penstock writes."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.wire import fastjson
from penstock.wire.codes import LanguageCode
from penstock.wire.compression import Compression, compress
from penstock.wire.frame import BINARY, JSON
from penstock.wire.message import encode_batch, encode_host, encode_properties
from penstock.wire.output import Output, encode
from penstock.wire.record import OK, Record
from tests.unit.wire.bodies.test_golden_bodies import kind_of

from . import golden, maven
from .conftest import Sessions
from .sample_bodies import as_java_tells, body_classes, differences, sample

pytestmark = pytest.mark.compat

each_version = pytest.mark.parametrize("version", golden.VERSIONS)
PARTS = {
    "HAClientRuntimeInfo", "HAConnectionRuntimeInfo", "Metric", "OrderInfo", "OrderedPop",
    "PolicyEntryInfo", "PolicyInfo", "ReplicaIdentity", "ReplicasInfo", "ReplicasInfoWithHistory",
    "BrokerReplicasInfoWithHistory", "ElectionInfo",
}  # fmt: skip
"""Classes inside others, which are tried as parts of these."""
FILES = {
    "ConsumerOrderInfoFile", "DelayOffsetSerializeWrapper", "TimerCheckpoint",
    "TimerMetricsSerializeWrapper",
}  # fmt: skip
"""Files that Java reads by other means; test_store_moves.py has them read by its brokers."""
SHORT_NAMES = {"AckMsg", "BatchAck", "BatchAckMessageRequestBody", "BatchAckMsg", "PopCheckPoint"}
"""Bodies whose fields have other names in Java than on the wire."""

EXT = {
    "a": "group", "b": "Topic", "e": "3", "g": "1700000000000",
    "i": "KEYS\x01k 键 😀\x02TAGS\x01a\x02", "m": "false",
}  # fmt: skip


def our_frames() -> list[dict[str, Any]]:
    made = []
    for name, encoding in (("json", JSON), ("binary", BINARY)):
        request = encode(310, EXT, b"body", opaque=-5, encoding=encoding, remark="r 键")
        made.append({"name": f"request/{name}", "hex": request.hex()})
        bare = encode(34, None, opaque=7, flag=2, encoding=encoding)
        made.append({"name": f"bare/{name}", "hex": bare.hex()})
        output = Output(8)
        output.begin(encoding, 0, 42)
        output.field_offset_id(b"msgId", encode_host("127.0.0.1:10911"), 123456)
        output.field_number(b"queueOffset", -1)
        output.field_plain(b"TRACE_ON", b"true")
        output.end(0)
        made.append({"name": f"response/{name}", "hex": output.take().hex()})
    return made


def our_record(topic: str, born: str, store: str, body: bytes, extra: bytes) -> bytes:
    record = Record()
    record.fill(topic.encode(), body, encode_properties({"TAGS": "a", "KEYS": "k1 k2"}))
    record.extra = extra
    record.queue_id, record.flag, record.born_ms = 3, 9, 1_700_000_000_000
    record.born_host, record.store_host = encode_host(born), encode_host(store)
    record.reconsume_times, record.prepared_offset = 2, 77
    assert record.prepare() == OK
    room = bytearray(record.size)
    record.put(memoryview(room), 0, 11, 4096, 1_700_000_000_123)
    return bytes(room)


def our_bodies(version: str) -> list[dict[str, Any]]:
    return [
        {
            "name": case["name"],
            "class": case["class"],
            "hex": fastjson.encode(fastjson.decode(case["text"].encode(), kind_of(case))).hex(),
        }
        for case in golden.load(version)["bodies"]
    ]


@each_version
def test_java_decodes_what_we_encode(sessions: Sessions, version: str) -> None:
    v4 = our_record("TopicTest", "10.0.0.1:1234", "127.0.0.1:10911", b"hello", b"CLUSTER\x01c\x02")
    v6 = our_record("TopicTest", "[::1]:1234", "[fe80::1]:10911", b"", b"")
    batch = encode_batch([(b"one", 1, {"TAGS": "x"}), (b"", 0, {}), (b"3" * 500, 2, {"K": "v"})])
    text = b"compressible " * 400
    seen = golden.verify(
        sessions(version),
        {
            "frames": our_frames(),
            "records": [{"name": "two", "hex": (v4 + v6).hex()}],
            "batches": [{"name": "batch", "hex": batch.hex()}],
            "compressed": [
                {"name": kind.name, "codec": kind.name, "hex": compress(text, kind).hex()}
                for kind in Compression
            ],
            "bodies": our_bodies(version),
        },
    )
    check_frames(seen["frames"])
    first, second = seen["records"]["two"]["seen"]
    assert first["properties"] == {"TAGS": "a", "KEYS": "k1 k2", "CLUSTER": "c"}
    assert (first["topic"], first["queue_id"], first["queue_offset"]) == ("TopicTest", 3, 11)
    assert (first["physical_offset"], first["store_timestamp"]) == (4096, 1_700_000_000_123)
    assert (first["born_host"], first["born_port"]) == ("10.0.0.1", 1234)
    assert bytes.fromhex(first["body"]) == b"hello"
    assert second["store_port"] == 10911
    assert second["sys_flag"] & 0x30 == 0x30
    inner = seen["batches"]["batch"]["seen"]
    assert [bytes.fromhex(m["body"] or "") for m in inner] == [b"one", b"", b"3" * 500]
    assert [m["flag"] for m in inner] == [1, 0, 2]
    for kind in Compression:
        assert bytes.fromhex(seen["compressed"][kind.name]["seen"]) == text
    for case in golden.load(version)["bodies"]:
        assert "error" not in seen["bodies"][case["name"]], case["name"]
        if case["name"] != "route-empty":  # 4.9.8 has null lists where we write empty ones
            assert seen["bodies"][case["name"]]["seen"] == case["object"], case["name"]


@each_version
def test_java_reads_every_field_of_every_body(sessions: Sessions, version: str) -> None:
    samples = {name: sample(kind) for name, kind in body_classes().items()}
    cases = [
        {"name": name, "class": name, "hex": fastjson.encode(body).hex()}
        for name, body in samples.items()
    ]
    results = golden.verify(sessions(version), {"bodies": cases})["bodies"]
    refused = {name: result["error"] for name, result in results.items() if "error" in result}
    unknown = {name for name, error in refused.items() if "ClassNotFound" in error}
    assert refused.keys() == unknown, refused
    found = {
        name: differences(as_java_tells(samples[name]), result["seen"])
        for name, result in results.items()
        if "seen" in result
    }
    told = {name: texts for name, texts in found.items() if any(t[0] != "-" for t in texts)}
    assert told == {}
    if version == maven.V5_5:
        assert unknown == PARTS | FILES
        assert {name for name, texts in found.items() if texts} == SHORT_NAMES


def check_frames(frames: dict[str, Any]) -> None:
    for name in ("json", "binary"):
        request = frames[f"request/{name}"]["seen"]
        assert (request["code"], request["opaque"], request["flag"]) == (310, -5, 0)
        assert request["ext"] == EXT
        assert request["remark"] == "r 键"
        assert request["language"] == LanguageCode.PYTHON.name
        assert bytes.fromhex(request["body"]) == b"body"
        bare = frames[f"bare/{name}"]["seen"]
        assert (bare["flag"], bare["ext"] or {}, bare["body"]) == (2, {}, None)
        response = frames[f"response/{name}"]["seen"]
        assert (response["code"], response["opaque"], response["flag"]) == (0, 42, 1)
        assert response["ext"] == {
            "msgId": "7F00000100002A9F000000000001E240", "queueOffset": "-1", "TRACE_ON": "true",
        }  # fmt: skip
