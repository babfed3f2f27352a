"""Reads JSON into types: strict JSON by msgspec, everything else by the tolerant reader."""

import re
from typing import Any, Final, TypeVar

import msgspec

from penstock.errors import BodyError
from penstock.wire.fastjson.tolerant_reader import DEPTH_MAX, LOOSE_BYTES_MAX, read

BYTES_MAX: Final = 16 * 1024 * 1024  # a frame's limit

T = TypeVar("T")


def decode(
    data: bytes | bytearray | memoryview,
    kind: type[T],
    *,
    bytes_max: int = BYTES_MAX,
    loose_bytes_max: int = LOOSE_BYTES_MAX,
    depth_max: int = DEPTH_MAX,
) -> T:
    """The value of type `kind` that the text holds; unknown members are ignored."""
    data = bytes(data)
    if len(data) > bytes_max:
        raise BodyError.over("JSON body", figure=len(data), limit=bytes_max)
    if b'"$ref"' not in data and _is_shallow(data, depth_max):
        try:
            return _decoder(kind).decode(data)  # type: ignore[no-any-return]
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            pass  # not strict JSON, or another type: the tolerant parser decides
    loose_max = min(bytes_max, loose_bytes_max)
    value = read(data, bytes_max=loose_max, depth_max=depth_max)
    try:
        return build(value, kind)
    except BodyError:
        if b"'{" not in data and b'"{' not in data:
            raise
    value = read(data, bytes_max=loose_max, depth_max=depth_max, quoted_objects=True)
    return build(value, kind)


def build(value: Any, kind: type[T]) -> T:
    """Convert plain values, as `read` returns them, to `kind`."""
    try:
        return msgspec.convert(value, kind, strict=False)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, OverflowError) as error:
        raise BodyError(f"JSON body: {error}") from None


_DECODERS: dict[Any, msgspec.json.Decoder[Any]] = {}


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    decoder = _DECODERS.get(kind)
    if decoder is None:
        decoder = _DECODERS[kind] = msgspec.json.Decoder(kind, strict=False)
    return decoder


_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b'[]{}"'))
_AS_BRACKETS: Final = bytes.maketrans(b"{}", b"[]")
_ESCAPE_PAIR: Final = re.compile(rb"\\.", re.DOTALL)
_QUOTED: Final = re.compile(rb'"[^"]*"')


def _is_shallow(data: bytes, depth_max: int) -> bool:
    """Whether strict JSON nests at most `depth_max` levels; False also for much that is not JSON.

    Works on whole buffers: strings are removed, then one level of brackets per round. The parser
    checks that brackets match.
    """
    if data.count(b"[") + data.count(b"{") <= depth_max:
        return True
    if b"\\" in data:
        data = _ESCAPE_PAIR.sub(b"", data)
    data = data.translate(_AS_BRACKETS, _NOT_BRACKETS).replace(b'""', b"")
    data = _QUOTED.sub(b"", data)
    for _ in range(depth_max):
        if not data:
            return True
        data = data.replace(b"[]", b"")
    return not data
