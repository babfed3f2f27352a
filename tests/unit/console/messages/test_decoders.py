"""Decoders of bodies."""

import msgspec
import pytest

from penstock.console.messages.decoders import decode_body, summary


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"a": 1}', "json"),
        (b"[1, 2]", "json"),
        (b"hello", "text"),
        (b"42", "text"),
        (b'{"a": ', "text"),
        (msgspec.msgpack.encode({"a": b"\x00"}), "msgpack"),
        (b"\x00\x01", "hex"),
        (b"\xff\xfe", "hex"),
        (b"", "text"),
    ],
)
def test_the_most_specific_format_is_found(body: bytes, name: str) -> None:
    assert decode_body(body)["format"] == name


def test_json_is_indented_and_hex_is_always_there() -> None:
    formats = decode_body('{"ä": [1]}'.encode())["formats"]
    assert isinstance(formats, dict)
    assert formats["json"] == '{\n  "ä": [\n    1\n  ]\n}'
    assert formats["hex"].startswith("00000000  7b 22 c3 a4 22 3a 20 5b 31 5d 7d")
    assert formats["hex"].endswith('{"..": [1]}')


def test_bytes_and_keys_of_messagepack_become_text() -> None:
    body = msgspec.msgpack.encode({1: b"\xff", "t": (True, None)})
    formats = decode_body(body)["formats"]
    assert isinstance(formats, dict)
    assert formats["msgpack"] == '{\n  "1": "0xff",\n  "t": [\n    true,\n    null\n  ]\n}'


def test_deeply_nested_json_is_text() -> None:
    body = b"[" * 100_000
    assert decode_body(body)["format"] == "text"


def test_a_long_body_is_cut() -> None:
    found = decode_body(b"x" * 300_000)
    assert (found["bytes"], found["shown_bytes"]) == (300_000, 256 * 1024)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"a\n b\t c", "a b c"),
        (b"\x00\x01", "0x0001"),
        (b"\xff", "0xff"),
        (b"x" * 200, "x" * 160 + "…"),
        ("ä".encode() * 1000, "ä" * 160 + "…"),
    ],
)
def test_summary(body: bytes, text: str) -> None:
    assert summary(body) == text
