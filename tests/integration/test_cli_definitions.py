"""`penstock export` and `penstock import` between two clusters."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import Admin
from tests import json_kit
from tests.compat.penstock import Broker, NameServer
from tests.integration.cli_kit import Penstock

USERS = {
    "authenticationEnabled": True,
    "authorizationEnabled": True,
    "initAuthenticationUser": json.dumps({"username": "root", "password": "secret12"}),
}
KEYS = {"PENSTOCK_CLIENT_ACCESS_KEY": "root", "PENSTOCK_CLIENT_SECRET_KEY": "secret12"}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Penstock]:
    root = tmp_path_factory.mktemp("source")
    with (
        NameServer(root / "n") as names,
        Broker(root / "a", root / "sa", names.address, brokerName="one", **USERS),
    ):
        run = Penstock(names.address, root / "config")
        run.environment.update(KEYS)
        yield run


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Penstock]:
    root = tmp_path_factory.mktemp("target")
    with (
        NameServer(root / "n") as names,
        Broker(root / "a", root / "sa", names.address, brokerName="east", **USERS),
        Broker(root / "b", root / "sb", names.address, brokerName="west", **USERS),
    ):
        run = Penstock(names.address, root / "config")
        run.environment.update(KEYS)
        yield run


def test_definitions_travel_and_a_second_import_changes_nothing(
    source: Penstock, target: Penstock, tmp_path: Path
) -> None:
    source("topic", "create", "orders", "--queues", 3, "--type", "FIFO")
    source("topic", "create", "ledger", "--queues", 2, "--order")
    source("group", "create", "billing", "--retries-max", 4, "--orderly")
    source("user", "create", "alice", "--password", "hidden12")
    source("acl", "grant", "alice", "Topic:orders", "Pub,Sub", "--from", "10.0.0.0/8")
    with Admin(
        source.environment["NAMESRV_ADDR"], access_key="root", secret_key="secret12"
    ) as admin:
        admin.put_kv("mine", "colour", "blue")
    file = tmp_path / "definitions.json"
    said = source("export", "-o", file, "--kv-namespace", "mine", "--secrets")
    assert said.stdout == f"wrote 2 topics, 1 group, 2 users, 1 rule to {file}\n"
    assert "did not tell the passwords of 2 users" in said.stderr
    assert file.stat().st_mode & 0o777 == 0o600
    exported = json_kit.check("export", file.read_text())
    assert exported["kv"]["mine"] == {"colour": "blue"}

    planned = target("import", file, "--dry-run", "--new-passwords").stdout
    assert "create  topic  orders " in planned
    refused = target("import", file, "--new-passwords", code=2).stderr
    assert "--yes" in refused
    assert "orders" not in target("topic", "list").stdout
    report = json_kit.check(
        "import", target("import", file, "--yes", "--new-passwords", "--json").stdout
    )
    assert not [item for item in report["items"] if item["error"]]
    (password,) = {item["password"] for item in report["items"] if item["name"] == "alice"}

    again = target("import", file, "--yes").stdout
    assert again == "0 to create, 0 to change, 13 unchanged, 0 skipped\n"
    topics = {row["topic"]: row for row in json.loads(target("topic", "list", "--json").stdout)}
    assert topics["orders"]["brokers"]["west"]["write_queues"] == 3
    assert topics["orders"]["brokers"]["east"]["type"] == "FIFO"
    assert topics["ledger"]["brokers"]["east"]["order"] is True
    groups = json.loads(target("group", "list", "--json").stdout)
    assert groups[0]["brokers"]["east"]["retries_max"] == 4
    rules = json.loads(target("acl", "list", "--json").stdout)
    assert [(rule["user"], rule["from"]) for rule in rules] == [("alice", "10.0.0.0/8")]
    sent = target(
        "send", "orders", "x", "--ordering-key", "k", "--access-key", "alice", "--secret-key",
        password, code=1,
    ).stderr  # fmt: skip
    assert "127.0.0.1" in sent, "the password is right, but the rule is for another network"

    target("topic", "create", "orders", "--perm", "r", "-b", "east", "--yes")
    changed = target("import", "-", "--yes", stdin=file.read_text())
    assert "change  topic  orders  east   perm r → rw" in changed.stdout
    assert "made 1 change, 0 failed" in changed.stdout


def test_offsets(source: Penstock, tmp_path: Path) -> None:
    source("topic", "create", "counted", "--queues", 1)
    source("send", "counted", "x", "--count", 5)
    source("group", "create", "readers")
    source("group", "reset", "readers", "-t", "counted", "--to", "last", "--yes")
    file = tmp_path / "definitions.json"
    source("export", "--output", file, "--offsets")
    assert {"group": "readers", "topic": "counted", "broker": "one", "queue": 0, "offset": 5} in (
        json.loads(file.read_text())["offsets"]
    )
    source("group", "reset", "readers", "-t", "counted", "--to", "first", "--yes")
    said = source("import", file, "--offsets", "--skip-access", "--yes").stdout
    assert "change  offset  readers counted/0  one    0 → 5" in said
    shown = json.loads(source("group", "describe", "readers", "--json").stdout)
    assert [at["committed"] for at in shown["queues"]] == [5]


def test_wrong_files(source: Penstock, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text("{}")
    assert "is not a file of definitions" in source("import", file, code=1).stderr
    source("import", tmp_path / "missing", code=2)
    source("topic", "create", "piped", "--queues", 1)
    changed = source("export").stdout.replace('"piped"', '"piped-too"')
    asked = source("import", "-", stdin=changed, code=2)
    assert "add --yes" in asked.stderr
    assert "piped-too" not in source("topic", "list").stdout
