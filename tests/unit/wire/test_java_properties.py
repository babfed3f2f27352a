"""Java's .properties text, as java.util.Properties reads it."""

import contextlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.errors import BodyError
from penstock.wire.java_properties import BYTES_MAX, format_properties, parse_properties

LINES = [
    (b"brokerName=broker-a\n", {"brokerName": "broker-a"}),
    (b"brokerName = broker-a ", {"brokerName": "broker-a "}),
    (b"brokerName:broker-a\r\nbrokerId 0\rlistenPort\t10911",
     {"brokerName": "broker-a", "brokerId": "0", "listenPort": "10911"}),
    (b"namesrvAddr=10.0.0.1:9876;10.0.0.2:9876", {"namesrvAddr": "10.0.0.1:9876;10.0.0.2:9876"}),
    (b"# a=b\n   ! c=d\n\n  \t\ne=f#g", {"e": "f#g"}),
    (b"a=1\na=2", {"a": "2"}),
    (b"key", {"key": ""}),
    (b"=value", {"": "value"}),
    (b"a==b", {"a": "=b"}),
    (b"a : = b", {"a": "= b"}),
    (b"fruits = apple, \\\n      pear, \\\r\n  # fig", {"fruits": "apple, pear, # fig"}),
    (b"even=two\\\\\nodd=2", {"even": "two\\", "odd": "2"}),
    (b"last=one\\", {"last": "one"}),
    (b"a\\=b\\ c=d", {"a=b c": "d"}),
    (b"path=c:\\\\x\\ty\\q", {"path": "c:\\x\tyq"}),
    (b"cheese=\\u00e9\\uD83D\\uDE00", {"cheese": "é😀"}),
    ("城市=北京".encode(), {"城市": "北京"}),
    (b"caf\xe9=1", {"café": "1"}),
    (b"\xef\xbb\xbfa=1", {"a": "1"}),
    (b"half=\\ud83d!", {"half": "\ufffd!"}),
    (b"", {}),
]  # fmt: skip


@pytest.mark.parametrize(("data", "values"), LINES)
def test_text_is_parsed_as_by_java(data: bytes, values: dict[str, str]) -> None:
    assert parse_properties(data) == values


@pytest.mark.parametrize("data", [b"ok=1\nbad=\\u12", b"ok=1\nbad=\\u12zz"])
def test_an_invalid_escape_is_reported_with_its_line(data: bytes) -> None:
    with pytest.raises(BodyError, match="line 2"):
        parse_properties(data)


def test_written_text_is_readable() -> None:
    values = {"namesrvAddr": "a:1;b:2", "deleteWhen": "04", "empty": "", "城": "#x = y"}
    written = b"deleteWhen=04\nempty=\nnamesrvAddr=a:1;b:2\n\\u57CE=#x = y\n"
    assert format_properties(values) == written


TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.dictionaries(TEXT, TEXT))
@example({" a=b:c#d!": " \t\n\r\f\\ "})
@example({"": "😀\x00\x7f\x85"})
def test_properties_round_trip(values: dict[str, str]) -> None:
    data = format_properties(values)
    assert data.isascii()
    assert parse_properties(data) == values


@given(st.binary())
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    with contextlib.suppress(BodyError):
        parse_properties(data)


def test_a_text_that_would_block_the_event_loop_is_refused() -> None:
    text = b"a=" + b"x" * (BYTES_MAX - 2)
    assert len(parse_properties(text)["a"]) == BYTES_MAX - 2
    with pytest.raises(BodyError, match="the limit is 65536"):
        parse_properties(text + b"x")
