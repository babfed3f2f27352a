"""Requests that name a message by offset or id need the right on the topic of that message."""

import logging
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from penstock.config import AccessConfig
from penstock.rpc.answers import CallClient
from penstock.wire import fastjson
from penstock.wire.bodies.client_bodies import ConsumerData, HeartbeatData, SubscriptionData
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.message import decode_messages
from penstock.wire.message_ids import encode_offset_id

from .access_broker import ROOT, AccessBroker, access_broker
from .access_kit import rule

NO = ResponseCode.NO_PERMISSION
DIRECTLY = RequestCode.CONSUME_MESSAGE_DIRECTLY
HALF, TIMER = "RMQ_SYS_TRANS_HALF_TOPIC", "rmq_sys_wheel_timer"


@pytest.fixture
def env(tmp_path: Path) -> Iterator[AccessBroker]:
    with access_broker(tmp_path) as env:
        yield prepared(env)


def prepared(env: AccessBroker) -> AccessBroker:
    """eve may do everything, except with the topic secret."""
    env.add("eve", rule("*", "All"), rule("Topic:secret", "All", "Deny"))
    join(env, "eve", "own")
    return env


def join(env: AccessBroker, user: str, *topics: str) -> None:
    """A consumer of this user in its group g."""
    consumer = ConsumerData(
        group_name="g",
        consume_type="CONSUME_PASSIVELY",
        message_model="CLUSTERING",
        consume_from_where="CONSUME_FROM_LAST_OFFSET",
        subscription_data_set=[SubscriptionData(topic=topic) for topic in topics],
    )
    data = HeartbeatData(client_id=f"id-{user}", consumer_data_set=[consumer])
    assert env.ask_as(user, RequestCode.HEART_BEAT, {}, fastjson.encode(data)).code == 0


def stored(env: AccessBroker, topic: str, **properties: str) -> int:
    """The log offset of a new message."""
    assert env.send_as(ROOT, topic, b"content", **properties).code == 0
    return env.store.writer.offset


def message_id(offset: int) -> str:
    return encode_offset_id(b"\x7f\0\0\1", 10911, offset)


def direct(offset: int, topic: str = "own") -> dict[str, str]:
    return {
        "consumerGroup": "g", "clientId": "id-eve", "topic": topic, "msgId": message_id(offset),
    }  # fmt: skip


def test_a_consumer_is_given_only_messages_that_it_may_read(
    env: AccessBroker, caplog: pytest.LogCaptureFixture
) -> None:
    secret, own = stored(env, "secret"), stored(env, "own")
    with caplog.at_level(logging.WARNING, "penstock.audit"):
        assert env.ask_as("eve", DIRECTLY, direct(secret)).code == NO
    assert "action=Sub resource=Topic:secret" in caplog.text
    assert isinstance(env.answer_to("eve", DIRECTLY, direct(own)), CallClient)


def test_a_consumer_is_given_only_messages_of_its_subscriptions(tmp_path: Path) -> None:
    with access_broker(tmp_path, AccessConfig()) as env:
        prepared(env)
        other, own, half = stored(env, "other"), stored(env, "own"), stored_half(env)
        refused = env.ask_as(ROOT, DIRECTLY, direct(other))
        assert refused.code == NO
        assert "the group g does not subscribe to the topic other" in (refused.remark or "")
        assert env.ask_as(ROOT, DIRECTLY, direct(half)).code == NO
        assert isinstance(env.answer_to(ROOT, DIRECTLY, direct(own)), CallClient)
        for topic in ("%RETRY%g", "%DLQ%g", "%RETRY%g_own"):
            assert isinstance(env.answer_to(ROOT, DIRECTLY, direct(stored(env, topic))), CallClient)


def stored_half(env: AccessBroker) -> int:
    return stored(env, "secret", TRAN_MSG="true", PGROUP="p")


def stored_timer(env: AccessBroker) -> int:
    return stored(env, "secret", TIMER_DELAY_SEC="60", KEYS="k")


@pytest.mark.parametrize("named", ["own", HALF, TIMER])
def test_a_message_is_shown_only_with_the_right_on_its_own_topic(
    env: AccessBroker, named: str
) -> None:
    offsets = (stored(env, "secret"), stored_half(env), stored_timer(env))
    for offset in offsets:
        view = {"offset": str(offset), "topic": named}
        assert env.ask_as("eve", RequestCode.VIEW_MESSAGE_BY_ID, view).code == NO
        assert env.ask_as(ROOT, RequestCode.VIEW_MESSAGE_BY_ID, view).code == 0
    view = {"offset": str(stored(env, "own")), "topic": named}
    assert env.ask_as("eve", RequestCode.VIEW_MESSAGE_BY_ID, view).code == 0


def test_a_query_of_an_internal_topic_needs_the_right_on_each_message(env: AccessBroker) -> None:
    query = {
        "topic": TIMER, "key": "k", "maxNum": "32", "beginTimestamp": "0",
        "endTimestamp": str(env.now_ms + 3_600_000),
    }  # fmt: skip
    stored(env, "own", TIMER_DELAY_SEC="60", KEYS="k")
    assert len(decode_messages(env.ask_as("eve", RequestCode.QUERY_MESSAGE, query).body)) == 1
    stored_timer(env)
    refused = env.ask_as("eve", RequestCode.QUERY_MESSAGE, query)
    assert refused.code == NO
    assert "Topic:secret" in (refused.remark or "")
    assert not refused.body
    assert len(decode_messages(env.ask_as(ROOT, RequestCode.QUERY_MESSAGE, query).body)) == 2


def test_the_checks_of_a_half_message_are_resumed_only_with_the_right_on_its_topic(
    env: AccessBroker,
) -> None:
    resume = {"topic": "own", "msgId": message_id(stored_half(env))}
    assert env.ask_as("eve", RequestCode.RESUME_CHECK_HALF_MESSAGE, resume).code == NO
    assert env.ask_as(ROOT, RequestCode.RESUME_CHECK_HALF_MESSAGE, resume).code == 0


def test_a_message_is_sent_back_only_with_the_right_on_its_topic(env: AccessBroker) -> None:
    for offset in (stored(env, "secret"), stored_half(env), stored_timer(env)):
        back = {"offset": str(offset), "group": "g", "delayLevel": "0", "originTopic": "own"}
        assert env.ask_as("eve", RequestCode.CONSUMER_SEND_MSG_BACK, back).code != 0
    back = {"offset": str(stored(env, "own")), "group": "g", "delayLevel": "0"}
    assert env.ask_as("eve", RequestCode.CONSUMER_SEND_MSG_BACK, back).code == 0


def test_a_transaction_is_ended_only_with_the_right_on_its_topic(env: AccessBroker) -> None:
    end = {
        "producerGroup": "p", "tranStateTableOffset": "0", "topic": HALF,
        "commitLogOffset": str(stored_half(env)), "fromTransactionCheck": "true",
    }  # fmt: skip
    for outcome in ("8", "12", "0"):
        ext = end | {"commitOrRollback": outcome}
        assert env.ask_as("eve", RequestCode.END_TRANSACTION, ext).code == NO
    assert env.ask_as(ROOT, RequestCode.END_TRANSACTION, end | {"commitOrRollback": "8"}).code == 0
    assert env.store.max_offset("secret", 0) == 1


def test_no_request_code_returns_a_message_of_a_denied_topic(env: AccessBroker) -> None:
    """Every code, with fields that name a denied message while the user's own topic is named."""
    denied = (stored(env, "secret", KEYS="k"), stored_half(env), stored_timer(env))
    for offset, code in product(denied, RequestCode):
        ext = {
            "topic": "own", "b": "own", "a": "g", "c": "TBW102", "d": "4", "e": "0", "f": "0",
            "g": "1", "h": "0", "i": "", "consumerGroup": "g", "group": "g", "groupName": "g",
            "producerGroup": "p", "clientId": "id-eve", "clientID": "id-eve", "queueId": "0",
            "queueOffset": "0", "offset": str(offset), "commitLogOffset": str(offset),
            "tranStateTableOffset": "0", "commitOrRollback": "8", "msgId": message_id(offset),
            "key": "k", "maxNum": "32", "beginTimestamp": "0", "endTimestamp": str(1 << 60),
            "timestamp": "0", "maxMsgNums": "32", "sysFlag": "4", "commitOffset": "0",
            "subscription": "*", "subVersion": "0", "suspendTimeoutMillis": "0", "pollTime": "0",
            "invisibleTime": "60000", "initMode": "0", "delayLevel": "0", "index": "0",
            "count": "9", "extraInfo": f"0 {env.now_ms} 60000 0 0 broker-a 0 0",
        }  # fmt: skip
        answer = env.answer_to("eve", code, ext)
        effects = env.broker.effects.take()
        for given in (answer, *effects):
            assert b"content" not in getattr(given, "body", b""), (code, offset)
    env.pass_seconds(10)
    for name in ("%RETRY%g", "%DLQ%g", "%RETRY%g_own", "%RETRY%g+own"):
        assert env.store.max_offset(name, 0) == 0, "no copy for the group of eve"
    shown = env.ask_as(
        "eve", RequestCode.VIEW_MESSAGE_BY_ID, {"offset": str(stored(env, "own")), "topic": "own"}
    )
    assert b"content" in shown.body, "eve still has her rights"
