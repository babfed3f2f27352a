"""Requests about offsets: of a group, and of a queue."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.broker.consumers.offset_requests import OffsetRequests
from penstock.rpc.answers import Reply
from penstock.store.store import MessageStore
from penstock.wire.bodies.client_bodies import SubscriptionGroupConfig
from tests.store_kit import flush, small_config
from tests.unit.broker.consumers.membership_kit import NOW_MS, ConsumerFixture, change, make_fixture
from tests.unit.store.conftest import WatchedDisk

QUERY, COMMIT, SEARCH, MAX, MIN, EARLIEST = 14, 15, 29, 30, 31, 32
NOT_FOUND = 22


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[ConsumerFixture]:
    fixture = make_fixture(tmp_path)
    yield serving(fixture)
    fixture.store.close()


def serving(fixture: ConsumerFixture) -> ConsumerFixture:
    fixture.serve(OffsetRequests(fixture.store, fixture.offsets, fixture.groups, fixture.topics))
    fixture.groups.put(SubscriptionGroupConfig(group_name="g"), NOW_MS)
    fixture.topics.ensure("T", 4, 6, NOW_MS)
    return fixture


def query(fixture: ConsumerFixture, queue_id: int = 0, **more: Any) -> Reply:
    return fixture.ask(QUERY, consumerGroup="g", topic="T", queueId=queue_id, **more)


def commit(
    fixture: ConsumerFixture,
    offset: object,
    *,
    group: str = "g",
    topic: str = "T",
    queue_id: int = 0,
) -> Reply:
    return fixture.ask(
        COMMIT, consumerGroup=group, topic=topic, queueId=queue_id, commitOffset=offset
    )


def offset_of(reply: Reply) -> int:
    assert reply.code == 0, reply.remark
    assert reply.ext is not None
    return int(reply.ext["offset"])


def hot_bytes(fixture: ConsumerFixture, size: int) -> None:
    store = msgspec.structs.replace(fixture.live.current.store, hot_bytes=size)
    fixture.live.current = msgspec.structs.replace(fixture.live.current, store=store)


# --- of a group


def test_a_query_returns_the_committed_offset(fixture: ConsumerFixture) -> None:
    assert commit(fixture, 7).code == 0
    assert offset_of(query(fixture)) == 7
    assert commit(fixture, 3).code == 0
    assert offset_of(query(fixture)) == 3
    assert offset_of(query(fixture, setZeroIfNotFound="false")) == 3


def test_a_new_group_starts_an_empty_or_unknown_queue_at_zero(fixture: ConsumerFixture) -> None:
    assert offset_of(query(fixture)) == 0
    fixture.store.make_queue(b"T", 0)
    assert offset_of(query(fixture)) == 0
    assert offset_of(fixture.ask(QUERY, consumerGroup="x", topic="nowhere", queueId=9)) == 0
    assert query(fixture, setZeroIfNotFound="false").code == NOT_FOUND


def test_a_new_group_starts_a_young_queue_at_zero(fixture: ConsumerFixture) -> None:
    fixture.put("T", 0, b"first")
    assert offset_of(query(fixture)) == 0
    assert offset_of(query(fixture, setZeroIfNotFound="true")) == 0
    assert query(fixture, setZeroIfNotFound="false").code == NOT_FOUND
    assert offset_of(query(fixture, 1)) == 0


def test_a_new_group_on_an_old_queue(fixture: ConsumerFixture) -> None:
    fixture.put("T", 0, b"first")
    hot_bytes(fixture, 4096)
    assert offset_of(query(fixture)) == 0
    fixture.put("T", 1, *[bytes(1000)] * 5)
    assert query(fixture).code == NOT_FOUND


def test_a_new_group_on_a_queue_with_deleted_messages(fixture: ConsumerFixture) -> None:
    fixture.put("T", 0, *[bytes(1000)] * 40)
    fixture.store.expire(1)
    assert fixture.store.min_offset("T", 0) > 0
    assert query(fixture).code == NOT_FOUND


def test_a_young_queue_is_young_after_a_restart(tmp_path: Path) -> None:
    fixture = make_fixture(tmp_path)
    fixture.put("T", 0, b"first")
    fixture.store.close()
    again = serving(make_fixture(tmp_path))
    assert offset_of(query(again)) == 0
    again.store.close()


def test_a_pending_reset_takes_precedence_over_commits(fixture: ConsumerFixture) -> None:
    commit(fixture, 9)
    fixture.offsets.reset("g", "T", {0: 2}, NOW_MS)
    reply = commit(fixture, 10)
    assert reply.code == 0
    assert reply.remark is not None
    assert offset_of(query(fixture)) == 2
    assert fixture.offsets.take_reset("g", "T", 0) == 2
    assert commit(fixture, 10).remark is None
    assert offset_of(query(fixture)) == 10


def test_commit_needs_group_topic_queue_and_offset(fixture: ConsumerFixture) -> None:
    assert commit(fixture, 1, group="nobody").code == 26
    assert commit(fixture, 1, topic="nothing").code == 17
    assert commit(fixture, 1, queue_id=4).code == 29
    assert commit(fixture, 1, queue_id=-1).code == 29
    assert commit(fixture, -1).code == 29
    assert commit(fixture, "much").code == 29
    assert fixture.ask(COMMIT, consumerGroup="g", topic="T", queueId=0).code == 29
    assert fixture.offsets.groups_of_topic("T") == []
    # The topic had more queues once.
    fixture.put("T", 9, b"old")
    assert commit(fixture, 1, queue_id=9).code == 0


def test_negative_offsets_of_old_files_are_ignored(fixture: ConsumerFixture) -> None:
    fixture.offsets.commit("g", "T", 0, -1, NOW_MS)
    assert query(fixture, setZeroIfNotFound="false").code == NOT_FOUND
    assert offset_of(query(fixture)) == 0


# --- of a queue


def test_min_and_max_offset(fixture: ConsumerFixture) -> None:
    assert offset_of(fixture.ask(MAX, topic="T", queueId=0)) == 0
    assert offset_of(fixture.ask(MIN, topic="T", queueId=0)) == 0
    fixture.put("T", 0, *[bytes(1000)] * 40)
    assert offset_of(fixture.ask(MAX, topic="T", queueId=0)) == 40
    fixture.store.expire(1)
    low = offset_of(fixture.ask(MIN, topic="T", queueId=0))
    assert low == fixture.store.min_offset("T", 0) > 0
    assert fixture.ask(MAX, topic="T").code == 29


def test_max_offset_is_the_confirmed_one(tmp_path: Path) -> None:
    config = small_config(sync_flush=True)
    store = MessageStore(tmp_path, config, disk=WatchedDisk(), now_ms=NOW_MS)
    fixture = serving(ConsumerFixture(store))
    fixture.put("T", 0, b"on its way")
    assert offset_of(fixture.ask(MAX, topic="T", queueId=0)) == 0
    assert offset_of(query(fixture)) == 0
    assert offset_of(fixture.ask(SEARCH, topic="T", queueId=0, timestamp=NOW_MS + 1)) == 0
    flush(store)
    assert offset_of(fixture.ask(MAX, topic="T", queueId=0)) == 1
    assert offset_of(query(fixture)) == 0
    store.close()


def test_search_by_time(fixture: ConsumerFixture) -> None:
    for ms in (100, 200, 200, 300):
        fixture.put("T", 0, b"x", ms=NOW_MS + ms)

    def search(ms: int, **more: Any) -> int:
        return offset_of(fixture.ask(SEARCH, topic="T", queueId=0, timestamp=NOW_MS + ms, **more))

    assert [search(ms) for ms in (0, 100, 150, 200, 250, 300, 301)] == [0, 0, 1, 1, 3, 3, 4]
    assert search(200, boundaryType="lower") == 1
    upper = [search(ms, boundaryType="UPPER") for ms in (0, 100, 150, 200, 250, 300, 301)]
    assert upper == [0, 0, 0, 2, 2, 3, 3]
    assert search(200, boundaryType="upper") == 2
    assert offset_of(fixture.ask(SEARCH, topic="T", queueId=3, timestamp=NOW_MS)) == 0


def test_earliest_time(fixture: ConsumerFixture) -> None:
    fixture.put("T", 0, b"x", ms=NOW_MS + 5)
    fixture.put("T", 0, b"y", ms=NOW_MS + 9)
    reply = fixture.ask(EARLIEST, topic="T", queueId=0)
    assert reply.ext == {"timestamp": str(NOW_MS + 5)}
    assert fixture.ask(EARLIEST, topic="T", queueId=1).ext == {"timestamp": "-1"}


def test_a_client_side_reset_allows_commits(fixture: ConsumerFixture) -> None:
    change(fixture.live, server_side_reset=False)
    fixture.offsets.reset("g", "T", {0: 2}, NOW_MS)
    assert commit(fixture, 10).remark is None
    assert offset_of(query(fixture)) == 10
