"""The target of a reset on the command line."""

import re
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import click

from penstock.cli.times import read_duration, read_time

if TYPE_CHECKING:
    from penstock.client.admin.async_admin import ResetTo

_OFFSET = re.compile(r"(?P<broker>[^/=]+)/(?P<queue>\d+)=(?P<offset>\d+)")


def read_target(text: str | None, offsets: Sequence[str], topic: str) -> "ResetTo":
    """The target of `--to` or of several `--offset`; raises UsageError."""
    from penstock.wire.bodies.client_bodies import MessageQueue

    if (text is None) is not bool(offsets):
        raise click.UsageError("give --to or --offset")
    if text is None:
        found = {}
        for one in offsets:
            match = _OFFSET.fullmatch(one)
            if match is None:
                raise click.UsageError(f"{one!r} is not an offset; write BROKER/QUEUE=OFFSET")
            found[MessageQueue(topic, match["broker"], int(match["queue"]))] = int(match["offset"])
        return found
    if text == "first":
        return "first"
    if text == "last":
        return "last"
    if re.fullmatch(r"[+-]\d+", text):
        return int(text)
    try:
        return _time(text)
    except ValueError:
        raise click.UsageError(
            f"{text!r} is not a target; write first, last, +N or -N messages, a time "
            "(2026-08-01T12:00:00 or milliseconds since 1970), or an age (10m)"
        ) from None


def _time(text: str) -> datetime:
    try:
        return datetime.now().astimezone() - read_duration(text)
    except (ValueError, OverflowError):
        return read_time(text)
