"""Decoders of message bodies: text, JSON, MessagePack, hex.

A decoder returns text, or None if the body is not in its format. The text is never HTML.
"""

import json
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

BODY_SHOWN_MAX = 256 * 1024
"""Decoded bytes of a body; the rest is not shown."""
SUMMARY_CHARACTERS = 160
_HEX_COLUMNS = 16


def decode_text(body: bytes) -> str | None:
    """UTF-8 text without control characters other than tabs and line ends."""
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    return None if _has_controls(text) else text


def decode_json(body: bytes) -> str | None:
    """A JSON object or array, indented. Plain numbers and strings are text."""
    if body[:1] not in (b"{", b"[") and not body[:8].lstrip().startswith((b"{", b"[")):
        return None
    try:
        return json.dumps(json.loads(body), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


def decode_msgpack(body: bytes) -> str | None:
    """A MessagePack map or array, as indented JSON; bytes are shown as hex."""
    if not body or not (0x80 <= body[0] <= 0x9F or 0xDC <= body[0] <= 0xDF):
        return None
    try:
        value = msgspec.msgpack.decode(body)
        return json.dumps(_plain(value), indent=2, ensure_ascii=False)
    except (msgspec.DecodeError, RecursionError, ValueError, TypeError):
        return None


def decode_hex(body: bytes) -> str:
    """Offset, bytes and printable characters, 16 bytes per line."""
    lines = []
    for at in range(0, len(body), _HEX_COLUMNS):
        part = body[at : at + _HEX_COLUMNS]
        codes = part.hex(" ").ljust(3 * _HEX_COLUMNS - 1)
        shown = "".join(chr(b) if 32 <= b < 127 else "." for b in part)
        lines.append(f"{at:08x}  {codes}  {shown}")
    return "\n".join(lines)


DECODERS: Final[Mapping[str, Callable[[bytes], str | None]]] = {
    "json": decode_json,
    "msgpack": decode_msgpack,
    "text": decode_text,
    "hex": decode_hex,
}
"""By name, the most specific first."""


def decode_body(body: bytes) -> dict[str, object]:
    """The body in all formats that fit, and the name of the most specific one."""
    part = body[:BODY_SHOWN_MAX]
    found = {name: decode(part) for name, decode in DECODERS.items()}
    shown = {name: text for name, text in found.items() if text is not None}
    return {
        "bytes": len(body),
        "shown_bytes": len(part),
        "format": next(iter(shown)),
        "formats": shown,
    }


def summary(body: bytes) -> str:
    """The begin of the body in one line."""
    part = body[: SUMMARY_CHARACTERS * 4]
    try:
        text = part.decode()
    except UnicodeDecodeError as error:
        # A character may be cut at the end of the part.
        if error.start < len(part) - 3 or len(part) == len(body):
            return "0x" + body[: SUMMARY_CHARACTERS // 2].hex()
        text = part[: error.start].decode()
    if _has_controls(text):
        return "0x" + body[: SUMMARY_CHARACTERS // 2].hex()
    line = " ".join(text.split())
    return line[:SUMMARY_CHARACTERS] + ("…" if len(line) > SUMMARY_CHARACTERS else "")


def _has_controls(text: str) -> bool:
    """Whether a text has control characters other than tabs and line ends."""
    return any(ord(c) < 32 and c not in "\t\n\r" for c in text)


def _plain(value: object) -> object:
    """A value that JSON can represent."""
    if isinstance(value, bytes | bytearray | memoryview):
        return f"0x{bytes(value).hex()}"
    if isinstance(value, dict):
        return {_key(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float | bool):
        return value
    return str(value)


def _key(key: object) -> str:
    plain = _plain(key)
    return plain if isinstance(plain, str) else json.dumps(plain)
