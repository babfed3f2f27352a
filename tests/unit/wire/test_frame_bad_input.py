"""Unusual headers: lenient JSON, invalid JSON, and every mutation of valid frames.

Whatever the bytes, a frame decodes or raises a WireError, and what it decodes to does not depend
on the bytes around it.
"""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import HeaderError
from penstock.wire.frame import BINARY, JSON
from penstock.wire.json_header import DEPTH_MAX
from penstock.wire.output import encode

from .guarded import Outcome, frame_outcome, outcome_within_guards, read_frame
from .test_frame import ENCODINGS, frame_of, frame_with

SAMPLE_EXT = {
    "a": "group",
    "b": "T\x01中\x02",
    "g": "1700000000123",
    "k": "true",
    "batch": "é\U0001f680",
}
SAMPLES = {
    encoding: encode(310, SAMPLE_EXT, b"body", opaque=-7, remark='no "topic"\n', encoding=encoding)
    for encoding in (JSON, BINARY)
}


def header(text: str | bytes) -> bytes:
    return frame_of(text.encode() if isinstance(text, str) else text, encoding=JSON, body=b"xyz")


def ext_of(text: str) -> dict[str, str]:
    return read_frame(header(f'{{"code":1,"extFields":{{{text}}}}}')).ext()


def outcome(data: bytes) -> Outcome:
    return outcome_within_guards(data, frame_outcome, changes=True)


scalars = st.none() | st.booleans() | st.integers(-(1 << 40), 1 << 40) | st.text(max_size=8)
nested = st.recursive(
    scalars | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=12,
)  # fmt: skip
KNOWN = {"code", "flag", "opaque", "version", "language", "remark", "extFields"}
strangers = st.dictionaries(st.text(max_size=6).filter(lambda name: name not in KNOWN), nested)


def as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value)


@given(
    ext=st.dictionaries(st.text(max_size=6), scalars, max_size=8),
    strange=strangers,
    code=st.integers(-(1 << 31), (1 << 31) - 1),
    ascii_only=st.booleans(),
    indent=st.sampled_from((None, 0, 3, "\t", "\r\n")),
    ext_first=st.booleans(),
)
def test_json_headers_are_decoded_as_by_the_json_module(
    ext: dict[str, Any], strange: dict[str, Any], code: int, ascii_only: bool, indent: Any,
    ext_first: bool,
) -> None:  # fmt: skip
    known = {"extFields": ext, "code": code, "remark": '"\\/\b\f\n\r\t\u2028'}
    content = {**known, **strange} if ext_first else {**strange, **known}
    request = read_frame(header(json.dumps(content, ensure_ascii=ascii_only, indent=indent)))
    assert request.code == code
    assert request.remark() == known["remark"]
    assert request.ext() == {name: as_text(v) for name, v in ext.items() if v is not None}
    assert request.body() == b"xyz"


def test_whitespace_is_accepted_between_tokens() -> None:
    request = read_frame(header(' \t\r\n{ "code" : 5 , "extFields" : { "a" : "b" , "c" : 1 } } \n'))
    assert (request.code, request.ext()) == (5, {"a": "b", "c": "1"})


def test_null_is_the_same_as_missing() -> None:
    text = '{"extFields":null,"remark":null,"language":null,"code":3,"other":null}'
    request = read_frame(header(text))
    assert (request.code, request.ext(), request.remark()) == (3, {}, None)
    assert ext_of('"a":null,"b":"null"') == {"b": "null"}


def test_plain_numbers_and_literals_are_kept_as_text() -> None:
    found = ext_of('"a":-1,"b":true,"c":false,"d":1.5E+3,"e":"7"')
    assert found == {"a": "-1", "b": "true", "c": "false", "d": "1.5E+3", "e": "7"}


def test_numbers_of_the_header_may_be_quoted() -> None:
    request = read_frame(header('{"code":"105","opaque":"-7"}'))
    assert (request.code, request.opaque) == (105, -7)


def test_an_unknown_language_is_other() -> None:
    assert read_frame(header('{"language":"COBOL"}')).language == 7
    assert read_frame(header('{"language":"RUST"}')).language == 12


@pytest.mark.parametrize(
    ("escaped", "text"),
    [
        (r"\"\\\/\b\f\n\r\t", '"\\/\b\f\n\r\t'),
        (r"\u0001\u0002\u0000", "\x01\x02\x00"),
        (r"\u00e9\u4e2D\uFFFF", "é中\uffff"),
        (r"\u007f\u0080\u07ff\u0800", "\x7f\x80\u07ff\u0800"),
        (r"\ud7ff\ue000", "\ud7ff\ue000"),
        (r"\ud83d\ude80!", "\U0001f680!"),
        (r"\uDBFF\uDFFF", "\U0010ffff"),
        (r"\ud83d", "?"),
        (r"\ud83d!", "?!"),
        (r"\ude80\ud83d", "??"),
        (r"\ud83d\ud83d\ude80", "?\U0001f680"),
        (r"\ud83d\u0041\n", "?A\n"),
        (r"\ud83d\\n", "?\\n"),
        ("raw \x01 tab \t", "raw \x01 tab \t"),
    ],
)
def test_escapes_are_decoded(escaped: str, text: str) -> None:
    assert ext_of(f'"before":"x","{escaped}k":"{escaped}","after":"y"') == {
        "before": "x",
        f"{text}k": text,
        "after": "y",
    }


def test_bytes_that_are_not_utf8_are_replaced() -> None:
    for encoding in (JSON, BINARY):
        request = read_frame(frame_with((b"k\xff", b"a\xc3"), encoding=encoding))
        assert request.ext() == {"k\ufffd": "a\ufffd"}
        assert request.raw(b"k\xff") == b"a\xc3"


@pytest.mark.parametrize("brackets", ["[]", "{}"])
def test_unknown_members_are_skipped_up_to_a_depth(brackets: str) -> None:
    def nested_to(depth: int) -> bytes:
        inside = '"x":' if brackets == "{}" else ""
        value = (brackets[0] + inside) * (depth - 1) + brackets + brackets[1] * (depth - 1)
        return header(f'{{"u":{value},"code":4}}')

    assert read_frame(nested_to(DEPTH_MAX)).code == 4
    with pytest.raises(HeaderError, match=f"deeper than {DEPTH_MAX}"):
        read_frame(nested_to(DEPTH_MAX + 1))


def test_brackets_inside_skipped_strings_do_not_count() -> None:
    assert read_frame(header(r'{"u":["]}\"]",{"}":"\\"}],"code":4}')).code == 4


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "{", "}", "[]", "null", "{}x", "{}{}", '{"code"}', '{"code":}', '{"code":1',
        '{"code":1,', '{"code":1,}', '{"code":1 "flag":2}', '{code:1}', "{'code':1}", '{"code',
        '{"code":1.5}', '{"code":2147483648}', '{"code":-2147483649}', '{"code":12345678901}',
        '{"code":true}', '{"code":{}}', '{"code":"1x"}', '{"code":-}', '{"code":""}',
        '{"extFields":[]}', '{"extFields":"a"}', '{"extFields":{"a":{}}}',
        '{"extFields":{"a":[1]}}',
        '{"extFields":{"a"}}', '{"extFields":{"a":"b"', '{"extFields":{"a":"b"]}', '{"extFields":{',
        r'{"a":"\x41"}', r'{"a":"\u12G4"}', r'{"a":"\u12"}', r'{"a":"\ud83d\u00"}', '{"a":"\\',
        r'{"a":"\"}', r'{"a":"\"\\', r'{"a":"\"\u', r'{"a":"\"\u1', r'{"a":"\"\u123',
        r'{"a":"\"\ud83d\u', r'{"a":"\"\ud83d\u123', '{"u":[', '{"u":[[]', '{"u":["]', '{"u":',
    ],
)  # fmt: skip
def test_invalid_headers_are_refused(text: str) -> None:
    found = outcome(frame_of(text.encode(), encoding=JSON))  # nothing between it and the guards
    assert found[0] is HeaderError
    assert outcome(header(text)) == found


@pytest.mark.parametrize("length", range(21))
def test_a_binary_header_shorter_than_its_fixed_part_is_refused(length: int) -> None:
    assert outcome(frame_of(bytes(length), encoding=BINARY))[0] is HeaderError


@pytest.mark.parametrize("edited", [-0x80000000, -1, 1, 0x7FFF, 0x7FFFFFFF])
@pytest.mark.parametrize("at", [13, 17, 23], ids=["remark", "fields", "value"])
def test_lengths_that_exceed_a_binary_header_are_refused(at: int, edited: int) -> None:
    plain = bytearray(frame_with((b"", b""), encoding=BINARY))
    assert outcome(bytes(plain))[:2] == (len(plain), BINARY)
    plain[8 + at : 12 + at] = edited.to_bytes(4, "big", signed=True)
    assert outcome(bytes(plain))[0] is HeaderError


def test_a_field_that_exceeds_the_fields_of_a_binary_header_is_refused() -> None:
    """Every length of the fields with every length of a name: `ext` is the last of the buffer."""
    for length in range(1, 14):
        for name_length in (-1, *range(16)):
            ext = (name_length.to_bytes(2, "big", signed=True) + bytes(12))[:length]
            found = outcome(frame_of(bytes(17) + length.to_bytes(4, "big") + ext, encoding=BINARY))
            # The rest is zero: empty names with empty values, which fit if they end at the end.
            rest = length - 6 - name_length if name_length >= 0 and length >= 2 else -1
            if length == 1 or rest < 0 or rest % 6:
                assert found[0] is HeaderError
            else:
                assert found[8] == {}


@ENCODINGS
def test_every_bit_flip_decodes_or_raises_a_wire_error(encoding: int) -> None:
    frame = SAMPLES[encoding]
    good = outcome(frame)
    changed = 0
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        changed += outcome(bytes(flipped)) != good
    assert changed > 6 * len(frame)  # some bits have no effect


@ENCODINGS
def test_every_truncation_waits_for_the_rest(encoding: int) -> None:
    frame = SAMPLES[encoding]
    for length in range(len(frame)):
        missing = len(frame) - length if length >= 8 else 8 - length
        assert outcome(frame[:length]) == (0, missing)


@ENCODINGS
def test_every_truncation_with_a_corrected_length_decodes_or_raises_a_wire_error(
    encoding: int,
) -> None:
    frame = SAMPLES[encoding]
    header_length = len(frame) - 8 - len(b"body")
    for length in range(header_length):
        assert outcome(frame_of(frame[8 : 8 + length], encoding=encoding))[0] is HeaderError
    whole = outcome(frame_of(frame[8 : 8 + header_length], encoding=encoding))
    assert whole[2:5] == (310, 0, -7)


edits = st.lists(
    st.tuples(st.sampled_from(("set", "insert", "cut", "length", "mark")), st.integers(0, 400),
              st.binary(min_size=1, max_size=6), st.integers(-9, 9)),
    min_size=1, max_size=4,
)  # fmt: skip


def edit(frame: bytes, how: str, at: int, data: bytes, step: int) -> bytes:
    at %= len(frame)
    if how == "set":
        return frame[:at] + data + frame[at + len(data) :]
    if how == "insert":
        return frame[:at] + data + frame[at:]
    if how == "cut":
        return frame[:at] + frame[at + abs(step) + 1 :] or b"\0"
    first = 0 if how == "length" else 4
    number = int.from_bytes(frame[first : first + 4], "big") + step
    return frame[:first] + (number % (1 << 32)).to_bytes(4, "big") + frame[first + 4 :]


@ENCODINGS
@given(changes=edits, mend=st.booleans())
def test_mutations_decode_or_raise_a_wire_error(
    encoding: int, changes: list[tuple[str, int, bytes, int]], mend: bool
) -> None:
    frame = SAMPLES[encoding]
    for how, at, data, step in changes:
        frame = edit(frame, how, at, data, step)
    if mend:  # make the outer lengths right again, so that the header itself is reached
        frame = frame_of(frame[8:], encoding=encoding)
    outcome(frame)


tokens = st.sampled_from(
    ("{", "}", "[", "]", '"', ":", ",", "\\", "\\u", "d83d", "de80", "null", "true", "1", "-", " ",
     '"code"', '"extFields"', '"remark"', '"a"', '"extFields":{', "\\u00", "é", "\x00")
)  # fmt: skip


@given(pieces=st.lists(st.lists(tokens, max_size=24), min_size=8, max_size=8), open_=st.booleans())
def test_any_sequence_of_json_tokens_decodes_or_raises_a_wire_error(
    pieces: list[list[str]], open_: bool
) -> None:
    for piece in pieces:
        outcome(frame_of(("{" * open_ + "".join(piece)).encode(), encoding=JSON))


@given(noise=st.lists(st.binary(max_size=60), min_size=8, max_size=8))
def test_any_bytes_decode_or_raise_a_wire_error(noise: list[bytes]) -> None:
    for data in noise:
        outcome(data)
        outcome(frame_of(data, encoding=BINARY))
        outcome(frame_of(bytes(17) + len(data).to_bytes(4, "big") + data, encoding=BINARY))
