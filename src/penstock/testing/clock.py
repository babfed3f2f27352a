"""The time of a broker under test: it stands still until it is told to pass.

What the broker has to do within CREEP_MS is done when that real time is over: a disk that is asked
again after 5 ms would never answer else. So time may creep by a few milliseconds while there is
work, and it stands where there is none.
"""

import asyncio
import heapq
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta

from penstock.clock import Alarm

CREEP_MS = 5


class BrokerClock:
    """A clock that is moved by hand: `broker.clock.advance(days=3)`."""

    def __init__(self, now_ms: int, move: Callable[[int], Awaitable[None]]) -> None:
        """`move` lets time pass, with all that happens meanwhile."""
        self._now_ms = now_ms
        self._move = move
        self._alarms: list[_Alarm] = []
        self._made = 0
        self._creeping: asyncio.TimerHandle | None = None
        self._flows_from: float | None = None

    # --- for tests

    def now_ms(self) -> int:
        """The broker's time, in milliseconds since 1970."""
        if self._flows_from is None:
            return self._now_ms
        return self._now_ms + int((time.monotonic() - self._flows_from) * 1000)

    def now(self) -> datetime:
        """The broker's time; what `deliver_at` and `start_at` are to be reckoned from."""
        return datetime.fromtimestamp(self.now_ms() / 1000, UTC)

    def advance(
        self, *, days: float = 0, hours: float = 0, minutes: float = 0, seconds: float = 0,
        ms: float = 0,
    ) -> Awaitable[None]:  # fmt: skip
        """Let time pass. What falls due happens in order, each thing at its own time: retries that
        follow from retries as well.

        In a plain test this returns when all that is done. Where an event loop runs, the clients
        need it meanwhile: there it is to be awaited.
        """
        span = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds, milliseconds=ms)
        if span < timedelta(0):
            raise ValueError(f"time can't pass backwards: {span}")
        return self._move(round(span / timedelta(milliseconds=1)))

    # --- for the servers, in their loop

    def monotonic_ms(self) -> int:
        return self.now_ms()

    def wake_at(self, ms: int, callback: Callable[[], object]) -> Alarm:
        self._made += 1
        alarm = _Alarm(ms, self._made, callback)
        heapq.heappush(self._alarms, alarm)
        self._creep()
        return alarm

    # --- for whoever moves it, in their loop

    def pass_to(self, ms: int) -> None:
        """It is that late now, if it was not before; whatever is to be woken by now is."""
        self._now_ms = max(self._now_ms, ms)
        self._ring()

    def flow(self) -> None:
        """Let time pass by itself from now on."""
        self._flows_from = time.monotonic()
        self._creep()

    def stand(self) -> None:
        """Stop it again, where it is."""
        self._now_ms = self.now_ms()
        self._flows_from = None

    def forget(self) -> None:
        """The servers are gone: nobody is to be woken any more."""
        self._alarms.clear()
        self._creep()

    def _ring(self) -> None:
        # What is set meanwhile for now has its turn next time: a callback may set itself again.
        now_ms, last = self.now_ms(), self._made
        later = []
        while self._alarms and self._alarms[0].ms <= now_ms:
            alarm = heapq.heappop(self._alarms)
            if alarm.number > last:
                later.append(alarm)
            elif alarm.callback is not None:
                alarm.callback()
        for alarm in later:
            heapq.heappush(self._alarms, alarm)
        self._creep()

    def _creep(self) -> None:
        """See to it that what is very near happens by itself."""
        while self._alarms and self._alarms[0].callback is None:
            heapq.heappop(self._alarms)
        if self._creeping is not None:
            self._creeping.cancel()
            self._creeping = None
        if not self._alarms:
            return
        away_ms = max(self._alarms[0].ms - self.now_ms(), 0)
        if away_ms <= CREEP_MS or self._flows_from is not None:
            loop = asyncio.get_running_loop()
            due_ms = self._alarms[0].ms
            self._creeping = loop.call_later(away_ms / 1000, self._crept, due_ms)

    def _crept(self, ms: int) -> None:
        self._creeping = None
        if self._flows_from is None:
            self._now_ms = max(self._now_ms, ms)
        self._ring()


class _Alarm:
    __slots__ = ("callback", "ms", "number")

    def __init__(self, ms: int, number: int, callback: Callable[[], object]) -> None:
        self.ms = ms
        self.number = number
        self.callback: Callable[[], object] | None = callback

    def __lt__(self, other: "_Alarm") -> bool:
        return (self.ms, self.number) < (other.ms, other.number)

    def cancel(self) -> None:
        self.callback = None
