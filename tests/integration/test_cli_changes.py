"""`topic create` and `group create` of what exists: the plan, and the question at a terminal."""

import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import Admin, Message, Producer
from penstock.plurals import count_text
from tests import json_kit
from tests.compat.penstock import Up

PATIENCE_S = 60
EXIT_ABORTED = 130


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(tmp_path_factory.mktemp("up")) as servers:
        yield servers


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "penstock.cli.main", *arguments]


def at_a_terminal(up: Up, answer: str, *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of a command whose stdin is a terminal at which this is typed."""
    ours, theirs = pty.openpty()
    try:
        os.write(ours, answer.encode())
        done = subprocess.run(
            command(*arguments),
            stdin=theirs,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            env={**os.environ, "NAMESRV_ADDR": up.address},
        )
        return done.returncode, done.stderr
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_topic_loses_queues_only_after_yes(up: Up) -> None:
    with Admin(up.address) as admin, Producer(up.address) as producer:
        code, asked = at_a_terminal(up, "", "topic", "create", "shrinks", "--queues", "4")
        assert (code, asked) == (0, "")  # a new topic
        for _ in range(8):
            producer.send(Message("shrinks", b"x"))
        fewer = ("topic", "create", "shrinks", "--queues", "2")
        code, asked = at_a_terminal(up, "n\n", *fewer)
        assert code == EXIT_ABORTED
        assert "topic shrinks on broker-a: read queues 4 → 2, write queues 4 → 2\n" in asked
        assert asked.endswith("penstock: nothing was changed\n")
        lost = [state for state in admin.describe_topic("shrinks").queues if state.count]
        for state in lost:
            queue = state.queue.queue_id
            told = (
                f"broker-a queue {queue}: {count_text(state.count, 'message')} can't be read\n"
                in asked
            )
            assert told == (queue >= 2)
        assert len(admin.describe_topic("shrinks").queues) == 4
        assert at_a_terminal(up, "y\n", *fewer)[0] == 0
        assert admin.describe_topic("shrinks").topic.brokers["broker-a"].read_queues == 2
        code, asked = at_a_terminal(up, "", *fewer)
        assert (code, asked) == (0, "")  # nothing changes


def test_a_group_is_disabled_only_after_yes(up: Up) -> None:
    def enabled() -> bool:
        with Admin(up.address) as admin:
            (info,) = [info for info in admin.groups() if info.name == "billing"]
            return info.brokers["broker-a"].consume_enabled

    assert at_a_terminal(up, "", "group", "create", "billing") == (0, "")
    disable = ("group", "create", "billing", "--disable")
    code, asked = at_a_terminal(up, "n\n", *disable)
    assert (code, enabled()) == (EXIT_ABORTED, True)
    assert "group billing on broker-a: consume enabled yes → no\n" in asked
    code, told = at_a_terminal(up, "", *disable, "--yes")
    assert (code, told) == (0, "group billing on broker-a: consume enabled yes → no\n")
    assert not enabled()
    code, told = at_a_terminal(up, "", "group", "create", "billing", "--enable")
    assert (code, told) == (0, "group billing on broker-a: consume enabled no → yes\n")


def by_a_script(up: Up, *arguments: str) -> tuple[int, str]:
    """Exit code and stderr of a command without a terminal."""
    done = subprocess.run(
        command(*arguments),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "NAMESRV_ADDR": up.address},
    )
    return done.returncode, done.stderr


def test_a_script_may_declare_and_add(up: Up) -> None:
    with Admin(up.address) as admin:
        create = ("topic", "create", "scripted")
        assert by_a_script(up, *create, "--queues", "3", "--perm", "r") == (0, "")
        assert by_a_script(up, *create, "--queues", "3") == (0, "")
        code, told = by_a_script(up, *create, "--read-queues", "5", "--perm", "rw")
        assert code == 0
        assert told == "topic scripted on broker-a: read queues 3 → 5, permission r → rw\n"
        settings = admin.describe_topic("scripted").topic.brokers["broker-a"]
        assert (settings.read_queues, settings.perm_text) == (5, "rw")
        code, told = by_a_script(up, *create, "--write-queues", "2", "--type", "FIFO")
        assert code == 0
        assert "write queues 3 → 2, message.type unset → FIFO\n" in told
        assert by_a_script(up, "group", "create", "scripted", "--retries-max", "3") == (0, "")
        code, told = by_a_script(up, "group", "create", "scripted", "--retries-max", "4")
        assert (code, told) == (0, "group scripted on broker-a: retries max 3 → 4\n")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("--queues", "1"), "read queues 3 → 1, write queues 3 → 1\n"),
        (("--read-queues", "2"), "read queues 3 → 2\n"),
        (("--perm", "-"), "permission rw → -\n"),
        (("--perm", "r"), "permission rw → r\n"),
    ],
)
def test_a_script_removes_nothing_of_a_topic_without_yes(
    up: Up, change: tuple[str, ...], told: str
) -> None:
    with Admin(up.address) as admin:
        admin.create_topic("declared", queues=3, perm="rw")
        before = admin.describe_topic("declared").topic.brokers["broker-a"]
        with Producer(up.address) as producer:
            for _ in range(3):
                producer.send(Message("declared", b"x"))
        code, text = by_a_script(up, "topic", "create", "declared", *change)
        assert code == 2
        assert f"topic declared on broker-a: {told}" in text
        assert "nothing was changed. Add --yes" in text
        assert ("can't be read" in text) == ("r" not in change)
        assert "Usage:" not in text
        assert admin.describe_topic("declared").topic.brokers["broker-a"] == before
        code, text = by_a_script(up, "topic", "create", "declared", *change, "--yes")
        assert code == 0
        assert told in text
        assert admin.describe_topic("declared").topic.brokers["broker-a"] != before


def test_a_script_disables_no_group_without_yes(up: Up) -> None:
    def enabled() -> bool:
        with Admin(up.address) as admin:
            (info,) = [info for info in admin.groups() if info.name == "cron"]
            return info.brokers["broker-a"].consume_enabled

    assert by_a_script(up, "group", "create", "cron") == (0, "")
    code, text = by_a_script(up, "group", "create", "cron", "--disable")
    assert (code, enabled()) == (2, True)
    assert "group cron on broker-a: consume enabled yes → no\n" in text
    code, text = by_a_script(up, "group", "create", "cron", "--disable", "-y")
    assert (code, enabled()) == (0, False)
    assert "consume enabled yes → no\n" in text


# --- JSON of changes


def decoded(up: Up, *arguments: str, config: str) -> Any:
    """The JSON of a command, checked against its schema."""
    done = subprocess.run(
        command(*arguments, "--json"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "NAMESRV_ADDR": up.address, "PENSTOCK_CONFIG_DIR": config},
    )
    assert done.returncode == 0, done.stderr
    return json_kit.check(" ".join(arguments[:2]), done.stdout)


def test_deletions_and_changes_have_json(up: Up, tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        return decoded(up, *arguments, config=str(tmp_path))

    run("topic", "create", "gone", "--queues", "1")
    assert run("topic", "delete", "gone", "-y") == {"topic": "gone", "brokers": ["broker-a"]}
    run("group", "create", "gone")
    deleted = run("group", "delete", "gone", "-y")
    assert deleted == {"group": "gone", "brokers": ["broker-a"], "offsets_kept": False}
    added = run("context", "add", "prod", "--access-key", "a", "--secret-key", "hidden")
    assert (added["context"], added["in_use"], added["secret_key"]) == ("prod", True, "******")
    assert run("context", "use", "--none") is None
    assert run("context", "use", "prod")["in_use"]
    assert run("context", "remove", "prod", "-y") == {"context": "prod"}


def test_changes_of_users_and_rules_have_json(up: Up, tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        return decoded(up, *arguments, config=str(tmp_path))

    (address,) = run("user", "create", "eve", "--password", "hidden12")["brokers"]
    changed = run("user", "update", "eve", "--disable")
    assert changed == {"user": "eve", "change": "changed", "brokers": [address]}
    granted = run("acl", "grant", "eve", "Topic:orders", "Pub,Sub")
    assert granted == {
        "user": "eve", "change": "set", "policy": "Custom", "resource": "Topic:orders",
        "actions": "Pub,Sub", "decision": "Allow", "brokers": [address],
    }  # fmt: skip
    assert run("acl", "deny", "eve", "Topic:x", "Pub")["decision"] == "Deny"
    assert run("acl", "delete", "eve", "Topic:x", "-y")["change"] == "deleted"
    assert run("acl", "delete", "eve", "-y")["resource"] is None
    assert run("user", "delete", "eve", "-y")["change"] == "deleted"
