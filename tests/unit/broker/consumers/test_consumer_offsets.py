"""Progress of groups: commits, resets, pull offsets, and the table's file."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.store.tables import consumer_offset_table
from penstock.store.tables.config_tables import ConfigFile
from penstock.store.tables.consumer_offset_table import (
    QUEUES_PER_TEXT,
    STALE_TEXTS_MAX,
    ConsumerOffsetTable,
)
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
    list(offsets.remove_topic("T", NOW_MS))
    assert offsets.groups_of_topic("T") == []
    assert offsets.pulled("only-pulls", "T", 0) is None
    for group in ("g", "h"):
        assert offsets.get(group, "T", 0) is None
        assert offsets.pulled(group, "T", 0) is None
        assert offsets.take_reset(group, "T", 0) is None
    assert offsets.topics_of_group("g") == ["U"]
    list(offsets.remove_group("g", NOW_MS))
    assert offsets.topics_of_group("g") == []
    assert offsets.get("g", "U", 0) is None
    assert offsets.take_reset("g", "U", 0) is None
    assert offsets.take_reset("h", "U", 0) == 1


# --- the table's file


def check(table: ConsumerOffsetTable) -> None:
    assert table.snapshot() == fastjson.encode_pretty(table.wrapper())
    assert json.loads(table.body()) == json.loads(fastjson.encode_strict(table.wrapper()))


def test_the_file_is_correct_with_any_number_of_stale_entries() -> None:
    table = ConsumerOffsetTable()
    check(table)
    for turn in range(3):
        for number in range(2 * STALE_TEXTS_MAX):
            table.commit(f"T{number}", "g", turn, number + turn, NOW_MS)
        check(table)
    table.remove("T0", "g", NOW_MS)
    table.remove(f"T{STALE_TEXTS_MAX}", "g", NOW_MS)
    check(table)
    table.commit("T0", "g", 0, 9, NOW_MS)
    table.remove("T0", "g", NOW_MS)
    check(table)
    for topic in table.topics_of("g"):
        table.remove(topic, "g", NOW_MS)
    check(table)
    assert b'"offsetTable":{}' in table.snapshot()


def test_a_snapshot_encodes_only_stale_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ConsumerOffsetTable()
    for number in range(10 * STALE_TEXTS_MAX):
        table.commit(f"T{number}", "g", 0, number, NOW_MS)
    written: list[str] = []
    write = ConsumerOffsetTable._write

    def count(self: ConsumerOffsetTable, key: str, number: int | None) -> None:
        written.append(key)
        write(self, key, number)

    monkeypatch.setattr(ConsumerOffsetTable, "_write", count)
    table.snapshot()
    assert len(written) <= STALE_TEXTS_MAX
    written.clear()
    table.commit("T5", "g", 0, 77, NOW_MS)
    table.snapshot()
    assert written == ["T5@g"]
    check(table)


def test_a_commit_on_one_of_many_queues_encodes_few_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = ConsumerOffsetTable()
    for queue_id in range(10 * QUEUES_PER_TEXT):
        table.commit("T", "g", queue_id, 1, NOW_MS)
    table.snapshot()
    encoded: list[int] = []
    encode = consumer_offset_table._numbers

    def count(queues: Mapping[int, int]) -> bytes:
        encoded.append(len(queues))
        return encode(queues)

    monkeypatch.setattr(consumer_offset_table, "_numbers", count)
    table.commit("T", "g", 5, 7, NOW_MS)
    table.commit("T", "g", 6, 7, NOW_MS)
    check(table)
    assert encoded == [QUEUES_PER_TEXT]


@pytest.mark.slow
def test_the_offsets_of_a_group_on_many_queues_are_written_and_read_back(
    tmp_path: Path, fixture: ConsumerFixture
) -> None:
    queues = {queue_id: 3 * queue_id for queue_id in range(2 * QUEUES_PER_TEXT + 3)}
    table = ConsumerOffsetTable()
    for queue_id, offset in queues.items():
        table.commit("T", "g", queue_id, offset, NOW_MS)
        table.commit("U", "g", 0, offset, NOW_MS)
        assert fastjson.decode(table.body(), ConsumerOffsetSerializeWrapper).offset_table == {
            "T@g": dict(table.queues("T", "g")),
            "U@g": {0: offset},
        }
    path = tmp_path / "offsets.json"
    path.write_bytes(table.snapshot())
    again = ConsumerOffsetTable()
    assert again.load(ConfigFile(fixture.store.disk, path))
    assert dict(again.queues("T", "g")) == queues
    again.remove("T", "g", NOW_MS)
    assert dict(again.queues("T", "g")) == {}
    assert b"T@g" not in again.snapshot()


def test_the_pool_writes_the_offsets_of_the_time_of_the_snapshot() -> None:
    table = ConsumerOffsetTable()
    for queue_id in range(2 * QUEUES_PER_TEXT):
        table.commit("T", "g", queue_id, 1, NOW_MS)
    expected = fastjson.encode_pretty(table.wrapper())
    work = table.begin_snapshot()
    assert not table.dirty
    for queue_id in range(2 * QUEUES_PER_TEXT):
        table.commit("T", "g", queue_id, 2, NOW_MS)
    table.remove("T", "g", NOW_MS)
    assert work() == expected
    assert table.dirty


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


def act(
    table: ConsumerOffsetTable, act: int, topic: str, group: str, queue_id: int, offset: int
) -> None:
    if act < 3:
        table.commit(topic, group, queue_id, offset, NOW_MS)
    elif act == 3:
        table.remove(topic, group, NOW_MS)
    else:
        queues = dict.fromkeys(range(1, 2 + queue_id), offset)
        table.merge(ConsumerOffsetSerializeWrapper(offset_table={f"{topic}@{group}": queues}))


@given(st.lists(acts, max_size=40))
def test_the_file_follows_any_changes(steps: list[tuple[int, str, str, int, int]]) -> None:
    table = ConsumerOffsetTable()
    for step in steps:
        if step[0] < 5:
            act(table, *step)
        else:
            check(table)
    check(table)


few_names = st.sampled_from("ab")
few_acts = st.tuples(st.integers(0, 6), few_names, few_names, st.integers(0, 5), st.integers(0, 9))


@given(st.lists(few_acts, max_size=60))
def test_the_file_follows_any_changes_of_entries_with_several_texts(
    steps: list[tuple[int, str, str, int, int]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consumer_offset_table, "QUEUES_PER_TEXT", 2)
        patch.setattr(consumer_offset_table, "STALE_TEXTS_MAX", 2)
        table = ConsumerOffsetTable()
        for number, topic, group, queue_id, offset in steps:
            if number < 5:
                act(table, number, topic, group, queue_id, offset)
            elif number == 5:
                table.copy(topic, group, "a", NOW_MS)
            else:
                table.snapshot()
            written = fastjson.decode(table.body(), ConsumerOffsetSerializeWrapper)
            assert written.offset_table == table.wrapper().offset_table
