"""Offsets of the Spark source: JSON, limits per batch, lost messages."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.arrow.queue_offsets import (
    INITIAL,
    format_queues,
    from_json,
    initial_in,
    limit_rows,
    parse_assignment,
    readable_ranges,
    report_losses,
    resolve_offsets,
    rows_between,
    shrunk_queues,
    to_json,
)
from penstock.errors import BadSetting, DataLost
from penstock.wire.bodies.client_bodies import MessageQueue

Q = [MessageQueue("orders", "broker-a", n) for n in range(40)]
OTHER = MessageQueue("bills", "broker-b", 3)

names = st.sampled_from(["a", "b", "c"])
queues = st.builds(MessageQueue, names, names, st.integers(0, 12))
marks = st.dictionaries(queues, st.integers(0, 2**62), max_size=20)


@given(marks, st.none() | marks)
def test_json_round_trip_is_stable(
    offsets: dict[MessageQueue, int], initial: dict[MessageQueue, int] | None
) -> None:
    text = json.dumps(to_json(offsets, initial))
    again = json.loads(text)
    assert from_json(again) == offsets
    assert initial_in(again) == initial
    turned = dict(reversed(list(offsets.items())))
    assert json.dumps(to_json(turned, initial)) == text


def test_initial_offsets_are_not_a_topic() -> None:
    assert from_json({INITIAL: {"orders": {}}, "orders": {"broker-a": {"1": 5}}}) == {Q[1]: 5}
    assert initial_in({}) is None


@pytest.mark.parametrize("kept", [{"a": 1}, {"a": {"b": {"x": 1}}}, {"a": {"b": {"0": -2}}}])
def test_a_foreign_checkpoint_is_refused(kept: dict[str, object]) -> None:
    with pytest.raises(BadSetting, match="checkpoint"):
        from_json(kept)


def test_assignment_is_parsed() -> None:
    assert parse_assignment('{"t": {"a": [2, 0, 2], "b": [1]}}') == {"t": {"a": (0, 2), "b": (1,)}}


def test_limit_is_shared_in_proportion_to_sizes() -> None:
    start = {Q[0]: 100, Q[1]: 0, Q[2]: 7}
    end = limit_rows(start, {Q[0]: 1_100, Q[1]: 100, Q[2]: 7}, 110)
    assert end[Q[2]] == 7
    assert end[Q[0]] - 100 + end[Q[1]] == 110
    assert 9 <= end[Q[1]] <= 11


def test_fewer_rows_than_the_limit_are_not_limited() -> None:
    end = {Q[0]: 5, Q[1]: 6}
    assert limit_rows({Q[0]: 0, Q[1]: 0}, end, 11) == end


sizes = st.lists(st.integers(0, 1_000), min_size=1, max_size=40)


@given(sizes, st.integers(1, 3_000))
def test_limit_is_exact_and_no_queue_starves(lengths: list[int], rows_max: int) -> None:
    at = {Q[n]: 10 * n for n in range(len(lengths))}
    end = {Q[n]: 10 * n + length for n, length in enumerate(lengths)}
    got = limit_rows(at, end, rows_max)
    assert got.keys() == end.keys()
    assert all(at[q] <= got[q] <= end[q] for q in end)
    assert rows_between(at, got) == min(rows_max, sum(lengths))
    full = [q for q in end if end[q] > at[q]]
    if rows_max >= len(full):
        assert all(got[q] > at[q] for q in full)


def test_more_queues_than_rows_take_turns() -> None:
    at = dict.fromkeys(Q[:10], 0)
    end = dict.fromkeys(Q[:10], 1_000)
    for _ in range(5):
        at = limit_rows(at, end, 2)
    assert set(at.values()) == {1}


def test_shrunk_queues_are_reported() -> None:
    losses = shrunk_queues({Q[0]: 10, Q[1]: 10, Q[2]: 10}, {Q[0]: 10, Q[1]: 4, Q[3]: 0})
    assert [loss.queue for loss in losses] == [Q[1]]
    assert "up to offset 10" in str(losses[0])
    assert "ends at 4" in str(losses[0])


def test_readable_ranges_of_existing_messages() -> None:
    found, losses = readable_ranges(
        {Q[0]: 5, Q[1]: 8}, {Q[0]: 9, Q[1]: 8, Q[2]: 3}, {Q[0]: 0, Q[2]: 1}, {Q[0]: 100}
    )
    assert found == {Q[0]: (5, 9), Q[2]: (1, 3)}
    assert losses == []


def test_deleted_messages_are_reported_and_skipped() -> None:
    found, losses = readable_ranges({Q[0]: 5, Q[1]: 5}, {Q[0]: 9, Q[1]: 9}, {Q[0]: 7, Q[1]: 50}, {})
    assert found == {Q[0]: (7, 9)}
    assert [loss.rows for loss in losses] == [2, 4]
    with pytest.raises(DataLost) as failure:
        report_losses(losses, fail=True)
    text = failure.value.message
    assert "6 messages are lost" in text
    assert "orders, queue 0 at broker-a: offsets 5 to 6 are missing, the first offset is 7" in text
    report_losses(losses, fail=False)


def test_truncated_messages_are_reported() -> None:
    found, losses = readable_ranges({Q[0]: 5}, {Q[0]: 20}, {Q[0]: 0}, {Q[0]: 12})
    assert found == {Q[0]: (5, 12)}
    assert losses[0].rows == 8
    found, losses = readable_ranges({Q[0]: 15}, {Q[0]: 20}, {Q[0]: 0}, {Q[0]: 12})
    assert found == {}
    assert losses[0].rows == 5


def test_shrunk_queue_is_read_from_its_start() -> None:
    found, losses = readable_ranges({Q[0]: 100}, {Q[0]: 20}, {Q[0]: 3}, {Q[0]: 20})
    assert found == {Q[0]: (3, 20)}
    assert losses == []


def test_long_list_of_losses_is_shortened() -> None:
    losses = shrunk_queues(dict.fromkeys(Q[:30], 5), dict.fromkeys(Q[:30], 1))
    with pytest.raises(DataLost, match="and 20 more queues"):
        report_losses(losses, fail=True)


@given(marks, st.data())
def test_readable_ranges_are_wanted_and_exist(
    end: dict[MessageQueue, int], data: st.DataObject
) -> None:
    def some(least: int = 0) -> dict[MessageQueue, int]:
        return {q: data.draw(st.integers(least, 2**62)) for q in end}

    start, begins, ends = some(), some(), some()
    found, _ = readable_ranges(start, end, begins, ends)
    for queue, (first, until) in found.items():
        assert begins[queue] <= first < until <= min(end[queue], ends[queue])


def test_earliest_and_latest_become_offsets() -> None:
    begins, ends = {Q[0]: 3, Q[1]: 4, Q[2]: 0}, {Q[0]: 30, Q[1]: 40, Q[2]: 50}
    wanted = {Q[0]: -2, Q[1]: -1, Q[2]: 7}
    assert resolve_offsets(wanted, begins, ends, "startingOffsets") == {Q[0]: 3, Q[1]: 40, Q[2]: 7}
    with pytest.raises(BadSetting, match="bills broker-b 3"):
        resolve_offsets({**wanted, OTHER: 1}, begins, ends, "startingOffsets")
    with pytest.raises(BadSetting, match="orders broker-a 1 2"):
        resolve_offsets({Q[0]: 3}, begins, ends, "startingOffsets")
    with pytest.raises(BadSetting, match="51 of orders broker-a 2 is after its end, 50"):
        resolve_offsets({**wanted, Q[2]: 51}, begins, ends, "startingOffsets")


def test_queues_as_text() -> None:
    assert format_queues([Q[2], OTHER, Q[0]]) == "bills broker-b 3; orders broker-a 0 2"
