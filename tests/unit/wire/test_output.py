"""Responses that `Output` and `encode` write are read by `Request`, in both encodings."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import FrameError, ResponseTooLong
from penstock.wire.frame import BINARY, FRAME_BYTES_MAX, JSON, Request
from penstock.wire.message_ids import encode_offset_id
from penstock.wire.output import LANGUAGE, VERSION, Output, encode, response

from .guarded import bound, read_frame
from .test_frame import ENCODINGS

PLAIN = "abcdefghijklmnopqrstuvwxyzABC0123456789-_%.: #"
i32 = st.sampled_from((-0x80000000, -1, 0x7FFFFFFF)) | st.integers(-0x80000000, 0x7FFFFFFF)
i64 = st.sampled_from((-(1 << 63), -1, 0, (1 << 63) - 1)) | st.integers(-(1 << 63), (1 << 63) - 1)
hosts = st.binary(min_size=8, max_size=8) | st.binary(min_size=20, max_size=20)
values = i64 | st.text(PLAIN, min_size=1, max_size=30) | st.tuples(hosts, i64)
responses = st.fixed_dictionaries(
    {
        "encoding": st.sampled_from((JSON, BINARY)),
        "code": st.integers(-0x8000, 0x7FFF),
        "opaque": i32,
        "fields": st.dictionaries(st.text(PLAIN, min_size=1, max_size=20), values, max_size=8),
        "body": st.binary(max_size=50),
    }
)

Response = dict[str, Any]


def write(output: Output, wanted: Response) -> None:
    output.begin(wanted["encoding"], wanted["code"], wanted["opaque"])
    for name, value in wanted["fields"].items():
        if isinstance(value, int):
            output.field_number(name.encode(), value)
        elif isinstance(value, str):
            output.field_plain(name.encode(), value.encode())
        else:
            output.field_offset_id(name.encode(), *value)
    output.end(len(wanted["body"]))
    output.append(wanted["body"])


def text_of(value: int | str | tuple[bytes, int]) -> str:
    if isinstance(value, tuple):
        host, offset = value
        return encode_offset_id(host[:-4], int.from_bytes(host[-4:], "big", signed=True), offset)
    return str(value)


def check(request: Request, wanted: Response) -> None:
    assert request.is_response()
    assert not request.is_oneway()
    assert (request.language, request.version) == (LANGUAGE, VERSION)
    assert request.remark() is None
    assert request.ext() == {name: text_of(value) for name, value in wanted["fields"].items()}
    for name in ("encoding", "code", "opaque"):
        assert getattr(request, name) == wanted[name]
    assert request.body() == wanted["body"]


@given(many=st.lists(responses, max_size=6), capacity=st.integers(0, 300))
def test_several_responses_are_read_back(many: list[Response], capacity: int) -> None:
    output = Output(capacity)
    for wanted in many:
        write(output, wanted)
    length = output.length
    taken = output.take()
    assert len(taken) == length
    request = bound(taken or b"\0")
    at = 0
    for wanted in many:
        at += request.read(at, length)
        check(request, wanted)
    assert at == length


@given(wanted=responses)
def test_a_json_response_is_json(wanted: Response) -> None:
    output = Output(1)
    write(output, {**wanted, "encoding": JSON})
    header = json.loads(output.take()[8 : -len(wanted["body"]) or None])
    fields = {name: text_of(value) for name, value in wanted["fields"].items()}
    assert header == {
        "code": wanted["code"], "flag": 1, "language": "PYTHON", "opaque": wanted["opaque"],
        "version": VERSION, "extFields": fields,
    }  # fmt: skip


def test_take_empties_the_output_and_keeps_its_capacity() -> None:
    output = Output(4096)
    assert output.take() == b""
    output.append(b"first")
    assert output.take() == b"first"
    assert (output.take(), output.length, output.capacity) == (b"", 0, 4096)
    output.append(b"2nd")
    assert output.take() == b"2nd"


@pytest.mark.parametrize("capacity", [0, 1, 2, 7, 64])
def test_growing_keeps_the_content(capacity: int) -> None:
    output = Output(capacity)
    expected = b""
    for length in range(40):
        piece = bytes([length]) * length
        output.append(piece)
        expected += piece
        assert output.length == len(expected) <= output.capacity == len(output.data)
    output.reserve(100_000)
    assert output.capacity - output.length >= 100_000
    assert output.take() == expected


@ENCODINGS
def test_the_longest_numbers_fit(encoding: int) -> None:
    lowest = -(1 << 63)
    wanted = {
        "encoding": encoding, "code": -0x8000, "opaque": -0x80000000, "body": b"",
        "fields": {"n": lowest, "id": (b"\xff" * 20, lowest)},
    }  # fmt: skip
    output = Output(1)
    for _ in range(3):
        write(output, wanted)
    taken = output.take()
    assert len(taken) % 3 == 0
    check(read_frame(taken[: len(taken) // 3]), wanted)


@pytest.mark.parametrize("host", [bytes([127, 0, 0, 1]), bytes(range(16))])
def test_offset_ids_are_those_of_the_broker(host: bytes) -> None:
    output = Output()
    output.begin(BINARY, 0, 1)
    output.field_offset_id(b"msgId", host + (10911).to_bytes(4, "big"), 123456)
    output.end(0)
    request = read_frame(output.take())
    assert request.text(b"msgId") == encode_offset_id(host, 10911, 123456)


@ENCODINGS
def test_response_has_the_response_flag(encoding: int) -> None:
    frame = response(17, -9, encoding, ext={"k": "v"}, body=b"b", remark='no "topic"')
    request = read_frame(frame)
    assert request.is_response()
    assert (request.code, request.opaque, request.encoding) == (17, -9, encoding)
    assert (request.ext(), request.body(), request.remark()) == ({"k": "v"}, b"b", 'no "topic"')


@ENCODINGS
def test_a_response_that_is_too_long_is_refused_with_a_way_out(encoding: int) -> None:
    with pytest.raises(ResponseTooLong, match="the limit is 16777216") as found:
        response(0, 1, encoding, body=bytes(FRAME_BYTES_MAX))
    assert "in pages" in found.value.hint


@ENCODINGS
def test_encode_errors_name_the_exceeded_limit(encoding: int) -> None:
    length = len(encode(1, {"a": "b"}, b"body", encoding=encoding))
    fitting = encode(1, {"a": "b"}, b"body", encoding=encoding, frame_bytes_max=length)
    assert len(fitting) == length
    with pytest.raises(FrameError, match=rf"{length} bytes.*\(frame_bytes_max\)") as found:
        encode(1, {"a": "b"}, b"body", encoding=encoding, frame_bytes_max=length - 1)
    assert (found.value.figure, found.value.limit) == (length, length - 1)


def test_encode_refuses_values_that_do_not_fit_the_binary_header() -> None:
    assert read_frame(encode(0x7FFF, {"k" * 0x7FFF: "v"}, encoding=BINARY)).code == 0x7FFF
    with pytest.raises(FrameError, match="32768 bytes, the limit is 32767"):
        encode(1, {"k" * 0x8000: "v"}, encoding=BINARY)
    for code in (0x8000, -0x8001, 200050):
        with pytest.raises(FrameError, match=f"code {code} does not fit"):
            encode(code, encoding=BINARY)


@ENCODINGS
def test_a_lone_surrogate_becomes_a_question_mark(encoding: int) -> None:
    request = read_frame(encode(1, {"a\ud83d": "\ude80b"}, encoding=encoding, remark="x\ud83d\n"))
    assert (request.ext(), request.remark()) == ({"a?": "?b"}, "x?\n")
