"""Requests of clients and tools to a NameServer: routes, lists, permissions, deletions."""

import json
from typing import Any

from penstock.wire.codes import V4_9_3, V5_4_0, RequestCode
from tests.unit.nameserver.nameserver_kit import MASTER, SLAVE, NameServerFixture, topics

ORDER = "ORDER_TOPIC_CONFIG"


def two_brokers() -> NameServerFixture:
    """broker-a with `orders` and `pay`, broker-b of another cluster with `pay` and `ship`."""
    env = NameServerFixture()
    env.register()
    env.register(
        topics("pay", "ship"), name="broker-b", address=SLAVE, cluster="d", client=11
    )  # fmt: skip
    return env


def test_an_unknown_topic_has_no_route() -> None:
    answer = NameServerFixture().ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="nothing")
    assert answer.code == 17
    assert str(answer.remark).startswith(
        "No topic route info in name server for the topic: nothing"
    )


def test_a_route_without_a_topic_is_refused() -> None:
    assert NameServerFixture().ask(RequestCode.GET_ROUTEINFO_BY_TOPIC).code == 29


def test_clients_up_to_4_9_3_get_unquoted_keys_and_later_ones_strict_json() -> None:
    env = two_brokers()

    def body(version: int, **ext: Any) -> bytes:
        ask = RequestCode.GET_ROUTEINFO_BY_TOPIC
        return env.ask(ask, version=version, topic="orders", **ext).body

    assert b'"brokerAddrs":{0:"10' in body(V4_9_3)
    assert b'"brokerAddrs":{"0":"10' in body(V4_9_3, acceptStandardJsonOnly="true")
    assert b'"brokerAddrs":{"0":"10' in body(V5_4_0)
    assert b'"brokerAddrs":{0:"10' in body(V4_9_3), "neither is answered with the other's bytes"


def test_a_topic_on_two_brokers_has_both_in_its_route() -> None:
    env = two_brokers()
    assert env.addresses("pay") == {"broker-a": {"0": MASTER}, "broker-b": {"0": SLAVE}}
    env.unregister()
    assert env.addresses("pay") == {"broker-b": {"0": SLAVE}}
    assert env.route("orders") is None


def test_clients_of_a_zone_get_its_brokers_and_those_without_a_master() -> None:
    env = NameServerFixture()
    env.register(__ZONE_NAME="east")
    env.register(name="broker-b", address=SLAVE, client=11, __ZONE_NAME="west")
    env.register(name="broker-c", address="10.0.0.3:10911", id=1, client=12)
    route = env.route(__ZONE_MODE="true", __ZONE_NAME="EAST")
    assert [data["brokerName"] for data in route["brokerDatas"]] == ["broker-a", "broker-c"]
    assert [data["brokerName"] for data in route["queueDatas"]] == ["broker-a", "broker-c"]
    assert route["brokerDatas"][0]["zoneName"] == "east"
    assert len(env.route(__ZONE_NAME="east")["brokerDatas"]) == 3
    assert env.route("nothing", __ZONE_MODE="true", __ZONE_NAME="east") is None


def test_cluster_info_has_the_clusters_and_their_brokers() -> None:
    env = two_brokers()
    assert env.get(RequestCode.GET_BROKER_CLUSTER_INFO).body == (
        b'{"brokerAddrTable":{'
        b'"broker-a":{"brokerAddrs":{0:"10.0.0.1:10911"},"brokerName":"broker-a","cluster":"c",'
        b'"enableActingMaster":false},'
        b'"broker-b":{"brokerAddrs":{0:"10.0.0.2:10911"},"brokerName":"broker-b","cluster":"d",'
        b'"enableActingMaster":false}},'
        b'"clusterAddrTable":{"c":["broker-a"],"d":["broker-b"]}}'
    )


def test_topics_are_listed() -> None:
    env = two_brokers()
    everything = RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER
    assert env.topic_list(everything) == ["orders", "pay", "ship"]
    by_cluster = RequestCode.GET_TOPICS_BY_CLUSTER
    assert env.topic_list(by_cluster, cluster="c") == ["orders", "pay"]
    assert env.topic_list(by_cluster, cluster="d") == ["pay", "ship"]
    assert env.topic_list(by_cluster, cluster="nowhere") == []


def test_the_list_of_system_topics_has_clusters_brokers_and_a_broker_address() -> None:
    env = two_brokers()
    listed = json.loads(env.get(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS).body)
    assert sorted(listed["topicList"]) == ["broker-a", "broker-b", "c", "d"]
    assert listed["brokerAddr"] == MASTER
    empty = NameServerFixture().get(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS)
    assert json.loads(empty.body) == {"topicList": []}


def test_unit_topics_are_listed_by_their_system_flag() -> None:
    env = NameServerFixture()
    table = topics("plain") | topics("unit", topic_sys_flag=1) | topics("sub", topic_sys_flag=2)
    env.register(table | topics("both", topic_sys_flag=3))
    assert env.topic_list(RequestCode.GET_UNIT_TOPIC_LIST) == ["both", "unit"]
    assert env.topic_list(RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST) == ["both", "sub"]
    assert env.topic_list(RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST) == ["sub"]


def test_write_permission_is_removed_and_added_for_all_topics_of_a_broker() -> None:
    env = two_brokers()
    assert env.perms("pay") == {"broker-a": 6, "broker-b": 6}
    wiped = env.get(RequestCode.WIPE_WRITE_PERM_OF_BROKER, brokerName="broker-a")
    assert wiped.ext == {"wipeTopicCount": "2"}
    assert env.perms("pay") == {"broker-a": 4, "broker-b": 6}
    env.register()
    assert env.perms("pay") == {"broker-a": 4, "broker-b": 6}, "a repetition restores nothing"
    added = env.get(RequestCode.ADD_WRITE_PERM_OF_BROKER, brokerName="broker-a")
    assert added.ext == {"addTopicCount": "2"}
    assert env.perms("pay") == {"broker-a": 6, "broker-b": 6}
    nobody = env.get(RequestCode.WIPE_WRITE_PERM_OF_BROKER, brokerName="nobody")
    assert nobody.ext == {"wipeTopicCount": "0"}


def test_removed_permissions_are_restored_by_the_next_change_of_topics() -> None:
    env = two_brokers()
    env.get(RequestCode.WIPE_WRITE_PERM_OF_BROKER, brokerName="broker-a")
    env.register(counter=2)
    assert env.perms("orders") == {"broker-a": 6}


def test_a_topic_is_deleted_everywhere_or_in_one_cluster() -> None:
    env = two_brokers()
    env.get(RequestCode.DELETE_TOPIC_IN_NAMESRV, topic="pay", clusterName="d")
    assert env.addresses("pay") == {"broker-a": {"0": MASTER}}
    env.get(RequestCode.DELETE_TOPIC_IN_NAMESRV, topic="pay", clusterName="nowhere")
    assert env.route("pay") is not None
    env.get(RequestCode.DELETE_TOPIC_IN_NAMESRV, topic="pay")
    assert env.route("pay") is None
    env.get(RequestCode.DELETE_TOPIC_IN_NAMESRV, topic="pay")


def test_routes_have_the_order_config_if_enabled() -> None:
    env = two_brokers()
    env.get(RequestCode.PUT_KV_CONFIG, namespace=ORDER, key="orders", value="broker-a:4")
    assert "orderTopicConf" not in env.route()
    env.get(RequestCode.UPDATE_NAMESRV_CONFIG, b"orderMessageEnable=true")
    assert env.route()["orderTopicConf"] == "broker-a:4"
    env.get(RequestCode.PUT_KV_CONFIG, namespace=ORDER, key="orders", value="broker-a:8")
    assert env.route()["orderTopicConf"] == "broker-a:8"
    env.get(RequestCode.DELETE_KV_CONFIG, namespace=ORDER, key="orders")
    assert "orderTopicConf" not in env.route()


def test_request_codes_of_a_broker_are_not_supported() -> None:
    assert NameServerFixture().ask(RequestCode.SEND_MESSAGE).code == 3
