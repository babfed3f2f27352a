"""Each page shows what the admin API says."""

import re

import pytest

from .conftest import Open
from .console_page import UNKNOWN
from .traffic import DEAD, TOPICS, Traffic

PAGES = (
    "/", "/topics", "/topics/orders", "/messages?topic=orders", "/messages", "/groups",
    "/groups/billing", "/dead-letters", "/dead-letters/mailer", "/scheduled", "/transactions",
    "/cluster", "/access", "/pipelines",
)  # fmt: skip


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_home_shows_rates_brokers_and_alarms(open_page: Open) -> None:
    home = open_page("/")
    home.expect(f"The group mailer has {DEAD} dead letters.")
    assert home.stat("brokers") == "2 / 2"
    assert number(home.stat("topics")) == len(TOPICS)
    known = home.find(".stat[data-stat=rate_in] .value:not(:has(.unknown))")
    known.wait_for()
    assert float(known.inner_text().removesuffix("msg/s")) > 0
    home.find(".chart .line").first.wait_for()
    home.expect(f"The group mailer has {DEAD} dead letters.").click()
    home.go("/dead-letters/mailer")


def test_topics_are_those_of_the_brokers(open_page: Open, traffic: Traffic) -> None:
    topics = open_page("/topics")
    topics.find(f"tr[data-key=invoices] td:nth-child(4):has-text('{DEAD}')").wait_for()
    rows = topics.rows()
    assert list(rows) == sorted(TOPICS)
    infos = {info.name: info for info in traffic.call(traffic.admin.topics())}
    for name, cells in rows.items():
        queues = sum(settings.write_queues for settings in infos[name].brokers.values())
        assert cells[1] == TOPICS[name].lower()
        assert number(cells[2]) == queues


def test_topics_are_filtered_and_sorted(open_page: Open) -> None:
    topics = open_page("/topics")
    topics.page.get_by_placeholder("Filter by name").fill("ment")
    topics.find("tr[data-key=orders]").wait_for(state="detached")
    assert list(topics.rows()) == ["payments", "shipments"]
    assert topics.page.url.endswith("?query=ment")
    topics.find("th button").first.click()
    topics.find("th[aria-sort=descending]").wait_for()
    assert list(topics.rows()) == ["shipments", "payments"]


def test_a_topic_shows_its_queues_and_groups(open_page: Open, traffic: Traffic) -> None:
    described = traffic.call(traffic.admin.describe_topic("invoices"))
    topic = open_page("/topics/invoices")
    topic.expect("mailer")
    expected = {
        f"{state.queue.broker_name}/{state.queue.queue_id}": (state.min_offset, state.max_offset)
        for state in described.queues
    }
    rows = topic.rows("#queues")
    assert {key: (number(c[1]), number(c[2])) for key, c in rows.items()} == expected
    assert number(topic.stat("messages")) == DEAD


def test_groups_show_lag_members_and_dead_letters(open_page: Open) -> None:
    groups = open_page("/groups")
    groups.find("tr[data-key=mailer] td:has-text('invoices')").wait_for()
    rows = groups.rows()
    assert sorted(rows) == ["analytics", "archive", "billing", "mailer", "warehouse"]
    assert rows["mailer"][6] == str(DEAD)
    assert rows["archive"][1] == "no members"
    assert rows["billing"][5] == "1"


def test_a_group_shows_the_progress_of_each_queue(open_page: Open, traffic: Traffic) -> None:
    progress = traffic.call(traffic.admin.progress("archive", "orders"))
    group = open_page("/groups/archive")
    rows = group.rows("#queues")
    for at in progress.queues:
        cells = rows[f"orders/{at.queue.broker_name}/{at.queue.queue_id}"]
        assert cells[3] == (UNKNOWN if at.committed is None else f"{at.committed:,}")
    group.expect("No consumer is connected", "#members")
    group.button("Explain").click()
    group.expect("no member", "#explanation")


def test_a_group_shows_its_members(open_page: Open, traffic: Traffic) -> None:
    [member] = traffic.call(traffic.admin.members("billing")).members
    group = open_page("/groups/billing")
    group.expect(member.client_id, "#members")
    assert group.stat("members") == "1"
    row = next(cells for key, cells in group.rows("#queues").items() if key.startswith("orders/"))
    assert row[6] == member.client_id


def test_dead_letters_are_listed(open_page: Open, traffic: Traffic) -> None:
    page = traffic.call(traffic.admin.dead_letters("mailer"))
    expected = {f"{m.broker_name}/{m.queue_id}@{m.queue_offset}" for m in page.messages}
    assert set(open_page("/dead-letters/mailer").rows()) == expected
    groups = open_page("/dead-letters")
    assert list(groups.rows()) == ["mailer"]


def test_scheduled_messages_are_listed_and_recalled(open_page: Open, traffic: Traffic) -> None:
    page = open_page("/scheduled")
    expected = {one.message_id for one in traffic.call(traffic.admin.scheduled()).messages}
    assert set(page.rows()) >= {one for one in expected if one}
    assert "REM-0" in str(page.rows())
    recalled = page.find("tr:has-text('REM-3')")
    recalled.get_by_role("button", name="Recall").click()
    page.find("dialog [data-confirm]").click()
    recalled.wait_for(state="detached")
    left = traffic.call(traffic.admin.scheduled()).messages
    assert "REM-3" not in {key for one in left for key in one.keys}


def test_open_transactions_are_listed(open_page: Open, traffic: Traffic) -> None:
    page = open_page("/transactions")
    rows = page.rows()
    found = traffic.call(traffic.admin.open_transactions()).messages
    assert set(rows) == {one.message_id for one in found}
    assert all("1 connected" in cells[4] for cells in rows.values())


def test_the_cluster_shows_brokers_and_their_settings(open_page: Open, traffic: Traffic) -> None:
    page = open_page("/cluster")
    states = traffic.call(traffic.admin.cluster()).brokers
    rows = page.rows()
    assert {cells[1] for cells in rows.values()} == {state.broker.address for state in states}
    address = next(state.broker.address for state in states if state.broker.name == "broker-a")
    page.find(f"tr[data-key='{address}']").get_by_role("button", name="Details").click()
    settings = page.rows("dialog")
    expected = traffic.call(traffic.admin.broker_settings("broker-a"))
    assert settings["listenPort"][1] == expected["listenPort"]
    assert settings["listenPort"][2] == "fixed"
    assert settings["fileReservedTime"][2] == "live"


def test_without_users_access_says_what_to_do(open_page: Open) -> None:
    open_page("/access").expect("The brokers have no users")


def test_recorded_pipelines_show_their_last_batch(open_page: Open) -> None:
    page = open_page("/pipelines")
    page.expect("/data/lake")
    page.expect("running")
    assert re.search(r"Last batch\s+23", page.find("main").inner_text())


@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_the_screen(open_page: Open, width: int) -> None:
    page = open_page("/", width=width)
    for path in PAGES:
        page.open(path)
        page.page.wait_for_timeout(50)
        wide = page.page.evaluate("document.scrollingElement.scrollWidth")
        assert wide <= width, path
