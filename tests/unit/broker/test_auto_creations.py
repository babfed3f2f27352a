"""Clients at one address create a limited number of topics and groups by using them."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.auto_creations import HOUR_MS, AutoCreations
from penstock.broker.consumers.groups import Groups
from penstock.config import BrokerConfig, LiveSettings, Settings
from penstock.errors import InvalidParameter
from penstock.rpc.answers import EffectQueue
from penstock.store.tables.config_tables import SubscriptionGroupTable
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import ConsumerData, HeartbeatData
from penstock.wire.codes import RequestCode
from tests.store_kit import small_config
from tests.unit.broker.broker_kit import NOW_MS, BrokerFixture

LIMIT = 3
ONE, TWO, NEIGHBOUR = 1, 2, 3
"""Connections; the first two are of the same address."""


@pytest.fixture
def creations() -> AutoCreations:
    made = AutoCreations(LiveSettings(Settings(broker=BrokerConfig(auto_creations_max=LIMIT))))
    made.connected(ONE, "10.0.0.1:1")
    made.connected(TWO, "10.0.0.1:2")
    made.connected(NEIGHBOUR, "10.0.0.2:1")
    return made


def test_one_address_has_a_limit_that_its_connections_share(
    creations: AutoCreations, caplog: pytest.LogCaptureFixture
) -> None:
    for client in (ONE, TWO, ONE):
        creations.count(client, "the topic T", NOW_MS)
    for _ in range(2):
        with pytest.raises(InvalidParameter) as refusal:
            creations.count(TWO, "the topic T", NOW_MS)
    assert str(refusal.value) == (
        "the topic T is not created: too many topics and groups were created automatically in an "
        "hour for clients at 10.0.0.1: 4 of them, the limit is 3 (auto_creations_max)"
    )
    creations.count(NEIGHBOUR, "the topic T", NOW_MS)
    said = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(said) == 1, "the others are not logged"


def test_reconnecting_does_not_help_but_time_does(creations: AutoCreations) -> None:
    for _ in range(LIMIT):
        creations.count(ONE, "the topic T", NOW_MS)
    creations.disconnected(ONE)
    creations.connected(9, "10.0.0.1:77")
    with pytest.raises(InvalidParameter):
        creations.count(9, "the topic T", NOW_MS + HOUR_MS - 1)
    creations.count(9, "the topic T", NOW_MS + HOUR_MS)


def test_a_slave_counts_no_groups_because_it_creates_none() -> None:
    live = LiveSettings(Settings(broker=BrokerConfig(auto_creations_max=LIMIT)))
    creations, table = AutoCreations(live), SubscriptionGroupTable()
    creations.connected(ONE, "10.0.0.1:1")
    groups = Groups(table, live, EffectQueue(), creations, copied=True)
    for _ in range(LIMIT + 1):
        assert groups.find("coupons", NOW_MS, ONE).group_name == "coupons"
    assert table.get("coupons") is None
    for _ in range(LIMIT):
        creations.count(ONE, "the topic T", NOW_MS)


def test_the_clock_may_be_set_back(creations: AutoCreations) -> None:
    for _ in range(LIMIT):
        creations.count(ONE, "the topic T", NOW_MS)
    creations.count(ONE, "the topic T", NOW_MS - HOUR_MS)


def test_what_the_broker_creates_is_not_counted(creations: AutoCreations) -> None:
    for _ in range(2 * LIMIT):
        creations.count(0, "the topic T", NOW_MS)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[BrokerFixture]:
    settings = Settings(
        store=small_config(sync_flush=False), broker=BrokerConfig(auto_creations_max=LIMIT)
    )
    fixture = BrokerFixture(tmp_path, settings)
    fixture.broker.connected(1, "10.1.2.3:54321", NOW_MS)
    yield fixture
    fixture.close()


def test_sends_beyond_the_limit_are_refused_and_known_topics_go_on(env: BrokerFixture) -> None:
    assert [env.send(f"T{n}").code for n in range(5)] == [0, 0, 0, 29, 29]
    refused = env.send("%RETRY%group")
    assert refused.code == 29
    assert "for clients at 10.1.2.3: 4 of them" in (refused.remark or "")
    assert "(auto_creations_max)" in (refused.remark or "")
    assert env.context.topics.get("T3") is None
    assert env.send("T0").code == 0
    env.now_ms += HOUR_MS
    assert env.send("T3").code == 0


def test_groups_are_counted_too_however_they_are_created(env: BrokerFixture) -> None:
    env.send("T")
    beat = HeartbeatData(
        client_id="c", consumer_data_set=[ConsumerData(group_name=f"g{n}") for n in range(5)]
    )
    assert env.ask(RequestCode.HEART_BEAT, {}, fastjson.encode(beat)).code == 0
    groups = env.context.groups
    assert [groups.get(f"g{n}") is not None for n in range(5)] == [True, True, False, False, False]
    assert env.context.topics.get("%RETRY%g2") is None
    pulled = env.pull(consumerGroup="g9")
    assert getattr(pulled, "code", 0) == 29
    asked = env.ask(RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG, {"group": "g9"})
    assert asked.code == 29
    assert groups.get("g9") is None


def test_tools_create_as_many_as_they_like(env: BrokerFixture) -> None:
    for n in range(2 * LIMIT):
        fields = {
            "topic": f"T{n}", "readQueueNums": "1", "writeQueueNums": "1", "perm": "6",
        }  # fmt: skip
        assert env.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, fields).code == 0
        body = fastjson.encode({"groupName": f"g{n}"})
        assert env.ask(RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {}, body).code == 0
