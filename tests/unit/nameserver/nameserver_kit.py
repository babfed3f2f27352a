"""A NameServer and brokers that register with it, without sockets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from penstock.config import LiveSettings, NameServerConfig, Settings
from penstock.nameserver.nameserver import NameServer
from penstock.rpc.answers import Answer, InThread, Reply
from penstock.rpc.changed_settings import ChangedSettings
from penstock.rpc.command import Command
from penstock.rpc.persistence import Persistence
from penstock.store.disk import Disk
from penstock.wire.bodies.client_bodies import DataVersion, TopicConfig, TopicQueueMappingInfo
from penstock.wire.bodies.registration_bodies import RegisterBrokerBody, body_crc32, encode_register
from penstock.wire.bodies.table_bodies import TopicConfigAndMappingSerializeWrapper
from penstock.wire.codes import V4_9_3, V5_4_0, RequestCode

NOW_MS = 1_700_000_000_000
MASTER = "10.0.0.1:10911"
SLAVE = "10.0.0.2:10911"


def topics(*names: str, **fields: Any) -> dict[str, TopicConfig]:
    """Topics with the given fields."""
    return {name: TopicConfig(topic_name=name, **fields) for name in names}


class NameServerFixture:
    """A NameServer with its own time."""

    def __init__(self, root: Path | None = None, **config: Any) -> None:
        self.live = LiveSettings(Settings(nameserver=NameServerConfig(**config)), "nameserver")
        persistence = None
        if root is not None:
            (root / ChangedSettings.FILE).parent.mkdir(exist_ok=True)
            persistence = Persistence(Disk(), root)
        self.names = NameServer(self.live, NOW_MS, persistence)
        self.now_ms = NOW_MS

    def ask(
        self, code: int, body: bytes = b"", *, client: int = 1, version: int = V5_4_0, **ext: str
    ) -> Reply:
        """The response to a request, work in the thread pool included."""
        answer = self.handle(code, body, client=client, version=version, **ext)
        if isinstance(answer, InThread):
            answer = answer.then(answer.work())
        assert isinstance(answer, Reply)
        return answer

    def handle(
        self, code: int, body: bytes = b"", *, client: int = 1, version: int = V5_4_0, **ext: str
    ) -> Answer:
        """The NameServer's answer."""
        command = Command(
            code, ext, body, client=client, version=version, now_ms=self.now_ms, peer="10.9.9.9:1"
        )
        return self.names.handle(command)

    def get(self, code: int, body: bytes = b"", **ext: Any) -> Reply:
        """The response to a request that must succeed."""
        answer = self.ask(code, body, **ext)
        assert answer.code == 0, answer.remark
        return answer

    def register(
        self, table: dict[str, TopicConfig] | None = None, *, name: str = "broker-a", id: int = 0,
        address: str = MASTER, cluster: str = "c", counter: int = 1, state_version: int = 0,
        client: int = 10, version: int = V5_4_0, compressed: bool = False,
        body: bytes | None = None, mappings: dict[str, TopicQueueMappingInfo] | None = None,
        filters: tuple[str, ...] = (), **ext: str,
    ) -> Reply:  # fmt: skip
        """Register a broker with these topics; `orders` and `pay` if none are given."""
        if body is None:
            wrapper = TopicConfigAndMappingSerializeWrapper(
                topic_config_table=topics("orders", "pay") if table is None else table,
                topic_queue_mapping_info_map=mappings or {},
                data_version=DataVersion(
                    counter=counter, state_version=state_version, timestamp=NOW_MS
                ),
            )
            body = encode_register(
                RegisterBrokerBody(
                    topic_config_serialize_wrapper=wrapper, filter_server_list=list(filters)
                ),
                compressed=compressed,
            )
        fields: dict[str, Any] = {
            "brokerName": name, "brokerAddr": address, "clusterName": cluster,
            "haServerAddr": address.replace("10911", "10912"), "brokerId": str(id),
            "compressed": str(compressed).lower(), "bodyCrc32": str(body_crc32(body)),
            "enableActingMaster": "false",
        } | ext  # fmt: skip
        if version < V4_9_3:
            del fields["enableActingMaster"]
        return self.ask(RequestCode.REGISTER_BROKER, body, client=client, version=version, **fields)

    def unregister(self, name: str = "broker-a", address: str = MASTER, cluster: str = "c") -> None:
        self.get(
            RequestCode.UNREGISTER_BROKER,
            brokerName=name, brokerAddr=address, clusterName=cluster, brokerId="0",
        )  # fmt: skip

    def route(self, topic: str = "orders", **ext: Any) -> Any:
        """The route of a topic as plain values, or None."""
        answer = self.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic=topic, **ext)
        assert answer.code in (0, 17)
        return json.loads(answer.body) if answer.code == 0 else None

    def addresses(self, topic: str = "orders") -> dict[str, dict[str, str]]:
        """Broker name → id → address in the route of the topic."""
        route = self.route(topic)
        return {data["brokerName"]: data["brokerAddrs"] for data in route["brokerDatas"]}

    def perms(self, topic: str = "orders") -> dict[str, int]:
        """Broker name → permission in the route of the topic."""
        route = self.route(topic)
        return {data["brokerName"]: data["perm"] for data in route["queueDatas"]}

    def topic_list(self, code: int, **ext: Any) -> list[str]:
        """The names in a TopicList."""
        names: list[str] = msgspec.json.decode(self.get(code, **ext).body)["topicList"]
        return sorted(names)
