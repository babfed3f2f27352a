"""The histogram: every bucket has its place, and percentiles are close to the exact ones."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.bench.histogram import (
    RELATIVE_ERROR,
    VALUE_MAX,
    LogHistogram,
    bucket_of,
    upper_bound,
)

VALUES = st.lists(st.integers(0, 10**12), min_size=1, max_size=300)


def exact(values: list[int], percent: float) -> int:
    """The nearest-rank percentile."""
    rank = min(max(math.ceil(len(values) * percent / 100), 1), len(values))
    return sorted(values)[rank - 1]


@given(VALUES, st.floats(0, 100))
def test_a_percentile_is_never_below_the_exact_one_and_hardly_above(
    values: list[int], percent: float
) -> None:
    histogram = LogHistogram()
    for value in values:
        histogram.record(value)
    found, wanted = histogram.percentile(percent), exact(values, percent)
    assert found is not None
    assert wanted <= found <= wanted * (1 + RELATIVE_ERROR)


@given(st.integers(0, VALUE_MAX))
def test_a_value_is_in_its_bucket(value: int) -> None:
    bucket = bucket_of(value)
    assert value <= upper_bound(bucket)
    assert bucket == 0 or upper_bound(bucket - 1) < value


@given(VALUES)
def test_count_mean_and_extremes_are_exact(values: list[int]) -> None:
    histogram = LogHistogram()
    for value in values:
        histogram.record(value)
    assert histogram.count == len(values)
    assert histogram.mean == pytest.approx(sum(values) / len(values))
    assert (histogram.min, histogram.max) == (min(values), max(values))
    assert histogram.percentile(100) == max(values)


def test_small_values_are_exact() -> None:
    histogram = LogHistogram()
    for value in range(256):
        histogram.record(value)
    assert [histogram.percentile(p) for p in (50, 75, 100)] == [127, 191, 255]


def test_a_value_that_counts_several_times() -> None:
    histogram = LogHistogram()
    histogram.record(10, 99)
    histogram.record(1_000)
    assert (histogram.count, histogram.percentile(99), histogram.percentile(99.5)) == (
        100,
        10,
        1000,
    )


def test_values_out_of_range_are_clamped() -> None:
    histogram = LogHistogram()
    histogram.record(-5)
    histogram.record(2**70)
    assert (histogram.min, histogram.max) == (0, VALUE_MAX)


def test_without_values_nothing_is_known() -> None:
    assert LogHistogram().percentile(99) is None
    assert LogHistogram().mean is None
