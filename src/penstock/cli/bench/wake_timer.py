"""A timer of the event loop with a resolution of microseconds.

asyncio and uvloop round their own timers up to whole milliseconds. An open-loop generator would
send every message up to 1 ms late, and this delay would be part of every latency. A Linux timerfd
has no such limit.
"""

import asyncio
import ctypes
import os
import time

_CLOCK_MONOTONIC = 1
_TFD_NONBLOCK = os.O_NONBLOCK
_TFD_CLOEXEC = os.O_CLOEXEC
_ABSOLUTE = 1
_SECOND_NS = 1_000_000_000


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class WakeTimer:
    """Waits until a time of the monotonic clock."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._file = self._libc.timerfd_create(_CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._file < 0:
            _raise("timerfd_create")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._file, self._expired)
        self._waiter: asyncio.Future[None] | None = None

    async def until(self, time_ns: int) -> None:
        """Return at this time of `time.monotonic_ns()`; at once if it has passed."""
        if time_ns <= time.monotonic_ns():
            await asyncio.sleep(0)
            return
        spec = _TimerSpec(_TimeSpec(0, 0), _TimeSpec(*divmod(time_ns, _SECOND_NS)))
        if self._libc.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(spec), None) < 0:
            _raise("timerfd_settime")
        self._waiter = self._loop.create_future()
        await self._waiter

    def close(self) -> None:
        """Release the timer."""
        self._loop.remove_reader(self._file)
        os.close(self._file)

    def _expired(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:  # it was set again meanwhile
            return
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _raise(call: str) -> None:
    code = ctypes.get_errno()
    raise OSError(code, f"{call}: {os.strerror(code)}")
