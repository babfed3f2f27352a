"""The admin client that mqadmin is built on: what it asks brokers and NameServers for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from . import maven
from .clusters import Cluster
from .conftest import Sessions
from .java_session import ClientError, JavaSession, eventually

pytestmark = [pytest.mark.compat, pytest.mark.slow]

CLUSTER = "DefaultCluster"
TOPIC_NOT_EXIST = 17
CONSUMER_NOT_ONLINE = 206


class Admin:
    """The admin client, method by method."""

    def __init__(self, java: JavaSession, cluster: Cluster) -> None:
        self.java = java
        self.cluster = cluster
        java.do("producer.start", producer="common", namesrv=cluster.namesrv)

    def call(self, method: str, *args: Any) -> Any:
        return self.java.do("admin.call", admin="admin", method=method, args=list(args))

    def create_topic(self, topic: str, **config: Any) -> None:
        fields = {"topicName": topic, "readQueueNums": 4, "writeQueueNums": 4, "perm": 6, **config}
        self.call("createAndUpdateTopicConfig", self.cluster.broker_address, fields)

    def send(self, topic: str, count: int) -> list[Any]:
        messages = [{"topic": topic, "body": str(n), "keys": [f"k{n}"]} for n in range(count)]
        acked: list[Any] = self.java.do("producer.send", producer="common", messages=messages)
        assert {line.get("status") for line in acked} == {"SEND_OK"}, acked
        return acked


@pytest.fixture(scope="module", params=maven.SERVER_VERSIONS)
def admin(request: pytest.FixtureRequest, sessions: Sessions, cluster: Cluster) -> Iterator[Admin]:
    """The admin client of a release."""
    java = sessions(request.param)
    java.do("admin.start", admin="admin", namesrv=cluster.namesrv)
    yield Admin(java, cluster)
    java.do("admin.stop", admin="admin", later_ms=0)


def test_topics_are_created_changed_and_deleted(admin: Admin, fresh: str) -> None:
    admin.create_topic(fresh)
    route = admin.call("examineTopicRouteInfo", fresh)
    [row] = route["queueDatas"]
    assert (row["brokerName"], row["readQueueNums"], row["perm"]) == (admin.cluster.broker, 4, 6)
    [broker] = route["brokerDatas"]
    assert broker["brokerAddrs"] == {"0": admin.cluster.broker_address}
    assert broker["cluster"] == CLUSTER

    admin.create_topic(fresh, readQueueNums=6, writeQueueNums=6, perm=4)
    config = admin.call("examineTopicConfig", admin.cluster.broker_address, fresh)
    assert (config["readQueueNums"], config["perm"]) == (6, 4)

    def permission() -> int:
        return int(admin.call("examineTopicRouteInfo", fresh)["queueDatas"][0]["perm"])

    assert eventually(lambda: permission() == 4)
    assert fresh in admin.call("fetchAllTopicList")["topicList"]
    assert fresh in admin.call("fetchTopicsByCLuster", CLUSTER)["topicList"]
    assert admin.call("getTopicClusterList", fresh) == [CLUSTER]

    admin.call("deleteTopicInBroker", [admin.cluster.broker_address], fresh)
    admin.call("deleteTopicInNameServer", [admin.cluster.namesrv], fresh)
    with pytest.raises(ClientError) as refused:
        admin.call("examineTopicRouteInfo", fresh)
    assert refused.value.code == TOPIC_NOT_EXIST


def test_topic_and_consumer_statistics(admin: Admin, fresh: str) -> None:
    admin.create_topic(fresh)
    admin.send(fresh, 20)
    table = admin.call("examineTopicStats", fresh)["offsetTable"]
    assert sum(row["maxOffset"] - row["minOffset"] for _, row in table) == 20
    assert all(row["lastUpdateTimestamp"] > 0 for _, row in table if row["maxOffset"])

    consume = {"namesrv": admin.cluster.namesrv, "group": fresh, "topics": {fresh: "*"}}
    admin.java.do("push.start", consumer="early", **consume)
    admin.java.do("push.received", consumer="early", count=20)
    # A client keeps its progress when it leaves; otherwise after ten seconds first.
    admin.java.do("push.stop", consumer="early")
    admin.java.do("push.start", consumer="stats", **consume)

    def lag() -> int:
        rows = admin.call("examineConsumeStats", fresh)["offsetTable"]
        mine = [row for queue, row in rows if queue["topic"] == fresh]
        return sum(row["brokerOffset"] - row["consumerOffset"] for row in mine)

    assert eventually(lambda: lag() == 0)
    assert admin.call("queryTopicConsumeByWho", fresh)["groupList"] == [fresh]
    assert fresh in admin.call("queryTopicsByConsumer", fresh)["topicList"]
    spans = admin.call("queryConsumeTimeSpan", fresh, fresh)
    assert [span["messageQueue"]["topic"] for span in spans] == [fresh] * 4
    by_group = admin.call("fetchConsumeStatsInBroker", admin.cluster.broker_address, False, 5000)
    assert any(fresh in groups for groups in by_group["consumeStatsList"])

    connection = admin.call("examineConsumerConnectionInfo", fresh)
    [member] = connection["connectionSet"]
    assert member["clientId"] == admin.java.do("push.client_id", consumer="stats")
    assert member["language"] == "JAVA"
    assert connection["consumeType"] == "CONSUME_PASSIVELY"
    assert connection["subscriptionTable"][fresh]["subString"] == "*"
    subscription = admin.call("querySubscription", fresh, fresh)
    assert (subscription["topic"], subscription["subString"]) == (fresh, "*")
    admin.java.do("push.stop", consumer="stats")
    with pytest.raises(ClientError) as refused:
        admin.call("examineConsumerConnectionInfo", fresh)
    assert refused.value.code == CONSUMER_NOT_ONLINE


def test_consumers_are_asked_through_the_broker(admin: Admin, fresh: str) -> None:
    admin.create_topic(fresh)
    acked = admin.send(fresh, 8)
    admin.java.do(
        "push.start", consumer="asked", namesrv=admin.cluster.namesrv, group=fresh,
        topics={fresh: "*"},
    )  # fmt: skip
    admin.java.do("push.received", consumer="asked", count=8)
    member = admin.java.do("push.client_id", consumer="asked")

    info = admin.call("getConsumerRunningInfo", fresh, member, False)
    assert info["properties"]["consumerGroup"] == fresh
    assert {queue["topic"] for queue, _ in info["mqTable"]} >= {fresh}
    with_stack = admin.call("getConsumerRunningInfo", fresh, member, True)
    assert "Thread" in with_stack["jstack"]

    again = admin.call("consumeMessageDirectly", fresh, member, fresh, acked[3]["offset_msg_id"])
    assert again["consumeResult"] == "CR_SUCCESS"
    rows = admin.java.do("push.received", consumer="asked", count=9)
    assert [row[3] for row in rows].count("3") == 2

    def status() -> Any:
        return admin.call("getConsumeStatus", fresh, fresh, member)

    assert eventually(lambda: sum(offset for _, offset in status().get(member, [])) == 8)

    with pytest.raises(ClientError):
        admin.call("getConsumerRunningInfo", fresh, "nobody", False)
    admin.java.do("push.stop", consumer="asked")


def test_messages_are_found(admin: Admin, fresh: str) -> None:
    acked = admin.send(fresh, 8)
    for id_ in (acked[2]["offset_msg_id"], acked[2]["msg_id"]):
        assert admin.call("viewMessage", fresh, id_)["keys"] == "k2"
    found = admin.call("queryMessage", fresh, "k2", 32, 0, 2**62)
    assert [line["msg_id"] for line in found] == [acked[2]["msg_id"]]
    found = admin.call("queryMessageByUniqKey", CLUSTER, fresh, acked[2]["msg_id"], 32, 0, 2**62)
    assert [line["keys"] for line in found] == ["k2"]
    body = admin.call(
        "queryConsumeQueue", admin.cluster.broker_address, fresh, acked[2]["queue_id"], 0, 10, ""
    )
    assert (body["minQueueIndex"], body["maxQueueIndex"]) == (0, len(body["queueData"]))


def test_groups_are_created_and_deleted(admin: Admin, fresh: str) -> None:
    address = admin.cluster.broker_address
    fields = {"groupName": fresh, "consumeEnable": True, "retryMaxTimes": 5, "retryQueueNums": 1}
    admin.call("createAndUpdateSubscriptionGroupConfig", address, fields)
    config = admin.call("examineSubscriptionGroupConfig", address, fresh)
    assert (config["groupName"], config["retryMaxTimes"]) == (fresh, 5)
    groups = admin.call("getAllSubscriptionGroup", address, 5000)["subscriptionGroupTable"]
    assert groups[fresh]["retryMaxTimes"] == 5
    admin.call("deleteSubscriptionGroup", address, fresh, True)
    groups = admin.call("getAllSubscriptionGroup", address, 5000)["subscriptionGroupTable"]
    assert fresh not in groups


def test_offsets_are_cloned_and_set(admin: Admin, fresh: str) -> None:
    admin.create_topic(fresh)
    admin.send(fresh, 8)
    address = admin.cluster.broker_address
    for group in (fresh, f"{fresh}-to"):
        fields = {"groupName": group, "consumeEnable": True}
        admin.call("createAndUpdateSubscriptionGroupConfig", address, fields)
    admin.java.do("pull.start", consumer="offsets", namesrv=admin.cluster.namesrv, group=fresh)
    place = {"topic": fresh, "broker": admin.cluster.broker, "queue_id": 2}
    admin.java.do("pull.commit", consumer="offsets", offset=1, **place)
    assert admin.java.do("pull.committed", consumer="offsets", **place) == 1
    # Cloning asks for the group's retry topic, which its first heartbeat creates.
    topics = partial(admin.call, "fetchAllTopicList")
    assert eventually(lambda: f"%RETRY%{fresh}" in topics()["topicList"])
    admin.call("cloneGroupOffset", fresh, f"{fresh}-to", fresh, False)
    queue = {"topic": fresh, "brokerName": admin.cluster.broker, "queueId": 2}
    admin.call("updateConsumeOffset", address, fresh, queue, 2)
    assert admin.java.do("pull.committed", consumer="offsets", **place) == 2
    admin.java.do("pull.stop", consumer="offsets")
    admin.java.do(
        "pull.start", consumer="clone", namesrv=admin.cluster.namesrv, group=f"{fresh}-to"
    )
    assert admin.java.do("pull.committed", consumer="clone", **place) == 1
    admin.java.do("pull.stop", consumer="clone")


def test_cluster_broker_and_nameserver(admin: Admin) -> None:
    address, broker = admin.cluster.broker_address, admin.cluster.broker
    cluster = admin.call("examineBrokerClusterInfo")
    assert cluster["clusterAddrTable"] == {CLUSTER: [broker]}
    assert cluster["brokerAddrTable"][broker]["brokerAddrs"] == {"0": address}
    runtime = admin.call("fetchBrokerRuntimeStats", address)["table"]
    wanted = {"brokerVersionDesc", "putTps", "commitLogDirCapacity", "msgPutTotalTodayNow",
              "bootTimestamp", "getTransferredTps"}  # fmt: skip
    assert wanted <= runtime.keys()
    config = admin.call("getBrokerConfig", address)
    assert (config["brokerName"], config["brokerClusterName"]) == (broker, CLUSTER)
    admin.call("updateBrokerConfig", address, {"maxMessageSize": "4194303"})
    assert admin.call("getBrokerConfig", address)["maxMessageSize"] == "4194303"
    admin.call("updateBrokerConfig", address, {"maxMessageSize": "4194304"})

    admin.call("createAndUpdateKvConfig", "space", "key", "value 中文")
    assert admin.call("getKVConfig", "space", "key") == "value 中文"
    assert admin.call("getKVListByNamespace", "space")["table"] == {"key": "value 中文"}
    admin.call("deleteKvConfig", "space", "key")
    assert admin.call("wipeWritePermOfBroker", admin.cluster.namesrv, broker) >= 1
    perms = {row["perm"] for row in admin.call("examineTopicRouteInfo", "TBW102")["queueDatas"]}
    assert perms == {5}
    assert admin.call("addWritePermOfBroker", admin.cluster.namesrv, broker) >= 1
    [settings] = admin.call("getNameServerConfig", [admin.cluster.namesrv]).values()
    assert settings["listenPort"] == admin.cluster.namesrv.split(":")[1]
    producers = admin.call("getAllProducerInfo", address)["data"]
    assert any("common" in one["clientId"] for one in producers["group-common"])
