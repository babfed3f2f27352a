"""Changes through the console: resend, reset and undo, topics, keyboard and theme."""

import asyncio

from penstock.client.admin.async_admin import GroupProgress

from .conftest import Open
from .console_page import UNKNOWN, ConsolePage
from .traffic import Traffic


def committed(progress: GroupProgress) -> dict[str, int | None]:
    return {f"{q.queue.broker_name}/{q.queue.queue_id}": q.committed for q in progress.queues}


def shown(page: ConsolePage, column: int) -> dict[str, int | None]:
    """A column of the preview."""
    texts = {key: cells[column] for key, cells in page.rows("#preview").items()}
    return {key: None if t == UNKNOWN else int(t.replace(",", "")) for key, t in texts.items()}


def test_a_resend_reaches_the_consumer(open_page: Open, traffic: Traffic) -> None:
    traffic.healed = True
    page = open_page("/dead-letters/mailer")
    keys = list(page.rows())
    for key in keys[:2]:
        page.find(f"tr[data-key='{key}'] input[type=checkbox]").check()
    page.button("Resend 2").click()
    page.find("dialog [data-dry-run]").click()
    page.expect("2 messages would be sent", "dialog")
    assert len(page.rows("#dry-run")) == 2
    assert traffic.received["mailer"] == []
    page.find("dialog [data-confirm]").click()
    page.expect("2 of 2 sent", "#report")
    page.expect("finished", "#report")

    async def handled() -> None:
        while len(traffic.received["mailer"]) < 2:
            await asyncio.sleep(0.05)

    traffic.call(asyncio.wait_for(handled(), 30))
    assert len(set(traffic.received["mailer"])) == 2


def test_a_preview_is_what_is_applied_and_undo_restores_it(
    open_page: Open, traffic: Traffic
) -> None:
    before = committed(traffic.call(traffic.admin.progress("archive", "orders")))
    page = open_page("/groups/archive")
    page.rows("#queues")
    page.button("Reset offsets").click()
    page.find("dialog select").select_option("first")
    page.find("dialog [data-confirm]").click()
    page.expect("Nothing has changed yet", "dialog")
    planned = shown(page, 2)
    assert shown(page, 1) == before
    assert committed(traffic.call(traffic.admin.progress("archive", "orders"))) == before
    page.button("Apply").click()
    undo = page.find("#resets [data-undo]").first
    undo.wait_for()
    after = committed(traffic.call(traffic.admin.progress("archive", "orders")))
    assert after == planned
    undo.click()
    page.find("dialog [data-confirm]").click()
    page.expect("undone", "#resets")
    restored = committed(traffic.call(traffic.admin.progress("archive", "orders")))
    # An offset can't be removed: a queue without one keeps the new one.
    assert restored == {
        key: planned[key] if value is None else value for key, value in before.items()
    }


def test_a_topic_is_created_and_deleted(open_page: Open, traffic: Traffic) -> None:
    page = open_page("/topics")
    page.button("Create a topic").click()
    page.find("dialog input").first.fill("made-here")
    page.find("dialog [data-confirm]").click()
    page.go("/topics/made-here")
    assert "made-here" in traffic.call(traffic.admin.topic_names())
    page.button("Delete").click()
    confirm = page.find("dialog [data-confirm]")
    assert confirm.is_disabled()
    page.page.get_by_placeholder("made-here").fill("made-here")
    confirm.click()
    page.go("/topics")
    assert "made-here" not in traffic.call(traffic.admin.topic_names())


def test_a_refusal_is_shown_with_the_next_step(open_page: Open) -> None:
    page = open_page("/topics")
    page.button("Create a topic").click()
    page.find("dialog input").first.fill("not a name!")
    page.find("dialog [data-confirm]").click()
    page.expect("is not a valid topic name", "dialog [role=alert]")


def test_pages_are_reached_by_keyboard(open_page: Open) -> None:
    page = open_page("/")
    keyboard = page.page.keyboard
    keyboard.type("gt")
    page.go("/topics")
    page.rows()
    keyboard.press("/")
    assert page.page.evaluate("document.activeElement.dataset.search !== undefined")
    keyboard.press("Escape")
    keyboard.press("j")
    keyboard.press("j")
    keyboard.press("Enter")
    page.page.wait_for_url("**/topics/*")
    keyboard.press("?")
    page.expect("Keyboard shortcuts", "dialog")
    keyboard.press("Escape")
    keyboard.press("k")
    page.find("dialog input").fill("bill")
    page.expect("billing", "dialog")
    keyboard.press("Enter")
    page.go("/groups/billing")


def test_the_theme_is_switched_and_kept(open_page: Open) -> None:
    page = open_page("/", theme="dark")
    theme = "document.documentElement.dataset.theme"
    assert page.page.evaluate(theme) == "dark"
    page.page.keyboard.press("t")
    assert page.page.evaluate(theme) == "light"
    page.open("/topics")
    assert page.page.evaluate(theme) == "light"


def test_a_phone_has_a_menu(open_page: Open) -> None:
    page = open_page("/", width=390)
    page.button("Menu").click()
    page.find(
        ".side.open a",
    ).get_by_text("Groups").click()
    page.go("/groups")
    page.rows()
