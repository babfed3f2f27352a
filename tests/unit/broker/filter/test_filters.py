"""Compiled filters against a simple evaluator, and RocketMQ's special rules."""

import math
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.broker.filter.filters import Filter, record_properties
from penstock.wire.message import encode_properties
from tests.filter_cases import VALUES

# --- a plain evaluator, over trees of tuples ----------------------------------------------------

Tree = tuple[Any, ...]
Properties = dict[str, str]

INT, LONG, DOUBLE, TEXT, BOOL = "int", "long", "double", "text", "bool"
RANGES = {INT: 1 << 31, LONG: 1 << 63}


class Stop(Exception):  # noqa: N818
    """The evaluation ends: no match."""


def kind_of(tree: Tree) -> str:
    return str(tree[1])


def evaluate(tree: Tree, properties: Properties) -> tuple[str, Any] | None:
    """The kind and value of a tree, or None for nothing."""
    match tree:
        case ("literal", kind, value):
            return kind, value
        case ("property", name):
            value = properties.get(name)
            return (TEXT, value) if value else None
        case ("minus", inner):
            got = evaluate(inner, properties)
            return (got[0], -got[1]) if got and got[0] in (INT, LONG, DOUBLE) else None
        case _:
            truth = decide(tree, properties)
            return None if truth is None else (BOOL, truth)


def decide(tree: Tree, properties: Properties) -> bool | None:
    match tree:
        case ("not", inner):
            truth = decide(inner, properties)
            return None if truth is None else not truth
        case ("and", left, right):
            first = decide(left, properties)
            if first is False:
                return False
            second = decide(right, properties)
            return False if second is False else None if None in (first, second) else True
        case ("or", left, right):
            first = decide(left, properties)
            if first is True:
                return True
            second = decide(right, properties)
            return True if second is True else None if None in (first, second) else False
        case ("null", inner):
            return evaluate(inner, properties) is None
        case ("=", left, right):
            return same(evaluate(left, properties), evaluate(right, properties))
        case (("<" | "<=" | ">" | ">=") as sign, left, right):
            ordered = ranked(evaluate(left, properties), evaluate(right, properties))
            if ordered is None:
                return None
            return {
                "<": ordered < 0,
                "<=": ordered <= 0,
                ">": ordered > 0,
                ">=": ordered >= 0,
            }[sign]
        case ("in", ("property", name), texts, negated):
            text = properties.get(name)
            return None if not text else (text not in texts) if negated else (text in texts)
        case ("piece", word, inner, piece, negated):
            got = evaluate(inner, properties)
            if got is None or got[0] != TEXT or not piece:
                return False
            text = got[1]
            has = {
                "CONTAINS": piece in text,
                "STARTSWITH": text[: len(piece)] == piece,
                "ENDSWITH": text[-len(piece) :] == piece,
            }[word]
            return not has if negated else has
    raise AssertionError(tree)


def same(left: Any, right: Any) -> bool | None:
    if left is None:
        return True if right is None else None
    if right is None:
        return False
    if left == right:
        return True
    return rank(left, right) == 0


def ranked(left: Any, right: Any) -> int | None:
    if left is None or right is None:
        return None
    if left[0] == right[0] == TEXT:
        left, right = (DOUBLE, convert(left[1], DOUBLE)), (DOUBLE, convert(right[1], DOUBLE))
    return rank(left, right)


def rank(left: Any, right: Any) -> int:
    (left_kind, left_value), (right_kind, right_value) = left, right
    if left_kind == right_kind == TEXT:
        return 0 if left_value == right_value else 1
    if left_kind == BOOL and right_kind == TEXT:
        raise Stop
    if left_kind == TEXT:
        left_kind, left_value = right_kind, convert(left_value, right_kind)
    if right_kind == TEXT:
        right_kind, right_value = left_kind, convert(right_value, left_kind)
    if (left_kind == BOOL) != (right_kind == BOOL):
        return -1
    if DOUBLE in (left_kind, right_kind):
        left_value, right_value = rank_key(float(left_value)), rank_key(float(right_value))
    return (left_value > right_value) - (left_value < right_value)


def rank_key(number: float) -> tuple[bool, float, bool]:
    if math.isnan(number):
        return True, 0.0, True
    return False, number, math.copysign(1, number) > 0


def convert(text: str, kind: str) -> Any:
    if kind == BOOL:
        return text.casefold() == "true"
    if kind == DOUBLE:
        text = text.strip()
        known = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
        if text in known:
            return known[text]
        if text[-1:].lower() in ("f", "d"):
            text = text[:-1]
        if not text or set(text) - set("0123456789+-.eE"):
            raise Stop
        try:
            return float(Decimal(text))
        except ArithmeticError:
            raise Stop from None
    digits = text[1:] if text[:1] in ("+", "-") else text
    if not digits or not all(one.isdecimal() for one in digits):
        raise Stop
    number = int(Decimal(text))
    if not -RANGES[kind] <= number < RANGES[kind]:
        raise Stop
    return number


# --- filters of all shapes ----------------------------------------------------------------------

NAMES = ("a", "b", "c", "_d$1", "TAGS", "nothing", "e", "f")
TEXTS = ("x", "", "5", "it's", "true", "日本", "xx", "-5", "2147483648")
WHOLES = (0, 1, 5, 10, 2147483647, 2147483648, 9223372036854775807)
DOUBLES = (0.5, 5.0, 5.5, 1e300, 4.9e-324)

properties_named = st.sampled_from(NAMES).map(lambda name: ("property", name))
texts = st.sampled_from(TEXTS).map(lambda text: ("literal", TEXT, text))
wholes = st.sampled_from(WHOLES).map(
    lambda whole: ("literal", INT if whole < 1 << 31 else LONG, whole)
)
doubles = st.sampled_from(DOUBLES).map(lambda double: ("literal", DOUBLE, double))
truths = st.booleans().map(lambda truth: ("literal", BOOL, truth))
numbers = wholes | doubles
signed = st.recursive(
    numbers | properties_named, lambda inner: inner.map(lambda tree: ("minus", tree)), max_leaves=2
)


def both(sign: str, left: st.SearchStrategy[Tree], right: st.SearchStrategy[Tree]) -> Any:
    return st.tuples(st.just(sign), left, right)


def conditions() -> st.SearchStrategy[Tree]:
    pieces = st.sampled_from(("CONTAINS", "STARTSWITH", "ENDSWITH"))
    leaves = st.one_of(
        both("=", properties_named, texts | signed | truths),
        both("=", texts | signed, properties_named | numbers),
        both("=", truths, properties_named | truths),
        *(both(sign, signed, signed) for sign in ("<", "<=", ">", ">=")),
        st.tuples(st.just("null"), signed | texts),
        st.tuples(
            st.just("in"),
            properties_named,
            st.lists(st.sampled_from(TEXTS), min_size=1, max_size=6),
            st.booleans(),
        ),
        st.tuples(
            st.just("piece"),
            pieces,
            properties_named | texts | signed,
            st.sampled_from(TEXTS),
            st.booleans(),
        ),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            both("and", inner, inner),
            both("or", inner, inner),
            both("=", inner, inner | properties_named | wholes),
            both("=", properties_named, inner),
            st.tuples(st.just("not"), inner),
            st.tuples(st.just("null"), inner),
        ),
        max_leaves=8,
    )


def write(tree: Tree) -> str:
    """A tree as the text of a filter."""
    match tree:
        case ("literal", kind, value):
            if kind == TEXT:
                return "'" + value.replace("'", "''") + "'"
            return str(value).upper() if kind == BOOL else repr(value)
        case ("property", name):
            return str(name)
        case ("minus", inner):
            return f"- {write(inner)}"
        case ("not", inner):
            return f"NOT ({write(inner)})"
        case ("null", inner):
            return f"({write(inner)}) IS NULL"
        case ("in", named, texts, negated):
            row = ", ".join(write(("literal", TEXT, text)) for text in texts)
            return f"{write(named)} {'not in' if negated else 'IN'} ({row})"
        case ("piece", word, inner, piece, negated):
            text = write(("literal", TEXT, piece))
            return f"({write(inner)}) {'NOT ' * negated}{word} {text}"
        case (sign, left, right):
            return f"({write(left)}) {sign} ({write(right)})"
    raise AssertionError(tree)


values = st.sampled_from(
    [value for value in VALUES if value and "0x" not in value and max(value) < "\U00010000"]
)


@given(conditions(), st.lists(st.dictionaries(st.sampled_from(NAMES), values), max_size=8))
def test_compiled_filters_agree_with_a_plain_evaluator(
    tree: Tree, messages: list[Properties]
) -> None:
    compiled = Filter(write(tree))
    for properties in messages:
        try:
            expected = decide(tree, properties) is True
        except Stop:
            expected = False
        assert compiled.matches(encode_properties(properties)) == expected, write(tree)


# --- by hand ------------------------------------------------------------------------------------


def matches(expression: str, **properties: str) -> bool:
    return Filter(expression).matches(encode_properties(properties))


@pytest.mark.parametrize(
    ("expression", "properties", "expected"),
    [
        ("a > 1", {}, False),
        ("NOT (a > 1)", {}, False),
        ("a > 1 OR b = 'x'", {"b": "x"}, True),
        ("a > 1 OR b = 'x'", {"a": "text", "b": "x"}, False),
        ("b = 'x' OR a > 1", {"a": "text", "b": "x"}, True),
        ("NOT (a CONTAINS 'x')", {}, True),
        ("a NOT CONTAINS 'x'", {}, False),
        ("a = b", {}, True),
        ("a <> 'x'", {}, False),
        ("a", {"a": "true"}, False),
        ("a = TRUE", {"a": "True"}, True),
        ("TRUE = a", {"a": "true"}, False),
        ("a < 5", {"a": "2147483648"}, False),
        ("a > 5", {"a": "2147483648"}, False),
        ("a > 5.0", {"a": "2147483648"}, True),
        ("a > 5", {"a": "5.5"}, False),
        ("a > 5.1", {"a": "NaN"}, True),
        ("5.1 < a", {"a": "NaN"}, True),
        ("a < b", {"a": "-0.0", "b": "0.0"}, True),
        ("a < 0.5", {"a": "-0x1p2000"}, True),
        ("a > 0.5", {"a": "0x1p2000d"}, True),
    ],
)
def test_rules_of_rocketmq(expression: str, properties: Properties, expected: bool) -> None:
    assert matches(expression, **properties) is expected


def test_the_last_value_that_is_not_empty_is_used() -> None:
    wanted = Filter("a = '2'")
    assert wanted.matches(b"a\x011\x02a\x012\x02")
    assert not wanted.matches(b"a\x012\x02a\x011\x02")
    assert wanted.matches(b"a\x012\x02a\x01\x02")
    assert wanted.matches(b"b\x01a\x02a\x012")
    assert not wanted.matches(b"xa\x012\x02")
    assert Filter("a IS NULL").matches(b"a\x01\x02")
    assert Filter("a IS NULL").matches(b"")


def test_many_properties_are_decoded_at_once() -> None:
    names = [f"n{number}" for number in range(20)]
    wanted = Filter(" AND ".join(f"{name} = '{name}'" for name in names))
    assert wanted.matches(encode_properties({name: name for name in names}))
    assert not wanted.matches(encode_properties({name: name for name in names[1:]}))


@pytest.mark.parametrize("born_v6", [False, True])
@pytest.mark.parametrize("store_v6", [False, True])
@pytest.mark.parametrize("long_topic", [False, True])
def test_properties_are_found_in_every_layout(
    born_v6: bool, store_v6: bool, long_topic: bool
) -> None:
    magic = -626843477 if long_topic else -626843481
    flags = 0x10 * born_v6 | 0x20 * store_v6
    hosts = 16 + 12 * born_v6 + 12 * store_v6
    topic = b"t" * (300 if long_topic else 9)
    record = bytearray(84 + hosts - 16)
    record[4:8] = magic.to_bytes(4, "big", signed=True)
    record[36:40] = flags.to_bytes(4, "big")
    record += (5).to_bytes(4, "big") + b"hello"
    record += len(topic).to_bytes(2 if long_topic else 1, "big") + topic
    record += (4).to_bytes(2, "big") + b"a\x015\x02"
    assert record_properties(b"--" + bytes(record) + b"--", 2) == b"a\x015\x02"
