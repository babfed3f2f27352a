"""What clients saw while a broker set failed, as records; a history is a list of them.

A history is kept as JSON lines, one record per line with its kind. Times are seconds since the
begin of the history.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

Outcome = Literal["acknowledged", "failed", "unknown"]


class Send(msgspec.Struct, frozen=True, tag="send", tag_field="kind", omit_defaults=True):
    """One send of a producer. A producer sends one message after another to each queue."""

    producer: str
    queue: str
    body: str
    """Different for all sends to one queue."""
    outcome: Outcome
    """`failed`: it was refused or never left the producer, so it must not be stored. `unknown`: it
    may be stored or not."""
    offset: int = -1
    """The offset that was acknowledged."""
    attempts_max: int = 1
    """A producer that tries again may store a message several times."""
    begin: float = 0.0
    end: float = 0.0
    detail: str = ""


class Read(msgspec.Struct, frozen=True, tag="read", tag_field="kind"):
    """A message that a reader received from one broker while faults happened."""

    reader: str
    queue: str
    offset: int
    body: str
    at: float = 0.0


class Delivery(msgspec.Struct, frozen=True, tag="delivery", tag_field="kind"):
    """A message that the consumer of a group received."""

    group: str
    queue: str
    offset: int
    body: str
    at: float = 0.0


class Fault(msgspec.Struct, frozen=True, tag="fault", tag_field="kind"):
    """Something that was done to the cluster."""

    what: str
    at: float = 0.0


class Final(msgspec.Struct, frozen=True, tag="final", tag_field="kind"):
    """A message of the last read, after all faults had ended and all replicas were in sync."""

    replica: str
    master: bool
    queue: str
    offset: int
    body: str


class QueueEnd(msgspec.Struct, frozen=True, tag="queue_end", tag_field="kind"):
    """The range of a queue at the last read."""

    replica: str
    master: bool
    queue: str
    min_offset: int
    max_offset: int


Record: TypeAlias = Send | Read | Delivery | Fault | Final | QueueEnd
History: TypeAlias = list[Record]

_DECODER = msgspec.json.Decoder(Record)


def write_history(path: Path, history: Iterable[Record]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in history))


def read_history(path: Path) -> History:
    return [_DECODER.decode(line) for line in path.read_bytes().splitlines()]
