"""What commands say where there is nothing to show, nobody to ask, or a reason to explain."""

import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock import Admin
from tests.compat.penstock import Up
from tests.integration.cli_kit import Penstock, send

PATIENCE_S = 60


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(tmp_path_factory.mktemp("up")) as servers:
        yield servers


@pytest.fixture
def run(up: Up, tmp_path: Path) -> Penstock:
    return Penstock(up.address, tmp_path / "config")


def test_empty_lists_say_what_to_do_next(up: Up, run: Penstock) -> None:
    with Admin(up.address) as admin:
        for info in admin.topics():
            if info.kind.value == "normal":
                admin.delete_topic(info.name)
    assert run("topic", "list").stdout == "there is no topic\nnext: penstock topic create NAME\n"
    assert run("group", "list").stdout.splitlines()[0] == "there is no group"
    assert run("scheduled", "list").stdout.splitlines()[0] == "no message waits"
    assert run("transaction", "list").stdout == "no transaction is open\n"
    assert run("transaction", "list", "-t", "x").stdout == "no transaction is open in x\n"
    users = run("user", "list").stdout.splitlines()
    assert users[0] == "there is no user"
    assert users[1].startswith("access control is off")
    assert users[2] == "next: penstock user create NAME"
    assert run("acl", "list").stdout == "there is no access rule\nnext: penstock acl grant --help\n"
    contexts = run("context", "list").stdout
    assert contexts == "there is no context\nnext: penstock context add NAME -n HOST:PORT\n"
    for noun in ("topic", "group", "user", "acl", "context"):
        assert run(noun, "list", "--json").stdout == "[]\n"


def test_a_password_needs_a_terminal_an_option_or_a_line(run: Penstock) -> None:
    for arguments, option in (
        (("user", "create", "bob"), "--password"),
        (("context", "add", "prod", "--access-key", "ops"), "--secret-key"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "penstock.cli.main", *arguments],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S,
            env=run.environment, start_new_session=True,
        )  # fmt: skip
        assert done.returncode == 2, done.stderr
        assert "Warning" not in done.stderr
        assert f"Give {option}, or a line on stdin" in done.stderr
    add = ("context", "add", "prod", "--access-key", "ops")
    piped = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *add],
        input="hidden\n", capture_output=True, text=True, timeout=PATIENCE_S,
        env=run.environment, start_new_session=True,
    )  # fmt: skip
    assert piped.returncode == 0, piped.stderr
    assert "hidden" in run("context", "show", "prod", "--show-secrets").stdout


def test_a_topic_that_can_not_be_read_is_not_followed_in_silence(
    run: Penstock, tmp_path: Path
) -> None:
    run("topic", "create", "sealed", "--perm", "-")
    errors = tmp_path / "errors"
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", "tail", "sealed"],
            stdout=subprocess.DEVNULL, stderr=stderr, env=run.environment,
        ) as process,
    ):  # fmt: skip
        deadline = time.monotonic() + PATIENCE_S / 4
        while not errors.read_text().endswith("\n") and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        process.wait(PATIENCE_S)
    said = errors.read_text()
    assert said == "penstock: topic sealed can't be read: its permission is -; waiting\n"


def test_a_delay_that_is_too_long_is_not_about_the_size(run: Penstock) -> None:
    run("topic", "create", "late", "--type", "DELAY")
    error = run("send", "late", "x", "--delay", "999d", code=1).stderr
    assert "choose an earlier time, or raise the setting" in error
    assert "smaller" not in error


def test_errors_name_no_requests(run: Penstock) -> None:
    run("topic", "create", "plain", "--queues", 1)
    error = run("message", "show", "plain/broker-a/99@0", code=1).stderr
    assert "PULL_MESSAGE" not in error
    assert "consumerGroup" not in error
    assert error.startswith("penstock: 127.0.0.1:")
    traced = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "--debug", "message", "show",
         "plain/broker-a/99@0"],
        capture_output=True, text=True, timeout=PATIENCE_S, env=run.environment,
    )  # fmt: skip
    assert "Request: PULL_MESSAGE(consumerGroup=TOOLS_CONSUMER" in traced.stderr


def test_the_deletion_of_a_topic_names_what_waits_for_it(up: Up, run: Penstock) -> None:
    run("topic", "create", "doomed", "--queues", 1)
    send(up.address, "doomed", 1)
    run("send", "doomed", "later", "--delay", "1h", "--count", 2)
    deadline = time.monotonic() + PATIENCE_S
    asked = ""
    while "wait for their delivery" not in asked:  # brokers count them within a second
        assert time.monotonic() < deadline, asked
        asked = run("topic", "delete", "doomed", stdin="n\n", code=130).stderr
    assert "broker-a queue 0: 1 message (offsets 0 to 1)\n" in asked
    assert "\n2 timer messages wait for their delivery to the topic\n" in asked
    assert asked.endswith("penstock: nothing was changed\n")


def test_a_refused_question_does_not_print_the_usage(run: Penstock) -> None:
    run("topic", "create", "kept", "--queues", 1)
    error = run("topic", "delete", "kept", code=2).stderr
    assert "Usage" not in error
    assert "nothing was changed. Add --yes" in error
    resend = run("message", "resend", "--topic", "kept", "--since", "1h", code=3).stderr
    assert "there is nothing to send" in resend


def test_a_check_whose_warning_exceeds_its_critical_value_is_refused(run: Penstock) -> None:
    refused = run("check", "--lag-warning", 10, "--lag-critical", 5, code=3).stderr
    assert "--lag-warning (10) must not exceed --lag-critical (5)" in refused
    run("check", "--lag-warning", 5, "--lag-critical", 5, "--disk-warning", 100,
        "--disk-critical", 100)  # fmt: skip


def test_numbers_agree_with_their_nouns(up: Up, run: Penstock) -> None:
    line = run("check", "--disk-warning", 100, "--disk-critical", 100).stdout
    assert line.startswith("OK - 1 broker answers | ")
    made = run("topic", "create", "single", "--queues", 1).stdout
    assert made == "topic single is on broker-a: 1 queue to write, 1 to read, rw, UNSPECIFIED\n"
    run("group", "create", "once", "--retries-max", 1)
    send(up.address, "single", 1)
    moved = run("group", "reset", "once", "-t", "single", "--to", "first", "--yes").stdout
    assert "changed the offset of 1 queue" in moved or "changed the offsets of 1 queue" in moved
    again = run("group", "reset", "once", "-t", "single", "--to", "last", "--yes").stdout
    assert "1 message will be skipped, 0 will be consumed again" in again


def test_long_work_shows_a_progress_bar_on_a_terminal(run: Penstock) -> None:
    run("topic", "create", "bars", "--queues", 1)
    assert "sending" in at_a_terminal(run, "send", "bars", "x", "--keys", "k", "--count", "200")
    assert "sending" not in at_a_terminal(run, "send", "bars", "x")
    assert "topics" in at_a_terminal(run, "message", "find", "k")


def at_a_terminal(run: Penstock, *arguments: str) -> str:
    """What a command prints on its stderr, which is a terminal."""
    ours, theirs = pty.openpty()
    try:
        subprocess.run(
            [sys.executable, "-m", "penstock.cli.main", *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=theirs, check=True,
            timeout=PATIENCE_S, env={**run.environment, "TERM": "xterm"},
        )  # fmt: skip
        os.set_blocking(ours, False)
        try:
            return os.read(ours, 1 << 16).decode()
        except BlockingIOError:
            return ""
    finally:
        os.close(ours)
        os.close(theirs)
