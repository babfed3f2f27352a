"""The role operate in the page; users and rules of the brokers through their forms."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import Open
from .console_page import ConsolePage
from .servers import ACCESS, SUPER, Program, start_cluster, start_console
from .test_login import PASSWORD, guarded

__all__ = ["guarded"]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a console whose users are those of a broker."""
    root: Path = tmp_path_factory.mktemp("secured")
    servers, nameserver = start_cluster(root / "servers", env=ACCESS)
    console, url = start_console(nameserver, root / "console", "--logins", "brokers", env=SUPER)
    yield url
    console.stop()
    servers.stop()


def test_an_operator_changes_topics_and_groups_but_no_brokers(
    open_page: Open, guarded: tuple[str, str], cluster: tuple[Program, str]
) -> None:
    url, password = guarded
    admin = open_page("/access?view=accounts", at=url)
    admin.log_in("admin", password)
    admin.button("Add an account").click()
    admin.find("dialog input").first.fill("operator")
    admin.find("dialog select").select_option("operate")
    admin.find("dialog input[type=password]").fill(PASSWORD)
    admin.find("dialog [data-confirm]").click()
    admin.find("tr[data-key=operator]").wait_for()

    page = open_page("/groups", at=url)
    page.log_in("operator", PASSWORD)
    page.button("Create a group").click()
    page.find("dialog input").first.fill("by-operator")
    page.find("dialog [data-confirm]").click()
    page.go("/groups/by-operator")
    assert page.button("Reset offsets").count() == 1
    page.open("/cluster")
    page.find("tbody tr").first.get_by_role("button", name="Details").click()
    page.rows("dialog")
    assert page.button("Change", "dialog").count() == 0
    assert page.button("Stop writes", "dialog").count() == 0
    path = "/cluster/brokers/broker-a/0/settings"
    assert page.call("PUT", path, {"name": "fileReservedTime", "value": "70"}) == 403
    page.open("/access")
    assert page.button("Accounts").count() == page.button("Audit log").count() == 0
    assert page.button("Add a user").count() == 0
    page.open("/groups/by-operator")
    page.button("Delete").click()
    page.page.get_by_placeholder("by-operator").fill("by-operator")
    page.find("dialog [data-confirm]").click()
    page.go("/groups")

    account = admin.find("tr[data-key=operator]")
    account.get_by_role("button", name="Delete").click()
    admin.expect("The account with the role operate is deleted. 1 session of it ends", "#affected")
    admin.button("Cancel", "dialog").click()
    account.get_by_role("button", name="Delete").click()
    admin.find("dialog [data-confirm]").click()
    account.wait_for(state="detached")
    assert page.call("GET", "/topics") == 401


def add_rule(page: ConsolePage, user: str, resource: str, actions: set[str]) -> None:
    page.find(f"tr[data-key={user}]").get_by_role("button", name="Add a rule").click()
    page.find("dialog input").first.fill(resource)
    for box in page.find("dialog input[type=checkbox]").all():
        box.set_checked(box.get_attribute("value") in actions)
    page.find("dialog [data-confirm]").click()
    page.find(f"tr:has-text('{user}'):has-text('{resource}')").wait_for()


def test_users_and_rules_are_made_and_deleted_in_the_page(open_page: Open, secured: str) -> None:
    page = open_page("/access", at=secured)
    page.log_in("root", "root-password")
    page.button("Add a user").click()
    page.find("dialog input").first.fill("ann")
    page.find("dialog input[type=password]").fill("ann-password")
    page.find("dialog [data-confirm]").click()
    page.find("tr[data-key=ann]").wait_for()
    add_rule(page, "ann", "Topic:orders", {"Pub", "Sub"})
    add_rule(page, "ann", "Group:billing", {"Sub"})

    ann = open_page("/topics", at=secured)
    ann.log_in("ann", "ann-password")
    ann.expect("ann (view)", ".side")

    rule = page.find("tr:has-text('ann'):has-text('Group:billing')")
    rule.get_by_role("button", name="Delete").click()
    page.expect("ann may Sub Group:billing", "#affected")
    page.expect("ann has 1 other rule.", "#affected")
    page.button("Cancel", "dialog").click()
    assert rule.count() == 1
    rule.get_by_role("button", name="Delete").click()
    page.find("dialog [data-confirm]").click()
    rule.wait_for(state="detached")

    page.find("tr[data-key=ann]").get_by_role("button", name="Delete").click()
    page.expect("with 1 rule.", "#affected")
    page.expect("ann may Pub, Sub Topic:orders", "#affected")
    page.page.get_by_placeholder("ann").fill("ann")
    page.find("dialog [data-confirm]").click()
    page.find("tr[data-key=ann]").wait_for(state="detached")
    page.find("tr:has-text('Topic:orders')").wait_for(state="detached")
    assert ann.call("GET", "/topics") == 401
