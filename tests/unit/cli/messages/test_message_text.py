"""Messages as text: bodies, control characters, hex."""

import json

import pytest

from penstock.cli.messages.message_text import (
    body_text,
    hex_dump,
    message_details,
    one_line,
    preview,
    stored_json,
)
from penstock.cli.remote import json_text
from penstock.client.received_message import decode_records
from tests.unit.client.consumer.consumer_kit import record


@pytest.mark.parametrize(
    ("body", "form", "text"),
    [
        (b'{"a": [1, "\xc3\xa4"]}', "auto", '{\n  "a": [\n    1,\n    "ä"\n  ]\n}'),
        (b'{"a": 1}', "text", '{"a": 1}'),
        (b"one\ntwo\x1b[31m", "auto", "one\ntwo\\x1b[31m"),
        (b"\xff\x00", "text", "\\xff\\x00"),
        (b"\xff\x00", "json", "\\xff\\x00"),
        (b"\xff\x00", "auto", hex_dump(b"\xff\x00")),
        (b"hi", "hex", hex_dump(b"hi")),
        (b"hi", "none", ""),
        (b"\x81\xa1a\xc4\x01\xff", "auto", '{\n  "a": "0xff"\n}'),
        (b"\x81\xa1a\x01", "msgpack", '{\n  "a": 1\n}'),
        (b"hi", "msgpack", hex_dump(b"hi")),
        (b"[" * 100_000, "auto", "[" * 100_000),
        (b'"\\u001b[31m"', "auto", '"\\u001b[31m"'),
    ],
)
def test_bodies(body: bytes, form: str, text: str) -> None:
    assert body_text(body, form) == text


def test_hex_dump() -> None:
    first, second = hex_dump(bytes(range(0x41, 0x41 + 17))).splitlines()
    assert first == "00000000  41 42 43 44 45 46 47 48 49 4a 4b 4c 4d 4e 4f 50  ABCDEFGHIJKLMNOP"
    assert second.split() == ["00000010", "51", "Q"]
    assert hex_dump(b"\x00\x7f").endswith("..")


def test_nothing_of_a_message_controls_the_terminal() -> None:
    evil = "\x1b]0;x\x07\x9b31m\n"
    data = record(0, evil.encode(), properties={"TAGS": evil, "KEYS": evil, evil[:3]: evil})
    (message,) = decode_records(data, "broker-a")
    text = message_details(message, "auto") + preview(message) + one_line(evil)
    assert not set(text) & {chr(c) for c in (*range(0x20), *range(0x7F, 0xA0))} - {"\n"}


def test_a_preview_is_short() -> None:
    (message,) = decode_records(record(0, b"x" * 500), "broker-a")
    assert preview(message) == "x" * 59 + "…"
    (message,) = decode_records(record(0, b"short"), "broker-a")
    assert preview(message) == "short"


def test_json_names_the_topic_that_a_message_was_sent_to() -> None:
    dead = record(0, topic="%DLQ%billing", properties={"RETRY_TOPIC": "Orders"})
    (message,) = decode_records(dead, "broker-a")
    values = stored_json(message)
    assert (values["topic"], values["stored_topic"]) == ("Orders", "%DLQ%billing")
    delayed = record(
        0,
        topic="SCHEDULE_TOPIC_XXXX",
        properties={"REAL_TOPIC": "%RETRY%billing", "RETRY_TOPIC": "Orders"},
    )
    (message,) = decode_records(delayed, "broker-a")
    assert stored_json(message)["topic"] == "Orders"


def test_json_can_not_control_the_terminal() -> None:
    value = {"body": "\x1b[31m \x9b31m \x7f 日本"}
    text = json_text(value)
    assert text == r'{"body": "\u001b[31m \u009b31m \u007f 日本"}'
    assert json.loads(text) == value
