"""The byte primitives are the same in Python and in C: each is compared with one plain model.

`octets` itself is never compiled, so its C bodies are reached through `octets_probe`, which is
compiled here into a temporary directory.
"""

import random
import re
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.wire import octets
from penstock.wire.record import java_hash
from tests.unit.wire.probe_kit import compile_probe

HERE = Path(__file__).parent
GUARD = 0xA5
WIDTH = {"i16": 2, "i32": 4, "u32": 4, "i64": 8}
LENGTHS = range(41)

Octets = Any  # the module `octets`, or the compiled probe


@pytest.fixture(scope="session")
def probe(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    source, types = (HERE / f"octets_probe{suffix}" for suffix in (".py", ".pxd"))
    folder = tmp_path_factory.mktemp("octets")
    return compile_probe(folder, "octets_probe", source.read_text(), types.read_text())


@pytest.fixture(scope="module", params=["python", pytest.param("c", marks=pytest.mark.slow)])
def side(request: pytest.FixtureRequest) -> Octets:
    return octets if request.param == "python" else request.getfixturevalue("probe")


def integers(bits: int, *, signed: bool = True) -> st.SearchStrategy[int]:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return st.sampled_from((low, low + 1, high - 1, high)) | st.integers(low, high)


def guarded(length: int) -> bytearray:
    return bytearray([GUARD]) * (length + 16)


def around(buffer: bytearray, length: int) -> bytes:
    """The bytes that a write of `length` at 8 may not have touched."""
    return bytes(buffer[:8] + buffer[8 + length :])


def untouched(length: int) -> bytes:
    return around(guarded(length), length)


spans = st.binary(max_size=64).flatmap(
    lambda data: st.tuples(
        st.just(data), st.integers(0, len(data)), st.integers(0, len(data))
    ).map(lambda found: (found[0], min(found[1:]), max(found[1:])))
)  # fmt: skip


@pytest.mark.slow
def test_every_primitive_has_a_c_body_and_a_probe(probe: ModuleType) -> None:
    declared = re.findall(
        r"^cdef inline [\w ]*?(\w+)\(", Path(octets.__file__).with_suffix(".pxd").read_text(), re.M
    )
    written = {name for name, value in vars(octets).items() if getattr(value, "__code__", None)}
    assert set(declared) == written
    assert written <= {name for name in vars(probe) if not name.startswith("_")}


@pytest.mark.parametrize("kind", WIDTH)
@given(data=st.binary(min_size=8, max_size=8), at=st.integers(0, 9))
@example(data=b"\xff" * 8, at=3)
@example(data=b"\x80" + bytes(7), at=1)
@example(data=b"\x7f" + b"\xff" * 7, at=0)
def test_numbers_are_read_big_endian(side: Octets, kind: str, data: bytes, at: int) -> None:
    expected = int.from_bytes(data[: WIDTH[kind]], "big", signed=kind[0] == "i")
    assert getattr(side, f"get_{kind}")(bytes([GUARD]) * at + data, at) == expected


@pytest.mark.parametrize("bits", [16, 32, 64])
@given(data=st.data())
def test_numbers_are_written_big_endian(side: Octets, bits: int, data: st.DataObject) -> None:
    value = data.draw(integers(bits))
    buffer = guarded(bits // 8)
    getattr(side, f"put_i{bits}")(buffer, 8, value)
    assert buffer[8:-8] == value.to_bytes(bits // 8, "big", signed=True)
    assert around(buffer, bits // 8) == untouched(bits // 8)


@given(span=spans)
def test_copy_and_zero_change_only_their_range(side: Octets, span: tuple[bytes, int, int]) -> None:
    data, at, end = span
    buffer = guarded(end - at)
    side.copy(buffer, 8, data, at, end - at)
    assert buffer[8:-8] == data[at:end]
    assert around(buffer, end - at) == untouched(end - at)
    side.zero(buffer, 8, end - at)
    assert buffer[8:-8] == bytes(end - at)
    assert around(buffer, end - at) == untouched(end - at)


@given(span=spans, flip=st.integers(0, 63))
def test_same_and_matches_compare_only_their_range(
    side: Octets, span: tuple[bytes, int, int], flip: int
) -> None:
    data, at, end = span
    piece, other = data[at:end], bytearray([GUARD]) * 5 + data[at:end] + bytearray([GUARD])
    assert side.same(data, at, other, 5, end - at)
    assert side.matches(data, at, piece)
    if piece:
        other[5 + flip % len(piece)] ^= 0x80
        assert not side.same(data, at, other, 5, end - at)
        assert not side.matches(other, 5, piece)


@given(text=st.binary(max_size=40))
def test_put_bytes_and_put_hex_bytes_return_their_length(side: Octets, text: bytes) -> None:
    buffer = guarded(len(text))
    assert side.put_bytes(buffer, 8, text) == len(text)
    assert buffer[8:-8] == text
    assert around(buffer, len(text)) == untouched(len(text))
    buffer = guarded(2 * len(text))
    assert side.put_hex_bytes(buffer, 8, text) == 2 * len(text)
    assert buffer[8:-8] == text.hex().upper().encode()
    assert around(buffer, 2 * len(text)) == untouched(2 * len(text))


@given(span=spans)
def test_put_hex_writes_upper_case_digits_of_its_range(
    side: Octets, span: tuple[bytes, int, int]
) -> None:
    data, at, end = span
    buffer = guarded(2 * (end - at))
    side.put_hex(buffer, 8, data, at, end - at)
    assert buffer[8:-8] == data[at:end].hex().upper().encode()
    assert around(buffer, 2 * (end - at)) == untouched(2 * (end - at))


@given(value=integers(64))
@example(value=0)
@example(value=-1)
def test_numbers_become_decimal_and_hex_text(side: Octets, value: int) -> None:
    text = str(value).encode()
    buffer = guarded(20)
    assert side.put_decimal(buffer, 8, value) == len(text)
    assert buffer[8 : 8 + len(text)] == text
    assert around(buffer, len(text)) == around(guarded(20), len(text))
    buffer = guarded(16)
    side.put_hex_i64(buffer, 8, value)
    assert buffer[8:-8] == format(value & (1 << 64) - 1, "016X").encode()
    assert around(buffer, 16) == untouched(16)


@given(span=spans, byte=st.sampled_from((0, 1, 2, 34, 92, 128, 255)))
def test_find_returns_the_first_hit_within_the_range(
    side: Octets, span: tuple[bytes, int, int], byte: int
) -> None:
    data, at, end = span
    assert side.find(data, at, end, byte) == data.find(bytes([byte]), at, end)


def test_find_at_every_length_and_place(side: Octets) -> None:
    for length in LENGTHS:
        poisoned = b"\x02" * 3 + bytes([GUARD]) * length + b"\x02" * 3
        assert side.find(poisoned, 3, 3 + length, 2) == -1
        for hit in range(length):
            data = bytearray(poisoned)
            data[3 + hit] = data[2 + length] = 2
            assert side.find(data, 3, 3 + length, 2) == 3 + hit


@given(data=st.binary(min_size=48, max_size=48))
def test_checksums_at_every_length_and_alignment(side: Octets, data: bytes) -> None:
    for length in LENGTHS:
        at = length % 8
        piece = data[at : at + length]
        assert side.crc31(data, at, length) == zlib.crc32(piece) & 0x7FFFFFFF
        assert side.is_ascii(data, at, length) == all(byte < 128 for byte in piece)


def test_checksums_of_longer_pieces(side: Octets) -> None:
    """From 64 bytes on they are folded, sixteen bytes at a time, in one lane or in four."""
    data = random.Random(7).randbytes(700)
    for length in range(600):
        at = length % 37
        assert side.crc31(data, at, length) == zlib.crc32(data[at : at + length]) & 0x7FFFFFFF


def test_a_high_byte_at_any_position_is_not_ascii(side: Octets) -> None:
    for length in LENGTHS:
        for high in range(length):
            data = bytearray(b"\xff" * 2 + b"a" * length + b"\xff" * 2)
            assert side.is_ascii(data, 2, length)
            data[2 + high] = 0x80
            assert not side.is_ascii(data, 2, length)


@given(text=st.text(st.characters(max_codepoint=127), min_size=40, max_size=40))
def test_ascii_hash_equals_that_of_java_and_can_be_continued(side: Octets, text: str) -> None:
    data = text.encode()
    for length in LENGTHS:
        assert side.ascii_hash(data, 0, length, 0) == java_hash(text[:length])
        seed = java_hash(text[: 40 - length])
        assert side.ascii_hash(data, 40 - length, length, seed) == java_hash(text)


@pytest.mark.parametrize("seed", [-(1 << 31), -5, -1, 0, 1, (1 << 31) - 1])
def test_ascii_hash_of_nothing_is_its_seed(side: Octets, seed: int) -> None:
    assert side.ascii_hash(b"guard", 2, 0, seed) == seed


@given(data=st.binary(min_size=40, max_size=40), seed=integers(32, signed=False))
def test_mix_hash_is_fnv_1a(side: Octets, data: bytes, seed: int) -> None:
    expected = 2166136261 ^ seed
    assert side.mix_hash(data, 0, 0, seed) == expected
    for length in range(1, len(LENGTHS)):
        expected = (expected ^ data[length - 1]) * 16777619 % (1 << 32)
        assert side.mix_hash(data, 0, length, seed) == expected
