"""The event loop of the synchronous clients: one daemon thread per process.

The thread starts with the first call and ends with the process, after open clients were closed.

**Fork.** A child process inherits the connections but not the threads, and the connections belong
to the parent. So the child does not touch the parent's clients, not even to free them: closing
their sockets would remove them from the parent's epoll set. The first call in the child starts a
new thread (`sync_client` says what happens to inherited clients).
"""

import asyncio
import atexit
import ctypes
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from time import monotonic
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from penstock.errors import ClientClosed

if TYPE_CHECKING:
    from penstock.client.sync.sync_client import SyncClient

log = logging.getLogger(__name__)

EXIT_SECONDS = 3.0
"""How long the end of the process waits for clients that were not closed."""

CANCEL_SECONDS = 2.0
"""How long it then waits for cancelled tasks."""

POLL_SECONDS = 0.5
"""How often a waiting thread wakes up: Python handles a signal that arrives just before the wait
only when the thread runs again."""

SLICE_SECONDS = 0.005
"""How long the loop runs calls of other threads before it serves its connections again."""

P = ParamSpec("P")
T = TypeVar("T")

Work = Coroutine[Any, Any, T] | asyncio.Future[T]


class LoopThread:
    """An event loop in a daemon thread, for callers in other threads."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop or _new_loop()
        self._calls: deque[Callable[[], object]] = deque()
        self._wakeup_scheduled = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, function: Callable[P, Work[T]], *args: P.args, **kwargs: P.kwargs
    ) -> "Future[T]":
        """Call a function in the loop; returns the future of its result."""
        call = _LoopCall(self, lambda: function(*args, **kwargs))
        self.call_soon(call.start)
        return call

    def run(self, function: Callable[P, Work[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function in the loop and wait; an interrupt of the caller cancels it."""
        call = _LoopCall(self, lambda: function(*args, **kwargs))
        try:
            self.call_soon(call.start)
            return await_result(call)
        except BaseException:
            call.cancel()
            raise

    def call_soon(self, call: Callable[[], object]) -> None:
        """Call a function that must not fail in the loop; calls in a burst wake the loop once.

        No call is missed: `_run_calls` resets the flag before it reads the queue.
        """
        self._calls.append(call)
        if self._wakeup_scheduled:
            return
        try:
            self._wakeup_scheduled = True
            self.loop.call_soon_threadsafe(self._run_calls)
        except BaseException as error:  # an interrupt, or the loop is closed
            self._wakeup_scheduled = False  # otherwise the loop would never be woken again
            if self.loop.is_closed():
                raise _loop_ended() from error
            raise

    def is_running(self) -> bool:
        """False after the end of the thread, in a child process and at interpreter shutdown."""
        return self._thread.is_alive() and not sys.is_finalizing()

    def is_current(self) -> bool:
        """Whether the caller runs in this thread."""
        return threading.current_thread() is self._thread

    def stop(self, seconds: float = CANCEL_SECONDS) -> None:
        """Cancel running tasks and end the thread."""
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(seconds)

    def _run_calls(self) -> None:
        self._wakeup_scheduled = False
        calls = self._calls
        until = monotonic() + SLICE_SECONDS
        while calls:
            calls.popleft()()
            if calls and monotonic() >= until and not self._wakeup_scheduled:
                self._wakeup_scheduled = True
                self.loop.call_soon(self._run_calls)
                break

    def _main(self) -> None:
        while True:
            try:
                self.loop.run_forever()
                break
            except (SystemExit, KeyboardInterrupt) as error:  # asyncio lets these two through
                log.error(
                    "%s in the event loop of the synchronous clients; it continues",
                    type(error).__name__,
                )
        self.loop.run_until_complete(_cancel_all())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()


def await_result(future: "Future[T]") -> T:
    """Wait for a future; an interrupt of the caller cancels it."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


class _LoopCall(Future[T]):
    """A call from another thread; cancelling it cancels the work in the loop."""

    def __init__(self, thread: LoopThread, make: Callable[[], Work[T]]) -> None:
        super().__init__()
        self._thread = thread
        self._make = make
        self._work: asyncio.Future[T] | None = None

    def start(self) -> None:
        """Start the work; called in the loop."""
        if self.cancelled():
            self.set_running_or_notify_cancel()
            return
        try:
            self._work = asyncio.ensure_future(self._make())
        except BaseException as error:  # raised in the caller
            self._complete(error, None)
        else:
            self._work.add_done_callback(self._work_done)

    def result(self, timeout: float | None = None) -> T:
        """As `Future.result`, but it does not wait for a loop that has ended."""
        if timeout is not None:
            return super().result(timeout)
        while True:
            try:
                return super().result(POLL_SECONDS)
            except TimeoutError:
                running = self._thread.is_running()
                if self.done():
                    return super().result()
                if not running:
                    raise _loop_ended() from None

    def cancel(self) -> bool:
        again = self.cancelled()
        cancelled = super().cancel()
        if cancelled and not again:  # a second time would disturb the clean-up of the work
            with suppress(ClientClosed):
                self._thread.call_soon(self._cancel_work)
        return cancelled

    def _cancel_work(self) -> None:
        if self._work is not None:
            self._work.cancel()

    def _work_done(self, work: asyncio.Future[T]) -> None:
        if work.cancelled():
            super().cancel()
            self.set_running_or_notify_cancel()
            return
        error = work.exception()
        self._complete(error, None if error is not None else work.result())

    def _complete(self, error: BaseException | None, result: Any) -> None:
        if not self.set_running_or_notify_cancel():
            return
        if error is not None:
            self.set_exception(error)
        else:
            self.set_result(result)


async def _cancel_all() -> None:
    while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _loop_ended() -> ClientClosed:
    return ClientClosed(
        "the event loop of the synchronous clients has ended",
        hint="it ends with the process; a child process does not have the loop of its parent",
    )


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


# --- state of the process ------------------------------------------------------------------------


class ProcessState:
    """The loop thread of this process and what is closed at its end."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.thread: LoopThread | None = None
        self.clients: weakref.WeakSet[SyncClient[Any]] = weakref.WeakSet()
        self.generators: weakref.WeakSet[AsyncGenerator[Any, Any]] = weakref.WeakSet()


_process = ProcessState()


def process_state() -> ProcessState:
    """The state of this process; a child process gets its own."""
    return _process


def loop_thread() -> LoopThread:
    """The thread of all synchronous clients of this process."""
    thread = _process.thread
    if thread is None:
        with _process.lock:
            if _process.thread is None:
                _process.thread = LoopThread("penstock")
            thread = _process.thread
    return thread


def _reset_after_fork() -> None:
    """In a child process: never free objects of the parent's thread, not even at the end."""
    global _process
    kept = (
        _process.thread,
        [client._client for client in list(_process.clients)],
        list(_process.generators),
    )
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
    _process = ProcessState()


def _close_at_exit() -> None:
    """Close all clients at the end of the process, in bounded time."""
    thread = _process.thread
    if thread is None:
        return
    closes = [generator.aclose for generator in list(_process.generators)]  # before their clients
    closes += [client._client.close for client in list(_process.clients)]
    wait([thread.submit(close) for close in closes], EXIT_SECONDS)
    thread.stop()


os.register_at_fork(after_in_child=_reset_after_fork)
atexit.register(_close_at_exit)
