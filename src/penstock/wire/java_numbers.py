"""Integers in texts, by the rules of Java's Integer.parseInt and Long.parseLong.

A text is an optional sign and at least one decimal digit, of any script in the Basic Multilingual
Plane. Leading zeros count for nothing. Spaces and underscores, which Python's int() takes, are not
valid.
"""

from typing import Final

INT_MIN: Final = -(1 << 31)
INT_MAX: Final = (1 << 31) - 1
LONG_MIN: Final = -(1 << 63)
LONG_MAX: Final = (1 << 63) - 1

_SHORT: Final = 9
"""Digits that always fit into an int."""
_LONG_DIGITS: Final = 19


def parse_int(text: str) -> int | None:
    """The 32-bit integer in a text; None if there is none."""
    if len(text) <= _SHORT and text.isascii() and text.isdigit():
        return int(text)
    number = parse_long(text)
    return number if number is not None and INT_MIN <= number <= INT_MAX else None


def parse_long(text: str) -> int | None:
    """The 64-bit integer in a text; None if there is none."""
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not digits.isdecimal() or not (digits.isascii() or max(digits) <= "\uffff"):
        return None
    # The length first: int() takes quadratic time and refuses more than 4,300 digits.
    digits = digits.lstrip("0")
    if len(digits) > _LONG_DIGITS:
        return None
    number = int(digits or "0")
    if text[0] == "-":
        number = -number
    return number if LONG_MIN <= number <= LONG_MAX else None


def parse_nonnegative(text: str) -> int | None:
    """The 64-bit integer of at least 0 in a text; None if there is none."""
    number = parse_long(text)
    return number if number is not None and number >= 0 else None
