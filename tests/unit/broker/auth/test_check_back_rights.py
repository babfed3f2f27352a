"""Check-backs with access lists: only producers that may publish to the topic are asked."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config import AccessConfig
from penstock.rpc.answers import NotifyClient
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import HeartbeatData, ProducerData
from penstock.wire.codes import RequestCode, ResponseCode

from .access_broker import AccessBroker, access_broker
from .access_kit import rule

HALF = "RMQ_SYS_TRANS_HALF_TOPIC"
CHECK_S = 31  # a check is due every 30 s
NO = ResponseCode.NO_PERMISSION


@pytest.fixture
def env(tmp_path: Path) -> Iterator[AccessBroker]:
    with access_broker(tmp_path) as env:
        env.add("shop", rule("Topic:orders", "Pub"), rule("Topic:shared", "Pub"))
        env.add("eve", rule("Topic:own", "Pub"), rule("Topic:shared", "Pub"))
        yield env


def produce(env: AccessBroker, user: str, *groups: str) -> int:
    """The response code to a heartbeat of a producer."""
    producers = [ProducerData(group_name=group) for group in groups]
    data = HeartbeatData(client_id=f"id-{user}", producer_data_set=producers)
    return env.ask_as(user, RequestCode.HEART_BEAT, {}, fastjson.encode(data)).code


def pass_checks(env: AccessBroker, seconds: int, *users: str) -> list[int]:
    """Let time pass while these users send heartbeats; the connections that were asked."""
    asked = []
    for _ in range(seconds):
        for user in users:
            produce(env, user, "p")
        env.tick(1_000)
        for effect in env.broker.effects.take():
            if isinstance(effect, NotifyClient):
                assert effect.code == RequestCode.CHECK_TRANSACTION_STATE
                asked.append(effect.client)
    return asked


def open_half(env: AccessBroker, topic: str = "orders") -> None:
    assert env.send_as("shop", topic, b"content", TRAN_MSG="true", PGROUP="p").code == 0
    env.broker.effects.take()


def test_a_stranger_in_the_group_is_not_asked(env: AccessBroker) -> None:
    open_half(env)
    assert pass_checks(env, 8 * CHECK_S, "eve") == []
    assert env.broker.transactions.half_messages.open, "no silence of a stranger counts"
    assert set(pass_checks(env, CHECK_S, "eve", "shop")) == {env.client_of("shop")}


def test_a_producer_that_may_publish_is_asked_and_its_silence_counts(env: AccessBroker) -> None:
    open_half(env)
    assert set(pass_checks(env, 8 * CHECK_S, "shop")) == {env.client_of("shop")}
    assert not env.broker.transactions.half_messages.open
    assert env.store.max_offset("TRANS_CHECK_MAX_TIME_TOPIC", 0) == 1


def test_topics_of_one_group_are_checked_by_different_producers(env: AccessBroker) -> None:
    open_half(env)
    assert env.send_as("eve", "own", TRAN_MSG="true", PGROUP="p").code == 0
    open_half(env, "shared")
    asked = pass_checks(env, 4 * CHECK_S, "eve", "shop")
    assert set(asked) == {env.client_of("shop"), env.client_of("eve")}
    assert env.broker.transactions.half_messages.topics == {"orders": 1, "own": 1, "shared": 1}


def test_a_user_that_loses_its_right_or_is_disabled_is_not_asked(env: AccessBroker) -> None:
    open_half(env)
    produce(env, "shop", "p")
    env.add("shop", rule("Topic:shared", "Pub"))
    assert pass_checks(env, CHECK_S) == []
    env.add("shop", rule("Topic:orders", "Pub"))
    assert set(pass_checks(env, CHECK_S, "shop")) == {env.client_of("shop")}
    env.context.access.table.remove_user("shop", env.now_ms)
    assert pass_checks(env, CHECK_S) == []


def test_with_authentication_alone_every_known_user_is_asked(tmp_path: Path) -> None:
    with access_broker(tmp_path, AccessConfig(authentication=True)) as env:
        env.add("shop")
        env.add("eve")
        open_half(env)
        assert set(pass_checks(env, CHECK_S, "eve")) == {env.client_of("eve")}


def test_a_producer_group_can_be_denied(env: AccessBroker) -> None:
    allowed = rule("Topic:own", "Pub")
    env.add("eve", allowed, rule("Group:p", "Pub", "Deny"))
    assert produce(env, "eve", "q") == 0
    assert produce(env, "eve", "p") == NO
    end = {
        "producerGroup": "p", "tranStateTableOffset": "0", "commitLogOffset": "0", "topic": "own",
        "commitOrRollback": "12",
    }  # fmt: skip
    assert env.ask_as("eve", RequestCode.END_TRANSACTION, end).code == NO
    env.add("eve", allowed, rule("Group:*", "Pub", "Deny"), rule("Group:mine", "Pub"))
    assert produce(env, "eve", "mine") == 0
    assert produce(env, "eve", "q") == NO


def test_a_producer_group_needs_no_rule(env: AccessBroker) -> None:
    """As in Apache, where a rule for the topic is enough; also beside a rule that denies all."""
    env.add("eve", rule("Topic:own", "Pub"), rule("*", "All", "Deny"))
    assert produce(env, "eve", "p") == 0
