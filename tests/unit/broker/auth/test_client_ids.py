"""A client id belongs to the user of its first live connection."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.rpc.answers import CallClient
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import (
    ConsumerData,
    HeartbeatData,
    LockBatchRequestBody,
    MessageQueue,
    ProducerData,
    SubscriptionData,
)
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.message import encode_properties

from .access_broker import ROOT, AccessBroker, access_broker
from .access_kit import rule

REPLY_TOPIC = "DefaultCluster_REPLY_TOPIC"
NO = ResponseCode.NO_PERMISSION


@pytest.fixture
def env(tmp_path: Path) -> Iterator[AccessBroker]:
    with access_broker(tmp_path) as env:
        consuming = (rule("Group:g", "Sub,Get"), rule("Topic:t", "Sub"))
        env.add("shop", rule("Topic:orders", "Pub"), *consuming)
        env.add("eve", rule("Topic:own", "Pub"), *consuming)
        env.add("worker", rule(f"Topic:{REPLY_TOPIC}", "Pub"))
        yield env


def join(env: AccessBroker, user: str, connection: str, *, consumes: bool = False) -> None:
    """A heartbeat with the client id x."""
    consumer = ConsumerData(
        group_name="g",
        consume_type="CONSUME_PASSIVELY",
        message_model="CLUSTERING",
        consume_from_where="CONSUME_FROM_LAST_OFFSET",
        subscription_data_set=[SubscriptionData(topic="t")],
    )
    data = HeartbeatData(
        client_id="x",
        producer_data_set=[ProducerData(group_name=f"of-{user}")],
        consumer_data_set=[consumer] if consumes else [],
    )
    body = fastjson.encode(data)
    reply = env.ask_as(user, RequestCode.HEART_BEAT, {}, body, connection=connection)
    assert reply.code == 0


def leave(env: AccessBroker, connection: str) -> None:
    env.broker.disconnected(env.client_of(connection), env.now_ms)


def replied_to(env: AccessBroker) -> int:
    """The connection that gets a reply for the client id x."""
    properties = encode_properties({"REPLY_TO_CLIENT": "x", "CORRELATION_ID": "1"}).decode()
    ext = {
        "a": "workers", "b": REPLY_TOPIC, "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1",
        "h": "0", "i": properties,
    }  # fmt: skip
    answer = env.answer_to("worker", RequestCode.SEND_REPLY_MESSAGE_V2, ext, b"answer")
    assert isinstance(answer, CallClient), answer
    return answer.client


def test_replies_go_to_the_user_who_came_first(
    env: AccessBroker, caplog: pytest.LogCaptureFixture
) -> None:
    join(env, "shop", "shop1")
    with caplog.at_level(logging.WARNING):
        join(env, "eve", "eve1")
        join(env, "eve", "eve1")
    assert caplog.text.count("user eve at 192.0.2.7:4711 uses the client id x of user shop") == 1
    assert replied_to(env) == env.client_of("shop1")


def test_replies_go_to_the_newest_connection_of_the_owner(env: AccessBroker) -> None:
    for user, connection in (("shop", "shop1"), ("eve", "eve1"), ("shop", "shop2")):
        join(env, user, connection)
    assert replied_to(env) == env.client_of("shop2")
    leave(env, "shop1")
    join(env, "eve", "eve1")
    assert replied_to(env) == env.client_of("shop2"), "the owner is still connected"
    leave(env, "shop2")
    assert replied_to(env) == env.client_of("eve1")


def test_requests_to_a_consumer_go_to_the_owner_of_its_client_id(env: AccessBroker) -> None:
    join(env, "shop", "shop1", consumes=True)
    join(env, "eve", "eve1", consumes=True)
    ext = {"consumerGroup": "g", "clientId": "x", "jstackEnable": "false"}
    answer = env.answer_to(ROOT, RequestCode.GET_CONSUMER_RUNNING_INFO, ext)
    assert isinstance(answer, CallClient)
    assert answer.client == env.client_of("shop1")


def test_nobody_locks_or_unlocks_queues_for_the_client_of_another_user(env: AccessBroker) -> None:
    env.send_as(ROOT, "t")
    join(env, "shop", "shop1", consumes=True)
    queue = MessageQueue("t", "broker-a", 0)
    body = fastjson.encode(LockBatchRequestBody(consumer_group="g", client_id="x", mq_set=[queue]))
    for code in (RequestCode.LOCK_BATCH_MQ, RequestCode.UNLOCK_BATCH_MQ):
        refused = env.ask_as("eve", code, {}, body)
        assert refused.code == NO
        assert "belongs to another user" in (refused.remark or "")
        assert env.ask_as("shop", code, {}, body).code == 0
