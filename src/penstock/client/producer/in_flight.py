"""The limit of messages in flight: waiting below the limit, and `flush`.

A send belongs to the flush group between two flushes in which it was submitted, so a flush waits
for the sends before it and not for later ones.
"""

import asyncio
import functools
from collections import deque
from typing import Final

from penstock.client.producer.fast_path import FlushGroup, InFlightCounter
from penstock.clock import Clock
from penstock.errors import TooMuchInFlight

BYTES_MAX: Final = 256 * 1024 * 1024
"""Most bytes of bodies in flight, besides the limit of messages."""


class InFlightLimit(InFlightCounter):
    """Messages of one producer in flight. A batch counts as one."""

    def __init__(self, count_max: int, clock: Clock) -> None:
        InFlightCounter.__init__(self, count_max, BYTES_MAX)
        self._clock = clock
        self._flush_groups: list[FlushGroup] = []  # closed by a flush, not empty yet
        self._waiters: deque[asyncio.Future[None]] = deque()

    @property
    def full(self) -> bool:
        return self.count >= self.count_max or self.byte_count >= self.bytes_max

    async def wait(self, timeout_ms: int) -> int:
        """Wait until below the limit; returns the time left. Raises TooMuchInFlight."""
        deadline_ms = self._clock.monotonic_ms() + timeout_ms
        loop = asyncio.get_running_loop()
        while self.full:
            left_ms = deadline_ms - self._clock.monotonic_ms()
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.append(waiter)
            self.has_waiters = True
            give_up = functools.partial(_time_out, waiter)
            alarm = self._clock.wake_at(self._clock.now_ms() + left_ms, give_up)
            try:
                await waiter
            except TimeoutError:
                raise self._error() from None
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self.wake_waiter()  # pass the wake-up on to the next waiter
                raise
            finally:
                alarm.cancel()
        loop.call_soon(self._wake_next)  # after the caller has sent, or has given up
        return max(deadline_ms - self._clock.monotonic_ms(), 1)

    async def flush(self) -> None:
        """Return when everything sent before is acknowledged or has failed."""
        self._flush_groups = [group for group in self._flush_groups if group.count]
        self._flush_groups.append(self.flush_group)
        self.flush_group = FlushGroup()
        for group in self._flush_groups:
            if group.count:
                if group.done is None:
                    group.done = asyncio.get_running_loop().create_future()
                await asyncio.shield(group.done)

    def wake_waiter(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                break
        self.has_waiters = bool(self._waiters)

    def _wake_next(self) -> None:
        """Wake another waiter: more than one place may be free, or the last one was not used."""
        if self.has_waiters and not self.full:
            self.wake_waiter()

    def raise_full(self) -> None:
        raise self._error()

    def _error(self) -> TooMuchInFlight:
        if self.count >= self.count_max:
            return TooMuchInFlight.over(
                "messages without an acknowledgement",
                figure=self.count + 1,
                limit=self.count_max,
                unit="messages",
                setting="in_flight_max",
            )
        return TooMuchInFlight.over(
            "bodies without an acknowledgement", figure=self.byte_count, limit=BYTES_MAX
        )


def _time_out(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_exception(TimeoutError())
