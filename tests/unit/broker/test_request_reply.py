"""Request-reply: a reply is stored and forwarded to the requester."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.broker.consumers.client_groups import GroupMember
from penstock.config import Settings
from penstock.errors import DiskFull
from penstock.metrics import Registry
from penstock.rpc.answers import Answer, CallClient, EncodedReply, Reply
from penstock.rpc.command import Command
from penstock.wire.codes import PERM_READ, RequestCode, ResponseCode
from penstock.wire.message import StoredMessage, decode_properties, encode_properties
from tests.store_kit import small_config
from tests.unit.broker.broker_kit import (
    ADDRESS,
    NOW_MS,
    BrokerFixture,
    broker_fixture,
    messages,
    read_reply,
)

TOPIC = "DefaultCluster_REPLY_TOPIC"
PEER = "10.9.8.7:4321"
V1, V2 = RequestCode.SEND_REPLY_MESSAGE, RequestCode.SEND_REPLY_MESSAGE_V2
NAMES = {
    "producerGroup": "a", "topic": "b", "defaultTopic": "c", "defaultTopicQueueNums": "d",
    "queueId": "e", "sysFlag": "f", "bornTimestamp": "g", "flag": "h", "properties": "i",
    "reconsumeTimes": "j", "unitMode": "k",
}  # fmt: skip
NOT_STORED = {
    "msgId": "0",
    "queueId": "0",
    "queueOffset": "0",
    "MSG_REGION": "DefaultRegion",
    "TRACE_ON": "true",
}
PROPERTIES = {"REPLY_TO_CLIENT": "asker", "CORRELATION_ID": "c-1", "MSG_TYPE": "reply"}


@pytest.fixture
def env(tmp_path: Path) -> Iterator[BrokerFixture]:
    with broker_fixture(tmp_path / "store") as made:
        yield made


def fields(code: int = V2, **changed: str | None) -> dict[str, str]:
    """The header of a reply; None removes a field."""
    every = {
        "producerGroup": "replier", "topic": TOPIC, "defaultTopic": "TBW102",
        "defaultTopicQueueNums": "4", "queueId": "0", "sysFlag": "0", "bornTimestamp": "1234",
        "flag": "5", "properties": encode_properties(PROPERTIES).decode(), "reconsumeTimes": "0",
        "unitMode": "false",
    } | changed  # fmt: skip
    named = {name: text for name, text in every.items() if text is not None}
    return {NAMES[name]: text for name, text in named.items()} if code == V2 else named


def reply(
    env: BrokerFixture, code: int = V2, *, oneway: bool = False, **changed: str | None
) -> Answer:
    command = Command(
        code, fields(code, **changed), b"yes", client=1, peer=PEER, now_ms=env.now_ms,
        flag=2 * oneway, opaque=7,
    )  # fmt: skip
    answer = env.broker.handle(command)
    env.store.publish()
    return answer


def ask(
    env: BrokerFixture, client: int = 77, client_id: str = "asker", group: str = "askers"
) -> None:
    """Register a producer that waits for a reply."""
    member = GroupMember(client, client_id, "10.0.0.1:5", 0, 493, env.now_ms)
    env.context.clients.register_producer(group, member)


def pushed(answer: Answer) -> CallClient:
    assert isinstance(answer, CallClient)
    return answer


def refused(answer: Answer) -> str:
    assert isinstance(answer, Reply)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    return answer.remark or ""


def stored(env: BrokerFixture) -> list[StoredMessage]:
    answer = env.pull(topic=TOPIC, sysFlag=4)
    return [] if isinstance(answer, Reply) and answer.code else messages(answer)


@pytest.mark.parametrize("code", [V1, V2])
def test_the_requester_gets_the_reply_unchanged(env: BrokerFixture, code: int) -> None:
    ask(env)
    relay = pushed(reply(env, code, reconsumeTimes="3", queueId="0", sysFlag="1"))
    assert (relay.client, relay.code, relay.body) == (77, 326, b"yes")
    assert relay.deadline_ms == NOW_MS + 10_000
    ext = dict(relay.ext)
    properties = decode_properties(ext.pop("properties").encode())
    assert properties == {**PROPERTIES, "PUSH_REPLY_TIME": str(NOW_MS)}
    assert ext == {
        "producerGroup": "replier", "topic": TOPIC, "defaultTopic": "TBW102",
        "defaultTopicQueueNums": "4", "queueId": "0", "sysFlag": "1", "bornTimestamp": "1234",
        "flag": "5", "reconsumeTimes": "3", "unitMode": "false", "bornHost": PEER,
        "storeHost": ADDRESS, "storeTimestamp": str(NOW_MS),
    }  # fmt: skip


def test_the_replier_gets_the_result_of_the_requester(env: BrokerFixture) -> None:
    ask(env)
    relay = pushed(reply(env))
    (message,) = stored(env)
    answer = relay.then(Reply())
    assert answer == Reply(ext=NOT_STORED | {"msgId": message.offset_id})
    assert "asker did not accept it" in refused(relay.then(Reply(1, remark="no request is open")))
    assert "asker did not accept it" in refused(relay.on_timeout)


def test_a_reply_is_stored_unchanged(env: BrokerFixture) -> None:
    ask(env)
    reply(env, reconsumeTimes="2", sysFlag="1")
    (message,) = stored(env)
    assert message.properties == PROPERTIES
    assert (message.body, message.flag, message.sys_flag) == (b"yes", 5, 1)
    assert (message.born_ms, message.born_host) == (1234, PEER)
    assert (message.store_ms, message.store_host) == (NOW_MS, ADDRESS)
    assert message.reconsume_times == 2


def test_the_transaction_flag_of_a_reply_is_cleared(env: BrokerFixture) -> None:
    ask(env)
    pushed(reply(env, sysFlag=str(0x04 | 1)))
    assert [message.sys_flag for message in stored(env)] == [1]


def test_storing_replies_can_be_disabled(env: BrokerFixture) -> None:
    env.live.change({"storeReplyMessageEnable": "false"})
    ask(env)
    answer = pushed(reply(env)).then(Reply())
    assert answer == Reply(ext=NOT_STORED)
    assert stored(env) == []


def test_a_reply_to_a_disconnected_requester_is_stored_and_reported(env: BrokerFixture) -> None:
    assert "the client asker is not connected here" in refused(reply(env))
    ask(env)
    env.broker.disconnected(77, env.now_ms)
    assert "the client asker is not connected here" in refused(reply(env))
    assert len(stored(env)) == 2


def test_a_reply_without_a_requester_is_refused(env: BrokerFixture) -> None:
    ask(env)
    assert "REPLY_TO_CLIENT is missing" in refused(reply(env, properties="KEYS\1k\2"))
    assert "REPLY_TO_CLIENT is missing" in refused(reply(env, properties=None))


def test_the_newest_connection_of_the_requester_is_used(env: BrokerFixture) -> None:
    ask(env, 77)
    ask(env, 78, group="others")
    assert pushed(reply(env)).client == 78
    ask(env, 77)  # a heartbeat does not make it newer
    assert pushed(reply(env)).client == 78
    env.broker.disconnected(78, env.now_ms)
    assert pushed(reply(env)).client == 77


def test_a_requester_stays_as_long_as_one_of_its_groups(env: BrokerFixture) -> None:
    ask(env, group="one")
    ask(env, group="two")
    env.context.clients.unregister(77, "one", "")
    assert pushed(reply(env)).client == 77
    env.context.clients.unregister(77, "two", "")
    refused(reply(env))


def test_a_requester_expires_without_heartbeats(env: BrokerFixture) -> None:
    ask(env)
    env.tick(env.live.current.broker.client_expire_ms + 1)
    refused(reply(env))


def test_a_reply_to_an_unknown_or_read_only_topic_is_refused(env: BrokerFixture) -> None:
    ask(env)
    env.live.change({"autoCreateTopicEnable": "false"})
    answer = reply(env, topic="unheard-of")
    assert isinstance(answer, Reply)
    assert answer.code == ResponseCode.TOPIC_NOT_EXIST
    config = env.context.topics.need(TOPIC)
    env.context.topics.put(msgspec.structs.replace(config, perm=PERM_READ), env.now_ms)
    answer = reply(env)
    assert isinstance(answer, Reply)
    assert answer.code == ResponseCode.NO_PERMISSION


@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("properties", "reconsumeTimes", "unitMode")]
)
def test_a_reply_with_a_missing_field_is_refused(env: BrokerFixture, name: str) -> None:
    ask(env)
    without: dict[str, Any] = {name: None}
    answer = reply(env, **without)
    assert isinstance(answer, Reply)
    assert answer.code != 0
    assert name in (answer.remark or "")
    assert stored(env) == []


def test_a_reply_that_can_not_be_stored_is_still_forwarded(env: BrokerFixture) -> None:
    ask(env)
    env.store.writer.refusal = DiskFull("full")
    answer = pushed(reply(env)).then(Reply())
    env.store.writer.refusal = None
    assert answer == Reply(ext=NOT_STORED)
    registry = Registry({})
    env.broker.replies.add_metrics(registry)
    text = registry.text()
    assert "penstock_replies_total 1" in text
    assert "penstock_replies_forwarded_total 1" in text
    assert "penstock_replies_not_stored_total 1" in text


def test_region_and_trace_settings_are_returned(tmp_path: Path) -> None:
    broker = Settings().broker
    changed = msgspec.structs.replace(broker, region="north", trace_on=False)
    settings = Settings(broker=changed, store=small_config(sync_flush=False))
    with broker_fixture(tmp_path / "store", settings) as env:
        ask(env)
        answer = pushed(reply(env)).then(Reply())
        assert isinstance(answer, Reply)
        assert answer.ext is not None
        assert (answer.ext["MSG_REGION"], answer.ext["TRACE_ON"]) == ("north", "false")


def test_under_sync_flush_the_response_waits_for_the_flush(tmp_path: Path) -> None:
    settings = Settings(store=small_config(sync_flush=True))
    with broker_fixture(tmp_path / "store", settings) as env:
        ask(env)
        answer = pushed(reply(env)).then(Reply())
        assert isinstance(answer, EncodedReply)
        assert answer.offset == env.store.log.end
        assert answer.late == answer.data
        assert read_reply(answer.data).code == 0
        hasty = encode_properties({**PROPERTIES, "WAIT": "false"}).decode()
        assert isinstance(pushed(reply(env, properties=hasty)).then(Reply()), Reply)


def test_a_one_way_reply_is_forwarded_and_not_answered(env: BrokerFixture) -> None:
    ask(env)
    relay = pushed(reply(env, oneway=True))
    assert relay.then(Reply()) is None
