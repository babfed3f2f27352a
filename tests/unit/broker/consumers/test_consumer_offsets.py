"""Progress of groups: commits, resets, pull offsets, and the table's file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.store.tables import STALE_TEXTS_MAX, ConfigFile, ConsumerOffsetTable
from penstock.wire import fastjson
from penstock.wire.bodies.table_bodies import ConsumerOffsetSerializeWrapper
from tests.unit.broker.consumers.membership_kit import NOW_MS, ConsumerFixture, change, make_fixture


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[ConsumerFixture]:
    fixture = make_fixture(tmp_path)
    yield fixture
    fixture.store.close()


def test_offsets_may_move_back(fixture: ConsumerFixture) -> None:
    offsets = fixture.offsets
    assert offsets.get("g", "T", 0) is None
    assert offsets.commit("g", "T", 0, 10, NOW_MS)
    assert offsets.commit("g", "T", 0, 4, NOW_MS)
    assert offsets.get("g", "T", 0) == 4
    assert offsets.table.dirty


def test_a_pending_reset_ignores_commits(fixture: ConsumerFixture) -> None:
    offsets = fixture.offsets
    offsets.commit("g", "T", 0, 10, NOW_MS)
    offsets.commit("g", "T", 1, 10, NOW_MS)
    offsets.reset("g", "T", {0: 3, 2: 0}, NOW_MS)
    assert [offsets.get("g", "T", q) for q in range(3)] == [3, 10, 0]
    assert not offsets.commit("g", "T", 0, 11, NOW_MS)
    assert offsets.commit("g", "T", 1, 11, NOW_MS)
    assert offsets.commit("h", "T", 0, 12, NOW_MS)
    assert offsets.get("g", "T", 0) == 3
    assert offsets.take_reset("g", "T", 1) is None
    assert offsets.take_reset("h", "T", 0) is None
    assert offsets.take_reset("g", "T", 0) == 3
    assert offsets.take_reset("g", "T", 0) is None
    assert offsets.commit("g", "T", 0, 5, NOW_MS)
    assert offsets.has_reset("g", "T", 2)
    assert offsets.take_reset("g", "T", 2) == 0
    assert not offsets.has_reset("g", "T", 2)


def test_without_server_side_reset_nothing_is_pending(fixture: ConsumerFixture) -> None:
    change(fixture.live, server_side_reset=False)
    fixture.offsets.reset("g", "T", {0: 3}, NOW_MS)
    assert fixture.offsets.get("g", "T", 0) == 3
    assert fixture.offsets.take_reset("g", "T", 0) is None


def test_pull_offsets_are_separate_from_commits(fixture: ConsumerFixture) -> None:
    offsets = fixture.offsets
    assert offsets.pulled("g", "T", 0) is None
    offsets.commit("g", "T", 0, 4, NOW_MS)
    assert offsets.pulled("g", "T", 0) == 4
    offsets.record_pull("g", "T", 0, 36)
    assert (offsets.pulled("g", "T", 0), offsets.get("g", "T", 0)) == (36, 4)
    offsets.reset("g", "T", {0: 1}, NOW_MS)
    assert offsets.pulled("g", "T", 0) == 1


def test_clone_copies_the_offsets_of_a_group(fixture: ConsumerFixture) -> None:
    offsets = fixture.offsets
    assert not offsets.clone("g", "h", "T", NOW_MS)
    offsets.commit("g", "T", 0, 10, NOW_MS)
    offsets.commit("g", "T", 1, 20, NOW_MS)
    offsets.commit("g", "U", 0, 5, NOW_MS)
    offsets.commit("h", "T", 7, 1, NOW_MS)
    assert offsets.clone("g", "h", "T", NOW_MS)
    assert dict(offsets.queues("h", "T")) == {0: 10, 1: 20}
    assert offsets.topics_of_group("h") == ["T"]
    offsets.commit("h", "T", 0, 11, NOW_MS)
    assert offsets.get("g", "T", 0) == 10
    assert offsets.clone("g", "g", "T", NOW_MS)
    assert dict(offsets.queues("g", "T")) == {0: 10, 1: 20}


def test_removed_topics_and_groups_leave_nothing(fixture: ConsumerFixture) -> None:
    offsets = fixture.offsets
    for group in ("g", "h"):
        for topic in ("T", "U"):
            offsets.reset(group, topic, {0: 1}, NOW_MS)
            offsets.record_pull(group, topic, 0, 5)
    offsets.record_pull("only-pulls", "T", 0, 5)
    assert offsets.groups_of_topic("T") == ["g", "h"]
    offsets.remove_topic("T", NOW_MS)
    assert offsets.groups_of_topic("T") == []
    assert offsets.pulled("only-pulls", "T", 0) is None
    for group in ("g", "h"):
        assert offsets.get(group, "T", 0) is None
        assert offsets.pulled(group, "T", 0) is None
        assert offsets.take_reset(group, "T", 0) is None
    assert offsets.topics_of_group("g") == ["U"]
    offsets.remove_group("g", NOW_MS)
    assert offsets.topics_of_group("g") == []
    assert offsets.get("g", "U", 0) is None
    assert offsets.take_reset("g", "U", 0) is None
    assert offsets.take_reset("h", "U", 0) == 1


# --- the table's file


def check(table: ConsumerOffsetTable) -> None:
    assert table.snapshot() == fastjson.encode_pretty(table.wrapper())
    assert table.body() == fastjson.encode(table.wrapper())


def test_the_file_is_correct_with_any_number_of_stale_entries() -> None:
    table = ConsumerOffsetTable()
    check(table)
    for turn in range(3):
        for number in range(2 * STALE_TEXTS_MAX):
            table.commit(f"T{number}", "g", turn, number + turn, NOW_MS)
        check(table)
    table.remove_topic("T0", NOW_MS)
    table.remove_topic(f"T{STALE_TEXTS_MAX}", NOW_MS)
    check(table)
    table.commit("T0", "g", 0, 9, NOW_MS)
    table.remove_topic("T0", NOW_MS)
    check(table)
    table.remove_group("g", NOW_MS)
    check(table)
    assert b'"offsetTable":{}' in table.snapshot()


def test_a_snapshot_encodes_only_stale_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ConsumerOffsetTable()
    for number in range(10 * STALE_TEXTS_MAX):
        table.commit(f"T{number}", "g", 0, number, NOW_MS)
    written: list[str] = []
    write = ConsumerOffsetTable._write

    def count(self: ConsumerOffsetTable, key: str) -> None:
        written.append(key)
        write(self, key)

    monkeypatch.setattr(ConsumerOffsetTable, "_write", count)
    table.snapshot()
    assert len(written) <= STALE_TEXTS_MAX
    written.clear()
    table.commit("T5", "g", 0, 77, NOW_MS)
    table.snapshot()
    assert written == ["T5@g"]
    check(table)


def test_a_loaded_table_has_its_topics_and_groups(tmp_path: Path, fixture: ConsumerFixture) -> None:
    path = tmp_path / "offsets.json"
    path.write_bytes(
        b'{"future":"\\u0000","offsetTable":{"T@g":{0:1},"%RETRY%g@g":{},"T@h":{"1":2}}}'
    )
    table = ConsumerOffsetTable()
    table.commit("old", "old", 0, 1, NOW_MS)
    assert table.load(ConfigFile(fixture.store.disk, path))
    assert not table.dirty
    assert (table.topics_of("g"), table.groups_of("T")) == (["T"], ["g", "h"])
    assert table.groups_of("old") == []
    assert b'"future":"\\u0000"' in table.snapshot()
    written = fastjson.decode(table.snapshot(), ConsumerOffsetSerializeWrapper)
    assert written.offset_table == {"T@g": {0: 1}, "T@h": {1: 2}}


names = st.text('ab@%"\\é\x00', max_size=3)
acts = st.tuples(st.integers(0, 5), names, names, st.integers(0, 2), st.integers(0, 2**63 - 1))


@given(st.lists(acts, max_size=40))
def test_the_file_follows_any_changes(steps: list[tuple[int, str, str, int, int]]) -> None:
    table = ConsumerOffsetTable()
    for act, topic, group, queue_id, offset in steps:
        if act < 3:
            table.commit(topic, group, queue_id, offset, NOW_MS)
        elif act == 3:
            table.remove(topic, group, NOW_MS)
        elif act == 4:
            table.merge(
                ConsumerOffsetSerializeWrapper(offset_table={f"{topic}@{group}": {1: offset}})
            )
        else:
            check(table)
    check(table)
