"""Helpers for tests of the timer: sends with a delivery time, recalls, a fast clock."""

import gc
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec

from penstock.config import Settings
from penstock.rpc.answers import Reply
from penstock.store.disk import Disk
from penstock.wire.codes import RequestCode
from penstock.wire.message import StoredMessage, decode_messages
from tests.store_kit import small_config
from tests.unit.broker.admin.admin_kit import PlainDisk
from tests.unit.broker.broker_kit import NOW_MS, BrokerFixture

TIMER = "rmq_sys_wheel_timer"
SECOND_MS, HOUR_MS, DAY_MS = 1000, 3_600_000, 86_400_000
DESCRIPTORS_MAX = 300
"""Open files of the process above which those of brokers that were killed are closed."""


def timer_settings(**store: Any) -> Settings:
    config = small_config(sync_flush=False)
    return Settings(store=msgspec.structs.replace(config, **{"timer_log_bytes": 4096, **store}))


class QuickDisk(PlainDisk):
    """A disk without fsync, for tests without a power loss."""

    def sync(self, fd: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass


def open_broker(
    root: Path, now_ms: int = NOW_MS, *, disk: Disk | None = None, **store: Any
) -> BrokerFixture:
    """Start a broker whose clock shows `now_ms`."""
    with patch("tests.unit.broker.broker_kit.PlainDisk", lambda: disk or QuickDisk()):
        return BrokerFixture(root, timer_settings(**store), now_ms=now_ms)


def send(env: BrokerFixture, delay_ms: int, body: bytes = b"", **rest: Any) -> Reply:
    """Send a message with a delay."""
    properties = {"TIMER_DELAY_MS": str(delay_ms), **rest.pop("properties", {})}
    answer = env.send(body=body or str(delay_ms).encode(), properties=properties, **rest)
    assert answer.code == 0, answer
    return answer


def handle_of(answer: Reply) -> str:
    assert answer.ext is not None
    return answer.ext["recallHandle"]


def recall(env: BrokerFixture, handle: str, topic: str = "T") -> Reply:
    return env.ask(RequestCode.RECALL_MESSAGE, {"topic": topic, "recallHandle": handle})


def stored(env: BrokerFixture, topic: str = "T", queue_id: int = 0) -> list[StoredMessage]:
    """All visible messages of a queue."""
    env.store.publish()
    found: list[StoredMessage] = []
    offset = env.store.min_offset(topic, queue_id)
    while offset < env.store.max_offset(topic, queue_id):
        got = env.store.get(topic, queue_id, offset, wait=True)
        found += decode_messages(got.data)
        offset = max(got.next_offset, offset + 1)
    return found


def bodies(env: BrokerFixture, topic: str = "T") -> list[bytes]:
    return [message.body for message in stored(env, topic)]


def flush(env: BrokerFixture) -> None:
    """Flush what was stored."""
    if env.store.flusher.flushed() < env.store.log.end:
        env.store.publish()
        env.store.flusher.pump()


def advance(env: BrokerFixture, ms: int) -> None:
    """Advance the clock as the server does: until the broker is due, a second at most."""
    end = env.now_ms + ms
    while env.now_ms < end:
        wake = max(min(env.broker.due(), env.now_ms + 1000), env.now_ms + 1)
        env.tick(min(wake, end) - env.now_ms)
        flush(env)


def advance_in_steps(env: BrokerFixture, ms: int, step_ms: int) -> None:
    """Like `advance`, in long steps."""
    end = env.now_ms + ms
    while env.now_ms < end:
        env.tick(min(step_ms, end - env.now_ms))
        for _ in range(50):
            if env.broker.timers.due() > env.now_ms:
                break
            env.tick(0)
        flush(env)


def crash(env: BrokerFixture) -> None:
    """Stop as by kill -9: the files stay as they are, no table is saved."""
    env.broker.timers.files.close()
    env.store.flusher.stop()
    env.store.disk.close()
    env.store._lock.release()
    collect_files()


def collect_files() -> None:
    """Close the files of brokers that are garbage; Python alone may take long to collect it."""
    if len(os.listdir("/proc/self/fd")) > DESCRIPTORS_MAX:
        gc.collect()
