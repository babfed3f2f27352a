"""Exports: whole bodies and all properties, page by page, with the fields of the command line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.client.admin.async_admin import MessagePage
from penstock.client.diagnosis.exported_message import exported_message
from penstock.client.diagnosis.search import SearchResult
from penstock.client.received_message import ReceivedMessage, decode_records
from penstock.errors import PeerTimeout
from penstock.wire.bodies.client_bodies import MessageQueue
from penstock.wire.codes import SYS_COMPRESSED
from tests.unit.client.consumer.consumer_kit import record
from tests.unit.console.console_kit import TestedConsole

LONG = json.dumps({"text": "x" * 1_886})
PROPERTIES = {"KEYS": "k1 k2", "TAGS": "paid", "source": "web", "Ä": "ö"}
QUEUE = MessageQueue("orders", "broker-a", 3)


def message(body: bytes, offset: int = 0, **values: Any) -> ReceivedMessage:
    [found] = decode_records(record(offset, body, properties=PROPERTIES, **values), "broker-a")
    return found


@pytest.fixture
def console(tmp_path: Path) -> Iterator[TestedConsole]:
    with TestedConsole(tmp_path) as found:
        yield found


def two_pages(console: TestedConsole, method: str, last: MessagePage | Exception) -> None:
    """The first page has one message, and there is another page."""

    def answer(*_: Any, resume: Any = None, **named: Any) -> MessagePage:
        if resume is None:
            return MessagePage((message(LONG.encode()),), {QUEUE: 1})
        if isinstance(last, Exception):
            raise last
        return last

    console.admin.answers[method] = answer


def test_a_body_that_can_not_be_decompressed_is_exported_as_it_is_stored() -> None:
    row = exported_message(message(b"no zlib", sys_flag=SYS_COMPRESSED))
    assert row["body_base64"] == "bm8gemxpYg=="
    assert "decompressed" in str(row["problem"])


def test_a_search_is_exported_with_bodies_and_properties(console: TestedConsole) -> None:
    assert len(LONG) == 1_898
    two_pages(console, "browse", MessagePage((message(b"second", 1),), None))
    answer = console.get("/messages/export?topic=orders&q=tag:paid")
    assert answer.headers["content-type"] == "application/x-ndjson"
    assert 'filename="orders.jsonl"' in answer.headers["content-disposition"]
    rows = [json.loads(line) for line in answer.text.splitlines()]
    assert [row["body"] for row in rows] == [LONG, "second"]
    assert rows[0]["properties"] == PROPERTIES
    assert {named["tags"] for _, _, named in console.admin.calls} == {"paid"}


def test_an_export_filters_by_body(console: TestedConsole) -> None:
    two_pages(console, "browse", MessagePage((message(b"second", 1),), None))
    answer = console.get("/messages/export?topic=orders&q=body:second")
    [row] = [json.loads(line) for line in answer.text.splitlines()]
    assert row["body"] == "second"


def test_an_export_with_the_oldest_first_does_not_follow_new_messages(
    console: TestedConsole,
) -> None:
    two_pages(console, "browse", MessagePage((), None))
    console.get("/messages/export?topic=orders&order=oldest")
    assert all(named["until"] is not None for _, _, named in console.admin.calls)
    console.admin.calls.clear()
    console.get("/messages/export?topic=orders")
    assert all(named["until"] is None for _, _, named in console.admin.calls)


def test_all_dead_letters_are_exported(console: TestedConsole) -> None:
    two_pages(console, "dead_letters", MessagePage((message(b"second", 1),), None))
    answer = console.get("/dead-letters/billing/export")
    rows = [json.loads(line) for line in answer.text.splitlines()]
    assert [row["body"] for row in rows] == [LONG, "second"]
    assert all("stored_topic" in row for row in rows)
    assert 'filename="dead-letters-billing.jsonl"' in answer.headers["content-disposition"]


def test_an_export_that_fails_at_once_is_an_error(console: TestedConsole) -> None:
    console.admin.answers["browse"] = PeerTimeout("late")
    assert console.get("/messages/export?topic=orders").status_code == 502
    assert console.get("/messages/export").status_code == 400


def test_an_export_that_fails_on_the_way_has_no_end(
    console: TestedConsole, caplog: pytest.LogCaptureFixture
) -> None:
    two_pages(console, "browse", PeerTimeout("late"))
    with pytest.raises(AssertionError):  # httpx: the response is not complete
        console.get("/messages/export?topic=orders")
    assert "an export broke off: late" in caplog.text


def test_an_export_of_a_key_says_what_is_missing(
    console: TestedConsole, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def found(*_: Any, **named: Any) -> SearchResult:
        return SearchResult((message(b"one"),), "searched", (), ("broker-b can't be reached",))

    monkeypatch.setattr("penstock.console.api.messages_api.find_messages", found)
    answer = console.get("/messages/export?q=key:k1")
    assert json.loads(answer.text)["keys"] == ["k1", "k2"]
    assert answer.headers["x-penstock-partial"] == "broker-b can't be reached"


def test_one_message_is_exported_whole(console: TestedConsole) -> None:
    console.admin.answers["message_at"] = message(LONG.encode())
    answer = console.get("/message/orders/broker-a/3/0/export")
    assert answer.json()["body"] == LONG
    assert answer.json()["properties"] == PROPERTIES
