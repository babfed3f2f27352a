"""Clocks for tests, whose time is moved by the test.

`VirtualClock` is for code that runs in the test's event loop, or without one. `BrokerClock` is the
clock of an in-process broker, which runs in a thread with its own event loop.
"""

import asyncio
import heapq
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

from penstock.clock import Alarm

NEAR_MS = 5
"""Alarms of a `BrokerClock` that are due within this time fire when it has passed in real time.
Without that a flush that is checked every 5 ms would never complete."""
_YIELDS = 50
"""Iterations of the event loop between two alarms: enough for a call over loopback."""


class VirtualAlarm:
    """An alarm of a virtual clock. Alarms with the same time fire in the order of creation."""

    __slots__ = ("callback", "ms", "number")

    def __init__(self, ms: int, number: int, callback: Callable[[], object]) -> None:
        self.ms = ms
        self.number = number
        self.callback: Callable[[], object] | None = callback

    def __lt__(self, other: "VirtualAlarm") -> bool:
        return (self.ms, self.number) < (other.ms, other.number)

    def cancel(self) -> None:
        self.callback = None


class VirtualClock:
    """A clock that advances only when it is told to. Only `elapse` needs an event loop."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._alarms: list[VirtualAlarm] = []
        self._created = 0
        self._set_by_ms = 0

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic_ms(self) -> int:
        return self._now_ms - self._set_by_ms

    def set_by(self, ms: int) -> None:
        """Set the clock forward, or back if negative, while no time passes."""
        self._now_ms += ms
        self._set_by_ms += ms
        for alarm in self._alarms:
            alarm.ms += ms

    def wake_at(self, ms: int, callback: Callable[[], object]) -> Alarm:
        self._created += 1
        alarm = VirtualAlarm(max(ms, self._now_ms), self._created, callback)
        heapq.heappush(self._alarms, alarm)
        return alarm

    def advance(self, ms: int) -> None:
        """Advance the clock and fire the alarms that become due, in order."""
        end_ms = self._now_ms + ms
        while self._fire_next(end_ms):
            pass
        self._now_ms = end_ms

    async def elapse(self, ms: int) -> None:
        """As `advance`, and let the event loop run before and after each alarm."""
        end_ms = self._now_ms + ms
        await _run_loop()
        while self._fire_next(end_ms):
            await _run_loop()
        self._now_ms = end_ms
        await _run_loop()

    def pending(self) -> int:
        """The number of alarms that are set."""
        return sum(alarm.callback is not None for alarm in self._alarms)

    def _fire_next(self, end_ms: int) -> bool:
        while self._alarms and self._alarms[0].ms <= end_ms:
            alarm = heapq.heappop(self._alarms)
            if alarm.callback is not None:
                self._now_ms = max(self._now_ms, alarm.ms)
                alarm.callback()
                return True
        return False


async def _run_loop() -> None:
    for _ in range(_YIELDS):
        await asyncio.sleep(0)


class BrokerClock:
    """The clock of an in-process broker: `broker.clock.advance(days=3)`."""

    def __init__(self, now_ms: int, advance: Callable[[int], Awaitable[None]]) -> None:
        """`advance` lets milliseconds pass for the broker and waits until it is idle."""
        self._now_ms = now_ms
        self._advance = advance
        self._alarms: list[VirtualAlarm] = []
        self._created = 0
        self._near_timer: asyncio.TimerHandle | None = None
        self._running_since: float | None = None

    # --- for tests

    def now_ms(self) -> int:
        """The broker's time, in milliseconds since 1970."""
        if self._running_since is None:
            return self._now_ms
        return self._now_ms + int((time.monotonic() - self._running_since) * 1000)

    def now(self) -> datetime:
        """The broker's time. Use it to compute `deliver_at` and `start_at`."""
        return datetime.fromtimestamp(self.now_ms() / 1000, UTC)

    def advance(
        self,
        *,
        days: float = 0,
        hours: float = 0,
        minutes: float = 0,
        seconds: float = 0,
        ms: float = 0,
    ) -> Awaitable[None]:
        """Advance the broker's time. Everything that becomes due happens in order and at its own
        time, including retries that follow from retries.

        In a synchronous test the call returns when all of it is done. If an event loop is running
        in this thread, await the result, because the clients need the loop.
        """
        span = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds, milliseconds=ms)
        if span < timedelta(0):
            raise ValueError(f"time can't go backwards: {span}")
        return self._advance(round(span / timedelta(milliseconds=1)))

    # --- for the servers, in their event loop

    def monotonic_ms(self) -> int:
        return self.now_ms()

    def wake_at(self, ms: int, callback: Callable[[], object]) -> Alarm:
        self._created += 1
        alarm = VirtualAlarm(ms, self._created, callback)
        heapq.heappush(self._alarms, alarm)
        self._schedule_near()
        return alarm

    # --- for the cluster, in the servers' event loop

    def advance_to(self, ms: int) -> None:
        """Set the time to `ms` unless it is later already, and fire the alarms that are due."""
        self._now_ms = max(self._now_ms, ms)
        self._fire_due()

    def run(self) -> None:
        """Let the clock run in real time from now on."""
        self._running_since = time.monotonic()
        self._schedule_near()

    def freeze(self) -> None:
        """Stop the clock at the current time."""
        self._now_ms = self.now_ms()
        self._running_since = None

    def clear(self) -> None:
        """Remove all alarms, after the servers have stopped."""
        self._alarms.clear()
        self._schedule_near()

    def _fire_due(self) -> None:
        # Alarms set by the callbacks fire next time: a callback may set its own alarm again.
        now_ms, last = self.now_ms(), self._created
        later = []
        while self._alarms and self._alarms[0].ms <= now_ms:
            alarm = heapq.heappop(self._alarms)
            if alarm.number > last:
                later.append(alarm)
            elif alarm.callback is not None:
                alarm.callback()
        for alarm in later:
            heapq.heappush(self._alarms, alarm)
        self._schedule_near()

    def _schedule_near(self) -> None:
        """Let the event loop fire the next alarm if it is near, or if the clock runs."""
        while self._alarms and self._alarms[0].callback is None:
            heapq.heappop(self._alarms)
        if self._near_timer is not None:
            self._near_timer.cancel()
            self._near_timer = None
        if not self._alarms:
            return
        wait_ms = max(self._alarms[0].ms - self.now_ms(), 0)
        if wait_ms <= NEAR_MS or self._running_since is not None:
            loop = asyncio.get_running_loop()
            due_ms = self._alarms[0].ms
            self._near_timer = loop.call_later(wait_ms / 1000, self._fire_near, due_ms)

    def _fire_near(self, ms: int) -> None:
        self._near_timer = None
        if self._running_since is None:
            self._now_ms = max(self._now_ms, ms)
        self._fire_due()
