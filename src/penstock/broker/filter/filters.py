"""Filters by properties: expressions are compiled once and evaluated for each message.

A compiled filter is a tree of closures over the values of its properties. They return true, false
or None (unknown, as in SQL). Only the named properties are read from a record. They are strings,
system properties (`TAGS`, `KEYS`, `UNIQ_KEY` ...) like those of users.

The rules are RocketMQ's, including its peculiarities (docs/filters.md):

* a missing or empty property makes comparisons and IN unknown, and CONTAINS, STARTSWITH and
  ENDSWITH false; two missing properties are equal;
* a string that can't be converted for a comparison ends the whole evaluation: no match.
"""

import operator
import struct
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from penstock.broker.filter.filter_parser import (
    Equal,
    InList,
    Literal,
    Logic,
    Negative,
    Node,
    Not,
    Order,
    Property,
    PropertyTest,
    TextMatch,
    is_condition,
    parse,
)
from penstock.broker.filter.filter_values import (
    Incomparable,
    Long,
    Value,
    equal,
    negate,
    order,
    to_double,
    to_int,
    to_long,
)
from penstock.errors import BadFilter, Refused
from penstock.wire import layout
from penstock.wire.message import decode_properties

TAG, SQL92 = "TAG", "SQL92"
"""Types of filters."""
COMPILED_MAX = 1_024
"""Compiled filters in the cache; each takes a few kilobytes."""
COMPILED_CHARS_MAX = 4 * 1024 * 1024
"""Characters of all filters in the cache."""

_FETCHES_MAX = 6
"""From this many properties on it is faster to decode all properties of a record."""

Values: TypeAlias = Sequence[str | None]
Test: TypeAlias = Callable[[Values], bool | None]
Term: TypeAlias = Callable[[Values], Value]

_I32: Final = struct.Struct(">i").unpack_from
_U16: Final = struct.Struct(">H").unpack_from


class Filter:
    """A compiled filter."""

    __slots__ = ("_keys", "_names", "_test", "cost", "expression")

    def __init__(self, expression: str) -> None:
        """Raises BadFilter with the position of the error."""
        self.expression = expression
        compiler = _Compiler()
        self._test = compiler.test(parse(expression))
        self.cost = compiler.tests  # each test costs about 0.2 µs per message
        self._names = tuple(compiler.slots)
        self._keys = tuple(b"\x02" + name.encode() + b"\x01" for name in self._names)

    def matches(self, properties: bytes) -> bool:
        """Whether a message with these stored properties matches."""
        if len(self._keys) < _FETCHES_MAX:
            framed = b"\x02" + properties + b"\x02"
            values: Values = [fetch_property(framed, key) for key in self._keys]
        else:
            known = decode_properties(properties)
            values = [known.get(name) for name in self._names]
        try:
            return self._test(values) is True
        except Incomparable:
            return False

    def matches_record(self, data: bytes, at: int) -> bool:
        """Whether the message whose record starts at `at` matches."""
        return self.matches(record_properties(data, at))


class Filters:
    """A cache of compiled filters by expression, least recently used first."""

    def __init__(self) -> None:
        self._compiled: dict[str, Filter] = {}
        self._chars = 0

    def __len__(self) -> int:
        return len(self._compiled)

    def get(self, expression: str) -> Filter:
        """The compiled expression. Raises BadFilter."""
        known = self._compiled.pop(expression, None)
        if known is None:
            known = Filter(expression)
            self._chars += len(expression)
        self._compiled[expression] = known  # moves to the end
        while len(self._compiled) > COMPILED_MAX or self._chars > COMPILED_CHARS_MAX:
            oldest = next(iter(self._compiled))
            del self._compiled[oldest]
            self._chars -= len(oldest)
        return known

    @staticmethod
    def check_kind(kind: str, by_properties: bool) -> None:
        """Refuse types of filters that are unknown or disabled."""
        if not by_properties:
            raise Refused(
                f"The broker does not support consumer to filter message by {kind}",
                hint="filters by properties are disabled (property_filter)",
            )
        if kind != SQL92:
            raise BadFilter(f"the filter type {kind} is unknown", hint="use TAG or SQL92")


def record_properties(data: bytes, at: int) -> bytes:
    """The encoded properties of the record that starts at `at`."""
    body_at = at + layout.body_at(_I32(data, at + layout.SYS_FLAG_AT)[0])
    topic = body_at + _I32(data, body_at - layout.BODY_LENGTH_BEFORE_BODY)[0]
    if _I32(data, at + layout.MAGIC_AT)[0] == layout.MAGIC_V2:
        length = topic + 2 + _U16(data, topic)[0]
    else:
        length = topic + 1 + data[topic]
    start = length + 2
    return data[start : start + _U16(data, length)[0]]


def fetch_property(framed: bytes, key: bytes) -> str | None:
    """The value of a property; if it occurs several times, the last one that is not empty.

    `framed` and `key` start and end with the separators.
    """
    end = len(framed)
    while (at := framed.rfind(key, 0, end)) >= 0:
        start = at + len(key)
        stop = framed.find(b"\x02", start)
        if stop > start:
            return framed[start:stop].decode("utf-8", "replace")
        end = at + 1
    return None


class _Compiler:
    """Compiles nodes to closures; `slots` has the index of each property in the values."""

    def __init__(self) -> None:
        self.slots: dict[str, int] = {}
        self.tests = 0

    def test(self, node: Node) -> Test:
        """A closure that evaluates a condition."""
        self.tests += 1
        match node:
            case Literal(None | True | False as value):
                return lambda values: value
            case PropertyTest(operand):
                return _truth(self.term(operand))
            case Not(operand):
                return _inverse(self.test(operand))
            case Logic(word, parts):
                return (_all if word == "AND" else _any)([self.test(part) for part in parts])
            case Equal():
                return self._equal(node)
            case Order():
                return self._order(node)
            case InList(operand, texts, negated):
                return _in_list(self._slot(operand), frozenset(texts), negated)
            case TextMatch(word, operand, text, negated):
                return _text_match(word, self.term(operand), text, negated)
            case _:
                raise TypeError(f"{node} is not a condition")

    def term(self, node: Node) -> Term:
        """A closure that evaluates a value."""
        match node:
            case Property():
                return operator.itemgetter(self._slot(node))
            case Negative(operand):
                return _negative(self.term(operand))
            case Literal(value):
                return lambda values: value
            case _:
                return self.test(node)

    def _slot(self, node: Property) -> int:
        return self.slots.setdefault(node.name, len(self.slots))

    def _equal(self, node: Equal) -> Test:
        right = node.right
        if isinstance(right, Literal) and right.value is None:
            return _missing(self.term(node.left))
        if isinstance(node.left, Property):
            number = _number(right)
            if number is not None:
                return _ordered(operator.eq, self._slot(node.left), number)
            if isinstance(right, Literal) and type(right.value) is str:
                return _same_text(self._slot(node.left), right.value)
        return _equal(self.term(node.left), self.term(right))

    def _order(self, node: Order) -> Test:
        number = _number(node.right)
        if isinstance(node.left, Property) and number is not None:
            signs = _DOUBLE_SIGNS if type(number) is float else _SIGNS
            return _ordered(signs[node.sign], self._slot(node.left), number)
        return _order(_SIGNS[node.sign], self.term(node.left), self.term(node.right))


Sign: TypeAlias = Callable[[float, float], bool]

_SIGNS: Final[dict[str, Sign]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
# NaN on the left is greater than every number.
_DOUBLE_SIGNS: Final[dict[str, Sign]] = {
    **_SIGNS,
    ">": lambda x, y: not x <= y,
    ">=": lambda x, y: not x < y,
}


def _number(node: Node) -> int | Long | float | None:
    """The number of a literal, possibly with signs; None for other nodes."""
    if isinstance(node, Negative):
        number = _number(node.operand)
        return None if number is None else negate(number)  # type: ignore[return-value]
    if isinstance(node, Literal) and not is_condition(node) and type(node.value) is not str:
        return node.value  # type: ignore[return-value]
    return None


def _ordered(sign: Sign, slot: int, number: int | Long | float) -> Test:
    """Compare a property with a number: the most frequent test."""
    convert: Callable[[str], float] = to_int
    if type(number) is float:
        convert = to_double
    elif type(number) is Long:
        convert = to_long

    def test(values: Values) -> bool | None:
        text = values[slot]
        return None if text is None else sign(convert(text), number)

    return test


def _same_text(slot: int, wanted: str) -> Test:
    def test(values: Values) -> bool | None:
        text = values[slot]
        return None if text is None else text == wanted

    return test


def _equal(left: Term, right: Term) -> Test:
    return lambda values: equal(left(values), right(values))


def _order(sign: Sign, left: Term, right: Term) -> Test:
    def test(values: Values) -> bool | None:
        ordered = order(left(values), right(values))
        return None if ordered is None else sign(ordered, 0)

    return test


def _missing(term: Term) -> Test:
    return lambda values: term(values) is None


def _truth(term: Term) -> Test:
    """A property as a condition: a string is never true, not even 'true'."""
    return lambda values: None if term(values) is None else False


def _negative(term: Term) -> Term:
    return lambda values: negate(term(values))


def _inverse(inner: Test) -> Test:
    def test(values: Values) -> bool | None:
        answer = inner(values)
        return None if answer is None else not answer

    return test


def _all(parts: Sequence[Test]) -> Test:
    def test(values: Values) -> bool | None:
        result: bool | None = True
        for part in parts:
            answer = part(values)
            if answer is None:
                result = None
            elif not answer:
                return False
        return result

    return test


def _any(parts: Sequence[Test]) -> Test:
    def test(values: Values) -> bool | None:
        result: bool | None = False
        for part in parts:
            answer = part(values)
            if answer:
                return True
            if answer is None:
                result = None
        return result

    return test


def _in_list(slot: int, texts: frozenset[str], negated: bool) -> Test:
    def test(values: Values) -> bool | None:
        text = values[slot]
        return None if text is None else (text in texts) is not negated

    return test


_TEXT_MATCHES: Final[dict[str, Callable[[str, str], bool]]] = {
    "CONTAINS": operator.contains,
    "STARTSWITH": str.startswith,
    "ENDSWITH": str.endswith,
}


def _text_match(word: str, term: Term, part_text: str, negated: bool) -> Test:
    has = _TEXT_MATCHES[word]

    def test(values: Values) -> bool | None:
        text = term(values)
        return type(text) is str and part_text != "" and has(text, part_text) is not negated

    return test
