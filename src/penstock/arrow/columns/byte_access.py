"""Byte primitives of the columns: parse properties, check and copy texts.

As with `wire.octets`, the Python functions define the meaning, and `byte_access.pxd` has the same
functions as inline C for the compiled modules. This module itself is never compiled.
"""

import struct

from penstock.wire.octets import Bytes, WritableBytes, get_i32, get_i64

_I32 = struct.Struct("<i")
_I64 = struct.Struct("<q")

COPY_SLACK = 32
"""Bytes after its end that `copy_text` may overwrite."""
READ_SLACK = 64
"""Bytes after the end that `parse_properties` and `gather_texts` may read."""
PARSE_STATE_WORDS = 97
PROPERTIES_MAX = 32
FLAG_RARE, FLAG_NEW_NAMES = 1 << 16, 1 << 17
RARE_NAMES = (b"DELAY", b"TIMER_DE", b"__transa")
"""Prefixes of property names that have columns, but that few messages have."""


def split_properties(text: Bytes, at: int, end: int, spans: memoryview) -> int:
    """Find the properties whose name and value are not empty.

    Writes the start (from `at`) and length of each name and value to `spans`. Returns the number
    of properties, or `-1 - count` if the text is not ASCII. `spans` has space for one property, of
    four numbers, in every four bytes of the text.
    """
    count = 0
    place = 0
    whole = bytes(text[at:end])
    for pair in whole.split(b"\x02"):
        name = pair.find(b"\x01")
        if 0 < name < len(pair) - 1:
            spans[4 * count] = place
            spans[4 * count + 1] = name
            spans[4 * count + 2] = place + name + 1
            spans[4 * count + 3] = len(pair) - name - 1
            count += 1
        place += len(pair) + 1
    return count if whole.isascii() else -1 - count


def parse_properties(
    text: Bytes,
    at: int,
    length: int,
    base: int,
    spans: memoryview,
    first: int,
    places: memoryview,
    row: int,
    state: memoryview,
) -> int:
    """Fast variant of `split_properties` for ordinary properties; also finds the known ones.

    Writes to `spans`, from property number `first`, the start (from `base`) and length of each
    name and value. Writes to `places`, from `row`, the same of the values of UNIQ_KEY, TAGS and
    KEYS, with length 0 if one is missing; the two numbers after them may change. `state` holds
    PARSE_STATE_WORDS numbers, zero at first: the names that the compiled function saw last.

    Returns the number of properties, plus FLAG_RARE if a name starts with one of RARE_NAMES, plus
    FLAG_NEW_NAMES unless the names are known to be those of the previous call. Returns -1 if the
    text needs the slow path: it has zeros or is not ASCII, has more than PROPERTIES_MAX
    properties, a name may be repeated, or separators do not alternate. READ_SLACK bytes follow the
    text.
    """
    whole = bytes(text[at : at + length])
    if b"\0" in whole or not whole.isascii():
        return -1
    found = dict.fromkeys((b"UNIQ_KEY", b"TAGS", b"KEYS"), (at - base, 0))
    seen = set()
    count = rare = 0
    place = at - base
    for pair in whole.split(b"\x02"):
        name, _, value = pair.partition(b"\x01")
        if name and value:
            if count == PROPERTIES_MAX or name in seen:
                return -1
            seen.add(name)
            value_at = place + len(name) + 1
            span = 4 * (first + count)
            spans[span], spans[span + 1] = place, len(name)
            spans[span + 2], spans[span + 3] = value_at, len(value)
            if name in found:
                found[name] = value_at, len(value)
            elif name.startswith(RARE_NAMES):
                rare = FLAG_RARE
            count += 1
        place += len(pair) + 1
    for value_at, value_length in found.values():
        places[row], places[row + 1] = value_at, value_length
        row += 2
    return count + rare + FLAG_NEW_NAMES


def is_utf8(text: Bytes, at: int, length: int) -> bool:
    """Whether these bytes are UTF-8."""
    try:
        bytes(text[at : at + length]).decode()
    except UnicodeDecodeError:
        return False
    return True


def copy_text(
    target: WritableBytes, target_at: int, source: Bytes, source_at: int, length: int
) -> None:
    """Copy bytes, usually few; the target has COPY_SLACK bytes more."""
    target[target_at : target_at + length] = source[source_at : source_at + length]


def copy_properties(
    target: WritableBytes,
    used: int,
    offsets: WritableBytes,
    number: int,
    source: Bytes,
    at: int,
    spans: memoryview,
    part: int,
    property_count: int,
) -> int:
    """Copy the names (`part` 0) or values (1) that `split_properties` found at `at`.

    Writes the ends of the copies as the offsets from `number`; returns the last one. The target
    has COPY_SLACK bytes more.
    """
    for pair in range(property_count):
        begin, length = spans[4 * pair + 2 * part], spans[4 * pair + 2 * part + 1]
        copy_text(target, used, source, at + begin, length)
        used += length
        put_i32(offsets, number + pair, used)
    return used


def put_ends(
    offsets: WritableBytes,
    number: int,
    end: int,
    places: memoryview,
    at: int,
    step: int,
    count: int,
) -> int:
    """Write the ends of texts that follow each other from `end`; returns the last one.

    Their lengths are every `step`-th number of `places` from `at`. The first end becomes the
    `number`-th offset.
    """
    for i in range(count):
        end += places[at + i * step]
        put_i32(offsets, number + i, end)
    return end


def gather_texts(
    target: WritableBytes,
    offsets: WritableBytes,
    number: int,
    source: Bytes,
    base: int,
    places: memoryview,
    at: int,
    step: int,
    count: int,
) -> None:
    """Copy texts whose positions (from `base`) and lengths are pairs in `places`, `step` apart.

    The first goes to the `number`-th offset, and so on. COPY_SLACK bytes of the target and
    READ_SLACK bytes of the source follow each text.
    """
    for i in range(count):
        begin, length = base + places[at + i * step], places[at + i * step + 1]
        copy_text(target, native_i32(offsets, number + i), source, begin, length)


def repeat(
    target: WritableBytes,
    at: int,
    length: int,
    offsets: WritableBytes,
    number: int,
    count: int,
    times: int,
) -> None:
    """Append `times` copies of the `length` bytes at `at`.

    The bytes are `count` texts with the offsets from `number`. The offsets of the copies follow.
    """
    for _ in range(times):
        copy_text(target, at + length, target, at, length)
        at += length
        for i in range(number, number + count):
            put_i32(offsets, i + count, native_i32(offsets, i) + length)
        number += count


def gather_i32(
    values: WritableBytes,
    number: int,
    source: Bytes,
    base: int,
    places: memoryview,
    at: int,
    step: int,
    count: int,
) -> None:
    """Copy big-endian integers at `base` plus every `step`-th number of `places`."""
    for i in range(count):
        put_i32(values, number + i, get_i32(source, base + places[at + i * step]))


def gather_i64(
    values: WritableBytes,
    number: int,
    source: Bytes,
    base: int,
    places: memoryview,
    at: int,
    step: int,
    count: int,
) -> None:
    """As `gather_i32`, with 64 bits."""
    for i in range(count):
        put_i64(values, number + i, get_i64(source, base + places[at + i * step]))


def scale_i64(values: WritableBytes, number: int, limit: int, factor: int, count: int) -> None:
    """Clamp integers to ±`limit`, then multiply them."""
    for i in range(number, number + count):
        value = _I64.unpack_from(values, 8 * i)[0]
        put_i64(values, i, max(-limit, min(value, limit)) * factor)


def count_zeros(places: memoryview, at: int, step: int, count: int) -> int:
    """How many of every `step`-th number of `places` from `at` are zero."""
    return sum(places[at + i * step] == 0 for i in range(count))


def set_bits(bitmap: WritableBytes, number: int, count: int) -> None:
    for i in range(number, number + count):
        set_bit(bitmap, i)


def set_bits_where(
    bitmap: WritableBytes, number: int, places: memoryview, at: int, step: int, count: int
) -> None:
    """Set the bits whose number in `places` is not zero."""
    for i in range(count):
        if places[at + i * step] != 0:
            set_bit(bitmap, number + i)


def put_i32(values: WritableBytes, number: int, value: int) -> None:
    """Write the `number`-th value of a column of 32-bit integers, in native byte order."""
    _I32.pack_into(values, 4 * number, value)


def put_i64(values: WritableBytes, number: int, value: int) -> None:
    """As `put_i32`, with 64 bits."""
    _I64.pack_into(values, 8 * number, value)


def native_i32(values: WritableBytes, number: int) -> int:
    """The value that `put_i32` wrote."""
    return int(_I32.unpack_from(values, 4 * number)[0])


def set_bit(bitmap: WritableBytes, number: int) -> None:
    bitmap[number >> 3] |= 1 << (number & 7)
