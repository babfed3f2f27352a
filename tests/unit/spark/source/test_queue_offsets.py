"""Offsets of the Spark source: JSON, limits per batch, and what is missing."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import BadSetting, DataLost
from penstock.spark.source.queue_offsets import (
    INITIAL,
    from_json,
    gone_back,
    initial_in,
    limited,
    listed,
    parse_assignment,
    report,
    resolved,
    rows_between,
    spans,
    to_json,
)
from penstock.wire.bodies.client_bodies import MessageQueue

Q = [MessageQueue("orders", "broker-a", n) for n in range(40)]
OTHER = MessageQueue("bills", "broker-b", 3)

names = st.sampled_from(["a", "b", "c"])
queues = st.builds(MessageQueue, names, names, st.integers(0, 12))
marks = st.dictionaries(queues, st.integers(0, 2**62), max_size=20)


@given(marks, st.none() | marks)
def test_offsets_come_back_from_json_in_one_text(
    offsets: dict[MessageQueue, int], initial: dict[MessageQueue, int] | None
) -> None:
    text = json.dumps(to_json(offsets, initial))
    again = json.loads(text)
    assert from_json(again) == offsets
    assert initial_in(again) == initial
    turned = dict(reversed(list(offsets.items())))
    assert json.dumps(to_json(turned, initial)) == text


def test_the_beginning_is_no_topic() -> None:
    assert from_json({INITIAL: {"orders": {}}, "orders": {"broker-a": {"1": 5}}}) == {Q[1]: 5}
    assert initial_in({}) is None


@pytest.mark.parametrize("kept", [{"a": 1}, {"a": {"b": {"x": 1}}}, {"a": {"b": {"0": -2}}}])
def test_a_foreign_checkpoint_is_refused(kept: dict[str, object]) -> None:
    with pytest.raises(BadSetting, match="checkpoint"):
        from_json(kept)


def test_assignments() -> None:
    assert parse_assignment('{"t": {"a": [2, 0, 2], "b": [1]}}') == {"t": {"a": (0, 2), "b": (1,)}}


def test_limits_are_spread_by_what_queues_have() -> None:
    start = {Q[0]: 100, Q[1]: 0, Q[2]: 7}
    end = limited(start, {Q[0]: 1_100, Q[1]: 100, Q[2]: 7}, 110)
    assert end[Q[2]] == 7
    assert end[Q[0]] - 100 + end[Q[1]] == 110
    assert 9 <= end[Q[1]] <= 11


def test_no_limit_where_there_is_less() -> None:
    end = {Q[0]: 5, Q[1]: 6}
    assert limited({Q[0]: 0, Q[1]: 0}, end, 11) == end


sizes = st.lists(st.integers(0, 1_000), min_size=1, max_size=40)


@given(sizes, st.integers(1, 3_000))
def test_a_limit_is_kept_exactly_and_no_queue_starves(lengths: list[int], rows_max: int) -> None:
    at = {Q[n]: 10 * n for n in range(len(lengths))}
    end = {Q[n]: 10 * n + length for n, length in enumerate(lengths)}
    got = limited(at, end, rows_max)
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
        at = limited(at, end, 2)
    assert set(at.values()) == {1}


def test_queues_that_end_before_our_place() -> None:
    losses = gone_back({Q[0]: 10, Q[1]: 10, Q[2]: 10}, {Q[0]: 10, Q[1]: 4, Q[3]: 0})
    assert [loss.queue for loss in losses] == [Q[1]]
    assert "up to offset 10" in str(losses[0])
    assert "ends at 4" in str(losses[0])


def test_spans_of_what_is_there() -> None:
    found, losses = spans(
        {Q[0]: 5, Q[1]: 8}, {Q[0]: 9, Q[1]: 8, Q[2]: 3}, {Q[0]: 0, Q[2]: 1}, {Q[0]: 100}
    )
    assert found == {Q[0]: (5, 9), Q[2]: (1, 3)}
    assert losses == []


def test_what_retention_took_is_named_and_left_out() -> None:
    found, losses = spans({Q[0]: 5, Q[1]: 5}, {Q[0]: 9, Q[1]: 9}, {Q[0]: 7, Q[1]: 50}, {})
    assert found == {Q[0]: (7, 9)}
    assert [loss.rows for loss in losses] == [2, 4]
    with pytest.raises(DataLost) as failure:
        report(losses, fail=True)
    text = failure.value.message
    assert "6 messages are lost" in text
    assert "orders, queue 0 at broker-a: offsets 5 to 6 are not there, the first there is 7" in text
    report(losses, fail=False)


def test_what_was_cut_off_at_the_end_is_named() -> None:
    found, losses = spans({Q[0]: 5}, {Q[0]: 20}, {Q[0]: 0}, {Q[0]: 12})
    assert found == {Q[0]: (5, 12)}
    assert losses[0].rows == 8
    found, losses = spans({Q[0]: 15}, {Q[0]: 20}, {Q[0]: 0}, {Q[0]: 12})
    assert found == {}
    assert losses[0].rows == 5


def test_a_queue_that_went_back_begins_anew() -> None:
    found, losses = spans({Q[0]: 100}, {Q[0]: 20}, {Q[0]: 3}, {Q[0]: 20})
    assert found == {Q[0]: (3, 20)}
    assert losses == []


def test_a_long_list_of_losses_is_cut() -> None:
    losses = gone_back(dict.fromkeys(Q[:30], 5), dict.fromkeys(Q[:30], 1))
    with pytest.raises(DataLost, match="and 20 queues more"):
        report(losses, fail=True)


@given(marks, st.data())
def test_spans_lie_in_what_is_wanted_and_there(
    end: dict[MessageQueue, int], data: st.DataObject
) -> None:
    def some(least: int = 0) -> dict[MessageQueue, int]:
        return {q: data.draw(st.integers(least, 2**62)) for q in end}

    start, begins, ends = some(), some(), some()
    found, _ = spans(start, end, begins, ends)
    for queue, (first, until) in found.items():
        assert begins[queue] <= first < until <= min(end[queue], ends[queue])


def test_words_of_an_option_become_offsets() -> None:
    begins, ends = {Q[0]: 3, Q[1]: 4, Q[2]: 0}, {Q[0]: 30, Q[1]: 40, Q[2]: 50}
    wanted = {Q[0]: -2, Q[1]: -1, Q[2]: 7}
    assert resolved(wanted, begins, ends, "startingOffsets") == {Q[0]: 3, Q[1]: 40, Q[2]: 7}
    with pytest.raises(BadSetting, match="bills broker-b 3"):
        resolved({**wanted, OTHER: 1}, begins, ends, "startingOffsets")
    with pytest.raises(BadSetting, match="orders broker-a 1 2"):
        resolved({Q[0]: 3}, begins, ends, "startingOffsets")
    with pytest.raises(BadSetting, match="51 of orders broker-a 2 is after its end, 50"):
        resolved({**wanted, Q[2]: 51}, begins, ends, "startingOffsets")


def test_queues_in_a_message() -> None:
    assert listed([Q[2], OTHER, Q[0]]) == "bills broker-b 3; orders broker-a 0 2"
