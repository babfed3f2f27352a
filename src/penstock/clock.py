"""The clock as a parameter: its interface, and the real clock on an event loop.

Every delay of the servers and the client uses `Clock.wake_at`, so that days can pass in
milliseconds in a test (`penstock.testing.virtual_clock`). Times are `now_ms`, milliseconds since
1970. `monotonic_ms` is never set back and is used to measure durations.

This module imports nothing else from Penstock.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

T = TypeVar("T")

monotonic_ns = time.monotonic_ns
"""For durations that a thread measures."""


class Alarm(Protocol):
    """A callback that is scheduled and can be cancelled."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Tells the time and schedules callbacks."""

    def now_ms(self) -> int: ...

    def monotonic_ms(self) -> int: ...

    def wake_at(self, ms: int, callback: Callable[[], object]) -> Alarm:
        """Call `callback` once in the event loop, when `now_ms` has reached `ms`.

        The delay is computed now: setting the system clock later does not change it.
        """


class LoopClock:
    """The system's clock, on the running event loop."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def wake_at(self, ms: int, callback: Callable[[], object]) -> Alarm:
        delay_ms = max(ms - self.now_ms(), 0)
        return asyncio.get_running_loop().call_later(delay_ms / 1000, callback)


async def pause(clock: Clock, ms: int) -> None:
    """Sleep for `ms` milliseconds of this clock."""
    woken = asyncio.Event()
    alarm = clock.wake_at(clock.now_ms() + ms, woken.set)
    try:
        await woken.wait()
    finally:
        alarm.cancel()


async def finish_within(clock: Clock, ms: int, work: Awaitable[T]) -> T:
    """Await `work` for at most `ms` milliseconds of this clock; then cancel it and raise
    TimeoutError."""
    task = asyncio.ensure_future(work)
    late = False

    def end() -> None:
        nonlocal late
        late = True
        task.cancel()

    alarm = clock.wake_at(clock.now_ms() + ms, end)
    try:
        return await task
    except asyncio.CancelledError:
        me = asyncio.current_task()
        if late and not (me is not None and me.cancelling()):
            raise TimeoutError(f"not finished after {ms} ms") from None
        raise
    finally:
        alarm.cancel()
