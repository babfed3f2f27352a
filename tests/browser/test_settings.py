"""Settings of topics, groups and brokers: only what was edited changes, after a preview."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from penstock.client import Message
from penstock.wire.codes import PERM_WRITE

from .conftest import Open
from .console_page import ConsolePage
from .traffic import Traffic


@pytest.fixture
def uneven(traffic: Traffic) -> Iterator[str]:
    """A topic with 8 queues to read and 4 to write, and on one broker read-only."""
    admin = traffic.admin
    traffic.call(admin.create_topic("uneven", read_queues=8, write_queues=8))
    for number in range(32):
        traffic.send(Message("uneven", f"message {number}"))
    traffic.call(admin.create_topic("uneven", write_queues=4))
    traffic.call(admin.create_topic("uneven", perm="r", brokers=["broker-b"]))
    yield "uneven"
    traffic.call(admin.delete_topic("uneven"))


def open_settings(open_page: Open, path: str) -> ConsolePage:
    page = open_page(path)
    page.find("#queues, #settings").first.wait_for()
    page.button("Settings").click()
    return page


def shape(traffic: Traffic, topic: str) -> dict[str, tuple[int, int, str, str]]:
    brokers = traffic.call(traffic.admin.describe_topic(topic)).topic.brokers
    return {
        name: (one.read_queues, one.write_queues, one.perm_text, one.message_type)
        for name, one in brokers.items()
    }


def test_only_an_edited_setting_of_a_topic_changes(
    open_page: Open, traffic: Traffic, uneven: str
) -> None:
    page = open_settings(open_page, f"/topics/{uneven}")
    assert page.find("[data-setting=read_queues]").input_value() == "8"
    page.expect("The brokers differ: read and write on broker-a, read only on broker-b", "dialog")
    page.find("dialog [data-confirm]").click()
    page.expect("You have changed nothing yet", "dialog")
    page.find("[data-setting=message_type]").select_option("FIFO")
    page.find("dialog [data-confirm]").click()
    rows = page.rows("#preview")
    assert list(rows) == ["broker-a/message_type", "broker-b/message_type"]
    page.button("Apply").click()
    page.find("main .badge:text-is('fifo')").wait_for()
    assert shape(traffic, uneven) == {
        "broker-a": (8, 4, "rw", "FIFO"), "broker-b": (8, 4, "r", "FIFO"),
    }  # fmt: skip


def test_a_preview_shows_what_can_not_be_read_any_longer(
    open_page: Open, traffic: Traffic, uneven: str
) -> None:
    queues = traffic.call(traffic.admin.describe_topic(uneven)).queues
    lost = {
        f"{at.queue.broker_name} / {at.queue.queue_id}: {at.count} message"
        for at in queues
        if at.queue.queue_id >= 4 and at.count
    }
    assert lost
    page = open_settings(open_page, f"/topics/{uneven}")
    page.find("[data-setting=read_queues]").fill("4")
    page.find("dialog [data-confirm]").click()
    cells = page.rows("#preview")["broker-a/read_queues"]
    assert cells == ["broker-a", "Read queues per broker", "8", "4"]
    page.expect("4 read queues are removed from broker-a", "dialog .note.bad")
    text = page.find("#unreadable").inner_text()
    assert {one for one in lost if one in text} == lost
    assert shape(traffic, uneven)["broker-a"][0] == 8
    page.button("Apply").click()
    page.find("#unreadable").wait_for(state="detached")
    assert shape(traffic, uneven) == {
        "broker-a": (4, 4, "rw", "UNSPECIFIED"), "broker-b": (4, 4, "r", "UNSPECIFIED"),
    }  # fmt: skip


def test_a_group_is_created_changed_and_deleted(open_page: Open, traffic: Traffic) -> None:
    admin = traffic.admin
    page = open_page("/groups")
    page.button("Create a group").click()
    page.find("dialog input").first.fill("made-group")
    page.find("dialog input[type=number]").fill("5")
    page.find("dialog [data-confirm]").click()
    page.go("/groups/made-group")
    traffic.call(admin.update_group("made-group", orderly=True))
    traffic.call(admin.create_group("made-group", brokers=["broker-b"], retries_max=7))

    page = open_settings(open_page, "/groups/made-group")
    page.expect("5 on broker-a, 7 on broker-b", "#settings")
    page.find("[data-setting=consume_enabled]").select_option("no")
    page.find("dialog [data-confirm]").click()
    page.expect("Members receive nothing from broker-a", "dialog .note.bad")
    page.button("Apply").click()
    page.expect("disabled", "#settings")
    [info] = [one for one in traffic.call(admin.groups()) if one.name == "made-group"]
    found = {n: (s.consume_enabled, s.retries_max, s.orderly) for n, s in info.brokers.items()}
    assert found == {"broker-a": (False, 5, True), "broker-b": (False, 7, True)}

    page.button("Delete").click()
    page.expect("Dead letters", "#affected")
    page.page.get_by_placeholder("made-group").fill("made-group")
    page.find("dialog [data-confirm]").click()
    page.go("/groups")
    assert "made-group" not in [one.name for one in traffic.call(admin.groups())]


def test_a_deletion_says_what_goes_with_it(open_page: Open, traffic: Traffic) -> None:
    page = open_page("/topics/invoices")
    page.find("#queues").wait_for()
    page.button("Delete").click()
    page.expect("with 6 messages", "#affected")
    rows = page.rows("#affected")
    assert sum(int(cells[2]) for cells in rows.values()) == 6
    page.expect("This group consumes it: mailer", "#affected")
    page.button("Cancel").click()
    group = open_page("/groups/mailer")
    group.find("#queues").wait_for()
    group.button("Delete").click()
    group.expect("1 consumer is connected", "#affected")
    texts = group.find("#affected dd").all_inner_texts()
    assert "invoices" in texts[0]
    assert texts[2] == "6"


def test_a_reset_of_an_unknown_group_is_refused(open_page: Open) -> None:
    page = open_page("/groups/billing")
    body = {"topic": "orders", "to": "first"}
    assert page.call("POST", "/groups/biling/reset/preview", body) == 404


def test_a_live_setting_of_a_broker_changes(open_page: Open, traffic: Traffic) -> None:
    name = "fileReservedTime"
    before = traffic.call(traffic.admin.broker_settings("broker-a"))[name]
    page = open_page("/cluster")
    page.find("tbody tr:has-text('broker-a')").get_by_role("button", name="Details").click()
    page.find("dialog input[type=search]").fill(name)
    page.find(f"dialog tr[data-key={name}]").get_by_role("button", name="Change").click()
    value = page.find("dialog").last.locator("input")
    value.fill("soon")
    page.find("dialog [data-confirm]").click()
    page.expect(name, "dialog [role=alert]")
    value.fill("71")
    page.find("dialog [data-confirm]").click()
    page.expect(f"{name} is 71", ".toasts")
    assert traffic.call(traffic.admin.broker_settings("broker-a"))[name] == "71"
    path = "/cluster/brokers/broker-a/0/settings"
    assert page.call("PUT", path, {"name": name, "value": before}) == 200
    assert page.call("PUT", path, {"name": "listenPort", "value": "1"}) == 409
    assert page.call("PUT", path, {"name": "fileReservdTime", "value": "1"}) == 400
    assert page.call("PUT", path, {"name": name, "value": "soon"}) == 400


def test_writes_are_stopped_and_allowed(open_page: Open, traffic: Traffic) -> None:
    def press(button: str, confirm: str) -> None:
        page = open_page("/cluster")
        page.find("tbody tr:has-text('broker-b')").get_by_role("button", name="Details").click()
        page.button(button, "dialog").click()
        page.find("dialog [data-confirm]").get_by_text(confirm).click()
        page.expect("Writes are", ".toasts")

    async def await_writes(wanted: bool) -> None:
        while True:
            route = await traffic.admin.route("stock-levels")
            [data] = [one for one in route.data.queue_datas if one.broker_name == "broker-b"]
            if bool(data.perm & PERM_WRITE) is wanted:
                return
            await asyncio.sleep(0.1)

    press("Stop writes", "Stop writes")
    traffic.call(asyncio.wait_for(await_writes(False), 20))
    press("Allow writes", "Allow")
    traffic.call(asyncio.wait_for(await_writes(True), 20))
