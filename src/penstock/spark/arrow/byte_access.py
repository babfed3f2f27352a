"""Byte primitives of the columns: properties cut into pieces, texts checked and copied.

As with `wire.octets`, the Python bodies say what each means and `cells.pxd` gives the compiled
builder the same names as inline C. This module itself is never compiled.
"""

import struct

from penstock.wire.octets import Bytes, Room, get_i32, get_i64

_I32 = struct.Struct("<i")
_I64 = struct.Struct("<q")

COPY_SLACK = 32
"""Bytes behind its end that `copy_text` may write to."""
CUT_SLACK = 64
"""Bytes behind their ends that `cut` and `gather_texts` may read."""
CUT_NOTES = 97
PIECES_MAX = 32
PIECES_RARE, PIECES_FRESH = 1 << 16, 1 << 17
RARE_NAMES = (b"DELAY", b"TIMER_DE", b"__transa")
"""How the names begin that columns are made of, but that few messages have."""


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


def cut(
    text: Bytes,
    at: int,
    length: int,
    base: int,
    spans: memoryview,
    first: int,
    places: memoryview,
    row: int,
    notes: memoryview,
) -> int:
    """`split` for properties that are as nearly all are, with their meaning.

    Writes where names and values begin (from `base` on) and how long they are, for the pieces from
    number `first` on; and from `row` on, in `places`, the same of the values of UNIQ_KEY, TAGS and
    KEYS, with some place and length 0 for those that are missing; two numbers behind them may
    change. `notes` are CUT_NOTES numbers, zeros at first, for what the compiled body learns of
    names.

    Returns how many pieces there are, PIECES_RARE more if a name begins as one of RARE_NAMES, and
    PIECES_FRESH more unless the names are known to be those of the call before. Or -1 where a
    closer look is needed: bytes that are zero or not ASCII, more than PIECES_MAX pieces, a name
    that may come twice, or marks that don't alternate. There are CUT_SLACK bytes behind the text.
    """
    whole = bytes(text[at : at + length])
    if b"\0" in whole or not whole.isascii():
        return -1
    found = dict.fromkeys((b"UNIQ_KEY", b"TAGS", b"KEYS"), (at - base, 0))
    seen = set()
    count = rare = 0
    place = at - base
    for piece in whole.split(b"\x02"):
        name, _, value = piece.partition(b"\x01")
        if name and value:
            if count == PIECES_MAX or name in seen:
                return -1
            seen.add(name)
            value_at = place + len(name) + 1
            span = 4 * (first + count)
            spans[span], spans[span + 1] = place, len(name)
            spans[span + 2], spans[span + 3] = value_at, len(value)
            if name in found:
                found[name] = value_at, len(value)
            elif name.startswith(RARE_NAMES):
                rare = PIECES_RARE
            count += 1
        place += len(piece) + 1
    for value_at, value_length in found.values():
        places[row], places[row + 1] = value_at, value_length
        row += 2
    return count + rare + PIECES_FRESH


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
    target: Room,
    used: int,
    offsets: Room,
    number: int,
    source: Bytes,
    at: int,
    spans: memoryview,
    part: int,
    pieces: int,
) -> int:
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


def put_ends(
    offsets: Room, number: int, end: int, places: memoryview, at: int, step: int, count: int
) -> int:
    """Write where texts end that follow what ends at `end`; returns where the last does.

    Their lengths are every `step`-th of `places` from `at` on; the first becomes the `number`-th
    offset.
    """
    for i in range(count):
        end += places[at + i * step]
        put_i32(offsets, number + i, end)
    return end


def gather_texts(
    target: Room,
    offsets: Room,
    number: int,
    source: Bytes,
    base: int,
    places: memoryview,
    at: int,
    step: int,
    count: int,
) -> None:
    """Copy texts: places (from `base` on) and lengths are pairs of `places`, `step` apart.

    The first goes to where the `number`-th offset says, and so on. Behind each there are
    COPY_SLACK bytes of the target and CUT_SLACK of the source.
    """
    for i in range(count):
        begin, length = base + places[at + i * step], places[at + i * step + 1]
        copy_text(target, own_i32(offsets, number + i), source, begin, length)


def repeat(
    target: Room, at: int, length: int, offsets: Room, number: int, count: int, times: int
) -> None:
    """Write the `length` bytes at `at` so many times again, behind themselves.

    They were `count` texts, which end where the offsets from `number` on say; so do the copies
    after that.
    """
    for _ in range(times):
        copy_text(target, at + length, target, at, length)
        at += length
        for i in range(number, number + count):
            put_i32(offsets, i + count, own_i32(offsets, i) + length)
        number += count


def gather_i32(
    values: Room,
    number: int,
    source: Bytes,
    base: int,
    places: memoryview,
    at: int,
    step: int,
    count: int,
) -> None:
    """Copy big-endian numbers that lie at `base` and every `step`-th of `places`."""
    for i in range(count):
        put_i32(values, number + i, get_i32(source, base + places[at + i * step]))


def gather_i64(
    values: Room,
    number: int,
    source: Bytes,
    base: int,
    places: memoryview,
    at: int,
    step: int,
    count: int,
) -> None:
    """The same with 64 bits."""
    for i in range(count):
        put_i64(values, number + i, get_i64(source, base + places[at + i * step]))


def scale_i64(values: Room, number: int, limit: int, factor: int, count: int) -> None:
    """Multiply numbers, after those beyond +-`limit` became that."""
    for i in range(number, number + count):
        value = _I64.unpack_from(values, 8 * i)[0]
        put_i64(values, i, max(-limit, min(value, limit)) * factor)


def count_zeros(places: memoryview, at: int, step: int, count: int) -> int:
    """How many of these are zero."""
    return sum(places[at + i * step] == 0 for i in range(count))


def set_bits(bitmap: Room, number: int, count: int) -> None:
    for i in range(number, number + count):
        set_bit(bitmap, i)


def set_bits_where(
    bitmap: Room, number: int, places: memoryview, at: int, step: int, count: int
) -> None:
    """Set the bits of those that are not zero."""
    for i in range(count):
        if places[at + i * step] != 0:
            set_bit(bitmap, number + i)


def put_i32(values: Room, number: int, value: int) -> None:
    """Write the `number`-th of a column of 32-bit numbers, in Arrow's (and the machine's) order."""
    _I32.pack_into(values, 4 * number, value)


def put_i64(values: Room, number: int, value: int) -> None:
    """The same with 64 bits."""
    _I64.pack_into(values, 8 * number, value)


def own_i32(values: Room, number: int) -> int:
    """What `put_i32` wrote there."""
    return int(_I32.unpack_from(values, 4 * number)[0])


def set_bit(bitmap: Room, number: int) -> None:
    bitmap[number >> 3] |= 1 << (number & 7)
