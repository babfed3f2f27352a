"""Times on the command line: durations as `30s`, moments as ISO 8601 or in ms since 1970."""

import re
from datetime import datetime, timedelta

import click

_UNITS = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
MOMENT_MS_MIN = 10**11
"""Smaller numbers (before March 1973) are seconds, or a date as 20260801, and no milliseconds."""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def read_duration(text: str) -> timedelta:
    """The duration that a text stands for; raises ValueError."""
    pieces = _DURATION.findall(text)
    if not pieces or "".join(number + unit for number, unit in pieces) != text:
        raise ValueError(f"{text!r} is no duration: 500ms, 30s, 10m, 2h, 1d, 1h30m")
    total = timedelta()
    try:
        for number, unit in pieces:
            total += timedelta(**{_UNITS[unit]: float(number)})
    except OverflowError:
        raise ValueError(f"{text!r} is too long") from None
    return total


def read_moment(text: str) -> datetime:
    """The moment that a text stands for, local unless it has a zone; raises ValueError."""
    try:
        if text.isdecimal() and int(text) >= MOMENT_MS_MIN:
            return datetime.fromtimestamp(int(text) / 1000).astimezone()
        if text.isdecimal():
            raise ValueError
        return datetime.fromisoformat(text).astimezone()
    except (OverflowError, OSError, ValueError):
        raise ValueError(
            f"{text!r} is no time: 2026-08-01T12:00:00, or milliseconds (13 digits) since 1970"
        ) from None


def to_duration(
    context: click.Context, option: click.Parameter, text: str | None
) -> timedelta | None:
    """For options that take a duration."""
    try:
        return None if text is None else read_duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def to_moment(context: click.Context, option: click.Parameter, text: str | None) -> datetime | None:
    """For options that take a moment."""
    try:
        return None if text is None else read_moment(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
