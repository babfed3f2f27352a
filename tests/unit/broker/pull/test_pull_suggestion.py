"""`suggestWhichBrokerId`: consumers that are far behind are sent to a slave."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.broker.pull.pull_suggestion import PullSuggestion
from penstock.config import ReplicationConfig, Settings
from penstock.rpc.answers import Answer, Reply, Suspend
from penstock.wire.bodies.client_bodies import SubscriptionGroupConfig, TopicConfig
from penstock.wire.frame import BINARY, JSON
from tests.store_kit import small_config
from tests.unit.broker.broker_kit import NOW_MS, BrokerFixture, bodies, broker_fixture

SENT = 40
BEHIND = 10
"""Messages of the log that fit into `memory_percent` of the memory."""


def settings(**replication: object) -> Settings:
    config = ReplicationConfig(**{"read_from_slaves": True, **replication})  # type: ignore[arg-type]
    return Settings(store=small_config(sync_flush=False), replication=config)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[BrokerFixture]:
    with broker_fixture(tmp_path / "store", settings()) as made:
        fill(made)
        yield made


def fill(env: BrokerFixture) -> None:
    """Messages with the tag A, of which the last BEHIND are not far behind."""
    env.context.topics.put(
        TopicConfig(topic_name="T", read_queue_nums=2, write_queue_nums=2), NOW_MS
    )
    for number in range(SENT):
        env.send(body=b"%04d" % number, tag="A")
    log = env.store.log
    size = (log.end - log.begin()) // SENT
    limit_memory(env, size * BEHIND * 100 // 40)


def limit_memory(env: BrokerFixture, memory_bytes: int) -> None:
    env.broker.pull.requests._suggestion = PullSuggestion(env.context, memory_bytes)


def suggested(answer: Answer) -> int:
    assert isinstance(answer, Reply)
    assert answer.ext is not None
    return int(answer.ext["suggestWhichBrokerId"])


@pytest.mark.parametrize("encoding", [JSON, BINARY])
def test_a_consumer_far_behind_is_sent_to_a_slave(env: BrokerFixture, encoding: int) -> None:
    answer = env.pull(0, maxMsgNums=3, encoding=encoding)
    assert suggested(answer) == 1
    assert bodies(answer) == [b"0000", b"0001", b"0002"]
    assert answer.ext["nextBeginOffset"] == "3"  # type: ignore[union-attr,index]
    last = SENT - BEHIND
    assert suggested(env.pull(last - 1, encoding=encoding)) == 1
    answer = env.pull(last, maxMsgNums=1, encoding=encoding)
    assert (suggested(answer), bodies(answer)) == (0, [b"%04d" % last])


def test_without_reads_from_slaves_every_consumer_stays_at_the_master(env: BrokerFixture) -> None:
    env.live.change({"slaveReadEnable": "false"})
    assert suggested(env.pull(0)) == 0
    assert suggested(env.pull(0, subscription="B")) == 0
    env.live.change({"slaveReadEnable": "true"})
    assert suggested(env.pull(0)) == 1


def test_the_percentage_changes_at_run_time(env: BrokerFixture) -> None:
    env.live.change({"accessMessageInMemoryMaxRatio": "100"})  # 25 messages
    assert [suggested(env.pull(offset, maxMsgNums=1)) for offset in (14, 15)] == [1, 0]
    env.live.change({"accessMessageInMemoryMaxRatio": "0"})
    assert suggested(env.pull(SENT - 1)) == 1


def test_a_group_names_its_brokers(env: BrokerFixture) -> None:
    config = SubscriptionGroupConfig(
        group_name="G", broker_id=2, which_broker_when_consume_slowly=3
    )
    env.context.groups.put(config, NOW_MS)
    assert suggested(env.pull(0)) == 3
    assert suggested(env.pull(SENT - 1)) == 2
    assert suggested(env.pull(SENT)) == 2
    env.live.change({"slaveReadEnable": "false"})
    assert suggested(env.pull(SENT - 1)) == 0


def test_a_filtered_consumer_far_behind_is_sent_to_a_slave_too(env: BrokerFixture) -> None:
    answer = env.pull(0, subscription="B")
    assert (answer.code, suggested(answer)) == (20, 0), "it has examined all messages"  # type: ignore[union-attr]
    env.live.change({"accessMessageInMemoryMaxRatio": "0"})
    assert suggested(env.pull(0, subscription="B")) == 1


@pytest.mark.parametrize("offset", [SENT, SENT + 1, -1])
def test_a_consumer_without_messages_stays_at_the_master(env: BrokerFixture, offset: int) -> None:
    env.live.change({"accessMessageInMemoryMaxRatio": "0"})
    assert suggested(env.pull(offset)) == 0


def test_a_suspended_consumer_stays_at_the_master(env: BrokerFixture) -> None:
    assert isinstance(env.pull(SENT, flags=6), Suspend)
    env.send()
    assert suggested(env.woken[0]) == 0


def test_a_reset_consumer_stays_at_the_master(env: BrokerFixture) -> None:
    env.context.offsets.reset("G", "T", {0: 5}, NOW_MS)
    answer = env.pull(20)
    assert (answer.code, suggested(answer)) == (21, 0)  # type: ignore[union-attr]


def test_messages_read_in_the_thread_pool_have_a_suggestion(tmp_path: Path) -> None:
    with broker_fixture(tmp_path / "store", settings()) as env:
        fill(env)
    cold = msgspec.structs.replace(small_config(sync_flush=False), hot_bytes=0)
    given = msgspec.structs.replace(settings(memory_percent=0), store=cold)
    with broker_fixture(tmp_path / "store", given) as env:
        env.store.disk.read_now = lambda *_: False  # type: ignore[method-assign,assignment]
        answer = env.pull(0, maxMsgNums=1)
        assert (suggested(answer), bodies(answer)) == (1, [b"0000"])


def test_the_memory_is_that_of_the_machine(env: BrokerFixture) -> None:
    suggestion = PullSuggestion(env.context)
    assert suggestion._memory_bytes > 64 * 1024 * 1024
