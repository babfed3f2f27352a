"""`penstock bench` against a real `penstock up`: the figures fit together, whatever the speed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from penstock import Admin
from tests import json_kit
from tests.compat.penstock import Up

PATIENCE_S = 60


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with Up(tmp_path_factory.mktemp("up"), brokers=2) as servers:
        yield servers


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "penstock.cli.main", "bench", *map(str, arguments)]


def bench(
    up: Up, *arguments: object, code: int = 0
) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    result = subprocess.run(
        command(*arguments, "--json"), capture_output=True, text=True, timeout=PATIENCE_S,
        env={**os.environ, "NAMESRV_ADDR": up.address},
    )  # fmt: skip
    assert result.returncode == code, result.stdout + result.stderr
    found = json_kit.check(f"bench {arguments[0]}", result.stdout) if result.stdout else {}
    return found, result


def topics(up: Up) -> set[str]:
    with Admin(up.address) as admin:
        return {info.name for info in admin.topics()}


def groups(up: Up) -> set[str]:
    with Admin(up.address) as admin:
        return {info.name for info in admin.groups()}


def check(found: dict[str, Any]) -> None:
    """What holds for every run."""
    latency = found["latency_ms"]
    order = [latency[name] for name in ("min", "p50", "p90", "p99", "p99.9", "max")]
    assert order == sorted(order)
    assert latency["min"] <= latency["mean"] <= latency["max"]
    assert found["bytes"] == found["messages"] * found["size"]
    rate = found["messages"] / found["seconds"]
    assert found["messages_per_second"] == pytest.approx(rate, rel=0.01)
    assert found["errors"] == {}


def test_an_open_loop_sends_every_scheduled_message(up: Up) -> None:
    before = topics(up), groups(up)
    found, _ = bench(up, "send", "--create-topic", "--rate", 200, "--duration", "1s",
                     "--warmup", "500ms", "--producers", 2)  # fmt: skip
    check(found)
    assert found["loop"] == "open"
    assert found["messages"] == 200
    assert found["seconds"] >= 1
    behind = found["generator"]["behind_ms"]
    assert behind["max"] <= found["latency_ms"]["max"]
    assert (topics(up), groups(up)) == before


def test_a_closed_loop_stores_what_it_counts(up: Up) -> None:
    with Admin(up.address) as admin:
        admin.create_topic("bench-closed", queues=2)
        found, _ = bench(up, "send", "--topic", "bench-closed", "--concurrency", 4, "--batch", 3,
                         "--duration", "300ms", "--warmup", "0s", "--create-topic")  # fmt: skip
        check(found)
        assert found["messages"] % 3 == 0
        stored = sum(queue.max_offset for queue in admin.describe_topic("bench-closed").queues)
        # It existed, so it is kept. Four more: one message opens each connection.
        assert stored == found["messages"] + 4


def test_end_to_end_receives_what_it_sends(up: Up) -> None:
    before = topics(up), groups(up)
    found, _ = bench(up, "e2e", "--create-topic", "--queues", 2, "--rate", 100,
                     "--duration", "1s", "--warmup", "200ms", "--consumers", 2)  # fmt: skip
    check(found)
    assert found["messages"] == 100
    assert found["received"] == 120
    assert found["lost"] == 0  # duplicates are allowed: a queue may move to the second consumer
    assert (topics(up), groups(up)) == before


def test_consumers_receive_the_stored_messages(up: Up) -> None:
    found, _ = bench(up, "consume", "--create-topic", "--queues", 1, "--fill", 500,
                     "--duration", "20s")  # fmt: skip
    assert found["messages"] == 500  # without those that opened the connections, and no warm-up
    assert found["warmup_seconds"] == 0
    assert found["drained"]
    assert found["latency_ms"]["max"] is None
    assert found["seconds"] < 20


def test_a_topic_without_messages_is_said_to_be_empty(up: Up) -> None:
    found, _ = bench(up, "consume", "--create-topic", "--queues", 1, "--duration", "1s")
    assert found["messages"] == 0
    (warning,) = found["warnings"]
    assert warning.startswith("No message arrived. Check that the topic has messages")


def test_an_interrupted_run_reports_and_deletes_its_topic(up: Up) -> None:
    before = topics(up)
    running = subprocess.Popen(
        command("send", "--create-topic", "--topic", "bench-cut", "--duration", "60s", "--warmup",
                "0s", "--json"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "NAMESRV_ADDR": up.address},
    )  # fmt: skip
    with Admin(up.address) as admin:
        while not _has_messages(admin):
            assert running.poll() is None
    running.send_signal(signal.SIGINT)
    out, errors = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130, errors
    found = json_kit.check("bench send", out)
    assert found["interrupted"]
    assert topics(up) == before


def _has_messages(admin: Admin) -> bool:
    if "bench-cut" not in {info.name for info in admin.topics()}:
        return False
    return sum(queue.max_offset for queue in admin.describe_topic("bench-cut").queues) > 100


@pytest.mark.parametrize("header", ["binary", "json"])
def test_the_compiled_generator_sends_and_pulls_every_message(up: Up, header: str) -> None:
    topic = f"bench-pipelined-{header}"
    with Admin(up.address) as admin:
        admin.create_topic(topic, queues=3)
        sent, _ = bench(up, "send", "--topic", topic, "--pipeline", 32, "--producers", 2,
                        "--duration", "300ms", "--warmup", "0s", "--header", header,
                        "--batch", 2, "--tags", "TagA")  # fmt: skip
        check(sent)
        assert (sent["loop"], sent["pipeline"], sent["header"]) == ("closed", 32, header)
        assert (sent["concurrency"], sent["producers"], sent["statuses"]) == (None, 2, {})
        queues = admin.describe_topic(topic).queues
    assert sum(queue.max_offset for queue in queues) == sent["messages"]  # no message opens a
    assert min(queue.max_offset for queue in queues) > 0  # connection, and every queue is used
    assert len(queues) == 6  # on both brokers

    pulled, _ = bench(up, "consume", "--topic", topic, "--pipeline", 4, "--consumers", 2,
                      "--pull-size", 7, "--verify", "--header", header)  # fmt: skip
    assert pulled["messages"] == sent["messages"]
    assert pulled["bytes"] == sent["bytes"]
    assert pulled["drained"]
    assert (pulled["pull_size"], pulled["errors"]) == (7, {})
    none, _ = bench(up, "consume", "--topic", topic, "--pipeline", 4, "--tags", "TagB")
    assert (none["messages"], none["drained"]) == (0, True)


def test_the_compiled_generator_fills_a_topic(up: Up) -> None:
    before = topics(up), groups(up)
    found, _ = bench(up, "consume", "--create-topic", "--fill", 1_001, "--pipeline", 8)
    assert (found["messages"], found["drained"]) == (1_001, True)
    assert (topics(up), groups(up)) == before


def test_an_open_loop_of_the_compiled_generator(up: Up) -> None:
    found, _ = bench(up, "send", "--create-topic", "--rate", 200, "--duration", "1s", "--warmup",
                     "500ms", "--pipeline", 16, "--producers", 2)  # fmt: skip
    check(found)
    assert (found["loop"], found["messages"]) == ("open", 200)
    assert found["generator"]["behind_ms"]["max"] <= found["latency_ms"]["max"]


def test_the_compiled_generator_without_a_nameserver(up: Up) -> None:
    with Admin(up.address) as admin:
        admin.create_topic("bench-broker", queues=2)
        (broker, *_) = admin.brokers()
    only = ("--topic", "bench-broker", "--broker", broker.address, "--pipeline", 8)
    sent, _ = bench(up, "send", *only, "--duration", "100ms", "--warmup", "0s")
    pulled, _ = bench(up, "consume", *only, "--group", "bench-broker-readers")
    assert pulled["messages"] == sent["messages"] > 0
    missing = bench(up, "send", *only, "--topic", "no-such-topic", code=1)[1].stderr
    assert "no-such-topic" in missing


def test_refusals_of_the_compiled_generator_are_counted_by_name(up: Up) -> None:
    found, _ = bench(up, "send", "--create-topic", "--pipeline", 1, "--size", 3_000_000,
                     "--batch", 2, "--duration", "100ms", "--warmup", "0s")  # fmt: skip
    assert found["messages"] == 0
    assert list(found["errors"]) == ["MessageIllegal"]


def test_the_compiled_generator_needs_a_writable_queue(up: Up) -> None:
    with Admin(up.address) as admin:
        admin.create_topic("bench-read-only", queues=1, perm="r")
    _, result = bench(up, "send", "--topic", "bench-read-only", "--pipeline", 2, code=1)
    assert "topic 'bench-read-only' has no writable queue" in result.stderr


def test_wrong_usage(up: Up) -> None:
    cases = {
        ("send",): "give --topic, or --create-topic",
        ("send", "--topic", "t", "--rate", 5, "--concurrency", 5): "can't be used together",
        ("e2e", "--topic", "t", "--size", 10): "24 or more are needed",
        ("send", "--topic", "t", "--header", "json"): "--header needs --pipeline",
        ("consume", "--topic", "t", "--verify"): "--verify needs --pipeline",
        ("send", "--topic", "t", "--pipeline", 5, "--concurrency", 5): "--concurrency can't be",
        ("consume", "--topic", "t", "--pipeline", 5, "--from", "last"): "--from last can't be",
        ("consume", "--topic", "t", "--pipeline", 5, "--broker", "b:1"): "--broker needs --group",
        ("send", "--topic", "t", "--broker", "b:1"): "--broker needs --pipeline",
        ("send", "--create-topic", "--pipeline", 5, "--broker", "b:1"): "--create-topic can't be",
        (
            "send",
            "--topic",
            "t",
            "--pipeline",
            5,
            "--access-key",
            "a",
            "--secret-key",
            "b",
        ): "--pipeline can't sign requests",
        ("consume", "--topic", "t", "--warmup", "1s"): "--warmup can't be used with --from first",
    }
    for arguments, text in cases.items():
        assert text in bench(up, *arguments, code=2)[1].stderr
    missing = bench(up, "send", "--topic", "no-such-topic", code=1)[1].stderr
    assert "no-such-topic" in missing
