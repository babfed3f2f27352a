"""The clocks: alarms fire in order, and the event loop runs between them."""

import asyncio

import pytest

from penstock.clock import LoopClock, finish_within, pause
from penstock.testing.virtual_clock import VirtualClock


def test_alarms_fire_by_time_then_by_creation() -> None:
    clock = VirtualClock(1000)
    fired: list[tuple[str, int]] = []
    for name, ms in (("c", 1300), ("a", 1100), ("b", 1100), ("never", 1501)):
        clock.wake_at(ms, lambda name=name: fired.append((name, clock.now_ms())))  # type: ignore[misc]
    clock.advance(500)
    assert fired == [("a", 1100), ("b", 1100), ("c", 1300)]
    assert (clock.now_ms(), clock.pending()) == (1500, 1)


def test_an_alarm_set_by_an_alarm_fires_in_the_same_advance() -> None:
    clock = VirtualClock(0)
    fired: list[int] = []

    def again() -> None:
        fired.append(clock.now_ms())
        clock.wake_at(clock.now_ms() + 10, again)

    clock.wake_at(10, again)
    clock.advance(45)
    assert fired == [10, 20, 30, 40]


def test_a_cancelled_alarm_does_not_fire_and_a_past_one_fires_at_once() -> None:
    clock = VirtualClock(1000)
    fired: list[int] = []
    clock.wake_at(1010, lambda: fired.append(1)).cancel()
    clock.wake_at(5, lambda: fired.append(clock.now_ms()))
    clock.advance(100)
    assert fired == [1000]


def test_days_pass_for_a_sleeping_task() -> None:
    async def body() -> None:
        clock = VirtualClock(0)
        woken: list[int] = []

        async def sleeper() -> None:
            for _ in range(3):
                await pause(clock, 86_400_000)
                woken.append(clock.now_ms())

        task = asyncio.ensure_future(sleeper())
        await clock.elapse(4 * 86_400_000)
        assert woken == [86_400_000, 2 * 86_400_000, 3 * 86_400_000]
        await task

    asyncio.run(body())


def test_finish_within_cancels_after_the_timeout() -> None:
    async def body() -> None:
        clock = VirtualClock(0)
        hung = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(finish_within(clock, 50, hung))
        await clock.elapse(51)
        with pytest.raises(TimeoutError):
            await task
        assert hung.cancelled()

    asyncio.run(body())


def test_finish_within_passes_a_cancellation_on() -> None:
    async def body() -> None:
        clock = VirtualClock(0)
        hung = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(finish_within(clock, 50, hung))
        await clock.elapse(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert hung.cancelled()
        assert clock.pending() == 0

    asyncio.run(body())


def test_the_real_clock_sleeps() -> None:
    async def body() -> None:
        clock = LoopClock()
        before = clock.monotonic_ms()
        await pause(clock, 5)
        assert clock.monotonic_ms() >= before
        assert await finish_within(clock, 60_000, asyncio.sleep(0, "done")) == "done"

    asyncio.run(body())
