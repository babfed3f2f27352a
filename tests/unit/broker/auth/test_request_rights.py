"""The rights that each request code requires."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.broker.auth.request_rights import RequestRights
from penstock.rpc.command import Command
from penstock.wire import fastjson
from penstock.wire.codes import RequestCode

RIGHTS = RequestRights("c1")


def required(code: int, ext: dict[str, str] | None = None, body: Any = None) -> set[str]:
    """As `Pub Topic:t`."""
    command = Command(code, ext or {}, b"" if body is None else fastjson.encode(body))
    found = RIGHTS.of(code).required(command)
    return {f"{need.action()} {need.resource()}" for need in found}


def consumer(group: str, *topics: str) -> dict[str, Any]:
    return {"groupName": group, "subscriptionDataSet": [{"topic": topic} for topic in topics]}


CODE = RequestCode


@pytest.mark.parametrize(
    ("code", "ext", "wanted"),
    [
        (CODE.SEND_MESSAGE, {"topic": "t", "producerGroup": "p"}, {"Pub Topic:t"}),
        (CODE.SEND_MESSAGE_V2, {"a": "p", "b": "t"}, {"Pub Topic:t"}),
        (CODE.SEND_BATCH_MESSAGE, {"a": "p", "b": "t"}, {"Pub Topic:t"}),
        (CODE.SEND_MESSAGE_V2, {"a": "p", "b": "%RETRY%g"}, {"Sub Group:g"}),
        (CODE.SEND_MESSAGE_V2, {"a": "p"}, {"Pub Topic:*"}),
        (CODE.SEND_MESSAGE_V2, {"b": "%RETRY%"}, {"Sub Group:*"}),
        (CODE.SEND_REPLY_MESSAGE_V2, {"b": "c1_REPLY_TOPIC"}, {"Pub Topic:c1_REPLY_TOPIC"}),
        (CODE.CONSUMER_SEND_MSG_BACK, {"group": "g", "originTopic": "t"}, {"Sub Group:g"}),
        (CODE.PULL_MESSAGE, {"topic": "t", "consumerGroup": "g"}, {"Sub Group:g", "Sub Topic:t"}),
        (CODE.PULL_MESSAGE, {"topic": "%RETRY%g", "consumerGroup": "g"}, {"Sub Group:g"}),
        # Not the retry topic of another group.
        (
            CODE.PULL_MESSAGE,
            {"topic": "%RETRY%h", "consumerGroup": "g"},
            {"Sub Group:g", "Sub Group:h"},
        ),
        (
            CODE.LITE_PULL_MESSAGE,
            {"topic": "t", "consumerGroup": "g"},
            {"Sub Group:g", "Sub Topic:t"},
        ),
        (CODE.PULL_MESSAGE, {"topic": "t"}, {"Sub Group:*", "Sub Topic:t"}),
        *(
            (code, {"topic": topic, "consumerGroup": "g"}, {"Sub Group:g", *more})
            for code in (CODE.ACK_MESSAGE, CODE.CHANGE_MESSAGE_INVISIBLETIME)
            for topic, *more in [
                ("t", "Sub Topic:t"),
                ("%RETRY%g",),
                ("%RETRY%g_t", "Sub Topic:t"),
                ("%RETRY%g+t", "Sub Topic:t"),
                ("%RETRY%h_t", "Sub Group:h_t"),
            ]
        ),
        # The name does not show the group of these messages: it may be g_t.
        (
            CODE.PULL_MESSAGE,
            {"topic": "%RETRY%g_t", "consumerGroup": "g"},
            {"Sub Group:g", "Sub Group:g_t"},
        ),
        (CODE.POP_MESSAGE, {"topic": "t", "consumerGroup": "g"}, {"Sub Group:g", "Sub Topic:t"}),
        (CODE.NOTIFICATION, {"topic": "t", "consumerGroup": "g"}, {"Sub Group:g", "Sub Topic:t"}),
        (CODE.POLLING_INFO, {"topic": "t", "consumerGroup": "g"}, {"Get Group:g", "Get Topic:t"}),
        (CODE.RECALL_MESSAGE, {"topic": "t", "producerGroup": "p"}, {"Pub Topic:t"}),
        (CODE.RESUME_CHECK_HALF_MESSAGE, {"topic": "t", "msgId": "1"}, {"Update Topic:t"}),
        (CODE.RESUME_CHECK_HALF_MESSAGE, {"msgId": "1"}, {"Update Topic:*"}),
        (CODE.GET_ALL_MESSAGE_REQUEST_MODE, {}, {"Get Cluster:c1"}),
        (
            CODE.QUERY_CONSUMER_OFFSET,
            {"topic": "t", "consumerGroup": "g"},
            {"Sub|Get Group:g", "Sub|Get Topic:t"},
        ),
        (
            CODE.UPDATE_CONSUMER_OFFSET,
            {"topic": "%RETRY%g", "consumerGroup": "g"},
            {"Sub|Update Group:g"},
        ),
        (CODE.GET_ROUTEINFO_BY_TOPIC, {"topic": "t"}, {"Pub|Sub|Get Topic:t"}),
        (CODE.GET_ROUTEINFO_BY_TOPIC, {"topic": "%RETRY%g"}, {"Sub|Get Group:g"}),
        (CODE.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": "g"}, {"Sub|Get Group:g"}),
        (CODE.UNREGISTER_CLIENT, {"clientID": "c", "consumerGroup": "g"}, {"Sub Group:g"}),
        (CODE.UNREGISTER_CLIENT, {"clientID": "c", "producerGroup": "p"}, {"Any *"}),
        (CODE.END_TRANSACTION, {"topic": "t"}, {"Pub Topic:t"}),
        (CODE.END_TRANSACTION, {}, {"Pub *"}),
        (
            CODE.END_TRANSACTION,
            {"topic": "t", "producerGroup": "p"},
            {"Pub Topic:t", "Pub Group:p"},
        ),
        (CODE.END_TRANSACTION, {"topic": "RMQ_SYS_TRANS_HALF_TOPIC"}, {"Pub *"}),
        (CODE.GET_MAX_OFFSET, {"topic": "t"}, {"Get Topic:t"}),
        (CODE.VIEW_MESSAGE_BY_ID, {"offset": "1"}, {"Get Topic:*"}),
        (CODE.UPDATE_AND_CREATE_TOPIC, {"topic": "t"}, {"Create Topic:t"}),
        (CODE.DELETE_TOPIC_IN_BROKER, {"topic": "t"}, {"Delete Topic:t"}),
        (CODE.DELETE_SUBSCRIPTIONGROUP, {"groupName": "g"}, {"Delete Group:g"}),
        (
            CODE.GET_CONSUME_STATS,
            {"consumerGroup": "g", "topicList": "t;u;"},
            {"Get Group:g", "Get Topic:t", "Get Topic:u"},
        ),
        (
            CODE.QUERY_CORRECTION_OFFSET,
            {"compareGroup": "g", "filterGroups": "h,i", "topic": "t"},
            {"Get Group:g", "Get Group:h", "Get Group:i", "Get Topic:t"},
        ),
        (
            CODE.CLONE_GROUP_OFFSET,
            {"srcGroup": "g", "destGroup": "h", "topic": "t"},
            {"Get Group:g", "Update Group:h", "Update Topic:t"},
        ),
        (
            CODE.CLONE_GROUP_OFFSET,
            {"destGroup": "h", "topic": "t"},
            {"Get Group:*", "Update Group:h", "Update Topic:t"},
        ),
        (CODE.GET_ALL_TOPIC_CONFIG, {}, {"List|Get Topic:*"}),
        (CODE.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, {}, {"List|Get Group:*"}),
        (CODE.GET_BROKER_CONFIG, {}, {"Get Cluster:c1"}),
        (CODE.UPDATE_BROKER_CONFIG, {}, {"Update Cluster:c1"}),
        (CODE.AUTH_CREATE_USER, {"username": "u"}, {"Update Cluster:c1"}),
        (CODE.AUTH_LIST_ACL, {}, {"Get Cluster:c1"}),
        (99_999, {}, {"Update Cluster:c1"}),
    ],
)
def test_rights_by_header_fields(code: int, ext: dict[str, str], wanted: set[str]) -> None:
    assert required(code, ext) == wanted


@pytest.mark.parametrize(
    ("code", "body", "wanted"),
    [
        (
            CODE.HEART_BEAT,
            {"consumerDataSet": [consumer("g", "t", "%RETRY%g"), consumer("h")]},
            {"Sub Group:g", "Sub Topic:t", "Sub Group:h"},
        ),
        (CODE.HEART_BEAT, {"producerDataSet": [{"groupName": "p"}]}, {"Any *", "Pub Group:p"}),
        (
            CODE.LOCK_BATCH_MQ,
            {"consumerGroup": "g", "mqSet": [{"topic": "t"}, {"topic": "t"}]},
            {"Sub Group:g", "Sub Topic:t"},
        ),
        (
            CODE.CHECK_CLIENT_CONFIG,
            {"group": "g", "subscriptionData": {"topic": "t"}},
            {"Sub Group:g", "Sub Topic:t"},
        ),
        (
            CODE.QUERY_ASSIGNMENT,
            {"consumerGroup": "g", "topic": "t"},
            {"Sub Group:g", "Sub Topic:t"},
        ),
        (
            CODE.SET_MESSAGE_REQUEST_MODE,
            {"consumerGroup": "g", "topic": "t"},
            {"Update Group:g", "Update Topic:t"},
        ),
        (CODE.BATCH_ACK_MESSAGE, {"acks": [{"c": "g", "t": "t"}]}, {"Sub Group:g", "Sub Topic:t"}),
        (CODE.BATCH_ACK_MESSAGE, {}, {"Sub Group:*"}),
        (
            CODE.UPDATE_AND_CREATE_TOPIC_LIST,
            {"topicConfigList": [{"topicName": "t"}]},
            {"Create Topic:t"},
        ),
        (CODE.UPDATE_AND_CREATE_TOPIC_LIST, {}, {"Create Topic:*"}),
        (CODE.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, {"groupName": "g"}, {"Create Group:g"}),
        (
            CODE.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST,
            {"groupConfigList": [{"groupName": "g"}]},
            {"Create Group:g"},
        ),
    ],
)
def test_rights_by_body(code: int, body: Any, wanted: set[str]) -> None:
    assert required(code, {}, body) == wanted


@pytest.mark.parametrize("code", list(RequestCode))
def test_every_code_requires_a_right(code: RequestCode) -> None:
    assert required(code, {}, {})
