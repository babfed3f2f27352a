"""Which filters are understood, and what is said about the others."""

import pytest

from penstock.broker.filter.filter_parser import CHARS_MAX, DEPTH_MAX, parse
from penstock.broker.filter.filters import COMPILED_MAX, Filter, Filters
from penstock.errors import BadFilter, Refused
from tests.filter_cases import ACCEPTED, REFUSED, TAILS, ZEROS


@pytest.mark.parametrize("expression", ACCEPTED + ZEROS)
def test_is_understood(expression: str) -> None:
    Filter(expression)


@pytest.mark.parametrize("expression", REFUSED + TAILS)
def test_is_refused_with_a_place(expression: str) -> None:
    with pytest.raises(BadFilter, match=r"column \d+: "):
        Filter(expression)


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("a > 1 AND b >", "column 14: expected a name, a number, a text"),
        ("a LIKE 'x'", "column 3: expected AND, OR or the end, found 'LIKE'"),
        ("a + 1 > 2", "column 3: expected AND, OR or the end, found '+'"),
        ("a > 'x'", "column 5: only numbers and properties"),
        ("a in (1)", "column 7: expected a text such as 'x', found '1'"),
        ("a = 'x", "column 5: a text has no closing quote"),
        ("a = /* x", "column 5: a comment has no end"),
        ("a = NULL", "column 5: nothing equals NULL: write IS NULL"),
        ("a between 3 and 2", "column 11: nothing is BETWEEN"),
        ("a > 1\nAND b IS 3", "line 2, column 10: expected NULL or NOT NULL, found '3'"),
        ("a NOT b", "column 7: expected IN, BETWEEN"),
        ("NOT a > 1", "column 1: only numbers"),
        ("a > 1 AND 5", "column 11: this is neither true nor false"),
        ("a > 99999999999999999999", "column 5: the number is above 9223372036854775807"),
        ("a > 0.0", "column 5: RocketMQ has no such number: write 0"),
        ("a # 1", "column 3: this character means nothing"),
    ],
)
def test_a_refusal_says_where_and_why(expression: str, message: str) -> None:
    with pytest.raises(BadFilter) as caught:
        parse(expression)
    assert f"the filter is wrong at {message}" in caught.value.message


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
        with pytest.raises(BadFilter, match="levels are nested"):
            parse(deep)


def test_long_rows_are_not_deep() -> None:
    row = Filter(" OR ".join(f"a = {number}" for number in range(2000)))
    assert row.matches(b"a\x011999\x02")
    assert not row.matches(b"a\x012000\x02")


def test_filters_are_compiled_once_and_forgotten_when_many() -> None:
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


def test_a_bad_filter_is_not_kept() -> None:
    filters = Filters()
    with pytest.raises(BadFilter):
        filters.get("a >")
    assert len(filters) == 0


def test_kinds() -> None:
    Filters.check_kind("SQL92", True)
    with pytest.raises(BadFilter, match="type sql92"):
        Filters.check_kind("sql92", True)
    with pytest.raises(Refused, match="does not support consumer to filter message by SQL92"):
        Filters.check_kind("SQL92", False)
