"""What a task of the transactional sink passes to the commit: chunks of half messages.

A commit message goes through Spark's driver, and a decision into the control topic, so a million
rows must fit into a few megabytes. What many rows have in common is stored once. Of each half
message only its two offsets are stored, as differences to the previous one: that is all a broker
needs to end the transaction.

    "PSP1" · rows u32 · plain length u32 · expires i64 · zlib(head as JSON · "\\n" · offsets)

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

CHUNK_ROWS_MAX: Final = 50_000
"""Rows of one chunk: it fits into a message even if nothing can be compressed."""

_MAGIC: Final = b"PSP1"
_START: Final = struct.Struct(">4sIIq")
_HEAD_BYTES_MAX: Final = 1 << 20
_LONG_MAX: Final = (1 << 63) - 1


class HalfMessageTopic(NamedTuple):
    """The broker that stores half messages, and their topic (as servers know it)."""

    broker: str
    address: str
    topic: str


class HalfMessageOffsets(NamedTuple):
    """What identifies a half message at its broker."""

    queue_offset: int
    log_offset: int


class _Head(msgspec.Struct, frozen=True):
    group: str
    places: list[tuple[str, str, str, int]]


class HalfMessages(NamedTuple):
    """Half messages of one task; encoded they are a chunk."""

    group: str
    expires_ms: int
    """Until when all of them can be committed."""
    offsets: dict[HalfMessageTopic, list[HalfMessageOffsets]]

    @property
    def rows(self) -> int:
        return sum(map(len, self.offsets.values()))

    def interleaved(self) -> Iterator[tuple[HalfMessageTopic, HalfMessageOffsets]]:
        """All half messages, the brokers in turn, so that all of them have work."""
        remaining = [(topic, iter(offsets)) for topic, offsets in self.offsets.items()]
        while remaining:
            left = []
            for topic, offsets in remaining:
                for half in offsets:
                    yield topic, half
                    left.append((topic, offsets))
                    break
            remaining = left

    def encode(self) -> bytes:
        """The chunk, for `decode`."""
        places = [(*topic, len(offsets)) for topic, offsets in self.offsets.items()]
        plain = bytearray(msgspec.json.encode(_Head(self.group, places)) + b"\n")
        for halves in self.offsets.values():
            for offsets in zip(*sorted(halves), strict=True):
                plain += _differences(offsets)
        start = _START.pack(_MAGIC, self.rows, len(plain), self.expires_ms)
        return start + zlib.compress(plain, 1)


class ChunkHeader(NamedTuple):
    """What is known of a chunk before it is decompressed."""

    rows: int
    length: int
    expires_ms: int


def read_header(chunk: bytes) -> ChunkHeader:
    """The header of a chunk; raises DecisionLost if this is not a chunk."""
    if len(chunk) < _START.size or not chunk.startswith(_MAGIC):
        raise _invalid("the magic number is missing")
    return ChunkHeader(*_START.unpack_from(chunk)[1:])


def digest(chunk: bytes) -> str:
    """What identifies a chunk: no two are equal, because their offsets differ."""
    return blake2b(chunk, digest_size=9).hexdigest()


def decode(chunk: bytes) -> HalfMessages:
    """The half messages of a chunk; raises DecisionLost if it is not valid."""
    rows, length, expires_ms = read_header(chunk)
    if rows > CHUNK_ROWS_MAX or length > _HEAD_BYTES_MAX + 16 * rows:
        raise _invalid(f"it claims {rows} rows in {length} bytes")
    unpack = zlib.decompressobj()
    try:
        plain = unpack.decompress(chunk[_START.size :], length + 1)
    except zlib.error as error:
        raise _invalid(str(error)) from None
    if len(plain) != length or not unpack.eof or unpack.unused_data:
        raise _invalid("its length is wrong")
    text, _, offsets = plain.partition(b"\n")
    try:
        head = msgspec.json.decode(text, type=_Head)
    except (msgspec.DecodeError, ValueError) as error:
        raise _invalid(str(error)) from None
    counts = [place[3] for place in head.places]
    if min(counts, default=1) < 1 or sum(counts) != rows or len(offsets) != 16 * rows:
        raise _invalid("its counts contradict each other")
    found: dict[HalfMessageTopic, list[HalfMessageOffsets]] = {}
    at = 0
    for broker, address, topic, count in head.places:
        end = at + 16 * count
        numbers = _offsets(offsets[at : at + 8 * count]), _offsets(offsets[at + 8 * count : end])
        found[HalfMessageTopic(broker, address, topic)] = list(map(HalfMessageOffsets, *numbers))
        at = end
    return HalfMessages(head.group, expires_ms, found)


def _differences(offsets: tuple[int, ...]) -> bytes:
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
        raise _invalid("an offset is out of range")
    return offsets


def _invalid(why: str) -> DecisionLost:
    return DecisionLost(f"not a valid chunk of half messages: {why}")
