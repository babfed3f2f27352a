"""The servers of the client tests: a NameServer and the brokers broker-a and broker-b, twice.

Both clusters have the same settings and the same interface (tests/compat/apache.py), so a test does
not know which one it talks to. Messages are retried and half messages checked after one second.
"""

from __future__ import annotations

import concurrent.futures
import json
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.compat import apache, maven, penstock
from tests.compat.clusters import LARGE_FILES

KINDS = ("penstock", "apache")
THREADS = "cluster"
"""Threads with this prefix start servers while the first tests run."""

START_S = 180.0
ROUTE_S = 30.0

CREATE_TOPIC = 17
UPDATE_CONFIG = 25
ROUTE = 105

LEVELS = "1s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s 1s"
CONF: Mapping[str, Any] = {
    **LARGE_FILES,
    "mappedFileSizeCommitLog": 32 * 1024 * 1024,
    "messageDelayLevel": LEVELS,
    "recallMessageEnable": True,
    # Without it Apache recalls messages with the same id in any topic.
    "appendTopicForTimerDeleteKey": True,
    "traceTopicEnable": True,
    "transactionTimeOut": 2000,
    "transactionCheckInterval": 1000,
    "transactionCheckMax": 5,
    "registerNameServerPeriod": 10_000,
    # On a busy machine a broker may be slow; most tests are not about that.
    "waitTimeMillsInSendQueue": 20_000,
}
# Apache writes op messages in batches, and sends needless checks until then. A full batch is
# written at once. After a transaction, 5.5.1 uses a whole core from the end of the interval on.
APACHE_CONF: Mapping[str, Any] = {
    "transactionOpMsgMaxSize": 1,
    "transactionOpBatchInterval": 3_600_000,
}
# Both releases in one cluster, so that one run is enough.
APACHE_VERSIONS = {"broker-a": maven.V5_4, "broker-b": maven.V5_5}

AnyBroker = apache.Broker | penstock.Broker
AnyNameServer = apache.NameServer | penstock.NameServer


class _SmallBroker(apache.Broker):
    tls = True
    jvm = ("-Xms96m", "-Xmx512m", "-XX:MaxDirectMemorySize=512m", *apache.QUICK_START)


class _SmallNameServer(apache.NameServer):
    tls = True
    jvm = ("-Xms32m", "-Xmx128m", *apache.QUICK_START)


class Answer(NamedTuple):
    """The response of a server."""

    code: int
    ext: Mapping[str, str]
    body: bytes
    remark: str


def _name_server(kind: str, directory: Path, **conf: Any) -> AnyNameServer:
    if kind == "penstock":
        return penstock.NameServer(directory, **conf)
    return _SmallNameServer(directory, version=maven.V5_5, **conf)


def _broker(kind: str, directory: Path, namesrv: str, **conf: Any) -> AnyBroker:
    store, timeout = directory / "store", START_S
    if kind == "penstock":
        return penstock.Broker(directory, store, namesrv, timeout=timeout, **conf)
    version = APACHE_VERSIONS[conf["brokerName"]]
    conf = {**APACHE_CONF, **conf}
    return _SmallBroker(directory, store, namesrv, version=version, timeout=timeout, **conf)


class Cluster:
    """A NameServer and two brokers; `kind` is "penstock" or "apache"."""

    def __init__(
        self, kind: str, directory: Path, *, count: int = 2,
        names_conf: Mapping[str, Any] | None = None, **conf: Any,
    ) -> None:  # fmt: skip
        self.kind = kind
        names, conf = directory / "names", {**CONF, **conf}
        self.names = _name_server(kind, names, timeout=START_S, **(names_conf or {}))
        self.brokers = [
            _broker(kind, directory / name, self.names.address, brokerName=name, **conf)
            for name in [f"broker-{'abcdefgh'[n]}" for n in range(count)]
        ]

    @property
    def nameservers(self) -> str:
        """The address list for clients."""
        return self.names.address

    def start(self) -> None:
        self.names.start()
        try:
            with concurrent.futures.ThreadPoolExecutor(thread_name_prefix=THREADS) as pool:
                list(pool.map(lambda broker: broker.start(), self.brokers))
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """Kill all servers; their data is no longer needed."""
        for server in (*self.brokers, self.names):
            server.kill()

    def broker(self, name: str) -> AnyBroker:
        return next(broker for broker in self.brokers if broker.name == name)

    def make_topic(
        self, topic: str, *, queues: int = 4, brokers: Sequence[str] = (), perm: int = 6,
        attributes: str = "",
    ) -> str:  # fmt: skip
        """Create a topic on all brokers, or on these, and wait until its route has them all."""
        chosen = [b for b in self.brokers if not brokers or b.name in brokers]
        ext = {
            "topic": topic, "defaultTopic": "TBW102", "readQueueNums": str(queues),
            "writeQueueNums": str(queues), "perm": str(perm), "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": "0", "order": "false",
        }  # fmt: skip
        if attributes:
            ext["attributes"] = attributes
        for broker in chosen:
            answer = ask(broker.address, CREATE_TOPIC, ext)
            assert answer.code == 0, answer
        self.await_route(topic, [broker.name for broker in chosen])
        return topic

    def await_route(self, topic: str, brokers: Sequence[str]) -> None:
        """Wait until the NameServer has the topic on these brokers."""
        deadline = time.monotonic() + ROUTE_S
        while not set(brokers) <= self.route(topic).keys():
            assert time.monotonic() < deadline, f"no route of {topic} to {brokers}"
            time.sleep(0.02)

    def route(self, topic: str) -> dict[str, int]:
        """Broker name → permission, in the NameServer's route."""
        answer = ask(self.names.address, ROUTE, {"topic": topic, "acceptStandardJsonOnly": "true"})
        if answer.code != 0:
            return {}
        queues = json.loads(answer.body)["queueDatas"]
        return {queue["brokerName"]: queue["perm"] for queue in queues}

    def configure(self, **settings: Any) -> None:
        """Change settings of all running brokers."""
        lines = "".join(f"{key}={apache.java_text(value)}\n" for key, value in settings.items())
        for broker in self.brokers:
            answer = ask(broker.address, UPDATE_CONFIG, {}, lines.encode())
            assert answer.code == 0, answer

    def register_anew(self) -> None:
        """Make the brokers register with a restarted NameServer, by a change of a setting."""
        self.configure(brokerPermission=6)
        for broker in self.brokers:
            self.await_route(broker.name, [broker.name])


def ask(address: str, code: int, ext: Mapping[str, str], body: bytes = b"") -> Answer:
    """Send one request on its own connection, independent of the client under test."""
    header = json.dumps({"code": code, "opaque": 1, "extFields": ext, "version": 493}).encode()
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        sizes = (4 + len(header) + len(body), len(header))
        connection.sendall(b"".join(n.to_bytes(4, "big") for n in sizes) + header + body)
        with connection.makefile("rb") as stream:
            answer = stream.read(int.from_bytes(stream.read(4), "big"))
    size = int.from_bytes(answer[:4], "big") & 0xFFFFFF
    fields = json.loads(answer[4 : 4 + size])
    return Answer(
        fields["code"], fields.get("extFields") or {}, answer[4 + size :],
        fields.get("remark") or "",
    )  # fmt: skip
