"""Pulling: what is found, what is held, what is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.broker import pull
from penstock.broker.pull import tag_hashes_of
from penstock.config import BrokerConfig, Settings
from penstock.errors import ReadFailed
from penstock.rpc.answers import Answer, InThread, RegisterTopics, Reply, Suspend
from penstock.rpc.command import Command
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
def home(tmp_path: Path) -> Iterator[BrokerFixture]:
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
def test_messages_are_given_from_the_offset_on(home: BrokerFixture, encoding: int) -> None:
    for number in range(5):
        home.send(body=bytes([number]))
    answer = home.pull(2, encoding=encoding)
    assert bodies(answer) == [b"\2", b"\3", b"\4"]
    assert offsets(answer) == (FOUND, 5, 0, 5)


def test_counts_and_bytes_are_limited(home: BrokerFixture) -> None:
    for number in range(5):
        home.send(body=bytes([number]) * 100)
    assert len(bodies(home.pull(0, maxMsgNums=2))) == 2
    assert len(bodies(home.pull(0, maxMsgNums=0))) == 1
    assert len(bodies(home.pull(0, maxMsgBytes=1))) == 1, "the first is given whatever its size"


def test_offsets_outside_the_queue_are_corrected(home: BrokerFixture) -> None:
    assert offsets(home.pull(0)) == (NOT_FOUND, 0, 0, 0)
    assert offsets(home.pull(7)) == (MOVED, 0, 0, 0)
    home.send()
    assert offsets(home.pull(1)) == (NOT_FOUND, 1, 0, 1)
    assert offsets(home.pull(9)) == (MOVED, 1, 0, 1)
    assert offsets(home.pull(-1)) == (MOVED, 0, 0, 1)


def test_tags_are_filtered_here(home: BrokerFixture) -> None:
    for tag in ("a", "b", "c", "a"):
        home.send(body=tag.encode(), tag=tag)
    assert bodies(home.pull(0, subscription="a || c")) == [b"a", b"c", b"a"]
    answer = home.pull(0, subscription="x")
    assert offsets(answer) == (AGAIN, 4, 0, 4)
    assert isinstance(answer, Reply)
    assert answer.remark == "NO_MATCHED_MESSAGE"


def test_a_pull_is_held_until_a_message_comes(home: BrokerFixture) -> None:
    home.heartbeat(subscription())
    held = home.pull(0, flags=2)
    assert isinstance(held, Suspend)
    assert held.deadline_ms == NOW_MS + 15_000
    assert home.woken == []
    home.send(body=b"news")
    assert bodies(home.woken[0]) == [b"news"]
    assert len(home.context.long_polling) == 0


def test_a_held_pull_is_answered_at_its_deadline(home: BrokerFixture) -> None:
    home.pull(0, flags=6)
    home.tick(14_999)
    assert home.woken == []
    home.tick(1)
    assert offsets(home.woken[0]) == (NOT_FOUND, 0, 0, 0)


def test_unwanted_messages_do_not_wake(home: BrokerFixture) -> None:
    home.pull(0, flags=6, subscription="wanted")
    for _ in range(3):
        home.send(tag="other")
    assert home.woken == []
    assert len(home.context.long_polling) == 1
    home.send(tag="wanted", body=b"w")
    assert bodies(home.woken[0]) == [b"w"]
    home.woken.clear()
    home.pull(4, flags=6, subscription="wanted")
    home.send(tag="other")
    home.tick(20_000)
    assert offsets(home.woken[0])[:2] == (NOT_FOUND, 5), "it need not be looked at again"


def test_without_the_flag_nothing_is_held(home: BrokerFixture) -> None:
    assert isinstance(home.pull(0, flags=4), Reply)
    home.live.change({"longPollingEnable": "false"})
    held = home.pull(0, flags=6)
    assert isinstance(held, Suspend)
    assert held.deadline_ms == NOW_MS + 1000


def test_who_left_is_not_answered(home: BrokerFixture) -> None:
    home.pull(0, flags=6)
    home.context.long_polling.drop(1)
    home.send()
    home.tick(60_000)
    assert home.woken == []
    assert home.context.long_polling.due() > NOW_MS * 2


def test_progress_comes_with_the_pull(home: BrokerFixture) -> None:
    for _ in range(4):
        home.send()
    home.pull(0, flags=4, commitOffset=2)
    assert home.context.offsets.get("G", "T", 0) is None
    home.pull(0, flags=5, commitOffset=2)
    assert home.context.offsets.get("G", "T", 0) == 2


def test_a_reset_sends_the_consumer_there(home: BrokerFixture) -> None:
    for _ in range(4):
        home.send()
    home.context.offsets.reset("G", "T", {0: 1}, NOW_MS)
    answer = home.pull(4, flags=6)
    assert offsets(answer) == (MOVED, 1, 0, 4)
    assert isinstance(home.pull(4, flags=6), Suspend), "once"
    home.context.offsets.reset("G", "T", {0: 3}, NOW_MS)
    queue = home.store.queue("T", 0)
    assert queue is not None
    home.context.long_polling.wake_queue(queue)
    assert offsets(home.woken[0]) == (MOVED, 3, 0, 4)


def test_the_subscription_is_the_one_of_the_heartbeat(home: BrokerFixture) -> None:
    home.send(tag="a", body=b"a")
    home.send(tag="b", body=b"b")
    answer = home.pull(0, flags=0)
    assert isinstance(answer, Reply)
    assert answer.code == 24, "the group is not connected"
    home.heartbeat(subscription("b", 5))
    assert bodies(home.pull(0, flags=0, subVersion=5)) == [b"b"]
    stale = home.pull(0, flags=0, subVersion=6)
    assert isinstance(stale, Reply)
    assert stale.code == 25
    other = home.pull(0, flags=0, topic="TBW102")
    assert isinstance(other, Reply)
    assert other.code == 24, "the group does not subscribe to this topic"


def test_refusals_name_their_rule(home: BrokerFixture) -> None:
    def refused(**ext: object) -> tuple[int, str | None]:
        answer = home.pull(0, **{"flags": 0, **ext})  # type: ignore[arg-type]
        assert isinstance(answer, Reply)
        assert answer.remark
        return answer.code, (answer.ext or {}).get("forbiddenType")

    home.heartbeat(subscription())
    assert refused(topic="none")[0] == 17
    assert refused(queueId=2)[0] == 29
    assert refused(flags=4, expressionType="SQL92", subscription="a > > 1")[0] == 23
    assert refused(flags=4, subscription="||")[0] == 23
    home.context.groups.table.forbid("G", "T", 4, NOW_MS)
    assert refused() == (16, "5")
    home.context.groups.table.forbid("G", "T", 0, NOW_MS)
    home.heartbeat(subscription(), model="BROADCASTING")
    home.context.groups.put(
        SubscriptionGroupConfig(group_name="G", consume_broadcast_enable=False), NOW_MS
    )
    assert refused() == (16, "4")
    home.context.groups.put(SubscriptionGroupConfig(group_name="G", consume_enable=False), NOW_MS)
    assert refused() == (16, "2")
    home.context.groups.put(SubscriptionGroupConfig(group_name="G"), NOW_MS)
    home.context.topics.put(
        TopicConfig(topic_name="T", read_queue_nums=2, write_queue_nums=2, perm=2), NOW_MS
    )
    assert refused() == (16, "3")
    home.live.change({"brokerPermission": "2"})
    assert refused() == (16, "1")


def test_unknown_groups_are_refused_where_they_are_not_made(tmp_path: Path) -> None:
    settings = Settings(
        store=small_config(sync_flush=False), broker=BrokerConfig(auto_create_groups=False)
    )
    with broker_fixture(tmp_path / "store", settings) as home:
        home.send()
        answer = home.pull(0)
        assert isinstance(answer, Reply)
        assert answer.code == 26


def test_old_messages_are_read_in_the_pool(tmp_path: Path) -> None:
    with broker_fixture(tmp_path / "store") as home:
        for number in range(50):
            home.send(body=bytes([number]) * 50)
    config = msgspec.structs.replace(small_config(sync_flush=False), hot_bytes=0)
    with broker_fixture(tmp_path / "store", Settings(store=config)) as home:
        home.store.disk.read_now = lambda *_: False  # type: ignore[method-assign,assignment]
        answer = home.pull(10, maxMsgNums=3)
        assert [body[0] for body in bodies(answer)] == [10, 11, 12]
        assert offsets(answer) == (FOUND, 13, 0, 50)


def test_progress_and_topics_survive_a_restart(tmp_path: Path) -> None:
    with broker_fixture(tmp_path / "store") as home:
        home.send()
        home.context.offsets.commit("G", "T", 0, 1, NOW_MS)
        home.handle(25)
        home.live.change({"brokerPermission": "6"})
    with broker_fixture(tmp_path / "store") as home:
        assert home.context.topics.get("T") is not None
        assert home.context.offsets.get("G", "T", 0) == 1


def test_changed_settings_survive_a_restart(tmp_path: Path) -> None:
    with broker_fixture(tmp_path / "store") as home:
        assert home.ask(25, {}, b"brokerPermission=4\nfileReservedTime=48\n").code == 0
        topics = home.broker.registration().topic_config_serialize_wrapper.topic_config_table
        assert topics["TBW102"].perm == 5, "NameServers are told that nobody may write here"
    with broker_fixture(tmp_path / "store") as home:
        assert home.live.current.broker.permission == 4
        assert home.store.config.retain_hours == home.store.maintenance.config.retain_hours == 48


def test_the_brokers_permission_is_answered_when_nameservers_know_it(tmp_path: Path) -> None:
    def change(home: BrokerFixture, text: bytes) -> Answer:
        answer = home.broker.handle(Command(25, {}, text, now_ms=NOW_MS))
        assert isinstance(answer, InThread)
        return answer.then(answer.work())

    with broker_fixture(tmp_path / "store") as home:
        assert change(home, b"fileReservedTime=47") == Reply()
        assert change(home, b"brokerPermission=4") == RegisterTopics(Reply, NOW_MS + 3_000)


@pytest.mark.parametrize("expression", ["", "*", " * "])
def test_all_tags(expression: str) -> None:
    assert tag_hashes_of(expression) == ()


def test_codes_of_an_expression() -> None:
    assert tag_hashes_of("TagA||TagB || TagA|| ") == [2598919, 2598920]


def test_a_wanted_message_behind_many_others_is_not_slept_over(home: BrokerFixture) -> None:
    home.pull(0, flags=6, subscription="wanted")
    frames = b"".join(home.send_frame(tag="other") for _ in range(900))
    home.many(frames + home.send_frame(tag="wanted"))
    answer: Answer = home.woken[0]
    looks = 0
    while offsets(answer)[0] == AGAIN:  # each look ends somewhere: the client asks again at once
        looks += 1
        answer = home.pull(offsets(answer)[1], flags=6, subscription="wanted")
    assert looks > 1
    assert len(bodies(answer)) == 1


def test_a_held_pull_obeys_what_changed_meanwhile(home: BrokerFixture) -> None:
    home.pull(0, flags=6)
    home.context.groups.put(SubscriptionGroupConfig(group_name="G", consume_enable=False), NOW_MS)
    home.send()
    assert home.woken[0].code == 16


def test_a_one_way_pull_is_not_answered(home: BrokerFixture) -> None:
    home.send()
    assert home.pull(0, oneway=True) is None


def test_a_read_that_fails_leaves_no_half_answer(home: BrokerFixture) -> None:
    home.send()

    def fail(*_: object) -> bool:
        raise ReadFailed("the disk says no")

    home.broker.pull._write = fail  # type: ignore[method-assign,assignment]
    answer = home.pull(0)
    assert isinstance(answer, Reply)
    assert (answer.code, answer.body) == (1, b"")


class Vanishing:
    """A reader whose first finds can't be copied, as when retention is quicker."""

    def __init__(self, reader: Any, failures: int) -> None:
        self._reader = reader
        self._failures = failures

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def copy_to(self, output: Output, wait: bool = False) -> bool:
        self._failures -= 1
        return self._failures < 0 and self._reader.copy_to(output, wait)


@pytest.mark.parametrize(("failures", "found"), [(1, 5), (2, 1), (9, 0)])
def test_what_retention_takes_during_a_read_takes_nothing_with_it(
    home: BrokerFixture, monkeypatch: pytest.MonkeyPatch, failures: int, found: int
) -> None:
    for number in range(5):
        home.send(body=bytes([number]))
    monkeypatch.setattr(home.broker.pull, "_write", lambda *_: False)
    reader_for = pull.reader_for
    monkeypatch.setattr(pull, "reader_for", lambda *given: Vanishing(reader_for(*given), failures))
    answer = home.pull(0)
    if found:
        assert bodies(answer) == [bytes([number]) for number in range(found)]
        assert offsets(answer) == (FOUND, found, 0, 5)
    else:
        assert offsets(answer) == (AGAIN, 1, 0, 5)


@pytest.mark.parametrize("tag", ["*", "blue", "none"])
def test_the_first_offset_is_told_where_files_are_gone(tmp_path: Path, tag: str) -> None:
    with broker_fixture(tmp_path / "store", Settings(store=small_config(sync_flush=False))) as home:
        while home.store.log.end < 2 * SEGMENT_BYTES:
            home.send(body=bytes(500), tag="blue")
        home.store.log.segments.drop_first()  # and the queue's begin is not moved up yet
        answer = home.pull(0, subscription=tag)
        _, following, low, high = offsets(answer)
        assert 0 < low < high
        assert following > low
        if tag != "none":
            assert messages(answer)[0].queue_offset == low


def test_a_gap_in_a_queue_is_not_its_begin(tmp_path: Path) -> None:
    with broker_fixture(tmp_path / "store", Settings(store=small_config(sync_flush=False))) as home:
        while home.store.log.end < 2 * SEGMENT_BYTES:
            home.send(body=bytes(500))
        home.store.log.segments.drop_first()
        _, _, low, high = offsets(home.pull(0))
        queue = home.store.queue("T", 0)
        assert queue is not None
        queue.fill_to(high + 2)
        home.send(body=b"behind")
        answer = home.pull(high - 1)
        assert [message.queue_offset for message in messages(answer)] == [high - 1, high + 2]
        assert offsets(answer) == (FOUND, high + 3, queue.min_offset, high + 3)
        assert offsets(home.pull(low))[2] == queue.min_offset


def test_a_topic_whose_table_was_lost_is_made_anew(tmp_path: Path) -> None:
    with broker_fixture(tmp_path / "store") as home:
        home.send(topic="New", queue_id=3)
        home.context.topics.table.dirty = False  # as if killed before it was written
    with broker_fixture(tmp_path / "store") as home:
        config = home.context.topics.get("New")
        assert config is not None
        assert config.read_queue_nums == config.write_queue_nums == 4
        assert len(bodies(home.pull(0, topic="New", queueId=3))) == 1


def test_traces_are_switched_off_while_running(home: BrokerFixture) -> None:
    assert "TRACE_ON" not in (home.send().ext or {})
    home.live.change({"traceOn": "false"})
    assert (home.send().ext or {})["TRACE_ON"] == "false"
    (before, after) = messages(home.pull(0))
    assert (before.properties["TRACE_ON"], after.properties["TRACE_ON"]) == ("true", "false")


def test_new_topics_get_as_many_queues_as_is_set(home: BrokerFixture) -> None:
    home.live.change({"defaultTopicQueueNums": "2"})
    home.send(topic="Small")
    config = home.context.topics.get("Small")
    assert config is not None
    assert config.write_queue_nums == 2


def test_holds_of_a_queue_are_forgotten_quickly(home: BrokerFixture) -> None:
    for _ in range(3000):
        home.pull(0, flags=6)
    assert len(home.context.long_polling) == home.context.long_polling.count_of(1) == 3000
    home.send()
    assert len(home.woken) == 3000
    assert len(home.context.long_polling) == 0
    for _ in range(3000):
        home.pull(1, flags=6)
    home.context.long_polling.drop(1)
    assert len(home.context.long_polling) == home.context.long_polling.count_of(1) == 0
    assert home.context.long_polling.due() > NOW_MS * 2
