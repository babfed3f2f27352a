"""Control records about the batches of a sink, and the batch status that they add up to.

| Kind | Meaning |
|---|---|
| part | chunks of half messages (`commit_messages`) that are too large for the decision record |
| decided | the batch consists of these chunks; lists its parts, with digests: all or nothing |
| aborted | these chunks are rolled back: a later decision that has one of them is void |
| done | all half messages of the decision are committed |

All control records of a sink are in one queue. Its order decides between drivers that do not know
of each other: the first decision that no earlier abort has made void counts, and nothing after it
changes that. Parts that no decision lists are ignored. A batch with a done record is done, even if
its decision was not read; so are all batches before it.

The first line of a control record is JSON. Chunks may follow it as raw bytes.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Final, NamedTuple

import msgspec

from penstock.spark.sink.commit_messages import digest, read_header

INLINE_BYTES_MAX: Final = 64 * 1024
"""Maximum size of the chunks that a decision record contains: every task of a batch may read it."""
PART_BYTES_MAX: Final = 1024 * 1024
INLINE_OFFSET: Final = -1
"""The offset of a part that is in the decision record itself."""


class ControlRecordKind(Enum):
    """What a control record says; its tag starts with the value."""

    PART = "part"
    DECIDED = "decided"
    ABORTED = "aborted"
    DONE = "done"


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Chunks in the control record at this offset, with the digest and length of each."""

    offset: int
    chunks: list[tuple[str, int]]

    @classmethod
    def of(cls, offset: int, chunks: Iterable[bytes]) -> "Part":
        return cls(offset, [(digest(chunk), len(chunk)) for chunk in chunks])

    def split(self, data: bytes) -> Iterator[bytes | None]:
        """The chunks in these bytes; None for one that does not have its digest."""
        at = 0
        for name, length in self.chunks:
            chunk = data[at : at + max(length, 0)]
            at += len(chunk)
            yield chunk if digest(chunk) == name else None


class ControlRecordBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first line of a control record."""

    sink: str
    batch: int
    query: str = ""
    """The id of the query that decided."""
    id: str = ""
    rows: int = 0
    parts: list[Part] = []


class ControlRecord(NamedTuple):
    """A control record and its queue offset."""

    kind: ControlRecordKind
    offset: int
    body: ControlRecordBody
    inline: bytes

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(name for part in self.body.parts for name, _ in part.chunks)


class BatchStatus(NamedTuple):
    """Whether a batch is done, and its decision if there is one."""

    done: bool
    decision: ControlRecord | None


def encode_control_record(body: ControlRecordBody, inline: bytes = b"") -> bytes:
    """The body of a message."""
    return msgspec.json.encode(body) + b"\n" + inline


def decode_control_record(
    kind: ControlRecordKind, offset: int, data: bytes
) -> ControlRecord | None:
    """The control record of a message; None if it is not one."""
    line, _, inline = data.partition(b"\n")
    try:
        body = msgspec.json.decode(line, type=ControlRecordBody)
    except (msgspec.DecodeError, ValueError):
        return None
    return ControlRecord(kind, offset, body, inline)


def status_of(records: Iterable[ControlRecord]) -> BatchStatus:
    """The status of a batch from its control records, in the order of their queue."""
    void: set[str] = set()
    decision: ControlRecord | None = None
    done: str | None = None
    for record in records:
        if record.kind is ControlRecordKind.DONE:
            done = record.body.id
        elif decision is None and record.kind is ControlRecordKind.ABORTED:
            void |= record.digests
        elif (
            decision is None
            and record.kind is ControlRecordKind.DECIDED
            and not void & record.digests
        ):
            decision = record
    if done is not None and decision is not None and decision.body.id != done:
        decision = (
            None  # a later one: the decision that is done is before the records that were read
        )
    return BatchStatus(done is not None, decision)


def unfinished(records: Sequence[ControlRecord], since: int, until: int) -> list[ControlRecord]:
    """Decisions on batches from `since` to before `until` that are not done."""
    done = max(
        (record.body.batch for record in records if record.kind is ControlRecordKind.DONE),
        default=-1,
    )
    found = (
        status_of(record for record in records if record.body.batch == batch).decision
        for batch in sorted({record.body.batch for record in records})
        if max(since, done + 1) <= batch < until
    )
    return [decision for decision in found if decision is not None]


def group_chunks(chunks: Iterable[bytes]) -> list[list[bytes]]:
    """The chunks in groups that each fit into a message."""
    groups: list[list[bytes]] = []
    space = 0
    for chunk in chunks:
        if len(chunk) > space:
            groups.append([])
            space = max(PART_BYTES_MAX, len(chunk))
        groups[-1].append(chunk)
        space -= len(chunk)
    return groups


def rows_in(chunks: Iterable[bytes]) -> int:
    """The number of rows in all chunks."""
    return sum(read_header(chunk).rows for chunk in chunks)
