"""The lags of groups with a real store."""

from pathlib import Path

import pytest

from penstock.broker.metrics.group_lags import GroupLags, GroupTopicLag
from penstock.wire.record import Record
from tests.unit.broker.broker_kit import BrokerFixture, broker_fixture


def put(home: BrokerFixture, topic: str, count: int, *, at_ms: int) -> None:
    record = Record()
    for _ in range(count):
        record.fill(topic.encode(), b"x")
        assert home.broker.context.store.put(record, at_ms) == 0
    home.broker.context.store.publish()


def take(lags: GroupLags, now_ms: int) -> dict[tuple[str, str], GroupTopicLag]:
    rows = []
    for step in lags.collect():
        lags.read(step)
        rows += step
    lags.take(rows, now_ms)
    return {(one.group, one.topic): one for one in lags.rows}


def test_lags_in_messages_and_time(tmp_path: Path) -> None:
    with broker_fixture(tmp_path) as home:
        begin = home.now_ms
        offsets = home.broker.context.offsets
        put(home, "t", 2, at_ms=begin)
        put(home, "t", 3, at_ms=begin + 1_000)
        put(home, "u", 1, at_ms=begin + 2_000)
        offsets.commit("g", "t", 0, 1, begin)
        offsets.record_pull("g", "t", 0, 3)
        offsets.commit("g", "u", 0, 1, begin)
        offsets.commit("h", "gone", 0, 1, begin)
        lags = GroupLags(home.broker.context)
        found = take(lags, begin + 5_000)

        behind = found["g", "t"]
        assert (behind.lag, behind.ready) == (4, 2)
        assert behind.uncommitted_ms == begin
        assert behind.unpulled_ms == begin + 1_000
        done = found["g", "u"]
        assert (done.lag, done.ready, done.uncommitted_ms) == (0, 0, None)
        assert found["h", "gone"].lag == 0
        lags.read_earliest(home.broker.context.store.confirm_offset)
        assert lags.earliest_ms == begin


def test_a_time_is_not_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with broker_fixture(tmp_path) as home:
        begin = home.now_ms
        put(home, "t", 3, at_ms=begin)
        offsets = home.broker.context.offsets
        offsets.commit("g", "t", 0, 1, begin)
        reads = []
        lags = GroupLags(home.broker.context)

        def stored(store: object, queue: object, offset: int) -> int:
            reads.append(offset)
            return begin

        monkeypatch.setattr("penstock.broker.metrics.group_lags.stored_ms", stored)
        for _ in range(3):
            assert take(lags, begin)["g", "t"].uncommitted_ms == begin
        assert set(reads) == {1}
        first = len(reads)
        offsets.commit("g", "t", 0, 2, begin)
        take(lags, begin)
        assert reads[first:]
        assert set(reads[first:]) == {2}


def test_an_unreadable_message_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with broker_fixture(tmp_path) as home:
        put(home, "t", 3, at_ms=home.now_ms)
        home.broker.context.offsets.commit("g", "t", 0, 1, home.now_ms)
        monkeypatch.setattr("penstock.broker.metrics.group_lags.stored_ms", lambda *where: -1)
        one = take(GroupLags(home.broker.context), home.now_ms)["g", "t"]
        assert (one.lag, one.uncommitted_ms) == (2, None)
