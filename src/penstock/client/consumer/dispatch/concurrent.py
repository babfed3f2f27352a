"""Concurrent dispatch: many handlers at the same time, in no particular order.

Async handlers run in up to `concurrency` worker tasks, other handlers in as many threads. A worker
handles many messages in a row, without a task, a future or a loop iteration for each. It wakes
another worker while more messages are waiting, so a slow message does not delay the others.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Generator, Iterable
from typing import Protocol, cast

from penstock.client.client_session import Session
from penstock.client.consumer.dispatch.completion import Completion
from penstock.client.consumer.dispatch.handler_calls import (
    HandlerCalls,
    ends_task,
    mark_handling,
)
from penstock.client.consumer.dispatch.handler_threads import HandlerThreads, Result
from penstock.client.consumer.dispatch.handlers import Handler, Handlers, Retry, retry_from_result
from penstock.client.consumer.dispatch.message_runs import (
    finish,
    finish_returned,
    no_handler_error,
    start,
)
from penstock.client.consumer.process_queue import ProcessQueue, process_queue_of
from penstock.client.received_message import FINISHED, HANDLING, ReceivedMessage
from penstock.clock import finish_within

log = logging.getLogger(__name__)

MESSAGES_PER_TURN = 128
"""Messages that a worker handles before it yields to the event loop."""
CANCEL_MS = 1_000
"""How long to wait for cancelled handlers."""

Job = ReceivedMessage | list[ReceivedMessage]


class Dispatch(Protocol):
    """Passes the messages of a consumer to handlers or iterators."""

    def submit(self, process_queue: ProcessQueue, messages: list[ReceivedMessage]) -> None:
        """Dispatch messages that were just added to their process queue."""

    async def stop(self, process_queue: ProcessQueue) -> None:
        """Return when another consumer may take over a dropped queue."""

    async def close(self, drain_ms: int) -> None:
        """Start no more handlers, and wait up to `drain_ms` for running ones."""


class ConcurrentDispatch:
    """Runs up to `concurrency` async handlers and as many others in threads."""

    def __init__(
        self,
        session: Session,
        handlers: Handlers,
        calls: HandlerCalls,
        completion: Completion,
        *,
        name: str,
        concurrency: int,
        handle_batch: int = 1,
    ) -> None:
        self._session = session
        self._clock = session.clock
        self._handlers = handlers
        self._calls = calls
        self._completion = completion
        self._concurrency = concurrency
        self._batch = handle_batch
        self._jobs: deque[Job] = deque()
        self._idle: deque[asyncio.Future[None]] = deque()  # workers that wait for jobs
        self._waking = False  # a worker was woken or started and has not taken a job yet
        self._closing = False
        self._workers: set[asyncio.Task[None]] = set()
        self._completions: set[asyncio.Task[object]] = set()  # of messages handled in threads
        self._threads: HandlerThreads[Job] = HandlerThreads(
            name,
            concurrency,
            run=self._run_in_thread,
            done=self._thread_done,
            returned_none=self._threads_returned_none,
        )

    def submit(self, process_queue: ProcessQueue, messages: list[ReceivedMessage]) -> None:
        self._enqueue(messages)

    async def stop(self, process_queue: ProcessQueue) -> None:
        """Discard messages whose handler has not started. Running handlers continue, and their
        results are ignored."""

        def unwanted(job: Job) -> bool:
            first = job[0] if isinstance(job, list) else job
            return first.process_queue is process_queue

        kept = [job for job in self._jobs if not unwanted(job)]
        self._jobs.clear()
        self._jobs.extend(kept)
        self._threads.discard(unwanted)

    async def close(self, drain_ms: int) -> None:
        """Start no more handlers, and wait up to `drain_ms` for running ones, and for as long until
        their failed messages are sent back: what is not would be delivered twice."""
        self._closing = True
        self._jobs.clear()
        while self._idle:
            self._wake_worker()
        threads = asyncio.ensure_future(self._threads.close(self._clock, drain_ms))
        left = await self._end_workers(drain_ms) + await threads
        if self._completions:
            with contextlib.suppress(TimeoutError):
                await finish_within(self._clock, drain_ms, asyncio.wait(self._completions))
        if left:
            log.warning(
                "%d handlers have not returned within %d ms; their messages are redelivered",
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
                await finish_within(self._clock, CANCEL_MS, asyncio.wait(late))
        return len(late)

    # --- to tasks or to threads

    def _enqueue(self, messages: list[ReceivedMessage]) -> None:
        if self._closing:
            return
        if self._calls.observed or not self._handlers.any(is_async=False):
            self._enqueue_for_tasks(self._split(messages))
        elif not self._handlers.any(is_async=True):
            self._threads.submit(self._split(messages))
        else:
            kinds: dict[bool, list[ReceivedMessage]] = {False: [], True: []}
            for message in messages:
                handler = self._handlers.find(message)
                kinds[handler is None or handler.is_async].append(message)
            self._enqueue_for_tasks(self._split(kinds[True]))
            self._threads.submit(self._split(kinds[False]))

    def _split(self, messages: list[ReceivedMessage]) -> Iterable[Job]:
        """Jobs of up to `handle_batch` messages, each for one handler."""
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

    def _enqueue_for_tasks(self, jobs: Iterable[Job]) -> None:
        self._jobs.extend(jobs)
        if self._jobs and not self._waking:
            self._wake_worker()

    def _wake_worker(self) -> None:
        """Wake or start another worker."""
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
            log.error("a worker task failed and is replaced", exc_info=error)
        if self._jobs:
            self._wake_worker()

    async def _work(self) -> None:
        mark_handling(self._completion)
        jobs = self._jobs
        self._waking = False
        while not self._closing:
            if not jobs:
                sleeper = asyncio.get_running_loop().create_future()
                self._idle.append(sleeper)
                await sleeper
                self._waking = False
                continue
            await self._handle_jobs(MESSAGES_PER_TURN)
            if jobs:
                await _YieldToLoop()

    async def _handle_jobs(self, count_max: int) -> None:
        """Handle up to `count_max` jobs."""
        jobs, monotonic_ms, handlers = self._jobs, self._clock.monotonic_ms, self._handlers
        observed = self._calls.observed
        now_ms = monotonic_ms()
        for _ in range(count_max):
            if not jobs:
                return
            job = jobs.popleft()
            if jobs and not self._waking:
                self._wake_worker()
            if observed or isinstance(job, list):
                await self._handle(job if isinstance(job, list) else [job])
                now_ms = monotonic_ms()
                continue
            try:
                function = start(job, handlers, now_ms)
                if function is None:
                    continue
                result = await cast(Awaitable[object], function(job))
            except BaseException as error:
                if ends_task(error):
                    raise
                self._count_time(job)
                await self._failed([job], error)
            else:
                now_ms = monotonic_ms()
                if finish(job, result, now_ms):
                    continue
                await self._completion.complete((job,), retry_from_result(result))
            now_ms = monotonic_ms()

    async def _handle(self, messages: list[ReceivedMessage]) -> None:
        """Handle a list of messages, or messages of an observed consumer."""
        messages = self._mark_handling(messages)
        if messages:
            await self._completion.complete(messages, await self._calls.handle(messages))
            self._count_time(messages[0])

    async def _failed(self, messages: list[ReceivedMessage], error: BaseException) -> None:
        self._completion.log_failure(messages, error)
        await self._completion.complete(messages, Retry())

    def _mark_handling(self, messages: list[ReceivedMessage]) -> list[ReceivedMessage]:
        """Set the state HANDLING; returns the messages that still have to be handled."""
        now_ms = self._clock.monotonic_ms()
        handling = []
        for message in messages:
            if not process_queue_of(message).dropped and message.state != FINISHED:
                message.state = HANDLING
                message.handling_since_ms = now_ms
                handling.append(message)
        return handling

    def _count_time(self, message: ReceivedMessage) -> None:
        spent_ms = self._clock.monotonic_ms() - message.handling_since_ms
        process_queue_of(message).busy_ms += spent_ms

    # --- threads

    def _run_in_thread(self, job: Job) -> object:
        if isinstance(job, list):
            messages = self._mark_handling(job)
            if not messages:
                return None
            handler = self._handlers.find(messages[0])
            if handler is None:
                raise no_handler_error(messages[0])
            return handler.function(handler.argument(messages))
        function = start(job, self._handlers, self._clock.monotonic_ms())
        return None if function is None else function(job)

    def _threads_returned_none(self, jobs: deque[Job]) -> None:
        finish_returned(jobs, self._clock.monotonic_ms(), self._thread_returned_none)

    def _thread_returned_none(self, job: Job) -> None:
        self._thread_done(Result(job, None, None))

    def _thread_done(self, result: Result[Job]) -> None:
        messages = result.job if isinstance(result.job, list) else [result.job]
        self._count_time(messages[0])
        if result.error is not None:
            completion = self._failed(messages, result.error)
        else:
            completion = self._completion.complete(messages, retry_from_result(result.value))
        task = self._session.spawn(completion)
        self._completions.add(task)
        task.add_done_callback(self._completions.discard)


class _YieldToLoop:
    """Awaiting it runs one iteration of the event loop."""

    def __await__(self) -> Generator[None, None, None]:
        yield
