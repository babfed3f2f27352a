"""Ordered pops: the next messages of a queue are delivered after all acks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.rpc.answers import Reply, Suspend
from tests.unit.broker.broker_kit import BrokerFixture, bodies, broker_fixture
from tests.unit.broker.pop.pop_kit import PopClient, Popped, advance, persist, reopen


@pytest.fixture
def env(tmp_path: Path) -> Iterator[BrokerFixture]:
    with broker_fixture(tmp_path / "store") as made:
        for number in range(6):
            made.send(body=b"%d" % number)
        made.store.publish()
        yield made


@pytest.fixture
def client(env: BrokerFixture) -> PopClient:
    return PopClient(env)


def pop(client: PopClient, count: int = 2, **ext: object) -> list[Popped]:
    return client.pop(order="true", maxMsgNums=count, **ext)


def texts(popped: list[Popped]) -> list[bytes]:
    return [one.body for one in popped]


def test_the_next_messages_are_delivered_after_all_acks(
    env: BrokerFixture, client: PopClient
) -> None:
    first = pop(client)
    assert texts(first) == [b"0", b"1"]
    assert {one.receipt.revive_queue_id for one in first} == {999}
    assert pop(client) == []
    assert env.context.offsets.get("G", "T", 0) == 0
    assert client.ack(first[1]).code == 0
    assert env.context.offsets.get("G", "T", 0) == 0
    assert pop(client) == []
    assert client.ack(first[0]).code == 0
    assert env.context.offsets.get("G", "T", 0) == 2
    assert texts(pop(client)) == [b"2", b"3"]


def test_messages_are_delivered_again_in_order(env: BrokerFixture, client: PopClient) -> None:
    first = pop(client, 3)
    client.ack(first[0])
    advance(env, 9_999)
    assert pop(client) == []
    advance(env, 1)
    answer = client.ask(order="true", maxMsgNums=3)
    assert isinstance(answer, Reply)
    assert bodies(answer) == [b"1", b"2", b"3"]
    assert answer.ext is not None
    assert answer.ext["orderCountInfo"] == "0 qo0%1 1;0 qo0%2 1;0 0 0"
    assert client.ack(first[1]).code == 0  # outdated: ignored
    assert env.context.offsets.get("G", "T", 0) == 1


def test_a_batch_is_acknowledged_in_order(env: BrokerFixture, client: PopClient) -> None:
    first = pop(client, 3)
    assert client.ack_batch(first).code == 0
    assert env.context.offsets.get("G", "T", 0) == 3
    assert texts(pop(client)) == [b"3", b"4"]


def test_the_same_attempt_pops_again(env: BrokerFixture, client: PopClient) -> None:
    pop(client, attemptId="x")
    assert pop(client, attemptId="y") == []
    assert texts(pop(client, attemptId="x")) == [b"0", b"1"]


def test_the_invisible_time_of_one_message_changes(env: BrokerFixture, client: PopClient) -> None:
    first = pop(client)
    advance(env, 1_000)
    changed = client.change(first[0], 30_000)
    assert changed.receipt.pop_ms == first[0].receipt.pop_ms
    assert changed.receipt.invisible_ms == 31_000
    client.ack(first[1])
    advance(env, 29_999)
    assert pop(client) == []
    advance(env, 1)
    assert texts(pop(client)) == [b"0", b"1"]


def test_a_suspended_ordered_pop_is_woken(env: BrokerFixture, client: PopClient) -> None:
    first = pop(client)
    client.suspend(order="true", maxMsgNums=1)
    assert isinstance(client.notify(15_000, order="true"), Suspend)
    client.ack(first[0])
    assert env.woken == []
    client.ack(first[1])
    assert bodies(env.woken[0]) == [b"2"]
    advance(env, 9_999)
    client.suspend(order="true", maxMsgNums=1)
    assert len([reply for reply in env.woken if reply.body]) == 1
    advance(env, 1)
    assert [bodies(reply) for reply in env.woken if reply.body][1:] == [[b"2"]]


def test_an_ack_in_the_same_loop_iteration_is_not_missed(
    env: BrokerFixture, client: PopClient
) -> None:
    """Both arrive in one read: the pop is suspended only after the ack was served."""
    (first,) = pop(client, 1)
    suspend = client.suspend(order="true", maxMsgNums=1)
    env.context.long_polling.drop(1)
    client.ack(first)
    assert env.woken == []
    env.context.long_polling.add(1, 9, suspend)
    assert [bodies(reply) for reply in env.woken] == [[b"1"]]
    assert len(env.context.long_polling) == 0


def test_a_notification_ignores_blocked_queues(env: BrokerFixture, client: PopClient) -> None:
    first = pop(client)
    assert client.notify(order="true") == Reply(ext={"hasMsg": "false", "pollingFull": "false"})
    assert isinstance(client.notify(60_000, order="true"), Suspend)
    advance(env, 10_000)
    assert env.woken == [Reply(ext={"hasMsg": "true", "pollingFull": "false"})]
    assert len(first) == 2


def test_a_message_that_was_not_popped_is_refused(env: BrokerFixture, client: PopClient) -> None:
    first = pop(client)
    wrong = first[0]._replace(receipt=first[0].receipt._replace(queue_offset=4))
    assert client.ack(wrong).code == 13


def test_an_offset_reset_unblocks_the_queue(env: BrokerFixture, client: PopClient) -> None:
    pop(client)
    env.context.offsets.reset("G", "T", {0: 1}, env.now_ms)
    assert texts(pop(client)) == [b"1", b"2"]


@pytest.mark.parametrize("crash", [False, True])
def test_order_survives_a_restart(tmp_path: Path, crash: bool) -> None:
    root = tmp_path / "store"
    env = BrokerFixture(root)
    for number in range(6):
        env.send(body=b"%d" % number)
    env.store.publish()
    first = pop(PopClient(env))
    PopClient(env).ack(first[0])
    advance(env, 6_000)
    persist(env)
    env = reopen(env, root, crash=crash)
    try:
        client = PopClient(env)
        assert pop(client) == []
        advance(env, 4_000)
        again = pop(client)
        assert texts(again) == [b"1", b"2"]
        client.ack_all(again)
        assert texts(pop(client, 32)) == [b"3", b"4", b"5"]
    finally:
        env.close()
