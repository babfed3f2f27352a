"""Pulls of what is resolved already: the usual ones, and what ends them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.broker.pull.pull_handler import SuspendedPull
from penstock.rpc.answers import Answer, Reply, Suspend
from penstock.wire.bodies.client_bodies import SubscriptionGroupConfig, TopicConfig
from penstock.wire.codes import RequestCode, ResponseCode
from penstock.wire.frame import BINARY, JSON
from penstock.wire.output import encode
from tests.unit.broker.broker_kit import NOW_MS, BrokerFixture, bodies, broker_fixture
from tests.unit.broker.pull.test_pull_message import offsets, subscription

FOUND, NOT_FOUND, AGAIN, MOVED = 0, 19, 20, 21
NO_PERMISSION, NO_TOPIC, NO_GROUP = 16, 17, 26
OWN, HEARTBEAT = 4, 0
TOPIC = TopicConfig(topic_name="T", read_queue_nums=2, write_queue_nums=2)


class Fixture(BrokerFixture):
    """A broker that counts the pulls that are not the usual ones."""

    def __init__(self, root: Path, *rest: Any, **more: Any) -> None:
        super().__init__(root, *rest, **more)
        requests = self.broker.pull.requests
        handle, retry = requests.handle, requests.retry
        self.unusual = 0

        def counting(function: Callable[..., Answer]) -> Callable[..., Answer]:
            def count(*given: object) -> Answer:
                self.unusual += 1
                return function(*given)

            return count

        requests.handle, requests.retry = counting(handle), counting(retry)


@pytest.fixture
def env(tmp_path: Path) -> Iterator[Fixture]:
    made = Fixture(tmp_path / "store")
    made.context.topics.put(TOPIC, NOW_MS)
    for number in range(4):
        made.send(body=bytes([number]), tag="ab"[number % 2])
    made.heartbeat(subscription("*", 5))
    yield made
    made.close()


def known(env: Fixture, flags: int = OWN, **ext: Any) -> None:
    """Pull until what is pulled is resolved."""
    assert bodies(env.pull(0, flags=flags, **ext))
    before = env.unusual
    assert bodies(env.pull(0, flags=flags, **ext))
    assert env.unusual == before, "the second pull is a usual one"


def code(answer: Answer) -> int:
    assert isinstance(answer, Reply)
    return answer.code


@pytest.mark.parametrize("encoding", [JSON, BINARY])
@pytest.mark.parametrize("flags", [OWN, HEARTBEAT])
def test_the_next_pulls_are_answered_as_the_first(env: Fixture, flags: int, encoding: int) -> None:
    first = env.pull(1, flags=flags, encoding=encoding, maxMsgNums=2)
    assert env.unusual == 1
    assert env.pull(1, flags=flags, encoding=encoding, maxMsgNums=2) == first
    assert bodies(env.pull(3, flags=flags, encoding=encoding)) == [b"\3"]
    assert len(bodies(env.pull(0, flags=flags, maxMsgBytes=1))) == 1
    assert env.unusual == 1
    assert offsets(first) == (FOUND, 3, 0, 4)
    assert offsets(env.pull(9, flags=flags)) == (MOVED, 4, 0, 4)
    assert offsets(env.pull(-1, flags=flags)) == (MOVED, 0, 0, 4)
    assert offsets(env.pull(4, flags=flags)) == (NOT_FOUND, 4, 0, 4)


def test_what_is_pulled_is_found_by_all_of_its_names(env: Fixture) -> None:
    known(env)
    assert bodies(env.pull(0, subscription="b")) == [b"\1", b"\3"]
    assert bodies(env.pull(0, subscription="b")) == [b"\1", b"\3"], "the usual one"
    assert bodies(env.pull(0, subscription="a")) == [b"\0", b"\2"]
    assert bodies(env.pull(0, subscription=None)) == [b"\0", b"\1", b"\2", b"\3"]
    assert offsets(env.pull(0, queueId=1)) == (NOT_FOUND, 0, 0, 0)
    assert bodies(env.pull(0, consumerGroup="H"))
    assert env.unusual == 6
    assert code(env.pull(0, queueId=None)) != 0
    assert code(env.pull(0, queueId=-1)) == ResponseCode.INVALID_PARAMETER
    assert code(env.pull(0, consumerGroup="GT", topic="")) != 0
    assert code(env.pull(0, topic="TG")) == NO_TOPIC
    assert code(env.pull(0, consumerGroup=None)) != 0


def test_a_long_expression_is_resolved_each_time(env: Fixture) -> None:
    env.send(tag="x" * 250, body=b"long")
    known(env, subscription="x" * 250 + " || a")
    before = env.unusual
    for _ in range(2):
        tags = "x" * 250 + " ||    a"
        assert bodies(env.pull(0, subscription=tags)) == [b"\0", b"\2", b"long"]
    assert env.unusual == before + 2


def test_a_filter_is_never_a_tag(env: Fixture) -> None:
    known(env, subscription="a")
    assert code(env.pull(0, subscription="a", expressionType="SQL92")) == AGAIN
    assert code(env.pull(0, subscription="a", expressionType="")) == FOUND
    assert bodies(env.pull(0, subscription="TAGS = 'b'", expressionType="SQL92")) == [b"\1", b"\3"]
    assert bodies(env.pull(0, subscription="TAGS = 'b'", expressionType="SQL92")) == [b"\1", b"\3"]


def test_an_expression_of_a_heartbeat_is_a_filter_too(env: Fixture) -> None:
    known(env, OWN, subscription="")
    sql = msgspec.structs.replace(
        subscription("TAGS = 'b'", 6), expression_type="SQL92", code_set=frozenset()
    )
    env.heartbeat(sql)
    for _ in range(3):
        assert bodies(env.pull(0, flags=HEARTBEAT, subscription=None)) == [b"\1", b"\3"]
        assert len(bodies(env.pull(0, flags=OWN, subscription=""))) == 4
    env.heartbeat(subscription("a", 7))
    for _ in range(3):
        assert bodies(env.pull(0, flags=HEARTBEAT, subscription=None)) == [b"\0", b"\2"]
        assert len(bodies(env.pull(0, flags=OWN, subscription=None))) == 4


@pytest.mark.parametrize("flags", [OWN, HEARTBEAT])
def test_deliveries_are_counted(env: Fixture, flags: int) -> None:
    for _ in range(3):
        env.pull(1, flags=flags)
    assert env.unusual == 1
    flow = env.context.stats.groups["T", "G"]
    assert (flow.nums, flow.times, flow.behind_ms) == (9, 3, 0)
    assert flow.size == 3 * sum(len(env.store.get("T", 0, n, count_max=1).data) for n in (1, 2, 3))
    assert env.context.stats.runtime()["msgGetTotalTodayNow"] == "9"
    assert env.context.offsets.pulled("G", "T", 0) == 1


def test_the_counter_of_a_deleted_group_is_not_used_again(env: Fixture) -> None:
    known(env)
    for _ in env.context.stats.forget_group("G"):
        pass
    for _ in env.context.offsets.remove_group("G", NOW_MS):
        pass
    env.pull(3)
    assert env.unusual == 1
    assert env.context.stats.groups["T", "G"].nums == 1
    assert env.context.offsets.pulled("G", "T", 0) == 3


def test_a_usual_pull_commits_its_offset(env: Fixture) -> None:
    known(env)
    env.pull(3, flags=OWN | 1, commitOffset=2)
    assert env.context.offsets.get("G", "T", 0) == 2
    assert isinstance(env.pull(4, flags=OWN | 3, commitOffset=3), Suspend)
    assert env.context.offsets.get("G", "T", 0) == 3
    assert env.context.offsets.pulled("G", "T", 0) == 4
    assert env.unusual == 1
    assert code(env.pull(4, flags=OWN | 1, commitOffset=None)) != 0


# --- what ends the usual way


def test_changed_settings_apply_to_the_next_pull(env: Fixture) -> None:
    known(env)
    env.live.change({"broker.pull_messages_max": "2"})
    assert len(bodies(env.pull(0))) == 2
    assert len(bodies(env.pull(0))) == 2, "the usual one"
    env.live.change({"brokerPermission": "2"})
    assert code(env.pull(0)) == NO_PERMISSION


def test_short_polling_applies_to_usual_pulls(env: Fixture) -> None:
    known(env)
    env.live.change({"longPollingEnable": "false"})
    env.pull(0)
    before = env.unusual
    suspended = env.pull(4, flags=OWN | 2)
    assert isinstance(suspended, Suspend)
    assert suspended.deadline_ms == NOW_MS + 1000
    assert env.unusual == before


def test_a_topic_that_may_not_be_read_is_refused(env: Fixture) -> None:
    known(env)
    env.context.topics.put(msgspec.structs.replace(TOPIC, perm=2), NOW_MS)
    assert code(env.pull(0)) == NO_PERMISSION


def test_a_queue_that_is_no_longer_readable_is_refused(env: Fixture) -> None:
    env.send(queue_id=1, body=b"one")
    known(env, queueId=1)
    env.context.topics.put(msgspec.structs.replace(TOPIC, read_queue_nums=1), NOW_MS)
    assert code(env.pull(0, queueId=1)) == ResponseCode.INVALID_PARAMETER


def test_the_queue_of_a_deleted_topic_is_not_read(env: Fixture) -> None:
    known(env)
    config = env.context.topics.need("T")
    for _ in env.context.topics.delete("T", NOW_MS):
        pass
    assert code(env.pull(0)) == NO_TOPIC
    env.context.topics.put(config, NOW_MS)  # the same object
    assert offsets(env.pull(0)) == (NOT_FOUND, 0, 0, 0)
    env.send(body=b"new")
    assert bodies(env.pull(0)) == [b"new"]


def test_a_group_that_may_not_consume_is_refused(env: Fixture) -> None:
    known(env)
    disabled = SubscriptionGroupConfig(group_name="G", consume_enable=False)
    env.context.groups.put(disabled, NOW_MS)
    assert code(env.pull(0)) == NO_PERMISSION
    env.context.groups.put(SubscriptionGroupConfig(group_name="G"), NOW_MS)
    assert code(env.pull(0)) == FOUND


def test_a_deleted_group_is_refused(env: Fixture) -> None:
    known(env)
    env.live.change({"autoCreateSubscriptionGroup": "false"})
    env.pull(0)
    env.context.groups.delete("G", NOW_MS)
    assert code(env.pull(0)) == NO_GROUP


def test_a_pending_reset_is_told_first(env: Fixture) -> None:
    known(env)
    env.context.offsets.reset("G", "T", {0: 2}, NOW_MS)
    assert offsets(env.pull(0, flags=OWN | 1, commitOffset=1)) == (MOVED, 2, 0, 4)
    assert env.context.offsets.get("G", "T", 0) == 2
    known(env)


def test_a_new_subscription_applies_to_the_next_pull(env: Fixture) -> None:
    known(env, HEARTBEAT)
    env.heartbeat(subscription("b", 6))
    assert bodies(env.pull(0, flags=HEARTBEAT)) == [b"\1", b"\3"]
    assert bodies(env.pull(0, flags=HEARTBEAT, subVersion=6)) == [b"\1", b"\3"], "the usual one"
    assert code(env.pull(0, flags=HEARTBEAT, subVersion=7)) == 25
    env.heartbeat()
    assert code(env.pull(0, flags=HEARTBEAT)) == ResponseCode.SUBSCRIPTION_NOT_EXIST


def test_a_group_without_consumers_is_refused(env: Fixture) -> None:
    known(env, HEARTBEAT)
    env.context.clients.disconnected(1)
    assert code(env.pull(0, flags=HEARTBEAT)) == ResponseCode.SUBSCRIPTION_NOT_EXIST
    env.heartbeat(subscription("a", 5))  # an old version, but of a new group
    assert bodies(env.pull(0, flags=HEARTBEAT)) == [b"\0", b"\2"]


def test_the_members_of_a_group_decide_even_with_the_same_subscription(env: Fixture) -> None:
    known(env, HEARTBEAT)
    members = env.context.clients.consumer_group("G")
    assert members is not None
    same = members.subscriptions["T"]
    env.context.clients.disconnected(1)
    assert code(env.pull(0, flags=HEARTBEAT)) == ResponseCode.SUBSCRIPTION_NOT_EXIST
    env.heartbeat(same)
    assert code(env.pull(0, flags=HEARTBEAT)) == FOUND


def test_a_group_that_turns_to_broadcasting_is_refused(env: Fixture) -> None:
    config = SubscriptionGroupConfig(group_name="G", consume_broadcast_enable=False)
    env.context.groups.put(config, NOW_MS)
    known(env, HEARTBEAT)
    env.heartbeat(subscription("*", 5), model="BROADCASTING")
    assert code(env.pull(0, flags=HEARTBEAT)) == NO_PERMISSION


def test_a_topic_that_is_forbidden_to_the_group_is_refused(env: Fixture) -> None:
    known(env, HEARTBEAT)
    env.context.groups.allow_reading("G", "T", allowed=False, now_ms=NOW_MS)
    assert code(env.pull(0, flags=HEARTBEAT)) == NO_PERMISSION
    env.context.groups.allow_reading("G", "T", allowed=True, now_ms=NOW_MS)
    assert code(env.pull(0, flags=HEARTBEAT)) == FOUND


def test_cold_messages_are_read_in_the_thread_pool(tmp_path: Path) -> None:
    with broker_fixture(tmp_path / "store") as first:
        first.context.topics.put(TOPIC, NOW_MS)
        first.send(body=b"old")
    made = Fixture(tmp_path / "store")
    try:
        made.store.disk.read_now = lambda *_: False  # type: ignore[method-assign,assignment]
        for pulls in (1, 2):
            assert bodies(made.pull(0)) == [b"old"]
            assert made.unusual == pulls
    finally:
        made.close()


# --- suspended pulls


def suspend(env: Fixture, offset: int = 4, **ext: Any) -> SuspendedPull:
    """A usual pull that waits."""
    known(env, **ext)
    env.unusual = 0
    answer = env.pull(offset, flags=OWN | 2, **ext)
    assert isinstance(answer, Suspend)
    assert isinstance(answer.retry, SuspendedPull)
    assert env.unusual == 0
    return answer.retry


def test_a_woken_pull_gets_what_has_arrived(env: Fixture) -> None:
    suspend(env)
    env.many(env.send_frame(body=b"x") + env.send_frame(body=b"y"))
    assert bodies(env.woken[0]) == [b"x", b"y"]
    assert offsets(env.woken[0]) == (FOUND, 6, 0, 6)
    assert env.unusual == 0
    assert env.context.stats.groups["T", "G"].nums == 2 * 4 + 2


def test_a_pull_of_other_tags_waits_on_without_being_resolved(env: Fixture) -> None:
    pull = suspend(env, subscription="b")
    env.send(tag="a")
    assert (env.woken, pull.offset, len(env.context.long_polling)) == ([], 5, 1)
    env.send(tag="b", body=b"mine")
    assert bodies(env.woken[0]) == [b"mine"]
    assert env.unusual == 0
    suspend(env, 6, subscription="b")
    env.send(tag="a")
    env.tick(15_000)
    assert code(env.woken[1]) == NOT_FOUND
    assert env.unusual == 1, "the deadline"


def test_an_empty_queue_is_waited_for(env: Fixture) -> None:
    assert offsets(env.pull(0, queueId=1))[0] == NOT_FOUND
    env.unusual = 0
    assert isinstance(env.pull(0, queueId=1, flags=OWN | 2), Suspend)
    assert offsets(env.pull(1, queueId=1, flags=OWN | 2)) == (MOVED, 0, 0, 0)
    assert env.unusual == 1
    env.send(queue_id=1, body=b"first")
    assert bodies(env.woken[0]) == [b"first"]


def test_the_queue_of_a_usual_pull_is_watched_at_once(env: Fixture) -> None:
    suspend(env)
    env.send(body=b"x")
    queue = env.store.queue("T", 0)
    assert queue is not None
    assert not queue.watched
    data = encode(RequestCode.PULL_MESSAGE, pull_fields(5), opaque=9)
    env.request_loop.bind(memoryview(bytearray(data)), bytes(8))
    env.request_loop.serve(0, len(data), NOW_MS)
    assert queue.watched, "a later request of the same read may be a send"
    env.request_loop.deferred.clear()


def pull_fields(offset: int) -> dict[str, str]:
    return {
        "consumerGroup": "G", "topic": "T", "queueId": "0", "queueOffset": str(offset),
        "maxMsgNums": "32", "sysFlag": str(OWN | 2), "suspendTimeoutMillis": "15000",
        "subscription": "*",
    }  # fmt: skip


Change = Callable[[Fixture], object]


def _delete_topic(env: Fixture) -> None:
    for queue in env.context.topics.delete("T", NOW_MS):
        env.context.long_polling.wake_queue(queue)


def _recreate_topic(env: Fixture) -> None:
    config = env.context.topics.need("T")
    removed = list(env.context.topics.delete("T", NOW_MS))
    env.context.topics.put(config, NOW_MS)
    env.context.long_polling.wake_queue(removed[0])


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda env: env.live.change({"brokerPermission": "2"}), NO_PERMISSION),
        (
            lambda env: env.context.topics.put(msgspec.structs.replace(TOPIC, perm=2), NOW_MS),
            NO_PERMISSION,
        ),
        (
            lambda env: env.context.groups.put(
                SubscriptionGroupConfig(group_name="G", consume_enable=False), NOW_MS
            ),
            NO_PERMISSION,
        ),
        (lambda env: env.context.offsets.reset("G", "T", {0: 1}, NOW_MS), MOVED),
    ],
    ids=["settings", "topic", "group", "reset"],
)
def test_changes_apply_to_suspended_pulls(env: Fixture, change: Change, expected: int) -> None:
    suspend(env)
    change(env)
    env.send(body=b"not to be delivered")
    assert code(env.woken[0]) == expected
    assert env.unusual == 1


@pytest.mark.parametrize("change", [_delete_topic, _recreate_topic])
def test_a_suspended_pull_does_not_read_a_deleted_queue(env: Fixture, change: Change) -> None:
    suspend(env)
    data = env.send_frame(body=b"not to be delivered")
    env.request_loop.bind(memoryview(bytearray(data)), bytes(8))
    env.request_loop.serve(0, len(data), NOW_MS)  # and nothing is woken yet
    answers: list[Exception] = []
    wake = env.wake

    def wake_and_note(*given: Any) -> None:
        try:
            wake(*given)
        except Exception as error:
            answers.append(error)

    env.context.long_polling.on_wake(wake_and_note)
    change(env)
    assert [type(error).__name__ for error in answers] == ["TopicNotExist"]
    assert env.unusual == 1
