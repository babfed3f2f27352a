"""Commits of offsets in place: the usual ones, and what ends them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.broker.consumers.offset_requests import OffsetRequests
from penstock.rpc.answers import Answer, Reply
from penstock.rpc.command import Command
from penstock.wire.bodies.client_bodies import SubscriptionGroupConfig, TopicConfig
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.frame import BINARY, JSON
from penstock.wire.output import encode
from tests.unit.broker.broker_kit import NOW_MS, BrokerFixture, broker_fixture

TOPIC = TopicConfig(topic_name="T", read_queue_nums=2, write_queue_nums=2)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[BrokerFixture]:
    with broker_fixture(tmp_path / "store") as made:
        made.context.topics.put(TOPIC, NOW_MS)
        made.context.groups.put(SubscriptionGroupConfig(group_name="G"), NOW_MS)
        made.send()
        yield made


@pytest.fixture
def unusual(monkeypatch: pytest.MonkeyPatch) -> list[Command]:
    """The commits that are not the usual ones."""
    commit, found = OffsetRequests.commit, list[Command]()

    def count(self: OffsetRequests, command: Command) -> Answer:
        found.append(command)
        return commit(self, command)

    monkeypatch.setattr(OffsetRequests, "commit", count)
    return found


def commit(
    env: BrokerFixture, offset: int | None, *, encoding: int = JSON, oneway: bool = False,
    **changed: object,
) -> Answer:  # fmt: skip
    fields = {"consumerGroup": "G", "topic": "T", "queueId": 0, "commitOffset": offset} | changed
    ext = {name: str(value) for name, value in fields.items() if value is not None}
    code = RequestCode.UPDATE_CONSUMER_OFFSET
    return env.frame(encode(code, ext, opaque=3, encoding=encoding, flag=2 * oneway))


def code(answer: Answer) -> int:
    assert isinstance(answer, Reply)
    return answer.code


def committed(env: BrokerFixture, queue_id: int = 0) -> int | None:
    return env.context.offsets.get("G", "T", queue_id)


def known(env: BrokerFixture, unusual: list[Command]) -> None:
    assert (code(commit(env, 1)), len(unusual)) == (0, 1)
    assert (code(commit(env, 2)), len(unusual)) == (0, 1)
    assert committed(env) == 2


@pytest.mark.parametrize("encoding", [JSON, BINARY])
def test_the_next_commits_are_answered_as_the_first(
    env: BrokerFixture, unusual: list[Command], encoding: int
) -> None:
    first = commit(env, 7, encoding=encoding)
    assert commit(env, 3, encoding=encoding) == first == Reply(0, {})
    assert committed(env) == 3, "it may be smaller"
    assert len(unusual) == 1
    assert env.request_loop.answered == {RequestCode.UPDATE_CONSUMER_OFFSET << 16: 2}


def test_a_one_way_commit_is_not_answered(env: BrokerFixture, unusual: list[Command]) -> None:
    assert commit(env, 1, oneway=True) is None
    assert commit(env, 2, oneway=True) is None
    assert (committed(env), len(unusual)) == (2, 1)
    assert env.request_loop.answered == {}


def test_an_invalid_commit_is_refused(env: BrokerFixture, unusual: list[Command]) -> None:
    known(env, unusual)
    assert code(commit(env, -1)) == ResponseCode.INVALID_PARAMETER
    for wrong in ({"topic": None}, {"queueId": "x"}, {"consumerGroup": ""}, {"commitOffset": "x"},
                  {"commitOffset": None}, {"queueId": -1}, {"queueId": 2}):  # fmt: skip
        assert code(commit(env, 5, **wrong)) != 0
    assert committed(env) == 2


def test_a_commit_to_a_deleted_topic_is_refused(env: BrokerFixture, unusual: list[Command]) -> None:
    known(env, unusual)
    config = env.context.topics.need("T")
    for _ in env.context.topics.delete("T", NOW_MS):
        pass
    assert code(commit(env, 5)) == ResponseCode.TOPIC_NOT_EXIST
    fewer = TopicConfig(topic_name="T", read_queue_nums=0, write_queue_nums=0)
    env.context.topics.put(fewer, NOW_MS)
    assert code(commit(env, 5)) == ResponseCode.INVALID_PARAMETER
    env.context.topics.put(config, NOW_MS)  # the same object
    assert (code(commit(env, 6)), len(unusual)) == (0, 4)


def test_a_topic_without_the_config_of_before_is_looked_up(
    env: BrokerFixture, unusual: list[Command]
) -> None:
    known(env, unusual)
    env.context.topics.table.remove("T", NOW_MS)  # and the queue is not deleted yet, as at a slave
    assert code(commit(env, 5)) == ResponseCode.TOPIC_NOT_EXIST


def test_a_commit_of_a_deleted_group_is_refused(env: BrokerFixture, unusual: list[Command]) -> None:
    known(env, unusual)
    env.context.groups.delete("G", NOW_MS)
    assert code(commit(env, 5)) == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert committed(env) == 2


def test_a_commit_does_not_undo_a_reset(env: BrokerFixture, unusual: list[Command]) -> None:
    known(env, unusual)
    env.context.offsets.reset("G", "T", {0: 1}, NOW_MS)
    answer = commit(env, 5)
    assert isinstance(answer, Reply)
    assert "reset" in (answer.remark or "")
    assert committed(env) == 1
    assert env.context.offsets.take_reset("G", "T", 0) == 1
    assert (code(commit(env, 5)), committed(env)) == (0, 5)
