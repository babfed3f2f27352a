"""Logins and roles, with accounts of the console and with users of the brokers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import Open
from .servers import ACCESS, SUPER, Program, start_cluster, start_console

PASSWORD = "view only please"


@pytest.fixture(scope="module")
def guarded(
    cluster: tuple[Program, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """The address of a console with accounts, and the first password, which it prints once."""
    data = tmp_path_factory.mktemp("guarded")
    program, url = start_console(cluster[1], data, "--logins", "console")
    [line] = [line for line in program.heard if "the first account" in line]
    yield url, line.split("password ")[1].split()[0]
    program.stop()
    program, _ = start_console(cluster[1], data, "--logins", "console")
    program.stop()
    assert "password" not in "".join(program.heard)


def test_nothing_is_shown_without_a_login(open_page: Open, guarded: tuple[str, str]) -> None:
    page = open_page("/topics", at=guarded[0])
    page.find(".login form").wait_for()
    assert page.find("main").count() == 0
    assert page.call("GET", "/topics") == 401
    page.log_in("admin", "wrong")
    page.expect("the name or the password is wrong", ".login")


def test_roles_hold_in_the_page_and_in_the_api(open_page: Open, guarded: tuple[str, str]) -> None:
    url, password = guarded
    admin = open_page("/access?view=accounts", at=url)
    admin.log_in("admin", password)
    admin.button("Add an account").click()
    admin.find("dialog input").first.fill("viewer")
    admin.find("dialog input[type=password]").fill(PASSWORD)
    admin.find("dialog [data-confirm]").click()
    admin.find("tr[data-key=viewer]").wait_for()

    viewer = open_page("/topics", at=url)
    viewer.log_in("viewer", PASSWORD)
    viewer.rows()
    assert viewer.button("Create a topic").count() == 0
    assert viewer.call("POST", "/topics", {"name": "not-allowed"}) == 403
    assert viewer.call("GET", "/audit") == 403
    viewer.open("/groups/billing").expect("billing")
    assert viewer.button("Reset offsets").count() == 0
    viewer.button("Log out").click()
    viewer.find(".login form").wait_for()
    assert viewer.call("GET", "/topics") == 401

    admin.open("/access?view=audit")
    admin.expect("PUT /accounts/{name}")
    assert PASSWORD not in admin.find("main").inner_text()


def test_users_of_the_brokers_log_in(
    open_page: Open, cluster: tuple[Program, str], tmp_path: Path
) -> None:
    servers, nameserver = start_cluster(tmp_path / "servers", env=ACCESS)
    console, url = start_console(nameserver, tmp_path / "console", "--logins", "brokers", env=SUPER)
    try:
        page = open_page("/access", at=url)
        page.log_in("root", "wrong-password")
        page.expect("the name or the password is wrong", ".login")
        page.log_in("root", "root-password")
        page.expect("Users of the brokers")
        assert page.rows()["root"][1] == "super"
        body = {"password": "reader-password", "super": False}
        assert page.call("PUT", "/access/users/reader", body) == 200
        rule = {"resource": "Topic:*", "actions": ["Sub", "Get", "List"], "decision": "Allow"}
        assert page.call("PUT", "/access/users/reader/rules", rule) == 200

        reader = open_page("/topics", at=url)
        reader.log_in("reader", "reader-password")
        reader.expect("There are no topics here")
        assert reader.call("POST", "/topics", {"name": "by-reader"}) == 403
        assert reader.call("PUT", "/access/users/reader", {"super": True}) == 403
    finally:
        console.stop()
        servers.stop()
