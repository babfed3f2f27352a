"""The tolerant parser of `fastjson`, for what is not strict JSON.

Returns plain dicts, lists and scalars. A null member is left out, so that its default applies.
"""

import math
import re
from typing import Any, Final, NoReturn

from penstock.errors import BodyError

LOOSE_BYTES_MAX: Final = 4 * 1024 * 1024  # parsing takes about 0.2 s per MiB
DEPTH_MAX: Final = 64


def read(
    data: bytes,
    *,
    bytes_max: int = LOOSE_BYTES_MAX,
    depth_max: int = DEPTH_MAX,
    quoted_objects: bool = False,
) -> Any:
    """Plain dicts, lists and scalars of the text; keys are `str` or `ObjectKey`.

    With `quoted_objects` a string key that holds an object counts as the object, as it does for
    fastjson 1.2.83 where it knows that the key should be one.
    """
    if len(data) > bytes_max:
        raise BodyError.over("JSON body that is not strict", figure=len(data), limit=bytes_max)
    try:
        return _TolerantParser(data.decode("utf-8-sig"), depth_max, quoted_objects).document()
    except UnicodeError:
        raise BodyError("JSON body is not valid UTF-8") from None
    except IndexError:
        raise BodyError(f"JSON body ends too early, after {len(data)} bytes") from None
    except RecursionError:
        raise BodyError("JSON body is nested too deeply") from None


class ObjectKey(dict[str, Any]):
    """An object that stands where a key stands: hashable, never changed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(sorted(self.items(), key=lambda item: item[0])))


_SPACE: Final = re.compile(r"[ \t\r\n\f\b]*")
_COMMAS: Final = re.compile(r"[ \t\r\n\f\b,]*")
_NUMBER: Final = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?([LSBFD]?)")
_NUMBER_KEY: Final = re.compile(r"[+-]?[0-9]+(?:\.[0-9]+)?")
_WORD: Final = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*")
_PLAIN: Final = {'"': re.compile(r'"([^"\\]*)"'), "'": re.compile(r"'([^'\\]*)'")}
_CHUNK: Final = {'"': re.compile(r'([^"\\]*)(["\\])'), "'": re.compile(r"([^'\\]*)(['\\])")}
_HEX: Final = {"u": re.compile(r"[0-9a-fA-F]{4}"), "x": re.compile(r"[0-9a-fA-F]{2}")}
_ESCAPES: Final = dict(
    zip("\"'\\/bfnrtv01234567", "\"'\\/\b\f\n\r\t\v\0\1\2\3\4\5\6\7", strict=True)
)
_WORDS: Final = {"true": True, "false": False, "null": None, "undefined": None, "NaN": None}
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


class _TolerantParser:
    """Recursive descent over the text; an IndexError means that the text ends too early."""

    def __init__(self, text: str, depth_max: int, quoted_objects: bool) -> None:
        self._text = text
        self._depth_max = depth_max
        self._quoted_objects = quoted_objects

    def document(self) -> Any:
        at = self._space(0)
        if at == len(self._text):
            raise BodyError("JSON body is empty")
        value, at = self._value(at, 0)
        at = self._space(at)
        if at != len(self._text):
            self._fail(at, "nothing more")
        return value

    def _value(self, at: int, depth: int) -> tuple[Any, int]:
        char = self._text[at]
        if char in "\"'":
            return self._string(at, char)
        if char == "{":
            return self._object(at, depth + 1)
        if char == "[":
            return self._array(at, depth + 1)
        if char in "-+0123456789":
            return self._number(at)
        word = _WORD.match(self._text, at)
        if word is None or word[0] not in _WORDS:
            self._fail(at, "a value")
        return _WORDS[word[0]], word.end()

    def _object(self, at: int, depth: int) -> tuple[dict[Any, Any], int]:
        text = self._text
        self._check_depth(depth)
        members: dict[Any, Any] = {}
        at = self._commas(at + 1)
        while text[at] != "}":
            key, at = self._key(at, depth)
            at = self._space(at)
            if text[at] != ":":
                self._fail(at, "':'")
            value, at = self._value(self._space(at + 1), depth)
            if value is not None:
                members[key] = value
            at = self._next(at, "}")
        return members, at + 1

    def _array(self, at: int, depth: int) -> tuple[list[Any], int]:
        text = self._text
        self._check_depth(depth)
        items: list[Any] = []
        at = self._commas(at + 1)
        while text[at] != "]":
            value, at = self._value(at, depth)
            items.append(value)
            at = self._next(at, "]")
        return items, at + 1

    def _key(self, at: int, depth: int) -> tuple[str | ObjectKey, int]:
        char = self._text[at]
        if char in "\"'":
            name, end = self._string(at, char)
            if name == "$ref":
                raise BodyError(
                    f"JSON body uses a fastjson reference ($ref) at character {at}",
                    hint="write it with DisableCircularReferenceDetect",
                )
            if self._quoted_objects and name.startswith("{"):
                return self._quoted_object(name, depth), end
            return name, end
        if char == "{":
            members, end = self._object(at, depth + 1)
            return ObjectKey(members), end
        match = _NUMBER_KEY.match(self._text, at) or _WORD.match(self._text, at)
        if match is None:
            self._fail(at, "a key")
        return match[0], match.end()

    def _quoted_object(self, name: str, depth: int) -> str | ObjectKey:
        try:
            members, end = _TolerantParser(name, self._depth_max, True)._object(0, depth + 1)
        except (BodyError, IndexError):
            return name
        return ObjectKey(members) if end == len(name) else name

    def _string(self, at: int, quote: str) -> tuple[str, int]:
        plain = _PLAIN[quote].match(self._text, at)
        if plain is not None:
            return plain[1], plain.end()
        parts: list[str] = []
        at += 1
        while True:
            chunk = _CHUNK[quote].match(self._text, at)
            if chunk is None:
                raise IndexError
            parts.append(chunk[1])
            at = chunk.end()
            if chunk[2] == quote:
                break
            char, at = self._escape(at)
            parts.append(char)
        return self._joined(parts), at

    def _escape(self, at: int) -> tuple[str, int]:
        char = self._text[at]
        if char in _ESCAPES:
            return _ESCAPES[char], at + 1
        digits = _HEX[char].match(self._text, at + 1) if char in _HEX else None
        if digits is None:
            self._fail(at, "an escape")
        return chr(int(digits[0], 16)), digits.end()

    @staticmethod
    def _joined(parts: list[str]) -> str:
        text = "".join(parts)
        if _SURROGATE.search(text):  # pairs become one character; a lone one is a UnicodeError
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
        return text

    def _number(self, at: int) -> tuple[int | float, int]:
        match = _NUMBER.match(self._text, at)
        if match is None:
            self._fail(at, "a number")
        suffix = match[3]
        digits = match[0].removesuffix(suffix) if suffix else match[0]
        if match[1] is None and match[2] is None and suffix not in ("F", "D"):
            if len(digits) > 400:  # far beyond any Java type; int() would take its time
                self._fail(at, "a shorter number")
            return int(digits), match.end()
        number = float(digits)
        if math.isinf(number):
            self._fail(at, "a smaller number")
        return number, match.end()

    def _next(self, at: int, end: str) -> int:
        at = self._space(at)
        char = self._text[at]
        if char == ",":
            return self._commas(at)
        if char != end:
            self._fail(at, f"',' or '{end}'")
        return at

    def _space(self, at: int) -> int:
        return _SPACE.match(self._text, at).end()  # type: ignore[union-attr]

    def _commas(self, at: int) -> int:
        return _COMMAS.match(self._text, at).end()  # type: ignore[union-attr]

    def _check_depth(self, depth: int) -> None:
        if depth > self._depth_max:
            raise BodyError.over("JSON body", figure=depth, limit=self._depth_max, unit="levels")

    def _fail(self, at: int, wanted: str) -> NoReturn:
        if at >= len(self._text):
            raise IndexError
        found = self._text[at : at + 20]
        raise BodyError(f"JSON body at character {at}: expected {wanted}, found {found!r}")
