"""Byte primitives of the compiled core: big-endian numbers, copies, checksums, decimal, hex.

These Python bodies define what the primitives do and serve the uncompiled core; `octets.pxd` gives
compiled modules the same names as inline C. This module itself is never compiled.

Cost model: compiled, each call is a few machine instructions. No function checks bounds: the caller
has checked a whole header, record or entry once before it reads its fields.
"""

import struct
import zlib

_I16 = struct.Struct(">h")
_I32 = struct.Struct(">i")
_U32 = struct.Struct(">I")
_I64 = struct.Struct(">q")

Bytes = bytes | bytearray | memoryview
WritableBytes = bytearray | memoryview


def get_i16(buf: Bytes, at: int) -> int:
    return int(_I16.unpack_from(buf, at)[0])


def get_i32(buf: Bytes, at: int) -> int:
    return int(_I32.unpack_from(buf, at)[0])


def get_u32(buf: Bytes, at: int) -> int:
    return int(_U32.unpack_from(buf, at)[0])


def get_i64(buf: Bytes, at: int) -> int:
    return int(_I64.unpack_from(buf, at)[0])


def put_i16(buf: WritableBytes, at: int, value: int) -> None:
    _I16.pack_into(buf, at, value)


def put_i32(buf: WritableBytes, at: int, value: int) -> None:
    _I32.pack_into(buf, at, value)


def put_i64(buf: WritableBytes, at: int, value: int) -> None:
    _I64.pack_into(buf, at, value)


def copy(target: WritableBytes, target_at: int, source: Bytes, source_at: int, length: int) -> None:
    """Copy between buffers that do not overlap."""
    target[target_at : target_at + length] = source[source_at : source_at + length]


def same(a: Bytes, a_at: int, b: Bytes, b_at: int, length: int) -> bool:
    return a[a_at : a_at + length] == b[b_at : b_at + length]


def matches(buf: Bytes, at: int, name: bytes) -> bool:
    """Whether `name` is at this position."""
    return bytes(buf[at : at + len(name)]) == name


def put_bytes(buf: WritableBytes, at: int, text: bytes) -> int:
    """Write a constant; returns its length."""
    buf[at : at + len(text)] = text
    return len(text)


def find(buf: Bytes, at: int, end: int, byte: int) -> int:
    """Position of the first `byte` in [at, end), or -1."""
    hit = bytes(buf[at:end]).find(byte)
    return hit + at if hit >= 0 else -1


def zero(buf: WritableBytes, at: int, length: int) -> None:
    buf[at : at + length] = bytes(length)


def crc31(buf: Bytes, at: int, length: int) -> int:
    """CRC-32 (IEEE) without its top bit, as RocketMQ stores it."""
    return zlib.crc32(buf[at : at + length]) & 0x7FFFFFFF


def is_ascii(buf: Bytes, at: int, length: int) -> bool:
    return bytes(buf[at : at + length]).isascii()


def ascii_hash(buf: Bytes, at: int, length: int, seed: int) -> int:
    """Java's String.hashCode continued from `seed` over ASCII text; a signed 32-bit number."""
    seed &= 0xFFFFFFFF
    for unit in buf[at : at + length]:
        seed = (31 * seed + unit) & 0xFFFFFFFF
    return seed - (1 << 32) if seed & 0x80000000 else seed


def mix_hash(buf: Bytes, at: int, length: int, seed: int) -> int:
    """FNV-1a from `seed`, for hash tables in memory; an unsigned 32-bit number."""
    value = (seed ^ 0x811C9DC5) & 0xFFFFFFFF
    for unit in buf[at : at + length]:
        value = ((value ^ unit) * 0x01000193) & 0xFFFFFFFF
    return value


def put_decimal(buf: WritableBytes, at: int, value: int) -> int:
    """Write a signed number as ASCII text; returns its length (at most 20)."""
    text = b"%d" % value
    buf[at : at + len(text)] = text
    return len(text)


def put_hex(buf: WritableBytes, at: int, source: Bytes, source_at: int, length: int) -> None:
    """Write `length` bytes as twice as many upper-case hex digits."""
    buf[at : at + 2 * length] = bytes(source[source_at : source_at + length]).hex().upper().encode()


def put_hex_bytes(buf: WritableBytes, at: int, source: bytes) -> int:
    """Write constant bytes as hex digits; returns the number of digits."""
    put_hex(buf, at, source, 0, len(source))
    return 2 * len(source)


def put_hex_i64(buf: WritableBytes, at: int, value: int) -> None:
    """Write a 64-bit number as 16 upper-case hex digits."""
    buf[at : at + 16] = b"%016X" % (value & 0xFFFFFFFFFFFFFFFF)
