"""Logins, roles, CSRF protection, headers, the audit log."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.console.console_settings import ConsoleSettings, Logins
from penstock.console.security import sessions as sessions_module
from penstock.console.security.accounts import Login, Role
from penstock.console.security.sessions import IDLE_MS, Sessions
from penstock.errors import BadSetting
from tests.unit.console.console_kit import FakeAdmin, TestedConsole

PASSWORD = "correct horse battery"


@pytest.fixture
def local(tmp_path: Path) -> Iterator[TestedConsole]:
    with TestedConsole(tmp_path) as console:
        yield console


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[TestedConsole]:
    """A console with accounts; nobody is logged in."""
    with TestedConsole(tmp_path, host="0.0.0.0", logins=Logins.CONSOLE) as console:
        yield console


def add_account(console: TestedConsole, name: str, role: Role) -> None:
    console.run(console.console.accounts.put(name, role, PASSWORD, 0))


def log_in(console: TestedConsole, name: str, password: str = PASSWORD) -> int:
    answer = console.send("POST", "/login", {"name": name, "password": password})
    if answer.status_code == 200:
        console.csrf = answer.json()["csrf"]
    return int(answer.status_code)


# --- a console on a loopback address


def test_every_response_has_strict_headers(local: TestedConsole) -> None:
    for path in ("/", "/api/session", "/api/none", "/static/x/none.js"):
        headers = local.load(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"


def test_another_host_name_is_refused(local: TestedConsole) -> None:
    answer = local.load("/api/session", host="attacker.example:8080")
    assert answer.status_code == 421
    for host in ("localhost:8080", "127.0.0.1", "[::1]:8080"):
        assert local.load("/api/session", host=host).status_code == 200


def test_a_change_needs_the_token(local: TestedConsole) -> None:
    body = {"name": "x", "query": "?topic=x"}
    assert local.post("/saved-searches", b"{}").status_code == 403
    local.csrf = local.csrf[::-1]
    assert local.send("POST", "/saved-searches", body).status_code == 403


def test_a_change_from_another_site_is_refused(local: TestedConsole) -> None:
    body = {"name": "x", "query": "?topic=x"}
    origin = "http://attacker.example"
    assert local.send("POST", "/saved-searches", body, origin=origin).status_code == 403
    assert (
        local.send("POST", "/saved-searches", body, sec_fetch_site="cross-site").status_code == 403
    )
    own = "http://127.0.0.1:8080"
    assert local.send("POST", "/saved-searches", body, origin=own).status_code == 200


def test_a_form_of_another_site_cannot_be_a_change(local: TestedConsole) -> None:
    answer = local.post(
        "/saved-searches",
        b'{"name": "x", "query": "y"}',
        x_penstock_csrf=local.csrf,
        content_type="text/plain",
    )
    assert answer.status_code == 415


@pytest.mark.parametrize("body", [b"{", b"[]", b"3"])
def test_a_body_that_is_no_object_is_refused(local: TestedConsole, body: bytes) -> None:
    headers = {"x_penstock_csrf": local.csrf, "content_type": "application/json"}
    assert local.post("/saved-searches", body, **headers).status_code == 400


def test_a_change_is_in_the_audit_log_without_passwords(local: TestedConsole) -> None:
    local.admin.answers["masters"] = []
    local.send(
        "PUT", "/access/users/ann/rules", {"actions": ["Pub"], "resource": "*", "password": "x"}
    )
    [entry] = local.get("/audit").json()["rows"]
    assert entry["action"] == "PUT /access/users/{name}/rules"
    assert entry["target"] == '{"name": "ann"}'
    assert "(hidden)" in entry["detail"]
    assert entry["user"] == "local"


def test_pages_are_for_all_addresses_and_files_are_immutable(local: TestedConsole) -> None:
    page = local.load("/topics/orders")
    assert page.status_code == 200
    assert page.headers["cache-control"] == "no-store"
    path = page.text.split('rel="stylesheet" href="')[1].split('"')[0]
    assert "immutable" in local.load(path).headers["cache-control"]


def test_files_are_compressed_for_those_who_accept_it(local: TestedConsole) -> None:
    page = local.load("/").text
    path = page.split('rel="stylesheet" href="')[1].split('"')[0]
    plain = local.load(path, **{"accept-encoding": "identity"})
    small = local.load(path, **{"accept-encoding": "gzip"})
    assert "content-encoding" not in plain.headers
    assert small.headers["content-encoding"] == "gzip"
    assert small.content == plain.content
    assert int(small.headers["content-length"]) < int(plain.headers["content-length"]) / 2


# --- a console with accounts


def test_another_address_needs_logins(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="needs logins"):
        ConsoleSettings(host="0.0.0.0", data=tmp_path)


def test_without_a_login_nothing_is_told(guarded: TestedConsole) -> None:
    session = guarded.get("/session").json()
    assert (session["user"], session["csrf"]) == (None, None)
    for path in ("/overview", "/topics", "/audit", "/saved-searches", "/tail?topic=x"):
        assert guarded.get(path).status_code == 401
    assert guarded.send("POST", "/topics", {"name": "x"}).status_code == 401


def test_the_first_account_is_created_once(guarded: TestedConsole) -> None:
    accounts = guarded.console.accounts
    password = guarded.run(accounts.create_first(0))
    assert password is not None
    assert guarded.run(accounts.create_first(0)) is None
    assert log_in(guarded, "admin", password) == 200
    assert guarded.get("/session").json()["role"] == "admin"


def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(guarded: TestedConsole) -> None:
    add_account(guarded, "ann", Role.VIEW)
    answer = guarded.send("POST", "/login", {"name": "ann", "password": PASSWORD})
    cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie


@pytest.mark.parametrize(
    ("role", "operate", "admin"),
    [(Role.VIEW, 403, 403), (Role.OPERATE, 400, 403), (Role.ADMIN, 400, 400)],
)
def test_roles(guarded: TestedConsole, role: Role, operate: int, admin: int) -> None:
    """400: the request was let through to its handler, which misses a value."""
    add_account(guarded, "ann", role)
    assert log_in(guarded, "ann") == 200
    assert guarded.get("/topics").status_code == 200
    assert guarded.send("POST", "/topics", {}).status_code == operate
    answer = guarded.send("PUT", "/cluster/brokers/broker-a/0/settings", {})
    assert answer.status_code == admin


def test_a_logged_in_user_also_needs_the_token(guarded: TestedConsole) -> None:
    add_account(guarded, "ann", Role.ADMIN)
    log_in(guarded, "ann")
    guarded.csrf = "wrong"
    assert guarded.send("POST", "/topics", {"name": "x"}).status_code == 403


@pytest.mark.slow  # passwords are hashed slowly on purpose
def test_failed_logins_are_limited_and_audited(guarded: TestedConsole) -> None:
    add_account(guarded, "ann", Role.ADMIN)
    assert [log_in(guarded, "ann", "wrong") for _ in range(6)] == [401] * 5 + [429]
    assert log_in(guarded, "ann") == 429
    guarded.admin.now_ms += 3_000
    assert log_in(guarded, "ann") == 200
    rows = guarded.get("/audit").json()["rows"]
    assert [row["status"] for row in rows] == [200, 429, 429] + [401] * 5


@pytest.mark.slow  # passwords are hashed slowly on purpose
def test_a_stranger_elsewhere_can_not_lock_a_user_out(guarded: TestedConsole) -> None:
    add_account(guarded, "ann", Role.ADMIN)
    guarded.come_from("203.0.113.7")
    assert [log_in(guarded, "ann", "wrong") for _ in range(6)] == [401] * 5 + [429]
    guarded.come_from("203.0.113.8")
    assert log_in(guarded, "ann") == 200
    assert guarded.get("/audit").json()["rows"][0]["address"] == "203.0.113.8"


def test_only_a_trusted_proxy_tells_the_address_and_the_scheme(tmp_path: Path) -> None:
    settings = {"logins": Logins.CONSOLE, "trusted_proxies": ("10.0.0.0/24",)}
    with TestedConsole(tmp_path, **settings) as console:
        add_account(console, "ann", Role.ADMIN)
        forwarded = {
            "x_forwarded_for": "203.0.113.7",
            "x_forwarded_proto": "https",
            "host": "console.example",
        }
        body = {"name": "ann", "password": PASSWORD}
        console.come_from("192.0.2.1")
        direct = console.send("POST", "/login", body, **forwarded)
        assert "secure" not in direct.headers["set-cookie"].lower()
        console.come_from("10.0.0.5")
        own = {**forwarded, "origin": "https://console.example"}
        through = console.send("POST", "/login", body, **own)
        assert through.status_code == 200
        assert "secure" in through.headers["set-cookie"].lower()
        seen = [row[0] for row in console.run(addresses(console))]
        assert seen == ["192.0.2.1", "203.0.113.7"]


async def addresses(console: TestedConsole) -> list[tuple[str]]:
    return await console.console.database.rows("select address from audit order by id")


def test_a_proxy_is_trusted_only_with_logins_and_by_its_address(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="needs logins"):
        ConsoleSettings(data=tmp_path, trusted_proxies=("127.0.0.1",))
    with pytest.raises(BadSetting, match="--trusted-proxy"):
        ConsoleSettings(data=tmp_path, logins=Logins.CONSOLE, trusted_proxies=("proxy.example",))


def test_the_clients_of_expired_logins_are_closed(guarded: TestedConsole) -> None:
    sessions, now_ms = guarded.console.sessions, guarded.admin.now_ms
    admin: Any = FakeAdmin()
    old, _ = sessions.create(Login("bob", Role.VIEW, admin), now_ms - IDLE_MS - 1)
    young, _ = sessions.create(Login("eve", Role.VIEW, admin), now_ms)
    assert sessions.find(old, now_ms) is None
    guarded.run(guarded.console.end_expired_sessions())
    assert admin.closed == 1
    assert sessions.find(young, now_ms) is not None


def test_the_least_used_session_ends_when_there_are_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sessions_module, "SESSIONS_MAX", 2)
    sessions = Sessions()
    tokens = [sessions.create(Login(f"user-{n}", Role.VIEW), n)[0] for n in range(3)]
    assert sessions.find(tokens[0], 10) is not None
    assert [one.login.name for one in sessions.end_expired(10)] == ["user-1"]


def test_logging_out_ends_the_session(guarded: TestedConsole) -> None:
    add_account(guarded, "ann", Role.VIEW)
    log_in(guarded, "ann")
    token = guarded.client.cookies["penstock_console"]
    assert guarded.send("POST", "/logout").status_code == 200
    guarded.client.cookies.set("penstock_console", token)
    assert guarded.get("/topics").status_code == 401


def test_a_session_ends_after_some_hours(guarded: TestedConsole) -> None:
    add_account(guarded, "ann", Role.VIEW)
    log_in(guarded, "ann")
    guarded.admin.now_ms += 7 * 3_600_000
    assert guarded.get("/topics").status_code == 200
    guarded.admin.now_ms += 9 * 3_600_000
    assert guarded.get("/topics").status_code == 401


def test_accounts_are_managed_and_the_last_admin_stays(guarded: TestedConsole) -> None:
    add_account(guarded, "root", Role.ADMIN)
    log_in(guarded, "root")
    body = {"role": "operate", "password": PASSWORD}
    assert guarded.send("PUT", "/accounts/bob", body).status_code == 200
    assert (
        guarded.send("PUT", "/accounts/eve", {"role": "view", "password": "short"}).status_code
        == 400
    )
    assert guarded.send("PUT", "/accounts/root", {"role": "view"}).status_code == 400
    assert guarded.send("DELETE", "/accounts/root").status_code == 400
    names = {row["name"]: row["role"] for row in guarded.get("/accounts").json()["rows"]}
    assert names == {"root": "admin", "bob": "operate"}
    assert guarded.send("DELETE", "/accounts/bob").status_code == 200


def test_accounts_tell_how_often_they_are_logged_in(guarded: TestedConsole) -> None:
    add_account(guarded, "root", Role.ADMIN)
    add_account(guarded, "ann", Role.VIEW)
    log_in(guarded, "ann", PASSWORD)
    log_in(guarded, "root", PASSWORD)
    log_in(guarded, "root", PASSWORD)
    rows = {row["name"]: row["sessions"] for row in guarded.get("/accounts").json()["rows"]}
    assert rows == {"ann": 1, "root": 2}


def test_a_changed_account_must_log_in_again(guarded: TestedConsole) -> None:
    sessions = guarded.console.sessions
    token, _ = sessions.create(Login("bob", Role.ADMIN), guarded.admin.now_ms)
    add_account(guarded, "root", Role.ADMIN)
    add_account(guarded, "bob", Role.ADMIN)
    log_in(guarded, "root")
    guarded.send("PUT", "/accounts/bob", {"role": "view"})
    assert sessions.find(token, guarded.admin.now_ms) is None
