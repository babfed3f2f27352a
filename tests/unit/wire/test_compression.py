"""Compressed bodies: round trips, limits and invalid data."""

import contextlib
import tracemalloc
import zlib
from collections.abc import Callable

import lz4.frame
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import CompressionError
from penstock.wire import compression as module
from penstock.wire.compression import (
    Compression,
    compress,
    compression_of,
    decompress,
    with_compression,
    without_compression,
)

KINDS = list(Compression)
FLAGS = {kind: with_compression(0, kind) for kind in KINDS}
MIB = 1024 * 1024


@given(st.binary(max_size=2000), st.sampled_from(KINDS), st.integers(0, 2**31 - 1))
def test_round_trip(body: bytes, kind: Compression, flag: int) -> None:
    packed = compress(body, kind, 5)
    flag = with_compression(flag, kind)
    assert compression_of(flag) is kind
    assert decompress(packed, flag, limit=len(body)) == body


@pytest.mark.parametrize("kind", KINDS)
def test_large_body_in_many_chunks(kind: Compression) -> None:
    body = b"".join(index.to_bytes(4, "big") for index in range(500_000))
    assert decompress(compress(body, kind), FLAGS[kind], limit=len(body)) == body


def test_compression_flags_equal_those_of_rocketmq() -> None:
    assert FLAGS == {Compression.LZ4: 0x101, Compression.ZSTD: 0x201, Compression.ZLIB: 0x301}
    assert with_compression(0x7F8, Compression.LZ4) == 0x1F9
    assert without_compression(0x3FD) == 0x0FC


def test_a_missing_compression_type_is_zlib() -> None:
    assert decompress(zlib.compress(b"x"), 0x001, limit=10) == b"x"


def test_uncompressed_body_is_unchanged() -> None:
    assert decompress(b"plain", 0x300, limit=1) == b"plain"


@pytest.mark.parametrize("number", [4, 5, 6, 7])
def test_unknown_type_is_refused(number: int) -> None:
    with pytest.raises(CompressionError, match=f"type {number}"):
        decompress(b"x", 0x001 | number << 8, limit=10)


@pytest.mark.parametrize("kind", KINDS)
def test_limit_is_exact(kind: Compression) -> None:
    packed = compress(b"a" * 1000, kind)
    assert decompress(packed, FLAGS[kind], limit=1000) == b"a" * 1000
    with pytest.raises(CompressionError) as caught:
        decompress(packed, FLAGS[kind], limit=999)
    assert caught.value.limit == 999
    with pytest.raises(CompressionError):
        decompress(packed, FLAGS[kind], limit=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_decompression_bomb_uses_no_more_memory_than_the_limit(kind: Compression) -> None:
    bomb = compress(bytes(200 * MIB), kind)
    limit = 4 * MIB
    tracemalloc.start()
    try:
        with pytest.raises(CompressionError):
            decompress(bomb, FLAGS[kind], limit=limit)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 * limit + len(bomb)


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_refused(kind: Compression) -> None:
    packed = compress(b"penstock " * 20, kind)
    for size in range(len(packed)):
        with pytest.raises(CompressionError):
            decompress(packed[:size], FLAGS[kind], limit=1000)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [b"\0", b"garbage"])
def test_trailing_bytes_are_refused(kind: Compression, more: bytes) -> None:
    with pytest.raises(CompressionError, match="too many"):
        decompress(compress(b"body", kind) + more, FLAGS[kind], limit=1000)


@pytest.mark.parametrize("kind", KINDS)
def test_second_frame_is_refused(kind: Compression) -> None:
    packed = compress(b"body", kind)
    with pytest.raises(CompressionError):
        decompress(packed + packed, FLAGS[kind], limit=1000)


@given(st.sampled_from(KINDS), st.binary(max_size=200), st.data())
def test_damaged_data_raises_only_compression_error(
    kind: Compression, body: bytes, data: st.DataObject
) -> None:
    packed = bytearray(compress(body, kind))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    for other in KINDS:
        for text in (bytes(packed), body):
            with contextlib.suppress(CompressionError):
                decompress(text, FLAGS[other], limit=1000)


def test_lz4_blocks_are_independent() -> None:
    # RocketMQ's decoder does not support linked blocks.
    info = lz4.frame.get_frame_info(compress(bytes(9 * MIB), Compression.LZ4))
    assert not info["block_linked"]


@pytest.mark.parametrize(
    ("kind", "level"),
    [
        (Compression.ZLIB, -5),
        (Compression.ZLIB, 10),
        (Compression.ZLIB, 10**20),
        (Compression.ZSTD, 23),
        (Compression.ZSTD, 10**20),
    ],
)
def test_invalid_level_is_refused(kind: Compression, level: int) -> None:
    with pytest.raises(CompressionError):
        compress(b"x", kind, level)


def test_stalled_stream_is_treated_as_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stalled:
        eof = False
        unused_data = b""

        def decompress(self, data: bytes, max_length: int) -> bytes:
            return b""

    streams: dict[Compression, Callable[[], object]] = {Compression.ZLIB: Stalled}
    monkeypatch.setattr(module, "_STREAMS", streams)
    with pytest.raises(CompressionError, match="truncated"):
        decompress(b"x", FLAGS[Compression.ZLIB], limit=10)
