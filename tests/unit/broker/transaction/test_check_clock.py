"""Check-back while and after the clock is set."""

from pathlib import Path

import pytest

from tests.unit.broker.transaction.transaction_kit import (
    INTERVAL_MS,
    TIMEOUT_MS,
    TransactionFixture,
    transaction_fixture,
)

HOUR_MS = 3_600_000


@pytest.mark.parametrize("hours", [-3, 3])
def test_a_clock_that_is_set_does_not_change_when_it_is_checked(tmp_path: Path, hours: int) -> None:
    step_ms = hours * HOUR_MS
    env = TransactionFixture(tmp_path)
    env.connect()
    env.half(b"before")
    assert env.advance(TIMEOUT_MS - 2000) == []
    env.now_ms += step_ms
    env.broker.clock_stepped(step_ms)
    env.half(b"after")
    assert env.advance(1000) == []
    assert [check.message.body for check in env.advance(2000)] == [b"before"]
    assert [check.message.body for check in env.advance(TIMEOUT_MS)] == [b"after"]
    checks = env.advance(INTERVAL_MS)
    assert {check.message.body for check in checks} == {b"before", b"after"}
    env.close()


def test_after_the_clock_was_ahead_a_restart_does_not_delay_checks(tmp_path: Path) -> None:
    ahead_ms = 3 * HOUR_MS
    with transaction_fixture(tmp_path / "store") as env:
        env.send(body=b"first")
        env.now_ms += ahead_ms
        env.half(b"before")
        env.advance(100)
        now_ms = env.now_ms - ahead_ms
    with transaction_fixture(tmp_path / "store", now_ms=now_ms) as env:
        env.connect()
        env.half(b"after")
        assert env.advance(TIMEOUT_MS - 1) == []
        checks = env.advance(1001)
        assert {check.message.body for check in checks} == {b"before", b"after"}
