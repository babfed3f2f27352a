"""Halves as a sink's tasks hand them over: parcels of a few bytes for each row.

A commit message goes through Spark's driver, and a decision into a control topic, so a million rows
must be a few megabytes. What is the same for many rows is told once; of each half only its two
offsets are told, which is all that a broker needs to end it, as distances from the half before.

    "PSP1" · rows u32 · plain length u32 · expires i64 · zlib(head as JSON · "\n" · offsets)

    head    {"group", "places": [[broker, address, topic, rows], …]}
    offsets i64, little-endian: for each place its queue offsets, then its log offsets
"""

import struct
import sys
import zlib
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

import msgspec

from penstock.errors import DecisionLost

ROWS_MAX: Final = 50_000
"""Rows of one parcel: even where nothing can be compressed it fits into a message."""

_MAGIC: Final = b"PSP1"
_START: Final = struct.Struct(">4sIIq")
_HEAD_BYTES_MAX: Final = 1 << 20
_LONG_MAX: Final = (1 << 63) - 1


class Place(NamedTuple):
    """Where halves lie, and the topic they are for (as servers know it)."""

    broker: str
    address: str
    topic: str


class HalfOffsets(NamedTuple):
    """What names a half at its broker."""

    queue_offset: int
    log_offset: int


class _Head(msgspec.Struct, frozen=True):
    group: str
    places: list[tuple[str, str, str, int]]


class Parcel(NamedTuple):
    """Halves of one task."""

    group: str
    expires_ms: int
    """Until when all of them can be committed."""
    halves: dict[Place, list[HalfOffsets]]

    @property
    def rows(self) -> int:
        return sum(map(len, self.halves.values()))

    def each(self) -> Iterator[tuple[Place, HalfOffsets]]:
        """All halves, the brokers in turn so that all of them have work."""
        lines = [(place, iter(halves)) for place, halves in self.halves.items()]
        while lines:
            left = []
            for place, halves in lines:
                for half in halves:
                    yield place, half
                    left.append((place, halves))
                    break
            lines = left

    def encode(self) -> bytes:
        """As bytes, for `decode`."""
        places = [(*place, len(halves)) for place, halves in self.halves.items()]
        plain = bytearray(msgspec.json.encode(_Head(self.group, places)) + b"\n")
        for halves in self.halves.values():
            for offsets in zip(*sorted(halves), strict=True):
                plain += _distances(offsets)
        start = _START.pack(_MAGIC, self.rows, len(plain), self.expires_ms)
        return start + zlib.compress(plain, 1)


class Label(NamedTuple):
    """What is known of a parcel without unpacking it."""

    rows: int
    length: int
    expires_ms: int


def label(data: bytes) -> Label:
    """Raises DecisionLost where this can't be a parcel."""
    if len(data) < _START.size or not data.startswith(_MAGIC):
        raise _bad("it does not begin as one")
    return Label(*_START.unpack_from(data)[1:])


def digest(data: bytes) -> str:
    """What names a parcel: no two are the same, as their offsets differ."""
    return blake2b(data, digest_size=9).hexdigest()


def decode(data: bytes) -> Parcel:
    """The parcel that `encode` made; raises DecisionLost for anything else."""
    rows, length, expires_ms = label(data)
    if rows > ROWS_MAX or length > _HEAD_BYTES_MAX + 16 * rows:
        raise _bad(f"it claims {rows} rows in {length} bytes")
    unpack = zlib.decompressobj()
    try:
        plain = unpack.decompress(data[_START.size :], length + 1)
    except zlib.error as error:
        raise _bad(str(error)) from None
    if len(plain) != length or not unpack.eof or unpack.unused_data:
        raise _bad("its length is wrong")
    text, _, offsets = plain.partition(b"\n")
    try:
        head = msgspec.json.decode(text, type=_Head)
    except (msgspec.DecodeError, ValueError) as error:
        raise _bad(str(error)) from None
    counts = [place[3] for place in head.places]
    if min(counts, default=1) < 1 or sum(counts) != rows or len(offsets) != 16 * rows:
        raise _bad("its counts do not fit together")
    halves: dict[Place, list[HalfOffsets]] = {}
    at = 0
    for broker, address, topic, count in head.places:
        end = at + 16 * count
        numbers = _offsets(offsets[at : at + 8 * count]), _offsets(offsets[at + 8 * count : end])
        halves[Place(broker, address, topic)] = list(map(HalfOffsets, *numbers))
        at = end
    return Parcel(head.group, expires_ms, halves)


def _distances(offsets: tuple[int, ...]) -> bytes:
    numbers = array("q", (later - earlier for earlier, later in pairwise((0, *offsets))))
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def _offsets(data: bytes) -> list[int]:
    numbers = array("q", data)
    if sys.byteorder == "big":
        numbers.byteswap()
    offsets = list(accumulate(numbers))
    if min(offsets) < 0 or max(offsets) > _LONG_MAX:
        raise _bad("an offset is out of range")
    return offsets


def _bad(why: str) -> DecisionLost:
    return DecisionLost(f"this is no parcel of halves: {why}")
