"""Pops and notifications that wait for messages, and pops whose messages are on the disk."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.broker.pop import pop_message as pop_module
from penstock.broker.pop import pop_polling
from penstock.broker.pop.pop_reader import ReadBatch, read_messages
from penstock.rpc.answers import Answer, InThread, Reply, Suspend
from penstock.wire.codes import RequestCode
from tests.unit.broker.broker_kit import BrokerFixture, bodies, broker_fixture
from tests.unit.broker.pop.pop_kit import PopClient, advance, pop_settings, serve_by_rules


@pytest.fixture
def env(tmp_path: Path) -> Iterator[BrokerFixture]:
    with broker_fixture(tmp_path / "store") as made:
        made.send(body=b"make the topic")
        made.store.publish()
        PopClient(made).ack_all(PopClient(made).pop())
        yield made


@pytest.fixture
def client(env: BrokerFixture) -> PopClient:
    return PopClient(env)


def send(env: BrokerFixture, *texts: bytes, queue_id: int = 0) -> None:
    """Send in one loop iteration of the server."""
    env.many(b"".join(env.send_frame(body=text, queue_id=queue_id) for text in texts))


def waiting(client: PopClient, queue_id: int = -1) -> int:
    ext = {"consumerGroup": client.group, "topic": client.topic, "queueId": str(queue_id)}
    reply = client.env.ask(RequestCode.POLLING_INFO, ext)
    assert reply.ext is not None
    return int(reply.ext["pollingNum"])


@pytest.mark.parametrize("queue_id", [0, 3])
def test_a_pop_waits_for_any_queue(env: BrokerFixture, client: PopClient, queue_id: int) -> None:
    client.suspend()
    assert waiting(client) == 1
    send(env, b"a", queue_id=queue_id)
    assert bodies(env.woken[0]) == [b"a"]
    assert waiting(client) == 0


def test_a_pop_of_one_queue_waits_for_it_only(env: BrokerFixture, client: PopClient) -> None:
    client.suspend(queueId=2)
    send(env, b"a", queue_id=1)
    assert env.woken == []
    assert waiting(client, 2) == 1
    send(env, b"b", queue_id=2)
    assert bodies(env.woken[0]) == [b"b"]


def test_a_pop_waits_as_long_as_its_client(env: BrokerFixture, client: PopClient) -> None:
    suspend = client.suspend(1000)
    assert suspend.deadline_ms == env.now_ms + 950
    env.tick(949)
    assert env.woken == []
    env.tick(1)
    (reply,) = env.woken
    assert (reply.code, reply.remark) == (210, "NO_MESSAGE_IN_QUEUE")
    assert reply.ext == {
        "popTime": str(env.now_ms),
        "invisibleTime": "10000",
        "reviveQid": "0",
        "restNum": "0",
        "startOffsetInfo": "",
        "msgOffsetInfo": "",
    }


def test_a_client_with_a_wrong_clock_does_not_wait_longer(
    env: BrokerFixture, client: PopClient
) -> None:
    ahead = client.suspend(1000, bornTime=env.now_ms + 60_000)
    assert ahead.deadline_ms == env.now_ms + 950
    lag = client.suspend(1000, bornTime=env.now_ms - 500)
    assert lag.deadline_ms == env.now_ms + 450


def test_one_message_wakes_one_of_many(env: BrokerFixture, client: PopClient) -> None:
    serve_by_rules(env)
    tried = []
    attempt = env.broker.pop._try_pop

    def record_call(*arguments: Any, **named: Any) -> Answer:
        tried.append(1)
        return attempt(*arguments, **named)

    for _ in range(50):
        client.suspend()
    env.broker.pop._try_pop = record_call  # type: ignore[method-assign]
    send(env, b"a", queue_id=1)
    assert [bodies(reply) for reply in env.woken] == [[b"a"]]
    assert (len(tried), waiting(client)) == (1, 49)
    send(env, b"b", queue_id=1)
    send(env, b"c", queue_id=2)
    assert [bodies(reply) for reply in env.woken[1:]] == [[b"b"], [b"c"]]
    assert len(tried) == 3


def test_many_messages_wake_as_many_pops_as_needed(env: BrokerFixture, client: PopClient) -> None:
    for _ in range(500):
        client.suspend(maxMsgNums=2)
    send(env, *[b"%d" % n for n in range(600)])
    assert 300 <= len(env.woken) < 320  # a response ends at the end of a queue file
    assert sorted(int(body) for reply in env.woken for body in bodies(reply)) == list(range(600))
    assert waiting(client) == 500 - len(env.woken)


def test_groups_wait_independently(env: BrokerFixture, client: PopClient) -> None:
    other = PopClient(env, group="H")
    other.ack_all(other.pop())
    client.suspend()
    other.suspend()
    send(env, b"a")
    assert [bodies(reply) for reply in env.woken] == [[b"a"], [b"a"]]


def test_a_revived_message_wakes_a_pop(env: BrokerFixture, client: PopClient) -> None:
    send(env, b"a")
    client.pop(invisibleTime=5000)
    assert env.context.topics.get("%RETRY%G_T") is None
    client.suspend(queueId=3)
    advance(env, 5000)
    assert bodies(env.woken[0]) == [b"a"]
    client.suspend(60_000)
    advance(env, 10_000)
    assert [client.read(reply)[0].message.reconsume_times for reply in env.woken] == [1, 2]


def test_the_number_of_suspended_pops_is_limited(tmp_path: Path) -> None:
    settings = pop_settings(pop_waiting_max=5, pop_waiting_per_queue_max=2)
    with broker_fixture(tmp_path / "store", settings) as env:
        env.send(body=b"a")
        env.store.publish()
        for queue_id in (1, 2):
            client = PopClient(env)
            for _ in range(3):
                answer = client.ask(queueId=queue_id, pollTime=1000)
                if env.context.long_polling.in_wait_queues < 5:
                    assert isinstance(answer, Suspend)
        for queue_id in (1, 3):
            answer = client.ask(queueId=queue_id, pollTime=1000)
            assert isinstance(answer, Reply)
            assert answer.code == 209
            notified = client.notify(1000, queueId=queue_id)
            assert notified == Reply(ext={"hasMsg": "false", "pollingFull": "true"})


def test_disconnected_clients_do_not_wait(env: BrokerFixture, client: PopClient) -> None:
    client.suspend()
    env.context.long_polling.drop(1)
    assert (
        waiting(client),
        env.context.long_polling.in_wait_queues,
        len(env.context.long_polling),
    ) == (0, 0, 0)
    client.suspend()
    send(env, b"a")
    assert len(env.woken) == 1


def test_empty_wait_queues_are_removed(env: BrokerFixture, client: PopClient) -> None:
    client.suspend(1000)
    advance(env, pop_polling.CLEANUP_MS + 2000)
    assert env.broker.pop._polling._wait_queues == {}
    assert env.context.long_polling._by_queue == {}
    client.suspend()
    send(env, b"a")
    assert bodies(env.woken[-1]) == [b"a"]


def test_deleting_a_topic_ends_suspended_pops(env: BrokerFixture, client: PopClient) -> None:
    for _ in range(3):
        client.suspend()
    woken: list[Any] = []

    def wake(suspended: Any, last: bool) -> None:
        try:
            suspended.suspend.retry(last)
        except Exception as error:
            woken.append(error)

    env.context.long_polling.on_wake(wake)
    assert env.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}).code == 0
    assert [type(error).__name__ for error in woken] == ["TopicNotExist"] * 3


def test_a_recreated_topic_wakes_pops(env: BrokerFixture, client: PopClient) -> None:
    client.suspend(1000)
    env.tick(2000)
    config = env.context.topics.need("T")
    assert env.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}).code == 0
    env.context.topics.put(config, env.now_ms)
    client.suspend()
    send(env, b"new")
    assert bodies(env.woken[-1]) == [b"new"]


# --- notifications


def test_notifications_report_messages(env: BrokerFixture, client: PopClient) -> None:
    no = Reply(ext={"hasMsg": "false", "pollingFull": "false"})
    yes = Reply(ext={"hasMsg": "true", "pollingFull": "false"})
    assert client.notify() == no
    assert isinstance(client.notify(15_000), Suspend)
    send(env, b"a", queue_id=2)
    assert env.woken == [yes]
    assert client.notify() == yes
    assert client.notify(queueId=2) == yes
    assert client.notify(queueId=1) == no
    client.pop(invisibleTime=5000)
    assert client.notify() == no
    assert isinstance(client.notify(15_000), Suspend)
    advance(env, 5000)
    assert env.woken[1:] == [yes]
    assert client.notify() == yes
    client.pop()
    assert isinstance(client.notify(1000), Suspend)
    advance(env, 1000)
    assert env.woken[2:] == [no]


def test_each_message_notifies_one_request(env: BrokerFixture, client: PopClient) -> None:
    for _ in range(10):
        assert isinstance(client.notify(15_000), Suspend)
    send(env, b"a", b"b", b"c", queue_id=2)
    assert len(env.woken) == 3
    send(env, b"d", queue_id=1)
    assert len(env.woken) >= 4


def test_a_message_notifies_the_newest_request_as_in_rocketmq(
    env: BrokerFixture, client: PopClient
) -> None:
    assert isinstance(client.notify(1_000), Suspend)
    assert isinstance(client.notify(15_000), Suspend)
    send(env, b"a")
    client.pop()
    advance(env, 1_000)
    older = Reply(ext={"hasMsg": "false", "pollingFull": "false"})
    assert env.woken == [Reply(ext={"hasMsg": "true", "pollingFull": "false"}), older]


# --- peeks


def test_peeking_changes_nothing(env: BrokerFixture, client: PopClient) -> None:
    send(env, b"a", b"b", queue_id=1)
    ext = {"consumerGroup": "G", "topic": "T", "queueId": "-1", "maxMsgNums": "32"}
    for _ in range(6):
        reply = env.ask(RequestCode.PEEK_MESSAGE, ext)
        assert bodies(reply) == [b"a", b"b"]
        assert reply.ext is not None
        assert reply.ext["restNum"] == "2"
    client.pop(invisibleTime=5000)
    assert env.ask(RequestCode.PEEK_MESSAGE, ext).code == 19
    advance(env, 5000)
    env.store.publish()
    assert bodies(env.ask(RequestCode.PEEK_MESSAGE, ext)) == [b"a", b"b"]


# --- messages that are not in memory


@pytest.fixture
def cold(env: BrokerFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_by_rules(env)

    def from_disk(*arguments: Any, wait: bool, **named: Any) -> ReadBatch | None:
        return read_messages(*arguments, wait=True, **named) if wait else None

    monkeypatch.setattr(pop_module, "read_messages", from_disk)


def begin(client: PopClient, **ext: Any) -> InThread:
    """Run a pop up to its read in the thread pool."""
    env = client.env
    taken: list[Answer] = []
    finish = env.finish
    env.finish = taken.append  # type: ignore[method-assign, assignment]
    try:
        client.ask(**ext)
    finally:
        env.finish = finish  # type: ignore[method-assign]
    (job,) = taken
    assert isinstance(job, InThread)
    return job


@pytest.mark.usefixtures("cold")
def test_messages_on_disk_are_read_in_the_thread_pool(
    env: BrokerFixture, client: PopClient
) -> None:
    send(env, b"a", b"b")
    assert client.bodies() == [b"a", b"b"]
    assert client.pop() == []


@pytest.mark.usefixtures("cold")
def test_a_queue_in_read_is_skipped_by_other_pops(env: BrokerFixture, client: PopClient) -> None:
    send(env, b"a", b"b")
    job = begin(client)
    found = job.work()
    assert client.pop() == []
    client.suspend(maxMsgNums=1)
    send(env, b"c")
    assert env.woken == []
    answer = job.then(found)
    assert bodies(answer) == [b"a", b"b"]
    assert [bodies(reply) for reply in env.woken] == [[b"c"]]


@pytest.mark.usefixtures("cold")
def test_a_failed_read_releases_the_queue(
    env: BrokerFixture, client: PopClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(env, b"a")
    job = begin(client)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(pop_module, "read_messages", fail)
        found = job.work()
    with pytest.raises(OSError, match="no"):
        job.then(found)
    assert client.bodies() == [b"a"]


@pytest.mark.usefixtures("cold")
def test_a_reset_during_a_read_is_applied(env: BrokerFixture, client: PopClient) -> None:
    send(env, b"a", b"b")
    job = begin(client)
    found = job.work()
    env.context.offsets.reset("G", "T", {0: 2}, env.now_ms)
    assert bodies(env.finish(job.then(found))) == [b"b"]
