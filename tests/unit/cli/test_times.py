"""Times on the command line."""

from datetime import UTC, datetime, timedelta

import pytest

from penstock.cli.times import read_duration, read_moment, read_time


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("30s", 30), ("1.5m", 90), ("2h", 7200), ("1d", 86_400), ("1h30m", 5_400)],
)
def test_durations(text: str, seconds: float) -> None:
    assert read_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "5", "s", "-5s", "5 s", "5x", "1h 30m", "9" * 30 + "d"])
def test_invalid_durations(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration|too long"):
        read_duration(text)


def test_times() -> None:
    assert read_time("2026-08-01T12:00:00+00:00") == datetime(2026, 8, 1, 12, tzinfo=UTC)
    assert read_time("1700000000000").timestamp() == 1_700_000_000
    local = read_time("2026-08-01T12:00")
    assert local.tzinfo is not None
    assert local.replace(tzinfo=None) == datetime(2026, 8, 1, 12)


@pytest.mark.parametrize("text", ["", "yesterday", "12:99", "9" * 30])
def test_invalid_times(text: str) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        read_time(text)


@pytest.mark.parametrize("text", ["1794804755", "20260801", "0"])
def test_seconds_and_dates_are_not_taken_for_milliseconds(text: str) -> None:
    with pytest.raises(ValueError, match="13 digits"):
        read_time(text)


def test_moments_are_times_or_ages() -> None:
    assert read_moment("2026-08-01T12:00:00+00:00") == datetime(2026, 8, 1, 12, tzinfo=UTC)
    moment = read_moment("10m")
    age = datetime.now().astimezone() - moment
    assert timedelta(minutes=10) <= age < timedelta(minutes=11)
    with pytest.raises(ValueError, match="or an age such as 10m"):
        read_moment("somewhere")
    with pytest.raises(ValueError, match="too long ago"):
        read_moment("1000000d")
