"""The commands for groups, health, definitions and waiting messages with Apache's servers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock import Consumer, Decision, Message, Producer, TransactionProducer
from penstock.client.received_message import ReceivedMessage
from tests import json_kit
from tests.integration.cli_kit import PATIENCE_S, Penstock

from . import apache, maven, penstock

pytestmark = [pytest.mark.compat, pytest.mark.slow]

KEYS = {"access_key": "root", "secret_key": "root-secret"}
VARIABLES = {
    "PENSTOCK_CLIENT_ACCESS_KEY": "root",
    "PENSTOCK_CLIENT_SECRET_KEY": "root-secret",
}


@pytest.fixture(scope="module", params=maven.SERVER_VERSIONS)
def run(
    java: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Penstock]:
    """Commands for one cluster of Apache's, with timers, recalls and (5.4.0) access control."""
    root, version = tmp_path_factory.mktemp("apache"), request.param
    conf = {
        **(apache.access_control("root", "root-secret") if version == maven.V5_4 else {}),
        "timerWheelEnable": True,
        "recallMessageEnable": True,
        "appendTopicForTimerDeleteKey": True,
        "transactionCheckInterval": 1_000_000,
    }
    with (
        apache.NameServer(root / "names", version=version) as names,
        apache.Broker(root / "broker", root / "store", names.address, version=version, **conf),
    ):
        commands = Penstock(names.address, root / "config")
        commands.environment |= VARIABLES
        commands.environment["ACCESS"] = "on" if version == maven.V5_4 else ""
        yield commands


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Penstock]:
    """Commands for one of Penstock's clusters, with access control."""
    root = tmp_path_factory.mktemp("ours")
    conf = {
        "authenticationEnabled": True,
        "authorizationEnabled": True,
        "initAuthenticationUser": json.dumps({"username": "root", "password": "root-secret"}),
    }
    with (
        penstock.NameServer(root / "n") as names,
        penstock.Broker(root / "b", root / "s", names.address, brokerName="ours", **conf),
    ):
        commands = Penstock(names.address, root / "config")
        commands.environment |= VARIABLES
        yield commands


def names_of(run: Penstock) -> str:
    return run.environment["NAMESRV_ADDR"]


def consume(run: Penstock, topic: str, group: str, count: int) -> None:
    seen: list[str] = []
    with Consumer(names_of(run), group=group, start_at="first", **KEYS) as consumer:

        @consumer.on(topic)
        def take(message: ReceivedMessage) -> None:
            seen.append(message.message_id)

        consumer.start()
        until(lambda: len(seen) >= count)


def until(is_so: Any) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := is_so()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found


def test_groups(run: Penstock, fresh: str) -> None:
    run("topic", "create", fresh, "--queues", 2)
    run("send", fresh, "x", "--count", 10)
    run("group", "create", fresh, "--retries-max", 3)
    consume(run, fresh, fresh, 10)
    run("send", fresh, "x", "--count", 2)

    def lag() -> Any:
        shown = run("group", "describe", fresh, "--topic", fresh, "--json").stdout
        return json_kit.check("group describe", shown)["lag"]

    until(lambda: lag() == 2)
    plan = ("group", "reset", fresh, "-t", fresh, "--to", "first")
    assert "10 will be consumed again" in run(*plan, "--dry-run").stdout
    run(*plan, "--yes")
    assert lag() == 12
    run("group", "undo", "--yes")
    assert lag() == 2
    rows = json_kit.check("group list", run("group", "list", "--lag", "--json").stdout)
    assert [(row["lag"], row["members"]) for row in rows if row["group"] == fresh] == [(2, 0)]
    run("group", "delete", fresh, "--yes")
    assert fresh not in run("group", "list").stdout


def test_health(run: Penstock) -> None:
    line = run("check", "--disk-warning", 100, "--disk-critical", 100, "--lag-critical", 10**9)
    assert line.stdout.startswith("OK - 1 broker answers | 'masters'=1")
    report = json.loads(run("doctor", "--json").stdout)
    json_kit.check("doctor", json.dumps(report))
    serious = [one for one in report["findings"] if one["subject"] not in ("limits", "disk")]
    assert serious == [], "the clock, the address and the version are right"
    assert report["skipped"] == []


def test_scheduled_messages(run: Penstock, fresh: str) -> None:
    run("topic", "create", fresh, "--queues", 1)
    with Producer(names_of(run), **KEYS) as producer:
        timed = [producer.send(Message(fresh, b"x", delay=timedelta(hours=1))) for _ in range(2)]
        level = producer.send(Message(fresh, b"x", delay_level=18, keys=["k"]))

    def waiting() -> Any:
        shown = run("scheduled", "list", "--topic", fresh, "--json").stdout
        return json_kit.check("scheduled list", shown)

    found = until(lambda: (seen := waiting())["by_level"] and seen["by_topic"] and seen)
    assert [one["message_id"] for one in found["messages"]] == [
        *(one.message_id for one in timed), level.message_id
    ]  # fmt: skip
    assert (found["by_level"], found["by_topic"], found["partial"]) == ({"18": 1}, {fresh: 2}, [])
    assert found["messages"][0]["recall_handle"] == timed[0].recall_handle
    delay_ms = found["messages"][2]["deliver_ms"] - found["messages"][2]["store_ms"]
    assert 7_100_000 < delay_ms <= 7_200_000
    run("scheduled", "recall", found["messages"][0]["recall_handle"], "--yes")
    assert [one["message_id"] for one in waiting()["messages"]] == [
        timed[1].message_id, level.message_id
    ]  # fmt: skip


def test_open_transactions(run: Penstock, fresh: str) -> None:
    run("topic", "create", fresh, "--queues", 1, "--type", "TRANSACTION")
    with TransactionProducer(
        names_of(run), group=fresh, check=lambda _: Decision.UNKNOWN, **KEYS
    ) as producer:
        handles = [producer.prepare(Message(fresh, b"x", keys=[f"k{n}"])) for n in range(4)]
        producer.commit(handles[0])
        producer.rollback(handles[2])

        def keys() -> Any:
            shown = run("transaction", "list", "--topic", fresh, "--json").stdout
            listed = json_kit.check("transaction list", shown)
            assert listed["partial"] == []
            return [one["keys"] for one in listed["messages"]]

        until(lambda: keys() == [["k1"], ["k3"]])  # Apache writes op messages seconds later


def test_definitions_move_to_penstock_and_back(
    run: Penstock, ours: Penstock, fresh: str, tmp_path: Path
) -> None:
    run("topic", "create", fresh, "--queues", 3, "--type", "FIFO")
    run("group", "create", fresh, "--retries-max", 7, "--orderly")
    access = bool(run.environment["ACCESS"])
    if access:
        run("user", "create", "alice", "--password", "alice-secret")
        run("acl", "grant", "alice", f"Topic:{fresh}", "Pub")
    there, back = tmp_path / "there.json", tmp_path / "back.json"
    run("export", "--output", there, "--secrets", "--offsets")
    exported = json_kit.check("export", there.read_text())
    passwords = {one["user"]: one["password"] for one in exported["users"]}
    assert passwords.get("alice") == ("alice-secret" if access else None)
    report = json_kit.check("import", ours("import", there, "--yes", "--json").stdout)
    assert [item for item in report["items"] if item["error"]] == []
    assert "0 to create, 0 to change" in ours("import", there, "--yes").stdout
    topics = {row["topic"]: row for row in json.loads(ours("topic", "list", "--json").stdout)}
    assert topics[fresh]["brokers"]["ours"]["type"] == "FIFO"
    if access:
        signed = ("--access-key", "alice", "--secret-key", "alice-secret")
        ours("send", fresh, "x", "--ordering-key", "k", *signed)

    ours("topic", "create", f"{fresh}-new", "--queues", 2, "--perm", "r")
    ours("export", "-o", back)
    importing = ("import", back, "--yes", *(() if access else ("--skip-access",)))
    assert f"{fresh}-new" in run(*importing).stdout
    assert "0 to create, 0 to change" in run(*importing).stdout
    assert f"{fresh}-new" in run("topic", "list").stdout
    for place in (run, ours) if access else ():
        place("user", "delete", "alice", "--yes")


# --- messages, dead letters and explanations


def eventually(run: Penstock, *arguments: object) -> str:
    """The output of a command that succeeds soon: Apache's broker indexes messages later."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return run(*arguments).stdout
        except AssertionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def test_messages_are_found_shown_sent_again_and_explained(run: Penstock, fresh: str) -> None:
    run("topic", "create", fresh, "--queues", 1)
    key = f"key-{fresh}"
    sent = json.loads(run("send", fresh, '{"id": 1}', "--keys", key, "--json").stdout)
    message_id, place = sent["message_id"], f"{fresh}/{sent['broker']}/0@0"
    for what in (message_id, key, place, sent["offset_id"]):
        found = eventually(run, "message", "find", what, "--topic", fresh, "--json")
        (message,) = json_kit.check("message find", found)["messages"]
        assert (message["message_id"], message["body"]) == (message_id, '{"id": 1}')
    assert f" {place}\n" in run("message", "show", place).stdout
    assert run("message", "find", "nothing", "--topic", fresh, code=3).stdout
    wrong = run("message", "find", key, "--topic", f"{fresh}x", code=1).stderr
    assert f"similar topics: {fresh}" in wrong
    resent = run("message", "resend", key, "--topic", fresh, "--yes", "--json").stdout
    (copy,) = json_kit.check("message resend", resent)["sent"]
    assert (copy["message_id"], copy["offset"]) == (message_id, 1)
    consume(run, fresh, fresh, 2)
    explain = ("explain", "message", place, "--group", fresh)
    answer = json_kit.check("explain message", run(*explain, "--json").stdout)
    assert answer["verdict"] == "consumed"
    similar = run("explain", "group", f"{fresh}x", code=3).stdout
    assert f"(similar groups: {fresh}" in similar
    group = run("explain", "group", fresh, "--json", code=3).stdout
    assert json_kit.check("explain group", group)["verdict"] == "no_member"


def test_dead_letters_are_listed_shown_sent_again_and_explained(run: Penstock, fresh: str) -> None:
    run("topic", "create", fresh, "--queues", 1)
    message_id = run("send", fresh, "bad").stdout.split()[1]
    fails, seen = True, list[str]()
    consumer = Consumer(names_of(run), group=fresh, start_at="first", retries_max=0, **KEYS)
    with consumer:

        @consumer.on(fresh)
        def take(message: ReceivedMessage) -> bool:
            seen.append(message.message_id)
            return not fails

        consumer.start()
        listed = ("dlq", "list", fresh, "--json")
        until(lambda: seen and json.loads(eventually(run, *listed)))
        (letter,) = json_kit.check("dlq list", run(*listed).stdout)
        assert (letter["message_id"], letter["topic"]) == (message_id, fresh)
        shown = json.loads(eventually(run, "dlq", "show", fresh, message_id, "--json"))
        assert shown == letter
        why = run("explain", "message", message_id, "-g", fresh, "--json", code=3).stdout
        assert json_kit.check("explain message", why)["verdict"] == "dead_letter"
        run("dlq", "resend", fresh, "--id", "nope", "--yes", code=3)
        fails = False
        report = run("dlq", "resend", fresh, "--all", "--yes", "--json").stdout
        assert [one["message_id"] for one in json_kit.check("dlq resend", report)["sent"]] == [
            message_id
        ]
        until(lambda: len(seen) == 2)
    missing = run("dlq", "list", f"{fresh}x", code=3).stderr
    assert f"no broker has the group '{fresh}x' (similar groups: {fresh}" in missing
