"""Notes about the batches of a sink: what they say, and what they come to together.

| Kind | Says |
|---|---|
| part | parcels of halves (`parcels`), where they are too many for the decision itself |
| decided | the batch consists of these parcels; names the parts, with counts: whole or none |
| aborted | these parcels are rolled back: a later decision with one of them counts for nothing |
| done | every half of the decision is committed |

The notes of a sink lie in one queue, whose order decides between drivers that do not know of each
other: the first decision that no earlier abort has made void is the decision, and whatever comes
after it changes nothing. Parts that no decision names mean nothing. A batch with a note that it is
done is done, be its decision among the notes that are read or not; so are all batches before it.

The first line of a note is JSON; parcels may follow it as they are.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Final, NamedTuple

import msgspec

from penstock.spark.sink.commit_messages import digest, label

INLINE_BYTES_MAX: Final = 64 * 1024
"""Parcels of a decision that lie in it: every task of a batch may read it."""
PART_BYTES_MAX: Final = 1024 * 1024
HERE: Final = -1
"""Offset of the part that lies in the decision itself."""


class Kind(Enum):
    """What a note says; the value begins its tag."""

    PART = "part"
    DECIDED = "decided"
    ABORTED = "aborted"
    DONE = "done"


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Parcels that lie one after another in the note at this offset: digest and length of each."""

    offset: int
    parcels: list[tuple[str, int]]

    @classmethod
    def of(cls, offset: int, parcels: Iterable[bytes]) -> "Part":
        return cls(offset, [(digest(parcel), len(parcel)) for parcel in parcels])

    def split(self, data: bytes) -> Iterator[bytes | None]:
        """The parcels in these bytes; None for one that is not what was noted."""
        at = 0
        for name, length in self.parcels:
            parcel = data[at : at + max(length, 0)]
            at += len(parcel)
            yield parcel if digest(parcel) == name else None


class Body(msgspec.Struct, frozen=True, omit_defaults=True):
    """The first line of a note."""

    sink: str
    batch: int
    query: str = ""
    """Whose decision it is."""
    id: str = ""
    rows: int = 0
    parts: list[Part] = []


class Note(NamedTuple):
    """A note, and where it lies."""

    kind: Kind
    offset: int
    body: Body
    inline: bytes

    @property
    def digests(self) -> frozenset[str]:
        return frozenset(name for part in self.body.parts for name, _ in part.parcels)


class Standing(NamedTuple):
    """How it stands with a batch."""

    done: bool
    decision: Note | None


def encode_note(body: Body, inline: bytes = b"") -> bytes:
    """The body of a message."""
    return msgspec.json.encode(body) + b"\n" + inline


def decode_note(kind: Kind, offset: int, data: bytes) -> Note | None:
    """What a message says; None if it is no note."""
    line, _, inline = data.partition(b"\n")
    try:
        return Note(kind, offset, msgspec.json.decode(line, type=Body), inline)
    except (msgspec.DecodeError, ValueError):
        return None


def fold(notes: Iterable[Note]) -> Standing:
    """What the notes about a batch come to, in the order of their queue."""
    void: set[str] = set()
    decision: Note | None = None
    done: str | None = None
    for note in notes:
        if note.kind is Kind.DONE:
            done = note.body.id
        elif decision is None and note.kind is Kind.ABORTED:
            void |= note.digests
        elif decision is None and note.kind is Kind.DECIDED and not void & note.digests:
            decision = note
    if done is not None and decision is not None and decision.body.id != done:
        decision = None  # a late one: that which is done lies before what was read
    return Standing(done is not None, decision)


def unfinished(notes: Sequence[Note], since: int, until: int) -> list[Note]:
    """Decisions on batches from `since` to before `until` that are not carried out."""
    done = max((note.body.batch for note in notes if note.kind is Kind.DONE), default=-1)
    found = (
        fold(note for note in notes if note.body.batch == batch).decision
        for batch in sorted({note.body.batch for note in notes})
        if max(since, done + 1) <= batch < until
    )
    return [decision for decision in found if decision is not None]


def bundles(parcels: Iterable[bytes]) -> list[list[bytes]]:
    """Parcels in groups that each fit into a message."""
    found: list[list[bytes]] = []
    space = 0
    for parcel in parcels:
        if len(parcel) > space:
            found.append([])
            space = max(PART_BYTES_MAX, len(parcel))
        found[-1].append(parcel)
        space -= len(parcel)
    return found


def rows_in(parcels: Iterable[bytes]) -> int:
    """How many rows they have together."""
    return sum(label(parcel).rows for parcel in parcels)
