"""Connections of clients, and requests that are forwarded to consumers."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.admin.consumer_admin import CALL_MS, STATUS_CALL_MS, ConsumerHandlers
from penstock.rpc.answers import CallClient, Reply
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import (
    Connection,
    ConsumerConnection,
    GetConsumerStatusBody,
    GroupList,
    ProducerConnection,
    ProducerInfo,
    ProducerTableInfo,
    QuerySubscriptionResponseBody,
)
from penstock.wire.bodies.client_bodies import MessageQueue, TopicList
from penstock.wire.codes import V5_4_0, LanguageCode, RequestCode, ResponseCode
from penstock.wire.message import decode_message
from penstock.wire.message_ids import encode_offset_id
from tests.unit.broker.admin.admin_kit import (
    ADDRESS,
    BROKER,
    NOW_MS,
    AdminFixture,
    admin_fixture,
    ask,
    decoded,
    finish,
    member,
    reply,
)

QUEUE = MessageQueue("orders", BROKER, 0)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[AdminFixture]:
    with admin_fixture(tmp_path) as env:
        yield env


def relay(env: AdminFixture, code: int, **ext: object) -> CallClient:
    answer = ask(ConsumerHandlers(env.context), code, **ext)
    assert isinstance(answer, CallClient)
    return answer


def test_connected_consumers_of_a_group(env: AdminFixture) -> None:
    env.consumer("coupons", "orders", client=1)
    env.consumer("coupons", "orders", client=2, language=LanguageCode.GO)
    family, code = ConsumerHandlers(env.context), RequestCode.GET_CONSUMER_CONNECTION_LIST
    body = decoded(family, ConsumerConnection, code, consumerGroup="coupons")
    assert body.connection_set == [
        Connection(client_id="id1", client_addr="10.0.0.1:99", language="JAVA", version=V5_4_0),
        Connection(client_id="id2", client_addr="10.0.0.2:99", language="GO", version=V5_4_0),
    ]
    assert list(body.subscription_table) == ["orders"]
    assert body.consume_type == "CONSUME_PASSIVELY"
    assert body.message_model == "CLUSTERING"
    assert body.consume_from_where == "CONSUME_FROM_LAST_OFFSET"
    assert reply(family, code, consumerGroup="none").code == ResponseCode.CONSUMER_NOT_ONLINE


def test_connected_producers(env: AdminFixture) -> None:
    env.clients.register_producer("signup", member(3))
    family = ConsumerHandlers(env.context)
    code = RequestCode.GET_PRODUCER_CONNECTION_LIST
    body = decoded(family, ProducerConnection, code, producerGroup="signup")
    assert [connection.client_id for connection in body.connection_set] == ["id3"]
    assert reply(family, code, producerGroup="none").code == ResponseCode.SYSTEM_ERROR
    table = decoded(family, ProducerTableInfo, RequestCode.GET_ALL_PRODUCER_INFO)
    assert table.data == {
        "signup": [
            ProducerInfo(
                client_id="id3",
                remote_ip="/10.0.0.3:99",
                language="JAVA",
                version=V5_4_0,
                last_update_timestamp=NOW_MS,
            )
        ]
    }


def test_groups_of_a_topic_are_connected_or_have_offsets(env: AdminFixture) -> None:
    env.consumer("coupons", "orders")
    env.offsets.commit("audit", "orders", 0, 1, NOW_MS)
    env.offsets.commit("mail", "sms", 0, 1, NOW_MS)
    family = ConsumerHandlers(env.context)
    code = RequestCode.QUERY_TOPIC_CONSUME_BY_WHO
    assert decoded(family, GroupList, code, topic="orders").group_list == ["audit", "coupons"]
    assert decoded(family, GroupList, code, topic="none").group_list == []
    topics = decoded(family, TopicList, RequestCode.QUERY_TOPICS_BY_CONSUMER, group="mail")
    assert topics == TopicList(topic_list=["sms"], broker_addr=ADDRESS)


def test_subscription_of_a_group(env: AdminFixture) -> None:
    env.consumer("coupons", "orders")
    family, code = ConsumerHandlers(env.context), RequestCode.QUERY_SUBSCRIPTION_BY_CONSUMER
    body = decoded(family, QuerySubscriptionResponseBody, code, group="coupons", topic="orders")
    assert body.subscription_data is not None
    assert body.subscription_data.sub_string == "*"
    body = decoded(family, QuerySubscriptionResponseBody, code, group="coupons", topic="sms")
    assert body == QuerySubscriptionResponseBody(group="coupons", topic="sms")


def test_a_request_for_running_info_is_forwarded_to_the_consumer(env: AdminFixture) -> None:
    env.consumer("coupons", "orders", client=7)
    passed = relay(
        env,
        RequestCode.GET_CONSUMER_RUNNING_INFO,
        consumerGroup="coupons",
        clientId="id7",
        jstackEnable="true",
        Signature="secret",
        AccessKey="admin",
    )
    assert (passed.client, passed.code) == (7, RequestCode.GET_CONSUMER_RUNNING_INFO)
    assert passed.ext == {"consumerGroup": "coupons", "clientId": "id7", "jstackEnable": "true"}
    assert passed.deadline_ms == NOW_MS + CALL_MS
    assert passed.on_timeout.code == ResponseCode.CONSUME_MSG_TIMEOUT
    said = Reply(0, {"a": "b"}, b"{}")
    assert passed.then(said) == said


@pytest.mark.parametrize(
    "code", [RequestCode.GET_CONSUMER_RUNNING_INFO, RequestCode.CONSUME_MESSAGE_DIRECTLY]
)
def test_no_request_is_forwarded_to_a_missing_or_old_consumer(env: AdminFixture, code: int) -> None:
    env.consumer("coupons", "orders", client=1, version=62)
    family = ConsumerHandlers(env.context)
    for client_id in ("id1", "id9", ""):
        answer = reply(family, code, consumerGroup="coupons", clientId=client_id)
        assert answer.code == ResponseCode.SYSTEM_ERROR


def test_direct_consumption_forwards_the_message(env: AdminFixture) -> None:
    env.topic("orders", 1, topic_sys_flag=1)
    env.group("coupons")
    env.consumer("coupons", "orders", client=7)
    offset = env.put("orders", body=b"hello")
    fields = {"consumerGroup": "coupons", "clientId": "id7", "topic": "orders"}
    passed = relay(
        env,
        RequestCode.CONSUME_MESSAGE_DIRECTLY,
        msgId=encode_offset_id(b"\x7f\0\0\1", 10911, offset),
        **fields,
    )
    assert decode_message(passed.body).body == b"hello"
    assert passed.ext["brokerName"] == BROKER
    assert (passed.ext["topicSysFlag"], passed.ext["groupSysFlag"]) == ("1", "0")
    gone = encode_offset_id(b"\x7f\0\0\1", 10911, offset + 1)
    family = ConsumerHandlers(env.context)
    answer = reply(family, RequestCode.CONSUME_MESSAGE_DIRECTLY, msgId=gone, **fields)
    assert answer.code == ResponseCode.SYSTEM_ERROR


STATUS = RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS


def status(offset: int) -> Reply:
    return Reply(body=fastjson.encode(GetConsumerStatusBody(message_queue_table={QUEUE: offset})))


def table(answer: Reply) -> dict[str, dict[MessageQueue, int]]:
    assert answer.code == 0
    return fastjson.decode(answer.body, GetConsumerStatusBody).consumer_table


def test_every_consumer_reports_its_offsets(env: AdminFixture) -> None:
    for client in (1, 2, 3):
        env.consumer("coupons", "orders", client=client)
    first = relay(env, STATUS, topic="orders", group="coupons")
    assert (first.client, first.code) == (1, RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT)
    assert first.ext == {"topic": "orders", "group": "coupons"}
    assert table(first.on_timeout) == {}
    second = finish(first.then(status(5)))
    assert isinstance(second, CallClient)
    assert (second.client, second.deadline_ms) == (2, NOW_MS + 2 * STATUS_CALL_MS)
    assert table(second.on_timeout) == {"id1": {QUEUE: 5}}
    third = finish(second.then(Reply(body=b"{garbled")))
    assert isinstance(third, CallClient)
    last = finish(third.then(status(6)))
    assert isinstance(last, Reply)
    assert table(last) == {"id1": {QUEUE: 5}, "id3": {QUEUE: 6}}


def test_one_named_consumer_reports_its_offsets(env: AdminFixture) -> None:
    for client in (1, 2):
        env.consumer("coupons", "orders", client=client)
    only = relay(env, STATUS, topic="orders", group="coupons", clientAddr="id2")
    assert only.client == 2
    last = finish(only.then(Reply(1, remark="no")))
    assert isinstance(last, Reply)
    assert table(last) == {}


def test_offsets_of_a_disconnected_group_are_refused(env: AdminFixture) -> None:
    family = ConsumerHandlers(env.context)
    answer = reply(family, STATUS, topic="orders", group="coupons")
    assert answer.code == ResponseCode.SYSTEM_ERROR
    env.consumer("coupons", "orders", version=28)
    answer = reply(family, STATUS, topic="orders", group="coupons")
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "too old" in (answer.remark or "")
