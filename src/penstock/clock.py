"""Time as a parameter: the real clock on an event loop, and a virtual one for tests.

Every delay of the servers and the client goes through `Clock.wake_at`, so that a test can let days
pass in milliseconds. Times are `now_ms`, milliseconds since 1970; `monotonic_ms` never steps and
is for measuring how long something took.

Ground floor: imports nobody of ours.
"""

import asyncio
import heapq
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

T = TypeVar("T")

_YIELDS = 50
"""Loop turns between two virtual wakings: enough for a call over loopback and what follows it."""


class Alarm(Protocol):
    """A waking that may be called off."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """What tells the time and wakes."""

    def now_ms(self) -> int: ...

    def monotonic_ms(self) -> int: ...

    def wake_at(self, ms: int, callback: Callable[[], object]) -> Alarm:
        """Call `callback` in the loop once, when `now_ms` has reached `ms`.

        How long that is, is settled now: a clock that is set afterwards changes nothing.
        """


class LoopClock:
    """The real time, on the running event loop."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_ms(self) -> int:
        return time.monotonic_ns() // 1_000_000

    def wake_at(self, ms: int, callback: Callable[[], object]) -> Alarm:
        delay_ms = max(ms - self.now_ms(), 0)
        return asyncio.get_running_loop().call_later(delay_ms / 1000, callback)


class VirtualClock:
    """Time that passes when it is told to; needs no loop unless `elapse` is used."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._alarms: list[_VirtualAlarm] = []
        self._made = 0

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic_ms(self) -> int:
        return self._now_ms

    def wake_at(self, ms: int, callback: Callable[[], object]) -> Alarm:
        self._made += 1
        alarm = _VirtualAlarm(max(ms, self._now_ms), self._made, callback)
        heapq.heappush(self._alarms, alarm)
        return alarm

    def advance(self, ms: int) -> None:
        """Let time pass and call what falls due, in order."""
        end_ms = self._now_ms + ms
        while self._ring_next(end_ms):
            pass
        self._now_ms = end_ms

    async def elapse(self, ms: int) -> None:
        """As `advance`; the event loop runs until it is idle before, between and after."""
        end_ms = self._now_ms + ms
        await _run_loop()
        while self._ring_next(end_ms):
            await _run_loop()
        self._now_ms = end_ms
        await _run_loop()

    def pending(self) -> int:
        """How many alarms are set."""
        return sum(alarm.callback is not None for alarm in self._alarms)

    def _ring_next(self, end_ms: int) -> bool:
        while self._alarms and self._alarms[0].ms <= end_ms:
            alarm = heapq.heappop(self._alarms)
            if alarm.callback is not None:
                self._now_ms = max(self._now_ms, alarm.ms)
                alarm.callback()
                return True
        return False


class _VirtualAlarm:
    __slots__ = ("callback", "ms", "number")

    def __init__(self, ms: int, number: int, callback: Callable[[], object]) -> None:
        self.ms = ms
        self.number = number
        self.callback: Callable[[], object] | None = callback

    def __lt__(self, other: "_VirtualAlarm") -> bool:
        return (self.ms, self.number) < (other.ms, other.number)

    def cancel(self) -> None:
        self.callback = None


async def _run_loop() -> None:
    for _ in range(_YIELDS):
        await asyncio.sleep(0)


async def pause(clock: Clock, ms: int) -> None:
    """Sleep by this clock."""
    awake = asyncio.Event()
    alarm = clock.wake_at(clock.now_ms() + ms, awake.set)
    try:
        await awake.wait()
    finally:
        alarm.cancel()


async def finish_within(clock: Clock, ms: int, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled with a TimeoutError after `ms` by this clock."""
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
