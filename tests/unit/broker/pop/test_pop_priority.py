"""POP by priority: urgent messages first."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.wire.bodies.client_bodies import SubscriptionGroupConfig, TopicConfig
from tests.unit.broker.broker_kit import BrokerFixture, broker_fixture
from tests.unit.broker.pop.pop_kit import PopClient, advance

PRIORITY = "_SYS_MSG_PRIORITY_"
QUEUES = 4


@pytest.fixture
def env(tmp_path: Path) -> Iterator[BrokerFixture]:
    with broker_fixture(tmp_path / "store") as made:
        set_type(made, "PRIORITY")
        yield made


@pytest.fixture
def client(env: BrokerFixture) -> PopClient:
    return PopClient(env)


def set_type(env: BrokerFixture, message_type: str) -> None:
    config = TopicConfig(
        topic_name="T",
        read_queue_nums=QUEUES,
        write_queue_nums=QUEUES,
        attributes={"message.type": message_type},
    )
    env.context.topics.put(config, env.now_ms)


def set_factor(env: BrokerFixture, factor: int) -> None:
    attributes = {"priority.factor": str(factor)}
    env.context.groups.put(
        SubscriptionGroupConfig(group_name="G", attributes=attributes), env.now_ms
    )


def send(env: BrokerFixture, *priorities: int) -> None:
    for number, priority in enumerate(priorities):
        properties = {PRIORITY: str(priority)}
        assert env.send(body=b"%d" % priority, queue_id=number % QUEUES, properties=properties)
    env.store.publish()


def test_urgent_messages_are_popped_first(env: BrokerFixture, client: PopClient) -> None:
    send(env, 0, 2, 1, 3, 9, 1)
    assert client.bodies() == [b"3", b"9", b"2", b"1", b"1", b"0"]


def test_each_pop_takes_the_most_urgent_messages(env: BrokerFixture, client: PopClient) -> None:
    send(env, 0, 1, 2, 3)
    assert client.bodies(maxMsgNums=1) == [b"3"]
    send(env, 3, 0)
    assert [client.bodies(maxMsgNums=1) for _ in range(3)] == [[b"3"], [b"2"], [b"1"]]
    assert client.bodies() == [b"0", b"0"]


def test_lower_numbers_are_popped_first_if_so_configured(
    env: BrokerFixture, client: PopClient
) -> None:
    send(env, 0, 2, 1, 3, 9, 1)
    env.live.change({"priorityOrderAsc": "false"})
    assert client.bodies(maxMsgNums=4) == [b"0", b"1", b"1", b"2"]
    env.live.change({"priorityOrderAsc": "true"})
    send(env, 0)
    assert client.bodies() == [b"3", b"9", b"0"]


def test_a_suspended_pop_is_woken_by_any_priority(env: BrokerFixture, client: PopClient) -> None:
    client.suspend()
    send(env, 1)
    env.store.notify()
    (reply,) = env.woken
    assert [popped.body for popped in client.read(reply)] == [b"1"]


@pytest.mark.parametrize("message_type", ["NORMAL", "UNSPECIFIED"])
def test_other_topics_are_read_in_round_robin(
    env: BrokerFixture, client: PopClient, message_type: str
) -> None:
    set_type(env, message_type)
    send(env, *[priority for _ in range(4) for priority in range(QUEUES)])
    first = [client.bodies(maxMsgNums=1)[0] for _ in range(QUEUES)]
    assert sorted(first) == [b"0", b"1", b"2", b"3"]


@pytest.mark.parametrize("factor", [0, 30, 50, 100])
def test_the_factor_is_the_percentage_of_pops_by_priority(
    env: BrokerFixture, client: PopClient, factor: int
) -> None:
    set_factor(env, factor)
    send(env, *[priority for _ in range(100) for priority in range(QUEUES)])
    count = sum(client.bodies(maxMsgNums=1) == [b"3"] for _ in range(100))
    others = (100 - factor) // QUEUES  # round robin reaches the highest queue too
    assert factor + others - 2 <= count <= factor + others + 2


def test_retries_are_read_last(env: BrokerFixture, client: PopClient) -> None:
    send(env, 3, 3)
    client.pop(invisibleTime=1_000)
    advance(env, 3_000)
    for _ in range(10):
        send(env, 0)
    popped = [client.bodies(maxMsgNums=1)[0] for _ in range(12)]
    assert popped == [b"0"] * 10 + [b"3", b"3"]


def test_an_ordered_pop_is_not_by_priority(env: BrokerFixture, client: PopClient) -> None:
    send(env, *range(QUEUES))
    popped = [client.bodies(maxMsgNums=1, order="true")[0] for _ in range(QUEUES)]
    assert sorted(popped) == [b"0", b"1", b"2", b"3"]
    assert popped != [b"3", b"2", b"1", b"0"]
