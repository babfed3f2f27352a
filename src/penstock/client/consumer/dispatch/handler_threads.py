"""A thread pool for handlers that are not coroutines.

Threads take jobs from a shared queue and put the results into another, which the loop empties once
per iteration: the loop is woken per burst, not per message. A thread that takes a job while more
are waiting wakes or starts another thread, so a slow job does not delay the others.

If a function returns an awaitable (a lambda or decorator around a coroutine function), it is
awaited on the loop while the thread waits.
"""

import asyncio
import contextlib
import inspect
import itertools
import logging
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from penstock.clock import Clock, finish_within

log = logging.getLogger(__name__)

Job = TypeVar("Job")


class Result(NamedTuple, Generic[Job]):
    """The result or the exception of a job."""

    job: Job
    value: object
    error: BaseException | None


class HandlerThreads(Generic[Job]):
    """At most `count_max` threads, started on demand."""

    def __init__(
        self,
        name: str,
        count_max: int,
        *,
        run: Callable[[Job], object],
        done: Callable[[Result[Job]], None],
        returned_none: Callable[[deque[Job]], None] | None = None,
    ) -> None:
        """`done` gets the result of a job; `returned_none`, if given, gets the jobs that returned
        None instead, without a Result, and takes them out of the deque."""
        self._name = name
        self._count_max = count_max
        self._run = run
        self._done = done
        self._returned_none = returned_none
        self._loop = asyncio.get_running_loop()
        self._jobs: deque[Job] = deque()
        self._results: deque[Result[Job]] = deque()
        self._none_results: deque[Job] = deque()
        self._wakeup_scheduled = False  # the loop will take the results
        self._lock = threading.Condition()
        self._idle_count = 0
        self._waking = False  # a thread was woken or started and has not taken a job yet
        self._closing = False
        self._numbers = itertools.count(1)
        self._thread_count = 0
        self._all_ended: asyncio.Future[None] | None = None

    def submit(self, jobs: Iterable[Job]) -> None:
        """Run these jobs; called in the loop."""
        self._jobs.extend(jobs)
        self._wake_worker()

    def discard(self, unwanted: Callable[[Job], bool]) -> None:
        """Discard jobs that have not started; called in the loop."""
        jobs = self._jobs
        for _ in range(len(jobs)):
            try:
                job = jobs.popleft()
            except IndexError:  # taken by a thread meanwhile
                break
            if not unwanted(job):
                jobs.append(job)
        if jobs:
            self._wake_worker()

    async def close(self, clock: Clock, drain_ms: int) -> int:
        """Start no more jobs and wait for running ones; returns the number still running."""
        with self._lock:
            self._closing = True
            self._jobs.clear()
            self._lock.notify_all()
            if self._thread_count:
                self._all_ended = self._loop.create_future()
        if self._all_ended is not None:
            with contextlib.suppress(TimeoutError):
                await finish_within(clock, drain_ms, asyncio.shield(self._all_ended))
        self._take_results()
        return self._thread_count

    def _wake_worker(self) -> None:
        """Make a thread look at the jobs."""
        if self._waking:
            return
        with self._lock:
            if self._closing or self._waking:
                return
            if self._idle_count:
                self._waking = True
                self._lock.notify()
            elif self._thread_count < self._count_max:
                self._start_worker()

    def _start_worker(self) -> None:
        """Start a thread; raises RuntimeError if there is none and none can be started."""
        self._waking = True
        self._thread_count += 1
        name = f"{self._name}-{next(self._numbers)}"
        # A daemon: a stuck handler must not prevent the program from exiting.
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system refuses more threads
            self._waking = False
            self._thread_count -= 1
            if not self._thread_count:
                raise
            log.warning(
                "%s: cannot start another thread, using %d: %s",
                self._name,
                self._thread_count,
                error,
            )

    # --- in the threads

    def _work(self) -> None:
        jobs = self._jobs
        self._waking = False
        while True:
            try:
                job = jobs.popleft()
            except IndexError:
                if not self._wait():
                    break
                continue
            if jobs and not self._waking:
                self._wake_worker()
            self._finish(job)
            del job
            if not self._wakeup_scheduled:
                self._wakeup_scheduled = True
                if not self._call_in_loop(self._take_results):
                    break
        with self._lock:
            self._thread_count -= 1
            last = self._closing and self._thread_count == 0
        if last:
            self._call_in_loop(self._threads_ended)

    def _finish(self, job: Job) -> None:
        try:
            value = self._run(job)
            if value is not None and inspect.isawaitable(value):
                value = asyncio.run_coroutine_threadsafe(_result(value), self._loop).result()
        except BaseException as error:
            self._results.append(Result(job, None, error))
        else:
            if value is None and self._returned_none is not None:
                self._none_results.append(job)
            else:
                self._results.append(Result(job, value, None))

    def _wait(self) -> bool:
        """Wait for jobs; False if the pool is closed."""
        with self._lock:
            while not self._jobs:
                if self._closing:
                    return False
                self._idle_count += 1
                try:
                    self._lock.wait()
                finally:
                    self._idle_count -= 1
                    self._waking = False
        return True

    def _call_in_loop(self, callback: Callable[[], None]) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed
            return False
        return True

    # --- in the loop

    def _take_results(self) -> None:
        self._wakeup_scheduled = False
        none_results, results = self._none_results, self._results
        if self._returned_none is not None:
            self._returned_none(none_results)
        while results:
            self._done(results.popleft())

    def _threads_ended(self) -> None:
        if self._all_ended is not None and not self._all_ended.done():
            self._all_ended.set_result(None)


async def _result(work: Awaitable[object]) -> object:
    return await work
