"""The offset ranges of Spark's tasks."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.arrow.offset_ranges import PACKED_ROWS_MAX, QueueRange, split

ranges = st.lists(
    st.builds(
        lambda number, first, rows: QueueRange("t", "b", number, first, first + rows),
        st.integers(0, 100), st.integers(0, 2**40), st.integers(0, 10_000) | st.integers(0, 3),
    ),
    max_size=12, unique_by=lambda part: part.queue_id,
)  # fmt: skip


def part(number: int, rows: int) -> QueueRange:
    return QueueRange("t", "b", number, 0, rows)


def test_large_ranges_have_their_own_task_and_small_ones_share() -> None:
    large, small = [part(n, PACKED_ROWS_MAX) for n in range(3)], [part(n, 5) for n in range(3, 9)]
    assert split([*large, *small], None) == [*((p,) for p in large), tuple(small)]


def test_no_messages_give_no_tasks() -> None:
    assert split([part(0, 0)], None) == []
    assert split([], 5) == []


def test_ranges_are_cut_for_more_tasks_than_queues() -> None:
    tasks = split([part(0, 300), part(1, 100)], 4)
    assert [(p.first, p.until) for (p,) in tasks] == [(0, 100), (100, 200), (200, 300), (0, 100)]


def test_minimum_of_tasks_takes_precedence_over_sharing() -> None:
    small = [part(n, 5) for n in range(4)]
    assert split(small, 2) == [(p,) for p in small]
    assert split(small, 1) == [tuple(small)]


@given(ranges, st.none() | st.integers(1, 40))
def test_every_message_is_read_once(parts: list[QueueRange], wanted: int | None) -> None:
    tasks = split(parts, wanted)
    assert all(tasks)
    assert len(tasks) >= min(wanted or 0, sum(part.rows for part in parts))
    got = sorted(piece for task in tasks for piece in task)
    for whole in parts:
        pieces = [p for p in got if p.queue_id == whole.queue_id]
        assert sum(p.rows for p in pieces) == whole.rows
        at = whole.first
        for piece in pieces:
            assert piece.first == at
            assert piece.rows > 0
            at = piece.until
