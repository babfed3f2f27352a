"""Internal topics: no client writes, reads or has offsets on them, with or without access lists."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from penstock.config import AccessConfig
from penstock.store.put import PUT_OK
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.message import encode_properties
from penstock.wire.receipt_handle import Receipt, RetryKind
from penstock.wire.record import Record
from tests.unit.broker.auth.access_broker import ROOT, AccessBroker, access_broker
from tests.unit.broker.auth.access_kit import ON, rule

NO = ResponseCode.NO_PERMISSION
TIMER = "rmq_sys_wheel_timer"
HALF = "RMQ_SYS_TRANS_HALF_TOPIC"
OPS = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
REVIVE_LOG = "rmq_sys_REVIVE_LOG_DefaultCluster"
INTERNAL = [
    "SCHEDULE_TOPIC_XXXX",
    HALF,
    OPS,
    "RMQ_SYS_ROCKSDB_TRANS_HALF_TOPIC",
    "RMQ_SYS_ROCKSDB_TRANS_OP_HALF_TOPIC",
    "CHECKPOINT_TOPIC",
    TIMER,
    REVIVE_LOG,
    "rmq_sys_REVIVE_LOG_other",
    "rmq_sys_SYNC_BROKER_MEMBER_broker-a",
    "rmq_sys_anything",
]
READ_ONLY = ["TRANS_CHECK_MAX_TIME_TOPIC", "SELF_TEST_TOPIC", "OFFSET_MOVED_EVENT"]
OPEN = [
    "RMQ_SYS_TRACE_TOPIC",
    "rmq_sys_TRACE_DATA_cn-1",
    "BenchmarkTest",
    "TBW102",
    "DefaultCluster",
    "broker-a",
    "%RETRY%g",
    "%DLQ%g",
]


@pytest.fixture(params=[AccessConfig(), ON], ids=["open", "with access lists"])
def env(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[AccessBroker]:
    with access_broker(tmp_path, request.param) as env:
        env.add("ann", rule("*", "All"))
        yield env


def place(topic: str, **ext: object) -> dict[str, str]:
    fields: dict[str, object] = {
        "consumerGroup": "g", "topic": topic, "queueId": 0, "queueOffset": 0, "maxMsgNums": 32,
        "sysFlag": 4, "commitOffset": 0, "suspendTimeoutMillis": 0, "subscription": "*",
        "subVersion": 0, "invisibleTime": 60_000, "pollTime": 0, "initMode": 0, "order": "false",
    }  # fmt: skip
    return {name: str(value) for name, value in (fields | ext).items()}


def put(env: AccessBroker, topic: str, body: bytes = b"x", **properties: str) -> int:
    """Store a message as the broker does; returns its log offset."""
    queue = env.store.make_queue(topic.encode(), 0)
    assert queue is not None
    record = Record()
    record.fill(queue.topic, body, encode_properties(properties))
    record.born_ms = env.now_ms
    record.born_host = record.store_host = bytes([127, 0, 0, 1]) + (10911).to_bytes(4, "big")
    assert env.store.writer.check(record) == PUT_OK
    assert env.store.writer.put_in(record, queue, env.now_ms) == PUT_OK
    env.store.publish()
    return env.store.writer.offset


def test_no_client_sends_to_an_internal_topic(env: AccessBroker) -> None:
    before = env.store.log.end
    codes = (310, 320, RequestCode.SEND_REPLY_MESSAGE_V2)
    for topic, user, code in product(INTERNAL + READ_ONLY, ("ann", ROOT), codes):
        ext = {
            "a": "g", "b": topic, "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1", "h": "0",
            "m": str(code == 320).lower(), "i": "UNIQ_KEY\x01K\x02",
        }  # fmt: skip
        reply = env.ask_as(user, code, ext, b"x")
        assert reply.code == NO, (topic, user, code, reply)
        assert "is internal" in (reply.remark or "")
    assert env.store.log.end == before


def test_other_system_topics_take_sends(env: AccessBroker) -> None:
    assert {topic: env.send_as("ann", topic).code for topic in OPEN} == dict.fromkeys(OPEN, 0)


def test_no_client_reads_an_internal_topic(env: AccessBroker) -> None:
    codes = (
        RequestCode.PULL_MESSAGE,
        RequestCode.LITE_PULL_MESSAGE,
        RequestCode.POP_MESSAGE,
        RequestCode.PEEK_MESSAGE,
        RequestCode.NOTIFICATION,
    )
    for topic in INTERNAL:
        put(env, topic, REAL_TOPIC="secret", REAL_QID="0")
    for topic, user, code in product(INTERNAL, ("ann", ROOT), codes):
        reply = env.ask_as(user, code, place(topic))
        assert reply.code == NO, (topic, user, code, reply)
        assert not reply.body


def test_other_system_topics_can_be_read(env: AccessBroker) -> None:
    for topic in ("RMQ_SYS_TRACE_TOPIC", "OFFSET_MOVED_EVENT", "SELF_TEST_TOPIC"):
        put(env, topic)
        assert env.ask_as("ann", RequestCode.PULL_MESSAGE, place(topic)).code == 0


def test_the_broker_keeps_its_offsets_on_internal_topics(env: AccessBroker) -> None:
    group = "CID_RMQ_SYS_TRANS"
    offsets = env.context.offsets
    offsets.table.commit(HALF, group, 0, 3, env.now_ms)
    commit = {"consumerGroup": group, "topic": HALF, "queueId": "0", "commitOffset": "9"}
    reset = {"group": group, "topic": HALF, "timestamp": "-1", "isForce": "true"}
    clone = {"srcGroup": "g", "destGroup": group, "topic": HALF}
    for code, ext in (
        (RequestCode.UPDATE_CONSUMER_OFFSET, commit),
        (RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset),
        (RequestCode.CLONE_GROUP_OFFSET, clone),
    ):
        assert env.ask_as("ann", code, ext).code == NO
    offsets.table.commit(HALF, "g", 0, 7, env.now_ms)
    assert env.ask_as("ann", RequestCode.CLONE_GROUP_OFFSET, clone | {"topic": ""}).code == 0
    delete = {"groupName": group, "cleanOffset": "true"}
    assert env.ask_as("ann", RequestCode.DELETE_SUBSCRIPTIONGROUP, delete).code == 0
    assert offsets.queues(group, HALF) == {0: 3}


def test_a_forged_receipt_handle_delivers_nothing_of_an_internal_topic(env: AccessBroker) -> None:
    put(env, HALF, b"secret", REAL_TOPIC="secret", REAL_QID="0")
    handle = Receipt(0, env.now_ms, 1_000, 0, RetryKind.NORMAL, "broker-a", 0, 0).format()
    ext = {
        "consumerGroup": "g", "topic": HALF, "queueId": "0", "extraInfo": handle, "offset": "0",
        "invisibleTime": "1000",
    }  # fmt: skip
    assert env.ask_as("ann", RequestCode.CHANGE_MESSAGE_INVISIBLETIME, ext).code == NO
    assert env.ask_as("ann", RequestCode.ACK_MESSAGE, ext).code == NO


def test_a_waiting_message_is_never_delivered_to_an_internal_topic(env: AccessBroker) -> None:
    """Apache's brokers accept sends to the timer's topic from any client."""
    due = str(env.now_ms + 1_000)
    for target in INTERNAL:
        put(env, TIMER, REAL_TOPIC=target, REAL_QID="0", TIMER_OUT_MS=due, TIMER_DELIVER_MS=due,
            UNIQ_KEY=f"1{target}")  # fmt: skip
        put(env, "SCHEDULE_TOPIC_XXXX", REAL_TOPIC=target, REAL_QID="0", DELAY="1",
            UNIQ_KEY=f"2{target}")  # fmt: skip
    before = {target: env.store.max_offset(target, 0) for target in INTERNAL}
    env.pass_seconds(10)
    before[REVIVE_LOG] += 1  # Apache's brokers keep the checkpoints of POP as timer messages
    assert {target: env.store.max_offset(target, 0) for target in INTERNAL} == before
    assert env.context.delay.dropped == len(INTERNAL)


def test_a_client_can_not_name_the_topic_of_a_delayed_message(env: AccessBroker) -> None:
    forged = {"REAL_TOPIC": "secret", "REAL_QID": "0"}
    assert env.send_as("ann", "t", b"1", DELAY="1", **forged).code == 0
    later = str(env.now_ms + 2_000)
    assert env.send_as("ann", "t", b"2", TIMER_DELIVER_MS=later, **forged).code == 0
    env.pass_seconds(10)
    assert env.store.max_offset("secret", 0) == 0
    assert env.store.max_offset("t", 0) == 2
