"""The limit of failed logins."""

from penstock.console.security.login_limit import (
    DELAY_MS_MAX,
    FORGET_MS,
    FREE_FAILURES,
    FREE_FAILURES_OF_ADDRESS,
    LoginLimit,
)

HOME, ELSEWHERE = "10.0.0.1", "203.0.113.7"


def test_the_delay_doubles_after_five_failures() -> None:
    limit = LoginLimit()
    waits = []
    for _ in range(8):
        waits.append(limit.wait_ms(HOME, "ann", 0))
        limit.failed(HOME, "ann", 0)
    assert waits == [0, 0, 0, 0, 0, 2_000, 4_000, 8_000]


def test_the_delay_has_a_maximum_and_passes() -> None:
    limit = LoginLimit()
    for _ in range(60):
        limit.failed(HOME, "ann", 0)
    assert limit.wait_ms(HOME, "ann", 0) == DELAY_MS_MAX
    assert limit.wait_ms(HOME, "ann", DELAY_MS_MAX) == 0
    assert limit.wait_ms(HOME, "ann", FORGET_MS + 1) == 0


def test_a_stranger_elsewhere_locks_nobody_out() -> None:
    limit = LoginLimit()
    for _ in range(60):
        limit.failed(ELSEWHERE, "ann", 0)
    assert limit.wait_ms(ELSEWHERE, "ann", 0) > 0
    assert limit.wait_ms(HOME, "ann", 0) == 0


def test_an_address_may_not_try_many_names() -> None:
    limit = LoginLimit()
    for number in range(FREE_FAILURES_OF_ADDRESS):
        assert limit.wait_ms(HOME, f"user-{number}", 0) == 0
        limit.failed(HOME, f"user-{number}", 0)
    assert limit.wait_ms(HOME, "somebody else", 0) > 0
    assert limit.wait_ms(ELSEWHERE, "somebody else", 0) == 0


def test_a_success_forgets_the_failures_of_the_user_only() -> None:
    limit = LoginLimit()
    for number in range(FREE_FAILURES_OF_ADDRESS - FREE_FAILURES):
        limit.failed(HOME, f"user-{number}", 0)
    for _ in range(FREE_FAILURES):
        limit.failed(HOME, "ann", 0)
    assert limit.wait_ms(HOME, "bob", 0) > 0
    limit.succeeded(HOME, "ann")
    assert limit.wait_ms(HOME, "ann", 0) == limit.wait_ms(HOME, "bob", 0) == 0
    for _ in range(FREE_FAILURES):
        limit.failed(HOME, "ann", 0)
    assert limit.wait_ms(HOME, "bob", 0) > 0


def test_the_addresses_of_an_ipv6_network_count_as_one() -> None:
    limit = LoginLimit()
    for number in range(FREE_FAILURES):
        limit.failed(f"2001:db8::{number:x}", "ann", 0)
    assert limit.wait_ms("2001:db8::ffff", "ann", 0) > 0
    assert limit.wait_ms("2001:db8:0:1::1", "ann", 0) == 0


def test_an_ipv4_address_in_ipv6_notation_is_the_same_address() -> None:
    limit = LoginLimit()
    for _ in range(FREE_FAILURES):
        limit.failed(f"::ffff:{HOME}", "ann", 0)
    assert limit.wait_ms(HOME, "ann", 0) > 0
    assert limit.wait_ms(f"::ffff:{ELSEWHERE}", "ann", 0) == 0
