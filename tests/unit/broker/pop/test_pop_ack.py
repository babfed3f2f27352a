"""Acknowledgements and changed invisible times of popped messages."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.config import Settings
from penstock.errors import DiskFull
from penstock.rpc.answers import EncodedReply
from penstock.rpc.command import Command
from penstock.wire.bodies.client_bodies import TopicConfig
from penstock.wire.codes import RequestCode
from tests.store_kit import small_config
from tests.unit.broker.broker_kit import BrokerFixture, broker_fixture
from tests.unit.broker.pop.pop_kit import REVIVE, PopClient, advance, stored


@pytest.fixture
def env(tmp_path: Path) -> Iterator[BrokerFixture]:
    with broker_fixture(tmp_path / "store") as made:
        yield made


@pytest.fixture
def client(env: BrokerFixture) -> PopClient:
    return PopClient(env)


def send(env: BrokerFixture, *texts: bytes, queue_id: int = 0) -> None:
    for text in texts:
        assert env.send(body=text, queue_id=queue_id).code == 0
    env.store.publish()


def test_a_batch_of_acks(env: BrokerFixture, client: PopClient) -> None:
    for queue_id in range(3):
        send(env, *[b"%d%d" % (queue_id, n) for n in range(4)], queue_id=queue_id)
    popped = client.pop()
    left = [one for one in popped if one.body in (b"02", b"11")]
    assert client.ack_batch([one for one in popped if one not in left]).code == 0
    advance(env, 10_000)
    env.store.publish()
    assert sorted(client.bodies()) == [b"02", b"11"]


def test_an_empty_batch_of_acks_is_rejected(env: BrokerFixture) -> None:
    assert env.ask(RequestCode.BATCH_ACK_MESSAGE).code == 208
    assert env.ask(RequestCode.BATCH_ACK_MESSAGE, {}, b'{"acks":[]}').code == 208
    assert env.ask(RequestCode.BATCH_ACK_MESSAGE, {}, b"{").code == 29


def test_invalid_acks_are_rejected(env: BrokerFixture, client: PopClient) -> None:
    send(env, b"a")
    (popped,) = client.pop()
    receipt = popped.receipt
    wrong_queue = popped._replace(receipt=receipt._replace(queue_id=7))
    assert client.ack(wrong_queue).code == 13
    beyond = popped._replace(receipt=receipt._replace(queue_offset=99))
    answer = client.ack(beyond)
    assert (answer.code, answer.remark) == (
        208,
        "offset is illegal, key:T@0, commit:99, store:0~1",
    )
    strange = popped._replace(receipt=receipt._replace(revive_queue_id=77))
    assert client.ack(strange).code == 0  # the batch knows its queue
    unknown = popped._replace(receipt=receipt._replace(pop_ms=5))
    assert client.ack(unknown).code == 0
    ext = {"consumerGroup": "G", "topic": "T", "queueId": "0", "offset": "0"}
    for text in ("", "1 2", "a b c d e f g h", "0 0 0 0 7 b 0 0"):
        assert env.ask(RequestCode.ACK_MESSAGE, {**ext, "extraInfo": text}).code == 29
    ext["topic"] = "Unknown"
    ext["extraInfo"] = receipt.format()
    assert env.ask(RequestCode.ACK_MESSAGE, ext).code == 17
    advance(env, 10_000)
    assert client.pop() == []


def test_an_unknown_receipt_handle_changes_nothing(env: BrokerFixture, client: PopClient) -> None:
    send(env, b"a")
    (popped,) = client.pop()
    before = env.store.log.end
    late = popped._replace(receipt=popped.receipt._replace(pop_ms=env.now_ms - 99_999))
    forged = popped._replace(receipt=popped.receipt._replace(start_offset=5))
    for one in (late, forged):
        assert client.ack(one).code == 0
        client.change(one, 5000)
    assert env.store.log.end == before


# --- changed times


@pytest.mark.parametrize("invisible_ms", [2_000, 40_000])
def test_a_message_is_revived_at_its_new_time(
    env: BrokerFixture, client: PopClient, invisible_ms: int
) -> None:
    send(env, b"a", b"b")
    first, second = client.pop()
    advance(env, 1_000)
    changed = client.change(first, invisible_ms)
    assert changed.receipt.pop_ms == env.now_ms
    client.ack(second)
    advance(env, invisible_ms - 1)
    assert client.pop() == []
    advance(env, 1)
    env.store.publish()
    (again,) = client.pop()
    assert (again.body, again.message.reconsume_times) == (b"a", 1)


def test_an_invisible_time_of_zero_revives_at_once(env: BrokerFixture, client: PopClient) -> None:
    send(env, b"a")
    (popped,) = client.pop()
    client.suspend()
    changed = client.change(popped, 0)
    assert env.broker.due() <= env.now_ms
    env.tick(1)
    (again,) = client.read(env.woken[0])
    assert again.body == b"a"
    client.ack(changed)
    client.ack(again)
    advance(env, 60_000)
    assert client.pop() == []


def test_an_old_receipt_handle_is_invalid(env: BrokerFixture, client: PopClient) -> None:
    send(env, b"a")
    (popped,) = client.pop()
    changed = client.change(popped, 20_000)  # in the same millisecond
    assert changed.receipt.pop_ms != popped.receipt.pop_ms
    assert client.ack(popped).code == 0
    stale = client.change(popped, 90_000)
    advance(env, 20_001)
    env.store.publish()
    (again,) = client.pop()
    assert client.ack(stale).code == 0
    assert client.ack(changed).code == 0
    advance(env, 10_000)
    env.store.publish()
    assert [one.message.reconsume_times for one in client.pop()] == [2]
    assert again.message.reconsume_times == 1


def test_the_invisible_time_of_an_acknowledged_message_can_not_change(
    env: BrokerFixture, client: PopClient
) -> None:
    send(env, b"a")
    (popped,) = client.pop()
    client.ack(popped)
    client.change(popped, 1_000)
    advance(env, 30_000)
    assert client.pop() == []


def test_invalid_changes_are_rejected(env: BrokerFixture, client: PopClient) -> None:
    send(env, b"a")
    (popped,) = client.pop()
    beyond = popped._replace(receipt=popped.receipt._replace(queue_offset=1))
    answer = client.ask_change(beyond, 100)
    assert answer.code == 208
    assert answer.ext == {"popTime": "0", "invisibleTime": "0", "reviveQid": "0"}
    assert client.ask_change(popped, -1).code == 29
    assert client.ask_change(popped, 1 << 50).code == 29


# --- the store


def test_pops_fail_while_the_store_refuses_writes(env: BrokerFixture, client: PopClient) -> None:
    send(env, b"a", b"b")
    (popped,) = client.pop(maxMsgNums=1)
    env.store.writer.refusal = DiskFull("full")
    answer = client.ask()
    assert answer.code == 14  # type: ignore[union-attr]
    assert env.context.offsets.get("G", "T", 0) == 1
    assert client.ack(popped).code == 14
    advance(env, 300)
    env.store.writer.refusal = None
    assert client.bodies() == [b"b"]
    assert client.ack(popped).code == 0
    advance(env, 9_000)
    assert client.pop() == []


def test_acks_wait_for_the_flush_under_sync_flush(tmp_path: Path) -> None:
    settings = Settings(store=small_config(sync_flush=True))
    with broker_fixture(tmp_path / "store", settings) as env:
        client = PopClient(env)
        env.send(body=b"a")
        env.store.flusher.pump()
        env.store.publish()
        (popped,) = client.pop()
        ext = {
            "consumerGroup": "G",
            "topic": "T",
            "queueId": "0",
            "offset": "0",
            "extraInfo": popped.receipt.format(),
        }
        answer = env.broker.handle(Command(RequestCode.ACK_MESSAGE, ext, now_ms=env.now_ms))
        assert isinstance(answer, EncodedReply)
        assert answer.offset == env.store.log.end


def test_deleting_a_topic_closes_its_checkpoints(env: BrokerFixture, client: PopClient) -> None:
    send(env, b"a", b"b")
    (popped, _) = client.pop()
    assert env.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}).code == 0
    config = TopicConfig(topic_name="T", read_queue_nums=4, write_queue_nums=4)
    env.context.topics.put(config, env.now_ms)
    send(env, b"other", b"another")
    assert client.ack(popped).code in (0, 208)
    advance(env, 10_000)
    env.store.publish()
    assert len(env.broker.pop.revive_log.checkpoints) == 0
    assert client.bodies() == [b"other", b"another"]


def test_deleting_a_group_closes_its_checkpoints(env: BrokerFixture, client: PopClient) -> None:
    live = env.live.current
    assert live.broker.auto_create_groups
    send(env, b"a")
    client.pop()
    env.context.groups.delete("G", env.now_ms)
    env.live.change({"autoCreateSubscriptionGroup": "false"})
    advance(env, 10_000)
    assert len(env.broker.pop.revive_log.checkpoints) == 0
    assert stored(env, "%RETRY%G_T") == []


def test_statistics_count_pops_and_acks(env: BrokerFixture, client: PopClient) -> None:
    send(env, b"a", b"b")
    client.ack_all(client.pop()[:1])
    key = ("T", "G")
    assert env.context.stats.acks[key].nums == 1
    assert env.context.stats.batches[key].nums == 1
    checkpoints = env.broker.pop.revive_log.checkpoints
    assert checkpoints.in_flight == {("T", "G", 0): 1}
    assert sum(len(stored(env, REVIVE, n)) for n in range(8)) == 2
