"""Times on the command line: durations such as `30s`, times as ISO 8601 or in ms since 1970."""

import re
from datetime import datetime, timedelta

import click

_UNITS = {"ms": "milliseconds", "s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
EPOCH_MS_MIN = 10**11
"""Smaller numbers (before March 1973) are probably seconds, or a date such as 20260801."""
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


def read_duration(text: str) -> timedelta:
    """Parse a duration; raises ValueError."""
    pieces = _DURATION.findall(text)
    if not pieces or "".join(number + unit for number, unit in pieces) != text:
        raise ValueError(f"{text!r} is not a duration; write 500ms, 30s, 10m, 2h, 1d or 1h30m")
    total = timedelta()
    try:
        for number, unit in pieces:
            total += timedelta(**{_UNITS[unit]: float(number)})
    except OverflowError:
        raise ValueError(f"{text!r} is too long") from None
    return total


def read_time(text: str) -> datetime:
    """Parse a time, local unless it has a zone; raises ValueError."""
    try:
        if text.isdecimal() and int(text) >= EPOCH_MS_MIN:
            return datetime.fromtimestamp(int(text) / 1000).astimezone()
        if text.isdecimal():
            raise ValueError
        return datetime.fromisoformat(text).astimezone()
    except (OverflowError, OSError, ValueError):
        raise ValueError(
            f"{text!r} is not a time; write 2026-08-01T12:00:00 or milliseconds since 1970 "
            "(13 digits)"
        ) from None


def read_moment(text: str) -> datetime:
    """Parse a time, or an age such as `10m` before now; raises ValueError."""
    try:
        ago = read_duration(text)
    except ValueError:
        try:
            return read_time(text)
        except ValueError as error:
            raise ValueError(f"{error}, or an age such as 10m") from None
    try:
        return datetime.now().astimezone() - ago
    except OverflowError:
        raise ValueError(f"{text} is too long ago") from None


def to_duration(
    context: click.Context, option: click.Parameter, text: str | None
) -> timedelta | None:
    """The callback of options that take a duration."""
    try:
        return None if text is None else read_duration(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def to_time(context: click.Context, option: click.Parameter, text: str | None) -> datetime | None:
    """The callback of options that take a time."""
    try:
        return None if text is None else read_time(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def to_moment(context: click.Context, option: click.Parameter, text: str | None) -> datetime | None:
    """The callback of options that take a time or an age."""
    try:
        return None if text is None else read_moment(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
