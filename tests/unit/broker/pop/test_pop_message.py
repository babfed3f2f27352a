"""POP: messages are delivered, acknowledged or revived."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.rpc.answers import Reply, Suspend
from penstock.wire.bodies.client_bodies import TopicConfig
from penstock.wire.codes import RequestCode
from tests.unit.broker.broker_kit import BrokerFixture, bodies, broker_fixture
from tests.unit.broker.pop.pop_kit import REVIVE, PopClient, advance, pop_settings, stored


@pytest.fixture
def env(tmp_path: Path) -> Iterator[BrokerFixture]:
    with broker_fixture(tmp_path / "store") as made:
        yield made


@pytest.fixture
def client(env: BrokerFixture) -> PopClient:
    return PopClient(env)


def send(env: BrokerFixture, *texts: bytes, queue_id: int = 0, tag: str = "") -> None:
    for text in texts:
        assert env.send(body=text, queue_id=queue_id, tag=tag).code == 0
    env.store.publish()


def test_a_popped_message_is_invisible(env: BrokerFixture, client: PopClient) -> None:
    send(env, b"a", b"b")
    answer = client.ask()
    assert isinstance(answer, Reply)
    assert answer.code == 0
    assert answer.ext == {
        "popTime": str(env.now_ms),
        "invisibleTime": "10000",
        "reviveQid": "1",
        "restNum": "0",
        "startOffsetInfo": "0 0 0",
        "msgOffsetInfo": "0 0 0,1",
    }
    assert answer.remark == "FOUND"
    assert bodies(answer) == [b"a", b"b"]
    assert client.pop() == []
    assert PopClient(env, group="Other").bodies() == [b"a", b"b"]


def test_an_acknowledged_message_is_not_delivered_again(
    env: BrokerFixture, client: PopClient
) -> None:
    send(env, b"a", b"b")
    first, second = client.pop()
    assert client.ack(first).code == 0
    assert client.ack(first).code == 0
    advance(env, 11_000)
    assert client.bodies() == [b"b"]
    assert client.ack(second).code == 0  # too late: it was revived


def test_an_unacknowledged_message_is_revived(env: BrokerFixture, client: PopClient) -> None:
    send(env, b"a", queue_id=2, tag="vip")
    (popped,) = client.pop()
    advance(env, 9_999)
    assert client.pop() == []
    advance(env, 1)
    env.store.publish()
    (again,) = client.pop()
    assert (again.body, again.message.topic, again.message.tags) == (b"a", "T", "vip")
    assert again.message.reconsume_times == 1
    assert again.message.properties["1ST_POP_TIME"] == str(popped.receipt.pop_ms)
    assert again.message.born_ms == popped.message.born_ms
    assert again.receipt.kind == "1"
    assert client.ack(again).code == 0
    advance(env, 60_000)
    assert client.pop() == []
    assert len(env.broker.pop.revive_log.checkpoints) == 0


def test_a_message_is_revived_repeatedly(env: BrokerFixture, client: PopClient) -> None:
    send(env, b"a")
    for times in range(5):
        (popped,) = client.pop()
        assert popped.message.reconsume_times == times
        assert popped.message.topic == "T"
        advance(env, 10_000)
        env.store.publish()
    assert len(stored(env, "%RETRY%G_T")) == 5


def test_the_revive_log_has_the_format_of_rocketmq(env: BrokerFixture, client: PopClient) -> None:
    send(env, b"a", b"b", b"c")
    popped = client.pop()
    client.ack(popped[0])
    client.ack_batch(popped[1:])
    queue_id = popped[0].receipt.revive_queue_id
    texts = [(m.tags, m.body.decode()) for m in stored(env, REVIVE, queue_id)]
    ms = env.now_ms
    assert texts == [
        (
            "ck",
            f'{{"bm":0,"bn":"broker-a","c":"G","d":[0,1,2],"it":10000,"n":3,"pt":{ms},"q":0,'
            '"ro":0,"so":0,"t":"T"}',
        ),
        ("ack", f'{{"ao":0,"bn":"broker-a","c":"G","pt":{ms},"q":0,"so":0,"t":"T"}}'),
        ("bAck", f'{{"ao":0,"aol":[1,2],"bn":"broker-a","c":"G","pt":{ms},"q":0,"so":0,"t":"T"}}'),
    ]


def test_progress_is_visible_to_mqadmin(env: BrokerFixture, client: PopClient) -> None:
    send(env, b"a", b"b")
    client.pop(maxMsgNums=1)
    assert env.context.offsets.get("G", "T", 0) == 1
    reply = env.ask(
        RequestCode.QUERY_CONSUMER_OFFSET, {"consumerGroup": "G", "topic": "T", "queueId": "0"}
    )
    assert reply.ext == {"offset": "1"}


def test_a_group_changes_between_pull_and_pop(env: BrokerFixture, client: PopClient) -> None:
    send(env, *[b"%d" % n for n in range(6)])
    assert client.bodies(maxMsgNums=2) == [b"0", b"1"]
    assert bodies(env.pull(2, maxMsgNums=2, commitOffset=4, flags=5)) == [b"2", b"3"]
    assert client.bodies() == [b"4", b"5"]


def test_all_queues_are_popped(env: BrokerFixture, client: PopClient) -> None:
    for queue_id in range(4):
        send(env, b"%d" % queue_id, queue_id=queue_id)
    assert sorted(client.bodies()) == [b"0", b"1", b"2", b"3"]
    for queue_id in range(4):
        send(env, b"%d" % queue_id, queue_id=queue_id)
    assert client.bodies(queueId=2) == [b"2"]
    answer = client.ask(maxMsgNums=2)
    assert isinstance(answer, Reply)
    assert len(bodies(answer)) == 2
    assert answer.ext is not None
    assert answer.ext["restNum"] == "1"


def test_pops_start_at_different_queues(env: BrokerFixture, client: PopClient) -> None:
    for queue_id in range(4):
        send(env, *[b"%d" % queue_id] * 4, queue_id=queue_id)
    assert len({client.bodies(maxMsgNums=1)[0] for _ in range(4)}) == 4


def test_the_size_of_a_pop_is_limited(env: BrokerFixture, client: PopClient) -> None:
    send(env, b"a")
    assert env.handle(RequestCode.POP_MESSAGE).code == 29  # type: ignore[union-attr]
    for changes in (
        {"maxMsgNums": 33},
        {"queueId": 4},
        {"invisibleTime": -1},
        {"invisibleTime": 1 << 40},
    ):
        answer = client.ask(**changes)
        assert isinstance(answer, Reply)
        assert answer.code == 29, changes
    answer = PopClient(env, topic="Unknown").ask()
    assert isinstance(answer, Reply)
    assert answer.code == 17
    assert len(client.bodies()) == 1


def test_large_messages_need_several_pops(tmp_path: Path) -> None:
    with broker_fixture(tmp_path / "store", pop_settings(pull_bytes_max=1500)) as env:
        client = PopClient(env)
        send(env, *[b"x" * 600] * 4)
        assert [len(client.bodies()) for _ in range(5)] == [1, 1, 1, 1, 0]


def test_a_late_pop_is_rejected(env: BrokerFixture, client: PopClient) -> None:
    send(env, b"a")
    answer = client.ask(bornTime=env.now_ms - 15_501, pollTime=15_000)
    assert isinstance(answer, Reply)
    assert answer.code == 210
    assert client.bodies() == [b"a"]


def test_permissions_are_checked(env: BrokerFixture, client: PopClient) -> None:
    send(env, b"a")
    env.context.topics.put(
        TopicConfig(topic_name="T", read_queue_nums=4, write_queue_nums=4, perm=2), env.now_ms
    )
    answer = client.ask()
    assert isinstance(answer, Reply)
    assert answer.code == 16


# --- initial offset of a group


@pytest.mark.parametrize(("mode", "found"), [(0, [b"0", b"1", b"2"]), (1, [b"0", b"1", b"2"])])
def test_a_new_group_reads_a_young_queue_from_the_beginning(
    env: BrokerFixture, client: PopClient, mode: int, found: list[bytes]
) -> None:
    send(env, b"0", b"1", b"2")
    assert client.bodies(initMode=mode) == found


def test_a_new_group_starts_with_the_newest_message(tmp_path: Path) -> None:
    with broker_fixture(tmp_path / "store", pop_settings(pop_first_if_young=False)) as env:
        send(env, b"0", b"1", b"2")
        assert PopClient(env).bodies(initMode=1) == [b"2"]
        assert PopClient(env, group="H").bodies(initMode=0) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("young", [True, False])
def test_a_new_group_gets_what_arrives_after_its_first_pop(tmp_path: Path, young: bool) -> None:
    with broker_fixture(tmp_path / "store", pop_settings(pop_first_if_young=young)) as env:
        env.context.topics.ensure("T", 4, 6, env.now_ms)
        client = PopClient(env)
        assert client.bodies(initMode=1) == []
        send(env, b"0", b"1", b"2")
        assert client.bodies(initMode=1) == [b"0", b"1", b"2"]


# --- filters


def test_tags_are_filtered(env: BrokerFixture, client: PopClient) -> None:
    send(env, b"0", b"1", tag="a")
    send(env, b"2", tag="b")
    send(env, b"3", tag="c")
    send(env, b"4", tag="b")
    popped = client.pop(exp="b || x", expType="TAG")
    assert [one.body for one in popped] == [b"2", b"4"]
    assert [one.receipt.queue_offset for one in popped] == [2, 4]
    assert env.context.offsets.get("G", "T", 0) == 5
    advance(env, 10_000)
    env.store.publish()
    assert client.bodies(exp="b || x", expType="TAG") == [b"2", b"4"]


def test_properties_are_filtered(env: BrokerFixture, client: PopClient) -> None:
    for number in range(6):
        env.send(body=b"%d" % number, properties={"n": str(number)})
    env.store.publish()
    assert client.bodies(exp="n > 2 AND n <> 4", expType="SQL92") == [b"3", b"5"]


@pytest.mark.parametrize(("kind", "text"), [("SQL92", "n >"), ("TAG", "||")])
def test_a_bad_expression_is_refused(
    env: BrokerFixture, client: PopClient, kind: str, text: str
) -> None:
    send(env, b"a")
    answer = client.ask(exp=text, expType=kind)
    assert isinstance(answer, Reply)
    assert answer.code == 23
    assert client.bodies() == [b"a"]


def test_filtered_out_messages_are_skipped(env: BrokerFixture, client: PopClient) -> None:
    send(env, *[b"x"] * 1200, tag="no")
    send(env, b"yes", tag="yes")
    assert client.bodies(exp="yes", pollTime=15_000) == [b"yes"]


# --- retry topics


def test_retry_topics_v2(tmp_path: Path) -> None:
    settings = pop_settings()
    with broker_fixture(tmp_path / "store", settings) as env:
        client = PopClient(env)
        send(env, b"a", b"b")
        client.pop(maxMsgNums=1)
        advance(env, 10_000)  # a lies in the first kind
        env.live.change({"enableRetryTopicV2": "true"})
        assert client.bodies(maxMsgNums=1) == [b"b"]
        advance(env, 10_000)
        env.store.publish()
        assert env.context.topics.get("%RETRY%G+T") is not None
        found = [one for _ in range(2) for one in client.pop()]
        assert sorted((one.body, str(one.receipt.kind)) for one in found) == [
            (b"a", "1"),
            (b"b", "2"),
        ]
        client.ack_all(found)
        advance(env, 60_000)
        assert client.pop() == []


def test_some_pops_read_retry_topics_first(env: BrokerFixture, client: PopClient) -> None:
    send(env, *[b"old"] * 10)
    client.pop(maxMsgNums=10)
    advance(env, 10_000)
    send(env, *[b"new"] * 100)
    found = [client.bodies(maxMsgNums=1)[0] for _ in range(25)]
    assert found.count(b"old") == 5


def test_the_retry_topic_can_be_shown(tmp_path: Path) -> None:
    with broker_fixture(tmp_path / "store", pop_settings(pop_retry_topic_shown=True)) as env:
        client = PopClient(env)
        send(env, b"a")
        client.pop()
        advance(env, 10_000)
        env.store.publish()
        (again,) = client.pop()
        assert again.message.topic == "%RETRY%G_T"
        assert client.ack(again).code == 0
        advance(env, 20_000)
        assert client.pop() == []


# --- limits


def test_pops_are_refused_when_too_many_checkpoints_are_open(tmp_path: Path) -> None:
    with broker_fixture(tmp_path / "store", pop_settings(pop_batches_max=2)) as env:
        client = PopClient(env)
        send(env, b"a", b"b", b"c")
        first = client.pop(maxMsgNums=1)
        client.pop(maxMsgNums=1)
        answer = client.ask()
        assert isinstance(answer, Reply)
        assert answer.code == 2
        assert "pop_batches_max" in (answer.remark or "")
        client.ack_all(first)
        assert client.bodies() == [b"c"]


def test_messages_in_flight_per_queue_are_limited(tmp_path: Path) -> None:
    settings = pop_settings(pop_in_flight_limited=True, pop_in_flight_max=2)
    with broker_fixture(tmp_path / "store", settings) as env:
        client = PopClient(env)
        send(env, *[b"%d" % n for n in range(8)])
        popped = client.pop(maxMsgNums=3)
        assert client.pop(maxMsgNums=3) == []
        client.suspend()
        client.ack(popped[0])
        assert [one.body for one in client.read(env.woken[0])] == [b"3", b"4", b"5", b"6", b"7"]


# --- offsets


def test_a_reset_works_for_pops(env: BrokerFixture, client: PopClient) -> None:
    send(env, b"0", b"1", b"2")
    client.ack_all(client.pop())
    ext = {
        "topic": "T",
        "group": "G",
        "queueId": "0",
        "offset": "1",
        "timestamp": "0",
        "isForce": "true",
    }
    assert env.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ext).code == 0
    assert client.bodies() == [b"1", b"2"]
    suspended = client.ask(pollTime=15_000)
    assert isinstance(suspended, Suspend)
    assert env.ask(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, ext).code == 0
    assert bodies(env.woken[0]) == [b"1", b"2"]
