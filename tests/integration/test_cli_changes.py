"""`topic create` and `group create` of what exists: the plan, and the question at a terminal."""

import os
import pty
import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock import Admin, Message, Producer
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
        assert "topic shrinks on broker-a: read_queues 4 → 2, write_queues 4 → 2\n" in asked
        lost = [state for state in admin.describe_topic("shrinks").queues if state.count]
        for state in lost:
            queue = state.queue.queue_id
            told = f"broker-a queue {queue}: {state.count} messages can't be read\n" in asked
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
    assert "group billing on broker-a: consume_enabled yes → no\n" in asked
    assert at_a_terminal(up, "", *disable, "--yes") == (0, "")
    assert not enabled()


def test_a_script_is_not_asked(up: Up) -> None:
    with Admin(up.address) as admin:
        admin.create_topic("scripted", queues=3)
        done = subprocess.run(
            command("topic", "create", "scripted", "--queues", "1"),
            stdin=subprocess.DEVNULL,
            check=True,
            timeout=PATIENCE_S,
            env={**os.environ, "NAMESRV_ADDR": up.address},
        )
        assert done.returncode == 0
        assert admin.describe_topic("scripted").topic.brokers["broker-a"].read_queues == 1
