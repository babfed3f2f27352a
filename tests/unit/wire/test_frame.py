"""Frames in both encodings: round trips, streams, numbers and limits."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import FrameError, HeaderError
from penstock.wire.fields import FIELDS_MAX, LANGUAGES
from penstock.wire.frame import BINARY, FRAME_BYTES_MAX, HEADER_BYTES_MAX, JSON, Request
from penstock.wire.output import encode

from .guarded import bound, read_frame

ENCODINGS = pytest.mark.parametrize("encoding", [JSON, BINARY])
I64_MAX = (1 << 63) - 1

i16 = st.sampled_from((-0x8000, -1, 0, 0x7FFF)) | st.integers(-0x8000, 0x7FFF)
i32 = st.sampled_from((-0x80000000, -1, 0, 0x7FFFFFFF)) | st.integers(-0x80000000, 0x7FFFFFFF)
texts = st.text(max_size=12) | st.text("\x00\x01\x02\t\n\"\\/\x7f'é中\U0001f680", max_size=12)
exts = st.dictionaries(texts, texts, max_size=12)
commands = st.fixed_dictionaries(
    {
        "code": i16,
        "ext": exts,
        "body": st.binary(max_size=40),
        "flag": i32,
        "opaque": i32,
        "remark": st.none() | texts,
        "language": st.integers(0, len(LANGUAGES) - 1),
        "version": st.integers(0, 0x7FFF),
    }
)

Command = dict[str, Any]


def seen(request: Request) -> Command:
    return {
        "code": request.code,
        "ext": request.ext(),
        "body": request.body(),
        "flag": request.flag,
        "opaque": request.opaque,
        "remark": request.remark(),
        "language": request.language,
        "version": request.version,
    }


def expected(command: Command, encoding: int) -> Command:
    """The decoded values: an empty remark is None, and in binary headers any empty text is None."""
    ext = command["ext"]
    if encoding == BINARY:
        ext = {name: value for name, value in ext.items() if name and value}
    return {**command, "ext": ext, "remark": command["remark"] or None}


def frame_of(header: bytes, *, encoding: int, body: bytes = b"") -> bytes:
    mark = encoding << 24 | len(header)
    return (
        (4 + len(header) + len(body)).to_bytes(4, "big") + mark.to_bytes(4, "big") + header + body
    )


def frame_with(*fields: tuple[bytes, bytes], encoding: int) -> bytes:
    """A frame with exactly the given fields, duplicates included."""
    if encoding == JSON:
        pairs = b",".join(b'"%s":"%s"' % field for field in fields)
        return frame_of(b'{"code":1,"extFields":{%s}}' % pairs, encoding=JSON)
    ext = b"".join(
        len(name).to_bytes(2, "big") + name + len(value).to_bytes(4, "big") + value
        for name, value in fields
    )
    return frame_of(bytes(17) + len(ext).to_bytes(4, "big") + ext, encoding=BINARY)


@ENCODINGS
@given(command=commands)
def test_frames_round_trip(encoding: int, command: Command) -> None:
    request = read_frame(encode(**command, encoding=encoding))
    assert request.encoding == encoding
    assert seen(request) == expected(command, encoding)
    for name, value in request.ext().items():
        assert request.text(name.encode()) == value
        assert request.raw(name.encode()) == value.encode()
    assert request.text(b"no such field") is None


@given(command=commands, code=i32)
def test_json_carries_codes_that_binary_can_not(command: Command, code: int) -> None:
    assert read_frame(encode(**{**command, "code": code})).code == code
    if not -0x8000 <= code <= 0x7FFF:
        with pytest.raises(FrameError, match=str(code)):
            encode(**{**command, "code": code}, encoding=BINARY)


@given(found=st.lists(st.tuples(commands, st.sampled_from((JSON, BINARY))), max_size=6))
def test_consecutive_frames_of_one_buffer_are_decoded(found: list[tuple[Command, int]]) -> None:
    frames = [encode(**command, encoding=encoding) for command, encoding in found]
    request = bound(b"".join(frames) + b"\x00\x00")
    at, end = 0, sum(map(len, frames)) + 2
    for (command, encoding), frame in zip(found, frames, strict=True):
        assert request.read(at, end) == len(frame)
        assert seen(request) == expected(command, encoding)
        at += len(frame)
    assert request.read(at, end) == 0
    assert request.missing == 6


@ENCODINGS
@given(command=commands)
def test_a_frame_that_arrives_byte_by_byte_is_decoded_when_complete(
    encoding: int, command: Command
) -> None:
    frame = encode(**command, encoding=encoding)
    request = bound(frame)
    for have in range(len(frame)):
        assert request.read(0, have) == 0
        assert 0 < request.missing <= len(frame) - have
        if have >= 8:
            assert request.missing == len(frame) - have
    assert request.read(0, len(frame)) == len(frame)
    assert seen(request) == expected(command, encoding)


@ENCODINGS
@given(command=commands, have=st.integers(0, 20))
def test_a_frame_is_complete_after_reading_the_missing_bytes_twice(
    encoding: int, command: Command, have: int
) -> None:
    frame = encode(**command, encoding=encoding)
    request = bound(frame)
    rounds = 0
    while request.read(0, have) == 0:
        have += request.missing
        rounds += 1
    assert have == len(frame)
    assert rounds <= 2


def test_a_request_keeps_nothing_of_the_previous_frame() -> None:
    first = encode(9, {"a": "1", "name": "x"}, b"body", opaque=5, flag=2, remark="r")
    second = frame_of(b"{}", encoding=JSON)
    request = bound(first + second)
    assert request.read(0, len(first)) == len(first)
    assert request.read(len(first), len(first) + len(second)) == len(second)
    blank = {"code": 0, "ext": {}, "body": b"", "flag": 0, "opaque": 0, "remark": None}
    assert seen(request) == {**blank, "language": 0, "version": 0}
    assert request.letter(ord("a")) == -1


@ENCODINGS
@pytest.mark.parametrize("flag", range(5))
def test_flags_distinguish_responses_and_one_way_requests(encoding: int, flag: int) -> None:
    request = read_frame(encode(1, flag=flag, encoding=encoding))
    assert request.is_response() == (flag in (1, 3))
    assert request.is_oneway() == (flag in (2, 3))


@ENCODINGS
@given(
    fields=st.lists(
        st.tuples(
            st.sampled_from((b"a", b"b", b"z", b"A", b"{", b"`", b"aa", b"topic")),
            st.sampled_from((b"1", b"2", b"3")),
        ),
        max_size=10,
    )
)
def test_the_last_of_duplicate_fields_is_used(
    encoding: int, fields: list[tuple[bytes, bytes]]
) -> None:
    request = read_frame(frame_with(*fields, encoding=encoding))
    last = dict(fields)
    assert request.count == len(fields)
    assert request.ext() == {name.decode(): value.decode() for name, value in last.items()}
    for name in (b"a", b"b", b"z", b"A", b"{", b"`", b"aa", b"topic"):
        field = request.find(name)
        assert request.raw(name) == last.get(name)
        assert (field >= 0) == (name in last)
        if len(name) == 1 and name.islower():
            assert request.letter(name[0]) == field
    assert request.letter(ord("y")) == -1


def number_of(text: bytes, encoding: int) -> int:
    request = read_frame(frame_with((b"n", text), encoding=encoding))
    value = request.number(request.find(b"n"))
    assert request.i64(b"n") == request.i64_or(b"n", 0) == value
    return value


@ENCODINGS
@given(value=st.integers(-(1 << 63), I64_MAX), zeros=st.integers(0, 25), plus=st.booleans())
def test_numbers_are_parsed_as_by_java(encoding: int, value: int, zeros: int, plus: bool) -> None:
    sign = "-" if value < 0 else "+" if plus else ""
    assert number_of(f"{sign}{'0' * zeros}{abs(value)}".encode(), encoding) == value


@ENCODINGS
@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"+5", 5), (b"-5", -5), (b"-0", 0), (b"007", 7),
        (b"9223372036854775807", I64_MAX), (b"-9223372036854775808", -I64_MAX - 1),
        (b"+9223372036854775807", I64_MAX), (b"0" * 6000 + b"12", 12),
    ],
)  # fmt: skip
def test_unusual_forms_of_numbers_are_accepted(encoding: int, text: bytes, value: int) -> None:
    assert number_of(text, encoding) == value


@ENCODINGS
@pytest.mark.parametrize(
    "text",
    [
        b" ", b" 5", b"5 ", b"1.0", b"1e3", b"+", b"-", b"--5", b"+-5", b"5-", b"0x10", b"1_000",
        b"true", b"5L", b"9223372036854775808", b"-9223372036854775809", b"99999999999999999999",
        b"9" * 6000, b"-" + b"9" * 6000, b"1" * 18 + b"x",
    ],
)  # fmt: skip
def test_text_that_java_can_not_parse_is_not_a_number(encoding: int, text: bytes) -> None:
    with pytest.raises(HeaderError, match="not a 64-bit number"):
        number_of(text, encoding)


def test_an_empty_text_is_not_a_number() -> None:
    with pytest.raises(HeaderError, match="not a 64-bit number"):
        number_of(b"", JSON)


@ENCODINGS
def test_the_error_for_a_missing_number_names_the_field(encoding: int) -> None:
    request = read_frame(frame_with((b"queueId", b"2147483648"), encoding=encoding))
    with pytest.raises(HeaderError, match="queueOffset is missing"):
        request.i64(b"queueOffset")
    with pytest.raises(HeaderError, match="missing"):
        request.number(-1)
    with pytest.raises(HeaderError, match=r"queueId is out of range: 2147483648"):
        request.i32(b"queueId")
    assert request.i64_or(b"queueOffset", -3) == -3


@ENCODINGS
@pytest.mark.parametrize("value", [-0x80000000, -1, 0x7FFFFFFF])
def test_i32_accepts_its_full_range(encoding: int, value: int) -> None:
    request = read_frame(frame_with((b"queueId", str(value).encode()), encoding=encoding))
    assert request.i32(b"queueId") == value


@ENCODINGS
@pytest.mark.parametrize(
    ("text", "truth"),
    [
        (b"true", True), (b"TRUE", True), (b"tRuE", True), (b"false", False), (b"1", False),
        (b"true ", False), (b"tru", False), (b"TRUTH", False), (b"yes!", False), (b"tsue", False),
    ],
)  # fmt: skip
def test_only_true_in_any_case_is_true(encoding: int, text: bytes, truth: bool) -> None:
    request = read_frame(frame_with((b"k", text), encoding=encoding))
    assert request.truth(request.find(b"k")) is truth
    assert request.flag_or(b"k", not truth) is truth
    assert request.flag_or(b"absent", True) is True
    assert request.truth(-1) is False


def test_a_frame_over_the_limit_is_refused_as_soon_as_its_length_is_known() -> None:
    data = FRAME_BYTES_MAX.to_bytes(4, "big")
    for have in range(4):
        assert bound(data).read(0, have) == 0
    with pytest.raises(FrameError, match=r"16777220 bytes, the limit is 16777216 \(frame_bytes_ma"):
        bound(data).read(0, 4)
    largest = bound((FRAME_BYTES_MAX - 4).to_bytes(4, "big") + bytes(4))
    assert largest.read(0, 8) == 0
    assert largest.missing == FRAME_BYTES_MAX - 8


@ENCODINGS
def test_frame_and_header_limits_are_exact(encoding: int) -> None:
    frame = encode(1, {"a": "b"}, b"body", encoding=encoding)
    header_length = len(frame) - 8 - len(b"body")
    read_frame(frame, frame_bytes_max=len(frame), header_bytes_max=header_length)
    with pytest.raises(FrameError, match=rf"{len(frame)} bytes.* \(frame_bytes_max\)"):
        read_frame(frame, frame_bytes_max=len(frame) - 1)
    with pytest.raises(FrameError, match=rf"{header_length} bytes.* \(header_bytes_max\)") as found:
        bound(frame, header_bytes_max=header_length - 1).read(0, 8)
    assert (found.value.figure, found.value.limit) == (header_length, header_length - 1)


@pytest.mark.parametrize("length", [-0x80000000, -1, 0, 3])
def test_a_length_without_space_for_the_header_length_is_refused(length: int) -> None:
    data = length.to_bytes(4, "big", signed=True) + bytes(8)
    for have in (4, 8, 12):
        with pytest.raises(FrameError, match=f"invalid frame length {length}"):
            bound(data).read(0, have)


@pytest.mark.parametrize("header_length", [1, 5, HEADER_BYTES_MAX, 0xFFFFFF])
def test_a_header_longer_than_its_frame_is_refused(header_length: int) -> None:
    data = (4).to_bytes(4, "big") + header_length.to_bytes(4, "big")
    with pytest.raises(FrameError, match=f"header of {header_length} bytes in a frame of 4"):
        bound(data).read(0, 8)


@pytest.mark.parametrize("encoding", [2, 3, 127, 128, 255])
def test_an_unknown_encoding_is_refused(encoding: int) -> None:
    data = frame_of(b"", encoding=encoding)
    with pytest.raises(FrameError, match=f"unknown header encoding {encoding}"):
        bound(data).read(0, 8)


@ENCODINGS
def test_the_number_of_fields_is_limited(encoding: int) -> None:
    fields = [(b"k%d" % i, b"v") for i in range(FIELDS_MAX + 1)]
    assert read_frame(frame_with(*fields[:-1], encoding=encoding)).count == FIELDS_MAX
    with pytest.raises(HeaderError, match=f"more than {FIELDS_MAX} fields"):
        read_frame(frame_with(*fields, encoding=encoding))


def test_a_released_request_keeps_no_reference_to_its_buffer() -> None:
    frame = encode(1, {"a": '"'}, encoding=JSON)
    buffer = bytearray(frame)
    request = Request()
    request.bind(memoryview(buffer))
    request.read(0, len(frame))
    request.release()
    buffer.extend(b"more")  # BufferError while anyone holds a view
    assert json.loads(frame[8:])["code"] == 1
