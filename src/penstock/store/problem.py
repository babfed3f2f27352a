"""A finding of `store.verify`: what is wrong, where, and what it means to somebody."""

import msgspec

DAMAGE = "damage"
"""Stored bytes contradict each other, and no start of the broker mends that."""
NOTE = "note"
"""Worth knowing and in order: above all what recovery puts right by itself after a crash."""


class Problem(msgspec.Struct, frozen=True):
    """`kind` is a stable name for programs, `text` is for people.

    `file` is relative to the store, `offset` a byte of that file. Neighbours of one kind are one
    problem with a `count`.
    """

    severity: str
    kind: str
    file: str
    offset: int
    text: str
    count: int = 1
