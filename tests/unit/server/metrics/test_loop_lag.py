"""The lag of the event loop is measured by a late timer."""

import asyncio
import time

import pytest

from penstock.metrics import HistogramFamily, Registry
from penstock.server.metrics import loop_lag
from penstock.server.metrics.loop_lag import LoopLag

BLOCKED_S = 0.03


def counts(registry: Registry) -> list[int]:
    (family,) = registry.families
    assert isinstance(family, HistogramFamily)
    ((_, histogram),) = family.samples()
    return histogram.counts


def test_a_blocked_loop_is_in_the_histogram(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_lag, "EVERY_S", 0.005)

    async def main() -> Registry:
        registry = Registry()
        lag = LoopLag(registry)
        lag.start()
        await asyncio.sleep(0)
        time.sleep(BLOCKED_S)
        while not sum(counts(registry)):
            await asyncio.sleep(0.001)
        lag.stop()
        before = sum(counts(registry))
        await asyncio.sleep(0.02)
        assert sum(counts(registry)) == before
        return registry

    found = counts(asyncio.run(main()))
    longer = loop_lag.BOUNDS_S.index(0.02) + 1
    assert sum(found[longer:]) >= 1


def test_stopping_twice_or_before_the_start_is_allowed() -> None:
    lag = LoopLag(Registry())
    lag.stop()
    lag.stop()
