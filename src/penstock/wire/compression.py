"""Message bodies compressed as RocketMQ compresses them.

    sysFlag & 0x001   compressed
    sysFlag & 0x700   0x000 zlib of old clients, 0x100 LZ4 frame, 0x200 Zstandard, 0x300 zlib

A body is exactly one stream. The output is counted while it is decompressed, so a few bytes that
inflate to gigabytes cost no more memory than the limit and one chunk. Every error is a
`CompressionError`.
"""

import sys
import zlib
from collections.abc import Callable
from enum import IntEnum
from typing import Final, Protocol

import lz4.frame

from penstock.errors import CompressionError
from penstock.wire.codes import SYS_COMPRESSED, SYS_COMPRESSION_MASK

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

LEVEL_DEFAULT: Final = 5
_CHUNK_BYTES: Final = 64 * 1024
_KIND_SHIFT: Final = 8
_FAULTS: Final = (zlib.error, zstd.ZstdError, RuntimeError, EOFError, ValueError, OverflowError)


class Compression(IntEnum):
    """The compression types, by their number in sysFlag."""

    LZ4 = 1
    ZSTD = 2
    ZLIB = 3


def compression_of(sys_flag: int) -> Compression:
    """The compression type of a body; old clients set no type and use zlib."""
    number = (sys_flag & SYS_COMPRESSION_MASK) >> _KIND_SHIFT
    if number == 0:
        return Compression.ZLIB
    try:
        return Compression(number)
    except ValueError:
        raise CompressionError(f"unknown compression type {number} in sysFlag {sys_flag}") from None


def with_compression(sys_flag: int, kind: Compression) -> int:
    """`sys_flag` of a body that was compressed by `kind`."""
    return sys_flag & ~SYS_COMPRESSION_MASK | SYS_COMPRESSED | kind << _KIND_SHIFT


def without_compression(sys_flag: int) -> int:
    """`sys_flag` of a body that is not compressed."""
    return sys_flag & ~(SYS_COMPRESSION_MASK | SYS_COMPRESSED)


def compress(body: bytes, kind: Compression, level: int = LEVEL_DEFAULT) -> bytes:
    """Compress a body for RocketMQ's clients; LZ4 has no levels."""
    try:
        if kind is Compression.ZLIB:
            return zlib.compress(body, level)
        if kind is Compression.ZSTD:
            return zstd.compress(body, level)
    except _FAULTS as error:
        raise CompressionError(f"{kind.name} level {level}: {error}") from None
    # RocketMQ's LZ4 decoder refuses blocks that refer to the previous block.
    framed: bytes = lz4.frame.compress(
        body, block_size=lz4.frame.BLOCKSIZE_MAX4MB, block_linked=False, store_size=False
    )
    return framed


def decompress(body: bytes, sys_flag: int, *, limit: int) -> bytes:
    """Decompress a body to at most `limit` bytes; one that is not compressed is returned as is."""
    if not sys_flag & SYS_COMPRESSED:
        return body
    kind = compression_of(sys_flag)
    try:
        return _inflate(body, kind, limit)
    except _FAULTS as error:
        raise CompressionError(f"{kind.name} body of {len(body)} bytes: {error}") from None


class _Stream(Protocol):
    """The interface of the LZ4 and Zstandard decompressors."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes | None: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _ZlibStream:
    """zlib with the same interface."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj()

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._stream.decompress(self._stream.unconsumed_tail + data, max_length)


_STREAMS: Final[dict[Compression, Callable[[], _Stream]]] = {
    Compression.LZ4: lz4.frame.LZ4FrameDecompressor,
    Compression.ZSTD: zstd.ZstdDecompressor,
    Compression.ZLIB: _ZlibStream,
}


def _inflate(body: bytes, kind: Compression, limit: int) -> bytes:
    stream = _STREAMS[kind]()
    pieces: list[bytes] = []
    total = 0
    chunk_bytes = _CHUNK_BYTES
    data = bytes(body)
    while not stream.eof:
        # One byte more than the limit tells a body that is too long from one that just fits.
        piece = stream.decompress(data, min(chunk_bytes, limit + 1 - total))
        if not piece and not data and not stream.eof:
            raise CompressionError(f"{kind.name} body of {len(body)} bytes is truncated")
        total += len(piece)
        if total > limit:
            raise CompressionError.over(
                f"{kind.name} body of {len(body)} bytes decompresses to more than",
                figure=total,
                limit=limit,
            )
        pieces.append(piece)
        data = b""
        chunk_bytes *= 2  # LZ4 copies the rest of its input in every round
    if stream.unused_data:
        raise CompressionError(f"{kind.name} body has {len(stream.unused_data)} bytes too many")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)
