"""A histogram with logarithmic buckets: percentiles of any number of values in constant memory.

Values are whole numbers from 0, here nanoseconds. Values below 256 have a bucket each. Above, each
power of two is divided into 128 buckets of equal width, so a bucket is at most 1/128 as wide as the
values in it. A percentile is the upper bound of its bucket: never below the exact value, and at
most 0.8 % above it.
"""

import math
from array import array
from typing import Final

_HALF_BITS: Final = 7
_HALF: Final = 1 << _HALF_BITS
RELATIVE_ERROR: Final = 1 / _HALF
"""How far a percentile may be above the exact value."""
VALUE_MAX: Final = 2**62
"""Larger values are counted as this one: 146 years in nanoseconds."""


def bucket_of(value: int) -> int:
    """The index of the bucket of a value."""
    shift = max(value.bit_length() - _HALF_BITS - 1, 0)
    return (shift << _HALF_BITS) + (value >> shift)


def upper_bound(bucket: int) -> int:
    """The largest value of a bucket."""
    shift = max((bucket >> _HALF_BITS) - 1, 0)
    return ((bucket - (shift << _HALF_BITS) + 1) << shift) - 1


class LogHistogram:
    """Counts values; gives percentiles, mean and maximum."""

    __slots__ = ("_counts", "count", "max", "min", "total")

    def __init__(self) -> None:
        self._counts = array("q", bytes(8 * (bucket_of(VALUE_MAX) + 1)))
        self.count = 0
        self.total = 0
        self.max = 0
        self.min = VALUE_MAX

    def record(self, value: int, times: int = 1) -> None:
        """Count a value, `times` times; a negative one counts as 0."""
        value = min(max(value, 0), VALUE_MAX)
        self._counts[bucket_of(value)] += times
        self.count += times
        self.total += value * times
        if value > self.max:
            self.max = value
        if value < self.min:
            self.min = value

    def percentile(self, percent: float) -> int | None:
        """The value that at least this share of the values does not exceed; None without values."""
        if self.count == 0:
            return None
        rank = min(max(math.ceil(self.count * percent / 100), 1), self.count)
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if seen >= rank:
                return min(upper_bound(bucket), self.max)
        raise AssertionError("the counts of the buckets add up to the count")

    @property
    def mean(self) -> float | None:
        """The exact mean; None without values."""
        return self.total / self.count if self.count else None
