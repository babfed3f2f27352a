"""Made-up results of `python -m benchmarks peers`, and a peer without a server."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.peers.peer import ROCKETMQ, Command, Peer
from benchmarks.peers.results import Results

from tests.compat import apache

ABOUT = {
    "date": "2026-01-02", "minutes": 1.5, "rounds": 3, "seconds": 2.0, "warm_s": 1.0,
    "backlog": 1000, "cores": 2, "memory_gib": 4, "processor": "made up", "kernel": "6.1",
    "python": "3.11", "java": "17", "go": "1.26", "rocketmq_client": "5.4.0",
}  # fmt: skip


def described(key: str, name: str, protocol: str) -> dict[str, Any]:
    return {
        "key": key, "name": name, "version": "1.0", "protocol": protocol, "flush": "async",
        "sync_flush": "sync", "settings": ["defaults"],
    }  # fmt: skip


def run(load: str, peer: str, number: int, **given: Any) -> dict[str, Any]:
    return {
        "load": load, "peer": peer, "round": number, "messages": 1000, "failed": 0, "seconds": 1.0,
        "broker_cpu_s": 0.01, "client_cpu_s": 0.02, "steal_s": 0.0, "other_s": 0.05,
        "p50_us": 1000, "p90_us": 2000, "p99_us": 3000, "p999_us": 4000, "max_us": 5000,
        "rss": 10.0, "anon": 5.0, "file": 5.0, **given,
    }  # fmt: skip


def results() -> Results:
    """Three rounds of two loads, where NATS is twice as fast as Penstock and RocketMQ slower."""
    made = Results(about=dict(ABOUT))
    made.peers = [
        described("penstock", "Penstock", "rocketmq"),
        described("apache-5.4.0", "Apache RocketMQ", "rocketmq"),
        described("nats", "NATS JetStream", "nats"),
    ]
    for number in range(3):
        rates = {"penstock": 1000, "apache-5.4.0": 250, "nats": 2000}
        for peer, rate in rates.items():
            made.runs.append(run("sync-64", peer, number, messages=rate + number))
            made.runs.append(run("rate-1000", peer, number, p99_us=3_000_000 // rate))
        made.startups.append({"peer": "penstock", "round": number, "seconds": 0.5, "anon": 20.0})
    return made


class FakeServer(apache.Server):
    """A server whose process is this one."""

    def __init__(self) -> None:
        self.address = "127.0.0.1:1"

    @property
    def pid(self) -> int:
        return os.getpid()


class FakePeer(Peer):
    """A peer whose load program is a line of Python, by kind of load."""

    name = version = flush = sync_flush = "fake"
    protocol = ROCKETMQ
    settings = ()

    def __init__(self, key: str, scripts: Mapping[str, str]) -> None:
        super().__init__()
        self.key = key
        self.calls: list[str] = []
        self._scripts = scripts

    def start(self, root: Path, *, sync_flush: bool = False) -> float:
        self.calls.append("start")
        self._servers = [FakeServer()]
        return 0.5

    def stop(self) -> None:
        self.calls.append("stop")
        self._servers = []

    def is_running(self) -> bool:
        return bool(self._servers)

    def suspend(self) -> None:
        self.calls.append("suspend")

    def resume(self) -> None:
        self.calls.append("resume")

    def new_broker(self, root: Path, sync_flush: bool) -> apache.Server:
        return FakeServer()

    def create_topic(self, topic: str, *, sync_flush: bool = False) -> None:
        self.calls.append(f"topic {topic}")

    def command(self, kind: str, topic: str, options: Mapping[str, Any]) -> Command:
        return [sys.executable, "-S", "-c", self._scripts[kind]], dict(os.environ)

    def program(self) -> Command:
        raise NotImplementedError
