"""Retry topics whose name belongs to several pairs of group and topic, or to another group."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.config import Settings
from penstock.wire.codes import PULL_SUBSCRIPTION, RequestCode
from penstock.wire.message import decode_messages, encode_properties
from penstock.wire.record import Record
from tests.store_kit import small_config
from tests.unit.broker.broker_kit import BORN, BrokerFixture, broker_fixture
from tests.unit.broker.pop.pop_kit import PopClient, advance, stored

PROPERTIES_MAX = 32_767 - 61  # the broker adds some to each message
SHARED = "%RETRY%a_b_c"  # of the group a_b and the topic c, of a and b_c, and of the group a_b_c


@pytest.fixture
def env(tmp_path: Path) -> Iterator[BrokerFixture]:
    with broker_fixture(tmp_path / "store") as made:
        yield made


def send(env: BrokerFixture, topic: str, body: bytes, **properties: str) -> None:
    assert env.send(topic, body=body, properties=properties).code == 0
    env.store.publish()


def revive_all(env: BrokerFixture) -> None:
    advance(env, 10_100)
    env.store.publish()


def pulled(env: BrokerFixture, group: str, topic: str = SHARED, **ext: Any) -> list[bytes]:
    fields = {
        "consumerGroup": group,
        "topic": topic,
        "queueId": "0",
        "queueOffset": "0",
        "maxMsgNums": "32",
        "sysFlag": str(PULL_SUBSCRIPTION),
        "commitOffset": "0",
        "suspendTimeoutMillis": "0",
        "subscription": "*",
        "subVersion": "0",
    } | ext
    reply = env.ask(RequestCode.PULL_MESSAGE, fields)
    return [message.body for message in decode_messages(reply.body)]


def pop_and_revive(env: BrokerFixture) -> tuple[PopClient, PopClient]:
    """Two clients whose retry topics have the same name; the message of each is revived."""
    one, other = PopClient(env, "c", "a_b"), PopClient(env, "b_c", "a")
    send(env, "c", b"of c")
    send(env, "b_c", b"of b_c")
    assert one.bodies() == [b"of c"]
    assert other.bodies() == [b"of b_c"]
    revive_all(env)
    return one, other


def test_groups_that_share_a_retry_topic_get_only_their_own_messages(env: BrokerFixture) -> None:
    one, other = pop_and_revive(env)
    assert {message.topic for message in stored(env, SHARED)} == {SHARED}
    assert len(stored(env, SHARED)) == 2
    (got,), (other_got,) = one.pop(), other.pop()
    assert (got.body, other_got.body) == (b"of c", b"of b_c")
    other.ack(other_got)
    revive_all(env)
    assert other.pop() == []
    (again,) = one.pop()  # the ack of the other group changed nothing here
    assert again.body == b"of c"
    one.ack(again)
    revive_all(env)
    assert one.pop() == [] == other.pop()


def test_messages_of_others_do_not_end_up_in_a_peek(env: BrokerFixture) -> None:
    send(env, "c", b"of c")
    assert PopClient(env, "c", "a_b").bodies() == [b"of c"]
    send(env, "b_c", b"of b_c")
    other = PopClient(env, "b_c", "a")
    other.ack_all(other.pop())
    revive_all(env)
    fields = {"consumerGroup": "a", "topic": "b_c", "queueId": "-1", "maxMsgNums": "32"}
    assert env.ask(RequestCode.PEEK_MESSAGE, fields).body == b""
    fields = {"consumerGroup": "a_b", "topic": "c", "queueId": "-1", "maxMsgNums": "32"}
    (peeked,) = decode_messages(env.ask(RequestCode.PEEK_MESSAGE, fields).body)
    assert peeked.body == b"of c"


def test_a_suspended_pop_is_not_answered_with_messages_of_others(env: BrokerFixture) -> None:
    send(env, "b_c", b"of b_c")
    other = PopClient(env, "b_c", "a")
    other.ack_all(other.pop())
    send(env, "c", b"of c")
    one = PopClient(env, "c", "a_b")
    assert one.bodies() == [b"of c"]
    revive_all(env)
    other.suspend()
    assert one.bodies() == [b"of c"]


def test_tags_are_still_filtered_in_a_shared_retry_topic(env: BrokerFixture) -> None:
    one = PopClient(env, "c", "a_b")
    send(env, "c", b"x", TAGS="x")
    send(env, "c", b"y", TAGS="y")
    assert one.bodies() == [b"x", b"y"]
    revive_all(env)
    assert one.bodies(exp="y", expType="TAG") == [b"y"]


def test_a_group_does_not_pull_popped_messages_of_others_from_its_retry_topic(
    env: BrokerFixture,
) -> None:
    send(env, "c", b"popped")
    one = PopClient(env, "c", "a_b")
    assert one.bodies() == [b"popped"]
    revive_all(env)
    assert env.send(SHARED, body=b"sent back").code == 0
    env.store.publish()
    assert pulled(env, "a_b_c") == [b"sent back"]
    assert pulled(env, "TOOLS_CONSUMER") == [b"popped", b"sent back"]
    assert one.bodies() == [b"popped"]
    assert one.pop() == []


def test_a_sender_cannot_name_the_group_of_a_retry(env: BrokerFixture) -> None:
    one, other = PopClient(env, "c", "a_b"), PopClient(env, "b_c", "a")
    forged = {"ORIGIN_GROUP": "a", "1ST_POP_TIME": "5"}
    send(env, "c", b"of c", **forged)
    send(env, "b_c", b"of b_c")
    other.ack_all(other.pop())
    assert one.bodies() == [b"of c"]
    revive_all(env)
    assert other.pop() == []
    assert one.bodies() == [b"of c"]
    assert env.send(SHARED, body=b"forged", properties=forged).code == 0
    env.store.publish()
    assert other.pop() == []
    assert pulled(env, "a_b_c") == [b"forged"]


def test_a_message_that_is_sent_back_does_not_keep_the_group_of_a_pop(env: BrokerFixture) -> None:
    send(env, "c", b"copy", **{"ORIGIN_GROUP": "a_b", "1ST_POP_TIME": "5"})
    (message,) = stored(env, "c")
    fields = {"offset": str(message.physical_offset), "group": "a_b_c", "delayLevel": "1"}
    assert env.ask(RequestCode.CONSUMER_SEND_MSG_BACK, fields).code == 0
    advance(env, 2_000)
    env.store.publish()
    assert pulled(env, "a_b_c") == [b"copy"]
    one = PopClient(env, "c", "a_b")
    one.ack_all(one.pop())
    assert one.pop() == []


def test_retries_without_the_name_of_their_group_are_delivered(env: BrokerFixture) -> None:
    """Those of an earlier version, or of Apache before 5.4."""
    one = PopClient(env, "c", "a_b")
    send(env, "c", b"of c")
    one.ack_all(one.pop())
    env.context.topics.ensure(SHARED, 1, 6, env.now_ms)
    record = Record()
    old = encode_properties({"1ST_POP_TIME": "5", "RETRY_TOPIC": "copied"})
    record.fill(SHARED.encode(), b"old", old)
    record.queue_id, record.born_host, record.store_host = 0, BORN, BORN
    assert env.store.put(record, env.now_ms) == 0
    env.store.publish()
    assert one.bodies() == [b"old"]


@pytest.mark.parametrize("room", [0, 25, 60])
def test_messages_without_room_for_properties_are_revived(tmp_path: Path, room: int) -> None:
    config = msgspec.structs.replace(small_config(sync_flush=False), segment_bytes=1 << 18)
    with broker_fixture(tmp_path / "store", Settings(store=config)) as env:
        one = PopClient(env, "c", "a_b")
        full = {"UNIQ_KEY": "u", "RETRY_TOPIC": "x", "ORIGIN_GROUP": "a"}
        length = len(encode_properties({**full, "p": "v"}))
        full["p"] = "v" * (PROPERTIES_MAX - length - room)
        send(env, "c", b"full", **full)
        assert one.bodies() == [b"full"]
        revive_all(env)
        assert one.bodies() == [b"full"]


def test_deleting_a_topic_keeps_the_retries_of_others(env: BrokerFixture) -> None:
    one, other = pop_and_revive(env)
    delete(env, "c")
    assert other.bodies() == [b"of b_c"]
    send(env, "c", b"new")
    assert one.bodies() == [b"new"]


def test_deleting_a_topic_deletes_a_retry_topic_that_is_not_shared(env: BrokerFixture) -> None:
    one = PopClient(env, "c", "a_b")
    send(env, "c", b"of c")
    assert one.bodies() == [b"of c"]
    revive_all(env)
    assert env.context.topics.get(SHARED) is not None
    delete(env, "c")
    assert env.context.topics.get(SHARED) is None


def delete(env: BrokerFixture, topic: str) -> None:
    assert env.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": topic}).code == 0
    env.store.publish()
