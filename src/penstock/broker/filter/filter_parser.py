"""Parses filters (SQL92 expressions in RocketMQ's dialect) into trees.

    or:         and (OR and)*
    and:        equality (AND equality)*
    equality:   comparison ((= | <>) comparison | IS [NOT] NULL)*
    comparison: unary ((> | >= | < | <=) unary | [NOT] BETWEEN unary AND unary
                | [NOT] IN ('text', ...) | [NOT] (CONTAINS | STARTSWITH | ENDSWITH) 'text')*
    unary:      (+ | - | NOT) unary | literal | name | ( or )

NOT binds more tightly than any comparison. RocketMQ ignores text after a complete filter, and so
reads `a LIKE 'x'` as `a`. Penstock refuses it with the position.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NoReturn, TypeAlias

from penstock.broker.filter.filter_values import (
    Incomparable,
    Long,
    Value,
    compare,
)
from penstock.errors import BadFilter
from penstock.wire.java_numbers import INT_MAX, LONG_MAX, parse_long

CHARS_MAX = 32_768
"""Maximum length of a filter: parsing it takes up to 50 ms."""
DEPTH_MAX = 50
"""Maximum depth of nesting."""


@dataclass(frozen=True, slots=True)
class Literal:
    value: Value
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Property:
    name: str
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Negative:
    operand: "Node"
    depth: int


@dataclass(frozen=True, slots=True)
class PropertyTest:
    """A property as a condition; it is never true, because properties are strings."""

    operand: "Node"
    depth: int


@dataclass(frozen=True, slots=True)
class Not:
    operand: "Node"
    depth: int


@dataclass(frozen=True, slots=True)
class Logic:
    word: str  # AND, OR
    parts: tuple["Node", ...]
    depth: int


@dataclass(frozen=True, slots=True)
class Equal:
    left: "Node"
    right: "Node"
    depth: int


@dataclass(frozen=True, slots=True)
class Order:
    sign: str  # > >= < <=
    left: "Node"
    right: "Node"
    depth: int


@dataclass(frozen=True, slots=True)
class InList:
    operand: Property
    texts: tuple[str, ...]
    negated: bool
    depth: int


@dataclass(frozen=True, slots=True)
class TextMatch:
    word: str  # CONTAINS, STARTSWITH, ENDSWITH
    operand: "Node"
    text: str
    negated: bool
    depth: int


Node: TypeAlias = (
    Literal | Property | Negative | PropertyTest | Not | Logic | Equal | Order | InList | TextMatch
)

_TEXT_MATCHES: Final = ("CONTAINS", "STARTSWITH", "ENDSWITH")
_WORDS: Final = frozenset(
    {"NOT", "AND", "OR", "BETWEEN", "IN", "TRUE", "FALSE", "NULL", "IS", *_TEXT_MATCHES}
)
_SIGNS: Final = (">", ">=", "<", "<=")
_BLANK: Final = r"[ \t\n\r\f]|/\*[^*]*\*(?:\*|[^*/][^*]*\*)*/"
_SKIPPED: Final = re.compile(rf"(?:{_BLANK}|--[^\n\r]*[\n\r])+")
_SKIPPED_IN_LAST_LINE: Final = re.compile(f"(?:{_BLANK})+")
_TOKEN: Final = re.compile(
    r"(?P<text>'(?:''|[^'])*')"
    r"|(?P<float>[0-9]+\.[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?"
    r"|[0-9]+[eE][+-]?[0-9]+)"
    r"|(?P<whole>(?:0|[1-9][0-9]*)[lL]?)"
    r"|(?P<name>[A-Za-z_$][A-Za-z0-9_$]*)"
    r"|(?P<sign><>|<=|>=|[<>=(),+-])"
)


def parse(text: str) -> Node:
    """The tree of a filter, which is a condition. Raises BadFilter."""
    if len(text) > CHARS_MAX:
        raise BadFilter.over(
            "the filter is too long", figure=len(text), limit=CHARS_MAX, unit="characters"
        )
    return _Parser(text).parse()


def is_condition(node: Node) -> bool:
    """Whether a node is true, false or unknown, and not a number or string."""
    if isinstance(node, Literal):
        return node.value is None or type(node.value) is bool
    return not isinstance(node, Property | Negative)


class _Parser:
    """Recursive descent with one token of lookahead; `_kind` is its class, keyword or sign."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._last_break = max(text.rfind("\n"), text.rfind("\r"))
        self._at = 0  # start of the token
        self._end = 0
        self._kind = ""
        self._depth = 0
        self._advance()

    def parse(self) -> Node:
        at = self._at
        node = self._condition(self._or(), at)
        if self._kind and not self._text.startswith("--", self._at):  # a comment may end the filter
            self._fail("expected AND, OR or the end")
        return node

    # --- tokens

    def _advance(self) -> None:
        # Without a line break after it, -- is two minus signs.
        pattern = _SKIPPED if self._end <= self._last_break else _SKIPPED_IN_LAST_LINE
        skipped = pattern.match(self._text, self._end)
        self._at = self._end if skipped is None else skipped.end()
        if self._at == len(self._text):
            self._kind = ""
            return
        token = _TOKEN.match(self._text, self._at)
        if token is None:
            self._kind = "?"
            if self._text[self._at] == "'":
                self._fail("a string has no closing quote")
            if self._text.startswith("/*", self._at):
                self._fail("a comment is not closed")
            self._fail("this character is not allowed in a filter")
        self._end = token.end()
        self._kind = token.lastgroup or ""
        if self._kind == "sign":
            self._kind = token[0]
        elif self._kind == "name" and token[0].upper() in _WORDS:
            self._kind = token[0].upper()

    def _accept(self, kind: str) -> bool:
        """Advance if the token is of this kind."""
        if self._kind != kind:
            return False
        self._advance()
        return True

    def _expect(self, kind: str, what: str = "") -> None:
        if not self._accept(kind):
            self._fail(f"expected {what or kind}")

    def _text_literal(self) -> str:
        if self._kind != "text":
            self._fail("expected a string such as 'x'")
        text = self._text[self._at + 1 : self._end - 1].replace("''", "'")
        self._advance()
        return text

    def _fail(self, why: str, at: int | None = None) -> NoReturn:
        if at is None:
            at = self._at
            found = self._text[at : max(self._end, at + 1)][:40]
            why = f"{why}, found {found!r}" if found else f"{why}, but the filter ends here"
        line = self._text.count("\n", 0, at) + 1
        column = at - self._text.rfind("\n", 0, at)
        place = f"column {column}" if line == 1 else f"line {line}, column {column}"
        raise BadFilter(f"the filter is not valid at {place}: {why}")

    # --- the grammar

    def _or(self) -> Node:
        return self._logic("OR", self._and)

    def _and(self) -> Node:
        return self._logic("AND", self._equality)

    def _logic(self, word: str, operand: Callable[[], Node]) -> Node:
        at = self._at
        node = operand()
        if self._kind != word:
            return node
        parts = [self._condition(node, at)]
        while self._accept(word):
            at = self._at
            parts.append(self._condition(operand(), at))
        depth = self._deeper(*parts)
        return Logic(word, tuple(parts), depth)

    def _equality(self) -> Node:
        at = self._at
        node = self._comparison()
        while True:
            sign = self._kind
            if sign in ("=", "<>"):
                self._advance()
                right_at = self._at
                right = self._comparison()
                self._check_equal(node, at, right, right_at)
                negated = sign == "<>"
            elif sign == "IS":
                self._advance()
                negated = self._accept("NOT")
                self._expect("NULL", "NULL" if negated else "NULL or NOT NULL")
                right = Literal(None)
            else:
                return node
            node = Equal(node, right, self._deeper(node, right))
            if negated:
                node = Not(node, self._deeper(node))

    def _comparison(self) -> Node:
        at = self._at
        node = self._unary()
        while True:
            sign = self._kind
            if sign in _SIGNS:
                self._advance()
                node = self._ordered(sign, node, at, *self._operand())
                continue
            negated = self._accept("NOT")
            word = self._kind
            if word in _TEXT_MATCHES:
                self._advance()
                node = TextMatch(word, node, self._text_literal(), negated, self._deeper(node))
            elif word == "BETWEEN":
                self._advance()
                node = self._between(node, at, negated)
            elif word == "IN":
                self._advance()
                node = self._in_list(node, at, negated)
            elif negated:
                self._fail("expected IN, BETWEEN, CONTAINS, STARTSWITH or ENDSWITH after NOT")
            else:
                return node

    def _operand(self) -> tuple[Node, int]:
        at = self._at
        return self._unary(), at

    def _between(self, node: Node, at: int, negated: bool) -> Node:
        low, low_at = self._operand()
        self._expect("AND", "AND and the upper bound")
        high, high_at = self._operand()
        if negated:
            below = self._ordered("<", node, at, low, low_at)
            above = self._ordered(">", node, at, high, high_at)
            return Logic("OR", (below, above), self._deeper(below, above))
        first = self._ordered(">=", node, at, low, low_at)
        last = self._ordered("<=", node, at, high, high_at)
        if isinstance(low, Literal) and isinstance(high, Literal):
            try:
                empty = compare(high.value, low.value) < 0
            except Incomparable:
                empty = False
            if empty:
                self._fail("the lower bound of BETWEEN is above the upper bound", low_at)
        return Logic("AND", (first, last), self._deeper(first, last))

    def _in_list(self, node: Node, at: int, negated: bool) -> Node:
        if not isinstance(node, Property):
            self._fail("IN needs the name of a property on its left", at)
        self._expect("(")
        texts = [self._text_literal()]
        while self._accept(","):
            texts.append(self._text_literal())
        self._expect(")", "a comma or )")
        return InList(node, tuple(texts), negated, self._deeper(node))

    def _unary(self) -> Node:
        at = self._at
        if self._kind not in ("+", "-", "NOT", "("):
            return self._primary()
        self._depth += 1
        if self._depth > DEPTH_MAX:
            self._too_deep()
        if self._accept("("):
            node = self._or()
            self._expect(")", "an operator or )")
        elif self._accept("+"):
            node = self._unary()
        elif self._accept("-"):
            node = self._unary()
            node = Negative(node, self._deeper(node))
        else:
            self._expect("NOT")
            at = self._at
            node = self._condition(self._unary(), at)
            node = Not(node, self._deeper(node))
        self._depth -= 1
        return node

    def _primary(self) -> Node:
        image, kind, at = self._text[self._at : self._end], self._kind, self._at
        if kind == "text":
            return Literal(self._text_literal())
        if kind not in ("whole", "float", "name", "TRUE", "FALSE", "NULL"):
            self._fail("expected a name, a number, a string, TRUE, FALSE, NULL, NOT or (")
        self._advance()
        if kind == "whole":
            return Literal(self._whole(image, at))
        if kind == "float":
            return Literal(self._float(image, at))
        if kind == "name":
            return Property(image)
        return Literal(None if kind == "NULL" else kind == "TRUE")

    def _whole(self, image: str, at: int) -> Value:
        digits = image.rstrip("lL")
        number = parse_long(digits)
        if number is None:
            self._fail(f"the number is above {LONG_MAX}", at)
        return number if number <= INT_MAX else Long(number)

    def _float(self, image: str, at: int) -> float:
        number = float(image)
        if number == float("inf"):
            self._fail("the number is above 1.7976931348623157E308", at)
        if number == 0:
            self._fail("RocketMQ does not accept this number: write 0 for zero", at)
        return number

    # --- types

    def _condition(self, node: Node, at: int) -> Node:
        if isinstance(node, Property):
            return PropertyTest(node, 1)
        if not is_condition(node):
            self._fail("this is not a condition", at)
        return node

    def _ordered(self, sign: str, left: Node, left_at: int, right: Node, right_at: int) -> Node:
        for node, at in ((left, left_at), (right, right_at)):
            if is_condition(node) or (isinstance(node, Literal) and type(node.value) is str):
                self._fail("only numbers and properties can be compared by < and >", at)
        return Order(sign, left, right, self._deeper(left, right))

    def _check_equal(self, left: Node, left_at: int, right: Node, right_at: int) -> None:
        for node, at in ((left, left_at), (right, right_at)):
            if isinstance(node, Literal) and node.value is None:
                self._fail("NULL can't be compared: write IS NULL", at)
        literals = isinstance(left, Literal) and isinstance(right, Literal)
        if literals and is_condition(left) and not is_condition(right):
            self._fail("this is not a condition", right_at)

    def _deeper(self, *parts: Node) -> int:
        depth = 1 + max(part.depth for part in parts)
        if depth > DEPTH_MAX:
            self._too_deep()
        return depth

    def _too_deep(self) -> NoReturn:
        self._fail(f"the nesting is deeper than {DEPTH_MAX} levels", self._at)
