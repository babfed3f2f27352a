"""Bodies, ids and compression against bytes that real RocketMQ classes made.

The structure of the fixtures is described in tests/compat/golden.py.
"""

import functools
import json
import zlib
from datetime import UTC
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from penstock.wire import fastjson
from penstock.wire.bodies import (
    admin_bodies,
    client_bodies,
    cluster_bodies,
    registration_bodies,
    table_bodies,
)
from penstock.wire.bodies.client_bodies import Body
from penstock.wire.bodies.registration_bodies import body_crc32, decode_register, encode_register
from penstock.wire.compression import Compression, compress, decompress, with_compression
from penstock.wire.message_ids import (
    decode_offset_id,
    decode_unique_id,
    encode_offset_id,
    month_start_ms,
)

VERSIONS = ("5.5.1", "5.4.0", "4.9.8")
MODULES = (client_bodies, admin_bodies, cluster_bodies, table_bodies, registration_bodies)
ADDED_BY_5_5 = b',"pullOffsetTable":{}'
"""A member of the consumer offsets that we leave out; RocketMQ reads it as empty then."""
SAME_SHAPE = {"UnlockBatchRequestBody": "LockBatchRequestBody"}

Case = dict[str, Any]


@functools.cache
def document(version: str) -> dict[str, Any]:
    path = Path(__file__).parents[3] / "fixtures" / "golden" / f"{version}.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def each(section: str) -> pytest.MarkDecorator:
    found = [
        pytest.param(version, case, id=f"{version}-{case.get('name', number)}")
        for version in VERSIONS
        for number, case in enumerate(document(version)[section])
    ]
    return pytest.mark.parametrize(("version", "case"), found)


def kind_of(case: Case) -> type[Body]:
    name = SAME_SHAPE.get(case["class"], case["class"])
    found: list[type[Body]] = [vars(module)[name] for module in MODULES if name in vars(module)]
    return found[0]


def is_part_of(part: Any, whole: Any) -> bool:
    if isinstance(part, dict):
        return all(key in whole and is_part_of(part[key], whole[key]) for key in part)
    if isinstance(part, list):
        return len(part) == len(whole) and all(map(is_part_of, part, whole))
    return bool(part == whole)


@each("bodies")
def test_all_forms_of_a_body_are_equal(version: str, case: Case) -> None:
    kind = kind_of(case)
    value = fastjson.decode(case["text"].encode(), kind)
    assert fastjson.decode(case["pretty"].encode(), kind) == value
    if "strict_text" in case:
        assert fastjson.decode(case["strict_text"].encode(), kind) == value


@each("bodies")
def test_body_is_encoded_as_by_rocketmq(version: str, case: Case) -> None:
    text = case["text"].encode()
    ours = fastjson.encode(fastjson.decode(text, kind_of(case)))
    if version != "4.9.8":
        assert ours == text.replace(ADDED_BY_5_5, b"")
    else:  # we write the members that 5.x added, and empty lists where 4.x has null
        assert is_part_of(fastjson.read(text), fastjson.read(ours))


@each("bodies")
def test_strict_form_is_standard_json_with_the_same_content(version: str, case: Case) -> None:
    if "strict_text" not in case:
        return
    value = fastjson.decode(case["text"].encode(), kind_of(case))
    assert is_part_of(json.loads(case["strict_text"]), json.loads(fastjson.encode_strict(value)))


@each("bodies")
def test_compressed_registration(version: str, case: Case) -> None:
    if "compressed" not in case:
        return
    number = document(version)["version_number"]
    packed = bytes.fromhex(case["compressed"])
    body = decode_register(packed, compressed=True, version=number)
    plain = decode_register(case["text"].encode(), compressed=False, version=number)
    ours, theirs = body.topic_config_serialize_wrapper, plain.topic_config_serialize_wrapper
    assert body.filter_server_list == plain.filter_server_list
    assert ours.data_version == theirs.data_version
    assert ours.topic_config_table.keys() == theirs.topic_config_table.keys()
    again = encode_register(body, compressed=True)
    assert decode_register(again, compressed=True, version=493) == body
    # The part that 4.9.8 reads, as 4.9.8 writes it: a 4.x name server takes no sixth word.
    assert b"\x1aTopicTest 8 8 6 SINGLE_TAG\0" in zlib.decompress(again)


@each("offset_ids")
def test_offset_ids(version: str, case: Case) -> None:
    ip = ip_address(case["host"]).packed
    assert encode_offset_id(ip, case["port"], case["offset"]) == case["id"]
    assert decode_offset_id(case["id"]) == (ip, case["port"], case["offset"])


@each("unique_id_reads")
def test_unique_ids_are_read_as_java_reads_them(version: str, case: Case) -> None:
    found = decode_unique_id(case["id"])
    assert (ip_address(found.ip).exploded, found.pid) == (case["ip"], case["pid"])


@each("unique_ids")
def test_unique_ids_made_by_java(version: str, case: Case) -> None:
    found = decode_unique_id(case["id"])
    assert (ip_address(found.ip).exploded, found.pid) == (case["ip"], case["pid"])
    born_ms = found.born_ms(case["created_ms"] + 60_000, UTC)
    assert 0 <= born_ms - case["created_ms"] < 1000
    # Java takes an id that it reads in its own millisecond for one of the month before.
    assert case["near_time_ms"] in (born_ms, month_start_ms(born_ms - found.ms - 1, UTC) + found.ms)


@each("crcs")
def test_body_crc(version: str, case: Case) -> None:
    assert body_crc32(bytes.fromhex(case["body"])) == case["crc32"]


@each("compressed")
def test_compression(version: str, case: Case) -> None:
    kind = Compression[case["codec"]]
    body, packed = bytes.fromhex(case["body"]), bytes.fromhex(case["hex"])
    flag = with_compression(0, kind)
    assert decompress(packed, flag, limit=len(body)) == body
    if kind is Compression.ZLIB:  # the other two may choose other block sizes
        assert compress(body, kind, case["level"]) == packed
