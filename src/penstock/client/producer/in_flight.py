"""How much is under way: a bound on it, those who wait for room, and those who wait for all of it.

Messages belong to the wave between two flushes in which they were sent, so that a flush waits for
those before it, whatever is sent meanwhile.
"""

import asyncio
import functools
from collections import deque
from typing import Final

from penstock.client.producer.fast_path import Tally, Wave
from penstock.clock import Clock
from penstock.errors import TooMuchInFlight

BYTES_MAX: Final = 256 * 1024 * 1024
"""Bodies under way, beside the bound on their number."""


class InFlight(Tally):
    """What one producer has under way. A batch counts as one."""

    def __init__(self, count_max: int, clock: Clock) -> None:
        Tally.__init__(self, count_max, BYTES_MAX)
        self._clock = clock
        self._waves: list[Wave] = []
        self._room: deque[asyncio.Future[None]] = deque()

    @property
    def full(self) -> bool:
        return self.count >= self.count_max or self.size >= self.size_max

    async def wait(self, timeout_ms: int) -> int:
        """Wait for room; gives what is left of the time. Raises TooMuchInFlight after it."""
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        loop = asyncio.get_running_loop()
        while self.full:
            left_ms = deadline_ms - self._clock.monotonic_ms()
            waiter: asyncio.Future[None] = loop.create_future()
            self._room.append(waiter)
            self.waiting = True
            give_up = functools.partial(_give_up, waiter)
            alarm = self._clock.wake_at(self._clock.now_ms() + left_ms, give_up)
            try:
                await waiter
            except TimeoutError:
                raise self._too_much() from None
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self.wake()  # the place is for somebody else
                raise
            finally:
                alarm.cancel()
        loop.call_soon(self._pass_on)  # when our caller has taken its place, or has not
        return max(deadline_ms - self._clock.monotonic_ms(), 1)

    async def flush(self) -> None:
        """Return when everything sent before has its answer."""
        self._waves = [wave for wave in self._waves if wave.count]
        self._waves.append(self.wave)
        self.wave = Wave()
        for wave in self._waves:
            if wave.count:
                if wave.over is None:
                    wave.over = asyncio.get_running_loop().create_future()
                await asyncio.shield(wave.over)

    def wake(self) -> None:
        """Let the next one in."""
        while self._room:
            waiter = self._room.popleft()
            if not waiter.done():
                waiter.set_result(None)
                break
        self.waiting = bool(self._room)

    def _pass_on(self) -> None:
        """More may have become free than one place, or the one was not used."""
        if self.waiting and not self.full:
            self.wake()

    def refuse(self) -> None:
        raise self._too_much()

    def _too_much(self) -> TooMuchInFlight:
        if self.count >= self.count_max:
            return TooMuchInFlight.over(
                "messages without an acknowledgement yet",
                figure=self.count + 1,
                limit=self.count_max,
                unit="messages",
                setting="in_flight_max",
            )
        return TooMuchInFlight.over(
            "bodies without an acknowledgement yet", figure=self.size, limit=BYTES_MAX
        )


def _give_up(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())
