"""Java's .properties format: RocketMQ's broker.conf, and the bodies of the config requests.

    # comment            also !; only as the first visible character of a line
    key=value            or key:value, or key value; blanks around the separator are ignored
    key = one, \\         a backslash at the end joins the next line without its leading blanks
          two
    \\t \\n \\r \\f \\uXXXX   escapes, in keys and values; any other escaped character is itself

The last of several lines with the same key wins. Bytes are decoded as UTF-8, or as Latin-1 (Java's
rule) if they are not valid UTF-8. The output is ASCII, which is the same in both.
"""

import re
from collections.abc import Iterator, Mapping

from penstock.errors import BodyError

_BLANKS = " \t\f"
_SEPARATORS = "=:"
_LINE_END = re.compile(r"\r\n|\r|\n")
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
_ESCAPES = {ord(char): f"\\{letter}" for letter, char in _CONTROLS.items()} | {ord("\\"): "\\\\"}
_KEY_ESCAPES = _ESCAPES | {ord(char): f"\\{char}" for char in "=: #!"}
_HEX = re.compile(r"[0-9a-fA-F]{4}")
_SURROGATES = re.compile("[\ud800-\udfff]")
BYTES_MAX = 64 * 1024
"""Far longer than all settings; a longer text would block the event loop."""
_PAIRS = re.compile("[\ud800-\udbff][\udc00-\udfff]")


def parse_properties(data: bytes) -> dict[str, str]:
    """Keys and values, in the order of their lines; raises BodyError if the text is too long."""
    if len(data) > BYTES_MAX:
        raise BodyError.over(
            "the text of properties is too long", figure=len(data), limit=BYTES_MAX
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    values = {}
    for number, line in _logical_lines(text):
        key_end, value_at = _split(line)
        values[_unescape(line[:key_end], number)] = _unescape(line[value_at:], number)
    return values


def format_properties(values: Mapping[str, str]) -> bytes:
    """One line for each key, sorted; characters are escaped only where it is necessary."""
    lines = []
    for key in sorted(values):
        value = values[key].translate(_ESCAPES)
        if value.startswith(" "):
            value = "\\" + value
        lines.append(f"{_ascii(key.translate(_KEY_ESCAPES))}={_ascii(value)}\n")
    return "".join(lines).encode("ascii")


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number of the first line, line) with continuations joined, without comments and blanks."""
    pending, began = "", 0
    for number, natural in enumerate(_LINE_END.split(text), 1):
        line = natural.lstrip(_BLANKS)
        if not pending:
            began = number
            if not line or line[0] in "#!":
                continue
        backslashes = len(line) - len(line.rstrip("\\"))
        if backslashes % 2:
            pending += line[:-1]
            continue
        yield began, pending + line
        pending = ""
    if pending:
        yield began, pending


def _split(line: str) -> tuple[int, int]:
    """Where the key ends and where the value begins."""
    at = 0
    while at < len(line) and line[at] not in _BLANKS + _SEPARATORS:
        at += 2 if line[at] == "\\" else 1
    key_end = min(at, len(line))
    rest = line[key_end:].lstrip(_BLANKS)
    if rest and rest[0] in _SEPARATORS:
        rest = rest[1:].lstrip(_BLANKS)
    return key_end, len(line) - len(rest)


def _unescape(text: str, number: int) -> str:
    if "\\" not in text:
        return text
    parts, at = [], 0
    while (escape := text.find("\\", at)) >= 0:
        parts.append(text[at:escape])
        char = text[escape + 1 : escape + 2]
        at = escape + 2
        if char == "u":
            if not _HEX.match(text, at):
                raise BodyError(
                    f"line {number}: \\u{text[at : at + 4]} is not a valid escape",
                    hint=r"\u is followed by four hexadecimal digits; a backslash is written \\",
                )
            parts.append(chr(int(text[at : at + 4], 16)))
            at += 4
        else:
            parts.append(_CONTROLS.get(char, char))
    parts.append(text[at:])
    return _join_surrogates("".join(parts))


def _join_surrogates(text: str) -> str:
    """Java writes characters beyond U+FFFF as two escapes; a lone surrogate is replaced."""
    joined = _PAIRS.sub(
        lambda pair: pair[0].encode("utf-16", "surrogatepass").decode("utf-16"), text
    )
    return _SURROGATES.sub("\ufffd", joined)


def _ascii(text: str) -> str:
    if text.isascii() and text.isprintable():
        return text
    parts = []
    for char in text:
        if " " <= char <= "~":
            parts.append(char)
        else:
            units = char.encode("utf-16-be", "surrogatepass").hex()
            parts += [f"\\u{units[at : at + 4].upper()}" for at in range(0, len(units), 4)]
    return "".join(parts)
