"""`penstock top` against a real `penstock up`: one screen, JSON, and the live screen."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from penstock import Admin, Consumer, Message, Producer
from tests import json_kit
from tests.compat.penstock import Up

PATIENCE_S = 60
LAG = 7


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A broker with a topic that a group has consumed up to the last messages, and another one."""
    with Up(tmp_path_factory.mktemp("up")) as servers:
        with Admin(servers.address) as admin:
            for topic in ("consumed", "unread"):
                admin.create_topic(topic, queues=2)
        with Producer(servers.address) as producer:
            for topic in ("consumed", "unread"):
                for _ in range(20):
                    producer.send(Message(topic, b"x"))
            got = []
            with Consumer(servers.address, group="readers", start_at="first") as consumer:
                consumer.on("consumed")(lambda message: got.append(message))
                consumer.start()
                deadline = time.monotonic() + PATIENCE_S
                while len(got) < 20 and time.monotonic() < deadline:
                    time.sleep(0.05)
            for _ in range(LAG):
                producer.send(Message("consumed", b"x"))
        yield servers


def environment(up: Up) -> dict[str, str]:
    return {**os.environ, "NAMESRV_ADDR": up.address, "TERM": "xterm"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "penstock.cli.main", "top", "--interval", "200ms", *arguments]


def run(up: Up, *arguments: str) -> str:
    result = subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=PATIENCE_S, env=environment(up)
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_json_agrees_with_the_admin_client(up: Up) -> None:
    found = json_kit.check("top", run(up, "--json"))
    with Admin(up.address) as admin:
        progress = admin.progress("readers")
    (broker,) = found["brokers"]
    assert broker["name"] == "broker-a"
    assert 0 < broker["disk_used"] < 1
    assert broker["memory_bytes"] > 1 << 20
    topics = {row["name"]: row for row in found["topics"]}
    assert topics["consumed"]["next_offsets"] == 20 + LAG
    assert topics["consumed"]["groups"] == 1
    assert topics["unread"]["next_offsets"] == 20
    assert topics["unread"]["groups"] == 0
    assert topics["unread"]["in_per_second"] == 0
    assert not any(name.startswith(("%", "RMQ_SYS")) for name in topics)
    (group,) = [row for row in found["groups"] if row["name"] == "readers"]
    assert group["lag"] == progress.lag == LAG
    assert group["lag_seconds"] is not None
    assert group["lag_seconds"] > 0
    assert found["topic_count"] == len(topics)
    assert found["notes"] == []


def test_one_screen(up: Up) -> None:
    shown = run(up, "--once")
    assert "Brokers" in shown
    assert "readers" in shown
    assert "unread" in shown
    assert "q quit" not in shown


def test_the_live_screen_reacts_to_keys_and_restores_the_terminal(up: Up) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(), stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env=environment(up)
    )
    os.close(theirs)
    try:
        seen = _read_until(ours, b"readers")
        assert b"\x1b[?1049h" in seen  # the alternate screen
        os.write(ours, b"2")
        _read_until(ours, b"Topics")
        os.write(ours, b"q")
        _read_until(ours, b"\x1b[?1049l")
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()
        os.close(ours)


def _read_until(file: int, wanted: bytes) -> bytes:
    data = b""
    deadline = time.monotonic() + PATIENCE_S
    while wanted not in data:
        assert time.monotonic() < deadline, data
        if select.select([file], [], [], 1)[0]:
            data += os.read(file, 65536)
    return data
