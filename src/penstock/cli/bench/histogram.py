"""A histogram with logarithmic buckets: percentiles of any number of values in constant memory.

Values are whole numbers from 0, here nanoseconds. Values below 256 have a bucket each. Above, each
power of two is divided into 128 buckets of equal width, so a bucket is at most 1/128 as wide as the
values in it. A percentile is the upper bound of its bucket: never below the exact value, and at
most 0.8 % above it.
"""

import math
from array import array
from typing import Final

HALF_BITS: Final = 7
_HALF_BITS = HALF_BITS
RELATIVE_ERROR: Final = 1 / (1 << HALF_BITS)
"""How far a percentile may be above the exact value."""
VALUE_MAX: Final = 2**48
"""Larger values are counted as this one: 3 days in nanoseconds. The sum of 30,000 such values still
fits into 64 bits."""
_VALUE_MAX = VALUE_MAX

_int = int  # hides annotations from the compiler, keeps them for mypy


def bucket_of(value: _int) -> _int:
    """The index of the bucket of a value."""
    bits = 0
    left = value
    step = 32
    while step > 0:  # int.bit_length, without an object
        if left >> step:
            left >>= step
            bits += step
        step >>= 1
    shift = bits - _HALF_BITS  # the position of the highest bit is one less than the bit length
    if shift < 0:
        shift = 0
    return (shift << _HALF_BITS) + (value >> shift)


def upper_bound(bucket: int) -> int:
    """The largest value of a bucket."""
    shift = max((bucket >> HALF_BITS) - 1, 0)
    return ((bucket - (shift << HALF_BITS) + 1) << shift) - 1


class LogHistogram:
    """Counts values; gives percentiles, mean and maximum."""

    def __init__(self) -> None:
        self._counts: memoryview = memoryview(array("q", bytes(8 * (bucket_of(VALUE_MAX) + 1))))
        self.count: int = 0
        self.total: int = 0
        self.max: int = 0
        self.min: int = VALUE_MAX

    def record(self, value: int, times: int = 1) -> None:
        """Count a value, `times` times; a negative one counts as 0."""
        self.add(0 if value < 0 else min(value, VALUE_MAX), times)

    def add(self, value: int, times: int) -> None:
        """As `record`, for values that fit into 64 bits."""
        if value < 0:
            value = 0
        elif value > _VALUE_MAX:
            value = _VALUE_MAX
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
        return float(self.total) / self.count if self.count else None
