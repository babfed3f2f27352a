"""The web console as a process: users of the brokers as its logins, TLS, a proxy in front of it."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.browser.servers import Program, start_cluster, start_console
from tests.integration.certificates import Pair, make_pair

ACCESS = {
    "PENSTOCK_ACCESS_AUTHENTICATION": "true",
    "PENSTOCK_ACCESS_AUTHORIZATION": "true",
    "PENSTOCK_ACCESS_INITIAL_USER": "root:root-password",
    "PENSTOCK_ACCESS_INTERNAL_USER": "inner:inner-password",
}
OWN_USER = {
    "PENSTOCK_CLIENT_ACCESS_KEY": "inner",
    "PENSTOCK_CLIENT_SECRET_KEY": "inner-password",
}
PASSWORD = "reader-password"
NOWHERE = "127.0.0.1:9"


class User:
    """A user of the console's JSON API."""

    def __init__(self, url: str, **options: Any) -> None:
        self.client = httpx.Client(base_url=url, **options)
        self.csrf = ""

    def log_in(self, name: str, password: str) -> httpx.Response:
        answer = self.send("POST", "/login", name=name, password=password)
        if answer.status_code == 200:
            self.csrf = answer.json()["csrf"]
        return answer

    def get(self, path: str) -> httpx.Response:
        return self.client.get(f"/api{path}")

    def send(self, method: str, path: str, **body: Any) -> httpx.Response:
        headers = {"x-penstock-csrf": self.csrf}
        return self.client.request(method, f"/api{path}", json=body, headers=headers)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("tls"), "console")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> Iterator[str]:
    """The address of an HTTPS console whose users are those of a broker."""
    servers, nameserver = start_cluster(tmp_path_factory.mktemp("servers"), env=ACCESS)
    tls = ("--tls-cert", pair.certificate, "--tls-key", pair.key)
    data = tmp_path_factory.mktemp("console")
    console, address = start_console(nameserver, data, "--logins", "brokers", *tls, env=OWN_USER)
    yield address
    assert console.stop() == 0
    assert "Traceback" not in "".join(console.heard)
    servers.stop()


@pytest.fixture
def users(url: str, pair: Pair) -> Iterator[list[User]]:
    """Two users who are not logged in yet."""
    context = ssl.create_default_context(cafile=str(pair.certificate))
    found = [User(url, verify=context) for _ in range(2)]
    yield found
    for user in found:
        user.client.close()


def test_users_of_the_brokers_log_in_and_the_brokers_check_their_requests(
    users: list[User],
) -> None:
    root, reader = users
    assert root.get("/topics").status_code == 401
    assert root.log_in("root", "wrong-password").status_code == 401
    assert root.log_in("nobody", "root-password").status_code == 401
    answer = root.log_in("root", "root-password")
    assert answer.json()["role"] == "admin"
    assert "secure" in answer.headers["set-cookie"].lower()
    assert root.send("POST", "/topics", name="orders").status_code == 200

    assert root.send("PUT", "/access/users/reader", password=PASSWORD).status_code == 200
    rule = {"resource": "Topic:bills", "actions": ["Sub", "Get", "List"], "decision": "Allow"}
    assert root.send("PUT", "/access/users/reader/rules", **rule).status_code == 200
    assert reader.log_in("reader", PASSWORD).json()["role"] == "view"
    refused = reader.send("POST", "/topics", name="more")
    assert "role" in refused.json()["error"]["message"]
    assert refused.status_code == 403
    assert reader.get("/messages?topic=orders").status_code == 403

    assert root.send("DELETE", "/access/users/reader").status_code == 200
    assert reader.get("/session").json()["user"] is None
    assert reader.log_in("reader", PASSWORD).status_code == 401


def test_a_changed_password_ends_the_sessions(users: list[User]) -> None:
    root, writer = users
    root.log_in("root", "root-password")
    root.send("PUT", "/access/users/writer", password=PASSWORD)
    rule = {"resource": "Cluster:*", "actions": ["Update", "Get", "List"], "decision": "Allow"}
    root.send("PUT", "/access/users/writer/rules", **rule)
    assert writer.log_in("writer", PASSWORD).json()["role"] == "operate"
    changed = PASSWORD[::-1]
    assert root.send("PUT", "/access/users/writer", password=changed).status_code == 200
    assert writer.get("/topics").status_code == 401
    assert writer.log_in("writer", PASSWORD).status_code == 401
    assert writer.log_in("writer", changed).status_code == 200


def test_the_port_of_https_does_not_answer_http(url: str) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https:", "http:") + "/api/session")


def test_a_stranger_does_not_trust_another_certificate(url: str) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(url + "/api/session")


def test_brokers_that_check_no_users_can_not_be_the_source_of_logins(tmp_path: Path) -> None:
    servers, nameserver = start_cluster(tmp_path / "servers")
    console, address = start_console(nameserver, tmp_path / "console", "--logins", "brokers")
    try:
        user = User(address)
        answer = user.log_in("root", "root-password")
        assert answer.status_code == 400
        assert "do not check users" in answer.json()["error"]["message"]
        user.client.close()
    finally:
        console.stop()
        servers.stop()


@contextmanager
def running(data: Path, *options: object) -> Iterator[tuple[Program, str]]:
    """A console with logins, without a cluster."""
    program, address = start_console(NOWHERE, data, "--logins", "console", *options)
    try:
        yield program, address
    finally:
        program.stop()


def test_a_console_without_tls_on_another_address_says_what_can_be_read(
    tmp_path: Path, pair: Pair
) -> None:
    with running(tmp_path, "--host", "0.0.0.0") as (program, address):
        password = first_password(program)
        user = User(address)
        answer = user.log_in("admin", password)
        assert "secure" not in answer.headers["set-cookie"].lower()
        user.client.close()
    assert "cookies are sent in plain text" in "".join(program.heard)
    tls = ("--tls-cert", pair.certificate, "--tls-key", pair.key)
    with running(tmp_path, "--host", "0.0.0.0", *tls) as (program, _):
        pass
    assert "plain text" not in "".join(program.heard)


def test_a_proxy_tells_who_logs_in(tmp_path: Path) -> None:
    with running(tmp_path, "--trusted-proxy", "127.0.0.1") as (program, address):
        password = first_password(program)
        stranger = User(address, headers={"x-forwarded-for": "203.0.113.7"})
        for expected in [401] * 5 + [429]:
            assert stranger.log_in("admin", "wrong").status_code == expected
        own = {"x-forwarded-for": "203.0.113.8", "x-forwarded-proto": "https"}
        admin = User(
            address, headers={**own, "host": "console.example", "origin": "https://console.example"}
        )
        answer = admin.log_in("admin", password)
        assert answer.status_code == 200
        assert "secure" in answer.headers["set-cookie"].lower()
        for user in (stranger, admin):
            user.client.close()


def first_password(program: Program) -> str:
    [line] = [line for line in program.heard if "the first account" in line]
    return line.split("password ")[1].split()[0]


def test_a_certificate_that_can_not_be_used_is_said(tmp_path: Path, pair: Pair) -> None:
    encrypted = make_pair(tmp_path / "encrypted", "console", password="secret")
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("no certificate")
    for options, expected in (
        (("--tls-cert", pair.certificate), "--tls-cert and --tls-key must be given together"),
        (("--tls-cert", rubbish, "--tls-key", pair.key), f"can't use --tls-cert {rubbish}"),
        (("--tls-cert", encrypted.certificate, "--tls-key", encrypted.key), "not encrypted"),
    ):
        program = Program("console", "--port", 0, "--data", tmp_path / "data", *options)
        program.line(expected)
        assert program.stop() != 0
        assert "Traceback" not in "".join(program.heard)
