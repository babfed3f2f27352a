"""Parsing of filters, and the errors for invalid ones."""

import pytest

from penstock.broker.filter.filter_parser import CHARS_MAX, DEPTH_MAX, parse
from penstock.broker.filter.filters import COMPILED_MAX, Filter, Filters
from penstock.errors import BadFilter, Refused
from tests.filter_cases import ACCEPTED, REFUSED, TAILS, ZEROS


@pytest.mark.parametrize("expression", ACCEPTED + ZEROS)
def test_valid_filters_are_parsed(expression: str) -> None:
    Filter(expression)


@pytest.mark.parametrize("expression", REFUSED + TAILS)
def test_invalid_filters_are_refused_with_a_position(expression: str) -> None:
    with pytest.raises(BadFilter, match=r"column \d+: "):
        Filter(expression)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("a > 1 AND b >", "column 14: expected a name, a number, a string"),
        ("a LIKE 'x'", "column 3: expected AND, OR or the end, found 'LIKE'"),
        ("a + 1 > 2", "column 3: expected AND, OR or the end, found '+'"),
        ("a > 'x'", "column 5: only numbers and properties"),
        ("a in (1)", "column 7: expected a string such as 'x', found '1'"),
        ("a = 'x", "column 5: a string has no closing quote"),
        ("a = /* x", "column 5: a comment is not closed"),
        ("a = NULL", "column 5: NULL can't be compared: write IS NULL"),
        ("a between 3 and 2", "column 11: the lower bound of BETWEEN"),
        ("a > 1\nAND b IS 3", "line 2, column 10: expected NULL or NOT NULL, found '3'"),
        ("a NOT b", "column 7: expected IN, BETWEEN"),
        ("NOT a > 1", "column 1: only numbers"),
        ("a > 1 AND 5", "column 11: this is not a condition"),
        ("a > 99999999999999999999", "column 5: the number is above 9223372036854775807"),
        ("a > 0.0", "column 5: RocketMQ does not accept this number: write 0"),
        ("a # 1", "column 3: this character is not allowed"),
    ],
)
def test_an_error_has_position_and_reason(expression: str, message: str) -> None:
    with pytest.raises(BadFilter) as caught:
        parse(expression)
    assert f"the filter is not valid at {message}" in caught.value.message


def test_length_and_nesting_have_limits() -> None:
    with pytest.raises(BadFilter, match=f"the limit is {CHARS_MAX}"):
        parse("a" * (CHARS_MAX + 1))
    parse("(" * DEPTH_MAX + "a" + ")" * DEPTH_MAX)
    for deep in (
        "(" * (DEPTH_MAX + 1) + "a" + ")" * (DEPTH_MAX + 1),
        "NOT " * (DEPTH_MAX + 1) + "a",
        "a = " + "-" * (DEPTH_MAX + 1) + "1",
        "a = 1" + " = 1" * DEPTH_MAX,
        "a" + " CONTAINS 'x'" * (DEPTH_MAX + 1),
        "(" * 5000,
    ):
        with pytest.raises(BadFilter, match="nesting is deeper"):
            parse(deep)


def test_long_chains_are_not_deep() -> None:
    row = Filter(" OR ".join(f"a = {number}" for number in range(2000)))
    assert row.matches(b"a\x011999\x02")
    assert not row.matches(b"a\x012000\x02")


@pytest.mark.slow
def test_compiled_filters_are_cached_up_to_a_limit() -> None:
    filters = Filters()
    first = filters.get("a > 0")
    assert filters.get("a > 0") is first
    for number in range(COMPILED_MAX - 1):
        filters.get(f"b > {number}")
    assert filters.get("a > 0") is first
    filters.get("c > 0")
    assert len(filters) == COMPILED_MAX
    assert filters.get("a > 0") is first
    long = f"{{}} = '{'x' * (CHARS_MAX - 100)}'"
    for number in range(200):
        filters.get(long.format(f"n{number}"))
    assert len(filters) < 200


def test_an_invalid_filter_is_not_cached() -> None:
    filters = Filters()
    with pytest.raises(BadFilter):
        filters.get("a >")
    assert len(filters) == 0


def test_only_known_filter_types_are_accepted() -> None:
    Filters.check_kind("SQL92", True)
    with pytest.raises(BadFilter, match="type sql92"):
        Filters.check_kind("sql92", True)
    with pytest.raises(Refused, match="does not support consumer to filter message by SQL92"):
        Filters.check_kind("SQL92", False)
