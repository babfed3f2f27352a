"""Two brokers with one name and id: the live one keeps its routes."""

import logging

import pytest

from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import QueueData, TopicRouteData
from penstock.wire.codes import RequestCode
from tests.unit.nameserver.nameserver_kit import MASTER, NOW_MS, SLAVE, NameServerFixture, topics

OTHER = "10.0.0.9:10911"
FIRST, SECOND = 10, 11
"""Connections."""


def both() -> NameServerFixture:
    """A registered broker, and a second one that was refused."""
    env = NameServerFixture()
    env.register(client=FIRST)
    assert env.register(topics("orders", "x"), address=OTHER, client=SECOND).code == 1
    return env


def test_a_live_broker_keeps_its_name_and_the_other_is_told_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    env = NameServerFixture()
    env.register(client=FIRST)
    for _ in range(3):
        answer = env.register(topics("orders", "x"), address=OTHER, client=SECOND)
        assert answer.code == 1
        assert f"broker-a (id 0) is registered at {MASTER}" in (answer.remark or "")
        assert "broker.name" in (answer.remark or "")
    assert env.addresses() == {"broker-a": {"0": MASTER}}
    assert env.route("x") is None
    (said,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert said.getMessage().startswith(f"refused the registration of {OTHER}: the broker broker-a")


@pytest.mark.parametrize("how", ["it unregisters", "its connection closes"])
def test_a_refused_broker_that_leaves_does_not_remove_the_live_one(how: str) -> None:
    env = both()
    if how == "it unregisters":
        env.unregister(address=OTHER)
    else:
        env.names.disconnected(SECOND, NOW_MS)
    assert env.addresses() == {"broker-a": {"0": MASTER}}
    assert env.route("pay") is not None


@pytest.mark.parametrize("how", ["it unregisters", "its connection closes", "it expires"])
def test_another_address_is_accepted_after_the_first_broker_is_gone(how: str) -> None:
    env = both()
    if how == "it unregisters":
        env.unregister()
    elif how == "its connection closes":
        env.names.disconnected(FIRST, NOW_MS)
    else:
        env.now_ms += 125_000
        env.names.tick(env.now_ms)
    assert env.register(address=OTHER, client=SECOND).code == 0
    assert env.addresses() == {"broker-a": {"0": OTHER}}
    assert env.register(client=FIRST).code == 1, "now the first one is the other"


def test_a_crashed_broker_registers_again_before_its_old_connection_is_closed() -> None:
    env = NameServerFixture()
    env.register(client=FIRST)
    assert env.register(counter=2, client=SECOND).code == 0
    env.names.disconnected(FIRST, NOW_MS)
    assert env.addresses() == {"broker-a": {"0": MASTER}}


@pytest.mark.parametrize(("epoch", "accepted"), [(1, False), (2, False), (3, True)])
def test_only_a_greater_epoch_replaces_a_live_master(epoch: int, accepted: bool) -> None:
    env = NameServerFixture()
    env.register(state_version=2, client=FIRST)
    answer = env.register(address=OTHER, state_version=epoch, client=SECOND)
    assert answer.code == (0 if accepted else 1)
    assert env.addresses() == {"broker-a": {"0": OTHER if accepted else MASTER}}


def test_a_slave_of_the_same_epoch_may_become_master() -> None:
    """Leaders of a DLedger group have no epoch, and are elected while the old one is connected."""
    env = NameServerFixture()
    env.register(client=FIRST)
    env.register(id=1, address=SLAVE, client=SECOND)
    assert env.register(id=0, address=SLAVE, client=SECOND).code == 0
    assert env.addresses() == {"broker-a": {"0": SLAVE}}
    assert env.register(client=FIRST).code == 1, "it has to register as a slave"
    env.register(id=2, client=FIRST)
    assert env.addresses() == {"broker-a": {"0": SLAVE, "2": MASTER}}


def test_a_former_master_of_an_older_epoch_is_removed_under_every_id() -> None:
    env = NameServerFixture()
    env.register(state_version=2, client=FIRST)
    env.register(id=1, address=SLAVE, state_version=1, client=SECOND)
    assert env.register(id=0, address=SLAVE, state_version=1, client=SECOND).code == 1
    assert env.addresses() == {"broker-a": {"0": MASTER}}


def test_a_second_slave_with_the_same_id_is_refused() -> None:
    env = NameServerFixture()
    env.register(client=FIRST)
    env.register(id=1, address=SLAVE, client=SECOND)
    assert env.register(id=1, address=OTHER, client=12).code == 1
    assert env.addresses() == {"broker-a": {"0": MASTER, "1": SLAVE}}


def test_a_broker_of_another_cluster_does_not_take_the_name() -> None:
    env = NameServerFixture()
    env.register(client=FIRST)
    assert env.register(address=OTHER, cluster="d", client=SECOND).code == 1
    assert env.addresses() == {"broker-a": {"0": MASTER}}
    info = env.get(RequestCode.GET_BROKER_CLUSTER_INFO).body
    assert b'"clusterAddrTable":{"c":["broker-a"]}' in info


def test_single_topics_of_a_refused_broker_are_refused() -> None:
    env = both()
    body = fastjson.encode(TopicRouteData(queue_datas=[QueueData(broker_name="broker-a")]))
    code = RequestCode.REGISTER_TOPIC_IN_NAMESRV
    assert env.ask(code, body, client=SECOND, topic="new").code == 1
    assert env.route("new") is None
    assert env.ask(code, body, client=FIRST, topic="new").code == 0
    env.unregister()
    env.register(address=OTHER, client=SECOND)
    assert env.ask(code, body, client=SECOND, topic="newer").code == 0


def test_a_broker_can_ask_when_the_one_with_its_name_was_started() -> None:
    env = NameServerFixture()
    env.register(client=FIRST, bootTimestamp="5")
    env.register(name="broker-b", address=OTHER, client=SECOND)
    ask = RequestCode.GET_BROKER_MEMBER_GROUP
    fields = {"clusterName": "c", "brokerName": "broker-a"}
    assert env.get(ask, **fields, brokerId="0").ext == {"bootTimestamp": "5"}
    assert not env.get(ask, **fields).ext, "as Apache answers"
    assert not env.get(ask, **fields, brokerId="1").ext
    assert not env.get(ask, clusterName="c", brokerName="broker-b", brokerId="0").ext
