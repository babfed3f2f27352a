"""Writes values as JSON, in the three forms that fastjson writes."""

import math
import re
from base64 import b64encode
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any, Final

import msgspec

from penstock.errors import BodyError


class RawJson(str):
    """Text that is JSON already and is written as it is."""

    __slots__ = ()


def encode(value: Any) -> bytes:
    """Compact text, with numbers and objects as bare keys."""
    return _encode(value, _COMPACT)


def encode_pretty(value: Any) -> bytes:
    """Text on many lines, indented by tabs: the form of files."""
    return _encode(value, _PRETTY)


def encode_strict(value: Any) -> bytes:
    """Compact text that any JSON parser accepts: quoted keys, ASCII only."""
    return _encode(value, _STRICT)


_LOOSE_SPECIAL: Final = re.compile('["\\\\\x00-\x1f\x7f-\x9f\u2028\u2029]')
_STRICT_SPECIAL: Final = re.compile('["\\\\/\x00-\x1f]|[^\x00-\x7e]')
_SHORT: Final = {
    '"': '\\"',
    "\\": "\\\\",
    "/": "\\/",
    "\b": "\\b",
    "\f": "\\f",
    "\n": "\\n",
    "\r": "\\r",
    "\t": "\\t",
}


def _quote_loose(text: str) -> str:
    return f'"{_LOOSE_SPECIAL.sub(_escaped, text)}"'


def _quote_strict(text: str) -> str:
    return f'"{_STRICT_SPECIAL.sub(_escaped, text)}"'


def _escaped(match: re.Match[str]) -> str:
    char = match[0]
    short = _SHORT.get(char)
    if short is not None:
        return short
    units = char.encode("utf-16-be")  # a lone surrogate is a UnicodeError here
    return "".join(f"\\u{units[i]:02X}{units[i + 1]:02X}" for i in range(0, len(units), 2))


class _Style:
    """How to quote, whether keys may stay bare, whether there are lines."""

    __slots__ = ("bare_keys", "lines", "quote")

    def __init__(self, quote: Callable[[str], str], *, bare_keys: bool, lines: bool) -> None:
        self.quote = quote
        self.bare_keys = bare_keys
        self.lines = lines


_COMPACT: Final = _Style(_quote_loose, bare_keys=True, lines=False)
_PRETTY: Final = _Style(_quote_loose, bare_keys=True, lines=True)
_STRICT: Final = _Style(_quote_strict, bare_keys=False, lines=False)


def _encode(value: Any, style: _Style) -> bytes:
    out: list[str] = []
    try:
        _write(value, out, style, 0)
        return "".join(out).encode()
    except UnicodeError:
        raise BodyError("JSON body: a string contains a lone surrogate") from None
    except RecursionError:
        raise BodyError("JSON body is nested too deeply to be encoded") from None


def _write(value: Any, out: list[str], style: _Style, level: int) -> None:
    if isinstance(value, str):
        out.append(value if type(value) is RawJson else style.quote(value))
    elif value is None or value is True or value is False:
        out.append("null" if value is None else "true" if value else "false")
    elif isinstance(value, Enum):
        out.append(style.quote(value.name))
    elif isinstance(value, int):
        out.append(str(value))
    elif isinstance(value, float):
        out.append(repr(value) if math.isfinite(value) else "null")
    elif isinstance(value, msgspec.Struct):
        _write_struct(value, out, style, level)
    elif isinstance(value, dict):
        _write_map(value, out, style, level)
    elif isinstance(value, list):
        _write_items(value, out, style, level, lines=style.lines)
    elif isinstance(value, set | frozenset):
        _write_items(sorted(value), out, style, level, lines=False)
    elif isinstance(value, tuple):
        _write_items(value, out, style, level, lines=False)
    elif isinstance(value, bytes | bytearray):
        out.append(f'"{b64encode(value).decode()}"')
    else:
        raise BodyError(f"JSON body: can't encode a {type(value).__name__}")


@cache
def _members(kind: type[msgspec.Struct]) -> tuple[tuple[str, str], ...]:
    """Attribute and quoted name of every field, sorted by name."""
    pairs = zip(kind.__struct_encode_fields__, kind.__struct_fields__, strict=True)
    return tuple((attribute, f'"{name}":') for name, attribute in sorted(pairs))


def _write_struct(value: msgspec.Struct, out: list[str], style: _Style, level: int) -> None:
    line = "\n" + "\t" * (level + 1) if style.lines else ""
    mark = "{"
    for attribute, name in _members(type(value)):
        member = getattr(value, attribute)
        if member is not None:
            out.append(f"{mark}{line}{name}")
            _write(member, out, style, level + 1)
            mark = ","
    _close(out, style, level, mark)


def _write_map(value: dict[Any, Any], out: list[str], style: _Style, level: int) -> None:
    line = "\n" + "\t" * (level + 1) if style.lines else ""
    mark = "{"
    for key, member in value.items():
        if member is None:
            continue
        if isinstance(key, str):
            out.append(f"{mark}{line}{style.quote(key)}:")
        else:  # fastjson starts no new line before such keys
            text = _bare_key(key)
            out.append(f"{mark}{text if style.bare_keys else style.quote(text)}:")
        _write(member, out, style, level + 1)
        mark = ","
    _close(out, style, level, mark)


def _bare_key(key: Any) -> str:
    out: list[str] = []
    _write(key, out, _COMPACT, 0)
    return "".join(out)


def _close(out: list[str], style: _Style, level: int, mark: str) -> None:
    if mark == "{":
        out.append("{}")
    else:
        out.append("\n" + "\t" * level + "}" if style.lines else "}")


def _write_items(items: Any, out: list[str], style: _Style, level: int, *, lines: bool) -> None:
    line = "\n" + "\t" * (level + 1) if lines else ""
    mark = "["
    for item in items:
        out.append(mark + line)
        _write(item, out, style, level + 1)
        mark = ","
    if mark == "[":
        out.append("[]")
    else:
        out.append("\n" + "\t" * level + "]" if lines else "]")
