"""Requests about offsets: of a group, and of a queue."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.broker.consumers.offset_requests import ProgressHandlers
from penstock.rpc.answers import Reply
from penstock.store.store import MessageStore
from penstock.wire.bodies.client_bodies import SubscriptionGroupConfig
from tests.store_kit import flush, small_config
from tests.unit.broker.consumers.membership_kit import NOW_MS, Bench, change, make_bench
from tests.unit.store.conftest import WatchedDisk

QUERY, COMMIT, SEARCH, MAX, MIN, EARLIEST = 14, 15, 29, 30, 31, 32
NOT_FOUND = 22


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = make_bench(tmp_path)
    yield serving(bench)
    bench.store.close()


def serving(bench: Bench) -> Bench:
    bench.serve(ProgressHandlers(bench.store, bench.offsets, bench.groups, bench.topics))
    bench.groups.put(SubscriptionGroupConfig(group_name="g"), NOW_MS)
    bench.topics.ensure("T", 4, 6, NOW_MS)
    return bench


def query(bench: Bench, queue_id: int = 0, **more: Any) -> Reply:
    return bench.ask(QUERY, consumerGroup="g", topic="T", queueId=queue_id, **more)


def commit(bench: Bench, offset: object, *, group: str = "g", topic: str = "T",
           queue_id: int = 0) -> Reply:  # fmt: skip
    return bench.ask(
        COMMIT, consumerGroup=group, topic=topic, queueId=queue_id, commitOffset=offset
    )


def offset_of(reply: Reply) -> int:
    assert reply.code == 0, reply.remark
    assert reply.ext is not None
    return int(reply.ext["offset"])


def hot_bytes(bench: Bench, size: int) -> None:
    store = msgspec.structs.replace(bench.live.current.store, hot_bytes=size)
    bench.live.current = msgspec.structs.replace(bench.live.current, store=store)


# --- of a group


def test_query_gives_what_was_committed(bench: Bench) -> None:
    assert commit(bench, 7).code == 0
    assert offset_of(query(bench)) == 7
    assert commit(bench, 3).code == 0
    assert offset_of(query(bench)) == 3
    assert offset_of(query(bench, setZeroIfNotFound="false")) == 3


def test_new_group_on_an_empty_or_unknown_queue_is_not_found(bench: Bench) -> None:
    assert query(bench).code == NOT_FOUND
    bench.store.make_queue(b"T", 0)
    assert query(bench).code == NOT_FOUND
    assert bench.ask(QUERY, consumerGroup="x", topic="nowhere", queueId=9).code == NOT_FOUND


def test_new_group_begins_a_young_queue_at_zero(bench: Bench) -> None:
    bench.put("T", 0, b"first")
    assert offset_of(query(bench)) == 0
    assert offset_of(query(bench, setZeroIfNotFound="true")) == 0
    assert query(bench, setZeroIfNotFound="false").code == NOT_FOUND
    assert query(bench, 1).code == NOT_FOUND


def test_new_group_on_a_queue_whose_beginning_is_far_back(bench: Bench) -> None:
    bench.put("T", 0, b"first")
    hot_bytes(bench, 4096)
    assert offset_of(query(bench)) == 0
    bench.put("T", 1, *[bytes(1000)] * 5)
    assert query(bench).code == NOT_FOUND


def test_new_group_on_a_queue_that_has_lost_messages(bench: Bench) -> None:
    bench.put("T", 0, *[bytes(1000)] * 40)
    bench.store.expire(1)
    assert bench.store.min_offset("T", 0) > 0
    assert query(bench).code == NOT_FOUND


def test_young_queue_is_young_after_a_restart(tmp_path: Path) -> None:
    bench = make_bench(tmp_path)
    bench.put("T", 0, b"first")
    bench.store.close()
    again = serving(make_bench(tmp_path))
    assert offset_of(query(again)) == 0
    again.store.close()


def test_pending_reset_outweighs_commits(bench: Bench) -> None:
    commit(bench, 9)
    bench.offsets.reset("g", "T", {0: 2}, NOW_MS)
    reply = commit(bench, 10)
    assert reply.code == 0
    assert reply.remark is not None
    assert offset_of(query(bench)) == 2
    assert bench.offsets.take_reset("g", "T", 0) == 2
    assert commit(bench, 10).remark is None
    assert offset_of(query(bench)) == 10


def test_commit_needs_group_topic_queue_and_offset(bench: Bench) -> None:
    assert commit(bench, 1, group="nobody").code == 26
    assert commit(bench, 1, topic="nothing").code == 17
    assert commit(bench, 1, queue_id=4).code == 29
    assert commit(bench, 1, queue_id=-1).code == 29
    assert commit(bench, -1).code == 29
    assert commit(bench, "much").code == 29
    assert bench.ask(COMMIT, consumerGroup="g", topic="T", queueId=0).code == 29
    assert bench.offsets.groups_of_topic("T") == []
    # The topic had more queues once.
    bench.put("T", 9, b"old")
    assert commit(bench, 1, queue_id=9).code == 0


def test_negative_offsets_of_old_files_count_as_none(bench: Bench) -> None:
    bench.offsets.commit("g", "T", 0, -1, NOW_MS)
    assert query(bench).code == NOT_FOUND


# --- of a queue


def test_first_and_last_offset(bench: Bench) -> None:
    assert offset_of(bench.ask(MAX, topic="T", queueId=0)) == 0
    assert offset_of(bench.ask(MIN, topic="T", queueId=0)) == 0
    bench.put("T", 0, *[bytes(1000)] * 40)
    assert offset_of(bench.ask(MAX, topic="T", queueId=0)) == 40
    bench.store.expire(1)
    low = offset_of(bench.ask(MIN, topic="T", queueId=0))
    assert low == bench.store.min_offset("T", 0) > 0
    assert bench.ask(MAX, topic="T").code == 29


def test_max_offset_is_the_confirmed_one(tmp_path: Path) -> None:
    config = small_config(sync_flush=True)
    store = MessageStore(tmp_path, config, disk=WatchedDisk(), now_ms=NOW_MS)
    bench = serving(Bench(store))
    bench.put("T", 0, b"on its way")
    assert offset_of(bench.ask(MAX, topic="T", queueId=0)) == 0
    assert query(bench).code == NOT_FOUND
    assert offset_of(bench.ask(SEARCH, topic="T", queueId=0, timestamp=NOW_MS + 1)) == 0
    flush(store)
    assert offset_of(bench.ask(MAX, topic="T", queueId=0)) == 1
    assert offset_of(query(bench)) == 0
    store.close()


def test_search_by_time(bench: Bench) -> None:
    for ms in (100, 200, 200, 300):
        bench.put("T", 0, b"x", ms=NOW_MS + ms)

    def search(ms: int, **more: Any) -> int:
        return offset_of(bench.ask(SEARCH, topic="T", queueId=0, timestamp=NOW_MS + ms, **more))

    assert [search(ms) for ms in (0, 100, 150, 200, 250, 300, 301)] == [0, 0, 1, 1, 3, 3, 4]
    assert search(200, boundaryType="lower") == 1
    upper = [search(ms, boundaryType="UPPER") for ms in (0, 100, 150, 200, 250, 300, 301)]
    assert upper == [0, 0, 0, 2, 2, 3, 3]
    assert search(200, boundaryType="upper") == 2
    assert offset_of(bench.ask(SEARCH, topic="T", queueId=3, timestamp=NOW_MS)) == 0


def test_earliest_time(bench: Bench) -> None:
    bench.put("T", 0, b"x", ms=NOW_MS + 5)
    bench.put("T", 0, b"y", ms=NOW_MS + 9)
    reply = bench.ask(EARLIEST, topic="T", queueId=0)
    assert reply.ext == {"timestamp": str(NOW_MS + 5)}
    assert bench.ask(EARLIEST, topic="T", queueId=1).ext == {"timestamp": "-1"}


def test_reset_on_the_client_side_leaves_commits_alone(bench: Bench) -> None:
    change(bench.live, server_side_reset=False)
    bench.offsets.reset("g", "T", {0: 2}, NOW_MS)
    assert commit(bench, 10).remark is None
    assert offset_of(query(bench)) == 10
