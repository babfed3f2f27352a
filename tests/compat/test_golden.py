"""The golden fixtures are what RocketMQ makes today, and its decoders read them back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from . import golden, make_golden, maven
from .conftest import Sessions
from .java_session import JavaSession

pytestmark = pytest.mark.compat

each_version = pytest.mark.parametrize("version", golden.VERSIONS)


@each_version
def test_fixture_is_current(sessions: Sessions, version: str) -> None:
    made = make_golden.make(sessions(version))
    stored = dict(golden.load(version))
    # Made from the clock and this machine's address.
    del made["unique_ids"], stored["unique_ids"]
    assert made == stored


@each_version
def test_java_reads_its_own_bytes(sessions: Sessions, version: str) -> None:
    document = golden.load(version)
    seen = golden.verify(sessions(version), _as_verify_input(document))

    for case in document["frames"]:
        for form in ("json", "rocketmq"):
            frame = seen["frames"][f"{case['name']}/{form}"]["seen"]
            code = case["code"] if form == "json" else _short(case["code"])
            assert frame["code"] == code
            assert frame["ext"] == case[f"{form}_ext"]
            for field in ("flag", "opaque", "version", "language", "remark", "body"):
                assert frame[field] == case[field]
    for case in document["records"] + document["store_records"]:
        (record,) = seen["records"][case["name"]]["seen"]
        assert {key: record[key] for key in case if key in record} == {
            key: case[key] for key in case if key in record
        }
        assert record["store_size"] == len(case["hex"]) // 2
    for case in document["batches"]:
        assert seen["batches"][case["name"]]["seen"] == case["messages"]
    for case in document["compressed"]:
        assert seen["compressed"][case["name"]]["seen"] == case["body"]
    for case in document["bodies"]:
        assert seen["bodies"][case["name"]]["seen"] == case["object"]
        if case.get("compress"):
            register = seen["register_bodies"][case["name"]]["seen"]
            assert register["filterServerList"] == case["object"]["filterServerList"]


def test_refused_bytes_are_reported_per_case(java54: JavaSession) -> None:
    seen = golden.verify(
        java54,
        {
            "frames": [{"name": "cut", "hex": "00000008000000ff"}],
            "records": [{"name": "zeros", "hex": "00" * 100}],
            "properties": [{"name": "fine", "text": "a\x01b"}],
        },
    )
    assert "error" in seen["frames"]["cut"]
    assert "error" in seen["records"]["zeros"]
    assert seen["properties"]["fine"]["seen"] == {"a": "b"}


@each_version
def test_which_map_keys_java_reads(sessions: Sessions, version: str) -> None:
    queue = '{"brokerName":"b","queueId":0,"topic":"t"}'
    texts = {
        "object": f'{{"offsetTable":{{{queue}:7}}}}',
        "spaced": f'{{ "offsetTable": {{ {queue} : 7 }} }}',
        "string": json.dumps({"offsetTable": {queue: 7}}),
    }
    seen = golden.verify(
        sessions(version),
        {
            "bodies": [
                {"name": name, "class": "ResetOffsetBody", "hex": text.encode().hex()}
                for name, text in texts.items()
            ]
            + [
                {"name": name, "class": "BrokerData", "hex": text.hex()}
                for name, text in (
                    ("number", b'{"brokerAddrs":{0:"a"}}'),
                    ("quoted", b'{"brokerAddrs":{"0":"a"}}'),
                )
            ]
        },
    )["bodies"]
    table = [[{"topic": "t", "brokerName": "b", "queueId": 0}, 7]]
    assert seen["object"]["seen"]["offsetTable"] == table
    assert seen["spaced"]["seen"]["offsetTable"] == table
    # So the bare object is the only form that every release reads.
    assert ("error" in seen["string"]) == (version != maven.V4_9)
    assert seen["number"]["seen"]["brokerAddrs"] == {"0": "a"}
    assert seen["quoted"]["seen"]["brokerAddrs"] == {"0": "a"}


def _short(code: int) -> int:
    return (code + 0x8000) % 0x10000 - 0x8000


def _as_verify_input(document: dict[str, Any]) -> dict[str, list[golden.Case]]:
    def hexes(section: str) -> list[golden.Case]:
        return [{"name": case["name"], "hex": case["hex"]} for case in document[section]]

    return {
        "frames": [
            {"name": f"{case['name']}/{form}", "hex": case[form]}
            for case in document["frames"]
            for form in ("json", "rocketmq")
        ],
        "records": hexes("records") + hexes("store_records"),
        "batches": hexes("batches"),
        "compressed": document["compressed"],
        "bodies": [
            {"name": c["name"], "class": c["class"], "hex": c["text"].encode().hex()}
            for c in document["bodies"]
        ],
        "register_bodies": [
            {
                "name": case["name"],
                "hex": case["compressed"],
                "is_compressed": True,
                "version": document["version_number"],
            }
            for case in document["bodies"]
            if case.get("compress")
        ],
    }
