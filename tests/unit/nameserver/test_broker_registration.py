"""Registration of brokers: repetition, conflicts, and removal."""

import json

import pytest

from penstock.nameserver import nameserver
from penstock.rpc.answers import CloseConnection
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import (
    DataVersion,
    QueueData,
    TopicQueueMappingInfo,
    TopicRouteData,
)
from penstock.wire.codes import V4_9_8, RequestCode
from tests.unit.nameserver.nameserver_kit import MASTER, NOW_MS, SLAVE, NameServerFixture, topics

VERSION_4 = 396  # 4.9.2: does not support acting masters


@pytest.mark.parametrize("compressed", [False, True], ids=["json", "compressed"])
def test_a_registered_broker_is_in_the_routes_of_its_topics(compressed: bool) -> None:
    env = NameServerFixture()
    assert env.register(compressed=compressed).code == 0
    assert env.route() == {
        "brokerDatas": [
            {
                "brokerAddrs": {"0": MASTER},
                "brokerName": "broker-a",
                "cluster": "c",
                "enableActingMaster": False,
            }
        ],
        "filterServerTable": {},
        "queueDatas": [
            {
                "brokerName": "broker-a",
                "perm": 6,
                "readQueueNums": 16,
                "topicSysFlag": 0,
                "writeQueueNums": 16,
            }
        ],
    }


def test_a_compressed_body_of_4_x_has_no_mapping_section() -> None:
    env = NameServerFixture()
    assert env.register(compressed=True, version=V4_9_8).code == 0
    assert env.addresses() == {"broker-a": {"0": MASTER}}


def test_a_body_that_does_not_match_its_checksum_is_refused() -> None:
    env = NameServerFixture()
    answer = env.register(bodyCrc32="12345")
    assert answer.code == 1
    assert "crc32 not match" in str(answer.remark)
    assert "12345" in str(answer.remark)
    assert env.route() is None


def test_a_checksum_of_zero_is_not_checked() -> None:
    env = NameServerFixture()
    assert env.register(bodyCrc32="0").code == 0


def test_an_invalid_registration_body_is_refused() -> None:
    env = NameServerFixture()
    assert env.register(body=b'{"topicConfigSerializeWrapper":7}').code == 29
    assert env.register(body=b"\x00\x01", compressed=True).code == 29
    assert env.ask(RequestCode.REGISTER_BROKER).code == 29


def test_a_broker_without_a_body_has_no_topics() -> None:
    env = NameServerFixture()
    assert env.register(body=b"").code == 0
    info = json.loads(env.get(RequestCode.GET_BROKER_CLUSTER_INFO).body.replace(b"{0:", b'{"0":'))
    assert info["clusterAddrTable"] == {"c": ["broker-a"]}


def test_an_unknown_broker_with_a_single_topic_is_refused() -> None:
    env = NameServerFixture()
    answer = env.register(topics("orders"))
    assert answer.code == 1
    assert "register broker failed" in str(answer.remark)
    assert env.get(RequestCode.GET_BROKER_CLUSTER_INFO).body == (
        b'{"brokerAddrTable":{},"clusterAddrTable":{}}'
    )


def test_a_known_broker_adds_a_single_topic() -> None:
    env = NameServerFixture()
    env.register()
    assert env.register(topics("new"), counter=2).code == 0
    assert env.route("new") is not None
    assert env.route("orders") is not None, "a registration never removes topics by itself"


def test_topics_missing_in_a_registration_are_removed_if_enabled() -> None:
    env = NameServerFixture(delete_absent_topics=True)
    env.register(topics("orders", "pay", "ship"))
    env.register(topics("orders", "pay"), counter=2)
    assert env.topic_list(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER) == ["orders", "pay"]


def test_a_registration_with_the_same_version_changes_no_known_topic() -> None:
    env = NameServerFixture()
    env.register()
    env.register(topics("orders", "pay", "ship", perm=4))
    assert env.perms("orders") == {"broker-a": 6}
    assert env.perms("ship") == {"broker-a": 4}, "but a missing one is added"


def test_a_new_version_replaces_the_topics() -> None:
    env = NameServerFixture()
    env.register()
    assert env.perms() == {"broker-a": 6}
    env.register(topics("orders", "pay", perm=4, write_queue_nums=2), counter=2)
    assert env.perms() == {"broker-a": 4}
    assert env.route()["queueDatas"][0]["writeQueueNums"] == 2


def test_a_repeated_registration_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    env = NameServerFixture()
    env.register()
    monkeypatch.setattr(nameserver, "read_body", None)
    env.now_ms += 119_000
    assert env.register().code == 0
    env.now_ms += 119_000
    env.names.tick(env.now_ms)
    assert env.addresses() == {"broker-a": {"0": MASTER}}, "but it is a sign of life"


def test_a_repeated_registration_restores_a_deleted_topic() -> None:
    env = NameServerFixture()
    env.register()
    env.get(RequestCode.DELETE_TOPIC_IN_NAMESRV, topic="orders")
    assert env.route() is None
    env.register()
    assert env.addresses() == {"broker-a": {"0": MASTER}}


def test_a_repeated_registration_after_an_unregistration_is_applied() -> None:
    env = NameServerFixture()
    env.register()
    env.unregister(cluster="another")  # the address and the name decide
    assert env.route() is None
    env.register()
    assert env.addresses() == {"broker-a": {"0": MASTER}}


def test_a_slave_gets_the_address_of_its_master() -> None:
    env = NameServerFixture()
    assert env.register(id=1, address=SLAVE, client=11).ext == {}
    assert env.register().ext == {}
    answer = env.register(id=1, address=SLAVE, client=11)
    assert answer.ext == {"masterAddr": MASTER, "haServerAddr": "10.0.0.1:10912"}
    assert env.addresses() == {"broker-a": {"0": MASTER, "1": SLAVE}}


def test_topics_of_a_slave_with_a_master_are_ignored() -> None:
    env = NameServerFixture()
    env.register()
    env.register(topics("slave-only", "other"), id=1, address=SLAVE, client=11)
    assert env.route("slave-only") is None


def test_topics_of_a_slave_without_a_master_are_used_since_5_0() -> None:
    env = NameServerFixture()
    env.register(topics("old", "other"), id=1, version=VERSION_4, name="four", client=11)
    assert env.route("old") is None
    env.register(topics("new", "other"), id=1, address=SLAVE, name="five", client=12)
    assert env.addresses("new") == {"five": {"1": SLAVE}}


def test_an_address_has_one_broker_id() -> None:
    env = NameServerFixture()
    env.register(id=1)
    env.register(id=0)
    assert env.addresses() == {"broker-a": {"0": MASTER}}


def test_an_address_has_one_broker_name() -> None:
    env = NameServerFixture()
    env.register(name="old", client=10)
    env.register(name="new", client=11)
    assert env.addresses() == {"new": {"0": MASTER}}
    env.names.disconnected(10, NOW_MS)
    assert env.addresses() == {"new": {"0": MASTER}}


def test_a_closed_connection_removes_its_brokers_at_once() -> None:
    env = NameServerFixture()
    env.register()
    env.register(name="broker-b", address=SLAVE)  # of the same process
    env.register(topics("pay", "x"), name="broker-c", address="10.0.0.3:10911", client=11)
    env.names.disconnected(10, NOW_MS)
    assert env.route("orders") is None
    assert env.addresses("pay") == {"broker-c": {"0": "10.0.0.3:10911"}}
    assert b"broker-b" not in env.get(RequestCode.GET_BROKER_CLUSTER_INFO).body


def test_closing_the_old_connection_of_a_reconnected_broker_does_not_remove_it() -> None:
    env = NameServerFixture()
    env.register(client=10)
    env.register(client=11)
    env.names.disconnected(10, NOW_MS)
    assert env.route() is not None
    env.names.disconnected(11, NOW_MS)
    assert env.route() is None


def test_one_connection_may_register_an_address_under_two_clusters() -> None:
    env = NameServerFixture()
    env.register(cluster="c")
    env.register(cluster="d")
    env.names.disconnected(10, NOW_MS)
    assert env.route() is None
    assert env.get(RequestCode.GET_BROKER_CLUSTER_INFO).body == (
        b'{"brokerAddrTable":{},"clusterAddrTable":{}}'
    )


@pytest.mark.parametrize("late", ["the connection ends", "the broker expires"])
def test_a_broker_that_moved_to_another_cluster_is_kept(late: str) -> None:
    env = NameServerFixture()
    env.register(cluster="old", client=10)
    env.now_ms += 100_000
    env.register(cluster="new", client=11)
    if late == "the connection ends":
        env.names.disconnected(10, NOW_MS)
    else:
        env.names.tick(NOW_MS + 125_000)
    assert env.addresses() == {"broker-a": {"0": MASTER}}
    info = env.get(RequestCode.GET_BROKER_CLUSTER_INFO).body
    assert b'"clusterAddrTable":{"new":["broker-a"]}' in info
    assert b'"cluster":"new"' in info
    env.names.disconnected(11, NOW_MS)
    assert env.route() is None


def test_a_slave_keeps_its_cluster_without_its_master() -> None:
    env = NameServerFixture()
    env.register(client=10)
    env.register(id=1, address=SLAVE, client=11)
    env.names.disconnected(10, NOW_MS)
    assert env.addresses() == {"broker-a": {"1": SLAVE}}
    info = env.get(RequestCode.GET_BROKER_CLUSTER_INFO).body
    assert b'"clusterAddrTable":{"c":["broker-a"]}' in info


def test_closed_client_connections_change_nothing() -> None:
    env = NameServerFixture()
    env.register()
    env.names.connected(99, "10.1.1.1:5", NOW_MS)
    env.names.disconnected(99, NOW_MS)
    assert env.route() is not None


def test_a_silent_broker_expires_and_its_connection_is_closed() -> None:
    env = NameServerFixture()
    env.register()
    env.names.tick(NOW_MS + 120_000)
    assert env.route() is not None
    env.names.tick(NOW_MS + 125_000)
    assert env.route() is None
    (effect,) = env.names.effects.take()
    assert isinstance(effect, CloseConnection)
    assert effect.client == 10
    assert "broker-a" in effect.why


def test_a_broker_may_set_its_own_expiry_time() -> None:
    env = NameServerFixture()
    env.register(heartbeatTimeoutMillis="10000")
    env.names.tick(NOW_MS + 10_001)
    assert env.route() is None


def test_expired_brokers_are_removed_once_per_scan_interval() -> None:
    env = NameServerFixture(scan_ms=60_000)
    assert env.names.due() == NOW_MS + 60_000
    env.register(heartbeatTimeoutMillis="1000")
    env.names.tick(NOW_MS + 59_999)
    assert env.route() is not None
    env.names.tick(NOW_MS + 60_000)
    assert env.route() is None
    assert env.names.due() == NOW_MS + 120_000


@pytest.mark.parametrize("code", [RequestCode.BROKER_HEARTBEAT, RequestCode.QUERY_DATA_VERSION])
def test_heartbeats_keep_a_broker_registered(code: RequestCode) -> None:
    env = NameServerFixture()
    env.register()
    env.now_ms += 100_000
    body = fastjson.encode(DataVersion(counter=1, timestamp=NOW_MS))
    env.get(code, body, brokerName="broker-a", brokerAddr=MASTER, clusterName="c", brokerId="0")
    env.names.tick(NOW_MS + 150_000)
    assert env.route() is not None


def test_the_data_version_of_a_broker_can_be_queried() -> None:
    env = NameServerFixture()
    fields = {"brokerName": "broker-a", "brokerAddr": MASTER, "clusterName": "c", "brokerId": "0"}
    same = fastjson.encode(DataVersion(counter=1, timestamp=NOW_MS))
    unknown = env.get(RequestCode.QUERY_DATA_VERSION, same, **fields)
    assert (unknown.ext, unknown.body) == ({"changed": "true"}, b"")
    env.register()
    known = env.get(RequestCode.QUERY_DATA_VERSION, same, **fields)
    assert (known.ext, known.body) == ({"changed": "false"}, same)
    newer = fastjson.encode(DataVersion(counter=2, timestamp=NOW_MS))
    assert env.get(RequestCode.QUERY_DATA_VERSION, newer, **fields).ext == {"changed": "true"}


def test_the_members_of_a_broker_name() -> None:
    env = NameServerFixture()
    env.register()
    env.register(id=1, address=SLAVE, client=11)
    ask = RequestCode.GET_BROKER_MEMBER_GROUP
    assert env.get(ask, clusterName="c", brokerName="broker-a").body == (
        b'{"brokerMemberGroup":{"brokerAddrs":{0:"10.0.0.1:10911",1:"10.0.0.2:10911"},'
        b'"brokerName":"broker-a","cluster":"c"}}'
    )
    assert env.get(ask, clusterName="c", brokerName="nobody").body == (
        b'{"brokerMemberGroup":{"brokerAddrs":{},"brokerName":"nobody","cluster":"c"}}'
    )


def test_a_single_topic_is_registered_for_known_brokers_only() -> None:
    env = NameServerFixture()
    env.register()
    queues = [QueueData(broker_name="broker-a", read_queue_nums=3, write_queue_nums=3, perm=6)]
    body = fastjson.encode(TopicRouteData(queue_datas=queues))
    env.get(RequestCode.REGISTER_TOPIC_IN_NAMESRV, body, topic="new")
    assert env.route("new")["queueDatas"][0]["readQueueNums"] == 3
    env.get(
        RequestCode.REGISTER_TOPIC_IN_NAMESRV, body.replace(b"broker-a", b"nobody"), topic="other"
    )
    assert env.route("other") is None


def test_static_topics_are_kept_in_registrations_of_any_size() -> None:
    env = NameServerFixture()
    mapping = TopicQueueMappingInfo(
        topic="orders", total_queues=2, bname="broker-a", epoch=5, curr_id_map={0: 0, 1: 1}
    )
    many = topics("orders", *(f"topic-{number}" for number in range(2_000)))
    assert env.register(many, mappings={"orders": mapping}).code == 0
    assert env.route()["topicQueueMappingByBroker"] == {
        "broker-a": {
            "bname": "broker-a", "currIdMap": {"0": 0, "1": 1}, "dirty": False, "epoch": 5,
            "scope": "__global__", "topic": "orders", "totalQueues": 2,
        }
    }  # fmt: skip
    assert "topicQueueMappingByBroker" not in env.route("topic-1")


def test_filter_servers_are_in_the_routes_of_their_broker() -> None:
    env = NameServerFixture()
    env.register()
    env.register(filters=("10.0.0.1:30000",))
    assert env.route()["filterServerTable"] == {MASTER: ["10.0.0.1:30000"]}
    env.register()
    assert env.route()["filterServerTable"] == {}


def test_a_slave_without_a_master_keeps_its_id_if_acting_masters_are_disabled() -> None:
    env = NameServerFixture()
    env.register(enableActingMaster="true")
    env.register(id=2, address=SLAVE, client=11, enableActingMaster="true")
    env.unregister()
    assert env.addresses() == {"broker-a": {"2": SLAVE}}
    assert env.perms() == {"broker-a": 4}, "the master has gone: nothing can be written"


def test_an_acting_master_is_a_read_only_master_in_routes() -> None:
    env = NameServerFixture(acting_master=True)
    env.register(enableActingMaster="true")
    env.register(id=2, address=SLAVE, client=11, enableActingMaster="true")
    env.register(id=3, address="10.0.0.3:10911", client=12, enableActingMaster="true")
    env.unregister()
    assert env.addresses() == {"broker-a": {"0": SLAVE, "3": "10.0.0.3:10911"}}
    assert env.perms() == {"broker-a": 4}
    env.register(id=2, address=SLAVE, client=11, counter=2, enableActingMaster="true")
    assert env.perms() == {"broker-a": 4}
    env.register(enableActingMaster="true")
    assert env.addresses()["broker-a"]["0"] == MASTER
    assert env.perms() == {"broker-a": 6}


def test_nameservers_share_no_state() -> None:
    one, other = NameServerFixture(), NameServerFixture()
    one.register()
    assert other.route() is None
