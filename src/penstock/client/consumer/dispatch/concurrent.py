"""Handing messages to handlers, many at a time and in no certain order.

Async handlers run in a fixed number of worker tasks, plain functions in as many threads. A worker
goes through a run of messages without a task, a future or a trip through the loop for each; it
wakes another worker as long as more is waiting, so one slow message holds up nobody else.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Generator, Iterable
from typing import Protocol, cast

from penstock.client.client_session import Session
from penstock.client.consumer.dispatch.completion import Settling
from penstock.client.consumer.dispatch.handler_calls import Calls, enter, is_end, no_handler
from penstock.client.consumer.dispatch.handler_threads import HandlerThreads, Result
from penstock.client.consumer.dispatch.handlers import Handler, Handlers, Retry, verdict
from penstock.client.consumer.process_queue import ProcessQueue
from penstock.client.received_message import FINISHED, WAITING, WORKING, ReceivedMessage
from penstock.clock import finish_within

log = logging.getLogger(__name__)

RUN_MAX = 128
"""Messages that one worker handles before others on the loop have their turn."""
END_MS = 1_000
"""How long handlers that were cancelled may take to end."""

Job = ReceivedMessage | list[ReceivedMessage]


class Dispatch(Protocol):
    """What a consumer gives its messages to."""

    def submit(self, work: ProcessQueue, messages: list[ReceivedMessage]) -> None:
        """Messages that were just added to their queue."""

    async def stop(self, work: ProcessQueue) -> None:
        """Return when nobody works on a dropped queue in a way that others must wait for."""

    async def close(self, drain_ms: int) -> None:
        """Begin nothing more, and wait so long for what has begun."""


class ConcurrentDispatch:
    """Up to `concurrency` async handlers and as many plain ones at a time."""

    def __init__(
        self,
        session: Session,
        handlers: Handlers,
        calls: Calls,
        settling: Settling,
        *,
        name: str,
        concurrency: int,
        handle_batch: int = 1,
    ) -> None:
        self._session = session
        self._clock = session.clock
        self._handlers = handlers
        self._calls = calls
        self._settling = settling
        self._concurrency = concurrency
        self._batch = handle_batch
        self._jobs: deque[Job] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()
        self._waking = False
        self._closing = False
        self._workers: set[asyncio.Task[None]] = set()
        self._threads: HandlerThreads[Job] = HandlerThreads(
            name,
            concurrency,
            run=self._run_in_thread,
            done=self._ran_in_thread,
            returned=self._returned_in_thread,
        )
        settling.resubmit = lambda message: self._spread([message])

    def submit(self, work: ProcessQueue, messages: list[ReceivedMessage]) -> None:
        self._spread(messages)

    async def stop(self, work: ProcessQueue) -> None:
        """Handlers of a dropped queue may go on: their results count no more. What has not begun
        is let go: where all handlers hang, a queue may come and go many times."""

        def unwanted(job: Job) -> bool:
            return (job[0] if isinstance(job, list) else job).owner is work

        kept = [job for job in self._jobs if not unwanted(job)]
        self._jobs.clear()
        self._jobs.extend(kept)
        self._threads.forget(unwanted)

    async def close(self, drain_ms: int) -> None:
        """Begin no more messages, and wait for the handlers that have begun."""
        self._closing = True
        self._jobs.clear()
        while self._idle:
            self._wake_one()
        threads = asyncio.ensure_future(self._threads.close(self._clock, drain_ms))
        left = await self._end_workers(drain_ms) + await threads
        if left:
            log.warning(
                "%d handlers have not come back within %d ms; their messages will come again",
                left,
                drain_ms,
            )

    async def _end_workers(self, drain_ms: int) -> int:
        if not self._workers:
            return 0
        workers = set(self._workers)
        with contextlib.suppress(TimeoutError):
            await finish_within(self._clock, drain_ms, asyncio.wait(workers))
        late = [worker for worker in workers if not worker.done()]
        for worker in late:
            worker.cancel()
        if late:
            with contextlib.suppress(TimeoutError):
                await finish_within(self._clock, END_MS, asyncio.wait(late))
        return len(late)

    # --- to tasks or to threads

    def _spread(self, messages: list[ReceivedMessage]) -> None:
        if self._closing:
            return
        if self._calls.tracer is not None or not self._handlers.any(is_async=False):
            self._to_tasks(self._split(messages))
        elif not self._handlers.any(is_async=True):
            self._threads.submit(self._split(messages))
        else:
            kinds: dict[bool, list[ReceivedMessage]] = {False: [], True: []}
            for message in messages:
                handler = self._handlers.find(message)
                kinds[handler is None or handler.is_async].append(message)
            self._to_tasks(self._split(kinds[True]))
            self._threads.submit(self._split(kinds[False]))

    def _split(self, messages: list[ReceivedMessage]) -> Iterable[Job]:
        """Jobs of so many messages as a handler takes at a time, each for one handler."""
        if self._batch == 1:
            return messages
        jobs: list[Job] = []
        batch: list[ReceivedMessage] = []
        current: Handler | None = None
        for message in messages:
            handler = self._handlers.find(message)
            if batch and (handler is not current or len(batch) == self._batch):
                jobs.append(batch)
                batch = []
            current = handler
            batch.append(message)
        if batch:
            jobs.append(batch)
        return jobs

    # --- tasks

    def _to_tasks(self, jobs: Iterable[Job]) -> None:
        self._jobs.extend(jobs)
        if self._jobs and not self._waking:
            self._wake_one()

    def _wake_one(self) -> None:
        """See to it that another worker looks at the jobs."""
        while self._idle:
            sleeper = self._idle.popleft()
            if not sleeper.done():
                self._waking = True
                sleeper.set_result(None)
                return
        if len(self._workers) < self._concurrency and not self._closing:
            self._waking = True
            worker = asyncio.ensure_future(self._work())
            self._workers.add(worker)
            worker.add_done_callback(self._worker_ended)

    def _worker_ended(self, worker: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        if not worker.cancelled() and (error := worker.exception()) is not None:
            log.error("a worker failed; another takes its place", exc_info=error)
        if self._jobs:
            self._wake_one()

    async def _work(self) -> None:
        enter(self._settling)
        jobs = self._jobs
        self._waking = False
        while not self._closing:
            if not jobs:
                sleeper = asyncio.get_running_loop().create_future()
                self._idle.append(sleeper)
                await sleeper
                self._waking = False
                continue
            await self._run(RUN_MAX)
            if jobs:
                await _Turn()

    async def _run(self, count_max: int) -> None:
        """Handle a run of messages; returns early when there are no more."""
        jobs, clock, find = self._jobs, self._clock, self._handlers.find
        calls_only = self._calls.tracer is not None
        now_ms = clock.monotonic_ms()
        for _ in range(count_max):
            if not jobs:
                return
            job = jobs.popleft()
            if jobs and not self._waking:
                self._wake_one()
            if calls_only or isinstance(job, list):
                await self._handle(job if isinstance(job, list) else [job])
                now_ms = clock.monotonic_ms()
                continue
            work = cast(ProcessQueue, job.owner)
            if work.dropped or job.state == FINISHED:
                continue
            job.state = WORKING
            job.since_ms = now_ms
            try:
                handler = find(job)
                if handler is None:
                    raise no_handler(job)
                result = await cast(Awaitable[object], handler.function(job))
            except BaseException as error:
                if is_end(error):
                    raise
                await self._failed([job], error)
            else:
                if (result is None or result is True) and job.again is None:
                    work.finish_one(job)
                else:
                    await self._settling.settle((job,), verdict(result))
            now_ms = clock.monotonic_ms()
            work.busy_ms += now_ms - job.since_ms

    async def _handle(self, messages: list[ReceivedMessage]) -> None:
        """The same for lists of messages, and where traces are written."""
        messages = self._begin(messages)
        if messages:
            await self._settling.settle(messages, await self._calls.handle(messages))
            work = cast(ProcessQueue, messages[0].owner)
            work.busy_ms += self._clock.monotonic_ms() - messages[0].since_ms

    async def _failed(self, messages: list[ReceivedMessage], error: BaseException) -> None:
        self._settling.complain(messages, error)
        await self._settling.settle(messages, Retry())

    def _begin(self, messages: list[ReceivedMessage]) -> list[ReceivedMessage]:
        """Those of them that still have to be handled, marked as begun."""
        now_ms = self._clock.monotonic_ms()
        begun = []
        for message in messages:
            if not cast(ProcessQueue, message.owner).dropped and message.state != FINISHED:
                message.state = WORKING
                message.since_ms = now_ms
                begun.append(message)
        return begun

    # --- threads

    def _run_in_thread(self, job: Job) -> object:
        if isinstance(job, list):
            messages = self._begin(job)
            if not messages:
                return None
            handler = self._handlers.find(messages[0])
            if handler is None:
                raise no_handler(messages[0])
            return handler.function(handler.argument(messages))
        if cast(ProcessQueue, job.owner).dropped or job.state == FINISHED:
            return None
        job.state = WORKING
        job.since_ms = self._clock.monotonic_ms()
        handler = self._handlers.find(job)
        if handler is None:
            raise no_handler(job)
        return handler.function(job)

    def _returned_in_thread(self, job: Job) -> None:
        if isinstance(job, list) or job.again is not None:
            self._ran_in_thread(Result(job, None, None))
        elif job.state != WAITING:
            work = cast(ProcessQueue, job.owner)
            work.busy_ms += self._clock.monotonic_ms() - job.since_ms
            work.finish_one(job)

    def _ran_in_thread(self, result: Result[Job]) -> None:
        messages = result.job if isinstance(result.job, list) else [result.job]
        work = cast(ProcessQueue, messages[0].owner)
        work.busy_ms += self._clock.monotonic_ms() - messages[0].since_ms
        if result.error is not None:
            self._session.spawn(self._failed(messages, result.error))
        else:
            self._session.spawn(self._settling.settle(messages, verdict(result.value)))


class _Turn:
    """Lets others on the loop have their turn."""

    def __await__(self) -> Generator[None, None, None]:
        yield
