"""Threads for handlers that are plain functions: the event loop must not wait for these.

Threads take jobs one by one from a common list and note the results in another, which the loop
empties once per turn; so a hop between threads is paid per burst, not per message. A thread that
takes a job while more are waiting wakes (or starts) another one, so a slow job delays no other.

A function may turn out to be an async one in disguise (a lambda, a decorator around it): what it
gives is awaited on the loop then, while its thread waits.
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
    """How a job ended."""

    job: Job
    value: object
    error: BaseException | None


class HandlerThreads(Generic[Job]):
    """At most `count_max` threads; started when there is work for them."""

    def __init__(
        self,
        name: str,
        count_max: int,
        *,
        run: Callable[[Job], object],
        done: Callable[[Result[Job]], None],
        returned: Callable[[Job], None] | None = None,
    ) -> None:
        """`done` is told how a job ended; `returned`, if given, of those that returned None."""
        self._name = name
        self._count_max = count_max
        self._run = run
        self._done = done
        self._returned = returned
        self._loop = asyncio.get_running_loop()
        self._jobs: deque[Job] = deque()
        self._results: deque[Result[Job]] = deque()
        self._plain: deque[Job] = deque()
        self._told = False
        self._lock = threading.Condition()
        self._idle = 0
        self._waking = False
        self._closing = False
        self._numbers = itertools.count(1)
        self._living = 0
        self._ended: asyncio.Future[None] | None = None

    def submit(self, jobs: Iterable[Job]) -> None:
        """From the loop: run these."""
        self._jobs.extend(jobs)
        self._call_one()

    def forget(self, unwanted: Callable[[Job], bool]) -> None:
        """From the loop: take back such jobs that have not begun."""
        jobs = self._jobs
        for _ in range(len(jobs)):
            try:
                job = jobs.popleft()
            except IndexError:  # the threads are faster
                break
            if not unwanted(job):
                jobs.append(job)
        if jobs:
            self._call_one()

    async def close(self, clock: Clock, drain_ms: int) -> int:
        """Begin no more jobs and wait for those that run; gives the number still running then."""
        with self._lock:
            self._closing = True
            self._jobs.clear()
            self._lock.notify_all()
            if self._living:
                self._ended = self._loop.create_future()
        if self._ended is not None:
            with contextlib.suppress(TimeoutError):
                await finish_within(clock, drain_ms, asyncio.shield(self._ended))
        self._take_results()
        return self._living

    def _call_one(self) -> None:
        """See to it that somebody looks at the jobs."""
        if self._waking:
            return
        with self._lock:
            if self._closing or self._waking:
                return
            if self._idle:
                self._waking = True
                self._lock.notify()
            elif self._living < self._count_max:
                self._start_one()

    def _start_one(self) -> None:
        """Raises RuntimeError if not even one thread can be started."""
        self._waking = True
        self._living += 1
        name = f"{self._name}-{next(self._numbers)}"
        # A daemon: a handler that never comes back must not keep the program from ending.
        thread = threading.Thread(target=self._work, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # too many, says the system
            self._waking = False
            self._living -= 1
            if not self._living:
                raise
            log.warning("%s: %d threads have to do: %s", self._name, self._living, error)

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
                self._call_one()
            self._finish(job)
            del job
            if not self._told:
                self._told = True
                if not self._tell(self._take_results):
                    break
        with self._lock:
            self._living -= 1
            last = self._closing and self._living == 0
        if last:
            self._tell(self._all_ended)

    def _finish(self, job: Job) -> None:
        try:
            value = self._run(job)
            if value is not None and inspect.isawaitable(value):
                value = asyncio.run_coroutine_threadsafe(_result(value), self._loop).result()
        except BaseException as error:
            self._results.append(Result(job, None, error))
        else:
            if value is None and self._returned is not None:
                self._plain.append(job)
            else:
                self._results.append(Result(job, value, None))

    def _wait(self) -> bool:
        """Sleep until there may be jobs; False at the end."""
        with self._lock:
            while not self._jobs:
                if self._closing:
                    return False
                self._idle += 1
                try:
                    self._lock.wait()
                finally:
                    self._idle -= 1
                    self._waking = False
        return True

    def _tell(self, callback: Callable[[], None]) -> bool:
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:  # the loop is closed: nobody is there to hear
            return False
        return True

    # --- in the loop

    def _take_results(self) -> None:
        self._told = False
        plain, results = self._plain, self._results
        if self._returned is not None:
            while plain:
                self._returned(plain.popleft())
        while results:
            self._done(results.popleft())

    def _all_ended(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


async def _result(work: Awaitable[object]) -> object:
    return await work
