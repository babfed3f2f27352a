"""Retry and dead letters: messages that consumers send back by offset or by a send."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.broker.retry.dead_letter_queues import group_of
from penstock.config import Settings, delays_ms
from penstock.errors import DiskFull, MessageIllegal, PenstockError
from penstock.rpc.answers import EncodedReply, InThread, Reply
from penstock.rpc.command import Command
from penstock.rpc.router import refusal
from penstock.wire import fastjson
from penstock.wire.bodies.admin_bodies import BrokerStatsData
from penstock.wire.bodies.client_bodies import MessageQueue, SubscriptionGroupConfig
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.message import StoredMessage, encode_batch
from penstock.wire.output import encode
from tests.store_kit import SEGMENT_BYTES, small_config
from tests.unit.broker.broker_kit import BrokerFixture, broker_fixture, read_reply
from tests.unit.broker.delay.test_delay_levels import SCHEDULE, advance, bodies, stored

RETRY, DEAD = "%RETRY%G", "%DLQ%G"
LEVELS_MS = delays_ms(small_config(sync_flush=False).delay_levels)
OLD = 120  # before V3_4_9


@pytest.fixture
def env(tmp_path: Path) -> Iterator[BrokerFixture]:
    with broker_fixture(tmp_path / "store") as made:
        yield made


def send_back_by_offset(
    env: BrokerFixture, message: StoredMessage, level: int = 0, *, version: int = 493, **ext: Any
) -> Reply:
    fields = {
        "offset": message.physical_offset,
        "group": "G",
        "delayLevel": level,
        "originMsgId": message.message_id,
        "originTopic": message.topic,
        **ext,
    }
    named = {name: str(value) for name, value in fields.items() if value is not None}
    code = RequestCode.CONSUMER_SEND_MSG_BACK
    try:
        answer = env.frame(encode(code, named, opaque=7, version=version))
    except PenstockError as error:  # of work in the thread pool
        answer = refusal(error)
    env.store.publish()
    assert isinstance(answer, Reply)
    return answer


def group(env: BrokerFixture, **fields: Any) -> None:
    env.context.groups.put(SubscriptionGroupConfig(group_name="G", **fields), env.now_ms)


def send(env: BrokerFixture, **rest: Any) -> StoredMessage:
    assert env.send(**rest).code == 0
    return stored(env)[-1]


def test_a_message_sent_back_is_delivered_again(env: BrokerFixture) -> None:
    message = send(env, body=b"hard", tag="vip", properties={"k": "v"})
    answer = send_back_by_offset(env, message)
    assert (answer.code, answer.remark, answer.body) == (0, None, b"")
    (delayed,) = stored(env, SCHEDULE, 2)
    advance(env, LEVELS_MS[2] - 1)
    assert stored(env, RETRY) == []
    advance(env, 1)
    (again,) = stored(env, RETRY)
    assert (again.body, again.tags, again.properties["k"]) == (b"hard", "vip", "v")
    assert again.reconsume_times == 1
    assert again.properties["RETRY_TOPIC"] == "T"
    assert again.properties["ORIGIN_MESSAGE_ID"] == message.offset_id
    assert again.properties["UNIQ_KEY"] == message.unique_id
    assert (again.properties["DELAY"], again.properties["WAIT"]) == ("3", "false")
    assert (again.born_ms, again.born_host) == (message.born_ms, message.born_host)
    assert again.properties == delayed.properties


def test_after_sixteen_retries_a_message_is_a_dead_letter(env: BrokerFixture) -> None:
    message = send(env, body=b"hopeless")
    origin = message.offset_id
    for times in range(16):
        sent_ms = env.now_ms
        assert send_back_by_offset(env, message, maxReconsumeTimes=16).code == 0
        env.tick(LEVELS_MS[2 + times] - 1)
        assert len(stored(env, RETRY)) == times
        env.tick(1)
        message = stored(env, RETRY)[-1]
        assert message.reconsume_times == times + 1
        assert message.store_ms == sent_ms + LEVELS_MS[2 + times]
    assert send_back_by_offset(env, message, maxReconsumeTimes=16).code == 0
    (dead,) = stored(env, DEAD)
    assert dead.body == b"hopeless"
    assert dead.reconsume_times == 17
    assert dead.properties["RETRY_TOPIC"] == "T"
    assert dead.properties["ORIGIN_MESSAGE_ID"] == origin
    assert dead.properties["DELAY"] == "0"
    config = env.context.topics.get(DEAD)
    assert config is not None
    assert (config.read_queue_nums, config.write_queue_nums, config.perm) == (1, 1, 6)
    assert env.broker.dead_letters.counts == {("G", "T"): 1}


def test_later_retries_use_the_last_level(env: BrokerFixture) -> None:
    group(env, retry_max_times=100)
    message = send(env)
    env.send("%RETRY%G", body=b"old", properties={"RETRY_TOPIC": "T"})
    assert send_back_by_offset(env, message, level=40).code == 0
    assert len(stored(env, SCHEDULE, 17)) == 1


@pytest.mark.parametrize(
    ("of_group", "of_client", "version", "dead"),
    [
        (16, None, 493, False),
        (0, None, 493, True),
        (16, 0, 493, True),
        (0, 5, 493, False),
        (16, 0, OLD, False),
        (0, 5, OLD, True),
    ],
)
def test_the_client_may_limit_the_retries(
    env: BrokerFixture, of_group: int, of_client: int | None, version: int, dead: bool
) -> None:
    group(env, retry_max_times=of_group)
    message = send(env)
    assert send_back_by_offset(env, message, version=version, maxReconsumeTimes=of_client).code == 0
    assert len(stored(env, DEAD)) == dead
    assert len(stored(env, SCHEDULE, 2)) == (not dead)


def test_a_negative_level_makes_a_dead_letter(env: BrokerFixture) -> None:
    assert send_back_by_offset(env, send(env), level=-1).code == 0
    assert len(stored(env, DEAD)) == 1


def test_a_level_of_the_client_is_used(env: BrokerFixture) -> None:
    assert send_back_by_offset(env, send(env), level=5).code == 0
    (delayed,) = stored(env, SCHEDULE, 4)
    assert delayed.properties["DELAY"] == "5"


def test_a_group_without_retry_queues_has_no_retries(env: BrokerFixture) -> None:
    group(env, retry_queue_nums=0)
    end = env.store.log.end
    message = send(env)
    end = env.store.log.end
    assert send_back_by_offset(env, message).code == 0
    assert env.store.log.end == end


def test_retries_are_spread_over_the_existing_queues(env: BrokerFixture) -> None:
    group(env, retry_queue_nums=3)
    message = send(env)
    for _ in range(6):
        send_back_by_offset(env, message, level=1)
    advance(env, 2000)
    assert [len(stored(env, RETRY, queue)) for queue in range(3)] == [2, 2, 2]
    group(env, retry_queue_nums=9)  # the topic keeps its three queues
    for _ in range(6):
        send_back_by_offset(env, message, level=1)
    advance(env, 2000)
    assert [len(stored(env, RETRY, queue)) for queue in range(3)] == [4, 4, 4]


@pytest.mark.parametrize(
    ("topic", "properties"),
    [
        ("RMQ_SYS_TRANS_HALF_TOPIC", {"TRAN_MSG": "true", "PGROUP": "p"}),
        ("rmq_sys_wheel_timer", {"TIMER_DELAY_SEC": "5"}),
        (SCHEDULE, {"DELAY": "1"}),
    ],
)
def test_an_undelivered_message_can_not_be_sent_back(
    env: BrokerFixture, topic: str, properties: dict[str, str]
) -> None:
    assert env.send(properties=properties).code == 0
    (delayed,) = stored(env, topic)
    answer = send_back_by_offset(env, delayed, -1)
    assert (answer.code, "not delivered yet" in (answer.remark or "")) == (1, True)
    assert stored(env, DEAD) == []


def test_invalid_requests_are_refused(env: BrokerFixture) -> None:
    message = send(env)
    answer = send_back_by_offset(env, message, offset=1)
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "look message by offset failed, 1" in (answer.remark or "")
    for missing in ({"offset": None}, {"group": None}, {"delayLevel": None}):
        assert send_back_by_offset(env, message, 0, version=493, **missing).code == 29
    set_broker(env, auto_create_groups=False)
    assert (
        send_back_by_offset(env, message, group="H").code
        == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    )
    set_broker(env, permission=4)
    assert send_back_by_offset(env, message).code == ResponseCode.NO_PERMISSION
    set_broker(env, permission=6)
    config = env.context.topics.get(RETRY)
    assert config is not None
    env.context.topics.put(msgspec.structs.replace(config, perm=4), env.now_ms)
    assert send_back_by_offset(env, message).code == ResponseCode.NO_PERMISSION


def set_broker(env: BrokerFixture, **fields: Any) -> None:
    current = env.live.current
    broker = msgspec.structs.replace(current.broker, **fields)
    env.live.current = msgspec.structs.replace(current, broker=broker)


def test_a_refusal_of_the_store_is_reported(env: BrokerFixture) -> None:
    message = send(env)
    env.store.writer.refusal = DiskFull("full")
    assert send_back_by_offset(env, message).code == ResponseCode.SERVICE_NOT_AVAILABLE


def test_a_message_that_grows_too_long_is_refused(env: BrokerFixture) -> None:
    message = send(env, body=b"x" * (SEGMENT_BYTES - 300))
    end = env.store.log.end
    assert send_back_by_offset(env, message).code == ResponseCode.MESSAGE_ILLEGAL
    assert env.store.log.end == end


def test_statistics_count_messages_sent_back(env: BrokerFixture) -> None:
    message = send(env)
    for _ in range(2):
        send_back_by_offset(env, message, level=1)
    for _ in range(3):
        env.tick(10_000)
    ext = {"statsName": "SNDBCK_PUT_NUMS", "statsKey": "T@G"}
    reply = env.ask(RequestCode.VIEW_BROKER_STATS_DATA, ext)
    minute = fastjson.decode(reply.body, BrokerStatsData).stats_minute
    assert minute is not None
    assert minute.sum == 2
    list(env.context.stats.forget_group("G"))
    assert env.ask(RequestCode.VIEW_BROKER_STATS_DATA, ext).code != 0


def test_under_sync_flush_the_response_waits_for_the_flush(tmp_path: Path) -> None:
    with broker_fixture(tmp_path, Settings(store=small_config(sync_flush=True))) as env:
        env.send()
        env.store.publish()
        ext = {"offset": "0", "group": "G", "delayLevel": "1"}
        for flag in (0, 2):
            command = Command(36, ext, now_ms=env.now_ms, flag=flag, opaque=5)
            env.store.publish()
            env.store.flusher.pump()
            env.store.publish()
            answer = env.broker.handle(command)
            assert isinstance(answer, InThread)
            answer = answer.then(answer.work())
            if flag:
                assert answer is None
            else:
                assert isinstance(answer, EncodedReply)
                assert answer.offset == env.store.log.end
                assert read_reply(answer.data).code == 0
                assert read_reply(answer.late).code == ResponseCode.FLUSH_DISK_TIMEOUT


# --- messages that clients send back themselves --------------------------------------------------


def send_back(
    env: BrokerFixture,
    *,
    reconsumed: int,
    times_max: int | None = None,
    version: int = 493,
    **props: str,
) -> Reply:
    named = {"UNIQ_KEY": "u", "RETRY_TOPIC": "T", **props}
    ext = {
        "a": "CLIENT_INNER_PRODUCER",
        "b": RETRY,
        "c": "TBW102",
        "d": "4",
        "e": "0",
        "f": "0",
        "g": str(env.now_ms),
        "h": "0",
        "j": str(reconsumed),
        "m": "false",
        "i": "".join(f"{name}\x01{value}\x02" for name, value in named.items()),
    }
    if times_max is not None:
        ext["l"] = str(times_max)
    frame = encode(RequestCode.SEND_MESSAGE_V2, ext, b"mine", opaque=7, version=version)
    answer = env.frame(frame)
    env.store.publish()
    assert isinstance(answer, Reply)
    return answer


def test_a_send_to_the_retry_topic_is_delayed(env: BrokerFixture) -> None:
    assert send_back(env, reconsumed=1, times_max=16, DELAY="4").code == 0
    assert bodies(env, SCHEDULE, 3) == [b"mine"]
    advance(env, LEVELS_MS[3])
    (again,) = stored(env, RETRY)
    assert again.reconsume_times == 1
    # Clients before 4.6.1 leave the mark of a transaction on it.
    assert send_back(env, reconsumed=1, DELAY="4", TRAN_MSG="true").code == 0
    assert send_back(env, reconsumed=0, DELAY="4", TRAN_MSG="true").code == 13


@pytest.mark.parametrize(
    ("reconsumed", "times_max", "version", "dead"),
    [
        (16, 16, 493, False),
        (17, 16, 493, True),
        (16, None, 493, False),
        (17, None, 493, True),
        (3, 2, 493, True),
        (3, 2, OLD, False),
    ],
)
def test_a_send_to_the_retry_topic_may_become_a_dead_letter(
    env: BrokerFixture, reconsumed: int, times_max: int | None, version: int, dead: bool
) -> None:
    answer = send_back(env, reconsumed=reconsumed, times_max=times_max, version=version, DELAY="3")
    assert answer.code == 0
    assert answer.ext is not None
    assert answer.ext["queueId"] == "0"
    assert len(stored(env, DEAD)) == dead
    if dead:
        (letter,) = stored(env, DEAD)
        assert letter.properties["DELAY"] == "-1"
        assert answer.ext["msgId"] == letter.offset_id
        assert env.broker.dead_letters.counts == {("G", "T"): 1}


def test_a_group_that_consumes_in_order_makes_dead_letters_at_once(env: BrokerFixture) -> None:
    queue = MessageQueue(topic="T", broker_name="broker-a", queue_id=0)
    env.context.locks.lock("G", "c1", [queue], env.now_ms)
    assert send_back(env, reconsumed=1, times_max=16, DELAY="3").code == 0
    assert len(stored(env, DEAD)) == 1
    env.now_ms += 61_000  # the lease is over
    assert send_back(env, reconsumed=1, times_max=16, DELAY="3").code == 0
    assert len(stored(env, DEAD)) == 1


def test_an_unknown_group_can_t_send_back(env: BrokerFixture) -> None:
    set_broker(env, auto_create_groups=False)
    answer = send_back(env, reconsumed=1)
    assert answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


def test_a_batch_can_t_go_to_a_retry_topic(env: BrokerFixture) -> None:
    body = encode_batch([(b"one", 0, {})])
    ext = {
        "a": "g",
        "b": RETRY,
        "c": "TBW102",
        "d": "4",
        "e": "0",
        "f": "0",
        "g": "1",
        "h": "0",
        "i": "",
        "m": "true",
    }
    answer = env.frame(encode(RequestCode.SEND_BATCH_MESSAGE, ext, body, opaque=7))
    assert isinstance(answer, Reply)
    assert answer.code == MessageIllegal.code


def test_the_group_of_a_retry_topic() -> None:
    assert group_of("%RETRY%G") == "G"
    assert group_of("%RETRY%G+T") == "G"
    assert group_of("%RETRY%G_T") == "G_T"


# --- access --------------------------------------------------------------------------------------


def test_only_readable_messages_can_be_sent_back(
    env: BrokerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right on a group must not give access to messages of other topics."""
    message = send(env)
    asked: list[str] = []

    def check_read(command: Command, topic: str) -> Reply:
        asked.append(topic)
        return Reply(ResponseCode.NO_PERMISSION)

    monkeypatch.setattr(env.context.access, "check_read", check_read)
    assert send_back_by_offset(env, message).code == ResponseCode.NO_PERMISSION
    assert asked == ["T"]
