"""Virtual time: alarms in order, and the loop gets its turns between two."""

import asyncio

import pytest

from penstock.clock import LoopClock, VirtualClock, finish_within, pause


def test_alarms_ring_in_order_of_time_then_of_setting() -> None:
    clock = VirtualClock(1000)
    rung: list[tuple[str, int]] = []
    for name, ms in (("c", 1300), ("a", 1100), ("b", 1100), ("never", 1501)):
        clock.wake_at(ms, lambda name=name: rung.append((name, clock.now_ms())))  # type: ignore[misc]
    clock.advance(500)
    assert rung == [("a", 1100), ("b", 1100), ("c", 1300)]
    assert (clock.now_ms(), clock.pending()) == (1500, 1)


def test_alarm_set_by_an_alarm_rings_in_the_same_stretch() -> None:
    clock = VirtualClock(0)
    rung: list[int] = []

    def again() -> None:
        rung.append(clock.now_ms())
        clock.wake_at(clock.now_ms() + 10, again)

    clock.wake_at(10, again)
    clock.advance(45)
    assert rung == [10, 20, 30, 40]


def test_cancelled_alarm_is_silent_and_a_late_one_rings_at_once() -> None:
    clock = VirtualClock(1000)
    rung: list[int] = []
    clock.wake_at(1010, lambda: rung.append(1)).cancel()
    clock.wake_at(5, lambda: rung.append(clock.now_ms()))
    clock.advance(100)
    assert rung == [1000]


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


def test_work_that_takes_too_long_is_cancelled() -> None:
    async def body() -> None:
        clock = VirtualClock(0)
        hung = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(finish_within(clock, 50, hung))
        await clock.elapse(51)
        with pytest.raises(TimeoutError):
            await task
        assert hung.cancelled()

    asyncio.run(body())


def test_cancelling_from_outside_stays_a_cancellation() -> None:
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


def test_real_clock_wakes() -> None:
    async def body() -> None:
        clock = LoopClock()
        before = clock.monotonic_ms()
        await pause(clock, 5)
        assert clock.monotonic_ms() >= before
        assert await finish_within(clock, 60_000, asyncio.sleep(0, "done")) == "done"

    asyncio.run(body())
