"""Pulls with filters: which messages are returned, the next offset, and wake-ups."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from penstock.broker.filter import filtered_read
from penstock.config import Settings
from penstock.rpc.answers import Answer, Reply, Suspend
from penstock.wire.bodies.client_bodies import SubscriptionData, TopicConfig
from tests.store_kit import small_config
from tests.unit.broker.broker_kit import NOW_MS, BrokerFixture, bodies, broker_fixture

FOUND, AGAIN = 0, 20


@pytest.fixture
def env(tmp_path: Path) -> Iterator[BrokerFixture]:
    with broker_fixture(tmp_path / "store") as made:
        create_topic(made)
        yield made


def create_topic(env: BrokerFixture) -> None:
    config = TopicConfig(topic_name="T", read_queue_nums=2, write_queue_nums=2)
    env.context.topics.put(config, NOW_MS)


def fill(env: BrokerFixture, count: int, *, first: int = 0) -> None:
    """Messages whose property n is their number, and their body too."""
    frames = b"".join(
        env.send_frame(body=b"%d" % number, properties={"n": str(number)})
        for number in range(first, first + count)
    )
    env.many(frames)


def pull(env: BrokerFixture, offset: int, expression: str, **ext: object) -> Answer:
    fields = {"flags": 4, "subscription": expression, "expressionType": "SQL92", **ext}
    return env.pull(offset, **fields)  # type: ignore[arg-type]


def given(answer: Answer) -> list[int]:
    return [int(body) for body in bodies(answer)]


def place(answer: Answer) -> tuple[int, int]:
    """Response code and next offset."""
    assert isinstance(answer, Reply)
    assert answer.ext is not None
    return answer.code, int(answer.ext["nextBeginOffset"])


def all_matching(env: BrokerFixture, expression: str, **ext: object) -> list[int]:
    """All messages that a client receives until the end of the queue."""
    found: list[int] = []
    offset, end = 0, 1
    while offset < end:
        answer = pull(env, offset, expression, **ext)
        assert isinstance(answer, Reply)
        assert answer.ext is not None
        if answer.code == FOUND:
            found += given(answer)
        code, following = place(answer)
        assert code in (FOUND, AGAIN)
        assert following > offset
        offset, end = following, int(answer.ext["maxOffset"])
    return found


def subscription(expression: str, version: int = 1) -> SubscriptionData:
    return SubscriptionData(
        topic="T", sub_string=expression, expression_type="SQL92", sub_version=version
    )


def test_only_matching_messages_are_returned(env: BrokerFixture) -> None:
    fill(env, 10)
    answer = pull(env, 2, "n BETWEEN 1 AND 4")
    assert given(answer) == [2, 3, 4]
    assert place(answer) == (FOUND, 10), "what was looked at is not looked at again"


def test_no_more_messages_than_requested_are_returned(env: BrokerFixture) -> None:
    fill(env, 10)
    answer = pull(env, 0, "n >= 3", maxMsgNums=2)
    assert given(answer) == [3, 4]
    assert place(answer) == (FOUND, 5)


def test_bytes_are_limited_except_for_one_message(env: BrokerFixture) -> None:
    for number in range(4):
        env.send(body=b"x" * 1000, properties={"n": str(number)})
    answer = pull(env, 0, "n >= 0", maxMsgBytes=2500)
    assert len(bodies(answer)) == 2
    assert place(answer) == (FOUND, 2)
    answer = pull(env, 1, "n >= 2", maxMsgBytes=10)
    assert len(bodies(answer)) == 1
    assert place(answer) == (FOUND, 3)


def test_a_rare_match_does_not_block_the_event_loop(env: BrokerFixture) -> None:
    fill(env, filtered_read.EXAMINED_MAX + 50)
    answer = pull(env, 0, "n = 300")
    assert place(answer) == (AGAIN, filtered_read.EXAMINED_MAX)
    assert given(pull(env, filtered_read.EXAMINED_MAX, "n = 300")) == [300]


def test_an_expensive_filter_examines_fewer_messages_per_find(env: BrokerFixture) -> None:
    fill(env, 50)
    heavy = " OR ".join(f"n = {number}" for number in range(1000, 1999))
    assert place(pull(env, 0, heavy)) == (AGAIN, 2)
    assert all_matching(env, f"{heavy} OR n = 40") == [40]


def test_large_messages_are_examined_in_several_finds(
    env: BrokerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filtered_read, "EXAMINED_BYTES_MAX", 3000)
    for _ in range(10):
        env.send(body=b"x" * 1000)
    assert place(pull(env, 0, "n = 1", maxMsgNums=1)) == (AGAIN, 3)


@pytest.mark.parametrize("count", [1, 7, 32, 1000])
@pytest.mark.parametrize("size", [10, 700, 100_000])
def test_no_step_skips_a_match(env: BrokerFixture, count: int, size: int) -> None:
    fill(env, 500)
    found = all_matching(env, "n = 7 OR n BETWEEN 100 AND 130", maxMsgNums=count, maxMsgBytes=size)
    assert found == [7, *range(100, 131)]


def test_cold_messages_are_filtered_in_the_thread_pool(tmp_path: Path) -> None:
    with broker_fixture(tmp_path / "store") as env:
        create_topic(env)
        fill(env, 900)
    config = msgspec.structs.replace(small_config(sync_flush=False), hot_bytes=0)
    with broker_fixture(tmp_path / "store", Settings(store=config)) as env:
        env.store.disk.read_now = lambda *_: False  # type: ignore[method-assign,assignment]
        assert given(pull(env, 0, "n = 5")) == [5]
        assert place(pull(env, 6, "n = 5")) == (AGAIN, 806)
        assert all_matching(env, "n > 890") == list(range(891, 900))


def test_the_subscription_of_the_heartbeat_is_applied(env: BrokerFixture) -> None:
    fill(env, 10)
    env.heartbeat(subscription("n < 2"))
    assert given(env.pull(0, flags=0, subVersion=1)) == [0, 1]
    env.heartbeat(subscription("n >= 8", 2))
    assert given(env.pull(0, flags=0, subVersion=2)) == [8, 9]
    env.heartbeat(subscription("n < 2", 1))  # an old heartbeat that comes late
    assert given(env.pull(0, flags=0, subVersion=2)) == [8, 9]


def test_a_suspended_pull_is_woken_only_by_matching_messages(env: BrokerFixture) -> None:
    assert isinstance(pull(env, 0, "n = 3", flags=6), Suspend)
    fill(env, 3)
    assert env.woken == []
    assert len(env.context.long_polling) == 1
    fill(env, 2, first=3)
    assert given(env.woken[0]) == [3]
    assert place(env.woken[0]) == (FOUND, 5)


def test_a_suspended_pull_without_a_match_ends_after_the_examined_messages(
    env: BrokerFixture,
) -> None:
    pull(env, 0, "n = 9", flags=6)
    fill(env, 3)
    env.tick(15_000)
    assert place(env.woken[0])[1] == 3


def test_an_invalid_filter_is_refused_with_its_position(env: BrokerFixture) -> None:
    fill(env, 1)
    answer = pull(env, 0, "n > > 1")
    assert isinstance(answer, Reply)
    assert (answer.code, (answer.ext or {})["nextBeginOffset"]) == (23, "0")
    assert "column 5" in (answer.remark or "")
    assert place(pull(env, 0, ""))[0] == 23
    assert place(pull(env, 0, "a", expressionType="CLASS"))[0] == 23
    env.heartbeat(subscription("n > > 1"))
    answer = env.pull(0, flags=0)
    assert isinstance(answer, Reply)
    assert answer.code == 27
    assert "column 5" in (answer.remark or "")


def test_filters_can_be_disabled_at_run_time(env: BrokerFixture) -> None:
    fill(env, 1)
    env.live.change({"enablePropertyFilter": "false"})
    answer = pull(env, 0, "n = 0")
    assert isinstance(answer, Reply)
    assert answer.code == 1
    assert "property_filter" in (answer.remark or "")
    env.live.change({"enablePropertyFilter": "true"})
    assert given(pull(env, 0, "n = 0")) == [0]


def test_tags_are_properties_too(env: BrokerFixture) -> None:
    env.send(body=b"1", tag="a")
    env.send(body=b"2", tag="b")
    assert given(pull(env, 0, "TAGS = 'b' AND CLUSTER = 'DefaultCluster'")) == [2]
