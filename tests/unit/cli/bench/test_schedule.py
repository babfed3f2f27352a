"""The schedule and the measured window."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.bench.schedule import SECOND_NS, Schedule, Window


@given(st.floats(0.1, 1e6), st.integers(1, 10))
def test_every_request_is_due_within_the_run(rate: float, seconds: int) -> None:
    start = 5 * SECOND_NS
    end = start + seconds * SECOND_NS
    schedule = Schedule.until(start, end, rate)
    assert abs(schedule.count - max(rate * seconds, 1)) <= 1
    assert schedule.at(0) == start
    assert schedule.at(schedule.count - 1) <= end
    assert schedule.count == 1 or schedule.at(schedule.count) >= end


def test_the_intervals_do_not_drift() -> None:
    schedule = Schedule.until(0, 3600 * SECOND_NS, 3)
    assert schedule.at(3 * 3599) == 3599 * SECOND_NS


def test_the_window_begins_after_the_warm_up() -> None:
    window = Window.after(100, 2, 10)
    assert 100 + 2 * SECOND_NS in window
    assert 99 + 2 * SECOND_NS not in window
    assert 100 + 12 * SECOND_NS not in window
    assert window.seconds == 10
