"""Runs `penstock` commands as processes, and has groups consume messages."""

import os
import subprocess
import sys
import threading
from pathlib import Path

from penstock import Consumer, Message, Producer
from penstock.client.received_message import ReceivedMessage

PATIENCE_S = 60


class Penstock:
    """Commands against one cluster, with a configuration directory of their own."""

    def __init__(self, nameserver: str, config: Path) -> None:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith("PENSTOCK_") or name in ("PENSTOCK_PURE", "PENSTOCK_EXPECT")
        }
        self.environment = {
            **kept,
            "NAMESRV_ADDR": nameserver,
            "PENSTOCK_CONFIG_DIR": str(config),
        }

    def __call__(
        self, *arguments: object, stdin: str = "", code: int = 0, **more: str
    ) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            [sys.executable, "-m", "penstock.cli.main", *map(str, arguments)],
            capture_output=True, text=True, timeout=PATIENCE_S, input=stdin,
            env={**self.environment, **more},
        )  # fmt: skip
        assert result.returncode == code, result.stdout + result.stderr
        return result


def send(nameserver: str, topic: str, count: int) -> None:
    """Send messages with the bodies 0, 1, 2 …"""
    with Producer(nameserver, group="senders") as producer:
        for number in range(count):
            producer.send(Message(topic, str(number).encode()))


def consume(nameserver: str, topic: str, group: str, count: int) -> None:
    """Have a group consume messages and commit its offsets."""
    done = threading.Event()
    seen: list[str] = []
    with Consumer(nameserver, group=group, start_at="first") as consumer:

        @consumer.on(topic)
        def take(message: ReceivedMessage) -> None:
            seen.append(message.message_id)
            if len(seen) >= count:
                done.set()

        consumer.start()
        assert done.wait(PATIENCE_S), f"{len(seen)} of {count} messages"
