"""Priority messages: which queue a send is stored in."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.wire.bodies.client_bodies import TopicConfig
from penstock.wire.codes import RequestCode
from penstock.wire.message import encode_batch
from penstock.wire.output import encode
from tests.unit.broker.broker_kit import BrokerFixture, broker_fixture
from tests.unit.broker.pop.pop_kit import stored

PRIORITY = "_SYS_MSG_PRIORITY_"


@pytest.fixture
def env(tmp_path: Path) -> Iterator[BrokerFixture]:
    with broker_fixture(tmp_path / "store") as made:
        config = TopicConfig(topic_name="T", read_queue_nums=8, write_queue_nums=4)
        made.context.topics.put(config, made.now_ms)
        yield made


@pytest.mark.parametrize(
    ("priority", "queue_id"), [("0", 0), ("2", 2), ("+3", 3), ("4", 3), ("2147483647", 3)]
)
def test_the_priority_chooses_the_queue(env: BrokerFixture, priority: str, queue_id: int) -> None:
    answer = env.send(queue_id=1, properties={PRIORITY: priority})
    assert answer.ext is not None
    assert answer.ext["queueId"] == str(queue_id)
    (message,) = stored(env, "T", queue_id)
    assert message.properties[PRIORITY] == priority


@pytest.mark.parametrize("priority", ["-1", "x", "1.5", "2147483648", "99999999999"])
def test_an_invalid_priority_has_no_effect(env: BrokerFixture, priority: str) -> None:
    assert env.send(queue_id=1, properties={PRIORITY: priority}).code == 0
    (message,) = stored(env, "T", 1)
    assert message.properties[PRIORITY] == priority


def test_a_message_with_a_sharding_key_has_no_priority(env: BrokerFixture) -> None:
    env.send(queue_id=1, properties={PRIORITY: "3", "__SHARDINGKEY": "k"})
    (message,) = stored(env, "T", 1)
    assert PRIORITY not in message.properties


@pytest.mark.parametrize("delay", [{"DELAY": "1"}, {"TIMER_DELAY_MS": "1000"}])
def test_a_delayed_message_has_no_priority(env: BrokerFixture, delay: dict[str, str]) -> None:
    answer = env.send(queue_id=1, properties={PRIORITY: "3", **delay})
    assert answer.ext is not None
    assert answer.ext["queueId"] == "1"
    for _ in range(300):
        env.tick(10)
    (message,) = stored(env, "T", 1)
    assert PRIORITY not in message.properties


def test_a_transactional_message_has_no_priority(env: BrokerFixture) -> None:
    env.send(queue_id=1, properties={PRIORITY: "3", "TRAN_MSG": "true", "PGROUP": "P"})
    (message,) = stored(env, "RMQ_SYS_TRANS_HALF_TOPIC")
    assert message.properties["REAL_QID"] == "1"
    assert PRIORITY not in message.properties


def test_a_batch_keeps_its_queue(env: BrokerFixture) -> None:
    body = encode_batch([(b"one", 0, {PRIORITY: "3"}), (b"two", 0, {})])
    ext = {
        "a": "g",
        "b": "T",
        "c": "TBW102",
        "d": "4",
        "e": "1",
        "f": "0",
        "g": str(env.now_ms),
        "h": "0",
        "j": "0",
        "m": "true",
    }
    answer = env.frame(encode(RequestCode.SEND_BATCH_MESSAGE, ext, body, opaque=7))
    assert answer.code == 0  # type: ignore[union-attr]
    assert [message.body for message in stored(env, "T", 1)] == [b"one", b"two"]
