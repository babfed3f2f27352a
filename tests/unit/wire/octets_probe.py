"""Calls every byte primitive once: test_octets.py compiles this to reach their C bodies."""
# The types are in the .pxd; annotations here would only repeat them.
# mypy: ignore-errors

from penstock.wire import octets


def get_i16(buf, at):
    return octets.get_i16(buf, at)


def get_i32(buf, at):
    return octets.get_i32(buf, at)


def get_u32(buf, at):
    return octets.get_u32(buf, at)


def get_i64(buf, at):
    return octets.get_i64(buf, at)


def put_i16(buf, at, value):
    octets.put_i16(buf, at, value)


def put_i32(buf, at, value):
    octets.put_i32(buf, at, value)


def put_i64(buf, at, value):
    octets.put_i64(buf, at, value)


def copy(target, target_at, source, source_at, length):
    octets.copy(target, target_at, source, source_at, length)


def same(a, a_at, b, b_at, length):
    return octets.same(a, a_at, b, b_at, length)


def matches(buf, at, name):
    return octets.matches(buf, at, name)


def put_bytes(buf, at, text):
    return octets.put_bytes(buf, at, text)


def find(buf, at, end, byte):
    return octets.find(buf, at, end, byte)


def zero(buf, at, length):
    octets.zero(buf, at, length)


def crc31(buf, at, length):
    return octets.crc31(buf, at, length)


def is_ascii(buf, at, length):
    return octets.is_ascii(buf, at, length)


def ascii_hash(buf, at, length, seed):
    return octets.ascii_hash(buf, at, length, seed)


def mix_hash(buf, at, length, seed):
    return octets.mix_hash(buf, at, length, seed)


def put_decimal(buf, at, value):
    return octets.put_decimal(buf, at, value)


def put_hex(buf, at, source, source_at, length):
    octets.put_hex(buf, at, source, source_at, length)


def put_hex_bytes(buf, at, source):
    return octets.put_hex_bytes(buf, at, source)


def put_hex_i64(buf, at, value):
    octets.put_hex_i64(buf, at, value)
