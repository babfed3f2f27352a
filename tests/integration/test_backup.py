"""The commands of docs/backup.md copy a broker under traffic; the copy has all that was stored."""

import os
import re
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest

from penstock import Admin, Consumer, Message, Producer, PullConsumer, ReceivedMessage, SendStatus
from tests.compat.penstock import Broker, NameServer

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "backup.md"
SETTINGS = {"PENSTOCK_STORE_SEGMENT_BYTES": str(1 << 20), "PENSTOCK_STORE_QUEUE_FLUSH_MS": "100"}
"""Small segments: some are complete, and some are added during the copy."""


def script(heading: str, **paths: Path) -> str:
    """The first shell commands below a heading, with these values of its variables."""
    part = PAGE.read_text().partition(f"\n## {heading}\n")[2]
    found = re.search(r"^```sh\n(.*?)^```", part, re.DOTALL | re.MULTILINE)
    assert found is not None
    text = found[1]
    for name, path in paths.items():
        text, count = re.subn(rf"^{name}=.*$", f"{name}='{path}'", text, flags=re.MULTILINE)
        assert count == 1
    return text


def run(commands: str) -> str:
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["sh", "-e", "-c", commands], env={**os.environ, "PATH": programs},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class Traffic:
    """Sends numbered messages, and consumes them, until it is stopped."""

    def __init__(self, nameserver: str, store: Path) -> None:
        self._nameserver = nameserver
        self._checkpoint = store / "checkpoint"
        self._stop = threading.Event()
        self.acknowledged: list[int] = []
        self.enough = threading.Event()

    def send(self) -> None:
        with Producer(self._nameserver, group="p") as producer:
            number = 0
            while not self._stop.is_set():
                sent = [
                    producer.submit(Message("Orders", f"{each} {'x' * 500}"))
                    for each in range(number, number + 50)
                ]
                assert all(one.result().status is SendStatus.SEND_OK for one in sent)
                number += len(sent)
                self.acknowledged += range(number - len(sent), number)
                if number >= 5_000 and self._checkpoint.exists():
                    self.enough.set()

    @contextmanager
    def running(self) -> Iterator[None]:
        consumer = Consumer(self._nameserver, group="billing", start_at="first")

        @consumer.on("Orders")
        def handle(message: ReceivedMessage) -> None:
            pass

        sender = threading.Thread(target=self.send)
        with consumer:
            sender.start()
            try:
                yield
            finally:
                self._stop.set()
                sender.join()


def read_all(nameserver: str) -> dict[int, list[int]]:
    """The numbers in each queue, in order."""
    found = defaultdict(list)
    with PullConsumer(nameserver, group="check", auto_commit=False) as consumer:
        queues = consumer.queues("Orders")
        consumer.assign(queues)
        ends = {queue: consumer.end_offset(queue) for queue in queues}
        for queue in queues:
            consumer.seek_to_begin(queue)
        left = sum(ends.values())
        while left:
            messages = consumer.poll(count_max=1_000)
            assert messages
            left -= len(messages)
            for message in messages:
                found[message.queue_id].append(int(message.body.split()[0]))
    return dict(found)


def test_a_copy_of_a_running_broker_has_what_was_acknowledged(tmp_path: Path) -> None:
    store, copy = tmp_path / "store", tmp_path / "backup" / "broker-a"
    with NameServer(tmp_path / "ns") as names:
        with Broker(tmp_path / "b", store, names.address, settings=SETTINGS):
            with Producer(names.address, group="p") as producer:
                producer.send(Message("Later", "timer", delay=timedelta(seconds=10)))
            traffic = Traffic(names.address, store)
            with traffic.running():
                assert traffic.enough.wait(120)
                before = list(traffic.acknowledged)
                run(script("Copy a running broker", STORE=store, COPY=copy))
            assert len(traffic.acknowledged) > len(before), "messages were sent during the copy"
        assert (copy / "abort").exists()
        with Broker(tmp_path / "r", copy, names.address, settings=SETTINGS):
            queues = read_all(names.address)
            found = [number for numbers in queues.values() for number in numbers]
            assert set(before) <= set(found)
            assert len(found) == len(set(found))
            assert all(numbers == sorted(numbers) for numbers in queues.values())
            with Admin(names.address) as admin:
                for each in admin.progress("billing").queues:
                    assert (each.committed or 0) <= each.max_offset
            with Producer(names.address, group="p") as producer:
                assert producer.send(Message("Orders", "-1 new")).status is SendStatus.SEND_OK
            with Consumer(names.address, group="later", start_at="first") as consumer:
                consumer.subscribe("Later")
                assert next(iter(consumer)).body == b"timer"


def test_commands_that_read_a_backup_work(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with NameServer(tmp_path / "ns") as names:
        with (
            Broker(tmp_path / "b", store, names.address),
            Producer(names.address, group="p") as producer,
        ):
            producer.send(Message("Orders", "one"))
        commands = script("Look at a backup").replace("/backup/broker-a", f"'{store}'")
        printed = run(commands)
        assert "closed cleanly" in printed
        assert "Orders" in printed
