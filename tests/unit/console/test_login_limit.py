"""The limit of failed logins."""

from penstock.console.security.login_limit import DELAY_MS_MAX, FORGET_MS, LoginLimit

KEYS = ("address 10.0.0.1", "user ann")


def test_the_delay_doubles_after_five_failures() -> None:
    limit = LoginLimit()
    waits = []
    for _ in range(8):
        waits.append(limit.wait_ms(KEYS, 0))
        limit.failed(KEYS, 0)
    assert waits == [0, 0, 0, 0, 0, 2_000, 4_000, 8_000]


def test_the_delay_has_a_maximum_and_passes() -> None:
    limit = LoginLimit()
    for _ in range(60):
        limit.failed(KEYS, 0)
    assert limit.wait_ms(KEYS, 0) == DELAY_MS_MAX
    assert limit.wait_ms(KEYS, DELAY_MS_MAX) == 0
    assert limit.wait_ms(KEYS, FORGET_MS + 1) == 0


def test_either_key_is_enough() -> None:
    limit = LoginLimit()
    for number in range(6):
        limit.failed((f"address 10.0.0.{number}", "user ann"), 0)
    assert limit.wait_ms(("address 10.9.9.9", "user ann"), 0) > 0
    assert limit.wait_ms(("address 10.0.0.1", "user bob"), 0) == 0


def test_a_success_forgets_the_failures() -> None:
    limit = LoginLimit()
    for _ in range(6):
        limit.failed(KEYS, 0)
    limit.succeeded(KEYS)
    assert limit.wait_ms(KEYS, 0) == 0
