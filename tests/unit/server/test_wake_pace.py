"""When arrivals wake suspended pulls."""

from collections.abc import Callable

import pytest

from penstock.server.wake_pace import GATHER_FROM, GATHER_MS, GATHER_UNTIL, PERIOD_MS, WakePace


@pytest.fixture
def at_rate() -> Callable[[float], int]:
    """Delivers messages at a rate per millisecond for two periods; the delay at their end."""
    pace, now_ms, delivered = WakePace(), 1_000_000, 0.0
    pace.delay_ms(0, now_ms)

    def run(rate: float) -> int:
        nonlocal now_ms, delivered
        delay_ms = 0
        for _ in range(2 * PERIOD_MS):
            now_ms += 1
            delivered += rate
            delay_ms = pace.delay_ms(int(delivered), now_ms)
        return delay_ms

    return run


def test_at_low_rates_there_is_no_delay(at_rate: Callable[[float], int]) -> None:
    assert [at_rate(rate) for rate in (0, 1, GATHER_FROM - 0.5)] == [0, 0, 0]


def test_at_high_rates_arrivals_are_gathered(at_rate: Callable[[float], int]) -> None:
    assert [at_rate(rate) for rate in (GATHER_FROM, 100)] == [GATHER_MS] * 2


def test_gathering_ends_well_below_the_rate_at_which_it_began(
    at_rate: Callable[[float], int],
) -> None:
    rates = (GATHER_FROM, GATHER_UNTIL, GATHER_UNTIL - 0.5, GATHER_UNTIL)
    assert [at_rate(rate) for rate in rates] == [GATHER_MS, GATHER_MS, 0, 0]


def test_the_first_message_after_a_pause_is_not_delayed() -> None:
    pace = WakePace()
    assert pace.delay_ms(0, 0) == 0
    assert pace.delay_ms(1_000_000, 100) == GATHER_MS
    assert pace.delay_ms(1_000_000, 1_000_000) == 0
