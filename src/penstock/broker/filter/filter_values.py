"""Values in filters: RocketMQ's rules for parsing numbers and comparing values of two types.

A property is always a string, and is converted to the type of the value it is compared with. The
types are Java's: an integer literal has 32 bits if it fits (`int` here), else 64 (`Long`). A value
that can't be converted raises Incomparable; the message then does not match, whatever the rest of
the filter says.
"""

import math
import re
from typing import Final, TypeAlias

from penstock.wire.java_numbers import parse_int, parse_long


class Long(int):
    """A 64-bit integer."""

    __slots__ = ()


Value: TypeAlias = str | bool | int | Long | float | None


class Incomparable(Exception):  # noqa: N818
    """Two values that can't be compared."""


_FLOAT: Final = re.compile(
    r"[+-]?(?:NaN|Infinity|(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?[fFdD]?)"
)
_HEX_FLOAT: Final = re.compile(
    r"([+-]?0[xX](?:[0-9a-fA-F]+\.?|[0-9a-fA-F]*\.[0-9a-fA-F]+)[pP][+-]?[0-9]+)[fFdD]?"
)
_SPACE: Final = "".join(map(chr, range(33)))


def to_int(text: str) -> int:
    """A 32-bit integer."""
    number = parse_int(text)
    if number is None:
        raise Incomparable(text)
    return number


def to_long(text: str) -> int:
    """A 64-bit integer."""
    number = parse_long(text)
    if number is None:
        raise Incomparable(text)
    return number


def to_double(text: str) -> float:
    """A double, as Java parses it."""
    text = text.strip(_SPACE)
    if _FLOAT.fullmatch(text):
        return float(text.rstrip("fFdD") if text[-1] in "fFdD" else text)
    hexadecimal = _HEX_FLOAT.fullmatch(text)
    if hexadecimal is None:
        raise Incomparable(text)
    try:
        return float.fromhex(hexadecimal[1])
    except OverflowError:
        return -math.inf if text[0] == "-" else math.inf


def to_truth(text: str) -> bool:
    """True for `true` in any case, else false."""
    return text.lower() == "true"


def compare(left: Value, right: Value) -> int:
    """Negative, zero or positive if `left` is less than, equal to or greater than `right`.

    Values of unrelated types are never equal.
    """
    if isinstance(left, str):
        if isinstance(right, str):
            return (left > right) - (left < right)
        left = _as_kind_of(right, left)
    elif isinstance(right, str):
        if isinstance(left, bool):  # RocketMQ converts only in the other direction
            raise Incomparable(right)
        right = _as_kind_of(left, right)
    if isinstance(left, bool) != isinstance(right, bool):
        return -1
    assert isinstance(left, int | float)
    assert isinstance(right, int | float)
    if type(left) is float or type(right) is float:
        return compare_doubles(float(left), float(right))
    return (left > right) - (left < right)


def compare_doubles(left: float, right: float) -> int:
    """Compare in Java's order: NaN is greater than everything, and -0.0 is less than 0.0."""
    if left < right:
        return -1
    if left > right:
        return 1
    if math.isnan(left) or math.isnan(right):
        return math.isnan(left) - math.isnan(right)
    return int(math.copysign(1, left) - math.copysign(1, right)) if left == 0 else 0


def _as_kind_of(model: Value, text: str) -> Value:
    if type(model) is bool:
        return to_truth(text)
    if type(model) is float:
        return to_double(text)
    return Long(to_long(text)) if type(model) is Long else to_int(text)


def equal(left: Value, right: Value) -> bool | None:
    """Whether two values are equal; two missing values are. None if only `left` is missing."""
    if left is None:
        return True if right is None else None
    if right is None:
        return False
    return compare(left, right) == 0


def order(left: Value, right: Value) -> int | None:
    """Like `compare`, but two strings are compared as numbers; None if either is missing."""
    if left is None or right is None:
        return None
    if type(left) is str and type(right) is str:
        return compare_doubles(to_double(left), to_double(right))
    return compare(left, right)


def negate(value: Value) -> Value:
    """The negated number; None if the value is not a number."""
    if type(value) is Long:
        return Long(-value)
    if type(value) is int or type(value) is float:
        return -value
    return None
