"""Unknown values are dashes, long ones stay in their cards; the count of checks; the menu."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Route

from .conftest import Open
from .console_page import UNKNOWN, ConsolePage
from .traffic import Traffic

OVERFLOWING = """
[...document.querySelectorAll(".stat .value")]
  .filter((one) => one.scrollWidth > one.clientWidth + 1).map((one) => one.innerText)
"""


def change_answers(page: ConsolePage, path: str, change: Callable[[Any], None]) -> None:
    """Change what the console answers, before the page gets it."""

    def answer(route: Route) -> None:
        response = route.fetch()
        value = response.json()
        change(value)
        route.fulfill(response=response, body=json.dumps(value))

    page.page.route(path, answer)


def test_home_shows_what_is_unknown(open_page: Open) -> None:
    page = open_page("/cluster")

    def forget(at: Any) -> None:
        for name in ("rate_in", "rate_out", "lag", "lag_ms", "disk_used", "stored_today"):
            at[name] = None
        at["ready"] = False
        at["history"] = [{**one, "lag_ms": None} for one in at["history"]]

    change_answers(page, "**/api/overview*", forget)
    page.open("/")
    page.find(".stat[data-stat=rate_in]").wait_for()
    for name in ("rate_in", "rate_out", "behind", "disk", "brokers", "topics"):
        assert page.stat(name).removesuffix("msg/s").strip() == UNKNOWN, name
    page.expect("No group was measured yet")


def test_topics_show_what_is_unknown(open_page: Open) -> None:
    page = open_page("/cluster")

    def forget(at: Any) -> None:
        for row in at["rows"]:
            row.update(messages=None, rate_in=None, last_ms=None, measured_ms=None)
        at["measured"] = 0

    change_answers(page, "**/api/topics*", forget)
    page.open("/topics")
    for cells in page.rows().values():
        assert cells[3:6] == [UNKNOWN] * 3
    page.expect("topics are not known yet")


def test_a_topic_shows_what_is_unknown(open_page: Open) -> None:
    page = open_page("/cluster")

    def forget(at: Any) -> None:
        at.update(messages=None, rate_in=None, unreachable=["broker-b"])
        at["queues"] = [one for one in at["queues"] if one["broker"] != "broker-b"]
        for row in at["queues"]:
            row["updated_ms"] = None
        for row in at["groups"]:
            row.update(lag=None, lag_ms=None, members=None)

    change_answers(page, "**/api/topics/invoices", forget)
    page.open("/topics/invoices")
    page.expect("Without the queues of broker-b")
    assert page.stat("messages") == UNKNOWN
    assert page.stat("rate").removesuffix("msg/s").strip() == UNKNOWN
    assert page.stat("Last message") == UNKNOWN
    assert page.rows("#groups")["mailer"][1:] == [UNKNOWN] * 3
    assert all(cells[4] == UNKNOWN for cells in page.rows("#queues").values())
    page.button("Delete").click()
    assert page.rows("#affected")["broker-b"][1:] == [UNKNOWN] * 2


def test_lag_is_a_number_of_messages_and_behind_is_a_time(open_page: Open) -> None:
    page = open_page("/cluster")

    def set_lag(at: Any) -> None:
        for row in at.get("groups", at.get("rows", [])):
            row.update(lag=1_234, lag_ms=65_000)

    change_answers(page, "**/api/topics/orders", set_lag)
    change_answers(page, "**/api/groups?*", set_lag)
    page.open("/topics/orders")
    assert page.rows("#groups")["billing"][1:3] == ["1,234", "1 min 5 s"]
    heads = page.find("#groups th").all_inner_texts()
    assert heads[1:3] == ["Lag", "Behind"]
    page.open("/groups")
    assert page.rows()["billing"][2:4] == ["1,234", "1 min 5 s"]
    heads = page.find("main th").all_inner_texts()
    assert heads[2:4] == ["Lag", "Behind"]


@pytest.mark.parametrize("width", [390, 820, 1280, 1440])
def test_long_values_stay_in_their_cards(open_page: Open, width: int) -> None:
    page = open_page("/cluster", width=width)
    old_ms = int(time.time() * 1000) - (19 * 60 + 44) * 1000

    def age(at: Any) -> None:
        for row in at.get("queues", ()):
            row["updated_ms"] = old_ms
        at.update(messages=1_234_567_890, rate_in=123_456.0, lag_ms=47 * 3_600_000 + 59 * 60_000)

    for path in ("**/api/topics/orders", "**/api/overview*", "**/api/groups/billing"):
        change_answers(page, path, age)
    for path in ("/topics/orders", "/", "/groups/billing", "/scheduled", "/transactions"):
        page.open(path)
        page.find(".stat .value").first.wait_for()
        assert page.page.evaluate(OVERFLOWING) == [], path


def test_transactions_show_the_count_of_checks(open_page: Open, traffic: Traffic) -> None:
    def checks() -> dict[str, int]:
        found = traffic.call(traffic.admin.open_transactions()).messages
        return {one.message_id: one.checks for one in found}

    deadline = time.monotonic() + 60
    while min(checks().values()) < 1:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    before = checks()
    shown = {key: int(cells[5]) for key, cells in open_page("/transactions").rows().items()}
    after = checks()
    assert shown.keys() == before.keys()
    assert all(before[key] <= count <= after[key] for key, count in shown.items())
    open_page("/transactions").expect("Apache's brokers give it up after 15")


def test_the_menu_of_a_phone_closes(open_page: Open) -> None:
    page = open_page("/", width=390)
    menu = page.find(".side.open")
    page.button("Menu").click()
    menu.wait_for()
    page.page.keyboard.press("Escape")
    menu.wait_for(state="detached")
    assert page.page.evaluate("document.activeElement.ariaLabel") == "Menu"
    page.button("Menu").click()
    menu.wait_for()
    page.page.mouse.click(350, 400)
    menu.wait_for(state="detached")
    assert page.page.url.endswith("/")


def test_home_says_how_often_the_lag_is_measured(open_page: Open) -> None:
    page = open_page("/")
    page.expect("measured every 500 ms, unwatched every 1 min", "#behind-chart")
