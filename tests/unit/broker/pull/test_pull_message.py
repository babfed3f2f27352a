"""Pulling: found messages, suspended requests, refusals."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.broker.long_polling import WAKES_MAX
from penstock.broker.pull import pull_message, pull_subscription
from penstock.broker.pull.pull_subscription import tag_hashes_of
from penstock.config import BrokerConfig, Settings
from penstock.errors import ReadFailed
from penstock.rpc.answers import Answer, InThread, RegisterTopics, Reply, Suspend
from penstock.rpc.command import Command
from penstock.store.get import TAG_HASHES_MAX, Reader
from penstock.wire.bodies.client_bodies import (
    SubscriptionData,
    SubscriptionGroupConfig,
    TopicConfig,
)
from penstock.wire.frame import BINARY, JSON
from penstock.wire.output import Output
from penstock.wire.record import java_hash
from tests.store_kit import SEGMENT_BYTES, small_config
from tests.unit.broker.broker_kit import NOW_MS, BrokerFixture, bodies, broker_fixture, messages

FOUND, NOT_FOUND, AGAIN, MOVED = 0, 19, 20, 21


@pytest.fixture
def env(tmp_path: Path) -> Iterator[BrokerFixture]:
    with broker_fixture(tmp_path / "store") as made:
        made.context.topics.put(
            TopicConfig(topic_name="T", read_queue_nums=2, write_queue_nums=2), NOW_MS
        )
        yield made


def offsets(answer: Answer) -> tuple[int, int, int, int]:
    """(code, next, min, max) of a reply."""
    assert isinstance(answer, Reply)
    assert answer.ext is not None
    assert answer.ext["suggestWhichBrokerId"] == "0"
    names = ("nextBeginOffset", "minOffset", "maxOffset")
    return (answer.code, *(int(answer.ext[name]) for name in names))  # type: ignore[return-value]


def subscription(expression: str = "*", version: int = 1) -> SubscriptionData:
    tags = [tag.strip() for tag in expression.split("||")] if expression != "*" else []
    return SubscriptionData(
        topic="T", sub_string=expression, sub_version=version, expression_type="TAG",
        tags_set=tags, code_set=[java_hash(tag) for tag in tags],
    )  # fmt: skip


@pytest.mark.parametrize("encoding", [JSON, BINARY])
def test_messages_are_returned_from_the_offset(env: BrokerFixture, encoding: int) -> None:
    for number in range(5):
        env.send(body=bytes([number]))
    answer = env.pull(2, encoding=encoding)
    assert bodies(answer) == [b"\2", b"\3", b"\4"]
    assert offsets(answer) == (FOUND, 5, 0, 5)


def test_counts_and_bytes_are_limited(env: BrokerFixture) -> None:
    for number in range(5):
        env.send(body=bytes([number]) * 100)
    assert len(bodies(env.pull(0, maxMsgNums=2))) == 2
    assert len(bodies(env.pull(0, maxMsgNums=0))) == 1
    assert len(bodies(env.pull(0, maxMsgBytes=1))) == 1, "the first is given whatever its size"


def test_offsets_outside_the_queue_are_corrected(env: BrokerFixture) -> None:
    assert offsets(env.pull(0)) == (NOT_FOUND, 0, 0, 0)
    assert offsets(env.pull(7)) == (MOVED, 0, 0, 0)
    env.send()
    assert offsets(env.pull(1)) == (NOT_FOUND, 1, 0, 1)
    assert offsets(env.pull(9)) == (MOVED, 1, 0, 1)
    assert offsets(env.pull(-1)) == (MOVED, 0, 0, 1)


def test_tags_are_filtered_by_the_broker(env: BrokerFixture) -> None:
    for tag in ("a", "b", "c", "a"):
        env.send(body=tag.encode(), tag=tag)
    assert bodies(env.pull(0, subscription="a || c")) == [b"a", b"c", b"a"]
    answer = env.pull(0, subscription="x")
    assert offsets(answer) == (AGAIN, 4, 0, 4)
    assert isinstance(answer, Reply)
    assert answer.remark == "NO_MATCHED_MESSAGE"


def test_a_pull_is_suspended_until_a_message_arrives(env: BrokerFixture) -> None:
    env.heartbeat(subscription())
    suspended = env.pull(0, flags=2)
    assert isinstance(suspended, Suspend)
    assert suspended.deadline_ms == NOW_MS + 15_000
    assert env.woken == []
    env.send(body=b"news")
    assert bodies(env.woken[0]) == [b"news"]
    assert len(env.context.long_polling) == 0


def test_a_suspended_pull_is_answered_at_its_deadline(env: BrokerFixture) -> None:
    env.pull(0, flags=6)
    env.tick(14_999)
    assert env.woken == []
    env.tick(1)
    assert offsets(env.woken[0]) == (NOT_FOUND, 0, 0, 0)


def test_messages_with_other_tags_do_not_wake_a_pull(env: BrokerFixture) -> None:
    env.pull(0, flags=6, subscription="wanted")
    for _ in range(3):
        env.send(tag="other")
    assert env.woken == []
    assert len(env.context.long_polling) == 1
    env.send(tag="wanted", body=b"w")
    assert bodies(env.woken[0]) == [b"w"]
    env.woken.clear()
    env.pull(4, flags=6, subscription="wanted")
    env.send(tag="other")
    env.tick(20_000)
    assert offsets(env.woken[0])[:2] == (NOT_FOUND, 5), "it need not be looked at again"


def test_a_pull_without_the_suspend_flag_is_answered_at_once(env: BrokerFixture) -> None:
    assert isinstance(env.pull(0, flags=4), Reply)
    env.live.change({"longPollingEnable": "false"})
    suspended = env.pull(0, flags=6)
    assert isinstance(suspended, Suspend)
    assert suspended.deadline_ms == NOW_MS + 1000


def test_pulls_of_a_disconnected_client_are_dropped(env: BrokerFixture) -> None:
    env.pull(0, flags=6)
    env.context.long_polling.drop(1)
    env.send()
    env.tick(60_000)
    assert env.woken == []
    assert env.context.long_polling.due() > NOW_MS * 2


def test_a_pull_commits_its_offset(env: BrokerFixture) -> None:
    for _ in range(4):
        env.send()
    env.pull(0, flags=4, commitOffset=2)
    assert env.context.offsets.get("G", "T", 0) is None
    env.pull(0, flags=5, commitOffset=2)
    assert env.context.offsets.get("G", "T", 0) == 2


def test_a_pull_after_a_reset_returns_the_reset_offset(env: BrokerFixture) -> None:
    for _ in range(4):
        env.send()
    env.context.offsets.reset("G", "T", {0: 1}, NOW_MS)
    answer = env.pull(4, flags=6)
    assert offsets(answer) == (MOVED, 1, 0, 4)
    assert isinstance(env.pull(4, flags=6), Suspend), "once"
    env.context.offsets.reset("G", "T", {0: 3}, NOW_MS)
    queue = env.store.queue("T", 0)
    assert queue is not None
    env.context.long_polling.wake_queue(queue)
    assert offsets(env.woken[0]) == (MOVED, 3, 0, 4)


def test_the_subscription_of_the_heartbeat_is_applied(env: BrokerFixture) -> None:
    env.send(tag="a", body=b"a")
    env.send(tag="b", body=b"b")
    answer = env.pull(0, flags=0)
    assert isinstance(answer, Reply)
    assert answer.code == 24, "the group is not connected"
    env.heartbeat(subscription("b", 5))
    assert bodies(env.pull(0, flags=0, subVersion=5)) == [b"b"]
    stale = env.pull(0, flags=0, subVersion=6)
    assert isinstance(stale, Reply)
    assert stale.code == 25
    other = env.pull(0, flags=0, topic="TBW102")
    assert isinstance(other, Reply)
    assert other.code == 24, "the group does not subscribe to this topic"


def test_refusals_name_their_reason(env: BrokerFixture) -> None:
    def refused(**ext: object) -> tuple[int, str | None]:
        answer = env.pull(0, **{"flags": 0, **ext})  # type: ignore[arg-type]
        assert isinstance(answer, Reply)
        assert answer.remark
        return answer.code, (answer.ext or {}).get("forbiddenType")

    env.heartbeat(subscription())
    assert refused(topic="none")[0] == 17
    assert refused(queueId=2)[0] == 29
    assert refused(flags=4, expressionType="SQL92", subscription="a > > 1")[0] == 23
    assert refused(flags=4, subscription="||")[0] == 23
    env.context.groups.table.forbid("G", "T", 4, NOW_MS)
    assert refused() == (16, "5")
    env.context.groups.table.forbid("G", "T", 0, NOW_MS)
    env.heartbeat(subscription(), model="BROADCASTING")
    env.context.groups.put(
        SubscriptionGroupConfig(group_name="G", consume_broadcast_enable=False), NOW_MS
    )
    assert refused() == (16, "4")
    env.context.groups.put(SubscriptionGroupConfig(group_name="G", consume_enable=False), NOW_MS)
    assert refused() == (16, "2")
    env.context.groups.put(SubscriptionGroupConfig(group_name="G"), NOW_MS)
    env.context.topics.put(
        TopicConfig(topic_name="T", read_queue_nums=2, write_queue_nums=2, perm=2), NOW_MS
    )
    assert refused() == (16, "3")
    env.live.change({"brokerPermission": "2"})
    assert refused() == (16, "1")


def test_unknown_groups_are_refused_without_auto_creation(tmp_path: Path) -> None:
    settings = Settings(
        store=small_config(sync_flush=False), broker=BrokerConfig(auto_create_groups=False)
    )
    with broker_fixture(tmp_path / "store", settings) as env:
        env.send()
        answer = env.pull(0)
        assert isinstance(answer, Reply)
        assert answer.code == 26


def test_old_messages_are_read_in_the_thread_pool(tmp_path: Path) -> None:
    with broker_fixture(tmp_path / "store") as env:
        for number in range(50):
            env.send(body=bytes([number]) * 50)
    config = msgspec.structs.replace(small_config(sync_flush=False), hot_bytes=0)
    with broker_fixture(tmp_path / "store", Settings(store=config)) as env:
        env.store.disk.read_now = lambda *_: False  # type: ignore[method-assign,assignment]
        answer = env.pull(10, maxMsgNums=3)
        assert [body[0] for body in bodies(answer)] == [10, 11, 12]
        assert offsets(answer) == (FOUND, 13, 0, 50)


@pytest.mark.parametrize("left", [[0, 1, 3], []], ids=["one", "all"])
def test_damaged_messages_are_left_out_of_a_response(tmp_path: Path, left: list[int]) -> None:
    with broker_fixture(tmp_path / "store") as env:
        for number in range(5):
            env.send(body=bytes([number]) * 50)
        path = env.store.paths.log / f"{0:020d}"
    data = bytearray(path.read_bytes())
    for number in set(range(4)) - set(left):  # the last one is checked at the start
        data[data.index(bytes([number]) * 50)] ^= 128
    path.write_bytes(data)
    with broker_fixture(tmp_path / "store") as env:
        answer = env.pull(0, maxMsgNums=4)
        assert offsets(answer) == (FOUND if left else AGAIN, 4, 0, 5)
        assert not left or [body[0] for body in bodies(answer)] == left


def test_progress_and_topics_survive_a_restart(tmp_path: Path) -> None:
    with broker_fixture(tmp_path / "store") as env:
        env.send()
        env.context.offsets.commit("G", "T", 0, 1, NOW_MS)
        env.handle(25)
        env.live.change({"brokerPermission": "6"})
    with broker_fixture(tmp_path / "store") as env:
        assert env.context.topics.get("T") is not None
        assert env.context.offsets.get("G", "T", 0) == 1


def test_changed_settings_survive_a_restart(tmp_path: Path) -> None:
    with broker_fixture(tmp_path / "store") as env:
        assert env.ask(25, {}, b"brokerPermission=4\nfileReservedTime=48\n").code == 0
        topics = env.broker.registration().topic_config_serialize_wrapper.topic_config_table
        assert topics["TBW102"].perm == 5, "the registration has no write permission"
    with broker_fixture(tmp_path / "store") as env:
        assert env.live.current.broker.permission == 4
        assert env.store.config.retain_hours == env.store.maintenance.config.retain_hours == 48


def test_a_changed_broker_permission_is_registered_before_the_response(tmp_path: Path) -> None:
    def change(env: BrokerFixture, text: bytes) -> Answer:
        answer = env.broker.handle(Command(25, {}, text, now_ms=NOW_MS))
        assert isinstance(answer, InThread)
        return answer.then(answer.work())

    with broker_fixture(tmp_path / "store") as env:
        assert change(env, b"fileReservedTime=47") == Reply()
        assert change(env, b"brokerPermission=4") == RegisterTopics(Reply, NOW_MS + 3_000)


@pytest.mark.parametrize("expression", ["", "*", " * "])
def test_all_tags(expression: str) -> None:
    assert tag_hashes_of(expression) == ()


def test_hashes_of_an_expression() -> None:
    assert tag_hashes_of("TagA||TagB || TagA|| ") == [2598919, 2598920]


def test_very_many_tags_are_left_to_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(tag_hashes_of("||".join(str(n) for n in range(TAG_HASHES_MAX)))) == TAG_HASHES_MAX
    # Not even computed: a megabyte would take long.
    monkeypatch.setattr(pull_subscription, "java_hash", None)
    assert tag_hashes_of("||".join(str(n) for n in range(TAG_HASHES_MAX + 1))) == ()


def test_a_matching_message_behind_many_others_is_found(env: BrokerFixture) -> None:
    env.pull(0, flags=6, subscription="wanted")
    frames = b"".join(env.send_frame(tag="other") for _ in range(900))
    env.many(frames + env.send_frame(tag="wanted"))
    answer: Answer = env.woken[0]
    looks = 0
    while offsets(answer)[0] == AGAIN:  # each search is limited: the client pulls again at once
        looks += 1
        answer = env.pull(offsets(answer)[1], flags=6, subscription="wanted")
    assert looks > 1
    assert len(bodies(answer)) == 1


def test_a_suspended_pull_follows_changed_permissions(env: BrokerFixture) -> None:
    env.pull(0, flags=6)
    env.context.groups.put(SubscriptionGroupConfig(group_name="G", consume_enable=False), NOW_MS)
    env.send()
    assert env.woken[0].code == 16


def test_a_one_way_pull_is_not_answered(env: BrokerFixture) -> None:
    env.send()
    assert env.pull(0, oneway=True) is None


class Failing(Reader):
    """A reader that fails with half of the messages in the output."""

    def copy_to(self, output: Output, wait: bool = False) -> bool:
        output.append(b"half of the messages")
        raise ReadFailed("the disk says no")


@pytest.mark.parametrize("known", [False, True])
def test_a_failed_read_leaves_no_partial_response(env: BrokerFixture, known: bool) -> None:
    env.send()
    if known:
        assert len(bodies(env.pull(0))) == 1
    env.store.reader = Failing(env.store.log, 1 << 20)
    answer = env.pull(0)
    assert isinstance(answer, Reply)
    assert (answer.code, answer.body) == (1, b"")


class Vanishing:
    """A reader whose first finds can't be copied, as after a deletion by retention."""

    def __init__(self, reader: Any, failures: int) -> None:
        self._reader = reader
        self._failures = failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def copy_to(self, output: Output, wait: bool = False) -> bool:
        self._failures -= 1
        return self._failures < 0 and self._reader.copy_to(output, wait)


@pytest.mark.parametrize(("failures", "found"), [(1, 5), (2, 1), (9, 0)])
def test_messages_deleted_by_retention_during_a_read_are_skipped(
    env: BrokerFixture, monkeypatch: pytest.MonkeyPatch, failures: int, found: int
) -> None:
    for number in range(5):
        env.send(body=bytes([number]))
    monkeypatch.setattr(env.broker.pull.requests, "_write", lambda *_: False)
    reader_for = pull_message.reader_for
    monkeypatch.setattr(
        pull_message, "reader_for", lambda *given: Vanishing(reader_for(*given), failures)
    )
    answer = env.pull(0)
    if found:
        assert bodies(answer) == [bytes([number]) for number in range(found)]
        assert offsets(answer) == (FOUND, found, 0, 5)
    else:
        assert offsets(answer) == (AGAIN, 1, 0, 5)


@pytest.mark.parametrize("tag", ["*", "blue", "none"])
def test_the_min_offset_follows_deleted_files(tmp_path: Path, tag: str) -> None:
    with broker_fixture(tmp_path / "store", Settings(store=small_config(sync_flush=False))) as env:
        while env.store.log.end < 2 * SEGMENT_BYTES:
            env.send(body=bytes(500), tag="blue")
        env.store.log.segments.drop_first()  # and the queue's min offset is not corrected yet
        answer = env.pull(0, subscription=tag)
        _, following, low, high = offsets(answer)
        assert 0 < low < high
        assert following > low
        if tag != "none":
            assert messages(answer)[0].queue_offset == low


def test_a_gap_in_a_queue_does_not_change_its_min_offset(tmp_path: Path) -> None:
    with broker_fixture(tmp_path / "store", Settings(store=small_config(sync_flush=False))) as env:
        while env.store.log.end < 2 * SEGMENT_BYTES:
            env.send(body=bytes(500))
        env.store.log.segments.drop_first()
        _, _, low, high = offsets(env.pull(0))
        queue = env.store.queue("T", 0)
        assert queue is not None
        queue.fill_to(high + 2)
        env.send(body=b"behind")
        answer = env.pull(high - 1)
        assert [message.queue_offset for message in messages(answer)] == [high - 1, high + 2]
        assert offsets(answer) == (FOUND, high + 3, queue.min_offset, high + 3)
        assert offsets(env.pull(low))[2] == queue.min_offset


def test_a_topic_missing_in_a_lost_table_is_created_again(tmp_path: Path) -> None:
    with broker_fixture(tmp_path / "store") as env:
        env.send(topic="New", queue_id=3)
        env.context.topics.table.dirty = False  # as if killed before it was written
    with broker_fixture(tmp_path / "store") as env:
        config = env.context.topics.get("New")
        assert config is not None
        assert config.read_queue_nums == config.write_queue_nums == 4
        assert len(bodies(env.pull(0, topic="New", queueId=3))) == 1


def test_traces_can_be_disabled_at_run_time(env: BrokerFixture) -> None:
    assert (env.send().ext or {})["TRACE_ON"] == "true"
    env.live.change({"traceOn": "false"})
    assert (env.send().ext or {})["TRACE_ON"] == "false"
    (before, after) = messages(env.pull(0))
    assert (before.properties["TRACE_ON"], after.properties["TRACE_ON"]) == ("true", "false")


def test_new_topics_get_the_configured_number_of_queues(env: BrokerFixture) -> None:
    env.live.change({"defaultTopicQueueNums": "2"})
    env.send(topic="Small")
    config = env.context.topics.get("Small")
    assert config is not None
    assert config.write_queue_nums == 2


def test_a_message_wakes_many_pulls_in_several_loop_iterations(env: BrokerFixture) -> None:
    polling, soon = env.context.long_polling, []
    polling.on_wake(env.wake, soon.append)
    for _ in range(3 * WAKES_MAX):
        env.pull(0, flags=6)
    env.send()
    assert env.woken == [], "what arrives in this iteration goes out together"
    env.send()
    for iteration in (1, 2, 3):
        (more,), soon[:] = soon, []
        more()
        assert len(env.woken) == iteration * WAKES_MAX
    assert len(polling) == 0
    assert {reply.code for reply in env.woken} == {0}


def test_many_pulls_with_one_deadline_are_answered_in_several_ticks(env: BrokerFixture) -> None:
    polling = env.context.long_polling
    for _ in range(2 * WAKES_MAX + 1):
        env.pull(0, flags=6)
    env.tick(15_000)
    assert len(env.woken) == WAKES_MAX
    assert polling.due() <= env.now_ms  # the next tick follows at once
    env.tick(1)
    env.tick(1)
    assert len(env.woken) == 2 * WAKES_MAX + 1
    assert len(polling) == 0


def test_a_pull_that_waits_to_be_woken_ends_with_its_connection(env: BrokerFixture) -> None:
    polling, soon = env.context.long_polling, []
    polling.on_wake(env.wake, soon.append)
    for _ in range(2 * WAKES_MAX):
        env.pull(0, flags=6)
    env.send()
    soon.pop(0)()
    polling.drop(1)
    assert len(polling) == 0
    soon.pop(0)()
    assert len(env.woken) == WAKES_MAX
    env.pull(1, flags=6)
    env.send()
    soon.pop(0)()
    assert len(env.woken) == WAKES_MAX + 1
    assert soon == []


def test_many_suspended_pulls_of_a_queue_are_removed_quickly(env: BrokerFixture) -> None:
    for _ in range(3000):
        env.pull(0, flags=6)
    assert len(env.context.long_polling) == env.context.long_polling.count_of(1) == 3000
    env.send()
    assert len(env.woken) == 3000
    assert len(env.context.long_polling) == 0
    for _ in range(3000):
        env.pull(1, flags=6)
    env.context.long_polling.drop(1)
    assert len(env.context.long_polling) == env.context.long_polling.count_of(1) == 0
    assert env.context.long_polling.due() > NOW_MS * 2
