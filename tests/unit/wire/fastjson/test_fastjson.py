"""fastjson's dialect: what it accepts, what it writes, and what is refused."""

import contextlib
import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BodyError
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import ResetOffsetBody
from penstock.wire.bodies.client_bodies import HeartbeatData, MessageQueue

scalars = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**63), max_value=2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


# The answers of fastjson 1.2.83, run for this table.
ACCEPTED = [
    ("{a:1}", {"a": 1}),
    ("{'a':1,}", {"a": 1}),
    ('{,"a":1,,"b":2}', {"a": 1, "b": 2}),
    ("[1,,2]", [1, 2]),
    ("[1,]", [1]),
    ("[,1]", [1]),
    ("{\"a\":'x\\'y'}", {"a": "x'y"}),
    ('{"a":01}', {"a": 1}),
    ('{"a":+1}', {"a": 1}),
    ('{"a":1.}', {"a": 1}),
    ('{"a":NaN}', {}),
    ('{"a":undefined}', {}),
    ('{"a":null}', {}),
    ('{"a":1L}', {"a": 1}),
    ('{"a":1D}', {"a": 1.0}),
    ('{"a":"\\x41\\v\\\'\\/\\0"}', {"a": "A\v'/\0"}),
    ('{"a":"\n"}', {"a": "\n"}),
    ('\ufeff{"a":1}', {"a": 1}),
    ("{$a_1:1}", {"$a_1": 1}),
    ("{-1:2}", {"-1": 2}),
    ("{1.5:2}", {"1.5": 2}),
    ("{true:1}", {"true": 1}),
    ("{ 12 : 3 }", {"12": 3}),
    ("{'':1}", {"": 1}),
    ("{\"a\":''}", {"a": ""}),
    ('{"a":1,"a":2}', {"a": 2}),
    ('{"a":"\\ud83d\\ude80"}', {"a": "🚀"}),
    ("null", None),
]
REFUSED = [
    '{"a":.5}', '{"a":0x1F}', '{"a":1} trailing', "{a-b:1}", "{é:1}", '{"a":TRUE}', '{"a" 1}',
    '{"a":1 "b":2}', "", "  ", '{"a":1;}', '{"a":"x', '{"a":1', '{"a":"\\q"}', "{0x1:1}",
    '{"a":-}', '{"a":bare}', '{"a":{"$ref":"$"}}', "{[1]:2}", '{"a":"\\ud800"}', '{"a":"\\u12"}',
    '{"a":1e999}', "{a:" + "1" * 500 + "}", "{{}", "}", ",",
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), ACCEPTED)
def test_values_accepted_by_fastjson_are_accepted(text: str, value: Any) -> None:
    assert fastjson.read(text.encode()) == value


@pytest.mark.parametrize("text", REFUSED)
def test_invalid_json_raises_body_error(text: str) -> None:
    with pytest.raises(BodyError):
        fastjson.decode(text.encode(), dict[str, Any])


def test_reference_is_refused_by_name_on_the_fast_path_too() -> None:
    with pytest.raises(BodyError, match=r"\$ref"):
        fastjson.decode(b'{"clientID":"c","x":{"$ref":"$.y"}}', HeartbeatData)
    assert fastjson.decode(b'{"clientID":"$ref"}', HeartbeatData).client_id == "$ref"


QUEUE = MessageQueue("t", "b", 0)


@pytest.mark.parametrize(
    "text",
    [
        b'{"offsetTable":{{"brokerName":"b","queueId":0,"topic":"t"}:7}}',
        b"{offsetTable:{{brokerName:'b',queueId:0,topic:'t'}:7,}}",
        b'{"offsetTable":{"{\\"brokerName\\":\\"b\\",\\"queueId\\":0,\\"topic\\":\\"t\\"}":7}}',
    ],
)
def test_objects_as_keys(text: bytes) -> None:
    assert fastjson.decode(text, ResetOffsetBody).offset_table == {QUEUE: 7}


def test_name_in_braces_that_is_not_an_object_stays_a_name() -> None:
    assert fastjson.read(b"{'{x}':1}", quoted_objects=True) == {"{x}": 1}
    assert fastjson.decode(b"{'{}':1}", dict[str, int]) == {"{}": 1}


def test_keys_are_unquoted_and_quoted_when_strict() -> None:
    value = ResetOffsetBody(offset_table={QUEUE: 7})
    key = '{"brokerName":"b","queueId":0,"topic":"t"}'
    assert fastjson.encode(value) == b'{"offsetTable":{%s:7}}' % key.encode()
    assert json.loads(fastjson.encode_strict(value)) == {"offsetTable": {key: 7}}
    assert fastjson.encode({0: "a", -5: "b"}) == b'{0:"a",-5:"b"}'
    assert fastjson.encode_strict({0: "a"}) == b'{"0":"a"}'


def test_escapes_equal_those_of_fastjson() -> None:
    text = 't/é\x07\x7f\x85\u2028\x0b"\\\n🚀'
    assert fastjson.encode(text).decode() == (
        '"t/é\\u0007\\u007F\\u0085\\u2028\\u000B\\"\\\\\\n🚀"'
    )
    assert fastjson.encode_strict(text).decode() == (
        '"t\\/\\u00E9\\u0007\\u007F\\u0085\\u2028\\u000B\\"\\\\\\n\\uD83D\\uDE80"'
    )


def test_pretty_form_equals_that_of_fastjson() -> None:
    value = {"e": {}, "l": ["x", None], "m": {0: 1, 1: 2}, "s": frozenset({"q", "p"}), "t": (1, 2)}
    assert fastjson.encode_pretty(value).decode() == (
        '{\n\t"e":{},\n\t"l":[\n\t\t"x",\n\t\tnull\n\t],\n\t"m":{0:1,1:2\n\t},'
        '\n\t"s":["p","q"],\n\t"t":[1,2]\n}'
    )


def test_none_is_omitted_and_members_are_sorted() -> None:
    class Pair(msgspec.Struct):
        zulu: int
        alpha: str | None

    assert fastjson.encode(Pair(1, None)) == b'{"zulu":1}'
    assert fastjson.encode(Pair(1, "a")) == b'{"alpha":"a","zulu":1}'
    assert fastjson.encode({"a": None, "b": [None]}) == b'{"b":[null]}'
    assert fastjson.encode([math.nan, math.inf, b"\1\2\3"]) == b'[null,null,"AQID"]'


@given(values)
def test_tolerant_decoder_accepts_strict_json(value: Any) -> None:
    assert fastjson.read(json.dumps(value).encode()) == without_nulls(value)


@given(values)
def test_values_round_trip(value: Any) -> None:
    for encode in (fastjson.encode, fastjson.encode_pretty, fastjson.encode_strict):
        assert fastjson.read(encode(value)) == without_nulls(value)
    assert json.loads(fastjson.encode_strict(value)) == without_nulls(value)


@given(st.binary(max_size=80) | st.text(alphabet="{}[]:,'\"\\u01-.aeE$ \n", max_size=80))
def test_arbitrary_text_raises_only_body_error(data: bytes | str) -> None:
    text = data.encode() if isinstance(data, str) else data
    for kind in (HeartbeatData, ResetOffsetBody, dict[str, Any], list[int]):
        with contextlib.suppress(BodyError):
            fastjson.decode(text, kind)


@pytest.mark.parametrize("opening", ['{"a":', "[", "{{", "{a:["])
@pytest.mark.parametrize("count", [65, 1_000, 200_000])
def test_deep_nesting_is_refused(opening: str, count: int) -> None:
    with pytest.raises(BodyError):
        fastjson.decode(opening.encode() * count, dict[str, Any])


def test_depth_limit_applies_to_strict_json_in_unknown_members() -> None:
    def nested(depth: int) -> bytes:
        return b'{"clientID":"[[[","x":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"

    assert fastjson.decode(nested(64), HeartbeatData).client_id == "[[["
    with pytest.raises(BodyError, match="64"):
        fastjson.decode(nested(65), HeartbeatData)
    assert fastjson.decode(nested(90), HeartbeatData, depth_max=90)
    wide = b'{"x":[' + b"{}," * 500 + b'{}],"clientID":"a\\"]"}'
    assert fastjson.decode(wide, HeartbeatData).client_id == 'a"]'


def test_deeply_nested_values_are_not_encoded() -> None:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(BodyError):
        fastjson.encode(value)
    while value:  # taken apart here, so that no deep recursion frees it
        value = value[0]


def test_size_errors_name_the_size_and_the_limit() -> None:
    with pytest.raises(BodyError) as caught:
        fastjson.decode(b'{"clientID":"c"}', HeartbeatData, bytes_max=10)
    assert (caught.value.figure, caught.value.limit) == (16, 10)
    with pytest.raises(BodyError) as caught:
        fastjson.decode(b'{clientID:"c"}', HeartbeatData, loose_bytes_max=10)
    assert (caught.value.figure, caught.value.limit) == (14, 10)
    assert fastjson.decode(b'{"clientID":"c"}', HeartbeatData, loose_bytes_max=10)


def test_values_that_can_not_be_encoded_raise_body_error() -> None:
    with pytest.raises(BodyError):
        fastjson.encode("\ud800")
    with pytest.raises(BodyError):
        fastjson.encode_strict({"a": "\ud800"})
    with pytest.raises(BodyError):
        fastjson.encode(object())
