"""`penstock message`, `explain` and `dlq` against a real `penstock up` with a failing consumer."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock import Admin, Consumer, Message, Producer, ReceivedMessage
from tests import json_kit
from tests.compat.penstock import Broker, NameServer, Up

PATIENCE_S = 60
GROUP = "billing"


@dataclass
class Shop:
    """A cluster with the topic `orders`, and a consumer that fails for the tag `bad`."""

    up: Up
    ids: dict[str, str] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    fails: bool = True

    def handle(self, message: ReceivedMessage) -> bool:
        self.seen.append(message.body.decode())
        return not (self.fails and message.tags == "bad")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    with Up(tmp_path_factory.mktemp("up"), brokers=2) as up, Admin(up.address) as admin:
        shop = Shop(up)
        admin.create_topic("orders", queues=1, brokers=["broker-a"])
        with Producer(up.address) as producer:
            for tag, body in (("new", '{"id": 1}'), ("bad", "no\x1b[31m"), ("old", "filtered")):
                message = Message("orders", body, tags=tag, keys=[f"key-{tag}"])
                shop.ids[tag] = producer.send(message).message_id
        consumer = Consumer(up.address, group=GROUP, start_at="first", retries_max=0)
        consumer.on("orders", tags="new || bad")(shop.handle)
        with consumer:
            thread = threading.Thread(target=consumer.run)
            thread.start()
            try:
                until(lambda: admin.dead_letters(GROUP).messages)
                until(lambda: {q.lag for q in admin.progress(GROUP, "orders").queues} == {0})
                yield shop
            finally:
                consumer.close()
                thread.join(PATIENCE_S)


def until(look: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not look():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def run(
    address: str, *arguments: object, stdin: str = "", code: int = 0
) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *map(str, arguments)],
        capture_output=True, text=True, timeout=PATIENCE_S, input=stdin,
        env={**os.environ, "NAMESRV_ADDR": address},
    )  # fmt: skip
    assert result.returncode == code, result.stdout + result.stderr
    return result


def decoded(shop: Shop, *arguments: object, code: int = 0) -> Any:
    """What a command prints with `--json`, checked against its schema."""
    output = run(shop.up.address, *arguments, "--json", code=code).stdout
    return json_kit.check(" ".join(map(str, arguments[:2])), output)


# --- find and show


def test_a_message_is_found_by_id_key_and_place(shop: Shop) -> None:
    for what in (shop.ids["new"], "key-new", "orders/broker-a/0@0"):
        found = run(shop.up.address, "message", "find", what).stdout.splitlines()
        assert found[0].split() == ["STORED", "ID", "PLACE", "TAG", "KEYS", "BODY"]
        (line,) = found[1:]
        assert line.split()[2:] == [
            shop.ids["new"], "orders/broker-a/0@0", "new", "key-new", '{"id":', "1}"
        ]  # fmt: skip
    found = decoded(shop, "message", "find", "key-new", "--topic", "orders")
    assert [message["body"] for message in found["messages"]] == ['{"id": 1}']
    listed = decoded(
        shop, "message", "find", "--topic", "orders", "--since", "1h", "--newest", "--tags",
        "new || old", "--count", 5,
    )  # fmt: skip
    assert [message["tags"] for message in listed["messages"]] == ["old", "new"]
    by_key = decoded(shop, "message", "find", "--key", "key-old", "--until", "1ms")
    assert [message["body"] for message in by_key["messages"]] == ["filtered"]


def test_what_is_not_found_has_an_exit_code_of_its_own(shop: Shop) -> None:
    missing = run(shop.up.address, "message", "find", "nothing", code=3)
    assert missing.stdout.startswith("no message was found; searched the indexes of 1 topic,")
    assert decoded(shop, "message", "find", "nothing", code=3)["messages"] == []
    error = run(shop.up.address, "message", "show", "nothing", code=3).stderr
    assert error.startswith("penstock: no message was found")


def test_a_message_is_shown_without_control_characters(shop: Shop) -> None:
    shown = run(shop.up.address, "message", "show", shop.ids["bad"], "--topic", "orders").stdout
    assert "\x1b" not in shown
    assert shown.endswith("\n\nno\\x1b[31m\n")
    assert re.search(r"^place: +orders/broker-a/0@1$", shown, re.MULTILINE)
    assert "  KEYS=key-bad\n" in shown
    pretty = run(shop.up.address, "message", "show", "key-new").stdout
    assert pretty.endswith('\n\n{\n  "id": 1\n}\n')
    raw = run(shop.up.address, "message", "show", "key-new", "--body", "hex").stdout
    assert raw.endswith('7b 22 69 64 22 3a 20 31 7d                       {"id": 1}\n')
    assert decoded(shop, "message", "show", "key-new")["stored_topic"] == "orders"


# --- explain


def explained(shop: Shop, message_id: str, *more: str, code: int = 3) -> Any:
    return decoded(shop, "explain", "message", message_id, "--group", GROUP, *more, code=code)


def test_verdicts_of_messages(shop: Shop) -> None:
    assert explained(shop, shop.ids["new"], code=0)["verdict"] == "consumed"
    assert explained(shop, shop.ids["old"])["verdict"] == "filtered"
    assert explained(shop, "orders/broker-a/0@99")["verdict"] == "not_found"
    delayed = run(shop.up.address, "send", "orders", "later", "--delay", "1h").stdout.split()[1]
    found = explained(shop, delayed)
    assert found["verdict"] == "delayed"
    listed = run(shop.up.address, *shlex.split(found["command"])[1:], "--json").stdout
    waiting = json_kit.check("scheduled list", listed)["messages"]
    assert delayed in {message["message_id"] for message in waiting}
    text = run(shop.up.address, "explain", "message", shop.ids["old"], "-g", GROUP, code=3).stdout
    lines = text.splitlines()
    assert lines[0].split() == ["STATUS", "FACT"]
    assert lines[-2].startswith("filtered: The group does not receive the message")
    assert lines[-1] == "next: penstock message show orders/broker-a/0@2"


def test_the_next_command_can_be_run(shop: Shop) -> None:
    for message_id, verdict in ((shop.ids["old"], "filtered"), (shop.ids["bad"], "dead_letter")):
        found = explained(shop, message_id, "-n", shop.up.address)
        assert found["verdict"] == verdict
        words = shlex.split(found["command"])
        assert words[0] == "penstock"
        dry = ["--dry-run"] if "resend" in words else []
        run("127.0.0.1:1", *words[1:], *dry, *([] if "-n" in words else ["-n", shop.up.address]))


def test_verdicts_of_groups(shop: Shop) -> None:
    found = decoded(shop, "explain", "group", GROUP, "--behind", "5m", code=3)
    assert found["verdict"] == "dead_letters"
    assert decoded(shop, "explain", "group", "nobody", code=3)["verdict"] == "no_group"
    text = run(shop.up.address, "explain", "group", GROUP, code=3).stdout
    assert text.endswith(f"next: penstock dlq list {GROUP}\n")


def test_a_redelivery_that_waits_for_its_delay_is_counted(shop: Shop) -> None:
    run(shop.up.address, "topic", "create", "flaky", "--queues", 1)
    run(shop.up.address, "send", "flaky", "x")
    with Consumer(shop.up.address, group="shaky", start_at="first") as consumer:
        calls: list[str] = []

        @consumer.on("flaky")
        def fail(message: ReceivedMessage) -> bool:
            calls.append(message.message_id)
            return False

        consumer.start()
        until(lambda: calls)
        waits = "1 message waits for the delay before redelivery"
        ask = ("explain", "group", "shaky", "--json")
        found: dict[str, Any] = {"text": ""}
        deadline = time.monotonic() + 8  # the first redelivery is due after 10 s
        while waits not in found["text"] and time.monotonic() < deadline:
            done = subprocess.run(
                [sys.executable, "-m", "penstock.cli.main", *ask],
                capture_output=True, text=True, timeout=PATIENCE_S,
                env={**os.environ, "NAMESRV_ADDR": shop.up.address},
            )  # fmt: skip
            found = json_kit.check("explain group", done.stdout)
    assert waits in found["text"]
    (retry,) = (fact for fact in found["facts"] if fact["kind"] == "retry")
    assert (retry["status"], retry["evidence"]["delayed"]) == ("problem", 1)


# --- dead letters and resending


def test_dead_letters_are_listed_shown_and_exported(shop: Shop, tmp_path: Path) -> None:
    listed = run(shop.up.address, "dlq", "list", GROUP, "--since", "1h").stdout
    assert f"%DLQ%{GROUP}/broker-a/0@0  bad  key-bad  no\\x1b[31m" in listed
    (letter,) = decoded(shop, "dlq", "list", GROUP, "--tags", "bad", "--key", "key-bad")
    assert (letter["topic"], letter["stored_topic"]) == ("orders", f"%DLQ%{GROUP}")
    assert decoded(shop, "dlq", "list", GROUP, "--tags", "good") == []
    assert decoded(shop, "dlq", "show", GROUP, shop.ids["bad"]) == letter
    shown = run(shop.up.address, "dlq", "show", GROUP, shop.ids["bad"]).stdout
    assert re.search(r"^topic: +orders$", shown, re.MULTILINE)
    missing = run(shop.up.address, "dlq", "show", GROUP, "missing", code=3).stderr
    assert missing == "penstock: incomplete: the dead letter missing was not found\n"
    file = tmp_path / "letters"
    said = run(shop.up.address, "dlq", "export", GROUP, "-o", file).stderr
    assert said == f"exported 1 dead letter of {GROUP}\n"
    assert json_kit.check("dlq export", file.read_text()) == [letter]
    run(shop.up.address, "group", "create", "flawless")
    nothing = run(shop.up.address, "dlq", "list", "flawless").stdout
    assert nothing == "the group flawless has no such dead letters\n"


def test_dead_letters_are_sent_again_after_a_question(shop: Shop) -> None:
    resend = ("dlq", "resend", GROUP, "--id", shop.ids["bad"])
    before = len(shop.seen)
    plan = decoded(shop, *resend, "--dry-run")
    assert plan["targets"] == {f"%RETRY%{GROUP}": 1}
    assert [one["target"] for one in plan["messages"]] == [f"%RETRY%{GROUP}"]
    dry = run(shop.up.address, *resend, "--dry-run").stdout
    assert dry.startswith("plan: send 1 message (7 B) to the group billing only\n")
    assert dry.endswith("dry run: nothing was sent\n")
    asked = run(shop.up.address, *resend, stdin="n\n", code=130)
    assert f"Send 1 message to %RETRY%{GROUP} (1)?" in asked.stderr
    assert "add --yes" in run(shop.up.address, *resend, stdin="", code=2).stderr.lower()
    assert len(shop.seen) == before
    shop.fails = False
    report = decoded(shop, *resend, "--yes", "--rate", 100)
    assert report["sent"][0]["message_id"] == shop.ids["bad"]
    until(lambda: len(shop.seen) > before)
    assert shop.seen[-1] == "no\x1b[31m"
    again = run(shop.up.address, "dlq", "resend", GROUP, "--all", "--to-topic", "--yes").stdout
    assert " to all groups of the topic\n" in again
    assert "\nsent 1 message in " in again
    until(lambda: len(shop.seen) > before + 1)


def test_any_message_is_sent_again(shop: Shop) -> None:
    before = shop.seen.count('{"id": 1}')
    run(shop.up.address, "message", "resend", shop.ids["new"], "--to-group", GROUP, "--yes")
    until(lambda: shop.seen.count('{"id": 1}') == before + 1)
    selected = ("message", "resend", "--topic", "orders", "--key", "key-new", "--yes")
    report = decoded(shop, *selected, "--to-group", GROUP)
    assert [one["topic"] for one in report["sent"]] == [f"%RETRY%{GROUP}"]
    until(lambda: shop.seen.count('{"id": 1}') == before + 2)
    missing = ("message", "resend", "missing", "--topic", "orders")
    assert decoded(shop, *missing, code=3)["sent"] == []
    plan = decoded(shop, *missing, "--dry-run", code=3)
    assert plan["partial"] == ["missing was not found"]
    nothing = run(shop.up.address, *missing, "--yes", code=3)
    assert nothing.stderr.startswith("penstock: incomplete: missing was not found\n")
    assert "there is nothing to send" in nothing.stderr
    both = decoded(shop, "message", "resend", shop.ids["new"], "missing", "--yes", code=3)
    assert [one["message_id"] for one in both["sent"]] == [shop.ids["new"]]


def test_all_messages_with_a_key_are_sent_again_and_the_newest_with_an_id(shop: Shop) -> None:
    run(shop.up.address, "topic", "create", "keyed", "--queues", 1, "-b", "broker-a")
    for number in range(3):
        run(shop.up.address, "send", "keyed", number, "--keys", "same")
    resend = ("message", "resend", "same")
    dry = run(shop.up.address, *resend, "--dry-run")
    assert "plan: send 3 messages (3 B)" in dry.stdout
    assert dry.stderr == "penstock: same is a key of 3 messages\n"
    report = decoded(shop, *resend, "--yes")
    assert [one["topic"] for one in report["sent"]] == ["keyed"] * 3
    again = decoded(shop, *resend, "--dry-run")  # three ids, two messages each
    assert [one["offset"] for one in again["messages"]] == [3, 4, 5]


# --- names that do not exist


def test_a_topic_that_does_not_exist_is_no_answer(shop: Shop) -> None:
    for arguments in (
        ("message", "find", "key-new", "--topic", "order"),
        ("message", "show", "key-new", "--topic", "order"),
        ("message", "resend", "key-new", "--topic", "order", "--yes"),
        ("group", "reset", GROUP, "--topic", "order", "--to", "first", "--yes"),
    ):
        error = run(shop.up.address, *arguments, code=1).stderr
        assert "no broker has the topic 'order'" in error
        assert "similar topics: orders" in error
    found = explained(shop, "nothing", "--topic", "order")
    assert found["verdict"] == "no_route"
    assert "similar topics: orders" in found["text"]


def test_a_broker_that_does_not_exist_is_named(shop: Shop) -> None:
    error = run(shop.up.address, "message", "show", "orders/broker-z/0@0", code=1).stderr
    assert "there is no broker 'broker-z' (brokers: broker-a, broker-b)" in error
    assert "check the place" in error


def test_a_group_that_does_not_exist_is_named(shop: Shop) -> None:
    with Admin(shop.up.address) as admin:
        for arguments, code in (
            (("dlq", "list", "bilng"), 3),
            (("dlq", "show", "bilng", "nope"), 3),
            (("dlq", "export", "bilng"), 3),
            (("dlq", "resend", "bilng", "--all", "--yes"), 3),
            (("message", "resend", shop.ids["new"], "--to-group", "bilng", "--yes"), 1),
            (("group", "reset", "bilng", "--topic", "orders", "--to", "first", "--yes"), 1),
            (("group", "members", "bilng"), 1),
        ):
            result = run(shop.up.address, *arguments, code=code)
            assert "no broker has the group 'bilng' (similar groups: billing)" in result.stderr
            assert result.stdout == ""
        assert "bilng" not in {info.name for info in admin.groups()}
    for explained_text in (
        run(shop.up.address, "explain", "group", "bilng", code=3).stdout,
        run(shop.up.address, "explain", "message", shop.ids["new"], "-g", "bilng", code=3).stdout,
    ):
        assert "(similar groups: billing)" in explained_text


def test_dead_letters_that_were_not_found_are_not_a_success(shop: Shop) -> None:
    missing = run(shop.up.address, "dlq", "resend", GROUP, "--id", "nope", "-y", code=3)
    assert "the dead letter nope was not found" in missing.stderr
    run(shop.up.address, "group", "create", "flawless")
    run(shop.up.address, "dlq", "resend", "flawless", "--all", "-y", code=3)


@pytest.mark.parametrize(
    "arguments",
    [
        ("message", "find"),
        ("message", "find", "id", "--key", "k"),
        ("message", "find", "--topic", "t", "--since", "somewhere"),
        ("message", "resend"),
        ("message", "resend", "--topic", "t"),
        ("message", "resend", "id", "--topic", "t", "--key", "k"),
        ("message", "resend", "id", "--rate", "0"),
        ("explain", "message", "id"),
        ("dlq", "resend", "g"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    assert "Usage: penstock" in run("127.0.0.1:1", *arguments, code=2).stderr


# --- unavailable brokers


def test_a_search_that_lacks_a_broker_says_so(tmp_path: Path) -> None:
    with (
        NameServer(tmp_path / "names") as names,
        Broker(tmp_path / "a", tmp_path / "sa", names.address, brokerName="broker-a"),
        Broker(tmp_path / "b", tmp_path / "sb", names.address, brokerName="broker-b") as away,
    ):
        run(names.address, "topic", "create", "halved", "--queues", 1)
        os.kill(away.pid, signal.SIGSTOP)  # it accepts connections but does not respond
        try:
            at = ("--topic", "halved", "--timeout-ms", 500)
            found = run(names.address, "message", "find", "missing", *at, code=4)
            assert "incomplete: broker-b can't be reached and was not searched" in found.stderr
            why = run(
                names.address, "explain", "message", "missing", "-g", "g", "--json", *at, code=4
            )
            answer = json_kit.check("explain message", why.stdout)
            assert answer["verdict"] == "unknown"
            assert answer["partial"] == ["broker-b can't be reached and was not searched"]
        finally:
            os.kill(away.pid, signal.SIGCONT)
