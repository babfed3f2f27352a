"""The brokers that are compared: how each is started, and which program puts load on it.

While one peer is measured, the processes of the others are stopped with SIGSTOP, so that their
background work takes none of its CPU time.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.compat import apache, maven, penstock

from benchmarks.kafka_server import SERVER_VERSION, KafkaServer
from benchmarks.peers import programs
from penstock import __version__

QUEUES = 8
ROCKETMQ, KAFKA, NATS = "rocketmq", "kafka", "nats"
"""The protocols of the peers."""
COMMAND_S = 120
RESUMED_S = 1.0
"""Periodic work of a JVM that was stopped is made up for in bursts."""
_CREATE_TOPIC = 17

Command = tuple[list[str], dict[str, str]]


class Peer(ABC):
    """A broker with its NameServer, if it has one."""

    key: str
    name: str
    version: str
    protocol: str
    flush: str
    """When messages reach the disk, by default."""
    sync_flush: str
    """The same with sync flush."""
    settings: Sequence[str]

    def __init__(self) -> None:
        self._servers: list[apache.Server] = []
        self._root: Path | None = None
        self._starts = 0

    @property
    def label(self) -> str:
        return f"{self.name} {self.version}"

    @property
    def broker(self) -> apache.Server:
        return self._servers[-1]

    @property
    def address(self) -> str:
        """Where clients connect."""
        return self._servers[0].address

    def is_running(self) -> bool:
        return bool(self._servers) and all(one.is_running() for one in self._servers)

    def start(self, root: Path, *, sync_flush: bool = False) -> float:
        """Start with an empty store; how long the broker took to say that it is ready."""
        self._starts += 1
        self._root = root / f"{self.key}-{self._starts}"
        self._root.mkdir()
        try:
            return self._start(self._root, sync_flush)
        except BaseException:
            self.stop()
            raise

    def _start(self, directory: Path, sync_flush: bool) -> float:
        for server in self.before_broker(directory):
            self._servers.append(server)
            server.start()
        self._servers.append(self.new_broker(directory, sync_flush))
        self.broker.begin()
        took = self._until_announced()
        self.broker.await_ready()
        return took

    def _until_announced(self) -> float:
        broker = self.broker
        while not broker.is_announced():
            if not broker.is_running() or time.monotonic() > broker.launched + COMMAND_S:
                broker.await_ready()  # raises with the end of its log
            time.sleep(0.002)
        return time.monotonic() - broker.launched

    def stop(self) -> None:
        """End all processes and delete the files of the last start, if there was one."""
        for server in reversed(self._servers):
            server.kill()
        self._servers.clear()
        directory, self._root = self._root, None
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)

    def suspend(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue; returns when clients can use the broker."""
        self._signal(signal.SIGCONT)
        time.sleep(RESUMED_S)
        self.broker.await_ready()

    def _signal(self, number: signal.Signals) -> None:
        for server in self._servers:
            if server.is_running():
                os.kill(server.pid, number)

    def run(self, kind: str, topic: str, options: Mapping[str, Any]) -> None:
        """Run a program that is not measured; raises RuntimeError if it fails."""
        command, environment = self.command(kind, topic, options)
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=COMMAND_S,
                check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{kind} took longer than {COMMAND_S} s") from None
        if done.returncode != 0:
            raise RuntimeError(f"{kind} on {self.name} failed:\n{done.stderr[-2000:]}")

    def command(self, kind: str, topic: str, options: Mapping[str, Any]) -> Command:
        """The program for a kind of load, with its environment."""
        command, environment = self.program()
        pairs = (f"{name}={value}" for name, value in options.items())
        return [*command, self.address, topic, kind, *pairs], environment

    def before_broker(self, root: Path) -> Sequence[apache.Server]:
        """The servers that the broker needs."""
        return ()

    @abstractmethod
    def new_broker(self, root: Path, sync_flush: bool) -> apache.Server: ...

    @abstractmethod
    def create_topic(self, topic: str, *, sync_flush: bool = False) -> None: ...

    @abstractmethod
    def program(self) -> Command: ...


class RocketPeer(Peer):
    """A broker that speaks RocketMQ's protocol."""

    protocol = ROCKETMQ
    flush = "async, every 500 ms"
    sync_flush = "sync, shared by waiting sends"

    def create_topic(self, topic: str, *, sync_flush: bool = False) -> None:
        settings = {
            "topic": topic, "defaultTopic": "TBW102", "readQueueNums": str(QUEUES),
            "writeQueueNums": str(QUEUES), "perm": "6", "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": "0", "order": "false",
        }  # fmt: skip
        code = apache.request(self.broker.address, _CREATE_TOPIC, settings)
        if code != 0:
            raise RuntimeError(f"{self.name} answered {code} to the creation of {topic}")

    def program(self) -> Command:
        return programs.rocket_program()

    @staticmethod
    def conf(sync_flush: bool) -> dict[str, Any]:
        """Settings of both kinds of broker."""
        return {
            "flushDiskType": "SYNC_FLUSH" if sync_flush else "ASYNC_FLUSH",
            # Penstock's default. Apache's is 32, whatever the consumer asks for.
            "maxTransferCountOnMessageInMemory": 1024,
        }


class PenstockPeer(RocketPeer):
    key = "penstock"
    name = "Penstock"
    version = __version__
    settings = ("default settings; one process", "its own NameServer")

    def before_broker(self, root: Path) -> Sequence[apache.Server]:
        return (penstock.NameServer(root / "names"),)

    def new_broker(self, root: Path, sync_flush: bool) -> apache.Server:
        conf = self.conf(sync_flush)
        return penstock.Broker(root / "broker", root / "store", self.address, **conf)


class _ApacheNames(apache.NameServer):
    jvm = ("-Xms256m", "-Xmx256m", "-XX:+UseG1GC")


class _ApacheBroker(apache.Broker):
    # As its start script does, with a smaller heap, which is not touched before it is needed.
    jvm = (
        *("-server", "-Xms1g", "-Xmx1g", "-XX:MaxDirectMemorySize=2g", "-XX:+UseG1GC"),
        *("-XX:G1HeapRegionSize=16m", "-XX:G1ReservePercent=25"),
        *("-XX:InitiatingHeapOccupancyPercent=30", "-XX:SoftRefLRUPolicyMSPerMB=0"),
        *("-XX:-OmitStackTraceInFastThrow", "-XX:-UseLargePages"),
    )


class ApachePeer(RocketPeer):
    name = "Apache RocketMQ"
    settings = (
        "heap of 1 GiB, G1 and the other JVM flags of its start script, without "
        "`AlwaysPreTouch`, which would count the whole heap as used",
        "default sizes of files; timer wheel off, which saves CPU time; log level ERROR; no TLS",
        "its own NameServer (heap of 256 MiB)",
    )

    def __init__(self, version: str) -> None:
        super().__init__()
        self.key = f"apache-{version}"
        self.version = version

    def before_broker(self, root: Path) -> Sequence[apache.Server]:
        return (_ApacheNames(root / "names", version=self.version),)

    def new_broker(self, root: Path, sync_flush: bool) -> apache.Server:
        sizes = {
            "mappedFileSizeCommitLog": 1 << 30, "mappedFileSizeConsumeQueue": 6_000_000,
            "maxHashSlotNum": 5_000_000, "maxIndexNum": 20_000_000,
        }  # fmt: skip
        return _ApacheBroker(
            root / "broker", root / "store", self.address, version=self.version,
            **sizes, **self.conf(sync_flush),
        )  # fmt: skip


class KafkaPeer(Peer):
    key = "kafka"
    name = "Apache Kafka"
    version = SERVER_VERSION
    protocol = KAFKA
    flush = "async, by the kernel"
    sync_flush = "sync, after every request"
    settings = (
        "KRaft, broker and controller in one process; heap of 1 GiB and the JVM flags of its "
        "start script",
        "no flush by default; with sync flush, `flush.messages=1` of the topic",
        "producer: `acks=all`, `enable.idempotence=false`",
    )

    def new_broker(self, root: Path, sync_flush: bool) -> apache.Server:
        # While it is stopped, its controller must not give the broker up.
        session = {"broker_session_timeout_ms": 3_600_000}
        return KafkaServer(root, list(programs.kafka_jars()), **session)

    def create_topic(self, topic: str, *, sync_flush: bool = False) -> None:
        self.run("create", topic, {"queues": QUEUES, "flush": int(sync_flush)})

    def program(self) -> Command:
        return programs.kafka_program()


class NatsServer(apache.Server):
    """NATS with JetStream."""

    _main_class = "nats"
    _announcement = "the NATS server is ready"

    def __init__(self, directory: Path, sync_flush: bool) -> None:
        super().__init__(directory, apache.free_port(), {}, timeout=30.0)
        self._sync = "always" if sync_flush else "default"

    def _command(self) -> tuple[list[str], dict[str, str]]:
        command = [programs.nats_binary(), "server", str(self.port)]
        return [*command, str(self._directory / "data"), self._sync], dict(os.environ)


class NatsPeer(Peer):
    key = "nats"
    name = "NATS JetStream"
    version = programs.nats_version()
    protocol = NATS
    flush = "async, every 2 minutes"
    sync_flush = "sync, after every message"
    settings = (
        "file storage, one stream per topic with one subject",
        "default `sync_interval` of 2 minutes; with sync flush, `sync_interval: always`",
        "Go client, one connection",
    )

    def new_broker(self, root: Path, sync_flush: bool) -> apache.Server:
        return NatsServer(root, sync_flush)

    def create_topic(self, topic: str, *, sync_flush: bool = False) -> None:
        self.run("create", topic, {})

    def program(self) -> Command:
        return [programs.nats_binary(), "load"], dict(os.environ)


def all_peers() -> list[Peer]:
    """The peers, in the order of the tables."""
    apaches = (ApachePeer(version) for version in maven.SERVER_VERSIONS)
    return [PenstockPeer(), *apaches, KafkaPeer(), NatsPeer()]
