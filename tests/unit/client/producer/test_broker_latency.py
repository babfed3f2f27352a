"""Which brokers a producer avoids, for how long, and which it uses instead."""

import asyncio
from collections.abc import Awaitable
from typing import Any, cast

import pytest

from penstock.client.client_session import Session
from penstock.client.producer.broker_latency import BrokerFaults, avoid_period_ms
from penstock.errors import PeerUnreachable
from penstock.testing.virtual_clock import VirtualClock
from penstock.wire.bodies.client_bodies import MessageQueue


def queues(*brokers: str, each: int = 2) -> list[MessageQueue]:
    return [MessageQueue("T", name, number) for name in brokers for number in range(each)]


@pytest.mark.parametrize(
    ("latency_ms", "period_ms"),
    [
        (0, 0), (549, 0), (550, 2_000), (1_799, 2_000), (1_800, 5_000), (3_000, 6_000),
        (5_000, 10_000), (14_999, 10_000), (15_000, 30_000), (99_999, 30_000),
    ],
)  # fmt: skip
def test_avoid_periods_are_those_of_rocketmqs_table(latency_ms: int, period_ms: int) -> None:
    assert avoid_period_ms(latency_ms) == period_ms


def test_all_queues_are_used_in_turn_without_faults() -> None:
    faults = BrokerFaults(True, None, VirtualClock())
    faults.report("a", 40)
    all_queues = queues("a", "b")
    assert [faults.choose(all_queues, start) for start in range(6)] == [0, 1, 2, 3, 0, 1]


def test_slow_broker_is_avoided_for_its_period() -> None:
    clock = VirtualClock()
    faults = BrokerFaults(True, None, clock)
    faults.report("a", 600)
    assert not faults.available("a")
    assert {faults.choose(queues("a", "b"), start) for start in range(8)} == {2, 3}
    clock.advance(1_999)
    assert not faults.available("a")
    clock.advance(1)
    assert faults.available("a")
    assert faults.choose(queues("a", "b"), 0) == 0


def test_quick_response_does_not_shorten_the_period() -> None:
    faults = BrokerFaults(True, None, VirtualClock())
    faults.report("a", 20_000)
    faults.report("a", 10)
    assert not faults.available("a")


def test_failure_counts_as_ten_seconds_or_for_avoid_ms() -> None:
    clock = VirtualClock()
    table, fixed = BrokerFaults(True, None, clock), BrokerFaults(True, 300_000, clock)
    for faults in (table, fixed):
        faults.report("a", 5, failed=True)
    clock.advance(10_000)
    assert table.available("a")
    assert not fixed.available("a")
    clock.advance(289_999)
    assert not fixed.available("a")
    clock.advance(1)
    assert fixed.available("a")


def test_slow_broker_is_avoided_by_the_table_despite_avoid_ms() -> None:
    clock = VirtualClock()
    faults = BrokerFaults(True, 300_000, clock)
    faults.report("a", 600)
    clock.advance(2_000)
    assert faults.available("a")


def test_retry_goes_to_another_broker_without_avoid_faulty() -> None:
    for on in (True, False):
        faults = BrokerFaults(on, None, VirtualClock())
        assert faults.choose(queues("a", "b"), 1, last_broker="a") == 2
        assert faults.choose(queues("a"), 1, last_broker="a") == 1


def test_no_broker_is_avoided_without_avoid_faulty() -> None:
    faults = BrokerFaults(False, 300_000, VirtualClock())
    faults.report("a", 60_000, failed=True, unreachable=True)
    assert faults.available("a")
    assert faults.choose(queues("a", "b"), 0) == 0


def test_the_faster_half_is_used_if_all_brokers_are_avoided() -> None:
    faults = BrokerFaults(True, None, VirtualClock())
    for name, latency_ms in (("a", 900), ("b", 600), ("c", 2_000), ("d", 700)):
        faults.report(name, latency_ms)
    all_queues = queues("a", "b", "c", "d", each=1)
    assert {faults.choose(all_queues, start) for start in range(4)} == {1, 3}


def test_slow_broker_is_preferred_to_an_unreachable_one() -> None:
    faults = BrokerFaults(True, None, VirtualClock())
    faults.report("a", 30_000)
    faults.report("b", 1, unreachable=True)
    assert not faults.reachable("b")
    assert {faults.choose(queues("a", "b"), start) for start in range(4)} == {0, 1}
    assert faults.choose(queues("a", "b"), 2, last_broker="a") in (0, 1)


def test_unreachable_brokers_are_used_in_turn_if_there_is_no_other() -> None:
    faults = BrokerFaults(True, None, VirtualClock())
    for name in ("a", "b"):
        faults.report(name, 1, unreachable=True)
    assert {faults.choose(queues("a", "b"), start) for start in range(4)} == {0, 1, 2, 3}
    assert faults.choose(queues("a", "b"), 0, last_broker="a") == 2


class _Prober:
    """As much of a session as probing needs; `up` is whether the broker answers."""

    def __init__(self) -> None:
        self.up = False
        self.calls = 0
        self.address: str | None = "127.0.0.1:1"
        self.refreshed = 0
        self.tasks: list[asyncio.Future[object]] = []

    def spawn(self, work: Awaitable[object]) -> None:
        self.tasks.append(asyncio.ensure_future(work))

    async def refresh(self) -> None:
        self.refreshed += 1

    def address_of(self, name: str) -> str | None:
        return self.address

    def peer(self, address: str) -> "_Prober":
        return self

    async def call(self, code: int, ext: Any, *, timeout_ms: int) -> None:
        self.calls += 1
        if not self.up:
            raise PeerUnreachable("refused")


def _probed(avoid_ms: int | None) -> tuple[BrokerFaults, _Prober, VirtualClock]:
    clock, prober = VirtualClock(), _Prober()
    faults = BrokerFaults(True, avoid_ms, clock, cast(Session, prober))
    faults.report("a", 1, unreachable=True)
    faults.report("a", 1, unreachable=True)
    return faults, prober, clock


def test_unreachable_broker_is_used_again_after_a_successful_probe() -> None:
    async def run() -> None:
        faults, prober, clock = _probed(None)
        await clock.elapse(30_000)
        assert prober.calls == 13  # after 200, 600, 1,400 and 3,000 ms, then every 3 s
        assert not faults.available("a")  # no message is sent to it meanwhile
        prober.up = True
        await clock.elapse(3_000)
        assert faults.available("a")
        assert faults.reachable("a")
        assert prober.refreshed == prober.calls + 1  # before each probe, and after the last
        await clock.elapse(3_000)
        assert prober.refreshed == prober.calls + 2
        assert len(prober.tasks) == 2
        assert all(task.done() for task in prober.tasks)

    asyncio.run(run())


def test_probe_does_not_end_a_fixed_period() -> None:
    async def run() -> None:
        faults, prober, clock = _probed(300_000)
        prober.up = True
        await clock.elapse(3_000)
        assert faults.reachable("a")
        assert not faults.available("a")
        await clock.elapse(297_000)
        assert faults.available("a")

    asyncio.run(run())


def test_broker_without_a_route_is_forgotten() -> None:
    async def run() -> None:
        faults, prober, clock = _probed(None)
        prober.address = None
        await clock.elapse(3_000)
        assert prober.calls == 0
        assert prober.tasks[0].done()
        assert faults.available("a")

    asyncio.run(run())
