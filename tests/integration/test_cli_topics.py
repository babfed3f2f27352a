"""`penstock send`, `tail` and `topic` against a real `penstock up`, and what `up` prints."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import Admin
from tests import json_kit
from tests.compat.penstock import Broker, NameServer, Up

PATIENCE_S = 60
EXAMPLE_S = 30


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(tmp_path_factory.mktemp("up"), brokers=2) as servers:
        yield servers


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "penstock.cli.main", *map(str, arguments)]


def environment(up: Up | None, **more: str) -> dict[str, str]:
    names = {"NAMESRV_ADDR": up.address} if up is not None else {}
    return {**os.environ, **names, **more}


def run(
    up: Up | None, *arguments: object, stdin: str = "", code: int = 0, **more: str
) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=PATIENCE_S, input=stdin,
        env=environment(up, **more),
    )  # fmt: skip
    assert result.returncode == code, result.stdout + result.stderr
    return result


# --- topics


def test_create_describe_and_delete_a_topic(up: Up) -> None:
    made = run(up, "topic", "create", "life", "--queues", 3, "--type", "fifo").stdout
    assert made.splitlines() == [
        f"topic life is on {name}: 3 queues to write, 3 to read, rw, FIFO"
        for name in ("broker-a", "broker-b")
    ]
    run(up, "send", "life", "hello", "--ordering-key", "k")
    listed = run(up, "topic", "list").stdout
    assert re.search(r"^life +normal +FIFO +3 +3 +rw +broker-a, broker-b$", listed, re.MULTILINE)
    assert "TBW102" not in listed
    assert "TBW102" in run(up, "topic", "list", "--all").stdout

    shown = run(up, "topic", "describe", "life").stdout
    assert "topic life (normal): 1 message in 6 queues" in shown
    assert "consumed by: none" in shown
    decoded = json.loads(run(up, "topic", "describe", "life", "--json").stdout)
    assert decoded["brokers"]["broker-a"]["type"] == "FIFO"
    assert sum(queue["max_offset"] for queue in decoded["queues"]) == 1

    changed = json.loads(
        run(up, "topic", "create", "life", "--perm", "r", "-b", "broker-b", "-y", "--json").stdout
    )
    assert changed["brokers"]["broker-b"]["perm"] == "r"
    assert changed["brokers"]["broker-b"]["write_queues"] == 3
    asked = run(up, "topic", "delete", "life", stdin="n\n", code=130)
    assert asked.stdout == ""
    assert "with all its messages on broker-a, broker-b?" in asked.stderr
    gone = run(up, "topic", "delete", "life", "--yes").stdout
    assert gone == "deleted topic life on broker-a, broker-b\n"
    error = run(up, "topic", "describe", "life", code=1).stderr
    assert error.startswith("penstock: no broker has the topic 'life'")
    assert len(error.splitlines()) == 1


def test_json_output_matches_its_schema(up: Up) -> None:
    run(up, "topic", "create", "schemed", "--queues", 1)

    def check(command: str, *arguments: object) -> Any:
        return json_kit.check(command, run(up, *command.split(), *arguments, "--json").stdout)

    assert check("send", "schemed", "x")[0]["status"] == "SEND_OK"
    assert check("tail", "schemed", "--from", "first", "--count", 1)[0]["body"] == "x"
    assert check("topic create", "schemed")["topic"] == "schemed"
    assert check("topic describe", "schemed")["put_tps"] is not None
    assert check("topic list", "--all")
    assert check("cluster status")
    assert check("cluster elections") == []
    run(up, "user", "create", "seen", "--password", "hidden12")
    run(up, "acl", "grant", "seen", "Topic:schemed", "Pub")
    assert check("user list") == check("user get", "seen")
    assert check("acl list") == check("acl get", "seen")
    run(up, "user", "delete", "seen", "--yes")
    assert check("pipeline list")
    assert check("pipeline describe", "lake")["name"] == "lake"


def test_cluster_status_of_masters_without_slaves(up: Up) -> None:
    lines = run(up, "cluster", "status").stdout.splitlines()
    assert lines[0].startswith("BROKER    ID  ADDRESS ")
    assert [line.split()[:2] for line in lines[1:]] == [["broker-a", "0"], ["broker-b", "0"]]
    assert lines[1].split()[2:5] == [up.broker_address, "async_master", "1"]
    assert lines[1].split()[6:] == ["-", "-"]
    decoded = json.loads(run(up, "cluster", "status", "--json").stdout)
    assert [(one["broker"], one["id"], one["behind"], one["in_sync"]) for one in decoded] == [
        ("broker-a", 0, None, None),
        ("broker-b", 0, None, None),
    ]


def test_every_setting_of_a_topic(up: Up) -> None:
    made = run(
        up, "topic", "create", "shaped", "--read-queues", 4, "--write-queues", 2, "--order",
        "--attribute", "message.type=DELAY", "--cluster", "DefaultCluster", "--broker",
        "broker-a", "--json",
    ).stdout  # fmt: skip
    assert json.loads(made)["brokers"] == {
        "broker-a": {
            "read_queues": 4, "write_queues": 2, "perm": "rw", "order": True,
            "type": "DELAY", "attributes": {"message.type": "DELAY"},
        }
    }  # fmt: skip
    made = run(up, "topic", "create", "shaped", "--no-order", "--attribute", "message.type=",
               "-b", "broker-a", "--json").stdout  # fmt: skip
    changed = json.loads(made)["brokers"]["broker-a"]
    assert (changed["order"], changed["attributes"]) == (False, {})
    assert "shaped" in run(up, "topic", "list", "--cluster", "DefaultCluster").stdout
    gone = run(up, "topic", "delete", "shaped", "--yes", "--cluster", "DefaultCluster").stdout
    assert gone == "deleted topic shaped on broker-a\n"


def test_names_in_a_namespace(up: Up) -> None:
    inside = ("--namespace", "ns", "--nameserver", up.address)
    run(None, "topic", "create", "named", "--queues", 1, *inside)
    run(None, "send", "named", "x", "--group", "senders", "--tags", "t", "--keys", "k",
        "--property", "p=v", *inside)  # fmt: skip
    decoded = run(None, "tail", "named", "--from", "first", "--count", 1, "--json", *inside).stdout
    assert json.loads(decoded)["topic"] == "named"
    assert "named" in run(None, "topic", "list", *inside).stdout
    assert "ns%named" in run(up, "topic", "list").stdout
    with Admin(up.address) as admin:  # reading does not create a group
        assert not [group.name for group in admin.groups(system=True) if "ns%" in group.name]
    run(None, "tail", "named", "--from", "first", "--count", 1, "--group", "lookers", "--tags", "t",
        *inside)  # fmt: skip
    run(None, "topic", "delete", "named", "--yes", *inside)


def test_an_error_names_similar_topics(up: Up) -> None:
    run(up, "topic", "create", "invoices")
    error = run(up, "topic", "describe", "invoice", code=1).stderr
    assert "similar topics: invoices" in error
    assert up.address in error


def test_unreachable_servers() -> None:
    result = run(None, "topic", "list", "-n", "127.0.0.1:1", code=1)
    assert result.stderr.startswith("penstock: no NameServer answers: 127.0.0.1:1: can't connect")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("topic", "create", "two words"), "is not a valid topic name"),
        (("topic", "list", "-c", "Nowhere"), "know no cluster 'Nowhere'"),
        (("topic", "create", "x", "-b", "broker-z"), "know no master broker-z"),
    ],
)
def test_a_failure_is_one_line(up: Up, arguments: tuple[str, ...], text: str) -> None:
    error = run(up, *arguments, code=1).stderr
    assert text in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("send", "t", "b", "--delay", "soon"),
        ("send", "t", "b", "--at", "tomorrow"),
        ("send", "t", "b", "--delay", "1s", "--at", "1"),
        ("send", "t", "b", "-p", "novalue"),
        ("tail", "t", "--from", "somewhere"),
        ("tail", "t", "--from", "1000000d"),
        ("send", "t", "b", "--at", "1794804755"),
        ("topic", "create", "t", "--queues", "0"),
        ("topic", "list", "--access-key", "only"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    assert "Usage: penstock" in run(None, *arguments, code=2).stderr


# --- send and tail


def test_send_and_tail_one_message(up: Up) -> None:
    run(up, "topic", "create", "single", "--queues", 1, "-b", "broker-a")
    said = run(
        up, "send", "single", "grüße", "-t", "hello", "-k", "k1", "-k", "k2", "-p", "colour=blue"
    ).stdout
    match = re.fullmatch(r"sent ([0-9A-F]{32}) to single, queue 0 of broker-a, offset 0\n", said)
    assert match is not None
    line = run(up, "tail", "single", "--from", "first", "--count", 1).stdout
    assert line.endswith("broker-a/0 @0 [hello] (k1 k2) grüße\n")
    decoded = json.loads(run(up, "tail", "single", "--from", "1h", "--count", 1, "--json").stdout)
    assert decoded["message_id"] == match[1]
    assert (decoded["body"], decoded["tags"], decoded["keys"]) == ("grüße", "hello", ["k1", "k2"])
    assert decoded["properties"]["colour"] == "blue"


def test_bodies_from_stdin_and_files(up: Up, tmp_path: Path) -> None:
    run(up, "topic", "create", "bodies", "--queues", 1, "-b", "broker-a")
    run(up, "send", "bodies", "-", stdin="from\nstdin")
    file = tmp_path / "body"
    file.write_bytes(b"\xff\x00")
    run(up, "send", "bodies", f"@{file}")
    file.write_text("one\r\ntwo\n\nthree")
    said = run(up, "send", "bodies", f"@{file}", "--lines").stdout
    assert said.startswith("sent 3 messages to bodies in ")
    receipts = run(up, "send", "bodies", "-", "--lines", "--json", stdin="four\nfive\n").stdout
    assert [json.loads(line)["status"] for line in receipts.splitlines()] == ["SEND_OK"] * 2
    run(up, "send", "bodies", "again", "--count", 2)
    lines = run(up, "tail", "bodies", "--from", "first", "--count", 9, "--json").stdout
    decoded = [json.loads(line) for line in lines.splitlines()]
    assert [item.get("body") for item in decoded] == [
        "from\nstdin", None, "one", "two", "three", "four", "five", "again", "again"
    ]  # fmt: skip
    assert decoded[1]["body_base64"] == "/wA="


def test_kinds_of_stdin(up: Up) -> None:
    run(up, "topic", "create", "stdins", "--queues", 1, "-b", "broker-a")
    with open(os.devnull) as nothing:  # a device that an event loop can't wait for
        result = subprocess.run(
            command("send", "stdins", "-", "--lines"), stdin=nothing, capture_output=True,
            text=True, timeout=PATIENCE_S, env=environment(up),
        )  # fmt: skip
    assert result.stdout.startswith("sent 0 messages")
    assert result.stderr == ""
    closed = " ".join([*command("send", "stdins", "-"), "<&-"])
    result = subprocess.run(
        ["bash", "-c", closed], capture_output=True, text=True, env=environment(up)
    )
    assert result.returncode == 2
    assert "stdin is closed" in result.stderr
    long = run(up, "send", "stdins", "-", "--lines", stdin="a\n" + "b" * 5_000_000, code=1).stderr
    assert long.startswith("penstock: 1 message was sent, then: a line of stdin is longer than")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_waiting_for_a_body_can_be_interrupted(up: Up, number: signal.Signals) -> None:
    with subprocess.Popen(
        command("send", "never", "-"), stdin=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment(up),
    ) as process:  # fmt: skip
        try:
            waits_in_read(process.pid)
            process.send_signal(number)
            assert process.wait(PATIENCE_S) in (130, -signal.SIGTERM)
        finally:
            process.kill()


def waits_in_read(pid: int) -> None:
    """Wait until a process waits for its stdin."""
    deadline = time.monotonic() + PATIENCE_S
    while not Path(f"/proc/{pid}/wchan").read_text().endswith("pipe_read"):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_line_of_tail_is_one_message(up: Up) -> None:
    run(up, "topic", "create", "escaped", "--queues", 1, "-b", "broker-a")
    run(up, "send", "escaped", "a\nb\tc\x1b[31m")
    line = run(up, "tail", "escaped", "--from", "first", "--count", 1).stdout
    assert line.endswith("@0 a\\nb\tc\\x1b[31m\n")


def test_filters(up: Up) -> None:
    run(up, "topic", "create", "filtered", "--queues", 1, "-b", "broker-a")
    for number, tag in enumerate("abab"):
        run(up, "send", "filtered", number, "-t", tag, "-p", f"n={number}")
    by_tag = run(up, "tail", "filtered", "--from", "first", "--count", 2, "-t", "b").stdout
    assert [line[-1] for line in by_tag.splitlines()] == ["1", "3"]
    by_sql = run(up, "tail", "filtered", "--from", "first", "--count", 2, "--sql", "n > 1").stdout
    assert [line[-1] for line in by_sql.splitlines()] == ["2", "3"]


def test_a_delayed_message_can_be_recalled_by_its_handle(up: Up) -> None:
    run(up, "topic", "create", "delayed", "--queues", 1, "--type", "DELAY")
    said = run(up, "send", "delayed", "later", "--delay", "1h").stdout
    assert "\nrecall handle: " in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_tail_runs_until_a_signal(up: Up, tmp_path: Path, number: signal.Signals) -> None:
    topic = f"followed-{number}"
    run(up, "topic", "create", topic, "--queues", 2)
    out, errors = tmp_path / "out", tmp_path / "errors"
    with (
        out.open("wb") as stdout,
        errors.open("wb") as stderr,
        subprocess.Popen(
            command("tail", topic), stdout=stdout, stderr=stderr, env=environment(up)
        ) as process,
    ):
        try:
            # It starts at the end of the topic, which it queries at an unknown time.
            deadline = time.monotonic() + PATIENCE_S
            while "hello" not in out.read_text():
                assert time.monotonic() < deadline
                run(up, "send", topic, "hello")
            process.send_signal(number)
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
    assert errors.read_text() == ""
    assert run(up, "topic", "describe", topic).stdout.endswith("consumed by: none\n")


def test_tail_ends_when_its_reader_is_gone(up: Up) -> None:
    run(up, "topic", "create", "piped", "--queues", 1)
    run(up, "send", "piped", "hello", "--count", 50)
    program = " ".join(command("tail", "piped", "--from", "first"))
    result = subprocess.run(
        ["bash", "-c", f"{program} | head -2"], capture_output=True, text=True,
        timeout=PATIENCE_S, env=environment(up),
    )  # fmt: skip
    assert len(result.stdout.splitlines()) == 2
    assert result.stderr == ""


# --- unavailable brokers


def test_an_unreachable_broker_is_reported(tmp_path: Path) -> None:
    with (
        NameServer(tmp_path / "names") as names,
        Broker(tmp_path / "a", tmp_path / "sa", names.address, brokerName="broker-a") as here,
        Broker(tmp_path / "b", tmp_path / "sb", names.address, brokerName="broker-b") as away,
    ):
        at: tuple[str, ...] = ("-n", names.address)
        run(None, "topic", "create", "halved", "--queues", 1, *at)
        run(None, "send", "halved", "old", "--count", 4, *at)
        os.kill(away.pid, signal.SIGSTOP)  # it accepts connections but does not respond
        at = (*at, "--timeout-ms", "2000")
        listed = run(None, "topic", "list", *at)
        assert re.search(r"^halved .* broker-a$", listed.stdout, re.MULTILINE)
        assert f"penstock: skipped broker broker-b: {away.address}" in listed.stderr
        out, errors = tmp_path / "out", tmp_path / "errors"
        with (
            out.open("wb") as stdout,
            errors.open("wb") as stderr,
            subprocess.Popen(command("tail", "halved", *at), stdout=stdout, stderr=stderr) as tail,
        ):
            try:
                until(lambda: away.address in errors.read_text())
                os.kill(away.pid, signal.SIGCONT)
                until(
                    lambda: (
                        run(None, "send", "halved", "new", "--count", 2, *at)
                        and {"broker-a", "broker-b"}
                        <= {line.split()[2].split("/")[0] for line in out.read_text().splitlines()}
                    )
                )
            finally:
                tail.send_signal(signal.SIGINT)
                assert tail.wait(PATIENCE_S) == 0
        assert "old" not in out.read_text()
        created = run(
            None, "user", "create", "eve", "--password", "hidden12", "-b", here.address, "-b",
            "127.0.0.1:1", code=1,
        ).stderr  # fmt: skip
        assert f"succeeded on {here.address}" in created


def test_tail_continues_after_a_broker_was_killed_and_restarted(tmp_path: Path) -> None:
    with (
        NameServer(tmp_path / "names") as names,
        Broker(tmp_path / "b", tmp_path / "s", names.address, flushDiskType="SYNC_FLUSH") as broker,
    ):
        at = ("-n", names.address)
        run(None, "topic", "create", "again", "--queues", 2, *at)
        out = tmp_path / "out"
        program = command("tail", "again", "--from", "first", "--json", *at)

        def offsets() -> list[tuple[int, int]]:
            decoded = [json.loads(line) for line in out.read_text().splitlines()]
            return sorted((item["queue"], item["offset"]) for item in decoded)

        with (
            out.open("wb") as stdout,
            subprocess.Popen(program, stdout=stdout, stderr=subprocess.DEVNULL) as tail,
        ):
            try:
                run(None, "send", "again", "before", "--count", 40, *at)
                until(lambda: len(offsets()) == 40)
                broker.kill()
                broker.start()
                run(None, "send", "again", "after", "--count", 40, *at)
                until(lambda: len(offsets()) >= 80)
            finally:
                tail.send_signal(signal.SIGINT)
                assert tail.wait(PATIENCE_S) == 0
        assert offsets() == [(queue, offset) for queue in (0, 1) for offset in range(40)]


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


# --- rights


def test_requests_are_signed(tmp_path: Path) -> None:
    conf: dict[str, Any] = {
        "authenticationEnabled": True,
        "authorizationEnabled": True,
        "initAuthenticationUser": json.dumps({"username": "root", "password": "secret12"}),
    }
    with (
        NameServer(tmp_path / "names") as names,
        Broker(tmp_path / "b", tmp_path / "s", names.address, **conf) as broker,
    ):
        keys = ("--access-key", "root", "--secret-key", "secret12")
        at = ("-n", names.address)
        run(None, "topic", "create", "guarded", *at, *keys)
        assert run(None, "send", "guarded", "x", *at, *keys).stdout.startswith("sent ")
        refused = run(None, "topic", "create", "other", *at, code=1).stderr
        assert broker.address in refused
        assert run(None, "tail", "guarded", "--from", "first", "--count", 1, *at, *keys).stdout
        created = run(None, "user", "create", "eve", "--password", "hidden12", *at, *keys).stdout
        assert created == f"created user eve on {broker.address}\n"
        assert "eve" in run(None, "user", "list", "-b", broker.address, *keys).stdout
        listed = run(None, "user", "list", *keys, NAMESRV_ADDR=names.address).stdout
        assert "eve" in listed, "the variable replaces -n"
        nowhere = {"NAMESRV_ADDR": "127.0.0.1:1"}
        assert "eve" in run(None, "user", "list", "-b", broker.address, *keys, **nowhere).stdout


# --- what `penstock up` prints


def test_the_python_example_of_up_runs(up: Up) -> None:
    text = up.log.read_text()
    example = text.partition("Try it from Python:\n")[2].partition("\nor from a shell:")[0]
    code = "\n".join(line.removeprefix("  ") for line in example.splitlines())
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            assert "SendReceipt" in process.stdout.readline()
            assert process.stdout.readline() == "Hello, Penstock\n"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(EXAMPLE_S)


def test_the_shell_example_of_up_runs(up: Up) -> None:
    match = re.search(r"^  penstock (send .*)$", up.log.read_text(), re.MULTILINE)
    assert match is not None
    program = " ".join([*command(), match[1]])
    result = subprocess.run(["bash", "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert " to Greetings, " in result.stdout
