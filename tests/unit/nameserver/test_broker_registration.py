"""Brokers come and go: registration, its repetition, its rivals, and the ways to be removed."""

import json

import pytest

from penstock.nameserver import handlers
from penstock.rpc.answers import CloseConnection
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import (
    DataVersion,
    QueueData,
    TopicQueueMappingInfo,
    TopicRouteData,
)
from penstock.wire.codes import V4_9_8, RequestCode
from tests.unit.nameserver.nameserver_kit import MASTER, NOW_MS, SLAVE, Office, topics

VERSION_4 = 396  # 4.9.2: knows no acting master


@pytest.mark.parametrize("compressed", [False, True], ids=["json", "packed"])
def test_a_registered_broker_is_in_the_routes_of_its_topics(compressed: bool) -> None:
    office = Office()
    assert office.register(compressed=compressed).code == 0
    assert office.route() == {
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


def test_a_packed_body_of_4_x_has_no_mapping_section() -> None:
    office = Office()
    assert office.register(compressed=True, version=V4_9_8).code == 0
    assert office.addresses() == {"broker-a": {"0": MASTER}}


def test_a_body_that_does_not_match_its_checksum_is_refused() -> None:
    office = Office()
    answer = office.register(bodyCrc32="12345")
    assert answer.code == 1
    assert "crc32 not match" in str(answer.remark)
    assert "12345" in str(answer.remark)
    assert office.route() is None


def test_a_checksum_of_zero_is_not_checked() -> None:
    office = Office()
    assert office.register(bodyCrc32="0").code == 0


def test_a_body_that_is_no_registration_is_refused() -> None:
    office = Office()
    assert office.register(body=b'{"topicConfigSerializeWrapper":7}').code == 29
    assert office.register(body=b"\x00\x01", compressed=True).code == 29
    assert office.ask(RequestCode.REGISTER_BROKER).code == 29


def test_a_broker_without_a_body_has_no_topics() -> None:
    office = Office()
    assert office.register(body=b"").code == 0
    info = json.loads(
        office.get(RequestCode.GET_BROKER_CLUSTER_INFO).body.replace(b"{0:", b'{"0":')
    )
    assert info["clusterAddrTable"] == {"c": ["broker-a"]}


def test_an_unknown_broker_with_a_single_topic_is_refused() -> None:
    office = Office()
    answer = office.register(topics("orders"))
    assert answer.code == 1
    assert "register broker failed" in str(answer.remark)
    assert office.get(RequestCode.GET_BROKER_CLUSTER_INFO).body == (
        b'{"brokerAddrTable":{},"clusterAddrTable":{}}'
    )


def test_a_known_broker_adds_a_single_topic() -> None:
    office = Office()
    office.register()
    assert office.register(topics("new"), counter=2).code == 0
    assert office.route("new") is not None
    assert office.route("orders") is not None, "a registration never removes topics by itself"


def test_topics_that_a_registration_lacks_are_removed_where_the_setting_says_so() -> None:
    office = Office(delete_absent_topics=True)
    office.register(topics("orders", "pay", "ship"))
    office.register(topics("orders", "pay"), counter=2)
    assert office.topic_list(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER) == ["orders", "pay"]


def test_the_same_version_changes_no_topic_that_is_known() -> None:
    office = Office()
    office.register()
    office.register(topics("orders", "pay", "ship", perm=4))
    assert office.perms("orders") == {"broker-a": 6}
    assert office.perms("ship") == {"broker-a": 4}, "but a missing one is added"


def test_a_new_version_replaces_the_topics() -> None:
    office = Office()
    office.register()
    assert office.perms() == {"broker-a": 6}
    office.register(topics("orders", "pay", perm=4, write_queue_nums=2), counter=2)
    assert office.perms() == {"broker-a": 4}
    assert office.route()["queueDatas"][0]["writeQueueNums"] == 2


def test_the_same_registration_again_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    office = Office()
    office.register()
    monkeypatch.setattr(handlers, "read_body", None)
    office.now_ms += 119_000
    assert office.register().code == 0
    office.now_ms += 119_000
    office.names.tick(office.now_ms)
    assert office.addresses() == {"broker-a": {"0": MASTER}}, "but it is a sign of life"


def test_the_same_registration_again_brings_back_a_deleted_topic() -> None:
    office = Office()
    office.register()
    office.get(RequestCode.DELETE_TOPIC_IN_NAMESRV, topic="orders")
    assert office.route() is None
    office.register()
    assert office.addresses() == {"broker-a": {"0": MASTER}}


def test_the_same_registration_after_an_unregistration_counts() -> None:
    office = Office()
    office.register()
    office.unregister(cluster="another")  # the address and the name decide
    assert office.route() is None
    office.register()
    assert office.addresses() == {"broker-a": {"0": MASTER}}


def test_a_slave_learns_of_its_master() -> None:
    office = Office()
    assert office.register(id=1, address=SLAVE, client=11).ext == {}
    assert office.register().ext == {}
    answer = office.register(id=1, address=SLAVE, client=11)
    assert answer.ext == {"masterAddr": MASTER, "haServerAddr": "10.0.0.1:10912"}
    assert office.addresses() == {"broker-a": {"0": MASTER, "1": SLAVE}}


def test_topics_of_a_slave_do_not_count_beside_its_master() -> None:
    office = Office()
    office.register()
    office.register(topics("slave-only", "other"), id=1, address=SLAVE, client=11)
    assert office.route("slave-only") is None


def test_topics_of_a_lone_slave_count_from_5_0_on() -> None:
    office = Office()
    office.register(topics("old", "other"), id=1, version=VERSION_4, name="four", client=11)
    assert office.route("old") is None
    office.register(topics("new", "other"), id=1, address=SLAVE, name="five", client=12)
    assert office.addresses("new") == {"five": {"1": SLAVE}}


def test_an_address_is_under_one_id_only() -> None:
    office = Office()
    office.register(id=1)
    office.register(id=0)
    assert office.addresses() == {"broker-a": {"0": MASTER}}


def test_an_address_is_under_one_name_only() -> None:
    office = Office()
    office.register(name="old", client=10)
    office.register(name="new", client=11)
    assert office.addresses() == {"new": {"0": MASTER}}
    office.names.disconnected(10, NOW_MS)
    assert office.addresses() == {"new": {"0": MASTER}}


def test_a_rival_with_an_older_epoch_is_ignored() -> None:
    office = Office()
    office.register(state_version=2)
    answer = office.register(address="10.0.0.9:10911", state_version=1, client=11)
    assert answer.code == 0
    assert office.addresses() == {"broker-a": {"0": MASTER}}
    office.register(address="10.0.0.9:10911", state_version=2, client=11)
    assert office.addresses() == {"broker-a": {"0": "10.0.0.9:10911"}}


def test_a_closed_connection_removes_its_brokers_at_once() -> None:
    office = Office()
    office.register()
    office.register(name="broker-b", address=SLAVE)  # of the same process
    office.register(topics("pay", "x"), name="broker-c", address="10.0.0.3:10911", client=11)
    office.names.disconnected(10, NOW_MS)
    assert office.route("orders") is None
    assert office.addresses("pay") == {"broker-c": {"0": "10.0.0.3:10911"}}
    assert b"broker-b" not in office.get(RequestCode.GET_BROKER_CLUSTER_INFO).body


def test_the_old_connection_of_a_broker_that_came_back_does_not_remove_it() -> None:
    office = Office()
    office.register(client=10)
    office.register(client=11)
    office.names.disconnected(10, NOW_MS)
    assert office.route() is not None
    office.names.disconnected(11, NOW_MS)
    assert office.route() is None


def test_one_connection_may_register_an_address_under_two_clusters() -> None:
    office = Office()
    office.register(cluster="c")
    office.register(cluster="d")
    office.names.disconnected(10, NOW_MS)
    assert office.route() is None
    assert office.get(RequestCode.GET_BROKER_CLUSTER_INFO).body == (
        b'{"brokerAddrTable":{},"clusterAddrTable":{}}'
    )


@pytest.mark.parametrize("late", ["the connection ends", "the broker expires"])
def test_a_broker_that_came_back_under_another_cluster_stays(late: str) -> None:
    office = Office()
    office.register(cluster="old", client=10)
    office.now_ms += 100_000
    office.register(cluster="new", client=11)
    if late == "the connection ends":
        office.names.disconnected(10, NOW_MS)
    else:
        office.names.tick(NOW_MS + 125_000)
    assert office.addresses() == {"broker-a": {"0": MASTER}}
    info = office.get(RequestCode.GET_BROKER_CLUSTER_INFO).body
    assert b'"clusterAddrTable":{"new":["broker-a"]}' in info
    assert b'"cluster":"new"' in info
    office.names.disconnected(11, NOW_MS)
    assert office.route() is None


def test_a_slave_keeps_its_cluster_when_the_master_goes() -> None:
    office = Office()
    office.register(client=10)
    office.register(id=1, address=SLAVE, client=11)
    office.names.disconnected(10, NOW_MS)
    assert office.addresses() == {"broker-a": {"1": SLAVE}}
    info = office.get(RequestCode.GET_BROKER_CLUSTER_INFO).body
    assert b'"clusterAddrTable":{"c":["broker-a"]}' in info


def test_connections_of_clients_mean_nothing() -> None:
    office = Office()
    office.register()
    office.names.connected(99, "10.1.1.1:5", NOW_MS)
    office.names.disconnected(99, NOW_MS)
    assert office.route() is not None


def test_a_silent_broker_expires_and_its_connection_is_closed() -> None:
    office = Office()
    office.register()
    office.names.tick(NOW_MS + 120_000)
    assert office.route() is not None
    office.names.tick(NOW_MS + 125_000)
    assert office.route() is None
    (effect,) = office.names.effects.take()
    assert isinstance(effect, CloseConnection)
    assert effect.client == 10
    assert "broker-a" in effect.why


def test_a_broker_may_ask_for_another_time_to_expire() -> None:
    office = Office()
    office.register(heartbeatTimeoutMillis="10000")
    office.names.tick(NOW_MS + 10_001)
    assert office.route() is None


def test_silent_brokers_are_looked_for_once_per_scan() -> None:
    office = Office(scan_ms=60_000)
    assert office.names.due() == NOW_MS + 60_000
    office.register(heartbeatTimeoutMillis="1000")
    office.names.tick(NOW_MS + 59_999)
    assert office.route() is not None
    office.names.tick(NOW_MS + 60_000)
    assert office.route() is None
    assert office.names.due() == NOW_MS + 120_000


@pytest.mark.parametrize("code", [RequestCode.BROKER_HEARTBEAT, RequestCode.QUERY_DATA_VERSION])
def test_signs_of_life_keep_a_broker(code: RequestCode) -> None:
    office = Office()
    office.register()
    office.now_ms += 100_000
    body = fastjson.encode(DataVersion(counter=1, timestamp=NOW_MS))
    office.get(code, body, brokerName="broker-a", brokerAddr=MASTER, clusterName="c", brokerId="0")
    office.names.tick(NOW_MS + 150_000)
    assert office.route() is not None


def test_a_broker_asks_whether_its_topics_have_changed() -> None:
    office = Office()
    fields = {"brokerName": "broker-a", "brokerAddr": MASTER, "clusterName": "c", "brokerId": "0"}
    same = fastjson.encode(DataVersion(counter=1, timestamp=NOW_MS))
    unknown = office.get(RequestCode.QUERY_DATA_VERSION, same, **fields)
    assert (unknown.ext, unknown.body) == ({"changed": "true"}, b"")
    office.register()
    known = office.get(RequestCode.QUERY_DATA_VERSION, same, **fields)
    assert (known.ext, known.body) == ({"changed": "false"}, same)
    newer = fastjson.encode(DataVersion(counter=2, timestamp=NOW_MS))
    assert office.get(RequestCode.QUERY_DATA_VERSION, newer, **fields).ext == {"changed": "true"}


def test_the_members_of_a_broker_name() -> None:
    office = Office()
    office.register()
    office.register(id=1, address=SLAVE, client=11)
    ask = RequestCode.GET_BROKER_MEMBER_GROUP
    assert office.get(ask, clusterName="c", brokerName="broker-a").body == (
        b'{"brokerMemberGroup":{"brokerAddrs":{0:"10.0.0.1:10911",1:"10.0.0.2:10911"},'
        b'"brokerName":"broker-a","cluster":"c"}}'
    )
    assert office.get(ask, clusterName="c", brokerName="nobody").body == (
        b'{"brokerMemberGroup":{"brokerAddrs":{},"brokerName":"nobody","cluster":"c"}}'
    )


def test_a_single_topic_is_registered_for_known_brokers_only() -> None:
    office = Office()
    office.register()
    queues = [QueueData(broker_name="broker-a", read_queue_nums=3, write_queue_nums=3, perm=6)]
    body = fastjson.encode(TopicRouteData(queue_datas=queues))
    office.get(RequestCode.REGISTER_TOPIC_IN_NAMESRV, body, topic="new")
    assert office.route("new")["queueDatas"][0]["readQueueNums"] == 3
    office.get(
        RequestCode.REGISTER_TOPIC_IN_NAMESRV, body.replace(b"broker-a", b"nobody"), topic="other"
    )
    assert office.route("other") is None


def test_static_topics_are_carried_along_however_long_the_registration_is() -> None:
    office = Office()
    mapping = TopicQueueMappingInfo(
        topic="orders", total_queues=2, bname="broker-a", epoch=5, curr_id_map={0: 0, 1: 1}
    )
    many = topics("orders", *(f"topic-{number}" for number in range(2_000)))
    assert office.register(many, mappings={"orders": mapping}).code == 0
    assert office.route()["topicQueueMappingByBroker"] == {
        "broker-a": {
            "bname": "broker-a", "currIdMap": {"0": 0, "1": 1}, "dirty": False, "epoch": 5,
            "scope": "__global__", "topic": "orders", "totalQueues": 2,
        }
    }  # fmt: skip
    assert "topicQueueMappingByBroker" not in office.route("topic-1")


def test_filter_servers_are_in_the_routes_of_their_broker() -> None:
    office = Office()
    office.register()
    office.register(filters=("10.0.0.1:30000",))
    assert office.route()["filterServerTable"] == {MASTER: ["10.0.0.1:30000"]}
    office.register()
    assert office.route()["filterServerTable"] == {}


def test_without_acting_masters_a_lone_slave_keeps_its_id() -> None:
    office = Office()
    office.register(enableActingMaster="true")
    office.register(id=2, address=SLAVE, client=11, enableActingMaster="true")
    office.unregister()
    assert office.addresses() == {"broker-a": {"2": SLAVE}}
    assert office.perms() == {"broker-a": 4}, "the master has gone: nothing can be written"


def test_an_acting_master_is_shown_as_master_and_can_only_be_read() -> None:
    office = Office(acting_master=True)
    office.register(enableActingMaster="true")
    office.register(id=2, address=SLAVE, client=11, enableActingMaster="true")
    office.register(id=3, address="10.0.0.3:10911", client=12, enableActingMaster="true")
    office.unregister()
    assert office.addresses() == {"broker-a": {"0": SLAVE, "3": "10.0.0.3:10911"}}
    assert office.perms() == {"broker-a": 4}
    office.register(id=2, address=SLAVE, client=11, counter=2, enableActingMaster="true")
    assert office.perms() == {"broker-a": 4}
    office.register(enableActingMaster="true")
    assert office.addresses()["broker-a"]["0"] == MASTER
    assert office.perms() == {"broker-a": 6}


def test_name_servers_share_nothing() -> None:
    one, other = Office(), Office()
    one.register()
    assert other.route() is None
