"""Byte primitives of the columns: properties cut into pieces, texts checked and copied.

As with `wire.octets`, the Python bodies say what each means and `cells.pxd` gives the compiled
builder the same names as inline C. This module itself is never compiled.
"""

import struct

from penstock.wire.octets import Bytes, Room

_I32 = struct.Struct("<i")
_I64 = struct.Struct("<q")

COPY_SLACK = 32
"""Bytes behind its end that `copy_text` may write to."""


def split(text: Bytes, at: int, end: int, spans: memoryview) -> int:
    """Cut properties into pieces that count: name and value are not empty.

    Writes begin and length of name and value (from `at` on) for each, and returns how many there
    are, as `-1 - count` where the text is not ASCII. `spans` has room for as many pieces as the
    text can have: one in four bytes, four numbers.
    """
    count = 0
    place = 0
    whole = bytes(text[at:end])
    for piece in whole.split(b"\x02"):
        name = piece.find(b"\x01")
        if 0 < name < len(piece) - 1:
            spans[4 * count] = place
            spans[4 * count + 1] = name
            spans[4 * count + 2] = place + name + 1
            spans[4 * count + 3] = len(piece) - name - 1
            count += 1
        place += len(piece) + 1
    return count if whole.isascii() else -1 - count


def is_text(text: Bytes, at: int, length: int) -> bool:
    """Whether these bytes are UTF-8."""
    try:
        bytes(text[at : at + length]).decode()
    except UnicodeDecodeError:
        return False
    return True


def copy_text(target: Room, target_at: int, source: Bytes, source_at: int, length: int) -> None:
    """Copy bytes that are mostly few; the target has COPY_SLACK bytes more."""
    target[target_at : target_at + length] = source[source_at : source_at + length]


def copy_pieces(
    target: Room, used: int, offsets: Room, number: int, source: Bytes, at: int,
    spans: memoryview, part: int, pieces: int,
) -> int:  # fmt: skip
    """Copy the names (`part` 0) or values (1) of pieces that `split` found at `at`.

    The ends of the copies are the offsets from `number` on; returns the last. The target has
    COPY_SLACK bytes more.
    """
    for piece in range(pieces):
        begin, length = spans[4 * piece + 2 * part], spans[4 * piece + 2 * part + 1]
        copy_text(target, used, source, at + begin, length)
        used += length
        put_i32(offsets, number + piece, used)
    return used


def put_i32(values: Room, number: int, value: int) -> None:
    """Write the `number`-th of a column of 32-bit numbers, in Arrow's (and the machine's) order."""
    _I32.pack_into(values, 4 * number, value)


def put_i64(values: Room, number: int, value: int) -> None:
    """The same with 64 bits."""
    _I64.pack_into(values, 8 * number, value)


def set_bit(bitmap: Room, number: int) -> None:
    bitmap[number >> 3] |= 1 << (number & 7)
