"""Pops of what is resolved already: the usual ones, and what ends them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.errors import DiskFull, NoPermission
from penstock.rpc.answers import Answer, Reply
from penstock.rpc.command import Command
from penstock.wire.bodies.client_bodies import TopicConfig
from penstock.wire.codes import RequestCode, ResponseCode
from tests.unit.broker.broker_kit import NOW_MS, BrokerFixture, bodies
from tests.unit.broker.pop.pop_kit import PopClient, Popped, advance

QUEUES = 4


class Fixture(BrokerFixture):
    """A broker that counts the pops that are not the usual ones."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.unusual = 0
        pop = self.broker.pop
        read = pop.read

        def count(command: Command) -> Any:
            self.unusual += 1
            return read(command)

        pop.read = count  # type: ignore[method-assign]


@pytest.fixture
def env(tmp_path: Path) -> Iterator[Fixture]:
    made = Fixture(tmp_path / "store")
    put_topic(made)
    for number in range(40):
        made.send(body=b"%d" % number, queue_id=number % 2, tag="ab"[number % 2])
    yield made
    made.close()


@pytest.fixture
def client(env: Fixture) -> PopClient:
    """A client whose pops are resolved: the group has offsets in all queues."""
    client = PopClient(env)
    client.ack_all(client.pop(maxMsgNums=2))
    client.ack_all(client.pop(maxMsgNums=2))
    env.unusual = 0
    client.ack_all(client.pop(maxMsgNums=1))
    assert env.unusual == 0, "it is a usual one"
    return client


def put_topic(env: BrokerFixture, **changes: Any) -> None:
    config = TopicConfig(topic_name="T", read_queue_nums=QUEUES, write_queue_nums=QUEUES)
    env.context.topics.put(msgspec.structs.replace(config, **changes), NOW_MS)


def code(answer: Answer) -> int:
    assert isinstance(answer, Reply)
    return answer.code


def of_queue(popped: list[Popped], queue_id: int) -> list[bytes]:
    return [one.body for one in popped if one.message.queue_id == queue_id]


def test_a_pop_takes_the_rest_from_the_next_queue(env: Fixture, client: PopClient) -> None:
    popped = client.pop(maxMsgNums=32) + client.pop(maxMsgNums=32)
    assert len(popped) == 35
    assert env.unusual == 0
    assert {one.message.queue_id for one in popped} == {0, 1}
    assert len(env.broker.pop.revive_log.checkpoints) == 3
    client.ack_batch(popped)
    assert client.pop() == []
    assert env.unusual == 1, "a pop that finds nothing"


def test_queues_take_turns(env: Fixture, client: PopClient) -> None:
    queues = [client.pop(maxMsgNums=1)[0].message.queue_id for _ in range(8)]
    assert env.unusual == 0
    assert set(queues) == {0, 1}


def test_messages_in_flight_are_revived(env: Fixture, client: PopClient) -> None:
    popped = client.pop(maxMsgNums=4, invisibleTime=5_000)
    advance(env, 5_000)
    env.store.publish()
    assert env.unusual == 0
    found = client.pop(maxMsgNums=32) + client.pop(maxMsgNums=32)
    assert env.unusual > 0, "messages of the retry topic are rewritten"
    assert {one.body for one in popped} <= {one.body for one in found}


def test_a_new_queue_is_read(env: Fixture, client: PopClient) -> None:
    env.send(body=b"new", queue_id=3)
    found = client.pop() + client.pop()
    assert of_queue(found, 3) == [b"new"]


def test_tags_and_filters_are_told_apart(env: Fixture) -> None:
    client = PopClient(env, group="H")
    for _ in range(3):
        assert len(client.pop(exp="a", maxMsgNums=2)) == 2
    for _ in range(3):
        assert {one.body for one in client.pop(exp="b", maxMsgNums=1)} <= {
            b"%d" % number for number in range(1, 40, 2)
        }
    other = PopClient(env, group="I")
    assert len(other.pop(exp="a", maxMsgNums=1)) == 1
    assert len(other.pop(exp="TAGS = 'a'", expType="SQL92", maxMsgNums=1)) == 1
    assert other.pop(exp="a", expType="SQL92") == [], "no message has a property a"


def test_deliveries_are_counted(env: Fixture, client: PopClient) -> None:
    stats = env.context.stats
    before = stats.groups["T", "G"].nums
    client.pop(maxMsgNums=7)
    assert env.unusual == 0
    assert stats.groups["T", "G"].nums == before + 7
    assert stats.batches["T", "G"].times == stats.groups["T", "G"].times


@pytest.mark.parametrize("change", ["perm", "group", "forbidden", "broker", "deleted"])
def test_a_pop_that_is_no_longer_allowed_is_refused(
    env: Fixture, client: PopClient, change: str
) -> None:
    context = env.context
    if change == "perm":
        put_topic(env, perm=2)
    elif change == "group":
        config = context.groups.find("G", NOW_MS)
        context.groups.put(msgspec.structs.replace(config, consume_enable=False), NOW_MS)
    elif change == "forbidden":
        context.groups.allow_reading("G", "T", allowed=False, now_ms=NOW_MS)
    elif change == "broker":
        broker = msgspec.structs.replace(env.live.current.broker, permission=2)
        env.live.current = msgspec.structs.replace(env.live.current, broker=broker)
    else:
        assert env.ask(RequestCode.DELETE_TOPIC_IN_BROKER, {"topic": "T"}).code == 0
    refused = ResponseCode.TOPIC_NOT_EXIST if change == "deleted" else ResponseCode.NO_PERMISSION
    assert code(client.ask()) == refused


def test_a_master_that_steps_down_refuses_everything(env: Fixture, client: PopClient) -> None:
    popped = client.pop(maxMsgNums=2)
    client.ack(popped[0])
    client.change(popped[1], 1_000)
    end = env.store.log.end
    env.broker.role.steps_down = True
    refusals = [client.ask(), client.ack(popped[1]), client.ask_change(popped[1], 1_000)]
    assert refusals == [client.ack_batch(popped)] * 3, "which is never handled in place"
    assert "no longer the master" in (refusals[0].remark or "")
    assert env.store.log.end == end
    env.broker.role.steps_down = False
    assert client.ack(popped[1]).code == 0


def test_a_reset_is_applied_by_the_next_pop(env: Fixture, client: PopClient) -> None:
    env.context.offsets.reset("G", "T", {0: 19, 1: 20, 2: 0, 3: 0}, env.now_ms)
    assert client.bodies() == [b"38"]


def test_the_settings_of_the_broker_apply_at_once(env: Fixture, client: PopClient) -> None:
    broker = msgspec.structs.replace(env.live.current.broker, pop_batches_max=1)
    env.live.current = msgspec.structs.replace(env.live.current, broker=broker)
    assert len(client.pop(maxMsgNums=1)) == 1
    assert code(client.ask()) == ResponseCode.SYSTEM_BUSY


def test_a_pop_without_a_checkpoint_delivers_nothing(env: Fixture, client: PopClient) -> None:
    before = dict(env.context.offsets.queues("G", "T"))
    env.store.writer.refusal = DiskFull("no room")
    assert code(client.ask()) != 0
    assert dict(env.context.offsets.queues("G", "T")) == before
    assert len(env.broker.pop.revive_log.checkpoints) == 0
    env.store.writer.refusal = None
    assert client.bodies(maxMsgNums=1)


@pytest.fixture
def searches(env: Fixture, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has an item for each search by the rules."""
    made: list[int] = []
    search = env.broker.pop._search

    def count(*given: Any) -> Answer:
        made.append(1)
        return search(*given)

    monkeypatch.setattr(env.broker.pop, "_search", count)
    return made


@pytest.fixture
def waiting(env: Fixture, client: PopClient) -> PopClient:
    """A client that has consumed everything, and has a pop that waits."""
    while popped := client.pop():
        client.ack_all(popped)
    client.suspend(maxMsgNums=1)
    return client


def test_a_waiting_pop_gets_what_another_one_has_left(
    env: Fixture, waiting: PopClient, searches: list[int]
) -> None:
    waiting.suspend(maxMsgNums=1)
    searches.clear()
    env.many(env.send_frame(body=b"x") + env.send_frame(body=b"y"))
    assert [bodies(reply) for reply in env.woken] == [[b"x"], [b"y"]]
    assert not searches, "the usual wake-ups"
    assert len(env.context.long_polling) == 0


def test_a_woken_pop_that_finds_nothing_waits_until_its_deadline(
    env: Fixture, waiting: PopClient, searches: list[int]
) -> None:
    searches.clear()
    env.broker.pop._polling.wake("T", "G", -1)
    assert searches == [1]
    env.send(body=b"x")
    assert [bodies(reply) for reply in env.woken] == [[b"x"]]
    assert searches == [1], "the second wake-up is a usual one"
    waiting.suspend(1_000)
    env.tick(1_000)
    assert [code(reply) for reply in env.woken] == [0, ResponseCode.POLLING_TIMEOUT]


def test_a_woken_pop_that_is_no_longer_allowed_is_refused(env: Fixture, waiting: PopClient) -> None:
    put_topic(env, perm=2)
    with pytest.raises(NoPermission):
        env.broker.pop._polling.wake("T", "G", -1)
    assert env.woken == []


def test_a_woken_pop_has_the_settings_of_now(env: Fixture, waiting: PopClient) -> None:
    broker = msgspec.structs.replace(env.live.current.broker, pop_in_flight_max=1)
    limited = msgspec.structs.replace(broker, pop_in_flight_limited=True)
    env.live.current = msgspec.structs.replace(env.live.current, broker=limited)
    env.send(body=b"x")
    assert len(env.woken) == 1
    env.send(body=b"y")
    assert waiting.bodies(maxMsgNums=1) == [b"y"]
    env.send(body=b"z")
    assert waiting.pop() == [], "two messages of the queue are in flight"
