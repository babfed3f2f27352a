"""`penstock scheduled` and `penstock transaction` against a real `penstock up`."""

import json
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from penstock import Decision, Message, Producer, TransactionProducer
from tests import json_kit
from tests.compat.penstock import Broker, NameServer
from tests.integration.cli_kit import PATIENCE_S, Penstock

USERS: dict[str, Any] = {
    "authenticationEnabled": True,
    "authorizationEnabled": True,
    "initAuthenticationUser": json.dumps({"username": "root", "password": "secret12"}),
    "recallMessageEnable": True,
}
KEYS = {"access_key": "root", "secret_key": "secret12"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Penstock]:
    """A cluster with access control, and commands of its super user."""
    root = tmp_path_factory.mktemp("waiting")
    with (
        NameServer(root / "n") as names,
        Broker(root / "b", root / "s", names.address, brokerName="one", **USERS),
    ):
        commands = Penstock(names.address, root / "config")
        commands.environment |= {
            "PENSTOCK_CLIENT_ACCESS_KEY": "root", "PENSTOCK_CLIENT_SECRET_KEY": "secret12"
        }  # fmt: skip
        yield commands


def scheduled(run: Penstock, *arguments: object) -> Any:
    return json_kit.check("scheduled list", run("scheduled", "list", "--json", *arguments).stdout)


def test_scheduled_messages_are_listed_and_recalled(run: Penstock) -> None:
    run("topic", "create", "later", "--queues", 1)
    assert scheduled(run)["messages"] == []
    with Producer(run.environment["NAMESRV_ADDR"], **KEYS) as producer:
        hour = [producer.send(Message("later", b"x", delay=timedelta(hours=1))) for _ in range(3)]
        level = producer.send(Message("later", b"x", delay_level=18, keys=["k"], tags="t"))
    deadline = time.monotonic() + PATIENCE_S
    while not (found := scheduled(run))["by_level"] or not found["by_topic"]:
        assert time.monotonic() < deadline  # the broker counts them within a second
    assert [one["message_id"] for one in found["messages"]] == [
        *(one.message_id for one in hour), level.message_id
    ]  # fmt: skip
    assert (found["by_level"], found["by_topic"]) == ({"18": 1}, {"later": 3})
    assert found["partial"] == []
    last = found["messages"][-1]
    assert (last["level"], last["recall_handle"], last["keys"]) == (18, None, ["k"])
    assert 7_190_000 < last["deliver_ms"] - last["store_ms"] <= 7_200_000
    assert [one["recall_handle"] for one in found["messages"][:3]] == [
        one.recall_handle for one in hour
    ]
    text = run("scheduled", "list", "--count", 1, "--scan", 2).stdout
    assert "partial: one: the 1 oldest timer records were not read" in text
    assert "partial: 2 more messages were found" in text
    assert scheduled(run, "--topic", "other")["messages"] == []

    handle = hour[0].recall_handle
    assert "--yes" in run("scheduled", "recall", handle, code=2).stderr
    recalled = run("scheduled", "recall", handle, "--yes", "--json").stdout
    assert json_kit.check("scheduled recall", recalled) == [{"message_id": hour[0].message_id}]
    assert hour[0].message_id not in run("scheduled", "list").stdout
    assert "is not a recall handle" in run("scheduled", "recall", "abc", "-y", code=1).stderr


def test_open_transactions_are_listed(run: Penstock) -> None:
    run("topic", "create", "paid", "--queues", 1)
    listed = json_kit.check("transaction list", run("transaction", "list", "--json").stdout)
    assert listed == {"messages": [], "partial": [], "unreachable": []}
    with TransactionProducer(
        run.environment["NAMESRV_ADDR"], group="payers", check=lambda _: Decision.UNKNOWN, **KEYS
    ) as producer:
        handles = [producer.prepare(Message("paid", b"x", keys=[f"k{n}"])) for n in range(5)]
        producer.commit(handles[1])
        producer.rollback(handles[3])
        listed = json_kit.check("transaction list", run("transaction", "list", "--json").stdout)
        assert [one["keys"] for one in listed["messages"]] == [["k0"], ["k2"], ["k4"]]
        first = listed["messages"][0]
        assert (first["topic"], first["group"], first["checks"]) == ("paid", "payers", 0)
        assert listed["partial"] == []
        text = run("transaction", "list", "--scan", 3, "--topic", "paid").stdout
        assert (
            "partial: one: the 2 oldest entries of RMQ_SYS_TRANS_HALF_TOPIC were not read" in text
        )
        for number in (0, 2, 4):
            producer.rollback(handles[number])
    assert run("transaction", "list").stdout.splitlines()[1:] == []


def test_only_who_may_read_the_messages_sees_them(run: Penstock) -> None:
    run("user", "create", "eve", "--password", "hidden12")
    as_eve = ("--access-key", "eve", "--secret-key", "hidden12")
    run("scheduled", "list", *as_eve, code=1)
    run("transaction", "list", *as_eve, code=1)
    run("acl", "grant", "eve", "Cluster:DefaultCluster", "Get")
    run("acl", "grant", "eve", "Topic:rmq_sys_wheel_timer", "Get")
    run("acl", "grant", "eve", "Topic:SCHEDULE_TOPIC_XXXX", "Get")
    run("topic", "create", "private", "--queues", 1)
    run("send", "private", "x", "--delay", "1h")
    found = scheduled(run, *as_eve)
    assert [one for one in found["messages"] if one["topic"] == "private"] == []
    assert any("could not be read (NoPermission)" in why for why in found["partial"])
    run("acl", "grant", "eve", "Topic:private", "Get")
    assert [one["topic"] for one in scheduled(run, *as_eve)["messages"]] == ["private"]


def test_directory_of_the_configuration_is_not_needed(run: Penstock, tmp_path: Path) -> None:
    run("scheduled", "list", PENSTOCK_CONFIG_DIR=str(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
