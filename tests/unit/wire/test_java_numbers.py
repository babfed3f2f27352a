"""Integers in texts are read as Java reads them."""

import pytest

from penstock.wire.java_numbers import (
    INT_MAX,
    INT_MIN,
    LONG_MAX,
    LONG_MIN,
    parse_int,
    parse_long,
    parse_nonnegative,
)


@pytest.mark.parametrize("parse", [parse_int, parse_long])
@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("7", 7),
        ("+7", 7),
        ("-7", -7),
        ("-0", 0),
        ("007", 7),
        ("0" * 5_000 + "7", 7),
        ("-" + "0" * 5_000, 0),
        ("\u0661\u0662", 12),  # Arabic-Indic digits
        ("-\uff11\uff12", -12),  # full-width digits
        ("999999999", 999_999_999),
        ("+999999999", 999_999_999),
    ],
)
def test_numbers_that_fit_both_types(parse, text: str, number: int) -> None:
    assert parse(text) == number


@pytest.mark.parametrize("parse", [parse_int, parse_long])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "+",
        "-",
        "+-1",
        "--1",
        " 1",
        "1 ",
        "1\n",
        "1_000",
        "1,000",
        "1.0",
        "1e3",
        "0x10",
        "1L",
        "ten",
        "\u00b2",  # superscript two is a digit, but not a decimal one
        "\u0967x",
        "\U0001d7cf",  # a mathematical digit outside the Basic Multilingual Plane
        "9" * 20,
        "9" * 100_000,
        "-" + "9" * 100_000,
    ],
)
def test_texts_that_hold_no_number(parse, text: str) -> None:
    assert parse(text) is None


@pytest.mark.parametrize(
    ("parse", "least", "most"), [(parse_int, INT_MIN, INT_MAX), (parse_long, LONG_MIN, LONG_MAX)]
)
def test_the_range_is_that_of_the_type(parse, least: int, most: int) -> None:
    assert parse(str(least)) == least
    assert parse(str(most)) == most
    assert parse(f"+{most}") == most
    assert parse(f"000{most}") == most
    assert parse(str(least - 1)) is None
    assert parse(str(most + 1)) is None


def test_numbers_of_at_least_0() -> None:
    assert parse_nonnegative(str(LONG_MAX)) == LONG_MAX
    assert parse_nonnegative("-0") == 0
    assert parse_nonnegative("-1") is None
    assert parse_nonnegative("one") is None
