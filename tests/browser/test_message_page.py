"""The page of a message: sending it again, consuming it now. Exports, and incomplete searches."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.client import Message

from .conftest import Open
from .console_page import ConsolePage
from .traffic import DEAD, Traffic

BODY = json.dumps({"text": "x" * 1_886})
SCANNED = 5_000


def open_message(open_page: Open, text: str) -> ConsolePage:
    page = open_page(f"/messages?topic=orders&q={text}")
    page.find("main tbody tr").click()
    page.page.wait_for_url("**/message/orders/**")
    page.find("[data-group=billing]").wait_for()
    return page


async def handled(traffic: Traffic, message_id: str, times: int) -> None:
    while traffic.received["billing"].count(message_id) < times:
        await asyncio.sleep(0.05)


def test_a_message_that_is_sent_again_reaches_the_group(open_page: Open, traffic: Traffic) -> None:
    receipt = traffic.send(Message("orders", "again", keys=["AGAIN-1"]))
    traffic.call(asyncio.wait_for(handled(traffic, receipt.message_id, 1), 30))
    page = open_message(open_page, "AGAIN-1")
    page.button("Send again").click()
    page.find("dialog select").select_option("billing")
    page.find("dialog [data-confirm]").click()
    page.expect("1 of 1 sent", "#report")
    traffic.call(asyncio.wait_for(handled(traffic, receipt.message_id, 2), 30))


def test_a_consumer_handles_a_message_again_now(open_page: Open, traffic: Traffic) -> None:
    receipt = traffic.send(Message("orders", "now", keys=["NOW-1"]))
    traffic.call(asyncio.wait_for(handled(traffic, receipt.message_id, 1), 30))
    [member] = traffic.call(traffic.admin.members("billing")).members
    page = open_message(open_page, "NOW-1")
    page.find("[data-group=billing]").get_by_role("button", name="Consume again").click()
    page.find("dialog [data-confirm]").click()
    page.expect(f"{member.client_id}: success", ".toasts")
    assert traffic.received["billing"].count(receipt.message_id) == 2


def exported(page: ConsolePage, button: str, path: Path) -> list[dict[str, Any]]:
    with page.page.expect_download() as started:
        page.button(button).click()
    assert started.value.failure() is None
    started.value.save_as(path)
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("query", ["topic=orders&q=tag:long", "q=LONG-1"])
def test_an_export_has_bodies_and_properties(
    open_page: Open, traffic: Traffic, tmp_path: Path, query: str
) -> None:
    if not traffic.call(traffic.admin.messages_by_key("orders", "LONG-1")):
        properties = {"source": "web", "note": "a=b"}
        traffic.send(Message("orders", BODY, tags="long", keys=["LONG-1"], properties=properties))
    page = open_page(f"/messages?{query}")
    page.rows()
    [row] = exported(page, "Export", tmp_path / "export")
    assert row["body"] == BODY
    assert len(row["body"]) == 1_898
    assert row["properties"]["source"] == "web"
    assert row["properties"]["note"] == "a=b"
    page.find("main tbody tr").click()
    page.page.wait_for_url("**/message/orders/**")
    [row] = exported(page, "Export", tmp_path / "one")
    assert row["body"] == BODY


def test_all_dead_letters_are_exported(open_page: Open, traffic: Traffic, tmp_path: Path) -> None:
    page = open_page("/dead-letters/mailer")
    page.rows()
    rows = exported(page, "Export all", tmp_path / "export")
    assert len(rows) == DEAD
    assert {row["stored_topic"] for row in rows} == {"%DLQ%mailer"}
    assert sorted(json.loads(row["body"])["invoice"] for row in rows) == list(
        range(9_000, 9_000 + DEAD)
    )
    assert all(row["properties"]["KEYS"].startswith("INV-") for row in rows)


def test_an_export_is_not_limited_to_what_is_shown(
    open_page: Open, traffic: Traffic, tmp_path: Path, many: int
) -> None:
    page = open_page("/messages?topic=scanned&order=oldest")
    page.rows()
    rows = exported(page, "Export", tmp_path / "export")
    assert len({row["message_id"] for row in rows}) == len(rows) == many


@pytest.fixture(scope="module")
def many(traffic: Traffic, url: str) -> Iterator[int]:
    """More messages than one step of a search reads; the newest contains a needle."""

    async def send() -> int:
        await traffic.admin.create_topic("scanned", queues=1)
        for _ in range(SCANNED // 250 + 1):
            await asyncio.gather(
                *(traffic.producer.send(Message("scanned", "hay")) for _ in range(250))
            )
        await traffic.producer.send(Message("scanned", "the needle"))
        return SCANNED + 251

    yield traffic.call(send())
    traffic.call(traffic.admin.delete_topic("scanned"))
    while httpx.get(f"{url}/api/names?query=scanned").json()["topics"]:  # other tests count topics
        time.sleep(0.2)


def test_an_incomplete_search_says_so_and_reads_on(open_page: Open, many: int) -> None:
    page = open_page("/messages?topic=scanned&q=body:needle&order=oldest")
    page.expect("messages that were read so far")
    assert page.find("main tbody tr").count() == 0
    for _ in range(10):  # a step also ends after 3 s
        page.button("Read on").click()
        page.page.wait_for_timeout(300)
        if page.find("main tbody tr").count():
            break
    [cells] = page.rows().values()
    assert "the needle" in cells
    page.expect(f"{many:,} read")
    page.expect("complete")

    page.open("/messages?topic=scanned&q=body:needle")
    assert len(page.rows()) == 1
    page.expect("partial: not all messages were read")
