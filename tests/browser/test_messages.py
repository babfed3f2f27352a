"""Search, tail, decoders, saved searches, export; what clients send stays text."""

import json
from pathlib import Path

from penstock.client import Message

from .conftest import Open
from .traffic import HOSTILE_NAME, XSS, Traffic


def test_a_key_is_found_in_all_topics(open_page: Open) -> None:
    page = open_page("/messages")
    page.page.get_by_placeholder("Search:").fill("ORD-10042")
    page.page.keyboard.press("Enter")
    [cells] = page.rows().values()
    assert "orders" in cells
    assert "ORD-10042" in cells


def test_an_id_is_found(open_page: Open, traffic: Traffic) -> None:
    receipt = traffic.send(Message("clicks", "here I am", keys=["FIND-ME"]))
    page = open_page(f"/messages?q={receipt.message_id}")
    [cells] = page.rows().values()
    assert "here I am" in cells


def test_filters_by_tag_queue_and_body(open_page: Open) -> None:
    page = open_page("/messages?topic=orders&q=tag:paid")
    assert {cells[2] for cells in page.rows().values()} == {"paid"}
    page.open("/messages?topic=orders&q=queue:broker-a/1")
    assert {key.partition("@")[0] for key in page.rows()} == {"broker-a/1"}
    page.open("/messages?topic=orders&q=queue:broker-a/1+offset:3")
    assert next(iter(page.rows())) == "broker-a/1@3"
    page.open("/messages?topic=orders&q=body:10077&order=oldest")
    [cells] = page.rows().values()
    assert cells[3] == "ORD-10077"
    page.expect("complete")


def test_pages_of_messages_do_not_repeat_any(open_page: Open) -> None:
    page = open_page("/messages?topic=orders&order=oldest")
    first = page.rows()
    page.button("More").click()
    page.find("main tbody tr").nth(60).wait_for()
    both = page.rows()
    assert len(both) == 100
    assert list(both)[:50] == list(first)


def test_what_is_not_there_is_said(open_page: Open) -> None:
    open_page("/messages?q=NO-SUCH-KEY").expect("No message found")
    open_page("/messages?topic=no-such-topic").expect("no-such-topic")


def test_the_tail_streams_new_messages(open_page: Open, traffic: Traffic) -> None:
    page = open_page("/messages?topic=stock-levels&tail=1")
    page.expect("Waiting for messages of stock-levels")
    for number in range(100):  # those before the tail has begun are not in it
        traffic.send(Message("stock-levels", json.dumps({"live": number}), keys=["LIVE"]))
        page.page.wait_for_timeout(300)
        if page.find("main tbody tr").count() >= 2:
            break
    keys = {cells[3] for cells in page.rows().values()}
    assert keys == {"LIVE"}
    bodies = [json.loads(cells[4])["live"] for cells in page.rows().values()]
    assert bodies == sorted(bodies, reverse=True)
    page.button("Stop the tail").click()
    page.expect("complete")


def test_a_message_shows_decoders_trace_and_verdicts(open_page: Open, traffic: Traffic) -> None:
    page = open_page("/messages?topic=orders&q=ORD-10042")
    page.find("main tbody tr").click()
    page.page.wait_for_url("**/message/orders/**")
    page.expect('"customer": "customer-42"')
    page.button("Hex").click()
    page.expect("00000000  7b 22 6f 72")
    page.find("[data-group=billing] .badge.good").wait_for()
    page.find("[data-group=billing]").get_by_role("button", name="Why?").click()
    page.expect("committed offset", "[data-group=billing] [data-facts]")
    page.expect("Handled", "#trace")


def test_messagepack_is_decoded(open_page: Open) -> None:
    page = open_page("/messages?topic=stock-levels&q=A-17")
    page.find("main tbody tr").click()
    page.expect('"shelf": "0x0102"')
    assert page.find(".segments button[aria-pressed=true]").inner_text() == "MessagePack"


def test_searches_are_saved(open_page: Open) -> None:
    page = open_page("/messages?topic=orders&q=tag:paid")
    page.rows()
    page.button("Saved searches").click()
    page.page.get_by_placeholder("Name").fill("Paid <b>orders</b>")
    page.button("Save").click()
    page.find("dialog a").get_by_text("Paid <b>orders</b>").wait_for()
    page.open("/messages")
    page.button("Saved searches").click()
    page.find("dialog a").get_by_text("Paid <b>orders</b>").click()
    page.page.wait_for_url("**/messages?topic=orders&q=tag**")
    assert {cells[2] for cells in page.rows().values()} == {"paid"}


def test_messages_are_exported(open_page: Open, tmp_path: Path) -> None:
    page = open_page("/messages?topic=invoices&order=oldest")
    page.rows()
    with page.page.expect_download() as started:
        page.button("Export").click()
    path = tmp_path / "export"
    started.value.save_as(path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["topic"] for row in rows} == {"invoices"}


def test_what_clients_send_stays_text(open_page: Open) -> None:
    """Bodies, keys, tags, property names and client ids with HTML are shown as they are."""
    page = open_page("/messages?topic=stock-levels&q=body:onerror")
    page.expect(XSS)
    page.find("main tbody tr").click()
    page.expect(XSS, "[data-body=text]")
    page.expect("<i>p")
    page.expect("<b>tag</b>")
    assert page.page.evaluate("window.__xss") is None
    page.open("/groups/warehouse")
    page.expect(HOSTILE_NAME)
    for path in ("/topics/%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E", "/messages?q=%3Cscript%3E"):
        page.open(path)
    page.open("/topics?query=%3Cimg%20src%3Dx%20onerror%3D%22window.__xss%3D1%22%3E")
    page.expect("No topic matches")
    assert page.find("main img, main script, main b").count() == 0
    assert page.page.evaluate("window.__xss") is None
