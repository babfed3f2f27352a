"""The same requests to Apache's NameServer and to ours: both must know the same afterwards.

A walk of random steps (brokers register, switch roles, leave, lose their connection; tools delete
topics and wipe permissions). After each step both are asked for everything they know.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.nameserver.nameserver import FIXED_SETTINGS
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import DataVersion, QueueData, TopicConfig, TopicRouteData
from penstock.wire.bodies.registration_bodies import RegisterBrokerBody, body_crc32, encode_register
from penstock.wire.bodies.table_bodies import TopicConfigAndMappingSerializeWrapper
from penstock.wire.codes import V4_9_3, V5_4_0, RequestCode
from penstock.wire.java_properties import parse_properties
from tests.unit.nameserver.nameserver_kit import NOW_MS, NameServerFixture

from . import apache, maven

TOPICS = [f"topic-{number}" for number in range(6)]
# The same on all brokers: of several, Apache takes the one whose name happens to hash lowest.
FLAGS = {"topic-3": 1, "topic-4": 2, "topic-5": 3}
NAMES = {"a": "east", "b": "east", "c": "west"}
STEPS = 150
SETTLE_S = 5.0

Told = tuple[int, dict[str, str], Any]


class Connection:
    """One connection to Apache's NameServer."""

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self._socket = socket.create_connection((host, int(port)), timeout=10)
        self._stream = self._socket.makefile("rb")

    def ask(self, code: int, ext: dict[str, str], body: bytes, version: int) -> Told:
        """Code, fields and body of the answer."""
        header = json.dumps(
            {"code": code, "opaque": 1, "extFields": ext, "version": version, "language": "JAVA"}
        ).encode()
        sizes = (4 + len(header) + len(body), len(header))
        self._socket.sendall(b"".join(n.to_bytes(4, "big") for n in sizes) + header + body)
        answer = self._stream.read(int.from_bytes(self._stream.read(4), "big"))
        end = 4 + (int.from_bytes(answer[:4], "big") & 0xFFFFFF)
        told = json.loads(answer[4:end])
        return told["code"], told.get("extFields") or {}, answer[end:]

    def close(self) -> None:
        self._stream.close()
        self._socket.close()


class Pair:
    """Apache's NameServer and ours, asked the same."""

    def __init__(self, address: str, **config: Any) -> None:
        self.env = NameServerFixture(**config)
        self._address = address
        self._connections: dict[int, Connection] = {}

    def ask(
        self, code: int, body: bytes = b"", *, client: int = 1, version: int = V5_4_0, **ext: str
    ) -> tuple[Told, Told]:
        """What Apache answers, and what we answer."""
        if client not in self._connections:
            self._connections[client] = Connection(self._address)
        theirs = self._connections[client].ask(code, ext, body, version)
        reply = self.env.ask(code, body, client=client, version=version, **ext)
        ours = reply.code, dict(reply.ext or {}), reply.body
        return (*theirs[:2], plain(theirs[2])), (*ours[:2], plain(ours[2]))

    def same(self, code: int, body: bytes = b"", **fields: Any) -> None:
        """Ask, and compare the answers."""
        theirs, ours = self.ask(code, body, **fields)
        assert ours == theirs, (RequestCode(code).name, fields)

    def disconnect(self, client: int) -> None:
        connection = self._connections.pop(client, None)
        if connection is not None:
            connection.close()
        self.env.names.disconnected(client, NOW_MS)

    def close(self) -> None:
        for client in list(self._connections):
            self.disconnect(client)

    def settle(self) -> None:
        """Wait until Apache, which removes brokers in a thread of its own, has caught up."""
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline:
            theirs, ours = self.ask(RequestCode.GET_BROKER_CLUSTER_INFO)
            if theirs == ours:
                return
        assert ours == theirs

    def compare(self) -> None:
        """All that can be asked."""
        self.settle()
        for topic in TOPICS:
            for version in (V4_9_3, V5_4_0):
                self.same(RequestCode.GET_ROUTEINFO_BY_TOPIC, version=version, topic=topic)
        for name, cluster in NAMES.items():
            ext: dict[str, Any] = {"clusterName": cluster, "brokerName": name}
            self.same(RequestCode.GET_BROKER_MEMBER_GROUP, **ext)
        for cluster in {*NAMES.values(), "nowhere"}:
            self.same(RequestCode.GET_TOPICS_BY_CLUSTER, cluster=cluster)
        for code in (
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
            RequestCode.GET_UNIT_TOPIC_LIST,
            RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST,
            RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
        ):
            self.same(code)
        theirs, ours = self.ask(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS)
        assert ours[2]["topicList"] == theirs[2]["topicList"]


def plain(body: bytes) -> Any:
    """The meaning of a body: numbers as keys are texts, lists have no order."""
    if body[:1] != b"{":
        return body
    return _plain(fastjson.read(body))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(member) for key, member in value.items()}
    if isinstance(value, list):
        return sorted(
            (_plain(item) for item in value), key=lambda it: json.dumps(it, sort_keys=True)
        )
    return value


class Walk:
    """Random steps of brokers and tools."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self.pair = pair
        self.random = random.Random(seed)
        self.counter = 0
        self.ids: dict[tuple[str, int], int] = {}  # (name, process) → id it registered as
        self.last: dict[tuple[str, int], dict[str, Any]] = {}

    def step(self) -> str:
        steps = [self.register] * 6 + [self.repeat] * 3 + [
            self.unregister, self.disconnect, self.delete, self.perms, self.add_topic, self.versions
        ]  # fmt: skip
        chosen = self.random.choice(steps)
        chosen()
        return chosen.__name__

    def register(self) -> None:
        name, process = self._process()
        id = self._id(name, process)
        acting = self.random.choice([None, "false", "true"])
        self.counter += 1
        compressed = self.random.random() < 0.3
        known = TOPICS[:3] if compressed else TOPICS  # packed topics have no flags
        table = {
            topic: TopicConfig(
                topic_name=topic,
                read_queue_nums=self.random.choice([4, 8]),
                perm=self.random.choice([4, 6]),
                topic_sys_flag=FLAGS.get(topic, 0),
            )
            for topic in self.random.sample(known, self.random.randint(2, len(known)))
        }
        wrapper = TopicConfigAndMappingSerializeWrapper(
            topic_config_table=table,
            data_version=DataVersion(counter=self.counter, timestamp=NOW_MS),
        )
        body = encode_register(
            RegisterBrokerBody(topic_config_serialize_wrapper=wrapper), compressed=compressed
        )
        fields = {
            **self._fields(name, process), "brokerId": str(id), "haServerAddr": f"ha-{process}:1",
            "compressed": str(compressed).lower(), "bodyCrc32": str(body_crc32(body)),
        }  # fmt: skip
        if acting is not None:
            fields["enableActingMaster"] = acting
        self.ids[name, process] = id
        self.last[name, process] = {"body": body, "client": self._client(name, process), **fields}
        self.pair.same(RequestCode.REGISTER_BROKER, **self.last[name, process])

    def repeat(self) -> None:
        if self.last:
            key = self.random.choice(list(self.last))
            self.pair.same(RequestCode.REGISTER_BROKER, **self.last[key])

    def unregister(self) -> None:
        name, process = self._process()
        id = self.ids.get((name, process), 0)
        self.pair.same(
            RequestCode.UNREGISTER_BROKER, brokerId=str(id), **self._fields(name, process)
        )
        self._gone(name, process)

    def disconnect(self) -> None:
        name, process = self._process()
        self.pair.disconnect(self._client(name, process))
        self._gone(name, process)

    def delete(self) -> None:
        ext: dict[str, Any] = self.random.choice(
            [{}, {"clusterName": "east"}, {"clusterName": "nowhere"}]
        )
        self.pair.same(RequestCode.DELETE_TOPIC_IN_NAMESRV, topic=self.random.choice(TOPICS), **ext)

    def perms(self) -> None:
        codes = [RequestCode.WIPE_WRITE_PERM_OF_BROKER, RequestCode.ADD_WRITE_PERM_OF_BROKER]
        self.pair.same(self.random.choice(codes), brokerName=self.random.choice("abcx"))

    def add_topic(self) -> None:
        topic, name = self.random.choice(TOPICS), self.random.choice("abcx")
        queues = QueueData(
            broker_name=name, read_queue_nums=2, perm=6, topic_sys_flag=FLAGS.get(topic, 0)
        )
        body = fastjson.encode(TopicRouteData(queue_datas=[queues]))
        self.pair.same(RequestCode.REGISTER_TOPIC_IN_NAMESRV, body, topic=topic)

    def versions(self) -> None:
        name, process = self._process()
        body = fastjson.encode(DataVersion(counter=self.counter, timestamp=NOW_MS))
        fields = self._fields(name, process)
        self.pair.same(RequestCode.QUERY_DATA_VERSION, body, brokerId="0", **fields)
        self.pair.same(RequestCode.BROKER_HEARTBEAT, brokerId="0", **fields)

    def _process(self) -> tuple[str, int]:
        return self.random.choice(list(NAMES)), self.random.randrange(3)

    def _id(self, name: str, process: int) -> int:
        """Its number, or 0 where nobody else of this name is the master."""
        others = {id for (other, it), id in self.ids.items() if other == name and it != process}
        return 0 if 0 not in others and self.random.random() < 0.7 else process + 1

    def _client(self, name: str, process: int) -> int:
        return 10 + 3 * "abc".index(name) + process

    def _fields(self, name: str, process: int) -> dict[str, Any]:
        address = f"10.0.0.{self._client(name, process)}:10911"
        return {"brokerName": name, "brokerAddr": address, "clusterName": NAMES[name]}

    def _gone(self, name: str, process: int) -> None:
        self.ids.pop((name, process), None)
        self.last.pop((name, process), None)
        self.pair.settle()


@pytest.fixture(
    scope="module",
    params=[(version, acting) for version in maven.SERVER_VERSIONS for acting in (False, True)],
    ids=lambda param: f"{param[0]}-{'acting-master' if param[1] else 'plain'}",
)
def pair(
    java: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """Both start empty and are told the same by all tests."""
    version, acting = request.param
    conf = {"supportActingMaster": acting}
    with apache.NameServer(tmp_path_factory.mktemp("names"), version=version, **conf) as theirs:
        pair = Pair(theirs.address, acting_master=acting)
        yield pair
        pair.close()


def test_a_random_walk_leaves_both_with_the_same_knowledge(pair: Pair) -> None:
    walk = Walk(pair, seed=4)
    done: list[str] = []
    for _ in range(STEPS):
        done.append(walk.step())
        pair.compare()
    assert len(set(done)) == 8, "every kind of step was taken"


def test_key_values_and_settings_are_told_alike(pair: Pair) -> None:
    order = "ORDER_TOPIC_CONFIG"
    pair.same(RequestCode.GET_KVLIST_BY_NAMESPACE, namespace=order)
    pair.same(RequestCode.GET_KV_CONFIG, namespace=order, key="k")
    pair.same(RequestCode.PUT_KV_CONFIG, namespace=order, key="k", value="经纪人:4")
    pair.same(RequestCode.GET_KV_CONFIG, namespace=order, key="k")
    pair.same(RequestCode.GET_KVLIST_BY_NAMESPACE, namespace=order)
    Walk(pair, seed=1).register()
    pair.same(RequestCode.DELETE_KV_CONFIG, namespace=order, key="k")
    pair.same(RequestCode.GET_KVLIST_BY_NAMESPACE, namespace=order)
    theirs, ours = pair.ask(RequestCode.GET_NAMESRV_CONFIG)
    known, told = parse_properties(theirs[2]), parse_properties(ours[2])
    assert {key: known[key] for key in FIXED_SETTINGS} == FIXED_SETTINGS
    for key in ("orderMessageEnable", "scanNotActiveBrokerInterval", "supportActingMaster"):
        assert told[key] == known[key]
    for path in ("kvConfigPath", "configStorePath", "rocketmqHome"):
        theirs, ours = pair.ask(RequestCode.UPDATE_NAMESRV_CONFIG, f"{path}=elsewhere".encode())
        assert ours[0] == theirs[0] == 16
