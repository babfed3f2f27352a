"""POP of topics with more queues than one step looks at."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.pop import pop_message, pop_notification, pop_polling
from penstock.errors import TopicNotExist
from penstock.rpc.answers import Answer, NextIteration, Reply, Suspend
from penstock.rpc.command import Command
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.message import decode_messages
from tests.unit.broker.broker_kit import BrokerFixture, bodies, broker_fixture
from tests.unit.broker.pop.pop_kit import PopClient, advance

STEP = 3
QUEUES = 10


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerFixture]:
    for module in (pop_message, pop_notification, pop_polling):
        monkeypatch.setattr(module, "QUEUES_PER_STEP", STEP)
    with broker_fixture(tmp_path / "store") as made:
        create(made)
        yield made


def create(env: BrokerFixture) -> None:
    ext = {"topic": "T", "readQueueNums": str(QUEUES), "writeQueueNums": str(QUEUES), "perm": "6"}
    assert env.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, ext).code == 0


def make_queues(env: BrokerFixture) -> None:
    """Make the queues, as if they had had messages once."""
    for queue_id in range(QUEUES):
        assert env.store.make_queue(b"T", queue_id) is not None


def begin(env: BrokerFixture, code: int = RequestCode.POP_MESSAGE, **ext: str) -> Answer:
    """The answer of a pop or notification after its first step."""
    fields = {
        "consumerGroup": "G",
        "topic": "T",
        "queueId": "-1",
        "maxMsgNums": "32",
        "invisibleTime": "10000",
        "pollTime": "15000",
        "bornTime": str(env.now_ms),
        "initMode": "1",
        "order": "false",
    }
    return env.broker.handle(Command(code, fields | ext, now_ms=env.now_ms, client=1))


def run(answer: Answer, steps: int) -> Answer:
    for _ in range(steps):
        if isinstance(answer, NextIteration):
            answer = answer.then()
    return answer


def finish(env: BrokerFixture, answer: Answer) -> Answer:
    answer = env.finish(answer)
    if isinstance(answer, Suspend):
        env.context.long_polling.add(1, 9, answer)
    return answer


def assert_not_missed(env: BrokerFixture, code: int, answer: Answer, queue_id: int) -> None:
    """A message that arrives now, before the request has its answer, is found by it."""
    if isinstance(answer, Suspend):
        env.context.long_polling.add(1, 9, answer)
    env.send(queue_id=queue_id, body=b"a")
    env.store.publish()
    if not isinstance(answer, Suspend):
        answer = finish(env, answer)
    if isinstance(answer, Suspend):
        (answer,) = env.woken
    assert isinstance(answer, Reply)
    if code == RequestCode.POP_MESSAGE:
        assert bodies(answer) == [b"a"]
    else:
        assert (answer.ext or {})["hasMsg"] == "true"


def test_a_pop_looks_at_few_queues_in_each_step(
    env: BrokerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    store_queue = env.store.queue

    def count(topic: str, queue_id: int) -> object:
        looked.append(queue_id)
        return store_queue(topic, queue_id)

    monkeypatch.setattr(env.store, "queue", count)
    answer = begin(env)
    per_step = [len(looked)]
    while isinstance(answer, NextIteration):
        answer = answer.then()
        per_step.append(len(looked) - sum(per_step))
    assert isinstance(answer, Suspend)
    assert set(looked) == set(range(QUEUES))
    assert max(per_step) <= 3 * STEP  # its offset needs two more lookups of the queue


@pytest.mark.parametrize("code", [RequestCode.POP_MESSAGE, RequestCode.NOTIFICATION])
@pytest.mark.parametrize("queue_id", [0, 1, 2, 3, 8, 9])
@pytest.mark.parametrize("steps", range(12))
@pytest.mark.parametrize("made", [True, False])
def test_a_message_between_the_steps_is_not_missed(
    env: BrokerFixture, code: int, queue_id: int, steps: int, made: bool
) -> None:
    if made:
        make_queues(env)
    answer = run(begin(env, code), steps)
    assert_not_missed(env, code, answer, queue_id)


def test_all_messages_of_many_queues_are_delivered_once(env: BrokerFixture) -> None:
    client = PopClient(env)
    for queue_id in range(QUEUES):
        env.send(queue_id=queue_id, body=b"%d" % queue_id)
    env.store.publish()
    found = []
    while popped := client.pop():
        found += [one.body for one in popped]
    assert sorted(found) == [b"%d" % queue_id for queue_id in range(QUEUES)]


def test_a_pop_that_has_not_looked_at_all_queues_wakes_the_next(env: BrokerFixture) -> None:
    for _ in range(3):
        finish(env, begin(env))
    env.many(b"".join(env.send_frame(queue_id=q, body=b"%d" % q) for q in (0, 4, 8)))
    assert sorted(body for reply in env.woken for body in bodies(reply)) == [b"0", b"4", b"8"]


def test_without_polling_time_a_pop_watches_no_queue(env: BrokerFixture) -> None:
    answer = finish(env, begin(env, pollTime="0"))
    assert isinstance(answer, Reply)
    assert answer.code == 210
    assert env.store.queue("T", QUEUES - 1) is None or env.context.long_polling._by_queue == {}


@pytest.mark.parametrize("steps", [0, 2, 5])
def test_a_topic_that_is_deleted_between_the_steps_ends_the_pop(
    env: BrokerFixture, steps: int
) -> None:
    make_queues(env)
    answer = run(begin(env), steps)
    assert isinstance(answer, NextIteration)
    assert env.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}).code == 0
    with pytest.raises(TopicNotExist):
        env.finish(answer)
    assert env.context.offsets.groups_of_topic("T") == []
    assert env.store.queues.of(b"T") == []


def test_a_changed_topic_is_searched_again(env: BrokerFixture) -> None:
    make_queues(env)
    answer = run(begin(env), 5)
    assert isinstance(answer, NextIteration)
    assert env.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}).code == 0
    create(env)
    env.send(queue_id=0, body=b"new")
    env.store.publish()
    assert bodies(env.finish(answer)) == [b"new"]


def test_a_peek_looks_at_all_queues(env: BrokerFixture) -> None:
    for queue_id in (1, 5, 9):
        env.send(queue_id=queue_id, body=b"%d" % queue_id)
    env.store.publish()
    for _ in range(2 * pop_notification.RETRY_EVERY):
        answer = env.finish(begin(env, RequestCode.PEEK_MESSAGE))
        assert isinstance(answer, Reply)
        found = sorted(message.body for message in decode_messages(answer.body))
        assert (found, (answer.ext or {})["restNum"]) == ([b"1", b"5", b"9"], "3")


def test_wait_queues_of_many_queues_are_removed_in_several_ticks(
    env: BrokerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pop_polling, "UNWATCHED_PER_TICK", 4)
    make_queues(env)
    finish(env, begin(env, pollTime="1000"))
    assert len(env.context.long_polling._by_queue) == QUEUES
    advance(env, pop_polling.CLEANUP_MS + 2000)
    for _ in range(QUEUES):
        env.tick(1000)
    assert env.context.long_polling._by_queue == {}


# --- topics with very many queues that are not used


WIDE = 1_000_000


def create_wide(env: BrokerFixture) -> None:
    ext = {"topic": "T", "readQueueNums": str(WIDE), "writeQueueNums": str(WIDE), "perm": "6"}
    assert env.ask(RequestCode.UPDATE_AND_CREATE_TOPIC, ext).code == 0


@pytest.mark.parametrize("code", [RequestCode.POP_MESSAGE, RequestCode.NOTIFICATION])
def test_a_suspended_request_makes_no_queues(env: BrokerFixture, code: int) -> None:
    create_wide(env)
    made = len(env.store.queues.of(b"T"))
    answer = finish(env, begin(env, code, initMode="0"))
    assert isinstance(answer, Suspend)
    assert len(env.store.queues.of(b"T")) == made
    assert len(env.context.long_polling._by_queue) <= made


@pytest.mark.parametrize("code", [RequestCode.POP_MESSAGE, RequestCode.NOTIFICATION])
@pytest.mark.parametrize("steps", range(4))
def test_the_first_message_of_a_queue_wakes_a_request(
    env: BrokerFixture, code: int, steps: int
) -> None:
    create_wide(env)
    env.send(queue_id=7, body=b"before")
    env.store.publish()
    client = PopClient(env)
    client.ack_all(client.pop())
    answer = run(begin(env, code, initMode="0"), steps)
    assert_not_missed(env, code, answer, WIDE - 1)


def test_a_message_that_arrives_before_the_request_is_added_wakes_it(env: BrokerFixture) -> None:
    create_wide(env)
    answer = env.finish(begin(env, initMode="0"))
    assert isinstance(answer, Suspend)
    env.send(queue_id=WIDE - 1, body=b"a")
    env.store.publish()
    env.context.long_polling.add(1, 9, answer)
    (reply,) = env.woken
    assert isinstance(reply, Reply)
    assert bodies(reply) == [b"a"]


def test_queues_in_use_are_popped_in_turn(env: BrokerFixture) -> None:
    create_wide(env)
    for queue_id in (WIDE - 1, 5):
        for _ in range(4):
            env.send(queue_id=queue_id, body=b"%d" % queue_id)
    env.store.publish()
    client = PopClient(env)
    popped = [body for _ in range(8) for body in client.bodies(maxMsgNums=1)]
    assert len(popped) == 8
    assert set(popped[:4]) == {b"5", b"%d" % (WIDE - 1)}


def test_a_request_for_one_queue_is_woken_by_its_first_message(env: BrokerFixture) -> None:
    create_wide(env)
    assert isinstance(finish(env, begin(env, queueId="900000")), Suspend)
    env.send(queue_id=900_001, body=b"other")
    env.store.publish()
    assert env.woken == []
    env.send(queue_id=900_000, body=b"a")
    env.store.publish()
    (reply,) = env.woken
    assert isinstance(reply, Reply)
    assert bodies(reply) == [b"a"]


def test_wait_queues_are_forgotten_with_their_topic(env: BrokerFixture) -> None:
    create_wide(env)
    finish(env, begin(env, initMode="0", pollTime="1000"))
    advance(env, 130_000)
    assert env.broker.pop._polling._groups == {}
    assert env.broker.pop._polling._wait_queues == {}
    env.send(queue_id=WIDE - 1, body=b"a")  # nobody waits


def test_a_group_can_not_begin_with_the_newest_message_of_very_many_queues(
    env: BrokerFixture,
) -> None:
    create_wide(env)
    refused = begin(env, initMode="1")
    assert isinstance(refused, Reply)
    assert refused.code == ResponseCode.INVALID_PARAMETER
    assert "1000000 queues, the limit is 100000" in (refused.remark or "")
    assert env.context.offsets.groups_of_topic("T") == []
    assert isinstance(finish(env, begin(env, initMode="1", queueId="7")), Suspend)
