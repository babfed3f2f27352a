"""Durations, times, counts and command lines as text."""

import shlex
from collections.abc import Iterable
from datetime import datetime

from penstock.plurals import count_text

__all__ = ["command_line", "count_text", "duration_text", "moment_text", "similar_text"]


SIMILAR_MAX = 3


def duration_text(ms: int) -> str:
    """A duration with its two largest units: `450 ms`, `12 s`, `3 min 20 s`, `2 h 5 min`."""
    if ms < 1_000:
        return f"{max(ms, 0)} ms"
    seconds = ms // 1_000
    for size, unit, lower_size, lower in (
        (86_400, "d", 3_600, "h"),
        (3_600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if seconds >= size:
            rest = seconds % size // lower_size
            return f"{seconds // size} {unit}" + (f" {rest} {lower}" if rest else "")
    return f"{seconds} s"


def moment_text(ms: int) -> str:
    """A time in local time."""
    return datetime.fromtimestamp(ms / 1000).isoformat(" ", "seconds")


def similar_text(noun: str, name: str, known: Iterable[str]) -> str:
    """The most similar of the known names, in brackets; empty if there is none."""
    from difflib import get_close_matches

    similar = get_close_matches(name, list(known), SIMILAR_MAX)
    return f" (similar {noun}: {', '.join(similar)})" if similar else ""


def command_line(*words: str) -> str:
    """A command line of `penstock`, quoted for a shell."""
    return shlex.join(("penstock", *words))
