"""A master and its slaves under one broker name: routes, removal of each, changes of roles.

`tests/compat/test_nameserver_answers.py` compares random registrations with Apache's NameServer.
"""

from typing import Any

import pytest

from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import GetBrokerMemberGroupResponseBody
from penstock.wire.codes import RequestCode
from tests.unit.nameserver.nameserver_kit import MASTER, NOW_MS, SLAVE, NameServerFixture, topics

OTHER_SLAVE = "10.0.0.3:10911"
CLIENTS = {MASTER: 10, SLAVE: 11, OTHER_SLAVE: 12}
IDS = {MASTER: 0, SLAVE: 1, OTHER_SLAVE: 2}
MASTER_FIELDS = {"masterAddr": MASTER, "haServerAddr": "10.0.0.1:10912"}
WAYS = ["it unregisters", "it is disconnected", "it expires"]


def register(env: NameServerFixture, address: str, **more: Any) -> dict[str, str]:
    """Register a member; returns the fields of the response."""
    more = {"id": IDS[address], **more}
    answer = env.register(address=address, client=CLIENTS[address], **more)
    assert answer.code == 0
    return dict(answer.ext or {})


def replicated() -> NameServerFixture:
    """A master and two slaves."""
    env = NameServerFixture()
    for address in CLIENTS:
        register(env, address)
    return env


def remove(env: NameServerFixture, address: str, way: str) -> None:
    if way == "it unregisters":
        env.unregister(address=address)
    elif way == "it is disconnected":
        env.names.disconnected(CLIENTS[address], NOW_MS)
    else:
        env.now_ms += 100_000
        for other in CLIENTS.keys() - {address}:
            register(env, other)
        env.now_ms += 21_000
        env.names.tick(env.now_ms)


def members(env: NameServerFixture) -> dict[int, str]:
    """What GET_BROKER_MEMBER_GROUP says."""
    answer = env.get(RequestCode.GET_BROKER_MEMBER_GROUP, clusterName="c", brokerName="broker-a")
    group = fastjson.decode(answer.body, GetBrokerMemberGroupResponseBody).broker_member_group
    assert group is not None
    return dict(group.broker_addrs)


def test_a_master_and_its_slaves_are_one_broker_in_routes() -> None:
    env = replicated()
    assert env.addresses() == {"broker-a": {"0": MASTER, "1": SLAVE, "2": OTHER_SLAVE}}
    assert len(env.route()["queueDatas"]) == 1, "replicas have the same queues"
    assert members(env) == {0: MASTER, 1: SLAVE, 2: OTHER_SLAVE}


def test_every_registration_of_a_slave_is_answered_with_its_master() -> None:
    env = NameServerFixture()
    assert register(env, SLAVE) == {}
    assert register(env, MASTER) == {}
    for _ in range(3):  # also if it is repeated byte for byte
        assert register(env, SLAVE) == MASTER_FIELDS
    env.unregister(address=MASTER)
    assert register(env, SLAVE) == {}
    register(env, MASTER)
    assert register(env, SLAVE) == MASTER_FIELDS


@pytest.mark.parametrize("way", WAYS)
def test_a_slave_that_leaves_does_not_touch_the_others(way: str) -> None:
    env = replicated()
    remove(env, SLAVE, way)
    assert env.addresses() == {"broker-a": {"0": MASTER, "2": OTHER_SLAVE}}
    assert env.perms() == {"broker-a": 6}
    assert members(env) == {0: MASTER, 2: OTHER_SLAVE}
    register(env, SLAVE)
    assert env.addresses()["broker-a"]["1"] == SLAVE


@pytest.mark.parametrize("way", WAYS)
def test_slaves_stay_in_routes_without_their_master(way: str) -> None:
    env = replicated()
    remove(env, MASTER, way)
    assert env.addresses() == {"broker-a": {"1": SLAVE, "2": OTHER_SLAVE}}
    assert env.perms() == {"broker-a": 6}, "as Apache: clients send only to masters anyway"
    assert members(env) == {1: SLAVE, 2: OTHER_SLAVE}
    register(env, SLAVE)
    assert env.route("pay") is not None
    register(env, MASTER)
    assert env.addresses() == {"broker-a": {"0": MASTER, "1": SLAVE, "2": OTHER_SLAVE}}


@pytest.mark.parametrize("first", [MASTER, SLAVE])
def test_the_topics_are_removed_with_the_last_member(first: str) -> None:
    env = NameServerFixture()
    register(env, MASTER)
    register(env, SLAVE)
    env.unregister(address=first)
    assert env.route() is not None
    env.unregister(address=SLAVE if first == MASTER else MASTER)
    assert env.route() is None
    assert members(env) == {}


def test_a_restarted_nameserver_serves_the_routes_of_slaves_alone() -> None:
    env = NameServerFixture()
    register(env, OTHER_SLAVE)
    assert env.addresses() == {"broker-a": {"2": OTHER_SLAVE}}
    register(env, SLAVE, table=topics("orders", "pay", "of-slave-1"))
    assert env.route("of-slave-1") is not None, "the slave with the smallest id has the topics"
    register(env, OTHER_SLAVE, table=topics("orders", "pay", "of-slave-2"), counter=2)
    assert env.route("of-slave-2") is None


def test_registrations_of_slaves_restore_no_wiped_permission() -> None:
    env = replicated()
    wiped = env.get(RequestCode.WIPE_WRITE_PERM_OF_BROKER, brokerName="broker-a")
    assert wiped.ext == {"wipeTopicCount": "2"}
    register(env, SLAVE, counter=5)
    register(env, OTHER_SLAVE)
    assert env.perms() == {"broker-a": 4}
    env.get(RequestCode.ADD_WRITE_PERM_OF_BROKER, brokerName="broker-a")
    assert env.perms() == {"broker-a": 6}


def test_a_topic_deleted_at_its_master_is_not_restored_by_a_slave() -> None:
    env = replicated()
    env.get(RequestCode.DELETE_TOPIC_IN_NAMESRV, topic="orders")
    register(env, SLAVE)
    assert env.route() is None
    register(env, MASTER)
    assert env.route() is not None


def test_a_promoted_slave_and_the_former_master_exchange_their_ids() -> None:
    env = replicated()
    register(env, SLAVE, id=0)
    assert env.addresses() == {"broker-a": {"0": SLAVE, "2": OTHER_SLAVE}}
    fields = {"masterAddr": SLAVE, "haServerAddr": "10.0.0.2:10912"}
    assert register(env, OTHER_SLAVE) == fields
    assert register(env, MASTER, id=1) == fields
    assert env.addresses() == {"broker-a": {"0": SLAVE, "1": MASTER, "2": OTHER_SLAVE}}
